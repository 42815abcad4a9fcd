//! Datagrams, address handles and multicast.

use crate::capability::Capability;
use crate::env;
use crate::pair::{Config, Done, PATIENCE, Pair, QKEY, Side, loopback};
use crate::testbed::link;
use crate::verdict::{Verdict, require, supported, trials};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};
use std::time::Instant;
use uverbs::{
    AddressVector, Context, Destination, Errno, Gid, GlobalRoute, Grh, LinkLayer, McastMembership,
    ObjectKind, PostError, Qkey, QpAttr, QpState, Qpn, SendWr, Wc, WcOpcode,
};

trials![
    datagrams_of_every_size,
    datagrams_in_both_directions,
    header_names_both_gids,
    answer_goes_back_by_the_completion,
    immediate_data_arrives,
    inline_data_arrives,
    completion_names_the_sender,
    wrong_qkey_is_dropped,
    unknown_queue_pair_is_dropped,
    datagram_needs_a_destination,
    connection_takes_no_destination,
    one_sided_operations_are_refused,
    bad_address_vectors_are_refused,
    address_handles_come_and_go,
    dropped_address_handle_stays_while_its_datagram_waits,
    address_handles_are_dropped_while_datagrams_are_sent,
    multicast_reaches_every_member,
    multicast_ends_with_the_membership,
    multicast_membership_holds_the_queue_pair,
    multicast_needs_a_multicast_gid,
];

/// Bytes of the global route header before the payload.
const GRH: usize = 40;

fn is_ethernet() -> bool {
    link().layer == LinkLayer::ETHERNET
}

fn datagrams_of_every_size() -> Verdict {
    let mut pair = Pair::new(Config::ud())?;
    let mtu =
        pair.a.context.query_port(env::port())?.active_mtu.bytes().expect("a known MTU") as usize;
    for (seed, length) in [0, 1, 3, 4, 5, 100, 1000, mtu - 1, mtu].into_iter().enumerate() {
        pair.message(seed as u64, length)?;
    }
    Ok(())
}

fn datagrams_in_both_directions() -> Verdict {
    let mut pair = Pair::new(Config::ud())?;
    for seed in 0..10 {
        pair.message(seed, 300)?;
        std::mem::swap(&mut pair.a, &mut pair.b);
    }
    Ok(())
}

/// Sends 64 bytes along a path.
fn send_along(pair: &mut Pair, vector: &AddressVector) -> Verdict<Done> {
    pair.b.poison(0..GRH + 64);
    pair.b.recv(1, 0..GRH + 64)?;
    pair.a.fill(0..64, 3);
    let sges = [pair.a.sge(0..64)];
    let ah = supported(pair.a.pd.create_ah(vector), Capability::Ah)?;
    let to = Destination::new(&ah, pair.b.qp.qpn(), QKEY);
    pair.a.send(SendWr::send(&sges).to(to).id(2).signaled())?;
    pair.a.expect(2, WcOpcode::SEND)?;
    let received = pair.b.expect(1, WcOpcode::RECV)?;
    assert_eq!(received.byte_len as usize, GRH + 64);
    pair.b.check(GRH..GRH + 64, 3);
    Ok(received)
}

fn header_names_both_gids() -> Verdict {
    let mut pair = Pair::new(Config::ud())?;
    if !is_ethernet() {
        // Within an InfiniBand subnet a datagram may have no GRH; its place in the buffer stays unused.
        let near = pair.b.address().vector(&pair.a);
        let received = send_along(&mut pair, &near)?;
        assert!(!received.grh, "{received:?}");
    }
    let routed = pair.b.address().routed(&pair.a);
    let received = send_along(&mut pair, &routed)?;
    assert!(received.grh, "{received:?}");
    let header = pair.b.read(0..GRH);
    let (a, b) = (pair.a.gid.gid, pair.b.gid.gid);
    if let (IpAddr::V4(from), IpAddr::V4(to)) = (a.ip(), b.ip()) {
        // An IPv4 header is in the second half of the room.
        assert_eq!(header[20] >> 4, 4, "{header:02x?}");
        assert_eq!(header[32..36], from.octets(), "{header:02x?}");
        assert_eq!(header[36..40], to.octets(), "{header:02x?}");
    } else {
        assert_eq!(header[0] >> 4, 6, "{header:02x?}");
        assert_eq!(header[8..24], a.0, "{header:02x?}");
        assert_eq!(header[24..40], b.0, "{header:02x?}");
    }
    Ok(())
}

/// Waits for a receive on a side, and finds the way back.
fn way_back(side: &mut Side) -> Verdict<(Wc, AddressVector)> {
    let deadline = Instant::now() + PATIENCE;
    let done = loop {
        if let Some(completion) = side.cq.poll()?.next() {
            break Wc::from(completion.ok()?);
        }
        assert!(Instant::now() < deadline, "no completion after {PATIENCE:?}");
        std::thread::yield_now();
    };
    let grh = Grh::parse(&side.read(0..GRH)).filter(|_| done.has_grh);
    let context = side.pd.context();
    if done.has_grh {
        let error = context.reply_path(side.gid.port, &done, None).unwrap_err();
        assert_eq!(error.errno(), Errno::INVAL, "{error}");
    }
    let back = context.reply_path(side.gid.port, &done, grh.as_ref())?;
    assert_eq!(back.global.is_some(), done.has_grh);
    Ok((done, back))
}

fn answer_goes_back_by_the_completion() -> Verdict {
    let mut pair = Pair::new(Config::ud())?;
    let near = pair.b.address().vector(&pair.a);
    let routed = pair.b.address().routed(&pair.a);
    for vector in [near, routed] {
        pair.b.recv(1, 0..GRH + 64)?;
        let sges = [pair.a.sge(0..64)];
        let there = supported(pair.a.pd.create_ah(&vector), Capability::Ah)?;
        let to = Destination::new(&there, pair.b.qp.qpn(), QKEY);
        pair.a.send(SendWr::send(&sges).to(to).id(2).signaled())?;
        pair.a.expect(2, WcOpcode::SEND)?;
        let (done, back) = way_back(&mut pair.b)?;

        pair.a.recv(3, 0..GRH + 64)?;
        pair.b.fill(0..64, 4);
        let sges = [pair.b.sge(0..64)];
        let back = pair.b.pd.create_ah(&back)?;
        let to = Destination::new(&back, done.src_qpn, QKEY);
        pair.b.send(SendWr::send(&sges).to(to).id(4).signaled())?;
        pair.b.expect(4, WcOpcode::SEND)?;
        pair.a.expect(3, WcOpcode::RECV)?;
        pair.a.check(GRH..GRH + 64, 4);
    }
    Ok(())
}

fn immediate_data_arrives() -> Verdict {
    let mut pair = Pair::new(Config::ud())?;
    pair.b.recv(1, 0..GRH + 8)?;
    pair.a.fill(0..8, 5);
    let sges = [pair.a.sge(0..8)];
    let path = pair.path()?;
    pair.a.send(path.to(SendWr::send_imm(&sges, 0x1020_3040).id(2).signaled()))?;
    pair.a.expect(2, WcOpcode::SEND)?;
    let received = pair.b.expect(1, WcOpcode::RECV)?;
    assert_eq!((received.imm, received.byte_len), (Some(0x1020_3040), GRH as u32 + 8));
    pair.b.check(GRH..GRH + 8, 5);
    Ok(())
}

fn inline_data_arrives() -> Verdict {
    let mut pair = Pair::new(Config::ud())?;
    let bytes = crate::pattern::bytes(6, 50);
    pair.b.recv(1, 0..GRH + 50)?;
    let path = pair.path()?;
    pair.a.send(path.to(SendWr::send(&[]).inline(&bytes)))?;
    pair.b.expect(1, WcOpcode::RECV)?;
    pair.b.check(GRH..GRH + 50, 6);
    Ok(())
}

fn completion_names_the_sender() -> Verdict {
    let mut pair = Pair::new(Config::ud())?;
    pair.b.recv(1, 0..GRH + 8)?;
    let sges = [pair.a.sge(0..8)];
    let path = pair.path()?;
    pair.a.send(path.to(SendWr::send(&sges)))?;
    assert_eq!(pair.b.expect(1, WcOpcode::RECV)?.src_qpn, pair.a.qp.qpn());
    Ok(())
}

fn wrong_qkey_is_dropped() -> Verdict {
    let mut pair = Pair::new(Config::ud())?;
    pair.b.recv(1, 0..GRH + 8)?;
    let ah = supported(pair.a.pd.create_ah(&pair.b.address().vector(&pair.a)), Capability::Ah)?;
    let sges = [pair.a.sge(0..8)];
    let to = Destination::new(&ah, pair.b.qp.qpn(), Qkey(QKEY.0 + 1));
    pair.a.send(SendWr::send(&sges).to(to).id(2).signaled())?;
    pair.a.expect(2, WcOpcode::SEND)?;
    pair.b.expect_silence()
}

fn unknown_queue_pair_is_dropped() -> Verdict {
    let mut pair = Pair::new(Config::ud())?;
    pair.b.recv(1, 0..GRH + 8)?;
    let ah = supported(pair.a.pd.create_ah(&pair.b.address().vector(&pair.a)), Capability::Ah)?;
    let sges = [pair.a.sge(0..8)];
    let to = Destination::new(&ah, Qpn(0x00fe_dcba), QKEY);
    pair.a.send(SendWr::send(&sges).to(to).id(2).signaled())?;
    pair.a.expect(2, WcOpcode::SEND)?;
    pair.b.expect_silence()
}

fn datagram_needs_a_destination() -> Verdict {
    let mut pair = Pair::new(Config::ud())?;
    let sges = [pair.a.sge(0..8)];
    assert_eq!(pair.a.send(SendWr::send(&sges)), Err(PostError::Destination));
    pair.message(1, 8)
}

fn connection_takes_no_destination() -> Verdict {
    let mut pair = Pair::new(Config::rc())?;
    let ah = supported(pair.a.pd.create_ah(&pair.b.address().vector(&pair.a)), Capability::Ah)?;
    let sges = [pair.a.sge(0..8)];
    let to = Destination::new(&ah, pair.b.qp.qpn(), QKEY);
    assert_eq!(pair.a.send(SendWr::send(&sges).to(to)), Err(PostError::Destination));
    pair.message(1, 8)
}

fn one_sided_operations_are_refused() -> Verdict {
    let mut pair = Pair::new(Config::ud())?;
    let path = pair.path()?;
    let sges = [pair.a.sge(0..8)];
    let remote = pair.b.remote(0);
    for wr in [
        SendWr::write(remote, &sges),
        SendWr::write_imm(remote, &sges, 1),
        SendWr::read(remote, &sges),
        SendWr::fetch_add(remote, 1, &sges),
        SendWr::send_inv(&sges, remote.rkey),
        SendWr::local_inv(remote.rkey),
    ] {
        assert_eq!(pair.a.send(path.to(wr)), Err(PostError::Unsupported), "{wr:?}");
    }
    pair.message(1, 8)
}

fn bad_address_vectors_are_refused() -> Verdict {
    let context = env::open()?;
    let pd = context.alloc_pd()?;
    let table = context.query_port(env::port())?.gid_table_len;
    let good = loopback(&context)?;
    supported(pd.create_ah(&good), Capability::Ah)?;
    let by_index = |sgid_index| good.global.map(|global| GlobalRoute { sgid_index, ..global });
    let mut bad = vec![
        AddressVector { port: 77, ..good },
        AddressVector { port: 0, ..good },
        AddressVector { global: by_index(table.min(255)), ..good },
    ];
    if is_ethernet() {
        // Ethernet has no LIDs.
        bad.push(AddressVector::local(env::port(), 1));
    } else {
        pd.create_ah(&AddressVector::local(env::port(), good.dlid))?;
        bad.push(AddressVector { dlid: 0, ..good });
        bad.push(AddressVector::local(env::port(), 0));
    }
    for bad in bad {
        let error = pd.create_ah(&bad).unwrap_err();
        assert!(matches!(error.errno(), Errno::INVAL | Errno::NODATA), "{error:?} for {bad:?}");
        assert!(error.message().contains("port"), "{error}");
    }
    if is_ethernet() {
        // No host has this address (a documentation prefix), and no route leads there. On InfiniBand the kernel asks
        // for no neighbour.
        let nobody = Gid::from("2001:db8::1".parse::<Ipv6Addr>().expect("an address"));
        let global = good.global.map(|global| GlobalRoute { dgid: nobody, ..global });
        assert!(pd.create_ah(&AddressVector { global, ..good }).is_err());
    }
    Ok(())
}

fn address_handles_come_and_go() -> Verdict {
    crate::leaks::rounds(&[ObjectKind::AH, ObjectKind::PD], |context| {
        let pd = context.alloc_pd()?;
        let vector = loopback(context)?;
        Ok(Box::new(move || {
            supported(pd.create_ah(&vector), Capability::Ah)?.destroy()?;
            drop(supported(pd.create_ah(&vector), Capability::Ah)?);
            Ok(())
        }))
    })
}

/// The number of address handles that rxe numbers before the numbers repeat.
const RXE_HANDLES: u64 = 32767;

/// A path to another device than that of `side`, if there is one.
fn elsewhere(side: &Side) -> Verdict<AddressVector> {
    let own = loopback(&side.context)?;
    let Ok(device) = env::second() else { return Ok(own) };
    let other = loopback(&Context::open(&device)?)?;
    let dgid = other.global.map(|global| global.dgid).unwrap_or_default();
    let global = own.global.map(|global| GlobalRoute { dgid, ..global });
    Ok(AddressVector { dlid: other.dlid, global, ..own })
}

/// While the queue is drained, the datagram waits in it, and the kernel must not destroy its handle. A soak goes on
/// until every number of an address handle has been used again.
fn dropped_address_handle_stays_while_its_datagram_waits() -> Verdict {
    let mut pair = Pair::new(Config::ud())?;
    let drains = env::drainable().is_ok();
    pair.b.poison(0..GRH + 100);
    pair.b.recv(1, 0..GRH + 100)?;
    pair.a.fill(0..100, 7);
    if drains {
        pair.a.qp.modify(&QpAttr::new().state(QpState::SQD))?;
        while pair.a.qp.query()?.sq_draining {}
    }
    let ah = supported(pair.a.pd.create_ah(&pair.b.address().vector(&pair.a)), Capability::Ah)?;
    let sges = [pair.a.sge(0..100)];
    let to = Destination::new(&ah, pair.b.qp.qpn(), QKEY);
    pair.a.send(SendWr::send(&sges).to(to).id(2).signaled())?;
    drop(ah);
    let vector = elsewhere(&pair.a)?;
    for _ in 1..env::rounds(10, RXE_HANDLES) {
        drop(supported(pair.a.pd.create_ah(&vector), Capability::Ah)?);
    }
    let others = (0..2).map(|_| pair.a.pd.create_ah(&vector)).collect::<Result<Vec<_>, _>>()?;
    if drains {
        assert_eq!(pair.a.context.handles(ObjectKind::AH)?.len(), others.len() + 1);
        return Ok(());
    }
    pair.a.expect(2, WcOpcode::SEND)?;
    pair.b.expect(1, WcOpcode::RECV)?;
    pair.b.check(GRH..GRH + 100, 7);
    drop(others);
    assert_eq!(pair.a.context.handles(ObjectKind::AH)?.len(), 0);
    assert_eq!(pair.a.context.leaked(), 0);
    Ok(())
}

fn address_handles_are_dropped_while_datagrams_are_sent() -> Verdict {
    let mut pair = Pair::new(Config::ud())?;
    let vector = pair.b.address().vector(&pair.a);
    for seed in 0..env::rounds(50, 2000) {
        pair.b.poison(0..GRH + 100);
        pair.b.recv(seed, 0..GRH + 100)?;
        pair.a.fill(0..100, seed);
        let ah = supported(pair.a.pd.create_ah(&vector), Capability::Ah)?;
        let sges = [pair.a.sge(0..100)];
        let to = Destination::new(&ah, pair.b.qp.qpn(), QKEY);
        pair.a.send(SendWr::send(&sges).to(to).id(seed).signaled())?;
        drop(ah);
        pair.a.expect(seed, WcOpcode::SEND)?;
        pair.b.expect(seed, WcOpcode::RECV)?;
        pair.b.check(GRH..GRH + 100, seed);
    }
    drop(supported(pair.a.pd.create_ah(&vector), Capability::Ah)?);
    assert_eq!(pair.a.context.handles(ObjectKind::AH)?.len(), 0);
    Ok(())
}

/// A group of this test run's own.
struct Group {
    gid: Gid,
    /// The group's LID; 0 on Ethernet.
    lid: u16,
    /// The IP membership, without which the network stack drops the group's packets: verbs reach only the device.
    _socket: Option<UdpSocket>,
}

impl Group {
    fn of(side: &Side) -> Verdict<Group> {
        let [.., high, low] = std::process::id().to_be_bytes();
        // The fabric's switch sends a group's messages to all.
        if !is_ethernet() || env::on_fabric() {
            let gid = Ipv6Addr::new(0xff12, 0, 0, 0, 0, 0, u16::from_be_bytes([high, low]), 7);
            let lid = 0xc000 | u16::from_be_bytes([high & 0xf, low]);
            return Ok(Group { gid: gid.into(), lid, _socket: None });
        }
        let (gid, socket) = match side.gid.gid.ip() {
            IpAddr::V4(own) => {
                let group = Ipv4Addr::new(239, 1, high, 7);
                let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
                socket.join_multicast_v4(&group, &own)?;
                (Gid::from(group), socket)
            }
            IpAddr::V6(_) => {
                let group = "ff1e::7".parse::<Ipv6Addr>()?;
                let socket = UdpSocket::bind((Ipv6Addr::UNSPECIFIED, 0))?;
                socket.join_multicast_v6(&group, side.gid.ifindex)?;
                (Gid::from(group), socket)
            }
        };
        Ok(Group { gid, lid: 0, _socket: Some(socket) })
    }

    fn attach(&self, side: &Side) -> Verdict<McastMembership> {
        supported(side.qp.attach_mcast(self.gid, self.lid), Capability::Multicast)
    }

    /// Sends one datagram of 100 bytes to the group.
    fn send_from(&self, side: &mut Side, seed: u64) -> Verdict {
        side.fill(0..100, seed);
        let sges = [side.sge(0..100)];
        let global = AddressVector::global(env::port(), side.gid.index, self.gid);
        let ah = side.pd.create_ah(&AddressVector { dlid: self.lid, ..global });
        let ah = supported(ah, Capability::Ah)?;
        let to = Destination::new(&ah, Qpn(0xff_ffff), QKEY);
        side.send(SendWr::send(&sges).to(to).id(seed).signaled())?;
        side.expect(seed, WcOpcode::SEND)?;
        Ok(())
    }
}

/// Skips tests whose datagrams would be dropped: on InfiniBand a subnet manager has to make a group, and only the lab's
/// switch delivers to other groups.
fn delivers_to_groups() -> Verdict {
    let delivers = is_ethernet() || std::env::var("UVERBS_LAB").is_ok();
    require(delivers, Capability::Multicast, "the subnet manager did not make the group")
}

fn multicast_reaches_every_member() -> Verdict {
    delivers_to_groups()?;
    let Pair { mut a, b, .. } = Pair::new(Config::ud())?;
    let Pair { a: c, b: d, .. } = Pair::new(Config::ud())?;
    let group = Group::of(&b)?;
    let mut members = [b, c];
    let memberships = members.iter().map(|side| group.attach(side)).collect::<Verdict<Vec<_>>>()?;
    assert_eq!((memberships[0].gid(), memberships[0].lid()), (group.gid, group.lid));
    let mut stranger = d;
    for seed in 0..5 {
        for side in members.iter_mut().chain([&mut stranger]) {
            side.poison(0..GRH + 100);
            side.recv(seed, 0..GRH + 100)?;
        }
        group.send_from(&mut a, seed)?;
        for side in &mut members {
            let received = side.expect(seed, WcOpcode::RECV)?;
            assert_eq!((received.src_qpn, received.byte_len), (a.qp.qpn(), GRH as u32 + 100));
            assert!(received.grh, "{received:?}");
            side.check(GRH..GRH + 100, seed);
        }
    }
    stranger.expect_silence()
}

fn multicast_ends_with_the_membership() -> Verdict {
    delivers_to_groups()?;
    let Pair { mut a, mut b, .. } = Pair::new(Config::ud())?;
    let group = Group::of(&b)?;
    for round in 0..3 {
        let membership = group.attach(&b)?;
        let twice = b.qp.attach_mcast(group.gid, group.lid).unwrap_err();
        assert_eq!(twice.errno(), Errno::EXIST);
        b.recv(round, 0..GRH + 100)?;
        group.send_from(&mut a, round)?;
        b.expect(round, WcOpcode::RECV)?;
        membership.detach()?;
        group.send_from(&mut a, 77)?;
        b.recv(round, 0..GRH + 100)?;
        b.expect_silence()?;
        b.reset()?;
        b.connect(&Config::ud(), &a.address())?;
    }
    Ok(())
}

fn multicast_membership_holds_the_queue_pair() -> Verdict {
    let Pair { b, .. } = Pair::new(Config::ud())?;
    let membership = Group::of(&b)?.attach(&b)?;
    let context = b.context.clone();
    let (qp, error) = b.qp.destroy().unwrap_err().into_parts();
    assert_eq!(error.errno(), Errno::BUSY);
    drop(qp);
    // The membership keeps the kernel's queue pair until the membership ends.
    assert_eq!(context.handles(ObjectKind::QP)?.len(), 1);
    drop(membership);
    assert_eq!(context.handles(ObjectKind::QP)?.len(), 0);
    assert_eq!(context.leaked(), 0);
    Ok(())
}

fn multicast_needs_a_multicast_gid() -> Verdict {
    let pair = Pair::new(Config::ud())?;
    let group = Group::of(&pair.b)?;
    let error = pair.b.qp.attach_mcast(pair.b.gid.gid, group.lid).unwrap_err();
    assert_eq!(error.errno(), Errno::INVAL);
    if !is_ethernet() {
        for lid in [0, 0xbfff, 0xffff] {
            let error = pair.b.qp.attach_mcast(group.gid, lid).unwrap_err();
            assert_eq!(error.errno(), Errno::INVAL);
            assert!(error.message().contains("0xc000 to 0xfffe"), "{error}");
        }
    }
    let pair = Pair::new(Config::rc())?;
    let error = pair.b.qp.attach_mcast(group.gid, group.lid).unwrap_err();
    assert_eq!(error.errno(), Errno::INVAL);
    assert!(error.message().contains("RC"), "{error}");
    Ok(())
}
