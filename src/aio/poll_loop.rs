//! When a driver sleeps: never before it has looked for completions once more after it asked for an
//! event. Pairs with `driver`, which does what is decided here. Model-checked with loom, together
//! with a completion queue, its channel and an event loop as they are outside.

use crate::error::{Error, Result};
use rustix::io::Errno;
use std::task::{Context, Poll};

/// Announcements in a row, of a channel that had nothing to say, after which nobody believes them.
const DEAF: u32 = 1000;

/// What a driver works with.
pub(super) trait Ends {
    /// Makes the futures of completed requests ready; how many.
    fn sweep(&mut self) -> Result<usize>;

    /// Whether somebody may still post something.
    fn is_wanted(&self) -> bool;

    /// Asks for an event at the next completion.
    fn arm(&mut self) -> Result<()>;

    /// When the channel may have events, takes one of them, or with `all` as many as there are, and
    /// answers whether there was any. Else lets `cx` be woken when it may have some.
    fn poll_event(&mut self, cx: &mut Context<'_>, all: bool) -> Poll<Result<bool>>;
}

/// What a driver knows of its completion queue.
#[derive(Debug, Default)]
pub(super) struct Turn {
    /// An event was asked for, and was not taken out of the channel.
    armed: bool,
    /// An event was asked for again although none had come, so that there may be two.
    doubt: bool,
    /// How often the channel was announced in vain since something was last heard or completed.
    vain: u32,
}

impl Turn {
    /// Works until there is nothing to do. Whoever is pending afterwards is woken.
    pub(super) fn poll(&mut self, ends: &mut impl Ends, cx: &mut Context<'_>) -> Poll<Result<()>> {
        loop {
            if ends.sweep()? > 0 {
                self.vain = 0;
                // What was woken goes first: it may post, and complete before we sleep.
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            if !ends.is_wanted() {
                return Poll::Ready(Ok(()));
            }
            if self.armed {
                match ends.poll_event(cx, self.doubt) {
                    Poll::Ready(Ok(heard)) => {
                        // A queue that was asked once causes one event, so that the channel is empty
                        // now, unless the event loop was wrong before, or somebody else reads the file.
                        self.doubt = !heard;
                        self.armed = false;
                        self.vain = if heard { 0 } else { self.vain + 1 };
                        if self.vain > DEAF {
                            return Poll::Ready(Err(Error::new("poll", Errno::IO).detail(
                                format!(
                                    "the channel was announced {DEAF} times, and nothing was there"
                                ),
                            )));
                        }
                        if !heard {
                            // Others have their turn, should it go on like this.
                            cx.waker().wake_by_ref();
                            return Poll::Pending;
                        }
                    }
                    Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                    Poll::Pending => return Poll::Pending,
                }
            }
            ends.arm()?;
            self.armed = true;
            // What completed before causes no event.
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::task::Waker;

    /// Completions that come one after the other, and an event loop that says what it is told to.
    #[derive(Debug, Default)]
    struct Script {
        /// Completions that are there.
        there: usize,
        /// Completes this many right after it was armed.
        after_arming: usize,
        /// Events in the channel.
        events: usize,
        /// What the event loop believes.
        readable: bool,
        armed: bool,
        swept: usize,
        arms: usize,
        reads: usize,
        gone: bool,
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

    impl Ends for Script {
        fn sweep(&mut self) -> Result<usize> {
            self.swept += self.there;
            Ok(std::mem::take(&mut self.there))
        }

        fn is_wanted(&self) -> bool {
            !self.gone
        }

        fn arm(&mut self) -> Result<()> {
            // What is there already causes nothing: not every device looks.
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
                heard = true;
                if !all {
                    return Poll::Ready(Ok(true));
                }
            }
        }
    }

    fn poll(turn: &mut Turn, script: &mut Script) -> Poll<()> {
        let mut cx = Context::from_waker(Waker::noop());
        turn.poll(script, &mut cx).map(|end| end.unwrap())
    }

    #[test]
    fn an_event_costs_one_read_and_one_request_for_the_next() {
        let (mut turn, mut script) = (Turn::default(), Script::default());
        assert!(poll(&mut turn, &mut script).is_pending());
        assert_eq!((script.arms, script.reads), (1, 0));
        for round in 1..=3 {
            script.complete(2);
            // Once for what is there, and once to sleep again.
            assert!(poll(&mut turn, &mut script).is_pending());
            assert!(poll(&mut turn, &mut script).is_pending());
            assert_eq!((script.swept, script.arms, script.reads), (2 * round, 1 + round, round));
        }
        script.gone = true;
        assert!(poll(&mut turn, &mut script).is_ready());
    }

    /// What completes between the last look and the request for an event is found.
    #[test]
    fn it_looks_again_after_asking() {
        let (mut turn, mut script) = (Turn::default(), Script::default());
        script.after_arming = 1;
        assert!(poll(&mut turn, &mut script).is_pending());
        assert_eq!((script.swept, script.there), (1, 0));
    }

    /// An event loop that goes on reporting a file which holds nothing, as one in error may be, keeps
    /// nobody else waiting, and is not believed for ever.
    #[test]
    fn endless_false_alarms_end_in_an_error() {
        let (mut turn, mut script) = (Turn::default(), Script::default());
        let mut alarm = |script: &mut Script| {
            (script.readable, script.reads) = (true, 0);
            let end = turn.poll(script, &mut Context::from_waker(Waker::noop()));
            assert!(script.reads <= 2, "it takes turns");
            end
        };
        for _ in 0..DEAF {
            assert!(alarm(&mut script).is_pending());
        }
        // What completes shows that the queue is alive.
        script.complete(1);
        let mut rounds = 0;
        let end = loop {
            match alarm(&mut script) {
                Poll::Ready(end) => break end,
                Poll::Pending => rounds += 1,
            }
            assert!(rounds < 2 * DEAF, "it goes on for ever");
        };
        assert!(rounds >= DEAF, "{rounds}");
        assert_eq!((end.unwrap_err().errno(), script.swept), (Errno::IO, 1));
    }

    /// An event loop that reports a file without events makes no difference but for a while.
    #[test]
    fn false_alarms_leave_no_events_behind() {
        let (mut turn, mut script) = (Turn::default(), Script::default());
        assert!(poll(&mut turn, &mut script).is_pending());
        script.readable = true;
        for _ in 0..2 {
            assert!(poll(&mut turn, &mut script).is_pending());
        }
        assert_eq!((script.arms, script.reads), (2, 1));
        // Two events are there at once, of which only one is announced.
        script.complete(1);
        script.armed = true;
        script.complete(1);
        for _ in 0..2 {
            assert!(poll(&mut turn, &mut script).is_pending());
        }
        assert_eq!((script.swept, script.events), (2, 0), "the channel was read until empty");
        let reads = script.reads;
        script.complete(1);
        for _ in 0..2 {
            assert!(poll(&mut turn, &mut script).is_pending());
        }
        assert_eq!((script.swept, script.reads), (3, reads + 1), "and is trusted again");
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::*;
    use loom::sync::atomic::{AtomicBool, Ordering};
    use loom::sync::{Arc, Mutex, Notify};
    use loom::thread;
    use std::task::{Wake, Waker};

    /// The kernel's side: a completion queue, its channel, and who is told that the file's state
    /// changed, once for each change: edge-triggered.
    #[derive(Default)]
    struct Kernel {
        there: u32,
        armed: bool,
        events: u32,
        edges: u32,
    }

    /// The event loop's side, which hears of edges some time after they happened.
    #[derive(Default)]
    struct Readiness {
        /// Set by an edge, cleared after a read, unless another edge came meanwhile.
        ready: bool,
        tick: u32,
        waker: Option<Waker>,
    }

    struct World {
        kernel: Mutex<Kernel>,
        readiness: Mutex<Readiness>,
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

        /// What the event loop does about an edge.
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

    impl Ends for Model {
        fn sweep(&mut self) -> Result<usize> {
            let there = std::mem::take(&mut self.world.kernel.lock().unwrap().there);
            self.taken += there;
            Ok(there as usize)
        }

        fn is_wanted(&self) -> bool {
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
        let mut builder = loom::model::Builder::new();
        // All interleavings take minutes; `cargo ci soak loom` explores them.
        if std::env::var_os("UVERBS_LOOM_UNBOUNDED").is_none() {
            builder.preemption_bound = Some(2);
        }
        builder.check(move || {
            let readiness = Readiness { ready: false_alarm, ..Readiness::default() };
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
            // A thread of its own as well: the model's first is not preempted as others are.
            let driver = thread::spawn(move || {
                let task = std::sync::Arc::new(Task(Notify::new()));
                let waker = Waker::from(task.clone());
                let mut model = Model { world, taken: 0 };
                let mut turn = Turn::default();
                loop {
                    assert!(turn.poll(&mut model, &mut Context::from_waker(&waker)).is_pending());
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
    fn completions_on_one_thread_and_edges_on_another() {
        takes_all(2, false);
    }

    #[test]
    fn completions_after_a_false_alarm() {
        takes_all(1, true);
    }
}
