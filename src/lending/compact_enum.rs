//! An enum of a small and a large variant. Moving the small variant copies only its own words, and not the
//! memory that the large one needs.

use std::fmt;
use std::mem::{ManuallyDrop, MaybeUninit};

/// Either a key with `A`, or `B`.
///
/// The key says which: it is `None` with `B`. If the key is a non-null pointer, this costs no memory.
#[repr(C)]
pub(crate) struct CompactEnum<K, A, B> {
    key: Option<K>,
    body: Body<A, B>,
}

union Body<A, B> {
    /// With a key.
    small: ManuallyDrop<A>,
    /// Without.
    large: ManuallyDrop<B>,
}

/// The variants, moved out or borrowed.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Content<K, A, B> {
    /// A key and few words.
    Small(K, A),
    /// Anything else.
    Large(B),
}

impl<K, A, B> CompactEnum<K, A, B> {
    #[inline(always)]
    pub(crate) fn new(content: Content<K, A, B>) -> Self {
        match content {
            Content::Small(key, small) => {
                CompactEnum { key: Some(key), body: Body { small: ManuallyDrop::new(small) } }
            }
            Content::Large(large) => {
                CompactEnum { key: None, body: Body { large: ManuallyDrop::new(large) } }
            }
        }
    }

    /// Writes the small variant and no other bytes. The old value is not dropped.
    #[inline(always)]
    pub(crate) fn put_small(place: &mut MaybeUninit<Self>, key: K, small: A) {
        let place = place.as_mut_ptr();
        // SAFETY: the field is inside the room.
        let key_field = unsafe { &raw mut (*place).key };
        // SAFETY: a field is aligned, and the room is borrowed exclusively.
        unsafe { key_field.write(Some(key)) };
        // SAFETY: the field is inside the room.
        let body = unsafe { &raw mut (*place).body };
        // SAFETY: as above; all fields of a union begin where it does.
        unsafe { body.cast::<A>().write(small) };
    }

    /// Borrows the variant.
    #[inline(always)]
    pub(crate) fn get(&self) -> Content<&K, &A, &B> {
        match &self.key {
            // SAFETY: with a key it is small, as it was made.
            Some(key) => Content::Small(key, unsafe { &self.body.small }),
            // SAFETY: without one it is not.
            None => Content::Large(unsafe { &self.body.large }),
        }
    }

    /// Borrows the variant, to be changed.
    #[inline(always)]
    pub(crate) fn get_mut(&mut self) -> Content<&mut K, &mut A, &mut B> {
        match &mut self.key {
            // SAFETY: with a key it is small, as it was made.
            Some(key) => Content::Small(key, unsafe { &mut self.body.small }),
            // SAFETY: without one it is not.
            None => Content::Large(unsafe { &mut self.body.large }),
        }
    }

    /// Moves the variant out.
    #[inline]
    pub(crate) fn open(self) -> Content<K, A, B> {
        let mut this = ManuallyDrop::new(self);
        match this.key.take() {
            Some(key) => {
                // SAFETY: with a key it is small.
                let small = unsafe { &mut this.body.small };
                // SAFETY: nobody sees it again.
                Content::Small(key, unsafe { ManuallyDrop::take(small) })
            }
            None => {
                // SAFETY: without a key it is not small.
                let large = unsafe { &mut this.body.large };
                // SAFETY: nobody sees it again.
                Content::Large(unsafe { ManuallyDrop::take(large) })
            }
        }
    }

    /// Moves out the small variant, where the caller knows that it is the small one.
    ///
    /// # Safety
    ///
    /// [`put_small`](Self::put_small) wrote it, and nobody reads or drops it afterwards.
    pub(crate) unsafe fn take_small(this: *const Self) -> (K, A) {
        // SAFETY: it is initialised, and nobody reads it again.
        let small = unsafe { Self::read_small(this) };
        // SAFETY: it is small.
        unsafe { small.unwrap_unchecked() }
    }

    /// Moves out the small variant; `None` if it is the large one.
    ///
    /// # Safety
    ///
    /// The value is initialised. If this returns `Some`, nobody reads or drops it afterwards.
    #[inline(always)]
    pub(crate) unsafe fn read_small(this: *const Self) -> Option<(K, A)> {
        // SAFETY: it is initialised.
        let key_field = unsafe { &raw const (*this).key };
        // SAFETY: as above; the caller forgets the other copy of the key.
        let key = unsafe { key_field.read() }?;
        // SAFETY: it is initialised.
        let body = unsafe { &raw const (*this).body };
        // SAFETY: with a key it is small; all fields of a union begin where it does.
        let small = unsafe { body.cast::<A>().read() };
        Some((key, small))
    }
}

impl<K, A, B> Drop for CompactEnum<K, A, B> {
    fn drop(&mut self) {
        if self.key.is_some() {
            // SAFETY: with a key it is small.
            let small = unsafe { &mut self.body.small };
            // SAFETY: nobody sees it again.
            unsafe { ManuallyDrop::drop(small) };
        } else {
            // SAFETY: without one it is not.
            let large = unsafe { &mut self.body.large };
            // SAFETY: nobody sees it again.
            unsafe { ManuallyDrop::drop(large) };
        }
    }
}

impl<K: fmt::Debug, A: fmt::Debug, B: fmt::Debug> fmt::Debug for CompactEnum<K, A, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.get().fmt(f)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::rc::Rc;

    type Three = CompactEnum<Rc<u8>, Rc<u16>, [Rc<u32>; 3]>;

    #[test]
    fn what_goes_in_comes_out_once() {
        let (key, small, large) = (Rc::new(1), Rc::new(2), [(); 3].map(|()| Rc::new(3)));
        let counts = || (Rc::strong_count(&key), Rc::strong_count(&small));
        let make = || Three::new(Content::Small(key.clone(), small.clone()));
        drop(make());
        assert_eq!(counts(), (1, 1));
        assert_eq!(make().open(), Content::Small(key.clone(), small.clone()));
        assert_eq!(make().get(), Content::Small(&key, &small));
        assert_eq!(counts(), (1, 1));
        let mut place = MaybeUninit::uninit();
        Three::put_small(&mut place, key.clone(), small.clone());
        // SAFETY: it was put there, and is forgotten: the place drops nothing.
        let read = unsafe { Three::read_small(place.as_ptr()) };
        assert_eq!((read, counts()), (Some((key.clone(), small.clone())), (2, 2)));
        assert_eq!(counts(), (1, 1));
        let make = || Three::new(Content::Large(large.clone()));
        drop(make());
        assert_eq!(Rc::strong_count(&large[2]), 1);
        let whole = make();
        // SAFETY: it is there, and nothing was read.
        assert_eq!(unsafe { Three::read_small(&whole) }, None);
        assert_eq!(whole.get(), Content::Large(&large));
        assert_eq!(whole.open(), Content::Large(large.clone()));
        assert_eq!(Rc::strong_count(&large[0]), 1);
    }

    /// A panic in what is dropped first does not keep the other from being dropped.
    #[test]
    fn a_panic_in_one_drop_does_not_skip_the_other() {
        struct Panics;
        impl Drop for Panics {
            fn drop(&mut self) {
                panic!("as it should");
            }
        }
        let key = Rc::new(());
        let value = CompactEnum::<_, _, ()>::new(Content::Small(key.clone(), Panics));
        let dropped = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| drop(value)));
        assert!(dropped.is_err() && Rc::strong_count(&key) == 1);
    }
}
