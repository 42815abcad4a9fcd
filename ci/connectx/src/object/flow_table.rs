//! Flow tables. A table holds groups, each with a mask, and entries, each with a value that frames are
//! compared with under the mask of its group.

use std::collections::BTreeMap;
use std::sync::Arc;

/// Bytes of a match: outer headers and misc, the parts that are compared.
pub(crate) const COMPARED: usize = 0x80;

/// Bytes of a whole match.
pub(crate) const MATCH: usize = 0x200;

pub(crate) const DROP: u64 = 2;

/// Tables of received frames, and of those that are sent.
pub(crate) const NIC_RECEIVE: u64 = 0;
pub(crate) const NIC_TRANSMIT: u64 = 1;

/// A flow table.
pub struct FlowTable {
    pub(crate) kind: u64,
    pub(crate) log_size: u64,
    pub(crate) miss: Option<u32>,
    pub(crate) groups: BTreeMap<u32, Group>,
    pub(crate) entries: BTreeMap<u32, Entry>,
}

pub(crate) struct Group {
    pub(crate) range: std::ops::RangeInclusive<u32>,
    pub(crate) mask: Arc<[u8]>,
}

/// What becomes of frames with these headers.
pub(crate) struct Entry {
    pub(crate) value: Vec<u8>,
    /// That of its group.
    pub(crate) mask: Arc<[u8]>,
    pub(crate) action: u64,
    pub(crate) flow_tag: u32,
    pub(crate) to: Vec<Destination>,
    /// Numbers of the counters that count them.
    pub(crate) counters: Vec<u32>,
}

/// Where an entry sends a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Destination {
    Table(u32),
    Tir(u32),
}

impl Entry {
    /// Whether frames end here.
    pub(crate) fn drops(&self) -> bool {
        self.action & DROP != 0
    }
}

/// Where each kind of table begins.
#[derive(Default)]
pub struct Roots {
    pub(crate) tables: BTreeMap<u64, u32>,
}

impl FlowTable {
    /// How many entries a frame may be compared with here.
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// The entry for a frame, described in the form of a match.
    pub(crate) fn find(&self, headers: &[u8; MATCH]) -> Option<&Entry> {
        self.entries.values().find(|entry| {
            headers
                .iter()
                .zip(&entry.value)
                .zip(&entry.mask[..])
                .take(COMPARED)
                .all(|((header, value), mask)| (header ^ value) & mask == 0)
        })
    }
}
