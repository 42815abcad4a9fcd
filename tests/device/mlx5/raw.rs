//! Queues that foreign code drives, by their addresses and numbers alone.
#![allow(unsafe_code, reason = "queues are written and read by address")]

use crate::capability::Capability;
use crate::fork::in_child;
use crate::leaks::rounds;
use crate::pair::{Config, PATIENCE, Pair, QKEY, Side};
use crate::verdict::{Stop, Verdict, supported, trials};
use std::sync::atomic::{Ordering, fence};
use std::time::Instant;
use uverbs::mlx5::{
    CqLayout, QpIndices, QpLayout, RawCompletionQueue, RawQueuePair, RawSharedReceiveQueue,
    SrqLayout, WqLayout, address_vector, device_memory_address,
};
use uverbs::{Access, Errno, Notify, QpAttr, QpState, Remote, SendWr, Sge, WcOpcode};
use uverbs_uapi::endian::{Be32, Be64};
use uverbs_uapi::mlx5::cqe::{mlx5_cqe_opcode, mlx5_cqe64};
use uverbs_uapi::mlx5::wqe::{
    mlx5_wqe_ctrl_flags, mlx5_wqe_ctrl_seg, mlx5_wqe_data_seg, mlx5_wqe_opcode, mlx5_wqe_raddr_seg,
};
use zerocopy::FromBytes;

trials![
    foreign_code_writes_through_a_queue_pair_and_reads_its_completions,
    foreign_code_receives,
    foreign_code_fills_a_shared_receive_queue,
    foreign_code_sends_a_datagram,
    queue_of_the_library_has_the_index_of_a_foreign_wqe,
    foreign_code_arms_a_queue,
    queue_that_ignores_overruns_is_written_over,
    busy_queue_pair_is_not_taken,
    queue_pair_that_shares_its_register_is_not_taken,
    queue_that_was_not_asked_for_has_no_wqes,
    busy_shared_receive_queue_is_not_taken,
    dropped_queue_frees_nothing_that_foreign_code_consumed,
    raw_queues_leave_nothing,
    raw_queues_stay_the_parents,
    raw_queue_pair_comes_back_by_a_reset,
    raw_queue_pair_comes_back_by_a_reset_while_its_completion_queue_is_raw,
    device_memory_is_where_it_is_said_to_be,
];

/// Stores big-endian words of a doorbell record: `word` 0 or 1.
fn store(dbrec: *mut u32, word: usize, value: u32) {
    fence(Ordering::SeqCst);
    // SAFETY: a record has two words; the device reads them at any time.
    unsafe { dbrec.wrapping_add(word).write_volatile(value.to_be()) };
}

/// Code that posts sends.
pub(super) struct Poster {
    qpn: u32,
    buf: *mut u8,
    /// The number of WQEBBs.
    wqebbs: u32,
    dbrec: *mut u32,
    /// WQEBBs posted.
    at: u16,
}

impl Poster {
    pub(super) fn new(qpn: u32, buf: *mut u8, wqebbs: u32, dbrec: *mut u32) -> Poster {
        Poster { qpn, buf, wqebbs, dbrec, at: 0 }
    }

    fn of(QpLayout { qpn, sq, dbrec, .. }: QpLayout) -> Poster {
        assert_eq!(sq.stride, WQEBB as u32);
        Poster::new(qpn, sq.buf, sq.wqe_count, dbrec)
    }

    /// WQEBBs posted.
    pub(super) fn at(&self) -> u16 {
        self.at
    }

    /// Stores the producer index in the doorbell record.
    pub(super) fn publish(&self) {
        store(self.dbrec, 1, self.at.into());
    }

    /// Writes a WQE of a control segment and these others. Returns its first eight bytes.
    fn write(&mut self, opcode: mlx5_wqe_opcode, segments: &[[u8; 16]]) -> [u8; 8] {
        let control = mlx5_wqe_ctrl_seg {
            opmod_idx_opcode: Be32::new(u32::from(self.at) << 8 | u32::from(opcode.0)),
            qpn_ds: Be32::new(self.qpn << 8 | (1 + segments.len() as u32)),
            fm_ce_se: mlx5_wqe_ctrl_flags::MLX5_WQE_CTRL_CQ_UPDATE.bits(),
            ..Default::default()
        };
        let control: [u8; 16] = zerocopy::transmute!(control);
        let (mask, per_wqebb) = (self.wqebbs as usize - 1, WQEBB / 16);
        for (nth, segment) in [control].iter().chain(segments).enumerate() {
            let wqebb = (usize::from(self.at) + nth / per_wqebb) & mask;
            let offset = wqebb * WQEBB + nth % per_wqebb * 16;
            // SAFETY: inside the ring, which has no other writer.
            unsafe { self.buf.wrapping_add(offset).cast::<[u8; 16]>().write(*segment) };
        }
        let wqebbs = (1 + segments.len()).div_ceil(per_wqebb);
        self.at = self.at.wrapping_add(wqebbs as u16);
        *control.first_chunk().expect("a control segment")
    }

    pub(super) fn rdma_write(&mut self, from: &Sge, to: &Remote) -> [u8; 8] {
        let remote = mlx5_wqe_raddr_seg {
            raddr: Be64::new(to.addr),
            rkey: Be32::new(to.rkey.0),
            ..Default::default()
        };
        self.write(
            mlx5_wqe_opcode::MLX5_OPCODE_RDMA_WRITE,
            &[zerocopy::transmute!(remote), data(from)],
        )
    }
}

fn data(sge: &Sge) -> [u8; 16] {
    zerocopy::transmute!(mlx5_wqe_data_seg {
        byte_count: Be32::new(sge.length),
        lkey: Be32::new(sge.lkey.0),
        addr: Be64::new(sge.addr),
    })
}

/// Bytes in front of the data segments of a shared receive queue's WQE, which link it to the next.
const LINK: usize = 16;

/// Writes a receive of one data segment, `offset` bytes into the WQE `at`; another segment ends the list of a longer
/// WQE.
fn fill(wq: &WqLayout, at: usize, offset: usize, sge: &Sge) {
    const SEGMENT: usize = 16;
    let (stride, end) = (wq.stride as usize, Sge { length: 0, lkey: uverbs::Lkey(0x100), addr: 0 });
    let segment = wq.buf.wrapping_add(at * stride + offset).cast::<[u8; SEGMENT]>();
    // SAFETY: inside the ring, which has no other writer.
    unsafe { segment.write(data(sge)) };
    if stride > offset + SEGMENT {
        // SAFETY: as above.
        unsafe { segment.wrapping_add(1).write(data(&end)) };
    }
}

/// Bytes of a WQEBB.
const WQEBB: usize = 64;

/// Code that polls.
pub(super) struct Poller {
    buf: *mut u8,
    count: u32,
    /// Bytes of a CQE.
    size: u32,
    dbrec: *mut u32,
    consumer: u32,
}

impl Poller {
    pub(super) fn new(
        buf: *mut u8,
        count: u32,
        size: u32,
        dbrec: *mut u32,
        consumer: u32,
    ) -> Poller {
        Poller { buf, count, size, dbrec, consumer }
    }

    fn of(CqLayout { buf, cqe_count, cqe_size, dbrec, consumer, .. }: CqLayout) -> Poller {
        Poller::new(buf, cqe_count, cqe_size, dbrec, consumer)
    }

    /// Stores the word that arms the queue, after so many events; the register takes it, too.
    pub(super) fn arm(&self, events: u32) -> u32 {
        let word = (events & 3) << 28 | self.consumer;
        store(self.dbrec, 1, word);
        word
    }

    /// Waits for a CQE.
    fn wait(&mut self) -> Verdict<mlx5_cqe64> {
        let at = (self.consumer & (self.count - 1)) * self.size + self.size - 64;
        // SAFETY: inside the ring.
        let cqe = unsafe { self.buf.add(at as usize) };
        let parity = (self.consumer >> self.count.trailing_zeros()) as u8 & 1;
        let deadline = Instant::now() + PATIENCE;
        loop {
            // SAFETY: inside the CQE; the device writes it at any time.
            let op_own = unsafe { cqe.wrapping_add(63).read_volatile() };
            if op_own & 1 == parity && op_own >> 4 != mlx5_cqe_opcode::MLX5_CQE_INVALID.0 {
                break;
            }
            if Instant::now() > deadline {
                return Err(Stop::fail(format!("no CQE {} after {PATIENCE:?}", self.consumer)));
            }
            std::thread::yield_now();
        }
        fence(Ordering::SeqCst);
        // SAFETY: the device has finished with the CQE.
        let bytes = unsafe { cqe.cast::<[u8; 64]>().read() };
        self.consumer = (self.consumer + 1) & 0xff_ffff;
        store(self.dbrec, 0, self.consumer);
        mlx5_cqe64::read_from_bytes(&bytes).map_err(|_| Stop::fail("a CQE has 64 bytes"))
    }

    /// Waits for a CQE with this opcode; returns its WQE's index and its length.
    #[track_caller]
    pub(super) fn expect(&mut self, opcode: mlx5_cqe_opcode) -> Verdict<(u16, u32)> {
        let cqe = self.wait()?;
        assert_eq!(cqe.op_own >> 4, opcode.0, "CQE {}", self.consumer);
        Ok((cqe.wqe_counter.get(), cqe.byte_cnt.get()))
    }
}

/// A connected pair whose first side has a raw queue pair and a raw completion queue.
struct Raw {
    qp: RawQueuePair,
    cq: RawCompletionQueue,
    poster: Poster,
    poller: Poller,
    a: Parts,
    b: Side,
}

/// The memory of the first side, which lives longer than its queues.
struct Parts {
    memory: uverbs::MemoryRegion<u8>,
    channel: uverbs::CompletionChannel,
}

impl Raw {
    fn new(config: Config) -> Verdict<Raw> {
        super::open()?;
        let Pair { a, b, .. } = Pair::new(config)?;
        let Side { qp, cq, channel, memory, .. } = a;
        let (qp, cq) = (RawQueuePair::take(qp)?, RawCompletionQueue::take(cq)?);
        let poster = Poster::of(qp.layout());
        let poller = Poller::of(cq.layout());
        Ok(Raw { qp, cq, poster, poller, a: Parts { memory, channel }, b })
    }

    fn ring(&mut self, head: [u8; 8]) -> Verdict {
        // SAFETY: the memory of both sides is dropped after the queues.
        Ok(unsafe { self.qp.ring(self.poster.at, head) }?)
    }
}

fn foreign_code_writes_through_a_queue_pair_and_reads_its_completions() -> Verdict {
    for (cqe_size, cqe) in [(64, 64), (128, 8)] {
        let mut raw = Raw::new(Config { cqe, cqe_size, ..Config::rc() })?;
        let rounds = 3 * raw.poster.wqebbs.max(raw.poller.count);
        for round in 0..rounds {
            raw.a.memory.write_at(0, round as u8)?;
            let (from, to) = (raw.a.memory.sge(..1)?, raw.b.remote(round as usize % 4096));
            let first = raw.poster.at;
            let head = raw.poster.rdma_write(&from, &to);
            raw.ring(head)?;
            let (index, _) = raw.poller.expect(mlx5_cqe_opcode::MLX5_CQE_REQ)?;
            assert_eq!(index, first, "round {round}");
            assert_eq!(raw.b.memory.read_at(round as usize % 4096), Some(round as u8));
        }
        // The library goes on where the other code stopped, over the end of both rings.
        let Raw { qp, cq, poster, poller, a: Parts { mut memory, channel: _channel }, b } = raw;
        let indices = QpIndices { wqebbs: poster.at, receives: 0 };
        // SAFETY: each WQE has completed, and its CQE was consumed.
        let mut qp = unsafe { qp.give_back(indices) }?;
        // SAFETY: as above.
        let mut cq = unsafe { cq.give_back(poller.consumer) }?;
        for round in 0..2 * u64::from(rounds) {
            memory.write_at(0, !round as u8)?;
            let sges = [memory.sge(..1)?];
            let mut batch = qp.send_batch()?;
            batch.push(SendWr::write(b.remote(0), &sges).id(round).signaled())?;
            // SAFETY: the memory is dropped after the queue pair.
            unsafe { batch.ring()? };
            let done = crate::pair::wait(&mut cq)?;
            assert_eq!((done.wr_id, done.opcode), (round, WcOpcode::WRITE));
            assert_eq!(b.memory.read_at(0), Some(!round as u8));
        }
        drop((qp, cq));
    }
    Ok(())
}

fn foreign_code_receives() -> Verdict {
    let mut raw = Raw::new(Config::rc())?;
    let layout = raw.qp.layout().rq.ok_or_else(|| Stop::fail("it has a receive queue"))?;
    let mut posted = 0u16;
    for round in 0..3 * layout.wqe_count as u64 {
        let at = usize::from(posted) & (layout.wqe_count as usize - 1);
        let sge = raw.a.memory.sge(64..128)?;
        fill(&layout, at, 0, &sge);
        posted = posted.wrapping_add(1);
        store(raw.poster.dbrec, 0, posted.into());
        raw.b.fill(0..64, round);
        let sges = [raw.b.sge(0..64)];
        raw.b.send(SendWr::send(&sges).id(round).signaled())?;
        let (index, length) = raw.poller.expect(mlx5_cqe_opcode::MLX5_CQE_RESP_SEND)?;
        assert_eq!((index, length), (posted.wrapping_sub(1), 64));
        raw.b.expect(round, WcOpcode::SEND)?;
        let mut bytes = [0; 64];
        raw.a.memory.copy_to(64, &mut bytes)?;
        crate::pattern::check(&bytes, round);
    }
    Ok(())
}

fn foreign_code_fills_a_shared_receive_queue() -> Verdict {
    super::open()?;
    let Pair { a, mut b, .. } = Pair::new(Config { srq: true, ..Config::rc() })?;
    let Side { qp, srq, mut cq, memory, .. } = a;
    let srq = srq.ok_or_else(|| Stop::fail("it has a shared receive queue"))?;
    let raw = RawSharedReceiveQueue::take(srq)?;
    let SrqLayout { wq, mut head, dbrec, mut posted, srqn, .. } = raw.layout();
    assert_ne!(srqn, 0);
    let rounds = 3 * wq.wqe_count as u64;
    for round in 0..rounds {
        let sge = memory.sge(64..128)?;
        fill(&wq, head.into(), LINK, &sge);
        let filled = head;
        head = (head + 1) & (wq.wqe_count - 1) as u16;
        posted = posted.wrapping_add(1);
        store(dbrec, 0, posted.into());
        b.fill(0..64, round);
        let sges = [b.sge(0..64)];
        b.send(SendWr::send(&sges).id(round).signaled())?;
        // A queue of the library names the WQE.
        let done = crate::pair::wait(&mut cq)?;
        assert_eq!((done.opcode, done.wr_id), (WcOpcode::RECV, filled.into()));
        b.expect(round, WcOpcode::SEND)?;
    }
    // SAFETY: each receive has completed, and its completion was polled.
    let mut srq = unsafe { raw.give_back(head, posted) }?;
    for round in 0..rounds {
        let sges = [memory.sge(64..128)?];
        let mut batch = srq.batch()?;
        batch.push(uverbs::RecvWr::new(&sges).id(!round))?;
        // SAFETY: the memory is dropped after the queues.
        unsafe { batch.ring()? };
        b.fill(0..64, round);
        let sges = [b.sge(0..64)];
        b.send(SendWr::send(&sges).id(round).signaled())?;
        assert_eq!(crate::pair::wait(&mut cq)?.wr_id, !round);
        b.expect(round, WcOpcode::SEND)?;
    }
    drop((qp, srq));
    Ok(())
}

fn foreign_code_sends_a_datagram() -> Verdict {
    super::open()?;
    let Pair { a, mut b, .. } = Pair::new(Config::ud())?;
    let ah = supported(a.pd.create_ah(&b.address().vector(&a)), Capability::Ah)?;
    let mut vector = address_vector(&ah)?;
    vector[..4].copy_from_slice(&QKEY.0.to_be_bytes());
    vector[8..12].copy_from_slice(&(b.qp.qpn().0 | 1 << 31).to_be_bytes());
    let Side { qp, cq, mut memory, .. } = a;
    let (mut qp, cq) = (RawQueuePair::take(qp)?, RawCompletionQueue::take(cq)?);
    let mut poster = Poster::of(qp.layout());
    memory.copy_from(0, &crate::pattern::bytes(7, 32))?;
    b.recv(1, 0..128)?;
    let [first, second, third]: [[u8; 16]; 3] = zerocopy::transmute!(vector);
    let segments = [first, second, third, data(&memory.sge(..32)?)];
    let head = poster.write(mlx5_wqe_opcode::MLX5_OPCODE_SEND, &segments);
    assert_eq!(poster.at, 2);
    // SAFETY: the memory is dropped after the queue pair.
    unsafe { qp.ring(poster.at, head) }?;
    Poller::of(cq.layout()).expect(mlx5_cqe_opcode::MLX5_CQE_REQ)?;
    assert_eq!(b.expect(1, WcOpcode::RECV)?.byte_len, 40 + 32);
    b.check(40..72, 7);
    drop((qp, cq));
    Ok(())
}

fn queue_of_the_library_has_the_index_of_a_foreign_wqe() -> Verdict {
    super::open()?;
    let Pair { a, b, .. } = Pair::new(Config::rc())?;
    let Side { qp, mut cq, memory, .. } = a;
    let mut qp = RawQueuePair::take(qp)?;
    let mut poster = Poster::of(qp.layout());
    for round in 0..2 * poster.wqebbs {
        let first = u32::from(poster.at) & (poster.wqebbs - 1);
        let head = poster.rdma_write(&memory.sge(..8)?, &b.remote(0));
        // SAFETY: the memory is dropped after the queue pair.
        unsafe { qp.ring(poster.at, head) }?;
        let done = crate::pair::wait(&mut cq)?;
        assert_eq!((done.wr_id, done.opcode), (first.into(), WcOpcode::SEND), "round {round}");
    }
    drop(qp);
    Ok(())
}

fn foreign_code_arms_a_queue() -> Verdict {
    let mut raw = Raw::new(Config::rc())?;
    for events in 0..6 {
        raw.cq.arm(raw.poller.consumer, Notify::Next)?;
        assert_eq!(raw.a.channel.try_next()?, None, "event {events}");
        let (from, to) = (raw.a.memory.sge(..8)?, raw.b.remote(0));
        let head = raw.poster.rdma_write(&from, &to);
        raw.ring(head)?;
        let key = raw.a.channel.wait(Some(PATIENCE))?;
        assert_eq!(key, Some(raw.cq.control().key()), "event {events}");
        raw.poller.expect(mlx5_cqe_opcode::MLX5_CQE_REQ)?;
    }
    Ok(())
}

fn queue_that_ignores_overruns_is_written_over() -> Verdict {
    let context = super::open()?;
    let cq = RawCompletionQueue::ignoring_overrun(context.cq_builder(7))?;
    let count = cq.layout().cqe_count;
    assert_eq!(count, 8);
    let pd = context.alloc_pd()?;
    let memory = pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u8>(64)?;
    let qp = pd.qp_builder(&cq, &cq, uverbs::QpType::RC).max_send_wr(64).build()?;
    let own = qp.endpoint(&crate::pair::gid(&context)?)?;
    qp.handshake(&own, &uverbs::Handshake::new())?;
    let mut qp = RawQueuePair::take(qp)?;
    let mut poster = Poster::of(qp.layout());
    // Fewer than twice the queue: the owner bit of the newest is another than that of the entry before it.
    const WRITES: u32 = 13;
    for _ in 0..WRITES {
        let head = poster.rdma_write(&memory.sge(..8)?, &memory.remote(8)?);
        // SAFETY: the memory is dropped after the queue pair.
        unsafe { qp.ring(poster.at, head) }?;
    }
    // Nobody has consumed a completion, and the newest is where it belongs.
    let layout = cq.layout();
    let mut newest = Poller::new(layout.buf, count, layout.cqe_size, layout.dbrec, WRITES - 1);
    let (index, _) = newest.expect(mlx5_cqe_opcode::MLX5_CQE_REQ)?;
    assert_eq!(u32::from(index), WRITES - 1);
    assert_eq!(qp.control().query()?.state, uverbs::QpState::RTS);
    // SAFETY: it is refused.
    let (cq, error) =
        unsafe { cq.give_back(WRITES) }.expect_err("it ignores overruns").into_parts();
    assert_eq!(error.errno(), uverbs::Errno::INVAL);
    qp.destroy()?;
    cq.destroy()?;
    Ok(())
}

fn busy_queue_pair_is_not_taken() -> Verdict {
    super::open()?;
    let Pair { mut a, mut b, .. } = Pair::new(Config::rc())?;
    a.recv(1, 0..64)?;
    let sges = [a.sge(64..128)];
    a.send(SendWr::send(&sges).id(2).signaled())?;
    b.recv(3, 0..64)?;
    b.expect(3, WcOpcode::RECV)?;
    let Side { qp, mut cq, memory, .. } = a;
    let (qp, error) =
        RawQueuePair::take(qp).expect_err("two requests are outstanding").into_parts();
    assert_eq!(error.errno(), uverbs::Errno::BUSY);
    assert!(error.to_string().contains("1 sends and 1 receives"), "{error}");
    let sges = [b.sge(0..64)];
    b.send(SendWr::send(&sges).signaled())?;
    for _ in 0..2 {
        crate::pair::wait(&mut cq)?;
    }
    let raw = RawQueuePair::take(qp)?;
    assert_eq!(raw.layout().posted, QpIndices { wqebbs: 1, receives: 1 });
    raw.destroy()?;
    drop(memory);
    Ok(())
}

fn queue_pair_that_shares_its_register_is_not_taken() -> Verdict {
    let context = super::open()?;
    let (pd, cq) = (context.alloc_pd()?, context.cq_builder(16).build()?);
    let mut taken = Vec::new();
    let refused = loop {
        let qp = pd.qp_builder(&cq, &cq, uverbs::QpType::RC).build()?;
        match RawQueuePair::take(qp) {
            Ok(raw) => taken.push(raw),
            Err(refused) => break refused.into_parts().1,
        }
        assert!(taken.len() < 1000, "each has a register of its own");
    };
    assert_eq!(refused.errno(), uverbs::Errno::BUSY);
    assert!(refused.to_string().contains("thread domain"), "{refused}");
    let td = context.alloc_td()?;
    let domain = pd.parent_domain_builder().thread_domain(&td).build()?;
    RawQueuePair::take(domain.qp_builder(&cq, &cq, uverbs::QpType::RC).build()?)?.destroy()?;
    Ok(())
}

/// Foreign code consumed the completions of three receives, and gave the shared receive queue back, which posted them
/// again: the library, which has not read those completions, takes none of them for a receive of today.
fn dropped_queue_frees_nothing_that_foreign_code_consumed() -> Verdict {
    super::open()?;
    let Pair { a, mut b, .. } = Pair::new(Config { srq: true, ..Config::rc() })?;
    let Side { qp, srq, cq, memory, .. } = a;
    let raw = RawSharedReceiveQueue::take(srq.ok_or_else(|| Stop::fail("it has one"))?)?;
    let cq = RawCompletionQueue::take(cq)?;
    let mut poller = Poller::of(cq.layout());
    let SrqLayout { wq, head, dbrec, posted, .. } = raw.layout();
    for at in 0..3 {
        fill(&wq, (head + at).into(), LINK, &memory.sge(0..64)?);
        store(dbrec, 0, (posted + at + 1).into());
        let sges = [b.sge(0..64)];
        b.send(SendWr::send(&sges).signaled())?;
        poller.expect(mlx5_cqe_opcode::MLX5_CQE_RESP_SEND)?;
    }
    // SAFETY: each receive has completed, and its completion was consumed.
    let mut srq = unsafe { raw.give_back(head + 3, posted + 3) }?;
    drop(qp);
    let mut batch = srq.batch()?;
    while batch.push(uverbs::RecvWr::new(&[memory.sge(0..64)?])).is_ok() {}
    // SAFETY: the memory is dropped after the queues.
    unsafe { batch.ring()? };
    cq.destroy()?;
    let full = srq.batch()?.push(uverbs::RecvWr::new(&[memory.sge(0..64)?]));
    assert_eq!(full, Err(uverbs::PostError::Full));
    drop(srq);
    Ok(())
}

fn busy_shared_receive_queue_is_not_taken() -> Verdict {
    super::open()?;
    let pair = Pair::new(Config { srq: true, ..Config::rc() })?;
    let Pair { mut a, .. } = pair;
    a.recv(1, 0..64)?;
    let Side { qp, srq, cq, memory, .. } = a;
    let srq = srq.ok_or_else(|| Stop::fail("it has a shared receive queue"))?;
    let refused = RawSharedReceiveQueue::take(srq).expect_err("a receive is posted");
    let error = refused.into_parts().1;
    assert_eq!(error.errno(), uverbs::Errno::BUSY);
    assert!(error.message().starts_with("1 posted receives have no completion"), "{error}");
    drop((qp, cq, memory));
    Ok(())
}

fn queue_that_was_not_asked_for_has_no_wqes() -> Verdict {
    let context = super::open()?;
    let (pd, cq) = (context.alloc_pd()?, context.cq_builder(8).build()?);
    for (sends, receives) in [(0, 4), (4, 0), (0, 0)] {
        let builder = pd.qp_builder(&cq, &cq, uverbs::QpType::RC);
        let raw = RawQueuePair::take(builder.max_send_wr(sends).max_recv_wr(receives).build()?)?;
        let QpLayout { sq, rq, .. } = raw.layout();
        assert_eq!((sq.wqe_count == 0, rq.is_none()), (sends == 0, receives == 0));
    }
    Ok(())
}

fn raw_queue_pair_comes_back_by_a_reset() -> Verdict {
    super::open()?;
    let Pair { a, b, .. } = Pair::new(Config::rc())?;
    let Side { qp, mut cq, memory, .. } = a;
    let mut raw = RawQueuePair::take(qp)?;
    assert_eq!(raw.control().state(), uverbs::QpState::RTS);
    let mut poster = Poster::of(raw.layout());
    let head = poster.rdma_write(&memory.sge(..8)?, &b.remote(0));
    // SAFETY: the memory is dropped after the queue pair.
    unsafe { raw.ring(poster.at, head) }?;
    let mut qp = raw.reset(&mut [&mut cq])?;
    assert!(cq.poll()?.next().is_none());
    assert_eq!(qp.state(), uverbs::QpState::RESET);
    assert!(qp.send_batch().is_err());
    drop(qp);
    Ok(())
}

fn raw_queue_pair_comes_back_by_a_reset_while_its_completion_queue_is_raw() -> Verdict {
    let context = super::open()?;
    let pd = context.alloc_pd()?;
    let foreign = RawCompletionQueue::ignoring_overrun(context.cq_builder(8))?;
    let (mut cq, mut other) = (context.cq_builder(8).build()?, context.cq_builder(8).build()?);
    for mixed in [false, true] {
        let qp_type = uverbs::QpType::RC;
        let qp = match mixed {
            true => pd.qp_builder(&foreign, &cq, qp_type).build()?,
            false => pd.qp_builder(&foreign, &foreign, qp_type).build()?,
        };
        let raw = RawQueuePair::take(qp)?;
        let init = QpAttr::new().state(QpState::INIT).port(crate::env::port()).pkey_index(0);
        raw.control().modify(&init.access(Access::empty()))?;
        let (raw, error) = raw.reset(&mut [&mut cq]).expect_err("one is raw").into_parts();
        assert_eq!((error.errno(), error.kernel_errno()), (Errno::INVAL, None), "{error}");
        let refused = raw.reset_among(&[&foreign], &mut [&mut other]);
        let (raw, error) = refused.expect_err("one is of no use to it").into_parts();
        assert_eq!((error.errno(), error.kernel_errno()), (Errno::INVAL, None), "{error}");
        assert_eq!(raw.control().state(), QpState::INIT);
        let qp = match mixed {
            true => raw.reset_among(&[&foreign], &mut [&mut cq])?,
            false => raw.reset_among(&[&foreign], &mut [])?,
        };
        assert_eq!((qp.state(), qp.query()?.state), (QpState::RESET, QpState::RESET));
        qp.modify(&init.access(Access::empty()))?;
        qp.destroy()?;
    }
    Ok(())
}

/// Queues that are given back, dropped, destroyed and reset while they are raw, after foreign code used them.
fn raw_queues_leave_nothing() -> Verdict {
    use uverbs::ObjectKind;
    super::open()?;
    let kinds = [ObjectKind::QP, ObjectKind::CQ, ObjectKind::SRQ, ObjectKind::MR, ObjectKind::PD];
    rounds(&kinds, |context| {
        let (context, mut nth) = (context.clone(), 0);
        Ok(Box::new(move || {
            let config = Config { srq: true, ..Config::rc() };
            let mut pair = Pair::on(context.clone(), context.clone(), config)?;
            pair.connect()?;
            let Pair { a, b, .. } = pair;
            let Side { qp, srq, cq, memory, channel, .. } = a;
            let srq = srq.ok_or_else(|| Stop::fail("it has a shared receive queue"))?;
            let raw = RawSharedReceiveQueue::take(srq)?;
            let (mut qp, cq) = (RawQueuePair::take(qp)?, RawCompletionQueue::take(cq)?);
            let mut poster = Poster::of(qp.layout());
            let mut poller = Poller::of(cq.layout());
            let head = poster.rdma_write(&memory.sge(..8)?, &b.remote(0));
            // SAFETY: the memory is dropped after the queue pair.
            unsafe { qp.ring(poster.at, head) }?;
            poller.expect(mlx5_cqe_opcode::MLX5_CQE_REQ)?;
            nth += 1;
            match nth % 4 {
                0 => drop((qp, raw, cq)),
                1 => {
                    qp.destroy()?;
                    raw.destroy()?;
                    cq.destroy()?;
                }
                2 => {
                    let SrqLayout { head, posted, .. } = raw.layout();
                    let indices = QpIndices { wqebbs: poster.at, receives: 0 };
                    // SAFETY: the WQE has completed, and its CQE was consumed.
                    let qp = unsafe { qp.give_back(indices) }?;
                    // SAFETY: nothing was posted.
                    let srq = unsafe { raw.give_back(head, posted) }?;
                    // SAFETY: as of the queue pair.
                    let cq = unsafe { cq.give_back(poller.consumer) }?;
                    drop((cq, srq, qp));
                }
                _ => {
                    // SAFETY: as above.
                    let mut cq = unsafe { cq.give_back(poller.consumer) }?;
                    drop(qp.reset(&mut [&mut cq])?);
                    drop(raw);
                }
            }
            drop((memory, channel, b));
            Ok(())
        }))
    })
}

fn raw_queues_stay_the_parents() -> Verdict {
    super::open()?;
    let Pair { a, .. } = Pair::new(Config { srq: true, ..Config::rc() })?;
    let Side { qp, srq, cq, memory, pd, .. } = a;
    let srq = srq.ok_or_else(|| Stop::fail("it has a shared receive queue"))?;
    let other = pd.qp_builder(&cq, &cq, uverbs::QpType::RC).build()?;
    let spare = (other, pd.srq_builder(4).build()?, pd.context().cq_builder(4).build()?);
    let (qp, cq) = (RawQueuePair::take(qp)?, RawCompletionQueue::take(cq)?);
    let queues = (qp, cq, RawSharedReceiveQueue::take(srq)?, spare);
    let (qp, cq, srq, spare) = in_child(queues, |(mut qp, mut cq, mut srq, spare)| {
        // SAFETY: nothing is rung.
        assert_eq!(unsafe { qp.ring(1, [0; 8]) }, Err(uverbs::RingError::Forked));
        let refused = |error: uverbs::Error| assert!(error.is_forked(), "{error}");
        refused(cq.arm(0, Notify::Next).expect_err("it is the parent's"));
        refused(srq.set_limit(1).expect_err("it is the parent's"));
        refused(RawQueuePair::take(spare.0).expect_err("as above").into_parts().1);
        refused(RawSharedReceiveQueue::take(spare.1).expect_err("as above").into_parts().1);
        refused(RawCompletionQueue::take(spare.2).expect_err("as above").into_parts().1);
        // SAFETY: the queues are not given back.
        let (qp, error) =
            unsafe { qp.give_back(QpIndices::default()) }.expect_err("as above").into_parts();
        refused(error);
        // SAFETY: as above.
        let (srq, error) = unsafe { srq.give_back(0, 0) }.expect_err("as above").into_parts();
        refused(error);
        // SAFETY: as above.
        let (cq, error) = unsafe { cq.give_back(0) }.expect_err("as above").into_parts();
        refused(error);
        refused(qp.destroy().expect_err("as above").into_parts().1);
        refused(srq.destroy().expect_err("as above").into_parts().1);
        refused(cq.destroy().expect_err("as above").into_parts().1);
        Ok(())
    })?;
    drop(spare);
    qp.destroy()?;
    srq.destroy()?;
    cq.destroy()?;
    drop(memory);
    Ok(())
}

fn device_memory_is_where_it_is_said_to_be() -> Verdict {
    let context = super::open()?;
    let most = context.query_device()?.max_dm_size;
    crate::verdict::require(most > 0, Capability::DeviceMemory, "not advertised")?;
    let memory = supported(context.alloc_dm(64, 8), Capability::DeviceMemory)?;
    let pd = context.alloc_pd()?;
    let region =
        pd.mr_builder().access(Access::LOCAL_WRITE).zero_based().register_dm(&memory, ..)?;
    memory.copy_from(8, &[0x1234_5678u32])?;
    let address = device_memory_address(&memory)?;
    // SAFETY: inside the memory, and aligned.
    let word = unsafe { address.wrapping_add(8).cast::<u32>().read_volatile() };
    assert_eq!(word, 0x1234_5678);
    drop(region);
    Ok(())
}
