//! VAR pages: doorbells of virtio queues and of emulated TLPs, part of BAR0.
//!
//! Pairs with the virtio and the TLP emulation capability, from which mlx5_ib takes place and stride
//! and then allocates pages by itself. The pages are memory that keeps what was written last.

/// Where the pages begin in BAR0.
pub const OFFSET: u64 = 16 << 20;
/// How much room they have: 1,024 pages.
pub const BYTES: u64 = 4 << 20;

/// Pages for TLPs, behind those for virtio.
pub const TLP_PAGES: u64 = 8;
/// Where they begin in BAR0.
pub const TLP_OFFSET: u64 = OFFSET + BYTES;

/// The pages.
pub struct VarPages {
    bytes: Vec<u8>,
}

impl VarPages {
    /// Zeros.
    pub fn new() -> Self {
        Self { bytes: vec![0; (BYTES + TLP_PAGES * 4096) as usize] }
    }

    /// Reads from `offset` bytes after [`OFFSET`]; what is outside reads zero.
    pub fn read(&self, offset: u64, to: &mut [u8]) {
        for (at, byte) in (offset..).zip(to) {
            *byte = self.bytes.get(at as usize).copied().unwrap_or(0);
        }
    }

    /// Writes to `offset` bytes after [`OFFSET`].
    pub fn write(&mut self, offset: u64, from: &[u8]) {
        for (at, byte) in (offset..).zip(from) {
            if let Some(to) = self.bytes.get_mut(at as usize) {
                *to = *byte;
            }
        }
    }
}

impl Default for VarPages {
    fn default() -> Self {
        Self::new()
    }
}
