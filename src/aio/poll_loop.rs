//! Decides when a driver sleeps: only after it armed the queue and then polled once more. Pairs with
//! `driver`, which does the polling and arming. Model-checked with loom, together with models of a
//! completion queue, its channel and an event loop.

use crate::error::{Error, Result};
use rustix::io::Errno;
use std::task::{Context, Poll};

/// How often in a row the event loop may report the channel as ready without an event, before the driver
/// ends with an error.
const MAX_FALSE_ALARMS: u32 = 1000;

/// The queue, channel and event loop that a driver works with.
pub(super) trait DriverIo {
    /// Polls, wakes the futures of requests that are over, and returns how many there were.
    fn poll_cq(&mut self) -> Result<usize>;

    /// Whether the queue has handles left, by which requests may be posted.
    fn has_users(&self) -> bool;

    /// Arms the queue: its next completion raises an event.
    fn arm(&mut self) -> Result<()>;

    /// If the channel may have events, reads one of them, or with `all` every one, and returns whether there
    /// was any. Otherwise arranges that `cx` is woken when it may have some.
    fn poll_event(&mut self, cx: &mut Context<'_>, all: bool) -> Poll<Result<bool>>;
}

/// The driver's state between two polls.
#[derive(Debug, Default)]
pub(super) struct PollLoop {
    /// The queue was armed, and its event was not read yet.
    armed: bool,
    /// The queue was armed again although no event had come, so there may be two.
    maybe_two_events: bool,
    /// How often in a row the channel was reported as ready without an event or a completion.
    false_alarms: u32,
}

impl PollLoop {
    /// Works until there is nothing to do. If it returns `Pending`, `cx` is woken when there is more.
    pub(super) fn poll(
        &mut self,
        io: &mut impl DriverIo,
        cx: &mut Context<'_>,
    ) -> Poll<Result<()>> {
        loop {
            if io.poll_cq()? > 0 {
                self.false_alarms = 0;
                // The woken tasks run first: they may post requests that complete before the driver sleeps.
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            if !io.has_users() {
                return Poll::Ready(Ok(()));
            }
            if self.armed {
                let all = std::mem::replace(&mut self.maybe_two_events, true);
                // Unless the call says otherwise: the event loop is the program's, and may panic after the event
                // was read.
                self.armed = false;
                match io.poll_event(cx, all) {
                    Poll::Ready(Ok(heard)) => {
                        // A queue that was armed once raises one event, so the channel is empty now, unless the
                        // event loop was wrong before, or something else reads the file.
                        self.maybe_two_events = !heard;
                        self.false_alarms =
                            if heard { 0 } else { self.false_alarms.saturating_add(1) };
                        if self.false_alarms > MAX_FALSE_ALARMS {
                            return Poll::Ready(Err(Error::new("poll", Errno::IO).detail(
                                format!(
                                    "the channel was reported as readable {MAX_FALSE_ALARMS} times, \
                                     and held no event"
                                ),
                            )));
                        }
                        if !heard {
                            // Let other tasks run, in case this goes on.
                            cx.waker().wake_by_ref();
                            return Poll::Pending;
                        }
                    }
                    Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                    Poll::Pending => {
                        (self.armed, self.maybe_two_events) = (true, all);
                        return Poll::Pending;
                    }
                }
            }
            io.arm()?;
            self.armed = true;
            // Completions that came before the queue was armed raise no event: poll again.
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::task::Waker;

    /// A queue whose completions the test adds, and an event loop that reports what the test sets.
    #[derive(Debug, Default)]
    struct Script {
        /// Completions in the queue.
        there: usize,
        /// Completions that come right after the queue was armed.
        after_arming: usize,
        /// Events in the channel.
        events: usize,
        /// The report of the event loop.
        readable: bool,
        armed: bool,
        polled: usize,
        arms: usize,
        reads: usize,
        gone: bool,
        /// The event loop panics after it read an event.
        panics: bool,
    }

    impl Script {
        fn complete(&mut self, count: usize) {
            self.there += count;
            if count > 0 && std::mem::take(&mut self.armed) {
                self.events += 1;
                self.readable = true;
            }
        }
    }

    /// The last number stays: the sum does not overflow.
    #[test]
    fn false_alarms_without_end_stay_an_error() {
        let mut poll_loop = PollLoop { armed: true, false_alarms: u32::MAX, ..Default::default() };
        let mut io = Script { readable: true, ..Default::default() };
        let answer = poll_loop.poll(&mut io, &mut Context::from_waker(Waker::noop()));
        assert!(matches!(answer, Poll::Ready(Err(_))), "{answer:?}");
    }

    impl DriverIo for Script {
        fn poll_cq(&mut self) -> Result<usize> {
            self.polled += self.there;
            Ok(std::mem::take(&mut self.there))
        }

        fn has_users(&self) -> bool {
            !self.gone
        }

        fn arm(&mut self) -> Result<()> {
            // Completions in the queue raise no event: not every device looks at them.
            self.armed = true;
            self.arms += 1;
            Ok(())
        }

        fn poll_event(&mut self, _: &mut Context<'_>, all: bool) -> Poll<Result<bool>> {
            let count = std::mem::take(&mut self.after_arming);
            self.complete(count);
            if !std::mem::take(&mut self.readable) {
                return Poll::Pending;
            }
            let mut heard = false;
            loop {
                self.reads += 1;
                if self.events == 0 {
                    return Poll::Ready(Ok(heard));
                }
                self.events -= 1;
                if std::mem::take(&mut self.panics) {
                    std::panic::resume_unwind(Box::new("the event loop"));
                }
                heard = true;
                if !all {
                    return Poll::Ready(Ok(true));
                }
            }
        }
    }

    fn poll(poll_loop: &mut PollLoop, script: &mut Script) -> Poll<()> {
        let mut cx = Context::from_waker(Waker::noop());
        poll_loop.poll(script, &mut cx).map(|end| end.unwrap())
    }

    #[test]
    fn each_event_costs_one_read_and_one_arming() {
        let (mut poll_loop, mut script) = (PollLoop::default(), Script::default());
        assert!(poll(&mut poll_loop, &mut script).is_pending());
        assert_eq!((script.arms, script.reads), (1, 0));
        for round in 1..=3 {
            script.complete(2);
            // Once for what is there, and once to sleep again.
            assert!(poll(&mut poll_loop, &mut script).is_pending());
            assert_eq!(script.reads, round - 1, "the tasks that were woken run first");
            assert!(poll(&mut poll_loop, &mut script).is_pending());
            assert_eq!((script.polled, script.arms, script.reads), (2 * round, 1 + round, round));
        }
        script.gone = true;
        assert!(poll(&mut poll_loop, &mut script).is_ready());
    }

    /// A completion between the last poll and the arming raises no event.
    #[test]
    fn the_driver_polls_again_after_arming() {
        let (mut poll_loop, mut script) = (PollLoop::default(), Script::default());
        script.after_arming = 1;
        assert!(poll(&mut poll_loop, &mut script).is_pending());
        assert_eq!((script.polled, script.there), (1, 0));
    }

    /// An event loop that keeps reporting a file without events does not keep other tasks waiting.
    #[test]
    fn endless_false_alarms_end_the_driver_with_an_error() {
        let (mut poll_loop, mut script) = (PollLoop::default(), Script::default());
        let mut alarm = |script: &mut Script| {
            (script.readable, script.reads) = (true, 0);
            let end = poll_loop.poll(script, &mut Context::from_waker(Waker::noop()));
            assert!(script.reads <= 2, "it yields in between");
            end
        };
        for _ in 0..MAX_FALSE_ALARMS {
            assert!(alarm(&mut script).is_pending());
        }
        // A completion shows that the queue works.
        script.complete(1);
        let mut rounds = 0;
        let end = loop {
            match alarm(&mut script) {
                Poll::Ready(end) => break end,
                Poll::Pending => rounds += 1,
            }
            assert!(rounds < 2 * MAX_FALSE_ALARMS, "it goes on for ever");
        };
        assert!(rounds >= MAX_FALSE_ALARMS, "{rounds}");
        assert_eq!((end.unwrap_err().errno(), script.polled), (Errno::IO, 1));
    }

    /// Otherwise the driver waits for an event that was read already.
    #[test]
    fn an_event_loop_that_panics_after_it_read_an_event_costs_no_completion() {
        let (mut poll_loop, mut script) = (PollLoop::default(), Script::default());
        assert!(poll(&mut poll_loop, &mut script).is_pending());
        script.complete(1);
        script.panics = true;
        assert!(poll(&mut poll_loop, &mut script).is_pending());
        let panics = std::panic::AssertUnwindSafe(|| poll(&mut poll_loop, &mut script));
        assert!(std::panic::catch_unwind(panics).is_err());
        for round in 2..5 {
            assert!(poll(&mut poll_loop, &mut script).is_pending());
            assert!(script.armed, "the next completion raises no event");
            script.complete(1);
            assert!(poll(&mut poll_loop, &mut script).is_pending());
            assert_eq!(script.polled, round);
        }
    }

    /// After a false alarm the driver reads the channel until it is empty, once.
    #[test]
    fn a_false_alarm_leaves_no_event_behind() {
        let (mut poll_loop, mut script) = (PollLoop::default(), Script::default());
        assert!(poll(&mut poll_loop, &mut script).is_pending());
        script.readable = true;
        for _ in 0..2 {
            assert!(poll(&mut poll_loop, &mut script).is_pending());
        }
        assert_eq!((script.arms, script.reads), (2, 1));
        // Two events at once, of which the event loop reports one.
        script.complete(1);
        script.armed = true;
        script.complete(1);
        for _ in 0..2 {
            assert!(poll(&mut poll_loop, &mut script).is_pending());
        }
        assert_eq!((script.polled, script.events), (2, 0), "the channel was read until empty");
        let reads = script.reads;
        script.complete(1);
        for _ in 0..2 {
            assert!(poll(&mut poll_loop, &mut script).is_pending());
        }
        assert_eq!((script.polled, script.reads), (3, reads + 1), "and is trusted again");
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::*;
    use crate::sync::bounded_model;
    use loom::sync::atomic::{AtomicBool, Ordering};
    use loom::sync::{Arc, Mutex, Notify};
    use loom::thread;
    use std::task::{Wake, Waker};

    /// The kernel's side: a completion queue, its channel, and the edges that it reported, one for each
    /// change of the file's state.
    #[derive(Default)]
    struct Kernel {
        there: u32,
        armed: bool,
        events: u32,
        edges: u32,
    }

    /// A fake event loop, which sees edges some time after they happened.
    #[derive(Default)]
    struct EventLoop {
        /// Set by an edge, cleared after a read, unless another edge came meanwhile.
        ready: bool,
        tick: u32,
        waker: Option<Waker>,
    }

    struct World {
        kernel: Mutex<Kernel>,
        readiness: Mutex<EventLoop>,
        edge: Notify,
        done: AtomicBool,
    }

    impl World {
        fn complete(&self) {
            let mut kernel = self.kernel.lock().unwrap();
            kernel.there += 1;
            if std::mem::take(&mut kernel.armed) {
                kernel.events += 1;
                kernel.edges += 1;
                drop(kernel);
                self.edge.notify();
            }
        }

        /// The event loop handles an edge.
        fn deliver(&self) {
            let edges = std::mem::take(&mut self.kernel.lock().unwrap().edges);
            if edges > 0 {
                let mut readiness = self.readiness.lock().unwrap();
                readiness.ready = true;
                readiness.tick += 1;
                let waker = readiness.waker.take();
                drop(readiness);
                waker.into_iter().for_each(Waker::wake);
            }
        }
    }

    struct Model {
        world: Arc<World>,
        taken: u32,
    }

    impl DriverIo for Model {
        fn poll_cq(&mut self) -> Result<usize> {
            let there = std::mem::take(&mut self.world.kernel.lock().unwrap().there);
            self.taken += there;
            Ok(there as usize)
        }

        fn has_users(&self) -> bool {
            true
        }

        fn arm(&mut self) -> Result<()> {
            self.world.kernel.lock().unwrap().armed = true;
            Ok(())
        }

        fn poll_event(&mut self, cx: &mut Context<'_>, all: bool) -> Poll<Result<bool>> {
            let mut readiness = self.world.readiness.lock().unwrap();
            if !readiness.ready {
                readiness.waker = Some(cx.waker().clone());
                return Poll::Pending;
            }
            let tick = readiness.tick;
            drop(readiness);
            let mut kernel = self.world.kernel.lock().unwrap();
            let heard = kernel.events > 0;
            kernel.events -= if all { kernel.events } else { heard.into() };
            drop(kernel);
            let mut readiness = self.world.readiness.lock().unwrap();
            if readiness.tick == tick {
                readiness.ready = false;
            }
            Poll::Ready(Ok(heard))
        }
    }

    struct Task(Notify);

    impl Wake for Task {
        fn wake(self: std::sync::Arc<Self>) {
            self.0.notify();
        }
    }

    /// The driver of a queue whose requests complete on one thread while an event loop delivers
    /// edges on another: it takes all of them, whatever the order. If a wake-up could be lost, the
    /// model would end in a deadlock.
    fn takes_all(completions: u32, false_alarm: bool) {
        // Each further preemption takes more than ten times as long: 0.3 s of a processor with two, 3 s with
        // three; with four no end was seen after 40 s.
        bounded_model(2, 3, move || {
            let readiness = EventLoop { ready: false_alarm, ..EventLoop::default() };
            let world = Arc::new(World {
                kernel: Mutex::new(Kernel::default()),
                readiness: Mutex::new(readiness),
                edge: Notify::new(),
                done: AtomicBool::new(false),
            });
            let theirs = world.clone();
            let device = thread::spawn(move || {
                for _ in 0..completions {
                    theirs.complete();
                }
                theirs.done.store(true, Ordering::Release);
                theirs.edge.notify();
            });
            let theirs = world.clone();
            let event_loop = thread::spawn(move || {
                loop {
                    theirs.edge.wait();
                    let done = theirs.done.load(Ordering::Acquire);
                    theirs.deliver();
                    if done {
                        break;
                    }
                }
            });
            // In a thread of its own: loom does not preempt a model's first thread as it does others.
            let driver = thread::spawn(move || {
                let task = std::sync::Arc::new(Task(Notify::new()));
                let waker = Waker::from(task.clone());
                let mut model = Model { world, taken: 0 };
                let mut poll_loop = PollLoop::default();
                loop {
                    assert!(
                        poll_loop.poll(&mut model, &mut Context::from_waker(&waker)).is_pending()
                    );
                    if model.taken == completions {
                        break;
                    }
                    task.0.wait();
                }
            });
            driver.join().unwrap();
            device.join().unwrap();
            event_loop.join().unwrap();
        });
    }

    #[test]
    fn no_wake_up_is_lost_between_completions_and_edges() {
        takes_all(2, false);
    }

    #[test]
    fn no_wake_up_is_lost_after_a_false_alarm() {
        takes_all(1, true);
    }
}
