//! States and transports of queue pairs, and the requests that each allows.

use crate::memory::gate::Gate;
use crate::number::open_enum;
use crate::sync::{AtomicU8, AtomicU32, Ordering};
use std::num::NonZeroU8;
use uverbs_uapi::qp::ib_uverbs_qp_type as raw;

open_enum! {
    /// Transport service of a queue pair.
    #[doc(alias = "ibv_qp_type")]
    pub struct QpType(u32) {
        /// Reliable connection.
        #[doc(alias = "IBV_QPT_RC")]
        RC = raw::IB_UVERBS_QPT_RC.0, "RC";
        /// Unreliable connection.
        #[doc(alias = "IBV_QPT_UC")]
        UC = raw::IB_UVERBS_QPT_UC.0, "UC";
        /// Unreliable datagram.
        #[doc(alias = "IBV_QPT_UD")]
        UD = raw::IB_UVERBS_QPT_UD.0, "UD";
        /// Raw Ethernet frames, for which a process needs `CAP_NET_RAW`. Whole frames are sent, and
        /// [rules](crate::QpControl::create_flow) select the received ones.
        #[doc(alias = "IBV_QPT_RAW_PACKET")]
        RAW_PACKET = raw::IB_UVERBS_QPT_RAW_PACKET.0, "raw packet";
        /// Sending half of an extended reliable connection.
        #[doc(alias = "IBV_QPT_XRC_SEND")]
        XRC_INI = raw::IB_UVERBS_QPT_XRC_INI.0, "XRC initiator";
        /// Receiving half of an extended reliable connection.
        #[doc(alias = "IBV_QPT_XRC_RECV")]
        XRC_TGT = raw::IB_UVERBS_QPT_XRC_TGT.0, "XRC target";
    }
}

open_enum! {
    /// State of a queue pair.
    #[doc(alias = "ibv_qp_state")]
    pub struct QpState(u8) {
        /// Just made; takes no requests.
        RESET = 0, "RESET";
        /// Takes receives.
        INIT = 1, "INIT";
        /// Ready to receive.
        RTR = 2, "RTR";
        /// Ready to send, too.
        RTS = 3, "RTS";
        /// The send queue is being drained.
        SQD = 4, "SQD";
        /// The send queue failed, the receive queue works on. Not with RC.
        SQE = 5, "SQE";
        /// Everything posted completes with an error.
        ERR = 6, "ERR";
    }
}

/// The state that this process last brought a queue pair to.
///
/// With a gate, the state is kept in the gate's level, so that a batch begins with one load. Model-checked with loom.
#[derive(Debug)]
pub(super) struct Tracked {
    #[cfg_attr(loom, expect(dead_code, reason = "loom cannot see the gate's level"))]
    gate: Option<Gate>,
    own: AtomicU8,
    /// The number of resets.
    resets: AtomicU32,
}

impl Tracked {
    /// `RESET`.
    pub(super) fn new(gate: Option<Gate>) -> Tracked {
        let tracked = Tracked { gate, own: AtomicU8::new(0), resets: AtomicU32::new(0) };
        tracked.word().store(QpState::RESET.gate_level().get(), Ordering::Release);
        tracked
    }

    fn word(&self) -> &AtomicU8 {
        #[cfg(not(loom))]
        return self.gate.as_ref().map_or(&self.own, Gate::level);
        #[cfg(loom)]
        return &self.own;
    }

    /// The state. In a forked child, where the level may be 0, it may be `RESET` in place of the parent's state.
    pub(super) fn get(&self) -> QpState {
        QpState(
            self.word().load(Ordering::Acquire).saturating_sub(QpState::RESET.gate_level().get()),
        )
    }

    /// The number of resets. State of a connection is not valid after the next one.
    pub(super) fn resets(&self) -> u32 {
        self.resets.load(Ordering::Acquire)
    }

    fn count_reset(&self) {
        self.resets.fetch_add(1, Ordering::AcqRel);
    }

    /// Stores the state. A gate that a fork has shut stays shut.
    pub(super) fn set(&self, state: QpState) {
        if state == QpState::RESET {
            self.count_reset();
        }
        self.open(state.gate_level().get());
    }

    /// Stores `RESET`, while the rings are as they were before the reset: the device starts from index 0,
    /// and would execute their old WQEs.
    pub(super) fn set_stale(&self) {
        self.count_reset();
        self.open(STALE);
    }

    /// As [`set`](Self::set), but stale rings stay stale.
    pub(super) fn advance(&self, state: QpState) {
        if state == QpState::RESET {
            self.count_reset();
        }
        let open = |now| (now > STALE).then(|| state.gate_level().get());
        let _ = self.word().fetch_update(Ordering::AcqRel, Ordering::Relaxed, open);
    }

    fn open(&self, to: u8) {
        let open = |now| (now > 0).then_some(to);
        let _ = self.word().fetch_update(Ordering::AcqRel, Ordering::Relaxed, open);
    }

    pub(super) fn is_stale(&self) -> bool {
        self.word().load(Ordering::Acquire) == STALE
    }

    /// Stores the state that the kernel reported, unless this process changed the state since it was `before`.
    /// If another process reset the queue pair, its rings, if it `has_rings`, are stale in every later state.
    pub(super) fn observe(&self, before: QpState, reported: QpState, has_rings: bool) {
        let was_reset = reported.is_past_reset_of(before);
        if was_reset {
            self.count_reset();
        }
        let stale = has_rings && was_reset;
        let after = if stale { STALE } else { reported.gate_level().get() };
        let before = before.gate_level().get();
        let _ = self.word().compare_exchange(before, after, Ordering::AcqRel, Ordering::Relaxed);
    }
}

/// The gate's level in `RESET` while the rings still hold WQEs from before the reset.
const STALE: u8 = 1;

impl QpState {
    /// The gate's level in this state: two more than the state. 0 is shut, 1 is [`STALE`].
    pub(super) const fn gate_level(self) -> NonZeroU8 {
        NonZeroU8::MIN.saturating_add(1).saturating_add(self.0)
    }

    /// Whether a queue pair that was in state `before` and is in this one was reset in between:
    /// only a reset leads back from a state in which something may have been posted.
    fn is_past_reset_of(self, before: QpState) -> bool {
        let running = |state| (QpState::RTS..=QpState::SQE).contains(&state);
        match self {
            QpState::ERR => false,
            _ if before == QpState::ERR => true,
            _ if running(self) => false,
            _ => self < before,
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::memory::doorbell_record::DoorbellPages;

    /// State of a connection is valid until the next reset.
    #[test]
    fn each_way_to_reset_is_counted_and_no_other_change_is() {
        let tracked = Tracked::new(None);
        for state in [QpState::INIT, QpState::RTR, QpState::RTS, QpState::ERR] {
            tracked.set(state);
            tracked.advance(state);
        }
        assert_eq!(tracked.resets(), 0);
        tracked.set(QpState::RESET);
        tracked.advance(QpState::RESET);
        tracked.set_stale();
        assert_eq!(tracked.resets(), 3);
    }

    /// A fork wipes the byte of the gate.
    #[test]
    fn no_change_of_state_opens_a_gate_that_a_fork_has_shut() {
        let gate = Gate::alone(&DoorbellPages::new().unwrap()).unwrap();
        let tracked = Tracked::new(Some(gate.clone()));
        let changes: [fn(&Tracked); 5] = [
            |tracked| tracked.set(QpState::RTS),
            |tracked| tracked.set(QpState::RESET),
            Tracked::set_stale,
            |tracked| tracked.advance(QpState::INIT),
            |tracked| tracked.observe(tracked.get(), QpState::RTS, true),
        ];
        for (which, change) in changes.into_iter().enumerate() {
            change(&tracked);
            assert!(!gate.is_shut(), "change {which} of an open one");
            tracked.set(QpState::RTS);
        }
        gate.level().store(0, Ordering::Relaxed);
        for (which, change) in changes.into_iter().enumerate() {
            change(&tracked);
            assert!(gate.is_shut(), "change {which}");
        }
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::*;
    use loom::sync::Arc;
    use loom::thread;

    /// A thread asks the kernel for the state, without a lock, while another one resets the queue pair: the kernel's
    /// answer may be older or newer than the reset. The rings stay stale, so that nothing is posted to them.
    #[test]
    fn an_answer_of_the_kernel_makes_no_stale_ring_usable() {
        loom::model(|| {
            let tracked = Arc::new(Tracked::new(None));
            tracked.set(QpState::RTS);
            let kernel = Arc::new(AtomicU8::new(QpState::RTS.0));
            let (theirs, answer) = (tracked.clone(), kernel.clone());
            let queries = thread::spawn(move || {
                for _ in 0..2 {
                    let before = theirs.get();
                    theirs.observe(before, QpState(answer.load(Ordering::Acquire)), true);
                }
            });
            kernel.store(QpState::RESET.0, Ordering::Release);
            tracked.set_stale();
            queries.join().unwrap();
            assert!(tracked.is_stale() && tracked.resets() > 0, "{tracked:?}");
        });
    }

    /// A thread that sees `RESET` also sees the count of resets: an earlier connection is not valid any more.
    #[test]
    fn a_reset_is_counted_before_it_is_seen() {
        loom::model(|| {
            let tracked = Arc::new(Tracked::new(None));
            tracked.set(QpState::RTS);
            let theirs = tracked.clone();
            let reset = thread::spawn(move || {
                theirs.set_stale();
                theirs.set(QpState::RESET);
            });
            // In a thread of its own: loom does not preempt a model's first thread as it does others.
            let theirs = tracked.clone();
            let reader = thread::spawn(move || {
                let seen = theirs.get();
                let resets = theirs.resets();
                assert!(seen == QpState::RTS || resets > 0, "{seen} after {resets} resets");
            });
            reset.join().unwrap();
            reader.join().unwrap();
            assert_eq!(tracked.resets(), 2);
        });
    }
}
