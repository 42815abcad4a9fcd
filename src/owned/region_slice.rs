//! Parts of a region that are lent together with the region.

use super::lending::{HasSge, RegionSge};
use crate::error::MemoryError;
use crate::memory::region::StableBytes;
use crate::mr::MemoryRegion;
use std::any::Any;
use std::fmt;
use std::ops::RangeBounds;
use std::sync::Arc;

/// A part of a region, which keeps the region registered.
///
/// Registered memory is not a slice, and neither is this: the device and peers may write it while the
/// program reads it by [`MemoryRegion::copy_to`] and the like. A `RegionSlice` can therefore be cloned, and
/// lent to several requests at once.
///
/// ```no_run
/// # use uverbs::{ProtectionDomain, Remote, SendWr, owned::*};
/// # use std::sync::Arc;
/// # fn f(pd: &ProtectionDomain, qp: &mut OwnedQueuePair<u32>, remote: Remote)
/// # -> Result<(), Box<dyn std::error::Error>> {
/// let region = Arc::new(pd.mr_builder().register(vec![0u8; 1 << 20])?);
/// let slice = RegionSlice::new(&region, 4096..8192)?;
/// assert!(slice.is_of(&region));
/// let mut batch = qp.send_batch()?;
/// batch.push(SendWr::read(remote, &[]), slice, 1)?;
/// batch.ring()?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct RegionSlice {
    region: Arc<dyn Any + Send + Sync>,
    sge: RegionSge,
}

impl RegionSlice {
    /// The bytes `range` of `region`, counted from its beginning.
    ///
    /// # Errors
    ///
    /// [`MemoryError::OutOfRange`], also for more than 2^32 - 1 bytes; [`MemoryError::Dead`].
    pub fn new<T: 'static, M: StableBytes>(
        region: &Arc<MemoryRegion<T, M>>,
        range: impl RangeBounds<usize>,
    ) -> Result<RegionSlice, MemoryError> {
        // The region, which this holds, keeps its protection domain.
        let sge = RegionSge::new(region, range)?;
        Ok(RegionSlice { region: region.clone(), sge })
    }

    /// Whether it is a part of `region`.
    pub fn is_of<T: 'static, M: StableBytes>(&self, region: &Arc<MemoryRegion<T, M>>) -> bool {
        std::ptr::addr_eq(Arc::as_ptr(&self.region), Arc::as_ptr(region))
    }

    /// Bytes.
    #[expect(clippy::len_without_is_empty, reason = "its holder chose the range")]
    pub fn len(&self) -> usize {
        self.sge.sge.length as usize
    }
}

impl HasSge for RegionSlice {
    #[inline(always)]
    fn region_sge(&self) -> Option<RegionSge> {
        Some(self.sge)
    }
}

impl fmt::Debug for RegionSlice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RegionSlice").field("sge", &self.sge.sge).finish()
    }
}
