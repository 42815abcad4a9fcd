//! Random batches through a shared receive queue, with a device that reads the WQEs in memory and completes them in
//! any order: work request ids and order are kept, and the room is right at every step. `src/tests/mlx5_batches.rs`
//! tests queues that complete in order.

use super::{Completed, SGE, SharedReceiver, cqe};
use crate::provider::mlx5::uidx::UidxAllocator;
use crate::provider::mlx5::wr_ids::{Receives, SharedQp};
use crate::wr::RecvWr;
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

/// `many`, or fewer where each seed takes long.
fn seeds(many: u64) -> u64 {
    if cfg!(miri) { 3 } else { many }
}

#[test]
fn shared_receives_follow_the_list() {
    for seed in 1..seeds(20) {
        let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let entries = 2 << random.below(4);
        let mut shared = SharedReceiver::new(entries, 32);
        let slots = shared.ring.wr_ids().clone();
        let uidx = UidxAllocator::new().take().unwrap();
        let qp = SharedQp::new(7, uidx, Some(1), Receives::Shared(slots));
        let mut completed = Completed::new(64, 64);
        completed.ring.registry().attach(&qp);
        // The device knows where the next receive is, and how many it has taken.
        let (mut at, mut taken) = (0u32, 0u64);
        let (mut next, mut done) = (0u64, 0u64);
        let mut held: Vec<(u64, u32)> = Vec::new();
        let mut expected = VecDeque::new();
        for _ in 0..3000 {
            match random.below(4) {
                0 => {
                    let room = shared.ring.begin().room;
                    assert_eq!(u64::from(room), u64::from(entries) - 1 - (next - done));
                    let count = room.min(random.below(4));
                    let recvs: Vec<_> =
                        (0..count).map(|n| RecvWr::new(&[SGE]).id(next + u64::from(n))).collect();
                    shared.post(&recvs).unwrap();
                    next += u64::from(count);
                    assert_eq!(shared.dbrec.get(0), next as u32 & 0xffff);
                }
                1 if taken < next => {
                    // Receives are taken in the order of the list, and completed in any.
                    held.push((taken, at));
                    at = (shared.device.read(at * 2)[0].to_be() >> 32) as u32;
                    taken += 1;
                }
                2 if !held.is_empty() => {
                    let (id, entry) = held.swap_remove(random.below(held.len() as u32) as usize);
                    completed.write(cqe(2, 1, 7, entry as u16));
                    expected.push_back(id);
                }
                _ => {
                    while let Some(wc) = completed.next() {
                        assert_eq!(Some(wc.wr_id), expected.pop_front(), "seed {seed}");
                        done += 1;
                    }
                    completed.ring.release();
                }
            }
        }
        assert!(done > 50);
    }
}
