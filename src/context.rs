//! An open device. Pairs with the DEVICE object of `core/uverbs_std_types_device.c`.

use crate::device::Device;
use crate::device_attr::DeviceAttr;
use crate::error::{Error, Result};
use crate::events::file::EventFile;
use crate::events::keys::Keys;
use crate::file::{File, FileFacts, random};
use crate::memory::fork::Epoch;
use crate::pd::ProtectionDomain;
use crate::provider::Opening;
use crate::uverbs::command::Command;
use crate::uverbs::fd::UverbsFd;
use crate::uverbs::kernel::Kernel;
use rustix::io::Errno;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use uverbs_uapi::async_event::{
    UVERBS_ATTR_ASYNC_EVENT_ALLOC_FD_HANDLE, UVERBS_METHOD_ASYNC_EVENT_ALLOC,
};
use uverbs_uapi::context::{
    UVERBS_ATTR_GET_CONTEXT_CORE_SUPPORT, UVERBS_ATTR_GET_CONTEXT_NUM_COMP_VECTORS,
};
use uverbs_uapi::device::UVERBS_METHOD_GET_CONTEXT;
use uverbs_uapi::object::{UVERBS_OBJECT_ASYNC_EVENT, UVERBS_OBJECT_DEVICE};

/// An open device: what everything else is made from.
///
/// A cheap handle to shared state; clones name the same kernel file. Everything made from a
/// context keeps it open, so handles may be dropped in any order. All methods may be called from
/// any thread.
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let device = uverbs::devices()?.into_iter().find(|device| device.is_supported()).ok_or("none")?;
/// let context = uverbs::Context::open(&device)?;
/// let pd = context.alloc_pd()?;
/// # drop(pd); Ok(()) }
/// ```
#[doc(alias = "ibv_context")]
#[derive(Clone, Debug)]
pub struct Context {
    pub(crate) file: Arc<File>,
}

impl Context {
    /// Opens a device.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` if no provider of this library drives the device (the message names its
    /// driver), `EACCES` without permission for the device node, `ENODEV` or `EIO` if it vanished,
    /// `EPERM` if it belongs to another network namespace.
    #[doc(alias = "ibv_open_device")]
    #[doc(alias = "ibv_close_device")]
    pub fn open(device: &Device) -> Result<Context> {
        const VERB: &str = "open_device";
        let opening = Opening::new(device)?;
        let fd = device.open_node()?;
        let epoch = Epoch::current().map_err(|errno| no_epoch(VERB, errno))?;
        let kernel = UverbsFd::new(fd, opening.driver(), epoch);
        Context::on(Box::new(kernel), device.clone(), opening, epoch)
    }

    /// Establishes a context on an open file.
    pub(crate) fn on(
        kernel: Box<dyn Kernel>,
        device: Device,
        mut opening: Opening,
        epoch: Epoch,
    ) -> Result<Context> {
        const VERB: &str = "open_device";
        let mut completion_vectors = 0u32;
        let mut support = 0u64;
        loop {
            let command = Command::new(UVERBS_OBJECT_DEVICE, UVERBS_METHOD_GET_CONTEXT)
                .optional_output(UVERBS_ATTR_GET_CONTEXT_NUM_COMP_VECTORS, &mut completion_vectors)
                .optional_output(UVERBS_ATTR_GET_CONTEXT_CORE_SUPPORT, &mut support);
            let established = kernel.execute(&mut opening.request(command));
            match established {
                Ok(()) => break,
                Err(_) if opening.retreat() => {}
                Err(errno) => return Err(Error::from_kernel(VERB, errno)),
            }
        }

        // The kernel makes a context without an event file.
        let events = alloc_async_fd(&*kernel, VERB)?;
        let provider = opening.finish(&*kernel)?;
        let [origin, secret] = random();
        let facts = FileFacts::new(origin.max(1), completion_vectors, support);
        let keys = Keys::new(secret);
        let file = File::new(kernel, device, provider, epoch, keys, events, facts);
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

    /// How many completion vectors (interrupts) completion queues may choose from.
    #[doc(alias = "num_comp_vectors")]
    pub fn completion_vectors(&self) -> u32 {
        self.file.completion_vectors
    }

    /// Allocates a protection domain: what queue pairs and memory must share to work together.
    ///
    /// # Errors
    ///
    /// `ENOMEM`, or `EAGAIN` where an RDMA cgroup limit is reached.
    #[doc(alias = "ibv_alloc_pd")]
    pub fn alloc_pd(&self) -> Result<ProtectionDomain> {
        ProtectionDomain::alloc(self)
    }

    /// How many objects of this context could not be destroyed when they were dropped: 0 unless the kernel
    /// refused, for one because another holder of the file still uses them.
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
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.mark_shared();
        self.file.kernel.fd()
    }
}

pub(crate) fn alloc_async_fd(kernel: &dyn Kernel, verb: &'static str) -> Result<EventFile> {
    let mut command = Command::new(UVERBS_OBJECT_ASYNC_EVENT, UVERBS_METHOD_ASYNC_EVENT_ALLOC)
        .new_fd(UVERBS_ATTR_ASYNC_EVENT_ALLOC_FD_HANDLE);
    kernel.execute(&mut command).map_err(|errno| Error::from_kernel(verb, errno))?;
    command
        .take_fd(UVERBS_ATTR_ASYNC_EVENT_ALLOC_FD_HANDLE)
        .map(EventFile::new)
        .ok_or_else(|| Error::new(verb, Errno::BADF).detail("the kernel gave no event file"))
}

pub(crate) fn no_epoch(verb: &'static str, errno: Errno) -> Error {
    Error::new(verb, errno).detail("the kernel cannot mark a page MADV_WIPEONFORK (Linux 4.14)")
}
