//! One rule at a time.

use super::super::connection::{REQUEST_INTERVAL, RETRIES, Report, State};
use super::super::connections::{Connections, MAX_CONNECTIONS};
use super::super::message::{About, Body, Ece, Message, Service, Side, Terms, Transport};
use super::{A, B, SERVICE, new_table, side, travel};

const MTU: (u8, u8) = (3, 0x20);
const SECOND: u64 = 1_000_000_000;

fn drain(table: &mut Connections) -> Vec<Message> {
    std::iter::from_fn(|| table.next_message()).map(|message| travel(&message)).collect()
}

fn reports(table: &mut Connections) -> Vec<Report> {
    std::iter::from_fn(|| table.next_report()).map(|(_, report)| report).collect()
}

fn sent(table: &mut Connections) -> Message {
    let mut messages = drain(table);
    assert_eq!(messages.len(), 1, "{messages:?}");
    messages.remove(0)
}

fn reason(message: &Message) -> u32 {
    let Body::Rej { reason, .. } = message.body else { panic!("{message:?}") };
    reason
}

/// Two tables, and a request that has arrived at the second one.
struct Pair {
    a: Connections,
    b: Connections,
    active: u32,
    passive: u32,
    request: Message,
}

fn requested() -> Pair {
    let (mut a, mut b) = (new_table(0), new_table(0xaaaa_0000));
    let active = a.connect(0, (A, B), Transport::Rc, SERVICE, side(5, b"hello"), MTU);
    let request = sent(&mut a);
    b.receive(0, &request);
    let (passive, report) = b.next_report().unwrap();
    assert_eq!(report, Report::Requested(request.clone()));
    Pair { a, b, active, passive, request }
}

fn connected() -> Pair {
    let mut pair = requested();
    pair.b.accept(0, pair.passive, side(6, b"welcome")).unwrap();
    pair.a.receive(0, &sent(&mut pair.b));
    let [Report::Response(side)] = &reports(&mut pair.a)[..] else { panic!("no response") };
    assert_eq!((side.qpn, &side.private_data[..7]), (6, &b"welcome"[..]));
    pair.a.confirm(pair.active).unwrap();
    pair.b.receive(0, &sent(&mut pair.a));
    assert_eq!(reports(&mut pair.b), [Report::Established]);
    pair
}

#[test]
fn a_request_brings_its_parameters_and_an_answer_its_transaction() {
    let mut pair = requested();
    let Body::Req { service, kind, side, terms } = &pair.request.body else { panic!("no REQ") };
    assert_eq!((*service, *kind, side.qpn, side.retry_count), (SERVICE, Transport::Rc, 5, 7));
    assert_eq!((side.private_data.len(), &side.private_data[..5]), (56, &b"hello"[..]));
    assert_eq!((terms.mtu, terms.traffic_class), MTU);
    assert_eq!((terms.response_timeout, terms.retries), (20, RETRIES));
    assert_eq!(pair.b.get(pair.passive).unwrap().mtu, 3);
    pair.b.accept(0, pair.passive, Side::default()).unwrap();
    let reply = sent(&mut pair.b);
    assert_eq!(reply.transaction, pair.request.transaction);
    assert_eq!((reply.local, reply.remote), (pair.passive, pair.active));
}

#[test]
fn a_repeated_request_is_put_off_and_then_repeated_less_often() {
    let mut pair = requested();
    assert_eq!(pair.a.deadline(), Some(REQUEST_INTERVAL));
    pair.a.run_timers(REQUEST_INTERVAL);
    pair.b.receive(REQUEST_INTERVAL, &sent(&mut pair.a));
    let put_off = sent(&mut pair.b);
    assert_eq!(put_off.body, Body::Mra { about: About::Req, timeout: 24 });
    assert_eq!(reports(&mut pair.b), []);
    pair.a.receive(REQUEST_INTERVAL, &put_off);
    let next = pair.a.deadline().unwrap() - REQUEST_INTERVAL;
    assert!((66..68).contains(&(next / SECOND)), "{next}");
    // A second one changes nothing.
    pair.a.receive(REQUEST_INTERVAL + SECOND, &put_off);
    assert_eq!(pair.a.deadline(), Some(REQUEST_INTERVAL + next));
    // Still 15 times in all, and then the end.
    let mut again = 1;
    while let Some(due) = pair.a.deadline() {
        pair.a.run_timers(due);
        again += drain(&mut pair.a).len();
    }
    assert_eq!((again, reports(&mut pair.a)), (RETRIES.into(), vec![Report::Unreachable]));
}

#[test]
fn a_peer_cannot_ask_for_more_than_a_minute() {
    let mut pair = requested();
    let body = Body::Mra { about: About::Req, timeout: 31 };
    pair.a.receive(0, &travel(&pair.request.reply(body)));
    assert!(pair.a.deadline().unwrap() / SECOND < 68);
    // Nor may one say how long its peer waits for it to confirm.
    let mut request = pair.request.clone();
    request.local += 1;
    let Body::Req { side, terms, .. } = &mut request.body else { panic!("no REQ") };
    side.qpn += 1;
    (terms.response_timeout, terms.retries) = (31, 1);
    pair.b.receive(0, &travel(&request));
    let (number, _) = pair.b.next_report().unwrap();
    pair.b.accept(0, number, Side::default()).unwrap();
    assert!((65..68).contains(&(pair.b.deadline().unwrap() / SECOND)));
    // Nor have many answers sent at once, to the address that it names.
    pair.b.destroy(0, number);
    let Body::Req { side, terms, .. } = &mut request.body else { panic!("no REQ") };
    side.qpn += 1;
    terms.response_timeout = 0;
    request.local += 1;
    pair.b.receive(0, &travel(&request));
    let (number, _) = pair.b.next_report().unwrap();
    pair.b.accept(0, number, Side::default()).unwrap();
    assert!(pair.b.deadline().unwrap() > SECOND / 5);
}

#[test]
fn a_repeated_reply_is_put_off_before_the_confirmation_and_confirmed_after_it() {
    let mut pair = requested();
    pair.b.accept(0, pair.passive, side(6, b"")).unwrap();
    let reply = sent(&mut pair.b);
    pair.a.receive(0, &reply);
    pair.a.receive(0, &reply);
    assert_eq!(sent(&mut pair.a).body, Body::Mra { about: About::Rep, timeout: 24 });
    pair.a.confirm(pair.active).unwrap();
    let first = sent(&mut pair.a);
    pair.a.receive(0, &reply);
    assert_eq!(sent(&mut pair.a), first);
    assert_eq!(reports(&mut pair.a).len(), 1);
}

#[test]
fn the_end_of_a_connection_is_confirmed_however_often_it_is_asked_for() {
    let mut pair = connected();
    pair.a.disconnect(0, pair.active).unwrap();
    let request = sent(&mut pair.a);
    assert_eq!(request.body, Body::Dreq { qpn: 6 });
    for _ in 0..3 {
        pair.b.receive(0, &request);
        let confirmed = sent(&mut pair.b);
        assert_eq!((&confirmed.body, confirmed.remote), (&Body::Drep, pair.active));
    }
    assert_eq!(reports(&mut pair.b), [Report::Disconnected]);
    pair.b.destroy(0, pair.passive);
    let due = pair.b.deadline().unwrap();
    pair.b.run_timers(due);
    assert!(pair.b.get(pair.passive).is_none());
    // An unknown one, too.
    pair.b.receive(due, &request);
    let confirmed = sent(&mut pair.b);
    assert_eq!((confirmed.body, confirmed.transaction), (Body::Drep, request.transaction));
}

#[test]
fn an_end_for_another_queue_pair_ends_nothing() {
    let mut pair = connected();
    pair.a.disconnect(0, pair.active).unwrap();
    let mut request = sent(&mut pair.a);
    request.body = Body::Dreq { qpn: 7 };
    pair.b.receive(0, &request);
    assert_eq!((drain(&mut pair.b), reports(&mut pair.b)), (vec![], vec![]));
}

#[test]
fn a_message_from_another_address_changes_nothing() {
    let mut pair = connected();
    pair.a.disconnect(0, pair.active).unwrap();
    let request = sent(&mut pair.a);
    let [mut stranger, mut wrong] = [request.clone(), request];
    stranger.from = [7; 16];
    wrong.local += 1;
    let refusal = Body::Rej { about: About::Other, reason: 28, private_data: Vec::new() };
    for forged in [stranger, wrong] {
        pair.b.receive(0, &Message { body: refusal.clone(), ..forged.clone() });
        pair.b.receive(0, &forged);
        // That it ended, as for any number that is unknown.
        assert_eq!(sent(&mut pair.b).body, Body::Drep);
    }
    assert_eq!(pair.b.get(pair.passive).unwrap().state, State::Established);
    assert_eq!(reports(&mut pair.b), []);
}

#[test]
fn an_unknown_reply_is_refused_and_other_unknown_messages_are_dropped() {
    let mut pair = requested();
    pair.b.accept(0, pair.passive, side(6, b"")).unwrap();
    let reply = sent(&mut pair.b);
    let mut stranger = Connections::default();
    stranger.receive(0, &reply);
    let refusal = sent(&mut stranger);
    assert_eq!((reason(&refusal), refusal.remote), (6, pair.passive));
    for body in [
        Body::Rtu,
        Body::Drep,
        Body::Mra { about: About::Rep, timeout: 20 },
        Body::Rej { about: About::Req, reason: 28, private_data: Vec::new() },
        Body::SidrRep {
            service: SERVICE,
            status: 0,
            qpn: 1,
            qkey: 2,
            ece: Ece::default(),
            private_data: Vec::new(),
        },
    ] {
        stranger.receive(0, &travel(&Message { body, ..reply.clone() }));
        assert_eq!((drain(&mut stranger), reports(&mut stranger)), (vec![], vec![]));
    }
    // Its peer ends at once.
    pair.b.receive(0, &refusal);
    let private_data = vec![0; 148];
    assert_eq!(reports(&mut pair.b), [Report::Rejected { reason: 6, private_data }]);
}

#[test]
fn a_queue_pair_that_connects_again_ends_its_old_connection() {
    let mut pair = connected();
    // The peer's process was killed, and started again.
    let mut again = new_table(0x5555_0000);
    again.connect(0, (A, B), Transport::Rc, SERVICE, side(5, b""), MTU);
    let request = sent(&mut again);
    pair.b.receive(0, &request);
    let messages = drain(&mut pair.b);
    assert_eq!((messages.len(), reason(&messages[0])), (2, 10));
    assert_eq!(messages[1].body, Body::Dreq { qpn: 5 });
    again.receive(0, &messages[1]);
    pair.b.receive(0, &sent(&mut again));
    assert_eq!(reports(&mut pair.b), [Report::Disconnected]);
    // Now it can connect.
    pair.b.receive(0, &request);
    assert!(matches!(&reports(&mut pair.b)[..], [Report::Requested(_)]));
}

#[test]
fn a_late_request_of_a_connection_that_ended_is_refused() {
    let mut pair = connected();
    pair.b.disconnect(0, pair.passive).unwrap();
    pair.a.receive(0, &sent(&mut pair.b));
    pair.b.receive(0, &sent(&mut pair.a));
    assert_eq!(pair.b.get(pair.passive).unwrap().state, State::TimeWait);
    pair.b.receive(0, &pair.request);
    assert_eq!(reason(&sent(&mut pair.b)), 10);
    assert_eq!(reports(&mut pair.b), [Report::Disconnected]);
}

#[test]
fn whoever_gives_up_says_so_to_a_peer_whose_number_it_does_not_know() {
    let mut pair = requested();
    pair.a.destroy(0, pair.active);
    let refusal = sent(&mut pair.a);
    assert_eq!((refusal.remote, reason(&refusal)), (0, 4));
    assert!(pair.a.get(pair.active).is_none());
    pair.b.receive(0, &refusal);
    assert!(matches!(&reports(&mut pair.b)[..], [Report::Rejected { reason: 4, .. }]));
}

#[test]
fn requests_without_end_take_limited_memory() {
    let mut b = Connections::default();
    let body = |number: u32| Body::Req {
        service: SERVICE,
        kind: Transport::Rc,
        side: Side { qpn: number, ..Side::default() },
        terms: Default::default(),
    };
    let message = |number: u32| Message {
        from: A,
        to: B,
        local: number,
        remote: 0,
        transaction: 1,
        body: body(number),
    };
    for number in 1..=MAX_CONNECTIONS as u32 {
        b.receive(0, &message(number));
        assert!(matches!(b.next_report(), Some((_, Report::Requested(_)))));
    }
    assert_eq!(b.next_message(), None);
    b.receive(0, &message(0x10_0000));
    assert_eq!(reason(&b.next_message().unwrap()), 3);
    let query = Body::SidrReq { service: SERVICE, private_data: Vec::new() };
    b.receive(0, &Message { body: query, ..message(0x10_0001) });
    let answer = b.next_message().unwrap();
    assert!(matches!(answer.body, Body::SidrRep { status: 2, .. }), "{answer:?}");
    assert_eq!(b.next_report(), None);
    // One that ends makes room.
    let first = b.get(1).unwrap().local;
    b.destroy(0, first);
    b.next_message();
    b.receive(0, &message(0x10_0002));
    assert!(matches!(b.next_report(), Some((_, Report::Requested(_)))));
}

#[test]
fn a_query_is_answered_once_by_the_program_and_as_often_as_it_comes_by_the_table() {
    let (mut a, mut b) = (Connections::default(), Connections::default());
    let service = Service { space: 0x111, ..SERVICE };
    let asking = a.query(0, (A, B), service, b"who".to_vec());
    let query = sent(&mut a);
    assert_eq!((query.local, query.remote), (asking, 0));
    b.receive(0, &query);
    let (asked, _) = b.next_report().unwrap();
    b.receive(0, &query);
    assert_eq!((drain(&mut b), reports(&mut b)), (vec![], vec![]));
    b.answer(asked, 0, side(0x1234, b""), 0x11, b"me".to_vec()).unwrap();
    let answer = sent(&mut b);
    b.receive(0, &query);
    assert_eq!((sent(&mut b), reports(&mut b)), (answer.clone(), vec![]));
    a.receive(0, &Message { from: [7; 16], ..answer.clone() });
    assert_eq!(reports(&mut a), []);
    a.receive(0, &answer);
    a.receive(0, &answer);
    assert_eq!((reports(&mut a), a.deadline()), (vec![Report::Answered(answer.clone())], None));
    let Body::SidrRep { status, qpn, qkey, private_data, .. } = answer.body else { panic!() };
    assert_eq!((status, qpn, qkey, &private_data[..2]), (0, 0x1234, 0x11, &b"me"[..]));
    b.destroy(0, asked);
    b.receive(0, &query);
    assert!(matches!(&reports(&mut b)[..], [Report::Requested(_)]));
}

#[test]
fn a_query_without_an_answer_is_given_up() {
    let mut a = Connections::default();
    a.query(0, (A, B), SERVICE, Vec::new());
    let mut count = drain(&mut a).len();
    while let Some(due) = a.deadline() {
        a.run_timers(due);
        count += drain(&mut a).len();
    }
    assert_eq!((count, reports(&mut a)), (16, vec![Report::Unreachable]));
}

#[test]
fn queue_pairs_of_xrc_and_uc_travel() {
    for kind in [Transport::Xrc, Transport::Uc] {
        let (mut a, mut b) = (new_table(0), new_table(0x1000));
        a.connect(0, (A, B), kind, SERVICE, side(5, b""), MTU);
        b.receive(0, &sent(&mut a));
        let (passive, report) = b.next_report().unwrap();
        let Report::Requested(Message { body: Body::Req { kind: asked, .. }, .. }) = report else {
            panic!("{report:?}")
        };
        assert_eq!(asked, kind);
        let ece = Ece { vendor: 0x12_3456, options: 0x789a_bcde };
        b.accept(0, passive, Side { ece, ..side(0xab_cdef, b"") }).unwrap();
        a.receive(0, &sent(&mut b));
        let reports = reports(&mut a);
        let [Report::Response(side)] = &reports[..] else { panic!("{reports:?}") };
        assert_eq!((side.qpn, side.ece), (0xab_cdef, ece));
    }
}

#[test]
fn addresses_of_ipv6_travel() {
    let (a, b) = ([0xfd; 16], [0xfe; 16]);
    let mut table = Connections::default();
    table.connect(0, (a, b), Transport::Rc, SERVICE, side(5, b""), MTU);
    table.query(0, (a, b), SERVICE, Vec::new());
    let [request, query] = &drain(&mut table)[..] else { panic!("two messages") };
    assert_eq!((request.from, request.to, query.from, query.to), (a, b, a, b));
}

#[test]
fn every_parameter_of_a_side_travels() {
    let ece = Ece { vendor: 0x12_3456, options: 0x789a_bcde };
    let whole = |retry_count, room| Side {
        qpn: 0xab_cdef,
        starting_psn: 0x12_3456,
        responder_resources: 3,
        initiator_depth: 4,
        flow_control: 1,
        retry_count,
        rnr_retry_count: 5,
        srq: 1,
        ece,
        private_data: vec![0x5a; room],
    };
    let request = requested().request;
    let terms = Terms { mtu: 5, traffic_class: 0x6a, response_timeout: 19, retries: 14 };
    let (service, kind) = (SERVICE, Transport::Rc);
    let (local, remote) = (request.local, 0x1234_5678);
    let end = Service { space: 0x111, port: 80, source_port: 0 };
    for (remote, body) in [
        (0, Body::Req { service, kind, side: whole(6, 56), terms }),
        (remote, Body::Rep { kind, side: whole(0, 196) }),
        (remote, Body::Mra { about: About::Rep, timeout: 21 }),
        (remote, Body::Rej { about: About::Other, reason: 28, private_data: vec![1; 148] }),
        (remote, Body::Dreq { qpn: 0xab_cdef }),
        (0, Body::SidrReq { service, private_data: vec![2; 180] }),
    ] {
        let message = Message { local, remote, body, ..request.clone() };
        assert_eq!(travel(&message), message);
    }
    let private_data = vec![3; 136];
    let body = Body::SidrRep { service: end, status: 0, qpn: 7, qkey: 8, ece, private_data };
    let answer = Message { local: 0, remote, body, ..request };
    assert_eq!(travel(&answer), answer);
}

#[test]
fn a_rejection_that_does_not_know_the_peers_number_ends_no_connection() {
    let mut pair = connected();
    let body = |reason| Body::Rej { about: About::Other, reason, private_data: Vec::new() };
    // With our number, and with the peer's, from the peer's address.
    for (local, remote) in [(0, pair.passive), (pair.active, 0), (pair.active + 1, pair.passive)] {
        for reason in [4, 28] {
            let (from, to, transaction) = (A, B, 1);
            let forged = Message { from, to, local, remote, transaction, body: body(reason) };
            pair.b.receive(0, &travel(&forged));
            assert_eq!((drain(&mut pair.b), reports(&mut pair.b)), (vec![], vec![]), "{forged:?}");
        }
    }
    assert_eq!(pair.b.get(pair.passive).unwrap().state, State::Established);
}

#[test]
fn a_refused_requester_learns_no_number() {
    let mut pair = requested();
    pair.b.reject(pair.passive, 28, Vec::new()).unwrap();
    let refusal = sent(&mut pair.b);
    assert_eq!((refusal.local, refusal.remote), (0, pair.active));
    pair.a.receive(0, &refusal);
    assert!(matches!(&reports(&mut pair.a)[..], [Report::Rejected { reason: 28, .. }]));
}

#[test]
fn a_destroyed_connection_holds_its_number_for_seconds() {
    let mut pair = connected();
    // The peer has asked for the longest times.
    pair.b.destroy(0, pair.passive);
    let mut sent = drain(&mut pair.b).len();
    let mut last = 0;
    while let Some(due) = pair.b.deadline() {
        pair.b.run_timers(due);
        (sent, last) = (sent + drain(&mut pair.b).len(), due);
    }
    assert_eq!((sent, pair.b.len()), (3, (0, 0)));
    assert!(last < 16 * SECOND, "{last}");
}
