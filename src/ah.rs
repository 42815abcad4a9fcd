//! Address handles: where datagrams go. Pairs with `ib_uverbs_create_ah` in `core/uverbs_cmd.c`.

use crate::error::{Error, Result};
use crate::number::Gid;
use crate::object::{Class, Object};
use crate::pd::{PdInner, ProtectionDomain, Sharing};
use crate::port::{GidType, LinkLayer};
use crate::provider::{Address, Link};
use crate::uverbs::invoke_write::write;
use rustix::io::Errno;
use std::sync::Arc;
use uverbs_uapi::ah::ib_uverbs_global_route;
use uverbs_uapi::ah::{ib_uverbs_ah_attr, ib_uverbs_create_ah, ib_uverbs_create_ah_resp};
use uverbs_uapi::qp::ib_uverbs_qp_dest;
use uverbs_uapi::write::IB_USER_VERBS_CMD_CREATE_AH;
use zerocopy::FromZeros;

/// The global part of a path: mandatory on Ethernet, and between subnets.
#[doc(alias = "ibv_global_route")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GlobalRoute {
    /// The peer's port.
    pub dgid: Gid,
    /// Index of the local port's own identifier in its table: on Ethernet it chooses address,
    /// VLAN and RoCE version.
    pub sgid_index: u8,
    /// 20 bits; on RoCE v2 the UDP source port is derived from it.
    pub flow_label: u32,
    /// Routers that a packet may pass. On RoCE v2 the time to live.
    pub hop_limit: u8,
    /// On RoCE v2 the type of service.
    pub traffic_class: u8,
}

/// A path from a local port to a peer's.
#[doc(alias = "ibv_ah_attr")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddressVector {
    /// The local port, from 1.
    pub port: u8,
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
    pub fn global(port: u8, sgid_index: u8, dgid: Gid) -> Self {
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
    pub fn local(port: u8, dlid: u16) -> Self {
        AddressVector {
            port,
            dlid,
            global: None,
            service_level: 0,
            src_path_bits: 0,
            static_rate: 0,
        }
    }

    pub(crate) fn to_ah_attr(self) -> ib_uverbs_ah_attr {
        let grh = self.global.map(|global| ib_uverbs_global_route {
            dgid: global.dgid.0,
            flow_label: global.flow_label,
            sgid_index: global.sgid_index,
            hop_limit: global.hop_limit,
            traffic_class: global.traffic_class,
            ..Default::default()
        });
        ib_uverbs_ah_attr {
            grh: grh.unwrap_or_default(),
            dlid: self.dlid,
            sl: self.service_level,
            src_path_bits: self.src_path_bits,
            static_rate: self.static_rate,
            is_global: grh.is_some().into(),
            port_num: self.port,
            ..Default::default()
        }
    }

    /// The same path as modify and query carry it, where the fields stand in another order.
    pub(crate) fn to_qp_dest(self) -> ib_uverbs_qp_dest {
        let global = self.global;
        ib_uverbs_qp_dest {
            dgid: global.map(|global| global.dgid.0).unwrap_or_default(),
            flow_label: global.map(|global| global.flow_label).unwrap_or_default(),
            dlid: self.dlid,
            sgid_index: global.map(|global| global.sgid_index).unwrap_or_default(),
            hop_limit: global.map(|global| global.hop_limit).unwrap_or_default(),
            traffic_class: global.map(|global| global.traffic_class).unwrap_or_default(),
            sl: self.service_level,
            src_path_bits: self.src_path_bits,
            static_rate: self.static_rate,
            is_global: global.is_some().into(),
            port_num: self.port,
            ..Default::default()
        }
    }

    pub(crate) fn of_qp_dest(dest: &ib_uverbs_qp_dest) -> Self {
        AddressVector {
            port: dest.port_num,
            dlid: dest.dlid,
            global: (dest.is_global != 0).then_some(GlobalRoute {
                dgid: Gid(dest.dgid),
                sgid_index: dest.sgid_index,
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

/// A resolved path for datagrams.
///
/// Keep it until the requests that use it have completed.
#[doc(alias = "ibv_ah")]
#[derive(Debug)]
pub struct AddressHandle {
    object: Object,
    address: Address,
    pd: Arc<PdInner>,
}

impl<S: Sharing> ProtectionDomain<S> {
    /// Resolves a path. On Ethernet the kernel may ask the network for the peer's hardware
    /// address, and this call waits for it.
    ///
    /// # Errors
    ///
    /// `EINVAL` for a port or index that does not exist, or on Ethernet without a global part;
    /// `ENODATA` for an index whose entry is empty;
    /// `EHOSTUNREACH`, `ENETUNREACH` or `ETIMEDOUT` when the peer cannot be resolved.
    #[doc(alias = "ibv_create_ah")]
    pub fn create_ah(&self, vector: &AddressVector) -> Result<AddressHandle> {
        const VERB: &str = "create_ah";
        let file = self.inner.file();
        let attr = vector.to_ah_attr();
        let link = self.link(vector).map_err(|error| error.in_verb(VERB))?;
        let request =
            ib_uverbs_create_ah { pd_handle: self.inner.handle(), attr, ..Default::default() };
        let mut resp = ib_uverbs_create_ah_resp::new_zeroed();
        let mut answer = file.provider.ah_answer();
        let mut command = write(IB_USER_VERBS_CMD_CREATE_AH, &request)
            .answer(&mut resp)
            .driver(&[], answer.as_mut());
        let made = file.execute(VERB, &mut command);
        drop(command);
        made.map_err(|error| match error.errno() {
            // ENODATA: the entry of the table is empty.
            Errno::INVAL | Errno::NODATA => error.detail(format!(
                "port {}, {}: no such port or identifier, or a global part is missing",
                vector.port,
                match vector.global {
                    Some(global) => format!("sgid index {} to {}", global.sgid_index, global.dgid),
                    None => format!("lid {}", vector.dlid),
                }
            )),
            _ => error,
        })?;
        Ok(AddressHandle {
            object: Object::new(file.clone(), Class::AH, resp.ah_handle, ()),
            address: file.provider.address(&attr, link, &answer),
            pd: self.inner.clone(),
        })
    }
}

impl<S: Sharing> ProtectionDomain<S> {
    /// What packets on the way look like, where the driver leaves that to this library.
    fn link(&self, vector: &AddressVector) -> Result<Link> {
        if !self.inner.file().provider.addresses_by_link() {
            return Ok(Link::InfiniBand);
        }
        let context = self.context();
        let links = &context.file.links;
        let link_layer = match links.get(vector.port) {
            Some(known) => known,
            None => {
                let link_layer = context.query_port(vector.port)?.link_layer;
                links.set(vector.port, link_layer);
                link_layer
            }
        };
        if link_layer != LinkLayer::ETHERNET {
            return Ok(Link::InfiniBand);
        }
        let Some(global) = vector.global else { return Ok(Link::RoceV1) };
        let entry = context.query_gid(vector.port, global.sgid_index.into())?;
        Ok(match entry.gid_type {
            GidType::ROCE_V2 => Link::RoceV2,
            _ => Link::RoceV1,
        })
    }
}

impl AddressHandle {
    #[inline]
    pub(crate) fn pd(&self) -> &PdInner {
        &self.pd
    }

    pub(crate) fn address(&self) -> &Address {
        &self.address
    }

    /// The kernel's number of the protection domain that it belongs to.
    pub fn pd_handle(&self) -> u32 {
        self.pd.handle()
    }

    /// Destroys the handle and says whether that went well; dropping it does the same silently.
    ///
    /// # Errors
    ///
    /// What the kernel answers; the handle comes back with the error.
    #[doc(alias = "ibv_destroy_ah")]
    pub fn destroy(mut self) -> std::result::Result<(), (Self, Error)> {
        match self.object.destroy() {
            Ok(()) => Ok(()),
            Err(error) => Err((self, error)),
        }
    }
}
