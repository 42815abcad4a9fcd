//! Wireshark's decoder reads the packets of each opcode as they were meant, and their ICRCs. Where `tshark` is
//! not installed they are skipped; with `UVERBS_NEEDS_TSHARK` set they fail.

#[path = "tools/tshark.rs"]
mod tool;

use std::fmt::Write as _;
use std::net::IpAddr;
use std::process::Command;
use tool::output_of;
use uverbs_roce::Psn;
use uverbs_roce::cm;
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

/// The fields of frames with these names, a line for each frame, as Wireshark decodes them; `None` without `tshark`.
fn decoded(what: &str, frames: &[Vec<u8>], names: &[&str]) -> Option<String> {
    let name = format!("uverbs-roce-{what}-{}.pcap", std::process::id());
    let file = std::env::temp_dir().join(name);
    std::fs::write(&file, capture(frames)).unwrap();
    let mut command = Command::new("tshark");
    command.arg("-r").arg(&file).args(["-T", "fields", "-E", "separator=|", "-E", "occurrence=f"]);
    names.iter().for_each(|name| {
        command.args(["-e", &format!("infiniband.{name}")]);
    });
    output_of(command, &file)
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
    let Some(printed) = decoded("opcodes", &frames, &names) else { return };
    for (printed, expected) in printed.lines().zip(expected.lines()) {
        assert_eq!(printed, expected);
    }
    assert_eq!(printed.lines().count(), frames.len());
}

/// The frame of a message of the connection manager.
fn mad(transaction: u64, message: cm::Message) -> Vec<u8> {
    let opcode = Opcode { transport: Transport::Ud, operation: Operation::SendOnly };
    let mut buffer = PacketBuffer::default();
    buffer.begin(&Bth::new(opcode, 0xffff, cm::QPN, Psn::new(1)));
    buffer.header(&Deth::new(cm::QKEY, cm::QPN));
    buffer.payload(cm::MAD).copy_from_slice(&cm::encode(transaction, &message));
    let mut frame = Vec::new();
    assert!(encapsulate(&route(false), buffer.finish(), &mut frame));
    frame
}

/// Wireshark 4.0 has no names for the fields of MRA, SIDR_REQ and SIDR_REP: of these it reads the header alone. Of the
/// word with flow label and rate it reads three bytes, and so gets both wrong.
#[test]
fn wireshark_reads_messages_of_the_connection_manager() {
    let [source, destination] = [route(false).source, route(false).destination];
    let addressing = cm::IpAddressing { source_port: 0x1234, source, destination };
    let mut private_data = [0x5a; 92];
    private_data[..cm::IP_ADDRESSING].copy_from_slice(&addressing.encode());
    let gid = |last: u8| {
        let mut gid = [0; 16];
        gid[10..].copy_from_slice(&[0xff, 0xff, 10, 0, 0, last]);
        gid
    };
    let path = cm::Path {
        local_lid: 0x1111,
        remote_lid: 0x2222,
        local_gid: gid(1),
        remote_gid: gid(2),
        flow_label: 0x3_4567,
        rate: 7,
        traffic_class: 0x20,
        hop_limit: 64,
        service_level: 9,
        subnet_local: true,
        ack_timeout: 18,
    };
    let req = cm::Req {
        local_id: 0x1020_3040,
        ece: cm::Ece::default(),
        service_id: cm::service_id(0x0106, 4791),
        ca_guid: 0x0275_76ff_fe00_0001,
        qkey: 0x1111_2222,
        qpn: 0x12_3456,
        responder_resources: 16,
        initiator_depth: 15,
        remote_response_timeout: 20,
        service: cm::Service::Rc,
        flow_control: true,
        starting_psn: 0xab_cdef,
        local_response_timeout: 19,
        retries: 7,
        pkey: 0xffff,
        mtu: 3,
        rnr_retries: 6,
        cm_retries: 15,
        srq: true,
        path,
        private_data,
    };
    let (local_id, remote_id) = (0x5060_7080, 0x1020_3040);
    let rep = cm::Rep {
        local_id,
        remote_id,
        ece: cm::Ece::default(),
        qkey: 0x3333_4444,
        qpn: 0x65_4321,
        ee_context: 0x77,
        starting_psn: 0xfe_dcba,
        responder_resources: 4,
        initiator_depth: 5,
        ack_delay: 15,
        failover: 1,
        flow_control: true,
        rnr_retries: 5,
        srq: true,
        ca_guid: 0x0275_76ff_fe00_0002,
        private_data: [0x11; 196],
    };
    let rej = cm::Rej {
        local_id,
        remote_id,
        about: cm::About::Rep,
        reason: 28,
        info_length: 8,
        info: [0x22; 72],
        private_data: [0x33; 148],
    };
    let done = cm::Confirmation { local_id, remote_id, private_data: [0x44; 224] };
    let dreq = cm::Dreq { local_id, remote_id, remote_qpn: 0x65_4321, private_data: [0x55; 220] };
    let mra = cm::Mra {
        local_id,
        remote_id,
        about: cm::About::Req,
        service_timeout: 24,
        private_data: [0; 222],
    };
    let sidr_req = cm::SidrReq {
        request_id: 1,
        pkey: 0xffff,
        service_id: cm::service_id(0x0111, 7),
        private_data: [0; 216],
    };
    let sidr_rep = cm::SidrRep {
        request_id: 1,
        status: 0,
        ece: cm::Ece { vendor: 0, options: 0x0102_0304 },
        qpn: 2,
        service_id: cm::service_id(0x0111, 7),
        qkey: 3,
        info_length: 0,
        info: [0; 72],
        private_data: [0; 136],
    };
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let cases = [
        (
            cm::Message::Req(req),
            vec![
                ("cm.req", "0x10203040".into()),
                ("cm.req.serviceid.protocol", "0x06".into()),
                ("cm.req.serviceid.dport", "0x12b7".into()),
                ("cm.req.localcaguid", "0x027576fffe000001".into()),
                ("cm.req.localqkey", "0x11112222".into()),
                ("cm.req.localqpn", "0x123456".into()),
                ("cm.req.responderres", "0x10".into()),
                ("cm.req.initdepth", "0x0f".into()),
                ("cm.req.remoteresptout", "0x14".into()),
                ("cm.req.transpsvctype", "0x00".into()),
                ("cm.req.e2eflowctrl", "0x01".into()),
                ("cm.req.startpsn", "0xabcdef".into()),
                ("cm.req.localresptout", "0x13".into()),
                ("cm.req.retrcount", "0x07".into()),
                ("cm.req.pkey", "0xffff".into()),
                ("cm.req.pppmtu", "0x03".into()),
                ("cm.req.rdcexist", "0x00".into()),
                ("cm.req.rnrretrcount", "0x06".into()),
                ("cm.req.maxcmretr", "0x0f".into()),
                ("cm.req.srq", "0x01".into()),
                ("cm.req.ext_transport", "0x00".into()),
                ("cm.req.prim_locallid", "4369".into()),
                ("cm.req.prim_remotelid", "8738".into()),
                ("cm.req.prim_localgid_ipv4", "10.0.0.1".into()),
                ("cm.req.prim_remotegid_ipv4", "10.0.0.2".into()),
                ("cm.req.prim_tfcclass", "0x20".into()),
                ("cm.req.prim_hoplim", "0x40".into()),
                ("cm.req.prim_sl", "0x09".into()),
                ("cm.req.prim_subnetlocal", "0x01".into()),
                ("cm.req.prim_localacktout", "0x12".into()),
                ("cm.req.alt_locallid", "0".into()),
                ("cm.req.ip_cm.majv", "0x00".into()),
                ("cm.req.ip_cm.ipv", "0x04".into()),
                ("cm.req.ip_cm.sport", "0x1234".into()),
                ("cm.req.ip_cm.sip4", "10.0.0.1".into()),
                ("cm.req.ip_cm.dip4", "10.0.0.2".into()),
                ("cm.req.ip_cm.private", hex(&[0x5a; 56])),
            ],
        ),
        (
            cm::Message::Rep(rep),
            vec![
                ("cm.rep", "0x50607080".into()),
                ("cm.rep.remotecommid", "0x10203040".into()),
                ("cm.rep.localqkey", "0x33334444".into()),
                ("cm.rep.localqpn", "0x654321".into()),
                ("cm.rep.localeecn", "0x000077".into()),
                ("cm.rep.startpsn", "0xfedcba".into()),
                ("cm.rep.respres", "0x04".into()),
                ("cm.rep.initdepth", "0x05".into()),
                ("cm.rep.tgtackdelay", "0x0f".into()),
                ("cm.rep.failoveracc", "0x01".into()),
                ("cm.rep.e2eflowctrl", "0x01".into()),
                ("cm.rep.rnrretrcount", "0x05".into()),
                ("cm.rep.srq", "0x01".into()),
                ("cm.rep.localcaguid", "0x027576fffe000002".into()),
                ("cm.rep.private", hex(&rep.private_data)),
            ],
        ),
        (
            cm::Message::Rej(rej),
            vec![
                ("cm.rej.localcommid", "0x50607080".into()),
                ("cm.rej.remotecommid", "0x10203040".into()),
                ("cm.rej.msgrej", "0x01".into()),
                ("cm.rej.rejinfolen", "0x08".into()),
                ("cm.rej.reason", "0x001c".into()),
                ("cm.rej.ari", hex(&rej.info)),
                ("cm.rej.private", hex(&rej.private_data)),
            ],
        ),
        (
            cm::Message::Rtu(done),
            vec![
                ("cm.rtu.localcommid", "0x50607080".into()),
                ("cm.rtu.remotecommid", "0x10203040".into()),
                ("cm.rtu.private", hex(&done.private_data)),
            ],
        ),
        (
            cm::Message::Dreq(dreq),
            vec![
                ("cm.dreq.localcommid", "0x50607080".into()),
                ("cm.dreq.remotecommid", "0x10203040".into()),
                ("cm.req.remoteqpneecn", "0x654321".into()),
                ("cm.dreq.private", hex(&dreq.private_data)),
            ],
        ),
        (
            cm::Message::Drep(done),
            vec![
                ("cm.drsp.localcommid", "0x50607080".into()),
                ("cm.drsp.remotecommid", "0x10203040".into()),
                ("cm.drsp.private", hex(&done.private_data)),
            ],
        ),
        (cm::Message::Mra(mra), vec![("mad.attributeid", "0x0011".into())]),
        (cm::Message::SidrReq(sidr_req), vec![("mad.attributeid", "0x0017".into())]),
        (
            cm::Message::SidrRep(sidr_rep),
            vec![
                ("mad.attributeid", "0x0018".into()),
                ("mad.attributemodifier", "0x01020304".into()),
            ],
        ),
    ];
    for (message, mut fields) in cases {
        fields.extend([
            ("deth.q_key", "0x0000000080010000".to_owned()),
            ("mad.baseversion", "0x01".into()),
            ("mad.mgmtclass", "0x07".into()),
            ("mad.classversion", "0x02".into()),
            ("mad.method", "0x03".into()),
            ("mad.status", "0x0000".into()),
            ("mad.transactionid", "0x1122334455667788".into()),
        ]);
        let names: Vec<&str> = fields.iter().map(|(name, _)| *name).collect();
        let frame = mad(0x1122_3344_5566_7788, message);
        let Some(printed) = decoded("cm", &[frame], &names) else { return };
        let found: Vec<&str> = printed.trim_end_matches('\n').split('|').collect();
        let read = fields.iter().zip(&found).filter(|((_, expected), found)| expected != *found);
        let wrong: Vec<_> = read.collect();
        assert!(wrong.is_empty(), "{wrong:?} of {message:?}");
        assert_eq!(found.len(), fields.len());
    }
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
