//! The ports of a scripted device: their links, states and tables of identifiers.

use super::attrs::{self, Responses};
use super::state::{Result, State};
use crate::port::{LinkLayer, LinkSpeed, LinkWidth, PortState};
use rustix::io::Errno;
use std::net::{Ipv4Addr, Ipv6Addr};
use uverbs_uapi::gid::{self, ib_uverbs_gid_entry, ib_uverbs_gid_type};
use uverbs_uapi::port::{self, ib_mtu, ib_uverbs_query_port_resp_ex};
use zerocopy::IntoBytes;

/// Entries of each port's table of identifiers, all of them in use.
const GIDS: u32 = 4;

/// A port.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ScriptedPort {
    pub(crate) link_layer: LinkLayer,
    pub(crate) state: PortState,
    pub(crate) width: LinkWidth,
}

impl ScriptedPort {
    pub(crate) const ETHERNET: ScriptedPort = ScriptedPort {
        link_layer: LinkLayer::ETHERNET,
        state: PortState::ACTIVE,
        width: LinkWidth::X4,
    };
    pub(crate) const INFINIBAND: ScriptedPort =
        ScriptedPort { link_layer: LinkLayer::INFINIBAND, ..ScriptedPort::ETHERNET };
}

impl State {
    /// The port of this number, from 1.
    pub(super) fn port(&self, number: u64) -> Result<ScriptedPort> {
        let at = usize::try_from(number).ok().and_then(|number| number.checked_sub(1));
        at.and_then(|at| self.ports.get(at)).copied().ok_or(Errno::INVAL)
    }

    pub(super) fn query_port(&self, to: &mut Responses<'_, '_>) -> Result<()> {
        let number = attrs::int(to.command, port::UVERBS_ATTR_QUERY_PORT_PORT_NUM);
        let number = number.ok_or(Errno::INVAL)?;
        let known = self.port(number)?;
        let mut response = ib_uverbs_query_port_resp_ex::default();
        response.legacy_resp.link_layer = known.link_layer.0;
        response.legacy_resp.state = known.state.0;
        response.legacy_resp.active_mtu = ib_mtu::IB_MTU_1024.0;
        response.legacy_resp.gid_tbl_len = GIDS;
        response.legacy_resp.active_width = known.width.0;
        response.legacy_resp.active_speed = LinkSpeed::EDR.0 as u8;
        if known.link_layer == LinkLayer::INFINIBAND {
            response.legacy_resp.lid = lid(number as u32);
        }
        to.put(port::UVERBS_ATTR_QUERY_PORT_RESP, &response);
        Ok(())
    }

    /// In units of 100 Mbit/s.
    pub(super) fn query_port_speed(&self, to: &mut Responses<'_, '_>) -> Result<()> {
        let speed = self.deviations.port_speed.ok_or(Errno::OPNOTSUPP)?;
        let number = attrs::int(to.command, port::UVERBS_ATTR_QUERY_PORT_SPEED_PORT_NUM);
        self.port(number.ok_or(Errno::INVAL)?)?;
        to.put(port::UVERBS_ATTR_QUERY_PORT_SPEED_RESP, &speed);
        Ok(())
    }

    fn gid_entry(&self, number: u32, index: u32) -> Result<ib_uverbs_gid_entry> {
        let known = self.port(number.into())?;
        if index >= GIDS {
            return Err(Errno::INVAL);
        }
        let (bytes, gid_type) = match known.link_layer {
            LinkLayer::INFINIBAND => {
                let address = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, number as u16, index as u16);
                (address.octets(), ib_uverbs_gid_type::IB_UVERBS_GID_TYPE_IB)
            }
            _ => {
                let address = Ipv4Addr::new(10, 0, number as u8, index as u8).to_ipv6_mapped();
                (address.octets(), ib_uverbs_gid_type::IB_UVERBS_GID_TYPE_ROCE_V2)
            }
        };
        let mut entry = ib_uverbs_gid_entry {
            gid_index: index,
            port_num: number,
            gid_type: gid_type.0,
            ..Default::default()
        };
        entry.gid.as_mut_bytes().copy_from_slice(&bytes);
        Ok(entry)
    }

    pub(super) fn query_gid_entry(&self, to: &mut Responses<'_, '_>) -> Result<()> {
        let number = attrs::u32(to.command, gid::UVERBS_ATTR_QUERY_GID_ENTRY_PORT)?;
        let index = attrs::u32(to.command, gid::UVERBS_ATTR_QUERY_GID_ENTRY_GID_INDEX)?;
        let entry = self.gid_entry(number, index)?;
        to.put(gid::UVERBS_ATTR_QUERY_GID_ENTRY_RESP_ENTRY, &entry);
        Ok(())
    }

    /// The entries of all ports, as many as fit.
    pub(super) fn query_gid_table(&self, to: &mut Responses<'_, '_>) -> Result<()> {
        const ENTRIES: u16 = gid::UVERBS_ATTR_QUERY_GID_TABLE_RESP_ENTRIES;
        let size = attrs::int(to.command, gid::UVERBS_ATTR_QUERY_GID_TABLE_ENTRY_SIZE);
        if size != Some(size_of::<ib_uverbs_gid_entry>() as u64) {
            return Err(Errno::INVAL);
        }
        let room = attrs::room(to.command, ENTRIES) / size_of::<ib_uverbs_gid_entry>();
        let mut entries = Vec::new();
        for number in 1..=self.ports.len() as u32 {
            for index in 0..GIDS {
                entries.push(self.gid_entry(number, index)?);
            }
        }
        if entries.len() > room {
            return Err(Errno::INVAL);
        }
        to.put_bytes(ENTRIES, entries.as_bytes());
        to.put(gid::UVERBS_ATTR_QUERY_GID_TABLE_RESP_NUM_ENTRIES, &(entries.len() as u64));
        Ok(())
    }
}

/// The local identifier of an InfiniBand port.
fn lid(number: u32) -> u16 {
    0x10 + number as u16
}
