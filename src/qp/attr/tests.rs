use super::*;
use crate::{Gid, GlobalRoute};
use zerocopy::IntoBytes;

const HANDLE: u32 = 0x0a0b_0c0d;

/// Attributes with a value of their own in each byte.
fn all() -> QpAttr {
    let path = AddressVector {
        port: 0x2e,
        dlid: 0x2122,
        global: Some(GlobalRoute {
            dgid: Gid(std::array::from_fn(|n| n as u8 + 1)),
            sgid_index: 0x25,
            flow_label: 0x000a_1112,
            hop_limit: 0x26,
            traffic_class: 0x27,
        }),
        service_level: 8,
        src_path_bits: 0x29,
        static_rate: 0x2a,
    };
    let alternate = AddressVector { port: 0x6e, dlid: 0x6162, service_level: 6, ..path };
    QpAttr::new()
        .state(QpState::RTS)
        .current_state(QpState::SQD)
        .sqd_async_notify(true)
        .access(Access::REMOTE_READ | Access::RELAXED_ORDERING)
        .pkey_index(0x5152)
        .port(0x35)
        .qkey(Qkey(0x7172_7374))
        .path(path)
        .path_mtu(Mtu::MTU_2048)
        .timeout(0x13)
        .retry_count(5)
        .rnr_retry(6)
        .rq_psn(Psn(0x0081_8283))
        .max_rd_atomic(0x91)
        .alternate_path(alternate, 0x6364, 0x1d)
        .min_rnr_timer(0x1e)
        .sq_psn(Psn(0x00a1_a2a3))
        .max_dest_rd_atomic(0x92)
        .path_mig_state(PathMigState::ARMED)
        .dest_qpn(Qpn(0x00b1_b2b3))
}

/// The struct as `rdma/ib_user_verbs.h` lays it out: offset and bytes of each field.
#[test]
#[cfg(target_endian = "little")]
fn each_attribute_lands_in_its_field() {
    let gid: Vec<u8> = (1..=16).collect();
    let fields: &[(usize, &[u8])] = &[
        (0, &gid),
        (16, &[0x12, 0x11, 0x0a, 0]),
        (20, &[0x22, 0x21]),
        (24, &[0x25, 0x26, 0x27, 8, 0x29, 0x2a, 1, 0x2e]),
        (32, &gid),
        (48, &[0x12, 0x11, 0x0a, 0]),
        (52, &[0x62, 0x61]),
        (56, &[0x25, 0x26, 0x27, 6, 0x29, 0x2a, 1, 0x6e]),
        (64, &[0x0d, 0x0c, 0x0b, 0x0a]),
        (68, &[0xff, 0xff, 0x17, 0]), // mask: 0 to 18, 20
        (72, &[0x74, 0x73, 0x72, 0x71]),
        (76, &[0x83, 0x82, 0x81, 0]),
        (80, &[0xa3, 0xa2, 0xa1, 0]),
        (84, &[0xb3, 0xb2, 0xb1, 0]),
        (88, &[4, 0, 0, 0]), // REMOTE_READ alone
        (92, &[0x52, 0x51]),
        (94, &[0x64, 0x63]),
        (96, &[3, 4, 4, 2, 1]), // state, current, mtu, migration, notify
        (101, &[0x91, 0x92, 0x1e, 0x35, 0x13, 5, 6]),
        (108, &[0x6e, 0x1d]),
    ];
    let mut expected = [0u8; 112];
    for (offset, bytes) in fields {
        expected[*offset..offset + bytes.len()].copy_from_slice(bytes);
    }
    assert_eq!(all().to_raw("modify_qp", HANDLE).unwrap().as_bytes(), expected);
    assert_eq!(all().limit(), None);
}

#[test]
fn each_attribute_has_its_bit() {
    let path = AddressVector::local(1, 1);
    let bits = [
        (QpAttr::new().state(QpState::INIT), 0),
        (QpAttr::new().current_state(QpState::RTS), 1),
        (QpAttr::new().sqd_async_notify(true), 2),
        (QpAttr::new().access(Access::empty()), 3),
        (QpAttr::new().pkey_index(0), 4),
        (QpAttr::new().port(1), 5),
        (QpAttr::new().qkey(Qkey(0)), 6),
        (QpAttr::new().path(path), 7),
        (QpAttr::new().path_mtu(Mtu::MTU_256), 8),
        (QpAttr::new().timeout(0), 9),
        (QpAttr::new().retry_count(0), 10),
        (QpAttr::new().rnr_retry(0), 11),
        (QpAttr::new().rq_psn(Psn(0)), 12),
        (QpAttr::new().max_rd_atomic(0), 13),
        (QpAttr::new().alternate_path(path, 0, 0), 14),
        (QpAttr::new().min_rnr_timer(0), 15),
        (QpAttr::new().sq_psn(Psn(0)), 16),
        (QpAttr::new().max_dest_rd_atomic(0), 17),
        (QpAttr::new().path_mig_state(PathMigState::REARM), 18),
        (QpAttr::new().dest_qpn(Qpn(0)), 20),
        (QpAttr::new().rate_limit(7), 25),
    ];
    for (attr, bit) in bits {
        assert_eq!(attr.mask(), 1 << bit, "{attr:?}");
    }
    assert_eq!(QpAttr::new().rate_limit(7).limit(), Some(7));
    assert_eq!(QpAttr::new().mask(), 0);
}

#[test]
fn values_out_of_range_are_named() {
    let path = AddressVector::local(1, 1);
    let wrong = [
        (QpAttr::new().state(QpState(7)), "state 7 is above the maximum of 6"),
        (QpAttr::new().timeout(32), "timeout 32 is above the maximum of 31"),
        (QpAttr::new().retry_count(8), "retry_count 8 is above the maximum of 7"),
        (QpAttr::new().rnr_retry(8), "rnr_retry 8 is above the maximum of 7"),
        (QpAttr::new().min_rnr_timer(32), "min_rnr_timer 32 is above the maximum of 31"),
        (QpAttr::new().rq_psn(Psn(1 << 24)), "rq_psn 16777216 is above the maximum of 16777215"),
        (QpAttr::new().sq_psn(Psn(1 << 24)), "sq_psn 16777216 is above the maximum of 16777215"),
        (
            QpAttr::new().dest_qpn(Qpn(1 << 24)),
            "dest_qpn 16777216 is above the maximum of 16777215",
        ),
        (
            QpAttr::new().path(AddressVector { service_level: 16, ..path }),
            "path service_level 16 is above the maximum of 15",
        ),
        (
            QpAttr::new().alternate_path(path, 0, 32),
            "alternate_path timeout 32 is above the maximum of 31",
        ),
        (QpAttr::new().path_mtu(Mtu(0)), "path_mtu has code 0; 1 (256 bytes) to 5 (4096) exist"),
    ];
    for (attr, message) in wrong {
        assert_eq!(attr.check_ranges("modify_qp").unwrap_err().message(), message);
    }
    all().check_ranges("modify_qp").unwrap();
}

#[test]
fn debug_shows_only_attributes_that_are_set() {
    let attr = QpAttr::new().state(QpState::INIT).port(2).qkey(Qkey(0x11));
    assert_eq!(format!("{attr:?}"), "QpAttr { state: INIT, port: 2, qkey: Qkey(0x11) }");
}

#[test]
fn ports_and_indices_that_do_not_fit_are_named() {
    let path = AddressVector::global(1, 256, Gid::default());
    let far = AddressVector::local(257, 1);
    let wrong = [
        (QpAttr::new().port(256), "port 256 is above the maximum of 255"),
        (QpAttr::new().path(path), "sgid_index 256 is above the maximum of 255"),
        (QpAttr::new().alternate_path(far, 0, 0), "port 257 is above the maximum of 255"),
    ];
    for (attr, message) in wrong {
        assert_eq!(attr.to_raw("modify_qp", HANDLE).unwrap_err().message(), message);
    }
    let attr = QpAttr::new().port(3).path(path).alternate_path(far, 0, 0);
    assert_eq!(attr.ports().collect::<Vec<_>>(), [3, 1, 257]);
    assert_eq!(QpAttr::new().state(QpState::RTS).ports().count(), 0);
}
