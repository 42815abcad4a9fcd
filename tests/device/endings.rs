//! The endings of futures that do not simply complete: by deadlines, by aborts, and because the peer or the driver is
//! gone.

use crate::env;
use crate::helper::Helper;
use crate::lent::{FAR_BYTES, far};
use crate::pair::{PATIENCE, SILENCE};
use crate::tasks::{BUFFERS, DEPTH, Half, connected, pair, run};
use crate::verdict::{Stop, Verdict, trials};
use uverbs::aio::OpErrorKind;
use uverbs::aio::tokio::within;
use uverbs::{QpType, WcStatus};

trials![
    a_missed_deadline_leaves_the_request_posted,
    aborted_requests_give_their_memory_back,
    receives_posted_during_an_abort_end,
    a_send_to_a_destroyed_peer_fails,
    requests_to_a_killed_peer_fail,
    dropping_the_driver_fails_every_request,
    an_idle_driver_ends_with_its_users,
];

fn a_missed_deadline_leaves_the_request_posted() -> Verdict {
    run(0, async {
        let (a, b) = pair()?;
        let recv = a.qp.recv(a.pool.take().expect("a buffer"));
        let recv = within(SILENCE, recv).await.map(drop).expect_err("no message was sent");
        assert!(recv.is_posted());
        b.qp.send(b.pool.copy(b"late").expect("a buffer")).await?;
        let got = within(PATIENCE, recv).await.expect("it was sent")?;
        assert_eq!(&got.memory[..4], b"late");
        // Dropped after its deadline, the receive keeps its buffer and takes the next message.
        let recv = a.qp.recv(a.pool.take().expect("a buffer"));
        drop(within(SILENCE, recv).await);
        assert_eq!((a.pool.idle(), a.qp.in_flight()), (BUFFERS - 2, 1));
        b.qp.send(b.pool.copy(b"unheard").expect("a buffer")).await?;
        while a.qp.in_flight() > 0 {
            tokio::task::yield_now().await;
        }
        drop(got);
        assert_eq!(a.pool.idle(), BUFFERS);
        Ok(())
    })
}

fn aborted_requests_give_their_memory_back() -> Verdict {
    run(0, async {
        let (a, _b) = pair()?;
        let recvs: Vec<_> = (0..5)
            .map(|_| a.qp.recv(a.pool.take().expect("a buffer")))
            .map(|recv| tokio::spawn(async move { recv.await.map(drop) }))
            .collect();
        tokio::task::yield_now().await;
        a.qp.abort()?;
        for recv in recvs {
            let error = recv.await?.expect_err("it was called off");
            assert_eq!(error.kind, OpErrorKind::Status(WcStatus::WR_FLUSH_ERR));
            assert!(error.memory.is_some());
        }
        let late = a.qp.send(a.pool.take().expect("a buffer")).await.expect_err("it is broken");
        assert_eq!(late.kind, OpErrorKind::Earlier(WcStatus::WR_FLUSH_ERR));
        assert!(late.memory.is_some());
        drop(late);
        assert_eq!(a.pool.idle(), BUFFERS);
        Ok(())
    })
}

/// Receives that are posted during an abort: the device may have flushed before.
fn receives_posted_during_an_abort_end() -> Verdict {
    run(2, async {
        for _ in 0..20 {
            let (a, _b) = pair()?;
            let recvs: Vec<_> = (0..DEPTH)
                .map(|_| a.qp.recv(a.pool.take().expect("a buffer")))
                .map(|recv| tokio::spawn(async move { recv.await.map(drop) }))
                .collect();
            a.qp.abort()?;
            for recv in recvs {
                let error = recv.await?.expect_err("it was called off");
                let (posted, not) = (
                    OpErrorKind::Status(WcStatus::WR_FLUSH_ERR),
                    OpErrorKind::Earlier(WcStatus::WR_FLUSH_ERR),
                );
                assert!(error.kind == posted || error.kind == not, "{}", error.kind);
                assert!(error.memory.is_some());
            }
            assert_eq!(a.pool.idle(), BUFFERS);
        }
        Ok(())
    })
}

/// With the default retry count, 6: on soft-RoCE 7 means retries without end.
fn a_send_to_a_destroyed_peer_fails() -> Verdict {
    run(0, async {
        let (a, b) = pair()?;
        drop(b);
        let sent = within(PATIENCE, a.qp.send(a.pool.copy(b"x").expect("a buffer"))).await;
        let error = sent.map_err(|_| Stop::fail("the request is repeated for ever"))?;
        let error = error.map(drop).expect_err("the peer is gone");
        assert_eq!(error.kind, OpErrorKind::Status(WcStatus::RETRY_EXC_ERR));
        assert_eq!(a.pool.idle(), BUFFERS - usize::from(error.memory.is_some()));
        Ok(())
    })
}

fn requests_to_a_killed_peer_fail() -> Verdict {
    run(0, async {
        let context = env::open()?;
        let (cq, _) = context.cq_builder(128).spawn()?;
        let a = Half::on(context, cq)?;
        let pool = a.pd.buffer_pool_builder(FAR_BYTES / 8).count(8).build()?;
        let mut peer = Helper::start()?;
        let remote = far(&mut peer, &a.context, &a.qp)?;
        let first = a.qp.read(remote, pool.take().expect("a buffer")).await?;
        assert!(first.memory.iter().all(|byte| *byte == 7));
        drop(first);
        let reads: Vec<_> = (0..8)
            .map(|_| a.qp.read(remote, pool.take().expect("a buffer")))
            .map(|read| tokio::spawn(async move { read.await.map(drop).map_err(|e| e.kind) }))
            .collect();
        let recv = a.qp.recv(a.pool.take().expect("a buffer"));
        let recv = tokio::spawn(async move { recv.await.map(drop).map_err(|error| error.kind) });
        tokio::task::yield_now().await;
        peer.kill()?;
        // Some requests may complete before the signal arrives; a later one finds no peer.
        for read in reads {
            let _ = read.await?;
        }
        let late = a.qp.read(remote, a.pool.take().expect("a buffer")).await;
        let kind = late.map(drop).expect_err("the peer is gone").kind;
        // The order in which the peer's memory, queue pair and answers go is arbitrary.
        let failed = |status| {
            let gone = [WcStatus::REM_ACCESS_ERR, WcStatus::REM_OP_ERR, WcStatus::RETRY_EXC_ERR];
            gone.contains(&status)
        };
        assert!(
            matches!(kind, OpErrorKind::Status(status) | OpErrorKind::Earlier(status) if failed(status)),
            "{kind}"
        );
        // A receive from the dead peer ends as well.
        assert_eq!(recv.await?, Err(OpErrorKind::Status(WcStatus::WR_FLUSH_ERR)));
        assert_eq!((pool.idle(), a.pool.idle()), (8, BUFFERS));
        Ok(())
    })
}

fn dropping_the_driver_fails_every_request() -> Verdict {
    run(0, async {
        let context = env::open()?;
        let (cq, driver) = context.cq_builder(128).spawn()?;
        let a = Half::on(context, cq)?;
        let b = Half::new()?;
        connected(&a, &b)?;
        let recv = a.qp.recv(a.pool.take().expect("a buffer"));
        let recv = tokio::spawn(async move { recv.await.map(drop).map_err(|error| error.kind) });
        tokio::task::yield_now().await;
        driver.abort();
        assert_eq!(recv.await?, Err(OpErrorKind::DriverGone));
        let late = a.qp.recv(a.pool.take().expect("a buffer")).await;
        assert_eq!(late.expect_err("the driver is gone").kind, OpErrorKind::DriverGone);
        let qp = a.pd.qp_builder(&a.cq, &a.cq, QpType::RC).build()?;
        assert!(a.cq.adopt(qp).unwrap_err().to_string().contains("driver is gone"));
        // Memory that the device may still write stays lent until the queue pair is gone.
        assert_eq!(a.pool.idle(), BUFFERS - 1);
        let Half { qp, pool, .. } = a;
        drop(qp);
        assert_eq!(pool.idle(), BUFFERS);
        Ok(())
    })
}

fn an_idle_driver_ends_with_its_users() -> Verdict {
    run(0, async {
        let context = env::open()?;
        let (cq, driver) = context.cq_builder(128).spawn()?;
        let half = Half::on(context, cq)?;
        tokio::time::sleep(SILENCE).await;
        assert!(!driver.is_finished());
        drop(half);
        Ok(driver.await??)
    })
}
