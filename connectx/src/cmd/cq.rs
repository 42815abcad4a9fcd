//! Commands of completion queues.

use uverbs_uapi::mlx5::prm::cqc::{
    cqc, create_cq_in, create_cq_out, destroy_cq_in, modify_cq_in, query_cq_in, query_cq_out,
};
use uverbs_uapi::mlx5::prm::{Bits, Field, Layout};

use crate::command_error::{CommandError, refuse};
use crate::device::Device;
use crate::format::cqe::RESIZED;
use crate::object::buffer::Buffer;
use crate::object::cq::{ArmState, Cq, INDEX_MASK, NO_ARM_WORD, PADDED};
use crate::object::timestamp::TimestampFormat;
use crate::object::umem::{QueueLocation, QueueMemory};

/// Fields of CREATE_CQ that name the umems of the queue and of its doorbell record. The kernel's
/// description leaves them out, because only user contexts use them.
const CQ_UMEM_OFFSET: Field<create_cq_in> = Field::new(0x280, 0x40);
const CQ_UMEM: Field<create_cq_in> = Field::new(0x2c0, 0x20);
const RECORD_UMEM: Field<cqc> = Field::new(0x20, 0x20);

/// `modify_field_select` bits of MODIFY_CQ.
const MODIFY_PERIOD: u64 = 1;
const MODIFY_COUNT: u64 = 2;

/// `op_mod` of MODIFY_CQ that replaces the buffer.
const RESIZE: u64 = 1;

pub(crate) fn create_cq(
    device: &mut Device,
    uid: u32,
    input: &[u8],
) -> Result<Vec<u8>, CommandError> {
    let input = Bits::<create_cq_in, _>::new(input);
    let context = Bits::<cqc, _>::new(input.sub(create_cq_in::cq_context).bytes().to_vec());
    if context.is_set(cqc::cqe_comp_en) {
        return refuse!(BadParam, "CQE compression is not modelled");
    }
    let log_size = context.get32(cqc::log_cq_size);
    if log_size > 22 {
        return refuse!(BadParam, "log_cq_size {log_size} is above 22");
    }
    let cqe_size = match context.get(cqc::cqe_sz) {
        0 => 64,
        1 | PADDED => 128,
        other => return refuse!(BadParam, "cqe_sz {other}, 0 to 2 are modelled"),
    };
    let eqn = context.get32(cqc::c_eqn_or_apu_element) & 0xff;
    let uar = context.get32(cqc::uar_page);
    device.objects.cqs.check_room()?;
    device.objects.eqs.get(eqn)?;
    // mlx5_ib of Linux 5.10 allocates all UARs as the kernel's.
    device.objects.uars.check_use_or_kernels(uid, uar)?;
    let QueueMemory { buffer, doorbell_record, umems } = device.objects.queue_memory(
        uid,
        &QueueLocation {
            queue: input
                .is_set(create_cq_in::cq_umem_valid)
                .then(|| (input.get32(CQ_UMEM), input.get(CQ_UMEM_OFFSET))),
            doorbell_record_umem: context
                .is_set(cqc::dbr_umem_valid)
                .then(|| context.get32(RECORD_UMEM)),
            doorbell_record_address: context.get(cqc::dbr_addr),
            is_written: true,
            log_page_size: context.get(cqc::log_page_size),
            page_offset: context.get(cqc::page_offset),
            len: cqe_size << log_size,
            pages: input.tail(create_cq_in::pas),
        },
    )?;
    device.objects.uars.hold(uar)?;
    device.objects.eqs.hold(eqn)?;
    let number = device.objects.cqs.insert_owned(
        uid,
        Cq {
            context,
            buffer,
            doorbell_record,
            umems,
            log_size,
            cqe_size,
            written: 0,
            solicited: 0,
            notified: 0,
            armed: ArmState::Disarmed,
            arm_word: NO_ARM_WORD,
            unreported: 0,
            last_event: 0,
            due: None,
            uar,
            eqn,
            failed: false,
        },
    )?;
    let mut out = Bits::<create_cq_out, _>::new(vec![0; create_cq_out::SIZE]);
    out.set(create_cq_out::cqn, number.into());
    Ok(out.into_inner())
}

pub(crate) fn destroy_cq(
    device: &mut Device,
    uid: u32,
    input: &[u8],
) -> Result<Vec<u8>, CommandError> {
    let number = Bits::<destroy_cq_in, _>::new(input).get32(destroy_cq_in::cqn);
    device.objects.cqs.owned_mut(uid, number)?;
    let cq = device.objects.cqs.remove(number)?;
    if let Some(due) = cq.due {
        device.cq_timers.remove(&(due, number));
    }
    device.objects.uars.release(cq.uar);
    device.objects.eqs.release(cq.eqn);
    device.objects.release_umems(&cq.umems);
    Ok(vec![])
}

pub(crate) fn query_cq(
    device: &mut Device,
    uid: u32,
    input: &[u8],
) -> Result<Vec<u8>, CommandError> {
    let number = Bits::<query_cq_in, _>::new(input).get32(query_cq_in::cqn);
    let cq = device.objects.cqs.owned_mut(uid, number)?;
    let mut out = Bits::<query_cq_out, _>::new(vec![0; query_cq_out::SIZE]);
    out.set_sub(query_cq_out::cq_context, cq.context.bytes());
    let mut context = out.sub_mut(query_cq_out::cq_context);
    context.set(cqc::producer_counter, cq.producer().into());
    let index = |count: u64| count & u64::from(INDEX_MASK);
    context.set(cqc::last_notified_index, index(cq.notified));
    context.set(cqc::last_solicit_index, index(cq.solicited));
    context.set(cqc::status, if cq.failed { 0xa } else { 0 });
    Ok(out.into_inner())
}

pub(crate) fn modify_cq(
    device: &mut Device,
    uid: u32,
    input: &[u8],
) -> Result<Vec<u8>, CommandError> {
    let input = Bits::<modify_cq_in, _>::new(input);
    let number = input.get32(modify_cq_in::cqn);
    device.objects.cqs.owned_mut(uid, number)?;
    match input.get(modify_cq_in::op_mod) {
        0 => {}
        RESIZE => return resize_cq(device, number, &input),
        other => return refuse!(BadParam, "MODIFY_CQ with op_mod {other:#x} is not modelled"),
    }
    let select = input.get(modify_cq_in::modify_field_select_resize_field_select);
    if select & !(MODIFY_PERIOD | MODIFY_COUNT) != 0 {
        return refuse!(BadParam, "MODIFY_CQ of fields {select:#x} is not modelled");
    }
    let new = input.sub(modify_cq_in::cq_context);
    let cq = device.objects.cqs.get_mut(number)?;
    if select & MODIFY_PERIOD != 0 {
        cq.context.set(cqc::cq_period, new.get(cqc::cq_period));
    }
    if select & MODIFY_COUNT != 0 {
        cq.context.set(cqc::cq_max_count, new.get(cqc::cq_max_count));
    }
    Ok(vec![])
}

/// Ends the old buffer with a RESIZED CQE and continues in the new one, at the index after it. The
/// driver copies the CQEs that it has not polled.
fn resize_cq(
    device: &mut Device,
    number: u32,
    input: &Bits<modify_cq_in, &[u8]>,
) -> Result<Vec<u8>, CommandError> {
    let new = input.sub(modify_cq_in::cq_context);
    let log_size = new.get32(cqc::log_cq_size);
    let cq = device.objects.cqs.get(number)?;
    if log_size > 22 || cq.failed {
        return refuse!(BadParam, "CQ {number:#x} cannot be resized to 2^{log_size} CQEs");
    }
    if (new.get(cqc::cqe_sz) == 0) != (cq.cqe_size == 64) {
        return refuse!(
            BadParam,
            "CQEs of CQ {number:#x} have {} bytes, a resize cannot change that",
            cq.cqe_size
        );
    }
    let buffer = Buffer::new(
        &device.objects.listed_pages,
        new.get(cqc::log_page_size),
        new.get(cqc::page_offset),
        cq.cqe_size << log_size,
        input.tail(modify_cq_in::pas),
    )?;
    let consumer = device.memory.read_be32(cq.doorbell_record);
    let waiting = consumer.map(|consumer| cq.producer().wrapping_sub(consumer) & INDEX_MASK);
    // The RESIZED CQE comes after the unpolled CQEs; all of them have to fit both buffers.
    let least = log_size.min(cq.log_size);
    if waiting.is_ok_and(|waiting| waiting >= 1 << least) {
        return refuse!(BadParam, "more CQEs are unpolled than 2^{least}");
    }
    let mut marker = [0; 64];
    marker[63] = RESIZED << 4;
    if !device.write_cqe(number, marker, TimestampFormat::FreeRunning, false) {
        return refuse!(BadResourceState, "CQ {number:#x} has no room for the RESIZED CQE");
    }
    let cq = device.objects.cqs.get_mut(number)?;
    cq.buffer = buffer;
    cq.log_size = log_size;
    for field in [cqc::log_cq_size, cqc::log_page_size, cqc::page_offset] {
        cq.context.set(field, new.get(field));
    }
    Ok(vec![])
}
