//! Queues in tokio's event loop: current-thread or multi-thread, with `enable_io`.
//!
//! Spawn what shall be quick. Waking the future that `block_on` waits for goes by way of the kernel, a
//! write and another look at the event loop; waking a task of the same thread does not.

use super::driver::{CompletionQueue, Driver, Watch};
use crate::context::Context;
use crate::error::{Error, Result};
use crate::events::async_event::AsyncEvent;
use crate::qp::{Endpoint, Handshake, QpControl};
use rustix::io::Errno;
use std::future::{Future, poll_fn};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::task::{Poll, ready};
use std::time::Duration;
use tokio::io::Interest;
use tokio::io::unix::{AsyncFd, AsyncFdReadyGuard};
use tokio::net::{TcpListener, TcpStream, ToSocketAddrs};
use tokio::task::JoinHandle;

/// A file registered with the event loop of the runtime that it was made in.
#[derive(Debug)]
pub struct Registered(AsyncFd<OwnedFd>);

impl Registered {
    /// Registers a file for reading.
    ///
    /// # Errors
    ///
    /// `EMFILE` and the like, and those of `epoll_ctl(2)`.
    #[allow(
        deprecated,
        reason = "its successor is unsafe, for files that close early; ours is owned"
    )]
    pub fn new(fd: BorrowedFd<'_>) -> Result<Registered> {
        let registered = fd
            .try_clone_to_owned()
            .and_then(|fd| AsyncFd::with_interest(fd, Interest::READABLE))
            .map_err(|error| failed("epoll_ctl", &error))?;
        Ok(Registered(registered))
    }
}

impl Registered {
    /// Whether the file may be readable or in error.
    fn poll_ready(
        &self,
        cx: &mut std::task::Context<'_>,
    ) -> Poll<Result<AsyncFdReadyGuard<'_, OwnedFd>>> {
        let ready = match self.0.poll_read_ready(cx) {
            Poll::Ready(ready) => ready,
            // An error without anything to read, to tokio, is about the other end of what is written.
            Poll::Pending => ready!(self.0.poll_write_ready(cx)),
        };
        Poll::Ready(ready.map_err(|error| failed("epoll_wait", &error)))
    }
}

impl Watch for Registered {
    fn poll_read(
        &mut self,
        cx: &mut std::task::Context<'_>,
        read: &mut dyn FnMut() -> Result<()>,
    ) -> Poll<Result<()>> {
        let mut guard = ready!(self.poll_ready(cx))?;
        let answer = read();
        // Only what was known before: an event during or after the read wakes again.
        guard.clear_ready();
        Poll::Ready(answer)
    }
}

fn failed(verb: &'static str, error: &io::Error) -> Error {
    match Errno::from_io_error(error) {
        Some(errno) => Error::new(verb, errno),
        None => Error::new(verb, Errno::IO).detail(error.to_string()),
    }
}

impl CompletionQueue {
    /// Makes a queue with room for `cqe` completions, and spawns its driver on the current runtime.
    ///
    /// The handle answers why the driver ended. One queue for each worker keeps workers out of
    /// each other's way. A task that is alone with its queue is quicker if it polls the driver itself,
    /// as the example `pingpong` does with `select!`: one task to be scheduled, in place of two.
    ///
    /// # Errors
    ///
    /// Those of [`new`](Self::new).
    ///
    /// # Panics
    ///
    /// Outside of a runtime, or in one without `enable_io`, as everything of tokio's does.
    pub fn spawn(context: &Context, cqe: u32) -> Result<(CompletionQueue, JoinHandle<Result<()>>)> {
        let (cq, driver): (_, Driver<Registered>) =
            CompletionQueue::new(context, cqe, Registered::new)?;
        Ok((cq, tokio::spawn(driver)))
    }
}

/// What `future` comes to within `timeout`; afterwards the future itself, to be polled on, or to be
/// dropped: what a request works on then returns when it is over.
///
/// # Errors
///
/// The future, after the timeout.
///
/// # Panics
///
/// In a runtime without `enable_time`.
pub async fn within<F: Future + Unpin>(
    timeout: Duration,
    mut future: F,
) -> std::result::Result<F::Output, F> {
    match tokio::time::timeout(timeout, &mut future).await {
        Ok(output) => Ok(output),
        Err(_) => Err(future),
    }
}

/// A stream of asynchronous events.
#[derive(Debug)]
pub struct Events {
    context: Context,
    registered: Registered,
    /// The last that was told was an error.
    #[cfg(feature = "stream")]
    over: bool,
}

impl Events {
    /// The events of `context` to come. Several streams share them.
    ///
    /// # Errors
    ///
    /// Those of [`Registered::new`].
    pub fn new(context: &Context) -> Result<Events> {
        let registered = Registered::new(context.events_fd())?;
        Ok(Events {
            context: context.clone(),
            registered,
            #[cfg(feature = "stream")]
            over: false,
        })
    }

    /// The next event, when there is one. Reads the file until it is empty before it waits.
    pub fn poll_next(&mut self, cx: &mut std::task::Context<'_>) -> Poll<Result<AsyncEvent>> {
        let next = self.poll_event(cx);
        #[cfg(feature = "stream")]
        {
            self.over = matches!(next, Poll::Ready(Err(_)));
        }
        next
    }

    #[cfg(feature = "stream")]
    pub(super) fn is_over(&self) -> bool {
        self.over
    }

    fn poll_event(&mut self, cx: &mut std::task::Context<'_>) -> Poll<Result<AsyncEvent>> {
        loop {
            let mut guard = ready!(self.registered.poll_ready(cx))?;
            if let Some(event) = self.context.try_next_event()? {
                return Poll::Ready(Ok(event));
            }
            guard.clear_ready();
        }
    }

    /// The next event. Nothing is lost if the future is dropped.
    ///
    /// # Errors
    ///
    /// Those of [`Context::try_next_event`]; `EIO` after the last event of a device that is gone.
    pub async fn next(&mut self) -> Result<AsyncEvent> {
        poll_fn(|cx| self.poll_next(cx)).await
    }
}

const VERB: &str = "handshake";

/// Connects `qp` to the one at the other end of `stream`, which does the same: each sends its
/// [`Endpoint`], shakes hands, and says that it is ready. The stream is the program's again
/// afterwards.
///
/// Receives can be posted once this answered; over RC a message waits for one.
///
/// # Errors
///
/// Those of [`QpControl::endpoint`] and [`QpControl::handshake`]; `EPROTO` if the other end says
/// something else; those of the stream.
pub async fn handshake(
    qp: &QpControl,
    stream: &TcpStream,
    port: u8,
    gid_index: u32,
    options: &Handshake,
) -> Result<Endpoint> {
    let local = qp.endpoint(port, gid_index)?;
    write_all(stream, &local.to_bytes()).await?;
    let mut bytes = [0; Endpoint::BYTES];
    read_all(stream, &mut bytes).await?;
    let remote = Endpoint::from_bytes(&bytes)
        .ok_or_else(|| Error::new(VERB, Errno::PROTO).detail("the peer sent no endpoint"))?;
    // The kernel may ask the network for the peer's hardware address, and the runtime goes on.
    let (control, options) = (QpControl { qp: qp.qp.clone() }, *options);
    let moved = tokio::task::spawn_blocking(move || control.handshake_with(&remote, &options));
    moved.await.map_err(|error| Error::new(VERB, Errno::CANCELED).detail(error.to_string()))??;
    write_all(stream, b"R").await?;
    let mut ready = [0];
    read_all(stream, &mut ready).await?;
    match &ready {
        b"R" => Ok(remote),
        _ => Err(Error::new(VERB, Errno::PROTO).detail("the peer did not say that it is ready")),
    }
}

/// Connects `qp` to whoever [accepts](accept) at `address`.
///
/// # Errors
///
/// Those of [`handshake`], and `ECONNREFUSED` and the like.
pub async fn connect(
    qp: &QpControl,
    address: impl ToSocketAddrs,
    port: u8,
    gid_index: u32,
) -> Result<TcpStream> {
    let stream = TcpStream::connect(address).await.map_err(|error| failed("connect", &error))?;
    handshake(qp, &stream, port, gid_index, &Handshake::new()).await?;
    Ok(stream)
}

/// Connects `qp` to the next that [connects](connect) to `listener`.
///
/// # Errors
///
/// Those of [`handshake`] and of accepting.
pub async fn accept(
    qp: &QpControl,
    listener: &TcpListener,
    port: u8,
    gid_index: u32,
) -> Result<TcpStream> {
    let (stream, _) = listener.accept().await.map_err(|error| failed("accept", &error))?;
    handshake(qp, &stream, port, gid_index, &Handshake::new()).await?;
    Ok(stream)
}

/// Sends all of `bytes`: tokio's own means would need another of its features.
async fn write_all(stream: &TcpStream, mut bytes: &[u8]) -> Result<()> {
    while !bytes.is_empty() {
        stream.writable().await.map_err(|error| failed("write", &error))?;
        match stream.try_write(bytes) {
            Ok(length) => bytes = bytes.get(length..).unwrap_or_default(),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(failed("write", &error)),
        }
    }
    Ok(())
}

/// Receives as many bytes as there is room for; `ECONNRESET` if the stream ends before.
async fn read_all(stream: &TcpStream, mut room: &mut [u8]) -> Result<()> {
    while !room.is_empty() {
        stream.readable().await.map_err(|error| failed("read", &error))?;
        match stream.try_read(room) {
            Ok(0) => return Err(Error::new("read", Errno::CONNRESET).detail("the stream ended")),
            Ok(length) => room = room.get_mut(length..).unwrap_or_default(),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(failed("read", &error)),
        }
    }
    Ok(())
}

impl AsFd for Registered {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.get_ref().as_fd()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::uverbs::scripted::Script;
    use rustix::pipe::{PipeFlags, pipe_with};

    fn block_on<F: Future>(future: F) -> F::Output {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(future)
    }

    /// As a channel of a device that is gone: in error, and not readable.
    #[test]
    #[cfg_attr(miri, ignore = "it polls a file")]
    fn a_file_in_error_is_told() {
        block_on(async {
            let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).unwrap();
            let mut registered = Registered::new(writer.as_fd()).unwrap();
            let mut told = Box::pin(poll_fn(move |cx| {
                let mut read = || Err(Error::new("read", Errno::IO));
                registered.poll_read(cx, &mut read)
            }));
            assert!(
                within(Duration::from_millis(20), &mut told).await.is_err(),
                "nothing is wrong"
            );
            drop(reader);
            let end = within(Duration::from_secs(10), &mut told).await;
            let Ok(Err(error)) = end else { panic!("nobody was told") };
            assert_eq!(error.errno(), Errno::IO);
        });
    }

    /// When the device goes away its event file may be in error, and never be readable again.
    #[test]
    #[cfg_attr(miri, ignore = "it polls a file")]
    fn an_event_file_in_error_is_told() {
        block_on(async {
            let script = Script::new();
            let context = script.open("rxe0");
            let mut events = Events::new(&context).unwrap();
            let quiet = tokio::time::timeout(Duration::from_millis(20), events.next()).await;
            assert!(quiet.is_err(), "{quiet:?}");
            // Only who leaves something unread is missed.
            rustix::io::write(context.events_fd(), b"unread").unwrap();
            script.break_events();
            let told = tokio::time::timeout(Duration::from_secs(10), events.next()).await;
            assert!(told.expect("somebody is told").is_err());
            #[cfg(feature = "stream")]
            {
                use futures_core::{FusedStream, Stream};
                assert!(events.is_terminated());
                let next = poll_fn(|cx| Stream::poll_next(std::pin::Pin::new(&mut events), cx));
                let next = tokio::time::timeout(Duration::from_secs(10), next).await;
                assert!(next.expect("it does not wait").is_none(), "an error is told once");
            }
        });
    }
}
