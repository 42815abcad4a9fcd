//! RQ tables (RQTs): the receive queues that a TIR spreads frames over.

/// How many queues an RQ table may have, as a power of two.
pub(crate) const LOG_MAX_QUEUES: u64 = 9;

/// Receive queues that flows are spread over.
pub struct Rqt {
    pub(crate) queues: Vec<u32>,
}
