//! An emulated ConnectX PCI function that the unmodified mlx5 drivers accept.
//!
//! A [`fabric::Fabric`] holds functions behind one switch. Each [`function::Function`] is what a PCI
//! bus sees; the [`device::Device`] in it is the firmware and the hardware behind BAR0. [`vfio`]
//! serves functions to QEMU, and nothing below it knows of QEMU: tests drive a device in plain
//! memory.
//!
//! Time is handed in, and nothing runs in the background: a device does the same again when it is
//! given the same again.
#![deny(unsafe_code)]

pub mod bar;
pub mod bar0;
pub mod caps;
pub mod cmd;
pub mod control;
mod data;
pub mod decode;
pub mod device;
pub mod doorbell;
mod effort;
pub mod fabric;
pub mod fault;
pub mod format;
pub mod function;
pub mod golden;
#[allow(unsafe_code, reason = "the only module that touches shared memory")]
pub mod guest;
pub mod interrupt;
mod mmio;
pub mod object;
pub mod options;
pub mod pages;
pub mod pci;
pub mod port;
pub mod record;
pub mod refusal;
pub mod repetition;
pub mod segment;
pub mod vfio;
