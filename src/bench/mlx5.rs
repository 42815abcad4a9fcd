//! mlx5's queues. The device's end is played by writing completions, and registers are memory.

use crate::completion::Completion;
use crate::memory::doorbell_record::{DoorbellPages, DoorbellRecord, Gate};
use crate::memory::doorbell_register::DoorbellRegister;
use crate::memory::fork::Epoch;
use crate::memory::mapping::Mapping;
use crate::memory::queue_memory::QueueMemory;
use crate::memory::wqe_segment::{SEGMENT, WqeSegments};
use crate::provider::mlx5::cq;
use crate::provider::mlx5::poll_gate::PollGate;
use crate::provider::mlx5::uidx::UidxAllocator;
use crate::provider::mlx5::wr_ids::{Receives, SharedQp};
use crate::provider::mlx5::{rq, sq};
use crate::provider::{CqRing, RecvKind, RecvRing, SendLimits, SendRing};
use crate::wr::{PostError, RecvWr, SendWr};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::io::Errno;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use uverbs_uapi::mlx5::wqe::MLX5_SEND_WQE_BB;

/// Bytes of a register's page, and of each of its two buffers.
const PAGE: usize = 4096;
const BUFFER: usize = 256;
/// Wqebbs of the greatest request.
const BLOCKS: u32 = 4;
/// Bytes of a completion.
const CQE: usize = 64;
const QPN: u32 = 0x42;

fn register(buffer: usize) -> Result<Arc<DoorbellRegister>, Errno> {
    let file = memfd_create("register", MemfdFlags::CLOEXEC)?;
    ftruncate(&file, PAGE as u64)?;
    let mapping = Mapping::of_fd(file.as_fd(), 0, PAGE, Epoch::current()?)?;
    DoorbellRegister::new(Arc::new(mapping), 0, buffer).map(Arc::new).ok_or(Errno::INVAL)
}

fn dbrec() -> Result<Arc<DoorbellRecord>, Errno> {
    DoorbellPages::new()?.alloc().map(Arc::new)
}

/// The gate of a queue that may be used.
fn open(dbrec: &Arc<DoorbellRecord>) -> Result<Gate, Errno> {
    let gate = Gate::beside(dbrec).ok_or(Errno::INVAL)?;
    gate.word().store(1, Ordering::Relaxed);
    Ok(gate)
}

fn record(blocks: u32, receives: Receives) -> Result<Arc<SharedQp>, Errno> {
    let index = UidxAllocator::new().take().ok_or(Errno::NOMEM)?;
    Ok(SharedQp::new(QPN, index, Some(blocks), receives))
}

/// A send queue whose requests are done as soon as they were rung.
#[derive(Debug)]
pub struct Sends {
    ring: SendRing,
    record: Arc<SharedQp>,
}

impl Sends {
    /// A queue of `requests`, a power of two, of up to 200 bytes inline. With `blueflame` single
    /// requests are copied into the register.
    pub fn new(requests: u32, blueflame: bool) -> Result<Sends, Errno> {
        let blocks = requests * BLOCKS;
        let record = record(blocks, Receives::None)?;
        let dbrec = dbrec()?;
        let setup = sq::Setup {
            memory: Arc::new(QueueMemory::pages(blocks as usize * MLX5_SEND_WQE_BB)?),
            offset: 0,
            wqebbs: blocks,
            max_post: requests,
            limits: SendLimits { max_sge: 4, max_inline: 200 },
            qpn: QPN,
            signal_all: false,
            gate: open(&dbrec)?,
            dbrec,
            register: register(if blueflame { BUFFER } else { 0 })?,
            alone: true,
            record: record.clone(),
            frames: sq::Frames { min_header: 0, checksums: false },
        };
        let ring = SendRing::mlx5(sq::SendRing::new(setup).ok_or(Errno::INVAL)?);
        Ok(Sends { ring, record })
    }

    /// Writes what `make` makes, no change of keys, `count` times and rings once; then all of them are done.
    #[inline(always)]
    pub fn post<'a>(&mut self, count: u32, make: impl Fn() -> SendWr<'a>) -> Result<(), PostError> {
        let mut cursor = self.ring.cursor();
        let first = cursor.at;
        for _ in 0..count {
            let wr = make();
            if !(cursor.suits(&wr) && self.ring.try_push(&mut cursor, &wr)) {
                self.ring.push(&mut cursor, &wr)?;
            }
        }
        if !self.ring.try_publish(cursor, count == 1) {
            return Err(PostError::Forked);
        }
        // All of them are as long.
        let each = cursor.at.wrapping_sub(first).checked_div(count).unwrap_or(0);
        self.record.sends.complete(cursor.at.wrapping_sub(each));
        Ok(())
    }
}

/// A receive queue whose requests are done as soon as they were posted.
#[derive(Debug)]
pub struct Recvs {
    ring: RecvRing,
    record: Arc<SharedQp>,
}

impl Recvs {
    /// A queue of `requests`, a power of two, of one entry.
    pub fn new(requests: u32) -> Result<Recvs, Errno> {
        let record = record(1, Receives::Own(requests))?;
        let memory = Arc::new(QueueMemory::pages(requests as usize * SEGMENT)?);
        let unit = SEGMENT as u32;
        let (dbrec, record) = (dbrec()?, record);
        let gate = open(&dbrec)?;
        let place = rq::Place { offset: 0, entries: requests, stride: unit, max_sge: 1 };
        let ring = rq::RecvRing::new(memory, place, dbrec, record.clone(), gate);
        Ok(Recvs { ring: RecvRing::mlx5(ring.ok_or(Errno::INVAL)?), record })
    }

    /// Posts what `make` makes `count` times at once; then all of them are done.
    #[inline(always)]
    pub fn post<'a>(&mut self, count: u32, make: impl Fn() -> RecvWr<'a>) -> Result<(), PostError> {
        let mut cursor = self.ring.cursor();
        for _ in 0..count {
            let recv = make();
            if !self.ring.try_push(RecvKind::Own, &mut cursor, &recv) {
                self.ring.push(&mut cursor, &recv)?;
            }
        }
        self.ring.publish(RecvKind::Own, cursor, count);
        for at in 0..count {
            self.record.receives.own.complete(at);
        }
        Ok(())
    }
}

/// A completion queue that is filled when told.
#[derive(Debug)]
pub struct Completed {
    ring: CqRing,
    epoch: Epoch,
    device: WqeSegments,
    record: Arc<SharedQp>,
    slots: u32,
    producer: u32,
}

impl Completed {
    /// A queue of `slots`, a power of two.
    pub fn new(slots: u32) -> Result<Completed, Errno> {
        let memory = Arc::new(QueueMemory::pages(slots as usize * CQE)?);
        let elements = cq::prepare(&memory, slots, CQE).ok_or(Errno::INVAL)?;
        let units = slots * (CQE / SEGMENT) as u32;
        let device = WqeSegments::new(memory, 0, units).ok_or(Errno::INVAL)?;
        let record = record(slots, Receives::None)?;
        let dbrec = dbrec()?;
        let gate = Gate::beside(&dbrec).ok_or(Errno::INVAL)?;
        let ring =
            CqRing::mlx5(cq::CqRing::new(elements, dbrec, PollGate::new(gate), &register(0)?, 1));
        ring.members().attach(&crate::provider::Member::Mlx5(record.clone()));
        let epoch = Epoch::current()?;
        Ok(Completed { ring, epoch, device, record, slots, producer: 0 })
    }

    /// Adds `count` completions of sends; the queue must have room.
    pub fn fill(&mut self, count: u32) -> Result<(), Errno> {
        for _ in 0..count {
            let mut core = [0; CQE];
            core[32..36].copy_from_slice(&self.record.index().number().to_be_bytes());
            core[60..62].copy_from_slice(&(self.producer as u16).to_be_bytes());
            core[63] = ((self.producer / self.slots) & 1) as u8;
            self.device.copy(self.producer.wrapping_mul((CQE / SEGMENT) as u32), 0, &core);
            self.producer = self.producer.wrapping_add(1);
        }
        Ok(())
    }

    /// Reads at most `most` completions, gives each to `read`, and hands their places back.
    #[inline]
    pub fn poll(&mut self, most: u32, mut read: impl FnMut(Completion<'_>)) {
        if !self.ring.is_quiet() && !self.ring.listen(&self.epoch) {
            return;
        }
        let mut found = false;
        for _ in 0..most {
            let Some(wc) = self.ring.next(!found) else { break };
            read(Completion::new(wc));
            found = true;
        }
        if found {
            self.ring.release();
        }
    }
}
