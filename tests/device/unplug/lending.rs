//! Memory that is lent while the device goes: it comes back when the kernel has destroyed what the
//! device reached it through, and not when it first says that the device is gone.

use super::Awaited;
use crate::env;
use crate::lent::{Half, pair_of};
use crate::pair::PATIENCE;
use crate::verdict::{Stop, Verdict};
use std::time::{Duration, Instant};
use uverbs::owned::{BufferPool, Ending, ScopeError};
use uverbs::{Access, Context, Device, Errno, PostError, SendWr, WcStatus};

/// Whether the kernel began to take the device away: from then on it answers `EIO` to this, which no
/// driver has a part in, and has yet to walk what there is. Any other answer is one of its tables,
/// from which addresses are taken a while before.
fn is_taken(context: &Context, deadline: Instant) -> Verdict<bool> {
    if Instant::now() > deadline {
        return Err(Stop::fail("nobody took the device away"));
    }
    Ok(context.query_gid(env::port(), 0).is_err_and(|error| error.errno() == Errno::IO))
}

/// When a worker gives up waiting for the device to be taken away.
fn deadline() -> Instant {
    Instant::now() + 3 * PATIENCE
}

/// Whether all of the pool is back, and nothing was given up.
fn is_whole(pool: &BufferPool, count: usize, context: &Context) -> Verdict {
    match (pool.idle(), context.leaked()) {
        (idle, 0) if idle == count => Ok(()),
        (idle, leaked) => Err(Stop::fail(format!(
            "{idle} of {count} buffers are back, {leaked} objects given up"
        ))),
    }
}

/// Writes all the time, and lets go of everything as soon as the device is taken away.
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
            // The device may have been taken away since the loop looked.
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

/// Ends a scope, with a request that the peer never answers, as soon as the device is taken away.
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
    // The device writes there no more.
    local.fill(2);
    drop(inbox);
    let Half { qp, pool, context, .. } = a;
    let count = pool.idle();
    drop(qp);
    is_whole(&pool, count, &context)
}
