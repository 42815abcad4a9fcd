//! What only mlx5 has: doorbell pages, the device's clock, and what its driver says of it.
//!
//! On a context of another device everything here answers `EOPNOTSUPP`. Queues, keys and domains
//! are made as on any device.

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
