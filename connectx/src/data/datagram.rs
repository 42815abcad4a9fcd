//! Datagrams: their path, and the 40 bytes in front of their data.
//!
//! Pairs with the address vector of a WQE, and with the GRH that a program finds in its receive.

use uverbs_roce::{Datagram, Received};
use uverbs_uapi::mlx5::prm::qpc::qpc;

use crate::device::Device;
use crate::format::frame;
use crate::format::syndrome::Syndrome;
use crate::format::wqe::AddressVector;
use crate::object::qp::Qp;
use crate::options::PortType;
use crate::outside::MULTICAST_QPN;
use crate::path::{Destination, L3, Path, Route, Source};

/// Bytes in front of the data of a datagram.
pub(crate) const GRH: usize = 40;

impl Device {
    /// The destination of a datagram.
    pub(crate) fn datagram(
        &self,
        qpn: u32,
        qp: &Qp,
        vector: &AddressVector,
    ) -> Result<Datagram<Path>, Syndrome> {
        /// In the address vector's Q_Key: use that of the queue pair.
        const USE_QP_QKEY: u32 = 1 << 31;
        let infiniband = self.options.port_type == PortType::InfiniBand;
        if !infiniband && self.port.roce_gid(vector.source.into()).is_none() {
            return Err(Syndrome::LocalQpOperation);
        }
        let qkey = match vector.qkey & USE_QP_QKEY {
            0 => vector.qkey,
            _ => qp.context.get32(qpc::q_key),
        };
        let global = vector.global || !infiniband;
        let destination = match (vector.qpn == MULTICAST_QPN && global, infiniband) {
            (true, _) => Destination::Group(vector.gid),
            (false, true) => Destination::Lid(vector.lid),
            (false, false) => Destination::Gid(vector.gid),
        };
        let route = global.then_some(Route {
            gid: vector.gid,
            tclass: vector.tclass,
            hop_limit: vector.hop_limit,
            flow_label: vector.flow_label,
        });
        let path = Path {
            destination,
            source_index: vector.source,
            source_qpn: qpn,
            sl: vector.sl,
            // On Ethernet this field of the address vector is the port.
            source_port: vector.lid,
            // In an address vector the priority is in the upper bits of the service level.
            priority: vector.sl >> 1,
            route,
            source: Source::default(),
        };
        Ok(Datagram { path, destination: vector.qpn, qkey })
    }

    /// The source address of a packet that leaves along a path.
    pub(crate) fn source(&self, path: &Path) -> Source {
        if self.options.port_type == PortType::InfiniBand {
            return Source { gid: self.port.ib_gid(), lid: self.port.lid(), ..Source::default() };
        }
        self.port.roce_address(path.source_index.into()).unwrap_or_default()
    }
}

/// The 40 bytes in front of the data of a datagram: a GRH, an IPv6 header, or 20 bytes and an IPv4 header. Zeros
/// without a global route.
pub(crate) fn grh(received: &Received<'_, Path>) -> [u8; GRH] {
    let mut grh = [0; GRH];
    let Path { route: Some(route), source, .. } = received.from else { return grh };
    // BTH 12, DETH 8, an immediate of 4, the data with its padding, ICRC 4.
    let immediate = if received.immediate.is_some() { 4 } else { 0 };
    let packet = received.length.next_multiple_of(4) as u16 + immediate + 24;
    if source.l3 == L3::V4 {
        grh[20..24].copy_from_slice(&[0x45, route.tclass, 0, 0]);
        // IPv4 20, UDP 8.
        grh[22..24].copy_from_slice(&(packet + 28).to_be_bytes());
        grh[28..30].copy_from_slice(&[route.hop_limit, 17]);
        grh[32..36].copy_from_slice(&source.gid[12..]);
        grh[36..40].copy_from_slice(&route.gid[12..]);
        let sum = frame::checksum(&grh[20..40], 0);
        grh[30..32].copy_from_slice(&sum.to_be_bytes());
        return grh;
    }
    let first = 6 << 28 | u32::from(route.tclass) << 20 | route.flow_label;
    grh[..4].copy_from_slice(&first.to_be_bytes());
    let udp = source.l3 == L3::V6;
    let payload = packet + if udp { 8 } else { 0 };
    grh[4..6].copy_from_slice(&payload.to_be_bytes());
    grh[6] = if udp { 17 } else { 0x1b };
    grh[7] = route.hop_limit;
    grh[8..24].copy_from_slice(&source.gid);
    grh[24..40].copy_from_slice(&route.gid);
    grh
}
