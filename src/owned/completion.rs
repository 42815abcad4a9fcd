//! What became of a request, with the memory that it worked on.

use super::buffer::Buffer;
use super::memory::Memory;
use super::qp_map::{Entry, Rest, parts};
use crate::completion::Completion;
use crate::memory::compact_enum::Content;
use crate::memory::loan_table::Settling;
use crate::number::{Qpn, Rkey};
use crate::wc::{WcOpcode, WcStatus};
use std::fmt;

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

/// A request that is over, lent: its memory lies where it was lent, and what became of it where the
/// device wrote that, until somebody asks. Memory that nobody takes is dropped.
#[must_use = "it holds the memory of the request"]
pub struct Settled<'c, T> {
    place: Settling<'c, Entry<T>>,
    /// What most ask for, at hand.
    status: WcStatus,
    opcode: WcOpcode,
    end: End<'c>,
}

/// How a request ended, seen now or earlier.
#[derive(Debug)]
enum End<'c> {
    Lent(Completion<'c>),
    Kept(Outcome),
}

impl<'c, T> Settled<'c, T> {
    /// Of a request that succeeded, as who calls has seen.
    #[inline(always)]
    pub(super) fn good(place: Settling<'c, Entry<T>>, completion: Completion<'c>) -> Self {
        let (status, opcode) = (WcStatus::SUCCESS, completion.opcode());
        Settled { place, status, opcode, end: End::Lent(completion) }
    }

    #[inline(always)]
    pub(super) fn lent(place: Settling<'c, Entry<T>>, completion: Completion<'c>) -> Self {
        let (status, opcode) = (completion.status(), completion.opcode());
        Settled { place, status, opcode, end: End::Lent(completion) }
    }

    pub(super) fn kept(place: Settling<'c, Entry<T>>, outcome: Outcome) -> Self {
        let Outcome { status, opcode, .. } = outcome;
        Settled { place, status, opcode, end: End::Kept(outcome) }
    }

    /// What it was posted with.
    #[inline(always)]
    pub fn tag(&self) -> Option<&T> {
        match self.place.get().get() {
            Content::Small(_, (_, tag)) | Content::Large(Rest::Owned(_, tag)) => Some(tag),
            // Which nobody gets to see.
            Content::Large(Rest::Scoped) => None,
        }
    }

    /// How it ended.
    #[inline(always)]
    pub fn status(&self) -> WcStatus {
        self.status
    }

    /// Whether it succeeded.
    #[inline(always)]
    pub fn is_success(&self) -> bool {
        self.status() == WcStatus::SUCCESS
    }

    /// What kind of request it was.
    #[inline(always)]
    pub fn opcode(&self) -> WcOpcode {
        self.opcode
    }

    /// Bytes received, or returned by a read or atomic; see [`Completion::byte_len`].
    #[inline(always)]
    pub fn byte_len(&self) -> u32 {
        match &self.end {
            End::Lent(completion) => completion.byte_len(),
            End::Kept(outcome) => outcome.byte_len,
        }
    }

    /// How many bytes of its memory the device wrote; see [`Outcome::filled`].
    #[inline]
    pub fn filled(&self) -> usize {
        filled(self.status, self.opcode, self.byte_len())
    }

    /// All that is known of how it ended.
    #[inline(always)]
    pub fn outcome(&self) -> Outcome {
        match &self.end {
            End::Lent(completion) => Outcome::of(completion),
            End::Kept(outcome) => *outcome,
        }
    }

    /// The buffer that it worked on and what it was posted with; itself if it worked on something
    /// else.
    ///
    /// # Errors
    ///
    /// The request, which worked on no [`Buffer`].
    #[inline(always)]
    pub fn into_buffer(self) -> std::result::Result<(Buffer, T), Self> {
        let Settled { place, status, opcode, end } = self;
        match place.take_small() {
            Ok((piece, (extent, tag))) => Ok((Buffer::of(piece, extent), tag)),
            Err(place) => Err(Settled { place, status, opcode, end }),
        }
    }

    /// All of it, to keep.
    pub fn into_done(self) -> Option<Done<T>> {
        let outcome = self.outcome();
        let (memory, tag) = parts(self.place.take())?;
        Some(Done { memory, tag, outcome })
    }
}

impl<T: fmt::Debug> fmt::Debug for Settled<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Settled").field("tag", &self.tag()).field("end", &self.end).finish()
    }
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

    /// How many bytes of the request's memory, from its beginning, hold what the request brought: what
    /// was sent to a receive, and what a read or an atomic answered. The rest is what was there before.
    ///
    /// That is [`byte_len`](Self::byte_len), but 0 for a receive that a write with immediate data
    /// consumed, whose bytes were written elsewhere, for sends and writes, and for a request that failed.
    /// Of a datagram the first 40 bytes count: they are a global route header, or what was there before
    /// where the device wrote none. In a [`Buffer`] that is zeros.
    pub fn filled(&self) -> usize {
        filled(self.status, self.opcode, self.byte_len)
    }
}

fn filled(status: WcStatus, opcode: WcOpcode, byte_len: u32) -> usize {
    match opcode {
        WcOpcode::RECV | WcOpcode::READ | WcOpcode::COMPARE_SWAP | WcOpcode::FETCH_ADD
            if status == WcStatus::SUCCESS =>
        {
            byte_len as usize
        }
        _ => 0,
    }
}
