//! Two processes, and the effects on one when the other dies.

use crate::env;
use crate::helper::{Helper, config, receive_from, send_to};
use crate::pair::Side;
use crate::verdict::{Verdict, trials};
use uverbs::{Psn, QpState, Remote, SendWr, WcOpcode, WcStatus};

trials![
    two_processes_exchange_messages,
    memory_of_another_process_is_written_and_read,
    requests_to_a_killed_peer_fail,
    killed_peer_leaves_nothing,
    requests_to_a_peer_that_left_fail,
];

fn start() -> Verdict<(Side, Helper, Remote)> {
    let mut helper = Helper::start()?;
    let mut side = Side::new(env::open()?, &config(), Psn::new(7))?;
    let remote = helper.connect(env::device().name(), &mut side)?;
    Ok((side, helper, remote))
}

fn two_processes_exchange_messages() -> Verdict {
    let (mut side, mut helper, _) = start()?;
    for (seed, length) in [0, 1, 1000, 1024, 4096, 100_000].into_iter().enumerate() {
        send_to(&mut side, &mut helper, seed as u64, length)?;
        receive_from(&mut side, &mut helper, 100 + seed as u64, length)?;
    }
    Ok(())
}

fn memory_of_another_process_is_written_and_read() -> Verdict {
    let (mut side, mut helper, remote) = start()?;
    for seed in 0..5 {
        side.fill(0..5000, seed);
        let sges = [side.sge(0..5000)];
        side.send(SendWr::write(remote, &sges).id(1).signaled())?;
        side.expect(1, WcOpcode::WRITE)?;
        side.poison(0..5000);
        side.send(SendWr::read(remote, &sges).id(2).signaled())?;
        side.expect(2, WcOpcode::READ)?;
        side.check(0..5000, seed);
    }
    send_to(&mut side, &mut helper, 9, 100)
}

fn requests_to_a_killed_peer_fail() -> Verdict {
    let (mut side, mut helper, _) = start()?;
    send_to(&mut side, &mut helper, 1, 100)?;
    helper.kill()?;
    let sges = [side.sge(0..100)];
    for wr_id in 0..3 {
        side.send(SendWr::send(&sges).id(wr_id))?;
    }
    side.expect_failure(0, WcStatus::RETRY_EXC_ERR)?;
    side.expect_failure(1, WcStatus::WR_FLUSH_ERR)?;
    side.expect_failure(2, WcStatus::WR_FLUSH_ERR)?;
    assert_eq!(side.qp.query()?.state, QpState::ERR);
    // The survivor connects to another peer.
    side.reset()?;
    let mut helper = Helper::start()?;
    helper.connect(env::device().name(), &mut side)?;
    send_to(&mut side, &mut helper, 2, 2000)?;
    receive_from(&mut side, &mut helper, 3, 2000)
}

fn killed_peer_leaves_nothing() -> Verdict {
    let before = env::resources()?;
    {
        let (mut side, mut helper, remote) = start()?;
        // The peer dies amid sends without a receive, and writes to its memory.
        let sges = [side.sge(0..100_000)];
        for wr_id in 0..8 {
            side.send(SendWr::write(remote, &sges).id(wr_id).signaled())?;
        }
        helper.tell("recv 1 100")?;
        helper.hear("posted")?;
        helper.kill()?;
        let own = env::resources()?;
        // Before Linux 5.14 there is no list of contexts.
        let contexts = before.ctx() + u64::from(env::kernel_is_since(5, 14));
        assert_eq!((own.ctx(), own.qp()), (contexts, before.qp() + 1));
        loop {
            let done = side.wait()?;
            if done.wr_id == 7 || done.status != WcStatus::SUCCESS {
                break;
            }
        }
    }
    env::settles(&before)
}

fn requests_to_a_peer_that_left_fail() -> Verdict {
    let (mut side, mut helper, remote) = start()?;
    helper.tell("close")?;
    helper.hear("closed")?;
    let sges = [side.sge(0..8)];
    side.send(SendWr::read(remote, &sges).id(1))?;
    side.expect_failure(1, WcStatus::RETRY_EXC_ERR)?;
    Ok(())
}
