//! The operations that `cargo ci bench` compares, by this workspace's library. Pairs with
//! `bench-theirs`.

#![deny(clippy::print_stdout, clippy::print_stderr, clippy::disallowed_methods)]

mod cm;
mod control;
mod path;
mod scale;

use lab_bench::command;
use lab_bench::path::Rounds;
use lab_bench::{Failure, path as data_path};
use std::process::ExitCode;
use uverbs::{Exclusive, Shared};

fn main() -> ExitCode {
    command::main::<Ours>()
}

/// This workspace.
struct Ours;

impl command::Programs for Ours {
    type Control = control::Ours;
    type Scale = scale::Ours;

    fn path(alone: bool, rounds: &Rounds<'_>) -> Result<(), Failure> {
        match alone {
            true => data_path::measure::<path::Ours<Exclusive>>(rounds),
            false => data_path::measure::<path::Ours<Shared>>(rounds),
        }
    }
}
