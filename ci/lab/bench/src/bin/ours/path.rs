//! The data path of this workspace's library.

use lab_bench::Failure;
use lab_bench::clock::linger;
use lab_bench::path::{
    AFTERWARDS, BATCH, INLINE, LAST, Lane, Operation, POLLED, Path, RECEIVED, RUN, Request,
    SEGMENT, SEGMENTS, SENDS, SETTLING, SLICE, SLICES, WORDS, place,
};
use std::hint::black_box;
use std::ops::Deref;
use std::time::{Duration, Instant};
use uverbs::{
    Access, AddressHandle, Completion, CompletionQueue, Context, Destination, Device, Exclusive,
    GidEntry, Handshake, MemoryRegion, Notify, ParentDomain, PostError, ProtectionDomain, Qkey,
    QpType, QueuePair, RecvBatch, RecvWr, RingError, SendBatch, SendWr, Sge, Shared,
    SharedReceiveQueue, Sharing, ThreadDomain, WcStatus, XrcTarget,
};

/// How a batch of sends is handed over.
pub(crate) trait Ringing: Sharing + Sized {
    /// The token of exclusive access.
    type Token;

    /// The domain that everything is made of.
    fn domain(pd: ProtectionDomain) -> Result<(Domain<Self>, Self::Token), Failure>;

    /// Hands it over.
    ///
    /// # Safety
    ///
    /// As for [`SendBatch::ring`].
    unsafe fn ring(batch: SendBatch<'_, Self>, token: &mut Self::Token) -> Result<(), RingError>;
}

/// A protection domain of either kind.
pub(crate) enum Domain<S: Sharing> {
    Plain(ProtectionDomain<S>),
    Parent(ParentDomain<S>),
}

impl<S: Sharing> Deref for Domain<S> {
    type Target = ProtectionDomain<S>;

    fn deref(&self) -> &ProtectionDomain<S> {
        match self {
            Domain::Plain(pd) => pd,
            Domain::Parent(parent) => parent,
        }
    }
}

impl Ringing for Shared {
    type Token = ();

    fn domain(pd: ProtectionDomain) -> Result<(Domain<Shared>, ()), Failure> {
        Ok((Domain::Plain(pd), ()))
    }

    #[inline(always)]
    unsafe fn ring(batch: SendBatch<'_, Shared>, (): &mut ()) -> Result<(), RingError> {
        // SAFETY: the caller's promise.
        unsafe { batch.ring() }
    }
}

impl Ringing for Exclusive {
    type Token = ThreadDomain;

    fn domain(pd: ProtectionDomain) -> Result<(Domain<Exclusive>, ThreadDomain), Failure> {
        let td = pd.context().alloc_td()?;
        let parent = pd.parent_domain_builder().thread_domain(&td).build()?;
        Ok((Domain::Parent(parent), td))
    }

    #[inline(always)]
    unsafe fn ring(
        batch: SendBatch<'_, Exclusive>,
        td: &mut ThreadDomain,
    ) -> Result<(), RingError> {
        // SAFETY: the caller's promise.
        unsafe { batch.ring(td) }
    }
}

/// The sending and the receiving queue pair.
struct Ends<S: Ringing> {
    qp: QueuePair<S>,
    /// The receiver, or nothing where none receives.
    peer: Option<QueuePair<S>>,
    send_cq: CompletionQueue,
    recv_cq: CompletionQueue,
}

/// Everything that the operations need.
pub(crate) struct Ours<S: Ringing> {
    own: Ends<S>,
    shared: Ends<S>,
    datagrams: Ends<S>,
    xrc: Ends<S>,
    _target: XrcTarget,
    /// The SRQ that XRC requests name; their memory is of its domain.
    xrc_srq: SharedReceiveQueue,
    srq: SharedReceiveQueue,
    ah: AddressHandle,
    qkey: Qkey,
    memory: MemoryRegion<u64>,
    mark: u64,
    token: S::Token,
}

/// Bytes of a piece of memory that begins at a word.
fn piece(memory: &MemoryRegion<u64>, word: usize, length: u32) -> Result<Sge, Failure> {
    let start = 8 * word;
    Ok(memory.sge(start..start + length as usize)?)
}

/// Builds and hands over `RUN` requests, `N` at once. A function of its own for each kind, as theirs
/// have, or all loops share the registers of one large function.
#[inline(never)]
fn post<'a, S: Ringing, const N: u32>(
    qp: &mut QueuePair<S>,
    token: &mut S::Token,
    make: impl Fn() -> SendWr<'a>,
) -> Result<(), Failure> {
    let mut id = 0;
    for _ in 0..RUN / N {
        let mut batch = qp.send_batch()?;
        if N == 1 {
            // As a program that posts one has it: without a loop around it.
            id += 1;
            batch.push(make().id(id))?;
        } else {
            for _ in 0..N {
                id += 1;
                batch.push(make().id(id))?;
            }
        }
        // SAFETY: the memory lives as long as the queue pairs, and nobody borrows it.
        unsafe { S::ring(batch, token) }?;
    }
    Ok(())
}

/// Hands over `RUN` receives, `N` at once. A function of its own for each queue, as for sends.
#[inline(never)]
fn receive<Q: Receiver, const N: u32>(queue: &mut Q, sges: &[Sge; 1]) -> Result<(), Failure> {
    let mut id = 0;
    for _ in 0..RUN / N {
        let mut batch = queue.start()?;
        if N == 1 {
            id += 1;
            batch.push(RecvWr::new(sges).id(id))?;
        } else {
            for _ in 0..N {
                id += 1;
                batch.push(RecvWr::new(sges).id(id))?;
            }
        }
        // SAFETY: the memory lives as long as the queue pairs, and nobody borrows it.
        unsafe { batch.ring()? };
    }
    Ok(())
}

/// A queue that takes receives.
trait Receiver {
    fn start(&mut self) -> Result<RecvBatch<'_>, PostError>;
}

impl<S: Sharing> Receiver for QueuePair<S> {
    #[inline(always)]
    fn start(&mut self) -> Result<RecvBatch<'_>, PostError> {
        self.recv_batch()
    }
}

impl Receiver for SharedReceiveQueue {
    #[inline(always)]
    fn start(&mut self) -> Result<RecvBatch<'_>, PostError> {
        self.batch()
    }
}

/// The fields that are read of each completion.
#[inline]
fn look(completion: Completion<'_>) -> Result<u64, Failure> {
    if !completion.is_success() {
        return Err(failed(completion.wr_id(), completion.status()));
    }
    Ok(completion.wr_id() + u64::from(completion.opcode().0))
}

#[cold]
fn failed(id: u64, status: WcStatus) -> Failure {
    format!("request {id}: {status}").into()
}

/// Takes `RUN` completions, at most `N` at once.
#[inline(never)]
fn poll<const N: u32>(cq: &mut CompletionQueue) -> Result<u32, Failure> {
    let (mut found, mut sum) = (0, 0);
    for _ in 0..RUN / N {
        let mut completions = cq.poll()?;
        if N == 1 {
            if let Some(completion) = completions.next() {
                sum += look(completion)?;
                found += 1;
            }
        } else {
            for _ in 0..N {
                let Some(completion) = completions.next() else { break };
                sum += look(completion)?;
                found += 1;
            }
        }
    }
    black_box(sum);
    Ok(found)
}

impl<S: Ringing> Ours<S> {
    fn ends(&mut self, lane: Lane) -> &mut Ends<S> {
        match lane {
            Lane::Own => &mut self.own,
            Lane::Shared => &mut self.shared,
            Lane::Datagrams => &mut self.datagrams,
            Lane::Xrc => &mut self.xrc,
        }
    }

    fn post_batches<const N: u32>(&mut self, lane: Lane, request: Request) -> Result<(), Failure> {
        let memory = &self.memory;
        let remote = memory.remote(8 * place::TARGET)?;
        let source = [piece(memory, place::SOURCE, SEGMENT)?];
        let ends = match lane {
            Lane::Own => &mut self.own,
            Lane::Shared => &mut self.shared,
            Lane::Datagrams => &mut self.datagrams,
            Lane::Xrc => &mut self.xrc,
        };
        let (qp, token) = (&mut ends.qp, &mut self.token);
        match request {
            Request::Write => post::<S, N>(qp, token, || SendWr::write(remote, &source)),
            Request::XrcWrite => {
                let named = self.xrc_srq.number().ok_or("the queue is not of XRC")?;
                post::<S, N>(qp, token, || SendWr::write(remote, &source).to_srq(named))
            }
            Request::Read => post::<S, N>(qp, token, || SendWr::read(remote, &source)),
            Request::FetchAdd => {
                let counter = memory.remote(8 * place::COUNTER)?;
                let fetched = [piece(memory, place::FETCHED, 8)?];
                post::<S, N>(qp, token, || SendWr::fetch_add(counter, 1, &fetched))
            }
            Request::Gather => {
                let mut sges = [source[0]; SEGMENTS];
                for (segment, sge) in sges.iter_mut().enumerate() {
                    *sge = piece(memory, place::SOURCE + 16 * segment, SEGMENT)?;
                }
                post::<S, N>(qp, token, || SendWr::send(&sges))
            }
            Request::Inline(length) => {
                let data = [0x5a; INLINE as usize];
                let data = &data[..black_box(length) as usize];
                post::<S, N>(qp, token, || SendWr::send(&[]).inline(data))
            }
            Request::InlineList => {
                let data = [0x5a; SLICES * SLICE];
                let mut list = [&data[..]; SLICES];
                for (part, slice) in list.iter_mut().zip(data.chunks_exact(SLICE)) {
                    *part = slice;
                }
                post::<S, N>(qp, token, || SendWr::send(&[]).inline_list(&list))
            }
            Request::Datagram => {
                let qpn = qp.qpn();
                let to = Destination::new(&self.ah, qpn, self.qkey);
                post::<S, N>(qp, token, || SendWr::send(&source).to(to))
            }
        }
    }

    /// Takes the completions of the lane's queues, until `LAST` was sent and `received` came.
    fn drain(&mut self, lane: Lane, received: u32) -> Result<(), Failure> {
        let ends = self.ends(lane);
        let (mut sent, mut came) = (false, 0);
        let start = Instant::now();
        while !sent || came < received {
            let mut completions = ends.send_cq.poll()?;
            while let Some(completion) = completions.next() {
                sent |= completion.wr_id() == LAST;
                look(completion)?;
            }
            let mut completions = ends.recv_cq.poll()?;
            while let Some(completion) = completions.next() {
                look(completion)?;
                came += 1;
            }
            if start.elapsed() > Duration::from_secs(SETTLING) {
                return Err(format!("not done: {came} of {received} received").into());
            }
        }
        Ok(())
    }
}

impl<S: Ringing> Path for Ours<S> {
    const WAYS: &[&str] = &["uverbs"];

    fn open(device: &str, _: bool) -> Result<Self, Failure> {
        let context = Context::open(&Device::by_name(device)?)?;
        let (pd, token) = S::domain(context.alloc_pd()?)?;
        let memory = pd.mr_builder().access(Access::ALL_REMOTE).allocate(WORDS)?;
        let srq = pd.srq_builder(2 * RUN).build()?;
        let gid = context.default_gid(1)?;
        let own = pair(&context, &pd, None, gid)?;
        let shared = pair(&context, &pd, Some(&srq), gid)?;
        let datagrams = ends(&context, &pd, QpType::UD)?;
        let xrc = ends(&context, &pd, QpType::XRC_INI)?;
        let xrcd = context.xrcd_builder().build()?;
        let target = xrcd.create_target()?;
        let xrc_srq = pd.srq_builder(1).xrc(&xrcd, &xrc.recv_cq).build()?;
        let (here, there) = (xrc.qp.endpoint(&gid)?, target.endpoint(&gid)?);
        xrc.qp.handshake(&there, &Handshake::new())?;
        target.handshake(&here, &Handshake::new())?;
        let itself = datagrams.qp.endpoint(&gid)?;
        datagrams.qp.handshake(&itself, &Handshake::new())?;
        let ah = pd.create_ah(&datagrams.qp.path_to(&itself)?)?;
        let qkey = itself.qkey;
        Ok(Ours {
            own,
            shared,
            datagrams,
            xrc,
            _target: target,
            xrc_srq,
            srq,
            ah,
            qkey,
            memory,
            mark: 0,
            token,
        })
    }

    fn offers(_: usize, _: Operation) -> bool {
        true
    }

    fn post(&mut self, _: usize, lane: Lane, request: Request, batch: u32) -> Result<(), Failure> {
        match batch {
            1 => self.post_batches::<1>(lane, request),
            BATCH => self.post_batches::<BATCH>(lane, request),
            other => Err(format!("no batches of {other}").into()),
        }
    }

    fn build(&mut self, _: usize) -> Result<(), Failure> {
        let remote = self.memory.remote(8 * place::TARGET)?;
        let source = [piece(&self.memory, place::SOURCE, SEGMENT)?];
        for id in 0..RUN {
            let mut batch = self.own.qp.send_batch()?;
            batch.push(SendWr::write(remote, &source).id(id.into()))?;
        }
        Ok(())
    }

    fn receive(&mut self, lane: Lane, batch: u32) -> Result<(), Failure> {
        let sges = [piece(&self.memory, place::INBOX, RECEIVED)?];
        let peer = self.own.peer.as_mut().ok_or("the lane takes no receives")?;
        match (lane, batch) {
            (Lane::Own, 1) => receive::<_, 1>(peer, &sges),
            (Lane::Own, BATCH) => receive::<_, BATCH>(peer, &sges),
            (Lane::Shared, 1) => receive::<_, 1>(&mut self.srq, &sges),
            (Lane::Shared, BATCH) => receive::<_, BATCH>(&mut self.srq, &sges),
            other => Err(format!("no such receives: {other:?}").into()),
        }
    }

    fn poll(&mut self, _: usize, batch: u32) -> Result<u32, Failure> {
        match batch {
            1 => poll::<1>(&mut self.own.send_cq),
            POLLED => poll::<POLLED>(&mut self.own.send_cq),
            other => Err(format!("no polls of {other}").into()),
        }
    }

    fn poll_empty(&mut self, _: usize) -> Result<u32, Failure> {
        let mut found = 0;
        for _ in 0..RUN {
            if self.own.send_cq.poll()?.next().is_some() {
                found += 1;
            }
        }
        Ok(found)
    }

    fn arm(&mut self) -> Result<(), Failure> {
        for _ in 0..RUN {
            self.own.send_cq.req_notify(Notify::Next)?;
        }
        Ok(())
    }

    fn settle(&mut self, lane: Lane, received: u32) -> Result<(), Failure> {
        let source = [piece(&self.memory, place::SOURCE, SEGMENT)?];
        let wr = match lane {
            Lane::Datagrams => {
                let qpn = self.datagrams.qp.qpn();
                SendWr::send(&source).to(Destination::new(&self.ah, qpn, self.qkey))
            }
            Lane::Own | Lane::Shared => {
                SendWr::write(self.memory.remote(8 * place::TARGET)?, &source)
            }
            Lane::Xrc => {
                let named = self.xrc_srq.number().ok_or("the queue is not of XRC")?;
                SendWr::write(self.memory.remote(8 * place::TARGET)?, &source).to_srq(named)
            }
        };
        let ends = match lane {
            Lane::Own => &mut self.own,
            Lane::Shared => &mut self.shared,
            Lane::Datagrams => &mut self.datagrams,
            Lane::Xrc => &mut self.xrc,
        };
        let mut batch = ends.qp.send_batch()?;
        batch.push(wr.id(LAST).signaled())?;
        // SAFETY: the memory lives as long as the queue pairs, and nobody borrows it.
        unsafe { S::ring(batch, &mut self.token) }?;
        self.drain(lane, received)
    }

    fn fill(&mut self) -> Result<(), Failure> {
        self.mark += 1;
        self.memory.write_at(place::MARK, self.mark)?;
        let source = [piece(&self.memory, place::SOURCE, SEGMENT)?];
        let mark = [piece(&self.memory, place::MARK, 8)?];
        let target = self.memory.remote(8 * place::TARGET)?;
        let marked = self.memory.remote(8 * place::MARKED)?;
        let mut batch = self.own.qp.send_batch()?;
        for _ in 1..RUN {
            batch.push(SendWr::write(target, &source).signaled())?;
        }
        batch.push(SendWr::write(marked, &mark).signaled())?;
        // SAFETY: the memory lives as long as the queue pairs, and nobody borrows it.
        unsafe { S::ring(batch, &mut self.token) }?;
        let start = Instant::now();
        while self.memory.read_at(place::MARKED) != Some(self.mark) {
            if start.elapsed() > Duration::from_secs(SETTLING) {
                return Err("the last write did not arrive".into());
            }
        }
        // The completion follows the write.
        linger(AFTERWARDS);
        Ok(())
    }
}

fn ends<S: Ringing>(
    context: &Context,
    pd: &ProtectionDomain<S>,
    qp_type: QpType,
) -> Result<Ends<S>, Failure> {
    let cq = || -> Result<CompletionQueue, Failure> {
        let channel = context.create_comp_channel()?;
        Ok(context.cq_builder(2 * SENDS).channel(&channel).build()?)
    };
    let (send_cq, recv_cq) = (cq()?, cq()?);
    let qp = pd
        .qp_builder(&send_cq, &recv_cq, qp_type)
        .max_send_wr(SENDS)
        .max_send_sge(SEGMENTS as u32)
        .max_inline_data(INLINE)
        .build()?;
    Ok(Ends { qp, peer: None, send_cq, recv_cq })
}

fn pair<S: Ringing>(
    context: &Context,
    pd: &ProtectionDomain<S>,
    srq: Option<&SharedReceiveQueue>,
    gid: GidEntry,
) -> Result<Ends<S>, Failure> {
    let mut ends = ends(context, pd, QpType::RC)?;
    let mut peer = pd
        .qp_builder(&ends.send_cq, &ends.recv_cq, QpType::RC)
        .max_send_sge(SEGMENTS as u32)
        .max_inline_data(INLINE)
        .max_recv_wr(2 * RUN);
    if let Some(srq) = srq {
        peer = peer.srq(srq);
    }
    let peer = peer.build()?;
    let (here, there) = (ends.qp.endpoint(&gid)?, peer.endpoint(&gid)?);
    ends.qp.handshake(&there, &Handshake::new())?;
    peer.handshake(&here, &Handshake::new())?;
    ends.peer = Some(peer);
    Ok(ends)
}
