//! `cargo ci bench`: this workspace beside rdma-core, in the same machine.
//!
//! Each suite prints one table. Being slower is a result and no failure; what cannot be measured
//! is.

mod calls;
mod control;
mod futures;
mod owned;
mod path;
mod perftest;
mod pingpong;
mod rounds;
mod rxe;
mod scale;
mod score;
mod size;
mod table;

use crate::device::DeviceName;
use crate::fetch::Needs;
use crate::kernel::KernelName;
use anyhow::Result;
use clap::{Args, ValueEnum};
use serde::Serialize;
use std::fmt::Display;
use std::process::ExitCode;

/// Runs of which the lowest tells the instructions: interrupts add to some.
const FEWEST: u32 = 7;

/// What is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Suite {
    /// ping-pong, latency and message rate over soft-RoCE: time and system calls per message
    Rxe,
    /// ping-pong of futures over soft-RoCE, beside a blocking wait for events
    RxeFutures,
    /// instructions of each operation of mlx5's data path
    Mlx5Path,
    /// instructions that owned buffers add to requests of mlx5
    Mlx5Owned,
    /// the control path: time and system calls
    Control,
    /// many objects: time and memory of each
    Scale,
    /// bytes of programs, and files that they open
    Size,
}

/// `cargo ci bench`
#[derive(Args, Clone, Debug)]
pub(crate) struct BenchArguments {
    /// What to measure
    #[arg(value_enum)]
    suite: Suite,
    /// The kernel to boot
    #[arg(long, value_enum, default_value = "newest")]
    kernel: KernelName,
    /// The device of control, scale and size
    #[arg(long, value_enum, default_value = "mlx5")]
    device: DeviceName,
    /// Runs of each side for each operation; where the lowest counts, no fewer than 7
    #[arg(long, default_value_t = 9, value_parser = clap::value_parser!(u32).range(1..))]
    runs: u32,
    /// Measure only operations whose name contains this
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// With rxe, its futures and scale: let the guest's clock count instructions: the same result each
    /// time, whatever else this machine does. The guest has one processor then, so that polling over
    /// rxe tells nothing and is left out
    #[arg(long)]
    count_instructions: bool,
    /// With control: print the system calls of both sides, one by one, and measure nothing
    #[arg(long)]
    calls: bool,
    /// Print one JSON object in place of the table
    #[arg(long)]
    json: bool,
    /// Show the kernel's console
    #[arg(long)]
    console: bool,
}

impl BenchArguments {
    fn needs(&self) -> Needs {
        Needs { kernels: vec![self.kernel], peers: true, python: false }
    }

    /// Runs of which the lowest counts.
    fn runs_to_the_lowest(&self) -> u32 {
        self.runs.max(FEWEST)
    }

    fn wants(&self, operation: &str) -> bool {
        self.only.as_ref().is_none_or(|text| operation.contains(text.as_str()))
    }

    fn print(&self, result: &(impl Serialize + Display)) -> Result<()> {
        print!("{}", self.text(result)?);
        Ok(())
    }

    /// What a suite found, for programs or for people.
    fn text(&self, result: &(impl Serialize + Display)) -> Result<String> {
        if self.json {
            Ok(serde_json::to_string_pretty(result)? + "\n")
        } else {
            Ok(result.to_string())
        }
    }
}

/// Measures, and prints what came out.
pub(crate) fn bench(arguments: &BenchArguments) -> Result<ExitCode> {
    match arguments.suite {
        Suite::Rxe => arguments.print(&rxe::run(arguments)?)?,
        Suite::RxeFutures => arguments.print(&futures::run(arguments)?)?,
        Suite::Mlx5Path => arguments.print(&path::run(arguments)?)?,
        Suite::Mlx5Owned => arguments.print(&owned::run(arguments)?)?,
        Suite::Control if arguments.calls => arguments.print(&calls::run(arguments)?)?,
        Suite::Control => arguments.print(&control::run(arguments)?)?,
        Suite::Scale => arguments.print(&scale::run(arguments)?)?,
        Suite::Size => arguments.print(&size::run(arguments)?)?,
    }
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        bench: BenchArguments,
    }

    #[test]
    fn json_is_printed_in_place_of_the_table() {
        let found = serde_json::json!({ "kernel": "7.2", "rows": [] });
        let text = |words: &[&str]| {
            let line = Line::try_parse_from([&["bench", "size"], words].concat()).unwrap();
            line.bench.text(&found).unwrap()
        };
        assert_eq!(text(&[]), found.to_string());
        assert_eq!(text(&["--json"]), "{\n  \"kernel\": \"7.2\",\n  \"rows\": []\n}\n");
    }
}
