//! Address handles that are dropped while requests name them: they go when the requests are over.
//!
//! Only rxe's requests name address handles; those of mlx5 carry the address itself.

use crate::object::Object;
use crate::provider::NamedAddresses;
use crate::sync::lock::Lock;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// The dropped address handles of a protection domain, and the send queues whose requests may name them.
/// Queues of other domains refuse them.
#[derive(Debug, Default)]
pub(crate) struct NamedHandles(Lock<Inner>);

#[derive(Debug, Default)]
struct Inner {
    /// Send queues of datagrams that the kernel has not confirmed to be gone, by their address.
    queues: HashMap<usize, Arc<NamedAddresses>>,
    /// Dropped address handles, by the number that requests name them by.
    handles: Vec<(u32, Object)>,
}

fn key(queue: &Arc<NamedAddresses>) -> usize {
    Arc::as_ptr(queue).addr()
}

impl Inner {
    /// Takes out the handles that no request names any more.
    fn over(&mut self) -> Vec<(u32, Object)> {
        if self.handles.is_empty() {
            return Vec::new();
        }
        let mut named = HashSet::new();
        for queue in self.queues.values() {
            queue.each(|number| _ = named.insert(number));
        }
        let (kept, over) =
            std::mem::take(&mut self.handles).into_iter().partition(|(n, _)| named.contains(n));
        self.handles = kept;
        over
    }
}

impl NamedHandles {
    /// Adds a queue pair, before anything is posted to it.
    pub(crate) fn attach(&self, queue: &Arc<NamedAddresses>) {
        if let Some(mut inner) = self.0.lock() {
            inner.queues.insert(key(queue), queue.clone());
        }
    }

    /// Removes the queue pair of `queue`, which is destroyed.
    pub(crate) fn detach(&self, queue: &Arc<NamedAddresses>) {
        if let Some(mut inner) = self.0.lock() {
            inner.queues.remove(&key(queue));
        }
        self.sweep();
    }

    /// Destroys `object`, which requests name by `number`, as soon as none does.
    pub(crate) fn retire(&self, number: u32, object: Object) {
        // In a forked child the object is dropped, which leaves it to the parent.
        if let Some(mut inner) = self.0.lock() {
            inner.handles.push((number, object));
        }
        self.sweep();
    }

    /// The number of uncompleted requests that name `number`.
    pub(crate) fn requests(&self, number: u32) -> usize {
        let Some(inner) = self.0.lock() else { return 0 };
        let mut count = 0;
        for queue in inner.queues.values() {
            queue.each(|named| count += usize::from(named == number));
        }
        count
    }

    /// Destroys the handles that no request names any more.
    pub(crate) fn sweep(&self) {
        let over = self.0.lock().map(|mut inner| inner.over());
        // Only now, as the kernel takes its time.
        drop(over);
    }
}

impl Drop for NamedHandles {
    fn drop(&mut self) {
        let Some(mut inner) = self.0.lock() else { return };
        drop(inner.over());
        // Handles that a queue pair names which the kernel refused to destroy: it may still carry out requests.
        inner.handles.iter_mut().for_each(|(_, object)| object.abandon());
    }
}
