//! Formats of WQEs, CQEs, EQEs and Ethernet frames. These files hold no state of the device.

pub(crate) mod cqe;
pub mod event;
pub(crate) mod frame;
pub mod segments;
pub mod syndrome;
pub mod wqe;
