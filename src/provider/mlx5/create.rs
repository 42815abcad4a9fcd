//! Queues in the making: their memory, their doorbell record, and what the driver is told of both.
//!
//! Pairs with `create_user_qp`, `create_cq_user` and `create_srq_user` in `hw/mlx5`, which pin what
//! is named here.

use super::cq::CqRing;
use super::poll_gate::PollGate;
use super::resources::QueueResources;
use super::rq::{self, RecvRing};
use super::size::{CqSize, RqSize, SqSize, SrqSize};
use super::sq::{Frames, SendRing, Setup};
use super::srq::{Prepared, SrqRing};
use super::uar::Lease;
use super::uidx::Uidx;
use super::wr_ids::{Receives, SharedQp};
use super::{Mlx5, cq, srq};
use crate::error::{Error, Result};
use crate::memory::allocator::{ResourceType, Source};
use crate::memory::cq_buffer::CqBuffer;
use crate::memory::doorbell_record::{DoorbellRecord, Gate, RECORD};
use crate::memory::doorbell_register::DoorbellRegister;
use crate::memory::queue_memory::QueueMemory;
use crate::provider::plan::{CqAsk, QpAsk, Queues, SharedSlots, SrqAsk};
use crate::provider::{Member, SendLimits, ThreadRegister};
use crate::qp::state::QpType;
use crate::uverbs::command::Command;
use crate::uverbs::kernel::Kernel;
use rustix::io::Errno;
use rustix::param::page_size;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use uverbs_uapi::buffer::{ib_uverbs_buffer_desc, ib_uverbs_buffer_type};
use uverbs_uapi::cq::UVERBS_ATTR_CREATE_CQ_BUF_UMEM;
use uverbs_uapi::mlx5::abi;
use uverbs_uapi::mlx5::abi::{mlx5_ib_create_cq_flags, mlx5_qp_flags};
use uverbs_uapi::mlx5::object::{
    MLX5_IB_ATTR_CREATE_CQ_DBR_BUF_UMEM, MLX5_IB_ATTR_CREATE_CQ_UAR_INDEX,
    MLX5_IB_ATTR_CREATE_QP_DBR_BUF_UMEM,
};
use uverbs_uapi::object::{UVERBS_ATTR_UHW_IN, UVERBS_ATTR_UHW_OUT};
use uverbs_uapi::qp::{
    UVERBS_ATTR_CREATE_QP_BUF_UMEM, UVERBS_ATTR_CREATE_QP_RQ_BUF_UMEM,
    UVERBS_ATTR_CREATE_QP_SQ_BUF_UMEM, ib_uverbs_qp_cap,
};
use zerocopy::IntoBytes;

/// The device finds the beginning of a queue pair's memory in this many steps of a page.
const PAGE_STEPS: usize = 64;
/// Asks which options of connections the queue pair takes.
const ECE_QUERY: u32 = 0x1000_0000;

/// A doorbell record, of an allocator if it wants to give one.
fn record(context: &Mlx5, source: &Source<'_>) -> Result<Arc<DoorbellRecord>> {
    let fail = |errno| Error::new(source.verb, errno);
    let custom = source.custom(RECORD, RECORD, ResourceType::MLX5_DBR)?;
    let record = match custom {
        Some(memory) => DoorbellRecord::custom(memory).ok_or_else(|| fail(Errno::INVAL))?,
        None => context.records.alloc().map_err(fail)?,
    };
    Ok(Arc::new(record))
}

/// What the kernel is told of a buffer that is a dma-buf; `None` if it is told an address.
fn buffer(memory: &QueueMemory) -> Option<ib_uverbs_buffer_desc> {
    let part = memory.dmabuf()?;
    Some(ib_uverbs_buffer_desc {
        r#type: ib_uverbs_buffer_type::IB_UVERBS_BUFFER_TYPE_DMABUF.0,
        fd: part.file.as_raw_fd(),
        flags: 0,
        optional_flags: 0,
        addr: part.offset,
        length: memory.len() as u64,
    })
}

/// What a refusal of dma-bufs means.
fn explain(error: Error, dmabufs: bool) -> Error {
    if dmabufs && error.errno() == Errno::OPNOTSUPP {
        return error.detail("the kernel takes no dma-bufs for queues; Linux 7.2 does");
    }
    error
}

fn in_pages(bytes: usize) -> usize {
    bytes.next_multiple_of(page_size())
}

/// What a plan does not fit into was sized by this module, and is its mistake.
fn misfit(verb: &'static str) -> Error {
    Error::new(verb, Errno::BADMSG).detail("the queue does not fit into its memory")
}

/// A completion queue in the making.
#[derive(Debug)]
pub(crate) struct CqPlan {
    size: CqSize,
    record: Arc<DoorbellRecord>,
    gate: Gate,
    memory: Arc<QueueMemory>,
    elements: CqBuffer,
    arming: Arc<DoorbellRegister>,
    /// Whether somebody hears of completions.
    heard: bool,
    /// The device's number of the page where it is armed.
    page_id: u32,
    buffers: [Option<ib_uverbs_buffer_desc>; 2],
    request: abi::mlx5_ib_create_cq,
    response: abi::mlx5_ib_create_cq_resp,
}

impl CqPlan {
    pub(crate) fn new(context: &Mlx5, ask: CqAsk, source: Source<'_>) -> Result<CqPlan> {
        let size = CqSize::new(&context.limits, ask.cqe, ask.cqe_size)
            .map_err(|detail| Error::invalid(source.verb, detail))?;
        let (memory, elements) = completions(size, &source)?;
        let record = record(context, &source)?;
        let gate = gate(context, &record, source.verb)?;
        let (arming, page_id) = context.registers.arming();
        let buffers = [buffer(&memory), record.memory().and_then(buffer)];
        let mut request = abi::mlx5_ib_create_cq {
            buf_addr: if buffers[0].is_some() { 0 } else { memory.addr() },
            db_addr: if buffers[1].is_some() { 0 } else { record.addr() },
            cqe_size: size.cqe,
            ..Default::default()
        };
        let mut flags = mlx5_ib_create_cq_flags::empty();
        if let Ok(index) = u16::try_from(page_id) {
            flags |= mlx5_ib_create_cq_flags::MLX5_IB_CREATE_CQ_FLAGS_UAR_PAGE_INDEX;
            request.uar_page_index = index;
        }
        if ask.pad {
            if size.cqe != 128 {
                let detail = format!("completions of {} bytes have nothing to pad", size.cqe);
                return Err(Error::invalid(source.verb, detail));
            }
            flags |= mlx5_ib_create_cq_flags::MLX5_IB_CREATE_CQ_FLAGS_CQE_128B_PAD;
        }
        request.flags = flags.bits();
        let arming = arming.clone();
        let response = Default::default();
        Ok(CqPlan {
            size,
            memory,
            elements,
            record,
            gate,
            arming,
            heard: ask.heard,
            page_id,
            buffers,
            request,
            response,
        })
    }

    pub(crate) fn cqe(&self) -> u32 {
        self.size.entries - 1
    }

    /// Bytes that the driver pins.
    pub(crate) fn bytes(&self) -> usize {
        self.memory.len()
    }

    pub(crate) fn request<'a>(&'a mut self, command: Command<'a>) -> Command<'a> {
        let command = command
            .input_if(UVERBS_ATTR_CREATE_CQ_BUF_UMEM, self.buffers[0].as_ref())
            .input_if(MLX5_IB_ATTR_CREATE_CQ_DBR_BUF_UMEM, self.buffers[1].as_ref())
            .input(UVERBS_ATTR_UHW_IN, &self.request)
            .output(UVERBS_ATTR_UHW_OUT, &mut self.response);
        // Where the page's number does not fit into the request it is an attribute (Linux 6.11).
        match u16::try_from(self.page_id) {
            Ok(_) => command,
            Err(_) => command.u32(MLX5_IB_ATTR_CREATE_CQ_UAR_INDEX, self.page_id),
        }
    }

    pub(crate) fn explain(&self, error: Error) -> Error {
        explain(error, self.buffers.iter().any(Option::is_some))
    }

    pub(crate) fn hold(&self) -> QueueResources {
        QueueResources::new(&self.record, Some(self.memory.clone()))
    }

    pub(crate) fn finish(self) -> CqRing {
        let news = if self.heard { PollGate::heard(self.gate) } else { PollGate::new(self.gate) };
        CqRing::new(self.elements, self.record, news, &self.arming, self.response.cqn)
    }
}

/// Memory for completions, of which the device has not written any.
fn completions(size: CqSize, source: &Source<'_>) -> Result<(Arc<QueueMemory>, CqBuffer)> {
    let bytes = in_pages(size.bytes());
    let memory = Arc::new(source.alloc(bytes, page_size(), ResourceType::MLX5_CQ)?);
    let elements = cq::prepare(&memory, size.entries, size.cqe as usize);
    Ok((memory, elements.ok_or_else(|| misfit(source.verb))?))
}

/// A completion queue about to move to other memory.
#[derive(Debug)]
pub(crate) struct ResizePlan {
    size: CqSize,
    memory: Arc<QueueMemory>,
    /// `None` once the queue has moved there.
    elements: Option<CqBuffer>,
    request: abi::mlx5_ib_resize_cq,
}

impl ResizePlan {
    /// `None` if the queue has that size already: the kernel would say that all went well, and leave
    /// the device where it is.
    pub(crate) fn new(
        context: &Mlx5,
        ring: &CqRing,
        cqe: u32,
        source: Source<'_>,
    ) -> Result<Option<ResizePlan>> {
        let size = CqSize::new(&context.limits, cqe, ring.element_size() as u32)
            .map_err(|detail| Error::invalid(source.verb, detail))?;
        if size.entries == ring.entries() {
            return Ok(None);
        }
        let (memory, elements) = completions(size, &source)?;
        let request = abi::mlx5_ib_resize_cq {
            buf_addr: memory.addr(),
            cqe_size: size.cqe as u16,
            ..Default::default()
        };
        Ok(Some(ResizePlan { size, memory, elements: Some(elements), request }))
    }

    pub(crate) fn cqe(&self) -> u32 {
        self.size.entries - 1
    }

    pub(crate) fn memory(&self) -> &Arc<QueueMemory> {
        &self.memory
    }

    /// Bytes that the driver pins.
    pub(crate) fn bytes(&self) -> usize {
        self.memory.len()
    }

    pub(crate) fn request<'a>(&'a mut self, command: Command<'a>) -> Command<'a> {
        command.driver(self.request.as_bytes(), &mut [])
    }

    /// Leaves the new memory to what the kernel's object holds, unless the device cannot know it.
    pub(crate) fn abandon(&self, error: &Error, hold: &QueueResources) {
        // Memory is pinned before the device is told, and what the device refuses it has not done.
        let before = matches!(error.errno(), Errno::NOMEM | Errno::AGAIN);
        if !before && !error.is_refusal() {
            hold.keep(self.memory.clone());
        }
    }

    pub(crate) fn finish(&mut self, ring: &mut CqRing) {
        if let Some(elements) = self.elements.take() {
            ring.exchange(elements);
        }
    }
}

/// A queue pair in the making.
#[derive(Debug)]
pub(crate) struct QpPlan {
    told: ib_uverbs_qp_cap,
    signal_all: bool,
    sends: SqSize,
    receives: RqSize,
    shared: Option<SharedSlots>,
    record: Arc<DoorbellRecord>,
    memory: Option<Arc<QueueMemory>>,
    /// Of a raw packet queue pair, whose sends are not behind its receives.
    send_memory: Option<Arc<QueueMemory>>,
    gate: Gate,
    index: Arc<Uidx>,
    register: Arc<DoorbellRegister>,
    /// Whether nobody else rings the register while a batch of this queue pair does.
    alone: bool,
    lease: Option<Lease>,
    /// Of both queues, or of the receives; of the sends; of the record.
    buffers: [Option<ib_uverbs_buffer_desc>; 3],
    frames: Frames,
    request: abi::mlx5_ib_create_qp,
    response: abi::mlx5_ib_create_qp_resp,
}

impl QpPlan {
    pub(crate) fn new(
        context: &Mlx5,
        ask: QpAsk<'_>,
        source: Source<'_>,
        kernel: &dyn Kernel,
    ) -> Result<QpPlan> {
        let invalid = |detail| Error::invalid(source.verb, detail);
        let limits = &context.limits;
        // Every queue pair has the queues of its type, if only for one request.
        let told = ib_uverbs_qp_cap {
            max_send_wr: ask.cap.max_send_wr.max(1),
            max_recv_wr: match ask.shared.is_some() || ask.qp_type == QpType::XRC_INI {
                true => 0,
                false => ask.cap.max_recv_wr.max(1),
            },
            ..ask.cap
        };
        let sends = SqSize::new(limits, ask.qp_type, &told).map_err(invalid)?;
        let receives = RqSize::new(limits, &told).map_err(invalid)?;
        let split = ask.qp_type == QpType::RAW_PACKET;
        let (memory, send_memory) = queues(sends, receives, split, &source)?;
        let record = record(context, &source)?;
        let gate = gate(context, &record, source.verb)?;
        let index = take_index(context, source.verb)?;
        let (register, page_id, alone, lease) = match ask.register {
            Some(ThreadRegister::Mlx5(lease)) => {
                (lease.register().clone(), lease.page_id(), true, None)
            }
            _ => {
                let lease = context.registers.for_queue(kernel);
                (lease.register().clone(), lease.page_id(), !lease.is_shared(), Some(lease))
            }
        };
        let buffers = [
            memory.as_deref().and_then(buffer),
            send_memory.as_deref().and_then(buffer),
            record.memory().and_then(buffer),
        ];
        let addr = |memory: &Option<Arc<QueueMemory>>| match memory {
            Some(memory) if memory.dmabuf().is_none() => memory.addr(),
            _ => 0,
        };
        let mut flags = mlx5_qp_flags::MLX5_QP_FLAG_UAR_PAGE_INDEX;
        if ask.scatter {
            // The second is for what requests bring back where not all of them have completions.
            flags |= mlx5_qp_flags::MLX5_QP_FLAG_SCATTER_CQE
                | mlx5_qp_flags::MLX5_QP_FLAG_ALLOW_SCATTER_CQE;
        }
        let request = abi::mlx5_ib_create_qp {
            buf_addr: addr(&memory),
            db_addr: if buffers[2].is_some() { 0 } else { record.addr() },
            sq_wqe_count: sends.blocks,
            rq_wqe_count: receives.entries,
            rq_wqe_shift: receives.stride_log,
            flags: flags.bits(),
            uidx: index.number(),
            bfreg_index: page_id,
            sq_buf_addr: addr(&send_memory),
            ece_options: if limits.ece { ECE_QUERY } else { 0 },
            ..Default::default()
        };
        Ok(QpPlan {
            told,
            signal_all: ask.signal_all,
            sends,
            receives,
            shared: ask.shared.cloned(),
            memory,
            send_memory,
            record,
            gate,
            index,
            register,
            alone,
            lease,
            buffers,
            frames: limits.frames,
            request,
            response: Default::default(),
        })
    }

    /// Bytes that the driver pins.
    pub(crate) fn bytes(&self) -> usize {
        [&self.memory, &self.send_memory].into_iter().flatten().map(|memory| memory.len()).sum()
    }

    pub(crate) fn explain(&self, error: Error) -> Error {
        explain(error, self.buffers.iter().any(Option::is_some))
    }

    pub(crate) fn request<'a>(&'a mut self, command: Command<'a>) -> Command<'a> {
        let receives = match self.send_memory {
            Some(_) => UVERBS_ATTR_CREATE_QP_RQ_BUF_UMEM,
            None => UVERBS_ATTR_CREATE_QP_BUF_UMEM,
        };
        command
            .input_if(receives, self.buffers[0].as_ref())
            .input_if(UVERBS_ATTR_CREATE_QP_SQ_BUF_UMEM, self.buffers[1].as_ref())
            .input_if(MLX5_IB_ATTR_CREATE_QP_DBR_BUF_UMEM, self.buffers[2].as_ref())
            .input(UVERBS_ATTR_UHW_IN, &self.request)
            .output(UVERBS_ATTR_UHW_OUT, &mut self.response)
    }

    /// What the kernel is told: it counts differently, but finds out which queues there are.
    pub(crate) fn told(&self) -> ib_uverbs_qp_cap {
        self.told
    }

    /// What was granted is known here: the kernel counts in blocks of 64 bytes.
    pub(crate) fn caps(&self) -> ib_uverbs_qp_cap {
        ib_uverbs_qp_cap {
            max_send_wr: self.sends.max_post,
            max_recv_wr: self.receives.entries,
            max_send_sge: self.sends.max_sge,
            max_recv_sge: self.receives.max_sge,
            max_inline_data: self.sends.max_inline,
        }
    }

    pub(crate) fn hold(&mut self) -> QueueResources {
        QueueResources::new(&self.record, self.memory.clone())
            .with(&self.send_memory, self.lease.take())
    }

    /// `None` if a queue does not fit into its memory.
    pub(crate) fn finish(self, qpn: u32) -> Option<Queues> {
        let receives = match (&self.shared, self.receives.entries) {
            (Some(SharedSlots::Mlx5(slots)), _) => Receives::Shared(slots.clone()),
            (_, 0) => Receives::None,
            (_, entries) => Receives::Own(entries),
        };
        let blocks = (self.sends.blocks > 0).then_some(self.sends.blocks);
        let member = SharedQp::new(qpn, self.index, blocks, receives);
        let (send_memory, offset) = match self.send_memory {
            Some(memory) => (memory, 0),
            None => (self.memory.clone()?, self.receives.bytes()),
        };
        let send = SendRing::new(Setup {
            memory: send_memory,
            offset,
            wqebbs: self.sends.blocks,
            max_post: self.sends.max_post,
            limits: SendLimits { max_sge: self.sends.max_sge, max_inline: self.sends.max_inline },
            qpn,
            signal_all: self.signal_all,
            dbrec: self.record.clone(),
            register: self.register,
            alone: self.alone,
            record: member.clone(),
            frames: self.frames,
            gate: self.gate.clone(),
        })?;
        let recv = match (self.receives.entries, self.memory) {
            (0, _) | (_, None) => None,
            (entries, Some(memory)) => {
                let stride = 1 << self.receives.stride_log;
                let place =
                    rq::Place { offset: 0, entries, stride, max_sge: self.receives.max_sge };
                let (record, gate) = (self.record, self.gate.clone());
                let ring = RecvRing::new(memory, place, record, member.clone(), gate)?;
                Some(crate::provider::RecvRing::mlx5(ring))
            }
        };
        let send = crate::provider::SendRing::mlx5(send);
        let (member, gate) = (Member::Mlx5(member), Some(self.gate));
        Some(Queues { send, recv, member, named: None, gate })
    }
}

/// A gate beside the record, or, if that is an allocator's, in a line of the context's own.
fn gate(context: &Mlx5, record: &Arc<DoorbellRecord>, verb: &'static str) -> Result<Gate> {
    if let Some(gate) = Gate::beside(record) {
        return Ok(gate);
    }
    let line = context.records.alloc().map_err(|errno| Error::new(verb, errno))?;
    Gate::beside(&Arc::new(line)).ok_or_else(|| misfit(verb))
}

/// Memory for receives, and behind them, or in memory of their own, for sends.
type QueuePairMemory = (Option<Arc<QueueMemory>>, Option<Arc<QueueMemory>>);

fn queues(
    sends: SqSize,
    receives: RqSize,
    split: bool,
    source: &Source<'_>,
) -> Result<QueuePairMemory> {
    let alloc = |bytes: usize, align: usize| -> Result<_> {
        if bytes == 0 {
            return Ok(None);
        }
        let memory = source.alloc(bytes.next_multiple_of(align), align, ResourceType::MLX5_QP)?;
        Ok(Some(Arc::new(memory)))
    };
    if split {
        return Ok((alloc(receives.bytes(), page_size())?, alloc(sends.bytes(), page_size())?));
    }
    let bytes = receives.bytes() + sends.bytes();
    let page = in_pages(bytes).next_power_of_two();
    let stride = (1usize << receives.stride_log).max(64);
    Ok((alloc(bytes, stride.max(page / PAGE_STEPS))?, None))
}

/// A shared receive queue in the making.
#[derive(Debug)]
pub(crate) struct SrqPlan {
    size: SrqSize,
    record: Arc<DoorbellRecord>,
    gate: Gate,
    memory: Arc<QueueMemory>,
    prepared: Prepared,
    /// Of a queue of an XRC domain, whose completions bear it.
    index: Option<Arc<Uidx>>,
    request: abi::mlx5_ib_create_srq,
    response: abi::mlx5_ib_create_srq_resp,
}

impl SrqPlan {
    pub(crate) fn new(
        context: &Mlx5,
        ask: SrqAsk,
        xrc: bool,
        source: Source<'_>,
    ) -> Result<SrqPlan> {
        let size = SrqSize::new(&context.limits, ask.max_wr, ask.max_sge)
            .map_err(|detail| Error::invalid(source.verb, detail))?;
        let memory = source.alloc(size.bytes(), page_size(), ResourceType::MLX5_SRQ)?;
        let memory = Arc::new(memory);
        let prepared = srq::prepare(&memory, size.entries, 1 << size.stride_log);
        let prepared = prepared.ok_or_else(|| misfit(source.verb))?;
        let record = record(context, &source)?;
        let gate = gate(context, &record, source.verb)?;
        let index = if xrc { Some(take_index(context, source.verb)?) } else { None };
        let request = abi::mlx5_ib_create_srq {
            buf_addr: memory.addr(),
            db_addr: record.addr(),
            // Only queues of XRC domains are asked for one.
            uidx: index.as_ref().map_or(0, |index| index.number()),
            ..Default::default()
        };
        let response = Default::default();
        Ok(SrqPlan { size, memory, prepared, record, gate, index, request, response })
    }

    pub(crate) fn told(&self) -> SrqAsk {
        SrqAsk { max_wr: self.size.entries - 1, max_sge: self.size.max_sge }
    }

    /// Bytes that the driver pins.
    pub(crate) fn bytes(&self) -> usize {
        self.memory.len()
    }

    pub(crate) fn request<'a>(&'a mut self, command: Command<'a>) -> Command<'a> {
        command
            .input(UVERBS_ATTR_UHW_IN, &self.request)
            .output(UVERBS_ATTR_UHW_OUT, &mut self.response)
    }

    pub(crate) fn hold(&self) -> QueueResources {
        QueueResources::new(&self.record, Some(self.memory.clone()))
    }

    /// The ring, and what a completion queue knows the queue by, if it is of an XRC domain.
    pub(crate) fn finish(self, number: u32) -> (SrqRing, Option<Arc<SharedQp>>) {
        let ring = SrqRing::new(self.prepared, self.size.max_sge, self.record, self.gate);
        let receives = Receives::Shared(ring.slots().clone());
        let record = self.index.map(|index| SharedQp::new(number, index, None, receives));
        (ring, record)
    }
}

/// An XRC target in the making.
#[derive(Debug)]
pub(crate) struct TargetPlan {
    index: Arc<Uidx>,
    request: abi::mlx5_ib_create_qp,
    response: abi::mlx5_ib_create_qp_resp,
}

impl TargetPlan {
    pub(crate) fn new(context: &Mlx5, verb: &'static str) -> Result<TargetPlan> {
        let index = take_index(context, verb)?;
        // The driver wants an index of every queue pair; no completion bears this one.
        let request = abi::mlx5_ib_create_qp {
            uidx: index.number(),
            ece_options: if context.limits.ece { ECE_QUERY } else { 0 },
            ..Default::default()
        };
        Ok(TargetPlan { index, request, response: Default::default() })
    }

    pub(crate) fn request<'a>(&'a mut self, command: Command<'a>) -> Command<'a> {
        command
            .input(UVERBS_ATTR_UHW_IN, &self.request)
            .output(UVERBS_ATTR_UHW_OUT, &mut self.response)
    }

    pub(crate) fn finish(self, qpn: u32) -> Arc<SharedQp> {
        SharedQp::new(qpn, self.index, None, Receives::None)
    }
}

fn take_index(context: &Mlx5, verb: &'static str) -> Result<Arc<Uidx>> {
    context.indices.take().ok_or_else(|| {
        Error::new(verb, Errno::NFILE).detail(
            "2^24 queue pairs and shared receive queues of XRC domains are alive in this context",
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_refused_dma_buf_is_said_to_need_a_newer_kernel() {
        for (dmabufs, errno) in
            [(true, Errno::OPNOTSUPP), (false, Errno::OPNOTSUPP), (true, Errno::INVAL)]
        {
            let error = explain(Error::new("create_qp", errno), dmabufs);
            let named = error.message().contains("dma-bufs");
            assert_eq!(named, dmabufs && errno == Errno::OPNOTSUPP, "{error}");
        }
    }
}
