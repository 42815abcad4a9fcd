//! Transport interface send (TIS): what send queues of Ethernet frames send through.

/// A TIS.
pub struct Tis {
    pub(crate) transport_domain: u32,
}

impl Tis {
    /// The transport domain; its TIRs do not receive frames sent through this TIS.
    pub(crate) fn transport_domain(&self) -> u32 {
        self.transport_domain
    }
}
