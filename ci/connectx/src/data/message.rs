//! Messages between queue pairs, and the answers to them.
//!
//! Pairs requester (`data/send.rs`) with responder (`data/respond.rs`). A message travels whole; its
//! packet sequence numbers count the packets it would be cut into.

use crate::format::wqe::Atomic;

/// Who sent a message, and what of it the receiver sees.
#[derive(Debug, Clone)]
pub(crate) struct Message {
    /// Address of the sender, on Ethernet, unless it is a datagram.
    pub(crate) source_gid: [u8; 16],
    /// Queue pair that sent it.
    pub(crate) source_qpn: u32,
    /// Queue pair that it is for.
    pub(crate) qpn: u32,
    /// Local identifier of the sender.
    pub(crate) source_lid: u16,
    /// Service level.
    pub(crate) sl: u8,
    /// Sequence number of the first packet.
    pub(crate) psn: u32,
    /// How many sequence numbers it takes.
    pub(crate) packets: u32,
    /// What it does.
    pub(crate) action: Action,
    /// Data sent or written.
    pub(crate) payload: Vec<u8>,
    /// Immediate data.
    pub(crate) immediate: Option<u32>,
    /// Whether the receiver's completion is marked.
    pub(crate) solicited: bool,
    /// SRQ of an XRC message.
    pub(crate) srqn: Option<u32>,
    /// What only datagrams carry.
    pub(crate) datagram: Option<Datagram>,
}

impl Message {
    /// Whether it goes to a multicast group.
    pub(crate) fn is_multicast(&self) -> bool {
        self.datagram.as_ref().is_some_and(|datagram| datagram.group.is_some())
    }
}

/// The part of a message that only datagrams carry.
#[derive(Debug, Clone)]
pub(crate) struct Datagram {
    /// Queue key.
    pub(crate) qkey: u32,
    /// The 40 bytes in front of the data, if it was globally routed.
    pub(crate) route: Option<[u8; 40]>,
    /// Kind of header in `route`: 0 GRH, 1 IPv6, 2 IPv4.
    pub(crate) l3: u8,
    /// Destination group, for a multicast.
    pub(crate) group: Option<[u8; 16]>,
}

/// What a message does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Action {
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
pub(crate) enum Answer {
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

/// Nanoseconds of an RNR timer code.
pub(crate) fn rnr_timer(code: u8) -> u64 {
    // In units of 10 microseconds.
    const UNITS: [u64; 32] = [
        65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024,
        1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
    ];
    UNITS[usize::from(code & 31)] * 10_000
}
