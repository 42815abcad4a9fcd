//! The cost of requests that take their memory beside requests that name it by number: the same
//! operations of one device, of one library, one after the other. `bench-owned DEVICE RUNS`, in a
//! machine whose clock counts instructions.
//!
//! Both sides do the same work. They post memory from a list of their own, a piece of memory for each
//! request: a slice of one region, named by number, or a buffer that the program already has. Each
//! request has a number, is signaled and is rung for by itself, unless it is one of a batch. Completions are
//! handled in the same way and go back to a list: the number, whose meaning the program has to remember, or
//! the buffer, with the number beside it. Taking buffers from the pool and returning them is a row of its
//! own, which the other side has not.

#![deny(clippy::print_stdout, clippy::print_stderr, clippy::disallowed_methods)]

use lab_bench::Failure;
use lab_bench::clock::{counts_instructions, linger};
use lab_bench::path::{AFTERWARDS, BATCH, RUN, SETTLING};
use lab_bench::sample::Sample;
use std::hint::black_box;
use std::process::ExitCode;
use std::time::{Duration, Instant};
use uverbs::owned::{Buffer, BufferPool, OwnedCompletionQueue, OwnedQueuePair};
use uverbs::{
    Access, CompletionQueue, Context, Device, GidEntry, Handshake, MemoryRegion, ProtectionDomain,
    QpControl, QpType, QueuePair, RecvWr, Remote, SendWr, Sge,
};

/// Bytes of each message.
const BYTES: usize = 64;
/// Requests that each queue holds.
const DEPTH: u32 = 2 * RUN;
/// Completions that the queue of each pair holds.
const CQE: u32 = 4 * DEPTH;
/// Runs that may be thrown away for each that counts.
const PATIENCE: u32 = 10;

/// Two queue pairs that send to each other, and their completion queue.
struct Raw {
    one: QueuePair,
    other: QueuePair,
    cq: CompletionQueue,
    memory: MemoryRegion<u8>,
    /// Those that no request has.
    slices: Vec<Sge>,
    /// The numbers of requests that are over.
    over: Vec<u64>,
}

/// The same, of the kind that takes memory.
struct Owned {
    one: OwnedQueuePair<u64>,
    other: OwnedQueuePair<u64>,
    cq: OwnedCompletionQueue<u64>,
    pool: BufferPool,
    /// Those that no request has.
    buffers: Vec<Buffer>,
}

/// Where writes go.
type Target = (MemoryRegion<u8>, Remote);

fn connect(one: &QpControl, other: &QpControl, gid: GidEntry) -> Result<(), Failure> {
    let (here, there) = (one.endpoint(&gid)?, other.endpoint(&gid)?);
    one.handshake(&there, &Handshake::new())?;
    other.handshake(&here, &Handshake::new())?;
    Ok(())
}

fn queue_pair(pd: &ProtectionDomain, cq: &CompletionQueue) -> Result<QueuePair, Failure> {
    Ok(pd.qp_builder(cq, cq, QpType::RC).max_send_wr(DEPTH).max_recv_wr(DEPTH).build()?)
}

/// Waits for so many completions.
fn settle(count: u32, mut poll: impl FnMut() -> Result<u32, Failure>) -> Result<(), Failure> {
    let (start, mut found) = (Instant::now(), 0);
    while found < count {
        found += poll()?;
        if start.elapsed() > Duration::from_secs(SETTLING) {
            return Err(format!("{found} of {count} requests are over").into());
        }
    }
    Ok(())
}

impl Raw {
    fn new(context: &Context, pd: &ProtectionDomain, gid: GidEntry) -> Result<Raw, Failure> {
        let cq = context.cq_builder(CQE).build()?;
        let (one, other) = (queue_pair(pd, &cq)?, queue_pair(pd, &cq)?);
        connect(&one, &other, gid)?;
        let memory = pd.mr_builder().access(Access::ALL_REMOTE).allocate(BYTES)?;
        let slices = vec![memory.sge(..)?; 2 * RUN as usize];
        Ok(Raw { one, other, cq, memory, slices, over: Vec::with_capacity(2 * RUN as usize) })
    }

    #[inline(never)]
    fn write(&mut self, to: Remote) -> Result<(), Failure> {
        for (sge, id) in self.slices.drain(RUN as usize..).zip(0..) {
            let mut batch = self.one.send_batch()?;
            batch.push(SendWr::write(to, &[sge]).id(id).signaled())?;
            // SAFETY: the memory lives as long as the queue pairs, and nobody borrows it.
            unsafe { batch.ring() }?;
        }
        Ok(())
    }

    #[inline(never)]
    fn write_batches(&mut self, to: Remote) -> Result<(), Failure> {
        for round in 0..RUN / BATCH {
            let mut batch = self.one.send_batch()?;
            let rest = self.slices.len() - BATCH as usize;
            for (sge, id) in self.slices.drain(rest..).zip(u64::from(round * BATCH)..) {
                batch.push(SendWr::write(to, &[sge]).id(id).signaled())?;
            }
            // SAFETY: the memory lives as long as the queue pairs, and nobody borrows it.
            unsafe { batch.ring() }?;
        }
        Ok(())
    }

    #[inline(never)]
    fn send(&mut self) -> Result<(), Failure> {
        for (sge, id) in self.slices.drain(RUN as usize..).zip(0..) {
            let mut batch = self.one.send_batch()?;
            batch.push(SendWr::send(&[sge]).id(id).signaled())?;
            // SAFETY: the memory lives as long as the queue pairs, and nobody borrows it.
            unsafe { batch.ring() }?;
        }
        Ok(())
    }

    #[inline(never)]
    fn receive(&mut self) -> Result<(), Failure> {
        for (sge, id) in self.slices.drain(RUN as usize..).zip(0..) {
            let mut batch = self.other.recv_batch()?;
            batch.push(RecvWr::new(&[sge]).id(id))?;
            // SAFETY: the memory lives as long as the queue pairs, and nobody borrows it.
            unsafe { batch.ring()? };
        }
        Ok(())
    }

    #[inline(never)]
    fn receive_batches(&mut self) -> Result<(), Failure> {
        for round in 0..RUN / BATCH {
            let mut batch = self.other.recv_batch()?;
            let rest = self.slices.len() - BATCH as usize;
            for (sge, id) in self.slices.drain(rest..).zip(u64::from(round * BATCH)..) {
                batch.push(RecvWr::new(&[sge]).id(id))?;
            }
            // SAFETY: the memory lives as long as the queue pairs, and nobody borrows it.
            unsafe { batch.ring()? };
        }
        Ok(())
    }

    /// As many slices as before.
    fn refill(&mut self) -> Result<(), Failure> {
        let slice = self.memory.sge(..)?;
        self.slices.resize(2 * RUN as usize, slice);
        self.over.clear();
        Ok(())
    }

    /// Takes the completions that are there.
    #[inline(never)]
    fn poll(&mut self) -> Result<u32, Failure> {
        let Raw { cq, over, .. } = self;
        let (mut found, mut sum, mut failed) = (0, 0, None);
        let mut completions = cq.poll()?;
        while let Some(completion) = completions.next() {
            if !completion.is_success() {
                failed = Some(completion.status());
            }
            sum += completion.wr_id() + u64::from(completion.opcode().0);
            over.push(completion.wr_id());
            found += 1;
        }
        black_box(sum);
        match failed {
            Some(status) => Err(format!("a request failed: {status}").into()),
            None => Ok(found),
        }
    }
}

impl Owned {
    fn new(context: &Context, pd: &ProtectionDomain, gid: GidEntry) -> Result<Owned, Failure> {
        let mut cq = OwnedCompletionQueue::new(context.cq_builder(CQE).build()?);
        let one = cq.adopt(queue_pair(pd, cq.queue())?)?;
        let other = cq.adopt(queue_pair(pd, cq.queue())?)?;
        connect(&one, &other, gid)?;
        let pool = pd.buffer_pool_builder(BYTES).count(4 * RUN as usize).build()?;
        let mut buffers = Vec::with_capacity(4 * RUN as usize);
        buffers.extend((0..2 * RUN).filter_map(|_| pool.take().ok()));
        Ok(Owned { one, other, cq, pool, buffers })
    }

    #[inline(never)]
    fn write(&mut self, to: Remote) -> Result<(), Failure> {
        for (buffer, id) in self.buffers.drain(RUN as usize..).zip(0..) {
            let mut batch = self.one.send_batch()?;
            batch.push(SendWr::write(to, &[]), buffer, id).map_err(|refused| refused.error)?;
            batch.ring()?;
        }
        Ok(())
    }

    #[inline(never)]
    fn write_batches(&mut self, to: Remote) -> Result<(), Failure> {
        for round in 0..RUN / BATCH {
            let mut batch = self.one.send_batch()?;
            let rest = self.buffers.len() - BATCH as usize;
            for (buffer, id) in self.buffers.drain(rest..).zip(u64::from(round * BATCH)..) {
                batch.push(SendWr::write(to, &[]), buffer, id).map_err(|refused| refused.error)?;
            }
            batch.ring()?;
        }
        Ok(())
    }

    #[inline(never)]
    fn send(&mut self) -> Result<(), Failure> {
        for (buffer, id) in self.buffers.drain(RUN as usize..).zip(0..) {
            let mut batch = self.one.send_batch()?;
            batch.push(SendWr::send(&[]), buffer, id).map_err(|refused| refused.error)?;
            batch.ring()?;
        }
        Ok(())
    }

    #[inline(never)]
    fn receive(&mut self) -> Result<(), Failure> {
        for (buffer, id) in self.buffers.drain(RUN as usize..).zip(0..) {
            let mut batch = self.other.recv_batch()?;
            batch.push(buffer, id).map_err(|refused| refused.error)?;
            batch.ring()?;
        }
        Ok(())
    }

    #[inline(never)]
    fn receive_batches(&mut self) -> Result<(), Failure> {
        for round in 0..RUN / BATCH {
            let mut batch = self.other.recv_batch()?;
            let rest = self.buffers.len() - BATCH as usize;
            for (buffer, id) in self.buffers.drain(rest..).zip(u64::from(round * BATCH)..) {
                batch.push(buffer, id).map_err(|refused| refused.error)?;
            }
            batch.ring()?;
        }
        Ok(())
    }

    /// Takes buffers from the pool, and returns them.
    #[inline(never)]
    fn take_and_return(&mut self) -> Result<(), Failure> {
        for _ in 0..RUN {
            black_box(self.pool.take()?);
        }
        Ok(())
    }

    /// As many buffers as before.
    fn refill(&mut self) {
        self.buffers.truncate(2 * RUN as usize);
        let missing = 2 * RUN as usize - self.buffers.len();
        self.buffers.extend((0..missing).filter_map(|_| self.pool.take().ok()));
    }

    /// Takes the completions that are there.
    #[inline(never)]
    fn poll(&mut self) -> Result<u32, Failure> {
        let Owned { cq, buffers, .. } = self;
        let (mut sum, mut failed) = (0, None);
        let found = cq.poll_each(usize::MAX, |request| {
            if !request.is_success() {
                failed = Some(request.status());
            }
            sum += u64::from(request.opcode().0);
            if let Ok((buffer, tag)) = request.into_buffer() {
                sum += tag;
                buffers.push(buffer);
            }
        })?;
        black_box(sum);
        match failed {
            Some(status) => Err(format!("a request failed: {status}").into()),
            None => Ok(found as u32),
        }
    }
}

/// An operation to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Operation {
    Write,
    WriteBatches,
    Send,
    Receive,
    ReceiveBatches,
    Poll,
    /// An operation that only one side has.
    Pool,
}

/// Nanoseconds for each of the run's requests or completions.
fn timed(work: impl FnOnce() -> Result<(), Failure>) -> Result<f64, Failure> {
    let start = Instant::now();
    work()?;
    Ok(start.elapsed().as_nanos() as f64 / f64::from(RUN))
}

fn raw(side: &mut Raw, target: &Target, operation: Operation) -> Result<f64, Failure> {
    let to = target.1;
    side.refill()?;
    match operation {
        Operation::Write | Operation::WriteBatches => {
            let time = timed(|| match operation {
                Operation::Write => side.write(to),
                _ => side.write_batches(to),
            })?;
            settle(RUN, || side.poll())?;
            Ok(time)
        }
        Operation::Send => {
            side.receive()?;
            side.refill()?;
            let time = timed(|| side.send())?;
            settle(2 * RUN, || side.poll())?;
            Ok(time)
        }
        Operation::Receive | Operation::ReceiveBatches => {
            let time = timed(|| match operation {
                Operation::Receive => side.receive(),
                _ => side.receive_batches(),
            })?;
            side.refill()?;
            side.send()?;
            settle(2 * RUN, || side.poll())?;
            Ok(time)
        }
        Operation::Poll => {
            side.write(to)?;
            linger(4 * AFTERWARDS);
            timed(|| settle(RUN, || side.poll()))
        }
        Operation::Pool => Ok(0.0),
    }
}

fn owned(side: &mut Owned, target: &Target, operation: Operation) -> Result<f64, Failure> {
    let to = target.1;
    side.refill();
    match operation {
        Operation::Write | Operation::WriteBatches => {
            let time = timed(|| match operation {
                Operation::Write => side.write(to),
                _ => side.write_batches(to),
            })?;
            settle(RUN, || side.poll())?;
            Ok(time)
        }
        Operation::Send => {
            side.receive()?;
            side.refill();
            let time = timed(|| side.send())?;
            settle(2 * RUN, || side.poll())?;
            Ok(time)
        }
        Operation::Receive | Operation::ReceiveBatches => {
            let time = timed(|| match operation {
                Operation::Receive => side.receive(),
                _ => side.receive_batches(),
            })?;
            side.refill();
            side.send()?;
            settle(2 * RUN, || side.poll())?;
            Ok(time)
        }
        Operation::Poll => {
            side.write(to)?;
            linger(4 * AFTERWARDS);
            timed(|| settle(RUN, || side.poll()))
        }
        Operation::Pool => timed(|| side.take_and_return()),
    }
}

fn run(device: &str, runs: u32) -> Result<(), Failure> {
    let context = Context::open(&Device::by_name(device)?)?;
    let pd = context.alloc_pd()?;
    let gid = context.default_gid(1)?;
    let memory = pd.mr_builder().access(Access::ALL_REMOTE).allocate(BYTES)?;
    let remote = memory.remote(0)?;
    let target = (memory, remote);
    let mut raw_side = Raw::new(&context, &pd, gid)?;
    let mut owned_side = Owned::new(&context, &pd, gid)?;
    let operations = [
        ("write", Operation::Write),
        ("write, 32 to a doorbell", Operation::WriteBatches),
        ("send", Operation::Send),
        ("receive", Operation::Receive),
        ("receive, 32 to a doorbell", Operation::ReceiveBatches),
        ("poll", Operation::Poll),
        ("take from the pool and return", Operation::Pool),
    ];
    for (name, operation) in operations {
        let sample = |way: &str| Sample { operation: name.into(), way: way.into(), runs: vec![] };
        let mut samples = [sample("by number"), sample("owned")];
        for attempt in 0.. {
            if samples.iter().all(|sample| sample.runs.len() >= runs as usize) {
                break;
            }
            if attempt > PATIENCE * runs {
                return Err(format!("{name}: the clock does not count instructions").into());
            }
            let [by_number, taken] = &mut samples;
            let time = raw(&mut raw_side, &target, operation)?;
            by_number.runs.extend(counts_instructions().then_some(time));
            let time = owned(&mut owned_side, &target, operation)?;
            taken.runs.extend(counts_instructions().then_some(time));
        }
        // A side without an operation has no row.
        let [by_number, taken] = &samples;
        if operation != Operation::Pool {
            lab_bench::say(by_number);
        }
        lab_bench::say(taken);
    }
    Ok(())
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let ended = match arguments.as_slice() {
        [device, runs] => runs.parse().map_err(Failure::from).and_then(|runs| run(device, runs)),
        _ => Err("bench-owned DEVICE RUNS".into()),
    };
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            lab_bench::complain(failure);
            ExitCode::FAILURE
        }
    }
}
