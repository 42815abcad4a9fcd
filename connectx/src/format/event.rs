//! Types of events in event queue entries (EQEs), `MLX5_EVENT_TYPE_*`.
#![allow(missing_docs, reason = "the driver's names")]

pub const COMPLETION: u8 = 0x00;
pub const CQ_ERROR: u8 = 0x04;
pub const WQ_CATASTROPHIC: u8 = 0x05;
pub const PORT_CHANGE: u8 = 0x09;
pub const COMMAND: u8 = 0x0a;
pub const PAGE_REQUEST: u8 = 0x0b;
pub const WQ_INVALID_REQUEST: u8 = 0x10;
pub const WQ_ACCESS_ERROR: u8 = 0x11;
pub const LAST_WQE_REACHED: u8 = 0x13;
pub const SRQ_LIMIT: u8 = 0x14;

/// Kinds of queues in events, `MLX5_EVENT_QUEUE_TYPE_*`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum QueueType {
    Pair = 0,
    Receive = 1,
    Send = 2,
}
