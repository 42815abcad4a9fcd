//! Pools of registered buffers: the memory is registered once, and its buffers are taken, lent to
//! requests and given back without an allocation, a lock or a system call.

use super::lending::RegionSge;
use crate::access::Access;
use crate::error::{Error, Result};
use crate::identity::Identity;
use crate::memory::buffer_slab::{BufferSlab, SharedSlabBuffer, SlabBuffer, SlabPages};
use crate::mr::{MemoryRegion, MrBuilder};
use crate::number::{ByteCount, Lkey};
use crate::pd::{ProtectionDomain, Sharing};
use crate::wr::{Remote, Sge};
use rustix::io::Errno;
use std::fmt;
use std::ops::{Deref, DerefMut, RangeBounds};
use std::sync::Arc;

const VERB: &str = "buffer_pool";

/// The memory of a pool.
pub(crate) struct PoolRegion {
    /// Keeps the memory registered. Only the buffers lead to its bytes.
    region: MemoryRegion<u8, SlabPages>,
}

/// The parts of a pool that each request on one of its buffers needs.
#[derive(Clone, Copy)]
pub(crate) struct PoolKey {
    lkey: Lkey,
    /// The protection domain of the region, which keeps it.
    domain: Identity,
}

impl PoolKey {
    #[inline(always)]
    fn region_sge(&self, addr: u64, length: u32) -> RegionSge {
        RegionSge { sge: Sge { addr, length, lkey: self.lkey }, domain: self.domain }
    }
}

/// A buffer of a pool, whatever part of it is used.
pub(crate) type PoolBuffer = SlabBuffer<PoolRegion, PoolKey>;

/// The part of a buffer that is used. With the length first, the compiler makes the word of an SGE from
/// it by a shift.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct BufferRange {
    length: u32,
    offset: u32,
}

/// Memory that is registered once and cut into buffers of one size.
///
/// The registration gives peers no right to write, so a [`Buffer`] is a slice, while a [`MemoryRegion`] is
/// not. Clones are handles of the same pool, which lives as long as its last handle or buffer. Any thread
/// may take buffers, and drop them, without a lock. Made by
/// [`buffer_pool_builder`](ProtectionDomain::buffer_pool_builder):
///
/// ```no_run
/// # fn main() -> uverbs::Result<()> {
/// # let context = uverbs::Context::open(&uverbs::devices()?[0])?;
/// # let pd = context.alloc_pd()?;
/// let pool = pd.buffer_pool_builder(4096).count(256).build()?;
/// let mut buffer = pool.take()?;
/// buffer[..5].copy_from_slice(b"hello");
/// buffer.set_len(5);
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct BufferPool {
    slab: Arc<BufferSlab<PoolRegion, PoolKey>>,
}

/// Builds a [`BufferPool`].
///
/// ```no_run
/// # fn f(pd: &uverbs::ProtectionDomain) -> uverbs::Result<()> {
/// use uverbs::owned::BufferPoolBuilder;
///
/// let builder: BufferPoolBuilder = pd.buffer_pool_builder(1 << 20).count(64);
/// // Peers may read the buffers, and the device needs few translations.
/// let pool = builder.remote_read().huge_pages().build()?;
/// # drop(pool); Ok(()) }
/// ```
#[derive(Clone, Debug)]
#[must_use]
pub struct BufferPoolBuilder {
    registration: MrBuilder,
    size: usize,
    count: usize,
    huge: bool,
}

impl<S: Sharing> ProtectionDomain<S> {
    /// Starts to build a pool of buffers of at least `size` bytes each, 1 to 2^31; 64 buffers unless
    /// [`count`](BufferPoolBuilder::count) says otherwise.
    pub fn buffer_pool_builder(&self, size: usize) -> BufferPoolBuilder {
        BufferPoolBuilder { registration: self.mr_builder(), size, count: 64, huge: false }
    }
}

impl BufferPoolBuilder {
    /// How many buffers the pool has, 1 to 2^31; 64 unless set.
    pub fn count(mut self, buffers: usize) -> Self {
        self.count = buffers;
        self
    }

    /// Puts the pool into huge pages of the system's default size, so that the device needs fewer
    /// translations. The system must have reserved them (`/proc/sys/vm/nr_hugepages`). Of the limit of locked
    /// memory the buffers take what they have, and not whole huge pages.
    pub fn huge_pages(mut self) -> Self {
        self.huge = true;
        self
    }

    /// Lets peers read the whole pool at any time, by the key that [`Buffer::remote`] returns.
    pub fn remote_read(mut self) -> Self {
        self.registration = self.registration.access(Access::LOCAL_WRITE | Access::REMOTE_READ);
        self
    }

    /// Allocates the memory, zeroed, and registers it.
    ///
    /// # Errors
    ///
    /// `EINVAL` for a size or a count of 0 or of more than 2^31; `ENOMEM` without memory, without huge pages,
    /// or beyond the limit of locked memory.
    pub fn build(self) -> Result<BufferPool> {
        let BufferPoolBuilder { registration, size, count, huge } = self;
        const MOST: usize = 1 << 31;
        let within = |number: usize, what: &str| match u32::try_from(number) {
            Ok(fits) if (1..=MOST).contains(&number) => Ok(fits),
            _ => Err(Error::invalid(VERB, format!("{number} {what}; 1 to {MOST} can be had"))),
        };
        let (size, count) = (within(size, "bytes a buffer")?, within(count, "buffers")?);
        // Each buffer has cache lines of its own: a device that writes one does not slow down a thread
        // that works in its neighbour.
        let stride = size.next_multiple_of(64);
        let length = (stride as usize).saturating_mul(count as usize);
        let pages = SlabPages::new(length, huge.then(huge_page_size)).map_err(|error| {
            let errno = Errno::from_io_error(&error).unwrap_or(Errno::NOMEM);
            let of = if huge { " in huge pages; see /proc/sys/vm/nr_hugepages" } else { "" };
            Error::new(VERB, errno).detail(format!("no {} of memory{of}", ByteCount::of(length)))
        })?;
        let shared = pages.clone();
        let region = registration.register(pages).map_err(|failed| failed.error.in_verb(VERB))?;
        let key = PoolKey { lkey: region.lkey(), domain: Identity::of(&region.inner.pd.kernel) };
        let slab = BufferSlab::new(&shared, stride, count, PoolRegion { region }, key).ok_or_else(
            || Error::invalid(VERB, format!("{count} buffers of {}", ByteCount(size.into()))),
        )?;
        Ok(BufferPool { slab })
    }
}

/// Bytes of the system's default huge page.
fn huge_page_size() -> usize {
    huge_page_size_in(&std::fs::read_to_string("/proc/meminfo").unwrap_or_default())
}

/// The same, of the text of `/proc/meminfo`.
fn huge_page_size_in(text: &str) -> usize {
    let line = text.lines().find_map(|line| line.strip_prefix("Hugepagesize:"));
    let kilobytes = line.and_then(|rest| rest.split_whitespace().next()?.parse::<usize>().ok());
    kilobytes.and_then(|kilobytes| kilobytes.checked_mul(1024)).unwrap_or(2 << 20)
}

impl BufferPool {
    /// Takes a buffer out of the pool. It holds what its last owner left in it.
    ///
    /// # Errors
    ///
    /// [`BufferError::PoolEmpty`] while all are taken.
    #[inline]
    pub fn take(&self) -> std::result::Result<Buffer, BufferError> {
        match self.slab.take() {
            Some(whole) => Ok(Buffer { whole, offset: 0, length: self.slab.size() }),
            None => Err(BufferError::PoolEmpty),
        }
    }

    /// Takes a buffer and copies `bytes` into it.
    ///
    /// ```no_run
    /// # use uverbs::owned::{BufferError, BufferPool};
    /// # fn f(pool: &BufferPool, message: &[u8]) -> Result<(), BufferError> {
    /// match pool.copy(message) {
    ///     Ok(buffer) => println!("{} bytes to send", buffer.len()),
    ///     Err(BufferError::PoolEmpty) => println!("wait until a request is over"),
    ///     Err(BufferError::TooLong { size, .. }) => println!("split it after {size} bytes"),
    ///     Err(other) => return Err(other),
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// [`BufferError::PoolEmpty`] while all are taken; [`BufferError::TooLong`] for more bytes than
    /// [`buffer_size`](Self::buffer_size).
    pub fn copy(&self, bytes: &[u8]) -> std::result::Result<Buffer, BufferError> {
        let (length, size) = (bytes.len(), self.buffer_size());
        if length > size {
            return Err(BufferError::TooLong { length, size });
        }
        let mut buffer = self.take()?;
        buffer.set_len(length);
        buffer.copy_from_slice(bytes);
        Ok(buffer)
    }

    /// Bytes that each buffer holds: the size that was asked for, rounded up to a multiple of 64.
    pub fn buffer_size(&self) -> usize {
        self.slab.size() as usize
    }

    /// How many buffers the pool has.
    pub fn count(&self) -> usize {
        self.slab.count()
    }

    /// How many buffers are in the pool right now. Looks at each buffer.
    pub fn idle(&self) -> usize {
        self.slab.idle()
    }
}

/// Why a pool gave no buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum BufferError {
    /// All buffers are taken; one comes back when its holder drops it, or when its request is over.
    PoolEmpty,
    /// No buffer of the pool takes so many bytes.
    TooLong {
        /// The bytes to copy.
        length: usize,
        /// The bytes that a buffer holds.
        size: usize,
    },
}

impl fmt::Display for BufferError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BufferError::PoolEmpty => f.write_str(
                "all buffers of the pool are taken: wait until a request is over, or give the pool more",
            ),
            BufferError::TooLong { length, size } => {
                let [length, size] = [length, size].map(|&bytes| ByteCount::of(bytes));
                write!(
                    f,
                    "{length} exceed the {size} of a buffer: split them, or build the pool with larger buffers"
                )
            }
        }
    }
}

impl std::error::Error for BufferError {}

impl From<BufferError> for Error {
    fn from(error: BufferError) -> Error {
        let errno = match error {
            BufferError::PoolEmpty => Errno::NOBUFS,
            BufferError::TooLong { .. } => Errno::MSGSIZE,
        };
        Error::new("take_buffer", errno).detail(error.to_string())
    }
}

impl fmt::Debug for BufferPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BufferPool")
            .field("region", &self.slab.owner().region)
            .field("buffer_size", &self.buffer_size())
            .field("count", &self.count())
            .finish()
    }
}

/// A buffer of a [`BufferPool`], which its holder has alone: a slice of registered memory.
///
/// It goes back to the pool when it is dropped. While a request works on it, the queue has it. A buffer can
/// also be used with raw batches ([`SendBatch`](crate::SendBatch)): see [`sge`](Self::sge).
///
/// ```no_run
/// # use uverbs::owned::{Buffer, SharedBuffer};
/// # fn f(mut buffer: Buffer) {
/// buffer[..4].copy_from_slice(b"head");
/// println!("{} bytes at {:?}", buffer.capacity(), buffer.sge());
/// buffer.advance(4);
/// buffer.reset();
/// // Several owners read it, each a part; the last one may write again.
/// let shared: SharedBuffer = buffer.share();
/// let body = shared.slice(4..).expect("the buffer is longer");
/// println!("{:?} within {:?}", body.sge(), shared.sge());
/// drop(body);
/// let writable = shared.into_buffer().expect("nobody else has a part");
/// # drop(writable); }
/// ```
#[repr(C)]
pub struct Buffer {
    whole: PoolBuffer,
    // In the order of `BufferRange`.
    length: u32,
    offset: u32,
}

impl Buffer {
    fn range(&self) -> std::ops::Range<usize> {
        self.offset as usize..(self.offset + self.length) as usize
    }

    /// Bytes from the buffer's first byte, as [`advance`](Self::advance) left it, to its end.
    pub fn capacity(&self) -> usize {
        (self.whole.slab().size() - self.offset) as usize
    }

    /// Lets the buffer end after `length` bytes, or at its capacity if that is less. A buffer that
    /// grows shows what was in its memory before.
    #[inline]
    pub fn set_len(&mut self, length: usize) {
        self.length = length.min(self.capacity()) as u32;
    }

    /// Lets the buffer end after `length` bytes; a shorter one stays as it is. Bytes behind a message are of an earlier use.
    #[inline(always)]
    pub(crate) fn truncate(&mut self, length: usize) {
        self.length = self.length.min(length as u32);
    }

    /// Lets the buffer begin `count` bytes later, or at its end if that is less: behind a header that was
    /// read, for example.
    #[inline]
    pub fn advance(&mut self, count: usize) {
        let count = count.min(self.length as usize) as u32;
        self.offset += count;
        self.length -= count;
    }

    /// Lets the buffer be as long as it came out of the pool.
    pub fn reset(&mut self) {
        self.offset = 0;
        self.length = self.whole.slab().size();
    }

    /// Makes it a buffer that many requests and readers share, and that nobody writes.
    pub fn share(self) -> SharedBuffer {
        let Buffer { whole, offset, length } = self;
        SharedBuffer { whole: whole.share(), offset, length }
    }

    /// The address and the key with which a peer reads the buffer, if the pool was built with
    /// [`remote_read`](BufferPoolBuilder::remote_read).
    pub fn remote(&self) -> Remote {
        let addr = self.whole.address() + u64::from(self.offset);
        Remote { addr, rkey: self.whole.slab().owner().region.rkey() }
    }

    /// Address, length and key, for a raw [`SendWr`](crate::SendWr) or [`RecvWr`](crate::RecvWr). The caller
    /// keeps the buffer until the request has completed.
    #[inline]
    pub fn sge(&self) -> Sge {
        self.region_sge().sge
    }

    #[inline(always)]
    pub(super) fn region_sge(&self) -> RegionSge {
        let at = self.whole.address() + u64::from(self.offset);
        self.whole.common().region_sge(at, self.length)
    }

    #[inline(always)]
    pub(super) fn into_parts(self) -> (PoolBuffer, BufferRange) {
        let Buffer { whole, offset, length } = self;
        (whole, BufferRange { offset, length })
    }

    /// The buffer that [`into_parts`](Self::into_parts) took apart.
    #[inline(always)]
    pub(super) fn of(whole: PoolBuffer, range: BufferRange) -> Buffer {
        let BufferRange { offset, length } = range;
        Buffer { whole, offset, length }
    }
}

impl Deref for Buffer {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        self.whole.bytes().get(self.range()).unwrap_or_default()
    }
}

impl DerefMut for Buffer {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        let range = self.range();
        self.whole.bytes_mut().get_mut(range).unwrap_or_default()
    }
}

impl AsRef<[u8]> for Buffer {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer").field("sge", &self.sge()).finish()
    }
}

/// A buffer of a [`BufferPool`] with many holders, who only read it: for data that is sent to many
/// peers, or again.
///
/// Made by [`Buffer::share`]. Cloning and slicing copy no bytes. The buffer goes back to the pool when its
/// last holder is dropped.
pub struct SharedBuffer {
    whole: SharedSlabBuffer<PoolRegion, PoolKey>,
    offset: u32,
    length: u32,
}

impl SharedBuffer {
    /// A part of the buffer; `None` if the range does not lie in it.
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Option<SharedBuffer> {
        let (offset, length) = crate::mr::resolve(range, self.length as usize).ok()?;
        Some(SharedBuffer {
            whole: self.whole.clone(),
            offset: self.offset + offset as u32,
            length: length as u32,
        })
    }

    /// The buffer with the right to write it, if nobody else holds a part of it.
    ///
    /// # Errors
    ///
    /// The buffer itself, which has other holders.
    pub fn into_buffer(self) -> std::result::Result<Buffer, SharedBuffer> {
        let SharedBuffer { whole, offset, length } = self;
        match whole.unshare() {
            Ok(whole) => Ok(Buffer { whole, offset, length }),
            Err(whole) => Err(SharedBuffer { whole, offset, length }),
        }
    }

    /// Address, length and key, for a raw [`SendWr`](crate::SendWr) or [`RecvWr`](crate::RecvWr). The caller
    /// keeps the buffer until the request has completed.
    #[inline]
    pub fn sge(&self) -> Sge {
        self.region_sge().sge
    }

    #[inline(always)]
    pub(super) fn region_sge(&self) -> RegionSge {
        let at = self.whole.address() + u64::from(self.offset);
        self.whole.common().region_sge(at, self.length)
    }
}

impl Clone for SharedBuffer {
    fn clone(&self) -> Self {
        let SharedBuffer { whole, offset, length } = self;
        SharedBuffer { whole: whole.clone(), offset: *offset, length: *length }
    }
}

impl Deref for SharedBuffer {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        let range = self.offset as usize..(self.offset + self.length) as usize;
        self.whole.bytes().get(range).unwrap_or_default()
    }
}

impl AsRef<[u8]> for SharedBuffer {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl fmt::Debug for SharedBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedBuffer").field("sge", &self.sge()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    #[test]
    fn a_size_of_no_system_is_two_mebibytes() {
        let of =
            |size: &str| huge_page_size_in(&format!("MemTotal: 7 kB\nHugepagesize: {size} kB\n"));
        assert_eq!(of("524288"), 512 << 20);
        for absurd in ["18446744073709551615", "18014398509481984", "-1", ""] {
            assert_eq!(of(absurd), 2 << 20, "{absurd}");
        }
    }

    /// A mapping of another length cannot be unmapped.
    #[test]
    #[cfg_attr(miri, ignore = "it reads a file of the kernel's")]
    fn a_huge_page_has_a_size_that_the_system_has() {
        let (size, sizes) = (huge_page_size(), PathBuf::from("/sys/kernel/mm/hugepages"));
        assert!(size.is_power_of_two() && size >= 64 << 10, "{size}");
        if sizes.exists() {
            let known = sizes.join(format!("hugepages-{}kB", size >> 10));
            assert!(known.exists(), "{}", known.display());
        }
    }
}
