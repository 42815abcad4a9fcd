//! Send queues: their buffer, and how far its WQEs are posted, rung, fetched and completed.
//!
//! Pairs with the send doorbell record, and with the doorbell register: a write to it makes the device read the record,
//! and names the last WQE that the device may execute.
//!
//! ```text
//!      completed                fetched                 rung               produced
//! ─────────┼───────────────────────┼──────────────────────┼────────────────────┼────────
//!  done    │ in flight             │ may be fetched       │ doorbell to come   │ free
//! ```

use super::buffer::Buffer;
use crate::format::wqe::CtrlSegment;
use crate::guest::GuestMemory;
use std::collections::BTreeMap;

/// Bytes of a WQE basic block (WQEBB).
pub const WQEBB: usize = 64;
/// The most BlueFlame copies that a queue keeps: a guest could fill all its queues with them. WQEs whose copies
/// are not kept are executed from memory.
const MAX_COPIES: usize = 16;

/// A send queue.
pub struct SendQueue {
    buffer: Buffer,
    offset: u64,
    log_size: u32,
    doorbell_record: u64,
    /// WQEBB behind the last completed WQE.
    consumer_index: u16,
    /// WQEBB that the device fetches next. The WQEs in front of it that are not complete are in flight.
    fetched_index: u16,
    /// WQEBB behind the last posted WQE.
    producer_index: u16,
    /// WQEBB behind the newest WQE whose doorbell has come. The doorbell record may be ahead of it: then more
    /// doorbells are on their way, and the WQEs may come by BlueFlame.
    rung_index: u16,
    /// The WQEs that came by BlueFlame and are not fetched yet, by index.
    blue_flame: BTreeMap<u16, Vec<u8>>,
}

impl SendQueue {
    /// A queue of 2^`log_size` WQEBBs at `offset` of `buffer`, with its doorbell record.
    pub fn new(buffer: Buffer, offset: u64, log_size: u32, doorbell_record: u64) -> Self {
        Self {
            buffer,
            offset,
            log_size,
            doorbell_record,
            consumer_index: 0,
            fetched_index: 0,
            producer_index: 0,
            rung_index: 0,
            blue_flame: BTreeMap::new(),
        }
    }

    /// Restores the state after creation.
    pub fn reset(&mut self) {
        self.consumer_index = 0;
        self.fetched_index = 0;
        self.producer_index = 0;
        self.rung_index = 0;
        self.blue_flame.clear();
    }

    /// Its size in WQEBBs.
    pub(crate) fn wqebbs(&self) -> usize {
        1 << self.log_size
    }

    /// The WQEBB behind the last completed WQE.
    pub fn consumer_index(&self) -> u16 {
        self.consumer_index
    }

    /// The WQEBB that the device fetches next.
    pub(crate) fn fetched_index(&self) -> u16 {
        self.fetched_index
    }

    /// The WQEBB behind the last posted WQE.
    pub fn producer_index(&self) -> u16 {
        self.producer_index
    }

    /// The WQEBB behind the last WQE whose doorbell has come.
    pub(crate) fn rung_index(&self) -> u16 {
        self.rung_index
    }

    /// Whether the next WQE came by BlueFlame.
    pub fn has_blue_flame_wqe(&self) -> bool {
        self.blue_flame.contains_key(&self.fetched_index)
    }

    /// Reads the producer index from the doorbell record.
    ///
    /// # Errors
    /// If the record cannot be read, or is further ahead than the size of the queue.
    pub fn read_doorbell_record(&mut self, memory: &GuestMemory) -> Result<(), String> {
        let record =
            memory.read_be32(self.doorbell_record).map_err(|fault| format!("{fault:?}"))? as u16;
        let waiting = record.wrapping_sub(self.consumer_index);
        if u32::from(waiting) > 1 << self.log_size {
            return Err(format!(
                "doorbell record {record:#x} is a queue or more ahead of WQEBB {:#x}",
                self.consumer_index
            ));
        }
        self.producer_index = record;
        Ok(())
    }

    /// Whether a WQE that ends at this index is not posted yet, according to the doorbell record.
    pub fn record_lags(&self, end: u16) -> bool {
        let size = 1u32 << self.log_size;
        let ahead = end.wrapping_sub(self.producer_index);
        ahead != 0 && u32::from(ahead) <= size
    }

    /// Whether a WQE that begins at this index is posted and not fetched.
    pub fn is_pending(&self, index: u16) -> bool {
        index.wrapping_sub(self.fetched_index)
            < self.producer_index.wrapping_sub(self.fetched_index)
    }

    /// Takes the doorbell of a WQE that ends at this index: it and all before it may be executed.
    ///
    /// The doorbell of a WQE that is not in the queue rings all posted ones. rdma-core and the kernel's driver ring
    /// such a doorbell after a list with a request that they refused: they ring with the old bytes in the slot of that
    /// request.
    pub fn ring(&mut self, end: u16) {
        let ahead = |index: u16| u32::from(index.wrapping_sub(self.consumer_index));
        let in_queue = (1..=1 << self.log_size).contains(&ahead(end));
        let end = if in_queue { end } else { self.producer_index };
        if ahead(self.rung_index) < ahead(end) {
            self.rung_index = end;
        }
    }

    /// Takes a WQE that came by BlueFlame, in place of the one in memory.
    pub fn add_blue_flame_wqe(&mut self, index: u16, data: Vec<u8>) {
        if self.is_pending(index) && self.blue_flame.len() < MAX_COPIES {
            self.blue_flame.insert(index, data);
        }
    }

    /// Whether a doorbell has come of a WQE that is not fetched.
    pub(crate) fn has_rung(&self) -> bool {
        self.rung_index != self.fetched_index
    }

    /// Whether there are WQEs to fetch: posted ones whose doorbell has come.
    pub fn has_pending(&self) -> bool {
        self.producer_index != self.fetched_index && self.has_rung()
    }

    /// Reads the next WQE, whole, in place of the content of `to`.
    ///
    /// # Errors
    /// If the queue is not in guest memory.
    pub fn read_next_wqe(
        &self,
        memory: &GuestMemory,
        to: &mut Vec<u8>,
    ) -> Result<CtrlSegment, String> {
        to.clear();
        let index = self.fetched_index;
        let copy = self.blue_flame.get(&index).map_or(&[][..], |copy| &copy[..]);
        match copy.first_chunk::<WQEBB>() {
            Some(first) => to.extend(first),
            None => to.extend(self.read_wqebb(memory, index)?),
        }
        let control = to.first_chunk::<16>().map(CtrlSegment::parse).ok_or("a WQEBB is short")?;
        let wqebbs = control.wqebbs();
        if let Some(copy) = copy.get(..usize::from(wqebbs) * WQEBB) {
            to.clear();
            to.extend(copy);
            return Ok(control);
        }
        // A copy that is shorter than the WQE does not count.
        let first = u16::from(copy.is_empty());
        to.truncate(usize::from(first) * WQEBB);
        for wqebb in first..wqebbs {
            to.extend(self.read_wqebb(memory, index.wrapping_add(wqebb))?);
        }
        Ok(control)
    }

    /// Reads the WQE in memory that begins at WQEBB `index`, at most `most` WQEBBs of it; returns how many it has.
    ///
    /// # Errors
    /// If the queue is not in guest memory.
    pub(crate) fn read_wqe_at(
        &self,
        memory: &GuestMemory,
        index: u16,
        most: u16,
    ) -> Result<(CtrlSegment, u16, Vec<u8>), String> {
        let first = self.read_wqebb(memory, index)?;
        let control =
            first.first_chunk::<16>().map(CtrlSegment::parse).ok_or("a WQEBB is short")?;
        let count = control.wqebbs().min(most);
        let mut bytes = first.to_vec();
        for wqebb in 1..count {
            bytes.extend(self.read_wqebb(memory, index.wrapping_add(wqebb))?);
        }
        Ok((control, count, bytes))
    }

    /// Whether the WQEBBs from `index` on begin with the bytes of `copy`.
    ///
    /// # Errors
    /// If the queue is not in guest memory.
    pub fn holds(&self, memory: &GuestMemory, index: u16, copy: &[u8]) -> Result<bool, String> {
        for (wqebb, part) in (0..).zip(copy.chunks(WQEBB)) {
            let stored = self.read_wqebb(memory, index.wrapping_add(wqebb))?;
            if stored[..part.len()] != *part {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Reads a WQEBB; the queue wraps.
    fn read_wqebb(&self, memory: &GuestMemory, index: u16) -> Result<[u8; WQEBB], String> {
        let mask = (1u64 << self.log_size) - 1;
        let at = self.offset + (u64::from(index) & mask) * WQEBB as u64;
        let mut bytes = [0; WQEBB];
        self.buffer.read(memory, at, &mut bytes).map_err(|fault| format!("{fault:?}"))?;
        Ok(bytes)
    }

    /// Drops all posted WQEs.
    pub fn discard_pending(&mut self) {
        self.consumer_index = self.producer_index;
        self.fetched_index = self.producer_index;
        self.rung_index = self.producer_index;
        self.blue_flame.clear();
    }

    /// Fetches a WQE of `count` WQEBBs: it is in flight until it is completed.
    pub(crate) fn fetch(&mut self, count: u16) {
        for _ in 0..count {
            self.blue_flame.remove(&self.fetched_index);
            self.fetched_index = self.fetched_index.wrapping_add(1);
        }
        let passed = |index: u16| index.wrapping_sub(self.fetched_index) >= 0x8000;
        // The device has fetched a WQE that is longer than the posted WQEBBs.
        if passed(self.producer_index) {
            self.producer_index = self.fetched_index;
        }
        if passed(self.rung_index) {
            self.rung_index = self.fetched_index;
        }
    }

    /// Advances past a WQE of `count` WQEBBs that is never in flight.
    pub fn advance(&mut self, count: u16) {
        self.fetch(count);
        self.complete(count);
    }

    /// Completes the oldest WQE in flight, which has `count` WQEBBs.
    pub(crate) fn complete(&mut self, count: u16) {
        self.consumer_index = self.consumer_index.wrapping_add(count);
    }
}
