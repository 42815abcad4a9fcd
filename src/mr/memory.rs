//! How this process reads and writes the memory of a region.

use super::MemoryRegion;
use crate::error::MemoryError;
use crate::memory::region::{Backing, Borrowed, RawRange, StableBytes};
use std::ptr;
use std::sync::atomic::AtomicU64;
use zerocopy::{FromBytes, IntoBytes};

mod sealed {
    pub trait Sealed {}
}

/// Memory that has an address in this process: all but dma-bufs and the whole address space.
pub trait HostMemory: sealed::Sealed {}

impl<M: StableBytes> sealed::Sealed for M {}
impl<M: StableBytes> HostMemory for M {}
impl sealed::Sealed for RawRange {}
impl HostMemory for RawRange {}
impl sealed::Sealed for Borrowed<'_> {}
impl HostMemory for Borrowed<'_> {}

impl<T, M: HostMemory> MemoryRegion<T, M> {
    fn backing(&self) -> Option<&Backing<M>> {
        self.inner.object.memory()
    }

    fn out_of_range(&self, offset: usize, length: usize) -> MemoryError {
        MemoryError::OutOfRange { offset, length, size: self.backing().map_or(0, Backing::len) }
    }

    /// A copy of the value `index`, or `None` if there are not as many.
    ///
    /// A peer may write it meanwhile. A value of 1, 2, 4 or 8 bytes at a multiple of its size
    /// is then either the old or the new one; a larger one may be some of both.
    #[inline]
    pub fn read_at(&self, index: usize) -> Option<T>
    where
        T: FromBytes + IntoBytes,
    {
        self.backing()?.read(index.checked_mul(size_of::<T>())?)
    }

    /// Stores the value `index`.
    ///
    /// # Errors
    ///
    /// [`MemoryError::OutOfRange`] if there are not as many.
    #[inline]
    pub fn write_at(&mut self, index: usize, value: T) -> Result<(), MemoryError>
    where
        T: FromBytes + IntoBytes,
    {
        let offset = index.saturating_mul(size_of::<T>());
        let written = self.backing().is_some_and(|backing| backing.write(offset, value));
        if written { Ok(()) } else { Err(self.out_of_range(offset, size_of::<T>())) }
    }

    /// Copies bytes from `offset` on out of the region. A peer may write them meanwhile; aligned
    /// words are not torn.
    ///
    /// # Errors
    ///
    /// [`MemoryError::OutOfRange`], and nothing copied, if there is not as much.
    #[inline]
    pub fn copy_to(&self, offset: usize, bytes: &mut [u8]) -> Result<(), MemoryError> {
        let copied = self.backing().is_some_and(|backing| backing.load(offset, bytes));
        if copied { Ok(()) } else { Err(self.out_of_range(offset, bytes.len())) }
    }

    /// Copies bytes into the region, to `offset` and behind.
    ///
    /// # Errors
    ///
    /// [`MemoryError::OutOfRange`], and nothing copied, if there is no room.
    #[inline]
    pub fn copy_from(&mut self, offset: usize, bytes: &[u8]) -> Result<(), MemoryError> {
        let copied = self.backing().is_some_and(|backing| backing.store(offset, bytes));
        if copied { Ok(()) } else { Err(self.out_of_range(offset, bytes.len())) }
    }

    /// The memory as aligned words that threads of this process may share, and a peer write; a
    /// rest that is no whole word is left out. `None` if the memory does not begin at a multiple
    /// of eight.
    ///
    /// It takes the region exclusively because accesses of different widths must not race within
    /// a program. What happens here is atomic towards the device only if
    /// [its attributes](crate::DeviceAttr) call its atomics global. Otherwise, and so on rxe, a
    /// peer's atomic may fall between the load and the store of a `fetch_add` here.
    #[inline]
    pub fn as_atomics(&mut self) -> Option<&[AtomicU64]> {
        self.backing()?.words()
    }

    /// Where the memory begins in this process.
    ///
    /// Writing through the pointer is a race with [`read_at`](Self::read_at) and its like in other
    /// threads.
    #[inline]
    pub fn as_ptr(&self) -> *mut T {
        self.backing().map_or(ptr::null_mut(), |backing| backing.as_ptr().cast())
    }

    /// Bytes that this process can reach.
    fn host_len(&self) -> usize {
        self.backing().map_or(0, Backing::len)
    }

    /// The memory as a slice.
    ///
    /// # Safety
    ///
    /// While the slice is borrowed nobody writes the memory: no peer that knows the key, no
    /// request in flight, no other thread.
    #[allow(unsafe_code, reason = "the obligation is the caller's")]
    pub unsafe fn as_slice(&self) -> &[T]
    where
        T: FromBytes + IntoBytes,
    {
        let count = self.host_len().checked_div(size_of::<T>()).unwrap_or(0);
        if count == 0 {
            return &[];
        }
        // SAFETY: in bounds by division, initialised because any bytes are a `T`, alive as long as
        // `self`, aligned as every way to register values of `T` sees to; left alone as the caller
        // says.
        unsafe { std::slice::from_raw_parts(self.as_ptr(), count) }
    }

    /// The memory as a mutable slice.
    ///
    /// # Safety
    ///
    /// While the slice is borrowed nobody reads or writes the memory: no peer that knows the key,
    /// no request in flight.
    #[allow(unsafe_code, reason = "the obligation is the caller's")]
    pub unsafe fn as_mut_slice(&mut self) -> &mut [T]
    where
        T: FromBytes + IntoBytes,
    {
        let count = self.host_len().checked_div(size_of::<T>()).unwrap_or(0);
        if count == 0 {
            return &mut [];
        }
        // SAFETY: in bounds by division, initialised because any bytes are a `T`, borrowed
        // exclusively with `self`, aligned as every way to register values of `T` sees to; left
        // alone as the caller says.
        unsafe { std::slice::from_raw_parts_mut(self.as_ptr(), count) }
    }
}
