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
    unsafe {
        asm!(
            "2:",
            "dec {left:e}",
            "jnz 2b",
            left = inout(reg) LENGTH / 2 => _,
            options(nomem, nostack)
        );
    }
    start.elapsed().as_nanos() as f64 / f64::from(LENGTH)
}

/// Whether a nanosecond is an instruction at the moment.
pub fn counts_instructions() -> bool {
    (0.98..=1.05).contains(&nanoseconds_per_instruction())
}

/// Lets a device work for a moment without going to sleep: where the clock counts instructions,
/// time that is slept away passes at once.
pub fn linger(rounds: u32) {
    for round in 0..rounds {
        black_box(round);
    }
}
