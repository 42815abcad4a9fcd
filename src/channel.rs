//! Completion channels: files that become readable when an armed completion queue gets an entry.
//!
//! Pairs with the completion event file of `core/uverbs_std_types_cq.c`.

use crate::context::Context;
use crate::error::{Error, ErrorWith, Result};
use crate::events::file::set_nonblocking;
use crate::events::keys::{ObjectKey, Resolved};
use crate::events::wait::{Read, read_record, wait_readable};
use crate::file::File;
use crate::object::destroy_sole;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use uverbs_uapi::comp_channel::ib_uverbs_comp_event_desc;
use zerocopy::FromZeros;

const VERB: &str = "get_cq_event";

/// The outcome of a read of the file.
enum ReadEvent {
    /// The file has no event.
    None,
    Of(ObjectKey),
    /// An event of a destroyed queue, or of a queue of another context.
    Other,
}

#[derive(Debug)]
pub(crate) struct ChannelInner {
    pub(crate) file: Arc<File>,
    pub(crate) fd: OwnedFd,
    /// Whether a read of the file waits for an event.
    blocking: AtomicBool,
}

/// A file that becomes readable when an armed completion queue gets a completion.
///
/// One channel may serve many queues. The file is non-blocking unless
/// [`set_nonblocking`](Self::set_nonblocking) says otherwise: register it
/// ([`as_fd`](AsFd::as_fd)) with an event loop, and read it until it is empty, or an
/// edge-triggered loop will not be woken again. An event of a queue that was destroyed meanwhile
/// is dropped. Events need no acknowledgement. May be used from several threads; each event
/// reaches one of them.
///
/// ```no_run
/// # fn f(context: &uverbs::Context) -> Result<(), Box<dyn std::error::Error>> {
/// use uverbs::Notify;
///
/// let channel = context.create_comp_channel()?;
/// let mut cq = context.cq_builder(16).channel(&channel).build()?;
/// loop {
///     cq.req_notify(Notify::Next)?;
///     // Completions that came before the queue was armed raise no event.
///     while let Some(completion) = cq.poll()?.next() {
///         println!("{}", completion.wr_id());
///     }
///     channel.wait(None)?;
/// }
/// # }
/// ```
#[doc(alias = "ibv_comp_channel")]
#[derive(Debug)]
pub struct CompletionChannel {
    pub(crate) inner: Arc<ChannelInner>,
}

impl Context {
    /// Creates a completion channel.
    ///
    /// # Errors
    ///
    /// `EMFILE` or `ENFILE` when the process or the system has no file left.
    #[doc(alias = "ibv_create_comp_channel")]
    pub fn create_comp_channel(&self) -> Result<CompletionChannel> {
        const VERB: &str = "create_comp_channel";
        self.file.check_fork(VERB)?;
        let fd = crate::uverbs::fd::create_comp_channel(&*self.file.kernel)
            .map_err(|errno| Error::from_kernel(VERB, errno))?;
        set_nonblocking(fd.as_fd(), true).map_err(|errno| Error::new(VERB, errno))?;
        let blocking = AtomicBool::new(false);
        let inner = ChannelInner { file: self.file.clone(), fd, blocking };
        Ok(CompletionChannel { inner: Arc::new(inner) })
    }
}

impl CompletionChannel {
    /// Sets whether reads of the file return at once (`true`, the default) or wait for an event.
    ///
    /// Set `false` for a thread that only waits for this channel: [`wait`](Self::wait) without a timeout is
    /// then a single system call on Linux's devices. Other calls take one more system call then. If several threads
    /// share the channel, they may wait longer than their timeout when another thread reads the event first.
    ///
    /// # Errors
    ///
    /// [`Error::is_forked`] in a child of the process that created the channel.
    pub fn set_nonblocking(&self, nonblocking: bool) -> Result<()> {
        const VERB: &str = "set_nonblocking";
        self.inner.file.check_fork(VERB)?;
        set_nonblocking(self.inner.fd.as_fd(), nonblocking)
            .map_err(|errno| Error::new(VERB, errno))?;
        self.inner.blocking.store(!nonblocking, Ordering::Relaxed);
        Ok(())
    }

    /// Reads the next event: the key of a queue that has completions ([`CompletionQueue::key`]); `None` if
    /// there is none at the moment.
    ///
    /// [`CompletionQueue::key`]: crate::CqControl::key
    ///
    /// # Errors
    ///
    /// `EIO` when the device is gone.
    #[doc(alias = "ibv_get_cq_event")]
    #[doc(alias = "ibv_ack_cq_events")]
    pub fn try_next(&self) -> Result<Option<ObjectKey>> {
        self.inner.file.check_fork(VERB)?;
        loop {
            if self.inner.blocking.load(Ordering::Relaxed) && !self.is_readable()? {
                return Ok(None);
            }
            match self.read()? {
                ReadEvent::None => return Ok(None),
                ReadEvent::Of(key) => return Ok(Some(key)),
                ReadEvent::Other => {}
            }
        }
    }

    /// Waits for an event, at most for `timeout`, for ever without one. `None` after the timeout.
    ///
    /// # Errors
    ///
    /// As [`try_next`](Self::try_next).
    #[doc(alias = "ibv_get_cq_event")]
    pub fn wait(&self, timeout: Option<Duration>) -> Result<Option<ObjectKey>> {
        let platform = self.inner.file.kernel.platform();
        if timeout.is_none() && self.inner.blocking.load(Ordering::Relaxed) {
            self.inner.file.check_fork(VERB)?;
            // A hosted system does the device's work in waits, not in reads.
            let hosted = platform.hosted().is_some();
            loop {
                if hosted {
                    let mut fds = [PollFd::new(&self.inner.fd, PollFlags::IN)];
                    platform.wait(&mut fds, None).map_err(|errno| Error::new(VERB, errno))?;
                    // Another thread may have read the event.
                    if !self.is_readable()? {
                        continue;
                    }
                }
                match self.read()? {
                    ReadEvent::Of(key) => return Ok(Some(key)),
                    ReadEvent::Other => {}
                    // Another thread made the file non-blocking meanwhile.
                    ReadEvent::None => break,
                }
            }
        }
        wait_readable(VERB, &platform, self.inner.fd.as_fd(), timeout, || self.try_next())
    }

    fn read(&self) -> Result<ReadEvent> {
        let file = &self.inner.file;
        let mut event = ib_uverbs_comp_event_desc::new_zeroed();
        match read_record(VERB, self.inner.fd.as_fd(), &mut event)? {
            Read::Empty => return Ok(ReadEvent::None),
            Read::Record => {}
        }
        Ok(match file.keys.resolve_cq_event(event.cq_handle) {
            Resolved::Live(_, key) => ReadEvent::Of(key),
            Resolved::Dead => {
                file.dead_events.fetch_add(1, Ordering::Relaxed);
                ReadEvent::Other
            }
            // Another process that has the kernel file made a queue on this channel.
            Resolved::Foreign(_) => ReadEvent::Other,
        })
    }

    fn is_readable(&self) -> Result<bool> {
        let mut fds = [PollFd::new(&self.inner.fd, PollFlags::IN)];
        match rustix::event::poll(&mut fds, Some(&Timespec::default())) {
            Ok(ready) => Ok(ready > 0),
            Err(Errno::INTR) => Ok(false),
            Err(errno) => Err(Error::new(VERB, errno)),
        }
    }

    /// Closes the channel; dropping it closes it as soon as no queue uses it any more.
    ///
    /// # Errors
    ///
    /// `EBUSY` while a queue uses it; the channel comes back with the error.
    #[doc(alias = "ibv_destroy_comp_channel")]
    pub fn destroy(self) -> std::result::Result<(), ErrorWith<Self>> {
        const HELD: &str = "a completion queue still uses the channel";
        destroy_sole(self.inner, "destroy_comp_channel", HELD, |_| Ok(()))
            .map_err(|failed| failed.map(|inner| CompletionChannel { inner }))
    }
}

impl AsFd for CompletionChannel {
    /// The file, which is readable when there is an event. It takes no commands: other code that has it can take events
    /// away, and nothing else.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inner.fd.as_fd()
    }
}
