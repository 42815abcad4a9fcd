//! Times of the device in the process, in each mode, beside marks of the machine. `bench-sim RUNS [TEXT]`, on any
//! machine: the measures of `lab_bench::sim` whose name has the text.

#![deny(clippy::print_stdout, clippy::print_stderr, clippy::disallowed_methods)]

use lab_bench::Failure;
use lab_bench::sample::Sample;
use lab_bench::sim::{self, Measure, Unit};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::hint::{black_box, spin_loop};
use std::io::{Read, Write};
use std::process::ExitCode;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};
use uverbs::device::devices_on;
use uverbs::sim::{Fabric, Mode, Profile, TokioClock};
use uverbs::{
    Access, CompletionChannel, CompletionQueue, Context, Handshake, MemoryRegion, Notify,
    QpControl, QpType, QueuePair, RecvWr, SendWr,
};

/// The result that any thread of the program may return.
type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// Bytes of a long write.
const LONG: usize = 1 << 20;
/// Bytes of a short message.
const SHORT: usize = 2;
/// Messages to a doorbell, one way.
const BATCH: usize = 16;
/// Seconds until a side that gets nothing gives up.
const PATIENCE: Duration = Duration::from_secs(30);
/// Empty polls between two looks at the clock.
const POLLS: u32 = 1 << 16;

thread_local! {
    /// How often this thread asked for memory.
    static ASKED: Cell<u64> = const { Cell::new(0) };
}

/// The system's allocator, and how often it is asked.
struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

// SAFETY: it is the system's allocator, and counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ASKED.set(ASKED.get() + 1);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        ASKED.set(ASKED.get() + 1);
        // SAFETY: the caller's promise.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, start: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ASKED.set(ASKED.get() + 1);
        // SAFETY: the caller's promise.
        unsafe { System.realloc(start, layout, size) }
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(start, layout) }
    }
}

/// The cost of a run of rounds.
#[derive(Clone, Copy)]
struct Run {
    nanoseconds: f64,
    allocations: f64,
}

/// Runs rounds, after some that do not count, and prints the time of each.
fn timed(rounds: u32, mut work: impl FnMut(u32) -> Result<()>) -> Result<Run> {
    work(rounds / 8 + 1)?;
    let (asked, start) = (ASKED.get(), Instant::now());
    work(rounds)?;
    let took = start.elapsed();
    let asked = ASKED.get() - asked;
    let each = |all: f64| all / f64::from(rounds);
    Ok(Run { nanoseconds: each(took.as_nanos() as f64), allocations: each(asked as f64) })
}

/// Connects two queue pairs of one fabric.
fn connect(one: &QpControl, other: &QpControl) -> Result<()> {
    let endpoint = |qp: &QpControl| qp.endpoint(&qp.context().query_gid(1, 3)?);
    let (at_one, at_other) = (endpoint(one)?, endpoint(other)?);
    one.handshake(&at_other, &Handshake::new())?;
    other.handshake(&at_one, &Handshake::new())?;
    Ok(())
}

/// A queue pair with all that it needs. Fields are dropped in this order.
struct Side {
    qp: QueuePair,
    memory: MemoryRegion<u8>,
    cq: CompletionQueue,
    channel: CompletionChannel,
    /// Completions that were polled and not waited for.
    received: usize,
    sent: usize,
}

const RECEIVED: u64 = 1;
const SENT: u64 = 2;

impl Side {
    fn new(fabric: &Fabric, number: usize) -> Result<Side> {
        let context = Context::open(&devices_on(&fabric.system())[number])?;
        let pd = context.alloc_pd()?;
        let channel = context.create_comp_channel()?;
        let cq = context.cq_builder(128).channel(&channel).build()?;
        let memory = pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u8>(LONG)?;
        let qp = pd.qp_builder(&cq, &cq, QpType::RC).max_send_wr(32).max_recv_wr(32).build()?;
        Ok(Side { qp, memory, cq, channel, received: 0, sent: 0 })
    }

    /// Two sides that are connected.
    fn couple(fabric: &Fabric) -> Result<(Side, Side)> {
        let (a, b) = (Side::new(fabric, 0)?, Side::new(fabric, 1)?);
        connect(&a.qp, &b.qp)?;
        Ok((a, b))
    }

    fn receive(&mut self, count: usize) -> Result<()> {
        let sges = [self.memory.sge(..SHORT)?];
        let mut batch = self.qp.recv_batch()?;
        for _ in 0..count {
            batch.push(RecvWr::new(&sges).id(RECEIVED))?;
        }
        // SAFETY: the memory is dropped after the queue pair, and nobody borrows it.
        unsafe { batch.ring()? };
        Ok(())
    }

    fn send(&mut self, count: usize) -> Result<()> {
        let sges = [self.memory.sge(SHORT..2 * SHORT)?];
        let mut batch = self.qp.send_batch()?;
        for _ in 0..count {
            batch.push(SendWr::send(&sges).id(SENT).signaled())?;
        }
        // SAFETY: as above.
        unsafe { batch.ring()? };
        Ok(())
    }

    fn write(&mut self, to: uverbs::Remote) -> Result<()> {
        let sges = [self.memory.sge(..)?];
        let mut batch = self.qp.send_batch()?;
        batch.push(SendWr::write(to, &sges).id(SENT).signaled())?;
        // SAFETY: as above.
        unsafe { batch.ring()? };
        Ok(())
    }

    /// Polls once; whether so many completions are there, which are taken then.
    fn has(&mut self, received: usize, sent: usize) -> Result<bool> {
        let mut completions = self.cq.poll()?;
        while let Some(completion) = completions.next() {
            match completion.ok()?.wr_id() {
                RECEIVED => self.received += 1,
                _ => self.sent += 1,
            }
        }
        let there = self.received >= received && self.sent >= sent;
        if there {
            self.received -= received;
            self.sent -= sent;
        }
        Ok(there)
    }

    fn spin(&mut self, received: usize, sent: usize) -> Result<()> {
        let mut start = None;
        loop {
            for _ in 0..POLLS {
                if self.has(received, sent)? {
                    return Ok(());
                }
            }
            if start.get_or_insert_with(Instant::now).elapsed() > PATIENCE {
                return Err("no completion".into());
            }
        }
    }

    fn block(&mut self, received: usize, sent: usize) -> Result<()> {
        loop {
            self.cq.req_notify(Notify::Next)?;
            if self.has(received, sent)? {
                return Ok(());
            }
            if self.channel.wait(Some(PATIENCE))?.is_none() {
                return Err("no event".into());
            }
        }
    }
}

/// How a side waits for completions: so many receives, and so many sends.
type Wait = fn(&mut Side, usize, usize) -> Result<()>;

/// Both sides in one thread.
fn one_thread(mode: Mode) -> Result<Run> {
    let fabric = Fabric::new(2, mode);
    let (mut a, mut b) = Side::couple(&fabric)?;
    timed(10_000, |rounds| {
        for _ in 0..rounds {
            a.receive(1)?;
            b.receive(1)?;
            a.send(1)?;
            b.spin(1, 0)?;
            b.send(1)?;
            a.spin(1, 1)?;
            b.spin(0, 1)?;
        }
        Ok(())
    })
}

/// A thread for each side.
fn two_threads(mode: Mode, rounds: u32, wait: Wait) -> Result<Run> {
    let fabric = Fabric::new(2, mode);
    let (mut a, mut b) = Side::couple(&fabric)?;
    timed(rounds, |rounds| {
        a.receive(1)?;
        b.receive(1)?;
        std::thread::scope(|scope| {
            let other = scope.spawn(|| -> Result<()> {
                for round in 1..=rounds {
                    wait(&mut b, 1, 0)?;
                    if round < rounds {
                        b.receive(1)?;
                    }
                    b.send(1)?;
                    wait(&mut b, 0, 1)?;
                }
                Ok(())
            });
            for round in 1..=rounds {
                a.send(1)?;
                wait(&mut a, 1, 1)?;
                if round < rounds {
                    a.receive(1)?;
                }
            }
            other.join().map_err(|_| "a panic")?
        })
    })
}

/// A task for each side, in an event loop of one thread.
fn tasks(mode: Mode) -> Result<Run> {
    let stepped = mode != Mode::Trapped;
    let fabric = Fabric::new(2, mode);
    let mut builder = tokio::runtime::Builder::new_current_thread();
    let event_loop = builder.enable_all().start_paused(stepped).build()?;
    let (one, other) = event_loop.block_on(async {
        if stepped {
            let driven = fabric.clone();
            tokio::spawn(async move { driven.drive(TokioClock::new()).await });
        }
        let side = |number: usize| -> Result<_> {
            let context = Context::open(&devices_on(&fabric.system())[number])?;
            let pd = context.alloc_pd()?;
            let pool = pd.buffer_pool_builder(64).count(16).build()?;
            let (cq, driver) = context.cq_builder(64).spawn()?;
            let qp = pd.qp_builder(&cq, &cq, QpType::RC).max_send_wr(4).max_recv_wr(8).build()?;
            Ok((cq.adopt(qp)?, pool, driver))
        };
        let (one, other) = (side(0)?, side(1)?);
        connect(&one.0, &other.0)?;
        Result::Ok((one, other))
    })?;
    let (a, a_pool, _a_driver) = one;
    let (b, b_pool, _b_driver) = other;
    let mut to_a = a.inbox(&a_pool, 4);
    let to_b = b.inbox(&b_pool, 4);
    let mut kept = Some((b, to_b));
    let mut buffer = Some(a_pool.copy(b"hi")?);
    timed(2_000, |rounds| {
        event_loop.block_on(async {
            let (b, mut to_b) = kept.take().ok_or("no peer")?;
            let server = tokio::spawn(async move {
                for _ in 0..rounds {
                    let message = to_b.next().await?;
                    b.send(message.memory).await?;
                }
                Result::Ok((b, to_b))
            });
            let mut own = buffer.take().ok_or("no buffer")?;
            for _ in 0..rounds {
                let (sent, answer) = tokio::join!(a.send(own), to_a.next());
                own = sent?.memory;
                black_box(&answer?.memory[..]);
            }
            buffer = Some(own);
            kept = Some(server.await??);
            Ok(())
        })
    })
}

/// Writes of 1 MiB, one after the other, in packets of 4096 bytes.
fn long_writes(mode: Mode) -> Result<Run> {
    let device = || Profile::new().jumbo_frames();
    let builder = Fabric::builder().device(device()).device(device());
    let fabric = match mode {
        Mode::Stepped { seed } => builder.stepped(seed).build()?,
        _ => builder.build()?,
    };
    let (mut a, b) = Side::couple(&fabric)?;
    let to = b.memory.remote(0)?;
    timed(100, |rounds| {
        for _ in 0..rounds {
            a.write(to)?;
            a.spin(0, 1)?;
        }
        Ok(())
    })
}

/// Sends in one direction.
fn one_way(mode: Mode) -> Result<Run> {
    let fabric = Fabric::new(2, mode);
    let (mut a, mut b) = Side::couple(&fabric)?;
    timed(20_000 / BATCH as u32, |rounds| {
        for _ in 0..rounds {
            b.receive(BATCH)?;
            a.send(BATCH)?;
            a.spin(0, BATCH)?;
            b.spin(BATCH, 0)?;
        }
        Ok(())
    })
    .map(|run| Run {
        nanoseconds: run.nanoseconds / BATCH as f64,
        allocations: run.allocations / BATCH as f64,
    })
}

/// Tasks on an event loop of two threads, each with writes of its own, one after the other.
fn futures(tasks: usize, queue_pairs: usize) -> Result<Run> {
    let fabric = Fabric::new(2, Mode::Trapped);
    let event_loop =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let _guard = event_loop.enter();
    let context = Context::open(&devices_on(&fabric.system())[0])?;
    let pd = context.alloc_pd()?;
    let pool = pd.buffer_pool_builder(SHORT).count(tasks).build()?;
    let (cq, _driver) = context.cq_builder(128).spawn()?;
    let mut pairs = Vec::new();
    for _ in 0..queue_pairs {
        let qp = cq.adopt(pd.qp_builder(&cq, &cq, QpType::RC).max_send_wr(16).build()?)?;
        let peer = Side::new(&fabric, 1)?;
        connect(&qp, &peer.qp)?;
        pairs.push((qp, peer));
    }
    let mut kept = (0..tasks).map(|_| pool.take()).collect::<std::result::Result<Vec<_>, _>>()?;
    timed(20_000 / tasks as u32, |rounds| {
        event_loop.block_on(async {
            let mut running = Vec::new();
            for (number, mut buffer) in kept.drain(..).enumerate() {
                let (qp, peer) = &pairs[number % queue_pairs];
                let (qp, to) = (qp.clone(), peer.memory.remote(0)?);
                running.push(tokio::spawn(async move {
                    for _ in 0..rounds {
                        buffer = qp.write(to, buffer).await?.memory;
                    }
                    Result::Ok(buffer)
                }));
            }
            for task in running {
                kept.push(task.await??);
            }
            Ok(())
        })
    })
    .map(|run| Run { nanoseconds: run.nanoseconds / tasks as f64, ..run })
}

/// Two bytes through a pipe and back through another one.
fn pipes() -> Result<Run> {
    let (mut here, mut there) = std::io::pipe()?;
    let (mut back, mut answer) = std::io::pipe()?;
    timed(2_000, |rounds| {
        std::thread::scope(|scope| {
            let other = scope.spawn(|| -> Result<()> {
                let mut bytes = [0; SHORT];
                for _ in 0..rounds {
                    here.read_exact(&mut bytes)?;
                    answer.write_all(&bytes)?;
                }
                Ok(())
            });
            let mut bytes = [0; SHORT];
            for _ in 0..rounds {
                there.write_all(&bytes)?;
                back.read_exact(&mut bytes)?;
            }
            other.join().map_err(|_| "a panic")?
        })
    })
}

/// A word that two threads count up in turns.
fn word() -> Result<Run> {
    let word = AtomicU32::new(0);
    let pass = |odd: u32, rounds: u32| {
        for _ in 0..rounds {
            while word.load(Ordering::Acquire) % 2 != odd {
                spin_loop();
            }
            word.fetch_add(1, Ordering::AcqRel);
        }
    };
    timed(50_000, |rounds| {
        std::thread::scope(|scope| {
            scope.spawn(|| pass(1, rounds));
            pass(0, rounds);
        });
        Ok(())
    })
}

fn copy() -> Result<Run> {
    let (from, mut to) = (vec![1u8; LONG], vec![0u8; LONG]);
    timed(200, |rounds| {
        for _ in 0..rounds {
            black_box(&mut to[..]).copy_from_slice(black_box(&from));
        }
        Ok(())
    })
}

fn run(measure: &Measure) -> Result<f64> {
    let stepped = Mode::Stepped { seed: 1 };
    let run = match (measure.operation, measure.way) {
        (sim::ROUND_TRIP, sim::STEPPED) => one_thread(stepped),
        (sim::ROUND_TRIP, sim::STEPPED_SPINNING) => two_threads(stepped, 4_000, Side::spin),
        (sim::ROUND_TRIP, sim::STEPPED_TOKIO) => tasks(stepped),
        (sim::ROUND_TRIP, sim::TRAPPED) => one_thread(Mode::Trapped),
        (sim::ROUND_TRIP, sim::TRAPPED_SPINNING) => two_threads(Mode::Trapped, 4_000, Side::spin),
        (sim::ROUND_TRIP, sim::TRAPPED_BLOCKING) => two_threads(Mode::Trapped, 1_000, Side::block),
        (sim::ROUND_TRIP, sim::TRAPPED_TOKIO) => tasks(Mode::Trapped),
        (sim::ROUND_TRIP, sim::PIPES) => pipes(),
        (sim::ROUND_TRIP, sim::WORD) => word(),
        (sim::ONE_WAY, sim::STEPPED) => one_way(stepped),
        (sim::FUTURES, sim::ONE_TASK) => futures(1, 1),
        (sim::FUTURES, sim::TWO_TASKS) => futures(2, 1),
        (sim::FUTURES, sim::FOUR_TASKS) => futures(4, 1),
        (sim::FUTURES, sim::FOUR_APART) => futures(4, 4),
        (sim::WRITE, sim::STEPPED) => long_writes(stepped),
        (sim::WRITE, sim::TRAPPED) => long_writes(Mode::Trapped),
        (sim::COPY, sim::MEMCPY) => copy(),
        (operation, way) => Err(format!("{operation}, {way} is not known").into()),
    }?;
    Ok(match measure.unit {
        Unit::Microseconds => run.nanoseconds / 1e3,
        Unit::Gigabytes => LONG as f64 / run.nanoseconds,
        Unit::Messages => 1e9 / run.nanoseconds,
        Unit::Allocations => run.allocations,
    })
}

fn measure_all(runs: u32, text: &str) -> std::result::Result<(), Failure> {
    let wanted: Vec<_> = sim::ALL.iter().filter(|measure| measure.name().contains(text)).collect();
    let mut samples: Vec<_> = wanted.iter().map(|measure| (measure, Vec::new())).collect();
    // In turns, so that a busy moment of the machine is no measure's alone.
    for _ in 0..runs {
        for (measure, runs) in &mut samples {
            runs.push(run(measure).map_err(|error| format!("{}: {error}", measure.name()))?);
        }
    }
    for (measure, runs) in samples {
        lab_bench::say(Sample {
            operation: measure.name(),
            way: measure.unit.name().to_owned(),
            runs,
        });
    }
    Ok(())
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let (runs, text) = match words[..] {
        [runs] => (runs.parse(), ""),
        [runs, text] => (runs.parse(), text),
        _ => {
            lab_bench::complain("bench-sim RUNS [TEXT]");
            return ExitCode::FAILURE;
        }
    };
    match runs.map_err(Failure::from).and_then(|runs| measure_all(runs, text)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            lab_bench::complain(failure);
            ExitCode::FAILURE
        }
    }
}
