//! The capabilities of the function, in one table.
//!
//! Pairs with QUERY_HCA_CAP and SET_HCA_CAP. The table has a capability only if the device
//! implements it.

use std::collections::BTreeMap;

use uverbs_uapi::mlx5::prm::hca_cap::{
    atomic_caps, cmd_hca_cap as general, cmd_hca_cap_2 as general_2, device_mem_cap,
    flow_table_nic_cap, flow_table_prop_layout, per_protocol_networking_offload_caps as ethernet,
    roce_cap, tlp_dev_emu_capabilities, virtio_emulation_cap,
};
use uverbs_uapi::mlx5::prm::virtio;
use uverbs_uapi::mlx5::prm::{Bits, Field};

use crate::bar0::{
    LOG_VAR_STRIDE, MEMIC_BYTES, MEMIC_OFFSET, TLP_OFFSET, TLP_PAGES, VAR_BYTES, VAR_OFFSET,
};
use crate::init_segment::CLOCK_KHZ;
use crate::object::timestamp;
use crate::object::{memic, rqt, virtq};
use crate::options::{Options, PortType};

/// Bytes of one group of capabilities.
pub(crate) const GROUP: usize = 0x1000;

pub(crate) const GENERAL: u16 = 0;
const ETHERNET: u16 = 1;
pub(crate) const ATOMIC: u16 = 3;
pub(crate) const ROCE: u16 = 4;
const FLOW_TABLE: u16 = 7;
const DEVICE_MEMORY: u16 = 0xf;
const VIRTIO_EMULATION: u16 = virtio::CAP_VDPA_EMULATION;
const GENERAL_2: u16 = 0x20;
const TLP_EMULATION: u16 = 0x2a;

/// Groups that the driver queries and in which the device offers nothing: page faults, IPoIB,
/// eswitch and its flow tables, vectors, quality of service, debugging.
const EMPTY: [u16; 7] = [0x2, 0x5, 0x8, 0x9, 0xa, 0xc, 0xd];

/// The unit of `log_doorbell_bar_size`.
const VAR_UNIT: u64 = 4096;

pub(crate) struct CapGroup {
    pub(crate) max: Vec<u8>,
    pub(crate) current: Vec<u8>,
}

/// The capabilities of a function.
pub struct HcaCaps {
    pub(crate) groups: BTreeMap<u16, CapGroup>,
}

fn general(options: &Options) -> Vec<u8> {
    let mut cap = Bits::<general, _>::new(vec![0; GROUP]);
    let ethernet = options.port_type == PortType::Ethernet;
    let limits = &options.limits;
    let full = u64::from(!options.minimal);
    for (field, value) in [
        // Object numbers and queue sizes.
        (general::log_max_srq_sz, limits.log_max_srq_sz.into()),
        (general::log_max_qp_sz, limits.log_max_qp_sz.into()),
        (general::log_max_qp, limits.log_max_qp.into()),
        (general::log_max_srq, limits.log_max_srq.into()),
        (general::log_max_cq_sz, limits.log_max_cq_sz.into()),
        (general::log_max_cq, limits.log_max_cq.into()),
        (general::log_max_eq_sz, 22),
        (general::log_max_eq, 6),
        (general::max_num_eqs, 64),
        (general::log_max_mkey, limits.log_max_mkey.into()),
        (general::log_max_pd, limits.log_max_pd.into()),
        (general::log_max_xrcd, 16),
        (general::log_max_transport_domain, 8),
        (general::log_max_rmp, 16),
        (general::log_max_rq, 16),
        (general::log_max_sq, 16),
        (general::log_max_tir, 12),
        (general::log_max_tis, 12),
        (general::log_max_rqt, 10),
        (general::log_max_rqt_size, rqt::LOG_MAX_QUEUES),
        (general::log_max_tis_per_sq, 1),
        (general::log_max_mcg, 10),
        (general::max_qp_mcg, 32),
        (general::log_max_wq_sz, 15),
        (general::log_max_stride_sz_rq, 9),
        (general::log_min_stride_sz_rq, 4),
        (general::log_max_stride_sz_sq, 9),
        (general::log_min_stride_sz_sq, 6),
        (general::basic_cyclic_rcv_wqe, 1),
        (general::max_wqe_sz_sq, 1024),
        (general::max_wqe_sz_rq, 512),
        (general::max_sgl_for_optimized_performance, 32),
        // Memory.
        (general::log_max_mrw_sz, 40),
        (general::log_max_klm_list_size, 14),
        (general::max_indirection, 4),
        (general::log_pg_sz, 12),
        (general::fixed_buffer_size, 1),
        (general::umr_extended_translation_offset, 1),
        (general::dump_fill_mkey, full),
        (general::imaicl, 1),
        (general::device_memory, 1),
        (general::umr_modify_entity_size_disabled, options.minimal.into()),
        // Transports.
        (general::rc, 1),
        (general::uc, 1),
        (general::ud, 1),
        (general::xrc, options.xrc.into()),
        (general::log_max_msg, 30),
        (general::log_max_ra_req_qp, limits.log_max_ra_qp.into()),
        (general::log_max_ra_res_qp, limits.log_max_ra_qp.into()),
        (general::local_ca_ack_delay, 16),
        (general::atomic, options.atomics.into()),
        (general::ece_support, full),
        (general::set_deth_sqpn, 1),
        (general::hca_cap_2, full),
        (general::data_direct, full & u64::from(options.data_direct)),
        (general::crossing_vhca_mkey, full & u64::from(options.data_direct)),
        (general::dp_ordering_ooo_all_rc, full),
        (general::dp_ordering_ooo_all_uc, full),
        (general::dp_ordering_ooo_all_ud, full),
        (general::dp_ordering_ooo_all_xrc, full),
        (general::rts2rts_qp_udp_sport, (ethernet && !options.minimal).into()),
        (general::block_lb_mc, 1),
        (general::qkv, 1),
        (general::pkey_table_size, 0),
        // Completions.
        (general::cqe_version, 1),
        (general::cq_oi, 1),
        (general::cq_resize, 1),
        (general::cq_moderation, 1),
        (general::cqe_128_always, 1),
        (general::sctr_data_cqe, 1),
        (general::device_frequency_khz, CLOCK_KHZ),
        (general::device_frequency_mhz, CLOCK_KHZ / 1000),
        // Doorbells.
        (general::uar_4k, 1),
        (general::uar_sz, 5),
        (general::num_of_uars_per_page, 1),
        (general::bf, options.write_combining.into()),
        (general::log_bf_reg_size, 9),
        // User contexts, and VAR pages.
        (general::log_max_uctx, 10),
        (general::log_max_umem, 16),
        (general::tlp_device_emulation_manager, 1),
        (general::general_obj_types, virtq::GENERAL_OBJECT),
        (general::sq_ts_format, timestamp::capability(options)),
        (general::rq_ts_format, timestamp::capability(options)),
        // Ports.
        (general::num_ports, 1),
        (general::num_lag_ports, 2 * full),
        (general::lag_tx_port_affinity, full),
        (general::rts2rts_lag_tx_port_affinity, full),
        (general::port_type, ethernet.into()),
        (general::ib_virt, (!ethernet).into()),
        (general::gid_table_size, if ethernet { 0 } else { 1 }),
        (general::roce, ethernet.into()),
        (general::eth_net_offloads, ethernet.into()),
        (general::nic_flow_table, ethernet.into()),
        (general::max_tc, 1),
        // Counters.
        (general::max_qp_cnt, 255),
        (general::out_of_seq_cnt, 1),
        (general::retransmission_q_counters, 1),
        (general::enhanced_error_q_counters, 1),
        (general::modify_rq_counter_set_id, 1),
        (general::vport_counters, 1),
        (general::max_flow_counter_15_0, 0xffff),
        (general::log_max_current_uc_list, 7),
        (general::log_max_current_mc_list, 7),
        (general::log_max_vlan_list, 5),
    ] {
        cap.set(field, value);
    }
    cap.into_inner()
}

/// Capabilities that the first table has no room for.
fn general_2(options: &Options) -> Vec<u8> {
    let mut cap = Bits::<general_2, _>::new(vec![0; GROUP]);
    cap.set(general_2::dp_ordering_force, 1);
    cap.set(general_2::query_vuid, options.data_direct.into());
    cap.into_inner()
}

fn ethernet() -> Vec<u8> {
    let mut cap = Bits::<ethernet, _>::new(vec![0; GROUP]);
    for (field, value) in [
        (ethernet::csum_cap, 1),
        (ethernet::vlan_cap, 1),
        (ethernet::max_lso_cap, 16),
        (ethernet::rss_ind_tbl_cap, 9),
        (ethernet::self_lb_en_modifiable, 1),
        // The driver need not put headers inline.
        (ethernet::wqe_inline_mode, 2),
    ] {
        cap.set(field, value);
    }
    cap.into_inner()
}

fn atomic(options: &Options) -> Vec<u8> {
    let mut cap = Bits::<atomic_caps, _>::new(vec![0; GROUP]);
    // Compare-and-swap, fetch-and-add, and both masked, whose packets only devices of one fabric know; operands of
    // eight bytes, masked ones also of four.
    let (operations, sizes) = if options.exposed.is_some() { (0x3, 8) } else { (0xf, 8 | 4) };
    cap.set(atomic_caps::atomic_operations, operations);
    cap.set(atomic_caps::atomic_size_qp, sizes);
    cap.set(atomic_caps::atomic_size_dc, sizes);
    cap.set(atomic_caps::supported_atomic_req_8B_endianness_mode_1, 1);
    cap.into_inner()
}

fn roce(options: &Options) -> Vec<u8> {
    const V1_AND_V2: u64 = 5;
    const L3_IPV4_AND_IPV6: u64 = 6;
    let mut cap = Bits::<roce_cap, _>::new(vec![0; GROUP]);
    cap.set(roce_cap::qp_ts_format, timestamp::capability(options));
    cap.set(roce_cap::roce_version, V1_AND_V2);
    cap.set(roce_cap::l3_type, L3_IPV4_AND_IPV6);
    cap.set(roce_cap::roce_address_table_size, crate::port::GIDS as u64);
    cap.set(roce_cap::r_roce_dest_udp_port, 4791);
    cap.set(roce_cap::r_roce_min_src_udp_port, 0xc000);
    cap.set(roce_cap::r_roce_max_src_udp_port, 0xffff);
    cap.into_inner()
}

fn flow_tables() -> Vec<u8> {
    let mut cap = Bits::<flow_table_nic_cap, _>::new(vec![0; GROUP]);
    for table in [
        flow_table_nic_cap::flow_table_properties_nic_receive,
        flow_table_nic_cap::flow_table_properties_nic_transmit,
    ] {
        let mut table = cap.sub_mut(table);
        for (field, value) in [
            (flow_table_prop_layout::ft_support, 1),
            (flow_table_prop_layout::flow_counter, 1),
            (flow_table_prop_layout::flow_modify_en, 1),
            (flow_table_prop_layout::modify_root, 1),
            (flow_table_prop_layout::identified_miss_table_mode, 1),
            (flow_table_prop_layout::flow_table_modify, 1),
            (flow_table_prop_layout::log_max_ft_size, 16),
            (flow_table_prop_layout::max_ft_level, 64),
            (flow_table_prop_layout::log_max_ft_num, 8),
            (flow_table_prop_layout::log_max_flow_counter, 16),
            (flow_table_prop_layout::log_max_destination, 4),
            (flow_table_prop_layout::log_max_flow, 16),
        ] {
            table.set(field, value);
        }
    }
    cap.into_inner()
}

fn device_memory() -> Vec<u8> {
    let mut cap = Bits::<device_mem_cap, _>::new(vec![0; GROUP]);
    for (field, value) in [
        (device_mem_cap::memic, 1),
        (device_mem_cap::log_min_memic_alloc_size, memic::LOG_UNIT),
        (device_mem_cap::log_max_memic_addr_alignment, memic::LOG_MAX_ALIGNMENT),
        (device_mem_cap::memic_bar_start_addr, MEMIC_OFFSET),
        (device_mem_cap::memic_bar_size, MEMIC_BYTES),
        (device_mem_cap::max_memic_size, memic::MEMORY),
    ] {
        cap.set(field, value);
    }
    cap.into_inner()
}

/// Split virtqueues without events. Without `eth_frame_offload_type` the kernel's mlx5_vdpa stays away, which needs
/// event queue pairs.
fn virtio() -> Vec<u8> {
    const SPLIT: u64 = 1;
    let mut cap = Bits::<virtio_emulation_cap, _>::new(vec![0; GROUP]);
    cap.set(virtio_emulation_cap::log_doorbell_stride, LOG_VAR_STRIDE);
    cap.set(virtio_emulation_cap::log_doorbell_bar_size, u64::from((VAR_BYTES / VAR_UNIT).ilog2()));
    cap.set(virtio_emulation_cap::doorbell_bar_offset, VAR_OFFSET);
    cap.set(virtio_emulation_cap::virtio_version_1_0, 1);
    cap.set(virtio_emulation_cap::virtio_queue_type, SPLIT);
    cap.set(virtio_emulation_cap::event_mode, 1 << virtio::EVENT_MODE_NO_MSIX);
    cap.set(virtio_emulation_cap::max_num_virtio_queues, virtq::MOST.into());
    let umems = [
        (virtio_emulation_cap::umem_1_buffer_param_a, virtio_emulation_cap::umem_1_buffer_param_b),
        (virtio_emulation_cap::umem_2_buffer_param_a, virtio_emulation_cap::umem_2_buffer_param_b),
        (virtio_emulation_cap::umem_3_buffer_param_a, virtio_emulation_cap::umem_3_buffer_param_b),
    ];
    for ((a, b), (each, more)) in umems.into_iter().zip(virtq::UMEM_BYTES) {
        cap.set(a, each);
        cap.set(b, more);
    }
    cap.into_inner()
}

fn tlp() -> Vec<u8> {
    let mut cap = Bits::<tlp_dev_emu_capabilities, _>::new(vec![0; GROUP]);
    cap.set(tlp_dev_emu_capabilities::tlp_rsp_gw_num_pages, TLP_PAGES);
    cap.set(tlp_dev_emu_capabilities::tlp_rsp_gw_pages_bar_offset, TLP_OFFSET);
    cap.into_inner()
}

impl HcaCaps {
    /// All capabilities at their maximum.
    pub fn new(options: &Options) -> Self {
        let mut groups = BTreeMap::new();
        let mut add = |kind, max: Vec<u8>| {
            groups.insert(kind, CapGroup { current: max.clone(), max });
        };
        add(GENERAL, general(options));
        add(ATOMIC, if options.atomics { atomic(options) } else { vec![0; GROUP] });
        if !options.minimal {
            add(GENERAL_2, general_2(options));
        }
        add(DEVICE_MEMORY, device_memory());
        add(VIRTIO_EMULATION, virtio());
        add(TLP_EMULATION, tlp());
        for kind in EMPTY {
            add(kind, vec![0; GROUP]);
        }
        if options.port_type == PortType::Ethernet {
            add(ETHERNET, ethernet());
            add(ROCE, roce(options));
            add(FLOW_TABLE, flow_tables());
        }
        Self { groups }
    }

    /// A general capability, as the driver has set it.
    pub(crate) fn general(&self, field: Field<general>) -> u64 {
        let group = self.groups.get(&GENERAL);
        group.map_or(0, |group| Bits::<general, _>::new(&group.current[..]).get(field))
    }

    /// Whether the driver asked for old values of atomics in host order.
    pub(crate) fn host_order_atomics(&self) -> bool {
        self.groups.get(&ATOMIC).is_some_and(|group| {
            Bits::<atomic_caps, _>::new(&group.current[..])
                .is_set(atomic_caps::atomic_req_8B_endianness_mode)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Repeats the driver's computation of how many pages there are and where the last one ends.
    #[test]
    fn var_and_tlp_pages_lie_where_the_capabilities_say() {
        let cap = Bits::<virtio_emulation_cap, _>::new(virtio());
        let bytes = 4096u64 << cap.get(virtio_emulation_cap::log_doorbell_bar_size);
        let stride = 1u64 << cap.get(virtio_emulation_cap::log_doorbell_stride);
        assert_eq!(bytes / stride, 1024);
        let tlp = Bits::<tlp_dev_emu_capabilities, _>::new(tlp());
        let start = tlp.get(tlp_dev_emu_capabilities::tlp_rsp_gw_pages_bar_offset);
        assert_eq!(start, cap.get(virtio_emulation_cap::doorbell_bar_offset) + bytes);
        let count = tlp.get(tlp_dev_emu_capabilities::tlp_rsp_gw_num_pages);
        assert!(start + count * 4096 <= crate::bar0::SIZE);
    }
}
