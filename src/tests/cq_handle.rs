//! Queue pairs are made with a handle of a completion queue that another thread polls.

use super::{Bench, wc};
use crate::uverbs::scripted::Script;
use crate::{CompletionQueue, CqControl, Errno, Notify, QpType, Wc};
use std::sync::mpsc;
use uverbs_uapi::object::UVERBS_OBJECT_CQ;

#[test]
fn a_queue_that_its_poller_owns_gets_new_queue_pairs() {
    let Bench { script, context, pd, cq } = Bench::new();
    let handle = cq.control();
    assert_eq!((handle.handle(), handle.key()), (cq.handle(), cq.key()));
    let (polled, ids) = mpsc::channel();
    let poller = std::thread::spawn(move || {
        let mut cq: CompletionQueue = cq;
        let mut wcs = [Wc::default(); 4];
        let mut left = 8;
        while left > 0 {
            let found = cq.poll_into(&mut wcs).unwrap();
            wcs[..found].iter().for_each(|wc| polled.send(wc.wr_id).unwrap());
            left -= found;
        }
        cq
    });
    for id in 0..8 {
        let qp = pd.qp_builder(&handle, &handle.clone(), QpType::RC).build().unwrap();
        assert!(script.complete(handle.handle(), wc(qp.qpn().0, id)));
        assert_eq!(ids.recv().unwrap(), id);
    }
    let cq = poller.join().unwrap();
    let (cq, error) = cq.destroy().unwrap_err().into_parts();
    assert_eq!((error.errno(), error.kernel_errno()), (Errno::BUSY, None));
    assert!(error.message().contains("CqControl"), "{error}");
    drop(handle);
    cq.destroy().unwrap();
    drop(context);
}

#[test]
fn a_queue_stays_until_its_handles_are_gone() {
    for (script, device) in [(Script::new(), "rxe0"), (Script::mlx5(), "mlx5_0")] {
        let context = script.open(device);
        let pd = context.alloc_pd().unwrap();
        let cq = context.cq_builder(4).build().unwrap();
        let handle: CqControl = cq.control();
        drop(cq);
        assert_eq!(script.count(UVERBS_OBJECT_CQ), 1);
        let qp = pd.qp_builder(&handle, &handle, QpType::RC).build().unwrap();
        drop(handle);
        assert_eq!(script.count(UVERBS_OBJECT_CQ), 1);
        drop(qp);
        assert_eq!(script.count(UVERBS_OBJECT_CQ), 0);
    }
}

#[test]
fn a_queue_in_the_middle_of_a_poll_gets_new_queue_pairs() {
    let bench = Bench::new();
    let channel = bench.context.create_comp_channel().unwrap();
    let mut cq = bench.context.cq_builder(4).channel(&channel).build().unwrap();
    let handle = cq.control();
    let mut completions = cq.poll().unwrap();
    let qp = bench.pd.qp_builder(&handle, &bench.cq, QpType::RC).build().unwrap();
    bench.script.complete(handle.handle(), wc(qp.qpn().0, 3));
    assert_eq!(completions.next().map(|completion| completion.wr_id()), Some(3));
    drop(completions);
    cq.req_notify(Notify::Next).unwrap();
}
