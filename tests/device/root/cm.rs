//! Connections by address where root changes the machine: interfaces without an RDMA device, other
//! credentials, the kernel's backlog, network namespaces, and devices that go.

use super::{Interface, Link, Namespaces, links, links_go_at_once};
use crate::capability::Capability;
use crate::cm::{Service, Side, accepted, ask, ask_by, channel, done, refused, route_from};
use crate::env;
use crate::fork::in_child;
use crate::helper::answer;
use crate::pair::{PATIENCE, SILENCE};
use crate::testbed::link_of;
use crate::verdict::{Stop, Verdict, require, trials};
use nix::unistd::{Uid, setuid};
use std::fs;
use std::net::SocketAddr;
use std::time::Instant;
use uverbs::cm::{
    ConnectParam, Connection, ConnectionEvent, EventChannel, MulticastRole, PortSpace,
};
use uverbs::device::link;
use uverbs::{Context, Device, Errno, QpType};

trials![
    interface_without_rdma_device_is_named,
    other_credentials_are_refused_on_an_open_channel,
    requests_beyond_the_backlog_connect_later,
    addresses_in_two_network_namespaces_connect,
    removed_device_ends_every_step_of_a_handshake,
];

fn interface_without_rdma_device_is_named() -> Verdict {
    env::lab()?;
    let _interface = Interface::dummy("uvt9", "10.77.9.1/24")?;
    let channel = EventChannel::open()?;
    let error =
        channel.create_id(PortSpace::TCP, QpType::RC)?.bind("10.77.9.1:0".parse()?).unwrap_err();
    assert_eq!(error.errno(), Errno::NODEV, "{error}");
    assert!(error.message().contains("belongs to no RDMA device"), "{error}");
    let id = channel.create_id(PortSpace::TCP, QpType::RC)?;
    let error = match id.resolve_addr(None, "10.77.9.2:7000".parse()?, PATIENCE) {
        Ok(resolving) => resolving.wait(Some(PATIENCE)).unwrap_err(),
        Err(error) => error,
    };
    assert_eq!(error.errno(), Errno::NODEV, "{error}");
    assert!(error.message().contains("belongs to no RDMA device"), "{error}");
    Ok(())
}

fn other_credentials_are_refused_on_an_open_channel() -> Verdict {
    env::lab()?;
    in_child((), |()| {
        let channel = EventChannel::open()?;
        let id = channel.create_id(PortSpace::TCP, QpType::RC)?;
        setuid(Uid::from_raw(65534))?;
        let error = channel.create_id(PortSpace::TCP, QpType::RC).unwrap_err();
        assert_eq!(error.errno(), Errno::ACCESS, "{error}");
        assert!(error.message().contains("open another channel"), "{error}");
        drop(id);
        assert_eq!(channel.leaked(), 1);
        // All users may open the node.
        EventChannel::open()?.create_id(PortSpace::TCP, QpType::RC)?;
        Ok(())
    })
}

/// The kernel's limit of unread requests, until this is dropped.
struct MaxBacklog(String);

impl MaxBacklog {
    const SETTING: &str = "/proc/sys/net/rdma_ucm/max_backlog";

    fn set(limit: u32) -> Verdict<MaxBacklog> {
        let before = fs::read_to_string(Self::SETTING)?;
        fs::write(Self::SETTING, limit.to_string())?;
        Ok(MaxBacklog(before))
    }
}

impl Drop for MaxBacklog {
    fn drop(&mut self) {
        let _ = fs::write(Self::SETTING, &self.0);
    }
}

/// The number of connect requests that came to a device, without repetitions that the kernel knew.
fn requests_heard(device: &Device) -> Verdict<u64> {
    let port = link_of(&Context::open(device)?)?.port;
    let count = |kind: &str| -> Verdict<u64> {
        let path = format!("/sys/class/infiniband/{}/ports/{port}/{kind}/req", device.name());
        let text = fs::read_to_string(&path);
        Ok(text.map_err(|error| Stop::fail(format!("{path}: {error}")))?.trim().parse()?)
    };
    Ok(count("cm_rx_msgs")? - count("cm_rx_duplicates")?)
}

/// The kernel forgets a request that finds the backlog full, so that it takes the peer's repetition for a new request.
fn requests_beyond_the_backlog_connect_later() -> Verdict {
    const ROOM: u64 = 2;
    env::lab()?;
    let _limit = MaxBacklog::set(ROOM as u32)?;
    let (channel, service) = (channel()?, Service::start(0)?);
    let device = crate::cm::passive()?;
    let before = requests_heard(&device)?;
    let param = ConnectParam::new();
    let mut asked = Vec::new();
    for _ in 0..=ROOM {
        asked.push(ask(&channel, service.at, &param)?);
    }
    // The peer repeats the request that found no room, and only that one is counted again.
    let deadline = Instant::now() + PATIENCE;
    while requests_heard(&device)? <= before + ROOM + 1 {
        if Instant::now() > deadline {
            return Err(Stop::fail("every request found room"));
        }
        std::thread::sleep(SILENCE);
    }
    // The order of requests may differ from that in which they were sent.
    let mut accepted = Vec::new();
    for _ in &asked {
        let request = service.request()?;
        let side = Side::of(&request.context()?)?;
        let accepting = request.accept(&side.qp, &param)?;
        accepted.push((side, accepting));
    }
    let mut connected = Vec::new();
    for (side, connecting) in asked {
        connected.push((side, done(connecting.wait(Some(PATIENCE))?)?));
    }
    for (_side, accepting) in accepted {
        done(accepting.wait(Some(PATIENCE))?)?;
    }
    Ok(())
}

/// The passive side, in a helper.
#[derive(Default)]
pub(crate) struct Answering {
    service: Option<Service>,
    accepted: Option<(Side, Connection)>,
}

impl Answering {
    /// Carries out one command: `listen`, `listen DEVICE ADDRESS`, `accept`, `receive`, `received`, `end`.
    pub(crate) fn obey(&mut self, line: &str) -> Verdict {
        let words: Vec<&str> = line.split(' ').collect();
        match (&words[..], &self.service, &mut self.accepted) {
            (["listen", place @ ..], None, _) => {
                let service = match place {
                    [device, address] => {
                        let address = SocketAddr::new(address.parse()?, 0);
                        Service::at(&Device::by_name(device)?, address)?
                    }
                    _ => Service::start(4)?,
                };
                answer(&format!("at {}", service.at));
                self.service = Some(service);
            }
            (["accept"], Some(service), None) => {
                let request = service.request()?;
                let side = Side::of(&request.context()?)?;
                let accepting = request.accept(&side.qp, &ConnectParam::new())?;
                self.accepted = Some((side, done(accepting.wait(Some(PATIENCE))?)?));
                answer("accepted");
            }
            (["receive"], _, Some((side, _))) => {
                side.receive()?;
                answer("posted");
            }
            (["received"], _, Some((side, _))) => {
                side.received()?;
                answer("received");
            }
            (["end"], _, Some((_, connection))) => {
                connection.wait_disconnected(Some(PATIENCE))?;
                self.accepted = None;
                answer("ended");
            }
            _ => return Err(Stop::fail(format!("cm {line:?} makes no sense now"))),
        }
        Ok(())
    }
}

fn addresses_in_two_network_namespaces_connect() -> Verdict {
    let mut two = Namespaces::connected()?;
    two.helper.tell(&format!("cm listen uvt_far {}", Namespaces::FAR))?;
    let at: SocketAddr = two.helper.hear("at")?.parse()?;
    let (channel, from) = (channel()?, SocketAddr::new(Namespaces::NEAR.parse()?, 0));
    for _ in 0..3 {
        two.helper.tell("cm accept")?;
        let (side, connecting) = ask_by(route_from(&channel, from, at)?, &ConnectParam::new())?;
        let connection = done(connecting.wait(Some(PATIENCE))?)?;
        two.helper.hear("accepted")?;
        assert_eq!(connection.peer_addr()?, at);
        two.helper.tell("cm end")?;
        drop((connection, side));
        two.helper.hear("ended")?;
    }
    Ok(())
}

/// One id waits for the answer to its request, a request waits for its answer, two ids are connected, one listens, and
/// one is in a multicast group.
fn removed_device_ends_every_step_of_a_handshake() -> Verdict {
    links()?;
    let _interface = Interface::dummy("uvt6", "10.77.6.1/24")?;
    let why = "the removal waits for the last file";
    require(links_go_at_once("uvt6")?, Capability::Disassociate, why)?;
    let _link = Link::add("uvt_rxe", "uvt6")?;
    let device = Device::by_name("uvt_rxe")?;
    let from: SocketAddr = "10.77.6.1:0".parse()?;
    let (channel, service) = (channel()?, Service::at(&device, from)?);
    let param = ConnectParam::new();
    let ask = || ask_by(route_from(&channel, from, service.at)?, &param);
    let pair = accepted(ask()?, service.request()?, &param)?;
    let (side, connecting) = ask()?;
    let request = service.request()?;
    let resolved = route_from(&channel, from, service.at)?;
    let bound = channel.create_id(PortSpace::UDP, QpType::UD)?.bind(from)?;
    let datagrams = Side::with(&bound.context()?, QpType::UD)?;
    let joining =
        bound.join_multicast(&datagrams.qp, "239.7.6.1".parse()?, MulticastRole::SendOnly)?;
    let member = done(joining.wait(Some(PATIENCE))?)?;
    assert!(!member.is_lost());
    link::remove_link("uvt_rxe")?;
    member.wait_lost(Some(PATIENCE))?;
    drop((member, bound, datagrams));
    let error = refused(connecting)?;
    assert_eq!(error.errno(), Errno::NODEV, "{error}");
    assert!(error.to_string().contains("is being removed"), "{error}");
    for connection in [&pair.active.1, &pair.passive.1] {
        let event = connection.next_event(Some(PATIENCE))?;
        assert_eq!(event, Some(ConnectionEvent::DeviceRemoval));
    }
    let error = service.id.next_request(Some(PATIENCE)).unwrap_err();
    assert_eq!(error.errno(), Errno::NODEV, "{error}");
    // Calls of the remaining objects fail, and the objects can be dropped in any order.
    request.accept(&side.qp, &param).unwrap_err();
    resolved.connect(&side.qp, &param).unwrap_err();
    drop((service, side));
    drop(pair);
    assert_eq!(channel.leaked(), 0);
    Ok(())
}
