//! What a queue's kernel object stands on, for as long as a device may reach it.

use super::uar::Lease;
use crate::memory::doorbell_record::DoorbellRecord;
use crate::memory::lock::Lock;
use crate::memory::queue_memory::QueueMemory;
use std::sync::Arc;

/// What a kernel object stands on. Kept until the kernel confirmed that the object is gone; the
/// record goes first, as users of allocators are used to: here, in plans that failed, and in rings.
#[derive(Debug)]
pub(crate) struct QueueResources {
    _record: Arc<DoorbellRecord>,
    /// Exchanged when a completion queue is resized.
    memory: Lock<Option<Arc<QueueMemory>>>,
    /// Where the device may be as well, after a resize of which nobody knows how it ended.
    doubtful: Lock<Vec<Arc<QueueMemory>>>,
    /// The sends of a raw packet queue pair.
    _sends: Option<Arc<QueueMemory>>,
    _register: Option<Lease>,
}

impl QueueResources {
    pub(super) fn new(
        record: &Arc<DoorbellRecord>,
        memory: Option<Arc<QueueMemory>>,
    ) -> QueueResources {
        QueueResources {
            _record: record.clone(),
            memory: Lock::new(memory),
            doubtful: Lock::default(),
            _sends: None,
            _register: None,
        }
    }

    /// And what only a queue pair stands on.
    pub(super) fn with(
        self,
        sends: &Option<Arc<QueueMemory>>,
        register: Option<Lease>,
    ) -> QueueResources {
        QueueResources { _sends: sends.clone(), _register: register, ..self }
    }

    /// Takes over what the kernel has moved the queue to, and lets go of where it was.
    pub(crate) fn exchange(&self, memory: Arc<QueueMemory>) -> Option<Arc<QueueMemory>> {
        self.memory.lock()?.replace(memory)
    }

    /// Keeps memory that the device may have been moved to, beside what it may not have left.
    pub(super) fn keep(&self, memory: Arc<QueueMemory>) {
        match self.doubtful.lock() {
            Some(mut doubtful) => doubtful.push(memory),
            None => std::mem::forget(memory),
        }
    }
}
