//! Messages for errors that a kernel reports by an errno alone: the arguments, their fault, and the remedy.

use super::{Bench, bring_up};
use crate::owned::OwnedCompletionQueue;
use crate::uverbs::scripted::{Op, Script};
use crate::{
    Access, AddressVector, CqRef, Errno, Error, FlowAttr, FlowEth, FlowPorts, FlowSpec, Gid, Mtu,
    ObjectKind, Psn, QpAttr, QpState, QpType, Qpn, Rereg,
};
use std::net::{Ipv4Addr, Ipv6Addr};
use std::sync::{Arc, Mutex, RwLock};
use uverbs_uapi::device::{UVERBS_METHOD_INFO_HANDLES, UVERBS_METHOD_QUERY_PORT};
use uverbs_uapi::mr::UVERBS_METHOD_REG_DMABUF_MR;
use uverbs_uapi::object::{UVERBS_OBJECT_DEVICE, UVERBS_OBJECT_MR, UVERBS_OBJECT_SRQ};
use uverbs_uapi::srq::UVERBS_METHOD_SRQ_CREATE;
use uverbs_uapi::write::{
    IB_USER_VERBS_CMD_ATTACH_MCAST, IB_USER_VERBS_CMD_FLAG_EXTENDED, IB_USER_VERBS_CMD_MODIFY_SRQ,
    IB_USER_VERBS_CMD_REG_MR, IB_USER_VERBS_CMD_REREG_MR, IB_USER_VERBS_EX_CMD_CREATE_FLOW,
};

const QUERY_PORT: Op =
    Op::Method { object: UVERBS_OBJECT_DEVICE, method: UVERBS_METHOD_QUERY_PORT };

/// The error of a call whose command the kernel refuses.
fn refused<T: std::fmt::Debug>(
    script: &Script,
    op: Op,
    errno: Errno,
    call: impl FnOnce() -> crate::Result<T>,
) -> Error {
    script.refuse(op, errno);
    let error = call().unwrap_err();
    script.allow(op);
    check_style(&error);
    error
}

/// No error message contains a struct, flags as a number, or a size of more than nine digits.
fn check_style(error: &Error) {
    let text = error.to_string();
    assert!(!text.contains('{') && !text.contains("(0x"), "{text}");
    assert!(text.len() < 300, "{text}");
    // Not the digits of an address, which is hexadecimal.
    let mut words = text.split(|c: char| !c.is_ascii_alphanumeric());
    let is_long = |word: &str| word.len() > 9 && word.bytes().all(|byte| byte.is_ascii_digit());
    assert!(!words.any(is_long), "{text}");
}

fn path(peer: impl Into<Gid>) -> AddressVector {
    AddressVector::global(1, 3, peer.into())
}

fn to_rtr(path: AddressVector) -> QpAttr {
    let attr = QpAttr::new().state(QpState::RTR).path(path).path_mtu(Mtu::MTU_256);
    attr.dest_qpn(Qpn(7)).rq_psn(Psn(0)).max_dest_rd_atomic(1).min_rnr_timer(12)
}

/// The own GID of index 3 is 10.0.1.3.
#[test]
fn a_path_that_the_kernel_does_not_take_says_why() {
    let bench = Bench::new();
    let near = Ipv4Addr::new(10, 0, 1, 9);
    let v6: Ipv6Addr = "2001:db8::9".parse().unwrap();
    let cases: [(Errno, Gid, &[&str]); 6] = [
        (Errno::INVAL, v6.into(), &["(10.0.1.3) is of IPv4", "2001:db8::9 of IPv6"]),
        (Errno::TIMEDOUT, near.into(), &["10.0.1.9 does not answer", "ARP", "GID index 3"]),
        (Errno::NETUNREACH, near.into(), &["no route leads to 10.0.1.9", "10.0.1.3"]),
        (Errno::HOSTUNREACH, near.into(), &["no route leads to 10.0.1.9", "choose_gid"]),
        (Errno::TIMEDOUT, Ipv4Addr::LOCALHOST.into(), &["127.0.0.1", "loopback interface"]),
        (Errno::NODEV, Ipv6Addr::LOCALHOST.into(), &["::1", "loopback interface"]),
    ];
    for (errno, peer, texts) in cases {
        let ah = refused(&bench.script, Op::CREATE_AH, errno, || bench.pd.create_ah(&path(peer)));
        let qp = bench.pd.qp_builder(&bench.cq, &bench.cq, QpType::RC).build().unwrap();
        qp.qp.set_state(QpState::INIT);
        let call = || qp.modify(&to_rtr(path(peer)));
        let modify = refused(&bench.script, Op::MODIFY_QP, errno, call);
        for (error, verb) in [(ah, "create_ah"), (modify, "modify_qp")] {
            assert_eq!((error.verb(), error.kernel_errno()), (verb, Some(errno)));
            for text in texts {
                assert!(error.message().contains(text), "{error}");
            }
        }
    }
    // The index is beyond the table, and the kernel answers only an errno.
    let beyond = AddressVector::global(1, 9, near.into());
    let call = || bench.pd.create_ah(&beyond);
    let error = refused(&bench.script, Op::CREATE_AH, Errno::INVAL, call);
    assert_eq!(error.message(), "index 9 of port 1, whose table has 4 entries");
    // Another errno gets the arguments in its message.
    let call = || bench.pd.create_ah(&path(near));
    let error = refused(&bench.script, Op::CREATE_AH, Errno::BUSY, call);
    assert_eq!(error.message(), "port 1 of rxe0, GID index 3 to 10.0.1.9");
}

#[test]
fn a_change_of_a_queue_pair_that_the_kernel_refuses_names_the_value_or_the_attributes() {
    let bench = Bench::new();
    let near = Ipv4Addr::new(10, 0, 1, 9);
    let make = || bench.pd.qp_builder(&bench.cq, &bench.cq, QpType::RC).build().unwrap();
    let modify = |attr: &QpAttr, from| {
        let qp = make();
        qp.qp.set_state(from);
        refused(&bench.script, Op::MODIFY_QP, Errno::INVAL, || qp.modify(attr))
    };
    let large = to_rtr(path(near)).path_mtu(Mtu::MTU_4096);
    let error = modify(&large, QpState::INIT);
    assert_eq!(error.message(), "path_mtu 4096 is above the port's, which is 1024");
    let init = QpAttr::new().state(QpState::INIT).port(1).pkey_index(9).access(Access::empty());
    let error = modify(&init, QpState::RESET);
    assert_eq!(error.message(), "pkey_index 9; the port's table has 0 entries");
    let many = to_rtr(path(near)).max_dest_rd_atomic(255);
    let error = modify(&many, QpState::INIT);
    assert!(error.message().starts_with("max_dest_rd_atomic 255 is above the device's"), "{error}");
    // No fault is known: the message has the names of the attributes, and no values.
    let qp = make();
    qp.qp.set_state(QpState::RTS);
    let attr = QpAttr::new().state(QpState::RTS).access(Access::empty()).min_rnr_timer(1);
    let error = refused(&bench.script, Op::MODIFY_QP, Errno::INVAL, || qp.modify(&attr));
    let text = "the kernel refuses RC from RTS to RTS with access, min_rnr_timer; an index";
    assert!(error.message().starts_with(text), "{error}");
    let error = refused(&bench.script, Op::MODIFY_QP, Errno::BUSY, || qp.modify(&attr));
    assert_eq!(error.message(), "RC from RTS to RTS with access, min_rnr_timer");
    // The errno is not about a value, so neither port nor device limits are queried.
    let (qp, before) = (make(), bench.script.log().len());
    let error = refused(&bench.script, Op::MODIFY_QP, Errno::BUSY, || qp.modify(&init));
    assert_eq!(error.message(), "RC from RESET to INIT with access, pkey_index, port");
    assert_eq!(bench.script.log()[before..], [Op::MODIFY_QP]);
}

#[test]
fn memory_that_the_kernel_does_not_register_is_described() {
    let bench = Bench::new();
    const REG_MR: Op = Op::Write(IB_USER_VERBS_CMD_REG_MR);
    let allocate = |errno| {
        let builder = bench.pd.mr_builder().access(Access::empty());
        refused(&bench.script, REG_MR, errno, || builder.allocate::<u8>(16 << 20))
    };
    let invalid = allocate(Errno::INVAL);
    assert_eq!(invalid.message(), "16 MiB with access local reads only");
    assert!(allocate(Errno::OPNOTSUPP).message().ends_with("with access local reads only"));
    let busy = allocate(Errno::BUSY);
    assert!(busy.message().starts_with("16 MiB at 0x"), "{busy}");
    const REG_DMABUF: Op =
        Op::Method { object: UVERBS_OBJECT_MR, method: UVERBS_METHOD_REG_DMABUF_MR };
    let file = std::fs::File::open("/dev/null").unwrap();
    let call = || {
        bench.pd.mr_builder().access(Access::LOCAL_WRITE).iova(0).register_dmabuf(&file, 0, 1 << 40)
    };
    let error = refused(&bench.script, REG_DMABUF, Errno::INVAL, call);
    assert!(error.message().contains("is no dma-buf"), "{error}");
    let mut region = bench.pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u8>(64).unwrap();
    let change = Rereg::new().access(Access::LOCAL_WRITE);
    let rereg = Op::Write(IB_USER_VERBS_CMD_REREG_MR);
    let error = refused(&bench.script, rereg, Errno::INVAL, || region.rereg(change));
    assert!(error.message().ends_with("REMOTE_ATOMIC to LOCAL_WRITE"), "{error}");
    let exchange = || region.exchange(vec![0u8; 64]).map_err(|failed| failed.error);
    let error = refused(&bench.script, rereg, Errno::INVAL, exchange);
    assert!(error.message().starts_with("64 bytes with access LOCAL_WRITE"), "{error}");
    // More memory than any machine has: the message has the size in a unit.
    check_style(&bench.pd.mr_builder().allocate::<u64>(1 << 60).unwrap_err());
}

#[test]
fn errors_of_other_errnos_name_the_arguments() {
    let bench = Bench::on(Script::mlx5());
    let Bench { script, context, pd, cq } = &bench;
    let errno = Errno::NOTRECOVERABLE;
    let mut srq = pd.srq_builder(4).build().unwrap();
    let list = Op::Method { object: UVERBS_OBJECT_DEVICE, method: UVERBS_METHOD_INFO_HANDLES };
    let srq_create = Op::Method { object: UVERBS_OBJECT_SRQ, method: UVERBS_METHOD_SRQ_CREATE };
    let modify_srq = Op::Write(IB_USER_VERBS_CMD_MODIFY_SRQ);
    let attach = Op::Write(IB_USER_VERBS_CMD_ATTACH_MCAST);
    let ud = bench.qp(QpType::UD);
    let group: Ipv6Addr = "ff0e::ffff:e000:1".parse().unwrap();
    let mut resized = context.cq_builder(4).build().unwrap();
    let told = [
        refused(script, Op::CREATE_CQ, errno, || context.cq_builder(4).build()),
        refused(script, Op::RESIZE_CQ, errno, || resized.resize(99)),
        refused(script, Op::CREATE_QP, errno, || pd.qp_builder(cq, cq, QpType::RC).build()),
        refused(script, srq_create, errno, || pd.srq_builder(4).build()),
        refused(script, modify_srq, errno, || srq.set_limit(2)),
        refused(script, QUERY_PORT, errno, || context.query_port(1)),
        refused(script, list, errno, || context.handles(ObjectKind::QP)),
        refused(script, attach, errno, || ud.attach_mcast(group.into(), 0)),
    ];
    for (error, text) in told.iter().zip([
        "4 entries of 64 bytes on vector 0",
        "to 99 entries",
        "type RC with max_send_wr 1",
        "max_wr 4 and max_sge 1",
        "a limit of 2",
        "port 1 of mlx5_0",
        "the objects of kind",
        "group ff0e::ffff:e000:1",
    ]) {
        assert!(error.message().starts_with(text), "{error}: {text}");
        assert_eq!(error.kernel_errno(), Some(errno));
    }
    // The text of the kernel's errno is kept.
    let gone = refused(script, Op::CREATE_CQ, Errno::IO, || context.cq_builder(4).build());
    assert!(gone.message().contains("the device is gone"), "{gone}");
}

#[test]
fn a_rule_that_the_kernel_refuses_is_described_in_words() {
    let bench = Bench::on(Script::mlx5());
    let create = Op::Write(IB_USER_VERBS_EX_CMD_CREATE_FLOW | IB_USER_VERBS_CMD_FLAG_EXTENDED);
    let qp = bench.pd.qp_builder(&bench.cq, &bench.cq, QpType::RAW_PACKET).build().unwrap();
    let rule = FlowAttr::new(1)
        .spec(FlowEth::new().dst_mac([2, 0, 0, 0, 0, 1]))
        .spec(FlowSpec::Udp(FlowPorts::new().dst_port(4791)))
        .tag(7);
    for errno in [Errno::INVAL, Errno::OPNOTSUPP, Errno::EXIST, Errno::BUSY] {
        let error = refused(&bench.script, create, errno, || qp.create_flow(&rule));
        let text = "rule of type normal, port 1, priority 0 with specifications Ethernet, UDP, tag";
        assert!(error.message().contains(text), "{error}");
    }
}

/// Every type that leads to a completion queue can be given to a queue pair.
#[test]
fn guards_and_pointers_of_completion_queues_are_taken() {
    let bench = Bench::new();
    fn make(bench: &Bench, cq: &impl CqRef) {
        let qp = bench.pd.qp_builder(cq, cq, QpType::RC).build().unwrap();
        qp.destroy().unwrap();
    }
    let cq = || bench.context.cq_builder(4).build().unwrap();
    let shared = Mutex::new(cq());
    let guard = shared.lock().unwrap();
    make(&bench, &guard);
    let shared = RwLock::new(cq());
    make(&bench, &shared.read().unwrap());
    make(&bench, &shared.write().unwrap());
    make(&bench, &Box::new(cq()));
    make(&bench, &Arc::new(cq()));
    make(&bench, &std::rc::Rc::new(cq()));
    make(&bench, &std::cell::RefCell::new(cq()).borrow_mut());
    make(&bench, &OwnedCompletionQueue::<()>::new(cq()));
    make(&bench, &Mutex::new(OwnedCompletionQueue::<()>::new(cq())).lock().unwrap());
}

#[test]
fn a_queue_pair_is_adopted_before_it_is_connected() {
    let bench = Bench::new();
    let mut cq = OwnedCompletionQueue::<()>::new(bench.context.cq_builder(64).build().unwrap());
    let qp = bench.pd.qp_builder(&cq, &cq, QpType::RC).build().unwrap();
    bring_up(&bench.script, &qp);
    let (qp, error) = cq.adopt(qp).unwrap_err().into_parts();
    check_style(&error);
    assert!(error.message().ends_with("adopt first, then connect"), "{error}");
    assert!(error.message().contains("not in state RESET but in RTS"), "{error}");
    drop(qp);
    // Twice the requested number and 4 more are enough, as `cq_builder` says; exactly the requested number is not.
    let bench = Bench::on(Script::mlx5());
    for (sends, receives) in [(1, 1), (5, 0), (33, 1), (100, 3)] {
        let exact = bench.context.cq_builder(2 * (sends + receives) + 4).build().unwrap();
        let mut cq = OwnedCompletionQueue::<()>::new(exact);
        let builder = bench.pd.qp_builder(&cq, &cq, QpType::RC).max_inline_data(100);
        let qp = builder.max_send_wr(sends).max_recv_wr(receives).build().unwrap();
        cq.adopt(qp).unwrap();
    }
    let mut cq = OwnedCompletionQueue::<()>::new(bench.context.cq_builder(7).build().unwrap());
    let qp = bench.pd.qp_builder(&cq, &cq, QpType::RC).max_send_wr(5).max_recv_wr(2).build();
    let (qp, error) = cq.adopt(qp.unwrap()).unwrap_err().into_parts();
    let needed = qp.caps().max_send_wr + qp.caps().max_recv_wr;
    assert!(error.message().contains(&format!("with cq_builder({needed})")), "{error}");
    let mut cq = OwnedCompletionQueue::<()>::new(bench.context.cq_builder(needed).build().unwrap());
    let qp = bench.pd.qp_builder(&cq, &cq, QpType::RC).max_send_wr(5).max_recv_wr(2).build();
    cq.adopt(qp.unwrap()).unwrap();
}
