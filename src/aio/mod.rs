//! Requests as futures, in any event loop.
//!
//! A [`CompletionQueue`] comes with a [`Driver`], which is spawned on an event loop that implements
//! [`Readiness`]; with the feature `tokio`, `aio::tokio` does that. [`QueuePair`]s that are made on the
//! queue answer a future for each request, which takes the memory that the request works on and
//! gives it back; see [`owned`](crate::owned) for why that is sound whatever becomes of the future.
//!
//! - **Full queues** make futures wait, in line.
//! - **A future that is dropped** before its request was posted takes it back. Afterwards the
//!   request goes on, and its memory returns to its pool when it is over.
//! - **Deadlines** are futures that are dropped: put them into the event loop's timeout. The
//!   connection is as it was, and so is the request: [`QueuePair::abort`] ends both.
//! - **Streams**: an [`Inbox`] of messages, and with tokio one of asynchronous events. They have a
//!   `next` of their own, and with the feature `stream` they are what the `futures` crates call one.
//! - **A request that fails** breaks its connection. What was posted is flushed, what was not fails
//!   with the first one's status.
#![deny(unsafe_code)]

mod driver;
mod inbox;
mod deferred;
mod op;
mod queue;
#[cfg(feature = "stream")]
mod stream;
mod inflight;
#[cfg(feature = "tokio")]
pub mod tokio;
mod poll_loop;
mod waiters;

pub use driver::{CompletionQueue, Driver, Readiness};
pub use inbox::{Inbox, Message};
pub use op::{AtomicOp, Finished, Op, OpError, OpErrorKind};
pub use queue::{QueuePair, RingToken, SharedReceiveQueue};
