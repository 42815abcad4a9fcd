//! What became of a request, with the memory that it worked on.

use super::memory::Memory;
use crate::completion::{Completion, WcOpcode, WcStatus};
use crate::number::{Qpn, Rkey};

/// A request that is over.
#[derive(Debug)]
#[must_use = "it holds the memory of the request"]
pub struct Done<T> {
    /// What the request worked on.
    pub memory: Memory,
    /// What it was posted with.
    pub tag: T,
    /// How it ended.
    pub outcome: Outcome,
}

/// How a request ended: a [`Completion`], copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Outcome {
    /// How the request ended. Unless it is [`WcStatus::SUCCESS`], only `qpn` and `vendor_err` mean
    /// anything beside it.
    pub status: WcStatus,
    /// What kind of request it was.
    pub opcode: WcOpcode,
    /// Bytes received, or returned by a read or atomic; see [`Completion::byte_len`].
    pub byte_len: u32,
    /// The immediate data of the message.
    pub imm: Option<u32>,
    /// The key of this side that the message invalidated.
    pub invalidated_rkey: Option<Rkey>,
    /// The queue pair that worked on it.
    pub qpn: Qpn,
    /// The sending queue pair; for receives of datagrams.
    pub src_qpn: Qpn,
    /// Whether the first 40 bytes of a received datagram hold a global route header.
    pub has_grh: bool,
    /// The device's own code for an error.
    pub vendor_err: u32,
}

impl Outcome {
    #[inline(always)]
    pub(crate) fn of(completion: &Completion<'_>) -> Outcome {
        Outcome {
            status: completion.status(),
            opcode: completion.opcode(),
            byte_len: completion.byte_len(),
            imm: completion.imm(),
            invalidated_rkey: completion.invalidated_rkey(),
            qpn: completion.qpn(),
            src_qpn: completion.src_qpn(),
            has_grh: completion.has_grh(),
            vendor_err: completion.vendor_err(),
        }
    }

    /// As of a request that was flushed.
    pub(super) fn flushed(qpn: Qpn) -> Outcome {
        Outcome::plain(WcStatus::WR_FLUSH_ERR, WcOpcode::SEND, qpn)
    }

    /// With nothing beside.
    pub(crate) fn plain(status: WcStatus, opcode: WcOpcode, qpn: Qpn) -> Outcome {
        Outcome {
            status,
            opcode,
            byte_len: 0,
            imm: None,
            invalidated_rkey: None,
            qpn,
            src_qpn: Qpn(0),
            has_grh: false,
            vendor_err: 0,
        }
    }

    /// Whether the request succeeded.
    pub fn is_success(&self) -> bool {
        self.status == WcStatus::SUCCESS
    }
}
