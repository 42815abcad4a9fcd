//! The dma-buf of a live queue is for the kernel; with it a peer could be let at the queue.
#![allow(unused)]

use std::ptr::NonNull;
use uverbs::allocator::SharedMemory;
use uverbs::{DmaBufPart, QueueAllocator};

fn take(memory: &SharedMemory, queue: NonNull<u8>) -> Option<DmaBufPart> {
    unsafe { memory.dmabuf(queue) }
}

fn main() {
    let _ = take;
}
