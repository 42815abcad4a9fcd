//! The rings of all drivers behind one face: what queues post to and poll.
//!
//! A ring of [`mlx5`](super::mlx5) stands behind its gate, one look at which says that it is there and may
//! be used; one of [`rxe`](super::rxe), which asks the kernel for much of what it does, stands beside.

use super::mlx5::poll_gate::{HEARD, QUIET};
use super::rxe::retired::Retirements;
use super::{ProviderWc, mlx5, rxe};
use crate::memory::fork::Epoch;
use crate::memory::gated::Gated;
use crate::memory::rxe_queue::ProducerWatch;
use crate::memory::wqebb::WqebbOffset;
use crate::wr::{PostError, RecvWr, RingError, SendWr};
use rustix::io::Errno;
use std::num::NonZeroU8;
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
    /// Nobody polls.
    None,
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
///
/// What devices write by themselves is behind its gate, and everything else out of the way of it.
#[derive(Debug)]
pub(crate) struct CqRing {
    mlx5: Gated<mlx5::cq::CqRing>,
    rxe: Option<rxe::poller::Poller>,
}

impl CqRing {
    pub(crate) fn rxe(poller: rxe::poller::Poller) -> CqRing {
        CqRing { mlx5: Gated::none(), rxe: Some(poller) }
    }

    pub(crate) fn mlx5(ring: mlx5::cq::CqRing) -> CqRing {
        let gate = ring.gate().clone();
        CqRing { mlx5: Gated::new(ring, &gate), rxe: None }
    }

    /// The ring of a driver that has no queue memory of its own.
    pub(crate) fn as_rxe(&mut self) -> Option<&mut rxe::poller::Poller> {
        self.rxe.as_mut()
    }

    /// The ring of the other.
    pub(crate) fn as_mlx5(&self) -> Option<&mlx5::cq::CqRing> {
        self.mlx5.any()
    }

    /// Whether a device writes completions for this process to read.
    pub(crate) fn is_direct(&self) -> bool {
        self.mlx5.any().is_some()
    }

    /// The ring that it writes them to, to be used as [`next`](Self::next) would.
    #[inline(always)]
    pub(crate) fn as_direct(&mut self) -> Option<&mut mlx5::cq::CqRing> {
        self.mlx5.any_mut()
    }

    /// Whether a poll may begin here and now without [listening](Self::listen).
    #[inline(always)]
    pub(crate) fn is_quiet(&mut self) -> bool {
        self.mlx5.enter(QUIET).is_ok()
    }

    /// Listens to the control path, as a poll has to where it is not quiet; `false` if `epoch` is
    /// over.
    #[inline(never)]
    pub(crate) fn listen(&mut self, epoch: &Epoch) -> bool {
        if epoch.is_over() {
            return false;
        }
        if let Some(ring) = self.mlx5.any_mut() {
            ring.listen();
        }
        true
    }

    /// The next completion of a queue pair that is alive, consumed; the first of the poll if that is
    /// `fresh`.
    #[inline(always)]
    pub(crate) fn next(&mut self, fresh: bool) -> Option<ProviderWc<'_>> {
        if self.mlx5.any().is_none() {
            return self.next_rxe(fresh).map(ProviderWc::Rxe);
        }
        self.mlx5.any_mut()?.next().map(ProviderWc::Mlx5)
    }

    /// Apart, so that no way to what is looked at here is kept at hand elsewhere.
    #[inline(never)]
    fn next_rxe(&mut self, fresh: bool) -> Option<&ib_uverbs_wc> {
        self.rxe.as_mut()?.next(fresh)
    }

    /// Gives consumed entries back to the device; nothing in a forked child.
    ///
    /// Short: what cleans up after a panic is inlined only if it is, and would otherwise keep in
    /// memory what polls.
    #[inline(always)]
    pub(crate) fn release(&mut self) {
        match self.mlx5.here_mut() {
            Some(ring) => ring.release(),
            None => self.release_rxe(),
        }
    }

    #[cold]
    #[inline(never)]
    fn release_rxe(&mut self) {
        if let Some(poller) = &mut self.rxe {
            poller.release();
        }
    }

    /// Asks for an event as [`mlx5`] does; `false`, and nothing done, elsewhere, where nobody hears of
    /// events, and where the gate is not quiet.
    #[inline(always)]
    pub(crate) fn try_arm(&mut self, solicited: bool, heard: u32) -> bool {
        match self.mlx5.enter(HEARD) {
            Ok(ring) => {
                ring.arm(solicited, heard);
                true
            }
            Err(_) => false,
        }
    }

    /// Bounds what the control path tells of queue pairs where nobody listens: to be called when one
    /// is made.
    pub(crate) fn tidy(&self) {
        // Of rxe's only what completed is told of.
        if let Some(ring) = self.mlx5.any() {
            ring.tidy();
        }
    }

    /// Where the control path tells of queue pairs.
    pub(crate) fn members(&self) -> CqMembers {
        match (&self.rxe, self.mlx5.any()) {
            (Some(poller), _) => CqMembers::Rxe(poller.retirements().clone()),
            (None, Some(ring)) => CqMembers::Mlx5(ring.members().clone()),
            (None, None) => CqMembers::None,
        }
    }

    /// Discards what the ring holds of a queue pair that cannot complete anything more.
    pub(crate) fn purge(&mut self, member: &Member) {
        match (&mut self.rxe, self.mlx5.any_mut(), member) {
            (Some(poller), _, Member::Rxe { qpn }) => poller.purge(*qpn),
            (_, Some(ring), Member::Mlx5(record)) => ring.purge(record),
            _ => {}
        }
    }

    /// Lets `exchange` move the queue while nobody looks at it from beside.
    pub(crate) fn exchange<T, E>(
        &mut self,
        exchange: impl FnOnce(&mut CqRing) -> Result<T, E>,
    ) -> Result<T, E> {
        // Elsewhere nobody ever looks.
        let Some(poller) = &self.rxe else { return exchange(self) };
        let (retirements, position) = (poller.retirements().clone(), poller.position());
        retirements.exchange(position, || {
            let answer = exchange(self)?;
            Ok((self.rxe.as_ref().map(rxe::poller::Poller::watch), answer))
        })
    }

    /// Completions that are there to be consumed.
    pub(crate) fn pending(&self) -> u32 {
        match (&self.rxe, self.mlx5.any()) {
            (Some(poller), _) => poller.pending(),
            (None, Some(ring)) => ring.pending(),
            (None, None) => 0,
        }
    }

    pub(crate) fn capacity(&self) -> u32 {
        match (&self.rxe, self.mlx5.any()) {
            (Some(poller), _) => poller.capacity(),
            (None, Some(ring)) => ring.capacity(),
            (None, None) => 0,
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
    /// Requests pushed so far, unless who pushes counts them.
    pub(crate) count: u32,
    /// The number of the next request, where slots are not requests.
    pub(crate) head: u32,
    /// Where the newest request begins, if those have blocks.
    pub(crate) newest: WqebbOffset,
    /// The first word of the newest request.
    pub(crate) word: u64,
}

impl Cursor {
    /// Whether there is room for a request that nothing about its payload is wrong with.
    #[inline(always)]
    pub(crate) fn suits(&self, wr: &SendWr<'_>) -> bool {
        wr.is_usual() && self.room > 0
    }
}

/// The same of a batch of receives.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RecvCursor {
    /// The slot that the next request goes to.
    pub(crate) at: u32,
    /// The slot for the one behind it, where they are not in a row.
    pub(crate) free: u32,
    /// Requests that still fit.
    pub(crate) room: u32,
}

/// The producer's side of a send queue.
///
/// What devices read by themselves is behind its gate, and everything else out of the way of it.
#[derive(Debug)]
pub(crate) struct SendRing {
    mlx5: Gated<mlx5::sq::SendRing>,
    rxe: Option<rxe::sq::SendRing>,
}

impl SendRing {
    pub(crate) fn rxe(ring: rxe::sq::SendRing) -> SendRing {
        SendRing { mlx5: Gated::none(), rxe: Some(ring) }
    }

    pub(crate) fn mlx5(ring: mlx5::sq::SendRing) -> SendRing {
        let gate = ring.gate().clone();
        SendRing { mlx5: Gated::new(ring, &gate), rxe: None }
    }

    /// Whether a request may name memory. Where it may not, [`try_push`](Self::try_push) is not to be
    /// called with a request that does.
    pub(crate) fn takes_pieces(&self) -> bool {
        self.mlx5.any().is_none_or(mlx5::sq::SendRing::takes_pieces)
    }

    /// As [`cursor`](Self::cursor) where the ring's gate says `least` or more; `None` where it does
    /// not, or where there is none.
    #[inline(always)]
    pub(crate) fn enter(&self, least: NonZeroU8) -> Option<Cursor> {
        let ring = self.mlx5.open(least)?;
        Some(ring.cursor())
    }

    pub(crate) fn cursor(&self) -> Cursor {
        match (&self.rxe, self.mlx5.any()) {
            (Some(ring), _) => ring.cursor(),
            (None, Some(ring)) => ring.cursor(),
            (None, None) => Cursor::default(),
        }
    }

    /// Writes a request that [suits](Cursor::suits) and need not [wait](Self::may_wait); `false`, and
    /// nothing done, where it has to be looked at by [`push`](Self::push).
    #[inline(always)]
    pub(crate) fn try_push(&self, cursor: &mut Cursor, wr: &SendWr<'_>) -> bool {
        match self.mlx5.here() {
            Some(ring) => ring.try_push(cursor, wr),
            None => false,
        }
    }

    /// Requests between the ring's own position and a cursor.
    pub(crate) fn pushed(&self, cursor: &Cursor) -> u32 {
        match (&self.rxe, self.mlx5.any()) {
            (Some(ring), _) => ring.pushed(cursor),
            (None, Some(ring)) => ring.pushed(cursor),
            (None, None) => 0,
        }
    }

    /// Whether requests have to be looked at by [`push`](Self::push), whatever they are.
    pub(crate) fn may_wait(&self) -> bool {
        self.mlx5.any().is_some_and(mlx5::sq::SendRing::may_wait)
    }

    /// Writes a request where the cursor stands; after an error the cursor has not moved.
    pub(crate) fn push(&mut self, cursor: &mut Cursor, wr: &SendWr<'_>) -> Result<(), PostError> {
        match (&self.rxe, self.mlx5.any_mut()) {
            (Some(ring), _) => ring.push(cursor, wr),
            (None, Some(ring)) => ring.push(cursor, wr),
            (None, None) => Err(PostError::Unsupported),
        }
    }

    /// As [`push`](Self::push), for a queue of raw packets.
    #[cold]
    pub(crate) fn push_packet(
        &self,
        cursor: &mut Cursor,
        wr: &SendWr<'_>,
    ) -> Result<(), PostError> {
        match self.mlx5.any() {
            Some(ring) => ring.push_packet(cursor, wr),
            None => Err(PostError::Unsupported),
        }
    }

    /// Takes over where a cursor ended, shows its requests to the device, and makes it look, where
    /// the ring's gate is open; `false`, and nothing done, elsewhere. `single` if it is one request,
    /// which may go whole.
    #[inline(always)]
    pub(crate) fn try_publish(&mut self, cursor: Cursor, single: bool) -> bool {
        match self.mlx5.here_mut() {
            Some(ring) => {
                ring.publish(cursor, single);
                true
            }
            None => false,
        }
    }

    /// As [`try_publish`](Self::try_publish) for a ring whose doorbell is in the kernel, which `kick`
    /// rings, up to where a cursor stood.
    pub(crate) fn publish(
        &mut self,
        at: u32,
        kick: impl FnOnce() -> Result<(), Errno>,
    ) -> Result<(), RingError> {
        // All others have a gate, and only a fork shuts it.
        let ring = self.rxe.as_mut().ok_or(RingError::Forked)?;
        ring.publish(at);
        kick().map_err(RingError::StillQueued)
    }

    /// Begins anew after the kernel reset the queue pair.
    pub(crate) fn reset(&mut self) {
        // The kernel drained rxe's up to our index.
        if let Some(ring) = self.mlx5.any_mut() {
            ring.reset();
        }
    }
}

/// The producer's side of a receive queue or shared receive queue.
///
/// What devices read by themselves is behind its gate, and everything else out of the way of it.
#[derive(Debug)]
pub(crate) struct RecvRing {
    mlx5: Gated<mlx5::rq::RecvRing>,
    mlx5_shared: Gated<mlx5::srq::SrqRing>,
    rxe: Option<rxe::rq::RecvRing>,
}

/// Whose receives a ring holds, where that is known when the caller is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RecvKind {
    /// A queue pair's.
    Own,
    Shared,
}

impl RecvRing {
    pub(crate) fn rxe(ring: rxe::rq::RecvRing) -> RecvRing {
        RecvRing { mlx5: Gated::none(), mlx5_shared: Gated::none(), rxe: Some(ring) }
    }

    pub(crate) fn mlx5(ring: mlx5::rq::RecvRing) -> RecvRing {
        let gate = ring.gate().clone();
        RecvRing { mlx5: Gated::new(ring, &gate), mlx5_shared: Gated::none(), rxe: None }
    }

    pub(crate) fn mlx5_shared(ring: mlx5::srq::SrqRing) -> RecvRing {
        let gate = ring.gate().clone();
        RecvRing { mlx5: Gated::none(), mlx5_shared: Gated::new(ring, &gate), rxe: None }
    }

    /// How many requests the ring holds.
    pub(crate) fn capacity(&self) -> u32 {
        match (&self.rxe, self.mlx5.any(), self.mlx5_shared.any()) {
            (Some(ring), _, _) => ring.capacity(),
            (_, Some(ring), _) => ring.capacity(),
            (_, _, Some(ring)) => ring.capacity(),
            (None, None, None) => 0,
        }
    }

    /// Whether nothing was ever posted to this ring, which is a shared queue's.
    pub(crate) fn is_fresh(&self) -> bool {
        let mlx5 = self.mlx5_shared.any().is_none_or(mlx5::srq::SrqRing::is_fresh);
        mlx5 && self.rxe.as_ref().is_none_or(rxe::rq::RecvRing::is_fresh)
    }

    /// Takes no more requests: the device has left this ring for another.
    pub(crate) fn close(&mut self) {
        // Those of mlx5 never move.
        if let Some(ring) = &mut self.rxe {
            ring.close();
        }
    }

    /// As [`cursor`](Self::cursor) where the gate of a queue pair's ring says `least` or more; `None`
    /// where it does not, or where there is none.
    #[inline(always)]
    pub(crate) fn enter(&self, least: NonZeroU8) -> Option<RecvCursor> {
        let ring = self.mlx5.open(least)?;
        Some(ring.cursor())
    }

    /// The same of a shared ring, which knows no states.
    #[inline(always)]
    pub(crate) fn enter_shared(&mut self) -> Option<RecvCursor> {
        let ring = self.mlx5_shared.here_mut()?;
        Some(ring.cursor())
    }

    /// Where the next request goes. Not to be called in a forked child.
    pub(crate) fn cursor(&mut self) -> RecvCursor {
        match (&self.rxe, self.mlx5.any(), self.mlx5_shared.any_mut()) {
            (Some(ring), _, _) => ring.cursor(),
            (_, Some(ring), _) => ring.cursor(),
            (_, _, Some(ring)) => ring.cursor(),
            (None, None, None) => RecvCursor::default(),
        }
    }

    /// Writes a usual request that nothing is wrong with; `false`, and nothing done, where it has to
    /// be looked at by [`push`](Self::push).
    #[inline(always)]
    pub(crate) fn try_push(
        &self,
        kind: RecvKind,
        cursor: &mut RecvCursor,
        recv: &RecvWr<'_>,
    ) -> bool {
        match kind {
            RecvKind::Own => match self.mlx5.here() {
                Some(ring) => ring.try_push(cursor, recv),
                None => false,
            },
            RecvKind::Shared => match self.mlx5_shared.here() {
                Some(ring) => ring.try_push(cursor, recv),
                None => false,
            },
        }
    }

    /// Writes a request where the cursor stands; after an error the cursor has not moved.
    #[cold]
    #[inline(never)]
    pub(crate) fn push(&self, cursor: &mut RecvCursor, recv: &RecvWr<'_>) -> Result<(), PostError> {
        match (&self.rxe, self.mlx5.any(), self.mlx5_shared.any()) {
            (Some(ring), _, _) => ring.push(cursor, recv),
            (_, Some(ring), _) => ring.push(cursor, recv),
            (_, _, Some(ring)) => ring.push(cursor, recv),
            (None, None, None) => Err(PostError::Unsupported),
        }
    }

    /// Takes over where a cursor ended, and shows its `count` requests to the device; nothing in a forked
    /// child.
    #[inline(always)]
    pub(crate) fn publish(&mut self, kind: RecvKind, cursor: RecvCursor, count: u32) {
        match kind {
            RecvKind::Own => {
                if let Some(ring) = self.mlx5.here_mut() {
                    return ring.publish(cursor);
                }
            }
            RecvKind::Shared => {
                if let Some(ring) = self.mlx5_shared.here_mut() {
                    return ring.publish(cursor, count);
                }
            }
        }
        self.publish_rxe(cursor.at);
    }

    #[cold]
    #[inline(never)]
    fn publish_rxe(&mut self, at: u32) {
        if let Some(ring) = &mut self.rxe {
            ring.publish(at);
        }
    }

    /// Begins anew after the kernel reset the queue pair.
    pub(crate) fn reset(&mut self) {
        // The kernel drained rxe's up to our index; what is shared stays.
        if let Some(ring) = self.mlx5.any_mut() {
            ring.reset();
        }
    }
}
