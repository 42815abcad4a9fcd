//! The rings of all drivers behind one face: what queues post to and poll.
//!
//! Each enum is matched once per call, and a batch makes few calls; the arms are the rings of
//! [`rxe`](super::rxe) and [`mlx5`](super::mlx5).

use super::rxe::retired::Retirements;
use super::{mlx5, rxe};
use crate::completion::Wc;
use crate::mem::dbrec::Gate;
use crate::mem::ring::ProducerWatch;
use crate::wr::{PostError, Recv, SendWr};
use rustix::io::Errno;
use std::sync::Arc;

/// A queue pair, or a shared receive queue of an XRC domain, as its completion queues know it.
#[derive(Debug)]
pub(crate) enum Member {
    Rxe {
        qpn: u32,
    },
    Mlx5(Arc<mlx5::record::Record>),
    /// Nobody that completes anything.
    None,
}

/// Where the poller of a completion queue is told of queue pairs.
#[derive(Clone, Debug)]
pub(crate) enum CqMembers {
    Rxe(Arc<Retirements<ProducerWatch>>),
    Mlx5(Arc<mlx5::book::Members>),
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
pub(crate) enum CqRing {
    Rxe(rxe::poller::Poller),
    Mlx5(mlx5::cq::CqRing),
}

impl CqRing {
    /// Bounds what the control path tells of queue pairs where nobody listens: to be called when one
    /// is made.
    pub(crate) fn tidy(&self) {
        match self {
            // Only what completed is told of.
            CqRing::Rxe(_) => {}
            CqRing::Mlx5(ring) => ring.tidy(),
        }
    }

    /// Where the control path tells of queue pairs.
    pub(crate) fn members(&self) -> CqMembers {
        match self {
            CqRing::Rxe(poller) => CqMembers::Rxe(poller.retirements().clone()),
            CqRing::Mlx5(ring) => CqMembers::Mlx5(ring.members().clone()),
        }
    }

    /// The next completion of a queue pair that is alive, consumed. With `fresh` the control path is
    /// listened to first: a poll has to do so once.
    #[inline(always)]
    pub(crate) fn next(&mut self, fresh: bool) -> Option<Wc<'_>> {
        match self {
            CqRing::Rxe(poller) => poller.next(fresh).map(Wc::Rxe),
            CqRing::Mlx5(ring) => ring.next(fresh).map(Wc::Mlx5),
        }
    }

    /// Gives consumed entries back to the device.
    #[inline(always)]
    pub(crate) fn release(&mut self) {
        match self {
            CqRing::Rxe(poller) => poller.release(),
            CqRing::Mlx5(ring) => ring.release(),
        }
    }

    /// Discards what the ring holds of a queue pair that cannot complete anything more.
    pub(crate) fn purge(&mut self, member: &Member) {
        match (self, member) {
            (CqRing::Rxe(poller), Member::Rxe { qpn }) => poller.purge(*qpn),
            (CqRing::Mlx5(ring), Member::Mlx5(record)) => ring.purge(record),
            _ => {}
        }
    }

    /// Lets `exchange` move the queue while nobody looks at it from beside.
    pub(crate) fn exchange<T, E>(
        &mut self,
        exchange: impl FnOnce(&mut CqRing) -> Result<T, E>,
    ) -> Result<T, E> {
        let (retirements, position) = match self {
            CqRing::Rxe(poller) => (poller.retirements().clone(), poller.position()),
            // Nobody ever looks.
            CqRing::Mlx5(_) => return exchange(self),
        };
        retirements.exchange(position, || {
            let answer = exchange(self)?;
            let moved = match self {
                CqRing::Rxe(poller) => Some(poller.watch()),
                CqRing::Mlx5(_) => None,
            };
            Ok((moved, answer))
        })
    }

    /// Completions that are there to be consumed.
    pub(crate) fn pending(&self) -> u32 {
        match self {
            CqRing::Rxe(poller) => poller.pending(),
            CqRing::Mlx5(ring) => ring.pending(),
        }
    }

    pub(crate) fn capacity(&self) -> u32 {
        match self {
            CqRing::Rxe(poller) => poller.capacity(),
            CqRing::Mlx5(ring) => ring.capacity(),
        }
    }
}

/// Where a batch in the making stands: the ring's own position moves only when it is published.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Cursor {
    /// The slot, or block, that the next request goes to.
    pub(crate) at: u32,
    /// Requests that still fit.
    pub(crate) room: u32,
    /// The number of the next request, where slots are not requests.
    pub(crate) head: u32,
    /// Where the newest request begins.
    pub(crate) last: u32,
    /// The size of the newest request, in the ring's units.
    pub(crate) size: u32,
    /// The first word of the newest request.
    pub(crate) word: u64,
    /// Flags of the next request, as they lie there.
    pub(crate) flags: u64,
}

/// The producer's side of a send queue.
#[derive(Debug)]
pub(crate) enum SendRing {
    Rxe(rxe::sq::SendRing),
    Mlx5(mlx5::sq::SendRing),
}

impl SendRing {
    /// As [`cursor`](Self::cursor) where the ring's gate says that the ring may be used; `None` where
    /// it does not, or where there is none.
    #[inline(always)]
    pub(crate) fn enter(&self, open: impl FnOnce(&Gate) -> bool) -> Option<Cursor> {
        match self {
            SendRing::Mlx5(ring) if open(ring.gate()) => Some(ring.cursor()),
            SendRing::Mlx5(_) | SendRing::Rxe(_) => None,
        }
    }

    /// Whether the ring's gate says that this is the process that made the ring.
    #[inline(always)]
    pub(crate) fn is_here(&self) -> bool {
        matches!(self, SendRing::Mlx5(ring) if !ring.gate().is_shut())
    }

    #[inline(always)]
    pub(crate) fn cursor(&self) -> Cursor {
        match self {
            SendRing::Rxe(ring) => ring.cursor(),
            SendRing::Mlx5(ring) => ring.cursor(),
        }
    }

    /// Writes a request where the cursor stands; after an error the cursor has not moved.
    #[inline(always)]
    pub(crate) fn push(&self, cursor: &mut Cursor, wr: &SendWr<'_>) -> Result<(), PostError> {
        match self {
            // Copies, lest the other arm keeps them in memory for this one.
            SendRing::Rxe(ring) => {
                let mut copy = *cursor;
                ring.push(&mut copy, &{ *wr })?;
                *cursor = copy;
                Ok(())
            }
            SendRing::Mlx5(ring) => ring.push(cursor, wr),
        }
    }

    /// As [`push`](Self::push), for a queue of raw packets.
    #[cold]
    pub(crate) fn push_packet(
        &self,
        cursor: &mut Cursor,
        wr: &SendWr<'_>,
    ) -> Result<(), PostError> {
        match self {
            SendRing::Rxe(_) => Err(PostError::Unsupported),
            SendRing::Mlx5(ring) => ring.push_packet(cursor, wr),
        }
    }

    /// Takes over where a cursor ended, shows its requests to the device, and makes it look. `single`
    /// if it is one request, which may go whole; `kick` rings a doorbell that is in the kernel.
    #[inline(always)]
    pub(crate) fn publish(
        &mut self,
        cursor: Cursor,
        single: bool,
        kick: impl FnOnce() -> Result<(), Errno>,
    ) -> Result<(), PostError> {
        match self {
            SendRing::Rxe(ring) => {
                ring.publish(cursor.at);
                kick().map_err(PostError::Kernel)
            }
            SendRing::Mlx5(ring) => {
                ring.publish(cursor, single);
                Ok(())
            }
        }
    }

    /// Begins anew after the kernel reset the queue pair.
    pub(crate) fn reset(&mut self) {
        match self {
            // The kernel drained the queue up to our index.
            SendRing::Rxe(_) => {}
            SendRing::Mlx5(ring) => ring.reset(),
        }
    }
}

/// The producer's side of a receive queue or shared receive queue.
#[derive(Debug)]
pub(crate) enum RecvRing {
    Rxe(rxe::rq::RecvRing),
    Mlx5(mlx5::rq::RecvRing),
    Mlx5Shared(mlx5::srq::SrqRing),
}

impl RecvRing {
    /// How many requests the ring holds.
    pub(crate) fn capacity(&self) -> u32 {
        match self {
            RecvRing::Rxe(ring) => ring.capacity(),
            RecvRing::Mlx5(ring) => ring.capacity(),
            RecvRing::Mlx5Shared(ring) => ring.capacity(),
        }
    }

    /// Takes no more requests: the device has left this ring for another.
    pub(crate) fn close(&mut self) {
        match self {
            RecvRing::Rxe(ring) => ring.close(),
            // Those of mlx5 never move.
            RecvRing::Mlx5(_) | RecvRing::Mlx5Shared(_) => {}
        }
    }

    /// As [`cursor`](Self::cursor) where the gate of a queue pair's ring says that the ring may be
    /// used; `None` where it does not, or where there is none.
    #[inline(always)]
    pub(crate) fn enter(&mut self, open: impl FnOnce(&Gate) -> bool) -> Option<Cursor> {
        match self {
            RecvRing::Mlx5(ring) if open(ring.gate()) => Some(ring.cursor()),
            RecvRing::Mlx5(_) | RecvRing::Rxe(_) | RecvRing::Mlx5Shared(_) => None,
        }
    }

    #[inline(always)]
    pub(crate) fn cursor(&mut self) -> Cursor {
        match self {
            RecvRing::Rxe(ring) => ring.cursor(),
            RecvRing::Mlx5(ring) => ring.cursor(),
            RecvRing::Mlx5Shared(ring) => ring.cursor(),
        }
    }

    #[inline(always)]
    pub(crate) fn push(&self, cursor: &mut Cursor, recv: &Recv<'_>) -> Result<(), PostError> {
        match self {
            RecvRing::Rxe(ring) => ring.push(cursor, recv),
            RecvRing::Mlx5(ring) => ring.push(cursor, recv),
            RecvRing::Mlx5Shared(ring) => ring.push(cursor, recv),
        }
    }

    #[inline(always)]
    pub(crate) fn publish(&mut self, cursor: Cursor) {
        match self {
            RecvRing::Rxe(ring) => ring.publish(cursor.at),
            RecvRing::Mlx5(ring) => ring.publish(cursor),
            RecvRing::Mlx5Shared(ring) => ring.publish(cursor),
        }
    }

    /// Begins anew after the kernel reset the queue pair.
    pub(crate) fn reset(&mut self) {
        match self {
            RecvRing::Mlx5(ring) => ring.reset(),
            // The kernel drained rxe's up to our index; what is shared stays.
            RecvRing::Rxe(_) | RecvRing::Mlx5Shared(_) => {}
        }
    }
}
