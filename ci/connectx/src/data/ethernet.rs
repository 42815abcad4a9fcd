//! Ethernet frames, from raw send queues to raw receive queues.
//!
//! Pairs with mlx5e and raw packet queue pairs.

/// The Internet checksum of `bytes`, continued from `sum`.
pub(crate) fn checksum(bytes: &[u8], sum: u32) -> u16 {
    let (words, odd) = bytes.as_chunks::<2>();
    let mut sum =
        words.iter().fold(u64::from(sum), |sum, word| sum + u64::from(u16::from_be_bytes(*word)));
    if let [last] = odd {
        sum += u64::from(*last) << 8;
    }
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_of_rfc_1071() {
        assert_eq!(checksum(&[0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7], 0), !0xddf2);
    }
}
