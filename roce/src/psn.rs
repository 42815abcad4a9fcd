//! Packet sequence numbers: 24 bits, compared as distances.
//!
//! From `psn_compare` of the kernel's `rxe_verbs.h` and `BTH_PSN_MASK` of `rxe_hdr.h`.

use core::fmt;

/// A packet sequence number.
///
/// Numbers wrap, so that there is no order: of two numbers, the one that is less than half of the space ahead is the
/// later one.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Psn(u32);

impl Psn {
    /// The bits of a number.
    pub const MASK: u32 = 0xff_ffff;
    /// Half of the space: a number that is at least so far ahead is behind.
    pub const HALF: u32 = 0x80_0000;

    /// The low 24 bits of `value`.
    pub const fn new(value: u32) -> Psn {
        Psn(value & Psn::MASK)
    }

    /// The number.
    pub const fn get(self) -> u32 {
        self.0
    }

    /// The number `count` packets later.
    pub const fn plus(self, count: u32) -> Psn {
        Psn::new(self.0.wrapping_add(count))
    }

    /// The number before this one.
    pub const fn before(self) -> Psn {
        Psn::new(self.0.wrapping_sub(1))
    }

    /// How many packets after `first` this one is, counted around the whole space.
    pub const fn since(self, first: Psn) -> u32 {
        self.0.wrapping_sub(first.0) & Psn::MASK
    }

    /// Whether this number comes before `other`.
    pub const fn is_before(self, other: Psn) -> bool {
        self.since(other) >= Psn::HALF
    }

    /// Whether this is one of the `count` numbers from `first` on.
    pub const fn is_within(self, first: Psn, count: u32) -> bool {
        self.since(first) < count
    }
}

impl fmt::Debug for Psn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#08x}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::Psn;

    #[test]
    fn the_later_number_is_less_than_half_of_the_space_ahead() {
        let last = Psn::new(Psn::MASK);
        assert_eq!(last.plus(1), Psn::new(0));
        assert_eq!(Psn::new(0).before(), last);
        assert!(last.is_before(Psn::new(0)));
        assert!(!Psn::new(0).is_before(last));
        assert!(!last.is_before(last));
        assert_eq!(Psn::new(3).since(last), 4);
        assert!(Psn::new(Psn::HALF).is_before(Psn::new(0)));
        assert!(!Psn::new(Psn::HALF - 1).is_before(Psn::new(0)));
    }

    #[test]
    fn a_range_holds_its_first_number_and_not_the_one_behind_its_last() {
        let first = Psn::new(Psn::MASK - 1);
        assert!(first.is_within(first, 1));
        assert!(Psn::new(1).is_within(first, 4));
        assert!(!Psn::new(2).is_within(first, 4));
        assert!(!first.before().is_within(first, 4));
    }
}
