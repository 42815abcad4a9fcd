//! Address vectors: the destination in a datagram's WQE. Pairs with `mlx5_ib_create_ah`.

use crate::provider::LinkProtocol;
use crate::provider::driver_response::DriverResponse;
use std::hash::{BuildHasher, Hasher, RandomState};
use uverbs_uapi::ah::ib_uverbs_ah_attr;
use uverbs_uapi::endian::{Be16, Be32};
use uverbs_uapi::mlx5::abi::mlx5_ib_create_ah_resp;
use uverbs_uapi::mlx5::wqe::mlx5_av;

/// The address vector has a global route.
const GRH: u32 = 1 << 30;
const FLOW_LABEL: u32 = (1 << 20) - 1;
/// The first UDP source port of RoCE v2.
pub(crate) const FIRST_PORT: u16 = 0xc000;
pub(crate) fn vector(
    attr: &ib_uverbs_ah_attr,
    link: LinkProtocol,
    response: &DriverResponse,
) -> mlx5_av {
    let mut av = mlx5_av::default();
    let rate = rate(attr.static_rate) << 4;
    let grh = match link {
        LinkProtocol::InfiniBand => {
            av.stat_rate_sl = rate | attr.sl & 0xf;
            av.fl_mlid = attr.src_path_bits & 0x7f;
            av.rlid = Be16::new(attr.dlid);
            GRH
        }
        LinkProtocol::RoceV1 | LinkProtocol::RoceV2 => {
            // Ethernet has eight priorities, and a global route in every packet.
            av.stat_rate_sl = rate | (attr.sl & 0x7) << 1;
            av.rmac = response.read::<mlx5_ib_create_ah_resp>().dmac;
            if link == LinkProtocol::RoceV2 {
                av.rlid = Be16::new(udp_source_port(attr.grh.flow_label));
            }
            0
        }
    };
    if attr.is_global != 0 {
        av.tclass = attr.grh.traffic_class;
        av.hop_limit = attr.grh.hop_limit;
        let index = u32::from(attr.grh.sgid_index) << 20;
        av.grh_gid_fl = Be32::new(grh | index | attr.grh.flow_label & FLOW_LABEL);
        av.rgid = attr.grh.dgid;
    }
    av
}

/// The device's code of a rate limit, from the specification's enumerator. A rate that the device does not
/// have becomes one near it; a rate above its fastest is no limit.
fn rate(static_rate: u8) -> u8 {
    match static_rate {
        // 2.5, 10, 30, 5, 20, 40, 60, 80 and 120 Gbit/s.
        2..=10 => static_rate + 5,
        // 14.
        11 => 11,
        // 56 and 50.
        12 | 20 => 13,
        // 112 and 100.
        13 | 16 => 15,
        // 25 and 28.
        15 | 19 => 9,
        _ => 0,
    }
}

/// Packets of one flow leave from one UDP port, so that switches keep them in order and spread
/// flows. Without a flow label the port is random.
fn udp_source_port(flow_label: u32) -> u16 {
    let label = match flow_label & FLOW_LABEL {
        // The standard library's hasher is seeded from the system's randomness.
        0 => RandomState::new().build_hasher().finish() as u32,
        label => label,
    };
    (label ^ label >> 14 & 0x3f) as u16 | FIRST_PORT
}

#[cfg(test)]
mod tests {
    use super::*;
    use uverbs_uapi::ah::ib_uverbs_global_route;
    use zerocopy::IntoBytes;

    fn path() -> ib_uverbs_ah_attr {
        ib_uverbs_ah_attr {
            grh: ib_uverbs_global_route {
                dgid: [7; 16],
                flow_label: 0xf_4321,
                sgid_index: 3,
                hop_limit: 64,
                traffic_class: 9,
                ..Default::default()
            },
            dlid: 0x1234,
            sl: 0xb,
            src_path_bits: 0x81,
            static_rate: 3,
            is_global: 1,
            port_num: 1,
            ..Default::default()
        }
    }

    fn resolved() -> DriverResponse {
        let mut response = DriverResponse::room_for::<mlx5_ib_create_ah_resp>();
        let resp = mlx5_ib_create_ah_resp { dmac: [1, 2, 3, 4, 5, 6], ..Default::default() };
        response.as_mut().copy_from_slice(resp.as_bytes());
        response
    }

    #[test]
    fn ethernet_goes_by_hardware_address_and_source_port() {
        let av = vector(&path(), LinkProtocol::RoceV2, &resolved());
        #[rustfmt::skip]
        assert_eq!(av.as_bytes(), [
            0, 0, 0, 0, 0, 0, 0, 0,  0, 0, 0, 0,
            // Rate 10 Gbit/s; level 11 cut to 3 bits, shifted.
            0x86, 0,
            // 0x4321 ^ 0xf4321 >> 14, as a port from 0xc000 on.
            0xc3, 0x1c,
            0, 0, 0, 0,  1, 2, 3, 4, 5, 6,
            9, 64,
            0x00, 0x3f, 0x43, 0x21,
            7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7,
        ]);
        assert_eq!(vector(&path(), LinkProtocol::RoceV1, &resolved()).rlid.get(), 0);
    }

    #[test]
    fn infiniband_goes_by_local_identifier() {
        let av = vector(&path(), LinkProtocol::InfiniBand, &DriverResponse::none());
        assert_eq!((av.stat_rate_sl, av.fl_mlid, av.rlid.get()), (0x8b, 1, 0x1234));
        assert_eq!((av.rmac, av.grh_gid_fl.get()), ([0; 6], 0x403f_4321));
        let local = ib_uverbs_ah_attr { is_global: 0, ..path() };
        let av = vector(&local, LinkProtocol::InfiniBand, &DriverResponse::none());
        assert_eq!((av.grh_gid_fl.get(), av.rgid), (0, [0; 16]));
    }

    #[test]
    fn source_ports_follow_flows_and_are_random_without() {
        assert_eq!(udp_source_port(1), 0xc001);
        assert_eq!(udp_source_port(1), udp_source_port(0x10_0001));
        let ports: Vec<u16> = (0..32).map(|_| udp_source_port(0)).collect();
        assert!(ports.iter().all(|port| *port >= FIRST_PORT));
        assert!(ports.iter().any(|port| *port != ports[0]), "{ports:?}");
    }

    #[test]
    fn rates_are_the_nearest_that_the_device_has() {
        let codes: Vec<u8> = (0..24).map(rate).collect();
        assert_eq!(
            codes,
            [0, 0, 7, 8, 9, 10, 11, 12, 13, 14, 15, 11, 13, 15, 0, 9, 15, 0, 0, 9, 13, 0, 0, 0]
        );
    }
}
