//! Makes the messages of a checked run, and checks the messages that arrive.
//!
//! The client makes messages and expects each of them back. The server expects messages of a client
//! that validates. If the first message is not one, it expects the constant messages of a client
//! that does not. It sends back each message that it received.

use super::pattern::{POISON, Wrong, check_plain, compare, fill};
use std::fmt;
use uverbs::Psn;

/// The part that a side has in the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// Sends first.
    Client,
    /// Sends back.
    Server,
}

/// The kind of messages that the peer sends, as the first one shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Expected {
    /// Each message of each queue pair has its own content.
    Distinct,
    /// All messages are the same, but each byte differs from its neighbours: the server has one
    /// buffer for several queue pairs, and messages in it overtake each other.
    Alike,
    /// All bytes are the same: the client does not validate, or is rdma-core's.
    Plain,
}

/// Keeps the messages that were sent, and those that have to arrive.
#[derive(Debug)]
pub(crate) struct Checker {
    role: Role,
    /// The client's first PSNs, one for each queue pair.
    psns: Vec<Psn>,
    plain: u8,
    expected: Option<Expected>,
    sent: Vec<u64>,
    received: Vec<u64>,
    /// The next message of each queue pair; for a server, the received one.
    outgoing: Vec<Vec<u8>>,
    due: Vec<u8>,
}

/// A message that differs from the expected one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mismatch {
    role: Role,
    qp: usize,
    index: u64,
    wrong: Wrong,
    /// The difference from a message of a client that validates, if it might have been one.
    alternative: Option<Wrong>,
}

impl Checker {
    /// For a client. The PSNs of its queue pairs start with `psns`. `kept_apart` says that the
    /// server keeps messages of different queue pairs apart.
    pub(crate) fn client(psns: Vec<Psn>, size: usize, kept_apart: bool) -> Self {
        let expected = if kept_apart { Expected::Distinct } else { Expected::Alike };
        Checker { expected: Some(expected), ..Checker::new(Role::Client, psns, size, 0) }
    }

    /// For a server. The PSNs of its client's queue pairs start with `psns`; `plain` is the byte
    /// that a client sends that does not validate.
    pub(crate) fn server(psns: Vec<Psn>, size: usize, plain: u8) -> Self {
        Checker::new(Role::Server, psns, size, plain)
    }

    fn new(role: Role, psns: Vec<Psn>, size: usize, plain: u8) -> Self {
        let qps = psns.len();
        Checker {
            role,
            psns,
            plain,
            expected: None,
            sent: vec![0; qps],
            received: vec![0; qps],
            outgoing: vec![vec![0; size]; qps],
            due: vec![0; size],
        }
    }

    /// The next message of queue pair `qp`.
    pub(crate) fn outgoing(&mut self, qp: usize) -> &[u8] {
        if self.role == Role::Client {
            let (psn, index) = self.identity(qp, self.sent[qp]);
            fill(&mut self.outgoing[qp], psn, index);
        }
        self.sent[qp] += 1;
        &self.outgoing[qp]
    }

    /// Checks the next message that arrived for queue pair `qp`.
    pub(crate) fn incoming(&mut self, qp: usize, found: &[u8]) -> Result<(), Mismatch> {
        let index = self.received[qp];
        self.received[qp] += 1;
        let (psn, numbered) = self.identity(qp, index);
        if self.expected != Some(Expected::Plain) {
            fill(&mut self.due, psn, numbered);
        }
        let verdict = match self.expected {
            Some(Expected::Plain) => check_plain(found, self.plain),
            Some(_) => compare(&self.due, found),
            None => match compare(&self.due, found) {
                Ok(()) => {
                    self.expected = Some(Expected::Distinct);
                    Ok(())
                }
                Err(alternative) => {
                    self.expected = Some(Expected::Plain);
                    check_plain(found, self.plain)
                        .map_err(|wrong| self.mismatch(qp, index, wrong, Some(alternative)))?;
                    Ok(())
                }
            },
        };
        verdict.map_err(|wrong| self.mismatch(qp, index, wrong, None))?;
        if self.role == Role::Server {
            self.outgoing[qp].copy_from_slice(found);
        }
        Ok(())
    }

    /// The number of checked messages.
    pub(crate) fn checked(&self) -> u64 {
        self.received.iter().sum()
    }

    /// The kind of expected messages; `None` before the first.
    pub(crate) fn expected(&self) -> Option<Expected> {
        self.expected
    }

    /// The PSN and the index that message `index` of a queue pair is made from.
    fn identity(&self, qp: usize, index: u64) -> (Psn, u64) {
        match self.expected {
            Some(Expected::Alike) => (self.psns[0], 0),
            _ => (self.psns[qp], index),
        }
    }

    fn mismatch(
        &self,
        qp: usize,
        index: u64,
        wrong: Wrong,
        alternative: Option<Wrong>,
    ) -> Mismatch {
        Mismatch { role: self.role, qp, index, wrong, alternative }
    }
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Mismatch { role, qp, index, wrong, alternative } = self;
        let arrived = match role {
            Role::Client => "came back",
            Role::Server => "arrived",
        };
        write!(f, "message {index} of queue pair {qp} {arrived} wrong: {wrong}")?;
        match alternative {
            Some(other) => write!(f, "; nor is it of a client that validates: {other}"),
            None => Ok(()),
        }
    }
}

impl fmt::Display for Wrong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Wrong { offset, expected, found } = self;
        write!(f, "byte {offset} is {found:#04x} where {expected:#04x} was due")?;
        match *found {
            POISON => write!(f, " (the device wrote nothing there)"),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pingpong::pattern::PLAIN;

    const SIZE: usize = 100;

    fn psns(count: u32) -> Vec<Psn> {
        (0..count).map(|seed| Psn(seed * 7 + 1)).collect()
    }

    fn pair(qps: u32) -> (Checker, Checker) {
        (Checker::client(psns(qps), SIZE, true), Checker::server(psns(qps), SIZE, PLAIN))
    }

    #[test]
    fn a_server_knows_the_messages_of_its_client() {
        let (mut client, mut server) = pair(3);
        for round in 0..50 {
            for qp in [0, 2, 1] {
                let there = client.outgoing(qp).to_vec();
                server.incoming(qp, &there).unwrap();
                let back = server.outgoing(qp).to_vec();
                assert_eq!(there, back);
                client.incoming(qp, &back).unwrap();
            }
            assert_eq!(client.checked(), (round + 1) * 3);
        }
        assert_eq!(server.expected(), Some(Expected::Distinct));
    }

    #[test]
    fn a_stale_message_is_noticed_on_both_sides() {
        let (mut client, mut server) = pair(1);
        let first = client.outgoing(0).to_vec();
        server.incoming(0, &first).unwrap();
        assert!(server.incoming(0, &first).is_err());
        client.outgoing(0);
        client.incoming(0, &first).unwrap();
        let error = client.incoming(0, &first).unwrap_err().to_string();
        assert!(error.starts_with("message 1 of queue pair 0 came back wrong: byte "), "{error}");
    }

    #[test]
    fn a_message_of_another_queue_pair_is_noticed() {
        let (mut client, mut server) = pair(2);
        server.incoming(0, client.outgoing(0)).unwrap();
        client.outgoing(0);
        assert!(server.incoming(1, client.outgoing(0)).is_err());
    }

    #[test]
    fn a_byte_that_was_not_written_is_named_as_such() {
        let (mut client, _) = pair(1);
        let mut message = client.outgoing(0).to_vec();
        message[99] = POISON;
        let error = client.incoming(0, &message).unwrap_err().to_string();
        assert!(error.contains("byte 99 is 0xdb"), "{error}");
        assert!(error.contains("the device wrote nothing there"), "{error}");
    }

    #[test]
    fn a_server_takes_the_messages_of_other_clients() {
        let (_, mut server) = pair(1);
        let mut plain = vec![PLAIN; SIZE];
        plain[0] = 0;
        for _ in 0..3 {
            server.incoming(0, &plain).unwrap();
            assert_eq!(server.outgoing(0), plain);
        }
        assert_eq!(server.expected(), Some(Expected::Plain));
        plain[50] = 1;
        let error = server.incoming(0, &plain).unwrap_err().to_string();
        assert_eq!(
            error,
            "message 3 of queue pair 0 arrived wrong: byte 50 is 0x01 where 0x7b was due"
        );
    }

    #[test]
    fn a_first_message_that_is_neither_is_an_error_that_says_so() {
        let (mut client, mut server) = pair(1);
        let mut message = client.outgoing(0).to_vec();
        message[60] ^= 0x10;
        let error = server.incoming(0, &message).unwrap_err().to_string();
        assert!(error.contains("byte 1 is"), "{error}");
        assert!(error.contains("nor is it of a client that validates: byte 60"), "{error}");
    }

    #[test]
    fn messages_that_may_overtake_each_other_are_alike() {
        let mut client = Checker::client(psns(2), SIZE, false);
        let one = client.outgoing(0).to_vec();
        let other = client.outgoing(1).to_vec();
        assert_eq!(one, other);
        client.incoming(0, &other).unwrap();
        let mut torn = one.clone();
        torn.rotate_left(1);
        assert!(client.incoming(1, &torn).is_err());
    }
}
