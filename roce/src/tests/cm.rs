//! Messages of the connection manager as bytes: what is decoded is encoded alike, and anything else is refused.

use crate::cm::{
    About, BadMad, Ece, IP_ADDRESSING, IpAddressing, MAD, Message, Service, decode, encode,
    port_of, service_id,
};
use arbitrary::{Arbitrary, Unstructured};
use std::net::IpAddr;
use std::vec::Vec;

/// Attribute IDs from REQ to APR, and one on either side.
const ATTRIBUTES: std::ops::RangeInclusive<u16> = 0xf..=0x1b;

/// Bytes from a seed.
fn noise(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 24) as u8
    };
    (0..length).map(|_| next()).collect()
}

/// A MAD with any body.
fn mad(u: &mut Unstructured<'_>) -> arbitrary::Result<[u8; MAD]> {
    let mut bytes = <[u8; MAD]>::arbitrary(u)?;
    bytes[..8].copy_from_slice(&[1, 7, 2, 3, 0, 0, 0, 0]);
    let attribute = u.int_in_range(ATTRIBUTES)?;
    bytes[16..18].copy_from_slice(&attribute.to_be_bytes());
    Ok(bytes)
}

#[test]
fn a_message_that_is_decoded_is_encoded_alike() {
    let mut kinds = [0; 11];
    for seed in 1..=20_000 {
        let noise = noise(seed, 512);
        let bytes = mad(&mut Unstructured::new(&noise)).unwrap();
        let attribute = u16::from_be_bytes([bytes[16], bytes[17]]);
        match decode(&bytes) {
            Ok((transaction, message)) => {
                let again = encode(transaction, &message);
                assert_eq!(decode(&again), Ok((transaction, message)));
                // Only reserved bits, and what this package does not read, differ: they are zero.
                assert!(again.iter().zip(&bytes).all(|(new, old)| new & !old == 0), "{message:?}");
                kinds[usize::from(attribute) - 0x10] += 1;
            }
            Err(BadMad::Attribute(unknown)) => {
                assert_eq!(unknown, attribute);
                assert!(!(0x10..=0x18).contains(&attribute), "{attribute:#x}");
            }
            Err(error) => assert!(matches!(error, BadMad::Field(..)), "{error}"),
        }
    }
    assert!(kinds[..9].iter().all(|count| *count > 50), "{kinds:?}");
    assert_eq!(kinds[9..], [0, 0]);
}

#[test]
fn a_datagram_of_another_kind_is_refused() {
    let noise = noise(7, 512);
    let mut bytes = mad(&mut Unstructured::new(&noise)).unwrap();
    bytes[17] = 0x14;
    assert!(matches!(decode(&bytes), Ok((_, Message::Rtu(_)))));
    for length in [0, 24, 255, 257] {
        let mut bytes = bytes.to_vec();
        bytes.resize(length, 0);
        assert_eq!(decode(&bytes), Err(BadMad::Length(length)));
    }
    for (at, field) in ["base version", "class", "class version", "method"].iter().enumerate() {
        let mut bytes = bytes;
        bytes[at] ^= 0x80;
        assert_eq!(decode(&bytes), Err(BadMad::Header(field, bytes[at].into())));
    }
}

#[test]
fn values_that_mean_nothing_are_refused() {
    let noise = noise(7, 512);
    let valid = mad(&mut Unstructured::new(&noise)).unwrap();
    let refused = |attribute: u8, at: usize, value: u8| {
        let mut bytes = valid;
        bytes[17] = attribute;
        // The value alone is wrong: the other fields of REQ, MRA and REJ that are checked are not.
        match attribute {
            0x10 => (bytes[24 + 43], bytes[24 + 50], bytes[24 + 51]) = (0, 0x30, 0),
            0x11 | 0x12 => (bytes[24 + 8], bytes[24 + 9]) = (0, 0),
            _ => {}
        }
        bytes[24 + at] = value;
        decode(&bytes).err()
    };
    assert_eq!(refused(0x10, 50, 0), Some(BadMad::Field("path MTU", 0)));
    assert_eq!(refused(0x10, 50, 0x60), Some(BadMad::Field("path MTU", 6)));
    let rd = Some(BadMad::Field("transport of a connection", 2));
    assert_eq!(refused(0x10, 43, 2 << 1), rd);
    assert_eq!(refused(0x10, 43, 3 << 1), Some(BadMad::Field("extended transport", 0)));
    let about = Some(BadMad::Field("message that is answered", 3));
    assert_eq!((refused(0x11, 8, 0xc0), refused(0x12, 8, 0xc0)), (about, about));
    let long = Some(BadMad::Field("length of the info", 73));
    assert_eq!((refused(0x12, 9, 73 << 1), refused(0x18, 5, 73)), (long, long));
}

#[test]
fn a_field_that_is_too_wide_leaves_its_neighbours_alone() {
    let noise = noise(3, 512);
    let mut bytes = mad(&mut Unstructured::new(&noise)).unwrap();
    bytes[17] = 0x10;
    (bytes[24 + 43], bytes[24 + 50], bytes[24 + 51]) = (3 << 1, 0x30, 1);
    let Ok((_, Message::Req(req))) = decode(&bytes) else { panic!("no REQ") };
    let mut wide = req;
    wide.qpn |= 0xff00_0000;
    wide.starting_psn |= 0xff00_0000;
    wide.ece = Ece { vendor: wide.ece.vendor | 0xff00_0000, ..wide.ece };
    wide.retries |= 0xf8;
    wide.local_response_timeout |= 0xe0;
    wide.rnr_retries |= 0xf8;
    wide.cm_retries |= 0xf0;
    wide.path.flow_label |= 0xfff0_0000;
    wide.path.rate |= 0xc0;
    wide.path.service_level |= 0xf0;
    wide.path.ack_timeout |= 0xe0;
    assert_eq!(encode(1, &Message::Req(wide)), encode(1, &Message::Req(req)));
    assert_eq!((req.service, About::default()), (Service::Xrc, About::Req));
}

#[test]
fn addresses_of_both_families_lead_the_private_data() {
    let address = |text: &str| text.parse::<IpAddr>().unwrap();
    for (source, destination, version) in
        [("10.0.0.1", "10.0.0.2", 0x40), ("fd00::1", "fd00::2", 0x60)]
    {
        let [source, destination] = [source, destination].map(address);
        let addressing = IpAddressing { source_port: 0x1234, source, destination };
        let bytes = addressing.encode();
        assert_eq!(bytes[..4], [0, version, 0x12, 0x34]);
        assert_eq!(IpAddressing::decode(&bytes), Ok(addressing));
        for length in 0..IP_ADDRESSING {
            let short = IpAddressing::decode(&bytes[..length]);
            assert_eq!(short, Err(BadMad::Length(length)));
        }
        let mut other = bytes;
        other[0] = 0x10;
        let refused = BadMad::Field("version of IP addressing", 0x10);
        assert_eq!(IpAddressing::decode(&other), Err(refused));
        other = bytes;
        other[1] = 0x50;
        let refused = BadMad::Field("version of IP", 5);
        assert_eq!(IpAddressing::decode(&other), Err(refused));
    }
    let v4 = IpAddressing {
        source_port: 1,
        source: address("10.0.0.1"),
        destination: address("10.0.0.2"),
    };
    let bytes = v4.encode();
    assert_eq!((&bytes[4..16], &bytes[16..20]), (&[0; 12][..], &[10, 0, 0, 1][..]));
    let mixed = IpAddressing { destination: address("fd00::2"), ..v4 };
    let source = address("::ffff:10.0.0.1");
    assert_eq!(IpAddressing::decode(&mixed.encode()), Ok(IpAddressing { source, ..mixed }));
}

#[test]
fn a_service_is_a_port_space_and_a_port() {
    assert_eq!(service_id(0x0106, 4791), 0x0000_0000_0106_12b7);
    assert_eq!(port_of(0x0000_0000_0106_12b7), Some((0x0106, 4791)));
    // Service IDs of others: of the subnet administrator, of an operating system, of no service.
    for id in [0x12b7, 0x0001_0106_12b7, 0x0200_0000_0000_0000, u64::MAX] {
        assert_eq!(port_of(id), None, "{id:#x}");
    }
}

/// The fields that Wireshark does not name (`tests/tshark.rs` has the others), as `ibta_vol1_c12.h` places them: the
/// byte, the bit in it from the high one on, and the width.
#[test]
fn fields_are_where_the_specification_has_them() {
    let field = |bytes: &[u8; MAD], byte: usize, bit: usize, width: usize| {
        let at = |bit: usize| u64::from(bytes[24 + byte + bit / 8] >> (7 - bit % 8) & 1);
        (bit..bit + width).fold(0, |value, bit| value << 1 | at(bit))
    };
    for seed in 1..=500 {
        let noise = noise(seed, 512);
        let mut bytes = mad(&mut Unstructured::new(&noise)).unwrap();
        for attribute in [0x10, 0x11, 0x12, 0x13, 0x17, 0x18] {
            bytes[17] = attribute;
            let Ok((_, message)) = decode(&bytes) else { continue };
            let modifier =
                u64::from(u32::from_be_bytes([bytes[20], bytes[21], bytes[22], bytes[23]]));
            let field = |byte, bit, width| field(&bytes, byte, bit, width);
            let (found, expected) = match message {
                Message::Req(req) => {
                    let transport = match req.service {
                        Service::Rc => 0,
                        Service::Uc => 1,
                        Service::Xrc => 3,
                    };
                    let path = [field(52 + 36, 0, 20), field(52 + 39, 2, 6)];
                    assert_eq!([u64::from(req.path.flow_label), u64::from(req.path.rate)], path);
                    (
                        [req.ece.vendor.into(), req.ece.options.into(), transport, req.service_id],
                        [field(5, 0, 24), modifier, field(43, 5, 2), field(8, 0, 64)],
                    )
                }
                Message::Mra(mra) => (
                    [
                        mra.local_id.into(),
                        mra.remote_id.into(),
                        mra.about as u64,
                        mra.service_timeout.into(),
                    ],
                    [field(0, 0, 32), field(4, 0, 32), field(8, 0, 2), field(9, 0, 5)],
                ),
                Message::Rej(rej) => (
                    [rej.about as u64, rej.info_length.into(), rej.reason.into(), 0],
                    [field(8, 0, 2), field(9, 0, 7), field(10, 0, 16), 0],
                ),
                Message::Rep(rep) => (
                    [rep.ece.vendor.into(), rep.ece.options.into(), rep.ee_context.into(), 0],
                    [
                        field(15, 0, 8) << 16 | field(19, 0, 8) << 8 | field(23, 0, 8),
                        modifier,
                        field(16, 0, 24),
                        0,
                    ],
                ),
                Message::SidrReq(req) => (
                    [req.request_id.into(), req.pkey.into(), req.service_id, 0],
                    [field(0, 0, 32), field(4, 0, 16), field(8, 0, 64), 0],
                ),
                Message::SidrRep(rep) => {
                    let vendor = field(6, 0, 16) << 8 | field(11, 0, 8);
                    assert_eq!(
                        (u64::from(rep.ece.vendor), u64::from(rep.status)),
                        (vendor, field(4, 0, 8))
                    );
                    assert_eq!(
                        (&rep.info[..], &rep.private_data[..]),
                        (&bytes[48..120], &bytes[120..])
                    );
                    (
                        [rep.request_id.into(), rep.qpn.into(), rep.service_id, rep.qkey.into()],
                        [field(0, 0, 32), field(8, 0, 24), field(12, 0, 64), field(20, 0, 32)],
                    )
                }
                other => panic!("{other:?}"),
            };
            assert_eq!(found, expected, "{message:?}");
        }
    }
}
