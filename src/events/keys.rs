//! Keys: the `user_handle` by which events name objects.
//!
//! The kernel returns in an event the `user_handle` that the object was created with. If that were a
//! pointer, a stale or forged event would be undefined behaviour; a key is only looked up. A key consists of
//! a random number of the context, a slot and the slot's generation, so that events of live objects differ
//! from those of destroyed objects, of other contexts and of other processes.

use crate::sync::lock::Lock;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// The kind of object that a key names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EventSourceKind {
    Cq,
    Qp,
    Srq,
}

/// Identifies a completion queue, queue pair or shared receive queue in events.
///
/// Never reused while the context lives.
///
/// One channel for several completion queues, which are found by their keys:
///
/// ```no_run
/// # fn f(context: &uverbs::Context) -> Result<(), Box<dyn std::error::Error>> {
/// use std::collections::HashMap;
/// use uverbs::{CompletionQueue, Notify, ObjectKey};
///
/// let channel = context.create_comp_channel()?;
/// let mut cqs: HashMap<ObjectKey, CompletionQueue> = HashMap::new();
/// for _ in 0..2 {
///     let mut cq = context.cq_builder(64).channel(&channel).build()?;
///     cq.req_notify(Notify::Next)?;
///     cqs.insert(cq.key(), cq);
/// }
/// // … queue pairs of both …
/// while let Some(key) = channel.wait(None)? {
///     let Some(cq) = cqs.get_mut(&key) else { continue };
///     cq.req_notify(Notify::Next)?;
///     while let Some(completion) = cq.poll()?.next() {
///         println!("{key:?}: {}", completion.wr_id());
///     }
/// }
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ObjectKey(pub(crate) u64);

impl std::fmt::Debug for ObjectKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ObjectKey({:#018x})", self.0)
    }
}

/// The object that a `user_handle` of an event names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Resolved {
    Live(EventSourceKind, ObjectKey),
    /// An object of this context that was destroyed meanwhile.
    Dead,
    /// An object of another context or process on the same kernel file.
    Foreign(u64),
}

const SLOT_BITS: u32 = 24;
const GENERATION_BITS: u32 = 24;

#[derive(Debug, Default)]
struct KeySlot {
    generation: u32,
    /// `None` while no object has the slot.
    kind: Option<EventSourceKind>,
    arm_sn: ArmSn,
}

/// The number of events of a completion queue that were read from its channel, modulo four: `arm_sn` of
/// libmlx5. The device compares it when the queue is armed.
#[derive(Clone, Debug, Default)]
pub(crate) struct ArmSn(Arc<AtomicU32>);

impl ArmSn {
    /// The count's lowest bit, as in mlx5's doorbell record: arming reads the count far more often than
    /// an event changes it.
    const SHIFT: u32 = 28;

    /// The count, in bits 28 and 29.
    #[inline]
    pub(crate) fn shifted(&self) -> u32 {
        self.0.load(Ordering::Relaxed)
    }

    /// The count.
    pub(crate) fn count(&self) -> u32 {
        self.shifted() >> ArmSn::SHIFT
    }

    /// Counts one event. The caller holds the lock of the slots.
    fn add(&self) {
        let next = self.shifted().wrapping_add(1 << ArmSn::SHIFT) & 3 << ArmSn::SHIFT;
        self.0.store(next, Ordering::Relaxed);
    }
}

#[derive(Debug, Default)]
struct KeySlots {
    all: Vec<KeySlot>,
    free: Vec<u32>,
}

/// The keys of one context.
#[derive(Debug)]
pub(crate) struct Keys {
    secret: u64,
    slots: Lock<KeySlots>,
}

impl Keys {
    /// Keys whose upper bits are the low bits of `secret`, a random number of this context.
    pub(crate) fn new(secret: u64) -> Arc<Keys> {
        // Not zero, or small numbers that other programs use as `user_handle` would look like keys.
        let secret = (secret as u16).max(1);
        let secret = u64::from(secret) << (SLOT_BITS + GENERATION_BITS);
        Arc::new(Keys { secret, slots: Lock::default() })
    }

    /// A fresh key; `None` when 2^24 objects are alive, and in a forked child.
    pub(crate) fn register(self: &Arc<Self>, kind: EventSourceKind) -> Option<EventKey> {
        let mut slots = self.slots.lock()?;
        let index = match slots.free.pop() {
            Some(index) => index,
            None => {
                let index = u32::try_from(slots.all.len()).ok().filter(|i| *i < 1 << SLOT_BITS)?;
                slots.all.push(KeySlot::default());
                index
            }
        };
        let slot = slots.all.get_mut(index as usize)?;
        slot.kind = Some(kind);
        slot.arm_sn = ArmSn::default();
        let key = self.key(index, slot.generation);
        Some(EventKey { keys: self.clone(), index, key, arm_sn: slot.arm_sn.clone() })
    }

    fn key(&self, index: u32, generation: u32) -> ObjectKey {
        ObjectKey(self.secret | u64::from(generation) << SLOT_BITS | u64::from(index))
    }

    /// As [`resolve`](Self::resolve), for an event that was read from a completion channel, which it counts.
    pub(crate) fn resolve_cq_event(&self, number: u64) -> Resolved {
        // Look-up and count under one lock: another object may get the slot afterwards.
        self.look_up(number, |slot| slot.arm_sn.add())
    }

    /// The object that the `user_handle` of an event names.
    pub(crate) fn resolve(&self, number: u64) -> Resolved {
        self.look_up(number, |_| ())
    }

    /// Looks `number` up; calls `seen` with the slot of an object that is alive.
    fn look_up(&self, number: u64, seen: impl FnOnce(&KeySlot)) -> Resolved {
        let low = SLOT_BITS + GENERATION_BITS;
        if number >> low != self.secret >> low {
            return Resolved::Foreign(number);
        }
        let index = (number & ((1 << SLOT_BITS) - 1)) as usize;
        // A forked child has no objects.
        let Some(slots) = self.slots.lock() else { return Resolved::Dead };
        match slots.all.get(index) {
            None => Resolved::Foreign(number),
            Some(slot) => match slot.kind {
                Some(kind) if self.key(index as u32, slot.generation).0 == number => {
                    seen(slot);
                    Resolved::Live(kind, ObjectKey(number))
                }
                _ => Resolved::Dead,
            },
        }
    }
}

/// An object's key. Events with this key resolve until it is dropped; no other object ever gets the key.
#[derive(Debug)]
pub(crate) struct EventKey {
    keys: Arc<Keys>,
    index: u32,
    key: ObjectKey,
    arm_sn: ArmSn,
}

impl EventKey {
    pub(crate) fn key(&self) -> ObjectKey {
        self.key
    }

    pub(crate) fn arm_sn(&self) -> &ArmSn {
        &self.arm_sn
    }
}

impl Drop for EventKey {
    fn drop(&mut self) {
        let Some(mut slots) = self.keys.slots.lock() else { return };
        let KeySlots { all, free } = &mut *slots;
        if let Some(slot) = all.get_mut(self.index as usize) {
            slot.kind = None;
            slot.generation += 1;
            // A slot without generations left is not used again: no key ever repeats.
            if slot.generation < 1 << GENERATION_BITS {
                free.push(self.index);
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::file::random;
    use crate::sync::lock::in_child_while_held;

    #[test]
    fn a_key_lives_as_long_as_its_registration() {
        let keys = Keys::new(7);
        let cq = keys.register(EventSourceKind::Cq).unwrap();
        let key = cq.key();
        assert_eq!(keys.resolve(key.0), Resolved::Live(EventSourceKind::Cq, key));
        drop(cq);
        assert_eq!(keys.resolve(key.0), Resolved::Dead);
        let qp = keys.register(EventSourceKind::Qp).unwrap();
        assert_ne!(qp.key(), key, "the slot is reused, the key is not");
        assert_eq!(keys.resolve(key.0), Resolved::Dead);
    }

    #[test]
    fn events_of_a_queue_are_counted_modulo_four() {
        let keys = Keys::new(7);
        let (cq, other) = (
            keys.register(EventSourceKind::Cq).unwrap(),
            keys.register(EventSourceKind::Cq).unwrap(),
        );
        for count in [1, 2, 3, 0, 1] {
            keys.resolve_cq_event(cq.key().0);
            assert_eq!(cq.arm_sn().shifted(), count << 28);
        }
        assert_eq!(other.arm_sn().shifted(), 0);
    }

    #[test]
    fn an_event_of_a_destroyed_queue_does_not_count_for_the_next_in_its_slot() {
        let keys = Keys::new(7);
        let dead = keys.register(EventSourceKind::Cq).unwrap();
        let old = dead.key().0;
        keys.resolve_cq_event(old);
        drop(dead);
        let next = keys.register(EventSourceKind::Cq).unwrap();
        let slot = |key: u64| key & ((1 << SLOT_BITS) - 1);
        assert_eq!((slot(next.key().0), next.arm_sn().shifted()), (slot(old), 0));
        // Events that were in the channel when the queue was destroyed, and events of another context.
        for number in [old, next.key().0 ^ 1 << 63] {
            keys.resolve_cq_event(number);
            assert_eq!(next.arm_sn().shifted(), 0, "{number:#x}");
        }
    }

    #[test]
    fn keys_of_others_are_foreign() {
        let keys = Keys::new(7);
        let mine = keys.register(EventSourceKind::Srq).unwrap();
        let other = mine.key().0 ^ 1 << 63;
        assert_eq!(keys.resolve(other), Resolved::Foreign(other));
        let unknown = mine.key().0 + 5;
        assert_eq!(keys.resolve(unknown), Resolved::Foreign(unknown));
    }

    #[test]
    fn a_slot_without_generations_left_is_not_reused() {
        let keys = Keys::new(7);
        let first = keys.register(EventSourceKind::Qp).unwrap();
        keys.slots.lock().unwrap().all[0].generation = (1 << GENERATION_BITS) - 1;
        drop(first);
        let second = keys.register(EventSourceKind::Qp).unwrap();
        assert_eq!(second.key().0 & ((1 << SLOT_BITS) - 1), 1);
    }

    /// Another thread of the parent holds the lock during the fork.
    #[test]
    #[cfg_attr(miri, ignore = "it forks")]
    fn a_forked_child_does_not_wait_for_a_lock() {
        let keys = Keys::new(7);
        let mut event_key = keys.register(EventSourceKind::Cq);
        in_child_while_held(
            || keys.slots.lock(),
            || {
                let key = event_key.as_ref().map(|event_key| event_key.key().0);
                assert_eq!(key.map(|key| keys.resolve_cq_event(key)), Some(Resolved::Dead));
                assert!(keys.register(EventSourceKind::Qp).is_none());
                drop(event_key.take());
            },
        );
    }

    #[test]
    fn secrets_differ_and_are_never_zero() {
        let of = |secret| Keys::new(secret).secret;
        let secrets: std::collections::BTreeSet<_> =
            (0..64).flat_map(|_| random::<2>()).map(of).collect();
        assert!(secrets.len() > 64);
        assert_eq!(of(1 << 16), 1 << 48);
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::*;
    use loom::thread;

    /// An event of a queue is read while the queue is destroyed and another one gets its slot. The count of
    /// the other queue must not change, or its next event would be taken for one that was read before.
    #[test]
    fn an_event_of_a_destroyed_queue_races_with_the_reuse_of_its_slot() {
        loom::model(|| {
            let keys = Keys::new(7);
            let dead = keys.register(EventSourceKind::Cq).unwrap();
            let old = dead.key().0;
            let theirs = keys.clone();
            let reader = thread::spawn(move || theirs.resolve_cq_event(old));
            drop(dead);
            let next = keys.register(EventSourceKind::Cq).unwrap();
            reader.join().unwrap();
            assert_eq!(next.arm_sn().shifted(), 0);
        });
    }
}
