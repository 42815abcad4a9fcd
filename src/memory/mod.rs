//! Memory that somebody else also touches: the kernel, a device, another process.
//!
//! `unsafe` code is here and in the file that makes ioctls. What leaves here is safe to use: lengths are checked, shared words are atomics, bytes that a device may write at
//! any time are copied and never borrowed, and a mapping is unmapped only by the process that
//! made it.
#![allow(unsafe_code)]

pub(crate) mod allocator;
pub(crate) mod barrier;
pub(crate) mod buffer_slab;
pub(crate) mod compact_enum;
pub(crate) mod cq_buffer;
pub(crate) mod doorbell_record;
pub(crate) mod doorbell_register;
#[cfg(test)]
pub(crate) mod fake_mapping;
pub(crate) mod fork;
pub(crate) mod gate;
pub(crate) mod huge_pages;
pub(crate) mod inline_any;
pub(crate) mod loan_table;
pub(crate) mod lock;
pub(crate) mod mapping;
pub(crate) mod mmio_page;
pub(crate) mod mmio_window;
pub(crate) mod pointer;
pub(crate) mod queue_memory;
#[cfg(test)]
pub(crate) mod recorded_order;
pub(crate) mod region;
pub(crate) mod ring_array;
pub(crate) mod rq_buffer;
pub(crate) mod rxe_queue;
mod shared_pages;
pub(crate) mod sq_buffer;
pub(crate) mod sync;
pub(crate) mod udmabuf;
pub(crate) mod update_list;
pub(crate) mod wqe_segment;
pub(crate) mod wqebb;
