//! A queue pair that was reset on the device but not here is not used: the device would carry out
//! old requests, whose memory may have a new owner.

use super::bring_up;
use crate::owned::{BufferPool, OwnedCompletionQueue, OwnedQueuePair, OwnedSharedReceiveQueue};
use crate::uverbs::scripted::{Op, Script};
use crate::{
    Access, Context, Errno, PostError, ProtectionDomain, QpAttr, QpControl, QpState, QpType,
    QueuePair, Remote, Rkey, SendWr,
};
use std::fs::File;
use std::os::unix::fs::FileExt;
use uverbs_uapi::mlx5::abi::mlx5_ib_create_qp;
use uverbs_uapi::mlx5::wqe::MLX5_SND_DBR;

const REMOTE: Remote = Remote { addr: 0x2000, rkey: Rkey(6) };

/// A queue pair of mlx5 on a shared receive queue.
struct Bench {
    script: Script,
    context: Context,
    pd: ProtectionDomain,
    pool: BufferPool,
    srq: OwnedSharedReceiveQueue<u32>,
    cq: OwnedCompletionQueue<u32>,
}

impl Bench {
    fn new() -> Bench {
        let script = Script::mlx5();
        let context = script.open("mlx5_0");
        let pd = context.alloc_pd().unwrap();
        let pool = pd.buffer_pool_builder(64).count(4).build().unwrap();
        let srq = OwnedSharedReceiveQueue::new(pd.srq_builder(4).build().unwrap()).unwrap();
        let cq = OwnedCompletionQueue::new(context.cq_builder(64).build().unwrap());
        Bench { script, context, pd, pool, srq, cq }
    }

    fn make(&self) -> QueuePair {
        let cq = self.cq.queue();
        self.pd.qp_builder(cq, cq, QpType::RC).max_send_wr(4).srq(self.srq.queue()).build().unwrap()
    }

    fn adopted(&mut self) -> OwnedQueuePair<u32> {
        let qp = self.make();
        bring_up(&self.script, &qp);
        qp.qp.set_state(QpState::RESET);
        let qp = self.cq.adopt_on(qp, &self.srq).unwrap();
        qp.qp.set_state(QpState::RTS);
        qp
    }

    fn read(&self, qp: &mut OwnedQueuePair<u32>) -> Result<(), PostError> {
        let mut batch = qp.send_batch()?;
        batch.push(SendWr::read(REMOTE, &[]), self.pool.take().unwrap(), 1).unwrap();
        batch.ring().map_err(PostError::from)
    }

    /// WQEBBs written, by the producer index that the device reads.
    fn posted(&self, qp: &OwnedQueuePair<u32>) -> u32 {
        let record =
            self.script.told::<mlx5_ib_create_qp>(qp.handle()).db_addr + 4 * MLX5_SND_DBR as u64;
        let mut word = [0; 4];
        File::open("/proc/self/mem").unwrap().read_exact_at(&mut word, record).unwrap();
        u32::from_be_bytes(word)
    }
}

fn init() -> QpAttr {
    QpAttr::new().state(QpState::INIT).port(1).pkey_index(0).access(Access::empty())
}

#[test]
#[cfg_attr(miri, ignore = "it reads the memory of its process as a file")]
fn a_reset_that_cannot_be_finished_is_not_begun() {
    let mut bench = Bench::new();
    let mut qp = bench.adopted();
    bench.read(&mut qp).unwrap();
    let mut wrong = OwnedCompletionQueue::new(bench.context.cq_builder(8).build().unwrap());
    let asked = bench.script.log().len();
    assert_eq!(qp.reset(&mut wrong).unwrap_err().errno(), Errno::INVAL);
    assert_eq!(bench.script.log().len(), asked, "the kernel was told");
    assert_eq!((qp.state(), bench.posted(&qp)), (QpState::RTS, 1));
    bench.read(&mut qp).unwrap();
}

fn revoke(qp: &QpControl) -> bool {
    qp.qp.revoke()
}

#[test]
#[cfg_attr(miri, ignore = "it reads the memory of its process as a file")]
fn a_revoked_queue_pair_is_used_only_after_a_reset() {
    let mut bench = Bench::new();
    let mut qp = bench.adopted();
    bench.read(&mut qp).unwrap();
    bench.read(&mut qp).unwrap();
    assert!(revoke(&qp));
    assert_eq!(bench.script.log().last(), Some(&Op::MODIFY_QP), "the kernel was told");
    let asked = bench.script.log().len();
    assert_eq!(bench.read(&mut qp), Err(PostError::State(QpState::RESET)));
    assert_eq!(bench.posted(&qp), 2, "where the device would go on");
    let error = qp.modify(&init()).unwrap_err();
    assert!(error.errno() == Errno::INVAL && error.message().contains("reset it first"), "{error}");
    assert_eq!(bench.script.log().len(), asked, "the kernel was told");
    qp.reset(&mut bench.cq).unwrap();
    assert_eq!(bench.posted(&qp), 0);
    qp.modify(&init()).unwrap();
    qp.qp.set_state(QpState::RTS);
    bench.read(&mut qp).unwrap();
    assert_eq!(bench.posted(&qp), 1);
}

/// The owned layer then takes the memory of the requests back.
#[test]
fn a_queue_pair_is_revoked_only_when_it_is_reset_or_gone() {
    let bench = Bench::new();
    let [refused, stolen] = [bench.make(), bench.make()];
    for errno in [Errno::NOMEM, Errno::BUSY] {
        bench.script.refuse(Op::MODIFY_QP, errno);
        assert!(!revoke(&refused), "{errno}");
        bench.script.allow(Op::MODIFY_QP);
    }
    assert!(revoke(&refused));
    // Another process that has the file may destroy its objects.
    bench.script.steal(stolen.handle());
    assert!(revoke(&stolen));
}

#[test]
fn a_revoked_queue_pair_is_not_adopted() {
    let mut bench = Bench::new();
    let qp = bench.make();
    assert!(revoke(&qp));
    let failed = bench.cq.adopt_on(qp, &bench.srq).unwrap_err();
    assert!(failed.to_string().contains("reset it first"), "{failed}");
}

/// As a concurrent change does that was under way during the reset.
#[test]
fn a_late_state_change_does_not_hide_the_revocation() {
    let mut bench = Bench::new();
    let mut qp = bench.adopted();
    assert!(revoke(&qp));
    qp.qp.advance(QpState::INIT);
    let error = qp.modify(&QpAttr::new().state(QpState::ERR)).unwrap_err();
    assert_eq!((error.errno(), qp.state()), (Errno::INVAL, QpState::RESET), "{error}");
    assert!(matches!(bench.read(&mut qp), Err(PostError::State(QpState::RESET))));
}
