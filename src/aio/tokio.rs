//! Queues in tokio's event loop: current-thread or multi-thread, with `enable_io`, and with
//! `enable_time` for handshakes and for connecting by address.
//!
//! Do the fast work in spawned tasks: waking the future that `block_on` runs costs a system call and another
//! round of the event loop, waking a task of the same thread does not.
//!
//! The types of tokio that this module's functions take and return are those of its major version 1.

use super::cm::AsyncEventChannel;
use super::cq::AsyncCompletionQueue;
use super::driver::Readiness;
use super::worker::Worker;
use crate::context::Context;
use crate::cq::CqBuilder;
use crate::error::{Error, Result};
use crate::events::async_event::AsyncEvent;
use crate::pd::Exclusive;
use crate::port::GidEntry;
use crate::qp::{Endpoint, Handshake, QpControl};
use crate::sync::fork::OwnedHere;
use rustix::io::Errno;
use std::future::{Future, poll_fn};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::task::{Poll, ready};
use std::time::Duration;
use tokio::io::Interest;
use tokio::io::unix::{AsyncFd, AsyncFdReadyGuard};
use tokio::net::{TcpListener, TcpStream, ToSocketAddrs};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout_at};
use uverbs_host::HostSystem;

/// A file that is registered with the event loop of the current runtime.
///
/// A forked child that drops it leaves the registration to the parent's event loop.
#[derive(Debug)]
pub struct Registered(OwnedHere<AsyncFd<OwnedFd>>);

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
        let registered = OwnedHere::new(registered);
        Ok(Registered(registered.map_err(|errno| Error::new("epoll_ctl", errno))?))
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
            // tokio reports a file in error without anything to read as ready to be written.
            Poll::Pending => ready!(self.0.poll_write_ready(cx)),
        };
        Poll::Ready(ready.map_err(|error| failed("epoll_wait", &error)))
    }
}

impl Readiness for Registered {
    fn poll_read(
        &mut self,
        cx: &mut std::task::Context<'_>,
        read: &mut dyn FnMut() -> Result<()>,
    ) -> Poll<Result<()>> {
        let mut guard = ready!(self.poll_ready(cx))?;
        let event = read();
        // This clears only what was known before: an event during the read wakes again.
        guard.clear_ready();
        Poll::Ready(event)
    }
}

fn failed(verb: &'static str, error: &io::Error) -> Error {
    match Errno::from_io_error(error) {
        Some(errno) => Error::new(verb, errno),
        None => Error::new(verb, Errno::IO).detail(error.to_string()),
    }
}

impl CqBuilder {
    /// Creates the queue as [`build_async`](Self::build_async) does, and spawns its driver on the current
    /// runtime.
    ///
    /// The join handle returns why the driver ended. With one queue for each worker, workers do not share a
    /// lock. A task that is the only user of its queue is faster if it polls the driver itself, as the example
    /// `pingpong` does with `select!`, because only one task is scheduled.
    ///
    /// ```no_run
    /// # async fn f(context: &uverbs::Context, node: &uverbs::ParentDomain) -> Result<(), Box<dyn std::error::Error>> {
    /// // Interrupts of vector 3, and memory of the allocator of a parent domain.
    /// let (cq, driver) = context.cq_builder(1024).vector(3).parent_domain(node).spawn()?;
    /// // … queue pairs and requests; when the last handle is gone, the driver ends …
    /// drop(cq);
    /// driver.await??;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`build_async`](Self::build_async).
    ///
    /// # Panics
    ///
    /// Outside of a runtime, or in one without `enable_io`.
    pub fn spawn(self) -> Result<(AsyncCompletionQueue, JoinHandle<Result<()>>)> {
        let (cq, driver) = self.build_async(Registered::new)?;
        Ok((cq, tokio::spawn(driver)))
    }
}

impl Worker {
    /// Starts on this thread, and spawns the driver on the current
    /// [`LocalSet`](tokio::task::LocalSet). The join handle returns why the driver ended.
    ///
    /// # Errors
    ///
    /// Those of [`start`](Self::start).
    ///
    /// # Panics
    ///
    /// Outside of a `LocalSet`, or in a runtime without `enable_io`.
    #[allow(clippy::type_complexity, reason = "a queue, and a task that ends with a result")]
    pub fn spawn_local(self) -> Result<(AsyncCompletionQueue<Exclusive>, JoinHandle<Result<()>>)> {
        let (cq, driver) = self.start(Registered::new)?;
        Ok((cq, tokio::task::spawn_local(driver)))
    }
}

impl AsyncEventChannel {
    /// Opens the connection manager, and spawns the driver of the channel on the current runtime. The join
    /// handle returns why the driver ended.
    ///
    /// # Errors
    ///
    /// Those of [`new`](Self::new).
    ///
    /// # Panics
    ///
    /// Outside of a runtime, or in one without `enable_io`. A connect panics in one without `enable_time`.
    pub fn spawn() -> Result<(AsyncEventChannel, JoinHandle<Result<()>>)> {
        let (channel, driver) = AsyncEventChannel::new(Registered::new, tokio::time::sleep)?;
        Ok((channel, tokio::spawn(driver)))
    }

    /// As [`spawn`](Self::spawn), of a hosted kernel: a [`Fabric`](https://docs.rs/uverbs-sim)'s, in a test.
    ///
    /// **Unstable**, as `uverbs-host` is.
    ///
    /// ```
    /// # #[cfg(feature = "sim")] {
    /// use uverbs::aio::cm::AsyncEventChannel;
    /// use uverbs::cm::Listener;
    /// use uverbs::sim::{Fabric, Mode};
    ///
    /// let fabric = Fabric::new(2, Mode::Trapped);
    /// let event_loop = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    /// event_loop.block_on(async {
    ///     let (channel, _driver) = AsyncEventChannel::spawn_on(&fabric.system())?;
    ///     let listener = channel.listen(&Listener::builder("10.0.0.2:7471")?)?;
    ///     assert_eq!(listener.local_addr()?.port(), 7471);
    ///     Ok::<(), uverbs::Error>(())
    /// })?;
    /// # }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`new_on`](Self::new_on).
    ///
    /// # Panics
    ///
    /// Outside of a runtime, or in one without `enable_io`. A connect panics in one without `enable_time`.
    pub fn spawn_on(
        system: &Arc<dyn HostSystem>,
    ) -> Result<(AsyncEventChannel, JoinHandle<Result<()>>)> {
        let (channel, driver) =
            AsyncEventChannel::new_on(system, Registered::new, tokio::time::sleep)?;
        Ok((channel, tokio::spawn(driver)))
    }
}

/// Waits for `future` for at most `timeout`.
///
/// ```no_run
/// # use std::time::Duration;
/// # use uverbs::aio::{AsyncQueuePair, tokio::within};
/// # use uverbs::owned::Buffer;
/// # async fn f(qp: &AsyncQueuePair, buffer: Buffer) {
/// match within(Duration::from_secs(1), qp.recv(buffer)).await {
///     Ok(received) => println!("{:?}", received.map(|done| done.outcome)),
///     Err(_receive) => println!("nothing came; the receive stays posted"),
/// }
/// # }
/// ```
///
/// # Errors
///
/// After the timeout, the future itself. The program polls it on, or drops it: a request that was posted then
/// goes on, and its memory is dropped when it is over.
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
///
/// ```no_run
/// # async fn f(context: &uverbs::Context) -> uverbs::Result<()> {
/// let mut events = uverbs::aio::tokio::Events::new(context)?;
/// loop {
///     println!("{:?}", events.next().await?);
/// }
/// # }
/// ```
#[derive(Debug)]
pub struct Events {
    context: Context,
    registered: Registered,
    /// Whether the last event was an error, after which the stream ends.
    #[cfg(feature = "stream")]
    over: bool,
}

impl Events {
    /// A stream of the events of `context` to come. If there are several streams, each event goes to one.
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

    /// Polls for the next event.
    ///
    /// A message, or an event of the device that ends the wait for it:
    ///
    /// ```no_run
    /// # use uverbs::{AsyncEvent, aio::{Inbox, tokio::Events}, owned::{Buffer, Finished}};
    /// # async fn f(events: &mut Events, inbox: &mut Inbox) -> Result<Finished<Buffer>, Box<dyn std::error::Error>> {
    /// use std::future::poll_fn;
    /// use std::task::Poll;
    ///
    /// let message = poll_fn(|cx| match events.poll_next(cx) {
    ///     Poll::Ready(event) => Poll::Ready(Err(event)),
    ///     Poll::Pending => inbox.poll_next(cx).map(Ok),
    /// });
    /// match message.await {
    ///     Ok(message) => Ok(message?),
    ///     Err(event) => Err(format!("{} came first", event?.kind).into()),
    /// }
    /// # }
    /// ```
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

    /// Waits for the next event. No event is lost if the future is dropped.
    #[doc(alias = "ibv_get_async_event")]
    ///
    /// # Errors
    ///
    /// Those of [`Context::try_next_event`]; `EIO` after the last event of a device that is gone.
    pub async fn next(&mut self) -> Result<AsyncEvent> {
        poll_fn(|cx| self.poll_next(cx)).await
    }
}

const VERB: &str = "handshake";

/// How long [`handshake`], [`connect`] and [`accept`] wait for the peer's part of the handshake.
pub const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// Connects `qp` to the queue pair at the other end of `stream`, where the peer calls the same function. Each
/// side sends its [`Endpoint`], moves its queue pair to RTS, and sends that it is ready. Afterwards the
/// program may use the stream for something else.
///
/// Receives can be posted after it returned; over RC a message waits for one. The peer has `timeout` for all of its
/// part, usually [`HANDSHAKE_TIMEOUT`]. After an error the queue pair may have left state
/// [`RESET`](crate::QpState::RESET): create another one for the next peer.
///
/// A server whose clients may have to load a lot before their part:
///
/// ```no_run
/// # use uverbs::{GidEntry, aio::AsyncQueuePair};
/// # async fn f(qp: AsyncQueuePair, listener: tokio::net::TcpListener, gid: &GidEntry)
/// # -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::Duration;
/// use uverbs::{Errno, Handshake, aio::tokio::handshake};
///
/// let (stream, address) = listener.accept().await?;
/// let limit = Duration::from_secs(120);
/// match handshake(&qp, &stream, gid, &Handshake::new(), limit).await {
///     Ok(peer) => println!("{address} is connected: {peer:?}"),
///     // The queue pair goes with the client; the next client gets another one.
///     Err(late) if late.errno() == Errno::TIMEDOUT => println!("{address} is too slow: {late}"),
///     Err(error) => return Err(error.into()),
/// }
/// # Ok(()) }
/// ```
///
/// # Errors
///
/// Those of [`QpControl::endpoint`] and [`QpControl::handshake`]; those of the stream; and, with the step that
/// the peer did not finish, `ETIMEDOUT` if it is silent, `ECONNRESET` if it closes the stream, and `EPROTO`
/// if it sends something else.
///
/// # Panics
///
/// In a runtime without `enable_time`.
pub async fn handshake(
    qp: &QpControl,
    stream: &TcpStream,
    gid: &GidEntry,
    options: &Handshake,
    timeout: Duration,
) -> Result<Endpoint> {
    let mut peer = Peer::new(stream, timeout);
    let local = qp.endpoint(gid)?;
    peer.send("this side's endpoint", &local.to_bytes()).await?;
    let mut bytes = [0; Endpoint::BYTES];
    peer.receive("its endpoint", &mut bytes).await?;
    let remote = Endpoint::from_bytes(&bytes).ok_or_else(|| {
        let start = bytes.first_chunk::<4>().map(|start| start.escape_ascii().to_string());
        let start = start.unwrap_or_default();
        Error::new(VERB, Errno::PROTO)
            .detail(format!("the peer sent no endpoint, but bytes that begin with \"{start}\""))
    })?;
    // In a thread of its own: the kernel may wait for the network to tell the peer's hardware address.
    let (control, options) = (QpControl { qp: qp.qp.clone() }, *options);
    let moved = tokio::task::spawn_blocking(move || control.handshake(&remote, &options));
    moved.await.map_err(|error| Error::new(VERB, Errno::CANCELED).detail(error.to_string()))??;
    peer.send("that this side is ready", b"R").await?;
    let mut ready = [0];
    peer.receive("that it is ready", &mut ready).await?;
    match &ready {
        b"R" => Ok(remote),
        [other] => Err(Error::new(VERB, Errno::PROTO).detail(format!(
            "the peer sent its endpoint, and then {other:#04x} in place of 0x52, that it is ready"
        ))),
    }
}

/// Connects `qp` to the peer that [accepts](accept) at `address`. The peer has [`HANDSHAKE_TIMEOUT`] to accept,
/// and the same time again for the handshake. To wait longer, connect a stream and call
/// [`handshake`].
///
/// # Errors
///
/// Those of [`handshake`], and `ECONNREFUSED` and the like.
///
/// # Panics
///
/// As [`handshake`].
pub async fn connect(
    qp: &QpControl,
    address: impl ToSocketAddrs,
    gid: &GidEntry,
) -> Result<TcpStream> {
    let stream = tokio::time::timeout(HANDSHAKE_TIMEOUT, TcpStream::connect(address));
    let stream = stream.await.map_err(|_| {
        let detail = format!("nobody answered at the address within {HANDSHAKE_TIMEOUT:?}");
        Error::new("connect", Errno::TIMEDOUT).detail(detail)
    })?;
    let stream = stream.map_err(|error| failed("connect", &error))?;
    handshake(qp, &stream, gid, &Handshake::new(), HANDSHAKE_TIMEOUT).await?;
    Ok(stream)
}

/// Connects `qp` to the next peer that [connects](connect) to `listener`. It waits for the peer without a
/// limit; then the peer has [`HANDSHAKE_TIMEOUT`] for the handshake.
///
/// This suits a program that expects one peer. A server accepts streams itself, and runs the [`handshake`] of
/// each client in a task of its own, so that a client that fails or is slow does not keep others waiting:
/// see the example `requests`.
///
/// # Errors
///
/// Those of [`handshake`] and of accepting.
///
/// # Panics
///
/// As [`handshake`].
pub async fn accept(qp: &QpControl, listener: &TcpListener, gid: &GidEntry) -> Result<TcpStream> {
    let (stream, _) = listener.accept().await.map_err(|error| failed("accept", &error))?;
    handshake(qp, &stream, gid, &Handshake::new(), HANDSHAKE_TIMEOUT).await?;
    Ok(stream)
}

/// The other end of a stream, whose part of the handshake is to be over by `deadline`.
struct Peer<'s> {
    stream: &'s TcpStream,
    timeout: Duration,
    deadline: Instant,
}

impl<'s> Peer<'s> {
    fn new(stream: &'s TcpStream, timeout: Duration) -> Self {
        // In place of a timeout beyond what the clock can represent: thirty years.
        const LONG: Duration = Duration::from_secs(1_000_000_000);
        let now = Instant::now();
        let deadline = now.checked_add(timeout).unwrap_or_else(|| now + LONG);
        Peer { stream, timeout, deadline }
    }

    /// Sends all of `bytes`. tokio's `write_all` would need its feature `io-util`.
    async fn send(&mut self, what: &str, mut bytes: &[u8]) -> Result<()> {
        while !bytes.is_empty() {
            let Ok(writable) = timeout_at(self.deadline, self.stream.writable()).await else {
                let detail = format!("the peer did not take {what} within {:?}", self.timeout);
                return Err(Error::new(VERB, Errno::TIMEDOUT).detail(detail));
            };
            writable.map_err(|error| failed("write", &error))?;
            match self.stream.try_write(bytes) {
                Ok(length) => bytes = bytes.get(length..).unwrap_or_default(),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(broken(what, "taken", &error)),
            }
        }
        Ok(())
    }

    /// Fills `room`.
    async fn receive(&mut self, what: &str, room: &mut [u8]) -> Result<()> {
        let (mut received, all) = (0, room.len());
        let stopped = |received: usize, errno, how: String| {
            let detail =
                format!("the peer sent {received} of {all} bytes to say {what}, and {how}");
            Err(Error::new(VERB, errno).detail(detail))
        };
        while received < all {
            let Ok(readable) = timeout_at(self.deadline, self.stream.readable()).await else {
                let how = format!("no more within {:?}", self.timeout);
                return stopped(received, Errno::TIMEDOUT, how);
            };
            readable.map_err(|error| failed("read", &error))?;
            match self.stream.try_read(room.get_mut(received..).unwrap_or_default()) {
                Ok(0) => return stopped(received, Errno::CONNRESET, "ended the stream".to_owned()),
                Ok(length) => received += length,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(broken(what, "said", &error)),
            }
        }
        Ok(())
    }
}

/// A stream that failed in the middle of a handshake.
fn broken(what: &str, done: &str, error: &io::Error) -> Error {
    failed(VERB, error).detail(format!("the stream failed before the peer had {done} {what}"))
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
    use tokio::time::sleep;

    fn block_on<F: Future>(future: F) -> F::Output {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(future)
    }

    /// The channel of a device that is gone is in error, and not readable.
    #[test]
    #[cfg_attr(miri, ignore = "it polls a file")]
    fn a_file_in_error_is_reported() {
        block_on(async {
            let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).unwrap();
            let mut registered = Registered::new(writer.as_fd()).unwrap();
            let mut reported = Box::pin(poll_fn(move |cx| {
                let mut read = || Err(Error::new("read", Errno::IO));
                registered.poll_read(cx, &mut read)
            }));
            assert!(
                within(Duration::from_millis(20), &mut reported).await.is_err(),
                "nothing is wrong"
            );
            drop(reader);
            let end = within(Duration::from_secs(10), &mut reported).await;
            let Ok(Err(error)) = end else { panic!("the error was not reported") };
            assert_eq!(error.errno(), Errno::IO);
        });
    }

    /// Both ends of a stream.
    async fn streams() -> (TcpStream, TcpStream) {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (ours, theirs) = tokio::join!(TcpStream::connect(address), listener.accept());
        (ours.unwrap(), theirs.unwrap().0)
    }

    /// The event loop may report a stream as writable that something else has filled meanwhile.
    #[test]
    #[cfg_attr(miri, ignore = "it opens sockets")]
    fn a_full_stream_is_waited_for() {
        block_on(async {
            let (ours, theirs) = streams().await;
            let mut filled = 0;
            while let Ok(length) = rustix::io::write(&ours, &[0; 1 << 16]) {
                filled += length;
            }
            let late = Peer::new(&ours, Duration::from_millis(20)).send("a word", b"word").await;
            assert_eq!(late.unwrap_err().errno(), Errno::TIMEDOUT);
            let mut room = vec![0; filled + 4];
            let (mut one, mut other) = (
                Peer::new(&ours, Duration::from_secs(60)),
                Peer::new(&theirs, Duration::from_secs(60)),
            );
            let (sent, received) =
                tokio::join!(one.send("a word", b"word"), other.receive("all", &mut room));
            sent.unwrap();
            received.unwrap();
            assert_eq!(&room[filled..], b"word");
        });
    }

    /// The call fails at once, and not after the timeout.
    #[test]
    #[cfg_attr(miri, ignore = "it opens sockets")]
    fn a_stream_that_the_peer_resets_fails_with_its_error() {
        block_on(async {
            for receives in [true, false] {
                let (ours, theirs) = streams().await;
                let mut peer = Peer::new(&ours, Duration::from_secs(2));
                peer.send("a word", b"word").await.unwrap();
                // With the word unread, closing is a reset.
                theirs.readable().await.unwrap();
                drop(theirs);
                ours.readable().await.unwrap();
                let end = match receives {
                    true => peer.receive("a word", &mut [0; 4]).await,
                    false => peer.send("a word", b"word").await,
                };
                let error = end.unwrap_err();
                assert_eq!(error.errno(), Errno::CONNRESET, "{error}");
                assert!(error.message().contains("the stream failed before the peer"), "{error}");
            }
        });
    }

    /// A stream may deliver one message in several reads.
    #[test]
    #[cfg_attr(miri, ignore = "it opens sockets")]
    fn all_bytes_of_a_message_are_received() {
        block_on(async {
            let (ours, theirs) = streams().await;
            // Nor does the longest timeout end before the rest comes.
            let mut one = Peer::new(&ours, Duration::from_secs(10));
            let mut other = Peer::new(&theirs, Duration::MAX);
            let mut room = [0; 6];
            let say = async {
                one.send("half", b"abc").await?;
                sleep(Duration::from_millis(10)).await;
                one.send("the rest", b"def").await
            };
            let (said, heard) = tokio::join!(say, other.receive("all", &mut room));
            said.unwrap();
            heard.unwrap();
            assert_eq!(&room, b"abcdef");
        });
    }

    #[test]
    #[cfg_attr(miri, ignore = "it polls a file")]
    fn an_event_is_reported_by_the_call_and_by_the_stream() {
        use crate::EventType;
        block_on(async {
            let script = Script::new();
            let context = script.open("rxe0");
            let mut events = Events::new(&context).unwrap();
            script.raise(1, EventType::PORT_ERR.0);
            assert_eq!(events.next().await.unwrap().kind, EventType::PORT_ERR);
            #[cfg(feature = "stream")]
            {
                use futures_core::{FusedStream, Stream};
                script.raise(1, EventType::PORT_ACTIVE.0);
                let next = poll_fn(|cx| Stream::poll_next(std::pin::Pin::new(&mut events), cx));
                let event = next.await.expect("an event").unwrap();
                assert_eq!(event.kind, EventType::PORT_ACTIVE);
                assert!(!events.is_terminated());
            }
        });
    }

    /// When the device goes away its event file may be in error, and never be readable again.
    #[test]
    #[cfg_attr(miri, ignore = "it polls a file")]
    fn an_event_file_in_error_is_reported() {
        block_on(async {
            let script = Script::new();
            let context = script.open("rxe0");
            let mut events = Events::new(&context).unwrap();
            let quiet = tokio::time::timeout(Duration::from_millis(20), events.next()).await;
            assert!(quiet.is_err(), "{quiet:?}");
            // With an unread byte, closing the other end is an error.
            rustix::io::write(context.events_fd(), b"unread").unwrap();
            script.break_events();
            let reported = tokio::time::timeout(Duration::from_secs(10), events.next()).await;
            assert!(reported.expect("it is reported").is_err());
            #[cfg(feature = "stream")]
            {
                use futures_core::{FusedStream, Stream};
                assert!(events.is_terminated());
                let next = poll_fn(|cx| Stream::poll_next(std::pin::Pin::new(&mut events), cx));
                let next = tokio::time::timeout(Duration::from_secs(10), next).await;
                assert!(next.expect("it does not wait").is_none(), "an error is reported once");
            }
        });
    }
}
