//! Completion queues.

use uverbs_uapi::mlx5::prm::Bits;
use uverbs_uapi::mlx5::prm::cqc::cqc;

use super::buffer::Buffer;

pub(crate) const INDEX_MASK: u32 = 0xff_ffff;

/// `cqe_sz` of CQEs that are padded to 128 bytes.
pub(crate) const PADDED: u64 = 2;

/// A completion queue.
pub struct Cq {
    pub(crate) context: Bits<cqc, Vec<u8>>,
    pub(crate) buffer: Buffer,
    /// Guest address of the doorbell record.
    pub(crate) doorbell_record: u64,
    pub(crate) umems: Vec<u32>,
    pub(crate) log_size: u32,
    /// 64, or 128 with the CQE proper in the second half.
    pub(crate) cqe_size: u64,
    /// CQEs written so far; the lower 24 bits are the producer index.
    pub(crate) written: u64,
    /// Value of `written` after the last solicited CQE.
    pub(crate) solicited: u64,
    /// Value of `written` at the last event.
    pub(crate) notified: u64,
    pub(crate) armed: ArmState,
    /// The last doorbell, which is the arm word that the doorbell record held then.
    pub(crate) arm_word: u32,
    /// CQEs that the next event will report.
    pub(crate) unreported: u32,
    /// Time of the last event.
    pub(crate) last_event: u64,
    /// When the next event is due, if moderation delays it.
    pub(crate) due: Option<u64>,
    pub(crate) uar: u32,
    pub(crate) eqn: u32,
    pub(crate) failed: bool,
}

/// An arm word that no driver writes: it stands in the doorbell record before the first one.
pub const NO_ARM_WORD: u32 = u32::MAX;

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum ArmState {
    Disarmed,
    Any,
    Solicited,
}

impl Cq {
    pub(crate) fn producer(&self) -> u32 {
        self.written as u32 & INDEX_MASK
    }

    /// How many CQEs call for an event, if the driver arms the CQ at consumer index `consumer`. A
    /// CQE that an event has reported does not call for another: drivers arm before they poll, and
    /// then wait for new CQEs.
    pub(crate) fn cqes_to_report(&self, consumer: u32, solicited_only: bool) -> u32 {
        let newest = if solicited_only { self.solicited } else { self.written };
        let unseen = (newest as u32).wrapping_sub(consumer) & INDEX_MASK;
        // The driver has already seen later CQEs.
        let unseen = if unseen < INDEX_MASK / 2 { unseen } else { 0 };
        let unreported = newest.saturating_sub(self.notified);
        unseen.min(u32::try_from(unreported).unwrap_or(u32::MAX))
    }
}

/// Whether the arm word in the doorbell record is older than the doorbell. It may be newer, if the
/// next doorbell is on its way.
pub(crate) fn arm_word_lags(record: u32, doorbell: u32) -> bool {
    // Bits 28 and 29 count events, modulo 4.
    let serial = (record >> 28).wrapping_sub(doorbell >> 28) & 3;
    let consumer = record.wrapping_sub(doorbell) & INDEX_MASK;
    serial > 1 || serial == 0 && consumer > INDEX_MASK / 2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_arm_word_lags_only_if_it_is_older_than_the_doorbell() {
        assert!(!arm_word_lags(0x1000_0005, 0x1000_0005));
        assert!(!arm_word_lags(0x1000_0006, 0x1000_0005));
        assert!(!arm_word_lags(0x2000_0000, 0x1000_0005));
        assert!(!arm_word_lags(0x0000_0001, 0x30ff_ffff));
        assert!(!arm_word_lags(0x1000_0000, 0x10ff_ffff));
        assert!(arm_word_lags(0x1000_0004, 0x1000_0005));
        assert!(arm_word_lags(0x1000_0005, 0x2000_0005));
        assert!(arm_word_lags(0x3000_0005, 0x0000_0005));
    }
}
