//! Completion channels with traffic, and asynchronous events of queues. Destroying an object
//! discards its queued events, so no test acknowledges any.

use crate::capability::Capability;
use crate::env::drainable;
use crate::pair::{Config, PATIENCE, Pair, SILENCE, Side};
use crate::verdict::{Stop, Verdict, supported, trials};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};
use uverbs::{
    AsyncEvent, Context, EventSource, EventType, Notify, ObjectKey, QpAttr, QpState, SendWr,
    WcOpcode, WcStatus,
};

trials![
    armed_queue_raises_an_event_on_completion,
    one_event_for_each_arming,
    unarmed_queue_raises_no_event,
    queue_armed_for_solicited_ignores_other_completions,
    failed_completion_raises_an_event,
    completion_before_arming_is_found_by_polling,
    one_channel_names_the_queue_of_each_event,
    destroyed_queue_leaves_no_completion_event,
    cq_overflow_is_reported,
    srq_limit_is_reported_once,
    last_wqe_reached_is_reported,
    drained_send_queue_is_reported,
    access_error_is_reported_to_the_responder,
    destroyed_cq_leaves_no_async_event,
    destroyed_srq_leaves_no_async_event,
    destroyed_qp_leaves_no_async_event,
];

/// The longest wait for an event that some drivers do not raise.
pub(crate) const GRACE: Duration = Duration::from_secs(2);

/// Waits for an event of a context.
#[track_caller]
fn event(context: &Context) -> Verdict<AsyncEvent> {
    let event = context.next_event(Some(PATIENCE))?;
    event.ok_or_else(|| Stop::fail(format!("no asynchronous event after {PATIENCE:?}")))
}

/// Waits for an announcement at a side's channel.
#[track_caller]
fn announcement(side: &Side) -> Verdict<ObjectKey> {
    let key = side.channel.wait(Some(PATIENCE))?;
    key.ok_or_else(|| Stop::fail(format!("no completion event after {PATIENCE:?}")))
}

/// Posts a receive and sends it an empty message.
fn nudge(a: &mut Side, b: &mut Side, wr_id: u64, solicited: bool) -> Verdict {
    b.recv(wr_id, 0..0)?;
    let wr = SendWr::send(&[]).id(wr_id).signaled();
    a.send(if solicited { wr.solicited() } else { wr })?;
    a.expect(wr_id, WcOpcode::SEND)?;
    Ok(())
}

fn armed_queue_raises_an_event_on_completion() -> Verdict {
    let Pair { mut a, mut b, .. } = Pair::new(Config::rc())?;
    for wr_id in 0..5 {
        b.cq.req_notify(Notify::Next)?;
        nudge(&mut a, &mut b, wr_id, false)?;
        assert_eq!(announcement(&b)?, b.cq.key());
        b.expect(wr_id, WcOpcode::RECV)?;
    }
    Ok(())
}

fn one_event_for_each_arming() -> Verdict {
    let Pair { mut a, mut b, .. } = Pair::new(Config::rc())?;
    b.cq.req_notify(Notify::Next)?;
    for wr_id in 0..3 {
        nudge(&mut a, &mut b, wr_id, false)?;
        b.expect(wr_id, WcOpcode::RECV)?;
    }
    assert_eq!(announcement(&b)?, b.cq.key());
    assert_eq!(b.channel.wait(Some(SILENCE))?, None, "an event without arming");
    Ok(())
}

fn unarmed_queue_raises_no_event() -> Verdict {
    let Pair { mut a, mut b, .. } = Pair::new(Config::rc())?;
    nudge(&mut a, &mut b, 1, true)?;
    b.expect(1, WcOpcode::RECV)?;
    assert_eq!(b.channel.wait(Some(SILENCE))?, None);
    Ok(())
}

fn queue_armed_for_solicited_ignores_other_completions() -> Verdict {
    let Pair { mut a, mut b, .. } = Pair::new(Config::rc())?;
    b.cq.req_notify(Notify::Solicited)?;
    nudge(&mut a, &mut b, 1, false)?;
    b.expect(1, WcOpcode::RECV)?;
    assert_eq!(b.channel.wait(Some(SILENCE))?, None, "an event for an unsolicited message");
    nudge(&mut a, &mut b, 2, true)?;
    assert_eq!(announcement(&b)?, b.cq.key());
    b.expect(2, WcOpcode::RECV)?;
    Ok(())
}

fn failed_completion_raises_an_event() -> Verdict {
    let Pair { mut b, .. } = Pair::new(Config::rc())?;
    b.recv(1, 0..8)?;
    b.cq.req_notify(Notify::Next)?;
    b.qp.modify(&QpAttr::new().state(QpState::ERR))?;
    assert_eq!(announcement(&b)?, b.cq.key());
    b.expect_failure(1, WcStatus::WR_FLUSH_ERR)?;
    Ok(())
}

fn completion_before_arming_is_found_by_polling() -> Verdict {
    let Pair { mut a, mut b, .. } = Pair::new(Config::rc())?;
    nudge(&mut a, &mut b, 1, false)?;
    // Once the sender has its acknowledgement the receiver has its completion.
    b.cq.req_notify(Notify::Next)?;
    b.expect(1, WcOpcode::RECV)?;
    nudge(&mut a, &mut b, 2, false)?;
    assert_eq!(announcement(&b)?, b.cq.key());
    b.expect(2, WcOpcode::RECV)?;
    Ok(())
}

fn one_channel_names_the_queue_of_each_event() -> Verdict {
    let Pair { mut a, mut b, .. } = Pair::new(Config::rc())?;
    let mut other = b.context.cq_builder(4).channel(&b.channel).build()?;
    other.req_notify(Notify::Next)?;
    b.cq.req_notify(Notify::Next)?;
    nudge(&mut a, &mut b, 1, false)?;
    assert_ne!(other.key(), b.cq.key());
    assert_eq!(announcement(&b)?, b.cq.key());
    assert_eq!(b.channel.wait(Some(SILENCE))?, None, "the idle queue was announced");
    Ok(())
}

fn destroyed_queue_leaves_no_completion_event() -> Verdict {
    let Pair { mut a, mut b, .. } = Pair::new(Config::rc())?;
    b.cq.req_notify(Notify::Next)?;
    nudge(&mut a, &mut b, 1, false)?;
    readable(b.channel.as_fd())?;
    b.qp.destroy()?;
    b.cq.destroy()?;
    assert_eq!(b.channel.wait(Some(SILENCE))?, None);
    // The kernel discarded the event, so that the library had none to drop.
    assert_eq!(b.context.dead_events(), 0);
    b.channel.destroy()?;
    Ok(())
}

/// Fills b's completion queue and sends one message more. Returns the number of completions that fitted.
fn overflow(a: &mut Side, b: &mut Side) -> Verdict<u64> {
    let capacity = b.cq.capacity().into();
    for wr_id in 0..capacity {
        nudge(a, b, wr_id, false)?;
    }
    // A queue that needs no free place holds one completion more than promised.
    for wr_id in capacity..capacity + 2 {
        b.recv(wr_id, 0..0)?;
        a.send(SendWr::send(&[]))?;
    }
    readable(b.context.events_fd())?;
    Ok(capacity)
}

fn cq_overflow_is_reported() -> Verdict {
    let Pair { mut a, mut b, .. } = Pair::new(Config { cqe: 3, ..Config::rc() })?;
    let capacity = overflow(&mut a, &mut b)?;
    let event = event(&b.context)?;
    assert_eq!((event.kind, event.source), (EventType::CQ_ERR, EventSource::Cq(b.cq.key())));
    // The completions that fitted are there, in order.
    for wr_id in 0..capacity {
        b.expect(wr_id, WcOpcode::RECV)?;
    }
    Ok(())
}

fn srq_limit_is_reported_once() -> Verdict {
    let Pair { mut a, mut b, .. } = Pair::new(Config { srq: true, ..Config::rc() })?;
    for wr_id in 0..8 {
        b.recv(wr_id, 0..64)?;
    }
    let srq = b.srq.as_mut().expect("a pair with a shared receive queue");
    supported(srq.set_limit(6), Capability::SrqLimit)?;
    let key = srq.key();
    for wr_id in 0..4 {
        a.send(SendWr::send(&[]).id(wr_id).signaled())?;
        a.expect(wr_id, WcOpcode::SEND)?;
        b.expect(wr_id, WcOpcode::RECV)?;
        // Eight, seven, six are left: not below the limit. Then five are.
        if wr_id < 2 {
            assert_eq!(b.context.try_next_event()?, None, "{} receives left", 7 - wr_id);
        }
    }
    let event = event(&b.context)?;
    assert_eq!((event.kind, event.source), (EventType::SRQ_LIMIT_REACHED, EventSource::Srq(key)));
    assert_eq!(b.context.next_event(Some(SILENCE))?, None, "the event came twice");
    assert_eq!(b.srq.as_ref().map(|srq| srq.query()).transpose()?.map(|attr| attr.limit), Some(0));
    Ok(())
}

fn last_wqe_reached_is_reported() -> Verdict {
    let Pair { mut b, .. } = Pair::new(Config { srq: true, ..Config::rc() })?;
    b.recv(1, 0..64)?;
    b.qp.modify(&QpAttr::new().state(QpState::ERR))?;
    let Some(event) = b.context.next_event(Some(GRACE))? else {
        return Err(Stop::Skip(Capability::LastWqeEvent, "no such event came".into()));
    };
    assert_eq!(
        (event.kind, event.source),
        (EventType::QP_LAST_WQE_REACHED, EventSource::Qp(b.qp.key()))
    );
    // The receive belongs to all queue pairs of the queue, and is not flushed.
    b.expect_silence()
}

/// Makes a's queue pair raise an event.
fn drain(a: &Side) -> Verdict {
    drainable()?;
    Ok(a.qp.modify(&QpAttr::new().state(QpState::SQD).sqd_async_notify(true))?)
}

fn drained_send_queue_is_reported() -> Verdict {
    let mut pair = Pair::new(Config::rc())?;
    for seed in 0..3 {
        pair.message(seed, 1000)?;
        drain(&pair.a)?;
        let event = event(&pair.a.context)?;
        assert_eq!(
            (event.kind, event.source),
            (EventType::SQ_DRAINED, EventSource::Qp(pair.a.qp.key()))
        );
        assert_eq!(pair.a.qp.query()?.state, QpState::SQD);
        pair.a.qp.modify(&QpAttr::new().state(QpState::RTS))?;
    }
    pair.message(9, 1000)
}

fn access_error_is_reported_to_the_responder() -> Verdict {
    crate::env::access_errors()?;
    let Pair { mut a, b, .. } = Pair::new(Config::rc())?;
    let remote = uverbs::Remote { rkey: uverbs::Rkey(b.memory.rkey().0 ^ 0xff), ..b.remote(0) };
    let sges = [a.sge(0..8)];
    a.send(SendWr::write(remote, &sges).id(1))?;
    a.expect_failure(1, WcStatus::REM_ACCESS_ERR)?;
    let Some(event) = b.context.next_event(Some(GRACE))? else {
        return Err(Stop::Skip(Capability::QpAccessEvent, "no such event came".into()));
    };
    assert_eq!((event.kind, event.source), (EventType::QP_ACCESS_ERR, EventSource::Qp(b.qp.key())));
    Ok(())
}

fn destroyed_cq_leaves_no_async_event() -> Verdict {
    let Pair { mut a, mut b, .. } = Pair::new(Config { cqe: 3, ..Config::rc() })?;
    overflow(&mut a, &mut b)?;
    b.qp.destroy()?;
    b.cq.destroy()?;
    assert_eq!(b.context.next_event(Some(SILENCE))?, None);
    assert_eq!(b.context.dead_events(), 0);
    Ok(())
}

fn destroyed_srq_leaves_no_async_event() -> Verdict {
    let Pair { mut a, mut b, .. } = Pair::new(Config { srq: true, ..Config::rc() })?;
    b.recv(0, 0..64)?;
    let srq = b.srq.as_mut().expect("a pair with a shared receive queue");
    supported(srq.set_limit(2), Capability::SrqLimit)?;
    a.send(SendWr::send(&[]).id(1).signaled())?;
    a.expect(1, WcOpcode::SEND)?;
    readable(b.context.events_fd())?;
    b.qp.destroy()?;
    let srq = b.srq.take().expect("a pair with a shared receive queue");
    srq.destroy()?;
    assert_eq!(b.context.next_event(Some(SILENCE))?, None);
    assert_eq!(b.context.dead_events(), 0);
    Ok(())
}

fn destroyed_qp_leaves_no_async_event() -> Verdict {
    let Pair { a, .. } = Pair::new(Config::rc())?;
    drain(&a)?;
    readable(a.context.events_fd())?;
    a.qp.destroy()?;
    assert_eq!(a.context.next_event(Some(SILENCE))?, None);
    assert_eq!(a.context.dead_events(), 0);
    Ok(())
}

/// Waits until an event is queued, and leaves it there.
fn readable(fd: BorrowedFd<'_>) -> Verdict {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let mut fds = [rustix::event::PollFd::new(&fd, rustix::event::PollFlags::IN)];
        let pause = rustix::event::Timespec { tv_sec: 1, tv_nsec: 0 };
        if rustix::event::poll(&mut fds, Some(&pause))? == 1 {
            return Ok(());
        }
        if Instant::now() > deadline {
            return Err(Stop::fail("no event was queued"));
        }
    }
}
