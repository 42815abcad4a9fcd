//! Send queues: their buffer, producer index and consumer index.
//!
//! Pairs with the send doorbell record, and with the doorbell register that tells the device to
//! read it.

use super::buffer::Buffer;
use crate::format::wqe::Control;
use crate::guest::GuestMemory;

/// Bytes of a WQE basic block (WQEBB).
pub const BLOCK: usize = 64;

/// A send queue.
pub struct SendRing {
    buffer: Buffer,
    offset: u64,
    log_size: u32,
    record: u64,
    /// WQEBB that the device reads next.
    next: u16,
    /// WQEBB behind the last posted WQE.
    posted: u16,
    /// A WQE from a BlueFlame register, and its index.
    data: Option<(u16, Vec<u8>)>,
}

impl SendRing {
    /// A queue of 2^`log_size` WQEBBs at `offset` of `buffer`, with its doorbell record.
    pub fn new(buffer: Buffer, offset: u64, log_size: u32, record: u64) -> Self {
        Self { buffer, offset, log_size, record, next: 0, posted: 0, data: None }
    }

    /// Restores the state after creation.
    pub fn reset(&mut self) {
        self.next = 0;
        self.posted = 0;
        self.data = None;
    }

    /// The WQEBB that the device reads next.
    pub fn next(&self) -> u16 {
        self.next
    }

    /// The WQEBB behind the last posted WQE.
    pub fn posted(&self) -> u16 {
        self.posted
    }

    /// Whether the next WQE came by BlueFlame.
    pub fn has_data(&self) -> bool {
        self.data.as_ref().is_some_and(|(index, _)| *index == self.next)
    }

    /// Reads the producer index from the doorbell record.
    ///
    /// # Errors
    /// If the record cannot be read, or is further ahead than the size of the queue.
    pub fn refresh(&mut self, memory: &GuestMemory) -> Result<(), String> {
        let record = memory.read_be32(self.record).map_err(|fault| format!("{fault:?}"))? as u16;
        let waiting = record.wrapping_sub(self.next);
        if u32::from(waiting) > 1 << self.log_size {
            return Err(format!("doorbell record {record:#x} with {:#x} blocks done", self.next));
        }
        self.posted = record;
        Ok(())
    }

    /// Whether a WQE that ends at this index is not posted yet, according to the doorbell record.
    pub fn behind(&self, end: u16) -> bool {
        let size = 1u32 << self.log_size;
        let ahead = end.wrapping_sub(self.posted);
        ahead != 0 && u32::from(ahead) <= size
    }

    /// Whether a WQE that begins at this index is posted and not executed.
    pub fn pending(&self, index: u16) -> bool {
        index.wrapping_sub(self.next) < self.posted.wrapping_sub(self.next)
    }

    /// Takes a WQE that came by BlueFlame, in place of the one in memory.
    pub fn set_data(&mut self, index: u16, data: Vec<u8>) {
        if self.pending(index) {
            self.data = Some((index, data));
        }
    }

    /// Whether there are posted WQEs to execute.
    pub fn waiting(&self) -> bool {
        self.posted != self.next
    }

    /// The first `count` WQEBBs of the next WQE.
    ///
    /// # Errors
    /// If the queue is not in guest memory.
    pub fn fetch(&self, memory: &GuestMemory, count: usize) -> Result<Vec<u8>, String> {
        match &self.data {
            Some((index, data)) if *index == self.next && data.len() >= count * BLOCK => {
                Ok(data[..count * BLOCK].to_vec())
            }
            _ => self.read(memory, self.next, count),
        }
    }

    /// The next WQE, whole.
    ///
    /// # Errors
    /// If the queue is not in guest memory.
    pub fn request(&self, memory: &GuestMemory) -> Result<(Control, Vec<u8>), String> {
        let first = self.fetch(memory, 1)?;
        let control = first.first_chunk::<16>().map(Control::parse).ok_or("a block is short")?;
        let bytes = self.fetch(memory, control.blocks().into())?;
        Ok((control, bytes))
    }

    /// Reads `count` WQEBBs from index `index` on; the queue wraps.
    ///
    /// # Errors
    /// If the queue is not in guest memory.
    pub fn read(&self, memory: &GuestMemory, index: u16, count: usize) -> Result<Vec<u8>, String> {
        let mask = (1u64 << self.log_size) - 1;
        let mut bytes = vec![0; count * BLOCK];
        for (block, to) in (u64::from(index)..).zip(bytes.chunks_exact_mut(BLOCK)) {
            let at = self.offset + (block & mask) * BLOCK as u64;
            self.buffer.read(memory, at, to).map_err(|fault| format!("{fault:?}"))?;
        }
        Ok(bytes)
    }

    /// Drops all posted WQEs.
    pub fn discard(&mut self) {
        self.next = self.posted;
        self.data = None;
    }

    /// Advances past a WQE of `count` WQEBBs.
    pub fn advance(&mut self, count: u16) {
        self.next = self.next.wrapping_add(count);
        let passed = |index: u16| index.wrapping_sub(self.next) >= 0x8000;
        if self.data.as_ref().is_some_and(|(index, _)| passed(*index)) {
            self.data = None;
        }
        // The device has executed a WQE that is longer than the posted WQEBBs.
        if self.posted.wrapping_sub(self.next) >= 0x8000 {
            self.posted = self.next;
        }
    }
}
