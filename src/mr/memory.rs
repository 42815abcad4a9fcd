//! Reading and writing the memory of a region from this process.

use super::MemoryRegion;
use crate::error::MemoryError;
use crate::memory::region::{Backing, Borrowed, RawRange, StableBytes};
use std::ptr;
use std::sync::atomic::AtomicU64;
use zerocopy::{FromBytes, IntoBytes};

mod sealed {
    pub trait Sealed {}
}

/// Memory that the region itself reads and writes: it has an address in this process and no other user.
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

    /// Copies the value `index` out of the region; `None` if the region has fewer values.
    ///
    /// A peer may write it meanwhile. A value of 1, 2, 4 or 8 bytes at a multiple of its size
    /// is then either the old or the new one; a larger one may be a mixture.
    #[inline]
    pub fn read_at(&self, index: usize) -> Option<T>
    where
        T: FromBytes + IntoBytes,
    {
        self.backing()?.read(index.checked_mul(size_of::<T>())?)
    }

    /// Stores the value at `index`.
    ///
    /// # Errors
    ///
    /// [`MemoryError::OutOfRange`] if the region has fewer values.
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
    /// [`MemoryError::OutOfRange`] if the region ends before; nothing is copied then.
    #[inline]
    pub fn copy_to(&self, offset: usize, bytes: &mut [u8]) -> Result<(), MemoryError> {
        let copied = self.backing().is_some_and(|backing| backing.load(offset, bytes));
        if copied { Ok(()) } else { Err(self.out_of_range(offset, bytes.len())) }
    }

    /// Copies bytes into the region, from `offset` on.
    ///
    /// # Errors
    ///
    /// [`MemoryError::OutOfRange`] if the region ends before; nothing is copied then.
    #[inline]
    pub fn copy_from(&mut self, offset: usize, bytes: &[u8]) -> Result<(), MemoryError> {
        let copied = self.backing().is_some_and(|backing| backing.store(offset, bytes));
        if copied { Ok(()) } else { Err(self.out_of_range(offset, bytes.len())) }
    }

    /// The memory as aligned words of 8 bytes that threads of this process may share while a peer writes
    /// them; bytes behind the last whole word are left out. `None` if the memory does not begin at a
    /// multiple of eight.
    ///
    /// It takes the region exclusively because accesses of different widths must not race within a
    /// program. An operation of this process is atomic towards the device only if
    /// [its attributes](crate::DeviceAttr) call its atomics global. They do not on rxe: there a peer's
    /// atomic may fall between the load and the store of a `fetch_add` here.
    #[inline]
    pub fn as_atomics(&mut self) -> Option<&[AtomicU64]> {
        self.backing()?.words()
    }

    /// A pointer to the beginning of the memory.
    ///
    /// Writes through it race with methods of other threads that read, such as
    /// [`read_at`](Self::read_at).
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
    /// While the slice is borrowed no peer that knows the key, no request in flight and no code of this process, by
    /// the pointer of [`as_ptr`](Self::as_ptr) for one, writes the memory.
    #[allow(unsafe_code, reason = "the obligation is the caller's")]
    pub unsafe fn as_slice(&self) -> &[T]
    where
        T: FromBytes + IntoBytes,
    {
        let count = self.host_len().checked_div(size_of::<T>()).unwrap_or(0);
        if count == 0 {
            return &[];
        }
        // SAFETY: in bounds by division; initialised because any bytes are a `T`; alive as long as `self`;
        // aligned, as memory of `T` is by its type, by `StableBytes`, or by its pages; not written, as the caller
        // promised.
        unsafe { std::slice::from_raw_parts(self.as_ptr(), count) }
    }

    /// The memory as a mutable slice.
    ///
    /// # Safety
    ///
    /// While the slice is borrowed no peer that knows the key, no request in flight and no code of this process, by
    /// the pointer of [`as_ptr`](Self::as_ptr) for one, reads or writes the memory.
    #[allow(unsafe_code, reason = "the obligation is the caller's")]
    pub unsafe fn as_mut_slice(&mut self) -> &mut [T]
    where
        T: FromBytes + IntoBytes,
    {
        let count = self.host_len().checked_div(size_of::<T>()).unwrap_or(0);
        if count == 0 {
            return &mut [];
        }
        // SAFETY: in bounds by division; initialised because any bytes are a `T`; borrowed exclusively with
        // `self`; aligned, as memory of `T` is by its type, by `StableBytes`, or by its pages; not accessed otherwise,
        // as the caller promised.
        unsafe { std::slice::from_raw_parts_mut(self.as_ptr(), count) }
    }
}
