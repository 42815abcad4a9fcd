//! Memory that the kernel, a device or another process also accesses.
//!
//! It is safe to use from outside: lengths are checked, shared words are atomics, bytes that a device may write
//! at any time are copied and never borrowed, and a mapping is unmapped only by the process that made it.
#![allow(unsafe_code)]

pub(crate) mod allocator;
pub(crate) mod barrier;
pub(crate) mod buffer_slab;
pub(crate) mod cq_buffer;
pub(crate) mod doorbell_record;
pub(crate) mod doorbell_register;
#[cfg(test)]
pub(crate) mod fake_mapping;
pub(crate) mod gate;
pub(crate) mod huge_pages;
pub(crate) mod mapping;
pub(crate) mod mmio_page;
pub(crate) mod mmio_window;
pub(crate) mod pointer;
pub(crate) mod queue_layout;
pub(crate) mod queue_memory;
#[cfg(test)]
pub(crate) mod recorded_order;
pub(crate) mod region;
pub(crate) mod rq_buffer;
pub(crate) mod rxe_queue;
mod shared_pages;
pub(crate) mod sq_buffer;
pub(crate) mod udmabuf;
pub(crate) mod wqe_segment;
pub(crate) mod wqebb;
