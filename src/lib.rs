//! RDMA verbs in pure Rust.
//!
//! This crate opens `/dev/infiniband/uverbsN`, speaks the Linux uverbs ABI itself, and drives the queues of
//! soft-RoCE (rxe) and mlx5 (ConnectX, BlueField) itself, without libibverbs. A program is one static binary.
//! It needs Linux 5.10 or later. A feature that the device, the driver or the kernel lacks fails with
//! `EOPNOTSUPP`; see [`Error::is_unsupported`].
//!
//! # Layers
//!
//! | | requests | use it when | costs of a write on mlx5, in instructions: post, completion |
//! |---|---|---|---|
//! | [`aio`] | are futures in any event loop; tokio's with the feature `tokio`, streams with `stream` | a program has many connections, deadlines, or other input beside them | 821, 817 |
//! | [`owned`] | take registered buffers, and completions give them back | a thread polls in a loop of its own | 140, 89 |
//! | the crate itself: [the verbs](#the-verbs-themselves) | name memory by number; ringing a batch is `unsafe` | memory is registered once and outlives its queue pairs, or every instruction counts | 110, 54 |
//! | [`cm`] | are any of these | peers find each other by IP address | no more |
//! | `sim` (feature `sim`) | are any of these | a test, or a machine without RDMA, needs devices in the process | times of a model |
//!
//! All layers share the objects of the verbs: a context, a protection domain, a queue pair that one layer took over
//! from another. `docs/BENCHMARKS.md` of the repository says how the instructions were counted.
//!
//! - [`devices`] lists the devices, and [`Context::open_first`] opens the first device that works;
//!   [`device::absence`] says why there is none.
//! - [`cm`] connects queue pairs by IP address; [`Endpoint`] and [`QpControl::handshake`] connect them by descriptions
//!   that the two programs exchange.
//! - [`porting`] is for programs that were written to libibverbs or librdmacm: a row for each verb, which the
//!   documentation's search also finds, and the differences beside the names.
//! - [`ParentDomain`], [`ThreadDomain`] and [`allocator`] choose the memory of queues and the doorbell of each
//!   thread; [`mlx5`] has the verbs of that driver alone.
//! - [`passing`] and [`Envelope`] share contexts, domains and regions between processes.
//!
//! Features: `sim`, `tokio`, `stream`, and `serde` for addresses, numbers, attributes of devices, ports and GIDs, and
//! descriptions that travel to a peer. The repository has whole programs in `examples/`; `examples/echo.rs` is a server
//! and its client as futures.
//!
//! # Safety
//!
//! Handles own what they were made from, so that objects may be dropped in any order. Memory that a device may reach
//! is released only after the kernel confirmed that the object is gone; otherwise it is leaked, and
//! [counted](Context::leaked). A [`MemoryRegion`] is no slice, because a peer may write it at any time. Safe code
//! cannot make the device write into memory that is not lent to it, unless it writes commands by itself to an open
//! file of a [context](Context::share) or an [event channel](cm::EventChannel#impl-AsFd-for-EventChannel), which Rust
//! considers safe. A program that shares a context with another process trusts that process with all memory
//! registered on it.
//!
//! # The verbs themselves
//!
//! Use them where memory is registered once and outlives its queue pairs, for memory windows, or if every
//! instruction counts. If buffers come and go with requests, use [`owned`], which does the bookkeeping for 30
//! instructions of a post and 35 of a completion.
//!
//! - **Posting**: a [`SendBatch`] or [`RecvBatch`] is pushed to and then rung; the device sees nothing before. Dropping
//!   the batch takes all its requests back. Its [`ring`](SendBatch#what-the-caller-of-ring-promises) lists the promises
//!   of its caller.
//! - **Threads**: posting and polling take `&mut`. A queue pair [splits](QueuePair::split) into halves for two threads;
//!   a `Mutex` serves more.
//! - **Room**: a completion queue has to be large enough for all completions of its queue pairs. An unsignaled send
//!   keeps its place until a later signaled one has completed.
//! - **Errors**: a completion's status is data; after an error the queue pair is in [`ERR`](QpState::ERR), and the
//!   rest of its requests are flushed.
//!
//! Two queue pairs of one device, one message. [`Endpoint`] carries everything that a peer needs to know;
//! with the feature `serde` it travels in any format.
//!
//! ```rust,no_run
//! use uverbs::{Context, Handshake, RecvWr, QpType, SendWr};
//!
//! fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     let context = Context::open_first()?;
//!     let pd = context.alloc_pd()?;
//!     let mut cq = context.cq_builder(16).build()?;
//!
//!     // Declared before the queue pairs, the regions are dropped after them.
//!     let mut message = pd.mr_builder().allocate::<u8>(64)?;
//!     let inbox = pd.mr_builder().allocate::<u8>(64)?;
//!     message.copy_from(0, b"hello, peer")?;
//!
//!     let mut left = pd.qp_builder(&cq, &cq, QpType::RC).build()?;
//!     let mut right = pd.qp_builder(&cq, &cq, QpType::RC).build()?;
//!     let gid = context.default_gid(1)?;
//!     let (here, there) = (left.endpoint(&gid)?, right.endpoint(&gid)?);
//!     left.handshake(&there, &Handshake::new())?;
//!     right.handshake(&here, &Handshake::new())?;
//!
//!     let mut batch = right.recv_batch()?;
//!     batch.push(RecvWr::new(&[inbox.sge(..)?]).id(1))?;
//!     // SAFETY: `inbox` outlives `right`, also if an error ends this function, and so the request.
//!     // Nobody reads it before the completion.
//!     unsafe { batch.ring()? };
//!
//!     let mut batch = left.send_batch()?;
//!     batch.push(SendWr::send(&[message.sge(..11)?]).id(2).signaled())?;
//!     // SAFETY: `message` outlives `left`, and nobody writes it any more.
//!     unsafe { batch.ring() }?;
//!
//!     let mut open = 2;
//!     while open > 0 {
//!         let mut completions = cq.poll()?;
//!         while let Some(completion) = completions.next() {
//!             println!("{}: {}", completion.wr_id(), completion.status());
//!             open -= 1;
//!         }
//!     }
//!     let mut text = [0; 11];
//!     inbox.copy_to(0, &mut text)?;
//!     assert_eq!(&text, b"hello, peer");
//!     Ok(())
//! }
//! ```
#![deny(unsafe_code)]

mod abort;
mod access;
mod address_vector;
mod ah;
pub mod aio;
#[cfg(all(test, not(any(loom, miri))))]
mod bench;
mod channel;
pub mod cm;
mod completion;
mod context;
mod cq;
pub mod device;
mod device_attr;
mod dm;
mod error;
mod events;
mod file;
mod first_panic;
mod flow;
mod handles;
mod identity;
mod lending;
#[cfg(litmus)]
#[doc(hidden)]
pub mod litmus;
mod memory;
pub mod mlx5;
mod mr;
mod mw;
mod number;
mod object;
pub mod owned;
mod parent_domain;
mod pd;
mod platform;
mod port;
pub mod porting;
mod provider;
mod qp;
mod sharing;
#[cfg(feature = "sim")]
pub mod sim;
mod srq;
mod sync;
mod td;
#[cfg(test)]
mod tests;
mod uverbs;
mod wc;
mod wr;
mod xrcd;

/// The program of the README: `cargo test --doc --all-features` runs it.
#[cfg(all(doctest, feature = "sim", feature = "tokio"))]
#[doc = include_str!("../README.md")]
struct Readme;

/// Ready-made allocators of queue memory, for [`ParentDomainBuilder::allocator`].
///
/// Each belongs to the process that made it: a forked child makes its own, as it does of contexts. In
/// the child an inherited allocator has no memory, and creations fail with `ENOMEM`.
pub mod allocator {
    pub use crate::memory::allocator::{
        Arena, HugePages, NumaNode, Pages, QueueFile, SharedMemory,
    };
}

/// Passing files between processes: [`send_files`](passing::send_files) and
/// [`receive_files`](passing::receive_files).
pub mod passing {
    pub use crate::sharing::passing::{MAX_FILES, ReceivedFiles, receive_files, send_files};
}

pub use access::Access;
pub use address_vector::{AddressVector, GlobalRoute, Grh};
pub use ah::AddressHandle;
pub use channel::CompletionChannel;
pub use completion::Completion;
pub use context::Context;
pub use cq::{CompletionQueue, Completions, CqBuilder, CqControl, CqRef, Notify, PollError};
pub use device::{Device, devices};
pub use device_attr::{
    AtomicCap, DeviceAttr, DeviceCaps, ModerationCaps, OdpCaps, OdpOps, RawPacketCaps, RssCaps,
    TagMatchingCaps,
};
pub use dm::DeviceMemory;
pub use error::{Error, ErrorWith, MemoryError, Result};
pub use events::async_event::{AsyncEvent, EventSource, EventType};
pub use events::keys::ObjectKey;
pub use flow::{Flow, FlowAttr, FlowEth, FlowIpv4, FlowIpv6, FlowPorts, FlowSpec, FlowType};
pub use handles::ObjectKind;
/// The crate of the memory that a region allocates: [`MmapMut`](memmap2::MmapMut).
pub use memmap2;
pub use memory::allocator::{Allocation, DmaBufPart, DomainView, QueueAllocator, ResourceType};
pub use memory::region::{AddressSpace, Borrowed, DmaBuf, Foreign, RawRange, StableBytes, Unowned};
pub use mr::{
    Advice, AnyMemoryRegion, ExchangeError, Exchanged, HostMemory, MemoryRegion, MrBuilder,
    NullRegion, OnDemandRange, OnDevice, Rereg,
};
pub use mw::{MemoryWindow, WindowType};
pub use number::{Gid, Lkey, Psn, Qkey, Qpn, Rkey, SrqNumber};
pub use parent_domain::{ParentDomain, ParentDomainBuilder};
pub use pd::{Exclusive, ProtectionDomain, Shared, Sharing};
pub use port::choose::{ChosenGid, GidFilter};
pub use port::{
    GidEntry, GidType, LinkLayer, LinkSpeed, LinkWidth, Mtu, PhysState, PortAttr, PortCaps,
    PortSpeed, PortState,
};
pub use qp::{
    Ece, Endpoint, Handshake, McastMembership, PathMigState, QpAttr, QpBuilder, QpCaps, QpControl,
    QpInfo, QpParts, QpState, QpType, QueuePair, RecvBatch, RecvQueue, SendBatch, SendQueue,
    XrcTarget,
};
pub use rustix::io::Errno;
pub use sharing::envelope::Envelope;
pub use sharing::foreign::ForeignObject;
pub use sharing::imported::{Importable, Imported};
pub use srq::{SharedReceiveQueue, SrqAttr, SrqBuilder, SrqRef};
pub use td::ThreadDomain;
pub use wc::{Scattered, Wc, WcError, WcOpcode, WcStatus};
pub use wr::{
    Destination, FlushLevel, MaskedSwap, Packet, Placement, PostError, RecvWr, Remote, RingError,
    SendWr, Sge, WindowBinding,
};
pub use xrcd::{XrcDomain, XrcdBuilder};
/// The crate of the traits of types that may lie in registered memory: `FromBytes` and `IntoBytes`.
pub use zerocopy;
