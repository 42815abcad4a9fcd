//! Devices that speak RoCE v2 over UDP sockets: in two fabrics of this process, in two processes, and with peers that
//! nobody vouches for.
//!
//! Each test has addresses of its own in 127.0.0.0/8. A second process is this program again, with its orders in the
//! environment; both exchange their endpoints over TCP.

use nix::libc;
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};
use uverbs::device::devices_on;
use uverbs::{
    Access, CompletionChannel, CompletionQueue, Context, Destination, Endpoint, Gid, Handshake,
    MemoryRegion, Mtu, Notify, ProtectionDomain, QpType, QueuePair, RecvWr, Remote, Rkey, SendWr,
    WcStatus,
};
use uverbs_sim::{Fabric, FabricError, Network, Profile, UdpCounters};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// Not that of RoCE, which soft-RoCE may have.
const PORT: u16 = 14_791;
/// Bytes of memory of each side.
const MEMORY: usize = 4 << 20;
/// How long anything may take on a machine that is busy.
const LIMIT: Duration = Duration::from_secs(20);
/// Ids of receives.
const RECEIVED: u64 = 1 << 32;

/// An address that no other test has.
fn address() -> SocketAddr {
    static NEXT: AtomicU8 = AtomicU8::new(1);
    let [_, _, high, low] = std::process::id().to_be_bytes();
    let at = Ipv4Addr::new(127, 64 | high & 63, low, NEXT.fetch_add(1, Ordering::Relaxed));
    SocketAddr::new(at.into(), PORT)
}

/// A device over UDP, with a queue pair. Fields are dropped in this order.
struct Side {
    qp: QueuePair,
    memory: MemoryRegion<u8>,
    cq: CompletionQueue,
    channel: CompletionChannel,
    pd: ProtectionDomain,
    context: Context,
    fabric: Fabric,
    at: SocketAddr,
}

/// A completion: its request, its status, its bytes, and its immediate data.
type Ended = (u64, WcStatus, u32, Option<u32>);

impl Side {
    fn new(at: SocketAddr, kind: QpType, network: Option<Network>) -> Result<Side> {
        let mut builder = Fabric::builder().udp(at);
        if let Some(network) = network {
            builder = builder.network(network);
        }
        Side::on(builder.build()?, at, kind)
    }

    fn on(fabric: Fabric, at: SocketAddr, kind: QpType) -> Result<Side> {
        let [device] = &devices_on(&fabric.system())[..] else { return Err("one device".into()) };
        let context = Context::open(device)?;
        let pd = context.alloc_pd()?;
        let channel = context.create_comp_channel()?;
        let cq = context.cq_builder(256).channel(&channel).build()?;
        let memory = pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u8>(MEMORY)?;
        let qp = pd.qp_builder(&cq, &cq, kind).max_send_wr(64).max_recv_wr(64).build()?;
        Ok(Side { qp, memory, cq, channel, pd, context, fabric, at })
    }

    fn endpoint(&self) -> Result<Endpoint> {
        Ok(self.qp.endpoint(&self.context.default_gid(1)?)?)
    }

    fn recv(&mut self, id: u64, at: usize, len: usize) -> Result<()> {
        let sges = [self.memory.sge(at..at + len)?];
        let mut batch = self.qp.recv_batch()?;
        batch.push(RecvWr::new(&sges).id(RECEIVED + id))?;
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

    /// Waits for the next completion, by events.
    fn wait(&mut self) -> Result<Ended> {
        let end = Instant::now() + LIMIT;
        loop {
            for _ in 0..2 {
                let mut completions = self.cq.poll()?;
                if let Some(completion) = completions.next() {
                    let done = completion.ok().ok();
                    return Ok((
                        completion.wr_id(),
                        completion.status(),
                        done.map_or(0, |done| done.byte_len()),
                        done.and_then(|done| done.imm()),
                    ));
                }
                drop(completions);
                self.cq.req_notify(Notify::Next)?;
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(
                    format!("nothing completes at {}: {:?}", self.at, self.counters()).into()
                );
            }
            self.channel.wait(Some(left))?;
        }
    }

    /// Waits for the completion of a request, which has to succeed.
    fn done(&mut self, id: u64) -> Result<Ended> {
        let ended = self.wait()?;
        assert_eq!((ended.0, ended.1), (id, WcStatus::SUCCESS), "{ended:?}");
        Ok(ended)
    }

    fn bytes(&self, at: usize, len: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0; len];
        self.memory.copy_to(at, &mut bytes)?;
        Ok(bytes)
    }

    fn counters(&self) -> UdpCounters {
        self.fabric.udp_counters().expect("it is over UDP")
    }
}

/// With 134 milliseconds for an acknowledgement, seven times, before a peer counts as gone: the threads and the
/// second process of a busy machine may all wait that long for a processor.
fn handshake() -> Handshake {
    Handshake::new().timeout(15)
}

/// Two devices, whose queue pairs are connected.
fn pair(kind: QpType, network: Option<Network>) -> Result<(Side, Side)> {
    let (a, b, _) = pair_from(kind, network)?;
    Ok((a, b))
}

/// As [`pair`], with the endpoint of the first one: another call of it would draw another PSN.
fn pair_from(kind: QpType, network: Option<Network>) -> Result<(Side, Side, Endpoint)> {
    let side = || Side::new(address(), kind, network.clone());
    let (a, b) = (side()?, side()?);
    let (at_a, at_b) = (a.endpoint()?, b.endpoint()?);
    a.qp.handshake(&at_b, &handshake())?;
    b.qp.handshake(&at_a, &handshake())?;
    Ok((a, b, at_a))
}

fn pattern(len: usize, salt: u64) -> Vec<u8> {
    (0..len).map(|at| (at as u64 * 7 + (at as u64 >> 8) * 13 + salt * 31) as u8).collect()
}

/// Sends, writes, reads and counts, there and back.
fn exchange(a: &mut Side, b: &mut Side, len: usize) -> Result<()> {
    const HALF: usize = MEMORY / 2;
    let sent = pattern(len, 1);
    a.memory.copy_from(0, &sent)?;
    let (all, word) = ([a.memory.sge(..len)?], [a.memory.sge(HALF..HALF + 8)?]);

    b.recv(1, HALF, len)?;
    a.post(SendWr::send(&all).id(1))?;
    a.done(1)?;
    assert_eq!(b.done(RECEIVED + 1)?.2 as usize, len);
    assert_eq!(b.bytes(HALF, len)?, sent);

    b.recv(2, HALF, 0)?;
    a.post(SendWr::write_imm(b.memory.remote(0)?, &all, 0x1234_5678).id(2))?;
    a.done(2)?;
    assert_eq!(b.done(RECEIVED + 2)?.3, Some(0x1234_5678));
    assert_eq!(b.bytes(0, len)?, sent);

    let there = pattern(len, 2);
    b.memory.copy_from(0, &there)?;
    a.post(SendWr::read(b.memory.remote(0)?, &all).id(3))?;
    a.done(3)?;
    assert_eq!(a.bytes(0, len)?, there);

    b.memory.copy_from(0, &100u64.to_ne_bytes())?;
    a.post(SendWr::fetch_add(b.memory.remote(0)?, 11, &word).id(4))?;
    a.post(SendWr::compare_swap(b.memory.remote(0)?, 111, 7, &word).id(5))?;
    a.done(4)?;
    a.done(5)?;
    assert_eq!(a.bytes(HALF, 8)?, 111u64.to_ne_bytes());
    assert_eq!(b.bytes(0, 8)?, 7u64.to_ne_bytes());
    Ok(())
}

#[test]
fn each_operation_reaches_a_peer_over_the_socket() -> Result<()> {
    let (mut a, mut b) = pair(QpType::RC, None)?;
    for len in [1, 5000, 100_000] {
        exchange(&mut a, &mut b, len)?;
        exchange(&mut b, &mut a, len)?;
    }
    // The loopback interface takes the longest packets.
    assert_eq!(a.context.query_port(1)?.active_mtu, Mtu::MTU_4096);
    // A machine that stands still makes an ACK come twice.
    let dropped = |side: &Side| side.counters().dropped() - side.counters().psn;
    assert_eq!((dropped(&a), dropped(&b)), (0, 0));
    assert_eq!(a.context.default_gid(1)?.gid.ip(), a.at.ip());
    Ok(())
}

/// No other device knows the packets of a masked atomic: it fails at once, and not when all retries are lost.
#[test]
fn a_masked_atomic_fails_here() -> Result<()> {
    let (mut a, b) = pair(QpType::RC, None)?;
    let word = [a.memory.sge(..8)?];
    let sent = a.counters().sent;
    a.post(SendWr::masked_fetch_add(b.memory.remote(0)?, 1, 0, &word).id(1))?;
    assert_eq!(a.wait()?.1, WcStatus::LOC_QP_OP_ERR);
    assert_eq!(a.counters().sent, sent);
    Ok(())
}

/// 16 of 1000 packets are lost, and as many come twice or late.
fn hostile_network() -> Network {
    let late = Duration::from_micros(300);
    Network::ideal().loss(0.016).duplication(0.016).reordering(0.016, late).corruption(0.004)
}

#[test]
fn nothing_is_lost_on_a_network_that_loses_doubles_and_reorders() -> Result<()> {
    let (mut a, mut b) = pair(QpType::RC, Some(hostile_network()))?;
    for round in 0..4 {
        exchange(&mut a, &mut b, 300_000 + round)?;
        exchange(&mut b, &mut a, 3000)?;
    }
    Ok(())
}

/// A message of more bytes than a socket's buffer has, and a read of as many.
#[test]
fn a_long_message_and_a_long_read_keep_to_the_window() -> Result<()> {
    let (mut a, mut b) = pair(QpType::RC, None)?;
    exchange(&mut a, &mut b, MEMORY / 2)?;
    // Few packets were sent again: without a window, most of each round would be lost in the buffer.
    let packets = 3 * (MEMORY / 2 / 4096) as u64;
    let (sent, received) =
        (a.counters().sent + b.counters().sent, a.counters().received + b.counters().received);
    assert!(sent < 4 * packets, "{sent} datagrams for {packets} packets, {received} received");
    Ok(())
}

#[test]
fn unreliable_connections_and_datagrams_reach_a_peer() -> Result<()> {
    let (mut a, mut b) = pair(QpType::UC, None)?;
    a.memory.copy_from(0, &pattern(20_000, 1))?;
    let sges = [a.memory.sge(..20_000)?];
    b.recv(1, 0, 20_000)?;
    a.post(SendWr::send(&sges).id(1))?;
    a.done(1)?;
    b.done(RECEIVED + 1)?;
    assert_eq!(b.bytes(0, 20_000)?, pattern(20_000, 1));

    let (mut a, mut b) = pair(QpType::UD, None)?;
    let (own, there) = (a.endpoint()?, b.endpoint()?);
    let ah = a.pd.create_ah(&a.qp.path_to(&there)?)?;
    a.memory.copy_from(0, &pattern(1000, 1))?;
    let sges = [a.memory.sge(..1000)?];
    b.recv(1, 0, 2000)?;
    let to = |qkey| Destination::new(&ah, b.qp.qpn(), qkey);
    let wrong = to(uverbs::Qkey(there.qkey.0 ^ 1));
    let right = to(there.qkey);
    a.post(SendWr::send(&sges).to(wrong).id(1))?;
    a.post(SendWr::send_imm(&sges, 5).to(right).id(2))?;
    a.done(1)?;
    a.done(2)?;
    let ended = b.done(RECEIVED + 1)?;
    assert_eq!((ended.2 as usize, ended.3), (GRH + 1000, Some(5)));
    assert_eq!(b.bytes(GRH, 1000)?, pattern(1000, 1));
    // The IPv4 header in the GRH's last 20 bytes: the addresses of both.
    let (IpAddr::V4(from), IpAddr::V4(to)) = (a.at.ip(), b.at.ip()) else { unreachable!() };
    assert_eq!(b.bytes(32, 8)?, [from.octets(), to.octets()].concat());
    assert_eq!((b.counters().qkey, b.counters().dropped()), (1, 1));
    assert!(own.qpn.0 > 0xffff && there.qpn.0 > 0xffff, "QPNs have all 24 bits");
    Ok(())
}

#[test]
fn numbers_are_not_those_that_another_device_has() -> Result<()> {
    let numbers = |side: &Side| -> Result<_> {
        Ok((side.qp.qpn(), side.memory.remote(0)?.rkey.0 >> 8, side.endpoint()?.psn))
    };
    let (a, b) = (Side::new(address(), QpType::RC, None)?, Side::new(address(), QpType::RC, None)?);
    let (of_a, of_b) = (numbers(&a)?, numbers(&b)?);
    assert!(of_a.0 != of_b.0 && of_a.1 != of_b.1 && of_a.2 != of_b.2, "{of_a:?} {of_b:?}");
    Ok(())
}

#[test]
fn a_fabric_that_cannot_be_says_why() -> Result<()> {
    let at = address();
    let build = |at: &str| Fabric::builder().udp(at.parse().unwrap()).build().unwrap_err();
    for wrong in ["0.0.0.0:4791", "239.1.1.1:4791", "[fe80::1]:4791", "127.0.0.1:0", "[::]:4791"] {
        assert!(matches!(build(wrong), FabricError::UdpAddress(_)), "{wrong}");
    }
    // TEST-NET-1, which no interface has.
    let error = build("192.0.2.1:14791");
    assert!(error.to_string().ends_with("give the address of an interface of this machine"));
    let first = Fabric::builder().udp(at).build()?;
    let error = Fabric::builder().udp(at).build().unwrap_err().to_string();
    assert!(error.contains("another process has it"), "{error}");
    drop(first);
    // The socket is closed when the fabric is dropped.
    drop(Fabric::builder().udp(at).build()?);
    let two = Fabric::builder().device(Profile::new()).device(Profile::new()).udp(at);
    assert_eq!(two.build().unwrap_err(), FabricError::UdpDevices(2));
    assert_eq!(
        Fabric::builder().stepped(1).udp(at).build().unwrap_err(),
        FabricError::UdpIsStepped
    );
    let of = |profile| Fabric::builder().device(profile).udp(at).build().unwrap_err();
    assert_eq!(of(Profile::new().infiniband()), FabricError::UdpProfile);
    assert_eq!(of(Profile::new().address(at.ip())), FabricError::UdpProfile);
    assert_eq!(Fabric::builder().device(Profile::new()).build()?.udp_counters(), None);
    Ok(())
}

/// A sender of any datagram.
struct Stranger {
    socket: UdpSocket,
    state: u64,
}

impl Stranger {
    fn at(address: SocketAddr) -> Result<Stranger> {
        Ok(Stranger { socket: UdpSocket::bind(address)?, state: 7 })
    }

    fn random(&mut self) -> u64 {
        self.state = self.state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        self.state ^ self.state >> 29
    }

    /// Sends a packet with its ICRC, as if the IPv4 identification was this one.
    fn send(&self, packet: &[u8], identification: u16, to: SocketAddr) -> Result<()> {
        let sum = icrc(self.socket.local_addr()?, to, identification, packet);
        self.socket.send_to(&[packet, &sum].concat(), to)?;
        Ok(())
    }
}

/// The ICRC of a packet over IPv4, bit by bit.
fn icrc(from: SocketAddr, to: SocketAddr, identification: u16, packet: &[u8]) -> [u8; 4] {
    let (IpAddr::V4(source), IpAddr::V4(destination)) = (from.ip(), to.ip()) else {
        unreachable!("IPv4")
    };
    let length = packet.len() as u16 + 8 + 4;
    let mut bytes = vec![0xff; 8];
    bytes.extend([0x45, 0xff]);
    bytes.extend((length + 20).to_be_bytes());
    bytes.extend(identification.to_be_bytes());
    bytes.extend([0x40, 0, 0xff, 17, 0xff, 0xff]);
    bytes.extend(source.octets());
    bytes.extend(destination.octets());
    bytes.extend([from.port(), to.port(), length].iter().flat_map(|field| field.to_be_bytes()));
    bytes.extend([0xff, 0xff]);
    let bth = bytes.len();
    bytes.extend(packet);
    bytes.get_mut(bth + 4).into_iter().for_each(|congestion| *congestion = 0xff);
    let mut crc = u32::MAX;
    for byte in bytes {
        crc ^= u32::from(byte);
        for _ in 0..8 {
            crc = crc >> 1 ^ if crc & 1 != 0 { 0xedb8_8320 } else { 0 };
        }
    }
    (!crc).to_le_bytes()
}

/// BTH and what follows it.
fn packet(opcode: u8, pkey: u16, qpn: u32, psn: u32, rest: &[u8]) -> Vec<u8> {
    let mut bytes = vec![opcode, 0x40];
    bytes.extend(pkey.to_be_bytes());
    bytes.extend(qpn.to_be_bytes());
    bytes.extend((1 << 31 | psn).to_be_bytes());
    bytes.extend(rest);
    bytes
}

/// Waits until a device has counted so many datagrams.
fn counted(side: &Side, datagrams: u64) -> Result<UdpCounters> {
    let end = Instant::now() + LIMIT;
    loop {
        let counters = side.counters();
        match counters.received + counters.dropped() {
            all if all == datagrams => return Ok(counters),
            all if Instant::now() > end => return Err(format!("{all}: {counters:?}").into()),
            _ => std::thread::sleep(Duration::from_millis(1)),
        }
    }
}

const RC_WRITE_ONLY: u8 = 0x0a;
const RC_SEND_ONLY: u8 = 0x04;
const RC_ACK: u8 = 0x11;
const UD_SEND_ONLY: u8 = 0x64;
/// A read request of RC.
const READ_REQUEST: u8 = 0x0c;

#[test]
fn each_kind_of_foreign_packet_is_dropped_and_counted() -> Result<()> {
    let (mut a, mut b, at_a) = pair_from(QpType::RC, None)?;
    let (qpn, psn) = (b.qp.qpn().0, at_a.psn.0);
    b.memory.copy_from(0, &[7; 64])?;
    let Remote { addr, rkey: Rkey(key) } = b.memory.remote(0)?;
    let write =
        [&addr.to_be_bytes()[..], &key.to_be_bytes(), &64u32.to_be_bytes(), &[9; 64]].concat();
    let stranger = Stranger::at(address())?;
    // From the address of the peer, but another port: RoCE leaves the port of the sender open.
    let neighbour = Stranger::at(SocketAddr::new(a.at.ip(), 0))?;
    let at = b.at;

    // The right queue pair, PSN, key: and another address.
    stranger.send(&packet(RC_WRITE_ONLY, 0xffff, qpn, psn, &write), 0, at)?;
    // From the peer's address: another partition, another queue pair, another transport, a wrong ICRC.
    neighbour.send(&packet(RC_WRITE_ONLY, 0x8001, qpn, psn, &write), 0, at)?;
    neighbour.send(&packet(RC_WRITE_ONLY, 0xffff, qpn ^ 1, psn, &write), 0, at)?;
    neighbour.send(&packet(UD_SEND_ONLY, 0xffff, qpn, psn, &[0; 64]), 0, at)?;
    let mut wrong = packet(RC_WRITE_ONLY, 0xffff, qpn, psn, &write);
    wrong.extend([1, 2, 3, 4]);
    neighbour.socket.send_to(&wrong, at)?;
    // No packet at all, one byte too many, one too long, and one with an opcode that is private to a fabric.
    neighbour.socket.send_to(&[], at)?;
    neighbour.socket.send_to(&[0; 15], at)?;
    neighbour.socket.send_to(&[0; 9000], at)?;
    neighbour.send(&packet(RC_SEND_ONLY, 0xffff, qpn, psn, &[0; 5]), 0, at)?;
    neighbour.send(&packet(0x15, 0xffff, qpn, psn, &[0; 48]), 0, at)?;
    // For general services: a wrong Q_Key, and no datagram of 256 bytes.
    let deth = |qkey: u32| [&qkey.to_be_bytes()[..], &1u32.to_be_bytes(), &[0; 256]].concat();
    neighbour.send(&packet(UD_SEND_ONLY, 0xffff, 1, 0, &deth(0x8001_0001)), 0, at)?;
    neighbour.send(&packet(UD_SEND_ONLY, 0xffff, 1, 0, &deth(0x8001_0000)[..100]), 0, at)?;
    // From the device's own address.
    Stranger::at(SocketAddr::new(at.ip(), 0))?.send(
        &packet(RC_SEND_ONLY, 0xffff, qpn, psn, &[]),
        0,
        at,
    )?;

    // An ACK of nothing.
    neighbour.send(&packet(RC_ACK, 0xffff, qpn, psn, &[0, 0, 0, 0]), 0, at)?;

    let counters = counted(&b, 14)?;
    assert_eq!((counters.psn, counters.sent), (1, 0), "{counters:?}");
    let UdpCounters { source, partition, queue_pair, state, icrc, .. } = counters;
    assert_eq!((source, partition, queue_pair, state, icrc), (1, 1, 1, 1, 1), "{counters:?}");
    let UdpCounters { length, malformed, qkey, management, address, link, .. } = counters;
    assert_eq!((length, malformed, qkey, management, address), (3, 2, 1, 1, 1), "{counters:?}");
    assert_eq!((link, counters.received), (0, 0));
    assert_eq!(b.bytes(0, 64)?, [7; 64]);
    // A write from the peer's address with the right PSN, partition and key is the peer's, from any sender, and
    // whatever the identification is.
    neighbour.send(&packet(RC_WRITE_ONLY, 0xffff, qpn, psn, &write), 0x1234, at)?;
    assert_eq!(counted(&b, 15)?.received, 1);
    assert_eq!(b.bytes(0, 64)?, [9; 64]);
    // The acknowledgement went to the peer, which had sent nothing. It does not know that its PSN is used up.
    assert!(a.cq.poll()?.next().is_none() && b.cq.poll()?.next().is_none());
    Ok(())
}

/// Random datagrams of somebody who is not the peer: bytes, and headers with a right ICRC.
#[test]
fn hostile_datagrams_change_nothing_and_are_counted() -> Result<()> {
    const CASES: u64 = 6000;
    let (mut a, mut b) = pair(QpType::RC, None)?;
    exchange(&mut a, &mut b, 5000)?;
    let before = counted(&b, b.counters().received)?;
    let memory = b.bytes(0, MEMORY)?;
    let mut stranger = Stranger::at(address())?;
    let (qpn, at) = (b.qp.qpn().0, b.at);
    for case in 0..CASES {
        let len = match stranger.random() % 4 {
            0 => stranger.random() % 64,
            1 => 4 * (stranger.random() % 80),
            _ => stranger.random() % 5000,
        };
        let mut bytes: Vec<u8> = (0..len).map(|_| stranger.random() as u8).collect();
        if stranger.random() % 8 != 0 && bytes.len() >= 12 {
            // A version, a partition and a queue pair that are there, most opcodes.
            bytes[1] &= 0xf0;
            bytes[2..4].copy_from_slice(&[0xff, 0xff]);
            let to = if stranger.random() % 4 == 0 { 1 } else { qpn };
            bytes[4..8].copy_from_slice(&to.to_be_bytes());
        }
        match stranger.random() % 8 {
            0 => _ = stranger.socket.send_to(&bytes, at)?,
            _ => stranger.send(&bytes, stranger.state as u16, at)?,
        }
        if case % 32 == 31 {
            // The socket's buffer has room for these.
            counted(&b, before.received + before.dropped() + case + 1)?;
        }
    }
    let after = counted(&b, before.received + before.dropped() + CASES)
        .map_err(|error| format!("datagrams are missing: {error}"))?;
    assert_eq!(after.received, before.received, "{after:?}");
    assert!(
        [after.length, after.icrc, after.malformed, after.source, after.state]
            .iter()
            .all(|counter| *counter > 0),
        "{after:?}"
    );
    assert!(b.cq.poll()?.next().is_none());
    assert_eq!(b.bytes(0, MEMORY)?, memory, "memory has changed");
    exchange(&mut a, &mut b, 5000)?;
    exchange(&mut b, &mut a, 5000)
}

/// Somebody at the peer's address who knows the queue pair and about which PSN is next, and sends what a peer may and may
/// not send, also to the connection manager; keys are guessed. Memory does not change, nothing ends but the connection,
/// and the device goes on.
#[test]
fn a_hostile_peer_changes_no_memory_and_ends_its_connection_at_most() -> Result<()> {
    const ROUNDS: u32 = 24;
    const PACKETS: u64 = 192;
    let fabrics = [address(), address()].map(|at| (at, Fabric::builder().udp(at).build()));
    let [(at_a, a), (at_b, b)] = fabrics;
    let (fabric_a, fabric_b) = (a?, b?);
    let side = |fabric: &Fabric, at| Side::on(fabric.clone(), at, QpType::RC);
    let mut peer = Stranger::at(SocketAddr::new(at_a.ip(), 0))?;
    if let Some(seed) = std::env::var("UVERBS_UDP_SEED").ok().and_then(|seed| seed.parse().ok()) {
        peer.state = seed;
    }
    let (mut taken, mut ended) = (0, 0);
    for round in 0..ROUNDS {
        let seed = peer.state;
        let (a, mut b) = (side(&fabric_a, at_a)?, side(&fabric_b, at_b)?);
        let (endpoint_a, endpoint_b) = (a.endpoint()?, b.endpoint()?);
        a.qp.handshake(&endpoint_b, &handshake())?;
        b.qp.handshake(&endpoint_a, &handshake())?;
        b.memory.copy_from(0, &pattern(MEMORY, 5))?;
        let before = b.counters();
        // Requests of its own, whose answers a hostile peer may forge.
        let sges = [b.memory.sge(..4096)?];
        let remote = Remote { addr: 0x1000, rkey: Rkey(0x1234) };
        if round % 2 == 1 {
            b.post(SendWr::write(remote, &sges).id(1))?;
        }
        let Remote { addr, rkey: Rkey(key) } = b.memory.remote(0)?;
        for number in 1..=PACKETS {
            let random = peer.random();
            let opcode = (random % 0x18) as u8;
            let near =
                |psn: u32| psn.wrapping_add((random >> 8) as u32 % 5).wrapping_sub(1) & 0xff_ffff;
            let psn = match opcode {
                0x0d..=0x12 => near(endpoint_b.psn.0),
                _ => near(endpoint_a.psn.0),
            };
            // The right key with a wrong address, or a wrong key with the right one.
            let (at, key) = match random >> 16 & 1 {
                0 => (addr, key ^ 1 << (random >> 20 & 31)),
                _ => (addr + MEMORY as u64 - 8 + (random >> 20 & 7), key),
            };
            let length = 16 + (random >> 32 & 0xff) as u32;
            let head = [&at.to_be_bytes()[..], &key.to_be_bytes(), &length.to_be_bytes()].concat();
            let mut rest = head;
            rest.extend((0..random >> 40 & 0x3fc).map(|at| at as u8));
            if random >> 56 & 3 == 0 {
                let at = peer.random() as usize % rest.len();
                rest[at] ^= 1 << (peer.random() & 7);
            }
            match random >> 60 {
                // A connection request: a sound management datagram, with bytes that are none.
                0 => {
                    let mut mad = CONNECT_REQUEST.to_vec();
                    mad.resize(256, 0);
                    for _ in 0..peer.random() % 4 {
                        let at = peer.random() as usize % mad.len();
                        mad[at] = peer.random() as u8;
                    }
                    let deth =
                        [&0x8001_0000u32.to_be_bytes()[..], &1u32.to_be_bytes(), &mad].concat();
                    peer.send(&packet(UD_SEND_ONLY, 0xffff, 1, 0, &deth), 0, at_b)?;
                }
                _ => peer.send(&packet(opcode, 0xffff, b.qp.qpn().0, psn, &rest), 0, at_b)?,
            }
            // The socket's buffer has room for these. Answers of the other device to what it did not send come as well.
            let all = before.received + before.dropped() + number;
            let end = Instant::now() + LIMIT;
            while number % 32 == 0 && b.counters().received + b.counters().dropped() < all {
                assert!(Instant::now() < end, "seed {seed}: {:?}", b.counters());
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        assert!(b.bytes(0, MEMORY)? == pattern(MEMORY, 5), "seed {seed}: memory has changed");
        taken += b.counters().received - before.received;
        ended += u32::from(b.cq.poll()?.next().is_some());
    }
    // It has come further than the checks.
    assert!(taken > u64::from(ROUNDS) && ended > 0, "{taken} taken, {ended} ended");
    let (mut a, mut b) = (side(&fabric_a, at_a)?, side(&fabric_b, at_b)?);
    let (endpoint_a, endpoint_b) = (a.endpoint()?, b.endpoint()?);
    a.qp.handshake(&endpoint_b, &handshake())?;
    b.qp.handshake(&endpoint_a, &handshake())?;
    exchange(&mut a, &mut b, 5000)?;
    exchange(&mut b, &mut a, 5000)
}

/// A peer may ask for more than leaves at once: calls of the program come in between.
#[test]
fn a_long_read_of_a_peer_leaves_time_for_calls() -> Result<()> {
    const LONG: usize = 16 << 20;
    let (a, b, at_a) = pair_from(QpType::RC, None)?;
    let memory = b.pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u8>(LONG)?;
    let Remote { addr, rkey: Rkey(key) } = memory.remote(0)?;
    let range = [&addr.to_be_bytes()[..], &key.to_be_bytes(), &(LONG as u32).to_be_bytes()];
    let peer = Stranger::at(SocketAddr::new(a.at.ip(), 0))?;
    let before = b.counters().sent;
    let read = packet(READ_REQUEST, 0xffff, b.qp.qpn().0, at_a.psn.0, &range.concat());
    peer.send(&read, 0, b.at)?;
    let packets = (LONG / 4096) as u64;
    let (mut sent, mut calls) = (before, 0);
    let end = Instant::now() + LIMIT;
    while sent < before + packets {
        assert!(Instant::now() < end, "{:?}", b.counters());
        let now = b.counters().sent;
        calls += u32::from(now > sent);
        sent = now;
    }
    assert!(calls > 1, "all of the read was one call");
    Ok(())
}

/// The head of a connection request: base version 1, class 7 (communication management), class version 2, method Send,
/// attribute ConnectRequest.
const CONNECT_REQUEST: [u8; 24] =
    [1, 7, 2, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0x10, 0, 0, 0, 0, 0, 0];

/// The program that has waited for an event answers, and the ACK leaves with the answer, in one message of the system.
#[test]
fn an_ack_leaves_with_the_answer_and_without_one_soon_after() -> Result<()> {
    const ROUNDS: u64 = 200;
    let (mut a, mut b) = pair(QpType::RC, None)?;
    let waits = |side: &mut Side| -> Result<()> {
        // Only a message brings an event: ACKs wait in the queue until then.
        loop {
            let (id, status, ..) = side.wait()?;
            assert_eq!(status, WcStatus::SUCCESS);
            if id >= RECEIVED {
                return Ok(());
            }
        }
    };
    std::thread::scope(|scope| -> Result<()> {
        let answers = scope.spawn(|| -> Result<()> {
            for id in 0..ROUNDS {
                b.recv(id, 0, 4)?;
                waits(&mut b)?;
                let sges = [b.memory.sge(..4)?];
                b.post(SendWr::send(&sges).id(id))?;
            }
            Ok(())
        });
        for id in 0..ROUNDS {
            a.recv(id, 0, 4)?;
            let sges = [a.memory.sge(..4)?];
            a.post(SendWr::send(&sges).id(id))?;
            waits(&mut a)?;
        }
        answers.join().map_err(|_| "a panic")?
    })?;
    let counters = b.counters();
    assert!(counters.segmented > 0, "no ACK left with an answer: {counters:?}");
    // A program that is told of a message and then does nothing owes its ACK all the same.
    b.recv(ROUNDS, 0, 4)?;
    let sges = [a.memory.sge(..4)?];
    a.post(SendWr::send(&sges).id(ROUNDS))?;
    waits(&mut b)?;
    let mut acknowledged = a.wait()?;
    while acknowledged.0 != ROUNDS {
        acknowledged = a.wait()?;
    }
    assert_eq!(acknowledged.1, WcStatus::SUCCESS);
    Ok(())
}

/// A thread of the program serves the socket while it waits, and the device's thread does when it waits no more.
#[test]
fn a_device_is_served_in_waits_of_the_program_and_between_them() -> Result<()> {
    let (mut a, mut b) = pair(QpType::RC, None)?;
    b.memory.copy_from(0, &[3; 64])?;
    let there = b.memory.remote(0)?;
    for round in 0..20 {
        // It waits for nothing that comes, and is a peer meanwhile.
        std::thread::scope(|scope| -> Result<()> {
            let waits = scope.spawn(|| b.channel.wait(Some(Duration::from_millis(30))));
            let sges = [a.memory.sge(..64)?];
            for id in 0..10 {
                a.post(SendWr::read(there, &sges).id(id))?;
                a.done(id)?;
            }
            let _ = waits.join().map_err(|_| "a panic")??;
            Ok(())
        })?;
        // It does not wait.
        let sges = [a.memory.sge(..64)?];
        a.post(SendWr::read(there, &sges).id(round))?;
        a.done(round)?;
        assert_eq!(a.bytes(0, 64)?, [3; 64]);
    }
    // Several threads that wait.
    std::thread::scope(|scope| -> Result<()> {
        let channel = &b.channel;
        let waits = [30, 60, 90]
            .map(|time| scope.spawn(move || channel.wait(Some(Duration::from_millis(time)))));
        let sges = [a.memory.sge(..64)?];
        for id in 0..200 {
            a.post(SendWr::read(there, &sges).id(id))?;
            a.done(id)?;
        }
        for wait in waits {
            let _ = wait.join().map_err(|_| "a panic")??;
        }
        Ok(())
    })
}

/// A program reads its events late: those that the channel's file had no room for come while it waits.
#[test]
fn events_beyond_the_room_of_their_file_reach_a_program_that_waits() -> Result<()> {
    const EVENTS: u64 = 600;
    let (mut a, mut b) = pair(QpType::RC, None)?;
    for id in 0..EVENTS {
        b.cq.req_notify(Notify::Next)?;
        b.recv(id, 0, 4)?;
        let sges = [a.memory.sge(..4)?];
        a.post(SendWr::send(&sges).id(id))?;
        a.done(id)?;
        let end = Instant::now() + LIMIT;
        while b.cq.poll()?.next().is_none() {
            assert!(Instant::now() < end, "message {id} does not come");
            std::thread::yield_now();
        }
    }
    for event in 0..EVENTS {
        assert!(b.channel.wait(Some(LIMIT))?.is_some(), "{event} of {EVENTS} events came");
    }
    Ok(())
}

/// Nothing wakes the device's thread while nothing happens, whether the program waits or not.
#[test]
fn the_thread_of_an_idle_device_sleeps() -> Result<()> {
    /// How often threads of fabrics of this process have woken.
    fn wakes() -> Result<u64> {
        let mut wakes = 0;
        for task in std::fs::read_dir("/proc/self/task")? {
            let task = task?.path();
            // One that ends while it is looked at is none.
            let of = |file| std::fs::read_to_string(task.join(file)).unwrap_or_default();
            let (name, status) = (of("comm"), of("status"));
            let line = status.lines().find(|line| line.starts_with("voluntary_ctxt_switches"));
            let count = line.and_then(|line| line.split_whitespace().nth(1)).unwrap_or("0");
            wakes += if name.trim() == "uverbs-sim" { count.parse::<u64>()? } else { 0 };
        }
        Ok(wakes)
    }
    if !is_alone("the_thread_of_an_idle_device_sleeps")? {
        return Ok(());
    }
    const IDLE: Duration = Duration::from_secs(1);
    let (mut a, mut b) = pair(QpType::RC, None)?;
    let (sges, there) = ([a.memory.sge(..64)?], b.memory.remote(0)?);
    let woken = std::thread::scope(|scope| -> Result<u64> {
        let waits = scope.spawn(|| b.channel.wait(Some(IDLE + Duration::from_millis(300))));
        // The wait has begun, and is what serves the read.
        std::thread::sleep(Duration::from_millis(100));
        a.post(SendWr::read(there, &sges).id(1))?;
        a.done(1)?;
        let before = wakes()?;
        std::thread::sleep(IDLE);
        let woken = wakes()? - before;
        let _ = waits.join().map_err(|_| "a panic")??;
        Ok(woken)
    })?;
    // A thread that stands by looks a few times before it sleeps.
    assert!(woken <= 60, "woken {woken} times while the program waited for a second");
    exchange(&mut a, &mut b, 100)?;
    // Timers of the exchange are over then.
    std::thread::sleep(IDLE / 2);
    let before = wakes()?;
    std::thread::sleep(IDLE);
    let woken = wakes()? - before;
    assert!(woken <= 20, "woken {woken} times in an idle second");
    Ok(())
}

/// All operations and a connection's trains over IPv6, and datagrams without a UDP checksum, as soft-RoCE sends them.
#[test]
fn devices_with_addresses_of_ipv6_reach_each_other() -> Result<()> {
    in_a_namespace(|| {
        let [at_a, at_b] = ["[fd00::1]:14791", "[fd00::2]:14791"].map(|at| at.parse());
        let (mut a, mut b) =
            (Side::new(at_a?, QpType::RC, None)?, Side::new(at_b?, QpType::RC, None)?);
        let (endpoint_a, endpoint_b) = (a.endpoint()?, b.endpoint()?);
        a.qp.handshake(&endpoint_b, &handshake())?;
        b.qp.handshake(&endpoint_a, &handshake())?;
        for len in [0, 1, 5000, 1 << 20] {
            exchange(&mut a, &mut b, len)?;
        }
        assert_eq!((a.counters().icrc, b.counters().icrc), (0, 0));
        let stranger = UdpSocket::bind("[fd00::1]:0")?;
        nix::sys::socket::setsockopt(&stranger, SentWithoutChecksum, &true)?;
        stranger.send_to(&[0; 64], b.at)?;
        let end = Instant::now() + LIMIT;
        while b.counters().icrc == 0 {
            assert!(Instant::now() < end, "it does not come: {:?}", b.counters());
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    })
}

/// From `linux/udp.h`.
const UDP_NO_CHECK6_TX: libc::c_int = 101;
#[derive(Clone)]
struct SentWithoutChecksum;
nix::setsockopt_impl!(
    SentWithoutChecksum,
    libc::IPPROTO_UDP,
    UDP_NO_CHECK6_TX,
    bool,
    nix::sys::socket::sockopt::SetBool
);

/// A multicast group that no other test has.
fn group() -> Ipv4Addr {
    static NEXT: AtomicU8 = AtomicU8::new(1);
    let [_, _, high, low] = std::process::id().to_be_bytes();
    Ipv4Addr::new(239, high, low, NEXT.fetch_add(1, Ordering::Relaxed))
}

/// The host's memberships in a group, of all sockets (`ip_mc_seq_show`).
fn members_of_host(group: Ipv4Addr) -> Result<u32> {
    let name = format!("{:08X}", u32::from_ne_bytes(group.octets()));
    let table = std::fs::read_to_string("/proc/net/igmp")?;
    let lines = table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let users = lines
        .filter(|words| words.first() == Some(&&name[..]))
        .map(|words| words[1].parse::<u32>());
    Ok(users.sum::<std::result::Result<u32, _>>()?)
}

const GRH: usize = 40;
/// Of queue pairs in groups.
const QKEY: uverbs::Qkey = uverbs::Qkey(0x0123_4567);
/// Bytes of a receive of a member.
const ROOM: usize = 2048;

/// A device with a queue pair for datagrams, which has as many receives.
fn datagrams(at: SocketAddr, receives: u64) -> Result<Side> {
    prepared(Side::new(at, QpType::UD, None)?, receives)
}

fn prepared(mut side: Side, receives: u64) -> Result<Side> {
    let attr = uverbs::QpAttr::new().state(uverbs::QpState::INIT).port(1).pkey_index(0).qkey(QKEY);
    side.qp.modify(&attr)?;
    side.qp.modify(&uverbs::QpAttr::new().state(uverbs::QpState::RTR))?;
    let rts = uverbs::QpAttr::new().state(uverbs::QpState::RTS).sq_psn(uverbs::Psn::new(1));
    side.qp.modify(&rts)?;
    (0..receives).try_for_each(|id| side.recv(id, (1 + id as usize) * ROOM, ROOM))?;
    Ok(side)
}

/// Sends a datagram to a group, and waits until it has left; of those that came meanwhile, tells the ids.
fn send_to_group(side: &mut Side, group: impl Into<Gid>, text: &[u8]) -> Result<Vec<Ended>> {
    let index = side.context.default_gid(1)?.index;
    let vector = uverbs::AddressVector::global(1, index, group.into());
    let ah = side.pd.create_ah(&vector)?;
    side.memory.copy_from(0, text)?;
    let sges = [side.memory.sge(..text.len())?];
    let to = Destination::new(&ah, uverbs::Qpn(0xff_ffff), QKEY);
    side.post(SendWr::send(&sges).to(to).id(7))?;
    let mut came = Vec::new();
    loop {
        match side.wait()? {
            (7, WcStatus::SUCCESS, ..) => return Ok(came),
            ended => came.push(ended),
        }
    }
}

/// The sender, the destination and the text of a datagram that came.
fn datagram(side: &Side, (id, status, len, _): Ended) -> Result<([u8; 4], [u8; 4], Vec<u8>)> {
    assert_eq!(status, WcStatus::SUCCESS);
    let at = (1 + (id - RECEIVED) as usize) * ROOM;
    let header = side.bytes(at, GRH)?;
    Ok((
        header[32..36].try_into()?,
        header[36..].try_into()?,
        side.bytes(at + GRH, len as usize - GRH)?,
    ))
}

/// Orders of a member: the address of its device, its group, and the port at which this process waits for it.
const MEMBER_ORDERS: &str = "UVERBS_UDP_MEMBER";

/// A process whose device is in a group, if there are orders. It obeys one byte at a time: `j` joins, `l` leaves, `r`
/// tells the next datagram, `q` that there is none, `s` sends one.
#[test]
fn the_member() -> Result<()> {
    let Ok(orders) = std::env::var(MEMBER_ORDERS) else { return Ok(()) };
    let words: Vec<&str> = orders.split(' ').collect();
    let [at, group, port] = words[..] else { return Err("orders".into()) };
    let group: Ipv4Addr = group.parse()?;
    let mut side = datagrams(at.parse()?, 32)?;
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port.parse::<u16>()?))?;
    let mut membership = None;
    let mut order = [0];
    while stream.read_exact(&mut order).is_ok() {
        match order[0] {
            b'j' => membership = Some(side.qp.attach_mcast(group.into(), 0)?),
            b'l' => membership.take().ok_or("no member")?.detach()?,
            b'r' => {
                let ended = side.wait()?;
                let (from, to, text) = datagram(&side, ended)?;
                stream.write_all(&[&from[..], &to, &[text.len() as u8], &text].concat())?;
            }
            b'q' => {
                std::thread::sleep(Duration::from_millis(100));
                assert!(side.cq.poll()?.next().is_none(), "{:?}", side.counters());
            }
            _ => assert!(send_to_group(&mut side, group, b"from a member")?.is_empty()),
        }
        if order[0] != b'r' {
            stream.write_all(b".")?;
        }
    }
    Ok(())
}

/// Such a process.
struct Member {
    process: Child,
    stream: TcpStream,
    at: SocketAddr,
}

impl Member {
    fn start(group: Ipv4Addr) -> Result<Member> {
        let (at, listener) = (address(), TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?);
        let process = Command::new(std::env::current_exe()?)
            .args(["the_member", "--exact", "--nocapture"])
            .env(MEMBER_ORDERS, format!("{at} {group} {}", listener.local_addr()?.port()))
            .stdout(Stdio::null())
            .spawn()?;
        let (stream, _) = listener.accept()?;
        stream.set_read_timeout(Some(LIMIT))?;
        Ok(Member { process, stream, at })
    }

    fn order(&mut self, order: u8) -> Result<()> {
        self.stream.write_all(&[order])?;
        Ok(self.stream.read_exact(&mut [0])?)
    }

    fn received(&mut self) -> Result<([u8; 4], [u8; 4], Vec<u8>)> {
        self.stream.write_all(b"r")?;
        let mut head = [0; 9];
        self.stream.read_exact(&mut head)?;
        let mut text = vec![0; head[8].into()];
        self.stream.read_exact(&mut text)?;
        Ok((head[..4].try_into()?, head[4..8].try_into()?, text))
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn octets(at: SocketAddr) -> [u8; 4] {
    let IpAddr::V4(at) = at.ip() else { unreachable!("IPv4") };
    at.octets()
}

#[test]
fn a_datagram_to_a_group_reaches_its_members_in_each_process_once() -> Result<()> {
    let (group, other) = (group(), group());
    let mut a = datagrams(address(), 32)?;
    let [mut one, mut two, mut stranger] =
        [Member::start(group)?, Member::start(group)?, Member::start(other)?];
    for member in [&mut one, &mut two, &mut stranger] {
        member.order(b'j')?;
    }
    // The sender is a member, too.
    let membership = a.qp.attach_mcast(group.into(), 0)?;
    assert_eq!((members_of_host(group)?, members_of_host(other)?), (3, 1));
    let mut own = Vec::new();
    for round in 0..5u8 {
        own.extend(send_to_group(&mut a, group, &[round; 100])?);
        let expected = (octets(a.at), group.octets(), vec![round; 100]);
        assert_eq!((one.received()?, two.received()?), (expected.clone(), expected));
    }
    while own.len() < 5 {
        own.push(a.wait()?);
    }
    for (round, ended) in own.iter().enumerate() {
        let expected = (octets(a.at), group.octets(), vec![round as u8; 100]);
        assert_eq!(datagram(&a, *ended)?, expected);
    }
    for member in [&mut one, &mut two, &mut stranger] {
        member.order(b'q')?;
    }
    assert!(a.cq.poll()?.next().is_none(), "its own come once");

    // One leaves, and sends from outside.
    one.order(b'l')?;
    assert_eq!(members_of_host(group)?, 2);
    one.order(b's')?;
    let ended = a.wait()?;
    let expected = (octets(one.at), group.octets(), b"from a member".to_vec());
    assert_eq!((datagram(&a, ended)?, two.received()?), (expected.clone(), expected));
    send_to_group(&mut a, group, b"to the rest")?;
    assert_eq!(two.received()?.2, b"to the rest");
    one.order(b'q')?;
    // A process that is killed leaves, too.
    drop(two);
    assert_eq!(members_of_host(group)?, 1);
    membership.detach()?;
    send_to_group(&mut a, group, b"to nobody")?;
    assert_eq!((members_of_host(group)?, members_of_host(other)?), (0, 1));
    // What it sent to its own group came back, and was dropped.
    let counters = a.counters();
    assert_eq!((counters.sent, counters.unsent, counters.received), (7, 0, 1), "{counters:?}");
    assert_eq!((counters.address, counters.dropped()), (6, 6), "{counters:?}");
    Ok(())
}

#[test]
fn foreign_packets_to_a_group_are_dropped_and_counted() -> Result<()> {
    let (group, mut side) = (group(), datagrams(address(), 1)?);
    let _membership = side.qp.attach_mcast(group.into(), 0)?;
    let stranger = Stranger::at(SocketAddr::new(address().ip(), 0))?;
    let to = SocketAddr::new(group.into(), PORT);
    let deth = |qkey: u32| [&qkey.to_be_bytes()[..], &9u32.to_be_bytes(), &[3; 64]].concat();
    let (right, wrong) = (deth(QKEY.0), deth(QKEY.0 ^ 1));
    // For a queue pair in place of the group, and for general services.
    stranger.send(&packet(UD_SEND_ONLY, 0xffff, side.qp.qpn().0, 0, &right), 0, to)?;
    stranger.send(&packet(UD_SEND_ONLY, 0xffff, 1, 0, &right), 0, to)?;
    // A wrong Q_Key, a wrong partition, another transport, no packet, and a wrong ICRC: that of a packet to the port.
    stranger.send(&packet(UD_SEND_ONLY, 0xffff, 0xff_ffff, 0, &wrong), 0, to)?;
    stranger.send(&packet(UD_SEND_ONLY, 0x8001, 0xff_ffff, 0, &right), 0, to)?;
    stranger.send(&packet(RC_SEND_ONLY, 0xffff, 0xff_ffff, 0, &[]), 0, to)?;
    stranger.socket.send_to(&[0; 15], to)?;
    let right = packet(UD_SEND_ONLY, 0xffff, 0xff_ffff, 0, &right);
    let sum = icrc(stranger.socket.local_addr()?, side.at, 0, &right);
    stranger.socket.send_to(&[&right[..], &sum].concat(), to)?;
    // The number of groups in a packet to the port.
    stranger.send(&right, 0, side.at)?;
    let counters = counted(&side, 8)?;
    let UdpCounters { malformed, qkey, partition, state, length, icrc, queue_pair, .. } = counters;
    assert_eq!((malformed, qkey, partition, state), (2, 1, 1, 1), "{counters:?}");
    assert_eq!((length, icrc, queue_pair, counters.received), (1, 1, 1, 0), "{counters:?}");
    assert!(side.cq.poll()?.next().is_none());
    stranger.send(&right, 0x1234, to)?;
    let ended = side.wait()?;
    assert_eq!(datagram(&side, ended)?.2, [3; 64]);
    Ok(())
}

#[test]
fn a_device_is_in_as_many_groups_as_it_says() -> Result<()> {
    let side = datagrams(address(), 0)?;
    let most = side.context.query_device()?.max_mcast_grp;
    let [_, high, low, _] = group().octets();
    let number = |number: u32| Ipv4Addr::new(238, high, low, number as u8);
    for _ in 0..2 {
        let join = |group: Ipv4Addr| side.qp.attach_mcast(group.into(), 0);
        let mut memberships =
            (0..most).map(|at| join(number(at))).collect::<uverbs::Result<Vec<_>>>()?;
        let error = join(number(most)).unwrap_err();
        assert_eq!(error.errno(), uverbs::Errno::NOMEM, "{error}");
        assert!(error.message().contains("more groups or members than query_device"), "{error}");
        // One more member of a group that it is in takes no socket, and one that leaves makes room.
        memberships.pop();
        memberships.push(join(number(most))?);
    }
    assert_eq!(members_of_host(number(0))?, 0);
    // Groups of the other IP version, and their members, are those of this process.
    side.qp.attach_mcast("ff12::1".parse::<Ipv6Addr>()?.into(), 0)?.detach()?;
    Ok(())
}

/// A group of IPv6 whose datagrams stay on the link.
fn group_v6() -> Ipv6Addr {
    let [_, _, high, low] = std::process::id().to_be_bytes();
    Ipv6Addr::new(0xff12, 0, 0, 0, 0, 0, high.into(), low.into())
}

#[test]
fn a_group_of_ipv6_is_joined_at_the_interface_of_the_address_and_left() -> Result<()> {
    let at = SocketAddr::new(Ipv6Addr::LOCALHOST.into(), PORT);
    let fabric = match Fabric::builder().udp(at).build() {
        Ok(fabric) => fabric,
        Err(error) => return not_judged(&error.to_string()),
    };
    let side = prepared(Side::on(fabric, at, QpType::UD)?, 0)?;
    let digits: String = group_v6().octets().iter().map(|byte| format!("{byte:02x}")).collect();
    // As `igmp6_mc_seq_show` has it: the interface and the group.
    let is_member = || -> Result<bool> {
        let table = std::fs::read_to_string("/proc/net/igmp6")?;
        Ok(table.lines().any(|line| line.contains(" lo ") && line.contains(&digits)))
    };
    let membership = side.qp.attach_mcast(group_v6().into(), 0)?;
    assert!(is_member()?);
    membership.detach()?;
    assert!(!is_member()?);
    Ok(())
}

/// Linux delivers no datagram to a group of IPv6 over a loopback interface: root gets another one, in a namespace of
/// the thread's own.
#[test]
fn a_datagram_to_a_group_of_ipv6_reaches_its_member() -> Result<()> {
    let play = || -> Result<()> {
        let [a, b] = ["[fd00::1]:14791", "[fd00::2]:14791"].map(|at| at.parse());
        let (mut a, mut b) = (datagrams(a?, 1)?, datagrams(b?, 1)?);
        let _membership = b.qp.attach_mcast(group_v6().into(), 0)?;
        send_to_group(&mut a, group_v6(), &[6; 100])?;
        let (id, status, len, _) = b.wait()?;
        assert_eq!((id, status, len as usize), (RECEIVED, WcStatus::SUCCESS, GRH + 100));
        assert_eq!(b.bytes(ROOM + GRH, 100)?, [6; 100]);
        let IpAddr::V6(from) = a.at.ip() else { unreachable!("IPv6") };
        assert_eq!(b.bytes(ROOM + 8, 32)?, [from.octets(), group_v6().octets()].concat());
        assert_eq!((b.counters().received, b.counters().dropped()), (1, 0));
        Ok(())
    };
    in_a_namespace(play)
}

/// The device has an address of the loopback interface, and the host is in its group at another one, too.
#[test]
fn a_group_of_loopback_hears_no_other_interface() -> Result<()> {
    in_a_namespace(|| {
        let (group, at) = (Ipv4Addr::new(239, 1, 2, 3), SocketAddr::from(([127, 0, 0, 2], PORT)));
        let mut side = datagrams(at, 1)?;
        let _membership = side.qp.attach_mcast(group.into(), 0)?;
        let near = Ipv4Addr::new(10, 9, 9, 1);
        let other = UdpSocket::bind((group, 0))?;
        other.join_multicast_v4(&group, &near)?;
        let deth = [&QKEY.0.to_be_bytes()[..], &9u32.to_be_bytes(), &[3; 64]].concat();
        let datagram = packet(UD_SEND_ONLY, 0xffff, 0xff_ffff, 0, &deth);
        let to = SocketAddr::new(group.into(), PORT);
        Stranger::at((near, 0).into())?.send(&datagram, 0, to)?;
        Stranger::at(([127, 0, 0, 3], 0).into())?.send(&datagram, 0, to)?;
        assert_eq!(side.wait()?.1, WcStatus::SUCCESS);
        assert_eq!(side.bytes(ROOM + 32, 4)?, [127, 0, 0, 3]);
        assert_eq!((side.counters().received, side.counters().dropped()), (1, 0));
        Ok(())
    })
}

/// The end of a test that this machine has no means for. It passes, says so where the test harness does not hide it, and
/// fails if `UVERBS_NEEDS_NAMESPACES` is set.
fn not_judged(why: &str) -> Result<()> {
    let name = std::thread::current().name().unwrap_or("a test").to_owned();
    writeln!(std::io::stderr(), "not judged: {name}: {why}")?;
    match std::env::var_os("UVERBS_NEEDS_NAMESPACES") {
        Some(_) => Err(why.into()),
        None => Ok(()),
    }
}

/// Runs in a network namespace of the thread's own, which has loopback and an interface with these addresses, if this
/// process may make one.
fn in_a_namespace(play: impl FnOnce() -> Result<()> + Send) -> Result<()> {
    std::thread::scope(|scope| {
        let name = std::thread::current().name().unwrap_or("a test").to_owned();
        let named = std::thread::Builder::new().name(name);
        let played = named.spawn_scoped(scope, || {
            if let Err(errno) = nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET) {
                return not_judged(&format!("no network namespace: {errno}"));
            }
            for change in [
                "link set lo up",
                "link add near type veth peer name far",
                "link set far up",
                "link set near up",
                "address add 10.9.9.1/24 dev near",
                "-6 address add fd00::1/64 dev near nodad",
                "-6 address add fd00::2/64 dev near nodad",
            ] {
                match Command::new("ip").args(change.split(' ')).status() {
                    Ok(status) if status.success() => {}
                    other => {
                        return not_judged(&format!("no veth or no IPv6: ip {change}: {other:?}"));
                    }
                }
            }
            play()
        });
        played?.join().map_err(|_| "a panic")?
    })
}

/// Orders of the second process: the address of its device, and the port at which this one waits for it.
const ORDERS: &str = "UVERBS_UDP_ORDERS";

/// The second process, if there are orders: answers each message until the first process closes the stream.
#[test]
fn the_second_process() -> Result<()> {
    let Ok(orders) = std::env::var(ORDERS) else { return Ok(()) };
    let (at, port) = orders.split_once(' ').ok_or("orders")?;
    let mut side = Side::new(at.parse()?, QpType::RC, None)?;
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port.parse::<u16>()?))?;
    meet(&mut side, &mut stream, true)?;
    loop {
        let ended = side.wait()?;
        if ended.1 != WcStatus::SUCCESS {
            // The first process is gone.
            return Ok(());
        }
        if ended.0 >= RECEIVED {
            side.recv(ended.0 - RECEIVED, 0, 4096)?;
            let sges = [side.memory.sge(..ended.2 as usize)?];
            side.post(SendWr::send(&sges).id(1))?;
        }
    }
}

/// Exchanges endpoint and memory with the process at the other end of a stream, and connects; perhaps with a receive.
fn meet(side: &mut Side, stream: &mut TcpStream, receives: bool) -> Result<Remote> {
    let own = side.memory.remote(0)?;
    let mut bytes = side.endpoint()?.to_bytes().to_vec();
    bytes.extend(own.addr.to_be_bytes());
    bytes.extend(own.rkey.0.to_be_bytes());
    stream.write_all(&bytes)?;
    let mut theirs = [0; Endpoint::BYTES + 12];
    stream.read_exact(&mut theirs)?;
    let (endpoint, rest) = theirs.split_first_chunk().ok_or("short")?;
    let endpoint = Endpoint::from_bytes(endpoint).ok_or("no endpoint")?;
    side.qp.handshake(&endpoint, &handshake())?;
    if receives {
        side.recv(0, 0, 4096)?;
    }
    // Both are connected when both have said so.
    stream.write_all(b".")?;
    stream.read_exact(&mut [0])?;
    let (addr, rkey) = rest.split_at(8);
    Ok(Remote {
        addr: u64::from_be_bytes(addr.try_into()?),
        rkey: Rkey(u32::from_be_bytes(rkey.try_into()?)),
    })
}

/// Starts the second process, and connects a new device here with it.
fn with_second(there: SocketAddr) -> Result<(Side, Child, Remote, TcpStream)> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let child = Command::new(std::env::current_exe()?)
        .args(["the_second_process", "--exact", "--nocapture"])
        .env(ORDERS, format!("{there} {}", listener.local_addr()?.port()))
        .stdout(Stdio::null())
        .spawn()?;
    let mut side = Side::new(address(), QpType::RC, None)?;
    let (mut stream, _) = listener.accept()?;
    stream.set_read_timeout(Some(LIMIT))?;
    let remote = meet(&mut side, &mut stream, false)?;
    Ok((side, child, remote, stream))
}

#[test]
fn two_processes_exchange_messages_and_one_survives_the_end_of_the_other() -> Result<()> {
    let there = address();
    for round in 0..3u64 {
        let (mut side, mut child, remote, stream) = with_second(there)?;
        for id in 0..100 * round {
            side.recv(id, 8192, 4096)?;
            side.memory.copy_from(0, &pattern(64 + id as usize, id))?;
            let sges = [side.memory.sge(..64 + id as usize)?];
            side.post(SendWr::send(&sges).id(id))?;
            // The answer may come before the acknowledgement.
            let mut ids = [side.wait()?, side.wait()?].map(|ended| (ended.0, ended.1));
            ids.sort_unstable_by_key(|(id, _)| *id);
            assert_eq!(ids, [(id, WcStatus::SUCCESS), (RECEIVED + id, WcStatus::SUCCESS)]);
            assert_eq!(side.bytes(8192, 64 + id as usize)?, pattern(64 + id as usize, id));
        }
        let sges = [side.memory.sge(..1 << 20)?];
        side.post(SendWr::read(remote, &sges).id(1))?;
        if round > 0 {
            side.done(1)?;
        }
        // It dies, in the first round amid a read.
        child.kill()?;
        child.wait()?;
        if round == 0 {
            side.post(SendWr::read(remote, &sges).id(2))?;
            let first = side.wait()?;
            if first.1 == WcStatus::SUCCESS {
                assert_eq!(side.wait()?.1, WcStatus::RETRY_EXC_ERR);
            } else {
                assert_eq!(first.1, WcStatus::RETRY_EXC_ERR);
            }
        } else {
            side.post(SendWr::write(remote, &sges).id(2))?;
            let ended = side.wait()?;
            assert_eq!((ended.0, ended.1), (2, WcStatus::RETRY_EXC_ERR));
        }
        drop(stream);
    }
    Ok(())
}

/// Whether this process runs a test alone. Otherwise another one has done so: other tests of this process have fabrics,
/// too.
fn is_alone(test: &str) -> Result<bool> {
    const ALONE: &str = "UVERBS_UDP_ALONE";
    if std::env::var_os(ALONE).is_some() {
        return Ok(true);
    }
    let status = Command::new(std::env::current_exe()?)
        .args([test, "--exact", "--nocapture"])
        .env(ALONE, "1")
        .stdout(Stdio::null())
        .status()?;
    assert!(status.success(), "{test}");
    Ok(false)
}

#[test]
fn nothing_is_left_of_a_fabric_that_was_dropped() -> Result<()> {
    /// Of this process: threads of fabrics, and sockets of UDP.
    fn left() -> Result<(usize, usize)> {
        let mut threads = 0;
        for task in std::fs::read_dir("/proc/self/task")? {
            // One that ends while it is looked at is none.
            let name = std::fs::read_to_string(task?.path().join("comm")).unwrap_or_default();
            threads += usize::from(name.trim() == "uverbs-sim");
        }
        let files = std::fs::read_dir("/proc/self/fd")?.count();
        Ok((threads, files))
    }
    if !is_alone("nothing_is_left_of_a_fabric_that_was_dropped")? {
        return Ok(());
    }
    let before = left()?;
    for _ in 0..10 {
        let (mut a, mut b) = pair(QpType::RC, None)?;
        exchange(&mut a, &mut b, 100)?;
        assert_eq!(left()?.0, before.0 + 2);
        // Amid a message.
        let sges = [a.memory.sge(..1 << 20)?];
        a.post(SendWr::write(b.memory.remote(0)?, &sges).id(9))?;
    }
    assert_eq!(left()?, before);
    Ok(())
}
