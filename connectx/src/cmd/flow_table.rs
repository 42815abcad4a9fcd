//! Commands of flow tables.
//!
//! Pairs with `fs_cmd.c` of mlx5_core.

use std::collections::BTreeMap;
use std::sync::Arc;

use uverbs_uapi::mlx5::prm::flow::{
    create_flow_group_in, create_flow_group_out, create_flow_table_in, create_flow_table_out,
    delete_fte_in, dest_format, destroy_flow_group_in, destroy_flow_table_in, flow_context,
    flow_table_context, modify_flow_table_in, set_flow_table_root_in, set_fte_in,
};
use uverbs_uapi::mlx5::prm::{Bits, Layout};

use crate::chunks::chunks;
use crate::command_error::{CommandError, refuse};
use crate::device::Device;
use crate::format::frame::FrameHeaders;
use crate::object::flow_table::{
    DROP, FlowDestination, FlowGroup, FlowTable, FlowTableEntry, MATCH_BYTES, NIC_RECEIVE,
    NIC_TRANSMIT,
};

/// The most groups, and the most entries, of all flow tables together.
const MAX_GROUPS: usize = 1 << 12;
const MAX_ENTRIES: usize = 1 << 16;
/// The most destinations and counters of one entry together.
const MAX_LIST: usize = 64;
/// Actions of an entry, `MLX5_FLOW_CONTEXT_ACTION_*`.
const ALLOW: u64 = 1;
const FORWARD: u64 = 4;
const COUNT: u64 = 8;
/// Types of destinations, `MLX5_FLOW_DESTINATION_TYPE_*`.
const TO_TABLE: u64 = 1;
const TO_TIR: u64 = 2;

pub(crate) fn create_flow_table(
    device: &mut Device,
    uid: u32,
    input: &[u8],
) -> Result<Vec<u8>, CommandError> {
    let input = Bits::<create_flow_table_in, _>::new(input);
    let context = input.sub(create_flow_table_in::flow_table_context);
    let log_size = context.get(flow_table_context::log_size);
    if log_size > 16 {
        return refuse!(LimitExceeded, "log_size {log_size} of a flow table is above 16");
    }
    let table_type = input.get(create_flow_table_in::table_type);
    if !matches!(table_type, NIC_RECEIVE | NIC_TRANSMIT) {
        return refuse!(BadParam, "flow tables of type {table_type} are not modelled");
    }
    let miss = context
        .is_set(flow_table_context::table_miss_action)
        .then(|| context.get32(flow_table_context::table_miss_id));
    if let Some(miss) = miss {
        device.objects.flow_tables.check_use_or_kernels(uid, miss)?;
    }
    let table =
        FlowTable { table_type, log_size, miss, groups: BTreeMap::new(), entries: BTreeMap::new() };
    let number = device.objects.flow_tables.insert_owned(uid, table)?;
    if let Some(miss) = miss {
        device.objects.flow_tables.hold(miss)?;
    }
    let mut out = Bits::<create_flow_table_out, _>::new(vec![0; create_flow_table_out::SIZE]);
    out.set(create_flow_table_out::table_id, number.into());
    Ok(out.into_inner())
}

fn flow_table(
    device: &mut Device,
    uid: u32,
    table_type: u64,
    number: u32,
) -> Result<&mut FlowTable, CommandError> {
    let table = device.objects.flow_tables.owned_mut(uid, number)?;
    if table.table_type != table_type {
        return refuse!(
            BadResource,
            "flow table {number} is of type {}, not {table_type}",
            table.table_type
        );
    }
    Ok(table)
}

pub(crate) fn modify_flow_table(
    device: &mut Device,
    uid: u32,
    input: &[u8],
) -> Result<Vec<u8>, CommandError> {
    const MISS_TABLE: u64 = 1;
    let input = Bits::<modify_flow_table_in, _>::new(input);
    let select = input.get(modify_flow_table_in::modify_field_select);
    if select != MISS_TABLE {
        return refuse!(BadParam, "MODIFY_FLOW_TABLE of fields {select:#x} is not modelled");
    }
    let context = input.sub(modify_flow_table_in::flow_table_context);
    let miss = context
        .is_set(flow_table_context::table_miss_action)
        .then(|| context.get32(flow_table_context::table_miss_id));
    if let Some(miss) = miss {
        device.objects.flow_tables.check_use_or_kernels(uid, miss)?;
    }
    let table_type = input.get(modify_flow_table_in::table_type);
    let table = flow_table(device, uid, table_type, input.get32(modify_flow_table_in::table_id))?;
    let old = std::mem::replace(&mut table.miss, miss);
    if let Some(miss) = miss {
        device.objects.flow_tables.hold(miss)?;
    }
    if let Some(old) = old {
        device.objects.flow_tables.release(old);
    }
    Ok(vec![])
}

pub(crate) fn destroy_flow_table(
    device: &mut Device,
    uid: u32,
    input: &[u8],
) -> Result<Vec<u8>, CommandError> {
    let input = Bits::<destroy_flow_table_in, _>::new(input);
    let number = input.get32(destroy_flow_table_in::table_id);
    let table = flow_table(device, uid, input.get(destroy_flow_table_in::table_type), number)?;
    if !table.groups.is_empty() || !table.entries.is_empty() {
        return refuse!(ResourceBusy, "flow table {number} has {} groups", table.groups.len());
    }
    let table = device.objects.flow_tables.remove(number)?;
    if let Some(miss) = table.miss {
        device.objects.flow_tables.release(miss);
    }
    // The driver destroys the last table of a type while it is still the root.
    device.objects.flow_roots.tables.retain(|_, root| *root != number);
    Ok(vec![])
}

pub(crate) fn set_flow_table_root(
    device: &mut Device,
    uid: u32,
    input: &[u8],
) -> Result<Vec<u8>, CommandError> {
    const DISCONNECT: u64 = 1;
    let input = Bits::<set_flow_table_root_in, _>::new(input);
    let table_type = input.get(set_flow_table_root_in::table_type);
    let number = input.get32(set_flow_table_root_in::table_id);
    if input.get(set_flow_table_root_in::op_mod) == DISCONNECT {
        device.objects.flow_roots.tables.remove(&table_type);
        return Ok(vec![]);
    }
    flow_table(device, uid, table_type, number)?;
    device.objects.flow_roots.tables.insert(table_type, number);
    Ok(vec![])
}

pub(crate) fn create_flow_group(
    device: &mut Device,
    uid: u32,
    input: &[u8],
) -> Result<Vec<u8>, CommandError> {
    let input = Bits::<create_flow_group_in, _>::new(input);
    let number = input.get32(create_flow_group_in::table_id);
    let table_type = input.get(create_flow_group_in::table_type);
    let range = input.get32(create_flow_group_in::start_flow_index)
        ..=input.get32(create_flow_group_in::end_flow_index);
    let mask: Arc<[u8]> = input.sub(create_flow_group_in::match_criteria).bytes().into();
    if !FrameHeaders::covers_mask(&mask) {
        return refuse!(BadParam, "matching of inner headers or beyond plain ones is not modelled");
    }
    let groups: usize = device.objects.flow_tables.iter().map(|(_, t)| t.groups.len()).sum();
    if groups >= MAX_GROUPS {
        return refuse!(NoResources, "all flow tables together have {groups} groups, the limit");
    }
    let table = flow_table(device, uid, table_type, number)?;
    let overlaps = |group: &FlowGroup| {
        group.range.start() <= range.end() && range.start() <= group.range.end()
    };
    if range.is_empty() || u64::from(*range.end()) >= 1 << table.log_size {
        return refuse!(BadParam, "flow indices {range:?} are empty or above 2^{}", table.log_size);
    }
    if table.groups.values().any(overlaps) {
        return refuse!(BadParam, "flow indices {range:?} belong to another group");
    }
    let id = table.groups.last_key_value().map_or(1, |(last, _)| last.wrapping_add(1));
    table.groups.insert(id, FlowGroup { range, mask });
    let mut out = Bits::<create_flow_group_out, _>::new(vec![0; create_flow_group_out::SIZE]);
    out.set(create_flow_group_out::group_id, id.into());
    Ok(out.into_inner())
}

pub(crate) fn destroy_flow_group(
    device: &mut Device,
    uid: u32,
    input: &[u8],
) -> Result<Vec<u8>, CommandError> {
    let input = Bits::<destroy_flow_group_in, _>::new(input);
    let number = input.get32(destroy_flow_group_in::table_id);
    let id = input.get32(destroy_flow_group_in::group_id);
    let table = flow_table(device, uid, input.get(destroy_flow_group_in::table_type), number)?;
    let Some(group) = table.groups.get(&id) else {
        return refuse!(BadResource, "flow table {number} has no group {id}");
    };
    if table.entries.range(group.range.clone()).next().is_some() {
        return refuse!(ResourceBusy, "group {id} of flow table {number} has entries");
    }
    table.groups.remove(&id);
    Ok(vec![])
}

pub(crate) fn set_fte(
    device: &mut Device,
    uid: u32,
    input: &[u8],
) -> Result<Vec<u8>, CommandError> {
    let input = Bits::<set_fte_in, _>::new(input);
    let number = input.get32(set_fte_in::table_id);
    let table_type = input.get(set_fte_in::table_type);
    let index = input.get32(set_fte_in::flow_index);
    let context = input.sub(set_fte_in::flow_context);
    let action = context.get(flow_context::action);
    if action & !(ALLOW | DROP | FORWARD | COUNT) != 0 {
        return refuse!(BadParam, "flow action {action:#x} is not modelled");
    }
    let list = input.bytes().get(set_fte_in::SIZE..).unwrap_or_default();
    let list = chunks::<8>(list);
    let count = context.get(flow_context::destination_list_size) as usize;
    let counters = context.get(flow_context::flow_counter_list_size) as usize;
    if count + counters > MAX_LIST {
        return refuse!(
            LimitExceeded,
            "{count} destinations and {counters} counters, the limit is {MAX_LIST} together"
        );
    }
    let Some((list, counters)) =
        list.get(..count + counters).and_then(|list| list.split_at_checked(count))
    else {
        return refuse!(
            BadInputLength,
            "{count} destinations and {counters} counters, {} listed",
            list.len()
        );
    };
    if action & FORWARD == 0 && count != 0 {
        return refuse!(BadParam, "action {action:#x} with {count} destinations");
    }
    let counters: Vec<u32> = counters
        .iter()
        .map(|entry| u32::from_be_bytes([entry[0], entry[1], entry[2], entry[3]]))
        .collect();
    if (action & COUNT != 0) == counters.is_empty() {
        return refuse!(BadParam, "action {action:#x} with {} counters", counters.len());
    }
    for counter in &counters {
        device.objects.flow_counters.check_use(uid, *counter)?;
    }
    let mut to = Vec::new();
    for entry in list {
        let entry = Bits::<dest_format, _>::new(&entry[..]);
        let id = entry.get32(dest_format::destination_id);
        match entry.get(dest_format::destination_type) {
            TO_TABLE => {
                device.objects.flow_tables.check_use_or_kernels(uid, id)?;
                to.push(FlowDestination::Table(id));
            }
            TO_TIR => {
                device.objects.tirs.check_use_or_kernels(uid, id)?;
                to.push(FlowDestination::Tir(id));
            }
            other => return refuse!(BadParam, "flow destination {other:#x} is not modelled"),
        }
    }
    let mut value = context.sub(flow_context::match_value).bytes().to_vec();
    value.resize(MATCH_BYTES, 0);
    let flow_tag = context.get32(flow_context::flow_tag);
    let entries: usize = device.objects.flow_tables.iter().map(|(_, t)| t.entries.len()).sum();
    let table = flow_table(device, uid, table_type, number)?;
    if entries >= MAX_ENTRIES && !table.entries.contains_key(&index) {
        return refuse!(NoResources, "all flow tables together have {entries} entries, the limit");
    }
    let Some(group) = table.groups.values().find(|group| group.range.contains(&index)) else {
        return refuse!(BadIndex, "flow index {index} of table {number} is in no group");
    };
    let entry = FlowTableEntry { value, mask: group.mask.clone(), action, flow_tag, to, counters };
    let old = table.entries.insert(index, entry);
    hold_for_entry(device, number, index);
    if let Some(old) = old {
        release_for_entry(device, &old);
    }
    Ok(vec![])
}

pub(crate) fn delete_fte(
    device: &mut Device,
    uid: u32,
    input: &[u8],
) -> Result<Vec<u8>, CommandError> {
    let input = Bits::<delete_fte_in, _>::new(input);
    let number = input.get32(delete_fte_in::table_id);
    let index = input.get32(delete_fte_in::flow_index);
    let table = flow_table(device, uid, input.get(delete_fte_in::table_type), number)?;
    let Some(entry) = table.entries.remove(&index) else {
        return refuse!(BadIndex, "flow table {number} has no entry {index}");
    };
    release_for_entry(device, &entry);
    Ok(vec![])
}

/// Holds the destinations and counters of an entry. The caller has checked that all of them exist.
fn hold_for_entry(device: &mut Device, number: u32, index: u32) {
    let Ok(table) = device.objects.flow_tables.get(number) else { return };
    let Some(entry) = table.entries.get(&index) else { return };
    let (to, counters) = (entry.to.clone(), entry.counters.clone());
    let held = to.iter().try_for_each(|to| match to {
        FlowDestination::Table(table) => device.objects.flow_tables.hold(*table),
        FlowDestination::Tir(tir) => device.objects.tirs.hold(*tir),
    });
    let counted =
        counters.iter().try_for_each(|counter| device.objects.flow_counters.hold(*counter));
    if let Err(refused) = held.and(counted) {
        log::error!("{refused}");
    }
}

fn release_for_entry(device: &mut Device, entry: &FlowTableEntry) {
    for to in &entry.to {
        match to {
            FlowDestination::Table(table) => device.objects.flow_tables.release(*table),
            FlowDestination::Tir(tir) => device.objects.tirs.release(*tir),
        }
    }
    for counter in &entry.counters {
        device.objects.flow_counters.release(*counter);
    }
}
