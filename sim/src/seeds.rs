//! Runs of a test with many seeds, and the replay of a seed that fails.

use crate::world::World;
use std::any::Any;
use std::cell::{Cell, RefCell};
use std::fmt::Display;
use std::io::Write;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Weak};

/// The variable that chooses one seed.
const VARIABLE: &str = "UVERBS_SIM_SEED";

/// When a fabric prints its history as it is dropped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Prints {
    /// In a thread that panics.
    #[default]
    InPanics,
    /// In no case: a seed that fails is run again.
    Never,
    /// In a second run.
    Always,
}

thread_local! {
    /// When fabrics that this thread makes print their history.
    static PRINTS: Cell<Prints> = const { Cell::new(Prints::InPanics) };
    /// Fabrics of the second run.
    static AGAIN: RefCell<Vec<Weak<World>>> = const { RefCell::new(Vec::new()) };
}

/// Notes a fabric of the second run, which is still there afterwards if the test leaks an object.
pub(crate) fn note(world: &Arc<World>) {
    AGAIN.with_borrow_mut(|worlds| worlds.push(Arc::downgrade(world)));
}

impl Prints {
    /// The value for a fabric that this thread makes.
    pub(crate) fn here() -> Prints {
        PRINTS.get()
    }

    /// Whether a fabric that is dropped now prints.
    pub(crate) fn now(self) -> bool {
        match self {
            Prints::InPanics => std::thread::panicking(),
            Prints::Never => false,
            Prints::Always => true,
        }
    }
}

/// Runs a test with each seed of a range, until one fails: the test panics or returns an error.
///
/// For a seed that fails, standard error gets the number, the history of a second run ([`Fabric::history`]), and the
/// command that replays it. The environment variable `UVERBS_SIM_SEED` runs its seed alone, whether it is in the range
/// or not.
///
/// ```
/// use uverbs_sim::{Fabric, each_seed};
///
/// each_seed(0..10, |seed| {
///     let fabric = Fabric::builder().stepped(seed).build()?;
///     // The program under test.
///     # Ok::<(), uverbs_sim::FabricError>(())
/// });
/// ```
///
/// # Panics
///
/// With the message of the test's panic, or with its error.
///
/// [`Fabric::history`]: crate::Fabric::history
#[track_caller]
pub fn each_seed<E: Display>(seeds: Range<u64>, mut test: impl FnMut(u64) -> Result<(), E>) {
    let only = std::env::var_os(VARIABLE).map(|text| {
        let text = text.to_string_lossy();
        text.parse().unwrap_or_else(|_| panic!("{VARIABLE}={text} is no seed: 0 to 2^64 - 1"))
    });
    let mut run = |seed, prints| {
        let before = PRINTS.replace(prints);
        let ended = catch_unwind(AssertUnwindSafe(|| test(seed)));
        PRINTS.set(before);
        match ended {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some(Box::new(error.to_string()) as Box<dyn Any + Send>),
            Err(panic) => Some(panic),
        }
    };
    let seeds = only.into_iter().chain(seeds.filter(|_| only.is_none()));
    let failing = seeds.into_iter().find_map(|seed| Some((seed, run(seed, Prints::Never)?)));
    let Some((seed, failure)) = failing else { return };
    say(&format!("seed {seed} fails; its history, in a second run:"));
    let again = run(seed, Prints::Always);
    let left: Vec<_> = AGAIN.take().iter().filter_map(Weak::upgrade).collect();
    left.iter().for_each(|world| world.print_history());
    if again.is_none() {
        say(
            "the second run did not fail: something beside the seed decides (time, threads, addresses)",
        );
    }
    let test = std::thread::current();
    let test = test.name().unwrap_or_default();
    say(&format!("to replay it: {VARIABLE}={seed} cargo test {test}"));
    match failure.downcast::<String>() {
        Ok(text) => panic!("seed {seed}: {text}"),
        Err(panic) => resume_unwind(panic),
    }
}

/// Prints a line on standard error, if that can be written to.
fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_seed_that_fails_ends_the_test() {
        let mut tried = Vec::new();
        let panic = catch_unwind(AssertUnwindSafe(|| {
            each_seed(3..100, |seed| {
                tried.push(seed);
                if seed % 7 == 0 { Err("a bug") } else { Ok(()) }
            });
        }));
        let text = panic.unwrap_err().downcast::<String>().unwrap();
        assert_eq!(*text, "seed 7: a bug");
        // The last one again, for its history.
        assert_eq!(tried, [3, 4, 5, 6, 7, 7]);
        each_seed(0..3, |_| Ok::<(), String>(()));
    }

    /// Many tests look for a leak, and their failure has a history, too.
    #[test]
    fn a_fabric_that_the_second_run_leaves_behind_is_printed() {
        let mut left = Vec::new();
        let panic = catch_unwind(AssertUnwindSafe(|| {
            each_seed(1..2, |seed| {
                let device = crate::Profile::new().name("left");
                let fabric = crate::Fabric::builder().stepped(seed).history().device(device);
                let fabric = fabric.build().unwrap();
                fabric.device("left").unwrap().set_link(false);
                left.push(fabric);
                Err::<(), _>("a leak")
            });
        }));
        assert!(panic.is_err());
        let histories = left.iter().map(|fabric| fabric.history().is_empty());
        assert_eq!(histories.collect::<Vec<_>>(), [false, true], "of the second run it is printed");
    }
}
