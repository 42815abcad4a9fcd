//! Packets to and from the network outside of the process.
//!
//! A packet for an address that no function has leaves by the port that leads there. What comes from there is checked
//! here and by the transport before it changes anything: nobody vouches for its sender.

use std::net::IpAddr;

use uverbs_roce::cm::{MAD, QKEY, QPN};
use uverbs_roce::headers::{Bth, Deth, Packet, PacketBuffer};
use uverbs_roce::opcodes::{Opcode, Operation, Transport};
use uverbs_roce::{Dropped, Psn};

use super::Fabric;
use crate::device::Device;
use crate::link::Flight;
use crate::options::PortType;
use crate::outside::{
    MOST_MADS, MOST_OUTGOING, MULTICAST_QPN, Mad, OUTGOING_BATCH, Outgoing, Outside, Unwelcome,
    address, gid, is_private,
};
use crate::path::{Destination, L3, Path, Route, Source, UNKNOWN_QPN};
use crate::port::share_partition;

/// The place of the outside among functions, as the receiver of a way.
pub(super) const OUTSIDE: usize = usize::MAX;
/// P_Key of management datagrams: a full member of the default partition, which all ports of RoCE are.
const DEFAULT_PKEY: u16 = 0xffff;
/// The hop limit that a receiver is told, which a socket does not show.
const HOP_LIMIT: u8 = 64;

impl Fabric {
    /// Has the port of a function lead outside of the process: its packets for addresses that no function has wait for
    /// [`Fabric::take_outgoing`]. Management datagrams begin with this PSN.
    pub fn lead_outside(&mut self, function: usize, psn: u32) {
        self.outside = Some(Outside { function, psn, ..Outside::default() });
    }

    /// Whether packets of a function leave the process.
    pub(super) fn leads_outside(&self, from: usize) -> bool {
        let device = self.functions[from].device();
        self.outside.as_ref().is_some_and(|outside| outside.function == from)
            && device.port.active()
            && device.options.port_type == PortType::Ethernet
    }

    /// Sends a packet out of the process. One that no peer outside understands stays here: with an opcode that is
    /// private, or to an address of another family.
    pub(super) fn send_outside(&mut self, from: usize, mut flight: Box<Flight>) {
        let to = match flight.path.destination {
            Destination::Gid(to) | Destination::Group(to) => address(to),
            Destination::Lid(_) => return,
        };
        let is_multicast = flight.path.is_multicast();
        let own = address(flight.path.source.gid);
        let other_family = own.is_ipv4() != to.is_ipv4();
        if is_private(&flight.packet) || other_family || is_multicast != to.is_multicast() {
            return self.functions[from].device_mut().link.recycle(flight);
        }
        flight.copy_payload(&self.functions[from].device().memory);
        // A packet for a group is in the capture since it left its port.
        if !is_multicast {
            self.capture_packet(from, Some(from), &flight);
        }
        let Some(outside) = &mut self.outside else { return };
        if outside.outgoing.len() >= MOST_OUTGOING {
            outside.crowded += 1;
            return self.functions[from].device_mut().link.recycle(flight);
        }
        outside.outgoing.push_back(Outgoing { to, flight });
        if outside.outgoing.len() % OUTGOING_BATCH == 0 {
            self.budget = 0;
        }
    }

    /// Whether so many packets wait to leave the process that no more should be made.
    pub fn is_outside_crowded(&self) -> bool {
        self.outside.as_ref().is_some_and(|outside| outside.outgoing.len() >= MOST_OUTGOING / 2)
    }

    /// Whether [`Fabric::take_outgoing`] has ACKs, and no other packets.
    pub fn has_outgoing_acks(&self) -> bool {
        let outgoing = self.outside.as_ref().map(|outside| &outside.outgoing);
        outgoing.is_some_and(|packets| !packets.is_empty() && packets.iter().all(Outgoing::is_ack))
    }

    /// Takes the next packet that leaves the process.
    pub fn take_outgoing(&mut self) -> Option<Outgoing> {
        self.outside.as_mut()?.outgoing.pop_front()
    }

    /// Takes back the memory of a packet that has left.
    pub fn recycle_outgoing(&mut self, outgoing: Outgoing) {
        if let Some(outside) = &self.outside {
            self.functions[outside.function].device_mut().link.recycle(outgoing.flight);
        }
    }

    /// The packets that did not leave because too many waited.
    pub fn crowded_out(&self) -> u64 {
        self.outside.as_ref().map_or(0, |outside| outside.crowded)
    }

    /// Handles a packet, from BTH to padding, that came from outside: from an address and a UDP port. Its ICRC was
    /// right.
    ///
    /// # Errors
    ///
    /// The packet was dropped, and has changed nothing.
    pub fn receive_from_outside(
        &mut self,
        now: u64,
        from: IpAddr,
        source_port: u16,
        bytes: &[u8],
    ) -> Result<(), Unwelcome> {
        self.receive_for(now, (from, source_port), None, bytes)
    }

    /// As [`receive_from_outside`](Self::receive_from_outside), for the members of a multicast group, to whose address
    /// it came. It is welcome if one of them takes it.
    ///
    /// # Errors
    ///
    /// Nobody took the packet.
    pub fn receive_for_group(
        &mut self,
        now: u64,
        from: IpAddr,
        source_port: u16,
        group: IpAddr,
        bytes: &[u8],
    ) -> Result<(), Unwelcome> {
        self.receive_for(now, (from, source_port), Some(gid(group)), bytes)
    }

    fn receive_for(
        &mut self,
        now: u64,
        (from, source_port): (IpAddr, u16),
        group: Option<[u8; 16]>,
        bytes: &[u8],
    ) -> Result<(), Unwelcome> {
        self.set_time(now);
        let outside = self.outside.as_ref().ok_or(Unwelcome::NoLink)?;
        let number = outside.function;
        let packet = Packet::parse(bytes).map_err(|_| Unwelcome::Malformed)?;
        if is_private(bytes) {
            return Err(Unwelcome::Private);
        }
        let device = self.functions[number].device();
        if !self.leads_outside(number) || !device.bus_master {
            return Err(Unwelcome::NoLink);
        }
        let own = (0..crate::port::GIDS).find_map(|at| {
            let own = device.port.roce_address(at)?;
            (address(own.gid).is_ipv4() == from.is_ipv4()).then_some(own.gid)
        });
        let own = own.ok_or(Unwelcome::Source)?;
        let l3 = if from.is_ipv4() { L3::V4 } else { L3::V6 };
        let path = Path {
            destination: group.map_or(Destination::Gid(own), Destination::Group),
            source_index: 0,
            source_qpn: packet.deth.map_or(UNKNOWN_QPN, Deth::source),
            sl: 0,
            source_port,
            priority: 0,
            route: Some(Route {
                gid: group.unwrap_or(own),
                tclass: 0,
                hop_limit: HOP_LIMIT,
                flow_label: 0,
            }),
            source: Source { gid: gid(from), lid: 0, vlan: None, l3 },
        };
        let qpn = packet.bth.destination();
        match (qpn, group) {
            (MULTICAST_QPN, Some(_)) => {}
            (_, Some(_)) => return Err(Unwelcome::NoMulticast),
            (0, None) => return Err(Unwelcome::NoQueuePair),
            (QPN, None) => return self.take_in_mad(from, &packet),
            (_, None) => {}
        }
        if self.capture.is_some() {
            let to = group.is_none().then_some(number);
            let flight = self.functions[number].device_mut().link.flight(qpn, path, bytes);
            self.capture_packet(number, to, &flight);
            self.functions[number].device_mut().link.recycle(flight);
        }
        let device = self.functions[number].device_mut();
        let taken = match group {
            None => handle(device, qpn, &path, &packet),
            Some(group) => {
                let members = device.objects.multicast_groups.members(&group);
                let mut taken = Err(Unwelcome::NoQueuePair);
                for member in members {
                    let handled = handle(device, member, &path, &packet);
                    taken = taken.or(handled);
                }
                taken
            }
        };
        if taken.is_ok() {
            device.rdma_received.add_packets(&path, 1, bytes.len() + path.framing());
        }
        taken
    }

    /// Keeps a management datagram for [`Fabric::take_mad`].
    fn take_in_mad(&mut self, from: IpAddr, packet: &Packet<'_>) -> Result<(), Unwelcome> {
        let outside = self.outside.as_mut().ok_or(Unwelcome::NoMad)?;
        let is_send = packet.opcode.operation == Operation::SendOnly;
        let (Some(deth), true) = (packet.deth, is_send) else { return Err(Unwelcome::NoMad) };
        let bytes: [u8; MAD] = packet.payload.try_into().map_err(|_| Unwelcome::NoMad)?;
        let pkey = packet.bth.pkey.get();
        if !share_partition(DEFAULT_PKEY, pkey) {
            return Err(Unwelcome::Partition);
        }
        if deth.qkey.get() != QKEY {
            return Err(Unwelcome::Qkey);
        }
        if outside.mads.len() >= MOST_MADS {
            return Err(Unwelcome::TooManyMads);
        }
        outside.mads.push_back(Mad { from, source_qpn: deth.source(), pkey, bytes });
        Ok(())
    }

    /// Takes the oldest management datagram that came from outside.
    pub fn take_mad(&mut self) -> Option<Mad> {
        self.outside.as_mut()?.mads.pop_front()
    }

    /// Whether [`Fabric::take_mad`] has one.
    pub fn has_mad(&self) -> bool {
        self.outside.as_ref().is_some_and(|outside| !outside.mads.is_empty())
    }

    /// Sends a management datagram to the general services (QP1) at an address outside. It may be lost, as any
    /// datagram.
    pub fn send_mad(&mut self, to: IpAddr, bytes: &[u8; MAD]) {
        let Some(outside) = &mut self.outside else { return };
        let (number, psn) = (outside.function, outside.psn);
        outside.psn = psn.wrapping_add(1);
        if !self.leads_outside(number) {
            return;
        }
        let opcode = Opcode { transport: Transport::Ud, operation: Operation::SendOnly };
        let mut buffer = PacketBuffer::default();
        buffer.begin(&Bth::new(opcode, DEFAULT_PKEY, QPN, Psn::new(psn)));
        buffer.header(&Deth::new(QKEY, QPN));
        buffer.payload(MAD).copy_from_slice(bytes);
        let device = self.functions[number].device_mut();
        let mut path = Path {
            destination: Destination::Gid(gid(to)),
            source_index: 0,
            source_qpn: QPN,
            sl: 0,
            source_port: 0,
            priority: 0,
            route: None,
            source: Source::default(),
        };
        path.source = device.source(&path);
        let flight = device.link.flight(QPN, path, buffer.finish());
        self.leave(number, flight);
    }
}

/// Gives a queue pair a packet.
fn handle(
    device: &mut Device,
    qpn: u32,
    path: &Path,
    packet: &Packet<'_>,
) -> Result<(), Unwelcome> {
    let handled = device.handle_packet(qpn, path, packet, None);
    handled.map_err(|why| match why {
        Dropped::NoQueuePair(_) => Unwelcome::NoQueuePair,
        Dropped::Transport(_) => Unwelcome::Transport,
        Dropped::State(_) => Unwelcome::State,
        Dropped::Psn(_) => Unwelcome::Psn,
        Dropped::NotAdmitted => device.not_admitted.unwrap_or(Unwelcome::State),
        _ => Unwelcome::Malformed,
    })
}
