//! The device's clock: its counter, and the conversion to nanoseconds.
//!
//! Pairs with `MLX5_IB_MMAP_CORE_CLOCK` and `MLX5_IB_MMAP_CLOCK_INFO` of the kernel's driver, which
//! updates the second page.

use crate::context::Context;
use crate::error::{Error, Result};
use crate::memory::mmio_page::MmioPage;
use crate::provider::mlx5::mmap_offset::mmap_offset;
use rustix::io::Errno;
use rustix::param::page_size;
use std::mem::offset_of;
use std::time::{Duration, SystemTime};
use uverbs_uapi::mlx5::context::{
    MLX5_IB_CLOCK_INFO_KERNEL_UPDATING, MLX5_IB_CLOCK_INFO_V1, MLX5_IB_MMAP_CLOCK_INFO,
    MLX5_IB_MMAP_CORE_CLOCK, mlx5_ib_clock_info,
};

const VERB: &str = "open_clock";
/// The number of attempts to read a page that is being written. The kernel writes it a few times a
/// second, for less than a microsecond.
const TRIES: u32 = 1 << 20;

/// The clock of a device. It counts the timestamps of completions.
///
/// Reading it takes no system call. It may be used from any thread.
///
/// ```no_run
/// # fn f(context: &uverbs::Context, completion: &uverbs::Completion<'_>) -> uverbs::Result<()> {
/// let clock = uverbs::mlx5::Clock::open(context)?;
/// println!("now it is {} ns", clock.nanoseconds(clock.now()?)?);
/// if let Some(count) = completion.timestamp() {
///     println!("completed at {} ns, {:?}", clock.nanoseconds(count)?, clock.system_time(count)?);
/// }
/// # Ok(()) }
/// ```
#[doc(alias = "mlx5dv_clock_info")]
#[doc(alias = "mlx5dv_get_clock_info")]
#[derive(Debug)]
pub struct Clock {
    counter: Option<(MmioPage, usize)>,
    info: Option<MmioPage>,
}

/// The conversion from counts to nanoseconds at one moment.
#[derive(Clone, Copy, Debug, Default)]
struct Scale {
    nsec: u64,
    cycles: u64,
    frac: u64,
    mult: u32,
    shift: u32,
    mask: u64,
}

impl Clock {
    /// Maps the clock's pages.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` on a device of another driver, and where the kernel maps neither page; `EIO`
    /// after the device was removed.
    pub fn open(context: &Context) -> Result<Clock> {
        let file = &context.file;
        let limits = file.provider.mlx5(VERB)?.limits();
        file.check_fork(VERB)?;
        let map = |command: u32| {
            let offset = mmap_offset(command, 0, page_size());
            match file.kernel.mapper().map_read_only(offset, page_size()) {
                Ok(mapping) => Ok(Some(MmioPage::new(mapping))),
                // The kernel knows the page and does not map it, as where pages are larger than 4 KiB.
                Err(Errno::OPNOTSUPP) => Ok(None),
                Err(errno) => Err(Error::from_kernel(VERB, errno)),
            }
        };
        let counter = match limits.clock_offset {
            Some(offset) => {
                let within = (offset % page_size() as u64) as usize;
                map(MLX5_IB_MMAP_CORE_CLOCK)?.map(|page| (page, within))
            }
            None => None,
        };
        let explained = limits.clock_info_versions & 1 << MLX5_IB_CLOCK_INFO_V1 != 0;
        let info = if explained { map(MLX5_IB_MMAP_CLOCK_INFO)? } else { None };
        file.mark_shared();
        if counter.is_none() && info.is_none() {
            return Err(Error::new(VERB, Errno::OPNOTSUPP)
                .detail("the kernel maps neither page of the clock"));
        }
        Ok(Clock { counter, info })
    }

    /// The present value of the device's counter.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` where the kernel does not map the counter.
    #[doc(alias = "ibv_query_rt_values_ex")]
    pub fn now(&self) -> Result<u64> {
        const VERB: &str = "read_clock";
        let Some((page, offset)) = &self.counter else {
            return Err(
                Error::new(VERB, Errno::OPNOTSUPP).detail("the kernel does not map the counter")
            );
        };
        let word = |at| page.load::<u32>(at).map(u32::from_be);
        let mut high = word(*offset);
        for _ in 0..TRIES {
            let low = word(*offset + size_of::<u32>());
            // The lower half may have overflowed between the two loads.
            let again = word(*offset);
            match (high, low) {
                (Some(high), Some(low)) if Some(high) == again => {
                    return Ok(u64::from(high) << 32 | u64::from(low));
                }
                _ => high = again,
            }
        }
        Err(Error::new(VERB, Errno::IO).detail("the counter's upper half changes at each load"))
    }

    /// Converts a count, of a completion or of [`now`](Self::now), to nanoseconds of the driver's PTP clock:
    /// since the epoch unless that clock was set otherwise. A count may lie before or after the present by up
    /// to half the counter's range.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` where the kernel does not map the conversion.
    #[doc(alias = "mlx5dv_ts_to_ns")]
    pub fn nanoseconds(&self, count: u64) -> Result<u64> {
        const VERB: &str = "read_clock";
        let Some(info) = &self.info else {
            return Err(Error::new(VERB, Errno::OPNOTSUPP)
                .detail("the kernel does not map the clock's conversion"));
        };
        for _ in 0..TRIES {
            if let Some(scale) = Scale::read(info) {
                return Ok(scale.nanoseconds(count));
            }
            std::hint::spin_loop();
        }
        Err(Error::new(VERB, Errno::IO).detail("the clock's page is always being written"))
    }

    /// As [`nanoseconds`](Self::nanoseconds), as a time of the system's kind: when a completion with this
    /// [timestamp](crate::Completion::timestamp) was written. The driver sets its clock to the system's time when it
    /// loads; a PTP daemon (`ptp4l`, `phc2sys`) keeps both together, and without one they drift apart. On a device in
    /// the process the clock begins at the epoch.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` where the kernel does not map the conversion.
    pub fn system_time(&self, count: u64) -> Result<SystemTime> {
        Ok(SystemTime::UNIX_EPOCH + Duration::from_nanos(self.nanoseconds(count)?))
    }
}

/// The time of a completion of a queue with [timestamps of real time](crate::CqBuilder::real_time_timestamps), whose
/// upper half has seconds since the epoch, and whose lower half nanoseconds. It is the device's own clock, which a PTP
/// daemon (`ptp4l`) sets; on a device in the process it begins at the epoch.
///
/// ```
/// use std::time::{Duration, SystemTime};
///
/// let time = uverbs::mlx5::real_time(2 << 32 | 500);
/// assert_eq!(time, SystemTime::UNIX_EPOCH + Duration::new(2, 500));
/// ```
#[doc(alias = "ibv_wc_read_completion_wallclock_ns")]
pub fn real_time(timestamp: u64) -> SystemTime {
    let (seconds, nanoseconds) = (timestamp >> 32, timestamp & 0xffff_ffff);
    SystemTime::UNIX_EPOCH + Duration::from_secs(seconds) + Duration::from_nanos(nanoseconds)
}

impl Scale {
    /// `None` if the kernel wrote the page meanwhile.
    fn read(page: &MmioPage) -> Option<Scale> {
        let sign = page.load::<u32>(offset_of!(mlx5_ib_clock_info, sign))?;
        if sign & MLX5_IB_CLOCK_INFO_KERNEL_UPDATING != 0 {
            return None;
        }
        let scale = Scale {
            nsec: page.load(offset_of!(mlx5_ib_clock_info, nsec))?,
            cycles: page.load(offset_of!(mlx5_ib_clock_info, cycles))?,
            frac: page.load(offset_of!(mlx5_ib_clock_info, frac))?,
            mult: page.load(offset_of!(mlx5_ib_clock_info, mult))?,
            shift: page.load(offset_of!(mlx5_ib_clock_info, shift))?,
            mask: page.load(offset_of!(mlx5_ib_clock_info, mask))?,
        };
        let again = page.load::<u32>(offset_of!(mlx5_ib_clock_info, sign))?;
        (sign == again).then_some(scale)
    }

    fn nanoseconds(&self, count: u64) -> u64 {
        let shift = self.shift.min(u64::BITS - 1);
        let scaled =
            |delta: u64, frac: i128| (i128::from(delta) * i128::from(self.mult) + frac) >> shift;
        let ahead = count.wrapping_sub(self.cycles) & self.mask;
        if ahead <= self.mask / 2 {
            self.nsec.wrapping_add(scaled(ahead, self.frac.into()) as u64)
        } else {
            let behind = self.cycles.wrapping_sub(count) & self.mask;
            self.nsec.wrapping_sub(scaled(behind, -i128::from(self.frac)) as u64)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Half a nanosecond a count, in a counter of 48 bits.
    const HALF: Scale =
        Scale { nsec: 1000, cycles: 100, frac: 1, mult: 1 << 9, shift: 10, mask: (1 << 48) - 1 };

    #[test]
    fn counts_ahead_and_behind_become_nanoseconds() {
        assert_eq!(HALF.nanoseconds(100), 1000);
        assert_eq!(HALF.nanoseconds(300), 1100);
        assert_eq!(HALF.nanoseconds(100 + (1 << 40)), 1000 + (1 << 39));
        assert_eq!(HALF.nanoseconds(80), 991, "10 less a fraction, rounded down");
        // The counter wrapped.
        let late = Scale { cycles: HALF.mask - 9, ..HALF };
        assert_eq!(late.nanoseconds(10), 1010);
        assert_eq!(late.nanoseconds(late.cycles - 20), 991);
    }

    #[test]
    fn any_scale_converts_any_count() {
        let tally = crate::tests::hostile::explore("clock", 1, &[], |bytes| {
            let mut u = arbitrary::Unstructured::new(bytes);
            let mut next = || u.arbitrary().unwrap_or_default();
            let (nsec, cycles, frac, mask, count) = (next(), next(), next(), next(), next());
            let (mult, shift) = (next() as u32, next() as u32);
            let scale = Scale { nsec, cycles, frac, mult, shift, mask };
            // At the moment of the scale itself.
            assert_eq!(scale.nanoseconds(cycles), nsec.wrapping_add(frac >> shift.min(63)));
            let _ = scale.nanoseconds(count);
            true
        });
        assert!(tally.taken > 0, "{tally:?}");
    }

    #[test]
    fn remainders_count() {
        let scale = Scale { frac: 512, ..HALF };
        assert_eq!((scale.nanoseconds(100), scale.nanoseconds(101)), (1000, 1001));
        let odd = Scale { shift: 99, ..HALF };
        assert_eq!(odd.nanoseconds(100), 1000, "a shift that no kernel has");
    }
}
