//! Queue pairs and shared receive queues whose requests are futures.

use super::driver::Hub;
use super::op::{AtomicOp, Op, Queue, Request};
use super::inflight::{Table, Tag};
use crate::error::Error;
use crate::memory::lock::{Guard, Lock};
use crate::owned::{
    Buffer, Lend, LendMut, Memory, OwnedQueuePair, OwnedSendBatch, OwnedSharedReceiveQueue, Refused,
};
use crate::pd::{Exclusive, ProtectionDomain, Shared, Sharing};
use crate::qp::{QpAttr, QpControl, QpState};
use crate::td::ThreadDomain;
use crate::wr::{PostError, Remote, SendWr};
use std::fmt;
use std::ops::Deref;
use std::sync::{Arc, PoisonError};

/// How a queue pair's batches are rung; see [`Sharing`].
pub trait RingToken: Sharing + Sized {
    /// What it takes: nothing, or the thread domain that the queue pair was created under. Give
    /// all queue pairs of one worker the same.
    type Token: Send;

    #[doc(hidden)]
    type Held<'t>;

    /// The token itself, for as long as it takes to post.
    #[doc(hidden)]
    fn hold(token: &mut Self::Token) -> Self::Held<'_>;

    /// Whether it is that of the queue pairs of `pd`.
    #[doc(hidden)]
    fn rings(held: &Self::Held<'_>, pd: &ProtectionDomain<Self>) -> bool;

    #[doc(hidden)]
    fn ring<T>(
        batch: OwnedSendBatch<'_, T, Self>,
        held: &mut Self::Held<'_>,
    ) -> Result<(), PostError>;
}

impl RingToken for Shared {
    type Token = ();

    #[doc(hidden)]
    type Held<'t> = ();

    #[doc(hidden)]
    fn hold((): &mut ()) {}

    #[doc(hidden)]
    fn rings((): &(), _: &ProtectionDomain) -> bool {
        true
    }

    #[doc(hidden)]
    fn ring<T>(batch: OwnedSendBatch<'_, T, Self>, (): &mut ()) -> Result<(), PostError> {
        batch.ring()
    }
}

impl RingToken for Exclusive {
    type Token = Arc<std::sync::Mutex<ThreadDomain>>;

    #[doc(hidden)]
    type Held<'t> = std::sync::MutexGuard<'t, ThreadDomain>;

    #[doc(hidden)]
    fn hold(token: &mut Self::Token) -> Self::Held<'_> {
        token.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[doc(hidden)]
    fn rings(td: &Self::Held<'_>, pd: &ProtectionDomain<Exclusive>) -> bool {
        pd.inner.td.as_ref().is_some_and(|own| Arc::ptr_eq(own, &td.inner))
    }

    #[doc(hidden)]
    fn ring<T>(
        batch: OwnedSendBatch<'_, T, Self>,
        td: &mut Self::Held<'_>,
    ) -> Result<(), PostError> {
        batch.ring(td)
    }
}

struct Posting<S: RingToken> {
    qp: OwnedQueuePair<Tag, S>,
    token: S::Token,
    /// Where the queue pair was made.
    pd: ProtectionDomain<S>,
}

struct Inner<S: RingToken> {
    /// First, so that the queue pair goes with `posting`.
    control: QpControl,
    posting: Lock<Posting<S>>,
    table: Arc<Table>,
    /// Keeps the driver at work.
    hub: Arc<Hub>,
}

impl<S: RingToken> Drop for Inner<S> {
    fn drop(&mut self) {
        let Some(posting) = self.posting.get_mut() else { return };
        if posting.qp.shares_receives() {
            // Else what it received would be lost, with its places in the shared queue.
            self.hub.close(&mut posting.qp);
        }
    }
}

impl<S: RingToken> Queue for Inner<S> {
    fn table(&self) -> &Arc<Table> {
        &self.table
    }

    fn post(
        &self,
        request: &Request<'_>,
        memory: Memory,
        tag: Tag,
    ) -> Result<(), (Option<Memory>, PostError)> {
        let Some(mut posting) = self.posting.lock() else {
            return Err((Some(memory), PostError::Forked));
        };
        let Posting { qp, token, pd } = &mut *posting;
        match request {
            Request::Send(wr) => {
                let mut held = S::hold(token);
                if !S::rings(&held, pd) {
                    // The program put another there. Before anything is lent: what a batch drops is
                    // the program's, too, and may post again.
                    return Err((Some(memory), PostError::ForeignThreadDomain));
                }
                let mut batch = match qp.send_batch() {
                    Ok(batch) => batch,
                    Err(error) => return Err((Some(memory), error)),
                };
                batch.push(*wr, memory, tag).map_err(refused)?;
                let rung = S::ring(batch, &mut held);
                drop(held);
                match rung {
                    Ok(()) => Ok(()),
                    Err(PostError::Kernel(_)) => {
                        // It stays in the queue, and nobody looks there: let it be flushed.
                        let flush = self.control.modify(&QpAttr::new().state(QpState::ERR));
                        drop(posting);
                        if flush.is_err() {
                            // The device is gone, or as good as that, and completes nothing.
                            self.table.give_up();
                        }
                        Ok(())
                    }
                    Err(error) => Err((None, error)),
                }
            }
            Request::Recv => {
                let mut batch = match qp.recv_batch() {
                    Ok(batch) => batch,
                    Err(error) => return Err((Some(memory), error)),
                };
                batch.push_any(memory, tag).map_err(refused)?;
                batch.ring();
                Ok(())
            }
        }
    }
}

fn refused(refused: Refused<Memory, Tag>) -> (Option<Memory>, PostError) {
    (Some(refused.memory), refused.error)
}

/// A queue pair whose requests are futures.
///
/// Made by [`CompletionQueue::create_qp`](super::CompletionQueue::create_qp). Clones are handles of
/// the same queue pair, for as many tasks as like; it lives as long as the last of them and of its
/// futures. Requests are posted in the order in which their futures are first polled.
pub struct QueuePair<S: RingToken = Shared> {
    inner: Arc<Inner<S>>,
}

impl<S: RingToken> Clone for QueuePair<S> {
    fn clone(&self) -> Self {
        QueuePair { inner: self.inner.clone() }
    }
}

impl<S: RingToken> QueuePair<S> {
    pub(super) fn new(
        qp: OwnedQueuePair<Tag, S>,
        token: S::Token,
        pd: ProtectionDomain<S>,
        table: Arc<Table>,
        hub: Arc<Hub>,
    ) -> Self {
        let control = QpControl { qp: (*qp).qp.clone() };
        let posting = Lock::new(Posting { qp, token, pd });
        QueuePair { inner: Arc::new(Inner { posting, table, control, hub }) }
    }

    /// Any request, on `memory`; its number is not used, and it names no memory itself.
    pub fn post<'a, L: Lend>(&self, wr: SendWr<'a>, memory: L) -> Op<'a, L> {
        Op::new(self.inner.clone(), Request::Send(wr), memory)
    }

    /// Sends a message for the peer's next receive.
    pub fn send<L: Lend>(&self, memory: L) -> Op<'static, L> {
        self.post(SendWr::send(&[]), memory)
    }

    /// Sends a short message, which is copied when it is posted; at most what the queue pair was
    /// created for ([`max_inline_data`](crate::QpCaps::max_inline_data)).
    pub fn send_inline<'a>(&self, bytes: &'a [u8]) -> Op<'a, ()> {
        self.post(SendWr::send(&[]).inline(bytes), ())
    }

    /// Receives a message. A [`Buffer`] comes back as long as what arrived in it;
    /// [`Outcome::filled`](crate::owned::Outcome::filled) tells that of other memory.
    pub fn recv<L: LendMut>(&self, memory: L) -> Op<'static, L> {
        Op::new(self.inner.clone(), Request::Recv, memory)
    }

    /// Reads from the peer as many bytes as `memory` holds.
    pub fn read<L: LendMut>(&self, remote: Remote, memory: L) -> Op<'static, L> {
        self.post(SendWr::read(remote, &[]), memory)
    }

    /// Writes `memory` to the peer.
    pub fn write<L: Lend>(&self, remote: Remote, memory: L) -> Op<'static, L> {
        self.post(SendWr::write(remote, &[]), memory)
    }

    /// Adds to eight bytes of the peer, at a multiple of eight.
    pub fn fetch_add(&self, remote: Remote, add: u64, mut buffer: Buffer) -> AtomicOp<'static> {
        buffer.set_len(8);
        AtomicOp(self.post(SendWr::fetch_add(remote, add, &[]), buffer))
    }

    /// Replaces eight bytes of the peer, at a multiple of eight, if they equal `compare`.
    pub fn compare_swap(
        &self,
        remote: Remote,
        compare: u64,
        swap: u64,
        mut buffer: Buffer,
    ) -> AtomicOp<'static> {
        buffer.set_len(8);
        AtomicOp(self.post(SendWr::compare_swap(remote, compare, swap, &[]), buffer))
    }

    /// Calls everything off: moves the queue pair to state [`ERR`](QpState::ERR). What was posted
    /// ends with [`WR_FLUSH_ERR`](crate::WcStatus::WR_FLUSH_ERR) and gives its memory back; what was
    /// not fails, now and later, with [`OpErrorKind::Earlier`](super::OpErrorKind::Earlier).
    ///
    /// # Errors
    ///
    /// Those of [`QpControl::modify`]. Nothing can be posted afterwards in any case.
    pub fn abort(&self) -> crate::Result<()> {
        self.inner.table.abort()
    }

    /// Requests under way, those that nobody waits for included.
    pub fn under_way(&self) -> usize {
        self.inner.table.under_way()
    }
}

/// Everything that is not posting.
impl<S: RingToken> Deref for QueuePair<S> {
    type Target = QpControl;

    fn deref(&self) -> &QpControl {
        &self.inner.control
    }
}

impl<S: RingToken> fmt::Debug for QueuePair<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.control.fmt(f)
    }
}

struct SharedInner {
    srq: Lock<OwnedSharedReceiveQueue<Tag>>,
    table: Arc<Table>,
    _hub: Arc<Hub>,
}

impl Queue for SharedInner {
    fn table(&self) -> &Arc<Table> {
        &self.table
    }

    fn post(
        &self,
        _: &Request<'_>,
        memory: Memory,
        tag: Tag,
    ) -> Result<(), (Option<Memory>, PostError)> {
        let Some(mut srq) = self.srq.lock() else {
            return Err((Some(memory), PostError::Forked));
        };
        let mut batch = match srq.batch() {
            Ok(batch) => batch,
            Err(error) => return Err((Some(memory), error)),
        };
        batch.push_any(memory, tag).map_err(refused)?;
        batch.ring();
        Ok(())
    }
}

/// A shared receive queue whose receives are futures.
///
/// [`Outcome::qpn`](crate::owned::Outcome::qpn) tells which queue pair took a receive.
#[derive(Clone)]
pub struct SharedReceiveQueue {
    inner: Arc<SharedInner>,
}

impl SharedReceiveQueue {
    pub(super) fn new(srq: OwnedSharedReceiveQueue<Tag>, hub: Arc<Hub>) -> Self {
        let (srq, table) = (Lock::new(srq), Table::new(None));
        SharedReceiveQueue { inner: Arc::new(SharedInner { srq, table, _hub: hub }) }
    }

    /// Receives a message of any of its queue pairs.
    pub fn recv<L: LendMut>(&self, memory: L) -> Op<'static, L> {
        Op::new(self.inner.clone(), Request::Recv, memory)
    }

    pub(super) fn lock(
        &self,
        verb: &'static str,
    ) -> crate::Result<Guard<'_, OwnedSharedReceiveQueue<Tag>>> {
        self.inner.srq.lock().ok_or_else(|| Error::forked(verb))
    }

    pub(super) fn table(&self) -> &Arc<Table> {
        &self.inner.table
    }
}

impl fmt::Debug for SharedReceiveQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.inner.srq.lock() {
            Some(srq) => srq.fmt(f),
            None => f.write_str("SharedReceiveQueue(forked)"),
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use crate::QpType;
    use crate::memory::lock::in_child_while_held;
    use crate::tests::futures::{Futures, cx};
    use std::future::Future;
    use std::pin::Pin;
    use std::task::Poll;

    #[test]
    #[cfg_attr(miri, ignore = "it forks")]
    fn a_child_does_not_post_whatever_another_thread_holds() {
        let futures = Futures::new();
        let Futures { bench, cq, qp, pool, .. } = &futures;
        let srq = cq.create_srq(&bench.pd, 4, |srq| srq).unwrap();
        let child = || {
            let sent = Pin::new(&mut qp.send(pool.take().unwrap())).poll(&mut cx());
            assert!(matches!(sent, Poll::Ready(Err(error)) if error.memory.is_some()));
            let received = Pin::new(&mut srq.recv(pool.take().unwrap())).poll(&mut cx());
            assert!(matches!(received, Poll::Ready(Err(error)) if error.memory.is_some()));
            let made = cq.create_qp_on(&bench.pd, QpType::RC, &srq, |qp| qp);
            assert!(made.unwrap_err().is_forked());
            assert!(format!("{srq:?}").contains("forked"));
        };
        in_child_while_held(|| qp.inner.posting.lock(), child);
        in_child_while_held(|| srq.inner.srq.lock(), child);
    }
}
