//! Two queue pairs that are connected, each in a context of its own, with memory to send from and
//! receive into.
//!
//! Memory is poisoned before each receive and every message has a pattern of its own, so that the test sees data that
//! did not arrive, arrived twice or arrived elsewhere.

use crate::capability::Capability;
use crate::env;
use crate::pattern;
use crate::testbed::{Link, link_of};
use crate::verdict::{Stop, Verdict, supported};
use std::ops::Range;
use std::time::{Duration, Instant};
use uverbs::{
    Access, AddressHandle, AddressVector, Completion, CompletionChannel, CompletionQueue, Context,
    Destination, Gid, GidEntry, GidType, LinkLayer, MemoryRegion, Mtu, ParentDomain, PostError,
    ProtectionDomain, Psn, Qkey, QpAttr, QpState, QpType, Qpn, QueuePair, RecvWr, Remote, Rkey,
    SendWr, Sge, SharedReceiveQueue, WcOpcode, WcStatus,
};

/// The longest wait for a completion: an emulated processor is slow.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);
/// The silence after which a test takes it that nothing happens.
pub(crate) const SILENCE: Duration = Duration::from_millis(60);
/// The key of all datagram queue pairs here.
pub(crate) const QKEY: Qkey = Qkey(0x1234_5678);

/// The configuration of a pair.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Config {
    pub(crate) qp_type: QpType,
    /// Requests of each queue.
    pub(crate) depth: u32,
    /// Scatter/gather entries of each request.
    pub(crate) sges: u32,
    pub(crate) inline: u32,
    /// Entries of each completion queue.
    pub(crate) cqe: u32,
    /// Bytes of a CQE, and whether each is written whole; for mlx5.
    pub(crate) cqe_size: u32,
    pub(crate) pad: bool,
    /// Bytes of memory on each side.
    pub(crate) memory: usize,
    pub(crate) signal_all: bool,
    /// Whether short data comes in completions; for mlx5.
    pub(crate) scatter: bool,
    /// Whether only received data does.
    pub(crate) scatter_received: bool,
    /// Whether data may be placed out of order; for mlx5.
    pub(crate) out_of_order: bool,
    pub(crate) srq: bool,
    pub(crate) access: Access,
    pub(crate) mtu: Mtu,
    pub(crate) timeout: u8,
    pub(crate) retry_count: u8,
    pub(crate) rnr_retry: u8,
}

impl Config {
    pub(crate) fn of(qp_type: QpType) -> Config {
        Config {
            qp_type,
            depth: 16,
            sges: 4,
            inline: 64,
            cqe: 64,
            cqe_size: 64,
            pad: false,
            memory: 1 << 17,
            signal_all: false,
            scatter: false,
            scatter_received: false,
            out_of_order: false,
            srq: false,
            access: Access::ALL_REMOTE,
            mtu: env::mtu(),
            // Two seconds with all retries: a machine that emulates others may stand still for half a second.
            timeout: 16,
            retry_count: 7,
            rnr_retry: env::rnr_retry(),
        }
    }

    pub(crate) fn rc() -> Config {
        Config::of(QpType::RC)
    }

    pub(crate) fn uc() -> Config {
        Config::of(QpType::UC)
    }

    pub(crate) fn ud() -> Config {
        Config::of(QpType::UD)
    }
}

/// A completion, copied out of the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Done {
    pub(crate) wr_id: u64,
    pub(crate) status: WcStatus,
    pub(crate) opcode: WcOpcode,
    pub(crate) byte_len: u32,
    pub(crate) qpn: Qpn,
    pub(crate) src_qpn: Qpn,
    pub(crate) imm: Option<u32>,
    pub(crate) invalidated: Option<Rkey>,
    pub(crate) grh: bool,
}

impl Done {
    fn of(completion: Completion<'_>) -> Done {
        Done {
            wr_id: completion.wr_id(),
            status: completion.status(),
            opcode: completion.opcode(),
            byte_len: completion.byte_len(),
            qpn: completion.qpn(),
            src_qpn: completion.src_qpn(),
            imm: completion.imm(),
            invalidated: completion.invalidated_rkey(),
            grh: completion.has_grh(),
        }
    }
}

/// The next completion of a queue if there is one.
pub(crate) fn poll(cq: &mut CompletionQueue) -> Verdict<Option<Done>> {
    Ok(cq.poll()?.next().map(Done::of))
}

/// Waits for a completion.
#[track_caller]
pub(crate) fn wait(cq: &mut CompletionQueue) -> Verdict<Done> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(done) = poll(cq)? {
            return Ok(done);
        }
        if Instant::now() > deadline {
            return Err(Stop::fail(format!("no completion after {PATIENCE:?}")));
        }
        std::thread::yield_now();
    }
}

/// Makes a parent domain of a protection domain.
pub(crate) type Extend<'a> = dyn Fn(&ProtectionDomain) -> uverbs::Result<ParentDomain> + 'a;

/// One half of a pair.
#[derive(Debug)]
pub(crate) struct Side {
    // The queue pair goes first: memory stays until the device is done with it.
    pub(crate) qp: QueuePair,
    pub(crate) srq: Option<SharedReceiveQueue>,
    pub(crate) cq: CompletionQueue,
    pub(crate) channel: CompletionChannel,
    pub(crate) memory: MemoryRegion<u8>,
    pub(crate) pd: ProtectionDomain,
    pub(crate) context: Context,
    pub(crate) gid: GidEntry,
    pub(crate) lid: u16,
    pub(crate) link: Link,
    psn: Psn,
}

/// Two connected sides.
#[derive(Debug)]
pub(crate) struct Pair {
    pub(crate) a: Side,
    pub(crate) b: Side,
    pub(crate) config: Config,
}

impl Pair {
    /// Two queue pairs ready to send to each other.
    pub(crate) fn new(config: Config) -> Verdict<Pair> {
        let mut pair = Pair::unconnected(config)?;
        pair.connect()?;
        Ok(pair)
    }

    /// Two queue pairs in state RESET.
    pub(crate) fn unconnected(config: Config) -> Verdict<Pair> {
        let (one, other) = env::open_both()?;
        Pair::on(one, other, config)
    }

    /// Two queue pairs in state RESET in contexts of the caller's.
    pub(crate) fn on(one: Context, other: Context, config: Config) -> Verdict<Pair> {
        // Sequence numbers that soon wrap.
        let a = Side::new(one, &config, Psn::new(0xff_fff8))?;
        let b = Side::new(other, &config, Psn::new(0xff_ffff))?;
        Ok(Pair { a, b, config })
    }

    /// Two queue pairs ready to send to each other, whose queues are made in parent domains.
    pub(crate) fn within(config: Config, domain: &Extend<'_>) -> Verdict<Pair> {
        let (one, other) = env::open_both()?;
        let a = Side::within(one, &config, Psn::new(0xff_fff8), Some(domain))?;
        let b = Side::within(other, &config, Psn::new(0xff_ffff), Some(domain))?;
        let mut pair = Pair { a, b, config };
        pair.connect()?;
        Ok(pair)
    }

    /// Brings both from RESET to RTS.
    pub(crate) fn connect(&mut self) -> Verdict {
        self.a.connect(&self.config, &self.b.address())?;
        self.b.connect(&self.config, &self.a.address())
    }

    /// Sends one message of `length` bytes from a to b and checks everything about it.
    #[track_caller]
    pub(crate) fn message(&mut self, seed: u64, length: usize) -> Verdict {
        let header = if self.config.qp_type == QpType::UD { 40 } else { 0 };
        self.b.poison(0..header + length);
        self.b.recv(seed, 0..header + length)?;
        self.a.fill(0..length, seed);
        let sges = [self.a.sge(0..length)];
        let path = self.path()?;
        let wr = path.to(SendWr::send(&sges).id(!seed).signaled());
        self.a.send(wr)?;
        let sent = self.a.expect(!seed, WcOpcode::SEND)?;
        let received = self.b.expect(seed, WcOpcode::RECV)?;
        assert_eq!((sent.qpn, received.qpn), (self.a.qp.qpn(), self.b.qp.qpn()));
        assert_eq!(received.byte_len as usize, header + length);
        self.b.check(header..header + length, seed);
        Ok(())
    }

    /// The path from a to b, for types whose requests name it.
    pub(crate) fn path(&self) -> Verdict<Path> {
        self.a.path_to(&self.config, &self.b.address())
    }
}

/// The path to a peer: an address handle for datagrams, nothing for connections.
#[derive(Debug)]
pub(crate) struct Path {
    ah: Option<AddressHandle>,
    qpn: Qpn,
}

impl Path {
    pub(crate) fn to<'a>(&'a self, wr: SendWr<'a>) -> SendWr<'a> {
        match &self.ah {
            Some(ah) => wr.to(Destination::new(ah, self.qpn, QKEY)),
            None => wr,
        }
    }
}

/// The address that the other side needs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Address {
    pub(crate) qpn: Qpn,
    pub(crate) psn: Psn,
    pub(crate) gid: Gid,
    pub(crate) lid: u16,
}

impl Address {
    /// The path from `side` to this address.
    pub(crate) fn vector(&self, side: &Side) -> AddressVector {
        if side.link.layer == LinkLayer::ETHERNET {
            self.routed(side)
        } else {
            AddressVector::local(side.link.port, self.lid)
        }
    }

    /// The path with a global route, which InfiniBand needs between subnets only.
    pub(crate) fn routed(&self, side: &Side) -> AddressVector {
        let dlid = if side.link.layer == LinkLayer::ETHERNET { 0 } else { self.lid };
        AddressVector { dlid, ..AddressVector::global(side.link.port, side.gid.index, self.gid) }
    }
}

/// The path with a global route from a device's port to itself.
pub(crate) fn loopback(context: &Context) -> Verdict<AddressVector> {
    let (own, link) = (gid(context)?, link_of(context)?);
    let lid = context.query_port(link.port)?.lid;
    let dlid = if link.layer == LinkLayer::ETHERNET { 0 } else { lid };
    Ok(AddressVector { dlid, ..AddressVector::global(link.port, own.index, own.gid) })
}

/// The identifier to send from: routable if there is one, and of the newest version of RoCE.
pub(crate) fn gid(context: &Context) -> Verdict<GidEntry> {
    let rank = |entry: &GidEntry| {
        (entry.gid_type == GidType::ROCE_V2, !entry.gid.is_link_local(), entry.gid.ip().is_ipv4())
    };
    let (table, port) = (context.gid_table()?, link_of(context)?.port);
    let own = table.into_iter().filter(|entry| entry.port == port && !entry.gid.is_zero());
    own.max_by_key(rank).ok_or_else(|| Stop::fail("the port has no global identifier"))
}

impl Side {
    pub(crate) fn new(context: Context, config: &Config, psn: Psn) -> Verdict<Side> {
        Side::within(context, config, psn, None)
    }

    pub(crate) fn within(
        context: Context,
        config: &Config,
        psn: Psn,
        extend: Option<&Extend<'_>>,
    ) -> Verdict<Side> {
        let link = link_of(&context)?;
        let port = context.query_port(link.port)?;
        let gid = gid(&context)?;
        let pd = context.alloc_pd()?;
        let memory = pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u8>(config.memory)?;
        let channel = context.create_comp_channel()?;
        let domain = extend.map(|extend| extend(&pd)).transpose()?;
        let cq = context.cq_builder(config.cqe).cqe_size(config.cqe_size).channel(&channel);
        let cq = if config.pad { cq.pad() } else { cq };
        let cq = match &domain {
            Some(domain) => cq.parent_domain(domain).build()?,
            None => cq.build()?,
        };
        let queues = domain.as_deref().unwrap_or(&pd);
        let srq = match config.srq {
            true => Some(supported(
                queues.srq_builder(config.depth).max_sge(config.sges).build(),
                Capability::Srq,
            )?),
            false => None,
        };
        let mut builder = queues
            .qp_builder(&cq, &cq, config.qp_type)
            .max_send_wr(config.depth)
            .max_recv_wr(config.depth)
            .max_send_sge(config.sges)
            .max_recv_sge(config.sges)
            .max_inline_data(config.inline);
        if config.signal_all {
            builder = builder.signal_all();
        }
        if config.scatter {
            builder = builder.scatter_to_cqe();
        }
        if config.scatter_received {
            builder = builder.scatter_received_to_cqe();
        }
        if config.out_of_order {
            builder = builder.out_of_order_placement();
        }
        if let Some(srq) = &srq {
            builder = builder.srq(srq);
        }
        let qp = supported(builder.build(), Capability::of(config.qp_type))?;
        Ok(Side { qp, srq, cq, channel, memory, pd, context, gid, lid: port.lid, link, psn })
    }

    pub(crate) fn address(&self) -> Address {
        Address { qpn: self.qp.qpn(), psn: self.psn, gid: self.gid.gid, lid: self.lid }
    }

    /// The path to a peer, for types whose requests name it.
    pub(crate) fn path_to(&self, config: &Config, peer: &Address) -> Verdict<Path> {
        let create = || supported(self.pd.create_ah(&peer.vector(self)), Capability::Ah);
        let ah = (config.qp_type == QpType::UD).then(create).transpose()?;
        Ok(Path { ah, qpn: peer.qpn })
    }

    /// Brings the queue pair from RESET to RTS.
    pub(crate) fn connect(&mut self, config: &Config, peer: &Address) -> Verdict {
        self.init(config)?;
        self.ready_to_receive(config, peer)?;
        self.ready_to_send(config)
    }

    pub(crate) fn init(&mut self, config: &Config) -> Verdict {
        let attr = QpAttr::new()
            .state(QpState::INIT)
            .port(self.link.port)
            .pkey_index(self.link.pkey_index);
        let attr = match config.qp_type {
            QpType::UD => attr.qkey(QKEY),
            _ => attr.access(config.access),
        };
        Ok(self.qp.modify(&attr)?)
    }

    pub(crate) fn ready_to_receive(&mut self, config: &Config, peer: &Address) -> Verdict {
        let mut attr = QpAttr::new().state(QpState::RTR);
        if config.qp_type != QpType::UD {
            attr = attr
                .path(peer.vector(self))
                .path_mtu(config.mtu)
                .dest_qpn(peer.qpn)
                .rq_psn(peer.psn);
        }
        if config.qp_type == QpType::RC {
            attr = attr.max_dest_rd_atomic(4).min_rnr_timer(1);
        }
        Ok(self.qp.modify(&attr)?)
    }

    pub(crate) fn ready_to_send(&mut self, config: &Config) -> Verdict {
        let mut attr = QpAttr::new().state(QpState::RTS).sq_psn(self.psn);
        if config.qp_type == QpType::RC {
            attr = attr
                .timeout(config.timeout)
                .retry_count(config.retry_count)
                .rnr_retry(config.rnr_retry)
                .max_rd_atomic(4);
        }
        Ok(self.qp.modify(&attr)?)
    }

    /// Brings the queue pair back to RESET.
    pub(crate) fn reset(&mut self) -> Verdict {
        Ok(self.qp.reset(&mut [&mut self.cq])?)
    }

    pub(crate) fn sge(&self, range: Range<usize>) -> Sge {
        self.memory.sge(range).expect("the range is within the memory")
    }

    pub(crate) fn remote(&self, offset: usize) -> Remote {
        self.memory.remote(offset).expect("the offset is within the memory")
    }

    /// Writes the pattern `seed`.
    pub(crate) fn fill(&mut self, range: Range<usize>, seed: u64) {
        let bytes = pattern::bytes(seed, range.len());
        self.memory.copy_from(range.start, &bytes).expect("the range is within the memory");
    }

    /// Writes bytes that no pattern holds by chance.
    pub(crate) fn poison(&mut self, range: Range<usize>) {
        self.fill(range, pattern::POISON);
    }

    pub(crate) fn read(&self, range: Range<usize>) -> Vec<u8> {
        let mut bytes = vec![0; range.len()];
        self.memory.copy_to(range.start, &mut bytes).expect("the range is within the memory");
        bytes
    }

    /// Fails unless the memory holds the pattern `seed`.
    #[track_caller]
    pub(crate) fn check(&self, range: Range<usize>, seed: u64) {
        pattern::check(&self.read(range), seed);
    }

    /// Fails unless the memory is still poisoned.
    #[track_caller]
    pub(crate) fn check_poison(&self, range: Range<usize>) {
        pattern::check(&self.read(range), pattern::POISON);
    }

    /// Fails unless the bytes from `from` on are still those that poisoning `0..to` wrote.
    #[track_caller]
    pub(crate) fn check_rest_of_poison(&self, from: usize, to: usize) {
        let poison = pattern::bytes(pattern::POISON, to);
        assert!(self.read(from..to) == poison[from..], "bytes from {from} on were written");
    }

    /// Posts one send.
    pub(crate) fn send(&mut self, wr: SendWr<'_>) -> Result<(), PostError> {
        self.send_all(&[wr])
    }

    /// Posts sends and rings once.
    #[allow(unsafe_code, reason = "ringing is")]
    pub(crate) fn send_all(&mut self, wrs: &[SendWr<'_>]) -> Result<(), PostError> {
        let mut batch = self.qp.send_batch()?;
        for wr in wrs {
            batch.push(*wr)?;
        }
        // SAFETY: requests of tests name the memory of a side, which is dropped after its queue
        // pair and borrowed nowhere, or nothing that exists.
        unsafe { batch.ring() }.map_err(PostError::Ring)
    }

    /// Posts a receive into a piece of the memory.
    pub(crate) fn recv(&mut self, wr_id: u64, range: Range<usize>) -> Result<(), PostError> {
        let sges = [self.sge(range)];
        self.recv_into(wr_id, &sges)
    }

    /// Posts a receive, to the shared queue if there is one.
    #[allow(unsafe_code, reason = "ringing is")]
    pub(crate) fn recv_into(&mut self, wr_id: u64, sges: &[Sge]) -> Result<(), PostError> {
        let mut batch = match &mut self.srq {
            Some(srq) => srq.batch()?,
            None => self.qp.recv_batch()?,
        };
        batch.push(RecvWr::new(sges).id(wr_id))?;
        // SAFETY: as for sends.
        unsafe { batch.ring() }.map_err(PostError::Ring)
    }

    /// Waits for a completion.
    #[track_caller]
    pub(crate) fn wait(&mut self) -> Verdict<Done> {
        wait(&mut self.cq)
    }

    /// Waits for a completion, which must be a success of this request.
    #[track_caller]
    pub(crate) fn expect(&mut self, wr_id: u64, opcode: WcOpcode) -> Verdict<Done> {
        let done = self.wait()?;
        assert_eq!(
            (done.wr_id, done.status, done.opcode),
            (wr_id, WcStatus::SUCCESS, opcode),
            "{done:?}"
        );
        Ok(done)
    }

    /// Waits for a completion, which must be a failure of this request.
    #[track_caller]
    pub(crate) fn expect_failure(&mut self, wr_id: u64, status: WcStatus) -> Verdict<Done> {
        let done = self.wait()?;
        assert_eq!((done.wr_id, done.status), (wr_id, status), "{done:?}");
        assert_eq!(done.qpn, self.qp.qpn(), "{done:?}");
        Ok(done)
    }

    /// Waits for a completion, which must be a failure of this request with one of these.
    #[track_caller]
    pub(crate) fn expect_failure_of(&mut self, wr_id: u64, statuses: &[WcStatus]) -> Verdict {
        let done = self.wait()?;
        assert!(done.wr_id == wr_id && statuses.contains(&done.status), "{done:?}: {statuses:?}");
        Ok(())
    }

    /// Fails if a completion comes.
    #[track_caller]
    pub(crate) fn expect_silence(&mut self) -> Verdict {
        let end = Instant::now() + SILENCE;
        while Instant::now() < end {
            if let Some(done) = poll(&mut self.cq)? {
                return Err(Stop::fail(format!("an unexpected completion: {done:?}")));
            }
            std::thread::sleep(SILENCE / 20);
        }
        Ok(())
    }
}
