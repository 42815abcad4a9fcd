//! A running guest: QEMU, its console, and the channel over which PID 1 of the guest takes
//! commands.
//!
//! The other end of the channel is `lab-guest`.

use crate::arch::Arch;
use crate::machine::accelerator::Accelerator;
use crate::machine::device::{CONTROL, Companion, Device};
use crate::machine::monitor::Monitor;
use crate::machine::vcpus;
use crate::output::{self, errln};
use crate::packages::kernel::Kernel;
use crate::packages::qemu::Qemu;
use crate::run::jobs;
use crate::run::parent_death;
use crate::run::stages;
use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use connectx_vfio::control::Client;
use lab_guest::frame::{CHUNK, Frame, Kind};
use lab_guest::order::{Ending, Greeting, Order, PORT};
use std::collections::VecDeque;
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::rc::Rc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Lines of the console in the message of a failure.
const TAIL: usize = 40;

/// The configuration of QEMU and the guest.
pub(crate) struct Plan<'a> {
    /// The QEMU to run.
    pub(crate) qemu: &'a Qemu,
    /// The guest's processors.
    pub(crate) arch: Arch,
    /// KVM or TCG.
    pub(crate) accelerator: Accelerator,
    /// The kernel to boot.
    pub(crate) kernel: &'a Kernel,
    /// The device's part of the configuration.
    pub(crate) device: &'a Device,
    /// The initramfs; it is removed once the guest is ready.
    pub(crate) archive: &'a Path,
    /// The running companion of an earlier guest, in place of a new one.
    pub(crate) companion: Option<Rc<ChildGuard>>,
    /// The directory of the sockets.
    pub(crate) directory: &'a Path,
    /// The number of this guest in the directory.
    pub(crate) number: u32,
    /// How long the guest may take to be ready.
    pub(crate) patience: Duration,
    /// Copy the console to standard error as it comes.
    pub(crate) show_console: bool,
}

/// An event of a process in the guest.
#[derive(Debug)]
pub(crate) enum GuestEvent {
    /// Bytes of its standard output.
    Stdout(u32, Vec<u8>),
    /// Bytes of its standard error.
    Stderr(u32, Vec<u8>),
    /// Its end.
    Exit(u32, Ending),
}

/// A message from the guest.
enum FromGuest {
    Ready(Greeting),
    Broken(String),
    Event(GuestEvent),
    Gone(String),
}

/// The last lines of the console.
#[derive(Clone, Default)]
struct Console {
    lines: Arc<Mutex<VecDeque<String>>>,
    /// Copy everything to standard error as it comes.
    show: bool,
}

impl Console {
    fn push(&self, line: String) {
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        if lines.len() == TAIL {
            lines.pop_front();
        }
        lines.push_back(line);
    }

    /// Keeps the output of a process.
    fn follow_all(&self, process: &mut Child) {
        let streams: [Option<Box<dyn Read + Send>>; 2] = [
            process.stdout.take().map(|stream| Box::new(stream) as _),
            process.stderr.take().map(|stream| Box::new(stream) as _),
        ];
        for stream in streams.into_iter().flatten() {
            let console = self.clone();
            thread::spawn(move || console.follow(stream));
        }
    }

    fn follow(&self, mut stream: Box<dyn Read + Send>) {
        let mut pending = Vec::new();
        let mut buffer = [0; 4096];
        while let Ok(length) = stream.read(&mut buffer) {
            if length == 0 {
                break;
            }
            if self.show {
                output::pass_on(&buffer[..length]);
            }
            pending.extend_from_slice(&buffer[..length]);
            while let Some(end) = pending.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = pending.drain(..=end).collect();
                self.push(printable(&line));
            }
        }
        if !pending.is_empty() {
            self.push(printable(&pending));
        }
    }

    fn tail(&self) -> String {
        let lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        if lines.is_empty() {
            return "(the console is empty)".into();
        }
        lines.iter().map(String::as_str).collect::<Vec<_>>().join("\n")
    }
}

/// A running guest; dropping it kills QEMU.
pub(crate) struct Vm {
    // Dropped in this order: the emulated device outlives the guest.
    qemu: ChildGuard,
    companion: Option<Rc<ChildGuard>>,
    console: Console,
    channel: UnixStream,
    from_guest: Receiver<FromGuest>,
    next_process: u32,
    /// The run directory.
    directory: File,
    number: u32,
    /// The guest's message that it is ready.
    pub(crate) greeting: Greeting,
    /// From starting QEMU to the guest being ready.
    pub(crate) boot_time: Duration,
}

impl Vm {
    /// Boots and waits until the guest is ready. The kernel kills QEMU when the calling thread
    /// ends, so the guest stays on that thread.
    pub(crate) fn boot(mut plan: Plan<'_>) -> Result<Self> {
        let start = Instant::now();
        let console = Console { show: plan.show_console, ..Console::default() };
        let companion = match (plan.companion.take(), &plan.device.companion) {
            (Some(running), _) => Some(running),
            (None, Some(new)) => Some(Rc::new(accompany(new, plan.directory, &console)?)),
            (None, None) => None,
        };
        let (host, guest) = UnixStream::pair()?;
        // A guest that no longer reads must not block the lab.
        host.set_write_timeout(Some(Duration::from_secs(30)))?;
        let mut command = parent_death::die_with_this_thread(&command_line(&plan));
        let mut qemu = ChildGuard::new(
            command
                .current_dir(plan.directory)
                .stdin(Stdio::from(OwnedFd::from(guest)))
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .context("start QEMU")?,
        );
        drop(command);
        console.follow_all(&mut qemu.0);
        let (sender, from_guest) = channel();
        let mut reading = host.try_clone()?;
        thread::spawn(move || {
            loop {
                let message = receive(&mut reading);
                let last = matches!(message, FromGuest::Gone(_));
                if sender.send(message).is_err() || last {
                    return;
                }
            }
        });
        let mut vm = Self {
            qemu,
            companion,
            console,
            channel: host,
            from_guest,
            next_process: 1,
            directory: File::open(plan.directory)?,
            number: plan.number,
            greeting: Greeting { release: String::new(), devices: Vec::new(), uptime: 0 },
            boot_time: Duration::ZERO,
        };
        let ready = vm.wait_until_ready(plan.patience);
        // QEMU has read the initramfs by now, or has failed.
        std::fs::remove_file(plan.archive)?;
        ready?;
        vm.boot_time = start.elapsed();
        // Where the host does not allow that, the device is slower. Parallel guests keep equal
        // priorities.
        let others = jobs::beside_others();
        if (vm.companion.is_some() || others)
            && let Err(error) =
                vm.processors().and_then(|threads| vcpus::give_way(&threads, others))
        {
            errln!("the machine's processors keep their priority: {error:#}");
        }
        Ok(vm)
    }

    fn wait_until_ready(&mut self, patience: Duration) -> Result<()> {
        match self.from_guest.recv_timeout(patience) {
            Ok(FromGuest::Ready(greeting)) => {
                self.greeting = greeting;
                Ok(())
            }
            Ok(FromGuest::Broken(why)) => {
                Err(self.failure(&format!("the guest is not usable: {why}")))
            }
            Ok(FromGuest::Gone(why)) => {
                Err(self.failure(&format!("the machine ended early: {why}")))
            }
            Ok(FromGuest::Event(_)) => Err(self.failure("the guest spoke before it was ready")),
            Err(_) => Err(self.failure(&format!("not ready after {} s", patience.as_secs()))),
        }
    }

    /// Makes the guest reboot, and waits until it is ready again. Its devices stay the same.
    pub(crate) fn reboot(&mut self, patience: Duration) -> Result<()> {
        let mut monitor = self.monitor()?;
        monitor.order("set-action", serde_json::json!({ "reboot": "reset" }))?;
        let command = ["reboot", "-f"].map(str::to_owned).to_vec();
        self.start(&Order { command, root: true, ..Order::default() })?;
        self.wait_until_ready(patience)?;
        monitor.order("set-action", serde_json::json!({ "reboot": "shutdown" }))?;
        Ok(())
    }

    /// The process that serves its device, for a later or a parallel guest.
    pub(crate) fn companion(&self) -> Option<Rc<ChildGuard>> {
        self.companion.clone()
    }

    /// Kills QEMU without warning; the companion lives while an `Rc` of it does.
    pub(crate) fn tear_out(&mut self) {
        self.qemu.end();
    }

    /// A connection to QEMU's monitor.
    pub(crate) fn monitor(&self) -> Result<Monitor> {
        Monitor::connect(&self.socket(&monitor(self.number)))
    }

    /// The host threads of its virtual processors.
    fn processors(&self) -> Result<Vec<i32>> {
        let answer = self.monitor()?.order("query-cpus-fast", serde_json::json!({}))?;
        let threads = answer.as_array().context("no list of processors")?.iter();
        threads
            .map(|one| one["thread-id"].as_i64().and_then(|number| number.try_into().ok()))
            .collect::<Option<_>>()
            .context("a processor without thread")
    }

    /// A connection to the control socket of the emulated ConnectX.
    pub(crate) fn control(&self) -> Result<Client> {
        Client::connect(&self.socket(CONTROL)).context("the emulator's control socket")
    }

    /// A path to a socket in the run directory, short enough for `sun_path` wherever the directory
    /// is.
    fn socket(&self, name: &str) -> PathBuf {
        format!("/proc/self/fd/{}/{name}", self.directory.as_raw_fd()).into()
    }

    /// Whether QEMU has ended.
    pub(crate) fn ended(&mut self) -> bool {
        stages::has_ended(self.qemu.0.id())
    }

    /// Kills a guest that failed, and returns an error with the end of the console.
    pub(crate) fn failure(&mut self, what: &str) -> anyhow::Error {
        self.qemu.end();
        // QEMU's last output is still in the pipes.
        thread::sleep(Duration::from_millis(100));
        anyhow::anyhow!("{what}\n--- the console's last lines ---\n{}", self.console.tail())
    }

    /// Starts a process and returns its number.
    pub(crate) fn start(&mut self, order: &Order) -> Result<u32> {
        let process = self.next_process;
        self.next_process += 1;
        self.send(Kind::Run, process, serde_json::to_vec(order)?)?;
        Ok(process)
    }

    /// A handle for writing to processes from another thread.
    pub(crate) fn feeder(&self) -> Result<Feeder> {
        Ok(Feeder { channel: self.channel.try_clone()? })
    }

    /// Ends a process's standard input.
    pub(crate) fn end_input(&mut self, process: u32) -> Result<()> {
        self.send(Kind::StdinEnd, process, Vec::new())
    }

    fn send(&mut self, kind: Kind, process: u32, payload: Vec<u8>) -> Result<()> {
        Frame { kind, process, payload }
            .write_to(&mut self.channel)
            .map_err(|error| self.failure(&format!("the guest does not listen: {error}")))
    }

    /// The next event; `None` if there is none until the deadline.
    pub(crate) fn next_event(&mut self, deadline: Instant) -> Result<Option<GuestEvent>> {
        let left = deadline.saturating_duration_since(Instant::now());
        match self.from_guest.recv_timeout(left) {
            Ok(FromGuest::Event(event)) => Ok(Some(event)),
            Ok(FromGuest::Gone(why)) | Ok(FromGuest::Broken(why)) => {
                Err(self.failure(&format!("the machine ended: {why}")))
            }
            Ok(FromGuest::Ready(_)) => Err(self.failure("the guest started twice")),
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => Err(self.failure("the machine ended")),
        }
    }

    /// Runs one process without input to its end, and passes its output to `sink`.
    pub(crate) fn run(
        &mut self,
        order: &Order,
        timeout: Duration,
        mut sink: impl FnMut(&GuestEvent),
    ) -> Result<Ending> {
        let process = self.start(order)?;
        self.end_input(process)?;
        self.wait(process, timeout, &mut sink)
    }

    /// Waits for a process to end.
    pub(crate) fn wait(
        &mut self,
        process: u32,
        timeout: Duration,
        sink: &mut dyn FnMut(&GuestEvent),
    ) -> Result<Ending> {
        let deadline = Instant::now() + timeout;
        loop {
            match self.next_event(deadline)? {
                Some(GuestEvent::Exit(ended, ending)) if ended == process => return Ok(ending),
                Some(event) => sink(&event),
                None => {
                    let text = format!("still running after {} s", timeout.as_secs());
                    return Err(self.failure(&text));
                }
            }
        }
    }

    /// Powers the guest off and waits a little, so that its devices are shut down in order.
    pub(crate) fn power_off(mut self) -> Result<()> {
        self.send(Kind::PowerOff, 0, Vec::new())?;
        let deadline = Instant::now() + Duration::from_secs(10);
        while Instant::now() < deadline {
            if stages::has_ended(self.qemu.0.id()) {
                return Ok(());
            }
            thread::sleep(Duration::from_millis(10));
        }
        // Dropping kills a guest that did not power off, without a loss.
        Ok(())
    }
}

/// A process that is killed when it goes out of scope.
pub(crate) struct ChildGuard(Child);

impl ChildGuard {
    fn new(process: Child) -> Self {
        stages::alive(process.id());
        Self(process)
    }

    /// Its processor time so far.
    pub(crate) fn processor_time(&self) -> Result<Duration> {
        let path = format!("/proc/{}/stat", self.0.id());
        let stat = std::fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
        // The name may contain anything. Behind it, user and system time are the 12th and 13th
        // fields.
        let fields = stat.rsplit_once(')').map(|(_, fields)| fields).unwrap_or_default();
        let ticks: u64 = fields
            .split_whitespace()
            .skip(11)
            .take(2)
            .filter_map(|text| text.parse::<u64>().ok())
            .sum();
        Ok(Duration::from_secs_f64(ticks as f64 / rustix::param::clock_ticks_per_second() as f64))
    }

    fn end(&mut self) {
        // It fails only if the process has ended already.
        let _ended = self.0.kill();
        stages::wait_and_count(self.0.id());
        let _reaped = self.0.wait();
    }
}

impl Drop for ChildGuard {
    fn drop(&mut self) {
        self.end();
    }
}

/// The name of QEMU's monitor socket in the run directory.
fn monitor(number: u32) -> String {
    format!("monitor-{number}")
}

/// Starts a device's companion and waits for its sockets.
fn accompany(companion: &Companion, directory: &Path, console: &Console) -> Result<ChildGuard> {
    for socket in &companion.sockets {
        // It was left by an earlier guest of this run.
        let _absent = std::fs::remove_file(directory.join(socket));
    }
    let (program, arguments) =
        companion.command.split_first().context("a companion without a program")?;
    let mut command = std::process::Command::new(program);
    command.args(arguments).current_dir(directory);
    let mut process = ChildGuard::new(
        parent_death::die_with_this_thread(&command)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("start {program:?}"))?,
    );
    console.follow_all(&mut process.0);
    let deadline = Instant::now() + Duration::from_secs(10);
    while !companion.sockets.iter().all(|socket| directory.join(socket).exists()) {
        if let Some(status) = process.0.try_wait()? {
            thread::sleep(Duration::from_millis(100));
            bail!("{program:?} ended ({status}):\n{}", console.tail());
        }
        if Instant::now() >= deadline {
            bail!("{program:?} makes no socket:\n{}", console.tail());
        }
        thread::sleep(Duration::from_millis(10));
    }
    Ok(process)
}

/// Sends input and signals to processes in the guest.
pub(crate) struct Feeder {
    channel: UnixStream,
}

impl Feeder {
    /// Copies everything from a reader to a process's standard input, then ends that.
    pub(crate) fn copy(&mut self, process: u32, mut from: impl Read) -> std::io::Result<()> {
        let mut buffer = vec![0; CHUNK];
        loop {
            let length = match from.read(&mut buffer) {
                Ok(length) => length,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            let (kind, payload) = match length {
                0 => (Kind::StdinEnd, Vec::new()),
                _ => (Kind::Stdin, buffer[..length].to_vec()),
            };
            Frame { kind, process, payload }.write_to(&mut self.channel)?;
            if length == 0 {
                return Ok(());
            }
        }
    }
}

/// A line without the terminal sequences that firmware sends.
fn printable(line: &[u8]) -> String {
    let text = String::from_utf8_lossy(line);
    let mut plain = String::new();
    let mut rest = text.chars().peekable();
    while let Some(character) = rest.next() {
        if character == '\u{1b}' {
            // `ESC [ parameters letter`, or `ESC letter`.
            if rest.next_if_eq(&'[').is_some() {
                while rest.next_if(|next| !next.is_ascii_alphabetic()).is_some() {}
            }
            rest.next();
        } else if !character.is_control() || character == '\t' {
            plain.push(character);
        }
    }
    plain.trim_end().to_owned()
}

fn receive(from: &mut UnixStream) -> FromGuest {
    let frame = match Frame::read_from(from) {
        Ok(Some(frame)) => frame,
        Ok(None) => return FromGuest::Gone("its channel closed".into()),
        Err(error) => return FromGuest::Gone(format!("its channel failed: {error}")),
    };
    let process = frame.process;
    match frame.kind {
        Kind::Ready => match serde_json::from_slice(&frame.payload) {
            Ok(greeting) => FromGuest::Ready(greeting),
            Err(error) => FromGuest::Gone(format!("unreadable greeting: {error}")),
        },
        Kind::Broken => FromGuest::Broken(String::from_utf8_lossy(&frame.payload).into_owned()),
        Kind::Stdout => FromGuest::Event(GuestEvent::Stdout(process, frame.payload)),
        Kind::Stderr => FromGuest::Event(GuestEvent::Stderr(process, frame.payload)),
        Kind::Exit => match serde_json::from_slice(&frame.payload) {
            Ok(ending) => FromGuest::Event(GuestEvent::Exit(process, ending)),
            Err(error) => FromGuest::Gone(format!("unreadable ending: {error}")),
        },
        kind => FromGuest::Gone(format!("the guest sent {kind:?}")),
    }
}

/// The board.
fn machine(arch: Arch) -> &'static str {
    match arch {
        Arch::X86_64 => "q35,usb=off,vmport=off,smbus=off,sata=off,graphics=off,hpet=off",
        // The translation service of this interrupt controller takes the MSI-X of PCI functions.
        Arch::Aarch64 => "virt,gic-version=3,its=on",
    }
}

/// The processor. An emulated one lacks features that cost a translator time and give the guest nothing:
/// five-level page tables, signed pointers, vectors.
fn processor_model(arch: Arch, accelerator: Accelerator) -> &'static str {
    match (arch, accelerator) {
        (_, Accelerator::Kvm) => "host",
        (Arch::X86_64, _) => "max,la57=off",
        (Arch::Aarch64, _) => "max,pauth=off,sve=off,sme=off",
    }
}

fn command_line(plan: &Plan<'_>) -> std::process::Command {
    const MEMORY: &str = "2G";
    let mut command = plan.qemu.command();
    command.args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]);
    command.args(["-name", "uverbs-lab", "-m", MEMORY]);
    command.args(["-machine", machine(plan.arch)]);
    command.args(plan.accelerator.arguments());
    command.args(["-cpu", processor_model(plan.arch, plan.accelerator)]);
    if plan.device.shared_memory {
        command.arg("-object");
        command.arg(format!("memory-backend-memfd,id=memory,size={MEMORY},share=on"));
        command.args(["-numa", "node,memdev=memory"]);
    }
    command.arg("-kernel").arg(&plan.kernel.image);
    command.arg("-initrd").arg(plan.archive);
    let mut parameters = String::from(
        "quiet loglevel=4 panic=-1 rdinit=/init mitigations=off nokaslr random.trust_cpu=on audit=0 \
         selinux=0 apparmor=0 cryptomgr.notests transparent_hugepage=never net.ifnames=0 ",
    );
    parameters.push_str(match plan.arch {
        Arch::X86_64 => "console=ttyS0 reboot=t no_timer_check tsc=reliable",
        Arch::Aarch64 => "console=ttyAMA0",
    });
    if plan.kernel.only_signed {
        parameters.push_str(" module.sig_enforce=1");
    }
    command.args(["-append", &parameters]);
    command.args(["-chardev", "file,id=console,path=/dev/fd/1", "-serial", "chardev:console"]);
    command.args(["-chardev", "socket,id=lab,fd=0"]);
    command.args(["-device", "virtio-serial-pci,max_ports=2"]);
    command.arg("-device").arg(format!("virtserialport,chardev=lab,name={PORT}"));
    command.arg("-qmp").arg(format!("unix:{},server=on,wait=off", monitor(plan.number)));
    command.args(&plan.device.qemu);
    command
}

/// Fails unless the host can run the packages and binaries that the lab starts on it.
pub(crate) fn check_host() -> Result<()> {
    match unfit(std::env::consts::OS, std::env::consts::ARCH) {
        Some(why) => bail!(why),
        None => Ok(()),
    }
}

/// Why a machine cannot be the host, with the remedy.
fn unfit(system: &str, processor: &str) -> Option<String> {
    let bundled = Arch::value_variants().iter().find(|arch| arch.label() == processor);
    let advice = match (system, bundled) {
        ("linux", Some(Arch::X86_64)) => return None,
        ("linux", Some(arch)) => format!(
            ": to test a device of this machine, run `cargo ci bundle --arch {}` there, and copy the suite \
             here (docs/HARDWARE.md)",
            arch.label()
        ),
        _ => String::new(),
    };
    Some(format!("the lab runs on x86_64 Linux, and this is {processor} {system}{advice}"))
}

#[cfg(test)]
mod tests {
    use super::{printable, unfit};
    use crate::arch::Arch;
    use clap::ValueEnum;

    #[test]
    fn terminal_sequences_are_taken_out() {
        assert_eq!(printable(b"\x1bc\x1b[?7l\x1b[2J\x1b[0mSeaBIOS (1.17)\r\n"), "SeaBIOS (1.17)");
        assert_eq!(printable(b"a\x1b[31mb\x1b[0m"), "ab");
    }

    #[test]
    fn only_x86_64_linux_is_a_host_and_others_learn_what_to_do() {
        assert_eq!(unfit("linux", "x86_64"), None);
        let aarch64 = unfit("linux", "aarch64").unwrap();
        let (_, advised) = aarch64.split_once("`cargo ci bundle --arch ").expect("the command");
        assert_eq!(Arch::from_str(advised.split('`').next().unwrap(), false), Ok(Arch::Aarch64));
        for (system, processor) in [("linux", "riscv64"), ("macos", "x86_64"), ("macos", "aarch64")]
        {
            let why = unfit(system, processor).unwrap();
            assert!(why.contains(processor) && why.contains(system), "{why}");
            assert!(!why.contains("bundle"), "{why}");
        }
    }
}
