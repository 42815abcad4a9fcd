//! An open device. Pairs with the DEVICE object of `core/uverbs_std_types_device.c`.

use crate::device::{Device, absence, devices};
use crate::device_attr::DeviceAttr;
use crate::error::{Error, Result};
use crate::events::file::EventFile;
use crate::events::keys::Keys;
use crate::file::{File, FileFacts, random};
use crate::port::PortState;
use crate::provider::{self, Opening};
use crate::sync::fork::Epoch;
use crate::uverbs::command::Command;
use crate::uverbs::fd::{UverbsFd, create_async_event_file};
use crate::uverbs::kernel::Kernel;
use crate::uverbs::open_file::OpenFile;
use rustix::fs::OFlags;
use rustix::io::{Errno, FdFlags};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use uverbs_uapi::context::{
    UVERBS_ATTR_GET_CONTEXT_CORE_SUPPORT, UVERBS_ATTR_GET_CONTEXT_NUM_COMP_VECTORS,
};
use uverbs_uapi::device::UVERBS_METHOD_GET_CONTEXT;
use uverbs_uapi::object::UVERBS_OBJECT_DEVICE;

const OPEN_FIRST: &str = "open_first";

/// An open device. All other objects are made from it.
///
/// A cheap handle to shared state; clones name the same kernel file. Everything made from a
/// context keeps it open, so handles may be dropped in any order. All methods may be called from
/// any thread.
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let context = uverbs::Context::open_first()?;
/// let pd = context.alloc_pd()?;
/// # drop(pd); Ok(()) }
/// ```
///
/// A context on an open file, and a second context on the same file:
///
/// ```no_run
/// # fn f(fd: std::os::fd::OwnedFd) -> uverbs::Result<()> {
/// use uverbs::Context;
///
/// let given = Context::from_fd(fd)?;
/// let twin = given.reimport()?;
/// # drop(twin); Ok(()) }
/// ```
#[doc(alias = "ibv_context")]
#[derive(Clone, Debug)]
pub struct Context {
    pub(crate) file: Arc<File>,
}

impl Context {
    /// Opens a device: one of the [list](crate::devices), or by its [name](Device::by_name) or
    /// [path](Device::by_path).
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` if no provider of this library drives the device (the message names its
    /// driver) or the kernel is older than Linux 5.6 (all of the library needs 5.10), `EACCES` without permission for
    /// the device node,
    /// `ENODEV` or `EIO` if it vanished, `EPERM` if it belongs to another network namespace.
    #[doc(alias = "ibv_open_device")]
    #[doc(alias = "ibv_close_device")]
    pub fn open(device: &Device) -> Result<Context> {
        const VERB: &str = "open_device";
        let opening = provider::open(device)?;
        let epoch = Epoch::of_verb(VERB)?;
        let file = device.open_node(epoch)?;
        let kernel = UverbsFd::new(file, opening.driver(), epoch);
        Context::on(Box::new(kernel), device.clone(), opening, epoch)
    }

    /// Opens the first device that opens and has an active port.
    ///
    /// # Errors
    ///
    /// `ENODEV` if there is no device; the message is that of [`absence`](crate::device::absence()). If
    /// there are some, the errno of the first, and a message with each device's reason; a device without
    /// an active port counts as `ENETDOWN`.
    pub fn open_first() -> Result<Context> {
        let devices = devices().map_err(|error| error.in_verb(OPEN_FIRST))?;
        if devices.is_empty() {
            return Err(Error::new(OPEN_FIRST, Errno::NODEV)
                .detail(format!("there is no RDMA device: {}", absence())));
        }
        Context::open_first_of(devices, |_, _| {})
    }

    /// Opens the first of these devices that opens and has an active port; `skipped` is called with
    /// each device before it that does not, and the reason.
    ///
    /// # Errors
    ///
    /// As [`open_first`](Self::open_first); `ENODEV` for no devices.
    pub fn open_first_of(
        devices: impl IntoIterator<Item = Device>,
        skipped: impl FnMut(&Device, &Error),
    ) -> Result<Context> {
        first_of(devices, |device| Context::open(device)?.with_active_port(), skipped)
    }

    fn with_active_port(self) -> Result<Context> {
        let ports = self.device().port_count();
        let mut states = Vec::new();
        for port in 1..=ports {
            match self.query_port(port)?.state {
                PortState::ACTIVE | PortState::ACTIVE_DEFER => return Ok(self),
                state => states.push(format!("port {port} is {state}")),
            }
        }
        Err(Error::new(OPEN_FIRST, Errno::NETDOWN).detail(format!(
            "{}; set the network interface up, or see the cable and the subnet manager",
            states.join(", ")
        )))
    }

    /// Makes a context on an open file of a device's node that has no context yet. A supervisor opens
    /// the node for a process that cannot, and passes the file over a Unix socket or by inheritance.
    /// [`import`](Self::import) takes a file that has a context.
    ///
    /// The context owns the file, closes it, and marks it to be closed on exec. Neither netlink nor sysfs
    /// is needed; without both the device is not [described](Device::is_described).
    ///
    /// # Errors
    ///
    /// `EINVAL` if the file is no character device, is not open for reading and writing, or has a context;
    /// `ENODEV` if it is of another kind of device; `EOPNOTSUPP` if no provider of this library drives it;
    /// `EIO` if the device is gone. The file is closed after each of these, too.
    pub fn from_fd(fd: OwnedFd) -> Result<Context> {
        const VERB: &str = "open_device";
        let device = Device::of_file(VERB, fd.as_fd())?;
        let opening = provider::open(&device)?;
        let kernel_error = |errno| Error::from_kernel(VERB, errno);
        let mode = rustix::fs::fcntl_getfl(&fd).map_err(kernel_error)?;
        if !mode.contains(OFlags::RDWR) {
            return Err(Error::invalid(
                VERB,
                format!("the file of {device} is not open for reading and writing (O_RDWR)"),
            ));
        }
        rustix::io::fcntl_setfd(&fd, FdFlags::CLOEXEC).map_err(kernel_error)?;
        let epoch = Epoch::of_verb(VERB)?;
        let kernel = UverbsFd::new(OpenFile::of_fd(fd, epoch), opening.driver(), epoch);
        Context::on(Box::new(kernel), device, opening, epoch)
    }

    /// Establishes a context on an open file.
    pub(crate) fn on(
        kernel: Box<dyn Kernel>,
        device: Device,
        mut opening: Box<dyn Opening>,
        epoch: Epoch,
    ) -> Result<Context> {
        const VERB: &str = "open_device";
        let mut completion_vectors = 0u32;
        let mut support = 0u64;
        loop {
            let mut command = Command::new(UVERBS_OBJECT_DEVICE, UVERBS_METHOD_GET_CONTEXT);
            command
                .optional_output(UVERBS_ATTR_GET_CONTEXT_NUM_COMP_VECTORS, &mut completion_vectors)
                .optional_output(UVERBS_ATTR_GET_CONTEXT_CORE_SUPPORT, &mut support);
            opening.request(&mut command);
            let established = kernel.execute(&mut command);
            match established {
                Ok(()) => break,
                Err(_) if opening.retreat() => {}
                // An event file can be allocated only if the file has a context already, so the file
                // was not just opened but passed.
                Err(Errno::INVAL) if alloc_async_fd(&*kernel, VERB).is_ok() => {
                    return Err(Error::from_kernel(VERB, Errno::INVAL).detail(format!(
                        "the file of {device} has a context already; `Context::import` takes it"
                    )));
                }
                Err(errno) => return Err(without_method(Error::from_kernel(VERB, errno))),
            }
        }

        // The kernel makes a context without an event file.
        let events = alloc_async_fd(&*kernel, VERB)?;
        let provider = opening.finish(&*kernel)?;
        let [origin, secret] = random();
        let facts = FileFacts::new(origin.max(1), completion_vectors, support);
        let keys = Keys::new(secret);
        let mut file = File::new(kernel, device, provider, epoch, keys, events, facts);
        file.describe_device(VERB)?;
        Ok(Context { file: Arc::new(file) })
    }

    /// The device that this is a context of.
    pub fn device(&self) -> &Device {
        &self.file.device
    }

    /// Limits and capabilities of the device, asked of the kernel each time.
    ///
    /// # Errors
    ///
    /// `EIO` when the device is gone; [`Error::is_forked`].
    #[doc(alias = "ibv_query_device")]
    #[doc(alias = "ibv_query_device_ex")]
    pub fn query_device(&self) -> Result<DeviceAttr> {
        Ok(self.file.query_device("query_device")?.0)
    }

    /// The number of completion vectors (interrupts) that completion queues may choose from.
    #[doc(alias = "num_comp_vectors")]
    pub fn completion_vectors(&self) -> u32 {
        self.file.completion_vectors
    }

    /// The number of objects of this context that could not be destroyed when they were dropped: 0 unless
    /// the kernel refused, for one because another holder of the file still uses them.
    ///
    /// Their memory is not freed before the process ends, because a device may still reach it. The same
    /// holds for what a memory window [holds](crate::MemoryWindow#what-a-window-holds), which counts as one
    /// with it.
    pub fn leaked(&self) -> u64 {
        self.file.leaked.load(Ordering::Relaxed)
    }
}

impl AsFd for Context {
    /// The command file. A process that has a duplicate can use and destroy every object of the
    /// context.
    ///
    /// A command names addresses of this process, which the kernel reads and writes. Code that writes commands to
    /// the file without the library can change any memory by them, and Rust considers `write(2)` safe: pass the file
    /// only to code that is trusted with that, as for [`share`](Context::share).
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.mark_shared();
        self.file.kernel.fd()
    }
}

/// The first device that `open` opens. If none opens, the error has the reason of each.
fn first_of<T>(
    devices: impl IntoIterator<Item = Device>,
    mut open: impl FnMut(&Device) -> Result<T>,
    mut skipped: impl FnMut(&Device, &Error),
) -> Result<T> {
    let (mut first, mut reasons) = (None, Vec::new());
    for device in devices {
        let error = match open(&device) {
            Ok(opened) => return Ok(opened),
            Err(error) => error,
        };
        skipped(&device, &error);
        reasons.push(match error.message() {
            "" => format!("{device}: {}", error.errno()),
            message => format!("{device}: {message}"),
        });
        first.get_or_insert(error.errno());
    }
    let detail = match reasons.is_empty() {
        true => "no device was given".into(),
        false => format!("no device opens and has an active port: {}", reasons.join("; ")),
    };
    Err(Error::new(OPEN_FIRST, first.unwrap_or(Errno::NODEV)).detail(detail))
}

/// Explains that the kernel has no method for contexts or their events: it came with Linux 5.6. Queue pairs
/// came to ioctls with 5.8, tables of GIDs with 5.10.
fn without_method(error: Error) -> Error {
    match error.kernel_errno() {
        Some(Errno::PROTONOSUPPORT | Errno::NOTTY) => error.detail(
            "this kernel makes no contexts by ioctl: Linux 5.10 or later is needed (`uname -r` tells)",
        ),
        _ => error.context(|| "the kernel makes no context of the open device".into()),
    }
}

pub(crate) fn alloc_async_fd(kernel: &dyn Kernel, verb: &'static str) -> Result<EventFile> {
    let made = create_async_event_file(kernel);
    made.map(EventFile::new).map_err(|errno| without_method(Error::from_kernel(verb, errno)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::DriverId;

    fn planted() -> Vec<Device> {
        ["rxe0", "rxe1", "rxe2"].map(|name| Device::planted(name, DriverId::RXE, 1)).into()
    }

    #[test]
    #[cfg(not(loom))]
    fn any_active_port_is_enough_and_without_one_each_says_its_state() {
        use crate::uverbs::scripted::{Script, ScriptedPort};
        let open = |states: [PortState; 2]| {
            let script = Script::new();
            script
                .set_ports(&states.map(|state| ScriptedPort { state, ..ScriptedPort::INFINIBAND }));
            script.open("rxe0").with_active_port()
        };
        open([PortState::DOWN, PortState::ACTIVE]).unwrap();
        let error = open([PortState::DOWN, PortState::INIT]).unwrap_err();
        assert_eq!(error.errno(), Errno::NETDOWN);
        assert!(error.message().starts_with("port 1 is down, port 2 is init; "), "{error}");
    }

    #[test]
    #[cfg_attr(miri, ignore = "it reads directories")]
    fn devices_that_do_not_open_are_skipped_with_their_reasons() {
        let mut skipped = Vec::new();
        let open = |device: &Device| match device.name() {
            "rxe1" => Ok(device.name().to_owned()),
            _ => Err(Error::new("open_device", Errno::ACCESS).detail("mode 0600")),
        };
        let opened = first_of(planted(), open, |device, error| {
            skipped.push((device.name().to_owned(), error.errno()));
        });
        assert_eq!(opened.unwrap(), "rxe1");
        assert_eq!(skipped, [("rxe0".to_owned(), Errno::ACCESS)]);
    }

    #[test]
    #[cfg_attr(miri, ignore = "it reads directories")]
    fn if_no_device_opens_the_error_has_all_reasons() {
        let open = |device: &Device| -> Result<()> {
            Err(match device.name() {
                "rxe0" => Error::new("open_device", Errno::ACCESS).detail("mode 0600"),
                "rxe1" => Error::new(OPEN_FIRST, Errno::NETDOWN).detail("port 1 is down"),
                _ => Error::new("open_device", Errno::PERM),
            })
        };
        let error = first_of(planted(), open, |_, _| {}).unwrap_err();
        assert_eq!(error.errno(), Errno::ACCESS);
        for reason in ["rxe0 (rxe): mode 0600", "rxe1 (rxe): port 1 is down", "rxe2 (rxe): "] {
            assert!(error.message().contains(reason), "{error}");
        }
        let none = first_of([], open, |_, _| {}).unwrap_err();
        assert_eq!(none.errno(), Errno::NODEV);
    }
}
