//! Responses whose PSN has no place in a connection: they are dropped before they change anything.
//!
//! ```text
//!            oldest unacknowledged      limit
//!  responses  ──┬──────────────────────┬──  taken between; a repeated one, or an answer to nothing, is dropped
//! ```
//!
//! From `check_psn` of the kernel's `rxe_comp.c`. A request has no such bound: it may be ahead of the expected one by all
//! the PSNs of the responses to reads in front of it, which is up to half of the space.

use crate::headers::Packet;
use crate::mistake::Mistake;
use crate::opcodes::{Kind, Transport};
use crate::queue_pair::QueuePair;

impl<P> QueuePair<P> {
    /// Whether a packet is a request, or a response to one under way. A unit has no PSN of its own to check.
    #[inline]
    pub(crate) fn has_place_for(&self, packet: &Packet<'_>) -> bool {
        let is_reliable = matches!(self.transport, Transport::Rc | Transport::Xrc);
        if !is_reliable || packet.packets > 1 || packet.opcode.operation.kind() != Kind::Response {
            return true;
        }
        let (oldest, limit) = (self.requester.oldest, self.requester.limit);
        let under_way = packet.bth.psn().is_within(oldest, limit.since(oldest));
        under_way || Mistake::AckTwice.is_planted()
    }
}
