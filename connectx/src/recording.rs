//! Recordings of the driver's writes and the device's answers, in order, one file for each function.
//!
//! Pairs with `--record DIR` and `decode` of `connectx-vfio`, which prints a recording. A file begins
//! with the eight bytes of [`MAGIC`], the version (4 bytes) and the number of the function (4
//! bytes). Entries follow. Each has the length of its body (4 bytes), its kind (1 byte), three
//! zeros, the time in nanoseconds since the start (8 bytes), and the body. Numbers are
//! little-endian; bytes of the driver or the device stay as they were.
//!
//! | kind | entry | body |
//! |---|---|---|
//! | 1 | [`Entry::Command`] | slot 1, input |
//! | 2 | [`Entry::CommandOutput`] | slot 1, delivery status 1, output |
//! | 3 | [`Entry::Write`] | offset in BAR0 8, bytes |
//! | 4 | [`Entry::DoorbellRecord`] | [`DoorbellCounter`] 1, number 4, value 4 |
//! | 5 | [`Entry::Wqe`] | service 1, by BlueFlame 1, index 2, number 4, bytes |
//! | 6 | [`Entry::ReceiveWqe`] | [`RqType`] 1, linked 1, index 2, number 4, bytes |
//! | 7 | [`Entry::Cqe`] | number 4, index 4, bytes |
//! | 8 | [`Entry::Eqe`] | number 4, index 4, bytes |
//! | 9 | [`Entry::Reset`] | nothing |
//! | 10 | [`Entry::Fate`] | number 4, nanoseconds 8 |
//! | 11 | [`Entry::Refusal`] | number 4, why 1 |
//! | 12 | [`Entry::Packet`] | number 4, receiver 4, PSN 4, opcode 1, [`PacketFate`] 1 |
//!
//! A reader skips kinds that it does not know. A change of an existing kind needs a new version.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufWriter, Read, Write};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use uverbs_roce::headers::Bth;
use uverbs_roce::opcodes::Opcode;
use zerocopy::FromBytes;

/// The first bytes of a recording.
pub const MAGIC: &[u8; 8] = b"connectx";
/// The version of the format.
pub const VERSION: u32 = 1;
/// The longest body that a reader accepts.
const MAX_BODY: u32 = 64 << 20;
/// Bytes in front of a body.
const HEADER: usize = 16;

/// The service of a raw send queue, which has no `MLX5_QP_ST_*`.
pub const SERVICE_RAW_SQ: u8 = 0xff;

/// The counter in a doorbell record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum DoorbellCounter {
    /// WQEBBs posted to a send queue.
    Sq = 0,
    /// Receives posted to a queue pair.
    QpRq = 1,
    /// Receives posted to an SRQ.
    Srq = 2,
    /// Receives posted to a raw receive queue.
    Rq = 3,
    /// Consumer index of a CQ.
    CqConsumer = 4,
    /// Arm word of a CQ.
    CqArm = 5,
}

/// The type of queue to which a receive was posted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum RqType {
    /// A queue pair.
    Qp = 0,
    /// An SRQ.
    Srq = 1,
    /// A raw receive queue.
    Rq = 2,
}

/// One entry. `B` is borrowed for writing and owned after reading.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Entry<B> {
    /// A command with its mailboxes joined.
    Command {
        /// Its slot.
        slot: u8,
        /// The whole input.
        input: B,
    },
    /// The output of a command.
    CommandOutput {
        /// Its slot.
        slot: u8,
        /// Delivery status; not 0 if the command could not be read.
        delivery: u8,
        /// The whole output.
        output: B,
    },
    /// A write to BAR0.
    Write {
        /// Where.
        offset: u64,
        /// The bytes.
        bytes: B,
    },
    /// A doorbell record whose value has changed since the device last read it.
    DoorbellRecord {
        /// Its counter.
        counter: DoorbellCounter,
        /// Number of the queue.
        number: u32,
        /// The value.
        value: u32,
    },
    /// A WQE as the device read it.
    Wqe {
        /// Service type of the queue pair, `MLX5_QP_ST_*`, or [`SERVICE_RAW_SQ`].
        service: u8,
        /// Whether the device read it from the BlueFlame register instead of memory.
        blue_flame: bool,
        /// Index of its first WQEBB.
        index: u16,
        /// Number of the queue.
        number: u32,
        /// Its WQEBBs, whole.
        bytes: B,
    },
    /// A receive WQE as the device read it.
    ReceiveWqe {
        /// Type of the queue.
        rq_type: RqType,
        /// Whether it begins with a link to the next WQE.
        linked: bool,
        /// `wqe_counter` of its CQE.
        index: u16,
        /// Number of the queue.
        number: u32,
        /// The whole stride.
        bytes: B,
    },
    /// A CQE as the device wrote it.
    Cqe {
        /// Number of the queue.
        number: u32,
        /// Producer index before it.
        index: u32,
        /// Its bytes.
        bytes: B,
    },
    /// An EQE as the device wrote it.
    Eqe {
        /// Number of the queue.
        number: u32,
        /// Producer index before it.
        index: u32,
        /// Its bytes.
        bytes: B,
    },
    /// A reset: it destroys everything that existed before.
    Reset,
    /// A message that a test has lost or delayed.
    Fate {
        /// Number of the queue.
        number: u32,
        /// Its delay in nanoseconds; `None` if it is lost.
        late: Option<u64>,
    },
    /// A message that was not acknowledged.
    Refusal {
        /// Number of the queue.
        number: u32,
        /// The reason.
        why: Refusal,
    },
    /// A packet that the network changes.
    Packet {
        /// Number of the queue that sent it.
        number: u32,
        /// Number of the queue that it is for.
        to: u32,
        /// Its number.
        psn: u32,
        /// Its opcode, the first byte of the BTH.
        opcode: u8,
        /// Its fate.
        fate: PacketFate,
    },
}

impl Entry<&[u8]> {
    /// The entry of a packet, which begins with its BTH.
    pub(crate) fn of_packet(number: u32, packet: &[u8], fate: PacketFate) -> Self {
        let bth = Bth::read_from_prefix(packet).map_or_else(|_| Bth::default(), |(bth, _)| bth);
        let (to, psn) = (bth.destination(), bth.psn().get());
        Entry::Packet { number, to, psn, opcode: bth.opcode, fate }
    }
}

/// The operation of a packet in words, by its opcode.
pub fn operation(opcode: u8) -> String {
    let Some(opcode) = Opcode::from_byte(opcode) else { return format!("opcode {opcode:#x}") };
    let mut words = String::new();
    for letter in format!("{:?}", opcode.operation).chars() {
        if letter.is_uppercase() && !words.is_empty() {
            words.push(' ');
        }
        words.push(letter.to_ascii_lowercase());
    }
    words
}

/// A change of a packet by the network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum PacketFate {
    /// It is dropped, as the queue is full.
    Dropped = 0,
    /// It is lost, or the way to its receiver is cut off.
    Lost = 1,
    /// It is damaged.
    Damaged = 2,
    /// It arrives twice.
    Doubled = 3,
    /// It is late, and others overtake it.
    Late = 4,
    /// It is marked by ECN, by script: those of a full queue are only counted.
    Marked = 5,
}

/// The reason why a message was not acknowledged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Refusal {
    /// No response came.
    Lost = 0,
    /// No receive was posted (RNR).
    RnrNak = 1,
    /// A NAK: the request is invalid.
    InvalidRequest = 2,
    /// A NAK: the peer's memory may not be accessed so.
    AccessError = 3,
    /// A NAK: the peer failed.
    OperationError = 4,
}

impl<B: AsRef<[u8]>> Entry<B> {
    /// Kind, fixed part of the body, and the rest of the body.
    fn parts(&self) -> (u8, Vec<u8>, &[u8]) {
        let head = |pieces: &[&[u8]]| pieces.concat();
        match self {
            Self::Command { slot, input } => (1, vec![*slot], input.as_ref()),
            Self::CommandOutput { slot, delivery, output } => {
                (2, vec![*slot, *delivery], output.as_ref())
            }
            Self::Write { offset, bytes } => (3, offset.to_le_bytes().to_vec(), bytes.as_ref()),
            Self::DoorbellRecord { counter, number, value } => {
                let parts = [&[*counter as u8][..], &number.to_le_bytes(), &value.to_le_bytes()];
                (4, head(&parts), &[])
            }
            Self::Wqe { service, blue_flame, index, number, bytes } => {
                let first = [*service, u8::from(*blue_flame)];
                let parts = [&first[..], &index.to_le_bytes(), &number.to_le_bytes()];
                (5, head(&parts), bytes.as_ref())
            }
            Self::ReceiveWqe { rq_type, linked, index, number, bytes } => {
                let first = [*rq_type as u8, u8::from(*linked)];
                let parts = [&first[..], &index.to_le_bytes(), &number.to_le_bytes()];
                (6, head(&parts), bytes.as_ref())
            }
            Self::Cqe { number, index, bytes } => {
                (7, head(&[&number.to_le_bytes(), &index.to_le_bytes()]), bytes.as_ref())
            }
            Self::Eqe { number, index, bytes } => {
                (8, head(&[&number.to_le_bytes(), &index.to_le_bytes()]), bytes.as_ref())
            }
            Self::Reset => (9, vec![], &[]),
            Self::Fate { number, late } => {
                let late = late.unwrap_or(u64::MAX);
                (10, head(&[&number.to_le_bytes(), &late.to_le_bytes()]), &[])
            }
            Self::Packet { number, to, psn, opcode, fate } => {
                let last = [*opcode, *fate as u8];
                let numbers = [number.to_le_bytes(), to.to_le_bytes(), psn.to_le_bytes()];
                (12, head(&[&numbers.concat(), &last]), &[])
            }
            Self::Refusal { number, why } => {
                (11, head(&[&number.to_le_bytes(), &[*why as u8]]), &[])
            }
        }
    }
}

impl Entry<Vec<u8>> {
    /// Parses a body; `None` if its kind is unknown or it is too short.
    fn parse(kind: u8, body: &[u8]) -> Option<Self> {
        let mut rest = body;
        let byte = |rest: &mut &[u8]| {
            let (first, left) = rest.split_first()?;
            *rest = left;
            Some(*first)
        };
        let word = |rest: &mut &[u8]| {
            let (first, left) = rest.split_first_chunk::<4>()?;
            *rest = left;
            Some(u32::from_le_bytes(*first))
        };
        let half = |rest: &mut &[u8]| {
            let (first, left) = rest.split_first_chunk::<2>()?;
            *rest = left;
            Some(u16::from_le_bytes(*first))
        };
        Some(match kind {
            1 => Self::Command { slot: byte(&mut rest)?, input: rest.to_vec() },
            2 => Self::CommandOutput {
                slot: byte(&mut rest)?,
                delivery: byte(&mut rest)?,
                output: rest.to_vec(),
            },
            3 => {
                let (low, high) = (word(&mut rest)?, word(&mut rest)?);
                Self::Write { offset: u64::from(high) << 32 | u64::from(low), bytes: rest.to_vec() }
            }
            4 => Self::DoorbellRecord {
                counter: match byte(&mut rest)? {
                    0 => DoorbellCounter::Sq,
                    1 => DoorbellCounter::QpRq,
                    2 => DoorbellCounter::Srq,
                    3 => DoorbellCounter::Rq,
                    4 => DoorbellCounter::CqConsumer,
                    5 => DoorbellCounter::CqArm,
                    _ => return None,
                },
                number: word(&mut rest)?,
                value: word(&mut rest)?,
            },
            5 => Self::Wqe {
                service: byte(&mut rest)?,
                blue_flame: byte(&mut rest)? != 0,
                index: half(&mut rest)?,
                number: word(&mut rest)?,
                bytes: rest.to_vec(),
            },
            6 => Self::ReceiveWqe {
                rq_type: match byte(&mut rest)? {
                    0 => RqType::Qp,
                    1 => RqType::Srq,
                    2 => RqType::Rq,
                    _ => return None,
                },
                linked: byte(&mut rest)? != 0,
                index: half(&mut rest)?,
                number: word(&mut rest)?,
                bytes: rest.to_vec(),
            },
            7 => Self::Cqe {
                number: word(&mut rest)?,
                index: word(&mut rest)?,
                bytes: rest.to_vec(),
            },
            8 => Self::Eqe {
                number: word(&mut rest)?,
                index: word(&mut rest)?,
                bytes: rest.to_vec(),
            },
            9 => Self::Reset,
            10 => {
                let (number, low, high) = (word(&mut rest)?, word(&mut rest)?, word(&mut rest)?);
                let late = u64::from(high) << 32 | u64::from(low);
                Self::Fate { number, late: (late != u64::MAX).then_some(late) }
            }
            11 => Self::Refusal {
                number: word(&mut rest)?,
                why: match byte(&mut rest)? {
                    0 => Refusal::Lost,
                    1 => Refusal::RnrNak,
                    2 => Refusal::InvalidRequest,
                    3 => Refusal::AccessError,
                    4 => Refusal::OperationError,
                    _ => return None,
                },
            },
            12 => Self::Packet {
                number: word(&mut rest)?,
                to: word(&mut rest)?,
                psn: word(&mut rest)?,
                opcode: byte(&mut rest)?,
                fate: match byte(&mut rest)? {
                    0 => PacketFate::Dropped,
                    1 => PacketFate::Lost,
                    2 => PacketFate::Damaged,
                    3 => PacketFate::Doubled,
                    4 => PacketFate::Late,
                    5 => PacketFate::Marked,
                    _ => return None,
                },
            },
            _ => return None,
        })
    }
}

/// The recording of a function, if there is one.
#[derive(Default)]
pub struct Recorder {
    to: Option<Box<dyn Write + Send>>,
    seen: BTreeMap<(DoorbellCounter, u32), u32>,
}

impl Recorder {
    /// Records to a new file.
    ///
    /// # Errors
    /// If the file is there already, or cannot be created or written.
    pub fn create(path: &Path, function: u32) -> io::Result<Self> {
        Self::new(BufWriter::new(File::create_new(path)?), function)
    }

    /// Records to `to`.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn new(mut to: impl Write + Send + 'static, function: u32) -> io::Result<Self> {
        to.write_all(MAGIC)?;
        to.write_all(&VERSION.to_le_bytes())?;
        to.write_all(&function.to_le_bytes())?;
        Ok(Self { to: Some(Box::new(to)), seen: BTreeMap::new() })
    }

    /// Whether a recording is made.
    pub fn on(&self) -> bool {
        self.to.is_some()
    }

    /// Adds an entry. After a write error the recording ends.
    pub fn add(&mut self, now: u64, entry: &Entry<&[u8]>) {
        let Some(to) = &mut self.to else { return };
        let (kind, head, rest) = entry.parts();
        let len = (head.len() + rest.len()) as u32;
        let mut bytes = Vec::with_capacity(HEADER + len as usize);
        bytes.extend(len.to_le_bytes());
        bytes.extend([kind, 0, 0, 0]);
        bytes.extend(now.to_le_bytes());
        bytes.extend(head);
        bytes.extend(rest);
        if let Err(error) = to.write_all(&bytes) {
            log::error!("the recording ends, because it cannot be written: {error}");
            self.to = None;
        }
    }

    /// Adds the value of a doorbell record, if it has changed.
    pub fn doorbell_record(&mut self, now: u64, counter: DoorbellCounter, number: u32, value: u32) {
        if self.to.is_some() && self.seen.insert((counter, number), value) != Some(value) {
            self.add(now, &Entry::DoorbellRecord { counter, number, value });
        }
    }

    /// Adds a reset.
    pub fn reset(&mut self, now: u64) {
        self.seen.clear();
        self.add(now, &Entry::Reset);
    }

    /// Writes buffered entries to the file.
    pub fn flush(&mut self) {
        let flushed = self.to.as_mut().map_or(Ok(()), |to| to.flush());
        if let Err(error) = flushed {
            log::error!("the recording ends, because it cannot be written: {error}");
            self.to = None;
        }
    }
}

/// A recording to read.
pub struct Recording<R> {
    from: R,
    /// Number of the function.
    pub function: u32,
}

/// An entry and its time in nanoseconds since the start.
pub type TimedEntry = (u64, Entry<Vec<u8>>);

fn bad(why: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

impl<R: Read> Recording<R> {
    /// Reads the file header.
    ///
    /// # Errors
    /// `InvalidData` if it is no recording, or has another version.
    pub fn new(mut from: R) -> io::Result<Self> {
        let mut head = [0; 16];
        from.read_exact(&mut head)?;
        let word =
            |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        if head[..8] != MAGIC[..] {
            return Err(bad("the file is no recording".into()));
        }
        if word(8) != VERSION {
            return Err(bad(format!(
                "the recording has format version {}, only {VERSION} is supported",
                word(8)
            )));
        }
        Ok(Self { from, function: word(12) })
    }

    /// The next entry; `None` at the end. A recording of a killed process may end in the middle of
    /// an entry.
    ///
    /// # Errors
    /// `InvalidData` for a body that is too long, or an error of reading.
    pub fn next_entry(&mut self) -> io::Result<Option<TimedEntry>> {
        loop {
            let mut head = [0; HEADER];
            let mut body = Vec::new();
            let mut read = |to: &mut [u8]| match self.from.read_exact(to) {
                Ok(()) => Ok(true),
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
                Err(error) => Err(error),
            };
            if !read(&mut head)? {
                return Ok(None);
            }
            let len = u32::from_le_bytes([head[0], head[1], head[2], head[3]]);
            if len > MAX_BODY {
                return Err(bad(format!("an entry has {len} bytes, the limit is {MAX_BODY}")));
            }
            body.resize(len as usize, 0);
            if !read(&mut body)? {
                return Ok(None);
            }
            let mut time = [0; 8];
            time.copy_from_slice(&head[8..]);
            if let Some(entry) = Entry::parse(head[4], &body) {
                return Ok(Some((u64::from_le_bytes(time), entry)));
            }
        }
    }
}

/// Parses the bytes of one entry, as [`Recorder::add`] writes them; `None` for a file header or an unknown kind.
pub fn parse_entry(bytes: &[u8]) -> Option<TimedEntry> {
    let (head, body) = bytes.split_first_chunk::<HEADER>()?;
    let [_, _, _, _, kind, _, _, _, time @ ..] = *head;
    Some((u64::from_le_bytes(time), Entry::parse(kind, body)?))
}

/// A recording in memory, which can be read while it is written.
#[derive(Clone, Default)]
pub struct MemoryFile(Arc<Mutex<Vec<u8>>>);

impl Write for MemoryFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.lock().extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl MemoryFile {
    fn lock(&self) -> MutexGuard<'_, Vec<u8>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The recording so far.
    pub fn bytes(&self) -> Vec<u8> {
        self.lock().clone()
    }

    /// The entries so far.
    ///
    /// # Errors
    /// `InvalidData` if the file is no recording: nothing records to it yet.
    pub fn entries(&self) -> io::Result<Vec<TimedEntry>> {
        let bytes = self.bytes();
        let mut recording = Recording::new(&bytes[..])?;
        std::iter::from_fn(|| recording.next_entry().transpose()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recording_reads_back_as_written() {
        let bytes: &[u8] = &[1, 2, 3, 4, 5, 6, 7, 8, 9];
        let entries = [
            Entry::Command { slot: 3, input: bytes },
            Entry::CommandOutput { slot: 3, delivery: 2, output: bytes },
            Entry::Write { offset: 0x1_0000_0800, bytes },
            Entry::DoorbellRecord { counter: DoorbellCounter::CqArm, number: 0x400, value: 7 },
            Entry::Wqe {
                service: SERVICE_RAW_SQ,
                blue_flame: true,
                index: 0xfff0,
                number: 0x10_0001,
                bytes,
            },
            Entry::ReceiveWqe { rq_type: RqType::Srq, linked: true, index: 9, number: 4, bytes },
            Entry::Cqe { number: 0x401, index: 0x12_3456, bytes },
            Entry::Eqe { number: 5, index: 6, bytes },
            Entry::Reset,
            Entry::Fate { number: 7, late: Some(1 << 33) },
            Entry::Fate { number: 7, late: None },
            Entry::Refusal { number: 8, why: Refusal::OperationError },
            Entry::Packet {
                number: 9,
                to: 10,
                psn: 0xff_fffe,
                opcode: 0x11,
                fate: PacketFate::Late,
            },
        ];
        let file = MemoryFile::default();
        let mut recorder = Recorder::new(file.clone(), 0).unwrap();
        for (time, entry) in entries.iter().enumerate() {
            recorder.add(time as u64 + (1 << 40), entry);
        }
        let read = file.entries().unwrap();
        assert_eq!(read.len(), entries.len());
        for (time, (written, (stamp, read))) in entries.iter().zip(&read).enumerate() {
            assert_eq!(*stamp, time as u64 + (1 << 40));
            assert_eq!(written.parts(), read.parts());
        }
    }

    #[test]
    fn a_doorbell_record_is_recorded_when_it_changes() {
        let file = MemoryFile::default();
        let mut recorder = Recorder::new(file.clone(), 1).unwrap();
        for value in [1, 1, 2, 2, 1] {
            recorder.doorbell_record(0, DoorbellCounter::Sq, 0x40, value);
        }
        recorder.reset(0);
        recorder.doorbell_record(0, DoorbellCounter::Sq, 0x40, 1);
        let values: Vec<Option<u32>> = file
            .entries()
            .unwrap()
            .into_iter()
            .map(|(_, entry)| match entry {
                Entry::DoorbellRecord { value, .. } => Some(value),
                _ => None,
            })
            .collect();
        assert_eq!(values, [Some(1), Some(2), Some(1), None, Some(1)]);
    }

    #[test]
    fn a_truncated_recording_ends_and_other_files_are_refused() {
        let file = MemoryFile::default();
        let mut recorder = Recorder::new(file.clone(), 1).unwrap();
        recorder.add(0, &Entry::Write { offset: 0, bytes: &[1, 2, 3, 4] });
        recorder.add(0, &Entry::Write { offset: 0, bytes: &[1, 2, 3, 4] });
        let mut bytes = file.bytes();
        bytes.truncate(bytes.len() - 1);
        let mut recording = Recording::new(&bytes[..]).unwrap();
        assert_eq!(recording.function, 1);
        assert!(recording.next_entry().unwrap().is_some());
        assert!(recording.next_entry().unwrap().is_none());
        bytes[8] = 2;
        let other = Recording::new(&bytes[..]).err().unwrap();
        assert!(other.to_string().contains("version 2"));
        bytes[0] = 0;
        assert!(Recording::new(&bytes[..]).err().unwrap().to_string().contains("no recording"));
    }
}
