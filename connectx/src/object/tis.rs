//! Transport interface send (TIS): the transport domain of send queues of Ethernet frames.

/// A TIS.
pub struct Tis {
    pub(crate) transport_domain: u32,
    /// The port of a LAG that sends; 0 if any may.
    pub(crate) lag_port: u64,
}

impl Tis {
    /// The transport domain; its TIRs do not receive frames sent through this TIS.
    pub(crate) fn transport_domain(&self) -> u32 {
        self.transport_domain
    }
}
