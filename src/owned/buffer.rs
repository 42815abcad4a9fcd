//! Registered buffers: a pool that is registered once, and pieces of it that are taken, lent to
//! requests and given back without an allocation, a lock or a system call.

use super::memory::Name;
use crate::access::Access;
use crate::error::{Error, Result};
use crate::identity::Identity;
use crate::memory::buffer_slab::{BufferSlab, Pages, SharedSlabBuffer, SlabBuffer};
use crate::mr::{MemoryRegion, MrBuilder};
use crate::number::Lkey;
use crate::pd::{ProtectionDomain, Sharing};
use crate::wr::{Remote, Sge};
use rustix::io::Errno;
use std::fmt;
use std::ops::{Deref, DerefMut, RangeBounds};
use std::sync::Arc;

const VERB: &str = "buffer_pool";

/// What all buffers of a pool need.
pub(super) struct Registered {
    /// Nobody reaches the memory through it, only by the buffers.
    region: MemoryRegion<u8, Pages>,
}

/// What each request asks for.
#[derive(Clone, Copy)]
pub(super) struct Near {
    lkey: Lkey,
    /// Which the region keeps.
    domain: Identity,
}

impl Near {
    #[inline(always)]
    fn name(&self, addr: u64, length: u32) -> Name {
        Name { sge: Sge { addr, length, lkey: self.lkey }, domain: self.domain }
    }
}

type Pool = BufferSlab<Registered, Near>;

/// A piece of a pool, whatever part of it is used.
pub(super) type Whole = SlabBuffer<Registered, Near>;

/// Which part of a piece is used. Its length comes first, where a request's word for memory is made of it
/// by a shift.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Extent {
    length: u32,
    offset: u32,
}

/// Memory that is registered once and cut into buffers of one size.
///
/// Peers cannot write it, whatever they know: that is why a [`Buffer`] is a slice, while a
/// [`MemoryRegion`] is not. Clones share the pool; it lives as long as its last buffer.
///
/// ```no_run
/// # fn main() -> uverbs::Result<()> {
/// # let context = uverbs::Context::open(&uverbs::devices()?[0])?;
/// # let pd = context.alloc_pd()?;
/// let pool = pd.buffer_pool_builder(4096).count(256).build()?;
/// let mut buffer = pool.take().expect("255 more are there");
/// buffer[..5].copy_from_slice(b"hello");
/// buffer.set_len(5);
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct BufferPool {
    slab: Arc<Pool>,
}

/// Describes a [`BufferPool`], then makes it.
#[derive(Clone, Debug)]
#[must_use]
pub struct BufferPoolBuilder {
    registration: MrBuilder,
    size: usize,
    count: usize,
    huge: bool,
    access: Access,
}

impl<S: Sharing> ProtectionDomain<S> {
    /// Starts to describe a pool of buffers of `size` bytes each, 64 of them unless told.
    pub fn buffer_pool_builder(&self, size: usize) -> BufferPoolBuilder {
        BufferPoolBuilder {
            registration: self.mr_builder(),
            size,
            count: 64,
            huge: false,
            access: Access::LOCAL_WRITE,
        }
    }
}

impl BufferPoolBuilder {
    /// How many buffers; 64 unless set.
    pub fn count(mut self, buffers: usize) -> Self {
        self.count = buffers;
        self
    }

    /// Puts the pool into huge pages of the system's default size: fewer translations for the
    /// device. They must have been set aside (`/proc/sys/vm/nr_hugepages`).
    pub fn huge_pages(mut self) -> Self {
        self.huge = true;
        self
    }

    /// Lets peers read the buffers, whose key [`Buffer::remote`] tells: all of the pool, at any
    /// time, whatever is in it.
    pub fn remote_read(mut self) -> Self {
        self.access |= Access::REMOTE_READ;
        self
    }

    /// Allocates the memory, zeroed, and registers it.
    ///
    /// # Errors
    ///
    /// `EINVAL` for buffers of 0 bytes or of more than 2^31, for none of them or more than 2^31;
    /// `ENOMEM` without memory, without huge pages, or beyond the limit of locked memory.
    pub fn build(self) -> Result<BufferPool> {
        let BufferPoolBuilder { registration, size, count, huge, access } = self;
        const MOST: usize = 1 << 31;
        let within = |number: usize, what: &str| match u32::try_from(number) {
            Ok(fits) if (1..=MOST).contains(&number) => Ok(fits),
            _ => Err(Error::invalid(VERB, format!("{number} {what}; 1 to {MOST} can be had"))),
        };
        let (size, count) = (within(size, "bytes a buffer")?, within(count, "buffers")?);
        // Buffers begin on cache lines of their own, so that a device that writes one does not
        // slow down whoever works in its neighbour.
        let stride = size.next_multiple_of(64);
        let mut length = (stride as usize).saturating_mul(count as usize);
        if huge {
            length = length.checked_next_multiple_of(huge_page_size()).unwrap_or(usize::MAX);
        }
        let pages = Pages::new(length, huge).map_err(|error| {
            let errno = Errno::from_io_error(&error).unwrap_or(Errno::NOMEM);
            let of = if huge { " in huge pages; see /proc/sys/vm/nr_hugepages" } else { "" };
            Error::new(VERB, errno).detail(format!("no {length} bytes of memory{of}"))
        })?;
        let shared = pages.clone();
        let region = registration
            .access(access)
            .register(pages)
            .map_err(|failed| failed.error.in_verb(VERB))?;
        let near = Near { lkey: region.lkey(), domain: Identity::of(&region.inner.pd.kernel) };
        let slab = BufferSlab::new(&shared, stride, count, Registered { region }, near)
            .ok_or_else(|| Error::invalid(VERB, format!("{count} buffers of {size} bytes")))?;
        Ok(BufferPool { slab })
    }
}

/// Bytes of the system's default huge page.
fn huge_page_size() -> usize {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("Hugepagesize:"));
    let kilobytes = line.and_then(|rest| rest.split_whitespace().next()?.parse::<usize>().ok());
    kilobytes.unwrap_or(2048) * 1024
}

impl BufferPool {
    /// A buffer that nobody has, its contents whatever its last owner left; `None` when all are
    /// taken.
    #[inline]
    pub fn take(&self) -> Option<Buffer> {
        let length = self.slab.size();
        self.slab.take().map(|piece| Buffer { offset: 0, length, piece })
    }

    /// A buffer that holds a copy of `bytes`; `None` when all are taken or too small.
    pub fn copy(&self, bytes: &[u8]) -> Option<Buffer> {
        let mut buffer = self.take()?;
        buffer.get_mut(..bytes.len())?.copy_from_slice(bytes);
        buffer.set_len(bytes.len());
        Some(buffer)
    }

    /// Bytes that each buffer holds: what was asked for, or somewhat more.
    pub fn buffer_size(&self) -> usize {
        self.slab.size() as usize
    }

    /// How many buffers there are in all.
    pub fn count(&self) -> usize {
        self.slab.count()
    }

    /// How many buffers nobody has right now. Looks at each.
    pub fn idle(&self) -> usize {
        self.slab.idle()
    }
}

impl fmt::Debug for BufferPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BufferPool")
            .field("region", &self.slab.keep().region)
            .field("buffer_size", &self.buffer_size())
            .field("count", &self.count())
            .finish()
    }
}

/// A piece of a [`BufferPool`] that its holder has alone: a slice of registered memory.
///
/// It goes back to the pool when it is dropped. While a request works on it the queue has it.
#[repr(C)]
pub struct Buffer {
    piece: SlabBuffer<Registered, Near>,
    // As an `Extent` has them.
    length: u32,
    offset: u32,
}

impl Buffer {
    fn range(&self) -> std::ops::Range<usize> {
        self.offset as usize..(self.offset + self.length) as usize
    }

    /// Bytes from the beginning of what is left of the buffer to its end.
    pub fn capacity(&self) -> usize {
        (self.piece.slab().size() - self.offset) as usize
    }

    /// Lets the buffer end after `length` bytes, or at its capacity if that is less. What is
    /// uncovered is what was there.
    #[inline]
    pub fn set_len(&mut self, length: usize) {
        self.length = length.min(self.capacity()) as u32;
    }

    /// Gives up the first `count` bytes, or all if there are fewer: a header that was read.
    #[inline]
    pub fn advance(&mut self, count: usize) {
        let count = count.min(self.length as usize) as u32;
        self.offset += count;
        self.length -= count;
    }

    /// The buffer as it came out of the pool: all of it.
    pub fn reset(&mut self) {
        self.offset = 0;
        self.length = self.piece.slab().size();
    }

    /// Gives up on writing it, to share it among many requests and readers.
    pub fn share(self) -> SharedBuffer {
        let Buffer { piece, offset, length } = self;
        SharedBuffer { piece: piece.share(), offset, length }
    }

    /// What a peer needs to read it, if the pool [was made for that](BufferPoolBuilder::remote_read).
    pub fn remote(&self) -> Remote {
        let address = self.piece.address() + u64::from(self.offset);
        Remote { addr: address, rkey: self.piece.slab().keep().region.rkey() }
    }

    /// The buffer for a request of the unchecked kind; nothing keeps it where the device expects
    /// it.
    #[inline]
    pub fn sge(&self) -> Sge {
        self.named().sge
    }

    #[inline(always)]
    pub(super) fn named(&self) -> Name {
        let at = self.piece.address() + u64::from(self.offset);
        self.piece.near().name(at, self.length)
    }

    #[inline(always)]
    pub(super) fn into_parts(self) -> (Whole, Extent) {
        let Buffer { piece, offset, length } = self;
        (piece, Extent { offset, length })
    }

    /// What [`into_parts`](Self::into_parts) took apart.
    #[inline(always)]
    pub(super) fn of(piece: Whole, extent: Extent) -> Buffer {
        let Extent { offset, length } = extent;
        Buffer { piece, offset, length }
    }
}

impl Deref for Buffer {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        self.piece.bytes().get(self.range()).unwrap_or_default()
    }
}

impl DerefMut for Buffer {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        let range = self.range();
        self.piece.bytes_mut().get_mut(range).unwrap_or_default()
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

/// A piece of a [`BufferPool`] with many holders, who read it: what is sent to many peers, or
/// again.
///
/// Cloning and slicing copy nothing. It goes back to the pool with its last holder.
pub struct SharedBuffer {
    piece: SharedSlabBuffer<Registered, Near>,
    offset: u32,
    length: u32,
}

impl SharedBuffer {
    /// A part of it; `None` if it is not that long.
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Option<SharedBuffer> {
        let (offset, length) = crate::mr::resolve(range, self.length as usize).ok()?;
        Some(SharedBuffer {
            piece: self.piece.clone(),
            offset: self.offset + offset as u32,
            length: length as u32,
        })
    }

    /// The buffer for writing, if nobody else holds a part of it; else itself.
    pub fn into_buffer(self) -> std::result::Result<Buffer, SharedBuffer> {
        let SharedBuffer { piece, offset, length } = self;
        match piece.unshare() {
            Ok(piece) => Ok(Buffer { piece, offset, length }),
            Err(piece) => Err(SharedBuffer { piece, offset, length }),
        }
    }

    /// The buffer for a request of the unchecked kind; nothing keeps it where the device expects
    /// it.
    #[inline]
    pub fn sge(&self) -> Sge {
        self.named().sge
    }

    #[inline(always)]
    pub(super) fn named(&self) -> Name {
        let at = self.piece.address() + u64::from(self.offset);
        self.piece.near().name(at, self.length)
    }
}

impl Clone for SharedBuffer {
    fn clone(&self) -> Self {
        let SharedBuffer { piece, offset, length } = self;
        SharedBuffer { piece: piece.clone(), offset: *offset, length: *length }
    }
}

impl Deref for SharedBuffer {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        let range = self.offset as usize..(self.offset + self.length) as usize;
        self.piece.bytes().get(range).unwrap_or_default()
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
