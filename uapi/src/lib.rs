//! Kernel ABI and hardware formats of Linux RDMA, and nothing else.
//!
//! Names keep the spelling of the kernel's headers, so that a search finds them in both worlds.
#![no_std]
#![forbid(unsafe_code)]
