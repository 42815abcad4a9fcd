//! Completion queues. Pairs with `core/uverbs_std_types_cq.c` and `hw/mlx5/cq.c`.

use super::{FileId, Kernel, Method, Object, Place, Write, destroying, end_reports};
use crate::call::{Call, Result};
use crate::driver::{Cq, append_pages, input, quantized_offset};
use rustix::io::Errno;
use uverbs_connectx::format::event::Subject;
use uverbs_uapi::cq::*;
use uverbs_uapi::mlx5::abi::{
    mlx5_ib_create_cq, mlx5_ib_create_cq_flags, mlx5_ib_create_cq_resp, mlx5_ib_resize_cq,
};
use uverbs_uapi::mlx5::prm::cqc::{cqc, create_cq_in, modify_cq_in};
use uverbs_uapi::mlx5::prm::opcode;
use uverbs_uapi::object::{UVERBS_ATTR_UHW_IN, UVERBS_ATTR_UHW_OUT, UVERBS_OBJECT_CQ};
use uverbs_uapi::write::{
    IB_USER_VERBS_CMD_FLAG_EXTENDED, IB_USER_VERBS_CMD_RESIZE_CQ, IB_USER_VERBS_EX_CMD_MODIFY_CQ,
};

pub(super) const METHODS: &[Method] = &[
    destroying(UVERBS_OBJECT_CQ, UVERBS_METHOD_CQ_DESTROY),
    Method {
        object: UVERBS_OBJECT_CQ,
        method: UVERBS_METHOD_CQ_CREATE,
        attrs: &[
            UVERBS_ATTR_CREATE_CQ_HANDLE,
            UVERBS_ATTR_CREATE_CQ_CQE,
            UVERBS_ATTR_CREATE_CQ_USER_HANDLE,
            UVERBS_ATTR_CREATE_CQ_COMP_CHANNEL,
            UVERBS_ATTR_CREATE_CQ_COMP_VECTOR,
            UVERBS_ATTR_CREATE_CQ_FLAGS,
            UVERBS_ATTR_CREATE_CQ_RESP_CQE,
            UVERBS_ATTR_CREATE_CQ_EVENT_FD,
            UVERBS_ATTR_UHW_IN,
            UVERBS_ATTR_UHW_OUT,
        ],
        run: create,
    },
];

pub(super) const WRITES: &[Write] = &[
    Write { command: IB_USER_VERBS_CMD_RESIZE_CQ, run: resize },
    Write {
        command: IB_USER_VERBS_EX_CMD_MODIFY_CQ | IB_USER_VERBS_CMD_FLAG_EXTENDED,
        run: modify,
    },
];

/// Microseconds that the device holds back an event, at most.
pub(super) const MAX_PERIOD: u16 = 0xfff;
/// Bytes of a doorbell record.
pub(super) const RECORD: u64 = 8;
/// Completion vectors of a device.
pub(super) const VECTORS: u32 = 2;

fn create(kernel: &mut Kernel, call: &mut Call<'_>) -> Result<()> {
    let asked = call.u32(UVERBS_ATTR_CREATE_CQ_CQE)?;
    let driver_part: mlx5_ib_create_cq = call.driver()?;
    if call.u32_if(UVERBS_ATTR_CREATE_CQ_COMP_VECTOR).unwrap_or(0) >= VECTORS {
        return Err(Errno::INVAL);
    }
    let flags = call.u64_if(UVERBS_ATTR_CREATE_CQ_FLAGS).unwrap_or(0);
    let most = kernel.limits(call.file)?.cqes;
    if asked > most || flags > 3 || !matches!(driver_part.cqe_size, 64 | 128) {
        return Err(Errno::INVAL);
    }
    // One entry stays free, for the mark that ends a queue which is resized.
    let entries = (asked + 1).next_power_of_two();
    let given = mlx5_ib_create_cq_flags::from_bits_retain(driver_part.flags);
    let pads = given.contains(mlx5_ib_create_cq_flags::MLX5_IB_CREATE_CQ_FLAGS_CQE_128B_PAD);
    let real_time = given.contains(mlx5_ib_create_cq_flags::MLX5_IB_CREATE_CQ_FLAGS_REAL_TIME_TS);
    // Nothing to pad, and the device does not compress.
    if pads && driver_part.cqe_size != 128 || driver_part.cqe_comp_en != 0 {
        // The driver refuses these only after it has pinned the memory.
        let bytes = u64::from(entries) * u64::from(driver_part.cqe_size);
        let ranges = [(driver_part.buf_addr, bytes, true), (driver_part.db_addr, RECORD, true)];
        let lent = kernel.lend(call, &ranges)?;
        kernel.give_back(call.file, lent)?;
        return Err(Errno::OPNOTSUPP);
    }
    let ignores_overrun = flags & 2;
    let (page_offset, log_page_size) = quantized_offset(driver_part.buf_addr, 6)?;
    let user_handle = call.u64_if(UVERBS_ATTR_CREATE_CQ_USER_HANDLE).unwrap_or(0);
    let (driver, _) = kernel.driver(call.file)?;
    let mut command = input::<create_cq_in>(opcode::CREATE_CQ);
    let mut context = command.sub_mut(create_cq_in::cq_context);
    let size = match (driver_part.cqe_size, pads) {
        (64, _) => 0,
        (_, false) => 1,
        (_, true) => 2,
    };
    for (field, value) in [
        (cqc::log_cq_size, entries.ilog2().into()),
        (cqc::cqe_sz, size),
        (cqc::uar_page, driver_part.uar_page_index.into()),
        (cqc::c_eqn_or_apu_element, driver.eqn().into()),
        (cqc::dbr_addr, driver_part.db_addr),
        (cqc::page_offset, page_offset),
        (cqc::log_page_size, log_page_size),
        (cqc::oi, ignores_overrun >> 1),
    ] {
        context.set(field, value);
    }
    let mut command = command.into_inner();
    let bytes = u64::from(entries) * u64::from(driver_part.cqe_size);
    append_pages(&mut command, driver_part.buf_addr, bytes, log_page_size);
    let ranges = [(driver_part.buf_addr, bytes, true), (driver_part.db_addr, RECORD, true)];
    let channel = kernel.reports(call, UVERBS_ATTR_CREATE_CQ_COMP_CHANNEL, user_handle)?;
    let events = kernel.reports_events(call, UVERBS_ATTR_CREATE_CQ_EVENT_FD, user_handle)?;
    let (number, lent) = kernel.create_with(call, &command, &ranges)?;
    let [channel, events] = [channel, events].map(|place| place.map(Place::attach));
    let (record, cqe_size) = (driver_part.db_addr, driver_part.cqe_size);
    let cq = Cq { record, channel, events, cqe_size, entries, real_time };
    kernel.driver(call.file)?.0.cqs.insert(number, cq);
    let handle = kernel.add_lending(call.file, Object::Cq { number }, &[], lent)?;
    call.made(UVERBS_ATTR_CREATE_CQ_HANDLE, handle);
    call.put(UVERBS_ATTR_CREATE_CQ_RESP_CQE, &(entries - 1));
    call.respond_driver(&mlx5_ib_create_cq_resp { cqn: number, reserved: 0 });
    Ok(())
}

fn resize(kernel: &mut Kernel, call: &mut Call<'_>) -> Result<()> {
    let request: ib_uverbs_resize_cq = call.core()?;
    let driver_part: mlx5_ib_resize_cq = call.driver()?;
    let number = kernel.cq(call.file, request.cq_handle)?;
    let most = kernel.limits(call.file)?.cqes;
    if request.cqe == 0 || request.cqe > most || driver_part.reserved0 != 0 {
        return Err(Errno::INVAL);
    }
    let entries = (request.cqe + 1).next_power_of_two();
    let (driver, _) = kernel.driver(call.file)?;
    if driver.cqs.get(&number).is_some_and(|cq| cq.entries == entries) {
        // The size stays the same.
        call.respond(&ib_uverbs_resize_cq_resp { cqe: entries - 1, reserved: 0 });
        return Ok(());
    }
    let mut command = input::<modify_cq_in>(opcode::MODIFY_CQ);
    // Resize, and no field of the context.
    command.set(modify_cq_in::op_mod, 1);
    command.set(modify_cq_in::cqn, number.into());
    let mut context = command.sub_mut(modify_cq_in::cq_context);
    context.set(cqc::log_cq_size, entries.ilog2().into());
    context.set(cqc::cqe_sz, (driver_part.cqe_size == 128).into());
    let (page_offset, log_page_size) = quantized_offset(driver_part.buf_addr, 6)?;
    context.set(cqc::page_offset, page_offset);
    context.set(cqc::log_page_size, log_page_size);
    let mut command = command.into_inner();
    let bytes = u64::from(entries) * u64::from(driver_part.cqe_size);
    append_pages(&mut command, driver_part.buf_addr, bytes, log_page_size);
    let record = kernel.cq_record(call.file, number)?;
    let ranges = [(driver_part.buf_addr, bytes, true), (record, RECORD, true)];
    let (_, lent) = kernel.create_with(call, &command, &ranges)?;
    kernel.lend_anew(call.file, request.cq_handle, lent)?;
    let (driver, _) = kernel.driver(call.file)?;
    driver.cqs.entry(number).and_modify(|cq| {
        cq.entries = entries;
        cq.cqe_size = driver_part.cqe_size.into();
    });
    call.respond(&ib_uverbs_resize_cq_resp { cqe: entries - 1, reserved: 0 });
    Ok(())
}

fn modify(kernel: &mut Kernel, call: &mut Call<'_>) -> Result<()> {
    /// `IB_CQ_MODERATE`.
    const MODERATE: u32 = 1;
    let request: ib_uverbs_ex_modify_cq = call.core()?;
    if request.attr_mask == 0 || request.reserved != 0 {
        return Err(Errno::INVAL);
    }
    if request.attr_mask > MODERATE {
        return Err(Errno::OPNOTSUPP);
    }
    let number = kernel.cq(call.file, request.cq_handle)?;
    if request.attr.cq_period > MAX_PERIOD {
        return Err(Errno::INVAL);
    }
    let (driver, switch) = kernel.driver(call.file)?;
    let mut command = input::<modify_cq_in>(opcode::MODIFY_CQ);
    command.set(modify_cq_in::cqn, number.into());
    // Period and count.
    command.set(modify_cq_in::modify_field_select_resize_field_select, 3);
    let mut context = command.sub_mut(modify_cq_in::cq_context);
    context.set(cqc::cq_period, request.attr.cq_period.into());
    context.set(cqc::cq_max_count, request.attr.cq_count.into());
    driver.execute(switch, &command.into_inner()).map(drop)
}

pub(super) fn destroy(kernel: &mut Kernel, file: FileId, number: u32) -> Result<()> {
    kernel.destroy_by(file, opcode::DESTROY_CQ, number)?;
    let (driver, _) = kernel.driver(file)?;
    driver.forget_events_of(Subject::Cq(number));
    if let Some(cq) = driver.cqs.remove(&number) {
        end_reports(cq.channel);
        end_reports(cq.events);
    }
    Ok(())
}

impl Kernel {
    /// The address of a queue's doorbell record.
    fn cq_record(&mut self, file: FileId, number: u32) -> Result<u64> {
        let (driver, _) = self.driver(file)?;
        Ok(driver.cqs.get(&number).ok_or(Errno::INVAL)?.record)
    }

    /// The number of a completion queue.
    pub(crate) fn cq(&self, file: FileId, handle: u32) -> Result<u32> {
        match self.object(file, handle)? {
            Object::Cq { number } => Ok(*number),
            _ => Err(Errno::INVAL),
        }
    }
}
