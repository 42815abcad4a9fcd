//! Packets whose PSN has no place in a connection: they are dropped before they change anything.
//!
//! ```text
//!            oldest unacknowledged      limit
//!  responses  ──┬──────────────────────┬──  taken between; a repeated one, or an answer to nothing, is dropped
//!
//!            expected                      expected + AHEAD
//!  requests ──┬───────────────────────────────┬──  behind: a duplicate; between: something was lost; ahead: dropped
//! ```
//!
//! The first rule is `check_psn` of the kernel's `rxe_comp.c`. rxe answers a request by a NAK however far ahead it is; no
//! requester has so many packets in flight as are allowed here, and one that loses the packets in front repeats them.

use crate::headers::Packet;
use crate::mistake::Mistake;
use crate::opcodes::{Kind, Transport};
use crate::queue_pair::QueuePair;

/// How many PSNs ahead of the expected one a request may be. That is 64 MiB in packets of 4 KiB.
const AHEAD: u32 = 1 << 14;

impl<P> QueuePair<P> {
    /// Whether a packet has a PSN that the connection has a place for. A unit has none of its own to check.
    #[inline]
    pub(crate) fn has_place_for(&self, packet: &Packet<'_>) -> bool {
        let psn = packet.bth.psn();
        if packet.packets > 1 || !matches!(self.transport, Transport::Rc | Transport::Xrc) {
            return true;
        }
        if packet.opcode.operation.kind() == Kind::Response {
            let (oldest, limit) = (self.requester.oldest, self.requester.limit);
            return psn.is_within(oldest, limit.since(oldest)) || Mistake::AckTwice.is_planted();
        }
        let expected = self.responder.next_psn();
        psn.is_before(expected) || psn.is_within(expected, AHEAD)
    }
}
