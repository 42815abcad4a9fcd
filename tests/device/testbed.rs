//! The connection of the device under test: port, MTU, partition key, partner. It is examined before the first test,
//! and the first lines of a run describe it.
//!
//! A fault that would make every test fail ends the run, with the remedy. Each reason to skip tests is a line of its
//! own. Both come before the line that describes the device.

use crate::env;
use crate::pair::{Config, Pair};
use crate::verdict::{Stop, Verdict};
use rustix::process::{Resource, getrlimit};
use std::env::var;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::sync::OnceLock;
use uverbs::{Context, Device, Errno, LinkLayer, Mtu, PortAttr, PortState, WcStatus};

/// Bytes that a test may lock: the usual limit of a user in most distributions.
const LOCKED: u64 = 8 << 20;
/// The bit of `CAP_IPC_LOCK`, which lifts that limit.
const CAP_IPC_LOCK: u32 = 14;
/// The bit of a partition key of a full member; limited members cannot send to each other.
const FULL_MEMBER: u16 = 0x8000;

/// An active port, and the attributes of connections through it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Link {
    pub(crate) port: u32,
    pub(crate) layer: LinkLayer,
    /// The MTU of connections: the smaller of the port's and the partner's.
    pub(crate) mtu: Mtu,
    pub(crate) pkey_index: u16,
    pub(crate) pkey: u16,
}

impl Link {
    /// The port `wanted`, or the first that is active; with a key of the partition of `peer`, or else one
    /// with full membership if there is one.
    fn of(context: &Context, wanted: Option<u32>, peer: Option<u16>) -> Result<Link, String> {
        let device = context.device();
        let ports = wanted.map_or(1..=device.port_count(), |port| port..=port);
        let mut idle = Vec::new();
        for port in ports {
            let attr = context.query_port(port).map_err(|error| error.to_string())?;
            if attr.state == PortState::ACTIVE {
                let (pkey_index, pkey) = partition(context, port, &attr, peer);
                let (layer, mtu) = (attr.link_layer, attr.active_mtu);
                return Ok(Link { port, layer, mtu, pkey_index, pkey });
            }
            let netdev = device.netdev(port).ok().flatten();
            let remedy = match netdev {
                Some(netdev) => format!("`ip link set {netdev} up`, and see that it has a carrier"),
                None => "see the cable and, on InfiniBand, that a subnet manager runs".into(),
            };
            idle.push(format!(
                "port {port} of {} is {}, {}: {remedy}",
                device.name(),
                attr.state,
                attr.phys_state
            ));
        }
        Err(idle.join("; "))
    }
}

/// The index of a partition key, and the key. Ethernet has the default partition only, and a sandbox may show none.
fn partition(context: &Context, port: u32, attr: &PortAttr, peer: Option<u16>) -> (u16, u16) {
    const DEFAULT: (u16, u16) = (0, 0xffff);
    if attr.link_layer == LinkLayer::ETHERNET {
        return DEFAULT;
    }
    let keys = || {
        let key = move |index| Some((index, context.query_pkey(port, index).ok()?));
        (0..attr.pkey_table_len).map_while(key).filter(|(_, key)| key & !FULL_MEMBER != 0)
    };
    let same = |(_, key): &(u16, u16)| peer.is_some_and(|peer| (key ^ peer) & !FULL_MEMBER == 0);
    let full = |(_, key): &(u16, u16)| key & FULL_MEMBER != 0;
    keys().find(same).or_else(|| keys().find(full)).or_else(|| keys().next()).unwrap_or(DEFAULT)
}

/// The port of the device under test that the tests use.
pub(crate) fn link() -> &'static Link {
    static LINK: OnceLock<Link> = OnceLock::new();
    LINK.get_or_init(|| {
        // Both results are cached, for sandboxes that do not show the device.
        env::waits_for_receives();
        let context = Context::open(&env::device()).expect("the device under test opens");
        own_link(&context).expect("a port of the device under test is active")
    })
}

fn own_link(context: &Context) -> Result<Link, String> {
    let wanted = match var("UVERBS_TEST_PORT") {
        Err(_) => None,
        Ok(text) => Some(text.parse().map_err(|_| format!("UVERBS_TEST_PORT={text}: no number"))?),
    };
    let own = Link::of(context, wanted, None)?;
    // A fault of the partner is reported when the partner is examined.
    let there = named_second().ok().and_then(|device| Context::open(&device).ok());
    let there = there.and_then(|context| Link::of(&context, None, Some(own.pkey)).ok());
    Ok(Link { mtu: there.map_or(own.mtu, |there| there.mtu.min(own.mtu)), ..own })
}

/// The port of a context, of any device.
pub(crate) fn link_of(context: &Context) -> Verdict<Link> {
    if env::name() == context.device().name() {
        return Ok(*link());
    }
    let link = Link::of(context, None, Some(link().pkey)).map_err(Stop::fail)?;
    Ok(Link { mtu: link.mtu.min(self::link().mtu), ..link })
}

fn named_second() -> Result<Device, String> {
    Device::by_name(&env::second_name()?).map_err(|error| error.to_string())
}

/// The device at the other end of the cable, if a message arrives there, or the reason that there is none.
pub(crate) fn second() -> &'static Result<Device, String> {
    static SECOND: OnceLock<Result<Device, String>> = OnceLock::new();
    SECOND.get_or_init(|| {
        let device = named_second()?;
        let context = Context::open(&device).map_err(|error| error.to_string())?;
        let there = Link::of(&context, None, Some(link().pkey))?;
        if there.layer != link().layer {
            return Err(format!("{device} has {}, and this is {}", there.layer, link().layer));
        }
        match reaches(context) {
            Ok(()) => Ok(device),
            Err(Stop::Skip(_, why) | Stop::Fail(why)) => Err(format!("{device}: {why}")),
        }
    })
}

/// Sends a message from the device under test to another one.
fn reaches(other: Context) -> Verdict {
    let mut pair = Pair::on(env::open()?, other, Config { timeout: 14, ..Config::rc() })?;
    pair.connect()?;
    pair.b.recv(1, 0..64)?;
    let sges = [pair.a.sge(0..64)];
    pair.a.send(uverbs::SendWr::send(&sges).id(1).signaled())?;
    match pair.a.wait()?.status {
        WcStatus::SUCCESS => Ok(()),
        status => Err(Stop::Fail(format!("a message to it ends with {status}"))),
    }
}

/// Whether this process may lock any amount of memory: the capability of a user namespace lifts no limit.
fn lifts_limits() -> bool {
    let all = "0 0 4294967295";
    let map = std::fs::read_to_string("/proc/self/uid_map").unwrap_or_else(|_| all.into());
    map.split_whitespace().eq(all.split(' ')) && has_capability(CAP_IPC_LOCK)
}

/// Whether this process has a capability.
pub(crate) fn has_capability(bit: u32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let bits = line.and_then(|bits| u64::from_str_radix(bits.trim(), 16).ok());
    bits.is_some_and(|bits| bits >> bit & 1 == 1)
}

/// The first lines of a run, or the fault that prevents it.
pub(crate) fn look() -> Result<String, String> {
    let device = env::find()?;
    let context = Context::open(&device).map_err(|error| refusal(&device, &error))?;
    let locked = getrlimit(Resource::Memlock).current;
    if locked.is_some_and(|bytes| bytes < LOCKED) && !lifts_limits() {
        return Err(format!(
            "this process may lock {} KiB of memory, and tests lock up to {} KiB: `ulimit -l {}`, or \
             LimitMEMLOCK= of the runner's service",
            locked.unwrap_or(0) >> 10,
            LOCKED >> 10,
            LOCKED >> 10
        ));
    }
    let own = own_link(&context)?;
    let attr = context.query_port(own.port).map_err(|error| error.to_string())?;
    let mut lines = Vec::new();
    if let Err(why) = second() {
        lines.push(format!("note: tests between two devices skip ([two_devices]): {why}"));
    }
    let bytes = |mtu: Mtu| mtu.bytes().unwrap_or(0);
    if attr.active_mtu != own.mtu {
        lines.push(format!(
            "note: the MTU is {}, that of the partner's port, not {}",
            bytes(own.mtu),
            bytes(attr.active_mtu)
        ));
    }
    let firmware = device.firmware().map(|version| format!(", firmware {version}"));
    let partner = match second() {
        Ok(second) => format!("partner {}", second.name()),
        Err(_) => "no partner".into(),
    };
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let locked = locked.map_or("any".into(), |bytes| (bytes >> 10).to_string());
    let place = if env::in_process() { " in this process" } else { "" };
    lines.push(format!(
        "device under test: {device}{place}{}, port {} of {}: {}, {}, MTU {} of {}, partition key {:#06x} at {}; \
         {partner}; user {}, {locked} KiB of memory may be locked; Linux {}",
        firmware.unwrap_or_default(),
        own.port,
        device.port_count(),
        attr.state,
        own.layer,
        bytes(own.mtu),
        bytes(attr.max_mtu),
        own.pkey,
        own.pkey_index,
        rustix::process::geteuid().as_raw(),
        release.trim(),
    ));
    Ok(lines.join("\n"))
}

/// The reason that the device under test does not open: the error, and the permissions of its node.
fn refusal(device: &Device, error: &uverbs::Error) -> String {
    let path = format!("/dev/infiniband/{}", device.uverbs_name().unwrap_or_default());
    match std::fs::metadata(&path) {
        Ok(node) if error.errno() == Errno::ACCESS => format!(
            "{path} has mode {:04o}, user {} and group {}, and this is user {}: {error}",
            node.permissions().mode() & 0o7777,
            node.uid(),
            node.gid(),
            rustix::process::geteuid().as_raw()
        ),
        _ => error.to_string(),
    }
}
