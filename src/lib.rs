//! RDMA verbs in pure Rust.
