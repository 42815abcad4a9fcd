//! `cargo ci`: boots real kernels in a VM and runs this workspace in them.

#![forbid(unsafe_code)]

mod apt;
mod cache;
mod deb;
mod fetch;
mod kernel;
mod module;
mod peers;
mod progress;
mod qemu;

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
    }
}
