//! Faults of a fabric, as a program sees them.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context as TaskContext, Wake, Waker};
use std::time::Duration;
use uverbs::cm::{
    AddrResolved, ConnectParam, Connector, EventChannel, Listener, PortSpace, RouteResolved,
};
use uverbs::device::devices_on;
use uverbs::{
    Access, AtomicCap, CompletionQueue, Context, Errno, EventType, Handshake, LinkLayer,
    MemoryRegion, PortState, ProtectionDomain, QpControl, QpType, QueuePair, RecvWr, SendWr,
    WcStatus,
};
use uverbs_sim::{
    Clock, CqeError, Fabric, FabricBuilder, FabricError, Limits, Mode, POISON, Profile, Rates,
    Side, Syndrome, Verb, each_seed,
};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// Two devices, left and right.
fn two(profile: Profile) -> FabricBuilder {
    Fabric::builder().device(profile.clone().name("left")).device(profile.name("right"))
}

fn fabric(seed: u64) -> Fabric {
    two(Profile::new()).stepped(seed).build().unwrap()
}

fn open(fabric: &Fabric, name: &str) -> Result<Context> {
    let devices = devices_on(&fabric.system());
    let device = devices.iter().find(|device| device.name() == name).ok_or("no such device")?;
    Ok(Context::open(device)?)
}

/// The kind of the next event, if there is one.
fn told(context: &Context) -> uverbs::Result<Option<EventType>> {
    Ok(context.try_next_event()?.map(|event| event.kind))
}

/// Connects two queue pairs by the GIDs at this index.
fn connect(
    a: &QpControl,
    b: &QpControl,
    gid_index: u32,
    options: &Handshake,
) -> uverbs::Result<()> {
    let at_a = a.endpoint(&a.context().query_gid(1, gid_index)?)?;
    let at_b = b.endpoint(&b.context().query_gid(1, gid_index)?)?;
    a.handshake(&at_b, options)?;
    b.handshake(&at_a, options)
}

/// A queue pair with its queues and memory. Fields are dropped in this order.
struct End {
    qp: QueuePair,
    memory: MemoryRegion<u8>,
    cq: CompletionQueue,
    pd: ProtectionDomain,
    context: Context,
}

impl End {
    fn new(fabric: &Fabric, name: &str) -> Result<End> {
        let context = open(fabric, name)?;
        let pd = context.alloc_pd()?;
        let cq = context.cq_builder(64).build()?;
        let memory = pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u8>(4096)?;
        let qp = pd.qp_builder(&cq, &cq, QpType::RC).max_send_wr(16).max_recv_wr(16).build()?;
        Ok(End { qp, memory, cq, pd, context })
    }

    fn pair(fabric: &Fabric) -> Result<(End, End)> {
        let (a, b) = (End::new(fabric, "left")?, End::new(fabric, "right")?);
        connect(&a.qp, &b.qp, 3, &Handshake::new())?;
        Ok((a, b))
    }

    fn recv(&mut self) -> Result<()> {
        let sges = [self.memory.sge(..8)?];
        let mut batch = self.qp.recv_batch()?;
        batch.push(RecvWr::new(&sges))?;
        // SAFETY: the memory is dropped after the queue pair, and read after the completion.
        unsafe { batch.ring()? };
        Ok(())
    }

    fn send(&mut self) -> Result<()> {
        let sges = [self.memory.sge(8..16)?];
        let mut batch = self.qp.send_batch()?;
        batch.push(SendWr::send(&sges).signaled())?;
        // SAFETY: the memory is dropped after the queue pair, and not written.
        unsafe { batch.ring()? };
        Ok(())
    }

    fn write_to(&mut self, peer: &End) -> Result<()> {
        let sges = [self.memory.sge(8..16)?];
        let to = peer.memory.remote(16)?;
        let mut batch = self.qp.send_batch()?;
        batch.push(SendWr::write(to, &sges).signaled())?;
        // SAFETY: the memory is dropped after the queue pair, and not written.
        unsafe { batch.ring()? };
        Ok(())
    }

    /// The status of the next completion; `None` if the fabric has nothing left to do.
    fn status(&mut self, fabric: &Fabric) -> Result<Option<WcStatus>> {
        loop {
            if let Some(completion) = self.cq.poll()?.next() {
                return Ok(Some(completion.status()));
            }
            if !fabric.step() && !fabric.advance() {
                return Ok(None);
            }
        }
    }
}

#[test]
fn devices_have_the_names_and_addresses_that_were_asked_for() -> Result<()> {
    let fabric = Fabric::builder()
        .device(Profile::new().name("mlx5_bond_0").address("192.0.2.1".parse()?))
        .device(Profile::new())
        .build()?;
    let devices = devices_on(&fabric.system());
    let names: Vec<_> = devices.iter().map(|device| device.name()).collect();
    assert_eq!(names, ["mlx5_bond_0", "mlx5_1"]);
    let context = Context::open(&devices[0])?;
    assert_eq!(context.default_gid(1)?.gid.ip().to_string(), "192.0.2.1");
    let twice = Fabric::builder().device(Profile::new().name("a")).device(Profile::new().name("a"));
    assert_eq!(twice.build().unwrap_err(), FabricError::NameTaken("a".into()));
    let at = |text: &str| Profile::new().address(text.parse().unwrap());
    let same = Fabric::builder().device(at("192.0.2.1")).device(at("192.0.2.1")).build();
    assert_eq!(same.unwrap_err(), FabricError::AddressTaken("192.0.2.1".parse()?));
    for name in ["", "a/b", &"x".repeat(64)] {
        let refused = Fabric::builder().device(Profile::new().name(name)).build();
        assert_eq!(refused.unwrap_err(), FabricError::Name(name.into()));
    }
    Ok(())
}

#[test]
fn a_lost_message_is_sent_again_and_too_many_end_the_connection() -> Result<()> {
    let fabric = fabric(1);
    let (mut a, mut b) = End::pair(&fabric)?;
    let left = fabric.device("left").ok_or("left is there")?;
    b.recv()?;
    left.lose_messages(1);
    a.send()?;
    assert_eq!(a.status(&fabric)?, Some(WcStatus::SUCCESS));
    assert_eq!(b.status(&fabric)?, Some(WcStatus::SUCCESS));
    left.lose_messages(100);
    a.send()?;
    assert_eq!(a.status(&fabric)?, Some(WcStatus::RETRY_EXC_ERR));
    Ok(())
}

#[test]
fn a_delayed_message_is_late_by_that_time() -> Result<()> {
    const LATE: Duration = Duration::from_millis(50);
    let fabric = fabric(1);
    let (mut a, mut b) = End::pair(&fabric)?;
    b.recv()?;
    fabric.device("left").ok_or("left is there")?.delay_messages(1, LATE);
    let before = fabric.now();
    a.send()?;
    assert_eq!(b.status(&fabric)?, Some(WcStatus::SUCCESS));
    let took = fabric.now() - before;
    assert!((LATE..2 * LATE).contains(&took), "{took:?}");
    Ok(())
}

#[test]
fn a_receiver_that_is_not_ready_is_tried_again() -> Result<()> {
    let fabric = fabric(1);
    let (mut a, mut b) = End::pair(&fabric)?;
    b.recv()?;
    fabric.device("right").ok_or("right is there")?.refuse_receives(3);
    let before = fabric.now();
    a.send()?;
    assert_eq!(a.status(&fabric)?, Some(WcStatus::SUCCESS));
    // Three RNR NAKs, of 0.64 ms each.
    assert!(fabric.now() - before > Duration::from_micros(1_900));
    Ok(())
}

#[test]
fn a_request_fails_with_the_syndrome_that_was_asked_for() -> Result<()> {
    let fabric = fabric(1);
    let (mut a, mut b) = End::pair(&fabric)?;
    let error = CqeError::from(Syndrome::RemoteOperation);
    fabric.device("left").ok_or("left")?.fail_request(Some(a.qp.qpn().0), Side::Send, 1, error);
    b.recv()?;
    a.send()?;
    a.send()?;
    assert_eq!(a.status(&fabric)?, Some(WcStatus::SUCCESS));
    assert_eq!(a.status(&fabric)?, Some(WcStatus::REM_OP_ERR));
    Ok(())
}

#[test]
fn calls_fail_with_the_errno_that_was_asked_for_and_nothing_is_left() -> Result<()> {
    let fabric = fabric(1);
    let end = End::new(&fabric, "left")?;
    let left = fabric.device("left").ok_or("left is there")?;
    left.fail_call(Verb::RegMr, 1, Errno::NOMEM);
    let register = || end.pd.mr_builder().allocate::<u8>(64);
    drop(register()?);
    assert_eq!(register().unwrap_err().errno(), Errno::NOMEM);
    drop(register()?);
    left.fail_call(Verb::CreateQp, 0, Errno::NOSPC);
    let create = || end.pd.qp_builder(&end.cq, &end.cq, QpType::RC).build();
    assert_eq!(create().unwrap_err().errno(), Errno::NOSPC);
    drop(create()?);
    left.fail_call(Verb::CreateCq, 0, Errno::NOMEM);
    assert_eq!(end.context.cq_builder(4).build().unwrap_err().errno(), Errno::NOMEM);
    left.fail_call(Verb::OpenDevice, 0, Errno::ACCESS);
    let devices = devices_on(&fabric.system());
    assert_eq!(Context::open(&devices[0]).unwrap_err().errno(), Errno::ACCESS);
    Ok(())
}

#[test]
fn a_cable_is_pulled_and_plugged_in_again() -> Result<()> {
    let fabric = fabric(1);
    let (mut a, mut b) = End::pair(&fabric)?;
    let right = fabric.device("right").ok_or("right is there")?;
    right.set_link(false);
    fabric.step();
    assert_eq!(b.context.query_port(1)?.state, PortState::DOWN);
    let event = b.context.try_next_event()?.ok_or("no event")?;
    assert_eq!(event.kind, EventType::PORT_ERR);
    b.recv()?;
    a.send()?;
    while fabric.step() {}
    right.set_link(true);
    fabric.step();
    assert_eq!(b.context.query_port(1)?.state, PortState::ACTIVE);
    let event = b.context.try_next_event()?.ok_or("no event")?;
    assert_eq!(event.kind, EventType::PORT_ACTIVE);
    assert_eq!(a.status(&fabric)?, Some(WcStatus::SUCCESS));
    Ok(())
}

#[test]
fn a_key_that_is_made_invalid_refuses_the_peer() -> Result<()> {
    let fabric = fabric(1);
    let (mut a, b) = End::pair(&fabric)?;
    a.write_to(&b)?;
    assert_eq!(a.status(&fabric)?, Some(WcStatus::SUCCESS));
    let right = fabric.device("right").ok_or("right is there")?;
    assert!(right.invalidate_key(b.memory.rkey().0));
    assert!(!right.invalidate_key(b.memory.rkey().0));
    a.write_to(&b)?;
    assert_eq!(a.status(&fabric)?, Some(WcStatus::REM_ACCESS_ERR));
    Ok(())
}

#[test]
fn a_peer_that_is_killed_answers_no_more_and_its_own_calls_fail() -> Result<()> {
    let fabric = fabric(1);
    let (mut a, b) = End::pair(&fabric)?;
    assert!(fabric.kill(&b.context));
    assert!(!fabric.kill(std::io::stdin()));
    a.write_to(&b)?;
    assert_eq!(a.status(&fabric)?, Some(WcStatus::RETRY_EXC_ERR));
    assert_eq!(b.context.alloc_pd().unwrap_err().errno(), Errno::IO);
    assert_eq!(b.context.query_port(1).unwrap_err().errno(), Errno::IO);
    let End { qp, memory, cq, pd, context } = b;
    qp.destroy().map_err(|error| error.to_string())?;
    drop((memory, cq, pd, context));
    // The device has room for another process.
    End::new(&fabric, "right")?;
    Ok(())
}

#[test]
fn a_device_that_is_unplugged_takes_its_contexts_with_it() -> Result<()> {
    let fabric = fabric(1);
    let (mut a, mut b) = End::pair(&fabric)?;
    let channel = EventChannel::open_on(&fabric.system())?;
    let id = channel.create_id(PortSpace::TCP, QpType::RC)?.bind("10.0.0.2:0".parse()?)?;
    // Another context of the same open file.
    let other = Context::import(b.context.share()?)?;
    fabric.device("right").ok_or("right is there")?.unplug();
    assert!(fabric.device("right").is_none());
    assert_eq!(devices_on(&fabric.system()).len(), 1);
    let event = b.context.try_next_event()?.ok_or("no event")?;
    assert_eq!(event.kind, EventType::DEVICE_FATAL);
    assert_eq!(b.context.try_next_event().unwrap_err().errno(), Errno::IO);
    let event = other.try_next_event()?.ok_or("no event at the other context")?;
    assert_eq!(event.kind, EventType::DEVICE_FATAL);
    assert_eq!(b.context.alloc_pd().unwrap_err().errno(), Errno::IO);
    a.send()?;
    assert_eq!(a.status(&fabric)?, Some(WcStatus::RETRY_EXC_ERR));
    assert_eq!(id.listen(1).unwrap_err().errno(), Errno::NXIO);
    drop(b.recv());
    let context = b.context.clone();
    drop(b);
    assert_eq!(context.leaked(), 0);
    Ok(())
}

/// The kernel confirms the end of no object of a driver then, and firmware could still reach this memory.
#[test]
#[allow(unsafe_code, reason = "commands, which could name memory")]
fn memory_that_was_lent_to_firmware_is_leaked_when_the_device_is_unplugged() -> Result<()> {
    use uverbs::mlx5::devx::{DevxObject, Umem};
    use uverbs_uapi::mlx5::prm::{command, opcode};
    let fabric = fabric(1);
    let context = open(&fabric, "right")?;
    let (pd, umem) = (context.alloc_pd()?, Umem::builder(&context).allocate(0x2000)?);
    let region = pd.mr_builder().access(Access::empty()).allocate::<u8>(64)?;
    let kept = Umem::builder(&context).allocate(0x1000)?;
    let input = command::<16>(opcode::ALLOC_Q_COUNTER);
    // SAFETY: a counter set has no memory and no keys.
    let alone = unsafe { DevxObject::create(&context, &input, &mut [0; 16], &[])? };
    // SAFETY: as above.
    let keeping =
        unsafe { DevxObject::create(&context, &input, &mut [0; 16], &[&pd, &region, &kept])? };
    drop((region, kept));
    fabric.device("right").ok_or("right is there")?.unplug();
    alone.destroy()?;
    let (umem, error) = umem.destroy().err().ok_or("it is destroyed")?.into_parts();
    assert_eq!((error.errno(), context.leaked()), (Errno::IO, 0), "{error}");
    drop(umem);
    assert_eq!(context.leaked(), 1);
    // The region that it keeps goes with it, and the memory of the umem does not.
    keeping.destroy()?;
    assert_eq!(context.leaked(), 2);
    drop(pd);
    Ok(())
}

#[test]
fn a_device_in_internal_error_does_nothing_more_and_lets_go_of_all() -> Result<()> {
    let fabric = fabric(1);
    let (mut a, b) = End::pair(&fabric)?;
    fabric.device("right").ok_or("right is there")?.fail();
    let event = b.context.try_next_event()?.ok_or("no event")?;
    assert_eq!(event.kind, EventType::DEVICE_FATAL);
    assert_eq!(b.context.alloc_pd().unwrap_err().errno(), Errno::NOLINK);
    a.write_to(&b)?;
    assert_eq!(a.status(&fabric)?, Some(WcStatus::RETRY_EXC_ERR));
    drop(b);
    Ok(())
}

#[test]
fn a_completion_queue_that_overflows_is_reported() -> Result<()> {
    let fabric = fabric(1);
    let (mut a, b) = End::pair(&fabric)?;
    let left = fabric.device("left").ok_or("left is there")?;
    assert!(left.overflow_cq(a.qp.qpn().0, Side::Send));
    fabric.step();
    let event = a.context.try_next_event()?.ok_or("no event")?;
    assert_eq!(event.kind, EventType::CQ_ERR);
    a.write_to(&b)?;
    assert_eq!(a.status(&fabric)?, None);
    Ok(())
}

#[test]
fn events_are_lost_and_late() -> Result<()> {
    const LATE: Duration = Duration::from_millis(20);
    let fabric = fabric(1);
    let context = open(&fabric, "left")?;
    let left = fabric.device("left").ok_or("left is there")?;
    let flap = || {
        left.set_link(false);
        left.set_link(true);
        while fabric.step() {}
    };
    left.lose_events(1);
    flap();
    assert_eq!((told(&context)?, told(&context)?), (Some(EventType::PORT_ACTIVE), None));
    left.delay_events(2, LATE);
    flap();
    assert_eq!(told(&context)?, None);
    let before = fabric.now();
    while fabric.step() || fabric.advance() {}
    assert!(fabric.now() - before >= LATE);
    assert_eq!(
        (told(&context)?, told(&context)?),
        (Some(EventType::PORT_ERR), Some(EventType::PORT_ACTIVE))
    );
    Ok(())
}

/// The device is full afterwards, so that a later queue gets the number of the destroyed one.
#[test]
fn late_events_of_an_object_go_with_it_and_those_of_others_stay() -> Result<()> {
    let fabric = two(Profile::new().small()).stepped(1).build()?;
    let left = fabric.device("left").ok_or("left is there")?;
    let End { qp, memory, cq, pd, context } = End::new(&fabric, "left")?;
    left.delay_events(2, Duration::from_millis(20));
    assert!(left.overflow_cq(qp.qpn().0, Side::Send));
    left.set_link(false);
    while fabric.step() {}
    drop((qp, cq));
    let cqs: Vec<_> = std::iter::from_fn(|| context.cq_builder(64).build().ok()).collect();
    assert!(cqs.len() > 10, "{}", cqs.len());
    while fabric.step() || fabric.advance() {}
    assert_eq!((told(&context)?, told(&context)?), (Some(EventType::PORT_ERR), None));
    drop((cqs, pd, memory));
    Ok(())
}

/// A destruction handles the device's pending events: a lost one stays lost, and a late one late.
#[test]
fn a_destruction_passes_no_event_that_is_lost_or_late() -> Result<()> {
    const LATE: Duration = Duration::from_millis(20);
    let fabric = fabric(1);
    let End { qp, memory, cq, pd, context } = End::new(&fabric, "left")?;
    let left = fabric.device("left").ok_or("left is there")?;
    left.lose_events(1);
    left.set_link(false);
    drop(memory);
    while fabric.step() {}
    assert_eq!(told(&context)?, None);
    left.delay_events(1, LATE);
    left.set_link(true);
    drop(qp);
    while fabric.step() {}
    assert_eq!(told(&context)?, None);
    while fabric.step() || fabric.advance() {}
    assert_eq!(told(&context)?, Some(EventType::PORT_ACTIVE));
    drop((cq, pd));
    Ok(())
}

/// Most steps of the fabric serve a queue without a message.
#[test]
fn rates_are_shares_of_messages() -> Result<()> {
    const WRITES: usize = 4000;
    let rates = Rates::none().loss(0.1).delay(0.3, Duration::from_micros(1));
    let fabric = two(Profile::new()).stepped(1).rates(rates).history().build()?;
    let (mut a, b) = End::pair(&fabric)?;
    for _ in 0..WRITES {
        a.write_to(&b)?;
        assert_eq!(a.status(&fabric)?, Some(WcStatus::SUCCESS));
    }
    let history = fabric.history();
    let count = |text: &str| history.lines().filter(|line| line.contains(text)).count();
    let (lost, late) = (count("the message is lost"), count("the message is late"));
    let share = |of: usize| of as f64 / (WRITES + lost) as f64;
    assert!((0.085..0.115).contains(&share(lost)), "{lost} of {}", WRITES + lost);
    assert!((0.275..0.325).contains(&share(late)), "{late} of {}", WRITES + lost);
    Ok(())
}

#[test]
fn a_share_of_the_calls_that_make_an_object_fails() -> Result<()> {
    let rates = Rates::none().failed_calls(0.25);
    let fabric = two(Profile::new()).stepped(1).rates(rates).build()?;
    let context = open(&fabric, "left")?;
    let failed = (0..1000).map(|_| context.alloc_pd()).filter(|pd| match pd {
        Ok(_) => false,
        Err(error) => {
            assert_eq!(error.errno(), Errno::NOMEM);
            true
        }
    });
    let failed = failed.count();
    assert!((210..290).contains(&failed), "{failed}");
    assert_eq!(context.leaked(), 0);
    Ok(())
}

/// A clock that stands still. Before its first sleep it makes a call, at the time between the last step of the task
/// that drives the fabric and its wait.
struct CallsBeforeSleep(Mutex<Option<Box<dyn FnOnce() + Send>>>);

impl Clock for CallsBeforeSleep {
    fn elapsed(&self) -> Duration {
        Duration::ZERO
    }

    fn sleep(&self, _: Duration) -> impl Future<Output = ()> {
        if let Some(call) = self.0.lock().unwrap().take() {
            std::thread::spawn(call).join().unwrap();
        }
        std::future::pending()
    }
}

#[test]
fn a_call_of_another_thread_is_served_before_the_next_timer() -> Result<()> {
    struct Woken(AtomicBool);
    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.store(true, Ordering::SeqCst);
        }
    }
    let fabric = two(Profile::new()).stepped(1).history().build()?;
    let (mut a, mut b) = End::pair(&fabric)?;
    b.recv()?;
    // A timer, so that the task sleeps.
    let left = fabric.device("left").ok_or("left is there")?;
    left.delay_events(1, Duration::from_secs(1));
    left.set_link(false);
    left.set_link(true);
    let (tell, told) = std::sync::mpsc::channel();
    let call = move || {
        a.send().unwrap();
        tell.send(a).unwrap();
    };
    let woken = Arc::new(Woken(AtomicBool::new(true)));
    let waker = Waker::from(woken.clone());
    let mut driven = Box::pin(fabric.drive(CallsBeforeSleep(Mutex::new(Some(Box::new(call))))));
    while woken.0.swap(false, Ordering::SeqCst) {
        assert!(driven.as_mut().poll(&mut TaskContext::from_waker(&waker)).is_pending());
    }
    drop(driven);
    let history = fabric.history();
    assert!(history.contains("send 0 is done"), "{history}");
    drop((told.recv()?, b));
    Ok(())
}

/// Runs 300 writes with faults at random; returns the time of the end and the number of decisions.
fn at_random(seed: u64) -> Result<(Duration, u64)> {
    let rates = Rates::none().loss(0.05).delay(0.2, Duration::from_micros(300));
    let fabric = two(Profile::new()).stepped(seed).rates(rates).build()?;
    let (mut a, b) = End::pair(&fabric)?;
    for _ in 0..300 {
        a.write_to(&b)?;
        assert_eq!(a.status(&fabric)?, Some(WcStatus::SUCCESS));
    }
    Ok((fabric.now(), fabric.decisions()))
}

#[test]
fn random_faults_repeat_by_their_seed() -> Result<()> {
    assert_eq!(at_random(1)?, at_random(1)?);
    assert_ne!(at_random(1)?, at_random(2)?);
    Ok(())
}

fn create(context: &Context) -> uverbs::Result<QueuePair> {
    let cq = context.cq_builder(4).build()?;
    context.alloc_pd()?.qp_builder(&cq, &cq, QpType::RC).build()
}

/// Connects by address, loses these numbers of the connection manager's messages, and sends a message.
fn connect_with_losses(asking: u32, answering: u32) -> Result<Duration> {
    let fabric = fabric(1);
    let lose = |name: &str, count| fabric.device(name).unwrap().lose_cm_messages(count);
    lose("left", asking);
    lose("right", answering);
    let (tell, told) = std::sync::mpsc::channel();
    let system = fabric.system();
    let passive = std::thread::spawn(move || -> Result<_> {
        // The fabric knows both threads before one of them waits.
        let listener =
            Listener::builder("10.0.0.2:0")?.channel(&EventChannel::open_on(&system)?).build()?;
        tell.send(listener.local_addr()?)?;
        let request = listener.next_request(Some(Duration::from_secs(600)))?.ok_or("no request")?;
        let qp = create(&request.context()?)?;
        let accepting = request.accept(&qp, &ConnectParam::new())?;
        let connection = accepting.wait(Some(Duration::from_secs(600)))?.done()?;
        Ok(((qp, connection), listener))
    });
    let to = told.recv()?;
    let client = EventChannel::open_on(&fabric.system())?;
    let connector = Connector::new(to)?.source("10.0.0.1:0".parse()?).channel(&client);
    let connector = connector.timeout(Duration::from_secs(600));
    let connected = connector.connect(|route| create(&route.context()?))?;
    let took = fabric.now();
    drop(connected);
    drop(passive.join().map_err(|_| "a panic")??);
    Ok(took)
}

#[test]
fn lost_requests_and_replies_are_sent_again_after_seconds() -> Result<()> {
    let quick = connect_with_losses(0, 0)?;
    assert!(quick < Duration::from_secs(1), "{quick:?}");
    // A blocking accept waits for ten seconds: long enough for one lost reply.
    for (asking, answering) in [(1, 0), (2, 0), (0, 1)] {
        let took = connect_with_losses(asking, answering)?;
        assert!(took > Duration::from_secs(4), "{asking}, {answering}: {took:?}");
    }
    Ok(())
}

/// Sends one message with a fault; returns the history.
fn history_of(seed: u64) -> Result<String> {
    let fabric = two(Profile::new()).stepped(seed).history().build()?;
    let (mut a, mut b) = End::pair(&fabric)?;
    b.recv()?;
    fabric.device("left").ok_or("left is there")?.lose_messages(1);
    a.send()?;
    assert_eq!(a.status(&fabric)?, Some(WcStatus::SUCCESS));
    a.write_to(&b)?;
    assert_eq!(a.status(&fabric)?, Some(WcStatus::SUCCESS));
    fabric.device("left").ok_or("left is there")?.fail_call(Verb::RegMr, 0, Errno::NOMEM);
    let refused = a.pd.mr_builder().allocate::<u8>(64);
    assert!(refused.is_err());
    Ok(fabric.history())
}

#[test]
fn a_history_has_the_events_of_a_run_and_repeats_by_its_seed() -> Result<()> {
    let history = history_of(1)?;
    let has = |text: &str| assert!(history.contains(text), "{text:?} is not in:\n{history}");
    has("left: context 1 create_qp qp 0x");
    has("right: qp 0x40 receive 0, 8 bytes at mr 0x");
    has(": the message is lost");
    has("qp 0x40: no answer");
    has("SEND, 8 bytes of mr 0x");
    has("+0x8, signaled");
    has("RDMA_WRITE at the peer's mr 0x");
    has("+0x10, 8 bytes of mr");
    has("qp 0x40 send 0 is done");
    has("qp 0x40 receive 0 has 8 bytes");
    has("reg_mr fails: Cannot allocate memory");
    assert_eq!(history, history_of(1)?);
    assert_ne!(history, history_of(2)?);
    Ok(())
}

#[test]
fn a_small_device_has_small_limits_and_keeps_them() -> Result<()> {
    let fabric = Fabric::builder().stepped(1).device(Profile::new().small()).build()?;
    let context = open(&fabric, "mlx5_0")?;
    let attr = context.query_device()?;
    assert_eq!((attr.max_qp, attr.max_qp_wr, attr.max_cqe, attr.max_pd), (16, 16, 255, 16));
    let pd = context.alloc_pd()?;
    let cq = context.cq_builder(255).build()?;
    assert_eq!(context.cq_builder(256).build().unwrap_err().errno(), Errno::INVAL);
    let create = |wr| pd.qp_builder(&cq, &cq, QpType::RC).max_send_wr(wr).build();
    assert!(create(65).is_err());
    let mut qps = Vec::new();
    let error = loop {
        match create(1) {
            Ok(qp) => qps.push(qp),
            Err(error) => break error,
        }
    };
    assert_eq!((qps.len(), error.errno()), (16, Errno::AGAIN));
    let mut limits = Limits::SMALL;
    limits.log_max_qp = 17;
    let refused = Fabric::builder().device(Profile::new().limits(limits)).build();
    assert_eq!(refused.unwrap_err(), FabricError::Limit("log_max_qp"));
    Ok(())
}

#[test]
fn a_device_may_lack_xrc_atomics_and_write_combining() -> Result<()> {
    let profile = Profile::new().without_xrc().without_atomics().without_write_combining();
    let fabric = two(profile).stepped(1).build()?;
    let context = open(&fabric, "left")?;
    assert_eq!(context.query_device()?.atomic_cap, AtomicCap::NONE);
    assert_eq!(context.xrcd_builder().build().unwrap_err().errno(), Errno::OPNOTSUPP);
    let (mut a, b) = End::pair(&fabric)?;
    a.write_to(&b)?;
    assert_eq!(a.status(&fabric)?, Some(WcStatus::SUCCESS));
    Ok(())
}

#[test]
fn a_minimal_device_has_no_extended_connection_establishment() -> Result<()> {
    let options = |profile: Profile| -> Result<bool> {
        let fabric = two(profile).stepped(1).build()?;
        let (a, _b) = End::pair(&fabric)?;
        Ok(a.qp.query_ece().is_ok())
    };
    assert!(options(Profile::new())?);
    assert!(!options(Profile::new().minimal())?);
    Ok(())
}

#[test]
fn a_share_above_one_is_refused() {
    let fabric = two(Profile::new()).stepped(1).rates(Rates::none().loss(5.0)).build();
    assert_eq!(fabric.unwrap_err(), FabricError::Rate("loss", "5".into()));
}

fn strict(seed: u64) -> Result<(Fabric, End, End)> {
    let fabric = two(Profile::new()).stepped(seed).strict().build()?;
    let (a, b) = End::pair(&fabric)?;
    Ok((fabric, a, b))
}

/// The findings at the end, without those of objects that are left.
fn found(fabric: &Fabric) -> Vec<String> {
    let findings = fabric.check().err();
    findings.iter().flat_map(|findings| findings.iter()).map(str::to_owned).collect()
}

#[test]
fn a_receive_buffer_holds_poison_until_its_completion() -> Result<()> {
    let (fabric, mut a, mut b) = strict(1)?;
    a.memory.copy_from(8, &[7; 8])?;
    b.recv()?;
    let mut early = [0; 16];
    fabric.step();
    b.memory.copy_to(0, &mut early)?;
    assert_eq!(early, [[POISON; 8], [0; 8]].concat()[..]);
    a.send()?;
    assert_eq!(a.status(&fabric)?, Some(WcStatus::SUCCESS));
    assert_eq!(b.status(&fabric)?, Some(WcStatus::SUCCESS));
    b.memory.copy_to(0, &mut early)?;
    assert_eq!(early[..8], [7; 8]);
    drop((a, b));
    assert_eq!(found(&fabric), [""; 0]);
    Ok(())
}

#[test]
fn memory_that_is_written_before_its_completion_is_found() -> Result<()> {
    let (fabric, mut a, b) = strict(1)?;
    a.write_to(&b)?;
    a.memory.copy_from(8, &[1])?;
    assert_eq!(a.status(&fabric)?, Some(WcStatus::SUCCESS));
    a.write_to(&b)?;
    assert_eq!(a.status(&fabric)?, Some(WcStatus::SUCCESS));
    drop((a, b));
    assert_eq!(
        found(&fabric),
        ["left: qp 0x40 send 0: its memory was written before its completion"]
    );
    Ok(())
}

#[test]
fn objects_that_are_left_at_the_end_are_found() -> Result<()> {
    let (fabric, mut a, b) = strict(1)?;
    a.write_to(&b)?;
    while fabric.step() {}
    let found = found(&fabric);
    let has =
        |text: &str| assert!(found.iter().any(|line| line.contains(text)), "{text}: {found:?}");
    has("left: cq 0x400 has 1 completions that were not polled");
    has("left: qp 0x40 of context 1 was not destroyed");
    has("right: mr 0x10001 of 4096 bytes of context 2 was not destroyed");
    Ok(())
}

/// No finding: a peer's write to memory that is being sent, and a read into memory that a later, fenced send uses.
#[test]
fn memory_that_a_device_writes_is_no_finding() {
    each_seed(0..8, while_it_is_sent);
}

fn while_it_is_sent(seed: u64) -> Result<()> {
    let (fabric, mut a, mut b) = strict(seed)?;
    a.memory.copy_from(8, &[3; 8])?;
    a.recv()?;
    // b sends bytes 16 to 24 of its memory while a writes there.
    a.write_to(&b)?;
    let sges = [b.memory.sge(16..24)?];
    let mut batch = b.qp.send_batch()?;
    batch.push(SendWr::send(&sges).signaled())?;
    // SAFETY: the memory is dropped after the queue pair, and not written.
    unsafe { batch.ring()? };
    a.memory.copy_to(0, &mut [0; 8])?;
    for end in [&mut a, &mut b] {
        assert_eq!(end.status(&fabric)?, Some(WcStatus::SUCCESS));
    }
    assert_eq!(a.status(&fabric)?, Some(WcStatus::SUCCESS));
    drop((a, b));
    assert_eq!(found(&fabric), [""; 0]);
    Ok(())
}

#[test]
fn infiniband_ports_have_lids_and_partitions() -> Result<()> {
    let profile = Profile::new().infiniband().pkeys([0xffff, 0x8001]);
    let fabric = two(profile).device(Profile::new()).stepped(1).build()?;
    let context = open(&fabric, "right")?;
    let port = context.query_port(1)?;
    assert_eq!((port.link_layer, port.lid, port.pkey_table_len), (LinkLayer::INFINIBAND, 2, 2));
    assert!(!port.grh_required);
    let [mut a, mut b] = ["left", "right"].map(|name| End::new(&fabric, name).unwrap());
    connect(&a.qp, &b.qp, 0, &Handshake::new().pkey_index(1))?;
    b.recv()?;
    a.send()?;
    assert_eq!(a.status(&fabric)?, Some(WcStatus::SUCCESS));
    assert_eq!(b.status(&fabric)?, Some(WcStatus::SUCCESS));
    a.write_to(&b)?;
    assert_eq!(a.status(&fabric)?, Some(WcStatus::SUCCESS));
    fabric.device("right").ok_or("right is there")?.set_link(false);
    fabric.step();
    assert_eq!(context.query_port(1)?.state, PortState::DOWN);
    Ok(())
}

/// Two InfiniBand ports, the second one with this partition key, and an Ethernet port.
fn infiniband(pkey: u16) -> Result<Fabric> {
    let profile = Profile::new().infiniband();
    let fabric = Fabric::builder()
        .device(profile.clone().name("left").pkeys([0x8001, 0xffff]))
        .device(profile.name("right").pkeys([pkey]))
        .device(Profile::new());
    Ok(fabric.stepped(1).build()?)
}

const PATIENCE: Option<Duration> = Some(Duration::from_secs(60));

/// The longest that the kernel resolves an address, or a route.
const LIMIT: Duration = Duration::from_secs(2);

/// An id at the first device that has resolved another one's address.
fn resolved(fabric: &Fabric, space: PortSpace, to: SocketAddr) -> uverbs::Result<AddrResolved> {
    let channel = EventChannel::open_on(&fabric.system())?;
    let from = "10.0.0.1:0".parse().ok();
    let qp_type = if space == PortSpace::UDP { QpType::UD } else { QpType::RC };
    channel.create_id(space, qp_type)?.resolve_addr(from, to, LIMIT)?.wait(PATIENCE)?.done()
}

/// The route from the first device to another one's address.
fn route(fabric: &Fabric, space: PortSpace, to: SocketAddr) -> uverbs::Result<RouteResolved> {
    resolved(fabric, space, to)?.resolve_route(LIMIT)?.wait(PATIENCE)?.done()
}

#[test]
fn addresses_over_infiniband_connect_by_lids() -> Result<()> {
    let fabric = infiniband(1)?;
    let [mut a, mut b] = ["left", "right"].map(|name| End::new(&fabric, name).unwrap());
    let channel = EventChannel::open_on(&fabric.system())?;
    let listener =
        channel.create_id(PortSpace::TCP, QpType::RC)?.bind("10.0.0.2:0".parse()?)?.listen(4)?;
    let known = route(&fabric, PortSpace::TCP, listener.local_addr()?)?;
    let paths = known.ib_paths()?;
    let (local, peer) = known.ib_addrs()?;
    let gid = |end: &End| end.context.default_gid(1).map(|entry| entry.gid);
    assert_eq!((local.gid, peer.gid, peer.pkey), (gid(&a)?, gid(&b)?, 0x8001));
    let [path] = paths[..] else { panic!("{paths:?}") };
    assert_eq!((path.sgid, path.dgid, path.pkey), (local.gid, peer.gid, 0x8001));
    assert_eq!((path.slid, path.dlid, path.hop_limit), (1, 2, 0));
    // The path of one id serves another id.
    let resolved = resolved(&fabric, PortSpace::TCP, listener.local_addr()?)?;
    let route = resolved.set_ib_path(&path)?.wait(PATIENCE)?.done()?;
    assert_eq!(route.ib_paths()?, [path]);
    let connecting = route.connect(&a.qp, &ConnectParam::new())?;
    let request = listener.next_request(PATIENCE)?.ok_or("no request")?;
    assert_eq!(request.peer_addr()?.ip().to_string(), "10.0.0.1");
    let accepting = request.accept(&b.qp, &ConnectParam::new())?;
    let client = connecting.wait(PATIENCE)?.done()?;
    let server = accepting.wait(PATIENCE)?.done()?;
    let attr = a.qp.query()?;
    assert_eq!((attr.path.dlid, attr.path.global), (2, None));
    b.recv()?;
    a.send()?;
    assert_eq!(a.status(&fabric)?, Some(WcStatus::SUCCESS));
    assert_eq!(b.status(&fabric)?, Some(WcStatus::SUCCESS));
    client.disconnect()?;
    server.wait_disconnected(PATIENCE)?;
    Ok(())
}

#[test]
fn datagrams_over_infiniband_are_sent_to_a_lid() -> Result<()> {
    let fabric = infiniband(0x8001)?;
    let right = open(&fabric, "right")?;
    let channel = EventChannel::open_on(&fabric.system())?;
    let bound = channel.create_id(PortSpace::UDP, QpType::UD)?.bind("10.0.0.2:0".parse()?)?;
    let listener = bound.listen(4)?;
    let route = route(&fabric, PortSpace::UDP, listener.local_addr()?)?;
    let ud = |context: &Context| {
        let cq = context.cq_builder(4).build()?;
        context.alloc_pd()?.qp_builder(&cq, &cq, QpType::UD).build()
    };
    let (client, server) = (ud(&route.context()?)?, ud(&right)?);
    let connecting = route.connect_datagrams(&client, &ConnectParam::new())?;
    let request = listener.next_request(PATIENCE)?.ok_or("no request")?;
    request.accept_datagrams(&server, &ConnectParam::new())?;
    let peer = connecting.wait(PATIENCE)?.done()?;
    assert_eq!((peer.qpn(), peer.address().dlid), (server.qpn(), 2));
    assert_eq!(peer.address().global, None);
    Ok(())
}

#[test]
fn addresses_over_infiniband_reach_neither_another_partition_nor_ethernet() -> Result<()> {
    let fabric = infiniband(0xffff)?;
    for to in ["10.0.0.2:7", "10.0.0.3:7"] {
        let unreached = route(&fabric, PortSpace::TCP, to.parse()?);
        assert_eq!(unreached.unwrap_err().errno(), Errno::HOSTUNREACH, "{to}");
    }
    let fabric = infiniband(0x8001)?;
    fabric.device("right").ok_or("right is there")?.set_link(false);
    let unreached = route(&fabric, PortSpace::TCP, "10.0.0.2:7".parse()?);
    assert_eq!(unreached.unwrap_err().errno(), Errno::TIMEDOUT);
    let interfaces = fabric.system().interfaces();
    let gid = open(&fabric, "left")?.default_gid(1)?.gid.0;
    assert_eq!((interfaces[0].hardware.len(), &interfaces[0].hardware[4..]), (20, &gid[..]));
    assert_eq!(interfaces[2].hardware.len(), 6);
    Ok(())
}

/// The history names regions that are gone when the program reads it.
#[test]
fn a_history_has_the_faults_and_the_objects_of_a_removed_device() -> Result<()> {
    let fabric = two(Profile::new()).stepped(1).history().build()?;
    let (mut a, mut b) = End::pair(&fabric)?;
    b.recv()?;
    a.send()?;
    assert_eq!(a.status(&fabric)?, Some(WcStatus::SUCCESS));
    let left = fabric.device("left").ok_or("left is there")?;
    left.refuse_receives(2);
    left.set_link(false);
    assert!(fabric.kill(&b.context));
    left.unplug();
    let history = fabric.history();
    let has = |text: &str| assert!(history.contains(text), "{text:?} is not in:\n{history}");
    has("left: fault: no receive for the next 2 messages");
    has("left: fault: the link goes down");
    has("right: fault: context 2 is killed");
    has("left: fault: the device is unplugged");
    has("8 bytes of mr 0x");
    has("8 bytes at mr 0x");
    assert!(!history.contains("key 0x"), "{history}");
    Ok(())
}

/// A reset that fails proves nothing, but the destruction that follows does.
#[test]
fn memory_comes_back_if_a_reset_fails_and_the_queue_pair_is_destroyed() -> Result<()> {
    use uverbs::owned::OwnedCompletionQueue;
    for failures in 1..=3 {
        let fabric = fabric(1);
        let context = open(&fabric, "left")?;
        let left = fabric.device("left").ok_or("left is there")?;
        let peer = End::new(&fabric, "right")?;
        let pd = context.alloc_pd()?;
        let pool = pd.buffer_pool_builder(64).count(4).build()?;
        let mut cq = OwnedCompletionQueue::new(context.cq_builder(16).build()?);
        let build = |cq: &OwnedCompletionQueue<u8>| {
            pd.qp_builder(cq.queue(), cq.queue(), QpType::RC).max_send_wr(4).max_recv_wr(4).build()
        };
        let (mut qp, capacity) = (cq.adopt(build(&cq)?)?, cq.queue().capacity());
        connect(&qp, &peer.qp, 3, &Handshake::new())?;
        let mut batch = qp.recv_batch()?;
        batch.push(pool.take()?, 1)?;
        batch.push(pool.take()?, 2)?;
        batch.ring()?;
        for _ in 0..failures {
            left.fail_call(Verb::ModifyQp, 0, Errno::NOMEM);
        }
        drop(qp);
        assert_eq!((pool.idle(), context.leaked()), (4, 0), "{failures}");
        // The queue pair's room in the completion queue is free again.
        let all = capacity / 8;
        let qps: Vec<_> = (0..all)
            .map(|_| cq.adopt(build(&cq)?).map_err(|e| e.error))
            .collect::<uverbs::Result<_>>()?;
        drop((qps, cq, pool, pd));
        let devices = devices_on(&fabric.system());
        let counts =
            devices.iter().find(|device| device.name() == "left").ok_or("left")?.resources()?;
        assert_eq!((counts.qp(), counts.mr(), counts.cq()), (Some(0), Some(0), Some(0)));
    }
    Ok(())
}

/// Memory of a completed receive belongs to the program, also when the queue pair is reset or destroyed.
#[test]
fn strictness_leaves_memory_alone_that_is_the_programs_again() -> Result<()> {
    for mode in [Mode::Stepped { seed: 1 }, Mode::Trapped] {
        let builder = two(Profile::new()).strict();
        let fabric = match mode {
            Mode::Stepped { seed } => builder.stepped(seed).build()?,
            _ => builder.build()?,
        };
        let (mut a, mut b) = End::pair(&fabric)?;
        a.memory.copy_from(8, &[7; 8])?;
        b.recv()?;
        a.send()?;
        for end in [&mut a, &mut b] {
            assert_eq!(end.status(&fabric)?, Some(WcStatus::SUCCESS));
        }
        let End { mut qp, memory, mut cq, pd, context } = b;
        let kept = || {
            let mut bytes = [0; 8];
            memory.copy_to(0, &mut bytes).map(|()| bytes)
        };
        qp.reset(&mut [&mut cq])?;
        assert_eq!(kept()?, [7; 8], "{mode:?}, reset");
        qp.destroy().map_err(|error| error.to_string())?;
        fabric.step();
        assert_eq!(kept()?, [7; 8], "{mode:?}, destroyed");
        drop((memory, cq, pd, context));
    }
    Ok(())
}

#[test]
#[should_panic(expected = "destroy cannot fail with ENOENT")]
fn a_destruction_cannot_fail_with_enoent() {
    let fabric = fabric(1);
    fabric.device("left").unwrap().fail_call(Verb::Destroy, 0, Errno::NOENT);
}
