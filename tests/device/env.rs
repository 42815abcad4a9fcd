//! The device under test, and the other facts of the run.

use crate::capability::Capability;
use crate::junit;
use crate::owners::Resources;
use crate::pair::PATIENCE;
use crate::testbed;
use crate::verdict::{Stop, Verdict, require};
use nix::sched::CloneFlags;
use std::env::{var, var_os};
use std::fs::File;
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};
use uverbs::device::{DriverId, devices_on};
use uverbs::{Context, Device, Endpoint, GidEntry, Handshake, Mtu, QpControl};

/// The names of the devices of a fabric in this process.
const FABRIC: [&str; 2] = ["mlx5_0", "mlx5_1"];

/// Whether the device under test is in this process, with its kernel and its network. That is so if the environment
/// names no other: the suite never runs by accident on a machine that works with its devices.
pub(crate) fn on_fabric() -> bool {
    var("UVERBS_TEST_DEVICE").is_err()
}

/// The variable by which a process gets a device of its own over UDP, as in `src/sim.rs`.
const SIM: &str = "UVERBS_SIM";
/// Not that of RoCE, which soft-RoCE may have.
const UDP_PORT: u16 = 14_793;

/// Whether each process of the run has a device of its own, and they talk over UDP (`udp.rs`).
pub(crate) fn over_udp() -> bool {
    var(SIM).is_ok_and(|value| value.starts_with("udp"))
}

/// Whether the device under test and its kernel are in this process.
pub(crate) fn in_process() -> bool {
    on_fabric() || over_udp()
}

/// Gives a process that is about to start a device over UDP, at an address of 127.0.0.0/8 that no other process has.
pub(crate) fn give_udp(command: &mut Command) {
    static NEXT: AtomicU8 = AtomicU8::new(1);
    let [_, _, high, low] = std::process::id().to_be_bytes();
    let at = Ipv4Addr::new(127, 192 | high & 63, low, NEXT.fetch_add(1, Ordering::Relaxed));
    command.env(SIM, format!("udp:{at}:{UDP_PORT}"));
}

/// A command that runs this program once more, as a second process of a test.
pub(crate) fn second_process() -> std::io::Result<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    if over_udp() {
        give_udp(&mut command);
    }
    Ok(command)
}

/// Makes the device over UDP, if the run has one: a library with the feature `sim` does so itself.
pub(crate) fn set_up_udp() {
    if cfg!(feature = "sim") || !over_udp() {
        return;
    }
    let value = var(SIM).unwrap_or_default();
    let at = value.strip_prefix("udp:").and_then(|at| at.parse().ok());
    let at = at.unwrap_or_else(|| panic!("{SIM}={value}: give udp:ADDRESS:PORT"));
    let fabric = uverbs_sim::Fabric::builder().udp(at).build().expect("a device over UDP");
    fabric.install().expect("it is the first");
}

/// Makes the fabric, if the run tests it.
pub(crate) fn set_up() {
    if on_fabric() {
        // The second device has neither, as in the lab.
        let direct = uverbs_sim::Profile::new().data_direct().real_time();
        let builder = uverbs_sim::Fabric::builder().device(direct);
        let fabric = builder.device(uverbs_sim::Profile::new()).build().expect("two devices");
        fabric.clone().install().expect("it is the first");
        assert!(INSTALLED.set(fabric).is_ok(), "it is the first");
    }
}

/// The fabric that the run tests.
static INSTALLED: OnceLock<uverbs_sim::Fabric> = OnceLock::new();

/// The objects that the firmware of a device in this process has, by kind. Of the lab's emulated devices the lab itself
/// counts them, and hardware tells nobody.
pub(crate) fn firmware_objects() -> Option<Vec<(&'static str, usize)>> {
    let device = INSTALLED.get()?.device(&name())?;
    Some(device.firmware_objects())
}

/// The name of the device under test.
pub(crate) fn name() -> String {
    var("UVERBS_TEST_DEVICE").unwrap_or_else(|_| FABRIC[0].into())
}

/// The name of the device at the other end of the cable.
pub(crate) fn second_name() -> Result<String, String> {
    const NAME: &str = "UVERBS_TEST_SECOND_DEVICE";
    match var(NAME) {
        Ok(name) => Ok(name),
        Err(_) if on_fabric() => Ok(FABRIC[1].into()),
        Err(_) => Err(format!("{NAME} names none")),
    }
}

/// The device under test.
pub(crate) fn find() -> Result<Device, String> {
    Device::by_name(&name()).map_err(|error| error.to_string())
}

/// Skips tests in which another process, or a child of `fork`, uses the device.
pub(crate) fn processes() -> Verdict {
    let why = "the device and its kernel are in this process, where no other one has them";
    require(!on_fabric(), Capability::Processes, why)
}

/// Descriptors of a completion channel: one on Linux, two if a kernel in this process has its own end.
pub(crate) fn descriptors_of_a_channel() -> usize {
    if on_fabric() { 2 } else { 1 }
}

/// Skips tests that look for the device's node in `/dev`.
pub(crate) fn node() -> Verdict {
    let why = "the device is in this process, and has no node in /dev";
    require(!on_fabric(), Capability::Node, why)
}

/// The device under test, which was there when the run began.
pub(crate) fn device() -> Device {
    find().expect("the device under test was there and is gone")
}

/// A fresh context on the device under test.
pub(crate) fn open() -> Verdict<Context> {
    Ok(Context::open(&device())?)
}

/// The side of each pair that is a device in this process, its address outside of it, and the network namespace that
/// has the address: `a:10.1.0.2@/run/netns/away`. The other side is the device under test, which has to reach the
/// address.
const WIRE: &str = "UVERBS_TEST_WIRE";

/// That side's device, and whether it is the first of each pair; `None` if all of them are on the device under test.
fn wire() -> Result<Option<&'static (Device, bool)>, String> {
    static AT: OnceLock<Result<Option<(Device, bool)>, String>> = OnceLock::new();
    let look = || {
        let Ok(text) = var(WIRE) else { return Ok(None) };
        let made = make_wire(&text).map_err(|why| format!("{WIRE}={text}: {why}"))?;
        Ok(Some(made))
    };
    AT.get_or_init(look).as_ref().map(Option::as_ref).map_err(String::clone)
}

fn make_wire(text: &str) -> Result<(Device, bool), String> {
    const FORM: &str = "give a side, an address and a namespace, as in a:10.1.0.2@/run/netns/away";
    let (side, place) = text.split_once(':').ok_or(FORM)?;
    let (address, namespace) = place.split_once('@').ok_or(FORM)?;
    let address: IpAddr = address.parse().map_err(|_| FORM)?;
    let is_first = match side {
        "a" => true,
        "b" => false,
        _ => return Err(FORM.into()),
    };
    let namespace = File::open(namespace).map_err(|error| format!("{namespace}: {error}"))?;
    // A socket stays in the namespace in which it was made, and only this thread goes there.
    let made = std::thread::spawn(move || {
        nix::sched::setns(namespace, CloneFlags::CLONE_NEWNET)
            .map_err(|error| error.to_string())?;
        let fabric = uverbs_sim::Fabric::builder().udp((address, uverbs_sim::ROCE_PORT).into());
        fabric.build().map_err(|error| error.to_string())
    });
    let fabric = made.join().map_err(|_| "its thread panicked")??;
    let device = devices_on(&fabric.system()).pop().ok_or("no device")?;
    // The device is there until the process ends.
    std::mem::forget(fabric);
    Ok((device, is_first))
}

/// Fresh contexts for the two sides of a pair.
pub(crate) fn open_both() -> Verdict<(Context, Context)> {
    let own = open()?;
    Ok(match wire().map_err(Stop::fail)? {
        None => (own, open()?),
        Some((device, true)) => (Context::open(device)?, own),
        Some((device, false)) => (own, Context::open(device)?),
    })
}

/// The port of the device under test.
pub(crate) fn port() -> u32 {
    testbed::link().port
}

/// The MTU of connections.
pub(crate) fn mtu() -> Mtu {
    testbed::link().mtu
}

/// The partition key of connections, by its index.
pub(crate) fn pkey_index() -> u16 {
    testbed::link().pkey_index
}

/// Connects a queue pair to an endpoint, in a partition that has this port as a full member.
pub(crate) fn handshake(qp: &QpControl, remote: &Endpoint) -> uverbs::Result<()> {
    qp.handshake(remote, &handshake_options())
}

/// The defaults, in that partition, with retries that end.
pub(crate) fn handshake_options() -> Handshake {
    Handshake::new().pkey_index(pkey_index()).rnr_retry(rnr_retry())
}

/// An entry of a GID table that is named by its place only.
pub(crate) fn gid_entry(port: u32, index: u32) -> GidEntry {
    let mut entry = GidEntry::default();
    (entry.port, entry.index) = (port, index);
    entry
}

/// Whether a message that finds no receive is sent again only after a wait. Before Linux 6.0 soft-RoCE sends it again
/// at once. With endless retries between two queue pairs of one device that loop kept a processor busy, and the test
/// stood still (`docs/KERNEL-NOTES.md`).
pub(crate) fn waits_for_receives() -> bool {
    static WAITS: OnceLock<bool> = OnceLock::new();
    *WAITS.get_or_init(|| device().driver() != Some(DriverId::RXE) || kernel_is_since(6, 0))
}

/// Whether a wait for a receive takes no retries off the count of a sender whose acknowledgement timeout is longer
/// than the wait: soft-RoCE of 6.1 counts them (`docs/KERNEL-NOTES.md`).
pub(crate) fn short_waits_are_no_retries() -> bool {
    device().driver() != Some(DriverId::RXE) || kernel_is_since(6, 12)
}

/// Skips if the connection manager does not report that a peer moved to another MAC address.
pub(crate) fn unreachable_events() -> Verdict {
    require(kernel_is_since(6, 0), Capability::CmUnreachable, "the kernel is older than Linux 6.0")
}

/// The retry count of a message that finds no receive: without a limit where that does no harm.
pub(crate) fn rnr_retry() -> u8 {
    if waits_for_receives() { 7 } else { 6 }
}

/// Skips tests of requests without the right to memory. soft-RoCE of the same kernels does not answer such requests if
/// they consume no receive, and checks less.
pub(crate) fn access_errors() -> Verdict {
    require(
        waits_for_receives(),
        Capability::AccessErrors,
        "a request without the right gets no answer",
    )
}

/// Skips tests that post sends in state `ERR`, which soft-RoCE of the same kernels does not flush.
pub(crate) fn error_flush() -> Verdict {
    require(
        waits_for_receives(),
        Capability::ErrorFlush,
        "the driver does not flush sends that are posted in state ERR",
    )
}

/// Skips tests that send before the receive is posted.
pub(crate) fn rnr_wait() -> Verdict {
    require(
        waits_for_receives(),
        Capability::RnrWait,
        "a message without a receive is sent again at once",
    )
}

/// Skips tests of functions that connect with the first partition key and take no other.
pub(crate) fn first_pkey() -> Verdict {
    let why = "the port is no full member of its first partition";
    require(pkey_index() == 0, Capability::FirstPkey, why)
}

/// The objects that this process and those that it started have on the device under test.
pub(crate) fn resources() -> Verdict<Resources> {
    Resources::look()
}

/// Fails unless the objects of this process are those of `before`, and waits for the kernel to clean up after
/// threads and processes that ended.
#[track_caller]
pub(crate) fn unchanged(before: &Resources) -> Verdict {
    let found = resources()?;
    if !found.has_the_own_of(before) {
        return Err(Stop::fail(format!("{found}; before: {before}")));
    }
    settles(before)
}

/// Waits until no object is left that did not exist before: the kernel cleans up after a process in its own time.
#[track_caller]
pub(crate) fn settles(before: &Resources) -> Verdict {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let found = resources()?;
        if found.adds_nothing_to(before) {
            return Ok(());
        }
        if Instant::now() > deadline {
            return Err(Stop::fail(format!("{found}; before: {before}")));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Skips tests that take all of a resource, or count those of the whole machine, unless no other process uses it.
pub(crate) fn alone() -> Verdict {
    let alone = on_fabric() || var("UVERBS_LAB").is_ok() || var("UVERBS_TEST_ALONE").is_ok();
    require(alone, Capability::Alone, "others may use the device: UVERBS_TEST_ALONE is not set")
}

/// Skips tests that read a stored value from a doorbell page: only emulated devices show it.
pub(crate) fn shows_stores() -> Verdict {
    let why = "a device keeps what is stored in its doorbell pages to itself";
    require(on_fabric() || var("UVERBS_LAB").is_ok(), Capability::ShownStores, why)
}

/// Skips tests of raw packets, which need `CAP_NET_RAW`, unless only the test's own network receives them.
pub(crate) fn packets() -> Verdict {
    /// The bit of `CAP_NET_RAW`.
    const CAP_NET_RAW: u32 = 13;
    if !on_fabric() {
        return lab();
    }
    require(testbed::has_capability(CAP_NET_RAW), Capability::RawPacket, "no CAP_NET_RAW")
}

/// Skips tests that change the machine unless this is the lab's, and root.
pub(crate) fn lab() -> Verdict {
    require(var("UVERBS_LAB").is_ok(), Capability::Lab, "UVERBS_LAB is not set")?;
    require(rustix::process::geteuid().is_root(), Capability::Lab, "not root")
}

/// The device at the other end of the cable.
pub(crate) fn second() -> Verdict<Device> {
    match testbed::second() {
        Ok(device) => Ok(device.clone()),
        Err(why) => Err(Stop::Skip(Capability::TwoDevices, why.clone())),
    }
}

/// Skips tests that drain a send queue without ending it, which the driver of mlx5 does not offer.
pub(crate) fn drainable() -> Verdict {
    let mlx5 = device().driver() == Some(DriverId::MLX5);
    require(!mlx5, Capability::Sqd, "the driver knows no way from RTS to SQD")
}

/// The number of rounds of a test: `few`, or a multiple of it by `UVERBS_ROUNDS`, and `many` in a long run.
pub(crate) fn rounds(few: u64, many: u64) -> u64 {
    let more = var("UVERBS_ROUNDS").ok().and_then(|text| text.parse().ok()).unwrap_or(1);
    if var("UVERBS_SOAK").is_ok() { many } else { many.min(few * more) }
}

/// The tests that `UVERBS_TEST_NAMES` chooses by their whole names, with commas between them; `None` if it is not set.
/// A name of no test is an error, because a run without that test would pass.
pub(crate) fn chosen(known: &[&str]) -> Result<Option<Vec<String>>, String> {
    let Ok(names) = var("UVERBS_TEST_NAMES") else { return Ok(None) };
    let names: Vec<String> = names.split(',').map(|name| name.trim().to_owned()).collect();
    let unknown: Vec<&str> =
        names.iter().map(String::as_str).filter(|name| !known.contains(name)).collect();
    if !unknown.is_empty() {
        let unknown = unknown.join(", ");
        return Err(format!(
            "UVERBS_TEST_NAMES: no test is called \"{unknown}\"; --list shows the names"
        ));
    }
    Ok(Some(names))
}

/// Checks that the file that `UVERBS_TEST_JUNIT` names may be overwritten.
pub(crate) fn junit() -> Result<(), String> {
    let Some(path) = var_os("UVERBS_TEST_JUNIT").map(PathBuf::from) else { return Ok(()) };
    junit::check_place(&path)
        .map_err(|error| format!("UVERBS_TEST_JUNIT={}: {error}", path.display()))
}

/// Skips long tests.
pub(crate) fn soak() -> Verdict {
    require(var("UVERBS_SOAK").is_ok(), Capability::Soak, "UVERBS_SOAK is not set")
}

/// Bytes of a page of the running kernel.
pub(crate) fn page_size() -> usize {
    rustix::param::page_size()
}

/// Free huge pages of 2 MiB, the default size where ordinary pages have 4 KiB.
pub(crate) fn free_pages_of_2_mib() -> usize {
    let path = "/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages";
    // A kernel without such pages has no such file.
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.trim().parse().unwrap_or(0)
}

/// Free huge pages of the default size, of the whole machine.
pub(crate) fn free_huge_pages() -> Verdict<usize> {
    alone()?;
    let text = std::fs::read_to_string("/proc/meminfo")?;
    let line = text.lines().find_map(|line| line.strip_prefix("HugePages_Free:"));
    Ok(line.ok_or_else(|| Stop::fail("/proc/meminfo has no HugePages_Free"))?.trim().parse()?)
}

/// Whether the running kernel is this release of Linux or a later one.
pub(crate) fn kernel_is_since(major: u32, minor: u32) -> bool {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let mut numbers =
        release.split(|c: char| !c.is_ascii_digit()).map(|text| text.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) >= (major, minor)
}

/// Bytes of this process that the kernel has pinned for devices.
pub(crate) fn pinned_bytes() -> Verdict<usize> {
    let text = std::fs::read_to_string("/proc/self/status")?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmPin:"));
    let line = line.ok_or_else(|| Stop::fail("/proc/self/status has no VmPin"))?;
    Ok(line.trim().trim_end_matches(" kB").parse::<usize>()? * 1024)
}
