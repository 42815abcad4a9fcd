//! Connections on InfiniBand by GID, where a port has no IP address. Paths are the program's own unless a subnet
//! manager answers.

use super::{
    PATIENCE, Pair, Side, accepted, ask_by, channel, done, is_disconnected, passive, refused, send,
};
use crate::capability::Capability;
use crate::env;
use crate::pair::gid;
use crate::testbed::link_of;
use crate::verdict::{Stop, Verdict, require, trials};
use std::net::SocketAddr;
use std::time::Duration;
use uverbs::cm::{
    AddrResolved, ConnectParam, ConnectRequest, Connector, EventChannel, IB_REQUEST_PRIVATE_DATA,
    IbAddress, IbPath, IbService, Listener, ListeningId, PortSpace, QpWith, RejectReason,
    RouteResolved,
};
use uverbs::{Context, Device, Errno, Gid, LinkLayer, QpType, QueuePair};

trials![
    ports_connect_by_gid,
    connector_and_listener_connect_by_gid,
    private_data_arrives_by_gid,
    connect_to_a_service_without_a_listener_is_refused,
    route_comes_from_a_subnet_manager_or_the_program,
    gids_of_ethernet_are_no_infiniband_ports,
    services_are_asked_for_on_infiniband_alone,
];

/// The longest wait for a subnet manager: the kernel waits as long if there is none.
const MANAGER: Duration = Duration::from_millis(200);

/// A device's port.
#[derive(Clone, Copy)]
struct End {
    gid: Gid,
    lid: u16,
    pkey: u16,
    layer: LinkLayer,
}

impl End {
    fn of(device: &Device) -> Verdict<End> {
        let context = Context::open(device)?;
        let link = link_of(&context)?;
        let lid = context.query_port(link.port)?.lid;
        Ok(End { gid: gid(&context)?.gid, lid, pkey: link.pkey, layer: link.layer })
    }

    /// Its address, with a port number of the kernel's choice.
    fn any(&self) -> IbAddress {
        IbAddress { pkey: self.pkey, ..IbAddress::new(self.gid, PortSpace::IB, 0) }
    }
}

/// The two ports of a connection, and a channel for the active side.
struct Ends {
    channel: EventChannel,
    from: End,
    to: End,
}

impl Ends {
    fn new() -> Verdict<Ends> {
        let (channel, from, to) = (channel()?, End::of(&env::device())?, End::of(&passive()?)?);
        let infiniband = from.layer == LinkLayer::INFINIBAND;
        require(infiniband, Capability::InfiniBand, &format!("the port's link is {}", from.layer))?;
        Ok(Ends { channel, from, to })
    }

    fn listen(&self) -> Verdict<(ListeningId, IbAddress)> {
        let bound = self.channel.create_id(PortSpace::IB, QpType::RC)?.bind_ib(self.to.any())?;
        let at = bound.local_ib_addr()?;
        assert_eq!((at.gid, at.service_id >> 16), (self.to.gid, u64::from(PortSpace::IB.0)));
        assert_ne!(at.port(), 0);
        Ok((bound.listen(4)?, IbAddress { pkey: self.to.pkey, ..at }))
    }

    fn resolve(&self, to: IbAddress) -> Verdict<AddrResolved> {
        let id = self.channel.create_id(PortSpace::IB, QpType::RC)?;
        done(id.resolve_ib_addr(Some(self.from.any()), to, PATIENCE)?.wait(Some(PATIENCE))?)
    }

    /// The path by LIDs, which the program knows.
    fn path(&self) -> IbPath {
        IbPath {
            sgid: self.from.gid,
            dgid: self.to.gid,
            slid: self.from.lid,
            dlid: self.to.lid,
            reversible: true,
            pkey: self.from.pkey,
            mtu: env::mtu(),
            // 10 Gbit/s, and about 67 ms.
            rate: 3,
            packet_life_time: 14,
            ..IbPath::default()
        }
    }

    fn route(&self, to: IbAddress) -> Verdict<RouteResolved> {
        let route = done(self.resolve(to)?.set_ib_path(&self.path())?.wait(Some(PATIENCE))?)?;
        let (local, peer) = route.ib_addrs()?;
        assert_eq!((local.gid, peer.gid, peer.port()), (self.from.gid, self.to.gid, to.port()));
        let paths = route.ib_paths()?;
        assert_eq!((paths[0].dgid, paths[0].dlid), (self.to.gid, self.to.lid));
        Ok(route)
    }
}

fn request(listener: &ListeningId) -> Verdict<ConnectRequest> {
    let request = listener.next_request(Some(PATIENCE))?;
    request.ok_or_else(|| Stop::fail("no request came"))
}

fn ports_connect_by_gid() -> Verdict {
    let ends = Ends::new()?;
    let (listener, at) = ends.listen()?;
    let param = ConnectParam::new();
    let asked = ask_by(ends.route(at)?, &param)?;
    let request = request(&listener)?;
    assert_eq!(request.ib_addrs()?.1.gid, ends.from.gid);
    let mut pair = accepted(asked, request, &param)?;
    let Pair { active: (a, at_a), passive: (b, at_b) } = &mut pair;
    assert_eq!((at_a.peer_qpn(), at_b.peer_qpn()), (b.qp.qpn(), a.qp.qpn()));
    send(a, b)?;
    send(b, a)?;
    at_a.disconnect()?;
    is_disconnected(at_b)?;
    at_b.disconnect()?;
    is_disconnected(at_a)
}

fn connector_and_listener_connect_by_gid() -> Verdict {
    let ends = Ends::new()?;
    let listener = Listener::builder_ib(ends.to.any()).channel(&channel()?).build()?;
    let at = IbAddress { pkey: ends.to.pkey, ..listener.local_ib_addr()? };
    let connector = Connector::to_ib(at).source_ib(ends.from.any()).ib_path(ends.path());
    std::thread::scope(|scope| {
        let client = scope.spawn(|| -> Verdict {
            let (side, connection) =
                connector.channel(&ends.channel).connect(|route| qp_of_side(route.context()?))?;
            assert_eq!(connection.ib_addrs()?.1.gid, ends.to.gid);
            connection.wait_disconnected(Some(PATIENCE))?;
            drop(side);
            Ok(())
        });
        let accepted = listener.accept(Some(PATIENCE), |request| qp_of_side(request.context()?));
        let served = accepted.map(drop).map_err(Stop::from);
        client.join().map_err(|_| Stop::fail("the client panicked"))??;
        served
    })
}

/// A side for a connector, which wants the queue pair first.
fn qp_of_side(context: Context) -> uverbs::Result<QpWith<QueuePair, impl Sized>> {
    let Side { qp, cq, memory, pd } = Side::of(&context)?;
    Ok(QpWith(qp, (cq, memory, pd)))
}

fn private_data_arrives_by_gid() -> Verdict {
    let ends = Ends::new()?;
    let (listener, at) = ends.listen()?;
    let (hello, welcome) = ([0, 0, 7, 8, 9], [5, 6, 7]);
    let asked = ask_by(ends.route(at)?, &ConnectParam::new().private_data(&hello))?;
    let request = request(&listener)?;
    assert!(request.private_data().starts_with(&hello), "{:?}", request.private_data());
    let pair = accepted(asked, request, &ConnectParam::new().private_data(&welcome))?;
    assert!(pair.active.1.private_data().starts_with(&welcome));
    // The whole field of the message, and not one byte more.
    let mut most = [0xa5; IB_REQUEST_PRIVATE_DATA];
    most[..2].fill(0);
    let asked = ask_by(ends.route(at)?, &ConnectParam::new().private_data(&most))?;
    let heard = self::request(&listener)?;
    assert_eq!(heard.private_data(), most);
    drop((asked, heard));
    let route = ends.route(at)?;
    let side = Side::of(&route.context()?)?;
    let much = ConnectParam::new().private_data(&[0; IB_REQUEST_PRIVATE_DATA + 1]);
    let error = route.connect(&side.qp, &much).unwrap_err();
    assert!(error.message().contains("93 bytes of private data"), "{error}");
    assert!(error.message().contains("at most 92"), "{error}");
    // The library refuses bytes that the peer's kernel would take for its own header.
    let route = ends.route(at)?;
    let side = Side::of(&route.context()?)?;
    let error = route.connect(&side.qp, &ConnectParam::new().private_data(b"hello")).unwrap_err();
    assert!(error.message().contains("two zero bytes"), "{error}");
    Ok(())
}

fn connect_to_a_service_without_a_listener_is_refused() -> Verdict {
    let ends = Ends::new()?;
    let (listener, at) = ends.listen()?;
    drop(listener);
    let (_side, connecting) = ask_by(ends.route(at)?, &ConnectParam::new())?;
    let error = refused(connecting)?;
    let reason = error.rejection().and_then(|rejection| rejection.reason());
    assert_eq!(reason, Some(RejectReason::INVALID_SERVICE_ID), "{error}");
    Ok(())
}

fn route_comes_from_a_subnet_manager_or_the_program() -> Verdict {
    let ends = Ends::new()?;
    let (_listener, at) = ends.listen()?;
    let resolving = ends.resolve(at)?.resolve_route(MANAGER);
    let error = match resolving.and_then(|resolving| resolving.wait(Some(PATIENCE))) {
        Ok(progress) => {
            let paths = done(progress)?.ib_paths()?;
            assert_eq!(paths[0].dgid, ends.to.gid);
            return Ok(());
        }
        Err(error) => error,
    };
    assert!(matches!(error.errno(), Errno::TIMEDOUT | Errno::AGAIN), "{error}");
    assert!(error.message().contains("subnet manager"), "{error}");
    assert!(error.message().contains("set_ib_path"), "{error}");
    Ok(())
}

fn gids_of_ethernet_are_no_infiniband_ports() -> Verdict {
    let (channel, end) = (channel()?, End::of(&env::device())?);
    let nobody = Gid::from("fe80::1234".parse::<std::net::Ipv6Addr>()?);
    let address = IbAddress { gid: nobody, ..end.any() };
    if end.layer == LinkLayer::INFINIBAND {
        let error = channel.create_id(PortSpace::IB, QpType::RC)?.bind_ib(address).unwrap_err();
        assert!(error.message().contains("no InfiniBand port has the GID fe80::1234"), "{error}");
        return Ok(());
    }
    let create = || channel.create_id(PortSpace::IB, QpType::RC);
    let error = create()?.bind_ib(end.any()).unwrap_err();
    assert!(error.message().contains("no InfiniBand port has the GID"), "{error}");
    Ok(())
}

fn services_are_asked_for_on_infiniband_alone() -> Verdict {
    let (channel, end) = (channel()?, End::of(&env::device())?);
    let infiniband = end.layer == LinkLayer::INFINIBAND;
    let id = channel.create_id(PortSpace::IB, QpType::RC)?;
    let bound = match infiniband {
        true => id.bind_ib(end.any())?,
        false => id.bind(SocketAddr::new(super::address(&env::device())?, 0))?,
    };
    // If there is a subnet administrator, it knows no such service.
    let asked = bound.resolve_ib_service(IbService::Name("uverbs device tests"));
    let error = match asked.and_then(|resolving| resolving.wait(Some(PATIENCE))) {
        Ok(progress) => return Err(Stop::fail(format!("{progress:?}"))),
        Err(error) => error,
    };
    let told = error.message();
    match error.errno() {
        Errno::OPNOTSUPP if told.contains("6.18 and later") => {}
        Errno::OPNOTSUPP if !infiniband => {
            assert!(told.contains("only an InfiniBand port"), "{error}")
        }
        Errno::AGAIN | Errno::TIMEDOUT if infiniband => {
            assert!(told.contains("subnet administrator"), "{error}")
        }
        Errno::NOENT if infiniband => assert!(told.contains("knows no service"), "{error}"),
        _ => return Err(error.into()),
    }
    Ok(())
}
