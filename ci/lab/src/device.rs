//! What the guest's RDMA devices are: the parts of machine and guest that differ between them.
//!
//! A device may ask for arguments of QEMU, for a companion process on the host, for modules and
//! for work of the guest. `vm.rs` puts these together.

use crate::kernel::Kernel;
use anyhow::{Result, bail};
use clap::ValueEnum;
use lab_guest::order::Setup;

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
}

/// What a device adds to a machine.
#[derive(Clone, Debug, Default)]
pub(crate) struct Device {
    /// Arguments for QEMU.
    pub(crate) qemu: Vec<String>,
    /// Whether guest memory must be shared with a companion process.
    pub(crate) shared_memory: bool,
    /// What the guest does before it is ready.
    pub(crate) setup: Setup,
}

/// Prepares a device for a kernel.
pub(crate) fn prepare(name: DeviceName, kernel: &Kernel) -> Result<Device> {
    let (modules, rxe, devices): (&[&str], bool, u32) = match name {
        DeviceName::Rxe => {
            (&["veth", "crc32_generic", "rdma_rxe", "ib_uverbs", "rdma_ucm"], true, 2)
        }
        DeviceName::Mlx5 => bail!(
            "the emulated ConnectX is not part of this lab yet, so there is no mlx5 device to boot; \
             `--device rxe` works"
        ),
    };
    for needed in ["virtio_pci", "virtio_console", "ib_uverbs"].iter().chain(modules) {
        // What soft-RoCE checksums with is a module on some kernels and a library on others.
        if !kernel.has(needed) && *needed != "crc32_generic" {
            bail!("kernel {} has no {needed}: not a full Debian kernel?", kernel.release);
        }
    }
    Ok(Device {
        qemu: Vec::new(),
        shared_memory: false,
        setup: Setup {
            modules: modules.iter().map(|name| (*name).to_owned()).collect(),
            rxe,
            devices,
            patience: 60,
        },
    })
}
