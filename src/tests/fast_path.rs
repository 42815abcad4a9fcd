//! Checks that mlx5's fast path omits because the creation of the queue made them; on the scripted kernel.

use crate::memory::recorded_order::{RecordedStep, steps_of};
use crate::uverbs::scripted::Script;
use crate::{Errno, Lkey, Notify, PostError, QpType, QueuePair, Remote, Rkey, SendWr, Sge};
use std::fs::File;
use std::os::unix::fs::FileExt;
use uverbs_uapi::mlx5::abi::mlx5_ib_create_qp;

/// The queue's creation decides whether it takes SGEs at all.
#[test]
fn a_queue_without_sges_refuses_one() {
    let script = Script::mlx5();
    let context = script.open("mlx5_0");
    let pd = context.alloc_pd().unwrap();
    let cq = context.cq_builder(4).build().unwrap();
    let to = Remote { addr: 0, rkey: Rkey(1) };
    let sges = [Sge { addr: 0, length: 8, lkey: Lkey(1) }; 2];
    for pieces in [0, 1] {
        let qp = pd.qp_builder(&cq, &cq, QpType::RC).max_send_wr(4).max_send_sge(pieces);
        let mut qp = qp.max_inline_data(16).build().unwrap();
        super::bring_up(&script, &qp);
        let mut batch = qp.send_batch().unwrap();
        for count in 1..=2 {
            let pushed = batch.push(SendWr::write(to, &sges[..count]));
            let fits = count <= pieces as usize;
            let expected = if fits { Ok(()) } else { Err(PostError::TooManySge { max: pieces }) };
            assert_eq!(pushed, expected, "{count} of {pieces}");
        }
        assert_eq!(batch.len(), pieces);
        batch.push(SendWr::write(to, &[]).inline(&[1; 16])).unwrap();
        assert_eq!(batch.len(), pieces + 1);
    }
}

#[test]
fn only_a_queue_with_a_channel_is_armed() {
    let script = Script::mlx5();
    let context = script.open("mlx5_0");
    let channel = context.create_comp_channel().unwrap();
    let mut alone = context.cq_builder(4).build().unwrap();
    let mut heard = context.cq_builder(4).channel(&channel).build().unwrap();
    for _ in 0..2 {
        // First with updates from the control path, then without.
        assert_eq!(alone.req_notify(Notify::Next).unwrap_err().errno(), Errno::INVAL);
        heard.req_notify(Notify::Next).unwrap();
        assert!(alone.poll().unwrap().next().is_none() && heard.poll().unwrap().next().is_none());
    }
}

/// The queue shares its doorbell register, or has the register of its thread domain.
#[test]
fn one_request_goes_by_blueflame_and_a_batch_by_doorbell_from_either_kind_of_queue() {
    let script = Script::mlx5();
    let context = script.open("mlx5_0");
    let pd = context.alloc_pd().unwrap();
    let mut td = context.alloc_td().unwrap();
    let domain = pd.parent_domain_builder().thread_domain(&td).build().unwrap();
    let cq = context.cq_builder(16).build().unwrap();
    let shared = pd.qp_builder(&cq, &cq, QpType::RC).max_send_wr(4).max_inline_data(16);
    let mut shared = shared.build().unwrap();
    let owning = domain.qp_builder(&cq, &cq, QpType::RC).max_send_wr(4).max_inline_data(16);
    let mut owning = owning.build().unwrap();
    super::bring_up(&script, &shared);
    super::bring_up(&script, &owning);
    let wr = SendWr::send(&[]).inline(&[1; 16]);
    for (count, step) in [(1, RecordedStep::BlueFlame), (2, RecordedStep::Doorbell)] {
        let rings = [
            steps_of(|| post(&mut shared, &vec![wr; count])),
            steps_of(|| {
                let mut batch = owning.send_batch().unwrap();
                (0..count).for_each(|_| batch.push(wr).unwrap());
                // SAFETY: the scripted kernel reads no memory of the requests.
                #[allow(unsafe_code, reason = "the point of the test")]
                unsafe {
                    batch.ring(&mut td).unwrap();
                }
            }),
        ];
        for steps in rings {
            let rung = |step: &&RecordedStep| {
                matches!(step, RecordedStep::BlueFlame | RecordedStep::Doorbell)
            };
            assert_eq!(steps.iter().filter(rung).collect::<Vec<_>>(), [&step], "{count} requests");
        }
    }
}

/// The fence of each WQE in a queue's memory: two WQEBBs for a key change and one for a send.
fn fences(script: &Script, handle: u32) -> Vec<(u8, u8)> {
    let mut memory = [0; 16 * 64];
    let start = script.told::<mlx5_ib_create_qp>(handle).buf_addr;
    File::open("/proc/self/mem").unwrap().read_exact_at(&mut memory, start).unwrap();
    let control = |block: &[u8]| (block[3], block[11] & 0xe0);
    // Only WQEBBs that begin with an opcode of this test.
    memory.chunks(64).map(control).filter(|(code, _)| matches!(code, 0x25 | 0x0a)).collect()
}

fn post(qp: &mut QueuePair, wrs: &[SendWr<'_>]) {
    let mut batch = qp.send_batch().unwrap();
    wrs.iter().for_each(|wr| batch.push(*wr).unwrap());
    super::ring(batch).unwrap();
}

/// No request skips the fence after a key change: neither in a later batch, nor after a failed
/// destroy gave the queue back.
#[test]
#[cfg_attr(miri, ignore = "it reads the memory of its process as a file")]
fn the_first_request_after_a_key_change_is_fenced() {
    const CHANGE: (u8, u8) = (0x25, 0);
    const WAITS: (u8, u8) = (0x0a, 0x20);
    const PLAIN: (u8, u8) = (0x0a, 0);
    let script = Script::mlx5();
    let context = script.open("mlx5_0");
    let pd = context.alloc_pd().unwrap();
    let cq = context.cq_builder(4).build().unwrap();
    let qp = pd.qp_builder(&cq, &cq, QpType::RC).max_send_wr(16).max_recv_wr(0).build().unwrap();
    super::bring_up(&script, &qp);
    let handle = qp.handle();
    let (change, send) = (SendWr::local_inv(Rkey(5)), SendWr::send(&[]).inline(&[1; 16]));
    let mut qp = qp;
    post(&mut qp, &[change, send, send]);
    assert_eq!(fences(&script, handle), [CHANGE, WAITS, PLAIN]);
    post(&mut qp, &[change]);
    script.refuse_destroy(handle, Errno::BUSY);
    let (mut qp, _) = qp.destroy().unwrap_err().into_parts();
    // A dropped batch leaves no pending fence.
    qp.send_batch().unwrap().push(send).unwrap();
    post(&mut qp, &[send]);
    post(&mut qp, &[send]);
    assert_eq!(fences(&script, handle), [CHANGE, WAITS, PLAIN, CHANGE, WAITS, PLAIN]);
}
