//! Requests on borrowed memory: nothing is returned to its owner while a device may touch it.

use crate::helper::Helper;
use crate::lent::{DEPTH, FAR_BYTES, Half, far, hasty, pair};
use crate::pair::{PORT, SILENCE, gid};
use crate::pattern;
use crate::verdict::{Verdict, trials};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;
use uverbs::owned::{Ending, Part, ScopeError};
use uverbs::{QpState, SendWr, WcStatus};

trials![
    borrowed_memory_of_all_kinds,
    a_panic_waits_for_the_requests,
    a_silent_peer_is_cut_off,
    a_peer_that_is_killed,
    after_a_reset_the_pair_works_again,
];

fn borrowed_memory_of_all_kinds() -> Verdict {
    let (mut a, mut b) = pair()?;
    let theirs = b.pd.allocate::<u8>(4096)?;
    let text = a.pool.copy(&pattern::bytes(1, 700)).expect("a buffer");
    let mut inbox = b.pool.take().expect("a buffer");
    let mut region = a.pd.allocate::<u8>(4096)?;
    region.copy_from(0, &pattern::bytes(2, 700))?;
    // Memory of the stack, which nobody registered.
    let mut local = [0u8; 1500];
    let received = b.qp.scope(&mut b.cq, |receiver| {
        let received = receiver.recv(&mut inbox)?;
        a.qp.scope(&mut a.cq, |sender| {
            let sent = sender.post(SendWr::send(&[]), &text)?;
            let part = Part::new(&region, ..700)?;
            let written = sender.post(SendWr::write(theirs.remote(0)?, &[]), part)?;
            let (_, outcome) = sender.wait(written)?;
            assert_eq!(outcome.status, WcStatus::SUCCESS);
            let (front, _rest) = sender.register(&a.pd, &mut local)?.split_at(700);
            let _read = sender.post(SendWr::read(theirs.remote(0)?, &[]), front)?;
            let (text, _) = sender.wait(sent)?;
            pattern::check(text, 1);
            Ok::<_, crate::verdict::Stop>(())
        })??;
        let (inbox, outcome) = receiver.wait(received)?;
        assert_eq!(outcome.byte_len, 700);
        pattern::check(&inbox[..700], 1);
        Ok::<_, crate::verdict::Stop>(outcome.status)
    })??;
    assert_eq!(received, WcStatus::SUCCESS);
    pattern::check(&local[..700], 2);
    assert!(local[700..].iter().all(|byte| *byte == 0));
    Ok(())
}

fn a_panic_waits_for_the_requests() -> Verdict {
    let (mut a, b) = pair()?;
    let mut theirs = b.pd.allocate::<u8>(1 << 20)?;
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
    // The request was over before the panic went on, and so nothing changes any more.
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
        scope.patience(Duration::from_millis(50));
        inboxes.iter_mut().try_for_each(|inbox| scope.recv(inbox).map(drop))
    });
    let called_off =
        matches!(&scoped, Err(ScopeError::CalledOff { value: Ok(()), ending: Ending::Flushed }));
    assert!(called_off, "{scoped:?}");
    inboxes.iter_mut().for_each(|inbox| inbox.fill(1));
    // What the peer sends now goes nowhere.
    let mut batch = b.qp.send_batch()?;
    let mut text = b.pool.take().expect("a buffer");
    text.fill(0xff);
    batch.push(SendWr::send(&[]), text, 0)?;
    batch.ring()?;
    assert!(!b.wait()?.outcome.is_success());
    assert!(inboxes.iter().all(|inbox| inbox.iter().all(|byte| *byte == 1)));
    Ok(())
}

fn a_peer_that_is_killed() -> Verdict {
    let mut a = Half::new()?;
    let mut peer = Helper::start()?;
    let remote = far(&mut peer, &a.context, &a.qp)?;
    let mut local = vec![0u8; FAR_BYTES];
    a.qp.scope(&mut a.cq, |scope| {
        let whole = scope.register(&a.pd, &mut local)?;
        scope.post(SendWr::read(remote, &[]), whole).map(drop)?;
        Ok::<_, crate::verdict::Stop>(())
    })??;
    assert!(local.iter().all(|byte| *byte == 7));
    let status = a.qp.scope(&mut a.cq, |scope| {
        let whole = scope.register(&a.pd, &mut local)?;
        let read = scope.post(SendWr::read(remote, &[]), whole)?;
        peer.kill()?;
        let (_, outcome) = scope.wait(read)?;
        Ok::<_, crate::verdict::Stop>(outcome.status)
    })??;
    // It may have been quicker; else its memory, its queue pair or its answers are missed first.
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
        Ok::<_, crate::verdict::Stop>(())
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
        scope.patience(Duration::ZERO);
        scope.recv(&mut inbox).map(drop)
    });
    assert!(cut.is_err());
    a.qp.reset(&mut a.cq)?;
    b.qp.reset(&mut b.cq)?;
    assert_eq!(a.qp.state(), QpState::RESET);
    let here = a.qp.endpoint(PORT, gid(&a.context)?.index)?;
    let there = b.qp.endpoint(PORT, gid(&b.context)?.index)?;
    a.qp.handshake_with(&there, &hasty())?;
    b.qp.handshake_with(&here, &hasty())?;
    let text = b.pool.copy(b"again").expect("a buffer");
    a.qp.scope(&mut a.cq, |receiver| {
        let received = receiver.recv(&mut inbox)?;
        b.qp.scope(&mut b.cq, |sender| sender.post(SendWr::send(&[]), &text).map(drop))??;
        let (inbox, outcome) = receiver.wait(received)?;
        assert_eq!(&inbox[..outcome.byte_len as usize], b"again");
        Ok::<_, crate::verdict::Stop>(())
    })??;
    Ok(())
}
