//! Lists of entries of one length.

use zerocopy::FromBytes;

/// The entries of `N` bytes that `bytes` begins with; a shorter rest is left out.
pub(crate) fn chunks<const N: usize>(bytes: &[u8]) -> &[[u8; N]] {
    <[[u8; N]]>::ref_from_prefix(bytes).map_or(&[], |(entries, _)| entries)
}

#[cfg(test)]
mod tests {
    use super::chunks;

    #[test]
    fn a_rest_is_left_out() {
        assert_eq!(chunks::<2>(&[1, 2, 3, 4, 5]), [[1, 2], [3, 4]]);
        assert!(chunks::<8>(&[1; 7]).is_empty() && chunks::<8>(&[]).is_empty());
    }
}
