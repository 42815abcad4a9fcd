//! Where a queue lends memory to its requests.

use super::buffer::{Buffer, Extent, Whole};
use super::memory::{Memory, Named};
use super::qp_map::{Entry, Lent, Rest};
use crate::identity::Identity;
use crate::memory::compact_enum::{CompactEnum, Content};
use crate::memory::loan_table::lender::{self, Lender, Lending, Vacancy};
use crate::pd::KernelPd;
use crate::wr::{PostError, Sge};
use std::fmt;
use std::sync::Arc;

/// A request that was not posted, with what was to be lent.
pub struct Refused<L, T> {
    /// What the request was to work on.
    pub memory: L,
    /// What it was to be posted with.
    pub tag: T,
    /// Why it was not posted.
    pub error: PostError,
}

impl<L, T> fmt::Debug for Refused<L, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Refused").field("error", &self.error).finish_non_exhaustive()
    }
}

impl<L, T> fmt::Display for Refused<L, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl<L, T> std::error::Error for Refused<L, T> {}

impl<L, T> From<Refused<L, T>> for PostError {
    fn from(refused: Refused<L, T>) -> PostError {
        refused.error
    }
}

/// The owner's side of what is lent to the requests of one queue.
#[derive(Debug)]
pub(super) struct Desk<T> {
    lender: Lender<Entry<T>>,
    /// Whose memory the queue knows.
    domain: Identity,
    _domain: Arc<KernelPd>,
    /// Datagrams may come here, each behind a header.
    headers: bool,
}

impl<T> Desk<T> {
    /// Of a queue that holds `depth` requests, all of whose tickets bear `mark`.
    pub(super) fn new(depth: u32, mark: u64, domain: &Arc<KernelPd>) -> Self {
        let lender = Lender::new(depth, mark);
        Desk { lender, domain: Identity::of(domain), _domain: domain.clone(), headers: false }
    }

    /// As [`new`](Self::new), of a queue that completes in any order, and for queue pairs of any kind.
    pub(super) fn shared(depth: u32, mark: u64, domain: &Arc<KernelPd>) -> Self {
        let desk = Desk::new(depth, mark, domain).with_headers(true);
        Desk { lender: desk.lender.out_of_turn(), ..desk }
    }

    /// Says whether datagrams may come here, each behind a header.
    pub(super) fn with_headers(self, headers: bool) -> Self {
        Desk { headers, ..self }
    }

    pub(super) fn lent(&self) -> &Lent<T> {
        self.lender.slots()
    }

    /// Requests that can be posted before one completes.
    pub(super) fn room(&mut self) -> usize {
        self.lender.room()
    }

    /// Takes back what was lent to a batch that was forgotten: the device knows nothing of it.
    pub(super) fn tidy(&mut self) {
        self.lender.tidy();
    }

    /// Starts to lend to a batch.
    #[inline(always)]
    pub(super) fn draft(&mut self) -> Draft<'_, T> {
        Draft { lending: self.lender.begin(), domain: &self.domain, headers: self.headers }
    }
}

/// What a batch in the making lends. Dropping it takes everything back.
#[derive(Debug)]
pub(super) struct Draft<'q, T> {
    lending: Lending<'q, Entry<T>>,
    domain: &'q Identity,
    headers: bool,
}

impl<T> Draft<'_, T> {
    /// Whether the queue knows `memory` by the number that requests name it by.
    #[inline(always)]
    pub(super) fn knows(&self, memory: &impl Named) -> bool {
        memory.name().is_none_or(|name| name.domain == *self.domain)
    }

    /// Whether a datagram may come, behind a header.
    #[inline(always)]
    pub(super) fn has_headers(&self) -> bool {
        self.headers
    }

    /// A place for what the next request of a scope works on, which polls tell from others.
    pub(super) fn place_apart(&mut self) -> Result<Place<'_, T>, PostError> {
        self.place().map(|Place { vacancy }| Place { vacancy: vacancy.apart() })
    }

    /// A place for what the next request works on.
    #[inline(always)]
    pub(super) fn place(&mut self) -> Result<Place<'_, T>, PostError> {
        match self.lending.vacancy() {
            Some(vacancy) => Ok(Place { vacancy }),
            None => Err(PostError::Full),
        }
    }

    /// How many requests it lends to: none, one, or at least two.
    #[inline(always)]
    pub(super) fn count(&self) -> u64 {
        self.lending.count()
    }

    /// The device has been told: what is lent stays lent until it completes.
    #[inline(always)]
    pub(super) fn rung(self) {
        self.lending.hand_over();
    }
}

/// Where something can be lent.
pub struct Place<'d, T> {
    vacancy: Vacancy<'d, Entry<T>>,
}

impl<'d, T> Place<'d, T> {
    /// The request's number.
    #[inline(always)]
    pub(super) fn ticket(&self) -> u64 {
        self.vacancy.ticket()
    }

    /// Lends a buffer to a request that is appended to the batch next, or it is [taken back](taken_back).
    #[inline(always)]
    pub(super) fn fill(self, buffer: Buffer, tag: T) -> Filled<'d, T> {
        let (piece, extent) = buffer.into_parts();
        self.vacancy.fill(piece, (extent, tag))
    }

    /// Lends to the request, which was appended to the batch.
    #[inline(always)]
    pub(super) fn lend(self, memory: Memory, tag: T) {
        match memory {
            Memory::Buffer(buffer) => self.fill(buffer, tag).lend(),
            other => self.vacancy.lend(CompactEnum::new(Content::Large(Rest::Owned(other, tag)))),
        }
    }

    /// The same for a request on memory that a scope borrows, in a place [apart](Draft::place_apart).
    pub(super) fn lend_scoped(self) {
        self.vacancy.lend(CompactEnum::new(Content::Large(Rest::Scoped)));
    }
}

/// A buffer that was lent, and whose request is not written yet.
type Filled<'d, T> = lender::Filled<'d, Whole, (Extent, T), Rest<T>>;

/// Takes back a buffer whose request could not be appended.
#[cold]
pub(super) fn taken_back<T>(filled: Filled<'_, T>) -> (Buffer, T) {
    let (piece, (extent, tag)) = filled.empty();
    (Buffer::of(piece, extent), tag)
}

/// What a request names.
#[inline(always)]
pub(super) fn named(memory: &impl Named) -> Option<Sge> {
    memory.name().map(|name| name.sge)
}
