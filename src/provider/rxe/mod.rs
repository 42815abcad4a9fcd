//! Soft-RoCE: queues in memory shared with the kernel, which is the device.
//!
//! Pairs with `drivers/infiniband/sw/rxe`. Receives and completions need no system call; sends
//! need one per batch to make the kernel look.

pub(crate) mod ah;
pub(crate) mod cq;
pub(crate) mod poller;
pub(crate) mod retired;
pub(crate) mod rq;
pub(crate) mod sq;

use crate::memory::mapping::Mapper;
use crate::memory::rxe_queue::RxeQueue;
use rustix::io::Errno;
use uverbs_uapi::rxe::mminfo;

/// Maps a queue where the kernel said it lies; `element` is the room that an element must have.
fn map_ring(mi: mminfo, element: usize, mapper: &dyn Mapper) -> Result<RxeQueue, Errno> {
    let length = usize::try_from(mi.size).map_err(|_| Errno::INVAL)?;
    let mapping = mapper.map(mi.offset, length)?;
    RxeQueue::new(mapping, element).ok_or(Errno::PROTO)
}
