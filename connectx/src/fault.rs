//! Faults that tests inject, and when each is due.
//!
//! Pairs with the control socket of `connectx-vfio`, which takes requests. Commands, WQEs and messages ask here
//! before they are carried out. Injected faults survive resets of the function.

use std::collections::{BTreeMap, VecDeque};

use crate::format::syndrome::CqeError;

/// The failure of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CommandFailure {
    /// It completes with this status.
    Status(u8),
    /// It never completes.
    Silence,
}

/// A queue of a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The send queue.
    Send,
    /// The receive queue.
    Receive,
}

struct WqeFault {
    /// `None` stands for every queue pair of a user context.
    qpn: Option<u32>,
    side: Side,
    after: u32,
    syndromes: CqeError,
}

/// The end of a message's delay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Delay {
    /// This many nanoseconds.
    Time(u64),
    /// This many other messages of the same function, or [`MAX_DELAY`].
    Messages(u32),
}

/// The most nanoseconds that a message waits for other messages.
pub const MAX_DELAY: u64 = 1_000_000_000;

/// The fate of a message: of the packets of a request each time that it is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MessageFate {
    /// They are delivered.
    Delivered,
    /// They are lost.
    Lost,
    /// They are late, and the later requests of the queue pair wait behind them. If it sends them again after a timeout,
    /// these have a fate of their own. A function holds at most 1024 packets back, and loses later ones.
    Delayed(Delay),
}

/// The faults that have not happened yet.
#[derive(Default)]
pub struct InjectedFaults {
    commands: BTreeMap<u16, (u32, CommandFailure)>,
    wqes: Vec<WqeFault>,
    to_lose: u32,
    to_refuse: u32,
    to_delay: Option<(u32, Delay)>,
    /// The fate of the next message that no other fault affects.
    next: Option<MessageFate>,
    /// Future changes of the link: when, and whether it is up then.
    link: VecDeque<(u64, bool)>,
}

impl InjectedFaults {
    /// Makes a command with this opcode fail, after `after` successful ones.
    pub fn fail_command(&mut self, opcode: u16, after: u32, failure: CommandFailure) {
        self.commands.insert(opcode, (after, failure));
    }

    /// Makes a WQE fail, after `after` successful ones, of one queue pair or of every queue pair of
    /// a user context.
    pub fn fail_wqe(&mut self, qpn: Option<u32>, side: Side, after: u32, syndromes: CqeError) {
        self.wqes.push(WqeFault { qpn, side, after, syndromes });
    }

    /// Loses the next `count` messages.
    pub fn lose_messages(&mut self, count: u32) {
        self.to_lose = count;
    }

    /// Refuses the next `count` messages that need a receive, as if none was posted.
    pub fn refuse_receives(&mut self, count: u32) {
        self.to_refuse = count;
    }

    /// Decides the fate of the next message that no other fault affects, unless it is decided already. A retry after a
    /// loss is another message.
    pub fn decide_next(&mut self, decide: impl FnOnce() -> MessageFate) {
        self.next.get_or_insert_with(decide);
    }

    /// Delays each of the next `count` messages.
    pub fn delay_messages(&mut self, count: u32, by: Delay) {
        self.to_delay = (count > 0).then_some((count, by));
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

    /// The failure of the command that has arrived, if a test asked for one.
    pub(crate) fn command_fault(&mut self, opcode: u16) -> Option<CommandFailure> {
        let (after, failure) = self.commands.get_mut(&opcode)?;
        if *after > 0 {
            *after -= 1;
            return None;
        }
        let failure = *failure;
        self.commands.remove(&opcode);
        Some(failure)
    }

    /// The failure of the send or receive WQE that the device takes, if a test asked for one. `user` tells whether the
    /// queue pair belongs to a user context.
    pub(crate) fn wqe_fault(&mut self, qpn: u32, user: bool, side: Side) -> Option<CqeError> {
        let due = self.wqes.iter_mut().position(|wqe| {
            let its = wqe.side == side && wqe.qpn.map_or(user, |its| its == qpn);
            if its && wqe.after > 0 {
                wqe.after -= 1;
                return false;
            }
            its
        })?;
        Some(self.wqes.remove(due).syndromes)
    }

    /// Whether a message that needs a receive is refused.
    pub(crate) fn refuses_receive(&mut self) -> bool {
        let refuses = self.to_refuse > 0;
        self.to_refuse = self.to_refuse.saturating_sub(1);
        refuses
    }

    /// The fate of the next message.
    pub(crate) fn message_fate(&mut self) -> MessageFate {
        if self.to_lose > 0 {
            self.to_lose -= 1;
            return MessageFate::Lost;
        }
        match self.scripted_delay() {
            Some(delay) => MessageFate::Delayed(delay),
            None => self.next.take().unwrap_or(MessageFate::Delivered),
        }
    }

    /// The delay of the next message, if a test asked for one.
    fn scripted_delay(&mut self) -> Option<Delay> {
        let (left, by) = self.to_delay.as_mut()?;
        let by = *by;
        *left -= 1;
        if *left == 0 {
            self.to_delay = None;
        }
        Some(by)
    }

    /// The next change of the link that is due.
    pub(crate) fn due_link_change(&mut self, now: u64) -> Option<bool> {
        let (due, up) = *self.link.front()?;
        if due > now {
            return None;
        }
        self.link.pop_front();
        Some(up)
    }

    /// When the link changes next.
    pub(crate) fn next_link_change(&self) -> Option<u64> {
        self.link.front().map(|(due, _)| *due)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SYNDROMES: CqeError = CqeError { syndrome: 0x22, vendor: 0x99 };

    #[test]
    fn the_nth_command_fails_once() {
        let mut faults = InjectedFaults::default();
        faults.fail_command(0x500, 2, CommandFailure::Silence);
        let seen: Vec<_> = (0..5).map(|_| faults.command_fault(0x500)).collect();
        assert_eq!(seen, [None, None, Some(CommandFailure::Silence), None, None]);
        faults.fail_command(0x500, 0, CommandFailure::Status(5));
        assert_eq!(faults.command_fault(0x501), None);
        assert_eq!(faults.command_fault(0x500), Some(CommandFailure::Status(5)));
    }

    #[test]
    fn the_nth_wqe_of_a_queue_fails_once() {
        let mut faults = InjectedFaults::default();
        faults.fail_wqe(Some(7), Side::Send, 1, SYNDROMES);
        faults.fail_wqe(None, Side::Receive, 0, SYNDROMES);
        assert_eq!(faults.wqe_fault(8, true, Side::Send), None);
        assert_eq!(faults.wqe_fault(7, false, Side::Send), None);
        assert_eq!(faults.wqe_fault(7, false, Side::Send), Some(SYNDROMES));
        assert_eq!(faults.wqe_fault(7, false, Side::Send), None);
        // The kernel's own queue pairs fail only if they are named.
        assert_eq!(faults.wqe_fault(1, false, Side::Receive), None);
        assert_eq!(faults.wqe_fault(1, true, Side::Receive), Some(SYNDROMES));
        assert_eq!(faults.wqe_fault(1, true, Side::Receive), None);
    }

    #[test]
    fn the_given_number_of_receives_is_refused() {
        let mut faults = InjectedFaults::default();
        faults.refuse_receives(2);
        let seen: Vec<_> = (0..4).map(|_| faults.refuses_receive()).collect();
        assert_eq!(seen, [true, true, false, false]);
    }

    #[test]
    fn messages_are_lost_then_delayed() {
        let mut faults = InjectedFaults::default();
        faults.lose_messages(1);
        faults.delay_messages(2, Delay::Time(100));
        let seen: Vec<_> = (0..4).map(|_| faults.message_fate()).collect();
        let late = MessageFate::Delayed(Delay::Time(100));
        assert_eq!(seen, [MessageFate::Lost, late, late, MessageFate::Delivered]);
    }

    #[test]
    fn each_message_without_an_injected_fault_is_decided_once() {
        let mut faults = InjectedFaults::default();
        let late = MessageFate::Delayed(Delay::Time(5));
        faults.lose_messages(1);
        faults.decide_next(|| late);
        faults.decide_next(|| unreachable!("it is decided"));
        assert_eq!((faults.message_fate(), faults.message_fate()), (MessageFate::Lost, late));
        assert_eq!(faults.message_fate(), MessageFate::Delivered);
        faults.decide_next(|| MessageFate::Lost);
        assert_eq!(faults.message_fate(), MessageFate::Lost);
    }

    #[test]
    fn link_changes_happen_at_their_times() {
        let mut faults = InjectedFaults::default();
        faults.flap_link(100, 2, 10, 30);
        let mut seen = Vec::new();
        for now in 0..300 {
            while let Some(up) = faults.due_link_change(now) {
                seen.push((now, up));
            }
        }
        assert_eq!(seen, [(100, false), (110, true), (140, false), (150, true)]);
        assert_eq!(faults.next_link_change(), None);
    }
}
