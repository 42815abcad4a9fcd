//! Suite `size`: bytes and files that a program needs, and the files that it opens before the first verb.

use super::BenchArguments;
use super::rounds::{self, Library};
use super::table::{Table, TableRow, TableTarget, Value};
use crate::machine::session::Session;
use crate::workspace::Profile;
use anyhow::{Context, Result};
use std::fs;
use std::path::Path;

/// Bytes that the whole command line may have.
const WHOLE: f64 = 3e6;
/// Theirs is without the program, as the one that loads them can do more than ours.
const LOADED: &str = "a minimal program; of theirs the libraries alone";

/// Measures everything.
pub(super) fn run(arguments: &BenchArguments) -> Result<Table> {
    let session = Session::open(&arguments.needs(), arguments.console)?;
    let programs = rounds::programs(&session.workspace)?;
    let workspace = &session.workspace;
    let whole = workspace.static_program("uverbs-cli", "uverbs", Profile::Stripped)?;
    let minimal = workspace.static_program("lab-bench", "bench-first", Profile::Stripped)?;
    let (mut vm, device) = rounds::boot(&session, arguments, &programs)?;
    let mut counts = Vec::new();
    for library in Library::BOTH {
        counts.push(rounds::counts(&mut vm, &[library.program(), "first", &device])?);
    }
    // The files that the loader and libibverbs mapped, by path.
    let libraries = rounds::output(&mut vm, &[Library::Theirs.program(), "mapped", &device])?;
    let mut bytes = 0.0;
    let mut files = 0;
    for line in libraries.lines() {
        let (size, _) = line.split_once(' ').context("a line without a size")?;
        bytes += size.parse::<f64>()?;
        files += 1;
    }
    let exact = |value| Value::median(&[value]);
    let none = TableTarget::default();
    let size = |path: &Path| -> Result<Option<Value>> {
        Ok(exact(fs::metadata(path).with_context(|| path.display().to_string())?.len() as f64))
    };
    let whole_target = TableTarget { ours: Some(WHOLE), ..TableTarget::default() };
    let mut rows = vec![
        TableRow::new("the command line, stripped", "bytes", size(&whole)?, None, whole_target),
        TableRow::new(
            LOADED,
            "bytes",
            size(&minimal)?,
            exact(bytes).map(|bytes| (bytes, String::new())),
            none,
        ),
        TableRow::new(
            LOADED,
            "files",
            exact(1.0),
            exact(f64::from(files)).map(|files| (files, String::new())),
            none,
        ),
    ];
    let names = ["system calls", "files opened", "file mappings"];
    for (place, unit) in names.into_iter().enumerate() {
        let theirs = exact(counts[1][place]).map(|theirs| (theirs, String::new()));
        let ours = exact(counts[0][place]);
        rows.push(TableRow::new("from start to the first verb", unit, ours, theirs, none));
    }
    let table = Table {
        title: format!("Size of a program on {}", arguments.device.label()),
        unit: "the unit that each row names".into(),
        kernel: vm.greeting.release.clone(),
        accelerator: session.accelerator().label().to_owned(),
        runs: 1,
        rows,
        notes: Vec::new(),
    };
    vm.power_off()?;
    Ok(table)
}
