//! Connections as futures, on the scripted connection manager, in an event loop that the test drives.

use super::*;
use crate::cm::scripted::{CmScript, LOCAL, PEER};
use crate::cm::{Listener, PortSpace};
use crate::sync::fork::in_child;
use crate::tests::Bench;
use crate::tests::futures::{Watched, cx};
use crate::tests::panics::{again, each_call};
use crate::{QpState, QpType, QueuePair};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::atomic::AtomicUsize;
use std::task::Wake;
use std::time::Duration;
use uverbs_uapi::rdma_user_cm::rdma_cm_event_type as Type;
use uverbs_uapi::rdma_user_cm::*;

/// A timer that is never over.
fn endless(_: Duration) -> std::future::Pending<()> {
    std::future::pending()
}

/// A channel whose driver the test polls, and a device.
struct Stage {
    script: CmScript,
    bench: Bench,
    channel: AsyncEventChannel,
    driver: ChannelDriver<Watched>,
}

impl Stage {
    fn new() -> Stage {
        let (script, bench) = (CmScript::new(), Bench::new());
        let (channel, driver) =
            AsyncEventChannel::on(script.open(), |_| Ok(Watched::default()), endless).unwrap();
        channel.use_context(&bench.context).unwrap();
        Stage { script, bench, channel, driver }
    }

    fn qp(&self) -> Result<QueuePair> {
        self.bench.pd.qp_builder(&self.bench.cq, &self.bench.cq, QpType::RC).build()
    }

    /// Reports the event that each command since the last call leads to for an id, and drives the channel.
    fn play(script: &CmScript, driver: &mut ChannelDriver<Watched>, id: u32) {
        for command in script.log() {
            let event = match command {
                RDMA_USER_CM_CMD_RESOLVE_ADDR => Type::RDMA_CM_EVENT_ADDR_RESOLVED,
                RDMA_USER_CM_CMD_RESOLVE_ROUTE => Type::RDMA_CM_EVENT_ROUTE_RESOLVED,
                RDMA_USER_CM_CMD_CONNECT => Type::RDMA_CM_EVENT_CONNECT_RESPONSE,
                RDMA_USER_CM_CMD_ACCEPT => Type::RDMA_CM_EVENT_ESTABLISHED,
                _ => continue,
            };
            script.tell(id, event, 0);
        }
        assert!(Pin::new(driver).poll(&mut cx()).is_pending());
    }

    /// Polls a connect to its end, at most `polls` times.
    fn connect(&mut self, id: u32, polls: usize) -> Option<(QueuePair, AsyncConnection)> {
        let (script, channel) = (self.script.clone(), self.channel.clone());
        let connector = Connector::new(PEER).unwrap();
        let qp = self.qp().unwrap();
        let mut qp = Some(qp);
        let mut future = pin!(channel.connect(&connector, |_| Ok(qp.take().unwrap())));
        for _ in 0..polls {
            if let Poll::Ready(connected) = future.as_mut().poll(&mut cx()) {
                return Some(connected.unwrap());
            }
            Stage::play(&script, &mut self.driver, id);
        }
        None
    }

    fn ud_qp(bench: &Bench) -> Result<QueuePair> {
        bench.pd.qp_builder(&bench.cq, &bench.cq, QpType::UD).build()
    }

    /// Polls a future of datagrams to its end, at most `polls` times. Each command leads to its event, of the id that
    /// was made last.
    fn drive<T>(
        script: &CmScript,
        driver: &mut ChannelDriver<Watched>,
        polls: usize,
        future: impl Future<Output = T>,
    ) -> Option<T> {
        let mut future = pin!(future);
        for _ in 0..polls {
            if let Poll::Ready(end) = future.as_mut().poll(&mut cx()) {
                return Some(end);
            }
            let id = script.live().last().copied().unwrap();
            for command in script.log() {
                let event = match command {
                    RDMA_USER_CM_CMD_RESOLVE_ADDR => Type::RDMA_CM_EVENT_ADDR_RESOLVED,
                    RDMA_USER_CM_CMD_RESOLVE_ROUTE => Type::RDMA_CM_EVENT_ROUTE_RESOLVED,
                    RDMA_USER_CM_CMD_CONNECT => Type::RDMA_CM_EVENT_ESTABLISHED,
                    RDMA_USER_CM_CMD_JOIN_MCAST => Type::RDMA_CM_EVENT_MULTICAST_JOIN,
                    _ => continue,
                };
                let mut ud = rdma_ucm_ud_param { qp_num: 0x99, ..Default::default() };
                ud.ah_attr.is_global = 1;
                ud.ah_attr.grh.dgid = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 239, 1, 2, 3];
                script.tell_datagram(id, event, 0, ud);
            }
            assert!(Pin::new(&mut *driver).poll(&mut cx()).is_pending());
        }
        None
    }
}

/// Counts how often it is woken.
#[derive(Debug, Default)]
struct Count(AtomicUsize);

impl Wake for Count {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

impl Count {
    fn new() -> (Arc<Count>, Waker) {
        let count = Arc::<Count>::default();
        (count.clone(), Waker::from(count))
    }

    fn get(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

#[test]
fn connects_accepts_and_sees_the_end() {
    let mut stage = Stage::new();
    let (qp, connection) = stage.connect(1, 10).unwrap();
    assert_eq!(qp.state(), QpState::RTS);
    let listener = stage.channel.listen(&Listener::builder(LOCAL).unwrap().backlog(4)).unwrap();
    assert!(pin!(listener.next_request()).poll(&mut cx()).is_pending());
    let id = stage.script.request(2, rdma_ucm_conn_param::default());
    stage.script.log();
    Stage::play(&stage.script, &mut stage.driver, id);
    let Poll::Ready(Ok(request)) = pin!(listener.next_request()).poll(&mut cx()) else {
        panic!("the request is read");
    };
    let param = ConnectParam::new();
    let accepted = {
        let qp = stage.qp();
        let mut future = pin!(stage.channel.accept(request, &param, |_| qp));
        assert!(future.as_mut().poll(&mut cx()).is_pending());
        Stage::play(&stage.script, &mut stage.driver, id);
        match future.poll(&mut cx()) {
            Poll::Ready(Ok((qp, connection))) => (qp, connection),
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(accepted.0.state(), QpState::RTS);
    // Both tasks learn of the end, though there is one event.
    let (count, waker) = Count::new();
    let (mut one, mut other) = (pin!(connection.disconnected()), pin!(connection.disconnected()));
    assert!(one.as_mut().poll(&mut task::Context::from_waker(&waker)).is_pending());
    assert!(other.as_mut().poll(&mut cx()).is_pending());
    stage.script.tell(1, Type::RDMA_CM_EVENT_DISCONNECTED, 0);
    Stage::play(&stage.script, &mut stage.driver, 1);
    assert_eq!(count.get(), 1);
    assert!(matches!(other.poll(&mut cx()), Poll::Ready(Ok(()))));
    assert!(matches!(one.poll(&mut cx()), Poll::Ready(Ok(()))));
    assert!(connection.is_closed());
}

/// The timer starts with the connect. Its end ends the step that is under way, and destroys the id.
#[test]
fn the_deadline_of_a_connect_ends_each_of_its_steps() {
    for (steps, told) in [
        (0, "the address was not resolved in time; `Connector::timeout` sets the limit"),
        (1, "the route was not resolved in time; `Connector::timeout` sets the limit"),
        (2, "the listener did not answer in time; `Connector::timeout` sets the limit"),
    ] {
        for qp_type in [QpType::RC, QpType::UD] {
            let (script, bench) = (CmScript::new(), Bench::new());
            let (begun, ended) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
            let (timers, over) = (begun.clone(), ended.clone());
            let sleep = move |time: Duration| {
                assert_eq!(time, Duration::from_secs(3));
                timers.fetch_add(1, Ordering::Relaxed);
                let over = over.clone();
                poll_fn(move |_| match over.load(Ordering::Relaxed) {
                    true => Poll::Ready(()),
                    false => Poll::Pending,
                })
            };
            let watched = |_: BorrowedFd<'_>| Ok(Watched::default());
            let opened = AsyncEventChannel::on(script.open(), watched, sleep);
            let (channel, mut driver) = opened.unwrap();
            channel.use_context(&bench.context).unwrap();
            let connector = Connector::new(PEER).unwrap().timeout(Duration::from_secs(3));
            let create =
                |_: &RouteResolved| bench.pd.qp_builder(&bench.cq, &bench.cq, qp_type).build();
            let mut future: Pin<Box<dyn Future<Output = Option<ConnectError>>>> = match qp_type {
                QpType::UD => {
                    Box::pin(async { channel.connect_datagrams(&connector, create).await.err() })
                }
                _ => Box::pin(async { channel.connect(&connector, create).await.err() }),
            };
            for _ in 0..steps {
                assert!(future.as_mut().poll(&mut cx()).is_pending());
                Stage::play(&script, &mut driver, 1);
            }
            assert!(future.as_mut().poll(&mut cx()).is_pending());
            ended.store(true, Ordering::Relaxed);
            let Poll::Ready(Some(error)) = future.as_mut().poll(&mut cx()) else {
                panic!("{qp_type}: the deadline does not end step {steps}");
            };
            assert_eq!((error.errno(), error.error().message()), (Errno::TIMEDOUT, told));
            assert_eq!(begun.load(Ordering::Relaxed), 1, "one timer for all steps");
            drop(future);
            assert_eq!(script.live(), []);
        }
    }
}

/// That the address moved to another interface is a hint, and no answer.
#[test]
fn a_connect_goes_on_when_the_address_changes() {
    let mut stage = Stage::new();
    let (script, channel) = (stage.script.clone(), stage.channel.clone());
    let connector = Connector::new(PEER).unwrap();
    let mut qp = Some(stage.qp().unwrap());
    let mut future = pin!(channel.connect(&connector, |_| Ok(qp.take().unwrap())));
    for _ in 0..10 {
        if let Poll::Ready(connected) = future.as_mut().poll(&mut cx()) {
            assert_eq!(connected.unwrap().0.state(), QpState::RTS);
            return;
        }
        script.tell(1, Type::RDMA_CM_EVENT_ADDR_CHANGE, 0);
        Stage::play(&script, &mut stage.driver, 1);
    }
    panic!("it waits for ever");
}

/// No host of these tests has a device that the channel could open by itself.
#[test]
fn a_queue_pair_can_be_made_on_the_context_that_the_channel_was_given() {
    let Stage { script, bench, channel, mut driver } = Stage::new();
    let connector = Connector::new(PEER).unwrap();
    let asking = channel.connect_datagrams(&connector, |route| {
        let context = route.context()?;
        let pd = context.alloc_pd()?;
        let cq = context.cq_builder(4).build()?;
        assert!(bench.script.live().iter().any(|(_, handle)| *handle == cq.handle()));
        pd.qp_builder(&cq, &cq, QpType::UD).build()
    });
    let (qp, _) = Stage::drive(&script, &mut driver, 10, asking).unwrap().unwrap();
    assert_eq!(bench.script.object(qp.handle()).state, QpState::RTS.0);
}

/// An error ends it, as the driver's end.
#[cfg(feature = "stream")]
#[test]
fn a_listener_is_a_stream_of_requests_up_to_its_first_error() {
    use futures_core::{FusedStream, Stream};
    let Stage { script, channel, mut driver, .. } = Stage::new();
    let mut listener = channel.listen(&Listener::builder(LOCAL).unwrap().backlog(4)).unwrap();
    let next = |listener: &mut AsyncListener| Stream::poll_next(Pin::new(listener), &mut cx());
    for _ in 0..2 {
        assert!(next(&mut listener).is_pending());
        script.request(1, rdma_ucm_conn_param::default());
        assert!(Pin::new(&mut driver).poll(&mut cx()).is_pending());
        assert!(matches!(next(&mut listener), Poll::Ready(Some(Ok(_)))));
        assert!(!listener.is_terminated());
    }
    drop(driver);
    assert!(matches!(next(&mut listener), Poll::Ready(Some(Err(_)))));
    for _ in 0..2 {
        assert!(listener.is_terminated());
        assert!(matches!(next(&mut listener), Poll::Ready(None)));
    }
}

#[test]
fn future_dropped_after_any_poll_leaves_no_id() {
    for polls in 0.. {
        let mut stage = Stage::new();
        let connected = stage.connect(1, polls);
        let is_over = connected.is_some();
        assert_eq!(stage.script.live().len(), usize::from(is_over), "{polls} polls");
        drop(connected);
        assert!(stage.script.live().is_empty(), "{polls} polls");
        if is_over {
            assert!(polls > 3, "{polls} polls");
            return;
        }
    }
}

#[test]
fn request_for_datagrams_dropped_after_any_poll_leaves_no_id() {
    for polls in 0.. {
        let Stage { script, bench, channel, mut driver } = Stage::new();
        let connector = Connector::new(PEER).unwrap();
        let asking = channel.connect_datagrams(&connector, |_| Stage::ud_qp(&bench));
        let answered = Stage::drive(&script, &mut driver, polls, asking);
        // The answer is all: it leaves no id either.
        assert!(script.live().is_empty(), "{polls} polls");
        if let Some(answered) = answered {
            let (qp, peer) = answered.unwrap();
            assert_eq!((qp.state(), peer.qpn().0), (QpState::RTS, 0x99));
            assert!(polls > 3, "{polls} polls");
            return;
        }
    }
}

#[test]
fn join_dropped_after_any_poll_leaves_the_group() {
    let (local, group) = (LOCAL.parse::<SocketAddr>().unwrap(), "239.1.2.3".parse().unwrap());
    for polls in 0.. {
        let Stage { script, bench, channel, mut driver } = Stage::new();
        let joining = channel.join_multicast(local.ip(), group, MulticastRole::Full, |bound| {
            assert_eq!(bound.local_addr()?, local);
            Stage::ud_qp(&bench)
        });
        let Some(joined) = Stage::drive(&script, &mut driver, polls, joining) else {
            assert!(script.live().is_empty(), "{polls} polls");
            continue;
        };
        let (_qp, member) = joined.unwrap();
        assert!(polls > 1 && member.receives() && member.gid().ip() == group);
        assert_eq!(script.live(), [1, 2]);
        {
            let (mut lost, mut other) = (pin!(member.lost()), pin!(member.lost()));
            assert!(lost.as_mut().poll(&mut cx()).is_pending());
            assert!(other.as_mut().poll(&mut cx()).is_pending());
            script.tell(2, Type::RDMA_CM_EVENT_MULTICAST_ERROR, -101);
            assert!(Pin::new(&mut driver).poll(&mut cx()).is_pending());
            assert!(matches!(lost.poll(&mut cx()), Poll::Ready(Ok(()))));
            assert!(matches!(other.poll(&mut cx()), Poll::Ready(Ok(()))));
            assert!(matches!(pin!(member.lost()).poll(&mut cx()), Poll::Ready(Ok(()))));
        }
        drop(member);
        assert!(script.live().is_empty());
        return;
    }
}

#[test]
fn dropped_accept_leaves_no_id() {
    let mut stage = Stage::new();
    let listener = stage.channel.listen(&Listener::builder(LOCAL).unwrap().backlog(4)).unwrap();
    let id = stage.script.request(1, rdma_ucm_conn_param::default());
    Stage::play(&stage.script, &mut stage.driver, id);
    let Poll::Ready(Ok(request)) = pin!(listener.next_request()).poll(&mut cx()) else {
        panic!("the request is read");
    };
    let param = ConnectParam::new();
    {
        let mut future = pin!(stage.channel.accept(request, &param, |_| stage.qp()));
        assert!(future.as_mut().poll(&mut cx()).is_pending());
        assert_eq!(stage.script.live(), [1, id]);
    }
    assert_eq!(stage.script.live(), [1]);
}

#[test]
fn futures_fail_when_the_driver_ends() {
    let stage = Stage::new();
    let Stage { channel, driver, bench, .. } = stage;
    let listener = channel.listen(&Listener::builder(LOCAL).unwrap().backlog(4)).unwrap();
    let (count, waker) = Count::new();
    let mut cx = task::Context::from_waker(&waker);
    {
        let mut request = pin!(listener.next_request());
        assert!(request.as_mut().poll(&mut cx).is_pending());
        drop(driver);
        assert_eq!(count.get(), 1);
        let Poll::Ready(Err(error)) = request.poll(&mut cx) else { panic!("it waits for ever") };
        assert_eq!(error.errno(), Errno::CANCELED, "{error}");
    }
    let connector = Connector::new(PEER).unwrap();
    let connected = pin!(channel.connect(&connector, |_| {
        bench.pd.qp_builder(&bench.cq, &bench.cq, QpType::RC).build()
    }))
    .poll(&mut cx);
    let Poll::Ready(Err(error)) = connected else { panic!("it waits for ever") };
    assert_eq!(error.errno(), Errno::CANCELED, "{error}");
}

#[test]
fn driver_ends_when_the_last_handle_is_dropped() {
    let Stage { channel, mut driver, .. } = Stage::new();
    let (count, waker) = Count::new();
    let mut cx = task::Context::from_waker(&waker);
    let listener = channel.listen(&Listener::builder(LOCAL).unwrap().backlog(4)).unwrap();
    drop(channel);
    assert!(Pin::new(&mut driver).poll(&mut cx).is_pending());
    drop(listener);
    assert_eq!(count.get(), 1);
    assert!(matches!(Pin::new(&mut driver).poll(&mut cx), Poll::Ready(Ok(()))));
}

/// A file that is readable without an event, as no kernel reports it.
struct Always;

impl Readiness for Always {
    fn poll_read(
        &mut self,
        _: &mut task::Context<'_>,
        read: &mut dyn FnMut() -> Result<()>,
    ) -> Poll<Result<()>> {
        Poll::Ready(read())
    }
}

#[test]
fn driver_ends_after_too_many_false_alarms() {
    let (_channel, mut driver) =
        AsyncEventChannel::on(CmScript::new().open(), |_| Ok(Always), endless).unwrap();
    let Poll::Ready(Err(error)) = Pin::new(&mut driver).poll(&mut cx()) else {
        panic!("it goes on for ever");
    };
    assert_eq!(error.errno(), Errno::IO);
}

/// A file that is reported as readable so many times, and holds no event.
struct Times(u32);

impl Readiness for Times {
    fn poll_read(
        &mut self,
        _: &mut task::Context<'_>,
        read: &mut dyn FnMut() -> Result<()>,
    ) -> Poll<Result<()>> {
        match self.0.checked_sub(1) {
            Some(left) => {
                self.0 = left;
                Poll::Ready(read())
            }
            None => Poll::Pending,
        }
    }
}

#[test]
fn driver_survives_a_thousand_false_alarms_between_two_events() {
    let script = CmScript::new();
    let (channel, mut driver) =
        AsyncEventChannel::on(script.open(), |_| Ok(Times(0)), endless).unwrap();
    let listener = channel.listen(&Listener::builder(LOCAL).unwrap().backlog(4)).unwrap();
    for _ in 0..3 {
        driver.readiness.0 = 1000;
        script.request(1, rdma_ucm_conn_param::default());
        assert!(Pin::new(&mut driver).poll(&mut cx()).is_pending());
        assert!(pin!(listener.next_request()).poll(&mut cx()).is_ready());
    }
}

/// The driver ended by itself, and is still there.
#[test]
fn futures_fail_when_the_driver_has_ended() {
    let (channel, mut driver) =
        AsyncEventChannel::on(CmScript::new().open(), |_| Ok(Always), endless).unwrap();
    let listener = channel.listen(&Listener::builder(LOCAL).unwrap().backlog(4)).unwrap();
    let (count, waker) = Count::new();
    let mut request = pin!(listener.next_request());
    assert!(request.as_mut().poll(&mut task::Context::from_waker(&waker)).is_pending());
    assert!(Pin::new(&mut driver).poll(&mut cx()).is_ready());
    assert_eq!(count.get(), 1);
    let Poll::Ready(Err(error)) = request.poll(&mut cx()) else { panic!("it waits for ever") };
    assert_eq!(error.errno(), Errno::CANCELED, "{error}");
}

#[test]
fn dropped_futures_leave_no_waker() {
    let mut stage = Stage::new();
    let (_qp, connection) = stage.connect(1, 10).unwrap();
    for _ in 0..3 {
        let (_, waker) = Count::new();
        let mut cx = task::Context::from_waker(&waker);
        let (mut end, mut event) = (pin!(connection.disconnected()), pin!(connection.next_event()));
        for _ in 0..2 {
            assert!(end.as_mut().poll(&mut cx).is_pending());
            assert!(event.as_mut().poll(&mut cx).is_pending());
        }
        assert_eq!((&connection.connection).id().tasks(), 2);
    }
    assert_eq!((&connection.connection).id().tasks(), 0);
}

/// Panics when it is woken.
struct Panics;

impl Wake for Panics {
    fn wake(self: Arc<Self>) {
        panic!("as planned");
    }
}

#[test]
fn a_waker_that_panics_keeps_no_other_task_waiting() {
    let mut stage = Stage::new();
    let (_qp, connection) = stage.connect(1, 10).unwrap();
    stage.script.log();
    let (_qp, second) = stage.connect(2, 10).unwrap();
    let (count, waker) = Count::new();
    let panicking = Waker::from(Arc::new(Panics));
    let (mut one, mut other) = (pin!(connection.disconnected()), pin!(connection.disconnected()));
    let poll_both = |one: Pin<&mut _>, other: Pin<&mut _>| {
        fn poll<F: Future>(future: Pin<&mut F>, waker: &Waker) {
            assert!(future.poll(&mut task::Context::from_waker(waker)).is_pending());
        }
        poll(one, &panicking);
        poll(other, &waker);
    };
    poll_both(one.as_mut(), other.as_mut());
    stage.script.tell(1, Type::RDMA_CM_EVENT_ADDR_CHANGE, 0);
    let read = AssertUnwindSafe(|| Pin::new(&mut stage.driver).poll(&mut cx()));
    assert!(catch_unwind(read).is_err());
    assert_eq!(count.get(), 1, "by an event");
    poll_both(one.as_mut(), other.as_mut());
    // Whichever connection is first, one of its wakers panics before that of the other connection is called.
    let (mut third, mut fourth) = (pin!(second.disconnected()), pin!(second.disconnected()));
    poll_both(third.as_mut(), fourth.as_mut());
    let driver = stage.driver;
    assert!(catch_unwind(AssertUnwindSafe(|| drop(driver))).is_err());
    assert_eq!(count.get(), 3, "by the end of the driver");
}

#[test]
fn a_waker_that_panics_in_any_call_costs_no_request() {
    each_call(|waker| {
        let mut stage = Stage::new();
        let listener = stage.channel.listen(&Listener::builder(LOCAL).unwrap().backlog(4)).unwrap();
        let mut seen = Vec::new();
        for responder_resources in 1..=3 {
            for asks in [false, true] {
                if asks {
                    let conn = rdma_ucm_conn_param { responder_resources, ..Default::default() };
                    stage.script.request(1, conn);
                    let driver = &mut stage.driver;
                    let read = AssertUnwindSafe(|| Pin::new(driver).poll(&mut cx()).is_pending());
                    let _ = catch_unwind(read);
                }
                let polled = again(|| {
                    let mut cx = task::Context::from_waker(waker);
                    listener.poll_next(&mut cx).map(|request| request.unwrap())
                });
                if let Poll::Ready(request) = polled {
                    seen.push(request.responder_resources());
                }
            }
        }
        assert_eq!(seen, [1, 2, 3]);
    });
}

/// The task drops the last handle of the channel while it panics: a second panic would abort the process.
#[test]
fn a_driver_whose_waker_panics_does_not_abort_a_task_that_panics() {
    let Stage { channel, mut driver, .. } = Stage::new();
    let panicking = Waker::from(Arc::new(Panics));
    assert!(Pin::new(&mut driver).poll(&mut task::Context::from_waker(&panicking)).is_pending());
    let end = catch_unwind(AssertUnwindSafe(|| {
        let _channel = channel;
        panic!("the task");
    }));
    assert_eq!(end.unwrap_err().downcast_ref::<&str>(), Some(&"the task"));
}

/// Each time, the file is readable to the driver, and a thread reads what it was readable for.
#[test]
#[cfg_attr(miri, ignore = "it waits")]
fn driver_survives_a_thread_that_reads_its_channel() {
    let script = CmScript::new();
    let (channel, mut driver) =
        AsyncEventChannel::on(script.open(), |_| Ok(Watched::default()), endless).unwrap();
    let blocking = channel
        .channel()
        .create_id(PortSpace::TCP, QpType::RC)
        .unwrap()
        .bind(LOCAL.parse().unwrap())
        .unwrap();
    let blocking = blocking.listen(4).unwrap();
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| blocking.next_request(Some(Duration::from_secs(10))));
        while !channel.channel().is_being_read() {
            std::thread::yield_now();
        }
        for _ in 0..=MAX_FALSE_ALARMS {
            driver.readiness.report();
            assert!(Pin::new(&mut driver).poll(&mut cx()).is_pending());
        }
        script.request(1, rdma_ucm_conn_param::default());
        assert!(thread.join().unwrap().unwrap().is_some());
    });
}

/// The thread reads the channel, so the driver cannot: the thread delivers the task's event, and wakes the
/// driver when it stops.
#[test]
#[cfg_attr(miri, ignore = "it waits")]
fn blocked_thread_and_tasks_share_a_channel() {
    let Stage { script, channel, mut driver, .. } = Stage::new();
    let blocking = channel
        .channel()
        .create_id(PortSpace::TCP, QpType::RC)
        .unwrap()
        .bind(LOCAL.parse().unwrap())
        .unwrap();
    let blocking = blocking.listen(4).unwrap();
    let listener = channel.listen(&Listener::builder(LOCAL).unwrap().backlog(4)).unwrap();
    let ((task_count, task_waker), (driver_count, driver_waker)) = (Count::new(), Count::new());
    let mut task_cx = task::Context::from_waker(&task_waker);
    let wait_until = |holds: &dyn Fn() -> bool| {
        let start = std::time::Instant::now();
        while !holds() {
            assert!(start.elapsed() < Duration::from_secs(10), "it never happens");
            std::thread::yield_now();
        }
    };
    assert!(listener.poll_next(&mut task_cx).is_pending());
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| blocking.next_request(Some(Duration::from_secs(10))));
        wait_until(&|| channel.channel().is_being_read());
        let mut driver_cx = task::Context::from_waker(&driver_waker);
        assert!(Pin::new(&mut driver).poll(&mut driver_cx).is_pending());
        script.request(2, rdma_ucm_conn_param::default());
        wait_until(&|| task_count.get() > 0);
        assert!(listener.poll_next(&mut task_cx).is_ready());
        script.request(1, rdma_ucm_conn_param::default());
        assert!(thread.join().unwrap().unwrap().is_some());
        wait_until(&|| driver_count.get() > 0);
    });
    // Nobody else reads now.
    script.request(2, rdma_ucm_conn_param::default());
    assert!(Pin::new(&mut driver).poll(&mut cx()).is_pending());
    assert!(listener.poll_next(&mut task_cx).is_ready());
}

#[test]
#[cfg_attr(miri, ignore = "it forks")]
fn futures_of_a_child_are_refused() {
    let Stage { channel, mut driver, .. } = Stage::new();
    let listener = channel.listen(&Listener::builder(LOCAL).unwrap().backlog(4)).unwrap();
    in_child(|| {
        let Poll::Ready(Err(error)) = pin!(listener.next_request()).poll(&mut cx()) else {
            panic!("it waits for ever");
        };
        assert!(error.is_forked(), "{error}");
        let Poll::Ready(Err(error)) = Pin::new(&mut driver).poll(&mut cx()) else {
            panic!("it goes on");
        };
        assert!(error.is_forked(), "{error}");
    });
}

/// Each request goes to one of the tasks, and that the device goes to all.
#[test]
fn tasks_share_a_listener() {
    let Stage { script, channel, mut driver, .. } = Stage::new();
    let listener = Arc::new(channel.listen(&Listener::builder(LOCAL).unwrap().backlog(4)).unwrap());
    let futures = (0..3).map(|_| {
        let listener = listener.clone();
        Box::pin(async move { listener.next_request().await })
    });
    let mut futures: Vec<_> = futures.collect();
    for _ in 0..2 {
        assert!(futures.iter_mut().all(|it| it.as_mut().poll(&mut cx()).is_pending()));
    }
    assert_eq!((&listener.id).id().tasks(), 3);
    script.request(1, rdma_ucm_conn_param::default());
    assert!(Pin::new(&mut driver).poll(&mut cx()).is_pending());
    let ready: Vec<_> = futures.iter_mut().map(|it| it.as_mut().poll(&mut cx())).collect();
    assert_eq!(ready.iter().filter(|it| matches!(it, Poll::Ready(Ok(_)))).count(), 1);
    assert!(matches!(ready[0], Poll::Ready(Ok(_))), "the first one that looks");
    script.tell(1, Type::RDMA_CM_EVENT_DEVICE_REMOVAL, 0);
    assert!(Pin::new(&mut driver).poll(&mut cx()).is_pending());
    for future in &mut futures[1..] {
        let Poll::Ready(Err(error)) = future.as_mut().poll(&mut cx()) else {
            panic!("it waits for ever");
        };
        assert_eq!(error.errno(), Errno::NODEV, "{error}");
    }
    let late = pin!(listener.next_request()).poll(&mut cx());
    assert!(matches!(late, Poll::Ready(Err(error)) if error.errno() == Errno::NODEV));
    assert!(matches!(listener.poll_next(&mut cx()), Poll::Ready(Err(_))));
}

/// Polls keep one place for events and one for the end, from any task and however often.
#[test]
fn connection_is_polled_without_futures() {
    let mut stage = Stage::new();
    let (_qp, connection) = stage.connect(1, 10).unwrap();
    let (count, waker) = Count::new();
    for _ in 0..3 {
        let (_, other) = Count::new();
        assert!(connection.poll_event(&mut task::Context::from_waker(&other)).is_pending());
        assert!(connection.poll_disconnected(&mut task::Context::from_waker(&other)).is_pending());
    }
    assert!(connection.poll_event(&mut task::Context::from_waker(&waker)).is_pending());
    assert!(connection.poll_disconnected(&mut task::Context::from_waker(&waker)).is_pending());
    assert_eq!((&connection.connection).id().tasks(), 2);
    stage.script.tell(1, Type::RDMA_CM_EVENT_ADDR_CHANGE, 0);
    assert!(Pin::new(&mut stage.driver).poll(&mut cx()).is_pending());
    assert_eq!(count.get(), 2);
    let event = connection.poll_event(&mut cx());
    assert!(matches!(event, Poll::Ready(Ok(ConnectionEvent::AddressChange))), "{event:?}");
    assert!(connection.poll_event(&mut task::Context::from_waker(&waker)).is_pending());
    assert!(connection.poll_disconnected(&mut task::Context::from_waker(&waker)).is_pending());
    stage.script.tell(1, Type::RDMA_CM_EVENT_UNREACHABLE, -110);
    assert!(Pin::new(&mut stage.driver).poll(&mut cx()).is_pending());
    assert_eq!(count.get(), 4);
    assert!(matches!(connection.poll_disconnected(&mut cx()), Poll::Ready(Ok(()))));
    assert_eq!(connection.closed_by(), Some(ConnectionEvent::Unreachable));
    assert!(connection.poll_event(&mut cx()).is_pending(), "the event was taken");
    drop(stage.driver);
    assert!(matches!(connection.poll_event(&mut cx()), Poll::Ready(Err(_))));
    assert!(matches!(connection.poll_disconnected(&mut cx()), Poll::Ready(Ok(()))));
}

/// An event that ends a connection ends each of its waits, be it a future or a poll.
#[test]
fn unreachable_peer_ends_a_connection() {
    let mut stage = Stage::new();
    let (_qp, connection) = stage.connect(1, 10).unwrap();
    let (mut one, mut other) = (pin!(connection.disconnected()), pin!(connection.disconnected()));
    assert!(one.as_mut().poll(&mut cx()).is_pending());
    assert!(other.as_mut().poll(&mut cx()).is_pending());
    stage.script.tell(1, Type::RDMA_CM_EVENT_UNREACHABLE, -110);
    assert!(Pin::new(&mut stage.driver).poll(&mut cx()).is_pending());
    assert!(matches!(one.poll(&mut cx()), Poll::Ready(Ok(()))));
    assert!(matches!(other.poll(&mut cx()), Poll::Ready(Ok(()))));
    assert_eq!(connection.closed_by(), Some(ConnectionEvent::Unreachable));
}

#[cfg(feature = "stream")]
#[test]
fn a_connection_is_a_stream_of_events_up_to_its_end() {
    use futures_core::{FusedStream, Stream};
    for taken_by_another in [false, true] {
        let mut stage = Stage::new();
        let (_qp, mut connection) = stage.connect(1, 10).unwrap();
        let mut next = |connection: &mut AsyncConnection| {
            assert!(Pin::new(&mut stage.driver).poll(&mut cx()).is_pending());
            Stream::poll_next(Pin::new(connection), &mut cx())
        };
        assert!(next(&mut connection).is_pending());
        stage.script.tell(1, Type::RDMA_CM_EVENT_ADDR_CHANGE, 0);
        let event = next(&mut connection);
        assert!(matches!(event, Poll::Ready(Some(Ok(ConnectionEvent::AddressChange)))));
        assert!(next(&mut connection).is_pending() && !connection.is_terminated());
        stage.script.tell(1, Type::RDMA_CM_EVENT_UNREACHABLE, -110);
        if taken_by_another {
            connection.wait_disconnected(Some(Duration::ZERO)).unwrap();
        } else {
            let event = next(&mut connection);
            assert!(matches!(event, Poll::Ready(Some(Ok(ConnectionEvent::Unreachable)))));
        }
        for _ in 0..2 {
            assert!(connection.is_terminated());
            assert!(matches!(next(&mut connection), Poll::Ready(None)));
        }
    }
    let mut stage = Stage::new();
    let (_qp, mut connection) = stage.connect(1, 10).unwrap();
    drop(stage.driver);
    let end = Stream::poll_next(Pin::new(&mut connection), &mut cx());
    assert!(matches!(end, Poll::Ready(Some(Err(_)))));
    assert!(connection.is_terminated());
}

/// The closure hands out what it made beside the queue pair.
#[test]
fn closures_hand_out_more_than_the_queue_pair() {
    use crate::cm::QpWith;
    let Stage { script, bench, channel, mut driver } = Stage::new();
    let connector = Connector::new(PEER).unwrap();
    let mut future = pin!(channel.connect(&connector, |route| {
        let qp = bench.pd.qp_builder(&bench.cq, &bench.cq, QpType::RC).build()?;
        route.init_qp(&qp)?;
        Ok(QpWith(qp, format!("by port {}", route.port())))
    }));
    for _ in 0..10 {
        if let Poll::Ready(connected) = future.as_mut().poll(&mut cx()) {
            let (QpWith(qp, text), connection) = connected.unwrap();
            assert_eq!((qp.state(), text.as_str()), (QpState::RTS, "by port 1"));
            drop(connection);
            assert_eq!(qp.state(), QpState::ERR);
            return;
        }
        Stage::play(&script, &mut driver, 1);
    }
    panic!("it waits for ever");
}

#[test]
fn connector_and_listener_take_gids() {
    use crate::Gid;
    use crate::cm::{IbPath, Listener};
    let Stage { script, bench, channel, mut driver } = Stage::new();
    let gid = |last| Gid([0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, last]);
    let (here, there) =
        (IbAddress::new(gid(1), PortSpace::IB, 7), IbAddress::new(gid(2), PortSpace::TCP, 7));
    let path = IbPath { sgid: here.gid, dgid: there.gid, dlid: 9, ..IbPath::default() };
    for path in [None, Some(path)] {
        script.log();
        let mut connector = Connector::to_ib(there).source_ib(here);
        if let Some(path) = path {
            connector = connector.ib_path(path);
        }
        let connected = {
            let mut future = pin!(channel.connect(&connector, |_| {
                bench.pd.qp_builder(&bench.cq, &bench.cq, QpType::RC).build()
            }));
            (0..10).find_map(|_| {
                if let Poll::Ready(connected) = future.as_mut().poll(&mut cx()) {
                    return Some(connected.unwrap());
                }
                let id = *script.live().last().unwrap();
                // The kernel answers a path of the program's own by itself, as the script does.
                Stage::play(&script, &mut driver, id);
                None
            })
        };
        let (qp, connection) = connected.expect("it ends");
        assert_eq!((qp.state(), connection.ib_addrs().unwrap().1.gid), (QpState::RTS, there.gid));
        assert_eq!(script.creates().last().unwrap().ps, PortSpace::IB.0);
        let asked = *script.resolves().last().unwrap();
        assert_eq!((asked.src_size, asked.dst_size), (48, 48));
    }
    assert_eq!(script.options().len(), 1, "one path was the program's");
    // Addresses of both kinds do not mix, which is found before the kernel is asked for an id.
    let created = script.creates().len();
    for connector in [
        Connector::to_ib(there).source(LOCAL.parse().unwrap()),
        Connector::new(PEER).unwrap().source_ib(here),
    ] {
        let refused = pin!(channel.connect(&connector, |_| {
            bench.pd.qp_builder(&bench.cq, &bench.cq, QpType::RC).build()
        }))
        .poll(&mut cx());
        let Poll::Ready(Err(error)) = refused else { panic!("refused at once") };
        assert!(error.to_string().contains("is to come from"), "{error}");
        assert_eq!(script.creates().len(), created);
    }
    let listener = channel.listen(&Listener::builder_ib(here).backlog(4)).unwrap();
    assert_eq!((listener.local_ib_addr().unwrap().gid, listener.overflows()), (here.gid, 0));
    let blocking =
        Listener::builder_ib(here).channel(channel.channel()).qp_type(QpType::UD).build().unwrap();
    assert_eq!(blocking.local_ib_addr().unwrap().gid, here.gid);
    let of_ud = script.creates().last().map(|asked| (asked.ps, QpType(asked.qp_type.into())));
    assert_eq!(of_ud, Some((PortSpace::IB.0, QpType::UD)));
}
