//! The delivery of packets: from the link of their port, over the network if there is one, to a function.

use uverbs_roce::MAX_UNIT;
use uverbs_roce::headers::Packet;
use uverbs_roce::opcodes::Kind;
use uverbs_uapi::mlx5::prm::qpc::qpc;

use super::Fabric;
use super::outside::OUTSIDE;
use crate::capture::Macs;
use crate::data::dma::Payload;
use crate::device::Device;
use crate::link::Flight;
use crate::options::PortType;
use crate::path::Destination;
use crate::recording::Entry;
use crate::ways::{Departure, UnderWay};

/// Zeros in place of a payload in memory of the sender: only their number counts.
static PLACEHOLDER: [u8; 4096 * MAX_UNIT as usize] = [0; 4096 * MAX_UNIT as usize];

impl Fabric {
    /// Adds a packet to the capture, if there is one.
    pub(super) fn capture_packet(&mut self, from: usize, to: Option<usize>, flight: &Flight) {
        if self.capture.is_some() {
            self.add_to_capture(from, to, flight);
        }
    }

    fn add_to_capture(&mut self, from: usize, to: Option<usize>, flight: &Flight) {
        let Some(mut capture) = self.capture.take() else { return };
        let device = |number: usize| self.functions[number].device();
        let sender = device(from);
        let macs = Macs {
            source: sender.port.permanent_mac(),
            destination: to.map(|to| device(to).port.permanent_mac()),
        };
        let added = capture.add(sender.now, macs, flight, |packet| {
            if let Some(in_place) = flight.in_place {
                in_place.append(&sender.memory, packet);
            }
        });
        match added {
            Ok(()) => self.capture = Some(capture),
            Err(why) => log::warn!("the capture ends: {why}"),
        }
    }

    /// Delivers a packet to its destination, or sends it on its way there. Returns whether it ends a message.
    pub(super) fn deliver(&mut self, from: usize, flight: Box<Flight>) -> bool {
        let mut ends = true;
        if let Ok(mut packet) = Packet::parse(&flight.packet) {
            let operation = packet.opcode.operation;
            ends = operation.kind() != Kind::Response && operation.position().ends();
            match flight.path.destination {
                Destination::Group(group) => {
                    self.capture_packet(from, None, &flight);
                    self.deliver_to_group(from, &group, &flight, &packet);
                    if self.leads_outside(from) {
                        self.leave(from, flight);
                        return ends;
                    }
                }
                destination => {
                    if let Some(to) = self.find_port(from, destination, flight.path.source.vlan) {
                        let network = self.ways.is_some() && from != to;
                        if flight.packets > 1 && (network || self.capture.is_some()) {
                            self.deliver_apart(from, &flight);
                        } else if network {
                            self.send_away(from, to, &mut Departure::default(), flight);
                            return ends;
                        } else {
                            self.capture_packet(from, Some(to), &flight);
                            if !self.deliver_to(from, to, &flight, &mut packet) {
                                self.deliver_apart(from, &flight);
                            }
                        }
                    } else if self.leads_outside(from) {
                        if flight.packets == 1 {
                            self.leave(from, flight);
                            return ends;
                        }
                        self.deliver_apart(from, &flight);
                    }
                }
            }
        }
        self.functions[from].device_mut().link.recycle(flight);
        ends
    }

    /// Sends a packet out of the process, over the ways if there are any: then some are lost.
    pub(super) fn leave(&mut self, from: usize, flight: Box<Flight>) {
        match self.ways.is_some() {
            true => self.send_away(from, OUTSIDE, &mut Departure::default(), flight),
            false => self.send_outside(from, flight),
        }
    }

    /// Delivers the packets of a unit one by one.
    fn deliver_apart(&mut self, from: usize, unit: &Flight) {
        for at in 0..unit.packets {
            let packet = self.functions[from].device_mut().link.packet_of(unit, at);
            packet.into_iter().for_each(|packet| _ = self.deliver(from, packet));
        }
    }

    /// Sends a packet on its way to a function, if there are ways.
    fn send_away(
        &mut self,
        from: usize,
        to: usize,
        departure: &mut Departure,
        mut flight: Box<Flight>,
    ) {
        let Some(ways) = &mut self.ways else { return };
        let device = self.functions[from].device_mut();
        flight.copy_payload(&device.memory);
        let (now, recorder) = (device.now, &mut device.recorder);
        ways.send(now, (from, to), departure, flight, |flight, fate| {
            recorder.add(now, &Entry::of_packet(flight.queue, &flight.packet, fate));
        });
    }

    /// Lets the packets arrive that are due, while the budget lasts. Returns whether there were any.
    pub(super) fn arrive(&mut self) -> bool {
        let mut worked = false;
        while self.budget > 0 {
            let now = self.now();
            let Some(ways) = &mut self.ways else { break };
            let functions = &mut self.functions;
            let arrived = ways.arrive(now, |from, flight, fate| {
                let recorder = &mut functions[from].device_mut().recorder;
                recorder.add(now, &Entry::of_packet(flight.queue, &flight.packet, fate));
            });
            let Some(UnderWay { from, to, flight, .. }) = arrived else { break };
            worked = true;
            if to == OUTSIDE {
                self.send_outside(from, flight);
                self.charge();
                continue;
            }
            let parsed = Packet::parse(&flight.packet);
            if let (true, Ok(mut packet)) = (self.can_reach(from, to), parsed) {
                if let Destination::Group(group) = flight.path.destination {
                    self.deliver_to_members(from, to, &group, &flight, &packet);
                } else {
                    self.capture_packet(from, Some(to), &flight);
                    self.deliver_to(from, to, &flight, &mut packet);
                }
            }
            self.functions[from].device_mut().link.recycle(flight);
            self.charge();
        }
        worked
    }

    /// Delivers a packet, which is taken apart but for what is in place. Returns false for a unit whose packets have to
    /// come one by one.
    fn deliver_to(
        &mut self,
        from: usize,
        to: usize,
        flight: &Flight,
        packet: &mut Packet<'_>,
    ) -> bool {
        packet.packets = flight.packets;
        let Some(in_place) = flight.in_place else {
            return self.functions[to].device_mut().take_packet(flight, packet, None);
        };
        packet.payload = &PLACEHOLDER[..in_place.len().min(PLACEHOLDER.len())];
        if from == to {
            let payload = Some(Payload::InPlace(in_place, None));
            return self.functions[to].device_mut().take_packet(flight, packet, payload);
        }
        let (left, right) = self.functions.split_at_mut(from.max(to));
        let (sender, receiver) = match from < to {
            true => (&mut left[from], &mut right[0]),
            false => (&mut right[0], &mut left[to]),
        };
        let payload = Some(Payload::InPlace(in_place, Some(&sender.device().memory)));
        receiver.device_mut().take_packet(flight, packet, payload)
    }

    fn deliver_to_group(
        &mut self,
        from: usize,
        group: &[u8; 16],
        flight: &Flight,
        packet: &Packet<'_>,
    ) {
        let mut departure = Departure::default();
        for to in 0..self.functions.len() {
            if !self.can_reach(from, to) {
                continue;
            }
            let groups = &self.functions[to].device().objects.multicast_groups;
            if self.ways.is_none() || from == to {
                self.deliver_to_members(from, to, group, flight, packet);
            } else if !groups.members(group).is_empty() {
                self.send_away(from, to, &mut departure, Box::new(flight.clone()));
            }
        }
    }

    /// Delivers a packet to the members of a multicast group on one function.
    fn deliver_to_members(
        &mut self,
        from: usize,
        to: usize,
        group: &[u8; 16],
        flight: &Flight,
        packet: &Packet<'_>,
    ) {
        let sender = self.functions[from].device().objects.qps.find(flight.queue);
        let no_loopback = sender.is_some_and(|qp| qp.context.is_set(qpc::block_lb_mc));
        let device = self.functions[to].device_mut();
        let members = device.objects.multicast_groups.members(group);
        if !members.is_empty() {
            device.rdma_received.add_packets(&flight.path, flight.packets, flight.octets);
        }
        for qpn in members {
            // A sender that is a member of the group receives its own message, unless
            // `block_lb_mc` is set.
            if !(no_loopback && to == from && qpn == flight.queue) {
                device.receive_packet(qpn, &flight.path, packet, None);
            }
        }
    }

    /// The function at whose port a packet arrives.
    fn find_port(&self, from: usize, destination: Destination, vlan: Option<u16>) -> Option<usize> {
        let is_destination = |number: &usize| {
            let port = &self.functions[*number].device().port;
            let its = match destination {
                Destination::Lid(lid) => port.lid() == lid,
                Destination::Gid(gid) => port.has_roce_address(gid, vlan),
                Destination::Group(_) => false,
            };
            its && self.can_reach(from, *number)
        };
        // A function finds its own address first, even if another function has the same.
        if is_destination(&from) {
            return Some(from);
        }
        (0..self.functions.len()).filter(|other| *other != from).find(is_destination)
    }

    /// Whether a message from one port can reach another: both links are up and of one type, or it
    /// is the same port, and the destination may access memory.
    pub(super) fn can_reach(&self, from: usize, to: usize) -> bool {
        let (a, b) = (self.functions[from].device(), self.functions[to].device());
        let port_type = |device: &Device| -> PortType { device.options.port_type };
        b.bus_master
            && (from == to || a.port.active() && b.port.active() && port_type(a) == port_type(b))
    }
}
