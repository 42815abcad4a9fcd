//! Where queue memory comes from, if a parent domain wants to decide.

use std::fmt;
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::ptr::NonNull;

/// What a buffer is for: the kernel's driver id in the upper 32 bits, the driver's own code in the
/// lower, as `ibv_alloc_parent_domain` passes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ResourceType(pub u64);

impl ResourceType {
    /// The kernel's id of the driver.
    pub fn driver(self) -> u32 {
        (self.0 >> 32) as u32
    }

    /// The driver's code for the kind of buffer.
    pub fn code(self) -> u32 {
        self.0 as u32
    }
}

/// The parent domain on whose behalf an allocator is asked: a view that cannot be kept.
pub struct DomainView<'a> {
    pub(crate) pd: &'a crate::pd::PdInner,
}

impl DomainView<'_> {
    /// The kernel's number of the protection domain underneath.
    pub fn handle(&self) -> u32 {
        self.pd.handle()
    }

    /// Name of the device, `mlx5_0` for one.
    pub fn device(&self) -> &str {
        self.pd.file().device.name()
    }
}

impl fmt::Debug for DomainView<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DomainView").field("handle", &self.handle()).finish()
    }
}

/// An allocator's answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Allocation {
    /// Memory of the size and alignment that was asked for.
    Memory(NonNull<u8>),
    /// The library shall allocate this buffer itself.
    UseDefault,
    /// There is no memory; the creation fails with `ENOMEM`.
    Failed,
}

/// Provides the memory of queues created in a [`ParentDomain`](crate::ParentDomain).
///
/// It is called from whichever thread creates or destroys an object, and never with a lock of
/// this library held. A panic in `alloc` unwinds the creation; one in `free` is caught and
/// counted.
///
/// # Safety
///
/// Memory answered by [`alloc`](Self::alloc) must be readable and writable, of at least the size
/// and alignment asked for, used by nobody else until [`free`](Self::free), and must stay at its
/// physical place across `fork` (shared, or `MADV_DONTFORK`): a device reads and writes it.
pub unsafe trait QueueAllocator:
    fmt::Debug + Send + Sync + UnwindSafe + RefUnwindSafe + 'static
{
    /// Memory of `size` bytes at a multiple of `align`, zeroed.
    fn alloc(
        &self,
        domain: &DomainView<'_>,
        size: usize,
        align: usize,
        resource: ResourceType,
    ) -> Allocation;

    /// Takes back what `alloc` answered as [`Allocation::Memory`]: once for each, after the kernel
    /// confirmed that the object is gone, and never for a default buffer.
    ///
    /// # Safety
    ///
    /// `memory` was answered by `alloc` of this allocator and has not been freed.
    unsafe fn free(&self, domain: &DomainView<'_>, memory: NonNull<u8>, resource: ResourceType);
}
