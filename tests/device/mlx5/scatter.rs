//! Short data that arrives in the CQE (scatter to CQE), and queues that refuse it.

use crate::pair::{Config, PATIENCE, Pair, Side};
use crate::pattern;
use crate::verdict::{Stop, Verdict, trials};
use std::time::Instant;
use uverbs::owned::OwnedCompletionQueue;
use uverbs::{Errno, QpType, SendWr, WcStatus};

trials![
    short_messages_come_in_cqes,
    results_of_reads_go_to_memory_if_received_data_alone_is_scattered,
    short_read_responses_come_in_cqes,
    atomic_results_come_in_cqes,
    receives_of_an_srq_come_in_cqes,
    resize_keeps_data_in_unpolled_cqes,
    data_comes_in_cqes_only_when_asked_for,
    owned_queue_refuses_a_queue_pair_that_scatters_to_cqes,
    queue_pair_types_without_it_are_refused,
];

fn config(qp_type: QpType, cqe_size: u32) -> Config {
    Config { cqe: 10, cqe_size, scatter: true, ..Config::of(qp_type) }
}

/// Both sizes of CQEs, with the bytes of data that each can hold.
const ROOMS: [(u32, usize); 2] = [(64, 32), (128, 64)];

/// Waits for a success of this request, and returns the length and data of its completion.
#[track_caller]
fn take(side: &mut Side, wr_id: u64) -> Verdict<(u32, Option<Vec<u8>>)> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(done) = side.cq.poll()?.next() {
            assert_eq!((done.wr_id(), done.status()), (wr_id, WcStatus::SUCCESS));
            return Ok((done.byte_len(), done.scattered().map(|bytes| bytes.to_vec())));
        }
        if Instant::now() > deadline {
            return Err(Stop::fail(format!("no completion after {PATIENCE:?}")));
        }
        std::thread::yield_now();
    }
}

/// Sends `length` bytes, and checks that the CQE has them if they are at most `room`.
#[track_caller]
fn message(pair: &mut Pair, seed: u64, length: usize, room: usize) -> Verdict {
    pair.b.poison(0..length + 8);
    pair.b.recv(seed, 0..length)?;
    pair.a.fill(0..length, seed);
    let sges = [pair.a.sge(0..length)];
    pair.a.send(SendWr::send(&sges).id(!seed).signaled())?;
    assert_eq!(take(&mut pair.a, !seed)?.1, None, "nothing comes back of a send");
    let (told, data) = take(&mut pair.b, seed)?;
    assert_eq!(told as usize, length);
    if (1..=room).contains(&length) {
        pattern::check(
            &data.ok_or_else(|| Stop::fail(format!("{length} bytes: none came")))?,
            seed,
        );
        pair.b.check_poison(0..length + 8);
    } else {
        assert_eq!(data, None, "{length} bytes");
        pair.b.check(0..length, seed);
        pair.b.check_rest_of_poison(length, length + 8);
    }
    Ok(())
}

fn results_of_reads_go_to_memory_if_received_data_alone_is_scattered() -> Verdict {
    super::open()?;
    let config = Config { scatter: false, scatter_received: true, ..config(QpType::RC, 64) };
    let mut pair = Pair::new(config)?;
    for (seed, length) in [1, 32, 33].into_iter().enumerate() {
        message(&mut pair, seed as u64, length, 32)?;
        pair.b.fill(0..length, 9);
        pair.a.poison(0..length + 8);
        let sges = [pair.a.sge(0..length)];
        pair.a.send(SendWr::read(pair.b.remote(0), &sges).id(5).signaled())?;
        assert_eq!(take(&mut pair.a, 5)?.1, None, "{length} bytes");
        pair.a.check(0..length, 9);
    }
    Ok(())
}

fn short_messages_come_in_cqes() -> Verdict {
    super::open()?;
    for qp_type in [QpType::RC, QpType::UC] {
        for (cqe_size, room) in ROOMS {
            let mut pair = Pair::new(config(qp_type, cqe_size))?;
            // Three times around the queue.
            let lengths = [1, 16, room - 1, room, room + 1, 200, 0];
            for (seed, length) in lengths.into_iter().cycle().take(6 * lengths.len()).enumerate() {
                message(&mut pair, seed as u64, length, room)?;
            }
        }
    }
    Ok(())
}

fn short_read_responses_come_in_cqes() -> Verdict {
    super::open()?;
    for (cqe_size, room) in ROOMS {
        let mut pair = Pair::new(config(QpType::RC, cqe_size))?;
        for (seed, length) in [1, 24, room, room + 1, 100].into_iter().enumerate() {
            let seed = seed as u64;
            pair.b.fill(0..length, seed);
            pair.a.poison(0..200);
            let (remote, sges) = (pair.b.remote(0), [pair.a.sge(0..length)]);
            // The first read is unsignaled, so that its data always goes to memory.
            let quiet = [pair.a.sge(100..100 + length)];
            let reads =
                [SendWr::read(remote, &quiet), SendWr::read(remote, &sges).id(1).signaled()];
            pair.a.send_all(&reads)?;
            let (told, data) = take(&mut pair.a, 1)?;
            assert_eq!(told as usize, length);
            pair.a.check(100..100 + length, seed);
            match data {
                Some(data) => {
                    assert!(length <= room, "{length} bytes");
                    pattern::check(&data, seed);
                    pair.a.check_poison(0..100);
                }
                None => {
                    assert!(length > room, "{length} bytes");
                    pair.a.check(0..length, seed);
                }
            }
        }
    }
    Ok(())
}

fn atomic_results_come_in_cqes() -> Verdict {
    super::open()?;
    for (cqe_size, _) in ROOMS {
        let mut pair = Pair::new(config(QpType::RC, cqe_size))?;
        pair.b.memory.copy_from(0, &5u64.to_ne_bytes())?;
        pair.a.poison(0..16);
        let (remote, sges) = (pair.b.remote(0), [pair.a.sge(0..8)]);
        pair.a.send(SendWr::fetch_add(remote, 7, &sges).id(1).signaled())?;
        assert_eq!(take(&mut pair.a, 1)?.1.as_deref(), Some(&5u64.to_ne_bytes()[..]));
        pair.a.send(SendWr::compare_swap(remote, 12, 99, &sges).id(2).signaled())?;
        assert_eq!(take(&mut pair.a, 2)?.1.as_deref(), Some(&12u64.to_ne_bytes()[..]));
        assert_eq!(pair.b.read(0..8), 99u64.to_ne_bytes());
        pair.a.check_poison(0..16);
    }
    Ok(())
}

fn receives_of_an_srq_come_in_cqes() -> Verdict {
    super::open()?;
    for (cqe_size, room) in ROOMS {
        let mut pair = Pair::new(Config { srq: true, ..config(QpType::RC, cqe_size) })?;
        for (seed, length) in [20, room, room + 1].into_iter().cycle().take(40).enumerate() {
            message(&mut pair, seed as u64, length, room)?;
        }
    }
    Ok(())
}

fn resize_keeps_data_in_unpolled_cqes() -> Verdict {
    super::open()?;
    for (cqe_size, room) in ROOMS {
        let mut pair = Pair::new(config(QpType::RC, cqe_size))?;
        for seed in 0..5 {
            pair.b.recv(seed, 0..room)?;
            pair.a.fill(0..room, seed);
            let sges = [pair.a.sge(0..room)];
            pair.a.send(SendWr::send(&sges).id(seed).signaled())?;
            take(&mut pair.a, seed)?;
        }
        pair.b.cq.resize(50)?;
        for seed in 0..5 {
            pattern::check(&take(&mut pair.b, seed)?.1.unwrap_or_default(), seed);
        }
        message(&mut pair, 9, room, room)?;
    }
    Ok(())
}

fn data_comes_in_cqes_only_when_asked_for() -> Verdict {
    super::open()?;
    for cqe_size in [64, 128] {
        let asked = Config { scatter: false, signal_all: true, ..config(QpType::RC, cqe_size) };
        let mut pair = Pair::new(asked)?;
        for seed in 0..4 {
            message(&mut pair, seed, 16, 0)?;
        }
    }
    Ok(())
}

fn owned_queue_refuses_a_queue_pair_that_scatters_to_cqes() -> Verdict {
    let context = super::open()?;
    let pd = context.alloc_pd()?;
    let mut cq = OwnedCompletionQueue::<u32>::new(context.cq_builder(16).build()?);
    let make = |cq: &OwnedCompletionQueue<u32>, scatter| {
        let qp = pd.qp_builder(cq.queue(), cq.queue(), QpType::RC);
        if scatter { qp.scatter_to_cqe().build() } else { qp.build() }
    };
    let refused = cq.adopt(make(&cq, true)?).unwrap_err();
    assert_eq!(refused.error.errno(), Errno::INVAL);
    assert!(refused.error.message().contains("scatters"), "{}", refused.error);
    drop(refused);
    let plain = make(&cq, false)?;
    cq.adopt(plain)?;
    Ok(())
}

fn queue_pair_types_without_it_are_refused() -> Verdict {
    let context = super::open()?;
    let pd = context.alloc_pd()?;
    let cq = context.cq_builder(16).build()?;
    let error = pd.qp_builder(&cq, &cq, QpType::UD).scatter_to_cqe().build().unwrap_err();
    assert_eq!(error.errno(), Errno::INVAL);
    assert!(error.message().contains("type UD"), "{error}");
    Ok(())
}
