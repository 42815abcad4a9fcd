//! The connections of a fabric's ports, and the queries of datagram services: no socket, no clock, no thread.
//!
//! Pairs with the tables of `core/cm.c`. The calls of the program, the messages of peers and the time come in as
//! arguments; [`next_message`](Connections::next_message) and [`next_report`](Connections::next_report) give what goes
//! out. A connection is found by our number, which the peer puts into its messages, and a request that comes again by
//! the number of the peer. A message has to come from the address of the connection's peer; the kernel does not look.
//!
//! | message about no connection | answer |
//! |---|---|
//! | REQ from a queue pair that has a connection | REJ, stale connection; the old one ends |
//! | REP | REJ, invalid communication ID; the kernel lets the peer repeat it 15 times |
//! | DREQ | DREP |
//! | any other | none |

use super::connection::{
    Connection, Output, REJ_INVALID_COMM_ID, REJ_NO_RESOURCES, REJ_STALE_CONN, REJ_TIMEOUT,
    REQUEST_INTERVAL, RETRIES, Report, State,
};
use super::message::{About, Body, Ece, Gid, Message, PrivateData, Service, Side, Transport};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// The most connections and queries. A request beyond them is refused with the reason that there are no resources, so
/// that peers that ask without end take at most this much memory, about 1 KiB for each.
pub(super) const MAX_CONNECTIONS: usize = 65_536;

/// `IB_SIDR_REJECT`.
pub(super) const SIDR_REJECT: u32 = 2;

/// A peer's address, and its number of a connection or of a queue pair.
type OfPeer = (Gid, u32);

/// A query of a datagram service.
#[derive(Debug)]
enum Query {
    /// It is sent again when `due`, until the answer comes.
    Asking { message: Message, left: u8, due: u64 },
    /// The program answers it, or has answered it.
    Asked { request: Message, answer: Option<Message> },
    /// It has its answer, or none came.
    Over,
}

#[derive(Debug)]
enum Entry {
    Connection(Connection),
    Query(Query),
}

impl Entry {
    fn deadline(&self) -> Option<u64> {
        match self {
            Entry::Connection(connection) => connection.deadline(),
            Entry::Query(Query::Asking { due, .. }) => Some(*due),
            Entry::Query(_) => None,
        }
    }

    /// The number of the peer by which its request is found when it comes again.
    fn request(&self) -> Option<OfPeer> {
        match self {
            Entry::Connection(connection) => {
                let known = !matches!(connection.state, State::Closed | State::ReqSent);
                known.then_some((connection.to, connection.remote))
            }
            Entry::Query(_) => None,
        }
    }

    /// The peer's queue pair, which can have one connection.
    fn queue_pair(&self) -> Option<OfPeer> {
        match self {
            Entry::Connection(connection) => {
                let has = matches!(
                    connection.state,
                    State::ReqReceived
                        | State::RepSent
                        | State::RepReceived
                        | State::Established
                        | State::DreqSent
                );
                has.then_some((connection.to, connection.peer.qpn))
            }
            Entry::Query(_) => None,
        }
    }

    /// Whether nothing more happens to it.
    fn is_over(&self) -> bool {
        match self {
            Entry::Connection(connection) => {
                matches!(connection.state, State::Closed | State::Idle)
            }
            Entry::Query(_) => true,
        }
    }
}

/// The connections and queries, by their numbers.
#[derive(Debug, Default)]
pub(super) struct Connections {
    entries: BTreeMap<u32, Entry>,
    /// Those that the program has let go of: they end by themselves.
    let_go: BTreeSet<u32>,
    by_request: BTreeMap<OfPeer, u32>,
    by_queue_pair: BTreeMap<OfPeer, u32>,
    queries_by_request: BTreeMap<OfPeer, u32>,
    timers: BTreeSet<(u64, u32)>,
    messages: VecDeque<Message>,
    reports: VecDeque<(u32, Report)>,
    /// The last number, where they are counted.
    pub(super) last: u32,
    /// The source of numbers and first PSNs, if there are strangers who may guess.
    pub(super) random: Option<fn() -> u64>,
}

impl Connections {
    /// A number that is free.
    fn new_number(&mut self) -> u32 {
        loop {
            self.last = self.last.wrapping_add(1);
            let number = self.random.map_or(self.last, |random| random() as u32);
            if number != 0 && !self.entries.contains_key(&number) {
                return number;
            }
        }
    }

    /// The first PSN that an end expects: it differs from connection to connection.
    fn first_psn(&self, number: u32) -> u32 {
        let counted = number.wrapping_mul(0x5bd1_e995) >> 8;
        self.random.map_or(counted, |random| random() as u32 & 0xff_ffff)
    }

    fn insert(&mut self, number: u32, entry: Entry) {
        self.timers.extend(entry.deadline().map(|due| (due, number)));
        self.by_request.extend(entry.request().map(|request| (request, number)));
        self.by_queue_pair.extend(entry.queue_pair().map(|queue_pair| (queue_pair, number)));
        self.entries.insert(number, entry);
    }

    /// Changes an entry, and all that finds it.
    fn change<T>(&mut self, number: u32, change: impl FnOnce(&mut Entry) -> T) -> Option<T> {
        let entry = self.entries.get_mut(&number)?;
        let before = (entry.deadline(), entry.request(), entry.queue_pair());
        let answer = change(entry);
        let after = (entry.deadline(), entry.request(), entry.queue_pair());
        if before.0 != after.0 {
            before.0.map(|due| self.timers.remove(&(due, number)));
            after.0.map(|due| self.timers.insert((due, number)));
        }
        exchange(&mut self.by_request, before.1, after.1, number);
        exchange(&mut self.by_queue_pair, before.2, after.2, number);
        if entry.is_over() && self.let_go.remove(&number) {
            self.remove(number);
        }
        Some(answer)
    }

    fn remove(&mut self, number: u32) {
        let Some(entry) = self.entries.remove(&number) else { return };
        self.let_go.remove(&number);
        entry.deadline().map(|due| self.timers.remove(&(due, number)));
        exchange(&mut self.by_request, entry.request(), None, number);
        exchange(&mut self.by_queue_pair, entry.queue_pair(), None, number);
        if let Entry::Query(Query::Asked { request, .. }) = entry {
            self.queries_by_request.remove(&(request.from, request.local));
        }
    }

    fn put_out(&mut self, number: u32, output: Output) {
        self.messages.extend(output.messages);
        self.reports.extend(output.reports.into_iter().map(|report| (number, report)));
    }

    /// Changes a connection; `None` if there is none, or if it is in another state.
    fn change_connection(
        &mut self,
        number: u32,
        change: impl FnOnce(&mut Connection) -> Option<Output>,
    ) -> Option<()> {
        let output = self.change(number, |entry| match entry {
            Entry::Connection(connection) => change(connection),
            Entry::Query(_) => None,
        });
        self.put_out(number, output??);
        Some(())
    }

    /// The connection with a number.
    pub(super) fn get(&self, number: u32) -> Option<&Connection> {
        match self.entries.get(&number)? {
            Entry::Connection(connection) => Some(connection),
            Entry::Query(_) => None,
        }
    }

    /// Asks for a connection over a path with this `enum ib_mtu` and this traffic class; returns its number.
    pub(super) fn connect(
        &mut self,
        now: u64,
        (from, to): (Gid, Gid),
        transport: Transport,
        service: Service,
        side: Side,
        path: (u8, u8),
    ) -> u32 {
        let number = self.new_number();
        let mut connection = Connection::new((number, self.first_psn(number)), from, to, transport);
        let output = connection.connect(now, service, side, path);
        self.insert(number, Entry::Connection(connection));
        self.put_out(number, output);
        number
    }

    /// Asks a datagram service for its queue pair; returns the number of the query.
    pub(super) fn query(
        &mut self,
        now: u64,
        (from, to): (Gid, Gid),
        service: Service,
        private_data: PrivateData,
    ) -> u32 {
        let number = self.new_number();
        let body = Body::SidrReq { service, private_data };
        let transaction = number.into();
        let message = Message { from, to, local: number, remote: 0, transaction, body };
        self.messages.push_back(message.clone());
        let due = now + REQUEST_INTERVAL;
        self.insert(number, Entry::Query(Query::Asking { message, left: RETRIES, due }));
        number
    }

    /// Accepts a request; `None` if the request is gone.
    pub(super) fn accept(&mut self, now: u64, number: u32, side: Side) -> Option<()> {
        self.change_connection(number, |connection| connection.accept(now, side))
    }

    /// Confirms a reply.
    pub(super) fn confirm(&mut self, number: u32) -> Option<()> {
        self.change_connection(number, Connection::confirm)
    }

    /// Rejects a request or a reply, or refuses a query.
    pub(super) fn reject(&mut self, number: u32, reason: u32, data: PrivateData) -> Option<()> {
        match self.entries.get(&number)? {
            Entry::Connection(_) => {
                self.change_connection(number, |connection| connection.reject(reason, data))
            }
            Entry::Query(_) => self.answer(number, SIDR_REJECT, Side::default(), 0, data),
        }
    }

    /// Answers a query, with the queue pair and the ECE of `side`; `None` if there is none.
    pub(super) fn answer(
        &mut self,
        number: u32,
        status: u32,
        side: Side,
        qkey: u32,
        private_data: PrivateData,
    ) -> Option<()> {
        let Entry::Query(Query::Asked { request, answer }) = self.entries.get_mut(&number)? else {
            return None;
        };
        let message = sidr_answer(request, status, (side.qpn, qkey, side.ece), private_data);
        *answer = Some(message.clone());
        self.messages.push_back(message);
        Some(())
    }

    /// Ends a connection.
    pub(super) fn disconnect(&mut self, now: u64, number: u32) -> Option<()> {
        self.change_connection(number, |connection| connection.disconnect(now))
    }

    /// Lets go of a connection or a query: ends it, in whatever state it is.
    pub(super) fn destroy(&mut self, now: u64, number: u32) {
        if let Some(Entry::Query(Query::Asked { answer: None, .. })) = self.entries.get(&number) {
            self.answer(number, SIDR_REJECT, Side::default(), 0, Vec::new());
        }
        self.let_go.insert(number);
        let output = self.change(number, |entry| match entry {
            Entry::Connection(connection) => connection.destroy(now),
            Entry::Query(_) => Output::default(),
        });
        match output {
            Some(output) => self.put_out(number, output),
            None => drop(self.let_go.remove(&number)),
        }
    }

    /// Forgets a connection or a query without a message: its device is gone.
    pub(super) fn forget(&mut self, number: u32) {
        self.remove(number);
    }

    /// Sends an answer that needs no state.
    pub(super) fn send(&mut self, answer: Message) {
        self.messages.push_back(answer);
    }

    /// The next message to send.
    pub(super) fn next_message(&mut self) -> Option<Message> {
        self.messages.pop_front()
    }

    /// Whether there is a message to send, or a timer is due.
    pub(super) fn has_work(&self, now: u64) -> bool {
        !self.messages.is_empty() || self.deadline().is_some_and(|due| due <= now)
    }

    /// The next event, and the number of its connection or query.
    pub(super) fn next_report(&mut self) -> Option<(u32, Report)> {
        self.reports.pop_front()
    }

    /// When [`run_timers`](Self::run_timers) is to be called.
    pub(super) fn deadline(&self) -> Option<u64> {
        self.timers.first().map(|(due, _)| *due)
    }

    /// Sends what is to be sent again by now, and gives up what has been sent often enough. Returns whether there was
    /// any.
    pub(super) fn run_timers(&mut self, now: u64) -> bool {
        let mut worked = false;
        while let Some((_, number)) = self.timers.first().copied().filter(|(due, _)| *due <= now) {
            worked = true;
            let output = self.change(number, |entry| match entry {
                Entry::Connection(connection) => connection.timeout(now),
                Entry::Query(query) => query.timeout(now),
            });
            self.put_out(number, output.unwrap_or_default());
        }
        worked
    }

    /// The number of connections and queries, and of entries by which they are found.
    #[cfg(test)]
    pub(super) fn len(&self) -> (usize, usize) {
        let Connections { by_request, by_queue_pair, queries_by_request, timers, let_go, .. } =
            self;
        let found = by_request.len() + by_queue_pair.len() + queries_by_request.len();
        (self.entries.len(), found + timers.len() + let_go.len())
    }

    /// Takes a message of a peer.
    pub(super) fn receive(&mut self, now: u64, message: &Message) {
        match &message.body {
            Body::Req { .. } => self.receive_request(now, message),
            Body::SidrReq { .. } => self.receive_query(message),
            Body::SidrRep { .. } => self.receive_answer(message),
            _ => self.receive_of_connection(now, message),
        }
    }

    fn receive_request(&mut self, now: u64, message: &Message) {
        let Body::Req { kind, side, terms, .. } = &message.body else { return };
        let of_peer = (message.from, message.local);
        if let Some(number) = self.by_request.get(&of_peer).copied() {
            self.change_connection(number, |connection| Some(connection.handle(now, message)));
            return;
        }
        if self.end_stale(now, message, About::Req, side.qpn) {
            return;
        }
        if self.entries.len() >= MAX_CONNECTIONS {
            return self.messages.push_back(refusal(message, About::Req, REJ_NO_RESOURCES));
        }
        let number = self.new_number();
        let psn = self.first_psn(number);
        let passive = Connection::requested((number, psn), message, *kind, side, terms);
        self.insert(number, Entry::Connection(passive));
        self.reports.push_back((number, Report::Requested(message.clone())));
    }

    /// Refuses a message from a queue pair that has another connection, and ends that one: the peer has forgotten it.
    fn end_stale(&mut self, now: u64, message: &Message, about: About, qpn: u32) -> bool {
        let stale = self.by_queue_pair.get(&(message.from, qpn)).copied();
        let Some(stale) = stale else { return false };
        self.messages.push_back(refusal(message, about, REJ_STALE_CONN));
        if self.get(stale).is_some_and(|stale| stale.state == State::Established) {
            self.disconnect(now, stale);
        }
        true
    }

    fn receive_query(&mut self, message: &Message) {
        let of_peer = (message.from, message.local);
        if let Some(number) = self.queries_by_request.get(&of_peer) {
            let answered = match self.entries.get(number) {
                Some(Entry::Query(Query::Asked { answer, .. })) => answer.clone(),
                _ => None,
            };
            self.messages.extend(answered);
            return;
        }
        if self.entries.len() >= MAX_CONNECTIONS {
            let none = (0, 0, Ece::default());
            return self.messages.push_back(sidr_answer(message, SIDR_REJECT, none, Vec::new()));
        }
        let number = self.new_number();
        let query = Query::Asked { request: message.clone(), answer: None };
        self.insert(number, Entry::Query(query));
        self.queries_by_request.insert(of_peer, number);
        self.reports.push_back((number, Report::Requested(message.clone())));
    }

    fn receive_answer(&mut self, message: &Message) {
        let number = message.remote;
        let Some(Entry::Query(Query::Asking { message: asked, .. })) = self.entries.get(&number)
        else {
            return;
        };
        if (asked.from, asked.to) != (message.to, message.from) {
            return;
        }
        self.change(number, |entry| *entry = Entry::Query(Query::Over));
        self.reports.push_back((number, Report::Answered(message.clone())));
    }

    fn receive_of_connection(&mut self, now: u64, message: &Message) {
        // A requester that gives up does not know our number, as `cm_acquire_rejected_id` says.
        let gives_up =
            message.remote == 0 && matches!(message.body, Body::Rej { reason: REJ_TIMEOUT, .. });
        let number = match gives_up {
            true => self.by_request.get(&(message.from, message.local)).copied(),
            false => Some(message.remote),
        };
        let is_its = |connection: &&Connection| {
            let addresses = (connection.from, connection.to) == (message.to, message.from);
            let waits = matches!(connection.state, State::ReqReceived | State::RepSent);
            // The peer's number is not known before the REP.
            let known = connection.remote == 0 || connection.remote == message.local;
            addresses && known && (waits || !gives_up)
        };
        let connection = number.and_then(|number| self.get(number)).filter(is_its);
        let Some((number, state)) = connection.map(|found| (found.local, found.state)) else {
            let answer = match message.body {
                Body::Rep { .. } => refusal(message, About::Rep, REJ_INVALID_COMM_ID),
                // As `cm_issue_drep`: an unknown connection has ended.
                Body::Dreq { .. } => message.reply(Body::Drep),
                _ => return,
            };
            return self.messages.push_back(answer);
        };
        if let (Body::Rep { side, .. }, State::ReqSent) = (&message.body, state) {
            // As `cm_rep_handler`: the number, or the queue pair, has another connection.
            if self.by_request.contains_key(&(message.from, message.local)) {
                return;
            }
            if self.end_stale(now, message, About::Rep, side.qpn) {
                return;
            }
        }
        self.change_connection(number, |connection| Some(connection.handle(now, message)));
    }
}

impl Query {
    fn timeout(&mut self, now: u64) -> Output {
        let mut output = Output::default();
        match self {
            Query::Asking { due, .. } if now < *due => {}
            Query::Asking { message, left, due } if *left > 0 => {
                (*left, *due) = (*left - 1, now + REQUEST_INTERVAL);
                output.messages.push(message.clone());
            }
            Query::Asking { .. } => {
                *self = Query::Over;
                output.reports.push(Report::Unreachable);
            }
            Query::Asked { .. } | Query::Over => {}
        }
        output
    }
}

/// Lets a number be found by another key.
fn exchange(
    map: &mut BTreeMap<OfPeer, u32>,
    before: Option<OfPeer>,
    after: Option<OfPeer>,
    number: u32,
) {
    if before == after {
        return;
    }
    if let Some(before) = before.filter(|before| map.get(before) == Some(&number)) {
        map.remove(&before);
    }
    map.extend(after.map(|after| (after, number)));
}

/// The answer that refuses a message.
pub(super) fn refusal(message: &Message, about: About, reason: u32) -> Message {
    message.reply(Body::Rej { about, reason, private_data: Vec::new() })
}

/// The answer to a query.
pub(super) fn sidr_answer(
    request: &Message,
    status: u32,
    (qpn, qkey, ece): (u32, u32, Ece),
    private_data: PrivateData,
) -> Message {
    let service = match request.body {
        Body::SidrReq { service, .. } => service,
        _ => Service::default(),
    };
    request.reply(Body::SidrRep { service, status, qpn, qkey, ece, private_data })
}
