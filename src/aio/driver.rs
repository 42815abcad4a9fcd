//! The driver, which polls a completion queue and wakes the futures of its requests.

use super::deferred::Deferred;
use super::inflight::{Inflight, OpTag};
use super::poll_loop::{DriverIo, PollLoop};
use super::queue::{QueuePair, RingToken, SharedReceiveQueue};
use crate::channel::CompletionChannel;
use crate::cq::Notify;
use crate::error::{Error, Result};
use crate::memory::lock::{Guard, Lock};
use crate::owned::{
    OwnedCompletion, OwnedCompletionQueue, OwnedQueuePair, OwnedSharedReceiveQueue,
};
use crate::pd::{ProtectionDomain, Sharing};
use crate::qp::{QpBuilder, QpType};
use crate::srq::SrqBuilder;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use std::fmt;
use std::future::Future;
use std::os::fd::{AsFd, BorrowedFd};
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Waker};

const VERB: &str = "create_qp";

/// Completions that are handled before other tasks run.
const POLL_BATCH: usize = 256;

/// Tells a [`Driver`] when its completion channel is readable or in error.
///
/// Implement it to run a driver in another event loop than tokio's. Register the file that
/// [`CompletionQueue::as_fd`] names for reading, edge-triggered or not. When the device goes away, the file
/// is in error and not readable: `epoll(7)` reports `EPOLLERR` alone, and this has to count, or the futures
/// wait for ever.
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
    /// What `read` returns, or why the event loop cannot watch the file; the driver ends with it.
    fn poll_read(
        &mut self,
        cx: &mut Context<'_>,
        read: &mut dyn FnMut() -> Result<()>,
    ) -> Poll<Result<()>>;
}

/// What the driver and the queue pairs share.
pub(super) struct CqShared {
    cq: Lock<OwnedCompletionQueue<OpTag>>,
    channel: CompletionChannel,
    /// The requests in flight of each queue; `None` when the driver has ended.
    queues: Lock<Option<Vec<Weak<Inflight>>>>,
}

impl CqShared {
    fn cq(&self, verb: &'static str) -> Result<Guard<'_, OwnedCompletionQueue<OpTag>>> {
        self.cq.lock().ok_or_else(|| Error::forked(verb))
    }

    /// Fails all futures: the driver has ended.
    fn driver_gone(&self) {
        // In a forked child no task waits: they are the parent's.
        let Some(queues) = self.queues.lock().map(|mut queues| queues.take()) else {
            return;
        };
        let mut deferred = Deferred::default();
        for inflight in queues.into_iter().flatten() {
            if let Some(inflight) = inflight.upgrade() {
                inflight.driver_gone(&mut deferred);
            }
        }
        // This may run in a destructor, which should not panic because a waker does.
        deferred.run_quietly();
    }
}

/// The driver's waker. It is in an `Arc` because cloning a waker runs code of the program, which must not
/// run under the lock.
type DriverWaker = Arc<Lock<Option<Arc<Waker>>>>;

/// Keeps the driver running: it ends when the last handle is dropped.
pub(super) struct DriverHandle {
    shared: Arc<CqShared>,
    waker: DriverWaker,
}

impl DriverHandle {
    /// Wakes the driver; in a forked child, where the driver is the parent's, it does nothing.
    fn wake(&self) {
        let waker = self.waker.lock().and_then(|waker| waker.clone());
        if let Some(waker) = waker {
            waker.wake_by_ref();
        }
    }

    /// Resets a queue pair, and lets the driver find what had completed.
    pub(super) fn close<S: Sharing>(&self, qp: &mut OwnedQueuePair<OpTag, S>) {
        // If the reset fails, the queue pair's destructor leaks what may be in use.
        if let Some(mut cq) = self.shared.cq.lock() {
            let _ = qp.reset(&mut cq);
        }
        self.wake();
    }
}

impl Drop for DriverHandle {
    fn drop(&mut self) {
        self.wake();
    }
}

/// A completion queue whose requests are futures. Clones are handles of the same queue, and move between
/// threads.
///
/// It comes with a [`Driver`], which is to be spawned on an event loop; with tokio,
/// `CompletionQueue::spawn` does both. See [`aio`](super#) for an example.
#[derive(Clone)]
pub struct CompletionQueue {
    driver: Arc<DriverHandle>,
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
pub struct Driver<W> {
    shared: Arc<CqShared>,
    driver: Weak<DriverHandle>,
    waker: DriverWaker,
    /// The same waker as in `waker`, to compare with without the lock.
    known_waker: Option<Arc<Waker>>,
    readiness: W,
    poll_loop: PollLoop,
    deferred: Deferred,
}

impl CompletionQueue {
    /// Creates a queue with room for at least `cqe` completions, and its driver. `readiness` gets the
    /// channel's file, and registers it with the event loop.
    ///
    /// # Errors
    ///
    /// Those of [`CqBuilder::build`](crate::CqBuilder::build) and
    /// [`create_comp_channel`](crate::Context::create_comp_channel), and what `readiness` returns.
    pub fn new<W: Readiness>(
        context: &crate::Context,
        cqe: u32,
        readiness: impl FnOnce(BorrowedFd<'_>) -> Result<W>,
    ) -> Result<(CompletionQueue, Driver<W>)> {
        let channel = context.create_comp_channel()?;
        let cq = context.cq_builder(cqe).channel(&channel).build()?;
        let readiness = readiness(channel.as_fd())?;
        let cq = Lock::new(OwnedCompletionQueue::new(cq));
        let queues = Lock::new(Some(Vec::new()));
        let shared = Arc::new(CqShared { cq, channel, queues });
        let waker = DriverWaker::default();
        let handle = Arc::new(DriverHandle { shared: shared.clone(), waker: waker.clone() });
        let (poll_loop, deferred) = (PollLoop::default(), Deferred::with_capacity(POLL_BATCH));
        let (weak, known_waker) = (Arc::downgrade(&handle), None);
        let driver =
            Driver { shared, driver: weak, waker, known_waker, readiness, poll_loop, deferred };
        Ok((CompletionQueue { driver: handle }, driver))
    }

    /// Creates a queue pair that completes here. `describe` sets what the builder should build.
    ///
    /// ```no_run
    /// # fn f(cq: &uverbs::aio::CompletionQueue, pd: &uverbs::ProtectionDomain)
    /// # -> uverbs::Result<()> {
    /// use uverbs::QpType;
    /// let qp = cq.create_qp(pd, QpType::RC, |qp| qp.max_send_wr(16).max_recv_wr(16))?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`QpBuilder::build`] and [`OwnedCompletionQueue::adopt`].
    pub fn create_qp(
        &self,
        pd: &ProtectionDomain,
        qp_type: QpType,
        describe: impl FnOnce(QpBuilder) -> QpBuilder,
    ) -> Result<QueuePair> {
        self.create(pd, qp_type, (), None, describe)
    }

    /// As [`create_qp`](Self::create_qp), for a queue pair that takes its receives from `srq`.
    ///
    /// # Errors
    ///
    /// As [`create_qp`](Self::create_qp).
    pub fn create_qp_on(
        &self,
        pd: &ProtectionDomain,
        qp_type: QpType,
        srq: &SharedReceiveQueue,
        describe: impl FnOnce(QpBuilder) -> QpBuilder,
    ) -> Result<QueuePair> {
        self.create(pd, qp_type, (), Some(srq), describe)
    }

    /// As [`create_qp`](Self::create_qp), for a queue pair under a thread domain. With one domain for each
    /// worker, no worker waits for the doorbell of another.
    ///
    /// # Errors
    ///
    /// As [`create_qp`](Self::create_qp), and `EINVAL` if `td` is not the thread domain of `pd`.
    pub fn create_exclusive_qp(
        &self,
        pd: &ProtectionDomain<crate::Exclusive>,
        td: &Arc<std::sync::Mutex<crate::ThreadDomain>>,
        qp_type: QpType,
        describe: impl FnOnce(QpBuilder<crate::Exclusive>) -> QpBuilder<crate::Exclusive>,
    ) -> Result<QueuePair<crate::Exclusive>> {
        self.create(pd, qp_type, td.clone(), None, describe)
    }

    fn create<S: RingToken>(
        &self,
        pd: &ProtectionDomain<S>,
        qp_type: QpType,
        mut token: S::Token,
        srq: Option<&SharedReceiveQueue>,
        describe: impl FnOnce(QpBuilder<S>) -> QpBuilder<S>,
    ) -> Result<QueuePair<S>> {
        // First: in a forked child, a thread of the parent may have held the token's lock.
        pd.inner.kernel.object.file().check_fork(VERB)?;
        if !S::rings(&S::hold(&mut token), pd) {
            let detail = format!("the token is not that of the thread domain of {pd:?}");
            return Err(Error::invalid(VERB, detail));
        }
        let shared = &self.driver.shared;
        let cq = shared.cq(VERB)?;
        let builder = pd.qp_builder(cq.queue(), cq.queue(), qp_type);
        drop(cq);
        // `describe` is code of the program, which may use this queue: the lock is released.
        let mut builder = describe(builder);
        if let Some(srq) = srq {
            builder = builder.srq(srq.lock(VERB)?.queue());
        }
        let qp = builder.build()?;
        let qp = match srq {
            Some(srq) => {
                let srq = srq.lock(VERB)?;
                shared.cq(VERB)?.adopt_on(qp, &srq)
            }
            None => shared.cq(VERB)?.adopt(qp),
        };
        let qp = qp.map_err(|failed| failed.error.in_verb(VERB))?;
        let inflight = Inflight::new(Some(&qp));
        self.register(&inflight)?;
        let pd = ProtectionDomain::of(pd.inner.clone());
        Ok(QueuePair::new(qp, token, pd, inflight, self.driver.clone()))
    }

    /// Creates a shared receive queue of at least `max_wr` receives, whose queue pairs complete here.
    ///
    /// # Errors
    ///
    /// Those of [`SrqBuilder::build`](crate::SrqBuilder::build), and `EPIPE` if the driver has ended.
    pub fn create_srq<S: Sharing>(
        &self,
        pd: &ProtectionDomain<S>,
        max_wr: u32,
        describe: impl FnOnce(SrqBuilder) -> SrqBuilder,
    ) -> Result<SharedReceiveQueue> {
        let srq = describe(pd.srq_builder(max_wr)).build()?;
        let srq = SharedReceiveQueue::new(OwnedSharedReceiveQueue::new(srq)?, self.driver.clone());
        self.register(srq.inflight())?;
        Ok(srq)
    }

    /// Registers a queue, whose futures fail when the driver ends.
    fn register(&self, inflight: &Arc<Inflight>) -> Result<()> {
        let mut queues = self.driver.shared.queues.lock().ok_or_else(|| Error::forked(VERB))?;
        let queues = queues.as_mut().ok_or_else(|| {
            Error::new(VERB, Errno::PIPE).detail("the completion queue's driver is gone")
        })?;
        queues.retain(|inflight| inflight.strong_count() > 0);
        queues.push(Arc::downgrade(inflight));
        Ok(())
    }

    /// How many completions belonged to no request; see [`OwnedCompletionQueue::unmatched`]. 0 in a forked
    /// child.
    pub fn unmatched(&self) -> u64 {
        self.driver.shared.cq.lock().map_or(0, |cq| cq.unmatched())
    }
}

impl AsFd for CompletionQueue {
    /// The completion channel's file, which is readable when the driver has something to do.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.driver.shared.channel.as_fd()
    }
}

impl fmt::Debug for CompletionQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.driver.shared.cq.lock() {
            Some(cq) => cq.fmt(f),
            None => f.write_str("CompletionQueue(forked)"),
        }
    }
}

impl<W> Driver<W> {
    /// The event loop's side, as [`CompletionQueue::new`] got it.
    pub fn readiness_mut(&mut self) -> &mut W {
        &mut self.readiness
    }
}

/// The queue and the channel that a [`PollLoop`] works with outside of tests.
struct RealIo<'d, W> {
    shared: &'d CqShared,
    driver: &'d Weak<DriverHandle>,
    readiness: &'d mut W,
    deferred: &'d mut Deferred,
}

impl<W: Readiness> DriverIo for RealIo<'_, W> {
    fn poll_cq(&mut self) -> Result<usize> {
        let (mut cq, deferred) = (self.shared.cq("poll_cq")?, &mut *self.deferred);
        let polled = cq.poll_each(POLL_BATCH, |done| {
            if let Some(OwnedCompletion { memory, tag, outcome }) = done.into_owned() {
                let OpTag { inflight, index, side } = tag;
                inflight.complete(index, side, memory, outcome, deferred);
            }
        });
        let found = polled
            .map_err(|error| Error::new("poll_cq", Errno::OWNERDEAD).detail(error.to_string()))?;
        drop(cq);
        self.deferred.run();
        Ok(found)
    }

    fn has_users(&self) -> bool {
        self.driver.strong_count() > 0
    }

    fn arm(&mut self) -> Result<()> {
        self.shared.cq("req_notify_cq")?.req_notify(Notify::Next)
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

impl<W: Readiness + Unpin> Future for Driver<W> {
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

impl<W> Drop for Driver<W> {
    fn drop(&mut self) {
        self.shared.driver_gone();
    }
}

impl<W> fmt::Debug for Driver<W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Driver").field("poll_loop", &self.poll_loop).finish_non_exhaustive()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::memory::lock::in_child_while_held;
    use crate::tests::futures::{Futures, cx};
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
    fn forked(child: impl Fn(Futures)) {
        for which in 0..3 {
            let mut futures = Some(Futures::new());
            let (shared, waker) = {
                let driver = &futures.as_ref().unwrap().cq.driver;
                (driver.shared.clone(), driver.waker.clone())
            };
            let act = || child(futures.take().unwrap());
            match which {
                0 => in_child_while_held(|| shared.cq.lock(), act),
                1 => in_child_while_held(|| shared.queues.lock(), act),
                _ => in_child_while_held(|| waker.lock(), act),
            }
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "it forks")]
    fn a_child_can_drop_everything_while_a_thread_of_its_parent_holds_a_lock() {
        forked(drop);
    }

    #[test]
    #[cfg_attr(miri, ignore = "it forks")]
    fn a_child_is_refused_while_a_thread_of_its_parent_holds_a_lock() {
        forked(|mut futures| {
            let pd = &futures.bench.pd;
            assert!(futures.cq.create_qp(pd, QpType::RC, |qp| qp).unwrap_err().is_forked());
            assert!(futures.cq.create_srq(pd, 4, |srq| srq).unwrap_err().is_forked());
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
        crate::memory::fork::in_child(|| {
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
