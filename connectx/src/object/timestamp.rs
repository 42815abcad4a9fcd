//! Formats of the timestamps in CQEs, which each queue chooses.
//!
//! Pairs with `MLX5_TIMESTAMP_FORMAT_*`, and with `get_ts_format` of mlx5_ib's `qp.c`.

use crate::command_error::{CommandError, refuse};
use crate::init_segment::NS_PER_TICK;
use crate::options::Options;

/// `MLX5_TIMESTAMP_FORMAT_CAP_FREE_RUNNING`, and with real time beside it.
const FREE_RUNNING_ALONE: u64 = 0;
const BOTH: u64 = 2;

const NS_PER_SECOND: u64 = 1_000_000_000;

/// The format of a queue's timestamps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TimestampFormat {
    /// Ticks of the device's clock.
    FreeRunning,
    /// Seconds in the upper half, nanoseconds in the lower one.
    RealTime,
}

/// The capability of each kind of queue.
pub(crate) fn capability(options: &Options) -> u64 {
    if options.real_time.is_some() { BOTH } else { FREE_RUNNING_ALONE }
}

impl TimestampFormat {
    /// The format that a queue's context asks for.
    ///
    /// # Errors
    /// If the device does not have it.
    pub(crate) fn new(value: u64, options: &Options) -> Result<TimestampFormat, CommandError> {
        match value {
            // By name, and firmware's choice.
            0 | 1 => Ok(TimestampFormat::FreeRunning),
            2 if options.real_time.is_some() => Ok(TimestampFormat::RealTime),
            other => {
                refuse!(BadParam, "timestamps of format {other}, which the device does not have")
            }
        }
    }

    /// The format of a context that was [checked](Self::new).
    pub(crate) fn of(value: u64) -> TimestampFormat {
        if value == 2 { TimestampFormat::RealTime } else { TimestampFormat::FreeRunning }
    }

    /// The timestamp of `now`, in nanoseconds since the start.
    pub(crate) fn stamp(self, now: u64, options: &Options) -> u64 {
        match self {
            TimestampFormat::FreeRunning => now / NS_PER_TICK,
            TimestampFormat::RealTime => real_time(now, options),
        }
    }
}

/// The clock of real time: seconds since the epoch, and nanoseconds.
pub(crate) fn real_time(now: u64, options: &Options) -> u64 {
    let time = options.real_time.unwrap_or(0).saturating_add(now);
    ((time / NS_PER_SECOND) << 32) | (time % NS_PER_SECOND)
}
