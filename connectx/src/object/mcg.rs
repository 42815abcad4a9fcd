//! Multicast groups.

use std::collections::{BTreeMap, BTreeSet};

/// All multicast groups: their members by GID.
#[derive(Default)]
pub struct MulticastGroups {
    pub(crate) members: BTreeMap<[u8; 16], BTreeSet<u32>>,
}

impl MulticastGroups {
    /// The member QPNs of a group.
    pub(crate) fn members(&self, gid: &[u8; 16]) -> Vec<u32> {
        self.members.get(gid).map(|set| set.iter().copied().collect()).unwrap_or_default()
    }
}
