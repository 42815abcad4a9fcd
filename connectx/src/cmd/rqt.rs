//! Commands of RQ tables.
//!
//! Pairs with `transobj.c` of mlx5_core.

use uverbs_uapi::mlx5::prm::rqc::{
    create_rqt_in, create_rqt_out, destroy_rqt_in, modify_rqt_in, rqtc,
};
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

fn hold_queues(device: &mut Device, uid: u32, queues: &[u32]) -> Result<(), CommandError> {
    for queue in queues {
        device.objects.rqs.check_use(uid, *queue)?;
    }
    for queue in queues {
        device.objects.rqs.hold(*queue)?;
    }
    Ok(())
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
    hold_queues(device, uid, &queues)?;
    let number = device.objects.rqts.insert_owned(uid, Rqt { queues })?;
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
    device.objects.rqts.owned_mut(uid, number)?;
    hold_queues(device, uid, &queues)?;
    let old = std::mem::replace(&mut device.objects.rqts.get_mut(number)?.queues, queues);
    old.into_iter().for_each(|queue| device.objects.rqs.release(queue));
    Ok(vec![])
}

pub(crate) fn destroy_rqt(
    device: &mut Device,
    uid: u32,
    input: &[u8],
) -> Result<Vec<u8>, CommandError> {
    let number = Bits::<destroy_rqt_in, _>::new(input).get32(destroy_rqt_in::rqtn);
    device.objects.rqts.owned_mut(uid, number)?;
    let rqt = device.objects.rqts.remove(number)?;
    rqt.queues.into_iter().for_each(|queue| device.objects.rqs.release(queue));
    Ok(vec![])
}
