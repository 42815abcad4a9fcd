//! The library on a fabric: devices, their kernel and their network in this process.

use std::os::unix::fs::FileExt;
use std::sync::{Arc, Barrier};
use std::time::Duration;
use uverbs::cm::EventChannel;
use uverbs::device::devices_on;
use uverbs::{
    Access, CompletionChannel, CompletionQueue, Context, Handshake, MemoryRegion, Mtu, Notify,
    QpControl, QpType, QueuePair, RecvWr, Remote, SendWr, WcStatus,
};
use uverbs_sim::{Fabric, Mode, Profile};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

fn open(fabric: &Fabric, number: usize) -> Result<Context> {
    Ok(Context::open(&devices_on(&fabric.system())[number])?)
}

/// A queue pair with its queues and memory. Fields are dropped in this order.
struct Side {
    qp: QueuePair,
    memory: MemoryRegion<u8>,
    cq: CompletionQueue,
    channel: CompletionChannel,
}

const RECEIVED: u64 = 1;
const SENT: u64 = 2;

impl Side {
    fn new(context: &Context) -> Result<Side> {
        let pd = context.alloc_pd()?;
        let channel = context.create_comp_channel()?;
        let cq = context.cq_builder(64).channel(&channel).build()?;
        let memory = pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u8>(4096)?;
        let qp = pd.qp_builder(&cq, &cq, QpType::RC).max_send_wr(16).max_recv_wr(16).build()?;
        Ok(Side { qp, memory, cq, channel })
    }

    fn recv(&mut self) -> Result<()> {
        let sges = [self.memory.sge(..2)?];
        let mut batch = self.qp.recv_batch()?;
        batch.push(RecvWr::new(&sges).id(RECEIVED))?;
        // SAFETY: the memory is dropped after the queue pair, and read after the completion.
        unsafe { batch.ring()? };
        Ok(())
    }

    fn send(&mut self) -> Result<()> {
        let sges = [self.memory.sge(2..4)?];
        let mut batch = self.qp.send_batch()?;
        batch.push(SendWr::send(&sges).id(SENT).signaled())?;
        // SAFETY: the memory is dropped after the queue pair, and not written.
        unsafe { batch.ring()? };
        Ok(())
    }

    /// Polls once; adds the ids of completed requests.
    fn poll(&mut self, got: &mut u64) -> Result<()> {
        let mut completions = self.cq.poll()?;
        while let Some(completion) = completions.next() {
            *got |= completion.ok()?.wr_id();
        }
        Ok(())
    }

    fn spin(&mut self, got: &mut u64, wanted: u64) -> Result<()> {
        let deadline = std::time::Instant::now() + Duration::from_secs(10);
        while std::time::Instant::now() < deadline {
            self.poll(got)?;
            if *got & wanted == wanted {
                *got &= !wanted;
                return Ok(());
            }
        }
        Err("no completion".into())
    }

    fn block(&mut self, got: &mut u64, wanted: u64) -> Result<()> {
        loop {
            self.cq.req_notify(Notify::Next)?;
            self.poll(got)?;
            if *got & wanted == wanted {
                *got &= !wanted;
                return Ok(());
            }
            if self.channel.wait(Some(Duration::from_secs(10)))?.is_none() {
                return Err("no event".into());
            }
        }
    }
}

#[test]
fn an_entry_of_another_devices_table_is_refused() -> Result<()> {
    let fabric = Fabric::new(2, Mode::Stepped { seed: 1 });
    let (a, b) = (Side::new(&open(&fabric, 0)?)?, Side::new(&open(&fabric, 1)?)?);
    let error = a.qp.endpoint(&b.qp.context().query_gid(1, 3)?).unwrap_err();
    assert_eq!(error.errno(), uverbs::Errno::INVAL);
    let told = error.to_string();
    assert!(told.contains("10.0.0.1") && told.contains("10.0.0.2"), "{told}");
    Ok(())
}

fn couple(fabric: &Fabric) -> Result<(Side, Side)> {
    let (a, b) = (Side::new(&open(fabric, 0)?)?, Side::new(&open(fabric, 1)?)?);
    connect(&a.qp, &b.qp)?;
    Ok((a, b))
}

fn connect(a: &QpControl, b: &QpControl) -> uverbs::Result<()> {
    let at_a = a.endpoint(&a.context().query_gid(1, 3)?)?;
    let at_b = b.endpoint(&b.context().query_gid(1, 3)?)?;
    a.handshake(&at_b, &Handshake::new())?;
    b.handshake(&at_a, &Handshake::new())
}

fn two_threads(mode: Mode, wait: fn(&mut Side, &mut u64, u64) -> Result<()>) -> Result<()> {
    const ROUNDS: usize = 200;
    let fabric = Fabric::new(2, mode);
    let (mut a, mut b) = couple(&fabric)?;
    a.recv()?;
    b.recv()?;
    let (started, theirs) = (Arc::new(Barrier::new(2)), fabric.clone());
    let begin = started.clone();
    let other = std::thread::spawn(move || -> Result<()> {
        // In a stepped fabric a wait lets other threads run, once the fabric knows of them.
        theirs.step();
        begin.wait();
        let mut got = 0;
        for _ in 0..ROUNDS {
            wait(&mut b, &mut got, RECEIVED)?;
            b.recv()?;
            b.send()?;
            wait(&mut b, &mut got, SENT)?;
        }
        Ok(())
    });
    started.wait();
    let mut got = 0;
    for _ in 0..ROUNDS {
        a.send()?;
        wait(&mut a, &mut got, RECEIVED | SENT)?;
        a.recv()?;
    }
    other.join().map_err(|_| "a panic")?
}

#[test]
fn one_thread_plays_both_sides() -> Result<()> {
    let fabric = Fabric::new(2, Mode::Stepped { seed: 1 });
    let (mut a, mut b) = couple(&fabric)?;
    a.memory.copy_from(2, &[7, 9])?;
    a.recv()?;
    b.recv()?;
    let (mut at_a, mut at_b) = (0, 0);
    let rounds = if cfg!(miri) { 3 } else { 100 };
    for _ in 0..rounds {
        a.send()?;
        b.spin(&mut at_b, RECEIVED)?;
        b.recv()?;
        b.send()?;
        a.spin(&mut at_a, RECEIVED | SENT)?;
        a.recv()?;
        b.spin(&mut at_b, SENT)?;
    }
    let mut bytes = [0; 2];
    b.memory.copy_to(0, &mut bytes)?;
    assert_eq!(bytes, [7, 9]);
    Ok(())
}

#[test]
#[cfg_attr(miri, ignore = "it writes a file")]
fn a_capture_has_packets_both_ways() -> Result<()> {
    let fabric = Fabric::new(2, Mode::Stepped { seed: 1 });
    let path = std::env::temp_dir().join(format!("uverbs-fabric-{}.pcap", std::process::id()));
    fabric.capture(std::fs::File::create_new(&path)?)?;
    let (mut a, mut b) = couple(&fabric)?;
    b.recv()?;
    a.send()?;
    b.spin(&mut 0, RECEIVED)?;
    a.spin(&mut 0, SENT)?;
    let bytes = std::fs::read(&path)?;
    std::fs::remove_file(&path)?;
    for addresses in [[10, 0, 0, 1, 10, 0, 0, 2], [10, 0, 0, 2, 10, 0, 0, 1]] {
        assert!(bytes.windows(8).any(|window| window == addresses), "{addresses:?}");
    }
    Ok(())
}

/// The UDP source ports of packets from one address to another, each once.
fn udp_ports(capture: &[u8], addresses: [u8; 8]) -> std::collections::BTreeSet<u16> {
    let found = capture.windows(10).filter(|window| window[..8] == addresses);
    found.map(|window| u16::from_be_bytes([window[8], window[9]])).collect()
}

/// Of both queue pairs of a connection, and of datagrams.
#[test]
#[cfg_attr(miri, ignore = "it writes a file")]
fn packets_leave_from_the_udp_ports_that_were_set() -> Result<()> {
    use uverbs::mlx5::{set_ah_udp_source_port, set_udp_source_port};
    use uverbs::{AddressVector, Destination, GlobalRoute, Qkey};
    const TO_B: [u8; 8] = [10, 0, 0, 1, 10, 0, 0, 2];
    const TO_A: [u8; 8] = [10, 0, 0, 2, 10, 0, 0, 1];
    let fabric = Fabric::new(2, Mode::Stepped { seed: 1 });
    let (mut a, mut b) = couple(&fabric)?;
    let path = std::env::temp_dir().join(format!("uverbs-ports-{}.pcap", std::process::id()));
    let captured = |work: &mut dyn FnMut() -> Result<()>| -> Result<Vec<u8>> {
        fabric.capture(std::fs::File::create_new(&path)?)?;
        work()?;
        let bytes = std::fs::read(&path);
        std::fs::remove_file(&path)?;
        Ok(bytes?)
    };
    let mut message = || -> Result<()> {
        b.recv()?;
        a.send()?;
        b.spin(&mut 0, RECEIVED)?;
        a.spin(&mut 0, SENT)
    };
    let before = captured(&mut message)?;
    // The kernel's port, of both numbers: the same in both directions.
    assert_eq!(udp_ports(&before, TO_B), udp_ports(&before, TO_A));
    assert!(udp_ports(&before, TO_B).iter().all(|port| *port >= 0xc000));
    set_udp_source_port(&a.qp, 0xd123)?;
    let after = captured(&mut || {
        b.recv()?;
        a.send()?;
        b.spin(&mut 0, RECEIVED)?;
        a.spin(&mut 0, SENT)
    })?;
    assert_eq!(udp_ports(&after, TO_B), [0xd123].into());
    assert_eq!(
        udp_ports(&after, TO_A),
        udp_ports(&before, TO_A),
        "acknowledgements are the peer's"
    );

    let pd = a.qp.context().alloc_pd()?;
    let mut ud =
        pd.qp_builder(&a.cq, &a.cq, QpType::UD).max_send_wr(8).max_inline_data(8).build()?;
    ud.endpoint(&a.qp.context().query_gid(1, 3)?).map(drop)?;
    let qkey = Qkey(7);
    for attr in [
        uverbs::QpAttr::new().state(uverbs::QpState::INIT).port(1).pkey_index(0).qkey(qkey),
        uverbs::QpAttr::new().state(uverbs::QpState::RTR),
        uverbs::QpAttr::new().state(uverbs::QpState::RTS).sq_psn(uverbs::Psn(0)),
    ] {
        ud.modify(&attr)?;
    }
    let to = b.qp.context().query_gid(1, 3)?.gid;
    let vector = AddressVector::global(1, 3, to);
    let global = GlobalRoute { flow_label: 0xf_4321, ..vector.global.ok_or("a global path")? };
    let mut ah = pd.create_ah(&AddressVector { global: Some(global), ..vector })?;
    let peer = b.qp.qpn();
    for port in [None, Some(0xd321)] {
        if let Some(port) = port {
            set_ah_udp_source_port(&mut ah, port)?;
        }
        let (queue, cq) = (&mut ud, &mut a.cq);
        let seen = captured(&mut || {
            let mut batch = queue.send_batch()?;
            let to = Destination::new(&ah, peer, qkey);
            batch.push(SendWr::send(&[]).inline(b"datagram").to(to).signaled())?;
            // SAFETY: the request carries its data.
            unsafe { batch.ring()? };
            while cq.poll()?.next().is_none() {}
            Ok(())
        })?;
        // As `rdma_flow_label_to_udp_sport` of the label.
        assert_eq!(udp_ports(&seen, TO_B), [port.unwrap_or(0xc31c)].into());
    }
    Ok(())
}

#[test]
fn jumbo_frames_on_both_ports_have_packets_of_4096_bytes() -> Result<()> {
    for (frames, mtu) in [([false, true], Mtu::MTU_1024), ([true, true], Mtu::MTU_4096)] {
        let mut builder = Fabric::builder().stepped(1);
        for jumbo in frames {
            let profile = Profile::new();
            builder = builder.device(if jumbo { profile.jumbo_frames() } else { profile });
        }
        let fabric = builder.build()?;
        let (a, b) = couple(&fabric)?;
        assert_eq!([a.qp.query()?.path_mtu, b.qp.query()?.path_mtu], [mtu; 2]);
    }
    Ok(())
}

#[test]
#[cfg_attr(miri, ignore = "it waits, and Miri has no poll(2)")]
fn two_threads_spin() -> Result<()> {
    two_threads(Mode::Trapped, Side::spin)
}

#[test]
#[cfg_attr(miri, ignore = "it waits, and Miri has no poll(2)")]
fn two_threads_wait_for_events() -> Result<()> {
    two_threads(Mode::Trapped, Side::block)
}

#[test]
#[cfg_attr(miri, ignore = "it waits, and Miri has no poll(2)")]
fn waits_step_the_fabric() -> Result<()> {
    two_threads(Mode::Stepped { seed: 1 }, Side::block)
}

/// Seven retries to a silent peer take seconds on a real device, and no time here.
#[test]
#[cfg_attr(miri, ignore = "it waits, and Miri has no poll(2)")]
fn retries_take_no_time() -> Result<()> {
    let fabric = Fabric::new(2, Mode::Stepped { seed: 1 });
    let (mut a, b) = couple(&fabric)?;
    drop(b);
    let started = std::time::Instant::now();
    a.send()?;
    a.cq.req_notify(Notify::Next)?;
    assert!(a.channel.wait(Some(Duration::from_secs(60)))?.is_some(), "an event");
    let mut completions = a.cq.poll()?;
    let status = completions.next().map(|completion| completion.status());
    assert_eq!(status, Some(uverbs::WcStatus::RETRY_EXC_ERR));
    assert!(started.elapsed() < Duration::from_secs(2));
    Ok(())
}

/// A forked child has a copy of the fabric's lock, which another thread of the parent holds most of the time.
#[test]
#[cfg_attr(miri, ignore = "it waits, and Miri has no poll(2)")]
fn a_child_of_fork_is_refused_and_waits_for_no_lock() -> Result<()> {
    use nix::sys::wait::{WaitStatus, waitpid};
    use nix::unistd::ForkResult;
    use std::sync::atomic::{AtomicBool, Ordering};
    for mode in [Mode::Trapped, Mode::Stepped { seed: 1 }] {
        let fabric = Fabric::new(2, mode);
        let device = devices_on(&fabric.system()).remove(0);
        let (stopped, busy) = (AtomicBool::new(false), fabric.clone());
        let ended = std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stopped.load(Ordering::Relaxed) {
                    devices_on(&busy.system());
                }
            });
            let ended = (0..20).try_for_each(|_| -> Result<()> {
                // SAFETY: of the locks that the other thread takes, the child takes only the fabric's, which the test
                // is about, and the allocator's; it ends without a return from here.
                match unsafe { nix::unistd::fork() }? {
                    ForkResult::Parent { child } => match waitpid(child, None)? {
                        WaitStatus::Exited(_, 0) => Ok(()),
                        other => Err(format!("the child ended as {other:?}").into()),
                    },
                    ForkResult::Child => {
                        // Kills a child that waits for a lock.
                        nix::unistd::alarm::set(10);
                        let refused = std::panic::catch_unwind(|| check_refusals(&fabric, &device));
                        // SAFETY: ends the process, and touches nothing of the parent's.
                        unsafe { nix::libc::_exit(refused.is_err().into()) }
                    }
                }
            });
            stopped.store(true, Ordering::Relaxed);
            ended
        });
        ended?;
        drop(open(&fabric, 0)?);
    }
    Ok(())
}

/// All calls of a process on a fabric that another process made.
fn check_refusals(fabric: &Fabric, device: &uverbs::device::Device) {
    let system = fabric.system();
    let nodev = rustix::io::Errno::NODEV;
    assert_eq!(Context::open(device).unwrap_err().errno(), nodev);
    assert_eq!(device.resources().unwrap_err().errno(), nodev);
    assert_eq!(EventChannel::open_on(&system).unwrap_err().errno(), nodev);
    assert_eq!(system.source_for([10, 0, 0, 1].into(), 0), Err(nodev));
    assert!(devices_on(&system).is_empty() && system.interfaces().is_empty());
    let file = std::fs::File::open("/dev/null").unwrap();
    assert!(uverbs_host::device_of(rustix::fd::AsFd::as_fd(&file)).is_none());
    assert!(uverbs_host::adopt(file.into()).is_err());
    assert!(!fabric.step() && !fabric.advance());
    assert_eq!(fabric.decisions(), 0);
}

/// A queue that is armed while it has unpolled completions announces them after the period: no call enters the fabric
/// meanwhile.
#[test]
#[cfg_attr(miri, ignore = "it waits, and Miri has no poll(2)")]
fn timers_that_a_ring_sets_fire() -> Result<()> {
    const PERIOD_US: u16 = 0xfff;
    let fabric = Fabric::new(2, Mode::Trapped);
    let (mut a, mut b) = couple(&fabric)?;
    let mut got = 0;
    for _ in 0..4 {
        b.recv()?;
        b.cq.moderate(0, 0)?;
        b.cq.req_notify(Notify::Next)?;
        a.send()?;
        // The period begins with this event.
        assert!(b.channel.wait(Some(Duration::from_secs(10)))?.is_some(), "an event at once");
        b.spin(&mut got, RECEIVED)?;
        b.cq.moderate(100, PERIOD_US)?;
        b.recv()?;
        a.send()?;
        b.cq.req_notify(Notify::Next)?;
        assert!(b.channel.wait(Some(Duration::from_secs(10)))?.is_some(), "an event of the timer");
        b.spin(&mut got, RECEIVED)?;
    }
    Ok(())
}

#[cfg(feature = "tokio")]
#[test]
#[cfg_attr(miri, ignore = "it waits, and Miri has no poll(2)")]
fn futures_play() -> Result<()> {
    let fabric = Fabric::new(2, Mode::Trapped);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    play(&runtime, &fabric)
}

/// One seed makes the same decisions in each run, and another seed makes others.
#[cfg(all(feature = "sim", feature = "tokio"))]
#[test]
#[cfg_attr(miri, ignore = "it waits, and Miri has no poll(2)")]
fn a_task_steps_the_fabric_and_runs_repeat() -> Result<()> {
    let run = |seed| -> Result<String> {
        let devices = Fabric::builder().device(Profile::new()).device(Profile::new());
        let fabric = devices.stepped(seed).history().build()?;
        let mut builder = tokio::runtime::Builder::new_current_thread();
        let runtime = builder.enable_all().start_paused(true).build()?;
        let driven = fabric.clone();
        runtime.spawn(async move { driven.drive(uverbs::sim::TokioClock::new()).await });
        play(&runtime, &fabric)?;
        Ok(fabric.history())
    };
    let first = run(1)?;
    assert!(first.contains("SEND"), "{first}");
    assert_eq!((&first, &first), (&run(1)?, &run(1)?));
    assert_ne!(first, run(2)?);
    Ok(())
}

/// A call long after the last step happens now, and its timers start now. Otherwise a request to disconnect, whose
/// retry would be due when the event loop returns to the fabric, would be sent twice at once.
#[cfg(all(feature = "sim", feature = "tokio"))]
#[test]
fn calls_between_two_steps_are_at_the_time_of_the_event_loop() -> Result<()> {
    use tokio::time::sleep;
    use uverbs::aio::cm::AsyncEventChannel;
    use uverbs::cm::{ConnectParam, Connector, Listener};
    const LONG: Duration = Duration::from_secs(100);
    let devices = Fabric::builder().device(Profile::new()).device(Profile::new());
    let fabric = devices.stepped(1).history().build()?;
    let mut builder = tokio::runtime::Builder::new_current_thread();
    let runtime = builder.enable_all().start_paused(true).build()?;
    let driven = fabric.clone();
    runtime.spawn(async move { driven.drive(uverbs::sim::TokioClock::new()).await });
    runtime.block_on(async {
        let create = |context: &Context| {
            let cq = context.cq_builder(4).build()?;
            let qp = context.alloc_pd()?.qp_builder(&cq, &cq, QpType::RC).build()?;
            Ok::<_, uverbs::Error>((qp, cq))
        };
        let system = fabric.system();
        let (server, _driver) = AsyncEventChannel::spawn_on(&system)?;
        let listener = server.listen(&Listener::builder("10.0.0.2:0")?.backlog(4))?;
        let connector = Connector::new(listener.local_addr()?)?.source("10.0.0.1:0".parse()?);
        let (client, _driver) = AsyncEventChannel::spawn_on(&system)?;
        let passive = tokio::spawn(async move {
            let request = listener.next_request().await?;
            let (qp, cq) = create(&request.context()?)?;
            let accepted = server.accept(request, &ConnectParam::new(), |_| Ok(qp)).await;
            Result::Ok((accepted.map_err(|error| error.to_string())?, cq))
        });
        let mut queue = None;
        let connected = client.connect(&connector, |route| {
            let (qp, cq) = create(&route.context()?)?;
            queue = Some(cq);
            Ok(qp)
        });
        let (_qp, connection) = connected.await.map_err(|error| error.to_string())?;
        let ((_theirs, accepted), _cq) = passive.await??;
        sleep(LONG).await;
        assert!(fabric.now() >= LONG, "{:?}", fabric.now());
        drop(connection);
        accepted.disconnected().await?;
        Result::Ok(())
    })?;
    let history = fabric.history();
    let asked: Vec<&str> = history.lines().filter(|line| line.contains("DREQ")).collect();
    assert_eq!(asked.len(), 1, "{asked:?}");
    assert!(asked[0].trim_start().starts_with("10000"), "{asked:?}");
    Ok(())
}

/// The listener's program does not accept: without the deadline the handshake would end after a minute.
#[test]
#[cfg_attr(miri, ignore = "it waits, and Miri has no poll(2)")]
fn a_connect_that_blocks_ends_at_its_deadline() -> Result<()> {
    use uverbs::cm::{Connector, Listener};
    const LIMIT: Duration = Duration::from_secs(3);
    let fabric = Fabric::new(2, Mode::Stepped { seed: 1 });
    let channel = EventChannel::open_on(&fabric.system())?;
    let listener = Listener::builder("10.0.0.2:0")?.channel(&channel).build()?;
    let connector = Connector::new(listener.local_addr()?)?.source("10.0.0.1:0".parse()?);
    let connector = connector.timeout(LIMIT).channel(&EventChannel::open_on(&fabric.system())?);
    let begun = fabric.now();
    let error = connector.connect(|route| queue_pair(&route.context()?)).unwrap_err();
    let took = fabric.now() - begun;
    assert_eq!(error.errno(), uverbs::Errno::TIMEDOUT, "{error}");
    assert!(took >= LIMIT && took < 2 * LIMIT, "{took:?}");
    Ok(())
}

/// As [`a_connect_that_blocks_ends_at_its_deadline`], with a future. The events of the channel are first read after a
/// while: the handshake has the rest of the time.
#[cfg(all(feature = "sim", feature = "tokio"))]
#[test]
#[cfg_attr(miri, ignore = "it waits, and Miri has no poll(2)")]
fn a_future_of_a_connect_ends_at_its_deadline() -> Result<()> {
    use tokio::time::sleep;
    use uverbs::aio::cm::AsyncEventChannel;
    use uverbs::aio::tokio::Registered;
    use uverbs::cm::{Connector, Listener};
    const LIMIT: Duration = Duration::from_secs(3);
    for unread in [Duration::ZERO, Duration::from_secs(2), Duration::from_secs(20)] {
        let fabric = Fabric::new(2, Mode::Stepped { seed: 1 });
        let mut builder = tokio::runtime::Builder::new_current_thread();
        let runtime = builder.enable_all().start_paused(true).build()?;
        let driven = fabric.clone();
        runtime.spawn(async move { driven.drive(uverbs::sim::TokioClock::new()).await });
        let (error, took) = runtime.block_on(async {
            let system = fabric.system();
            let (server, _driver) = AsyncEventChannel::spawn_on(&system)?;
            let listener = server.listen(&Listener::builder("10.0.0.2:0")?)?;
            let connector = Connector::new(listener.local_addr()?)?.source("10.0.0.1:0".parse()?);
            let (client, driver) = AsyncEventChannel::new_on(&system, Registered::new, sleep)?;
            tokio::spawn(async move {
                sleep(unread).await;
                driver.await
            });
            let begun = fabric.now();
            let connector = connector.timeout(LIMIT);
            let connected = client.connect(&connector, |route| queue_pair(&route.context()?)).await;
            Result::Ok((connected.map(drop).unwrap_err(), fabric.now() - begun))
        })?;
        assert_eq!(error.errno(), uverbs::Errno::TIMEDOUT, "{error}");
        assert!(took >= LIMIT && took < LIMIT + Duration::from_secs(1), "{unread:?}: {took:?}");
        let step = if unread > LIMIT { "the address was" } else { "the listener did" };
        assert!(error.to_string().contains(step), "{error}");
    }
    Ok(())
}

#[test]
fn a_port_of_a_lag_that_is_down_leaves_its_queue_pairs_to_the_other() -> Result<()> {
    use uverbs::mlx5::{query_lag_port, set_lag_port};
    let fabric = Fabric::builder().device(Profile::new()).build()?;
    let context = open(&fabric, 0)?;
    let device = fabric.device("mlx5_0").ok_or("it is there")?;
    let mut side = Side::new(&context)?;
    let own = side.qp.endpoint(&context.query_gid(1, 3)?)?;
    side.qp.handshake(&own, &Handshake::new())?;
    let speed = || context.query_port_speed(1).map(|speed| (speed.mbps, speed.of_link));
    assert_eq!(speed()?, (200_000, false));
    for (down, left) in [(2, 1), (1, 2)] {
        assert!(device.set_lag_port_up(down, false));
        for configured in [1, 2] {
            set_lag_port(&side.qp, configured)?;
            let port = query_lag_port(&side.qp)?;
            assert_eq!((port.configured, port.active), (configured, left), "port {down} is down");
        }
        assert_eq!(speed()?, (100_000, false));
        // The link stays.
        let mut got = 0;
        side.recv()?;
        side.send()?;
        let end = std::time::Instant::now() + Duration::from_secs(20);
        while got != RECEIVED | SENT {
            side.poll(&mut got)?;
            assert!(std::time::Instant::now() < end, "the message does not arrive");
        }
        assert!(device.set_lag_port_up(down, true));
        let port = query_lag_port(&side.qp)?;
        assert_eq!((port.configured, port.active), (2, 2));
    }
    assert_eq!([0, 3, u32::MAX].map(|port| device.set_lag_port_up(port, false)), [false; 3]);
    Ok(())
}

/// As the driver of the kernel revokes them: `mlx5_ib_revoke_data_direct_mrs`.
#[test]
#[cfg_attr(miri, ignore = "it maps a file")]
fn data_direct_regions_end_when_the_function_is_unbound() -> Result<()> {
    const LENGTH: u64 = 1 << 16;
    let fabric = Fabric::builder().device(Profile::new().data_direct()).build()?;
    let context = open(&fabric, 0)?;
    let (pd, mut cq) = (context.alloc_pd()?, context.cq_builder(16).build()?);
    let mut memory = pd.mr_builder().allocate::<u8>(8)?;
    let mut qp = pd.qp_builder(&cq, &cq, QpType::RC).max_send_wr(4).build()?;
    let own = qp.endpoint(&context.query_gid(1, 3)?)?;
    qp.handshake(&own, &Handshake::new())?;
    let buffer = uverbs_sim::dma_buf(LENGTH as usize)?;
    let register = || {
        let builder = pd.mr_builder().access(Access::LOCAL_WRITE | Access::REMOTE_WRITE);
        builder.data_direct().iova(0).register_dmabuf(&buffer, 0, LENGTH)
    };
    let region = register()?;
    let mut write = |value: u8| -> Result<WcStatus> {
        memory.copy_from(0, &[value; 8])?;
        let sges = [memory.sge(..)?];
        let to = Remote { addr: LENGTH - 8, rkey: region.rkey() };
        let mut batch = qp.send_batch()?;
        batch.push(SendWr::write(to, &sges).signaled())?;
        // SAFETY: the memory is dropped after the queue pair.
        unsafe { batch.ring()? };
        let end = std::time::Instant::now() + Duration::from_secs(20);
        loop {
            if let Some(done) = cq.poll()?.next() {
                return Ok(done.status());
            }
            assert!(std::time::Instant::now() < end, "the write does not end");
        }
    };
    let file = std::fs::File::from(buffer.try_clone()?);
    let last = || {
        let mut bytes = [0; 8];
        file.read_exact_at(&mut bytes, LENGTH - 8).map(|()| bytes)
    };
    assert_eq!((write(5)?, last()?), (WcStatus::SUCCESS, [5; 8]));
    fabric.device("mlx5_0").ok_or("it is there")?.unbind_data_direct();
    // The queue pair is its own peer, whose refusal ends it before the answer arrives.
    assert_eq!((write(6)?, last()?), (WcStatus::WR_FLUSH_ERR, [5; 8]));
    for error in [register().err(), uverbs::mlx5::data_direct_path(&context).err()] {
        assert_eq!(error.map(|error| error.errno()), Some(uverbs::Errno::OPNOTSUPP));
    }
    drop((qp, region));
    assert_eq!(context.leaked(), 0);
    Ok(())
}

fn queue_pair(context: &Context) -> uverbs::Result<QueuePair> {
    let cq = context.cq_builder(4).build()?;
    context.alloc_pd()?.qp_builder(&cq, &cq, QpType::RC).build()
}

#[cfg(feature = "tokio")]
fn play(runtime: &tokio::runtime::Runtime, fabric: &Fabric) -> Result<()> {
    const ROUNDS: usize = 100;
    runtime.block_on(async {
        let create = |context: &Context| -> Result<_> {
            let pd = context.alloc_pd()?;
            let pool = pd.buffer_pool_builder(64).count(16).build()?;
            let (cq, _driver) = context.cq_builder(64).spawn()?;
            let qp = pd.qp_builder(&cq, &cq, QpType::RC).max_send_wr(4).max_recv_wr(4).build()?;
            Ok((cq.adopt(qp)?, pool))
        };
        let (a, a_pool) = create(&open(fabric, 0)?)?;
        let (b, b_pool) = create(&open(fabric, 1)?)?;
        connect(&a, &b)?;
        let (mut to_a, mut to_b) = (a.inbox(&a_pool, 4), b.inbox(&b_pool, 4));
        let server = tokio::spawn(async move {
            for _ in 0..ROUNDS {
                let message = to_b.next().await?;
                b.send(message.memory).await?;
            }
            Result::Ok(())
        });
        let mut buffer = a_pool.copy(b"hi")?;
        for _ in 0..ROUNDS {
            let (sent, answer) = tokio::join!(a.send(buffer), to_a.next());
            buffer = sent?.memory;
            assert_eq!(&answer?.memory[..], b"hi");
        }
        server.await?
    })
}
