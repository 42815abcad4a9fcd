//! A program that outlives its device: it works, waits for the event that the device is gone, releases all objects, and
//! works again when there is a device of that name.
//!
//! The lab removes a function of mlx5 and adds it again (`--hotplug`); a test in `root.rs` does so with a link of
//! soft-RoCE.

use crate::env;
use crate::pair::{Config, Pair, gid};
use crate::verdict::{Stop, Verdict};
use std::process::ExitCode;
use std::time::{Duration, Instant};
use uverbs::{Context, Device, Errno, PortState};

/// The argument of a program whose device under test goes and comes back.
const HOTPLUG: &str = "--hotplug";

/// The port that has to come back.
const PORT: u32 = 1;

/// The longest time until the device goes, and until it is back with an active port.
const ABSENCE: Duration = Duration::from_secs(120);

/// The steps of such a program, in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    AtWork,
    Gone,
    Again,
}

/// Runs as that program, if this process was started as one.
pub(crate) fn run() -> Option<ExitCode> {
    if std::env::args().nth(1).as_deref() != Some(HOTPLUG) {
        return None;
    }
    let work = || work(&env::name(), |step| println!("{step:?}"));
    Some(match work() {
        Ok(()) => ExitCode::SUCCESS,
        Err(stop) => {
            println!("{stop:?}");
            ExitCode::FAILURE
        }
    })
}

/// Works on the device of this name before and after its absence, and reports each step.
pub(crate) fn work(name: &str, mut say: impl FnMut(Step)) -> Verdict {
    let device = Device::by_name(name)?;
    let context = Context::open(&device)?;
    let mut pair = Pair::on(context.clone(), context.clone(), Config::rc())?;
    pair.connect()?;
    pair.message(1, 3000)?;
    say(Step::AtWork);

    until_gone(&context)?;
    drop(pair);
    assert_eq!(context.leaked(), 0);
    drop(context);
    say(Step::Gone);

    // While the machine configures the new interface's addresses, entries of the GID table come and go.
    let deadline = Instant::now() + ABSENCE;
    loop {
        match exchange(returned(name, &device)?) {
            Err(_) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(20)),
            result => break result?,
        }
    }
    say(Step::Again);
    Ok(())
}

/// Connects a pair of queue pairs, and sends a message.
fn exchange(context: Context) -> Verdict {
    let mut pair = Pair::on(context.clone(), context, Config::rc())?;
    pair.connect()?;
    pair.message(2, 3000)
}

/// Waits for events until there is no device to raise them.
fn until_gone(context: &Context) -> Verdict {
    loop {
        match context.next_event(Some(ABSENCE)) {
            Ok(Some(_)) => {}
            Ok(None) => return Err(Stop::fail("no event reported that the device is gone")),
            Err(error) if error.errno() == Errno::IO => return Ok(()),
            Err(error) => return Err(error.into()),
        }
    }
}

/// Waits until another device has the name of the one that is gone, opens, and has an active port.
fn returned(name: &str, gone: &Device) -> Verdict<Context> {
    let deadline = Instant::now() + ABSENCE;
    loop {
        // The list is made anew each time: a kept description would be that of the removed device.
        let found = Device::by_name(name).and_then(|device| Context::open(&device));
        let why = match found {
            Ok(context) if context.device().index() == gone.index() => "the old one".to_owned(),
            Ok(context)
                if !context.query_port(PORT).is_ok_and(|port| port.state == PortState::ACTIVE) =>
            {
                "its port is not active".to_owned()
            }
            Ok(context) if gid(&context).is_err() => "its port has no GID".to_owned(),
            Ok(context) => return Ok(context),
            Err(error) => error.to_string(),
        };
        if Instant::now() > deadline {
            return Err(Stop::fail(format!("{name} did not come back: {why}")));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}
