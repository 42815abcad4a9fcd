//! The link layers of a device's ports, remembered.

use super::LinkLayer;
use std::sync::atomic::{AtomicU64, Ordering};

/// The link layers of a device's ports that were queried before. A port keeps its link layer as long as the
/// device exists. Ports above 63 are queried each time.
#[derive(Debug, Default)]
pub(crate) struct LinkLayers {
    infiniband: AtomicU64,
    ethernet: AtomicU64,
}

impl LinkLayers {
    pub(crate) fn get(&self, port: u32) -> Option<LinkLayer> {
        let bit = 1u64.checked_shl(port)?;
        let has = |ports: &AtomicU64| ports.load(Ordering::Relaxed) & bit != 0;
        match (has(&self.infiniband), has(&self.ethernet)) {
            (true, _) => Some(LinkLayer::INFINIBAND),
            (_, true) => Some(LinkLayer::ETHERNET),
            _ => None,
        }
    }

    /// Remembers the link layer, if it is InfiniBand or Ethernet.
    pub(crate) fn set(&self, port: u32, link_layer: LinkLayer) {
        let ports = match link_layer {
            LinkLayer::INFINIBAND => &self.infiniband,
            LinkLayer::ETHERNET => &self.ethernet,
            _ => return,
        };
        let bit = 1u64.checked_shl(port).unwrap_or(0);
        ports.fetch_or(bit, Ordering::Relaxed);
    }
}
