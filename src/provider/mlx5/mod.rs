//! ConnectX and BlueField: the queues are in memory of this process, and the device is rung through
//! registers that are mapped into it.
//!
//! Pairs with `hw/mlx5` of the kernel. [`context`] opens, [`size`] and [`create`] make queues,
//! [`uar`] has the registers. A send is written by [`sq`] in the words of [`wqe`] and [`umr`] and
//! rung there; receives go through [`rq`] and [`srq`]. Completions come out of [`cq`] as [`cqe`],
//! and find their request by [`index`], [`book`] and [`record`]; [`news`] tells when to look into the book.

pub(crate) mod ah;
pub(crate) mod book;
pub(crate) mod context;
pub(crate) mod cq;
pub(crate) mod cqe;
pub(crate) mod create;
pub(crate) mod dm;
pub(crate) mod hold;
pub(crate) mod index;
pub(crate) mod news;
pub(crate) mod pd;
#[cfg(test)]
pub(crate) mod played;
pub(crate) mod record;
pub(crate) mod rq;
pub(crate) mod size;
pub(crate) mod sq;
pub(crate) mod srq;
#[cfg(all(test, not(loom)))]
mod tests;
pub(crate) mod uar;
pub(crate) mod umr;
pub(crate) mod wqe;

use crate::error::{Error, Result};
use crate::mem::barrier;
use crate::mem::dbrec::DoorbellPages;
use crate::uverbs::kernel::Kernel;
use context::Limits;
use index::Indices;
use rustix::io::Errno;
use std::sync::Arc;
use uar::Registers;

const VERB: &str = "open_device";

/// What all objects of one context have in common.
#[derive(Debug)]
pub(crate) struct Mlx5 {
    limits: Limits,
    registers: Arc<Registers>,
    records: Arc<DoorbellPages>,
    indices: Arc<Indices>,
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
        Ok(Mlx5 { limits, registers: Arc::new(registers), records, indices: Indices::new() })
    }

    pub(crate) fn limits(&self) -> &Limits {
        &self.limits
    }

    pub(crate) fn registers(&self) -> &Arc<Registers> {
        &self.registers
    }
}
