//! Mistakes that a test plants, to see whether the simulated network finds them. Without tests there are none.

/// A mistake in requester or responder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mistake {
    /// An old ACK counts once more, for the request that is the oldest now.
    AckTwice,
    /// An ACK that is behind a read completes the read without its data.
    AckCompletesRead,
    /// An ACK acknowledges the packet behind the one it names, too.
    AckOneTooFar,
    /// A response to a read is taken although the one before it is missing.
    ReadGap,
    /// A message that is repeated from its middle on has the data of its begin.
    RepeatedData,
    /// Retries are not counted anew after progress.
    RetriesNotReset,
    /// A second RNR NAK starts no timer.
    RnrTimerNotRestarted,
    /// The timer for responses stays off after a timeout.
    TimeoutNotRestarted,
    /// A fence does not wait.
    NoFence,
    /// One packet more than the window holds is sent without an ACK.
    WindowOneTooFar,
    /// One read or atomic more than was negotiated waits for its response.
    ReadDepthOneTooFar,
    /// PSNs are compared as plain numbers.
    PsnWithoutWrap,
    /// A duplicate of a send is delivered again.
    SendTwice,
    /// A duplicate of an atomic is executed again.
    AtomicTwice,
    /// A duplicate of a part of a read is answered from the begin of the read.
    ReadFromBegin,
    /// A NAK that is not sent, as the packet that it names has come, leaves neither an ACK nor another NAK.
    NakForgotten,
    /// UC takes a message with a packet missing in its middle.
    UcGap,
    /// UC takes a packet that is behind the last one.
    UcTwice,
    /// Padding counts as data.
    Padding,
}

#[cfg(test)]
mod planted {
    use super::Mistake;
    use core::cell::Cell;

    std::thread_local!(static PLANTED: Cell<Option<Mistake>> = const { Cell::new(None) });

    impl Mistake {
        /// Whether the test of this thread planted it.
        pub(crate) fn is_planted(self) -> bool {
            PLANTED.get() == Some(self)
        }

        /// Plants a mistake in place of another one.
        pub(crate) fn plant(mistake: Option<Mistake>) {
            PLANTED.set(mistake);
        }
    }
}

#[cfg(not(test))]
impl Mistake {
    /// No mistake is.
    pub(crate) const fn is_planted(self) -> bool {
        false
    }
}
