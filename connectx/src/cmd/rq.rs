//! Commands of receive queues of Ethernet frames.

use uverbs_uapi::mlx5::prm::rqc::{
    create_rq_in, create_rq_out, destroy_rq_in, modify_rq_in, query_rq_in, query_rq_out, rqc,
};
use uverbs_uapi::mlx5::prm::srqc::wq;
use uverbs_uapi::mlx5::prm::{Bits, Layout};

use crate::command_error::{CommandError, refuse};
use crate::device::Device;
use crate::object::rq::{Rq, WqState};
use crate::object::timestamp::TimestampFormat;

pub(crate) fn create_rq(
    device: &mut Device,
    uid: u32,
    input: &[u8],
) -> Result<Vec<u8>, CommandError> {
    const INLINE: u64 = 0;
    let input = Bits::<create_rq_in, _>::new(input);
    let context = Bits::<rqc, _>::new(input.sub(create_rq_in::ctx).bytes().to_vec());
    let pas = input.bytes().get(create_rq_in::SIZE..).unwrap_or_default();
    if context.get(rqc::mem_rq_type) != INLINE || context.is_set(rqc::hairpin) {
        return refuse!(BadParam, "RQ memory type {}", context.get(rqc::mem_rq_type));
    }
    TimestampFormat::new(context.get(rqc::ts_format), &device.options)?;
    let wq_context = context.sub(rqc::wq);
    let pd = wq_context.get32(wq::pd);
    // A queue without a PD never accesses memory.
    if pd != 0 {
        device.objects.pds.check_use(uid, pd)?;
    }
    device.objects.cqs.check_use_or_kernels(uid, context.get32(rqc::cqn))?;
    let counter_set = context.get32(rqc::counter_set_id);
    if counter_set != 0 {
        device.objects.q_counters.check_use_or_kernels(uid, counter_set)?;
    }
    device.objects.rqs.check_room()?;
    let (queue, umems) = device.objects.new_receive_queue(uid, &wq_context, pas)?;
    device.objects.cqs.hold(context.get32(rqc::cqn))?;
    if pd != 0 {
        device.objects.pds.hold(pd)?;
    }
    device.objects.switch_q_counter(uid, 0, counter_set)?;
    let number = device
        .objects
        .rqs
        .insert_owned(uid, Rq { state: WqState::Reset, queue, umems, context, pd })?;
    let mut out = Bits::<create_rq_out, _>::new(vec![0; create_rq_out::SIZE]);
    out.set(create_rq_out::rqn, number.into());
    Ok(out.into_inner())
}

pub(crate) fn modify_rq(
    device: &mut Device,
    uid: u32,
    input: &[u8],
) -> Result<Vec<u8>, CommandError> {
    const SCATTER_FCS: u64 = 1 << 2;
    const VLAN_STRIPPING: u64 = 1 << 1;
    const COUNTER_SET: u64 = 1 << 3;
    let input = Bits::<modify_rq_in, _>::new(input);
    let number = input.get32(modify_rq_in::rqn);
    let new = input.sub(modify_rq_in::ctx);
    let from = WqState::new(input.get(modify_rq_in::rq_state))?;
    let to = WqState::new(new.get(rqc::state))?;
    let select = input.get(modify_rq_in::modify_bitmask);
    let known = SCATTER_FCS | VLAN_STRIPPING | COUNTER_SET;
    if select & !known != 0 {
        return refuse!(BadParam, "MODIFY_RQ of fields {select:#x} is not modelled");
    }
    if select & SCATTER_FCS != 0 && new.is_set(rqc::scatter_fcs) {
        return refuse!(BadParam, "scatter FCS is not modelled");
    }
    let rq = device.objects.rqs.owned_mut(uid, number)?;
    if rq.state != from {
        return refuse!(BadResourceState, "RQ {number:#x} is in {:?}, not {from:?}", rq.state);
    }
    from.check_transition(to)?;
    let before = rq.context.get32(rqc::counter_set_id);
    let counter_set =
        if select & COUNTER_SET != 0 { new.get32(rqc::counter_set_id) } else { before };
    device.objects.switch_q_counter(uid, before, counter_set)?;
    let rq = device.objects.rqs.owned_mut(uid, number)?;
    rq.context.set(rqc::counter_set_id, counter_set.into());
    if select & VLAN_STRIPPING != 0 {
        rq.context.set(rqc::vsd, new.get(rqc::vsd));
    }
    rq.state = to;
    if to == WqState::Reset {
        rq.queue.reset();
    }
    if to == WqState::Error {
        device.flush_raw_receives(number);
    }
    Ok(vec![])
}

pub(crate) fn query_rq(
    device: &mut Device,
    uid: u32,
    input: &[u8],
) -> Result<Vec<u8>, CommandError> {
    let number = Bits::<query_rq_in, _>::new(input).get32(query_rq_in::rqn);
    let rq = device.objects.rqs.owned_mut(uid, number)?;
    let mut out = Bits::<query_rq_out, _>::new(vec![0; query_rq_out::SIZE]);
    out.set_sub(query_rq_out::rq_context, rq.context.bytes());
    out.sub_mut(query_rq_out::rq_context).set(rqc::state, rq.state as u64);
    Ok(out.into_inner())
}

pub(crate) fn destroy_rq(
    device: &mut Device,
    uid: u32,
    input: &[u8],
) -> Result<Vec<u8>, CommandError> {
    let number = Bits::<destroy_rq_in, _>::new(input).get32(destroy_rq_in::rqn);
    device.objects.rqs.owned_mut(uid, number)?;
    let rq = device.objects.rqs.remove(number)?;
    device.objects.release_umems(&rq.umems);
    device.objects.pds.release(rq.pd);
    device.objects.cqs.release(rq.context.get32(rqc::cqn));
    device.objects.q_counters.release(rq.context.get32(rqc::counter_set_id));
    Ok(vec![])
}
