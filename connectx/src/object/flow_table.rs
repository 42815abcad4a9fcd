//! Flow tables. A table holds groups, each with a mask, and entries, each with a match value. A
//! lookup compares frames with the value under the mask of the group.

use std::collections::BTreeMap;
use std::sync::Arc;

/// Bytes of match parameters that are compared: outer headers and misc.
pub(crate) const COMPARED_BYTES: usize = 0x80;

/// Bytes of match parameters.
pub(crate) const MATCH_BYTES: usize = 0x200;

pub(crate) const DROP: u64 = 2;

/// Table types of received frames and of sent frames.
pub(crate) const NIC_RECEIVE: u64 = 0;
pub(crate) const NIC_TRANSMIT: u64 = 1;

/// A flow table.
pub struct FlowTable {
    pub(crate) table_type: u64,
    pub(crate) log_size: u64,
    pub(crate) miss: Option<u32>,
    pub(crate) groups: BTreeMap<u32, FlowGroup>,
    pub(crate) entries: BTreeMap<u32, FlowTableEntry>,
}

pub(crate) struct FlowGroup {
    pub(crate) range: std::ops::RangeInclusive<u32>,
    pub(crate) mask: Arc<[u8]>,
}

/// An entry: a match value, and the actions on frames that match.
pub(crate) struct FlowTableEntry {
    pub(crate) value: Vec<u8>,
    /// The mask of its group.
    pub(crate) mask: Arc<[u8]>,
    pub(crate) action: u64,
    pub(crate) flow_tag: u32,
    pub(crate) to: Vec<FlowDestination>,
    /// Numbers of its flow counters.
    pub(crate) counters: Vec<u32>,
}

/// Destination of frames that match an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FlowDestination {
    Table(u32),
    Tir(u32),
}

impl FlowTableEntry {
    /// Whether frames are dropped.
    pub(crate) fn drops(&self) -> bool {
        self.action & DROP != 0
    }
}

/// The root table of each table type.
#[derive(Default)]
pub struct FlowTableRoots {
    pub(crate) tables: BTreeMap<u64, u32>,
}

impl FlowTable {
    /// The number of entries that a lookup may compare.
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// The first entry that matches a frame, given as match parameters.
    pub(crate) fn find(&self, headers: &[u8; MATCH_BYTES]) -> Option<&FlowTableEntry> {
        self.entries.values().find(|entry| {
            headers
                .iter()
                .zip(&entry.value)
                .zip(&entry.mask[..])
                .take(COMPARED_BYTES)
                .all(|((header, value), mask)| (header ^ value) & mask == 0)
        })
    }
}
