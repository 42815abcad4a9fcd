//! Failures on a connection: each side must learn of them, the other requests must be flushed,
//! memory must stay unchanged, and the pair must work again after a reset.

use crate::pair::{Config, Pair, Side};
use crate::verdict::{Verdict, trials};
use uverbs::{
    Access, Lkey, PostError, QpAttr, QpState, Remote, Rkey, SendWr, Sge, WcOpcode, WcStatus,
};

trials![
    write_with_a_wrong_rkey_fails,
    read_with_a_wrong_rkey_fails,
    write_beyond_the_region_fails,
    write_before_the_region_fails,
    write_to_a_region_without_the_right_fails,
    write_to_a_queue_pair_without_the_right_fails,
    rkey_of_another_protection_domain_fails,
    send_with_a_wrong_lkey_fails,
    receive_with_a_wrong_lkey_fails,
    send_from_beyond_the_region_fails,
    read_into_memory_without_local_write_fails,
    rkey_of_a_destroyed_region_fails,
    message_longer_than_its_receive_fails_on_both_sides,
    send_without_a_receive_fails_after_its_rnr_retries,
    send_without_a_receive_waits_for_one,
    send_to_a_destroyed_peer_fails,
    send_to_a_peer_that_never_existed_fails,
    error_flushes_every_request,
    requests_in_error_state_are_flushed,
    error_of_one_pair_leaves_the_next_working,
    sends_before_rts_are_refused,
];

/// The statuses of a request that names memory without a right to it: the specification's, and
/// rxe's, which flushes it together with all others.
const LOCAL_PROTECTION: [WcStatus; 3] =
    [WcStatus::LOC_PROT_ERR, WcStatus::LOC_QP_OP_ERR, WcStatus::WR_FLUSH_ERR];
/// The statuses of a message longer than its receive, at the receiver; rxe takes it for a bad receive.
const TOO_LONG_RECEIVED: [WcStatus; 2] = [WcStatus::LOC_LEN_ERR, WcStatus::LOC_QP_OP_ERR];
/// The same at the sender.
const TOO_LONG_SENT: [WcStatus; 2] = [WcStatus::REM_INV_REQ_ERR, WcStatus::REM_OP_ERR];
/// The statuses of an operation for which the peer's queue pair has no right: the specification's,
/// and rxe's, which takes it for a missing right to memory.
const NO_RIGHT: [WcStatus; 2] = [WcStatus::REM_INV_REQ_ERR, WcStatus::REM_ACCESS_ERR];

/// Resets both sides, connects them again and sends a message.
fn recovers(mut pair: Pair) -> Verdict {
    for side in [&mut pair.a, &mut pair.b] {
        side.reset()?;
    }
    pair.connect()?;
    pair.message(99, 2000)?;
    pair.a.expect_silence()?;
    pair.b.expect_silence()
}

/// Posts a request to a that must fail with `status`, and checks that b's memory stays as it is.
fn fails_remotely(mut pair: Pair, wr: SendWr<'_>, status: WcStatus) -> Verdict {
    pair.b.poison(0..10_000);
    // Before it an unsignaled success, after it a request that is flushed.
    pair.a.send_all(&[SendWr::send(&[]).inline(&[]).id(1), wr.id(2), SendWr::send(&[]).id(3)])?;
    pair.b.recv(7, 0..0)?;
    pair.a.expect_failure(2, status)?;
    pair.a.expect_failure(3, WcStatus::WR_FLUSH_ERR)?;
    assert_eq!(pair.a.qp.query()?.state, QpState::ERR);
    pair.b.check_poison(0..10_000);
    // The first message went through.
    let first = pair.b.wait()?;
    assert_eq!((first.wr_id, first.status), (7, WcStatus::SUCCESS), "{first:?}");
    recovers(pair)
}

fn write_with_a_wrong_rkey_fails() -> Verdict {
    crate::env::access_errors()?;
    let pair = Pair::new(Config::rc())?;
    let remote = pair.b.remote(0);
    let sges = [pair.a.sge(0..100)];
    let wrong = Remote { rkey: Rkey(remote.rkey.0 ^ 0x55), ..remote };
    fails_remotely(pair, SendWr::write(wrong, &sges), WcStatus::REM_ACCESS_ERR)
}

fn read_with_a_wrong_rkey_fails() -> Verdict {
    crate::env::access_errors()?;
    let mut pair = Pair::new(Config::rc())?;
    pair.a.poison(0..100);
    let remote = pair.b.remote(0);
    let wrong = Remote { rkey: Rkey(remote.rkey.0 ^ 0xff00), ..remote };
    let sges = [pair.a.sge(0..100)];
    pair.a.send(SendWr::read(wrong, &sges).id(1))?;
    pair.a.expect_failure(1, WcStatus::REM_ACCESS_ERR)?;
    pair.a.check_poison(0..100);
    recovers(pair)
}

fn write_beyond_the_region_fails() -> Verdict {
    crate::env::access_errors()?;
    for (offset, length) in [(-50, 100usize), (-1, 2), (0, 1), (4096, 8)] {
        let pair = Pair::new(Config::rc())?;
        let end = pair.b.remote(0).addr as i64 + pair.b.memory.byte_len() as i64;
        let remote = Remote { addr: (end + offset) as u64, ..pair.b.remote(0) };
        let sges = [pair.a.sge(0..length)];
        fails_remotely(pair, SendWr::write(remote, &sges), WcStatus::REM_ACCESS_ERR)?;
    }
    Ok(())
}

fn write_before_the_region_fails() -> Verdict {
    crate::env::access_errors()?;
    let pair = Pair::new(Config::rc())?;
    let remote = pair.b.remote(0);
    let sges = [pair.a.sge(0..8)];
    let before = Remote { addr: remote.addr - 4, ..remote };
    fails_remotely(pair, SendWr::write(before, &sges), WcStatus::REM_ACCESS_ERR)
}

fn write_to_a_region_without_the_right_fails() -> Verdict {
    crate::env::access_errors()?;
    let pair = Pair::new(Config::rc())?;
    let region = pair.b.pd.mr_builder().access(Access::REMOTE_READ).allocate::<u8>(4096)?;
    let remote = region.remote(0)?;
    let sges = [pair.a.sge(0..8)];
    fails_remotely(pair, SendWr::write(remote, &sges), WcStatus::REM_ACCESS_ERR)?;
    drop(region);
    Ok(())
}

fn write_to_a_queue_pair_without_the_right_fails() -> Verdict {
    crate::env::access_errors()?;
    let access = Access::LOCAL_WRITE | Access::REMOTE_READ;
    let mut pair = Pair::new(Config { access, ..Config::rc() })?;
    pair.b.poison(0..100);
    let remote = pair.b.remote(0);
    let sges = [pair.a.sge(0..8)];
    pair.a.send(SendWr::write(remote, &sges).id(1))?;
    pair.a.expect_failure_of(1, &NO_RIGHT)?;
    pair.b.check_poison(0..100);
    recovers(pair)
}

fn rkey_of_another_protection_domain_fails() -> Verdict {
    crate::env::access_errors()?;
    let pair = Pair::new(Config::rc())?;
    let other = pair.b.context.alloc_pd()?;
    let region = other.mr_builder().access(Access::ALL_REMOTE).allocate::<u8>(4096)?;
    let remote = region.remote(0)?;
    let sges = [pair.a.sge(0..8)];
    fails_remotely(pair, SendWr::write(remote, &sges), WcStatus::REM_ACCESS_ERR)
}

fn send_with_a_wrong_lkey_fails() -> Verdict {
    let mut pair = Pair::new(Config::rc())?;
    pair.b.recv(9, 0..100)?;
    let sges = [Sge { lkey: Lkey(pair.a.memory.lkey().0 ^ 0x3300), ..pair.a.sge(0..100) }];
    pair.a.send(SendWr::send(&sges).id(1))?;
    pair.a.expect_failure_of(1, &LOCAL_PROTECTION)?;
    assert_eq!(pair.a.qp.query()?.state, QpState::ERR);
    recovers(pair)
}

fn receive_with_a_wrong_lkey_fails() -> Verdict {
    let mut pair = Pair::new(Config::rc())?;
    let sges = [Sge { lkey: Lkey(pair.b.memory.lkey().0 ^ 0x3300), ..pair.b.sge(0..100) }];
    pair.b.poison(0..100);
    pair.b.recv_into(9, &sges)?;
    let sges = [pair.a.sge(0..100)];
    pair.a.send(SendWr::send(&sges).id(1))?;
    pair.b.expect_failure_of(9, &LOCAL_PROTECTION)?;
    pair.a.expect_failure(1, WcStatus::REM_OP_ERR)?;
    pair.b.check_poison(0..100);
    recovers(pair)
}

fn send_from_beyond_the_region_fails() -> Verdict {
    let mut pair = Pair::new(Config::rc())?;
    pair.b.recv(9, 0..100)?;
    let last = pair.a.sge(pair.a.memory.byte_len() - 10..pair.a.memory.byte_len());
    let sges = [Sge { length: 11, ..last }];
    pair.a.send(SendWr::send(&sges).id(1))?;
    pair.a.expect_failure_of(1, &LOCAL_PROTECTION)?;
    recovers(pair)
}

fn read_into_memory_without_local_write_fails() -> Verdict {
    crate::env::access_errors()?;
    let mut pair = Pair::new(Config::rc())?;
    let region = pair.a.pd.mr_builder().access(Access::REMOTE_READ).allocate::<u8>(4096)?;
    let sges = [region.sge(0..100)?];
    let remote = pair.b.remote(0);
    pair.a.send(SendWr::read(remote, &sges).id(1))?;
    pair.a.expect_failure_of(1, &LOCAL_PROTECTION)?;
    recovers(pair)
}

fn rkey_of_a_destroyed_region_fails() -> Verdict {
    crate::env::access_errors()?;
    let pair = Pair::new(Config::rc())?;
    let region = pair.b.pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u8>(4096)?;
    let remote = region.remote(0)?;
    region.destroy()?;
    let sges = [pair.a.sge(0..8)];
    fails_remotely(pair, SendWr::write(remote, &sges), WcStatus::REM_ACCESS_ERR)
}

fn message_longer_than_its_receive_fails_on_both_sides() -> Verdict {
    for length in [101, 3000] {
        let mut pair = Pair::new(Config::rc())?;
        pair.b.poison(0..5000);
        pair.b.recv(9, 0..100)?;
        let sges = [pair.a.sge(0..length)];
        pair.a.send(SendWr::send(&sges).id(1))?;
        pair.b.expect_failure_of(9, &TOO_LONG_RECEIVED)?;
        pair.a.expect_failure_of(1, &TOO_LONG_SENT)?;
        pair.b.check_rest_of_poison(100, 5000);
        recovers(pair)?;
    }
    Ok(())
}

fn send_without_a_receive_fails_after_its_rnr_retries() -> Verdict {
    let mut pair = Pair::new(Config { rnr_retry: 2, ..Config::rc() })?;
    let sges = [pair.a.sge(0..100)];
    pair.a.send(SendWr::send(&sges).id(1))?;
    pair.a.expect_failure(1, WcStatus::RNR_RETRY_EXC_ERR)?;
    assert_eq!(pair.a.qp.query()?.state, QpState::ERR);
    // The receiver is not affected.
    assert_eq!(pair.b.qp.query()?.state, QpState::RTS);
    recovers(pair)
}

fn send_without_a_receive_waits_for_one() -> Verdict {
    crate::env::rnr_wait()?;
    let Pair { mut a, mut b, .. } = Pair::new(Config::rc())?;
    b.poison(0..100);
    a.fill(0..100, 4);
    let sges = [a.sge(0..100)];
    a.send(SendWr::send(&sges).id(1).signaled())?;
    // The sender retries without a limit: the message waits for its receive.
    a.expect_silence()?;
    b.recv(2, 0..100)?;
    a.expect(1, WcOpcode::SEND)?;
    b.expect(2, WcOpcode::RECV)?;
    b.check(0..100, 4);
    Ok(())
}

fn impatient() -> Config {
    Config { timeout: 8, retry_count: 2, ..Config::rc() }
}

fn send_to_a_destroyed_peer_fails() -> Verdict {
    let Pair { mut a, b, .. } = Pair::new(impatient())?;
    b.qp.destroy()?;
    let sges = [a.sge(0..100)];
    a.send(SendWr::send(&sges).id(1))?;
    a.send(SendWr::send(&sges).id(2))?;
    a.expect_failure(1, WcStatus::RETRY_EXC_ERR)?;
    a.expect_failure(2, WcStatus::WR_FLUSH_ERR)?;
    assert_eq!(a.qp.query()?.state, QpState::ERR);
    Ok(())
}

fn send_to_a_peer_that_never_existed_fails() -> Verdict {
    let mut pair = Pair::unconnected(impatient())?;
    let nobody = crate::pair::Address { qpn: uverbs::Qpn(0x00ab_cdef), ..pair.b.address() };
    let config = pair.config;
    pair.a.connect(&config, &nobody)?;
    let remote = pair.b.remote(0);
    let sges = [pair.a.sge(0..100)];
    pair.a.send(SendWr::read(remote, &sges).id(1))?;
    pair.a.expect_failure(1, WcStatus::RETRY_EXC_ERR)?;
    Ok(())
}

fn error_flushes_every_request() -> Verdict {
    let mut pair = Pair::new(Config::rc())?;
    for n in 0..5 {
        pair.b.recv(n, 0..100)?;
    }
    pair.b.qp.modify(&QpAttr::new().state(QpState::ERR))?;
    for n in 0..5 {
        pair.b.expect_failure(n, WcStatus::WR_FLUSH_ERR)?;
    }
    pair.b.expect_silence()?;
    assert_eq!((pair.b.qp.state(), pair.b.qp.query()?.state), (QpState::ERR, QpState::ERR));
    recovers(pair)
}

fn requests_in_error_state_are_flushed() -> Verdict {
    crate::env::error_flush()?;
    let mut pair = Pair::new(Config::rc())?;
    pair.a.qp.modify(&QpAttr::new().state(QpState::ERR))?;
    let sges = [pair.a.sge(0..100)];
    for n in 0..3 {
        pair.a.send(SendWr::send(&sges).id(n))?;
    }
    for n in 0..3 {
        pair.a.expect_failure(n, WcStatus::WR_FLUSH_ERR)?;
    }
    recovers(pair)
}

fn error_of_one_pair_leaves_the_next_working() -> Verdict {
    crate::env::access_errors()?;
    let mut broken = Pair::new(Config::rc())?;
    let mut whole = Pair::new(Config::rc())?;
    let remote = Remote { rkey: Rkey(1), ..broken.b.remote(0) };
    let sges = [broken.a.sge(0..8)];
    broken.a.send(SendWr::write(remote, &sges).id(1))?;
    for seed in 0..10 {
        whole.message(seed, 1500)?;
    }
    broken.a.expect_failure(1, WcStatus::REM_ACCESS_ERR)?;
    whole.message(10, 1500)
}

/// The transport lacks the operation, regardless of the memory.
fn sends_before_rts_are_refused() -> Verdict {
    let mut pair = Pair::unconnected(Config::rc())?;
    let sges = [pair.a.sge(0..8)];
    let send = |side: &mut Side| side.send(SendWr::send(&sges));
    assert_eq!(send(&mut pair.a), Err(PostError::State(QpState::RESET)));
    let (config, peer) = (pair.config, pair.b.address());
    pair.a.init(&config)?;
    assert_eq!(send(&mut pair.a), Err(PostError::State(QpState::INIT)));
    pair.a.ready_to_receive(&config, &peer)?;
    assert_eq!(send(&mut pair.a), Err(PostError::State(QpState::RTR)));
    // A receive may be posted from INIT on; it waits.
    pair.a.recv(1, 0..8)?;
    pair.a.ready_to_send(&config)?;
    let peer = pair.a.address();
    pair.b.connect(&config, &peer)?;
    let sges = [pair.b.sge(0..8)];
    pair.b.send(SendWr::send(&sges).id(2).signaled())?;
    pair.b.expect(2, WcOpcode::SEND)?;
    pair.a.expect(1, WcOpcode::RECV)?;
    Ok(())
}
