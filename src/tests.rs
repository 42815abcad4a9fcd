//! Tests of the library that need no device, on the scripted kernel.

mod abandon;
mod addresses;
mod control;
mod cq_handle;
mod creation;
mod destroy;
mod destructors;
mod ece;
mod events;
#[cfg(not(loom))]
mod fast_path;
mod fork;
pub(crate) mod futures;
mod golden;
pub(crate) mod hostile;
mod messages;
mod mixing;
mod mlx5;
mod mlx5_batches;
mod mlx5_requests;
mod mlx5_rings;
mod owned;
pub(crate) mod panics;
mod plain_wc;
mod ports;
mod posting;
mod program_buffers;
mod refusals;
mod retire;
mod room;
mod scope;
mod sharing;
mod stale;
mod unsignaled;
mod visits;
mod wakers;
mod windows;
#[cfg(not(loom))]
mod writers;
mod xrc;

use crate::uverbs::scripted::Script;
use crate::{
    CompletionQueue, Context, Handshake, ProtectionDomain, QpControl, QpState, QpType, QueuePair,
    RecvBatch, RingError, SendBatch,
};
use uverbs_uapi::wc::ib_uverbs_wc;

/// A device with the objects that most tests need.
pub(crate) struct Bench {
    pub(crate) script: Script,
    pub(crate) context: Context,
    pub(crate) pd: ProtectionDomain,
    pub(crate) cq: CompletionQueue,
}

impl Bench {
    pub(crate) fn new() -> Bench {
        Bench::on(Script::new())
    }

    /// The same objects on the device of a script.
    pub(crate) fn on(script: Script) -> Bench {
        let context = script.open(script.name());
        let pd = context.alloc_pd().unwrap();
        let cq = context.cq_builder(16).build().unwrap();
        Bench { script, context, pd, cq }
    }

    /// A queue pair that may send, 4 requests of 2 entries and 32 bytes inline each way.
    pub(crate) fn qp(&self, qp_type: QpType) -> QueuePair {
        let qp = self
            .pd
            .qp_builder(&self.cq, &self.cq, qp_type)
            .max_send_wr(4)
            .max_recv_wr(4)
            .max_send_sge(2)
            .max_recv_sge(2)
            .max_inline_data(32)
            .build()
            .unwrap();
        bring_up(&self.script, &qp);
        qp
    }
}

/// Makes a queue pair ready to send, here and in the scripted kernel.
pub(crate) fn bring_up<S: crate::Sharing>(script: &Script, qp: &QueuePair<S>) {
    qp.qp.set_state(QpState::RTS);
    script.set_qp_state(qp.handle(), QpState::RTS.0);
}

/// Connects a queue pair of a fabric's device to itself.
pub(crate) fn connect_to_itself(context: &Context, qp: &QpControl) {
    let own = qp.endpoint(&context.query_gid(1, 0).unwrap()).unwrap();
    qp.handshake(&own, &Handshake::new()).unwrap();
}

/// A successful completion.
pub(crate) fn wc(qpn: u32, wr_id: u64) -> ib_uverbs_wc {
    ib_uverbs_wc { qp_num: qpn, wr_id, ..Default::default() }
}

/// Rings a batch that no device executes, or whose memory stays until its queue pair is gone.
#[allow(unsafe_code)]
pub(crate) fn ring(batch: SendBatch<'_>) -> Result<(), RingError> {
    // SAFETY: rxe's script and a queue pair in RESET touch no memory that requests name; otherwise it stays.
    unsafe { batch.ring() }
}

/// As [`ring`], for receives.
#[allow(unsafe_code)]
pub(crate) fn ring_recv(batch: RecvBatch<'_>) -> Result<(), RingError> {
    // SAFETY: as for sends.
    unsafe { batch.ring() }
}

/// The numbers of the completions that a poll finds.
pub(crate) fn poll_ids(cq: &mut CompletionQueue) -> Vec<u64> {
    let mut completions = cq.poll().unwrap();
    let mut ids = Vec::new();
    while let Some(completion) = completions.next() {
        ids.push(completion.wr_id());
    }
    ids
}
