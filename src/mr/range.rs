//! Ranges of a region, in bytes.

use crate::error::MemoryError;
use crate::number::Lkey;
use crate::wr::Sge;
use std::ops::{Bound, RangeBounds};

/// Offset and length of `range` in `size` bytes.
#[inline]
pub(crate) fn resolve(
    range: impl RangeBounds<usize>,
    size: usize,
) -> Result<(usize, usize), MemoryError> {
    let start = match range.start_bound() {
        Bound::Included(&start) => start,
        Bound::Excluded(&start) => start.saturating_add(1),
        Bound::Unbounded => 0,
    };
    let end = match range.end_bound() {
        // No memory has `usize::MAX` bytes, so saturation makes no bad range a good one.
        Bound::Included(&end) => end.saturating_add(1),
        Bound::Excluded(&end) => end,
        Bound::Unbounded => size,
    };
    if start <= end && end <= size {
        return Ok((start, end - start));
    }
    Err(MemoryError::OutOfRange { offset: start, length: end.saturating_sub(start), size })
}

/// The SGE of `length` bytes at `offset` of a region that begins at `addr`.
#[inline]
pub(super) fn sge(
    addr: u64,
    lkey: Lkey,
    (offset, length): (usize, usize),
) -> Result<Sge, MemoryError> {
    let too_long = MemoryError::OutOfRange { offset, length, size: u32::MAX as usize };
    Ok(Sge {
        addr: addr.wrapping_add(offset as u64),
        length: u32::try_from(length).map_err(|_| too_long)?,
        lkey,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_within_the_region_resolve() {
        assert_eq!(resolve(.., 10), Ok((0, 10)));
        assert_eq!(resolve(2..5, 10), Ok((2, 3)));
        assert_eq!(resolve(2..=5, 10), Ok((2, 4)));
        assert_eq!(resolve(10.., 10), Ok((10, 0)));
        assert_eq!(resolve((Bound::Excluded(3), Bound::Unbounded), 10), Ok((4, 6)));
    }

    #[test]
    fn ranges_beyond_the_region_do_not() {
        let out = |offset, length| Err(MemoryError::OutOfRange { offset, length, size: 10 });
        assert_eq!(resolve(0..11, 10), out(0, 11));
        assert_eq!(resolve(11.., 10), out(11, 0));
        assert_eq!(resolve(..=10, 10), out(0, 11));
        assert_eq!(resolve(0..=usize::MAX, 10), out(0, usize::MAX));
        #[expect(clippy::reversed_empty_ranges, reason = "that is what is refused")]
        let reversed = resolve(5..2, 10);
        assert_eq!(reversed, out(5, 0));
    }
}
