//! Functions for mlx5 devices only: UARs and VARs, the device's clock, attributes that its driver reports, and queues
//! as addresses and numbers, for code that drives them without this library.
//!
//! On a context of another device all of them fail with `EOPNOTSUPP`. Queues, keys and domains are made as on
//! any device.

mod attr;
mod clock;
mod data_direct;
pub mod devx;
mod page;
mod qp_path;
mod raw_address;
mod raw_cq;
mod raw_qp;
mod raw_srq;
mod uar;
pub(crate) mod var;

pub use crate::memory::queue_layout::{
    CqLayout, QpIndices, QpLayout, RawPacketNumbers, RegisterLayout, SrqLayout, WqLayout,
};
pub use crate::sharing::var::{ExportSizes, ImportedVar, export_sizes};
pub use attr::{ContextAttr, query_device};
pub use clock::{Clock, real_time};
pub use data_direct::data_direct_path;
pub use page::DoorbellPage;
pub use qp_path::{
    LagPort, OutOfOrderReceives, query_lag_port, query_out_of_order, set_ah_udp_source_port,
    set_lag_port, set_udp_source_port,
};
pub use raw_address::{address_vector, device_memory_address, pd_number};
pub use raw_cq::RawCompletionQueue;
pub use raw_qp::RawQueuePair;
pub use raw_srq::RawSharedReceiveQueue;
pub use uar::{Uar, UarKind};
pub use var::{Var, VarKind};
