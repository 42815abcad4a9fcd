//! Soft-RoCE: queues in memory shared with the kernel, which is the device.
//!
//! Pairs with `drivers/infiniband/sw/rxe`. Receives and completions need no system call; sends
//! need one per batch to make the kernel look. [`qp`] creates queue pairs; [`sq`], [`rq`] and [`cq`] are
//! their queues.

pub(crate) mod ah;
pub(crate) mod cq;
pub(crate) mod qp;
pub(crate) mod retired;
pub(crate) mod rq;
pub(crate) mod sq;

use crate::error::{Error, Result};
use crate::memory::doorbell_record::DoorbellPages;
use crate::memory::gate::Gate;
use crate::memory::mapping::Mapper;
use crate::memory::rxe_queue::RxeQueue;
use rustix::io::Errno;
use std::sync::Arc;
use uverbs_uapi::rxe::mminfo;

/// What all queues of one context have in common.
#[derive(Debug)]
pub(crate) struct Rxe {
    /// Where their gates are.
    gates: Arc<DoorbellPages>,
}

impl Rxe {
    pub(crate) fn new() -> Result<Rxe> {
        let gates = DoorbellPages::new().map_err(|errno| Error::new("open_device", errno))?;
        Ok(Rxe { gates })
    }

    fn gate(&self, verb: &'static str) -> Result<Gate> {
        Gate::alone(&self.gates).map_err(|errno| Error::new(verb, errno))
    }
}

/// Maps a queue where the kernel said it lies; `element` is the room that an element must have.
fn map_ring(
    mi: mminfo,
    element: usize,
    mapper: &dyn Mapper,
) -> std::result::Result<RxeQueue, Errno> {
    let length = usize::try_from(mi.size).map_err(|_| Errno::INVAL)?;
    let mapping = mapper.map(mi.offset, length)?;
    RxeQueue::new(mapping, element).ok_or(Errno::PROTO)
}

/// A queue that the kernel made and this process cannot map.
fn unmapped(verb: &'static str, errno: Errno) -> Error {
    Error::new(verb, errno).detail("the queue could not be mapped")
}
