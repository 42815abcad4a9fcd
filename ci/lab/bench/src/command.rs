//! The command line of both programs.

use crate::Failure;
use crate::path::{self, Path};
use std::process::ExitCode;

/// What a program measures with.
pub trait Side {
    /// Its data path.
    type Path: Path;
}

/// Does what the arguments say.
pub fn main<S: Side>() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match run::<S>(&words) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("{failure}");
            ExitCode::FAILURE
        }
    }
}

fn run<S: Side>(words: &[&str]) -> Result<(), Failure> {
    match *words {
        ["path", device, how, runs, clock, ref only @ ..] => path::measure::<S::Path>(
            device,
            how == "alone",
            runs.parse()?,
            clock == "counting",
            only.first().copied().unwrap_or_default(),
        ),
        _ => Err("path DEVICE alone|shared RUNS counting|running [OPERATION]".into()),
    }
}
