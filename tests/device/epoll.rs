//! Futures without a runtime: a loop around edge-triggered epoll, and threads.

use crate::env;
use crate::pair::PATIENCE;
use crate::tasks::{Half, ask, connected, echo_back};
use crate::verdict::{Stop, Verdict, trials};
use rustix::event::epoll;
use std::future::Future;
use std::os::fd::OwnedFd;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context as Cx, Poll, Wake, Waker};
use std::time::Duration;
use uverbs::Result;
use uverbs::aio::{CompletionQueue, Watch};

trials![edge_triggered];

/// An event loop of one file, which tells of an edge only once.
struct Edges {
    epoll: OwnedFd,
    /// An edge that was not used up.
    ready: bool,
    waits: u64,
}

impl Watch for Edges {
    fn poll_read(
        &mut self,
        _: &mut Cx<'_>,
        read: &mut dyn FnMut() -> Result<()>,
    ) -> Poll<Result<()>> {
        if !std::mem::take(&mut self.ready) && !self.wait(Duration::ZERO) {
            return Poll::Pending;
        }
        Poll::Ready(read())
    }
}

impl Edges {
    fn wait(&mut self, timeout: Duration) -> bool {
        self.waits += 1;
        let timeout = rustix::event::Timespec::try_from(timeout).expect("a short time");
        let mut events = [const { std::mem::MaybeUninit::uninit() }; 1];
        let (events, _) = epoll::wait(&self.epoll, &mut events, Some(&timeout)).expect("epoll");
        !events.is_empty()
    }
}

struct Unpark(std::thread::Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// No edge is missed, and nobody needs more than edges.
fn edge_triggered() -> Verdict {
    const MESSAGES: usize = 300;
    let mut drivers = Vec::new();
    let mut half = || {
        let context = env::open()?;
        let (cq, mut driver) = CompletionQueue::new(&context, 128, |fd| {
            let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).expect("an epoll file");
            let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
            epoll::add(&epoll, fd, epoll::EventData::new_u64(0), flags).expect("a watched file");
            Ok(Edges { epoll, ready: false, waits: 0 })
        })?;
        drivers.push(std::thread::spawn(move || {
            let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
            let deadline = std::time::Instant::now() + PATIENCE;
            loop {
                let mut cx = Cx::from_waker(&waker);
                match Pin::new(&mut driver).poll(&mut cx) {
                    Poll::Ready(end) => return end.map_err(Stop::from),
                    Poll::Pending if std::time::Instant::now() > deadline => {
                        return Err(Stop::fail("the driver does not end"));
                    }
                    // Not for ever: the last user's farewell is no event of the file.
                    Poll::Pending => {
                        let watch = driver.watch_mut();
                        watch.ready = watch.wait(Duration::from_millis(20));
                    }
                }
            }
        }));
        Half::on(context, cq)
    };
    let (a, b) = (half()?, half()?);
    connected(&a, &b)?;
    let server = std::thread::spawn(move || block_on(echo_back(&b, MESSAGES)));
    block_on(ask(&a, MESSAGES))?;
    server.join().expect("no panic")?;
    drop(a);
    drivers.into_iter().try_for_each(|driver| driver.join().expect("no panic"))
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
