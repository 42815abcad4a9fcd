//! Functions for mlx5 devices only: UARs and VARs, the device's clock, and attributes that its driver reports.
//!
//! On a context of another device all of them fail with `EOPNOTSUPP`. Queues, keys and domains are made as on
//! any device.

mod attr;
mod clock;
mod page;
mod uar;
pub(crate) mod var;

pub use crate::sharing::var::{ExportSizes, ImportedVar, export_sizes};
pub use attr::{ContextAttr, query_device};
pub use clock::Clock;
pub use page::DoorbellPage;
pub use uar::{Uar, UarKind};
pub use var::{Var, VarKind};
