//! XRC domains, on a device of a fabric.

use super::Bench;
use super::futures::Watched;
use crate::owned::{OwnedCompletionQueue, OwnedSharedReceiveQueue};
use crate::uverbs::scripted::{Op, Script};
use crate::{Access, Context, Errno, QpAttr, QpState, Qpn};
use rustix::fs::{MemfdFlags, OFlags, memfd_create};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use uverbs_uapi::mlx5::abi::{mlx5_ib_create_qp, mlx5_ib_create_srq};
use uverbs_uapi::mlx5::object::MLX5_IB_OBJECT_UAR;
use uverbs_uapi::object::{UVERBS_OBJECT_QP, UVERBS_OBJECT_XRCD};
use uverbs_uapi::srq::UVERBS_ATTR_CREATE_SRQ_RESP_SRQ_NUM;

/// The change of a target to INIT.
fn init() -> QpAttr {
    QpAttr::new().state(QpState::INIT).port(1).pkey_index(0).access(Access::empty())
}

fn device() -> (Script, Context) {
    let script = Script::mlx5();
    let context = script.open("mlx5_0");
    (script, context)
}

fn file() -> OwnedFd {
    memfd_create("domain", MemfdFlags::CLOEXEC).expect("a file")
}

#[test]
#[cfg_attr(miri, ignore = "it looks into /proc")]
fn a_refused_open_names_the_reason() {
    let (script, context) = device();
    let path = rustix::fs::open("/", OFlags::PATH, rustix::fs::Mode::empty()).unwrap();
    let error = context.xrcd_builder().file(&path).create().build().unwrap_err();
    assert_eq!(error.kernel_errno(), Some(Errno::BADF));
    assert!(error.message().contains("O_PATH"), "{error}");
    script.refuse(Op::OPEN_XRCD, Errno::AGAIN);
    let error = context.xrcd_builder().build().unwrap_err();
    assert!(error.message().contains("cgroup"), "{error}");
    // With `create`, a missing domain is not the reason of a failure.
    let error = context.xrcd_builder().file(&file()).create().build().unwrap_err();
    assert!(error.message().contains("cgroup") && !error.message().contains("asked"), "{error}");
    script.allow(Op::OPEN_XRCD);
    let plain = Bench::new();
    let error = plain.context.xrcd_builder().build().unwrap_err();
    assert!(error.is_unsupported() && error.message().contains("rxe0"), "{error}");
}

#[test]
#[cfg_attr(miri, ignore = "it looks into /proc")]
fn closing_destroys_or_gives_the_domain_back() {
    let (script, context) = device();
    let domain = context.xrcd_builder().build().unwrap();
    script.refuse_destroy(domain.handle(), Errno::BUSY);
    let (domain, error) = domain.destroy().unwrap_err().into_parts();
    assert_eq!((error.verb(), error.kernel_errno()), ("close_xrcd", Some(Errno::BUSY)));
    script.permit_destroy(domain.handle());
    domain.destroy().unwrap();
    assert_eq!(script.count(UVERBS_OBJECT_XRCD), 0);
    let domain = context.xrcd_builder().build().unwrap();
    drop(context);
    drop(domain);
    let left = script.left_at_close().unwrap();
    assert!(left.iter().all(|(kind, _)| *kind == MLX5_IB_OBJECT_UAR), "{left:?}");
    assert_eq!(script.complaints(), [""; 0]);
}

#[test]
fn a_queue_that_a_shared_receive_queue_completes_to_names_its_holder() {
    let bench = Bench::on(Script::mlx5());
    let domain = bench.context.xrcd_builder().build().unwrap();
    let srq = bench.pd.srq_builder(4).xrc(&domain, &bench.cq).build().unwrap();
    let (cq, error) = bench.cq.destroy().unwrap_err().into_parts();
    assert_eq!((error.errno(), error.kernel_errno()), (Errno::BUSY, None));
    assert!(error.message().contains("a shared receive queue of an XRC domain"), "{error}");
    drop(srq);
    cq.destroy().unwrap();
}

/// Each may have as many completions at once as it holds receives.
#[test]
fn a_shared_receive_queue_that_is_dropped_makes_room_for_the_next() {
    let bench = Bench::on(Script::mlx5());
    let domain = bench.context.xrcd_builder().build().unwrap();
    let own = bench.context.cq_builder(16).build().unwrap();
    let mut cq: OwnedCompletionQueue<u64> = OwnedCompletionQueue::new(own);
    for _ in 0..3 {
        let most = cq.queue().capacity() / 2 + 1;
        let make = |cq| bench.pd.srq_builder(most).xrc(&domain, cq).build().unwrap();
        let (first, second) = (make(cq.queue()), make(cq.queue()));
        let first = cq.adopt_srq(first).unwrap();
        let refused = cq.adopt_srq(second).unwrap_err();
        assert!(refused.error.message().contains("create it larger"), "{refused}");
        // As an object of DEVX does: messages still complete its receives.
        let kept = first.queue().inner.clone();
        drop(first);
        let refused = cq.adopt_srq(refused.into_object()).unwrap_err();
        drop(kept);
        cq.adopt_srq(refused.into_object()).unwrap();
    }
}

/// A refusal leaves the queue usable for the next attempt.
#[test]
fn a_shared_receive_queue_that_is_refused_comes_back() {
    let bench = Bench::on(Script::mlx5());
    let domain = bench.context.xrcd_builder().build().unwrap();
    let pool = bench.pd.buffer_pool_builder(64).build().unwrap();
    let own = bench.context.cq_builder(16).build().unwrap();
    let mut cq: OwnedCompletionQueue<u64> = OwnedCompletionQueue::new(own);
    let most = cq.queue().capacity() / 2 + 1;
    let make = |cq| bench.pd.srq_builder(most).xrc(&domain, cq).build().unwrap();
    let (first, second) = (make(cq.queue()), make(cq.queue()));
    let handle = second.handle();
    let first = cq.adopt_srq(first).unwrap();
    let refused = cq.adopt_srq(second).unwrap_err();
    let refused = OwnedSharedReceiveQueue::<u64>::new(refused.into_object()).unwrap_err();
    assert!(refused.error.message().contains("its completion queue adopts it"), "{refused}");
    drop(first);
    let mut srq = cq.adopt_srq(refused.into_object()).unwrap();
    assert_eq!(srq.queue().handle(), handle);
    let all = pool.idle();
    let mut batch = srq.batch().unwrap();
    batch.push(pool.take().unwrap(), 1).unwrap();
    batch.ring().unwrap();
    assert_eq!(pool.idle(), all - 1);
    drop(srq);
    assert_eq!((pool.idle(), bench.context.leaked()), (all, 0));
}

#[test]
fn a_queue_of_futures_has_the_number_that_the_kernel_gave_it() {
    let bench = Bench::on(Script::mlx5());
    let domain = bench.context.xrcd_builder().build().unwrap();
    let made = bench.context.cq_builder(16).build_async(|_| Ok(Watched::default()));
    let (cq, _driver) = made.unwrap();
    let plain = cq.adopt_srq(bench.pd.srq_builder(4).build().unwrap()).unwrap();
    assert_eq!(plain.number(), None, "no sender names it");
    let told = Arc::new(Mutex::new(None));
    let seen = told.clone();
    bench.script.forge(
        Op::CREATE_SRQ,
        UVERBS_ATTR_CREATE_SRQ_RESP_SRQ_NUM,
        move |number: &mut u32| {
            *seen.lock().unwrap() = Some(*number);
        },
    );
    let srq = bench.pd.srq_builder(4).xrc(&domain, &cq).build().unwrap();
    let srq = cq.adopt_srq(srq).unwrap();
    let told: u32 = told.lock().unwrap().unwrap();
    assert_eq!(srq.number().map(|number| number.0), Some(told));
}

/// mlx5's driver refuses such a queue without one; other queues have none.
#[test]
fn a_shared_receive_queue_of_an_xrc_domain_has_a_user_index() {
    let bench = Bench::on(Script::mlx5());
    let domain = bench.context.xrcd_builder().build().unwrap();
    let make = || bench.pd.srq_builder(4).xrc(&domain, &bench.cq).build().unwrap();
    let (one, other, ordinary) = (make(), make(), bench.pd.srq_builder(4).build().unwrap());
    let [first, second, none] = [&one, &other, &ordinary]
        .map(|srq| bench.script.told::<mlx5_ib_create_srq>(srq.handle()).uidx);
    assert!(first != 0 && second != 0 && first != second, "{first} and {second}");
    assert_eq!(none, 0);
}

/// mlx5's driver refuses a queue pair without one, and completions tell queue pairs apart by it.
#[test]
fn each_target_has_a_user_index_of_its_own() {
    let (script, context) = device();
    let domain = context.xrcd_builder().build().unwrap();
    let targets = [domain.create_target().unwrap(), domain.create_target().unwrap()];
    let index = |handle| script.told::<mlx5_ib_create_qp>(handle).uidx;
    let [one, other] = targets.each_ref().map(|target| index(target.handle()));
    assert_ne!(one, other);
    assert_ne!(targets[0].qpn(), targets[1].qpn());
    drop(targets);
    assert_eq!(script.count(UVERBS_OBJECT_QP), 0);
}

/// As with two processes that have the domain open.
#[test]
#[cfg_attr(miri, ignore = "it looks into /proc")]
fn a_target_is_opened_by_its_number_in_its_domain() {
    let (script, context) = device();
    let file = file();
    let open = || context.xrcd_builder().file(&file).create().build().unwrap();
    let (here, there, elsewhere) = (open(), open(), context.xrcd_builder().build().unwrap());
    let made = here.create_target().unwrap();
    for (domain, qpn) in [(&elsewhere, made.qpn()), (&there, Qpn(made.qpn().0 + 1))] {
        let error = domain.open_target(qpn).unwrap_err();
        assert_eq!((error.verb(), error.kernel_errno()), ("open_qp", Some(Errno::INVAL)));
        let text = format!("no target of this XRC domain has the number {qpn}");
        assert!(error.message().contains(&text), "{error}");
    }
    script.refuse(Op::OPEN_QP, Errno::NOMEM);
    let error = there.open_target(made.qpn()).unwrap_err();
    assert!(!error.message().contains("no target of this"), "{error}");
    script.allow(Op::OPEN_QP);

    made.modify(&init()).unwrap();
    let opened = there.open_target(made.qpn()).unwrap();
    assert_eq!((opened.qpn(), opened.state()), (made.qpn(), QpState::INIT));
    assert_ne!(opened.handle(), made.handle());
    drop(made);
    assert_eq!(opened.query().unwrap().state, QpState::INIT, "it lives while somebody has it open");
    drop(opened);
    assert_eq!(script.count(UVERBS_OBJECT_QP), 0);
    assert_eq!(script.complaints(), [""; 0]);
}

#[test]
fn a_target_is_reset_in_all_processes_that_have_it_open() {
    let (script, context) = device();
    let domain = context.xrcd_builder().build().unwrap();
    let made = domain.create_target().unwrap();
    let mut opened = domain.open_target(made.qpn()).unwrap();
    opened.modify(&init()).unwrap();
    script.refuse(Op::MODIFY_QP, Errno::NOMEM);
    assert_eq!(opened.reset().unwrap_err().verb(), "reset_qp");
    assert_eq!((opened.state(), made.query().unwrap().state), (QpState::INIT, QpState::INIT));
    script.allow(Op::MODIFY_QP);
    opened.reset().unwrap();
    assert_eq!((opened.state(), made.query().unwrap().state), (QpState::RESET, QpState::RESET));
    opened.modify(&init()).unwrap();
}

/// Another process may have it open. A queue pair of this process alone is reset then.
#[test]
fn a_target_that_something_holds_is_not_reset_when_its_handle_goes() {
    let (script, context) = device();
    let domain = context.xrcd_builder().build().unwrap();
    let target = domain.create_target().unwrap();
    target.modify(&init()).unwrap();
    let (handle, held) = (target.handle(), target.qp.inner().clone());
    drop(target);
    let resets = script.log().iter().filter(|op| **op == Op::MODIFY_QP).count();
    assert_eq!(resets, 1, "the change to INIT alone; {handle}");
    drop(held);
    assert_eq!(script.count(UVERBS_OBJECT_QP), 0);
}

#[test]
fn a_target_is_closed_or_comes_back_with_the_reason() {
    let (script, context) = device();
    let domain = context.xrcd_builder().build().unwrap();
    let target = domain.create_target().unwrap();
    let handle = target.handle();
    script.refuse_destroy(handle, Errno::BUSY);
    let (target, error) = target.destroy().unwrap_err().into_parts();
    assert_eq!(error.kernel_errno(), Some(Errno::BUSY));
    assert_eq!((target.handle(), script.count(UVERBS_OBJECT_QP)), (handle, 1));
    script.permit_destroy(handle);
    target.destroy().unwrap();
    assert_eq!(script.count(UVERBS_OBJECT_QP), 0);
}

#[test]
fn foreign_domains_are_closed_by_their_handle() {
    let (script, context) = device();
    let importer = script.import("mlx5_0", Some(&context.export())).unwrap();
    let domain = context.xrcd_builder().build().unwrap();
    let found = importer.foreign(&domain.export().unwrap()).unwrap();
    super::sharing::destroy(found).unwrap();
    assert_eq!(script.count(UVERBS_OBJECT_XRCD), 0);
    assert_eq!(importer.foreign(&domain.export().unwrap()).unwrap_err().errno(), Errno::NOENT);
}

#[test]
fn an_initiator_shares_no_receive_queue() {
    let bench = Bench::on(Script::mlx5());
    let srq = bench.pd.srq_builder(4).build().unwrap();
    let builder = bench.pd.qp_builder(&bench.cq, &bench.cq, crate::QpType::XRC_INI).srq(&srq);
    let error = builder.build().unwrap_err();
    assert_eq!((error.errno(), error.kernel_errno()), (Errno::INVAL, None));
    assert!(error.message().contains("an XRC initiator receives nothing"), "{error}");
}

#[test]
fn an_initiator_is_not_adopted_with_a_shared_receive_queue() {
    let bench = Bench::on(Script::mlx5());
    let own = bench.context.cq_builder(64).build().unwrap();
    let mut cq: OwnedCompletionQueue<u64> = OwnedCompletionQueue::new(own);
    let srq = bench.pd.srq_builder(4).build().unwrap();
    let srq = OwnedSharedReceiveQueue::new(srq).unwrap();
    let qp = bench.pd.qp_builder(cq.queue(), cq.queue(), crate::QpType::XRC_INI).build().unwrap();
    let (qp, error) = cq.adopt_on(qp, &srq).unwrap_err().into_parts();
    assert_eq!((error.verb(), error.errno()), ("adopt", Errno::INVAL));
    assert_eq!(error.kernel_errno(), None);
    let why = "is an XRC initiator and receives nothing: call adopt";
    assert!(error.message().contains(why), "{error}");
    cq.adopt(qp).unwrap();
}

/// Their receives would complete to another queue, or to none.
#[test]
fn a_queue_of_another_completion_queue_is_not_taken_over() {
    let bench = Bench::on(Script::mlx5());
    let domain = bench.context.xrcd_builder().build().unwrap();
    let make = |cq| bench.pd.srq_builder(4).xrc(&domain, cq).build().unwrap();
    let own = bench.context.cq_builder(16).build().unwrap();
    let (elsewhere, here, plain) =
        (make(&bench.cq), make(&own), bench.pd.srq_builder(4).build().unwrap());
    let mut cq: OwnedCompletionQueue<u64> = OwnedCompletionQueue::new(own);
    for (srq, why) in [(elsewhere, "complete to another queue"), (plain, "no XRC domain")] {
        let error = cq.adopt_srq(srq).unwrap_err().error;
        assert_eq!((error.errno(), error.kernel_errno()), (Errno::INVAL, None));
        assert!(error.message().contains(why), "{error}");
    }
    cq.adopt_srq(here).unwrap();
}
