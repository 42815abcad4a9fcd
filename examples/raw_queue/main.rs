//! Queues that a thread drives by itself: it writes WQEs, rings, and reads completions, and knows only their addresses and
//! numbers. Without arguments the queues are made by verbs and taken as raw ones; with `devx` by commands to firmware
//! alone. Both ends are in this process; the device must be a ConnectX.

mod devx;
mod engine;

use engine::{Bytes, Completions, Sends};
use std::process::ExitCode;
use uverbs::mlx5::{CqLayout, QpIndices, QpLayout, RawCompletionQueue, RawQueuePair};
use uverbs::{Access, Context, Handshake, MemoryRegion, QpType};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Writes, each of a number of eight bytes.
const WRITES: u64 = 1000;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let ended = match &arguments[..] {
        [] => verbs(),
        [devx] if devx == "devx" => devx::run(),
        _ => Err("raw_queue takes no arguments but `devx`".into()),
    };
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn verbs() -> Result<()> {
    let context = Context::open_first()?;
    let pd = context.alloc_pd()?;
    let cq = context.cq_builder(63).build()?;
    // Declared before the queue pairs, the regions are dropped after them.
    let mut from = pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u64>(1)?;
    let to = pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u64>(1)?;
    let requester = pd.qp_builder(&cq, &cq, QpType::RC).build()?;
    let responder = pd.qp_builder(&cq, &cq, QpType::RC).build()?;
    let gid = context.default_gid(1)?;
    let (here, there) = (requester.endpoint(&gid)?, responder.endpoint(&gid)?);
    requester.handshake(&there, &Handshake::new())?;
    responder.handshake(&here, &Handshake::new())?;

    // From here on the library can neither post nor poll.
    let (qp, cq) = (RawQueuePair::take(requester)?, RawCompletionQueue::take(cq)?);
    let QpLayout { qpn, sq, dbrec, register, posted, .. } = qp.layout();
    let wqebbs = sq.wqe_count as u16;
    let sends = Sends { qpn, buf: sq.buf, wqebbs, dbrec, reg: register.reg, posted: posted.wqebbs };
    let CqLayout { buf, cqe_count, dbrec, consumer, .. } = cq.layout();
    let completions = Completions { buf, count: cqe_count, dbrec, consumed: consumer };
    let (sends, completions) = drive(sends, completions, &mut from, &to)?;

    // The library goes on where the engine stopped.
    let indices = QpIndices { wqebbs: sends.posted, receives: 0 };
    // SAFETY: the engine has ended, each WQE has completed, and its completion was consumed.
    let qp = unsafe { qp.give_back(indices)? };
    // SAFETY: as above.
    let cq = unsafe { cq.give_back(completions.consumed)? };
    println!("given back in state {}", qp.state());
    drop((qp, responder, cq));
    Ok(())
}

/// Has a thread write numbers, one after the other, and compares each with what has arrived.
fn drive(
    mut sends: Sends,
    mut completions: Completions,
    from: &mut MemoryRegion<u64>,
    to: &MemoryRegion<u64>,
) -> Result<(Sends, Completions)> {
    let (sge, remote) = (from.sge(..)?, to.remote(0)?);
    let local = Bytes { addr: sge.addr, key: sge.lkey.0, len: sge.length };
    let target = Bytes { addr: remote.addr, key: remote.rkey.0, len: sge.length };
    std::thread::scope(|scope| {
        let (work, works) = std::sync::mpsc::channel::<()>();
        let (done, dones) = std::sync::mpsc::channel();
        let engine = scope.spawn(move || {
            for () in works {
                sends.write(local, target);
                if done.send(completions.wait()).is_err() {
                    break;
                }
            }
            (sends, completions)
        });
        for number in 1..=WRITES {
            from.write_at(0, number)?;
            work.send(())?;
            dones.recv()??;
            if to.read_at(0) != Some(number) {
                return Err(format!("{number} did not arrive").into());
            }
        }
        println!("the engine wrote {WRITES} numbers");
        drop(work);
        engine.join().map_err(|_| "the engine panicked".into())
    })
}
