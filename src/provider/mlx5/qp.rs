//! Creates queue pairs: the memory of both queues, the user index, the doorbell register, what the
//! kernel is asked, and the rings.
//!
//! Pairs with `create_user_qp` in `hw/mlx5/qp.c`, which pins the memory that is named here.

use super::resources::{Mlx5Resources, dmabuf, explain_dmabuf};
use super::rq::{self, RqSize};
use super::sq::{self, SqSize};
use super::wr_ids::{Receives, SharedQp};
use super::{Mlx5, misfit};
use crate::error::{Error, Result};
use crate::memory::allocator::{ResourceType, Source};
use crate::memory::gate::Gate;
use crate::memory::queue_memory::QueueMemory;
use crate::provider::{
    self, CreateRequest, CreatedQp, CreatedTarget, Member, QpInitAttr, RecvRing, SendLimits,
    SendRing, SharedReceives, ThreadRegister,
};
use crate::qp::ece::Ece;
use crate::qp::state::QpType;
use crate::uverbs::command::Command;
use crate::uverbs::kernel::Kernel;
use crate::wr::SendOps;
use rustix::param::page_size;
use std::sync::Arc;
use uverbs_uapi::mlx5::abi::{
    mlx5_ib_create_qp, mlx5_ib_create_qp_resp, mlx5_ib_modify_qp, mlx5_ib_modify_qp_resp,
    mlx5_qp_flags,
};
use uverbs_uapi::mlx5::object::MLX5_IB_ATTR_CREATE_QP_DBR_BUF_UMEM;
use uverbs_uapi::object::{UVERBS_ATTR_UHW_IN, UVERBS_ATTR_UHW_OUT, UVERBS_OBJECT_QP};
use uverbs_uapi::qp as uapi;
use uverbs_uapi::qp::ib_uverbs_qp_cap;
use zerocopy::IntoBytes;

/// The device finds the beginning of a queue pair's memory in this many steps of a page.
const PAGE_STEPS: usize = 64;
/// Version 1 of the options of a connection: a queue pair that is created with it tells which options the device has.
const ECE_QUERY: u32 = 0x1000_0000;
/// The vendor whose options these are.
const ECE_VENDOR: u32 = 0x15b3;

/// The options that the device told, if it has any.
fn ece(mlx5: &Mlx5, response: &mlx5_ib_create_qp_resp) -> Option<Ece> {
    let options = response.ece_options;
    mlx5.limits.ece.then_some(Ece { vendor_id: ECE_VENDOR, options })
}

/// Has `execute` change a queue pair together with the options of its connection, and returns those that the device
/// took.
pub(crate) fn modify_with_ece(
    options: u32,
    execute: impl FnOnce(&[u8], &mut [u8]) -> Result<()>,
) -> Result<u32> {
    let request = mlx5_ib_modify_qp { ece_options: options, ..Default::default() };
    let mut response = mlx5_ib_modify_qp_resp::default();
    execute(request.as_bytes(), response.as_mut_bytes())?;
    Ok(response.ece_options)
}

/// Creates a queue pair.
pub(crate) fn create<K>(
    mlx5: &Mlx5,
    attr: QpInitAttr<'_>,
    source: Source<'_>,
    kernel: &dyn Kernel,
    execute: impl FnOnce(CreateRequest<'_>) -> Result<K>,
) -> Result<(K, CreatedQp)> {
    let limits = &mlx5.limits;
    let invalid = |detail| Error::invalid(source.verb, detail);
    let own_receives = attr.srq.is_none() && attr.qp_type != QpType::XRC_INI;
    let asked = ib_uverbs_qp_cap {
        max_recv_wr: if own_receives { attr.cap.max_recv_wr } else { 0 },
        ..attr.cap
    };
    let sq_size = SqSize::new(limits, attr.qp_type, &asked).map_err(invalid)?;
    let rq_size = RqSize::new(limits, &asked).map_err(invalid)?;
    let split = attr.qp_type == QpType::RAW_PACKET;
    let (memory, sq_memory) = alloc_queues(sq_size, rq_size, split, &source)?;
    let dbrec = mlx5.doorbell_record(&source)?;
    let gate = mlx5.gate(&dbrec, source.verb)?;
    let uidx = mlx5.user_index(source.verb)?;
    let (register, uar_page, owns_register, lease) = match attr.register {
        Some(ThreadRegister::Mlx5(lease)) => {
            (lease.register().clone(), lease.page_id(), true, None)
        }
        _ => {
            let lease = mlx5.registers.for_queue(kernel);
            (lease.register().clone(), lease.page_id(), !lease.is_shared(), Some(lease))
        }
    };

    let memory_dmabuf = memory.as_deref().and_then(dmabuf);
    let sq_dmabuf = sq_memory.as_deref().and_then(dmabuf);
    let dbrec_dmabuf = dbrec.memory().and_then(dmabuf);
    // Memory of no queue is not the kernel's business.
    let has_queues = sq_size.wqebbs > 0 || rq_size.entries > 0;
    let memory_dmabuf = memory_dmabuf.filter(|_| has_queues);
    let sq_dmabuf = sq_dmabuf.filter(|_| sq_size.wqebbs > 0);
    let addr = |memory: &Option<Arc<QueueMemory>>| match memory {
        Some(memory) if has_queues && memory.dmabuf().is_none() => memory.addr(),
        _ => 0,
    };
    let mut flags = mlx5_qp_flags::MLX5_QP_FLAG_UAR_PAGE_INDEX;
    if attr.scatter {
        // The second flag is for reads and atomics of a queue pair that does not signal all of them.
        flags |=
            mlx5_qp_flags::MLX5_QP_FLAG_SCATTER_CQE | mlx5_qp_flags::MLX5_QP_FLAG_ALLOW_SCATTER_CQE;
    }
    let request = mlx5_ib_create_qp {
        buf_addr: addr(&memory),
        db_addr: if dbrec_dmabuf.is_some() { 0 } else { dbrec.addr() },
        sq_wqe_count: sq_size.wqebbs,
        rq_wqe_count: rq_size.entries,
        rq_wqe_shift: rq_size.stride_log,
        flags: flags.bits(),
        uidx: uidx.get(),
        bfreg_index: uar_page,
        sq_buf_addr: addr(&sq_memory),
        ece_options: if limits.ece { ECE_QUERY } else { 0 },
        ..Default::default()
    };
    let mut response = mlx5_ib_create_qp_resp::default();
    // The kernel's response counts in WQEBBs; the capacity that was granted is computed here.
    let mut kernel_cap = ib_uverbs_qp_cap::default();
    let mut qpn = 0u32;
    let buffer_attr = match split {
        true => uapi::UVERBS_ATTR_CREATE_QP_RQ_BUF_UMEM,
        false => uapi::UVERBS_ATTR_CREATE_QP_BUF_UMEM,
    };
    let mut command = Command::new(UVERBS_OBJECT_QP, uapi::UVERBS_METHOD_QP_CREATE);
    command
        .input(uapi::UVERBS_ATTR_CREATE_QP_CAP, &asked)
        .output(uapi::UVERBS_ATTR_CREATE_QP_RESP_CAP, &mut kernel_cap)
        .output(uapi::UVERBS_ATTR_CREATE_QP_RESP_QP_NUM, &mut qpn)
        .input_if(buffer_attr, memory_dmabuf.as_ref())
        .input_if(uapi::UVERBS_ATTR_CREATE_QP_SQ_BUF_UMEM, sq_dmabuf.as_ref())
        .input_if(MLX5_IB_ATTR_CREATE_QP_DBR_BUF_UMEM, dbrec_dmabuf.as_ref())
        .input(UVERBS_ATTR_UHW_IN, &request)
        .output(UVERBS_ATTR_UHW_OUT, &mut response);
    let pinned = [&memory, &sq_memory].into_iter().flatten().map(|memory| memory.len()).sum();
    let resources = Mlx5Resources::new(&dbrec, memory.clone()).with(&sq_memory, lease);
    let resources = provider::QueueResources::Mlx5(resources);
    let has_dmabuf = memory_dmabuf.is_some() || sq_dmabuf.is_some() || dbrec_dmabuf.is_some();
    let object = execute(CreateRequest { command, pinned, resources })
        .map_err(|error| explain_dmabuf(error, has_dmabuf))?;

    let receives = match (attr.srq, rq_size.entries) {
        (Some(SharedReceives::Mlx5(wr_ids)), _) => Receives::Shared(wr_ids.clone()),
        (_, 0) => Receives::None,
        (_, entries) => Receives::Own(entries),
    };
    let shared = SharedQp::new(qpn, uidx, Some(sq_size.ring()), receives);
    let misfit = || misfit(source.verb);
    let recv = match (rq_size.entries, &memory) {
        (0, _) | (_, None) => None,
        (entries, Some(memory)) => {
            let place = rq::RqLayout {
                offset: 0,
                entries,
                stride: 1 << rq_size.stride_log,
                max_sge: rq_size.max_sge,
            };
            let (dbrec, gate) = (dbrec.clone(), gate.clone());
            let ring = rq::Mlx5Rq::new(memory.clone(), place, dbrec, shared.clone(), gate);
            Some(RecvRing::Mlx5(ring.ok_or_else(misfit)?))
        }
    };
    let (sq_memory, offset) = match (sq_memory, memory) {
        (Some(memory), _) => (memory, 0),
        (None, Some(memory)) => (memory, rq_size.bytes()),
        (None, None) => return Err(misfit()),
    };
    let ring_gate = match register.is_hosted() {
        true => Gate::alone(&mlx5.records).map_err(|errno| Error::new(source.verb, errno))?,
        false => gate.clone(),
    };
    let send = sq::Mlx5Sq::new(sq::Setup {
        memory: sq_memory,
        offset,
        wqebbs: sq_size.ring(),
        max_post: sq_size.max_post,
        limits: SendLimits { max_sge: sq_size.max_sge, max_inline: sq_size.max_inline },
        unchecked: SendOps::unchecked(attr.qp_type),
        transport: attr.transport(qpn),
        signal_all: attr.signal_all,
        dbrec,
        register,
        owns_register,
        shared: shared.clone(),
        raw_packet: limits.raw_packet,
        gate: gate.clone(),
        ring_gate,
    });
    let cap = ib_uverbs_qp_cap {
        max_send_wr: sq_size.max_post,
        max_recv_wr: rq_size.entries,
        max_send_sge: sq_size.max_sge,
        max_recv_sge: rq_size.max_sge,
        max_inline_data: sq_size.max_inline,
    };
    let send = SendRing::Mlx5(send.ok_or_else(misfit)?);
    let member = Member::Mlx5(shared);
    let ece = ece(mlx5, &response);
    Ok((object, CreatedQp { send, recv, qpn, cap, member, gate, named: None, ece }))
}

/// The memory of both queues, or of the receive queue; and of a send queue that is apart.
type QpMemory = (Option<Arc<QueueMemory>>, Option<Arc<QueueMemory>>);

/// Memory for the receive queue with the send queue behind it, or for each by itself if `split`.
fn alloc_queues(
    sq_size: SqSize,
    rq_size: RqSize,
    split: bool,
    source: &Source<'_>,
) -> Result<QpMemory> {
    let alloc = |bytes: usize, align: usize| -> Result<_> {
        if bytes == 0 {
            return Ok(None);
        }
        let memory = source.alloc(bytes.next_multiple_of(align), align, ResourceType::MLX5_QP)?;
        Ok(Some(Arc::new(memory)))
    };
    if split {
        return Ok((alloc(rq_size.bytes(), page_size())?, alloc(sq_size.bytes(), page_size())?));
    }
    let bytes = rq_size.bytes() + sq_size.bytes();
    Ok((alloc(bytes, alignment(bytes, 1 << rq_size.stride_log, page_size()))?, None))
}

/// How memory of `bytes` for both queues is aligned, with receives of `stride` bytes and system pages of `page`
/// bytes.
fn alignment(bytes: usize, stride: usize, page: usize) -> usize {
    let page = bytes.next_multiple_of(page).next_power_of_two();
    stride.max(64).max(page / PAGE_STEPS)
}

/// Creates an XRC target: a queue pair without queues.
pub(crate) fn create_target<K>(
    mlx5: &Mlx5,
    verb: &'static str,
    execute: impl FnOnce(CreateRequest<'_>) -> Result<K>,
) -> Result<(K, CreatedTarget)> {
    // The driver wants a user index of every queue pair; no completion bears this one.
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
    let resources = provider::QueueResources::None;
    let object = execute(CreateRequest { command, pinned: 0, resources })?;
    let member = Member::Mlx5(SharedQp::new(qpn, uidx, None, Receives::None));
    let ece = ece(mlx5, &response);
    Ok((object, CreatedTarget { qpn, member, ece }))
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn memory_begins_at_a_step_of_a_page_that_holds_it_all() {
        const KIB: usize = 1024;
        // By sizes of system pages: the bytes of both queues, and how they are aligned.
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
