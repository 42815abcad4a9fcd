//! Steps of the handshake that wait for an event, in a blocked thread or a polled future.

use super::channel::LONGEST_SLEEP;
use super::event::Event;
use super::id::IdInner;
use crate::error::{Error, Result};
use rustix::io::Errno;
use std::time::{Duration, Instant};
use uverbs_uapi::rdma_user_cm::rdma_cm_event_type;

/// An id that waits for an event, which brings it to its next state.
pub(crate) trait Step: Sized {
    /// The outcome of the event: the id in its next state, or the event's contents.
    type Next;
    type Error: From<Error>;
    /// The verb in errors of the step.
    const VERB: &'static str;

    fn id(&self) -> &IdInner;

    /// Whether the wait ignores the event. A change of the address (bonding) does not affect a handshake or a listener.
    fn ignores(&self, event: &Event) -> bool {
        event.kind == rdma_cm_event_type::RDMA_CM_EVENT_ADDR_CHANGE
    }

    /// Takes the event. An error destroys the id, if the step owns it.
    fn advance(self, event: Event) -> std::result::Result<Self::Next, Self::Error>;
}

/// The result of a wait: the id as it was, or in its next state.
#[derive(Debug)]
#[must_use]
pub enum Progress<P, D> {
    /// No event came in time; the id still waits.
    Pending(P),
    /// The event came, and the id is in its next state.
    Done(D),
}

impl<P, D> Progress<P, D> {
    /// The id in its next state. Drops an id that still waits, which destroys it.
    ///
    /// # Errors
    ///
    /// `ETIMEDOUT` if it still waits.
    pub fn done(self) -> Result<D> {
        self.done_in_time("wait", "no event came in time")
    }

    /// The event's outcome, if the event came.
    pub(super) fn into_option(self) -> Option<D> {
        match self {
            Progress::Done(done) => Some(done),
            Progress::Pending(_) => None,
        }
    }

    /// As [`done`](Self::done), with an error that names the waiting verb and the missing event.
    pub(super) fn done_in_time(self, verb: &'static str, detail: &'static str) -> Result<D> {
        self.into_option().ok_or_else(|| timed_out(verb, detail))
    }
}

/// The error of a wait that ended without an event.
pub(crate) fn timed_out(verb: &'static str, detail: &'static str) -> Error {
    Error::new(verb, Errno::TIMEDOUT).detail(detail)
}

/// The result of a wait for a step.
pub(super) type Waited<S> = std::result::Result<Progress<S, <S as Step>::Next>, <S as Step>::Error>;

/// Waits for the event of a step, for at most `timeout`, or without a limit for `None`.
pub(super) fn wait<S: Step>(step: S, timeout: Option<Duration>) -> Waited<S> {
    let deadline = step.id().channel.platform.deadline(timeout);
    wait_until(step, deadline)
}

/// Waits for the event of a step until a deadline, or without a limit for `None`.
pub(super) fn wait_until<S: Step>(step: S, deadline: Option<Instant>) -> Waited<S> {
    loop {
        match step.id().wait_until(S::VERB, deadline)? {
            None => return Ok(Progress::Pending(step)),
            Some(event) if step.ignores(&event) => {}
            Some(event) => return step.advance(event).map(Progress::Done),
        }
    }
}

/// Waits until `ended` is true, which an event brings about, for at most `timeout`, or without a limit for `None`;
/// `false` after the timeout. Other events are discarded. Several threads may wait: the one that takes the event makes
/// `ended` true.
pub(super) fn wait_for_end<S: Step + Copy>(
    step: S,
    ended: impl Fn() -> bool,
    timeout: Option<Duration>,
) -> std::result::Result<bool, S::Error> {
    let clock = &step.id().channel.platform;
    let deadline = clock.deadline(timeout);
    while !ended() {
        let now = clock.now();
        // Another thread may take the event, and wakes no thread that waits here.
        let slice = deadline.into_iter().chain(now.checked_add(LONGEST_SLEEP)).min();
        let waited = wait_until(step, slice)?;
        if matches!(waited, Progress::Pending(_)) && deadline.is_some_and(|at| at <= now) {
            return Ok(false);
        }
    }
    Ok(true)
}
