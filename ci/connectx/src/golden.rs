//! Makes test vectors from recordings: one of each kind of WQE, CQE and doorbell of user-space
//! queues.
//!
//! Pairs with [`uverbs_connectx::recording`], and with the tests of encoders for the same formats. Only
//! queues of user contexts count. The text has sections of lines `name: value`. Bytes are
//! hexadecimal digits in the order of memory or of the register. Lines that begin with `#` are
//! comments.
//!
//! - `[request]`: a WQE with the service and number of its queue, its index, its segments, the
//!   doorbell record after it was posted, and the doorbell: `doorbell` (which of the register's two
//!   buffers, eight bytes) or `blueflame` (the buffer, and all bytes of the copy). Record and
//!   doorbell are left out if the next WQE was posted before the device read this one. Bytes after
//!   the end of inline data are older content of the queue.
//! - `[receive]`: a receive WQE with the same lines, up to the segment that ends its list.
//! - `[completion]`: a CQE, with the service of the queue pair.
//! - `[arm]`: a CQ doorbell, and both words of the doorbell record after it.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};

use uverbs_uapi::mlx5::prm::Bits;
use uverbs_uapi::mlx5::prm::cqc::create_cq_out;
use uverbs_uapi::mlx5::prm::object::create_uctx_out;
use uverbs_uapi::mlx5::prm::opcode;
use uverbs_uapi::mlx5::prm::qpc::{create_qp_in, create_qp_out, qpc};
use uverbs_uapi::mlx5::prm::rqc::{create_rq_out, create_sq_out};
use uverbs_uapi::mlx5::prm::srqc::{create_rmp_out, create_xrc_srq_out};

use crate::decode::hex;
use uverbs_connectx::bar0;
use uverbs_connectx::format::segments::{opcode_name, receive_segments, segments, service_name};
use uverbs_connectx::format::wqe::CtrlSegment;
use uverbs_connectx::recording::{DoorbellCounter, Entry, Recording, RqType, SERVICE_RAW_SQ};

/// Writes to one buffer of a register, from its first byte on.
struct RegisterWrites {
    /// Position of the first write in the recording.
    position: usize,
    offset: u64,
    bytes: Vec<u8>,
}

/// Doorbells and BlueFlame copies by the first eight bytes of their WQE.
type WritesByWqe = BTreeMap<[u8; 8], Vec<RegisterWrites>>;

/// A queue of a user context.
#[derive(Clone, Copy)]
struct OwnedQueue {
    /// The user context, numbered in the order of creation.
    program: usize,
    /// Service type of a queue pair.
    service: u8,
}

/// The state of a function at a position of its recording.
#[derive(Default)]
struct FunctionState {
    /// Input of the command in each slot.
    commands: BTreeMap<u8, Vec<u8>>,
    /// User contexts by uid, numbered in the order of creation.
    programs: BTreeMap<u16, usize>,
    qps: BTreeMap<u32, OwnedQueue>,
    srqs: BTreeMap<u32, OwnedQueue>,
    /// Raw send queues and raw receive queues.
    raw_queues: [BTreeMap<u32, OwnedQueue>; 2],
    cqs: BTreeMap<u32, OwnedQueue>,
    doorbell_records: BTreeMap<(DoorbellCounter, u32), u32>,
    doorbells: WritesByWqe,
    /// A CQ doorbell whose doorbell record has not been seen yet.
    armed: Option<[u8; 8]>,
    /// The number of user contexts that programs have created.
    count: usize,
    driver_has_context: bool,
}

/// The test vectors by their distinguishing feature, each with the program that made it.
#[derive(Default)]
pub struct TestVectors {
    found: BTreeMap<String, (usize, Vec<String>)>,
    programs: usize,
}

impl TestVectors {
    /// Adds the vectors of a recording. Each program opens the device once, and programs run one
    /// after the other, so the first user context belongs to the first program.
    ///
    /// # Errors
    /// An error of reading, or `InvalidData` for a file that is no recording.
    pub fn add(&mut self, from: impl Read) -> io::Result<()> {
        let mut recording = Recording::new(from)?;
        let mut entries = Vec::new();
        while let Some((_, entry)) = recording.next_entry()? {
            entries.push(entry);
        }
        // A copy may end after the device has read the WQE.
        let mut state = FunctionState { doorbells: writes(&entries), ..FunctionState::default() };
        for (position, entry) in entries.into_iter().enumerate() {
            self.add_entry(&mut state, position, entry);
        }
        self.programs = self.programs.max(state.count);
        Ok(())
    }

    /// Prints the vectors, each below the name of the first program that made it.
    ///
    /// # Errors
    /// `InvalidInput` if the number of programs differs from the number of names, or an error of
    /// writing.
    pub fn print(&self, by: &[String], to: &mut impl Write) -> io::Result<()> {
        if by.len() != self.programs {
            let why = format!("{} programs opened the device, not {}", self.programs, by.len());
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        for (program, name) in by.iter().enumerate() {
            let mut own = self.found.values().filter(|(its, _)| *its == program).peekable();
            // Earlier programs made all vectors of this one.
            if own.peek().is_none() {
                continue;
            }
            writeln!(to, "# {name}\n")?;
            for (_, lines) in own {
                for line in lines {
                    writeln!(to, "{line}")?;
                }
                writeln!(to)?;
            }
        }
        Ok(())
    }

    fn keep(&mut self, key: String, owner: OwnedQueue, lines: Vec<String>) {
        self.found.entry(key).or_insert((owner.program, lines));
    }

    fn add_entry(&mut self, state: &mut FunctionState, position: usize, entry: Entry<Vec<u8>>) {
        match entry {
            Entry::Command { slot, input } => {
                state.commands.insert(slot, input);
            }
            Entry::CommandOutput { slot, output, .. } => {
                if let Some(input) = state.commands.remove(&slot)
                    && output.first() == Some(&0)
                {
                    state.add_queue(&input, &output);
                }
            }
            Entry::Write { offset, bytes } => {
                if offset % bar0::PAGE == ARM
                    && page(offset).is_some()
                    && let Ok(doorbell) = bytes[..].try_into()
                {
                    state.armed = Some(doorbell);
                }
            }
            Entry::DoorbellRecord { counter, number, value } => {
                state.doorbell_records.insert((counter, number), value);
            }
            Entry::Wqe { service, number, index, bytes, .. } => {
                let queues =
                    if service == SERVICE_RAW_SQ { &state.raw_queues[0] } else { &state.qps };
                if let Some(owner) = queues.get(&number) {
                    self.add_wqe(state, *owner, position, service, number, index, &bytes);
                }
            }
            Entry::ReceiveWqe { rq_type, linked, index, number, bytes } => {
                self.add_receive_wqe(state, rq_type, linked, index, number, &bytes);
            }
            Entry::Cqe { number, bytes, .. } => {
                if let Some(owner) = state.cqs.get(&number) {
                    self.add_cqe(state, *owner, &bytes);
                }
            }
            Entry::Reset => {
                let count = state.count;
                let doorbells = std::mem::take(&mut state.doorbells);
                *state = FunctionState { count, doorbells, ..FunctionState::default() };
            }
            Entry::Eqe { .. }
            | Entry::Fate { .. }
            | Entry::Refusal { .. }
            | Entry::Packet { .. } => {}
        }
        // The device reads the doorbell record when the doorbell rings, and records it if it has
        // changed.
        if let Some(doorbell) = state.armed {
            let number = word(&doorbell, 4) & 0xff_ffff;
            let arm = state.doorbell_records.get(&(DoorbellCounter::CqArm, number)).copied();
            if arm == Some(word(&doorbell, 0)) {
                state.armed = None;
                self.add_cq_doorbell(state, doorbell, number);
            }
        }
    }

    #[expect(clippy::too_many_arguments, reason = "they are the fields of one entry")]
    fn add_wqe(
        &mut self,
        state: &FunctionState,
        owner: OwnedQueue,
        position: usize,
        service: u8,
        number: u32,
        index: u16,
        bytes: &[u8],
    ) {
        let Some(control) = bytes.first_chunk::<16>().map(CtrlSegment::parse) else { return };
        let segments = segments(service, bytes);
        let len = segments.iter().map(|(_, bytes)| bytes.len()).sum();
        let shape: Vec<String> = segments
            .iter()
            .skip(1)
            .map(|(name, bytes)| match *name {
                "mlx5_wqe_inline_seg" => format!("inline {}", word(bytes, 0) & 0x7fff_ffff),
                // The mask of a UMR WQE is part of its kind.
                "mlx5_wqe_umr_ctrl_seg" => {
                    format!("umr_ctrl_seg {}", hex(&bytes[..bytes.len().min(16)]))
                }
                name => name.trim_start_matches("mlx5_").trim_start_matches("wqe_").into(),
            })
            .collect();
        let (operation, service) = (opcode_name(control.opcode), service_name(service));
        let end = index.wrapping_add(control.wqebbs());
        let record = state.doorbell_records.get(&(DoorbellCounter::Sq, number)).copied();
        let mut lines = vec![
            "[request]".into(),
            format!("service: {service}"),
            format!("operation: {operation}"),
            format!("flags: {:#04x}", control.flags),
            format!("queue: {number:#x}"),
            format!("index: {index:#x}"),
            format!("segments: {}", shape.join(", ")),
            format!("bytes: {}", hex(&bytes[..len])),
        ];
        let mut how = String::new();
        if record == Some(end.into()) {
            let record = u32::from(end).to_be_bytes();
            lines.push(format!("record: {}", hex(&record)));
            let writes = bytes.first_chunk::<8>().and_then(|first| state.doorbells.get(first));
            let before = |writes: &'_ Vec<RegisterWrites>| {
                writes.iter().rposition(|b| b.position < position)
            };
            let writes = writes.and_then(|writes| Some(&writes[before(writes)?]));
            if let Some(write) = writes {
                let name = if write.bytes.len() > 8 { "blueflame" } else { "doorbell" };
                how = format!("{name}: {:#x}", write.offset % BUFFERS);
                lines.push(format!("{how} {}", hex(&write.bytes)));
            }
        }
        let key = format!("1 {service} {operation} {:02x} {shape:?} {how}", control.flags);
        self.keep(key, owner, lines);
    }

    fn add_receive_wqe(
        &mut self,
        state: &FunctionState,
        rq_type: RqType,
        linked: bool,
        index: u16,
        number: u32,
        bytes: &[u8],
    ) {
        let (owner, counter, name) = match rq_type {
            RqType::Qp => (state.qps.get(&number), DoorbellCounter::QpRq, "pair"),
            RqType::Srq => (state.srqs.get(&number), DoorbellCounter::Srq, "shared"),
            RqType::Rq => (state.raw_queues[1].get(&number), DoorbellCounter::Rq, "raw"),
        };
        let Some(owner) = owner else { return };
        let segments = receive_segments(linked, bytes);
        let len: usize = segments.iter().map(|(_, bytes)| bytes.len()).sum();
        let mut lines = vec![
            "[receive]".into(),
            format!("to: {name}"),
            format!("queue: {number:#x}"),
            format!("index: {index:#x}"),
            format!("stride: {}", bytes.len()),
            format!("bytes: {}", hex(&bytes[..len])),
        ];
        if let Some(record) = state.doorbell_records.get(&(counter, number)) {
            lines.push(format!("record: {}", hex(&record.to_be_bytes())));
        }
        let key = format!("2 {name} {} {}", bytes.len(), segments.len());
        self.keep(key, *owner, lines);
    }

    fn add_cqe(&mut self, state: &FunctionState, owner: OwnedQueue, bytes: &[u8]) {
        let Some(cqe) = bytes.get(bytes.len().saturating_sub(64)..).filter(|b| b.len() == 64)
        else {
            return;
        };
        let number = word(cqe, 56) & 0xff_ffff;
        let service = state.qps.get(&number).map_or("none", |pair| service_name(pair.service));
        let (last, failed) = (cqe[63], matches!(cqe[63] >> 4, 0xd | 0xe));
        let lines = vec![
            "[completion]".into(),
            format!("service: {service}"),
            format!("queue: {number:#x}"),
            format!("bytes: {}", hex(bytes)),
        ];
        // Byte 56 holds the opcode of the WQE; byte 24 holds flags and header type.
        let key = format!(
            "3 {service} {last:02x} {} {:02x} {:02x} {:x}",
            bytes.len(),
            cqe[56],
            cqe[24],
            if failed { cqe[55] } else { 0 }
        );
        self.keep(key, owner, lines);
    }

    fn add_cq_doorbell(&mut self, state: &FunctionState, doorbell: [u8; 8], number: u32) {
        let Some(owner) = state.cqs.get(&number) else { return };
        let consumer = state
            .doorbell_records
            .get(&(DoorbellCounter::CqConsumer, number))
            .copied()
            .unwrap_or(0);
        let lines = vec![
            "[arm]".into(),
            format!("queue: {number:#x}"),
            format!("doorbell: 0x20 {}", hex(&doorbell)),
            format!("record: {}{}", hex(&consumer.to_be_bytes()), hex(&doorbell[..4])),
        ];
        let key = format!("4 {:02x}", doorbell[0]);
        self.keep(key, *owner, lines);
    }
}

impl FunctionState {
    /// Remembers a queue of a user context.
    fn add_queue(&mut self, input: &[u8], output: &[u8]) {
        let half = |at: usize| {
            input.get(at..at + 2).map_or(0, |bytes| u16::from_be_bytes([bytes[0], bytes[1]]))
        };
        if half(0) == opcode::CREATE_UCTX {
            let number = Bits::<create_uctx_out, _>::new(output).get32(create_uctx_out::uid);
            // mlx5_ib creates the first user context for itself.
            if std::mem::replace(&mut self.driver_has_context, true) {
                self.programs.insert(number as u16, self.count);
                self.count += 1;
            }
        }
        let program = self.programs.get(&half(2)).copied().or_else(|| {
            // mlx5_ib creates XRC initiators without a user context.
            (half(0) == opcode::CREATE_QP && service(input) == XRC && half(2) == 0)
                .then(|| self.count.checked_sub(1))?
        });
        let Some(program) = program else { return };
        let mut owned = OwnedQueue { program, service: 0 };
        match half(0) {
            opcode::CREATE_QP => {
                let number = Bits::<create_qp_out, _>::new(output).get32(create_qp_out::qpn);
                owned.service = service(input);
                self.qps.insert(number, owned);
            }
            opcode::CREATE_SQ => {
                let number = Bits::<create_sq_out, _>::new(output).get32(create_sq_out::sqn);
                self.raw_queues[0].insert(number, owned);
            }
            opcode::CREATE_RQ => {
                let number = Bits::<create_rq_out, _>::new(output).get32(create_rq_out::rqn);
                self.raw_queues[1].insert(number, owned);
            }
            opcode::CREATE_CQ => {
                let number = Bits::<create_cq_out, _>::new(output).get32(create_cq_out::cqn);
                self.cqs.insert(number, owned);
            }
            opcode::CREATE_RMP => {
                let number = Bits::<create_rmp_out, _>::new(output).get32(create_rmp_out::rmpn);
                self.srqs.insert(number, owned);
            }
            opcode::CREATE_XRC_SRQ => {
                let out = Bits::<create_xrc_srq_out, _>::new(output);
                self.srqs.insert(out.get32(create_xrc_srq_out::xrc_srqn), owned);
            }
            _ => {}
        }
    }
}

/// The service type in the input of CREATE_QP.
fn service(input: &[u8]) -> u8 {
    Bits::<create_qp_in, _>::new(input).sub(create_qp_in::qpc).get(qpc::st) as u8
}

/// Service type XRC.
const XRC: u8 = 3;

/// Joins writes to the registers of send queues into doorbells and BlueFlame copies.
fn writes(entries: &[Entry<Vec<u8>>]) -> WritesByWqe {
    let mut writing: BTreeMap<u64, RegisterWrites> = BTreeMap::new();
    let mut done = WritesByWqe::new();
    let mut end = |write: RegisterWrites| {
        if let Some(first) = write.bytes.first_chunk::<8>() {
            done.entry(*first).or_default().push(write);
        }
    };
    for (position, entry) in entries.iter().enumerate() {
        let Entry::Write { offset, bytes } = entry else { continue };
        if page(*offset).is_none() || offset % bar0::PAGE < SEND {
            continue;
        }
        let goes_on = |write: &&mut RegisterWrites| {
            offset % BUFFER != 0 && write.offset + write.bytes.len() as u64 == *offset
        };
        if let Some(write) = writing.get_mut(&(offset / BUFFER)).filter(goes_on) {
            write.bytes.extend(bytes);
        } else {
            let write = RegisterWrites { position, offset: *offset, bytes: bytes.clone() };
            writing.insert(offset / BUFFER, write).map(&mut end);
        }
    }
    writing.into_values().for_each(&mut end);
    done.values_mut().for_each(|writes| writes.sort_by_key(|write| write.position));
    done
}

/// Offset of the CQ doorbell in a UAR page.
const ARM: u64 = 0x20;
/// Offset of the registers of send queues.
const SEND: u64 = 0x800;
/// Bytes of one of the two buffers of a register.
const BUFFER: u64 = 0x100;
/// Bytes of a register: two buffers, used in turn.
const BUFFERS: u64 = 2 * BUFFER;

/// The UAR page of an offset in BAR0.
fn page(offset: u64) -> Option<u64> {
    let page = offset / bar0::PAGE;
    (page >= u64::from(*bar0::UARS.start()) && offset < bar0::VAR_OFFSET).then_some(page)
}

fn word(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..at + 4).map_or(0, |b| u32::from_be_bytes([b[0], b[1], b[2], b[3]]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use uverbs_connectx::recording::{MemoryFile, Recorder};

    const QPN: u32 = 0x42;
    const CQN: u32 = 0x405;

    fn command(recorder: &mut Recorder, op: u16, uid: u16, number: u32) {
        let mut input = vec![0; 64];
        input[..2].copy_from_slice(&op.to_be_bytes());
        input[2..4].copy_from_slice(&uid.to_be_bytes());
        let mut output = vec![0; 16];
        output[8..12].copy_from_slice(&number.to_be_bytes());
        recorder.add(0, &Entry::Command { slot: 1, input: &input });
        recorder.add(0, &Entry::CommandOutput { slot: 1, delivery: 0, output: &output });
    }

    /// The recording of a program that posts one WQE by BlueFlame and arms its CQ once, as user
    /// context `uid`.
    fn file(uid: u16) -> MemoryFile {
        let file = MemoryFile::default();
        let mut recorder = Recorder::new(file.clone(), 0).unwrap();
        command(&mut recorder, opcode::CREATE_UCTX, 0, 1);
        command(&mut recorder, opcode::CREATE_UCTX, 0, 2);
        command(&mut recorder, opcode::CREATE_CQ, uid, CQN);
        command(&mut recorder, opcode::CREATE_QP, uid, QPN);
        let mut wqe = [0; 64];
        wqe[..8].copy_from_slice(&[0, 0, 7, 0x0a, 0, 0, QPN as u8, 2]);
        wqe[11] = 8;
        let register = 20 * bar0::PAGE + SEND + BUFFER;
        for word in 0..4 {
            let bytes = &wqe[word * 8..word * 8 + 8];
            recorder.add(0, &Entry::Write { offset: register + word as u64 * 8, bytes });
        }
        recorder.doorbell_record(0, DoorbellCounter::Sq, QPN, 8);
        let (service, index, number) = (0, 7, QPN);
        let request = Entry::Wqe { service, blue_flame: true, index, number, bytes: &wqe[..] };
        recorder.add(0, &request);
        for word in 4..8 {
            let bytes = &wqe[word * 8..word * 8 + 8];
            recorder.add(0, &Entry::Write { offset: register + word as u64 * 8, bytes });
        }
        recorder.add(0, &Entry::Cqe { number: CQN, index: 0, bytes: &[0x5a; 64] });
        let doorbell = [0x10, 0, 0, 1, 0, 0, 4, 5];
        recorder.add(0, &Entry::Write { offset: 20 * bar0::PAGE + ARM, bytes: &doorbell });
        recorder.doorbell_record(0, DoorbellCounter::CqConsumer, CQN, 1);
        recorder.doorbell_record(0, DoorbellCounter::CqArm, CQN, 0x1000_0001);
        file
    }

    fn text(file: &MemoryFile, by: &[String]) -> io::Result<String> {
        let mut vectors = TestVectors::default();
        vectors.add(&file.bytes()[..])?;
        let mut text = Vec::new();
        vectors.print(by, &mut text)?;
        Ok(String::from_utf8(text).unwrap())
    }

    #[test]
    fn a_wqe_is_printed_with_its_doorbell_record_and_blueflame_copy() {
        let text = text(&file(2), &["a program".into()]).unwrap();
        assert!(text.starts_with("# a program\n"));
        let wqe = "0000070a000042020000000800000000";
        assert!(text.contains(&format!("\nbytes: {wqe}{}\n", "0".repeat(32))), "{text}");
        assert!(text.contains("\nrecord: 00000008\n"), "{text}");
        assert!(text.contains(&format!("\nblueflame: 0x100 {wqe}{}\n", "0".repeat(96))), "{text}");
        assert!(text.contains("[completion]\nservice: none\n"), "{text}");
        let arm =
            "[arm]\nqueue: 0x405\ndoorbell: 0x20 1000000100000405\nrecord: 0000000110000001\n";
        assert!(text.contains(arm), "{text}");
    }

    #[test]
    fn kernel_queues_are_left_out_and_programs_are_counted() {
        let of_kernel = text(&file(0), &["a program".into()]).unwrap();
        assert_eq!(of_kernel, "");
        let wrong = text(&file(2), &[]).unwrap_err();
        assert!(wrong.to_string().contains("1 programs"), "{wrong}");
    }
}
