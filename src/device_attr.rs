//! Limits and capabilities of a device. Pairs with `ib_uverbs_ex_query_device` in `core/uverbs_cmd.c`.
//!
//! A kernel older than a field leaves it out of the response; a field that is missing reads as "none".

use crate::device::guid::Guid;
use crate::number::open_enum;
use uverbs_uapi::device as uapi;
use uverbs_uapi::device::ib_uverbs_device_cap_flags as cap;
use uverbs_uapi::device::ib_uverbs_ex_query_device_resp as Raw;
use uverbs_uapi::device::ib_uverbs_odp_transport_cap_bits as odp;
use uverbs_uapi::device::ib_uverbs_raw_packet_caps as raw_packet;

open_enum! {
    /// The scope within which a device's atomics are atomic.
    #[doc(alias = "ibv_atomic_cap")]
    pub struct AtomicCap(u32) {
        /// There are none.
        NONE = uapi::ib_atomic_cap::IB_ATOMIC_NONE.0, "none";
        /// Against other atomics through the same device.
        DEVICE = uapi::ib_atomic_cap::IB_ATOMIC_HCA.0, "device";
        /// Against processors and other devices, too.
        GLOBAL = uapi::ib_atomic_cap::IB_ATOMIC_GLOB.0, "global";
    }
}

bitflags::bitflags! {
    /// Capabilities of a device. Bits without a name here are kept.
    #[doc(alias = "ibv_device_cap_flags")]
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
    pub struct DeviceCaps: u64 {
        /// Queue pairs can be resized.
        const RESIZE_MAX_WR = cap::IB_UVERBS_DEVICE_RESIZE_MAX_WR.bits();
        /// Ports count packets with bad partition keys.
        const BAD_PKEY_COUNTER = cap::IB_UVERBS_DEVICE_BAD_PKEY_CNTR.bits();
        /// Ports count packets with bad queue keys.
        const BAD_QKEY_COUNTER = cap::IB_UVERBS_DEVICE_BAD_QKEY_CNTR.bits();
        /// Raw packets can be multicast.
        const RAW_MULTICAST = cap::IB_UVERBS_DEVICE_RAW_MULTI.bits();
        /// Automatic path migration.
        const AUTO_PATH_MIGRATION = cap::IB_UVERBS_DEVICE_AUTO_PATH_MIG.bits();
        /// A queue pair can change its port while its send queue is drained.
        const CHANGE_PHY_PORT = cap::IB_UVERBS_DEVICE_CHANGE_PHY_PORT.bits();
        /// The port of an address handle is enforced.
        const UD_AV_PORT_ENFORCE = cap::IB_UVERBS_DEVICE_UD_AV_PORT_ENFORCE.bits();
        /// Modifying can name the state that the queue pair is assumed in.
        const CURRENT_STATE_MODIFY = cap::IB_UVERBS_DEVICE_CURR_QP_STATE_MOD.bits();
        /// Ports can be shut down.
        const SHUTDOWN_PORT = cap::IB_UVERBS_DEVICE_SHUTDOWN_PORT.bits();
        /// An event tells that a port became active.
        const PORT_ACTIVE_EVENT = cap::IB_UVERBS_DEVICE_PORT_ACTIVE_EVENT.bits();
        /// `sys_image_guid` is reported.
        const SYS_IMAGE_GUID = cap::IB_UVERBS_DEVICE_SYS_IMAGE_GUID.bits();
        /// A requester that finds no receive gets an RNR NAK.
        const RC_RNR_NAK = cap::IB_UVERBS_DEVICE_RC_RNR_NAK_GEN.bits();
        /// Shared receive queues can be resized.
        const SRQ_RESIZE = cap::IB_UVERBS_DEVICE_SRQ_RESIZE.bits();
        /// Completion queues can announce the n-th completion.
        const NOTIFY_NTH = cap::IB_UVERBS_DEVICE_N_NOTIFY_CQ.bits();
        /// Memory windows.
        const MEM_WINDOW = cap::IB_UVERBS_DEVICE_MEM_WINDOW.bits();
        /// Checksums of IPoIB datagrams are offloaded.
        const UD_IP_CSUM = cap::IB_UVERBS_DEVICE_UD_IP_CSUM.bits();
        /// Extended reliable connections.
        const XRC = cap::IB_UVERBS_DEVICE_XRC.bits();
        /// Sends that invalidate, local invalidation, and fast registration in the kernel.
        const MEM_MGT_EXTENSIONS = cap::IB_UVERBS_DEVICE_MEM_MGT_EXTENSIONS.bits();
        /// Memory windows of type 2A.
        const MEM_WINDOW_TYPE_2A = cap::IB_UVERBS_DEVICE_MEM_WINDOW_TYPE_2A.bits();
        /// Memory windows of type 2B.
        const MEM_WINDOW_TYPE_2B = cap::IB_UVERBS_DEVICE_MEM_WINDOW_TYPE_2B.bits();
        /// Checksums of connected IPoIB are offloaded.
        const RC_IP_CSUM = cap::IB_UVERBS_DEVICE_RC_IP_CSUM.bits();
        /// Checksums of raw packets are offloaded.
        const RAW_IP_CSUM = cap::IB_UVERBS_DEVICE_RAW_IP_CSUM.bits();
        /// Flow steering.
        const FLOW_STEERING = cap::IB_UVERBS_DEVICE_MANAGED_FLOW_STEERING.bits();
        /// The checksum of raw frames can be received.
        const RAW_SCATTER_FCS = cap::IB_UVERBS_DEVICE_RAW_SCATTER_FCS.bits();
        /// Received data can be padded to a cache line on the bus.
        const PCI_WRITE_END_PADDING = cap::IB_UVERBS_DEVICE_PCI_WRITE_END_PADDING.bits();
        /// Peers can flush to global visibility.
        const FLUSH_GLOBAL = cap::IB_UVERBS_DEVICE_FLUSH_GLOBAL.bits();
        /// Peers can flush to persistence.
        const FLUSH_PERSISTENT = cap::IB_UVERBS_DEVICE_FLUSH_PERSISTENT.bits();
        /// Peers can write eight bytes atomically.
        const ATOMIC_WRITE = cap::IB_UVERBS_DEVICE_ATOMIC_WRITE.bits();
        /// Memory that is not shared with a confidential machine's host is bounced.
        const CC_DMA_BOUNCE = cap::IB_UVERBS_DEVICE_CC_DMA_BOUNCE.bits();
        const _ = !0;
    }
}

bitflags::bitflags! {
    /// Operations that may touch memory whose pages are not there yet.
    #[doc(alias = "ibv_odp_transport_cap_bits")]
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
    pub struct OdpOps: u32 {
        /// Sending.
        const SEND = odp::IB_UVERBS_ODP_SUPPORT_SEND.bits();
        /// Receiving.
        const RECV = odp::IB_UVERBS_ODP_SUPPORT_RECV.bits();
        /// Writes.
        const WRITE = odp::IB_UVERBS_ODP_SUPPORT_WRITE.bits();
        /// Reads.
        const READ = odp::IB_UVERBS_ODP_SUPPORT_READ.bits();
        /// Atomics.
        const ATOMIC = odp::IB_UVERBS_ODP_SUPPORT_ATOMIC.bits();
        /// Receiving from a shared receive queue.
        const SRQ_RECV = odp::IB_UVERBS_ODP_SUPPORT_SRQ_RECV.bits();
        /// Flushes.
        const FLUSH = odp::IB_UVERBS_ODP_SUPPORT_FLUSH.bits();
        /// Atomic writes.
        const ATOMIC_WRITE = odp::IB_UVERBS_ODP_SUPPORT_ATOMIC_WRITE.bits();
        const _ = !0;
    }
}

/// On-demand paging: registration without pinning.
#[doc(alias = "ibv_odp_caps")]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct OdpCaps {
    /// Whether the whole address space can be registered at once.
    pub implicit: bool,
    /// Over reliable connections.
    pub rc: OdpOps,
    /// Over unreliable connections.
    pub uc: OdpOps,
    /// With datagrams.
    pub ud: OdpOps,
    /// Over extended reliable connections.
    pub xrc: OdpOps,
}

/// Receive-side scaling: spreading packets over queues.
#[doc(alias = "ibv_rss_caps")]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct RssCaps {
    /// Types of queue pairs that can spread, as `1 << type`.
    pub supported_qpts: u32,
    /// Indirection tables.
    pub max_indirection_tables: u32,
    /// Entries of an indirection table.
    pub max_indirection_table_size: u32,
}

/// Tag matching in shared receive queues.
#[doc(alias = "ibv_tm_caps")]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct TagMatchingCaps {
    /// Bytes of a rendezvous request's header.
    pub max_rndv_hdr_size: u32,
    /// Tags in a list.
    pub max_num_tags: u32,
    /// Whether it works over reliable connections.
    pub rc: bool,
    /// List operations under way.
    pub max_ops: u32,
    /// Scatter/gather entries of a tagged buffer.
    pub max_sge: u32,
}

/// Moderation of completion events.
#[doc(alias = "ibv_cq_moderation_caps")]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct ModerationCaps {
    /// Completions until an event.
    pub max_count: u16,
    /// Microseconds until an event.
    pub max_period_us: u16,
}

bitflags::bitflags! {
    /// Raw packet capabilities of a device.
    #[doc(alias = "ibv_raw_packet_caps")]
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
    pub struct RawPacketCaps: u32 {
        /// The VLAN tag can be taken off.
        const CVLAN_STRIPPING = raw_packet::IB_UVERBS_RAW_PACKET_CAP_CVLAN_STRIPPING.bits();
        /// The frame's checksum can be received.
        const SCATTER_FCS = raw_packet::IB_UVERBS_RAW_PACKET_CAP_SCATTER_FCS.bits();
        /// Checksums of IP, TCP and UDP are offloaded.
        const IP_CSUM = raw_packet::IB_UVERBS_RAW_PACKET_CAP_IP_CSUM.bits();
        /// Packets can wait for a receive instead of being dropped.
        const DELAY_DROP = raw_packet::IB_UVERBS_RAW_PACKET_CAP_DELAY_DROP.bits();
        const _ = !0;
    }
}

/// Limits and capabilities of a device, returned by [`query_device`](crate::Context::query_device).
///
/// A limit is that of the device as a whole; less may be left while other processes use it. A program's test starts
/// from `DeviceAttr::default()`, a device without capabilities, and sets the fields that it needs.
///
/// ```no_run
/// # fn f(context: &uverbs::Context) -> uverbs::Result<()> {
/// use uverbs::AtomicCap;
///
/// let attr = context.query_device()?;
/// // Queues as deep as the program wants, or as the device has them.
/// let (send_wr, cqe) = (attr.max_qp_wr.min(1024), attr.max_cqe.min(4096));
/// if attr.atomic_cap == AtomicCap::NONE {
///     println!("no compare and swap");
/// }
/// # let _ = (send_wr, cqe); Ok(()) }
/// ```
#[doc(alias = "ibv_device_attr")]
#[doc(alias = "ibv_device_attr_ex")]
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct DeviceAttr {
    /// Identifies the device.
    pub node_guid: Guid,
    /// Identifies the system that the device is part of.
    pub sys_image_guid: Guid,
    /// Version of the firmware, as its vendor counts: three numbers of 16, 16 and 32 bits on
    /// NVIDIA's devices. [`Device::firmware`](crate::Device::firmware) has it as text.
    pub fw_ver: u64,
    /// Capabilities of the device.
    pub caps: DeviceCaps,
    /// The scope within which compare-and-swap and fetch-and-add are atomic.
    pub atomic_cap: AtomicCap,
    /// Bytes of a memory region.
    pub max_mr_size: u64,
    /// Page sizes of memory regions, as the or of them all.
    pub page_size_cap: u64,
    /// PCI or IEEE number of the vendor.
    pub vendor_id: u32,
    /// The vendor's number of the product.
    pub vendor_part_id: u32,
    /// Revision of the hardware.
    pub hw_ver: u32,
    /// Queue pairs.
    pub max_qp: u32,
    /// Requests of a send or receive queue.
    pub max_qp_wr: u32,
    /// Scatter/gather entries of a request other than a read.
    pub max_sge: u32,
    /// Scatter/gather entries of a read.
    pub max_sge_rd: u32,
    /// Completion queues.
    pub max_cq: u32,
    /// Entries of a completion queue.
    pub max_cqe: u32,
    /// Memory regions.
    pub max_mr: u32,
    /// Protection domains.
    pub max_pd: u32,
    /// Reads and atomics of a peer that a queue pair answers at once.
    pub max_qp_rd_atom: u32,
    /// Reads and atomics of all peers that the device answers at once.
    pub max_res_rd_atom: u32,
    /// Reads and atomics that a queue pair can have under way.
    pub max_qp_init_rd_atom: u32,
    /// Memory windows.
    pub max_mw: u32,
    /// Queue pairs of raw Ethernet frames.
    pub max_raw_ethy_qp: u32,
    /// Multicast groups.
    pub max_mcast_grp: u32,
    /// Queue pairs in a multicast group.
    pub max_mcast_qp_attach: u32,
    /// Queue pairs in all multicast groups together.
    pub max_total_mcast_qp_attach: u32,
    /// Address handles.
    pub max_ah: u32,
    /// Shared receive queues; 0 without support.
    pub max_srq: u32,
    /// Requests of a shared receive queue.
    pub max_srq_wr: u32,
    /// Scatter/gather entries of a receive in a shared receive queue.
    pub max_srq_sge: u32,
    /// Partition keys of a port.
    pub max_pkeys: u16,
    /// The longest time that an acknowledgement takes inside the device, 4.096 µs · 2ⁿ.
    pub local_ca_ack_delay: u8,
    /// Ports.
    pub phys_port_cnt: u32,
    /// On-demand paging; `None` without.
    pub odp_caps: Option<OdpCaps>,
    /// The bits of a completion's timestamp that count; `None` if completions carry none.
    #[doc(alias = "completion_timestamp_mask")]
    pub timestamp_mask: Option<u64>,
    /// Frequency of the clock behind timestamps, in kHz; `None` without one.
    #[doc(alias = "hca_core_clock")]
    pub core_clock_khz: Option<u64>,
    /// Receive-side scaling; `None` without.
    pub rss_caps: Option<RssCaps>,
    /// Work queues that can receive by themselves; 0 without.
    pub max_wq_type_rq: u32,
    /// Raw packet capabilities of the device.
    pub raw_packet_caps: RawPacketCaps,
    /// Tag matching; `None` without.
    pub tag_matching_caps: Option<TagMatchingCaps>,
    /// Moderation of completion events; `None` without.
    pub moderation_caps: Option<ModerationCaps>,
    /// Bytes of device memory; 0 without.
    pub max_dm_size: u64,
}

/// A field of the response's later parts, if the kernel filled it.
macro_rules! if_filled {
    ($raw:expr, $field:ident) => {{
        let end = std::mem::offset_of!(Raw, $field) + size_of_val(&$raw.$field);
        ($raw.response_length as usize >= end).then_some(&$raw.$field)
    }};
}

impl DeviceAttr {
    pub(crate) fn new(raw: &Raw) -> Self {
        let base = &raw.base;
        let caps = if_filled!(raw, device_cap_flags_ex).copied();
        DeviceAttr {
            node_guid: Guid::new(base.node_guid.get()),
            sys_image_guid: Guid::new(base.sys_image_guid.get()),
            fw_ver: base.fw_ver,
            caps: DeviceCaps::from_bits_retain(caps.unwrap_or(base.device_cap_flags.into())),
            atomic_cap: AtomicCap(base.atomic_cap),
            max_mr_size: base.max_mr_size,
            page_size_cap: base.page_size_cap,
            vendor_id: base.vendor_id,
            vendor_part_id: base.vendor_part_id,
            hw_ver: base.hw_ver,
            max_qp: base.max_qp,
            max_qp_wr: base.max_qp_wr,
            max_sge: base.max_sge,
            max_sge_rd: base.max_sge_rd,
            max_cq: base.max_cq,
            max_cqe: base.max_cqe,
            max_mr: base.max_mr,
            max_pd: base.max_pd,
            max_qp_rd_atom: base.max_qp_rd_atom,
            max_res_rd_atom: base.max_res_rd_atom,
            max_qp_init_rd_atom: base.max_qp_init_rd_atom,
            max_mw: base.max_mw,
            max_raw_ethy_qp: base.max_raw_ethy_qp,
            max_mcast_grp: base.max_mcast_grp,
            max_mcast_qp_attach: base.max_mcast_qp_attach,
            max_total_mcast_qp_attach: base.max_total_mcast_qp_attach,
            max_ah: base.max_ah,
            max_srq: base.max_srq,
            max_srq_wr: base.max_srq_wr,
            max_srq_sge: base.max_srq_sge,
            max_pkeys: base.max_pkeys,
            local_ca_ack_delay: base.local_ca_ack_delay,
            phys_port_cnt: base.phys_port_cnt.into(),
            odp_caps: odp_caps(raw),
            timestamp_mask: if_filled!(raw, timestamp_mask).copied().filter(|mask| *mask != 0),
            core_clock_khz: if_filled!(raw, hca_core_clock).copied().filter(|khz| *khz != 0),
            rss_caps: if_filled!(raw, rss_caps)
                .filter(|caps| caps.max_rwq_indirection_tables != 0)
                .map(|caps| RssCaps {
                    supported_qpts: caps.supported_qpts,
                    max_indirection_tables: caps.max_rwq_indirection_tables,
                    max_indirection_table_size: caps.max_rwq_indirection_table_size,
                }),
            max_wq_type_rq: if_filled!(raw, max_wq_type_rq).copied().unwrap_or_default(),
            raw_packet_caps: if_filled!(raw, raw_packet_caps)
                .map_or(RawPacketCaps::empty(), |caps| RawPacketCaps::from_bits_retain(*caps)),
            tag_matching_caps: if_filled!(raw, tm_caps).filter(|caps| caps.max_num_tags != 0).map(
                |caps| {
                    /// `IBV_TM_CAP_RC`.
                    const RC: u32 = 1;
                    TagMatchingCaps {
                        max_rndv_hdr_size: caps.max_rndv_hdr_size,
                        max_num_tags: caps.max_num_tags,
                        rc: caps.flags & RC != 0,
                        max_ops: caps.max_ops,
                        max_sge: caps.max_sge,
                    }
                },
            ),
            moderation_caps: if_filled!(raw, cq_moderation_caps)
                .filter(|caps| caps.max_cq_moderation_count != 0)
                .map(|caps| ModerationCaps {
                    max_count: caps.max_cq_moderation_count,
                    max_period_us: caps.max_cq_moderation_period,
                }),
            max_dm_size: if_filled!(raw, max_dm_size).copied().unwrap_or_default(),
        }
    }
}

/// Names the values that are above the device's limits; `None` if none is. Each of `values` has its name and its limit.
pub(crate) fn above_limits(device: &str, values: &[(&str, u32, u32)]) -> Option<String> {
    let above: Vec<_> = values
        .iter()
        .filter(|(_, value, limit)| value > limit)
        .map(|(name, value, limit)| format!("{name} {value} is above the {limit} of {device}"))
        .collect();
    (!above.is_empty()).then(|| above.join(", "))
}

fn odp_caps(raw: &Raw) -> Option<OdpCaps> {
    use uapi::ib_uverbs_odp_general_cap_bits as General;
    let caps = if_filled!(raw, odp_caps)?;
    let general = General::from_bits_retain(caps.general_caps);
    let xrc = if_filled!(raw, xrc_odp_caps).copied().unwrap_or_default();
    general.contains(General::IB_UVERBS_ODP_SUPPORT).then_some(OdpCaps {
        implicit: general.contains(General::IB_UVERBS_ODP_SUPPORT_IMPLICIT),
        rc: OdpOps::from_bits_retain(caps.per_transport_caps.rc_odp_caps),
        uc: OdpOps::from_bits_retain(caps.per_transport_caps.uc_odp_caps),
        ud: OdpOps::from_bits_retain(caps.per_transport_caps.ud_odp_caps),
        xrc: OdpOps::from_bits_retain(xrc),
    })
}

#[cfg(test)]
mod tests;
