//! RDMA verbs in pure Rust.

mod error;

pub use error::{Error, Result};
pub use rustix::io::Errno;
