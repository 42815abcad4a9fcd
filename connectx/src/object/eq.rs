//! Event queues.

use super::buffer::Buffer;

/// Bytes of an EQE.
pub(crate) const EQE: u64 = 64;

/// An event queue.
pub struct Eq {
    /// `None`: the owner of the function takes the events as values.
    pub(crate) ring: Option<EqRing>,
    pub(crate) mask: [u64; 4],
}

/// The EQEs of an event queue in memory.
pub struct EqRing {
    pub(crate) buffer: Buffer,
    pub(crate) log_size: u32,
    pub(crate) producer: u32,
    pub(crate) consumer: u32,
    pub(crate) armed: bool,
    pub(crate) vector: usize,
    pub(crate) uar: u32,
    pub(crate) lost: u64,
}

impl Eq {
    pub(crate) fn wants(&self, kind: u8) -> bool {
        self.mask[usize::from(kind / 64)] >> (kind % 64) & 1 != 0
    }
}
