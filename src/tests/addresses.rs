//! An address handle that is dropped stays in the kernel while requests name it.
#![allow(clippy::drop_non_drop, clippy::forget_non_drop, reason = "callers may do either")]

use super::{Bench, bring_up, ring};
use crate::uverbs::scripted::{Role, Script};
use crate::{
    AddressHandle, AddressVector, Destination, Errno, Gid, ObjectKind, Qkey, QpType, Qpn,
    QueuePair, SendWr,
};

fn handle(bench: &Bench) -> AddressHandle {
    bench.pd.create_ah(&AddressVector::global(1, 0, Gid([1; 16]))).unwrap()
}

fn post(qp: &mut QueuePair, ah: &AddressHandle) {
    let mut batch = qp.send_batch().unwrap();
    let to = Destination::new(ah, Qpn(1), Qkey(1));
    batch.push(SendWr::send(&[]).to(to)).unwrap();
    ring(batch).unwrap();
}

fn handles(bench: &Bench) -> usize {
    bench.context.handles(ObjectKind::AH).unwrap().len()
}

fn complete(script: &Script, qp: &QueuePair) {
    assert!(script.take(qp.handle(), Role::Send).is_some());
}

#[test]
fn address_handle_stays_until_its_requests_have_completed() {
    let bench = Bench::new();
    let mut qp = bench.qp(QpType::UD);
    let (first, second) = (handle(&bench), handle(&bench));
    for ah in [&first, &second, &first] {
        post(&mut qp, ah);
    }
    drop((first, second));
    assert_eq!(handles(&bench), 2);
    complete(&bench.script, &qp);
    drop(handle(&bench));
    assert_eq!(handles(&bench), 2, "each is named by one more request");
    complete(&bench.script, &qp);
    drop(handle(&bench));
    assert_eq!(handles(&bench), 1, "that of the first is named by one more request");
    complete(&bench.script, &qp);
    drop(handle(&bench));
    assert_eq!((handles(&bench), bench.context.leaked()), (0, 0));
}

/// In a ring that wraps many times, address handles of an earlier round do not count.
#[test]
fn address_handles_of_completed_requests_go_at_once() {
    let bench = Bench::new();
    let mut qp = bench.qp(QpType::UD);
    for _ in 0..20 {
        let ah = handle(&bench);
        post(&mut qp, &ah);
        drop(ah);
        assert_eq!(handles(&bench), 1);
        complete(&bench.script, &qp);
    }
    drop(handle(&bench));
    assert_eq!(handles(&bench), 0);
}

#[test]
fn address_handle_goes_with_the_queue_pair_that_names_it() {
    let bench = Bench::new();
    let mut qp = bench.qp(QpType::UD);
    let ah = handle(&bench);
    post(&mut qp, &ah);
    drop(ah);
    assert_eq!(handles(&bench), 1);
    // The send queue may be dropped before the queue pair.
    let parts = qp.split();
    drop((parts.send, parts.recv));
    assert_eq!(handles(&bench), 1);
    drop(parts.control);
    assert_eq!(handles(&bench), 0);
}

#[test]
fn pushed_requests_keep_their_address_handle_until_the_next_batch() {
    let bench = Bench::new();
    let mut qp = bench.qp(QpType::UD);
    for forget in [false, true] {
        let ah = handle(&bench);
        let mut batch = qp.send_batch().unwrap();
        let to = Destination::new(&ah, Qpn(1), Qkey(1));
        batch.push(SendWr::send(&[]).to(to)).unwrap();
        drop(ah);
        assert_eq!(handles(&bench), 1, "the batch may be rung yet");
        if forget {
            std::mem::forget(batch);
        } else {
            drop(batch);
        }
        drop(qp.send_batch().unwrap());
        drop(handle(&bench));
        assert_eq!(handles(&bench), 0);
    }
}

#[test]
fn destroying_an_address_handle_that_requests_name_is_refused() {
    let bench = Bench::new();
    let mut qp = bench.qp(QpType::UD);
    let ah = handle(&bench);
    post(&mut qp, &ah);
    post(&mut qp, &ah);
    let (ah, error) = ah.destroy().unwrap_err().into_parts();
    assert_eq!((error.errno(), error.kernel_errno()), (Errno::BUSY, None));
    assert!(error.message().starts_with("2 requests"), "{error}");
    complete(&bench.script, &qp);
    complete(&bench.script, &qp);
    ah.destroy().unwrap();
    assert_eq!(handles(&bench), 0);
}

/// The device may carry out its requests at any time, so both are leaked and counted.
#[test]
fn address_handle_that_a_leaked_queue_pair_names_is_leaked() {
    let bench = Bench::new();
    let mut qp = bench.qp(QpType::UD);
    let ah = handle(&bench);
    post(&mut qp, &ah);
    drop(ah);
    bench.script.refuse_destroy(qp.handle(), Errno::BUSY);
    drop(qp);
    assert_eq!((handles(&bench), bench.context.leaked()), (1, 1));
    let Bench { context, pd, cq, .. } = bench;
    drop((pd, cq));
    assert_eq!(context.handles(ObjectKind::AH).unwrap().len(), 1);
}

#[test]
fn other_threads_drop_address_handles_while_requests_are_posted() {
    let bench = Bench::new();
    let mut qp =
        bench.pd.qp_builder(&bench.cq, &bench.cq, QpType::UD).max_send_wr(63).build().unwrap();
    bring_up(&bench.script, &qp);
    let (sender, receiver) = std::sync::mpsc::channel::<AddressHandle>();
    std::thread::scope(|scope| {
        scope.spawn(move || receiver.into_iter().for_each(drop));
        for _ in 0..if cfg!(miri) { 8 } else { 200 } {
            let ah = handle(&bench);
            post(&mut qp, &ah);
            sender.send(ah).unwrap();
            complete(&bench.script, &qp);
        }
        drop(sender);
    });
    drop(handle(&bench));
    assert_eq!((handles(&bench), bench.context.leaked()), (0, 0));
}
