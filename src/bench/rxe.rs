//! rxe's queues. The kernel's end is played by writing an index to the file that a queue is mapped
//! from.

use crate::completion::Completion;
use crate::identity::Identity;
use crate::memory::doorbell_record::DoorbellPages;
use crate::memory::gate::Gate;
use crate::memory::mapping::{Mapper, Mapping};
use crate::number::Qpn;
use crate::provider::ProviderWc;
use crate::provider::poll_gate::PollGate;
use crate::provider::{SendLimits, rxe};
use crate::qp::state::QpType;
use crate::sync::fork::Epoch;
use crate::wr::{PostError, QpTransport, RecvWr, SendWr};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::io::{Errno, pwrite};
use std::mem::offset_of;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;
use uverbs_uapi::rxe::{mminfo, rxe_queue_buf, rxe_recv_wqe, rxe_send_wqe, rxe_sge};
use uverbs_uapi::wc::ib_uverbs_wc;
use zerocopy::IntoBytes;

/// The file that a queue is mapped from.
struct Memory {
    file: OwnedFd,
    mi: mminfo,
}

impl Memory {
    /// A queue of `slots`, a power of two, with elements of at least `element` bytes.
    fn new(slots: u32, element: usize) -> Result<Memory, Errno> {
        let stride = element.next_power_of_two() as u32;
        let header = rxe_queue_buf {
            log2_elem_size: stride.trailing_zeros(),
            index_mask: slots - 1,
            ..Default::default()
        };
        let size = size_of::<rxe_queue_buf>() as u32 + slots * stride;
        let file = memfd_create("queue", MemfdFlags::CLOEXEC)?;
        ftruncate(&file, size.into())?;
        pwrite(&file, header.as_bytes(), 0)?;
        Ok(Memory { file, mi: mminfo { offset: 0, size, ..Default::default() } })
    }
}

impl Mapper for Memory {
    fn map(&self, offset: u64, length: usize) -> Result<Mapping, Errno> {
        Mapping::of_fd(self.file.as_fd(), offset, length, Epoch::current()?)
    }

    fn map_read_only(&self, offset: u64, length: usize) -> Result<Mapping, Errno> {
        self.map(offset, length)
    }
}

fn gate() -> Result<Gate, Errno> {
    let gate = Gate::alone(&DoorbellPages::new()?)?;
    gate.level().store(1, Ordering::Relaxed);
    Ok(gate)
}

/// A send queue that nobody empties.
#[derive(Debug)]
pub(super) struct Sends(rxe::sq::RxeSq);

impl Sends {
    /// A queue of `slots`, a power of two, for requests of one entry or 64 bytes inline.
    pub(super) fn new(slots: u32) -> Result<Sends, Errno> {
        let limits = SendLimits { max_sge: 1, max_inline: 64 };
        let transport = QpTransport { qp_type: QpType::RC, qpn: Qpn(7), domain: Identity::NONE };
        let memory = Memory::new(slots, size_of::<rxe_send_wqe>() + 64)?;
        Ok(Sends(rxe::sq::RxeSq::map(memory.mi, limits, transport, gate()?, &memory)?))
    }

    /// Writes a request `count` times into the same free slots as the last time.
    pub(super) fn write(&mut self, wr: &SendWr<'_>, count: u32) -> Result<(), PostError> {
        let mut cursor = self.0.begin();
        (0..count).try_for_each(|_| self.0.push(&mut cursor, wr))
    }
}

/// A receive queue that nobody empties.
#[derive(Debug)]
pub(super) struct Recvs(rxe::rq::RxeRq);

impl Recvs {
    /// A queue of `slots`, a power of two, for requests of one entry.
    pub(super) fn new(slots: u32) -> Result<Recvs, Errno> {
        let memory = Memory::new(slots, size_of::<rxe_recv_wqe>() + size_of::<rxe_sge>())?;
        Ok(Recvs(rxe::rq::RxeRq::map(memory.mi, 1, gate()?, &memory)?))
    }

    /// Writes a request `count` times into the same free slots as the last time.
    pub(super) fn write(&mut self, recv: &RecvWr<'_>, count: u32) -> Result<(), PostError> {
        let mut cursor = self.0.begin();
        (0..count).try_for_each(|_| self.0.push(&mut cursor, recv))
    }
}

/// A completion queue that [`fill`](Self::fill) fills.
#[derive(Debug)]
pub(super) struct Completed {
    file: OwnedFd,
    ring: rxe::cq::RxeCq,
    mask: u32,
    producer: u32,
}

impl Completed {
    /// A queue of `slots`, a power of two.
    pub(super) fn new(slots: u32) -> Result<Completed, Errno> {
        let memory = Memory::new(slots, size_of::<ib_uverbs_wc>())?;
        let ring = rxe::cq::RxeCq::map(memory.mi, PollGate::new(gate()?), &memory)?;
        Ok(Completed { file: memory.file, ring, mask: slots - 1, producer: 0 })
    }

    /// Adds `count` completions; the queue must have room.
    pub(super) fn fill(&mut self, count: u32) -> Result<(), Errno> {
        self.producer = self.producer.wrapping_add(count) & self.mask;
        let place = offset_of!(rxe_queue_buf, producer_index) as u64;
        pwrite(&self.file, self.producer.as_bytes(), place).map(drop)
    }

    /// Reads all completions, gives each to `read`, and hands their places back.
    pub(super) fn drain(&mut self, mut read: impl FnMut(Completion<'_>)) {
        while let Some(wc) = self.ring.next() {
            read(Completion::new(ProviderWc::Rxe(wc)));
        }
        self.ring.release();
    }
}
