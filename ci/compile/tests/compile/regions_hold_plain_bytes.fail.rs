//! A peer may write any bytes into a region, so any bytes must be a value.
#![allow(unused)]

use uverbs::{Access, MemoryRegion, ProtectionDomain, Result};

fn allocate(pd: &ProtectionDomain) -> Result<MemoryRegion<bool>> {
    pd.mr_builder().access(Access::ALL_REMOTE).allocate(8)
}

fn main() {
    let _ = allocate;
}
