//! Requests that own their memory: the data arrives, and the memory comes back, however the request
//! ends.
#![allow(clippy::drop_non_drop, clippy::forget_non_drop, reason = "callers may do either")]

use crate::capability::Capability;
use crate::env;
use crate::lent::{DEPTH, Half, hasty, pair, wait};
use crate::pair::{PATIENCE, gid};
use crate::pattern;
use crate::verdict::{Verdict, require, supported, trials};
use std::sync::Arc;
use std::time::Instant;
use uverbs::owned::{
    OwnedCompletionQueue, OwnedQueuePair, OwnedSharedReceiveQueue, RegionSlice, SharedBuffer,
};
use uverbs::{
    Access, Errno, ObjectKind, PostError, QpAttr, QpState, QpType, RingError, SendWr, WcStatus,
};

trials![
    buffers_carry_messages,
    one_sided_requests_and_atomics_complete,
    one_shared_buffer_is_sent_to_many,
    regions_are_lent_in_parts,
    full_queue_gives_the_buffer_back,
    completion_queue_filled_to_capacity_does_not_overflow,
    flushed_requests_give_their_memory_back,
    no_memory_is_freed_while_the_peer_writes_it,
    receives_of_an_srq_come_back,
    receives_of_a_closed_pair_come_back,
    messages_under_a_thread_domain_arrive,
    one_thread_posts_while_another_polls,
    rounds_leave_nothing,
    huge_pages_carry_messages,
    pages_on_demand_leave_unregistered_bytes_alone,
    pages_on_demand_are_found_by_any_address_or_refused,
];

fn buffers_carry_messages() -> Verdict {
    let (mut a, mut b) = pair()?;
    for (seed, length) in [1usize, 64, 1000, 1024, 4096].into_iter().enumerate() {
        let mut batch = b.qp.recv_batch()?;
        batch.push(b.pool.take().expect("a buffer"), 1)?;
        batch.ring()?;
        let text = pattern::bytes(seed as u64, length);
        let mut batch = a.qp.send_batch()?;
        batch.push(SendWr::send_imm(&[], 7), a.pool.copy(&text).expect("a buffer"), 2)?;
        batch.ring()?;
        let sent = a.wait()?;
        assert_eq!((sent.tag, sent.outcome.status), (2, WcStatus::SUCCESS));
        assert_eq!(sent.memory.into_buffer().as_deref(), Some(&text[..]));
        let received = b.wait()?;
        assert_eq!((received.tag, received.outcome.imm()), (1, Some(7)));
        assert_eq!(received.outcome.byte_len as usize, length);
        let mut buffer = received.memory.into_buffer().expect("the buffer");
        buffer.set_len(length);
        pattern::check(&buffer, seed as u64);
    }
    assert_eq!((a.pool.idle(), b.pool.idle()), (64, 64));
    Ok(())
}

fn one_sided_requests_and_atomics_complete() -> Verdict {
    env::access_errors()?;
    let (mut a, b) = pair()?;
    let mut theirs = b.pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u64>(64)?;
    theirs.write_at(0, 40)?;
    let remote = theirs.remote(0)?;
    let mut request = |wr: SendWr<'_>, bytes: &[u8]| {
        let mut batch = a.qp.send_batch()?;
        batch.push(wr, a.pool.copy(bytes).expect("a buffer"), 0)?;
        batch.ring()?;
        let done = a.wait()?;
        assert_eq!(done.outcome.status, WcStatus::SUCCESS);
        Ok::<_, crate::verdict::Stop>(done.memory.into_buffer().expect("the buffer"))
    };
    let before = request(SendWr::fetch_add(remote, 2, &[]), &[0; 8])?;
    assert_eq!(before[..], 40u64.to_ne_bytes());
    let before = request(SendWr::compare_swap(remote, 42, 7, &[]), &[0; 8])?;
    assert_eq!(before[..], 42u64.to_ne_bytes());
    assert_eq!(theirs.read_at(0), Some(7));
    request(SendWr::write(theirs.remote(8)?, &[]), &pattern::bytes(3, 300))?;
    let read = request(SendWr::read(theirs.remote(8)?, &[]), &[0; 300])?;
    pattern::check(&read, 3);
    // Buffers can be read by a peer if their pool allows it, and written by none.
    let offered = b.pool.copy(&pattern::bytes(4, 500)).expect("a buffer");
    let read = request(SendWr::read(offered.remote(), &[]), &[0; 500])?;
    pattern::check(&read, 4);
    let mut batch = a.qp.send_batch()?;
    batch.push(SendWr::write(offered.remote(), &[]), a.pool.copy(&[0; 500]).expect("one"), 0)?;
    batch.ring()?;
    assert_eq!(a.wait()?.outcome.status, WcStatus::REM_ACCESS_ERR);
    pattern::check(&offered, 4);
    Ok(())
}

fn one_shared_buffer_is_sent_to_many() -> Verdict {
    let (mut a, mut b) = pair()?;
    let text = pattern::bytes(5, 1000);
    let shared = a.pool.copy(&text).expect("a buffer").share();
    for tag in 0..4 {
        let mut batch = b.qp.recv_batch()?;
        batch.push(b.pool.take().expect("a buffer"), tag)?;
        batch.ring()?;
    }
    let mut batch = a.qp.send_batch()?;
    for tag in 0..4u64 {
        let part: SharedBuffer = shared.slice(tag as usize * 100..).expect("it is that long");
        batch.push(SendWr::send(&[]), part, tag)?;
    }
    batch.ring()?;
    let mut shared = Some(shared);
    for tag in 0..4 {
        let got = b.wait()?;
        let length = got.outcome.byte_len as usize;
        assert_eq!((got.tag, length), (tag, 1000 - tag as usize * 100));
        let buffer = got.memory.into_buffer().expect("the buffer");
        assert_eq!(buffer[..length], text[1000 - length..]);
        drop(a.wait()?);
        let last = shared.take().expect("it came back").into_buffer();
        shared = match last {
            Ok(alone) if tag == 3 => Some(alone.share()),
            Ok(_) => panic!("request {} still reads the buffer", tag + 1),
            Err(shared) => Some(shared),
        };
    }
    Ok(())
}

fn regions_are_lent_in_parts() -> Verdict {
    let (mut a, mut b) = pair()?;
    let mut source = a.pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u8>(4096)?;
    source.copy_from(0, &pattern::bytes(6, 4096))?;
    let source = Arc::new(source);
    let target = Arc::new(b.pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u8>(4096)?);
    let mut batch = b.qp.recv_batch()?;
    for part in 0..4 {
        let range = part * 1024..(part + 1) * 1024;
        batch.push(RegionSlice::new(&target, range)?, part as u64)?;
    }
    batch.ring()?;
    let mut batch = a.qp.send_batch()?;
    for part in 0..4 {
        let range = part * 1024..(part + 1) * 1024;
        batch.push(SendWr::send(&[]), RegionSlice::new(&source, range)?, part as u64)?;
    }
    batch.ring()?;
    for _ in 0..4 {
        drop((a.wait()?, b.wait()?));
    }
    let mut got = vec![0; 4096];
    target.copy_to(0, &mut got)?;
    pattern::check(&got, 6);
    // A part holds its region.
    let part = RegionSlice::new(&target, ..)?;
    assert!(part.is_of(&target) && Arc::try_unwrap(target).is_err());
    let context = b.context.clone();
    let regions = || supported(context.handles(ObjectKind::MR), Capability::InfoHandles);
    let before = regions()?.len();
    drop(part);
    assert_eq!(regions()?.len(), before - 1);
    Ok(())
}

fn full_queue_gives_the_buffer_back() -> Verdict {
    env::rnr_wait()?;
    let (mut a, mut b) = pair()?;
    let depth = a.qp.send_room();
    assert!(depth >= DEPTH as usize);
    for round in 0..5 {
        let mut batch = a.qp.send_batch()?;
        for tag in 0..depth as u64 {
            batch.push(SendWr::send(&[]), a.pool.copy(b"x").expect("a buffer"), tag)?;
        }
        let more = batch.push(SendWr::send(&[]), a.pool.copy(b"y").expect("a buffer"), 99);
        let refused = more.unwrap_err();
        assert_eq!((refused.error, &*refused.memory), (PostError::Full, &b"y"[..]));
        drop(refused);
        match round {
            0 => drop(batch),
            1 => std::mem::forget(batch),
            _ => {
                batch.ring()?;
                for _ in 0..depth {
                    let mut batch = b.qp.recv_batch()?;
                    batch.push(b.pool.take().expect("a buffer"), 0)?;
                    batch.ring()?;
                    drop(b.wait()?);
                }
                for tag in 0..depth as u64 {
                    assert_eq!(a.wait()?.tag, tag);
                }
                assert_eq!((a.pool.idle(), b.pool.idle()), (64, 64));
            }
        }
    }
    Ok(())
}

/// Each completed request is posted again during the visit, and the queue has hardly a spare entry.
fn completion_queue_filled_to_capacity_does_not_overflow() -> Verdict {
    const REQUESTS: usize = 5000;
    env::error_flush()?;
    let context = env::open()?;
    let pd = context.alloc_pd()?;
    let mut cq = OwnedCompletionQueue::new(context.cq_builder(60).build()?);
    let mut qps: Vec<OwnedQueuePair<usize>> = Vec::new();
    for depth in [16, 8, 4, 2, 1] {
        let make = |cq: &uverbs::CompletionQueue| {
            pd.qp_builder(cq, cq, QpType::RC).max_send_wr(depth).max_recv_wr(0).build()
        };
        while let Ok(qp) = cq.adopt(supported(make(cq.queue()), Capability::Rc)?) {
            let attr =
                QpAttr::new().state(QpState::INIT).port(env::port()).pkey_index(env::pkey_index());
            qp.modify(&attr.access(Default::default()))?;
            // In state ERR the device flushes each request at once.
            qp.modify(&QpAttr::new().state(QpState::ERR))?;
            qps.push(qp);
        }
    }
    let depths: u32 = qps.iter().map(|qp| qp.caps().max_send_wr).sum();
    // The device rounds sizes, so a few CQEs are left over.
    let spare = cq.queue().capacity() - depths;
    assert!(spare < depths, "{spare} beside {depths}");
    let mut posted = 0;
    let mut fill = |qp: &mut OwnedQueuePair<usize>, which: usize| -> Verdict {
        let room = qp.send_room().min(REQUESTS.saturating_sub(posted));
        for _ in 0..room {
            let mut batch = qp.send_batch()?;
            batch.push(SendWr::send(&[]), (), which)?;
            batch.ring()?;
        }
        posted += room;
        Ok(())
    };
    for (which, qp) in qps.iter_mut().enumerate() {
        fill(qp, which)?;
    }
    let (mut over, mut refused) = (0, None);
    let deadline = Instant::now() + PATIENCE;
    while over < REQUESTS && refused.is_none() && Instant::now() < deadline {
        over += cq.poll_each(usize::MAX, |settled| {
            assert_eq!(settled.status(), WcStatus::WR_FLUSH_ERR);
            let which = *settled.tag().expect("a tag");
            drop(settled);
            refused = refused.take().or(fill(&mut qps[which], which).err());
        })?;
    }
    refused.map_or(Ok(()), Err)?;
    assert_eq!((over, cq.unmatched()), (REQUESTS, 0), "all of them complete");
    Ok(())
}

fn flushed_requests_give_their_memory_back() -> Verdict {
    let (mut a, _b) = pair()?;
    let mut batch = a.qp.recv_batch()?;
    for tag in 0..5 {
        batch.push(a.pool.take().expect("a buffer"), tag)?;
    }
    batch.ring()?;
    a.qp.modify(&QpAttr::new().state(QpState::ERR))?;
    for tag in 0..5 {
        let done = a.wait()?;
        assert_eq!((done.tag, done.outcome.status), (tag, WcStatus::WR_FLUSH_ERR));
    }
    assert_eq!(a.pool.idle(), 64);
    // A reset returns the requests that were not even flushed.
    a.qp.reset(&mut a.cq)?;
    a.qp.modify(
        &QpAttr::new()
            .state(QpState::INIT)
            .port(env::port())
            .pkey_index(env::pkey_index())
            .access(Default::default()),
    )?;
    let mut batch = a.qp.recv_batch()?;
    batch.push(a.pool.take().expect("a buffer"), 9)?;
    batch.ring()?;
    a.qp.reset(&mut a.cq)?;
    let done = a.wait()?;
    assert_eq!((done.tag, done.outcome.status), (9, WcStatus::WR_FLUSH_ERR));
    Ok(())
}

/// A queue pair is dropped, or forgotten, while the peer writes to the memory that it was lent.
fn no_memory_is_freed_while_the_peer_writes_it() -> Verdict {
    for forget in [false, true] {
        let (mut a, mut b) = pair()?;
        let mut batch = b.qp.recv_batch()?;
        for _ in 0..DEPTH {
            batch.push(b.pool.take().expect("a buffer"), 0)?;
        }
        batch.ring()?;
        let mut batch = a.qp.send_batch()?;
        for _ in 0..DEPTH {
            let mut buffer = a.pool.take().expect("a buffer");
            buffer.fill(0xff);
            batch.push(SendWr::send(&[]), buffer, 0)?;
        }
        batch.ring()?;
        let pool = b.pool.clone();
        let Half { qp, cq, .. } = b;
        if forget {
            std::mem::forget(qp);
            assert_eq!(pool.idle(), 64 - DEPTH as usize);
        } else {
            drop(qp);
            assert_eq!(pool.idle(), 64);
            // From now on only this process writes them.
            let mut all: Vec<_> = std::iter::from_fn(|| pool.take().ok()).collect();
            all.iter_mut().for_each(|buffer| buffer.fill(1));
            std::thread::sleep(crate::pair::SILENCE);
            assert!(all.iter().all(|buffer| buffer.iter().all(|byte| *byte == 1)));
        }
        drop(cq);
        while a.pool.idle() < 64 {
            drop(a.wait()?);
        }
        assert_eq!(a.context.leaked(), 0);
    }
    Ok(())
}

fn receives_of_an_srq_come_back() -> Verdict {
    const CLIENTS: usize = 4;
    let context = env::open()?;
    let pd = context.alloc_pd()?;
    let pool = pd.buffer_pool_builder(256).count(64).build()?;
    let mut cq = OwnedCompletionQueue::new(context.cq_builder(512).build()?);
    let srq = supported(pd.srq_builder(16).build(), Capability::Srq)?;
    let mut srq = OwnedSharedReceiveQueue::new(srq)?;
    let mut clients = Vec::new();
    let mut servers = Vec::new();
    for _ in 0..CLIENTS {
        let builder = pd.qp_builder(cq.queue(), cq.queue(), QpType::RC).srq(srq.queue());
        let server = cq.adopt_on(builder.max_send_wr(1).build()?, &srq)?;
        let client = Half::new()?;
        let there = server.endpoint(&gid(&context)?)?;
        let here = client.qp.endpoint(&gid(&client.context)?)?;
        server.handshake(&here, &hasty())?;
        client.qp.handshake(&there, &hasty())?;
        servers.push(server);
        clients.push(client);
    }
    let mut batch = srq.batch()?;
    for tag in 0..2 * CLIENTS as u64 {
        batch.push(pool.take().expect("a buffer"), tag)?;
    }
    batch.ring()?;
    for (id, client) in clients.iter_mut().enumerate() {
        for _ in 0..2 {
            let mut batch = client.qp.send_batch()?;
            batch.push(SendWr::send(&[]).inline(&[id as u8]), (), 0)?;
            batch.ring()?;
        }
    }
    let mut seen = [0; CLIENTS];
    for _ in 0..2 * CLIENTS {
        let done = wait(&mut cq)?;
        let buffer = done.memory.into_buffer().expect("the buffer");
        let id = usize::from(buffer[0]);
        assert_eq!(done.outcome.qpn, servers[id].qpn());
        seen[id] += 1;
    }
    assert_eq!(seen, [2; CLIENTS]);
    let mut batch = srq.batch()?;
    batch.push(pool.take().expect("a buffer"), 0)?;
    batch.ring()?;
    drop((srq, servers));
    assert_eq!((pool.idle(), context.leaked()), (64, 0));
    Ok(())
}

/// Otherwise the places in the shared queue would be lost with the queue pair.
fn receives_of_a_closed_pair_come_back() -> Verdict {
    const MESSAGES: usize = 3;
    let context = env::open()?;
    let pd = context.alloc_pd()?;
    let pool = pd.buffer_pool_builder(256).count(64).build()?;
    let mut cq = OwnedCompletionQueue::new(context.cq_builder(128).build()?);
    let srq = supported(pd.srq_builder(4).build(), Capability::Srq)?;
    let mut srq = OwnedSharedReceiveQueue::new(srq)?;
    let room = srq.room();
    for round in 0..3 * room {
        let builder = pd.qp_builder(cq.queue(), cq.queue(), QpType::RC).srq(srq.queue());
        let server = cq.adopt_on(builder.max_send_wr(1).build()?, &srq)?;
        let mut client = Half::new()?;
        let there = server.endpoint(&gid(&context)?)?;
        let here = client.qp.endpoint(&gid(&client.context)?)?;
        server.handshake(&here, &hasty())?;
        client.qp.handshake(&there, &hasty())?;
        let mut batch = srq.batch()?;
        for tag in 0..MESSAGES as u64 {
            batch.push(pool.take().expect("a buffer"), tag)?;
        }
        batch.ring()?;
        for tag in 0..MESSAGES as u64 {
            let mut batch = client.qp.send_batch()?;
            batch.push(SendWr::send(&[]).inline(&[round as u8]), (), tag)?;
            batch.ring()?;
            // With the acknowledgement the message has arrived, and its completion is there.
            assert_eq!(client.wait()?.outcome.status, WcStatus::SUCCESS);
        }
        server.close(&mut cq)?;
        for _ in 0..MESSAGES {
            let done = wait(&mut cq)?;
            assert_eq!((done.outcome.status, done.outcome.byte_len), (WcStatus::SUCCESS, 1));
            assert_eq!(done.memory.into_buffer().expect("the buffer")[0], round as u8);
        }
        assert_eq!((srq.room(), pool.idle()), (room, 64), "round {round}");
    }
    Ok(())
}

fn messages_under_a_thread_domain_arrive() -> Verdict {
    let context = env::open()?;
    let mut td = context.alloc_td()?;
    let pd = context.alloc_pd()?;
    let parent = pd.parent_domain_builder().thread_domain(&td).build()?;
    let pool = pd.buffer_pool_builder(64).build()?;
    let mut cq = OwnedCompletionQueue::new(context.cq_builder(64).build()?);
    let mut make = || {
        let qp = parent.qp_builder(cq.queue(), cq.queue(), QpType::RC).max_send_wr(4).build()?;
        Ok::<OwnedQueuePair<u64, _>, uverbs::Error>(cq.adopt(qp)?)
    };
    let (mut a, mut b) = (make()?, make()?);
    let index = gid(&context)?;
    let (here, there) = (a.endpoint(&index)?, b.endpoint(&index)?);
    env::handshake(&a, &there)?;
    env::handshake(&b, &here)?;
    let mut batch = b.recv_batch()?;
    batch.push(pool.take().expect("a buffer"), 1)?;
    batch.ring()?;
    let mut other = context.alloc_td()?;
    let mut batch = a.send_batch()?;
    batch.push(SendWr::send(&[]), pool.copy(b"text").expect("a buffer"), 2)?;
    assert_eq!(batch.ring(&mut other), Err(RingError::ForeignThreadDomain));
    assert_eq!(pool.idle(), 63, "what was not sent is dropped");
    let mut batch = a.send_batch()?;
    batch.push(SendWr::send(&[]), pool.copy(b"text").expect("a buffer"), 2)?;
    batch.ring(&mut td)?;
    let mut tags = [wait(&mut cq)?.tag, wait(&mut cq)?.tag];
    tags.sort();
    assert_eq!(tags, [1, 2]);
    Ok(())
}

fn one_thread_posts_while_another_polls() -> Verdict {
    const MESSAGES: u64 = 2000;
    env::rnr_wait()?;
    let (a, b) = pair()?;
    let Half { qp: mut sender, cq: mut sent, pool: texts, .. } = a;
    let Half { qp: mut receiver, cq: mut received, pool: boxes, .. } = b;
    std::thread::scope(|scope| {
        let poll_sent = scope.spawn(|| {
            (0..MESSAGES).try_for_each(|tag| {
                assert_eq!(wait(&mut sent)?.tag, tag);
                Ok::<_, crate::verdict::Stop>(())
            })
        });
        let poll_received = scope.spawn(|| {
            (0..MESSAGES).try_for_each(|tag| {
                let done = wait(&mut received)?;
                let buffer = done.memory.into_buffer().expect("the buffer");
                assert_eq!((done.tag, &buffer[..8]), (tag, &tag.to_ne_bytes()[..]));
                Ok::<_, crate::verdict::Stop>(())
            })
        });
        let post_receives = scope.spawn(|| {
            for tag in 0..MESSAGES {
                let mut memory = until_some(|| boxes.take().ok());
                loop {
                    let mut batch = receiver.recv_batch()?;
                    match batch.push(memory, tag) {
                        Ok(()) => break batch.ring().unwrap(),
                        Err(refused) => memory = refused.memory,
                    }
                    drop(batch);
                    std::thread::yield_now();
                }
            }
            Ok::<_, crate::verdict::Stop>(())
        });
        for tag in 0..MESSAGES {
            let mut memory = until_some(|| texts.copy(&tag.to_ne_bytes()).ok());
            loop {
                let mut batch = sender.send_batch()?;
                match batch.push(SendWr::send(&[]), memory, tag) {
                    Ok(()) => break batch.ring()?,
                    Err(refused) => memory = refused.memory,
                }
                drop(batch);
                std::thread::yield_now();
            }
        }
        let ends = [poll_sent, poll_received, post_receives].map(|thread| thread.join());
        ends.into_iter().try_for_each(|end| end.expect("no panic"))
    })
}

fn until_some<T>(mut look: impl FnMut() -> Option<T>) -> T {
    loop {
        match look() {
            Some(found) => return found,
            None => std::thread::yield_now(),
        }
    }
}

fn rounds_leave_nothing() -> Verdict {
    let idle = env::resources()?;
    for round in 0..50 {
        let (mut a, mut b) = pair()?;
        let mut batch = b.qp.recv_batch()?;
        for tag in 0..4 {
            batch.push(b.pool.take().expect("a buffer"), tag)?;
        }
        batch.ring()?;
        let mut batch = a.qp.send_batch()?;
        batch.push(SendWr::send(&[]), a.pool.copy(b"x").expect("a buffer"), 1)?;
        batch.ring()?;
        // The objects are dropped at different stages of the exchange.
        if round % 2 == 0 {
            drop(a.wait()?);
        }
        if round % 3 == 0 {
            drop((b.qp, a.cq));
        }
        assert_eq!((a.context.leaked(), b.context.leaked()), (0, 0));
    }
    env::unchanged(&idle)
}

fn huge_pages_carry_messages() -> Verdict {
    let (mut a, mut b) = pair()?;
    let before = env::free_huge_pages()?;
    // More than there are: the error names the setting that reserves them.
    let greedy = a.pd.buffer_pool_builder(1 << 30).count(before + 1).huge_pages();
    let error = greedy.build().expect_err("more huge pages than there are");
    assert_eq!(error.errno(), Errno::NOMEM);
    assert!(error.to_string().contains("nr_hugepages"), "{error}");
    assert_eq!(env::free_huge_pages()?, before);
    require(before > 0, Capability::HugePages, "none are set aside")?;
    let pinned = env::pinned_bytes()?;
    let pool = a.pd.buffer_pool_builder(4096).count(16).huge_pages().build()?;
    assert_eq!(env::free_huge_pages()?, before - 1);
    // A huge page may be larger than the limit of locked memory.
    assert_eq!(env::pinned_bytes()? - pinned, 16 * 4096);
    // With small pages the last buffer would not be in the first one's page.
    let mut buffers: Vec<_> = std::iter::from_fn(|| pool.take().ok()).collect();
    assert_eq!(buffers.len(), 16);
    let (mut first, mut last) = (buffers.swap_remove(0), buffers.pop().expect("more than one"));
    first.copy_from_slice(&pattern::bytes(7, 4096));
    last.fill(0);
    let mut batch = b.qp.recv_batch()?;
    batch.push(b.pool.take().expect("a buffer"), 1)?;
    batch.ring()?;
    let mut batch = a.qp.recv_batch()?;
    batch.push(last, 2)?;
    batch.ring()?;
    let mut batch = a.qp.send_batch()?;
    batch.push(SendWr::send(&[]), first, 3)?;
    batch.ring()?;
    assert_eq!(a.wait()?.outcome.status, WcStatus::SUCCESS);
    let received = b.wait()?;
    assert_eq!(received.outcome.byte_len, 4096);
    let text = received.memory.into_buffer().expect("the buffer");
    pattern::check(&text, 7);
    // And back into another of them.
    let mut batch = b.qp.send_batch()?;
    batch.push(SendWr::send(&[]), text, 4)?;
    batch.ring()?;
    let received = a.wait()?;
    assert_eq!((received.tag, received.outcome.byte_len), (2, 4096));
    let text = received.memory.into_buffer().expect("the buffer");
    pattern::check(&text, 7);
    // The pool lives as long as its last buffer.
    drop((pool, buffers));
    assert_eq!(env::free_huge_pages()?, before - 1);
    drop(text);
    assert_eq!(env::free_huge_pages()?, before);
    Ok(())
}

/// The bytes of the page before the region do not belong to it.
fn pages_on_demand_leave_unregistered_bytes_alone() -> Verdict {
    let page = env::page_size();
    let (mut a, b) = pair()?;
    let memory: &'static mut [u8] = Box::leak(vec![1; 3 * page].into_boxed_slice());
    let start = memory.as_ptr().align_offset(page);
    let (front, own) = memory.split_at_mut(start + 512);
    let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
    let region = b.pd.mr_builder().access(access).on_demand().register(own);
    let region = match region.map_err(|failed| failed.error) {
        Err(error) if error.message().contains("512 bytes behind") => return Ok(()),
        answer => supported(answer, Capability::Odp)?,
    };
    let mut batch = a.qp.send_batch()?;
    let buffer = a.pool.copy(b"EVIL").expect("a buffer");
    batch.push(SendWr::write(region.remote(0)?, &[]), buffer, 0)?;
    batch.ring()?;
    assert_eq!(a.wait()?.outcome.status, WcStatus::SUCCESS);
    assert_eq!(front[start..start + 4], [1; 4], "a peer wrote what the program borrows");
    assert_eq!(region.read_at(0), Some(b'E'));
    Ok(())
}

/// The kernel finds a page by the address of the peer's request.
fn pages_on_demand_are_found_by_any_address_or_refused() -> Verdict {
    let (mut a, b) = pair()?;
    let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
    let builder = b.pd.mr_builder().access(access).on_demand().iova(0);
    let region = match builder.allocate::<u8>(4096) {
        Err(error) if error.message().contains("addressed from 0x0") => return Ok(()),
        answer => supported(answer, Capability::Odp)?,
    };
    let mut batch = a.qp.send_batch()?;
    let buffer = a.pool.copy(b"here").expect("a buffer");
    batch.push(SendWr::write(region.remote(0)?, &[]), buffer, 0)?;
    batch.ring()?;
    assert_eq!(a.wait()?.outcome.status, WcStatus::SUCCESS);
    assert_eq!(region.read_at(0), Some(b'h'));
    Ok(())
}
