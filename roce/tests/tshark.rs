//! Wireshark's decoder reads the packets of each opcode as they were meant, and their ICRCs. Without `tshark` this tests
//! the frames alone.

use std::fmt::Write as _;
use std::net::IpAddr;
use std::process::Command;
use uverbs_roce::Psn;
use uverbs_roce::frame::{NoPacket, Route, decapsulate, encapsulate};
use uverbs_roce::headers::{
    Aeth, AtomicAckEth, AtomicEth, Bth, Deth, Ieth, ImmDt, PacketBuffer, Reth, Syndrome,
};
use uverbs_roce::opcodes::{Headers, Opcode, Operation, Transport};

fn route(v6: bool) -> Route {
    let address = |text: &str| text.parse::<IpAddr>().unwrap();
    let (source, destination) = if v6 { ("fd00::1", "fd00::2") } else { ("10.0.0.1", "10.0.0.2") };
    Route {
        source_mac: [2, 0, 0, 0, 0, 1],
        destination_mac: [2, 0, 0, 0, 0, 2],
        vlan: None,
        source: address(source),
        destination: address(destination),
        source_port: 0xc123,
        traffic_class: 0x6a,
        hop_limit: 64,
    }
}

/// A packet with an opcode, and the fields that the decoder shall print.
fn packet(buffer: &mut PacketBuffer, opcode: Opcode, number: u32) -> (Vec<u8>, String) {
    let mut bth = Bth::new(opcode, 0x8001, 0x12_3450 + number, Psn::new(0xff_ff00 + number));
    bth.request_ack();
    buffer.begin(&bth);
    let mut fields =
        format!("{}|0x{:06x}|{}", opcode.to_byte(), 0x12_3450 + number, 0xff_ff00 + number);
    let mut put = |value: &str| write!(fields, "|{value}").unwrap();
    let headers = opcode.headers();
    if headers.contains(Headers::DETH) {
        buffer.header(&Deth { qkey: 0x1111_2222.into(), source: 0x33.into() });
        put("0x0000000011112222|0x00000033");
    } else {
        put("|");
    }
    if headers.contains(Headers::RETH) {
        buffer.header(&Reth { address: 0x1234.into(), key: 0x55.into(), length: 600.into() });
        put("0x0000000000001234|0x00000055|600");
    } else if headers.contains(Headers::ATOMICETH) {
        // The decoder gives address and key of both headers one name.
        put("0x0000000000000040|0x00000066|");
    } else {
        put("||");
    }
    if headers.contains(Headers::ATOMICETH) {
        let (swap_or_add, compare) = (7.into(), 8.into());
        buffer.header(&AtomicEth { address: 0x40.into(), key: 0x66.into(), swap_or_add, compare });
        put("7|8");
    } else {
        put("|");
    }
    if headers.contains(Headers::AETH) {
        buffer.header(&Aeth::new(Syndrome::SequenceError, 9));
        put("96|9");
    } else {
        put("|");
    }
    if headers.contains(Headers::ATOMICACKETH) {
        buffer.header(&AtomicAckEth { old: 11.into() });
        put("11");
    } else {
        put("");
    }
    if headers.contains(Headers::IMMDT) {
        buffer.header(&ImmDt { data: 12.into() });
        put("0000000c");
    } else {
        put("");
    }
    if headers.contains(Headers::IETH) {
        buffer.header(&Ieth { key: 13.into() });
        put("0000000d");
    } else {
        put("");
    }
    (buffer.finish().to_vec(), fields)
}

/// A capture of Ethernet frames.
fn capture(frames: &[Vec<u8>]) -> Vec<u8> {
    let words = [0xa1b2_c3d4u32, 0x0004_0002, 0, 0, 65535, 1];
    let mut file: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    for (at, frame) in frames.iter().enumerate() {
        let words = [0, at as u32, frame.len() as u32, frame.len() as u32];
        file.extend(words.iter().flat_map(|word| word.to_le_bytes()));
        file.extend(frame);
    }
    file
}

#[test]
fn wireshark_reads_what_was_meant() {
    let mut buffer = PacketBuffer::default();
    // Wireshark 4.0 does not know XRC, flush and atomic write. The private opcodes are nobody else's.
    let unknown = |opcode: &Opcode| {
        use Operation::{AtomicWrite, Flush, MaskedCompareSwap, MaskedFetchAdd};
        let private = matches!(opcode.operation, MaskedCompareSwap | MaskedFetchAdd);
        private
            || opcode.transport == Transport::Xrc
            || matches!(opcode.operation, AtomicWrite | Flush)
    };
    let opcodes = (0..=u8::MAX).filter_map(Opcode::from_byte);
    let opcodes = opcodes.filter(|opcode| !unknown(opcode));
    let (mut frames, mut expected) = (Vec::new(), String::new());
    for (number, opcode) in opcodes.enumerate() {
        let (packet, fields) = packet(&mut buffer, opcode, number as u32);
        let mut frame = Vec::new();
        assert!(encapsulate(&route(number % 2 == 1), &packet, &mut frame));
        frames.push(frame);
        expected += &(fields + "\n");
    }
    let file = std::env::temp_dir().join(format!("uverbs-roce-{}.pcap", std::process::id()));
    std::fs::write(&file, capture(&frames)).unwrap();
    let names = [
        "bth.opcode",
        "bth.destqp",
        "bth.psn",
        "deth.q_key",
        "deth.srcqp",
        "reth.va",
        "reth.r_key",
        "reth.dmalen",
        "atomiceth.swapdt",
        "atomiceth.cmpdt",
        "aeth.syndrome",
        "aeth.msn",
        "atomicacketh.origremdt",
        "immdt",
        "ieth",
    ];
    let mut command = Command::new("tshark");
    command.arg("-r").arg(&file).args(["-T", "fields", "-E", "separator=|", "-E", "occurrence=f"]);
    names.iter().for_each(|name| {
        command.args(["-e", &format!("infiniband.{name}")]);
    });
    let output = command.output();
    let _ = std::fs::remove_file(&file);
    let Ok(output) = output else { return };
    let printed = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    for (printed, expected) in printed.lines().zip(expected.lines()) {
        assert_eq!(printed, expected);
    }
    assert_eq!(printed.lines().count(), frames.len());
}

#[test]
fn a_frame_that_is_read_is_the_one_that_was_written() {
    let packet: Vec<u8> = (0..64).collect();
    for v6 in [false, true] {
        for vlan in [None, Some(0x6005)] {
            let route = Route { vlan, ..route(v6) };
            let mut frame = Vec::new();
            assert!(encapsulate(&route, &packet, &mut frame));
            assert_eq!(decapsulate(&frame), Ok((route, &packet[..])));
            for length in 0..frame.len() {
                assert_eq!(decapsulate(&frame[..length]), Err(NoPacket::Truncated));
            }
            let last = frame.len() - 1;
            frame[last] ^= 1;
            assert_eq!(decapsulate(&frame), Err(NoPacket::Icrc));
            frame[last] ^= 1;
            // Ethernet fills short frames.
            frame.extend([0; 8]);
            assert_eq!(decapsulate(&frame), Ok((route, &packet[..])));
        }
    }
    let mixed = Route { destination: route(true).destination, ..route(false) };
    assert!(!encapsulate(&mixed, &packet, &mut Vec::new()));
    assert_eq!(decapsulate(&[0; 64]), Err(NoPacket::Other));
}
