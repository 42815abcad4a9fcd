//! The cost of a request as a future beside the same request of an owned queue, each with and without a
//! thread domain: the same operations of one device, of one library, one after the other.
//! `bench-futures DEVICE RUNS`, in a machine whose clock counts instructions.
//!
//! Both sides write a buffer of a pool and get it back. An owned queue pushes and rings, and its completion is
//! visited; a future is made and polled, its completion is found by the driver, which wakes it, and it is polled
//! once more. The wakers do nothing: an event loop's part is its own.

#![deny(clippy::print_stdout, clippy::print_stderr, clippy::disallowed_methods)]

use lab_bench::Failure;
use lab_bench::clock::{counts_instructions, linger};
use lab_bench::path::{AFTERWARDS, RUN, SETTLING};
use lab_bench::sample::Sample;
use std::future::Future;
use std::pin::Pin;
use std::process::ExitCode;
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};
use uverbs::aio::{self, Driver, Locking, Op, Readiness};
use uverbs::owned::{Buffer, BufferPool, OwnedCompletionQueue, OwnedQueuePair, OwnedSendBatch};
use uverbs::{
    Access, Context, Device, Exclusive, GidEntry, Handshake, MemoryRegion, ProtectionDomain,
    QpControl, QpType, Remote, RingError, SendWr, Shared, Sharing,
};

/// Bytes of each message.
const BYTES: usize = 64;
/// Requests that each queue holds.
const DEPTH: u32 = 2 * RUN;
/// Completions that the queue of each pair holds.
const CQE: u32 = 4 * DEPTH;
/// Runs that may be thrown away for each that counts.
const PATIENCE: u32 = 10;

fn connect(one: &QpControl, other: &QpControl, gid: GidEntry) -> Result<(), Failure> {
    let (here, there) = (one.endpoint(&gid)?, other.endpoint(&gid)?);
    one.handshake(&there, &Handshake::new())?;
    other.handshake(&here, &Handshake::new())?;
    Ok(())
}

/// Buffers that no request has.
fn buffers<S: Sharing>(pd: &ProtectionDomain<S>) -> Result<(BufferPool, Vec<Buffer>), Failure> {
    let pool = pd.buffer_pool_builder(BYTES).count(RUN as usize).build()?;
    let buffers = (0..RUN).filter_map(|_| pool.take().ok()).collect();
    Ok((pool, buffers))
}

/// One side: posts all of its buffers, and waits until it has them back.
trait Driven {
    fn post(&mut self, to: Remote) -> Result<(), Failure>;

    /// Takes the completions that are there, and returns how many requests are over.
    fn complete(&mut self) -> Result<u32, Failure>;
}

struct Owned<S: Sharing, R> {
    one: OwnedQueuePair<u64, S>,
    _other: OwnedQueuePair<u64, S>,
    cq: OwnedCompletionQueue<u64>,
    buffers: Vec<Buffer>,
    ring: R,
}

/// The right to ring a batch of an owned queue.
trait Rings<S: Sharing> {
    fn ring(&mut self, batch: OwnedSendBatch<'_, u64, S>) -> Result<(), RingError>;
}

impl Rings<Shared> for () {
    #[inline(always)]
    fn ring(&mut self, batch: OwnedSendBatch<'_, u64>) -> Result<(), RingError> {
        batch.ring()
    }
}

impl Rings<Exclusive> for uverbs::ThreadDomain {
    #[inline(always)]
    fn ring(&mut self, batch: OwnedSendBatch<'_, u64, Exclusive>) -> Result<(), RingError> {
        batch.ring(self)
    }
}

impl<S: Sharing, R: Rings<S>> Owned<S, R> {
    fn new(
        context: &Context,
        pd: &ProtectionDomain<S>,
        ring: R,
        gid: GidEntry,
    ) -> Result<Self, Failure> {
        let mut cq = OwnedCompletionQueue::new(context.cq_builder(CQE).build()?);
        let mut qp = || {
            let builder = pd.qp_builder(cq.queue(), cq.queue(), QpType::RC);
            let qp = builder.max_send_wr(DEPTH).max_recv_wr(DEPTH).build()?;
            Ok::<_, Failure>(cq.adopt(qp)?)
        };
        let (one, other) = (qp()?, qp()?);
        connect(&one, &other, gid)?;
        Ok(Owned { one, _other: other, cq, buffers: buffers(pd)?.1, ring })
    }
}

impl<S: Sharing, R: Rings<S>> Driven for Owned<S, R> {
    #[inline(never)]
    fn post(&mut self, to: Remote) -> Result<(), Failure> {
        for (buffer, id) in self.buffers.drain(..).zip(0..) {
            let mut batch = self.one.send_batch()?;
            batch.push(SendWr::write(to, &[]), buffer, id).map_err(|refused| refused.error)?;
            self.ring.ring(batch)?;
        }
        Ok(())
    }

    #[inline(never)]
    fn complete(&mut self) -> Result<u32, Failure> {
        let Owned { cq, buffers, .. } = self;
        let mut failed = None;
        let found = cq.poll_each(usize::MAX, |request| {
            if !request.is_success() {
                failed = Some(request.status());
            }
            if let Ok((buffer, _)) = request.into_buffer() {
                buffers.push(buffer);
            }
        })?;
        match failed {
            Some(status) => Err(format!("a request failed: {status}").into()),
            None => Ok(found as u32),
        }
    }
}

/// An event loop that never hears of the file: the driver is polled when there are completions.
struct Silent;

impl Readiness for Silent {
    fn poll_read(
        &mut self,
        _: &mut std::task::Context<'_>,
        _: &mut dyn FnMut() -> uverbs::Result<()>,
    ) -> Poll<uverbs::Result<()>> {
        Poll::Pending
    }
}

struct Futures<S: Locking> {
    one: aio::AsyncQueuePair<S>,
    _other: aio::AsyncQueuePair<S>,
    _cq: aio::AsyncCompletionQueue<S>,
    driver: Driver<Silent, S>,
    buffers: Vec<Buffer>,
    posted: Vec<Op<Buffer, S>>,
}

impl<S: Locking> Futures<S> {
    fn new(
        (cq, driver): (aio::AsyncCompletionQueue<S>, Driver<Silent, S>),
        pd: &ProtectionDomain<S>,
        gid: GidEntry,
    ) -> Result<Self, Failure> {
        let qp = || {
            let builder = pd.qp_builder(&cq, &cq, QpType::RC);
            Ok::<_, Failure>(cq.adopt(builder.max_send_wr(DEPTH).max_recv_wr(DEPTH).build()?)?)
        };
        let (one, other) = (qp()?, qp()?);
        connect(&one, &other, gid)?;
        let (buffers, posted) = (buffers(pd)?.1, Vec::with_capacity(RUN as usize));
        Ok(Futures { one, _other: other, _cq: cq, driver, buffers, posted })
    }
}

impl<S: Locking> Driven for Futures<S> {
    #[inline(never)]
    fn post(&mut self, to: Remote) -> Result<(), Failure> {
        let mut cx = std::task::Context::from_waker(Waker::noop());
        for buffer in self.buffers.drain(..) {
            self.posted.push(self.one.write(to, buffer));
            let Some(write) = self.posted.last_mut() else { continue };
            if Pin::new(write).poll(&mut cx).is_ready() {
                return Err("a write was refused".into());
            }
        }
        Ok(())
    }

    #[inline(never)]
    fn complete(&mut self) -> Result<u32, Failure> {
        let mut cx = std::task::Context::from_waker(Waker::noop());
        if let Poll::Ready(end) = Pin::new(&mut self.driver).poll(&mut cx) {
            return Err(format!("the driver ended: {end:?}").into());
        }
        let Futures { posted, buffers, .. } = self;
        let (mut found, mut failed) = (0, None);
        // Writes of one queue pair are over in the order in which they were posted.
        for write in posted.iter_mut() {
            match Pin::new(write).poll(&mut cx) {
                Poll::Pending => break,
                Poll::Ready(Ok(finished)) => buffers.push(finished.memory),
                Poll::Ready(Err(error)) => failed = Some(error.kind),
            }
            found += 1;
        }
        posted.drain(..found);
        match failed {
            Some(kind) => Err(format!("a request failed: {kind}").into()),
            None => Ok(found as u32),
        }
    }
}

/// Waits for the completions of a run.
fn settle(side: &mut dyn Driven) -> Result<(), Failure> {
    let (start, mut found) = (Instant::now(), 0);
    while found < RUN {
        found += side.complete()?;
        if start.elapsed() > Duration::from_secs(SETTLING) {
            return Err(format!("{found} of {RUN} requests are over").into());
        }
    }
    Ok(())
}

/// Nanoseconds for each of the run's requests or completions.
fn timed(work: impl FnOnce() -> Result<(), Failure>) -> Result<f64, Failure> {
    let start = Instant::now();
    work()?;
    Ok(start.elapsed().as_nanos() as f64 / f64::from(RUN))
}

/// The cost of each post and each completion in one run.
fn measure(side: &mut dyn Driven, to: Remote) -> Result<[f64; 2], Failure> {
    let post = timed(|| side.post(to))?;
    linger(4 * AFTERWARDS);
    let complete = timed(|| settle(side))?;
    Ok([post, complete])
}

fn run(device: &str, runs: u32) -> Result<(), Failure> {
    let context = Context::open(&Device::by_name(device)?)?;
    let pd = context.alloc_pd()?;
    let gid = context.default_gid(1)?;
    let memory: MemoryRegion<u8> = pd.mr_builder().access(Access::ALL_REMOTE).allocate(BYTES)?;
    let to = memory.remote(0)?;
    let domain = || {
        let td = context.alloc_td()?;
        let domain = pd.parent_domain_builder().thread_domain(&td).build()?;
        Ok::<_, Failure>((domain, td))
    };
    let ((of_owned, td), (of_futures, token)) = (domain()?, domain()?);
    let shared = context.cq_builder(CQE).build_async(|_| Ok(Silent))?;
    let worker = context.cq_builder(CQE).build_worker(token)?.start(|_| Ok(Silent))?;
    let mut owned = Owned::new(&context, &pd, (), gid)?;
    let mut futures = Futures::new(shared, &pd, gid)?;
    let mut owned_exclusive = Owned::new(&context, &of_owned, td, gid)?;
    let mut futures_exclusive = Futures::new(worker, &of_futures, gid)?;
    let pairs: [(&str, [&mut dyn Driven; 2]); 2] = [
        ("", [&mut owned, &mut futures]),
        (", thread domain", [&mut owned_exclusive, &mut futures_exclusive]),
    ];
    for (domain, sides) in pairs {
        // By operation, and then by side.
        let mut samples = ["post a write", "completion"].map(|operation| {
            ["owned", "futures"].map(|way| Sample {
                operation: format!("{operation}{domain}"),
                way: way.into(),
                runs: vec![],
            })
        });
        for (side, place) in sides.into_iter().zip(0..) {
            let mut attempts = 0;
            while samples[0][place].runs.len() < runs as usize {
                attempts += 1;
                if attempts > PATIENCE * runs {
                    return Err("the clock does not count instructions".into());
                }
                let found = measure(side, to)?;
                if counts_instructions() {
                    for (operation, value) in samples.iter_mut().zip(found) {
                        operation[place].runs.push(value);
                    }
                }
            }
        }
        for sample in samples.iter().flatten() {
            lab_bench::say(sample);
        }
    }
    Ok(())
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let ended = match arguments.as_slice() {
        [device, runs] => runs.parse().map_err(Failure::from).and_then(|runs| run(device, runs)),
        _ => Err("bench-futures DEVICE RUNS".into()),
    };
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            lab_bench::complain(failure);
            ExitCode::FAILURE
        }
    }
}
