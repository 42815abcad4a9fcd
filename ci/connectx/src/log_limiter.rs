//! Limits how often a line is logged.
//!
//! A guest can cause the same line with every doorbell. Without a limit the log would fill the
//! disk.

use std::collections::BTreeMap;

/// The number of times that a line is printed before most repetitions are left out.
const ALWAYS: u64 = 16;
/// The most lines that are told apart; the emulator has far fewer.
const MAX_LINES: usize = 4096;

/// Counts how often each line was logged. Lines that differ only in numbers are the same.
#[derive(Debug, Default)]
pub struct LogLimiter {
    seen: BTreeMap<String, u64>,
}

impl LogLimiter {
    /// How many times a line was logged, including this time, if it is to be printed: the first
    /// times, and then whenever the count is a power of two.
    pub fn count(&mut self, line: &str) -> Option<u64> {
        let words: String = line.chars().filter(|letter| !letter.is_ascii_hexdigit()).collect();
        if self.seen.len() >= MAX_LINES && !self.seen.contains_key(&words) {
            return None;
        }
        let count = self.seen.entry(words).or_default();
        *count = count.saturating_add(1);
        (*count <= ALWAYS || count.is_power_of_two()).then_some(*count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_lines_are_printed_at_powers_of_two() {
        let mut limiter = LogLimiter::default();
        let mut note = |number: u32| limiter.count(&format!("EQ {number:#x} is full"));
        let printed: Vec<_> = (0..100).filter_map(&mut note).filter(|n| *n > 14).collect();
        assert_eq!(printed, [15, 16, 32, 64]);
        assert_eq!(limiter.count("CQ 7 is full"), Some(1));
        let kinds = (1..2 * MAX_LINES).map(|length| "x".repeat(length));
        assert_eq!(kinds.filter_map(|line| limiter.count(&line)).count(), MAX_LINES - 2);
    }
}
