//! mlx5's queues on plain memory, without kernel or device, in milliseconds.

mod limits;
mod model;
mod order;
mod packets;
mod placement;
mod polling;
mod posting;
mod size;
mod vectors;

use super::context::RawPacketLimits;
use super::cq::{self, Mlx5Cq};
use super::cqe::Mlx5Wc;
use super::fake_device::{FakeCq, cqe};
use super::rq::{self, Mlx5Rq};
use super::sq::{Mlx5Sq, Setup};
use super::srq::{self, Mlx5Srq};
use super::uidx::UidxAllocator;
use super::wr_ids::{Receives, SharedQp};
use crate::identity::Identity;
use crate::memory::doorbell_record::{DoorbellPages, DoorbellRecord};
use crate::memory::doorbell_register::DoorbellRegister;
use crate::memory::fake_mapping::FakeMapping;
use crate::memory::gate::Gate;
use crate::memory::queue_memory::QueueMemory;
use crate::memory::wqe_segment::{SEGMENT, WqeSegments};
use crate::number::{Lkey, Qpn};
use crate::provider::poll_gate::PollGate;
use crate::provider::{RecvCursor, SendCursor, SendLimits};
use crate::qp::state::QpType;
use crate::sync::fork::Epoch;
use crate::wr::{PostError, QpTransport, RecvWr, SendOp, SendOps, SendWr, Sge};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use zerocopy::IntoBytes;

/// Bytes of each of a register's two buffers, as a ConnectX-5 has them.
const BUFFER: usize = 256;
const QPN: u32 = 0x42;
const CQN: u32 = 0x40d;

/// A register in memory that the test can read.
struct FakeRegister {
    file: FakeMapping,
    register: Arc<DoorbellRegister>,
}

impl FakeRegister {
    fn new(buffer: usize) -> FakeRegister {
        let file = FakeMapping::new("register", 4096);
        let mapping = file.map(4096, Epoch::current().unwrap()).unwrap();
        let register = Arc::new(DoorbellRegister::new(Arc::new(mapping), 0, buffer).unwrap());
        FakeRegister { file, register }
    }

    fn bytes(&self, offset: usize, length: usize) -> Vec<u8> {
        self.file.read(offset as u64, length)
    }
}

fn dbrec() -> Arc<DoorbellRecord> {
    Arc::new(DoorbellPages::new().unwrap().alloc().unwrap())
}

/// The gate of a queue that may be used.
fn open(dbrec: &Arc<DoorbellRecord>) -> Gate {
    let gate = Gate::beside(dbrec).unwrap();
    gate.level().store(1, Ordering::Relaxed);
    gate
}

/// A send queue, the device's view of it, and the register that it rings.
struct Sender {
    ring: Mlx5Sq,
    device: WqeSegments,
    dbrec: Arc<DoorbellRecord>,
    page: FakeRegister,
    qp: Arc<SharedQp>,
}

/// The attributes of a send queue that tests vary.
#[derive(Clone, Copy)]
struct Shape {
    qpn: u32,
    wqebbs: u32,
    max_post: u32,
    buffer: usize,
    owns_register: bool,
    signal_all: bool,
    raw_packet: RawPacketLimits,
}

impl Default for Shape {
    fn default() -> Shape {
        Shape {
            qpn: QPN,
            wqebbs: 64,
            max_post: 4,
            buffer: BUFFER,
            owns_register: false,
            signal_all: false,
            raw_packet: RawPacketLimits { min_header: 0, checksums: true },
        }
    }
}

impl Sender {
    fn new(shape: Shape) -> Sender {
        let memory = Arc::new(QueueMemory::pages(shape.wqebbs as usize * 64).unwrap());
        let device = WqeSegments::new(memory.clone(), 0, shape.wqebbs * 4).unwrap();
        // Stale bytes in the ring must not matter.
        for segment in 0..shape.wqebbs * 4 {
            device.write(segment, [0xa5a5_a5a5_a5a5_a5a5; 2]);
        }
        let (dbrec, page) = (dbrec(), FakeRegister::new(shape.buffer));
        let uidx = UidxAllocator::new().take().unwrap();
        let qp = SharedQp::new(shape.qpn, uidx, Some(shape.wqebbs), Receives::None);
        let ring = Mlx5Sq::new(Setup {
            memory,
            offset: 0,
            wqebbs: shape.wqebbs,
            max_post: shape.max_post,
            limits: SendLimits { max_sge: 30, max_inline: 980 },
            // For every transport: tests post all operations to one queue.
            unchecked: SendOps {
                gather: !0,
                inline: !0,
                datagram: !0,
                srq_gather: !0,
                srq_inline: !0,
            },
            transport: QpTransport {
                qp_type: QpType::RC,
                qpn: Qpn(shape.qpn),
                domain: Identity::NONE,
            },
            signal_all: shape.signal_all,
            dbrec: dbrec.clone(),
            register: page.register.clone(),
            owns_register: shape.owns_register,
            shared: qp.clone(),
            raw_packet: shape.raw_packet,
            gate: open(&dbrec),
            ring_gate: open(&dbrec),
        });
        Sender { ring: ring.unwrap(), device, dbrec, page, qp }
    }

    /// Writes a WQE as queues do.
    fn push(&mut self, cursor: &mut SendCursor, wr: &SendWr<'_>) -> Result<(), PostError> {
        self.ring.transport = transport(wr);
        self.ring.push(cursor, wr)
    }

    /// As [`push`](Self::push), with all checks for any request.
    fn push_checked(&mut self, cursor: &mut SendCursor, wr: &SendWr<'_>) -> Result<(), PostError> {
        self.ring.transport = transport(wr);
        self.ring.push_checked(cursor, wr)
    }

    fn try_push(&mut self, cursor: &mut SendCursor, wr: &SendWr<'_>) -> bool {
        self.ring.transport = transport(wr);
        self.ring.try_push(cursor, wr)
    }

    /// Posts a batch; an error of any request ends it without ringing.
    fn post(&mut self, wrs: &[SendWr<'_>]) -> Result<SendCursor, PostError> {
        let mut cursor = self.ring.begin();
        for wr in wrs {
            self.push(&mut cursor, wr)?;
        }
        self.ring.ring(&cursor, wrs.len() == 1).map_err(PostError::from)?;
        Ok(cursor)
    }

    /// `length` bytes of the queue from a WQEBB on, wrapping around at its end.
    fn bytes(&self, wqebb: u32, length: usize) -> Vec<u8> {
        bytes(&self.device, wqebb.wrapping_mul(4), length)
    }
}

/// The transport that a request is meant for.
fn transport(wr: &SendWr<'_>) -> QpTransport {
    let qp_type = match (&wr.destination, wr.srq) {
        (Some(_), _) => QpType::UD,
        (None, Some(_)) => QpType::XRC_INI,
        (None, None) => QpType::RC,
    };
    let domain = wr.destination.as_ref().map_or(Identity::NONE, |to| to.domain);
    let qpn = match &wr.op {
        SendOp::BindMw(binding) => binding.qpn.unwrap_or(Qpn(QPN)),
        _ => Qpn(QPN),
    };
    QpTransport { qp_type, qpn, domain }
}

fn bytes(segments: &WqeSegments, from: u32, length: usize) -> Vec<u8> {
    let count = length.div_ceil(SEGMENT) as u32;
    let mut bytes: Vec<u8> =
        (0..count).flat_map(|n| segments.read(from.wrapping_add(n)).as_bytes().to_vec()).collect();
    bytes.truncate(length);
    bytes
}

/// A receive queue of a queue pair.
struct Receiver {
    ring: Mlx5Rq,
    device: WqeSegments,
    dbrec: Arc<DoorbellRecord>,
    qp: Arc<SharedQp>,
}

impl Receiver {
    fn new(entries: u32, stride: u32) -> Receiver {
        let memory = Arc::new(QueueMemory::pages((entries * stride) as usize).unwrap());
        let device =
            WqeSegments::new(memory.clone(), 0, entries * stride / SEGMENT as u32).unwrap();
        for segment in 0..device.count() {
            device.write(segment, [0xa5a5_a5a5_a5a5_a5a5; 2]);
        }
        let dbrec = dbrec();
        let uidx = UidxAllocator::new().take().unwrap();
        let qp = SharedQp::new(QPN, uidx, None, Receives::Own(entries));
        let place = rq::RqLayout {
            offset: 0,
            entries,
            max_post: entries,
            stride,
            max_sge: stride / SEGMENT as u32,
        };
        let ring = Mlx5Rq::new(memory, place, dbrec.clone(), qp.clone(), open(&dbrec));
        Receiver { ring: ring.unwrap(), device, dbrec, qp }
    }

    fn push(&self, cursor: &mut RecvCursor, recv: &RecvWr<'_>) -> Result<(), PostError> {
        self.ring.push(cursor, recv)
    }

    fn post(&mut self, recvs: &[RecvWr<'_>]) -> Result<(), PostError> {
        let mut cursor = self.ring.begin();
        for recv in recvs {
            self.push(&mut cursor, recv)?;
        }
        self.ring.ring(cursor).unwrap();
        Ok(())
    }
}

/// A shared receive queue.
struct SharedReceiver {
    ring: Mlx5Srq,
    device: WqeSegments,
    dbrec: Arc<DoorbellRecord>,
}

impl SharedReceiver {
    fn new(entries: u32, stride: u32) -> SharedReceiver {
        let memory = Arc::new(QueueMemory::pages((entries * stride) as usize).unwrap());
        let prepared = srq::prepare(&memory, entries, stride).unwrap();
        let device = WqeSegments::new(memory, 0, entries * stride / SEGMENT as u32).unwrap();
        let dbrec = dbrec();
        let max_sge = stride / SEGMENT as u32 - 1;
        let ring = Mlx5Srq::new(prepared, max_sge, dbrec.clone(), open(&dbrec));
        SharedReceiver { ring, device, dbrec }
    }

    fn push(&self, cursor: &mut RecvCursor, recv: &RecvWr<'_>) -> Result<(), PostError> {
        self.ring.push(cursor, recv)
    }

    fn post(&mut self, recvs: &[RecvWr<'_>]) -> Result<(), PostError> {
        let mut cursor = self.ring.begin();
        for recv in recvs {
            self.push(&mut cursor, recv)?;
        }
        self.ring.ring(cursor, recvs.len() as u32).unwrap();
        Ok(())
    }
}

/// A completion queue and the device that writes to it.
struct Completed {
    ring: Mlx5Cq,
    device: FakeCq,
    page: FakeRegister,
}

impl Completed {
    fn new(entries: u32, size: usize) -> Completed {
        let memory = Arc::new(QueueMemory::pages(entries as usize * size).unwrap());
        let cqes = cq::prepare(&memory, entries, size).unwrap();
        let (dbrec, page) = (dbrec(), FakeRegister::new(0));
        let gate = Gate::beside(&dbrec).unwrap();
        let ring = Mlx5Cq::new(cqes, dbrec.clone(), PollGate::new(gate), &page.register, CQN);
        Completed { ring, device: FakeCq::new(&memory, entries, size, dbrec), page }
    }

    fn write(&mut self, core: [u8; 64]) {
        self.device.write(core);
    }

    /// The next completion, from a new poll.
    fn next(&mut self) -> Option<Mlx5Wc<'_>> {
        next(&mut self.ring)
    }

    /// The consumer index that the device reads.
    fn consumed(&self) -> u32 {
        self.device.consumed()
    }
}

/// The next completion, from a new poll.
fn next(ring: &mut Mlx5Cq) -> Option<Mlx5Wc<'_>> {
    ring.catch_up();
    ring.next()
}

const SGE: Sge = Sge { addr: 0x1122_3344_5566_7788, length: 0x1000, lkey: Lkey(0x0104_0400) };
