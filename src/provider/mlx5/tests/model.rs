//! Random batches through the rings, with a device that reads what is in memory and completes it:
//! numbers and order are kept, and room is what it must be at every step.

use super::{Completed, Receiver, SGE, Sender, Shape, SharedReceiver, cqe};
use crate::number::Rkey;
use crate::provider::mlx5::uidx::UidxAllocator;
use crate::provider::mlx5::wr_ids::{Receives, SharedQp};
use crate::wr::{PostError, RecvWr, Remote, SendWr};
use std::collections::VecDeque;

/// A generator that repeats itself from run to run.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u32) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 33) as u32 % limit
    }
}

/// So many, but where each takes long.
fn seeds(many: u64) -> u64 {
    if cfg!(miri) { 3 } else { many }
}

const REMOTE: Remote = Remote { addr: 0x1000, rkey: Rkey(1) };

/// The device's end of a send queue.
#[derive(Default)]
struct Executor {
    /// Wqebbs executed, in 16 bits as the record counts them.
    at: u16,
}

impl Executor {
    /// Executes one request, if there is one; returns its WQEBB and whether it is signaled.
    fn execute(&mut self, sends: &Sender) -> Option<(u16, bool)> {
        if self.at == sends.dbrec.get(1) as u16 {
            return None;
        }
        let wqebb = self.at;
        let control = sends.bytes(wqebb.into(), 16);
        assert_eq!(control[1..3], wqebb.to_be_bytes(), "the request's own index");
        assert_eq!(control[4..7], [0, 0, 0x42]);
        self.at = wqebb.wrapping_add(u16::from(control[7]).div_ceil(4));
        Some((wqebb, control[11] & 8 != 0))
    }
}

#[test]
fn sends_keep_their_numbers_and_order_and_room_is_exact() {
    let data = [0x5a; 300];
    for seed in 1..seeds(40) {
        let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        // Up to five WQEBBs each.
        let (max_post, wqebbs) = (1 << random.below(5), 8);
        let wqebbs = wqebbs * max_post;
        let mut sends = Sender::new(Shape { wqebbs, max_post, ..Shape::default() });
        let mut completed = Completed::new(64, 64);
        completed.ring.registry().attach(&sends.qp);
        let (mut next, mut device) = (0u64, Executor::default());
        // Numbers of requests that have not completed, and of those that will say so.
        let mut posted = VecDeque::new();
        let mut executed = VecDeque::new();
        for _ in 0..2000 {
            match random.below(3) {
                0 => {
                    let mut cursor = sends.ring.begin();
                    assert_eq!(cursor.room as usize, max_post as usize - posted.len());
                    let keep = random.below(8) != 0;
                    let mut batch = Vec::new();
                    for _ in 0..=random.below(6) {
                        let wr = match random.below(4) {
                            0 => SendWr::send(&[]).inline(&data[..random.below(300) as usize]),
                            1 => SendWr::write(REMOTE, &[SGE]),
                            2 => SendWr::fetch_add(REMOTE, 1, &[SGE]),
                            _ => SendWr::send(&[]),
                        };
                        // Without a completion there is never room again.
                        let last = posted.len() + batch.len() + 1 == max_post as usize;
                        let signaled = last || random.below(3) == 0;
                        let id = next + batch.len() as u64;
                        let wr = if signaled { wr.signaled() } else { wr };
                        match sends.push(&mut cursor, &wr.id(id)) {
                            Ok(()) => batch.push((id, signaled)),
                            Err(error) => {
                                assert_eq!(error, PostError::Full);
                                assert_eq!(posted.len() + batch.len(), max_post as usize);
                            }
                        }
                    }
                    // Others are dropped without a trace.
                    if keep && !batch.is_empty() {
                        sends.ring.ring(&cursor, batch.len() == 1).unwrap();
                        next += batch.len() as u64;
                        posted.extend(batch);
                    }
                }
                1 => {
                    if let Some((wqebb, signaled)) = device.execute(&sends) {
                        if signaled {
                            completed.write(cqe(0, 1, 0x42, wqebb));
                            executed.push_back(wqebb);
                        }
                    }
                }
                _ => {
                    for _ in 0..random.below(3) {
                        let Some(wc) = completed.next() else {
                            assert!(executed.is_empty());
                            break;
                        };
                        executed.pop_front().expect("a completion that the device wrote");
                        // It retires those before it that were not to say so.
                        loop {
                            let (id, signaled) = posted.pop_front().expect("a request");
                            if signaled {
                                assert_eq!(wc.wr_id, id, "seed {seed}");
                                break;
                            }
                        }
                    }
                    completed.ring.release();
                }
            }
        }
        assert!(next > 100 || max_post < 4, "seed {seed} did nothing");
    }
}

#[test]
fn receives_keep_their_numbers_and_room_is_exact() {
    for seed in 1..seeds(20) {
        let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let entries = 1 << random.below(5);
        let mut receiver = Receiver::new(entries, 32);
        let mut completed = Completed::new(32, 64);
        completed.ring.registry().attach(&receiver.qp);
        let (mut next, mut done, mut written) = (0u64, 0u64, 0u64);
        for _ in 0..3000 {
            match random.below(3) {
                0 => {
                    let room = receiver.ring.begin().room;
                    assert_eq!(u64::from(room), u64::from(entries) - (next - done));
                    let count = room.min(random.below(4));
                    let recvs: Vec<_> =
                        (0..count).map(|n| RecvWr::new(&[SGE]).id(next + u64::from(n))).collect();
                    receiver.post(&recvs).unwrap();
                    next += u64::from(count);
                    assert_eq!(receiver.dbrec.get(0), next as u32 & 0xffff);
                }
                1 if written < next => {
                    completed.write(cqe(2, 1, 0x42, written as u16));
                    written += 1;
                }
                _ => {
                    while let Some(wc) = completed.next() {
                        assert_eq!(wc.wr_id, done, "seed {seed}");
                        done += 1;
                    }
                    assert_eq!(done, written);
                    completed.ring.release();
                }
            }
        }
        assert!(done > 50);
    }
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
