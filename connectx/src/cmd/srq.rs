//! Commands of shared receive queues.
//!
//! Pairs with `srq_cmd.c` of mlx5_ib, which creates a receive memory pool (RMP) for a basic SRQ.

use uverbs_uapi::mlx5::prm::srqc::{
    arm_xrc_srq_in, create_rmp_in, create_rmp_out, create_xrc_srq_in, create_xrc_srq_out,
    destroy_rmp_in, destroy_xrc_srq_in, modify_rmp_in, query_rmp_in, query_rmp_out,
    query_xrc_srq_in, query_xrc_srq_out, rmp_bitmask, rmpc, wq, xrc_srqc,
};
use uverbs_uapi::mlx5::prm::{Bits, Layout};

use crate::command_error::{CommandError, refuse};
use crate::device::Device;
use crate::object::buffer::Buffer;
use crate::object::receive_queue::{ReceiveQueue, WqType};
use crate::object::srq::{Srq, SrqType};

/// RMP state "ready".
const READY: u64 = 1;

pub(crate) fn create_rmp(
    device: &mut Device,
    uid: u32,
    input: &[u8],
) -> Result<Vec<u8>, CommandError> {
    let input = Bits::<create_rmp_in, _>::new(input);
    let context = input.sub(create_rmp_in::ctx);
    let pas = input.bytes().get(create_rmp_in::SIZE..).unwrap_or_default();
    let wq_context = context.sub(rmpc::wq);
    let pd = wq_context.get32(wq::pd);
    let limit = wq_context.get(wq::lwm) as u16;
    device.objects.pds.check_use(uid, pd)?;
    device.objects.srqs.check_room()?;
    let (queue, umems) = device.objects.new_receive_queue(uid, &wq_context, pas)?;
    device.objects.pds.hold(pd)?;
    let srq = Srq { srq_type: SrqType::Rmp, queue, umems, pd, limit };
    let number = device.objects.srqs.insert_owned(uid, srq)?;
    let mut out = Bits::<create_rmp_out, _>::new(vec![0; create_rmp_out::SIZE]);
    out.set(create_rmp_out::rmpn, number.into());
    Ok(out.into_inner())
}

fn rmp(device: &mut Device, uid: u32, number: u32) -> Result<&mut Srq, CommandError> {
    let srq = device.objects.srqs.owned_mut(uid, number)?;
    if srq.srq_type != SrqType::Rmp {
        return refuse!(BadResource, "SRQ {number:#x} is not an RMP");
    }
    Ok(srq)
}

fn xrc_srq(device: &mut Device, uid: u32, number: u32) -> Result<&mut Srq, CommandError> {
    let srq = device.objects.srqs.owned_mut(uid, number)?;
    if srq.srq_type == SrqType::Rmp {
        return refuse!(BadResource, "SRQ {number:#x} is not an XRC SRQ");
    }
    Ok(srq)
}

pub(crate) fn modify_rmp(
    device: &mut Device,
    uid: u32,
    input: &[u8],
) -> Result<Vec<u8>, CommandError> {
    let input = Bits::<modify_rmp_in, _>::new(input);
    let number = input.get32(modify_rmp_in::rmpn);
    let wanted = input.sub(modify_rmp_in::ctx);
    let limit_chosen = input.sub(modify_rmp_in::bitmask).is_set(rmp_bitmask::lwm);
    let srq = rmp(device, uid, number)?;
    if wanted.get(rmpc::state) != READY {
        return refuse!(
            BadResourceState,
            "RMP state {}, only ready (1) is modelled",
            wanted.get(rmpc::state)
        );
    }
    if limit_chosen {
        srq.limit = wanted.sub(rmpc::wq).get(wq::lwm) as u16;
    }
    device.check_limit(number);
    Ok(vec![])
}

pub(crate) fn query_rmp(
    device: &mut Device,
    uid: u32,
    input: &[u8],
) -> Result<Vec<u8>, CommandError> {
    let number = Bits::<query_rmp_in, _>::new(input).get32(query_rmp_in::rmpn);
    let srq = rmp(device, uid, number)?;
    let (pd, limit) = (srq.pd, srq.limit);
    let mut out = Bits::<query_rmp_out, _>::new(vec![0; query_rmp_out::SIZE]);
    let mut context = out.sub_mut(query_rmp_out::rmp_context);
    context.set(rmpc::state, READY);
    let mut queue = context.sub_mut(rmpc::wq);
    queue.set(wq::pd, pd.into());
    queue.set(wq::lwm, limit.into());
    Ok(out.into_inner())
}

pub(crate) fn destroy_rmp(
    device: &mut Device,
    uid: u32,
    input: &[u8],
) -> Result<Vec<u8>, CommandError> {
    let number = Bits::<destroy_rmp_in, _>::new(input).get32(destroy_rmp_in::rmpn);
    rmp(device, uid, number)?;
    let srq = device.objects.srqs.remove(number)?;
    device.objects.pds.release(srq.pd);
    device.objects.release_umems(&srq.umems);
    Ok(vec![])
}

pub(crate) fn create_xrc_srq(
    device: &mut Device,
    uid: u32,
    input: &[u8],
) -> Result<Vec<u8>, CommandError> {
    let input = Bits::<create_xrc_srq_in, _>::new(input);
    let context = input.sub(create_xrc_srq_in::xrc_srq_context_entry);
    if input.is_set(create_xrc_srq_in::xrc_srq_umem_valid) {
        return refuse!(BadParam, "an SRQ in a umem is not modelled");
    }
    let log_size = context.get32(xrc_srqc::log_xrc_srq_size);
    let log_stride = context.get32(xrc_srqc::log_rq_stride) + 4;
    let buffer = Buffer::new(
        &device.objects.listed_pages,
        context.get(xrc_srqc::log_page_size),
        context.get(xrc_srqc::page_offset),
        1 << (log_size + log_stride),
        input.tail(create_xrc_srq_in::pas),
    )?;
    let doorbell_record = context.get(xrc_srqc::db_record_addr_h) << 32
        | context.get(xrc_srqc::db_record_addr_l) << 2;
    let queue = ReceiveQueue::new(buffer, log_size, log_stride, WqType::Linked, doorbell_record);
    let pd = context.get32(xrc_srqc::pd);
    let xrcd = context.get32(xrc_srqc::xrcd);
    let cqn = context.get32(xrc_srqc::cqn);
    let user_index = context.get32(xrc_srqc::user_index);
    device.objects.pds.check_use(uid, pd)?;
    device.objects.xrcds.check_use_or_kernels(uid, xrcd)?;
    device.objects.cqs.check_use_or_kernels(uid, cqn)?;
    device.objects.srqs.check_room()?;
    device.objects.cqs.hold(cqn)?;
    device.objects.pds.hold(pd)?;
    device.objects.xrcds.hold(xrcd)?;
    let srq_type = SrqType::Xrc { xrcd, cqn, user_index };
    let limit = context.get(xrc_srqc::lwm) as u16;
    let number =
        device.objects.srqs.insert_owned(uid, Srq { srq_type, queue, umems: vec![], pd, limit })?;
    let mut out = Bits::<create_xrc_srq_out, _>::new(vec![0; create_xrc_srq_out::SIZE]);
    out.set(create_xrc_srq_out::xrc_srqn, number.into());
    Ok(out.into_inner())
}

pub(crate) fn query_xrc_srq(
    device: &mut Device,
    uid: u32,
    input: &[u8],
) -> Result<Vec<u8>, CommandError> {
    let number = Bits::<query_xrc_srq_in, _>::new(input).get32(query_xrc_srq_in::xrc_srqn);
    let srq = xrc_srq(device, uid, number)?;
    let (pd, limit) = (srq.pd, srq.limit);
    let mut out = Bits::<query_xrc_srq_out, _>::new(vec![0; query_xrc_srq_out::SIZE]);
    let mut context = out.sub_mut(query_xrc_srq_out::xrc_srq_context_entry);
    context.set(xrc_srqc::pd, pd.into());
    context.set(xrc_srqc::lwm, limit.into());
    Ok(out.into_inner())
}

pub(crate) fn arm_xrc_srq(
    device: &mut Device,
    uid: u32,
    input: &[u8],
) -> Result<Vec<u8>, CommandError> {
    let input = Bits::<arm_xrc_srq_in, _>::new(input);
    let number = input.get32(arm_xrc_srq_in::xrc_srqn);
    xrc_srq(device, uid, number)?.limit = input.get(arm_xrc_srq_in::lwm) as u16;
    device.check_limit(number);
    Ok(vec![])
}

pub(crate) fn destroy_xrc_srq(
    device: &mut Device,
    uid: u32,
    input: &[u8],
) -> Result<Vec<u8>, CommandError> {
    let number = Bits::<destroy_xrc_srq_in, _>::new(input).get32(destroy_xrc_srq_in::xrc_srqn);
    xrc_srq(device, uid, number)?;
    let srq = device.objects.srqs.remove(number)?;
    device.objects.pds.release(srq.pd);
    if let SrqType::Xrc { xrcd, cqn, .. } = srq.srq_type {
        device.objects.xrcds.release(xrcd);
        device.objects.cqs.release(cqn);
    }
    Ok(vec![])
}
