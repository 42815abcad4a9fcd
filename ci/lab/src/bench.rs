//! `cargo ci bench`: this workspace beside rdma-core, in the same machine; `sim` is this workspace's alone.
//!
//! Each suite prints one table, and without a suite all of them run. A slower program is a result; only a
//! measurement that is impossible is a failure.

mod calls;
mod cmtime;
mod control;
mod futures;
mod owned;
mod path;
mod perftest;
mod pingpong;
mod plot;
mod repeats;
mod rounds;
mod rxe;
mod scale;
mod score;
mod sim;
mod size;
mod table;
mod udp;

use crate::arch::Arch;
use crate::machine::device::DeviceName;
use crate::output::{errln, out};
use crate::packages::fetch::Needs;
use crate::packages::kernel::KernelName;
use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use lab_bench::control::Thing;
use serde::Serialize;
use std::fmt::Display;
use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

/// The fewest runs whose lowest tells the instructions: interrupts add to some.
const FEWEST: u32 = 7;

/// A comparison: operations, and how they are measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum BenchSuite {
    /// ping-pong, latency and message rate over soft-RoCE: time and system calls per message
    Rxe,
    /// ping-pong of futures over soft-RoCE, beside a blocking wait for events
    RxeFutures,
    /// ping-pong of devices in processes, over UDP, beside rdma-core's over soft-RoCE
    Udp,
    /// instructions of each operation of mlx5's data path
    Mlx5Path,
    /// instructions that owned buffers add to requests of mlx5
    Mlx5Owned,
    /// instructions that futures add to owned requests of mlx5, with a thread domain and without
    Mlx5Futures,
    /// the control path: time and system calls
    Control,
    /// connections by address beside librdmacm: time, system calls, instructions, files opened
    Cm,
    /// many objects: time and memory of each
    Scale,
    /// bytes of programs, and files that they open
    Size,
    /// the device in the process, in each mode: time and allocations, on this machine without a VM
    Sim,
}

/// `cargo ci bench`
#[derive(Args, Clone, Debug)]
pub(crate) struct BenchArguments {
    /// The suite to measure [default: all, one after the other]
    #[arg(value_enum)]
    suite: Option<BenchSuite>,
    /// The kernel to boot: 6.1, 6.12, newest, or a version that Debian's suites carry (6.18, 6.18.9)
    #[arg(long, default_value = "newest")]
    kernel: KernelName,
    /// The machine's processor; another than this machine's for the suites that count the data path of mlx5
    #[arg(long, value_enum, default_value = "x86_64", requires = "suite")]
    arch: Arch,
    /// The device of control, cm, scale and size
    #[arg(long, value_enum, default_value = "mlx5")]
    device: DeviceName,
    /// Runs of each side for each operation; where the lowest counts, no fewer than 7
    #[arg(long, default_value_t = 9, value_parser = clap::value_parser!(u32).range(1..))]
    runs: u32,
    /// Measure only operations whose name contains this
    #[arg(long, value_name = "TEXT", requires = "suite")]
    only: Option<String>,
    /// With rxe, rxe-futures, udp and scale: let the guest's clock count instructions, which load of this machine
    /// does not change. The guest has one processor then, and polling over rxe is left out
    #[arg(long)]
    count_instructions: bool,
    /// With control and cm: print the system calls of both sides, one by one, and measure nothing
    #[arg(long, requires = "suite")]
    calls: bool,
    /// Print one JSON object in place of each table
    #[arg(long)]
    json: bool,
    /// Draw plots of the results into this directory, as SVG files
    #[arg(long, value_name = "DIRECTORY")]
    plots: Option<PathBuf>,
    /// Show the kernel's console
    #[arg(long)]
    console: bool,
}

impl BenchArguments {
    fn needs(&self) -> Needs {
        Needs { peers: true, ..Needs::kernels(self.arch, &[self.kernel]) }
    }

    /// Number of runs, where the lowest counts.
    fn runs_to_the_lowest(&self) -> u32 {
        self.runs.max(FEWEST)
    }

    fn wants(&self, operation: &str) -> bool {
        self.only.as_ref().is_none_or(|text| operation.contains(text.as_str()))
    }

    /// The suites to run, in this order.
    fn suites(&self) -> &[BenchSuite] {
        match &self.suite {
            Some(suite) => std::slice::from_ref(suite),
            None => BenchSuite::value_variants(),
        }
    }

    /// The first suite that does not run on these processors.
    fn refused(&self) -> Option<BenchSuite> {
        let runs = |suite: &BenchSuite| self.arch.is_host() || BenchSuite::FOREIGN.contains(suite);
        self.suites().iter().copied().find(|suite| !runs(suite))
    }

    /// A suite's result as JSON or as a table; also draws its plots.
    fn text(&self, suite: BenchSuite, result: &(impl Serialize + Display)) -> Result<String> {
        if let Some(directory) = &self.plots {
            for plot in plot::plots(&suite.name(), &serde_json::to_value(result)?)? {
                let path = directory.join(&plot.name);
                plot::check_place(&path)?;
                fs::write(&path, plot.svg).with_context(|| format!("write {}", path.display()))?;
            }
        }
        if self.json {
            let document = Document { suite: suite.name(), result };
            Ok(serde_json::to_string_pretty(&document)? + "\n")
        } else {
            Ok(result.to_string())
        }
    }

    /// Runs a suite; of one that ended early with the reason, too.
    fn measure(&self, suite: BenchSuite) -> Result<(String, Option<String>)> {
        let partial = |score: score::Score| Ok((self.text(suite, &score)?, score.failure));
        let text = match suite {
            BenchSuite::Rxe => return partial(rxe::run(self)?),
            BenchSuite::RxeFutures => return partial(futures::run(self)?),
            BenchSuite::Udp => return partial(udp::run(self)?),
            BenchSuite::Mlx5Path => self.text(suite, &path::run(self)?),
            BenchSuite::Mlx5Owned => self.text(suite, &owned::run(self)?),
            BenchSuite::Mlx5Futures => self.text(suite, &owned::run_futures(self)?),
            BenchSuite::Control if self.calls => self.text(suite, &calls::run(self, Thing::ALL)?),
            BenchSuite::Cm if self.calls => self.text(suite, &calls::run(self, Thing::MANAGED)?),
            BenchSuite::Control => self.text(suite, &control::run(self)?),
            BenchSuite::Cm => self.text(suite, &control::by_address(self)?),
            BenchSuite::Scale => self.text(suite, &scale::run(self)?),
            BenchSuite::Size => self.text(suite, &size::run(self)?),
            BenchSuite::Sim => self.text(suite, &sim::run(self)?),
        };
        Ok((text?, None))
    }
}

impl BenchSuite {
    /// The suites that run on another processor: those that need neither its system calls in words nor its
    /// times.
    const FOREIGN: [BenchSuite; 3] =
        [BenchSuite::Mlx5Path, BenchSuite::Mlx5Owned, BenchSuite::Mlx5Futures];

    /// As the command line spells it.
    fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }
}

/// A result as programs read it, with the suite's name.
#[derive(Serialize)]
struct Document<'a, T> {
    suite: String,
    #[serde(flatten)]
    result: &'a T,
}

/// Measures, and prints the results. A suite that fails keeps none from running after it.
pub(crate) fn bench(arguments: &BenchArguments) -> Result<ExitCode> {
    if let Some(suite) = arguments.refused() {
        let names = BenchSuite::FOREIGN.map(BenchSuite::name).join(", ");
        bail!("{} runs on {} only: {names} run on others", suite.name(), Arch::default().label());
    }
    if let Some(directory) = &arguments.plots {
        let names: Vec<_> = arguments.suites().iter().map(|suite| suite.name()).collect();
        plot::prepare(directory, &names)?;
    }
    let mut status = ExitCode::SUCCESS;
    for (place, &suite) in arguments.suites().iter().enumerate() {
        match arguments.measure(suite).with_context(|| suite.name()) {
            Ok((text, failure)) => {
                let apart = if place > 0 && !arguments.json { "\n" } else { "" };
                out!("{apart}{text}");
                if let Some(failure) = failure {
                    errln!("error: {}: {failure}", suite.name());
                    status = ExitCode::FAILURE;
                }
            }
            Err(error) => {
                errln!("error: {error:#}");
                status = ExitCode::FAILURE;
            }
        }
    }
    Ok(status)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use clap::error::ErrorKind;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        bench: BenchArguments,
    }

    fn parse(words: &[&str]) -> Result<BenchArguments, clap::Error> {
        Line::try_parse_from([&["bench"], words].concat()).map(|line| line.bench)
    }

    #[test]
    fn json_is_printed_in_place_of_the_table() {
        let found = serde_json::json!({ "kernel": "7.2", "rows": [] });
        let text = |words| parse(words).unwrap().text(BenchSuite::Size, &found).unwrap();
        assert_eq!(text(&["size"]), found.to_string());
        let document = "{\n  \"suite\": \"size\",\n  \"kernel\": \"7.2\",\n  \"rows\": []\n}\n";
        assert_eq!(text(&["size", "--json"]), document);
        // One of several looks the same.
        assert_eq!(text(&["--json"]), document);
    }

    #[test]
    fn all_suites_run_unless_one_is_named() {
        assert_eq!(parse(&["rxe-futures"]).unwrap().suites(), [BenchSuite::RxeFutures]);
        let all = [
            BenchSuite::Rxe,
            BenchSuite::RxeFutures,
            BenchSuite::Udp,
            BenchSuite::Mlx5Path,
            BenchSuite::Mlx5Owned,
            BenchSuite::Mlx5Futures,
            BenchSuite::Control,
            BenchSuite::Cm,
            BenchSuite::Scale,
            BenchSuite::Size,
            BenchSuite::Sim,
        ];
        assert_eq!(parse(&["--runs", "3"]).unwrap().suites(), all);
        assert_eq!(all.map(BenchSuite::name)[3..5], ["mlx5-path", "mlx5-owned"]);
        let refused = |words| parse(words).unwrap_err().kind();
        assert_eq!(refused(&["mlx5"]), ErrorKind::InvalidValue);
        assert_eq!(refused(&["size", "scale"]), ErrorKind::UnknownArgument);
    }

    #[test]
    fn suites_that_need_this_machine_are_refused_on_another_processor() {
        let refused = |suite, arch| parse(&[suite, "--arch", arch]).unwrap().refused();
        assert_eq!(refused("mlx5-path", "aarch64"), None);
        assert_eq!(refused("control", "aarch64"), Some(BenchSuite::Control));
        assert_eq!(refused("control", "x86_64"), None);
        let kind = parse(&["--arch", "aarch64"]).unwrap_err().kind();
        assert_eq!(kind, ErrorKind::MissingRequiredArgument, "not all suites can run");
    }

    #[test]
    fn options_that_pick_operations_need_a_suite() {
        let arguments = parse(&["control", "--only", "open", "--calls"]).unwrap();
        assert!(arguments.wants("open, create") && !arguments.wants("region"));
        for words in [["--only", "write"].as_slice(), &["--calls"]] {
            let kind = parse(words).unwrap_err().kind();
            assert_eq!(kind, ErrorKind::MissingRequiredArgument, "{words:?}");
        }
    }
}
