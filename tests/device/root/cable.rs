//! Connections by address between two interfaces of this test's own: VLANs over the cable of the devices under
//! test, and a cable whose link goes down in the middle of a handshake.

use super::{Interface, Link, PORT, ip, links, other_end};
use crate::capability::Capability;
use crate::cm::datagrams::datagram_arrives;
use crate::cm::{Pair, Service, Side, accepted, ask_by, channel, refused, route_from, send};
use crate::env;
use crate::pair::{PATIENCE, SILENCE};
use crate::testbed::link_of;
use crate::verdict::{Stop, Verdict, trials};
use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::process::Command;
use std::time::{Duration, Instant};
use uverbs::cm::{ConnectParam, ConnectionEvent, EventChannel, Progress, RouteResolved};
use uverbs::{Context, Device, Errno, GidEntry, GidFilter, GidType, PortState};

trials![
    addresses_in_a_vlan_connect,
    datagrams_arrive_in_a_vlan,
    peer_that_moves_to_another_mac_address_ends_the_connection,
    handshake_on_a_dead_link_is_given_up,
    handshake_connects_on_a_new_link_after_a_dead_one,
];

pub(super) const NEAR: &str = "10.77.7.1";
pub(super) const FAR: &str = "10.77.7.2";

pub(super) fn at(address: &str) -> Verdict<SocketAddr> {
    Ok(SocketAddr::new(address.parse()?, 0))
}

/// An interface that sends over the cable, although the address of the other end belongs to this machine, too.
pub(super) struct End {
    interface: String,
    /// Its address on Ethernet.
    hardware: String,
    address: &'static str,
    /// The routing table for packets from the address.
    table: u32,
}

impl End {
    /// Two interfaces, with their addresses and routes.
    pub(super) fn both(near: &str, far: &str) -> Verdict<[End; 2]> {
        let end = |interface: &str, address, table| -> Verdict<End> {
            ip(&format!("addr add {address}/24 dev {interface}"))?;
            // The rule must not match arriving packets, which are for this machine.
            ip(&format!("rule add from {address} iif lo priority 20 table {table}"))?;
            let hardware = fs::read_to_string(format!("/sys/class/net/{interface}/address"))?;
            let hardware = hardware.trim().to_owned();
            Ok(End { interface: interface.to_owned(), hardware, address, table })
        };
        let ends = [end(near, NEAR, 201)?, end(far, FAR, 202)?];
        let [near, far] = &ends;
        near.up(far)?;
        far.up(near)?;
        Ok(ends)
    }

    /// Sets the other end's hardware address in the kernel's neighbour table.
    fn finds(&self, other: &End, hardware: &str) -> Verdict {
        let neighbour = ["-i", &self.interface, "-s", other.address, hardware];
        let output = Command::new("arp").args(neighbour).output()?;
        let why = String::from_utf8_lossy(&output.stderr);
        if output.status.success() { Ok(()) } else { Err(Stop::fail(format!("arp: {why}"))) }
    }

    /// Sets the interface up, with its routes and neighbours.
    fn up(&self, other: &End) -> Verdict {
        let End { interface, address, table, .. } = self;
        ip(&format!("link set {interface} up"))?;
        ip(&format!("route add {} dev {interface} src {address} table {table}", other.address))?;
        self.finds(other, &other.hardware)
    }

    fn down(&self) -> Verdict {
        ip(&format!("link set {} down", self.interface))
    }
}

impl Drop for End {
    fn drop(&mut self) {
        let _ = ip(&format!("rule del from {} table {}", self.address, self.table));
    }
}

/// Waits until `look` finds something.
pub(super) fn until<T>(what: &str, mut look: impl FnMut() -> Verdict<Option<T>>) -> Verdict<T> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = look()? {
            return Ok(found);
        }
        if Instant::now() > deadline {
            return Err(Stop::fail(format!("not in time: {what}")));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A VLAN over the cable of the devices under test.
struct Vlan {
    /// The entries of the addresses in both devices' tables of GIDs.
    gids: [GidEntry; 2],
    devices: [Device; 2],
    ends: [End; 2],
    _interfaces: [Interface; 2],
}

impl Vlan {
    fn new() -> Verdict<Vlan> {
        const NAMES: [&str; 2] = ["uvt7", "uvt8"];
        env::lab()?;
        let devices = [env::device(), env::second()?];
        let over = |device: &Device, name: &'static str| -> Verdict<Interface> {
            let port = link_of(&Context::open(device)?)?.port;
            let under = device.netdev(port)?;
            let Some(under) = under else {
                return Err(Stop::Skip(Capability::Cm, format!("{device} has no interface")));
            };
            ip(&format!("link add link {under} name {name} type vlan id 77"))?;
            Ok(Interface(name))
        };
        let interfaces = [over(&devices[0], NAMES[0])?, over(&devices[1], NAMES[1])?];
        let ends = End::both(NAMES[0], NAMES[1])?;
        let gid = |at: usize| -> Verdict<GidEntry> {
            let context = Context::open(&devices[at])?;
            let index = fs::read_to_string(format!("/sys/class/net/{}/ifindex", NAMES[at]))?;
            let (index, address) =
                (index.trim().parse::<u32>()?, ends[at].address.parse::<IpAddr>()?);
            let is_it = |entry: &GidEntry| {
                let of_interface = (entry.ifindex, entry.gid.ip()) == (index, address);
                of_interface && entry.gid_type == GidType::ROCE_V2
            };
            let entry = until("the address is in the table of GIDs", || {
                Ok(context.gid_table()?.into_iter().find(is_it))
            })?;
            let chosen = context.choose_gid(entry.port, &GidFilter::new().interface(index))?;
            assert_eq!(chosen.entry, entry, "{}", chosen.reason);
            Ok(entry)
        };
        let gids = [gid(0)?, gid(1)?];
        Ok(Vlan { gids, devices, ends, _interfaces: interfaces })
    }
}

/// The kernel resolves the address in the VLAN, and its attributes bring the queue pairs there.
fn addresses_in_a_vlan_connect() -> Verdict {
    let vlan = Vlan::new()?;
    let (channel, service) = (channel()?, Service::at(&vlan.devices[1], at(FAR)?)?);
    let (param, route) = (ConnectParam::new(), route_from(&channel, at(NEAR)?, service.at)?);
    let pair = accepted(ask_by(route, &param)?, service.request()?, &param)?;
    let Pair { active: (mut a, at_a), passive: (mut b, at_b) } = pair;
    assert_eq!((at_a.peer_addr()?, at_b.peer_addr()?.ip()), (service.at, at(NEAR)?.ip()));
    for (side, entry) in [(&a, &vlan.gids[0]), (&b, &vlan.gids[1])] {
        let route = side.qp.query()?.path.global;
        assert_eq!(route.map(|route| route.sgid_index), Some(entry.index));
    }
    send(&mut a, &mut b)?;
    send(&mut b, &mut a)
}

fn datagrams_arrive_in_a_vlan() -> Verdict {
    let vlan = Vlan::new()?;
    datagram_arrives(at(NEAR)?, &vlan.devices[1], at(FAR)?)
}

/// As after a failover: the connection's packets still go to the old MAC address, where no interface takes them.
fn peer_that_moves_to_another_mac_address_ends_the_connection() -> Verdict {
    const ELSEWHERE: &str = "02:00:00:00:77:77";
    env::unreachable_events()?;
    let vlan = Vlan::new()?;
    let (channel, service) = (channel()?, Service::at(&vlan.devices[1], at(FAR)?)?);
    let (param, route) = (ConnectParam::new(), route_from(&channel, at(NEAR)?, service.at)?);
    let pair = accepted(ask_by(route, &param)?, service.request()?, &param)?;
    let Pair { active: (a, at_a), passive: (_b, at_b) } = pair;
    // The kernel's list has the ids of unfinished connections, too.
    let (_asking, connecting) = ask_by(route_from(&channel, at(NEAR)?, service.at)?, &param)?;
    assert!(!at_a.is_closed());
    vlan.ends[0].finds(&vlan.ends[1], ELSEWHERE)?;
    let event = at_a.next_event(Some(PATIENCE))?;
    assert_eq!(event, Some(ConnectionEvent::Unreachable));
    assert!(at_a.is_closed());
    assert_eq!(at_a.closed_by(), Some(ConnectionEvent::Unreachable));
    at_a.wait_disconnected(Some(SILENCE))?;
    let error = refused(connecting)?;
    assert_eq!(error.errno(), Errno::TIMEDOUT, "{error}");
    // The side that accepted has no entry in the kernel's list, and gets no event.
    vlan.ends[1].finds(&vlan.ends[0], ELSEWHERE)?;
    assert_eq!(at_b.next_event(Some(SILENCE))?, None);
    drop((at_a, a));
    Ok(())
}

/// Two software devices at the ends of a cable.
struct Cable {
    ends: [End; 2],
    /// In the order of `DEVICES`.
    links: Vec<Link>,
    _interface: Interface,
}

impl Cable {
    const DEVICES: [&str; 2] = ["uvt_near", "uvt_far"];

    fn new() -> Verdict<Cable> {
        links()?;
        ip("link add uvt7 type veth")?;
        let interface = Interface("uvt7");
        let far = other_end("uvt7")?;
        let ends = End::both("uvt7", &far)?;
        let mut cable = Cable { ends, links: Vec::new(), _interface: interface };
        cable.renew()?;
        Ok(cable)
    }

    /// Makes the devices, anew if they are there.
    fn renew(&mut self) -> Verdict {
        self.links.clear();
        for (device, end) in Self::DEVICES.into_iter().zip(&self.ends) {
            self.links.push(Link::add(device, &end.interface)?);
        }
        self.reaches(PortState::ACTIVE)
    }

    fn reaches(&self, state: PortState) -> Verdict {
        for name in Self::DEVICES {
            let context = Context::open(&Device::by_name(name)?)?;
            until("the ports' states", || {
                Ok((context.query_port(PORT)?.state == state).then_some(()))
            })?;
        }
        Ok(())
    }

    /// Takes the link from both ends.
    fn cut(&self) -> Verdict {
        self.ends[1].down()?;
        self.reaches(PortState::DOWN)
    }

    fn mend(&self) -> Verdict {
        self.ends[1].up(&self.ends[0])?;
        self.reaches(PortState::ACTIVE)
    }

    fn service(&self) -> Verdict<Service> {
        Service::at(&Device::by_name(Self::DEVICES[1])?, at(FAR)?)
    }

    fn route(&self, channel: &EventChannel, service: &Service) -> Verdict<RouteResolved> {
        route_from(channel, at(NEAR)?, service.at)
    }
}

/// The step that is under way: it must not have ended.
fn pending<P, D>(progress: Progress<P, D>) -> Verdict<P> {
    match progress {
        Progress::Pending(pending) => Ok(pending),
        Progress::Done(_) => Err(Stop::fail("it ended without a link")),
    }
}

/// One request waits for its answer when the link goes down, and another one is sent afterwards. Over a dead link there
/// is no path to the client, so that the server cannot accept, and both clients wait.
fn handshake_on_a_dead_link_is_given_up() -> Verdict {
    let cable = Cable::new()?;
    let (channel, service) = (channel()?, cable.service()?);
    let param = ConnectParam::new();
    let (heard, request) = (ask_by(cable.route(&channel, &service)?, &param)?, service.request()?);
    let unheard = cable.route(&channel, &service)?;
    cable.cut()?;
    let passive = Side::of(&request.context()?)?;
    let error = request.accept(&passive.qp, &param).unwrap_err();
    assert!(error.message().contains("no way to the peer"), "{error}");
    let unheard = ask_by(unheard, &param)?;
    let heard = (heard.0, pending(heard.1.wait(Some(SILENCE))?)?);
    let unheard = (unheard.0, pending(unheard.1.wait(Some(SILENCE))?)?);
    drop((heard, passive, unheard));
    assert_eq!(channel.leaked(), 0);
    Ok(())
}

/// If soft-RoCE cannot send a management message, it ends the device's own queue for them, and no later handshake
/// leaves the device. A device that is made again has a new queue.
fn handshake_connects_on_a_new_link_after_a_dead_one() -> Verdict {
    let mut cable = Cable::new()?;
    let (channel, service) = (channel()?, cable.service()?);
    let param = ConnectParam::new();
    let route = cable.route(&channel, &service)?;
    cable.cut()?;
    let (side, connecting) = ask_by(route, &param)?;
    let connecting = pending(connecting.wait(Some(SILENCE))?)?;
    cable.mend()?;
    drop((side, connecting, service));
    assert_eq!(channel.leaked(), 0);
    // Before 7.3 a device stays as long as a file of it is open, and the channel has one.
    drop(channel);
    cable.renew()?;
    let (channel, service) = (self::channel()?, cable.service()?);
    let asked = ask_by(cable.route(&channel, &service)?, &param)?;
    let mut pair = accepted(asked, service.request()?, &param)?;
    send(&mut pair.active.0, &mut pair.passive.0)
}
