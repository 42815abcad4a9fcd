//! The end of a request, with the memory that it worked on.

use super::buffer::Buffer;
use super::lending::{Lent, Memory, OtherLoan, memory_and_tag};
use crate::completion::Completion;
use crate::lending::compact_enum::{CompactEnum, Content};
use crate::lending::loan_table::ReturnedLoan;
use crate::number::{Qpn, Rkey};
use crate::wc::{WcOpcode, WcStatus};
use std::fmt;

/// A request that is over, with the memory that it worked on.
///
/// A [poll](super::OwnedCompletionQueue::poll) of owned queues returns `Finished<Memory, T>`. The value of a future is
/// `Finished<M>`, and its request succeeded.
#[derive(Debug)]
pub struct Finished<M, T = ()> {
    /// The memory that the request worked on. After a future's receive, a [`Buffer`] is as long as its message.
    pub memory: M,
    /// The value that the request was pushed with; `()` for a future.
    pub tag: T,
    /// How the request ended.
    pub outcome: Outcome,
}

/// A request that is over, as [`poll_each`](super::OwnedCompletionQueue::poll_each) shows it: its memory is
/// still in the loan table, and its completion still in the completion queue, and both are read only when
/// the visitor asks. Memory that the visitor does not take is dropped.
///
/// ```no_run
/// # use uverbs::{WcOpcode, owned::*};
/// # fn f(cq: &mut OwnedCompletionQueue<u32>) -> Result<(), uverbs::PollError> {
/// let (mut kept, mut free) = (Vec::new(), Vec::new());
/// cq.poll_each(64, |completion: VisitedCompletion<'_, u32>| {
///     if !completion.is_success() {
///         println!("{:?}: {} ({:?})", completion.tag(), completion.status(), completion.outcome());
///     } else if completion.opcode() == WcOpcode::RECV {
///         println!("{} bytes, {} of them in memory", completion.byte_len(), completion.filled());
///         // All of it, to be looked at later.
///         kept.extend(completion.into_owned());
///     } else if let Ok((buffer, _tag)) = completion.into_buffer() {
///         free.push(buffer);
///     }
/// })?;
/// # Ok(()) }
/// ```
#[must_use = "it holds the memory of the request"]
pub struct VisitedCompletion<'c, T> {
    loan: ReturnedLoan<'c, Lent<T>>,
    // Most visitors ask for these two.
    status: WcStatus,
    opcode: WcOpcode,
    end: CompletionSource<'c>,
}

/// The rest of how a request ended: in the completion queue, or copied from it earlier.
#[derive(Debug)]
enum CompletionSource<'c> {
    InQueue(Completion<'c>),
    Copied(Outcome),
}

impl<'c, T> VisitedCompletion<'c, T> {
    /// A request that succeeded, as the caller has checked.
    #[inline(always)]
    pub(crate) fn success(loan: ReturnedLoan<'c, Lent<T>>, completion: Completion<'c>) -> Self {
        let (status, opcode) = (WcStatus::SUCCESS, completion.opcode());
        VisitedCompletion { loan, status, opcode, end: CompletionSource::InQueue(completion) }
    }

    #[inline(always)]
    pub(super) fn in_queue(loan: ReturnedLoan<'c, Lent<T>>, completion: Completion<'c>) -> Self {
        let (status, opcode) = (completion.status(), completion.opcode());
        VisitedCompletion { loan, status, opcode, end: CompletionSource::InQueue(completion) }
    }

    pub(crate) fn copied(loan: ReturnedLoan<'c, Lent<T>>, outcome: Outcome) -> Self {
        let Outcome { status, opcode, .. } = outcome;
        VisitedCompletion { loan, status, opcode, end: CompletionSource::Copied(outcome) }
    }

    /// The tag that the request was pushed with.
    #[inline(always)]
    pub fn tag(&self) -> Option<&T> {
        match self.loan.get().get() {
            Content::Small(_, (_, tag))
            | Content::Large(OtherLoan::Owned(_, tag) | OtherLoan::Unsignaled { tag, .. }) => {
                Some(tag)
            }
            // A visitor never sees one.
            Content::Large(OtherLoan::Scoped) => None,
        }
    }

    /// Memory and tag, where they are.
    pub(crate) fn into_loan(self) -> ReturnedLoan<'c, Lent<T>> {
        self.loan
    }

    /// How the request ended.
    #[inline(always)]
    pub fn status(&self) -> WcStatus {
        self.status
    }

    /// Whether the request succeeded.
    #[inline(always)]
    pub fn is_success(&self) -> bool {
        self.status() == WcStatus::SUCCESS
    }

    /// The kind of the request; undefined unless it succeeded.
    #[inline(always)]
    pub fn opcode(&self) -> WcOpcode {
        self.opcode
    }

    /// Bytes received, or returned by a read or atomic; see [`Completion::byte_len`].
    #[inline(always)]
    pub fn byte_len(&self) -> u32 {
        match &self.end {
            CompletionSource::InQueue(completion) => completion.byte_len(),
            CompletionSource::Copied(outcome) => outcome.byte_len,
        }
    }

    /// How many bytes of its memory the device wrote; see [`Outcome::filled`].
    #[inline]
    pub fn filled(&self) -> usize {
        filled(self.status, self.opcode, self.byte_len())
    }

    /// A copy of everything that the completion says.
    #[inline(always)]
    pub fn outcome(&self) -> Outcome {
        match &self.end {
            CompletionSource::InQueue(completion) if self.is_success() => {
                Outcome::of_success(completion)
            }
            CompletionSource::InQueue(completion) => Outcome::of(completion),
            CompletionSource::Copied(outcome) => *outcome,
        }
    }

    /// The buffer that the request worked on, and its tag.
    ///
    /// # Errors
    ///
    /// The completion itself, of a request that worked on no [`Buffer`].
    #[inline(always)]
    pub fn into_buffer(self) -> std::result::Result<(Buffer, T), Self> {
        let VisitedCompletion { loan, status, opcode, end } = self;
        match loan.take_small() {
            Ok((buffer, (range, tag))) => Ok((Buffer::of(buffer, range), tag)),
            Err(loan) => VisitedCompletion { loan, status, opcode, end }.into_large_buffer(),
        }
    }

    /// The same for an unsignaled request.
    #[cold]
    fn into_large_buffer(mut self) -> std::result::Result<(Buffer, T), Self> {
        let empty = CompactEnum::new(Content::Large(OtherLoan::Scoped));
        let other = match std::mem::replace(self.loan.get_mut(), empty).open() {
            Content::Large(OtherLoan::Unsignaled {
                memory: Memory::Buffer(buffer), tag, ..
            }) => {
                return Ok((buffer, tag));
            }
            other => other,
        };
        *self.loan.get_mut() = CompactEnum::new(other);
        Err(self)
    }

    /// Memory, tag and a copy of the completion, to keep.
    #[must_use = "it holds the memory of the request"]
    pub fn into_owned(self) -> Option<Finished<Memory, T>> {
        let outcome = self.outcome();
        let (memory, tag) = memory_and_tag(self.loan.take())?;
        Some(Finished { memory, tag, outcome })
    }
}

impl<T: fmt::Debug> fmt::Debug for VisitedCompletion<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VisitedCompletion")
            .field("tag", &self.tag())
            .field("end", &self.end)
            .finish()
    }
}

/// How a request ended: a [`Completion`], copied.
///
/// ```no_run
/// use uverbs::owned::{Finished, Memory, Outcome};
///
/// /// Whatever was received, in a buffer as long as the longest message.
/// fn received(done: Finished<Memory, u64>) {
///     let outcome: Outcome = done.outcome;
///     if !outcome.is_success() {
///         return println!("receive {}: {} ({:#x})", done.tag, outcome.status, outcome.vendor_err());
///     }
///     if let Some(buffer) = done.memory.into_buffer() {
///         println!("{} says {:?}", outcome.qpn, &buffer[..outcome.filled()]);
///     }
/// }
/// ```
#[derive(Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Outcome {
    /// How the request ended. Unless this is [`WcStatus::SUCCESS`], only `qpn` and [`vendor_err`](Self::vendor_err) are
    /// defined beside it.
    pub status: WcStatus,
    /// The kind of the request.
    pub opcode: WcOpcode,
    /// Bytes received, or returned by a read or atomic; see [`Completion::byte_len`].
    pub byte_len: u32,
    /// The queue pair that worked on the request.
    pub qpn: Qpn,
    /// Immediate data, a key or the device's code of an error.
    detail: u32,
    /// The sending queue pair in 24 bits, and the flags below.
    source: u32,
}

/// Set in [`Outcome::source`] if `detail` is immediate data.
const IMM: u32 = 1 << 24;
/// Set if `detail` is the key that the message invalidated.
const INVALIDATED: u32 = 1 << 25;
/// Set if a received datagram has a global route header.
const GRH: u32 = 1 << 26;

// The slot of a future's request holds it, and the future's value.
const _: () = assert!(size_of::<Outcome>() == 24);

impl Outcome {
    #[inline(always)]
    pub(crate) fn of(completion: &Completion<'_>) -> Outcome {
        match completion.status() {
            WcStatus::SUCCESS => Outcome::of_success(completion),
            status => {
                let new = Outcome::new(status, completion.opcode(), completion.qpn());
                Outcome { detail: completion.vendor_err(), ..new }
            }
        }
    }

    /// The outcome of a request that succeeded.
    #[inline(always)]
    fn of_success(completion: &Completion<'_>) -> Outcome {
        let new = Outcome::new(WcStatus::SUCCESS, completion.opcode(), completion.qpn());
        let (detail, kind) = match (completion.imm(), completion.invalidated_rkey()) {
            (Some(imm), _) => (imm, IMM),
            (None, Some(rkey)) => (rkey.0, INVALIDATED),
            (None, None) => (0, 0),
        };
        let grh = if completion.has_grh() { GRH } else { 0 };
        let source = completion.src_qpn().0 & (IMM - 1) | kind | grh;
        Outcome { byte_len: completion.byte_len(), detail, source, ..new }
    }

    /// The immediate data of the message.
    #[inline]
    pub fn imm(&self) -> Option<u32> {
        (self.source & IMM != 0).then_some(self.detail)
    }

    /// The key of this side that the message invalidated.
    #[inline]
    pub fn invalidated_rkey(&self) -> Option<Rkey> {
        (self.source & INVALIDATED != 0).then_some(Rkey(self.detail))
    }

    /// The sending queue pair, for receives of datagrams.
    #[inline]
    pub fn src_qpn(&self) -> Qpn {
        Qpn(self.source & (IMM - 1))
    }

    /// Whether the first 40 bytes of a received datagram hold a global route header.
    #[inline]
    pub fn has_grh(&self) -> bool {
        self.source & GRH != 0
    }

    /// The device's own code of an error; 0 where it has none.
    #[inline]
    pub fn vendor_err(&self) -> u32 {
        if self.is_success() { 0 } else { self.detail }
    }

    /// The outcome of a request that a reset discarded.
    pub(super) fn flushed(qpn: Qpn) -> Outcome {
        Outcome::new(WcStatus::WR_FLUSH_ERR, WcOpcode::SEND, qpn)
    }

    /// The outcome of an unsignaled request on the queue pair of `covering`, the completion that stands for
    /// it. If that is a failure, nothing is known of the requests before it.
    pub(super) fn covered(covering: &Outcome, opcode: WcOpcode, byte_len: u32) -> Outcome {
        match covering.is_success() {
            true => Outcome { byte_len, ..Outcome::new(covering.status, opcode, covering.qpn) },
            false => Outcome::new(WcStatus::WR_FLUSH_ERR, opcode, covering.qpn),
        }
    }

    /// An outcome with a status and nothing else.
    #[inline(always)]
    pub(crate) fn new(status: WcStatus, opcode: WcOpcode, qpn: Qpn) -> Outcome {
        Outcome { status, opcode, byte_len: 0, qpn, detail: 0, source: 0 }
    }

    /// Whether the request succeeded.
    pub fn is_success(&self) -> bool {
        self.status == WcStatus::SUCCESS
    }

    /// How many bytes the device wrote to the request's memory, from its beginning: the message of a receive,
    /// or what a read or an atomic returned. The bytes behind are what they were before.
    ///
    /// This is [`byte_len`](Self::byte_len), but 8 for an atomic, and 0 for a receive that a write with immediate data consumed
    /// (its bytes went elsewhere), for sends and writes, and for a request that failed. Of a datagram the
    /// first 40 bytes count, too: they hold a global route header, or where the device wrote none, what was
    /// there before. In a [`Buffer`] that is zeros.
    pub fn filled(&self) -> usize {
        filled(self.status, self.opcode, self.byte_len)
    }
}

impl fmt::Debug for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Outcome")
            .field("status", &self.status)
            .field("opcode", &self.opcode)
            .field("byte_len", &self.byte_len)
            .field("imm", &self.imm())
            .field("invalidated_rkey", &self.invalidated_rkey())
            .field("qpn", &self.qpn)
            .field("src_qpn", &self.src_qpn())
            .field("has_grh", &self.has_grh())
            .field("vendor_err", &self.vendor_err())
            .finish()
    }
}

fn filled(status: WcStatus, opcode: WcOpcode, byte_len: u32) -> usize {
    match opcode {
        _ if status != WcStatus::SUCCESS => 0,
        WcOpcode::RECV | WcOpcode::READ => byte_len as usize,
        // rxe's completion has the length of the request's memory, and the kernel writes 8 bytes of it.
        WcOpcode::COMPARE_SWAP | WcOpcode::FETCH_ADD => ATOMIC_BYTES,
        _ => 0,
    }
}

/// Bytes that an atomic returns.
const ATOMIC_BYTES: usize = 8;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_bytes_that_the_device_wrote_are_filled() {
        let of = |opcode| filled(WcStatus::SUCCESS, opcode, 4096);
        assert_eq!([WcOpcode::RECV, WcOpcode::READ].map(of), [4096; 2]);
        assert_eq!([WcOpcode::COMPARE_SWAP, WcOpcode::FETCH_ADD].map(of), [8; 2]);
        let others = [WcOpcode::SEND, WcOpcode::WRITE, WcOpcode::RECV_WRITE_IMM, WcOpcode::BIND_MW];
        assert_eq!(others.map(of), [0; 4]);
        assert_eq!(filled(WcStatus::WR_FLUSH_ERR, WcOpcode::FETCH_ADD, 8), 0);
    }
}
