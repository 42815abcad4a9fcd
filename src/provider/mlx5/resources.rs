//! The resources of a queue that the device may use until the queue is destroyed.

use super::uar::RegisterLease;
use crate::error::Error;
use crate::memory::doorbell_record::DoorbellRecord;
use crate::memory::queue_memory::QueueMemory;
use crate::sync::lock::Lock;
use rustix::io::Errno;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use uverbs_uapi::buffer::{ib_uverbs_buffer_desc, ib_uverbs_buffer_type};

/// The descriptor by which a command names a buffer that is part of a dma-buf; `None` if it names an address.
pub(super) fn dmabuf(memory: &QueueMemory) -> Option<ib_uverbs_buffer_desc> {
    let part = memory.dmabuf()?;
    Some(ib_uverbs_buffer_desc {
        r#type: ib_uverbs_buffer_type::IB_UVERBS_BUFFER_TYPE_DMABUF.0,
        fd: part.file.as_raw_fd(),
        flags: 0,
        optional_flags: 0,
        addr: part.offset,
        length: memory.len() as u64,
    })
}

/// Adds to a refusal that older kernels take no dma-bufs, if the command had any.
pub(super) fn explain_dmabuf(error: Error, has_dmabuf: bool) -> Error {
    if has_dmabuf && error.errno() == Errno::OPNOTSUPP {
        return error.detail("the kernel takes no dma-bufs for queues; Linux 7.2 does");
    }
    error
}

/// The resources of a queue, kept until the kernel confirmed that the queue is destroyed. The doorbell record is
/// dropped first, here, after failed creations and in rings: allocators see records freed before buffers, as
/// with libmlx5.
#[derive(Debug)]
pub(crate) struct Mlx5Resources {
    _record: Arc<DoorbellRecord>,
    /// Exchanged when a completion queue is resized.
    memory: Lock<Option<Arc<QueueMemory>>>,
    /// Further memory that the device may use, after resizes whose outcome is unknown.
    doubtful: Lock<Vec<Arc<QueueMemory>>>,
    /// The sends of a raw packet queue pair.
    _sends: Option<Arc<QueueMemory>>,
    _register: Option<RegisterLease>,
}

impl Mlx5Resources {
    pub(super) fn new(
        record: &Arc<DoorbellRecord>,
        memory: Option<Arc<QueueMemory>>,
    ) -> Mlx5Resources {
        Mlx5Resources {
            _record: record.clone(),
            memory: Lock::new(memory),
            doubtful: Lock::default(),
            _sends: None,
            _register: None,
        }
    }

    /// Adds the resources that only a queue pair has.
    pub(super) fn with(
        self,
        sends: &Option<Arc<QueueMemory>>,
        register: Option<RegisterLease>,
    ) -> Mlx5Resources {
        Mlx5Resources { _sends: sends.clone(), _register: register, ..self }
    }

    /// Replaces the memory after the kernel moved the queue; returns the old memory.
    pub(crate) fn exchange(&self, memory: Arc<QueueMemory>) -> Option<Arc<QueueMemory>> {
        self.memory.lock()?.replace(memory)
    }

    /// Also keeps the memory of a resize whose outcome is unknown.
    pub(super) fn keep(&self, memory: Arc<QueueMemory>) {
        match self.doubtful.lock() {
            Some(mut doubtful) => doubtful.push(memory),
            None => std::mem::forget(memory),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_refused_dma_buf_is_said_to_need_a_newer_kernel() {
        for (dmabufs, errno) in
            [(true, Errno::OPNOTSUPP), (false, Errno::OPNOTSUPP), (true, Errno::INVAL)]
        {
            let error = explain_dmabuf(Error::new("create_qp", errno), dmabufs);
            let named = error.message().contains("dma-bufs");
            assert_eq!(named, dmabufs && errno == Errno::OPNOTSUPP, "{error}");
        }
    }
}
