//! Messages between queue pairs, and the answers to them.
//!
//! Pairs requester (`data/send.rs`) with responder (`data/respond.rs`). A message travels whole; its
//! packet sequence numbers count the packets it would be cut into.

use super::wqe::Atomic;
use crate::fault::Syndromes;

/// Who sent a message, and what of it the receiver sees.
#[derive(Debug, Clone)]
pub struct Message {
    /// Address of the sender, on Ethernet, unless it is a datagram.
    pub source_gid: [u8; 16],
    /// Queue pair that sent it.
    pub source_qpn: u32,
    /// Queue pair that it is for.
    pub qpn: u32,
    /// Local identifier of the sender.
    pub source_lid: u16,
    /// Service level.
    pub sl: u8,
    /// Sequence number of the first packet.
    pub psn: u32,
    /// How many sequence numbers it takes.
    pub packets: u32,
    /// What it does.
    pub action: Action,
    /// Data sent or written.
    pub payload: Vec<u8>,
    /// Immediate data.
    pub immediate: Option<u32>,
    /// Whether the receiver's completion is marked.
    pub solicited: bool,
    /// SRQ of an XRC message.
    pub srqn: Option<u32>,
    /// What only datagrams carry.
    pub datagram: Option<Datagram>,
}

/// The part of a message that only datagrams carry.
#[derive(Debug, Clone)]
pub struct Datagram {
    /// Queue key.
    pub qkey: u32,
    /// The 40 bytes in front of the data, if it was globally routed.
    pub route: Option<[u8; 40]>,
    /// Kind of header in `route`: 0 GRH, 1 IPv6, 2 IPv4.
    pub l3: u8,
    /// Destination group, for a multicast.
    pub group: Option<[u8; 16]>,
}

/// What a message does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Uses a receive; may invalidate a key of the receiver.
    Send {
        /// The key.
        invalidate: Option<u32>,
    },
    /// Writes to memory; with immediate data it uses a receive too.
    Write {
        /// Where to.
        address: u64,
        /// By which key.
        key: u32,
    },
    /// Reads from memory.
    Read {
        /// Where from.
        address: u64,
        /// By which key.
        key: u32,
        /// How many bytes.
        len: u64,
    },
    /// Changes a word of memory.
    Atomic {
        /// Where.
        address: u64,
        /// By which key.
        key: u32,
        /// Bytes of the word: 4 or 8.
        len: u64,
        /// How.
        change: Atomic,
    },
}

/// An answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// Done.
    Acknowledged,
    /// Done; these were read.
    Data(Vec<u8>),
    /// Done; this was there before.
    Atomic(u64),
    /// No receive is posted: try again after this timer code.
    NotReady(u8),
    /// The request makes no sense.
    InvalidRequest,
    /// The memory may not be reached.
    AccessError,
    /// The responder failed.
    OperationError,
    /// Nothing came back.
    Lost,
}

/// What ends a work request, `MLX5_CQE_SYNDROME_*`.
#[allow(missing_docs, reason = "the driver's names")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Syndrome {
    LocalLength = 0x01,
    LocalQpOperation = 0x02,
    LocalProtection = 0x04,
    Flushed = 0x05,
    WindowBinding = 0x06,
    BadResponse = 0x10,
    LocalAccess = 0x11,
    RemoteInvalidRequest = 0x12,
    RemoteAccess = 0x13,
    RemoteOperation = 0x14,
    RetriesExceeded = 0x15,
    ReceiverNotReady = 0x16,
}

impl From<Syndrome> for Syndromes {
    fn from(syndrome: Syndrome) -> Self {
        Self { syndrome: syndrome as u8, vendor: 0x80 | syndrome as u8 }
    }
}

/// Nanoseconds of an RNR timer code.
pub fn rnr_timer(code: u8) -> u64 {
    // In units of 10 microseconds.
    const UNITS: [u64; 32] = [
        65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024,
        1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
    ];
    UNITS[usize::from(code & 31)] * 10_000
}
