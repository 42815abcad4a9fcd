//! The rings of mlx5 behind the public types: what requests name, and what a reset or the end of a queue pair
//! leaves in them.

use super::owned::bring_up_owned;
use super::{bring_up, ring, ring_recv};
use crate::owned::OwnedCompletionQueue;
use crate::provider::mlx5::fake_device::{FakeCq, cqe};
use crate::uverbs::scripted::Script;
use crate::{
    CompletionQueue, Context, Errno, PostError, ProtectionDomain, QpType, QueuePair, RecvWr,
    Remote, Rkey, SendWr, Wc,
};
use std::fs::File;
use std::os::unix::fs::FileExt;
use uverbs_uapi::mlx5::cqe::mlx5_cqe_opcode as opcode;

struct Bench {
    script: Script,
    context: Context,
    pd: ProtectionDomain,
    cq: CompletionQueue,
    device: FakeCq,
}

impl Bench {
    fn new() -> Bench {
        let script = Script::mlx5();
        let context = script.open("mlx5_0");
        let pd = context.alloc_pd().unwrap();
        let cq = context.cq_builder(8).build().unwrap();
        let device = cq.fake_device();
        Bench { script, context, pd, cq, device }
    }

    fn qp(&self) -> QueuePair {
        let builder = self.pd.qp_builder(&self.cq, &self.cq, QpType::RC);
        let qp = builder.max_send_wr(4).max_recv_wr(4).build().unwrap();
        bring_up(&self.script, &qp);
        qp
    }

    /// The number by which completions name a queue pair.
    fn index(&self, qp: &QueuePair) -> u32 {
        self.script.object(qp.handle()).uidx
    }

    /// Completes the first send of a queue pair.
    fn complete(&mut self, index: u32, qpn: u32) {
        self.device.write(cqe(opcode::MLX5_CQE_REQ.0, index, qpn, 0));
    }

    /// How many completions a poll finds.
    fn poll(&mut self) -> usize {
        self.cq.poll_into(&mut [Wc::default(); 8]).unwrap()
    }
}

fn post(qp: &mut QueuePair) {
    let mut batch = qp.send_batch().unwrap();
    batch.push(SendWr::send(&[]).signaled()).unwrap();
    ring(batch).unwrap();
}

#[test]
#[cfg_attr(miri, ignore = "it reads the memory of its process as a file")]
fn a_request_names_the_buffer_that_was_lent_for_it() {
    let bench = Bench::new();
    let pool = bench.pd.buffer_pool_builder(64).count(2).build().unwrap();
    let mut cq = OwnedCompletionQueue::new(bench.context.cq_builder(8).build().unwrap());
    let srq = bench.pd.srq_builder(4).build().unwrap();
    let srq = crate::owned::OwnedSharedReceiveQueue::<u32>::new(srq).unwrap();
    let builder = bench.pd.qp_builder(cq.queue(), cq.queue(), QpType::RC).srq(srq.queue());
    let qp = builder.build().unwrap();
    let mut qp = cq.adopt_on(qp, &srq).unwrap();
    bring_up_owned(&bench.script, &qp);
    let buffer = pool.copy(b"lent").unwrap();
    let sge = buffer.sge();
    let remote = Remote { addr: 0x2000, rkey: Rkey(6) };
    let mut batch = qp.send_batch().unwrap();
    batch.push(SendWr::write(remote, &[]), buffer, 1).unwrap();
    batch.ring().unwrap();
    // A control segment, the remote address, and the buffer.
    let mut wqe = [0; 48];
    let at = bench.script.object(qp.handle()).start;
    File::open("/proc/self/mem").unwrap().read_exact_at(&mut wqe, at).unwrap();
    let length = sge.length.to_be_bytes();
    let expected = [&length[..], &sge.lkey.0.to_be_bytes(), &sge.addr.to_be_bytes()].concat();
    assert_eq!((wqe[7], &length, &wqe[32..]), (3, &4u32.to_be_bytes(), &expected[..]));
}

#[test]
fn a_reset_empties_both_queues_of_a_queue_pair() {
    let mut bench = Bench::new();
    let mut qp = bench.qp();
    let rooms =
        |qp: &mut QueuePair| (qp.send_batch().unwrap().room(), qp.recv_batch().unwrap().room());
    let fresh = rooms(&mut qp);
    post(&mut qp);
    let mut batch = qp.recv_batch().unwrap();
    for _ in 0..batch.room() {
        batch.push(RecvWr::new(&[])).unwrap();
    }
    ring_recv(batch).unwrap();
    assert_eq!(rooms(&mut qp), (fresh.0 - 1, 0));
    qp.reset(&mut [&mut bench.cq]).unwrap();
    bring_up(&bench.script, &qp);
    assert_eq!(rooms(&mut qp), fresh);
}

#[test]
fn a_reset_discards_completions_that_were_not_polled() {
    let mut bench = Bench::new();
    let (mut qp, mut other) = (bench.qp(), bench.qp());
    for qp in [&mut qp, &mut other] {
        post(qp);
        let (index, qpn) = (bench.index(qp), qp.qpn().0);
        bench.complete(index, qpn);
    }
    qp.reset(&mut [&mut bench.cq]).unwrap();
    assert_eq!(bench.poll(), 1, "that of the other queue pair");
}

#[test]
fn a_user_index_is_dealt_again_when_no_completion_bears_it() {
    let mut bench = Bench::new();
    let mut first = bench.qp();
    post(&mut first);
    let (index, qpn) = (bench.index(&first), first.qpn().0);
    bench.complete(index, qpn);
    drop(first);
    let second = bench.qp();
    assert_ne!(bench.index(&second), index, "its completion is in the queue");
    assert_eq!([bench.poll(), bench.poll()], [0, 0]);
    let third = bench.qp();
    assert_eq!(bench.index(&third), index);
    post(&mut { third });
}

#[test]
fn the_user_index_of_a_queue_pair_that_the_kernel_keeps_is_never_dealt_again() {
    let mut bench = Bench::new();
    let first = bench.qp();
    let index = bench.index(&first);
    bench.script.refuse_destroy(first.handle(), Errno::BUSY);
    drop(first);
    assert_eq!(bench.context.leaked(), 1);
    assert_eq!([bench.poll(), bench.poll()], [0, 0]);
    let next: Vec<_> = (0..4).map(|_| bench.qp()).collect();
    assert!(next.iter().all(|qp| bench.index(qp) != index));
}

#[test]
fn a_queue_of_no_requests_is_no_queue() {
    let bench = Bench::new();
    for (sends, receives) in [(0, 0), (0, 3), (3, 0)] {
        let builder = bench.pd.qp_builder(&bench.cq, &bench.cq, QpType::RC);
        let mut qp = builder.max_send_wr(sends).max_recv_wr(receives).build().unwrap();
        bring_up(&bench.script, &qp);
        let caps = qp.caps();
        assert_eq!((caps.max_send_wr > 0, caps.max_recv_wr > 0), (sends > 0, receives > 0));
        let pushed = qp.send_batch().unwrap().push(SendWr::send(&[]));
        assert_eq!(pushed, if sends > 0 { Ok(()) } else { Err(PostError::NoQueue) });
        match qp.recv_batch() {
            Ok(mut batch) => batch.push(RecvWr::new(&[])).unwrap(),
            Err(error) => assert_eq!((receives, error), (0, PostError::NoQueue)),
        }
        let joined = QueuePair::join(qp.split()).unwrap();
        joined.destroy().unwrap();
    }
}

#[test]
fn a_shared_receive_queue_takes_as_many_receives_as_it_says() {
    let bench = Bench::new();
    for wanted in [1, 3, 5] {
        let mut srq = bench.pd.srq_builder(wanted).build().unwrap();
        let most = srq.query().unwrap().max_wr;
        assert!(most >= wanted, "{most}");
        let mut batch = srq.batch().unwrap();
        assert_eq!(batch.room(), most);
        for _ in 0..most {
            batch.push(RecvWr::new(&[])).unwrap();
        }
        batch.push(RecvWr::new(&[])).unwrap_err();
    }
}
