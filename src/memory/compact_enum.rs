//! What is lent where most of it is of one small kind: the usual takes few words, written and read
//! one by one, and everything else lies in the same place.

use std::fmt;
use std::mem::{ManuallyDrop, MaybeUninit};

/// Either a key with `A`, or `B`.
///
/// Whether there is a key says which; a key that is a pointer says so by itself.
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

/// What is in a parcel, taken out or looked at.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Content<K, A, B> {
    /// Usual, and few words.
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

    /// Writes what is small and nothing else, over what is there, which is forgotten.
    #[inline(always)]
    pub(crate) fn put_small(place: &mut MaybeUninit<Self>, key: K, small: A) {
        let parcel = place.as_mut_ptr();
        // SAFETY: inside the place.
        let keyhole = unsafe { &raw mut (*parcel).key };
        // SAFETY: aligned as a field, and borrowed exclusively.
        unsafe { keyhole.write(Some(key)) };
        // SAFETY: inside the place.
        let body = unsafe { &raw mut (*parcel).body };
        // SAFETY: as above; all fields of a union begin where it does.
        unsafe { body.cast::<A>().write(small) };
    }

    /// What is in it.
    #[inline(always)]
    pub(crate) fn get(&self) -> Content<&K, &A, &B> {
        match &self.key {
            // SAFETY: with a key it is small, as it was made.
            Some(key) => Content::Small(key, unsafe { &self.body.small }),
            // SAFETY: without one it is not.
            None => Content::Large(unsafe { &self.body.large }),
        }
    }

    /// Takes out what is in it.
    pub(crate) fn open(self) -> Content<K, A, B> {
        let mut parcel = ManuallyDrop::new(self);
        match parcel.key.take() {
            Some(key) => {
                // SAFETY: with a key it is small.
                let small = unsafe { &mut parcel.body.small };
                // SAFETY: nobody sees it again.
                Content::Small(key, unsafe { ManuallyDrop::take(small) })
            }
            None => {
                // SAFETY: without a key it is not small.
                let large = unsafe { &mut parcel.body.large };
                // SAFETY: nobody sees it again.
                Content::Large(unsafe { ManuallyDrop::take(large) })
            }
        }
    }

    /// Takes out what is small, where that is known.
    ///
    /// # Safety
    ///
    /// [`put_small`](Self::put_small) wrote it, and nobody opens or drops it afterwards.
    pub(crate) unsafe fn take_small(parcel: *const Self) -> (K, A) {
        // SAFETY: it is there, and forgotten.
        let small = unsafe { Self::read_small(parcel) };
        // SAFETY: it is small.
        unsafe { small.unwrap_unchecked() }
    }

    /// Reads what is small out of a parcel that nobody opens or drops afterwards.
    ///
    /// # Safety
    ///
    /// The parcel is there, and it is forgotten if the answer is something.
    #[inline(always)]
    pub(crate) unsafe fn read_small(parcel: *const Self) -> Option<(K, A)> {
        // SAFETY: it is there.
        let keyhole = unsafe { &raw const (*parcel).key };
        // SAFETY: as above; of two owners of the key one forgets it.
        let key = unsafe { keyhole.read() }?;
        // SAFETY: it is there.
        let body = unsafe { &raw const (*parcel).body };
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
    fn one_that_panics_takes_the_other_along() {
        struct Panics;
        impl Drop for Panics {
            fn drop(&mut self) {
                panic!("as it should");
            }
        }
        let key = Rc::new(());
        let parcel = CompactEnum::<_, _, ()>::new(Content::Small(key.clone(), Panics));
        let dropped = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| drop(parcel)));
        assert!(dropped.is_err() && Rc::strong_count(&key) == 1);
    }
}
