//! Suite `scale`: the cost of one more object when there are many.
//!
//! Each side has a machine of its own for each part: the kernel keeps destroyed memory keys,
//! and gives it to the next program.

use super::BenchArguments;
use super::rounds::{self, Found, Library};
use super::table::{Table, TableRow, TableTarget, Value};
use crate::machine::session::Session;
use anyhow::Result;
use lab_bench::scale::Part;
use std::time::Duration;

/// How much more the last object may cost than the hundredth.
const FLAT: f64 = 1.2;
/// How long a side may take for a part.
const PATIENCE: Duration = Duration::from_secs(180);
/// The same where instructions are counted: one processor emulates one, and all of the driver's work with it.
const COUNTING: Duration = Duration::from_secs(600);

/// Measures everything.
pub(super) fn run(arguments: &BenchArguments) -> Result<Table> {
    let mut session = Session::open(&arguments.needs(), arguments.console)?;
    let programs = rounds::programs(&session.workspace)?;
    if arguments.count_instructions {
        session.count_instructions();
    }
    let mut kernel = String::new();
    // One by default: it takes minutes, and its costs are of thousands each.
    let rounds = arguments.runs.div_ceil(9);
    let mut found = Library::BOTH.map(|_| Found::default());
    let mut notes = Vec::new();
    for (name, _) in Part::ALL.into_iter().filter(|(name, _)| arguments.wants(name)) {
        for _ in 0..rounds {
            for (library, found) in Library::BOTH.into_iter().zip(&mut found) {
                let (mut vm, device) = rounds::boot(&session, arguments, &programs)?;
                kernel = vm.greeting.release.clone();
                let (clock, patience) = match arguments.count_instructions {
                    true => ("counting", COUNTING),
                    false => ("running", PATIENCE),
                };
                let words = ["scale", &device, name, clock];
                match rounds::watch(&mut vm, library, &words, patience, found) {
                    Ok(()) => vm.power_off()?,
                    // The samples before the time limit count all the same.
                    Err(error) => {
                        let text = error.to_string();
                        found.failure = text.lines().next().map(str::to_owned);
                    }
                }
                if let Some(failure) = found.failure.take() {
                    notes.push(format!("{name}, {}: {failure}", library.program()));
                }
            }
        }
    }
    let mut names = Vec::new();
    for sample in found.iter().flat_map(|found| &found.samples) {
        let name = (sample.operation.clone(), sample.way.clone());
        if !names.contains(&name) {
            names.push(name);
        }
    }
    let mut rows = Vec::new();
    for (operation, way) in &names {
        let [ours, theirs] = [0, 1].map(|side: usize| {
            let sample = found[side].of(operation).find(|sample| sample.way == *way);
            sample.and_then(|sample| Value::median(&sample.runs))
        });
        let theirs = theirs.map(|theirs| (theirs, String::new()));
        rows.push(TableRow::new(operation, way, ours, theirs, TableTarget::default()));
    }
    rows.extend(growth(&rows));
    Ok(Table {
        title: format!("Many objects on {}", arguments.device.label()),
        unit: "the unit that each row names".into(),
        kernel,
        accelerator: session.accelerator().label().to_owned(),
        runs: rounds,
        rows,
        notes,
    })
}

/// For each object that was measured at 100: the cost at the largest number, as a multiple of that.
fn growth(rows: &[TableRow]) -> Vec<TableRow> {
    let mut growth = Vec::new();
    for base in rows.iter().filter(|row| row.setting == "at 100") {
        let of_operation = |row: &&TableRow| row.operation == base.operation;
        let Some(last) = rows.iter().rfind(of_operation) else { continue };
        let ratio = |last: Option<Value>, base: Option<Value>| {
            let (last, base) = last.zip(base)?;
            Value::median(&[last.value / base.value])
        };
        let theirs = ratio(last.theirs, base.theirs).map(|theirs| (theirs, String::new()));
        let name = format!("{}, ratio", base.operation);
        let setting = format!("{} to 100", last.setting.trim_start_matches("at "));
        let target = TableTarget { ours: Some(FLAT), ..TableTarget::default() };
        growth.push(TableRow::new(&name, &setting, ratio(last.ours, base.ours), theirs, target));
    }
    growth
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn growth_is_from_a_hundred_to_the_last() {
        let value = |value| Some(Value { value, lowest: value, highest: value });
        let row = |setting: &str, ours, theirs: Option<Value>| {
            let theirs = theirs.map(|theirs| (theirs, String::new()));
            TableRow::new("queue pair: µs each", setting, ours, theirs, TableTarget::default())
        };
        let rows = [
            row("at 1", value(9.0), value(9.0)),
            row("at 100", value(10.0), value(10.0)),
            row("at 10000", value(11.0), value(30.0)),
        ];
        let growth = growth(&rows);
        assert_eq!(growth.len(), 1);
        assert_eq!(growth[0].setting, "10000 to 100");
        assert_eq!(growth[0].ours.unwrap().value, 1.1);
        assert_eq!(growth[0].theirs.unwrap().value, 3.0);
        assert_eq!(growth[0].met, Some(true));
    }
}
