//! An RDMA device, its kernel and its network, in the process of a program on `uverbs`.
//!
//! A [`Fabric`] has devices behind one switch. The device model is that of `uverbs-connectx`, which unmodified
//! mlx5 drivers accept in a virtual machine; the kernel speaks the ABI of Linux. The library opens a device of
//! the fabric as any other, and its provider for mlx5 drives it as it drives hardware.
//!
//! **Unstable**: the interface changes in any release.
#![deny(unsafe_code)]

mod call;
mod cm;
mod driver;
mod events;
mod fabric;
mod faults;
#[allow(unsafe_code, reason = "promises of a file to the library")]
mod file;
mod history;
mod interface;
mod kernel;
#[allow(unsafe_code, reason = "memory of the process, by address")]
mod memory;
mod network;
mod profile;
mod seeds;
mod strict;
mod udp;
mod world;

pub use fabric::{Clock, Fabric, FabricBuilder, FabricError, MAX_DEVICES, Mode};
pub use faults::{CqeError, Device, Rates, Side, Syndrome, Verb};
pub use memory::dma_buf;
pub use profile::{Limits, Profile};
pub use seeds::each_seed;
pub use strict::Findings;
pub use udp::{ROCE_PORT, UdpCounters};
pub use uverbs_connectx::audit::POISON;
pub use uverbs_connectx::network::{Network, PacketFault, PacketKind, Traffic};
