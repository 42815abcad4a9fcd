//! The UDP source port of a queue pair and of an address handle, and the port of a LAG that a queue pair sends from.
//! That packets have the port is shown by a capture, in `tests/fabric.rs`.

use crate::capability::Capability;
use crate::fork::in_child;
use crate::pair::{Config, Pair, QKEY, Side};
use crate::testbed::link_of;
use crate::verdict::{Verdict, require, trials};
use uverbs::mlx5::{self, devx};
use uverbs::{Access, Destination, Errno, LinkLayer, QpAttr, QpState, QpType, SendWr, WcOpcode};
use uverbs_uapi::mlx5::prm::cmd::{lagc, query_lag_out};
use uverbs_uapi::mlx5::prm::hca_cap::cmd_hca_cap;
use uverbs_uapi::mlx5::prm::qpc::{ads, qpc, query_qp_out};
use uverbs_uapi::mlx5::prm::{Bits, Field, Layout, command, opcode};

trials![
    queue_pair_gets_another_udp_port,
    udp_port_is_of_connected_queue_pairs_that_send,
    address_handle_gets_another_udp_port,
    lag_port_is_another_from_queue_pair_to_queue_pair,
    lag_port_is_changed,
    lag_port_that_does_not_exist_is_refused,
    placement_out_of_order_carries_messages_and_fills_half_the_queue,
    placement_out_of_order_is_refused_where_it_does_not_exist,
    paths_stay_the_parents,
];

const PORT: u16 = 0xd123;
const NO_LAG: &str = "the ports form no LAG";

/// A general capability of the device.
fn capability(side: &Side, field: Field<cmd_hca_cap>) -> Verdict<u64> {
    Ok(super::devx::capabilities::<cmd_hca_cap>(&side.context, 0)?.get(field))
}

fn pair(config: Config) -> Verdict<Pair> {
    super::devx::open()?;
    Pair::new(config)
}

/// The device's context of the queue pair.
fn context_of(side: &Side) -> Verdict<Bits<query_qp_out, Vec<u8>>> {
    let command = super::devx::about(opcode::QUERY_QP, side.qp.qpn().0);
    let mut output = vec![0; query_qp_out::SIZE];
    devx::query(&*side.qp, &command, &mut output)?;
    Ok(Bits::new(output))
}

fn has_udp_ports(side: &Side) -> Verdict<bool> {
    let ethernet = link_of(&side.context)?.layer == LinkLayer::ETHERNET;
    Ok(ethernet && capability(side, cmd_hca_cap::rts2rts_qp_udp_sport)? != 0)
}

fn has_lag(side: &Side) -> Verdict<bool> {
    Ok(capability(side, cmd_hca_cap::num_lag_ports)? > 1)
}

/// The number of ports whose LAG the device's port is; 1 without.
pub(crate) fn aggregated_ports() -> Verdict<u64> {
    let context = super::devx::open()?;
    let caps = super::devx::capabilities::<cmd_hca_cap>(&context, 0)?;
    let ports = caps.get(cmd_hca_cap::num_lag_ports);
    if ports < 2 {
        return Ok(1);
    }
    let query = command::<16>(opcode::QUERY_LAG);
    let mut output = vec![0; query_lag_out::SIZE];
    devx::general_command(&context, &query, &mut output)?;
    let state = Bits::<query_lag_out, _>::new(output).sub(query_lag_out::ctx).get(lagc::lag_state);
    Ok(if state == 0 { 1 } else { ports })
}

/// The UDP source port in the device's context of the queue pair.
fn udp_port(side: &Side) -> Verdict<u64> {
    let output = context_of(side)?;
    Ok(output.sub(query_qp_out::qpc).sub(qpc::primary_address_path).get(ads::udp_sport))
}

fn queue_pair_gets_another_udp_port() -> Verdict {
    for config in [Config::rc(), Config::uc()] {
        let mut pair = pair(config)?;
        if !has_udp_ports(&pair.a)? {
            let refused = mlx5::set_udp_source_port(&pair.a.qp, PORT).unwrap_err();
            assert_eq!(refused.errno(), Errno::OPNOTSUPP, "{refused}");
        }
        require(has_udp_ports(&pair.a)?, Capability::UdpPort, "not advertised")?;
        let first = udp_port(&pair.a)?;
        assert!(first >= 0xc000, "the kernel's port {first:#x}");
        pair.message(1, 1000)?;
        mlx5::set_udp_source_port(&pair.a.qp, PORT)?;
        assert_eq!(udp_port(&pair.a)?, PORT.into());
        assert_ne!(udp_port(&pair.b)?, u64::from(PORT), "the peer's");
        pair.message(2, 1000)?;
        std::mem::swap(&mut pair.a, &mut pair.b);
        pair.message(3, 1000)?;
    }
    Ok(())
}

fn udp_port_is_of_connected_queue_pairs_that_send() -> Verdict {
    let datagrams = pair(Config::ud())?;
    let early = Pair::unconnected(Config::rc())?;
    for (side, why) in [(&datagrams.a, "type UD"), (&early.a, "RESET")] {
        let refused = mlx5::set_udp_source_port(&side.qp, PORT).unwrap_err();
        assert_eq!(refused.errno(), Errno::OPNOTSUPP, "{refused}");
        assert!(refused.to_string().contains(why), "{refused}");
    }
    Ok(())
}

fn address_handle_gets_another_udp_port() -> Verdict {
    let Pair { mut a, mut b, .. } = pair(Config::ud())?;
    let mut ah = a.pd.create_ah(&b.address().vector(&a))?;
    let vector = mlx5::address_vector(&ah)?;
    let set = mlx5::set_ah_udp_source_port(&mut ah, PORT);
    if link_of(&a.context)?.layer != LinkLayer::ETHERNET {
        assert_eq!(set.unwrap_err().errno(), Errno::INVAL);
        assert_eq!(mlx5::address_vector(&ah)?, vector);
        return Ok(());
    }
    set?;
    // RoCE v2 has no such port, and the handle keeps its own.
    let refused = mlx5::set_ah_udp_source_port(&mut ah, 0).unwrap_err();
    assert_eq!(refused.errno(), Errno::INVAL, "{refused}");
    let mut changed = vector;
    changed[14..16].copy_from_slice(&PORT.to_be_bytes());
    assert_eq!(mlx5::address_vector(&ah)?, changed);
    b.recv(1, 0..140)?;
    a.fill(0..100, 7);
    let sges = [a.sge(0..100)];
    a.send(SendWr::send(&sges).to(Destination::new(&ah, b.qp.qpn(), QKEY)))?;
    assert_eq!(b.expect(1, WcOpcode::RECV)?.byte_len, 140);
    b.check(40..140, 7);
    Ok(())
}

fn lag_port_is_another_from_queue_pair_to_queue_pair() -> Verdict {
    let one = pair(Config::rc())?;
    let port = mlx5::query_lag_port(&one.a.qp);
    if !has_lag(&one.a)? {
        assert_eq!(port.as_ref().unwrap_err().errno(), Errno::OPNOTSUPP);
    }
    require(has_lag(&one.a)?, Capability::Lag, NO_LAG)?;
    // The driver deals them out in turn, to each context or to all.
    let first = port?;
    let mut seen = vec![first.configured];
    for _ in 0..4 {
        let context = one.a.context.clone();
        let mut further = Pair::on(context, crate::env::open()?, Config::rc())?;
        further.connect()?;
        for qp in [&further.a.qp, &further.b.qp] {
            let port = mlx5::query_lag_port(qp)?;
            assert_eq!(port.configured, port.active);
            seen.push(port.configured);
        }
    }
    assert!(seen.contains(&1) && seen.contains(&2), "{seen:?}");
    Ok(())
}

fn lag_port_is_changed() -> Verdict {
    for config in [Config::rc(), Config::uc(), Config::ud()] {
        let mut pair = pair(config)?;
        if !has_lag(&pair.a)? {
            let refused = mlx5::set_lag_port(&pair.a.qp, 1).unwrap_err();
            assert_eq!(refused.errno(), Errno::OPNOTSUPP, "{refused}");
        }
        require(has_lag(&pair.a)?, Capability::Lag, NO_LAG)?;
        for (seed, port) in [1, 2, 2, 1].into_iter().enumerate() {
            mlx5::set_lag_port(&pair.a.qp, port)?;
            let found = mlx5::query_lag_port(&pair.a.qp)?;
            assert_eq!((found.configured, found.active), (port, port));
            pair.message(seed as u64, 500)?;
        }
    }
    Ok(())
}

fn lag_port_that_does_not_exist_is_refused() -> Verdict {
    let good = pair(Config::rc())?;
    require(has_lag(&good.a)?, Capability::Lag, NO_LAG)?;
    for port in [0, 3, 16, u32::MAX] {
        let refused = mlx5::set_lag_port(&good.a.qp, port).unwrap_err();
        assert_eq!(refused.errno(), Errno::INVAL, "{refused}");
    }
    let early = Pair::unconnected(Config::of(QpType::RC))?;
    let refused = mlx5::set_lag_port(&early.a.qp, 1).unwrap_err();
    assert_eq!(refused.errno(), Errno::OPNOTSUPP, "{refused}");
    Ok(())
}

/// Whether the device's context of a queue pair lets it place data out of order.
fn is_out_of_order(side: &Side) -> Verdict<bool> {
    let output = context_of(side)?;
    let context = output.sub(query_qp_out::qpc);
    Ok(context.is_set(qpc::dp_ordering_1) && context.is_set(qpc::dp_ordering_force))
}

fn placement_out_of_order_carries_messages_and_fills_half_the_queue() -> Verdict {
    let places = mlx5::query_out_of_order(&super::open()?)?;
    require(places.rc > 0, Capability::OutOfOrder, "not advertised")?;
    for config in [Config::rc(), Config::uc(), Config::ud()] {
        let mut pair = pair(Config { out_of_order: true, depth: 8, ..config })?;
        assert!(is_out_of_order(&pair.a)? && is_out_of_order(&pair.b)?);
        assert_eq!(pair.b.qp.caps().max_recv_wr, 8);
        // Several times around the queue, which is twice as long as what may be posted.
        for seed in 0..40 {
            pair.message(seed, 300)?;
        }
        for id in 0..8 {
            pair.b.recv(id, 0..8)?;
        }
        let sges = [pair.b.sge(0..8)];
        let full = pair.b.qp.recv_batch()?.push(uverbs::RecvWr::new(&sges));
        assert_eq!(full, Err(uverbs::PostError::Full));
    }
    let plain = pair(Config::rc())?;
    assert!(!is_out_of_order(&plain.a)?);
    // The command that asks for it agrees on no options of the connection.
    let (pd, cq) = (plain.a.context.alloc_pd()?, plain.a.context.cq_builder(8).build()?);
    let qp = pd.qp_builder(&cq, &cq, QpType::RC).out_of_order_placement().build()?;
    let offered = qp.query_ece()?;
    qp.modify(
        &QpAttr::new().state(QpState::INIT).port(1).pkey_index(0).access(Access::LOCAL_WRITE),
    )?;
    assert_eq!(qp.query_ece()?, offered);
    Ok(())
}

fn placement_out_of_order_is_refused_where_it_does_not_exist() -> Verdict {
    let context = super::open()?;
    let (pd, cq) = (context.alloc_pd()?, context.cq_builder(8).build()?);
    let places = mlx5::query_out_of_order(&context)?;
    let has_it = mlx5::query_device(&context)?.out_of_order_placement();
    assert_eq!(places.rc > 0, has_it);
    let builder = || pd.qp_builder(&cq, &cq, QpType::RC).out_of_order_placement();
    if !has_it {
        let refused = builder().build().unwrap_err();
        assert_eq!(refused.errno(), Errno::OPNOTSUPP, "{refused}");
        return Ok(());
    }
    // A device may have it for some types only.
    for (kind, most) in [(QpType::RC, places.rc), (QpType::UC, places.uc), (QpType::UD, places.ud)]
    {
        let built = pd.qp_builder(&cq, &cq, kind).out_of_order_placement().build();
        let errno = built.err().map(|error| error.errno());
        assert_eq!(errno, (most == 0).then_some(Errno::OPNOTSUPP), "{kind}");
    }
    let refused = builder().max_recv_wr(places.rc + 1).build().unwrap_err();
    assert_eq!(refused.errno(), Errno::INVAL, "{refused}");
    assert!(refused.to_string().contains(&places.rc.to_string()), "{refused}");
    Ok(())
}

fn paths_stay_the_parents() -> Verdict {
    let pair = pair(Config::rc())?;
    let pair = in_child(pair, |pair| {
        for result in [
            mlx5::set_udp_source_port(&pair.a.qp, PORT),
            mlx5::query_lag_port(&pair.a.qp).map(drop),
            mlx5::set_lag_port(&pair.a.qp, 1),
            mlx5::query_out_of_order(&pair.a.context).map(drop),
            mlx5::data_direct_path(&pair.a.context).map(drop),
        ] {
            let error = result.expect_err("it is the parent's");
            assert!(error.is_forked(), "{error}");
        }
        Ok(())
    })?;
    assert_eq!(pair.a.context.leaked(), 0);
    Ok(())
}
