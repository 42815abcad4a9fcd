//! The content of checked messages: bytes that differ from message to message, and from anything
//! else that could be in a buffer.
//!
//! A client sends message `i` of a queue pair as [`fill`] makes it from the queue pair's first PSN
//! and `i`; the server sends back each message as it came. rdma-core's programs send the same bytes
//! all the time: see [`PLAIN`].

use uverbs::Psn;

/// The content of receive buffers before a message arrives. No byte of a message has this value, so
/// that a byte that the device did not write is noticed.
pub(crate) const POISON: u8 = 0xdb;

/// The byte that rdma-core's rc, uc and ud programs fill their buffer with. Their srq program fills
/// it with zeros, and with validation all of them set the first byte of each page to zero.
pub(crate) const PLAIN: u8 = 0x7b;

const _: () = assert!(PLAIN < 0x80 && POISON != PLAIN && POISON != 0);

/// Bytes of a page: the first byte of each is zero, as rdma-core's programs expect with `-c`.
const PAGE: usize = 4096;

/// Steps of the generator: the golden ratio and the two multipliers of the 64-bit finaliser of
/// SplitMix.
const STEPS: [u64; 3] = [0x9e37_79b9_7f4a_7c15, 0xbf58_476d_1ce4_e5b9, 0x94d0_49bb_1331_11eb];

/// A byte that differs from the expected one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Wrong {
    pub(crate) offset: usize,
    pub(crate) expected: u8,
    pub(crate) found: u8,
}

/// Fills `message` with message `index` of the queue pair whose first PSN is `psn`.
pub(crate) fn fill(message: &mut [u8], psn: Psn, index: u64) {
    let key = mix(u64::from(psn.0) << 40 ^ index);
    for (place, word) in (0u64..).zip(message.chunks_mut(8)) {
        let bytes = mix(key ^ place.wrapping_mul(STEPS[0])).to_le_bytes();
        word.copy_from_slice(&bytes[..word.len()]);
        for byte in word {
            if *byte == POISON {
                *byte ^= 0xff;
            }
        }
    }
    if message.len() > 1 {
        message.iter_mut().step_by(PAGE).for_each(|first| *first = 0);
    }
    // The second byte tells such a message from those of a client that does not validate; of a
    // single byte, the first.
    if let Some(mark) = message.iter_mut().take(2).next_back() {
        *mark |= 0x80;
        if *mark == POISON {
            *mark ^= 0x01;
        }
    }
}

fn mix(mut value: u64) -> u64 {
    value = value.wrapping_add(STEPS[0]);
    value = (value ^ value >> 30).wrapping_mul(STEPS[1]);
    value = (value ^ value >> 27).wrapping_mul(STEPS[2]);
    value ^ value >> 31
}

/// Compares two messages; the error is the first byte that differs.
pub(crate) fn compare(expected: &[u8], found: &[u8]) -> Result<(), Wrong> {
    if expected == found {
        return Ok(());
    }
    let differing = expected.iter().zip(found).position(|(expected, found)| expected != found);
    match differing {
        Some(offset) => Err(Wrong { offset, expected: expected[offset], found: found[offset] }),
        None => Ok(()),
    }
}

/// Checks a message of a client that does not validate, or is rdma-core's: `plain` throughout,
/// except that the first byte of each page may be zero.
pub(crate) fn check_plain(found: &[u8], plain: u8) -> Result<(), Wrong> {
    for (offset, &byte) in found.iter().enumerate() {
        if byte != plain && !(byte == 0 && offset % PAGE == 0) {
            return Err(Wrong { offset, expected: plain, found: byte });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(psn: u32, index: u64, length: usize) -> Vec<u8> {
        let mut message = vec![0; length];
        fill(&mut message, Psn(psn), index);
        message
    }

    #[test]
    fn no_byte_is_poison_and_none_is_plain_throughout() {
        for index in 0..2000 {
            let long = message(0x12_3456, index, 100);
            assert!(!long.contains(&POISON));
            assert!(long[1] >= 0x80);
            assert!(message(0x12_3456, index, 1)[0] >= 0x80);
        }
    }

    #[test]
    fn pages_start_as_the_peers_expect() {
        let message = message(3, 4, 3 * PAGE + 1);
        for page in message.chunks(PAGE) {
            assert_eq!(page[0], 0);
        }
        assert!(message.iter().filter(|&&byte| byte == 0).count() < 200);
    }

    #[test]
    fn messages_differ_by_index_and_by_queue_pair() {
        for index in 0..1000 {
            assert_ne!(message(5, index, 16), message(5, index + 1, 16));
            assert_ne!(message(5, index, 16), message(6, index, 16));
        }
    }

    #[test]
    fn a_shifted_message_is_another() {
        let whole = message(1, 1, 4096);
        for shift in [1, 8, 1024, 2048] {
            assert!(compare(&whole[..1024], &whole[shift..shift + 1024]).is_err(), "{shift}");
        }
    }

    #[test]
    fn a_short_message_is_the_beginning_of_a_long_one() {
        assert_eq!(message(9, 3, 13), message(9, 3, 64)[..13]);
    }

    #[test]
    fn the_first_wrong_byte_is_named() {
        let expected = message(1, 2, 4096);
        let mut found = expected.clone();
        found[4000] ^= 1;
        found[4090] ^= 1;
        let wrong = compare(&expected, &found).unwrap_err();
        assert_eq!((wrong.offset, wrong.expected), (4000, expected[4000]));
        assert_eq!(wrong.found, expected[4000] ^ 1);
        assert_eq!(compare(&expected, &expected), Ok(()));
    }

    #[test]
    fn content_of_messages_of_rdma_core_is_known() {
        let mut sent = vec![PLAIN; 8193];
        assert_eq!(check_plain(&sent, PLAIN), Ok(()));
        for page in [0, 4096, 8192] {
            sent[page] = 0;
        }
        assert_eq!(check_plain(&sent, PLAIN), Ok(()));
        sent[1] = 0;
        let wrong = Wrong { offset: 1, expected: PLAIN, found: 0 };
        assert_eq!(check_plain(&sent, PLAIN), Err(wrong));
        assert!(check_plain(&[0; 10000], 0).is_ok());
    }
}
