//! Which address handles the requests of a send queue name.
//!
//! A WQE of rxe names its address handle by number, and the kernel resolves the number when it
//! carries the WQE out (`rxe_get_av`), not when it is posted. Numbers are dealt in a circle of 32767
//! for the whole device. So an address handle is destroyed only when no WQE names it any more, or a datagram
//! could go to the destination of another handle.

use crate::error::{Error, Result};
use crate::memory::rxe_queue::{ProducerWatch, RxeQueue};
use crate::provider::driver_response::DriverResponse;
use crate::wr::Address;
use rustix::io::Errno;
use std::sync::atomic::{AtomicU32, Ordering};
use uverbs_uapi::rxe::rxe_create_ah_resp;

/// The number by which WQEs name an address handle, of the driver's response to its creation.
///
/// # Errors
///
/// `EOPNOTSUPP` for no number, as before Linux 5.16: there a WQE has the whole address, with the peer's
/// hardware address, which the driver resolves and does not tell.
pub(crate) fn address(verb: &'static str, response: &DriverResponse) -> Result<Address> {
    // The driver deals numbers from 1 on.
    match response.read::<rxe_create_ah_resp>().ah_num {
        0 => Err(Error::new(verb, Errno::OPNOTSUPP).detail(
            "this kernel's soft-RoCE does not number address handles: datagrams need Linux 5.16 or later; \
             connected queue pairs need no address handle",
        )),
        ah_num => Ok(Address::Rxe { ah_num }),
    }
}

/// What a send queue's poster keeps for the control path. The poster alone writes it.
#[derive(Debug)]
pub(crate) struct NamedAddresses {
    watch: ProducerWatch,
    /// The number that the WQE in each slot names.
    numbers: Box<[AtomicU32]>,
    /// The slot after the newest WQE, which may not be published yet.
    end: AtomicU32,
}

impl NamedAddresses {
    pub(crate) fn new(ring: &RxeQueue, producer: u32) -> NamedAddresses {
        let numbers = (0..=ring.capacity()).map(|_| AtomicU32::new(0)).collect();
        NamedAddresses { watch: ring.watch(), numbers, end: AtomicU32::new(producer) }
    }

    /// The WQE in `slot` names `number`.
    #[inline]
    pub(super) fn set(&self, slot: u32, number: u32) {
        if let Some(place) = self.numbers.get(slot as usize) {
            place.store(number, Ordering::Relaxed);
        }
        // Release pairs with the Acquire in `each`: a reader that sees the end sees the numbers before it.
        self.end.store(slot.wrapping_add(1) & self.watch.mask(), Ordering::Release);
    }

    /// A batch begins at `slot`: nothing beyond it is written.
    #[inline]
    pub(super) fn begin(&self, slot: u32) {
        self.end.store(slot, Ordering::Release);
    }

    /// Visits the numbers that WQEs name which the kernel has not completed.
    ///
    /// The owner of a handle drops it after the last request that names it, so this finds every WQE that names
    /// a handle of the caller. The kernel completes WQEs meanwhile: some that are visited may be over.
    pub(crate) fn each(&self, mut visit: impl FnMut(u32)) {
        let end = self.end.load(Ordering::Acquire);
        let mut slot = self.watch.consumer();
        while slot != end {
            if let Some(number) = self.numbers.get(slot as usize) {
                visit(number.load(Ordering::Relaxed));
            }
            slot = slot.wrapping_add(1) & self.watch.mask();
        }
    }
}
