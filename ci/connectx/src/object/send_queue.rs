//! Send rings: where work requests lie, and which of them are new.
//!
//! Pairs with the send doorbell record, and with the doorbell register that says to look at it.

use super::buffer::Buffer;
use crate::format::wqe::Control;
use crate::guest::GuestMemory;

/// Bytes of a basic block, the unit in which a ring counts.
pub const BLOCK: usize = 64;

/// A send ring.
pub struct SendRing {
    buffer: Buffer,
    offset: u64,
    log_size: u32,
    record: u64,
    /// Block to be read next.
    next: u16,
    /// Block after the last posted request.
    posted: u16,
    /// A request that came with its doorbell, and where it belongs.
    data: Option<(u16, Vec<u8>)>,
}

impl SendRing {
    /// 2^`log_size` blocks from `offset` of `buffer`, with a doorbell record.
    pub fn new(buffer: Buffer, offset: u64, log_size: u32, record: u64) -> Self {
        Self { buffer, offset, log_size, record, next: 0, posted: 0, data: None }
    }

    /// As when made.
    pub fn reset(&mut self) {
        self.next = 0;
        self.posted = 0;
        self.data = None;
    }

    /// The block to be read next.
    pub fn next(&self) -> u16 {
        self.next
    }

    /// The block after the last posted request.
    pub fn posted(&self) -> u16 {
        self.posted
    }

    /// Whether the next request is the one that came with its doorbell.
    pub fn has_data(&self) -> bool {
        self.data.as_ref().is_some_and(|(index, _)| *index == self.next)
    }

    /// Looks at the doorbell record.
    ///
    /// # Errors
    /// If it cannot be read, or claims more than the ring holds.
    pub fn refresh(&mut self, memory: &GuestMemory) -> Result<(), String> {
        let record = memory.read_be32(self.record).map_err(|fault| format!("{fault:?}"))? as u16;
        let waiting = record.wrapping_sub(self.next);
        if u32::from(waiting) > 1 << self.log_size {
            return Err(format!("doorbell record {record:#x} with {:#x} blocks done", self.next));
        }
        self.posted = record;
        Ok(())
    }

    /// Whether a request that ends here is not posted yet, as far as the record says.
    pub fn behind(&self, end: u16) -> bool {
        let size = 1u32 << self.log_size;
        let ahead = end.wrapping_sub(self.posted);
        ahead != 0 && u32::from(ahead) <= size
    }

    /// Whether a request that begins here is posted and not done.
    pub fn pending(&self, index: u16) -> bool {
        index.wrapping_sub(self.next) < self.posted.wrapping_sub(self.next)
    }

    /// Takes a request that came with its doorbell; it replaces what the ring holds.
    pub fn set_data(&mut self, index: u16, data: Vec<u8>) {
        if self.pending(index) {
            self.data = Some((index, data));
        }
    }

    /// Whether there is something to do.
    pub fn waiting(&self) -> bool {
        self.posted != self.next
    }

    /// The first `count` blocks of the next request.
    ///
    /// # Errors
    /// If the ring is not in guest memory.
    pub fn fetch(&self, memory: &GuestMemory, count: usize) -> Result<Vec<u8>, String> {
        match &self.data {
            Some((index, data)) if *index == self.next && data.len() >= count * BLOCK => {
                Ok(data[..count * BLOCK].to_vec())
            }
            _ => self.read(memory, self.next, count),
        }
    }

    /// The next request, whole.
    ///
    /// # Errors
    /// If the ring is not in guest memory.
    pub fn request(&self, memory: &GuestMemory) -> Result<(Control, Vec<u8>), String> {
        let first = self.fetch(memory, 1)?;
        let control = first.first_chunk::<16>().map(Control::parse).ok_or("a block is short")?;
        let bytes = self.fetch(memory, control.blocks().into())?;
        Ok((control, bytes))
    }

    /// Reads `count` blocks from block `index`; the ring wraps.
    ///
    /// # Errors
    /// If the ring is not in guest memory.
    pub fn read(&self, memory: &GuestMemory, index: u16, count: usize) -> Result<Vec<u8>, String> {
        let mask = (1u64 << self.log_size) - 1;
        let mut bytes = vec![0; count * BLOCK];
        for (block, to) in (u64::from(index)..).zip(bytes.chunks_exact_mut(BLOCK)) {
            let at = self.offset + (block & mask) * BLOCK as u64;
            self.buffer.read(memory, at, to).map_err(|fault| format!("{fault:?}"))?;
        }
        Ok(bytes)
    }

    /// Drops everything that is posted.
    pub fn discard(&mut self) {
        self.next = self.posted;
        self.data = None;
    }

    /// Goes on to the request after one of `count` blocks.
    pub fn advance(&mut self, count: u16) {
        self.next = self.next.wrapping_add(count);
        let passed = |index: u16| index.wrapping_sub(self.next) >= 0x8000;
        if self.data.as_ref().is_some_and(|(index, _)| passed(*index)) {
            self.data = None;
        }
        // A request longer than what was posted has been carried out anyway.
        if self.posted.wrapping_sub(self.next) >= 0x8000 {
            self.posted = self.next;
        }
    }
}
