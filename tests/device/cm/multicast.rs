//! Multicast groups joined through the connection manager.

use super::{PATIENCE, SILENCE, Side, address, channel, done, passive};
use crate::capability::Capability;
use crate::env;
use crate::verdict::{Stop, Verdict, supported, trials};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Instant;
use uverbs::cm::{
    BoundId, DATAGRAM_QKEY, EventChannel, JoiningMulticast, MulticastMember, MulticastRole,
    PortSpace,
};
use uverbs::{Destination, Device, QpState, QpType, SendWr, WcStatus};

trials![
    datagrams_of_one_member_reach_all_members,
    member_that_only_sends_receives_nothing,
    dropped_member_receives_nothing_more,
    group_is_joined_by_the_route_to_it,
    ipv6_groups_are_refused_on_roce,
];

/// Bytes of the global route header before the payload of a datagram.
const GRH: usize = 40;
const LENGTH: usize = 64;

fn group() -> IpAddr {
    // Tests of different processes have groups of their own.
    let [.., high, low] = std::process::id().to_be_bytes();
    Ipv4Addr::new(239, 7, high, low).into()
}

fn bind(channel: &EventChannel, device: &Device) -> Verdict<BoundId> {
    let id = channel.create_id(PortSpace::UDP, QpType::UD)?;
    Ok(id.bind(SocketAddr::new(address(device)?, 0))?)
}

fn joined(joining: uverbs::Result<JoiningMulticast>) -> Verdict<MulticastMember> {
    // The wait attaches the queue pair, which some devices refuse.
    done(supported(joining?.wait(Some(PATIENCE)), Capability::Multicast)?)
}

/// A queue pair on a device, in the group.
fn member(
    channel: &EventChannel,
    device: &Device,
    role: MulticastRole,
) -> Verdict<(Side, MulticastMember)> {
    let id = bind(channel, device)?;
    let side = Side::with(&id.context()?, QpType::UD)?;
    let member = joined(id.join_multicast(&side.qp, group(), role))?;
    assert_eq!((member.gid().ip(), member.qkey()), (group(), DATAGRAM_QKEY));
    assert_eq!((member.qpn().0, side.qp.query()?.state), (0xff_ffff, QpState::RTS));
    Ok((side, member))
}

fn send(from: &mut Side, to: &MulticastMember, text: u8) -> Verdict {
    from.memory.copy_from(0, &[text; LENGTH])?;
    let ah = supported(from.pd.create_ah(to.address()), Capability::Ah)?;
    let sges = [from.memory.sge(0..LENGTH)?];
    from.post(SendWr::send(&sges).to(Destination::new(&ah, to.qpn(), to.qkey())))?;
    assert_eq!(from.complete()?, WcStatus::SUCCESS);
    Ok(())
}

fn heard(side: &mut Side, text: u8) -> Verdict {
    assert_eq!(side.complete()?, WcStatus::SUCCESS);
    let mut found = [0; LENGTH];
    side.memory.copy_to(GRH, &mut found)?;
    assert_eq!(found, [text; LENGTH]);
    Ok(())
}

fn is_silent(side: &mut Side) -> Verdict {
    let deadline = Instant::now() + SILENCE;
    while Instant::now() < deadline {
        if side.cq.poll()?.next().is_some() {
            return Err(Stop::fail("a datagram came"));
        }
        std::thread::yield_now();
    }
    Ok(())
}

fn datagrams_of_one_member_reach_all_members() -> Verdict {
    let channel = channel()?;
    let (mut a, to) = member(&channel, &env::device(), MulticastRole::Full)?;
    let (mut b, from_b) = member(&channel, &passive()?, MulticastRole::Full)?;
    assert!(to.receives() && from_b.receives());
    b.receive_at(0, GRH + LENGTH)?;
    send(&mut a, &to, 0x5a)?;
    heard(&mut b, 0x5a)
}

fn member_that_only_sends_receives_nothing() -> Verdict {
    let channel = channel()?;
    let (mut a, to) = member(&channel, &env::device(), MulticastRole::SendOnly)?;
    let (mut b, from_b) = member(&channel, &passive()?, MulticastRole::Full)?;
    assert!(!to.receives());
    // Sends and receives complete on one queue, so that a received datagram would be seen here.
    a.receive_at(GRH + LENGTH, GRH + LENGTH)?;
    b.receive_at(0, GRH + LENGTH)?;
    send(&mut a, &to, 0x11)?;
    heard(&mut b, 0x11)?;
    send(&mut b, &from_b, 0x22)?;
    is_silent(&mut a)
}

fn dropped_member_receives_nothing_more() -> Verdict {
    let channel = channel()?;
    let (mut a, to) = member(&channel, &env::device(), MulticastRole::SendOnly)?;
    let (mut b, from_b) = member(&channel, &passive()?, MulticastRole::Full)?;
    b.receive_at(0, GRH + LENGTH)?;
    drop(from_b);
    send(&mut a, &to, 0x33)?;
    is_silent(&mut b)?;
    let id = bind(&channel, &passive()?)?;
    let _again = joined(id.join_multicast(&b.qp, group(), MulticastRole::Full))?;
    send(&mut a, &to, 0x44)?;
    heard(&mut b, 0x44)
}

fn group_is_joined_by_the_route_to_it() -> Verdict {
    let channel = channel()?;
    let from = SocketAddr::new(address(&env::device())?, 0);
    let id = channel.create_id(PortSpace::UDP, QpType::UD)?;
    let resolving = id.resolve_addr(Some(from), SocketAddr::new(group(), 0), PATIENCE)?;
    let id = done(resolving.wait(Some(PATIENCE))?)?;
    let side = Side::with(&id.context()?, QpType::UD)?;
    let one = joined(id.join_multicast(&side.qp, group(), MulticastRole::Full))?;
    // One id may be in several groups, and leaves each separately.
    let other: IpAddr = Ipv4Addr::new(239, 8, 8, 8).into();
    let two = joined(id.join_multicast(&side.qp, other, MulticastRole::Full))?;
    drop(one);
    assert_eq!(two.gid().ip(), other);
    drop((id, two));
    side.qp.destroy()?;
    assert_eq!(channel.leaked(), 0);
    Ok(())
}

fn ipv6_groups_are_refused_on_roce() -> Verdict {
    let channel = channel()?;
    let id = bind(&channel, &env::device())?;
    let side = Side::with(&id.context()?, QpType::UD)?;
    let group = "ff0e::4711".parse().expect("an address");
    let error = id.join_multicast(&side.qp, group, MulticastRole::Full).unwrap_err();
    assert!(error.message().contains("IPv4 groups only"), "{error}");
    Ok(())
}
