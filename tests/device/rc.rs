//! Reliable connections: messages, remote memory, queues.
#![allow(clippy::drop_non_drop, clippy::forget_non_drop, reason = "callers may do either")]

use crate::capability::Capability;
use crate::env;
use crate::pair::{Config, Pair};
use crate::verdict::{Verdict, require, supported, trials};
use std::time::{Duration, Instant};
use uverbs::{
    Access, DeviceCaps, Errno, FlushLevel, MemoryRegion, Notify, Placement, PostError, QpType,
    RingError, SendWr, Sge, WcOpcode, WcStatus,
};

trials![
    messages_of_every_size,
    messages_in_both_directions,
    immediate_data_arrives,
    gathered_data_is_scattered,
    inline_data_arrives,
    inline_data_of_several_slices_arrives,
    inline_is_copied_when_pushed,
    oversize_inline_is_refused,
    writes_reach_the_peers_memory,
    write_with_immediate_completes_a_receive,
    reads_fetch_the_peers_memory,
    read_data_is_scattered,
    null_region_swallows_data_and_reads_as_zeros,
    empty_messages_arrive,
    unsignaled_sends_do_not_complete,
    signal_all_completes_every_send,
    batches_keep_their_order,
    dropped_batch_sends_nothing,
    rings_wrap_around,
    full_send_queue_refuses_until_a_completion,
    full_receive_queue_refuses_until_a_completion,
    too_many_entries_are_refused,
    too_long_messages_are_refused,
    fence_waits_for_reads,
    shared_completion_queue_for_two_pairs,
    dropped_pair_leaves_no_completions,
    messages_between_two_devices_arrive,
    doorbells_work_after_a_change_of_credentials,
    flush_of_a_range_completes,
    flush_of_a_region_completes,
    only_its_own_thread_domain_rings_a_batch,
    messages_of_every_size_for_a_minute,
];

fn messages_of_every_size() -> Verdict {
    let mut pair = Pair::new(Config::rc())?;
    let mtu = pair.config.mtu.bytes().expect("a known MTU") as usize;
    let lengths = [1, 2, 63, 64, 65, mtu - 1, mtu, mtu + 1, 2 * mtu, 3 * mtu + 5, 65536, 100_001];
    for (seed, length) in lengths.into_iter().enumerate() {
        pair.message(seed as u64, length)?;
    }
    Ok(())
}

fn messages_in_both_directions() -> Verdict {
    let mut pair = Pair::new(Config::rc())?;
    for seed in 0..20 {
        pair.message(seed, 500)?;
        std::mem::swap(&mut pair.a, &mut pair.b);
    }
    Ok(())
}

fn immediate_data_arrives() -> Verdict {
    let Pair { mut a, mut b, .. } = Pair::new(Config::rc())?;
    for imm in [0, 1, 0x0102_0304, u32::MAX] {
        let seed = imm.into();
        b.poison(0..100);
        b.recv(1, 0..100)?;
        a.fill(0..100, seed);
        let sges = [a.sge(0..100)];
        a.send(SendWr::send_imm(&sges, imm).id(2).signaled())?;
        a.expect(2, WcOpcode::SEND)?;
        let received = b.expect(1, WcOpcode::RECV)?;
        assert_eq!((received.imm, received.byte_len), (Some(imm), 100));
        b.check(0..100, seed);
    }
    // A message without immediate data shows none.
    b.recv(1, 0..100)?;
    let sges = [a.sge(0..100)];
    a.send(SendWr::send(&sges))?;
    assert_eq!(b.expect(1, WcOpcode::RECV)?.imm, None);
    Ok(())
}

fn gathered_data_is_scattered() -> Verdict {
    let Pair { mut a, mut b, .. } = Pair::new(Config::rc())?;
    b.poison(0..8192);
    a.fill(0..3000, 5);
    // The same bytes in other pieces on each side, with holes between them.
    let from = [a.sge(0..1), a.sge(1..1025), a.sge(1025..1025), a.sge(1025..3000)];
    let to = [b.sge(100..1100), b.sge(2000..2007), b.sge(3000..5500)];
    b.recv_into(1, &to)?;
    a.send(SendWr::send(&from).id(2).signaled())?;
    a.expect(2, WcOpcode::SEND)?;
    assert_eq!(b.expect(1, WcOpcode::RECV)?.byte_len, 3000);
    let arrived = [b.read(100..1100), b.read(2000..2007), b.read(3000..4993)].concat();
    crate::pattern::check(&arrived, 5);
    // The bytes between and after the pieces are untouched.
    let poison = crate::pattern::bytes(crate::pattern::POISON, 8192);
    for hole in [0..100, 1100..2000, 2007..3000, 4993..8192] {
        assert!(b.read(hole.clone()) == poison[hole.clone()], "bytes in {hole:?} were written");
    }
    Ok(())
}

/// In writes and sends, for lengths that fill one WQEBB or several, and in a batch between others.
fn inline_data_of_several_slices_arrives() -> Verdict {
    let Pair { mut a, mut b, .. } = Pair::new(Config { inline: 200, ..Config::rc() })?;
    for (seed, length) in [1usize, 15, 16, 45, 64, 199, 200].into_iter().enumerate() {
        let data = crate::pattern::bytes(seed as u64, length);
        let (one, rest) = data.split_at(length / 3);
        let (two, three) = rest.split_at(rest.len() / 2);
        let parts = [one, &[], two, three];
        b.poison(0..512);
        b.recv(1, 0..length)?;
        let write = SendWr::write(b.remote(256), &[]).inline_list(&parts);
        a.send_all(&[write, SendWr::send(&[]).inline_list(&parts).id(2).signaled()])?;
        a.expect(2, WcOpcode::SEND)?;
        assert_eq!(b.expect(1, WcOpcode::RECV)?.byte_len as usize, length);
        b.check(0..length, seed as u64);
        b.check(256..256 + length, seed as u64);
    }
    let parts = [&[0; 250][..]; 4];
    let refused = a.qp.send_batch()?.push(SendWr::send(&[]).inline_list(&parts));
    assert!(matches!(refused, Err(PostError::InlineTooLong { .. })), "{refused:?}");
    Ok(())
}

fn null_region_swallows_data_and_reads_as_zeros() -> Verdict {
    let Pair { mut a, mut b, .. } = Pair::new(Config::rc())?;
    let null = supported(b.pd.alloc_null_mr(), Capability::NullMr)?;
    let (one, two) = (a.pd.alloc_null_mr()?, null);
    a.fill(0..1000, 3);
    b.poison(0..1000);
    // The middle of a message goes nowhere.
    let to = [b.sge(0..100), two.sge(800), b.sge(900..1000)];
    b.recv_into(1, &to)?;
    let sges = [a.sge(0..1000)];
    a.send(SendWr::send(&sges).id(2).signaled())?;
    a.expect(2, WcOpcode::SEND)?;
    assert_eq!(b.expect(1, WcOpcode::RECV)?.byte_len, 1000);
    let sent = crate::pattern::bytes(3, 1000);
    let poison = crate::pattern::bytes(crate::pattern::POISON, 1000);
    assert_eq!([b.read(0..100), b.read(900..1000)], [&sent[..100], &sent[900..]]);
    assert!(b.read(100..900) == poison[100..900], "bytes that no entry names were written");
    // Zeros are sent, in one packet and in several.
    for length in [1, 500, 5000] {
        b.poison(0..length + 8);
        b.recv(3, 0..length + 8)?;
        let sges = [one.sge(length as u32), a.sge(0..8)];
        a.send(SendWr::send(&sges).id(4).signaled())?;
        a.expect(4, WcOpcode::SEND)?;
        b.expect(3, WcOpcode::RECV)?;
        assert_eq!(b.read(0..length), vec![0; length]);
        assert_eq!(b.read(length..length + 8), a.read(0..8));
    }
    // Data of a read goes nowhere.
    let sges = [one.sge(700)];
    a.send(SendWr::read(b.remote(0), &sges).id(5).signaled())?;
    a.expect(5, WcOpcode::READ)?;
    // A peer cannot name it.
    let remote = uverbs::Remote { addr: 0, rkey: uverbs::Rkey(two.lkey().0) };
    let sges = [a.sge(0..8)];
    a.send(SendWr::write(remote, &sges).id(6).signaled())?;
    assert_eq!(a.wait()?.status, WcStatus::REM_ACCESS_ERR);
    Ok(())
}

fn inline_data_arrives() -> Verdict {
    let Pair { mut a, mut b, .. } = Pair::new(Config::rc())?;
    let max = a.qp.caps().max_inline_data as usize;
    for (seed, length) in [0, 1, 15, 16, 17, max - 1, max].into_iter().enumerate() {
        let seed = seed as u64;
        b.poison(0..length);
        b.recv(1, 0..length)?;
        let bytes = crate::pattern::bytes(seed, length);
        a.send(SendWr::send(&[]).inline(&bytes).id(2).signaled())?;
        a.expect(2, WcOpcode::SEND)?;
        assert_eq!(b.expect(1, WcOpcode::RECV)?.byte_len as usize, length);
        b.check(0..length, seed);
        // The same for a write.
        b.poison(0..length);
        let remote = b.remote(0);
        a.send(SendWr::write(remote, &[]).inline(&bytes).id(3).signaled())?;
        a.expect(3, WcOpcode::WRITE)?;
        b.check(0..length, seed);
    }
    Ok(())
}

#[allow(unsafe_code, reason = "ringing is")]
fn inline_is_copied_when_pushed() -> Verdict {
    let Pair { mut a, mut b, .. } = Pair::new(Config::rc())?;
    b.recv(1, 0..32)?;
    let mut bytes = crate::pattern::bytes(7, 32);
    let mut batch = a.qp.send_batch()?;
    batch.push(SendWr::send(&[]).inline(&bytes))?;
    bytes.fill(0);
    // SAFETY: the request names no memory.
    unsafe { batch.ring() }?;
    b.expect(1, WcOpcode::RECV)?;
    b.check(0..32, 7);
    Ok(())
}

fn oversize_inline_is_refused() -> Verdict {
    let mut pair = Pair::new(Config::rc())?;
    let max = pair.a.qp.caps().max_inline_data;
    let bytes = vec![0; max as usize + 1];
    let refused = pair.a.send(SendWr::send(&[]).inline(&bytes));
    assert_eq!(refused, Err(PostError::InlineTooLong { max }));
    let remote = pair.b.remote(0);
    let refused = pair.a.send(SendWr::read(remote, &[]).inline(&bytes[..8]));
    assert_eq!(refused, Err(PostError::NoInline));
    pair.message(1, 100)
}

fn writes_reach_the_peers_memory() -> Verdict {
    let Pair { mut a, mut b, .. } = Pair::new(Config::rc())?;
    b.poison(0..100_000);
    for (seed, (offset, length)) in
        [(0, 1), (1, 7), (4095, 2), (5000, 1024), (8192, 65537)].into_iter().enumerate()
    {
        let seed = seed as u64;
        a.fill(0..length, seed);
        let sges = [a.sge(0..length)];
        let remote = b.remote(offset);
        a.send(SendWr::write(remote, &sges).id(seed).signaled())?;
        a.expect(seed, WcOpcode::WRITE)?;
        b.check(offset..offset + length, seed);
    }
    // The peer has no completion of it.
    b.expect_silence()
}

fn write_with_immediate_completes_a_receive() -> Verdict {
    let Pair { mut a, mut b, .. } = Pair::new(Config::rc())?;
    b.poison(0..6000);
    // The receive's own memory is not touched.
    b.recv(1, 0..1000)?;
    a.fill(0..3000, 8);
    let sges = [a.sge(0..3000)];
    let remote = b.remote(2000);
    a.send(SendWr::write_imm(remote, &sges, 0xfeed_beef).id(2).signaled())?;
    a.expect(2, WcOpcode::WRITE)?;
    let received = b.expect(1, WcOpcode::RECV_WRITE_IMM)?;
    assert_eq!((received.imm, received.byte_len), (Some(0xfeed_beef), 3000));
    b.check(2000..5000, 8);
    let poison = crate::pattern::bytes(crate::pattern::POISON, 6000);
    assert!(b.read(0..2000) == poison[..2000], "the receive's memory was written");
    Ok(())
}

fn reads_fetch_the_peers_memory() -> Verdict {
    let Pair { mut a, mut b, .. } = Pair::new(Config::rc())?;
    for (seed, (offset, length)) in
        [(0, 1), (3, 8), (4094, 5), (6000, 1024), (8191, 50_001)].into_iter().enumerate()
    {
        let seed = seed as u64;
        b.fill(offset..offset + length, seed);
        a.poison(0..length);
        let sges = [a.sge(0..length)];
        let remote = b.remote(offset);
        a.send(SendWr::read(remote, &sges).id(seed).signaled())?;
        a.expect(seed, WcOpcode::READ)?;
        a.check(0..length, seed);
    }
    Ok(())
}

fn read_data_is_scattered() -> Verdict {
    let Pair { mut a, mut b, .. } = Pair::new(Config::rc())?;
    b.fill(0..4000, 3);
    a.poison(0..8000);
    let sges = [a.sge(10..11), a.sge(1000..3000), a.sge(4000..5999)];
    let remote = b.remote(0);
    a.send(SendWr::read(remote, &sges).id(1).signaled())?;
    a.expect(1, WcOpcode::READ)?;
    crate::pattern::check(&[a.read(10..11), a.read(1000..3000), a.read(4000..5999)].concat(), 3);
    Ok(())
}

fn empty_messages_arrive() -> Verdict {
    let Pair { mut a, mut b, .. } = Pair::new(Config::rc())?;
    b.recv_into(1, &[])?;
    a.send(SendWr::send(&[]).id(2).signaled())?;
    a.expect(2, WcOpcode::SEND)?;
    assert_eq!(b.expect(1, WcOpcode::RECV)?.byte_len, 0);
    b.recv_into(3, &[])?;
    let remote = b.remote(0);
    a.send(SendWr::write_imm(remote, &[], 9).id(4).signaled())?;
    a.expect(4, WcOpcode::WRITE)?;
    assert_eq!(b.expect(3, WcOpcode::RECV_WRITE_IMM)?.imm, Some(9));
    Ok(())
}

fn unsignaled_sends_do_not_complete() -> Verdict {
    let Pair { mut a, mut b, .. } = Pair::new(Config::rc())?;
    for wr_id in 0..5 {
        b.recv(wr_id, 0..64)?;
    }
    let sges = [a.sge(0..64)];
    for wr_id in 0..4 {
        a.send(SendWr::send(&sges).id(wr_id))?;
    }
    a.send(SendWr::send(&sges).id(4).signaled())?;
    a.expect(4, WcOpcode::SEND)?;
    for wr_id in 0..5 {
        b.expect(wr_id, WcOpcode::RECV)?;
    }
    a.expect_silence()
}

fn signal_all_completes_every_send() -> Verdict {
    let Pair { mut a, mut b, .. } = Pair::new(Config { signal_all: true, ..Config::rc() })?;
    assert!(a.qp.query()?.signal_all);
    for wr_id in 0..4 {
        b.recv(wr_id, 0..64)?;
    }
    let sges = [a.sge(0..64)];
    for wr_id in 0..4 {
        a.send(SendWr::send(&sges).id(wr_id))?;
    }
    for wr_id in 0..4 {
        a.expect(wr_id, WcOpcode::SEND)?;
    }
    Ok(())
}

fn batches_keep_their_order() -> Verdict {
    let Pair { mut a, mut b, .. } = Pair::new(Config::rc())?;
    b.poison(0..1600);
    for n in 0..16 {
        b.recv(n as u64, n * 100..(n + 1) * 100)?;
        a.fill(n * 100..(n + 1) * 100, n as u64);
    }
    let sges: Vec<[Sge; 1]> = (0..16).map(|n| [a.sge(n * 100..(n + 1) * 100)]).collect();
    let wrs: Vec<SendWr<'_>> = sges
        .iter()
        .enumerate()
        .map(|(n, sges)| SendWr::send(sges).id(n as u64).signaled())
        .collect();
    a.send_all(&wrs)?;
    for n in 0..16 {
        a.expect(n as u64, WcOpcode::SEND)?;
        b.expect(n as u64, WcOpcode::RECV)?;
        b.check(n * 100..(n + 1) * 100, n as u64);
    }
    Ok(())
}

fn dropped_batch_sends_nothing() -> Verdict {
    let mut pair = Pair::new(Config::rc())?;
    let sges = [pair.a.sge(0..64)];
    let room = pair.a.qp.send_batch()?.room();
    for forget in [false, true] {
        let mut batch = pair.a.qp.send_batch()?;
        batch.push(SendWr::send(&sges).id(66).signaled())?;
        batch.push(SendWr::send(&sges).id(67).signaled())?;
        assert_eq!((batch.len(), batch.room()), (2, room - 2));
        if forget {
            std::mem::forget(batch);
        }
    }
    assert_eq!(pair.a.qp.send_batch()?.room(), room);
    pair.a.expect_silence()?;
    // The next batch does not bring the dropped one along.
    pair.message(1, 64)?;
    pair.a.expect_silence()
}

fn rings_wrap_around() -> Verdict {
    let mut pair = Pair::new(Config { depth: 3, cqe: 3, ..Config::rc() })?;
    for seed in 0..200 {
        pair.message(seed, 33)?;
    }
    Ok(())
}

fn full_send_queue_refuses_until_a_completion() -> Verdict {
    let Pair { mut a, mut b, .. } = Pair::new(Config { depth: 9, ..Config::rc() })?;
    let capacity = a.qp.send_batch()?.room();
    assert!(capacity >= a.qp.caps().max_send_wr);
    let depth = capacity.min(b.qp.recv_batch()?.room());
    let sges = [a.sge(0..8)];
    // More rounds than slots, so that the queue wraps at every position.
    for round in 0..2 * u64::from(capacity) {
        for n in 0..depth {
            b.recv(n.into(), 0..8)?;
        }
        let mut batch = a.qp.send_batch()?;
        assert_eq!(batch.room(), capacity, "round {round}: completions did not make room");
        for n in 0..capacity {
            batch.push(SendWr::send(&sges).id(n.into()))?;
        }
        assert_eq!(batch.push(SendWr::send(&sges)), Err(PostError::Full));
        assert_eq!((batch.len(), batch.room()), (capacity, 0));
        drop(batch);
        let wrs: Vec<SendWr<'_>> =
            (0..depth).map(|n| SendWr::send(&sges).id(n.into()).signaled()).collect();
        a.send_all(&wrs)?;
        for n in 0..u64::from(depth) {
            a.expect(n, WcOpcode::SEND)?;
            b.expect(n, WcOpcode::RECV)?;
        }
    }
    Ok(())
}

fn full_receive_queue_refuses_until_a_completion() -> Verdict {
    let mut pair = Pair::new(Config::rc())?;
    let room = pair.b.qp.recv_batch()?.room();
    assert!(room >= pair.b.qp.caps().max_recv_wr);
    for n in 0..room {
        pair.b.recv(n.into(), 0..64)?;
    }
    assert_eq!(pair.b.recv(99, 0..64), Err(PostError::Full));
    let sges = [pair.a.sge(0..64)];
    pair.a.send(SendWr::send(&sges))?;
    pair.b.expect(0, WcOpcode::RECV)?;
    // A consumed receive makes room for one.
    pair.b.recv(100, 0..64)?;
    assert_eq!(pair.b.recv(99, 0..64), Err(PostError::Full));
    Ok(())
}

fn too_many_entries_are_refused() -> Verdict {
    let mut pair = Pair::new(Config::rc())?;
    let (send, recv) = (pair.a.qp.caps().max_send_sge, pair.b.qp.caps().max_recv_sge);
    let sges = vec![pair.a.sge(0..1); send as usize + 1];
    assert_eq!(pair.a.send(SendWr::send(&sges)), Err(PostError::TooManySge { max: send }));
    let sges = vec![pair.b.sge(0..1); recv as usize + 1];
    assert_eq!(pair.b.recv_into(1, &sges), Err(PostError::TooManySge { max: recv }));
    pair.message(1, 10)?;
    // The granted number is accepted.
    let to = vec![pair.b.sge(0..1); recv as usize];
    pair.b.recv_into(1, &to)?;
    let from = vec![pair.a.sge(0..1); (recv.min(send)) as usize];
    pair.a.send(SendWr::send(&from).id(2).signaled())?;
    pair.a.expect(2, WcOpcode::SEND)?;
    assert_eq!(pair.b.expect(1, WcOpcode::RECV)?.byte_len, recv.min(send));
    Ok(())
}

fn too_long_messages_are_refused() -> Verdict {
    let mut pair = Pair::new(Config::rc())?;
    let huge = Sge { length: u32::MAX, ..pair.a.sge(0..1) };
    let refused = pair.a.send(SendWr::send(&[huge, huge]));
    assert_eq!(refused, Err(PostError::TooLong));
    pair.message(1, 10)
}

fn fence_waits_for_reads() -> Verdict {
    let Pair { mut a, mut b, .. } = Pair::new(Config::rc())?;
    for seed in 0..20 {
        b.fill(0..60_000, seed);
        b.poison(60_000..120_000);
        a.poison(0..60_000);
        let sges = [a.sge(0..60_000)];
        let (from, to) = (b.remote(0), b.remote(60_000));
        // The write sends the bytes that the read fetched; without the fence it would send the
        // poison.
        a.send_all(&[
            SendWr::read(from, &sges).id(1),
            SendWr::write(to, &sges).id(2).fence().signaled(),
        ])?;
        a.expect(2, WcOpcode::WRITE)?;
        b.check(60_000..120_000, seed);
    }
    b.expect_silence()
}

fn shared_completion_queue_for_two_pairs() -> Verdict {
    let mut pair = Pair::new(Config::rc())?;
    // A second queue pair on the queue of the first, which is in use meanwhile.
    let second = pair.b.pd.qp_builder(&pair.b.cq, &pair.b.cq, QpType::RC).build()?;
    pair.message(1, 100)?;
    drop(second);
    pair.message(2, 100)
}

fn dropped_pair_leaves_no_completions() -> Verdict {
    let mut pair = Pair::new(Config::rc())?;
    for n in 0..3 {
        pair.b.recv(n, 0..64)?;
    }
    let sges = [pair.a.sge(0..64)];
    for n in 0..3 {
        pair.a.send(SendWr::send(&sges).id(n).signaled())?;
    }
    for n in 0..3 {
        pair.a.expect(n, WcOpcode::SEND)?;
    }
    // All three have completed at b, too, without a poll.
    let replacement = pair.b.pd.qp_builder(&pair.b.cq, &pair.b.cq, QpType::RC).build()?;
    drop(std::mem::replace(&mut pair.b.qp, replacement));
    pair.b.expect_silence()
}

fn messages_between_two_devices_arrive() -> Verdict {
    let second = env::second()?;
    let other = uverbs::Context::open(&second)?;
    let mut pair = Pair::on(env::open()?, other, Config::rc())?;
    pair.connect()?;
    for seed in 0..5 {
        pair.message(seed, 3000)?;
        std::mem::swap(&mut pair.a, &mut pair.b);
    }
    Ok(())
}

/// The kernel takes write(2) only from a process with the credentials that opened the file, so that
/// soft-RoCE's doorbell goes by ioctl.
fn doorbells_work_after_a_change_of_credentials() -> Verdict {
    env::node()?;
    let mut pair = Pair::new(Config::rc())?;
    let write = |pair: &Pair| rustix::io::write(&pair.a.context, &[0; 8]).unwrap_err();
    assert_ne!(write(&pair), Errno::ACCESS);
    pair.message(1, 100)?;
    // The same user and group, but new credentials in the kernel.
    nix::unistd::setgid(nix::unistd::getgid())?;
    assert_eq!(write(&pair), Errno::ACCESS);
    for seed in 2..5 {
        pair.b.cq.req_notify(Notify::Next)?;
        pair.message(seed, 100)?;
        let announced = pair.b.channel.wait(Some(Duration::from_secs(10)))?;
        assert_eq!(announced, Some(pair.b.cq.key()));
    }
    Ok(())
}

/// A pair whose memory may be flushed to global visibility.
fn flushable() -> Verdict<(Pair, MemoryRegion<u8>)> {
    let access = Access::ALL_REMOTE | Access::FLUSH_GLOBAL;
    let pair = Pair::unconnected(Config { access, ..Config::rc() })?;
    let caps = pair.b.context.query_device()?.caps;
    require(caps.contains(DeviceCaps::FLUSH_GLOBAL), Capability::Flush, "not advertised")?;
    let mut pair = pair;
    pair.connect()?;
    let region = pair.b.pd.mr_builder().access(access).allocate::<u8>(8192)?;
    Ok((pair, region))
}

fn flush(length: u32, level: FlushLevel) -> Verdict {
    let (mut pair, region) = flushable()?;
    let a = &mut pair.a;
    a.fill(0..4000, 6);
    let sges = [a.sge(0..4000)];
    let remote = region.remote(10)?;
    a.send_all(&[
        SendWr::write(remote, &sges).id(1),
        SendWr::flush(remote, length, Placement::GLOBAL, level).id(2).signaled(),
    ])?;
    a.expect(2, WcOpcode::FLUSH)?;
    let mut bytes = vec![0; 4000];
    region.copy_to(10, &mut bytes)?;
    crate::pattern::check(&bytes, 6);
    // The pair's own memory was registered without the right.
    let remote = pair.b.remote(0);
    let wr = SendWr::flush(remote, 8, Placement::GLOBAL, level);
    pair.a.send(wr.id(3))?;
    pair.a.expect_failure(3, WcStatus::REM_ACCESS_ERR)?;
    Ok(())
}

fn flush_of_a_range_completes() -> Verdict {
    flush(4000, FlushLevel::RANGE)
}

fn flush_of_a_region_completes() -> Verdict {
    flush(0, FlushLevel::REGION)
}

#[allow(unsafe_code, reason = "ringing is")]
fn only_its_own_thread_domain_rings_a_batch() -> Verdict {
    let mut pair = Pair::unconnected(Config::rc())?;
    let context = pair.a.context.clone();
    let (mut td, mut other) = (context.alloc_td()?, context.alloc_td()?);
    let domain = pair.a.pd.parent_domain_builder().thread_domain(&td).build()?;
    let mut qp = domain.qp_builder(&pair.a.cq, &pair.a.cq, QpType::RC).build()?;
    // Connected in place of the pair's own queue pair.
    let (at_a, at_b) = (qp.endpoint(&pair.a.gid)?, pair.b.qp.endpoint(&pair.b.gid)?);
    env::handshake(&qp, &at_b)?;
    env::handshake(&pair.b.qp, &at_a)?;
    pair.b.poison(0..100);
    pair.b.recv(1, 0..100)?;
    pair.a.fill(0..100, 12);
    let sges = [pair.a.sge(0..100)];
    let mut batch = qp.send_batch()?;
    batch.push(SendWr::send(&sges).id(2).signaled())?;
    // SAFETY: no request is sent.
    let refused = unsafe { batch.ring(&mut other) };
    assert_eq!(refused, Err(RingError::ForeignThreadDomain));
    pair.a.expect_silence()?;
    let mut batch = qp.send_batch()?;
    batch.push(SendWr::send(&sges).id(3).signaled())?;
    // SAFETY: the memory is the pair's, which outlives the queue pair.
    unsafe { batch.ring(&mut td) }?;
    pair.a.expect(3, WcOpcode::SEND)?;
    pair.b.expect(1, WcOpcode::RECV)?;
    pair.b.check(0..100, 12);
    Ok(())
}

/// Messages of all sizes for a minute.
fn messages_of_every_size_for_a_minute() -> Verdict {
    env::soak()?;
    let mut pair = Pair::new(Config { depth: 5, ..Config::rc() })?;
    let end = Instant::now() + Duration::from_secs(60);
    let mut seed = 0;
    while Instant::now() < end {
        let length = (seed as usize).wrapping_mul(7919) % 100_000;
        pair.message(seed, length)?;
        seed += 1;
        if seed % 100 == 0 {
            std::mem::swap(&mut pair.a, &mut pair.b);
        }
    }
    Ok(())
}
