//! Memory that is lent while the device goes: it comes back when the kernel has destroyed the objects through which the
//! device reached it, and not already at the first report that the device is gone.

use super::Awaited;
use crate::env;
use crate::lent::{Half, pair_of};
use crate::pair::PATIENCE;
use crate::verdict::{Stop, Verdict};
use std::time::{Duration, Instant};
use uverbs::owned::{BufferPool, Ending, ScopeError};
use uverbs::{Access, Context, Device, Errno, PostError, SendWr, WcStatus};

/// Whether the kernel has begun to remove the device. From then on it answers `EIO` to this command, in which no driver
/// takes part, and has yet to destroy the objects. Any other answer comes from one of its tables, from which addresses
/// are removed a while before.
fn is_taken(context: &Context, deadline: Instant) -> Verdict<bool> {
    if Instant::now() > deadline {
        return Err(Stop::fail("the lab did not remove the device"));
    }
    Ok(context.query_gid(env::port(), 0).is_err_and(|error| error.errno() == Errno::IO))
}

/// The time at which a worker gives up its wait for the removal.
fn deadline() -> Instant {
    Instant::now() + 3 * PATIENCE
}

/// Whether all buffers of the pool are back, and no object was given up.
fn is_whole(pool: &BufferPool, count: usize, context: &Context) -> Verdict {
    match (pool.idle(), context.leaked()) {
        (idle, 0) if idle == count => Ok(()),
        (idle, leaked) => Err(Stop::fail(format!(
            "{idle} of {count} buffers are back, {leaked} objects given up"
        ))),
    }
}

/// Writes all the time, and drops everything as soon as the kernel removes the device.
pub(super) fn owned(device: &Device, awaited: Awaited) -> Verdict {
    let make = || Half::on(Context::open(device)?);
    let (mut a, mut b) = pair_of(make()?, make()?)?;
    let count = a.pool.idle();
    let mut target = b.pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u8>(4096)?;
    target.copy_from(0, &[7; 4096])?;
    let remote = target.remote(0)?;
    // A receive that no message ever arrives for.
    let mut batch = b.qp.recv_batch()?;
    batch.push(b.pool.take().expect("a buffer"), 0).map_err(|refused| refused.error)?;
    batch.ring()?;
    let mut awaited = Some(awaited);
    let mut completed = 0;
    let deadline = deadline();
    while !is_taken(&a.context, deadline)? {
        let mut batch = a.qp.send_batch()?;
        while let Ok(buffer) = a.pool.take() {
            match batch.push(SendWr::write(remote, &[]), buffer, 0).map_err(|refused| refused.error)
            {
                Ok(()) => {}
                Err(PostError::Full) => break,
                Err(error) => return Err(error.into()),
            }
        }
        if let Err(error) = batch.ring() {
            // The kernel may have begun the removal since the loop's check.
            if is_taken(&a.context, deadline)? {
                break;
            }
            return Err(error.into());
        }
        completed += a.cq.poll()?.filter(|done| done.outcome.status == WcStatus::SUCCESS).count();
        if completed > 0 {
            drop(awaited.take());
        }
    }
    let (Half { qp: writer, pool, context, .. }, Half { qp: reader, .. }) = (a, b);
    drop((writer, reader));
    is_whole(&pool, count, &context)?;
    if completed == 0 {
        return Err(Stop::fail("nothing ever completed"));
    }
    Ok(())
}

/// Ends a scope, with a request that the peer never answers, as soon as the kernel removes the device.
pub(super) fn scope(device: &Device, awaited: Awaited) -> Verdict {
    let make = || Half::on(Context::open(device)?);
    let (mut a, b) = pair_of(make()?, make()?)?;
    let target = b.pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u8>(4096)?;
    let remote = target.remote(0)?;
    let (mut local, mut inbox) = (vec![1u8; 4096], a.pool.take().expect("a buffer"));
    let context = a.context.clone();
    let ended = a.qp.scope(&mut a.cq, |scope| -> Verdict {
        scope.drain_timeout(Duration::ZERO);
        let whole = scope.register(&a.pd, &mut local)?;
        let read = scope.post(SendWr::read(remote, &[]), whole)?;
        let (_, outcome) = scope.wait(read)?;
        assert_eq!(outcome.status, WcStatus::SUCCESS);
        let _ = scope.recv(&mut inbox)?;
        drop(awaited);
        let deadline = deadline();
        while !is_taken(&context, deadline)? {
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    });
    match ended {
        Err(ScopeError::Cancelled { value, ending: Ending::Flushed | Ending::Reset }) => value?,
        other => return Err(Stop::fail(format!("the scope ended as {other:?}"))),
    }
    assert!(local.iter().all(|byte| *byte == 0));
    // The device does not write there any more.
    local.fill(2);
    drop(inbox);
    let Half { qp, pool, context, .. } = a;
    let count = pool.idle();
    drop(qp);
    is_whole(&pool, count, &context)
}
