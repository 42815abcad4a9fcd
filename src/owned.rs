//! Posting without `unsafe`: requests take the memory that they work on, and completions give it back.
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let context = uverbs::Context::open(&uverbs::devices()?[0])?;
//! # let remote = uverbs::Remote { addr: 0, rkey: uverbs::Rkey(0) };
//! use uverbs::owned::OwnedCompletionQueue;
//! use uverbs::{QpType, SendWr};
//!
//! let pd = context.alloc_pd()?;
//! let pool = pd.buffer_pool_builder(4096).build()?;
//! let mut cq = OwnedCompletionQueue::new(context.cq_builder(64).build()?);
//! let qp = pd.qp_builder(cq.queue(), cq.queue(), QpType::RC).max_send_wr(8).build()?;
//! let mut qp = cq.adopt(qp)?;
//! // … `qp.endpoint`, `qp.handshake` …
//! let buffer = pool.copy(b"hello, peer")?;
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
//! # When to use it
//!
//! In a thread that polls in a loop of its own. Where requests have deadlines, wait for each other or share the
//! thread with other input, [`aio`](crate::aio) has the same buffers in futures. Where memory is registered once
//! and outlives its queue pairs, and for memory windows, which are not bound here, [the
//! verbs](crate#the-verbs-themselves) do.
//!
//! # Costs
//!
//! On mlx5 a request costs 30 instructions more than one by number, and its completion 35: a slot of the loan
//! table, a comparison of protection domains, and moving the memory in and out. It costs no lock, no allocation and
//! no system call. [`poll_each`](OwnedCompletionQueue::poll_each) moves less than
//! [`poll`](OwnedCompletionQueue::poll).
//!
//! # Rules
//!
//! - A completion queue [adopts](OwnedCompletionQueue::adopt) a queue pair only if it has room for all of that pair's
//!   completions, so that it cannot overflow.
//! - Memory comes back with its request's completion; that of an unsignaled request with the completion of a later one.
//! - Memory lent to a queue pair that is dropped is freed when the kernel has confirmed the end of the queue pair, and
//!   otherwise [leaked and counted](crate::Context::leaked).
//!
//! Requests on borrowed memory are posted in a [scope](OwnedQueuePair::scope); a program's own registered
//! memory is lent as a [`RegisteredBuffer`]; requests without a completion of their own are pushed with
//! [`push_unsignaled`](OwnedSendBatch::push_unsignaled).
//!
//! # One thread polls, others post
//!
//! Posting takes `&mut` of a queue pair, and any thread may have it. Polling takes `&mut` of the
//! [`OwnedCompletionQueue`], and so do [`adopt`](OwnedCompletionQueue::adopt),
//! [`reset`](OwnedQueuePair::reset), [`close`](OwnedQueuePair::close) and [`scope`](OwnedQueuePair::scope). The
//! thread that polls therefore owns the completion queue, and does these for the others: they send it the queue
//! pair, and wake it. Two things need no completion queue: a [`CqControl`](crate::CqControl) creates queue pairs
//! for it, and dropping an [`OwnedQueuePair`] frees what it was lent, but discards what was not polled yet.
//!
//! A thread that sleeps in [`CompletionChannel::wait`](crate::CompletionChannel::wait) is woken by completions
//! alone. Either it waits with a timeout, and looks after each, or it waits for the channel's file and an
//! `eventfd(2)` at once:
//!
//! ```no_run
//! # fn f(context: &uverbs::Context, pd: &uverbs::ProtectionDomain) -> Result<(), Box<dyn std::error::Error>> {
//! use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
//! use rustix::io::{read, retry_on_intr, write};
//! use std::sync::{Arc, mpsc};
//! use std::thread;
//! use uverbs::owned::{OwnedCompletionQueue, OwnedQueuePair};
//! use uverbs::{Notify, QpType, QueuePair};
//!
//! /// A task for the thread that polls, from another one.
//! enum Job {
//!     Adopt(QueuePair, mpsc::Sender<OwnedQueuePair<u64>>),
//!     Close(OwnedQueuePair<u64>),
//! }
//!
//! let channel = context.create_comp_channel()?;
//! let cq = context.cq_builder(256).channel(&channel).build()?;
//! let control = cq.control();
//! let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
//! let (jobs, new_jobs) = mpsc::channel();
//!
//! let woken = wake.clone();
//! let poller = thread::spawn(move || -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
//!     let mut cq = OwnedCompletionQueue::new(cq);
//!     loop {
//!         // Completions that come from here on raise an event.
//!         cq.req_notify(Notify::Next)?;
//!         // Before the poll: `close` leaves completions for it.
//!         loop {
//!             match new_jobs.try_recv() {
//!                 Ok(Job::Adopt(qp, to)) => match cq.adopt(qp) {
//!                     // Dropped again, if nobody waits for it.
//!                     Ok(qp) => drop(to.send(qp)),
//!                     // `to` is dropped, and who waits for the queue pair gets an error.
//!                     Err(refused) => eprintln!("{refused}"),
//!                 },
//!                 Ok(Job::Close(qp)) => qp.close(&mut cq)?,
//!                 Err(mpsc::TryRecvError::Empty) => break,
//!                 Err(mpsc::TryRecvError::Disconnected) => return Ok(()),
//!             }
//!         }
//!         for done in cq.poll()? {
//!             println!("{}: {}", done.tag, done.outcome.status);
//!         }
//!         let mut files = [PollFd::new(&channel, PollFlags::IN), PollFd::new(&woken, PollFlags::IN)];
//!         retry_on_intr(|| poll(&mut files, None))?;
//!         while channel.try_next()?.is_some() {}
//!         // It fails if only a completion has come.
//!         let _ = read(&woken, &mut [0; 8]);
//!     }
//! });
//! // The job first, and then what wakes the thread.
//! let ask = |job| -> Result<(), Box<dyn std::error::Error>> {
//!     jobs.send(job)?;
//!     write(&wake, &1u64.to_ne_bytes())?;
//!     Ok(())
//! };
//!
//! // Any thread:
//! let qp = pd.qp_builder(&control, &control, QpType::RC).max_send_wr(16).build()?;
//! let (to, adopted) = mpsc::channel();
//! ask(Job::Adopt(qp, to))?;
//! let qp = adopted.recv()?;
//! // … `qp.endpoint`, `qp.handshake`, `qp.send_batch` …
//! ask(Job::Close(qp))?;
//! // When the last sender is dropped, and the thread is woken once more, it ends.
//! # drop((poller, jobs)); Ok(()) }
//! ```
//!
//! # Why this is sound
//!
//! The caller of [`SendBatch::ring`](crate::SendBatch#what-the-caller-of-ring-promises) promises that what a
//! request names stays valid until the request is over, that what the device writes is not borrowed
//! meanwhile, that a memory window outlives its bindings, and that it knows which request a completion
//! belongs to. Here windows are not bound, the library chooses the `wr_id`s, and the memory moves into a
//! loan table when its request is posted. It comes out of the table
//!
//! - when the completion of its request is polled. The `wr_id`, which the device carries from the request
//!   to the completion, takes one loan back, once, and only in the completion's own queue pair. The
//!   `wr_id` of another request, queue pair or time takes nothing back;
//! - when the completion of a later request of the same send queue is polled, if the request is unsignaled.
//!   A send queue completes in order, so at that time the request is over; if it had failed, it would have
//!   had a completion of its own before;
//! - when the kernel has confirmed that the device is done with the queue: it was reset or destroyed, or the
//!   device is gone. If the kernel confirms nothing, the memory is leaked and
//!   [counted](crate::Context::leaked).
//!
//! The first two depend on the device alone, and not on the program: it cannot forge a completion. They do
//! not depend on destructors either. A queue that is forgotten keeps what it was lent; a batch that is
//! forgotten gives it back with a later batch, because the device was not told of it; a forked child keeps
//! what it inherited, and can neither post nor poll. Nor do they depend on destructors of the program: those run when
//! the kernel has confirmed the end. They do not depend on the peer: a [`Buffer`] is a slice
//! because its pool grants peers no right to write, and a [`RegionSlice`], which a peer may write, is no
//! slice.
//!
//! Of a [`RegisteredBuffer`] the library knows only the value. That its bytes stay registered and unborrowed
//! while it is lent is what the `unsafe impl` promises; that it *is* lent until the device is done is what
//! the library adds.
#![deny(unsafe_code)]

mod buffer;
mod completion;
mod cq;
mod lending;
mod program_buffer;
mod qp;
mod qp_map;
mod region_slice;
mod scope;
mod srq;

pub use buffer::{Buffer, BufferError, BufferPool, BufferPoolBuilder, SharedBuffer};
pub use completion::{Finished, Outcome, VisitedCompletion};
pub(crate) use cq::Visit;
pub use cq::{OwnedCompletionQueue, OwnedCompletions};
#[cfg(test)]
pub(crate) use lending::lent;
pub(crate) use lending::{
    AskedMemory, Lent, Loans, NamedBytes, memory_and_tag, open_buffer, tag_mut,
};
pub use lending::{Lend, LendMut, Memory, PushError, RegionSge};
pub use program_buffer::{ProgramBuffer, RegisteredBuffer};
pub use qp::{OwnedQueuePair, OwnedRecvBatch, OwnedSendBatch};
pub use region_slice::RegionSlice;
pub use scope::{Ending, LendScoped, Pending, RegionRef, Scope, ScopeError, ScopedRegion};
pub use srq::OwnedSharedReceiveQueue;
