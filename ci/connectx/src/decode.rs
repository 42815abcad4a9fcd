//! Prints recordings: `connectx decode FILE`.
//!
//! Pairs with [`uverbs_connectx::recording`]. Field names are those of the kernel's headers, from
//! `uverbs-uapi`. A field that is zero is not printed.

use std::fmt::Write as _;
use std::io::{self, Read, Write};

use uverbs_uapi::mlx5::cqe::{mlx5_cqe_opcode, mlx5_cqe_syndrome};
use uverbs_uapi::mlx5::prm::{Info, LAYOUTS, opcode};
use uverbs_uapi::reflection;

use uverbs_connectx::bar0;
use uverbs_connectx::format::event;
use uverbs_connectx::format::segments::{opcode_name, receive_segments, segments, service_name};
use uverbs_connectx::format::wqe::CtrlSegment;
use uverbs_connectx::recording::{DoorbellCounter, Entry, Recording, RqType, operation};

/// Prints a whole recording.
///
/// # Errors
/// An error of reading or writing, or `InvalidData` for a file that is no recording.
pub fn print(from: impl Read, to: &mut impl Write) -> io::Result<()> {
    let mut recording = Recording::new(from)?;
    writeln!(to, "function {}", recording.function)?;
    let mut running = [0u16; 32];
    while let Some((time, entry)) = recording.next_entry()? {
        let text = describe(&entry, &mut running);
        write!(to, "{:12.6} {text}", time as f64 / 1e9)?;
    }
    Ok(())
}

/// Describes one entry. `running` holds the opcode of the command in each slot, for its output.
fn describe(entry: &Entry<Vec<u8>>, running: &mut [u16; 32]) -> String {
    let mut text = String::new();
    // Writing to a string does not fail.
    let _ = match entry {
        Entry::Command { slot, input } => {
            let half = |at: usize| {
                input.get(at..at + 2).map_or(0, |bytes| u16::from_be_bytes([bytes[0], bytes[1]]))
            };
            if let Some(opcode) = running.get_mut(usize::from(*slot)) {
                *opcode = half(0);
            }
            let name = opcode::name(half(0)).unwrap_or("unknown");
            let _ = writeln!(text, "command {slot} {name} ({:#x}) {} bytes", half(0), input.len());
            fields(&mut text, half(0), "in", input);
            Ok(())
        }
        Entry::CommandOutput { slot, delivery, output } => {
            let opcode = running.get(usize::from(*slot)).copied().unwrap_or(0);
            let name = opcode::name(opcode).unwrap_or("unknown");
            let status = output.first().copied().unwrap_or(0);
            let how = match (delivery, status) {
                (0, 0) => "done".into(),
                (0, status) => {
                    let syndrome = output.get(4..8).map_or_else(String::new, hex);
                    format!("status {status:#x} syndrome {syndrome}")
                }
                (delivery, _) => format!("delivery status {delivery:#x}"),
            };
            let _ = writeln!(text, "answer {slot} {name} {how}");
            if (*delivery, status) == (0, 0) {
                fields(&mut text, opcode, "out", output);
            }
            Ok(())
        }
        Entry::Write { offset, bytes } => {
            writeln!(text, "write {offset:#x} {} {}", hex(bytes), register(*offset, bytes))
        }
        Entry::DoorbellRecord { counter, number, value } => {
            let name = match counter {
                DoorbellCounter::Sq => "sends of QP or SQ",
                DoorbellCounter::QpRq => "receives of QP",
                DoorbellCounter::Srq => "receives of SRQ",
                DoorbellCounter::Rq => "receives of RQ",
                DoorbellCounter::CqConsumer => "consumer of CQ",
                DoorbellCounter::CqArm => "arm word of CQ",
            };
            writeln!(text, "record {name} {number:#x}: {value:#x}")
        }
        Entry::Wqe { service, blue_flame, index, number, bytes } => {
            let from = if *blue_flame { "BlueFlame" } else { "ring" };
            let control = bytes.first_chunk::<16>().map(CtrlSegment::parse);
            let opcode = control.map_or(0, |control| control.opcode);
            let (name, kind) = (opcode_name(opcode), service_name(*service));
            let _ =
                writeln!(text, "request {name} of {kind} {number:#x} at {index:#x} from {from}");
            for (layout, bytes) in segments(*service, bytes) {
                segment(&mut text, layout, bytes);
            }
            Ok(())
        }
        Entry::ReceiveWqe { rq_type, linked, index, number, bytes } => {
            let kind = match rq_type {
                RqType::Qp => "QP",
                RqType::Srq => "SRQ",
                RqType::Rq => "RQ",
            };
            let _ = writeln!(text, "receive of {kind} {number:#x} at {index:#x}");
            for (layout, bytes) in receive_segments(*linked, bytes) {
                segment(&mut text, layout, bytes);
            }
            Ok(())
        }
        Entry::Cqe { number, index, bytes } => {
            let cqe = bytes.get(bytes.len().saturating_sub(64)..).unwrap_or_default();
            let last = cqe.last().copied().unwrap_or(0);
            let code = mlx5_cqe_opcode(last >> 4);
            let _ = write!(text, "completion {code:?} of CQ {number:#x} at {index:#x}");
            let failed = matches!(
                code,
                mlx5_cqe_opcode::MLX5_CQE_REQ_ERR | mlx5_cqe_opcode::MLX5_CQE_RESP_ERR
            );
            if failed {
                let syndrome = mlx5_cqe_syndrome(cqe.get(55).copied().unwrap_or(0));
                let _ = write!(text, ": {syndrome:?}");
            }
            text.push('\n');
            segment(&mut text, if failed { "mlx5_err_cqe" } else { "mlx5_cqe64" }, cqe);
            if bytes.len() > 64 {
                let _ = writeln!(text, "{INDENT}inl_grh {}", hex(&bytes[..64]));
            }
            Ok(())
        }
        Entry::Eqe { number, index, bytes } => {
            let kind = bytes.get(1).copied().unwrap_or(0);
            let data = bytes.get(32..60).map_or_else(String::new, hex);
            let name = event_name(kind);
            writeln!(text, "event {name} ({kind:#x}) of EQ {number} at {index:#x}: {data}")
        }
        Entry::Reset => writeln!(text, "reset"),
        Entry::Fate { number, late: None } => writeln!(text, "message of {number:#x} is lost"),
        Entry::Fate { number, late: Some(late) } => {
            writeln!(text, "message of {number:#x} is late by {late} ns")
        }
        Entry::Refusal { number, why } => {
            writeln!(text, "message of {number:#x} is not acknowledged: {why:?}")
        }
        Entry::Packet { number, to, psn, opcode, fate } => {
            let operation = operation(*opcode);
            writeln!(text, "{operation} {psn} of {number:#x} to {to:#x}: {fate:?}")
        }
    };
    text
}

/// Indentation of the fields of an entry.
const INDENT: &str = "                 ";

/// Bytes as hexadecimal digits.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

fn event_name(kind: u8) -> &'static str {
    match kind {
        event::COMPLETION => "COMPLETION",
        event::CQ_ERROR => "CQ_ERROR",
        event::WQ_CATASTROPHIC => "WQ_CATASTROPHIC",
        event::PORT_CHANGE => "PORT_CHANGE",
        event::COMMAND => "COMMAND",
        event::WQ_INVALID_REQUEST => "WQ_INVALID_REQUEST",
        event::WQ_ACCESS_ERROR => "WQ_ACCESS_ERROR",
        event::LAST_WQE_REACHED => "LAST_WQE_REACHED",
        event::SRQ_LIMIT => "SRQ_LIMIT",
        _ => "unknown",
    }
}

/// Describes a write to BAR0.
fn register(offset: u64, bytes: &[u8]) -> String {
    let word = |at: usize| {
        bytes.get(at..at + 4).map_or(0, |b| u32::from_be_bytes([b[0], b[1], b[2], b[3]]))
    };
    let page = offset / bar0::PAGE;
    if offset >= bar0::VAR_OFFSET {
        return "VAR page".into();
    }
    if page < u64::from(*bar0::UARS.start()) {
        return match offset {
            0x10 | 0x14 => "address of the command queue".into(),
            0x18 => format!("command doorbell {:#x}", word(0)),
            _ => String::new(),
        };
    }
    match offset % bar0::PAGE {
        0x20 => format!(
            "UAR {page}: arm CQ {:#x} for {} completions, serial {}, consumer {:#x}",
            word(4) & 0xff_ffff,
            if word(0) >> 24 & 1 != 0 { "solicited" } else { "all" },
            word(0) >> 28 & 3,
            word(0) & 0xff_ffff
        ),
        0x40 => {
            format!("UAR {page}: arm EQ {}, consumer {:#x}", word(0) >> 24, word(0) & 0xff_ffff)
        }
        0x48 => format!("UAR {page}: EQ {}, consumer {:#x}", word(0) >> 24, word(0) & 0xff_ffff),
        at @ 0x800.. if at % 0x100 == 0 => format!(
            "UAR {page} register {}: doorbell of {:#x} at {:#x}",
            (at - 0x800) / 0x200,
            word(4) >> 8,
            word(0) >> 8 & 0xffff
        ),
        at @ 0x800.. => {
            format!("UAR {page} register {}: byte {}", (at - 0x800) / 0x200, at % 0x100)
        }
        _ => format!("UAR {page}"),
    }
}

/// Prints the fields of a command that are not zero.
fn fields(text: &mut String, op: u16, way: &str, bytes: &[u8]) {
    let name = opcode::name(op).unwrap_or_default();
    let own = format!("{}_{way}", name.to_lowercase());
    // All QP transitions have the layout of the first.
    let shared = format!("rst2init_qp_{way}");
    let found = layout(&own).or_else(|| name.ends_with("_QP").then(|| layout(&shared)).flatten());
    match found {
        Some(info) => layout_fields(text, info, "", bytes),
        None if bytes.len() > 16 => {
            let _ = writeln!(text, "{INDENT}{}", hex(bytes));
        }
        None => {}
    }
}

fn layout(name: &str) -> Option<&'static Info> {
    LAYOUTS.iter().copied().flatten().find(|info| info.name == name)
}

fn layout_fields(text: &mut String, info: &Info, prefix: &str, bytes: &[u8]) {
    for field in info.fields {
        if matches!(field.name, "opcode" | "status" | "syndrome") {
            continue;
        }
        let start = field.bit / 8;
        let part = match field.width {
            0 => bytes.get(start..),
            width => bytes.get(start..(start + width.div_ceil(8)).min(bytes.len())),
        };
        let part = part.unwrap_or_default();
        let name = format!("{prefix}{}", field.name);
        if let Some(inner) = field.layout.and_then(layout) {
            layout_fields(text, inner, &format!("{name}."), part);
            continue;
        }
        let value = match field.width {
            1..=64 => match number(bytes, field.bit, field.width) {
                0 => continue,
                value => format!("{value:#x}"),
            },
            _ if part.iter().all(|byte| *byte == 0) => continue,
            _ => hex(part),
        };
        let _ = writeln!(text, "{INDENT}{name} {value}");
    }
}

/// `width` bits from bit `bit` on; bits past the end are zero.
fn number(bytes: &[u8], bit: usize, width: usize) -> u64 {
    (bit..bit + width).fold(0, |value, bit| {
        let byte = bytes.get(bit / 8).copied().unwrap_or(0);
        value << 1 | u64::from(byte >> (7 - bit % 8) & 1)
    })
}

/// Prints the fields of a segment that are not zero.
fn segment(text: &mut String, name: &str, bytes: &[u8]) {
    let _ = write!(text, "{INDENT}{}", name.trim_start_matches("mlx5_").trim_start_matches("wqe_"));
    let described = reflection::layouts().find(|layout| layout.name == name);
    let mut end = 0;
    for field in described.map_or(&[][..], |layout| layout.fields) {
        end = field.offset + field.size;
        let Some(part) = bytes.get(field.offset..end) else { break };
        let zero = part.iter().all(|byte| *byte == 0);
        if zero || field.name.starts_with("rsvd") || field.name.starts_with("reserved") {
            continue;
        }
        let value = match part.len() {
            1 | 2 | 4 | 8 => format!("{:#x}", number(part, 0, part.len() * 8)),
            _ => hex(part),
        };
        let _ = write!(text, " {} {value}", field.name);
    }
    if let Some(rest) = bytes.get(end..).filter(|rest| !rest.is_empty()) {
        let _ = write!(text, " {}", hex(rest));
    }
    text.push('\n');
}

#[cfg(test)]
mod tests {
    use super::*;
    use uverbs_connectx::format::wqe::op;
    use uverbs_connectx::recording::{MemoryFile, Recorder};

    fn words(entries: &[Entry<&[u8]>]) -> String {
        let file = MemoryFile::default();
        let mut recorder = Recorder::new(file.clone(), 3).unwrap();
        for entry in entries {
            recorder.add(1_500_000_000, entry);
        }
        let mut text = Vec::new();
        print(&file.bytes()[..], &mut text).unwrap();
        String::from_utf8(text).unwrap()
    }

    #[test]
    fn a_command_is_printed_with_its_field_names() {
        let mut input = [0; 64];
        input[..2].copy_from_slice(&opcode::CREATE_CQ.to_be_bytes());
        // log_cq_size, bits 3 to 7 of the twelfth byte of the context.
        input[16 + 12] = 9;
        let text = words(&[
            Entry::Command { slot: 2, input: &input },
            Entry::CommandOutput {
                slot: 2,
                delivery: 0,
                output: &[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4, 5],
            },
            Entry::CommandOutput { slot: 2, delivery: 0, output: &[3, 0, 0, 0, 0, 1, 2, 3] },
        ]);
        assert!(text.starts_with("function 3\n    1.500000 command 2 CREATE_CQ (0x400)"), "{text}");
        assert!(text.contains(" cq_context.log_cq_size 0x9\n"), "{text}");
        assert!(text.contains(" answer 2 CREATE_CQ done\n"), "{text}");
        assert!(text.contains(" cqn 0x405\n"), "{text}");
        assert!(text.contains(" status 0x3 syndrome 00010203\n"), "{text}");
    }

    #[test]
    fn a_wqe_is_split_into_the_segments_of_its_opcode() {
        let names = |service, opcode, units: u8, first: u8| {
            let mut bytes = [0; 256];
            bytes[3] = opcode;
            bytes[7] = units;
            bytes[16] = first;
            let list = segments(service, &bytes);
            let len: usize = list.iter().map(|(_, bytes)| bytes.len()).sum();
            assert_eq!(len, usize::from(units) * 16);
            list.iter().map(|(name, _)| name.trim_start_matches("mlx5_")).collect::<Vec<_>>()
        };
        assert_eq!(names(0, op::SEND, 2, 0), ["wqe_ctrl_seg", "wqe_data_seg"]);
        assert_eq!(names(0, op::SEND, 2, 0x80), ["wqe_ctrl_seg", "wqe_inline_seg"]);
        assert_eq!(names(2, op::SEND, 5, 0), ["wqe_ctrl_seg", "av", "wqe_data_seg"]);
        let xrc = ["wqe_ctrl_seg", "wqe_xrc_seg", "wqe_raddr_seg", "wqe_data_seg"];
        assert_eq!(names(3, op::RDMA_WRITE, 4, 0), xrc);
        let atomic = ["wqe_ctrl_seg", "wqe_raddr_seg", "wqe_atomic_seg", "wqe_data_seg"];
        assert_eq!(names(0, op::ATOMIC_FA, 4, 0), atomic);
        let umr = ["wqe_ctrl_seg", "wqe_umr_ctrl_seg", "mkey_seg", "klm", "klm"];
        assert_eq!(names(0xc, op::UMR, 10, 0x80), umr);
        // Truncated, as a hostile driver may leave it.
        assert_eq!(names(2, op::SEND, 2, 0), ["wqe_ctrl_seg", "av"]);
        assert!(segments(0, &[0; 8]).is_empty());
    }

    #[test]
    fn wqes_cqes_and_doorbells_are_printed_by_name() {
        let mut wqe = [0; 64];
        wqe[..8].copy_from_slice(&[0, 0, 7, 0x08, 0, 0, 0x42, 3]);
        wqe[16..24].copy_from_slice(&0x1234_5678u64.to_be_bytes());
        wqe[35] = 100;
        let mut cqe = [0; 64];
        cqe[55] = 0x13;
        cqe[63] = 0xd0;
        let text = words(&[
            Entry::Write { offset: 20 * bar0::PAGE + 0x900, bytes: &wqe[..8] },
            Entry::Wqe { service: 0, blue_flame: true, index: 7, number: 0x42, bytes: &wqe },
            Entry::Cqe { number: 0x405, index: 1, bytes: &cqe },
        ]);
        assert!(text.contains("UAR 20 register 0: doorbell of 0x42 at 0x7"), "{text}");
        assert!(text.contains("request RDMA_WRITE of rc 0x42 at 0x7 from BlueFlame"), "{text}");
        assert!(text.contains("raddr_seg raddr 0x12345678\n"), "{text}");
        assert!(text.contains("data_seg byte_count 0x64\n"), "{text}");
        assert!(text.contains(": MLX5_CQE_SYNDROME_REMOTE_ACCESS_ERR\n"), "{text}");
        assert!(text.contains("err_cqe syndrome 0x13 op_own 0xd0\n"), "{text}");
    }
}
