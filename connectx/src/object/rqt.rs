//! RQ tables (RQTs): the receive queues or virtqueues that a TIR spreads frames over.

/// log2 of the most queues in an RQ table.
pub(crate) const LOG_MAX_QUEUES: u64 = 9;

/// An RQ table.
pub struct Rqt {
    pub(crate) queues: Vec<u32>,
    /// Whether they are virtqueues.
    pub(crate) is_virtio: bool,
}
