//! The ping-pong over XRC, as rdma-core's `ibv_xsrq_pingpong`: a server with a connection to each client. All
//! connections deliver to shared receive queues that messages name.
//!
//! It differs from the other kinds in everything but the messages. Each side counts its received messages, and the
//! server begins. The server sends to a client over any of its connections in turn, because clients that share the XRC
//! domain of one file are reached over each other's connections. At the end each side waits for the other's "END", so
//! that no target is destroyed that others still send through.

mod address;

use super::exchange::{self, Exchange};
use super::kind::Kind;
use super::port::Port;
use super::queues::random_psn;
use crate::args::XsrqArgs;
use crate::failure::{self, Failure, Result};
use crate::output::{errln, outln};
use address::{Address, LENGTH};
use rustix::fs::{Mode, OFlags, open};
use serde::Serialize;
use std::fmt::Display;
use std::time::Instant;
use uverbs::{
    Access, CompletionChannel, CompletionQueue, Context, MemoryRegion, Mtu, Notify, Psn, QpAttr,
    QpState, QpType, QueuePair, RecvWr, SendWr, SharedReceiveQueue, WcStatus, XrcDomain, XrcTarget,
};

/// The file whose inode names the domain, the same as in rdma-core's program.
const DOMAIN: &str = "/tmp/xrc_domain";
const END: &[u8; 4] = b"END\0";

/// A run that went well.
#[derive(Debug, Serialize)]
struct XsrqReport {
    kind: &'static str,
    role: &'static str,
    device: String,
    clients: usize,
    size: u32,
    iterations: u64,
    bytes: u64,
    seconds: f64,
}

/// A connection: half a queue pair in each direction.
#[derive(Debug)]
struct Connection {
    target: XrcTarget,
    initiator: QueuePair,
    psn: Psn,
    remote: Address,
    /// Messages to the peer.
    sent: u64,
}

/// Everything of one side. Fields are dropped in this order.
#[derive(Debug)]
struct Side<'a> {
    args: &'a XsrqArgs,
    connections: Vec<Connection>,
    srq: SharedReceiveQueue,
    sends: CompletionQueue,
    /// The number of sends that have not completed.
    under_way: u32,
    receives: CompletionQueue,
    channel: Option<CompletionChannel>,
    memory: MemoryRegion,
    _xrcd: XrcDomain,
    port: Port,
}

pub(crate) fn run(args: &XsrqArgs) -> Result<()> {
    let options = &args.options;
    if options.validate {
        return Err(Failure::usage(
            "--validate: messages over XRC are all alike, nothing is checked",
        ));
    }
    let mut side = Side::set_up(args)?;
    let mut exchanges = side.meet()?;
    let start = Instant::now();
    side.run().map_err(|failure| side.port.with_events(failure))?;
    let seconds = start.elapsed().as_secs_f64();
    side.part(&mut exchanges)?;
    let messages = options.iters.saturating_mul(side.connections.len() as u64);
    let report = XsrqReport {
        kind: "xsrq",
        role: if options.host.is_some() { "client" } else { "server" },
        device: side.port.device().name().to_owned(),
        clients: side.connections.len(),
        size: args.size(),
        iterations: options.iters,
        bytes: messages.saturating_mul(2 * u64::from(args.size())),
        seconds,
    };
    if options.json {
        failure::print(&report);
    } else {
        outln!("{} bytes in {:.2} seconds", report.bytes, report.seconds);
        outln!("success");
    }
    Ok(())
}

/// The domain that all such programs of this machine share. For one client it is a domain of its own if the file cannot
/// be opened.
fn domain(context: &Context, clients: u32) -> Result<XrcDomain> {
    let flags = OFlags::RDONLY | OFlags::CREATE | OFlags::CLOEXEC;
    match open(DOMAIN, flags, Mode::RUSR | Mode::RGRP) {
        Ok(file) => Ok(context.xrcd_builder().file(&file).create().build()?),
        Err(errno) if clients > 1 => {
            Err(run_failed(format!("{DOMAIN}, the domain of {clients} clients: {errno}")))
        }
        Err(errno) => {
            errln!("uverbs: {DOMAIN}: {errno}; the XRC domain is this program's alone");
            Ok(context.xrcd_builder().build()?)
        }
    }
}

fn run_failed(error: impl Display) -> Failure {
    Failure::run(error.to_string())
}

impl<'a> Side<'a> {
    fn set_up(args: &'a XsrqArgs) -> Result<Self> {
        let options = &args.options;
        let count = if options.host.is_some() { 1 } else { args.clients };
        let port = Port::open(options)?;
        port.check_size(Kind::Rc, args.size(), Some(args.path.mtu))?;
        let context = &port.context;
        let pd = context.alloc_pd()?;
        let memory = pd.mr_builder().allocate::<u8>(args.size() as usize)?;
        let channel = options.events.then(|| context.create_comp_channel()).transpose()?;
        let xrcd = domain(context, count)?;
        let mut receives = context.cq_builder(count);
        if let Some(channel) = &channel {
            receives = receives.channel(channel);
        }
        let mut receives = receives.build()?;
        if channel.is_some() {
            receives.req_notify(Notify::Next)?;
        }
        // A client gets its next message only after its answer to the last.
        let sends = context.cq_builder(2 * count).build()?;
        let srq = pd.srq_builder(count).xrc(&xrcd, &receives).build()?;
        let init = QpAttr::new()
            .state(QpState::INIT)
            .pkey_index(0)
            .port(port.number)
            .access(Access::empty());
        let mut connections = Vec::new();
        for _ in 0..count {
            let target = xrcd.create_target()?;
            target.modify(&init)?;
            let builder = pd.qp_builder(&sends, &sends, QpType::XRC_INI);
            let initiator = builder.max_send_wr(2 * count).build()?;
            initiator.modify(&init)?;
            let (psn, remote) = (random_psn()?, Address::default());
            connections.push(Connection { target, initiator, psn, remote, sent: 0 });
        }
        let mut side = Side {
            args,
            connections,
            srq,
            sends,
            under_way: 0,
            receives,
            channel,
            memory,
            _xrcd: xrcd,
            port,
        };
        side.post_receives(count)?;
        Ok(side)
    }

    /// Finds the peers, and connects to each.
    fn meet(&mut self) -> Result<Vec<Exchange>> {
        let options = &self.args.options;
        let (wait, timeout) = (options.wait(), options.timeout());
        if let Some(host) = &options.host {
            let mut exchange = exchange::connect(host, options.port, wait, timeout)?;
            self.tell(0, &mut exchange)?;
            self.hear(0, &mut exchange)?;
            self.connect(0)?;
            return Ok(vec![exchange]);
        }
        let listener = exchange::listen(options.port)?;
        let mut exchanges = Vec::new();
        for index in 0..self.connections.len() {
            let mut exchange = exchange::accept(&listener, wait, timeout)?;
            self.hear(index, &mut exchange)?;
            self.tell(index, &mut exchange)?;
            self.connect(index)?;
            exchanges.push(exchange);
        }
        Ok(exchanges)
    }

    fn tell(&self, index: usize, exchange: &mut Exchange) -> Result<()> {
        let connection = &self.connections[index];
        let address = Address {
            lid: self.port.attr.lid,
            target: connection.target.qpn(),
            initiator: connection.initiator.qpn(),
            psn: connection.psn,
            srq: self.srq.number().unwrap_or_default(),
            gid: self.port.gid(),
        };
        self.say("local address: ", &address);
        exchange.write(&address.to_wire())
    }

    fn hear(&mut self, index: usize, exchange: &mut Exchange) -> Result<()> {
        let mut wire = [0; LENGTH];
        let deadline = Instant::now() + self.args.options.timeout();
        exchange.read(&mut wire, deadline, "its address")?;
        let remote = Address::from_wire(&wire).ok_or_else(|| {
            let peer = exchange.peer();
            Failure::peer(format!("{peer} sent \"{}\", which is no address", wire.escape_ascii()))
                .advice("make sure that the same kind of ping-pong listens there")
        })?;
        self.say("remote address:", &remote);
        self.connections[index].remote = remote;
        Ok(())
    }

    fn say(&self, what: &str, address: &Address) {
        if !self.args.options.json {
            outln!("{what} {address}");
        }
    }

    /// Brings both halves of a connection to RTS.
    fn connect(&mut self, index: usize) -> Result<()> {
        let Connection { target, initiator, psn, remote, .. } = &self.connections[index];
        let path = self.port.path(self.args.options.sl, remote.lid, remote.gid)?;
        let rtr = QpAttr::new()
            .state(QpState::RTR)
            .path(path)
            .path_mtu(Mtu(self.args.path.mtu as u8))
            .rq_psn(remote.psn);
        let rts = QpAttr::new().state(QpState::RTS).sq_psn(*psn).timeout(14);
        let to_target = rtr.dest_qpn(remote.initiator).max_dest_rd_atomic(0).min_rnr_timer(12);
        target.modify(&to_target)?;
        target.modify(&rts)?;
        initiator.modify(&rtr.dest_qpn(remote.target))?;
        initiator.modify(&rts.retry_count(7).rnr_retry(7).max_rd_atomic(0))?;
        Ok(())
    }

    /// Sends and receives until each peer has sent enough.
    fn run(&mut self) -> Result<()> {
        let total = self.args.options.iters * self.connections.len() as u64;
        let timeout = self.args.options.timeout();
        if self.args.options.host.is_none() {
            for index in 0..self.connections.len() {
                self.send(index)?;
            }
        }
        let (mut received, mut since) = (0, Instant::now());
        while received < total {
            if let Some(channel) = &self.channel {
                channel.wait(Some(timeout))?;
                self.receives.req_notify(Notify::Next)?;
            }
            let mut arrived = Vec::new();
            let mut completions = self.receives.poll().map_err(run_failed)?;
            while let Some(completion) = completions.next() {
                check(completion.status(), "a receive")?;
                arrived.push(completion.qpn());
            }
            drop(completions);
            for qpn in &arrived {
                self.post_receives(1)?;
                let of = |connection: &Connection| connection.target.qpn() == *qpn;
                let index = self.connections.iter().position(of).unwrap_or(0);
                if self.connections[index].sent < self.args.options.iters {
                    self.send(index)?;
                }
            }
            received += arrived.len() as u64;
            if !arrived.is_empty() {
                since = Instant::now();
            } else if since.elapsed() > timeout {
                return Err(Failure::run(format!(
                    "no message for {} s, after {received} of {total}",
                    timeout.as_secs()
                ))
                .advice("read the other side's output; both need the same --size and --iters"));
            }
        }
        while self.under_way > 0 {
            self.finish_sends()?;
            if since.elapsed() > timeout {
                return Err(Failure::run("the last messages are not acknowledged"));
            }
        }
        Ok(())
    }

    /// Sends the next message to a peer, over the connections in turn.
    fn send(&mut self, index: usize) -> Result<()> {
        let count = self.connections.len();
        let peer = &mut self.connections[index];
        let over = (index + peer.sent as usize) % count;
        peer.sent += 1;
        let number = peer.remote.srq;
        self.finish_sends()?;
        let sges = [self.memory.sge(..).map_err(run_failed)?];
        let wr = SendWr::send(&sges).id(index as u64).signaled().to_srq(number);
        post_send(&mut self.connections[over].initiator, wr).map_err(run_failed)?;
        self.under_way += 1;
        Ok(())
    }

    fn finish_sends(&mut self) -> Result<()> {
        let mut completions = self.sends.poll().map_err(run_failed)?;
        while let Some(completion) = completions.next() {
            self.under_way -= 1;
            check(completion.status(), "a send")?;
        }
        Ok(())
    }

    #[allow(unsafe_code, reason = "ringing a batch names memory by number")]
    fn post_receives(&mut self, count: u32) -> Result<()> {
        let sges = [self.memory.sge(..).map_err(run_failed)?];
        let mut batch = self.srq.batch().map_err(run_failed)?;
        for _ in 0..count {
            batch.push(RecvWr::new(&sges).id(0)).map_err(run_failed)?;
        }
        // SAFETY: the memory outlives the queue, in the same `Side`, and no other code accesses it.
        unsafe { batch.ring() }.map_err(run_failed)?;
        Ok(())
    }

    /// Waits until all peers are done.
    fn part(&self, exchanges: &mut [Exchange]) -> Result<()> {
        let client = self.args.options.host.is_some();
        if client {
            each(exchanges, |exchange| exchange.write(END))?;
        }
        let deadline = Instant::now() + self.args.options.timeout();
        each(exchanges, |exchange| {
            let mut end = [0; END.len()];
            exchange.read(&mut end, deadline, "\"END\"")?;
            if end == *END {
                return Ok(());
            }
            let (peer, end) = (exchange.peer(), end.escape_ascii());
            Err(Failure::peer(format!("{peer} said \"{end}\" where \"END\" was due")))
        })?;
        if client { Ok(()) } else { each(exchanges, |exchange| exchange.write(END)) }
    }
}

fn each(
    exchanges: &mut [Exchange],
    mut with: impl FnMut(&mut Exchange) -> Result<()>,
) -> Result<()> {
    exchanges.iter_mut().try_for_each(&mut with)
}

fn check(status: WcStatus, what: &str) -> Result<()> {
    match status {
        WcStatus::SUCCESS => Ok(()),
        other => Err(Failure::run(format!("{what} failed: {other}"))),
    }
}

#[allow(unsafe_code, reason = "ringing a batch names memory by number")]
fn post_send(qp: &mut QueuePair, wr: SendWr<'_>) -> uverbs::Result<()> {
    let mut batch = qp.send_batch()?;
    batch.push(wr)?;
    // SAFETY: the memory outlives the queue pairs, in the same `Side`, and no code writes it.
    unsafe { batch.ring()? };
    Ok(())
}
