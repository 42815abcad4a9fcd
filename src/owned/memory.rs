//! What can be lent to a request: memory that stays registered for as long as it is held.

use super::buffer::{Buffer, SharedBuffer};
use super::lending::{Place, Refused, named, taken_back};
use crate::identity::Identity;
use crate::memory::region::StableBytes;
use crate::mr::{MemoryRegion, RegionError};
use crate::wr::Sge;
use std::any::Any;
use std::fmt;
use std::ops::RangeBounds;
use std::sync::Arc;

/// A part of a region, held together with the region.
///
/// Registered memory is not a slice, and this is none: the device and peers may write it while
/// others look, which [`MemoryRegion::copy_to`] and its like are made for. That is also why it can
/// be cloned and lent to several requests at once.
#[derive(Clone)]
pub struct RegionSlice {
    region: Arc<dyn Any + Send + Sync>,
    name: Name,
}

impl RegionSlice {
    /// The bytes `range` of `region`.
    ///
    /// # Errors
    ///
    /// [`RegionError::OutOfRange`], also for more than 2^32 - 1 bytes; [`RegionError::Dead`].
    pub fn new<T: 'static, M: StableBytes>(
        region: &Arc<MemoryRegion<T, M>>,
        range: impl RangeBounds<usize>,
    ) -> Result<RegionSlice, RegionError> {
        let sge = region.sge(range)?;
        // Which the region keeps.
        let domain = Identity::of(&region.inner.pd.kernel);
        Ok(RegionSlice { region: region.clone(), name: Name { sge, domain } })
    }

    /// Whether it is a part of `region`.
    pub fn is_of<T: 'static, M: StableBytes>(&self, region: &Arc<MemoryRegion<T, M>>) -> bool {
        std::ptr::addr_eq(Arc::as_ptr(&self.region), Arc::as_ptr(region))
    }

    /// Bytes.
    #[expect(clippy::len_without_is_empty, reason = "its holder chose the range")]
    pub fn len(&self) -> usize {
        self.name.sge.length as usize
    }
}

impl fmt::Debug for RegionSlice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RegionSlice").field("sge", &self.name.sge).finish()
    }
}

/// What a request worked on, as the completion gives it back.
#[derive(Debug)]
pub enum Memory {
    /// Nothing: the request had no data, or had it inline.
    None,
    /// A buffer of a pool.
    Buffer(Buffer),
    /// A buffer with other readers.
    Shared(SharedBuffer),
    /// A part of a region.
    Region(RegionSlice),
}

impl Memory {
    /// The buffer, if it is one.
    #[inline(always)]
    pub fn into_buffer(self) -> Option<Buffer> {
        Buffer::back(self)
    }

    /// Lets a buffer show its first `length` bytes and no more than it did.
    pub(crate) fn truncate(&mut self, length: usize) {
        if let Memory::Buffer(buffer) = self {
            buffer.set_len(length.min(buffer.len()));
        }
    }
}

/// Bytes before a datagram.
const HEADER: usize = 40;

mod sealed {
    use super::super::lending::{Place, Refused};
    use super::Name;
    use crate::wr::{PostError, Sge};

    /// How requests name the memory.
    pub trait Named {
        /// By number, unless there is none.
        fn name(&self) -> Option<Name>;

        /// Clears where a datagram's global route header goes, which a device may write in part, or not
        /// at all: nobody shall take for that what an earlier holder of a buffer left.
        fn clear_header(&mut self) {}
    }

    /// How a request is appended to a batch.
    pub trait Post {
        fn post(self, ticket: u64, memory: Option<Sge>) -> Result<(), PostError>;
    }

    /// How memory is lent.
    pub trait Deposit: Named + Sized {
        /// Lends it in a place to a request that is appended now.
        fn deposit<T, P: Post>(
            self,
            place: Place<'_, T>,
            tag: T,
            post: P,
        ) -> Result<(), Refused<Self, T>>;
    }
}

pub(super) use sealed::{Deposit, Named, Post};

/// Lends memory of any kind.
#[inline(always)]
fn deposit<L: Lend, T, P: Post>(
    memory: L,
    place: Place<'_, T>,
    tag: T,
    post: P,
) -> Result<(), Refused<L, T>> {
    match post.post(place.ticket(), named(&memory)) {
        Ok(()) => {
            place.lend(memory.into_memory(), tag);
            Ok(())
        }
        Err(error) => Err(Refused { memory, tag, error }),
    }
}

/// It is lent before the request is written, so that neither it nor its place need be held meanwhile.
impl Deposit for Buffer {
    #[inline(always)]
    fn deposit<T, P: Post>(
        self,
        place: Place<'_, T>,
        tag: T,
        post: P,
    ) -> Result<(), Refused<Self, T>> {
        let (ticket, sge) = (place.ticket(), self.sge());
        let filled = place.fill(self, tag);
        match post.post(ticket, Some(sge)) {
            Ok(()) => {
                filled.lend();
                Ok(())
            }
            Err(error) => {
                let (memory, tag) = taken_back(filled);
                Err(Refused { memory, tag, error })
            }
        }
    }
}

macro_rules! deposit {
    ($($memory:ty)*) => {$(
        impl Deposit for $memory {
            #[inline(always)]
            fn deposit<T, P: Post>(
                self,
                place: Place<'_, T>,
                tag: T,
                post: P,
            ) -> Result<(), Refused<Self, T>> {
                deposit(self, place, tag, post)
            }
        }
    )*};
}

deposit!(() SharedBuffer RegionSlice Memory);

/// A number, and who knows what it means.
#[derive(Clone, Copy, Debug)]
pub struct Name {
    pub(super) sge: Sge,
    pub(super) domain: Identity,
}

/// Memory that can be lent to a request: [`Buffer`], [`SharedBuffer`], [`RegionSlice`], any of them
/// as [`Memory`], and `()` for a request without.
pub trait Lend: Deposit + Send + 'static {
    /// As the completion gives it back.
    fn into_memory(self) -> Memory;

    /// What it was before it was lent; `None` if `memory` is something else.
    fn back(memory: Memory) -> Option<Self>;

    /// Whether the device may write it: others may be reading a [`SharedBuffer`].
    #[inline(always)]
    fn is_writable(&self) -> bool {
        true
    }
}

/// Memory that a device may write: all that can be lent and has no readers.
pub trait LendMut: Lend {}

macro_rules! lend {
    ($($memory:ty => $variant:ident, $writable:literal;)*) => {$(
        impl Lend for $memory {
            #[inline(always)]
            fn into_memory(self) -> Memory {
                Memory::$variant(self)
            }

            #[inline(always)]
            fn back(memory: Memory) -> Option<Self> {
                match memory {
                    Memory::$variant(memory) => Some(memory),
                    _ => None,
                }
            }

            #[inline(always)]
            fn is_writable(&self) -> bool {
                $writable
            }
        }
    )*};
}

lend! {
    Buffer => Buffer, true;
    SharedBuffer => Shared, false;
    RegionSlice => Region, true;
}

impl Named for Buffer {
    #[inline(always)]
    fn name(&self) -> Option<Name> {
        Some(self.named())
    }

    #[inline]
    fn clear_header(&mut self) {
        self.iter_mut().take(HEADER).for_each(|byte| *byte = 0);
    }
}

impl Named for SharedBuffer {
    #[inline(always)]
    fn name(&self) -> Option<Name> {
        Some(self.named())
    }
}

impl Named for RegionSlice {
    #[inline(always)]
    fn name(&self) -> Option<Name> {
        Some(self.name)
    }
}

impl Named for () {
    #[inline(always)]
    fn name(&self) -> Option<Name> {
        None
    }
}

impl Named for Memory {
    #[inline(always)]
    fn name(&self) -> Option<Name> {
        match self {
            Memory::None => None,
            Memory::Buffer(buffer) => buffer.name(),
            Memory::Shared(buffer) => buffer.name(),
            Memory::Region(slice) => slice.name(),
        }
    }

    #[inline]
    fn clear_header(&mut self) {
        if let Memory::Buffer(buffer) = self {
            buffer.clear_header();
        }
    }
}

impl LendMut for Buffer {}
impl LendMut for RegionSlice {}

impl Lend for () {
    #[inline(always)]
    fn into_memory(self) -> Memory {
        Memory::None
    }

    #[inline(always)]
    fn back(memory: Memory) -> Option<Self> {
        matches!(memory, Memory::None).then_some(())
    }
}

impl LendMut for () {}

impl Lend for Memory {
    #[inline(always)]
    fn into_memory(self) -> Memory {
        self
    }

    #[inline(always)]
    fn back(memory: Memory) -> Option<Self> {
        Some(memory)
    }

    #[inline(always)]
    fn is_writable(&self) -> bool {
        !matches!(self, Memory::Shared(_))
    }
}
