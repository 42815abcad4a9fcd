//! VAR pages: doorbells of virtio queues and of emulated TLPs, part of BAR0.
//!
//! Pairs with the virtio and the TLP emulation capability, from which mlx5_ib takes place and stride
//! and then allocates pages by itself. The pages are memory ([`crate::bar`]) that keeps what was
//! written last.

/// Where the pages begin in BAR0.
pub const OFFSET: u64 = 16 << 20;
/// How much room they have: 1,024 pages.
pub const BYTES: u64 = 4 << 20;

/// Pages for TLPs, behind those for virtio.
pub const TLP_PAGES: u64 = 8;
/// Where they begin in BAR0.
pub const TLP_OFFSET: u64 = OFFSET + BYTES;
