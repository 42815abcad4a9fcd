//! Futures that are dropped at every point where they wait: their memory comes back, and they leave nothing in the
//! kernel, on the device or in the library.

use crate::capability::Capability;
use crate::env;
use crate::leaks;
use crate::pair::{Config, PATIENCE, Pair, gid};
use crate::tasks::{BUFFERS, Half, ask, both, connected, echo_back, pair, run};
use crate::verdict::{Stop, Verdict, supported, trials};
use std::future::Future;
use std::pin::Pin;
use std::task::{Context as Cx, Poll};
use std::time::{Duration, Instant};
use tokio::net::TcpListener;
use uverbs::aio::tokio::{Events, accept, connect, within};
use uverbs::{Access, AsyncEvent, EventSource, EventType, ObjectKind, SendWr, WcOpcode};

trials![
    requests_dropped_at_any_poll_give_their_memory_back,
    requests_dropped_at_any_poll_give_their_memory_back_on_many_threads,
    a_handshake_dropped_at_any_poll_leaves_nothing,
    a_handshake_dropped_at_any_poll_leaves_nothing_on_many_threads,
    a_listener_dropped_at_any_poll_loses_no_event,
    a_listener_dropped_at_any_poll_loses_no_event_on_many_threads,
    dropped_futures_leave_nothing_on_the_device,
    dropped_futures_leave_nothing_in_their_context,
];

/// Polls a future at most this number of times.
struct AtMost<F>(F, usize);

impl<F: Future + Unpin> Future for AtMost<F> {
    type Output = Option<F::Output>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Cx<'_>) -> Poll<Self::Output> {
        if self.1 == 0 {
            return Poll::Ready(None);
        }
        self.1 -= 1;
        Pin::new(&mut self.0).poll(cx).map(Some)
    }
}

/// However early a future is dropped: its memory is back when its requests have ended, and other futures go on.
fn requests_dropped_at_any_poll_give_their_memory_back() -> Verdict {
    env::rnr_wait()?;
    dropped_on(0)
}

fn requests_dropped_at_any_poll_give_their_memory_back_on_many_threads() -> Verdict {
    env::rnr_wait()?;
    dropped_on(4)
}

fn dropped_on(threads: usize) -> Verdict {
    run(threads, async {
        let mut finished = false;
        for polls in 0..200 {
            let (a, b) = pair()?;
            let theirs = b.pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u8>(1024)?;
            let server = tokio::spawn(async move { echo_back(&b, 3).await.map(|()| b) });
            let work = Box::pin(async {
                // The receive is posted first, because receives of an earlier inbox would come before it.
                let received = async {
                    let got = a.qp.recv(a.pool.take().expect("a buffer")).await?;
                    assert_eq!(got.memory[..5], *b"short");
                    Ok(())
                };
                both(received, async { Ok(a.qp.send_inline(b"short").await.map(drop)?) }).await?;
                ask(&a, 2).await?;
                let mut target = a.pool.take().expect("a buffer");
                target.set_len(100);
                a.qp.read(theirs.remote(0)?, target).await?;
                let text = a.pool.copy(&[1; 100]).expect("a buffer");
                a.qp.write(theirs.remote(0)?, text).await?;
                let word = theirs.remote(512)?;
                a.qp.fetch_add(word, 1, a.pool.take().expect("one")).await?;
                let swap = a.qp.compare_swap(word, 1, 9, a.pool.take().expect("one"));
                assert_eq!(swap.await?.0, 1);
                Ok::<_, Stop>(())
            });
            finished = match AtMost(work, polls).await {
                Some(end) => end.map(|()| true)?,
                None => false,
            };
            // The receives that an inbox posted ahead remain; every other request ends by itself.
            let started = Instant::now();
            while a.qp.in_flight() > 8 && started.elapsed() < PATIENCE {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            assert!(a.qp.in_flight() <= 8, "after {polls} polls");
            a.qp.abort()?;
            // If another thread drives the queue, memory comes back a moment after its request completed.
            let back = || (a.qp.in_flight(), a.pool.idle());
            let started = Instant::now();
            while back() != (0, BUFFERS) && started.elapsed() < PATIENCE {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            assert_eq!(back(), (0, BUFFERS), "after {polls} polls");
            assert_eq!((a.cq.unmatched(), a.context.leaked()), (0, 0));
            server.abort();
            if finished {
                // With one thread nothing happens between polls; with several, others may have done all the work.
                assert!(threads > 0 || polls > 5, "there are more points to stop at");
                break;
            }
        }
        assert!(finished);
        Ok(())
    })
}

/// The same for both ends of a handshake, whose other end loses its peer in the middle.
fn a_handshake_dropped_at_any_poll_leaves_nothing() -> Verdict {
    connecting_dropped_on(0)
}

fn a_handshake_dropped_at_any_poll_leaves_nothing_on_many_threads() -> Verdict {
    connecting_dropped_on(2)
}

fn connecting_dropped_on(threads: usize) -> Verdict {
    env::first_pkey()?;
    run(threads, async {
        for accepts in [false, true] {
            let mut finished = false;
            for polls in 0..200 {
                let (a, b) = (Half::new()?, Half::new()?);
                let index = gid(&a.context)?;
                let listener = TcpListener::bind("127.0.0.1:0").await?;
                let address = listener.local_addr()?;
                let (one, other) = (a.qp.clone(), b.qp.clone());
                let connects = async move { connect(&one, address, &index).await };
                let answers = async move { accept(&other, &listener, &index).await };
                let (left, right) = (Box::pin(connects), Box::pin(answers));
                // One end is dropped, and the other one learns of it.
                let (end, rest) = if accepts {
                    let left = tokio::spawn(left);
                    (AtMost(right, polls).await.map(|end| end.map(drop)), left)
                } else {
                    let right = tokio::spawn(right);
                    (AtMost(left, polls).await.map(|end| end.map(drop)), right)
                };
                finished = end.transpose()?.is_some();
                if !finished {
                    // An end without a peer waits, and is cancelled.
                    let _ =
                        within(Duration::from_millis(20), rest).await.map_err(|rest| rest.abort());
                }
                // Each queue pair still has its place.
                assert_eq!((a.qp.in_flight(), a.pool.idle()), (0, BUFFERS));
                assert_eq!((a.context.leaked(), b.context.leaked()), (0, 0));
                if finished {
                    assert!(threads > 0 || polls > 2, "there are more points to stop at");
                    break;
                }
            }
            assert!(finished);
        }
        Ok(())
    })
}

/// A listener that is dropped at any point leaves later events to the next listener.
fn a_listener_dropped_at_any_poll_loses_no_event() -> Verdict {
    listening_dropped_on(0)
}

fn a_listener_dropped_at_any_poll_loses_no_event_on_many_threads() -> Verdict {
    listening_dropped_on(2)
}

fn listening_dropped_on(threads: usize) -> Verdict {
    const EVENTS: usize = 3;
    run(threads, async move {
        let mut finished = false;
        for polls in 0..200 {
            let mut pair = Pair::new(Config { srq: true, ..Config::rc() })?;
            pair.b.recv(1, 0..64)?;
            let mut events = Events::new(&pair.b.context)?;
            let key = pair.b.srq.as_ref().map(|srq| srq.key()).expect("a shared receive queue");
            let check = |event: AsyncEvent| {
                assert_eq!(event.kind, EventType::SRQ_LIMIT_REACHED);
                assert_eq!(event.source, EventSource::Srq(key));
            };
            let (mut caused, mut heard) = (0, 0);
            let work = Box::pin(async {
                for _ in 0..EVENTS {
                    let listens = async {
                        check(events.next().await?);
                        heard += 1;
                        Ok(())
                    };
                    let happens = async {
                        // The listener sleeps by then.
                        tokio::task::yield_now().await;
                        caused += 1;
                        reach_limit(&mut pair)
                    };
                    both(listens, happens).await?;
                }
                Ok::<_, Stop>(())
            });
            finished = match AtMost(work, polls).await {
                Some(end) => end.map(|()| true)?,
                None => false,
            };
            for _ in heard..caused {
                check(tokio::time::timeout(PATIENCE, events.next()).await??);
            }
            assert_eq!(pair.b.context.try_next_event()?, None, "after {polls} polls");
            if finished {
                assert_eq!((caused, heard), (EVENTS, EVENTS));
                assert!(threads > 0 || polls > EVENTS, "there are more points to stop at");
                break;
            }
        }
        assert!(finished);
        Ok(())
    })
}

/// Consumes one of b's two shared receives, which takes the queue below its limit.
fn reach_limit(pair: &mut Pair) -> Verdict {
    pair.b.recv(1, 0..64)?;
    let srq = pair.b.srq.as_mut().expect("a shared receive queue");
    supported(srq.set_limit(2), Capability::SrqLimit)?;
    pair.a.send(SendWr::send(&[]).id(3).signaled())?;
    pair.a.expect(3, WcOpcode::SEND)?;
    pair.b.expect(1, WcOpcode::RECV).map(drop)
}

fn dropped_futures_leave_nothing_on_the_device() -> Verdict {
    let files = || Ok::<_, std::io::Error>(std::fs::read_dir("/proc/self/fd")?.count());
    let (idle, open) = (env::resources()?, files()?);
    for round in 0..30 {
        run(0, async {
            let (a, b) = pair()?;
            let pending = a.qp.recv(a.pool.take().expect("a buffer"));
            let pending = within(Duration::from_millis(1), pending).await;
            if round % 2 == 0 {
                b.qp.send(b.pool.copy(b"x").expect("a buffer")).await?;
            }
            if round % 3 == 0 {
                drop(a);
            }
            drop((b, pending));
            Ok(())
        })?;
    }
    assert_eq!(files()?, open);
    env::unchanged(&idle)
}

/// Counted in one context, by kind: queue pairs whose futures are dropped, or never polled again.
fn dropped_futures_leave_nothing_in_their_context() -> Verdict {
    const KINDS: [ObjectKind; 4] = [ObjectKind::QP, ObjectKind::CQ, ObjectKind::MR, ObjectKind::PD];
    // Each round connects two queue pairs, in a runtime of its own.
    leaks::rounds_of(env::rounds(100, 1000), &KINDS, |context| {
        let context = context.clone();
        Ok(Box::new(move || {
            run(0, async {
                let half = || -> Verdict<Half> {
                    let (cq, _) = context.cq_builder(128).spawn()?;
                    Half::on(context.clone(), cq)
                };
                let (a, b) = (half()?, half()?);
                connected(&a, &b)?;
                let late = within(Duration::ZERO, a.qp.recv(a.pool.take().expect("one"))).await;
                let late = late.map(drop).expect_err("no message was sent");
                let sent = within(Duration::ZERO, b.qp.send(b.pool.copy(b"x").expect("one"))).await;
                drop((late, a.pool.take(), a, sent, b));
                Ok(())
            })
        }))
    })
}
