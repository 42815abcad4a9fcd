//! A runtime for each core: a worker with a thread domain, a completion queue, its driver and connections of its own,
//! whose futures take no mutex. The main thread makes all objects of a worker, which move to the worker's thread as one
//! value. Each worker serves a client that it runs itself.
//!
//! `per_core [WORKERS [MESSAGES]]`, by default a worker for each core and 2,000 messages each.

use std::process::ExitCode;
use std::time::Instant;
use std::{env, thread};
use tokio::runtime::Builder;
use tokio::task::{LocalSet, spawn_local};
use uverbs::aio::{self, Worker};
use uverbs::owned::BufferPool;
use uverbs::{Context, Exclusive, Handshake, ParentDomain, QpType, QueuePair};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// Receives posted ahead, and sends under way, of each queue pair.
const DEPTH: u32 = 16;
/// Bytes of a buffer.
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

/// The objects of one core, on its way to the core's thread.
struct Core {
    worker: Worker,
    domain: ParentDomain<Exclusive>,
    client: QueuePair<Exclusive>,
    server: QueuePair<Exclusive>,
}

impl Core {
    fn new(context: &Context, number: u32) -> Result<Core> {
        let (pd, td) = (context.alloc_pd()?, context.alloc_td()?);
        let domain = pd.parent_domain_builder().thread_domain(&td).build()?;
        // Different cores use different completion vectors, as far as there are enough.
        let vector = number % context.completion_vectors().max(1);
        let worker = context.cq_builder(4 * DEPTH).vector(vector).build_worker(td)?;
        let qp = || {
            let builder = domain.qp_builder(worker.queue(), worker.queue(), QpType::RC);
            builder.max_send_wr(DEPTH).max_recv_wr(DEPTH).build()
        };
        let (client, server) = (qp()?, qp()?);
        Ok(Core { worker, domain, client, server })
    }

    /// Runs on the core's own thread until all messages are answered.
    fn run(self, messages: u64) -> Result<()> {
        let runtime = Builder::new_current_thread().enable_io().build()?;
        LocalSet::new().block_on(&runtime, async {
            let Core { worker, domain, client, server } = self;
            let (cq, _driver) = worker.spawn_local()?;
            let (client, server) = (cq.adopt(client)?, cq.adopt(server)?);
            let gid = client.context().default_gid(1)?;
            let (here, there) = (client.endpoint(&gid)?, server.endpoint(&gid)?);
            client.handshake(&there, &Handshake::new())?;
            server.handshake(&here, &Handshake::new())?;
            let pool = domain.buffer_pool_builder(SIZE).count(4 * DEPTH as usize).build()?;
            let serving = spawn_local(serve(server, pool.clone(), messages));
            ask(&client, &pool, messages).await?;
            serving.await?
        })
    }
}

/// Sends each message back.
async fn serve(
    server: aio::AsyncQueuePair<Exclusive>,
    pool: BufferPool,
    messages: u64,
) -> Result<()> {
    let mut inbox = server.inbox(&pool, DEPTH as usize / 2);
    for _ in 0..messages {
        let message = inbox.next().await?;
        server.send(message.memory).await?;
    }
    Ok(())
}

/// Sends messages, and compares the answers.
async fn ask(
    client: &aio::AsyncQueuePair<Exclusive>,
    pool: &BufferPool,
    messages: u64,
) -> Result<()> {
    let mut inbox = client.inbox(pool, DEPTH as usize / 2);
    // The receives are posted before the first answer may come.
    inbox.fill();
    for number in 0..messages {
        client.send(pool.copy(&number.to_ne_bytes())?).await?;
        let answer = inbox.next().await?;
        if answer.memory[..] != number.to_ne_bytes() {
            return Err(format!("the answer to message {number} is another's").into());
        }
    }
    Ok(())
}

fn run() -> Result<()> {
    let mut arguments = env::args().skip(1);
    let cores = thread::available_parallelism().map_or(1, |cores| cores.get() as u64);
    let mut number = |otherwise: u64| arguments.next().map_or(Ok(otherwise), |text| text.parse());
    let (workers, messages) = (number(cores)?, number(2_000)?);
    let context = Context::open_first()?;
    let cores = (0..u32::try_from(workers)?).map(|number| Core::new(&context, number));
    let cores = cores.collect::<Result<Vec<Core>>>()?;
    let start = Instant::now();
    let running: Vec<_> =
        cores.into_iter().map(|core| thread::spawn(move || core.run(messages))).collect();
    for thread in running {
        thread.join().map_err(|_| "a worker panicked")??;
    }
    let rate = (workers * messages) as f64 / start.elapsed().as_secs_f64();
    println!("{workers} workers had {messages} messages answered each, {rate:.0} a second");
    Ok(())
}
