//! Requests on borrowed memory: no memory returns to its owner while a device may access it.

use crate::capability::Capability;
use crate::env;
use crate::helper::Helper;
use crate::leaks;
use crate::lent::{DEPTH, FAR_BYTES, Half, far, hasty, pair, pair_of};
use crate::pair::{SILENCE, gid};
use crate::pattern;
use crate::verdict::{Stop, Verdict, supported, trials};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::{Duration, Instant};
use uverbs::owned::{Ending, OwnedCompletionQueue, RegionRef, ScopeError};
use uverbs::{Access, ObjectKind, PostError, QpState, QpType, RingError, SendWr, WcStatus};

trials![
    borrowed_memory_of_every_kind_is_returned,
    a_panic_waits_for_the_requests,
    a_silent_peer_is_cut_off,
    a_panic_with_a_silent_peer_cuts_it_off,
    requests_to_a_killed_peer_end,
    after_a_reset_the_pair_works_again,
    scope_under_a_thread_domain_ends,
    rounds_leave_nothing,
];

fn borrowed_memory_of_every_kind_is_returned() -> Verdict {
    let (mut a, mut b) = pair()?;
    let theirs = b.pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u8>(4096)?;
    let text = a.pool.copy(&pattern::bytes(1, 700)).expect("a buffer");
    let mut inbox = b.pool.take().expect("a buffer");
    let mut region = a.pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u8>(4096)?;
    region.copy_from(0, &pattern::bytes(2, 700))?;
    // Unregistered memory on the stack.
    let mut local = [0u8; 1500];
    let received = b.qp.scope(&mut b.cq, |receiver| {
        let received = receiver.recv(&mut inbox)?;
        a.qp.scope(&mut a.cq, |sender| {
            let sent = sender.post(SendWr::send(&[]), &text)?;
            let part = RegionRef::new(&region, ..700)?;
            let written = sender.post(SendWr::write(theirs.remote(0)?, &[]), part)?;
            let (_, outcome) = sender.wait(written)?;
            assert_eq!(outcome.status, WcStatus::SUCCESS);
            let (front, _rest) = sender.register(&a.pd, &mut local)?.split_at(700);
            let _read = sender.post(SendWr::read(theirs.remote(0)?, &[]), front)?;
            let (text, _) = sender.wait(sent)?;
            pattern::check(text, 1);
            Ok::<_, Stop>(())
        })??;
        let (inbox, outcome) = receiver.wait(received)?;
        assert_eq!(outcome.byte_len, 700);
        pattern::check(&inbox[..700], 1);
        Ok::<_, Stop>(outcome.status)
    })??;
    assert_eq!(received, WcStatus::SUCCESS);
    pattern::check(&local[..700], 2);
    assert!(local[700..].iter().all(|byte| *byte == 0));
    Ok(())
}

fn a_panic_waits_for_the_requests() -> Verdict {
    let (mut a, b) = pair()?;
    let mut theirs = b.pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u8>(1 << 20)?;
    theirs.copy_from(0, &vec![7; 1 << 20])?;
    let mut local = vec![0u8; 1 << 20];
    let ended = catch_unwind(AssertUnwindSafe(|| {
        a.qp.scope(&mut a.cq, |scope| {
            let whole = scope.register(&a.pd, &mut local).expect("a region");
            let remote = theirs.remote(0).expect("its beginning");
            let _ = scope.post(SendWr::read(remote, &[]), whole).expect("room");
            panic!("as planned");
        })
    }));
    let payload = ended.map(drop).expect_err("it panicked");
    assert_eq!(payload.downcast_ref::<&str>(), Some(&"as planned"));
    // The request had ended before the panic continued, so that the memory changes no more.
    assert!(local.iter().all(|byte| *byte == 7), "the read was waited for");
    local.fill(1);
    std::thread::sleep(SILENCE);
    assert!(local.iter().all(|byte| *byte == 1));
    assert_eq!(a.context.leaked(), 0);
    Ok(())
}

fn a_silent_peer_is_cut_off() -> Verdict {
    let (mut a, mut b) = pair()?;
    let mut inboxes: Vec<_> = (0..DEPTH).map(|_| a.pool.take().expect("a buffer")).collect();
    let scoped = a.qp.scope(&mut a.cq, |scope| {
        scope.drain_timeout(Duration::from_millis(50));
        inboxes.iter_mut().try_for_each(|inbox| scope.recv(inbox).map(drop))
    });
    let called_off =
        matches!(&scoped, Err(ScopeError::Cancelled { value: Ok(()), ending: Ending::Flushed }));
    assert!(called_off, "{scoped:?}");
    inboxes.iter_mut().for_each(|inbox| inbox.fill(1));
    // A message that the peer sends now reaches no memory.
    let mut batch = b.qp.send_batch()?;
    let mut text = b.pool.take().expect("a buffer");
    text.fill(0xff);
    batch.push(SendWr::send(&[]), text, 0)?;
    batch.ring()?;
    assert!(!b.wait()?.outcome.is_success());
    assert!(inboxes.iter().all(|inbox| inbox.iter().all(|byte| *byte == 1)));
    Ok(())
}

/// Unwinds as a panic does, without its message.
fn unwind() -> ! {
    resume_unwind(Box::new("as planned"))
}

fn a_panic_with_a_silent_peer_cuts_it_off() -> Verdict {
    const SOON: Duration = Duration::from_millis(50);
    let (mut a, mut b) = pair()?;
    let mut inboxes: Vec<_> = (1..DEPTH).map(|_| a.pool.take().expect("a buffer")).collect();
    let mut local = vec![0u8; 4096];
    let room = a.qp.recv_room();
    let regions = || supported(a.context.handles(ObjectKind::MR), Capability::InfoHandles);
    let before = regions()?;
    let started = Instant::now();
    let ended = catch_unwind(AssertUnwindSafe(|| {
        a.qp.scope(&mut a.cq, |scope| {
            scope.drain_timeout(SOON);
            let whole = scope.register(&a.pd, &mut local).expect("a region");
            let _ = scope.recv(whole).expect("room");
            inboxes.iter_mut().for_each(|inbox| drop(scope.recv(inbox).expect("room")));
            unwind();
        })
    }));
    let payload = ended.map(drop).expect_err("it panicked");
    assert_eq!(payload.downcast_ref::<&str>(), Some(&"as planned"));
    assert!(started.elapsed() >= SOON, "the peer was not waited for");
    assert_eq!((a.qp.state(), a.qp.recv_room()), (QpState::ERR, room));
    assert_eq!(regions()?, before, "what was borrowed is registered no more");
    local.fill(1);
    inboxes.iter_mut().for_each(|inbox| inbox.fill(1));
    // A message that the peer sends now reaches no memory.
    let mut text = b.pool.take().expect("a buffer");
    text.fill(0xff);
    let mut batch = b.qp.send_batch()?;
    batch.push(SendWr::send(&[]), text, 0)?;
    batch.ring()?;
    assert!(!b.wait()?.outcome.is_success());
    assert!(local.iter().all(|byte| *byte == 1));
    assert!(inboxes.iter().all(|inbox| inbox.iter().all(|byte| *byte == 1)));
    assert_eq!(a.context.leaked(), 0);
    Ok(())
}

fn requests_to_a_killed_peer_end() -> Verdict {
    crate::env::error_flush()?;
    let mut a = Half::new()?;
    let mut peer = Helper::start()?;
    let remote = far(&mut peer, &a.context, &a.qp)?;
    let mut local = vec![0u8; FAR_BYTES];
    a.qp.scope(&mut a.cq, |scope| {
        let whole = scope.register(&a.pd, &mut local)?;
        scope.post(SendWr::read(remote, &[]), whole).map(drop)?;
        Ok::<_, Stop>(())
    })??;
    assert!(local.iter().all(|byte| *byte == 7));
    let status = a.qp.scope(&mut a.cq, |scope| {
        let whole = scope.register(&a.pd, &mut local)?;
        let read = scope.post(SendWr::read(remote, &[]), whole)?;
        peer.kill()?;
        let (_, outcome) = scope.wait(read)?;
        Ok::<_, Stop>(outcome.status)
    })??;
    // The request may have succeeded; otherwise the peer's memory, queue pair or answers went first.
    let known = [
        WcStatus::SUCCESS,
        WcStatus::REM_ACCESS_ERR,
        WcStatus::REM_OP_ERR,
        WcStatus::RETRY_EXC_ERR,
    ];
    assert!(known.contains(&status), "{status}");
    local.fill(1);
    let after = a.qp.scope(&mut a.cq, |scope| {
        let whole = scope.register(&a.pd, &mut local)?;
        scope.post(SendWr::read(remote, &[]), whole).map(drop)?;
        Ok::<_, Stop>(())
    });
    assert!(after.is_ok_and(|posted| posted.is_ok()), "failed requests are over, too");
    assert!(local.iter().all(|byte| *byte == 1));
    assert_eq!(a.context.leaked(), 0);
    Ok(())
}

fn after_a_reset_the_pair_works_again() -> Verdict {
    let (mut a, mut b) = pair()?;
    let mut inbox = a.pool.take().expect("a buffer");
    let cut = a.qp.scope(&mut a.cq, |scope| {
        scope.drain_timeout(Duration::ZERO);
        scope.recv(&mut inbox).map(drop)
    });
    assert!(cut.is_err());
    a.qp.reset(&mut a.cq)?;
    b.qp.reset(&mut b.cq)?;
    assert_eq!(a.qp.state(), QpState::RESET);
    let here = a.qp.endpoint(&gid(&a.context)?)?;
    let there = b.qp.endpoint(&gid(&b.context)?)?;
    a.qp.handshake(&there, &hasty())?;
    b.qp.handshake(&here, &hasty())?;
    let text = b.pool.copy(b"again").expect("a buffer");
    a.qp.scope(&mut a.cq, |receiver| {
        let received = receiver.recv(&mut inbox)?;
        b.qp.scope(&mut b.cq, |sender| sender.post(SendWr::send(&[]), &text).map(drop))??;
        let (inbox, outcome) = receiver.wait(received)?;
        assert_eq!(&inbox[..outcome.byte_len as usize], b"again");
        Ok::<_, Stop>(())
    })??;
    Ok(())
}

fn scope_under_a_thread_domain_ends() -> Verdict {
    let context = env::open()?;
    let (mut td, mut other) = (context.alloc_td()?, context.alloc_td()?);
    let pd = context.alloc_pd()?;
    let parent = pd.parent_domain_builder().thread_domain(&td).build()?;
    let pool = pd.buffer_pool_builder(64).build()?;
    let make = || {
        let mut cq = OwnedCompletionQueue::<u64>::new(context.cq_builder(64).build()?);
        let qp = parent.qp_builder(cq.queue(), cq.queue(), QpType::RC).max_send_wr(4);
        let qp = cq.adopt(supported(qp.max_recv_wr(4).build(), Capability::Rc)?)?;
        Ok::<_, Stop>((qp, cq))
    };
    let ((mut a, mut a_cq), (mut b, mut b_cq)) = (make()?, make()?);
    let index = gid(&context)?;
    let (here, there) = (a.endpoint(&index)?, b.endpoint(&index)?);
    a.handshake(&there, &hasty())?;
    b.handshake(&here, &hasty())?;
    let mut theirs = pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u8>(4096)?;
    theirs.copy_from(0, &pattern::bytes(1, 4096))?;
    let remote = theirs.remote(0)?;
    let text = pool.copy(b"text").expect("a buffer");
    let mut inbox = pool.take().expect("a buffer");
    let mut local = [0u8; 4096];
    b.scope(&mut b_cq, |receiver| {
        let received = receiver.recv(&mut inbox)?;
        a.scope(&mut a_cq, |sender| {
            // The scope refuses the other token, as it could not wait for the request.
            let refused = sender.post(SendWr::send(&[]), &text, &mut other);
            assert_eq!(refused.map(drop), Err(PostError::Ring(RingError::ForeignThreadDomain)));
            let sent = sender.post(SendWr::send(&[]), &text, &mut td)?;
            let whole = sender.register(&parent, &mut local)?;
            let _read = sender.post(SendWr::read(remote, &[]), whole, &mut td)?;
            let (text, outcome) = sender.wait(sent)?;
            assert_eq!((&**text, outcome.status), (&b"text"[..], WcStatus::SUCCESS));
            Ok::<_, Stop>(())
        })??;
        let (inbox, outcome) = receiver.wait(received)?;
        assert_eq!(&inbox[..outcome.byte_len as usize], b"text");
        Ok::<_, Stop>(())
    })??;
    pattern::check(&local, 1);
    // The token rings before and after a panic.
    let ended = catch_unwind(AssertUnwindSafe(|| {
        a.scope(&mut a_cq, |scope| {
            local.fill(0);
            let whole = scope.register(&parent, &mut local).expect("a region");
            let _ = scope.post(SendWr::read(remote, &[]), whole, &mut td).expect("room");
            unwind();
        })
    }));
    assert!(ended.is_err());
    pattern::check(&local, 1);
    a.scope(&mut a_cq, |scope| scope.post(SendWr::write(remote, &[]), &text, &mut td).map(drop))??;
    let mut begin = [0; 4];
    theirs.copy_to(0, &mut begin)?;
    assert_eq!((&begin, context.leaked()), (b"text", 0));
    Ok(())
}

/// Scopes that return, that unwind, and whose requests are aborted, each with a region of its own.
fn rounds_leave_nothing() -> Verdict {
    const KINDS: [ObjectKind; 4] = [ObjectKind::QP, ObjectKind::CQ, ObjectKind::MR, ObjectKind::PD];
    leaks::rounds_of(env::rounds(50, 1000), &KINDS, |context| {
        let context = context.clone();
        let mut local = vec![0u8; 8192];
        Ok(Box::new(move || {
            let (mut a, b) = pair_of(Half::on(context.clone())?, Half::on(context.clone())?)?;
            let theirs = b.pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u8>(8192)?;
            let remote = theirs.remote(0)?;
            a.qp.scope(&mut a.cq, |scope| {
                let whole = scope.register(&a.pd, &mut local)?;
                scope.post(SendWr::read(remote, &[]), whole).map(drop)?;
                Ok::<_, Stop>(())
            })??;
            let ended = catch_unwind(AssertUnwindSafe(|| {
                a.qp.scope(&mut a.cq, |scope| {
                    let whole = scope.register(&a.pd, &mut local).expect("a region");
                    let _ = scope.post(SendWr::read(remote, &[]), whole).expect("room");
                    unwind();
                })
            }));
            assert!(ended.is_err());
            let cut = a.qp.scope(&mut a.cq, |scope| {
                scope.drain_timeout(Duration::ZERO);
                let whole = scope.register(&a.pd, &mut local)?;
                scope.recv(whole).map(drop)?;
                Ok::<_, Stop>(())
            });
            assert!(matches!(cut, Err(ScopeError::Cancelled { value: Ok(()), .. })), "{cut:?}");
            Ok(())
        }))
    })
}
