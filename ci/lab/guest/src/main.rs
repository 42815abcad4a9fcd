//! PID 1 of the lab's guests: mounts, loads modules, makes links, then starts the programs that the
//! host orders over the channel and reports how they ended. The host end is `machine/vm.rs` of `lab`.
//!
//! The same file serves under three more names: `lab-launch` puts limits and a user on a process
//! before it becomes the ordered program, `lab-count` counts a program's system calls, and
//! `modprobe` loads modules, for the kernel's own requests and for tests that run as root.

#![forbid(unsafe_code)]
#![deny(clippy::print_stdout, clippy::print_stderr, clippy::disallowed_methods)]

#[cfg(target_arch = "x86_64")]
mod call;
mod channel;
#[cfg(target_arch = "x86_64")]
mod count;
mod launch;
mod link;
mod modules;
mod mounts;
mod netlink;
/// Shared with the command line.
#[path = "../../../../cli/src/output.rs"]
mod output;
mod processes;

use lab_guest::frame::Kind;
use lab_guest::order::{Greeting, GuestSetup, Network, SETUP_PATH};
use nix::sys::reboot::{RebootMode, reboot};
use output::errln;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};
use std::{env, fs, thread};

/// An error that already names the failed step.
type Failure = Box<dyn std::error::Error>;

/// The name in front of error messages.
const NAME: &str = "lab";

/// Ends the program early, because standard output failed.
fn end(status: u8) -> ! {
    std::process::exit(status.into())
}

fn main() -> ExitCode {
    let name = env::args().next().unwrap_or_default();
    match Path::new(&name).file_name().and_then(|name| name.to_str()) {
        Some("lab-launch") => launch::become_ordered(),
        #[cfg(target_arch = "x86_64")]
        Some("lab-count") => count::count(),
        #[cfg(not(target_arch = "x86_64"))]
        Some("lab-count") => {
            errln!("lab-count: system calls are counted on x86_64 only");
            ExitCode::from(126)
        }
        Some("modprobe") => modules::modprobe(env::args().skip(1)),
        _ if std::process::id() == 1 => {
            if let Err(failure) = serve() {
                // The console is all that is left; the host shows its tail.
                errln!("lab: {failure}");
            }
            power_off()
        }
        _ => {
            errln!("lab-init is the first process of a virtual machine and nothing else");
            ExitCode::from(2)
        }
    }
}

fn power_off() -> ! {
    nix::unistd::sync();
    let failure = reboot(RebootMode::RB_POWER_OFF);
    errln!("lab: power off: {failure:?}");
    loop {
        thread::sleep(Duration::from_secs(3600));
    }
}

/// Huge pages of the default size and of 2 MiB for tests: a small part of the guest's memory, though the
/// former have 32 MiB where ordinary pages have 16 KiB.
const HUGE_PAGES: [(&str, &str); 2] = [
    ("/proc/sys/vm/nr_hugepages", "2"),
    ("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "8"),
];

fn serve() -> Result<(), Failure> {
    mounts::mount_all()?;
    let mut modules = modules::Modules::read()?;
    // Built in on newer kernels, modules on older ones: the channel itself needs them.
    for needed in ["virtio_pci", "virtio_console"] {
        modules.load(needed)?;
    }
    let channel = channel::Channel::open(Duration::from_secs(20))?;
    match set_up(&mut modules) {
        Ok(greeting) => channel.sender().send(Kind::Ready, 0, serde_json::to_vec(&greeting)?)?,
        Err(failure) => {
            channel.sender().send(Kind::Broken, 0, failure.to_string().into_bytes())?;
            return Err(failure);
        }
    }
    processes::serve(channel)
}

fn set_up(modules: &mut modules::Modules) -> Result<Greeting, Failure> {
    let setup: GuestSetup = serde_json::from_slice(
        &fs::read(SETUP_PATH).map_err(|error| format!("read {SETUP_PATH}: {error}"))?,
    )?;
    if setup.network != Network::None {
        link::relax()?;
    }
    for module in &setup.modules {
        modules.load(module)?;
    }
    if let Some(files) = &setup.host {
        mounts::mount_host(files)?;
    }
    link::bring_up_loopback()?;
    if setup.network == Network::SoftRoce {
        link::make_soft_roce_pair()?;
    }
    let devices = wait_for_devices(setup.devices, Duration::from_secs(setup.patience.into()))?;
    if setup.network == Network::Ports {
        link::connect_ports(&devices)?;
    }
    // Reserved early, while memory is not fragmented.
    for (path, count) in HUGE_PAGES {
        fs::write(path, count).map_err(|error| format!("write {path}: {error}"))?;
    }
    // A desktop's login gives it to the user as well.
    if Path::new("/dev/udmabuf").exists() {
        fs::set_permissions("/dev/udmabuf", fs::Permissions::from_mode(0o666))?;
    }
    let release = fs::read_to_string("/proc/sys/kernel/osrelease")?.trim().to_owned();
    let uptime = fs::read_to_string("/proc/uptime")?
        .split_whitespace()
        .next()
        .and_then(|seconds| seconds.parse::<f64>().ok())
        .map_or(0, |seconds| (seconds * 1000.0) as u64);
    Ok(Greeting { release, devices, uptime })
}

/// RDMA devices that have a character device, sorted.
fn devices() -> Vec<String> {
    let mut found: Vec<String> = fs::read_dir("/sys/class/infiniband_verbs")
        .into_iter()
        .flatten()
        .flatten()
        .filter(|entry| Path::new("/dev/infiniband").join(entry.file_name()).exists())
        .filter_map(|entry| fs::read_to_string(entry.path().join("ibdev")).ok())
        .map(|name| name.trim().to_owned())
        .collect();
    found.sort();
    found
}

fn wait_for_devices(count: u32, patience: Duration) -> Result<Vec<String>, Failure> {
    let start = Instant::now();
    loop {
        let found = devices();
        if found.len() >= count as usize {
            return Ok(found);
        }
        if start.elapsed() > patience {
            return Err(format!(
                "{count} RDMA device(s) expected, found [{}] after {} s",
                found.join(", "),
                patience.as_secs()
            )
            .into());
        }
        thread::sleep(Duration::from_millis(20));
    }
}
