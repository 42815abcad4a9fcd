//! Futures in forked children: they end, wait for no thread of the parent, and leave its event loop
//! alone.

use crate::fork::in_child;
use crate::pair::PATIENCE;
use crate::tasks::{Half, ask, both, connected, echo_back, pair, runtime};
use crate::verdict::{Stop, Verdict, trials};
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker};
use uverbs::PostError;
use uverbs::aio::OpErrorKind;
use uverbs::aio::tokio::{Events, Registered};

trials![child_forked_from_busy_threads_ends, child_leaves_the_parents_event_loop_alone];

/// Threads of the parent use the queues all the time, so that a child finds locks held by threads that it does not
/// have.
fn child_forked_from_busy_threads_ends() -> Verdict {
    const CHILDREN: usize = 40;
    crate::env::rnr_wait()?;
    let runtime = runtime(1)?;
    let (a, b) = runtime.block_on(async { pair() })?;
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for half in [&a, &b] {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    std::hint::black_box((half.qp.in_flight(), half.cq.unmatched()));
                }
            });
        }
        let forked = || {
            for _ in 0..CHILDREN {
                let mut read = a.qp.recv(a.pool.take().expect("a buffer"));
                let mut cx = Context::from_waker(Waker::noop());
                assert!(Pin::new(&mut read).poll(&mut cx).is_pending());
                let mut sent = a.qp.send_inline(b"late");
                let value = (read, a.qp.clone(), a.cq.clone());
                let (read, ..) = in_child(value, |(read, qp, cq)| {
                    assert_eq!((qp.in_flight(), cq.unmatched()), (0, 0));
                    assert!(qp.abort().unwrap_err().is_forked());
                    let kind = match Pin::new(&mut sent).poll(&mut cx) {
                        Poll::Ready(Err(error)) => error.kind,
                        other => panic!("{other:?}"),
                    };
                    assert_eq!(kind, OpErrorKind::Post(PostError::Forked));
                    drop((read, sent, qp, cq));
                    Ok(())
                })?;
                // A dropped receive stays posted: a message is sent for it.
                drop(read);
                runtime.block_on(async { b.qp.send_inline(b"for it").await.map(drop) })?;
            }
            Ok(())
        };
        let verdict: Verdict = forked();
        done.store(true, Ordering::Relaxed);
        verdict
    })?;
    // The parent goes on.
    runtime.block_on(async {
        let work = both(ask(&a, 20), echo_back(&b, 20));
        match tokio::time::timeout(PATIENCE, work).await {
            Ok(verdict) => verdict,
            Err(_) => Err(Stop::fail("the parent's futures wait for ever")),
        }
    })
}

/// A file that the child removes from an epoll instance is removed in the parent, too.
fn child_leaves_the_parents_event_loop_alone() -> Verdict {
    crate::env::rnr_wait()?;
    let runtime = runtime(0)?;
    runtime.block_on(async {
        let (a, b) = pair()?;
        let (cq, driver) = a.context.cq_builder(128).build_async(Registered::new)?;
        let half = Half::on(a.context.clone(), cq)?;
        let other = Half::new()?;
        connected(&half, &other)?;
        let events = Events::new(&a.context)?;
        let (driver, events) = in_child((driver, events), |both| {
            drop(both);
            Ok(())
        })?;
        tokio::spawn(driver);
        let work = both(ask(&half, 5), echo_back(&other, 5));
        match tokio::time::timeout(PATIENCE, work).await {
            Ok(verdict) => verdict?,
            Err(_) => return Err(Stop::fail("the driver hears of nothing")),
        }
        drop(events);
        both(ask(&a, 5), echo_back(&b, 5)).await
    })
}
