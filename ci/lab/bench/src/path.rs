//! The data path: its operations, and the course of a round.
//!
//! A side does the same operation so often that starting and stopping the clock weighs nothing.
//! Queues are brought back to rest between runs, outside the time that is taken.

use crate::sample::Sample;
use crate::{Failure, clock};
use std::time::Instant;

/// Requests that are posted, or completions that are polled, in one run.
pub const RUN: u32 = 256;
/// Requests of a batch.
pub const BATCH: u32 = 32;
/// Completions that are polled at once.
pub const POLLED: u32 = 16;
/// Requests that each send queue must hold: those of a run and one more.
pub const SENDS: u32 = 2 * RUN;
/// Bytes that each segment of a request names.
pub const SEGMENT: u32 = 64;
/// Segments of the request that gathers.
pub const SEGMENTS: usize = 4;
/// Bytes of the longest request with its data inside.
pub const INLINE: u32 = 200;
/// Slices of the request whose data lies in several.
pub const SLICES: usize = 4;
/// Bytes of each of these slices.
pub const SLICE: usize = 16;
/// Words of the memory that both ends use, its first half for sends.
pub const WORDS: usize = 1024;
/// Where in the memory things lie, in words.
pub mod place {
    /// The memory that is sent, written or gathered.
    pub const SOURCE: usize = 0;
    /// The word that a fetch-and-add returns to.
    pub const FETCHED: usize = 400;
    /// The word that the last write of a filling carries.
    pub const MARK: usize = 500;
    /// Where writes go to and reads come from.
    pub const TARGET: usize = 512;
    /// Where receives go.
    pub const INBOX: usize = 640;
    /// The number that atomics add to.
    pub const COUNTER: usize = 900;
    /// Where the last write of a filling goes.
    pub const MARKED: usize = 1023;
}
/// Bytes that a receive takes.
pub const RECEIVED: u32 = 512;
/// The identifier of the request after which a lane is at rest.
pub const LAST: u64 = u64::MAX;
/// Rounds to linger after the last write of a filling has arrived, so that its completion follows.
pub const AFTERWARDS: u32 = 50_000;
/// How long the device may take to settle, in seconds.
pub const SETTLING: u64 = 60;
/// Runs that may be thrown away for each that counts.
const PATIENCE: u32 = 10;

/// A request for a send queue; none of them is signaled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// An RDMA write of one segment.
    Write,
    /// A send with this many bytes inside.
    Inline(u32),
    /// A send with the bytes of several slices inside.
    InlineList,
    /// A send of four segments.
    Gather,
    /// An RDMA read of one segment.
    Read,
    /// A fetch-and-add.
    FetchAdd,
    /// A datagram of one segment, to the queue pair itself.
    Datagram,
    /// An RDMA write of one segment by an XRC initiator.
    XrcWrite,
}

/// A way that requests take; each has a send queue of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lane {
    /// Between two reliable queue pairs, to one with a receive queue of its own.
    Own,
    /// Between two reliable queue pairs, to one with a shared receive queue.
    Shared,
    /// From a datagram queue pair to itself. It has no receives, so that all are dropped.
    Datagrams,
    /// From an XRC initiator to a target. It has no receives: only writes go there.
    Xrc,
}

/// An operation to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Post requests, so many to a doorbell.
    Post(Request, u32),
    /// Build a write and take it back.
    Build,
    /// Post receives, so many to a doorbell.
    Receive(Lane, u32),
    /// Take one completion, or so many, that are there.
    Poll(u32),
    /// Find nothing.
    PollEmpty,
    /// Ask for an event.
    Arm,
}

impl Operation {
    /// All of them with their names.
    pub const ALL: &[(&str, Operation)] = &[
        ("write", Operation::Post(Request::Write, 1)),
        ("write, built only", Operation::Build),
        ("write, 32 to a doorbell", Operation::Post(Request::Write, BATCH)),
        ("send 32 B inline", Operation::Post(Request::Inline(32), 1)),
        ("send 32 B inline, 32 to a doorbell", Operation::Post(Request::Inline(32), BATCH)),
        ("send 200 B inline", Operation::Post(Request::Inline(INLINE), 1)),
        ("send 64 B inline of 4 slices", Operation::Post(Request::InlineList, 1)),
        ("send of 4 segments", Operation::Post(Request::Gather, 1)),
        ("read", Operation::Post(Request::Read, 1)),
        ("fetch and add", Operation::Post(Request::FetchAdd, 1)),
        ("datagram", Operation::Post(Request::Datagram, 1)),
        ("write by XRC", Operation::Post(Request::XrcWrite, 1)),
        ("receive", Operation::Receive(Lane::Own, 1)),
        ("receive, 32 to a doorbell", Operation::Receive(Lane::Own, BATCH)),
        ("shared receive", Operation::Receive(Lane::Shared, 1)),
        ("shared receive, 32 to a doorbell", Operation::Receive(Lane::Shared, BATCH)),
        ("poll, empty", Operation::PollEmpty),
        ("poll, one", Operation::Poll(1)),
        ("poll, 16", Operation::Poll(POLLED)),
        ("arm", Operation::Arm),
    ];
}

impl Request {
    /// Whether each consumes a receive.
    fn is_received(self) -> bool {
        matches!(self, Request::Inline(_) | Request::InlineList | Request::Gather)
    }

    fn lane(self) -> Lane {
        match self {
            Request::Datagram => Lane::Datagrams,
            Request::XrcWrite => Lane::Xrc,
            _ => Lane::Own,
        }
    }
}

/// One side: the objects of all lanes on one device, and memory.
pub trait Path: Sized {
    /// The interfaces that it has.
    const WAYS: &[&str];

    /// Makes everything, with `alone` under a thread domain and with what else says that one
    /// thread alone uses it.
    fn open(device: &str, alone: bool) -> Result<Self, Failure>;

    /// Whether an interface has the operation.
    fn offers(way: usize, operation: Operation) -> bool;

    /// Posts [`RUN`] requests, `batch` to a doorbell. None of them is signaled.
    fn post(&mut self, way: usize, lane: Lane, request: Request, batch: u32)
    -> Result<(), Failure>;

    /// Builds a write and takes it back, [`RUN`] times.
    fn build(&mut self, way: usize) -> Result<(), Failure>;

    /// Posts [`RUN`] receives, `batch` to a doorbell.
    fn receive(&mut self, lane: Lane, batch: u32) -> Result<(), Failure>;

    /// Takes [`RUN`] successful completions, `batch` at once, and looks at identifier, status and
    /// opcode of each. Answers how many were there.
    fn poll(&mut self, way: usize, batch: u32) -> Result<u32, Failure>;

    /// Looks [`RUN`] times for a completion that is not there.
    fn poll_empty(&mut self, way: usize) -> Result<u32, Failure>;

    /// Arms the queue [`RUN`] times.
    fn arm(&mut self) -> Result<(), Failure>;

    /// Waits until all that was posted to a lane is done and `received` of it were received, which
    /// leaves its completion queues empty.
    fn settle(&mut self, lane: Lane, received: u32) -> Result<(), Failure>;

    /// Posts [`RUN`] signaled writes and waits until all are done, but does not poll.
    fn fill(&mut self) -> Result<(), Failure>;
}

/// How the data path is measured.
#[derive(Clone, Copy, Debug)]
pub struct Rounds<'a> {
    /// On which device.
    pub device: &'a str,
    /// Under a thread domain.
    pub alone: bool,
    /// How often.
    pub runs: u32,
    /// A nanosecond must be an instruction, and a run where it is not does not count.
    pub counting: bool,
    /// Only operations whose name contains this.
    pub only: &'a str,
}

/// Measures the operations of the rounds, and prints each sample.
pub fn measure<P: Path>(rounds: &Rounds<'_>) -> Result<(), Failure> {
    let Rounds { device, alone, runs, counting, only } = *rounds;
    let mut side = P::open(device, alone)?;
    for &(name, operation) in Operation::ALL.iter().filter(|(name, _)| name.contains(only)) {
        for (way, way_name) in P::WAYS.iter().enumerate() {
            if !P::offers(way, operation) {
                continue;
            }
            let mut sample =
                Sample { operation: name.to_owned(), way: (*way_name).to_owned(), runs: vec![] };
            let mut attempts = 0;
            while sample.runs.len() < runs as usize {
                attempts += 1;
                if attempts > PATIENCE * runs {
                    let done = sample.runs.len();
                    return Err(format!("{name}, {way_name}: {done} of {runs} runs counted").into());
                }
                let (done, nanoseconds) = run(&mut side, way, operation)
                    .map_err(|failure| format!("{name}, {way_name}: {failure}"))?;
                if done == RUN && (!counting || clock::counts_instructions()) {
                    sample.runs.push(nanoseconds);
                }
            }
            crate::say(sample);
        }
    }
    Ok(())
}

/// One run: how much of it was done, and nanoseconds per request or completion.
fn run<P: Path>(side: &mut P, way: usize, operation: Operation) -> Result<(u32, f64), Failure> {
    match operation {
        Operation::Post(request, _) if request.is_received() => side.receive(Lane::Own, BATCH)?,
        Operation::Poll(_) => side.fill()?,
        _ => {}
    }
    let start = Instant::now();
    let done = match operation {
        Operation::Post(request, batch) => {
            side.post(way, request.lane(), request, batch).map(|()| RUN)
        }
        Operation::Build => side.build(way).map(|()| RUN),
        Operation::Receive(lane, batch) => side.receive(lane, batch).map(|()| RUN),
        Operation::Poll(batch) => side.poll(way, batch),
        Operation::PollEmpty => side.poll_empty(way).map(|found| RUN - found),
        Operation::Arm => side.arm().map(|()| RUN),
    };
    let nanoseconds = start.elapsed().as_nanos() as f64 / f64::from(RUN);
    let done = done?;
    match operation {
        Operation::Post(request, _) => {
            side.settle(request.lane(), if request.is_received() { RUN } else { 0 })?;
        }
        Operation::Receive(lane, _) => {
            side.post(0, lane, Request::Inline(32), BATCH)?;
            side.settle(lane, RUN)?;
        }
        // Completions that were late are there by now.
        Operation::Poll(_) => side.settle(Lane::Own, 0)?,
        Operation::Build | Operation::PollEmpty | Operation::Arm => {}
    }
    Ok((done, nanoseconds))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LANES: usize = Lane::Xrc as usize + 1;

    /// Counts the work of a device; none may be left when the next run begins. A poll finds `FOUND`.
    #[derive(Default)]
    struct Counted<const FOUND: u32> {
        /// Receives of each lane that nothing was sent to.
        receives: [u32; LANES],
        /// Requests of each lane that nobody waited for, and those among them that were received.
        posted: [[u32; 2]; LANES],
        filled: bool,
    }

    impl<const FOUND: u32> Counted<FOUND> {
        fn is_at_rest(&self) -> bool {
            self.posted == [[0; 2]; LANES] && !self.filled
        }
    }

    fn when(fits: bool) -> Result<(), Failure> {
        if fits { Ok(()) } else { Err("out of order".into()) }
    }

    impl<const FOUND: u32> Path for Counted<FOUND> {
        const WAYS: &[&str] = &["counted"];

        fn open(_: &str, _: bool) -> Result<Self, Failure> {
            Ok(Counted::default())
        }

        fn offers(_: usize, _: Operation) -> bool {
            true
        }

        fn post(&mut self, _: usize, to: Lane, what: Request, _: u32) -> Result<(), Failure> {
            // The sends of the lane of connections fill a shared queue.
            let is_its_lane = what.lane() == to || (what.lane(), to) == (Lane::Own, Lane::Shared);
            when(self.is_at_rest() && is_its_lane)?;
            let (receives, posted) =
                (&mut self.receives[to as usize], &mut self.posted[to as usize]);
            posted[0] += RUN;
            if what.is_received() {
                when(*receives == RUN)?;
                *receives = 0;
                posted[1] += RUN;
            }
            Ok(())
        }

        fn build(&mut self, _: usize) -> Result<(), Failure> {
            when(self.is_at_rest())
        }

        fn receive(&mut self, lane: Lane, _: u32) -> Result<(), Failure> {
            self.receives[lane as usize] += RUN;
            when(self.is_at_rest())
        }

        fn poll(&mut self, _: usize, _: u32) -> Result<u32, Failure> {
            when(self.filled).map(|()| FOUND)
        }

        fn poll_empty(&mut self, _: usize) -> Result<u32, Failure> {
            when(self.is_at_rest()).map(|()| 0)
        }

        fn arm(&mut self) -> Result<(), Failure> {
            when(self.is_at_rest())
        }

        fn settle(&mut self, lane: Lane, received: u32) -> Result<(), Failure> {
            let posted = std::mem::take(&mut self.posted[lane as usize]);
            when((posted[0] > 0) != self.filled && posted[1] == received)?;
            self.filled = false;
            Ok(())
        }

        fn fill(&mut self) -> Result<(), Failure> {
            when(self.is_at_rest())?;
            self.filled = true;
            Ok(())
        }
    }

    fn rounds(counting: bool, only: &str) -> Rounds<'_> {
        Rounds { device: "", alone: false, runs: 7, counting, only }
    }

    #[test]
    fn each_run_begins_at_rest_and_finds_what_it_needs() {
        measure::<Counted<RUN>>(&rounds(false, "")).unwrap();
    }

    /// Under a clock that tells the time, as here, and of a run that was not whole.
    #[test]
    fn runs_that_prove_nothing_are_thrown_away() {
        for (counting, only) in [(true, "write, built only"), (false, "poll, one")] {
            let failure = measure::<Counted<{ RUN - 1 }>>(&rounds(counting, only)).unwrap_err();
            let failure = failure.to_string();
            assert!(failure.contains("of 7 runs counted"), "{failure}");
        }
    }
}
