//! RDMA verbs in pure Rust.

pub mod device;
mod error;

pub use error::{Error, Result};
pub use rustix::io::Errno;
