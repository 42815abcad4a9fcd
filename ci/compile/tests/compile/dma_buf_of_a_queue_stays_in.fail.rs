//! Only the kernel gets the dma-buf of a live queue: a program that registered it could let a peer write the queue.
#![allow(unused)]

use std::ptr::NonNull;
use uverbs::allocator::SharedMemory;
use uverbs::{DmaBufPart, QueueAllocator};

fn take(memory: &SharedMemory, queue: NonNull<u8>) -> Option<DmaBufPart> {
    { memory.dmabuf(queue) }
}

fn main() {
    let _ = take;
}
