//! A check, for tests, that a program leaves the memory of its requests alone until their completion.
//!
//! When the device finds a posted receive, it fills the buffer with [`POISON`]: a program that reads it before the
//! completion finds that. At the doorbell of a send or write the device takes a hash of the request's memory, and
//! compares it before it writes the completion that gives the memory back to the program. Memory that a device has
//! written meanwhile is not compared.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::format::wqe::Sge;
use crate::recording::RqType;

/// The byte that fills a receive buffer until its completion.
pub const POISON: u8 = 0xa5;

/// Something that a program must not do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finding {
    /// The memory of a request was written between its doorbell and its completion.
    Changed {
        /// Number of the queue pair.
        qpn: u32,
        /// Index of its first WQEBB.
        index: u16,
    },
    /// The memory of a request lost its region between its doorbell and its completion.
    Gone {
        /// Number of the queue pair.
        qpn: u32,
        /// Index of its first WQEBB.
        index: u16,
    },
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (qpn, index, how) = match self {
            Self::Changed { qpn, index } => (qpn, index, "was written"),
            Self::Gone { qpn, index } => (qpn, index, "lost its memory region"),
        };
        write!(f, "qp {qpn:#x} send {index}: its memory {how} before its completion")
    }
}

/// A request that was rung.
pub(crate) struct Rung {
    /// Index of its first WQEBB.
    pub(crate) index: u16,
    pub(crate) sges: Vec<Sge>,
    pub(crate) hash: u64,
    /// The number of writes of devices before the doorbell.
    pub(crate) writes: u64,
}

/// Writes of all devices of a fabric to the memory of programs, as far as they are remembered.
#[derive(Debug, Clone, Default)]
pub struct DeviceWrites(Arc<Mutex<Writes>>);

#[derive(Debug, Default)]
struct Writes {
    /// Address and bytes of each.
    last: VecDeque<(u64, u64)>,
    /// The number of forgotten writes.
    forgotten: u64,
}

impl DeviceWrites {
    /// Writes that are remembered.
    const MOST: usize = 1 << 16;

    fn lock(&self) -> MutexGuard<'_, Writes> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn add(&self, address: u64, len: u64) {
        let mut writes = self.lock();
        if writes.last.len() == Self::MOST {
            writes.last.pop_front();
            writes.forgotten += 1;
        }
        writes.last.push_back((address, len));
    }

    pub(crate) fn count(&self) -> u64 {
        let writes = self.lock();
        writes.forgotten + writes.last.len() as u64
    }

    /// Whether any from number `first` on may have been to one of these ranges.
    pub(crate) fn reached(&self, first: u64, ranges: &[(u64, u64)]) -> bool {
        let writes = self.lock();
        let Some(skipped) = first.checked_sub(writes.forgotten) else { return true };
        let meets = |(a, a_len): &(u64, u64), (b, b_len): &(u64, u64)| {
            *a < b.saturating_add(*b_len) && *b < a.saturating_add(*a_len)
        };
        let mut since = writes.last.iter().skip(skipped as usize);
        since.any(|write| ranges.iter().any(|range| meets(write, range)))
    }
}

/// The state of a check.
#[derive(Default)]
pub(crate) struct Audit {
    /// For each receive queue, how many of its receives were seen, modulo 2¹⁶.
    pub(crate) seen: BTreeMap<(RqType, u32), u16>,
    /// For each queue pair, the WQEBB behind the last request that was hashed.
    pub(crate) hashed: BTreeMap<u32, u16>,
    /// For each queue pair, the requests without a completion.
    pub(crate) rung: BTreeMap<u32, VecDeque<Rung>>,
    pub(crate) findings: Vec<Finding>,
    pub(crate) writes: DeviceWrites,
}

impl Audit {
    /// The state after a reset of the device.
    pub(crate) fn after_reset(&self) -> Audit {
        Audit { writes: self.writes.clone(), ..Audit::default() }
    }
}
