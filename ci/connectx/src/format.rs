//! What lies in guest memory and in Ethernet frames, byte by byte: no state of the device.

pub(crate) mod cqe;
pub mod event;
pub(crate) mod frame;
pub mod syndrome;
pub mod wqe;
