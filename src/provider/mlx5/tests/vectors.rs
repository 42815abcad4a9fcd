//! Requests and completions compared with recordings of rdma-core's libmlx5; `tests/golden/` has
//! them, and explains their lines.

use super::{Completed, Receiver, Sender, Shape, SharedReceiver, bytes};
use crate::access::Access;
use crate::identity::Identity;
use crate::number::{Lkey, Qkey, Qpn, Rkey, SrqNumber};
use crate::provider::SendCursor;
use crate::provider::mlx5::uidx::UidxAllocator;
use crate::provider::mlx5::wr_ids::{Receives, SharedQp};
use crate::qp::state::QpType;
use crate::sync::Ordering;
use crate::wc::{WcOpcode, WcStatus};
use crate::wr::QpTransport;
use crate::wr::{Address, Destination, Packet, RecvWr, Remote, SendWr, Sge, WindowBinding};
use std::collections::HashMap;
use std::sync::Arc;
use uverbs_uapi::mlx5::cqe::{mlx5_cqe64, mlx5_err_cqe};
use uverbs_uapi::mlx5::wqe::mlx5_av;
use zerocopy::FromBytes;

const FILES: [&str; 3] = [
    include_str!("../../../../tests/golden/mlx5.txt"),
    include_str!("../../../../tests/golden/mlx5-short.txt"),
    include_str!("../../../../tests/golden/mlx5-pyverbs.txt"),
];

/// One section of a recording.
struct Vector {
    kind: &'static str,
    lines: HashMap<&'static str, &'static str>,
}

impl Vector {
    fn all() -> Vec<Vector> {
        let mut all: Vec<Vector> = Vec::new();
        for line in FILES.iter().flat_map(|file| file.lines()) {
            if let Some(kind) = line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
                all.push(Vector { kind, lines: HashMap::new() });
            } else if let (Some((name, value)), Some(last)) =
                (line.split_once(": "), all.last_mut())
            {
                if !line.starts_with('#') {
                    last.lines.insert(name, value);
                }
            }
        }
        all
    }

    fn of(kind: &str) -> Vec<Vector> {
        Vector::all().into_iter().filter(|vector| vector.kind == kind).collect()
    }

    fn line(&self, name: &str) -> &'static str {
        self.lines.get(name).unwrap_or_else(|| panic!("{name} is missing in {:?}", self.lines))
    }

    fn number(&self, name: &str) -> u32 {
        let value = self.line(name);
        match value.strip_prefix("0x") {
            Some(digits) => u32::from_str_radix(digits, 16).unwrap(),
            None => value.parse().unwrap(),
        }
    }

    fn bytes(&self) -> Vec<u8> {
        unhex(self.line("bytes"))
    }
}

fn unhex(digits: &str) -> Vec<u8> {
    assert_eq!(digits.len() % 2, 0);
    (0..digits.len() / 2)
        .map(|at| u8::from_str_radix(&digits[2 * at..2 * at + 2], 16).unwrap())
        .collect()
}

fn be32(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(bytes[at..at + 4].try_into().unwrap())
}

fn be64(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap())
}

/// A request as a user would post it, reconstructed from the recorded WQE.
struct Asked {
    remote: Remote,
    sges: Vec<Sge>,
    inline: Option<Vec<u8>>,
    operands: (u64, u64),
    binding: Option<WindowBinding>,
    destination: Option<(mlx5_av, Qpn, Qkey)>,
    /// The shared receive queue at the far end of an XRC connection.
    srq: Option<SrqNumber>,
    /// Whether the device fills in the checksums of a raw packet.
    checksums: bool,
    /// The bytes of the WQE that are compared.
    length: usize,
}

impl Asked {
    fn new(vector: &Vector) -> Asked {
        let bytes = vector.bytes();
        let mut asked = Asked {
            remote: Remote { addr: 0, rkey: Rkey(0) },
            sges: Vec::new(),
            inline: None,
            operands: (0, 0),
            binding: None,
            destination: None,
            srq: None,
            checksums: false,
            length: bytes.len(),
        };
        let mut at = 16;
        let mut key = 0;
        for segment in vector.line("segments").split(", ") {
            match segment.split(' ').next().unwrap() {
                "raddr_seg" => {
                    asked.remote =
                        Remote { addr: be64(&bytes, at), rkey: Rkey(be32(&bytes, at + 8)) };
                    at += 16;
                }
                "atomic_seg" => {
                    asked.operands = (be64(&bytes, at), be64(&bytes, at + 8));
                    at += 16;
                }
                "data_seg" => {
                    asked.sges.push(Sge {
                        length: be32(&bytes, at),
                        lkey: Lkey(be32(&bytes, at + 4)),
                        addr: be64(&bytes, at + 8),
                    });
                    at += 16;
                }
                "inline" => {
                    let length = (be32(&bytes, at) & 0x7fff_ffff) as usize;
                    asked.inline = Some(bytes[at + 4..at + 4 + length].to_vec());
                    asked.length = at + 4 + length;
                }
                "av" => {
                    let (mut av, _) = mlx5_av::read_from_prefix(&bytes[at..]).unwrap();
                    let qkey = Qkey((av.key.get() >> 32) as u32);
                    let qpn = Qpn(av.dqp_dct.get() & 0xff_ffff);
                    (av.key, av.dqp_dct) = Default::default();
                    asked.destination = Some((av, qpn, qkey));
                    at += 48;
                }
                "xrc_seg" => {
                    asked.srq = Some(SrqNumber(be32(&bytes, at)));
                    at += 16;
                }
                "eth_seg" => {
                    asked.checksums = bytes[at + 4] == 0xc0;
                    assert_eq!(bytes[at + 12..at + 14], [0, 0], "headers that nobody asked for");
                    at += 16;
                }
                "umr_ctrl_seg" => at += 48,
                "mkey_seg" => {
                    key = at;
                    at += 64;
                }
                "klm" if asked.binding.is_none() => {
                    let rights = bytes[key + 2];
                    let mut access = Access::empty();
                    for (bit, right) in [
                        (3, Access::LOCAL_WRITE),
                        (4, Access::REMOTE_READ),
                        (5, Access::REMOTE_WRITE),
                        (6, Access::REMOTE_ATOMIC),
                    ] {
                        access.set(right, rights >> bit & 1 != 0);
                    }
                    let owner = be32(&bytes, key + 4);
                    asked.binding = Some(WindowBinding {
                        qpn: (owner >> 8 != 0xff_ffff).then_some(Qpn(owner >> 8)),
                        addr: be64(&bytes, at + 8),
                        length: be32(&bytes, at).into(),
                        mr_lkey: Lkey(be32(&bytes, at + 4)),
                        old_rkey: Rkey(be32(&bytes, 12)),
                        new_rkey: Rkey(owner & 0xff),
                        access,
                    });
                }
                "klm" => {}
                other => panic!("segment {other}"),
            }
        }
        asked
    }

    fn wr<'a>(&'a self, vector: &Vector) -> SendWr<'a> {
        let bytes = vector.bytes();
        let immediate = be32(&bytes, 12);
        let (sges, remote) = (&self.sges[..], self.remote);
        let wr = match (vector.line("operation"), self.binding) {
            ("SEND", _) if self.checksums => SendWr::packet(Packet::new().ip_checksum(), sges),
            ("SEND", _) => SendWr::send(sges),
            ("SEND_IMM", _) => SendWr::send_imm(sges, immediate),
            ("SEND_INVAL", _) => SendWr::send_inv(sges, Rkey(immediate)),
            ("RDMA_WRITE", _) => SendWr::write(remote, sges),
            ("RDMA_WRITE_IMM", _) => SendWr::write_imm(remote, sges, immediate),
            ("RDMA_READ", _) => SendWr::read(remote, sges),
            ("ATOMIC_CS", _) => {
                SendWr::compare_swap(remote, self.operands.1, self.operands.0, sges)
            }
            ("ATOMIC_FA", _) => SendWr::fetch_add(remote, self.operands.0, sges),
            ("UMR", Some(binding)) => SendWr::bind_mw(binding),
            ("UMR", None) => SendWr::local_inv(Rkey(immediate)),
            (other, _) => panic!("operation {other}"),
        };
        let flags = vector.number("flags");
        let wr = if flags & 0x08 != 0 { wr.signaled() } else { wr };
        let wr = if flags & 0x02 != 0 { wr.solicited() } else { wr };
        let wr = if flags & 0x80 != 0 { wr.fence() } else { wr };
        let wr = match self.srq {
            Some(number) => wr.to_srq(number),
            None => wr,
        };
        match &self.inline {
            Some(data) => wr.inline(data),
            None => wr,
        }
    }
}

#[test]
#[cfg_attr(miri, ignore = "parsing the recorded vectors takes minutes")]
fn requests_are_those_of_libmlx5() {
    let mut compared = HashMap::<_, u32>::new();
    for vector in Vector::of("request") {
        let shape =
            Shape { qpn: vector.number("queue"), wqebbs: 1024, max_post: 64, ..Shape::default() };
        let mut sends = Sender::new(shape);
        let asked = Asked::new(&vector);
        let mut wr = asked.wr(&vector);
        let address;
        if let Some((av, qpn, qkey)) = asked.destination {
            address = Address::Mlx5(av);
            wr = wr.to(Destination { address: &address, qpn, qkey, domain: Identity::default() });
        }
        let at = vector.number("index");
        let mut cursor = sends.ring.begin();
        cursor.at = at;
        let waits = vector.number("flags") & 0x20 != 0;
        if waits {
            sends.ring.fence_up_to(cursor.head);
        }
        let (expected, name) = (vector.bytes(), vector.line("bytes"));
        if vector.line("service") == "raw" {
            sends.ring.transport =
                QpTransport { qp_type: QpType::RAW_PACKET, ..super::transport(&wr) };
            sends.ring.push_checked(&mut cursor, &wr).unwrap();
        } else {
            // The checked path writes the same, 2^16 WQEBBs later.
            let mut further = SendCursor { at: at.wrapping_add(0x1_0000), ..cursor };
            sends.push_checked(&mut further, &wr).unwrap();
            // Undoes the checked push.
            sends.ring.reset();
            if waits {
                sends.ring.fence_up_to(cursor.head);
            }
            assert_eq!(sends.bytes(at, asked.length), expected[..asked.length], "{name}");
            sends.push(&mut cursor, &wr).unwrap();
        }
        assert_eq!(sends.bytes(at, asked.length), expected[..asked.length], "{name}");

        let rung = vector.lines.get("blueflame").or(vector.lines.get("doorbell"));
        if let Some((buffer, written)) = rung.and_then(|rung| rung.split_once(' ')) {
            let buffer = usize::from_str_radix(&buffer[2..], 16).unwrap();
            if buffer > 0 {
                sends.page.register.doorbell(0);
            }
            let written = unhex(written);
            // A recorded doorbell for a WQE that fits BlueFlame means that libmlx5 rang for a
            // batch, and this was its last WQE.
            let batch = vector.lines.contains_key("doorbell") && asked.length <= super::BUFFER;
            sends.ring.ring(&cursor, !batch).unwrap();
            let length = asked.length.min(written.len());
            assert_eq!(sends.page.bytes(buffer, length), written[..length], "{name}");
            let after = sends.page.bytes(buffer + written.len(), 8);
            assert_eq!(after, [0; 8], "more than libmlx5: {name}");
            if expected.len() % 64 == 0 || expected.len() <= 48 {
                assert_eq!(sends.dbrec.get(1), cursor.at & 0xffff);
            }
            let record = u32::from_str_radix(vector.line("record"), 16).unwrap();
            assert_eq!(sends.dbrec.get(1), record, "{name}");
        }
        *compared.entry((vector.line("service"), vector.line("operation"))).or_default() += 1;
    }
    let operations: Vec<_> = compared.keys().map(|(_, operation)| *operation).collect();
    for operation in [
        "SEND",
        "SEND_IMM",
        "SEND_INVAL",
        "RDMA_WRITE",
        "RDMA_WRITE_IMM",
        "RDMA_READ",
        "ATOMIC_CS",
        "ATOMIC_FA",
        "UMR",
    ] {
        assert!(operations.contains(&operation), "no vector of {operation}");
    }
    assert!(compared.get(&("raw", "SEND")).is_some_and(|count| *count >= 7), "{compared:?}");
    assert!(compared.contains_key(&("xrc", "SEND")), "{compared:?}");
    assert!(compared.values().sum::<u32>() >= 62, "{compared:?}");
}

#[test]
#[cfg_attr(miri, ignore = "parsing the recorded vectors takes minutes")]
fn receives_are_those_of_libmlx5() {
    let mut compared = Vec::new();
    for vector in Vector::of("receive") {
        let expected = vector.bytes();
        let stride = vector.number("stride");
        let (to, at) = (vector.line("to"), vector.number("index"));
        let link = if to == "shared" { 16 } else { 0 };
        let sges: Vec<Sge> = expected[link..]
            .chunks_exact(16)
            .map(|segment| Sge {
                length: be32(segment, 0),
                lkey: Lkey(be32(segment, 4)),
                addr: be64(segment, 8),
            })
            .filter(|sge| sge.length > 0)
            .collect();
        let recv = RecvWr::new(&sges).id(1);
        let found = match to {
            "pair" | "raw" => {
                let receiver = Receiver::new(512, stride);
                let mut cursor = receiver.ring.begin();
                cursor.at = at;
                receiver.push(&mut cursor, &recv).unwrap();
                let segment = at * stride / 16;
                bytes(&receiver.device, segment, expected.len())
            }
            _ => {
                let mut shared = SharedReceiver::new(512, stride);
                let mut cursor = shared.ring.begin();
                cursor.at = at;
                shared.push(&mut cursor, &recv).unwrap();
                bytes(&shared.device, at * stride / 16, expected.len())
            }
        };
        assert_eq!(found, expected, "{to} of {stride} bytes");
        compared.push(to);
    }
    for to in ["pair", "shared", "raw"] {
        assert!(compared.contains(&to), "{compared:?}");
    }
}

#[test]
fn arming_is_that_of_libmlx5() {
    let vectors = Vector::of("arm");
    assert!(vectors.len() >= 4);
    for vector in vectors {
        let (offset, word) = vector.line("doorbell").split_once(' ').unwrap();
        assert_eq!(offset, "0x20");
        let record = unhex(vector.line("record"));
        let mut completed = Completed::new(16, 64);
        let armed = be32(&record, 4);
        completed.ring.pretend(vector.number("queue"), armed & 0xff_ffff);
        completed.ring.arm(armed >> 24 & 1 != 0, armed & 3 << 28);
        assert_eq!(completed.page.bytes(0, 8), unhex(word));
        assert_eq!(completed.device.dbrec.get(1), armed);
    }
}

/// A queue pair with the user index of a completion.
fn member(uidx: u32, kind: WcOpcode) -> Arc<SharedQp> {
    let indices = UidxAllocator::new();
    let mut taken = indices.take().unwrap();
    let mut held = Vec::new();
    while taken.get() != uidx {
        held.push(taken);
        taken = indices.take().unwrap();
    }
    let qp = SharedQp::new(7, taken, Some(0x1_0000), Receives::Own(0x1_0000));
    for at in 0..0x1_0000 {
        qp.sends.entries().at(at).set(u64::from(at), at + 1, kind.0);
        let entries = qp.receives.own.entries();
        entries.at(at).store(u64::from(at) + 0x1_0000, Ordering::Relaxed);
    }
    qp
}

#[test]
#[cfg_attr(miri, ignore = "parsing the recorded vectors takes minutes")]
fn completions_are_understood() {
    let (mut seen, mut brought) = (Vec::new(), Vec::new());
    for vector in Vector::of("completion") {
        let bytes = vector.bytes();
        let long = bytes.len() == 128;
        let core: [u8; 64] = bytes[bytes.len() - 64..].try_into().unwrap();
        let Ok(cqe) = mlx5_cqe64::read_from_bytes(&core) else { unreachable!("64 bytes") };
        let Ok(error) = mlx5_err_cqe::read_from_bytes(&core) else { unreachable!("64 bytes") };
        // libmlx5 gives a queue pair the user index zero until another one has it.
        let uidx = cqe.srqn.get() & 0xff_ffff;
        let mut completed = Completed::new(4, bytes.len());
        let qp = member(uidx.max(1), WcOpcode::READ);
        completed.ring.registry().attach(&qp);
        let mut own = core;
        own[32..36].copy_from_slice(&uidx.max(1).to_be_bytes());
        if long {
            completed.device.segments.copy(0, 0, &bytes[..64]);
        }
        completed.write(own);
        let wc = completed.next().unwrap();
        let opcode = cqe.op_own >> 4;
        let counter = u64::from(cqe.wqe_counter.get());
        let receive = matches!(opcode, 1..=4 | 14);
        assert_eq!(wc.wr_id, if receive { counter + 0x1_0000 } else { counter });
        assert_eq!(wc.qpn(), cqe.sop_drop_qpn.get() & 0xff_ffff);
        if opcode < 13 {
            assert_eq!(wc.status(), WcStatus::SUCCESS);
            assert_eq!(wc.byte_len(), cqe.byte_cnt.get());
            assert_eq!(wc.opcode().is_recv(), receive);
            assert_eq!(wc.imm().is_some(), matches!(opcode, 1 | 3));
            assert_eq!(wc.invalidated_rkey().is_some(), opcode == 4);
            // libmlx5 finds inline data from the first byte of the last 64 on, or before them.
            let length = cqe.byte_cnt.get() as usize;
            let data = match cqe.op_own & 0xc {
                4 => Some(&core[..length]),
                8 => Some(&bytes[..length]),
                _ => None,
            };
            assert_eq!(wc.scattered().as_deref(), data);
            if data.is_some() {
                brought.push((long, receive));
            }
        } else {
            assert_ne!(wc.status(), WcStatus::SUCCESS);
            assert_ne!(wc.status(), WcStatus::GENERAL_ERR, "syndrome {:#x}", error.syndrome);
            assert_eq!(wc.vendor_err(), error.vendor_err_synd.into());
        }
        seen.push(opcode);
    }
    for opcode in [0, 1, 2, 3, 4, 13, 14] {
        assert!(seen.contains(&opcode), "no vector with opcode {opcode}: {seen:?}");
    }
    for form in [(false, true), (false, false), (true, true), (true, false)] {
        assert!(brought.contains(&form), "no data with (long completion, received): {form:?}");
    }
}
