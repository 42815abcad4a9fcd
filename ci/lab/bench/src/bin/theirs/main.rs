//! What rdma-core needs for the operations that `cargo ci bench` compares. Pairs with `bench-ours`.
//!
//! A program of its own, because it is dynamic: it opens libibverbs when it runs, as Debian ships
//! it. Nothing of rdma-core is compiled or linked.

mod abi;
mod endpoint;
mod path;
mod verbs;

use lab_bench::command;
use std::process::ExitCode;

fn main() -> ExitCode {
    command::main::<Theirs>()
}

/// rdma-core.
struct Theirs;

impl command::Side for Theirs {
    type Path = path::Theirs;
}
