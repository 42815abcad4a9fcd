//! Completion queues: the device produces CQEs, and reads the consumer index from a doorbell record.
//!
//! The device has written a CQE when the owner bit, the last bit of its last byte (`op_own`), equals the parity of
//! the pass over the ring. Only arming rings a doorbell register.

use super::cqe::{COUNTER, Mlx5Wc, UIDX, is_receive, op_own_above, opcode_of, received, uidx_of};
use super::qp_table::{Leftover, QpRegistry, QpTable};
use super::resources::{Mlx5Resources, dmabuf, explain_dmabuf};
use super::wqe::pair;
use super::wr_ids::SharedQp;
use super::{Mlx5, misfit};
use crate::error::{Error, Result};
use crate::memory::allocator::{ResourceType, Source};
use crate::memory::barrier::{udma_done_reading, udma_from_device, udma_to_device};
use crate::memory::cq_buffer::{CqBuffer, CqReader, UNWRITTEN};
use crate::memory::doorbell_record::{DoorbellRecord, RecordWord};
use crate::memory::doorbell_register::{DoorbellRegister, DoorbellRegisterWord};
use crate::memory::queue_layout::CqLayout;
use crate::memory::queue_memory::QueueMemory;
use crate::provider::poll_gate::PollGate;
use crate::provider::{self, CqInitAttr, CreateRequest, CreatedCq, Execute, ResizeRequest};
use crate::sync::fork::Epoch;
use crate::uverbs::command::Command;
use crate::wc::WcOpcode;
use rustix::io::Errno;
use rustix::param::page_size;
use std::sync::Arc;
use uverbs_uapi::cq::{
    UVERBS_ATTR_CREATE_CQ_BUF_UMEM, UVERBS_ATTR_CREATE_CQ_CQE, UVERBS_METHOD_CQ_CREATE,
};
use uverbs_uapi::mlx5::abi::{
    mlx5_ib_create_cq, mlx5_ib_create_cq_flags, mlx5_ib_create_cq_resp, mlx5_ib_resize_cq,
};
use uverbs_uapi::mlx5::cqe::{
    MLX5_CQ_DB_REQ_NOT, MLX5_CQ_DB_REQ_NOT_SOL, MLX5_CQE_OWNER_MASK, mlx5_cqe_opcode as opcode,
};
use uverbs_uapi::mlx5::object::{
    MLX5_IB_ATTR_CREATE_CQ_DBR_BUF_UMEM, MLX5_IB_ATTR_CREATE_CQ_UAR_INDEX,
};
use uverbs_uapi::object::{UVERBS_ATTR_UHW_IN, UVERBS_ATTR_UHW_OUT, UVERBS_OBJECT_CQ};
use zerocopy::IntoBytes;

/// The user index of no queue pair.
const NOBODY: u32 = 0;

/// The size of a completion queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CqSize {
    /// A power of two; one of them stays free.
    pub(crate) entries: u32,
    /// Bytes of an entry, 64 or 128.
    pub(crate) cqe: u32,
}

/// Indices have 24 bits, and half of their range tells an index ahead from one behind.
pub(super) const MAX_CQE: u32 = (1 << 22) - 1;

impl CqSize {
    pub(crate) fn new(
        max_cqe: u32,
        cqe: u32,
        cqe_size: u32,
    ) -> std::result::Result<CqSize, String> {
        if cqe_size != 64 && cqe_size != 128 {
            return Err(format!("completions of {cqe_size} bytes; there are 64 and 128"));
        }
        let most = max_cqe.min(MAX_CQE);
        if cqe > most {
            return Err(format!("{cqe} entries; the maximum is {most}"));
        }
        let entries = (u64::from(cqe) + 1).next_power_of_two();
        Ok(CqSize { entries: entries as u32, cqe: cqe_size })
    }

    pub(crate) fn bytes(&self) -> usize {
        self.entries as usize * self.cqe as usize
    }
}

/// Creates a completion queue: its size, its memory, the driver's part of the command, and the ring.
///
/// Pairs with `create_cq_user` in `hw/mlx5/cq.c`, which pins the memory that is named here.
pub(super) fn create(
    mlx5: &Mlx5,
    attr: CqInitAttr,
    source: Source<'_>,
    execute: Execute<'_>,
) -> Result<CreatedCq> {
    let size = CqSize::new(mlx5.limits.max_cqe, attr.cqe, attr.cqe_size)
        .map_err(|detail| Error::invalid(source.verb, detail))?;
    if attr.pad && size.cqe != 128 {
        let detail = format!("completions of {} bytes have nothing to pad", size.cqe);
        return Err(Error::invalid(source.verb, detail));
    }
    if attr.real_time && !mlx5.limits.real_time {
        return Err(Error::new(source.verb, Errno::OPNOTSUPP)
            .detail("the device has no clock of real time: its timestamps are ticks"));
    }
    let (memory, buffer) = alloc_buffer(size, &source)?;
    let dbrec = mlx5.doorbell_record(&source)?;
    let gate = mlx5.gate(&dbrec, source.verb)?;
    let (arming, page_id) = mlx5.registers.arming();

    let memory_dmabuf = dmabuf(&memory);
    let dbrec_dmabuf = dbrec.memory().and_then(dmabuf);
    let mut request = mlx5_ib_create_cq {
        buf_addr: if memory_dmabuf.is_some() { 0 } else { memory.addr() },
        db_addr: if dbrec_dmabuf.is_some() { 0 } else { dbrec.addr() },
        cqe_size: size.cqe,
        ..Default::default()
    };
    let mut flags = mlx5_ib_create_cq_flags::empty();
    flags.set(mlx5_ib_create_cq_flags::MLX5_IB_CREATE_CQ_FLAGS_CQE_128B_PAD, attr.pad);
    flags.set(mlx5_ib_create_cq_flags::MLX5_IB_CREATE_CQ_FLAGS_REAL_TIME_TS, attr.real_time);
    let short_page_id = u16::try_from(page_id).ok();
    if let Some(index) = short_page_id {
        flags |= mlx5_ib_create_cq_flags::MLX5_IB_CREATE_CQ_FLAGS_UAR_PAGE_INDEX;
        request.uar_page_index = index;
    }
    request.flags = flags.bits();
    let mut response = mlx5_ib_create_cq_resp::default();
    let mut command = Command::new(UVERBS_OBJECT_CQ, UVERBS_METHOD_CQ_CREATE);
    command
        .u32(UVERBS_ATTR_CREATE_CQ_CQE, size.entries - 1)
        .input_if(UVERBS_ATTR_CREATE_CQ_BUF_UMEM, memory_dmabuf.as_ref())
        .input_if(MLX5_IB_ATTR_CREATE_CQ_DBR_BUF_UMEM, dbrec_dmabuf.as_ref())
        .input(UVERBS_ATTR_UHW_IN, &request)
        .output(UVERBS_ATTR_UHW_OUT, &mut response);
    // A page number that does not fit into the request is an attribute (Linux 6.11).
    if short_page_id.is_none() {
        command.u32(MLX5_IB_ATTR_CREATE_CQ_UAR_INDEX, page_id);
    }
    let (pinned, held) = (memory.len(), Arc::new(Mlx5Resources::new(&dbrec, Some(memory))));
    let resources: provider::QueueResources = Some(held.clone());
    let has_dmabuf = memory_dmabuf.is_some() || dbrec_dmabuf.is_some();
    execute(CreateRequest { command, pinned, resources })
        .map_err(|error| explain_dmabuf(error, has_dmabuf))?;

    let mut ring = Mlx5Cq::new(buffer, dbrec, PollGate::new(gate), arming, response.cqn);
    ring.max_cqe = mlx5.limits.max_cqe;
    ring.held = Some(held);
    let members = ring.registry().clone();
    Ok(CreatedCq { ring: provider::CqRing::Mlx5(ring), members })
}

/// Memory for a ring of unwritten CQEs.
fn alloc_buffer(size: CqSize, source: &Source<'_>) -> Result<(Arc<QueueMemory>, CqBuffer)> {
    let bytes = size.bytes().next_multiple_of(page_size());
    let memory = Arc::new(source.alloc(bytes, page_size(), ResourceType::MLX5_CQ)?);
    let buffer = prepare(&memory, size.entries, size.cqe as usize);
    Ok((memory, buffer.ok_or_else(|| misfit(source.verb))?))
}

/// Lays out `entries` CQEs of `size` bytes and marks them as unwritten; `None` unless they fit into `memory`, are a
/// power of two, and of 64 or 128 bytes. To be called before the device knows the ring.
pub(crate) fn prepare(memory: &Arc<QueueMemory>, entries: u32, size: usize) -> Option<CqBuffer> {
    let cqes = CqBuffer::new(memory.clone(), entries, size)?;
    for entry in 0..entries {
        cqes.at(entry).mark_unwritten();
    }
    Some(cqes)
}

/// The poller's side of a completion queue.
#[derive(Debug)]
pub(crate) struct Mlx5Cq {
    // Declared first, so that the record is dropped before the memory, as in [`Mlx5Resources`].
    consumed: RecordWord<0>,
    armed: RecordWord<1>,
    reader: CqReader,
    epoch: Epoch,
    /// The queue's number, in the byte order and place of the second half of a doorbell word.
    cqn: u64,
    arming: DoorbellRegisterWord,
    registry: Arc<QpRegistry>,
    table: QpTable,
    /// Foreign code polls the queue, and has consumed CQEs that the reader has not.
    is_foreign: bool,
    /// Most completions that the device takes in one queue.
    max_cqe: u32,
    /// The completion that [`take_other`](Self::take_other) found.
    odd: FoundCqe,
    /// The resources that the kernel's object holds; a resize exchanges the memory.
    held: Option<Arc<Mlx5Resources>>,
}

/// The fields of a CQE that every poll reads.
#[derive(Clone, Copy, Debug, Default)]
struct FoundCqe {
    /// The queue pair's user index.
    uidx: u32,
    wr_id: u64,
    /// The opcode of the completion.
    kind: WcOpcode,
    op_own: u8,
}

impl Mlx5Cq {
    /// A poller of the CQEs that [`prepare`] laid out.
    pub(crate) fn new(
        cqes: CqBuffer,
        dbrec: Arc<DoorbellRecord>,
        poll_gate: PollGate,
        arming: &Arc<DoorbellRegister>,
        cqn: u32,
    ) -> Mlx5Cq {
        Mlx5Cq {
            epoch: cqes.epoch(),
            reader: CqReader::new(cqes, 0),
            cqn: pair(0, cqn),
            consumed: dbrec.word(),
            armed: dbrec.word(),
            arming: arming.word(),
            registry: QpRegistry::new(poll_gate),
            table: QpTable::default(),
            is_foreign: false,
            max_cqe: MAX_CQE,
            odd: FoundCqe::default(),
            held: None,
        }
    }

    /// The queue, for foreign code, which polls it until [`resume`](Self::resume).
    pub(crate) fn lend(&mut self, events: u32) -> CqLayout {
        self.is_foreign = true;
        let cqes = self.reader.cqes();
        CqLayout {
            cqn: u64::from_be(self.cqn) as u32,
            buf: cqes.as_ptr(),
            cqe_count: cqes.count(),
            cqe_size: cqes.size() as u32,
            dbrec: self.consumed.record().as_ptr(),
            arm: self.arming.as_ptr(),
            consumer: self.consumer(),
            events,
        }
    }

    /// Goes on with the CQE `consumer`, behind those that foreign code consumed.
    pub(crate) fn resume(&mut self, consumer: u32) {
        self.is_foreign = false;
        self.move_to(consumer);
    }

    /// Lets the next arming name the CQE `consumer`.
    pub(crate) fn move_to(&mut self, consumer: u32) {
        self.reader = CqReader::new(self.reader.cqes().clone(), consumer);
    }

    /// The list where the control path adds and retires queue pairs.
    pub(crate) fn registry(&self) -> &Arc<QpRegistry> {
        &self.registry
    }

    /// Drops the updates of queue pairs that were created and destroyed since the last poll. The borrow
    /// keeps the poller away meanwhile.
    pub(crate) fn compact_updates(&self) {
        if !self.epoch.is_over() {
            self.registry.compact_updates(|| self.is_foreign || self.reader.is_empty());
        }
    }

    /// The consumer index, of 24 bits.
    #[inline(always)]
    pub(crate) fn consumer(&self) -> u32 {
        self.reader.consumer()
    }

    /// Bytes of a CQE.
    pub(crate) fn cqe_size(&self) -> usize {
        self.reader.cqes().size()
    }

    /// The number of CQEs.
    pub(crate) fn entries(&self) -> u32 {
        self.reader.cqes().count()
    }

    /// The number of completions that fit, as the kernel counts them: one CQE stays free for the
    /// RESIZE_CQ mark that ends the old ring.
    pub(crate) fn capacity(&self) -> u32 {
        self.entries() - 1
    }

    /// Tells whether the poller has to [catch up](Self::catch_up).
    pub(crate) fn poll_gate(&self) -> &PollGate {
        &self.registry.poll_gate
    }

    /// Reads the control path's updates of queue pairs. Not to be called in a forked child.
    pub(crate) fn catch_up(&mut self) {
        if self.registry.poll_gate.is_quiet() {
            return;
        }
        self.registry.poll_gate.clear();
        self.apply_updates();
        self.forget();
        if self.table.has_retired() {
            // Their completions may be consumed by the next poll.
            self.registry.poll_gate.mark_dirty();
        }
    }

    /// Applies the updates of the control path to the table, if there are any.
    fn apply_updates(&mut self) {
        if !self.registry.is_empty() {
            let entries = self.reader.cqes().count();
            self.table.apply_updates(&self.registry, self.reader.consumer(), entries);
        }
    }

    fn forget(&mut self) {
        // Checked after the updates were read: a queue pair that is gone has written all its completions.
        let empty = self.reader.is_empty();
        self.table.forget(self.reader.consumer(), empty);
    }

    /// The next completion, consumed.
    #[inline(always)]
    pub(crate) fn next(&mut self) -> Option<Mlx5Wc<'_>> {
        let op_own = self.reader.next_op_own()?;
        // Pairs with the device writing the last byte of a CQE after all others.
        udma_from_device();
        let found = match self.take_success(op_own) {
            Some(found) => found,
            None if self.take_other(op_own) => self.odd,
            None => return None,
        };
        Some(self.wc(found))
    }

    /// The next completion, consumed, if it is a success of a queue pair in the table.
    #[inline(always)]
    pub(crate) fn next_success(&mut self) -> Option<Mlx5Wc<'_>> {
        let op_own = self.reader.next_op_own()?;
        // As in `next`.
        udma_from_device();
        let found = self.take_success(op_own)?;
        Some(self.wc(found))
    }

    #[inline(always)]
    fn wc(&self, found: FoundCqe) -> Mlx5Wc<'_> {
        let FoundCqe { uidx, wr_id, kind, op_own } = found;
        Mlx5Wc { uidx, wr_id, kind, op_own, reader: &self.reader }
    }

    /// Consumes the next CQE if it is a success of a queue pair in the table.
    #[inline(always)]
    fn take_success(&mut self, op_own: u8) -> Option<FoundCqe> {
        let table = &self.table;
        self.reader.consume(|cqe| {
            let uidx = uidx_of(cqe);
            let qp = table.get(uidx)?;
            // The arrays of work request ids have no more entries than these 16 bits name.
            let at = cqe.low16::<COUNTER>();
            // Compares opcodes in the upper bits of `op_own`, without a shift.
            if op_own < op_own_above(opcode::MLX5_CQE_REQ) {
                let sent = qp.sends.complete(at);
                let (wr_id, kind) = (sent.wr_id, WcOpcode(sent.kind));
                Some(FoundCqe { uidx, wr_id, kind, op_own })
            } else if op_own < op_own_above(opcode::MLX5_CQE_RESP_SEND_INV) {
                let wr_id = qp.receives.complete(at);
                Some(FoundCqe { uidx, wr_id, kind: received(op_own), op_own })
            } else {
                None
            }
        })
    }

    /// Consumes the next completion if the next CQE is not as [`take_success`](Self::take_success) takes it: it
    /// is an error, names no queue pair in the table, is no completion, or is unwritten. Leaves the completion in
    /// `odd`, as a result of this size would be returned through memory of the caller.
    #[cold]
    #[inline(never)]
    fn take_other(&mut self, mut op_own: u8) -> bool {
        loop {
            if op_own >= UNWRITTEN {
                return false;
            }
            let mut found = self.take_written(op_own);
            if found.is_none() {
                let Some(next) = self.reader.next_op_own() else { return false };
                // As in `next`.
                udma_from_device();
                op_own = next;
                found = self.take_success(op_own);
            }
            if let Some(found) = found {
                self.odd = found;
                return true;
            }
        }
    }

    /// Consumes the next CQE, which is as [`take_other`](Self::take_other) says, and was written; `None` if the
    /// program gets no completion of it.
    fn take_written(&mut self, op_own: u8) -> Option<FoundCqe> {
        let code = opcode_of(op_own);
        let cqe = self.reader.next();
        let uidx = uidx_of(cqe);
        let at = u32::from(cqe.be16::<COUNTER>());
        if self.table.get(uidx).is_none() {
            // The queue pair may have been created since this poll began.
            self.apply_updates();
            self.forget();
        }
        let sent = matches!(code, opcode::MLX5_CQE_REQ | opcode::MLX5_CQE_REQ_ERR);
        self.reader.advance();
        match self.table.get(uidx) {
            Some(qp) if sent => {
                let sent = qp.sends.complete(at);
                let (wr_id, kind) = (sent.wr_id, WcOpcode(sent.kind));
                Some(FoundCqe { uidx, wr_id, kind, op_own })
            }
            Some(qp) if is_receive(code) => {
                let wr_id = qp.receives.complete(at);
                Some(FoundCqe { uidx, wr_id, kind: received(op_own), op_own })
            }
            known => {
                if known.is_none() && is_receive(code) {
                    self.table.discard(uidx, at);
                }
                // If no other completion follows, no poll would return this CQE to the device.
                self.release_here();
                None
            }
        }
    }

    /// As [`release`](Self::release); nothing in a forked child.
    #[inline]
    pub(crate) fn release_here(&self) {
        if !self.poll_gate().gate().is_shut() {
            self.release();
        }
    }

    /// Gives consumed CQEs back to the device. Not in a forked child, where the record may be the
    /// parent's.
    #[inline(always)]
    pub(crate) fn release(&self) {
        // Pairs with the device overwriting CQEs after the record gave them back.
        udma_done_reading();
        self.consumed.set(self.reader.consumer());
    }

    /// Arms the queue: the next completion, or the next solicited one or error, raises an event. `arm_sn` has in bits
    /// 28 and 29 the count of this queue's events that were read from its channel. Returns the word of the register.
    #[inline(always)]
    pub(crate) fn arm(&self, solicited: bool, arm_sn: u32) -> u64 {
        let command = if solicited { MLX5_CQ_DB_REQ_NOT_SOL } else { MLX5_CQ_DB_REQ_NOT };
        let word = arm_sn | command | self.reader.consumer();
        self.armed.set(word);
        // The write of the register begins with a barrier, which orders it after the doorbell record.
        let word = pair(word, 0) | self.cqn;
        self.arming.ring(word);
        word
    }

    /// As [`arm`](Self::arm), where the device is in this process.
    #[cold]
    pub(crate) fn arm_hosted(&self, solicited: bool, arm_sn: u32) {
        let word = self.arm(solicited, arm_sn);
        self.arming.tell(word);
    }

    /// Turns this into a queue with the consumer index `consumer`.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn pretend(&mut self, cqn: u32, consumer: u32) {
        self.cqn = pair(0, cqn);
        self.reader = CqReader::new(self.reader.cqes().clone(), consumer);
    }

    /// A fake device that writes completions; only for a ring without any.
    #[cfg(test)]
    pub(crate) fn device(&self) -> super::fake_device::FakeCq {
        let (cqes, dbrec) = (self.reader.cqes(), self.consumed.record().clone());
        super::fake_device::FakeCq::new(cqes.memory(), cqes.count(), cqes.size(), dbrec)
    }

    /// Completions that are there to be consumed.
    pub(crate) fn pending(&self) -> u32 {
        self.reader.written().count() as u32
    }

    /// Clears the user index in the CQEs of a queue pair that the kernel reset, so that the poller discards
    /// them. Frees the WQEs of its shared receive queue that these CQEs name.
    pub(crate) fn purge(&mut self, qp: &SharedQp) {
        self.apply_updates();
        let uidx = qp.uidx().get();
        for (_, cqe) in self.reader.written() {
            udma_from_device();
            if uidx_of(cqe) != uidx {
                continue;
            }
            if let (true, Some(srq_wr_ids)) = (is_receive(opcode_of(cqe.op_own())), qp.srq_wr_ids())
            {
                srq_wr_ids.complete(cqe.be16::<COUNTER>().into());
            }
            cqe.set_be32::<UIDX>(NOBODY);
        }
    }

    /// Moves the queue to memory for at least `cqe` completions, and keeps those that are in it. Nothing
    /// happens if the queue has that size already: the kernel would report success and leave the device
    /// where it is.
    ///
    /// Pairs with `mlx5_ib_resize_cq` in `hw/mlx5/cq.c`.
    pub(crate) fn resize(
        &mut self,
        cqe: u32,
        source: Source<'_>,
        execute: impl FnOnce(ResizeRequest<'_>) -> Result<()>,
    ) -> Result<()> {
        let size = CqSize::new(self.max_cqe, cqe, self.cqe_size() as u32)
            .map_err(|detail| Error::invalid(source.verb, detail))?;
        if size.entries == self.entries() {
            return Ok(());
        }
        let (memory, buffer) = alloc_buffer(size, &source)?;
        let request = mlx5_ib_resize_cq {
            buf_addr: memory.addr(),
            cqe_size: size.cqe as u16,
            ..Default::default()
        };
        let (cqe, pending) = (size.entries - 1, self.pending());
        let (input, output) = (request.as_bytes(), &mut [][..]);
        let resized = execute(ResizeRequest { cqe, pending, pinned: memory.len(), input, output });
        if let Err(error) = resized {
            // The driver pins the memory before it tells the device, and a device that refuses has not
            // moved. After any other error the device may write to either memory, so both are kept.
            let untouched = matches!(error.errno(), Errno::NOMEM | Errno::AGAIN);
            if let (Some(held), false) = (&self.held, untouched || error.is_refusal()) {
                held.keep(memory);
            }
            return Err(error);
        }
        let before = self.held.as_ref().and_then(|held| held.exchange(memory));
        self.exchange(buffer);
        // Dropped only after the ring has left the old memory: this may call the program's allocator.
        drop(before);
        Ok(())
    }

    /// Moves to the ring that the kernel has moved the queue to, and copies the CQEs that are left
    /// in the old ring up to the mark with which the device ended it.
    pub(crate) fn exchange(&mut self, cqes: CqBuffer) {
        let log = cqes.count().trailing_zeros();
        let mut next = self.reader.consumer();
        for (at, cqe) in self.reader.written() {
            udma_from_device();
            let op_own = cqe.op_own();
            if opcode_of(op_own) == opcode::MLX5_CQE_RESIZE_CQ {
                // The mark took an index, so the index of every CQE before it grows by one.
                next = next.wrapping_add(1);
                self.table.moved();
                break;
            }
            let to = at.wrapping_add(1);
            let op_own = op_own & !MLX5_CQE_OWNER_MASK | (to >> log) as u8 & MLX5_CQE_OWNER_MASK;
            cqes.take_over(to, self.reader.cqes(), at, op_own);
        }
        // Pairs with the device's read of the consumer index in the doorbell record: the copied
        // CQEs are stored before it.
        udma_to_device();
        self.reader = CqReader::new(cqes, next);
        self.release();
    }
}

impl Drop for Mlx5Cq {
    fn drop(&mut self) {
        let table = std::mem::take(&mut self.table);
        let reader = (!self.is_foreign).then(|| self.reader.clone());
        self.registry.inherit(Leftover { reader, table });
    }
}
