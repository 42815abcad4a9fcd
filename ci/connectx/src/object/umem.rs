//! Memory that a user context registers for the queues that it makes itself.
//!
//! Pairs with CREATE_UMEM of mlx5_ib's `devx.c`. A command that makes a queue has a list of pages, or
//! names a place in such memory, for the queue and for its doorbell record each.

use uverbs_uapi::mlx5::prm::object::{
    create_umem_in, create_umem_out, destroy_umem_in, umem as context,
};
use uverbs_uapi::mlx5::prm::srqc::wq;
use uverbs_uapi::mlx5::prm::{Bits, Layout};

use crate::buffer::Buffer;
use crate::cmd::refusal::{Refused, refuse};
use crate::device::Device;

/// Registered memory.
pub struct Umem {
    buffer: Buffer,
}

/// Where a command says that a queue lies.
pub(crate) struct Request<'a> {
    /// Number of the memory and offset in it, in place of a list of pages.
    pub(crate) queue: Option<(u32, u64)>,
    /// Number of the memory in which the address of the record is an offset.
    pub(crate) record: Option<u32>,
    /// Address of the record.
    pub(crate) record_address: u64,
    pub(crate) log_page_size: u64,
    pub(crate) page_offset: u64,
    /// Bytes of the queue.
    pub(crate) len: u64,
    pub(crate) pages: &'a [u8],
}

impl<'a> Request<'a> {
    /// What a work queue's context says of its `len` bytes.
    pub(crate) fn of_work_queue(context: &Bits<wq, &[u8]>, len: u64, pages: &'a [u8]) -> Self {
        Self {
            queue: context
                .is_set(wq::wq_umem_valid)
                .then(|| (context.get32(wq::wq_umem_id), context.get(wq::wq_umem_offset))),
            record: context.is_set(wq::dbr_umem_valid).then(|| context.get32(wq::dbr_umem_id)),
            record_address: context.get(wq::dbr_addr),
            log_page_size: context.get(wq::log_wq_pg_sz),
            page_offset: context.get(wq::page_offset),
            len,
            pages,
        }
    }
}

/// Where a queue lies.
pub(crate) struct QueueMemory {
    pub(crate) buffer: Buffer,
    /// Guest address of its doorbell record.
    pub(crate) record: u64,
    /// What it holds.
    pub(crate) umems: Vec<u32>,
}

impl Device {
    pub(crate) fn create_umem(&mut self, uid: u32, input: &[u8]) -> Result<Vec<u8>, Refused> {
        let input = Bits::<create_umem_in, _>::new(input);
        let umem = input.sub(create_umem_in::umem);
        let pages = umem.get(context::num_of_mtt);
        let log_page_size = umem.get(context::log_page_size);
        let offset = umem.get(context::page_offset);
        let list = input.bytes().get(create_umem_in::SIZE..).unwrap_or_default();
        if pages > 1 << 24 || pages > (list.len() / 8) as u64 || log_page_size > 20 {
            return refuse!(BadParam, "umem of {pages} pages of 2^(12+{log_page_size}) bytes");
        }
        let len = pages << (12 + log_page_size);
        let Some(rest) = len.checked_sub(offset) else {
            return refuse!(BadParam, "umem begins {offset:#x} bytes into {len:#x}");
        };
        let buffer =
            Buffer::new(&self.objects.listed, log_page_size, 0, len, list)?.part(offset, rest)?;
        let number = self.objects.umems.insert_owned(uid, Umem { buffer })?;
        let mut out = Bits::<create_umem_out, _>::new(vec![0; create_umem_out::SIZE]);
        out.set(create_umem_out::umem_id, number.into());
        Ok(out.into_inner())
    }

    pub(crate) fn destroy_umem(&mut self, uid: u32, input: &[u8]) -> Result<Vec<u8>, Refused> {
        let input = Bits::<destroy_umem_in, _>::new(input);
        let number = input.get32(destroy_umem_in::umem_id);
        self.objects.umems.own(uid, number)?;
        self.objects.umems.remove(number)?;
        Ok(vec![])
    }

    /// Finds the memory of a queue, and holds the registered part of it. Whoever does not make the
    /// queue after all gives it back by [`Device::release_umems`].
    pub(crate) fn queue_memory(
        &mut self,
        uid: u32,
        request: &Request<'_>,
    ) -> Result<QueueMemory, Refused> {
        let mut umems = vec![];
        let buffer = match request.queue {
            Some((number, offset)) => {
                self.objects.umems.allow(uid, number)?;
                umems.push(number);
                self.objects.umems.get(number)?.buffer.part(offset, request.len)?
            }
            None => {
                let Request { log_page_size, page_offset, len, pages, .. } = *request;
                Buffer::new(&self.objects.listed, log_page_size, page_offset, len, pages)?
            }
        };
        let record = match request.record {
            Some(number) => {
                self.objects.umems.allow(uid, number)?;
                umems.push(number);
                self.objects.umems.get(number)?.buffer.address(request.record_address, 8)?
            }
            None => request.record_address,
        };
        if record % 8 != 0 {
            return refuse!(BadParam, "doorbell record at {record:#x}");
        }
        for number in &umems {
            self.objects.umems.hold(*number)?;
        }
        Ok(QueueMemory { buffer, record, umems })
    }

    /// Lets go of the memory of a queue.
    pub(crate) fn release_umems(&mut self, umems: &[u32]) {
        for number in umems {
            self.objects.umems.release(*number);
        }
    }
}
