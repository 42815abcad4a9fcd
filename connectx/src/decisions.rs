//! Decisions drawn from a seed: the same seed and the same calls make the same decisions.

/// A generator of decisions: SplitMix64.
#[derive(Clone, Debug)]
pub struct Decisions {
    state: u64,
    /// The number of decisions so far.
    drawn: u64,
}

impl Decisions {
    /// The decisions of a seed.
    pub fn new(seed: u64) -> Decisions {
        Decisions { state: seed, drawn: 0 }
    }

    fn next(&mut self) -> u64 {
        self.drawn += 1;
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.state;
        word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ word >> 31
    }

    /// A number below `bound`, which is not 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        // A slight preference for small numbers is no harm.
        self.next() % bound
    }

    /// Draws whether an event that happens in this share of all cases happens now. Draws nothing if the share is 0.
    pub fn happens(&mut self, share: f64) -> bool {
        // A word's upper 53 bits, as a fraction.
        share > 0.0 && ((self.next() >> 11) as f64) < share * (1u64 << 53) as f64
    }

    /// The number of decisions so far.
    pub fn drawn(&self) -> u64 {
        self.drawn
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_happen_at_the_given_share() {
        let mut decisions = Decisions::new(3);
        let happened = (0..10_000).filter(|_| decisions.happens(0.25)).count();
        assert!((2_300..2_700).contains(&happened), "{happened}");
        assert!((0..100).all(|_| decisions.happens(1.0)));
        let before = decisions.drawn();
        assert!(!decisions.happens(0.0));
        assert_eq!(decisions.drawn(), before);
    }

    #[test]
    fn one_seed_makes_the_same_decisions_and_another_one_others() {
        let draw = |seed| {
            let mut decisions = Decisions::new(seed);
            (0..20).map(|_| decisions.below(10)).collect::<Vec<_>>()
        };
        assert_eq!(draw(7), draw(7));
        assert_ne!(draw(7), draw(8));
        assert!(draw(7).iter().all(|drawn| *drawn < 10));
    }
}
