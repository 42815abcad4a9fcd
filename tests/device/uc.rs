//! Unreliable connections.

use crate::pair::{Config, Pair};
use crate::verdict::{Verdict, trials};
use uverbs::{PostError, SendWr, WcOpcode, WcStatus};

trials![
    messages_of_every_size,
    immediate_data_arrives,
    writes_reach_the_peers_memory,
    write_with_immediate_completes_a_receive,
    message_without_a_receive_is_lost,
    reads_and_atomics_are_refused,
    truncated_message_does_not_break_the_sender,
];

fn messages_of_every_size() -> Verdict {
    let mut pair = Pair::new(Config::uc())?;
    for (seed, length) in [0, 1, 1023, 1024, 1025, 5000, 65536].into_iter().enumerate() {
        pair.message(seed as u64, length)?;
    }
    Ok(())
}

fn immediate_data_arrives() -> Verdict {
    let Pair { mut a, mut b, .. } = Pair::new(Config::uc())?;
    b.poison(0..2000);
    b.recv(1, 0..2000)?;
    a.fill(0..2000, 3);
    let sges = [a.sge(0..2000)];
    a.send(SendWr::send_imm(&sges, 0x8000_0001).id(2).signaled())?;
    a.expect(2, WcOpcode::SEND)?;
    assert_eq!(b.expect(1, WcOpcode::RECV)?.imm, Some(0x8000_0001));
    b.check(0..2000, 3);
    Ok(())
}

fn writes_reach_the_peers_memory() -> Verdict {
    let Pair { mut a, mut b, .. } = Pair::new(Config::uc())?;
    for (seed, length) in [1, 1024, 10_000].into_iter().enumerate() {
        let seed = seed as u64;
        b.poison(0..length);
        a.fill(0..length, seed);
        let sges = [a.sge(0..length)];
        let remote = b.remote(0);
        b.recv_into(1, &[])?;
        // A write completes when it is sent; the message after it shows that it arrived.
        a.send_all(&[
            SendWr::write(remote, &sges).id(seed).signaled(),
            SendWr::send(&[]).id(9).signaled(),
        ])?;
        a.expect(seed, WcOpcode::WRITE)?;
        a.expect(9, WcOpcode::SEND)?;
        b.expect(1, WcOpcode::RECV)?;
        b.check(0..length, seed);
    }
    Ok(())
}

fn write_with_immediate_completes_a_receive() -> Verdict {
    let Pair { mut a, mut b, .. } = Pair::new(Config::uc())?;
    b.poison(0..5000);
    b.recv_into(1, &[])?;
    a.fill(0..5000, 4);
    let sges = [a.sge(0..5000)];
    let remote = b.remote(0);
    a.send(SendWr::write_imm(remote, &sges, 77).id(2).signaled())?;
    a.expect(2, WcOpcode::WRITE)?;
    let received = b.expect(1, WcOpcode::RECV_WRITE_IMM)?;
    assert_eq!((received.imm, received.byte_len), (Some(77), 5000));
    b.check(0..5000, 4);
    Ok(())
}

fn message_without_a_receive_is_lost() -> Verdict {
    let mut pair = Pair::new(Config::uc())?;
    let sges = [pair.a.sge(0..10)];
    pair.a.send(SendWr::send(&sges).id(1).signaled())?;
    // The sender does not learn of it, and later messages arrive.
    pair.a.expect(1, WcOpcode::SEND)?;
    pair.b.expect_silence()?;
    pair.message(2, 100)
}

fn reads_and_atomics_are_refused() -> Verdict {
    let Pair { mut a, b, .. } = Pair::new(Config::uc())?;
    let remote = b.remote(0);
    let sges = [a.sge(0..8)];
    for wr in [
        SendWr::read(remote, &sges),
        SendWr::fetch_add(remote, 1, &sges),
        SendWr::compare_swap(remote, 0, 1, &sges),
        SendWr::atomic_write(remote, [0; 8]),
    ] {
        assert_eq!(a.send(wr), Err(PostError::Unsupported), "{wr:?}");
    }
    a.expect_silence()
}

fn truncated_message_does_not_break_the_sender() -> Verdict {
    let Pair { mut a, mut b, .. } = Pair::new(Config::uc())?;
    b.poison(0..200);
    b.recv(1, 0..100)?;
    a.fill(0..200, 6);
    let sges = [a.sge(0..200)];
    a.send(SendWr::send(&sges).id(2).signaled())?;
    a.expect(2, WcOpcode::SEND)?;
    // No byte is written beyond the receive, whichever way the message ends.
    let deadline = std::time::Instant::now() + crate::pair::SILENCE;
    while std::time::Instant::now() < deadline {
        if let Some(done) = crate::pair::poll(&mut b.cq)? {
            assert_ne!(done.status, WcStatus::SUCCESS, "{done:?}");
        }
    }
    let poison = crate::pattern::bytes(crate::pattern::POISON, 200);
    assert!(b.read(100..200) == poison[100..], "bytes beyond the receive were written");
    Ok(())
}
