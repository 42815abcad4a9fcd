//! Completion queues and completion channels without traffic.

use crate::capability::Capability;
use crate::env;
use crate::pair::{Config, PATIENCE, Pair, SILENCE, gid};
use crate::verdict::{Verdict, supported, trials};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};
use uverbs::{
    Access, CompletionQueue, Errno, Notify, QpType, Remote, Rkey, SendWr, Wc, WcOpcode, WcStatus,
};

trials![
    holds_at_least_the_cqes_asked_for,
    empty_queue_has_no_completion,
    poll_into_copies_completions_out,
    a_failed_request_is_an_error,
    queue_pairs_come_while_another_thread_polls,
    zero_cqes_are_refused,
    every_completion_vector_exists_and_no_more,
    resize_grows_and_shrinks,
    resize_to_zero_is_refused,
    resize_keeps_unpolled_completions,
    resize_to_the_same_size_keeps_unpolled_completions,
    resize_below_the_unpolled_completions_is_refused,
    notify_needs_a_channel,
    armed_queue_is_silent_without_traffic,
    moderated_queue_raises_one_event_for_several_completions,
    moderation_beyond_the_limits_is_refused,
    channel_is_busy_until_its_queues_are_destroyed,
    channel_without_events_does_not_block,
    outlives_its_context_handle,
];

fn holds_at_least_the_cqes_asked_for() -> Verdict {
    let context = env::open()?;
    for cqe in [1, 2, 3, 63, 64, 65, 1000, 4095] {
        let cq = context.cq_builder(cqe).build()?;
        assert!(cq.capacity() >= cqe, "{} entries, asked for {cqe}", cq.capacity());
    }
    Ok(())
}

fn empty_queue_has_no_completion() -> Verdict {
    let context = env::open()?;
    let mut cq = context.cq_builder(16).build()?;
    for _ in 0..3 {
        assert!(cq.poll()?.next().is_none(), "a completion of nothing");
    }
    Ok(())
}

/// Polls until the array is full.
fn fill(cq: &mut CompletionQueue, wcs: &mut [Wc]) -> Verdict {
    let deadline = Instant::now() + PATIENCE;
    let mut filled = 0;
    while filled < wcs.len() {
        filled += cq.poll_into(&mut wcs[filled..])?;
        assert!(Instant::now() < deadline, "{filled} completions after {PATIENCE:?}");
        std::thread::yield_now();
    }
    Ok(())
}

fn poll_into_copies_completions_out() -> Verdict {
    let mut pair = Pair::new(Config::rc())?;
    for id in 0..6 {
        pair.b.recv(id, 0..100)?;
    }
    let sges = [pair.a.sge(0..64)];
    for id in 10..16 {
        pair.a.send(SendWr::send_imm(&sges, id as u32).id(id).signaled())?;
    }
    let mut wcs = [Wc::default(); 6];
    // Two arrays: the second poll continues after the first.
    let (first, second) = wcs.split_at_mut(4);
    fill(&mut pair.b.cq, first)?;
    fill(&mut pair.b.cq, second)?;
    for (id, wc) in wcs.iter().enumerate() {
        let wc = wc.ok()?;
        assert_eq!((wc.wr_id, wc.opcode), (id as u64, WcOpcode::RECV));
        assert_eq!((wc.byte_len, wc.imm), (64, Some(id as u32 + 10)));
        assert_eq!(wc.qpn, pair.b.qp.qpn());
    }
    fill(&mut pair.a.cq, &mut wcs)?;
    assert_eq!(wcs.map(|wc| wc.wr_id), [10, 11, 12, 13, 14, 15]);
    assert!(wcs.iter().all(|wc| wc.is_success() && wc.opcode == WcOpcode::SEND), "{wcs:?}");
    assert_eq!(pair.a.cq.poll_into(&mut wcs)?, 0);
    assert_eq!(pair.b.cq.poll_into(&mut wcs)?, 0);
    Ok(())
}

fn a_failed_request_is_an_error() -> Verdict {
    env::access_errors()?;
    let mut pair = Pair::new(Config::rc())?;
    let remote = pair.b.remote(0);
    let wrong = Remote { rkey: Rkey(remote.rkey.0 ^ 0x55), ..remote };
    let sges = [pair.a.sge(0..100)];
    pair.a.send_all(&[SendWr::write(wrong, &sges).id(1), SendWr::send(&sges).id(2)])?;
    let mut wcs = [Wc::default(); 2];
    fill(&mut pair.a.cq, &mut wcs)?;
    let [failed, flushed] = wcs.map(|wc| wc.ok().map(drop).unwrap_err());
    assert_eq!((failed.status, failed.wr_id), (WcStatus::REM_ACCESS_ERR, 1));
    assert_eq!(failed.qpn, pair.a.qp.qpn());
    assert!(failed.to_string().contains("remote access error"), "{failed}");
    assert!(!failed.is_flush() && flushed.is_flush(), "{flushed}");
    assert_eq!(flushed.wr_id, 2);
    Ok(())
}

fn queue_pairs_come_while_another_thread_polls() -> Verdict {
    let context = env::open()?;
    let pd = context.alloc_pd()?;
    let mut cq = context.cq_builder(64).build()?;
    let handle = cq.control();
    let (found, done) = mpsc::channel();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let poller = scope.spawn(|| -> Verdict {
            let mut wcs = [Wc::default(); 8];
            while !over.load(Ordering::Relaxed) {
                let count = cq.poll_into(&mut wcs)?;
                for wc in &wcs[..count] {
                    // The receiver of the channel is gone if the other thread has failed.
                    let _ = found.send(*wc);
                }
                std::thread::yield_now();
            }
            Ok(())
        });
        let messages = (0..20).try_for_each(|id| {
            let qp = || pd.qp_builder(&handle, &handle, QpType::RC).max_inline_data(8).build();
            let (mut one, other) = (qp()?, qp()?);
            let gid = gid(&context)?;
            let (here, there) = (one.endpoint(&gid)?, other.endpoint(&gid)?);
            env::handshake(&one, &there)?;
            env::handshake(&other, &here)?;
            let memory = pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u64>(1)?;
            let write = SendWr::write(memory.remote(0)?, &[]).inline(&[7; 8]);
            let mut batch = one.send_batch()?;
            batch.push(write.id(id).signaled())?;
            #[allow(unsafe_code, reason = "ringing is")]
            // SAFETY: the request carries its data.
            unsafe { batch.ring() }?;
            let wc = done.recv_timeout(PATIENCE)?;
            let wc = wc.ok()?;
            assert_eq!((wc.wr_id, wc.qpn), (id, one.qpn()));
            assert_eq!(memory.read_at(0), Some(u64::from_ne_bytes([7; 8])));
            Verdict::Ok(())
        });
        over.store(true, Ordering::Relaxed);
        poller.join().expect("it does not panic")?;
        messages
    })?;
    assert_eq!(cq.destroy().unwrap_err().error.errno(), Errno::BUSY);
    Ok(())
}

fn zero_cqes_are_refused() -> Verdict {
    let context = env::open()?;
    let error = context.cq_builder(0).build().unwrap_err();
    assert_eq!(error.errno(), Errno::INVAL);
    assert!(error.message().contains("minimum"), "{error}");
    Ok(())
}

fn every_completion_vector_exists_and_no_more() -> Verdict {
    let context = env::open()?;
    let vectors = context.completion_vectors();
    for vector in 0..vectors.min(64) {
        context.cq_builder(1).vector(vector).build()?;
    }
    for vector in [vectors, u32::MAX] {
        let error = context.cq_builder(1).vector(vector).build().unwrap_err();
        assert_eq!(error.errno(), Errno::INVAL);
        assert!(error.message().contains(&vectors.to_string()), "{error}");
    }
    Ok(())
}

fn resize_grows_and_shrinks() -> Verdict {
    let context = env::open()?;
    let mut cq = context.cq_builder(4).build()?;
    for cqe in [100, 1, 2000] {
        supported(cq.resize(cqe), Capability::CqResize)?;
        assert!(cq.capacity() >= cqe, "{} entries, asked for {cqe}", cq.capacity());
        assert!(cq.poll()?.next().is_none());
    }
    Ok(())
}

fn resize_to_zero_is_refused() -> Verdict {
    let context = env::open()?;
    let mut cq = context.cq_builder(4).build()?;
    let capacity = cq.capacity();
    assert_eq!(cq.resize(0).unwrap_err().errno(), Errno::INVAL);
    assert_eq!(cq.capacity(), capacity, "a refused resize changed the queue");
    Ok(())
}

fn notify_needs_a_channel() -> Verdict {
    let context = env::open()?;
    let mut cq = context.cq_builder(1).build()?;
    let error = cq.req_notify(Notify::Next).unwrap_err();
    assert_eq!(error.errno(), Errno::INVAL);
    assert!(error.message().contains("channel"), "{error}");
    Ok(())
}

fn armed_queue_is_silent_without_traffic() -> Verdict {
    let context = env::open()?;
    let channel = context.create_comp_channel()?;
    let mut cq = context.cq_builder(1).channel(&channel).build()?;
    cq.req_notify(Notify::Next)?;
    cq.req_notify(Notify::Solicited)?;
    assert_eq!(channel.wait(Some(Duration::from_millis(50)))?, None);
    Ok(())
}

/// One completion of b's.
fn complete(pair: &mut Pair, wr_id: u64) -> Verdict {
    pair.b.recv(wr_id, 0..8)?;
    pair.a.send(SendWr::send(&[]).id(wr_id).signaled())?;
    pair.a.expect(wr_id, WcOpcode::SEND)?;
    Ok(())
}

fn moderated_queue_raises_one_event_for_several_completions() -> Verdict {
    let mut pair = Pair::new(Config::rc())?;
    supported(pair.b.cq.moderate(4, 0), Capability::CqModeration)?;
    let key = pair.b.cq.key();
    for round in 0..3 {
        pair.b.cq.req_notify(Notify::Next)?;
        for n in 0..3 {
            complete(&mut pair, n)?;
        }
        assert_eq!(pair.b.channel.wait(Some(SILENCE))?, None, "round {round}");
        complete(&mut pair, 3)?;
        assert_eq!(pair.b.channel.wait(Some(PATIENCE))?, Some(key), "round {round}");
        for n in 0..4 {
            pair.b.expect(n, WcOpcode::RECV)?;
        }
    }
    assert_eq!(pair.b.channel.try_next()?, None);
    // Few completions are announced after the period, and each one when moderation is off.
    for (count, period) in [(100, 2000), (0, 0)] {
        pair.b.cq.moderate(count, period)?;
        pair.b.cq.req_notify(Notify::Next)?;
        complete(&mut pair, 9)?;
        assert_eq!(pair.b.channel.wait(Some(PATIENCE))?, Some(key), "{count} {period}");
        pair.b.expect(9, WcOpcode::RECV)?;
    }
    Ok(())
}

fn moderation_beyond_the_limits_is_refused() -> Verdict {
    let context = env::open()?;
    let cq = context.cq_builder(4).build()?;
    let Some(caps) = context.query_device()?.moderation_caps else {
        let error = cq.moderate(1, 1).unwrap_err();
        assert_eq!((error.verb(), error.errno()), ("modify_cq", Errno::OPNOTSUPP));
        assert!(error.message().contains(env::device().name()), "{error}");
        return Ok(());
    };
    cq.moderate(caps.max_count, caps.max_period_us)?;
    if let Some(more) = caps.max_period_us.checked_add(1) {
        let error = cq.moderate(1, more).unwrap_err();
        assert_eq!(error.errno(), Errno::INVAL);
        assert!(error.message().contains(&caps.max_period_us.to_string()), "{error}");
    }
    Ok(())
}

fn channel_is_busy_until_its_queues_are_destroyed() -> Verdict {
    let context = env::open()?;
    let channel = context.create_comp_channel()?;
    let cq = context.cq_builder(1).channel(&channel).build()?;
    let (channel, error) = channel.destroy().unwrap_err().into_parts();
    assert_eq!(error.errno(), Errno::BUSY);
    cq.destroy()?;
    channel.destroy()?;
    Ok(())
}

fn channel_without_events_does_not_block() -> Verdict {
    let channel = env::open()?.create_comp_channel()?;
    assert_eq!(channel.try_next()?, None);
    let flags = rustix::io::fcntl_getfd(channel.as_fd())?;
    assert!(flags.contains(rustix::io::FdFlags::CLOEXEC), "a program that is started inherits it");
    Ok(())
}

fn outlives_its_context_handle() -> Verdict {
    let mut cq = env::open()?.cq_builder(8).build()?;
    assert!(cq.poll()?.next().is_none());
    assert_eq!(cq.context().device(), &env::device());
    cq.destroy()?;
    Ok(())
}

/// A pair in which b's completion queue holds this many unpolled completions of receives.
fn pending(count: u64) -> Verdict<Pair> {
    let mut pair = Pair::new(Config { cqe: 10, ..Config::rc() })?;
    for wr_id in 0..count {
        pair.b.recv(wr_id, 0..8)?;
        pair.a.send(SendWr::send(&[]).id(wr_id).signaled())?;
        pair.a.expect(wr_id, WcOpcode::SEND)?;
    }
    Ok(pair)
}

fn resize_keeps_unpolled_completions() -> Verdict {
    // At several places of the ring, and after some polls.
    for (before, cqe) in [(0, 100), (1, 6), (3, 1000), (5, 7)] {
        let mut pair = pending(6 + before)?;
        for wr_id in 0..before {
            pair.b.expect(wr_id, WcOpcode::RECV)?;
        }
        supported(pair.b.cq.resize(cqe), Capability::CqResize)?;
        for wr_id in before..6 + before {
            pair.b.expect(wr_id, WcOpcode::RECV)?;
        }
        pair.b.expect_silence()?;
        pair.message(77, 500)?;
    }
    Ok(())
}

fn resize_to_the_same_size_keeps_unpolled_completions() -> Verdict {
    let mut pair = pending(4)?;
    stay(&mut pair, 4)
}

/// Resizes a queue with `there` completions to the size that it has, by several requested sizes,
/// and expects these completions and later ones.
pub(crate) fn stay(pair: &mut Pair, there: u64) -> Verdict {
    let cqe = pair.b.cq.capacity() - 1;
    for cqe in [cqe, cqe - 1, cqe] {
        supported(pair.b.cq.resize(cqe), Capability::CqResize)?;
    }
    for wr_id in 0..there {
        pair.b.expect(wr_id, WcOpcode::RECV)?;
    }
    pair.b.expect_silence()?;
    // More than once around a queue of the usual 64.
    for wr_id in 0..150 {
        pair.message(1000 + wr_id, 30)?;
        supported(pair.b.cq.resize(cqe), Capability::CqResize)?;
    }
    Ok(())
}

fn resize_below_the_unpolled_completions_is_refused() -> Verdict {
    let mut pair = pending(9)?;
    let capacity = pair.b.cq.capacity();
    match pair.b.cq.resize(2) {
        Err(error) => {
            assert_eq!(error.errno(), Errno::INVAL);
            assert_eq!(pair.b.cq.capacity(), capacity);
        }
        // A device may round the size up.
        Ok(()) => assert!(pair.b.cq.capacity() >= 9),
    }
    for wr_id in 0..9 {
        pair.b.expect(wr_id, WcOpcode::RECV)?;
    }
    Ok(())
}
