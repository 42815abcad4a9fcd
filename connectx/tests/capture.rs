//! A capture of the fabric holds the packets as they were meant: read back here, and by Wireshark's decoder. That test
//! is skipped where `tshark` is not installed, and fails with `UVERBS_NEEDS_TSHARK` set.

mod driver;
#[path = "../../roce/tests/tools/tshark.rs"]
mod tshark;

use driver::pair::Pair;
use driver::pair::code::*;
use std::io::{self, Write};
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};
use tshark::output_of;
use uverbs_roce::frame::decapsulate;
use uverbs_roce::headers::Packet;

/// A file in memory.
#[derive(Clone, Default)]
struct File(Arc<Mutex<Vec<u8>>>);

impl File {
    fn bytes(&self) -> Vec<u8> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The frames, without the file's header and those of the packets.
    fn frames(&self) -> Vec<Vec<u8>> {
        let bytes = self.bytes();
        let (mut rest, mut frames) = (&bytes[24..], Vec::new());
        while let Some((header, behind)) = rest.split_first_chunk::<16>() {
            let [.., a, b, c, d] = *header;
            let (frame, behind) = behind.split_at(u32::from_le_bytes([a, b, c, d]) as usize);
            frames.push(frame.to_vec());
            rest = behind;
        }
        frames
    }
}

impl Write for File {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Bytes of a write: four packets.
const LONG: u32 = 4000;

/// The capture of a send, a write of four packets, an atomic and a read.
fn play() -> (Pair, File) {
    let (mut p, file) = (Pair::new(), File::default());
    let data: Vec<u8> = (0..LONG).map(|at| (at * 7 + at / 251) as u8).collect();
    p.driver.memory().write(p.from, &data).unwrap();
    p.driver.fabric.capture(file.clone()).unwrap();
    p.receive(8);
    p.send(8);
    let local = p.local(LONG);
    p.driver.post_send(&mut p.a, WRITE, 0, &[Pair::remote(p.to, p.key), local].concat());
    let (remote, local) = (Pair::remote(p.to, p.key), p.local(8));
    let add = [7u64.to_be_bytes(), [0; 8]].concat();
    p.driver.post_send(&mut p.a, FETCH_ADD, 0, &[remote.clone(), add, local.clone()].concat());
    p.driver.post_send(&mut p.a, READ, 0, &[remote, local].concat());
    (p, file)
}

/// Opcode, destination and PSN of each packet, the PSN from the first one on: `a` sends requests, and `b` responses.
fn expected(p: &Pair) -> Vec<(u8, u32, u32)> {
    let (a, b) = (p.a.number, p.b.number);
    vec![
        (0x04, b, 0),
        (0x11, a, 0),
        (0x06, b, 1),
        (0x07, b, 2),
        (0x07, b, 3),
        (0x08, b, 4),
        (0x11, a, 4),
        (0x14, b, 5),
        (0x12, a, 5),
        (0x0c, b, 6),
        (0x10, a, 6),
    ]
}

#[test]
fn a_capture_has_each_packet_with_its_payload_and_icrc() {
    let (mut p, file) = play();
    let frames = file.frames();
    let packets: Vec<_> = frames.iter().map(|frame| decapsulate(frame).unwrap().1).collect();
    let packets: Vec<_> = packets.iter().map(|bytes| Packet::parse(bytes).unwrap()).collect();
    let first = packets[0].bth.psn();
    let found: Vec<_> = packets
        .iter()
        .map(|packet| {
            let bth = packet.bth;
            (packet.opcode.to_byte(), bth.destination(), bth.psn().since(first))
        })
        .collect();
    assert_eq!(found, expected(&p));
    let mut written =
        packets[2..6].iter().map(|packet| packet.payload).collect::<Vec<_>>().concat();
    // The atomic came later.
    let mut memory = vec![0; LONG as usize];
    p.driver.memory().read(p.to, &mut memory).unwrap();
    written[..8].copy_from_slice(&memory[..8]);
    assert!(written == memory);
}

#[test]
fn wireshark_reads_a_capture() {
    let (p, file) = play();
    let path = std::env::temp_dir().join(format!("uverbs-connectx-{}.pcap", std::process::id()));
    std::fs::write(&path, file.bytes()).unwrap();
    let names = ["ip.src", "ip.dst", "udp.dstport", "infiniband.bth.destqp", "infiniband.bth.psn"];
    let mut command = Command::new("tshark");
    command.arg("-r").arg(&path).args(["-T", "fields", "-E", "separator=|"]);
    let names = names.into_iter().chain(["infiniband.bth.opcode", "infiniband.reth.dmalen"]);
    names.for_each(|name| _ = command.args(["-e", name]));
    let Some(printed) = output_of(command, &path) else { return };
    let frames = file.frames();
    let first = Packet::parse(decapsulate(&frames[0]).unwrap().1).unwrap().bth.psn();
    let lines: Vec<_> = expected(&p)
        .into_iter()
        .map(|(opcode, destination, psn)| {
            let length = match opcode {
                0x06 => LONG.to_string(),
                0x0c => "8".into(),
                _ => String::new(),
            };
            let psn = first.plus(psn).get();
            format!("10.0.0.1|10.0.0.1|4791|0x{destination:06x}|{psn}|{opcode}|{length}")
        })
        .collect();
    assert_eq!(printed.lines().collect::<Vec<_>>(), lines);
}
