//! Memory of the process: ranges that commands name by address, and pages that the program maps.
//!
//! Pairs with `copy_from_user`, `copy_to_user` and `alloc_page`. Beside [`file`](crate::file) this is the only
//! module with `unsafe`. DMA of the device goes through `uverbs_connectx::guest`.

use crate::call::is_capable;
use crate::events::{Inode, inode};
use crate::kernel::Lease;
use crate::world::World;
use rustix::fs::{
    MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, fstatfs, ftruncate,
    memfd_create,
};
use rustix::io::Errno;
use rustix::ioctl::{Getter, Opcode, ioctl};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use uverbs_connectx::guest::GuestMemory;
use uverbs_host::HostPages;
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// The memory that a command lends to the kernel while it runs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct User<'c>(PhantomData<&'c ()>);

impl User<'_> {
    /// # Safety
    ///
    /// As long as the value lives, the ranges that the command names are readable, and writable where the
    /// kernel writes.
    pub(crate) unsafe fn new() -> Self {
        User(PhantomData)
    }

    /// Reads a range that the command names.
    pub(crate) fn read(&self, address: u64, to: &mut [u8]) {
        let from = std::ptr::with_exposed_provenance::<u8>(address as usize);
        // SAFETY: the promise of `new`.
        unsafe { from.copy_to_nonoverlapping(to.as_mut_ptr(), to.len()) };
    }

    /// Writes a range that the command names.
    pub(crate) fn write(&self, address: u64, from: &[u8]) {
        let to = std::ptr::with_exposed_provenance_mut::<u8>(address as usize);
        // SAFETY: the promise of `new`.
        unsafe { to.copy_from_nonoverlapping(from.as_ptr(), from.len()) };
    }

    /// Reads a struct.
    pub(crate) fn load<T: FromBytes + IntoBytes>(&self, address: u64) -> T {
        let mut value = T::new_zeroed();
        self.read(address, value.as_mut_bytes());
        value
    }

    /// Writes a struct.
    pub(crate) fn store<T: IntoBytes + Immutable>(&self, address: u64, value: &T) {
        self.write(address, value.as_bytes());
    }

    /// Pins the pages of a range for a device, which writes to it if `writable`.
    fn pin(&self, start: u64, length: u64, writable: bool) -> Result<(), Errno> {
        // Linux 5.14 and later; Miri has no such call, and only mapped memory.
        use rustix::mm::{Advice, madvise};
        let page = page_size();
        let first = start & !(page - 1);
        let end = start.checked_add(length).ok_or(Errno::INVAL)?.next_multiple_of(page);
        let advice = if writable { Advice::LinuxPopulateWrite } else { Advice::LinuxPopulateRead };
        let range = std::ptr::with_exposed_provenance_mut::<c_void>(first as usize);
        if cfg!(miri) || first == end {
            return Ok(());
        }
        // SAFETY: populating pages changes no memory of the program.
        match unsafe { madvise(range, (end - first) as usize, advice) } {
            Ok(()) => Ok(()),
            // Not mapped so that it may be written, or registers; or a kernel that has no such call.
            Err(Errno::INVAL) if !can_populate() => Ok(()),
            // Unmapped.
            Err(Errno::NOMEM | Errno::FAULT | Errno::ACCESS | Errno::INVAL) => Err(Errno::FAULT),
            Err(errno) => Err(errno),
        }
    }

    /// Lends a range that the command names to a device, which writes to it if `writable`.
    ///
    /// # Errors
    ///
    /// Those of `ib_umem_get`: `EINVAL` if the range is empty or has more than 2^32 - 1 pages, `EFAULT` unless all of
    /// it is mapped that way, `ENOMEM` if the process may not lock as much, and `EPERM` if it may lock nothing.
    pub(crate) fn lend(
        &self,
        memory: &mut GuestMemory,
        pinned: &mut Pinned,
        lent: &mut Lent,
        (start, length, writable): (u64, u64, bool),
    ) -> Result<(), Errno> {
        let end = start.checked_add(length).ok_or(Errno::INVAL)?;
        if length == 0 || end.checked_next_multiple_of(page_size()).is_none() {
            return Err(Errno::INVAL);
        }
        // More pages than `ib_umem_get` counts.
        if Pinned::pages(start, length) > u64::from(u32::MAX) {
            return Err(Errno::INVAL);
        }
        pinned.add(start, length)?;
        let mut lend = || {
            self.pin(start, length, writable)?;
            // SAFETY: `HostFile::ioctl` demands that ranges stay as long as the command lends them: until the
            // object is destroyed, when they are given back.
            unsafe { memory.pin(start, length, writable) }.map_err(|_| Errno::FAULT)
        };
        match lend() {
            Ok(()) => lent.ranges.push((start, length, writable)),
            Err(errno) => {
                pinned.remove(start, length);
                return Err(errno);
            }
        }
        Ok(())
    }

    /// The inode behind a descriptor that the command names; `None` if it is not open.
    pub(crate) fn inode(&self, fd: RawFd) -> Option<Inode> {
        if fd < 0 {
            return None;
        }
        // SAFETY: the command names the descriptor, which its caller borrows meanwhile.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        inode(&fd).ok()
    }

    /// A duplicate of a descriptor that the command names, closed on exec; `None` if it is not open.
    pub(crate) fn duplicate(&self, fd: RawFd) -> Option<OwnedFd> {
        if fd < 0 {
            return None;
        }
        // SAFETY: the command names the descriptor, which its caller borrows meanwhile.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        rustix::io::fcntl_dupfd_cloexec(fd, 3).ok()
    }
}

/// The memory of what a socket sent and its peer has not read: `SIOCOUTQ`, which counts the system's own bytes of each
/// message.
pub(crate) fn unread_memory(socket: &impl AsFd) -> usize {
    const SIOCOUTQ: Opcode = nix::libc::TIOCOUTQ as Opcode;
    // Miri has no such request: then nothing is known to be unread.
    if cfg!(miri) {
        return 0;
    }
    // SAFETY: the request writes an `int`.
    let request = unsafe { Getter::<SIOCOUTQ, std::ffi::c_int>::new() };
    // SAFETY: as above, and it changes nothing.
    let bytes = unsafe { ioctl(socket, request) };
    bytes.ok().and_then(|bytes| bytes.try_into().ok()).unwrap_or(0)
}

/// Ranges of the process that a device may access, until they are [given back](Self::give_back).
#[derive(Debug, Default)]
#[must_use]
pub(crate) struct Lent {
    ranges: Vec<(u64, u64, bool)>,
    /// A part of a dma-buf, which the device may access as well.
    buffer: Option<(DmaBuf, u64, u64)>,
}

impl Lent {
    /// The ranges: where they begin, their bytes, and whether the device writes.
    pub(crate) fn ranges(&self) -> &[(u64, u64, bool)] {
        &self.ranges
    }

    /// Takes the ranges from the device.
    pub(crate) fn give_back(self, memory: &mut GuestMemory, pinned: &mut Pinned) {
        for (start, length, writable) in self.ranges {
            let _ = memory.unpin(start, length, writable);
            pinned.remove(start, length);
        }
        if let Some((_buffer, start, length)) = self.buffer {
            let _ = memory.unpin(start, length, true);
        }
    }
}

/// The name of files in memory that stand for dma-bufs.
const STAND_IN: &str = "uverbs-sim:dma-buf";

/// A file that the kernel of every fabric takes for a dma-buf of `length` bytes: memory of another device of this
/// process. The program may map it, read and write it.
///
/// ```
/// let gpu = uverbs_sim::dma_buf(1 << 16)?;
/// assert_eq!(std::fs::File::from(gpu).metadata()?.len(), 1 << 16);
/// # std::io::Result::Ok(())
/// ```
///
/// # Errors
///
/// There is no memory, or the process has too many open files.
pub fn dma_buf(length: usize) -> io::Result<OwnedFd> {
    let file = memfd_create(STAND_IN, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&file, length as u64)?;
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW)?;
    Ok(file)
}

/// A dma-buf that the kernel has mapped, so that devices of this process reach it.
#[derive(Debug)]
pub(crate) struct DmaBuf {
    start: NonNull<c_void>,
    length: usize,
}

// SAFETY: a mapping, which this alone unmaps.
unsafe impl Send for DmaBuf {}

impl DmaBuf {
    /// Maps the dma-buf behind a file: one of Linux, or one that stands for it.
    ///
    /// # Errors
    ///
    /// `EINVAL` for another file, as `dma_buf_get`.
    pub(crate) fn map(file: &OwnedFd) -> Result<DmaBuf, Errno> {
        /// `DMA_BUF_MAGIC` of `linux/magic.h`.
        const MAGIC: u64 = 0x444d_4142;
        let is_of_linux = fstatfs(file).is_ok_and(|stat| stat.f_type as u64 == MAGIC);
        if !is_of_linux && !is_stand_in(file) {
            return Err(Errno::INVAL);
        }
        let length = usize::try_from(fstat(file)?.st_size).map_err(|_| Errno::INVAL)?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a mapping at an address of the system's choice; neither kind of file ever shrinks.
        let start = unsafe { mmap(null_mut(), length, access, MapFlags::SHARED, file, 0) }?;
        start.expose_provenance();
        let start = NonNull::new(start).ok_or(Errno::NOMEM)?;
        Ok(DmaBuf { start, length })
    }

    /// Lets a device access `length` bytes from byte `offset` on; returns their address there. The buffer counts as
    /// pinned by nobody: it is not the process's memory.
    ///
    /// # Errors
    ///
    /// `EINVAL` unless they are inside, as `ib_umem_dmabuf_get`.
    pub(crate) fn lend(
        self,
        memory: &mut GuestMemory,
        offset: u64,
        length: u64,
    ) -> Result<(u64, Lent), Errno> {
        let end = offset.checked_add(length).filter(|end| *end <= self.length as u64);
        if length == 0 || end.is_none() {
            return Err(Errno::INVAL);
        }
        let start = self.start.as_ptr().expose_provenance() as u64 + offset;
        // SAFETY: inside the mapping, which stays until the range is given back; programs share no reference to it.
        unsafe { memory.pin(start, length, true) }.map_err(|_| Errno::FAULT)?;
        Ok((start, Lent { ranges: Vec::new(), buffer: Some((self, start, length)) }))
    }
}

impl Drop for DmaBuf {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's, and no device has it any more.
        let _ = unsafe { munmap(self.start.as_ptr(), self.length) };
    }
}

/// Whether [`dma_buf`] made a file. Seals keep its length.
fn is_stand_in(file: &OwnedFd) -> bool {
    let link = format!("/proc/self/fd/{}", file.as_raw_fd());
    let name = std::fs::read_link(link);
    let sealed = fcntl_get_seals(file).is_ok_and(|seals| seals.contains(SealFlags::SHRINK));
    sealed
        && name
            .is_ok_and(|name| name.as_os_str() == format!("/memfd:{STAND_IN} (deleted)").as_str())
}

/// Bytes of a page of the system.
pub(crate) fn page_size() -> u64 {
    rustix::param::page_size() as u64
}

/// Whether Linux has `MADV_POPULATE_READ` (5.14 and later).
fn can_populate() -> bool {
    static CAN: OnceLock<bool> = OnceLock::new();
    *CAN.get_or_init(|| {
        let page = Pages::new(PAGE);
        let advice = rustix::mm::Advice::LinuxPopulateRead;
        // SAFETY: populating pages changes no memory of the program.
        unsafe { rustix::mm::madvise(page.start.as_ptr().cast(), PAGE, advice) }.is_ok()
    })
}

/// The pages that the process has locked for devices: `mm->pinned_vm`.
#[derive(Debug, Default)]
pub(crate) struct Pinned {
    pages: u64,
    /// Pages of doorbell records, which are locked once: `mlx5_ib_db_map_user`.
    records: BTreeMap<u64, u64>,
}

impl Pinned {
    /// Bytes of the longest range that is a doorbell record.
    const RECORD: u64 = 8;

    fn add(&mut self, start: u64, length: u64) -> Result<(), Errno> {
        let first = start / page_size();
        if length <= Self::RECORD {
            let users = self.records.entry(first).or_default();
            *users += 1;
            if *users > 1 {
                return Ok(());
            }
        }
        let all = self.pages + Self::pages(start, length);
        if let Err(errno) = may_lock(all * page_size()) {
            if length <= Self::RECORD {
                self.records.remove(&first);
            }
            return Err(errno);
        }
        self.pages = all;
        Ok(())
    }

    fn remove(&mut self, start: u64, length: u64) {
        if length <= Self::RECORD {
            let first = start / page_size();
            let users = self.records.entry(first).or_default();
            *users = users.saturating_sub(1);
            if *users > 0 {
                return;
            }
            self.records.remove(&first);
        }
        self.pages = self.pages.saturating_sub(Self::pages(start, length));
    }

    fn pages(start: u64, length: u64) -> u64 {
        (start + length - 1) / page_size() - start / page_size() + 1
    }
}

/// Whether the process may have `bytes` locked: its limit, unless it has the capability in the first user
/// namespace.
fn may_lock(bytes: u64) -> Result<(), Errno> {
    // Miri has no limits.
    if cfg!(miri) {
        return Ok(());
    }
    use rustix::process::{Resource, getrlimit};
    let Some(limit) = getrlimit(Resource::Memlock).current else { return Ok(()) };
    if bytes <= limit && limit > 0 || lifts_limits() {
        return Ok(());
    }
    Err(if limit == 0 { Errno::PERM } else { Errno::NOMEM })
}

fn lifts_limits() -> bool {
    let map = std::fs::read_to_string("/proc/self/uid_map");
    let first = map.is_ok_and(|map| map.split_whitespace().eq(["0", "0", "4294967295"]));
    first && is_capable(rustix::thread::CapabilitySet::IPC_LOCK)
}

/// Bytes of a page of the device, whatever the system's pages are.
pub(crate) const PAGE: usize = 4096;

/// Zeroed pages that the program may map.
#[derive(Debug)]
pub(crate) struct Pages {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: plain memory, which is reached as atomics.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

impl Pages {
    /// `length` bytes, at least one.
    pub(crate) fn new(length: usize) -> Arc<Pages> {
        let align = rustix::param::page_size().max(PAGE);
        let layout = Layout::from_size_align(length.max(1).next_multiple_of(align), align);
        let layout = layout.expect("pages of a device are few");
        // SAFETY: the layout has bytes.
        let start = unsafe { alloc_zeroed(layout) };
        let Some(start) = NonNull::new(start) else { handle_alloc_error(layout) };
        start.as_ptr().expose_provenance();
        Arc::new(Pages { start, layout })
    }

    /// Bytes of all pages.
    pub(crate) fn len(&self) -> usize {
        self.layout.size()
    }

    /// The address of the first byte.
    pub(crate) fn address(&self) -> u64 {
        self.start.as_ptr().expose_provenance() as u64
    }

    /// Stores `bytes` at byte `at`, a byte or a word of four at a time.
    ///
    /// # Panics
    ///
    /// If they are not inside.
    pub(crate) fn store(&self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= self.len() && at % 4 == 0 && bytes.len() % 4 == 0);
        for (nth, word) in bytes.chunks_exact(4).enumerate() {
            let value = u32::from_ne_bytes([word[0], word[1], word[2], word[3]]);
            // SAFETY: inside, as checked above.
            let place = unsafe { self.start.as_ptr().add(at + 4 * nth) };
            // SAFETY: aligned to four bytes, and all access is by single loads and stores.
            unsafe { AtomicU32::from_ptr(place.cast()) }.store(value, Ordering::Release);
        }
    }

    /// Lends the pages to a device for as long as there are any.
    pub(crate) fn lend(&self, memory: &mut GuestMemory) -> Result<(), Errno> {
        // SAFETY: the driver, which owns the device, keeps the pages as long as that.
        unsafe { memory.pin(self.address(), self.len() as u64, true) }.map_err(|_| Errno::FAULT)
    }

    /// The pages, for the program to map, with a lease.
    pub(crate) fn show(self: &Arc<Self>, length: usize, lease: Arc<Lease>) -> Option<HostPages> {
        let owner = Arc::new((self.clone(), lease));
        // SAFETY: the pages are there as long as their owner, and all access is by single loads and stores.
        (length <= self.len()).then(|| unsafe { HostPages::new(self.start, length, owner) })
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, and nobody has the pages any more.
        unsafe { dealloc(self.start.as_ptr(), self.layout) };
    }
}

/// The process that made a fabric. Its children of `fork` are told apart without a system call where the kernel can
/// wipe a page in them (`MADV_WIPEONFORK`, Linux 4.14).
#[derive(Debug)]
pub(crate) struct Birthplace {
    /// A page of the system that begins with [`HERE`](Self::HERE), and with zero in a child.
    wiped: Option<NonNull<u8>>,
    process: u32,
}

// SAFETY: the page is reached as an atomic, and goes with the value.
unsafe impl Send for Birthplace {}
// SAFETY: as above.
unsafe impl Sync for Birthplace {}

impl Birthplace {
    const HERE: u32 = 1;

    /// This process.
    pub(crate) fn new() -> Birthplace {
        // Miri has neither such pages nor `fork`.
        let wiped = if cfg!(miri) { None } else { wiped_page() };
        let place = Birthplace { wiped, process: std::process::id() };
        if let Some(word) = place.word() {
            word.store(Self::HERE, Ordering::Relaxed);
        }
        place
    }

    fn word(&self) -> Option<&AtomicU32> {
        // SAFETY: the page is mapped as long as the value, aligned, and reached as this atomic only.
        self.wiped.map(|page| unsafe { AtomicU32::from_ptr(page.as_ptr().cast()) })
    }

    /// Whether this is the process.
    pub(crate) fn is_here(&self) -> bool {
        match self.word() {
            Some(word) => word.load(Ordering::Relaxed) == Self::HERE,
            None => std::process::id() == self.process,
        }
    }
}

impl Drop for Birthplace {
    fn drop(&mut self) {
        if let Some(page) = self.wiped {
            // SAFETY: the mapping is its own, and nobody has a reference into it any more.
            let _ = unsafe { rustix::mm::munmap(page.as_ptr().cast(), page_size() as usize) };
        }
    }
}

/// A page that the kernel clears in children of `fork`; `None` where it cannot.
fn wiped_page() -> Option<NonNull<u8>> {
    use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
    let (length, rights) = (page_size() as usize, ProtFlags::READ | ProtFlags::WRITE);
    // SAFETY: a new mapping, wherever there is room.
    let page = unsafe { mmap_anonymous(std::ptr::null_mut(), length, rights, MapFlags::PRIVATE) };
    let page = page.ok()?;
    // SAFETY: the page is the mapping's own, and holds nothing.
    match unsafe { madvise(page, length, Advice::LinuxWipeOnFork) } {
        Ok(()) => NonNull::new(page.cast()),
        Err(_) => {
            // SAFETY: as above.
            let _ = unsafe { munmap(page, length) };
            None
        }
    }
}

/// Memory of a device, for the program to map; `owner` keeps the device.
///
/// # Safety
///
/// The range is memory for as long as the owner lives, and is reached only as atomics.
pub(crate) unsafe fn show_memory(
    start: NonNull<u8>,
    length: usize,
    owner: (Arc<World>, Arc<Lease>),
) -> HostPages {
    // SAFETY: the caller's promise.
    unsafe { HostPages::new(start, length, Arc::new(owner)) }
}
