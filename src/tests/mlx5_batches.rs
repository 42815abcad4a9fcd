//! Random batches of every length, between a queue pair of mlx5 and itself: work request ids and order are kept,
//! and room is exact at every step.

use super::{Bench, connect_to_itself, ring, ring_recv};
use crate::uverbs::scripted::Script;
use crate::{
    Access, CompletionQueue, MemoryRegion, PostError, QpType, QueuePair, RecvWr, Remote, SendWr,
    SharedReceiveQueue, Wc, WcOpcode,
};
use std::collections::VecDeque;

/// A generator with the same numbers in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u32) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 33) as u32 % limit
    }
}

/// A queue pair, and the requests that the program knows of.
struct Ends {
    script: Script,
    qp: QueuePair,
    srq: Option<SharedReceiveQueue>,
    cq: CompletionQueue,
    memory: MemoryRegion<u8>,
    /// Requests that have not completed, and whether each is signaled.
    sends: VecDeque<(u64, bool)>,
    receives: VecDeque<u64>,
    /// Receives that no message was sent for.
    unused: u32,
    /// The capacities of the send and the receive queue.
    most: (usize, usize),
    next: u64,
    /// Messages that arrived.
    received: u32,
}

impl Ends {
    fn new(max_wr: u32, shares: bool) -> Ends {
        let Bench { script, context, pd, .. } = Bench::on(Script::mlx5());
        let cq = context.cq_builder(128).build().unwrap();
        let mut srq = shares.then(|| pd.srq_builder(max_wr).build().unwrap());
        let builder = pd.qp_builder(&cq, &cq, QpType::RC).max_send_wr(max_wr).max_inline_data(300);
        let builder = match &srq {
            Some(srq) => builder.srq(srq),
            None => builder.max_recv_wr(max_wr),
        };
        let mut qp = builder.build().unwrap();
        connect_to_itself(&context, &qp);
        let memory = pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u8>(512).unwrap();
        let receives = match &mut srq {
            Some(srq) => srq.batch().unwrap().room() as usize,
            None => qp.recv_batch().unwrap().room() as usize,
        };
        let most = (qp.send_batch().unwrap().room() as usize, receives);
        let (sends, receives) = Default::default();
        Ends { script, qp, srq, cq, memory, sends, receives, unused: 0, most, next: 0, received: 0 }
    }

    /// Pushes a batch, and drops some batches without ringing.
    fn send(&mut self, random: &mut Random) {
        let remote = Remote { addr: self.memory.addr(), rkey: self.memory.rkey() };
        let sge = [self.memory.sge(..8).unwrap()];
        let data = [0x5a; 300];
        let mut batch = self.qp.send_batch().unwrap();
        assert_eq!(batch.room() as usize, self.most.0 - self.sends.len());
        let (mut pushed, mut messages) = (Vec::new(), 0);
        for _ in 0..=random.below(6) {
            let (kind, takes_receive) = (random.below(4), messages < self.unused);
            let wr = match kind {
                0 => SendWr::write(remote, &[]).inline(&data[..random.below(300) as usize]),
                1 => SendWr::write(remote, &sge),
                2 => SendWr::fetch_add(remote, 1, &sge),
                _ if takes_receive => SendWr::send(&[]),
                _ => SendWr::write(remote, &[]),
            };
            // Without a signaled request there would never be room again.
            let last = self.sends.len() + pushed.len() + 1 == self.most.0;
            let signaled = last || random.below(3) == 0;
            let id = self.next + pushed.len() as u64;
            let wr = if signaled { wr.signaled() } else { wr };
            match batch.push(wr.id(id)) {
                Ok(()) => {
                    pushed.push((id, signaled));
                    messages += u32::from(kind == 3 && takes_receive);
                }
                Err(error) => {
                    assert_eq!(error, PostError::Full);
                    assert_eq!(self.sends.len() + pushed.len(), self.most.0);
                }
            }
        }
        if random.below(8) != 0 {
            ring(batch).unwrap();
            self.next += pushed.len() as u64;
            self.unused -= messages;
            self.sends.extend(pushed);
        }
    }

    fn receive(&mut self, random: &mut Random) {
        let mut batch = match &mut self.srq {
            Some(srq) => srq.batch().unwrap(),
            None => self.qp.recv_batch().unwrap(),
        };
        assert_eq!(batch.room() as usize, self.most.1 - self.receives.len());
        let count = batch.room().min(random.below(4));
        for _ in 0..count {
            batch.push(RecvWr::new(&[]).id(self.next)).unwrap();
            self.receives.push_back(self.next);
            self.next += 1;
        }
        if count > 0 {
            ring_recv(batch).unwrap();
        }
        self.unused += count;
    }

    fn poll(&mut self, most: usize) {
        let mut found = [Wc::default(); 3];
        let count = self.cq.poll_into(&mut found[..most]).unwrap();
        for wc in &found[..count] {
            assert!(wc.is_success(), "{wc:?}");
            if wc.opcode == WcOpcode::RECV {
                assert_eq!(Some(wc.wr_id), self.receives.pop_front());
                self.received += 1;
                continue;
            }
            // A completion also ends the unsignaled requests before it.
            loop {
                let (id, signaled) = self.sends.pop_front().expect("a request");
                if signaled {
                    assert_eq!(wc.wr_id, id);
                    break;
                }
            }
        }
    }
}

#[test]
fn random_batches_keep_their_numbers_and_order_and_room_is_exact() {
    let seeds = if cfg!(miri) { 2 } else { 20 };
    for seed in 1..=seeds {
        let mut random = Random(seed * 0x9e37_79b9);
        let mut ends = Ends::new(1 << random.below(5), seed % 2 == 0);
        for _ in 0..600 {
            match random.below(4) {
                0 => ends.send(&mut random),
                1 => ends.receive(&mut random),
                2 => ends.script.settle(),
                _ => ends.poll(random.below(4) as usize),
            }
        }
        let is_busy = ends.next > 100 && ends.received > 10;
        assert!(is_busy || ends.most.0 < 4, "seed {seed}: {} received", ends.received);
    }
}
