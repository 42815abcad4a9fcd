//! The state machine of a connection: no socket, no clock, no thread.
//!
//! Pairs with `core/cm.c`. Messages and the time come in as arguments; messages to send and events to report go out as
//! values. A message that needs an answer is sent again until the answer comes.
//!
//! ```text
//!           connect           REQ received
//!    Idle ───────────► ReqSent        Idle ─────────► ReqReceived
//!                         │ REP                          │ accept
//!                         ▼                              ▼
//!                     RepReceived                     RepSent
//!                         │ confirm (RTU)                │ RTU
//!                         ▼                              ▼
//!                     Established ◄──────────────── Established
//!                         │ disconnect (DREQ)            │ DREQ received (DREP)
//!                         ▼                              ▼
//!                      DreqSent ──── DREP ────►       TimeWait
//! ```

use super::message::{Body, Gid, Message, PrivateData, Service, Side, Transport};

/// Retries of a message: `CMA_MAX_CM_RETRIES`.
pub(super) const RETRIES: u8 = 15;
/// Nanoseconds until a message is sent again: twice 4.096 µs · 2²⁰, `CMA_CM_RESPONSE_TIMEOUT`.
pub(super) const RESPONSE_TIMEOUT: u64 = 2 * (4_096 << 20);
/// Nanoseconds for which a connection that ended keeps its number.
const TIME_WAIT: u64 = 2 * (4_096 << 20);

/// The reasons for a rejection that the machine itself gives: `enum ib_cm_rej_reason`.
pub(crate) const REJ_TIMEOUT: u32 = 4;
pub(crate) const REJ_CONSUMER_DEFINED: u32 = 28;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Idle,
    ReqSent,
    ReqReceived,
    RepSent,
    RepReceived,
    Established,
    DreqSent,
    TimeWait,
    Closed,
}

/// An event of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Report {
    /// The peer accepted, with these parameters.
    Response(Side),
    Rejected {
        reason: u32,
        private_data: PrivateData,
    },
    /// The peer did not answer.
    Unreachable,
    Established,
    /// Either side ended the connection.
    Disconnected,
    /// The connection's number may be used again.
    TimeWaitExit,
}

/// One end of a connection.
#[derive(Clone, Debug)]
pub(crate) struct Connection {
    pub(crate) state: State,
    pub(crate) local: u32,
    pub(crate) remote: u32,
    pub(crate) from: Gid,
    pub(crate) to: Gid,
    /// The peer's parameters.
    pub(crate) peer: Side,
    /// Our parameters.
    pub(crate) own: Side,
    pub(crate) transport: Transport,
    /// The message that waits for an answer, and how often it may still be sent.
    pending: Option<(Body, u8)>,
    due: Option<u64>,
}

/// The first PSN that an end expects: it differs from connection to connection.
fn first_psn(connection: u32) -> u32 {
    connection.wrapping_mul(0x5bd1_e995) >> 8
}

/// The messages and reports of one input.
#[derive(Debug, Default)]
pub(crate) struct Output {
    pub(crate) messages: Vec<Message>,
    pub(crate) reports: Vec<Report>,
}

impl Connection {
    /// The active end, before its request.
    pub(crate) fn new(local: u32, from: Gid, to: Gid, transport: Transport) -> Connection {
        Connection {
            state: State::Idle,
            local,
            remote: 0,
            from,
            to,
            peer: Side::default(),
            own: Side::default(),
            transport,
            pending: None,
            due: None,
        }
    }

    /// The passive end, of a request that came.
    pub(crate) fn requested(
        local: u32,
        request: &Message,
        transport: Transport,
        side: &Side,
    ) -> Connection {
        let mirrored = side.mirrored();
        let own = Side {
            starting_psn: first_psn(local),
            responder_resources: mirrored.responder_resources,
            initiator_depth: mirrored.initiator_depth,
            ..Side::default()
        };
        Connection {
            state: State::ReqReceived,
            remote: request.local,
            peer: side.clone(),
            own,
            ..Connection::new(local, request.to, request.from, transport)
        }
    }

    fn message(&self, body: Body) -> Message {
        Message { from: self.from, to: self.to, local: self.local, remote: self.remote, body }
    }

    /// Sends a message, again and again until an answer comes.
    fn ask(&mut self, now: u64, body: Body, output: &mut Output) {
        self.pending = Some((body.clone(), RETRIES));
        self.due = Some(now + RESPONSE_TIMEOUT);
        output.messages.push(self.message(body));
    }

    fn answered(&mut self) {
        (self.pending, self.due) = (None, None);
    }

    /// Asks for a connection.
    pub(crate) fn connect(&mut self, now: u64, service: Service, mut side: Side) -> Output {
        let mut output = Output::default();
        side.starting_psn = first_psn(self.local);
        self.own = side.clone();
        self.state = State::ReqSent;
        self.ask(now, Body::Req { service, kind: self.transport, side }, &mut output);
        output
    }

    /// Accepts a request; `None` if the request is gone.
    pub(crate) fn accept(&mut self, now: u64, mut side: Side) -> Option<Output> {
        if self.state != State::ReqReceived {
            return None;
        }
        side.starting_psn = self.own.starting_psn;
        let mut output = Output::default();
        self.own = side.clone();
        self.state = State::RepSent;
        self.ask(now, Body::Rep { side }, &mut output);
        Some(output)
    }

    /// Confirms a reply.
    pub(crate) fn confirm(&mut self) -> Option<Output> {
        if self.state != State::RepReceived {
            return None;
        }
        self.state = State::Established;
        Some(Output { messages: vec![self.message(Body::Rtu)], ..Output::default() })
    }

    /// Rejects a request, or a reply.
    pub(crate) fn reject(&mut self, reason: u32, private_data: PrivateData) -> Option<Output> {
        let can = matches!(
            self.state,
            State::ReqReceived | State::RepReceived | State::RepSent | State::ReqSent
        );
        if !can {
            return None;
        }
        self.answered();
        self.state = State::Closed;
        let message = self.message(Body::Rej { reason, private_data });
        Some(Output { messages: vec![message], ..Output::default() })
    }

    /// Ends a connection.
    pub(crate) fn disconnect(&mut self, now: u64) -> Option<Output> {
        let mut output = Output::default();
        match self.state {
            State::Established | State::RepSent | State::RepReceived => {
                self.state = State::DreqSent;
                self.ask(now, Body::Dreq, &mut output);
            }
            // The peer ended it, or this side did before.
            State::TimeWait | State::DreqSent => {}
            _ => return None,
        }
        Some(output)
    }

    /// Whether its queue pair may be initialised, as in `cm_init_qp_init_attr`: a handshake is under way, or the
    /// connection is established.
    pub(crate) fn is_alive(&self) -> bool {
        matches!(
            self.state,
            State::ReqSent
                | State::ReqReceived
                | State::RepSent
                | State::RepReceived
                | State::Established
        )
    }

    /// Destroys the connection in any state, as `cm_destroy_id`.
    pub(crate) fn destroy(&mut self, now: u64) -> Output {
        match self.state {
            State::ReqSent => self.reject(REJ_TIMEOUT, Vec::new()),
            State::ReqReceived | State::RepSent | State::RepReceived => {
                self.reject(REJ_CONSUMER_DEFINED, Vec::new())
            }
            State::Established => self.disconnect(now),
            _ => None,
        }
        .unwrap_or_default()
    }

    /// Takes a message of the peer.
    pub(crate) fn handle(&mut self, now: u64, message: &Message) -> Output {
        let mut output = Output::default();
        match (&message.body, self.state) {
            (Body::Rep { side }, State::ReqSent) => {
                self.answered();
                self.remote = message.local;
                self.peer = side.clone();
                self.state = State::RepReceived;
                let mirrored = side.mirrored();
                self.own.responder_resources = mirrored.responder_resources;
                self.own.initiator_depth = mirrored.initiator_depth;
                output.reports.push(Report::Response(mirrored));
            }
            // The confirmation was lost.
            (Body::Rep { .. }, State::Established) => {
                output.messages.push(self.message(Body::Rtu));
            }
            (Body::Rtu, State::RepSent) => {
                self.answered();
                self.state = State::Established;
                output.reports.push(Report::Established);
            }
            (
                Body::Rej { reason, private_data },
                State::ReqSent | State::ReqReceived | State::RepSent | State::RepReceived,
            ) => {
                self.answered();
                self.state = State::Closed;
                let (reason, private_data) = (*reason, private_data.clone());
                output.reports.push(Report::Rejected { reason, private_data });
            }
            (Body::Rej { .. }, State::Established) => self.end(now, &mut output),
            (
                Body::Dreq,
                State::Established | State::RepSent | State::RepReceived | State::DreqSent,
            ) => {
                output.messages.push(self.message(Body::Drep));
                self.end(now, &mut output);
            }
            (Body::Dreq, State::TimeWait) => output.messages.push(self.message(Body::Drep)),
            (Body::Drep, State::DreqSent) => self.end(now, &mut output),
            _ => {}
        }
        output
    }

    fn end(&mut self, now: u64, output: &mut Output) {
        self.answered();
        self.state = State::TimeWait;
        self.due = Some(now + TIME_WAIT);
        output.reports.push(Report::Disconnected);
    }

    /// When [`timeout`](Self::timeout) is to be called.
    pub(crate) fn deadline(&self) -> Option<u64> {
        self.due
    }

    /// If the deadline has come, sends the pending message again, gives up, or ends TIMEWAIT.
    pub(crate) fn timeout(&mut self, now: u64) -> Output {
        let mut output = Output::default();
        if self.due.is_none_or(|due| now < due) {
            return output;
        }
        if self.state == State::TimeWait {
            self.due = None;
            self.state = State::Closed;
            output.reports.push(Report::TimeWaitExit);
            return output;
        }
        match self.pending.take() {
            Some((body, left)) if left > 0 => {
                output.messages.push(self.message(body.clone()));
                self.pending = Some((body, left - 1));
                self.due = Some(now + RESPONSE_TIMEOUT);
            }
            _ if self.state == State::DreqSent => self.end(now, &mut output),
            _ => {
                self.due = None;
                self.state = State::Closed;
                output.reports.push(Report::Unreachable);
            }
        }
        output
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Gid = [1; 16];
    const B: Gid = [2; 16];
    const SERVICE: Service = Service { space: 0x106, port: 7, source_port: 9 };

    fn ends() -> (Connection, Connection) {
        let mut active = Connection::new(1, A, B, Transport::Rc);
        let output = active.connect(0, SERVICE, Side { qpn: 5, ..Side::default() });
        let Body::Req { side, .. } = &output.messages[0].body else { panic!("no request") };
        let passive = Connection::requested(2, &output.messages[0], Transport::Rc, side);
        (active, passive)
    }

    fn connected() -> (Connection, Connection) {
        let (mut active, mut passive) = ends();
        let reply = passive.accept(0, Side { qpn: 6, ..Side::default() }).unwrap();
        let heard = active.handle(0, &reply.messages[0]);
        assert!(matches!(&heard.reports[..], [Report::Response(side)] if side.qpn == 6));
        let confirmed = active.confirm().unwrap();
        let heard = passive.handle(0, &confirmed.messages[0]);
        assert_eq!(heard.reports, [Report::Established]);
        (active, passive)
    }

    #[test]
    fn both_ends_are_established_after_three_messages() {
        let (active, passive) = connected();
        assert_eq!((active.state, passive.state), (State::Established, State::Established));
        assert_eq!((active.deadline(), passive.deadline()), (None, None));
        assert_eq!((active.remote, passive.remote), (2, 1));
    }

    #[test]
    fn a_request_without_an_answer_is_sent_again_and_then_given_up() {
        let (mut active, _) = ends();
        let mut sent = 1;
        loop {
            let output = active.timeout(active.deadline().unwrap());
            sent += output.messages.len();
            if !output.reports.is_empty() {
                assert_eq!(output.reports, [Report::Unreachable]);
                break;
            }
        }
        assert_eq!((sent, active.state, active.deadline()), (16, State::Closed, None));
    }

    #[test]
    fn a_lost_confirmation_is_repeated() {
        let (mut active, mut passive) = ends();
        let reply = passive.accept(0, Side::default()).unwrap();
        active.handle(0, &reply.messages[0]);
        drop(active.confirm().unwrap());
        let again = passive.timeout(passive.deadline().unwrap());
        let confirmed = active.handle(0, &again.messages[0]);
        assert_eq!(confirmed.reports, []);
        assert_eq!(passive.handle(0, &confirmed.messages[0]).reports, [Report::Established]);
    }

    #[test]
    fn either_side_ends_the_connection_once() {
        let (mut active, mut passive) = connected();
        let request = passive.disconnect(5).unwrap();
        let heard = active.handle(5, &request.messages[0]);
        assert_eq!(heard.reports, [Report::Disconnected]);
        assert_eq!(passive.handle(5, &heard.messages[0]).reports, [Report::Disconnected]);
        assert_eq!(passive.disconnect(5).unwrap().messages, []);
        let left = active.timeout(active.deadline().unwrap());
        assert_eq!((left.reports, active.state), (vec![Report::TimeWaitExit], State::Closed));
    }

    #[test]
    fn a_rejection_ends_the_handshake_with_its_reason() {
        let (mut active, mut passive) = ends();
        let refusal = passive.reject(28, vec![7]).unwrap();
        let heard = active.handle(0, &refusal.messages[0]);
        let private_data = vec![7];
        assert_eq!(heard.reports, [Report::Rejected { reason: 28, private_data }]);
        assert!(passive.accept(0, Side::default()).is_none());
    }
}
