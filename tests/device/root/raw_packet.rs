//! Raw packets over the cable between two devices. Run as root: they need `CAP_NET_RAW`.

use crate::env;
use crate::frame::{ETHERNET, Frame, TCP, UDP};
use crate::pattern;
use crate::station::{DEPTH, Station, unprivileged};
use crate::verdict::{Verdict, trials};
use std::net::SocketAddr;
use uverbs::owned::OwnedCompletionQueue;
use uverbs::{
    Context, Errno, FlowEth, Handshake, Packet, PostError, QpAttr, QpState, QpType, RawPacketCaps,
    SendWr, Sge,
};

trials![
    packets_of_every_size_in_both_directions,
    inline_and_gathered_pieces_make_one_packet,
    checksums_are_filled_in_and_checked,
    vlan_tags_are_stripped_on_demand,
    rings_wrap_around,
    requests_follow_the_state,
    reset_discards_receives_and_completions,
    message_opcodes_are_refused,
    contradictory_attributes_are_refused,
    device_without_raw_packets_says_so,
];

/// Two stations with rules for packets to their own addresses.
fn pair() -> Verdict<((Station, uverbs::Flow), (Station, uverbs::Flow))> {
    let (a, b) = Station::both()?;
    let to = |it: &Station| it.qp.create_flow(&it.rule().spec(FlowEth::new().dst_mac(it.mac)));
    let (flow_a, flow_b) = (to(&a)?, to(&b)?);
    Ok(((a, flow_a), (b, flow_b)))
}

fn packets_of_every_size_in_both_directions() -> Verdict {
    let ((mut a, _flow_a), (mut b, _flow_b)) = pair()?;
    for (seed, length) in [0, 1, 46, 47, 128, 1000, 1499, 1500].into_iter().enumerate() {
        let data = pattern::bytes(seed as u64, length);
        b.listen()?;
        let frame = Frame::new(b.mac, a.mac, &data).bytes();
        a.send(&frame)?;
        b.expect(&frame)?;
        std::mem::swap(&mut a, &mut b);
    }
    Ok(())
}

fn inline_and_gathered_pieces_make_one_packet() -> Verdict {
    let ((mut a, _flow_a), (mut b, _flow_b)) = pair()?;
    let data = pattern::bytes(1, 100);
    let frame = Frame::new(b.mac, a.mac, &data).bytes();
    a.put(&frame);
    let sges = [a.sge(0..20), a.sge(20..20), a.sge(20..frame.len())];
    let head = Packet::new().header(&frame[..ETHERNET]);
    let rest = [a.sge(ETHERNET..40), a.sge(40..frame.len())];
    let longest = Packet::new().header(&frame[..Packet::MAX_HEADER]);
    let behind = [a.sge(Packet::MAX_HEADER..frame.len())];
    for wr in [
        SendWr::send(&sges),
        SendWr::send(&[]).inline(&frame),
        SendWr::packet(head, &rest),
        SendWr::packet(longest, &behind),
        SendWr::packet(head, &[]).inline(&frame[ETHERNET..]),
        SendWr::send(&[]).inline_list(&[&frame[..5], &frame[5..30], &frame[30..]]),
        SendWr::packet(Packet::new().header(&frame[..1]), &[]).inline(&frame[1..]),
    ] {
        b.listen()?;
        a.send_wr(wr)?;
        b.expect(&frame)?;
    }
    Ok(())
}

fn checksums_are_filled_in_and_checked() -> Verdict {
    let ((mut a, _flow_a), (mut b, _flow_b)) = pair()?;
    let caps = a.context.query_device()?.raw_packet_caps;
    assert!(caps.contains(RawPacketCaps::IP_CSUM), "{caps:?}");
    let from: SocketAddr = "198.51.100.1:1000".parse()?;
    let to: SocketAddr = "198.51.100.2:2000".parse()?;
    for protocol in [UDP, TCP] {
        let frame = Frame::new(b.mac, a.mac, b"to be summed up").ip(protocol, from, to, 0);
        let (bare, whole) = (frame.bytes(), frame.summed());
        assert_ne!(bare, whole);
        // The sender did not ask for checksums, and that of IPv4 is wrong.
        b.listen()?;
        a.send(&bare)?;
        assert!(!b.expect(&bare)?.checked);
        let sges = [a.sge(0..bare.len())];
        b.listen()?;
        a.send_wr(SendWr::packet(Packet::new().ip_checksum(), &sges))?;
        assert!(b.expect(&whole)?.checked);
        // The checksum is right in one header and wrong in the other.
        let mut broken = whole.clone();
        *broken.last_mut().expect("it has bytes") ^= 1;
        b.listen()?;
        a.send(&broken)?;
        assert!(!b.expect(&broken)?.checked);
    }
    let from: SocketAddr = "[2001:db8::1]:1000".parse()?;
    let to: SocketAddr = "[2001:db8::2]:2000".parse()?;
    let frame = Frame::new(b.mac, a.mac, b"has no such checksum").ip(UDP, from, to, 0).bytes();
    b.listen()?;
    a.send(&frame)?;
    assert!(!b.expect(&frame)?.checked);
    Ok(())
}

fn vlan_tags_are_stripped_on_demand() -> Verdict {
    let (mut a, mut b) = Station::both()?;
    let caps = a.context.query_device()?.raw_packet_caps;
    assert!(caps.contains(RawPacketCaps::CVLAN_STRIPPING), "{caps:?}");
    let bare = Frame::new(b.mac, a.mac, b"in a network of its own");
    let tagged = bare.clone().tag(0xa123);
    {
        let rule = b.rule().spec(FlowEth::new().dst_mac(b.mac));
        let _flow = b.qp.create_flow(&rule)?;
        b.listen()?;
        a.send(&tagged.bytes())?;
        assert_eq!(b.expect(&tagged.bytes())?.vlan, None);
    }
    let mut b = Station::made(&env::second()?, |builder| builder.cvlan_stripping())?;
    let rule = b.rule().spec(FlowEth::new().dst_mac(b.mac));
    let _flow = b.qp.create_flow(&rule)?;
    for (sent, vlan) in [(tagged, Some(0xa123)), (bare.clone(), None)] {
        b.listen()?;
        a.send(&sent.bytes())?;
        assert_eq!(b.expect(&bare.bytes())?.vlan, vlan);
    }
    Ok(())
}

fn rings_wrap_around() -> Verdict {
    let ((mut a, _flow_a), (mut b, _flow_b)) = pair()?;
    assert!(a.qp.caps().max_send_wr >= DEPTH && b.qp.caps().max_recv_wr >= DEPTH);
    for seed in 0..u64::from(3 * DEPTH) {
        let data = pattern::bytes(seed, 50 + seed as usize);
        let frame = Frame::new(b.mac, a.mac, &data).bytes();
        b.listen()?;
        if seed % 2 == 0 {
            a.send(&frame)?;
        } else {
            a.send_wr(SendWr::send(&[]).inline(&frame))?;
        }
        b.expect(&frame)?;
    }
    Ok(())
}

fn requests_follow_the_state() -> Verdict {
    env::packets()?;
    let mut it = Station::raw(&env::device(), |builder| builder)?;
    assert_eq!(it.listen(), Err(PostError::State(QpState::RESET)));
    let init = QpAttr::new().state(QpState::INIT).port(env::port());
    let error = it.qp.modify(&init.pkey_index(0)).unwrap_err();
    assert!(error.message().contains("superfluous pkey_index"), "{error}");
    it.qp.modify(&init)?;
    // In INIT the device would receive already.
    assert_eq!(it.listen(), Err(PostError::State(QpState::INIT)));
    it.qp.modify(&QpAttr::new().state(QpState::RTR))?;
    it.listen()?;
    let send = SendWr::send(&[]).inline(&[0; 64]);
    assert_eq!(it.post(send), Err(PostError::State(QpState::RTR)));
    it.qp.modify(&QpAttr::new().state(QpState::RTS))?;
    assert_eq!(it.qp.query()?.state, QpState::RTS);
    let error = it
        .qp
        .handshake(&it.qp.endpoint(&it.qp.context().query_gid(env::port(), 0)?)?, &Handshake::new())
        .unwrap_err();
    assert_eq!(error.errno(), Errno::INVAL);
    it.send_wr(send)
}

fn reset_discards_receives_and_completions() -> Verdict {
    let ((mut a, _flow_a), (mut b, _flow_b)) = pair()?;
    for seed in 0..3 {
        let frame = Frame::new(b.mac, a.mac, &pattern::bytes(seed, 60)).bytes();
        b.listen()?;
        b.listen()?;
        a.send(&frame)?;
        b.expect(&frame)?;
        a.send_wr(SendWr::send(&[]).inline(&frame))?;
        // The reset discards the remaining completion and receive.
        b.qp.reset(&mut [&mut b.cq])?;
        a.qp.reset(&mut [&mut a.cq])?;
        b.start()?;
        a.start()?;
        b.expect_silence()?;
    }
    Ok(())
}

fn message_opcodes_are_refused() -> Verdict {
    env::packets()?;
    let mut it = Station::on(&env::device())?;
    let remote = uverbs::Remote { addr: 0, rkey: uverbs::Rkey(0) };
    let none: [Sge; 0] = [];
    for wr in [
        SendWr::send_imm(&none, 1),
        SendWr::write(remote, &none),
        SendWr::read(remote, &none),
        SendWr::local_inv(remote.rkey),
    ] {
        assert_eq!(it.post(wr), Err(PostError::Unsupported), "{wr:?}");
    }
    let long = Packet::new().header(&[0; 19]);
    let max = PostError::HeaderTooLong { max: 18 };
    assert_eq!(it.post(SendWr::packet(long, &none)), Err(max));
    Ok(())
}

fn contradictory_attributes_are_refused() -> Verdict {
    env::packets()?;
    let it = Station::raw(&env::device(), |builder| builder)?;
    let srq = it.pd.srq_builder(4).build()?;
    let builder = |qp_type| it.pd.qp_builder(&it.cq, &it.cq, qp_type);
    let error = builder(QpType::RAW_PACKET).srq(&srq).build().unwrap_err();
    assert!(error.message().contains("queues of their own"), "{error}");
    let error = builder(QpType::RC).cvlan_stripping().build().unwrap_err();
    assert!(error.message().contains("no VLAN tags"), "{error}");
    let error = unprivileged(|| builder(QpType::RAW_PACKET).build().unwrap_err())?;
    assert_eq!(error.errno(), Errno::PERM);
    assert!(error.message().contains("CAP_NET_RAW"), "{error}");
    // CQEs of raw packets name rules in place of queue pairs.
    let Station { qp, cq, .. } = it;
    let mut cq = OwnedCompletionQueue::<()>::new(cq);
    let error = cq.adopt(qp).unwrap_err();
    assert!(error.to_string().contains("do not say"), "{error}");
    Ok(())
}

fn device_without_raw_packets_says_so() -> Verdict {
    env::packets()?;
    let context = Context::open(&env::device())?;
    let pd = context.alloc_pd()?;
    let cq = context.cq_builder(4).build()?;
    let caps = context.query_device()?.raw_packet_caps;
    match pd.qp_builder(&cq, &cq, QpType::RAW_PACKET).build() {
        Ok(qp) => assert_eq!(qp.qp_type(), QpType::RAW_PACKET),
        Err(error) => {
            assert!(error.is_unsupported() && caps.is_empty(), "{error}, and {caps:?}");
            let expected =
                format!("{} has no queue pairs of type raw packet", env::device().name());
            assert!(error.message().contains(&expected), "{error}");
        }
    }
    Ok(())
}
