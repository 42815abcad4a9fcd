//! A hostile guest: random commands, mailboxes, WQEs, doorbells and registers.
//!
//! The device must not crash, hang or access anything outside of guest memory, which `guest.rs`
//! reports as an error.

use arbitrary::{Arbitrary, Result, Unstructured};
use rustix::time::{ClockId, clock_gettime};
use uverbs_connectx::function::Region;
use uverbs_connectx::recording::{Entry, MemoryFile, Recorder};
use uverbs_uapi::mlx5::prm::mkc::mkc;
use uverbs_uapi::mlx5::prm::opcode::OPCODES;

use crate::corpus::Traits;
use crate::driver::{Driver, MEMORY, Queue};

/// Most seconds of processor time for one input: far more than the device needs, less than a human
/// waits.
const PATIENCE: i64 = 5;

/// Processor time of this thread in seconds. A device that hangs uses it up, also on a busy
/// machine.
fn worked() -> i64 {
    clock_gettime(ClockId::ThreadCPUTime).tv_sec
}

struct Guest {
    driver: Driver,
    queues: Vec<Queue>,
    key: u32,
}

/// A guest with working objects, so that random input gets past the first checks.
fn guest() -> Guest {
    let mut driver = Driver::new();
    driver.set_gid();
    let eqn = driver.eq();
    let (cqn, _) = driver.cq(eqn);
    let mut queues: Vec<Queue> = (0..2).map(|_| driver.qp(0, cqn)).collect();
    let (a, b) = queues.split_at_mut(1);
    driver.connect(&a[0], &b[0]);
    driver.connect(&b[0], &a[0]);
    queues.push(driver.qp(2, cqn));
    let page = driver.alloc_page();
    let rights = [mkc::lr, mkc::lw, mkc::rr, mkc::rw, mkc::a, mkc::umr_en];
    let key = driver.mkey(page, 4096, &rights);
    Guest { driver, queues, key }
}

/// A number that is valid more often than a random one.
fn word(u: &mut Unstructured<'_>, guest: &Guest) -> Result<u32> {
    Ok(match u.int_in_range(0..=9)? {
        0..=3 => 0,
        4 => u.int_in_range(0..=16)?,
        5 => guest.key,
        6 => guest.queues[u.choose_index(guest.queues.len())?].number,
        7 => u.int_in_range(0..=255)? << u.choose(&[12, 16, 24])?,
        8 => u32::MAX,
        _ => u32::arbitrary(u)?,
    })
}

fn words(u: &mut Unstructured<'_>, guest: &Guest, most: usize) -> Result<Vec<u8>> {
    let count = u.int_in_range(0..=most)?;
    let mut bytes = Vec::new();
    for _ in 0..count {
        bytes.extend(word(u, guest)?.to_be_bytes());
    }
    Ok(bytes)
}

fn step(u: &mut Unstructured<'_>, guest: &mut Guest) -> Result<()> {
    match u.int_in_range(0..=11)? {
        11 => {
            // A UMR WQE that is valid except for its numbers.
            let mut segments = vec![*u.choose(&[0x00, 0x80, 0x90, 0xa0, 0xc0])?, 0, 0, 0];
            for _ in 0..2 {
                segments.extend(u.int_in_range(0..=20u16)?.to_be_bytes());
            }
            let mask = u64::arbitrary(u)? & 0x8400_22be_61c3;
            segments.extend(mask.to_be_bytes());
            segments.resize(48, 0);
            segments.extend(words(u, guest, 16)?);
            segments.resize(48 + 64, 0);
            segments.extend(words(u, guest, 60)?);
            segments.truncate(segments.len() / 16 * 16);
            let key = guest.key;
            let peer = guest.queues[1].number;
            let _ = guest.driver.reconnect(&mut guest.queues[0], peer);
            guest.driver.post_send(&mut guest.queues[0], 37, key, &segments);
        }
        10 => {
            // A random slot: lengths, pointers, tokens.
            let mut slot = words(u, guest, 16)?;
            slot.resize(64, 0);
            slot[0] = *u.choose(&[7, 7, 7, 0])?;
            slot[61] = 0;
            slot[63] = 1;
            guest.driver.ring_slot(&slot);
        }
        0..=3 => {
            let (op, _) = *u.choose(OPCODES)?;
            let mut input = words(u, guest, 120)?;
            input.resize(input.len().max(16), 0);
            input[2..4].fill(0);
            let room = u.int_in_range(16..=5000)?;
            input[..2].copy_from_slice(&op.to_be_bytes());
            // A refused command is as good as a successful one.
            let _ = guest.driver.run_raw_command(&input, room);
        }
        4 => {
            let at = u.int_in_range(0..=MEMORY as u64)?;
            let bytes = words(u, guest, 40)?;
            // The address may be past the end of memory.
            let _ = guest.driver.memory().write(at, &bytes);
        }
        5 | 6 => {
            let segments = words(u, guest, 60)?;
            let op = u.choose(&[0, 1, 8, 9, 10, 11, 14, 16, 17, 18, 20, 21, 27, 37, 99])?;
            let immediate = word(u, guest)?;
            let index = u.choose_index(guest.queues.len())?;
            // The first error breaks the connection; reconnect to test the next one.
            if index < 2 && u.ratio(3, 4)? {
                for (queue, peer) in [(0, 1), (1, 0)] {
                    let peer = guest.queues[peer].number;
                    // Another step may have destroyed it.
                    let _ = guest.driver.reconnect(&mut guest.queues[queue], peer);
                }
            }
            let len = segments.len() / 16 * 16;
            guest.driver.post_send(&mut guest.queues[index], *op, immediate, &segments[..len]);
        }
        7 => {
            let segment = Driver::segment(word(u, guest)?, guest.key, word(u, guest)?.into());
            let index = u.choose_index(guest.queues.len())?;
            guest.driver.post_receive(&mut guest.queues[index], &segment);
        }
        8 => {
            let offset = match u.ratio(1, 2)? {
                true => u64::from(guest.driver.uar) * 4096 + u.int_in_range(0..=0xfff)?,
                false => u.int_in_range(0..=(32 << 20) - 256)?,
            };
            let bytes = words(u, guest, 4)?;
            // Keep the address of the command queue, or the device would read no more commands.
            if !(0xc..0x18).contains(&offset) {
                guest.driver.fabric.function(0).write(Region::Bar0, offset, &bytes);
            }
        }
        _ => {
            let mut bytes = [0; 64];
            let offset = u.int_in_range(0..=(32 << 20) - 64)?;
            guest.driver.fabric.function(0).read(Region::Bar0, offset, &mut bytes);
        }
    }
    guest.driver.run();
    Ok(())
}

/// Runs one input to its end. The traits are the device's answers in its recording.
pub(crate) fn run(input: &[u8]) -> Traits {
    let mut guest = guest();
    let file = MemoryFile::default();
    *guest.driver.fabric.function(0).device_mut().recorder_mut() =
        Recorder::new(file.clone(), 0).unwrap();
    let mut u = Unstructured::new(input);
    let start = worked();
    while !u.is_empty() && step(&mut u, &mut guest).is_ok() {
        assert!(worked() - start <= PATIENCE, "the device hangs");
    }
    let mut traits = Traits::new();
    let mut opcode = 0;
    for (_, entry) in file.entries().unwrap() {
        let (kind, first, second) = match &entry {
            Entry::Command { input, .. } => {
                opcode = u32::from(input[0]) << 8 | u32::from(input[1]);
                continue;
            }
            Entry::CommandOutput { delivery, output, .. } if *delivery > 0 || output.is_empty() => {
                (0, u32::from(*delivery), 0)
            }
            // The syndrome tells one refusal from another.
            Entry::CommandOutput { output, .. } => {
                let syndrome = output[4..8].try_into().map_or(0, u32::from_be_bytes);
                (1, opcode, if output[0] == 0 { 0 } else { syndrome })
            }
            Entry::Wqe { service, blue_flame, bytes, .. } => {
                let first = u32::from(*service) << 8 | u32::from(*blue_flame);
                (2, first, u32::from(bytes[3]))
            }
            Entry::ReceiveWqe { bytes, .. } => (3, bytes.len() as u32, 0),
            Entry::Cqe { bytes, .. } => {
                let cqe = &bytes[bytes.len() - 64..];
                let failed = matches!(cqe[63] >> 4, 0xd | 0xe);
                let syndrome = if failed { cqe[55].into() } else { 0 };
                (4, u32::from(cqe[63] >> 4) << 8 | u32::from(cqe[56]), syndrome)
            }
            Entry::Eqe { bytes, .. } => (5, bytes[1].into(), 0),
            Entry::Write { .. } | Entry::DoorbellRecord { .. } | Entry::Reset => continue,
            Entry::Fate { late, .. } => (6, u32::from(late.is_some()), 0),
            Entry::Refusal { why, .. } => (7, *why as u32, 0),
            Entry::Packet { fate, .. } => (8, *fate as u32, 0),
        };
        traits.insert((kind, first, second));
    }
    traits
}
