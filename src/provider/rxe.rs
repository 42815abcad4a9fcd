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

use super::DriverTraits;
use super::driver_response::DriverResponse;
use crate::error::{Error, Result};
use crate::memory::doorbell_record::DoorbellPages;
use crate::memory::gate::Gate;
use crate::memory::mapping::Mapper;
use crate::memory::rxe_queue::RxeQueue;
use rustix::io::Errno;
use std::sync::Arc;
use uverbs_uapi::rxe::{mminfo, rxe_create_ah_resp};

pub(super) const TRAITS: DriverTraits = DriverTraits {
    // `rxe_odp.c`, up to Linux 7.3 at least, and no kernel tells: it copies to and from the beginning of a page. It
    // takes addresses of requests for addresses of the process when it looks a page up, in a table without bounds.
    on_demand_in_place_only: true,
    asks_allocators: false,
    // The driver first stores where the next send will stand, and then skips the sends that were never carried
    // out: the stored index is behind, and WQEs that were wiped would be sent. The second time there is nothing
    // left to skip.
    resets_needed: 2,
    addresses_by_link: false,
    device_response: DriverResponse::none(),
    pd_response: DriverResponse::none(),
    ah_response: DriverResponse::room_for::<rxe_create_ah_resp>(),
};

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
