//! Contents that differ from any other: each word depends on a seed and on its place.

/// Fills `bytes`, which are `offset` bytes from the beginning of the namespace, a multiple of eight.
pub(crate) fn fill(seed: u64, offset: u64, bytes: &mut [u8]) {
    for (word, place) in bytes.chunks_mut(8).zip(offset / 8..) {
        let value = mix(seed ^ mix(place)).to_le_bytes();
        word.iter_mut().zip(value).for_each(|(byte, value)| *byte = value);
    }
}

/// A byte that differs from the written one.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Difference {
    /// Bytes from the beginning of the namespace.
    pub(crate) offset: u64,
    pub(crate) found: u8,
    pub(crate) expected: u8,
}

/// The first byte that differs from the pattern; `scratch` is as long as `bytes`.
pub(crate) fn compare(
    seed: u64,
    offset: u64,
    bytes: &[u8],
    scratch: &mut [u8],
) -> Option<Difference> {
    fill(seed, offset, scratch);
    let mut places = bytes.iter().zip(scratch.iter()).zip(offset..);
    let ((found, expected), offset) = places.find(|((found, expected), _)| found != expected)?;
    Some(Difference { offset, found: *found, expected: *expected })
}

/// The finalizer of SplitMix64: each bit of the result depends on each bit of the value.
fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pattern_does_not_depend_on_the_sizes_of_requests() {
        let (mut whole, mut parts) = ([0; 4096], [0; 4096]);
        fill(1, 1 << 40, &mut whole);
        for (part, at) in parts.chunks_mut(512).zip((1 << 40..).step_by(512)) {
            fill(1, at, part);
        }
        assert_eq!(whole, parts);
    }

    #[test]
    fn other_seeds_and_other_places_differ() {
        let (mut bytes, mut scratch) = ([0; 512], [0; 512]);
        fill(1, 512, &mut bytes);
        assert_eq!(compare(1, 512, &bytes, &mut scratch), None);
        assert!(compare(2, 512, &bytes, &mut scratch).is_some());
        assert!(compare(1, 1024, &bytes, &mut scratch).is_some());
        bytes[100] ^= 0x10;
        let difference = compare(1, 512, &bytes, &mut scratch).unwrap();
        assert_eq!((difference.offset, difference.found ^ difference.expected), (612, 0x10));
    }
}
