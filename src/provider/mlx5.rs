//! ConnectX and BlueField: the queues are in memory of this process, and the device is rung through
//! registers that are mapped into it.
//!
//! Pairs with `hw/mlx5` of the kernel. [`Mlx5`] is the provider. [`context`] opens, [`qp`] creates queue pairs, [`uar`]
//! has the doorbell registers. [`sq`] writes sends in the segments of [`wqe`] and rings; [`rq`] and [`srq`] take
//! receives. [`cq`] creates completion queues and polls them, [`cqe`] reads completions, [`qp_table`]
//! finds the queue pair of one and [`wr_ids`] its work request.

pub(crate) mod ah;
pub(crate) mod context;
pub(crate) mod cq;
pub(crate) mod cqe;
pub(crate) mod dm;
#[cfg(test)]
pub(crate) mod fake_device;
pub(crate) mod mmap_offset;
pub(crate) mod pd;
pub(crate) mod qp;
pub(crate) mod qp_table;
pub(crate) mod resources;
pub(crate) mod rq;
pub(crate) mod sq;
pub(crate) mod srq;
pub(crate) mod srq_wr_ids;
#[cfg(all(test, not(loom)))]
mod tests;
pub(crate) mod uar;
pub(crate) mod uidx;
pub(crate) mod umr;
pub(crate) mod wqe;
pub(crate) mod wr_ids;

use super::driver_response::DriverResponse;
use super::{
    CqInitAttr, CreatedCq, CreatedQp, CreatedSrq, CreatedTarget, DriverTraits, Execute,
    ExecuteModify, LinkProtocol, Provider, QpChange, QpInitAttr, RdAtomic, RegisterLease,
    SrqInitAttr,
};
use crate::error::{Error, Result};
use crate::memory::allocator::{ResourceType, Source};
use crate::memory::barrier;
use crate::memory::doorbell_record::{DoorbellPages, DoorbellRecord, RECORD};
use crate::memory::gate::Gate;
use crate::uverbs::kernel::Kernel;
use crate::wr::Address;
use context::Limits;
use rustix::io::Errno;
use std::sync::Arc;
use uar::Registers;
use uidx::{Uidx, UidxAllocator};
use uverbs_uapi::ah::ib_uverbs_ah_attr;
use uverbs_uapi::mlx5::abi::{mlx5_ib_alloc_pd_resp, mlx5_ib_create_ah_resp};
use uverbs_uapi::mlx5::context::mlx5_ib_query_device_resp;

const VERB: &str = "open_device";

const TRAITS: DriverTraits = DriverTraits {
    on_demand_in_place_only: false,
    asks_allocators: true,
    resets_needed: 1,
    addresses_by_link: true,
    raw_packets: true,
    device_memory: true,
    kernel_numbers_members: false,
    srq_limit_request: &[],
    device_response: DriverResponse::room_for::<mlx5_ib_query_device_resp>(),
    pd_response: DriverResponse::room_for::<mlx5_ib_alloc_pd_resp>(),
    ah_response: DriverResponse::room_for::<mlx5_ib_create_ah_resp>(),
};

/// The state that all objects of one context share.
#[derive(Debug)]
pub(crate) struct Mlx5 {
    limits: Limits,
    registers: Arc<Registers>,
    records: Arc<DoorbellPages>,
    indices: Arc<UidxAllocator>,
}

impl Mlx5 {
    pub(crate) fn new(limits: Limits, kernel: &dyn Kernel) -> Result<Mlx5> {
        if !barrier::KNOWN {
            return Err(Error::new(VERB, Errno::OPNOTSUPP).detail(format!(
                "mlx5 is driven on x86_64 and aarch64: how other processors, as this {}, order memory towards \
                 devices is not known here",
                std::env::consts::ARCH
            )));
        }
        let records = DoorbellPages::new().map_err(|errno| Error::new(VERB, errno))?;
        let Limits { bf_reg_size, uars_per_page, .. } = limits;
        // Allocated last: if a later step failed, nobody would free the page.
        let registers = Registers::new(kernel, bf_reg_size, uars_per_page);
        let registers = registers.map_err(|errno| {
            Error::from_kernel(VERB, errno)
                .context(|| "the driver gives no page of doorbell registers".into())
        })?;
        Ok(Mlx5 { limits, registers: Arc::new(registers), records, indices: UidxAllocator::new() })
    }

    pub(crate) fn limits(&self) -> &Limits {
        &self.limits
    }

    /// A doorbell record, from the allocator if it provides one.
    fn doorbell_record(&self, source: &Source<'_>) -> Result<Arc<DoorbellRecord>> {
        let fail = |errno| Error::new(source.verb, errno);
        let record = match source.custom(RECORD, RECORD, ResourceType::MLX5_DBR)? {
            Some(memory) => DoorbellRecord::custom(memory).ok_or_else(|| fail(Errno::INVAL))?,
            None => self.records.alloc().map_err(fail)?,
        };
        Ok(Arc::new(record))
    }

    /// A gate beside the doorbell record or, if an allocator provided the record, in a cache line of the context's own.
    fn gate(&self, record: &Arc<DoorbellRecord>, verb: &'static str) -> Result<Gate> {
        match Gate::beside(record) {
            Some(gate) => Ok(gate),
            None => Gate::alone(&self.records).map_err(|errno| Error::new(verb, errno)),
        }
    }

    fn user_index(&self, verb: &'static str) -> Result<Arc<Uidx>> {
        self.indices.take().ok_or_else(|| {
            Error::new(verb, Errno::NFILE).detail(
                "2^24 queue pairs and shared receive queues of XRC domains are alive in this context",
            )
        })
    }
}

impl Provider for Mlx5 {
    fn traits(&self) -> &'static DriverTraits {
        &TRAITS
    }

    fn reimport(&self, kernel: &dyn Kernel) -> Result<Arc<dyn Provider>> {
        Ok(Arc::new(Mlx5::new(self.limits, kernel)?))
    }

    fn close(&self, kernel: &dyn Kernel) {
        self.registers.close(kernel);
    }

    fn refuses_dmabufs(&self, has_method: bool, on_demand: bool) -> Option<&'static str> {
        if !has_method {
            return Some("this kernel does not know them; Linux 5.12 or later does");
        }
        (!on_demand).then_some(
            "it does not page on demand, and its driver takes dma-bufs only for a device that does, \
             since Linux 7.2 and in later releases of 6.12",
        )
    }

    fn rd_atomic(&self) -> Option<RdAtomic> {
        Some(self.limits.rd_atomic)
    }

    fn pd_number(
        &self,
        kernel: &dyn Kernel,
        handle: u32,
    ) -> std::result::Result<Option<u32>, Errno> {
        pd::number(kernel, handle).map(Some)
    }

    fn address(
        &self,
        _: &'static str,
        attr: &ib_uverbs_ah_attr,
        link: LinkProtocol,
        response: &DriverResponse,
    ) -> Result<Address> {
        Ok(Address::Mlx5(ah::vector(attr, link, response)))
    }

    fn create_cq(
        &self,
        attr: CqInitAttr,
        source: Source<'_>,
        _: &dyn Kernel,
        execute: Execute<'_>,
    ) -> Result<CreatedCq> {
        cq::create(self, attr, source, execute)
    }

    fn create_qp(
        &self,
        attr: QpInitAttr<'_>,
        source: Source<'_>,
        kernel: &dyn Kernel,
        execute: Execute<'_>,
    ) -> Result<CreatedQp> {
        qp::create(self, attr, source, kernel, execute)
    }

    fn create_srq(
        &self,
        attr: SrqInitAttr,
        source: Source<'_>,
        _: &dyn Kernel,
        execute: Execute<'_>,
    ) -> Result<CreatedSrq> {
        srq::create(self, attr, source, execute)
    }

    fn create_target(&self, verb: &'static str, execute: Execute<'_>) -> Result<CreatedTarget> {
        qp::create_target(self, verb, execute)
    }

    fn modify_qp_with(
        &self,
        _: &'static str,
        change: QpChange,
        execute: ExecuteModify<'_>,
    ) -> Result<u32> {
        qp::modify_with(change, execute)
    }

    fn thread_register(
        &self,
        kernel: &dyn Kernel,
        verb: &'static str,
    ) -> Result<Option<RegisterLease>> {
        self.registers.for_thread(kernel).map(Some).map_err(|(errno, have)| {
            let why = match errno {
                Errno::NOSPC | Errno::NOMEM => "the device has no doorbell register left",
                _ => "no page of doorbell registers could be had",
            };
            Error::from_kernel(verb, errno)
                .detail(format!("{why}; thread domains of this context have {have}"))
        })
    }

    fn mlx5(&self, _: &'static str) -> Result<&Mlx5> {
        Ok(self)
    }
}

/// The error for a queue that does not fit into the memory that this module sized for it.
fn misfit(verb: &'static str) -> Error {
    Error::new(verb, Errno::BADMSG).detail("the queue does not fit into its memory")
}
