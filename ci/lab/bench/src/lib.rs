//! What the two programs of `cargo ci bench` have in common: the operations that are measured, the
//! rounds in which that is done, and the lines that say what came out.
//!
//! `bench-ours` is static and uses this workspace's library; `bench-theirs` is dynamic and opens
//! rdma-core's libraries when it runs. Both implement [`path::Path`], [`control::Control`] and
//! [`scale::Scale`], so that what is measured is decided here, once. `bench.rs` of `lab` starts them and reads their lines.

pub mod clock;
pub mod command;
pub mod control;
pub mod path;
pub mod sample;
pub mod scale;

/// Why a program could not go on.
pub type Failure = Box<dyn std::error::Error>;
