//! `cargo ci demo`: two processes built from this workspace exchange messages over the kernel's
//! soft-RoCE, or over a device of this machine.
//!
//! Success means that both sides checked every byte that arrived.

use crate::arch::Arch;
use crate::commands::exec::show;
use crate::machine::device::DeviceName;
use crate::machine::session::{Machine, Session};
use crate::machine::vm::{self, GuestEvent, Vm};
use crate::output::{self, out, outln};
use crate::packages::fetch::Needs;
use crate::packages::kernel::KernelName;
use crate::run::stages;
use crate::workspace::{Profile, Workspace};
use anyhow::{Context, Result, bail};
use clap::Args;
use lab_guest::order::Order;
use std::path::PathBuf;
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// How long the whole exchange may take once devices are there.
const PATIENCE: Duration = Duration::from_secs(120);

/// `cargo ci demo`
#[derive(Args, Clone, Debug)]
pub(crate) struct DemoArguments {
    /// Use an RDMA device of this machine instead of a VM; the first by name unless one is named
    #[arg(long, value_name = "DEV", num_args = 0..=1)]
    native: Option<Option<String>>,
    /// The processors of the VM
    #[arg(long, value_enum, default_value = "x86_64", conflicts_with = "native")]
    arch: Arch,
    /// Messages in each direction
    #[arg(long, default_value_t = 1000)]
    iters: u64,
    /// Show the kernel's console
    #[arg(long)]
    console: bool,
}

/// Runs the demonstration.
pub(crate) fn demo(arguments: &DemoArguments) -> Result<ExitCode> {
    vm::check_host()?;
    match &arguments.native {
        Some(device) => native(arguments, device.as_deref()),
        None => lab(arguments),
    }?;
    outln!("\nEvery message arrived intact on both sides.");
    Ok(ExitCode::SUCCESS)
}

fn program(workspace: &Workspace) -> Result<PathBuf> {
    if !workspace.has("uverbs-cli", "bin", "uverbs") {
        bail!("{} has no program `uverbs`", workspace.root().display());
    }
    let _stage = stages::stage("build: command line");
    workspace.static_program("uverbs-cli", "uverbs", Profile::Release)
}

fn words(words: &[&str]) -> Vec<String> {
    words.iter().map(|word| (*word).to_owned()).collect()
}

/// The server's command and the client's, which differ by device and by knowing the server's host.
fn ping_pong(program: &str, iters: u64, devices: [&str; 2], host: &str) -> [Vec<String>; 2] {
    let iters = iters.to_string();
    let [server, mut client] = devices.map(|device| {
        let mut command = words(&[program, "pingpong", "rc", "--validate", "--wait", "30"]);
        command.extend(words(&["--iters", &iters, "--device", device]));
        command
    });
    client.push(host.to_owned());
    [server, client]
}

fn lab(arguments: &DemoArguments) -> Result<()> {
    let kernel = KernelName::Newest;
    let needs = Needs::kernels(arguments.arch, &[kernel]);
    let session = Session::open(&needs, arguments.console)?;
    let programs = [("uverbs".to_owned(), program(&session.workspace)?)];
    let mut vm =
        session.boot(&Machine { programs: &programs, ..Machine::new(kernel, DeviceName::Rxe) })?;
    outln!(
        "Linux {} is up after {:.1} s with {}.\n",
        vm.greeting.release,
        vm.boot_time.as_secs_f64(),
        vm.greeting.devices.join(" and ")
    );
    let _stage = stages::stage("the exchange");
    let order = Order { command: words(&["uverbs", "devinfo"]), ..Order::default() };
    outln!("$ uverbs devinfo");
    let ending = vm.run(&order, PATIENCE, show)?;
    if ending.status() != 0 {
        bail!("uverbs devinfo ended with status {}", ending.status());
    }
    let [server, client] = ping_pong("uverbs", arguments.iters, ["rxe0", "rxe1"], "10.0.0.1");
    outln!("\n$ {} &\n$ {}", server.join(" "), client.join(" "));
    exchange(&mut vm, server, client)?;
    vm.power_off()
}

/// A process of the exchange.
struct Side {
    name: &'static str,
    process: u32,
    /// Its output since the last whole line.
    pending: Vec<u8>,
    ended: bool,
}

impl Side {
    /// Shows whole lines with the side's name before them.
    fn print(&mut self, bytes: &[u8]) {
        self.pending.extend_from_slice(bytes);
        while let Some(end) = self.pending.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.pending.drain(..=end).collect();
            out!("{}: {}", self.name, String::from_utf8_lossy(&line));
        }
    }
}

/// Runs both sides in the guest, and prints their output as it comes.
fn exchange(vm: &mut Vm, server: Vec<String>, client: Vec<String>) -> Result<()> {
    let mut sides = Vec::new();
    for (name, command) in [("server", server), ("client", client)] {
        let process = vm.start(&Order { command, ..Order::default() })?;
        vm.end_input(process)?;
        sides.push(Side { name, process, pending: Vec::new(), ended: false });
    }
    let deadline = Instant::now() + PATIENCE;
    while !sides.iter().all(|side| side.ended) {
        let Some(event) = vm.next_event(deadline)? else {
            return Err(vm.failure(&format!("no end after {} s", PATIENCE.as_secs())));
        };
        let (GuestEvent::Stdout(process, _)
        | GuestEvent::Stderr(process, _)
        | GuestEvent::Exit(process, _)) = event;
        let Some(side) = sides.iter_mut().find(|side| side.process == process) else { continue };
        match event {
            GuestEvent::Stdout(_, bytes) | GuestEvent::Stderr(_, bytes) => side.print(&bytes),
            GuestEvent::Exit(_, ending) => {
                if !side.pending.is_empty() {
                    side.print(b"\n");
                }
                side.ended = true;
                if ending.status() != 0 {
                    bail!("the {} ended with status {}", side.name, ending.status());
                }
            }
        }
    }
    Ok(())
}

fn native(arguments: &DemoArguments, device: Option<&str>) -> Result<()> {
    let device = match device {
        Some(device) => device.to_owned(),
        None => first_device()?,
    };
    let program = program(&Workspace::find()?)?.display().to_string();
    outln!("$ uverbs devinfo {device}");
    let _stage = stages::stage("the exchange");
    let status = Command::new(&program).args(["devinfo", &device]).status()?;
    check("uverbs devinfo", status)?;
    let [server, client] = ping_pong(&program, arguments.iters, [&device, &device], "127.0.0.1");
    outln!("\n$ {} &\n$ {}", server.join(" "), client.join(" "));
    let mut running = Vec::new();
    for (side, command) in [("server", server), ("client", client)] {
        let child = Command::new(&command[0])
            .args(&command[1..])
            .stdin(Stdio::null())
            .spawn()
            .with_context(|| format!("start the {side}"))?;
        running.push((side, child));
    }
    let outcome = wait_for_all(&mut running);
    for (_, child) in &mut running {
        // Those that have ended already cannot be killed.
        let _ended = child.kill();
        child.wait()?;
    }
    outcome
}

/// Fails if a program on this machine failed. One whose reader is gone said so by its status.
fn check(what: &str, status: ExitStatus) -> Result<()> {
    match status.code() {
        Some(0) => Ok(()),
        Some(code) if code == i32::from(output::CLOSED) => crate::end(output::CLOSED),
        _ => bail!("{what} failed: {status}"),
    }
}

fn wait_for_all(running: &mut [(&str, Child)]) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let mut all = true;
        for (side, child) in &mut *running {
            match child.try_wait()? {
                Some(status) => check(&format!("the {side}"), status)?,
                None => all = false,
            }
        }
        if all {
            return Ok(());
        }
        if Instant::now() >= deadline {
            bail!("no end after {} s", PATIENCE.as_secs());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The first by name of the RDMA devices that this machine has, usable or not.
fn first_device() -> Result<String> {
    let mut names: Vec<String> = std::fs::read_dir("/sys/class/infiniband")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect();
    names.sort();
    names.into_iter().next().context(
        "this machine has no RDMA device; without --native the demonstration makes one in a VM",
    )
}

#[cfg(test)]
mod tests {
    use super::ping_pong;

    #[test]
    fn only_the_client_names_a_host() {
        for devices in [["rxe0", "rxe1"], ["mlx5_0", "mlx5_0"]] {
            let [server, client] = ping_pong("uverbs", 10, devices, "10.0.0.1");
            assert!(!server.contains(&"10.0.0.1".to_owned()));
            assert_eq!(client.last().map(String::as_str), Some("10.0.0.1"));
            assert_eq!(server.last().map(String::as_str), Some(devices[0]));
        }
    }
}
