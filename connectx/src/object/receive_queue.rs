//! Receive queues: those of queue pairs, SRQs, and raw ones.
//!
//! Pairs with the receive doorbell record. Receives have no doorbell register, so the device reads
//! the record when a message needs a receive.

use super::buffer::Buffer;
use crate::chunks::chunks;
use crate::format::wqe::{INVALID_KEY, Sge};
use crate::guest::GuestMemory;
use crate::recording::{DoorbellCounter, Entry, Recorder, RqType};

/// The order of the WQEs, `wq_type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WqType {
    /// Consecutive WQEs; the queue wraps.
    Cyclic,
    /// Each WQE names the next; the first is WQE 0.
    Linked,
}

/// Bytes in front of the SGEs of a linked WQE.
const LINK: usize = 16;

/// A receive queue.
pub struct ReceiveQueue {
    buffer: Buffer,
    log_size: u32,
    log_stride: u32,
    wq_type: WqType,
    doorbell_record: u64,
    /// WQE to take next.
    next_index: u16,
    /// WQEs taken so far.
    consumer_index: u16,
}

/// A receive WQE.
#[derive(Default)]
pub struct ReceiveWqe {
    /// `wqe_counter` of its CQE.
    pub index: u16,
    next_index: u16,
    /// The whole WQE, as read.
    bytes: Vec<u8>,
    linked: bool,
    /// The count in the doorbell record when the WQE was read.
    posted: u16,
}

impl ReceiveWqe {
    /// The number of receives that were posted to its queue up to this one, modulo 2¹⁶.
    pub(crate) fn posted(&self) -> u16 {
        self.posted
    }

    /// The SGEs that take the data.
    pub fn sges(&self) -> impl Iterator<Item = Sge> + Clone + '_ {
        let list = if self.linked { self.bytes.get(LINK..) } else { Some(&self.bytes[..]) };
        chunks::<16>(list.unwrap_or(&[]))
            .iter()
            .map(Sge::parse)
            .take_while(|segment| !(segment.len == 0 && segment.key == INVALID_KEY))
            .filter(|segment| segment.len != 0)
    }

    /// The bytes that fit.
    pub fn room(&self) -> u64 {
        self.sges().map(|sge| u64::from(sge.len)).sum()
    }

    /// Records the WQE as read from queue `number`.
    pub(crate) fn record(&self, recorder: &mut Recorder, now: u64, rq_type: RqType, number: u32) {
        let counter = match rq_type {
            RqType::Qp => DoorbellCounter::QpRq,
            RqType::Srq => DoorbellCounter::Srq,
            RqType::Rq => DoorbellCounter::Rq,
        };
        recorder.doorbell_record(now, counter, number, self.posted.into());
        let (linked, index, bytes) = (self.linked, self.index, &self.bytes[..]);
        recorder.add(now, &Entry::ReceiveWqe { rq_type, linked, index, number, bytes });
    }
}

impl ReceiveQueue {
    /// A queue of 2^`log_size` WQEs of 2^`log_stride` bytes at the start of `buffer`.
    pub fn new(
        buffer: Buffer,
        log_size: u32,
        log_stride: u32,
        wq_type: WqType,
        doorbell_record: u64,
    ) -> Self {
        Self {
            buffer,
            log_size,
            log_stride,
            wq_type,
            doorbell_record,
            next_index: 0,
            consumer_index: 0,
        }
    }

    /// Restores the state after creation.
    pub fn reset(&mut self) {
        self.next_index = 0;
        self.consumer_index = 0;
    }

    /// The number of posted receives; `None` if the doorbell record cannot be read or is out of
    /// range.
    pub fn posted(&self, memory: &GuestMemory) -> Option<u16> {
        let record = memory.read_be32(self.doorbell_record).ok()? as u16;
        let posted = record.wrapping_sub(self.consumer_index);
        (u32::from(posted) <= 1 << self.log_size).then_some(posted)
    }

    /// The next receive, which stays in the queue until [`ReceiveQueue::take`]. `Ok(None)` if none
    /// is posted.
    ///
    /// # Errors
    /// The reason why the queue cannot be used.
    pub fn peek(&self, memory: &GuestMemory) -> Result<Option<ReceiveWqe>, String> {
        let mut receive = ReceiveWqe::default();
        Ok(self.peek_into(memory, &mut receive)?.then_some(receive))
    }

    /// As [`ReceiveQueue::peek`], into the memory of an earlier receive; returns whether one is posted.
    ///
    /// # Errors
    /// The reason why the queue cannot be used.
    pub(crate) fn peek_into(
        &self,
        memory: &GuestMemory,
        to: &mut ReceiveWqe,
    ) -> Result<bool, String> {
        let Some(posted) = self.posted(memory) else {
            return Err("the receive doorbell record cannot be read or is out of range".into());
        };
        if posted == 0 {
            return Ok(false);
        }
        let mask = ((1u32 << self.log_size) - 1) as u16;
        let position = self.next_index & mask;
        let entry = &mut to.bytes;
        entry.resize(1 << self.log_stride, 0);
        let at = u64::from(position) << self.log_stride;
        self.buffer.read(memory, at, entry).map_err(|fault| format!("{fault:?}"))?;
        (to.index, to.next_index) = match self.wq_type {
            WqType::Cyclic => (self.consumer_index, self.next_index.wrapping_add(1)),
            WqType::Linked => (position, u16::from_be_bytes([entry[2], entry[3]])),
        };
        to.linked = self.wq_type == WqType::Linked;
        to.posted = self.consumer_index.wrapping_add(posted);
        Ok(true)
    }

    /// The posted receives that follow the first `seen` ones.
    pub(crate) fn posted_after(&self, memory: &GuestMemory, seen: u16) -> Vec<ReceiveWqe> {
        let mut at = Self { buffer: self.buffer.clone(), ..*self };
        let mut receives = Vec::new();
        while let Ok(Some(receive)) = at.peek(memory) {
            at.take(&receive);
            // Counts are modulo 2¹⁶, and a queue has at most 2¹⁵ receives.
            if at.consumer_index.wrapping_sub(seen).wrapping_sub(1) < 0x8000 {
                receives.push(ReceiveWqe { posted: at.consumer_index, ..receive });
            }
        }
        receives
    }

    /// Takes the receive that `peek` returned.
    pub fn take(&mut self, receive: &ReceiveWqe) {
        self.next_index = receive.next_index;
        self.consumer_index = self.consumer_index.wrapping_add(1);
    }
}

#[cfg(test)]
mod tests {
    use super::super::buffer::ListedPages;
    use super::*;
    use crate::format::wqe::START_PADDING;

    fn queue(wq_type: WqType) -> (GuestMemory, ReceiveQueue) {
        let memory = GuestMemory::plain(0, 1 << 16).unwrap();
        let buffer =
            Buffer::new(&ListedPages::default(), 0, 0, 256, &0x1000u64.to_be_bytes()).unwrap();
        (memory, ReceiveQueue::new(buffer, 2, 6, wq_type, 0x8000))
    }

    fn segment(memory: &GuestMemory, at: u64, len: u32, key: u32) {
        let mut bytes = [0; 16];
        bytes[..4].copy_from_slice(&len.to_be_bytes());
        bytes[4..8].copy_from_slice(&key.to_be_bytes());
        memory.write(at, &bytes).unwrap();
    }

    #[test]
    fn a_cyclic_queue_wraps_and_an_invalid_key_ends_the_sge_list() {
        let (memory, mut queue) = queue(WqType::Cyclic);
        assert!(queue.peek(&memory).unwrap().is_none());
        for position in 0..4 {
            segment(&memory, 0x1000 + position * 64, START_PADDING | (10 + position as u32), 7);
            segment(&memory, 0x1010 + position * 64, 0, INVALID_KEY);
            segment(&memory, 0x1020 + position * 64, 9, 7);
        }
        for turn in 0..6u16 {
            memory.write(0x8000, &u32::from(turn + 1).to_be_bytes()).unwrap();
            let receive = queue.peek(&memory).unwrap().unwrap();
            assert_eq!(receive.index, turn);
            let want = Sge { len: 10 + u32::from(turn) % 4, key: 7, address: 0 };
            assert_eq!(receive.sges().collect::<Vec<_>>(), [want]);
            queue.take(&receive);
        }
    }

    #[test]
    fn a_linked_queue_follows_links_and_masks_them() {
        let (memory, mut queue) = queue(WqType::Linked);
        for (position, next) in [(0u64, 2u16), (2, 0xffff), (3, 0)] {
            memory.write(0x1000 + position * 64 + 2, &next.to_be_bytes()).unwrap();
        }
        memory.write(0x8000, &3u32.to_be_bytes()).unwrap();
        let mut seen = vec![];
        while let Some(receive) = queue.peek(&memory).unwrap() {
            seen.push(receive.index);
            queue.take(&receive);
        }
        assert_eq!(seen, [0, 2, 3]);
    }

    #[test]
    fn a_doorbell_record_ahead_of_the_queue_size_is_an_error() {
        let (memory, queue) = queue(WqType::Cyclic);
        memory.write(0x8000, &5u32.to_be_bytes()).unwrap();
        assert!(queue.peek(&memory).is_err());
    }
}
