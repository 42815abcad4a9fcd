//! Measurements of the emulated device: time to boot, latency of a ping-pong, and processor time
//! while idle. Each is printed.
//!
//! Times mean something only on an idle machine, so a time beyond its limit fails only if a filter
//! names the figures.

use super::{CaseContext, case, failed};
use crate::machine::device::Emulation;
use crate::machine::session::Machine;
use crate::machine::vm::Vm;
use crate::run::jobs::say;
use crate::run::outcome::{Report, TestOutcome};
use anyhow::{Context, Result, bail};
use std::thread;
use std::time::Duration;

/// Seconds from QEMU's start to a device that can be opened.
const BOOT: f64 = 15.0;
/// Microseconds of a round trip, polling.
const PINGPONG: f64 = 120.0;
/// Share of a processor that the emulator takes while the guest is idle, in percent.
const IDLE: f64 = 2.0;

/// Runs of the ping-pong: the median is printed, the best is compared with the limit.
const RUNS: usize = 5;
/// For how long the idle guest is watched.
const WATCHED: Duration = Duration::from_secs(15);

/// A measurement in words, and the reason if it is too high.
struct Measured {
    text: String,
    beyond: Option<String>,
    /// Whether it depends on the load of the host.
    is_time: bool,
}

type Figure = fn(&mut Vm) -> Result<Measured>;

const FIGURES: &[(&str, Figure)] =
    &[("figures::boot", boot), ("figures::idle", idle), ("figures::pingpong", pingpong)];

/// Takes the requested measurements in one guest.
pub(crate) fn run(context: &CaseContext<'_>) -> Vec<Report> {
    let wanted: Vec<_> = FIGURES
        .iter()
        .filter(|(name, _)| match context.scope.filter {
            None => true,
            Some(filter) => name.contains(filter),
        })
        .collect();
    if wanted.is_empty() {
        return Vec::new();
    }
    say!("\nfigures on {} mlx5", context.kernel.label());
    let machine: Machine<'_> = context.machine(Emulation::default());
    let mut vm = match context.session.boot(&machine) {
        Ok(vm) => vm,
        Err(error) => return vec![failed("figures::boot", &error)],
    };
    let mut reports = Vec::new();
    for (name, figure) in wanted {
        let measured =
            figure(&mut vm).and_then(|Measured { text, beyond, is_time }| match beyond {
                Some(limit) if is_time && context.scope.filter.is_none() => {
                    Ok(format!("{text}; {limit}, but this machine may be busy"))
                }
                Some(limit) => bail!("{text}; {limit}"),
                None => Ok(text),
            });
        let report = match measured {
            Ok(text) => {
                say!("test {name} ... ok ({text})");
                Report { name: (*name).to_owned(), outcome: TestOutcome::Passed }
            }
            Err(error) => {
                say!("test {name} ... FAILED");
                failed(name, &error)
            }
        };
        reports.push(report);
        if vm.ended() {
            return reports;
        }
    }
    if let Err(error) = vm.power_off() {
        reports.push(failed("figures::power_off", &error));
    }
    reports
}

/// The guest is ready when both functions can be opened.
fn boot(vm: &mut Vm) -> Result<Measured> {
    let seconds = vm.boot_time.as_secs_f64();
    Ok(Measured {
        text: format!("{seconds:.1} s from QEMU's start to both devices"),
        beyond: (seconds > BOOT).then(|| format!("at most {BOOT} s are promised")),
        is_time: true,
    })
}

/// The emulator's own processor time, which other load of the host does not change.
fn idle(vm: &mut Vm) -> Result<Measured> {
    let emulator = vm.companion().context("an emulator")?;
    thread::sleep(Duration::from_secs(2));
    let before = emulator.processor_time()?;
    thread::sleep(WATCHED);
    let used = emulator.processor_time()? - before;
    let percent = 100.0 * used.as_secs_f64() / WATCHED.as_secs_f64();
    Ok(Measured {
        text: format!("{percent:.1} % of a processor for both functions"),
        beyond: (percent >= IDLE).then(|| format!("under {IDLE} % are promised")),
        is_time: false,
    })
}

fn pingpong(vm: &mut Vm) -> Result<Measured> {
    let mut times = [Vec::new(), Vec::new()];
    for (options, times) in ["", "-e"].into_iter().zip(&mut times) {
        for _ in 0..RUNS {
            times.push(iteration(vm, options)?);
        }
        times.sort_by(f64::total_cmp);
    }
    let [polling, events] = times;
    let text = format!(
        "{:.0} µs per iteration polling ({:.0} to {:.0}), {:.0} by events",
        polling[RUNS / 2],
        polling[0],
        polling[RUNS - 1],
        events[RUNS / 2]
    );
    let beyond = polling[0] > PINGPONG;
    Ok(Measured {
        text,
        beyond: beyond.then(|| format!("at most {PINGPONG} polling are promised")),
        is_time: true,
    })
}

/// Microseconds of one iteration between the two functions, 4096 bytes each way.
fn iteration(vm: &mut Vm, options: &str) -> Result<f64> {
    let program = format!("ibv_rc_pingpong -g 3 -n 3000 {options}");
    let script = format!("pair 'tcp 18515' '{program} -d mlx5_1' '{program} -d mlx5_0 127.0.0.1'");
    let printed = match case::run_script(vm, &script, false)? {
        Ok(printed) => printed,
        Err(why) => bail!("{why}"),
    };
    microseconds(&printed).with_context(|| format!("no time in {printed}"))
}

/// The last `… = 94.32 usec/iter`.
fn microseconds(printed: &str) -> Option<f64> {
    let (before, _) = printed.rsplit_once(" usec/iter")?;
    before.rsplit(' ').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::microseconds;

    #[test]
    fn the_last_latency_is_parsed() {
        let text = "1000 iters in 0.37 seconds = 368.78 usec/iter\n\
                    8192000 bytes\n1000 iters in 0.09 seconds = 94.32 usec/iter\n";
        assert_eq!(microseconds(text), Some(94.32));
        assert_eq!(microseconds("nothing"), None);
    }
}
