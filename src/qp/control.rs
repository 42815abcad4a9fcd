//! Control over a queue pair: everything that is not posting.

use super::{QpCaps, QpInner, QpState, QpType};
use crate::events::keys::ObjectKey;
use crate::number::Qpn;
use std::fmt;
use std::sync::Arc;

/// Controls a queue pair; a [`QueuePair`](crate::QueuePair) dereferences to it.
pub struct QpControl {
    pub(crate) qp: Arc<QpInner>,
}

impl QpControl {
    /// The queue pair's number: what a peer sends to.
    pub fn qpn(&self) -> Qpn {
        self.qp.qpn
    }

    /// The transport.
    pub fn qp_type(&self) -> QpType {
        self.qp.qp_type
    }

    /// What the queue pair was granted.
    pub fn caps(&self) -> QpCaps {
        self.qp.caps
    }

    /// The state that this library last brought the queue pair to. The device may have moved it
    /// to an error state since.
    pub fn state(&self) -> QpState {
        self.qp.state()
    }

    /// What names this queue pair in events.
    pub fn key(&self) -> ObjectKey {
        self.qp.registration.key()
    }

    /// The number by which the kernel knows the queue pair within its file.
    pub fn handle(&self) -> u32 {
        self.qp.object.handle()
    }
}

impl fmt::Debug for QpControl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QueuePair")
            .field("device", &self.qp.file().device.name())
            .field("qpn", &self.qpn())
            .field("type", &self.qp_type())
            .field("state", &self.state())
            .finish()
    }
}
