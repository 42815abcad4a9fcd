//! The transitions of queue pairs: which attributes each needs, and which others it may change.
//!
//! Pairs with `qp_state_table` and `ib_modify_qp_is_ok` in `core/verbs.c`.

use super::qp::Kind;
use uverbs_uapi::qp::ib_qp_attr_mask as Mask;

// `enum ib_qp_state`.
pub(crate) const RESET: u8 = 0;
pub(crate) const INIT: u8 = 1;
pub(crate) const RTR: u8 = 2;
pub(crate) const RTS: u8 = 3;
pub(crate) const SQD: u8 = 4;
pub(crate) const SQE: u8 = 5;
pub(crate) const ERR: u8 = 6;

const NONE: Mask = Mask::empty();
const STATE: Mask = Mask::IB_QP_STATE;
const CUR: Mask = Mask::IB_QP_CUR_STATE;
const NOTIFY: Mask = Mask::IB_QP_EN_SQD_ASYNC_NOTIFY;
const ACCESS: Mask = Mask::IB_QP_ACCESS_FLAGS;
const PKEY: Mask = Mask::IB_QP_PKEY_INDEX;
const PORT: Mask = Mask::IB_QP_PORT;
const QKEY: Mask = Mask::IB_QP_QKEY;
const AV: Mask = Mask::IB_QP_AV;
const ALT: Mask = Mask::IB_QP_ALT_PATH;
const MIGRATION: Mask = Mask::IB_QP_PATH_MIG_STATE;
const RNR_TIMER: Mask = Mask::IB_QP_MIN_RNR_TIMER;
const RATE: Mask = Mask::IB_QP_RATE_LIMIT;
const ANSWERED: Mask = Mask::IB_QP_MAX_DEST_RD_ATOMIC;
/// The peer of a connection, and the way to it.
const PEER: Mask =
    AV.union(Mask::IB_QP_PATH_MTU).union(Mask::IB_QP_DEST_QPN).union(Mask::IB_QP_RQ_PSN);
/// Retries of a requester.
const RETRIES: Mask = Mask::IB_QP_TIMEOUT
    .union(Mask::IB_QP_RETRY_CNT)
    .union(Mask::IB_QP_RNR_RETRY)
    .union(Mask::IB_QP_SQ_PSN)
    .union(Mask::IB_QP_MAX_QP_RD_ATOMIC);

/// The attributes that a transition needs, and those that it may change beside them; `None` if there is no such
/// transition.
fn attributes(kind: Kind, from: u8, to: u8) -> Option<(Mask, Mask)> {
    use Kind::{RawPacket, Rc, Uc, Ud, XrcInitiator, XrcTarget};
    let by_way = match kind {
        Ud => CUR.union(QKEY),
        Uc => CUR.union(ALT).union(ACCESS).union(MIGRATION),
        XrcInitiator => CUR.union(ALT).union(ACCESS).union(MIGRATION),
        Rc | XrcTarget => CUR.union(ALT).union(ACCESS).union(MIGRATION).union(RNR_TIMER),
        RawPacket => RATE,
    };
    let first = match kind {
        Ud => PKEY.union(PORT).union(QKEY),
        Uc | Rc | XrcInitiator | XrcTarget => PKEY.union(PORT).union(ACCESS),
        RawPacket => PORT,
    };
    Some(match (from, to) {
        (_, RESET | ERR) if from != RESET || to == RESET => (NONE, NONE),
        (RESET, INIT) => (first, NONE),
        (INIT, INIT) if kind == RawPacket => (NONE, NONE),
        (INIT, INIT) => (NONE, first),
        (INIT, RTR) => match kind {
            Ud => (NONE, PKEY.union(QKEY)),
            RawPacket => (NONE, NONE),
            Uc | XrcInitiator => (PEER, ALT.union(ACCESS).union(PKEY)),
            Rc | XrcTarget => {
                (PEER.union(ANSWERED).union(RNR_TIMER), ALT.union(ACCESS).union(PKEY))
            }
        },
        (RTR, RTS) => match kind {
            Ud | Uc => (Mask::IB_QP_SQ_PSN, by_way),
            Rc | XrcInitiator => (RETRIES, by_way),
            XrcTarget => (Mask::IB_QP_TIMEOUT.union(Mask::IB_QP_SQ_PSN), by_way),
            RawPacket => (NONE, by_way),
        },
        (RTS, RTS) | (SQD, RTS) => (NONE, by_way),
        (RTS, SQD) if kind != RawPacket => (NONE, NOTIFY),
        (SQD, SQD) => match kind {
            Ud => (NONE, PKEY.union(QKEY)),
            Uc => (NONE, AV.union(ALT).union(ACCESS).union(PKEY).union(MIGRATION)),
            Rc | XrcInitiator | XrcTarget => {
                let path = PORT.union(AV).union(ALT).union(ACCESS).union(PKEY).union(MIGRATION);
                let requester = Mask::IB_QP_TIMEOUT
                    .union(Mask::IB_QP_RETRY_CNT)
                    .union(Mask::IB_QP_RNR_RETRY)
                    .union(Mask::IB_QP_MAX_QP_RD_ATOMIC);
                (NONE, path.union(requester).union(ANSWERED).union(RNR_TIMER))
            }
            RawPacket => return None,
        },
        (SQE, RTS) => match kind {
            Ud => (NONE, CUR.union(QKEY)),
            Uc => (NONE, CUR.union(ACCESS)),
            _ => (NONE, NONE),
        },
        _ => return None,
    })
}

/// Whether a transition is allowed with these attributes.
pub(super) fn is_ok(kind: Kind, from: u8, to: u8, given: Mask) -> bool {
    if given.contains(CUR) && !matches!(from, RTR | RTS | SQD | SQE) {
        return false;
    }
    let Some((needed, optional)) = attributes(kind, from, to) else { return false };
    given.contains(needed) && needed.union(optional).union(STATE).contains(given)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transitions_need_their_attributes_and_take_no_others() {
        let ok = |kind, from, to, mask| is_ok(kind, from, to, STATE.union(mask));
        let first = PKEY.union(PORT).union(ACCESS);
        assert!(ok(Kind::Rc, RESET, INIT, first));
        assert!(!ok(Kind::Rc, RESET, INIT, PKEY.union(PORT)));
        assert!(!ok(Kind::Ud, RESET, INIT, first));
        assert!(!ok(Kind::Rc, RESET, INIT, first.union(AV)));
        assert!(!ok(Kind::Rc, RESET, RTR, PEER));
        assert!(ok(Kind::Uc, INIT, RTR, PEER) && !ok(Kind::Rc, INIT, RTR, PEER));
        for state in [RESET, INIT, RTR, RTS, SQD, SQE, ERR] {
            for kind in [Kind::Rc, Kind::Uc, Kind::Ud, Kind::RawPacket] {
                assert_eq!(ok(kind, state, ERR, NONE), state != RESET);
                assert!(ok(kind, state, RESET, NONE));
                assert!(!ok(kind, state, ERR, ACCESS), "{kind:?} {state}");
            }
        }
        assert!(ok(Kind::Rc, RTS, RTS, CUR.union(RNR_TIMER)));
        assert!(!ok(Kind::Rc, INIT, INIT, CUR), "the state is no guess there");
    }
}
