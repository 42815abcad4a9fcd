//! Commands of the virtual port: NIC and HCA vport context, RoCE addresses, counters.

use uverbs_uapi::mlx5::prm::vport::{
    hca_vport_context, modify_hca_vport_context_in, modify_nic_vport_context_in,
    modify_nic_vport_field_select as select, nic_vport_context, query_hca_vport_context_out,
    query_hca_vport_gid_in, query_hca_vport_gid_out, query_hca_vport_pkey_in,
    query_nic_vport_context_in, query_nic_vport_context_out, query_roce_address_in,
    query_roce_address_out, query_vport_counter_in, query_vport_counter_out, query_vport_state_in,
    query_vport_state_out, roce_addr_layout, set_roce_address_in, traffic_counter,
};
use uverbs_uapi::mlx5::prm::{Bits, Layout, Sub};

use super::lag;
use crate::command_error::{CommandError, refuse};
use crate::device::Device;
use crate::options::PortType;
use crate::port::{GIDS, Traffic};

/// Rate of a port, in units of 100 Mb/s: that of `ETHERNET_100G_CR4`, which PTYS tells.
const SPEED: u64 = 1000;

/// Entries of the partition key table.
const PKEYS: u64 = 128;

const ADDRESS_LIST_MC: u64 = 1;
const ADDRESS_LIST_VLAN: u64 = 2;

/// `cap_mask1` bits that software on an InfiniBand port may set: connection management, SNMP tunnelling, device
/// management and a vendor's class.
const MANAGEMENT: u32 = 1 << 16 | 1 << 17 | 1 << 19 | 1 << 20;

fn own_vport(number: u64, what: &str) -> Result<(), CommandError> {
    if number != 0 {
        return refuse!(BadParam, "{what} of vport {number}, only the function's own exists");
    }
    Ok(())
}

pub(crate) fn query_nic_vport_context(
    device: &mut Device,
    input: &[u8],
) -> Result<Vec<u8>, CommandError> {
    let input = Bits::<query_nic_vport_context_in, _>::new(input);
    own_vport(input.get(query_nic_vport_context_in::vport_number), "context")?;
    let kind = input.get(query_nic_vport_context_in::allowed_list_type);
    let mut out =
        Bits::<query_nic_vport_context_out, _>::new(vec![0; query_nic_vport_context_out::SIZE]);
    out.set_sub(query_nic_vport_context_out::nic_vport_context, device.port.context.bytes());
    let Some(list) = device.port.address_lists.get(kind as usize) else {
        return refuse!(BadParam, "address list type {kind}, 0 to 2 are modelled");
    };
    let mut context = out.sub_mut(query_nic_vport_context_out::nic_vport_context);
    let entry = if kind == ADDRESS_LIST_VLAN { 4 } else { 8 };
    context.set(nic_vport_context::allowed_list_type, kind);
    context.set(nic_vport_context::allowed_list_size, (list.len() / entry) as u64);
    let mut out = out.into_inner();
    out.extend(list);
    Ok(out)
}

pub(crate) fn modify_nic_vport_context(
    device: &mut Device,
    input: &[u8],
) -> Result<Vec<u8>, CommandError> {
    let input = Bits::<modify_nic_vport_context_in, _>::new(input);
    own_vport(input.get(modify_nic_vport_context_in::vport_number), "context")?;
    let chosen = input.sub(modify_nic_vport_context_in::field_select);
    let new = input.sub(modify_nic_vport_context_in::nic_vport_context);
    use nic_vport_context as nic;
    // Check everything before anything changes.
    if chosen.is_set(select::affiliation) {
        return refuse!(BadParam, "affiliation with another function is not modelled");
    }
    if chosen.is_set(select::addresses_list) {
        let kind = new.get(nic::allowed_list_type);
        let count = new.get(nic::allowed_list_size) as usize;
        let entry = if kind == ADDRESS_LIST_VLAN { 4 } else { 8 };
        let list = input.bytes().get(modify_nic_vport_context_in::SIZE..).unwrap_or_default();
        let Some(to) = device.port.address_lists.get_mut(kind as usize) else {
            return refuse!(BadParam, "address list type {kind}, 0 to 2 are modelled");
        };
        if kind > ADDRESS_LIST_MC && kind != ADDRESS_LIST_VLAN || count > 128 {
            return refuse!(
                LimitExceeded,
                "{count} entries in address list {kind}, the limit is 128"
            );
        }
        let Some(list) = list.get(..count * entry) else {
            return refuse!(BadInputLength, "{count} addresses named, {} bytes listed", list.len());
        };
        *to = list.to_vec();
    }
    let own = &mut device.port.context;
    for (choice, fields) in [
        (select::node_guid, &[nic::node_guid][..]),
        (select::port_guid, &[nic::port_guid]),
        (select::mtu, &[nic::mtu]),
        (select::promisc, &[nic::promisc_uc, nic::promisc_mc, nic::promisc_all]),
        (select::permanent_address, &[nic::permanent_address]),
        (select::roce_en, &[nic::roce_en]),
        (select::disable_uc_local_lb, &[nic::disable_uc_local_lb]),
        (select::disable_mc_local_lb, &[nic::disable_mc_local_lb]),
        (select::min_inline, &[nic::min_wqe_inline_mode]),
        (
            select::change_event,
            &[
                nic::arm_change_event,
                nic::event_on_mtu,
                nic::event_on_promisc_change,
                nic::event_on_vlan_change,
                nic::event_on_mc_address_change,
                nic::event_on_uc_address_change,
            ],
        ),
    ] {
        if chosen.is_set(choice) {
            for field in fields {
                own.set(*field, new.get(*field));
            }
        }
    }
    Ok(vec![])
}

pub(crate) fn query_vport_state(
    device: &mut Device,
    input: &[u8],
) -> Result<Vec<u8>, CommandError> {
    let input = Bits::<query_vport_state_in, _>::new(input);
    own_vport(input.get(query_vport_state_in::vport_number), "state")?;
    let mut out = Bits::<query_vport_state_out, _>::new(vec![0; query_vport_state_out::SIZE]);
    out.set(query_vport_state_out::admin_state, device.port.admin_up.into());
    out.set(query_vport_state_out::state, device.port.active().into());
    // Behind a LAG it is the sum of the ports that are up. Zero stands for the rate of the link.
    let ports = match lag::ports(&device.caps) {
        0 => 0,
        _ => device.port.lag_up.into_iter().filter(|up| *up).count() as u64,
    };
    out.set(query_vport_state_out::max_tx_speed, ports * SPEED);
    Ok(out.into_inner())
}

pub(crate) fn query_vport_counter(
    device: &mut Device,
    input: &[u8],
) -> Result<Vec<u8>, CommandError> {
    let input = Bits::<query_vport_counter_in, _>::new(input);
    own_vport(input.get(query_vport_counter_in::vport_number), "counters")?;
    let mut out = Bits::<query_vport_counter_out, _>::new(vec![0; query_vport_counter_out::SIZE]);
    let ethernet = device.options.port_type == PortType::Ethernet;
    let mut put = |sub: Sub<query_vport_counter_out, traffic_counter>, traffic: Traffic| {
        let mut counter = out.sub_mut(sub);
        counter.set(traffic_counter::packets, traffic.packets);
        counter.set(traffic_counter::octets, traffic.octets);
    };
    use query_vport_counter_out as counters;
    if ethernet {
        let (received, sent) = (device.port.received, device.port.sent);
        put(counters::received_eth_unicast, received.unicast);
        put(counters::received_eth_multicast, received.multicast);
        put(counters::received_eth_broadcast, received.broadcast);
        put(counters::transmitted_eth_unicast, sent.unicast);
        put(counters::transmitted_eth_multicast, sent.multicast);
        put(counters::transmitted_eth_broadcast, sent.broadcast);
    }
    put(counters::received_ib_unicast, device.rdma_received.unicast);
    put(counters::received_ib_multicast, device.rdma_received.multicast);
    put(counters::transmitted_ib_unicast, device.rdma_sent.unicast);
    put(counters::transmitted_ib_multicast, device.rdma_sent.multicast);
    Ok(out.into_inner())
}

pub(crate) fn query_hca_vport_context(device: &mut Device) -> Result<Vec<u8>, CommandError> {
    const ACTIVE: u64 = 4;
    const DOWN: u64 = 1;
    const LINK_UP: u64 = 5;
    const POLLING: u64 = 2;
    let mut out =
        Bits::<query_hca_vport_context_out, _>::new(vec![0; query_hca_vport_context_out::SIZE]);
    let mut context = out.sub_mut(query_hca_vport_context_out::hca_vport_context);
    use hca_vport_context as hca;
    let guid = device.port.context.get(nic_vport_context::port_guid);
    let wrong_qkeys = device.port.context.get(nic_vport_context::qkey_violation_counter);
    let up = device.port.active();
    for (field, value) in [
        (hca::vport_state, if up { ACTIVE } else { DOWN }),
        (hca::port_state, if up { ACTIVE } else { DOWN }),
        (hca::port_physical_state, if up { LINK_UP } else { POLLING }),
        (hca::system_image_guid, guid),
        (hca::port_guid, guid),
        (hca::node_guid, guid),
        (hca::cap_mask1, device.port.managed.into()),
        (hca::cap_mask1_field_select, MANAGEMENT.into()),
        (hca::lid, device.port.lid().into()),
        // The switch is the subnet manager.
        (hca::sm_lid, 0xbfff),
        (hca::subnet_timeout, 18),
        (hca::qkey_violation_counter, wrong_qkeys),
    ] {
        context.set(field, value);
    }
    Ok(out.into_inner())
}

/// Changes the management capabilities that software on the port announces; the driver's connection manager begins with
/// it.
pub(crate) fn modify_hca_vport_context(
    device: &mut Device,
    input: &[u8],
) -> Result<Vec<u8>, CommandError> {
    use hca_vport_context as hca;
    let input = Bits::<modify_hca_vport_context_in, _>::new(input);
    let new = input.sub(modify_hca_vport_context_in::hca_vport_context);
    let chosen = new.get(hca::cap_mask1_field_select) as u32;
    if chosen & !MANAGEMENT != 0 {
        return refuse!(BadParam, "cap_mask1 bits {chosen:#x}, {MANAGEMENT:#x} can be changed");
    }
    let managed = &mut device.port.managed;
    *managed = *managed & !chosen | new.get(hca::cap_mask1) as u32 & chosen;
    Ok(vec![])
}

pub(crate) fn query_hca_vport_gid(
    device: &mut Device,
    input: &[u8],
) -> Result<Vec<u8>, CommandError> {
    let input = Bits::<query_hca_vport_gid_in, _>::new(input);
    let index = input.get(query_hca_vport_gid_in::gid_index);
    let all = index == 0xffff;
    if !all && index as usize >= GIDS {
        return refuse!(BadIndex, "GID index {index}, the table has {GIDS} entries");
    }
    let mut out = Bits::<query_hca_vport_gid_out, _>::new(vec![0; query_hca_vport_gid_out::SIZE]);
    out.set(query_hca_vport_gid_out::gids_num, if all { GIDS as u64 } else { 1 });
    let mut out = out.into_inner();
    let gid = |at: usize| if at == 0 { device.port.ib_gid() } else { [0; 16] };
    if all {
        (0..GIDS).for_each(|at| out.extend(gid(at)));
    } else {
        out.extend(gid(index as usize));
    }
    Ok(out)
}

pub(crate) fn query_hca_vport_pkey(
    device: &mut Device,
    input: &[u8],
) -> Result<Vec<u8>, CommandError> {
    let input = Bits::<query_hca_vport_pkey_in, _>::new(input);
    let index = input.get(query_hca_vport_pkey_in::pkey_index);
    let range = match index {
        0xffff => 0..PKEYS,
        index if index < PKEYS => index..index + 1,
        _ => return refuse!(BadIndex, "P_Key index {index}, the table has {PKEYS} entries"),
    };
    let mut out = vec![0; 16];
    for index in range {
        out.extend([0; 2]);
        let key = device.options.pkeys.get(index as usize).copied().unwrap_or(0);
        out.extend(key.to_be_bytes());
    }
    Ok(out)
}

pub(crate) fn set_roce_address(device: &mut Device, input: &[u8]) -> Result<Vec<u8>, CommandError> {
    let input = Bits::<set_roce_address_in, _>::new(input);
    let index = input.get(set_roce_address_in::roce_address_index) as usize;
    let mut bytes = input.sub(set_roce_address_in::roce_address).bytes().to_vec();
    bytes.resize(roce_addr_layout::SIZE, 0);
    if !device.port.set_gid(index, bytes) {
        return refuse!(BadIndex, "RoCE address index {index}, the table has {GIDS} entries");
    }
    Ok(vec![])
}

pub(crate) fn query_roce_address(
    device: &mut Device,
    input: &[u8],
) -> Result<Vec<u8>, CommandError> {
    let input = Bits::<query_roce_address_in, _>::new(input);
    let index = input.get(query_roce_address_in::roce_address_index) as usize;
    let Some(entry) = device.port.gids.get(index) else {
        return refuse!(BadIndex, "RoCE address index {index}, the table has {GIDS} entries");
    };
    let mut out = Bits::<query_roce_address_out, _>::new(vec![0; query_roce_address_out::SIZE]);
    out.set_sub(query_roce_address_out::roce_address, entry.bytes());
    Ok(out.into_inner())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::Options;

    #[test]
    fn a_refused_modify_nic_vport_context_changes_nothing() {
        use nic_vport_context as nic;
        let mut device = Device::new(Options::default(), 1);
        let before = device.port.context.bytes().to_vec();
        for wrong in ["affiliation", "list"] {
            let mut input = Bits::<modify_nic_vport_context_in, _>::new(vec![
                0;
                modify_nic_vport_context_in::SIZE
            ]);
            let mut chosen = input.sub_mut(modify_nic_vport_context_in::field_select);
            chosen.set(select::promisc, 1);
            chosen.set(select::affiliation, u64::from(wrong == "affiliation"));
            chosen.set(select::addresses_list, u64::from(wrong == "list"));
            let mut context = input.sub_mut(modify_nic_vport_context_in::nic_vport_context);
            context.set(nic::promisc_all, 1);
            context.set(nic::allowed_list_size, 1);
            let input = input.into_inner();
            assert!(modify_nic_vport_context(&mut device, &input).is_err(), "{wrong}");
            assert_eq!(device.port.context.bytes(), before, "{wrong}");
        }
    }
}
