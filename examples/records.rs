//! Registers values of a type of the program's own, and lets a peer write one of them. The region is typed: the program
//! reads and writes fields, the device bytes. Both ends are in this process.

use std::mem::offset_of;
use std::process::ExitCode;
use std::time::{Duration, Instant};
use uverbs::{Access, Context, Handshake, QpType, SendWr};
use zerocopy::{FromBytes, Immutable, IntoBytes};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// A measurement. `repr(C)` fixes the places of its fields, which both ends have to agree on; zerocopy
/// checks that any bytes are a valid value and that there is no padding.
#[derive(Clone, Copy, Debug, Default, PartialEq, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
struct Sample {
    sensor: u32,
    count: u32,
    mean: f64,
    /// Written last: a reader takes it as the sign that the other fields have arrived.
    sequence: u64,
}

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
    let mut sensor = pd.qp_builder(&cq, &cq, QpType::RC).max_send_wr(2).build()?;
    let collector = pd.qp_builder(&cq, &cq, QpType::RC).build()?;
    let gid = context.default_gid(1)?;
    let (here, there) = (sensor.endpoint(&gid)?, collector.endpoint(&gid)?);
    sensor.handshake(&there, &Handshake::new())?;
    collector.handshake(&here, &Handshake::new())?;

    // The collector's table, an element for each sensor, and the one sample that this sensor sends.
    let writable = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
    let table = pd.mr_builder().access(writable).allocate::<Sample>(16)?;
    let mut sample = pd.mr_builder().allocate::<Sample>(1)?;
    let mine = Sample { sensor: 3, count: 128, mean: 21.5, sequence: 1 };
    sample.write_at(0, mine)?;

    // `remote` and `sge` count bytes, as the device does.
    let element = |index: usize| index * size_of::<Sample>();
    let all = [sample.sge(..)?];
    let sequence = offset_of!(Sample, sequence);
    let only_sequence = [sample.sge(sequence..)?];
    let requests = [
        SendWr::write(table.remote(element(3))?, &all),
        // The same number once more, in a request of its own: requests of one queue pair are carried out in
        // their order.
        SendWr::write(table.remote(element(3) + sequence)?, &only_sequence).signaled(),
    ];
    let mut batch = sensor.send_batch()?;
    for request in requests {
        batch.push(request)?;
    }
    // SAFETY: both regions outlive the requests, whose completion is awaited below, and no code borrows
    // their memory.
    unsafe { batch.ring() }?;
    let deadline = Instant::now() + Duration::from_secs(5);
    while Instant::now() < deadline {
        match cq.poll()?.next() {
            Some(completion) => completion.ok()?,
            None => continue,
        };
        let arrived = table.read_at(3).ok_or("the table has 16 elements")?;
        println!("sensor {}: mean {} of {} values", arrived.sensor, arrived.mean, arrived.count);
        return if arrived == mine { Ok(()) } else { Err("another sample arrived".into()) };
    }
    Err("no completion came within 5 s".into())
}
