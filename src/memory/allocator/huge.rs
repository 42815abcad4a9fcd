//! Queue memory in huge pages.

use super::lent::{LentMappings, huge, room};
use super::{Allocation, DomainView, QueueAllocator, ResourceType};
use crate::error::{Error, Result};
use rustix::io::Errno;
use std::alloc::Layout;
use std::ptr::NonNull;

/// Gives each buffer huge pages, so that the device has few translations to cache instead of many.
///
/// Huge pages are set aside by the administrator: those of 2 MiB by
/// `/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages`, which `/proc/sys/vm/nr_hugepages` also sets
/// where 2 MiB is the default size, as with ordinary pages of 4 KiB. Where none is left a creation fails
/// with `ENOMEM`, unless the allocator [falls back](Self::or_default). Doorbell records, of eight bytes,
/// are left to the library.
///
/// Forked children do not get the memory (`MADV_DONTFORK`): a child that continues a poll of its
/// parent dies of `SIGSEGV`. With all other ready-made allocators it does not.
///
/// The other allocators are used alike:
///
/// ```no_run
/// # fn f(pd: &uverbs::ProtectionDomain) -> uverbs::Result<()> {
/// use std::sync::Arc;
/// use uverbs::allocator::{HugePages, NumaNode, Pages, SharedMemory};
///
/// // Huge pages of 1 GiB, and small pages once those are used up.
/// let huge = pd.parent_domain_builder().allocator(HugePages::of(30)?.or_default()).build()?;
/// let (small, near) = (Pages::new(), NumaNode::new(1));
/// // Files that another process may map: of any memory, or dma-bufs.
/// let (files, dmabufs) = (Arc::new(SharedMemory::new()), SharedMemory::dmabufs()?);
/// let shared = pd.parent_domain_builder().allocator(files.clone()).build()?;
/// // ... queues are made of `shared`, and their files go to another process:
/// let buffers = files.buffers()?;
/// # drop((huge, small, near, dmabufs, shared, buffers)); Ok(()) }
/// ```
#[derive(Debug)]
pub struct HugePages {
    lent: LentMappings,
    page_bits: u8,
    or_default: bool,
}

impl HugePages {
    /// Pages of 2 MiB.
    pub fn new() -> Self {
        HugePages { lent: LentMappings::default(), page_bits: 21, or_default: false }
    }

    /// Pages of 2ⁿ bytes, 30 for 1 GiB. The machine has few sizes, and a creation fails with
    /// `ENOMEM` if this is none of them.
    ///
    /// # Errors
    ///
    /// `EINVAL` for sizes that no machine has: up to that of its ordinary pages, and more than 16 GiB.
    pub fn of(page_bits: u8) -> Result<Self> {
        const LEAST: u8 = 13;
        // As `MAP_HUGE_16GB`, the largest of `linux/mman.h`.
        const MOST: u8 = 34;
        if !(LEAST..=MOST).contains(&page_bits) {
            return Err(Error::invalid(
                "make_huge_pages",
                format!("pages of 2^{page_bits} bytes; huge ones have 2^{LEAST} to 2^{MOST}"),
            ));
        }
        Ok(HugePages { page_bits, ..HugePages::new() })
    }

    /// Leaves a buffer to the library when no huge page is left.
    #[must_use]
    pub fn or_default(mut self) -> Self {
        self.or_default = true;
        self
    }

    /// Buffers that are in use; none in a forked child.
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
    fn alloc(&self, _: &DomainView<'_>, layout: Layout, resource: ResourceType) -> Allocation {
        if resource == ResourceType::MLX5_DBR {
            return Allocation::UseDefault;
        }
        let page = 1usize.checked_shl(self.page_bits.into());
        let length = page.and_then(|page| room(layout.size(), layout.align(), page));
        let mapping = length.ok_or(Errno::NOMEM).and_then(|length| huge(length, self.page_bits));
        match self.lent.lend(mapping, layout.align()) {
            Allocation::Failed if self.or_default => Allocation::UseDefault,
            allocation => allocation,
        }
    }

    unsafe fn free(&self, _: &DomainView<'_>, memory: NonNull<u8>, _: Layout, _: ResourceType) {
        self.lent.take_back(memory);
    }
}

#[cfg(test)]
mod tests {
    use super::super::lent::anonymous;
    use super::*;
    use crate::tests::Bench;

    /// A record of 8 bytes would take a huge page alone.
    #[test]
    #[cfg_attr(miri, ignore = "it asks for huge pages")]
    fn doorbell_records_are_left_to_the_library_and_queues_are_not() {
        let bench = Bench::new();
        let domain = DomainView { domain: &*bench.pd.inner.kernel, pd_context: 0 };
        // Hardly a machine has pages of 16 GiB.
        let allocator = HugePages::of(34).unwrap();
        let layout = Layout::from_size_align(8, 8).unwrap();
        let record = allocator.alloc(&domain, layout, ResourceType::MLX5_DBR);
        assert_eq!(record, Allocation::UseDefault);
        let queues = [ResourceType::MLX5_QP, ResourceType::MLX5_SRQ, ResourceType::MLX5_CQ];
        for queue in queues {
            assert_ne!(allocator.alloc(&domain, layout, queue), Allocation::UseDefault, "{queue}");
        }
        let allocator = allocator.or_default();
        for queue in queues {
            assert_ne!(allocator.alloc(&domain, layout, queue), Allocation::Failed, "{queue}");
        }
    }

    /// With ordinary pages, because a machine need not have huge ones.
    #[test]
    fn buffers_are_counted_while_they_are_lent() {
        let allocator = HugePages::new();
        let lent: Vec<Allocation> =
            (0..2).map(|_| allocator.lent.lend(anonymous(4096), 64)).collect();
        assert_eq!(allocator.buffers(), 2);
        for (left, allocation) in [1, 0].into_iter().zip(lent) {
            let Allocation::Memory(memory) = allocation else { panic!("{allocation:?}") };
            allocator.lent.take_back(memory);
            assert_eq!(allocator.buffers(), left);
        }
    }

    #[test]
    fn sizes_that_no_machine_has_are_refused() {
        for bits in [0, 12, 35, 64, 99, u8::MAX] {
            let error = HugePages::of(bits).unwrap_err();
            let text = format!("2^{bits} bytes; huge ones have 2^13 to 2^34");
            assert!(error.errno() == Errno::INVAL && error.message().contains(&text), "{error}");
        }
        let sizes = [13, 21, 30, 34];
        assert_eq!(sizes.map(|bits| HugePages::of(bits).unwrap().page_bits), sizes);
    }
}
