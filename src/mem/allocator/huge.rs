//! Queue memory in huge pages.

use super::lent::{Lent, huge, room};
use super::{Allocation, DomainView, QueueAllocator, ResourceType};
use rustix::io::Errno;
use std::ptr::NonNull;

/// Gives each buffer huge pages, of which the device has to know few where it has to know many
/// small ones.
///
/// Huge pages are set aside by the administrator (`/proc/sys/vm/nr_hugepages`). Where none is left
/// a creation fails with `ENOMEM`, unless the allocator [falls back](Self::or_default). Doorbell
/// records, of eight bytes, are left to the library.
#[derive(Debug)]
pub struct HugePages {
    lent: Lent,
    page_bits: u8,
    or_default: bool,
}

impl HugePages {
    /// Pages of 2 MiB.
    pub fn new() -> Self {
        HugePages::of(21)
    }

    /// Pages of 2ⁿ bytes, 30 for 1 GiB; the machine has few sizes.
    pub fn of(page_bits: u8) -> Self {
        HugePages { lent: Lent::default(), page_bits, or_default: false }
    }

    /// Leaves a buffer to the library when no huge page is left.
    #[must_use]
    pub fn or_default(mut self) -> Self {
        self.or_default = true;
        self
    }

    /// Buffers that are in use.
    pub fn buffers(&self) -> usize {
        self.lent.count()
    }
}

impl Default for HugePages {
    fn default() -> Self {
        HugePages::new()
    }
}

// SAFETY: each mapping is lent once, has the size and alignment asked for, stays until it is given
// back, and is not copied by a fork.
unsafe impl QueueAllocator for HugePages {
    fn alloc(
        &self,
        _: &DomainView<'_>,
        size: usize,
        align: usize,
        resource: ResourceType,
    ) -> Allocation {
        if resource == ResourceType::MLX5_DBR {
            return Allocation::UseDefault;
        }
        let page = 1usize.checked_shl(self.page_bits.into());
        let length = page.and_then(|page| room(size, align, page));
        let mapping = length.ok_or(Errno::NOMEM).and_then(|length| huge(length, self.page_bits));
        match self.lent.lend(mapping, align) {
            Allocation::Failed if self.or_default => Allocation::UseDefault,
            answer => answer,
        }
    }

    unsafe fn free(&self, _: &DomainView<'_>, memory: NonNull<u8>, _: ResourceType) {
        self.lent.take_back(memory);
    }
}
