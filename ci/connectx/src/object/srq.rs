//! Shared receive queues: receive memory pools (RMPs) and XRC SRQs.

use super::Objects;
use super::receive_queue::ReceiveQueue;

/// A shared receive queue.
pub struct Srq {
    pub(crate) kind: Kind,
    pub(crate) queue: ReceiveQueue,
    pub(crate) umems: Vec<u32>,
    pub(crate) pd: u32,
    /// Below how many posted receives an event is due; 0 is never.
    pub(crate) limit: u16,
}

/// What it was made as.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// By CREATE_RMP.
    Pool,
    /// By CREATE_XRC_SRQ.
    Xrc {
        /// The XRC domain whose queue pairs may use it.
        xrcd: u32,
        /// Where its completions go.
        cqn: u32,
        /// What they are marked with.
        user_index: u32,
    },
}

impl Objects {
    /// Whether an XRC SRQ may be used by a queue pair.
    pub(crate) fn xrc_srq_matches(&self, srqn: u32, xrcd: u32) -> bool {
        self.srqs
            .get(srqn)
            .is_ok_and(|srq| matches!(srq.kind, Kind::Xrc { xrcd: its, .. } if its == xrcd))
    }
}
