//! Bytes that no healthy kernel, device or peer sends: random ones, and valid ones that were mutated. Every
//! decoder of them returns a value or an error, and never panics.
//!
//! An input depends on the seed, the name of its test and its number alone. `UVERBS_HOSTILE_INPUTS` sets how many a
//! cheap decoder gets (a full run sets 200 000), `UVERBS_HOSTILE_SEED` another seed, and `UVERBS_HOSTILE_BYTES`, as a
//! failure prints them, a single input.

mod answers;
mod completions;
mod events;

use arbitrary::Unstructured;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Inputs of a cheap decoder unless the environment says otherwise.
const INPUTS: u32 = if cfg!(miri) { 20 } else { 2_000 };
/// The longest random input.
const LONGEST: usize = 512;
/// Numbers at which lengths, counts and shifts go wrong.
const EDGES: [u64; 12] = [
    0,
    1,
    0x7f,
    0x80,
    0xff,
    0x7fff,
    0xffff,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_ffff,
    1 << 63,
    u64::MAX,
];

/// A generator of random numbers with a seed (splitmix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() >> 16) as usize % end.max(1)
    }

    fn bytes(&mut self, length: usize) -> Vec<u8> {
        (0..length).map(|_| self.next() as u8).collect()
    }

    /// Overwrites a part of `bytes`: a bit, random bytes, or an [edge](EDGES) in either byte order.
    fn damage(&mut self, bytes: &mut [u8]) {
        let at = self.below(bytes.len());
        match self.below(4) {
            0 => overwrite(bytes, at, &[bytes.get(at).map_or(0, |byte| byte ^ 1 << self.below(8))]),
            1 => {
                let length = 1 + self.below(8);
                overwrite(bytes, at, &self.bytes(length));
            }
            order => {
                let (edge, width) = (EDGES[self.below(EDGES.len())], 1 << self.below(4));
                // Fields are aligned.
                let at = at / width * width;
                match order {
                    2 => overwrite(bytes, at, &edge.to_le_bytes()[..width]),
                    _ => overwrite(bytes, at, &edge.to_be_bytes()[8 - width..]),
                }
            }
        }
    }

    /// A mutation of a known input, or random bytes.
    fn input(&mut self, known: &[Vec<u8>]) -> Vec<u8> {
        if known.is_empty() || self.below(8) == 0 {
            let length = self.below(LONGEST);
            return self.bytes(length);
        }
        let mut input = known[self.below(known.len())].clone();
        for _ in 0..=self.below(4) {
            let at = self.below(input.len() + 1);
            match self.below(8) {
                0 => {
                    let fresh = self.below(16);
                    let fresh = self.bytes(fresh);
                    input.splice(at..at, fresh);
                }
                1 => input.truncate(at),
                2 => {
                    let other = &known[self.below(known.len())];
                    input.truncate(at);
                    input.extend(&other[self.below(other.len())..]);
                }
                3 => {
                    let end = input.len().min(at + 1 + self.below(16));
                    input.drain(at..end);
                }
                _ => self.damage(&mut input),
            }
        }
        input
    }
}

/// Damages the answers of a kernel, as the bytes of an input say.
#[derive(Debug)]
pub(crate) struct Damage {
    bytes: Vec<u8>,
    used: usize,
    /// Answers before the first one that is damaged.
    healthy: u8,
}

impl Damage {
    /// An input without bytes damages no answer.
    pub(crate) fn new(input: &[u8]) -> Damage {
        // The test's program gets some 60 answers or more.
        let healthy = input.first().map_or(0, |first| first / 4);
        Damage { bytes: input.into(), used: 1, healthy }
    }

    /// Damages an answer, or leaves it as it is.
    pub(crate) fn apply(&mut self, answer: &mut [u8]) {
        if let Some(left) = self.healthy.checked_sub(1) {
            self.healthy = left;
            return;
        }
        let mut u = Unstructured::new(self.bytes.get(self.used..).unwrap_or_default());
        let left = u.len();
        // When the input is used up, later answers are not damaged.
        let _ = damage(&mut u, answer);
        self.used += left - u.len();
    }
}

fn damage(u: &mut Unstructured<'_>, answer: &mut [u8]) -> arbitrary::Result<()> {
    if answer.is_empty() || u.is_empty() || !u.ratio(1, 3)? {
        return Ok(());
    }
    for _ in 0..u.int_in_range(1..=3)? {
        let at = u.choose_index(answer.len())?;
        match u.int_in_range(0..=5)? {
            0 => overwrite(answer, at, &[u.arbitrary()?]),
            1 => answer.fill(u.arbitrary()?),
            // Most fields are words.
            2..=4 => {
                let edge = u.choose(&[0, 1, 0x7fff_ffff, 0x8000_0000, u32::MAX])?;
                overwrite(answer, at & !3, &edge.to_ne_bytes());
            }
            _ => overwrite(answer, at & !3, &u.arbitrary::<[u8; 4]>()?),
        }
    }
    Ok(())
}

fn overwrite(bytes: &mut [u8], at: usize, with: &[u8]) {
    bytes.iter_mut().skip(at).zip(with).for_each(|(byte, with)| *byte = *with);
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hex(digits: &str) -> Vec<u8> {
    let pair = |at| u8::from_str_radix(&digits[at..at + 2], 16).expect("hexadecimal digits");
    (0..digits.len()).step_by(2).map(pair).collect()
}

/// The numbers of inputs that a test accepted and refused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    pub(crate) taken: u32,
    pub(crate) refused: u32,
}

/// Runs `decode` on mutations of `known` inputs and on random ones; it answers whether it took the input. A decoder
/// that costs as much as `cost` cheap ones gets fewer.
pub(crate) fn explore(
    name: &str,
    cost: u32,
    known: &[Vec<u8>],
    decode: impl Fn(&[u8]) -> bool,
) -> Tally {
    if let Ok(digits) = std::env::var("UVERBS_HOSTILE_BYTES") {
        let taken = decode(&from_hex(&digits));
        return Tally { taken: taken.into(), refused: (!taken).into() };
    }
    // Known inputs as they are: a decoder that refuses them is not tested by mutations of them.
    for input in known {
        assert!(decode(input), "{name} refuses a valid input: {}", hex(input));
    }
    let seed = number("UVERBS_HOSTILE_SEED").unwrap_or(1);
    let inputs = number("UVERBS_HOSTILE_INPUTS").map_or(INPUTS, |inputs| inputs as u32) / cost;
    let base = name
        .bytes()
        .fold(seed, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
    let mut tally = Tally::default();
    for number in 0..inputs.max(1) {
        let input = Random(base ^ u64::from(number) << 32).input(known);
        match catch_unwind(AssertUnwindSafe(|| decode(&input))) {
            Ok(true) => tally.taken += 1,
            Ok(false) => tally.refused += 1,
            Err(_) => panic!(
                "{name} panics on input {number} of seed {seed}: UVERBS_HOSTILE_BYTES={}",
                hex(&input)
            ),
        }
    }
    println!("{name}: {tally:?}");
    tally
}

#[test]
fn a_decoder_that_panics_fails_with_the_input_that_does_it() {
    // A length, and as many bytes.
    let known = [b"\x03abc".to_vec()];
    let careless = |input: &[u8]| match input.split_first() {
        Some((length, bytes)) => !bytes[..usize::from(*length)].is_empty(),
        None => false,
    };
    let failed = catch_unwind(|| explore("careless", 1, &known, careless)).unwrap_err();
    let text = failed.downcast_ref::<String>().expect("a text");
    let (_, digits) = text.split_once("UVERBS_HOSTILE_BYTES=").expect("the input");
    catch_unwind(|| careless(&from_hex(digits))).unwrap_err();
    // The same inputs each time.
    let again = catch_unwind(|| explore("careless", 1, &known, careless)).unwrap_err();
    assert_eq!(again.downcast_ref::<String>(), Some(text));
    let seen = Cell::new(0u64);
    let sum = |input: &[u8]| {
        seen.set(
            input.iter().fold(seen.get(), |sum, byte| sum.wrapping_mul(31) + u64::from(*byte)),
        );
        true
    };
    let first = (explore("sum", 1, &[], sum), seen.replace(0));
    assert_eq!((explore("sum", 1, &[], sum), seen.get()), first);
}
