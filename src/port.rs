//! Ports: their state, limits and tables. [`query`] asks the kernel for them.

pub(crate) mod choose;
mod links;
mod path;
mod query;
mod reply;

pub(crate) use links::LinkLayers;

use crate::number::{Gid, open_enum};
use uverbs_uapi::gid::{ib_uverbs_gid_entry, ib_uverbs_gid_type};
use uverbs_uapi::port as uapi;
use zerocopy::IntoBytes;

open_enum! {
    /// The largest payload of a packet, as a code.
    #[doc(alias = "ibv_mtu")]
    pub struct Mtu(u8) {
        MTU_256 = uapi::ib_mtu::IB_MTU_256.0, "256";
        MTU_512 = uapi::ib_mtu::IB_MTU_512.0, "512";
        MTU_1024 = uapi::ib_mtu::IB_MTU_1024.0, "1024";
        MTU_2048 = uapi::ib_mtu::IB_MTU_2048.0, "2048";
        MTU_4096 = uapi::ib_mtu::IB_MTU_4096.0, "4096";
    }
}

impl Mtu {
    /// The size in bytes; `None` for a code that does not exist.
    pub fn bytes(self) -> Option<u32> {
        matches!(self.0, 1..=5).then(|| 128 << self.0)
    }
}

open_enum! {
    /// Logical state of a port.
    #[doc(alias = "ibv_port_state")]
    #[doc(alias = "ibv_port_state_str")]
    pub struct PortState(u8) {
        /// The device does not tell.
        NOP = uapi::ib_port_state::IB_PORT_NOP.0, "no change";
        /// No link.
        DOWN = uapi::ib_port_state::IB_PORT_DOWN.0, "down";
        /// There is a link, and the subnet manager has not configured the port yet.
        INIT = uapi::ib_port_state::IB_PORT_INIT.0, "init";
        /// Configured, not yet in use.
        ARMED = uapi::ib_port_state::IB_PORT_ARMED.0, "armed";
        /// The port can send and receive.
        ACTIVE = uapi::ib_port_state::IB_PORT_ACTIVE.0, "active";
        /// The port can send and receive; the link is being retrained at the moment.
        ACTIVE_DEFER = uapi::ib_port_state::IB_PORT_ACTIVE_DEFER.0, "active defer";
    }
}

open_enum! {
    /// Physical state of a port.
    pub struct PhysState(u8) {
        SLEEP = uapi::ib_port_phys_state::IB_PORT_PHYS_STATE_SLEEP.0, "sleep";
        POLLING = uapi::ib_port_phys_state::IB_PORT_PHYS_STATE_POLLING.0, "polling";
        DISABLED = uapi::ib_port_phys_state::IB_PORT_PHYS_STATE_DISABLED.0, "disabled";
        TRAINING = uapi::ib_port_phys_state::IB_PORT_PHYS_STATE_PORT_CONFIGURATION_TRAINING.0,
            "port configuration training";
        LINK_UP = uapi::ib_port_phys_state::IB_PORT_PHYS_STATE_LINK_UP.0, "link up";
        LINK_ERROR_RECOVERY =
            uapi::ib_port_phys_state::IB_PORT_PHYS_STATE_LINK_ERROR_RECOVERY.0,
            "link error recovery";
        PHY_TEST = uapi::ib_port_phys_state::IB_PORT_PHYS_STATE_PHY_TEST.0, "phy test";
    }
}

open_enum! {
    /// The link layer of a port.
    pub struct LinkLayer(u8) {
        UNSPECIFIED = uapi::rdma_link_layer::IB_LINK_LAYER_UNSPECIFIED.0, "unspecified";
        INFINIBAND = uapi::rdma_link_layer::IB_LINK_LAYER_INFINIBAND.0, "InfiniBand";
        ETHERNET = uapi::rdma_link_layer::IB_LINK_LAYER_ETHERNET.0, "Ethernet";
    }
}

open_enum! {
    /// Lanes of a link, as a code.
    pub struct LinkWidth(u8) {
        X1 = uapi::ib_port_width::IB_WIDTH_1X.0, "1x";
        X2 = uapi::ib_port_width::IB_WIDTH_2X.0, "2x";
        X4 = uapi::ib_port_width::IB_WIDTH_4X.0, "4x";
        X8 = uapi::ib_port_width::IB_WIDTH_8X.0, "8x";
        X12 = uapi::ib_port_width::IB_WIDTH_12X.0, "12x";
    }
}

impl LinkWidth {
    /// The number of lanes; `None` for an unknown code.
    pub fn lanes(self) -> Option<u32> {
        Some(match self {
            Self::X1 => 1,
            Self::X2 => 2,
            Self::X4 => 4,
            Self::X8 => 8,
            Self::X12 => 12,
            _ => return None,
        })
    }
}

open_enum! {
    /// Signalling rate of a lane, as a code.
    ///
    /// ```
    /// # use uverbs::{LinkSpeed, LinkWidth};
    /// let (width, speed) = (LinkWidth::X4, LinkSpeed::EDR);
    /// assert_eq!((width.lanes(), speed.lane_mbps()), (Some(4), Some(25_000)));
    /// ```
    pub struct LinkSpeed(u32) {
        SDR = uapi::ib_port_speed::IB_SPEED_SDR.0, "SDR";
        DDR = uapi::ib_port_speed::IB_SPEED_DDR.0, "DDR";
        QDR = uapi::ib_port_speed::IB_SPEED_QDR.0, "QDR";
        FDR10 = uapi::ib_port_speed::IB_SPEED_FDR10.0, "FDR10";
        FDR = uapi::ib_port_speed::IB_SPEED_FDR.0, "FDR";
        EDR = uapi::ib_port_speed::IB_SPEED_EDR.0, "EDR";
        HDR = uapi::ib_port_speed::IB_SPEED_HDR.0, "HDR";
        NDR = uapi::ib_port_speed::IB_SPEED_NDR.0, "NDR";
        XDR = uapi::ib_port_speed::IB_SPEED_XDR.0, "XDR";
    }
}

impl LinkSpeed {
    /// The signalling rate of a lane in megabits a second, as the specification rounds it; `None` for
    /// an unknown code.
    pub fn lane_mbps(self) -> Option<u32> {
        Some(match self {
            Self::SDR => 2_500,
            Self::DDR => 5_000,
            Self::QDR | Self::FDR10 => 10_000,
            Self::FDR => 14_000,
            Self::EDR => 25_000,
            Self::HDR => 50_000,
            Self::NDR => 100_000,
            Self::XDR => 200_000,
            _ => return None,
        })
    }
}

bitflags::bitflags! {
    /// The capabilities of a port.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
    pub struct PortCaps: u32 {
        /// It runs the subnet manager.
        const SM = uapi::ib_uverbs_query_port_cap_flags::IB_UVERBS_PCF_SM.bits();
        /// Traps are supported.
        const TRAP = uapi::ib_uverbs_query_port_cap_flags::IB_UVERBS_PCF_TRAP_SUP.bits();
        /// Automatic path migration is supported.
        const AUTO_MIGRATION =
            uapi::ib_uverbs_query_port_cap_flags::IB_UVERBS_PCF_AUTO_MIGR_SUP.bits();
        /// The subnet manager is disabled.
        const SM_DISABLED = uapi::ib_uverbs_query_port_cap_flags::IB_UVERBS_PCF_SM_DISABLED.bits();
        /// Speeds above QDR are supported.
        const EXTENDED_SPEEDS =
            uapi::ib_uverbs_query_port_cap_flags::IB_UVERBS_PCF_EXTENDED_SPEEDS_SUP.bits();
        /// Communication management is supported.
        const CM = uapi::ib_uverbs_query_port_cap_flags::IB_UVERBS_PCF_CM_SUP.bits();
        /// Identifiers follow the addresses of the network interface.
        const IP_BASED_GIDS =
            uapi::ib_uverbs_query_port_cap_flags::IB_UVERBS_PCF_IP_BASED_GIDS.bits();
        /// Bits that have no name here are kept.
        const _ = !0;
    }
}

/// State and limits of a port, returned by [`query_port`](crate::Context::query_port).
///
/// ```no_run
/// # fn f(context: &uverbs::Context) -> uverbs::Result<()> {
/// use uverbs::PortState;
///
/// let attr = context.query_port(1)?;
/// if attr.state != PortState::ACTIVE {
///     println!("{}; the link is in state {}", attr.state, attr.phys_state);
/// }
/// # Ok(()) }
/// ```
#[doc(alias = "ibv_port_attr")]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct PortAttr {
    /// Logical state.
    pub state: PortState,
    /// Physical state.
    pub phys_state: PhysState,
    /// The link layer.
    pub link_layer: LinkLayer,
    /// The largest MTU that the port could have.
    pub max_mtu: Mtu,
    /// The MTU in use.
    pub active_mtu: Mtu,
    /// Entries of the GID table, the empty ones included.
    pub gid_table_len: u32,
    /// Entries of the table of partition keys.
    pub pkey_table_len: u16,
    /// Capabilities.
    pub caps: PortCaps,
    /// Further capabilities, bits of the specification's `CapabilityMask2`.
    pub caps2: u16,
    /// The longest message in bytes.
    pub max_msg_size: u32,
    /// Packets with a bad partition key so far.
    pub bad_pkey_count: u32,
    /// Packets with a bad queue key so far.
    pub qkey_violation_count: u32,
    /// Local identifier; 0 on Ethernet.
    pub lid: u16,
    /// Local identifier of the subnet manager; 0 on Ethernet.
    pub sm_lid: u16,
    /// Service level of the subnet manager.
    pub sm_sl: u8,
    /// LMC: the number of low bits of the local identifier that the port ignores.
    pub lmc: u8,
    /// Code of the number of virtual lanes.
    pub max_vl_num: u8,
    /// The longest delivery time of the subnet, 4.096 µs · 2ⁿ.
    pub subnet_timeout: u8,
    /// The initialisation that the subnet manager did (`InitTypeReply`).
    pub init_type_reply: u8,
    /// Lanes.
    pub active_width: LinkWidth,
    /// Signalling rate of a lane. Before Linux 6.7 rates above HDR do not fit and read as less.
    pub active_speed: LinkSpeed,
    /// Whether every packet needs a global route header, so that paths must be global.
    pub grh_required: bool,
}

impl PortAttr {
    fn new(raw: &uapi::ib_uverbs_query_port_resp_ex) -> Self {
        let legacy = &raw.legacy_resp;
        // Kernels that know the wide field fill both.
        let speed = match raw.active_speed_ex {
            0 => legacy.active_speed.into(),
            wide => wide,
        };
        let grh_required = uapi::ib_uverbs_query_port_flags::IB_UVERBS_QPF_GRH_REQUIRED.bits();
        PortAttr {
            state: PortState(legacy.state),
            phys_state: PhysState(legacy.phys_state),
            link_layer: LinkLayer(legacy.link_layer),
            max_mtu: Mtu(legacy.max_mtu),
            active_mtu: Mtu(legacy.active_mtu),
            gid_table_len: legacy.gid_tbl_len,
            pkey_table_len: legacy.pkey_tbl_len,
            caps: PortCaps::from_bits_retain(legacy.port_cap_flags),
            caps2: raw.port_cap_flags2,
            max_msg_size: legacy.max_msg_sz,
            bad_pkey_count: legacy.bad_pkey_cntr,
            qkey_violation_count: legacy.qkey_viol_cntr,
            lid: legacy.lid,
            sm_lid: legacy.sm_lid,
            sm_sl: legacy.sm_sl,
            lmc: legacy.lmc,
            max_vl_num: legacy.max_vl_num,
            subnet_timeout: legacy.subnet_timeout,
            init_type_reply: legacy.init_type_reply,
            active_width: LinkWidth(legacy.active_width),
            active_speed: LinkSpeed(speed),
            grh_required: legacy.flags & grh_required != 0,
        }
    }
}

impl PortAttr {
    /// The rate of the link in megabits a second, encoding not subtracted: lanes times the rate of one.
    /// `None` for a width or speed that this library does not know.
    /// [`query_port_speed`](crate::Context::query_port_speed) tells the total rate of aggregated ports.
    pub fn link_rate_mbps(&self) -> Option<u32> {
        Some(self.active_width.lanes()? * self.active_speed.lane_mbps()?)
    }
}

/// The rate of a port, returned by [`query_port_speed`](crate::Context::query_port_speed).
///
/// ```no_run
/// # fn f(context: &uverbs::Context) -> uverbs::Result<()> {
/// let speed: uverbs::PortSpeed = context.query_port_speed(1)?;
/// match speed.of_link {
///     false => println!("{} Mbit/s, says the driver", speed.mbps),
///     true => println!("{} Mbit/s, the link's width and speed", speed.mbps),
/// }
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct PortSpeed {
    /// Megabits a second.
    pub mbps: u64,
    /// Whether the rate is [that of the link](PortAttr::link_rate_mbps), because the kernel or the driver does not tell
    /// another one: it is neither the rate of aggregated ports (LAG) nor a virtual function's share.
    pub of_link: bool,
}

open_enum! {
    /// The protocol on the wire of a GID.
    #[doc(alias = "ibv_gid_type")]
    pub struct GidType(u32) {
        /// InfiniBand.
        IB = ib_uverbs_gid_type::IB_UVERBS_GID_TYPE_IB.0, "IB";
        /// RoCE version 1: Ethernet frames, not routed.
        ROCE_V1 = ib_uverbs_gid_type::IB_UVERBS_GID_TYPE_ROCE_V1.0, "RoCE v1";
        /// RoCE version 2: UDP.
        ROCE_V2 = ib_uverbs_gid_type::IB_UVERBS_GID_TYPE_ROCE_V2.0, "RoCE v2";
    }
}

/// An entry of a port's GID table.
#[doc(alias = "ibv_gid_entry")]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct GidEntry {
    /// The identifier; all zero in an empty slot, whose other fields mean nothing.
    pub gid: Gid,
    /// Its index in the port's table.
    pub index: u32,
    /// The port, from 1.
    pub port: u32,
    /// The protocol on the wire.
    pub gid_type: GidType,
    /// Interface index of the network device behind it; 0 without one.
    pub ifindex: u32,
}

impl GidEntry {
    fn new(raw: &ib_uverbs_gid_entry) -> Self {
        let mut gid = [0; 16];
        gid.copy_from_slice(raw.gid.as_bytes());
        GidEntry {
            gid: Gid(gid),
            index: raw.gid_index,
            port: raw.port_num,
            gid_type: GidType(raw.gid_type),
            ifindex: raw.netdev_ifindex,
        }
    }
}

#[cfg(test)]
mod tests;
