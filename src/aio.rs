//! Requests as futures, in any event loop.
//!
//! An [`AsyncCompletionQueue`] comes with a [`Driver`], a future that is spawned on an event loop which implements
//! [`Readiness`]; with the feature `tokio`, `aio::tokio` does. [`build_async`](crate::CqBuilder::build_async) makes
//! both, and the queue [adopts](AsyncCompletionQueue::adopt) queue pairs that were built with it. An
//! [`AsyncQueuePair`] returns a future for each request. The future takes the memory that the request works on and
//! gives it back. [`owned`](crate::owned#why-this-is-sound) says why this is sound even if the future is dropped or
//! forgotten.
//!
//! ```no_run
//! # #[cfg(feature = "tokio")]
//! # async fn f(context: &uverbs::Context) -> Result<(), Box<dyn std::error::Error>> {
//! use uverbs::QpType;
//!
//! let (cq, _driver) = context.cq_builder(64).spawn()?;
//! let pd = context.alloc_pd()?;
//! let pool = pd.buffer_pool_builder(4096).build()?;
//! let qp = pd.qp_builder(&cq, &cq, QpType::RC).max_send_wr(16).max_recv_wr(16).build()?;
//! let qp = cq.adopt(qp)?;
//! let gid = context.default_gid(1)?;
//! uverbs::aio::tokio::connect(&qp, "peer:18515", &gid).await?;
//! qp.send(pool.copy(b"hello, peer")?).await?;
//! let received = qp.recv(pool.take()?).await?;
//! println!("{:?}", &*received.memory);
//! # Ok(()) }
//! ```
//!
//! # When to use it
//!
//! In a program that serves many connections, or whose requests have deadlines, wait for each other or stand beside
//! other input. A thread that does nothing but messages polls faster with [`owned`](crate::owned).
//!
//! # Costs
//!
//! On mlx5 posting a write as a future costs about 140 instructions more than with [`owned`](crate::owned), and its
//! completion about 100. A future of a [`Worker`] takes no mutex. A [list](AsyncQueuePair::post_all) of requests takes
//! one doorbell. A driver with nothing to do sleeps in the event loop; over soft-RoCE a message of a ping-pong takes
//! 3.3 to 5.1 system calls. With [`Blocking`] it sleeps in the read of the next event, which is one call less.
//!
//! # Rules
//!
//! - **Full queues**: futures wait for room, in the order in which they were first polled.
//! - **Dropped futures**: before its request is posted, a future takes it back. Afterwards the request goes
//!   on, and its memory is dropped when it is over.
//! - **Deadlines**: put the future into the event loop's timeout. The connection and the request stay as
//!   they are; [`AsyncQueuePair::abort`] ends both.
//! - **Cores**: a [`Worker`] has a thread domain, a completion queue and queue pairs for one thread, and its
//!   futures take no mutex.
//! - **Connections by address**: [`cm`].
//! - **Lists**: [`post_all`](AsyncQueuePair::post_all) posts many requests with one doorbell.
//! - **Streams**: an [`Inbox`] of messages, and with tokio one of asynchronous events. With the feature
//!   `stream` they implement the traits of the `futures` crates.
//! - **Failures**: a request that fails breaks its connection. Requests in flight are flushed; others fail
//!   with the status of the first. The queue pair cannot be connected again: the program creates another one, and
//!   the completion queue [adopts](AsyncCompletionQueue::adopt) it. [`OpErrorKind`] shows what follows from each error.
#![deny(unsafe_code)]

pub mod cm;
mod cq;
mod deferred;
mod driver;
mod inbox;
mod inflight;
mod list;
mod locking;
mod op;
mod poll_loop;
mod post_all;
mod qp;
mod queue;
mod srq;
#[cfg(feature = "stream")]
mod stream;
#[cfg(feature = "tokio")]
pub mod tokio;
mod worker;

pub use cq::AsyncCompletionQueue;
pub use driver::{Blocking, Driver, Readiness};
pub use inbox::Inbox;
pub use locking::Locking;
pub use op::{AtomicOp, Op, OpError, OpErrorKind, Request, Transfer};
pub use post_all::PostAll;
pub use qp::AsyncQueuePair;
pub use srq::AsyncSharedReceiveQueue;
pub use worker::Worker;
