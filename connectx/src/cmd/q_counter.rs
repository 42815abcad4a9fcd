//! Commands of Q counters.

use uverbs_uapi::mlx5::prm::vport::{
    alloc_q_counter_out, dealloc_q_counter_in, query_q_counter_in, query_q_counter_out,
};
use uverbs_uapi::mlx5::prm::{Bits, Layout};

use crate::command_error::CommandError;
use crate::device::Device;
use crate::object::q_counter::QCounter;

pub(crate) fn alloc_q_counter(device: &mut Device, uid: u32) -> Result<Vec<u8>, CommandError> {
    let number = device.objects.q_counters.insert_owned(uid, QCounter::default())?;
    let mut out = Bits::<alloc_q_counter_out, _>::new(vec![0; alloc_q_counter_out::SIZE]);
    out.set(alloc_q_counter_out::counter_set_id, number.into());
    Ok(out.into_inner())
}

pub(crate) fn dealloc_q_counter(
    device: &mut Device,
    uid: u32,
    input: &[u8],
) -> Result<Vec<u8>, CommandError> {
    let input = Bits::<dealloc_q_counter_in, _>::new(input);
    let number = input.get32(dealloc_q_counter_in::counter_set_id);
    device.objects.q_counters.owned_mut(uid, number)?;
    device.objects.q_counters.remove(number)?;
    Ok(vec![])
}

pub(crate) fn query_q_counter(
    device: &mut Device,
    uid: u32,
    input: &[u8],
) -> Result<Vec<u8>, CommandError> {
    let input = Bits::<query_q_counter_in, _>::new(input);
    let number = input.get32(query_q_counter_in::counter_set_id);
    let counter = device.objects.q_counters.owned_mut(uid, number)?;
    let mut out = Bits::<query_q_counter_out, _>::new(vec![0; query_q_counter_out::SIZE]);
    counter.fill(&mut out);
    if input.is_set(query_q_counter_in::clear) {
        *counter = QCounter::default();
    }
    Ok(out.into_inner())
}
