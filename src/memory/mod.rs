//! Memory that somebody else also touches: the kernel, a device, another process.
//!
//! One of the two rooms where `unsafe` lives (the other is the ioctl itself). What leaves here is
//! safe to use: lengths are checked, shared words are atomics, bytes that a device may write at
//! any time are copied and never borrowed, and a mapping is unmapped only by the process that
//! made it.
#![allow(unsafe_code)]

pub(crate) mod allocator;
pub(crate) mod barrier;
pub(crate) mod blocks;
mod chunk;
pub(crate) mod dbrec;
pub(crate) mod element;
pub(crate) mod entries;
pub(crate) mod fork;
pub(crate) mod gated;
pub(crate) mod inbox;
pub(crate) mod lock;
pub(crate) mod mapping;
pub(crate) mod masked;
#[cfg(test)]
pub(crate) mod memfile;
pub(crate) mod noted;
#[cfg(test)]
pub(crate) mod order;
pub(crate) mod page;
pub(crate) mod parcel;
pub(crate) mod pointer;
pub(crate) mod queue;
pub(crate) mod region;
pub(crate) mod register;
pub(crate) mod ring;
pub(crate) mod slab;
pub(crate) mod slots;
pub(crate) mod sync;
pub(crate) mod udmabuf;
pub(crate) mod units;
pub(crate) mod window;
