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
//!
//! A message that comes again is answered from the state:
//!
//! | message | state | answer |
//! |---|---|---|
//! | REQ | ReqReceived | MRA: the program takes its time |
//! | REQ | RepSent | REP; the kernel drops it |
//! | REQ | TimeWait | REJ, stale connection |
//! | REP | RepReceived | MRA |
//! | REP | Established | RTU |
//! | DREQ | TimeWait | DREP |
//!
//! Anything else that does not fit the state is dropped.

use super::message::{About, Body, Gid, Message, PrivateData, Service, Side, Terms, Transport};

/// Retries of a message: `CMA_MAX_CM_RETRIES`.
pub(super) const RETRIES: u8 = 15;
/// Retries of a message to a peer that has only sent a request, perhaps in the name of somebody else: who can send one
/// has four messages go to that address, and no more. A peer that is there answers one, or sends its request again, and
/// each is answered.
pub(super) const UNPROVEN_RETRIES: u8 = 3;
/// Time until a peer answers: `CMA_CM_RESPONSE_TIMEOUT`.
const RESPONSE_TIMEOUT: u8 = 20;
/// Time that a packet is under way: `CMA_IBOE_PACKET_LIFETIME`.
const PACKET_LIFE_TIME: u8 = 16;
/// Time of an acknowledgement, for which a connection that ended keeps its number, too: that of a packet both ways, and
/// of a device as slow (`cm_ack_timeout`).
pub(super) const ACK_TIMEOUT: u8 = PACKET_LIFE_TIME + 2;
/// Time that a program takes for its answer: `CMA_CM_MRA_SETTING`.
const SERVICE_TIMEOUT: u8 = 24;
/// The longest time of a peer's choice.
const LONGEST_TIMEOUT: u8 = SERVICE_TIMEOUT;

/// Nanoseconds until a request is sent again.
pub(super) const REQUEST_INTERVAL: u64 =
    2 * nanoseconds(PACKET_LIFE_TIME) + nanoseconds(RESPONSE_TIMEOUT);

/// About 4.096 µs · 2ⁿ, as `cm_convert_to_ms` rounds it.
const fn nanoseconds(timeout: u8) -> u64 {
    1_000_000 << timeout.saturating_sub(8)
}

/// The same of a time that a peer chose: neither does it hold a connection for hours, nor does one request have many
/// answers at once, which go to the address that it names as its sender.
fn peers_nanoseconds(timeout: u8) -> u64 {
    nanoseconds(timeout.clamp(PACKET_LIFE_TIME, LONGEST_TIMEOUT))
}

/// The reasons for a rejection that the machine itself gives: `enum ib_cm_rej_reason`.
pub(crate) const REJ_NO_RESOURCES: u32 = 3;
pub(crate) const REJ_TIMEOUT: u32 = 4;
pub(crate) const REJ_INVALID_COMM_ID: u32 = 6;
pub(crate) const REJ_STALE_CONN: u32 = 10;
pub(super) const REJ_INVALID_GID: u32 = 12;
pub(super) const REJ_INVALID_MTU: u32 = 26;
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

/// An event of a connection, or of a query of a datagram service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Report {
    /// A peer asks for a connection, or for the queue pair of a datagram service.
    Requested(Message),
    /// The peer accepted, with these parameters.
    Response(Side),
    Rejected {
        reason: u32,
        private_data: PrivateData,
    },
    /// The peer did not answer.
    Unreachable,
    Established,
    /// A datagram service answered.
    Answered(Message),
    /// Either side ended the connection.
    Disconnected,
    /// The connection's number may be used again.
    TimeWaitExit,
}

/// A message that waits for an answer.
#[derive(Clone, Debug)]
struct Pending {
    message: Message,
    /// How often it may still be sent.
    left: u8,
    /// Nanoseconds between two of them.
    interval: u64,
    /// Whether the peer asked for more time.
    is_extended: bool,
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
    /// `enum ib_mtu` of the path.
    pub(crate) mtu: u8,
    /// The transaction ID of the handshake.
    transaction: u64,
    /// Nanoseconds between two of our messages, and how often one is sent again.
    interval: u64,
    retries: u8,
    /// Whether the peer is at its address: this side chose it, or the peer has told our number.
    is_proven: bool,
    pending: Option<Pending>,
    due: Option<u64>,
}

/// The messages and reports of one input.
#[derive(Debug, Default)]
pub(crate) struct Output {
    pub(crate) messages: Vec<Message>,
    pub(crate) reports: Vec<Report>,
}

impl Connection {
    /// The active end, before its request: with its number and the first PSN that it expects.
    pub(crate) fn new(
        (local, psn): (u32, u32),
        from: Gid,
        to: Gid,
        transport: Transport,
    ) -> Connection {
        Connection {
            state: State::Idle,
            local,
            remote: 0,
            from,
            to,
            peer: Side::default(),
            own: Side { starting_psn: psn, ..Side::default() },
            transport,
            mtu: 0,
            transaction: local.into(),
            interval: REQUEST_INTERVAL,
            retries: RETRIES,
            is_proven: true,
            pending: None,
            due: None,
        }
    }

    /// The passive end, of a request that came.
    pub(crate) fn requested(
        (local, psn): (u32, u32),
        request: &Message,
        transport: Transport,
        side: &Side,
        terms: &Terms,
    ) -> Connection {
        let mirrored = side.mirrored();
        let own = Side {
            starting_psn: psn,
            responder_resources: mirrored.responder_resources,
            initiator_depth: mirrored.initiator_depth,
            ..Side::default()
        };
        Connection {
            state: State::ReqReceived,
            remote: request.local,
            peer: side.clone(),
            own,
            mtu: terms.mtu,
            transaction: request.transaction,
            interval: peers_nanoseconds(terms.response_timeout),
            retries: terms.retries,
            is_proven: false,
            ..Connection::new((local, psn), request.to, request.from, transport)
        }
    }

    fn message(&self, body: Body) -> Message {
        Message {
            from: self.from,
            to: self.to,
            local: self.local,
            remote: self.remote,
            transaction: self.transaction,
            body,
        }
    }

    /// Sends a message, again and again until an answer comes.
    fn ask(&mut self, now: u64, body: Body, output: &mut Output) {
        let message = self.message(body);
        output.messages.push(message.clone());
        let most = if self.is_proven { u8::MAX } else { UNPROVEN_RETRIES };
        let (left, interval) = (self.retries.min(most), self.interval);
        self.pending = Some(Pending { message, left, interval, is_extended: false });
        self.due = Some(now + interval);
    }

    fn answered(&mut self) {
        (self.pending, self.due) = (None, None);
    }

    /// Asks for a connection over a path.
    pub(crate) fn connect(
        &mut self,
        now: u64,
        service: Service,
        mut side: Side,
        (mtu, traffic_class): (u8, u8),
    ) -> Output {
        let mut output = Output::default();
        side.starting_psn = self.own.starting_psn;
        self.own = side.clone();
        self.mtu = mtu;
        self.state = State::ReqSent;
        let (response_timeout, retries) = (RESPONSE_TIMEOUT, RETRIES);
        let terms = Terms { mtu, traffic_class, response_timeout, retries };
        self.ask(now, Body::Req { service, kind: self.transport, side, terms }, &mut output);
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
        self.ask(now, Body::Rep { kind: self.transport, side }, &mut output);
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
        let about = match self.state {
            State::ReqReceived => About::Req,
            State::RepReceived => About::Rep,
            State::RepSent | State::ReqSent => About::Other,
            _ => return None,
        };
        self.answered();
        self.state = State::Closed;
        let mut message = self.message(Body::Rej { about, reason, private_data });
        // As `cm_format_rej`: a refused requester learns no number.
        if about == About::Req {
            message.local = 0;
        }
        Some(Output { messages: vec![message], ..Output::default() })
    }

    /// Ends a connection.
    pub(crate) fn disconnect(&mut self, now: u64) -> Option<Output> {
        let mut output = Output::default();
        match self.state {
            State::Established | State::RepSent | State::RepReceived => {
                self.state = State::DreqSent;
                self.ask(now, Body::Dreq { qpn: self.peer.qpn }, &mut output);
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

    /// Destroys the connection in any state, as `cm_destroy_id`. That sends one DREQ and waits for no DREP; this one is
    /// sent again twice, and soon.
    pub(crate) fn destroy(&mut self, now: u64) -> Output {
        let output = match self.state {
            State::ReqSent => self.reject(REJ_TIMEOUT, Vec::new()),
            State::ReqReceived | State::RepSent | State::RepReceived => {
                self.reject(REJ_CONSUMER_DEFINED, Vec::new())
            }
            State::Established => self.disconnect(now),
            _ => None,
        };
        if let (State::DreqSent, Some(pending)) = (self.state, &mut self.pending) {
            pending.left = pending.left.min(2);
            pending.interval = pending.interval.min(REQUEST_INTERVAL);
            self.due = self.due.map(|due| due.min(now + pending.interval));
        }
        output.unwrap_or_default()
    }

    /// Takes a message of the peer.
    pub(crate) fn handle(&mut self, now: u64, message: &Message) -> Output {
        let mut output = Output::default();
        if !matches!(message.body, Body::Req { .. }) && !self.is_proven {
            self.is_proven = true;
            let spared = self.retries.saturating_sub(UNPROVEN_RETRIES);
            self.pending.iter_mut().for_each(|pending| pending.left += spared);
        }
        match (&message.body, self.state) {
            // A duplicate: the program has not answered the first one.
            (Body::Req { .. }, State::ReqReceived) => self.put_off(About::Req, &mut output),
            // The reply was lost, or crosses it.
            (Body::Req { .. }, State::RepSent) => {
                output.messages.extend(self.pending.as_ref().map(|reply| reply.message.clone()));
            }
            (Body::Req { .. }, State::TimeWait) => {
                let (about, reason) = (About::Req, REJ_STALE_CONN);
                let refusal = Body::Rej { about, reason, private_data: Vec::new() };
                output.messages.push(message.reply(refusal));
            }
            (Body::Mra { about: About::Req, timeout }, State::ReqSent)
            | (Body::Mra { about: About::Rep, timeout }, State::RepSent) => {
                self.extend(now, *timeout);
            }
            (Body::Rep { side, .. }, State::ReqSent) => {
                self.answered();
                self.remote = message.local;
                self.peer = side.clone();
                self.state = State::RepReceived;
                let mirrored = side.mirrored();
                self.own.responder_resources = mirrored.responder_resources;
                self.own.initiator_depth = mirrored.initiator_depth;
                output.reports.push(Report::Response(mirrored));
            }
            (Body::Rep { .. }, State::RepReceived) => self.put_off(About::Rep, &mut output),
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
                Body::Rej { reason, private_data, .. },
                State::ReqSent | State::ReqReceived | State::RepSent | State::RepReceived,
            ) => {
                self.answered();
                self.state = State::Closed;
                let (reason, private_data) = (*reason, private_data.clone());
                output.reports.push(Report::Rejected { reason, private_data });
            }
            (Body::Rej { .. }, State::Established | State::DreqSent) => self.end(now, &mut output),
            // As `cm_dreq_handler`, which looks for another queue pair first.
            (Body::Dreq { qpn }, _) if *qpn != self.own.qpn => {}
            (
                Body::Dreq { .. },
                State::Established | State::RepSent | State::RepReceived | State::DreqSent,
            ) => {
                output.messages.push(message.reply(Body::Drep));
                self.end(now, &mut output);
            }
            (Body::Dreq { .. }, State::TimeWait) => output.messages.push(message.reply(Body::Drep)),
            (Body::Drep, State::DreqSent) => self.end(now, &mut output),
            _ => {}
        }
        output
    }

    /// Answers a duplicate with an MRA, as the delayed one of `cma_ib_req_handler` and `cma_ib_handler`.
    fn put_off(&self, about: About, output: &mut Output) {
        output.messages.push(self.message(Body::Mra { about, timeout: SERVICE_TIMEOUT }));
    }

    /// Waits for longer, once for a message.
    fn extend(&mut self, now: u64, timeout: u8) {
        let Some(pending) = self.pending.as_mut().filter(|pending| !pending.is_extended) else {
            return;
        };
        pending.is_extended = true;
        pending.interval = peers_nanoseconds(timeout) + nanoseconds(ACK_TIMEOUT);
        self.due = Some(now + pending.interval);
    }

    fn end(&mut self, now: u64, output: &mut Output) {
        self.answered();
        self.state = State::TimeWait;
        self.due = Some(now + nanoseconds(ACK_TIMEOUT));
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
        match &mut self.pending {
            Some(pending) if pending.left > 0 => {
                pending.left -= 1;
                output.messages.push(pending.message.clone());
                self.due = Some(now + pending.interval);
            }
            _ if self.state == State::DreqSent => self.end(now, &mut output),
            _ => {
                self.answered();
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
        let mut active = Connection::new((1, 10), A, B, Transport::Rc);
        let side = Side { qpn: 5, ..Side::default() };
        let output = active.connect(0, SERVICE, side, (3, 0));
        let Body::Req { side, terms, .. } = &output.messages[0].body else { panic!("no request") };
        let request = &output.messages[0];
        let passive = Connection::requested((2, 20), request, Transport::Rc, side, terms);
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

    /// Messages of a connection until it gives up, each time that one is due.
    fn sent_until_the_end(connection: &mut Connection) -> usize {
        let mut sent = 0;
        while let Some(due) = connection.deadline() {
            sent += connection.timeout(due).messages.len();
        }
        sent
    }

    #[test]
    fn a_peer_that_only_asked_is_sent_four_messages() {
        let (_, mut passive) = ends();
        let reply = passive.accept(0, Side::default()).unwrap();
        assert_eq!((reply.messages.len(), sent_until_the_end(&mut passive)), (1, 3));
        assert_eq!(passive.state, State::Closed);
        // A program that gives the connection up asks no more often for its end.
        let (_, mut passive) = ends();
        passive.accept(0, Side::default()).unwrap();
        assert_eq!(passive.disconnect(0).unwrap().messages.len(), 1);
        assert_eq!(sent_until_the_end(&mut passive), 3);
        // A peer may ask for fewer.
        let (_, mut passive) = ends();
        passive.retries = 1;
        passive.accept(0, Side::default()).unwrap();
        assert_eq!(sent_until_the_end(&mut passive), 1);
    }

    #[test]
    fn a_peer_that_has_told_our_number_gets_all_retries() {
        let (_, mut passive) = ends();
        let reply = passive.accept(0, Side::default()).unwrap();
        let mra = Body::Mra { about: About::Rep, timeout: 18 };
        passive.handle(0, &Message { body: mra, ..reply.messages[0].clone() });
        assert_eq!(sent_until_the_end(&mut passive), RETRIES.into());
    }

    #[test]
    fn a_request_that_comes_again_is_answered_with_one_reply() {
        let (mut active, mut passive) = ends();
        let reply = passive.accept(0, Side { qpn: 6, ..Side::default() }).unwrap();
        for _ in 0..100 {
            let again = active.pending.as_ref().unwrap().message.clone();
            assert_eq!(passive.handle(0, &again).messages, reply.messages);
        }
        assert_eq!(sent_until_the_end(&mut passive), 3);
        assert!(matches!(active.handle(0, &reply.messages[0]).reports[..], [Report::Response(_)]));
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
