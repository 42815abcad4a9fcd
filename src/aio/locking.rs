//! The threads that use the futures of a completion queue, and the locks that they need.

use crate::owned::OwnedSendBatch;
use crate::pd::{Exclusive, ProtectionDomain, Shared, Sharing};
use crate::sync::lock::{AnyLock, LocalLock, Lock};
use crate::td::ThreadDomain;
use crate::wr::RingError;
use std::sync::Arc;

/// The threads that use the futures of a completion queue: any, if it is [`Shared`], and each post takes a mutex;
/// the one of its thread domain, if it is [`Exclusive`], and nothing takes any. Implemented by these two.
pub trait Locking: Sharing + Sized {
    #[doc(hidden)]
    type Lock<T>: AnyLock<T>;

    /// The right to ring the queue pairs of a completion queue, which the queue's handles keep.
    #[doc(hidden)]
    type Token;

    /// Whether the token is that of queue pairs of `pd`.
    #[doc(hidden)]
    fn rings(token: &Self::Token, pd: &ProtectionDomain<Self>) -> bool;

    /// Rings a batch of a queue pair that was compared with the token when it was taken over.
    #[doc(hidden)]
    fn ring<T>(batch: OwnedSendBatch<'_, T, Self>, taken_over: &TakenOver)
    -> Result<(), RingError>;

    /// As `ring`, of a batch of one.
    #[doc(hidden)]
    fn ring_one<T>(
        batch: OwnedSendBatch<'_, T, Self>,
        taken_over: &TakenOver,
    ) -> Result<(), RingError>;

    /// Whether all steps of all requests are the same thread's.
    #[doc(hidden)]
    const ONE_THREAD: bool;
}

/// Says that a queue pair belongs to a completion queue of futures, and only such a queue's own code has it. The trait
/// is public: without this a program could ring a batch of a queue pair of its own, whose thread domain nobody compared.
#[derive(Debug)]
pub struct TakenOver(());

impl TakenOver {
    /// For a queue pair whose protection domain [is that of the token](Locking::rings).
    pub(super) fn new() -> TakenOver {
        TakenOver(())
    }
}

impl Locking for Shared {
    #[doc(hidden)]
    type Lock<T> = Lock<T>;

    #[doc(hidden)]
    type Token = ();

    #[doc(hidden)]
    fn rings((): &(), _: &ProtectionDomain) -> bool {
        true
    }

    #[doc(hidden)]
    #[inline(always)]
    fn ring<T>(batch: OwnedSendBatch<'_, T, Self>, _: &TakenOver) -> Result<(), RingError> {
        batch.ring()
    }

    #[doc(hidden)]
    #[inline(always)]
    fn ring_one<T>(batch: OwnedSendBatch<'_, T, Self>, _: &TakenOver) -> Result<(), RingError> {
        batch.ring_one()
    }

    #[doc(hidden)]
    const ONE_THREAD: bool = false;
}

impl Locking for Exclusive {
    #[doc(hidden)]
    type Lock<T> = LocalLock<T>;

    #[doc(hidden)]
    type Token = ThreadDomain;

    #[doc(hidden)]
    fn rings(token: &ThreadDomain, pd: &ProtectionDomain<Exclusive>) -> bool {
        pd.inner.td.as_ref().is_some_and(|own| Arc::ptr_eq(own, &token.inner))
    }

    // The token is not taken: the handles that keep it are neither `Send` nor `Sync`, so that this is its thread.
    #[doc(hidden)]
    #[inline(always)]
    fn ring<T>(batch: OwnedSendBatch<'_, T, Self>, _: &TakenOver) -> Result<(), RingError> {
        batch.ring_held()
    }

    #[doc(hidden)]
    #[inline(always)]
    fn ring_one<T>(batch: OwnedSendBatch<'_, T, Self>, _: &TakenOver) -> Result<(), RingError> {
        batch.ring_one_held()
    }

    #[doc(hidden)]
    const ONE_THREAD: bool = true;
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::any::TypeId;

    /// Its lock is a `LocalLock`, which refuses a second holder at once.
    #[test]
    fn a_worker_takes_no_mutex() {
        type Taken = <Exclusive as Locking>::Lock<u8>;
        assert_eq!(TypeId::of::<Taken>(), TypeId::of::<LocalLock<u8>>());
        let taken: Taken = AnyLock::new(1);
        let held = taken.lock();
        assert!(held.is_some() && taken.lock().is_none());
        drop(held);
        assert!(taken.lock().is_some());
    }
}
