//! A fake device for tests: it writes CQEs, and reads from the doorbell record which of them were consumed.

use crate::memory::doorbell_record::DoorbellRecord;
use crate::memory::queue_memory::QueueMemory;
use crate::memory::wqe_segment::{SEGMENT, WqeSegments};
use std::sync::Arc;

/// A completion queue as the device sees it.
pub(crate) struct FakeCq {
    pub(crate) segments: WqeSegments,
    pub(crate) dbrec: Arc<DoorbellRecord>,
    pub(crate) entries: u32,
    /// Segments of a CQE.
    pub(crate) stride: u32,
    /// CQEs written in all.
    pub(crate) producer: u32,
}

impl FakeCq {
    /// A queue of `entries` CQEs of `size` bytes, none of them written.
    pub(crate) fn new(
        memory: &Arc<QueueMemory>,
        entries: u32,
        size: usize,
        dbrec: Arc<DoorbellRecord>,
    ) -> FakeCq {
        let stride = (size / SEGMENT) as u32;
        let segments = WqeSegments::new(memory.clone(), 0, entries * stride).unwrap();
        FakeCq { segments, dbrec, entries, stride, producer: 0 }
    }

    /// Continues in other memory, with CQEs of the same size.
    #[cfg(not(loom))]
    pub(crate) fn exchange(&mut self, memory: &Arc<QueueMemory>, entries: u32) {
        self.segments = WqeSegments::new(memory.clone(), 0, entries * self.stride).unwrap();
        self.entries = entries;
    }

    /// Writes a completion, whose owner bit is filled in here.
    pub(crate) fn write(&mut self, mut core: [u8; 64]) {
        let parity = (self.producer / self.entries) & 1;
        core[63] = core[63] & 0xfe | parity as u8;
        let at = self.producer.wrapping_mul(self.stride) + (self.stride - 4);
        self.segments.copy(at, 0, &core);
        self.producer = self.producer.wrapping_add(1);
    }

    /// The consumer index in the doorbell record.
    pub(crate) fn consumed(&self) -> u32 {
        self.dbrec.get(0)
    }
}

/// The 64 bytes of a CQE, with the fields that every CQE has.
pub(crate) fn cqe(opcode: u8, uidx: u32, qpn: u32, counter: u16) -> [u8; 64] {
    let mut core = [0; 64];
    core[32..36].copy_from_slice(&uidx.to_be_bytes());
    core[56..60].copy_from_slice(&qpn.to_be_bytes());
    core[60..62].copy_from_slice(&counter.to_be_bytes());
    core[63] = opcode << 4;
    core
}
