//! Memory that can be lent to a request, and the lender of each queue.

use super::buffer::{Buffer, BufferRange, PoolBuffer, SharedBuffer};
use super::program_buffer::ProgramBuffer;
use super::region_slice::RegionSlice;
use crate::error::{Error, MemoryError, debug_is_sentence};
use crate::identity::Identity;
use crate::lending::compact_enum::{CompactEnum, Content};
use crate::lending::loan_table::lender::{FreeSlot, Lender, LoanBatch};
use crate::lending::loan_table::{LoanTable, ReturnedLoan};
use crate::mr::MemoryRegion;
use crate::pd::{KernelPd, ProtectionDomain, Sharing};
use crate::wc::WcOpcode;
use crate::wr::{PostError, Sge};
use std::fmt;
use std::ops::RangeBounds;
use std::sync::Arc;

/// The memory of a request, as its completion gives it back.
///
/// ```no_run
/// use uverbs::owned::{Memory, RegisteredBuffer};
///
/// /// Takes memory that is the device's no more.
/// fn back<B: RegisteredBuffer>(memory: Memory, free: &mut Vec<B>) {
///     match memory.into_program::<B>() {
///         Ok(own) => free.push(own),
///         // A buffer of a pool goes back to the pool when it is dropped.
///         Err(other) => drop(other.into_buffer()),
///     }
/// }
/// ```
#[derive(Debug)]
pub enum Memory {
    /// Nothing: the request had no data, or had it inline.
    None,
    /// A buffer of a pool.
    Buffer(Buffer),
    /// A buffer with other readers.
    Shared(SharedBuffer),
    /// A part of a region.
    Region(RegionSlice),
    /// A buffer of the program's own.
    Program(ProgramBuffer),
}

impl Memory {
    /// The buffer, if the request worked on a [`Buffer`].
    #[inline(always)]
    pub fn into_buffer(self) -> Option<Buffer> {
        Buffer::back(self)
    }
}

/// The bytes that a request names, as its memory said when it was asked; named by the sealed trait, and so by no
/// program.
#[derive(Clone, Copy, Debug)]
pub struct NamedBytes {
    pub(super) sge: Option<RegionSge>,
    pub(super) is_writable: bool,
}

/// Memory that was asked before, so that lending it runs no code of the program: for a caller that holds a lock.
#[derive(Debug)]
pub(crate) struct AskedMemory {
    pub(crate) memory: Memory,
    pub(crate) named: NamedBytes,
}

impl AskedMemory {
    /// The memory as it was before it was lent.
    pub(crate) fn back<L: Lend>(self) -> Option<L> {
        L::back(self.memory)
    }
}

/// An [`Sge`] together with the protection domain that its key belongs to.
///
/// A plain value, which keeps nothing alive; a [`RegisteredBuffer`](super::RegisteredBuffer) returns it.
///
/// ```no_run
/// # fn f(pd: &uverbs::ProtectionDomain, region: &uverbs::MemoryRegion<u8>) -> Result<(), uverbs::MemoryError> {
/// use uverbs::owned::RegionSge;
///
/// let whole = RegionSge::new(region, ..)?;
/// let second_page = whole.slice(4096..8192).expect("the region is longer");
/// println!("{:?}", second_page.sge());
/// // Of a region that was registered by other means.
/// let same = RegionSge::in_domain(pd, second_page.sge());
/// # let _ = same; Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionSge {
    pub(super) sge: Sge,
    pub(super) domain: Identity,
}

impl RegionSge {
    /// The bytes `range` of `region`, counted from its beginning.
    ///
    /// # Errors
    ///
    /// [`MemoryError::OutOfRange`], also for more than 2^32 - 1 bytes; [`MemoryError::Dead`].
    pub fn new<T, M>(
        region: &MemoryRegion<T, M>,
        range: impl RangeBounds<usize>,
    ) -> Result<RegionSge, MemoryError> {
        let domain = Identity::of(&region.inner.pd.kernel);
        Ok(RegionSge { sge: region.sge(range)?, domain })
    }

    /// An [`Sge`] whose key is valid in `pd`, for memory that no [`MemoryRegion`] stands for.
    pub fn in_domain<S: Sharing>(pd: &ProtectionDomain<S>, sge: Sge) -> RegionSge {
        RegionSge { sge, domain: Identity::of(&pd.inner.kernel) }
    }

    /// Address, length and key, as a request carries them.
    pub fn sge(&self) -> Sge {
        self.sge
    }

    /// A part of the same memory; `None` if the range does not lie in it, or begins beyond the last address.
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Option<RegionSge> {
        let (offset, length) = crate::mr::resolve(range, self.sge.length as usize).ok()?;
        // The program may have named any address in `in_domain`.
        let addr = self.sge.addr.checked_add(offset as u64)?;
        let sge = Sge { addr, length: length as u32, ..self.sge };
        Some(RegionSge { sge, ..*self })
    }
}

/// Bytes that a global route header takes in front of a received datagram.
const GRH_BYTES: usize = 40;

mod sealed {
    use super::{NamedBytes, PushError, RegionSge, RequestSlot};
    use crate::wr::{PostError, Sge};

    /// Memory that a request can name.
    pub trait HasSge {
        /// The scatter/gather element of the request; `None` if it names no memory.
        fn region_sge(&self) -> Option<RegionSge>;

        /// Clears the bytes that a global route header goes to. A device may write them in part or not at
        /// all, and the program must not take the bytes of an earlier holder for a header.
        fn clear_grh(&mut self) {}

        /// The answer of memory that only code of the program knows: it may panic, and must not run under a lock.
        #[inline(always)]
        fn named(&self) -> Option<NamedBytes> {
            None
        }

        /// Whether it is such memory, which [`named`](Self::named) asks. Only [`Memory`](super::Memory) looks at its
        /// value; of any other type it is a constant.
        #[inline(always)]
        fn must_be_asked(&self) -> bool {
            false
        }
    }

    /// Appends a request to a batch.
    pub trait Append {
        fn append(self, wr_id: u64, memory: Option<Sge>) -> Result<(), PostError>;
    }

    /// Memory that is lent in a slot of the loan table.
    pub trait LendInSlot: HasSge + Sized {
        /// Lends the memory, and appends the request that works on it.
        fn lend_in_slot<T, A: Append>(
            self,
            slot: RequestSlot<'_, T>,
            tag: T,
            append: A,
        ) -> Result<(), PushError<Self, T>>;
    }
}

pub(super) use sealed::{Append, HasSge, LendInSlot};

/// Memory that can be lent to a request: [`Buffer`], [`SharedBuffer`], [`RegionSlice`], a program's own
/// [`RegisteredBuffer`](super::RegisteredBuffer), any of them as [`Memory`], and `()` for a request
/// without data.
///
/// The trait is sealed: a program that has its own memory implements `RegisteredBuffer`.
///
/// Memory of several kinds in one list, out of which requests take what suits them:
///
/// ```no_run
/// # use uverbs::{PostError, Remote, SendWr};
/// # fn f(batch: &mut uverbs::owned::OwnedSendBatch<'_, u32>, page: uverbs::owned::SharedBuffer,
/// #     part: uverbs::owned::RegionSlice, from: Remote) -> Result<(), PostError> {
/// use uverbs::owned::{Lend, Memory, SharedBuffer};
///
/// let mut spare: Vec<Memory> = vec![page.into_memory(), part.into_memory()];
/// // A read needs memory that nobody else reads.
/// if let Some(at) = spare.iter().position(Lend::is_writable) {
///     batch.push(SendWr::read(from, &[]), spare.swap_remove(at), 1)?;
/// }
/// // What is left of shared buffers has its type again.
/// let pages: Vec<SharedBuffer> = spare.into_iter().filter_map(Lend::back).collect();
/// # drop(pages); Ok(()) }
/// ```
pub trait Lend: LendInSlot + Send + 'static {
    /// The memory as a completion gives it back.
    fn into_memory(self) -> Memory;

    /// The memory as it was before it was lent; `None` if `memory` is of another type.
    fn back(memory: Memory) -> Option<Self>;

    /// Whether a device may write the memory. It may not write a [`SharedBuffer`], which others may be
    /// reading.
    #[inline(always)]
    fn is_writable(&self) -> bool {
        true
    }
}

/// Memory that a device may write: everything that can be lent and has no other readers.
pub trait LendMut: Lend {}

/// A request that was not posted, with the memory that was to be lent to it.
///
/// ```no_run
/// # use std::collections::VecDeque;
/// # use uverbs::{PostError, SendWr, owned::{Buffer, OwnedSendBatch}};
/// # fn f(batch: &mut OwnedSendBatch<'_, u32>, message: Buffer, later: &mut VecDeque<(Buffer, u32)>)
/// # -> Result<(), PostError> {
/// use uverbs::owned::PushError;
///
/// match batch.push(SendWr::send(&[]), message, 7) {
///     Ok(()) => {}
///     // Push it again after a poll has made room.
///     Err(PushError { memory, tag, error: PostError::Full }) => later.push_back((memory, tag)),
///     // The device would refuse this request at any time: its memory is free for another.
///     Err(PushError { memory, tag, error }) => {
///         println!("request {tag} of {} bytes: {error}", memory.len());
///         return Err(error);
///     }
/// }
/// # Ok(()) }
/// ```
pub struct PushError<L, T> {
    /// The memory.
    pub memory: L,
    /// The tag that the completion would have given back.
    pub tag: T,
    /// Why the request was not posted.
    pub error: PostError,
}

impl<L, T> PushError<L, T> {
    /// The memory alone.
    #[inline(always)]
    pub(crate) fn into_memory(self) -> L {
        self.memory
    }
}

debug_is_sentence!(PushError<L, T>);

impl<L, T> fmt::Display for PushError<L, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl<L, T> std::error::Error for PushError<L, T> {}

impl<L, T> From<PushError<L, T>> for Error {
    fn from(refused: PushError<L, T>) -> Error {
        refused.error.into()
    }
}

impl<L, T> From<PushError<L, T>> for PostError {
    fn from(refused: PushError<L, T>) -> PostError {
        refused.error
    }
}

/// The loan of one request: in most cases a buffer and the request's tag.
pub(crate) type Lent<T> = CompactEnum<PoolBuffer, (BufferRange, T), OtherLoan<T>>;

/// A loan that is not only a buffer.
#[derive(Debug)]
pub(crate) enum OtherLoan<T> {
    /// Memory, and the request's tag.
    Owned(Memory, T),
    /// Memory and tag of an unsignaled request, with what its completion would have said.
    Unsignaled { memory: Memory, tag: T, opcode: WcOpcode, byte_len: u32 },
    /// Memory that a scope borrows.
    Scoped,
}

/// The loan table of one queue.
pub(crate) type Loans<T> = LoanTable<Lent<T>>;

/// A loan of `memory` with the tag of its request.
#[inline(always)]
pub(crate) fn lent<T>(memory: Memory, tag: T) -> Lent<T> {
    CompactEnum::new(match memory {
        Memory::Buffer(buffer) => {
            let (buffer, range) = buffer.into_parts();
            Content::Small(buffer, (range, tag))
        }
        other => Content::Large(OtherLoan::Owned(other, tag)),
    })
}

/// The memory and the tag of a loan; `None` for a loan of a scope.
#[inline(always)]
pub(crate) fn memory_and_tag<T>(lent: Lent<T>) -> Option<(Memory, T)> {
    match lent.open() {
        Content::Small(buffer, (range, tag)) => {
            Some((Memory::Buffer(Buffer::of(buffer, range)), tag))
        }
        Content::Large(OtherLoan::Owned(memory, tag)) => Some((memory, tag)),
        Content::Large(OtherLoan::Unsignaled { memory, tag, .. }) => Some((memory, tag)),
        Content::Large(OtherLoan::Scoped) => None,
    }
}

/// Buffer and tag of a loan, and a guard that frees its slot when it is dropped; `Err` with any other loan.
#[inline(always)]
pub(crate) fn open_buffer<T>(
    loan: ReturnedLoan<'_, Lent<T>>,
) -> Result<(Buffer, T, impl Drop + use<'_, T>), ReturnedLoan<'_, Lent<T>>> {
    let ((buffer, (range, tag)), slot) = loan.open_small()?;
    Ok((Buffer::of(buffer, range), tag, slot))
}

/// The tag of a loan, to be changed; `None` for a loan of a scope.
#[inline(always)]
pub(crate) fn tag_mut<T>(lent: &mut Lent<T>) -> Option<&mut T> {
    match lent.get_mut() {
        Content::Small(_, (_, tag))
        | Content::Large(OtherLoan::Owned(_, tag) | OtherLoan::Unsignaled { tag, .. }) => Some(tag),
        Content::Large(OtherLoan::Scoped) => None,
    }
}

/// The lender of one queue.
#[derive(Debug)]
pub(super) struct QueueLender<T> {
    lender: Lender<Lent<T>>,
    /// The protection domain whose memory the queue's requests may name.
    domain: Identity,
    /// The domain whose memory a receive takes as it is: `domain`, or none where datagrams may arrive, each
    /// behind a global route header.
    as_is: Identity,
    _domain: Arc<KernelPd>,
}

impl<T> QueueLender<T> {
    /// The lender of a queue of `depth` requests; `flag` is set in every `wr_id`.
    pub(super) fn new(depth: u32, flag: u64, domain: &Arc<KernelPd>) -> Self {
        let lender = Lender::new(depth, flag);
        let (domain, _domain) = (Identity::of(domain), domain.clone());
        QueueLender { lender, domain, as_is: domain, _domain }
    }

    /// The same for a shared receive queue: it completes in any order, and datagrams may arrive.
    pub(super) fn shared(depth: u32, flag: u64, domain: &Arc<KernelPd>) -> Self {
        QueueLender::new(depth, flag, domain).with_datagrams(true).in_any_order()
    }

    /// Of requests that may complete in another order than that of posting.
    pub(super) fn in_any_order(self) -> Self {
        QueueLender { lender: self.lender.in_any_order(), ..self }
    }

    /// Says whether loans may settle alone.
    pub(super) fn with_loans_settling_alone(self, may_settle_alone: bool) -> Self {
        QueueLender { lender: self.lender.with_loans_settling_alone(may_settle_alone), ..self }
    }

    /// Says whether datagrams may arrive here.
    pub(super) fn with_datagrams(self, takes_datagrams: bool) -> Self {
        let as_is = if takes_datagrams { Identity::default() } else { self.domain };
        QueueLender { as_is, ..self }
    }

    pub(super) fn loans(&self) -> &Loans<T> {
        self.lender.table()
    }

    /// Requests that can be posted before one completes.
    pub(super) fn room(&mut self) -> usize {
        self.lender.room()
    }

    /// Takes back what was lent to forgotten batches, which the device was not told of, and adds it to `to`.
    pub(super) fn take_unposted(&mut self, to: &mut Vec<Lent<T>>) {
        self.lender.take_unposted(to);
    }

    /// Starts to lend to a batch.
    #[inline(always)]
    pub(super) fn begin(&mut self) -> BatchLender<'_, T> {
        let (domain, as_is) = (&self.domain, &self.as_is);
        BatchLender { loans: self.lender.begin(), domain, as_is }
    }
}

/// The loans of a batch that was not rung. Dropping it takes them back.
#[derive(Debug)]
pub(super) struct BatchLender<'q, T> {
    pub(super) loans: LoanBatch<'q, Lent<T>>,
    domain: &'q Identity,
    /// [`QueueLender::as_is`].
    as_is: &'q Identity,
}

impl<T> BatchLender<'_, T> {
    /// Whether the memory's key belongs to the queue's protection domain.
    #[inline(always)]
    pub(super) fn knows(&self, memory: &impl HasSge) -> bool {
        memory.region_sge().is_none_or(|known| known.domain == *self.domain)
    }

    /// Prepares memory for a receive. `false` if its key belongs to another protection domain.
    #[inline(always)]
    pub(super) fn prepare_recv(&self, memory: &mut impl HasSge) -> bool {
        // One comparison says both that the memory is known and that it needs no preparation.
        if memory.region_sge().is_none_or(|known| known.domain == *self.as_is) {
            return true;
        }
        let knows = self.knows(memory);
        if knows {
            memory.clear_grh();
        }
        knows
    }

    /// A slot for the next request.
    #[inline(always)]
    pub(super) fn free_slot(&mut self) -> Result<FreeSlot<'_, Lent<T>>, PostError> {
        self.loans.free_slot().map_err(PostError::no_room)
    }

    /// The slot behind that of the last request.
    #[inline(always)]
    pub(super) fn next_slot(&mut self) -> Result<FreeSlot<'_, Lent<T>>, PostError> {
        self.loans.next_slot().map_err(PostError::no_room)
    }
}

/// A free slot of the loan table, for a request; named by the sealed trait, and so by no program.
pub struct RequestSlot<'d, T>(pub(super) FreeSlot<'d, Lent<T>>);

/// The [`Sge`] of the memory.
#[inline(always)]
pub(super) fn sge_of(memory: &impl HasSge) -> Option<Sge> {
    memory.region_sge().map(|known| known.sge)
}

/// Lends memory that is no buffer of a pool.
#[inline(always)]
pub(super) fn lend_in_slot<L: Lend, T, A: Append>(
    memory: L,
    RequestSlot(slot): RequestSlot<'_, T>,
    tag: T,
    append: A,
) -> Result<(), PushError<L, T>> {
    match append.append(slot.wr_id(), sge_of(&memory)) {
        Ok(()) => {
            slot.lend(lent(memory.into_memory(), tag));
            Ok(())
        }
        Err(error) => Err(PushError { memory, tag, error }),
    }
}

/// A buffer is lent before its request is written: see [`FreeSlot::fill`].
impl LendInSlot for Buffer {
    #[inline(always)]
    fn lend_in_slot<T, A: Append>(
        self,
        RequestSlot(slot): RequestSlot<'_, T>,
        tag: T,
        append: A,
    ) -> Result<(), PushError<Self, T>> {
        let (wr_id, sge) = (slot.wr_id(), self.sge());
        let (buffer, range) = self.into_parts();
        let filled = slot.fill(buffer, (range, tag));
        match append.append(wr_id, Some(sge)) {
            Ok(()) => {
                filled.keep();
                Ok(())
            }
            Err(error) => {
                let (buffer, (range, tag)) = filled.undo();
                Err(PushError { memory: Buffer::of(buffer, range), tag, error })
            }
        }
    }
}

macro_rules! lend_in_slot {
    ($($memory:ty)*) => {$(
        impl LendInSlot for $memory {
            #[inline(always)]
            fn lend_in_slot<T, A: Append>(
                self,
                slot: RequestSlot<'_, T>,
                tag: T,
                append: A,
            ) -> Result<(), PushError<Self, T>> {
                lend_in_slot(self, slot, tag, append)
            }
        }
    )*};
}

lend_in_slot!(() SharedBuffer RegionSlice Memory AskedMemory);

macro_rules! lend {
    ($($memory:ty => $variant:ident, $writable:literal;)*) => {$(
        impl Lend for $memory {
            #[inline(always)]
            fn into_memory(self) -> Memory {
                Memory::$variant(self)
            }

            #[inline(always)]
            fn back(memory: Memory) -> Option<Self> {
                match memory {
                    Memory::$variant(memory) => Some(memory),
                    _ => None,
                }
            }

            #[inline(always)]
            fn is_writable(&self) -> bool {
                $writable
            }
        }
    )*};
}

lend! {
    Buffer => Buffer, true;
    SharedBuffer => Shared, false;
    RegionSlice => Region, true;
}

impl LendMut for Buffer {}
impl LendMut for RegionSlice {}

impl HasSge for Buffer {
    #[inline(always)]
    fn region_sge(&self) -> Option<RegionSge> {
        Some(Buffer::region_sge(self))
    }

    #[inline(always)]
    fn clear_grh(&mut self) {
        clear_first(self, GRH_BYTES);
    }
}

/// Clears the first `most` bytes. Out of line: most receives are of queues without datagrams.
#[cold]
#[inline(never)]
fn clear_first(bytes: &mut [u8], most: usize) {
    bytes.iter_mut().take(most).for_each(|byte| *byte = 0);
}

impl HasSge for SharedBuffer {
    #[inline(always)]
    fn region_sge(&self) -> Option<RegionSge> {
        Some(SharedBuffer::region_sge(self))
    }
}

impl HasSge for () {
    #[inline(always)]
    fn region_sge(&self) -> Option<RegionSge> {
        None
    }
}

impl Lend for () {
    #[inline(always)]
    fn into_memory(self) -> Memory {
        Memory::None
    }

    #[inline(always)]
    fn back(memory: Memory) -> Option<Self> {
        matches!(memory, Memory::None).then_some(())
    }
}

impl LendMut for () {}

impl HasSge for Memory {
    #[inline(always)]
    fn region_sge(&self) -> Option<RegionSge> {
        match self {
            Memory::None => None,
            Memory::Buffer(buffer) => Some(buffer.region_sge()),
            Memory::Shared(buffer) => Some(buffer.region_sge()),
            Memory::Region(slice) => slice.region_sge(),
            Memory::Program(buffer) => buffer.region_sge(),
        }
    }

    #[inline]
    fn clear_grh(&mut self) {
        if let Memory::Buffer(buffer) = self {
            buffer.clear_grh();
        }
    }

    #[inline]
    fn named(&self) -> Option<NamedBytes> {
        match self {
            Memory::Program(buffer) => Some(buffer.named_bytes()),
            _ => None,
        }
    }

    #[inline(always)]
    fn must_be_asked(&self) -> bool {
        matches!(self, Memory::Program(_))
    }
}

impl Lend for Memory {
    #[inline(always)]
    fn into_memory(self) -> Memory {
        self
    }

    #[inline(always)]
    fn back(memory: Memory) -> Option<Self> {
        Some(memory)
    }

    #[inline(always)]
    fn is_writable(&self) -> bool {
        match self {
            Memory::None | Memory::Buffer(_) | Memory::Region(_) => true,
            Memory::Shared(_) => false,
            Memory::Program(buffer) => buffer.is_writable(),
        }
    }
}

impl HasSge for AskedMemory {
    #[inline]
    fn region_sge(&self) -> Option<RegionSge> {
        self.named.sge
    }

    #[inline]
    fn clear_grh(&mut self) {
        self.memory.clear_grh();
    }
}

impl Lend for AskedMemory {
    #[inline]
    fn into_memory(self) -> Memory {
        self.memory
    }

    fn back(memory: Memory) -> Option<Self> {
        let named = memory.named()?;
        Some(AskedMemory { memory, named })
    }

    #[inline]
    fn is_writable(&self) -> bool {
        self.named.is_writable
    }
}
