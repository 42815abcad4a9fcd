//! The reasons why a request is refused when it is posted, and why a batch is not sent when it is rung. A
//! later failure of a request is a [`WcStatus`](crate::WcStatus).

use crate::error::{Error, debug_is_sentence};
use crate::qp::state::QpState;
use rustix::io::Errno;
use std::fmt;

/// The reason why a request could not be posted. Nothing of it reaches the device, so its memory is the caller's.
///
/// [`Ring`](Self::Ring) is the exception: the requests of its batch may [stay queued](Self::stays_queued). The safe
/// calls that push and ring at once keep their memory lent as long as the device may work on it. Where the program
/// rings a batch itself, it keeps the memory, and `?` makes this of the [`RingError`]:
///
/// ```no_run
/// # use uverbs::{PostError, QueuePair, SendWr};
/// /// Sends, and tells whether there was room. The memory of `wr` is the program's again if this fails, unless the
/// /// request stays queued.
/// fn try_send(qp: &mut QueuePair, wr: SendWr<'_>) -> Result<bool, PostError> {
///     let mut batch = qp.send_batch()?;
///     match batch.push(wr) {
///         Err(PostError::Full) => return Ok(false),
///         other => other?,
///     }
///     // SAFETY: the caller keeps the memory until the request completed.
///     unsafe { batch.ring()? };
///     Ok(true)
/// }
/// # fn f(qp: &mut QueuePair, wr: SendWr<'_>) {
/// match try_send(qp, wr) {
///     Err(error) if error.stays_queued() => println!("sent with the next batch: {error}"),
///     Err(error) => println!("not sent: {error}"),
///     Ok(sent) => println!("sent: {sent}"),
/// }
/// # }
/// ```
#[derive(Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum PostError {
    /// The queue holds as many requests as it can; completions make room.
    Full,
    /// The queue pair was built with [`max_send_wr(0)`](crate::QpBuilder::max_send_wr) or
    /// [`max_recv_wr(0)`](crate::QpBuilder::max_recv_wr), and has no such queue.
    NoQueue,
    /// More scatter/gather entries than the queue was created for.
    TooManySge {
        /// The most that it takes.
        max: u32,
    },
    /// More inline data than the queue was created for.
    InlineTooLong {
        /// The most that it takes, in bytes.
        max: u32,
    },
    /// More than 2^32 - 1 bytes in one message; the limit of mlx5 is 2^31 - 1.
    TooLong,
    /// The remote address of an atomic is no multiple of eight.
    Unaligned,
    /// An atomic has less than eight bytes of room for its result.
    AtomicTooShort,
    /// The operation does not exist on a queue pair of this type.
    Unsupported,
    /// A window of type 2 is bound through another queue pair than the one that
    /// [`bind`](crate::MemoryWindow::bind) named.
    ForeignBinding,
    /// The queue pair takes its receives from a shared receive queue: post there.
    SharedReceives,
    /// Inline data with an operation that takes none from this side.
    NoInline,
    /// A request of an XRC initiator that names no shared receive queue, or another that names one.
    SrqNumber,
    /// A datagram without a destination, or a destination without datagrams.
    Destination,
    /// The address handle belongs to another protection domain than the queue pair.
    ForeignAddress,
    /// The queue pair takes no requests in this state.
    State(QpState),
    /// The memory belongs to another protection domain than the queue.
    ForeignMemory,
    /// The request names memory by number, where the call takes the memory itself.
    NamesMemory,
    /// The device would write memory that others are reading.
    ReadOnly,
    /// This process is a fork of the one that created the queue.
    Forked,
    /// The header of a raw packet is longer than a request takes.
    HeaderTooLong {
        /// The most that it takes, in bytes.
        max: u32,
    },
    /// The device requires the first bytes of a raw packet in the request, as its header or inline.
    HeaderTooShort {
        /// The least that it requires, in bytes.
        min: u32,
    },
    /// The device fills in no checksums of raw packets.
    NoChecksums,
    /// The batch with the request was not rung. [`Scope::post`](crate::owned::Scope::post) and the futures of
    /// [`aio`](crate::aio) return it, and a [`RingError`] converts into it; `push` never returns it.
    Ring(RingError),
}

/// The reason why a batch of sends or of receives was not rung.
///
/// ```no_run
/// # use uverbs::{RingError, SendBatch};
/// # fn f(batch: SendBatch<'_>) -> Result<(), RingError> {
/// // SAFETY: the memory of the requests outlives their completions.
/// match unsafe { batch.ring() } {
///     Err(error) if error.stays_queued() => eprintln!("sent with the next batch: {error}"),
///     other => other?,
/// }
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum RingError {
    /// The kernel refused to read the queue. The requests stay in it, and the device works on them when the
    /// next batch is rung: **do not free the memory** that they name before they complete, or before the
    /// queue pair is destroyed. Moving the queue pair to [`ERR`](crate::QpState::ERR) flushes them.
    StillQueued(Errno),
    /// The thread domain is not the one that the queue was created under. The batch was dropped, and
    /// nothing of it is ever sent.
    ForeignThreadDomain,
    /// This process is a fork of the one that created the queue. Nothing of the batch reaches the device.
    Forked,
}

impl RingError {
    /// Whether the requests of the batch stay in the queue: their memory must then stay as it is until they
    /// complete.
    pub fn stays_queued(&self) -> bool {
        matches!(self, RingError::StillQueued(_))
    }
}

/// For functions that return [`Error`], such as the closures of [`cm`](crate::cm). `Full` is `ENOMEM`, as
/// libibverbs has it.
impl From<PostError> for Error {
    fn from(error: PostError) -> Error {
        const VERB: &str = "post";
        let errno = match error {
            PostError::Forked => return Error::forked(VERB),
            PostError::Ring(error) => return error.into(),
            PostError::Full => Errno::NOMEM,
            PostError::Unsupported | PostError::NoChecksums => Errno::OPNOTSUPP,
            _ => Errno::INVAL,
        };
        Error::new(VERB, errno).detail(error.to_string())
    }
}

/// For functions that return [`Error`]: the errno is the kernel's, `EINVAL` for another thread domain.
impl From<RingError> for Error {
    fn from(error: RingError) -> Error {
        const VERB: &str = "ring";
        match error {
            RingError::StillQueued(errno) => {
                Error::from_kernel(VERB, errno).detail(error.to_string())
            }
            RingError::ForeignThreadDomain => Error::invalid(VERB, error.to_string()),
            RingError::Forked => Error::forked(VERB),
        }
    }
}

impl PostError {
    /// Whether requests stay in the queue despite the error: their memory must then stay as it is until they complete.
    pub fn stays_queued(&self) -> bool {
        matches!(self, PostError::Ring(error) if error.stays_queued())
    }

    /// The error of a push to a queue of this capacity that takes no more.
    #[inline]
    pub(crate) fn no_room(capacity: usize) -> PostError {
        if capacity == 0 { PostError::NoQueue } else { PostError::Full }
    }
}

/// For functions that push and ring.
impl From<RingError> for PostError {
    fn from(error: RingError) -> PostError {
        match error {
            RingError::Forked => PostError::Forked,
            error => PostError::Ring(error),
        }
    }
}

debug_is_sentence!(PostError, RingError);

impl fmt::Display for RingError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RingError::StillQueued(errno) => write!(
                f,
                "the kernel refused to read the queue ({errno}); the requests stay in it: do not free \
                 their memory before they complete"
            ),
            RingError::ForeignThreadDomain => {
                f.write_str("the queue was created under another thread domain")
            }
            RingError::Forked => PostError::Forked.fmt(f),
        }
    }
}

impl std::error::Error for RingError {}

impl fmt::Display for PostError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PostError::Full => f.write_str("the queue is full"),
            PostError::NoQueue => f.write_str(
                "the queue pair has no such queue: it was built with max_send_wr(0) or max_recv_wr(0)",
            ),
            PostError::TooManySge { max } => {
                write!(f, "more scatter/gather entries than the queue's maximum of {max}")
            }
            PostError::InlineTooLong { max } => {
                write!(f, "more inline data than the queue's maximum of {max} bytes")
            }
            PostError::TooLong => {
                f.write_str("the message is longer than 2^32 - 1 bytes, or on mlx5 than 2^31 - 1")
            }
            PostError::Unaligned => {
                f.write_str("the remote address of an atomic is not a multiple of 8")
            }
            PostError::AtomicTooShort => {
                f.write_str("an atomic needs 8 bytes of room for its result")
            }
            PostError::Unsupported => {
                f.write_str("the operation does not exist on this type of queue pair")
            }
            PostError::ForeignBinding => {
                f.write_str("the binding was prepared for another queue pair")
            }
            PostError::SharedReceives => {
                f.write_str("receives come from the shared receive queue: post them there")
            }
            PostError::NoInline => f.write_str("the operation takes no inline data"),
            PostError::SrqNumber => f.write_str(
                "a request of an XRC initiator needs the number of a shared receive queue, others \
                 take none",
            ),
            PostError::Destination => f.write_str(
                "a datagram needs a destination, and requests of other queue pairs have none",
            ),
            PostError::ForeignAddress => f.write_str(
                "the address handle belongs to another protection domain than the queue pair",
            ),
            PostError::State(state) => {
                write!(f, "the queue pair takes no such request in state {state}")
            }
            PostError::ForeignMemory => {
                f.write_str("the memory belongs to another protection domain than the queue")
            }
            PostError::NamesMemory => {
                f.write_str("the request names memory by number, but this call takes the memory itself")
            }
            PostError::ReadOnly => {
                f.write_str("the device would write memory that others are reading")
            }
            PostError::Forked => {
                f.write_str("this process is a fork of the one that created the queue")
            }
            PostError::HeaderTooLong { max } => {
                write!(f, "the header is longer than {max} bytes; the rest is data")
            }
            PostError::HeaderTooShort { min } => {
                write!(f, "the device requires {min} bytes of the packet as its header or inline")
            }
            PostError::NoChecksums => {
                f.write_str("the device fills in no checksums of raw packets")
            }
            PostError::Ring(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for PostError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_of_a_post_keeps_its_cause() {
        let full = Error::from(PostError::Full);
        assert_eq!((full.errno(), full.message()), (Errno::NOMEM, "the queue is full"));
        assert_eq!(Error::from(PostError::Forked).errno(), Errno::OWNERDEAD);
        let queued = PostError::from(RingError::StillQueued(Errno::IO));
        assert_eq!(Error::from(queued).errno(), Errno::IO);
        assert!(Error::from(queued).message().contains("the requests stay in it"));
        assert!(queued.stays_queued() && !PostError::Full.stays_queued());
        assert!(!PostError::from(RingError::ForeignThreadDomain).stays_queued());
        assert_eq!(PostError::from(RingError::Forked), PostError::Forked);
    }

    #[test]
    fn an_error_of_a_batch_keeps_its_cause_and_says_what_stays_lent() {
        let queued = Error::from(RingError::StillQueued(Errno::NOMEM));
        assert_eq!((queued.verb(), queued.kernel_errno()), ("ring", Some(Errno::NOMEM)));
        assert!(queued.message().contains("do not free"), "{queued}");
        let foreign = Error::from(RingError::ForeignThreadDomain);
        assert_eq!((foreign.errno(), foreign.kernel_errno()), (Errno::INVAL, None));
        assert!(Error::from(RingError::Forked).is_forked());
    }

    /// The text that `main` prints for an error that it returns.
    #[test]
    fn debug_of_an_error_is_its_sentence() {
        assert_eq!(format!("{:?}", PostError::Full), "the queue is full");
        let error = RingError::ForeignThreadDomain;
        assert_eq!(format!("{error:?}"), error.to_string());
        assert_eq!(format!("{:?}", PostError::Ring(error)), error.to_string());
    }
}
