//! Peers that send anything: nothing panics, nothing grows, and each request completes once.

use super::device::{Device, KEY};
use super::network::{QPNS, Random, attributes};
use crate::frame::decapsulate;
use crate::headers::{Packet, PacketBuffer};
use crate::icrc::{IpHeader, icrc};
use crate::opcodes::{Headers, Opcode, Transport};
use crate::{Atomic, Endpoint, Request, State, Work};
use arbitrary::{Arbitrary, Result, Unstructured};
use std::vec;
use std::vec::Vec;
use uverbs_uapi::wc::ib_wc_status;

/// Rounds of each transport.
const ROUNDS: u64 = 100;

fn bytes(seed: u64, count: usize) -> Vec<u8> {
    let mut random = Random(seed);
    (0..count / 8).flat_map(|_| random.next().to_le_bytes()).collect()
}

#[test]
fn any_bytes_are_a_packet_or_an_error() {
    for seed in 0..20_000 {
        let mut bytes = bytes(seed, 8 * (1 + seed as usize % 12));
        if seed % 2 == 0 {
            bytes[1] &= 0x30;
        }
        let (ip, rest) = ([0; 40], [0; 8]);
        icrc(IpHeader::V6(&ip), &rest, &bytes);
        if seed % 3 == 0 && bytes.len() > 40 {
            // A frame, as far as it goes.
            bytes[12..15].copy_from_slice(&[8, 0, 0x45]);
            bytes[20..24].copy_from_slice(&[0x40, 0, 64, 17]);
            bytes[36..39].copy_from_slice(&[0x12, 0xb7, 0]);
        }
        let _ = decapsulate(&bytes);
        let Ok(packet) = Packet::parse(&bytes) else { continue };
        let headers = packet.opcode.headers();
        let length = 12 + headers.bytes() + packet.payload.len() + packet.bth.padding();
        assert_eq!(length, bytes.len());
        assert_eq!(packet.aeth.is_some(), headers.contains(Headers::AETH));
        let _ = packet.aeth.map(|aeth| aeth.syndrome());
    }
}

/// A packet of a peer who knows the protocol, and keeps to it as far as it likes.
fn attack(u: &mut Unstructured<'_>, transport: Transport, psns: [u32; 2]) -> Result<Vec<u8>> {
    if u.ratio(1, 20)? {
        return Vec::arbitrary(u);
    }
    let operation = loop {
        let byte = transport.bits() | u.int_in_range(0..=31)?;
        if let Some(opcode) = Opcode::from_byte(byte) {
            break opcode.operation;
        }
        if u.is_empty() {
            return Ok(Vec::new());
        }
    };
    let opcode = Opcode { transport, operation };
    let near = u.choose(&psns)?.wrapping_add(u.int_in_range(0..=12)?).wrapping_sub(4);
    let psn = if u.ratio(1, 10)? { u.arbitrary()? } else { near };
    let mut packet = vec![opcode.to_byte(), u.arbitrary::<u8>()? & 0xf0, 0xff, 0xff];
    packet.extend(QPNS[0].to_be_bytes());
    packet.extend((psn & 0xff_ffff | u.choose(&[0, 1 << 31])?).to_be_bytes());
    let key = if u.ratio(1, 10)? { u.arbitrary()? } else { KEY };
    let address = u64::from(u.int_in_range(0..=5000u16)?) & !7;
    for header in opcode.headers().iter() {
        match header {
            Headers::XRCETH => packet.extend(9u32.to_be_bytes()),
            Headers::RETH => {
                packet.extend(address.to_be_bytes());
                packet.extend(key.to_be_bytes());
                let length = *u.choose(&[0, 8, 256, 300, 1024, 1 << 30, u32::MAX])?;
                packet.extend(length.to_be_bytes());
            }
            Headers::ATOMICETH => {
                packet.extend(address.to_be_bytes());
                packet.extend(key.to_be_bytes());
                packet.extend(u.arbitrary::<[u8; 16]>()?);
            }
            Headers::AETH => {
                let syndrome =
                    if u.ratio(1, 3)? { u.arbitrary()? } else { *u.choose(&[0x1f, 0x21, 0x60])? };
                packet.extend([syndrome, 0, 0, 1]);
            }
            header => packet.extend(vec![u.arbitrary::<u8>()?; header.bytes()]),
        }
    }
    let payload = *u.choose(&[0, 4, 8, 44, 256, 260, 4096])?;
    packet.resize(packet.len() + payload, u.arbitrary()?);
    Ok(packet)
}

fn request(u: &mut Unstructured<'_>, id: u64, transport: Transport) -> Result<Request<u8>> {
    let (address, key) = (0, KEY);
    let work = match u.int_in_range(0..=5)? {
        0 => Work::Send { immediate: Some(1) },
        1 => Work::Write { address, key, immediate: None },
        2 => Work::Read { address, key },
        3 => Work::Atomic { address, key, change: Atomic::FetchAdd { add: 1 } },
        4 => Work::Flush { address, key, kind: 1, level: 0 },
        _ => Work::Local,
    };
    let length = if matches!(work, Work::Atomic { .. }) { 8 } else { u.int_in_range(0..=1024)? };
    let datagram = (transport == Transport::Ud).then_some(crate::Datagram {
        path: 1,
        destination: 1,
        qkey: 1,
    });
    Ok(Request { id, work, length, fence: u.arbitrary()?, solicited: false, srq: 9, datagram })
}

fn play(transport: Transport, seed: u64) -> Result<()> {
    let data = bytes(seed, 16_000);
    let u = &mut Unstructured::new(&data);
    let mut endpoint = Endpoint::new();
    let mut device = Device { memory: vec![0; 4096], ..Device::default() };
    device.srq = (transport == Transport::Xrc).then_some(9);
    let create = |endpoint: &mut Endpoint<u8>, device: &mut Device| {
        endpoint.create(QPNS[0], transport, 8, attributes(0));
        for state in [State::Rtr, State::Rts] {
            endpoint.move_to(device, QPNS[0], state);
        }
    };
    create(&mut endpoint, &mut device);
    let (mut now, mut posted, mut psns) = (0, 0, [100, 100]);
    let bound = endpoint.capacity();
    while u.len() > 100 {
        if endpoint.state(QPNS[0]) == Some(State::Error) {
            assert_eq!(endpoint.pending(QPNS[0]), 0);
            create(&mut endpoint, &mut device);
            psns = [100, 100];
        }
        match u.int_in_range(0..=9)? {
            0 => {
                device.local.insert(posted, vec![0; 1024]);
                let request = request(u, posted, transport)?;
                posted += u64::from(endpoint.post(QPNS[0], request).is_ok());
            }
            1 => device.post_receive(),
            2 => now += u64::from(u.arbitrary::<u16>()?),
            _ => {
                let packet = attack(u, transport, psns)?;
                let _ = endpoint.packet(now, &mut device, &1, &packet);
            }
        }
        endpoint.run(now, &mut device, 50);
        for (_, packet, _) in std::mem::take(&mut device.sent) {
            let packet = Packet::parse(&packet).expect("what it sends is a packet");
            psns[packet.aeth.is_some() as usize] = packet.bth.psn().get();
        }
        assert!(device.problem.is_none(), "{:?}", device.problem);
        assert!(endpoint.capacity() <= bound, "{} bytes became {}", bound, endpoint.capacity());
    }
    endpoint.move_to(&mut device, QPNS[0], State::Error);
    let done: Vec<u64> = device.completions.iter().map(|(id, _)| *id).collect();
    assert_eq!(done, (0..posted).collect::<Vec<_>>(), "each request completes once and in order");
    assert!(
        device.completions.iter().all(|(_, status)| *status != ib_wc_status::IB_WC_GENERAL_ERR)
    );
    Ok(())
}

#[test]
fn a_hostile_peer_neither_stops_an_endpoint_nor_makes_it_grow() {
    for transport in [Transport::Rc, Transport::Uc, Transport::Ud, Transport::Xrc] {
        for seed in 0..ROUNDS {
            // An end of the bytes ends the round.
            let _ = play(transport, seed);
        }
    }
}

#[test]
fn a_packet_that_is_put_together_has_room_for_the_largest_one() {
    let mut buffer = PacketBuffer::default();
    let opcode =
        Opcode { transport: Transport::Xrc, operation: crate::opcodes::Operation::CompareSwap };
    buffer.begin(&crate::headers::Bth::new(opcode, 0xffff, 1, crate::Psn::new(0)));
    buffer.header(&[0u8; 52]);
    assert_eq!(buffer.payload(4096).len(), 4096);
    assert_eq!(buffer.finish().len(), crate::headers::MAX_PACKET);
}
