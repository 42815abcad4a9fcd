//! Transport interface send (TIS): what send queues of Ethernet frames send through.

/// What send queues send through.
pub struct Tis {
    pub(crate) transport_domain: u32,
}

impl Tis {
    /// The domain whose queues do not hear what is sent through this.
    pub(crate) fn transport_domain(&self) -> u32 {
        self.transport_domain
    }
}
