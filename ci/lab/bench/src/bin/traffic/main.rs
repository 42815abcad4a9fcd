//! `bench-traffic`: perftest's `ib_{send,write,read}_lat` and `ib_{send,write}_bw` with this workspace's
//! library, and the same letters for options. `cargo ci bench rxe` runs both.

#![deny(clippy::print_stdout, clippy::print_stderr, clippy::disallowed_methods)]

mod options;
mod side;

use lab_bench::Failure;
use options::{Options, What};
use side::TrafficQueues;
use std::process::ExitCode;
use std::time::Instant;

/// Completions that one poll takes.
const POLLED: u32 = 16;
/// One in so many single sends is signaled.
const SIGNALED: u32 = 100;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match Options::parse(&arguments).and_then(|options| run(&options)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            lab_bench::complain(failure);
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> Result<(), Failure> {
    let mut side = TrafficQueues::connect(options)?;
    let client = options.host.is_some();
    let start = Instant::now();
    match options.what {
        What::SendLatency => exchange_sends(&mut side, options, client)?,
        What::WriteLatency => exchange_writes(&mut side, options, client)?,
        What::ReadLatency if client => reads(&mut side, options)?,
        What::SendRate | What::WriteRate if client => many(&mut side, options)?,
        What::SendRate => receive(&mut side, options)?,
        What::ReadLatency | What::WriteRate => {}
    }
    let microseconds = 1e6 * start.elapsed().as_secs_f64();
    side.finish()?;
    if client {
        let there_and_back = matches!(options.what, What::SendLatency | What::WriteLatency);
        let messages = if there_and_back { 2 * options.count } else { options.count };
        lab_bench::say(format_args!("{:.3} µs per message", microseconds / f64::from(messages)));
    }
    Ok(())
}

/// One message under way, which the other side answers.
fn exchange_sends(
    side: &mut TrafficQueues,
    options: &Options,
    client: bool,
) -> Result<(), Failure> {
    for sent in 0..options.count {
        if sent > 0 || !client {
            side.received(1)?;
        }
        side.post(1, 1)?;
        side.sent(1)?;
    }
    // The last answer, which nobody answers.
    if client { side.received(1) } else { Ok(()) }
}

/// The same of writes: each side watches its memory.
fn exchange_writes(
    side: &mut TrafficQueues,
    options: &Options,
    client: bool,
) -> Result<(), Failure> {
    // Counted from one, and by bytes: the memory is zero at first.
    for turn in 1..=options.count {
        let expected = if client { turn - 1 } else { turn };
        // Without a hint to the processor, as over there.
        while expected > 0 && side.arrived() != expected as u8 {}
        side.mark(turn as u8)?;
        side.post(1, 1)?;
        side.sent(1)?;
    }
    while client && side.arrived() != options.count as u8 {}
    Ok(())
}

/// One read under way.
fn reads(side: &mut TrafficQueues, options: &Options) -> Result<(), Failure> {
    for _ in 0..options.count {
        side.post(1, 1)?;
        side.sent(1)?;
    }
    Ok(())
}

/// As many under way as the queue holds, in lists.
fn many(side: &mut TrafficQueues, options: &Options) -> Result<(), Failure> {
    let every = if options.list == 1 { SIGNALED } else { options.list };
    let (mut posted, mut completed) = (0, 0);
    while completed < options.count {
        while posted < options.count && posted + options.list <= completed + options.depth() {
            side.post(options.list, every)?;
            posted += options.list;
        }
        completed += every * side.poll_sends(POLLED)?;
    }
    Ok(())
}

fn receive(side: &mut TrafficQueues, options: &Options) -> Result<(), Failure> {
    let mut found = 0;
    while found < options.count {
        found += side.poll_receives(POLLED)?;
    }
    Ok(())
}
