//! A queue pair for each thread under a thread domain of its own, all of their queues in one arena of huge pages:
//! threads that share no lock, no doorbell register and no page of memory, except the arena's. Each thread writes to a
//! peer of its own in the same process.
//!
//! `per_thread [THREADS [WRITES]]`, by default 4 threads of 10,000 writes.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;
use std::{env, thread};
use uverbs::allocator::Arena;
use uverbs::{
    Access, CompletionQueue, Context, Exclusive, Handshake, MemoryRegion, ParentDomain, QpType,
    QueuePair, SendWr, ThreadDomain,
};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// Requests under way at once.
const DEPTH: u32 = 64;
/// One of so many requests is signaled; its completion frees the room of all of them.
const SIGNAL: u64 = 16;
/// Bytes of a write.
const SIZE: usize = 64;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// The objects of one thread. They move to the thread as one value, the token of the thread domain with it.
struct Worker {
    td: ThreadDomain,
    qp: QueuePair<Exclusive>,
    peer: QueuePair<Exclusive>,
    cq: CompletionQueue,
    source: MemoryRegion,
    target: MemoryRegion,
}

impl Worker {
    fn new(context: &Context, arena: &Arc<Arena>, number: u64) -> Result<Worker> {
        let pd = context.alloc_pd()?;
        let td = context.alloc_td()?;
        let domain: ParentDomain<Exclusive> = pd
            .parent_domain_builder()
            .allocator(arena.clone())
            .pd_context(number)
            .thread_domain(&td)
            .build()?;
        let cq = context.cq_builder(DEPTH).parent_domain(&domain).build()?;
        let qp = domain.qp_builder(&cq, &cq, QpType::RC).max_send_wr(DEPTH).build()?;
        let peer = domain.qp_builder(&cq, &cq, QpType::RC).build()?;
        let gid = context.default_gid(1)?;
        let (here, there) = (qp.endpoint(&gid)?, peer.endpoint(&gid)?);
        qp.handshake(&there, &Handshake::new())?;
        peer.handshake(&here, &Handshake::new())?;
        let (mut source, target) = (
            domain.mr_builder().allocate(SIZE)?,
            domain
                .mr_builder()
                .access(Access::LOCAL_WRITE | Access::REMOTE_WRITE)
                .allocate(SIZE)?,
        );
        // Bytes of this thread's own, so that the arrived bytes show their sender.
        source.copy_from(0, &[(number % 255) as u8 + 1; SIZE])?;
        Ok(Worker { td, qp, peer, cq, source, target })
    }

    /// Posts `writes` writes, and waits until all have completed.
    fn run(mut self, writes: u64) -> Result<()> {
        let sges = [self.source.sge(..)?];
        let remote = self.target.remote(0)?;
        let (mut posted, mut done) = (0, 0);
        while done < writes {
            let mut batch = self.qp.send_batch()?;
            while posted < writes && posted - done < u64::from(DEPTH) {
                let last = posted + 1 == writes || (posted + 1) % SIGNAL == 0;
                let request = SendWr::write(remote, &sges).id(posted + 1);
                batch.push(if last { request.signaled() } else { request })?;
                posted += 1;
            }
            // SAFETY: the regions are fields of this worker, which waits for all requests before it drops
            // them, and no code borrows their memory.
            unsafe { batch.ring(&mut self.td) }?;
            let mut completions = self.cq.poll()?;
            while let Some(completion) = completions.next() {
                completion.ok()?;
                done = completion.wr_id();
            }
        }
        drop(self.peer);
        let (mut sent, mut arrived) = ([0; SIZE], [0; SIZE]);
        self.source.copy_to(0, &mut sent)?;
        self.target.copy_to(0, &mut arrived)?;
        if arrived == sent { Ok(()) } else { Err("other bytes arrived".into()) }
    }
}

fn run() -> Result<()> {
    let mut arguments = env::args().skip(1);
    let mut number = |otherwise: u64| arguments.next().map_or(Ok(otherwise), |text| text.parse());
    let (threads, writes) = (number(4)?, number(10_000)?);
    let context = Context::open_first()?;
    let bytes = usize::try_from(threads)? << 16;
    let arena = Arena::huge_pages(bytes).or_else(|error| {
        println!("{error}; ordinary pages are used");
        Arena::new(bytes)
    })?;
    let arena = Arc::new(arena);
    let workers = (0..threads).map(|number| Worker::new(&context, &arena, number));
    let workers = workers.collect::<Result<Vec<Worker>>>()?;
    match arena.buffers() {
        0 => println!("this device's queue memory is the kernel's; the arena was not asked"),
        buffers => println!("{buffers} buffers take {} of {} bytes", arena.used(), arena.len()),
    }
    let start = Instant::now();
    let running: Vec<_> =
        workers.into_iter().map(|worker| thread::spawn(move || worker.run(writes))).collect();
    for thread in running {
        thread.join().map_err(|_| "a thread panicked")??;
    }
    let rate = (threads * writes) as f64 / start.elapsed().as_secs_f64();
    println!("{threads} threads wrote {writes} times each, {rate:.0} writes a second");
    Ok(())
}
