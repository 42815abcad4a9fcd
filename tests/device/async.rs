//! Requests as futures, in tokio's event loop.

use crate::capability::Capability;
use crate::env;
use crate::events::GRACE;
use crate::pair::{Config, PATIENCE, Pair, SILENCE, gid};
use crate::pattern;
use crate::tasks::{BUFFERS, DEPTH, Half, ask, both, echo_back, pair, run};
use crate::verdict::{Stop, Verdict, supported, trials};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use tokio::net::TcpListener;
use tokio::task::LocalSet;
use uverbs::aio::Transfer;
use uverbs::aio::tokio::{Events, accept, connect, within};
use uverbs::{Access, EventSource, EventType, QpState, QpType, SendWr, WcOpcode, WcStatus};

trials![
    echo_comes_back,
    echo_comes_back_on_many_threads,
    one_sided_requests_and_atomics_complete,
    requests_that_wait_for_a_full_queue_keep_their_order,
    a_list_longer_than_the_queue_ends_in_its_order,
    a_list_that_is_dropped_is_sent_as_far_as_it_was_posted,
    a_dropped_waiter_passes_its_room_on,
    ten_thousand_pending_requests_complete,
    ten_thousand_pending_requests_complete_on_many_threads,
    messages_on_an_srq_outlive_their_queue_pair,
    events_wake_the_stream,
    last_wqe_reached_is_in_the_stream,
    handshake_over_tcp_connects,
    many_senders_reach_one_srq,
    each_worker_rings_its_own_thread_domain,
    a_workers_requests_wait_for_room_in_order,
];

fn echo_comes_back() -> Verdict {
    env::rnr_wait()?;
    run(0, async {
        let (a, b) = pair()?;
        both(ask(&a, 200), echo_back(&b, 200)).await?;
        assert_eq!((a.cq.unmatched(), b.cq.unmatched()), (0, 0));
        let (Half { pool, qp, context, .. }, _) = (a, b);
        drop(qp);
        assert_eq!((pool.idle(), context.leaked()), (BUFFERS, 0));
        Ok(())
    })
}

fn echo_comes_back_on_many_threads() -> Verdict {
    env::rnr_wait()?;
    run(4, async {
        let mut tasks = Vec::new();
        for _ in 0..4 {
            let (a, b) = pair()?;
            // A side whose peer goes before the last acknowledgement would hang: both stay.
            tasks.push(tokio::spawn(async move { ask(&a, 100).await.map(|()| a) }));
            tasks.push(tokio::spawn(async move { echo_back(&b, 100).await.map(|()| b) }));
        }
        let mut halves = Vec::new();
        for task in tasks {
            halves.push(task.await??);
        }
        Ok(())
    })
}

fn one_sided_requests_and_atomics_complete() -> Verdict {
    env::rnr_wait()?;
    run(0, async {
        let (a, b) = pair()?;
        let mut theirs = b.pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u64>(128)?;
        theirs.write_at(0, 40)?;
        let remote = theirs.remote(0)?;
        let take = || a.pool.take().expect("a buffer");
        let (before, _) = a.qp.fetch_add(remote, 2, take()).await?;
        assert_eq!(before, 40);
        let (before, _) = a.qp.compare_swap(remote, 42, 9, take()).await?;
        assert_eq!((before, theirs.read_at(0)), (42, Some(9)));
        let text = a.pool.copy(&pattern::bytes(1, 800)).expect("a buffer");
        let text = a.qp.write(theirs.remote(8)?, text).await?.memory;
        pattern::check(&text, 1);
        let mut target = take();
        target.set_len(800);
        let read = a.qp.read(theirs.remote(8)?, target).await?;
        assert_eq!(read.outcome.byte_len, 800);
        pattern::check(&read.memory, 1);
        // Inline data needs no buffer.
        let inbox = b.qp.recv(b.pool.take().expect("a buffer"));
        both(async { Ok(a.qp.send_inline(b"short").await.map(drop)?) }, async {
            let got = inbox.await?;
            assert_eq!(&got.memory[..5], b"short");
            Ok(())
        })
        .await
    })
}

fn requests_that_wait_for_a_full_queue_keep_their_order() -> Verdict {
    const MESSAGES: u64 = 500;
    env::rnr_wait()?;
    run(2, async {
        let (a, b) = pair()?;
        let a = Arc::new(a);
        let pool = a.pd.buffer_pool_builder(64).count(MESSAGES as usize).build()?;
        let mut sends: Vec<_> = (0..MESSAGES)
            .map(|n| Box::pin(a.qp.send(pool.copy(&n.to_ne_bytes()).expect("a buffer"))))
            .collect();
        // All are polled at once: the queue takes a few, and the others wait for room.
        let first = std::future::poll_fn(|cx| {
            let posted = sends.iter_mut().filter_map(|send| match send.as_mut().poll(cx) {
                Poll::Pending => Some(()),
                Poll::Ready(_) => None,
            });
            Poll::Ready(posted.count())
        });
        assert_eq!(first.await, MESSAGES as usize);
        assert!(sends.iter().filter(|send| send.is_posted()).count() < MESSAGES as usize);
        // The order of later polls does not matter.
        let sends: Vec<_> = sends.into_iter().rev().map(tokio::spawn).collect();
        let mut inbox = b.qp.inbox(&b.pool, DEPTH as usize);
        for n in 0..MESSAGES {
            assert_eq!(inbox.next().await?.memory[..], n.to_ne_bytes());
        }
        for send in sends {
            drop(send.await??);
        }
        assert_eq!(pool.idle(), MESSAGES as usize);
        Ok(())
    })
}

fn a_list_longer_than_the_queue_ends_in_its_order() -> Verdict {
    const MESSAGES: u64 = 3 * DEPTH as u64 + 5;
    env::rnr_wait()?;
    run(0, async {
        let (a, b) = pair()?;
        let pool = a.pd.buffer_pool_builder(64).count(MESSAGES as usize).build()?;
        let sends =
            (0..MESSAGES).map(|n| (Transfer::Send, pool.copy(&n.to_ne_bytes()).expect("a buffer")));
        let list = a.qp.post_all(sends);
        let mut inbox = b.qp.inbox(&b.pool, DEPTH as usize);
        both(
            async {
                let ends = list.await;
                assert_eq!(ends.len(), MESSAGES as usize);
                for (n, end) in (0..MESSAGES).zip(ends) {
                    assert_eq!(end?.memory[..], n.to_ne_bytes());
                }
                Ok(())
            },
            async {
                for n in 0..MESSAGES {
                    assert_eq!(inbox.next().await?.memory[..], n.to_ne_bytes());
                }
                Ok(())
            },
        )
        .await?;
        assert_eq!((pool.idle(), a.qp.in_flight()), (MESSAGES as usize, 0));
        Ok(())
    })
}

fn a_list_that_is_dropped_is_sent_as_far_as_it_was_posted() -> Verdict {
    env::rnr_wait()?;
    run(0, async {
        let (a, b) = pair()?;
        let sends = (0..2 * u64::from(DEPTH))
            .map(|n| (Transfer::Send, a.pool.copy(&n.to_ne_bytes()).expect("a buffer")));
        let mut list = a.qp.post_all(sends);
        let room = 2 * DEPTH as usize;
        let posted = std::future::poll_fn(|cx| {
            assert!(Pin::new(&mut list).poll(cx).is_pending());
            Poll::Ready(room - list.waiting())
        })
        .await;
        drop(list);
        let mut inbox = b.qp.inbox(&b.pool, DEPTH as usize);
        for n in 0..posted as u64 {
            assert_eq!(inbox.next().await?.memory[..], n.to_ne_bytes());
        }
        // A message behind the list's arrives next.
        let last = a.qp.send(a.pool.copy(b"last").expect("a buffer"));
        both(async { Ok(last.await.map(drop)?) }, async {
            assert_eq!(inbox.next().await?.memory[..], *b"last");
            Ok(())
        })
        .await?;
        assert_eq!((a.pool.idle(), a.qp.in_flight()), (BUFFERS, 0));
        Ok(())
    })
}

/// A future is woken because there is room, and is dropped before it posts.
fn a_dropped_waiter_passes_its_room_on() -> Verdict {
    env::rnr_wait()?;
    run(0, async {
        let (a, b) = pair()?;
        let take = || a.pool.copy(b"x").expect("a buffer");
        let mut waiting: Vec<_> = (0..40).map(|_| Box::pin(a.qp.send(take()))).collect();
        std::future::poll_fn(|cx| {
            waiting.iter_mut().for_each(|send| assert!(send.as_mut().poll(cx).is_pending()));
            Poll::Ready(())
        })
        .await;
        let stuck = waiting.iter().position(|send| !send.is_posted()).expect("a full queue");
        let mut rest = waiting.split_off(stuck);
        let last = rest.pop().expect("more than one");
        let mut inbox = b.qp.inbox(&b.pool, 8);
        for _ in 0..4 {
            inbox.next().await?;
        }
        // The first futures in line are dropped without another poll.
        drop(rest);
        drop(waiting);
        // Receives until an error ends the loop.
        let receive = async {
            loop {
                if let Err(error) = inbox.next().await {
                    break error;
                }
            }
        };
        tokio::select! {
            sent = last => Ok(sent.map(drop)?),
            error = receive => Err(error.into()),
        }
    })
}

fn ten_thousand_pending_requests_complete() -> Verdict {
    at_once(0)
}

fn ten_thousand_pending_requests_complete_on_many_threads() -> Verdict {
    at_once(2)
}

fn at_once(threads: usize) -> Verdict {
    const REQUESTS: usize = 10_000;
    run(threads, async move {
        let (a, b) = pair()?;
        let mut theirs = b.pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u64>(1024)?;
        for n in 0..1024 {
            theirs.write_at(n, n as u64)?;
        }
        let pool = a.pd.buffer_pool_builder(64).count(REQUESTS).build()?;
        let mut reads = Vec::with_capacity(REQUESTS);
        for n in 0..REQUESTS {
            let remote = theirs.remote(n % 1024 * 8)?;
            let mut buffer = pool.take().expect("a buffer");
            buffer.set_len(8);
            reads.push(Box::pin(a.qp.read(remote, buffer)));
        }
        // All are posted before one has ended, as only a later poll of a future tells its result.
        let begun = std::future::poll_fn(|cx| {
            let begun = reads.iter_mut().map(|read| read.as_mut().poll(cx).is_pending());
            let begun = begun.filter(|pending| *pending).count();
            Poll::Ready((begun, a.qp.in_flight()))
        });
        let (begun, under_way) = begun.await;
        assert_eq!((begun, pool.idle()), (REQUESTS, 0));
        let posted = reads.iter().filter(|read| read.is_posted()).count();
        let depth = a.qp.caps().max_send_wr as usize;
        // Other threads that poll completions may have made room in the queue again.
        match threads {
            0 => assert_eq!((posted, under_way), (depth, depth)),
            _ => assert!(posted >= depth, "{posted} of {depth}"),
        }
        let tasks = reads
            .into_iter()
            .map(|read| tokio::spawn(async move { read.await.map(|read| read.memory) }));
        for (n, task) in tasks.collect::<Vec<_>>().into_iter().enumerate() {
            let buffer = task.await?.map_err(|error| Stop::fail(error.kind))?;
            assert_eq!(buffer[..], (n as u64 % 1024).to_ne_bytes());
        }
        assert_eq!((pool.idle(), a.cq.unmatched()), (REQUESTS, 0));
        assert_eq!((a.qp.in_flight(), a.context.leaked()), (0, 0));
        Ok(())
    })
}

/// A message received before its queue pair is dropped is still delivered.
fn messages_on_an_srq_outlive_their_queue_pair() -> Verdict {
    const MESSAGES: usize = 5;
    run(0, async {
        let context = env::open()?;
        let (cq, _) = context.cq_builder(128).spawn()?;
        let pd = context.alloc_pd()?;
        let pool = pd.buffer_pool_builder(64).count(8).build()?;
        let srq = cq.adopt_srq(supported(pd.srq_builder(8).build(), Capability::Srq)?)?;
        let server = pd.qp_builder(&cq, &cq, QpType::RC).max_send_wr(4).srq(&srq).build()?;
        let server = cq.adopt_on(server, &srq)?;
        let client = Half::new()?;
        let index = gid(&context)?;
        let (here, there) = (client.qp.endpoint(&index)?, server.endpoint(&index)?);
        env::handshake(&server, &here)?;
        env::handshake(&client.qp, &there)?;
        let mut recvs: Vec<_> = (0..8).map(|_| srq.recv(pool.take().expect("a buffer"))).collect();
        std::future::poll_fn(|cx| {
            recvs.iter_mut().for_each(|recv| assert!(Pin::new(recv).poll(cx).is_pending()));
            Poll::Ready(())
        })
        .await;
        for n in 0..MESSAGES {
            client.qp.send_inline(&[n as u8]).await?;
        }
        // The driver may have polled their completions, or not yet.
        drop(server);
        for (n, recv) in recvs.drain(..MESSAGES).enumerate() {
            let message = within(PATIENCE, recv).await.expect("it was received")?;
            assert_eq!(message.memory[0], n as u8);
        }
        assert_eq!((pool.idle(), context.leaked()), (MESSAGES, 0));
        Ok(())
    })
}

fn events_wake_the_stream() -> Verdict {
    const RECEIVES: u64 = 8;
    run(0, async {
        let mut pair = Pair::new(Config { srq: true, ..Config::rc() })?;
        let mut events = Events::new(&pair.b.context)?;
        let key = pair.b.srq.as_ref().map(|srq| srq.key()).expect("a shared receive queue");
        for wr_id in 1..RECEIVES {
            pair.b.recv(wr_id, 0..64)?;
        }
        for _ in 0..3 {
            pair.b.recv(0, 0..64)?;
            let srq = pair.b.srq.as_mut().expect("a shared receive queue");
            supported(srq.set_limit(RECEIVES as u32), Capability::SrqLimit)?;
            // The task sleeps when the event comes, and the event loop wakes it.
            let mut next = tokio::spawn(async move { (events.next().await, events) });
            let quiet = tokio::time::timeout(SILENCE, &mut next).await;
            assert!(quiet.is_err(), "{quiet:?}");
            pair.a.send(SendWr::send(&[]).id(1).signaled())?;
            pair.a.expect(1, WcOpcode::SEND)?;
            let (event, again) = tokio::time::timeout(PATIENCE, next).await??;
            let event = event?;
            assert_eq!(event.kind, EventType::SRQ_LIMIT_REACHED);
            assert_eq!(event.source, EventSource::Srq(key));
            assert_eq!(pair.b.wait()?.status, WcStatus::SUCCESS);
            events = again;
        }
        let quiet = tokio::time::timeout(SILENCE, events.next()).await;
        assert!(quiet.is_err(), "{quiet:?}");
        Ok(())
    })
}

/// LAST_WQE_REACHED of queue pairs that are made and destroyed.
fn last_wqe_reached_is_in_the_stream() -> Verdict {
    run(0, async {
        let context = env::open()?;
        let mut events = Events::new(&context)?;
        let pd = context.alloc_pd()?;
        let cq = context.cq_builder(16).build()?;
        let srq = supported(pd.srq_builder(4).build(), Capability::Srq)?;
        for _ in 0..3 {
            let qp = pd.qp_builder(&cq, &cq, QpType::RC).srq(&srq).build()?;
            let attr = uverbs::QpAttr::new()
                .state(QpState::INIT)
                .port(env::port())
                .pkey_index(env::pkey_index());
            qp.modify(&attr.access(Default::default()))?;
            qp.modify(&uverbs::QpAttr::new().state(QpState::ERR))?;
            match tokio::time::timeout(GRACE, events.next()).await {
                Ok(event) => {
                    let event = event?;
                    assert_eq!(event.kind, EventType::QP_LAST_WQE_REACHED);
                    assert_eq!(event.source, EventSource::Qp(qp.key()));
                }
                Err(_) => {
                    let why = "no event when the last receive is reached".into();
                    return Err(Stop::Skip(Capability::LastWqeEvent, why));
                }
            }
        }
        Ok(())
    })
}

fn handshake_over_tcp_connects() -> Verdict {
    env::rnr_wait()?;
    env::first_pkey()?;
    run(0, async {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let server = tokio::spawn(async move {
            let b = Half::new()?;
            let index = gid(&b.context)?;
            let _stream = accept(&b.qp, &listener, &index).await?;
            echo_back(&b, 10).await.map(|()| b)
        });
        let a = Half::new()?;
        let _stream = connect(&a.qp, address, &gid(&a.context)?).await?;
        ask(&a, 10).await?;
        server.await??;
        Ok(())
    })
}

fn many_senders_reach_one_srq() -> Verdict {
    const CLIENTS: usize = 8;
    const MESSAGES: usize = 50;
    env::rnr_wait()?;
    run(0, async {
        let context = env::open()?;
        let (cq, _) = context.cq_builder(1024).spawn()?;
        let pd = context.alloc_pd()?;
        let pool = pd.buffer_pool_builder(64).count(64).build()?;
        let srq = cq.adopt_srq(supported(pd.srq_builder(32).build(), Capability::Srq)?)?;
        let index = gid(&context)?;
        let (mut servers, mut tasks) = (Vec::new(), Vec::new());
        for id in 0..CLIENTS {
            let server = pd.qp_builder(&cq, &cq, QpType::RC).max_send_wr(4).srq(&srq).build()?;
            let server = cq.adopt_on(server, &srq)?;
            let client = Half::new()?;
            let here = client.qp.endpoint(&index)?;
            let there = server.endpoint(&index)?;
            env::handshake(&server, &here)?;
            env::handshake(&client.qp, &there)?;
            servers.push(server);
            tasks.push(tokio::spawn(async move {
                for n in 0..MESSAGES {
                    client.qp.send_inline(&[id as u8, n as u8]).await?;
                }
                Ok::<_, Stop>(client)
            }));
        }
        let mut inbox = srq.inbox(&pool, 32);
        let mut next = [0; CLIENTS];
        for _ in 0..CLIENTS * MESSAGES {
            let message = inbox.next().await?;
            let [id, n] = message.memory[..] else { panic!("{message:?}") };
            assert_eq!(message.outcome.qpn, servers[usize::from(id)].qpn());
            assert_eq!(usize::from(n), next[usize::from(id)], "client {id}");
            next[usize::from(id)] += 1;
        }
        for task in tasks {
            task.await??;
        }
        drop((inbox, srq, servers));
        assert_eq!((pool.idle(), context.leaked()), (64, 0));
        Ok(())
    })
}

/// Runs a test whose futures are tied to their thread.
fn on_one_thread(test: impl Future<Output = Verdict>) -> Verdict {
    run(0, async { LocalSet::new().run_until(test).await })
}

/// Domain, token, completion queue and a queue pair of each worker move to its thread as one value.
fn each_worker_rings_its_own_thread_domain() -> Verdict {
    env::rnr_wait()?;
    let context = env::open()?;
    let index = gid(&context)?;
    let mut workers = Vec::new();
    for _ in 0..2 {
        let td = context.alloc_td()?;
        let pd = context.alloc_pd()?;
        let domain = pd.parent_domain_builder().thread_domain(&td).build()?;
        let worker = context.cq_builder(128).build_worker(td)?;
        let qp = domain.qp_builder(worker.queue(), worker.queue(), QpType::RC).build()?;
        let mine = (domain, worker, qp);
        workers.push(std::thread::spawn(move || {
            let (domain, worker, qp) = mine;
            on_one_thread(async {
                let pool = domain.buffer_pool_builder(64).build()?;
                let (cq, _driver) = worker.spawn_local()?;
                let one = cq.adopt(qp)?;
                let other = domain.qp_builder(&cq, &cq, QpType::RC).max_recv_wr(4).build()?;
                let other = cq.adopt(other)?;
                let (here, there) = (one.endpoint(&index)?, other.endpoint(&index)?);
                env::handshake(&one, &there)?;
                env::handshake(&other, &here)?;
                let mut inbox = other.inbox(&pool, 4);
                for n in 0..50u64 {
                    let text = pool.copy(&n.to_ne_bytes()).expect("a buffer");
                    let send = async { Ok(one.send(text).await.map(drop)?) };
                    let recv = async {
                        assert_eq!(inbox.next().await?.memory[..], n.to_ne_bytes());
                        Ok(())
                    };
                    both(send, recv).await?;
                }
                assert_eq!(cq.unmatched(), 0);
                Ok(())
            })
        }));
    }
    for worker in workers {
        worker.join().expect("a worker panicked")?;
    }
    assert_eq!(context.leaked(), 0);
    Ok(())
}

/// More requests than the queue holds, posted by tasks of one thread.
fn a_workers_requests_wait_for_room_in_order() -> Verdict {
    const MESSAGES: u64 = 200;
    env::rnr_wait()?;
    let context = env::open()?;
    let index = gid(&context)?;
    on_one_thread(async {
        let td = context.alloc_td()?;
        let pd = context.alloc_pd()?;
        let domain = pd.parent_domain_builder().thread_domain(&td).build()?;
        let (cq, _driver) = context.cq_builder(128).build_worker(td)?.spawn_local()?;
        let srq = cq.adopt_srq(supported(domain.srq_builder(16).build(), Capability::Srq)?)?;
        let pool = domain.buffer_pool_builder(64).count(MESSAGES as usize + 16).build()?;
        let builder = || domain.qp_builder(&cq, &cq, QpType::RC);
        let one = cq.adopt(builder().max_send_wr(4).build()?)?;
        let other = cq.adopt_on(builder().srq(&srq).build()?, &srq)?;
        let (here, there) = (one.endpoint(&index)?, other.endpoint(&index)?);
        env::handshake(&one, &there)?;
        env::handshake(&other, &here)?;
        let mut inbox = srq.inbox(&pool, 16);
        let mut tasks = Vec::new();
        for n in 0..MESSAGES {
            let sent = one.send(pool.copy(&n.to_ne_bytes()).expect("a buffer"));
            tasks.push(tokio::task::spawn_local(async move { sent.await.map(drop) }));
        }
        for n in 0..MESSAGES {
            assert_eq!(inbox.next().await?.memory[..], n.to_ne_bytes());
        }
        for task in tasks {
            task.await??;
        }
        drop((inbox, srq, one, other));
        assert_eq!((pool.idle(), context.leaked()), (MESSAGES as usize + 16, 0));
        Ok(())
    })
}
