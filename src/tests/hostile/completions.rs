//! Completion queues that hold arbitrary bytes.

use super::explore;
use crate::completion::Completion;
use crate::owned::{Memory, OwnedCompletionQueue, OwnedQueuePair};
use crate::provider::mlx5::fake_device::cqe;
use crate::tests::owned::{Owned, bring_up_owned};
use crate::tests::{Bench, bring_up, ring, ring_recv, wc};
use crate::uverbs::scripted::{Role, Script};
use crate::{QpType, RecvWr, SendWr, Wc, WcStatus};
use std::collections::HashSet;
use uverbs_uapi::mlx5::abi::mlx5_ib_create_qp;
use uverbs_uapi::wc::ib_uverbs_wc;
use zerocopy::IntoBytes;

/// Most completions of one input: a queue has room for no more.
const MOST: usize = 12;

/// Reads every field, by the methods and as a whole.
fn read(completion: Completion<'_>) {
    let status = completion.status();
    assert_eq!(completion.is_success(), status == WcStatus::SUCCESS);
    let text = format!("{status} {:?} {:?}", completion.opcode(), completion.scattered());
    let numbers = (
        completion.wr_id(),
        completion.byte_len(),
        completion.qpn(),
        completion.src_qpn(),
        completion.imm(),
        completion.invalidated_rkey(),
        completion.has_grh(),
        completion.vendor_err(),
        completion.flow_tag(),
        completion.ip_checksum_ok(),
        completion.vlan(),
        completion.timestamp(),
    );
    let datagram = (
        completion.pkey_index(),
        completion.src_lid(),
        completion.service_level(),
        completion.path_bits(),
    );
    assert!(!text.is_empty());
    let wc = Wc::from(completion);
    assert_eq!((wc.wr_id, wc.qpn), (numbers.0, numbers.2));
    match wc.ok() {
        Ok(_) => {
            assert_eq!((wc.byte_len, wc.imm, wc.vlan), (numbers.1, numbers.4, numbers.10));
            assert_eq!((wc.pkey_index, wc.src_lid), (datagram.0, datagram.1));
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

/// Polls until the queue is empty, and returns the number of completions.
fn poll_all(cq: &mut crate::CompletionQueue) -> usize {
    let mut found = 0;
    let mut completions = cq.poll().unwrap();
    while let Some(completion) = completions.next() {
        read(completion);
        found += 1;
        assert!(found <= 1 << 16, "it does not end");
    }
    found
}

/// Polls a queue of requests with memory: each of the four sends and four receives comes back once at most.
fn poll_owned<T>(
    cq: &mut OwnedCompletionQueue<T>,
    qp: &mut OwnedQueuePair<T>,
    size: usize,
) -> usize {
    let mut back = 0;
    for done in cq.poll().unwrap() {
        back += 1;
        assert!(!format!("{:?}", done.outcome).is_empty());
        if let Memory::Buffer(buffer) = &done.memory {
            assert!(buffer.len() <= size);
        }
    }
    assert!(back <= 8, "{back} of 8 requests came back");
    let _ = (qp.send_room(), qp.recv_room());
    back
}

fn post(qp: &mut crate::QueuePair) {
    // The queues are not full, so that indices of the kernel may be ahead of those of the poster.
    let mut batch = qp.send_batch().unwrap();
    for _ in 0..3 {
        batch.push(SendWr::send(&[]).id(7).signaled()).unwrap();
    }
    ring(batch).unwrap();
    let mut batch = qp.recv_batch().unwrap();
    for _ in 0..3 {
        batch.push(RecvWr::new(&[]).id(8)).unwrap();
    }
    ring_recv(batch).unwrap();
}

#[test]
#[cfg_attr(miri, ignore = "it opens files")]
fn any_completion_of_rxe_is_read_whole() {
    const SIZE: usize = size_of::<ib_uverbs_wc>();
    let qpn = Bench::new().qp(QpType::RC).qpn().0;
    let known = [wc(qpn, 7), ib_uverbs_wc { status: 5, opcode: 128, byte_len: 5, ..wc(qpn, 8) }];
    let known = known.map(|wc| wc.as_bytes().to_vec());
    let tally = explore("completions of rxe", 20, &known, |input| {
        let mut bench = Bench::new();
        let mut qp = bench.qp(QpType::RC);
        post(&mut qp);
        let whole: Vec<&[u8]> = input.chunks_exact(SIZE).take(MOST).collect();
        for wc in &whole {
            assert!(bench.script.complete_raw(bench.cq.handle(), wc));
        }
        assert_eq!(poll_all(&mut bench.cq), whole.len());
        // Indices that no request has.
        let index = |at: usize| {
            input
                .get(at..at + 4)
                .map_or(0, |four| u32::from_le_bytes(four.try_into().unwrap_or_default()))
        };
        bench.script.scribble(bench.cq.handle(), Role::Cq, index(0), index(4));
        poll_all(&mut bench.cq);
        bench.script.scribble(qp.handle(), Role::Send, index(8), index(12));
        bench.script.scribble(qp.handle(), Role::Recv, index(16), index(20));
        let rooms =
            (qp.send_batch().map(|batch| batch.room()), qp.recv_batch().map(|batch| batch.room()));
        assert!(rooms.0.is_ok_and(|room| room < 64) && rooms.1.is_ok_and(|room| room < 64));
        drop(qp);
        poll_all(&mut bench.cq);
        !whole.is_empty()
    });
    assert!(tally.taken > 0 && tally.refused > 0, "{tally:?}");
}

#[test]
#[cfg_attr(miri, ignore = "it opens files")]
fn no_completion_of_rxe_gives_memory_back_twice() {
    const SIZE: usize = size_of::<ib_uverbs_wc>();
    let posted = |owned: &mut Owned| {
        for tag in ["a", "b", "c", "d"] {
            owned.send(tag);
            owned.recv(tag);
        }
    };
    let tally = explore("owned completions of rxe", 20, &[], |input| {
        // The numbers of requests differ from queue to queue: the input picks among those of this one.
        let mut owned = Owned::new();
        posted(&mut owned);
        let mut ids = Vec::new();
        for role in [Role::Send, Role::Recv] {
            while let Some(request) = owned.bench.script.take(owned.qp.handle(), role) {
                ids.push(u64::from_ne_bytes(request[..8].try_into().unwrap()));
            }
        }
        let (qpn, handle) = (owned.qp.qpn().0, owned.cq.queue().handle());
        let mut shown = HashSet::new();
        for piece in input.chunks(SIZE).take(MOST) {
            let mut bytes = [0; SIZE];
            bytes[..piece.len()].copy_from_slice(piece);
            let mut wc = ib_uverbs_wc::default();
            wc.as_mut_bytes().copy_from_slice(&bytes);
            let [pick, bit, keep, ..] = bytes;
            wc.wr_id = ids[usize::from(pick) % ids.len()];
            // Half of them differ from a number of a request by one bit.
            if bit & 1 != 0 {
                wc.wr_id ^= 1 << (bit >> 1 & 63);
            }
            if keep & 3 != 0 {
                wc.qp_num = qpn;
            }
            // Half of the completions are of successful requests, receives among them.
            if keep & 4 != 0 {
                (wc.status, wc.opcode) = (0, u32::from(keep & 8) << 4);
            }
            assert!(owned.bench.script.complete(handle, wc));
            if wc.qp_num == qpn && ids.contains(&wc.wr_id) {
                shown.insert(wc.wr_id);
            }
        }
        let back = poll_owned(&mut owned.cq, &mut owned.qp, 64);
        assert_eq!(back, shown.len(), "each request comes back by its own number alone");
        back > 0
    });
    assert!(tally.taken > 0 && tally.refused > 0, "{tally:?}");
}

#[test]
#[cfg_attr(miri, ignore = "it opens files")]
fn any_completion_of_mlx5_is_read_whole() {
    let opcodes = [0, 1, 2, 3, 4, 13, 14];
    let known = opcodes.map(|opcode| cqe(opcode, 1, 0x42, 0).to_vec());
    let tally = explore("completions of mlx5", 20, &known, |input| {
        let script = Script::mlx5();
        let context = script.open("mlx5_0");
        let pd = context.alloc_pd().unwrap();
        let size = if input.first().is_some_and(|first| first & 1 != 0) { 128 } else { 64 };
        let mut cq = context.cq_builder(MOST as u32).cqe_size(size).build().unwrap();
        let mut device = cq.fake_device();
        let mut srq = pd.srq_builder(4).build().unwrap();
        let mut own =
            pd.qp_builder(&cq, &cq, QpType::RC).max_send_wr(4).max_recv_wr(4).build().unwrap();
        let shared = pd.qp_builder(&cq, &cq, QpType::RC).srq(&srq).build().unwrap();
        bring_up(&script, &own);
        post(&mut own);
        let mut batch = srq.batch().unwrap();
        while batch.push(RecvWr::new(&[])).is_ok() {}
        ring_recv(batch).unwrap();
        let mut written = 0;
        for core in input.chunks_exact(64).take(MOST) {
            let mut core: [u8; 64] = core.try_into().unwrap();
            // Most completions are of an existing queue pair.
            if core[31] & 3 != 0 {
                let index = 1 + u32::from(core[31] >> 2 & 1);
                core[32..36].copy_from_slice(&index.to_be_bytes());
            }
            device.write(core);
            written += 1;
        }
        let found = poll_all(&mut cq);
        assert!(found <= written, "{found} of {written}");
        drop((own, shared, srq));
        assert_eq!(poll_all(&mut cq), 0);
        found > 0
    });
    assert!(tally.taken > 0 && tally.refused > 0, "{tally:?}");
}

#[test]
#[cfg_attr(miri, ignore = "it opens files")]
fn no_completion_of_mlx5_gives_memory_back_twice() {
    let known = [0, 1, 2, 3, 4, 13, 14].map(|opcode| cqe(opcode, 1, 0x42, 0).to_vec());
    let tally = explore("owned completions of mlx5", 20, &known, |input| {
        let script = Script::mlx5();
        let context = script.open("mlx5_0");
        let pd = context.alloc_pd().unwrap();
        let pool = pd.buffer_pool_builder(64).count(8).build().unwrap();
        let cq = context.cq_builder(64).build().unwrap();
        let mut device = cq.fake_device();
        let mut cq = OwnedCompletionQueue::new(cq);
        let builder = pd.qp_builder(cq.queue(), cq.queue(), QpType::RC);
        let qp = builder.max_send_wr(4).max_recv_wr(4).build().unwrap();
        let mut qp = cq.adopt(qp).unwrap();
        bring_up_owned(&script, &qp);
        let index = script.told::<mlx5_ib_create_qp>(qp.handle()).uidx;
        let mut batch = qp.send_batch().unwrap();
        for tag in 0..4 {
            batch.push(SendWr::send(&[]), pool.copy(b"sent").unwrap(), tag).unwrap();
        }
        batch.ring().unwrap();
        let mut batch = qp.recv_batch().unwrap();
        for tag in 0..4 {
            batch.push(pool.take().unwrap(), tag).unwrap();
        }
        batch.ring().unwrap();
        for core in input.chunks_exact(64).take(MOST) {
            let mut core: [u8; 64] = core.try_into().unwrap();
            if core[31] & 3 != 3 {
                core[32..36].copy_from_slice(&index.to_be_bytes());
            }
            device.write(core);
        }
        let back = poll_owned(&mut cq, &mut qp, 64);
        assert!(pool.idle() <= 8);
        back > 0
    });
    assert!(tally.taken > 0, "{tally:?}");
}
