//! The usual way to connect: both sides exchange endpoints, and call `handshake`.

use crate::env;
use crate::pair::PATIENCE;
use crate::verdict::{Stop, Verdict, trials};
use std::time::Instant;
use uverbs::{
    Access, CompletionQueue, Endpoint, Errno, Handshake, MemoryRegion, Mtu, QpState, QpType,
    QueuePair, RecvWr, SendWr, WcStatus,
};

trials![
    rc_pairs_connect,
    uc_pairs_connect,
    smaller_mtu_is_agreed_on,
    handshake_before_endpoint_is_refused,
    second_handshake_is_refused,
    endpoint_beyond_the_gid_table_is_refused,
    handshake_options_are_applied,
];

struct Side {
    qp: QueuePair,
    cq: CompletionQueue,
    memory: MemoryRegion<u64>,
}

fn side(qp_type: QpType) -> Verdict<(Side, Endpoint)> {
    let context = env::open()?;
    let pd = context.alloc_pd()?;
    let memory = pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u64>(512)?;
    let cq = context.cq_builder(8).build()?;
    let qp = pd.qp_builder(&cq, &cq, qp_type).max_send_wr(4).max_recv_wr(4).build()?;
    let endpoint = qp.endpoint(&context.default_gid(env::port())?)?;
    Ok((Side { qp, cq, memory }, endpoint))
}

fn complete(cq: &mut CompletionQueue) -> Verdict {
    let deadline = Instant::now() + PATIENCE;
    while Instant::now() < deadline {
        if let Some(completion) = cq.poll()?.next() {
            assert_eq!(completion.status(), WcStatus::SUCCESS);
            return Ok(());
        }
        std::thread::yield_now();
    }
    Err(Stop::fail("no completion"))
}

/// Sends one message from a to b.
#[allow(unsafe_code, reason = "ringing is")]
fn exchange(a: &mut Side, b: &mut Side) -> Verdict {
    a.memory.write_at(3, 0x0123_4567_89ab_cdef)?;
    let sges = [b.memory.sge(..)?];
    let mut batch = b.qp.recv_batch()?;
    batch.push(RecvWr::new(&sges).id(1))?;
    // SAFETY: the region lives as long as the queue pair, and is read only after completion.
    unsafe { batch.ring()? };
    let sges = [a.memory.sge(..)?];
    let mut batch = a.qp.send_batch()?;
    batch.push(SendWr::send(&sges).signaled())?;
    // SAFETY: as above.
    unsafe { batch.ring() }?;
    complete(&mut a.cq)?;
    complete(&mut b.cq)?;
    assert_eq!(b.memory.read_at(3), Some(0x0123_4567_89ab_cdef));
    Ok(())
}

fn rc_pairs_connect() -> Verdict {
    let ((mut a, at_a), (mut b, at_b)) = (side(QpType::RC)?, side(QpType::RC)?);
    assert_eq!((at_a.qpn, at_b.qpn), (a.qp.qpn(), b.qp.qpn()));
    assert_ne!(at_a.psn, at_b.psn, "two sequence numbers that are random");
    env::handshake(&a.qp, &at_b)?;
    env::handshake(&b.qp, &at_a)?;
    assert_eq!((a.qp.state(), a.qp.query()?.state), (QpState::RTS, QpState::RTS));
    exchange(&mut a, &mut b)?;
    exchange(&mut b, &mut a)
}

fn uc_pairs_connect() -> Verdict {
    let ((mut a, at_a), (mut b, at_b)) = (side(QpType::UC)?, side(QpType::UC)?);
    env::handshake(&a.qp, &at_b)?;
    env::handshake(&b.qp, &at_a)?;
    exchange(&mut a, &mut b)
}

fn smaller_mtu_is_agreed_on() -> Verdict {
    let ((mut a, mut at_a), (mut b, at_b)) = (side(QpType::RC)?, side(QpType::RC)?);
    at_a.mtu = Mtu::MTU_256;
    env::handshake(&b.qp, &at_a)?;
    assert_eq!(b.qp.query()?.path_mtu, Mtu::MTU_256);
    env::handshake(&a.qp, &Endpoint { mtu: Mtu::MTU_256, ..at_b })?;
    exchange(&mut a, &mut b)
}

fn handshake_before_endpoint_is_refused() -> Verdict {
    let ((_a, at_a), context) = (side(QpType::RC)?, env::open()?);
    let (pd, cq) = (context.alloc_pd()?, context.cq_builder(1).build()?);
    let qp = pd.qp_builder(&cq, &cq, QpType::RC).build()?;
    let error = qp.handshake(&at_a, &Handshake::new()).unwrap_err();
    assert_eq!(error.errno(), Errno::INVAL);
    assert!(error.message().contains("endpoint"), "{error}");
    Ok(())
}

fn second_handshake_is_refused() -> Verdict {
    let ((a, _), (_b, at_b)) = (side(QpType::RC)?, side(QpType::RC)?);
    env::handshake(&a.qp, &at_b)?;
    assert_eq!(a.qp.handshake(&at_b, &Handshake::new()).unwrap_err().errno(), Errno::INVAL);
    assert_eq!(a.qp.query()?.state, QpState::RTS);
    Ok(())
}

fn endpoint_beyond_the_gid_table_is_refused() -> Verdict {
    let (a, _) = side(QpType::RC)?;
    let length = a.qp.context().query_port(env::port())?.gid_table_len;
    assert_eq!(
        a.qp.endpoint(&env::gid_entry(env::port(), length)).unwrap_err().errno(),
        Errno::INVAL
    );
    assert_eq!(a.qp.endpoint(&env::gid_entry(99, 0)).unwrap_err().errno(), Errno::INVAL);
    Ok(())
}

fn handshake_options_are_applied() -> Verdict {
    let ((a, _), (_b, at_b)) = (side(QpType::RC)?, side(QpType::RC)?);
    let options = env::handshake_options().timeout(17).retry_count(3).rnr_retry(2).min_rnr_timer(9);
    a.qp.handshake(&at_b, &options)?;
    let info = a.qp.query()?;
    assert_eq!((info.timeout, info.retry_count, info.rnr_retry, info.min_rnr_timer), (17, 3, 2, 9));
    Ok(())
}
