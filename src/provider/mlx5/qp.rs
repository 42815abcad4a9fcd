//! Creates queue pairs: the memory of both queues, the user index, the doorbell register, the
//! driver's part of the command, and the rings.
//!
//! Pairs with `create_user_qp` in `hw/mlx5/qp.c`, which pins the memory that is named here.

use super::resources::{Mlx5Resources, dmabuf, explain_dmabuf};
use super::rq::{self, RqSize};
use super::sq::{self, SqSize};
use super::uar::RegisterLease;
use super::uidx::Uidx;
use super::wr_ids::{Receives, SharedQp};
use super::{Mlx5, misfit};
use crate::error::{Error, Result};
use crate::memory::allocator::{ResourceType, Source};
use crate::memory::doorbell_record::DoorbellRecord;
use crate::memory::doorbell_register::DoorbellRegister;
use crate::memory::gate::Gate;
use crate::memory::queue_layout::RawPacketNumbers;
use crate::memory::queue_memory::QueueMemory;
use crate::provider::{
    self, CreateRequest, CreatedQp, CreatedTarget, Execute, ExecuteModify, QpChange, QpInitAttr,
    RecvRing, Scatter, SendLimits, SendRing, SharedReceives,
};
use crate::qp::ece::Ece;
use crate::qp::state::QpType;
use crate::uverbs::command::Command;
use crate::uverbs::kernel::Kernel;
use crate::wr::SendOps;
use rustix::param::page_size;
use std::sync::Arc;
use uverbs_uapi::buffer::ib_uverbs_buffer_desc;
use uverbs_uapi::mlx5::abi::{
    mlx5_ib_create_qp, mlx5_ib_create_qp_resp, mlx5_ib_create_qp_resp_mask, mlx5_ib_modify_qp,
    mlx5_ib_modify_qp_mask, mlx5_ib_modify_qp_resp, mlx5_qp_flags,
};
use uverbs_uapi::mlx5::object::MLX5_IB_ATTR_CREATE_QP_DBR_BUF_UMEM;
use uverbs_uapi::object::{UVERBS_ATTR_UHW_IN, UVERBS_ATTR_UHW_OUT, UVERBS_OBJECT_QP};
use uverbs_uapi::qp as uapi;
use uverbs_uapi::qp::ib_uverbs_qp_cap;
use zerocopy::IntoBytes;

/// The device addresses the beginning of a queue pair's memory in 64ths of a page.
const PAGE_STEPS: usize = 64;
/// Version 1 of the ECE options: the response to a creation with it has the options of the device.
const ECE_QUERY: u32 = 0x1000_0000;
/// The vendor of these options.
const ECE_VENDOR: u32 = 0x15b3;

/// The ECE options that the device reported, if it has any.
fn ece(mlx5: &Mlx5, response: &mlx5_ib_create_qp_resp) -> Option<Ece> {
    let options = response.ece_options;
    mlx5.limits.ece.then_some(Ece { vendor_id: ECE_VENDOR, options })
}

/// Changes a queue pair together with the ECE options of its connection, and lets the device place its data out of order;
/// `execute` runs the command. Returns the options that the device took.
pub(super) fn modify_with(change: QpChange, execute: ExecuteModify<'_>) -> Result<u32> {
    let mut mask = mlx5_ib_modify_qp_mask::empty();
    mask.set(mlx5_ib_modify_qp_mask::MLX5_IB_MODIFY_QP_OOO_DP, change.out_of_order);
    let request =
        mlx5_ib_modify_qp { comp_mask: mask.bits(), ece_options: change.ece, ..Default::default() };
    let mut response = mlx5_ib_modify_qp_resp::default();
    execute(request.as_bytes(), response.as_mut_bytes())?;
    Ok(response.ece_options)
}

/// The objects of a queue pair of raw packets, which the kernel tells a context with DEVX.
fn raw_packet_numbers(response: &mlx5_ib_create_qp_resp) -> RawPacketNumbers {
    let valid = mlx5_ib_create_qp_resp_mask::from_bits_truncate(response.comp_mask);
    let told = |mask, number| valid.contains(mask).then_some(number);
    RawPacketNumbers {
        tirn: told(mlx5_ib_create_qp_resp_mask::MLX5_IB_CREATE_QP_RESP_MASK_TIRN, response.tirn),
        tisn: told(mlx5_ib_create_qp_resp_mask::MLX5_IB_CREATE_QP_RESP_MASK_TISN, response.tisn),
        rqn: told(mlx5_ib_create_qp_resp_mask::MLX5_IB_CREATE_QP_RESP_MASK_RQN, response.rqn),
        sqn: told(mlx5_ib_create_qp_resp_mask::MLX5_IB_CREATE_QP_RESP_MASK_SQN, response.sqn),
    }
}

/// The memory, doorbell record, user index and doorbell register that a queue pair is made from.
struct QpParts {
    sq_size: SqSize,
    rq_size: RqSize,
    // Declared first, so that the record is dropped before the memory, as in [`Mlx5Resources`].
    dbrec: Arc<DoorbellRecord>,
    gate: Gate,
    uidx: Arc<Uidx>,
    memory: QpMemory,
    register: QpRegister,
}

/// The memory of the queues, by the names of [`mlx5_ib_create_qp`]: `buf` is the receive queue with the send queue
/// behind it. A queue pair of raw packets has its send queue in `sq_buf` instead.
struct QpMemory {
    buf: Option<Arc<QueueMemory>>,
    sq_buf: Option<Arc<QueueMemory>>,
}

/// The doorbell register that a queue pair's sends ring.
struct QpRegister {
    register: Arc<DoorbellRegister>,
    page: u32,
    mmap_offset: u64,
    /// Whether no other queue rings the register while a batch of this queue is rung.
    is_owned: bool,
    /// The lease ends with the queue pair. `None` for the register of a thread domain, which has the lease itself.
    lease: Option<RegisterLease>,
}

/// Creates a queue pair.
pub(super) fn create(
    mlx5: &Mlx5,
    attr: QpInitAttr<'_>,
    source: Source<'_>,
    kernel: &dyn Kernel,
    execute: Execute<'_>,
) -> Result<CreatedQp> {
    let own_receives = attr.srq.is_none() && attr.qp_type != QpType::XRC_INI;
    let asked = ib_uverbs_qp_cap {
        max_recv_wr: if own_receives { attr.cap.max_recv_wr } else { 0 },
        ..attr.cap
    };
    let mut parts = QpParts::new(mlx5, &attr, &asked, &source, kernel)?;
    let [memory_dmabuf, sends_dmabuf] = parts.dmabufs();
    let dbrec_dmabuf = parts.dbrec.memory().and_then(dmabuf);
    let request = parts.request(mlx5, attr.scatter);
    let mut response = mlx5_ib_create_qp_resp::default();
    // The kernel's response counts in WQEBBs; the capacity that was granted is computed here.
    let mut kernel_cap = ib_uverbs_qp_cap::default();
    let mut qpn = 0u32;
    let buffer_attr = match attr.qp_type {
        QpType::RAW_PACKET => uapi::UVERBS_ATTR_CREATE_QP_RQ_BUF_UMEM,
        _ => uapi::UVERBS_ATTR_CREATE_QP_BUF_UMEM,
    };
    let mut command = Command::new(UVERBS_OBJECT_QP, uapi::UVERBS_METHOD_QP_CREATE);
    command
        .input(uapi::UVERBS_ATTR_CREATE_QP_CAP, &asked)
        .output(uapi::UVERBS_ATTR_CREATE_QP_RESP_CAP, &mut kernel_cap)
        .output(uapi::UVERBS_ATTR_CREATE_QP_RESP_QP_NUM, &mut qpn)
        .input_if(buffer_attr, memory_dmabuf.as_ref())
        .input_if(uapi::UVERBS_ATTR_CREATE_QP_SQ_BUF_UMEM, sends_dmabuf.as_ref())
        .input_if(MLX5_IB_ATTR_CREATE_QP_DBR_BUF_UMEM, dbrec_dmabuf.as_ref())
        .input(UVERBS_ATTR_UHW_IN, &request)
        .output(UVERBS_ATTR_UHW_OUT, &mut response);
    let (pinned, resources) = (parts.memory.bytes(), parts.resources());
    let has_dmabuf = memory_dmabuf.is_some() || sends_dmabuf.is_some() || dbrec_dmabuf.is_some();
    execute(CreateRequest { command, pinned, resources })
        .map_err(|error| explain_dmabuf(error, has_dmabuf))?;

    let shared = parts.shared(qpn, attr.srq);
    let recv = parts.recv_ring(&shared, source.verb)?;
    let cap = parts.cap();
    let (gate, mmap_offset) = (parts.gate.clone(), parts.register.mmap_offset);
    let mut send = parts.send_ring(mlx5, &attr, &shared, source.verb)?;
    if let SendRing::Mlx5(sq) = &mut send {
        sq.tell(sq::Told { mmap_offset, raw_packet: raw_packet_numbers(&response) });
    }
    let (member, ece) = (shared.member(), ece(mlx5, &response));
    Ok(CreatedQp { send, recv, qpn, cap, member, gate, named: None, ece })
}

impl QpParts {
    /// Allocates the parts; `cap` is the requested capacity.
    fn new(
        mlx5: &Mlx5,
        attr: &QpInitAttr<'_>,
        cap: &ib_uverbs_qp_cap,
        source: &Source<'_>,
        kernel: &dyn Kernel,
    ) -> Result<QpParts> {
        let invalid = |detail| Error::invalid(source.verb, detail);
        let sq_size = SqSize::new(&mlx5.limits, attr.qp_type, cap).map_err(invalid)?;
        let rq_size = match attr.out_of_order {
            true => RqSize::out_of_order(&mlx5.limits, cap),
            false => RqSize::new(&mlx5.limits, cap),
        };
        let rq_size = rq_size.map_err(invalid)?;
        let split = attr.qp_type == QpType::RAW_PACKET;
        let memory = QpMemory::alloc(sq_size, rq_size, split, source)?;
        let dbrec = mlx5.doorbell_record(source)?;
        let gate = mlx5.gate(&dbrec, source.verb)?;
        let uidx = mlx5.user_index(source.verb)?;
        let register = QpRegister::new(mlx5, attr.register, kernel);
        Ok(QpParts { sq_size, rq_size, dbrec, gate, uidx, memory, register })
    }

    /// The dma-bufs of both memories. The kernel does not get the memory of a queue that does not exist.
    fn dmabufs(&self) -> [Option<ib_uverbs_buffer_desc>; 2] {
        let buf = self.memory.buf.as_deref().filter(|_| self.has_queues());
        let sq_buf = self.memory.sq_buf.as_deref().filter(|_| self.sq_size.wqebbs > 0);
        [buf.and_then(dmabuf), sq_buf.and_then(dmabuf)]
    }

    fn has_queues(&self) -> bool {
        self.sq_size.wqebbs > 0 || self.rq_size.entries > 0
    }

    /// The driver's input to the command.
    fn request(&self, mlx5: &Mlx5, scatter: Scatter) -> mlx5_ib_create_qp {
        let addr = |memory: &Option<Arc<QueueMemory>>| match memory {
            Some(memory) if self.has_queues() && memory.dmabuf().is_none() => memory.addr(),
            _ => 0,
        };
        let mut flags = mlx5_qp_flags::MLX5_QP_FLAG_UAR_PAGE_INDEX;
        // The second flag is for reads and atomics of a queue pair that does not signal all of them.
        flags |= match scatter {
            Scatter::None => mlx5_qp_flags::empty(),
            Scatter::Received => mlx5_qp_flags::MLX5_QP_FLAG_SCATTER_CQE,
            Scatter::All => {
                mlx5_qp_flags::MLX5_QP_FLAG_SCATTER_CQE
                    | mlx5_qp_flags::MLX5_QP_FLAG_ALLOW_SCATTER_CQE
            }
        };
        mlx5_ib_create_qp {
            buf_addr: addr(&self.memory.buf),
            db_addr: match self.dbrec.memory().and_then(dmabuf) {
                Some(_) => 0,
                None => self.dbrec.addr(),
            },
            sq_wqe_count: self.sq_size.wqebbs,
            rq_wqe_count: self.rq_size.entries,
            rq_wqe_shift: self.rq_size.stride_log,
            flags: flags.bits(),
            uidx: self.uidx.get(),
            bfreg_index: self.register.page,
            sq_buf_addr: addr(&self.memory.sq_buf),
            ece_options: if mlx5.limits.ece { ECE_QUERY } else { 0 },
            ..Default::default()
        }
    }

    /// The resources that the kernel's object holds, with the register's lease.
    fn resources(&mut self) -> provider::QueueResources {
        let resources = Mlx5Resources::new(&self.dbrec, self.memory.buf.clone());
        let lease = self.register.lease.take();
        Some(Arc::new(resources.with(&self.memory.sq_buf, lease)))
    }

    fn shared(&self, qpn: u32, srq: Option<&SharedReceives>) -> Arc<SharedQp> {
        let receives = match (srq, self.rq_size.entries) {
            (Some(SharedReceives { wr_ids: Some(wr_ids) }), _) => Receives::Shared(wr_ids.clone()),
            (_, 0) => Receives::None,
            (_, entries) => Receives::Own(entries),
        };
        SharedQp::new(qpn, self.uidx.clone(), Some(self.sq_size.ring()), receives)
    }

    /// The receive queue, if the queue pair has one of its own.
    fn recv_ring(&self, shared: &Arc<SharedQp>, verb: &'static str) -> Result<Option<RecvRing>> {
        let Some(memory) = self.memory.buf.as_ref().filter(|_| self.rq_size.entries > 0) else {
            return Ok(None);
        };
        let layout = rq::RqLayout {
            offset: 0,
            entries: self.rq_size.entries,
            max_post: self.rq_size.max_post,
            stride: 1 << self.rq_size.stride_log,
            max_sge: self.rq_size.max_sge,
        };
        let (dbrec, gate) = (self.dbrec.clone(), self.gate.clone());
        let ring = rq::Mlx5Rq::new(memory.clone(), layout, dbrec, shared.clone(), gate);
        Ok(Some(RecvRing::Mlx5(ring.ok_or_else(|| misfit(verb))?)))
    }

    fn send_ring(
        self,
        mlx5: &Mlx5,
        attr: &QpInitAttr<'_>,
        shared: &Arc<SharedQp>,
        verb: &'static str,
    ) -> Result<SendRing> {
        let QpParts { sq_size, rq_size, dbrec, gate, memory, register, .. } = self;
        let (memory, offset) = match (memory.sq_buf, memory.buf) {
            (Some(memory), _) => (memory, 0),
            (None, Some(memory)) => (memory, rq_size.bytes()),
            (None, None) => return Err(misfit(verb)),
        };
        let ring_gate = match register.register.is_hosted() {
            true => Gate::alone(&mlx5.records).map_err(|errno| Error::new(verb, errno))?,
            false => gate.clone(),
        };
        let ring = sq::Mlx5Sq::new(sq::Setup {
            memory,
            offset,
            wqebbs: sq_size.ring(),
            max_post: sq_size.max_post,
            limits: SendLimits { max_sge: sq_size.max_sge, max_inline: sq_size.max_inline },
            unchecked: SendOps::unchecked(attr.qp_type),
            transport: attr.transport(shared.qpn()),
            signal_all: attr.signal_all,
            dbrec,
            register: register.register,
            owns_register: register.is_owned,
            shared: shared.clone(),
            raw_packet: mlx5.limits.raw_packet,
            gate,
            ring_gate,
        });
        Ok(SendRing::Mlx5(ring.ok_or_else(|| misfit(verb))?))
    }

    /// The capacity that was granted.
    fn cap(&self) -> ib_uverbs_qp_cap {
        ib_uverbs_qp_cap {
            max_send_wr: self.sq_size.max_post,
            max_recv_wr: self.rq_size.max_post,
            max_send_sge: self.sq_size.max_sge,
            max_recv_sge: self.rq_size.max_sge,
            max_inline_data: self.sq_size.max_inline,
        }
    }
}

impl QpRegister {
    fn new(mlx5: &Mlx5, of_thread: Option<&RegisterLease>, kernel: &dyn Kernel) -> QpRegister {
        match of_thread {
            Some(lease) => QpRegister::of(lease),
            None => {
                let lease = mlx5.registers.for_queue(kernel);
                let of_lease = QpRegister::of(&lease);
                QpRegister { lease: Some(lease), ..of_lease }
            }
        }
    }

    /// The register of a lease that somebody else keeps.
    fn of(lease: &RegisterLease) -> QpRegister {
        QpRegister {
            register: lease.register().clone(),
            page: lease.page_id(),
            mmap_offset: lease.mmap_offset(),
            is_owned: !lease.is_shared(),
            lease: None,
        }
    }
}

impl QpMemory {
    fn alloc(
        sq_size: SqSize,
        rq_size: RqSize,
        split: bool,
        source: &Source<'_>,
    ) -> Result<QpMemory> {
        let alloc = |bytes: usize, align: usize| -> Result<_> {
            if bytes == 0 {
                return Ok(None);
            }
            let bytes = bytes.next_multiple_of(align);
            let memory = source.alloc(bytes, align, ResourceType::MLX5_QP)?;
            Ok(Some(Arc::new(memory)))
        };
        if split {
            let buf = alloc(rq_size.bytes(), page_size())?;
            return Ok(QpMemory { buf, sq_buf: alloc(sq_size.bytes(), page_size())? });
        }
        let bytes = rq_size.bytes() + sq_size.bytes();
        let buf = alloc(bytes, alignment(bytes, 1 << rq_size.stride_log, page_size()))?;
        Ok(QpMemory { buf, sq_buf: None })
    }

    fn bytes(&self) -> usize {
        [&self.buf, &self.sq_buf].into_iter().flatten().map(|memory| memory.len()).sum()
    }
}

/// The alignment of `bytes` of memory for both queues, with receives of `stride` bytes and system pages of
/// `page` bytes.
fn alignment(bytes: usize, stride: usize, page: usize) -> usize {
    let page = bytes.next_multiple_of(page).next_power_of_two();
    stride.max(64).max(page / PAGE_STEPS)
}

/// Creates an XRC target: a queue pair without queues.
pub(super) fn create_target(
    mlx5: &Mlx5,
    verb: &'static str,
    execute: Execute<'_>,
) -> Result<CreatedTarget> {
    // The driver requires a user index for every queue pair; no completion has this one.
    let uidx = mlx5.user_index(verb)?;
    let request = mlx5_ib_create_qp {
        uidx: uidx.get(),
        ece_options: if mlx5.limits.ece { ECE_QUERY } else { 0 },
        ..Default::default()
    };
    let mut response = mlx5_ib_create_qp_resp::default();
    let mut qpn = 0u32;
    let mut command = Command::new(UVERBS_OBJECT_QP, uapi::UVERBS_METHOD_QP_CREATE);
    command
        .output(uapi::UVERBS_ATTR_CREATE_QP_RESP_QP_NUM, &mut qpn)
        .input(UVERBS_ATTR_UHW_IN, &request)
        .output(UVERBS_ATTR_UHW_OUT, &mut response);
    execute(CreateRequest { command, pinned: 0, resources: None })?;
    let member = SharedQp::new(qpn, uidx, None, Receives::None).member();
    let ece = ece(mlx5, &response);
    Ok(CreatedTarget { qpn, member, ece })
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn memory_begins_at_a_step_of_a_page_that_holds_it_all() {
        const KIB: usize = 1024;
        // For each system page size: the bytes of both queues, and their alignment.
        let few = [(4 * KIB, 64), (16 * KIB, 256), (64 * KIB, KIB)];
        for (page, expected) in few {
            assert_eq!(alignment(192, 16, page), expected, "a page of {page}");
            assert_eq!(alignment(page, 16, page), expected, "a page of {page}");
            assert_eq!(alignment(page + 64, 16, page), 2 * expected, "a page of {page}");
            assert_eq!(alignment(2 * KIB * KIB, 16, page), 32 * KIB, "a page of {page}");
        }
        assert_eq!(alignment(192, 512, 4 * KIB), 512, "a receive does not straddle");
    }
}
