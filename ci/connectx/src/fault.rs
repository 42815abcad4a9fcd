//! Faults that tests inject, and when each is due.
//!
//! Pairs with [`crate::control`], which takes the requests. Commands, WQEs and messages ask here
//! before they are carried out. Injected faults survive resets of the function.

use std::collections::{BTreeMap, VecDeque};

use serde::{Deserialize, Serialize};

use crate::format::syndrome::Syndromes;

/// How a command fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Failure {
    /// It completes with this status.
    Status(u8),
    /// It never completes.
    Silence,
}

/// A queue of a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Side {
    /// The send queue.
    Send,
    /// The receive queue.
    Receive,
}

struct Request {
    /// `None` stands for every queue pair of a user context.
    qpn: Option<u32>,
    side: Side,
    after: u32,
    syndromes: Syndromes,
}

/// What ends the delay of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Delay {
    /// This many nanoseconds.
    Time(u64),
    /// This many other messages of the same function, or [`MAX_DELAY`].
    Messages(u32),
}

/// How many nanoseconds a message waits for other messages at most.
pub const PATIENCE: u64 = 1_000_000_000;

/// A delayed message.
struct Held {
    /// When it goes on in any case.
    due: u64,
    /// How many other messages it still waits for.
    passes: Option<u32>,
}

/// What happens to a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// It is delivered.
    Carried,
    /// It is lost.
    Lost,
    /// The sender retries after this many nanoseconds, or when its queue is scheduled.
    Held(u64),
}

/// The faults that have not happened yet.
#[derive(Default)]
pub struct Faults {
    commands: BTreeMap<u16, (u32, Failure)>,
    requests: Vec<Request>,
    losing: u32,
    delaying: Option<(u32, Delay)>,
    /// Delayed messages by their queue.
    held: BTreeMap<u32, Held>,
    /// Future changes of the link: when, and whether it is up then.
    link: VecDeque<(u64, bool)>,
}

impl Faults {
    /// Makes a command with this opcode fail, after `after` successful ones.
    pub fn fail_command(&mut self, opcode: u16, after: u32, failure: Failure) {
        self.commands.insert(opcode, (after, failure));
    }

    /// Makes a WQE fail, after `after` successful ones, of one queue pair or of every queue pair of
    /// a user context.
    pub fn fail_request(&mut self, qpn: Option<u32>, side: Side, after: u32, syndromes: Syndromes) {
        self.requests.push(Request { qpn, side, after, syndromes });
    }

    /// Loses the next `count` messages.
    pub fn lose_messages(&mut self, count: u32) {
        self.losing = count;
    }

    /// Delays each of the next `count` messages.
    pub fn delay_messages(&mut self, count: u32, by: Delay) {
        self.delaying = (count > 0).then_some((count, by));
    }

    /// Takes the link down and up again `times` times, from `now` on, for this many nanoseconds
    /// each.
    pub fn flap_link(&mut self, now: u64, times: u32, down: u64, up: u64) {
        self.link.clear();
        let mut at = now;
        for _ in 0..times {
            self.link.push_back((at, false));
            at = at.saturating_add(down);
            self.link.push_back((at, true));
            at = at.saturating_add(up);
        }
    }

    /// How the command that has arrived fails, if it does.
    pub(crate) fn command(&mut self, opcode: u16) -> Option<Failure> {
        let (after, failure) = self.commands.get_mut(&opcode)?;
        if *after > 0 {
            *after -= 1;
            return None;
        }
        let failure = *failure;
        self.commands.remove(&opcode);
        Some(failure)
    }

    /// How the send or receive WQE that the device takes fails, if it does. `user` tells whether
    /// the queue pair is one of a user context.
    pub(crate) fn request(&mut self, qpn: u32, user: bool, side: Side) -> Option<Syndromes> {
        let due = self.requests.iter_mut().position(|request| {
            let its = request.side == side && request.qpn.map_or(user, |its| its == qpn);
            if its && request.after > 0 {
                request.after -= 1;
                return false;
            }
            its
        })?;
        Some(self.requests.remove(due).syndromes)
    }

    /// What happens to the next message of a queue, and the queues whose delayed messages may go
    /// on.
    pub(crate) fn message(&mut self, now: u64, queue: u32) -> (Fate, Vec<u32>) {
        if let Some(held) = self.held.get(&queue) {
            if now < held.due && held.passes != Some(0) {
                return (Fate::Held(held.due - now), vec![]);
            }
            self.held.remove(&queue);
            return (Fate::Carried, self.passed());
        }
        if self.losing > 0 {
            self.losing -= 1;
            return (Fate::Lost, vec![]);
        }
        let Some((left, by)) = &mut self.delaying else { return (Fate::Carried, self.passed()) };
        let (wait, passes) = match *by {
            Delay::Time(wait) => (wait, None),
            Delay::Messages(passes) => (PATIENCE, Some(passes)),
        };
        *left -= 1;
        if *left == 0 {
            self.delaying = None;
        }
        self.held.insert(queue, Held { due: now.saturating_add(wait), passes });
        (Fate::Held(wait), vec![])
    }

    /// Counts a message that is delivered; returns the queues whose delayed messages waited for it.
    fn passed(&mut self) -> Vec<u32> {
        let mut ready = Vec::new();
        for (queue, held) in &mut self.held {
            if let Some(passes) = held.passes.as_mut().filter(|passes| **passes > 0) {
                *passes -= 1;
                if *passes == 0 {
                    ready.push(*queue);
                }
            }
        }
        ready
    }

    /// The next change of the link that is due.
    pub(crate) fn link(&mut self, now: u64) -> Option<bool> {
        let (due, up) = *self.link.front()?;
        if due > now {
            return None;
        }
        self.link.pop_front();
        Some(up)
    }

    /// When the link changes next.
    pub(crate) fn next_link(&self) -> Option<u64> {
        self.link.front().map(|(due, _)| *due)
    }

    /// Forgets delayed messages, because their queues are gone.
    pub(crate) fn reset(&mut self) {
        self.held.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SYNDROMES: Syndromes = Syndromes { syndrome: 0x22, vendor: 0x99 };

    #[test]
    fn the_nth_command_fails_once() {
        let mut faults = Faults::default();
        faults.fail_command(0x500, 2, Failure::Silence);
        let seen: Vec<_> = (0..5).map(|_| faults.command(0x500)).collect();
        assert_eq!(seen, [None, None, Some(Failure::Silence), None, None]);
        faults.fail_command(0x500, 0, Failure::Status(5));
        assert_eq!(faults.command(0x501), None);
        assert_eq!(faults.command(0x500), Some(Failure::Status(5)));
    }

    #[test]
    fn the_nth_request_of_a_queue_fails_once() {
        let mut faults = Faults::default();
        faults.fail_request(Some(7), Side::Send, 1, SYNDROMES);
        faults.fail_request(None, Side::Receive, 0, SYNDROMES);
        assert_eq!(faults.request(8, true, Side::Send), None);
        assert_eq!(faults.request(7, false, Side::Send), None);
        assert_eq!(faults.request(7, false, Side::Send), Some(SYNDROMES));
        assert_eq!(faults.request(7, false, Side::Send), None);
        // The kernel's own queue pairs fail only if they are named.
        assert_eq!(faults.request(1, false, Side::Receive), None);
        assert_eq!(faults.request(1, true, Side::Receive), Some(SYNDROMES));
        assert_eq!(faults.request(1, true, Side::Receive), None);
    }

    #[test]
    fn messages_are_lost_then_held_for_a_time() {
        let mut faults = Faults::default();
        faults.lose_messages(1);
        faults.delay_messages(1, Delay::Time(100));
        assert_eq!(faults.message(0, 1).0, Fate::Lost);
        assert_eq!(faults.message(10, 1).0, Fate::Held(100));
        assert_eq!(faults.message(20, 2).0, Fate::Carried);
        assert_eq!(faults.message(50, 1).0, Fate::Held(60));
        assert_eq!(faults.message(110, 1).0, Fate::Carried);
        assert_eq!(faults.message(110, 1).0, Fate::Carried);
    }

    #[test]
    fn a_message_lets_others_pass_but_not_for_ever() {
        let mut faults = Faults::default();
        faults.delay_messages(1, Delay::Messages(2));
        assert_eq!(faults.message(0, 1), (Fate::Held(PATIENCE), vec![]));
        assert_eq!(faults.message(1, 2), (Fate::Carried, vec![]));
        assert_eq!(faults.message(2, 3), (Fate::Carried, vec![1]));
        assert_eq!(faults.message(2, 1), (Fate::Carried, vec![]));
        faults.delay_messages(1, Delay::Messages(2));
        assert_eq!(faults.message(3, 1), (Fate::Held(PATIENCE), vec![]));
        assert_eq!(faults.message(3 + PATIENCE, 1), (Fate::Carried, vec![]));
    }

    #[test]
    fn a_link_flaps_at_its_times() {
        let mut faults = Faults::default();
        faults.flap_link(100, 2, 10, 30);
        let mut seen = Vec::new();
        for now in 0..300 {
            while let Some(up) = faults.link(now) {
                seen.push((now, up));
            }
        }
        assert_eq!(seen, [(100, false), (110, true), (140, false), (150, true)]);
        assert_eq!(faults.next_link(), None);
    }
}
