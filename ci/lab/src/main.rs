//! `cargo ci`: boots real kernels in a VM and runs this workspace in them.

#![forbid(unsafe_code)]
#![deny(clippy::print_stdout, clippy::print_stderr, clippy::disallowed_methods)]

mod arch;
mod bench;
mod check;
mod commands;
mod host;
mod machine;
/// Shared with the command line.
#[path = "../../../cli/src/output.rs"]
mod output;
mod packages;
mod run;
mod suites;
mod workspace;

use anyhow::Result;
use clap::{Parser, Subcommand};
use commands::{demo, exec, quick, runner, soak, test};
use host::{miri, mutants};
use output::{errln, outln};
use packages::cache::Cache;
use packages::{fetch, kernel};
use run::{parent_death, signals, subprocess, terminal};
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
    /// Download kernels, QEMU and rdma-core's tools into the cache, and nothing else
    Fetch {
        /// Replace the cached packages by those that Debian's suites carry today
        #[arg(long)]
        refresh: bool,
        /// Fetch this kernel, with QEMU and a shell, and nothing else; may be given several times
        #[arg(long)]
        kernel: Vec<kernel::KernelName>,
        /// The machines' processors
        #[arg(long, value_enum, default_value = "x86_64")]
        arch: arch::Arch,
    },
    /// Boot a machine and run a command in it
    Exec(exec::ExecArguments),
    /// Run the programs of Cargo's `test`, `run` and `bench`, of any package, each in a machine of its own
    Runner(runner::RunnerArguments),
    /// Boot a machine and open a shell in it
    Shell(exec::MachineArguments),
    /// Demonstrate the library: fetch, boot the newest kernel, and exchange messages between two
    /// processes
    Demo(demo::DemoArguments),
    /// Measure this workspace beside rdma-core, in the same guest: one suite, or all of them
    Bench(bench::BenchArguments),
    /// Test the change that is being edited, in about a minute: unit tests, and on both devices
    /// smoke tests and the tests of the changed files
    Quick(quick::QuickArguments),
    /// Check the sources: formatting, lints, documentation, oldest compiler, public API,
    /// dependencies
    Check(check::CheckArguments),
    /// Run the host's tests, the comparison of the ABI, and the device suites; with --full everything
    Test(test::TestArguments),
    /// Run the tests that take hours, and record their results in ci/lab/SOAK.md
    Soak(soak::SoakArguments),
    /// Run the tests that need no kernel under Miri, if it is installed
    Miri(miri::MiriArguments),
    /// Change the library in a sample of places, one at a time, and list the changes that its host
    /// tests miss
    Mutants(mutants::MutantsArguments),
    /// Make one static test binary for machines without Rust
    Bundle(test::BundleArguments),
    /// Run a program that is killed when the lab ends
    #[command(hide = true, name = parent_death::SUBCOMMAND)]
    DieWithParent {
        parent: i32,
        #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
        command: Vec<String>,
    },
}

/// The name in front of error messages.
const NAME: &str = "error";

/// Ends the run early, because standard output failed.
fn end(status: u8) -> ! {
    terminal::restore();
    subprocess::end_children();
    std::process::exit(status.into())
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(refusal) if refusal.use_stderr() => {
            output::complain(format_args!("{refusal}"));
            return ExitCode::from(2);
        }
        Err(help) => {
            output::out!("{help}");
            return ExitCode::SUCCESS;
        }
    };
    match run(cli) {
        Ok(status) => status,
        Err(error) => {
            errln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(cli: Cli) -> Result<ExitCode> {
    if !matches!(cli.command, Verb::DieWithParent { .. }) {
        signals::watch()?;
    }
    match cli.command {
        Verb::Fetch { refresh, kernel, arch } => {
            let cache = Cache::open()?;
            let needs = match kernel.as_slice() {
                [] => fetch::Needs::all(arch),
                kernels => fetch::Needs::kernels(arch, kernels),
            };
            fetch::fetch(&cache, &needs, refresh)?;
            if kernel.is_empty() {
                check::fetch(&cache, refresh)?;
            }
            outln!("{}", cache.root().display());
            Ok(ExitCode::SUCCESS)
        }
        Verb::Exec(arguments) => exec::exec(&arguments),
        Verb::Runner(arguments) => runner::runner(&arguments),
        Verb::Shell(arguments) => exec::shell(&arguments),
        Verb::Demo(arguments) => demo::demo(&arguments),
        Verb::Bench(arguments) => bench::bench(&arguments),
        Verb::Quick(arguments) => quick::quick(&arguments),
        Verb::Check(arguments) => check::check(&arguments),
        Verb::Test(arguments) => test::test(&arguments),
        Verb::Soak(arguments) => soak::soak(&arguments),
        Verb::Miri(arguments) => miri::miri(&arguments),
        Verb::Mutants(arguments) => mutants::mutants(&arguments),
        Verb::Bundle(arguments) => test::bundle(&arguments),
        Verb::DieWithParent { parent, command } => {
            parent_death::become_program(parent, &command)?;
            Ok(ExitCode::FAILURE)
        }
    }
}
