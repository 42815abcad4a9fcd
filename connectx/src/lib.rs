//! An emulated ConnectX PCI function for the unmodified mlx5 drivers, and for a kernel in the process.
//!
//! **Unstable**: the interface follows the needs of this repository's packages, and changes without
//! notice.
//!
//! A [`fabric::Fabric`] connects functions. A [`function::Function`] is a function as its bus sees
//! it, and its [`device::Device`] is the state behind BAR0. The package `connectx-vfio` serves
//! functions to QEMU. Nothing here depends on QEMU: tests drive a device in plain memory.
//!
//! The caller passes the time in, and nothing runs in the background: the same calls have the same
//! result.
#![deny(unsafe_code)]

pub mod audit;
pub mod bar0;
pub mod bar_memory;
mod bus;
mod capture;
mod chunks;
pub mod cmd;
pub mod command_error;
mod cost;
mod data;
pub mod decisions;
pub mod device;
pub mod doorbell;
pub mod fabric;
pub mod fault;
pub mod format;
pub mod function;
#[allow(unsafe_code, reason = "the only module that touches shared memory")]
pub mod guest;
pub mod hca_caps;
pub mod init_segment;
pub mod interrupt;
mod link;
mod mmio;
pub mod network;
pub mod object;
pub mod options;
pub mod outside;
pub mod pages;
mod path;
pub mod pci;
pub mod port;
mod ready;
pub mod recording;
mod ways;
