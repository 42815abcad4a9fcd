//! The address handles that the requests of a send queue name.
//!
//! A WQE of rxe names its address handle by number, and the kernel resolves the number when it carries the
//! WQE out (`rxe_get_av`), not when it is posted. The driver assigns numbers in a circle of 32767 for the
//! whole device. So an address handle is destroyed only when no WQE names it any more, or a datagram could
//! go to the destination of another handle.

use crate::error::{Error, Result};
use crate::memory::rxe_queue::{ProducerWatch, RxeQueue};
use crate::provider::driver_response::DriverResponse;
use crate::sync::{AtomicU32, Ordering};
use crate::wr::Address;
use rustix::io::Errno;
use uverbs_uapi::rxe::rxe_create_ah_resp;

/// The number by which WQEs name an address handle, from the driver's response to its creation.
///
/// # Errors
///
/// `EOPNOTSUPP` for no number, as before Linux 5.16: there a WQE has the whole address, with the peer's
/// hardware address, which the driver resolves and does not tell.
pub(crate) fn address(verb: &'static str, response: &DriverResponse) -> Result<Address> {
    // The driver assigns numbers from 1 on.
    match response.read::<rxe_create_ah_resp>().ah_num {
        0 => Err(Error::new(verb, Errno::OPNOTSUPP).detail(
            "this kernel's soft-RoCE does not number address handles: datagrams need Linux 5.16 or later; \
             connected queue pairs need no address handle",
        )),
        ah_num => Ok(Address::Rxe { ah_num }),
    }
}

/// Reads the kernel's index of a ring.
pub(crate) trait ConsumerWatch {
    /// The index that the kernel publishes.
    fn consumer(&self) -> u32;

    /// One less than the slots.
    fn mask(&self) -> u32;
}

impl ConsumerWatch for ProducerWatch {
    fn consumer(&self) -> u32 {
        ProducerWatch::consumer(self)
    }

    fn mask(&self) -> u32 {
        ProducerWatch::mask(self)
    }
}

/// The address handles that the WQEs of a send queue name, for the control path. Only the poster writes
/// them. Model-checked with loom.
#[derive(Debug)]
pub(crate) struct NamedAddresses<W = ProducerWatch> {
    watch: W,
    /// The number that the WQE in each slot names.
    numbers: Box<[AtomicU32]>,
    /// The slot after the newest WQE, which may not be published yet.
    end: AtomicU32,
}

impl NamedAddresses {
    pub(crate) fn new(ring: &RxeQueue, producer: u32) -> NamedAddresses {
        NamedAddresses::of(ring.watch(), producer)
    }
}

impl<W: ConsumerWatch> NamedAddresses<W> {
    fn of(watch: W, producer: u32) -> Self {
        let numbers = (0..=watch.mask()).map(|_| AtomicU32::new(0)).collect();
        NamedAddresses { watch, numbers, end: AtomicU32::new(producer) }
    }

    /// The WQE in `slot` names `number`.
    #[inline]
    pub(super) fn set(&self, slot: u32, number: u32) {
        if let Some(place) = self.numbers.get(slot as usize) {
            place.store(number, Ordering::Relaxed);
        }
        // Release pairs with the Acquire in `each`: a reader that sees the end sees the numbers before it.
        self.end.store(slot.wrapping_add(1) & self.watch.mask(), Ordering::Release);
    }

    /// A batch begins at `slot`: nothing beyond it is written.
    #[inline]
    pub(super) fn begin(&self, slot: u32) {
        self.end.store(slot, Ordering::Release);
    }

    /// Visits the numbers named by WQEs that the kernel has not completed.
    ///
    /// The owner of a handle drops it after the last request that names it, so this finds every WQE that names a handle
    /// of the caller. The kernel completes WQEs meanwhile: some of the visited ones may have completed.
    pub(crate) fn each(&self, mut visit: impl FnMut(u32)) {
        let end = self.end.load(Ordering::Acquire);
        let mut slot = self.watch.consumer();
        while slot != end {
            if let Some(number) = self.numbers.get(slot as usize) {
                visit(number.load(Ordering::Relaxed));
            }
            slot = slot.wrapping_add(1) & self.watch.mask();
        }
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::*;
    use loom::sync::Arc;
    use loom::thread;

    const MASK: u32 = 3;
    const OLD: u32 = 7;
    const NEW: u32 = 8;

    /// The index that a fake kernel publishes.
    #[derive(Debug)]
    struct FakeKernel(Arc<AtomicU32>);

    impl ConsumerWatch for FakeKernel {
        fn consumer(&self) -> u32 {
            self.0.load(Ordering::Acquire)
        }

        fn mask(&self) -> u32 {
            MASK
        }
    }

    /// The owner of a handle that WQEs name drops it, while the poster names another one, drops a batch and fills
    /// the ring, and the kernel completes WQEs. A handle that a WQE names is found until the kernel completed the
    /// WQE, and no slot is visited before its number is stored.
    #[test]
    fn a_handle_is_found_until_its_requests_are_over() {
        loom::model(|| {
            let consumer = Arc::new(AtomicU32::new(0));
            let named = Arc::new(NamedAddresses::of(FakeKernel(consumer.clone()), 0));
            named.set(0, OLD);
            let theirs = named.clone();
            let poster = thread::spawn(move || {
                theirs.begin(1);
                theirs.set(1, NEW);
                // That batch was dropped.
                theirs.begin(1);
                (1..=2).for_each(|slot| theirs.set(slot, NEW));
            });
            let completed = consumer.clone();
            let kernel = thread::spawn(move || completed.store(1, Ordering::Release));
            let mut seen = Vec::new();
            named.each(|number| seen.push(number));
            let over = consumer.load(Ordering::Acquire) > 0;
            assert!(over || seen.first() == Some(&OLD), "{seen:?} and not over");
            assert!(seen.iter().all(|number| [OLD, NEW].contains(number)), "{seen:?}");
            poster.join().unwrap();
            kernel.join().unwrap();
            let mut left = Vec::new();
            named.each(|number| left.push(number));
            assert_eq!(left, [NEW, NEW]);
        });
    }
}
