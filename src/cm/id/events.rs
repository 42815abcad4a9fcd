//! The queue of an id's events, and the tasks that wait for one.

use super::IdInner;
use crate::cm::event::Event;
use crate::error::Result;
use crate::first_panic::FirstPanic;
use std::collections::VecDeque;
use std::task::{Poll, Waker};
use std::time::Instant;
use uverbs_uapi::rdma_user_cm::rdma_cm_event_type as Type;

/// The events of an id that the program has not taken yet. The queue is behind a lock, and [modelled](crate::cm::model)
/// with the tasks that poll.
///
/// The network decides how many events come. So the listener's backlog limits the connect requests, and of each other
/// kind that the network can repeat one event waits. The remaining kinds come once in the life of an id, or the program
/// writes them.
#[derive(Debug, Default)]
pub(super) struct EventQueue {
    events: VecDeque<Event>,
    /// The limit of waiting connect requests; 0 for ids that do not listen.
    backlog: usize,
    /// The number of waiting connect requests.
    requests: usize,
    /// The number of connect requests that were rejected because `backlog` others waited.
    overflows: u64,
    /// The tasks that wait for an event, by the numbers of their waits.
    wakers: Vec<(u64, Waker)>,
    /// The number of waits so far.
    waits: u64,
}

/// The waits of an id by plain polling, without a future that ends the wait when it is dropped: only the task that
/// polled last is woken. Waits of futures have greater numbers.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Polled {
    Event,
    End,
}

impl Polled {
    const COUNT: u64 = 2;

    pub(crate) fn number(self) -> Option<u64> {
        Some(self as u64)
    }
}

impl EventQueue {
    /// Adds an event, or returns one that finds no room.
    fn put(&mut self, event: Event) -> std::result::Result<(), Event> {
        if event.request.is_some() {
            if self.requests >= self.backlog {
                self.overflows += 1;
                return Err(event);
            }
            self.requests += 1;
        } else if self.events.iter().any(|waiting| event.repeats(waiting)) {
            return Err(event);
        }
        self.events.push_back(event);
        Ok(())
    }

    /// The next event. A listener's last event is the removal of its device, which stays for all that wait there.
    fn take(&mut self) -> Option<Event> {
        let next = self.events.front()?;
        if self.backlog > 0 && next.kind == Type::RDMA_CM_EVENT_DEVICE_REMOVAL {
            return Some(next.clone());
        }
        self.requests -= usize::from(next.request.is_some());
        self.events.pop_front()
    }

    fn move_wakers(&mut self, to: &mut Waiting) {
        to.0.extend(self.wakers.drain(..).map(|(_, waker)| waker));
    }
}

/// Tasks to be woken. A waker is code of the program, so that no lock may be held when it is called.
#[derive(Debug, Default)]
pub(in crate::cm) struct Waiting(Vec<Waker>);

impl Waiting {
    /// Whether there is none.
    pub(in crate::cm) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Wakes all of them, also those after a waker that panics.
    pub(in crate::cm) fn wake(self) {
        let mut calls = FirstPanic::default();
        for waker in self.0 {
            calls.catch(|| waker.wake());
        }
        calls.resume();
    }
}

/// A task's wait for events of an id, which ends when this is dropped.
pub(crate) struct EventWait<'a> {
    id: &'a IdInner,
    /// See [`IdInner::poll_event`].
    pub(crate) number: Option<u64>,
}

impl<'a> EventWait<'a> {
    pub(crate) fn new(id: &'a IdInner) -> EventWait<'a> {
        EventWait { id, number: None }
    }
}

impl Drop for EventWait<'_> {
    fn drop(&mut self) {
        if let Some(number) = self.number {
            self.id.end_wait(number);
        }
    }
}

impl IdInner {
    /// Queues an event. The tasks that wait for one are added to `waiting`, for the caller to wake. An event that finds
    /// no room is returned, for the caller to drop: the drop takes another lock, and rejects a connect request.
    pub(in crate::cm) fn receive(&self, event: Event, waiting: &mut Waiting) -> Option<Event> {
        let mut queue = self.queue.lock()?;
        match queue.put(event) {
            Ok(()) => {
                queue.move_wakers(waiting);
                None
            }
            refused => refused.err(),
        }
    }

    /// Sets the limit of waiting connect requests.
    pub(in crate::cm) fn set_backlog(&self, backlog: usize) {
        if let Some(mut queue) = self.queue.lock() {
            queue.backlog = backlog;
        }
    }

    /// The number of connect requests that were rejected because the backlog was full.
    pub(in crate::cm) fn overflows(&self) -> u64 {
        self.queue.lock().map_or(0, |queue| queue.overflows)
    }

    /// Adds the tasks that wait for an event of this id to `waiting`.
    pub(in crate::cm) fn add_waiting(&self, waiting: &mut Waiting) {
        if let Some(mut queue) = self.queue.lock() {
            queue.move_wakers(waiting);
        }
    }

    /// Wakes the tasks that wait for an event of this id.
    pub(crate) fn wake(&self) {
        let mut waiting = Waiting::default();
        self.add_waiting(&mut waiting);
        waiting.wake();
    }

    pub(in crate::cm) fn next_event(&self) -> Option<Event> {
        self.queue.lock()?.take()
    }

    /// The next event; if there is none, the task is woken when one arrives. `wait` is the number of the task's
    /// wait, which the first poll chooses.
    pub(crate) fn poll_event(
        &self,
        verb: &'static str,
        wait: &mut Option<u64>,
        cx: &mut std::task::Context<'_>,
    ) -> Poll<Result<Event>> {
        loop {
            if let Some(event) = self.next_event() {
                return Poll::Ready(Ok(event));
            }
            // Wakers are cloned and dropped without the lock, and before an event is taken, because both may panic.
            let waker = cx.waker().clone();
            let _old;
            let Some(mut queue) = self.queue.lock() else {
                return Poll::Ready(Err(self.channel.forked(verb)));
            };
            if !queue.events.is_empty() {
                continue;
            }
            let number = *wait.get_or_insert_with(|| {
                queue.waits += 1;
                Polled::COUNT + queue.waits
            });
            match queue.wakers.iter_mut().find(|(known, _)| *known == number) {
                Some((_, known)) => _old = std::mem::replace(known, waker),
                None => queue.wakers.push((number, waker)),
            }
            return Poll::Pending;
        }
    }

    /// Forgets the waker of a wait.
    fn end_wait(&self, number: u64) {
        let forgotten = self.queue.lock().and_then(|mut queue| {
            let at = queue.wakers.iter().position(|(known, _)| *known == number)?;
            Some(queue.wakers.swap_remove(at))
        });
        drop(forgotten);
    }

    /// The number of tasks that wait for an event.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn tasks(&self) -> usize {
        self.queue.lock().map_or(0, |queue| queue.wakers.len())
    }

    pub(in crate::cm) fn has_event(&self) -> bool {
        self.queue.lock().is_some_and(|queue| !queue.events.is_empty())
    }

    /// Waits for an event of this id until a deadline, or without a limit for `None`.
    pub(in crate::cm) fn wait_until(
        &self,
        verb: &'static str,
        deadline: Option<Instant>,
    ) -> Result<Option<Event>> {
        self.channel.wait(verb, self, deadline)
    }
}
