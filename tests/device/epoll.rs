//! Futures without a runtime: a loop around edge-triggered epoll, threads, and blocking reads.

use crate::env;
use crate::pair::PATIENCE;
use crate::tasks::{Half, ask, connected, echo_back};
use crate::verdict::{Stop, Verdict, trials};
use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};
use std::future::Future;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context as Cx, Poll, Wake, Waker};
use std::time::Instant;
use uverbs::Result;
use uverbs::aio::{Blocking, Driver, Readiness};

trials![no_edge_is_missed, a_thread_sleeps_in_the_read_of_an_event];

/// The file of the completion queue, and the one that wakers write, as epoll names them.
const COMPLETIONS: u64 = 0;
const WAKES: u64 = 1;

/// An event loop of two files, which reports each edge only once.
struct Edges {
    epoll: OwnedFd,
    waker: Arc<Bell>,
    /// An edge that no future has consumed.
    ready: bool,
    /// Edges of the completion queue's file.
    edges: usize,
    waits: usize,
}

impl Readiness for Edges {
    /// Keeps an edge that no future waits for yet.
    fn poll_read(
        &mut self,
        _: &mut Cx<'_>,
        read: &mut dyn FnMut() -> Result<()>,
    ) -> Poll<Result<()>> {
        match std::mem::take(&mut self.ready) {
            true => Poll::Ready(read()),
            false => Poll::Pending,
        }
    }
}

impl Edges {
    fn new(completions: BorrowedFd<'_>) -> Edges {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).expect("an epoll file");
        let wakes = eventfd(0, EventfdFlags::CLOEXEC).expect("an event file");
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
        let add = |fd: BorrowedFd<'_>, name| {
            epoll::add(&epoll, fd, epoll::EventData::new_u64(name), flags).expect("a watched file")
        };
        add(completions, COMPLETIONS);
        add(wakes.as_fd(), WAKES);
        Edges { epoll, waker: Arc::new(Bell(wakes)), ready: false, edges: 0, waits: 0 }
    }

    /// Sleeps until an edge or a waker's write ends the sleep.
    fn wait(&mut self, deadline: Instant) -> Verdict {
        self.waits += 1;
        let timeout = deadline.saturating_duration_since(Instant::now());
        let timeout = Timespec::try_from(timeout).expect("a short time");
        let mut room = [const { MaybeUninit::uninit() }; 2];
        let (events, _) = epoll::wait(&self.epoll, &mut room, Some(&timeout))?;
        if events.is_empty() {
            return Err(Stop::fail("the driver sleeps, and no waker wakes it"));
        }
        if events.iter().any(|event| event.data.u64() == COMPLETIONS) {
            self.edges += 1;
            self.ready = true;
        }
        Ok(())
    }
}

/// Ends a wait. The file is never read: each write to it is an edge.
struct Bell(OwnedFd);

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        rustix::io::write(&self.0, &1u64.to_ne_bytes()).expect("a count far from its limit");
    }
}

/// Drives a queue to its end by edges and wakers only; returns the numbers of sleeps and of edges.
fn drive(mut driver: Driver<Edges>) -> Verdict<(usize, usize)> {
    let waker = Waker::from(driver.readiness_mut().waker.clone());
    let deadline = Instant::now() + PATIENCE;
    loop {
        match Pin::new(&mut driver).poll(&mut Cx::from_waker(&waker)) {
            Poll::Ready(end) => {
                end?;
                let watch = driver.readiness_mut();
                return Ok((watch.waits, watch.edges));
            }
            Poll::Pending => driver.readiness_mut().wait(deadline)?,
        }
    }
}

struct Unpark(std::thread::Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// A driver that loses an edge would sleep without end.
fn no_edge_is_missed() -> Verdict {
    const MESSAGES: usize = 300;
    env::rnr_wait()?;
    let mut drivers = Vec::new();
    let mut half = || {
        let context = env::open()?;
        let (cq, driver) = context.cq_builder(128).build_async(|fd| Ok(Edges::new(fd)))?;
        drivers.push(std::thread::spawn(move || drive(driver)));
        Half::on(context, cq)
    };
    let (a, b) = (half()?, half()?);
    connected(&a, &b)?;
    let server = std::thread::spawn(move || block_on(echo_back(&b, MESSAGES)));
    let asked = block_on(ask(&a, MESSAGES));
    drop(a);
    let served = server.join().expect("no panic");
    // The drivers' errors tell more than those of their futures.
    for driver in drivers {
        let (waits, edges) = driver.join().expect("no panic")?;
        // Each message is sent and received once on each side, and each event is of a completion.
        let most = 2 * MESSAGES;
        assert!((1..=most).contains(&edges), "{edges} edges of {most} completions");
        // Besides, it sleeps after a poll that found completions, and before its end.
        assert!(waits <= edges + most + 1, "{waits} waits for {edges} edges");
    }
    asked.and(served)
}

fn block_on<F: Future>(future: F) -> F::Output {
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut Cx::from_waker(&waker)) {
            Poll::Ready(output) => return output,
            Poll::Pending => std::thread::park(),
        }
    }
}

/// Runs the future and the driver on this thread; returns how often the future was polled.
fn alone(driver: Driver<Blocking>, work: impl Future<Output = Verdict>) -> Verdict<usize> {
    let (mut driver, mut work) = (pin!(driver), pin!(work));
    let mut cx = Cx::from_waker(Waker::noop());
    for polls in 1.. {
        if let Poll::Ready(ended) = work.as_mut().poll(&mut cx) {
            return ended.map(|()| polls);
        }
        if let Poll::Ready(ended) = driver.as_mut().poll(&mut cx) {
            ended?;
            break;
        }
    }
    Err(Stop::fail("the driver ended before its futures"))
}

/// A thread that did not sleep would poll many times for each completion.
fn a_thread_sleeps_in_the_read_of_an_event() -> Verdict {
    const MESSAGES: usize = 300;
    env::rnr_wait()?;
    let half = || -> Verdict<_> {
        let context = env::open()?;
        let (cq, driver) = context.cq_builder(128).build_async(Blocking::new)?;
        Ok((Half::on(context, cq)?, driver))
    };
    let ((a, asks), (b, serves)) = (half()?, half()?);
    connected(&a, &b)?;
    let server = std::thread::spawn(move || alone(serves, async { echo_back(&b, MESSAGES).await }));
    let asked = alone(asks, async { ask(&a, MESSAGES).await })?;
    let served = server.join().expect("no panic")?;
    // Each message is sent and received once on each side.
    let most = 2 * MESSAGES + 1;
    assert!(asked <= most && served <= most, "{asked} and {served} polls of {most} completions");
    Ok(())
}
