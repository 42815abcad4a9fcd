//! The memory of requests is freed in any order of drops, in any thread.

use super::futures::{Futures, Kind, cx, for_each_kind};
use super::owned::Owned;
use crate::aio::{OpError, OpErrorKind};
use crate::owned::SharedBuffer;
use crate::uverbs::scripted::Role;
use crate::{SendWr, WcStatus};
use std::future::Future;
use std::pin::Pin;
use std::sync::mpsc::channel;
use std::task::Poll;
use std::thread;

for_each_kind! {
    a_future_dropped_at_any_step_frees_its_memory
    queue_driver_and_futures_can_be_dropped_in_any_order
}

/// Before it is polled, while it waits for room, when it is posted, and when it is over: each time the buffer
/// goes back to the pool when the device is done with it.
fn a_future_dropped_at_any_step_frees_its_memory<S: Kind>() {
    let mut futures = Futures::<S>::of();
    let room = futures.qp.caps().max_send_wr as usize;
    let all = futures.pool.idle();

    drop(futures.qp.send(futures.pool.take().unwrap()));
    assert_eq!((futures.pool.idle(), futures.qp.in_flight()), (all, 0));

    let mut posted: Vec<_> =
        (0..room).map(|_| futures.qp.send(futures.pool.take().unwrap())).collect();
    for op in &mut posted {
        assert!(Pin::new(op).poll(&mut cx()).is_pending());
    }
    let mut in_line = futures.qp.send(futures.pool.take().unwrap());
    assert!(Pin::new(&mut in_line).poll(&mut cx()).is_pending());
    assert!(!in_line.is_posted());
    assert_eq!(futures.qp.in_flight(), room);
    drop(in_line);
    assert_eq!(futures.pool.idle(), all - room);

    // Posted: the device may read the buffer until the request has completed.
    drop(posted.remove(0));
    assert_eq!(futures.pool.idle(), all - room);
    futures.complete(Role::Send, WcStatus::SUCCESS);
    assert_eq!(futures.pool.idle(), all - room + 1);

    // The request is over, and the future was not polled.
    futures.complete(Role::Send, WcStatus::SUCCESS);
    drop(posted.remove(0));
    assert_eq!(futures.pool.idle(), all - room + 2);

    // The future is polled to its end, and then dropped.
    futures.complete(Role::Send, WcStatus::SUCCESS);
    let mut told = posted.remove(0);
    let Poll::Ready(Ok(finished)) = Pin::new(&mut told).poll(&mut cx()) else { panic!("it waits") };
    drop(told);
    assert_eq!(futures.pool.idle(), all - room + 2);
    drop(finished);
    assert_eq!(futures.pool.idle(), all - room + 3);

    // A dropped waiter does not keep the next one waiting.
    let mut last = futures.qp.send(futures.pool.take().unwrap());
    assert!(Pin::new(&mut last).poll(&mut cx()).is_pending());
    assert!(last.is_posted());
}

fn queue_driver_and_futures_can_be_dropped_in_any_order<S: Kind>() {
    for driver_first in [false, true] {
        let futures = Futures::<S>::of();
        let Futures { bench, pool, driver, cq, qp, .. } = futures;
        let mut posted = [qp.send(pool.take().unwrap()), qp.recv(pool.take().unwrap())];
        for op in &mut posted {
            assert!(Pin::new(op).poll(&mut cx()).is_pending());
        }
        let [mut sent, received] = posted;
        if driver_first {
            drop(driver);
            drop((cq, qp));
            let Poll::Ready(Err(OpError { memory, kind })) = Pin::new(&mut sent).poll(&mut cx())
            else {
                panic!("it waits")
            };
            assert_eq!((memory.is_none(), kind), (true, OpErrorKind::DriverGone));
            drop((sent, received));
        } else {
            drop((cq, qp));
            drop((received, sent));
            // The queue pair was dropped with its last future, and its memory with it.
            drop(driver);
        }
        assert_eq!(pool.idle(), 64);
        drop(pool);
        drop(bench);
    }
}

/// The future is dropped before and after the request is over.
#[test]
fn other_threads_may_drop_slices_of_a_buffer_in_flight() {
    let mut owned = Owned::new();
    let shared = owned.pool.copy(b"read by many").unwrap().share();
    let parts: Vec<SharedBuffer> =
        (0..3).map(|at| shared.slice(4 * at..4 * at + 4).unwrap()).collect();
    let mut batch = owned.qp.send_batch().unwrap();
    for part in &parts {
        batch.push(SendWr::send(&[]), part.clone(), "part").unwrap();
    }
    batch.ring().unwrap();
    drop(shared);
    let readers: Vec<_> = parts
        .into_iter()
        .map(|part| thread::spawn(move || part.iter().map(|byte| u32::from(*byte)).sum::<u32>()))
        .collect();
    let mut done = Vec::new();
    for _ in 0..3 {
        let request = owned.bench.script.take(owned.qp.handle(), Role::Send).expect("a request");
        let id = u64::from_ne_bytes(request[..8].try_into().unwrap());
        let wc = super::wc(owned.qp.qpn().0, id);
        assert!(owned.bench.script.complete(owned.cq.queue().handle(), wc));
        done.extend(owned.cq.poll().unwrap());
    }
    let sum: u32 = readers.into_iter().map(|reader| reader.join().unwrap()).sum();
    assert_eq!(sum, b"read by many".iter().map(|byte| u32::from(*byte)).sum());
    assert_eq!(owned.pool.idle(), 7, "the completions have it");
    thread::spawn(move || drop(done)).join().unwrap();
    assert_eq!(owned.pool.idle(), 8);
    // The buffer has one holder, which may write it.
    let mut buffers: Vec<_> = std::iter::from_fn(|| owned.pool.take().ok()).collect();
    assert_eq!(buffers.len(), 8);
    buffers.iter_mut().for_each(|buffer| buffer.fill(1));
}

/// The queue pair is dropped while requests are in flight.
#[test]
fn posting_polling_and_filling_on_three_threads_loses_no_buffer() {
    const ROUNDS: u8 = if cfg!(miri) { 12 } else { 200 };
    let Owned { bench, pool, mut cq, mut qp } = Owned::new();
    let (script, handle, qpn, queue) =
        (bench.script.clone(), qp.handle(), qp.qpn().0, cq.queue().handle());
    let (filled, to_post) = channel();
    let (to_fill, emptied) = channel();
    let (all_came, go) = channel::<()>();
    let poster = thread::spawn(move || {
        let mut posted = 0;
        while let Ok(buffer) = to_post.recv() {
            let mut next = Some(buffer);
            while let Some(buffer) = next.take() {
                let mut batch = qp.send_batch().unwrap();
                match batch.push(SendWr::send(&[]), buffer, "sent") {
                    Ok(()) => batch.ring().unwrap(),
                    Err(refused) => {
                        drop(batch);
                        thread::yield_now();
                        next = Some(refused.memory);
                    }
                }
            }
            posted += 1;
        }
        assert_eq!(posted, ROUNDS);
        go.recv().unwrap();
        // Two more sends, which do not complete.
        let mut batch = qp.send_batch().unwrap();
        batch.push(SendWr::send(&[]), pool.take().unwrap(), "left").unwrap();
        batch.ring().unwrap();
        let mut batch = qp.recv_batch().unwrap();
        batch.push(pool.take().unwrap(), "left").unwrap();
        batch.ring().unwrap();
        drop(qp);
        pool
    });
    let filler = {
        let first = bench.pd.buffer_pool_builder(64).count(3).build().unwrap();
        for _ in 0..3 {
            to_fill.send(first.take().unwrap()).unwrap();
        }
        thread::spawn(move || {
            for round in 0..ROUNDS {
                let mut buffer: crate::owned::Buffer = emptied.recv().unwrap();
                buffer.reset();
                buffer.fill(round);
                filled.send(buffer).unwrap();
            }
            drop(filled);
            (first, emptied)
        })
    };
    let mut completed = 0;
    while completed < ROUNDS {
        let Some(request) = script.take(handle, Role::Send) else {
            thread::yield_now();
            continue;
        };
        let id = u64::from_ne_bytes(request[..8].try_into().unwrap());
        assert!(script.complete(queue, super::wc(qpn, id)));
        for done in cq.poll().unwrap() {
            let buffer = done.memory.into_buffer().unwrap();
            assert!(buffer.iter().all(|byte| *byte == buffer[0]));
            completed += 1;
            // The thread that fills buffers ends before the last buffers come back.
            let _ = to_fill.send(buffer);
        }
    }
    let (first, emptied) = filler.join().unwrap();
    all_came.send(()).unwrap();
    while !poster.is_finished() {
        assert_eq!(cq.poll().unwrap().count(), 0);
        thread::yield_now();
    }
    let pool = poster.join().unwrap();
    drop(emptied);
    assert_eq!((first.idle(), pool.idle()), (3, 8));
    assert_eq!(cq.unmatched(), 0);
}
