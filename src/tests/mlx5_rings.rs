//! The rings of mlx5 behind the public types: the queue pairs and keys that requests name, and the state of
//! the rings after a reset or the end of a queue pair.

use super::{bring_up, connect_to_itself, ring, ring_recv};
use crate::uverbs::scripted::Script;
use crate::{
    CompletionQueue, Context, Errno, PostError, ProtectionDomain, QpType, QueuePair, RecvWr,
    Remote, Rkey, SendWr, Wc,
};
use uverbs_uapi::mlx5::abi::mlx5_ib_create_qp;

struct Bench {
    script: Script,
    context: Context,
    pd: ProtectionDomain,
    cq: CompletionQueue,
}

impl Bench {
    fn new() -> Bench {
        let script = Script::mlx5();
        let context = script.open("mlx5_0");
        let pd = context.alloc_pd().unwrap();
        let cq = context.cq_builder(8).build().unwrap();
        Bench { script, context, pd, cq }
    }

    /// A queue pair that is connected to itself.
    fn qp(&self) -> QueuePair {
        let builder = self.pd.qp_builder(&self.cq, &self.cq, QpType::RC);
        let qp = builder.max_send_wr(4).max_recv_wr(4).build().unwrap();
        connect_to_itself(&self.context, &qp);
        qp
    }

    /// The number by which completions name a queue pair.
    fn index(&self, qp: &QueuePair) -> u32 {
        self.script.told::<mlx5_ib_create_qp>(qp.handle()).uidx
    }

    /// The number of completions that a poll finds.
    fn poll(&mut self) -> usize {
        self.cq.poll_into(&mut [Wc::default(); 8]).unwrap()
    }
}

/// Posts a write of no bytes, which the device completes.
fn post(bench: &Bench, qp: &mut QueuePair) {
    let mut batch = qp.send_batch().unwrap();
    let remote = Remote { addr: 0, rkey: Rkey(0) };
    batch.push(SendWr::write(remote, &[]).signaled()).unwrap();
    ring(batch).unwrap();
    bench.script.settle();
}

#[test]
fn a_reset_empties_both_queues_of_a_queue_pair() {
    let mut bench = Bench::new();
    let mut qp = bench.qp();
    let rooms =
        |qp: &mut QueuePair| (qp.send_batch().unwrap().room(), qp.recv_batch().unwrap().room());
    let fresh = rooms(&mut qp);
    post(&bench, &mut qp);
    let mut batch = qp.recv_batch().unwrap();
    for _ in 0..batch.room() {
        batch.push(RecvWr::new(&[])).unwrap();
    }
    ring_recv(batch).unwrap();
    assert_eq!(rooms(&mut qp), (fresh.0 - 1, 0));
    qp.reset(&mut [&mut bench.cq]).unwrap();
    connect_to_itself(&bench.context, &qp);
    assert_eq!(rooms(&mut qp), fresh);
}

#[test]
fn a_user_index_is_assigned_again_when_no_completion_has_it() {
    let mut bench = Bench::new();
    let mut first = bench.qp();
    post(&bench, &mut first);
    let index = bench.index(&first);
    drop(first);
    let second = bench.qp();
    assert_ne!(bench.index(&second), index, "its completion is in the queue");
    assert_eq!([bench.poll(), bench.poll()], [0, 0]);
    let mut third = bench.qp();
    assert_eq!(bench.index(&third), index);
    post(&bench, &mut third);
    assert_eq!(bench.poll(), 1);
}

#[test]
fn the_user_index_of_a_queue_pair_that_the_kernel_keeps_is_never_assigned_again() {
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
fn a_shared_receive_queue_takes_as_many_receives_as_it_reports() {
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
