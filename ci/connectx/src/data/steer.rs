//! Where frames go: runs them through flow tables.
//!
//! Pairs with [`crate::object::flow`], whose tables it reads, and with `data/ethernet.rs`.

use crate::device::Device;
use crate::object::flow::{Destination, MATCH};

/// What the tables say of a frame.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Verdict {
    /// Where it is received.
    pub(crate) tirs: Vec<u32>,
    /// What its completion is marked with.
    pub(crate) flow_tag: u32,
    /// Whether it ends here.
    pub(crate) dropped: bool,
}

impl Device {
    /// Runs a frame of `len` bytes, described in the form of a match, through the tables of a kind.
    pub(crate) fn steer(&mut self, kind: u64, headers: &[u8; MATCH], len: usize) -> Verdict {
        let mut verdict = Verdict::default();
        let Some(root) = self.objects.flow_roots.tables.get(&kind) else { return verdict };
        let mut tables = vec![*root];
        let mut counters = vec![];
        // Tables may point at one another in a circle; a frame passes each table once at most.
        let mut left = self.objects.flow_tables.len();
        while let Some(number) = tables.pop() {
            let Ok(table) = self.objects.flow_tables.get(number) else { continue };
            if left == 0 {
                log::warn!("flow tables form a circle through {number}");
                break;
            }
            left -= 1;
            let Some(entry) = table.find(headers) else {
                tables.extend(table.miss);
                continue;
            };
            counters.extend(&entry.counters);
            if entry.drops() {
                verdict.dropped = true;
                continue;
            }
            if entry.flow_tag != 0 {
                verdict.flow_tag = entry.flow_tag;
            }
            for to in &entry.to {
                match to {
                    Destination::Table(table) => tables.push(*table),
                    Destination::Tir(tir) => verdict.tirs.push(*tir),
                }
            }
        }
        for counter in counters {
            if let Ok(counter) = self.objects.flow_counters.get_mut(counter) {
                counter.add(len);
            }
        }
        verdict
    }
}
