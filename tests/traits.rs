//! Promises about threads and panics, kept by the compiler.

use std::panic::{RefUnwindSafe, UnwindSafe};
use uverbs::{
    AddressSpace, Borrowed, DmaBuf, Exclusive, MemoryRegion, MemoryWindow, OnDemandRange,
    ParentDomain, ProtectionDomain, RawRange, RegionBuilder, Shared,
};

const fn shared<T: Send + Sync>() {}
const fn carefree<T: Send + Sync + Unpin + UnwindSafe + RefUnwindSafe>() {}

const _: () = {
    carefree::<ProtectionDomain>();
    carefree::<ProtectionDomain<Exclusive>>();
    carefree::<ParentDomain<Shared>>();
    carefree::<ParentDomain<Exclusive>>();
    carefree::<RegionBuilder>();
    carefree::<MemoryRegion>();
    carefree::<MemoryRegion<u64, Vec<u64>>>();
    carefree::<MemoryRegion<u64, Box<[u64]>>>();
    carefree::<MemoryRegion<u8, RawRange>>();
    carefree::<MemoryRegion<u8, DmaBuf>>();
    carefree::<MemoryRegion<u8, AddressSpace>>();
    carefree::<MemoryWindow>();
    shared::<MemoryRegion<u8, Borrowed<'static>>>();
    shared::<OnDemandRange<'static>>();
    // Cells are moved in and out as bytes, never shared.
    shared::<MemoryRegion<std::cell::Cell<u8>>>();
};
