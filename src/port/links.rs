//! What carries the ports of a device.

use super::LinkLayer;
use std::sync::atomic::{AtomicU64, Ordering};

/// The link layers of a device's ports, as far as they were asked for: they stay what they are until
/// the device is made anew. Ports beyond 63 are asked each time.
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

    /// Remembers it, if it is one of the two.
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
