//! A run that a signal ends prints its stage, and kills the processes that it started.
//!
//! After SIGKILL the log ends with the line of the last stage, and guests end with the process that
//! started them (`parent_death.rs`).

use crate::output::errln;
use crate::run::stages;
use crate::run::subprocess;
use crate::run::terminal;
use anyhow::{Context, Result};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level::signal_name;
use std::thread;

/// Waits for a signal that ends the run, on a thread of its own.
pub(crate) fn watch() -> Result<()> {
    let mut signals =
        Signals::new([SIGTERM, SIGINT, SIGHUP]).context("wait for signals that end the run")?;
    thread::spawn(move || {
        let Some(signal) = signals.forever().next() else { return };
        let name = signal_name(signal).unwrap_or("a signal");
        terminal::restore();
        let logs = stages::logs().map(|logs| format!("; logs in {}", logs.display()));
        let logs = logs.unwrap_or_default();
        errln!("\ncut off by {name} in stage: {}{logs}", stages::under_way());
        subprocess::end_children();
        std::process::exit(128 + signal);
    });
    Ok(())
}
