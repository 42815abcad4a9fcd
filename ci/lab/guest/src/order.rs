//! The structures inside frames: the host's orders and the guest's answers.
//!
//! `GuestSetup` is read from the initramfs when the guest starts; the others travel as JSON in the
//! frames that `frame.rs` names.

use serde::{Deserialize, Serialize};

/// Where the initramfs holds the [`GuestSetup`].
pub const SETUP_PATH: &str = "/lab/setup.json";

/// Where the initramfs holds the list of modules, see [`Module`].
pub const MODULES_PATH: &str = "/lab/modules.json";

/// Name of the virtio-serial port that carries the frames.
pub const PORT: &str = "lab.0";

/// Name and number of the ordinary user and of its group.
pub const USER: (&str, u32) = ("user", 1000);

/// The memory that an ordinary user may pin, in bytes: the default of Linux distributions.
pub const USER_MEMLOCK: u64 = 8 << 20;

/// The guest's setup before it is ready.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestSetup {
    /// Modules to load, with their dependencies.
    pub modules: Vec<String>,
    /// The network interfaces of the RDMA devices.
    pub network: Network,
    /// How many RDMA devices must have appeared before the guest is ready.
    pub devices: u32,
    /// How long they may take, in seconds.
    pub patience: u32,
    /// The host's file system, if the guest gets it.
    pub host: Option<HostFiles>,
}

/// Tag of the 9p device that carries the host's file system.
pub const HOST_TAG: &str = "host";

/// Where the guest mounts the host's file system.
pub const HOST_PATH: &str = "/host";

/// Directories of the host's file system in whose place a process sees the guest's own.
pub const GUEST_DIRECTORIES: [&str; 5] = ["/dev", "/proc", "/sys", "/run", "/tmp"];

/// The host's file system at [`HOST_PATH`], with the guest's own [`GUEST_DIRECTORIES`] in it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostFiles {
    /// Directories of the host below the guest's own ones. They stay the host's.
    pub kept: Vec<String>,
}

/// The origin of the RDMA devices' network interfaces. Either way the first gets 10.0.0.1, the
/// second 10.0.0.2, and packets from one to the other leave through its own interface.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Network {
    /// There are none.
    #[default]
    None,
    /// A virtual cable with a soft-RoCE device at each end.
    SoftRoce,
    /// The Ethernet ports of the RDMA devices that the machine has.
    Ports,
}

/// A kernel module in the initramfs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Module {
    /// Its name with underscores.
    pub name: String,
    /// Its path in the guest.
    pub path: String,
    /// Modules that must be loaded before it.
    pub needs: Vec<String>,
    /// Other names under which the kernel may ask for it, with `*` as wildcard.
    pub aliases: Vec<String>,
}

/// A process to start.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Order {
    /// Program and arguments. The program is looked up in `PATH` unless it has a slash.
    pub command: Vec<String>,
    /// Environment in addition to the guest's own few variables.
    pub environment: Vec<(String, String)>,
    /// Run as root instead of as the ordinary user with its memlock limit.
    pub root: bool,
    /// Give it a terminal of this many columns and rows.
    pub terminal: Option<(u16, u16)>,
    /// Run it in the host's file system instead of the guest's own; `root` says nothing then.
    pub on_host: Option<OnHost>,
}

/// A process in the host's file system. Its user is the host's, because file modes are checked in the guest.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OnHost {
    /// The current directory.
    pub directory: String,
    /// The numbers of the user, of its group and of its further groups.
    pub user: u32,
    /// See `user`.
    pub group: u32,
    /// See `user`.
    pub groups: Vec<u32>,
}

/// The guest is ready.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Greeting {
    /// The running kernel's release.
    pub release: String,
    /// The RDMA devices.
    pub devices: Vec<String>,
    /// Milliseconds since the kernel started.
    pub uptime: u64,
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ending {
    /// By itself, with this status.
    Exited(i32),
    /// By this signal.
    Killed(i32),
}

impl Ending {
    /// The status that a shell would show: the status itself, or 128 plus the signal.
    pub fn status(self) -> i32 {
        match self {
            Ending::Exited(status) => status,
            Ending::Killed(signal) => 128 + signal,
        }
    }
}
