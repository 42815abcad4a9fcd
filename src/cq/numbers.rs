//! Numbers of queue pairs that completions still name.

use crate::sync::lock::Lock;
use std::collections::HashSet;
use std::sync::Arc;

/// The numbers that no other queue pair of a completion queue may get. rxe assigns numbers in a circle, and
/// may assign one again while completions of its last owner are still in the queue.
///
/// It needs no loom model: each call is one step under a lock, and between `is_leased` and `lease` the kernel does not
/// assign the number again.
#[derive(Debug, Default)]
pub(crate) struct Numbers(Lock<HashSet<u32>>);

impl Numbers {
    /// Keeps a queue pair's number from others until the lease is dropped.
    pub(crate) fn lease(self: &Arc<Self>, number: u32) -> NumberLease {
        if let Some(mut leased) = self.0.lock() {
            leased.insert(number);
        }
        NumberLease { numbers: self.clone(), number }
    }

    pub(crate) fn is_leased(&self, number: u32) -> bool {
        self.0.lock().is_some_and(|leased| leased.contains(&number))
    }
}

/// See [`Numbers::lease`].
#[derive(Debug)]
pub(crate) struct NumberLease {
    numbers: Arc<Numbers>,
    number: u32,
}

impl Drop for NumberLease {
    fn drop(&mut self) {
        if let Some(mut leased) = self.numbers.0.lock() {
            leased.remove(&self.number);
        }
    }
}
