//! The common part of the two programs of `cargo ci bench`: the operations that are measured, the rounds
//! in which that is done, and the lines of samples.
//!
//! `bench-ours` is static and uses this workspace's library; `bench-theirs` is dynamic and opens
//! rdma-core's libraries when it runs. Both implement [`path::Path`], [`control::Control`] and
//! [`scale::Scale`], so that what is measured is decided here, once. `bench.rs` of `lab` starts them and reads their lines.

#![deny(clippy::print_stdout, clippy::print_stderr, clippy::disallowed_methods)]

pub mod clock;
pub mod command;
pub mod control;
/// Shared with the command line.
#[path = "../../../../cli/src/output.rs"]
mod output;
pub mod path;
pub mod sample;
pub mod scale;
pub mod sim;

/// Why a program could not go on.
pub type Failure = Box<dyn std::error::Error>;

/// The name in front of error messages.
const NAME: &str = "bench";

/// Ends the program early, because standard output failed.
fn end(status: u8) -> ! {
    std::process::exit(status.into())
}

/// Prints a line to standard output, or ends the program.
pub fn say(line: impl std::fmt::Display) {
    output::outln!("{line}");
}

/// Prints a line to standard error, if that takes it.
pub fn complain(line: impl std::fmt::Display) {
    output::errln!("{line}");
}
