//! Tests that change the machine: links that come and go, network namespaces. They run as root, in the lab only, as do
//! tests of raw packets and flow rules, which need capabilities.

pub(crate) mod cable;
pub(crate) mod cm;
pub(crate) mod devx;
pub(crate) mod flow;
pub(crate) mod gids;
pub(crate) mod raw_packet;
pub(crate) mod refusals;
pub(crate) mod sandbox;
pub(crate) mod suspend;

use crate::capability::Capability;
use crate::env;
use crate::helper::{Helper, config, receive_from, send_to};
use crate::hotplug::{self, Step};
use crate::pair::{Config, PATIENCE, Pair, Side};
use crate::unplug;
use crate::verdict::{Stop, Verdict, require, trials};
use std::fs;
use std::process::Command;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};
use uverbs::device::{DriverId, link};
use uverbs::{
    Access, Context, Device, Errno, EventSource, EventType, PortState, Psn, SendWr, WcStatus,
};

trials![
    link_is_added_and_removed,
    wrong_links_are_refused,
    removed_device_does_not_open_its_successor,
    removal_waits_for_the_last_file_or_takes_the_device_away,
    lent_memory_comes_back_when_the_link_goes,
    program_works_again_when_its_link_comes_back,
    port_events_follow_the_link,
    devices_in_two_network_namespaces_connect,
];

/// The one port of a software device.
const PORT: u32 = 1;

/// Skips unless this machine can make and remove soft-RoCE links.
fn links() -> Verdict {
    env::lab()?;
    let rxe = env::device().driver() == Some(DriverId::RXE);
    require(rxe, Capability::Links, "the device under test is no software device")
}

/// Runs `ip`.
fn ip(arguments: &str) -> Verdict {
    let output = Command::new("ip").args(arguments.split(' ')).output()?;
    if output.status.success() {
        return Ok(());
    }
    let why = String::from_utf8_lossy(&output.stderr).into_owned();
    Err(Stop::fail(format!("ip {arguments}: {why}")))
}

/// A network interface of this test's own, removed with the devices on it.
struct Interface(&'static str);

impl Interface {
    fn dummy(name: &'static str, address: &str) -> Verdict<Interface> {
        ip(&format!("link add {name} type dummy"))?;
        let interface = Interface(name);
        ip(&format!("addr add {address} dev {name}"))?;
        ip(&format!("link set {name} up"))?;
        Ok(interface)
    }
}

impl Drop for Interface {
    fn drop(&mut self) {
        let _ = ip(&format!("link del {}", self.0));
    }
}

/// A link of this test's own.
struct Link(&'static str);

impl Link {
    fn add(name: &'static str, interface: &str) -> Verdict<Link> {
        link::add_link(name, "rxe", interface)?;
        Ok(Link(name))
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        let _ = link::remove_link(self.0);
    }
}

fn link_is_added_and_removed() -> Verdict {
    links()?;
    let _interface = Interface::dummy("uvt0", "10.77.0.1/24")?;
    for _ in 0..5 {
        link::add_link("uvt_rxe", "rxe", "uvt0")?;
        let device = Device::by_name("uvt_rxe")?;
        assert_eq!(device.netdev(PORT)?.as_deref(), Some("uvt0"));
        let context = Context::open(&device)?;
        assert_eq!(context.query_port(PORT)?.state, PortState::ACTIVE);
        let mut pair = Pair::on(context.clone(), context, Config::rc())?;
        pair.connect()?;
        pair.message(1, 5000)?;
        drop(pair);
        link::remove_link("uvt_rxe")?;
        assert!(Device::by_name("uvt_rxe").is_err());
        // The descriptions listed before remain, but their device is gone.
        assert!(Context::open(&device).is_err());
    }
    Ok(())
}

fn wrong_links_are_refused() -> Verdict {
    links()?;
    let _interface = Interface::dummy("uvt3", "10.77.3.1/24")?;
    let device = env::device();
    let refusal = |name, kind, netdev| link::add_link(name, kind, netdev).unwrap_err().errno();
    // The kernel notices a taken name only on a free interface: it checks the interface first.
    assert_eq!(refusal(device.name(), "rxe", "uvt3"), Errno::NFILE);
    let _link = Link::add("uvt_rxe", "uvt3")?;
    assert_eq!(refusal("uvt_other", "rxe", "uvt3"), Errno::EXIST);
    assert_eq!(refusal("uvt_other", "rxe", "no_such_netdev"), Errno::NODEV);
    assert_eq!(refusal("uvt_other", "no_such_kind", "uvt3"), Errno::INVAL);
    assert_eq!(link::remove_link("uvt_other").unwrap_err().errno(), Errno::NODEV);
    Ok(())
}

fn removed_device_does_not_open_its_successor() -> Verdict {
    links()?;
    let _interface = Interface::dummy("uvt4", "10.77.4.1/24")?;
    let first = {
        let _link = Link::add("uvt_rxe", "uvt4")?;
        Device::by_name("uvt_rxe")?
    };
    // The same name, node and number, but another device.
    let _link = Link::add("uvt_rxe", "uvt4")?;
    let second = Device::by_name("uvt_rxe")?;
    assert_eq!(second.device_number(), first.device_number());
    assert_ne!(second.index(), first.index());
    let error = Context::open(&first).unwrap_err();
    assert_eq!(error.errno(), Errno::NODEV);
    assert!(error.message().contains("another device's"), "{error}");
    Context::open(&second)?;
    Ok(())
}

/// The longest time of a removal that does not wait for open files. One that waits takes longer.
const AT_ONCE: Duration = Duration::from_secs(3);

fn removal_waits_for_the_last_file_or_takes_the_device_away() -> Verdict {
    links()?;
    let _interface = Interface::dummy("uvt1", "10.77.1.1/24")?;
    let _link = Link::add("uvt_rxe", "uvt1")?;
    let context = Context::open(&Device::by_name("uvt_rxe")?)?;
    let cq = context.cq_builder(4).build()?;
    let pd = context.alloc_pd()?;
    let memory = pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u8>(100)?;
    let (sender, removed) = channel();
    let remover = std::thread::spawn(move || {
        let _ = sender.send(link::remove_link("uvt_rxe"));
    });
    let early = removed.recv_timeout(AT_ONCE);
    if let Ok(answer) = early {
        // Since Linux 7.3 the driver takes the device away from processes that have it open.
        answer?;
        remover.join().expect("it does not panic");
        assert_eq!(context.query_device().unwrap_err().errno(), Errno::IO);
        drop((cq, memory, pd));
        assert_eq!(context.leaked(), 0);
        assert!(Device::by_name("uvt_rxe").is_err());
        return Ok(());
    }
    assert!(matches!(early, Err(RecvTimeoutError::Timeout)), "it did not wait: {early:?}");
    drop((cq, memory, pd));
    let early = removed.recv_timeout(Duration::from_millis(300));
    assert!(matches!(early, Err(RecvTimeoutError::Timeout)), "it did not wait: {early:?}");
    drop(context);
    removed.recv_timeout(PATIENCE)??;
    remover.join().expect("it does not panic");
    assert!(Device::by_name("uvt_rxe").is_err());
    Err(Stop::Skip(Capability::Disassociate, "the removal waits for the last file".into()))
}

/// Whether soft-RoCE links can be removed while files of them are open; otherwise the removal waits.
fn links_go_at_once(interface: &str) -> Verdict<bool> {
    let _link = Link::add("uvt_rxe", interface)?;
    let context = Context::open(&Device::by_name("uvt_rxe")?)?;
    let remover = std::thread::spawn(|| link::remove_link("uvt_rxe"));
    let deadline = Instant::now() + AT_ONCE;
    while !remover.is_finished() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(10));
    }
    let at_once = remover.is_finished();
    drop(context);
    remover.join().expect("it does not panic")?;
    Ok(at_once)
}

/// As with a device that is pulled out: every request ends, and lent memory comes back.
fn lent_memory_comes_back_when_the_link_goes() -> Verdict {
    links()?;
    let _interface = Interface::dummy("uvt5", "10.77.5.1/24")?;
    let why = "the removal waits for the last file";
    require(links_go_at_once("uvt5")?, Capability::Disassociate, why)?;
    for _ in 0..3 {
        let _link = Link::add("uvt_rxe", "uvt5")?;
        let device = Device::by_name("uvt_rxe")?;
        unplug::lent_meanwhile(&device, || Ok(link::remove_link("uvt_rxe")?))?;
    }
    Ok(())
}

/// A program that waits for events learns that its device is gone, and finds the next of that name.
fn program_works_again_when_its_link_comes_back() -> Verdict {
    links()?;
    let _interface = Interface::dummy("uvt6", "10.77.6.1/24")?;
    let why = "the removal waits for the last file";
    require(links_go_at_once("uvt6")?, Capability::Disassociate, why)?;
    let _link = Link::add("uvt_rxe", "uvt6")?;
    let (sender, steps) = channel();
    let program = std::thread::spawn(move || {
        hotplug::work("uvt_rxe", |step| {
            let _ = sender.send(step);
        })
    });
    // A program that failed reports no further step; its error follows.
    let reached = |step| steps.recv_timeout(PATIENCE) == Ok(step);
    if reached(Step::AtWork) {
        link::remove_link("uvt_rxe")?;
        if reached(Step::Gone) {
            link::add_link("uvt_rxe", "rxe", "uvt6")?;
            reached(Step::Again);
        }
    }
    program.join().expect("it does not panic")
}

fn port_events_follow_the_link() -> Verdict {
    links()?;
    let _interface = Interface::dummy("uvt2", "10.77.2.1/24")?;
    let _link = Link::add("uvt_rxe", "uvt2")?;
    let context = Context::open(&Device::by_name("uvt_rxe")?)?;
    // Reads the events of the setup.
    while context.next_event(Some(Duration::from_millis(200)))?.is_some() {}
    for (state, kind, after) in [
        ("down", EventType::PORT_ERR, PortState::DOWN),
        ("up", EventType::PORT_ACTIVE, PortState::ACTIVE),
    ] {
        ip(&format!("link set uvt2 {state}"))?;
        loop {
            let Some(event) = context.next_event(Some(PATIENCE))? else {
                return Err(Stop::fail(format!("no {kind} after the link was set {state}")));
            };
            assert_eq!(event.source, EventSource::Port(PORT), "{event:?}");
            if event.kind == kind {
                break;
            }
            assert_eq!(event.kind, EventType::GID_CHANGE, "{event:?}");
        }
        assert_eq!(context.query_port(PORT)?.state, after);
    }
    Ok(())
}

/// The other end of a veth pair, by its index in sysfs.
fn other_end(interface: &str) -> Verdict<String> {
    let index = fs::read_to_string(format!("/sys/class/net/{interface}/iflink"))?;
    for entry in fs::read_dir("/sys/class/net")? {
        let entry = entry?;
        if fs::read_to_string(entry.path().join("ifindex")).is_ok_and(|found| found == index) {
            return Ok(entry.file_name().to_string_lossy().into_owned());
        }
    }
    Err(Stop::fail(format!("{interface} has no other end")))
}

/// Sets a helper's network namespace up: `interface` gets an address and a link.
pub(crate) fn configure(interface: &str) -> Verdict {
    ip("link set lo up")?;
    ip(&format!("addr add {}/24 dev {interface}", Namespaces::FAR))?;
    ip(&format!("link set {interface} up"))?;
    Ok(link::add_link("uvt_far", "rxe", interface)?)
}

/// A link of this process, and one of a helper in a network namespace of its own, at the two ends of a
/// cable.
struct Namespaces {
    helper: Helper,
    /// Connected to the helper's.
    side: Side,
    _near: Link,
    // After the helper, so that it goes when the helper and its file are gone.
    _far: Link,
    _interface: Interface,
}

impl Namespaces {
    const NEAR: &str = "10.77.3.1";
    const FAR: &str = "10.77.3.2";

    /// Skips if no message arrives in another namespace.
    fn connected() -> Verdict<Namespaces> {
        links()?;
        ip("link add uvt3 type veth")?;
        let _interface = Interface("uvt3");
        let far = other_end("uvt3")?;
        let _far = Link("uvt_far");
        let mut helper = Helper::start()?;
        helper.tell("namespace")?;
        helper.hear("unshared")?;
        ip(&format!("link set {far} netns {}", helper.id()))?;
        ip(&format!("addr add {}/24 dev uvt3", Self::NEAR))?;
        ip("link set uvt3 up")?;
        helper.tell(&format!("link {far}"))?;
        helper.hear("linked")?;
        let _near = Link::add("uvt_near", "uvt3")?;
        let context = Context::open(&Device::by_name("uvt_near")?)?;
        let mut side = Side::new(context, &config(), Psn::new(1))?;
        helper.connect("uvt_far", &mut side)?;
        helper.tell("recv 0 0")?;
        helper.hear("posted")?;
        side.send(SendWr::send(&[]).id(0).signaled())?;
        // Before Linux 7.1 rxe listens in the first namespace only.
        let arrives = side.wait()?.status == WcStatus::SUCCESS;
        require(arrives, Capability::Netns, "nothing arrives in another network namespace")?;
        helper.hear("received")?;
        Ok(Namespaces { helper, side, _near, _far, _interface })
    }
}

fn devices_in_two_network_namespaces_connect() -> Verdict {
    let mut two = Namespaces::connected()?;
    for seed in 1..5 {
        send_to(&mut two.side, &mut two.helper, seed, 3000)?;
        receive_from(&mut two.side, &mut two.helper, 100 + seed, 3000)?;
    }
    two.helper.tell("close")?;
    two.helper.hear("closed")?;
    Ok(())
}
