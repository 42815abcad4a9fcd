//! Changing queue pairs: all transitions between states, connecting by endpoints, and the kernel's
//! view of the result.

use crate::capability::Capability;
use crate::env::{self, drainable};
use crate::pair::{Config, Pair, Side};
use crate::verdict::{Stop, Verdict, require, supported, trials};
use std::time::Instant;
use uverbs::{
    Access, Endpoint, Errno, Handshake, Mtu, Qkey, QpAttr, QpState, QpType, SendWr, WcOpcode,
    WcStatus,
};

trials![
    handshake_connects_every_type,
    handshake_from_init_keeps_receives,
    handshake_uses_the_smaller_mtu,
    handshake_uses_the_peers_rd_atomic,
    handshake_steps_in_the_wrong_order_are_refused,
    endpoint_of_an_empty_gid_index_is_refused,
    drained_send_queue_goes_on,
    access_flags_change_in_rts,
    failed_state_is_learned_by_query,
    right_current_state_is_accepted,
    wrong_current_state_is_refused,
    privileged_qkey_needs_cap_net_raw,
    mtu_beyond_the_port_is_refused,
    rate_limit_is_unsupported_or_works,
];

fn endpoint(side: &Side) -> Verdict<Endpoint> {
    Ok(side.qp.endpoint(&side.gid)?)
}

/// Connects with endpoints.
fn handshake(pair: &Pair, options: Handshake) -> Verdict {
    let (a, b) = (endpoint(&pair.a)?, endpoint(&pair.b)?);
    pair.a.qp.handshake(&b, &options)?;
    pair.b.qp.handshake(&a, &options)?;
    Ok(())
}

/// Sends one message over a connection and checks it.
fn exchange(pair: &mut Pair, seed: u64) -> Verdict {
    match pair.config.qp_type {
        QpType::UD => {
            let remote = endpoint(&pair.b)?;
            let path = pair.a.qp.path_to(&remote)?;
            let ah = supported(pair.a.pd.create_ah(&path), Capability::Ah)?;
            pair.b.recv(seed, 0..340)?;
            pair.a.fill(0..300, seed);
            let sges = [pair.a.sge(0..300)];
            let to = uverbs::Destination::new(&ah, remote.qpn, remote.qkey);
            pair.a.send(SendWr::send(&sges).id(seed).signaled().to(to))?;
            pair.a.expect(seed, WcOpcode::SEND)?;
            pair.b.expect(seed, WcOpcode::RECV)?;
            pair.b.check(40..340, seed);
            Ok(())
        }
        _ => pair.message(seed, 3000),
    }
}

fn handshake_connects_every_type() -> Verdict {
    for qp_type in [QpType::RC, QpType::UC, QpType::UD] {
        let mut pair = Pair::unconnected(Config::of(qp_type))?;
        handshake(&pair, env::handshake_options())?;
        exchange(&mut pair, 1)?;
        // A second time, with new sequence numbers.
        pair.a.reset()?;
        pair.b.reset()?;
        handshake(
            &pair,
            env::handshake_options().timeout(16).traffic_class(8).flow_label(0xabcde),
        )?;
        exchange(&mut pair, 2)?;
        let info = pair.a.qp.query()?;
        assert_eq!(info.state, QpState::RTS);
        if qp_type == QpType::RC {
            assert_eq!((info.timeout, info.retry_count, info.rnr_retry), (16, 6, env::rnr_retry()));
            match info.path.global {
                Some(global) => {
                    assert_eq!((global.traffic_class, global.flow_label), (8, 0xabcde));
                }
                // Without a global route: within a subnet of InfiniBand.
                None => assert_ne!(info.path.dlid, 0),
            }
        }
    }
    Ok(())
}

fn handshake_from_init_keeps_receives() -> Verdict {
    let mut pair = Pair::unconnected(Config::uc())?;
    let config = pair.config;
    pair.b.init(&config)?;
    pair.b.recv(3, 0..64)?;
    handshake(&pair, env::handshake_options())?;
    pair.a.fill(0..64, 5);
    let sges = [pair.a.sge(0..64)];
    pair.a.send(SendWr::send(&sges).id(4).signaled())?;
    pair.b.expect(3, WcOpcode::RECV)?;
    pair.b.check(0..64, 5);
    Ok(())
}

fn handshake_uses_the_smaller_mtu() -> Verdict {
    let mut pair = Pair::unconnected(Config::rc())?;
    let (a, mut b) = (endpoint(&pair.a)?, endpoint(&pair.b)?);
    b.mtu = Mtu::MTU_256;
    env::handshake(&pair.a.qp, &b)?;
    env::handshake(&pair.b.qp, &Endpoint { mtu: Mtu::MTU_256, ..a })?;
    assert_eq!(pair.a.qp.query()?.path_mtu, Mtu::MTU_256);
    assert_eq!(pair.b.qp.query()?.path_mtu, Mtu::MTU_256);
    pair.message(1, 5000)
}

fn handshake_uses_the_peers_rd_atomic() -> Verdict {
    let pair = Pair::unconnected(Config::rc())?;
    let b = endpoint(&pair.b)?;
    assert!(b.rd_atomic > 0, "{b:?}");
    endpoint(&pair.a)?;
    env::handshake(&pair.a.qp, &Endpoint { rd_atomic: 2, ..b })?;
    assert_eq!(pair.a.qp.query()?.max_rd_atomic, 2);
    Ok(())
}

fn handshake_steps_in_the_wrong_order_are_refused() -> Verdict {
    let pair = Pair::unconnected(Config::rc())?;
    let b = endpoint(&pair.b)?;
    let error = pair.a.qp.handshake(&b, &Handshake::new()).unwrap_err();
    assert!(error.message().contains("call QpControl::endpoint before"), "{error}");
    endpoint(&pair.a)?;
    env::handshake(&pair.a.qp, &b)?;
    let error = pair.a.qp.handshake(&b, &Handshake::new()).unwrap_err();
    assert_eq!((error.verb(), error.errno()), ("handshake", Errno::INVAL));
    assert_eq!(error.message(), "a queue pair of type RC cannot go from RTS to INIT");
    Ok(())
}

fn endpoint_of_an_empty_gid_index_is_refused() -> Verdict {
    let pair = Pair::unconnected(Config::rc())?;
    let last = pair.a.context.query_port(env::port())?.gid_table_len - 1;
    let error = pair.a.qp.endpoint(&env::gid_entry(env::port(), last)).unwrap_err();
    assert_eq!((error.verb(), error.errno()), ("endpoint", Errno::INVAL));
    let error = pair.a.qp.endpoint(&env::gid_entry(env::port(), last + 1)).unwrap_err();
    assert!(error.message().contains(&format!("{} entries", last + 1)), "{error}");
    let error = pair.a.qp.endpoint(&env::gid_entry(99, 0)).unwrap_err();
    assert!(error.message().contains("port 99"), "{error}");
    Ok(())
}

fn drained_send_queue_goes_on() -> Verdict {
    drainable()?;
    for qp_type in [QpType::RC, QpType::UC, QpType::UD] {
        let mut pair = Pair::new(Config::of(qp_type))?;
        pair.message(1, 100)?;
        pair.a.qp.modify(&QpAttr::new().state(QpState::SQD))?;
        let deadline = Instant::now() + crate::pair::PATIENCE;
        while pair.a.qp.query()?.sq_draining {
            if Instant::now() > deadline {
                return Err(Stop::fail("the send queue is not drained"));
            }
        }
        assert_eq!(pair.a.qp.query()?.state, QpState::SQD);
        pair.a.qp.modify(&QpAttr::new().state(QpState::RTS))?;
        assert_eq!(pair.a.qp.query()?.state, QpState::RTS);
        pair.message(2, 100)?;
    }
    Ok(())
}

fn access_flags_change_in_rts() -> Verdict {
    let mut pair = Pair::new(Config { access: Access::LOCAL_WRITE, ..Config::rc() })?;
    pair.b.qp.modify(&QpAttr::new().access(Access::ALL_REMOTE).min_rnr_timer(5))?;
    let info = pair.b.qp.query()?;
    // Some drivers keep the rights of peers only; local writes are always allowed.
    let remote = |access: Access| access & !Access::LOCAL_WRITE;
    assert_eq!((remote(info.access), info.min_rnr_timer), (remote(Access::ALL_REMOTE), 5));
    pair.a.fill(0..100, 1);
    let sges = [pair.a.sge(0..100)];
    pair.a.send(SendWr::write(pair.b.remote(0), &sges).id(1).signaled())?;
    pair.a.expect(1, WcOpcode::WRITE)?;
    pair.b.check(0..100, 1);
    Ok(())
}

fn failed_state_is_learned_by_query() -> Verdict {
    crate::env::access_errors()?;
    let mut pair = Pair::new(Config::rc())?;
    let mut nowhere = pair.b.remote(0);
    nowhere.rkey.0 ^= 0xff;
    pair.a.send(SendWr::write(nowhere, &[pair.a.sge(0..8)]).id(1).signaled())?;
    pair.a.expect_failure(1, WcStatus::REM_ACCESS_ERR)?;
    // The library learns of it only by a query.
    assert_eq!(pair.a.qp.query()?.state, QpState::ERR);
    assert_eq!(pair.a.qp.state(), QpState::ERR);
    let error = pair.a.qp.modify(&QpAttr::new().min_rnr_timer(1)).unwrap_err();
    assert_eq!(error.message(), "RC from ERR to ERR: superfluous min_rnr_timer");
    Ok(())
}

fn right_current_state_is_accepted() -> Verdict {
    let mut pair = Pair::new(Config::rc())?;
    pair.a.qp.modify(&QpAttr::new().state(QpState::RTS).current_state(QpState::RTS))?;
    pair.message(1, 10)
}

/// rxe's driver trusts the caller's current state, and would bring the queue pair back to RTS.
fn wrong_current_state_is_refused() -> Verdict {
    let pair = Pair::new(Config::rc())?;
    pair.a.qp.modify(&QpAttr::new().state(QpState::ERR))?;
    let back = QpAttr::new().state(QpState::RTS).current_state(QpState::RTS);
    let error = pair.a.qp.modify(&back).unwrap_err();
    assert_eq!(error.message(), "current_state RTS: the queue pair is in state ERR");
    assert_eq!(pair.a.qp.query()?.state, QpState::ERR);
    Ok(())
}

fn privileged_qkey_needs_cap_net_raw() -> Verdict {
    let pair = Pair::unconnected(Config::ud())?;
    let attr = QpAttr::new().state(QpState::INIT).port(env::port()).pkey_index(env::pkey_index());
    let answer = pair.a.qp.modify(&attr.qkey(Qkey(0x8001_0000)));
    if rustix::process::geteuid().is_root() {
        return Ok(answer?);
    }
    let error = answer.unwrap_err();
    assert_eq!(error.errno(), Errno::PERM);
    assert!(error.message().contains("CAP_NET_RAW"), "{error}");
    assert_eq!(pair.a.qp.query()?.state, QpState::RESET);
    Ok(pair.a.qp.modify(&attr.qkey(Qkey(0x7001_0000)))?)
}

fn mtu_beyond_the_port_is_refused() -> Verdict {
    let context = env::open()?;
    let port = context.query_port(env::port())?;
    assert!(port.active_mtu <= port.max_mtu, "{port:?}");
    let mtu = Mtu(port.max_mtu.0 + 1);
    let mut pair = Pair::unconnected(Config { mtu, ..Config::uc() })?;
    let (config, address) = (pair.config, pair.b.address());
    pair.a.init(&config)?;
    let refused = pair.a.ready_to_receive(&config, &address);
    assert!(matches!(refused, Err(Stop::Fail(why)) if why.contains("path_mtu")));
    assert_eq!(pair.a.qp.state(), QpState::INIT);
    Ok(())
}

fn rate_limit_is_unsupported_or_works() -> Verdict {
    let pair = Pair::new(Config::rc())?;
    match pair.a.qp.modify(&QpAttr::new().rate_limit(100_000)) {
        Ok(()) => Ok(()),
        Err(error) if error.is_unsupported() => {
            let rc = error.message().contains("limits no rates of type RC");
            require(rc, Capability::Rc, "the device limits rates otherwise")?;
            Ok(())
        }
        // mlx5 of Linux 6.1 answers `EINVAL`; later kernels answer that they do not support it.
        Err(error) if error.errno() == Errno::INVAL => {
            assert!(error.message().contains("rate_limit 100000"), "{error}");
            Ok(())
        }
        Err(error) => Err(error.into()),
    }
}
