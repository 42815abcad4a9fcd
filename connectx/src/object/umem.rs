//! Memory that a user context registers for queues (umems), and the location of a queue's memory:
//! in umems, or in pages that the command lists.

use uverbs_uapi::mlx5::prm::Bits;
use uverbs_uapi::mlx5::prm::srqc::wq;

use super::Objects;
use super::buffer::Buffer;
use super::receive_queue::{ReceiveQueue, WqType};
use crate::command_error::{CommandError, refuse};

/// `wq_type` values.
const WQ_LINKED: u64 = 0;
const WQ_CYCLIC: u64 = 1;

/// A umem.
pub struct Umem {
    pub(crate) buffer: Buffer,
    /// Whether all its pages may be written: bit 1 of each MTT entry.
    pub(crate) is_writable: bool,
}

impl Umem {
    /// Refuses a use that writes, if a page may not be written.
    pub(crate) fn check_writable(&self, number: u32, user: &str) -> Result<(), CommandError> {
        match self.is_writable {
            true => Ok(()),
            false => {
                refuse!(BadParam, "{user} in umem {number:#x}, which the device may not write")
            }
        }
    }
}

/// The location of a queue's memory, as a command names it.
pub(crate) struct QueueLocation<'a> {
    /// Number of the umem of the queue and offset in it; `None` if the command lists pages.
    pub(crate) queue: Option<(u32, u64)>,
    /// Number of the umem of the doorbell record; its address is then an offset.
    pub(crate) doorbell_record_umem: Option<u32>,
    /// Address of the doorbell record.
    pub(crate) doorbell_record_address: u64,
    /// Whether the device writes the queue, as it does CQEs.
    pub(crate) is_written: bool,
    pub(crate) log_page_size: u64,
    pub(crate) page_offset: u64,
    /// Bytes of the queue.
    pub(crate) len: u64,
    pub(crate) pages: &'a [u8],
}

impl<'a> QueueLocation<'a> {
    /// The location of a work queue of `len` bytes, by its context.
    pub(crate) fn from_wq(context: &Bits<wq, &[u8]>, len: u64, pages: &'a [u8]) -> Self {
        Self {
            queue: context
                .is_set(wq::wq_umem_valid)
                .then(|| (context.get32(wq::wq_umem_id), context.get(wq::wq_umem_offset))),
            doorbell_record_umem: context
                .is_set(wq::dbr_umem_valid)
                .then(|| context.get32(wq::dbr_umem_id)),
            doorbell_record_address: context.get(wq::dbr_addr),
            is_written: false,
            log_page_size: context.get(wq::log_wq_pg_sz),
            page_offset: context.get(wq::page_offset),
            len,
            pages,
        }
    }
}

/// The memory of a queue.
pub(crate) struct QueueMemory {
    pub(crate) buffer: Buffer,
    /// Guest address of its doorbell record.
    pub(crate) doorbell_record: u64,
    /// Umems that it holds.
    pub(crate) umems: Vec<u32>,
}

impl Objects {
    /// Finds the memory of a queue and holds its umems. A caller that does not create the queue
    /// after all releases them with [`Objects::release_umems`].
    pub(crate) fn queue_memory(
        &mut self,
        uid: u32,
        location: &QueueLocation<'_>,
    ) -> Result<QueueMemory, CommandError> {
        let mut umems = vec![];
        let buffer = match location.queue {
            Some((number, offset)) => {
                self.umems.check_use(uid, number)?;
                umems.push(number);
                let umem = self.umems.get(number)?;
                if location.is_written {
                    umem.check_writable(number, "a queue that the device writes")?;
                }
                umem.buffer.part(offset, location.len)?
            }
            None => {
                let QueueLocation { log_page_size, page_offset, len, pages, .. } = *location;
                Buffer::new(&self.listed_pages, log_page_size, page_offset, len, pages)?
            }
        };
        let doorbell_record = match location.doorbell_record_umem {
            Some(number) => {
                self.umems.check_use(uid, number)?;
                umems.push(number);
                let umem = self.umems.get(number)?;
                // The device reads it.
                umem.buffer.address(location.doorbell_record_address, 8)?
            }
            None => location.doorbell_record_address,
        };
        if doorbell_record % 8 != 0 {
            return refuse!(
                BadParam,
                "doorbell record at {doorbell_record:#x} is not aligned to 8 bytes"
            );
        }
        for number in &umems {
            self.umems.hold(*number)?;
        }
        Ok(QueueMemory { buffer, doorbell_record, umems })
    }

    /// Releases the umems of a queue.
    pub(crate) fn release_umems(&mut self, umems: &[u32]) {
        for number in umems {
            self.umems.release(*number);
        }
    }

    /// Creates a receive queue from a work queue context. Also returns the umems that it holds.
    pub(crate) fn new_receive_queue(
        &mut self,
        uid: u32,
        context: &Bits<wq, &[u8]>,
        pages: &[u8],
    ) -> Result<(ReceiveQueue, Vec<u32>), CommandError> {
        let log_size = context.get32(wq::log_wq_sz);
        let log_stride = context.get32(wq::log_wq_stride);
        if log_size > 15 || !(4..=10).contains(&log_stride) {
            return refuse!(
                BadParam,
                "log_wq_sz {log_size} above 15, or log_wq_stride {log_stride} not in 4..=10"
            );
        }
        let wq_type = match context.get(wq::wq_type) {
            WQ_LINKED => WqType::Linked,
            WQ_CYCLIC => WqType::Cyclic,
            other => return refuse!(BadParam, "wq_type {other} is not modelled"),
        };
        let location = QueueLocation::from_wq(context, 1 << (log_size + log_stride), pages);
        let QueueMemory { buffer, doorbell_record, umems } = self.queue_memory(uid, &location)?;
        Ok((ReceiveQueue::new(buffer, log_size, log_stride, wq_type, doorbell_record), umems))
    }
}
