//! Queue pairs on a network that is slow, full, or hostile, and devices that write memory in any order.
//!
//! `UVERBS_NETWORK_SEEDS` is the number of seeds of each hostile run; 100 unless set.

use std::time::{Duration, Instant};
use uverbs::device::devices_on;
use uverbs::{
    Access, AddressVector, CompletionQueue, Context, Destination, FlowAttr, FlowEth, Gid,
    Handshake, MemoryRegion, ProtectionDomain, Psn, Qkey, QpAttr, QpControl, QpState, QpType, Qpn,
    QueuePair, RecvWr, SendWr, WcOpcode, WcStatus,
};
use uverbs_sim::{
    Fabric, FabricBuilder, FabricError, Network, PacketFault, PacketKind, Profile, Traffic,
    each_seed,
};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// Bytes of memory of each side.
const MEMORY: usize = 1 << 20;

/// A queue pair with its queue and memory. Fields are dropped in this order.
struct Side {
    qp: QueuePair,
    memory: MemoryRegion<u8>,
    cq: CompletionQueue,
    pd: ProtectionDomain,
}

/// A completion: its request, its status, its bytes.
type Ended = (u64, WcStatus, WcOpcode);

impl Side {
    fn new(context: &Context, kind: QpType) -> Result<Side> {
        let pd = context.alloc_pd()?;
        let cq = context.cq_builder(256).build()?;
        let memory = pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u8>(MEMORY)?;
        let qp = pd.qp_builder(&cq, &cq, kind).max_send_wr(64).max_recv_wr(64).build()?;
        Ok(Side { qp, memory, cq, pd })
    }

    fn recv(&mut self, id: u64, at: usize, len: usize) -> Result<()> {
        let sges = [self.memory.sge(at..at + len)?];
        let mut batch = self.qp.recv_batch()?;
        batch.push(RecvWr::new(&sges).id(id))?;
        // SAFETY: the memory is dropped after the queue pair, and read after the completion.
        unsafe { batch.ring()? };
        Ok(())
    }

    fn post(&mut self, wr: SendWr<'_>) -> Result<()> {
        let mut batch = self.qp.send_batch()?;
        batch.push(wr.signaled())?;
        // SAFETY: the memory is dropped after the queue pair, and not written before the completion.
        unsafe { batch.ring()? };
        Ok(())
    }

    /// Writes `len` bytes from the begin of the memory to that of the peer.
    fn write(&mut self, to: &Side, id: u64, len: usize) -> Result<()> {
        let sges = [self.memory.sge(..len)?];
        self.post(SendWr::write(to.memory.remote(0)?, &sges).id(id))
    }

    fn poll(&mut self) -> Result<Vec<Ended>> {
        let mut completions = self.cq.poll()?;
        let mut ended = Vec::new();
        while let Some(completion) = completions.next() {
            // The operation of a request that failed is not reported.
            let opcode = completion.ok().map_or(WcOpcode::SEND, |done| done.opcode());
            ended.push((completion.wr_id(), completion.status(), opcode));
        }
        Ok(ended)
    }

    fn bytes(&self, at: usize, len: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0; len];
        self.memory.copy_to(at, &mut bytes)?;
        Ok(bytes)
    }

    /// Steps until a request ends.
    fn wait(&mut self, fabric: &Fabric) -> Result<Ended> {
        loop {
            if let Some(ended) = self.poll()?.first() {
                return Ok(*ended);
            }
            if !fabric.step() && !fabric.advance() {
                return Err("nothing happens any more".into());
            }
        }
    }
}

fn connect(a: &QpControl, b: &QpControl) -> uverbs::Result<()> {
    connect_with(a, b, &Handshake::new().timeout(8))
}

fn connect_with(a: &QpControl, b: &QpControl, options: &Handshake) -> uverbs::Result<()> {
    let (at_a, at_b) = (endpoint(a)?, endpoint(b)?);
    a.handshake(&at_b, options)?;
    b.handshake(&at_a, options)
}

fn endpoint(qp: &QpControl) -> uverbs::Result<uverbs::Endpoint> {
    qp.endpoint(&qp.context().default_gid(1)?)
}

fn sides(fabric: &Fabric, kind: QpType) -> Result<(Side, Side)> {
    let devices = devices_on(&fabric.system());
    let side = |at: usize| Side::new(&Context::open(&devices[at])?, kind);
    let (a, b) = (side(0)?, side(1)?);
    connect(&a.qp, &b.qp)?;
    Ok((a, b))
}

fn builder(seed: u64) -> FabricBuilder {
    builder_of(seed, Profile::new())
}

fn builder_of(seed: u64, profile: Profile) -> FabricBuilder {
    let builder = Fabric::builder().stepped(seed);
    ["a", "b", "c"]
        .into_iter()
        .fold(builder, |builder, name| builder.device(profile.clone().name(name)))
}

fn traffic(fabric: &Fabric, from: &str, to: &str) -> Traffic {
    let [from, to] = [from, to].map(|name| fabric.device(name).expect("it is there"));
    from.traffic_to(&to)
}

fn settle(fabric: &Fabric) {
    while fabric.step() || fabric.advance() {}
}

#[test]
fn a_mebibyte_takes_as_long_as_the_bandwidth_says() -> Result<()> {
    let time = |network: Option<Network>| -> Result<Duration> {
        let builder = builder(1);
        let builder = match network {
            Some(network) => builder.network(network),
            None => builder,
        };
        let fabric = builder.build()?;
        let (mut a, b) = sides(&fabric, QpType::RC)?;
        a.write(&b, 1, MEMORY)?;
        let started = fabric.now();
        assert_eq!(a.wait(&fabric)?, (1, WcStatus::SUCCESS, WcOpcode::WRITE));
        Ok(fabric.now() - started)
    };
    let ideal = time(None)?;
    assert!(ideal < Duration::from_millis(2), "{ideal:?}");
    let gigabit = time(Some(Network::ideal().bandwidth(1_000_000_000)))?;
    assert!(
        (Duration::from_millis(8)..Duration::from_millis(11)).contains(&gigabit),
        "{gigabit:?}"
    );
    // A window of 128 packets for each round trip of a millisecond.
    let far = time(Some(Network::ideal().latency(Duration::from_micros(500))))?;
    assert!((Duration::from_millis(8)..Duration::from_millis(12)).contains(&far), "{far:?}");
    Ok(())
}

/// Writes of a mebibyte at once, between devices by their numbers, at a gigabit: how long all take, and what is marked and
/// dropped.
fn writes_at_once(ways: &[(usize, usize)]) -> Result<(Duration, u64, u64)> {
    // More waits than the window of one queue pair, and less than that of two.
    let network = Network::ideal().bandwidth(1_000_000_000).marks_above(150_000);
    let fabric = builder(1).network(network.queue_bytes(200_000)).build()?;
    let devices = devices_on(&fabric.system());
    let contexts = devices.iter().map(Context::open).collect::<uverbs::Result<Vec<_>>>()?;
    let side = |at: usize| Side::new(&contexts[at], QpType::RC);
    let mut pairs = Vec::new();
    for (from, to) in ways {
        let (mut one, other) = (side(*from)?, side(*to)?);
        // Two windows wait for two milliseconds.
        connect_with(&one.qp, &other.qp, &Handshake::new().timeout(12))?;
        one.write(&other, 1, MEMORY)?;
        pairs.push((one, other));
    }
    let started = fabric.now();
    for (one, _) in &mut pairs {
        assert_eq!(one.wait(&fabric)?, (1, WcStatus::SUCCESS, WcOpcode::WRITE));
    }
    let names = ["a", "b", "c"];
    let all = ways.iter().map(|(from, to)| traffic(&fabric, names[*from], names[*to]));
    let (marked, dropped) = all.fold((0, 0), |(marked, dropped), traffic| {
        (marked + traffic.marked, dropped + traffic.dropped)
    });
    Ok((fabric.now() - started, marked, dropped))
}

#[test]
fn senders_and_receivers_share_the_bandwidth_and_the_queues_of_ports() -> Result<()> {
    let millis = |from, to| Duration::from_millis(from)..Duration::from_millis(to);
    let (alone, marked, dropped) = writes_at_once(&[(0, 2)])?;
    assert!(millis(8, 11).contains(&alone) && (marked, dropped) == (0, 0), "{alone:?}");
    // The queue of the sender's port is full, or that of the receiver's.
    for ways in [[(0, 1), (0, 2)], [(0, 2), (1, 2)]] {
        let (together, marked, dropped) = writes_at_once(&ways)?;
        assert!(millis(17, 200).contains(&together), "{ways:?}: {together:?}");
        assert!(marked > 0 && dropped > 0, "{ways:?}: {marked} marked, {dropped} dropped");
    }
    Ok(())
}

#[test]
fn real_time_has_the_same_latency() -> Result<()> {
    let network = Network::ideal().latency(Duration::from_millis(3));
    let devices = [Profile::new().name("a"), Profile::new().name("b")];
    let builder = devices.into_iter().fold(Fabric::builder(), FabricBuilder::device);
    let fabric = builder.network(network).build()?;
    let (mut a, b) = sides(&fabric, QpType::RC)?;
    let started = Instant::now();
    a.write(&b, 1, 8)?;
    while a.poll()?.is_empty() {
        assert!(started.elapsed() < Duration::from_secs(10), "no completion");
    }
    assert!(started.elapsed() >= Duration::from_millis(6));
    assert!(traffic(&fabric, "a", "b").arrived >= 1);
    Ok(())
}

/// Its payloads stay in memory of the sender until packets leave for the network, many at once.
#[test]
fn a_long_write_in_real_time_is_whole_though_packets_are_damaged_and_doubled() -> Result<()> {
    let devices = ["a", "b"].map(|name| Profile::new().name(name));
    let fabric = devices.into_iter().fold(Fabric::builder(), FabricBuilder::device).build()?;
    let devices = devices_on(&fabric.system());
    let side = |at: usize| Side::new(&Context::open(&devices[at])?, QpType::RC);
    let (mut a, b) = (side(0)?, side(1)?);
    connect_with(&a.qp, &b.qp, &Handshake::new().timeout(16))?;
    let [from, to] = ["a", "b"].map(|name| fabric.device(name).expect("it is there"));
    from.fault_packets(&to, PacketFault::damage().after(40));
    from.fault_packets(&to, PacketFault::double().after(10).count(100));
    let sent: Vec<u8> = (0..MEMORY).map(|at| (at * 7 + at / 251) as u8).collect();
    a.memory.copy_from(0, &sent)?;
    a.write(&b, 1, MEMORY)?;
    let started = Instant::now();
    let ended = loop {
        assert!(started.elapsed() < Duration::from_secs(10), "no completion");
        if let Some(ended) = a.poll()?.first() {
            break *ended;
        }
    };
    assert_eq!(ended, (1, WcStatus::SUCCESS, WcOpcode::WRITE));
    assert!(b.bytes(0, MEMORY)? == sent, "other bytes");
    let there = traffic(&fabric, "a", "b");
    assert_eq!((there.damaged, there.doubled), (1, 100));
    // At most a window is sent again.
    assert!((1025..1024 + 256).contains(&there.sent), "{there:?}");
    Ok(())
}

#[test]
#[cfg_attr(miri, ignore = "it writes a file")]
fn a_long_queue_marks_and_a_full_one_drops() -> Result<()> {
    let network = Network::ideal().bandwidth(1_000_000_000).marks_above(20_000).queue_bytes(60_000);
    let fabric = builder(1).network(network).build()?;
    let path = std::env::temp_dir().join(format!("uverbs-network-{}.pcap", std::process::id()));
    fabric.capture(std::fs::File::create_new(&path)?)?;
    let (mut a, b) = sides(&fabric, QpType::RC)?;
    a.write(&b, 1, 200_000)?;
    assert_eq!(a.wait(&fabric)?.1, WcStatus::SUCCESS);
    let capture = std::fs::read(&path)?;
    std::fs::remove_file(&path)?;
    let there = traffic(&fabric, "a", "b");
    assert!(there.marked > 10 && there.dropped > 10, "{there:?}");
    assert_eq!(there.arrived, there.sent - there.dropped);
    assert_eq!(traffic(&fabric, "b", "a").marked, 0);
    // Type of service of each frame, with FECN of its BTH.
    let (mut rest, mut marks) = (&capture[24..], [0; 2]);
    while let Some((header, behind)) = rest.split_first_chunk::<16>() {
        let [.., a, b, c, d] = *header;
        let (frame, behind) = behind.split_at(u32::from_le_bytes([a, b, c, d]) as usize);
        match (frame[15], frame[14 + 20 + 8 + 4] & 0x80) {
            (0b10, 0) => marks[0] += 1,
            (0b11, 0x80) => marks[1] += 1,
            other => return Err(format!("ECN and FECN {other:x?}").into()),
        }
        rest = behind;
    }
    assert_eq!(marks[1], there.marked);
    assert!(marks[0] > 0);
    Ok(())
}

fn seeds() -> std::ops::Range<u64> {
    let text = std::env::var("UVERBS_NETWORK_SEEDS");
    0..text.map_or(100, |text| text.parse().expect("a number of seeds"))
}

/// Requests of each side in a hostile run.
const REQUESTS: u64 = 12;
/// Bytes of the place of each: sends go to the first, writes to the second, reads come from the third quarter.
const PLACE: usize = 8192;
const QUARTER: usize = MEMORY / 4;
const COUNTER: usize = 3 * QUARTER;
const RECEIVED: u64 = 1000;

/// The bytes of request `id` of side `side`.
fn pattern(side: usize, id: u64) -> Vec<u8> {
    let len = [1, 700, 1024, 3000, 8000][(id as usize + side) % 5];
    (0..len).map(|at| (at as u64 * 31 + id * 7 + side as u64 * 101) as u8).collect()
}

/// Both sides send, write, read and add over one connection. Each request ends once, in order and with its effect, or the
/// connection has failed with its retries.
fn requests_end_once_and_in_order(seed: u64, builder: FabricBuilder) -> Result<Traffic> {
    let fabric = builder.network(Network::of_seed(seed)).build()?;
    let (a, b) = sides(&fabric, QpType::RC)?;
    let mut sides = [a, b];
    for (side, end) in sides.iter_mut().enumerate() {
        for id in 0..REQUESTS {
            end.recv(RECEIVED + id, id as usize * PLACE, PLACE)?;
            end.memory.copy_from(2 * QUARTER + id as usize * PLACE, &pattern(side, id))?;
        }
    }
    for id in 0..REQUESTS {
        for side in 0..2 {
            let (remote_write, remote_read, counter) = {
                let peer = &sides[1 - side].memory;
                let place = id as usize * PLACE;
                (
                    peer.remote(QUARTER + place)?,
                    peer.remote(2 * QUARTER + place)?,
                    peer.remote(COUNTER)?,
                )
            };
            let end = &mut sides[side];
            let source = 2 * QUARTER + id as usize * PLACE;
            let sent = [end.memory.sge(source..source + pattern(side, id).len())?];
            let sink = COUNTER + PLACE + id as usize * PLACE;
            let len = pattern(1 - side, id).len();
            let read = [end.memory.sge(sink..sink + len)?];
            let word = [end.memory.sge(sink..sink + 8)?];
            end.post(match id % 4 {
                0 => SendWr::send(&sent).id(id),
                1 => SendWr::write(remote_write, &sent).id(id),
                2 => SendWr::read(remote_read, &read).id(id),
                _ => SendWr::fetch_add(counter, 1, &word).id(id),
            })?;
        }
    }
    let (mut next, mut received, mut broken) = ([0; 2], [0; 2], false);
    let mut check = |sides: &mut [Side; 2]| -> Result<()> {
        for side in 0..2 {
            for (id, status, _) in sides[side].poll()? {
                let failed = status != WcStatus::SUCCESS;
                let known = matches!(status, WcStatus::RETRY_EXC_ERR | WcStatus::WR_FLUSH_ERR);
                if failed && !known {
                    return Err(format!("side {side}: request {id} ends with {status}").into());
                }
                broken |= failed;
                if id >= RECEIVED {
                    let from = 4 * received[side];
                    if failed {
                        continue;
                    }
                    if id - RECEIVED != received[side] {
                        return Err(format!("side {side}: receive {id} is not the next").into());
                    }
                    received[side] += 1;
                    let sent = pattern(1 - side, from);
                    let got = sides[side].bytes((id - RECEIVED) as usize * PLACE, sent.len())?;
                    if got != sent {
                        return Err(format!("side {side}: receive {id} has other bytes").into());
                    }
                    continue;
                }
                if id != next[side] {
                    return Err(format!("side {side}: {id} ends in place of {}", next[side]).into());
                }
                next[side] += 1;
                if failed {
                    continue;
                }
                let sink = COUNTER + PLACE + id as usize * PLACE;
                let (got, expected) = match id % 4 {
                    1 => {
                        let sent = pattern(side, id);
                        let place = QUARTER + id as usize * PLACE;
                        (sides[1 - side].bytes(place, sent.len())?, sent)
                    }
                    2 => {
                        let there = pattern(1 - side, id);
                        (sides[side].bytes(sink, there.len())?, there)
                    }
                    3 => (sides[side].bytes(sink, 8)?, (id / 4).to_ne_bytes().to_vec()),
                    _ => continue,
                };
                if got != expected {
                    return Err(format!("side {side}: request {id} has not had its effect").into());
                }
            }
        }
        Ok(())
    };
    loop {
        check(&mut sides)?;
        if !fabric.step() && !fabric.advance() {
            break;
        }
    }
    check(&mut sides)?;
    if next != [REQUESTS; 2] {
        return Err(format!("only {next:?} requests ended").into());
    }
    if !broken && received != [REQUESTS / 4; 2] {
        return Err(format!("{received:?} messages were received").into());
    }
    Ok(traffic(&fabric, "a", "b"))
}

#[test]
fn requests_on_a_hostile_network_end_once_and_in_order() {
    let mut sum = Traffic::default();
    each_seed(seeds(), |seed| {
        let there = requests_end_once_and_in_order(seed, builder(seed))?;
        sum.lost += there.lost;
        sum.doubled += there.doubled;
        sum.damaged += there.damaged;
        sum.late += there.late;
        sum.dropped += there.dropped;
        Ok::<_, Box<dyn std::error::Error + Send + Sync>>(())
    });
    let Traffic { lost, doubled, damaged, late, dropped, .. } = sum;
    assert!([lost, doubled, damaged, late, dropped].into_iter().all(|count| count > 0), "{sum:?}");
}

#[test]
fn requests_over_infiniband_end_once_and_in_order() {
    // The hostile ones.
    each_seed(0..seeds().end / 4, |seed| {
        let builder = builder_of(seed, Profile::new().infiniband());
        requests_end_once_and_in_order(4 * seed + 1, builder).map(|_| ())
    });
}

/// Messages of XRC take receives of the queue that they name, in order and each once.
#[test]
fn messages_of_xrc_take_receives_of_a_shared_queue_once_and_in_order() {
    each_seed(seeds(), |seed| -> Result<()> {
        let fabric = builder(seed).network(Network::of_seed(seed)).build()?;
        let devices = devices_on(&fabric.system());
        let mut a = Side::new(&Context::open(&devices[0])?, QpType::XRC_INI)?;
        let context = Context::open(&devices[1])?;
        let (pd, xrcd) = (context.alloc_pd()?, context.xrcd_builder().build()?);
        let memory = pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u8>(MEMORY)?;
        let mut cq = context.cq_builder(64).build()?;
        let mut srq = pd.srq_builder(32).xrc(&xrcd, &cq).build()?;
        let target = xrcd.create_target()?;
        let gid = context.default_gid(1)?;
        let options = Handshake::new().timeout(8);
        let (at_a, at_b) = (endpoint(&a.qp)?, target.endpoint(&gid)?);
        a.qp.handshake(&at_b, &options)?;
        target.handshake(&at_a, &options)?;
        for id in 0..REQUESTS {
            let place = id as usize * PLACE;
            let sges = [memory.sge(place..place + PLACE)?];
            let mut batch = srq.batch()?;
            batch.push(RecvWr::new(&sges).id(id))?;
            // SAFETY: the memory is dropped after the queue, and read after the completion.
            unsafe { batch.ring()? };
            a.memory.copy_from(place, &pattern(0, id))?;
            let sges = [a.memory.sge(place..place + pattern(0, id).len())?];
            let number = srq.number().ok_or("it is of XRC")?;
            a.post(SendWr::send(&sges).id(id).to_srq(number))?;
        }
        settle(&fabric);
        let ended = a.poll()?;
        let broken = ended.iter().any(|(_, status, _)| *status == WcStatus::RETRY_EXC_ERR);
        assert!(ended.iter().map(|(id, ..)| *id).eq(0..REQUESTS), "{ended:?}");
        let done = ended.iter().filter(|(_, status, _)| *status == WcStatus::SUCCESS).count();
        let (mut completions, mut received) = (cq.poll()?, 0);
        while let Some(completion) = completions.next() {
            let sent = pattern(0, received);
            let mut got = vec![0; sent.len()];
            memory.copy_to(received as usize * PLACE, &mut got)?;
            assert_eq!((completion.wr_id(), completion.status()), (received, WcStatus::SUCCESS));
            assert!(got == sent, "message {received} has other bytes");
            received += 1;
        }
        assert!(received as usize >= done && (broken || done as u64 == REQUESTS));
        Ok(())
    });
}

/// Moves a datagram queue pair to RTS.
fn start(side: &Side) -> Result<()> {
    let init = QpAttr::new().state(QpState::INIT).port(1).pkey_index(0).qkey(QKEY);
    side.qp.modify(&init)?;
    side.qp.modify(&QpAttr::new().state(QpState::RTR))?;
    side.qp.modify(&QpAttr::new().state(QpState::RTS).sq_psn(Psn(0)))?;
    Ok(())
}

const QKEY: Qkey = Qkey(0x1234);
/// The global route header in front of a datagram.
const GRH: usize = 40;

#[test]
fn datagrams_are_lost_or_doubled_and_never_altered() {
    let mut sum = (0, 0);
    each_seed(seeds(), |seed| -> Result<()> {
        let fabric = builder(seed).network(Network::of_seed(1 + 4 * seed)).build()?;
        let devices = devices_on(&fabric.system());
        let side = |at: usize| Side::new(&Context::open(&devices[at])?, QpType::UD);
        let (mut a, mut b) = (side(0)?, side(1)?);
        start(&a)?;
        start(&b)?;
        let (own, there) = (a.qp.context().default_gid(1)?, b.qp.context().default_gid(1)?);
        let ah = a.pd.create_ah(&AddressVector::global(1, own.index, there.gid))?;
        let datagram = |id: u64| -> Vec<u8> { pattern(0, id).into_iter().take(1024).collect() };
        for id in 0..2 * REQUESTS {
            b.recv(RECEIVED + id, id as usize * PLACE, PLACE)?;
        }
        for id in 0..REQUESTS {
            let place = id as usize * PLACE;
            a.memory.copy_from(place, &datagram(id))?;
            let sges = [a.memory.sge(place..place + datagram(id).len())?];
            a.post(SendWr::send(&sges).to(Destination::new(&ah, b.qp.qpn(), QKEY)).id(id))?;
        }
        settle(&fabric);
        let sent: Vec<_> = (0..REQUESTS).map(datagram).collect();
        let mut times = [0; REQUESTS as usize];
        for (id, status, _) in b.poll()? {
            assert_eq!(status, WcStatus::SUCCESS);
            let got = b.bytes((id - RECEIVED) as usize * PLACE + GRH, 1024)?;
            // The longest one that it begins with: each begins with another byte.
            let is = sent.iter().position(|sent| got.starts_with(sent));
            times[is.ok_or("a datagram that was not sent")?] += 1;
        }
        assert!(times.iter().all(|times| *times <= 2), "{times:?}");
        sum.0 += times.iter().filter(|times| **times == 0).count();
        sum.1 += times.iter().filter(|times| **times == 2).count();
        Ok(())
    });
    assert!(sum.0 > 0 && sum.1 > 0, "{sum:?}");
}

/// Raw frames are no packets of the network, but a partition stops them.
#[test]
fn frames_of_raw_queue_pairs_stop_at_a_partition_only() -> Result<()> {
    let fabric = builder(1).network(Network::ideal().loss(1.0)).build()?;
    let devices = devices_on(&fabric.system());
    let side = |at: usize| Side::new(&Context::open(&devices[at])?, QpType::RAW_PACKET);
    let (mut a, mut b) = (side(0)?, side(1)?);
    for side in [&a, &b] {
        side.qp.modify(&QpAttr::new().state(QpState::INIT).port(1))?;
        side.qp.modify(&QpAttr::new().state(QpState::RTR))?;
        side.qp.modify(&QpAttr::new().state(QpState::RTS))?;
    }
    // The first GID is made of the hardware address.
    let gid = b.qp.context().query_gid(1, 0)?.gid.0;
    let mac = [gid[8] ^ 2, gid[9], gid[10], gid[13], gid[14], gid[15]];
    let _rule = b.qp.create_flow(&FlowAttr::new(1).spec(FlowEth::new().dst_mac(mac)))?;
    let frame = [&mac[..], &[2, 0, 0, 0, 0, 9, 0x88, 0xb5], &[7; 50]].concat();
    a.memory.copy_from(0, &frame)?;
    for (id, parted) in [(0, true), (1, false)] {
        match parted {
            true => fabric.partition([&fabric.device("a").expect("it is there")]),
            false => fabric.heal(),
        }
        b.recv(RECEIVED + id, 0, 2048)?;
        a.post(SendWr::send(&[a.memory.sge(..frame.len())?]).id(id))?;
        settle(&fabric);
        assert_eq!(a.poll()?, [(id, WcStatus::SUCCESS, WcOpcode::SEND)]);
        let got = b.poll()?.iter().map(|(id, status, _)| (*id, *status)).collect::<Vec<_>>();
        let first = (RECEIVED, WcStatus::SUCCESS);
        assert_eq!(got, if parted { vec![] } else { vec![first] });
    }
    assert_eq!(b.bytes(0, frame.len())?, frame);
    assert_eq!(traffic(&fabric, "a", "b").sent, 0);
    Ok(())
}

#[test]
fn data_that_reaches_memory_in_any_order_is_there_when_it_is_promised() {
    each_seed(seeds(), |seed| {
        let builder = builder(seed).writes_in_any_order();
        requests_end_once_and_in_order(seed, builder).map(|_| ())
    });
}

#[test]
fn an_unreliable_connection_delivers_whole_messages_at_most_once() {
    each_seed(seeds(), |seed| -> Result<()> {
        let fabric = builder(seed).network(Network::of_seed(1 + 4 * seed)).build()?;
        let (mut a, mut b) = sides(&fabric, QpType::UC)?;
        for id in 0..REQUESTS {
            b.recv(RECEIVED + id, id as usize * PLACE, PLACE)?;
            a.memory.copy_from(id as usize * PLACE, &pattern(0, id))?;
        }
        for id in 0..REQUESTS {
            let place = id as usize * PLACE;
            let sges = [a.memory.sge(place..place + pattern(0, id).len())?];
            a.post(SendWr::send_imm(&sges, id as u32).id(id))?;
        }
        settle(&fabric);
        let sent: Vec<_> = (0..REQUESTS).map(|id| pattern(0, id)).collect();
        let mut last = None;
        for (id, status, _) in b.poll()? {
            assert_eq!(status, WcStatus::SUCCESS);
            let got = b.bytes((id - RECEIVED) as usize * PLACE, PLACE)?;
            let whole = |at: &usize| got.starts_with(&sent[*at]) && last < Some(*at);
            last = Some((0..sent.len()).find(whole).ok_or("a message that was not sent next")?);
        }
        Ok(())
    });
}

#[test]
fn a_direction_that_is_cut_off_loses_acks_and_no_data() -> Result<()> {
    let fabric = builder(1).history().build()?;
    let (mut a, b) = sides(&fabric, QpType::RC)?;
    let [at_a, at_b] = ["a", "b"].map(|name| fabric.device(name).expect("it is there"));
    a.memory.copy_from(0, b"data")?;
    at_b.cut_off(&at_a);
    a.write(&b, 1, 4)?;
    assert_eq!(a.wait(&fabric)?.1, WcStatus::RETRY_EXC_ERR);
    assert_eq!(b.bytes(0, 4)?, b"data");
    assert!(at_b.traffic_to(&at_a).lost > 0 && at_a.traffic_to(&at_b).lost == 0);
    let history = fabric.history();
    assert!(history.contains("the network to a is cut"));
    let lost = |line: &str| line.contains(": acknowledge ") && line.ends_with(" is lost");
    assert!(history.lines().any(lost), "{history}");
    Ok(())
}

#[test]
fn a_partition_stops_those_on_its_sides_until_it_heals() -> Result<()> {
    let fabric = builder(1).history().build()?;
    let (mut a, b) = sides(&fabric, QpType::RC)?;
    let devices = devices_on(&fabric.system());
    let mut c = Side::new(&Context::open(&devices[2])?, QpType::RC)?;
    let mut beside_b = Side::new(&Context::open(&devices[1])?, QpType::RC)?;
    connect(&c.qp, &beside_b.qp)?;
    fabric.partition([&fabric.device("a").expect("it is there")]);
    a.write(&b, 1, 4)?;
    c.write(&beside_b, 2, 4)?;
    assert_eq!(c.wait(&fabric)?.1, WcStatus::SUCCESS);
    assert_eq!(a.poll()?, []);
    fabric.heal();
    let history = fabric.history();
    assert!(history.contains("b: fault: partition: a"), "{history}");
    assert!(history.contains("b: fault: the network is whole"), "{history}");
    assert_eq!(a.wait(&fabric)?.1, WcStatus::SUCCESS);
    assert!(traffic(&fabric, "a", "b").lost > 0);
    assert_eq!(traffic(&fabric, "c", "b").lost, 0);
    beside_b.write(&c, 3, 4)?;
    assert_eq!(beside_b.wait(&fabric)?.1, WcStatus::SUCCESS);
    Ok(())
}

/// A datagram to a group goes each way to a member by itself, and to a device without members not at all.
#[test]
fn a_datagram_to_a_group_meets_the_network_of_each_member() -> Result<()> {
    let fabric = builder(1).network(Network::ideal().duplication(1.0)).build()?;
    let devices = devices_on(&fabric.system());
    let mut sides = Vec::new();
    for device in &devices {
        let side = Side::new(&Context::open(device)?, QpType::UD)?;
        start(&side)?;
        sides.push(side);
    }
    let group = Gid::from(std::net::Ipv4Addr::new(239, 9, 9, 1));
    let members = [sides[0].qp.attach_mcast(group, 0)?, sides[1].qp.attach_mcast(group, 0)?];
    for side in &mut sides {
        (0..3).try_for_each(|at| side.recv(RECEIVED + at, 1000 + 100 * at as usize, GRH + 8))?;
    }
    sides[0].memory.copy_from(0, b"datagram")?;
    let own = sides[0].qp.context().query_gid(1, 3)?;
    let vector = AddressVector::global(1, own.index, group);
    let ah = sides[0].pd.create_ah(&vector)?;
    let sges = [sides[0].memory.sge(..8)?];
    let to = Destination::new(&ah, Qpn(0x00ff_ffff), QKEY);
    sides[0].post(SendWr::send(&sges).to(to).id(1))?;
    settle(&fabric);
    let received: Vec<_> = sides
        .iter_mut()
        .map(|side| Ok(side.poll()?.iter().filter(|(id, ..)| *id >= RECEIVED).count()))
        .collect::<Result<_>>()?;
    // The sender's own one does not leave its device.
    assert_eq!(received, [1, 2, 0]);
    assert_eq!(sides[1].bytes(1000 + GRH, 8)?, b"datagram");
    assert_eq!((traffic(&fabric, "a", "b").sent, traffic(&fabric, "a", "c").sent), (1, 0));
    drop(members);
    Ok(())
}

/// Messages of the connection manager are no packets of the network, but a partition loses them, too.
#[test]
fn a_connection_by_address_ends_at_a_partition() -> Result<()> {
    use uverbs::cm::{Connector, EventChannel, Listener};
    const LIMIT: Duration = Duration::from_secs(10);
    for parted in [false, true] {
        let fabric = builder(1).history().build()?;
        if parted {
            fabric.partition([&fabric.device("a").expect("it is there")]);
        }
        let channel = EventChannel::open_on(&fabric.system())?;
        let listener = Listener::builder("10.0.0.2:0")?.channel(&channel).build()?;
        let connector = Connector::new(listener.local_addr()?)?.source("10.0.0.1:0".parse()?);
        let connector = connector.timeout(LIMIT).channel(&EventChannel::open_on(&fabric.system())?);
        let connected = connector.connect(|route| {
            let (context, pd) = (route.context()?, route.context()?.alloc_pd()?);
            let cq = context.cq_builder(4).build()?;
            pd.qp_builder(&cq, &cq, QpType::RC).build()
        });
        // Nobody accepts.
        assert_eq!(connected.map(drop).unwrap_err().errno(), uverbs::Errno::TIMEDOUT);
        let history = fabric.history();
        assert_eq!(history.contains("fault: partition: a"), parted);
        let lost = |line: &str| line.contains(" REQ ") && line.ends_with("is lost");
        assert_eq!(history.lines().any(lost), parted, "{history}");
    }
    Ok(())
}

#[test]
fn a_network_changes_while_it_runs_and_shares_are_checked() -> Result<()> {
    let fabric = builder(1).build()?;
    let (mut a, b) = sides(&fabric, QpType::RC)?;
    let [at_a, at_b] = ["a", "b"].map(|name| fabric.device(name).expect("it is there"));
    fabric.set_network(Network::ideal().duplication(1.0))?;
    a.write(&b, 1, 4)?;
    assert_eq!(a.wait(&fabric)?.1, WcStatus::SUCCESS);
    settle(&fabric);
    let doubled = at_a.traffic_to(&at_b);
    assert_eq!((doubled.sent, doubled.arrived), (1, 2));
    at_a.set_network_to(&at_b, Network::ideal().loss(1.0))?;
    a.write(&b, 2, 4)?;
    assert_eq!(a.wait(&fabric)?.1, WcStatus::RETRY_EXC_ERR);
    let lost = at_a.traffic_to(&at_b);
    assert_eq!((lost.sent, lost.lost, lost.arrived), (8, 7, 2));
    let refused = fabric.set_network(Network::ideal().loss(1.5)).unwrap_err();
    assert_eq!(refused, FabricError::Rate("loss", "1.5".into()));
    assert!(builder(1).network(Network::ideal().reordering(-1.0, Duration::ZERO)).build().is_err());
    let stopped = builder(1).network(Network::ideal().bandwidth(0)).build();
    assert_eq!(stopped.err(), Some(FabricError::Bandwidth));
    Ok(())
}

/// The part of a write that is there when its last byte is: all, if writes are in order.
fn last_byte_comes_last(seed: u64, any_order: bool) -> Result<()> {
    const LEN: usize = 64;
    let fabric = builder(seed);
    let fabric = if any_order { fabric.writes_in_any_order() } else { fabric }.build()?;
    let (mut a, b) = sides(&fabric, QpType::RC)?;
    a.memory.copy_from(0, &[7; LEN])?;
    a.write(&b, 1, LEN)?;
    while b.bytes(LEN - 1, 1)? == [0] {
        assert!(fabric.step() || fabric.advance(), "nothing is under way");
    }
    match b.bytes(0, LEN)? == [7; LEN] {
        true => Ok(()),
        false => Err("only a part".into()),
    }
}

#[test]
fn some_seeds_find_a_program_that_polls_the_last_byte() {
    let failing = |any| (0..40).filter(|seed| last_byte_comes_last(*seed, any).is_err()).count();
    assert_eq!(failing(false), 0);
    assert!((5..40).contains(&failing(true)));
}

/// A write that was made by a queue pair is in memory before one behind it, unless the region has relaxed ordering.
#[test]
fn writes_of_a_queue_pair_are_in_order_unless_their_region_is_relaxed() {
    let ordered = |seed: u64, relaxed: bool| -> Result<bool> {
        let fabric = builder(seed).writes_in_any_order().build()?;
        let devices = devices_on(&fabric.system());
        let mut a = Side::new(&Context::open(&devices[0])?, QpType::RC)?;
        let context = Context::open(&devices[1])?;
        let pd = context.alloc_pd()?;
        let cq = context.cq_builder(4).build()?;
        let register = pd.mr_builder().access(Access::ALL_REMOTE);
        let register = if relaxed { register.relaxed_ordering() } else { register };
        let memory = register.allocate::<u64>(64)?;
        let qp = pd.qp_builder(&cq, &cq, QpType::RC).build()?;
        let sender = &mut a;
        sender.memory.copy_from(0, &[1; 64])?;
        let (record, flag) = ([sender.memory.sge(..64)?], [sender.memory.sge(..8)?]);
        connect(&sender.qp, &qp)?;
        let mut batch = sender.qp.send_batch()?;
        batch.push(SendWr::write(memory.remote(0)?, &record))?;
        batch.push(SendWr::write(memory.remote(256)?, &flag))?;
        // SAFETY: the memory is dropped after the queue pair, and not written before the end.
        unsafe { batch.ring()? };
        while memory.read_at(32) == Some(0) {
            assert!(fabric.step() || fabric.advance(), "nothing is under way");
        }
        Ok((0..8).all(|at| memory.read_at(at) != Some(0)))
    };
    let early =
        |relaxed| (0..40).filter(|seed| !ordered(*seed, relaxed).expect("a fabric")).count();
    assert_eq!(early(false), 0);
    assert!(early(true) > 0);
}

/// Two queue pairs, and a fault of the packets from `a` to `b`, or back.
fn with_fault(back: bool, fault: PacketFault) -> Result<(Fabric, Side, Side)> {
    let fabric = builder(1).history().build()?;
    let (a, b) = sides(&fabric, QpType::RC)?;
    let [from, to] = if back { ["b", "a"] } else { ["a", "b"] };
    let [from, to] = [from, to].map(|name| fabric.device(name).expect("it is there"));
    from.fault_packets(&to, fault);
    Ok((fabric, a, b))
}

/// Adds 5 to the peer's first word, and returns the old value.
fn add(fabric: &Fabric, a: &mut Side, b: &Side, id: u64) -> Result<u64> {
    let sges = [a.memory.sge(64..72)?];
    a.post(SendWr::fetch_add(b.memory.remote(0)?, 5, &sges).id(id))?;
    assert_eq!(a.wait(fabric)?, (id, WcStatus::SUCCESS, WcOpcode::FETCH_ADD));
    Ok(u64::from_ne_bytes(a.bytes(64, 8)?.try_into().expect("eight bytes")))
}

#[test]
fn a_lost_ack_has_the_request_sent_again_and_not_executed_twice() -> Result<()> {
    let (fabric, mut a, mut b) = with_fault(true, PacketFault::lose().of(PacketKind::Acknowledge))?;
    b.recv(7, 0, 64)?;
    b.recv(8, 0, 64)?;
    a.post(SendWr::send(&[a.memory.sge(..64)?]).id(1))?;
    assert_eq!(a.wait(&fabric)?, (1, WcStatus::SUCCESS, WcOpcode::SEND));
    assert_eq!(b.poll()?, [(7, WcStatus::SUCCESS, WcOpcode::RECV)]);
    assert!(fabric.now() >= Duration::from_millis(1), "no timeout: {:?}", fabric.now());
    assert_eq!(traffic(&fabric, "a", "b").sent, 2);
    // Two of the responses: the value is kept, so that the word is changed once.
    let lose = PacketFault::lose().of(PacketKind::Response).after(1).count(2);
    let (fabric, mut a, b) = with_fault(true, lose)?;
    assert_eq!([add(&fabric, &mut a, &b, 1)?, add(&fabric, &mut a, &b, 2)?], [0, 5]);
    assert_eq!(add(&fabric, &mut a, &b, 3)?, 10);
    assert_eq!((traffic(&fabric, "b", "a").lost, traffic(&fabric, "a", "b").sent), (2, 5));
    let history = fabric.history();
    let lost = |line: &&str| line.contains("atomic acknowledge") && line.contains("is lost");
    assert_eq!(history.lines().filter(lost).count(), 2, "{history}");
    let told = "the network to a loses 2 of the responses, after 1";
    assert!(history.contains(told), "{history}");
    Ok(())
}

#[test]
fn a_doubled_request_and_a_damaged_response_leave_no_trace() -> Result<()> {
    let (fabric, mut a, b) = with_fault(false, PacketFault::double().of(PacketKind::Request))?;
    assert_eq!([add(&fabric, &mut a, &b, 1)?, add(&fabric, &mut a, &b, 2)?], [0, 5]);
    settle(&fabric);
    assert_eq!((traffic(&fabric, "a", "b").doubled, traffic(&fabric, "a", "b").arrived), (1, 3));
    let (fabric, mut a, mut b) = with_fault(true, PacketFault::damage().of(PacketKind::Response))?;
    a.memory.copy_from(0, &[9; 64])?;
    b.memory.copy_from(0, &pattern(1, 3)[..64])?;
    a.post(SendWr::read(b.memory.remote(0)?, &[a.memory.sge(..64)?]).id(1))?;
    assert_eq!(a.wait(&fabric)?, (1, WcStatus::SUCCESS, WcOpcode::READ));
    assert_eq!(a.bytes(0, 64)?, pattern(1, 3)[..64]);
    let there = traffic(&fabric, "b", "a");
    assert_eq!((there.damaged, there.arrived), (1, 1));
    Ok(())
}

#[test]
fn a_packet_that_is_late_is_overtaken_and_one_that_is_marked_arrives() -> Result<()> {
    let late = PacketFault::delay(Duration::from_micros(300)).after(1);
    let (fabric, mut a, b) = with_fault(false, late)?;
    a.write(&b, 1, 4 * 1024)?;
    assert_eq!(a.wait(&fabric)?, (1, WcStatus::SUCCESS, WcOpcode::WRITE));
    assert!(fabric.now() < Duration::from_micros(300), "{:?}", fabric.now());
    settle(&fabric);
    let there = traffic(&fabric, "a", "b");
    // The third one shows that the second one is missing, and three are sent again.
    assert_eq!((there.late, there.sent, there.arrived), (1, 7, 7));
    let (fabric, mut a, b) = with_fault(false, PacketFault::mark())?;
    a.write(&b, 1, 8)?;
    assert_eq!(a.wait(&fabric)?, (1, WcStatus::SUCCESS, WcOpcode::WRITE));
    assert_eq!(traffic(&fabric, "a", "b").marked, 1);
    assert!(fabric.history().contains("is marked"), "{}", fabric.history());
    Ok(())
}
