//! The local end: a port of a device that suits the options.

use super::kind::Kind;
use crate::args::{Options, PathMtu};
use crate::failure::{Failure, Result};
use crate::open;
use uverbs::{
    AddressVector, Context, Device, Gid, GidEntry, GlobalRoute, LinkLayer, PortAttr, PortState,
};

/// A port that messages can be sent from.
#[derive(Debug)]
pub(crate) struct Port {
    pub(crate) context: Context,
    pub(crate) number: u32,
    pub(crate) attr: PortAttr,
    /// The source of packets. `None` on InfiniBand, unless the user asked for a GID: there the peer
    /// is reached by LID.
    pub(crate) source: Option<Source>,
}

/// An entry of the port's table of GIDs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Source {
    pub(crate) entry: GidEntry,
}

impl Port {
    pub(crate) fn open(options: &Options) -> Result<Port> {
        let context = open::open(options.device.as_deref())?;
        let device = context.device().clone();
        let number = options.ib_port;
        let attr = context.query_port(number)?;
        if attr.state != PortState::ACTIVE {
            let failure = Failure::device(format!(
                "port {number} of {} is in state {}, not active",
                device.name(),
                attr.state
            ));
            return Err(match device.netdev(number) {
                Ok(Some(netdev)) => failure.advice(format!(
                    "bring its network interface up: `ip link set {netdev} up`; and see that it \
                     has a carrier"
                )),
                _ => failure.advice("see that it has a link, and that a subnet manager runs"),
            });
        }
        let mut port = Port { context, number, attr, source: None };
        port.source = port.choose_source(options.gid_index)?;
        Ok(port)
    }

    pub(crate) fn device(&self) -> &Device {
        self.context.device()
    }

    pub(crate) fn gid(&self) -> Gid {
        self.source.map(|source| source.entry.gid).unwrap_or_default()
    }

    /// Whether peers can only be reached by GID.
    pub(crate) fn needs_gid(&self) -> bool {
        self.attr.link_layer == LinkLayer::ETHERNET || self.attr.grh_required
    }

    fn choose_source(&self, index: Option<u32>) -> Result<Option<Source>> {
        let entry = match index {
            Some(index) => {
                let entry = self.context.query_gid(self.number, index);
                let entry = entry.map_err(|error| self.with_gids(error.into()))?;
                if entry.gid.is_zero() {
                    return Err(self.with_gids(Failure::device(format!(
                        "GID index {index} of port {} of {} is empty",
                        self.number,
                        self.device().name()
                    ))));
                }
                entry
            }
            None if self.needs_gid() => self.context.default_gid(self.number).map_err(|error| {
                Failure::from(error).advice("give its network interface an address")
            })?,
            None => return Ok(None),
        };
        Ok(Some(Source { entry }))
    }

    /// Adds the GIDs to choose from.
    fn with_gids(&self, failure: Failure) -> Failure {
        let table = self.context.gid_table().unwrap_or_default();
        let present: Vec<String> = table
            .iter()
            .filter(|entry| entry.port == self.number)
            .map(|entry| format!("{} ({}, {})", entry.index, entry.gid, entry.gid_type))
            .collect();
        failure.advice(if present.is_empty() {
            "the port has no GID: give its network interface an address".to_owned()
        } else {
            format!("choose one of {}", present.join(", "))
        })
    }

    /// Adds the events that the device reported meanwhile: they may be the cause.
    pub(crate) fn with_events(&self, mut failure: Failure) -> Failure {
        while let Ok(Some(event)) = self.context.try_next_event() {
            failure = failure.and(&format!("; the device reported: {}", event.kind));
        }
        failure
    }

    /// The path to a peer: by GID if it has one, else by LID.
    pub(crate) fn path(&self, service_level: u8, lid: u16, gid: Gid) -> Result<AddressVector> {
        let local = AddressVector { service_level, ..AddressVector::local(self.number, lid) };
        if gid == Gid::default() {
            if self.needs_gid() {
                return Err(Failure::peer(
                    "the peer sent no GID, and over Ethernet there is no \
                                          other way to reach it",
                )
                .advice(
                    "start it with -g and the index of a GID; `uverbs devinfo -v` and \
                         ibv_devinfo -v list them",
                ));
            }
            return Ok(local);
        }
        let Some(source) = self.source else {
            return Err(Failure::peer(format!(
                "the peer is at GID {}, and this side has none",
                gid
            ))
            .advice("give this side a --gid-index, or start the other without -g"));
        };
        let global = GlobalRoute {
            dgid: gid,
            sgid_index: source.entry.index,
            flow_label: 0,
            hop_limit: 64,
            traffic_class: 0,
        };
        Ok(AddressVector { global: Some(global), ..local })
    }

    /// Checks that messages of `size` bytes can be sent in packets of `mtu`.
    pub(crate) fn check_size(&self, kind: Kind, size: u32, mtu: Option<PathMtu>) -> Result<()> {
        let name = self.device().name();
        let active = self.attr.active_mtu.bytes().unwrap_or(u32::MAX);
        if kind == Kind::Ud && size > active {
            return Err(Failure::usage(format!(
                "--size {size} does not fit into a datagram: port {} of {name} has an MTU of \
                 {active}",
                self.number
            )));
        }
        if let Some(mtu) = mtu.filter(|mtu| mtu.bytes() > active) {
            return Err(Failure::usage(format!(
                "--mtu {} is above the MTU of port {} of {name}, which is {active}",
                mtu.bytes(),
                self.number
            ))
            .advice("give both sides the smaller one, or raise that of the network interface"));
        }
        if size > self.attr.max_msg_size {
            return Err(Failure::usage(format!(
                "--size {size} is above the longest message of port {} of {name}, {} bytes",
                self.number, self.attr.max_msg_size
            )));
        }
        Ok(())
    }
}
