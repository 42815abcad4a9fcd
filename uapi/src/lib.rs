//! Kernel ABI and hardware formats of Linux RDMA, and nothing else.
//!
//! Names keep the spelling of the kernel's headers, so that a search finds them in both worlds.
//! There is one module per noun; each names the headers it was written from.
#![no_std]
#![forbid(unsafe_code)]
#![allow(non_camel_case_types, non_upper_case_globals)]

pub mod ah;
pub mod async_event;
pub mod buffer;
pub mod comp_channel;
pub mod context;
pub mod counters;
pub mod cq;
pub mod device;
pub mod dm;
pub mod dmabuf;
pub mod dmah;
pub mod drift;
pub mod endian;
pub mod enumeration;
pub mod flow;
pub mod flow_action;
pub mod gid;
pub mod ioctl;
pub mod layout;
pub mod mcast;
pub mod mlx5;
pub mod mr;
pub mod mw;
pub mod nldev;
pub mod object;
pub mod pd;
pub mod port;
pub mod qp;
pub mod rdma_user_cm;
pub mod reflection;
pub mod rxe;
pub mod srq;
pub mod wc;
pub mod wq;
pub mod wr;
pub mod write;
pub mod xrcd;
