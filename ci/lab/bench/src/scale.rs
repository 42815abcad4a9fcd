//! Many objects: the cost of one more when there are many already.

use crate::Failure;
use crate::control::{PASSED, WORKED, worked};
use crate::path::RUN;
use crate::sample::Sample;
use std::time::Instant;

/// How many of each there are when one more is measured.
pub const STEPS: [u32; 4] = [1, 100, 1_000, 10_000];
/// Regions that exist at once, and where their cost is measured.
pub const REGIONS: [u32; 3] = [100, 10_000, 100_000];
/// Threads that each make everything of their own.
pub const THREADS: u32 = 64;
/// Objects over which the cost of one is averaged, before each step.
const WINDOW: u32 = 100;

/// One side, with a device open. It keeps its objects until it is dropped.
pub trait Scale: Sized {
    /// Opens a device.
    fn open(device: &str) -> Result<Self, Failure>;

    /// Creates one more completion queue of 16 entries.
    fn cq(&mut self) -> Result<(), Failure>;

    /// Creates one more reliable queue pair of 16 sends and 16 receives, on a completion queue that
    /// all share.
    fn qp(&mut self) -> Result<(), Failure>;

    /// Registers the same 4 KiB once more.
    fn region(&mut self) -> Result<(), Failure>;

    /// Connects two queue pairs on the completion queue that all share, if that was not done yet,
    /// posts [`RUN`] signaled writes and answers, when all are done, how long it took to poll them,
    /// in nanoseconds.
    fn poll(&mut self) -> Result<f64, Failure>;

    /// Makes, in so many threads at once, a thread domain (where the device has any), a completion
    /// queue and a queue pair each, and destroys them.
    fn threads(&mut self, count: u32) -> Result<(), Failure>;
}

/// Memory of the machine that is in use, and of this process, in bytes.
fn memory() -> Result<[f64; 2], Failure> {
    let field = |path: &str, name: &str| -> Result<f64, Failure> {
        let text = std::fs::read_to_string(path)?;
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        let number = line.and_then(|line| line.split_whitespace().next());
        let kilobytes: f64 = number.ok_or_else(|| format!("{path}: no {name}"))?.parse()?;
        Ok(1024.0 * kilobytes)
    };
    Ok([-field("/proc/meminfo", "MemFree:")?, field("/proc/self/status", "VmRSS:")?])
}

/// The cost of an object: time, or where the clock counts instructions, the work of the program, in the
/// kernel as well. There, waiting for a device moves the clock by whatever it likes.
#[derive(Clone, Copy, Debug)]
struct Meter {
    start: Instant,
    worked: f64,
    counting: bool,
}

impl Meter {
    fn start(counting: bool) -> Meter {
        Meter { start: Instant::now(), worked: worked(), counting }
    }

    /// The row's unit.
    fn unit(counting: bool) -> &'static str {
        if counting { WORKED } else { PASSED }
    }

    /// The cost since the start, in that unit.
    fn stop(self) -> f64 {
        if self.counting {
            worked() - self.worked
        } else {
            1e6 * self.start.elapsed().as_secs_f64()
        }
    }
}

fn print(operation: &str, way: String, value: f64) {
    crate::say(Sample { operation: operation.into(), way, runs: vec![value] });
}

/// Creates objects one by one; at each step prints the cost of the last ones.
fn grow<S: Scale>(
    side: &mut S,
    name: &str,
    counting: bool,
    steps: &[u32],
    make: fn(&mut S) -> Result<(), Failure>,
    mut at_step: impl FnMut(&mut S, u32) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let mut count = 0;
    let before = memory()?;
    for &step in steps {
        let window = WINDOW.min(step - count);
        while count + window < step {
            make(side)?;
            count += 1;
        }
        let meter = Meter::start(counting);
        for _ in 0..window {
            make(side)?;
        }
        let each = meter.stop() / f64::from(window);
        count = step;
        let unit = Meter::unit(counting);
        print(&format!("{name}: {unit} each"), format!("at {step}"), each);
        at_step(side, step)?;
    }
    for ((what, after), before) in ["machine", "process"].into_iter().zip(memory()?).zip(before) {
        let each = (after - before) / f64::from(count);
        print(&format!("{name}: bytes each, {what}"), format!("at {count}"), each);
    }
    Ok(())
}

/// The kind of the many objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Completion queues.
    CompletionQueues,
    /// Queue pairs, and polling among them.
    QueuePairs,
    /// Memory regions.
    Regions,
    /// Threads with everything of their own.
    Threads,
}

impl Part {
    /// All of them, with their names.
    pub const ALL: [(&str, Part); 4] = [
        ("completion queue", Part::CompletionQueues),
        ("queue pair", Part::QueuePairs),
        ("region of 4 KiB", Part::Regions),
        ("thread with domain and queues", Part::Threads),
    ];
}

/// Measures one part, and prints each sample at once; with `counting`, on a clock that counts
/// instructions.
pub fn measure<S: Scale>(device: &str, name: &str, counting: bool) -> Result<(), Failure> {
    let (name, part) = Part::ALL
        .into_iter()
        .find(|(known, _)| *known == name)
        .ok_or_else(|| format!("nothing is called {name:?}"))?;
    let mut side = S::open(device)?;
    match part {
        Part::CompletionQueues => grow(&mut side, name, counting, &STEPS, S::cq, |_, _| Ok(())),
        Part::QueuePairs => grow(&mut side, name, counting, &STEPS, S::qp, |side, step| {
            let mut best = f64::INFINITY;
            for _ in 0..5 {
                best = best.min(side.poll()? / f64::from(RUN));
            }
            print("poll, queue pairs on the queue: ns each", format!("at {step}"), best);
            Ok(())
        }),
        Part::Regions => grow(&mut side, name, counting, &REGIONS, S::region, |_, _| Ok(())),
        Part::Threads => {
            for count in [1, THREADS] {
                side.threads(count)?;
                let meter = Meter::start(counting);
                side.threads(count)?;
                let each = meter.stop() / f64::from(count);
                let unit = Meter::unit(counting);
                print(&format!("{name}: {unit} each"), format!("at {count}"), each);
            }
            Ok(())
        }
    }
}
