//! Shared receive queues: receive memory pools (RMPs) and XRC SRQs.

use super::Objects;
use super::receive_queue::ReceiveQueue;

/// A shared receive queue.
pub struct Srq {
    pub(crate) srq_type: SrqType,
    pub(crate) queue: ReceiveQueue,
    pub(crate) umems: Vec<u32>,
    pub(crate) pd: u32,
    /// Raises an event below this number of posted receives; 0 is never.
    pub(crate) limit: u16,
}

/// The command that created it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum SrqType {
    /// CREATE_RMP.
    Rmp,
    /// CREATE_XRC_SRQ.
    Xrc {
        /// The XRC domain whose queue pairs may use it.
        xrcd: u32,
        /// The CQ of its receives.
        cqn: u32,
        /// `user_index` in its CQEs.
        user_index: u32,
    },
}

impl Objects {
    /// Whether an XRC SRQ is of this XRC domain.
    pub(crate) fn xrc_srq_matches(&self, srqn: u32, xrcd: u32) -> bool {
        self.srqs
            .get(srqn)
            .is_ok_and(|srq| matches!(srq.srq_type, SrqType::Xrc { xrcd: its, .. } if its == xrcd))
    }
}
