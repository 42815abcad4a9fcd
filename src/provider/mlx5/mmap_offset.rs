//! Offsets for `mmap`, in which the driver encodes a command and an index.
//!
//! Pairs with `get_command` and `get_extended_index` in `hw/mlx5/main.c`.

/// Bits of an offset's page number that hold the low part of an index, and those for the command.
const INDEX_BITS: u32 = 8;
const COMMAND_BITS: u32 = 8;

/// The offset of a command and an index, with system pages of `page` bytes.
pub(crate) fn mmap_offset(command: u32, index: u32, page: usize) -> u64 {
    let (high, low) = (u64::from(index >> INDEX_BITS), u64::from(index & ((1 << INDEX_BITS) - 1)));
    let command = u64::from(command) << INDEX_BITS;
    (high << (INDEX_BITS + COMMAND_BITS) | command | low) * page as u64
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn an_index_is_on_both_sides_of_the_command_with_pages_of_every_size() {
        for page in [4096, 16384, 65536] {
            for (index, number) in [(0, 0x0800), (0x12, 0x0812), (0xabcd, 0x00ab_08cd)] {
                assert_eq!(mmap_offset(8, index, page), number * page as u64);
            }
            assert_eq!(mmap_offset(5, 0, page), 0x0500 * page as u64);
        }
    }
}
