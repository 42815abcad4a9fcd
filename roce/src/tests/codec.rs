//! Packets as bytes, written by hand from the drawings of the headers, and read back.

use crate::headers::{
    Aeth, AtomicAckEth, AtomicEth, Bth, Deth, Feth, Ieth, ImmDt, Malformed, MaskedEth, Packet,
    PacketBuffer, Reth, Syndrome, XrcEth,
};
use crate::opcodes::{Headers, Opcode, Operation, Transport};
use crate::psn::Psn;
use std::vec::Vec;

const RETH: Reth = Reth {
    address: zerocopy::big_endian::U64::from_bytes([1, 2, 3, 4, 5, 6, 7, 8]),
    key: zerocopy::big_endian::U32::from_bytes([9, 10, 11, 12]),
    length: zerocopy::big_endian::U32::from_bytes([13, 14, 15, 16]),
};

fn bth(transport: Transport, operation: Operation) -> Bth {
    Bth::new(Opcode { transport, operation }, 0x8001, 0x12_3456, Psn::new(0xab_cdef))
}

/// A packet with all the headers of its opcode.
fn packet(buffer: &mut PacketBuffer, bth: &Bth, payload: &[u8]) -> Vec<u8> {
    buffer.begin(bth);
    let headers = Opcode::from_byte(bth.opcode).unwrap().headers();
    for header in headers.iter() {
        match header {
            Headers::XRCETH => buffer.header(&XrcEth { srq: 0x77.into() }),
            Headers::DETH => buffer.header(&Deth { qkey: 0x1111_2222.into(), source: 0x33.into() }),
            Headers::FETH => buffer.header(&Feth::new(2, 1)),
            Headers::RETH => buffer.header(&RETH),
            Headers::ATOMICETH => buffer.header(&AtomicEth {
                address: 0x10.into(),
                key: 0x20.into(),
                swap_or_add: 0x30.into(),
                compare: 0x40.into(),
            }),
            Headers::MASKEDETH => {
                buffer.header(&MaskedEth { key: 0x21.into(), ..MaskedEth::default() })
            }
            Headers::AETH => buffer.header(&Aeth::new(Syndrome::Ack, 0x55)),
            Headers::ATOMICACKETH => buffer.header(&AtomicAckEth { old: 0x66.into() }),
            Headers::IMMDT => buffer.header(&ImmDt { data: 0x7777_8888.into() }),
            _ => buffer.header(&Ieth { key: 0x99.into() }),
        }
    }
    buffer.payload(payload.len()).copy_from_slice(payload);
    buffer.finish().to_vec()
}

#[test]
fn packets_are_the_bytes_that_the_drawings_show() {
    let mut buffer = PacketBuffer::default();
    let mut send = bth(Transport::Rc, Operation::SendOnly);
    send.solicit();
    send.request_ack();
    // SE, migrated, two bytes of padding; AckReq.
    let expected = [4, 0xe0, 0x80, 1, 0, 0x12, 0x34, 0x56, 0x80, 0xab, 0xcd, 0xef, 1, 2, 0, 0];
    assert_eq!(packet(&mut buffer, &send, &[1, 2]), expected);

    let write = bth(Transport::Xrc, Operation::WriteOnlyImmediate);
    let expected = [
        0xab, 0x40, 0x80, 1, 0, 0x12, 0x34, 0x56, 0, 0xab, 0xcd, 0xef, 0, 0, 0, 0x77, 1, 2, 3, 4,
        5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 0x77, 0x77, 0x88, 0x88,
    ];
    assert_eq!(packet(&mut buffer, &write, &[]), expected);

    let datagram = bth(Transport::Ud, Operation::SendOnly);
    let expected = [
        0x64, 0x40, 0x80, 1, 0, 0x12, 0x34, 0x56, 0, 0xab, 0xcd, 0xef, 0x11, 0x11, 0x22, 0x22, 0,
        0, 0, 0x33,
    ];
    assert_eq!(packet(&mut buffer, &datagram, &[]), expected);

    let flush = bth(Transport::Rc, Operation::Flush);
    let expected = [
        0x1c, 0x40, 0x80, 1, 0, 0x12, 0x34, 0x56, 0, 0xab, 0xcd, 0xef, 0, 0, 0, 0x12, 1, 2, 3, 4,
        5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16,
    ];
    assert_eq!(packet(&mut buffer, &flush, &[]), expected);

    let atomic = bth(Transport::Rc, Operation::CompareSwap);
    let expected = [
        0x13, 0x40, 0x80, 1, 0, 0x12, 0x34, 0x56, 0, 0xab, 0xcd, 0xef, 0, 0, 0, 0, 0, 0, 0, 0x10,
        0, 0, 0, 0x20, 0, 0, 0, 0, 0, 0, 0, 0x30, 0, 0, 0, 0, 0, 0, 0, 0x40,
    ];
    assert_eq!(packet(&mut buffer, &atomic, &[]), expected);

    let answer = bth(Transport::Rc, Operation::AtomicAcknowledge);
    let expected = [
        0x12, 0x40, 0x80, 1, 0, 0x12, 0x34, 0x56, 0, 0xab, 0xcd, 0xef, 0x1f, 0, 0, 0x55, 0, 0, 0,
        0, 0, 0, 0, 0x66,
    ];
    assert_eq!(packet(&mut buffer, &answer, &[]), expected);
}

#[test]
fn a_packet_that_is_read_is_the_one_that_was_written() {
    let mut buffer = PacketBuffer::default();
    for opcode in (0..=u8::MAX).filter_map(Opcode::from_byte) {
        for length in [0usize, 1, 2, 3, 4, 255, 4096] {
            let payload: Vec<u8> = (0..length).map(|at| at as u8).collect();
            let written = bth(opcode.transport, opcode.operation);
            let bytes = packet(&mut buffer, &written, &payload);
            let read = Packet::parse(&bytes).unwrap();
            assert_eq!(read.opcode, opcode);
            assert_eq!((read.bth.destination(), read.bth.psn()), (0x12_3456, Psn::new(0xab_cdef)));
            assert_eq!(read.payload, payload);
            let headers = opcode.headers();
            assert_eq!(bytes.len(), 12 + headers.bytes() + length.next_multiple_of(4));
            assert_eq!(
                read.xrceth.map(XrcEth::srq),
                headers.contains(Headers::XRCETH).then_some(0x77)
            );
            assert_eq!(
                read.deth.map(Deth::source),
                headers.contains(Headers::DETH).then_some(0x33)
            );
            let feth = read.feth.map(|feth| (feth.kind(), feth.level()));
            assert_eq!(feth, headers.contains(Headers::FETH).then_some((2, 1)));
            assert_eq!(read.reth, headers.contains(Headers::RETH).then_some(&RETH));
            let compare = read.atomiceth.map(|header| header.compare.get());
            assert_eq!(compare, headers.contains(Headers::ATOMICETH).then_some(0x40));
            let key = read.maskedeth.map(|header| header.key.get());
            assert_eq!(key, headers.contains(Headers::MASKEDETH).then_some(0x21));
            assert_eq!(read.aeth.map(Aeth::msn), headers.contains(Headers::AETH).then_some(0x55));
            let old = read.atomicacketh.map(|header| header.old.get());
            assert_eq!(old, headers.contains(Headers::ATOMICACKETH).then_some(0x66));
            let data = read.immdt.map(|header| header.data.get());
            assert_eq!(data, headers.contains(Headers::IMMDT).then_some(0x7777_8888));
            let key = read.ieth.map(|header| header.key.get());
            assert_eq!(key, headers.contains(Headers::IETH).then_some(0x99));
        }
    }
}

#[test]
fn a_syndrome_is_the_byte_that_it_was_read_from() {
    for byte in 0..=u8::MAX {
        match Syndrome::from_byte(byte) {
            // The number of credits is not kept.
            Some(Syndrome::Ack) => assert_eq!(byte & 0xe0, 0),
            Some(syndrome) => assert_eq!(syndrome.to_byte(), byte),
            None => assert!(byte & 0x80 != 0 || byte & 0xe0 == 0x40 || byte > 0x64),
        }
    }
}

#[test]
fn bytes_that_are_no_packet_are_told_apart() {
    let mut buffer = PacketBuffer::default();
    let write = bth(Transport::Rc, Operation::WriteOnly);
    let bytes = packet(&mut buffer, &write, &[1; 5]);
    for length in 0..28 {
        assert_eq!(Packet::parse(&bytes[..length]), Err(Malformed::Truncated));
    }
    // Three bytes of padding, and none is there.
    assert_eq!(Packet::parse(&bytes[..28]), Err(Malformed::Truncated));
    assert_eq!(Packet::parse(&bytes[..30]), Err(Malformed::Unpadded(30)));
    let change = |at: usize, byte: u8| {
        let mut bytes = bytes.clone();
        bytes[at] = byte;
        Packet::parse(&bytes).map(|_| ())
    };
    assert_eq!(change(1, 1), Err(Malformed::Version(1)));
    assert_eq!(change(0, 0x81), Err(Malformed::Opcode(0x81)));
    assert_eq!(change(0, 0x2c), Err(Malformed::Opcode(0x2c)));
}
