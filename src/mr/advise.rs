//! Prefetching pages of regions that are paged on demand. Pairs with `UVERBS_METHOD_ADVISE_MR` in
//! `core/uverbs_std_types_mr.c`.

use super::{MemoryRegion, MrInner};
use crate::access::Access;
use crate::error::{Error, Result};
use crate::file::File;
use crate::number::open_enum;
use crate::pd::{ProtectionDomain, Sharing};
use crate::uverbs::command::Command;
use rustix::io::Errno;
use std::ops::RangeBounds;
use std::sync::Arc;
use uverbs_uapi::mr::{
    UVERBS_ATTR_ADVISE_MR_ADVICE, UVERBS_ATTR_ADVISE_MR_FLAGS, UVERBS_ATTR_ADVISE_MR_PD_HANDLE,
    UVERBS_ATTR_ADVISE_MR_SGE_LIST, UVERBS_METHOD_ADVISE_MR, ib_uverbs_advise_mr_advice as raw,
    ib_uverbs_advise_mr_flag,
};
use uverbs_uapi::object::UVERBS_OBJECT_MR;
use uverbs_uapi::wr::ib_uverbs_sge;

const VERB: &str = "advise_mr";

/// The most ranges of one call: the attribute has at most 65535 bytes.
const MAX_RANGES: usize = u16::MAX as usize / size_of::<ib_uverbs_sge>();

open_enum! {
    /// The kind of prefetch.
    #[doc(alias = "ib_uverbs_advise_mr_advice")]
    pub struct Advice(u32) {
        /// Faults the pages in for reading.
        PREFETCH = raw::IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH.0, "prefetch";
        /// Faults the pages in for writing.
        PREFETCH_WRITE = raw::IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_WRITE.0, "prefetch for writing";
        /// Tells the device the pages that are present, and faults none in.
        PREFETCH_NO_FAULT = raw::IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT.0,
            "prefetch without faulting";
    }
}

/// A range of a region that is paged on demand.
///
/// It borrows the region: rxe of Linux 7 looks up any key in the request, and treats a pinned
/// region as a paged one.
#[derive(Clone, Copy, Debug)]
pub struct OnDemandRange<'r> {
    sge: ib_uverbs_sge,
    file: &'r Arc<File>,
}

impl<T, M> MemoryRegion<T, M> {
    /// A range of the region for [`advise`](ProtectionDomain::advise); `range` counts bytes from the region's
    /// beginning.
    ///
    /// ```no_run
    /// # fn f(pd: &uverbs::ProtectionDomain, table: Vec<u64>) -> Result<(), Box<dyn std::error::Error>> {
    /// use uverbs::{Access, Advice, MemoryRegion};
    ///
    /// // Too large to be pinned.
    /// let builder = pd.mr_builder().access(Access::LOCAL_WRITE).on_demand();
    /// let table: MemoryRegion<u64, _> = builder.register(table)?;
    /// // The next requests read into these two parts.
    /// let soon = [table.on_demand(..8192)?, table.on_demand(1 << 30..(1 << 30) + 8192)?];
    /// pd.advise(Advice::PREFETCH_WRITE, &soon, false)?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// `EINVAL` if the region is not paged [on demand](crate::MrBuilder::on_demand), for a range that does not lie in
    /// it, or of more than 2^32 - 1 bytes; `EPERM` for a region that was
    /// [imported](crate::ProtectionDomain::import_mr), because only its exporter claims that it is paged.
    pub fn on_demand(&self, range: impl RangeBounds<usize>) -> Result<OnDemandRange<'_>> {
        if self.inner.is_imported() {
            return Err(Error::new(VERB, Errno::PERM).detail(
                "the region was imported: give advice in the process that registered its memory",
            ));
        }
        let MrInner { access, .. } = &*self.inner;
        if !access.contains(Access::ON_DEMAND) {
            return Err(Error::invalid(VERB, "the pages of the region are pinned, not on demand"));
        }
        let sge = self.sge(range).map_err(|error| Error::from(error).in_verb(VERB))?;
        Ok(OnDemandRange {
            sge: ib_uverbs_sge { addr: sge.addr, length: sge.length, lkey: sge.lkey.0 },
            file: self.inner.file(),
        })
    }
}

impl<S: Sharing> ProtectionDomain<S> {
    /// Prefetches pages of regions that are paged on demand, so that later requests need not wait for them.
    ///
    /// The regions must belong to this domain. Without `wait` the call returns at once and reports no
    /// failure of the prefetch; with `wait` it returns when the prefetch is done.
    ///
    /// # Errors
    ///
    /// `EINVAL` without ranges, with more than 4095, or with a region of another domain;
    /// `EOPNOTSUPP` if the driver or the kernel takes no such advice; with `wait`, `EPERM` for advice to
    /// write to memory registered without local write access, and `EFAULT` for pages that are not
    /// there.
    #[doc(alias = "ibv_advise_mr")]
    pub fn advise(&self, advice: Advice, ranges: &[OnDemandRange<'_>], wait: bool) -> Result<()> {
        let file = self.inner.file();
        if ranges.is_empty() || ranges.len() > MAX_RANGES {
            return Err(Error::invalid(
                VERB,
                format!("{} ranges are not between 1 and {MAX_RANGES}", ranges.len()),
            ));
        }
        for range in ranges {
            file.check_same(VERB, "region", range.file)?;
        }
        let sges: Vec<ib_uverbs_sge> = ranges.iter().map(|range| range.sge).collect();
        let flush = ib_uverbs_advise_mr_flag::IB_UVERBS_ADVISE_MR_FLAG_FLUSH.bits();
        let mut command = Command::new(UVERBS_OBJECT_MR, UVERBS_METHOD_ADVISE_MR);
        command
            .handle(UVERBS_ATTR_ADVISE_MR_PD_HANDLE, self.inner.handle())
            .u64(UVERBS_ATTR_ADVISE_MR_ADVICE, advice.0.into())
            .u32(UVERBS_ATTR_ADVISE_MR_FLAGS, if wait { flush } else { 0 })
            .input(UVERBS_ATTR_ADVISE_MR_SGE_LIST, sges.as_slice());
        file.execute(VERB, &mut command).map_err(|error| match error.errno() {
            Errno::OPNOTSUPP => {
                error.detail(format!("{} takes no advice to {advice}", file.device.name()))
            }
            // Without `wait` the kernel checks only the keys.
            Errno::FAULT => error.detail(format!(
                "not all pages of the {} ranges to {advice} are mapped, or not for writing",
                ranges.len()
            )),
            Errno::PERM => error.detail(format!(
                "advice to {advice}, and the memory was registered without LOCAL_WRITE"
            )),
            Errno::INVAL | Errno::NOENT => error.detail(format!(
                "advice to {advice} on {} ranges: each must lie in a region of this domain that is paged on \
                 demand",
                ranges.len()
            )),
            _ => error.context(|| format!("advice to {advice} on {} ranges", ranges.len())),
        })
    }
}
