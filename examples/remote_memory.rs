//! Writes to a peer's memory, adds to a number there, and reads both back: one-sided operations, which the peer's
//! program does not notice. Both ends are in this process, each with a queue pair of its own.

use std::process::ExitCode;
use std::time::{Duration, Instant};
use uverbs::{Access, CompletionQueue, Context, Handshake, QpType, QueuePair, SendWr};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    let context = Context::open_first()?;
    let pd = context.alloc_pd()?;
    let mut cq = context.cq_builder(4).build()?;
    // Declared before the queue pairs, the regions are dropped after them: see `perform`.
    let theirs = pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u64>(8)?;
    let mut ours = pd.mr_builder().allocate::<u64>(8)?;
    for place in 0..8 {
        ours.write_at(place, 100 + place as u64)?;
    }

    let mut requester = pd.qp_builder(&cq, &cq, QpType::RC).build()?;
    let responder = pd.qp_builder(&cq, &cq, QpType::RC).build()?;
    let gid = context.default_gid(1)?;
    let (here, there) = (requester.endpoint(&gid)?, responder.endpoint(&gid)?);
    requester.handshake(&there, &Handshake::new())?;
    responder.handshake(&here, &Handshake::new())?;

    let (whole, first) = ([ours.sge(..)?], [ours.sge(..8)?]);
    // The requester learns the address and the key of memory that it may reach.
    let start = theirs.remote(0)?;
    perform(&mut requester, &mut cq, "write", SendWr::write(start, &whole))?;
    perform(&mut requester, &mut cq, "fetch and add", SendWr::fetch_add(start, 11, &first))?;
    println!("before the addition there was {:?}", ours.read_at(0));

    perform(&mut requester, &mut cq, "read", SendWr::read(start, &whole))?;
    let values: Vec<u64> = (0..8).filter_map(|place| ours.read_at(place)).collect();
    println!("afterwards there is {values:?}");
    Ok(())
}

/// Posts a request and waits for its completion.
fn perform(qp: &mut QueuePair, cq: &mut CompletionQueue, what: &str, wr: SendWr<'_>) -> Result<()> {
    let mut batch = qp.send_batch()?;
    batch.push(wr.signaled())?;
    // SAFETY: `run` declares the region before the queue pair, so it outlives the queue pair, and with
    // it the request, also one that takes too long here. No code borrows its memory.
    unsafe { batch.ring() }?;
    let deadline = Instant::now() + Duration::from_secs(5);
    loop {
        if let Some(completion) = cq.poll()?.next() {
            println!("{what}: {}", completion.status());
            return match completion.is_success() {
                true => Ok(()),
                false => Err(format!("{what} failed").into()),
            };
        }
        if Instant::now() > deadline {
            return Err(format!("{what} took too long").into());
        }
    }
}
