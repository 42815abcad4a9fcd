//! Buffers that a program registered itself, and lends by value.

use super::lending::{Append, HasSge, Lend, LendInSlot, LendMut, Memory, NamedBytes};
use super::lending::{PushError, RegionSge, RequestSlot, lend_in_slot};
use crate::lending::inline_any::InlineAny;
use std::any::Any;
use std::fmt;

/// A program's own registered buffer, which can be lent to requests by value.
///
/// It is for memory that is not the library's: pages of a cache, an arena, shared memory, memory of a
/// device. The request takes the value, and its completion gives the same value back
/// ([`Memory::into_program`], or the type itself from [`aio`](crate::aio)). A value has at most 32 bytes
/// and an alignment of at most 8; another does not compile and is to be put into a `Box`. Nothing is allocated.
///
/// ```no_run
/// use uverbs::owned::{OwnedQueuePair, RegionSge, RegisteredBuffer};
/// use uverbs::{MemoryRegion, PostError, Remote, SendWr};
///
/// /// A page of an arena that is registered once and stays until the program ends.
/// struct Page {
///     start: *mut u8,
///     sge: RegionSge,
/// }
///
/// // SAFETY: the allocator hands every page out once, and only `Page` leads to its bytes.
/// unsafe impl Send for Page {}
/// // SAFETY: `&Page` leads to none of the bytes.
/// unsafe impl Sync for Page {}
///
/// // SAFETY: the arena stays mapped and registered until the program ends, and the bytes of a page are
/// // reached by `&mut Page` only, which nobody has while the page is lent.
/// unsafe impl RegisteredBuffer for Page {
///     fn sge(&self) -> RegionSge {
///         self.sge
///     }
/// }
///
/// fn write(qp: &mut OwnedQueuePair<u64>, page: Page, to: Remote) -> uverbs::Result<()> {
///     let mut batch = qp.send_batch()?;
///     batch.push(SendWr::write(to, &[]), page, 1)?;
///     batch.ring()?;
///     Ok(())
/// }
/// ```
///
/// A value that is too large does not compile:
///
/// ```compile_fail,E0080
/// # use uverbs::owned::{OwnedQueuePair, RegionSge, RegisteredBuffer};
/// struct Large(RegionSge, [u64; 4]);
/// # unsafe impl RegisteredBuffer for Large { fn sge(&self) -> RegionSge { self.0 } }
/// # fn f(qp: &mut OwnedQueuePair<u64>, large: Large) {
/// # let mut batch = qp.send_batch().unwrap();
/// let _ = batch.push(uverbs::SendWr::send(&[]), large, 1);
/// # }
/// # let _: fn(&mut OwnedQueuePair<u64>, Large) = f;
/// ```
///
/// # Safety
///
/// The implementer promises, for the time from the call of `push` that takes a value until the library
/// gives the value back or drops it:
///
/// - **Valid.** The bytes that [`sge`](Self::sge) named stay allocated, and the region that the key names
///   stays registered, as it is, in the protection domain that the [`RegionSge`] was made of. Moving or
///   leaking the value changes neither.
/// - **Not borrowed.** For a request that writes the bytes (receives, reads, atomics) nobody in this
///   process accesses them. For all other requests nobody writes them. Peers and other devices may do what
///   the region's access flags allow, unless somebody holds a Rust reference to the bytes.
/// - **Constant.** [`sge`](Self::sge) and [`is_writable`](Self::is_writable) return the same until the value is
///   borrowed mutably: the library may ask before it lends the value.
///
/// The library gives a value back or drops it only when the device is done with it. If the kernel does not
/// confirm that, the value is leaked, and so must the memory be.
#[allow(unsafe_code, reason = "the obligation is the implementer's")]
pub unsafe trait RegisteredBuffer: Any + Send + Sync {
    /// The bytes that the next request works on. The library asks when a request is pushed, once or more
    /// often, and holds no lock meanwhile. If this panics, nothing is lent.
    fn sge(&self) -> RegionSge;

    /// Whether a device may write the bytes. If not, receives, reads and atomics fail with
    /// [`PostError::ReadOnly`](crate::PostError::ReadOnly).
    ///
    /// A file that is mapped read-only, and registered without [`LOCAL_WRITE`](crate::Access::LOCAL_WRITE):
    ///
    /// ```no_run
    /// use uverbs::PostError;
    /// use uverbs::owned::{OwnedQueuePair, PushError, RegionSge, RegisteredBuffer};
    ///
    /// struct FilePart(RegionSge);
    ///
    /// // SAFETY: the mapping and its region stay until the program ends, and nobody writes the file.
    /// unsafe impl RegisteredBuffer for FilePart {
    ///     fn sge(&self) -> RegionSge {
    ///         self.0
    ///     }
    ///
    ///     fn is_writable(&self) -> bool {
    ///         false
    ///     }
    /// }
    ///
    /// # fn f(qp: &mut OwnedQueuePair<u32>, part: FilePart) -> Result<(), PostError> {
    /// let mut batch = qp.recv_batch()?;
    /// // The device never learns of a receive that it could not execute.
    /// let Err(PushError { memory: part, error, .. }) = batch.push(part, 1) else { panic!("posted") };
    /// assert_eq!(error, PostError::ReadOnly);
    /// # drop(part); Ok(()) }
    /// ```
    fn is_writable(&self) -> bool {
        true
    }
}

/// A [`RegisteredBuffer`] whose type is known to the program only.
pub struct ProgramBuffer {
    value: InlineAny,
    /// The methods of the value's type.
    methods: Methods,
}

/// The questions of the library to a [`RegisteredBuffer`].
type Methods = fn(&(dyn Any + Send + Sync)) -> Option<(RegionSge, bool)>;

fn methods<B: RegisteredBuffer>(value: &(dyn Any + Send + Sync)) -> Option<(RegionSge, bool)> {
    let buffer = value.downcast_ref::<B>()?;
    Some((buffer.sge(), buffer.is_writable()))
}

impl ProgramBuffer {
    fn new<B: RegisteredBuffer>(buffer: B) -> ProgramBuffer {
        ProgramBuffer { value: InlineAny::new(buffer), methods: methods::<B> }
    }

    /// The buffer, if it is a `B`.
    ///
    /// A program with two kinds of buffers finds out which one a request gave back:
    ///
    /// ```no_run
    /// use uverbs::owned::{Memory, RegisteredBuffer};
    ///
    /// fn sort<Page: RegisteredBuffer, Row: RegisteredBuffer>(
    ///     memory: Memory,
    ///     pages: &mut Vec<Page>,
    ///     rows: &mut Vec<Row>,
    /// ) {
    ///     let Memory::Program(buffer) = memory else { return };
    ///     match buffer.downcast::<Page>() {
    ///         Ok(page) => pages.push(page),
    ///         Err(other) => rows.extend(other.downcast::<Row>().ok()),
    ///     }
    /// }
    /// ```
    ///
    /// # Errors
    ///
    /// The buffer itself, which is of another type.
    pub fn downcast<B: RegisteredBuffer>(self) -> Result<B, ProgramBuffer> {
        let ProgramBuffer { value, methods } = self;
        value.downcast().map_err(|value| ProgramBuffer { value, methods })
    }

    /// The bytes that a request would name, in one question.
    pub(super) fn named_bytes(&self) -> NamedBytes {
        match (self.methods)(self.value.get()) {
            Some((sge, is_writable)) => NamedBytes { sge: Some(sge), is_writable },
            None => NamedBytes { sge: None, is_writable: false },
        }
    }

    pub(super) fn is_writable(&self) -> bool {
        (self.methods)(self.value.get()).is_some_and(|(_, writable)| writable)
    }
}

impl Memory {
    /// The buffer, if the request worked on a program's own one of type `B`.
    ///
    /// # Errors
    ///
    /// The memory itself, which is something else.
    pub fn into_program<B: RegisteredBuffer>(self) -> Result<B, Memory> {
        match self {
            Memory::Program(buffer) => buffer.downcast().map_err(Memory::Program),
            other => Err(other),
        }
    }
}

impl HasSge for ProgramBuffer {
    fn region_sge(&self) -> Option<RegionSge> {
        (self.methods)(self.value.get()).map(|(sge, _)| sge)
    }
}

impl fmt::Debug for ProgramBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProgramBuffer").finish_non_exhaustive()
    }
}

impl<B: RegisteredBuffer> HasSge for B {
    #[inline(always)]
    fn region_sge(&self) -> Option<RegionSge> {
        Some(self.sge())
    }

    #[inline]
    fn named(&self) -> Option<NamedBytes> {
        Some(NamedBytes { sge: Some(self.sge()), is_writable: RegisteredBuffer::is_writable(self) })
    }

    #[inline(always)]
    fn must_be_asked(&self) -> bool {
        true
    }
}

impl<B: RegisteredBuffer> LendInSlot for B {
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

#[diagnostic::do_not_recommend]
impl<B: RegisteredBuffer> Lend for B {
    #[inline(always)]
    fn into_memory(self) -> Memory {
        Memory::Program(ProgramBuffer::new(self))
    }

    #[inline(always)]
    fn back(memory: Memory) -> Option<Self> {
        memory.into_program().ok()
    }

    #[inline(always)]
    fn is_writable(&self) -> bool {
        RegisteredBuffer::is_writable(self)
    }
}

#[diagnostic::do_not_recommend]
impl<B: RegisteredBuffer> LendMut for B {}
