//! The required and optional attributes of each transition of a queue pair, so that a refusal can name them.
//!
//! Pairs with `ib_modify_qp_is_ok` of the kernel's `core/verbs.c`, which answers `EINVAL` to every mistake.

use super::attr::QpAttr;
use super::state::{QpState, QpType};
use crate::error::{Error, Result};
use uverbs_uapi::qp::ib_qp_attr_mask as Mask;

/// The attributes of one transition, beside the state itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Transition {
    pub(super) required: Mask,
    pub(super) optional: Mask,
}

const NONE: Mask = Mask::empty();
const STATE: Mask = Mask::IB_QP_STATE;
const CUR: Mask = Mask::IB_QP_CUR_STATE;
const NOTIFY: Mask = Mask::IB_QP_EN_SQD_ASYNC_NOTIFY;
const ACCESS: Mask = Mask::IB_QP_ACCESS_FLAGS;
const PKEY: Mask = Mask::IB_QP_PKEY_INDEX;
const PORT: Mask = Mask::IB_QP_PORT;
const QKEY: Mask = Mask::IB_QP_QKEY;
const AV: Mask = Mask::IB_QP_AV;
const MTU: Mask = Mask::IB_QP_PATH_MTU;
const TIMEOUT: Mask = Mask::IB_QP_TIMEOUT;
const RETRY: Mask = Mask::IB_QP_RETRY_CNT;
const RNR_RETRY: Mask = Mask::IB_QP_RNR_RETRY;
const RQ_PSN: Mask = Mask::IB_QP_RQ_PSN;
const RD: Mask = Mask::IB_QP_MAX_QP_RD_ATOMIC;
const ALT: Mask = Mask::IB_QP_ALT_PATH;
const RNR_TIMER: Mask = Mask::IB_QP_MIN_RNR_TIMER;
const SQ_PSN: Mask = Mask::IB_QP_SQ_PSN;
const DEST_RD: Mask = Mask::IB_QP_MAX_DEST_RD_ATOMIC;
const MIG: Mask = Mask::IB_QP_PATH_MIG_STATE;
const DEST_QPN: Mask = Mask::IB_QP_DEST_QPN;
const RATE: Mask = Mask::IB_QP_RATE_LIMIT;

/// The halves of reliable delivery that a connected transport has: a requester, which repeats its requests,
/// and a responder, which acknowledges the peer's.
#[derive(Clone, Copy)]
struct Halves {
    requester: bool,
    responder: bool,
}

impl Halves {
    fn pick(self, requester: Mask, responder: Mask) -> Mask {
        let requester = if self.requester { requester } else { NONE };
        let responder = if self.responder { responder } else { NONE };
        requester | responder
    }
}

impl Transition {
    fn new(required: Mask, optional: Mask) -> Option<Self> {
        Some(Transition { required, optional })
    }

    /// The transition of a `qp_type` from one state to another; `None` if there is none.
    pub(super) fn find(qp_type: QpType, from: QpState, to: QpState) -> Option<Self> {
        use QpState as S;
        match (from, to) {
            (S::RESET, S::ERR) => return None,
            (_, S::RESET | S::ERR) => return Self::new(NONE, NONE),
            (S::RTS, S::SQD) if qp_type != QpType::RAW_PACKET => return Self::new(NONE, NOTIFY),
            _ => {}
        }
        match qp_type {
            QpType::UD => Self::datagram(from, to),
            QpType::RAW_PACKET => Self::raw_packet(from, to),
            QpType::UC => {
                Self::connected(from, to, Halves { requester: false, responder: false }, true)
            }
            QpType::RC => {
                Self::connected(from, to, Halves { requester: true, responder: true }, false)
            }
            QpType::XRC_INI => {
                Self::connected(from, to, Halves { requester: true, responder: false }, false)
            }
            QpType::XRC_TGT => {
                Self::connected(from, to, Halves { requester: false, responder: true }, false)
            }
            _ => None,
        }
    }

    fn datagram(from: QpState, to: QpState) -> Option<Self> {
        use QpState as S;
        match (from, to) {
            (S::RESET, S::INIT) => Self::new(PKEY | PORT | QKEY, NONE),
            (S::INIT, S::INIT) => Self::new(NONE, PKEY | PORT | QKEY),
            (S::INIT, S::RTR) => Self::new(NONE, PKEY | QKEY),
            (S::RTR, S::RTS) => Self::new(SQ_PSN, CUR | QKEY),
            (S::RTS | S::SQD | S::SQE, S::RTS) => Self::new(NONE, CUR | QKEY),
            (S::SQD, S::SQD) => Self::new(NONE, PKEY | QKEY),
            _ => None,
        }
    }

    fn raw_packet(from: QpState, to: QpState) -> Option<Self> {
        use QpState as S;
        match (from, to) {
            (S::RESET, S::INIT) => Self::new(PORT, NONE),
            (S::INIT, S::INIT | S::RTR)
            | (S::RTR | S::RTS | S::SQD | S::SQE, S::RTS)
            | (S::RTS | S::SQD, S::SQD) => Self::new(NONE, NONE),
            _ => None,
        }
    }

    fn connected(from: QpState, to: QpState, halves: Halves, unreliable: bool) -> Option<Self> {
        use QpState as S;
        let running = CUR | ACCESS | ALT | MIG | halves.pick(NONE, RNR_TIMER);
        match (from, to) {
            (S::RESET, S::INIT) => Self::new(PKEY | PORT | ACCESS, NONE),
            (S::INIT, S::INIT) => Self::new(NONE, PKEY | PORT | ACCESS),
            (S::INIT, S::RTR) => Self::new(
                AV | MTU | DEST_QPN | RQ_PSN | halves.pick(NONE, DEST_RD | RNR_TIMER),
                ALT | ACCESS | PKEY,
            ),
            (S::RTR, S::RTS) => {
                // The read responses of a target are acknowledged, too.
                let timeout = if unreliable { NONE } else { TIMEOUT };
                let repeating = halves.pick(RETRY | RNR_RETRY | RD, NONE);
                Self::new(SQ_PSN | timeout | repeating, running)
            }
            (S::RTS | S::SQD, S::RTS) => Self::new(NONE, running),
            (S::SQD, S::SQD) => {
                let any = AV | ALT | ACCESS | PKEY | MIG;
                let reliable = if unreliable { NONE } else { PORT | TIMEOUT };
                let halves = halves.pick(RETRY | RNR_RETRY | RD, DEST_RD | RNR_TIMER);
                Self::new(NONE, any | reliable | halves)
            }
            (S::SQE, S::RTS) if unreliable => Self::new(NONE, CUR | ACCESS),
            // The kernel also has rows without attributes for transports that never come to SQE.
            (S::SQE, S::RTS) => Self::new(NONE, NONE),
            _ => None,
        }
    }
}

/// Attributes that the kernel ignores for a transport, so that both ends of an XRC connection
/// can be given the same.
fn ignored(qp_type: QpType) -> Mask {
    match qp_type {
        QpType::XRC_INI => DEST_RD | RNR_TIMER,
        QpType::XRC_TGT => RD | RETRY | RNR_RETRY,
        _ => NONE,
    }
}

/// Checks a change against the state `from`, and names missing and superfluous attributes.
pub(super) fn check(
    verb: &'static str,
    qp_type: QpType,
    tracked: QpState,
    attr: &QpAttr,
) -> Result<()> {
    if qp_type.description().is_none() {
        // A driver's own kind has rules of its own.
        return Ok(());
    }
    if let Some(claimed) = attr.claimed_state() {
        use QpState as S;
        if !matches!(claimed, S::RTR | S::RTS | S::SQD | S::SQE) {
            let detail =
                format!("current_state {claimed}: only RTR, RTS, SQD or SQE can be assumed");
            return Err(Error::invalid(verb, detail));
        }
    }
    let from = attr.claimed_state().unwrap_or(tracked);
    let to = attr.next_state().unwrap_or(from);
    let Some(transition) = Transition::find(qp_type, from, to) else {
        let detail = if attr.next_state().is_some() {
            format!("a queue pair of type {qp_type} cannot go from {from} to {to}")
        } else {
            format!("a queue pair of type {qp_type} takes no changes in state {from}")
        };
        return Err(Error::invalid(verb, detail));
    };
    let given = attr.bits() - ignored(qp_type) - RATE - STATE;
    let missing = transition.required - given;
    let superfluous = given - transition.required - transition.optional;
    if missing.is_empty() && superfluous.is_empty() {
        return Ok(());
    }
    let mut detail = format!("{qp_type} from {from} to {to}: ");
    if !missing.is_empty() {
        detail += &format!("missing {}", names(missing));
    }
    if !superfluous.is_empty() {
        let separator = if missing.is_empty() { "" } else { "; " };
        detail += &format!("{separator}superfluous {}", names(superfluous));
    }
    Err(Error::invalid(verb, detail))
}

/// A change in words: the states, and the names of the attributes.
pub(super) fn describe(qp_type: QpType, from: QpState, attr: &QpAttr) -> String {
    let named = names(attr.bits() - STATE);
    let with = if named.is_empty() { String::new() } else { format!(" with {named}") };
    match attr.next_state() {
        Some(to) => format!("{qp_type} from {from} to {to}{with}"),
        None => format!("{qp_type}{with} in state {from}"),
    }
}

/// The attributes of a mask under the names that [`QpAttr`] gives them.
fn names(mask: Mask) -> String {
    const NAMES: [(Mask, &str); 21] = [
        (STATE, "state"),
        (CUR, "current_state"),
        (NOTIFY, "sqd_async_notify"),
        (ACCESS, "access"),
        (PKEY, "pkey_index"),
        (PORT, "port"),
        (QKEY, "qkey"),
        (AV, "path"),
        (MTU, "path_mtu"),
        (TIMEOUT, "timeout"),
        (RETRY, "retry_count"),
        (RNR_RETRY, "rnr_retry"),
        (RQ_PSN, "rq_psn"),
        (RD, "max_rd_atomic"),
        (ALT, "alternate_path"),
        (RNR_TIMER, "min_rnr_timer"),
        (SQ_PSN, "sq_psn"),
        (DEST_RD, "max_dest_rd_atomic"),
        (MIG, "path_mig_state"),
        (DEST_QPN, "dest_qpn"),
        (RATE, "rate_limit"),
    ];
    let named = NAMES.iter().filter(|(bit, _)| mask.contains(*bit)).map(|(_, name)| *name);
    named.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests;
