//! Time, and whether it can be trusted.
//!
//! In a machine whose clock counts instructions one nanosecond is one instruction. Whether that is
//! so shows a loop of known length.

use std::arch::asm;
use std::hint::black_box;
use std::time::Instant;

/// Instructions of the loop that is timed.
const LENGTH: u32 = 400_000;

/// Nanoseconds per instruction of a loop whose length is known.
pub fn nanoseconds_per_instruction() -> f64 {
    let start = Instant::now();
    // SAFETY: it counts a register down to zero and touches nothing else.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        asm!(
            "2:",
            "dec {left:e}",
            "jnz 2b",
            left = inout(reg) LENGTH / 2 => _,
            options(nomem, nostack)
        );
    }
    // SAFETY: as above.
    #[cfg(target_arch = "aarch64")]
    unsafe {
        asm!(
            "2:",
            "subs {left:w}, {left:w}, #1",
            "b.ne 2b",
            left = inout(reg) LENGTH / 2 => _,
            options(nomem, nostack)
        );
    }
    start.elapsed().as_nanos() as f64 / f64::from(LENGTH)
}

/// Whether a nanosecond is an instruction at the moment.
pub fn counts_instructions() -> bool {
    is_counting(nanoseconds_per_instruction())
}

fn is_counting(nanoseconds: f64) -> bool {
    (0.98..=1.05).contains(&nanoseconds)
}

/// Lets a device work for a moment without going to sleep: where the clock counts instructions,
/// time that is slept away passes at once.
pub fn linger(rounds: u32) {
    for round in 0..rounds {
        black_box(round);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_nanosecond_is_about_an_instruction() {
        assert!([0.98, 1.0, 1.04, 1.05].map(is_counting).iter().all(|counts| *counts));
        assert!(![0.1, 0.979, 1.051, 2.0, f64::NAN].map(is_counting).contains(&true));
        // Whatever executes them, and however often it is kept from that.
        assert!((0.01..1e5).contains(&nanoseconds_per_instruction()));
    }
}
