//! The measures of the suite `sim`: time and allocations of the device in the process in each mode, beside marks of the
//! machine.
//!
//! `bench-sim` measures them on this machine, without a VM; `bench/sim.rs` of `lab` prints them beside the aims.

use Unit::{Allocations, Gigabytes, Messages, Microseconds};

/// The unit of a measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Microseconds of real time.
    Microseconds,
    /// 10^9 bytes in a second of real time.
    Gigabytes,
    /// Messages in a second of real time.
    Messages,
    /// Allocations of the thread, which runs the device as well.
    Allocations,
}

impl Unit {
    /// As a table names it.
    pub fn name(self) -> &'static str {
        match self {
            Microseconds => "µs",
            Gigabytes => "GB/s",
            Messages => "messages/s",
            Allocations => "allocations",
        }
    }

    /// Whether more is better.
    pub fn is_rate(self) -> bool {
        matches!(self, Gigabytes | Messages)
    }
}

/// One operation in one mode.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Measure {
    /// The operation.
    pub operation: &'static str,
    /// The mode of the fabric, and the threads.
    pub way: &'static str,
    /// The unit.
    pub unit: Unit,
    /// The most that a time or a count is meant to be, or the least that a rate is.
    pub aim: Option<f64>,
}

impl Measure {
    /// The operation and the way.
    pub fn name(&self) -> String {
        format!("{}: {}", self.operation, self.way)
    }
}

/// Two bytes to the peer and two back, each with a receive that is posted and both completions polled.
pub const ROUND_TRIP: &str = "2 bytes there and back";
/// An RDMA write, from its post to its completion.
pub const WRITE: &str = "write of 1 MiB";
/// Sends of two bytes to the peer, 16 to a doorbell, all completions polled.
pub const ONE_WAY: &str = "2 bytes there, 16 to a doorbell";
/// RDMA writes of two bytes by tasks that each await theirs one after the other, on an event loop of two threads.
pub const FUTURES: &str = "writes of 2 bytes, two threads";
/// A mark: bytes copied by the processor.
pub const COPY: &str = "copy of 1 MiB";

/// One thread that plays both sides, or posts and polls.
pub const STEPPED: &str = "stepped, one thread";
/// A thread for each side, which polls until it has its completions.
pub const STEPPED_SPINNING: &str = "stepped, two threads spin";
/// A task for each side and one that steps the fabric, in an event loop of one thread whose clock is paused.
pub const STEPPED_TOKIO: &str = "stepped, tokio, paused clock";
/// As [`STEPPED`].
pub const TRAPPED: &str = "trapped, one thread";
/// As [`STEPPED_SPINNING`].
pub const TRAPPED_SPINNING: &str = "trapped, two threads spin";
/// A thread for each side, which arms its queue and waits for the event.
pub const TRAPPED_BLOCKING: &str = "trapped, two threads block";
/// A task for each side, in an event loop of one thread.
pub const TRAPPED_TOKIO: &str = "trapped, tokio";
/// One task on one queue pair.
pub const ONE_TASK: &str = "trapped, 1 task";
/// As [`ONE_TASK`], two tasks, which share the queue pair's mutex.
pub const TWO_TASKS: &str = "trapped, 2 tasks on one queue pair";
/// As [`TWO_TASKS`], four tasks.
pub const FOUR_TASKS: &str = "trapped, 4 tasks on one queue pair";
/// Each task has a queue pair of its own.
pub const FOUR_APART: &str = "trapped, 4 tasks on a queue pair each";
/// A mark: two pipes and two threads, which read and write.
pub const PIPES: &str = "mark: pipes, two threads";
/// A mark: two threads that spin on a word.
pub const WORD: &str = "mark: a word, two threads";
/// A mark: `memcpy`.
pub const MEMCPY: &str = "mark: memcpy";

const fn measure(
    operation: &'static str,
    way: &'static str,
    unit: Unit,
    aim: Option<f64>,
) -> Measure {
    Measure { operation, way, unit, aim }
}

/// All measures, in the order of the table. The aims are those of a busy machine with two processors.
pub const ALL: &[Measure] = &[
    measure(ROUND_TRIP, STEPPED, Microseconds, Some(4.0)),
    measure(ROUND_TRIP, STEPPED_SPINNING, Microseconds, Some(15.0)),
    measure(ROUND_TRIP, STEPPED_TOKIO, Microseconds, Some(20.0)),
    measure(ROUND_TRIP, TRAPPED, Microseconds, None),
    measure(ROUND_TRIP, TRAPPED_SPINNING, Microseconds, Some(40.0)),
    measure(ROUND_TRIP, TRAPPED_BLOCKING, Microseconds, Some(40.0)),
    measure(ROUND_TRIP, TRAPPED_TOKIO, Microseconds, Some(25.0)),
    measure(ROUND_TRIP, PIPES, Microseconds, None),
    measure(ROUND_TRIP, WORD, Microseconds, None),
    measure(ROUND_TRIP, STEPPED, Allocations, Some(0.0)),
    measure(ROUND_TRIP, TRAPPED, Allocations, Some(0.0)),
    measure(ONE_WAY, STEPPED, Messages, Some(200e3)),
    measure(FUTURES, ONE_TASK, Messages, None),
    measure(FUTURES, TWO_TASKS, Messages, None),
    measure(FUTURES, FOUR_TASKS, Messages, None),
    measure(FUTURES, FOUR_APART, Messages, None),
    measure(WRITE, STEPPED, Gigabytes, Some(2.3)),
    measure(WRITE, TRAPPED, Gigabytes, Some(2.3)),
    measure(COPY, MEMCPY, Gigabytes, None),
    measure(WRITE, STEPPED, Allocations, Some(0.0)),
    measure(WRITE, TRAPPED, Allocations, Some(0.0)),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_measure_has_a_name_of_its_own() {
        for (place, one) in ALL.iter().enumerate() {
            let same = |other: &Measure| {
                (one.operation, one.way, one.unit) == (other.operation, other.way, other.unit)
            };
            assert!(!ALL[place + 1..].iter().any(same), "{one:?}");
        }
    }
}
