//! What the usual ways through mlx5's queues do not look at, because it was looked at when the queues were
//! made; on a kernel that the test plays.

use crate::uverbs::scripted::Script;
use crate::{Errno, Lkey, Notify, PostError, QpType, Remote, Rkey, SendWr, Sge};

/// Whether a queue takes pieces of memory at all is looked at when it is made.
#[test]
fn a_queue_that_takes_no_pieces_refuses_one() {
    let script = Script::mlx5();
    let context = script.open("mlx5_0");
    let pd = context.alloc_pd().unwrap();
    let cq = context.create_cq(4).build().unwrap();
    let to = Remote { addr: 0, rkey: Rkey(1) };
    let sges = [Sge { addr: 0, length: 8, lkey: Lkey(1) }; 2];
    for pieces in [0, 1] {
        let qp = pd.create_qp(&cq, &cq, QpType::RC).max_send_wr(4).max_send_sge(pieces);
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
    let mut alone = context.create_cq(4).build().unwrap();
    let mut heard = context.create_cq(4).channel(&channel).build().unwrap();
    for _ in 0..2 {
        // Where the control path has something to tell first, and where it has not.
        assert_eq!(alone.req_notify(Notify::Next).unwrap_err().errno(), Errno::INVAL);
        heard.req_notify(Notify::Next).unwrap();
        assert!(alone.poll().unwrap().next().is_none() && heard.poll().unwrap().next().is_none());
    }
}
