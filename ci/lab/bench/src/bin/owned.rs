//! What requests that take their memory cost beside requests that name it by number: the same
//! operations of one device, of one library, one after the other. `bench-owned DEVICE RUNS`, in a
//! machine whose clock counts instructions.

use lab_bench::Failure;
use lab_bench::clock::{counts_instructions, linger};
use lab_bench::path::{AFTERWARDS, RUN, SETTLING};
use lab_bench::sample::Sample;
use std::hint::black_box;
use std::process::ExitCode;
use std::time::{Duration, Instant};
use uverbs::owned::{Buffer, BufferPool, OwnedCompletionQueue, OwnedQueuePair};
use uverbs::{
    CompletionQueue, Context, Device, MemoryRegion, ProtectionDomain, QpControl, QpType, QueuePair,
    Recv, Remote, SendWr, Sge,
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

fn connect(one: &QpControl, other: &QpControl, gid: u32) -> Result<(), Failure> {
    let (here, there) = (one.endpoint(1, gid)?, other.endpoint(1, gid)?);
    one.handshake(&there)?;
    other.handshake(&here)?;
    Ok(())
}

fn queue_pair(pd: &ProtectionDomain, cq: &CompletionQueue) -> Result<QueuePair, Failure> {
    Ok(pd.create_qp(cq, cq, QpType::RC).max_send_wr(DEPTH).max_recv_wr(DEPTH).build()?)
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
    fn new(context: &Context, pd: &ProtectionDomain, gid: u32) -> Result<Raw, Failure> {
        let cq = context.create_cq(CQE).build()?;
        let (one, other) = (queue_pair(pd, &cq)?, queue_pair(pd, &cq)?);
        connect(&one, &other, gid)?;
        Ok(Raw { one, other, cq, memory: pd.allocate(BYTES)? })
    }

    #[inline(never)]
    fn send<'a>(&mut self, make: impl Fn() -> SendWr<'a>) -> Result<(), Failure> {
        for id in 0..RUN {
            let mut batch = self.one.send_batch()?;
            batch.push(make().id(id.into()).signaled())?;
            // SAFETY: the memory lives as long as the queue pairs, and nobody borrows it.
            unsafe { batch.ring() }?;
        }
        Ok(())
    }

    #[inline(never)]
    fn receive(&mut self, sges: &[Sge]) -> Result<(), Failure> {
        for id in 0..RUN {
            let mut batch = self.other.recv_batch()?;
            batch.push(Recv { wr_id: id.into(), sges })?;
            // SAFETY: the memory lives as long as the queue pairs, and nobody borrows it.
            unsafe { batch.ring() };
        }
        Ok(())
    }

    /// Takes what is there.
    #[inline(never)]
    fn poll(&mut self) -> Result<u32, Failure> {
        let (mut found, mut sum) = (0, 0);
        let mut completions = self.cq.poll()?;
        while let Some(completion) = completions.next() {
            if !completion.is_success() {
                return Err(format!("a request failed: {}", completion.status()).into());
            }
            sum += completion.wr_id() + u64::from(completion.opcode().0);
            found += 1;
        }
        black_box(sum);
        Ok(found)
    }
}

impl Owned {
    fn new(context: &Context, pd: &ProtectionDomain, gid: u32) -> Result<Owned, Failure> {
        let mut cq = OwnedCompletionQueue::new(context.create_cq(CQE).build()?);
        let one = cq.adopt(queue_pair(pd, cq.queue())?)?;
        let other = cq.adopt(queue_pair(pd, cq.queue())?)?;
        connect(&one, &other, gid)?;
        let pool = pd.buffer_pool(BYTES).count(4 * RUN as usize).build()?;
        let buffers = (0..2 * RUN).filter_map(|_| pool.take()).collect();
        Ok(Owned { one, other, cq, pool, buffers })
    }

    #[inline(never)]
    fn send<'a>(&mut self, make: impl Fn() -> SendWr<'a>) -> Result<(), Failure> {
        let buffers = self.buffers.drain(RUN as usize..);
        for (buffer, id) in buffers.zip(0..) {
            let mut batch = self.one.send_batch()?;
            batch.push(make(), buffer, id).map_err(|refused| refused.error)?;
            batch.ring()?;
        }
        Ok(())
    }

    #[inline(never)]
    fn receive(&mut self) -> Result<(), Failure> {
        let buffers = self.buffers.drain(RUN as usize..);
        for (buffer, id) in buffers.zip(0..) {
            let mut batch = self.other.recv_batch()?;
            batch.push(buffer, id).map_err(|refused| refused.error)?;
            batch.ring();
        }
        Ok(())
    }

    /// Takes what is there.
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

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Operation {
    Write,
    Send,
    Receive,
    Poll,
}

/// Nanoseconds for each of the run's requests or completions.
fn timed(work: impl FnOnce() -> Result<(), Failure>) -> Result<f64, Failure> {
    let start = Instant::now();
    work()?;
    Ok(start.elapsed().as_nanos() as f64 / f64::from(RUN))
}

fn raw(side: &mut Raw, target: &Target, operation: Operation) -> Result<f64, Failure> {
    let sges = [side.memory.sge(..)?];
    let write = || SendWr::write(target.1, &sges);
    match operation {
        Operation::Write => {
            let time = timed(|| side.send(write))?;
            settle(RUN, || side.poll())?;
            Ok(time)
        }
        Operation::Send => {
            side.receive(&sges)?;
            let time = timed(|| side.send(|| SendWr::send(&sges)))?;
            settle(2 * RUN, || side.poll())?;
            Ok(time)
        }
        Operation::Receive => {
            let time = timed(|| side.receive(&sges))?;
            side.send(|| SendWr::send(&sges))?;
            settle(2 * RUN, || side.poll())?;
            Ok(time)
        }
        Operation::Poll => {
            side.send(write)?;
            linger(4 * AFTERWARDS);
            timed(|| settle(RUN, || side.poll()))
        }
    }
}

fn owned(side: &mut Owned, target: &Target, operation: Operation) -> Result<f64, Failure> {
    let write = || SendWr::write(target.1, &[]);
    let time = match operation {
        Operation::Write => {
            let time = timed(|| side.send(write))?;
            settle(RUN, || side.poll())?;
            time
        }
        Operation::Send => {
            side.receive()?;
            side.buffers.extend((0..RUN).filter_map(|_| side.pool.take()));
            let time = timed(|| side.send(|| SendWr::send(&[])))?;
            settle(2 * RUN, || side.poll())?;
            time
        }
        Operation::Receive => {
            let time = timed(|| side.receive())?;
            side.buffers.extend((0..RUN).filter_map(|_| side.pool.take()));
            side.send(|| SendWr::send(&[]))?;
            settle(2 * RUN, || side.poll())?;
            time
        }
        Operation::Poll => {
            side.send(write)?;
            linger(4 * AFTERWARDS);
            timed(|| settle(RUN, || side.poll()))?
        }
    };
    // As many as before.
    side.buffers.truncate(2 * RUN as usize);
    Ok(time)
}

fn run(device: &str, runs: u32) -> Result<(), Failure> {
    let context = Context::open(&Device::by_name(device)?)?;
    let pd = context.alloc_pd()?;
    let gid = context.default_gid(1)?.index;
    let memory = pd.allocate(BYTES)?;
    let remote = memory.remote(0)?;
    let target = (memory, remote);
    let mut raw_side = Raw::new(&context, &pd, gid)?;
    let mut owned_side = Owned::new(&context, &pd, gid)?;
    let operations = [
        ("write", Operation::Write),
        ("send", Operation::Send),
        ("receive", Operation::Receive),
        ("poll", Operation::Poll),
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
        samples.iter().for_each(|sample| println!("{sample}"));
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
            eprintln!("{failure}");
            ExitCode::FAILURE
        }
    }
}
