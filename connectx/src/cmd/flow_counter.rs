//! Commands of flow counters, which the actions of flow table entries name.

use uverbs_uapi::mlx5::prm::flow::{
    alloc_flow_counter_in, alloc_flow_counter_out, dealloc_flow_counter_in, query_flow_counter_in,
    query_flow_counter_out,
};
use uverbs_uapi::mlx5::prm::vport::traffic_counter;
use uverbs_uapi::mlx5::prm::{Bits, Layout};

use crate::command_error::{CommandError, refuse};
use crate::device::Device;
use crate::port::Traffic;

pub(crate) fn alloc_flow_counter(
    device: &mut Device,
    uid: u32,
    input: &[u8],
) -> Result<Vec<u8>, CommandError> {
    let input = Bits::<alloc_flow_counter_in, _>::new(input);
    if input.is_set(alloc_flow_counter_in::flow_counter_bulk) {
        return refuse!(BadParam, "flow counters in bulk are not modelled");
    }
    let number = device.objects.flow_counters.insert_owned(uid, Traffic::default())?;
    let mut out = Bits::<alloc_flow_counter_out, _>::new(vec![0; alloc_flow_counter_out::SIZE]);
    out.set(alloc_flow_counter_out::flow_counter_id, number.into());
    Ok(out.into_inner())
}

pub(crate) fn dealloc_flow_counter(
    device: &mut Device,
    uid: u32,
    input: &[u8],
) -> Result<Vec<u8>, CommandError> {
    let input = Bits::<dealloc_flow_counter_in, _>::new(input);
    let number = input.get32(dealloc_flow_counter_in::flow_counter_id);
    device.objects.flow_counters.owned_mut(uid, number)?;
    device.objects.flow_counters.remove(number)?;
    Ok(vec![])
}

pub(crate) fn query_flow_counter(
    device: &mut Device,
    uid: u32,
    input: &[u8],
) -> Result<Vec<u8>, CommandError> {
    let input = Bits::<query_flow_counter_in, _>::new(input);
    let first = input.get32(query_flow_counter_in::flow_counter_id);
    let count = input.get32(query_flow_counter_in::num_of_counters).max(1);
    // Check all counters first: a counter that was cleared but not reported would be lost.
    for number in (0..count).map(|step| first.wrapping_add(step)) {
        device.objects.flow_counters.owned_mut(uid, number)?;
    }
    let mut out = vec![0; query_flow_counter_out::SIZE];
    for number in (0..count).map(|step| first.wrapping_add(step)) {
        let counter = device.objects.flow_counters.owned_mut(uid, number)?;
        let mut entry = Bits::<traffic_counter, _>::new(vec![0; traffic_counter::SIZE]);
        entry.set(traffic_counter::packets, counter.packets);
        entry.set(traffic_counter::octets, counter.octets);
        out.extend(entry.into_inner());
        if input.is_set(query_flow_counter_in::clear) {
            *counter = Traffic::default();
        }
    }
    Ok(out)
}
