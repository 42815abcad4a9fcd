//! Arrays with an element for each WQE of a ring.

use std::sync::Arc;

/// `2^n` values; an index is taken modulo their number, so that no index is out of bounds. Clones share the
/// array. Each clone keeps the address of the first value, so that an access is one load.
#[derive(Debug)]
pub(crate) struct RingArray<T> {
    base: *const T,
    mask: u32,
    values: Arc<[T]>,
}

// SAFETY: all access is to `values` by shared reference.
unsafe impl<T: Send + Sync> Send for RingArray<T> {}
// SAFETY: as above.
unsafe impl<T: Send + Sync> Sync for RingArray<T> {}

impl<T> Clone for RingArray<T> {
    fn clone(&self) -> Self {
        RingArray { base: self.base, mask: self.mask, values: self.values.clone() }
    }
}

/// `count` rounded up to a power of two, but at most 2^31.
pub(crate) fn ring_size(count: u32) -> u32 {
    count.clamp(1, 1 << 31).next_power_of_two()
}

impl<T: Default> RingArray<T> {
    /// As [`of`](Self::of).
    pub(crate) fn new(count: u32) -> RingArray<T> {
        RingArray::of(count, |_| T::default())
    }
}

impl<T> RingArray<T> {
    /// At least `count` values, rounded up to a power of two, but at most 2^31.
    pub(crate) fn of(count: u32, value: impl FnMut(u32) -> T) -> RingArray<T> {
        let count = ring_size(count);
        let values: Arc<[T]> = (0..count).map(value).collect();
        RingArray { base: values.as_ptr(), mask: count - 1, values }
    }

    /// The value at `index`, modulo their number.
    #[inline(always)]
    pub(crate) fn at(&self, index: u32) -> &T {
        // SAFETY: the array has `mask + 1` values.
        unsafe { self.get(index & self.mask) }
    }

    /// The value at `index`.
    ///
    /// # Safety
    ///
    /// The array has more than `index` values.
    #[inline(always)]
    pub(crate) unsafe fn get(&self, index: u32) -> &T {
        // SAFETY: the caller's promise.
        let value = unsafe { self.base.add(index as usize) };
        // SAFETY: inside `values`, which `self` holds and never lends mutably.
        unsafe { &*value }
    }

    /// The value at byte `offset`.
    ///
    /// # Safety
    ///
    /// `offset` is a multiple of a value's size, and less than the size of the array.
    #[inline(always)]
    pub(crate) unsafe fn at_byte(&self, offset: usize) -> &T {
        // SAFETY: the caller's promise.
        let value = unsafe { self.base.byte_add(offset) };
        // SAFETY: as in `get`.
        unsafe { &*value }
    }

    /// Replaces the value at `index`, modulo their number, and returns the old one; `Err(value)` if the array
    /// has another clone.
    pub(crate) fn put(&mut self, index: u32, value: T) -> Result<T, T> {
        let place = Arc::get_mut(&mut self.values)
            .and_then(|values| values.get_mut((index & self.mask) as usize));
        let old = match place {
            Some(place) => std::mem::replace(place, value),
            None => return Err(value),
        };
        // The exclusive borrow above invalidates pointers that were derived before it.
        self.base = self.values.as_ptr();
        Ok(old)
    }

    /// The number of values.
    pub(crate) fn len(&self) -> u32 {
        self.values.len() as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_size_overflows() {
        let sizes = [0, 1, 5, 1 << 31, (1 << 31) + 1, u32::MAX].map(ring_size);
        assert_eq!(sizes, [1, 1, 8, 1 << 31, 1 << 31, 1 << 31]);
    }

    #[test]
    fn any_index_has_a_place() {
        let values = RingArray::<u32>::new(5);
        assert_eq!(values.len(), 8);
        for index in [0, 7, 8, u32::MAX] {
            assert!(std::ptr::eq(values.at(index), &values.values[index as usize & 7]));
        }
        assert_eq!(RingArray::<u8>::new(0).len(), 1);
    }

    #[test]
    fn a_value_is_replaced_only_while_the_array_has_one_clone() {
        let mut values = RingArray::<u32>::new(4);
        assert_eq!((values.put(6, 7), *values.at(2)), (Ok(0), 7));
        let other = values.clone();
        assert_eq!((values.put(2, 8), *other.at(2)), (Err(8), 7));
        drop(other);
        assert_eq!(values.put(2, 8), Ok(7));
    }

    #[test]
    fn clones_are_the_same_array() {
        let values = RingArray::<std::sync::atomic::AtomicU32>::new(4);
        let other = values.clone();
        values.at(2).store(7, std::sync::atomic::Ordering::Relaxed);
        drop(values);
        assert_eq!(other.at(6).load(std::sync::atomic::Ordering::Relaxed), 7);
    }
}
