//! The layout of BAR0.
//!
//! Pairs with `uar.c` of mlx5_core and with the offsets in the virtio, TLP and device memory
//! capabilities. The initialization segment begins at 0.

use std::ops::RangeInclusive;

/// Bytes of BAR0.
pub const SIZE: u64 = 32 << 20;
/// Bytes of a UAR page, of a VAR page and of a page of device memory.
pub const PAGE: u64 = 4096;

/// Offset of the MSI-X table, between the initialization segment and the first UAR page.
pub const MSIX_TABLE: u32 = 0x6000;
/// Offset of the MSI-X pending bit array.
pub const MSIX_PBA: u32 = 0x7000;

/// Page numbers of the UAR pages: they end where the VAR pages begin.
pub const UARS: RangeInclusive<u32> = 16..=(VAR_OFFSET / PAGE) as u32 - 1;

/// Offset of the VAR pages of virtio emulation.
pub const VAR_OFFSET: u64 = 16 << 20;
/// Bytes of the VAR pages of virtio emulation: 1,024 pages.
pub const VAR_BYTES: u64 = 4 << 20;
/// log2 of the bytes from one VAR page to the next.
pub const LOG_VAR_STRIDE: u64 = 12;

/// VAR pages of TLP emulation.
pub const TLP_PAGES: u64 = 8;
/// Offset of the VAR pages of TLP emulation, behind those of virtio emulation.
pub const TLP_OFFSET: u64 = VAR_OFFSET + VAR_BYTES;

/// Offset of device memory (MEMIC).
pub const MEMIC_OFFSET: u64 = 24 << 20;
/// Bytes of BAR0 that are set aside for device memory.
pub const MEMIC_BYTES: u64 = 256 << 10;
