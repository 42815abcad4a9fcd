//! Resetting queue pairs: posted requests are forgotten, completions are discarded, and the ring
//! indices continue.

use crate::env;
use crate::env::drainable;
use crate::pair::{Config, Pair, Side};
use crate::verdict::{Verdict, trials};
use uverbs::{Access, Errno, QpAttr, QpState, QpType, SendWr, WcOpcode, WcStatus};

trials![
    reset_of_every_type_at_every_ring_position,
    unfinished_sends_are_forgotten,
    unfinished_receives_are_forgotten,
    completions_are_discarded,
    completions_of_others_stay,
    failed_pair_works_after_reset,
    drained_pair_works_after_reset,
    receives_of_a_shared_queue_stay,
    completions_are_discarded_from_both_queues,
];

/// Resets both sides and connects them anew.
fn again(pair: &mut Pair) -> Verdict {
    pair.a.reset()?;
    pair.b.reset()?;
    pair.connect()
}

/// Sends requests that get no answer, because the peer is reset.
fn send_without_answer(side: &mut Side, count: u64) -> Verdict {
    side.fill(0..8, 1);
    for wr_id in 0..count {
        let sges = [side.sge(0..8)];
        side.send(SendWr::send(&sges).id(900 + wr_id).signaled())?;
    }
    Ok(())
}

fn reset_of_every_type_at_every_ring_position() -> Verdict {
    for qp_type in [QpType::RC, QpType::UC, QpType::UD] {
        let mut pair = Pair::new(Config::of(qp_type))?;
        // Rings of 16 slots, one slot further each time, and once around.
        for round in 0..18 {
            pair.message(round, 100)?;
            again(&mut pair)?;
        }
    }
    Ok(())
}

/// rxe would send the requests that it cleared, as empty writes, which a peer without that right answers with an error.
fn unfinished_sends_are_forgotten() -> Verdict {
    let mut config = Config { access: Access::LOCAL_WRITE, timeout: 20, ..Config::rc() };
    config.depth = 8;
    for unfinished in 1..=5 {
        let mut pair = Pair::new(config)?;
        pair.b.reset()?;
        for round in 0..4 {
            send_without_answer(&mut pair.a, unfinished)?;
            again(&mut pair)?;
            for n in 0..7 {
                pair.message(10 * round + n, 500)?;
            }
            pair.b.reset()?;
        }
        pair.a.expect_silence()?;
    }
    Ok(())
}

fn unfinished_receives_are_forgotten() -> Verdict {
    for qp_type in [QpType::RC, QpType::UD] {
        let mut pair = Pair::new(Config::of(qp_type))?;
        for round in 0..5 {
            pair.b.poison(4096..8192);
            for n in 0..3 + round {
                pair.b.recv(700 + n, 4096..8192)?;
            }
            again(&mut pair)?;
            // The message finds the receive that was posted for it, not one from before the reset.
            pair.message(round, 1000)?;
            pair.b.check_poison(4096..8192);
        }
        pair.b.expect_silence()?;
    }
    Ok(())
}

fn completions_are_discarded() -> Verdict {
    let mut pair = Pair::new(Config::rc())?;
    for round in 0..3 {
        for wr_id in 0..4 {
            pair.b.recv(wr_id, 0..64)?;
            pair.a.send(SendWr::send(&[]).id(wr_id).signaled())?;
        }
        // The last send is acknowledged, so that all completions are in the queues.
        for wr_id in 0..4 {
            pair.a.expect(wr_id, WcOpcode::SEND)?;
        }
        pair.a.send(SendWr::write(pair.b.remote(0), &[]).id(5).signaled())?;
        pair.a.reset()?;
        pair.b.reset()?;
        pair.a.expect_silence()?;
        pair.b.expect_silence()?;
        pair.connect()?;
        pair.message(round, 64)?;
    }
    Ok(())
}

fn completions_of_others_stay() -> Verdict {
    let mut pair = Pair::new(Config::rc())?;
    let Side { pd, cq, .. } = &pair.b;
    let mut other = pd.qp_builder(cq, cq, QpType::RC).build()?;
    // A queue pair in state ERR completes each posted request, in the same queue.
    let init = QpAttr::new()
        .state(QpState::INIT)
        .port(env::port())
        .pkey_index(env::pkey_index())
        .access(Access::empty());
    other.modify(&init)?;
    pair.b.recv(1, 0..64)?;
    pair.a.send(SendWr::send(&[]).id(1).signaled())?;
    pair.a.expect(1, WcOpcode::SEND)?;
    other.reset(&mut [&mut pair.b.cq])?;
    pair.b.expect(1, WcOpcode::RECV)?;
    Ok(())
}

fn failed_pair_works_after_reset() -> Verdict {
    let mut pair = Pair::new(Config::rc())?;
    for round in 0..3 {
        for wr_id in 0..3 {
            pair.a.recv(wr_id, 0..64)?;
        }
        pair.a.qp.modify(&QpAttr::new().state(QpState::ERR))?;
        let done = pair.a.wait()?;
        assert_eq!((done.wr_id, done.status), (0, WcStatus::WR_FLUSH_ERR));
        // The rest of the flushed receives are discarded.
        again(&mut pair)?;
        pair.message(round, 3000)?;
        pair.a.expect_silence()?;
    }
    Ok(())
}

/// The second time the queue has requests to drain, which never end.
fn drained_pair_works_after_reset() -> Verdict {
    drainable()?;
    let mut pair = Pair::new(Config { timeout: 20, ..Config::rc() })?;
    for round in 0..4 {
        pair.message(round, 100)?;
        if round % 2 == 1 {
            pair.b.reset()?;
            send_without_answer(&mut pair.a, 2)?;
        }
        pair.a.qp.modify(&QpAttr::new().state(QpState::SQD))?;
        assert_eq!(pair.a.qp.query()?.state, QpState::SQD);
        again(&mut pair)?;
    }
    pair.message(9, 100)?;
    pair.a.expect_silence()
}

fn receives_of_a_shared_queue_stay() -> Verdict {
    let mut pair = Pair::new(Config { srq: true, ..Config::rc() })?;
    pair.b.poison(0..256);
    pair.b.recv(7, 0..256)?;
    again(&mut pair)?;
    pair.a.fill(0..256, 3);
    let sges = [pair.a.sge(0..256)];
    pair.a.send(SendWr::send(&sges).id(8).signaled())?;
    pair.a.expect(8, WcOpcode::SEND)?;
    pair.b.expect(7, WcOpcode::RECV)?;
    pair.b.check(0..256, 3);
    Ok(())
}

fn completions_are_discarded_from_both_queues() -> Verdict {
    let pair = Pair::unconnected(Config::rc())?;
    let Side { context, pd, .. } = &pair.a;
    let (mut send, mut recv) = (context.cq_builder(4).build()?, context.cq_builder(4).build()?);
    let mut qp = pd.qp_builder(&send, &recv, QpType::RC).build()?;
    let error = qp.reset(&mut [&mut send]).unwrap_err();
    assert_eq!(error.errno(), Errno::INVAL);
    assert!(error.message().contains("receive completion queue"), "{error}");
    qp.reset(&mut [&mut recv, &mut send])?;
    assert_eq!(qp.query()?.state, QpState::RESET);
    Ok(())
}
