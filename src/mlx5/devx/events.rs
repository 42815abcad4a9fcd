//! Event channels of DEVX: files that firmware's events of objects arrive at.

use super::command::file_of;
use super::object::DevxObject;
use super::object::sealed::Sealed;
use crate::context::Context;
use crate::error::{Error, Result};
use crate::events::file::set_nonblocking;
use crate::events::wait::{Read, read_record, wait_readable};
use crate::file::File;
use crate::uverbs::command::Command;
use crate::uverbs::fd::create_devx_event_file;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;
use uverbs_uapi::mlx5::devx as uapi;
use uverbs_uapi::mlx5::devx::mlx5_ib_uapi_devx_create_event_channel_flags as flags;
use uverbs_uapi::mlx5::object::MLX5_IB_OBJECT_DEVX;

const GET: &str = "devx_get_event";
/// Bytes of the header of a record, and of an entry of an event queue.
const HEADER: usize = size_of::<uapi::mlx5_ib_uapi_devx_async_event_hdr>();
const EQE: usize = 64;
/// The name of an eventfd in procfs.
const EVENTFD: &str = "anon_inode:[eventfd]";

/// The contents of the records of an event channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DevxEventData {
    /// The cookie, and the entry of the event queue.
    Entry,
    /// The cookie alone. The kernel needs no memory for an event, and reports a subscription again only after it was read.
    #[doc(alias = "MLX5DV_DEVX_CREATE_EVENT_CHANNEL_FLAGS_OMIT_EV_DATA")]
    Omitted,
}

/// An event of firmware.
#[doc(alias = "mlx5dv_devx_async_event_hdr")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DevxEvent {
    /// The cookie of the subscription.
    pub cookie: u64,
    /// The entry of the event queue, `struct mlx5_eqe`: the event's type is byte 1, its subtype byte 3, and its data begin
    /// at byte 32. `None` from a channel that omits it.
    pub entry: Option<[u8; EQE]>,
}

/// A file at which events of objects arrive that the program subscribed to.
///
/// Events are of the types that the device's manual numbers: 0 a completion of an armed completion queue, 4 an error of
/// one, 9 a change of the port, 0x10 and 0x11 errors of a work queue. The file is non-blocking, and readable when there is
/// an event. All methods may be called from any thread; each event reaches one of them.
///
/// ```no_run
/// # fn f(context: &uverbs::Context, cq: &uverbs::mlx5::devx::DevxObject, eventfd: std::os::fd::OwnedFd)
/// # -> uverbs::Result<()> {
/// use uverbs::mlx5::devx::{DevxEventData, DevxEvents};
///
/// let events = DevxEvents::create(context, DevxEventData::Entry)?;
/// events.subscribe(Some(cq), &[0, 4], 42)?;
/// if let Some(event) = events.wait(None)? {
///     println!("object {}: {:?}", event.cookie, event.entry.map(|entry| entry[1]));
/// }
/// assert_eq!(events.try_next()?, None);
/// // The port's events count up another file.
/// events.subscribe_eventfd(None, &[9], &eventfd)?;
/// # Ok(()) }
/// ```
#[doc(alias = "mlx5dv_devx_event_channel")]
#[derive(Debug)]
pub struct DevxEvents {
    file: Arc<File>,
    fd: OwnedFd,
    data: DevxEventData,
}

/// Fails when the device of an empty file is gone, which a non-blocking read does not tell (`devx_async_event_read`,
/// `devx_async_cmd_event_read`): it answers `EAGAIN`, and the file polls as readable and hung up.
pub(super) fn check_device(verb: &'static str, fd: BorrowedFd<'_>) -> Result<()> {
    let hung_up = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
    let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::RDHUP)];
    poll(&mut fds, Some(&Timespec::default())).map_err(|errno| Error::new(verb, errno))?;
    if fds[0].revents().intersects(hung_up) {
        return Err(Error::from_kernel(verb, Errno::IO));
    }
    Ok(())
}

impl DevxEvents {
    /// Creates a channel. Dropping it ends its subscriptions, unless a forked child or a duplicate has the file, too.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` on a device of another driver and without DEVX; `EMFILE` or `ENFILE` when the process or the system has no
    /// file left.
    #[doc(alias = "mlx5dv_devx_create_event_channel")]
    #[doc(alias = "mlx5dv_devx_destroy_event_channel")]
    pub fn create(context: &Context, data: DevxEventData) -> Result<DevxEvents> {
        const VERB: &str = "devx_create_event_channel";
        let file = file_of(VERB, context)?.clone();
        let omits = match data {
            DevxEventData::Entry => flags::empty(),
            DevxEventData::Omitted => flags::MLX5_IB_UAPI_DEVX_CR_EV_CH_FLAGS_OMIT_DATA,
        };
        let fd = create_devx_event_file(&*file.kernel, omits.bits());
        let fd = fd.map_err(|errno| {
            let name = file.device.name();
            Error::from_kernel(VERB, errno).context(|| format!("no file of events of {name}"))
        })?;
        set_nonblocking(fd.as_fd(), true).map_err(|errno| Error::new(VERB, errno))?;
        Ok(DevxEvents { file, fd, data })
    }

    /// Subscribes to events of these types, at most 16: of an object, or with `None` of none, such as the port's. Each
    /// arrives with `cookie`. The subscription ends with the object or the channel.
    ///
    /// # Errors
    ///
    /// `EINVAL` for no type or more than 16, for a type that objects or their absence do not have, and for an object of
    /// another context.
    #[doc(alias = "mlx5dv_devx_subscribe_devx_event")]
    pub fn subscribe(&self, object: Option<&DevxObject>, types: &[u16], cookie: u64) -> Result<()> {
        self.add("devx_subscribe_event", object, types, |command| {
            command.u64(uapi::MLX5_IB_ATTR_DEVX_SUBSCRIBE_EVENT_COOKIE, cookie);
        })
    }

    /// As [`subscribe`](Self::subscribe), but each event adds 1 to `eventfd`, and does not arrive here. The subscription
    /// ends with the channel, or with the object, too.
    ///
    /// # Errors
    ///
    /// As there; `EINVAL` for a file that is no eventfd.
    #[doc(alias = "mlx5dv_devx_subscribe_devx_event_fd")]
    pub fn subscribe_eventfd(
        &self,
        object: Option<&DevxObject>,
        types: &[u16],
        eventfd: impl AsFd,
    ) -> Result<()> {
        const VERB: &str = "devx_subscribe_event_fd";
        let number = eventfd.as_fd().as_raw_fd();
        // Linux 6.1 dereferences a null pointer on its way back from the refusal of another file. Without procfs the kernel
        // alone decides.
        let name = std::fs::read_link(format!("/proc/self/fd/{number}"));
        if let Some(other) = name.ok().filter(|name| name.as_os_str() != EVENTFD) {
            let detail = format!("the file {number}, {}, is no eventfd", other.display());
            return Err(Error::invalid(VERB, detail));
        }
        self.add(VERB, object, types, |command| {
            command.u32(uapi::MLX5_IB_ATTR_DEVX_SUBSCRIBE_EVENT_FD_NUM, number as u32);
        })
    }

    fn add(
        &self,
        verb: &'static str,
        object: Option<&DevxObject>,
        types: &[u16],
        end: impl FnOnce(&mut Command<'_>),
    ) -> Result<()> {
        if let Some(object) = object {
            self.file.check_same(verb, "object", &object.target().0.file)?;
        }
        let mut command =
            Command::new(MLX5_IB_OBJECT_DEVX, uapi::MLX5_IB_METHOD_DEVX_SUBSCRIBE_EVENT);
        command
            .fd(uapi::MLX5_IB_ATTR_DEVX_SUBSCRIBE_EVENT_FD_HANDLE, self.fd.as_fd())
            .handle_if(
                uapi::MLX5_IB_ATTR_DEVX_SUBSCRIBE_EVENT_OBJ_HANDLE,
                object.map(DevxObject::handle),
            )
            .input(uapi::MLX5_IB_ATTR_DEVX_SUBSCRIBE_EVENT_TYPE_NUM_LIST, types);
        end(&mut command);
        self.file.execute(verb, &mut command).map_err(|error| {
            let of = if object.is_some() { "of an object" } else { "of no object" };
            error
                .context(|| format!("events {of} of types {types:?}; 1 to 16 can be subscribed to"))
        })
    }

    /// Reads the next event; `None` if there is none at the moment.
    ///
    /// # Errors
    ///
    /// `EOVERFLOW` once after events were lost because the system is out of memory; `EIO` when the device is gone.
    #[doc(alias = "mlx5dv_devx_get_event")]
    pub fn try_next(&self) -> Result<Option<DevxEvent>> {
        self.file.check_fork(GET)?;
        let mut cookie = [0; HEADER];
        let mut record = [0; HEADER + EQE];
        let read = match self.data {
            DevxEventData::Omitted => read_record(GET, self.fd.as_fd(), &mut cookie)?,
            DevxEventData::Entry => read_record(GET, self.fd.as_fd(), &mut record)?,
        };
        let entry = match (read, self.data) {
            (Read::Empty, _) => return check_device(GET, self.fd.as_fd()).map(|()| None),
            (Read::Record, DevxEventData::Omitted) => None,
            (Read::Record, DevxEventData::Entry) => {
                let mut entry = [0; EQE];
                cookie.copy_from_slice(&record[..HEADER]);
                entry.copy_from_slice(&record[HEADER..]);
                Some(entry)
            }
        };
        Ok(Some(DevxEvent { cookie: u64::from_ne_bytes(cookie), entry }))
    }

    /// Waits for an event, at most for `timeout`, for ever without one. `None` after the timeout.
    ///
    /// # Errors
    ///
    /// As [`try_next`](Self::try_next).
    #[doc(alias = "mlx5dv_devx_get_event")]
    pub fn wait(&self, timeout: Option<Duration>) -> Result<Option<DevxEvent>> {
        let platform = self.file.kernel.platform();
        wait_readable(GET, &platform, self.fd.as_fd(), timeout, || self.try_next())
    }
}

impl AsFd for DevxEvents {
    /// The file, which is readable when there is an event.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
