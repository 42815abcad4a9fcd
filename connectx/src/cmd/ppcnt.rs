//! Counters of the port in the PPCNT register.
//!
//! Pairs with `ethtool -S` of mlx5e and with the port counters of mlx5_ib. Each group is another
//! view of the same traffic.

use uverbs_uapi::mlx5::prm::register::{
    eth_802_3_cntrs_grp_data_layout as ieee, eth_2819_cntrs_grp_data_layout as rmon,
    eth_2863_cntrs_grp_data_layout as interface, ib_ext_port_cntrs_grp_data_layout as infiniband,
    ppcnt_reg,
};
use uverbs_uapi::mlx5::prm::{Bits, Field};

use crate::command_error::{CommandError, refuse};
use crate::device::Device;

/// Bytes of a group.
const GROUP: usize = 0xf8;

const IEEE_802_3: u64 = 0x0;
const RFC_2863: u64 = 0x1;
const RFC_2819: u64 = 0x2;
const RFC_3635: u64 = 0x3;
const PER_PRIORITY: u64 = 0x10;
const PER_TRAFFIC_CLASS: u64 = 0x11;
const PHYSICAL: u64 = 0x12;
const PHYSICAL_STATISTICS: u64 = 0x16;
const DISCARDS: u64 = 0x5;
const INFINIBAND: u64 = 0x20;
const INFINIBAND_EXTENDED: u64 = 0x21;
/// Octets that *PortXmitData* and *PortRcvData* count as one.
const DATA_UNIT: u64 = 4;

/// A group with these counters, each split into two halves.
fn group<L>(counters: &[(Field<L>, Field<L>, u64)]) -> Vec<u8> {
    let mut group = Bits::<L, _>::new(vec![0; GROUP]);
    for (high, low, value) in counters {
        group.set(*high, value >> 32);
        group.set(*low, *value);
    }
    group.into_inner()
}

pub(crate) fn ppcnt(
    device: &Device,
    mut ppcnt: Bits<ppcnt_reg, &mut [u8]>,
) -> Result<(), CommandError> {
    let (sent, received) = (device.port.sent, device.port.received);
    let (all_sent, all_received) = (sent.total(), received.total());
    let counters = match ppcnt.get(ppcnt_reg::grp) {
        IEEE_802_3 => group(&[
            (
                ieee::a_frames_transmitted_ok_high,
                ieee::a_frames_transmitted_ok_low,
                all_sent.packets,
            ),
            (ieee::a_frames_received_ok_high, ieee::a_frames_received_ok_low, all_received.packets),
            (
                ieee::a_octets_transmitted_ok_high,
                ieee::a_octets_transmitted_ok_low,
                all_sent.octets,
            ),
            (ieee::a_octets_received_ok_high, ieee::a_octets_received_ok_low, all_received.octets),
            (
                ieee::a_multicast_frames_xmitted_ok_high,
                ieee::a_multicast_frames_xmitted_ok_low,
                sent.multicast.packets,
            ),
            (
                ieee::a_broadcast_frames_xmitted_ok_high,
                ieee::a_broadcast_frames_xmitted_ok_low,
                sent.broadcast.packets,
            ),
            (
                ieee::a_multicast_frames_received_ok_high,
                ieee::a_multicast_frames_received_ok_low,
                received.multicast.packets,
            ),
            (
                ieee::a_broadcast_frames_received_ok_high,
                ieee::a_broadcast_frames_received_ok_low,
                received.broadcast.packets,
            ),
        ]),
        RFC_2863 => group(&[
            (interface::if_in_octets_high, interface::if_in_octets_low, all_received.octets),
            (
                interface::if_out_octets_high,
                interface::if_out_octets_low,
                all_sent.octets / DATA_UNIT,
            ),
            (
                interface::if_in_ucast_pkts_high,
                interface::if_in_ucast_pkts_low,
                received.unicast.packets,
            ),
            (
                interface::if_out_ucast_pkts_high,
                interface::if_out_ucast_pkts_low,
                sent.unicast.packets,
            ),
            (
                interface::if_in_multicast_pkts_high,
                interface::if_in_multicast_pkts_low,
                received.multicast.packets,
            ),
            (
                interface::if_out_multicast_pkts_high,
                interface::if_out_multicast_pkts_low,
                sent.multicast.packets,
            ),
            (
                interface::if_in_broadcast_pkts_high,
                interface::if_in_broadcast_pkts_low,
                received.broadcast.packets,
            ),
            (
                interface::if_out_broadcast_pkts_high,
                interface::if_out_broadcast_pkts_low,
                sent.broadcast.packets,
            ),
        ]),
        RFC_2819 => group(&[
            (rmon::ether_stats_octets_high, rmon::ether_stats_octets_low, all_received.octets),
            (rmon::ether_stats_pkts_high, rmon::ether_stats_pkts_low, all_received.packets),
            (
                rmon::ether_stats_broadcast_pkts_high,
                rmon::ether_stats_broadcast_pkts_low,
                received.broadcast.packets,
            ),
            (
                rmon::ether_stats_multicast_pkts_high,
                rmon::ether_stats_multicast_pkts_low,
                received.multicast.packets,
            ),
        ]),
        INFINIBAND_EXTENDED => {
            let (sent, received) = (device.rdma_sent, device.rdma_received);
            let (all_sent, all_received) = (sent.total(), received.total());
            group(&[
                (infiniband::port_xmit_data_high, infiniband::port_xmit_data_low, all_sent.octets),
                (
                    infiniband::port_rcv_data_high,
                    infiniband::port_rcv_data_low,
                    all_received.octets / DATA_UNIT,
                ),
                (infiniband::port_xmit_pkts_high, infiniband::port_xmit_pkts_low, all_sent.packets),
                (
                    infiniband::port_rcv_pkts_high,
                    infiniband::port_rcv_pkts_low,
                    all_received.packets,
                ),
                (
                    infiniband::port_unicast_xmit_pkts_high,
                    infiniband::port_unicast_xmit_pkts_low,
                    sent.unicast.packets,
                ),
                (
                    infiniband::port_unicast_rcv_pkts_high,
                    infiniband::port_unicast_rcv_pkts_low,
                    received.unicast.packets,
                ),
                (
                    infiniband::port_multicast_xmit_pkts_high,
                    infiniband::port_multicast_xmit_pkts_low,
                    sent.multicast.packets,
                ),
                (
                    infiniband::port_multicast_rcv_pkts_high,
                    infiniband::port_multicast_rcv_pkts_low,
                    received.multicast.packets,
                ),
            ])
        }
        // These groups count errors, pauses, discards and cable statistics, which do not occur.
        // All traffic has one priority, and nothing counts it by priority.
        RFC_3635 | DISCARDS | PER_PRIORITY | PER_TRAFFIC_CLASS | PHYSICAL | PHYSICAL_STATISTICS
        | INFINIBAND => vec![0; GROUP],
        group => return refuse!(BadParam, "port counter group {group:#x} is not modelled"),
    };
    ppcnt.set_span(ppcnt_reg::counter_set, &counters);
    Ok(())
}
