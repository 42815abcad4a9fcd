//! The result of a test, and the functions that make a function a test.

use crate::capability::Capability;
use crate::env;
use crate::junit::Ending;
use crate::results::Running;
use crate::udp;
use crate::watchdog;
use libtest_mimic::{Completion, Failed, Trial};
use std::fmt::Display;
use std::panic::Location;

/// The reason that a test ended early.
#[derive(Debug)]
pub(crate) enum Stop {
    /// The device or the machine lacks a capability that the test needs.
    Skip(Capability, String),
    /// A result was wrong.
    Fail(String),
}

/// The result of a test, and of each of its steps.
pub(crate) type Verdict<T = ()> = Result<T, Stop>;

impl<E: std::error::Error> From<E> for Stop {
    #[track_caller]
    fn from(error: E) -> Stop {
        Stop::fail(error)
    }
}

impl Stop {
    /// A failure at the place of the call.
    #[track_caller]
    pub(crate) fn fail(why: impl Display) -> Stop {
        Stop::Fail(format!("{why}, at {}", Location::caller()))
    }
}

/// Skips the test unless the device has the capability.
pub(crate) fn require(has: bool, capability: Capability, why: &str) -> Verdict {
    if has { Ok(()) } else { Err(Stop::Skip(capability, why.into())) }
}

/// Skips the test if the error is "not supported"; other errors fail it.
#[track_caller]
pub(crate) fn supported<T>(answer: uverbs::Result<T>, capability: Capability) -> Verdict<T> {
    match answer {
        Ok(value) => Ok(value),
        Err(error) if error.is_unsupported() => Err(Stop::Skip(capability, error.to_string())),
        Err(error) => Err(error.into()),
    }
}

/// On the fabric a skip has to be in the table, and a test that needs two processes in that of the tests over UDP.
fn judged(name: &str, stop: Stop) -> Stop {
    match stop {
        Stop::Skip(Capability::Processes, why) if env::on_fabric() && !udp::knows(name) => {
            Stop::fail(format!("{why}: `udp.rs` has to run it over UDP, or to say why it cannot"))
        }
        Stop::Skip(capability, why)
            if env::on_fabric() && capability.lack_on_the_fabric().is_none() =>
        {
            Stop::Fail(format!("the fabric has to have [{capability}]: {why}"))
        }
        stop => stop,
    }
}

/// A test of the suite, named by its module and function.
pub(crate) fn trial(module: &str, name: &'static str, test: fn() -> Verdict) -> Trial {
    // The crate is called `device`, after the test target.
    let module = module.strip_prefix("device::").unwrap_or(module);
    // One module is named by a keyword of Rust.
    let module = module.strip_prefix("r#").unwrap_or(module);
    named(format!("{module}::{name}"), test)
}

/// A test of this name.
pub(crate) fn named(name: String, test: impl FnOnce() -> Verdict + Send + 'static) -> Trial {
    Trial::ignorable_test(name.clone(), move || {
        let _guard = watchdog::watch(&name);
        let running = Running::new(&name);
        match test().map_err(|stop| judged(&name, stop)) {
            Ok(()) => {
                running.ended(Ending::Passed);
                Ok(Completion::Completed)
            }
            Err(Stop::Skip(capability, why)) => {
                let why = format!("[{capability}] {why}");
                running.ended(Ending::Skipped(why.clone()));
                Ok(Completion::ignored_with(why))
            }
            Err(Stop::Fail(why)) => {
                running.ended(Ending::Failed(why.clone()));
                // libtest-mimic prints this at the end of the run, which an aborted run never reaches.
                eprintln!("{name}: {why}");
                Err(Failed::from(why))
            }
        }
    })
}

/// Lists the tests of a module. The compiler reports a test that is not listed as unused.
macro_rules! trials {
    ($($test:ident),+ $(,)?) => {
        pub(crate) fn trials() -> Vec<libtest_mimic::Trial> {
            vec![$(crate::verdict::trial(module_path!(), stringify!($test), $test)),+]
        }
    };
}
pub(crate) use trials;
