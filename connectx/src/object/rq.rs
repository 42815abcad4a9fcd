//! Receive queues of Ethernet frames, of mlx5e and of raw packet queue pairs.

use uverbs_uapi::mlx5::prm::Bits;
use uverbs_uapi::mlx5::prm::rqc::rqc;

use super::receive_queue::ReceiveQueue;
use crate::command_error::{CommandError, refuse};

/// States of raw send and receive queues.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum WqState {
    /// After creation.
    Reset = 0,
    /// The queue sends or receives.
    Ready = 1,
    /// The queue flushes.
    Error = 3,
}

impl WqState {
    pub(crate) fn new(value: u64) -> Result<Self, CommandError> {
        match value {
            0 => Ok(Self::Reset),
            1 => Ok(Self::Ready),
            3 => Ok(Self::Error),
            other => refuse!(BadParam, "raw queue state {other}, only 0, 1 and 3 exist"),
        }
    }

    /// Checks a transition by command. A failed queue has to go back to reset first. A queue in
    /// reset may be moved to error: a raw packet queue pair before RTS has such a send queue.
    pub(crate) fn check_transition(self, to: Self) -> Result<(), CommandError> {
        match (self, to) {
            (Self::Error, Self::Ready) => {
                refuse!(
                    BadResourceState,
                    "a raw queue cannot go from {self:?} to {to:?}, reset it first"
                )
            }
            _ => Ok(()),
        }
    }
}

/// A raw receive queue.
pub struct Rq {
    pub(crate) state: WqState,
    pub(crate) queue: ReceiveQueue,
    pub(crate) umems: Vec<u32>,
    pub(crate) context: Bits<rqc, Vec<u8>>,
    pub(crate) pd: u32,
}
