//! No scope ends, by return or by panic, before its requests are over.

use super::owned::{Owned, bring_up_owned};
use super::wc;
use crate::abort::tests::aborts_in_a_child;
use crate::owned::{Ending, RegionRef, ScopeError};
use crate::uverbs::scripted::{Op, Role, Script};
use crate::{Access, Errno, PollError, PostError, QpState, QpType, Remote, Rkey, SendWr, WcStatus};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::{Duration, Instant};
use uverbs_uapi::object::UVERBS_OBJECT_MR;
use uverbs_uapi::wc::ib_uverbs_wc;

const REMOTE: Remote = Remote { addr: 0x2000, rkey: Rkey(6) };
const SOON: Duration = Duration::from_millis(30);

/// Completes every request of a queue pair after a while, or once it is in an error state.
fn device(owned: &Owned, only_in_error: bool) -> std::thread::JoinHandle<()> {
    let (script, handle) = (owned.bench.script.clone(), owned.qp.handle());
    let (cq, qpn) = (owned.cq.queue().handle(), owned.qp.qpn().0);
    std::thread::spawn(move || {
        let failed = |script: &Script| script.object(handle).state == QpState::ERR.0;
        while only_in_error && !failed(&script) {
            std::thread::yield_now();
        }
        // Miri's clock advances with the code that it executes, so posting takes long there. A flush begins when
        // the queue pair is in error, which is late enough without a pause.
        match (cfg!(miri), only_in_error) {
            (true, true) => {}
            (true, false) => std::thread::sleep(Duration::from_secs(1)),
            (false, _) => std::thread::sleep(SOON),
        }
        let status = if only_in_error { WcStatus::WR_FLUSH_ERR.0 } else { 0 };
        for role in [Role::Send, Role::Recv] {
            while let Some(request) = script.take(handle, role) {
                let id = u64::from_ne_bytes(request[..8].try_into().unwrap());
                assert!(script.complete(cq, ib_uverbs_wc { status, ..wc(qpn, id) }));
            }
        }
    })
}

#[test]
fn waiting_for_a_request_gives_its_memory_back() {
    let mut owned = Owned::new();
    let mut text = owned.pool.copy(b"to send").unwrap();
    let mut inbox = owned.pool.take().unwrap();
    let region = owned.bench.pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u8>(64).unwrap();
    let part = RegionRef::new(&region, 8..16).unwrap();
    let script = owned.bench.script.clone();
    let (handle, qpn, cq) = (owned.qp.handle(), owned.qp.qpn().0, owned.cq.queue().handle());
    let finish = |role| {
        let request = script.take(handle, role).unwrap();
        let id = u64::from_ne_bytes(request[..8].try_into().unwrap());
        assert!(script.complete(cq, ib_uverbs_wc { byte_len: 7, ..wc(qpn, id) }));
    };
    owned
        .qp
        .scope(&mut owned.cq, |scope| {
            let sent = scope.post(SendWr::send(&[]), &text).unwrap();
            let received = scope.recv(&mut inbox).unwrap();
            let read = scope.post(SendWr::read(REMOTE, &[]), part).unwrap();
            let read = scope.wait_for(read, SOON).unwrap().unwrap_err();
            finish(Role::Send);
            finish(Role::Recv);
            let (inbox, outcome) = scope.wait(received).unwrap();
            assert_eq!(outcome.byte_len, 7);
            inbox[0] = 1;
            let (text, _) = scope.wait(sent).unwrap();
            assert_eq!(&**text, b"to send");
            finish(Role::Send);
            scope.wait_for(read, SOON).unwrap().unwrap();
        })
        .unwrap();
    text[0] = 0;
    assert_eq!(inbox[0], 1);
}

#[test]
fn waiting_for_a_while_sees_a_request_that_ends_meanwhile() {
    let mut owned = Owned::new();
    let text = owned.pool.copy(b"to send").unwrap();
    let device = device(&owned, false);
    let mut result = None;
    owned
        .qp
        .scope(&mut owned.cq, |scope| {
            let sent = scope.post(SendWr::send(&[]), &text).unwrap();
            result = Some(scope.wait_for(sent, Duration::from_secs(60)).unwrap().is_ok());
        })
        .unwrap();
    device.join().unwrap();
    assert_eq!(result, Some(true), "the request ended long before");
}

#[test]
fn a_scope_returns_when_its_requests_are_over() {
    let mut owned = Owned::new();
    let mut inbox = owned.pool.take().unwrap();
    let mut local = [0u8; 100];
    let mut device = None;
    let started = Instant::now();
    for panics in [false, true] {
        let device = &mut device;
        let pd = owned.bench.pd.inner.clone();
        let pd = crate::ProtectionDomain::<crate::Shared>::of(pd);
        let script = owned.bench.script.clone();
        *device = None;
        let owned = AssertUnwindSafe(&mut owned);
        let (inbox, local) = (&mut inbox, &mut local);
        let scope = || {
            let owned = { owned }.0;
            let (ready, start) = std::sync::mpsc::channel::<()>();
            let worker = {
                let (script, handle) = (owned.bench.script.clone(), owned.qp.handle());
                let (cq, qpn) = (owned.cq.queue().handle(), owned.qp.qpn().0);
                std::thread::spawn(move || {
                    let _ = start.recv();
                    std::thread::sleep(SOON);
                    for role in [Role::Send, Role::Recv] {
                        while let Some(request) = script.take(handle, role) {
                            let id = u64::from_ne_bytes(request[..8].try_into().unwrap());
                            assert!(script.complete(cq, wc(qpn, id)));
                        }
                    }
                })
            };
            *device = Some(worker);
            owned.qp.scope(&mut owned.cq, |scope| {
                let (front, back) = scope.register(&pd, local).unwrap().split_at(40);
                let _ = scope.recv(inbox).unwrap();
                let _ = scope.post(SendWr::read(REMOTE, &[]), front).unwrap();
                let _ = scope.post(SendWr::send(&[]), back).unwrap();
                assert_eq!(script.count(UVERBS_OBJECT_MR), 2);
                ready.send(()).unwrap();
                assert!(!panics, "as planned");
            })
        };
        match catch_unwind(AssertUnwindSafe(scope)) {
            Ok(drained) => assert!(!panics && drained.is_ok()),
            Err(payload) => {
                let text = payload.downcast_ref::<&str>().copied();
                assert_eq!((panics, text), (true, Some("as planned")));
            }
        }
        assert_eq!(script.count(UVERBS_OBJECT_MR), 1, "what was borrowed is registered no more");
        device.take().unwrap().join().unwrap();
    }
    assert!(started.elapsed() >= 2 * SOON);
    assert_eq!(owned.bench.script.pending(owned.qp.handle(), Role::Send), 0);
}

/// Address and length of the memory that a request with one SGE names.
fn entry(request: &[u8]) -> (u64, u32) {
    let entries = &request[DMA + 24..];
    let addr = u64::from_ne_bytes(entries[..8].try_into().unwrap());
    (addr, u32::from_ne_bytes(entries[8..12].try_into().unwrap()))
}

/// The offset of `struct rxe_dma_info`, which describes the payload, in a send request of rxe.
const DMA: usize = 184;

#[test]
fn splitting_a_scoped_region_covers_it_once() {
    let mut owned = Owned::new();
    let mut local = [0u8; 100];
    let start = local.as_ptr().addr() as u64;
    let script = owned.bench.script.clone();
    let (handle, qpn, cq) = (owned.qp.handle(), owned.qp.qpn().0, owned.cq.queue().handle());
    for at in [1, 40, 99, 100, 101, usize::MAX] {
        let scoped = owned.qp.scope(&mut owned.cq, |scope| {
            let whole = scope.register(&owned.bench.pd, &mut local).unwrap();
            let (front, back) = whole.split_at(at);
            let _ = scope.post(SendWr::send(&[]), front).unwrap();
            let _ = scope.post(SendWr::send(&[]), back).unwrap();
            let covered: Vec<_> = (0..2)
                .map(|_| {
                    let request = script.take(handle, Role::Send).unwrap();
                    let id = u64::from_ne_bytes(request[..8].try_into().unwrap());
                    assert!(script.complete(cq, wc(qpn, id)));
                    entry(&request)
                })
                .collect();
            let first = at.min(100) as u32;
            let second = (start + u64::from(first), 100 - first);
            assert_eq!(covered, [(start, first), second], "at {at}");
        });
        assert!(scoped.is_ok());
    }
}

/// A request without data names no memory.
#[test]
fn a_scope_s_request_names_the_memory_that_it_borrows() {
    let mut owned = Owned::new();
    let mut buffer = owned.pool.copy(b"header and body").unwrap();
    let shared = owned.pool.copy(b"read by many").unwrap().share();
    let part = shared.slice(5..7).unwrap();
    buffer.advance(7);
    let mut target = owned.pool.take().unwrap();
    target.advance(3);
    let expected = [&buffer.sge(), &part.sge(), &target.sge()].map(|sge| (sge.addr, sge.length));
    let script = owned.bench.script.clone();
    let (handle, qpn, cq) = (owned.qp.handle(), owned.qp.qpn().0, owned.cq.queue().handle());
    let finish = |role| {
        let request = script.take(handle, role).unwrap();
        let id = u64::from_ne_bytes(request[..8].try_into().unwrap());
        assert!(script.complete(cq, wc(qpn, id)));
        request
    };
    let scoped = owned.qp.scope(&mut owned.cq, |scope| {
        let _ = scope.post(SendWr::send(&[]), &buffer).unwrap();
        let _ = scope.post(SendWr::send(&[]), &part).unwrap();
        let _ = scope.post(SendWr::read(REMOTE, &[]), &mut target).unwrap();
        assert_eq!([(); 3].map(|()| entry(&finish(Role::Send))), expected);
        let empty = [
            scope.post(SendWr::send(&[]), ()).unwrap(),
            scope.post(SendWr::read(REMOTE, &[]), ()).unwrap(),
            scope.recv(()).unwrap(),
        ];
        for role in [Role::Send, Role::Send, Role::Recv] {
            let request = finish(role);
            assert!(role == Role::Recv || request[DMA..DMA + 8].iter().all(|byte| *byte == 0));
        }
        for request in empty {
            scope.wait(request).unwrap();
        }
    });
    assert!(scoped.is_ok());
}

/// The device may write no header, and the bytes that an earlier holder left are none.
#[test]
fn only_a_scope_s_receive_of_datagrams_clears_the_room_of_the_header() {
    for (qp_type, cleared) in [(QpType::UD, 40), (QpType::RC, 0)] {
        let Owned { bench, pool, mut cq, .. } = Owned::new();
        let builder = bench.pd.qp_builder(cq.queue(), cq.queue(), qp_type);
        let qp = builder.max_send_wr(1).max_recv_wr(1).build().unwrap();
        let mut qp = cq.adopt(qp).unwrap();
        bring_up_owned(&bench.script, &qp);
        let mut inbox = pool.copy(&[7; 64]).unwrap();
        let (handle, qpn, queue) = (qp.handle(), qp.qpn().0, cq.queue().handle());
        let scoped = qp.scope(&mut cq, |scope| {
            let received = scope.recv(&mut inbox).unwrap();
            let request = bench.script.take(handle, Role::Recv).unwrap();
            let id = u64::from_ne_bytes(request[..8].try_into().unwrap());
            assert!(bench.script.complete(queue, wc(qpn, id)));
            let (inbox, _) = scope.wait(received).unwrap();
            assert_eq!(inbox.iter().position(|byte| *byte == 7), Some(cleared), "{qp_type}");
        });
        assert!(scoped.is_ok());
    }
}

#[test]
fn a_scope_flushes_its_requests_if_the_peer_is_silent() {
    let mut owned = Owned::new();
    let mut inbox = owned.pool.take().unwrap();
    owned.recv("of others");
    let device = device(&owned, true);
    let scoped = owned.qp.scope(&mut owned.cq, |scope| {
        scope.drain_timeout(SOON);
        scope.recv(&mut inbox).map(drop)
    });
    assert!(
        matches!(scoped, Err(ScopeError::Cancelled { value: Ok(()), ending: Ending::Flushed })),
        "{scoped:?}"
    );
    device.join().unwrap();
    assert_eq!(owned.qp.state(), QpState::ERR);
    let others = owned.cq.poll().unwrap().next().unwrap();
    assert_eq!((others.tag, others.outcome.status), ("of others", WcStatus::WR_FLUSH_ERR));
}

/// Unwinding waits for the requests as a return does.
#[test]
fn a_scope_flushes_its_requests_before_a_panic_goes_on() {
    let mut owned = Owned::new();
    let mut inbox = owned.pool.take().unwrap();
    let mut local = [0u8; 100];
    owned.recv("of others");
    let device = device(&owned, true);
    let (script, handle) = (owned.bench.script.clone(), owned.qp.handle());
    let regions = script.count(UVERBS_OBJECT_MR);
    let pd = &owned.bench.pd;
    let started = Instant::now();
    let scoped = catch_unwind(AssertUnwindSafe(|| {
        owned.qp.scope(&mut owned.cq, |scope| {
            scope.drain_timeout(SOON);
            let whole = scope.register(pd, &mut local).unwrap();
            let _ = scope.post(SendWr::read(REMOTE, &[]), whole).unwrap();
            let _ = scope.recv(&mut inbox).unwrap();
            resume_unwind(Box::new("as planned"));
        })
    }));
    // The panic must not go on while requests are in flight.
    let left = [Role::Send, Role::Recv].map(|role| script.pending(handle, role));
    assert_eq!((left, script.count(UVERBS_OBJECT_MR)), ([0, 0], regions));
    assert!(started.elapsed() >= SOON, "the peer was not waited for");
    let payload = scoped.map(drop).unwrap_err();
    assert_eq!(payload.downcast_ref::<&str>(), Some(&"as planned"));
    device.join().unwrap();
    assert_eq!(owned.qp.state(), QpState::ERR);
    inbox.fill(1);
    local.fill(1);
    let others = owned.cq.poll().unwrap().next().unwrap();
    assert_eq!((others.tag, others.outcome.status), ("of others", WcStatus::WR_FLUSH_ERR));
}

#[test]
fn a_scope_resets_the_queue_pair_if_the_flush_does_not_come() {
    let mut owned = Owned::new();
    let mut inbox = owned.pool.take().unwrap();
    owned.send("of others");
    let scoped = owned.qp.scope(&mut owned.cq, |scope| {
        scope.drain_timeout(SOON);
        scope.recv(&mut inbox).map(drop)
    });
    assert!(
        matches!(scoped, Err(ScopeError::Cancelled { ending: Ending::Reset, .. })),
        "{scoped:?}"
    );
    assert_eq!(owned.qp.state(), QpState::RESET);
    assert_eq!((owned.qp.send_room(), owned.qp.recv_room()), (6, 6));
    let others = owned.cq.poll().unwrap().next().unwrap();
    assert_eq!((others.tag, others.outcome.status), ("of others", WcStatus::WR_FLUSH_ERR));
}

/// The scope waits as long as the kernel takes to remove the device: until then the device may write borrowed memory.
#[test]
fn a_scope_waits_while_the_device_is_being_removed() {
    // Longer than dropped objects wait, and longer than a kernel may refuse.
    const LONG: Duration = Duration::from_millis(500);
    let mut owned = Owned::new();
    let mut inbox = owned.pool.take().unwrap();
    let mut local = [0u8; 100];
    let (script, handle, pd) = (&owned.bench.script, owned.qp.handle(), &owned.bench.pd);
    let mut kernel = None;
    let started = Instant::now();
    let scoped = owned.qp.scope(&mut owned.cq, |scope| {
        scope.drain_timeout(Duration::ZERO);
        scope.register(pd, &mut local).unwrap();
        let _ = scope.recv(&mut inbox).unwrap();
        let mut regions = script.live().into_iter().filter(|(kind, _)| *kind == UVERBS_OBJECT_MR);
        let region = regions.next_back().unwrap().1;
        for handle in [handle, region] {
            script.refuse_destroy(handle, Errno::IO);
        }
        script.begin_to_vanish();
        let script = script.clone();
        kernel = Some(std::thread::spawn(move || {
            std::thread::sleep(LONG);
            script.permit_destroy(handle);
            std::thread::sleep(LONG);
            script.permit_destroy(region);
        }));
    });
    assert!(started.elapsed() >= 2 * LONG, "the device may still write");
    assert!(
        matches!(scoped, Err(ScopeError::Cancelled { ending: Ending::Reset, .. })),
        "{scoped:?}"
    );
    kernel.unwrap().join().unwrap();
    drop(owned.qp);
    assert_eq!(owned.bench.context.leaked(), 0);
}

/// The kernel's reason for a refusal may pass, and then the process need not be aborted.
#[test]
fn a_scope_asks_again_while_the_kernel_refuses_to_deregister() {
    let owned = &mut Owned::new();
    let (script, pd) = (&owned.bench.script, &owned.bench.pd);
    let mut local = [0u8; 64];
    let before = script.count(UVERBS_OBJECT_MR);
    let mut kernel = None;
    let scoped = owned.qp.scope(&mut owned.cq, |scope| {
        scope.register(pd, &mut local).unwrap();
        let mut regions = script.live().into_iter().filter(|(kind, _)| *kind == UVERBS_OBJECT_MR);
        let region = regions.next_back().unwrap().1;
        script.refuse_destroy(region, Errno::BUSY);
        let script = script.clone();
        kernel = Some(std::thread::spawn(move || {
            std::thread::sleep(SOON);
            script.permit_destroy(region);
        }));
    });
    assert!(scoped.is_ok());
    assert_eq!(script.count(UVERBS_OBJECT_MR), before);
    kernel.unwrap().join().unwrap();
}

/// If the scope returned, the device could write memory that the program uses again.
#[test]
#[cfg_attr(miri, ignore = "it starts a process")]
fn a_kernel_that_refuses_the_reset_aborts_the_process() {
    if aborts_in_a_child(
        "tests::scope::a_kernel_that_refuses_the_reset_aborts_the_process",
        "does not end requests",
    ) {
        return;
    }
    let mut owned = Owned::new();
    let mut inbox = owned.pool.take().unwrap();
    owned.bench.script.refuse(Op::MODIFY_QP, Errno::NOMEM);
    let _ = owned.qp.scope(&mut owned.cq, |scope| {
        scope.drain_timeout(SOON);
        scope.recv(&mut inbox).map(drop)
    });
    unreachable!("the scope returned");
}

/// As above, for a region.
#[test]
#[cfg_attr(miri, ignore = "it starts a process")]
fn a_kernel_that_refuses_to_deregister_aborts_the_process() {
    if aborts_in_a_child(
        "tests::scope::a_kernel_that_refuses_to_deregister_aborts_the_process",
        "keeps borrowed memory registered",
    ) {
        return;
    }
    let mut owned = Owned::new();
    let mut local = [0u8; 8];
    let (pd, script) = (&owned.bench.pd, &owned.bench.script);
    let _ = owned.qp.scope(&mut owned.cq, |scope| {
        scope.register(pd, &mut local).unwrap();
        for (kind, handle) in script.live() {
            if kind == UVERBS_OBJECT_MR {
                script.refuse_destroy(handle, Errno::BUSY);
            }
        }
    });
    unreachable!("the scope returned");
}

#[test]
fn a_scope_refuses_foreign_memory_queues_and_requests() {
    let mut owned = Owned::new();
    let mut other = Owned::new();
    let scoped = owned.qp.scope(&mut other.cq, |_| unreachable!("it runs"));
    assert!(matches!(scoped, Err(ScopeError::ForeignQueue)));
    let foreign =
        other.bench.pd.mr_builder().access(Access::LOCAL_WRITE).register(vec![0u8; 64]).unwrap();
    let readable = owned.pool.take().unwrap();
    let shared = owned.pool.take().unwrap().share();
    let device = device(&owned, true);
    let part = RegionRef::new(&foreign, ..).unwrap();
    let (inner, mut mine) = (other.pool.take().unwrap(), owned.pool.take().unwrap());
    let scoped = owned.qp.scope(&mut owned.cq, |scope| {
        scope.drain_timeout(SOON);
        assert_eq!(scope.recv(part).unwrap_err(), PostError::ForeignMemory);
        assert_eq!(scope.recv(&readable).unwrap_err(), PostError::ReadOnly);
        let read = SendWr::read(REMOTE, &[]);
        assert_eq!(scope.post(read, &readable).unwrap_err(), PostError::ReadOnly);
        assert_eq!(scope.post(read, &shared).unwrap_err(), PostError::ReadOnly);
        let pending = scope.recv(&mut mine).unwrap();
        let within = other.qp.scope(&mut other.cq, |within| {
            within.drain_timeout(Duration::ZERO);
            let _ = within.post(SendWr::send(&[]), &inner).unwrap();
            within.wait(pending).map(drop)
        });
        let Err(ScopeError::Cancelled { value, .. }) = within else { panic!("{within:?}") };
        assert_eq!(value, Err(PollError::ForeignRequest));
    });
    assert!(matches!(scoped, Err(ScopeError::Cancelled { .. })));
    device.join().unwrap();
}
