//! Enhanced connection establishment (ECE): options of a connection that vendors add to the specification.
//!
//! Pairs with `ibv_set_ece` of rdma-core, and with `ece_options` of the mlx5 driver.

use std::sync::atomic::{AtomicU32, Ordering};

/// Enhanced connection establishment: options beyond the specification that devices of one vendor have in common.
///
/// A queue pair of mlx5 reports the options of its device ([`query_ece`](crate::QpControl::query_ece)), and takes
/// those that both devices have ([`set_ece`](crate::QpControl::set_ece)). The messages of the [connection
/// manager](crate::cm) carry them.
#[doc(alias("ibv_ece", "rdma_ucm_ece"))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ece {
    /// The vendor, as an IEEE identifier of 24 bits: `0x15b3` is that of mlx5. 0 stands for none.
    pub vendor_id: u32,
    /// The options, whose meaning is the vendor's.
    pub options: u32,
}

/// The ECE options of a queue pair: those that its device offers, and those agreed with the peer.
#[derive(Debug)]
pub(crate) struct EceState {
    /// The options that the device offers.
    offered: Ece,
    /// The options that the next `MODIFY_QP` carries to the device; 0 for none.
    asked: AtomicU32,
    /// The options that the device took, or those it offers if it was not asked to take any.
    options: AtomicU32,
}

impl EceState {
    pub(crate) fn new(offered: Ece) -> EceState {
        EceState { offered, asked: AtomicU32::new(0), options: AtomicU32::new(offered.options) }
    }

    pub(crate) fn get(&self) -> Ece {
        Ece { options: self.options.load(Ordering::Relaxed), ..self.offered }
    }

    /// The next `MODIFY_QP` carries these options to the device. Returns the old values for
    /// [`restore`](Self::restore).
    ///
    /// The two values are not swapped as one: the caller holds the queue pair's lock of changes
    /// (`QpInner::moving`), as everything that changes them does.
    pub(crate) fn ask(&self, options: u32) -> [u32; 2] {
        [(&self.asked, options), (&self.options, 0)]
            .map(|(at, new)| at.swap(new, Ordering::Relaxed))
    }

    /// Undoes an [`ask`](Self::ask) whose `MODIFY_QP` failed.
    pub(crate) fn restore(&self, [asked, options]: [u32; 2]) {
        self.asked.store(asked, Ordering::Relaxed);
        self.options.store(options, Ordering::Relaxed);
    }

    /// The options that the next `MODIFY_QP` carries; 0 for none.
    pub(crate) fn asked(&self) -> u32 {
        self.asked.load(Ordering::Relaxed)
    }

    /// Notes the options that the device took.
    pub(crate) fn grant(&self, options: u32) {
        self.asked.store(0, Ordering::Relaxed);
        self.options.store(options, Ordering::Relaxed);
    }

    /// The queue pair is in `RESET`, and has agreed on nothing.
    pub(crate) fn reset(&self) {
        self.grant(self.offered.options);
    }
}
