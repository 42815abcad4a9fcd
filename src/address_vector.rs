//! Paths to peers: what address handles, and the states of connected queue pairs, are made from.

use crate::error::Result;
use crate::number::{Gid, narrow};
use uverbs_uapi::ah::{ib_uverbs_ah_attr, ib_uverbs_global_route};
use uverbs_uapi::qp::ib_uverbs_qp_dest;

/// The global part of a path: mandatory on Ethernet, and between subnets.
///
/// Example: [`AddressHandle`](crate::AddressHandle).
#[doc(alias = "ibv_global_route")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GlobalRoute {
    /// The peer's port.
    pub dgid: Gid,
    /// Index of the local port's own identifier in its table: on Ethernet it chooses address,
    /// VLAN and RoCE version.
    pub sgid_index: u32,
    /// 20 bits; on RoCE v2 the UDP source port is derived from it.
    pub flow_label: u32,
    /// Routers that a packet may pass. On RoCE v2 the time to live.
    pub hop_limit: u8,
    /// On RoCE v2 the type of service.
    pub traffic_class: u8,
}

/// A path from a local port to a peer's.
///
/// Example: [`AddressHandle`](crate::AddressHandle).
#[doc(alias = "ibv_ah_attr")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddressVector {
    /// The local port, from 1.
    pub port: u32,
    /// The peer's local identifier; 0 on Ethernet.
    pub dlid: u16,
    /// The global part.
    pub global: Option<GlobalRoute>,
    /// Service level, 0 to 15.
    pub service_level: u8,
    /// Low bits of the local identifier to send from; 0 on Ethernet.
    pub src_path_bits: u8,
    /// Rate limit as an enumerator of the specification; 0 is the port's rate.
    pub static_rate: u8,
}

impl AddressVector {
    /// A path by global identifier, as Ethernet needs it; hop limit 64.
    pub fn global(port: u32, sgid_index: u32, dgid: Gid) -> Self {
        AddressVector {
            port,
            dlid: 0,
            global: Some(GlobalRoute {
                dgid,
                sgid_index,
                flow_label: 0,
                hop_limit: 64,
                traffic_class: 0,
            }),
            service_level: 0,
            src_path_bits: 0,
            static_rate: 0,
        }
    }

    /// A path by local identifier, within an InfiniBand subnet.
    pub fn local(port: u32, dlid: u16) -> Self {
        AddressVector {
            port,
            dlid,
            global: None,
            service_level: 0,
            src_path_bits: 0,
            static_rate: 0,
        }
    }

    /// # Errors
    ///
    /// `EINVAL`, on behalf of `verb`, for a port or an index that the kernel's struct has no room for.
    pub(crate) fn to_ah_attr(self, verb: &'static str) -> Result<ib_uverbs_ah_attr> {
        let sgid_index = self.sgid_index(verb)?;
        let grh = self.global.map(|global| ib_uverbs_global_route {
            dgid: global.dgid.0,
            flow_label: global.flow_label,
            sgid_index,
            hop_limit: global.hop_limit,
            traffic_class: global.traffic_class,
            ..Default::default()
        });
        Ok(ib_uverbs_ah_attr {
            grh: grh.unwrap_or_default(),
            dlid: self.dlid,
            sl: self.service_level,
            src_path_bits: self.src_path_bits,
            static_rate: self.static_rate,
            is_global: grh.is_some().into(),
            port_num: narrow(verb, "port", self.port)?,
            ..Default::default()
        })
    }

    /// The same path as modify and query carry it, where the fields stand in another order.
    pub(crate) fn to_qp_dest(self, verb: &'static str) -> Result<ib_uverbs_qp_dest> {
        let global = self.global;
        Ok(ib_uverbs_qp_dest {
            dgid: global.map(|global| global.dgid.0).unwrap_or_default(),
            flow_label: global.map(|global| global.flow_label).unwrap_or_default(),
            dlid: self.dlid,
            sgid_index: self.sgid_index(verb)?,
            hop_limit: global.map(|global| global.hop_limit).unwrap_or_default(),
            traffic_class: global.map(|global| global.traffic_class).unwrap_or_default(),
            sl: self.service_level,
            src_path_bits: self.src_path_bits,
            static_rate: self.static_rate,
            is_global: global.is_some().into(),
            port_num: narrow(verb, "port", self.port)?,
            ..Default::default()
        })
    }

    fn sgid_index(self, verb: &'static str) -> Result<u8> {
        narrow(verb, "sgid_index", self.global.map_or(0, |global| global.sgid_index))
    }

    pub(crate) fn of_qp_dest(dest: &ib_uverbs_qp_dest) -> Self {
        AddressVector {
            port: dest.port_num.into(),
            dlid: dest.dlid,
            global: (dest.is_global != 0).then_some(GlobalRoute {
                dgid: Gid(dest.dgid),
                sgid_index: dest.sgid_index.into(),
                flow_label: dest.flow_label,
                hop_limit: dest.hop_limit,
                traffic_class: dest.traffic_class,
            }),
            service_level: dest.sl,
            src_path_bits: dest.src_path_bits,
            static_rate: dest.static_rate,
        }
    }
}
