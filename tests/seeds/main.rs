//! Three programs on a fabric with faults, each with many seeds: echo, requests, key and value.
//!
//! A seed chooses rates of loss, delay and late events, a network (ideal, slow or hostile), the order in which data
//! reaches memory, one fault of the script, and the polls after which futures are dropped. Each run checks the promises
//! of its program; that no task hangs and no object is left on a device; and that a second run of the seed has the same
//! history and the same memory.
//!
//! A fourth one is small, and is disturbed at each poll of its tasks in turn ([`every_poll`]).
//!
//! `UVERBS_SIM_SEEDS` is the number of seeds of the three programs together; `cargo ci soak seeds` runs 10,000. The
//! defects that these tests have to find are in `ci/lab/src/host/seeds.rs`.
#![cfg(all(feature = "sim", feature = "tokio"))]

mod echo;
mod every_poll;
mod harness;
mod key_value;
mod requests;

use harness::{Record, Result};
use std::ops::Range;

/// Seeds of the three programs together, unless the environment says otherwise.
const SEEDS: u64 = 300;
const VARIABLE: &str = "UVERBS_SIM_SEEDS";

/// A third of all seeds.
fn seeds() -> Range<u64> {
    let seeds = std::env::var(VARIABLE).map_or(SEEDS, |text| {
        text.parse().unwrap_or_else(|_| panic!("{VARIABLE}={text} is no number of seeds"))
    });
    0..seeds.div_ceil(3)
}

/// Runs each seed twice, and compares.
fn each_seed(run: impl Fn(u64) -> Result<Record>) {
    uverbs::sim::each_seed(seeds(), |seed| {
        let (first, second) = (run(seed)?, run(seed)?);
        first.compare(&second)
    });
}

#[test]
fn an_echo_equals_its_message() {
    each_seed(|seed| harness::play(seed, echo::run));
}

#[test]
fn a_request_has_one_reply_its_own() {
    each_seed(|seed| harness::play(seed, requests::run));
}

#[test]
fn a_value_is_one_that_was_written() {
    each_seed(key_value::run);
}

#[test]
fn at_every_poll_a_future_or_its_device_may_end() {
    at_every_poll(false);
}

#[test]
fn at_every_poll_a_future_on_a_shared_queue_or_its_device_may_end() {
    at_every_poll(true);
}

fn at_every_poll(shares: bool) {
    let polls = every_poll::polls(shares).expect("the program without an event");
    let events = every_poll::Event::ALL;
    // A seed for each poll and event, so that a failure has the history of its run alone.
    let runs = polls * events.len() as u32;
    uverbs::sim::each_seed(0..runs.into(), |seed| {
        let (at, event) = (seed as usize / events.len(), seed as usize % events.len());
        every_poll::run(shares, events[event], at as u32 + 1)
    });
}
