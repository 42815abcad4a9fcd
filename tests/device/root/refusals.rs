//! Errors on a machine that lacks something, or is configured wrong: each names the cause and the remedy, as the table
//! in `docs/DEPLOYMENT.md` does.

use super::cable::{End, FAR, NEAR, at};
use super::{Interface, Link, PORT, ip, links, other_end};
use crate::cm::{address, ask_by, channel, route_from};
use crate::env;
use crate::pair::{Config, PATIENCE, Pair};
use crate::verdict::{Stop, Verdict, trials};
use std::net::SocketAddr;
use std::process::Command;
use std::time::{Duration, Instant};
use uverbs::cm::{ConnectParam, PortSpace, Progress};
use uverbs::{Context, Device, Errno, GidFilter, Mtu, PortState, QpType, SendWr, WcStatus};

trials![
    device_without_an_active_port_is_passed_over,
    addresses_without_a_neighbour_or_a_route_are_told_apart,
    messages_longer_than_the_mtu_of_the_peer_fail_and_shorter_ones_arrive,
    peer_without_rdma_is_given_up_after_a_minute,
];

/// Loads a module in advance, so that the kernel need not request it.
fn load(module: &str) -> Verdict {
    let status = Command::new("modprobe").arg(module).status()?;
    if status.success() { Ok(()) } else { Err(Stop::fail(format!("modprobe {module}: {status}"))) }
}

fn device_without_an_active_port_is_passed_over() -> Verdict {
    links()?;
    let _interface = Interface::dummy("uvt11", "10.77.11.1/24")?;
    let _link = Link::add("uvt_rxe", "uvt11")?;
    ip("link set uvt11 down")?;
    let device = Device::by_name("uvt_rxe")?;
    let context = Context::open(&device)?;
    let deadline = Instant::now() + PATIENCE;
    while context.query_port(PORT)?.state == PortState::ACTIVE {
        if Instant::now() > deadline {
            return Err(Stop::fail("the port stays active"));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    drop(context);
    let mut skipped = Vec::new();
    let error = Context::open_first_of([device], |device, error| {
        skipped.push((device.name().to_owned(), error.errno()));
    })
    .unwrap_err();
    assert_eq!(error.errno(), Errno::NETDOWN, "{error}");
    assert_eq!(skipped, [("uvt_rxe".to_owned(), Errno::NETDOWN)]);
    for part in ["uvt_rxe", "port 1 is down", "set the network interface up"] {
        assert!(error.message().contains(part), "{part}: {error}");
    }
    Ok(())
}

fn addresses_without_a_neighbour_or_a_route_are_told_apart() -> Verdict {
    /// An address for documentation (RFC 5737), to which no route leads.
    const NOWHERE: &str = "203.0.113.9";
    env::lab()?;
    let context = env::open()?;
    let error = context.choose_gid(env::port(), &GidFilter::new().peer(NOWHERE.parse()?));
    let error = error.unwrap_err();
    assert_eq!(error.errno(), Errno::NETUNREACH, "{error}");
    assert!(error.message().contains("no route to 203.0.113.9"), "{error}");

    let channel = channel()?;
    let resolve = |from, to: &str, patience| -> Verdict<uverbs::Error> {
        let resolving = match channel.create_id(PortSpace::TCP, QpType::RC)?.resolve_addr(
            from,
            at(to)?,
            patience,
        ) {
            Ok(resolving) => resolving.wait(Some(PATIENCE)),
            Err(error) => return Ok(error),
        };
        match resolving {
            Err(error) => Ok(error),
            Ok(Progress::Done(_)) => Err(Stop::fail(format!("{to} was resolved"))),
            Ok(Progress::Pending(_)) => Err(Stop::fail(format!("{to} is still being resolved"))),
        }
    };
    let error = resolve(None, NOWHERE, PATIENCE)?;
    assert_eq!(error.errno(), Errno::NETUNREACH, "{error}");
    assert!(error.message().contains("the IP routing table has no"), "{error}");
    // No host has this address of the cable's network.
    let here = address(&env::device())?;
    let error = resolve(Some((here, 0).into()), "10.0.0.199", Duration::from_secs(1))?;
    assert_eq!(error.errno(), Errno::TIMEDOUT, "{error}");
    assert!(error.message().contains("the address is up, and on this network"), "{error}");
    Ok(())
}

/// Two hosts at a switch, whose port to the peer takes packets of at most 1500 bytes: the connection is made, and short
/// messages arrive.
fn messages_longer_than_the_mtu_of_the_peer_fail_and_shorter_ones_arrive() -> Verdict {
    links()?;
    load("bridge")?;
    ip("link add uvt_sw type bridge")?;
    let _switch = Interface("uvt_sw");
    ip("link add uvt7 type veth")?;
    let _near = Interface("uvt7");
    ip("link add uvt13 type veth")?;
    let _far = Interface("uvt13");
    let ports = [other_end("uvt7")?, other_end("uvt13")?];
    for interface in ["uvt7", &ports[0]] {
        ip(&format!("link set {interface} mtu 4600"))?;
    }
    for port in &ports {
        ip(&format!("link set {port} master uvt_sw"))?;
        ip(&format!("link set {port} up"))?;
    }
    ip("link set uvt_sw up")?;
    let _ends = End::both("uvt7", "uvt13")?;
    let _links = [Link::add("uvt_near", "uvt7")?, Link::add("uvt_far", "uvt13")?];
    let [near, far] = ["uvt_near", "uvt_far"].map(|name| Context::open(&Device::by_name(name)?));
    let there = Config { mtu: Mtu::MTU_1024, ..Config::rc() };
    let here = Config { mtu: Mtu::MTU_4096, retry_count: 2, timeout: 14, ..there };
    let mut pair = Pair::on(near?, far?, there)?;
    pair.a.connect(&here, &pair.b.address())?;
    pair.b.connect(&there, &pair.a.address())?;
    pair.message(1, 1000)?;
    pair.b.recv(2, 0..4000)?;
    let sges = [pair.a.sge(0..4000)];
    pair.a.send(SendWr::send(&sges).id(2).signaled())?;
    assert_eq!(pair.a.wait()?.status, WcStatus::RETRY_EXC_ERR);
    Ok(())
}

/// The other end of the cable is an interface without an RDMA device.
fn peer_without_rdma_is_given_up_after_a_minute() -> Verdict {
    env::soak()?;
    links()?;
    ip("link add uvt7 type veth")?;
    let _interface = Interface("uvt7");
    let _ends = End::both("uvt7", &other_end("uvt7")?)?;
    let _link = Link::add("uvt_near", "uvt7")?;
    let channel = channel()?;
    let peer = SocketAddr::new(at(FAR)?.ip(), 7000);
    let (_side, connecting) = ask_by(route_from(&channel, at(NEAR)?, peer)?, &ConnectParam::new())?;
    let error = match connecting.wait(Some(10 * PATIENCE)) {
        Err(error) => uverbs::Error::from(error),
        Ok(_) => return Err(Stop::fail("the peer was not given up")),
    };
    assert_eq!(error.errno(), Errno::TIMEDOUT, "{error}");
    assert!(error.message().contains("UDP port 4791"), "{error}");
    Ok(())
}
