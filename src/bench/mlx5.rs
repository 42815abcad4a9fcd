//! mlx5's queues. The device's end is played by writing completions, and registers are memory.

use crate::completion::Completion;
use crate::identity::Identity;
use crate::memory::doorbell_record::{DoorbellPages, DoorbellRecord};
use crate::memory::doorbell_register::DoorbellRegister;
use crate::memory::gate::Gate;
use crate::memory::mapping::Mapping;
use crate::memory::queue_memory::QueueMemory;
use crate::memory::wqe_segment::{SEGMENT, WqeSegments};
use crate::number::Qpn;
use crate::provider::mlx5::context::RawPacketLimits;
use crate::provider::mlx5::uidx::UidxAllocator;
use crate::provider::mlx5::wr_ids::{Receives, SharedQp};
use crate::provider::mlx5::{cq, rq, sq};
use crate::provider::poll_gate::{PollGate, QUIET};
use crate::provider::{ProviderWc, SendLimits};
use crate::qp::state::QpType;
use crate::sync::fork::Epoch;
use crate::wr::{PostError, QpTransport, RecvWr, SendOps, SendWr};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::io::Errno;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use uverbs_uapi::mlx5::wqe::MLX5_SEND_WQE_BB;

/// Bytes of a register's page, and of each of its two buffers.
const PAGE: usize = 4096;
const BUFFER: usize = 256;
/// WQEBBs of the largest request.
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

const TRANSPORT: QpTransport =
    QpTransport { qp_type: QpType::RC, qpn: Qpn(QPN), domain: Identity::NONE };

fn dbrec() -> Result<Arc<DoorbellRecord>, Errno> {
    DoorbellPages::new()?.alloc().map(Arc::new)
}

/// The gate of a queue that may be used.
fn open(dbrec: &Arc<DoorbellRecord>) -> Result<Gate, Errno> {
    let gate = Gate::beside(dbrec).ok_or(Errno::INVAL)?;
    gate.level().store(1, Ordering::Relaxed);
    Ok(gate)
}

fn record(wqebbs: u32, receives: Receives) -> Result<Arc<SharedQp>, Errno> {
    let uidx = UidxAllocator::new().take().ok_or(Errno::NOMEM)?;
    Ok(SharedQp::new(QPN, uidx, Some(wqebbs), receives))
}

/// A send queue whose requests are done as soon as they were rung.
#[derive(Debug)]
pub(super) struct Sends {
    ring: sq::Mlx5Sq,
    record: Arc<SharedQp>,
}

impl Sends {
    /// A queue of `requests`, a power of two, of up to 200 bytes inline. With `blueflame` single
    /// requests are copied into the register.
    pub(super) fn new(requests: u32, blueflame: bool) -> Result<Sends, Errno> {
        let wqebbs = requests * BLOCKS;
        let record = record(wqebbs, Receives::None)?;
        let dbrec = dbrec()?;
        let setup = sq::Setup {
            memory: Arc::new(QueueMemory::pages(wqebbs as usize * MLX5_SEND_WQE_BB)?),
            offset: 0,
            wqebbs,
            max_post: requests,
            limits: SendLimits { max_sge: 4, max_inline: 200 },
            unchecked: SendOps::unchecked(TRANSPORT.qp_type),
            transport: TRANSPORT,
            signal_all: false,
            gate: open(&dbrec)?,
            ring_gate: open(&dbrec)?,
            dbrec,
            register: register(if blueflame { BUFFER } else { 0 })?,
            owns_register: true,
            shared: record.clone(),
            raw_packet: RawPacketLimits { min_header: 0, checksums: false },
        };
        let ring = sq::Mlx5Sq::new(setup).ok_or(Errno::INVAL)?;
        Ok(Sends { ring, record })
    }

    /// Writes the request that `make` returns, which changes no key, `count` times and rings once. Then all
    /// of them are done.
    #[inline(always)]
    pub(super) fn post<'a>(
        &mut self,
        count: u32,
        make: impl Fn() -> SendWr<'a>,
    ) -> Result<(), PostError> {
        let mut cursor = self.ring.begin();
        let first = cursor.at;
        for _ in 0..count {
            self.ring.push(&mut cursor, &make())?;
        }
        self.ring.ring(&cursor, count == 1).map_err(PostError::from)?;
        // All of them have the same length.
        let each = cursor.at.wrapping_sub(first).checked_div(count).unwrap_or(0);
        self.record.sends.complete(cursor.at.wrapping_sub(each));
        Ok(())
    }
}

/// A receive queue whose requests are done as soon as they were posted.
#[derive(Debug)]
pub(super) struct Recvs {
    ring: rq::Mlx5Rq,
    record: Arc<SharedQp>,
}

impl Recvs {
    /// A queue of `requests`, a power of two, of one entry.
    pub(super) fn new(requests: u32) -> Result<Recvs, Errno> {
        let record = record(1, Receives::Own(requests))?;
        let memory = Arc::new(QueueMemory::pages(requests as usize * SEGMENT)?);
        let segment = SEGMENT as u32;
        let (dbrec, record) = (dbrec()?, record);
        let gate = open(&dbrec)?;
        let place = rq::RqLayout {
            offset: 0,
            entries: requests,
            max_post: requests,
            stride: segment,
            max_sge: 1,
        };
        let ring = rq::Mlx5Rq::new(memory, place, dbrec, record.clone(), gate);
        Ok(Recvs { ring: ring.ok_or(Errno::INVAL)?, record })
    }

    /// Posts the request that `make` returns `count` times at once. Then all of them are done.
    #[inline(always)]
    pub(super) fn post<'a>(
        &mut self,
        count: u32,
        make: impl Fn() -> RecvWr<'a>,
    ) -> Result<(), PostError> {
        let mut cursor = self.ring.begin();
        for _ in 0..count {
            self.ring.push(&mut cursor, &make())?;
        }
        self.ring.ring(cursor).unwrap();
        for at in 0..count {
            self.record.receives.own.complete(at);
        }
        Ok(())
    }
}

/// A completion queue that [`fill`](Self::fill) fills.
#[derive(Debug)]
pub(super) struct Completed {
    ring: cq::Mlx5Cq,
    device: WqeSegments,
    record: Arc<SharedQp>,
    slots: u32,
    producer: u32,
}

impl Completed {
    /// A queue of `slots`, a power of two.
    pub(super) fn new(slots: u32) -> Result<Completed, Errno> {
        let memory = Arc::new(QueueMemory::pages(slots as usize * CQE)?);
        let cqes = cq::prepare(&memory, slots, CQE).ok_or(Errno::INVAL)?;
        let segments = slots * (CQE / SEGMENT) as u32;
        let device = WqeSegments::new(memory, 0, segments).ok_or(Errno::INVAL)?;
        let record = record(slots, Receives::None)?;
        let dbrec = dbrec()?;
        let gate = Gate::beside(&dbrec).ok_or(Errno::INVAL)?;
        let ring = cq::Mlx5Cq::new(cqes, dbrec, PollGate::new(gate), &register(0)?, 1);
        ring.registry().attach(&record);
        Ok(Completed { ring, device, record, slots, producer: 0 })
    }

    /// Adds `count` completions of sends; the queue must have room.
    pub(super) fn fill(&mut self, count: u32) -> Result<(), Errno> {
        for _ in 0..count {
            let mut core = [0; CQE];
            core[32..36].copy_from_slice(&self.record.uidx().get().to_be_bytes());
            core[60..62].copy_from_slice(&(self.producer as u16).to_be_bytes());
            core[63] = ((self.producer / self.slots) & 1) as u8;
            self.device.copy(self.producer.wrapping_mul((CQE / SEGMENT) as u32), 0, &core);
            self.producer = self.producer.wrapping_add(1);
        }
        Ok(())
    }

    /// Reads at most `most` completions, gives each to `read`, and hands their places back.
    #[inline]
    pub(super) fn poll(&mut self, most: u32, mut read: impl FnMut(Completion<'_>)) {
        if !self.ring.poll_gate().gate().is_at(QUIET) {
            self.ring.catch_up();
        }
        let mut found = false;
        for _ in 0..most {
            let Some(wc) = self.ring.next() else { break };
            read(Completion::new(ProviderWc::Mlx5(wc)));
            found = true;
        }
        if found {
            self.ring.release();
        }
    }
}
