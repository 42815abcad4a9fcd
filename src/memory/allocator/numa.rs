//! Queue memory near a device.

use super::lent::{LentMappings, pages};
use super::{Allocation, DomainView, QueueAllocator, ResourceType};
use crate::memory::mapping::Mapping;
use rustix::io::Errno;
use rustix::mm::{Advice, madvise};
use std::alloc::Layout;
use std::ptr::NonNull;

/// Nodes that a mask of [`bind`] has a bit for: as many as Linux can have.
const NODES: usize = 1024;
/// Bits of a word of the mask.
const WORD: usize = usize::BITS as usize;

/// Gives each buffer pages of one NUMA node: that of the device, so that the device does not have
/// to cross to another to read requests, or that of the thread that polls.
///
/// The pages are taken at once (`MADV_POPULATE_WRITE`, Linux 5.14), so that a creation fails with
/// `ENOMEM` if a limit on the process's memory stands in the way or the node does not exist. Should
/// the node itself have none left, the kernel frees some by ending a process before it refuses, as it
/// does for all memory that is bound to a node.
#[derive(Debug)]
pub struct NumaNode {
    lent: LentMappings,
    node: u32,
}

impl NumaNode {
    /// Memory of this node; [`Device::numa_node`](crate::Device::numa_node) tells a device's.
    pub fn new(node: u32) -> Self {
        NumaNode { lent: LentMappings::default(), node }
    }

    /// Buffers that are in use; none in a forked child.
    pub fn buffers(&self) -> usize {
        self.lent.count()
    }
}

// SAFETY: each mapping is lent once, has the size and alignment asked for, stays until it is given
// back, and is not copied by a fork.
unsafe impl QueueAllocator for NumaNode {
    fn alloc(&self, _: &DomainView<'_>, layout: Layout, _: ResourceType) -> Allocation {
        let mapping = pages(layout.size(), layout.align()).and_then(|mapping| {
            bind(&mapping, self.node)?;
            populate(&mapping)?;
            Ok(mapping)
        });
        self.lent.lend(mapping, layout.align())
    }

    unsafe fn free(&self, _: &DomainView<'_>, memory: NonNull<u8>, _: Layout, _: ResourceType) {
        self.lent.take_back(memory);
    }
}

/// Takes all pages of a mapping now: the kernel ends a program that later touches a page which it cannot give.
fn populate(mapping: &Mapping) -> Result<(), Errno> {
    let advice = Advice::LinuxPopulateWrite;
    // SAFETY: the range is a mapping of ours, and nobody uses it yet.
    match unsafe { madvise(mapping.as_ptr().cast(), mapping.len(), advice) } {
        // Linux before 5.14: the pages are taken when the queue memory is zeroed.
        Err(Errno::INVAL) => Ok(()),
        populated => populated,
    }
}

/// The mask that names one node; `None` for a node that has no bit there.
fn mask(node: u32) -> Option<[usize; NODES / WORD]> {
    let node = node as usize;
    let mut nodes = [0; NODES / WORD];
    *nodes.get_mut(node / WORD)? = 1 << (node % WORD);
    Some(nodes)
}

/// Binds the pages of a mapping to one node, before any of them is touched.
fn bind(mapping: &Mapping, node: u32) -> Result<(), Errno> {
    let nodes = mask(node).ok_or(Errno::INVAL)?;
    // The kernel reads one bit less than `maxnode`.
    let bits = NODES + 1;
    // SAFETY: the range is a mapping of ours. The mask has the `NODES` bits that the kernel reads, and the kernel
    // reads them only during the call.
    let status = unsafe {
        libc::syscall(
            libc::SYS_mbind,
            mapping.as_ptr(),
            mapping.len(),
            libc::MPOL_BIND,
            nodes.as_ptr(),
            bits,
            0,
        )
    };
    match status {
        0 => Ok(()),
        _ => Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::INVAL)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::Bench;
    use rustix::param::page_size;

    /// The kernel's description of the mapping at `address`: `bind:0 anon=2 …`.
    fn policy_at(address: usize) -> String {
        let all = std::fs::read_to_string("/proc/self/numa_maps").unwrap();
        let found = all.lines().find_map(|line| line.strip_prefix(&format!("{address:x} ")));
        found.expect("a mapping of its own").to_string()
    }

    /// A node that this process may use.
    fn allowed_node() -> u32 {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let nodes = status.lines().find_map(|line| line.strip_prefix("Mems_allowed_list:"));
        let first = nodes.unwrap_or("0").trim().split(['-', ',']).next();
        first.unwrap().parse().unwrap()
    }

    #[test]
    #[cfg_attr(miri, ignore = "it asks for a node's memory")]
    fn all_pages_of_a_buffer_are_taken_at_once_and_of_the_node() {
        let node = allowed_node();
        // Some sandboxes forbid binding memory, and some kernels cannot.
        let probe = pages(1, 1).unwrap();
        if let Err(Errno::PERM | Errno::NOSYS) = bind(&probe, node) {
            return;
        }
        // Linux before 5.14 takes the pages when they are written.
        let advice = Advice::LinuxPopulateWrite;
        // SAFETY: the range is a mapping of this test's.
        let populates = unsafe { madvise(probe.as_ptr().cast(), probe.len(), advice) }.is_ok();
        // A neighbour with the same policy would make one mapping of both.
        drop(probe);
        let bench = Bench::new();
        let domain = DomainView { domain: &*bench.pd.inner.kernel, pd_context: 0 };
        let allocator = NumaNode::new(node);
        let layout = Layout::from_size_align(3 * page_size(), 64).unwrap();
        let resource = ResourceType::MLX5_CQ;
        let allocation = allocator.alloc(&domain, layout, resource);
        let Allocation::Memory(memory) = allocation else { panic!("{allocation:?}") };
        let policy = policy_at(memory.addr().get());
        assert!(policy.starts_with(&format!("bind:{node} ")), "{policy}");
        assert!(!populates || policy.contains(&format!(" N{node}=3")), "{policy}");
        assert_eq!(allocator.buffers(), 1);
        // SAFETY: the allocator just returned it.
        unsafe { allocator.free(&domain, memory, layout, resource) };
        assert_eq!(allocator.buffers(), 0);
        let nowhere = NumaNode::new(NODES as u32 - 1);
        assert_eq!(nowhere.alloc(&domain, layout, resource), Allocation::Failed);
    }

    #[test]
    fn a_mask_names_one_node_as_the_kernel_counts_them() {
        for node in (0..NODES).step_by(if cfg!(miri) { 93 } else { 1 }) {
            let mask = mask(node as u32).unwrap();
            let named = |n: &usize| mask[n / WORD] >> (n % WORD) & 1 == 1;
            assert!((0..NODES).filter(named).eq([node]), "{node}");
        }
        assert!([NODES as u32, u32::MAX].into_iter().all(|node| mask(node).is_none()));
    }
}
