//! Queue pairs for raw packets: a send queue, a receive queue, and the objects between them and the port.
//!
//! Pairs with `create_raw_packet_qp`, `modify_raw_packet_qp` and `query_raw_packet_qp_state` in `hw/mlx5/qp.c`.

use super::cq::RECORD;
use super::qp::{Asked, WQEBB};
use super::states::{ERR, RESET, SQE};
use super::{Kernel, Switch};
use crate::call::{Call, Result};
use crate::driver::{Driver, about, append_pages, input, quantized_offset, set_uid};
use crate::memory::Lent;
use rustix::io::Errno;
use uverbs_uapi::mlx5::abi::{mlx5_ib_create_qp_resp, mlx5_ib_create_qp_resp_mask, mlx5_qp_flags};
use uverbs_uapi::mlx5::prm::Bits;
use uverbs_uapi::mlx5::prm::object::alloc_transport_domain_out;
use uverbs_uapi::mlx5::prm::opcode;
use uverbs_uapi::mlx5::prm::rqc::*;
use uverbs_uapi::mlx5::prm::srqc::wq;
use uverbs_uapi::qp::ib_uverbs_qp_create_flags;

/// The queues of a queue pair, if it has them.
#[derive(Clone, Debug)]
pub(crate) struct RawQp {
    sq: Option<SendPart>,
    rq: Option<ReceivePart>,
    /// The objects that firmware has, the oldest first: the command that destroys each, and its number.
    left: Vec<(u16, u32)>,
}

#[derive(Clone, Copy, Debug)]
struct SendPart {
    tis: u32,
    sq: u32,
}

#[derive(Clone, Copy, Debug)]
struct ReceivePart {
    rq: u32,
    tir: u32,
}

// States of both kinds of queues.
const RST: u64 = 0;
const RDY: u64 = 1;
const FAILED: u64 = 3;

/// Kinds of work queues: a ring.
const CYCLIC: u64 = 1;
/// Bits of a buffer's beginning in the context of a work queue.
const OFFSET_BITS: u32 = 5;

/// Creates a raw packet queue pair; returns its number, the ranges that it lends to the device, and its queues.
pub(super) fn create(
    kernel: &mut Kernel,
    call: &Call<'_>,
    asked: &Asked,
    response: &mut mlx5_ib_create_qp_resp,
) -> Result<(u32, Lent, RawQp)> {
    let driver_part = &asked.driver_part;
    if driver_part.sq_wqe_count == 0 && driver_part.rq_wqe_count == 0 {
        return Err(Errno::INVAL);
    }
    let domain = kernel.transport_domain(call)?;
    let sends = u64::from(driver_part.sq_wqe_count) * WQEBB;
    let receives = u64::from(driver_part.rq_wqe_count) << driver_part.rq_wqe_shift;
    let ranges = [
        (driver_part.buf_addr, receives, true),
        (driver_part.sq_buf_addr, sends, true),
        (driver_part.db_addr, RECORD, true),
    ];
    let lent = kernel.lend(call, &ranges)?;
    let uid = kernel.file(call.file)?.uid;
    let (driver, switch) = kernel.driver(call.file)?;
    let mut raw = RawQp { sq: None, rq: None, left: Vec::new() };
    let made = raw.make(driver, switch, uid, asked, domain);
    if let Err(errno) = made {
        raw.destroy(driver, switch)?;
        kernel.give_back(call.file, lent)?;
        return Err(errno);
    }
    use mlx5_ib_create_qp_resp_mask as Mask;
    let mut valid = Mask::empty();
    if let Some(SendPart { tis, sq }) = raw.sq {
        (response.tisn, response.sqn) = (tis, sq);
        valid |= Mask::MLX5_IB_CREATE_QP_RESP_MASK_TISN | Mask::MLX5_IB_CREATE_QP_RESP_MASK_SQN;
    }
    if let Some(ReceivePart { rq, tir }) = raw.rq {
        (response.rqn, response.tirn) = (rq, tir);
        valid |= Mask::MLX5_IB_CREATE_QP_RESP_MASK_RQN | Mask::MLX5_IB_CREATE_QP_RESP_MASK_TIRN;
    }
    response.comp_mask = valid.bits();
    let number = raw.sq.map(|part| part.sq).or(raw.rq.map(|part| part.rq));
    Ok((number.ok_or(Errno::INVAL)?, lent, raw))
}

impl RawQp {
    /// The objects of firmware that commands may name: the command that made each, and its number.
    pub(super) fn made(&self) -> impl Iterator<Item = (u16, u32)> {
        let sends = self
            .sq
            .map(|SendPart { tis, sq }| [(opcode::CREATE_TIS, tis), (opcode::CREATE_SQ, sq)]);
        let receives = self
            .rq
            .map(|ReceivePart { rq, tir }| [(opcode::CREATE_RQ, rq), (opcode::CREATE_TIR, tir)]);
        sends.into_iter().chain(receives).flatten()
    }

    /// The TIR, to which rules lead packets.
    pub(super) fn tir(&self) -> Option<u32> {
        self.rq.map(|part| part.tir)
    }

    /// Makes the objects, which belong to the file's user context, so that its commands may name them.
    fn make(
        &mut self,
        driver: &Driver,
        switch: &mut Switch,
        uid: u16,
        asked: &Asked,
        domain: u32,
    ) -> Result<()> {
        let mut create = |mut command: Vec<u8>| {
            set_uid(&mut command, uid);
            driver.execute(switch, &command).map(|answer| Driver::created(&answer))
        };
        if asked.driver_part.sq_wqe_count > 0 {
            let mut command = input::<create_tis_in>(opcode::CREATE_TIS);
            let mut context = command.sub_mut(create_tis_in::ctx);
            context.set(tisc::transport_domain, domain.into());
            let tis = create(command.into_inner())?;
            self.left.push((opcode::DESTROY_TIS, tis));
            let sq = create(send_queue(asked, tis)?)?;
            self.left.push((opcode::DESTROY_SQ, sq));
            self.sq = Some(SendPart { tis, sq });
        }
        if asked.driver_part.rq_wqe_count > 0 {
            let rq = create(receive_queue(asked)?)?;
            self.left.push((opcode::DESTROY_RQ, rq));
            let tir = create(receiver(asked, rq, domain))?;
            self.left.push((opcode::DESTROY_TIR, tir));
            self.rq = Some(ReceivePart { rq, tir });
        }
        Ok(())
    }

    /// Moves both queues as a command would a queue pair.
    pub(super) fn modify(&self, driver: &Driver, switch: &mut Switch, op: u16) -> Result<()> {
        let (rq, sq) = match op {
            opcode::RST2INIT_QP => (Some(RDY), Some(RST)),
            opcode::TO_ERR_QP => (Some(FAILED), Some(FAILED)),
            opcode::TO_RST_QP => (Some(RST), Some(RST)),
            opcode::RTR2RTS_QP | opcode::RTS2RTS_QP => (None, Some(RDY)),
            _ => return Ok(()),
        };
        if let (Some(to), Some(part)) = (rq, self.rq) {
            let from = part.state(driver, switch)?;
            let mut command = input::<modify_rq_in>(opcode::MODIFY_RQ);
            command.set(modify_rq_in::rqn, part.rq.into());
            command.set(modify_rq_in::rq_state, from);
            command.sub_mut(modify_rq_in::ctx).set(rqc::state, to);
            driver.execute(switch, &command.into_inner())?;
        }
        if let (Some(to), Some(part)) = (sq, self.sq) {
            let from = part.state(driver, switch)?;
            let mut command = input::<modify_sq_in>(opcode::MODIFY_SQ);
            command.set(modify_sq_in::sqn, part.sq.into());
            command.set(modify_sq_in::sq_state, from);
            command.sub_mut(modify_sq_in::ctx).set(sqc::state, to);
            driver.execute(switch, &command.into_inner())?;
        }
        Ok(())
    }

    /// The state of the queue pair, by those of its queues; `last` is the state that was set last.
    pub(super) fn state(&self, driver: &Driver, switch: &mut Switch, last: u8) -> Result<u8> {
        let rq = self.rq.map(|part| part.state(driver, switch)).transpose()?;
        let sq = self.sq.map(|part| part.state(driver, switch)).transpose()?;
        match (rq, sq) {
            (Some(RST), Some(RST) | None) | (None, Some(RST)) => Ok(RESET),
            (Some(RDY), Some(FAILED)) => Ok(SQE),
            (Some(RDY), _) | (None, Some(_)) => Ok(last),
            (Some(FAILED), Some(FAILED) | None) => Ok(ERR),
            _ => Err(Errno::INVAL),
        }
    }

    /// Destroys the objects that are left. A call that fails is called again: a program's virtqueue may hold the TIS.
    pub(super) fn destroy(&mut self, driver: &Driver, switch: &mut Switch) -> Result<()> {
        while let Some((op, number)) = self.left.last().copied() {
            driver.execute_on(switch, op, number)?;
            self.left.pop();
        }
        Ok(())
    }
}

impl SendPart {
    fn state(self, driver: &Driver, switch: &mut Switch) -> Result<u64> {
        let answer = driver.execute_on(switch, opcode::QUERY_SQ, self.sq)?;
        let answer = Bits::<query_sq_out, _>::new(answer);
        Ok(answer.sub(query_sq_out::sq_context).get(sqc::state))
    }
}

impl ReceivePart {
    fn state(self, driver: &Driver, switch: &mut Switch) -> Result<u64> {
        let answer = driver.execute_on(switch, opcode::QUERY_RQ, self.rq)?;
        let answer = Bits::<query_rq_out, _>::new(answer);
        Ok(answer.sub(query_rq_out::rq_context).get(rqc::state))
    }
}

/// CREATE_SQ.
fn send_queue(asked: &Asked, tis: u32) -> Result<Vec<u8>> {
    let driver_part = &asked.driver_part;
    let (page_offset, log_page_size) = quantized_offset(driver_part.sq_buf_addr, OFFSET_BITS)?;
    let mut command = input::<create_sq_in>(opcode::CREATE_SQ);
    let mut context = command.sub_mut(create_sq_in::ctx);
    for (field, value) in [
        (sqc::state, RST),
        (sqc::user_index, driver_part.uidx.into()),
        (sqc::cqn, asked.send_cq.into()),
        (sqc::ts_format, asked.timestamps[0]),
        (sqc::tis_lst_sz, 1),
        (sqc::tis_num_0, tis.into()),
    ] {
        context.set(field, value);
    }
    let mut queue = context.sub_mut(sqc::wq);
    for (field, value) in [
        (wq::wq_type, CYCLIC),
        (wq::pd, asked.pd.into()),
        (wq::uar_page, driver_part.bfreg_index.into()),
        (wq::dbr_addr, driver_part.db_addr),
        (wq::log_wq_stride, WQEBB.ilog2().into()),
        (wq::log_wq_sz, driver_part.sq_wqe_count.ilog2().into()),
        (wq::log_wq_pg_sz, log_page_size),
        (wq::page_offset, page_offset),
    ] {
        queue.set(field, value);
    }
    let mut command = command.into_inner();
    let bytes = u64::from(driver_part.sq_wqe_count) * WQEBB;
    append_pages(&mut command, driver_part.sq_buf_addr, bytes, log_page_size);
    Ok(command)
}

/// CREATE_RQ.
fn receive_queue(asked: &Asked) -> Result<Vec<u8>> {
    let driver_part = &asked.driver_part;
    let (page_offset, log_page_size) = quantized_offset(driver_part.buf_addr, OFFSET_BITS)?;
    let strips = ib_uverbs_qp_create_flags::IB_UVERBS_QP_CREATE_CVLAN_STRIPPING;
    let mut command = input::<create_rq_in>(opcode::CREATE_RQ);
    let mut context = command.sub_mut(create_rq_in::ctx);
    for (field, value) in [
        // VLAN tags stay in the packet.
        (rqc::vsd, (!asked.flags.contains(strips)).into()),
        (rqc::state, RST),
        (rqc::user_index, driver_part.uidx.into()),
        (rqc::cqn, asked.recv_cq.into()),
        (rqc::ts_format, asked.timestamps[1]),
    ] {
        context.set(field, value);
    }
    let mut queue = context.sub_mut(rqc::wq);
    for (field, value) in [
        (wq::wq_type, CYCLIC),
        (wq::pd, asked.pd.into()),
        (wq::dbr_addr, driver_part.db_addr),
        (wq::log_wq_stride, driver_part.rq_wqe_shift.into()),
        (wq::log_wq_sz, driver_part.rq_wqe_count.ilog2().into()),
        (wq::log_wq_pg_sz, log_page_size),
        (wq::page_offset, page_offset),
    ] {
        queue.set(field, value);
    }
    let mut command = command.into_inner();
    let bytes = u64::from(driver_part.rq_wqe_count) << driver_part.rq_wqe_shift;
    append_pages(&mut command, driver_part.buf_addr, bytes, log_page_size);
    Ok(command)
}

/// CREATE_TIR: packets go to one queue. Packets that the context itself sent are left out, unless it asks for them.
fn receiver(asked: &Asked, rq: u32, domain: u32) -> Vec<u8> {
    const BLOCK_UNICAST: u64 = 1;
    const BLOCK_MULTICAST: u64 = 2;
    let flags = mlx5_qp_flags::from_bits_retain(asked.driver_part.flags);
    let mut blocked = BLOCK_UNICAST | BLOCK_MULTICAST;
    if flags.contains(mlx5_qp_flags::MLX5_QP_FLAG_TIR_ALLOW_SELF_LB_UC) {
        blocked &= !BLOCK_UNICAST;
    }
    if flags.contains(mlx5_qp_flags::MLX5_QP_FLAG_TIR_ALLOW_SELF_LB_MC) {
        blocked &= !BLOCK_MULTICAST;
    }
    let mut command = input::<create_tir_in>(opcode::CREATE_TIR);
    let mut context = command.sub_mut(create_tir_in::ctx);
    context.set(tirc::disp_type, 0);
    context.set(tirc::inline_rqn, rq.into());
    context.set(tirc::transport_domain, domain.into());
    context.set(tirc::self_lb_block, blocked);
    command.into_inner()
}

impl Kernel {
    /// The transport domain of a file's context, which is made for its first queue pair of this kind.
    fn transport_domain(&mut self, call: &Call<'_>) -> Result<u32> {
        if let Some(number) = self.file(call.file)?.transport_domain {
            return Ok(number);
        }
        let mut command = about(opcode::ALLOC_TRANSPORT_DOMAIN, 0);
        set_uid(&mut command, self.file(call.file)?.uid);
        let (driver, switch) = self.driver(call.file)?;
        let answer = driver.execute(switch, &command)?;
        let answer = Bits::<alloc_transport_domain_out, _>::new(answer);
        let number = answer.get32(alloc_transport_domain_out::transport_domain);
        self.file_mut(call.file)?.transport_domain = Some(number);
        Ok(number)
    }
}
