//! The rings of all drivers behind one face: what queues post to and poll.
//!
//! Each enum is matched once per call, and a batch makes few calls; the arms are the rings of
//! [`rxe`](super::rxe).

use super::rxe;
use crate::completion::Wc;
use crate::mem::ring::ProducerWatch;
use crate::retired::Watch;
use crate::wr::{PostError, Recv, SendWr};

/// The consumer's side of a completion queue.
#[derive(Debug)]
pub(crate) enum CqRing {
    Rxe(rxe::cq::CqRing),
}

impl CqRing {
    /// The next completion, consumed.
    #[inline]
    pub(crate) fn next(&mut self) -> Option<Wc> {
        match self {
            CqRing::Rxe(ring) => ring.next().map(Wc::Rxe),
        }
    }

    /// Gives consumed entries back to the device.
    #[inline]
    pub(crate) fn release(&mut self) {
        match self {
            CqRing::Rxe(ring) => ring.release(),
        }
    }

    /// How others see what the device completed, and the slot of the next entry to consume.
    pub(crate) fn watch(&self) -> (CqWatch, u32) {
        match self {
            CqRing::Rxe(ring) => {
                let (watch, consumer) = ring.watch();
                (CqWatch::Rxe(watch), consumer)
            }
        }
    }

    /// Completions that are there to be consumed.
    pub(crate) fn pending(&self) -> u32 {
        match self {
            CqRing::Rxe(ring) => ring.pending(),
        }
    }

    pub(crate) fn capacity(&self) -> u32 {
        match self {
            CqRing::Rxe(ring) => ring.capacity(),
        }
    }
}

/// The device's end of a completion queue, seen from beside its poller.
#[derive(Debug)]
pub(crate) enum CqWatch {
    Rxe(ProducerWatch),
}

impl Watch for CqWatch {
    fn producer(&self) -> u32 {
        match self {
            CqWatch::Rxe(watch) => watch.producer(),
        }
    }

    fn mask(&self) -> u32 {
        match self {
            CqWatch::Rxe(watch) => watch.mask(),
        }
    }
}

/// Where a batch in the making stands: the ring's own position moves only when it is published.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cursor {
    /// The slot that the next request goes to.
    pub(crate) at: u32,
    /// Requests that still fit.
    pub(crate) room: u32,
}

/// The producer's side of a send queue.
#[derive(Debug)]
pub(crate) enum SendRing {
    Rxe(rxe::sq::SendRing),
}

impl SendRing {
    #[inline]
    pub(crate) fn cursor(&self) -> Cursor {
        match self {
            SendRing::Rxe(ring) => ring.cursor(),
        }
    }

    /// Writes a request where the cursor stands; after an error the cursor has not moved.
    #[inline]
    pub(crate) fn push(
        &self,
        cursor: &mut Cursor,
        wr: &SendWr<'_>,
    ) -> std::result::Result<(), PostError> {
        match self {
            SendRing::Rxe(ring) => ring.push(cursor, wr),
        }
    }

    /// Takes over where a cursor ended, and shows its requests to the device.
    #[inline]
    pub(crate) fn publish(&mut self, cursor: Cursor) {
        match self {
            SendRing::Rxe(ring) => ring.publish(cursor.at),
        }
    }
}

/// The producer's side of a receive queue or shared receive queue.
#[derive(Debug)]
pub(crate) enum RecvRing {
    Rxe(rxe::rq::RecvRing),
}

impl RecvRing {
    /// How many requests the ring holds.
    pub(crate) fn capacity(&self) -> u32 {
        match self {
            RecvRing::Rxe(ring) => ring.capacity(),
        }
    }

    /// Takes no more requests: the device has left this ring for another.
    pub(crate) fn close(&mut self) {
        match self {
            RecvRing::Rxe(ring) => ring.close(),
        }
    }

    #[inline]
    pub(crate) fn cursor(&self) -> Cursor {
        match self {
            RecvRing::Rxe(ring) => ring.cursor(),
        }
    }

    #[inline]
    pub(crate) fn push(
        &self,
        cursor: &mut Cursor,
        recv: &Recv<'_>,
    ) -> std::result::Result<(), PostError> {
        match self {
            RecvRing::Rxe(ring) => ring.push(cursor, recv),
        }
    }

    #[inline]
    pub(crate) fn publish(&mut self, cursor: Cursor) {
        match self {
            RecvRing::Rxe(ring) => ring.publish(cursor.at),
        }
    }
}
