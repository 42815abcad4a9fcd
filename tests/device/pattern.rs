//! Bytes that identify their message, and their place in it.

/// The seed of the bytes in memory before data arrives.
pub(crate) const POISON: u64 = 0xdead_dead_dead_dead;

/// The pattern of a message: depends on every bit of `seed` and on the position.
pub(crate) fn bytes(seed: u64, length: usize) -> Vec<u8> {
    // A linear congruential step over a seed that is mixed first, so that neighbours differ.
    let mut state = (seed ^ (seed >> 31)).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ seed;
    (0..length)
        .map(|_| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        })
        .collect()
}

/// Fails, naming the first difference, unless `found` is the pattern of `seed`.
#[track_caller]
pub(crate) fn check(found: &[u8], seed: u64) {
    let expected = bytes(seed, found.len());
    if let Some(place) = found.iter().zip(&expected).position(|(found, expected)| found != expected)
    {
        let poisoned = found == bytes(POISON, found.len());
        let what = if poisoned { "nothing arrived" } else { "other data arrived" };
        panic!(
            "pattern {seed:#x}: {what}; byte {place} of {} is {:#04x} in place of {:#04x}",
            found.len(),
            found[place],
            expected[place]
        );
    }
}
