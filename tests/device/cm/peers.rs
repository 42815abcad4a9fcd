//! rdma-core's programs as the peer, in both roles: `rping`, `ucmatose`, and librdmacm's examples `rdma_client` and
//! `rdma_server`, `rdma_xclient` and `rdma_xserver`, these over XRC, too.

use super::types::{listen, route_for};
use super::{PATIENCE, RECEIVE, Service, Side, address, channel, done, passive, route};
use crate::capability::Capability;
use crate::env;
use crate::interop::absent;
use crate::verdict::{Stop, Verdict, require, trials};
use crate::xrc::{self, Receiver, Sender};
use std::io::Read;
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use uverbs::cm::{ConnectParam, Connecting, Connection, PortSpace, RejectReason};
use uverbs::device::DriverId;
use uverbs::{QpType, Remote, Rkey, SendWr, SrqNumber, WcStatus};

trials![
    our_server_serves_rping,
    our_client_uses_rping,
    our_server_serves_ucmatose,
    our_client_uses_ucmatose,
    our_server_serves_rdma_client,
    our_client_uses_rdma_server,
    our_server_serves_rdma_xclient,
    our_client_uses_rdma_xserver,
    our_target_serves_rdma_xclient,
    our_initiator_uses_rdma_xserver,
];

/// A program of rdma-core, which is killed when this is dropped.
struct Program {
    name: String,
    process: Child,
}

impl Program {
    fn start(program: &str, arguments: &str) -> Verdict<Program> {
        let wanted = std::env::var("UVERBS_PEERS").is_ok();
        require(wanted, Capability::Peers, "UVERBS_PEERS is not set")?;
        let name = format!("{program} {arguments}");
        let process = Command::new(program)
            .args(arguments.split(' '))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| absent(&name, &error))?;
        Ok(Program { name, process })
    }

    /// Waits until the program ends, and fails unless it succeeded.
    fn succeeds(mut self) -> Verdict {
        let deadline = Instant::now() + PATIENCE;
        while self.process.try_wait()?.is_none() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(10));
        }
        let _ = self.process.kill();
        let status = self.process.wait()?;
        let mut text = String::new();
        if let Some(stream) = &mut self.process.stdout {
            let _ = stream.read_to_string(&mut text);
        }
        if let Some(stream) = &mut self.process.stderr {
            let _ = stream.read_to_string(&mut text);
        }
        match status.success() {
            true => Ok(()),
            false => Err(Stop::fail(format!("{} ended with {status}: {text}", self.name))),
        }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Accepts one request; `prepare` may post receives before.
fn accept(
    service: &Service,
    prepare: impl Fn(&mut Side) -> Verdict,
) -> Verdict<(Side, Connection)> {
    let request = service.request()?;
    let mut side = Side::of(&request.context()?)?;
    request.init_qp(&side.qp)?;
    prepare(&mut side)?;
    let accepting = request.accept(&side.qp, &ConnectParam::new())?;
    Ok((side, done(accepting.wait(Some(PATIENCE))?)?))
}

/// Connects as soon as a program listens at the address.
fn connect(at: SocketAddr, prepare: impl Fn(&mut Side) -> Verdict) -> Verdict<(Side, Connection)> {
    let channel = channel()?;
    once_a_program_listens(|| {
        let route = route(&channel, at)?;
        let mut side = Side::of(&route.context()?)?;
        route.init_qp(&side.qp)?;
        prepare(&mut side)?;
        let connecting = route.connect(&side.qp, &ConnectParam::new())?;
        Ok((side, connecting))
    })
}

/// Asks until a program listens, and returns the connection with the asking side.
fn once_a_program_listens<T>(
    mut ask: impl FnMut() -> Verdict<(T, Connecting)>,
) -> Verdict<(T, Connection)> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let (side, connecting) = ask()?;
        match connecting.wait(Some(PATIENCE)) {
            Ok(progress) => return Ok((side, done(progress)?)),
            Err(error) => {
                let reason = error.rejection().and_then(|rejection| rejection.reason());
                if reason != Some(RejectReason::INVALID_SERVICE_ID) || Instant::now() > deadline {
                    return Err(error.into());
                }
            }
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The address of the second device, with a port that was free a moment ago.
fn free_address() -> Verdict<SocketAddr> {
    let bound = channel()?
        .create_id(PortSpace::TCP, QpType::RC)?
        .bind(SocketAddr::new(address(&passive()?)?, 0))?;
    Ok(bound.local_addr()?)
}

/// The number of the next request that completes, of either queue; fails unless it succeeded.
fn completed(side: &mut Side) -> Verdict<u64> {
    match side.completion()? {
        (id, WcStatus::SUCCESS) => Ok(id),
        (_, status) => Err(Stop::fail(status)),
    }
}

/// Waits until the peer, which leaves when it has the last message, has left, and then leaves. The message arrived or the
/// peer would not leave, but a peer on soft-RoCE may do so without an ACK (docs/KERNEL-NOTES.md).
fn leave_after_the_peer(side: &mut Side, connection: &Connection) -> Verdict {
    connection.wait_disconnected(Some(PATIENCE))?;
    connection.disconnect()?;
    let is_rxe = env::device().driver() == Some(DriverId::RXE);
    loop {
        match side.completion()? {
            // A receive that waits for no message any more.
            (RECEIVE, WcStatus::WR_FLUSH_ERR) => {}
            (_, WcStatus::SUCCESS) => return Ok(()),
            (_, WcStatus::WR_FLUSH_ERR) if is_rxe => return Ok(()),
            (_, status) => return Err(Stop::fail(status)),
        }
    }
}

const PINGS: usize = 5;

/// Where the messages of `rping` begin in the memory of a side, in bytes: its announcement of memory in
/// both directions, and the data.
const RECEIVED: usize = 0;
const SENT: usize = 16;
const DATA: usize = 64;

/// An announcement: address, key and length, all in network order.
const ANNOUNCEMENT: usize = 16;

fn receive_announcement(side: &mut Side) -> Verdict {
    side.receive_at(RECEIVED, ANNOUNCEMENT)
}

fn send_announcement(side: &mut Side, remote: Remote, length: u32) -> Verdict {
    let mut bytes = [0; ANNOUNCEMENT];
    bytes[..8].copy_from_slice(&remote.addr.to_be_bytes());
    bytes[8..12].copy_from_slice(&remote.rkey.0.to_be_bytes());
    bytes[12..].copy_from_slice(&length.to_be_bytes());
    side.memory.copy_from(SENT, &bytes)?;
    let sges = [side.memory.sge(SENT..SENT + ANNOUNCEMENT)?];
    side.post(SendWr::send(&sges))
}

fn announced(side: &Side) -> Verdict<(Remote, usize)> {
    let mut bytes = [0; ANNOUNCEMENT];
    side.memory.copy_to(RECEIVED, &mut bytes)?;
    let (addr, rest) = bytes.split_first_chunk::<8>().expect("16 bytes");
    let (rkey, length) = rest.split_first_chunk::<4>().expect("8 bytes");
    let length = u32::from_be_bytes(length.try_into()?) as usize;
    let (addr, rkey) = (u64::from_be_bytes(*addr), Rkey(u32::from_be_bytes(*rkey)));
    Ok((Remote { addr, rkey }, length))
}

/// The client announces its data, which the server reads, and then the memory for the server's write.
fn our_server_serves_rping() -> Verdict {
    let service = Service::start(4)?;
    let (ip, port) = (service.at.ip(), service.at.port());
    let rping = Program::start("rping", &format!("-c -a {ip} -p {port} -C {PINGS} -V"))?;
    let (mut side, connection) = accept(&service, receive_announcement)?;
    completed(&mut side)?;
    for announcement in 0..2 * PINGS {
        let (remote, length) = announced(&side)?;
        receive_announcement(&mut side)?;
        let sges = [side.memory.sge(DATA..DATA + length)?];
        side.post(match announcement % 2 {
            0 => SendWr::read(remote, &sges),
            _ => SendWr::write(remote, &sges),
        })?;
        completed(&mut side)?;
        send_announcement(&mut side, remote, 0)?;
        if announcement + 1 < 2 * PINGS {
            // The go-ahead is sent, and the next announcement received.
            completed(&mut side)?;
            completed(&mut side)?;
        }
    }
    leave_after_the_peer(&mut side, &connection)?;
    rping.succeeds()
}

fn our_client_uses_rping() -> Verdict {
    let at = free_address()?;
    let arguments = format!("-s -a {} -p {} -C {PINGS}", at.ip(), at.port());
    let rping = Program::start("rping", &arguments)?;
    let (mut side, connection) = connect(at, receive_announcement)?;
    // The server copies a string with its final zero.
    let text = |ping: usize| format!("ping {ping} to a server of rdma-core\0");
    let back = DATA + 128;
    for ping in 0..PINGS {
        let text = text(ping);
        side.memory.copy_from(DATA, text.as_bytes())?;
        for from in [DATA, back] {
            let remote = side.memory.remote(from)?;
            send_announcement(&mut side, remote, text.len() as u32)?;
            // The announcement is sent, and the go-ahead received.
            completed(&mut side)?;
            completed(&mut side)?;
            receive_announcement(&mut side)?;
        }
        let mut found = vec![0; text.len()];
        side.memory.copy_to(back, &mut found)?;
        assert_eq!(String::from_utf8_lossy(&found), text);
    }
    connection.disconnect()?;
    connection.wait_disconnected(Some(PATIENCE))?;
    rping.succeeds()
}

const MESSAGES: usize = 4;
const LENGTH: usize = 100;

fn receive_messages(side: &mut Side) -> Verdict {
    (0..MESSAGES).try_for_each(|_| side.receive_at(0, LENGTH))
}

fn send_messages(side: &mut Side) -> Verdict {
    for _ in 0..MESSAGES {
        let sges = [side.memory.sge(128..128 + LENGTH)?];
        side.post(SendWr::send(&sges))?;
    }
    Ok(())
}

/// The server sends first, and the client then replies.
fn our_server_serves_ucmatose() -> Verdict {
    let service = Service::start(4)?;
    let (ip, port) = (service.at.ip(), service.at.port());
    let arguments = format!("-s {ip} -p {port} -C {MESSAGES} -S {LENGTH}");
    let ucmatose = Program::start("ucmatose", &arguments)?;
    let (mut side, connection) = accept(&service, receive_messages)?;
    send_messages(&mut side)?;
    (0..2 * MESSAGES).try_for_each(|_| completed(&mut side).map(drop))?;
    connection.disconnect()?;
    connection.wait_disconnected(Some(PATIENCE))?;
    drop(connection);
    ucmatose.succeeds()
}

fn our_client_uses_ucmatose() -> Verdict {
    let at = free_address()?;
    let arguments = format!("-b {} -p {} -C {MESSAGES} -S {LENGTH}", at.ip(), at.port());
    let ucmatose = Program::start("ucmatose", &arguments)?;
    let (mut side, connection) = connect(at, receive_messages)?;
    (0..MESSAGES).try_for_each(|_| completed(&mut side).map(drop))?;
    send_messages(&mut side)?;
    (1..MESSAGES).try_for_each(|_| completed(&mut side).map(drop))?;
    leave_after_the_peer(&mut side, &connection)?;
    drop(connection);
    ucmatose.succeeds()
}

/// The length of the messages of librdmacm's examples.
const EXAMPLE: usize = 16;

fn receive_example(side: &mut Side) -> Verdict {
    side.receive_at(0, EXAMPLE)
}

fn send_example(side: &mut Side) -> Verdict {
    let sges = [side.memory.sge(128..128 + EXAMPLE)?];
    side.post(SendWr::send(&sges))
}

/// The client sends a message, to which the server replies.
fn our_server_serves_rdma_client() -> Verdict {
    let service = Service::start(4)?;
    let (ip, port) = (service.at.ip(), service.at.port());
    let client = Program::start("rdma_client", &format!("-s {ip} -p {port}"))?;
    let (mut side, connection) = accept(&service, receive_example)?;
    completed(&mut side)?;
    send_example(&mut side)?;
    leave_after_the_peer(&mut side, &connection)?;
    client.succeeds()
}

fn our_client_uses_rdma_server() -> Verdict {
    let at = free_address()?;
    let arguments = format!("-s {} -p {}", at.ip(), at.port());
    let server = Program::start("rdma_server", &arguments)?;
    let (mut side, connection) = connect(at, receive_example)?;
    send_example(&mut side)?;
    // The reply's completion, and that of the message if it comes before.
    while completed(&mut side)? != RECEIVE {}
    connection.disconnect()?;
    server.succeeds()
}

/// The client sends a message and leaves.
fn our_server_serves_rdma_xclient() -> Verdict {
    let service = Service::start(4)?;
    let (ip, port) = (service.at.ip(), service.at.port());
    let client = Program::start("rdma_xclient", &format!("-s {ip} -p {port} -c r"))?;
    let (mut side, connection) = accept(&service, receive_example)?;
    completed(&mut side)?;
    connection.wait_disconnected(Some(PATIENCE))?;
    connection.disconnect()?;
    client.succeeds()
}

fn our_client_uses_rdma_xserver() -> Verdict {
    let at = free_address()?;
    let server = Program::start("rdma_xserver", &format!("-p {} -c r", at.port()))?;
    let (mut side, connection) = connect(at, |_| Ok(()))?;
    send_example(&mut side)?;
    leave_after_the_peer(&mut side, &connection)?;
    server.succeeds()
}

/// The client sends a message to the shared receive queue that our private data names.
fn our_target_serves_rdma_xclient() -> Verdict {
    xrc::context()?;
    let service = listen(QpType::XRC_TGT)?;
    let (ip, port) = (service.at.ip(), service.at.port());
    let client = Program::start("rdma_xclient", &format!("-s {ip} -p {port} -c x"))?;
    let request = service.request()?;
    let context = request.context()?;
    let mut receiver = Receiver::new(&context, context.xrcd_builder().build()?)?;
    receiver.recv(1, 0, EXAMPLE)?;
    let number = receiver.number().0.to_be_bytes();
    let param = ConnectParam::new().private_data(&number);
    let accepting = request.accept(&receiver.target, &param)?;
    let connection = done(accepting.wait(Some(PATIENCE))?)?;
    let completion = crate::pair::wait(&mut receiver.cq)?;
    assert_eq!((completion.status, completion.wr_id), (WcStatus::SUCCESS, 1), "{completion:?}");
    assert_eq!(completion.byte_len, EXAMPLE as u32);
    connection.wait_disconnected(Some(PATIENCE))?;
    connection.disconnect()?;
    client.succeeds()
}

fn our_initiator_uses_rdma_xserver() -> Verdict {
    xrc::context()?;
    let at = free_address()?;
    let server = Program::start("rdma_xserver", &format!("-p {} -c x", at.port()))?;
    let channel = channel()?;
    let (mut sender, connection) = once_a_program_listens(|| {
        let route = route_for(&channel, QpType::XRC_INI, at)?;
        let sender = Sender::new(&route.context()?)?;
        let connecting = route.connect(&sender.qp, &ConnectParam::new())?;
        Ok((sender, connecting))
    })?;
    let told = connection.private_data().first_chunk().copied();
    let number = SrqNumber(u32::from_be_bytes(told.ok_or_else(|| Stop::fail("no number"))?));
    sender.message(number, 3, EXAMPLE)?;
    connection.disconnect()?;
    server.succeeds()
}
