use super::*;
use crate::Errno;
use crate::port::Mtu;
use crate::{AddressVector, Gid, Psn, Qpn};

/// Transports | from to | required | optional, as the kernel's table has them, read from
/// `qp_state_table` of `core/verbs.c` (Linux 7.2).
const KERNEL: &str = "
RC UC UD XRC_INI XRC_TGT RAW_PACKET | RESET RESET |  |
RC UC XRC_INI XRC_TGT | RESET INIT | access pkey port |
UD | RESET INIT | pkey port qkey |
RAW_PACKET | RESET INIT | port |
RC UC UD XRC_INI XRC_TGT RAW_PACKET | INIT RESET |  |
RC UC UD XRC_INI XRC_TGT RAW_PACKET | INIT ERR |  |
RC UC XRC_INI XRC_TGT | INIT INIT |  | access pkey port
UD | INIT INIT |  | pkey port qkey
RAW_PACKET | INIT INIT |  |
RC XRC_TGT | INIT RTR | dest dest_rd mtu path rnr_timer rq_psn | access alt pkey
UC XRC_INI | INIT RTR | dest mtu path rq_psn | access alt pkey
UD | INIT RTR |  | pkey qkey
RAW_PACKET | INIT RTR |  |
RC UC UD XRC_INI XRC_TGT RAW_PACKET | RTR RESET |  |
RC UC UD XRC_INI XRC_TGT RAW_PACKET | RTR ERR |  |
RC | RTR RTS | rd retry rnr_retry sq_psn timeout | access alt current mig rnr_timer
UC | RTR RTS | sq_psn | access alt current mig
UD | RTR RTS | sq_psn | current qkey
XRC_INI | RTR RTS | rd retry rnr_retry sq_psn timeout | access alt current mig
XRC_TGT | RTR RTS | sq_psn timeout | access alt current mig rnr_timer
RAW_PACKET | RTR RTS |  |
RC UC UD XRC_INI XRC_TGT RAW_PACKET | RTS RESET |  |
RC UC UD XRC_INI XRC_TGT RAW_PACKET | RTS ERR |  |
RC XRC_TGT | RTS RTS |  | access alt current mig rnr_timer
UC XRC_INI | RTS RTS |  | access alt current mig
UD | RTS RTS |  | current qkey
RAW_PACKET | RTS RTS |  |
RC UC UD XRC_INI XRC_TGT | RTS SQD |  | notify
RAW_PACKET | RTS SQD |  |
RC UC UD XRC_INI XRC_TGT RAW_PACKET | SQD RESET |  |
RC UC UD XRC_INI XRC_TGT RAW_PACKET | SQD ERR |  |
RC XRC_TGT | SQD RTS |  | access alt current mig rnr_timer
UC XRC_INI | SQD RTS |  | access alt current mig
UD | SQD RTS |  | current qkey
RAW_PACKET | SQD RTS |  |
RC | SQD SQD |  | access alt dest_rd mig path pkey port rd retry rnr_retry rnr_timer timeout
UC | SQD SQD |  | access alt mig path pkey
UD | SQD SQD |  | pkey qkey
XRC_INI | SQD SQD |  | access alt mig path pkey port rd retry rnr_retry timeout
XRC_TGT | SQD SQD |  | access alt dest_rd mig path pkey port rnr_timer timeout
RAW_PACKET | SQD SQD |  |
RC UC UD XRC_INI XRC_TGT RAW_PACKET | SQE RESET |  |
RC UC UD XRC_INI XRC_TGT RAW_PACKET | SQE ERR |  |
RC XRC_INI XRC_TGT RAW_PACKET | SQE RTS |  |
UC | SQE RTS |  | access current
UD | SQE RTS |  | current qkey
RC UC UD XRC_INI XRC_TGT RAW_PACKET | ERR RESET |  |
RC UC UD XRC_INI XRC_TGT RAW_PACKET | ERR ERR |  |
";

const TYPES: [(QpType, &str); 6] = [
    (QpType::RC, "RC"),
    (QpType::UC, "UC"),
    (QpType::UD, "UD"),
    (QpType::XRC_INI, "XRC_INI"),
    (QpType::XRC_TGT, "XRC_TGT"),
    (QpType::RAW_PACKET, "RAW_PACKET"),
];

const BITS: [(&str, u32); 19] = [
    ("current", 1),
    ("notify", 2),
    ("access", 3),
    ("pkey", 4),
    ("port", 5),
    ("qkey", 6),
    ("path", 7),
    ("mtu", 8),
    ("timeout", 9),
    ("retry", 10),
    ("rnr_retry", 11),
    ("rq_psn", 12),
    ("rd", 13),
    ("alt", 14),
    ("rnr_timer", 15),
    ("sq_psn", 16),
    ("dest_rd", 17),
    ("mig", 18),
    ("dest", 20),
];

fn mask(words: &str) -> Mask {
    let bit = |word| BITS.iter().find(|(name, _)| *name == word).expect("a name of BITS").1;
    Mask::from_bits_retain(words.split_whitespace().map(|word| 1 << bit(word)).sum())
}

#[test]
#[cfg_attr(miri, ignore = "safe code, in too many rounds")]
fn the_table_is_the_kernel_s() {
    let states: Vec<QpState> = (0..=6).map(QpState).collect();
    let mut found = 0;
    for (qp_type, type_name) in TYPES {
        for &from in &states {
            for &to in &states {
                let names = (from.description().unwrap(), to.description().unwrap());
                let row = KERNEL.lines().find_map(|line| {
                    let columns: Vec<&str> = line.split('|').collect();
                    let [types, states, required, optional] = columns[..] else { return None };
                    let fits = types.split_whitespace().any(|name| name == type_name)
                        && states.split_whitespace().eq([names.0, names.1]);
                    fits.then(|| (mask(required), mask(optional)))
                });
                found += usize::from(row.is_some());
                let ours = Transition::find(qp_type, from, to);
                let ours = ours.map(|ours| (ours.required, ours.optional));
                assert_eq!(ours, row, "{type_name} from {from} to {to}");
            }
        }
    }
    // 22 transitions of each transport.
    assert_eq!(found, 22 * TYPES.len());
}

fn refusal(qp_type: QpType, from: QpState, attr: QpAttr) -> String {
    let error = check("modify_qp", qp_type, from, &attr).unwrap_err();
    assert_eq!(error.errno(), Errno::INVAL);
    assert_eq!(error.kernel_errno(), None);
    error.message().to_owned()
}

#[test]
fn a_refusal_names_missing_and_superfluous_attributes() {
    let init = QpAttr::new().state(QpState::INIT).port(1);
    let ud = refusal(QpType::UD, QpState::RESET, init);
    assert_eq!(ud, "UD from RESET to INIT: missing pkey_index, qkey");
    let rc = refusal(QpType::RC, QpState::RESET, init.retry_count(1).access(Default::default()));
    assert_eq!(rc, "RC from RESET to INIT: missing pkey_index; superfluous retry_count");
    let raw = refusal(QpType::RAW_PACKET, QpState::RESET, init.pkey_index(0));
    assert_eq!(raw, "raw packet from RESET to INIT: superfluous pkey_index");
    assert!(check("modify_qp", QpType::RAW_PACKET, QpState::RESET, &init).is_ok());

    let rtr = QpAttr::new()
        .state(QpState::RTR)
        .path(AddressVector::global(1, 0, Gid::default()))
        .path_mtu(Mtu::MTU_1024)
        .dest_qpn(Qpn(1))
        .rq_psn(Psn(1));
    assert!(check("modify_qp", QpType::UC, QpState::INIT, &rtr).is_ok());
    let rc = refusal(QpType::RC, QpState::INIT, rtr);
    assert_eq!(rc, "RC from INIT to RTR: missing min_rnr_timer, max_dest_rd_atomic");
}

#[test]
fn transitions_that_do_not_exist_are_named() {
    let rts = QpAttr::new().state(QpState::RTS);
    let text = refusal(QpType::RC, QpState::RESET, rts);
    assert_eq!(text, "a queue pair of type RC cannot go from RESET to RTS");
    let text = refusal(QpType::RC, QpState::RESET, QpAttr::new().state(QpState::ERR));
    assert_eq!(text, "a queue pair of type RC cannot go from RESET to ERR");
    let text = refusal(QpType::RC, QpState::RTR, QpAttr::new().min_rnr_timer(3));
    assert_eq!(text, "a queue pair of type RC takes no changes in state RTR");
}

#[test]
fn a_change_without_a_state_is_one_within_it() {
    let attr = QpAttr::new().min_rnr_timer(3);
    assert!(check("modify_qp", QpType::RC, QpState::RTS, &attr).is_ok());
    let text = refusal(QpType::UC, QpState::RTS, attr);
    assert_eq!(text, "UC from RTS to RTS: superfluous min_rnr_timer");
    assert!(check("modify_qp", QpType::RC, QpState::SQD, &attr.timeout(9)).is_ok());
}

#[test]
fn the_claimed_state_counts() {
    let rts = QpAttr::new().state(QpState::RTS).current_state(QpState::SQE);
    // Last known in RTS, and meanwhile failed.
    assert!(check("modify_qp", QpType::UC, QpState::RTS, &rts).is_ok());
    let text = refusal(QpType::UC, QpState::RTS, rts.path_mig_state(crate::PathMigState::ARMED));
    assert_eq!(text, "UC from SQE to RTS: superfluous path_mig_state");
    for state in [QpState::RESET, QpState::INIT, QpState::ERR] {
        let attr = QpAttr::new().state(QpState::RTS).current_state(state);
        let text = refusal(QpType::UC, QpState::RTS, attr);
        assert_eq!(
            text,
            format!("current_state {state}: only RTR, RTS, SQD or SQE can be assumed")
        );
    }
}

#[test]
fn both_ends_of_an_xrc_connection_take_the_same() {
    let rtr = QpAttr::new()
        .state(QpState::RTR)
        .path(AddressVector::global(1, 0, Gid::default()))
        .path_mtu(Mtu::MTU_1024)
        .dest_qpn(Qpn(1))
        .rq_psn(Psn(1))
        .max_dest_rd_atomic(1)
        .min_rnr_timer(1);
    assert!(check("modify_qp", QpType::XRC_INI, QpState::INIT, &rtr).is_ok());
    assert!(check("modify_qp", QpType::XRC_TGT, QpState::INIT, &rtr).is_ok());
    assert!(check("modify_qp", QpType::UC, QpState::INIT, &rtr).is_err());
    let rts = QpAttr::new()
        .state(QpState::RTS)
        .sq_psn(Psn(0))
        .timeout(14)
        .retry_count(7)
        .rnr_retry(7)
        .max_rd_atomic(1);
    assert!(check("modify_qp", QpType::XRC_INI, QpState::RTR, &rts).is_ok());
    assert!(check("modify_qp", QpType::XRC_TGT, QpState::RTR, &rts).is_ok());
    assert!(check("modify_qp", QpType::UC, QpState::RTR, &rts).is_err());
}

#[test]
fn a_rate_limit_goes_with_everything() {
    let rts = QpAttr::new().state(QpState::RTS).rate_limit(1000);
    assert!(check("modify_qp", QpType::RAW_PACKET, QpState::RTR, &rts).is_ok());
    assert!(check("modify_qp", QpType::RAW_PACKET, QpState::RTS, &rts).is_ok());
}

#[test]
fn a_driver_s_own_kind_is_left_to_the_driver() {
    let attr = QpAttr::new().state(QpState::RTS).qkey(crate::Qkey(3));
    assert!(check("modify_qp", QpType(255), QpState::RESET, &attr).is_ok());
}
