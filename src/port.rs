//! Ports: their state, limits and tables. Pairs with the QUERY_PORT and QUERY_GID methods of
//! `core/uverbs_std_types_device.c`.

mod links;

pub(crate) use links::LinkLayers;

use crate::context::Context;
use crate::error::{Error, Result};
use crate::number::{Gid, open_enum};
use crate::uverbs::command::Command;
use rustix::io::Errno;
use std::net::IpAddr;
use uverbs_uapi::device::{
    UVERBS_METHOD_QUERY_GID_ENTRY, UVERBS_METHOD_QUERY_GID_TABLE, UVERBS_METHOD_QUERY_PORT,
};
use uverbs_uapi::gid::{
    UVERBS_ATTR_QUERY_GID_ENTRY_FLAGS, UVERBS_ATTR_QUERY_GID_ENTRY_GID_INDEX,
    UVERBS_ATTR_QUERY_GID_ENTRY_PORT, UVERBS_ATTR_QUERY_GID_ENTRY_RESP_ENTRY,
    UVERBS_ATTR_QUERY_GID_TABLE_ENTRY_SIZE, UVERBS_ATTR_QUERY_GID_TABLE_RESP_ENTRIES,
    UVERBS_ATTR_QUERY_GID_TABLE_RESP_NUM_ENTRIES, ib_uverbs_gid_entry, ib_uverbs_gid_type,
};
use uverbs_uapi::object::UVERBS_OBJECT_DEVICE;
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
    pub struct PortState(u8) {
        /// Not told.
        NOP = uapi::ib_port_state::IB_PORT_NOP.0, "no change";
        /// No link.
        DOWN = uapi::ib_port_state::IB_PORT_DOWN.0, "down";
        /// There is a link, and the subnet manager has not configured it.
        INIT = uapi::ib_port_state::IB_PORT_INIT.0, "init";
        /// Configured, not yet in use.
        ARMED = uapi::ib_port_state::IB_PORT_ARMED.0, "armed";
        /// Works.
        ACTIVE = uapi::ib_port_state::IB_PORT_ACTIVE.0, "active";
        /// Works, and the link is just being retrained.
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
    /// What carries a port.
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
    /// How many lanes; `None` for an unknown code.
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

bitflags::bitflags! {
    /// What a port can do.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
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

/// State and limits of a port, answered by [`query_port`](Context::query_port).
#[doc(alias = "ibv_port_attr")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PortAttr {
    /// Logical state.
    pub state: PortState,
    /// Physical state.
    pub phys_state: PhysState,
    /// What carries the port.
    pub link_layer: LinkLayer,
    /// The largest MTU that the port could have.
    pub max_mtu: Mtu,
    /// The MTU that it has.
    pub active_mtu: Mtu,
    /// Entries of the table of global identifiers, the empty ones included.
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
    /// How many low bits of the local identifier the port answers to.
    pub lmc: u8,
    /// Code of the number of virtual lanes.
    pub max_vl_num: u8,
    /// How long the subnet takes to deliver, 4.096 µs · 2ⁿ.
    pub subnet_timeout: u8,
    /// How far the subnet manager initialised the port.
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

open_enum! {
    /// How a global identifier is used on the wire.
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

/// An entry of a port's table of global identifiers.
#[doc(alias = "ibv_gid_entry")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct GidEntry {
    /// The identifier; all zero in an empty slot, whose other fields mean nothing.
    pub gid: Gid,
    /// Its index in the port's table.
    pub index: u32,
    /// The port, from 1.
    pub port: u32,
    /// How it is used on the wire.
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

/// An attribute's length has 16 bits.
const MAX_GID_ENTRIES: usize = u16::MAX as usize / size_of::<ib_uverbs_gid_entry>();

impl Context {
    /// State and limits of a port; ports count from 1.
    ///
    /// # Errors
    ///
    /// `EINVAL` for a port that the device does not have.
    #[doc(alias = "ibv_query_port")]
    pub fn query_port(&self, port: u8) -> Result<PortAttr> {
        let mut resp = uapi::ib_uverbs_query_port_resp_ex::default();
        let mut command = Command::new(UVERBS_OBJECT_DEVICE, UVERBS_METHOD_QUERY_PORT)
            .u64(uapi::UVERBS_ATTR_QUERY_PORT_PORT_NUM, port.into())
            .output(uapi::UVERBS_ATTR_QUERY_PORT_RESP, &mut resp);
        let asked = self.file.execute("query_port", &mut command);
        drop(command);
        asked.map_err(|error| self.explain_port(error, port.into()))?;
        Ok(PortAttr::new(&resp))
    }

    /// One entry of a port's table of global identifiers; the identifier of an empty slot
    /// [is zero](Gid::is_zero).
    ///
    /// # Errors
    ///
    /// `EINVAL` for a port that the device does not have, or an index beyond the table.
    #[doc(alias = "ibv_query_gid")]
    #[doc(alias = "ibv_query_gid_ex")]
    pub fn query_gid(&self, port: u8, index: u32) -> Result<GidEntry> {
        const VERB: &str = "query_gid";
        let mut entry = ib_uverbs_gid_entry::default();
        let mut command = Command::new(UVERBS_OBJECT_DEVICE, UVERBS_METHOD_QUERY_GID_ENTRY)
            .u64(UVERBS_ATTR_QUERY_GID_ENTRY_PORT, port.into())
            .u64(UVERBS_ATTR_QUERY_GID_ENTRY_GID_INDEX, index.into())
            // The kernel wants them although it has none.
            .u32(UVERBS_ATTR_QUERY_GID_ENTRY_FLAGS, 0)
            .output(UVERBS_ATTR_QUERY_GID_ENTRY_RESP_ENTRY, &mut entry);
        let asked = self.file.execute(VERB, &mut command);
        drop(command);
        match asked {
            Ok(()) => Ok(GidEntry::new(&entry)),
            Err(error) if error.errno() == Errno::NODATA => Ok(GidEntry {
                gid: Gid::default(),
                index,
                port: port.into(),
                gid_type: GidType::default(),
                ifindex: 0,
            }),
            Err(error) if error.errno() == Errno::INVAL => match self.query_port(port) {
                Ok(attr) => Err(error.detail(format!(
                    "index {index} of port {port}, whose table has {} entries",
                    attr.gid_table_len
                ))),
                Err(other) => Err(other.in_verb(VERB)),
            },
            Err(error) => Err(error),
        }
    }

    /// The global identifiers of all ports, without the empty slots.
    #[doc(alias = "ibv_query_gid_table")]
    pub fn gid_table(&self) -> Result<Vec<GidEntry>> {
        const VERB: &str = "query_gid_table";
        let ports = u8::try_from(self.file.device.port_count()).unwrap_or(u8::MAX);
        let mut total = 0usize;
        for port in 1..=ports {
            let attr = self.query_port(port).map_err(|error| error.in_verb(VERB))?;
            total += attr.gid_table_len as usize;
        }
        // Only the slots in use are answered, so that the limit is no limit in practice.
        let total = total.min(MAX_GID_ENTRIES);
        if total == 0 {
            return Ok(Vec::new());
        }
        let mut entries = vec![ib_uverbs_gid_entry::default(); total];
        let mut count = 0u64;
        let mut command = Command::new(UVERBS_OBJECT_DEVICE, UVERBS_METHOD_QUERY_GID_TABLE)
            .u64(UVERBS_ATTR_QUERY_GID_TABLE_ENTRY_SIZE, size_of::<ib_uverbs_gid_entry>() as u64)
            .output(UVERBS_ATTR_QUERY_GID_TABLE_RESP_ENTRIES, entries.as_mut_slice())
            .output(UVERBS_ATTR_QUERY_GID_TABLE_RESP_NUM_ENTRIES, &mut count);
        self.file.execute(VERB, &mut command)?;
        drop(command);
        let count = usize::try_from(count).unwrap_or(total).min(total);
        Ok(entries[..count].iter().map(GidEntry::new).collect())
    }

    /// The entry of a port's table that suits most: on Ethernet RoCE v2 before v1, and of those an
    /// IPv4 address before a global IPv6 one before a link-local one; on InfiniBand the first.
    ///
    /// # Errors
    ///
    /// `EINVAL` for a port that the device does not have, `ENODATA` if its table is empty: the
    /// network interface is down or has no address.
    pub fn default_gid(&self, port: u8) -> Result<GidEntry> {
        const VERB: &str = "default_gid";
        let attr = self.query_port(port).map_err(|error| error.in_verb(VERB))?;
        let table = self.gid_table().map_err(|error| error.in_verb(VERB))?;
        choose_gid(attr.link_layer, table.into_iter().filter(|entry| entry.port == u32::from(port)))
            .ok_or_else(|| {
                let detail = format!("port {port} of {} has no address", self.file.device.name());
                Error::new(VERB, Errno::NODATA).detail(detail)
            })
    }

    /// A partition key of a port, in host order. No verb of the kernel tells it, so it is read
    /// from sysfs.
    ///
    /// # Errors
    ///
    /// `EINVAL` for a port that the device does not have or an index beyond the table, `ENOENT`
    /// where sysfs is not mounted or shows another network namespace's devices.
    #[doc(alias = "ibv_query_pkey")]
    pub fn query_pkey(&self, port: u8, index: u16) -> Result<u16> {
        const VERB: &str = "query_pkey";
        self.file.check_fork(VERB)?;
        let attr = self.query_port(port).map_err(|error| error.in_verb(VERB))?;
        if index >= attr.pkey_table_len {
            return Err(Error::invalid(
                VERB,
                format!(
                    "index {index} of port {port}, whose table has {} entries",
                    attr.pkey_table_len
                ),
            ));
        }
        let name = self.file.device.name();
        let path = format!("/sys/class/infiniband/{name}/ports/{port}/pkeys/{index}");
        let text = std::fs::read_to_string(&path).map_err(|error| {
            let errno = Errno::from_io_error(&error).unwrap_or(Errno::IO);
            Error::new(VERB, errno).detail(path.clone())
        })?;
        parse_pkey(&text)
            .ok_or_else(|| Error::new(VERB, Errno::PROTO).detail(format!("{path} reads {text:?}")))
    }

    fn explain_port(&self, error: Error, port: u32) -> Error {
        match error.errno() {
            Errno::INVAL => error.detail(format!(
                "port {port}; {} has ports 1 to {}",
                self.file.device.name(),
                self.file.device.port_count()
            )),
            _ => error,
        }
    }
}

fn choose_gid(link_layer: LinkLayer, entries: impl Iterator<Item = GidEntry>) -> Option<GidEntry> {
    let rank = |entry: &GidEntry| match link_layer {
        LinkLayer::ETHERNET => {
            let version = u8::from(entry.gid_type != GidType::ROCE_V2);
            let reach = match entry.gid.ip() {
                IpAddr::V4(_) => 0,
                IpAddr::V6(_) if !entry.gid.is_link_local() => 1,
                IpAddr::V6(_) => 2,
            };
            (version, reach, entry.index)
        }
        _ => (0, 0, entry.index),
    };
    entries.filter(|entry| !entry.gid.is_zero()).min_by_key(rank)
}

fn parse_pkey(text: &str) -> Option<u16> {
    u16::from_str_radix(text.trim_end().strip_prefix("0x")?, 16).ok()
}

#[cfg(test)]
mod tests;
