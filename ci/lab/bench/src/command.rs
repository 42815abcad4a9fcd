//! The command line of both programs.

use crate::Failure;
use crate::control::{self, Control, FIRST_BY_ADDRESS, LIST, STOP, Thing};
use crate::path::Rounds;
use crate::scale::{self, Scale};
use std::path::Path;
use std::process::ExitCode;

/// A program's control path, many objects and data path.
pub trait Programs {
    /// Its control path.
    type Control: Control;
    /// Its many objects.
    type Scale: Scale;

    /// Measures the data path, with `alone` under a thread domain.
    fn path(alone: bool, rounds: &Rounds<'_>) -> Result<(), Failure>;
}

/// Carries out the arguments.
pub fn main<S: Programs>() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match run::<S>(&words) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            crate::complain(failure);
            ExitCode::FAILURE
        }
    }
}

fn run<S: Programs>(words: &[&str]) -> Result<(), Failure> {
    match *words {
        ["path", device, how, runs, clock, ref only @ ..] => {
            let alone = how == "alone";
            let only = only.first().copied().unwrap_or_default();
            let counting = clock == "counting";
            S::path(alone, &Rounds { device, alone, runs: runs.parse()?, counting, only })
        }
        ["control", device, runs, ref only @ ..] => {
            let only = only.first().copied().unwrap_or_default();
            control::measure::<S::Control>(Thing::ALL, device, runs.parse()?, only)
        }
        ["cm", device, runs, ref only @ ..] => {
            let only = only.first().copied().unwrap_or_default();
            control::measure::<S::Control>(Thing::MANAGED, device, runs.parse()?, only)
        }
        ["step", device, runs, ref only @ ..] => {
            let only = only.first().copied().unwrap_or_default();
            control::step::<S::Control>(device, runs.parse()?, only)
        }
        [STOP, device, thing] => control::stop::<S::Control>(device, thing),
        ["perform", device, thing, count] => {
            control::perform::<S::Control>(device, thing, count.parse()?)
        }
        [LIST] => {
            crate::say(S::Control::list()?);
            Ok(())
        }
        ["first", device] => S::Control::first(device),
        [FIRST_BY_ADDRESS] => S::Control::first_by_address(),
        ["mapped", device] => mapped::<S::Control>(device),
        ["scale", device, part, clock] => {
            scale::measure::<S::Scale>(device, part, clock == "counting")
        }
        _ => Err("path DEVICE alone|shared RUNS counting|running [OPERATION], control|cm|step DEVICE RUNS [THING], \
             stop DEVICE THING, \
             perform DEVICE THING COUNT, list, first DEVICE, first-by-address, mapped DEVICE, or scale DEVICE PART counting|running".into()),
    }
}

/// The files that are mapped when a device is open, with their sizes. Not this program, which can do
/// more than that.
fn mapped<C: Control>(device: &str) -> Result<(), Failure> {
    let _open = C::open(device)?;
    let program = std::env::current_exe()?;
    let maps = std::fs::read_to_string("/proc/self/maps")?;
    let mut paths: Vec<&str> = maps
        .lines()
        .filter_map(|line| Some(&line[line.find('/')?..]))
        .filter(|path| !path.starts_with("/dev/") && program != Path::new(path))
        .collect();
    paths.sort_unstable();
    paths.dedup();
    for path in paths {
        crate::say(format_args!("{} {path}", std::fs::metadata(path)?.len()));
    }
    Ok(())
}
