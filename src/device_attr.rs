//! What a device can do. Pairs with `ib_uverbs_ex_query_device` in `core/uverbs_cmd.c`.
//!
//! A kernel older than a field leaves it out of the answer; what it left out reads as "none".

use crate::device::Guid;
use crate::number::open_enum;
use std::fmt;
use uverbs_uapi::device as uapi;
use uverbs_uapi::device::ib_uverbs_device_cap_flags as cap;
use uverbs_uapi::device::ib_uverbs_ex_query_device_resp as Raw;
use uverbs_uapi::device::ib_uverbs_odp_transport_cap_bits as odp;
use uverbs_uapi::device::ib_uverbs_raw_packet_caps as raw_packet;

open_enum! {
    /// Against whom a device's atomics are atomic.
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
    /// What a device can do. Bits without a name here are kept.
    #[doc(alias = "ibv_device_cap_flags")]
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
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
        /// `sys_image_guid` is told.
        const SYS_IMAGE_GUID = cap::IB_UVERBS_DEVICE_SYS_IMAGE_GUID.bits();
        /// A peer that finds no receive is told to wait.
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
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ModerationCaps {
    /// Completions until an event.
    pub max_count: u16,
    /// Microseconds until an event.
    pub max_period_us: u16,
}

bitflags::bitflags! {
    /// What a device does with raw packets.
    #[doc(alias = "ibv_raw_packet_caps")]
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
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

/// Limits and capabilities of a device, answered by [`query_device`](crate::Context::query_device).
///
/// A limit is what the device could do alone: what is left when others use it may be less.
#[doc(alias = "ibv_device_attr")]
#[doc(alias = "ibv_device_attr_ex")]
#[derive(Clone)]
pub struct DeviceAttr {
    raw: Raw,
}

/// Fields of the answer's first part, which every kernel fills.
macro_rules! base {
    ($( $(#[$meta:meta])* $name:ident: $type:ty; )*) => {
        impl DeviceAttr {
            $( $(#[$meta])* pub fn $name(&self) -> $type { self.raw.base.$name } )*

            fn debug_base(&self, f: &mut fmt::DebugStruct<'_, '_>) {
                $( f.field(stringify!($name), &self.$name()); )*
            }
        }
    };
}

base! {
    /// Bytes of a memory region.
    max_mr_size: u64;
    /// Page sizes of memory regions, as the or of them all.
    page_size_cap: u64;
    /// PCI or IEEE number of the vendor.
    vendor_id: u32;
    /// The vendor's number of the product.
    vendor_part_id: u32;
    /// Revision of the hardware.
    hw_ver: u32;
    /// Queue pairs.
    max_qp: u32;
    /// Requests of a send or receive queue.
    max_qp_wr: u32;
    /// Scatter/gather entries of a request other than a read.
    max_sge: u32;
    /// Scatter/gather entries of a read.
    max_sge_rd: u32;
    /// Completion queues.
    max_cq: u32;
    /// Entries of a completion queue.
    max_cqe: u32;
    /// Memory regions.
    max_mr: u32;
    /// Protection domains.
    max_pd: u32;
    /// Reads and atomics of a peer that a queue pair answers at once.
    max_qp_rd_atom: u32;
    /// Reads and atomics of all peers that the device answers at once.
    max_res_rd_atom: u32;
    /// Reads and atomics that a queue pair can have under way.
    max_qp_init_rd_atom: u32;
    /// Memory windows.
    max_mw: u32;
    /// Queue pairs of raw Ethernet frames.
    max_raw_ethy_qp: u32;
    /// Multicast groups.
    max_mcast_grp: u32;
    /// Queue pairs in a multicast group.
    max_mcast_qp_attach: u32;
    /// Queue pairs in all multicast groups together.
    max_total_mcast_qp_attach: u32;
    /// Address handles.
    max_ah: u32;
    /// Shared receive queues; 0 without support.
    max_srq: u32;
    /// Requests of a shared receive queue.
    max_srq_wr: u32;
    /// Scatter/gather entries of a receive in a shared receive queue.
    max_srq_sge: u32;
    /// Partition keys of a port.
    max_pkeys: u16;
    /// How long an acknowledgement may take inside the device, 4.096 µs · 2ⁿ.
    local_ca_ack_delay: u8;
    /// Ports.
    phys_port_cnt: u8;
}

/// Whether the kernel filled a field of the answer's later parts.
macro_rules! told {
    ($raw:expr, $field:ident) => {
        $raw.response_length as usize
            >= std::mem::offset_of!(Raw, $field) + size_of_val(&$raw.$field)
    };
}

impl DeviceAttr {
    pub(crate) fn new(raw: Raw) -> Self {
        DeviceAttr { raw }
    }

    /// Version of the firmware, as its vendor counts: three numbers of 16, 16 and 32 bits on
    /// NVIDIA's devices. [`Device::firmware`](crate::Device::firmware) has it as text.
    pub fn fw_ver(&self) -> u64 {
        self.raw.base.fw_ver
    }

    /// What the device can do.
    pub fn caps(&self) -> DeviceCaps {
        let wide = told!(self.raw, device_cap_flags_ex);
        DeviceCaps::from_bits_retain(if wide {
            self.raw.device_cap_flags_ex
        } else {
            self.raw.base.device_cap_flags.into()
        })
    }

    /// Against whom compare-and-swap and fetch-and-add are atomic.
    pub fn atomic_cap(&self) -> AtomicCap {
        AtomicCap(self.raw.base.atomic_cap)
    }

    /// On-demand paging; `None` without.
    pub fn odp_caps(&self) -> Option<OdpCaps> {
        if !told!(self.raw, odp_caps) {
            return None;
        }
        let caps = &self.raw.odp_caps;
        let general = uapi::ib_uverbs_odp_general_cap_bits::from_bits_retain(caps.general_caps);
        let support = uapi::ib_uverbs_odp_general_cap_bits::IB_UVERBS_ODP_SUPPORT;
        let implicit = uapi::ib_uverbs_odp_general_cap_bits::IB_UVERBS_ODP_SUPPORT_IMPLICIT;
        let xrc = if told!(self.raw, xrc_odp_caps) { self.raw.xrc_odp_caps } else { 0 };
        general.contains(support).then_some(OdpCaps {
            implicit: general.contains(implicit),
            rc: OdpOps::from_bits_retain(caps.per_transport_caps.rc_odp_caps),
            uc: OdpOps::from_bits_retain(caps.per_transport_caps.uc_odp_caps),
            ud: OdpOps::from_bits_retain(caps.per_transport_caps.ud_odp_caps),
            xrc: OdpOps::from_bits_retain(xrc),
        })
    }

    /// The bits of a completion's timestamp that count; `None` if completions carry none.
    #[doc(alias = "completion_timestamp_mask")]
    pub fn timestamp_mask(&self) -> Option<u64> {
        let told = told!(self.raw, timestamp_mask);
        (told && self.raw.timestamp_mask != 0).then_some(self.raw.timestamp_mask)
    }

    /// Frequency of the clock behind timestamps, in kHz; `None` without one.
    #[doc(alias = "hca_core_clock")]
    pub fn core_clock_khz(&self) -> Option<u64> {
        let told = told!(self.raw, hca_core_clock);
        (told && self.raw.hca_core_clock != 0).then_some(self.raw.hca_core_clock)
    }

    /// Receive-side scaling; `None` without.
    pub fn rss_caps(&self) -> Option<RssCaps> {
        let caps = &self.raw.rss_caps;
        let some = told!(self.raw, rss_caps) && caps.max_rwq_indirection_tables != 0;
        some.then_some(RssCaps {
            supported_qpts: caps.supported_qpts,
            max_indirection_tables: caps.max_rwq_indirection_tables,
            max_indirection_table_size: caps.max_rwq_indirection_table_size,
        })
    }

    /// Work queues that can receive by themselves; 0 without.
    pub fn max_wq_type_rq(&self) -> u32 {
        if told!(self.raw, max_wq_type_rq) { self.raw.max_wq_type_rq } else { 0 }
    }

    /// What the device does with raw packets.
    pub fn raw_packet_caps(&self) -> RawPacketCaps {
        let told = told!(self.raw, raw_packet_caps);
        RawPacketCaps::from_bits_retain(if told { self.raw.raw_packet_caps } else { 0 })
    }

    /// Tag matching; `None` without.
    pub fn tag_matching_caps(&self) -> Option<TagMatchingCaps> {
        /// `IBV_TM_CAP_RC`.
        const RC: u32 = 1;
        let caps = &self.raw.tm_caps;
        let some = told!(self.raw, tm_caps) && caps.max_num_tags != 0;
        some.then_some(TagMatchingCaps {
            max_rndv_hdr_size: caps.max_rndv_hdr_size,
            max_num_tags: caps.max_num_tags,
            rc: caps.flags & RC != 0,
            max_ops: caps.max_ops,
            max_sge: caps.max_sge,
        })
    }

    /// Moderation of completion events; `None` without.
    pub fn moderation_caps(&self) -> Option<ModerationCaps> {
        let caps = &self.raw.cq_moderation_caps;
        let some = told!(self.raw, cq_moderation_caps) && caps.max_cq_moderation_count != 0;
        some.then_some(ModerationCaps {
            max_count: caps.max_cq_moderation_count,
            max_period_us: caps.max_cq_moderation_period,
        })
    }

    /// Bytes of device memory; 0 without.
    pub fn max_dm_size(&self) -> u64 {
        if told!(self.raw, max_dm_size) { self.raw.max_dm_size } else { 0 }
    }

    /// Identifies the device.
    pub fn node_guid(&self) -> Guid {
        Guid::new(self.raw.base.node_guid.get())
    }

    /// Identifies the system that the device is part of.
    pub fn sys_image_guid(&self) -> Guid {
        Guid::new(self.raw.base.sys_image_guid.get())
    }
}

impl fmt::Debug for DeviceAttr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut out = f.debug_struct("DeviceAttr");
        out.field("node_guid", &self.node_guid())
            .field("sys_image_guid", &self.sys_image_guid())
            .field("fw_ver", &self.fw_ver())
            .field("caps", &self.caps())
            .field("atomic_cap", &self.atomic_cap());
        self.debug_base(&mut out);
        out.field("odp_caps", &self.odp_caps())
            .field("timestamp_mask", &self.timestamp_mask())
            .field("core_clock_khz", &self.core_clock_khz())
            .field("rss_caps", &self.rss_caps())
            .field("max_wq_type_rq", &self.max_wq_type_rq())
            .field("raw_packet_caps", &self.raw_packet_caps())
            .field("tag_matching_caps", &self.tag_matching_caps())
            .field("moderation_caps", &self.moderation_caps())
            .field("max_dm_size", &self.max_dm_size())
            .finish()
    }
}
