//! Asynchronous events and completion channels: of live objects, of destroyed ones, of a device
//! that is gone.

use super::{Bench, poll_ids, wc};
use crate::uverbs::scripted::Script;
use crate::{Errno, EventSource, EventType, Notify, QpType};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

#[test]
#[cfg_attr(miri, ignore = "it waits for a file")]
fn events_name_the_objects_that_they_are_about() {
    let bench = Bench::new();
    let Bench { script, context, pd, cq } = &bench;
    let srq = pd.srq_builder(4).build().unwrap();
    let qp = bench.qp(QpType::RC);
    assert_eq!(context.try_next_event().unwrap(), None);
    let user = |handle| script.object(handle).user_handle;
    let expected = [
        (user(cq.handle()), EventType::CQ_ERR, EventSource::Cq(cq.key())),
        (user(qp.handle()), EventType::QP_FATAL, EventSource::Qp(qp.key())),
        (user(qp.handle()), EventType::QP_LAST_WQE_REACHED, EventSource::Qp(qp.key())),
        (user(srq.handle()), EventType::SRQ_LIMIT_REACHED, EventSource::Srq(srq.key())),
        (1, EventType::PORT_ACTIVE, EventSource::Port(1)),
        (2, EventType::GID_CHANGE, EventSource::Port(2)),
        (256, EventType::PORT_ERR, EventSource::Port(256)),
        (1 << 32, EventType::PORT_ERR, EventSource::Foreign(1 << 32)),
        (7, EventType::QP_REQ_ERR, EventSource::Foreign(7)),
        (9, EventType(77), EventSource::Foreign(9)),
        (1, EventType::DEVICE_FATAL, EventSource::Device),
    ];
    for (element, kind, _) in expected {
        script.raise(element, kind.0);
    }
    for (_, kind, source) in expected {
        let event = context.next_event(Some(Duration::ZERO)).unwrap().expect("an event");
        assert_eq!((event.kind, event.source), (kind, source));
    }
    assert_eq!(context.try_next_event().unwrap(), None);
    assert_eq!(context.dead_events(), 0);
}

#[test]
fn events_of_dead_objects_are_dropped_and_counted() {
    let bench = Bench::new();
    let Bench { script, context, .. } = &bench;
    let dead = bench.qp(QpType::RC);
    let key = script.object(dead.handle()).user_handle;
    drop(dead);
    // The next object takes the slot of the destroyed one, and gets none of its events.
    let live = bench.qp(QpType::RC);
    script.raise(key, EventType::QP_FATAL.0);
    script.raise(key, EventType::COMM_EST.0);
    assert_eq!(context.try_next_event().unwrap(), None);
    assert_eq!(context.dead_events(), 2);
    script.raise(script.object(live.handle()).user_handle, EventType::COMM_EST.0);
    let event = context.try_next_event().unwrap().expect("an event");
    assert_eq!(event.source, EventSource::Qp(live.key()));
}

#[test]
#[cfg_attr(miri, ignore = "it waits for a file")]
fn a_wait_for_an_event_ends_by_timeout_or_event() {
    let bench = Bench::new();
    let started = Instant::now();
    assert_eq!(bench.context.next_event(Some(Duration::from_millis(20))).unwrap(), None);
    assert!(started.elapsed() >= Duration::from_millis(20));
    let waiter = std::thread::spawn({
        let context = bench.context.clone();
        move || context.next_event(None)
    });
    std::thread::sleep(Duration::from_millis(10));
    bench.script.raise(1, EventType::PORT_ERR.0);
    let event = waiter.join().unwrap().unwrap().expect("an event");
    assert_eq!((event.kind, event.source), (EventType::PORT_ERR, EventSource::Port(1)));
}

#[test]
#[cfg_attr(miri, ignore = "it opens a file")]
fn a_device_that_is_gone_says_so_once_and_is_an_error_then() {
    let script = Script::new();
    script.close_events();
    let context = script.open("rxe0");
    let event = context.next_event(None).unwrap().expect("the last event");
    assert_eq!((event.kind, event.source), (EventType::DEVICE_FATAL, EventSource::Device));
    let error = context.next_event(None).unwrap_err();
    assert_eq!((error.errno(), error.message()), (Errno::IO, "the device is gone"));
}

#[test]
fn waiting_after_the_last_event_is_an_error() {
    let bench = Bench::new();
    let (context, fatal) = (&bench.context, EventType::DEVICE_FATAL.0);
    // A device that failed, which is still there.
    bench.script.raise(1, fatal);
    assert!(context.try_next_event().unwrap().is_some());
    assert_eq!(context.try_next_event().unwrap(), None);
    bench.script.vanish();
    bench.script.raise(1, fatal);
    assert!(context.next_event(None).unwrap().is_some());
    let error = context.next_event(None).unwrap_err();
    assert_eq!((error.errno(), error.message()), (Errno::IO, "the device is gone"));
}

#[test]
fn half_an_event_is_an_error() {
    let bench = Bench::new();
    bench.script.raise_garbage(&[1, 2, 3]);
    let error = bench.context.try_next_event().unwrap_err();
    assert_eq!(error.errno(), Errno::PROTO);
    assert!(error.to_string().contains("3 bytes"), "{error}");
}

#[test]
fn event_files_are_non_blocking() {
    let bench = Bench::new();
    let channel = bench.context.create_comp_channel().unwrap();
    for fd in [bench.context.events_fd(), channel.as_fd()] {
        let flags = rustix::fs::fcntl_getfl(fd).unwrap();
        assert!(flags.contains(rustix::fs::OFlags::NONBLOCK));
    }
}

#[test]
fn event_names_are_the_kernels() {
    assert_eq!(EventType::CQ_ERR.0, 0);
    assert_eq!(EventType::DEVICE_SPEED_CHANGE.0, 20);
    assert_eq!(EventType::SRQ_LIMIT_REACHED.to_string(), "shared receive queue limit reached");
    let names: std::collections::BTreeSet<_> =
        (0..=20).map(|n| EventType(n).description()).collect();
    assert!(names.len() == 21 && !names.contains(&None), "{names:?}");
    assert_eq!(EventType(21).description(), None);
    assert_eq!(format!("{:?}", EventType(21)), "EventType(21)");
}

#[test]
#[cfg_attr(miri, ignore = "it waits for a file")]
fn a_channel_names_the_queue_that_has_completions() {
    let bench = Bench::new();
    let Bench { script, context, .. } = &bench;
    let channel = context.create_comp_channel().unwrap();
    let mut first = context.cq_builder(4).channel(&channel).build().unwrap();
    let mut second = context.cq_builder(4).channel(&channel).build().unwrap();
    assert_eq!(channel.try_next().unwrap(), None);
    first.req_notify(Notify::Next).unwrap();
    second.req_notify(Notify::Solicited).unwrap();
    assert!(script.complete(second.handle(), wc(17, 1)));
    script.notify(second.handle());
    script.notify(first.handle());
    assert_eq!(channel.wait(None).unwrap(), Some(second.key()));
    assert_eq!(channel.try_next().unwrap(), Some(first.key()));
    assert_eq!(poll_ids(&mut second), [1]);
    // A blocking file returns the same events, and `try_next` still returns `None` without one.
    channel.set_nonblocking(false).unwrap();
    assert_eq!(channel.try_next().unwrap(), None);
    assert_eq!(channel.wait(Some(Duration::from_millis(5))).unwrap(), None);
    for _ in 0..2 {
        script.notify(first.handle());
    }
    assert_eq!(channel.try_next().unwrap(), Some(first.key()));
    assert_eq!(channel.wait(None).unwrap(), Some(first.key()));
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| channel.wait(None).unwrap());
        std::thread::sleep(Duration::from_millis(20));
        script.notify(second.handle());
        assert_eq!(waiter.join().unwrap(), Some(second.key()));
    });
    channel.set_nonblocking(true).unwrap();
    assert_eq!(channel.try_next().unwrap(), None);
    // The event of a destroyed queue is dropped.
    script.notify(first.handle());
    let (channel, error) = channel.destroy().unwrap_err().into_parts();
    assert_eq!(error.errno(), Errno::BUSY);
    drop(first);
    assert_eq!(channel.wait(Some(Duration::from_millis(5))).unwrap(), None);
    assert_eq!(context.dead_events(), 1);
    drop(second);
    channel.destroy().unwrap();
}

#[test]
fn arming_a_queue_without_channel_is_refused() {
    let mut bench = Bench::new();
    let error = bench.cq.req_notify(Notify::Next).unwrap_err();
    assert_eq!(error.errno(), Errno::INVAL);
    assert_eq!(error.kernel_errno(), None);
}
