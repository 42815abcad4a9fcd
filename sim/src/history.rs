//! The events of a fabric, as text: calls, requests, messages that went wrong, completions.
//!
//! Devices record their work (`uverbs_connectx::recording`), and the kernel records its calls. Each line has the time,
//! the device, and the object by its number there. Addresses are offsets in regions, so that the histories of two runs
//! of one seed compare.

use crate::seeds::Prints;
use rustix::io::Errno;
use std::collections::VecDeque;
use std::fmt::{self, Write as _};
use std::io::{self, Write};
use std::sync::{Arc, Mutex, PoisonError};
use uverbs_connectx::format::segments::{opcode_name, receive_segments, segments};
use uverbs_connectx::format::wqe::CtrlSegment;
use uverbs_connectx::recording::{
    Entry, PacketFate, Recorder, Refusal, RqType, TimedEntry, operation, parse_entry,
};
use uverbs_uapi::mlx5::cqe::{mlx5_cqe_opcode, mlx5_cqe_syndrome};

/// The most lines of a history. Older ones are forgotten.
const MOST: usize = 1 << 20;

/// The entries of all devices, in order: the device's number, and an entry's bytes.
type Entries = Arc<Mutex<Vec<(usize, Vec<u8>)>>>;

/// A device's way to the entries. Each entry is written at once.
struct Writer {
    device: usize,
    entries: Entries,
}

impl io::Write for Writer {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        entries.push((self.device, bytes.to_vec()));
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A history that is recorded.
#[derive(Debug, Default)]
pub(crate) struct History {
    entries: Entries,
    lines: VecDeque<String>,
    forgotten: u64,
    prints: Prints,
}

/// Finds the offset of a request's memory in the region with this key, on this device or on any.
pub(crate) type Offsets<'k> = dyn Fn(Option<usize>, u32, u64) -> Option<u64> + 'k;

impl History {
    pub(crate) fn new(prints: Prints) -> History {
        History { prints, ..History::default() }
    }

    /// Prints the history on standard error, if it is to be printed now.
    pub(crate) fn print(&self) {
        if self.prints.now() {
            let _ = io::stderr().write_all(self.text().as_bytes());
        }
    }

    /// A recorder for a device.
    pub(crate) fn recorder(&self, device: usize) -> Recorder {
        let writer = Writer { device, entries: self.entries.clone() };
        // Writing to memory does not fail.
        Recorder::new(writer, device as u32).unwrap_or_default()
    }

    /// The entries that the devices have recorded since the last call.
    pub(crate) fn take_entries(&self) -> Vec<(usize, TimedEntry)> {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        let parsed = entries.drain(..).filter_map(|(device, bytes)| {
            let entry = parse_entry(&bytes)?;
            Some((device, entry))
        });
        parsed.collect()
    }

    /// Adds a line.
    pub(crate) fn add(&mut self, now: u64, device: &str, line: fmt::Arguments<'_>) {
        if self.lines.len() == MOST {
            self.lines.pop_front();
            self.forgotten += 1;
        }
        let microseconds = now as f64 / 1e3;
        self.lines.push_back(format!("{microseconds:14.3} µs {device}: {line}"));
    }

    /// Adds the line of a call.
    pub(crate) fn add_call(
        &mut self,
        now: u64,
        device: &str,
        call: fmt::Arguments<'_>,
        answer: Result<(), Errno>,
    ) {
        match answer {
            Ok(()) => self.add(now, device, format_args!("{call}")),
            Err(errno) => self.add(now, device, format_args!("{call} fails: {errno}")),
        }
    }

    /// The lines so far.
    pub(crate) fn text(&self) -> String {
        let mut text = String::new();
        if self.forgotten > 0 {
            // Writing to a string does not fail.
            let _ = writeln!(text, "({} older lines are forgotten)", self.forgotten);
        }
        for line in &self.lines {
            text.push_str(line);
            text.push('\n');
        }
        text
    }
}

/// Describes an entry of a device; `None` for one that is no part of a history.
pub(crate) fn describe(
    device: usize,
    entry: &Entry<Vec<u8>>,
    offsets: &Offsets<'_>,
) -> Option<String> {
    // The address of other memory is one of the process, which the next run does not repeat.
    let memory = |on: Option<usize>, key: u32, address: u64| match offsets(on, key, address) {
        Some(offset) => format!("mr {key:#x}+{offset:#x}"),
        None => format!("key {key:#x}"),
    };
    Some(match entry {
        Entry::Wqe { service, index, number, bytes, .. } => {
            let control = CtrlSegment::parse(bytes.first_chunk()?);
            let mut text = format!("qp {number:#x} send {index}: {}", opcode_name(control.opcode));
            for (name, segment) in segments(*service, bytes) {
                let part = match name {
                    "mlx5_wqe_raddr_seg" => {
                        let place = memory(None, be32(segment, 8), be64(segment, 0));
                        format!(" at the peer's {place}")
                    }
                    "mlx5_av" => format!(" to qp {:#x}", be32(segment, 8) & 0xff_ffff),
                    "mlx5_wqe_data_seg" => format!(
                        ", {} bytes of {}",
                        be32(segment, 0),
                        memory(Some(device), be32(segment, 4), be64(segment, 8))
                    ),
                    "mlx5_wqe_inline_seg" => {
                        format!(", {} bytes inline", be32(segment, 0) & 0x7fff_ffff)
                    }
                    _ => continue,
                };
                text.push_str(&part);
            }
            if control.signaled() {
                text.push_str(", signaled");
            }
            text
        }
        Entry::ReceiveWqe { rq_type, linked, index, number, bytes } => {
            let kind = match rq_type {
                RqType::Qp => "qp",
                RqType::Srq => "srq",
                RqType::Rq => "rq",
            };
            let mut text = format!("{kind} {number:#x} receive {index}");
            for (name, segment) in receive_segments(*linked, bytes) {
                let length = be32(segment, 0);
                if name == "mlx5_wqe_data_seg" && length > 0 {
                    let place = memory(Some(device), be32(segment, 4), be64(segment, 8));
                    let _ = write!(text, ", {length} bytes at {place}");
                }
            }
            text
        }
        Entry::Cqe { number, index, bytes } => {
            let cqe = bytes.get(bytes.len().checked_sub(64)?..)?;
            let code = mlx5_cqe_opcode(cqe.last()? >> 4);
            let (qpn, counter) = (be32(cqe, 56) & 0xff_ffff, be32(cqe, 60) >> 16);
            let what = match code {
                mlx5_cqe_opcode::MLX5_CQE_REQ => format!("send {counter} is done"),
                mlx5_cqe_opcode::MLX5_CQE_REQ_ERR | mlx5_cqe_opcode::MLX5_CQE_RESP_ERR => {
                    let syndrome = mlx5_cqe_syndrome(cqe[55]);
                    let name = syndrome.name().unwrap_or("unknown");
                    let name = name.trim_start_matches("MLX5_CQE_SYNDROME_");
                    let side =
                        if code == mlx5_cqe_opcode::MLX5_CQE_REQ_ERR { "send" } else { "receive" };
                    format!("{side} {counter} failed: {name}")
                }
                _ => format!("receive {counter} has {} bytes", be32(cqe, 44)),
            };
            format!("cq {number:#x} entry {index}: qp {qpn:#x} {what}")
        }
        Entry::Fate { number, late: None } => format!("qp {number:#x}: the message is lost"),
        Entry::Fate { number, late: Some(late) } => {
            format!("qp {number:#x}: the message is late by {} µs", *late as f64 / 1e3)
        }
        Entry::Packet { number, to, psn, opcode, fate } => {
            let fate = match fate {
                PacketFate::Dropped => "is dropped by a full queue",
                PacketFate::Lost => "is lost",
                PacketFate::Damaged => "is damaged",
                PacketFate::Doubled => "arrives twice",
                PacketFate::Late => "is late",
                PacketFate::Marked => "is marked",
            };
            let operation = operation(*opcode);
            format!("qp {number:#x}: {operation} {psn} to qp {to:#x} {fate}")
        }
        Entry::Refusal { number, why } => {
            let why = match why {
                Refusal::Lost => "no answer",
                Refusal::RnrNak => "the receiver is not ready",
                Refusal::InvalidRequest => "NAK, invalid request",
                Refusal::AccessError => "NAK, remote access error",
                Refusal::OperationError => "NAK, remote operational error",
            };
            format!("qp {number:#x}: {why}")
        }
        Entry::Command { .. }
        | Entry::CommandOutput { .. }
        | Entry::Write { .. }
        | Entry::DoorbellRecord { .. }
        | Entry::Eqe { .. }
        | Entry::Reset => return None,
    })
}

/// A word of four bytes; 0 beyond the end.
fn be32(bytes: &[u8], at: usize) -> u32 {
    let word = bytes.get(at..).and_then(|rest| rest.first_chunk());
    word.map_or(0, |word| u32::from_be_bytes(*word))
}

/// A word of eight bytes; 0 beyond the end.
fn be64(bytes: &[u8], at: usize) -> u64 {
    u64::from(be32(bytes, at)) << 32 | u64::from(be32(bytes, at + 4))
}
