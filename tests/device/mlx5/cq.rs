//! Completion queues of mlx5 with CQEs of 128 bytes, and in memory of an allocator.

use crate::cq::stay;
use crate::pair::{Config, Pair};
use crate::verdict::{Verdict, trials};
use std::sync::Arc;
use uverbs::allocator::Arena;
use uverbs::mlx5::query_device;
use uverbs::{Errno, ProtectionDomain, Remote, Rkey, SendWr, WcOpcode, WcStatus};

trials![
    cqes_of_128_bytes_carry_traffic,
    cqes_of_128_bytes_report_errors,
    cqe_padding_works_or_is_refused,
    resize_to_the_same_size_stays_in_its_arena,
];

fn long() -> Config {
    Config { cqe: 10, cqe_size: 128, ..Config::rc() }
}

fn cqes_of_128_bytes_carry_traffic() -> Verdict {
    super::open()?;
    let mut pair = Pair::new(long())?;
    // Twice around the queue, and again after resizes to several sizes with completions in the queue.
    for seed in 0..40 {
        pair.message(seed, 100)?;
    }
    for (round, cqe) in [(1, 100), (2, 6), (3, 30)] {
        let first = 1000 * round;
        for wr_id in first..first + 5 {
            pair.b.recv(wr_id, 0..8)?;
            pair.a.send(SendWr::send(&[]).id(wr_id).signaled())?;
            pair.a.expect(wr_id, WcOpcode::SEND)?;
        }
        pair.b.expect(first, WcOpcode::RECV)?;
        pair.b.cq.resize(cqe)?;
        for wr_id in first + 1..first + 5 {
            pair.b.expect(wr_id, WcOpcode::RECV)?;
        }
        pair.b.expect_silence()?;
        for seed in 0..20 {
            pair.message(seed, 100)?;
        }
    }
    Ok(())
}

fn cqes_of_128_bytes_report_errors() -> Verdict {
    super::open()?;
    let mut pair = Pair::new(long())?;
    pair.b.recv(7, 0..8)?;
    let nowhere = Remote { rkey: Rkey(1), ..pair.b.remote(0) };
    let sges = [pair.a.sge(0..8)];
    pair.a.send(SendWr::write(nowhere, &sges).id(1).signaled())?;
    let done = pair.a.wait()?;
    assert_eq!((done.wr_id, done.status), (1, WcStatus::REM_ACCESS_ERR));
    assert_eq!(done.qpn, pair.a.qp.qpn());
    // Requests posted afterwards are flushed.
    pair.a.send(SendWr::send(&[]).id(2).signaled())?;
    let done = pair.a.wait()?;
    assert_eq!((done.wr_id, done.status), (2, WcStatus::WR_FLUSH_ERR));
    let done = pair.b.wait()?;
    assert_eq!((done.wr_id, done.status), (7, WcStatus::WR_FLUSH_ERR));
    Ok(())
}

fn cqe_padding_works_or_is_refused() -> Verdict {
    let context = super::open()?;
    let cq = || context.cq_builder(10).pad();
    assert_eq!(cq().build().unwrap_err().errno(), Errno::INVAL, "nothing to pad");
    if !query_device(&context)?.pads_completions() {
        let error = cq().cqe_size(128).build().unwrap_err();
        assert!(error.is_unsupported() && error.message().contains("pads"), "{error}");
        return Ok(());
    }
    let mut pair = Pair::new(Config { pad: true, ..long() })?;
    for seed in 0..40 {
        pair.message(seed, 100)?;
    }
    Ok(())
}

fn resize_to_the_same_size_stays_in_its_arena() -> Verdict {
    super::open()?;
    let arena = Arc::new(Arena::new(1 << 20)?);
    let extend =
        |pd: &ProtectionDomain| pd.parent_domain_builder().allocator(arena.clone()).build();
    let mut pair = Pair::within(Config::rc(), &extend)?;
    let (used, buffers) = (arena.used(), arena.buffers());
    for wr_id in 0..4 {
        pair.b.recv(wr_id, 0..8)?;
        pair.a.send(SendWr::send(&[]).id(wr_id).signaled())?;
        pair.a.expect(wr_id, WcOpcode::SEND)?;
    }
    stay(&mut pair, 4)?;
    assert_eq!((arena.used(), arena.buffers()), (used, buffers));
    Ok(())
}
