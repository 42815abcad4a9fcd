//! The command line's grammar and help.

use clap::{ArgGroup, Args as Group, Parser, Subcommand, ValueEnum};
use std::path::PathBuf;
use std::time::Duration;

macro_rules! exit_statuses {
    () => {
        "\
Exit status:
  0  all went well
  1  the run failed: a byte arrived wrong, a request failed, the peer went silent, or standard
     output could not be written
  2  the command line is wrong
  3  the local device cannot be used: none there, no provider, no permission, port down, no such
     GID, no route, not enough memory
  4  the peer cannot be reached, or is no program of the same kind
  141  the reader of standard output is gone, as after `| head -1`"
    };
}

const EXIT_STATUSES: &str = exit_statuses!();

/// The text below the options in the help of a ping-pong.
const PINGPONG: &str = concat!(
    "\
Start it without HOST on one side: that is the server, and it waits. Then start it on the other
side with the server's name or address. Both need the same kind, --size and --iters. With --sim
this process is both sides, between its first device and its last. Either side
may be rdma-core's ibv_rc_pingpong, ibv_uc_pingpong, ibv_ud_pingpong, ibv_srq_pingpong or
ibv_xsrq_pingpong; over Ethernet those need -g with the index of a GID.

All kinds but xsrq can validate. The messages of a client that validates all differ, and a server
sends back what it got. A server that validates checks them, too; or, if the client does not
validate or is rdma-core's, what such a client sends.

",
    exit_statuses!()
);

/// The same for a ping-pong over XRC, whose messages are all alike.
const XSRQ: &str = concat!(
    "\
Start it without HOST on one side: that is the server, and it waits. Then start as many clients as
the server's --clients says, with the server's name or address and the same --size and --iters.
Either side may be rdma-core's ibv_xsrq_pingpong; over Ethernet that needs -g with the index of a
GID.

",
    exit_statuses!()
);

/// Shows RDMA devices, and tests whether messages get across.
#[derive(Debug, Parser)]
#[command(name = "uverbs", version, after_help = EXIT_STATUSES)]
pub(crate) struct Args {
    /// Use devices in this process, with their kernel and network, in place of the machine's
    #[arg(long, global = true, value_name = "DEVICES", num_args = 0..=1, require_equals = true,
        default_missing_value = "2", value_parser = clap::value_parser!(u8).range(1..=64))]
    pub(crate) sim: Option<u8>,
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Show the RDMA devices of this machine, their ports and limits
    Devinfo(DevinfoArgs),
    /// Find faults that keep programs from working on this machine, and say how to mend them
    Doctor(DoctorArgs),
    /// Exchange messages with another host, or with another process of this one
    #[command(subcommand)]
    Pingpong(PingpongCommand),
    /// Connect by address, through the kernel's connection manager
    #[command(subcommand)]
    Cm(CmCommand),
    /// Share a context and registered memory between two processes of this machine
    #[command(subcommand)]
    Share(ShareArgs),
}

/// The text below the options in the help of the programs that connect by address.
const CM: &str = concat!(
    "\
Start the server first, or mckey's receivers. Either side may be rdma-core's program of the same name. Addresses are
those of network interfaces that have an RDMA device: `rdma link` lists them. The kernel needs the
module rdma_ucm.

",
    exit_statuses!()
);

/// The same for multicast groups, which have no server.
const MCKEY: &str = concat!(
    "\
Start the receivers first, and then the sender with -s. Either side may be rdma-core's mckey. The
interface that joins has to have an RDMA device: `rdma link` lists them. The kernel needs the module
rdma_ucm.

",
    exit_statuses!()
);

#[derive(Debug, Subcommand)]
#[command(after_help = CM)]
pub(crate) enum CmCommand {
    /// The server reads the client's texts and writes them back, by RDMA; the client compares them
    #[command(after_help = CM)]
    Rping(RpingArgs),
    /// The server sends messages over connections, the client answers with as many
    #[command(after_help = CM)]
    Ucmatose(UcmatoseArgs),
    /// The client sends datagrams to a server that it finds by address, which answers with as many
    #[command(after_help = CM)]
    Udaddy(UdaddyArgs),
    /// One side sends datagrams to a multicast group, the other receives them
    #[command(after_help = MCKEY)]
    Mckey(MckeyArgs),
    /// Measure each step of many connections; the peer may be cmtime of rdma-core 52 to 58
    #[command(after_help = CM)]
    Cmtime(CmtimeArgs),
}

impl CmCommand {
    pub(crate) fn is_json(&self) -> bool {
        match self {
            CmCommand::Rping(args) => args.json,
            CmCommand::Ucmatose(args) => args.options.json,
            CmCommand::Udaddy(args) => args.options.json,
            CmCommand::Mckey(args) => args.json,
            CmCommand::Cmtime(args) => args.json,
        }
    }
}

/// Options of the programs that exchange a number of messages with a server.
#[derive(Clone, Debug, Group)]
pub(crate) struct BurstOptions {
    /// The server's address or host name; without it this is the server
    #[arg(short, long, value_name = "ADDRESS")]
    pub(crate) server: Option<String>,
    /// The address of this side [default: a server listens on all, a client asks the routing table]
    #[arg(short, long, value_name = "ADDRESS")]
    pub(crate) bind: Option<String>,
    /// Number of connections; the same on both sides
    #[arg(short, long, value_name = "COUNT", default_value_t = 1,
        value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) connections: u32,
    /// Messages in each direction of a connection; the same on both sides
    #[arg(short = 'C', long, value_name = "COUNT", default_value_t = 10,
        value_parser = clap::value_parser!(u32).range(0..=1000))]
    pub(crate) count: u32,
    /// Bytes of a message; the same on both sides
    #[arg(short = 'S', long, value_name = "BYTES", default_value_t = 100,
        value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub(crate) size: u32,
    /// A client's type of service
    #[arg(short, long, value_name = "TOS")]
    pub(crate) tos: Option<u8>,
    /// Give up after so many seconds without progress
    #[arg(long, value_name = "SECONDS", default_value_t = 10,
        value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub(crate) timeout: u64,
    /// Longest wait of a server for its client
    #[arg(long, value_name = "SECONDS", default_value_t = 300,
        value_parser = clap::value_parser!(u64).range(..=86_400))]
    pub(crate) wait: u64,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

impl BurstOptions {
    pub(crate) fn timeout(&self) -> Duration {
        Duration::from_secs(self.timeout)
    }
}

#[derive(Clone, Debug, Group)]
pub(crate) struct UcmatoseArgs {
    #[command(flatten)]
    pub(crate) options: BurstOptions,
    /// The server's port, in the port space TCP of the connection manager
    #[arg(short, long, value_name = "PORT", default_value_t = 7471,
        value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) port: u16,
    /// Acknowledgement timeout of a client's queue pair: 4.096 µs · 2ⁿ
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u8).range(..=31))]
    pub(crate) ack_timeout: Option<u8>,
    /// Move each connection to an event channel of its own
    #[arg(short, long)]
    pub(crate) migrate: bool,
}

#[derive(Clone, Debug, Group)]
pub(crate) struct UdaddyArgs {
    #[command(flatten)]
    pub(crate) options: BurstOptions,
    /// The server's port, in the port space UDP of the connection manager
    #[arg(long, value_name = "PORT", default_value_t = 7174,
        value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) port: u16,
}

#[derive(Clone, Debug, Group)]
pub(crate) struct MckeyArgs {
    /// The group's address
    #[arg(short = 'm', long, value_name = "GROUP")]
    pub(crate) group: String,
    /// Be the sender; without it, this is a receiver
    #[arg(short, long)]
    pub(crate) sender: bool,
    /// The address of this side, whose interface joins the group [default: the routing table's]
    #[arg(short, long, value_name = "ADDRESS")]
    pub(crate) bind: Option<String>,
    /// Number of queue pairs that join
    #[arg(short, long, value_name = "COUNT", default_value_t = 1,
        value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) connections: u32,
    /// Datagrams of each sending queue pair; the same on both sides
    #[arg(short = 'C', long, value_name = "COUNT", default_value_t = 10,
        value_parser = clap::value_parser!(u32).range(0..=1000))]
    pub(crate) count: u32,
    /// Bytes of a datagram; the same on both sides
    #[arg(short = 'S', long, value_name = "BYTES", default_value_t = 100,
        value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(crate) size: u32,
    /// Join as a member that only sends
    #[arg(short = 'o', long)]
    pub(crate) send_only: bool,
    /// Pause of a sender after it joined, as switches have to learn of it
    #[arg(long, value_name = "SECONDS", default_value_t = 3,
        value_parser = clap::value_parser!(u64).range(..=3600))]
    pub(crate) pause: u64,
    /// Give up after so many seconds without progress
    #[arg(long, value_name = "SECONDS", default_value_t = 10,
        value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub(crate) timeout: u64,
    /// Longest wait of a receiver for the first datagram
    #[arg(long, value_name = "SECONDS", default_value_t = 300,
        value_parser = clap::value_parser!(u64).range(..=86_400))]
    pub(crate) wait: u64,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Clone, Debug, Group)]
pub(crate) struct CmtimeArgs {
    /// The server's address or host name; without it this is the server
    #[arg(short, long, value_name = "ADDRESS")]
    pub(crate) server: Option<String>,
    /// The address of this side [default: a server listens on all, a client asks the routing table]
    #[arg(short, long, value_name = "ADDRESS")]
    pub(crate) bind: Option<String>,
    /// Number of connections; the same on both sides
    #[arg(short, long, value_name = "COUNT", default_value_t = 100,
        value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(crate) connections: u32,
    /// The server's port, of TCP and in the port space TCP of the connection manager
    #[arg(short, long, value_name = "PORT", default_value_t = 7471,
        value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) port: u16,
    /// Longest time of the kernel to resolve an address or a route
    #[arg(short = 't', long, value_name = "MILLISECONDS", default_value_t = 2000,
        value_parser = clap::value_parser!(u64).range(1..=86_400_000))]
    pub(crate) resolve_timeout: u64,
    /// Give up when the peer is silent for so many seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 60,
        value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub(crate) timeout: u64,
    /// Longest wait of a server for its client
    #[arg(long, value_name = "SECONDS", default_value_t = 300,
        value_parser = clap::value_parser!(u64).range(..=86_400))]
    pub(crate) wait: u64,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

impl CmtimeArgs {
    pub(crate) fn patience(&self) -> Duration {
        Duration::from_secs(self.timeout)
    }
}

#[derive(Clone, Debug, Group)]
#[command(group = ArgGroup::new("side").required(true))]
pub(crate) struct RpingArgs {
    /// Be the server
    #[arg(short, long, group = "side")]
    server: bool,
    /// Be the client
    #[arg(short, long, group = "side")]
    pub(crate) client: bool,
    /// The server's address or host name; a server without it listens on all addresses
    #[arg(short, long, value_name = "ADDRESS")]
    pub(crate) address: Option<String>,
    /// The server's port, in the port space TCP of the connection manager
    #[arg(short, long, value_name = "PORT", default_value_t = 7174,
        value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) port: u16,
    /// The client's address [default: the routing table's]
    #[arg(short = 'I', long, value_name = "ADDRESS")]
    pub(crate) source: Option<String>,
    /// Texts that a client sends; a server serves one client to its end
    #[arg(short = 'C', long, value_name = "COUNT", default_value_t = 1000,
        value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) count: u64,
    /// Bytes of a text, with its final zero
    #[arg(short = 'S', long, value_name = "BYTES", default_value_t = 64,
        value_parser = clap::value_parser!(u32).range(16..=i64::from(crate::cm::LONGEST)))]
    pub(crate) size: u32,
    /// Show the texts
    #[arg(short, long)]
    pub(crate) verbose: bool,
    /// Give up after so many seconds without progress
    #[arg(long, value_name = "SECONDS", default_value_t = 10,
        value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub(crate) timeout: u64,
    /// Longest wait of a server for its client
    #[arg(long, value_name = "SECONDS", default_value_t = 300,
        value_parser = clap::value_parser!(u64).range(..=86_400))]
    pub(crate) wait: u64,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// The importer gets the exporter's context by its file, and reaches the exporter's memory by RDMA.
#[derive(Debug, Subcommand)]
#[command(after_help = EXIT_STATUSES)]
pub(crate) enum ShareArgs {
    /// Register memory and serve the context at a Unix socket
    #[command(after_help = EXIT_STATUSES)]
    Serve {
        /// Path to listen at
        #[arg(value_name = "SOCKET")]
        socket: PathBuf,
        /// RDMA device, or the path of its node [default: the first that opens and has an active port]
        #[arg(short, long, alias = "ib-dev", value_name = "NAME")]
        device: Option<String>,
        /// Leave after so many clients [default: never]
        #[arg(short = 'n', long, value_name = "COUNT")]
        clients: Option<u64>,
        /// Text that clients read
        #[arg(long, default_value = "hello from the exporter")]
        text: String,
    },
    /// Import the context that is served there, read the exporter's memory and write to it
    #[command(after_help = EXIT_STATUSES)]
    Use {
        /// Path that the exporter listens at
        #[arg(value_name = "SOCKET")]
        socket: PathBuf,
        /// Port of the device
        #[arg(short, long, value_name = "PORT", default_value_t = 1,
            value_parser = clap::value_parser!(u32).range(1..))]
        ib_port: u32,
        /// GID to send from, by its index [default: an IPv4 one of RoCE v2 where there is one]
        #[arg(short, long, alias = "gid-idx", value_name = "INDEX")]
        gid_index: Option<u32>,
        /// Text to write
        #[arg(long, default_value = "hello from the importer")]
        text: String,
    },
}

/// Devices that this program cannot open are shown with the facts from netlink and sysfs.
#[derive(Debug, Group)]
#[command(after_help = EXIT_STATUSES)]
pub(crate) struct DevinfoArgs {
    /// Show all limits and capabilities, and the GID tables
    #[arg(short, long)]
    pub(crate) verbose: bool,
    /// Print one JSON object: everything, with or without -v
    #[arg(long)]
    pub(crate) json: bool,
    /// Names of devices, or paths of their nodes; all devices unless given
    #[arg(value_name = "DEVICE")]
    pub(crate) devices: Vec<String>,
}

/// Exit status 3 means a problem, 0 none. The doctor opens each device, and registers a small region on it.
#[derive(Debug, Group)]
#[command(after_help = EXIT_STATUSES)]
pub(crate) struct DoctorArgs {
    /// Show notes, too: facts that are neither good nor bad
    #[arg(short, long)]
    pub(crate) verbose: bool,
    /// Let warnings count as problems
    #[arg(long)]
    pub(crate) strict: bool,
    /// Choose the GID by the route to this address, and test whether it answers packets of the port's MTU
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) peer: Option<std::net::IpAddr>,
    /// Print one JSON object: everything, with or without -v
    #[arg(long)]
    pub(crate) json: bool,
    /// Print Markdown for a report of a run on hardware: versions, firmware, capabilities; no addresses
    #[arg(long, conflicts_with = "json")]
    pub(crate) report: bool,
    /// Output of the device suite, for the report
    #[arg(long, value_name = "FILE", requires = "report")]
    pub(crate) results: Option<PathBuf>,
    /// Names of devices, or paths of their nodes; all devices unless given
    #[arg(value_name = "DEVICE")]
    pub(crate) devices: Vec<String>,
}

#[derive(Debug, Subcommand)]
#[command(after_help = PINGPONG)]
pub(crate) enum PingpongCommand {
    #[command(flatten)]
    Pair(PingpongArgs),
    /// Between a server and several clients over XRC, whose messages name their receive queue
    #[command(after_help = XSRQ, mut_arg("validate", |validate| validate.hide(true)))]
    Xsrq(XsrqArgs),
}

/// Clients of one machine share the XRC domain of the file /tmp/xrc_domain, with those of rdma-core, and are reached
/// over each other's connections. rdma-core's program does 5 --iters by default.
#[derive(Debug, Group)]
pub(crate) struct XsrqArgs {
    #[command(flatten)]
    pub(crate) options: Options,
    #[command(flatten)]
    pub(crate) path: PathOptions,
    /// Clients that a server waits for
    #[arg(long, value_name = "COUNT", default_value_t = 1,
        value_parser = clap::value_parser!(u32).range(1..=255))]
    pub(crate) clients: u32,
}

impl XsrqArgs {
    /// Bytes of a message.
    pub(crate) fn size(&self) -> u32 {
        self.options.size.unwrap_or(4096)
    }
}

impl PingpongCommand {
    pub(crate) fn options(&self) -> &Options {
        match self {
            PingpongCommand::Pair(args) => args.options(),
            PingpongCommand::Xsrq(args) => &args.options,
        }
    }
}

#[derive(Clone, Debug, Subcommand)]
#[command(after_help = PINGPONG)]
pub(crate) enum PingpongArgs {
    /// Over a reliable connection
    #[command(after_help = PINGPONG)]
    Rc {
        #[command(flatten)]
        options: Options,
        #[command(flatten)]
        path: PathOptions,
        #[command(flatten)]
        mlx5: Mlx5Options,
    },
    /// Over an unreliable connection
    #[command(after_help = PINGPONG)]
    Uc {
        #[command(flatten)]
        options: Options,
        #[command(flatten)]
        path: PathOptions,
    },
    /// With unreliable datagrams
    #[command(after_help = PINGPONG)]
    Ud {
        #[command(flatten)]
        options: Options,
    },
    /// Over several reliable connections that share a receive queue
    #[command(after_help = PINGPONG)]
    Srq {
        #[command(flatten)]
        options: Options,
        #[command(flatten)]
        path: PathOptions,
        /// Queue pairs, all in flight at once; --iters counts them together
        #[arg(short, long, alias = "num-qp", value_name = "COUNT", default_value_t = 16,
            value_parser = clap::value_parser!(u32).range(1..=255))]
        qps: u32,
    },
}

/// Options of all kinds.
#[derive(Clone, Debug, Group)]
pub(crate) struct Options {
    /// Host name or address of the server; without it, be the server
    #[arg(value_name = "HOST")]
    pub(crate) host: Option<String>,
    /// RDMA device, or the path of its node [default: the first that opens and has an active port]
    #[arg(short, long, alias = "ib-dev", value_name = "NAME")]
    pub(crate) device: Option<String>,
    /// Port of the device
    #[arg(short, long, value_name = "PORT", default_value_t = 1,
        value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) ib_port: u32,
    /// Index of the GID to send from: it chooses address, VLAN and RoCE version [default: an IPv4 one of RoCE v2 where
    /// there is one]
    #[arg(short, long, alias = "gid-idx", value_name = "INDEX")]
    pub(crate) gid_index: Option<u32>,
    /// TCP port for exchanging addresses
    #[arg(short, long, value_name = "PORT", default_value_t = 18515,
        value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) port: u16,
    /// Bytes of a message [default: 4096, with ud 1024]
    #[arg(short, long, value_name = "BYTES",
        value_parser = clap::value_parser!(u32).range(1..=1 << 30))]
    size: Option<u32>,
    /// Messages that go there and come back
    #[arg(short = 'n', long, value_name = "COUNT", default_value_t = 1000,
        value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) iters: u64,
    /// Receives to post at a time
    #[arg(short, long, value_name = "COUNT", default_value_t = 500,
        value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) rx_depth: u32,
    /// Service level
    #[arg(short = 'l', long, value_name = "LEVEL", default_value_t = 0,
        value_parser = clap::value_parser!(u8).range(..=15))]
    pub(crate) sl: u8,
    /// Sleep until completions are announced, in place of polling
    #[arg(short, long)]
    pub(crate) events: bool,
    /// Check every byte that arrives
    #[arg(short = 'c', long, alias = "chk")]
    pub(crate) validate: bool,
    /// Give up after so many seconds without progress
    #[arg(long, value_name = "SECONDS", default_value_t = 10,
        value_parser = clap::value_parser!(u64).range(1..=86_400))]
    timeout: u64,
    /// Longest wait of a server for a client, and of a client for a server to listen [default: 300 and 0]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(..=86_400))]
    pub(crate) wait: Option<u64>,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// Options of connections, which datagrams lack.
#[derive(Clone, Debug, Group)]
pub(crate) struct PathOptions {
    /// Path MTU in bytes
    #[arg(short, long, value_name = "BYTES", default_value = "1024")]
    pub(crate) mtu: PathMtu,
}

/// Options of connections that only mlx5 has.
#[derive(Clone, Copy, Debug, Default, Group)]
pub(crate) struct Mlx5Options {
    /// Let the device place data, and take receives, in another order than they were sent; mlx5 only
    #[arg(long)]
    pub(crate) out_of_order: bool,
    /// UDP port to send packets from, 49152 to 65535; mlx5 on Ethernet only
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(0xc000..))]
    pub(crate) udp_port: Option<u16>,
}

/// The MTUs of the InfiniBand specification.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum PathMtu {
    #[value(name = "256")]
    B256 = 1,
    #[value(name = "512")]
    B512 = 2,
    #[value(name = "1024")]
    B1024 = 3,
    #[value(name = "2048")]
    B2048 = 4,
    #[value(name = "4096")]
    B4096 = 5,
}

impl PathMtu {
    pub(crate) fn bytes(self) -> u32 {
        128 << self as u32
    }
}

impl PingpongArgs {
    pub(crate) fn options(&self) -> &Options {
        match self {
            PingpongArgs::Rc { options, .. }
            | PingpongArgs::Uc { options, .. }
            | PingpongArgs::Ud { options }
            | PingpongArgs::Srq { options, .. } => options,
        }
    }

    pub(crate) fn options_mut(&mut self) -> &mut Options {
        match self {
            PingpongArgs::Rc { options, .. }
            | PingpongArgs::Uc { options, .. }
            | PingpongArgs::Ud { options }
            | PingpongArgs::Srq { options, .. } => options,
        }
    }

    /// The path MTU; `None` for datagrams, whose limit is the port's own MTU.
    pub(crate) fn mtu(&self) -> Option<PathMtu> {
        match self {
            PingpongArgs::Rc { path, .. }
            | PingpongArgs::Uc { path, .. }
            | PingpongArgs::Srq { path, .. } => Some(path.mtu),
            PingpongArgs::Ud { .. } => None,
        }
    }

    /// The options of mlx5: none where they cannot be given.
    pub(crate) fn mlx5(&self) -> Mlx5Options {
        match self {
            PingpongArgs::Rc { mlx5, .. } => *mlx5,
            _ => Mlx5Options::default(),
        }
    }

    /// Bytes of a message.
    pub(crate) fn size(&self) -> u32 {
        let default = match self {
            PingpongArgs::Ud { .. } => 1024,
            _ => 4096,
        };
        self.options().size.unwrap_or(default)
    }

    /// The number of queue pairs.
    pub(crate) fn qps(&self) -> u32 {
        match self {
            PingpongArgs::Srq { qps, .. } => *qps,
            _ => 1,
        }
    }
}

impl Options {
    pub(crate) fn timeout(&self) -> Duration {
        Duration::from_secs(self.timeout)
    }

    /// The longest wait for the peer to appear.
    pub(crate) fn wait(&self) -> Duration {
        let default = if self.host.is_some() { 0 } else { 300 };
        Duration::from_secs(self.wait.unwrap_or(default))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn pingpong(line: &str) -> Result<PingpongArgs, clap::Error> {
        let words = ["uverbs", "pingpong"].into_iter().chain(line.split_whitespace());
        match Args::try_parse_from(words)?.command {
            Command::Pingpong(PingpongCommand::Pair(args)) => Ok(args),
            other => unreachable!("the line says pingpong, not {other:?}"),
        }
    }

    #[test]
    fn the_grammar_is_consistent() {
        Args::command().debug_assert();
    }

    #[test]
    fn defaults_are_those_of_the_peers() {
        let args = pingpong("srq").unwrap();
        let options = args.options();
        assert_eq!((options.port, args.size(), options.iters), (18515, 4096, 1000));
        assert_eq!((options.rx_depth, options.ib_port, options.sl), (500, 1, 0));
        assert_eq!((args.qps(), args.mtu().map(PathMtu::bytes)), (16, Some(1024)));
        assert_eq!(options.host, None);
        assert_eq!(pingpong("ud").unwrap().size(), 1024);
        assert_eq!(options.wait(), Duration::from_secs(300));
    }

    #[test]
    fn short_options_are_those_of_the_peers() {
        let line = "rc -p 1 -d rxe1 -i 2 -s 64 -m 4096 -r 7 -n 9 -l 3 -e -g 5 -c 10.0.0.2";
        let args = pingpong(line).unwrap();
        let options = args.options();
        assert_eq!((options.port, options.ib_port, args.size()), (1, 2, 64));
        assert_eq!((options.rx_depth, options.iters, options.sl), (7, 9, 3));
        assert_eq!((options.gid_index, options.events, options.validate), (Some(5), true, true));
        assert_eq!(options.device.as_deref(), Some("rxe1"));
        assert_eq!(options.host.as_deref(), Some("10.0.0.2"));
        assert_eq!(args.mtu(), Some(PathMtu::B4096));
        assert_eq!(options.wait(), Duration::ZERO);
    }

    #[test]
    fn options_of_rping_are_those_of_the_peer() {
        let parse = |line: &str| {
            let words = ["uverbs", "cm", "rping"].into_iter().chain(line.split_whitespace());
            Args::try_parse_from(words).map(|args| args.command)
        };
        let Ok(Command::Cm(CmCommand::Rping(args))) =
            parse("-c -a 10.0.0.2 -p 7 -C 5 -S 65535 -v -I 10.0.0.1")
        else {
            panic!("the line is one of rping");
        };
        assert!(args.client && args.verbose && !args.json);
        assert_eq!((args.port, args.count, args.size), (7, 5, 65_535));
        assert_eq!(args.address.as_deref(), Some("10.0.0.2"));
        assert!(matches!(parse("-s"), Ok(Command::Cm(_))));
        for line in ["", "-s -c -a 10.0.0.2", "-s -S 15", "-s -S 65536", "-c -C 0"] {
            assert!(parse(line).is_err(), "{line}");
        }
    }

    #[test]
    fn invalid_options_are_refused() {
        for line in [
            "rc --size 0",
            "rc --iters 0",
            "rc --rx-depth 0",
            "rc --mtu 1000",
            "rc --ib-port 0",
            "rc --sl 16",
            "rc --qps 2",
            "ud --mtu 1024",
            "srq --qps 0",
            "srq --qps 256",
            "xrc",
            "rc a b",
        ] {
            assert!(pingpong(line).is_err(), "{line}");
        }
    }
}
