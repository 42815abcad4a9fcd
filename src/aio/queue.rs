//! The queue that an [`Op`](super::Op) is posted to, of a queue pair or a shared receive queue.

use super::driver::DriverHandle;
use super::inflight::{Fate, Inflight, InflightKey, OpProgress, OpTag, Side, Ticket};
use super::list::Posted;
use super::locking::{Locking, TakenOver};
use super::op::{Kind, OpError, OpErrorKind, OpResult, Request, Transfer};
use crate::first_panic::FirstPanic;
use crate::lending::loan_table::{RECV, ReturnedLoan, WrIds};
use crate::lending::waiting::Waiting;
use crate::owned::{
    AskedMemory, Buffer, BufferPool, Finished, Lend, Lent, Memory, NamedBytes, Outcome,
    OwnedQueuePair, OwnedRecvBatch, OwnedSendBatch, OwnedSharedReceiveQueue, PushError,
    open_buffer,
};
use crate::sync::lock::AnyLock;
use crate::wc::WcOpcode;
use crate::wr::{PostError, RingError, SendWr};
use std::collections::VecDeque;
use std::sync::Arc;
use std::task::{Poll, Waker};

/// A queue pair or a shared receive queue, as its handles and futures share it.
pub(super) struct Queue<S: Locking> {
    pub(super) posting: Posting<S>,
    pub(super) inflight: Arc<Inflight<S>>,
    key: InflightKey,
    taken_over: TakenOver,
    /// Keeps the driver running, and the token of its thread domain.
    pub(super) driver: Arc<DriverHandle<S>>,
}

/// The owned queue that the requests are posted to.
pub(super) enum Posting<S: Locking> {
    /// A queue pair whose sends may need no check.
    Qp(S::Lock<OwnedQueuePair<OpTag, S>>),
    /// A queue pair whose sends all need checks. Only its variant tells, which [`Queue::try_post`] looks at anyway.
    CheckedQp(S::Lock<OwnedQueuePair<OpTag, S>>),
    Srq(S::Lock<OwnedSharedReceiveQueue<OpTag>>),
}

impl<S: Locking> Drop for Queue<S> {
    fn drop(&mut self) {
        // Both call wakers, or drop memory, of the program.
        let mut calls = FirstPanic::default();
        if let Posting::Qp(posting) | Posting::CheckedQp(posting) = &mut self.posting {
            if let Some(qp) = posting.get_mut() {
                if qp.shares_receives() {
                    // Without a reset, the completions of its receives would be lost, and their places in the
                    // shared queue with them.
                    calls.catch(|| self.driver.close(qp));
                }
            }
        }
        calls.catch(|| self.driver.unregister(self.key));
        calls.resume();
    }
}

/// Whether a request may be posted although others wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    /// Only if nobody waits for room.
    IfIdle,
    /// It was [admitted](Inflight::admit).
    Admitted,
}

/// Why a request was not posted, or will not complete.
pub(super) enum PostFailure {
    /// It was refused. The caller drops the tag, which has the waker, when no lock is held.
    Refused { error: PostError, tag: Option<OpTag> },
    /// The queue was not rung, and cannot be flushed: the device is gone, and nothing of the queue pair completes any
    /// more. The request has this `wr_id`.
    Lost(u64),
    /// It was posted, with this `wr_id`, while the driver ended.
    Late(u64),
}

/// The answer of [`Queue::post_from_pool`].
pub(super) enum Refill {
    /// All were posted, or the pool is empty.
    Done,
    /// There is no room for another one.
    Full,
    /// The next one was refused: it is the last in the list of those that were posted.
    Refused,
}

/// The answer of [`Queue::try_post`].
pub(super) enum Tried {
    /// It was posted, with this `wr_id`.
    Posted(u64),
    /// The same, while the driver ended.
    Late(u64),
    /// It takes another way: nothing has happened, and the memory is there.
    NeedsMore,
}

impl PostFailure {
    /// The memory of a new request is there, unless a panic took it.
    #[cold]
    fn no_memory(tag: OpTag) -> PostFailure {
        PostFailure::Refused { error: PostError::ForeignMemory, tag: Some(tag) }
    }

    pub(super) fn is_full(&self) -> bool {
        matches!(self, PostFailure::Refused { error: PostError::Full, .. })
    }
}

impl From<PostError> for PostFailure {
    fn from(error: PostError) -> PostFailure {
        PostFailure::Refused { error, tag: None }
    }
}

impl<S: Locking> Queue<S> {
    pub(super) fn new(
        posting: Posting<S>,
        inflight: Arc<Inflight<S>>,
        key: InflightKey,
        driver: Arc<DriverHandle<S>>,
    ) -> Arc<Self> {
        let taken_over = TakenOver::new();
        Arc::new(Queue { posting, inflight, key, taken_over, driver })
    }

    /// Posts a send, a write or a read as most are on mlx5: nobody waits, there is room, memory need not be asked, and
    /// the request needs no further check. On rxe each needs more, which is known before anything is done.
    ///
    /// Nothing that is out of line comes back into this function, so that the batch stays in registers: 30
    /// instructions.
    #[inline(always)]
    pub(super) fn try_post<L: Lend>(
        &self,
        wr: SendWr<'_>,
        memory: &mut Option<L>,
        waker: &Waker,
    ) -> Tried {
        let inflight = &*self.inflight;
        let Posting::Qp(posting) = &self.posting else { return Tried::NeedsMore };
        // Cloned while no lock is held, and dropped after `qp`.
        let waker = waker.clone();
        // After that, which is code of the program: nothing else breaks the queue of a worker before the request is
        // posted.
        if inflight.is_busy(Side::Send) {
            return Tried::NeedsMore;
        }
        let Some(mut qp) = posting.lock_gated() else { return Tried::NeedsMore };
        let Ok(mut batch) = qp.send_batch() else { return Tried::NeedsMore };
        let Some(lent) = memory.take() else { return Tried::NeedsMore };
        if let Err(refused) = batch.try_push(wr, lent, self.tag(waker)) {
            drop(batch);
            drop(qp);
            return keep_for_later(refused, memory);
        }
        let wr_id = batch.only_wr_id();
        // mlx5 refuses this only in a forked child, which has no lock.
        let _ = S::ring_one(batch, &self.taken_over);
        drop(qp);
        if !S::ONE_THREAD && inflight.is_late(Side::Send) {
            return Tried::Late(wr_id);
        }
        Tried::Posted(wr_id)
    }

    /// Posts one request, which takes the memory, and returns the `wr_id` of its loan. `None` with the reason in
    /// `failed`, or if it is not the request's turn; in most cases the memory is still there.
    #[inline(always)]
    pub(super) fn post<L: Lend>(
        &self,
        request: Kind<'_>,
        memory: &mut Option<L>,
        turn: Turn,
        waker: &Waker,
        failed: &mut Option<PostFailure>,
    ) -> Option<u64> {
        let (side, inflight) = (request.side(), &*self.inflight);
        if turn == Turn::IfIdle && inflight.is_busy(side) {
            return None;
        }
        // Asked, and cloned, while no lock is held.
        let (named, waker) = (memory.as_ref().and_then(L::named), waker.clone());
        let wr_id = match request {
            Kind::Transfer(Transfer::Recv) => self.post_recv(memory, named, waker, failed),
            Kind::Transfer(Transfer::Send) => {
                self.post_send(SendWr::send(&[]), memory, named, waker, failed)
            }
            Kind::Transfer(Transfer::Write(to)) => {
                self.post_send(SendWr::write(to, &[]), memory, named, waker, failed)
            }
            Kind::Transfer(Transfer::Read(from)) => {
                self.post_send(SendWr::read(from, &[]), memory, named, waker, failed)
            }
            Kind::Any(wr) => self.post_send(*wr, memory, named, waker, failed),
        }?;
        if inflight.is_late(side) {
            *failed = Some(PostFailure::Late(wr_id));
            return None;
        }
        Some(wr_id)
    }

    /// Posts a request that was [admitted](Inflight::admit). Out of line: most are posted at once.
    #[inline(never)]
    pub(super) fn post_admitted<L: Lend>(
        &self,
        request: Kind<'_>,
        memory: &mut Option<L>,
        waker: &Waker,
    ) -> Result<u64, PostFailure> {
        let mut failed = None;
        match self.post(request, memory, Turn::Admitted, waker, &mut failed) {
            Some(wr_id) => Ok(wr_id),
            None => Err(failed.unwrap_or(PostError::Full.into())),
        }
    }

    /// Posts a request that found the queue full, or lets it wait for room.
    #[cold]
    #[inline(never)]
    pub(super) fn post_or_wait<L: Lend>(
        &self,
        request: Kind<'_>,
        memory: &mut Option<L>,
        ticket: &mut Option<Ticket>,
        waker: &Waker,
    ) -> Result<u64, PostFailure> {
        let side = request.side();
        loop {
            let waits = self.inflight.make_or_await_room(side, ticket, waker);
            match self.post_admitted(request, memory, waker) {
                Err(failed) if failed.is_full() && !waits => {}
                posted => return posted,
            }
        }
    }

    /// As [`post_list`](Self::post_list), until the first request that takes another way, which is left. As
    /// [`try_post`](Self::try_post), nothing that is out of line comes back.
    pub(super) fn try_post_list<L: Lend, R: Request>(
        &self,
        waiting: &mut Waiting<R, L>,
        posted: &mut Posted<L>,
    ) {
        let Posting::Qp(posting) = &self.posting else { return };
        let Some(mut qp) = posting.lock_gated() else { return };
        let Ok(mut batch) = qp.send_batch() else { return };
        let mut before = None;
        // Each kind in a loop of its own, which keeps the batch in registers: 20 instructions.
        while !waiting.is_empty() && before != Some(waiting.len()) {
            before = Some(waiting.len());
            waiting.post_each(|request, memory| match request.kind() {
                Kind::Transfer(Transfer::Write(to)) if !memory.must_be_asked() => {
                    let (wr, tag) = (SendWr::write(to, &[]), self.sent(WcOpcode::WRITE));
                    batch.try_push_settling_alone(wr, memory, tag).map_err(PushError::into_memory)
                }
                _ => Err(memory),
            });
            waiting.post_each(|request, memory| match request.kind() {
                Kind::Transfer(Transfer::Send) if !memory.must_be_asked() => {
                    let (wr, tag) = (SendWr::send(&[]), self.sent(WcOpcode::SEND));
                    batch.try_push_settling_alone(wr, memory, tag).map_err(PushError::into_memory)
                }
                _ => Err(memory),
            });
            waiting.post_each(|request, memory| match request.kind() {
                Kind::Transfer(Transfer::Read(from)) if !memory.must_be_asked() => {
                    let (wr, tag) = (SendWr::read(from, &[]), self.unwatched());
                    batch.try_push(wr, memory, tag).map_err(PushError::into_memory)
                }
                _ => Err(memory),
            });
        }
        if !batch.is_empty() {
            let wr_ids = batch.wr_ids();
            // As in `try_post`.
            let _ = S::ring(batch, &self.taken_over);
            drop(qp);
            posted.append(wr_ids);
            self.inflight.is_late(Side::Send);
        }
    }

    /// Posts requests of one side, with one doorbell, until one of the other side. In `posted` each has the `wr_id` of
    /// its loan, or was refused. No task is woken for them unless it [watches](Inflight::watch) them. An error if the
    /// next one was not posted. Of memory that has to be asked for its bytes as many requests are posted as there is room
    /// for at the begin; `answers` is a list to use for that.
    pub(super) fn post_list<L: Lend, R: Request>(
        &self,
        side: Side,
        waiting: &mut Waiting<R, L>,
        posted: &mut Posted<L>,
        answers: &mut VecDeque<Option<NamedBytes>>,
    ) -> Result<(), PostError> {
        answers.clear();
        let mut most = usize::MAX;
        if waiting.memory().any(L::must_be_asked) {
            // Asked while no lock is held; also the one that finds no room.
            most = self.inflight.room(side) + 1;
            answers.extend(waiting.memory().take(most).map(L::named));
        }
        let mut list = List { side, most, waiting, answers, posted };
        let ended = match (&self.posting, side) {
            (Posting::Qp(posting) | Posting::CheckedQp(posting), Side::Send) => {
                self.post_sends(posting, &mut list)
            }
            (Posting::Qp(posting) | Posting::CheckedQp(posting), Side::Recv) => {
                let mut qp = posting.lock().ok_or(PostError::Forked)?;
                self.post_recvs(qp.recv_batch()?, &mut list)
            }
            (Posting::Srq(posting), Side::Recv) => {
                let mut srq = posting.lock().ok_or(PostError::Forked)?;
                self.post_recvs(srq.batch()?, &mut list)
            }
            (Posting::Srq(_), Side::Send) => Err(PostError::Unsupported),
        };
        self.inflight.is_late(side);
        ended
    }

    /// Posts the sends of a list.
    fn post_sends<L: Lend, R: Request>(
        &self,
        posting: &S::Lock<OwnedQueuePair<OpTag, S>>,
        list: &mut List<'_, R, L>,
    ) -> Result<(), PostError> {
        let mut qp = posting.lock().ok_or(PostError::Forked)?;
        let mut batch = qp.send_batch()?;
        let ended = list.push_each(|request, memory, named, failed| {
            let (batch, tag) = (&mut batch, self.unwatched());
            match request {
                Kind::Transfer(Transfer::Write(to)) => {
                    push_send(batch, SendWr::write(to, &[]), memory, named, tag, failed)
                }
                Kind::Transfer(Transfer::Read(from)) => {
                    push_send(batch, SendWr::read(from, &[]), memory, named, tag, failed)
                }
                Kind::Transfer(_) => {
                    push_send(batch, SendWr::send(&[]), memory, named, tag, failed)
                }
                Kind::Any(wr) => push_send(batch, *wr, memory, named, tag, failed),
            }?;
            Some(batch.last())
        });
        if !batch.is_empty() {
            let rung = S::ring(batch, &self.taken_over);
            drop(qp);
            self.list_rung(rung);
        }
        ended
    }

    /// Posts the receives of a list.
    fn post_recvs<L: Lend, R: Request>(
        &self,
        mut batch: OwnedRecvBatch<'_, OpTag>,
        list: &mut List<'_, R, L>,
    ) -> Result<(), PostError> {
        let ended = list.push_each(|_, memory, named, failed| {
            push_recv(&mut batch, memory, named, self.unwatched(), failed)?;
            Some(batch.last())
        });
        ring_recvs(batch);
        ended
    }

    /// As [`not_rung`](Self::not_rung), for a batch.
    #[inline(always)]
    fn list_rung(&self, rung: Result<(), RingError>) {
        if rung.is_err() && self.inflight.flush().is_err() {
            self.inflight.fail_all();
        }
    }

    /// Posts up to `most` receives into buffers of `pool`, as [`post_list`](Self::post_list): with one doorbell, and
    /// until one is refused. Taking a buffer, or giving one back, runs no code of the program: the caller has the pool.
    #[inline(never)]
    pub(super) fn post_from_pool(
        &self,
        pool: &BufferPool,
        most: usize,
        posted: &mut Posted<Buffer>,
    ) -> Refill {
        let Ok(mut buffer) = pool.take().map(Some) else { return Refill::Done };
        let ended = match &self.posting {
            Posting::Qp(posting) | Posting::CheckedQp(posting) => match posting.lock() {
                Some(mut qp) => qp
                    .recv_batch()
                    .and_then(|batch| self.refill(batch, &mut buffer, pool, most, posted)),
                None => Err(PostError::Forked),
            },
            Posting::Srq(posting) => match posting.lock() {
                Some(mut srq) => srq
                    .batch()
                    .and_then(|batch| self.refill(batch, &mut buffer, pool, most, posted)),
                None => Err(PostError::Forked),
            },
        };
        self.inflight.is_late(Side::Recv);
        match ended {
            Ok(()) => Refill::Done,
            Err(PostError::Full) => Refill::Full,
            Err(error) => {
                posted.refuse(buffer, OpErrorKind::Post(error));
                Refill::Refused
            }
        }
    }

    /// Posts `buffer`, and then others. An error leaves the one that was refused.
    #[inline(always)]
    fn refill(
        &self,
        mut batch: OwnedRecvBatch<'_, OpTag>,
        buffer: &mut Option<Buffer>,
        pool: &BufferPool,
        most: usize,
        posted: &mut Posted<Buffer>,
    ) -> Result<(), PostError> {
        let (mut ended, mut count, mut run) = (Ok(()), 0, WrIds::default());
        while let Some(next) = buffer.take() {
            if let Err(refused) = batch.push_any(next, self.unwatched()) {
                (*buffer, ended) = (Some(refused.memory), Err(refused.error));
                break;
            }
            let one = WrIds::one(batch.last());
            if !run.append(&one) {
                posted.append(std::mem::replace(&mut run, one));
            }
            count += 1;
            if count < most {
                *buffer = pool.take().ok();
            }
        }
        posted.append(run);
        ring_recvs(batch);
        ended
    }

    /// How a request ended whose loan is [settled](Inflight::take_settled); frees the slot.
    #[inline(always)]
    pub(super) fn end_of_settled<L: Lend>(
        &self,
        wr_id: u64,
        loan: ReturnedLoan<'_, Lent<OpTag>>,
    ) -> Poll<OpResult<L>> {
        match self.open_sent(loan) {
            Ok((buffer, outcome)) => Poll::Ready(end_of_sent(buffer, outcome)),
            Err(loan) => self.end_of_buffer(wr_id, loan),
        }
    }

    /// Adds the end of a request to `ends`, whose loan is [settled](Inflight::take_settled); frees the slot.
    #[inline(always)]
    pub(super) fn push_end<L: Lend>(
        &self,
        wr_id: u64,
        loan: ReturnedLoan<'_, Lent<OpTag>>,
        ends: &mut Vec<OpResult<L>>,
    ) {
        match self.open_sent(loan) {
            Ok((buffer, outcome)) => ends.push(end_of_sent(buffer, outcome)),
            Err(loan) => {
                if let Poll::Ready(end) = self.end_of_buffer(wr_id, loan) {
                    ends.push(end);
                }
            }
        }
    }

    /// Buffer and outcome of a send or a write that succeeded, if its end is in its slot; frees the slot. The end of
    /// any other request stays there. To hand its loan on from here would take 4 instructions of a future, and 8 of a
    /// list.
    #[inline(always)]
    pub(super) fn take_sent(&self, wr_id: u64) -> Option<(Buffer, Outcome)> {
        if wr_id & RECV != 0 {
            return None;
        }
        match self.open_sent(self.inflight.take_settled(wr_id)?) {
            Ok(sent) => Some(sent),
            Err(loan) => settle_again(loan),
        }
    }

    /// The same of a loan that was taken. The loan of any other request comes back.
    #[inline(always)]
    fn open_sent<'s>(
        &self,
        loan: ReturnedLoan<'s, Lent<OpTag>>,
    ) -> Result<(Buffer, Outcome), ReturnedLoan<'s, Lent<OpTag>>> {
        // Looked at first, so that nothing is to be dropped afterwards: 20 instructions.
        let Some(outcome) = self.inflight.sent_in(&loan) else { return Err(loan) };
        let (buffer, _tag, slot) = open_buffer(loan)?;
        drop(slot);
        Ok((buffer, outcome))
    }

    /// How any other request than a send or a write of a buffer that succeeded ended; frees the slot. Never pending:
    /// the future returns it as it is.
    #[inline(never)]
    fn end_of_buffer<L: Lend>(
        &self,
        wr_id: u64,
        loan: ReturnedLoan<'_, Lent<OpTag>>,
    ) -> Poll<OpResult<L>> {
        let Some(outcome) = self.inflight.outcome_in(&loan) else {
            return self.end_of_memory(wr_id, loan);
        };
        match open_buffer(loan) {
            Ok((mut buffer, _tag, slot)) => {
                drop(slot);
                if wr_id & RECV != 0 {
                    // Bytes behind the message are of an earlier use of the buffer.
                    buffer.truncate(outcome.filled());
                }
                Poll::Ready(end(Memory::Buffer(buffer), outcome))
            }
            Err(loan) => self.end_of_memory(wr_id, loan),
        }
    }

    /// The same for memory that is no [`Buffer`](crate::owned::Buffer).
    #[inline(never)]
    fn end_of_memory<L: Lend>(
        &self,
        wr_id: u64,
        loan: ReturnedLoan<'_, Lent<OpTag>>,
    ) -> Poll<OpResult<L>> {
        Poll::Ready(match self.inflight.end_of(loan.take()) {
            Some((memory, outcome)) => end_of_any(wr_id, memory, outcome),
            None => Err(OpError { memory: None, kind: OpErrorKind::DriverGone }),
        })
    }

    /// The message of a receive into a buffer, if it is in its slot; frees the slot.
    #[inline(always)]
    pub(super) fn take_received(&self, wr_id: u64) -> Option<(Buffer, Outcome)> {
        let loan = self.inflight.take_settled(wr_id)?;
        match self.inflight.outcome_in(&loan).filter(Outcome::is_success) {
            Some(outcome) => match open_buffer(loan) {
                Ok((mut buffer, _tag, slot)) => {
                    drop(slot);
                    buffer.truncate(outcome.filled());
                    Some((buffer, outcome))
                }
                Err(loan) => settle_again(loan),
            },
            None => settle_again(loan),
        }
    }

    /// How a request ended, wherever its end is. While it is pending, its end wakes the task.
    #[cold]
    #[inline(never)]
    pub(super) fn poll_end<L: Lend>(&self, wr_id: u64, waker: &Waker) -> Poll<OpResult<L>> {
        match self.inflight.progress(wr_id, waker) {
            OpProgress::Pending => Poll::Pending,
            OpProgress::Over(memory, outcome) => Poll::Ready(end_of_any(wr_id, memory, outcome)),
            OpProgress::Lost(broken) => {
                Poll::Ready(Err(OpError { memory: None, kind: broken.into() }))
            }
        }
    }

    #[inline(always)]
    fn tag(&self, waker: Waker) -> OpTag {
        OpTag { queue: self.key, fate: Fate::Pending(waker) }
    }

    /// The tag of a send or a write of a list, which says how it ended once its slot is settled.
    #[inline(always)]
    fn sent(&self, opcode: WcOpcode) -> OpTag {
        OpTag { queue: self.key, fate: Fate::Sent(opcode) }
    }

    #[inline(always)]
    fn unwatched(&self) -> OpTag {
        OpTag { queue: self.key, fate: Fate::Unwatched }
    }

    /// `waker` is a parameter, here and below: an error drops it after the lock is released.
    #[inline(always)]
    fn post_send<L: Lend>(
        &self,
        wr: SendWr<'_>,
        memory: &mut Option<L>,
        named: Option<NamedBytes>,
        waker: Waker,
        failed: &mut Option<PostFailure>,
    ) -> Option<u64> {
        let (Posting::Qp(posting) | Posting::CheckedQp(posting)) = &self.posting else {
            return or_fail(Err(PostError::Unsupported), failed);
        };
        let mut qp = or_fail(posting.lock().ok_or(PostError::Forked), failed)?;
        let mut batch = or_fail(qp.send_batch(), failed)?;
        push_send(&mut batch, wr, memory, named, self.tag(waker), failed)?;
        let wr_id = batch.last();
        match S::ring(batch, &self.taken_over) {
            Ok(()) => Some(wr_id),
            Err(_) => or_fail(self.not_rung(wr_id), failed),
        }
    }

    #[inline(always)]
    fn post_recv<L: Lend>(
        &self,
        memory: &mut Option<L>,
        named: Option<NamedBytes>,
        waker: Waker,
        failed: &mut Option<PostFailure>,
    ) -> Option<u64> {
        match &self.posting {
            Posting::Qp(posting) | Posting::CheckedQp(posting) => {
                let mut qp = or_fail(posting.lock().ok_or(PostError::Forked), failed)?;
                let mut batch = or_fail(qp.recv_batch(), failed)?;
                push_recv(&mut batch, memory, named, self.tag(waker), failed)?;
                Some(ring_recvs(batch))
            }
            Posting::Srq(posting) => {
                let mut srq = or_fail(posting.lock().ok_or(PostError::Forked), failed)?;
                let mut batch = or_fail(srq.batch(), failed)?;
                push_recv(&mut batch, memory, named, self.tag(waker), failed)?;
                Some(ring_recvs(batch))
            }
        }
    }

    /// Returns the `wr_id` of a request that completes nevertheless.
    #[cold]
    fn not_rung(&self, wr_id: u64) -> Result<u64, PostFailure> {
        // The request stays in the queue, where the device does not look: flush it. If that fails, the device is gone,
        // and completes nothing.
        self.inflight.flush().map(|()| wr_id).map_err(|_| PostFailure::Lost(wr_id))
    }
}

/// The value, or the reason in `failed`. A `Result` with the reason would be in memory, also for a request that is
/// posted: 20 instructions.
#[inline(always)]
fn or_fail<V, E: Into<PostFailure>>(
    result: Result<V, E>,
    failed: &mut Option<PostFailure>,
) -> Option<V> {
    match result {
        Ok(value) => Some(value),
        Err(error) => {
            *failed = Some(error.into());
            None
        }
    }
}

/// Appends a send; an error leaves the memory. `named` is the memory's answer, if it had to be asked.
#[inline(always)]
fn push_send<L: Lend, S: Locking>(
    batch: &mut OwnedSendBatch<'_, OpTag, S>,
    wr: SendWr<'_>,
    memory: &mut Option<L>,
    named: Option<NamedBytes>,
    tag: OpTag,
    failed: &mut Option<PostFailure>,
) -> Option<()> {
    let Some(lent) = memory.take() else {
        return or_fail(Err(PostFailure::no_memory(tag)), failed);
    };
    match named {
        None => match batch.push(wr, lent, tag) {
            Ok(()) => Some(()),
            Err(refused) => put_back(refused, memory, Some, failed),
        },
        Some(named) => {
            let asked = AskedMemory { memory: lent.into_memory(), named };
            match batch.push(wr, asked, tag) {
                Ok(()) => Some(()),
                Err(refused) => put_back(refused, memory, AskedMemory::back, failed),
            }
        }
    }
}

/// Appends a receive, as [`push_send`] does a send.
#[inline(always)]
fn push_recv<L: Lend>(
    batch: &mut OwnedRecvBatch<'_, OpTag>,
    memory: &mut Option<L>,
    named: Option<NamedBytes>,
    tag: OpTag,
    failed: &mut Option<PostFailure>,
) -> Option<()> {
    let Some(lent) = memory.take() else {
        return or_fail(Err(PostFailure::no_memory(tag)), failed);
    };
    match named {
        None => match batch.push_any(lent, tag) {
            Ok(()) => Some(()),
            Err(refused) => put_back(refused, memory, Some, failed),
        },
        Some(named) => {
            let asked = AskedMemory { memory: lent.into_memory(), named };
            match batch.push_any(asked, tag) {
                Ok(()) => Some(()),
                Err(refused) => put_back(refused, memory, AskedMemory::back, failed),
            }
        }
    }
}

/// Requests that [`Queue::post_list`] posts.
struct List<'l, R: Request, L> {
    side: Side,
    /// The most requests to post.
    most: usize,
    waiting: &'l mut Waiting<R, L>,
    /// Those of the memory of the requests, if any had to be asked.
    answers: &'l mut VecDeque<Option<NamedBytes>>,
    posted: &'l mut Posted<L>,
}

impl<L: Lend, R: Request> List<'_, R, L> {
    /// Pushes the requests of one side, until one finds no room or these are the most.
    #[inline(always)]
    fn push_each(
        &mut self,
        mut push: impl FnMut(
            Kind<'_>,
            &mut Option<L>,
            Option<NamedBytes>,
            &mut Option<PostFailure>,
        ) -> Option<u64>,
    ) -> Result<(), PostError> {
        let List { side, most, waiting, answers, posted } = self;
        let mut ended = Ok(());
        waiting.post_each(|request, memory| {
            if request.kind().side() != *side || *most == 0 {
                return Err(memory);
            }
            *most -= 1;
            let (named, mut memory, mut failed) =
                (answers.pop_front().flatten(), Some(memory), None);
            if let Some(wr_id) = push(request.kind(), &mut memory, named, &mut failed) {
                posted.push(wr_id);
                return Ok(());
            }
            match (memory, failed) {
                (Some(memory), Some(PostFailure::Refused { error: PostError::Full, .. })) => {
                    ended = Err(PostError::Full);
                    Err(memory)
                }
                (memory, failed) => {
                    if let Some(PostFailure::Refused { error, .. }) = failed {
                        posted.refuse(memory, OpErrorKind::Post(error));
                    }
                    Ok(())
                }
            }
        });
        ended
    }
}

/// The end of a request, as its future returns it.
#[inline(always)]
fn end<L: Lend>(memory: Memory, outcome: Outcome) -> OpResult<L> {
    match (L::back(memory), outcome.is_success()) {
        (Some(memory), true) => Ok(Finished { memory, tag: (), outcome }),
        (memory, false) => Err(OpError { memory, kind: OpErrorKind::Status(outcome.status) }),
        (None, true) => Err(OpError { memory: None, kind: OpErrorKind::DriverGone }),
    }
}

/// The end of a send or a write of a buffer that succeeded.
#[inline(always)]
pub(super) fn end_of_sent<L: Lend>(buffer: Buffer, outcome: Outcome) -> OpResult<L> {
    match L::back(Memory::Buffer(buffer)) {
        Some(memory) => Ok(Finished { memory, tag: (), outcome }),
        None => Err(OpError { memory: None, kind: OpErrorKind::DriverGone }),
    }
}

/// As [`end`], for any memory.
#[inline(never)]
fn end_of_any<L: Lend>(wr_id: u64, mut memory: Memory, outcome: Outcome) -> OpResult<L> {
    if let (Memory::Buffer(buffer), true) = (&mut memory, wr_id & RECV != 0) {
        buffer.truncate(outcome.filled());
    }
    end(memory, outcome)
}

/// Puts memory back that takes another way, and drops the waker: no lock may be held.
#[cold]
#[inline(never)]
fn keep_for_later<L>(refused: PushError<L, OpTag>, memory: &mut Option<L>) -> Tried {
    *memory = Some(refused.memory);
    Tried::NeedsMore
}

/// Gives the memory of a refused request back.
#[cold]
#[inline(never)]
fn put_back<L, M>(
    refused: PushError<M, OpTag>,
    memory: &mut Option<L>,
    back: impl FnOnce(M) -> Option<L>,
    failed: &mut Option<PostFailure>,
) -> Option<()> {
    *memory = back(refused.memory);
    *failed = Some(PostFailure::Refused { error: refused.error, tag: Some(refused.tag) });
    None
}

/// Leaves the end of a request in its slot.
#[cold]
fn settle_again<V>(loan: ReturnedLoan<'_, Lent<OpTag>>) -> Option<V> {
    loan.settle();
    None
}

/// Hands receives to the device, and returns the `wr_id` of the last one.
#[inline(always)]
fn ring_recvs(batch: OwnedRecvBatch<'_, OpTag>) -> u64 {
    let wr_id = batch.last();
    // Receives that stay queued are received into. Any other error is that of a forked child, which has no lock.
    let _ = batch.ring();
    wr_id
}
