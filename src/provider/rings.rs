//! The queues of all providers: an enum for each kind of queue, matched once for each request or completion,
//! and where a batch begins and is rung.

use super::rxe::retired::Retirements;
use super::{mlx5, rxe};
use crate::memory::gate::Gate;
use crate::memory::rxe_queue::ProducerWatch;
use crate::memory::wqebb::WqebbOffset;
use std::sync::Arc;
use uverbs_uapi::wc::ib_uverbs_wc;

/// A queue pair, or a shared receive queue of an XRC domain, as its completion queues identify it.
#[derive(Clone, Debug)]
pub(crate) enum Member {
    Rxe {
        qpn: u32,
    },
    Mlx5(Arc<mlx5::wr_ids::SharedQp>),
    /// An object that has no completions.
    None,
}

impl Member {
    /// The number by which completions name it: the QPN on rxe, the user index on mlx5.
    pub(crate) fn number(&self) -> Option<u32> {
        match self {
            Member::Rxe { qpn } => Some(*qpn),
            Member::Mlx5(qp) => Some(qp.uidx().get()),
            Member::None => None,
        }
    }

    /// Whether the kernel may give the number to another queue pair as soon as this one is destroyed.
    pub(crate) fn is_numbered_by_the_kernel(&self) -> bool {
        match self {
            Member::Rxe { .. } => true,
            Member::Mlx5(_) | Member::None => false,
        }
    }
}

/// The control path's side of a completion queue: tells its poller which queue pairs come and go.
#[derive(Clone, Debug)]
pub(crate) enum CqMembers {
    Rxe(Arc<Retirements<ProducerWatch>>),
    Mlx5(Arc<mlx5::qp_table::QpRegistry>),
}

impl CqMembers {
    /// Tells the poller of a new queue pair, before anything is posted to it.
    pub(crate) fn attach(&self, member: &Member) {
        // A completion of rxe carries everything that its poller needs.
        match (self, member) {
            (CqMembers::Mlx5(registry), Member::Mlx5(qp)) => registry.attach(qp),
            (CqMembers::Rxe(_) | CqMembers::Mlx5(_), _) => {}
        }
    }

    /// Tells the poller that a queue pair is destroyed and completes nothing more.
    pub(crate) fn retire(&self, member: &Member) {
        match (self, member) {
            (CqMembers::Rxe(retirements), Member::Rxe { qpn }) => retirements.retire(*qpn),
            (CqMembers::Mlx5(registry), Member::Mlx5(qp)) => registry.retire(qp),
            (CqMembers::Rxe(_) | CqMembers::Mlx5(_), _) => {}
        }
    }

    /// As [`retire`](Self::retire) for a queue pair that could not be destroyed: requests of it may complete at
    /// any time, so its number is never used again.
    pub(crate) fn retire_for_good(&self, member: &Member) {
        match (self, member) {
            (CqMembers::Rxe(retirements), Member::Rxe { qpn }) => retirements.retire_for_good(*qpn),
            (CqMembers::Mlx5(registry), Member::Mlx5(qp)) => registry.retire_for_good(qp),
            (CqMembers::Rxe(_) | CqMembers::Mlx5(_), _) => {}
        }
    }
}

/// The consumer's side of a completion queue.
#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "a box would cost each poll a load")]
pub(crate) enum CqRing {
    Rxe(rxe::cq::RxeCq),
    Mlx5(mlx5::cq::Mlx5Cq),
}

impl CqRing {
    /// Its level says whether the poller has to [catch up](Self::catch_up) before it polls; shut in a forked
    /// child.
    pub(crate) fn gate(&self) -> &Gate {
        match self {
            CqRing::Rxe(cq) => cq.poll_gate().gate(),
            CqRing::Mlx5(cq) => cq.poll_gate().gate(),
        }
    }

    /// Reads which queue pairs the control path attached and retired. Not to be called in a forked child.
    pub(crate) fn catch_up(&mut self) {
        match self {
            CqRing::Rxe(cq) => cq.catch_up(),
            CqRing::Mlx5(cq) => cq.catch_up(),
        }
    }

    /// Has the next poll catch up again.
    pub(crate) fn mark_dirty(&self) {
        match self {
            CqRing::Rxe(cq) => cq.poll_gate().mark_dirty(),
            CqRing::Mlx5(cq) => cq.poll_gate().mark_dirty(),
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

    /// Gives consumed CQEs back to the device. Not to be called in a forked child.
    #[inline(always)]
    pub(crate) fn release(&mut self) {
        match self {
            CqRing::Rxe(cq) => cq.release(),
            CqRing::Mlx5(cq) => cq.release(),
        }
    }

    /// Drops the updates of queue pairs that were attached and retired while nobody polled. Called when a queue
    /// pair is created, so that updates of a queue that is never polled do not pile up.
    pub(crate) fn compact_updates(&self) {
        match self {
            // On rxe only queue pairs with completions in the queue leave an update.
            CqRing::Rxe(_) => {}
            CqRing::Mlx5(cq) => cq.compact_updates(),
        }
    }

    /// The control path's side.
    pub(crate) fn members(&self) -> CqMembers {
        match self {
            CqRing::Rxe(cq) => CqMembers::Rxe(cq.retirements().clone()),
            CqRing::Mlx5(cq) => CqMembers::Mlx5(cq.registry().clone()),
        }
    }

    /// Discards the completions in the queue of a queue pair that is reset or destroyed.
    pub(crate) fn purge(&mut self, member: &Member) {
        match (self, member) {
            (CqRing::Rxe(cq), Member::Rxe { qpn }) => cq.purge(*qpn),
            (CqRing::Mlx5(cq), Member::Mlx5(shared)) => cq.purge(shared),
            (CqRing::Rxe(_) | CqRing::Mlx5(_), _) => {}
        }
    }

    /// How many completions the queue can hold.
    pub(crate) fn capacity(&self) -> u32 {
        match self {
            CqRing::Rxe(cq) => cq.capacity(),
            CqRing::Mlx5(cq) => cq.capacity(),
        }
    }
}

/// A completion in its ring.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ProviderWc<'r> {
    Rxe(&'r ib_uverbs_wc),
    Mlx5(mlx5::cqe::Mlx5Wc<'r>),
}

/// The position of a batch of sends. The queue's own producer index moves only when the batch is rung.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SendCursor {
    /// Producer index: on rxe the slot, on mlx5 the WQEBB of the next WQE (`cur_post` of libmlx5).
    pub(crate) at: u32,
    /// How many WQEs still fit.
    pub(crate) room: u32,
    /// On mlx5 the number of the next WQE (`head` of libmlx5).
    pub(crate) head: u32,
    /// On mlx5 the first WQEBB of the newest WQE.
    pub(crate) newest: WqebbOffset,
    /// On mlx5 the first eight bytes of the newest WQE, which the doorbell register takes.
    pub(crate) word: u64,
}

/// The position of a batch of receives.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RecvCursor {
    /// The slot of the next WQE.
    pub(crate) at: u32,
    /// How many WQEs still fit.
    pub(crate) room: u32,
    /// In a shared receive queue of mlx5, the slot of the WQE after it in the list of free WQEs.
    pub(crate) free: u32,
}

/// A send queue, as its poster uses it.
#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "a box would cost each request a load")]
pub(crate) enum SendRing {
    Rxe(rxe::sq::RxeSq),
    Mlx5(mlx5::sq::Mlx5Sq),
}

impl SendRing {
    /// Its level says which sends the queue pair's state allows; shut in a forked child.
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

    /// Starts again at the beginning, after the kernel reset the queue pair.
    pub(crate) fn reset(&mut self) {
        match self {
            // The kernel consumed the queue up to the producer index.
            SendRing::Rxe(_) => {}
            SendRing::Mlx5(sq) => sq.reset(),
        }
    }
}

/// The send queue that a batch is posted to.
#[derive(Debug)]
pub(crate) enum SendRingMut<'q> {
    Rxe(&'q mut rxe::sq::RxeSq),
    Mlx5(&'q mut mlx5::sq::Mlx5Sq),
}

/// A queue pair's receive queue, as its poster uses it.
#[derive(Debug)]
pub(crate) enum RecvRing {
    Rxe(rxe::rq::RxeRq),
    Mlx5(mlx5::rq::Mlx5Rq),
}

impl RecvRing {
    /// Its level says whether the queue pair's state allows receives; shut in a forked child.
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

    /// Starts again at the beginning, after the kernel reset the queue pair.
    pub(crate) fn reset(&mut self) {
        match self {
            // The kernel consumed the queue up to the producer index.
            RecvRing::Rxe(_) => {}
            RecvRing::Mlx5(rq) => rq.reset(),
        }
    }
}

/// A shared receive queue, as its poster uses it.
#[derive(Debug)]
pub(crate) enum SrqRing {
    Rxe(rxe::rq::RxeRq),
    Mlx5(mlx5::srq::Mlx5Srq),
}

impl SrqRing {
    /// Open in the process that created the queue; shut in a forked child.
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
    /// The receive queue of a queue pair, or a shared one.
    Rxe(&'q mut rxe::rq::RxeRq),
    Mlx5(&'q mut mlx5::rq::Mlx5Rq),
    Mlx5Srq(&'q mut mlx5::srq::Mlx5Srq),
}

/// The shared receive queue of a queue pair, as far as the queue pair's rings use it.
#[derive(Clone, Debug)]
pub(crate) enum SharedReceives {
    Rxe,
    Mlx5(Arc<mlx5::srq_wr_ids::SrqWrIds>),
}

/// The resources of a queue that the device may use until the queue is destroyed: memory, doorbell records,
/// doorbell registers.
#[derive(Debug, Default)]
pub(crate) enum QueueResources {
    /// Those of rxe belong to the kernel.
    #[default]
    None,
    Mlx5(mlx5::resources::Mlx5Resources),
}

impl QueueResources {
    /// The resources of a queue of mlx5.
    pub(crate) fn mlx5(&self) -> Option<&mlx5::resources::Mlx5Resources> {
        match self {
            QueueResources::Mlx5(resources) => Some(resources),
            QueueResources::None => None,
        }
    }
}
