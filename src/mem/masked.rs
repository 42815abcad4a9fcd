//! Arrays that are as long as a queue, a power of two, and that any number finds its place in.

/// `2^n` values; an index is taken modulo their number, so that none needs a check.
#[derive(Debug)]
pub(crate) struct Masked<T> {
    values: Box<[T]>,
}

impl<T: Default> Masked<T> {
    /// At least `count` values, rounded up to a power of two.
    pub(crate) fn new(count: u32) -> Masked<T> {
        let count = count.max(1).next_power_of_two();
        Masked { values: (0..count).map(|_| T::default()).collect() }
    }
}

impl<T> Masked<T> {
    /// The value at `index`, modulo their number.
    #[inline(always)]
    pub(crate) fn at(&self, index: u32) -> &T {
        let index = index as usize & (self.values.len() - 1);
        // SAFETY: `new` made at least one value, so that the mask is less than their number.
        unsafe { self.values.get_unchecked(index) }
    }

    /// How many there are.
    pub(crate) fn len(&self) -> u32 {
        self.values.len() as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_index_has_a_place() {
        let values = Masked::<u32>::new(5);
        assert_eq!(values.len(), 8);
        for index in [0, 7, 8, u32::MAX] {
            assert!(std::ptr::eq(values.at(index), values.at(index & 7)));
        }
        assert_eq!(Masked::<u8>::new(0).len(), 1);
    }
}
