//! Queue memory in pages of its own.

use super::lent::{LentMappings, pages};
use super::{Allocation, DomainView, QueueAllocator, ResourceType};
use std::alloc::Layout;
use std::ptr::NonNull;

/// Gives each buffer anonymous pages of its own. Forked children find zeros in their place (`MADV_WIPEONFORK`).
///
/// The library allocates the same way without an allocator. Use this one to count the memory of a
/// program's queues, or as a part of an allocator that decides buffer by buffer.
#[derive(Debug, Default)]
pub struct Pages {
    lent: LentMappings,
}

impl Pages {
    /// An allocator that has lent nothing yet.
    pub fn new() -> Self {
        Pages::default()
    }

    /// Buffers that are in use; none in a forked child.
    pub fn buffers(&self) -> usize {
        self.lent.count()
    }
}

// SAFETY: each mapping is lent once, has the size and alignment asked for, stays until it is given
// back, and is not copied by a fork.
unsafe impl QueueAllocator for Pages {
    fn alloc(&self, _: &DomainView<'_>, layout: Layout, _: ResourceType) -> Allocation {
        self.lent.lend(pages(layout.size(), layout.align()), layout.align())
    }

    unsafe fn free(&self, _: &DomainView<'_>, memory: NonNull<u8>, _: Layout, _: ResourceType) {
        self.lent.take_back(memory);
    }
}
