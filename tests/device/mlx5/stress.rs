//! Many threads that ring at the same time: registers that queue pairs share, and registers of
//! thread domains.
//!
//! The tests check that every request is carried out, once and with its own data. The emulated
//! device checks that no doorbell is torn, early or different from its queue: the lab compares its
//! counts before and after the suite. The lab's `mutants::` remove locks and doorbell records from
//! a copy of the library, and these tests have to make the counts rise.

use crate::env;
use crate::pair::{PATIENCE, gid};
use crate::verdict::{Stop, Verdict, trials};
use std::thread;
use std::time::Instant;
use uverbs::mlx5::query_device;
use uverbs::{
    Access, CompletionChannel, CompletionQueue, Context, Exclusive, MemoryRegion, Notify,
    ObjectKind, PostError, ProtectionDomain, QpType, QueuePair, SendBatch, SendWr, Shared, Sharing,
    ThreadDomain, WcStatus,
};

trials![threads_ring_shared_registers, threads_ring_registers_of_their_own];

/// Threads without a domain; more than there are processors.
const THREADS: usize = 4;
/// Queue pairs of each: enough that all registers of a context are shared, by different threads.
const QUEUES: usize = 16;
/// Threads with a domain: an odd number, so that the two registers of a page are not in step.
const DOMAINS: usize = 3;
/// Queue pairs under each domain.
const QUEUES_OF_DOMAIN: usize = 4;
/// Words that a message may have: with five it takes two WQEBBs.
const WORDS: usize = 5;
/// Registers of a context that belong to one queue pair each, and the smallest number of registers to be shared: the
/// last page may have more.
const REGISTERS: [usize; 2] = [4, 12];

/// Rounds; in each, every queue pair sends.
fn rounds() -> u64 {
    env::rounds(25, 2000)
}

/// The objects of one thread: queue pairs that send to themselves.
pub(crate) struct Worker<S: Sharing> {
    queues: Vec<QueuePair<S>>,
    pub(crate) cq: CompletionQueue,
    _channel: CompletionChannel,
    /// The last words that each queue pair wrote.
    memory: MemoryRegion<u64>,
}

impl<S: Sharing> Worker<S> {
    pub(crate) fn new(
        context: &Context,
        pd: &ProtectionDomain<S>,
        count: usize,
    ) -> Verdict<Worker<S>> {
        let channel = context.create_comp_channel()?;
        let cq = context.cq_builder(4 * count as u32).channel(&channel).build()?;
        let memory = pd.mr_builder().access(Access::ALL_REMOTE).allocate(count * WORDS)?;
        let index = gid(context)?;
        let mut queues = Vec::new();
        for _ in 0..count {
            let qp = pd.qp_builder(&cq, &cq, QpType::RC).max_send_wr(8).max_inline_data(64);
            let qp = qp.build()?;
            let own = qp.endpoint(&index)?;
            env::handshake(&qp, &own)?;
            queues.push(qp);
        }
        Ok(Worker { queues, cq, _channel: channel, memory })
    }

    /// Sends from every queue pair, round after round, and checks that all of it arrives.
    fn work(&mut self, mut ring: impl FnMut(SendBatch<'_, S>) -> Result<(), PostError>) -> Verdict {
        for round in 1..=rounds() {
            for at in 0..self.queues.len() {
                self.send(at, round, &mut ring)?;
            }
            if round % 8 == 0 {
                // Arming rings a doorbell, too.
                self.cq.req_notify(Notify::Next)?;
            }
            self.settle(round)?;
        }
        Ok(())
    }

    /// Posts one request of a queue pair, and does not wait for it.
    fn start(
        &mut self,
        at: usize,
        ring: impl FnOnce(SendBatch<'_, S>) -> Result<(), PostError>,
    ) -> Result<(), PostError> {
        let to = self.memory.remote(at * WORDS * size_of::<u64>()).expect("each has its place");
        let bytes = [at as u8; 32];
        let mut batch = self.queues[at].send_batch()?;
        batch.push(SendWr::write(to, &[]).inline(&bytes).signaled())?;
        ring(batch)
    }

    /// Sends the number of the round: mostly by one request, which is copied into the register,
    /// and sometimes by several, which are announced by one doorbell.
    fn send(
        &mut self,
        at: usize,
        round: u64,
        ring: &mut impl FnMut(SendBatch<'_, S>) -> Result<(), PostError>,
    ) -> Verdict {
        let words = 1 + (round as usize + at) % WORDS;
        let bytes: Vec<u8> = (0..words).flat_map(|_| round.to_ne_bytes()).collect();
        let to = self.memory.remote(at * WORDS * size_of::<u64>())?;
        let id = (at as u64) << 32 | round;
        let wr = SendWr::write(to, &[]).inline(&bytes);
        let mut batch = self.queues[at].send_batch()?;
        if round % 4 == 0 {
            batch.push(wr)?;
        }
        batch.push(wr.id(id).signaled())?;
        Ok(ring(batch)?)
    }

    /// Waits for one completion of each queue pair, and checks the memory that it wrote.
    fn settle(&mut self, round: u64) -> Verdict {
        let mut missing: Vec<bool> = self.queues.iter().map(|_| true).collect();
        let mut left = missing.len();
        let deadline = Instant::now() + PATIENCE;
        while left > 0 {
            let mut completions = self.cq.poll()?;
            while let Some(done) = completions.next() {
                assert_eq!(done.status(), WcStatus::SUCCESS, "{:#x}", done.wr_id());
                let (at, number) = ((done.wr_id() >> 32) as usize, done.wr_id() & 0xffff_ffff);
                assert_eq!(number, round, "a completion of another round, of queue pair {at}");
                assert!(std::mem::take(&mut missing[at]), "queue pair {at} completed twice");
                left -= 1;
            }
            drop(completions);
            if left > 0 && Instant::now() > deadline {
                return Err(Stop::fail(format!("{left} requests of round {round} are lost")));
            }
            thread::yield_now();
        }
        for at in 0..self.queues.len() {
            let words = 1 + (round as usize + at) % WORDS;
            for word in at * WORDS..at * WORDS + words {
                assert_eq!(self.memory.read_at(word), Some(round), "queue pair {at}, word {word}");
            }
        }
        Ok(())
    }
}

/// A thread's queue pairs, rung with the thread's token.
pub(crate) struct Owner {
    worker: Worker<Exclusive>,
    td: ThreadDomain,
}

impl Owner {
    pub(crate) fn new(context: &Context, pd: &ProtectionDomain) -> Verdict<Owner> {
        let td = context.alloc_td()?;
        let domain = pd.parent_domain_builder().thread_domain(&td).build()?;
        Ok(Owner { worker: Worker::new(context, &domain, QUEUES_OF_DOMAIN)?, td })
    }

    #[allow(unsafe_code, reason = "ringing is")]
    fn work(&mut self) -> Verdict {
        let Owner { worker, td } = self;
        // SAFETY: the requests carry their data, and write to memory that the worker drops after
        // its queue pairs and borrows nowhere.
        worker.work(|batch| unsafe { batch.ring(td) }.map_err(PostError::Ring))
    }

    /// Posts one request of the first queue pair.
    #[allow(unsafe_code, reason = "ringing is")]
    pub(crate) fn post(&mut self) -> Result<(), PostError> {
        let Owner { worker, td } = self;
        // SAFETY: as above.
        worker.start(0, |batch| unsafe { batch.ring(td) }.map_err(PostError::Ring))
    }
}

impl Worker<Shared> {
    /// Posts one request of a queue pair.
    #[allow(unsafe_code, reason = "ringing is")]
    pub(crate) fn post(&mut self, at: usize) -> Result<(), PostError> {
        // SAFETY: as above.
        self.start(at, |batch| unsafe { batch.ring() }.map_err(PostError::Ring))
    }
}

#[allow(unsafe_code, reason = "ringing is")]
fn work(worker: &mut Worker<Shared>) -> Verdict {
    // SAFETY: as above.
    worker.work(|batch| unsafe { batch.ring() }.map_err(PostError::Ring))
}

/// Runs all of them at the same time.
fn together(workers: &mut [Worker<Shared>], owners: &mut [Owner]) -> Verdict {
    thread::scope(|scope| {
        let mut threads = Vec::new();
        for worker in workers {
            threads.push(scope.spawn(|| work(worker)));
        }
        for owner in owners {
            threads.push(scope.spawn(|| owner.work()));
        }
        threads.into_iter().try_for_each(|thread| match thread.join() {
            Ok(verdict) => verdict,
            Err(panic) => std::panic::resume_unwind(panic),
        })
    })
}

fn threads_ring_shared_registers() -> Verdict {
    let context = super::open()?;
    let combines = query_device(&context)?.blueflame_bytes() > 0;
    let pages = || context.handles(ObjectKind::MLX5_UAR).map(|handles| handles.len());
    let before = pages()?;
    let pd = context.alloc_pd()?;
    let mut workers = Vec::new();
    for _ in 0..THREADS {
        workers.push(Worker::new(&context, &pd, QUEUES)?);
    }
    let most = REGISTERS.into_iter().map(super::pages_for).sum();
    // The largest number of pages, with fewer registers than queue pairs: so most are shared.
    assert_eq!(pages()? - before, if combines { most } else { 0 });
    together(&mut workers, &mut [])
}

fn threads_ring_registers_of_their_own() -> Verdict {
    let context = super::open()?;
    let pd = context.alloc_pd()?;
    let mut owners = Vec::new();
    for _ in 0..DOMAINS {
        owners.push(Owner::new(&context, &pd)?);
    }
    // Beside a thread without a domain.
    let mut workers = [Worker::new(&context, &pd, QUEUES)?];
    together(&mut workers, &mut owners)
}
