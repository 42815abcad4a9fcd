//! The memory of unsignaled requests comes back with the completion of a later one, whatever its status.

use crate::env;
use crate::lent::{DEPTH, Half, pair};
use crate::pattern;
use crate::verdict::{Verdict, trials};
use uverbs::owned::Memory;
use uverbs::{Access, QpAttr, QpState, SendWr, WcOpcode, WcStatus};

trials![
    one_completion_gives_back_all_requests_before_it,
    many_rounds_wrap_the_queue,
    a_failure_gives_back_the_requests_before_it,
    flushed_requests_come_back_once,
    closing_gives_back_requests_without_a_later_completion,
    visits_show_each_request,
];

/// Writes `count` parts of a pattern to the peer's memory, the last one signaled.
fn write(a: &mut Half, to: &uverbs::MemoryRegion<u8>, seed: u64, count: usize) -> Verdict {
    let bytes = pattern::bytes(seed, count * 64);
    let mut batch = a.qp.send_batch()?;
    for (part, bytes) in bytes.chunks(64).enumerate() {
        let wr = SendWr::write(to.remote(part * 64)?, &[]);
        let buffer = a.pool.copy(bytes).expect("a buffer");
        match part + 1 < count {
            true => batch.push_unsignaled(wr, buffer, part as u64)?,
            false => batch.push(wr, buffer, part as u64)?,
        }
    }
    batch.ring()?;
    Ok(())
}

fn one_completion_gives_back_all_requests_before_it() -> Verdict {
    let (mut a, b) = pair()?;
    let theirs = b.pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u8>(4096)?;
    let parts = DEPTH as usize / 2 - 1;
    write(&mut a, &theirs, 1, parts)?;
    for part in 0..parts {
        let done = a.wait()?;
        assert_eq!((done.tag, done.outcome.status), (part as u64, WcStatus::SUCCESS));
        assert_eq!((done.outcome.opcode, done.outcome.qpn), (WcOpcode::WRITE, a.qp.qpn()));
        assert_eq!(done.memory.into_buffer().expect("the buffer").len(), 64);
    }
    let mut written = vec![0; parts * 64];
    theirs.copy_to(0, &mut written)?;
    pattern::check(&written, 1);
    // An unsignaled read reports its number of bytes.
    let mut batch = a.qp.send_batch()?;
    let mut buffer = a.pool.take().expect("a buffer");
    buffer.set_len(parts * 64);
    batch.push_unsignaled(SendWr::read(theirs.remote(0)?, &[]), buffer, 1)?;
    let byte = a.pool.copy(&[0]).expect("a buffer");
    batch.push(SendWr::write(theirs.remote(4000)?, &[]), byte, 2)?;
    batch.ring()?;
    let read = a.wait()?;
    assert_eq!(
        (read.tag, read.outcome.opcode, read.outcome.filled()),
        (1, WcOpcode::READ, parts * 64)
    );
    pattern::check(&read.memory.into_buffer().expect("the buffer"), 1);
    assert_eq!(a.wait()?.tag, 2);
    assert_eq!((a.pool.idle(), a.cq.unmatched()), (64, 0));
    Ok(())
}

fn many_rounds_wrap_the_queue() -> Verdict {
    let (mut a, b) = pair()?;
    let theirs = b.pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u8>(4096)?;
    let mut posted = 0u64;
    let mut over = 0u64;
    for round in 0..200 {
        let mut batch = a.qp.send_batch()?;
        for _ in 0..=round % 5 {
            // The program signals none; the library signals those that have to be.
            let buffer = a.pool.copy(&posted.to_ne_bytes()).expect("a buffer");
            let wr = SendWr::write(theirs.remote(0)?, &[]);
            match batch.push_unsignaled(wr, buffer, posted) {
                Ok(()) => posted += 1,
                Err(refused) => {
                    assert_eq!(refused.error, uverbs::PostError::Full);
                    break;
                }
            }
        }
        batch.ring()?;
        while a.qp.send_room() == 0 {
            let done = a.wait()?;
            assert_eq!((done.tag, done.outcome.status), (over, WcStatus::SUCCESS));
            over += 1;
        }
    }
    let mut batch = a.qp.send_batch()?;
    let buffer = a.pool.copy(&posted.to_ne_bytes()).expect("a buffer");
    batch.push(SendWr::write(theirs.remote(0)?, &[]), buffer, posted)?;
    batch.ring()?;
    while over <= posted {
        let done = a.wait()?;
        assert_eq!((done.tag, done.outcome.status), (over, WcStatus::SUCCESS));
        over += 1;
    }
    assert!(posted > 100, "{posted}");
    assert_eq!((a.pool.idle(), a.cq.unmatched()), (64, 0));
    let mut last = [0; 8];
    theirs.copy_to(0, &mut last)?;
    assert_eq!(u64::from_ne_bytes(last), posted);
    Ok(())
}

/// The peer refuses the third request of five. It has a completion of its own, although it is unsignaled.
fn a_failure_gives_back_the_requests_before_it() -> Verdict {
    env::access_errors()?;
    let (mut a, b) = pair()?;
    let theirs = b.pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u8>(4096)?;
    let not_writable = b.pool.take().expect("a buffer");
    let mut batch = a.qp.send_batch()?;
    for tag in 0..5 {
        let to = if tag == 2 { not_writable.remote() } else { theirs.remote(0)? };
        let buffer = a.pool.copy(&[tag as u8; 8]).expect("a buffer");
        batch.push_unsignaled(SendWr::write(to, &[]), buffer, tag)?;
    }
    batch.push(SendWr::write(theirs.remote(0)?, &[]), a.pool.take().expect("a buffer"), 5)?;
    batch.ring()?;
    for tag in 0..6 {
        let done = a.wait()?;
        assert_eq!(done.tag, tag);
        let expected = if tag == 2 { WcStatus::REM_ACCESS_ERR } else { WcStatus::WR_FLUSH_ERR };
        assert_eq!(done.outcome.status, expected, "request {tag}");
    }
    assert_eq!((a.pool.idle(), a.cq.unmatched()), (64, 0));
    Ok(())
}

fn flushed_requests_come_back_once() -> Verdict {
    env::error_flush()?;
    let mut half = Half::new()?;
    let other = Half::new()?;
    let ends = [&half, &other].map(|half| {
        Ok::<_, crate::verdict::Stop>(half.qp.endpoint(&crate::pair::gid(&half.context)?)?)
    });
    let [here, there] = ends;
    half.qp.handshake(&there?, &crate::lent::hasty())?;
    other.qp.handshake(&here?, &crate::lent::hasty())?;
    half.qp.modify(&QpAttr::new().state(QpState::ERR))?;
    let remote = uverbs::Remote { addr: 0, rkey: uverbs::Rkey(0) };
    let mut batch = half.qp.send_batch()?;
    for tag in 0..4 {
        let buffer = half.pool.take().expect("a buffer");
        batch.push_unsignaled(SendWr::write(remote, &[]), buffer, tag)?;
    }
    batch.push(SendWr::write(remote, &[]), half.pool.take().expect("a buffer"), 4)?;
    batch.ring()?;
    for tag in 0..5 {
        let done = half.wait()?;
        assert_eq!((done.tag, done.outcome.status), (tag, WcStatus::WR_FLUSH_ERR));
    }
    assert_eq!((half.pool.idle(), half.cq.unmatched()), (64, 0));
    Ok(())
}

fn closing_gives_back_requests_without_a_later_completion() -> Verdict {
    let (mut a, b) = pair()?;
    let theirs = b.pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u8>(4096)?;
    write(&mut a, &theirs, 2, 3)?;
    let mut batch = a.qp.send_batch()?;
    for tag in 3..6 {
        let wr = SendWr::write(theirs.remote(0)?, &[]);
        batch.push_unsignaled(wr, a.pool.take().expect("a buffer"), tag)?;
    }
    batch.ring()?;
    assert_eq!(a.wait()?.tag, 0);
    let Half { qp, mut cq, pool, .. } = a;
    qp.close(&mut cq)?;
    let mut tags: Vec<u64> = cq.poll()?.map(|done| done.tag).collect();
    tags.sort_unstable();
    assert_eq!(tags, [1, 2, 3, 4, 5]);
    assert_eq!(pool.idle(), 64);
    Ok(())
}

fn visits_show_each_request() -> Verdict {
    let (mut a, b) = pair()?;
    let theirs = b.pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u8>(4096)?;
    for most in [1, 2, 64] {
        write(&mut a, &theirs, most as u64, 5)?;
        let mut seen = Vec::new();
        let deadline = std::time::Instant::now() + crate::pair::PATIENCE;
        while seen.len() < 5 && std::time::Instant::now() < deadline {
            let found = a.cq.poll_each(most, |request| {
                assert!(request.is_success());
                let done = request.into_owned().expect("its memory");
                assert!(matches!(done.memory, Memory::Buffer(_)));
                seen.push(done.tag);
            })?;
            assert!(found <= most);
        }
        assert_eq!(seen, [0, 1, 2, 3, 4]);
    }
    assert_eq!(a.pool.idle(), 64);
    Ok(())
}
