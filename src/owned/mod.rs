//! Posting without `unsafe`: requests take the memory that they work on, and completions give it
//! back.
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let context = uverbs::Context::open(&uverbs::devices()?[0])?;
//! # let remote = uverbs::Remote { addr: 0, rkey: uverbs::Rkey(0) };
//! use uverbs::owned::OwnedCompletionQueue;
//! use uverbs::{QpType, SendWr};
//!
//! let pd = context.alloc_pd()?;
//! let pool = pd.buffer_pool(4096).build()?;
//! let mut cq = OwnedCompletionQueue::new(context.create_cq(64).build()?);
//! let qp = pd.create_qp(cq.queue(), cq.queue(), QpType::RC).max_send_wr(8).build()?;
//! let mut qp = cq.adopt(qp)?;
//! // … `qp.endpoint`, `qp.handshake` …
//! let buffer = pool.copy(b"hello, peer").ok_or("no buffer left")?;
//! let mut batch = qp.send_batch()?;
//! batch.push(SendWr::write(remote, &[]), buffer, "the first")?;
//! batch.ring()?;
//! let mut completions = cq.poll()?;
//! while let Some(done) = completions.next() {
//!     println!("{}: {}", done.tag, done.outcome.status);
//!     let _again = done.memory.into_buffer();
//! }
//! # Ok(()) }
//! ```
//!
//! # Why this is sound
//!
//! [`SendBatch::ring`](crate::SendBatch#what-the-caller-of-ring-promises) asks of its caller that what
//! a request names stays valid until the request is over, that what the device writes is not borrowed
//! meanwhile, that a memory window outlives its bindings, and that the caller knows which request a
//! completion is of. Here no windows are bound, the library chooses the `wr_id`s, and the memory is
//! moved into a table when it is posted, and comes out of it
//!
//! - when its own completion is polled: the number that the device carries from the request to the
//!   completion opens one slot, once, and only if it comes from the queue pair that it was posted
//!   to, so that numbers of other requests, other queue pairs and earlier times open nothing;
//! - or when the kernel confirmed that the device is done with the queue: that it was reset, that
//!   it is destroyed, or that the device is gone. If the kernel confirms nothing, the memory is
//!   leaked and [counted](crate::Context::leaked).
//!
//! Nothing depends on a destructor that runs: a queue that is forgotten keeps what it was lent, a
//! batch that is forgotten gives it back with a later one, and a child of a fork keeps what
//! it inherited. Nothing depends on the peer, either: a [`Buffer`] is a slice because its pool
//! grants peers no right to write, and a [`RegionSlice`], which a peer may write, is none.
//!
//! What the layer adds to a request is a slot taken and given back, a look at whose memory it is,
//! and the memory's way in and out: no lock, no allocation, no system call. Who counts instructions
//! [visits completions](OwnedCompletionQueue::poll_each) instead of having them handed out.
#![deny(unsafe_code)]

mod buffer;
mod completion;
mod cq;
mod lending;
mod memory;
mod queue;
mod qp_map;
mod scope;
mod srq;

pub use buffer::{Buffer, BufferPool, BufferPoolBuilder, SharedBuffer};
pub use completion::{Done, Outcome, Settled};
pub use cq::{AdoptError, OwnedCompletionQueue, OwnedCompletions};
pub use lending::Refused;
pub use memory::{Lend, LendMut, Memory, RegionSlice};
pub use queue::{OwnedQueuePair, OwnedRecvBatch, OwnedSendBatch};
pub use scope::{Ending, Held, Local, Part, Pending, Scope, ScopeError};
pub use srq::OwnedSharedReceiveQueue;
