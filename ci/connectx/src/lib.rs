//! Attaches the emulated ConnectX of [`uverbs_connectx`] to QEMU, for the unmodified mlx5 drivers.
//!
//! [`vfio`] serves a function to QEMU, [`control`] answers tests on a socket, [`decode`] and
//! [`golden`] read recordings. The device itself is in the library: nothing there depends on QEMU.
#![deny(unsafe_code)]

pub mod control;
pub mod decode;
pub mod golden;
pub mod log_limiter;
pub mod vfio;
