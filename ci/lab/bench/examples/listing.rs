//! The data path as a program's own functions, for `tests/listing.rs`, which counts the
//! instructions that the compiler makes of them. It is compiled and never run.

use std::hint::black_box;
use uverbs::owned::{Buffer, OwnedCompletionQueue, OwnedQueuePair};
use uverbs::{
    CompletionQueue, Exclusive, PollError, PostError, QueuePair, Recv, Remote, SendWr, Sge,
    SharedReceiveQueue, ThreadDomain,
};

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
    unsafe { batch.ring() }
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
    unsafe { batch.ring(td) }
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
    batch.push(Recv { wr_id: id, sges: std::slice::from_ref(sge) })?;
    // SAFETY: it never runs.
    unsafe { batch.ring() };
    Ok(())
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
    batch.push(Recv { wr_id: id, sges: std::slice::from_ref(sge) })?;
    // SAFETY: it never runs.
    unsafe { batch.ring() };
    Ok(())
}

/// Takes one completion.
#[unsafe(no_mangle)]
#[inline(never)]
fn listing_poll_one(cq: &mut CompletionQueue) -> Option<u64> {
    let mut completions = cq.poll().ok()?;
    let completion = completions.next()?;
    completion.is_success().then(|| completion.wr_id())
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
    batch.ring()
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
    batch.ring();
    Ok(())
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
    black_box(listing_build_write as *const ());
    black_box(listing_post_receive as *const ());
    black_box(listing_post_shared_receive as *const ());
    black_box(listing_poll_one as *const ());
    black_box(listing_post_owned_write as *const ());
    black_box(listing_post_owned_receive as *const ());
    black_box(listing_poll_owned as *const ());
}
