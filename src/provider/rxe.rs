//! Soft-RoCE: queues in memory shared with the kernel, which is the device.
//!
//! Pairs with `drivers/infiniband/sw/rxe`. Receives and completions need no system call; a batch of sends needs one,
//! by which the kernel reads the queue. [`Rxe`] is the provider. [`qp`] creates queue pairs; [`sq`], [`rq`] and [`cq`]
//! are their queues.

pub(crate) mod ah;
pub(crate) mod cq;
pub(crate) mod qp;
pub(crate) mod retired;
pub(crate) mod rq;
pub(crate) mod sq;

use super::driver_response::DriverResponse;
use super::{
    CqInitAttr, CreatedCq, CreatedQp, CreatedSrq, DriverTraits, Execute, LinkProtocol, Provider,
    QpInitAttr, SrqInitAttr,
};
use crate::error::{Error, Result};
use crate::memory::allocator::Source;
use crate::memory::doorbell_record::DoorbellPages;
use crate::memory::gate::Gate;
use crate::memory::mapping::Mapper;
use crate::memory::rxe_queue::RxeQueue;
use crate::uverbs::kernel::Kernel;
use crate::wr::Address;
use rustix::io::Errno;
use std::sync::Arc;
use uverbs_uapi::ah::ib_uverbs_ah_attr;
use uverbs_uapi::device::rdma_driver_id;
use uverbs_uapi::rxe::{mminfo, rxe_create_ah_resp, rxe_modify_srq_cmd, rxe_sge};

const TRAITS: DriverTraits = DriverTraits {
    // `rxe_odp.c`, up to Linux 7.3 at least, copies to and from the beginning of a page. It looks pages up by the
    // addresses in requests as if they were addresses of the process, in a table without bounds checks. No kernel
    // reports whether it does so.
    on_demand_in_place_only: true,
    asks_allocators: false,
    // The driver first stores the index of the next send, and then skips the sends that were never carried out. The
    // stored index is then behind, and the driver would send wiped WQEs. On the second reset no sends are left to skip.
    resets_needed: 2,
    addresses_by_link: false,
    // rxe of Linux 5.10 creates such queue pairs, but they neither send nor receive.
    raw_packets: false,
    device_memory: false,
    kernel_numbers_members: true,
    // rxe requires this input; with the address 0 it writes no response to it.
    srq_limit_request: &[0; size_of::<rxe_modify_srq_cmd>()],
    device_response: DriverResponse::none(),
    pd_response: DriverResponse::none(),
    ah_response: DriverResponse::room_for::<rxe_create_ah_resp>(),
};

/// The opening of a context, which needs no input for the driver.
#[derive(Debug)]
pub(super) struct Opening;

impl super::Opening for Opening {
    fn driver(&self) -> u32 {
        rdma_driver_id::RDMA_DRIVER_RXE.0
    }

    fn finish(self: Box<Self>, _: &dyn Kernel) -> Result<Arc<dyn Provider>> {
        Ok(Arc::new(Rxe::new()?))
    }
}

/// The state that all queues of one context share.
#[derive(Debug)]
pub(crate) struct Rxe {
    /// The pages of the queues' gates.
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

impl Provider for Rxe {
    fn traits(&self) -> &'static DriverTraits {
        &TRAITS
    }

    fn reimport(&self, _: &dyn Kernel) -> Result<Arc<dyn Provider>> {
        Ok(Arc::new(Rxe::new()?))
    }

    fn max_inline_data(&self, max_sge: u32) -> Option<u32> {
        // `RXE_MAX_INLINE_DATA`: a WQE has room for as many SGEs.
        Some(max_sge.saturating_mul(size_of::<rxe_sge>() as u32))
    }

    fn refuses_dmabufs(&self, _: bool, _: bool) -> Option<&'static str> {
        Some("its driver has no regions of dma-bufs")
    }

    fn address(
        &self,
        verb: &'static str,
        _: &ib_uverbs_ah_attr,
        _: LinkProtocol,
        response: &DriverResponse,
    ) -> Result<Address> {
        ah::address(verb, response)
    }

    fn create_cq(
        &self,
        attr: CqInitAttr,
        source: Source<'_>,
        kernel: &dyn Kernel,
        execute: Execute<'_>,
    ) -> Result<CreatedCq> {
        cq::create(self, attr, source.verb, kernel.mapper(), execute)
    }

    fn create_qp(
        &self,
        attr: QpInitAttr<'_>,
        source: Source<'_>,
        kernel: &dyn Kernel,
        execute: Execute<'_>,
    ) -> Result<CreatedQp> {
        qp::create(self, attr, source.verb, kernel.mapper(), execute)
    }

    fn create_srq(
        &self,
        attr: SrqInitAttr,
        source: Source<'_>,
        kernel: &dyn Kernel,
        execute: Execute<'_>,
    ) -> Result<CreatedSrq> {
        rq::create_srq(self, attr, source.verb, kernel.mapper(), execute)
    }
}

/// Maps a queue at the offset that the kernel returned; `element` is the least size of an element.
fn map_ring(
    mi: mminfo,
    element: usize,
    mapper: &dyn Mapper,
) -> std::result::Result<RxeQueue, Errno> {
    let length = usize::try_from(mi.size).map_err(|_| Errno::INVAL)?;
    let mapping = mapper.map(mi.offset, length)?;
    RxeQueue::new(mapping, element).ok_or(Errno::PROTO)
}

/// The error for a queue that the kernel made and this process cannot map.
fn unmapped(verb: &'static str, errno: Errno) -> Error {
    Error::new(verb, errno).detail("the queue could not be mapped")
}
