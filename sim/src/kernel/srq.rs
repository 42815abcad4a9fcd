//! Shared receive queues. Pairs with `core/uverbs_std_types_srq.c` and `hw/mlx5/srq.c`.

use super::cq::RECORD;
use super::{FileId, Kernel, Method, Object, Place, Write, destroying, end_reports};
use crate::call::{Call, Result};
use crate::driver::{Srq, append_pages, input, quantized_offset};
use rustix::io::Errno;
use uverbs_connectx::format::event::Subject;
use uverbs_uapi::mlx5::abi::{mlx5_ib_create_srq, mlx5_ib_create_srq_resp};
use uverbs_uapi::mlx5::prm::Bits;
use uverbs_uapi::mlx5::prm::opcode;
use uverbs_uapi::mlx5::prm::srqc::{
    arm_xrc_srq_in, create_rmp_in, create_xrc_srq_in, modify_rmp_in, query_rmp_out,
    query_xrc_srq_out, rmp_bitmask, rmpc, wq, xrc_srqc,
};
use uverbs_uapi::object::{UVERBS_ATTR_UHW_IN, UVERBS_ATTR_UHW_OUT, UVERBS_OBJECT_SRQ};
use uverbs_uapi::srq::*;
use uverbs_uapi::write::{IB_USER_VERBS_CMD_MODIFY_SRQ, IB_USER_VERBS_CMD_QUERY_SRQ};

pub(super) const METHODS: &[Method] = &[
    destroying(UVERBS_OBJECT_SRQ, UVERBS_METHOD_SRQ_DESTROY),
    Method {
        object: UVERBS_OBJECT_SRQ,
        method: UVERBS_METHOD_SRQ_CREATE,
        attrs: &[
            UVERBS_ATTR_CREATE_SRQ_HANDLE,
            UVERBS_ATTR_CREATE_SRQ_PD_HANDLE,
            UVERBS_ATTR_CREATE_SRQ_XRCD_HANDLE,
            UVERBS_ATTR_CREATE_SRQ_CQ_HANDLE,
            UVERBS_ATTR_CREATE_SRQ_USER_HANDLE,
            UVERBS_ATTR_CREATE_SRQ_MAX_WR,
            UVERBS_ATTR_CREATE_SRQ_MAX_SGE,
            UVERBS_ATTR_CREATE_SRQ_LIMIT,
            UVERBS_ATTR_CREATE_SRQ_MAX_NUM_TAGS,
            UVERBS_ATTR_CREATE_SRQ_TYPE,
            UVERBS_ATTR_CREATE_SRQ_EVENT_FD,
            UVERBS_ATTR_CREATE_SRQ_RESP_MAX_WR,
            UVERBS_ATTR_CREATE_SRQ_RESP_MAX_SGE,
            UVERBS_ATTR_CREATE_SRQ_RESP_SRQ_NUM,
            UVERBS_ATTR_UHW_IN,
            UVERBS_ATTR_UHW_OUT,
        ],
        run: create,
    },
];

pub(super) const WRITES: &[Write] = &[
    Write { command: IB_USER_VERBS_CMD_MODIFY_SRQ, run: modify },
    Write { command: IB_USER_VERBS_CMD_QUERY_SRQ, run: query },
];

/// The most segments of a receive.
pub(super) const MAX_SGE: u32 = 31;
/// Bytes of a segment of a WQE.
const SEGMENT: u32 = 16;

fn create(kernel: &mut Kernel, call: &mut Call<'_>) -> Result<()> {
    // Linux checks handles before values.
    let pd_handle = call.handle(UVERBS_ATTR_CREATE_SRQ_PD_HANDLE)?;
    let pd = kernel.pd(call.file, pd_handle)?;
    let kind = call.u64_if(UVERBS_ATTR_CREATE_SRQ_TYPE).ok_or(Errno::INVAL)? as u32;
    let is_xrc = match ib_uverbs_srq_type(kind) {
        ib_uverbs_srq_type::IB_UVERBS_SRQT_BASIC => false,
        ib_uverbs_srq_type::IB_UVERBS_SRQT_XRC => true,
        // The device matches no tags.
        ib_uverbs_srq_type::IB_UVERBS_SRQT_TM => {
            call.handle_if(UVERBS_ATTR_CREATE_SRQ_CQ_HANDLE).ok_or(Errno::NOENT)?;
            return Err(Errno::OPNOTSUPP);
        }
        _ => return Err(Errno::INVAL),
    };
    let mut uses = vec![pd_handle];
    let mut domain = None;
    if is_xrc {
        let xrcd = call.handle_if(UVERBS_ATTR_CREATE_SRQ_XRCD_HANDLE).ok_or(Errno::NOENT)?;
        let cq = call.handle_if(UVERBS_ATTR_CREATE_SRQ_CQ_HANDLE).ok_or(Errno::NOENT)?;
        domain = Some((kernel.xrcd(call.file, xrcd)?, kernel.cq(call.file, cq)?));
        uses.extend([xrcd, cq]);
    }
    let max_wr = call.u32(UVERBS_ATTR_CREATE_SRQ_MAX_WR)?;
    let max_sge = call.u32(UVERBS_ATTR_CREATE_SRQ_MAX_SGE)?;
    let limit = call.u32_if(UVERBS_ATTR_CREATE_SRQ_LIMIT).unwrap_or(0);
    if max_wr > kernel.limits(call.file)?.srq_wr || max_sge > MAX_SGE {
        return Err(Errno::INVAL);
    }
    let driver_part: mlx5_ib_create_srq = call.driver()?;
    let entries = (max_wr + 1).next_power_of_two();
    let stride = (SEGMENT + max_sge * SEGMENT).max(2 * SEGMENT).next_power_of_two();
    let user_handle = call.u64_if(UVERBS_ATTR_CREATE_SRQ_USER_HANDLE).unwrap_or(0);
    let bytes = u64::from(entries) * u64::from(stride);
    let command = match domain {
        Some((xrcd, cq)) => xrc_command(&driver_part, (entries, stride), limit, [pd, xrcd, cq])?,
        None => basic_command(&driver_part, (entries, stride), limit, pd)?,
    };
    let ranges = [(driver_part.buf_addr, bytes, true), (driver_part.db_addr, RECORD, true)];
    let events = kernel.reports_events(call, UVERBS_ATTR_CREATE_SRQ_EVENT_FD, user_handle)?;
    let (number, lent) = kernel.create_with(call, &command, &ranges)?;
    let events = events.map(Place::attach);
    let srq = Srq { events, max_wr: entries - 1, max_sge, is_xrc };
    kernel.driver(call.file)?.0.srqs.insert(number, srq);
    let handle = kernel.add_lending(call.file, Object::Srq { number }, &uses, lent)?;
    call.made(UVERBS_ATTR_CREATE_SRQ_HANDLE, handle);
    call.put(UVERBS_ATTR_CREATE_SRQ_RESP_MAX_WR, &(entries - 1));
    call.put(UVERBS_ATTR_CREATE_SRQ_RESP_MAX_SGE, &max_sge);
    call.put(UVERBS_ATTR_CREATE_SRQ_RESP_SRQ_NUM, &number);
    call.respond_driver(&mlx5_ib_create_srq_resp { srqn: number, reserved: 0 });
    Ok(())
}

/// The command that creates a queue of `entries` of `stride` bytes for any transport but XRC.
fn basic_command(
    driver_part: &mlx5_ib_create_srq,
    (entries, stride): (u32, u32),
    limit: u32,
    pd: u32,
) -> Result<Vec<u8>> {
    let (page_offset, log_page_size) = quantized_offset(driver_part.buf_addr, 5)?;
    let mut command = input::<create_rmp_in>(opcode::CREATE_RMP);
    let mut context = command.sub_mut(create_rmp_in::ctx);
    context.set(rmpc::state, 1);
    let mut queue = context.sub_mut(rmpc::wq);
    for (field, value) in [
        (wq::wq_type, 0),
        (wq::page_offset, page_offset),
        (wq::log_wq_pg_sz, log_page_size),
        (wq::lwm, limit.into()),
        (wq::pd, pd.into()),
        (wq::dbr_addr, driver_part.db_addr),
        (wq::log_wq_stride, stride.ilog2().into()),
        (wq::log_wq_sz, entries.ilog2().into()),
    ] {
        queue.set(field, value);
    }
    let mut command = command.into_inner();
    let bytes = u64::from(entries) * u64::from(stride);
    append_pages(&mut command, driver_part.buf_addr, bytes, log_page_size);
    Ok(command)
}

/// The command that creates a queue for XRC, in a PD, an XRC domain and with a CQ.
fn xrc_command(
    driver_part: &mlx5_ib_create_srq,
    (entries, stride): (u32, u32),
    limit: u32,
    [pd, xrcd, cq]: [u32; 3],
) -> Result<Vec<u8>> {
    let (page_offset, log_page_size) = quantized_offset(driver_part.buf_addr, 6)?;
    let mut command = input::<create_xrc_srq_in>(opcode::CREATE_XRC_SRQ);
    let mut context = command.sub_mut(create_xrc_srq_in::xrc_srq_context_entry);
    for (field, value) in [
        (xrc_srqc::log_xrc_srq_size, entries.ilog2().into()),
        (xrc_srqc::log_rq_stride, (stride.ilog2() - 4).into()),
        (xrc_srqc::xrcd, xrcd.into()),
        (xrc_srqc::page_offset, page_offset),
        (xrc_srqc::cqn, cq.into()),
        (xrc_srqc::log_page_size, log_page_size),
        (xrc_srqc::user_index, driver_part.uidx.into()),
        (xrc_srqc::pd, pd.into()),
        (xrc_srqc::lwm, limit.into()),
        (xrc_srqc::db_record_addr_h, driver_part.db_addr >> 32),
        (xrc_srqc::db_record_addr_l, (driver_part.db_addr & 0xffff_ffff) >> 2),
    ] {
        context.set(field, value);
    }
    let mut command = command.into_inner();
    let bytes = u64::from(entries) * u64::from(stride);
    append_pages(&mut command, driver_part.buf_addr, bytes, log_page_size);
    Ok(command)
}

fn modify(kernel: &mut Kernel, call: &mut Call<'_>) -> Result<()> {
    let request: ib_uverbs_modify_srq = call.core()?;
    let number = kernel.srq(call.file, request.srq_handle)?;
    let given = ib_srq_attr_mask::from_bits_retain(request.attr_mask);
    if given.contains(ib_srq_attr_mask::IB_SRQ_MAX_WR) {
        // The driver resizes none.
        return Err(Errno::INVAL);
    }
    let (driver, switch) = kernel.driver(call.file)?;
    let Some(srq) = driver.srqs.get_mut(&number) else { return Err(Errno::INVAL) };
    if !given.contains(ib_srq_attr_mask::IB_SRQ_LIMIT) {
        return Ok(());
    }
    if request.srq_limit > srq.max_wr {
        return Err(Errno::INVAL);
    }
    let command = if srq.is_xrc {
        let mut command = input::<arm_xrc_srq_in>(opcode::ARM_XRC_SRQ);
        command.set(arm_xrc_srq_in::xrc_srqn, number.into());
        command.set(arm_xrc_srq_in::lwm, request.srq_limit.into());
        command.into_inner()
    } else {
        let mut command = input::<modify_rmp_in>(opcode::MODIFY_RMP);
        command.set(modify_rmp_in::rmpn, number.into());
        command.sub_mut(modify_rmp_in::bitmask).set(rmp_bitmask::lwm, 1);
        let mut context = command.sub_mut(modify_rmp_in::ctx);
        context.set(rmpc::state, 1);
        context.sub_mut(rmpc::wq).set(wq::lwm, request.srq_limit.into());
        command.into_inner()
    };
    driver.execute(switch, &command).map(drop)
}

fn query(kernel: &mut Kernel, call: &mut Call<'_>) -> Result<()> {
    let request: ib_uverbs_query_srq = call.core()?;
    let number = kernel.srq(call.file, request.srq_handle)?;
    let (driver, switch) = kernel.driver(call.file)?;
    let Some(srq) = driver.srqs.get(&number) else { return Err(Errno::INVAL) };
    // Firmware ends a limit when it reports that it is reached.
    let limit = match srq.is_xrc {
        true => {
            let answer = driver.execute_on(switch, opcode::QUERY_XRC_SRQ, number)?;
            let answer = Bits::<query_xrc_srq_out, _>::new(answer);
            answer.sub(query_xrc_srq_out::xrc_srq_context_entry).get32(xrc_srqc::lwm)
        }
        false => {
            let answer = driver.execute_on(switch, opcode::QUERY_RMP, number)?;
            let answer = Bits::<query_rmp_out, _>::new(answer);
            answer.sub(query_rmp_out::rmp_context).sub(rmpc::wq).get32(wq::lwm)
        }
    };
    let response = ib_uverbs_query_srq_resp {
        max_wr: srq.max_wr,
        max_sge: srq.max_sge,
        srq_limit: limit,
        reserved: 0,
    };
    call.respond(&response);
    Ok(())
}

pub(super) fn destroy(kernel: &mut Kernel, file: FileId, number: u32) -> Result<()> {
    let (driver, _) = kernel.driver(file)?;
    let is_xrc = driver.srqs.get(&number).is_some_and(|srq| srq.is_xrc);
    let op = if is_xrc { opcode::DESTROY_XRC_SRQ } else { opcode::DESTROY_RMP };
    kernel.destroy_by(file, op, number)?;
    let (driver, _) = kernel.driver(file)?;
    driver.forget_events_of(Subject::Srq(number));
    if let Some(srq) = driver.srqs.remove(&number) {
        end_reports(srq.events);
    }
    Ok(())
}

impl Kernel {
    /// The number of a shared receive queue.
    pub(crate) fn srq(&self, file: FileId, handle: u32) -> Result<u32> {
        match self.object(file, handle)? {
            Object::Srq { number } => Ok(*number),
            _ => Err(Errno::INVAL),
        }
    }
}
