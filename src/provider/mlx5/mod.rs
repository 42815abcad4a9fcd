//! ConnectX and BlueField: the queues are in memory of this process, and the device is rung through
//! registers that are mapped into it.
//!
//! Pairs with `hw/mlx5` of the kernel. [`context`] opens, [`size`] and [`create`] make queues,
//! [`uar`] has the registers. A send is written by [`sq`] in the words of [`wqe`] and [`umr`] and
//! rung there; receives go through [`rq`] and [`srq`]. Completions come out of [`cq`] as [`cqe`],
//! and find their request by [`index`], [`book`] and [`record`]; [`news`] tells when to look into the book.

pub(crate) mod ah;
pub(crate) mod context;
pub(crate) mod cq;
pub(crate) mod cqe;
pub(crate) mod create;
pub(crate) mod dm;
#[cfg(test)]
pub(crate) mod fake_device;
pub(crate) mod pd;
pub(crate) mod poll_gate;
pub(crate) mod qp_table;
pub(crate) mod resources;
pub(crate) mod rq;
pub(crate) mod size;
pub(crate) mod sq;
pub(crate) mod srq;
#[cfg(all(test, not(loom)))]
mod tests;
pub(crate) mod uar;
pub(crate) mod uidx;
pub(crate) mod umr;
pub(crate) mod wqe;
pub(crate) mod wr_ids;

use crate::error::{Error, Result};
use crate::memory::barrier;
use crate::memory::doorbell_record::DoorbellPages;
use crate::uverbs::kernel::Kernel;
use context::Limits;
use rustix::io::Errno;
use std::sync::Arc;
use uar::Registers;
use uidx::UidxAllocator;

const VERB: &str = "open_device";

/// What all objects of one context have in common.
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
                "how memory is ordered towards devices is not known for {}",
                std::env::consts::ARCH
            )));
        }
        let records = DoorbellPages::new().map_err(|errno| Error::new(VERB, errno))?;
        let Limits { bf_reg_size, uars_per_page, .. } = limits;
        // Last, as nobody would give the page back.
        let registers = Registers::new(kernel, bf_reg_size, uars_per_page);
        let registers = registers.map_err(|errno| {
            Error::from_kernel(VERB, errno).detail("the driver gives no page of doorbell registers")
        })?;
        Ok(Mlx5 { limits, registers: Arc::new(registers), records, indices: UidxAllocator::new() })
    }

    pub(crate) fn limits(&self) -> &Limits {
        &self.limits
    }

    pub(crate) fn registers(&self) -> &Arc<Registers> {
        &self.registers
    }
}
