//! The transport of queue pairs: `uverbs_roce`, and the attributes and states that commands give it.
//!
//! A queue pair is one of the transport from RTR on. The transport calls the device back ([`super::host`]), which has
//! no access to the transport meanwhile.

use uverbs_roce::headers::Packet;
use uverbs_roce::{Attributes, Dropped, Endpoint, Mtu, Psn, State};
use uverbs_uapi::mlx5::prm::qpc::{ads, qpc};
use uverbs_uapi::mr::ib_uverbs_access_flags;

use super::dma::Payload;
use super::host::DeviceHost;
use crate::device::Device;
use crate::link::Flight;
use crate::object::in_flight::DEPTH;
use crate::object::qp::{Qp, QpState, Service};
use crate::options::PortType;
use crate::path::{Destination, Path, Source};

/// A device without its transport, which gets it back when the call ends, with a panic, too.
struct CallBack<'d> {
    endpoint: Option<Box<Endpoint<Path>>>,
    device: &'d mut Device,
}

impl Drop for CallBack<'_> {
    fn drop(&mut self) {
        std::mem::swap(&mut self.device.endpoint, &mut self.endpoint);
    }
}

/// The turn of a queue pair that sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Turn {
    /// Many packets, which arrive in the same call of the fabric.
    Packets,
    /// The packets of so many requests. The caller of the fabric chooses when they arrive.
    Requests(usize),
}

impl Turn {
    /// In a call that gives no queue pair a turn to send.
    const OF_INPUT: Turn = Turn::Requests(1);

    /// Counts a request that was sent; returns whether the turn ends with it.
    pub(crate) fn end_request(&mut self) -> bool {
        let Turn::Requests(left) = self else { return false };
        *left = left.saturating_sub(1);
        *left == 0
    }
}

impl Device {
    /// Calls the transport; `None` if it is the transport that has called.
    pub(crate) fn transport<T>(
        &mut self,
        call: impl FnOnce(&mut Endpoint<Path>, &mut DeviceHost<'_>) -> T,
    ) -> Option<T> {
        self.transport_with(None, Turn::OF_INPUT, call)
    }

    /// As [`Device::transport`], for a packet with a payload in place that arrives, or for a turn.
    fn transport_with<T>(
        &mut self,
        in_place: Option<(Payload<'_>, u32)>,
        turn: Turn,
        call: impl FnOnce(&mut Endpoint<Path>, &mut DeviceHost<'_>) -> T,
    ) -> Option<T> {
        let mut call_back = CallBack { endpoint: Some(self.endpoint.take()?), device: self };
        let CallBack { endpoint, device } = &mut call_back;
        Some(call(endpoint.as_mut()?, &mut DeviceHost { device, in_place, turn }))
    }

    /// Brings a queue pair of the transport to the state and the attributes that a command has set.
    pub(crate) fn modify_transport(&mut self, qpn: u32) {
        let Ok(qp) = self.objects.qps.get(qpn) else { return };
        let state = qp.state;
        let connected = matches!(state, QpState::ReadyToReceive | QpState::ReadyToSend);
        let attributes = connected.then(|| self.attributes(qpn, qp)).flatten();
        let service = qp.service.transport();
        let depth = qp.sq.as_ref().map_or(0, |sq| sq.wqebbs().min(DEPTH));
        self.transport(|endpoint, host| match (state, attributes) {
            (QpState::ReadyToReceive, Some(attributes)) => {
                endpoint.create(qpn, service, depth, attributes);
                endpoint.move_to(host, qpn, State::Rtr);
            }
            (QpState::ReadyToSend, Some(attributes)) => {
                endpoint.modify(qpn, |old| *old = attributes);
                if endpoint.state(qpn) != Some(State::Rts) {
                    endpoint.move_to(host, qpn, State::Rts);
                }
            }
            // The device moves it to error when it serves the queue pair.
            _ => {}
        });
    }

    /// The attributes of a queue pair.
    fn attributes(&self, qpn: u32, qp: &Qp) -> Option<Attributes<Path>> {
        let context = &qp.context;
        let address = context.sub(qpc::primary_address_path);
        let infiniband = self.options.port_type == PortType::InfiniBand;
        let destination = match infiniband {
            true => Destination::Lid(address.get(ads::rlid) as u16),
            false => Destination::Gid(address.span(ads::rgid_rip).try_into().ok()?),
        };
        let source_qpn = match qp.service {
            Service::Smi => 0,
            Service::Gsi => 1,
            _ if context.get(qpc::deth_sqpn) == 1 => 1,
            _ => qpn,
        };
        let path = Path {
            destination,
            source_index: address.get(ads::src_addr_index) as u8,
            source_qpn,
            sl: address.get(ads::sl) as u8,
            source_port: address.get(ads::udp_sport) as u16,
            priority: address.get(ads::eth_prio) as u8,
            route: None,
            source: Source::default(),
        };
        let rights = [
            (qpc::rre, ib_uverbs_access_flags::IB_UVERBS_ACCESS_REMOTE_READ),
            (qpc::rwe, ib_uverbs_access_flags::IB_UVERBS_ACCESS_REMOTE_WRITE),
            (qpc::rae, ib_uverbs_access_flags::IB_UVERBS_ACCESS_REMOTE_ATOMIC),
        ];
        let access = rights.into_iter().filter(|(right, _)| context.is_set(*right));
        Some(Attributes {
            path,
            destination: context.get32(qpc::remote_qpn),
            source: source_qpn,
            pkey: self.pkey(qp),
            mtu: path_mtu(qp),
            send_psn: Psn::new(context.get32(qpc::next_send_psn)),
            receive_psn: Psn::new(context.get32(qpc::next_rcv_psn)),
            timeout: address.get(ads::ack_timeout) as u8,
            retry_count: context.get(qpc::retry_count) as u8,
            rnr_retry: context.get(qpc::rnr_retry) as u8,
            min_rnr_timer: context.get(qpc::min_rnr_nak) as u8,
            max_rd_atomic: 1 << (context.get(qpc::log_sra_max) & 7),
            max_dest_rd_atomic: 1 << (context.get(qpc::log_rra_max) & 7),
            access: access.map(|(_, flag)| flag).collect(),
        })
    }

    /// The P_Key of a queue pair; 0, which is invalid, if its index is outside the table.
    pub(crate) fn pkey(&self, qp: &Qp) -> u16 {
        let index = qp.context.sub(qpc::primary_address_path).get(ads::pkey_index);
        self.options.pkeys.get(index as usize).copied().unwrap_or(0)
    }

    /// The queue pair of a destination QPN: QPNs 0 and 1 are the ones of subnet management and
    /// general services.
    fn local_qpn(&self, qpn: u32) -> Option<u32> {
        let service = match qpn {
            0 => Service::Smi,
            1 => Service::Gsi,
            _ => return Some(qpn),
        };
        self.objects.qps.iter().find(|(_, qp)| qp.service == service).map(|(number, _)| number)
    }

    /// Handles a packet that has arrived, for the queue pair that it names: see [`Device::receive_packet`].
    pub(crate) fn take_packet(
        &mut self,
        flight: &Flight,
        packet: &Packet<'_>,
        in_place: Option<Payload<'_>>,
    ) -> bool {
        let taken = self.receive_packet(packet.bth.destination(), &flight.path, packet, in_place);
        if taken {
            self.rdma_received.add_packets(&flight.path, flight.packets, flight.octets);
        }
        taken
    }

    /// Handles a packet that has arrived, for the queue pair that it names or a member of a multicast group. Its
    /// payload may be in place, in memory of the sender. Returns false for a unit whose packets have to come one by
    /// one.
    pub(crate) fn receive_packet(
        &mut self,
        qpn: u32,
        path: &Path,
        packet: &Packet<'_>,
        in_place: Option<Payload<'_>>,
    ) -> bool {
        let Some(qpn) = self.local_qpn(qpn) else { return true };
        match self.handle_packet(qpn, path, packet, in_place) {
            Err(Dropped::Unit) => return false,
            Err(why) => log::debug!("a packet for QP {qpn:#x} is dropped: {why}"),
            Ok(()) => {}
        }
        true
    }

    /// As [`receive_packet`](Self::receive_packet), for a queue pair by its own number.
    pub(crate) fn handle_packet(
        &mut self,
        qpn: u32,
        path: &Path,
        packet: &Packet<'_>,
        in_place: Option<Payload<'_>>,
    ) -> Result<(), Dropped> {
        let now = self.now;
        if self.bus.is_slow() {
            if packet.packets > 1 {
                return Err(Dropped::Unit);
            }
            self.bus.begin(qpn, packet.opcode.operation.position().begins());
        }
        let in_place = in_place.map(|payload| (payload, packet.packets));
        let taken = self.transport_with(in_place, Turn::OF_INPUT, |endpoint, host| {
            endpoint.packet_for(now, host, qpn, path, packet)
        });
        taken.unwrap_or(Ok(()))
    }

    /// Lets a queue pair send, which has `before` others in front that may; returns whether it did anything.
    pub(crate) fn send_packets(&mut self, before: usize, turn: Turn) -> bool {
        let now = self.now;
        let sent =
            self.transport_with(None, turn, |endpoint, host| endpoint.run_ready(now, host, before));
        sent > Some(0)
    }

    /// The number of queue pairs that may send.
    pub(crate) fn senders(&self) -> usize {
        self.endpoint.as_ref().map_or(0, |endpoint| endpoint.ready())
    }
}

/// The path MTU of a queue pair.
pub(crate) fn path_mtu(qp: &Qp) -> Mtu {
    // INIT2RTR demands a valid code of connected queue pairs only.
    Mtu::from_code(qp.context.get(qpc::mtu) as u8).unwrap_or(Mtu::Mtu4096)
}
