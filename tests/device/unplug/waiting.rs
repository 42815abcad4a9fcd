//! Futures whose device goes: all of them end, even if no request completes any more.

use super::Awaited;
use crate::tasks::{Half, connected, runtime};
use crate::verdict::{Stop, Verdict};
use std::time::Duration;
use uverbs::aio::tokio::Events;
use uverbs::aio::{OpError, OpErrorKind};
use uverbs::{Access, Context, Device, Errno, EventType, WcStatus};

/// Longer than the longest removal of a device.
const PATIENCE: Duration = Duration::from_secs(100);

/// Whether a request ended in a way that the removal of its device explains. The kernel destroys the objects of one
/// file after the other: the target of a write may lose its region before its queue pair, and then answers that the
/// write has no right.
fn is_farewell<L>(failed: &OpError<L>) -> bool {
    const OF_A_REMOVAL: [WcStatus; 4] = [
        WcStatus::WR_FLUSH_ERR,
        WcStatus::RETRY_EXC_ERR,
        WcStatus::REM_ACCESS_ERR,
        WcStatus::REM_OP_ERR,
    ];
    match failed.kind {
        OpErrorKind::Status(status) => OF_A_REMOVAL.contains(&status),
        OpErrorKind::DriverGone | OpErrorKind::Earlier(_) => true,
        _ => false,
    }
}

pub(super) fn futures(device: &Device, awaited: Awaited) -> Verdict {
    runtime(0)?.block_on(async {
        match tokio::time::timeout(PATIENCE, all(device, awaited)).await {
            Ok(verdict) => verdict,
            Err(_) => Err(Stop::fail("futures wait for a device that is gone")),
        }
    })
}

async fn all(device: &Device, awaited: Awaited) -> Verdict {
    let make = || -> Verdict<_> {
        let context = Context::open(device)?;
        let (cq, driver) = context.cq_builder(128).spawn()?;
        Ok((Half::on(context, cq)?, driver))
    };
    let ((quiet, first), (busy, second)) = (make()?, make()?);
    connected(&quiet, &busy)?;
    let count = quiet.pool.idle();
    let events = tokio::spawn(stream(quiet.context.clone()));
    // No message arrives for this one, so only the end of its channel wakes it.
    let take = |half: &Half| half.pool.take().expect("a buffer");
    let received = tokio::spawn(quiet.qp.recv(take(&quiet)));
    let target = quiet.pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u8>(1024)?;
    let remote = target.remote(0)?;
    let mut awaited = Some(awaited);
    let mut completed = 0;
    let failed = loop {
        match busy.qp.write(remote, take(&busy)).await {
            Ok(_) => {
                completed += 1;
                drop(awaited.take());
            }
            Err(failed) => break failed,
        }
        // Other tasks have to run, too.
        tokio::time::sleep(Duration::from_millis(1)).await;
    };
    if completed == 0 || !is_farewell(&failed) {
        return Err(Stop::fail(format!("after {completed} requests: {failed:?}")));
    }
    drop(failed);
    match received.await? {
        Err(failed) if is_farewell(&failed) => {}
        other => return Err(Stop::fail(format!("the receive: {other:?}"))),
    }
    events.await??;
    for driver in [first, second] {
        match driver.await? {
            Err(error) if error.errno() == Errno::IO => {}
            other => return Err(Stop::fail(format!("a driver ended with {other:?}"))),
        }
    }
    let late = quiet.qp.recv(take(&quiet)).await;
    if !late.is_err_and(|failed| is_farewell(&failed) && failed.memory.is_some()) {
        return Err(Stop::fail("a request was taken"));
    }
    for half in [quiet, busy] {
        let Half { qp, pool, context, .. } = half;
        drop(qp);
        if (pool.idle(), context.leaked()) != (count, 0) {
            let (idle, leaked) = (pool.idle(), context.leaked());
            return Err(Stop::fail(format!("{idle} of {count} are back, {leaked} given up")));
        }
    }
    Ok(())
}

/// The stream reports the end of the device, and then ends.
async fn stream(context: Context) -> Verdict {
    let mut events = Events::new(&context)?;
    let mut fatal = false;
    loop {
        match events.next().await {
            Ok(event) => fatal |= event.kind == EventType::DEVICE_FATAL,
            Err(error) if fatal && error.errno() == Errno::IO => return Ok(()),
            Err(error) => return Err(error.into()),
        }
    }
}
