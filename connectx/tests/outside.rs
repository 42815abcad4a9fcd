//! Packets between the fabric and the network outside of the process, in plain memory.

mod driver;

use driver::Driver;
use std::net::IpAddr;
use uverbs_connectx::outside::{MOST_MADS, Mad, Unwelcome};
use uverbs_roce::cm::MAD;

const PEER: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 7));

/// A management datagram as a peer sends it, from BTH to padding.
fn datagram(byte: u8) -> Vec<u8> {
    // BTH: UD SEND_ONLY, P_Key, QP1, PSN. DETH: Q_Key of general services, source QPN 1.
    let mut packet = vec![0x64, 0, 0xff, 0xff, 0, 0, 0, 1, 0, 0, 0, byte];
    packet.extend([0x80, 1, 0, 0, 0, 0, 0, 1]);
    packet.extend([byte; MAD]);
    packet
}

#[test]
fn management_datagrams_wait_for_their_reader_and_no_flood_does() {
    let mut driver = Driver::new();
    driver.set_roce_address(
        0,
        std::net::Ipv4Addr::new(192, 0, 2, 1).to_ipv6_mapped().octets(),
        None,
    );
    let fabric = &mut driver.fabric;
    fabric.lead_outside(0, 0);
    for sent in 0..MOST_MADS {
        fabric.receive_from_outside(0, PEER, 49_152, &datagram(sent as u8)).unwrap();
    }
    let more = fabric.receive_from_outside(0, PEER, 49_152, &datagram(0));
    assert_eq!(more, Err(Unwelcome::TooManyMads));
    for sent in 0..MOST_MADS {
        let bytes = [sent as u8; MAD];
        assert_eq!(fabric.take_mad(), Some(Mad { from: PEER, source_qpn: 1, pkey: 0xffff, bytes }));
    }
    assert!(!fabric.has_mad());
    fabric.receive_from_outside(0, PEER, 49_152, &datagram(9)).unwrap();
    assert!(fabric.has_mad());
}
