//! Access rights of the local device and of peers to registered memory.

use crate::error::{Error, Result};
use std::fmt;
use uverbs_uapi::mr::ib_uverbs_access_flags as raw;

bitflags::bitflags! {
    /// Rights of a memory region, a memory window or a queue pair. Local reads are always allowed.
    #[doc(alias = "ibv_access_flags")]
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
    pub struct Access: u32 {
        /// The local device may write: receive, and be the target of reads and atomics.
        const LOCAL_WRITE = raw::IB_UVERBS_ACCESS_LOCAL_WRITE.bits();
        /// A peer may write. Needs `LOCAL_WRITE` on a region.
        const REMOTE_WRITE = raw::IB_UVERBS_ACCESS_REMOTE_WRITE.bits();
        /// A peer may read.
        const REMOTE_READ = raw::IB_UVERBS_ACCESS_REMOTE_READ.bits();
        /// A peer may do atomics. Needs `LOCAL_WRITE` on a region.
        const REMOTE_ATOMIC = raw::IB_UVERBS_ACCESS_REMOTE_ATOMIC.bits();
        /// Memory windows may be bound to the region.
        const MW_BIND = raw::IB_UVERBS_ACCESS_MW_BIND.bits();
        /// Remote addresses count from the start of the region or window rather than from its
        /// virtual address.
        const ZERO_BASED = raw::IB_UVERBS_ACCESS_ZERO_BASED.bits();
        /// Pages are not pinned but faulted in when the device needs them.
        const ON_DEMAND = raw::IB_UVERBS_ACCESS_ON_DEMAND.bits();
        /// The memory consists of huge pages.
        const HUGETLB = raw::IB_UVERBS_ACCESS_HUGETLB.bits();
        /// A peer may flush to global visibility.
        const FLUSH_GLOBAL = raw::IB_UVERBS_ACCESS_FLUSH_GLOBAL.bits();
        /// A peer may flush to persistence.
        const FLUSH_PERSISTENT = raw::IB_UVERBS_ACCESS_FLUSH_PERSISTENT.bits();
        /// The device may reorder its accesses on the bus. Optional: ignored where unknown.
        const RELAXED_ORDERING = raw::IB_UVERBS_ACCESS_RELAXED_ORDERING.bits();
    }
}

/// The names of the rights, `LOCAL_WRITE | REMOTE_READ`; without any, "local reads only".
impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.is_empty() {
            true => f.write_str("local reads only"),
            false => bitflags::parser::to_writer(self, f),
        }
    }
}

/// The range of flags that a kernel may ignore.
const OPTIONAL: u32 = 0x3ff0_0000;

impl Access {
    /// Everything that a peer can do to plain memory: write, read, atomics. A device without atomics may refuse it.
    pub const ALL_REMOTE: Access = Access::LOCAL_WRITE
        .union(Access::REMOTE_WRITE)
        .union(Access::REMOTE_READ)
        .union(Access::REMOTE_ATOMIC);

    /// Refuses a combination that every device refuses, in words.
    pub(crate) fn check(self, verb: &'static str) -> Result<()> {
        let needs_local = Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
        if self.intersects(needs_local) && !self.contains(Access::LOCAL_WRITE) {
            return Err(Error::invalid(
                verb,
                format!("access {self} needs LOCAL_WRITE: the local device writes a peer's data"),
            ));
        }
        Ok(())
    }

    /// The flags for the kernel: without the optional ones where it does not know how to ignore
    /// them.
    pub(crate) fn for_kernel(self, optional_access: bool) -> u32 {
        if optional_access { self.bits() } else { self.bits() & !OPTIONAL }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rights_are_shown_by_their_names() {
        assert_eq!(Access::empty().to_string(), "local reads only");
        let two = Access::LOCAL_WRITE | Access::REMOTE_READ;
        assert_eq!(two.to_string(), "LOCAL_WRITE | REMOTE_READ");
    }

    #[test]
    fn remote_writes_need_local_write() {
        assert!(Access::REMOTE_WRITE.check("reg_mr").is_err());
        assert!(Access::REMOTE_ATOMIC.check("reg_mr").is_err());
        assert!(Access::REMOTE_READ.check("reg_mr").is_ok());
        assert!(Access::ALL_REMOTE.check("reg_mr").is_ok());
    }

    #[test]
    fn optional_flags_are_dropped_for_kernels_that_would_refuse_them() {
        let access = Access::LOCAL_WRITE | Access::RELAXED_ORDERING;
        assert_eq!(access.for_kernel(false), Access::LOCAL_WRITE.bits());
        assert_eq!(access.for_kernel(true), access.bits());
    }
}
