//! A ring behind its gate: one look tells whether there is such a ring, and whether it may be used
//! here and now. Pairs with [`dbrec`](super::doorbell_record), where gates are.

use super::doorbell_record::Gate;
use std::num::NonZeroU8;
use std::sync::atomic::{AtomicU8, Ordering};

/// The gate of what is not there. Nobody stores to it.
static SHUT: AtomicU8 = AtomicU8::new(0);

/// A ring, or none, and the gate that says what may be done with it.
#[derive(Debug)]
pub(crate) struct Gated<T> {
    /// `SHUT` without a ring, else the gate's.
    place: *const AtomicU8,
    ring: Option<T>,
    _gate: Option<Gate>,
}

// SAFETY: the gate is an atomic, and the ring may be sent.
unsafe impl<T: Send> Send for Gated<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Gated<T> {}
impl<T: std::panic::UnwindSafe> std::panic::UnwindSafe for Gated<T> {}
impl<T: std::panic::RefUnwindSafe> std::panic::RefUnwindSafe for Gated<T> {}

impl<T> Gated<T> {
    pub(crate) fn new(ring: T, gate: &Gate) -> Gated<T> {
        Gated { place: gate.word(), ring: Some(ring), _gate: Some(gate.clone()) }
    }

    /// No ring, which is never open.
    pub(crate) fn none() -> Gated<T> {
        Gated { place: &SHUT, ring: None, _gate: None }
    }

    #[inline(always)]
    fn word(&self) -> &AtomicU8 {
        // SAFETY: a static, or in the page that `_gate` keeps, and only ever used as an atomic.
        unsafe { &*self.place }
    }

    /// The ring if its gate says `least` or more.
    #[inline(always)]
    pub(crate) fn open(&self, least: NonZeroU8) -> Option<&T> {
        // Acquire pairs with who changes the queue's state, which comes after what the state needs.
        if self.word().load(Ordering::Acquire) < least.get() {
            return None;
        }
        // SAFETY: the gate is not 0, so it is not `SHUT`, and with any other there is a ring.
        Some(unsafe { self.ring.as_ref().unwrap_unchecked() })
    }

    /// The ring if this is the process that made it; nothing is ordered by that.
    #[inline(always)]
    pub(crate) fn here(&self) -> Option<&T> {
        if self.word().load(Ordering::Relaxed) == 0 {
            return None;
        }
        // SAFETY: as in `open`.
        Some(unsafe { self.ring.as_ref().unwrap_unchecked() })
    }

    /// As [`here`](Self::here), for who changes the ring.
    #[inline(always)]
    pub(crate) fn here_mut(&mut self) -> Option<&mut T> {
        if self.word().load(Ordering::Relaxed) == 0 {
            return None;
        }
        // SAFETY: as in `open`.
        Some(unsafe { self.ring.as_mut().unwrap_unchecked() })
    }

    /// The ring if its gate says `least` or more, for who changes it; else this again, so that it may
    /// be asked otherwise.
    #[inline(always)]
    pub(crate) fn enter(&mut self, least: NonZeroU8) -> Result<&mut T, &mut Self> {
        // Acquire as in `open`.
        if self.word().load(Ordering::Acquire) < least.get() {
            return Err(self);
        }
        // SAFETY: as in `open`.
        Ok(unsafe { self.ring.as_mut().unwrap_unchecked() })
    }

    /// The ring, whatever its gate says.
    pub(crate) fn any(&self) -> Option<&T> {
        self.ring.as_ref()
    }

    /// As [`any`](Self::any), for who changes the ring.
    pub(crate) fn any_mut(&mut self) -> Option<&mut T> {
        self.ring.as_mut()
    }
}

#[cfg(test)]
mod tests {
    use super::super::doorbell_record::DoorbellPages;
    use super::*;
    use std::sync::Arc;

    #[test]
    fn what_is_not_there_is_never_open() {
        let mut none = Gated::<u32>::none();
        assert_eq!((none.open(NonZeroU8::MIN), none.here(), none.any()), (None, None, None));
        assert_eq!(none.here_mut(), None);
        assert!(none.enter(NonZeroU8::MIN).is_err());
        assert_eq!(none.any_mut(), None);
    }

    #[test]
    #[cfg_attr(miri, ignore = "it forks")]
    fn a_ring_is_open_as_far_as_its_gate_says() {
        let record = Arc::new(DoorbellPages::new().unwrap().alloc().unwrap());
        let gate = Gate::beside(&record).unwrap();
        let mut ring = Gated::new(7, &gate);
        let (three, four) = (NonZeroU8::new(3).unwrap(), NonZeroU8::new(4).unwrap());
        assert_eq!((ring.open(NonZeroU8::MIN), ring.here(), ring.any()), (None, None, Some(&7)));
        gate.word().store(3, Ordering::Relaxed);
        assert_eq!((ring.open(three), ring.open(four), ring.here()), (Some(&7), None, Some(&7)));
        *ring.enter(three).unwrap() += 1;
        assert!(ring.enter(four).is_err());
        assert_eq!(ring.here_mut(), Some(&mut 8));
        drop((gate, record));
        assert_eq!((ring.open(three), ring.open(four)), (Some(&8), None));
        crate::memory::fork::in_child(|| {
            assert_eq!((ring.open(three), ring.here(), ring.any()), (None, None, Some(&8)));
            assert_eq!(ring.here_mut(), None);
            assert!(ring.enter(NonZeroU8::MIN).is_err());
            assert_eq!(ring.any_mut(), Some(&mut 8));
        });
    }
}
