//! Commands of send queues of Ethernet frames.

use uverbs_uapi::mlx5::prm::rqc::{
    create_sq_in, create_sq_out, destroy_sq_in, modify_sq_in, query_sq_in, query_sq_out, sqc,
};
use uverbs_uapi::mlx5::prm::srqc::wq;
use uverbs_uapi::mlx5::prm::{Bits, Layout};

use crate::command_error::{CommandError, refuse};
use crate::device::Device;
use crate::object::rq::WqState;
use crate::object::send_queue::SendQueue;
use crate::object::sq::Sq;
use crate::object::timestamp::TimestampFormat;
use crate::object::umem::{QueueLocation, QueueMemory};

pub(crate) fn create_sq(
    device: &mut Device,
    uid: u32,
    input: &[u8],
) -> Result<Vec<u8>, CommandError> {
    let input = Bits::<create_sq_in, _>::new(input);
    let context = Bits::<sqc, _>::new(input.sub(create_sq_in::ctx).bytes().to_vec());
    let pas = input.bytes().get(create_sq_in::SIZE..).unwrap_or_default();
    let wq_context = context.sub(sqc::wq);
    let log_size = wq_context.get32(wq::log_wq_sz);
    let log_stride = wq_context.get32(wq::log_wq_stride);
    if log_size > 15 || log_stride != 6 || context.is_set(sqc::hairpin) {
        return refuse!(
            BadParam,
            "SQ of 2^{log_size} strides of 2^{log_stride} bytes, at most 2^15 of 2^6 are modelled"
        );
    }
    TimestampFormat::new(context.get(sqc::ts_format), &device.options)?;
    let uar = wq_context.get32(wq::uar_page);
    let pd = wq_context.get32(wq::pd);
    let cqn = context.get32(sqc::cqn);
    let tisn = context.get32(sqc::tis_num_0);
    device.objects.uars.check_use_or_kernels(uid, uar)?;
    // A queue without a PD never accesses memory.
    if pd != 0 {
        device.objects.pds.check_use(uid, pd)?;
    }
    if context.is_set(sqc::tis_lst_sz) {
        device.objects.tises.check_use_or_kernels(uid, tisn)?;
    }
    device.objects.cqs.check_use_or_kernels(uid, cqn)?;
    device.objects.sqs.check_room()?;
    let location = QueueLocation::from_wq(&wq_context, 64 << log_size, pas);
    let QueueMemory { buffer, doorbell_record, umems } =
        device.objects.queue_memory(uid, &location)?;
    let queue = SendQueue::new(buffer, 0, log_size, doorbell_record + 4);
    device.objects.cqs.hold(cqn)?;
    device.objects.uars.hold(uar)?;
    if pd != 0 {
        device.objects.pds.hold(pd)?;
    }
    if context.is_set(sqc::tis_lst_sz) {
        device.objects.tises.hold(tisn)?;
    }
    let number = device
        .objects
        .sqs
        .insert_owned(uid, Sq { state: WqState::Reset, queue, umems, context, uar, pd })?;
    let mut out = Bits::<create_sq_out, _>::new(vec![0; create_sq_out::SIZE]);
    out.set(create_sq_out::sqn, number.into());
    Ok(out.into_inner())
}

pub(crate) fn modify_sq(
    device: &mut Device,
    uid: u32,
    input: &[u8],
) -> Result<Vec<u8>, CommandError> {
    let input = Bits::<modify_sq_in, _>::new(input);
    let number = input.get32(modify_sq_in::sqn);
    let from = WqState::new(input.get(modify_sq_in::sq_state))?;
    let to = WqState::new(input.sub(modify_sq_in::ctx).get(sqc::state))?;
    let select = input.get(modify_sq_in::modify_bitmask);
    if select != 0 {
        return refuse!(BadParam, "MODIFY_SQ of fields {select:#x} is not modelled");
    }
    let sq = device.objects.sqs.owned_mut(uid, number)?;
    if sq.state != from {
        return refuse!(BadResourceState, "SQ {number:#x} is in {:?}, not {from:?}", sq.state);
    }
    from.check_transition(to)?;
    sq.state = to;
    if to == WqState::Reset {
        sq.queue.reset();
    }
    device.schedule(number);
    Ok(vec![])
}

pub(crate) fn query_sq(
    device: &mut Device,
    uid: u32,
    input: &[u8],
) -> Result<Vec<u8>, CommandError> {
    let number = Bits::<query_sq_in, _>::new(input).get32(query_sq_in::sqn);
    let sq = device.objects.sqs.owned_mut(uid, number)?;
    let mut out = Bits::<query_sq_out, _>::new(vec![0; query_sq_out::SIZE]);
    out.set_sub(query_sq_out::sq_context, sq.context.bytes());
    out.sub_mut(query_sq_out::sq_context).set(sqc::state, sq.state as u64);
    Ok(out.into_inner())
}

pub(crate) fn destroy_sq(
    device: &mut Device,
    uid: u32,
    input: &[u8],
) -> Result<Vec<u8>, CommandError> {
    let number = Bits::<destroy_sq_in, _>::new(input).get32(destroy_sq_in::sqn);
    device.objects.sqs.owned_mut(uid, number)?;
    let sq = device.objects.sqs.remove(number)?;
    device.objects.release_umems(&sq.umems);
    device.objects.pds.release(sq.pd);
    device.objects.cqs.release(sq.context.get32(sqc::cqn));
    device.objects.uars.release(sq.uar);
    if sq.context.is_set(sqc::tis_lst_sz) {
        device.objects.tises.release(sq.context.get32(sqc::tis_num_0));
    }
    Ok(vec![])
}
