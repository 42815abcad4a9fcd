//! The driver, which polls a completion queue and wakes the futures of its requests.

use super::deferred::Deferred;
use super::inflight::{InflightKey, InflightTable, OpTag, complete, complete_sent};
use super::locking::Locking;
use super::poll_loop::{DriverIo, PollLoop};
use crate::channel::CompletionChannel;
use crate::completion::Completion;
use crate::cq::{CompletionQueue, CqControl, Notify, PollError};
use crate::error::{Error, Result};
use crate::events::file::set_nonblocking;
use crate::first_panic::FirstPanic;
use crate::lending::loan_table::ReturnedLoan;
use crate::owned::{Lent, OwnedCompletionQueue, OwnedQueuePair, Visit, VisitedCompletion};
use crate::pd::Shared;
use crate::sync::lock::{AnyLock, Lock};
use crate::wc::WcOpcode;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use std::fmt;
use std::future::Future;
use std::os::fd::{AsFd, BorrowedFd};
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Waker};

/// Completions that are handled before other tasks run.
const POLL_BATCH: usize = 256;

/// Tells a [`Driver`] when its completion channel is readable or in error.
///
/// Implement it to run a driver in another event loop than tokio's. Register the file that
/// [`AsyncCompletionQueue::as_fd`](super::AsyncCompletionQueue) names for reading, edge-triggered or not. When the
/// device goes away, the file is in error and not readable: `epoll(7)` reports `EPOLLERR` alone, and this has to count,
/// or the futures wait for ever.
///
/// For an event loop of the program's own, which calls `readable` whenever epoll names the file:
///
/// ```no_run
/// use std::sync::{Arc, Mutex};
/// use std::task::{Context, Poll, Waker};
/// use uverbs::aio::{AsyncCompletionQueue, Driver, Readiness};
///
/// #[derive(Default)]
/// struct State {
///     ready: bool,
///     waker: Option<Waker>,
/// }
///
/// struct OwnLoop(Arc<Mutex<State>>);
///
/// fn readable(file: &OwnLoop) {
///     let mut state = file.0.lock().expect("no panic");
///     state.ready = true;
///     state.waker.take().into_iter().for_each(Waker::wake);
/// }
///
/// impl Readiness for OwnLoop {
///     fn poll_read(
///         &mut self,
///         cx: &mut Context<'_>,
///         read: &mut dyn FnMut() -> uverbs::Result<()>,
///     ) -> Poll<uverbs::Result<()>> {
///         let mut state = self.0.lock().expect("no panic");
///         if !std::mem::take(&mut state.ready) {
///             state.waker = Some(cx.waker().clone());
///             return Poll::Pending;
///         }
///         // Cleared before the call: what the loop learns during it is kept.
///         drop(state);
///         Poll::Ready(read())
///     }
/// }
///
/// # use std::os::fd::BorrowedFd;
/// # fn add_to_epoll(_: BorrowedFd<'_>) -> uverbs::Result<()> { Ok(()) }
/// # fn f(context: &uverbs::Context) -> uverbs::Result<()> {
/// let (cq, mut driver): (AsyncCompletionQueue, Driver<OwnLoop>) =
///     context.cq_builder(64).build_async(|file| {
///         add_to_epoll(file)?;
///         Ok(OwnLoop(Arc::default()))
///     })?;
/// readable(driver.readiness_mut());
/// println!("{} completions were of no request", cq.unmatched());
/// # Ok(()) }
/// ```
pub trait Readiness {
    /// If the file may be readable or in error, calls `read`, which reads an event. Afterwards it clears the
    /// readiness that it knew of *before* the call, and keeps what it learned during the call. Otherwise it
    /// arranges that `cx` is woken when the file becomes readable or is in error.
    ///
    /// The number of events does not matter: after each one the driver arms the queue and looks at all
    /// completions. The driver ends with `EIO` if the file is in error, or if it is reported as readable a
    /// thousand times in a row without an event.
    ///
    /// # Errors
    ///
    /// The result of `read`, or the reason why the event loop cannot watch the file; the driver ends with it.
    fn poll_read(
        &mut self,
        cx: &mut Context<'_>,
        read: &mut dyn FnMut() -> Result<()>,
    ) -> Poll<Result<()>>;
}

/// Sleeps in `read(2)` until the next event, in place of an event loop: for a thread whose futures wait for requests of
/// one completion queue and for nothing else. Sleeping and reading the event are one system call, as with
/// [`CompletionChannel::wait`](crate::CompletionChannel::wait) of a blocking channel; arming the queue is another on
/// soft-RoCE.
///
/// The driver's poll returns after completions, and blocks its thread while there are none: poll the futures first, for
/// they post the requests, and again while they wake themselves. A completion ends the sleep, and so does the removal of
/// the device. A waker, a timer or another file does not: the handles and futures of the queue stay on the driver's
/// thread. On a stepped fabric nobody steps while a thread sleeps; `sim::Fabric::drive` is for futures there.
///
/// ```no_run
/// use std::future::Future;
/// use std::pin::pin;
/// use std::sync::Arc;
/// use std::sync::atomic::{AtomicBool, Ordering};
/// use std::task::{Context, Poll, Wake, Waker};
/// use uverbs::aio::{AsyncQueuePair, Blocking, Driver};
///
/// /// Whether a future was woken since it was polled.
/// struct Woken(AtomicBool);
///
/// impl Wake for Woken {
///     fn wake(self: Arc<Self>) {
///         self.0.store(true, Ordering::Relaxed);
///     }
/// }
///
/// /// Runs a future of the queue that the driver polls.
/// fn block_on<F: Future>(driver: Driver<Blocking>, future: F) -> uverbs::Result<F::Output> {
///     let woken = Arc::new(Woken(AtomicBool::new(true)));
///     let waker = Waker::from(woken.clone());
///     let (mut driver, mut future) = (pin!(driver), pin!(future));
///     loop {
///         while woken.0.swap(false, Ordering::Relaxed) {
///             if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
///                 return Ok(output);
///             }
///         }
///         if let Poll::Ready(ended) = driver.as_mut().poll(&mut Context::from_waker(&waker)) {
///             ended?;
///             panic!("the future waits, and has no queue left");
///         }
///     }
/// }
/// # fn f(context: &uverbs::Context) -> uverbs::Result<()> {
/// let (cq, driver) = context.cq_builder(64).build_async(Blocking::new)?;
/// # drop((cq, driver)); Ok(()) }
/// ```
#[derive(Debug)]
pub struct Blocking(());

impl Blocking {
    /// Makes reads of a completion queue's file wait.
    ///
    /// # Errors
    ///
    /// Those of `ioctl(2)`.
    pub fn new(file: BorrowedFd<'_>) -> Result<Blocking> {
        set_nonblocking(file, false).map_err(|errno| Error::new("set_nonblocking", errno))?;
        Ok(Blocking(()))
    }
}

impl Readiness for Blocking {
    fn poll_read(
        &mut self,
        _: &mut Context<'_>,
        read: &mut dyn FnMut() -> Result<()>,
    ) -> Poll<Result<()>> {
        Poll::Ready(read())
    }
}

/// A completion queue, as its driver and its queue pairs share it.
pub(super) struct CqShared<S: Locking> {
    pub(super) polled: S::Lock<Polled<S>>,
    pub(super) control: CqControl,
    pub(super) channel: CompletionChannel,
    /// The right to ring the queue pairs.
    pub(super) token: S::Token,
}

/// The completion queue that the driver polls, and the futures that it finds.
pub(super) struct Polled<S: Locking> {
    pub(super) cq: OwnedCompletionQueue<OpTag>,
    /// `None` when the driver has ended.
    pub(super) queues: Option<InflightTable<S>>,
    /// How many requests were over so far, but for sends and writes that succeeded.
    over: u64,
}

/// Polls for at most `most` completions, and returns how many there were.
#[inline]
fn poll<S: Locking>(
    cq: &mut OwnedCompletionQueue<OpTag>,
    queues: Option<&InflightTable<S>>,
    over: &mut u64,
    most: usize,
    deferred: &mut Deferred,
) -> std::result::Result<usize, PollError> {
    // Which queues made room is remembered only if futures wait. Those that begin to wait meanwhile all try again.
    let someone_waits = queues.is_some_and(InflightTable::anyone_waits);
    let found = match someone_waits {
        false => cq.poll_visiting(most, &mut Visitor::<S, false> { queues, over, deferred }),
        true => poll_for_room(cq, most, Visitor { queues, over, deferred }),
    }?;
    if let Some(queues) = queues {
        if found > 0 {
            queues.make_room(!someone_waits, deferred);
        }
    }
    Ok(found)
}

/// Polls while futures wait for room. Out of line: few do.
#[cold]
#[inline(never)]
fn poll_for_room<S: Locking>(
    cq: &mut OwnedCompletionQueue<OpTag>,
    most: usize,
    mut visitor: Visitor<'_, S, true>,
) -> std::result::Result<usize, PollError> {
    visitor.deferred.forget_room();
    cq.poll_visiting(most, &mut visitor)
}

/// Writes the ends of requests to their slots. `WAITS` is whether futures wait for room, in any queue.
struct Visitor<'d, S: Locking, const WAITS: bool> {
    queues: Option<&'d InflightTable<S>>,
    over: &'d mut u64,
    deferred: &'d mut Deferred,
}

impl<S: Locking, const WAITS: bool> Visit<OpTag> for Visitor<'_, S, WAITS> {
    #[inline(always)]
    fn wants_sent(&self) -> bool {
        !WAITS
    }

    #[inline(always)]
    fn sent(&mut self, loan: ReturnedLoan<'_, Lent<OpTag>>, completion: Completion<'_>) {
        match completion.opcode() {
            opcode @ (WcOpcode::SEND | WcOpcode::WRITE) => {
                complete_sent(loan, opcode, self.deferred);
            }
            _ => self.other(VisitedCompletion::success(loan, completion)),
        }
    }

    #[inline(always)]
    fn success(&mut self, done: VisitedCompletion<'_, OpTag>) {
        if WAITS {
            return self.other(done);
        }
        complete(done, *self.over, self.deferred);
        *self.over += 1;
    }

    /// Lets the futures of the queue know of a request that failed, and remembers that the queue made room if futures
    /// wait for that.
    #[inline(never)]
    fn other(&mut self, done: VisitedCompletion<'_, OpTag>) {
        let Visitor { queues, over, deferred } = self;
        if let Some(OpTag { queue, .. }) = done.tag() {
            if WAITS {
                deferred.make_room(*queue);
            }
            if !done.is_success() {
                if let Some(inflight) = queues.and_then(|queues| queues.find(*queue)) {
                    inflight.fail(done.status(), deferred);
                }
            }
        }
        complete(done, **over, deferred);
        **over += 1;
    }
}

impl<S: Locking> Polled<S> {
    /// The completion queue, and the table of queues whose futures fail when the driver ends; an error if it has.
    pub(super) fn running(&mut self, verb: &'static str) -> Result<Running<'_, S>> {
        let Polled { cq, queues, over } = self;
        match queues {
            Some(queues) => Ok(Running { cq, queues, over }),
            None => {
                Err(Error::new(verb, Errno::PIPE).detail("the completion queue's driver is gone"))
            }
        }
    }
}

/// [`Polled`] while the driver runs.
pub(super) struct Running<'p, S: Locking> {
    pub(super) cq: &'p mut OwnedCompletionQueue<OpTag>,
    pub(super) queues: &'p mut InflightTable<S>,
    over: &'p mut u64,
}

impl<S: Locking> Running<'_, S> {
    /// Has `adopt` take a queue over. It polls the completion queue with its second argument: the futures of what that
    /// finds are woken by `deferred`.
    pub(super) fn take_over<Q>(
        &mut self,
        deferred: &mut Deferred,
        adopt: impl FnOnce(&mut OwnedCompletionQueue<OpTag>, &mut PollAll<'_>) -> Q,
    ) -> Q {
        let Running { cq, queues, over } = self;
        adopt(cq, &mut |cq| poll(cq, Some(&**queues), over, usize::MAX, deferred).map(drop))
    }
}

/// Polls until there is nothing more.
type PollAll<'p> =
    dyn FnMut(&mut OwnedCompletionQueue<OpTag>) -> std::result::Result<(), PollError> + 'p;

type PolledGuard<'l, S> = <<S as Locking>::Lock<Polled<S>> as AnyLock<Polled<S>>>::Guard<'l>;

impl<S: Locking> CqShared<S> {
    pub(super) fn new(cq: CompletionQueue, channel: CompletionChannel, token: S::Token) -> Self {
        let control = cq.control();
        let (cq, queues) = (OwnedCompletionQueue::new(cq), Some(InflightTable::default()));
        CqShared { polled: S::Lock::new(Polled { cq, queues, over: 0 }), control, channel, token }
    }

    pub(super) fn polled(&self, verb: &'static str) -> Result<PolledGuard<'_, S>> {
        self.polled.lock().ok_or_else(|| Error::forked(verb))
    }

    /// Fails all futures: the driver has ended.
    fn driver_gone(&self) {
        // In a forked child no task waits: they are the parent's.
        let Some(queues) = self.polled.lock().map(|mut polled| polled.queues.take()) else {
            return;
        };
        let mut deferred = Deferred::default();
        for inflight in queues.iter().flat_map(InflightTable::iter) {
            inflight.driver_gone(&mut deferred);
        }
        // This may run in a destructor, which should not panic because a waker does.
        deferred.run_quietly();
    }
}

/// The driver's waker. It is in an `Arc` because cloning a waker runs code of the program, which must not
/// run under the lock.
type DriverWaker = Arc<Lock<Option<Arc<Waker>>>>;

/// Keeps the driver running: it ends when the last handle is dropped.
pub(super) struct DriverHandle<S: Locking> {
    pub(super) shared: Arc<CqShared<S>>,
    waker: DriverWaker,
}

impl<S: Locking> DriverHandle<S> {
    /// Wakes the driver; in a forked child, where the driver is the parent's, it does nothing.
    fn wake(&self) {
        let waker = self.waker.lock().and_then(|waker| waker.clone());
        // A destructor does this, too.
        FirstPanic::of_one(|| waker.into_iter().for_each(|waker| waker.wake_by_ref()));
    }

    /// Resets a queue pair, and lets the driver find what had completed.
    pub(super) fn close(&self, qp: &mut OwnedQueuePair<OpTag, S>) {
        // If the reset fails, the queue pair's destructor leaks what may be in use.
        // Nothing of the program runs under the lock.
        let mut deferred = Deferred::default();
        let unposted = self.shared.polled.lock().map(|mut polled| {
            let Polled { cq, queues, over } = &mut *polled;
            let queues = queues.as_ref();
            qp.reset_keeping(cq, |cq| poll(cq, queues, over, usize::MAX, &mut deferred).map(drop))
        });
        let mut calls = FirstPanic::default();
        calls.catch(|| deferred.run());
        calls.catch(|| drop(unposted));
        calls.catch(|| self.wake());
        calls.resume();
    }

    /// No future waits for requests of the queue any more.
    pub(super) fn unregister(&self, key: InflightKey) {
        let Some(mut polled) = self.shared.polled.lock() else { return };
        let removed = polled.queues.as_mut().and_then(|queues| queues.remove(key));
        drop(polled);
        // It may be the last reference, and hold memory of the program.
        drop(removed);
    }
}

impl<S: Locking> Drop for DriverHandle<S> {
    fn drop(&mut self) {
        self.wake();
    }
}

/// Polls a completion queue, and wakes the futures of the requests that are over. It is a future itself,
/// which ends when the last handle of the queue is dropped, or with an error.
///
/// While completions keep coming, it polls without a system call, and yields to other tasks after each 256
/// completions. When there are none, it reads the channel's events, arms the queue, polls once more, and
/// sleeps until the event loop finds the channel readable. It calls wakers after all locks are released,
/// and calls each one even if another one panics. When it ends or is dropped, all futures of the queue fail
/// with [`OpErrorKind::DriverGone`](super::OpErrorKind::DriverGone).
#[must_use = "nothing happens unless it is polled"]
pub struct Driver<W, S: Locking = Shared> {
    shared: Arc<CqShared<S>>,
    driver: Weak<DriverHandle<S>>,
    waker: DriverWaker,
    /// The same waker as in `waker`, to compare with without the lock.
    known_waker: Option<Arc<Waker>>,
    readiness: W,
    poll_loop: PollLoop,
    deferred: Deferred,
}

impl<W, S: Locking> Driver<W, S> {
    /// A driver, and the handle that keeps it running.
    pub(super) fn new(shared: CqShared<S>, readiness: W) -> (Arc<DriverHandle<S>>, Self) {
        let (shared, waker) = (Arc::new(shared), DriverWaker::default());
        let handle = Arc::new(DriverHandle { shared: shared.clone(), waker: waker.clone() });
        let (poll_loop, deferred) = (PollLoop::default(), Deferred::with_capacity(POLL_BATCH));
        let (driver, known_waker) = (Arc::downgrade(&handle), None);
        (handle, Driver { shared, driver, waker, known_waker, readiness, poll_loop, deferred })
    }

    /// The event loop's side, as [`build_async`](crate::CqBuilder::build_async) or
    /// [`Worker::start`](super::Worker::start) got it.
    pub fn readiness_mut(&mut self) -> &mut W {
        &mut self.readiness
    }
}

/// The queue and the channel that a [`PollLoop`] works with outside of tests.
struct RealIo<'d, W, S: Locking> {
    shared: &'d CqShared<S>,
    driver: &'d Weak<DriverHandle<S>>,
    readiness: &'d mut W,
    deferred: &'d mut Deferred,
}

impl<W: Readiness, S: Locking> DriverIo for RealIo<'_, W, S> {
    fn poll_cq(&mut self) -> Result<usize> {
        let mut polled = self.shared.polled("poll_cq")?;
        let Polled { cq, queues, over } = &mut *polled;
        let found = poll(cq, queues.as_ref(), over, POLL_BATCH, self.deferred);
        drop(polled);
        // After an error, too: its wakers are not in their slots any more.
        self.deferred.run();
        Ok(found?)
    }

    fn has_users(&self) -> bool {
        self.driver.strong_count() > 0
    }

    fn arm(&mut self) -> Result<()> {
        self.shared.polled("req_notify_cq")?.cq.req_notify(Notify::Next)
    }

    fn poll_event(&mut self, cx: &mut Context<'_>, all: bool) -> Poll<Result<bool>> {
        let channel = &self.shared.channel;
        let mut heard = false;
        let mut read = || {
            while channel.try_next()?.is_some() {
                heard = true;
                if !all {
                    break;
                }
            }
            Ok(())
        };
        match self.readiness.poll_read(cx, &mut read) {
            // The file was reported as ready and held no event: it may be in error.
            Poll::Ready(Ok(())) if !heard => Poll::Ready(check(channel).map(|()| false)),
            Poll::Ready(read) => Poll::Ready(read.map(|()| heard)),
            Poll::Pending => Poll::Pending,
        }
    }
}

/// Fails if the file is in error.
fn check(channel: &impl AsFd) -> Result<()> {
    let mut file = [PollFd::new(channel, PollFlags::empty())];
    match rustix::event::poll(&mut file, Some(&Timespec::default())) {
        Ok(0) | Err(_) => Ok(()),
        Ok(_) => Err(Error::new("poll", Errno::IO).detail("the completion channel is in error")),
    }
}

impl<W: Readiness + Unpin, S: Locking> Future for Driver<W, S> {
    type Output = Result<()>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        let Driver { shared, driver, waker, known_waker, readiness, poll_loop, deferred } =
            &mut *self;
        // First, so that a handle that is dropped from now on wakes this task.
        if !known_waker.as_ref().is_some_and(|known_waker| known_waker.will_wake(cx.waker())) {
            // Wakers are cloned and dropped without the lock. Both run code of the program, and the old waker
            // may hold the last handle of this queue.
            let new = Arc::new(cx.waker().clone());
            let old = waker.lock().and_then(|mut known| known.replace(new.clone()));
            drop((old, known_waker.replace(new)));
        }
        let end = poll_loop.poll(&mut RealIo { shared, driver, readiness, deferred }, cx);
        if end.is_ready() {
            // When the driver ends, every pending future fails, even if the driver is not dropped.
            shared.driver_gone();
        }
        end
    }
}

impl<W, S: Locking> Drop for Driver<W, S> {
    fn drop(&mut self) {
        self.shared.driver_gone();
    }
}

impl<W, S: Locking> fmt::Debug for Driver<W, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Driver").field("poll_loop", &self.poll_loop).finish_non_exhaustive()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::sync::lock::in_child_while_held;
    use crate::tests::futures::{Futures, cx};
    use crate::uverbs::scripted::Role;
    use crate::{QpType, QueuePair, SharedReceiveQueue};
    use rustix::pipe::{PipeFlags, pipe_with};
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Wake;

    #[derive(Default)]
    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Runs `child` in forked children, while another thread of the parent holds one of the locks.
    fn forked(child: impl Fn(Futures, QueuePair, SharedReceiveQueue)) {
        for which in 0..2 {
            let futures = Futures::new();
            let Futures { pd, cq, .. } = &futures;
            let qp = pd.qp_builder(cq, cq, QpType::RC).build().unwrap();
            let srq = pd.srq_builder(4).build().unwrap();
            let (shared, waker) = (cq.driver.shared.clone(), cq.driver.waker.clone());
            let mut of_child = Some((futures, qp, srq));
            let act = || {
                let (futures, qp, srq) = of_child.take().unwrap();
                child(futures, qp, srq);
            };
            match which {
                0 => in_child_while_held(|| shared.polled.lock(), act),
                _ => in_child_while_held(|| waker.lock(), act),
            }
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "it forks")]
    fn a_child_can_drop_everything_while_a_thread_of_its_parent_holds_a_lock() {
        forked(|futures, qp, srq| drop((futures, qp, srq)));
    }

    #[test]
    #[cfg_attr(miri, ignore = "it forks")]
    fn a_child_can_drop_a_queue_pair_while_a_thread_of_its_parent_holds_a_slot() {
        let futures = Futures::new();
        let mut sent = futures.qp.send(futures.pool.take().unwrap());
        assert!(Pin::new(&mut sent).poll(&mut cx()).is_pending());
        let request = futures.bench.script.take(futures.qp.handle(), Role::Send).unwrap();
        let wr_id = u64::from_ne_bytes(request[..8].try_into().unwrap());
        let inflight = futures.qp.queue().inflight.clone();
        let hold = || inflight.loans_here(wr_id).map(|loans| loans.claim(wr_id));
        let mut of_child = Some((futures, sent));
        in_child_while_held(hold, || drop(of_child.take()));
    }

    #[test]
    #[cfg_attr(miri, ignore = "it forks")]
    fn a_child_is_refused_while_a_thread_of_its_parent_holds_a_lock() {
        forked(|mut futures, qp, srq| {
            assert!(futures.cq.adopt(qp).unwrap_err().error.is_forked());
            assert!(futures.cq.adopt_srq(srq).unwrap_err().error.is_forked());
            assert_eq!((futures.cq.unmatched(), futures.qp.in_flight()), (0, 0));
            assert!(format!("{:?}", futures.cq).contains("forked"));
            assert!(futures.qp.abort().unwrap_err().is_forked());
            let Poll::Ready(end) = Pin::new(&mut futures.driver).poll(&mut cx()) else {
                panic!("the child's driver waits")
            };
            assert!(end.unwrap_err().is_forked());
        });
    }

    /// A waker of the parent may write into the parent's event loop.
    #[test]
    #[cfg_attr(miri, ignore = "it forks")]
    fn a_child_does_not_wake_tasks_of_its_parent() {
        let mut futures = Some(Futures::new());
        let count = Arc::<Count>::default();
        let waker = Waker::from(count.clone());
        let driver = &mut futures.as_mut().unwrap().driver;
        assert!(Pin::new(driver).poll(&mut Context::from_waker(&waker)).is_pending());
        crate::sync::fork::in_child(|| {
            drop(futures.take());
            assert_eq!(count.0.load(Ordering::Relaxed), 0);
        });
        let Futures { bench: _bench, driver: _driver, qp, cq, .. } = futures.unwrap();
        drop((qp, cq));
        assert!(count.0.load(Ordering::Relaxed) > 0, "the parent's own");
    }

    #[test]
    #[cfg_attr(miri, ignore = "it polls a file")]
    fn a_file_in_error_is_distinguished_from_a_silent_one() {
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        assert!(check(&reader).is_ok() && check(&writer).is_ok());
        drop(reader);
        assert_eq!(check(&writer).unwrap_err().errno(), Errno::IO);
    }
}
