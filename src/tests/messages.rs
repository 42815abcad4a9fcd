//! The messages of errors: each cause has its own text and an errno.

use crate::aio::{OpError, OpErrorKind};
use crate::owned::{Ending, PushError, ScopeError};
use crate::{Errno, Error, MemoryError, PollError, PostError, QpState, RingError, WcStatus};

#[test]
fn a_request_that_is_refused_says_why() {
    use PostError::*;
    const INVAL: Errno = Errno::INVAL;
    let refusals = [
        (Full, Errno::NOMEM, "the queue is full"),
        (TooManySge { max: 31 }, INVAL, "scatter/gather entries than the queue's maximum of 31"),
        (InlineTooLong { max: 97 }, INVAL, "inline data than the queue's maximum of 97 bytes"),
        (TooLong, INVAL, "longer than 2^32 - 1 bytes"),
        (Unaligned, INVAL, "remote address of an atomic is not a multiple of 8"),
        (AtomicTooShort, INVAL, "an atomic needs 8 bytes of room"),
        (Unsupported, Errno::OPNOTSUPP, "does not exist on this type of queue pair"),
        (ForeignBinding, INVAL, "binding was prepared for another queue pair"),
        (SharedReceives, INVAL, "receives come from the shared receive queue"),
        (NoInline, INVAL, "takes no inline data"),
        (SrqNumber, INVAL, "an XRC initiator needs the number of a shared receive queue"),
        (Destination, INVAL, "a datagram needs a destination"),
        (ForeignAddress, INVAL, "address handle belongs to another protection domain"),
        (State(QpState::SQE), INVAL, "takes no such request in state SQE"),
        (ForeignMemory, INVAL, "memory belongs to another protection domain"),
        (NamesMemory, INVAL, "names memory by number"),
        (ReadOnly, INVAL, "would write memory that others are reading"),
        (Forked, Errno::OWNERDEAD, "this process is a fork"),
        (HeaderTooLong { max: 60 }, INVAL, "header is longer than 60 bytes"),
        (HeaderTooShort { min: 18 }, INVAL, "the device requires 18 bytes of the packet"),
        (NoChecksums, Errno::OPNOTSUPP, "fills in no checksums"),
        (Ring(RingError::ForeignThreadDomain), INVAL, "created under another thread domain"),
        (Ring(RingError::StillQueued(Errno::NOSPC)), Errno::NOSPC, "the requests stay in it"),
    ];
    for (refusal, errno, text) in refusals {
        assert!(refusal.to_string().contains(text), "{refusal:?}: {refusal}");
        let error = Error::from(refusal);
        let kernel = matches!(refusal, Ring(RingError::StillQueued(_))).then_some(errno);
        assert_eq!((error.errno(), error.kernel_errno()), (errno, kernel), "{refusal:?}");
        assert!(error.message().contains(text), "{error}");
    }
    assert!(RingError::Forked.to_string().contains("this process is a fork"));
    assert_eq!(PostError::from(RingError::Forked), Forked);
    let foreign = RingError::ForeignThreadDomain;
    assert_eq!(PostError::from(foreign), Ring(foreign));
}

#[test]
fn a_request_that_failed_says_why() {
    let status = WcStatus::REM_ACCESS_ERR;
    let refused = RingError::StillQueued(Errno::NOSPC);
    let kinds = [
        (OpErrorKind::Post(PostError::Full), "post", Errno::NOMEM, "the queue is full".into()),
        (OpErrorKind::Post(PostError::Ring(refused)), "ring", Errno::NOSPC, refused.to_string()),
        (
            OpErrorKind::Status(status),
            "poll_cq",
            Errno::IO,
            format!("the request failed: {status}"),
        ),
        (
            OpErrorKind::Earlier(status),
            "post",
            Errno::IO,
            format!("an earlier request failed: {status}"),
        ),
        (
            OpErrorKind::DriverGone,
            "post",
            Errno::PIPE,
            "the driver of the completion queue is gone".into(),
        ),
        (
            OpErrorKind::AlreadyFinished,
            "post",
            Errno::INVAL,
            "the future has ended, and must not be polled again".into(),
        ),
    ];
    for (kind, verb, errno, text) in kinds {
        assert_eq!(kind.to_string(), text);
        let failed = OpError { memory: Some(()), kind };
        assert_eq!(failed.to_string(), text);
        let error = Error::from(failed);
        assert_eq!((error.verb(), error.errno()), (verb, errno), "{kind:?}");
        assert_eq!(error.message(), text);
    }
    let forked = OpError { memory: Some(()), kind: OpErrorKind::Post(PostError::Forked) };
    assert_eq!(forked.to_string(), "this process is a fork of the one that created the queue");
    let forked = Error::from(forked);
    assert!(forked.is_forked() && forked.verb() == "post", "{forked}");
}

#[test]
fn a_push_and_a_scope_that_fail_say_why() {
    let refused = PushError { memory: (), tag: 7, error: PostError::Full };
    assert_eq!(refused.to_string(), "the queue is full");
    let cancelled = |ending| ScopeError::Cancelled { value: 7, ending };
    let failures = [
        (ScopeError::ForeignQueue, "adopted by another completion queue"),
        (cancelled(Ending::Flushed), "were flushed: they did not complete in time"),
        (cancelled(Ending::Reset), "was reset: requests of the scope were not flushed in time"),
    ];
    for (failure, text) in failures {
        assert!(failure.to_string().contains(text), "{failure}");
        let errno = match failure {
            ScopeError::ForeignQueue => Errno::INVAL,
            ScopeError::Cancelled { .. } => Errno::TIMEDOUT,
        };
        let error = Error::from(failure);
        assert_eq!((error.verb(), error.errno()), ("scope", errno));
        assert!(error.message().contains(text), "{error}");
    }
}

#[test]
fn a_poll_and_an_access_to_memory_that_are_refused_say_why() {
    assert!(PollError::Forked.to_string().contains("this process is a fork"));
    assert_eq!(PollError::ForeignRequest.to_string(), "the request belongs to another scope");
    assert!(Error::from(PollError::Forked).is_forked());
    let foreign = Error::from(PollError::ForeignRequest);
    assert_eq!((foreign.verb(), foreign.errno()), ("scope", Errno::INVAL));
    let refusals = [
        (
            MemoryError::OutOfRange { offset: 250, length: 10, size: 256 },
            "10 bytes at 250 exceed the memory of 256 bytes",
        ),
        (
            MemoryError::Unaligned { offset: 3, length: 9, word: 8 },
            "9 bytes at 3 are not whole words of 8 bytes",
        ),
        (MemoryError::Dead, "a failed change left the region without memory"),
        (MemoryError::Forked, "this process is a fork of the one that has the memory"),
    ];
    for (refusal, text) in refusals {
        assert_eq!(refusal.to_string(), text);
        let error = Error::from(refusal);
        assert_eq!(error.is_forked(), refusal == MemoryError::Forked, "{error}");
        assert_eq!(error.kernel_errno(), None);
    }
}
