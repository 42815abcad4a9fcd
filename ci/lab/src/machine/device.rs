//! The guest's RDMA devices: the parts of the configuration that differ between them.
//!
//! A device may ask for arguments of QEMU, for a companion process on the host, for modules and
//! for work of the guest. `vm.rs` puts these together.

use crate::packages::kernel::Kernel;
use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use lab_guest::order::{GuestSetup, HOST_TAG, HostFiles, Network};
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// A device by the name that the command line gives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(crate) enum DeviceName {
    /// soft-RoCE, made by the kernel itself on a virtual cable
    Rxe,
    /// an emulated ConnectX, driven by the kernel's mlx5 driver
    Mlx5,
}

impl DeviceName {
    /// All of them.
    pub(crate) const ALL: [DeviceName; 2] = [DeviceName::Rxe, DeviceName::Mlx5];

    /// As the command line spells it.
    pub(crate) fn label(self) -> &'static str {
        match self {
            DeviceName::Rxe => "rxe",
            DeviceName::Mlx5 => "mlx5",
        }
    }

    /// The same, with the link layer if that is not Ethernet.
    pub(crate) fn with(self, emulation: Emulation) -> String {
        let link = if emulation.infiniband { " infiniband" } else { "" };
        format!("{}{link}", self.label())
    }
}

/// Options of the emulated ConnectX functions.
#[derive(Args, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Emulation {
    /// InfiniBand ports in place of Ethernet ones (with --device mlx5)
    #[arg(long)]
    pub(crate) infiniband: bool,
    /// Limited membership in the default partition, and full membership in another, 0x8123 at index 1 (with
    /// --device mlx5 --infiniband)
    #[arg(long, requires = "infiniband")]
    pub(crate) partition: bool,
    /// Refuse data in BlueFlame registers (with --device mlx5)
    #[arg(long)]
    pub(crate) no_wc: bool,
    /// Register memory by commands alone (with --device mlx5)
    #[arg(long)]
    pub(crate) minimal: bool,
    /// A data-direct function beside the first function, as a ConnectX-8 has (with --device mlx5; Linux 6.12)
    #[arg(long)]
    pub(crate) data_direct: bool,
    /// A clock of real time, of which timestamps may be (with --device mlx5)
    #[arg(long)]
    pub(crate) real_time: bool,
}

impl Emulation {
    /// As the emulator spells it.
    fn arguments(self) -> Vec<OsString> {
        let mut arguments = Vec::new();
        if self.infiniband {
            arguments.extend(["--port-type".into(), "ib".into()]);
        }
        if self.partition {
            arguments.extend(["--pkey".into(), "7fff,8123".into()]);
        }
        if self.no_wc {
            arguments.push("--no-wc".into());
        }
        if self.minimal {
            arguments.push("--minimal".into());
        }
        if self.real_time {
            arguments.push("--real-time".into());
        }
        if self.data_direct {
            arguments.extend(["--data-direct".into(), DATA_DIRECT.into()]);
        }
        arguments
    }
}

/// A process on the host that a device needs.
#[derive(Clone, Debug)]
pub(crate) struct Companion {
    /// Program and arguments; it runs in the machine's run directory.
    pub(crate) command: Vec<OsString>,
    /// Sockets that it makes in that directory; QEMU starts when all are there.
    pub(crate) sockets: Vec<String>,
}

/// The device's part of the configuration of a guest.
#[derive(Clone, Debug, Default)]
pub(crate) struct Device {
    /// Arguments for QEMU, which runs in the guest's run directory.
    pub(crate) qemu: Vec<String>,
    /// Whether guest memory must be shared with the companion.
    pub(crate) shared_memory: bool,
    /// The process that serves the device.
    pub(crate) companion: Option<Companion>,
    /// The steps of the guest before it is ready.
    pub(crate) setup: GuestSetup,
}

impl Device {
    /// Makes the companion record the device's activity, and capture its packets.
    pub(crate) fn record(&mut self, directory: &Path) -> Result<()> {
        let companion = self.companion.as_mut().context("only `--device mlx5` can be recorded")?;
        // It runs in another directory.
        let directory = std::path::absolute(directory)?;
        let capture = directory.join("packets.pcap");
        companion.command.extend(["--capture".into(), capture.into_os_string()]);
        companion.command.extend(["--record".into(), directory.into_os_string()]);
        Ok(())
    }

    /// Gives the guest this machine's file system, as the user who runs the lab may read and write it.
    pub(crate) fn share(&mut self, kernel: &Kernel, files: &HostFiles) -> Result<()> {
        for module in ["9pnet_virtio", "9p"] {
            require(kernel, module)?;
            self.setup.modules.push(module.to_owned());
        }
        // Files of other file systems would have numbers that occur twice.
        let system = format!("local,id={HOST_TAG},path=/,security_model=none,multidevs=remap");
        let device = format!("virtio-9p-pci,fsdev={HOST_TAG},mount_tag={HOST_TAG}");
        self.qemu.extend(["-fsdev".into(), system, "-device".into(), device]);
        self.setup.host = Some(files.clone());
        Ok(())
    }
}

/// Fails if a directory has recordings already, which the emulator does not replace.
pub(crate) fn check_recordings(directory: &Path) -> Result<()> {
    for number in 0..SOCKETS.len() {
        let path = directory.join(format!("function{number}.record"));
        if path.symlink_metadata().is_ok() {
            bail!("{} is there already: move it, or record into another directory", path.display());
        }
    }
    Ok(())
}

/// Prepares a device for a kernel; `emulator` returns the program that emulates a ConnectX.
pub(crate) fn prepare(
    name: DeviceName,
    kernel: &Kernel,
    emulation: Emulation,
    functions: &[usize],
    emulator: impl FnOnce() -> Result<Option<PathBuf>>,
) -> Result<Device> {
    let device = match name {
        DeviceName::Rxe => soft_roce(),
        DeviceName::Mlx5 => {
            let program = emulator()?.context(
                "the emulated ConnectX is not part of this workspace, so there is no mlx5 device \
                 to boot with; `--device rxe` works",
            )?;
            connectx(program, emulation, functions)
        }
    };
    for needed in ["virtio_pci", "virtio_console"] {
        require(kernel, needed)?;
    }
    for needed in &device.setup.modules {
        // The checksum of soft-RoCE is a module on some kernels and a library on others.
        if needed != "crc32_generic" {
            require(kernel, needed)?;
        }
    }
    Ok(device)
}

fn require(kernel: &Kernel, module: &str) -> Result<()> {
    if !kernel.has(module) {
        bail!("kernel {} has no {module}: not a full Debian kernel?", kernel.release);
    }
    Ok(())
}

fn setup(modules: &[&str], network: Network, devices: usize) -> GuestSetup {
    let modules = modules.iter().map(|name| (*name).to_owned()).collect();
    GuestSetup { modules, network, devices: devices as u32, patience: 60, host: None }
}

fn soft_roce() -> Device {
    let modules = ["veth", "crc32_generic", "rdma_rxe", "ib_uverbs", "rdma_ucm"];
    Device { setup: setup(&modules, Network::SoftRoce, 2), ..Device::default() }
}

/// Names of the functions' sockets in the run directory.
const SOCKETS: [&str; 2] = ["connectx0", "connectx1"];

/// Name of the socket of the first function's data-direct function.
const DATA_DIRECT: &str = "connectx-direct";

/// Name of the emulator's control socket in the run directory.
pub(crate) const CONTROL: &str = "connectx-control";

/// Functions of the emulator behind one switch; a second guest gets those that this one does not.
fn connectx(emulator: PathBuf, emulation: Emulation, functions: &[usize]) -> Device {
    let mut command = vec![emulator.into_os_string()];
    command.extend(emulation.arguments());
    command.extend(["--control".into(), CONTROL.into()]);
    for socket in SOCKETS {
        command.extend(["--socket".into(), socket.into()]);
    }
    let mut qemu = Vec::new();
    let mut sockets: Vec<&str> = functions.iter().map(|number| SOCKETS[*number]).collect();
    let direct = emulation.data_direct.then_some(DATA_DIRECT);
    if functions.contains(&0) {
        sockets.extend(direct);
    }
    for socket in sockets {
        let function = serde_json::json!({
            "driver": "vfio-user-pci",
            "socket": { "type": "unix", "path": socket },
        });
        qemu.extend(["-device".to_owned(), function.to_string()]);
    }
    let modules = ["mlx5_core", "mlx5_ib", "ib_uverbs", "rdma_ucm"];
    Device {
        qemu,
        shared_memory: true,
        companion: Some(Companion {
            command,
            sockets: SOCKETS
                .into_iter()
                .chain([CONTROL])
                .chain(direct)
                .map(str::to_owned)
                .collect(),
        }),
        setup: setup(&modules, Network::Ports, functions.len()),
    }
}
