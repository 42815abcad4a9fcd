//! Datagrams by address: the port space UDP.

use super::{PATIENCE, Service, Side, address, channel, done, passive, route_of};
use crate::capability::Capability;
use crate::env;
use crate::verdict::{Stop, Verdict, supported, trials};
use std::net::SocketAddr;
use uverbs::cm::{
    ConnectParam, ConnectRequest, ConnectingDatagrams, DATAGRAM_QKEY, DATAGRAM_REPLY_PRIVATE_DATA,
    DATAGRAM_REQUEST_PRIVATE_DATA, DatagramPeer, EventChannel, PortSpace, RouteResolved,
};
use uverbs::{Destination, Device, Errno, QpAttr, QpState, QpType, SendWr, WcStatus};

trials![
    client_learns_where_to_send,
    queue_pairs_of_the_program_stay_as_they_are,
    queue_pair_goes_on_from_init_and_not_from_err,
    one_queue_pair_has_many_peers,
    private_data_of_datagrams_arrives_up_to_its_limit,
    rejected_and_unheard_requests_are_refused,
    other_queue_pairs_and_port_spaces_are_refused,
];

/// Bytes of the global route header before the payload of a datagram.
const GRH: usize = 40;
const LENGTH: usize = 64;

/// A listener of the port space UDP on the passive device.
pub(super) fn listen() -> Verdict<Service> {
    let device = passive()?;
    listen_at(&device, SocketAddr::new(address(&device)?, 0))
}

fn listen_at(device: &Device, address: SocketAddr) -> Verdict<Service> {
    let channel = channel()?;
    Service::by(channel.create_id(PortSpace::UDP, QpType::UD)?, channel, device, address, 4)
}

pub(super) fn route(channel: &EventChannel, to: SocketAddr) -> Verdict<RouteResolved> {
    let from = SocketAddr::new(address(&env::device())?, 0);
    route_of(channel.create_id(PortSpace::UDP, QpType::UD)?, from, to)
}

fn side(context: &uverbs::Context) -> Verdict<Side> {
    Ok(Side::with(context, QpType::UD)?)
}

fn ask(
    channel: &EventChannel,
    to: SocketAddr,
    param: &ConnectParam,
) -> Verdict<(Side, ConnectingDatagrams)> {
    let route = route(channel, to)?;
    let side = side(&route.context()?)?;
    let connecting = route.connect_datagrams(&side.qp, param)?;
    Ok((side, connecting))
}

fn answered(connecting: ConnectingDatagrams) -> Verdict<DatagramPeer> {
    done(connecting.wait(Some(PATIENCE))?)
}

fn request(service: &Service) -> Verdict<ConnectRequest> {
    let request = service.request()?;
    assert_eq!(request.port_space(), PortSpace::UDP);
    Ok(request)
}

/// Sends one datagram to the peer.
fn send(from: &mut Side, to: &mut Side, peer: &DatagramPeer) -> Verdict {
    assert_eq!(peer.qpn(), to.qp.qpn());
    let text: Vec<u8> = (0..LENGTH as u8).collect();
    from.memory.copy_from(0, &text)?;
    to.memory.copy_from(GRH, &[0; LENGTH])?;
    to.receive_at(0, GRH + LENGTH)?;
    let ah = supported(from.pd.create_ah(peer.address()), Capability::Ah)?;
    let sges = [from.memory.sge(0..LENGTH)?];
    from.post(SendWr::send(&sges).to(Destination::new(&ah, peer.qpn(), peer.qkey())))?;
    assert_eq!((from.complete()?, to.complete()?), (WcStatus::SUCCESS, WcStatus::SUCCESS));
    let mut found = [0; LENGTH];
    to.memory.copy_to(GRH, &mut found)?;
    assert_eq!(found[..], text[..]);
    Ok(())
}

fn client_learns_where_to_send() -> Verdict {
    let (device, from) = (passive()?, SocketAddr::new(address(&env::device())?, 0));
    let at = SocketAddr::new(address(&device)?, 0);
    datagram_arrives(from, &device, at)
}

/// Sends one datagram to an address of a device.
pub(crate) fn datagram_arrives(from: SocketAddr, device: &Device, at: SocketAddr) -> Verdict {
    let (channel, service) = (channel()?, listen_at(device, at)?);
    let route = route_of(channel.create_id(PortSpace::UDP, QpType::UD)?, from, service.at)?;
    let mut a = side(&route.context()?)?;
    let connecting = route.connect_datagrams(&a.qp, &ConnectParam::new())?;
    let request = request(&service)?;
    assert_eq!(request.peer_addr()?.ip(), from.ip());
    let mut b = side(&request.context()?)?;
    request.accept_datagrams(&b.qp, &ConnectParam::new())?;
    let peer = answered(connecting)?;
    assert_eq!(peer.qkey(), DATAGRAM_QKEY);
    assert_eq!((a.qp.query()?.state, b.qp.query()?.state), (QpState::RTS, QpState::RTS));
    send(&mut a, &mut b, &peer)
}

/// A queue pair that the program brought to `RTS` itself.
fn own(context: &uverbs::Context) -> Verdict<Side> {
    let side = side(context)?;
    let init = QpAttr::new()
        .state(QpState::INIT)
        .port(env::port())
        .pkey_index(env::pkey_index())
        .qkey(DATAGRAM_QKEY);
    let rts = QpAttr::new().state(QpState::RTS).sq_psn(uverbs::Psn(7));
    for attr in [init, QpAttr::new().state(QpState::RTR), rts] {
        side.qp.modify(&attr)?;
    }
    Ok(side)
}

fn queue_pairs_of_the_program_stay_as_they_are() -> Verdict {
    let (channel, service) = (channel()?, listen()?);
    let route = route(&channel, service.at)?;
    let mut a = own(&route.context()?)?;
    let connecting = route.connect_datagrams(&a.qp, &ConnectParam::new())?;
    let request = request(&service)?;
    let mut b = own(&request.context()?)?;
    request.accept_datagrams(&b.qp, &ConnectParam::new())?;
    let peer = answered(connecting)?;
    assert_eq!((a.qp.query()?.sq_psn, b.qp.query()?.sq_psn), (uverbs::Psn(7), uverbs::Psn(7)));
    send(&mut a, &mut b, &peer)
}

/// The program may bring its queue pair to `INIT` itself, to post receives.
fn queue_pair_goes_on_from_init_and_not_from_err() -> Verdict {
    let (channel, service) = (channel()?, listen()?);
    let (_client, _connecting) = ask(&channel, service.at, &ConnectParam::new())?;
    let first = request(&service)?;
    let server = side(&first.context()?)?;
    first.init_qp(&server.qp)?;
    assert_eq!(server.qp.state(), QpState::INIT);
    first.accept_datagrams(&server.qp, &ConnectParam::new())?;
    assert_eq!(server.qp.state(), QpState::RTS);
    server.qp.modify(&QpAttr::new().state(QpState::ERR))?;
    let (_other, _waiting) = ask(&channel, service.at, &ConnectParam::new())?;
    let second = request(&service)?;
    let error = second.accept_datagrams(&server.qp, &ConnectParam::new()).unwrap_err();
    assert!(error.message().contains("in state ERR"), "{error}");
    Ok(())
}

fn one_queue_pair_has_many_peers() -> Verdict {
    let (channel, service) = (channel()?, listen()?);
    let mut server = side(&service.context)?;
    for _ in 0..3 {
        let (mut a, connecting) = ask(&channel, service.at, &ConnectParam::new())?;
        request(&service)?.accept_datagrams(&server.qp, &ConnectParam::new())?;
        let peer = answered(connecting)?;
        send(&mut a, &mut server, &peer)?;
    }
    Ok(())
}

fn private_data_of_datagrams_arrives_up_to_its_limit() -> Verdict {
    let (channel, service) = (channel()?, listen()?);
    let server = side(&service.context)?;
    let limits = (DATAGRAM_REQUEST_PRIVATE_DATA, DATAGRAM_REPLY_PRIVATE_DATA);
    for (asked, told) in [(0, 0), (1, 2), limits] {
        let (asked, told) = (vec![0xa5; asked], vec![0x5a; told]);
        let param = ConnectParam::new().private_data(&asked);
        let (_a, connecting) = ask(&channel, service.at, &param)?;
        let request = request(&service)?;
        let heard = request.private_data();
        assert!(heard.starts_with(&asked) && heard[asked.len()..].iter().all(|byte| *byte == 0));
        request.accept_datagrams(&server.qp, &ConnectParam::new().private_data(&told))?;
        let peer = answered(connecting)?;
        let heard = peer.private_data();
        assert!(heard.starts_with(&told) && heard[told.len()..].iter().all(|byte| *byte == 0));
    }
    let much = ConnectParam::new().private_data(&[1; DATAGRAM_REQUEST_PRIVATE_DATA + 1]);
    let route = route(&channel, service.at)?;
    let client = side(&route.context()?)?;
    let error = route.connect_datagrams(&client.qp, &much).unwrap_err();
    assert!(error.message().contains("at most 180"), "{error}");
    let (_a, connecting) = ask(&channel, service.at, &ConnectParam::new())?;
    let much = ConnectParam::new().private_data(&[1; DATAGRAM_REPLY_PRIVATE_DATA + 1]);
    let error = request(&service)?.accept_datagrams(&server.qp, &much).unwrap_err();
    assert!(error.message().contains("at most 136"), "{error}");
    assert_eq!(connecting.wait(Some(PATIENCE)).unwrap_err().errno(), Errno::CONNREFUSED);
    Ok(())
}

fn rejected_and_unheard_requests_are_refused() -> Verdict {
    let (channel, service) = (channel()?, listen()?);
    let refused = |connecting: ConnectingDatagrams| match connecting.wait(Some(PATIENCE)) {
        Err(error) => Ok(error),
        Ok(progress) => Err(Stop::fail(format!("not refused: {progress:?}"))),
    };
    for reject in [false, true] {
        let (a, connecting) = ask(&channel, service.at, &ConnectParam::new())?;
        let request = request(&service)?;
        match reject {
            true => request.reject(&[7; DATAGRAM_REPLY_PRIVATE_DATA])?,
            false => drop(request),
        }
        let error = refused(connecting)?;
        assert_eq!((error.errno(), a.qp.state()), (Errno::CONNREFUSED, QpState::RESET), "{error}");
        assert!(error.to_string().contains("program refused"), "{error}");
    }
    let at = service.at;
    drop(service);
    let (_a, connecting) = ask(&channel, at, &ConnectParam::new())?;
    let error = refused(connecting)?;
    assert_eq!(error.errno(), Errno::CONNREFUSED, "{error}");
    assert!(error.to_string().contains("nobody listens"), "{error}");
    Ok(())
}

fn other_queue_pairs_and_port_spaces_are_refused() -> Verdict {
    let (channel, service) = (channel()?, listen()?);
    let resolved = route(&channel, service.at)?;
    let reliable = Side::of(&resolved.context()?)?;
    let error = resolved.connect_datagrams(&reliable.qp, &ConnectParam::new()).unwrap_err();
    assert!(error.message().contains("type UD"), "{error}");
    let resolved = route(&channel, service.at)?;
    let error = resolved.connect(&reliable.qp, &ConnectParam::new()).unwrap_err();
    assert!(error.message().contains("connect_datagrams"), "{error}");
    let (_a, connecting) = ask(&channel, service.at, &ConnectParam::new())?;
    let error = request(&service)?.accept(&reliable.qp, &ConnectParam::new()).unwrap_err();
    assert!(error.message().contains("connect_datagrams"), "{error}");
    assert_eq!(connecting.wait(Some(PATIENCE)).unwrap_err().errno(), Errno::CONNREFUSED);
    // A request in the port space TCP, and a queue pair of datagrams.
    let service = Service::start(4)?;
    let (_side, connecting) = super::ask(&channel, service.at, &ConnectParam::new())?;
    let request = service.request()?;
    let datagrams = side(&request.context()?)?;
    let error = request.accept(&datagrams.qp, &ConnectParam::new()).unwrap_err();
    assert!(error.message().contains("port space UDP"), "{error}");
    assert_eq!(super::refused(connecting)?.errno(), Errno::CONNREFUSED);
    Ok(())
}
