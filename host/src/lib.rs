//! The seam between the library and the kernel that it speaks to.
//!
//! A program on `uverbs` speaks to Linux: it opens a device's node, issues ioctls and writes, maps pages and
//! waits for descriptors. A *hosted kernel* stands for Linux in the program's own process. It speaks the same
//! ABI, byte for byte: the library's own encoder of commands runs against it.
//!
//! | Linux | here |
//! |---|---|
//! | an open `/dev/infiniband/uverbsN` or `rdma_cm` | [`HostFile`] |
//! | RDMA netlink, sysfs, the routing table | [`HostDevice`], [`HostInterface`] |
//! | `poll(2)`, `CLOCK_MONOTONIC` | [`HostSystem::wait`], [`HostSystem::now`] |
//! | pages of a mapping | [`HostPages`] |
//! | a device that snoops its registers | [`HostFile::rung`] |
//!
//! **Unstable**: these traits change with the library, in any release.

use rustix::event::{PollFd, Timespec};
use rustix::io::Errno;
use std::any::Any;
use std::ffi::c_void;
use std::fmt::Debug;
use std::net::IpAddr;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::time::Instant;

/// An open file of a hosted kernel.
///
/// Dropping the last handle closes the file, as `close(2)` does. In a forked child the library calls nothing and drops
/// no handle: the child has copies of the kernel's memory, and of its locks in any state.
///
/// # Safety
///
/// [`ioctl`](Self::ioctl) and [`write`](Self::write) write only to ranges that the command names for the kernel to
/// write, and to memory that commands of this file have registered or lent to a device, for as long as it stays so.
/// [`map`](Self::map) returns pages that nothing else in the process refers to, except by single loads and
/// stores or as an atomic.
pub unsafe trait HostFile: Debug + Send + Sync + UnwindSafe + RefUnwindSafe {
    /// `ioctl(2)`. `request` is the number of the request, `argument` its message.
    ///
    /// # Errors
    ///
    /// The kernel's.
    ///
    /// # Safety
    ///
    /// `argument` is a message as the kernel's ABI lays it out for the request, readable and writable; the
    /// ranges that it names are readable or writable as the command demands, and stay so for as long as the
    /// command lends them.
    unsafe fn ioctl(&self, request: u32, argument: *mut c_void) -> Result<(), Errno>;

    /// `write(2)`. Returns how many bytes were taken.
    ///
    /// # Errors
    ///
    /// The kernel's.
    ///
    /// # Safety
    ///
    /// The ranges that the command names are readable or writable as it demands.
    unsafe fn write(&self, bytes: &[u8]) -> Result<usize, Errno>;

    /// `mmap(2)`, shared, readable, and writable unless `read_only`.
    ///
    /// # Errors
    ///
    /// The kernel's.
    fn map(&self, offset: u64, length: usize, read_only: bool) -> Result<HostPages, Errno>;

    /// A descriptor of the file, for event loops and for [`HostSystem::adopt`]. The descriptor of a connection manager
    /// is readable while an event is pending.
    fn fd(&self) -> BorrowedFd<'_>;

    /// The system that the file belongs to.
    fn system(&self) -> Arc<dyn HostSystem>;

    /// Called after `bytes` were stored at byte `at` of the pages that were mapped at `offset`: a doorbell, or
    /// one word of two, four or eight bytes. A device in the process does not see the store itself. The library writes
    /// doorbell records before, and keeps a shared register locked until the call returns; the implementation must not
    /// call the library.
    fn rung(&self, offset: u64, at: usize, bytes: &[u8]);

    /// Called before a word of the pages that were mapped at `offset` is loaded, unless the pages are memory: the
    /// kernel brings the clock in them up to date.
    fn looked_at(&self, offset: u64) {
        let _ = offset;
    }

    /// Called by polls of completion queues if [`polls`](Self::polls) is true.
    fn polled(&self) {}

    /// Whether polls of completion queues call [`polled`](Self::polled): the device runs only when it is polled, waited
    /// for or stepped, or lets other threads of the program run meanwhile.
    fn polls(&self) -> bool {
        false
    }
}

/// The facts about a device that RDMA netlink and sysfs report.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct HostDevice {
    /// The name, for example "mlx5_0".
    pub name: String,
    /// The kernel's number of the device.
    pub index: u32,
    /// The name of the uverbs node, for example "uverbs0".
    pub node: String,
    /// Major and minor number of the node.
    pub number: (u32, u32),
    /// Version of the driver's part of the ABI.
    pub abi: u32,
    /// The driver, as `enum rdma_driver_id` numbers it.
    pub driver: u32,
    /// The node type, as `enum rdma_node_type` numbers it.
    pub node_type: u8,
    /// The GUID of the node, as a number.
    pub node_guid: u64,
    /// The GUID of the system image, as a number.
    pub sys_image_guid: u64,
    /// The firmware's version.
    pub firmware: String,
    /// The wire protocol of the first port: "roce" or "ib".
    pub protocol: String,
    /// The network interface behind each port, port 1 first.
    pub interfaces: Vec<Option<String>>,
    /// The partition keys of each port, port 1 first.
    pub pkeys: Vec<Vec<u16>>,
}

/// A network interface, with its addresses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct HostInterface {
    /// The number of the interface.
    pub index: u32,
    /// The name, for example "eth0".
    pub name: String,
    /// Its hardware address: a MAC of 6 bytes, or 20 bytes of IP over InfiniBand, which end with the port's GID.
    pub hardware: Vec<u8>,
    /// Its addresses.
    pub addresses: Vec<IpAddr>,
}

/// The system of a hosted kernel's files: the services of Linux beside files.
///
/// In a forked child it lists nothing, answers `ENODEV`, and waits for no lock of the parent's.
pub trait HostSystem: Debug + Send + Sync + UnwindSafe + RefUnwindSafe {
    /// All devices, in the order of their creation.
    fn devices(&self) -> Vec<HostDevice>;

    /// Opens the uverbs node of the device with this [index](HostDevice::index).
    ///
    /// # Errors
    ///
    /// `ENODEV` if it is gone, or the kernel's.
    fn open(&self, index: u32) -> Result<Arc<dyn HostFile>, Errno>;

    /// Opens the connection manager.
    ///
    /// # Errors
    ///
    /// `ENODEV` if there is none, or the kernel's.
    fn open_rdma_cm(&self) -> Result<Arc<dyn HostFile>, Errno>;

    /// Takes over a descriptor that is a duplicate of [`HostFile::fd`]: the same open file.
    ///
    /// # Errors
    ///
    /// The descriptor, if it is any other.
    fn adopt(&self, fd: OwnedFd) -> Result<Arc<dyn HostFile>, OwnedFd>;

    /// The index of the device of the open file behind a descriptor; `None` for a file of something else.
    ///
    /// # Errors
    ///
    /// `ENOTTY` for a file of the connection manager.
    fn device_of(&self, fd: BorrowedFd<'_>) -> Result<Option<u32>, Errno>;

    /// The number of objects of each kind on a device, in the whole kernel: the kind as RDMA netlink spells
    /// it ("pd", "cq", "qp", "cm_id", "mr", "ctx", "srq"), and the number.
    ///
    /// # Errors
    ///
    /// `ENODEV` if the device is gone.
    fn resources(&self, index: u32) -> Result<Vec<(String, u64)>, Errno>;

    /// The network interfaces, with their addresses.
    fn interfaces(&self) -> Vec<HostInterface>;

    /// The address from which packets to `peer` come, by the routing table. `interface` is where a link-local
    /// peer is, or 0.
    ///
    /// # Errors
    ///
    /// `ENETUNREACH` if there is no route.
    fn source_for(&self, peer: IpAddr, interface: u32) -> Result<IpAddr, Errno>;

    /// The time. A system with a clock of its own may be ahead of the machine's.
    fn now(&self) -> Instant;

    /// A random number for what the wire shows, as a queue pair's first PSN. A system whose runs repeat draws it from
    /// its seed; `None` leaves it to the machine.
    fn random(&self) -> Option<u64> {
        None
    }

    /// `poll(2)`: waits until a descriptor is ready or the deadline has come, and returns how many are ready.
    /// A system that is stepped runs meanwhile, in this call.
    ///
    /// # Errors
    ///
    /// The kernel's; `EDEADLK` if nothing can ever end the wait.
    fn wait(&self, fds: &mut [PollFd<'_>], deadline: Option<Instant>) -> Result<usize, Errno>;
}

/// `poll(2)` until a descriptor is ready or the machine's clock says `deadline`: [`HostSystem::wait`] of a system that
/// has no clock of its own. A signal ends it early.
///
/// # Errors
///
/// The kernel's.
pub fn poll_until(fds: &mut [PollFd<'_>], deadline: Option<Instant>) -> Result<usize, Errno> {
    let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
    let left = left.and_then(|left| Timespec::try_from(left).ok());
    match rustix::event::poll(fds, left.as_ref()) {
        Err(Errno::INTR) => Ok(0),
        answer => answer,
    }
}

/// Pages that a hosted kernel shows. They stay until the last holder lets go of them.
#[derive(Clone, Debug)]
pub struct HostPages {
    start: NonNull<u8>,
    length: usize,
    _owner: Arc<dyn Owner>,
}

/// The owner of pages.
trait Owner: Any + Debug + Send + Sync + UnwindSafe + RefUnwindSafe {}
impl<T: Any + Debug + Send + Sync + UnwindSafe + RefUnwindSafe> Owner for T {}

// SAFETY: pages are plain memory, which any thread may reach by single loads and stores, and the owner is `Send`.
unsafe impl Send for HostPages {}
// SAFETY: `&HostPages` gives out no more than an address.
unsafe impl Sync for HostPages {}
impl UnwindSafe for HostPages {}
impl RefUnwindSafe for HostPages {}

impl HostPages {
    /// Pages of `length` bytes at `start`, which `owner` keeps.
    ///
    /// # Safety
    ///
    /// The range is readable and writable for as long as `owner` lives, and is reached only by single loads
    /// and stores or as an atomic.
    pub unsafe fn new(
        start: NonNull<u8>,
        length: usize,
        owner: Arc<impl Any + Debug + Send + Sync + UnwindSafe + RefUnwindSafe>,
    ) -> HostPages {
        HostPages { start, length, _owner: owner }
    }

    /// The first byte.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Bytes of all pages.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }
}

static INSTALLED: OnceLock<Arc<dyn HostSystem>> = OnceLock::new();

/// Makes a system the one that the whole process uses: devices are listed and opened there, and not by Linux.
/// For programs that were not written for it; a test gives its own system to each context instead.
///
/// # Errors
///
/// The system, if another one was installed before.
pub fn install(system: Arc<dyn HostSystem>) -> Result<(), Arc<dyn HostSystem>> {
    INSTALLED.set(system)
}

/// The system that was [installed](install).
pub fn installed() -> Option<&'static Arc<dyn HostSystem>> {
    INSTALLED.get()
}

/// The systems of this process whose files [`adopt`] finds.
static SYSTEMS: Mutex<Vec<Weak<dyn HostSystem>>> = Mutex::new(Vec::new());
/// The process that registered the last system, or 0. A lookup in any other process takes no lock: a child of `fork`
/// has a copy of it in any state.
static PROCESS: AtomicU32 = AtomicU32::new(0);

/// Has [`adopt`] find the files of a system, for as long as the system lives.
pub fn register(system: &Arc<dyn HostSystem>) {
    let mut systems = SYSTEMS.lock().unwrap_or_else(PoisonError::into_inner);
    systems.retain(|system| system.strong_count() > 0);
    systems.push(Arc::downgrade(system));
    PROCESS.store(std::process::id(), Ordering::Release);
}

/// The registered systems that are alive.
fn systems() -> impl Iterator<Item = Arc<dyn HostSystem>> {
    let process = PROCESS.load(Ordering::Acquire);
    let systems = match process != 0 && process == std::process::id() {
        true => SYSTEMS.lock().unwrap_or_else(PoisonError::into_inner).clone(),
        false => Vec::new(),
    };
    systems.into_iter().filter_map(|system| system.upgrade())
}

/// Takes over a descriptor of a hosted kernel's file.
///
/// # Errors
///
/// The descriptor, if it is of a file of Linux.
pub fn adopt(fd: OwnedFd) -> Result<Arc<dyn HostFile>, OwnedFd> {
    systems()
        .try_fold(fd, |fd, system| match system.adopt(fd) {
            Ok(file) => Err(file),
            Err(fd) => Ok(fd),
        })
        .map_or_else(Ok, Err)
}

/// The system and the index of the device behind a descriptor of a hosted kernel's file; `None` for a file of
/// Linux.
pub fn device_of(fd: BorrowedFd<'_>) -> Option<(Arc<dyn HostSystem>, Result<u32, Errno>)> {
    systems().find_map(|system| {
        let device = system.device_of(fd).transpose()?;
        Some((system, device))
    })
}
