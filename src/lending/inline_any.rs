//! A value of any type in 32 bytes, without an allocation.

use std::any::Any;
use std::cell::UnsafeCell;
use std::fmt;
use std::marker::PhantomData;
use std::mem::{ManuallyDrop, MaybeUninit};

/// Room for a value: as much, and aligned as well, on processors of 32 bits, so that the same programs compile.
#[repr(C, align(8))]
struct Words([u64; 4]);

/// As `Box<dyn Any + Send + Sync>`, with the value in place.
pub(crate) struct InlineAny {
    /// The value may change behind a shared reference: it may have a `Cell` or an atomic.
    words: UnsafeCell<MaybeUninit<Words>>,
    /// Turns the address of `words` into a pointer to the value.
    value: fn(*mut Words) -> *mut (dyn Any + Send + Sync),
    /// Send and Sync as the value is, and neither more nor less unwind safe than a box of it.
    _value: PhantomData<Box<dyn Any + Send + Sync>>,
}

// SAFETY: a shared reference gives a shared reference to the value and no more, and the value is `Sync`.
unsafe impl Sync for InlineAny {}

fn value_at<T: Any + Send + Sync>(words: *mut Words) -> *mut (dyn Any + Send + Sync) {
    words.cast::<T>()
}

impl InlineAny {
    /// Takes `value`. A type that is larger or more aligned than `Words` does not compile.
    #[inline]
    pub(crate) fn new<T: Any + Send + Sync>(value: T) -> InlineAny {
        const {
            assert!(
                size_of::<T>() <= size_of::<Words>(),
                "the type is larger than 32 bytes: put it into a Box"
            );
            assert!(
                align_of::<T>() <= align_of::<Words>(),
                "the type is aligned to more than 8 bytes: put it into a Box"
            );
        }
        let mut words = MaybeUninit::<Words>::uninit();
        // SAFETY: the room is large enough and aligned, as was checked when this was compiled.
        unsafe { words.as_mut_ptr().cast::<T>().write(value) };
        InlineAny { words: UnsafeCell::new(words), value: value_at::<T>, _value: PhantomData }
    }

    /// The value, as far as its type is asked for.
    pub(crate) fn get(&self) -> &(dyn Any + Send + Sync) {
        let value = (self.value)(self.words.get().cast());
        // SAFETY: `new` wrote a value of the type that `value` is made for, and nothing moved it out.
        unsafe { &*value }
    }

    /// The value, if it is a `T`.
    pub(crate) fn downcast<T: Any>(self) -> Result<T, Self> {
        if !self.get().is::<T>() {
            return Err(self);
        }
        let this = ManuallyDrop::new(self);
        // SAFETY: it is a `T`, and nobody looks at `this` again.
        Ok(unsafe { this.words.get().cast::<T>().read() })
    }
}

impl Drop for InlineAny {
    fn drop(&mut self) {
        let value = (self.value)(self.words.get().cast());
        // SAFETY: `new` wrote the value, and nobody looks at it again.
        unsafe { value.drop_in_place() };
    }
}

impl fmt::Debug for InlineAny {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InlineAny").finish_non_exhaustive()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    /// Miri finds it if the compiler may take the value for one that does not change.
    #[test]
    fn a_value_changes_behind_a_shared_reference() {
        let value = InlineAny::new(AtomicU64::new(1));
        let count = || value.get().downcast_ref::<AtomicU64>().unwrap();
        count().store(2, Ordering::Relaxed);
        assert_eq!(count().load(Ordering::Relaxed), 2);
    }

    #[test]
    fn a_value_comes_out_as_it_went_in_and_is_dropped_once() {
        let counted = Arc::new(7u32);
        let value = InlineAny::new((counted.clone(), [1u8, 2, 3], 9u64));
        assert_eq!(Arc::strong_count(&counted), 2);
        let value = value.downcast::<u32>().unwrap_err();
        let (back, bytes, number) = value.downcast::<(Arc<u32>, [u8; 3], u64)>().unwrap();
        assert_eq!((*back, bytes, number), (7, [1, 2, 3], 9));
        drop(InlineAny::new(back));
        assert_eq!(Arc::strong_count(&counted), 1);
        assert!(InlineAny::new(()).downcast::<()>().is_ok());
    }

    #[test]
    fn a_value_that_is_aligned_to_8_bytes_is_taken_on_every_processor() {
        #[repr(align(8))]
        struct Aligned(u8);
        let taken = InlineAny::new(Aligned(7)).downcast::<Aligned>().ok();
        assert_eq!((align_of::<Words>(), taken.map(|it| it.0)), (8, Some(7)));
    }

    #[test]
    fn a_value_of_32_bytes_moves_between_threads() {
        let value = InlineAny::new([u64::MAX; 4]);
        let there = std::thread::spawn(move || value.get().is::<[u64; 4]>());
        assert!(there.join().unwrap());
    }
}
