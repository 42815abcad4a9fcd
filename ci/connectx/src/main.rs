//! `connectx`: serves emulated ConnectX functions over vfio-user.
#![deny(clippy::print_stdout, clippy::print_stderr, clippy::disallowed_methods)]

/// Shared with the command line.
#[path = "../../../cli/src/output.rs"]
mod output;
/// Shared with the command line.
#[path = "../../../cli/src/share/socket.rs"]
mod socket;

use std::fs::File;
use std::io::{self, BufReader, BufWriter, Write};
use std::num::NonZeroU64;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{ExitCode, exit};
use std::sync::{LazyLock, Mutex};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use clap::{Parser, Subcommand, ValueEnum};
use connectx_vfio::golden::TestVectors;
use connectx_vfio::log_limiter::LogLimiter;
use connectx_vfio::vfio::connection::StreamError;
use connectx_vfio::vfio::session::{Served, Session};
use connectx_vfio::{control, decode};
use output::errln;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::thread::set_current_timer_slack;
use socket::Listening;
use uverbs_connectx::fabric::Fabric;
use uverbs_connectx::options::{Options, PortType};
use uverbs_connectx::recording::Recorder;

/// Emulates a ConnectX-5 PCI function for each socket, all behind one switch.
#[derive(Parser)]
#[command(version, args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
struct Arguments {
    #[command(subcommand)]
    command: Option<Command>,
    /// Socket to which QEMU's vfio-user-pci connects; each one is a function.
    #[arg(long = "socket", required = true)]
    sockets: Vec<PathBuf>,
    /// Socket of a data-direct function, as a ConnectX-8 has: the first is of the first function.
    #[arg(long, value_name = "SOCKET")]
    data_direct: Vec<PathBuf>,
    /// Gives the functions a clock of real time, which shows this machine's at the start: queues may have timestamps of
    /// it.
    #[arg(long)]
    real_time: bool,
    /// Type of the ports.
    #[arg(long, value_enum, default_value_t = PortTypeArg::Eth)]
    port_type: PortTypeArg,
    /// Refuses data in BlueFlame registers.
    #[arg(long)]
    no_wc: bool,
    /// Makes the driver register memory with commands instead of UMR.
    #[arg(long)]
    minimal: bool,
    /// Lets the guest map VAR pages and device memory: accesses to them need no message, but every doorbell waits for a
    /// reply.
    #[arg(long)]
    map: bool,
    /// Partition keys of the ports, in hexadecimal and from index 0 on, with commas between them.
    #[arg(long, value_name = "KEYS", value_delimiter = ',', value_parser = pkey, default_value = "ffff")]
    pkey: Vec<u16>,
    /// Control socket, where tests inspect functions and inject faults: JSON lines, see
    /// `control.rs`.
    #[arg(long)]
    control: Option<PathBuf>,
    /// Records the input and output of each function, in `functionN.record` of this directory.
    #[arg(long, value_name = "DIR")]
    record: Option<PathBuf>,
    /// Writes the packets between Ethernet ports into this file, in the format of pcap: RoCE v2, for Wireshark.
    #[arg(long, value_name = "FILE")]
    capture: Option<PathBuf>,
    /// Least severe level that is logged to standard error.
    #[arg(long, default_value = "warn")]
    log: log::LevelFilter,
}

fn pkey(text: &str) -> Result<u16, std::num::ParseIntError> {
    u16::from_str_radix(text.trim_start_matches("0x"), 16)
}

/// Commands on recordings.
#[derive(Subcommand)]
enum Command {
    /// Prints recordings
    Decode {
        /// Files that `--record` made.
        #[arg(required = true)]
        files: Vec<PathBuf>,
    },
    /// Prints one of each kind of WQE, CQE and doorbell of user-space queues, as test vectors
    Golden {
        /// A program that ran during the recording, with its options; once for each program, in
        /// order.
        #[arg(long, required = true)]
        by: Vec<String>,
        /// Files that `--record` made.
        #[arg(required = true)]
        files: Vec<PathBuf>,
    },
}

#[derive(Clone, Copy, ValueEnum)]
enum PortTypeArg {
    /// RoCE and Ethernet.
    Eth,
    /// InfiniBand.
    Ib,
}

/// Prints the log. Repeated warnings and errors become rare, unless a lower level is logged too.
struct Log(Mutex<LogLimiter>);

impl log::Log for Log {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        let level = record.level().as_str().to_lowercase();
        let line = record.args().to_string();
        let count = match self.0.lock() {
            Ok(mut seen) if log::max_level() <= log::LevelFilter::Warn => seen.count(&line),
            _ => Some(1),
        };
        match count {
            None => {}
            Some(1) => errln!("connectx {level}: {line}"),
            Some(count) => errln!("connectx {level}: {line} ({count} times)"),
        }
    }

    fn flush(&self) {}
}

/// How long the loop waits for the rest of a BlueFlame copy before it treats the first write as a
/// doorbell.
///
/// The wait must exceed the time for which the writer waits for a processor; otherwise no copy of the
/// driver's write-combining test is whole, and the driver does without copies from then on. On a busy
/// host that is much longer than on an idle one, and on an idle host a long wait would delay each
/// doorbell. So each write that comes too late doubles the wait, and each doorbell halves it.
struct GatherWait {
    /// Looks at the sockets before the loop gives up.
    looks: u32,
    /// The writes that had come too late when it last waited.
    late: u64,
}

impl GatherWait {
    const LOOKS: std::ops::RangeInclusive<u32> = 5..=640;
    /// Sleep before each look. Sleep instead of spinning: the processor that writes the rest may need
    /// this very core.
    const SLEEP: Duration = Duration::from_micros(20);

    fn new() -> Self {
        Self { looks: *Self::LOOKS.start(), late: 0 }
    }

    /// Whether anything arrives in time.
    fn arrives(&mut self, fabric: &mut Fabric, sockets: &mut [FunctionSocket]) -> bool {
        let late: u64 = adapters(sockets)
            .map(|number| fabric.function(number).device().doorbell_errors().late)
            .sum();
        let doubled = late.saturating_sub(self.late).min(8) as u32;
        self.late = late;
        self.looks = (self.looks << doubled).min(*Self::LOOKS.end());
        let arrived = (0..self.looks).any(|_| {
            thread::sleep(Self::SLEEP);
            serve_functions(fabric, sockets).0
        });
        if !arrived {
            self.looks = (self.looks / 2).max(*Self::LOOKS.start());
        }
        arrived
    }
}

/// Busy time after which the loop serves new guests and tests.
const ACCEPT_INTERVAL: Duration = Duration::from_millis(5);

/// The socket of a PCI function, and its client.
struct FunctionSocket {
    socket: Listening,
    session: Option<Session>,
    /// The number of the function in the fabric.
    number: usize,
    served: Served,
}

/// The name in front of error messages.
const NAME: &str = "connectx";

fn main() -> ExitCode {
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(refusal) if refusal.use_stderr() => refusal.exit(),
        Err(help) => {
            output::out!("{help}");
            return ExitCode::SUCCESS;
        }
    };
    match run(arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            errln!("{NAME}: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Ends the program early, because standard output failed.
fn end(status: u8) -> ! {
    exit(status.into())
}

/// The error of an access to a path, with the path.
fn at(path: &Path) -> impl Fn(io::Error) -> io::Error {
    move |error| io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

fn run(arguments: Arguments) -> io::Result<()> {
    static LOG: LazyLock<Log> = LazyLock::new(|| Log(Mutex::default()));
    if log::set_logger(&*LOG).is_ok() {
        log::set_max_level(arguments.log);
    }
    if let Some(command) = arguments.command {
        return read_recordings(command);
    }
    if let Some(directory) = &arguments.record {
        std::fs::create_dir_all(directory).map_err(at(directory))?;
    }
    // Without this, a short sleep lasts 50 microseconds longer.
    if let Err(error) = set_current_timer_slack(NonZeroU64::new(1)) {
        log::info!("timer slack: {error}");
    }
    let mut fabric = Fabric::default();
    if let Some(path) = &arguments.capture {
        File::create_new(path).and_then(|file| fabric.capture(file)).map_err(at(path))?;
    }
    let mut sockets = Vec::new();
    for path in &arguments.sockets {
        let socket = Listening::at(path).map_err(at(path))?;
        let number = fabric.add(Options {
            port_type: match arguments.port_type {
                PortTypeArg::Eth => PortType::Ethernet,
                PortTypeArg::Ib => PortType::InfiniBand,
            },
            write_combining: !arguments.no_wc,
            minimal: arguments.minimal,
            mapped: arguments.map,
            pkeys: arguments.pkey.clone(),
            data_direct: sockets.len() < arguments.data_direct.len(),
            real_time: arguments.real_time.then(epoch),
            ..Options::default()
        });
        if let Some(directory) = &arguments.record {
            let path = directory.join(format!("function{number}.record"));
            *fabric.function(number).device_mut().recorder_mut() =
                Recorder::create(&path, number as u32).map_err(at(&path))?;
        }
        sockets.push(FunctionSocket { socket, session: None, number, served: Served::Adapter });
    }
    if arguments.data_direct.len() > sockets.len() {
        let text = format!(
            "{} sockets of data-direct functions for {} functions: give at most one for each",
            arguments.data_direct.len(),
            sockets.len()
        );
        return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    }
    for (number, path) in arguments.data_direct.iter().enumerate() {
        let socket = Listening::at(path).map_err(at(path))?;
        let served = Served::DataDirect;
        sockets.push(FunctionSocket { socket, session: None, number, served });
    }
    let mut control_socket = ControlSocket { socket: None, clients: Vec::new() };
    if let Some(path) = &arguments.control {
        control_socket.socket = Some(Listening::at(path).map_err(at(path))?);
    }
    serve(&mut fabric, &mut sockets, &mut control_socket)
}

/// Nanoseconds since the epoch, by this machine's clock.
fn epoch() -> u64 {
    SystemTime::UNIX_EPOCH.elapsed().map_or(0, |time| time.as_nanos() as u64)
}

/// Prints or converts recordings.
fn read_recordings(command: Command) -> io::Result<()> {
    let open =
        |path: &Path| -> io::Result<_> { Ok(BufReader::new(File::open(path).map_err(at(path))?)) };
    let mut to = BufWriter::new(Printed);
    match command {
        Command::Decode { files } => {
            for file in &files {
                decode::print(open(file)?, &mut to)?;
            }
        }
        Command::Golden { by, files } => {
            let mut vectors = TestVectors::default();
            for file in &files {
                vectors.add(open(file)?)?;
            }
            vectors.print(&by, &mut to)?;
        }
    }
    to.flush()
}

/// Standard output, whose failure ends the program.
struct Printed;

impl Write for Printed {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        output::write(bytes).unwrap_or_else(|error| output::fail(&error));
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The control socket, and its clients.
struct ControlSocket {
    socket: Option<Listening>,
    clients: Vec<control::Server>,
}

fn serve(
    fabric: &mut Fabric,
    sockets: &mut [FunctionSocket],
    control_socket: &mut ControlSocket,
) -> io::Result<()> {
    let start = Instant::now();
    let now = || start.elapsed().as_nanos() as u64;
    let mut accepted = Instant::now();
    let mut gather_wait = GatherWait::new();
    loop {
        let (mut busy, gathering) = serve_functions(fabric, sockets);
        if gathering && !busy {
            if !gather_wait.arrives(fabric, sockets) {
                for number in adapters(sockets) {
                    fabric.function(number).device_mut().flush_gathered_writes();
                }
            }
            busy = true;
        }
        busy |= fabric.poll(now());
        // A guest that never pauses must not keep out others.
        if busy && accepted.elapsed() < ACCEPT_INTERVAL {
            continue;
        }
        if !busy {
            for number in adapters(sockets) {
                fabric.function(number).device_mut().recorder_mut().flush();
            }
        }
        wait(
            sockets,
            control_socket,
            if busy { Some(0) } else { fabric.deadline().map(|due| due.saturating_sub(now())) },
        )?;
        accepted = Instant::now();
        // The guest may have woken the process by reading the clock.
        fabric.set_time(now());
        // A test may ask about writes that a guest has just made: they have no reply, so read them
        // first.
        serve_functions(fabric, sockets);
        control_socket.clients.retain_mut(|client| client.serve(fabric));
    }
}

/// The numbers of the functions.
fn adapters(sockets: &[FunctionSocket]) -> impl Iterator<Item = usize> {
    sockets.iter().filter(|socket| socket.served == Served::Adapter).map(|socket| socket.number)
}

/// Serves all clients: returns whether there was anything to do, and whether a BlueFlame copy is
/// incomplete.
fn serve_functions(fabric: &mut Fabric, sockets: &mut [FunctionSocket]) -> (bool, bool) {
    let (mut busy, mut gathering) = (false, false);
    for socket in sockets {
        busy |= serve_function(fabric, socket);
        gathering |= fabric.function(socket.number).device().gathering();
    }
    (busy, gathering)
}

/// Serves the client of one function; returns false if there was nothing to do.
fn serve_function(fabric: &mut Fabric, socket: &mut FunctionSocket) -> bool {
    let number = socket.number;
    let Some(session) = &mut socket.session else { return false };
    match session.serve(fabric.function(number)) {
        Ok(served) => served,
        Err(broken) => {
            match broken {
                StreamError::Closed => log::info!("function {number}: the client has disconnected"),
                other => log::error!("function {number}: {other:?}"),
            }
            socket.session = None;
            match socket.served {
                Served::Adapter => fabric.function(number).restart(),
                Served::DataDirect => fabric.function(number).restart_data_direct(),
            }
            true
        }
    }
}

/// Sleeps until a client writes or a timer is due.
fn wait(
    sockets: &mut [FunctionSocket],
    control_socket: &mut ControlSocket,
    nanoseconds: Option<u64>,
) -> io::Result<()> {
    let mut fds: Vec<_> = sockets
        .iter()
        .map(|socket| {
            let fd = match &socket.session {
                Some(session) => session.stream().as_fd(),
                None => socket.socket.listener.as_fd(),
            };
            PollFd::from_borrowed_fd(fd, PollFlags::IN)
        })
        .collect();
    let clients = control_socket.clients.iter().map(|client| client.stream().as_fd());
    let listener = control_socket.socket.iter().map(|socket| socket.listener.as_fd());
    let others = clients.chain(listener);
    fds.extend(others.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
    let timeout = nanoseconds.map(|ns| Timespec {
        tv_sec: (ns / 1_000_000_000) as i64,
        tv_nsec: (ns % 1_000_000_000) as _,
    });
    match poll(&mut fds, timeout.as_ref()) {
        Ok(_) | Err(rustix::io::Errno::INTR) => {}
        Err(error) => return Err(error.into()),
    }
    let client_waits =
        control_socket.socket.is_some() && fds.last().is_some_and(|fd| !fd.revents().is_empty());
    let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
    for (socket, ready) in sockets.iter_mut().zip(ready) {
        if ready && socket.session.is_none() {
            match socket.socket.listener.accept() {
                Ok((stream, _)) => {
                    log::info!("client connected");
                    socket.session = Some(Session::new(stream, socket.served));
                }
                // The client is gone, or connects again.
                Err(error) => log::warn!("a client did not connect: {error}"),
            }
        }
    }
    if let Some(socket) = control_socket.socket.as_ref().filter(|_| client_waits) {
        match socket.listener.accept().and_then(|(stream, _)| control::Server::new(stream)) {
            Ok(client) => control_socket.clients.push(client),
            Err(error) => log::warn!("a client of the control socket did not connect: {error}"),
        }
    }
    Ok(())
}
