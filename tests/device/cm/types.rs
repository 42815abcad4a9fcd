//! Queue pairs of other types than RC: unreliable connections and XRC, in the port space IB.

use super::{
    PATIENCE, Pair, Service, Side, accepted, address, channel, established, is_disconnected,
    passive, route, route_of, send,
};
use crate::env;
use crate::verdict::{Stop, Verdict, trials};
use crate::xrc::{self, Receiver, Sender};
use std::net::SocketAddr;
use std::time::Instant;
use uverbs::cm::{ConnectParam, EventChannel, PortSpace, RejectReason, RouteResolved};
use uverbs::{QpState, QpType, SendWr, SrqNumber, WcStatus};

trials![
    unreliable_connections_carry_messages_and_writes,
    initiator_reaches_the_queues_of_a_target,
    reliable_connections_have_a_place_in_the_port_space_ib,
    types_and_port_spaces_of_both_sides_are_the_same,
];

/// A listener in the port space IB.
pub(super) fn listen(qp_type: QpType) -> Verdict<Service> {
    let (channel, device) = (channel()?, passive()?);
    let id = channel.create_id(PortSpace::IB, qp_type)?;
    Service::by(id, channel, &device, (address(&device)?, 0).into(), 4)
}

pub(super) fn route_for(
    channel: &EventChannel,
    qp_type: QpType,
    to: SocketAddr,
) -> Verdict<RouteResolved> {
    let from = SocketAddr::new(address(&env::device())?, 0);
    route_of(channel.create_id(PortSpace::IB, qp_type)?, from, to)
}

fn unreliable_connections_carry_messages_and_writes() -> Verdict {
    let (channel, service) = (channel()?, listen(QpType::UC)?);
    // Parameters that only reliable connections have are left out.
    let param = ConnectParam::new().min_rnr_timer(9).initiator_depth(1);
    let route = route_for(&channel, QpType::UC, service.at)?;
    let a = Side::with(&route.context()?, QpType::UC)?;
    let connecting = route.connect(&a.qp, &param)?;
    let request = service.request()?;
    assert_eq!(request.qp_type(), QpType::UC);
    let b = Side::with(&request.context()?, QpType::UC)?;
    let accepting = request.accept(&b.qp, &param)?;
    let (at_a, at_b) = established(connecting, accepting)?;
    let mut pair = Pair { active: (a, at_a), passive: (b, at_b) };
    let (a, b) = (&mut pair.active.0, &mut pair.passive.0);
    assert_eq!((a.qp.query()?.state, b.qp.query()?.state), (QpState::RTS, QpState::RTS));
    send(a, b)?;
    send(b, a)?;
    // The kernel's attributes grant the peer's writes.
    a.memory.write_at(7, 99)?;
    let sges = [a.memory.sge(56..64)?];
    a.post(SendWr::write(b.memory.remote(40)?, &sges))?;
    assert_eq!(a.complete()?, WcStatus::SUCCESS);
    let deadline = Instant::now() + PATIENCE;
    while b.memory.read_at(5) != Some(99) {
        if Instant::now() > deadline {
            return Err(Stop::fail("the write did not arrive"));
        }
        std::thread::yield_now();
    }
    pair.active.1.disconnect()?;
    is_disconnected(&pair.passive.1)?;
    pair.passive.1.disconnect()?;
    is_disconnected(&pair.active.1)
}

fn initiator_reaches_the_queues_of_a_target() -> Verdict {
    const LENGTH: usize = 100;
    xrc::context()?;
    let (channel, service) = (channel()?, listen(QpType::XRC_TGT)?);
    let route = route_for(&channel, QpType::XRC_INI, service.at)?;
    let mut sender = Sender::new(&route.context()?)?;
    let connecting = route.connect(&sender.qp, &ConnectParam::new())?;
    let request = service.request()?;
    assert_eq!(request.qp_type(), QpType::XRC_TGT);
    let context = request.context()?;
    let mut receiver = Receiver::new(&context, context.xrcd_builder().build()?)?;
    // In the form in which librdmacm's programs send the number of their queue.
    let number = receiver.number().0.to_be_bytes();
    let param = ConnectParam::new().private_data(&number);
    let accepting = request.accept(&receiver.target, &param)?;
    let (at_sender, at_receiver) = established(connecting, accepting)?;
    assert_eq!(receiver.target.query()?.state, QpState::RTS);
    let told = at_sender.private_data().first_chunk().copied();
    let number = SrqNumber(u32::from_be_bytes(told.ok_or_else(|| Stop::fail("no number"))?));
    for seed in 1..4 {
        receiver.recv(seed, seed as usize * 4096, LENGTH)?;
        sender.message(number, seed, LENGTH)?;
        receiver.expect(seed, receiver.target.qpn(), seed, LENGTH)?;
    }
    drop(at_sender);
    assert_eq!(sender.qp.query()?.state, QpState::ERR);
    is_disconnected(&at_receiver)?;
    at_receiver.disconnect()?;
    assert_eq!(receiver.target.query()?.state, QpState::ERR);
    Ok(())
}

fn reliable_connections_have_a_place_in_the_port_space_ib() -> Verdict {
    let (channel, service) = (channel()?, listen(QpType::RC)?);
    let route = route_for(&channel, QpType::RC, service.at)?;
    let asked = super::ask_by(route, &ConnectParam::new())?;
    let mut pair = accepted(asked, service.request()?, &ConnectParam::new())?;
    send(&mut pair.active.0, &mut pair.passive.0)
}

fn types_and_port_spaces_of_both_sides_are_the_same() -> Verdict {
    let (channel, service) = (channel()?, listen(QpType::UC)?);
    // The same port in another port space, which has no listener.
    let (_side, connecting) = super::ask(&channel, service.at, &ConnectParam::new())?;
    let reason = super::refused(connecting)?.rejection().and_then(|rejection| rejection.reason());
    assert_eq!(reason, Some(RejectReason::INVALID_SERVICE_ID));
    let wrong = Side::of(&route(&channel, service.at)?.context()?)?;
    let route = route_for(&channel, QpType::UC, service.at)?;
    let error = route.connect(&wrong.qp, &ConnectParam::new()).unwrap_err();
    assert!(error.message().contains("an id for type UC"), "{error}");
    // The same port and port space, for another type: the kernel does not pass the request on.
    let route = route_for(&channel, QpType::RC, service.at)?;
    let (_side, connecting) = super::ask_by(route, &ConnectParam::new())?;
    let error = super::refused(connecting)?;
    assert!(error.rejection().is_some(), "{error}");
    Ok(())
}
