//! The data path as a program's own functions, for `tests/listing.rs`, which counts the
//! instructions that the compiler makes of them. It is compiled and never run.

use std::hint::black_box;
use uverbs::owned::{Buffer, OwnedCompletionQueue, OwnedQueuePair};
use uverbs::{
    CompletionQueue, Destination, Exclusive, Notify, PollError, PostError, QueuePair, RecvWr,
    Remote, SendWr, Sge, SharedReceiveQueue, ThreadDomain,
};

/// Requests that are posted together.
const BATCH: usize = 32;
/// Completions that are taken together.
const POLLED: u32 = 16;

/// Posts one write and rings.
#[unsafe(no_mangle)]
#[inline(never)]
fn listing_post_write(
    qp: &mut QueuePair,
    remote: Remote,
    sge: &Sge,
    id: u64,
) -> Result<(), PostError> {
    let mut batch = qp.send_batch()?;
    batch.push(SendWr::write(remote, std::slice::from_ref(sge)).id(id))?;
    // SAFETY: it never runs.
    unsafe { batch.ring() }.map_err(PostError::Ring)
}

/// The same under a thread domain.
#[unsafe(no_mangle)]
#[inline(never)]
fn listing_post_write_alone(
    qp: &mut QueuePair<Exclusive>,
    td: &mut ThreadDomain,
    remote: Remote,
    sge: &Sge,
) -> Result<(), PostError> {
    let mut batch = qp.send_batch()?;
    batch.push(SendWr::write(remote, std::slice::from_ref(sge)))?;
    // SAFETY: it never runs.
    unsafe { batch.ring(td) }.map_err(PostError::Ring)
}

/// Posts writes and rings once for all of them.
#[unsafe(no_mangle)]
#[inline(never)]
fn listing_post_writes(qp: &mut QueuePair, remote: Remote, sge: &Sge) -> Result<(), PostError> {
    let mut batch = qp.send_batch()?;
    for id in 0..BATCH as u64 {
        batch.push(SendWr::write(remote, std::slice::from_ref(sge)).id(id))?;
    }
    // SAFETY: it never runs.
    unsafe { batch.ring() }.map_err(PostError::Ring)
}

/// Posts one read.
#[unsafe(no_mangle)]
#[inline(never)]
fn listing_post_read(
    qp: &mut QueuePair,
    remote: Remote,
    sge: &Sge,
    id: u64,
) -> Result<(), PostError> {
    let mut batch = qp.send_batch()?;
    batch.push(SendWr::read(remote, std::slice::from_ref(sge)).id(id))?;
    // SAFETY: it never runs.
    unsafe { batch.ring() }.map_err(PostError::Ring)
}

/// Adds to one word of a peer.
#[unsafe(no_mangle)]
#[inline(never)]
fn listing_post_fetch_add(
    qp: &mut QueuePair,
    remote: Remote,
    sge: &Sge,
    id: u64,
) -> Result<(), PostError> {
    let mut batch = qp.send_batch()?;
    batch.push(SendWr::fetch_add(remote, 1, std::slice::from_ref(sge)).id(id))?;
    // SAFETY: it never runs.
    unsafe { batch.ring() }.map_err(PostError::Ring)
}

/// Sends several pieces of memory as one message.
#[unsafe(no_mangle)]
#[inline(never)]
fn listing_post_gather(qp: &mut QueuePair, sges: &[Sge; 4], id: u64) -> Result<(), PostError> {
    let mut batch = qp.send_batch()?;
    batch.push(SendWr::send(sges).id(id))?;
    // SAFETY: it never runs.
    unsafe { batch.ring() }.map_err(PostError::Ring)
}

/// Sends one message that lies in the request.
#[unsafe(no_mangle)]
#[inline(never)]
fn listing_post_inline(qp: &mut QueuePair, data: &[u8], id: u64) -> Result<(), PostError> {
    let mut batch = qp.send_batch()?;
    batch.push(SendWr::send(&[]).inline(data).id(id))?;
    // SAFETY: it never runs.
    unsafe { batch.ring() }.map_err(PostError::Ring)
}

/// The same under a thread domain.
#[unsafe(no_mangle)]
#[inline(never)]
fn listing_post_inline_alone(
    qp: &mut QueuePair<Exclusive>,
    td: &mut ThreadDomain,
    data: &[u8],
    id: u64,
) -> Result<(), PostError> {
    let mut batch = qp.send_batch()?;
    batch.push(SendWr::send(&[]).inline(data).id(id))?;
    // SAFETY: it never runs.
    unsafe { batch.ring(td) }.map_err(PostError::Ring)
}

/// Sends messages that lie in their requests, and rings once for all of them.
#[unsafe(no_mangle)]
#[inline(never)]
fn listing_post_inlines(qp: &mut QueuePair, data: &[u8]) -> Result<(), PostError> {
    let mut batch = qp.send_batch()?;
    for id in 0..BATCH as u64 {
        batch.push(SendWr::send(&[]).inline(data).id(id))?;
    }
    // SAFETY: it never runs.
    unsafe { batch.ring() }.map_err(PostError::Ring)
}

/// Sends one datagram.
#[unsafe(no_mangle)]
#[inline(never)]
fn listing_post_datagram(
    qp: &mut QueuePair,
    to: Destination<'_>,
    sge: &Sge,
    id: u64,
) -> Result<(), PostError> {
    let mut batch = qp.send_batch()?;
    batch.push(SendWr::send(std::slice::from_ref(sge)).to(to).id(id))?;
    // SAFETY: it never runs.
    unsafe { batch.ring() }.map_err(PostError::Ring)
}

/// Builds one write and drops it.
#[unsafe(no_mangle)]
#[inline(never)]
fn listing_build_write(qp: &mut QueuePair, remote: Remote, sge: &Sge) -> Result<(), PostError> {
    let mut batch = qp.send_batch()?;
    batch.push(SendWr::write(remote, std::slice::from_ref(sge)))
}

/// Posts one receive.
#[unsafe(no_mangle)]
#[inline(never)]
fn listing_post_receive(qp: &mut QueuePair, sge: &Sge, id: u64) -> Result<(), PostError> {
    let mut batch = qp.recv_batch()?;
    batch.push(RecvWr::new(std::slice::from_ref(sge)).id(id))?;
    // SAFETY: it never runs.
    unsafe { batch.ring() }.map_err(PostError::Ring)
}

/// Posts receives together, each into memory of its own.
#[unsafe(no_mangle)]
#[inline(never)]
fn listing_post_receives(qp: &mut QueuePair, sges: &[Sge; BATCH]) -> Result<(), PostError> {
    let mut batch = qp.recv_batch()?;
    for (sge, wr_id) in sges.iter().zip(0..) {
        batch.push(RecvWr::new(std::slice::from_ref(sge)).id(wr_id))?;
    }
    // SAFETY: it never runs.
    unsafe { batch.ring() }.map_err(PostError::Ring)
}

/// Posts one receive to a shared queue.
#[unsafe(no_mangle)]
#[inline(never)]
fn listing_post_shared_receive(
    srq: &mut SharedReceiveQueue,
    sge: &Sge,
    id: u64,
) -> Result<(), PostError> {
    let mut batch = srq.batch()?;
    batch.push(RecvWr::new(std::slice::from_ref(sge)).id(id))?;
    // SAFETY: it never runs.
    unsafe { batch.ring() }.map_err(PostError::Ring)
}

/// Posts receives to a shared queue together.
#[unsafe(no_mangle)]
#[inline(never)]
fn listing_post_shared_receives(
    srq: &mut SharedReceiveQueue,
    sges: &[Sge; BATCH],
) -> Result<(), PostError> {
    let mut batch = srq.batch()?;
    for (sge, wr_id) in sges.iter().zip(0..) {
        batch.push(RecvWr::new(std::slice::from_ref(sge)).id(wr_id))?;
    }
    // SAFETY: it never runs.
    unsafe { batch.ring() }.map_err(PostError::Ring)
}

/// Takes one completion.
#[unsafe(no_mangle)]
#[inline(never)]
fn listing_poll_one(cq: &mut CompletionQueue) -> Option<u64> {
    let mut completions = cq.poll().ok()?;
    let completion = completions.next()?;
    completion.is_success().then(|| completion.wr_id())
}

/// Takes several completions.
#[unsafe(no_mangle)]
#[inline(never)]
fn listing_poll_many(cq: &mut CompletionQueue) -> Result<u64, PollError> {
    let mut completions = cq.poll()?;
    let mut sum = 0;
    for _ in 0..POLLED {
        let Some(completion) = completions.next() else { break };
        if !completion.is_success() {
            return Ok(u64::MAX);
        }
        sum += completion.wr_id();
    }
    Ok(sum)
}

/// Asks for an event.
#[unsafe(no_mangle)]
#[inline(never)]
fn listing_arm(cq: &mut CompletionQueue) -> bool {
    cq.req_notify(Notify::Next).is_ok()
}

/// Posts one write of a buffer.
#[unsafe(no_mangle)]
#[inline(never)]
fn listing_post_owned_write(
    qp: &mut OwnedQueuePair<u64>,
    remote: Remote,
    buffer: Buffer,
    tag: u64,
) -> Result<(), PostError> {
    let mut batch = qp.send_batch()?;
    batch.push(SendWr::write(remote, &[]), buffer, tag)?;
    batch.ring().map_err(PostError::Ring)
}

/// Posts writes of buffers and rings once for all of them.
#[unsafe(no_mangle)]
#[inline(never)]
fn listing_post_owned_writes(
    qp: &mut OwnedQueuePair<u64>,
    remote: Remote,
    buffers: &mut Vec<Buffer>,
) -> Result<(), PostError> {
    let mut batch = qp.send_batch()?;
    for (buffer, tag) in buffers.drain(..).zip(0..) {
        batch.push(SendWr::write(remote, &[]), buffer, tag)?;
    }
    batch.ring().map_err(PostError::Ring)
}

/// Posts one receive into a buffer.
#[unsafe(no_mangle)]
#[inline(never)]
fn listing_post_owned_receive(
    qp: &mut OwnedQueuePair<u64>,
    buffer: Buffer,
    tag: u64,
) -> Result<(), PostError> {
    let mut batch = qp.recv_batch()?;
    batch.push(buffer, tag)?;
    batch.ring().map_err(PostError::Ring)
}

/// Posts receives into buffers together.
#[unsafe(no_mangle)]
#[inline(never)]
fn listing_post_owned_receives(
    qp: &mut OwnedQueuePair<u64>,
    buffers: &mut Vec<Buffer>,
) -> Result<(), PostError> {
    let mut batch = qp.recv_batch()?;
    for (buffer, tag) in buffers.drain(..).zip(0..) {
        batch.push(buffer, tag)?;
    }
    batch.ring().map_err(PostError::Ring)
}

/// Takes the buffers of completions.
#[unsafe(no_mangle)]
#[inline(never)]
fn listing_poll_owned(
    cq: &mut OwnedCompletionQueue<u64>,
    back: &mut Vec<Buffer>,
) -> Result<usize, PollError> {
    cq.poll_each(usize::MAX, |request| {
        if let Ok((buffer, _)) = request.into_buffer() {
            back.push(buffer);
        }
    })
}

fn main() {
    // They are kept because their addresses are used.
    black_box(listing_post_write as *const ());
    black_box(listing_post_write_alone as *const ());
    black_box(listing_post_writes as *const ());
    black_box(listing_post_read as *const ());
    black_box(listing_post_fetch_add as *const ());
    black_box(listing_post_gather as *const ());
    black_box(listing_post_inline as *const ());
    black_box(listing_post_inline_alone as *const ());
    black_box(listing_post_inlines as *const ());
    black_box(listing_post_datagram as *const ());
    black_box(listing_build_write as *const ());
    black_box(listing_post_receive as *const ());
    black_box(listing_post_receives as *const ());
    black_box(listing_post_shared_receive as *const ());
    black_box(listing_post_shared_receives as *const ());
    black_box(listing_poll_one as *const ());
    black_box(listing_poll_many as *const ());
    black_box(listing_arm as *const ());
    black_box(listing_post_owned_write as *const ());
    black_box(listing_post_owned_writes as *const ());
    black_box(listing_post_owned_receive as *const ());
    black_box(listing_post_owned_receives as *const ());
    black_box(listing_poll_owned as *const ());
}
