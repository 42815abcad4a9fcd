//! The driver: what turns completions into futures that are ready.

use super::deferred::Later;
use super::queue::{QueuePair, RingToken, SharedReceiveQueue};
use super::inflight::{Table, Tag};
use super::poll_loop::{Ends, Turn};
use crate::channel::CompletionChannel;
use crate::cq::Notify;
use crate::error::{Error, Result};
use crate::memory::lock::{Guard, Lock};
use crate::owned::{Done, OwnedCompletionQueue, OwnedQueuePair, OwnedSharedReceiveQueue};
use crate::pd::{ProtectionDomain, Sharing};
use crate::qp::{QpType, QueuePairBuilder};
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

/// Completions that are handled before other tasks get a turn.
const ROUND: usize = 256;

/// An event loop's knowledge of whether the channel of a completion queue is readable or in error.
///
/// Implement it to bring a [`Driver`] into another event loop than tokio's: with the file that
/// [`CompletionQueue::as_fd`] names, registered for reading, edge-triggered or not. When the device
/// goes away the file is in error, and not readable: `epoll(7)` says `EPOLLERR` alone, which is to
/// count as well, or nobody ever hears of it.
pub trait Readiness {
    /// When the file may be readable or in error, calls `read`, which reads an event, and forgets
    /// that it was *before* that call: if more becomes readable during or after it, that counts. Else
    /// lets `cx` be woken when the file becomes readable or is in error.
    ///
    /// The driver does not depend on how many events there are: after each it arms, and then looks at
    /// all completions. It ends with `EIO` if the file turns out to be in
    /// error, or is said to be readable a thousand times in a row and never holds anything.
    ///
    /// # Errors
    ///
    /// What `read` answers, or why the file cannot be watched; the driver ends with it.
    fn poll_read(
        &mut self,
        cx: &mut Context<'_>,
        read: &mut dyn FnMut() -> Result<()>,
    ) -> Poll<Result<()>>;
}

/// What a driver and those who post have in common.
pub(super) struct Core {
    cq: Lock<OwnedCompletionQueue<Tag>>,
    channel: CompletionChannel,
    /// Until the driver is gone.
    tables: Lock<Option<Vec<Weak<Table>>>>,
}

impl Core {
    fn cq(&self, verb: &'static str) -> Result<Guard<'_, OwnedCompletionQueue<Tag>>> {
        self.cq.lock().ok_or_else(|| Error::forked(verb))
    }

    /// Tells everybody that nobody looks for completions any more.
    fn undrive(&self) {
        // In a forked child nobody waits: the tasks are the parent's.
        let Some(tables) = self.tables.lock().map(|mut tables| tables.take()) else { return };
        let mut later = Later::default();
        for table in tables.into_iter().flatten() {
            if let Some(table) = table.upgrade() {
                table.undrive(&mut later);
            }
        }
        // Their panics are theirs, and not for a destructor.
        later.run_quietly();
    }
}

/// The waker of a driver, which is counted here: a clone of it would run the program's code under the
/// lock.
type DriverWaker = Arc<Lock<Option<Arc<Waker>>>>;

/// What keeps a driver at work: it ends with the last of those who hold this.
pub(super) struct Hub {
    core: Arc<Core>,
    /// The driver's, to tell it.
    waker: DriverWaker,
}

impl Hub {
    /// Lets the driver look again; not the parent's, in a forked child.
    fn wake(&self) {
        let waker = self.waker.lock().and_then(|waker| waker.clone());
        if let Some(waker) = waker {
            waker.wake_by_ref();
        }
    }

    /// Brings a queue pair to its end, and lets the driver find what it had completed.
    pub(super) fn close<S: Sharing>(&self, qp: &mut OwnedQueuePair<Tag, S>) {
        // What cannot be reset is left to its destructor.
        if let Some(mut cq) = self.core.cq.lock() {
            let _ = qp.reset(&mut cq);
        }
        self.wake();
    }
}

impl Drop for Hub {
    fn drop(&mut self) {
        self.wake();
    }
}

/// A completion queue whose requests are futures; clones are handles of the same.
///
/// A [`Driver`] works for it: spawn that on an event loop.
#[derive(Clone)]
pub struct CompletionQueue {
    hub: Arc<Hub>,
}

/// Looks for completions and makes futures ready. A future itself, which ends when nobody uses the
/// queue any more, or with the error that made it give up.
///
/// While completions keep coming it looks for more without a system call, giving way to other tasks
/// in between. When there are none it takes what events there are out of the channel, arms the queue,
/// looks once more, and sleeps until its event loop finds the channel readable. Wakers are called after all locks are released, and each of
/// them even if another one panics. When it is over or dropped, all futures of the queue end with
/// [`OpErrorKind::Undriven`](super::OpErrorKind::Undriven).
#[must_use = "nothing happens unless it is polled"]
pub struct Driver<W> {
    core: Arc<Core>,
    hub: Weak<Hub>,
    waker: DriverWaker,
    /// What is there, to be looked at without the lock.
    told: Option<Arc<Waker>>,
    watch: W,
    turn: Turn,
    later: Later,
}

impl CompletionQueue {
    /// Makes the queue with room for `cqe` completions, and its driver, in an event loop that
    /// `watch` knows.
    ///
    /// # Errors
    ///
    /// Those of [`CqBuilder::build`](crate::CqBuilder::build) and
    /// [`create_comp_channel`](crate::Context::create_comp_channel), and what `watch` answers.
    pub fn new<W: Readiness>(
        context: &crate::Context,
        cqe: u32,
        watch: impl FnOnce(BorrowedFd<'_>) -> Result<W>,
    ) -> Result<(CompletionQueue, Driver<W>)> {
        let channel = context.create_comp_channel()?;
        let cq = context.create_cq(cqe).channel(&channel).build()?;
        let watch = watch(channel.as_fd())?;
        let cq = Lock::new(OwnedCompletionQueue::new(cq));
        let tables = Lock::new(Some(Vec::new()));
        let core = Arc::new(Core { cq, channel, tables });
        let waker = DriverWaker::default();
        let hub = Arc::new(Hub { core: core.clone(), waker: waker.clone() });
        let (turn, later) = (Turn::default(), Later::with_capacity(ROUND));
        let (weak, told) = (Arc::downgrade(&hub), None);
        let driver = Driver { core, hub: weak, waker, told, watch, turn, later };
        Ok((CompletionQueue { hub }, driver))
    }

    /// Makes a queue pair that completes here; `describe` says what it is to be like.
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
    /// Those of [`QueuePairBuilder::build`] and [`OwnedCompletionQueue::adopt`].
    pub fn create_qp(
        &self,
        pd: &ProtectionDomain,
        qp_type: QpType,
        describe: impl FnOnce(QueuePairBuilder) -> QueuePairBuilder,
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
        describe: impl FnOnce(QueuePairBuilder) -> QueuePairBuilder,
    ) -> Result<QueuePair> {
        self.create(pd, qp_type, (), Some(srq), describe)
    }

    /// As [`create_qp`](Self::create_qp), for a queue pair under a thread domain: one per worker
    /// means that no worker waits for another's doorbell.
    ///
    /// # Errors
    ///
    /// As [`create_qp`](Self::create_qp), and `EINVAL` if `td` is not the thread domain of `pd`.
    pub fn create_exclusive_qp(
        &self,
        pd: &ProtectionDomain<crate::Exclusive>,
        td: &Arc<std::sync::Mutex<crate::ThreadDomain>>,
        qp_type: QpType,
        describe: impl FnOnce(QueuePairBuilder<crate::Exclusive>) -> QueuePairBuilder<crate::Exclusive>,
    ) -> Result<QueuePair<crate::Exclusive>> {
        self.create(pd, qp_type, td.clone(), None, describe)
    }

    fn create<S: RingToken>(
        &self,
        pd: &ProtectionDomain<S>,
        qp_type: QpType,
        mut token: S::Token,
        srq: Option<&SharedReceiveQueue>,
        describe: impl FnOnce(QueuePairBuilder<S>) -> QueuePairBuilder<S>,
    ) -> Result<QueuePair<S>> {
        // First: in a child another thread may hold the token for ever.
        pd.inner.kernel.object.file().check_fork(VERB)?;
        if !S::rings(&S::hold(&mut token), pd) {
            let detail = format!("the token is not that of the thread domain of {pd:?}");
            return Err(Error::invalid(VERB, detail));
        }
        let core = &self.hub.core;
        let cq = core.cq(VERB)?;
        let builder = pd.create_qp(cq.queue(), cq.queue(), qp_type);
        drop(cq);
        // What the program describes it with is the program's, and may use this queue as well.
        let mut builder = describe(builder);
        if let Some(srq) = srq {
            builder = builder.srq(srq.lock(VERB)?.queue());
        }
        let qp = builder.build()?;
        let qp = match srq {
            Some(srq) => {
                let srq = srq.lock(VERB)?;
                core.cq(VERB)?.adopt_on(qp, &srq)
            }
            None => core.cq(VERB)?.adopt(qp),
        };
        let qp = qp.map_err(|failed| failed.error.in_verb(VERB))?;
        let table = Table::new(Some(&qp));
        self.enter(&table)?;
        let pd = ProtectionDomain::of(pd.inner.clone());
        Ok(QueuePair::new(qp, token, pd, table, self.hub.clone()))
    }

    /// Makes a shared receive queue whose queue pairs complete here.
    ///
    /// # Errors
    ///
    /// Those of [`SrqBuilder::build`](crate::SrqBuilder::build).
    pub fn create_srq<S: Sharing>(
        &self,
        pd: &ProtectionDomain<S>,
        max_wr: u32,
        describe: impl FnOnce(SrqBuilder) -> SrqBuilder,
    ) -> Result<SharedReceiveQueue> {
        let srq = describe(pd.create_srq(max_wr)).build()?;
        let srq = SharedReceiveQueue::new(OwnedSharedReceiveQueue::new(srq)?, self.hub.clone());
        self.enter(srq.table())?;
        Ok(srq)
    }

    /// Lets the driver tell a table when it goes.
    fn enter(&self, table: &Arc<Table>) -> Result<()> {
        let mut tables = self.hub.core.tables.lock().ok_or_else(|| Error::forked(VERB))?;
        let tables = tables.as_mut().ok_or_else(|| {
            Error::new(VERB, Errno::PIPE).detail("the completion queue's driver is gone")
        })?;
        tables.retain(|table| table.strong_count() > 0);
        tables.push(Arc::downgrade(table));
        Ok(())
    }

    /// Completions that concerned nobody; see [`OwnedCompletionQueue::strays`]. None in a forked child.
    pub fn strays(&self) -> u64 {
        self.hub.core.cq.lock().map_or(0, |cq| cq.strays())
    }
}

impl AsFd for CompletionQueue {
    /// The file that is readable when the driver has something to do.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.hub.core.channel.as_fd()
    }
}

impl fmt::Debug for CompletionQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.hub.core.cq.lock() {
            Some(cq) => cq.fmt(f),
            None => f.write_str("CompletionQueue(forked)"),
        }
    }
}

impl<W> Driver<W> {
    /// What knows the event loop.
    pub fn watch_mut(&mut self) -> &mut W {
        &mut self.watch
    }
}

/// The real ones; see [`Turn`].
struct Outside<'d, W> {
    core: &'d Core,
    hub: &'d Weak<Hub>,
    watch: &'d mut W,
    later: &'d mut Later,
}

impl<W: Readiness> Ends for Outside<'_, W> {
    fn sweep(&mut self) -> Result<usize> {
        let (mut cq, later) = (self.core.cq("poll_cq")?, &mut *self.later);
        let polled = cq.poll_each(ROUND, |settled| {
            if let Some(Done { memory, tag, outcome }) = settled.into_done() {
                let Tag { table, cell, side } = tag;
                table.complete(cell, side, memory, outcome, later);
            }
        });
        let found = polled
            .map_err(|error| Error::new("poll_cq", Errno::OWNERDEAD).detail(error.to_string()))?;
        drop(cq);
        self.later.run();
        Ok(found)
    }

    fn is_wanted(&self) -> bool {
        self.hub.strong_count() > 0
    }

    fn arm(&mut self) -> Result<()> {
        self.core.cq("req_notify_cq")?.req_notify(Notify::Next)
    }

    fn poll_event(&mut self, cx: &mut Context<'_>, all: bool) -> Poll<Result<bool>> {
        let channel = &self.core.channel;
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
        match self.watch.poll_read(cx, &mut read) {
            // Nothing was there: is that all there will ever be?
            Poll::Ready(Ok(())) if !heard => Poll::Ready(check(channel).map(|()| false)),
            Poll::Ready(read) => Poll::Ready(read.map(|()| heard)),
            Poll::Pending => Poll::Pending,
        }
    }
}

/// Fails for a file in error, which stays so and has nothing to read.
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
        let Driver { core, hub, waker, told, watch, turn, later } = &mut *self;
        // Before anything else, so that the last user's farewell is not missed.
        if !told.as_ref().is_some_and(|told| told.will_wake(cx.waker())) {
            // Cloned and dropped without the lock: both are the program's code, and the old one may be
            // the last that holds a user of this queue.
            let new = Arc::new(cx.waker().clone());
            let old = waker.lock().and_then(|mut known| known.replace(new.clone()));
            drop((old, told.replace(new)));
        }
        let end = turn.poll(&mut Outside { core, hub, watch, later }, cx);
        if end.is_ready() {
            // Whoever keeps a driver that is over keeps nobody waiting.
            core.undrive();
        }
        end
    }
}

impl<W> Drop for Driver<W> {
    fn drop(&mut self) {
        self.core.undrive();
    }
}

impl<W> fmt::Debug for Driver<W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Driver").field("turn", &self.turn).finish_non_exhaustive()
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

    /// Runs `child` with all futures in children, while another thread holds one lock after the other.
    fn forked(child: impl Fn(Futures)) {
        for which in 0..3 {
            let mut futures = Some(Futures::new());
            let (core, waker) = {
                let hub = &futures.as_ref().unwrap().cq.hub;
                (hub.core.clone(), hub.waker.clone())
            };
            let act = || child(futures.take().unwrap());
            match which {
                0 => in_child_while_held(|| core.cq.lock(), act),
                1 => in_child_while_held(|| core.tables.lock(), act),
                _ => in_child_while_held(|| waker.lock(), act),
            }
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "it forks")]
    fn a_child_drops_everything_whatever_another_thread_holds() {
        forked(drop);
    }

    #[test]
    #[cfg_attr(miri, ignore = "it forks")]
    fn a_child_is_refused_whatever_another_thread_holds() {
        forked(|mut futures| {
            let pd = &futures.bench.pd;
            assert!(futures.cq.create_qp(pd, QpType::RC, |qp| qp).unwrap_err().is_forked());
            assert!(futures.cq.create_srq(pd, 4, |srq| srq).unwrap_err().is_forked());
            assert_eq!((futures.cq.strays(), futures.qp.under_way()), (0, 0));
            assert!(format!("{:?}", futures.cq).contains("forked"));
            assert!(futures.qp.abort().unwrap_err().is_forked());
            let Poll::Ready(end) = Pin::new(&mut futures.driver).poll(&mut cx()) else {
                panic!("the child's driver waits")
            };
            assert!(end.unwrap_err().is_forked());
        });
    }

    /// A waker of the parent's writes into the parent's event loop.
    #[test]
    #[cfg_attr(miri, ignore = "it forks")]
    fn a_child_wakes_nobody_of_its_parent() {
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
    fn a_file_in_error_is_told_from_one_that_is_silent() {
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        assert!(check(&reader).is_ok() && check(&writer).is_ok());
        drop(reader);
        assert_eq!(check(&writer).unwrap_err().errno(), Errno::IO);
    }
}
