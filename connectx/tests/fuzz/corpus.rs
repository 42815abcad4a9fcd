//! Inputs from a seed, and the corpus of inputs that showed new behaviour.
//!
//! There is no instrumentation. Each target returns the traits of a run that are visible from
//! outside. An input with a trait that no other input had is kept and mutated further.

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Traits of a run: a kind and two numbers each.
pub(crate) type Traits = BTreeSet<(u32, u32, u32)>;

/// The longest random input.
const LONGEST: usize = 4096;
/// How many inputs of a target the corpus holds, and how long one may be.
const MOST_KEPT: usize = 24;
const LARGEST_KEPT: usize = 512;

/// A random generator with a seed (xorshift64*).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() >> 16) as usize % end.max(1)
    }

    fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| (self.next() >> 32) as u8).collect()
    }

    /// A mutation of a known input, or a random one.
    fn input(&mut self, known: &[Vec<u8>]) -> Vec<u8> {
        if known.is_empty() || self.below(3) == 0 {
            let len = 16 + self.below(LONGEST);
            return self.bytes(len);
        }
        let mut input = known[self.below(known.len())].clone();
        for _ in 0..=self.below(4) {
            let at = self.below(input.len());
            match self.below(5) {
                0 => input[at..].iter_mut().take(1).for_each(|byte| *byte ^= 1 << (at & 7)),
                1 => {
                    let len = 1 + self.below(8);
                    let fresh = self.bytes(len);
                    input[at..].iter_mut().zip(fresh).for_each(|(byte, fresh)| *byte = fresh);
                }
                2 => {
                    let len = 1 + self.below(64);
                    let fresh = self.bytes(len);
                    input.splice(at..at, fresh);
                }
                3 => {
                    let other = &known[self.below(known.len())];
                    let from = self.below(other.len());
                    input.truncate(at);
                    input.extend(&other[from..]);
                }
                _ => {
                    let end = (at + 1 + self.below(32)).min(input.len());
                    input.drain(at.min(end)..end);
                }
            }
            input.truncate(2 * LONGEST);
        }
        input
    }
}

fn number(name: &str) -> Option<f64> {
    std::env::var(name).ok()?.parse().ok()
}

fn directory(target: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus").join(target)
}

fn keep(target: &str, input: &[u8]) -> PathBuf {
    let name = input.iter().fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3)
    });
    let path = directory(target).join(format!("{name:016x}.bin"));
    std::fs::create_dir_all(directory(target)).unwrap();
    std::fs::write(&path, input).unwrap();
    path
}

/// Shortens an input while it still shows all traits in `new`.
fn shorten(input: &[u8], new: &Traits, run: fn(&[u8]) -> Traits) -> Vec<u8> {
    let mut best = input.to_vec();
    let mut cut = best.len() / 2;
    while cut > 0 {
        while best.len() > cut && new.is_subset(&run(&best[..best.len() - cut])) {
            best.truncate(best.len() - cut);
        }
        cut /= 2;
    }
    best
}

/// Runs the corpus of a target, then new inputs for a while.
pub(crate) fn explore(target: &str, run: fn(&[u8]) -> Traits, seconds: f64) {
    let mut paths: Vec<PathBuf> = std::fs::read_dir(directory(target))
        .map(|entries| entries.flatten().map(|entry| entry.path()).collect())
        .unwrap_or_default();
    paths.sort();
    let mut seen = Traits::new();
    let mut known = Vec::new();
    for path in &paths {
        println!("{}", path.display());
        let input = std::fs::read(path).unwrap();
        seen.extend(run(&input));
        known.push(input);
    }
    let (kept, before) = (known.len(), seen.len());
    let seconds = Duration::from_secs_f64(number("CONNECTX_FUZZ_SECONDS").unwrap_or(seconds));
    let seed = number("CONNECTX_FUZZ_SEED").map_or(1, |seed| seed as u64).max(1);
    let keeps = std::env::var_os("CONNECTX_FUZZ_KEEP").is_some();
    let mut random = Random(seed);
    let start = Instant::now();
    let mut runs = 0u64;
    let mut files = kept;
    while start.elapsed() < seconds {
        let input = random.input(&known);
        let Ok(traits) = catch_unwind(AssertUnwindSafe(|| run(&input))) else {
            panic!("{target}: kept as {}", keep(target, &input).display());
        };
        runs += 1;
        let new: Traits = traits.difference(&seen).copied().collect();
        if new.is_empty() {
            continue;
        }
        seen.extend(&new);
        if !keeps || files == MOST_KEPT {
            known.push(input);
            continue;
        }
        let short = shorten(&input, &new, run);
        if short.len() <= LARGEST_KEPT {
            keep(target, &short);
            files += 1;
        }
        known.push(short);
    }
    println!(
        "{target}: {kept} kept inputs showed {before} traits, {runs} from seed {seed} brought {}",
        seen.len() - before
    );
    assert!(runs > 0);
}
