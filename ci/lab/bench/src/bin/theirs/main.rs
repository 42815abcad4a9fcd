//! The operations that `cargo ci bench` compares, by rdma-core. Pairs with `bench-ours`.
//!
//! A program of its own, because it is dynamic: it opens libibverbs when it runs, as Debian ships
//! it. Nothing of rdma-core is compiled or linked.

#![deny(clippy::print_stdout, clippy::print_stderr, clippy::disallowed_methods)]

mod abi;
mod cm;
mod control;
mod endpoint;
mod lane;
mod path;
mod scale;
mod verbs;

use lab_bench::command;
use lab_bench::path::Rounds;
use lab_bench::{Failure, path as data_path};
use std::process::ExitCode;

fn main() -> ExitCode {
    command::main::<Theirs>()
}

/// rdma-core.
struct Theirs;

impl command::Programs for Theirs {
    type Control = control::Theirs;
    type Scale = scale::Theirs;

    fn path(_: bool, rounds: &Rounds<'_>) -> Result<(), Failure> {
        data_path::measure::<path::Theirs>(rounds)
    }
}
