//! The message that a queue pair receives: its receive, and data for its CQE.

use super::in_flight::IN_CQE;
use super::receive_queue::ReceiveWqe;

/// The receive of a message, from its first packet on that needs one to its completion.
pub(crate) struct Receiving {
    pub(crate) receive: ReceiveWqe,
    /// The SRQ that the message named, on XRC.
    pub(crate) xrc_srqn: Option<u32>,
    /// The PD of the memory that the receive names.
    pub(crate) pd: u32,
    /// Data for its CQE.
    pub(crate) data: [u8; IN_CQE],
    /// Bytes of that.
    pub(crate) data_len: usize,
}

impl Default for Receiving {
    fn default() -> Self {
        let receive = ReceiveWqe::default();
        Self { receive, xrc_srqn: None, pd: 0, data: [0; IN_CQE], data_len: 0 }
    }
}
