//! The system calls of things of the control path, one by one.
//!
//! The calls are those of a run less those of a run that does the thing once less, so that the calls of
//! a program's start cancel.

use super::BenchArguments;
use super::control;
use super::rounds::{self, Library};
use crate::machine::session::Session;
use crate::run::progress;
use anyhow::Result;
use lab_bench::control::{LIST, Thing};
use serde::Serialize;
use std::fmt;

/// How often a thing is done in the shorter run: the first one has calls of its own.
const BEFORE: usize = 3;

/// The system calls of both sides for each thing.
#[derive(Debug, Serialize)]
pub(super) struct Calls {
    kernel: String,
    things: Vec<OfThing>,
}

#[derive(Debug, Serialize)]
struct OfThing {
    thing: String,
    ours: Vec<String>,
    theirs: Vec<String>,
    /// Why a side has none.
    notes: Vec<String>,
}

/// Traces those of these things that are wanted.
pub(super) fn run(arguments: &BenchArguments, things: &'static [control::Known]) -> Result<Calls> {
    let session = Session::open(&arguments.needs(), arguments.console)?;
    let programs = rounds::programs(&session.workspace)?;
    let (mut vm, device) = rounds::boot(&session, arguments, &programs)?;
    let spinner = progress::spinner("system calls");
    let mut traced = Vec::new();
    for (name, thing) in control::wanted(arguments, things)? {
        let mut notes = Vec::new();
        let [ours, theirs] = Library::BOTH.map(|library| {
            let mut each =
                |words: &[&str]| rounds::each(&mut vm, &[&[library.program()], words].concat());
            let mut of_one = || match thing {
                Thing::Start => each(&[LIST]),
                _ => {
                    let times = [BEFORE, BEFORE + 1].map(|count| count.to_string());
                    let short = each(&["perform", &device, name, &times[0]])?;
                    let long = each(&["perform", &device, name, &times[1]])?;
                    Ok(inserted(&short, &long))
                }
            };
            of_one().unwrap_or_else(|error| {
                notes.push(format!("{}: {error}", library.program()));
                Vec::new()
            })
        });
        traced.push(OfThing { thing: name.to_owned(), ours, theirs, notes });
    }
    spinner.finish_and_clear();
    let calls = Calls { kernel: vm.greeting.release.clone(), things: traced };
    vm.power_off()?;
    Ok(calls)
}

/// The piece that `long` has more than `short`, directly before the end that both share. At their
/// beginning they differ by numbers of processes.
fn inserted(short: &[String], long: &[String]) -> Vec<String> {
    let backwards = short.iter().rev().zip(long.iter().rev());
    let alike = backwards.take_while(|(short, long)| short == long).count();
    let more = long.len().saturating_sub(short.len());
    let end = long.len() - alike;
    long[end.saturating_sub(more)..end].to_vec()
}

impl fmt::Display for Calls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "Linux {}", self.kernel)?;
        for OfThing { thing, ours, theirs, notes } in &self.things {
            for (side, calls) in [("ours", ours), ("theirs", theirs)] {
                writeln!(f, "\n{thing}: {side}, {} calls", calls.len())?;
                for (place, call) in calls.iter().enumerate() {
                    writeln!(f, "{:>4}  {call}", place + 1)?;
                }
            }
            notes.iter().try_for_each(|note| writeln!(f, "{note}"))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_inserted_piece_is_found() {
        let words = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        let inserted = |short, long| inserted(&words(short), &words(long)).join(" ");
        assert_eq!(inserted("open a b close", "open a b a b close"), "a b");
        // The calls before may end as the thing does: then the piece is the same, rotated.
        assert_eq!(inserted("b open a b close", "c open a b a b close"), "a b");
        assert_eq!(inserted("b a b close", "b a b a b close"), "b a");
        assert_eq!(inserted("a", "a"), "");
    }
}
