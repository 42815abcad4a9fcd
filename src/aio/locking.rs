//! Which threads use the futures of a completion queue, and what that takes.

use crate::owned::OwnedSendBatch;
use crate::pd::{Exclusive, ProtectionDomain, Shared, Sharing};
use crate::sync::lock::{AnyLock, LocalLock, Lock};
use crate::td::ThreadDomain;
use crate::wr::RingError;
use std::sync::Arc;

/// Which threads use the futures of a completion queue: any, if it is [`Shared`], and each step of a request
/// takes a mutex; the one of its thread domain, if it is [`Exclusive`], and no step takes any. Implemented by
/// these two.
pub trait Locking: Sharing + Sized {
    #[doc(hidden)]
    type Lock<T>: AnyLock<T>;

    /// Rings the queue pairs of a completion queue.
    #[doc(hidden)]
    type Token;

    /// Whether the token is that of queue pairs of `pd`.
    #[doc(hidden)]
    fn rings(token: &Self::Token, pd: &ProtectionDomain<Self>) -> bool;

    #[doc(hidden)]
    fn ring<T>(batch: OwnedSendBatch<'_, T, Self>, token: &Self::Token) -> Result<(), RingError>;

    /// As `ring`, of a batch of one.
    #[doc(hidden)]
    fn ring_one<T>(
        batch: OwnedSendBatch<'_, T, Self>,
        token: &Self::Token,
    ) -> Result<(), RingError>;

    /// Whether all steps of all requests are the same thread's.
    #[doc(hidden)]
    const ONE_THREAD: bool;
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
    fn ring<T>(batch: OwnedSendBatch<'_, T, Self>, (): &()) -> Result<(), RingError> {
        batch.ring()
    }

    #[doc(hidden)]
    #[inline(always)]
    fn ring_one<T>(batch: OwnedSendBatch<'_, T, Self>, (): &()) -> Result<(), RingError> {
        batch.ring_one()
    }

    #[doc(hidden)]
    const ONE_THREAD: bool = false;
}

impl Locking for Exclusive {
    #[doc(hidden)]
    type Lock<T> = LocalLock<T>;

    #[doc(hidden)]
    type Token = LocalLock<ThreadDomain>;

    #[doc(hidden)]
    fn rings(token: &Self::Token, pd: &ProtectionDomain<Exclusive>) -> bool {
        let (Some(td), Some(own)) = (token.lock(), &pd.inner.td) else { return false };
        Arc::ptr_eq(own, &td.inner)
    }

    #[doc(hidden)]
    #[inline(always)]
    fn ring<T>(batch: OwnedSendBatch<'_, T, Self>, token: &Self::Token) -> Result<(), RingError> {
        match token.lock_gated() {
            Some(mut td) => batch.ring(&mut td),
            None => Err(RingError::Forked),
        }
    }

    #[doc(hidden)]
    #[inline(always)]
    fn ring_one<T>(
        batch: OwnedSendBatch<'_, T, Self>,
        token: &Self::Token,
    ) -> Result<(), RingError> {
        match token.lock_gated() {
            Some(mut td) => batch.ring_one(&mut td),
            None => Err(RingError::Forked),
        }
    }

    #[doc(hidden)]
    const ONE_THREAD: bool = true;
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::any::TypeId;

    /// Both locks are `LocalLock`s, which refuse a second holder at once.
    #[test]
    fn a_worker_takes_no_mutex() {
        type Taken = <Exclusive as Locking>::Lock<u8>;
        assert_eq!(TypeId::of::<Taken>(), TypeId::of::<LocalLock<u8>>());
        let token = TypeId::of::<<Exclusive as Locking>::Token>();
        assert_eq!(token, TypeId::of::<LocalLock<ThreadDomain>>());
        let taken: Taken = AnyLock::new(1);
        let held = taken.lock();
        assert!(held.is_some() && taken.lock().is_none());
        drop(held);
        assert!(taken.lock().is_some());
    }
}
