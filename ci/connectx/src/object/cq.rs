//! Completion queues.

use uverbs_uapi::mlx5::prm::Bits;
use uverbs_uapi::mlx5::prm::cqc::cqc;

use super::buffer::Buffer;

pub(crate) const PRODUCER_MASK: u32 = 0xff_ffff;

/// `cqe_sz` of completions that are padded to 128 bytes.
pub(crate) const PADDED: u64 = 2;

/// A completion queue.
pub struct Cq {
    pub(crate) context: Bits<cqc, Vec<u8>>,
    pub(crate) buffer: Buffer,
    /// Guest address of the doorbell record.
    pub(crate) record: u64,
    pub(crate) umems: Vec<u32>,
    pub(crate) log_size: u32,
    /// 64, or 128 with the entry proper in the second half.
    pub(crate) entry: u64,
    /// Completions written so far; the producer index is the lower 24 bits.
    pub(crate) written: u64,
    /// How many of them, up to and with the last solicited one.
    pub(crate) solicited: u64,
    /// How many of them, up to and with the last one that an event has told of.
    pub(crate) notified: u64,
    pub(crate) armed: Arm,
    /// Completions that the next event will report, and when the last one was raised.
    pub(crate) unreported: u32,
    pub(crate) reported: u64,
    /// When the next event is due, if it waits for the clock.
    pub(crate) due: Option<u64>,
    pub(crate) uar: u32,
    pub(crate) eqn: u32,
    pub(crate) failed: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Arm {
    No,
    Any,
    Solicited,
}

impl Cq {
    pub(crate) fn producer(&self) -> u32 {
        self.written as u32 & PRODUCER_MASK
    }

    /// Completions that call for an event from a driver that arms the queue having seen what comes
    /// before `consumer`. One that an event has told of does not call for another: drivers arm
    /// before they poll, and then wait for what is new.
    pub(crate) fn unseen(&self, consumer: u32, solicited_only: bool) -> u32 {
        let newest = if solicited_only { self.solicited } else { self.written };
        let seen = (newest as u32).wrapping_sub(consumer) & PRODUCER_MASK;
        // Less than none: the driver has seen later ones.
        let seen = if seen < PRODUCER_MASK / 2 { seen } else { 0 };
        let told = newest.saturating_sub(self.notified);
        seen.min(u32::try_from(told).unwrap_or(u32::MAX))
    }
}

/// Whether the arm word of a record is older than the doorbell that came after it. It may be newer:
/// the next doorbell is on its way then.
pub(crate) fn is_behind(record: u32, doorbell: u32) -> bool {
    // The upper four bits count events, modulo 4.
    let serial = (record >> 28).wrapping_sub(doorbell >> 28) & 3;
    let consumer = record.wrapping_sub(doorbell) & PRODUCER_MASK;
    serial > 1 || serial == 0 && consumer > PRODUCER_MASK / 2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_older_arm_word_is_told_from_a_newer_one() {
        assert!(!is_behind(0x1000_0005, 0x1000_0005));
        assert!(!is_behind(0x1000_0006, 0x1000_0005));
        assert!(!is_behind(0x2000_0000, 0x1000_0005));
        assert!(!is_behind(0x0000_0001, 0x30ff_ffff));
        assert!(!is_behind(0x1000_0000, 0x10ff_ffff));
        assert!(is_behind(0x1000_0004, 0x1000_0005));
        assert!(is_behind(0x1000_0005, 0x2000_0005));
        assert!(is_behind(0x3000_0005, 0x0000_0005));
    }
}
