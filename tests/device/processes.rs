//! Two processes, and the effects on one when the other dies.

use crate::capability::Capability;
use crate::cm;
use crate::env;
use crate::helper::{Helper, config, config_of, receive_from, send_to};
use crate::pair::{PATIENCE, Side};
use crate::verdict::{Verdict, require, trials};
use uverbs::cm::ConnectParam;
use uverbs::{AtomicCap, Psn, QpState, QpType, Remote, SendWr, WcOpcode, WcStatus};

trials![
    two_processes_exchange_messages,
    memory_of_another_process_is_written_and_read,
    atomics_count_in_memory_of_another_process,
    unreliable_messages_reach_another_process,
    connections_by_address_lead_to_another_process,
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

fn atomics_count_in_memory_of_another_process() -> Verdict {
    let (mut side, _helper, remote) = start()?;
    let cap = side.context.query_device()?.atomic_cap;
    require(cap != AtomicCap::NONE, Capability::Atomic, "not advertised")?;
    side.memory.copy_from(0, &5u64.to_ne_bytes())?;
    let sges = [side.sge(0..8)];
    side.send(SendWr::write(remote, &sges).id(0).signaled())?;
    side.expect(0, WcOpcode::WRITE)?;
    let requests = [
        (SendWr::fetch_add(remote, 3, &sges), WcOpcode::FETCH_ADD, 5u64),
        (SendWr::compare_swap(remote, 8, 100, &sges), WcOpcode::COMPARE_SWAP, 8),
        (SendWr::compare_swap(remote, 8, 200, &sges), WcOpcode::COMPARE_SWAP, 100),
        (SendWr::read(remote, &sges), WcOpcode::READ, 100),
    ];
    for (wr, opcode, there) in requests {
        side.poison(0..8);
        side.send(wr.id(there).signaled())?;
        side.expect(there, opcode)?;
        assert_eq!(side.read(0..8), there.to_ne_bytes(), "{opcode:?}");
    }
    Ok(())
}

fn unreliable_messages_reach_another_process() -> Verdict {
    for qp_type in [QpType::UC, QpType::UD] {
        let config = config_of(qp_type);
        let mut helper = Helper::start()?;
        let mut side = Side::new(env::open()?, &config, Psn::new(7))?;
        helper.connect_as(&config, env::device().name(), &mut side)?;
        for (seed, length) in [0, 1, 100, 1000].into_iter().enumerate() {
            send_to(&mut side, &mut helper, seed as u64, length)?;
            receive_from(&mut side, &mut helper, 100 + seed as u64, length)?;
        }
    }
    Ok(())
}

fn connections_by_address_lead_to_another_process() -> Verdict {
    let mut helper = Helper::start()?;
    let channel = cm::channel()?;
    helper.tell("cm listen")?;
    let at = helper.hear("at")?.parse()?;
    for _ in 0..3 {
        helper.tell("cm accept")?;
        let (mut side, connecting) = cm::ask(&channel, at, &ConnectParam::new())?;
        let connection = cm::done(connecting.wait(Some(PATIENCE))?)?;
        helper.hear("accepted")?;
        assert_eq!(connection.peer_addr()?, at);
        helper.tell("cm receive")?;
        helper.hear("posted")?;
        side.send()?;
        helper.tell("cm received")?;
        helper.hear("received")?;
        helper.tell("cm end")?;
        drop(connection);
        helper.hear("ended")?;
    }
    Ok(())
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
