//! The cost of a request as a future beside the same request of an owned queue, each with and without a
//! thread domain: the same operations of one device, of one library, one after the other.
//! `bench-futures DEVICE RUNS`, in a machine whose clock counts instructions.
//!
//! Both sides write a buffer of a pool and get it back. An owned queue pushes and rings, and its completion is
//! visited; futures are made in their places and each is polled, the driver finds their completions and wakes them, and
//! each is polled once more and dropped. The wakers do nothing: an event loop's part is its own. A list (`post_all`)
//! that is kept and extended is beside a batch of as many requests, an inbox beside a loop that polls and posts new
//! receives in batches, and a future that is dropped after its post beside a completion whose buffer is dropped.

#![deny(clippy::print_stdout, clippy::print_stderr, clippy::disallowed_methods)]

use lab_bench::Failure;
use lab_bench::clock::{counts_instructions, linger};
use lab_bench::path::{AFTERWARDS, BATCH, RUN, SETTLING};
use lab_bench::sample::Sample;
use std::future::Future;
use std::hint::black_box;
use std::pin::Pin;
use std::process::ExitCode;
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};
use uverbs::aio::{self, Driver, Inbox, Locking, Op, OpError, PostAll, Readiness, Transfer};
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

/// The other end, whose sends are not measured.
struct Peer {
    qp: OwnedQueuePair<u64>,
    cq: OwnedCompletionQueue<u64>,
    pool: BufferPool,
}

impl Peer {
    fn new(context: &Context, pd: &ProtectionDomain) -> Result<Self, Failure> {
        let mut cq = OwnedCompletionQueue::new(context.cq_builder(CQE).build()?);
        let qp = pd.qp_builder(cq.queue(), cq.queue(), QpType::RC).max_send_wr(DEPTH).build()?;
        let qp = cq.adopt(qp)?;
        let pool = pd.buffer_pool_builder(BYTES).count(RUN as usize).build()?;
        Ok(Peer { qp, cq, pool })
    }

    /// Sends the messages of a run.
    fn send(&mut self) -> Result<(), Failure> {
        for _ in 0..RUN / BATCH {
            let mut batch = self.qp.send_batch()?;
            for id in 0..BATCH {
                let message = self.pool.take()?;
                batch
                    .push(SendWr::send(&[]), message, id.into())
                    .map_err(|refused| refused.error)?;
            }
            batch.ring()?;
        }
        Ok(())
    }

    /// Takes the completions that are there; the buffers go back to the pool.
    fn complete(&mut self) -> Result<u32, Failure> {
        Ok(self.cq.poll_each(usize::MAX, |sent| drop(sent.into_buffer()))? as u32)
    }
}

/// A pool for the buffers of a run, and as many receives.
fn pool<S: Sharing>(pd: &ProtectionDomain<S>) -> Result<BufferPool, Failure> {
    Ok(pd.buffer_pool_builder(BYTES).count(2 * RUN as usize).build()?)
}

/// Buffers for a run.
fn take(pool: &BufferPool) -> impl Iterator<Item = Buffer> + '_ {
    (0..RUN).filter_map(|_| pool.take().ok())
}

/// One side: posts all of its buffers, and waits until it has them back.
trait Driven {
    fn post(&mut self, to: Remote) -> Result<(), Failure>;

    /// Takes the completions that are there, and returns how many requests are over.
    fn complete(&mut self) -> Result<u32, Failure>;

    /// As `post`, with a doorbell for each [`BATCH`].
    fn post_lists(&mut self, to: Remote) -> Result<(), Failure>;

    /// As `complete`, after `post_lists`.
    fn complete_lists(&mut self) -> Result<u32, Failure>;

    /// As `post`, and nobody waits for the requests.
    fn abandon(&mut self, to: Remote) -> Result<(), Failure>;

    /// As `complete`, after `abandon`: the buffers go back to the pool.
    fn complete_abandoned(&mut self) -> Result<u32, Failure>;

    /// Takes the messages that are there, and posts new receives in place of theirs.
    fn receive(&mut self) -> Result<u32, Failure>;

    /// The queue pair.
    fn control(&self) -> &QpControl;

    /// Posts the first receives, and takes the buffers of a run.
    fn fill(&mut self) -> Result<(), Failure>;

    /// Takes the buffers of a run from the pool.
    fn refill(&mut self);
}

struct Owned<S: Sharing, R> {
    one: OwnedQueuePair<u64, S>,
    cq: OwnedCompletionQueue<u64>,
    pool: BufferPool,
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
    fn new(context: &Context, pd: &ProtectionDomain<S>, ring: R) -> Result<Self, Failure> {
        let mut cq = OwnedCompletionQueue::new(context.cq_builder(CQE).build()?);
        let builder = pd.qp_builder(cq.queue(), cq.queue(), QpType::RC);
        let one = cq.adopt(builder.max_send_wr(DEPTH).max_recv_wr(DEPTH).build()?)?;
        Ok(Owned { one, cq, pool: pool(pd)?, buffers: Vec::with_capacity(RUN as usize), ring })
    }

    /// Posts so many receives with one doorbell.
    fn post_recvs(&mut self, count: u32) -> Result<(), Failure> {
        let mut batch = self.one.recv_batch()?;
        for id in 0..count {
            batch.push(self.pool.take()?, id.into()).map_err(|refused| refused.error)?;
        }
        Ok(batch.ring()?)
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

    #[inline(never)]
    fn post_lists(&mut self, to: Remote) -> Result<(), Failure> {
        while !self.buffers.is_empty() {
            let mut batch = self.one.send_batch()?;
            // From the end, so that no buffers are moved up.
            let rest = self.buffers.len() - BATCH as usize;
            for (buffer, id) in self.buffers.drain(rest..).zip(0..) {
                batch.push(SendWr::write(to, &[]), buffer, id).map_err(|refused| refused.error)?;
            }
            self.ring.ring(batch)?;
        }
        Ok(())
    }

    fn complete_lists(&mut self) -> Result<u32, Failure> {
        self.complete()
    }

    fn abandon(&mut self, to: Remote) -> Result<(), Failure> {
        self.post(to)
    }

    #[inline(never)]
    fn complete_abandoned(&mut self) -> Result<u32, Failure> {
        Ok(self.cq.poll_each(usize::MAX, |request| drop(request.into_buffer()))? as u32)
    }

    #[inline(never)]
    fn receive(&mut self) -> Result<u32, Failure> {
        let mut bytes = 0;
        let found = self.cq.poll_each(BATCH as usize, |request| {
            let length = request.filled();
            if let Ok((message, _)) = request.into_buffer() {
                bytes += message[..length].len();
            }
        })?;
        black_box(bytes);
        self.post_recvs(found as u32)?;
        Ok(found as u32)
    }

    fn control(&self) -> &QpControl {
        &self.one
    }

    fn fill(&mut self) -> Result<(), Failure> {
        self.post_recvs(RUN)?;
        self.refill();
        Ok(())
    }

    fn refill(&mut self) {
        self.buffers.extend(take(&self.pool));
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
    _cq: aio::AsyncCompletionQueue<S>,
    driver: Driver<Silent, S>,
    pool: BufferPool,
    buffers: Vec<Buffer>,
    posted: Vec<Op<Buffer, S>>,
    lists: Vec<PostAll<Buffer, S>>,
    inbox: Option<Inbox<S>>,
}

impl<S: Locking> Futures<S> {
    fn new(
        (cq, driver): (aio::AsyncCompletionQueue<S>, Driver<Silent, S>),
        pd: &ProtectionDomain<S>,
    ) -> Result<Self, Failure> {
        let builder = pd.qp_builder(&cq, &cq, QpType::RC);
        let one = cq.adopt(builder.max_send_wr(DEPTH).max_recv_wr(DEPTH).build()?)?;
        let (buffers, posted) =
            (Vec::with_capacity(RUN as usize), Vec::with_capacity(RUN as usize));
        let lists = (0..RUN / BATCH).map(|_| one.post_all([])).collect();
        Ok(Futures { one, _cq: cq, driver, pool: pool(pd)?, buffers, posted, lists, inbox: None })
    }

    fn poll_driver(&mut self, cx: &mut std::task::Context<'_>) -> Result<(), Failure> {
        match Pin::new(&mut self.driver).poll(cx) {
            Poll::Ready(end) => Err(format!("the driver ended: {end:?}").into()),
            Poll::Pending => Ok(()),
        }
    }
}

fn failed<L>(error: &OpError<L>) -> Failure {
    format!("a request failed: {error}").into()
}

impl<S: Locking> Driven for Futures<S> {
    #[inline(never)]
    fn post(&mut self, to: Remote) -> Result<(), Failure> {
        let mut cx = std::task::Context::from_waker(Waker::noop());
        let Futures { one, posted, buffers, .. } = self;
        posted.extend(buffers.drain(..).map(|buffer| one.write(to, buffer)));
        for write in posted {
            if Pin::new(write).poll(&mut cx).is_ready() {
                return Err("a write was refused".into());
            }
        }
        Ok(())
    }

    #[inline(never)]
    fn complete(&mut self) -> Result<u32, Failure> {
        let mut cx = std::task::Context::from_waker(Waker::noop());
        self.poll_driver(&mut cx)?;
        let Futures { posted, buffers, .. } = self;
        let mut found = 0;
        // Writes of one queue pair are over in the order in which they were posted.
        for write in posted.iter_mut() {
            match Pin::new(write).poll(&mut cx) {
                Poll::Pending => break,
                Poll::Ready(Ok(finished)) => buffers.push(finished.memory),
                Poll::Ready(Err(error)) => return Err(failed(&error)),
            }
            found += 1;
        }
        posted.drain(..found);
        Ok(found as u32)
    }

    #[inline(never)]
    fn post_lists(&mut self, to: Remote) -> Result<(), Failure> {
        let mut cx = std::task::Context::from_waker(Waker::noop());
        let Futures { lists, buffers, .. } = self;
        for list in lists {
            let rest = buffers.len() - BATCH as usize;
            list.extend(buffers.drain(rest..).map(|buffer| (Transfer::Write(to), buffer)));
            if list.poll_next(&mut cx).is_ready() {
                return Err("a list was refused".into());
            }
        }
        Ok(())
    }

    #[inline(never)]
    fn complete_lists(&mut self) -> Result<u32, Failure> {
        let mut cx = std::task::Context::from_waker(Waker::noop());
        self.poll_driver(&mut cx)?;
        let Futures { lists, buffers, .. } = self;
        let before = buffers.len();
        for list in lists.iter_mut() {
            loop {
                match list.poll_next(&mut cx) {
                    Poll::Ready(Some(Ok(finished))) => buffers.push(finished.memory),
                    Poll::Ready(Some(Err(error))) => return Err(failed(&error)),
                    Poll::Ready(None) | Poll::Pending => break,
                }
            }
        }
        Ok((buffers.len() - before) as u32)
    }

    #[inline(never)]
    fn abandon(&mut self, to: Remote) -> Result<(), Failure> {
        self.post(to)?;
        self.posted.clear();
        Ok(())
    }

    #[inline(never)]
    fn complete_abandoned(&mut self) -> Result<u32, Failure> {
        self.poll_driver(&mut std::task::Context::from_waker(Waker::noop()))?;
        // The buffers are back in the pool but for those of the inbox.
        Ok(if self.pool.idle() == RUN as usize { RUN } else { 0 })
    }

    #[inline(never)]
    fn receive(&mut self) -> Result<u32, Failure> {
        let mut cx = std::task::Context::from_waker(Waker::noop());
        self.poll_driver(&mut cx)?;
        let Some(inbox) = &mut self.inbox else { return Err("there is no inbox".into()) };
        let (mut bytes, mut found) = (0, 0);
        while let Poll::Ready(message) = inbox.poll_next(&mut cx) {
            bytes += message.map_err(|error| failed(&error))?.memory.len();
            found += 1;
        }
        black_box(bytes);
        Ok(found)
    }

    fn control(&self) -> &QpControl {
        &self.one
    }

    fn fill(&mut self) -> Result<(), Failure> {
        self.inbox = Some(self.one.inbox(&self.pool, RUN as usize));
        self.refill();
        Ok(())
    }

    fn refill(&mut self) {
        self.buffers.extend(take(&self.pool));
    }
}

/// Waits for the completions of a run.
fn settle(mut complete: impl FnMut() -> Result<u32, Failure>) -> Result<(), Failure> {
    let (start, mut found) = (Instant::now(), 0);
    while found < RUN {
        found += complete()?;
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

/// The operations of a run, in the order of the table.
const OPERATIONS: [&str; 7] = [
    "post a write",
    "completion",
    "both",
    "post a write, 32 at once",
    "completion, 32 at once",
    "write that nobody waits for, both",
    "receive and post the next",
];

/// The cost of each operation in one run.
fn measure(
    side: &mut dyn Driven,
    peer: &mut Peer,
    to: Remote,
) -> Result<[f64; OPERATIONS.len()], Failure> {
    let post = timed(|| side.post(to))?;
    linger(4 * AFTERWARDS);
    let complete = timed(|| settle(|| side.complete()))?;
    let post_lists = timed(|| side.post_lists(to))?;
    linger(4 * AFTERWARDS);
    let complete_lists = timed(|| settle(|| side.complete_lists()))?;
    let abandon = timed(|| side.abandon(to))?;
    linger(4 * AFTERWARDS);
    let abandoned = timed(|| settle(|| side.complete_abandoned()))?;
    side.refill();
    peer.send()?;
    linger(4 * AFTERWARDS);
    let receive = timed(|| settle(|| side.receive()))?;
    settle(|| peer.complete())?;
    let [both, dropped] = [post + complete, abandon + abandoned];
    Ok([post, complete, both, post_lists, complete_lists, dropped, receive])
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
    let mut owned = Owned::new(&context, &pd, ())?;
    let mut futures = Futures::new(shared, &pd)?;
    let mut owned_exclusive = Owned::new(&context, &of_owned, td)?;
    let mut futures_exclusive = Futures::new(worker, &of_futures)?;
    let pairs: [(&str, [&mut dyn Driven; 2]); 2] = [
        ("", [&mut owned, &mut futures]),
        (", thread domain", [&mut owned_exclusive, &mut futures_exclusive]),
    ];
    for (domain, sides) in pairs {
        // By operation, and then by side.
        let mut samples = OPERATIONS.map(|operation| {
            ["owned", "futures"].map(|way| Sample {
                operation: format!("{operation}{domain}"),
                way: way.into(),
                runs: vec![],
            })
        });
        for (side, place) in sides.into_iter().zip(0..) {
            let mut peer = Peer::new(&context, &pd)?;
            connect(side.control(), &peer.qp, gid)?;
            side.fill()?;
            let mut attempts = 0;
            while samples[0][place].runs.len() < runs as usize {
                attempts += 1;
                if attempts > PATIENCE * runs {
                    return Err("the clock does not count instructions".into());
                }
                let found = measure(side, &mut peer, to)?;
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
