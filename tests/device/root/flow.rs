//! Flow rules: the packets that each queue pair receives. The tests run as root, because rules need `CAP_NET_RAW`.

use crate::capability::Capability;
use crate::env;
use crate::frame::{EXPERIMENT, Frame, TCP, UDP};
use crate::leaks::rounds;
use crate::station::{Station, unprivileged};
use crate::verdict::{Stop, Verdict, supported, trials};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use uverbs::{
    Context, Errno, FlowAttr, FlowEth, FlowIpv4, FlowIpv6, FlowPorts, FlowSpec, FlowType,
    ObjectKind, QpType,
};

trials![
    without_a_rule_nothing_is_received,
    rules_match_ethernet_headers,
    rules_match_ipv4_headers,
    rules_match_ipv6_headers,
    rules_match_ports,
    drop_rule_drops_packets,
    dont_trap_rule_leaves_packets_to_others_or_is_refused,
    egress_rule_stops_packets_or_is_refused,
    flow_tag_is_in_the_completion,
    lower_priority_number_wins,
    two_equal_rules_deliver_two_copies,
    rules_keep_their_queue_pair,
    rules_come_and_go,
    refused_rules_name_the_reason,
    rules_need_cap_net_raw,
    default_rule_takes_unclaimed_packets,
    sniffer_rule_copies_every_packet,
    rules_leave_nothing,
];

/// Sends frames over the cable. Only the last one may arrive under a rule: an earlier one would arrive first.
#[track_caller]
fn only_last(a: &mut Station, b: &mut Station, rule: &FlowAttr, frames: &[Frame]) -> Verdict {
    let flow = b.qp.create_flow(rule)?;
    b.listen()?;
    let mut last = vec![];
    for frame in frames {
        last = frame.bytes();
        a.send(&last)?;
    }
    b.expect(&last)?;
    flow.destroy()?;
    Ok(())
}

fn without_a_rule_nothing_is_received() -> Verdict {
    let (mut a, mut b) = Station::both()?;
    b.listen()?;
    let frame = |n: u8| Frame::new(b.mac, a.mac, &[n; 50]).bytes();
    let frames = [1, 2, 3].map(frame);
    a.send(&frames[0])?;
    b.expect_silence()?;
    let rule = b.rule().spec(FlowEth::new().dst_mac(b.mac).ether_type(EXPERIMENT));
    let flow = b.qp.create_flow(&rule)?;
    a.send(&frames[1])?;
    assert_eq!(b.expect(&frames[1])?.tag, 0);
    b.listen()?;
    flow.destroy()?;
    a.send(&frames[2])?;
    b.expect_silence()
}

fn rules_match_ethernet_headers() -> Verdict {
    let (mut a, mut b) = Station::both()?;
    let right = Frame::new(b.mac, a.mac, b"this one");
    let group = [0x01, 0x00, 0x5e, 0x7f, 0x11, 0x22];
    let sender = [0x02, 0x11, 0, 0, 0, 1];
    let other = right.clone().from(sender);
    let to_group = right.clone().to(group);
    let other_group = right.clone().to([0x01, 0x00, 0x5e, 0x7f, 0x11, 0x23]);
    let (in_vlan, in_other) = (right.clone().tag(0x6005), right.clone().tag(0x6006));
    let udp: SocketAddr = "198.51.100.1:9".parse()?;
    let ip = right.clone().ip(UDP, udp, udp, 0);
    let eth = FlowEth::new;
    let any = eth().dst_mac(b.mac);
    for (spec, wrong, right) in [
        (any, vec![&to_group], &right),
        (any.src_mac(a.mac), vec![&other], &right),
        (any.src_mac_masked(sender, [0xff, 0xff, 0, 0, 0, 0]), vec![&right], &other),
        (any.ether_type(EXPERIMENT), vec![&ip], &right),
        (any.vlan(5), vec![&right, &in_other], &in_vlan),
        (any.vlan_tag_masked(0x6006, 0xe00f), vec![&in_vlan], &in_other),
        (eth().dst_mac(group), vec![&right, &other_group], &to_group),
    ] {
        let rule = b.rule().spec(spec);
        let frames: Vec<Frame> = wrong.into_iter().chain([right]).cloned().collect();
        only_last(&mut a, &mut b, &rule, &frames)?;
    }
    Ok(())
}

fn rules_match_ipv4_headers() -> Verdict {
    let (mut a, mut b) = Station::both()?;
    let packet = |from: &str, to: &str, protocol, class| -> Verdict<Frame> {
        let (from, to) = (format!("{from}:1").parse()?, format!("{to}:2").parse()?);
        Ok(Frame::new(b.mac, a.mac, b"data").ip(protocol, from, to, class))
    };
    let right = packet("198.51.100.1", "198.51.100.2", UDP, 0x28)?;
    let ip = FlowIpv4::new;
    let net = Ipv4Addr::new(255, 255, 255, 0);
    let (one, two) = (Ipv4Addr::new(198, 51, 100, 1), Ipv4Addr::new(198, 51, 100, 2));
    for (spec, wrong) in [
        (ip().src(one), packet("198.51.100.9", "198.51.100.2", UDP, 0x28)?),
        (ip().src_masked(two, net), packet("198.51.101.1", "198.51.100.2", UDP, 0x28)?),
        (ip().dst(two), packet("198.51.100.1", "198.51.100.3", UDP, 0x28)?),
        (ip().dst_masked(one, net), packet("198.51.100.1", "203.0.113.2", UDP, 0x28)?),
        (ip().dst(two).proto(UDP), packet("198.51.100.1", "198.51.100.2", TCP, 0x28)?),
        (ip().dst(two).src(one), packet("198.51.100.2", "198.51.100.1", UDP, 0x28)?),
        (ip().tos(0x28), packet("198.51.100.1", "198.51.100.2", UDP, 0x2c)?),
        (ip().dst(two).tos(0x28), packet("198.51.100.1", "198.51.100.2", UDP, 0x29)?),
    ] {
        let rule = b.rule().spec(FlowEth::new().dst_mac(b.mac)).spec(spec);
        let no_ip = Frame::new(b.mac, a.mac, b"data");
        only_last(&mut a, &mut b, &rule, &[no_ip, wrong, right.clone()])?;
    }
    Ok(())
}

fn rules_match_ipv6_headers() -> Verdict {
    let (mut a, mut b) = Station::both()?;
    let labelled = |from: &str, to: &str, protocol, class, label| -> Verdict<Frame> {
        let (from, to) = (format!("[{from}]:1").parse()?, format!("[{to}]:2").parse()?);
        Ok(Frame::new(b.mac, a.mac, b"data").ip(protocol, from, to, class).label(label))
    };
    let packet = |from: &str, to: &str, protocol| labelled(from, to, protocol, 0x28, 0x9_8765);
    let other = |class, label| labelled("2001:db8::1", "2001:db8:1::2", UDP, class, label);
    let right = packet("2001:db8::1", "2001:db8:1::2", UDP)?;
    let (one, two): (Ipv6Addr, Ipv6Addr) = ("2001:db8::1".parse()?, "2001:db8:1::2".parse()?);
    let net: Ipv6Addr = "ffff:ffff:ffff::".parse()?;
    let ip = FlowIpv6::new;
    for (spec, wrong) in [
        (ip().src(one), packet("2001:db8::2", "2001:db8:1::2", UDP)?),
        (ip().dst(two), packet("2001:db8::1", "2001:db8:1::1", UDP)?),
        (ip().dst_masked(two, net), packet("2001:db8::1", "2001:db8:2::2", UDP)?),
        (ip().src(one).next_hdr(UDP), packet("2001:db8::1", "2001:db8:1::2", TCP)?),
        (ip().flow_label(0x9_8765), other(0x28, 0x9_8764)?),
        (ip().dst(two).flow_label(0x9_8765), other(0x28, 0x1_8765)?),
        (ip().src(one).traffic_class(0x28), other(0x2a, 0x9_8765)?),
    ] {
        let rule = b.rule().spec(FlowEth::new().dst_mac(b.mac)).spec(spec);
        let four = Frame::new(b.mac, a.mac, b"data");
        let four = four.ip(UDP, "198.51.100.1:1".parse()?, "198.51.100.2:2".parse()?, 0);
        only_last(&mut a, &mut b, &rule, &[four, wrong, right.clone()])?;
    }
    Ok(())
}

fn rules_match_ports() -> Verdict {
    let (mut a, mut b) = Station::both()?;
    let (mac_a, mac_b) = (a.mac, b.mac);
    let packet = |protocol, from: u16, to: u16| {
        let (from, to) = (([198, 51, 100, 1], from).into(), ([198, 51, 100, 2], to).into());
        Frame::new(mac_b, mac_a, b"data").ip(protocol, from, to, 0)
    };
    let ports = FlowPorts::new;
    for (protocol, other) in [(UDP, TCP), (TCP, UDP)] {
        let right = packet(protocol, 0xc001, 7000);
        for (spec, wrong) in [
            (ports().dst_port(7000), packet(protocol, 0xc001, 7001)),
            (ports().src_port(0xc001), packet(protocol, 7000, 7000)),
            (ports().src_port_masked(0xffff, 0xc000), packet(protocol, 0x4001, 7000)),
            (ports().dst_port_masked(7000, 0xfff8), packet(protocol, 0xc001, 7008)),
        ] {
            let spec = if protocol == UDP { FlowSpec::Udp(spec) } else { FlowSpec::Tcp(spec) };
            let rule = b.rule().spec(FlowEth::new().dst_mac(b.mac)).spec(FlowIpv4::new());
            let frames = [packet(other, 0xc001, 7000), wrong, right.clone()];
            only_last(&mut a, &mut b, &rule.spec(spec), &frames)?;
        }
    }
    Ok(())
}

/// A rule for UDP packets to a port of this station.
fn udp(it: &Station, port: u16) -> FlowAttr {
    let ports = FlowPorts::new().dst_port(port);
    let rule = it.rule().spec(FlowEth::new().dst_mac(it.mac)).spec(FlowIpv4::new());
    rule.spec(FlowSpec::Udp(ports))
}

fn packet(a: &Station, b: &Station, port: u16) -> Vec<u8> {
    let (from, to) = (([198, 51, 100, 1], 1).into(), ([198, 51, 100, 2], port).into());
    Frame::new(b.mac, a.mac, b"data").ip(UDP, from, to, 0).bytes()
}

fn drop_rule_drops_packets() -> Verdict {
    let (mut a, mut b) = Station::both()?;
    let all = b.rule().priority(2).spec(FlowEth::new().dst_mac(b.mac));
    let _all = b.qp.create_flow(&all)?;
    let dropping = b.qp.create_flow(&udp(&b, 7000).priority(1).drop_packets())?;
    let (unwanted, wanted) = (packet(&a, &b, 7000), packet(&a, &b, 7001));
    b.listen()?;
    a.send(&unwanted)?;
    a.send(&wanted)?;
    b.expect(&wanted)?;
    // Without the rule the frame arrives: the rule had dropped it.
    dropping.destroy()?;
    b.listen()?;
    a.send(&unwanted)?;
    b.expect(&unwanted)?;
    Ok(())
}

fn dont_trap_rule_leaves_packets_to_others_or_is_refused() -> Verdict {
    let (mut a, mut b) = Station::both()?;
    let mut c = Station::on(&env::second()?)?;
    let first = match b.qp.create_flow(&udp(&b, 7000).priority(1).tag(1).dont_trap()) {
        Err(error) => {
            // A driver that refuses the rule must not keep the packets either.
            assert!(error.is_unsupported(), "{error}");
            assert!(error.message().contains("don't trap"), "{error}");
            return Ok(());
        }
        made => made?,
    };
    let _second = c.qp.create_flow(&udp(&b, 7000).priority(2).tag(2))?;
    let frame = packet(&a, &b, 7000);
    b.listen()?;
    c.listen()?;
    a.send(&frame)?;
    assert_eq!((b.expect(&frame)?.tag, c.expect(&frame)?.tag), (1, 2));
    // A rule that keeps packets leaves none to the other queue pair.
    first.destroy()?;
    let _keeping = b.qp.create_flow(&udp(&b, 7000).priority(1).tag(3))?;
    b.listen()?;
    c.listen()?;
    a.send(&frame)?;
    assert_eq!(b.expect(&frame)?.tag, 3);
    c.expect_silence()
}

fn flow_tag_is_in_the_completion() -> Verdict {
    let (mut a, mut b) = Station::both()?;
    let tags = [(7000, 1), (7001, 0xff_ffff), (7002, 0x12_3456)];
    let mut flows = Vec::new();
    for (port, tag) in tags {
        flows.push(b.qp.create_flow(&udp(&b, port).tag(tag))?);
    }
    flows.push(b.qp.create_flow(&udp(&b, 7003))?);
    for (port, tag) in tags.into_iter().rev().chain([(7003, 0)]) {
        b.listen()?;
        let frame = packet(&a, &b, port);
        a.send(&frame)?;
        assert_eq!(b.expect(&frame)?.tag, tag);
    }
    Ok(())
}

fn lower_priority_number_wins() -> Verdict {
    let (mut a, mut b) = Station::both()?;
    let mut c = Station::on(&env::second()?)?;
    // The wide rule is older, and comes second all the same.
    let wide = b.rule().priority(3).spec(FlowEth::new().dst_mac(b.mac)).tag(3);
    let _wide = b.qp.create_flow(&wide)?;
    let narrow = c.qp.create_flow(&udp(&b, 7000).priority(2).tag(2))?;
    let frame = packet(&a, &b, 7000);
    b.listen()?;
    c.listen()?;
    a.send(&frame)?;
    assert_eq!(c.expect(&frame)?.tag, 2);
    b.expect_silence()?;
    let _narrower = b.qp.create_flow(&udp(&b, 7000).priority(0).tag(1))?;
    c.listen()?;
    a.send(&frame)?;
    assert_eq!(b.expect(&frame)?.tag, 1);
    c.expect_silence()?;
    drop((narrow, _narrower));
    b.listen()?;
    a.send(&frame)?;
    assert_eq!(b.expect(&frame)?.tag, 3);
    Ok(())
}

fn two_equal_rules_deliver_two_copies() -> Verdict {
    let (mut a, mut b) = Station::both()?;
    let mut c = Station::on(&env::second()?)?;
    let rule = udp(&b, 7000).tag(5);
    let one = b.qp.create_flow(&rule)?;
    let _other = c.qp.create_flow(&rule)?;
    let frame = packet(&a, &b, 7000);
    b.listen()?;
    c.listen()?;
    a.send(&frame)?;
    assert_eq!((b.expect(&frame)?.tag, c.expect(&frame)?.tag), (5, 5));
    // One rule ends, the other goes on.
    drop(one);
    b.listen()?;
    c.listen()?;
    a.send(&frame)?;
    c.expect(&frame)?;
    b.expect_silence()?;
    let error = b.qp.create_flow(&udp(&b, 7000).tag(6)).unwrap_err();
    assert_eq!(error.errno(), Errno::EXIST, "{error}");
    assert!(error.message().contains("another rule matches the same"), "{error}");
    Ok(())
}

fn rules_keep_their_queue_pair() -> Verdict {
    env::packets()?;
    let device = env::device();
    let idle = env::resources()?;
    let Station { qp, cq, memory, pd, context, mac, .. } = Station::on(&device)?;
    let rule = |port| FlowAttr::new(env::port()).spec(FlowEth::new().dst_mac(mac).vlan(port));
    let flows = [qp.create_flow(&rule(1))?, qp.create_flow(&rule(2))?];
    assert_ne!(flows[0].handle(), flows[1].handle());
    let (qp, error) = qp.destroy().unwrap_err().into_parts();
    assert_eq!(error.errno(), Errno::BUSY);
    assert!(error.message().contains("flow rule"), "{error}");
    let qps = env::resources()?;
    drop(qp);
    // The queue pair is there as long as its rules.
    env::unchanged(&qps)?;
    let [first, second] = flows;
    first.destroy()?;
    drop((cq, memory, pd));
    drop(second);
    assert_eq!(context.leaked(), 0);
    drop(context);
    env::unchanged(&idle)
}

fn rules_come_and_go() -> Verdict {
    env::packets()?;
    let it = Station::on(&env::device())?;
    let mut flows = Vec::new();
    for round in 0..3 {
        for vlan in 1..40 {
            let spec = FlowEth::new().dst_mac(it.mac).vlan(vlan);
            flows.push(it.qp.create_flow(&it.rule().priority(round).spec(spec))?);
        }
        flows.reverse();
        flows.truncate(20);
    }
    drop(flows);
    it.qp.destroy()?;
    assert_eq!(it.context.leaked(), 0);
    Ok(())
}

/// An egress rule either works or is refused with a reason; a refused rule leaves nothing.
fn egress_rule_stops_packets_or_is_refused() -> Verdict {
    let (mut a, mut b) = Station::both()?;
    let _hears = b.qp.create_flow(&udp(&b, 7000))?;
    let frame = packet(&a, &b, 7000);
    let rule = a.rule().egress().spec(FlowEth::new().dst_mac(b.mac)).drop_packets();
    match a.qp.create_flow(&rule) {
        Err(error) => {
            assert!(matches!(error.errno(), Errno::OPNOTSUPP | Errno::INVAL), "{error}");
            assert!(error.message().contains("egress: true"), "{error}");
        }
        Ok(flow) => {
            b.listen()?;
            a.send(&frame)?;
            b.expect_silence()?;
            flow.destroy()?;
        }
    }
    b.listen()?;
    a.send(&frame)?;
    b.expect(&frame)?;
    Ok(())
}

fn refused_rules_name_the_reason() -> Verdict {
    env::packets()?;
    let it = Station::on(&env::device())?;
    let eth = FlowEth::new().dst_mac(it.mac);
    let refusal = |rule: FlowAttr| it.qp.create_flow(&rule).unwrap_err();
    let error = refusal(FlowAttr::new(9).spec(eth));
    assert_eq!((error.errno(), error.kernel_errno()), (Errno::INVAL, None), "{error}");
    assert!(error.message().starts_with("port 9 of"), "{error}");
    let error = refusal(it.rule().spec(eth).priority(16));
    assert_eq!(error.errno(), Errno::NOMEM);
    assert!(error.message().contains("priority 16 is beyond the last, which is 15"), "{error}");
    let error = refusal(it.rule().spec(FlowIpv4::new().ttl(3)));
    assert!(error.is_unsupported() && error.message().contains("IPv4"), "{error}");
    let error = refusal(it.rule().spec(eth.ether_type(0x86dd)).spec(FlowIpv4::new()));
    assert_eq!(error.errno(), Errno::INVAL, "{error}");
    drop(it.qp.create_flow(&it.rule().spec(eth).priority(15))?);
    let rc = it.pd.qp_builder(&it.cq, &it.cq, QpType::RC).build()?;
    let error = rc.create_flow(&it.rule().spec(eth)).unwrap_err();
    assert_eq!(error.errno(), Errno::INVAL);
    assert!(error.message().contains("type RC; only raw packet has flow rules"), "{error}");
    Ok(())
}

fn rules_need_cap_net_raw() -> Verdict {
    env::packets()?;
    let it = Station::on(&env::device())?;
    let rule = it.rule().spec(FlowEth::new().dst_mac(it.mac));
    let error = unprivileged(|| it.qp.create_flow(&rule).unwrap_err())?;
    assert_eq!(error.errno(), Errno::PERM);
    assert!(error.message().contains("CAP_NET_RAW"), "{error}");
    // The destruction of a rule needs no capability.
    let flow = it.qp.create_flow(&rule)?;
    unprivileged(|| flow.destroy())??;
    Ok(())
}

/// Whether the station hears a frame within its patience; other packets of the network may arrive, too.
fn hears(a: &mut Station, b: &mut Station, frame: &[u8]) -> Verdict<bool> {
    b.listen()?;
    a.send(frame)?;
    loop {
        match b.heard()? {
            Some(heard) if heard.bytes == frame => return Ok(true),
            Some(_) => b.listen()?,
            None => return Ok(false),
        }
    }
}

/// The packet goes to a multicast group that the network interface is not in.
///
/// Linux from at the latest 6.16 on reads beyond the end of its table of rules: the driver of mlx5 refuses the rule, or
/// accepts it and no packet comes. A rule that names the group shows that sender, queue pair and receive work. Kernels
/// up to 6.12 have to deliver the frame, which shows that the library requests the rule correctly. The kernels in
/// between were not tested, and the test demands nothing of them.
fn default_rule_takes_unclaimed_packets() -> Verdict {
    let (mut a, mut b) = Station::both()?;
    let group = [0x01, 0x00, 0x5e, 0x7f, 0x33, 0x44];
    let stray = Frame::new(group, a.mac, b"to whom it may concern").bytes();
    let named = b.rule().spec(FlowEth::new().dst_mac(group));
    for kind in [FlowType::MC_DEFAULT, FlowType::ALL_DEFAULT] {
        let flow = match b.qp.create_flow(&b.rule().flow_type(kind)) {
            Err(error) if error.errno() == Errno::INVAL => {
                assert!(error.message().contains("Linux 6.16"), "{error}");
                return Err(Stop::Skip(Capability::FlowDefault, error.to_string()));
            }
            answer => answer?,
        };
        if !hears(&mut a, &mut b, &stray)? {
            let control = b.qp.create_flow(&named)?;
            assert!(hears(&mut a, &mut b, &stray)?, "nor does a rule that names the group get it");
            assert!(env::kernel_is_since(6, 13), "the rule of type {kind} gets no packet");
            control.destroy()?;
            return Err(Stop::Skip(Capability::FlowDefault, "taken, and no packet comes".into()));
        }
        drop(flow);
    }
    Ok(())
}

fn sniffer_rule_copies_every_packet() -> Verdict {
    env::packets()?;
    let it = Station::on(&env::device())?;
    match it.qp.create_flow(&it.rule().flow_type(FlowType::SNIFFER)) {
        Ok(flow) => flow.destroy()?,
        Err(error) => {
            assert!(error.is_unsupported(), "{error}");
            let name = env::device();
            assert!(error.message().contains(name.name()), "{error}");
            assert!(error.message().contains("sniffer"), "{error}");
        }
    }
    // Another context does not list the rule.
    drop(it);
    assert_eq!(Context::open(&env::device())?.leaked(), 0);
    Ok(())
}

/// Some rounds drop the queue pair, too; not all, because it takes longer to make.
fn rules_leave_nothing() -> Verdict {
    env::packets()?;
    let mac = Station::on(&env::device())?.mac;
    let rule = move |vlan| FlowAttr::new(env::port()).spec(FlowEth::new().dst_mac(mac).vlan(vlan));
    rounds(&[ObjectKind::FLOW, ObjectKind::QP, ObjectKind::PD], |context| {
        let pd = context.alloc_pd()?;
        let cq = context.cq_builder(4).build()?;
        let make = move || {
            let qp = pd.qp_builder(&cq, &cq, QpType::RAW_PACKET).build();
            supported(qp, Capability::RawPacket)
        };
        let kept = make()?;
        let mut round = 0;
        Ok(Box::new(move || {
            round += 1;
            kept.create_flow(&rule(1))?.destroy()?;
            if round % 50 == 1 {
                let qp = make()?;
                let flow = qp.create_flow(&rule(2).tag(7))?;
                drop((qp, flow));
            }
            Ok(())
        }))
    })
}
