//! Messages between queue pairs, and the responses to them.
//!
//! Pairs the requester with the responder. A message travels whole. Its PSNs count the packets into
//! which hardware would divide it.

use uverbs_roce::Atomic;

use crate::device::Device;
use crate::fault::MessageFate;
use crate::object::receive_queue::ReceiveWqe;
use crate::recording::{Entry, Refusal};
use crate::scratch::Scratch;

/// Memory of a request, which the next one uses again.
#[derive(Default)]
pub(crate) struct Request {
    /// The WQE.
    pub(crate) wqe: Vec<u8>,
    /// Data of a send or an RDMA write.
    pub(crate) payload: Scratch,
}

/// Memory of the responder while it executes a message.
#[derive(Default)]
pub(crate) struct Answer {
    /// Data of an RDMA read.
    pub(crate) data: Scratch,
    /// Header and data of a datagram.
    pub(crate) datagram: Scratch,
    /// The receive that the message consumes.
    pub(crate) receive: ReceiveWqe,
}

/// A message, as the responder sees it.
#[derive(Debug, Clone)]
pub(crate) struct Message<'r> {
    /// Source GID on Ethernet.
    pub(crate) source_gid: [u8; 16],
    /// VLAN tag of the packets on Ethernet: priority in bits 13 to 15, VLAN in bits 0 to 11.
    pub(crate) vlan_tag: Option<u16>,
    /// Source QPN.
    pub(crate) source_qpn: u32,
    /// Destination QPN.
    pub(crate) qpn: u32,
    /// Source LID.
    pub(crate) source_lid: u16,
    /// Service level.
    pub(crate) sl: u8,
    /// Partition key.
    pub(crate) pkey: u16,
    /// PSN of the first packet.
    pub(crate) psn: u32,
    /// The number of PSNs that the message takes.
    pub(crate) packets: u32,
    /// Operation of the responder.
    pub(crate) action: Action,
    /// Data of a send or an RDMA write.
    pub(crate) payload: &'r [u8],
    /// Immediate data.
    pub(crate) immediate: Option<u32>,
    /// Whether the receiver's CQE is solicited.
    pub(crate) solicited: bool,
    /// SRQN of an XRC message.
    pub(crate) srqn: Option<u32>,
    /// The part that only datagrams have.
    pub(crate) datagram: Option<Datagram>,
}

impl Message<'_> {
    /// The VLAN on Ethernet; none if the packets have no tag.
    pub(crate) fn vlan(&self) -> Option<u16> {
        self.vlan_tag.map(|tag| tag & 0xfff)
    }

    /// Whether the message goes to a multicast group.
    pub(crate) fn is_multicast(&self) -> bool {
        self.datagram.as_ref().is_some_and(|datagram| datagram.group.is_some())
    }
}

/// The part of a message that only datagrams have.
#[derive(Debug, Clone)]
pub(crate) struct Datagram {
    /// Q_Key.
    pub(crate) qkey: u32,
    /// The 40 bytes in front of the data: a GRH, an IPv6 header, or 20 bytes and an IPv4 header.
    pub(crate) grh: Option<[u8; 40]>,
    /// Type of the header in `grh`: 0 GRH, 1 IPv6, 2 IPv4.
    pub(crate) l3: u8,
    /// Destination group of a multicast.
    pub(crate) group: Option<[u8; 16]>,
}

/// The operation of a message at the responder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Action {
    /// Consumes a receive, and may invalidate an mkey of the responder.
    Send {
        /// The mkey.
        invalidate: Option<u32>,
    },
    /// Writes to memory; with immediate data it also consumes a receive.
    Write {
        /// Remote address.
        address: u64,
        /// Remote key.
        key: u32,
    },
    /// Reads from memory.
    Read {
        /// Remote address.
        address: u64,
        /// Remote key.
        key: u32,
        /// Length in bytes.
        len: u64,
    },
    /// Changes a word of memory.
    Atomic {
        /// Remote address.
        address: u64,
        /// Remote key.
        key: u32,
        /// Bytes of the word: 4 or 8.
        len: u64,
        /// The operation on the word.
        change: Atomic,
    },
}

/// The responder's answer to a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Response {
    /// The message was executed.
    Ack,
    /// As [`Response::Ack`], with the data that was read: [`Answer::data`].
    ReadData,
    /// As [`Response::Ack`], with the old value.
    AtomicResult(u64),
    /// No receive is posted (RNR): the requester retries after the time of this timer code.
    RnrNak(u8),
    /// NAK: invalid request.
    InvalidRequest,
    /// NAK: remote access error.
    AccessError,
    /// NAK: remote operational error.
    OperationError,
    /// No response.
    Lost,
}

impl Response {
    /// The reason why the message was not acknowledged; `None` if it was.
    pub(crate) fn refusal(&self) -> Option<Refusal> {
        Some(match self {
            Self::Ack | Self::ReadData | Self::AtomicResult(_) => return None,
            Self::RnrNak(_) => Refusal::RnrNak,
            Self::InvalidRequest => Refusal::InvalidRequest,
            Self::AccessError => Refusal::AccessError,
            Self::OperationError => Refusal::OperationError,
            Self::Lost => Refusal::Lost,
        })
    }
}

impl Device {
    /// Records the fate that a test has given to a message of a queue.
    pub(crate) fn record_fate(&mut self, number: u32, fate: MessageFate) {
        let late = match fate {
            MessageFate::Delivered => return,
            MessageFate::Lost => None,
            MessageFate::Delayed(wait) => Some(wait),
        };
        self.recorder.add(self.now, &Entry::Fate { number, late });
    }

    /// Records that a message of a queue was not acknowledged.
    pub(crate) fn record_refusal(&mut self, number: u32, response: &Response) {
        if let Some(why) = response.refusal() {
            self.recorder.add(self.now, &Entry::Refusal { number, why });
        }
    }
}
