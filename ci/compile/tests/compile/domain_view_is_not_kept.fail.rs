//! An allocator sees the parent domain during a call and cannot keep it.
#![allow(unused)]

use std::alloc::Layout;
use std::ptr::NonNull;
use uverbs::{Allocation, DomainView, QueueAllocator, ResourceType};

#[derive(Debug)]
struct Keeper;

fn keep<T: 'static>(_: T) {}

unsafe impl QueueAllocator for Keeper {
    fn alloc(&self, domain: &DomainView<'_>, layout: Layout, _: ResourceType) -> Allocation {
        keep(domain);
        Allocation::UseDefault
    }

    unsafe fn free(&self, _: &DomainView<'_>, _: NonNull<u8>, _: Layout, _: ResourceType) {}
}

fn main() {
    let _ = Keeper;
}
