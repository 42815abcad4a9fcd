//! `cargo ci`: boots real kernels in a VM and runs this workspace in them.

#![forbid(unsafe_code)]

mod accel;
mod ahead;
mod apt;
mod bench;
mod cache;
mod capability;
mod checks;
mod cpio;
mod deb;
mod demo;
mod device;
mod examples;
mod exec;
mod fetch;
mod initramfs;
mod kernel;
mod miri;
mod module;
mod monitor;
mod outcome;
mod peers;
mod processor;
mod progress;
mod proof;
mod python;
mod qemu;
mod session;
mod suite;
mod summary;
mod test;
mod tie;
mod vm;
mod watch;
mod workspace;

use anyhow::Result;
use cache::Cache;
use clap::{Parser, Subcommand};
use std::process::ExitCode;

/// Boots real kernels in a VM, with RDMA devices and without hardware, and runs this workspace in
/// them.
#[derive(Parser)]
#[command(name = "cargo ci", bin_name = "cargo ci", version)]
struct Cli {
    #[command(subcommand)]
    command: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Download kernels, QEMU and peers into the cache, and nothing else
    Fetch {
        /// Replace what is in the cache by what the suites carry today
        #[arg(long)]
        refresh: bool,
    },
    /// Boot a machine and run a command in it
    Exec(exec::ExecArguments),
    /// Boot a machine and open a shell in it
    Shell(exec::MachineArguments),
    /// Show it working: fetch, boot the newest kernel, and exchange messages between two processes
    Demo(demo::DemoArguments),
    /// Measure this workspace beside rdma-core, in the same machine: one suite, or all of them
    Bench(bench::BenchArguments),
    /// Run host checks and the device suites, and summarise
    Test(test::TestArguments),
    /// Run the tests that need no kernel under Miri, if it is installed
    Miri(miri::MiriArguments),
    /// Make one static test binary for machines without Rust
    Bundle(test::BundleArguments),
    /// Become a program that ends with the lab
    #[command(hide = true, name = tie::VERB)]
    Tied {
        parent: i32,
        #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
        command: Vec<String>,
    },
}

fn main() -> ExitCode {
    match run(Cli::parse()) {
        Ok(status) => status,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(cli: Cli) -> Result<ExitCode> {
    match cli.command {
        Verb::Fetch { refresh } => {
            let cache = Cache::open()?;
            fetch::fetch(&cache, &fetch::Needs::all(), refresh)?;
            println!("{}", cache.root().display());
            Ok(ExitCode::SUCCESS)
        }
        Verb::Exec(arguments) => exec::exec(&arguments),
        Verb::Shell(arguments) => exec::shell(&arguments),
        Verb::Demo(arguments) => demo::demo(&arguments),
        Verb::Bench(arguments) => bench::bench(&arguments),
        Verb::Test(arguments) => test::test(&arguments),
        Verb::Miri(arguments) => miri::miri(&arguments),
        Verb::Bundle(arguments) => test::bundle(&arguments),
        Verb::Tied { parent, command } => {
            tie::become_tied(parent, &command)?;
            Ok(ExitCode::FAILURE)
        }
    }
}
