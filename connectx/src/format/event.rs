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

/// An event of an EQ that has no memory, as [`create_event_queue`] makes it.
///
/// [`create_event_queue`]: crate::function::Function::create_event_queue
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Event {
    /// Number of the EQ.
    pub eqn: u32,
    /// Type of the event, [`COMPLETION`] for one.
    pub kind: u8,
    /// Subtype; a change of the port has one.
    pub sub_type: u8,
    /// `event_data` of the EQE.
    pub data: [u8; 28],
}

/// The object that an event is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Subject {
    /// A CQ.
    Cq(u32),
    /// An SRQ.
    Srq(u32),
    /// A queue pair.
    Qp(u32),
    /// A raw send queue.
    Sq(u32),
    /// A raw receive queue.
    Rq(u32),
    /// A port.
    Port(u8),
    /// The function.
    Function,
}

impl Event {
    /// The object that the event is about.
    pub fn subject(&self) -> Subject {
        let word = |at: usize| {
            let data = &self.data;
            u32::from_be_bytes([data[at], data[at + 1], data[at + 2], data[at + 3]]) & 0xff_ffff
        };
        match (self.kind, self.data[20]) {
            (COMPLETION, _) => Subject::Cq(word(24)),
            (CQ_ERROR, _) => Subject::Cq(word(0)),
            (SRQ_LIMIT, _) => Subject::Srq(word(24)),
            (PORT_CHANGE, _) => Subject::Port(self.data[8] >> 4),
            (COMMAND | PAGE_REQUEST, _) => Subject::Function,
            (_, queue) if queue == QueueType::Receive as u8 => Subject::Rq(word(24)),
            (_, queue) if queue == QueueType::Send as u8 => Subject::Sq(word(24)),
            _ => Subject::Qp(word(24)),
        }
    }
}
