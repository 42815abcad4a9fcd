//! The queues of all providers: an enum for each kind of queue, matched once per verb.

use super::rxe::retired::Retirements;
use super::{mlx5, rxe};
use crate::memory::gate::Gate;
use crate::memory::rxe_queue::ProducerWatch;
use crate::memory::wqebb::WqebbOffset;
use crate::wr::PostError;
use std::sync::Arc;
use uverbs_uapi::wc::ib_uverbs_wc;

/// A queue pair, or a shared receive queue of an XRC domain, as its completion queues know it.
#[derive(Clone, Debug)]
pub(crate) enum Member {
    Rxe {
        qpn: u32,
    },
    Mlx5(Arc<mlx5::wr_ids::SharedQp>),
    /// Nobody that completes anything.
    None,
}

impl Member {
    /// By which completions say whose they are; `None` where there are none.
    pub(crate) fn number(&self) -> Option<u32> {
        match self {
            Member::Rxe { qpn } => Some(*qpn),
            Member::Mlx5(record) => Some(record.index().number()),
            Member::None => None,
        }
    }

    /// Whether the kernel may give the number to another queue pair as soon as this one is gone.
    pub(crate) fn is_numbered_by_the_kernel(&self) -> bool {
        matches!(self, Member::Rxe { .. })
    }
}

/// Where the poller of a completion queue is told of queue pairs.
#[derive(Clone, Debug)]
pub(crate) enum CqMembers {
    Rxe(Arc<Retirements<ProducerWatch>>),
    Mlx5(Arc<mlx5::qp_table::QpRegistry>),
}

impl CqMembers {
    /// Tells of a queue pair, before anything is posted to it.
    pub(crate) fn attach(&self, member: &Member) {
        // Completions of rxe say all that there is to know.
        if let (CqMembers::Mlx5(members), Member::Mlx5(record)) = (self, member) {
            members.attach(record);
        }
    }

    /// Tells that a queue pair, which is destroyed, completes nothing more.
    pub(crate) fn retire(&self, member: &Member) {
        match (self, member) {
            (CqMembers::Rxe(retirements), Member::Rxe { qpn }) => retirements.retire(*qpn),
            (CqMembers::Mlx5(members), Member::Mlx5(record)) => members.retire(record),
            _ => {}
        }
    }

    /// As [`retire`](Self::retire) for a queue pair that could not be destroyed, and may complete
    /// something for ever.
    pub(crate) fn retire_for_good(&self, member: &Member) {
        match (self, member) {
            (CqMembers::Rxe(retirements), Member::Rxe { qpn }) => retirements.retire_for_good(*qpn),
            (CqMembers::Mlx5(members), Member::Mlx5(record)) => members.retire_for_good(record),
            _ => {}
        }
    }
}

/// The consumer's side of a completion queue.
#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "a box would cost each poll a load")]
pub(crate) enum CqRing {
    Rxe(rxe::cq::CqRing),
    Mlx5(mlx5::cq::CqRing),
}

impl CqRing {
    /// Whether the poller has to [catch up](Self::catch_up) before it polls; shut in a forked child.
    pub(crate) fn gate(&self) -> &Gate {
        match self {
            CqRing::Rxe(cq) => cq.poll_gate().gate(),
            CqRing::Mlx5(cq) => cq.poll_gate().gate(),
        }
    }

    /// Reads what the control path told of queue pairs. Not to be called in a forked child.
    pub(crate) fn catch_up(&mut self) {
        match self {
            CqRing::Rxe(cq) => cq.catch_up(),
            CqRing::Mlx5(cq) => cq.catch_up(),
        }
    }

    /// The next completion of a queue pair that is alive, consumed.
    #[inline(always)]
    pub(crate) fn next(&mut self) -> Option<ProviderWc<'_>> {
        match self {
            CqRing::Rxe(cq) => cq.next().map(ProviderWc::Rxe),
            CqRing::Mlx5(cq) => cq.next().map(ProviderWc::Mlx5),
        }
    }

    /// Gives consumed entries back to the device. Not to be called in a forked child.
    #[inline(always)]
    pub(crate) fn release(&mut self) {
        match self {
            CqRing::Rxe(cq) => cq.release(),
            CqRing::Mlx5(cq) => cq.release(),
        }
    }

    /// Throws away updates of queue pairs that came and went while nobody polled: to be called when a
    /// queue pair is created.
    pub(crate) fn tidy(&self) {
        match self {
            // Only queue pairs with completions in the queue leave an update.
            CqRing::Rxe(_) => {}
            CqRing::Mlx5(cq) => cq.tidy(),
        }
    }

    /// Where the control path tells of queue pairs.
    pub(crate) fn members(&self) -> CqMembers {
        match self {
            CqRing::Rxe(cq) => CqMembers::Rxe(cq.retirements().clone()),
            CqRing::Mlx5(cq) => CqMembers::Mlx5(cq.members().clone()),
        }
    }

    /// Discards what the queue holds of a queue pair that cannot complete anything more.
    pub(crate) fn purge(&mut self, member: &Member) {
        match (self, member) {
            (CqRing::Rxe(cq), Member::Rxe { qpn }) => cq.purge(*qpn),
            (CqRing::Mlx5(cq), Member::Mlx5(shared)) => cq.purge(shared),
            _ => {}
        }
    }

    /// How many completions the queue holds for certain.
    pub(crate) fn capacity(&self) -> u32 {
        match self {
            CqRing::Rxe(cq) => cq.capacity(),
            CqRing::Mlx5(cq) => cq.capacity(),
        }
    }
}

/// A completion as its ring holds it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ProviderWc<'r> {
    Rxe(&'r ib_uverbs_wc),
    Mlx5(mlx5::cqe::Mlx5Wc<'r>),
}

/// Where a batch of sends stands: the queue's own indices move when the batch is rung.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SendCursor {
    /// Producer index: the slot, or the WQEBB, of the next WQE.
    pub(crate) at: u32,
    /// WQEs that still fit.
    pub(crate) room: u32,
    /// The number of the next WQE, where WQEs are of several WQEBBs.
    pub(crate) head: u32,
    /// The first WQEBB of the newest WQE.
    pub(crate) newest: WqebbOffset,
    /// The first eight bytes of the newest WQE, which a doorbell takes.
    pub(crate) word: u64,
}

/// Where a batch of receives stands.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RecvCursor {
    /// The slot of the next WQE.
    pub(crate) at: u32,
    /// WQEs that still fit.
    pub(crate) room: u32,
    /// The slot of the WQE behind it, in a shared receive queue of mlx5.
    pub(crate) free: u32,
}

impl RecvCursor {
    /// Hands a copy to what is out of line, and takes it over if that succeeds: the cursor itself need not
    /// be in memory then.
    #[inline(always)]
    pub(crate) fn through(
        &mut self,
        out_of_line: impl FnOnce(&mut RecvCursor) -> Result<(), PostError>,
    ) -> Result<(), PostError> {
        // Field by field: the compiler otherwise keeps two of them in one register.
        let mut copy = RecvCursor { at: self.at, room: self.room, free: self.free };
        out_of_line(&mut copy)?;
        (self.at, self.room, self.free) = (copy.at, copy.room, copy.free);
        Ok(())
    }
}

/// The producer's side of a send queue.
#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "a box would cost each request a load")]
pub(crate) enum SendRing {
    Rxe(rxe::sq::SendRing),
    Mlx5(mlx5::sq::SendRing),
}

impl SendRing {
    /// Tells by its level which sends may be posted here and now.
    pub(crate) fn gate(&self) -> &Gate {
        match self {
            SendRing::Rxe(sq) => sq.gate(),
            SendRing::Mlx5(sq) => sq.gate(),
        }
    }

    /// Begins a batch.
    #[inline(always)]
    pub(crate) fn begin(&mut self) -> (SendRingMut<'_>, SendCursor) {
        match self {
            SendRing::Rxe(sq) => {
                let (at, room) = sq.begin();
                (SendRingMut::Rxe(sq), SendCursor { at, room, ..SendCursor::default() })
            }
            SendRing::Mlx5(sq) => {
                let cursor = sq.begin();
                (SendRingMut::Mlx5(sq), cursor)
            }
        }
    }

    /// Begins anew after the kernel reset the queue pair.
    pub(crate) fn reset(&mut self) {
        match self {
            // The kernel drained the queue up to the producer index.
            SendRing::Rxe(_) => {}
            SendRing::Mlx5(sq) => sq.reset(),
        }
    }
}

/// The send queue that a batch is posted to.
#[derive(Debug)]
pub(crate) enum SendRingMut<'q> {
    Rxe(&'q mut rxe::sq::SendRing),
    Mlx5(&'q mut mlx5::sq::SendRing),
}

/// The producer's side of a queue pair's receive queue.
#[derive(Debug)]
pub(crate) enum RecvRing {
    Rxe(rxe::rq::RecvRing),
    Mlx5(mlx5::rq::RecvRing),
}

impl RecvRing {
    /// Tells by its level which receives may be posted here and now.
    pub(crate) fn gate(&self) -> &Gate {
        match self {
            RecvRing::Rxe(rq) => rq.gate(),
            RecvRing::Mlx5(rq) => rq.gate(),
        }
    }

    /// Begins a batch.
    #[inline(always)]
    pub(crate) fn begin(&mut self) -> (RecvRingMut<'_>, RecvCursor) {
        match self {
            RecvRing::Rxe(rq) => {
                let (at, room) = rq.begin();
                (RecvRingMut::Rxe(rq), RecvCursor { at, room, ..RecvCursor::default() })
            }
            RecvRing::Mlx5(rq) => {
                let cursor = rq.begin();
                (RecvRingMut::Mlx5(rq), cursor)
            }
        }
    }

    /// Begins anew after the kernel reset the queue pair.
    pub(crate) fn reset(&mut self) {
        match self {
            // The kernel drained the queue up to the producer index.
            RecvRing::Rxe(_) => {}
            RecvRing::Mlx5(rq) => rq.reset(),
        }
    }
}

/// The producer's side of a shared receive queue.
#[derive(Debug)]
pub(crate) enum SrqRing {
    Rxe(rxe::rq::RecvRing),
    Mlx5(mlx5::srq::SrqRing),
}

impl SrqRing {
    /// Open in the process that made the queue.
    pub(crate) fn gate(&self) -> &Gate {
        match self {
            SrqRing::Rxe(rq) => rq.gate(),
            SrqRing::Mlx5(srq) => srq.gate(),
        }
    }

    /// Begins a batch. Not to be called in a forked child.
    #[inline(always)]
    pub(crate) fn begin(&mut self) -> (RecvRingMut<'_>, RecvCursor) {
        match self {
            SrqRing::Rxe(rq) => {
                let (at, room) = rq.begin();
                (RecvRingMut::Rxe(rq), RecvCursor { at, room, ..RecvCursor::default() })
            }
            SrqRing::Mlx5(srq) => {
                let cursor = srq.begin();
                (RecvRingMut::Mlx5Srq(srq), cursor)
            }
        }
    }

    /// How many WQEs the queue holds.
    pub(crate) fn capacity(&self) -> u32 {
        match self {
            SrqRing::Rxe(rq) => rq.capacity(),
            SrqRing::Mlx5(srq) => srq.capacity(),
        }
    }

    /// Whether nothing was ever posted.
    pub(crate) fn is_fresh(&self) -> bool {
        match self {
            SrqRing::Rxe(rq) => rq.is_fresh(),
            SrqRing::Mlx5(srq) => srq.is_fresh(),
        }
    }
}

/// The receive queue that a batch is posted to.
#[derive(Debug)]
pub(crate) enum RecvRingMut<'q> {
    /// Of a queue pair or shared.
    Rxe(&'q mut rxe::rq::RecvRing),
    Mlx5(&'q mut mlx5::rq::RecvRing),
    Mlx5Srq(&'q mut mlx5::srq::SrqRing),
}

/// What a queue pair has to know of the shared receive queue that it takes receives from.
#[derive(Clone, Debug)]
pub(crate) enum SharedReceives {
    Rxe,
    Mlx5(Arc<mlx5::srq::SrqWrIds>),
}

/// What a kernel object stands on: memory that a device may reach, and what the device knows it by.
#[derive(Debug, Default)]
pub(crate) enum QueueResources {
    /// The queues are the kernel's.
    #[default]
    None,
    Mlx5(mlx5::resources::QueueResources),
}

impl QueueResources {
    /// Those of a queue of mlx5.
    pub(crate) fn mlx5(&self) -> Option<&mlx5::resources::QueueResources> {
        match self {
            QueueResources::Mlx5(resources) => Some(resources),
            QueueResources::None => None,
        }
    }
}
