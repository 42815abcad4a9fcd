use super::*;
use crate::Handshake;
use crate::platform::Platform;

fn side(qpn: u32, subnet: u8) -> Local {
    let mut gid = Gid::default();
    gid.0[0] = subnet;
    gid.0[15] = qpn as u8;
    Local {
        endpoint: Endpoint {
            qpn: Qpn(qpn),
            psn: Psn(qpn << 8),
            gid,
            lid: 0,
            mtu: Mtu::MTU_1024,
            rd_atomic: 16,
            qkey: QKEY,
        },
        port: 1,
        gid_index: 3,
        global: true,
        max_rd_atomic: 128,
        atomics: true,
    }
}

#[test]
fn the_smaller_mtu_is_used() {
    let local = side(1, 1);
    let mut remote = side(2, 1).endpoint;
    for (mtu, used) in [
        (Mtu::MTU_4096, Mtu::MTU_1024),
        (Mtu::MTU_512, Mtu::MTU_512),
        (Mtu::MTU_1024, Mtu::MTU_1024),
    ] {
        remote.mtu = mtu;
        let attr = Handshake::new().to_rtr(QpType::UC, &local, &remote);
        let expected = QpAttr::new()
            .state(QpState::RTR)
            .path(AddressVector::global(1, 3, remote.gid))
            .path_mtu(used)
            .dest_qpn(Qpn(2))
            .rq_psn(Psn(0x200));
        assert_eq!(format!("{attr:?}"), format!("{expected:?}"));
    }
}

#[test]
fn each_sends_no_more_reads_than_the_other_answers() {
    let local = side(1, 1);
    let mut remote = side(2, 1).endpoint;
    let reads = |remote: &Endpoint, options: Handshake| {
        format!("{:?}", options.to_rts(QpType::RC, &local, remote))
    };
    assert!(reads(&remote, Handshake::new()).contains("max_rd_atomic: 16"));
    remote.rd_atomic = 2;
    assert!(reads(&remote, Handshake::new()).contains("max_rd_atomic: 2"));
    assert!(reads(&remote, Handshake::new().max_rd_atomic(1)).contains("max_rd_atomic: 1"));
    remote.rd_atomic = 255;
    assert!(reads(&remote, Handshake::new()).contains("max_rd_atomic: 128"));
}

#[test]
fn local_identifiers_do_within_a_subnet() {
    let mut local = side(1, 1);
    local.global = false;
    let near = Endpoint { lid: 7, ..side(2, 1).endpoint };
    let far = Endpoint { lid: 7, ..side(2, 2).endpoint };
    assert_eq!(Handshake::new().path(&local, &near), AddressVector::local(1, 7));
    assert_eq!(Handshake::new().path(&local, &far).global.map(|g| g.dgid), Some(far.gid));
    // Ethernet, or a port whose subnet requires global routes.
    local.global = true;
    assert_eq!(Handshake::new().path(&local, &near).global.map(|g| g.dgid), Some(near.gid));
}

/// With all options, each step has the attributes that its transition needs.
#[test]
fn every_step_is_a_transition() {
    use crate::qp::transition::check;
    let (local, remote) = (side(1, 1), side(2, 1).endpoint);
    let options = Handshake::new().timeout(1).flow_label(5).traffic_class(6).hop_limit(2);
    for qp_type in [QpType::RC, QpType::UC, QpType::UD, QpType::XRC_INI, QpType::XRC_TGT] {
        let steps = [
            (QpState::RESET, options.to_init(qp_type, &local)),
            (QpState::INIT, options.to_init(qp_type, &local)),
            (QpState::INIT, options.to_rtr(qp_type, &local, &remote)),
            (QpState::RTR, options.to_rts(qp_type, &local, &remote)),
        ];
        for (from, attr) in steps {
            check("handshake", qp_type, from, &attr).unwrap();
            attr.check_ranges("handshake").unwrap();
        }
    }
}

#[test]
fn each_option_of_a_handshake_reaches_the_queue_pair() {
    let (local, remote) = (side(1, 1), side(2, 1).endpoint);
    let options = Handshake::new()
        .access(Access::REMOTE_READ)
        .pkey_index(1)
        .timeout(2)
        .retry_count(3)
        .rnr_retry(4)
        .min_rnr_timer(5)
        .max_rd_atomic(6)
        .service_level(7)
        .traffic_class(8)
        .flow_label(9)
        .hop_limit(10);
    let mut path = AddressVector::global(1, 3, remote.gid);
    path.service_level = 7;
    let global = path.global.as_mut().unwrap();
    (global.traffic_class, global.flow_label, global.hop_limit) = (8, 9, 10);
    let expected = [
        QpAttr::new().state(QpState::INIT).port(1).pkey_index(1).access(Access::REMOTE_READ),
        QpAttr::new()
            .state(QpState::RTR)
            .path(path)
            .path_mtu(Mtu::MTU_1024)
            .dest_qpn(Qpn(2))
            .rq_psn(Psn(0x200))
            .max_dest_rd_atomic(16)
            .min_rnr_timer(5),
        QpAttr::new()
            .state(QpState::RTS)
            .sq_psn(Psn(0x100))
            .timeout(2)
            .retry_count(3)
            .rnr_retry(4)
            .max_rd_atomic(6),
    ];
    let steps = [
        options.to_init(QpType::RC, &local),
        options.to_rtr(QpType::RC, &local, &remote),
        options.to_rts(QpType::RC, &local, &remote),
    ];
    for (step, expected) in steps.iter().zip(&expected) {
        assert_eq!(format!("{step:?}"), format!("{expected:?}"));
    }
}

#[test]
fn sequence_numbers_are_random_and_fit() {
    let numbers: Vec<Psn> = (0..8).map(|_| Psn::new(Platform::LINUX.random() as u32)).collect();
    assert!(numbers.iter().all(|psn| psn.0 <= 0xff_ffff));
    assert!(numbers.iter().any(|psn| *psn != numbers[0]));
}

#[test]
fn the_bytes_of_an_endpoint_are_the_same_on_every_machine() {
    let endpoint = Endpoint {
        psn: Psn(0x0a_0b0c),
        lid: 0x0d0e,
        qkey: Qkey(0x0102_0304),
        ..side(0x1234, 0xfe).endpoint
    };
    let mut bytes = [0; Endpoint::BYTES];
    bytes[..4].copy_from_slice(b"uvb1");
    bytes[6..8].copy_from_slice(&[0x12, 0x34]);
    bytes[9..12].copy_from_slice(&[0x0a, 0x0b, 0x0c]);
    (bytes[12], bytes[27]) = (0xfe, 0x34);
    bytes[28..30].copy_from_slice(&[0x0d, 0x0e]);
    (bytes[30], bytes[31]) = (3, 16);
    bytes[32..36].copy_from_slice(&[1, 2, 3, 4]);
    assert_eq!(endpoint.to_bytes(), bytes);
    assert_eq!(Endpoint::from_bytes(&bytes), Some(endpoint));
}

#[test]
fn bytes_that_are_no_endpoint_are_refused() {
    let bytes = side(0x1234, 0xfe).endpoint.to_bytes();
    // Another format, and numbers of more than 24 bits.
    for at in [0, 4, 8] {
        let mut other = bytes;
        other[at] ^= 1;
        assert_eq!(Endpoint::from_bytes(&other), None, "byte {at}");
    }
}

#[cfg(feature = "serde")]
#[test]
fn an_endpoint_survives_the_wire() {
    use serde_test::Token;
    let newtype = |name| Token::NewtypeStruct { name };
    let mut tokens = vec![
        Token::Struct { name: "Endpoint", len: 7 },
        Token::Str("qpn"),
        newtype("Qpn"),
        Token::U32(0x1234),
        Token::Str("psn"),
        newtype("Psn"),
        Token::U32(0x12_3400),
        Token::Str("gid"),
        newtype("Gid"),
        Token::Tuple { len: 16 },
        Token::U8(0xfe),
    ];
    tokens.extend([Token::U8(0); 14]);
    tokens.extend([Token::U8(0x34), Token::TupleEnd]);
    tokens.extend([Token::Str("lid"), Token::U16(0)]);
    tokens.extend([Token::Str("mtu"), newtype("Mtu"), Token::U8(3)]);
    tokens.extend([Token::Str("rd_atomic"), Token::U8(16)]);
    tokens.extend([Token::Str("qkey"), newtype("Qkey"), Token::U32(0x1111_1111)]);
    tokens.push(Token::StructEnd);
    serde_test::assert_tokens(&side(0x1234, 0xfe).endpoint, &tokens);
}

#[test]
fn a_handshake_brings_a_queue_pair_to_rts() {
    use crate::Errno;
    use crate::uverbs::scripted::Op;
    for qp_type in [QpType::RC, QpType::UC, QpType::UD] {
        let bench = crate::tests::Bench::new();
        let qp = bench.pd.qp_builder(&bench.cq, &bench.cq, qp_type).build().unwrap();
        let remote = side(2, 1).endpoint;
        let error = qp.handshake(&remote, &Handshake::new()).unwrap_err();
        assert!(error.message().contains("call QpControl::endpoint before"), "{error}");
        *qp.qp.local.lock().unwrap() = Some(side(1, 1));
        let states = || (qp.state(), QpState(bench.script.object(qp.handle()).state));
        bench.script.refuse(Op::MODIFY_QP, Errno::NOMEM);
        assert_eq!(
            qp.handshake(&remote, &Handshake::new()).unwrap_err().kernel_errno(),
            Some(Errno::NOMEM)
        );
        assert_eq!(states(), (QpState::RESET, QpState::RESET), "{qp_type}");
        bench.script.allow(Op::MODIFY_QP);
        qp.handshake(&remote, &Handshake::new()).unwrap();
        assert_eq!(states(), (QpState::RTS, QpState::RTS), "{qp_type}");
        let before = bench.script.log().len();
        let error = qp.handshake(&remote, &Handshake::new()).unwrap_err();
        assert_eq!(error.errno(), Errno::INVAL, "it is connected: {error}");
        assert!(bench.script.log()[before..].iter().all(|op| *op != Op::MODIFY_QP));
    }
}

#[test]
fn an_endpoint_promises_as_many_reads_as_its_device_answers_up_to_16() {
    use crate::uverbs::scripted::{Op, Script};
    let asked =
        |script: &Script| script.log().into_iter().filter(|op| *op == Op::QUERY_DEVICE).count();
    for (device, queries) in [(Script::new as fn() -> Script, 1), (Script::mlx5, 0)] {
        for (answered, promised, sent, most) in
            [(4, 4, 2, 2), (16, 16, 16, 16), (17, 16, 255, 255), (300, 16, 256, 255)]
        {
            let script = device();
            script.set_reads(answered, sent);
            let bench = crate::tests::Bench::on(script);
            let qp = bench.pd.qp_builder(&bench.cq, &bench.cq, QpType::RC).build().unwrap();
            let before = asked(&bench.script);
            assert_eq!(
                u32::from(qp.endpoint(&qp.context().query_gid(1, 0).unwrap()).unwrap().rd_atomic),
                promised
            );
            // mlx5 reported it when the device was opened.
            assert_eq!(asked(&bench.script) - before, queries);
            assert_eq!(qp.qp.local.lock().unwrap().unwrap().max_rd_atomic, most);
        }
    }
}

#[test]
fn a_handshake_names_an_mtu_that_it_does_not_know() {
    let bench = crate::tests::Bench::new();
    let qp = bench.pd.qp_builder(&bench.cq, &bench.cq, QpType::RC).build().unwrap();
    *qp.qp.local.lock().unwrap() = Some(side(1, 1));
    let remote = Endpoint { mtu: Mtu(9), ..side(2, 1).endpoint };
    let error = qp.handshake(&remote, &Handshake::new()).unwrap_err();
    assert_eq!(error.message(), "the peer's MTU has the unknown code 9");
    assert_eq!(qp.state(), QpState::RESET);
}

/// A peer may send any bytes: an accepted endpoint encodes to the same bytes, and the kernel gets no value
/// out of its range.
#[test]
fn any_bytes_of_a_peer_are_an_endpoint_or_none() {
    let local = side(1, 1);
    let known = [side(2, 1).endpoint.to_bytes().to_vec()];
    let tally = crate::tests::hostile::explore("endpoints", 1, &known, |bytes| {
        let Some(endpoint) = bytes.first_chunk().and_then(Endpoint::from_bytes) else {
            return false;
        };
        // The last four bytes are free.
        assert_eq!(endpoint.to_bytes()[..36], bytes[..36]);
        for qp_type in [QpType::RC, QpType::UC, QpType::UD, QpType::XRC_INI] {
            let handshake = Handshake::new();
            for attr in [
                handshake.to_init(qp_type, &local),
                handshake.to_rtr(qp_type, &local, &endpoint),
                handshake.to_rts(qp_type, &local, &endpoint),
            ] {
                if let Ok(raw) = attr.to_raw("handshake", 7) {
                    assert!(
                        raw.rq_psn >> 24 == 0
                            && raw.sq_psn >> 24 == 0
                            && raw.dest_qp_num >> 24 == 0
                    );
                }
            }
        }
        true
    });
    assert!(tally.taken > 0 && tally.refused > 0, "{tally:?}");
}

/// The driver of a device without atomics refuses to allow them.
#[test]
fn a_device_without_atomics_grants_none_unless_they_are_asked_for() {
    let access = |options: Handshake, atomics| {
        let local = Local { atomics, ..side(1, 0) };
        format!("{:?}", options.to_init(QpType::RC, &local))
    };
    let init = |access| {
        let attr = QpAttr::new().state(QpState::INIT).port(1).pkey_index(0).access(access);
        format!("{attr:?}")
    };
    let usual = Handshake::new();
    assert_eq!(access(usual, true), init(Access::ALL_REMOTE));
    assert_eq!(access(usual, false), init(Access::ALL_REMOTE - Access::REMOTE_ATOMIC));
    let asked = usual.access(Access::REMOTE_ATOMIC);
    assert_eq!(access(asked, false), init(Access::REMOTE_ATOMIC));
}
