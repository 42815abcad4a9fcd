//! Control of queue pairs: states, reset, multicast.

use super::{Bench, poll_ids, ring, ring_recv, wc};
use crate::uverbs::scripted::{Op, Role};
use crate::{Errno, Gid, PostError, Qkey, QpAttr, QpState, QpType, RecvWr, SendWr};
use std::net::Ipv4Addr;
use uverbs_uapi::object::UVERBS_OBJECT_QP;
use uverbs_uapi::write::{
    IB_USER_VERBS_CMD_ATTACH_MCAST, IB_USER_VERBS_CMD_DETACH_MCAST,
    IB_USER_VERBS_CMD_FLAG_EXTENDED, IB_USER_VERBS_CMD_QUERY_QP, IB_USER_VERBS_EX_CMD_MODIFY_QP,
};

const QUERY: Op = Op::Write(IB_USER_VERBS_CMD_QUERY_QP);
const EX_MODIFY_QP: Op =
    Op::Write(IB_USER_VERBS_EX_CMD_MODIFY_QP | IB_USER_VERBS_CMD_FLAG_EXTENDED);
const ATTACH: Op = Op::Write(IB_USER_VERBS_CMD_ATTACH_MCAST);
const DETACH: Op = Op::Write(IB_USER_VERBS_CMD_DETACH_MCAST);

fn times(bench: &Bench, op: Op) -> usize {
    bench.script.log().into_iter().filter(|logged| *logged == op).count()
}

#[test]
fn a_change_of_state_holds_for_posting_at_once() {
    let bench = Bench::new();
    let mut qp = bench.pd.qp_builder(&bench.cq, &bench.cq, QpType::UD).build().unwrap();
    assert_eq!(qp.recv_batch().unwrap_err(), PostError::State(QpState::RESET));
    qp.modify(&QpAttr::new().state(QpState::INIT).port(1).pkey_index(0).qkey(Qkey(1))).unwrap();
    assert_eq!(qp.state(), QpState::INIT);
    assert!(qp.recv_batch().is_ok());
    assert_eq!(qp.send_batch().unwrap_err(), PostError::State(QpState::INIT));
    qp.modify(&QpAttr::new().state(QpState::RTR)).unwrap();
    qp.modify(&QpAttr::new().state(QpState::RTS).sq_psn(crate::Psn(0))).unwrap();
    assert!(qp.send_batch().is_ok());
}

#[test]
fn attributes_that_do_not_fit_the_state_are_refused_before_the_kernel() {
    let bench = Bench::new();
    let qp = bench.pd.qp_builder(&bench.cq, &bench.cq, QpType::RC).build().unwrap();
    let attr = QpAttr::new().state(QpState::INIT).port(1).pkey_index(0);
    let error = qp.modify(&attr).unwrap_err();
    assert_eq!(error.message(), "RC from RESET to INIT: missing access");
    let error = qp.modify(&attr.timeout(32)).unwrap_err();
    assert_eq!(error.message(), "timeout 32 is above the maximum of 31");
    let attr = attr.access(crate::Access::empty());
    for port in [0, 2, 300] {
        let error = qp.modify(&attr.port(port)).unwrap_err();
        let message = format!("port {port} of rxe0, which has ports 1 to 1");
        assert_eq!((error.message(), error.kernel_errno()), (message.as_str(), None));
    }
    let path = crate::AddressVector::global(2, 0, Gid::default());
    let rtr = QpAttr::new().state(QpState::RTR);
    for attr in [rtr.path(path), rtr.alternate_path(path, 0, 0)] {
        let error = qp.modify(&attr).unwrap_err();
        assert_eq!(error.message(), "port 2 of rxe0, which has ports 1 to 1");
    }
    assert_eq!(times(&bench, Op::MODIFY_QP), 0);
    assert_eq!(qp.state(), QpState::RESET);
}

#[test]
fn a_refusal_by_the_kernel_leaves_the_state() {
    let bench = Bench::new();
    let qp = bench.pd.qp_builder(&bench.cq, &bench.cq, QpType::UD).build().unwrap();
    bench.script.refuse(Op::MODIFY_QP, Errno::PERM);
    let attr = QpAttr::new().state(QpState::INIT).port(1).pkey_index(0).qkey(Qkey(1 << 31));
    let error = qp.modify(&attr).unwrap_err();
    assert_eq!(error.kernel_errno(), Some(Errno::PERM));
    assert!(error.message().contains("CAP_NET_RAW"), "{error}");
    assert_eq!(qp.state(), QpState::RESET);
}

#[test]
fn a_change_that_the_kernel_refuses_names_the_possible_fault() {
    let bench = Bench::new();
    let plain = QpAttr::new().qkey(Qkey(1));
    let limited = QpAttr::new().rate_limit(1000);
    let refused = [
        (Errno::INVAL, QpState::RTS, plain, "in state RTS; an index into the port's tables"),
        (Errno::INVAL, QpState::SQD, plain, "in state SQD; until query says that"),
        (Errno::PERM, QpState::RTS, plain, "CAP_NET_RAW"),
        (Errno::HOSTUNREACH, QpState::RTS, plain, "no way to the peer"),
        (Errno::NETUNREACH, QpState::RTS, plain, "no way to the peer"),
        (Errno::TIMEDOUT, QpState::RTS, plain, "no way to the peer"),
        (Errno::OPNOTSUPP, QpState::RTS, limited, "rxe0 limits no rates of type UD"),
    ];
    for (errno, state, attr, text) in refused {
        let qp = bench.qp(QpType::UD);
        qp.qp.set_state(state);
        for op in [Op::MODIFY_QP, EX_MODIFY_QP] {
            bench.script.refuse(op, errno);
        }
        let error = qp.modify(&attr).unwrap_err();
        for op in [Op::MODIFY_QP, EX_MODIFY_QP] {
            bench.script.allow(op);
        }
        assert_eq!(error.kernel_errno(), Some(errno));
        assert!(error.message().contains(text), "{error}");
    }
    bench.script.refuse(Op::MODIFY_QP, Errno::OPNOTSUPP);
    let error = bench.qp(QpType::UD).modify(&plain).unwrap_err();
    assert!(error.is_unsupported() && !error.message().contains("rates"), "{error}");
}

/// rxe lets a queue pair whose send queue is being drained go only to `ERR`.
#[test]
fn a_reset_goes_by_way_of_an_error_only_where_the_kernel_wants_it() {
    let mut bench = Bench::new();
    let mut qp = bench.qp(QpType::RC);
    let before = times(&bench, Op::MODIFY_QP);
    bench.script.fail_step(1, Errno::NOMEM);
    let error = qp.reset(&mut [&mut bench.cq]).unwrap_err();
    assert_eq!(error.kernel_errno(), Some(Errno::NOMEM));
    assert_eq!(times(&bench, Op::MODIFY_QP) - before, 1);
    assert_eq!((qp.state(), bench.script.object(qp.handle()).state), (QpState::RTS, 3));
    bench.script.fail_step(1, Errno::INVAL);
    qp.reset(&mut [&mut bench.cq]).unwrap();
    assert_eq!((qp.state(), bench.script.object(qp.handle()).state), (QpState::RESET, 0));
}

#[test]
fn a_state_that_the_device_changed_is_learned() {
    let mut bench = Bench::new();
    let mut qp = bench.qp(QpType::UD);
    bench.script.set_qp_state(qp.handle(), QpState::SQE.0);
    // A change that is legal from the last known state asks the kernel nothing.
    let before = times(&bench, QUERY);
    qp.modify(&QpAttr::new().qkey(Qkey(2))).unwrap();
    assert_eq!(times(&bench, QUERY), before);
    assert_eq!(qp.query().unwrap().state, QpState::SQE);
    assert_eq!(qp.state(), QpState::SQE);

    // Any other change is checked against the kernel's state.
    bench.script.set_qp_state(qp.handle(), QpState::RESET.0);
    let init = QpAttr::new().state(QpState::INIT).port(1).pkey_index(0).qkey(Qkey(1));
    let error = qp.modify(&init).unwrap_err();
    assert!(error.message().contains("reset it first"), "{error}");
    qp.reset(&mut [&mut bench.cq]).unwrap();
    qp.modify(&init).unwrap();
    assert_eq!(qp.state(), QpState::INIT);
    bench.script.set_qp_state(qp.handle(), QpState::ERR.0);
    let error = qp.modify(&QpAttr::new().sqd_async_notify(true)).unwrap_err();
    assert_eq!(error.message(), "UD from ERR to ERR: superfluous sqd_async_notify");
}

/// rxe's driver does not check the claimed state.
#[test]
fn a_claimed_state_is_the_kernel_s_or_refused() {
    let bench = Bench::new();
    let qp = bench.qp(QpType::UD);
    let back = QpAttr::new().state(QpState::RTS).current_state(QpState::RTS);
    // First the library does not know of the failure, and then it does.
    bench.script.set_qp_state(qp.handle(), QpState::ERR.0);
    for _ in 0..2 {
        let error = qp.modify(&back).unwrap_err();
        assert_eq!(error.message(), "current_state RTS: the queue pair is in state ERR");
        assert_eq!((times(&bench, Op::MODIFY_QP), qp.state()), (0, QpState::ERR));
    }
    let qp = bench.qp(QpType::UD);
    bench.script.set_qp_state(qp.handle(), QpState::SQE.0);
    qp.modify(&back.current_state(QpState::SQE)).unwrap();
    assert_eq!((times(&bench, Op::MODIFY_QP), qp.state()), (1, QpState::RTS));
    qp.modify(&back).unwrap();
}

/// When another process resets a queue pair, the device starts at index 0, and the queues here do
/// not.
#[test]
fn a_queue_pair_that_others_reset_works_on_only_after_a_reset_of_its_own() {
    use QpState as S;
    let mut bench = Bench::new();
    let mut qp = bench.qp(QpType::UD);
    let mut learn = |before: S, told: S| {
        qp.qp.set_state(before);
        bench.script.set_qp_state(qp.handle(), told.0);
        assert_eq!(qp.query().unwrap().state, told);
        let known = (qp.state(), qp.send_batch().err());
        let refused = qp.modify(&QpAttr::new().state(S::ERR)).err();
        let stale = refused.is_some_and(|error| error.message().contains("reset it first"));
        if stale {
            assert_eq!(known, (S::RESET, Some(PostError::State(S::RESET))), "{before}, {told}");
            qp.reset(&mut [&mut bench.cq]).unwrap();
        } else {
            assert_eq!(known.0, told, "{before}, {told}");
        }
        stale
    };
    let all = [S::RESET, S::INIT, S::RTR, S::RTS, S::SQD, S::SQE, S::ERR];
    let stale: Vec<usize> =
        all.map(|told| all.iter().filter(|before| learn(**before, told)).count()).to_vec();
    // For each state, the number of states from which only a reset leads there.
    assert_eq!(stale, [6, 5, 4, 1, 1, 1, 0]);
}

#[test]
fn reset_is_not_a_modification() {
    let bench = Bench::new();
    let qp = bench.qp(QpType::RC);
    let error = qp.modify(&QpAttr::new().state(QpState::RESET)).unwrap_err();
    assert_eq!(error.errno(), Errno::INVAL);
    assert!(error.message().contains("QueuePair::reset"), "{error}");
    assert_eq!(times(&bench, Op::MODIFY_QP), 0);
}

#[test]
fn reset_takes_exactly_the_queue_pair_s_completion_queues() {
    let mut bench = Bench::new();
    let mut recv_cq = bench.context.cq_builder(4).build().unwrap();
    let mut stranger = bench.context.cq_builder(4).build().unwrap();
    let mut qp = bench.pd.qp_builder(&bench.cq, &recv_cq, QpType::RC).build().unwrap();
    let message = |result: crate::Result<()>| result.unwrap_err().message().to_owned();
    assert!(
        message(qp.reset(&mut [&mut bench.cq])).contains("receive completion queue is missing")
    );
    assert!(message(qp.reset(&mut [&mut recv_cq])).contains("send completion queue is missing"));
    assert!(message(qp.reset(&mut [])).contains("missing"));
    let error = qp.reset(&mut [&mut bench.cq, &mut recv_cq, &mut stranger]).unwrap_err();
    assert!(error.message().contains("is not one of"), "{error}");
    assert_eq!(times(&bench, Op::MODIFY_QP), 0);
    qp.reset(&mut [&mut recv_cq, &mut bench.cq]).unwrap();
}

#[test]
fn reset_forgets_completions_of_the_one_queue_pair_only() {
    let mut bench = Bench::new();
    let mut qp = bench.qp(QpType::RC);
    let other = bench.qp(QpType::RC);
    let (own, others, cq) = (qp.qpn().0, other.qpn().0, bench.cq.handle());
    for (qpn, id) in [(own, 1), (others, 2), (own, 3), (others, 4), (own, 5)] {
        bench.script.complete(cq, wc(qpn, id));
    }
    assert_eq!(bench.cq.poll().unwrap().next().map(|completion| completion.wr_id()), Some(1));
    qp.reset(&mut [&mut bench.cq]).unwrap();
    assert_eq!(qp.state(), QpState::RESET);
    // Completions after the reset count again, although the queue pair number is the same.
    bench.script.complete(cq, wc(own, 6));
    assert_eq!(poll_ids(&mut bench.cq), [2, 4, 6]);
    bench.script.complete(cq, wc(own, 7));
    assert_eq!(poll_ids(&mut bench.cq), [7]);
}

#[test]
fn ring_indices_continue_after_a_reset() {
    let mut bench = Bench::new();
    let mut qp = bench.qp(QpType::RC);
    let handle = qp.handle();
    for round in 0..5u64 {
        for n in 0..3 {
            let mut batch = qp.send_batch().unwrap();
            batch.push(SendWr::send(&[]).id(round * 3 + n)).unwrap();
            ring(batch).unwrap();
            let mut batch = qp.recv_batch().unwrap();
            batch.push(RecvWr::new(&[]).id(100 + round * 3 + n)).unwrap();
            ring_recv(batch).unwrap();
        }
        // The kernel skips requests that it has not carried out, up to the producer index.
        for role in [Role::Send, Role::Recv] {
            let mut ids = Vec::new();
            while let Some(wqe) = bench.script.take(handle, role) {
                ids.push(u64::from_le_bytes(wqe[..8].try_into().unwrap()));
            }
            let first = round * 3 + if role == Role::Recv { 100 } else { 0 };
            assert_eq!(ids, [first, first + 1, first + 2]);
        }
        qp.reset(&mut [&mut bench.cq]).unwrap();
        super::bring_up(&bench.script, &qp);
    }
}

#[test]
fn a_reset_that_fails_changes_nothing() {
    let mut bench = Bench::new();
    let mut qp = bench.qp(QpType::RC);
    let own = qp.qpn().0;
    bench.script.complete(bench.cq.handle(), wc(own, 1));
    bench.script.refuse(Op::MODIFY_QP, Errno::NOMEM);
    assert_eq!(qp.reset(&mut [&mut bench.cq]).unwrap_err().errno(), Errno::NOMEM);
    assert_eq!(qp.state(), QpState::RTS);
    assert_eq!(poll_ids(&mut bench.cq), [1]);
}

fn group(n: u8) -> Gid {
    Gid::from(Ipv4Addr::new(239, 0, 0, n))
}

#[test]
fn a_membership_ends_once_and_holds_its_queue_pair() {
    let bench = Bench::new();
    let qp = bench.qp(QpType::UD);
    let one = qp.attach_mcast(group(1), 0).unwrap();
    let two = qp.attach_mcast(group(2), 0).unwrap();
    let error = qp.attach_mcast(group(1), 0).unwrap_err();
    assert_eq!(error.errno(), Errno::EXIST);
    assert_eq!(times(&bench, ATTACH), 2);
    let (qp, error) = qp.destroy().unwrap_err().into_parts();
    assert_eq!(error.errno(), Errno::BUSY);
    assert!(error.message().contains("multicast"), "{error}");
    one.detach().unwrap();
    assert_eq!(times(&bench, DETACH), 1);
    // The group can be joined again.
    drop(qp.attach_mcast(group(1), 0).unwrap());
    assert_eq!(times(&bench, DETACH), 2);
    drop(qp);
    assert_eq!(bench.script.count(UVERBS_OBJECT_QP), 1);
    drop(two);
    assert_eq!((times(&bench, DETACH), bench.script.count(UVERBS_OBJECT_QP)), (3, 0));
    assert_eq!(bench.context.leaked(), 0);
}

#[test]
fn a_membership_that_cannot_end_comes_back() {
    let bench = Bench::new();
    let qp = bench.qp(QpType::UD);
    let membership = qp.attach_mcast(group(1), 0).unwrap();
    bench.script.refuse(DETACH, Errno::NOMEM);
    let (membership, error) = membership.detach().unwrap_err().into_parts();
    assert_eq!(error.errno(), Errno::NOMEM);
    assert_eq!(qp.attach_mcast(group(1), 0).unwrap_err().errno(), Errno::EXIST);
    bench.script.allow(DETACH);
    membership.detach().unwrap();
    qp.destroy().unwrap();
}

#[test]
fn a_membership_ends_with_its_device() {
    let bench = Bench::new();
    let qp = bench.qp(QpType::UD);
    let membership = qp.attach_mcast(group(1), 0).unwrap();
    bench.script.vanish();
    membership.detach().unwrap();
    drop(qp);
    assert_eq!(bench.context.leaked(), 0);
}

#[test]
fn only_datagram_queue_pairs_join_and_only_multicast_groups() {
    let bench = Bench::new();
    let rc = bench.qp(QpType::RC);
    let error = rc.attach_mcast(group(1), 0).unwrap_err();
    assert_eq!(error.message(), "a queue pair of type RC; only UD has groups");
    let ud = bench.qp(QpType::UD);
    let error = ud.attach_mcast(Ipv4Addr::new(10, 0, 0, 1).into(), 0).unwrap_err();
    assert_eq!(error.message(), "::ffff:10.0.0.1 is not a multicast address");
    assert_eq!(times(&bench, ATTACH), 0);
}
