//! Commands of RQ tables.
//!
//! Pairs with `transobj.c` of mlx5_core.

use uverbs_uapi::mlx5::prm::rqc::{
    create_rqt_in, create_rqt_out, destroy_rqt_in, modify_rqt_in, query_rqt_in, query_rqt_out, rqtc,
};
use uverbs_uapi::mlx5::prm::virtio::LIST_Q_TYPE_VIRTIO_NET_Q;
use uverbs_uapi::mlx5::prm::{Bits, Layout};

use crate::chunks::chunks;
use crate::command_error::{CommandError, refuse};
use crate::device::Device;
use crate::object::rqt::{LOG_MAX_QUEUES, Rqt};

fn queues(list: &[u8], count: u64) -> Result<Vec<u32>, CommandError> {
    if count > 1 << LOG_MAX_QUEUES {
        return refuse!(
            LimitExceeded,
            "{count} queues in an RQ table, the limit is 2^{LOG_MAX_QUEUES}"
        );
    }
    let entries = chunks::<4>(list);
    let Some(entries) = entries.get(..count as usize) else {
        return refuse!(BadInputLength, "{count} queues, {} listed", entries.len());
    };
    Ok(entries.iter().map(|entry| u32::from_be_bytes(*entry) & 0xff_ffff).collect())
}

/// Whether a table is one of virtqueues.
fn is_virtio(context: &Bits<rqtc, &[u8]>) -> Result<bool, CommandError> {
    match context.get(rqtc::list_q_type) {
        0 => Ok(false),
        LIST_Q_TYPE_VIRTIO_NET_Q => Ok(true),
        other => refuse!(BadParam, "an RQ table of queues of type {other} is not modelled"),
    }
}

fn hold_queues(
    device: &mut Device,
    uid: u32,
    is_virtio: bool,
    queues: &[u32],
) -> Result<(), CommandError> {
    let objects = &mut device.objects;
    for queue in queues {
        match is_virtio {
            true => objects.virtqs.check_use(uid, *queue)?,
            false => objects.rqs.check_use(uid, *queue)?,
        }
    }
    for queue in queues {
        match is_virtio {
            true => objects.virtqs.hold(*queue)?,
            false => objects.rqs.hold(*queue)?,
        }
    }
    Ok(())
}

fn release_queues(device: &mut Device, Rqt { queues, is_virtio }: Rqt) {
    for queue in queues {
        match is_virtio {
            true => device.objects.virtqs.release(queue),
            false => device.objects.rqs.release(queue),
        }
    }
}

pub(crate) fn create_rqt(
    device: &mut Device,
    uid: u32,
    input: &[u8],
) -> Result<Vec<u8>, CommandError> {
    let input = Bits::<create_rqt_in, _>::new(input);
    let context = input.sub(create_rqt_in::rqt_context);
    let list = input.bytes().get(create_rqt_in::SIZE..).unwrap_or_default();
    let queues = queues(list, context.get(rqtc::rqt_actual_size))?;
    device.objects.rqts.check_room()?;
    let is_virtio = is_virtio(&context)?;
    hold_queues(device, uid, is_virtio, &queues)?;
    let number = device.objects.rqts.insert_owned(uid, Rqt { queues, is_virtio })?;
    let mut out = Bits::<create_rqt_out, _>::new(vec![0; create_rqt_out::SIZE]);
    out.set(create_rqt_out::rqtn, number.into());
    Ok(out.into_inner())
}

pub(crate) fn modify_rqt(
    device: &mut Device,
    uid: u32,
    input: &[u8],
) -> Result<Vec<u8>, CommandError> {
    let input = Bits::<modify_rqt_in, _>::new(input);
    let number = input.get32(modify_rqt_in::rqtn);
    let context = input.sub(modify_rqt_in::ctx);
    let list = input.bytes().get(modify_rqt_in::SIZE..).unwrap_or_default();
    let queues = queues(list, context.get(rqtc::rqt_actual_size))?;
    let is_virtio = is_virtio(&context)?;
    device.objects.rqts.owned_mut(uid, number)?;
    hold_queues(device, uid, is_virtio, &queues)?;
    let new = Rqt { queues, is_virtio };
    let old = std::mem::replace(device.objects.rqts.get_mut(number)?, new);
    release_queues(device, old);
    Ok(vec![])
}

pub(crate) fn query_rqt(
    device: &mut Device,
    uid: u32,
    input: &[u8],
) -> Result<Vec<u8>, CommandError> {
    let number = Bits::<query_rqt_in, _>::new(input).get32(query_rqt_in::rqtn);
    let rqt = device.objects.rqts.owned_mut(uid, number)?;
    let mut out = Bits::<query_rqt_out, _>::new(vec![0; query_rqt_out::SIZE]);
    let mut context = out.sub_mut(query_rqt_out::rqt_context);
    context.set(rqtc::rqt_actual_size, rqt.queues.len() as u64);
    if rqt.is_virtio {
        context.set(rqtc::list_q_type, LIST_Q_TYPE_VIRTIO_NET_Q);
    }
    let mut out = out.into_inner();
    out.extend(rqt.queues.iter().flat_map(|queue| queue.to_be_bytes()));
    Ok(out)
}

pub(crate) fn destroy_rqt(
    device: &mut Device,
    uid: u32,
    input: &[u8],
) -> Result<Vec<u8>, CommandError> {
    let number = Bits::<destroy_rqt_in, _>::new(input).get32(destroy_rqt_in::rqtn);
    device.objects.rqts.owned_mut(uid, number)?;
    let rqt = device.objects.rqts.remove(number)?;
    release_queues(device, rqt);
    Ok(vec![])
}
