//! Every event of the kernel in every state of an id that waits for one, and the fate of events that the program does
//! not take.

use super::*;
use std::net::SocketAddr;

/// States in which an id waits for an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    ResolvingAddr,
    ResolvingRoute,
    ResolvingService,
    Connecting,
    Accepting,
    Connected,
    Listening,
    Asking,
    Joining,
    Member,
}

const STATES: [State; 10] = [
    State::ResolvingAddr,
    State::ResolvingRoute,
    State::ResolvingService,
    State::Connecting,
    State::Accepting,
    State::Connected,
    State::Listening,
    State::Asking,
    State::Joining,
    State::Member,
];

/// The answer of a wait to an event.
#[derive(Debug, PartialEq, Eq)]
enum Answer {
    /// The id is in its next state, or a listener has a request.
    Next,
    /// The event is ignored, and the wait goes on.
    Waits,
    /// The id is gone, or the listener's device.
    Fails(Errno),
    /// The program reads the event; the connection goes on.
    Told(ConnectionEvent),
    /// The program reads the event, and the connection is over.
    Ends(ConnectionEvent),
    /// The membership is lost.
    Lost,
}

/// A kind of event, and a status that comes with it.
const EVENTS: [(Type, i32); 20] = [
    (Type::RDMA_CM_EVENT_ADDR_RESOLVED, 0),
    (Type::RDMA_CM_EVENT_ADDR_ERROR, -110),
    (Type::RDMA_CM_EVENT_ROUTE_RESOLVED, 0),
    (Type::RDMA_CM_EVENT_ROUTE_ERROR, -110),
    (Type::RDMA_CM_EVENT_CONNECT_REQUEST, 0),
    (Type::RDMA_CM_EVENT_CONNECT_RESPONSE, 0),
    (Type::RDMA_CM_EVENT_CONNECT_ERROR, -110),
    (Type::RDMA_CM_EVENT_UNREACHABLE, -110),
    (Type::RDMA_CM_EVENT_REJECTED, 28),
    (Type::RDMA_CM_EVENT_ESTABLISHED, 0),
    (Type::RDMA_CM_EVENT_DISCONNECTED, 0),
    (Type::RDMA_CM_EVENT_DEVICE_REMOVAL, 0),
    (Type::RDMA_CM_EVENT_MULTICAST_JOIN, 0),
    (Type::RDMA_CM_EVENT_MULTICAST_ERROR, -110),
    (Type::RDMA_CM_EVENT_ADDR_CHANGE, 0),
    (Type::RDMA_CM_EVENT_TIMEWAIT_EXIT, 0),
    (Type::RDMA_CM_EVENT_ADDRINFO_RESOLVED, 0),
    (Type::RDMA_CM_EVENT_ADDRINFO_ERROR, -110),
    (Type::RDMA_CM_EVENT_USER, 0),
    (Type::RDMA_CM_EVENT_INTERNAL, 0),
];

/// The reason that the kernel does not report an event in a state; `None` if it does. From `core/cma.c`, `core/cm.c`
/// and `core/ucma.c`.
fn unreachable(state: State, kind: Type) -> Option<&'static str> {
    use State::*;
    let (states, why): (&[State], _) = match kind {
        Type::RDMA_CM_EVENT_ADDR_RESOLVED => (&[ResolvingAddr], "it answers RESOLVE_ADDR"),
        // `cma_sidr_rep_handler` reports it, too, if the answer gives no address handle.
        Type::RDMA_CM_EVENT_ADDR_ERROR => (&[ResolvingAddr, Asking], "it answers RESOLVE_ADDR"),
        Type::RDMA_CM_EVENT_ROUTE_RESOLVED | Type::RDMA_CM_EVENT_ROUTE_ERROR => {
            (&[ResolvingRoute], "it answers RESOLVE_ROUTE")
        }
        Type::RDMA_CM_EVENT_CONNECT_REQUEST => (&[Listening], "it comes to listeners"),
        Type::RDMA_CM_EVENT_CONNECT_RESPONSE => (&[Connecting], "it answers CONNECT, once"),
        Type::RDMA_CM_EVENT_CONNECT_ERROR => {
            (&[], "it is for iWARP, and for queue pairs that belong to the kernel")
        }
        // `cma_add_id_to_tree` files an id under its peer's address when its route is resolved.
        Type::RDMA_CM_EVENT_UNREACHABLE => (
            &[ResolvingRoute, Connecting, Accepting, Connected, Asking],
            "it answers a message, or is told to ids with a route",
        ),
        Type::RDMA_CM_EVENT_REJECTED => {
            // `cm_rej_handler` takes a rejection in the state ESTABLISHED, too.
            (&[Connecting, Accepting, Connected], "it answers CONNECT or ACCEPT")
        }
        Type::RDMA_CM_EVENT_ESTABLISHED => {
            (&[Accepting, Asking], "the side that connected confirms by itself")
        }
        Type::RDMA_CM_EVENT_DISCONNECTED => {
            (&[Accepting, Connected], "the peer closes a confirmed connection")
        }
        Type::RDMA_CM_EVENT_DEVICE_REMOVAL => return None,
        Type::RDMA_CM_EVENT_MULTICAST_JOIN => (&[Joining], "it answers JOIN_MCAST, once"),
        Type::RDMA_CM_EVENT_MULTICAST_ERROR => (&[Joining, Member], "it comes to memberships"),
        Type::RDMA_CM_EVENT_ADDR_CHANGE => match state {
            Joining | Member => return Some("it is told to the id of the membership"),
            _ => return None,
        },
        Type::RDMA_CM_EVENT_TIMEWAIT_EXIT => {
            (&[Connected], "it follows the event that ended the handshake, and with it the id")
        }
        Type::RDMA_CM_EVENT_ADDRINFO_RESOLVED | Type::RDMA_CM_EVENT_ADDRINFO_ERROR => {
            (&[ResolvingService], "it answers RESOLVE_IB_SERVICE")
        }
        Type::RDMA_CM_EVENT_USER => (&[Connected], "`Connection::write_event` writes it"),
        Type::RDMA_CM_EVENT_INTERNAL => (&[], "the kernel keeps it to itself"),
        _ => return Some("this library does not know it"),
    };
    (!states.contains(&state)).then_some(why)
}

/// The answer that a wait is to give.
fn expected(state: State, kind: Type) -> Answer {
    let next = match state {
        State::ResolvingAddr => Type::RDMA_CM_EVENT_ADDR_RESOLVED,
        State::ResolvingRoute => Type::RDMA_CM_EVENT_ROUTE_RESOLVED,
        State::ResolvingService => Type::RDMA_CM_EVENT_ADDRINFO_RESOLVED,
        State::Connecting => Type::RDMA_CM_EVENT_CONNECT_RESPONSE,
        State::Accepting | State::Asking => Type::RDMA_CM_EVENT_ESTABLISHED,
        State::Listening => Type::RDMA_CM_EVENT_CONNECT_REQUEST,
        State::Joining => Type::RDMA_CM_EVENT_MULTICAST_JOIN,
        State::Connected => {
            return match kind {
                Type::RDMA_CM_EVENT_UNREACHABLE => Answer::Ends(ConnectionEvent::Unreachable),
                Type::RDMA_CM_EVENT_REJECTED => Answer::Ends(ConnectionEvent::Rejected),
                Type::RDMA_CM_EVENT_DISCONNECTED => Answer::Ends(ConnectionEvent::Disconnected),
                Type::RDMA_CM_EVENT_TIMEWAIT_EXIT => Answer::Ends(ConnectionEvent::TimewaitExit),
                Type::RDMA_CM_EVENT_DEVICE_REMOVAL => Answer::Ends(ConnectionEvent::DeviceRemoval),
                Type::RDMA_CM_EVENT_ADDR_CHANGE => Answer::Told(ConnectionEvent::AddressChange),
                Type::RDMA_CM_EVENT_USER => Answer::Told(ConnectionEvent::Written(0)),
                // The kernel gives a request an id of its own, which only a listener's queue takes.
                Type::RDMA_CM_EVENT_CONNECT_REQUEST => Answer::Waits,
                Type(other) => Answer::Told(ConnectionEvent::Other(other)),
            };
        }
        State::Member => {
            return match kind {
                Type::RDMA_CM_EVENT_MULTICAST_ERROR | Type::RDMA_CM_EVENT_DEVICE_REMOVAL => {
                    Answer::Lost
                }
                _ => Answer::Waits,
            };
        }
    };
    match kind {
        kind if kind == next => Answer::Next,
        Type::RDMA_CM_EVENT_ADDR_CHANGE | Type::RDMA_CM_EVENT_CONNECT_REQUEST => Answer::Waits,
        Type::RDMA_CM_EVENT_ADDR_ERROR
        | Type::RDMA_CM_EVENT_ROUTE_ERROR
        | Type::RDMA_CM_EVENT_CONNECT_ERROR
        | Type::RDMA_CM_EVENT_UNREACHABLE
        | Type::RDMA_CM_EVENT_MULTICAST_ERROR
        | Type::RDMA_CM_EVENT_ADDRINFO_ERROR => Answer::Fails(Errno::TIMEDOUT),
        Type::RDMA_CM_EVENT_REJECTED => Answer::Fails(Errno::CONNREFUSED),
        Type::RDMA_CM_EVENT_DISCONNECTED => Answer::Fails(Errno::CONNRESET),
        Type::RDMA_CM_EVENT_DEVICE_REMOVAL => Answer::Fails(Errno::NODEV),
        _ => Answer::Fails(Errno::PROTO),
    }
}

fn of<P, D>(waited: Result<Progress<P, D>, ConnectError>) -> Answer {
    match waited {
        Ok(Progress::Done(_)) => Answer::Next,
        Ok(Progress::Pending(_)) => Answer::Waits,
        Err(error) => Answer::Fails(error.errno()),
    }
}

/// Brings an id into a state, reports the event, and waits.
fn answer(state: State, kind: Type, status: i32) -> Answer {
    let stage = Stage::new();
    let tell = || match kind {
        // The kernel reports it together with a new id.
        Type::RDMA_CM_EVENT_CONNECT_REQUEST => {
            let asked = *stage.script.live().first().unwrap();
            stage.script.request(asked, rdma_ucm_conn_param::default());
        }
        _ => stage.script.tell(*stage.script.live().last().unwrap(), kind, status),
    };
    let to: SocketAddr = PEER.parse().unwrap();
    let ud = || stage.bench.pd.qp_builder(&stage.bench.cq, &stage.bench.cq, QpType::UD).build();
    match state {
        State::ResolvingAddr => {
            let id = stage
                .channel
                .create_id(PortSpace::TCP, QpType::RC)
                .unwrap()
                .resolve_addr(None, to, LONG)
                .unwrap();
            tell();
            of(id.wait(NOW).map_err(Into::into))
        }
        State::ResolvingRoute => {
            let id = stage
                .channel
                .create_id(PortSpace::TCP, QpType::RC)
                .unwrap()
                .resolve_addr(None, to, LONG)
                .unwrap();
            stage.script.tell(1, Type::RDMA_CM_EVENT_ADDR_RESOLVED, 0);
            let id = id.wait(NOW).unwrap().done().unwrap().resolve_route(LONG).unwrap();
            tell();
            of(id.wait(NOW).map_err(Into::into))
        }
        State::ResolvingService => {
            let bound = stage.channel.create_id(PortSpace::IB, QpType::RC).unwrap();
            let id = bound.bind_ib(ports().0).unwrap();
            let id = id.resolve_ib_service(IbService::Id(1)).unwrap();
            tell();
            of(id.wait(NOW).map_err(Into::into))
        }
        State::Connecting => {
            let id = stage.route(1).unwrap().connect(&stage.qp, &ConnectParam::new()).unwrap();
            tell();
            of(id.wait(NOW))
        }
        State::Accepting => {
            let listener = stage.listen();
            stage.script.request(1, rdma_ucm_conn_param::default());
            let request = listener.next_request(NOW).unwrap().unwrap();
            let id = request.accept(&stage.qp, &ConnectParam::new()).unwrap();
            // The listener would take a request.
            drop(listener);
            tell();
            of(id.wait(NOW))
        }
        State::Connected => {
            let connection = stage.connect().unwrap();
            tell();
            match connection.next_event(NOW).unwrap() {
                None => Answer::Waits,
                Some(event) => {
                    let is_over = connection.is_closed();
                    assert_eq!(connection.closed_by(), is_over.then_some(event));
                    assert_eq!(connection.wait_disconnected(NOW).is_ok(), is_over);
                    if is_over { Answer::Ends(event) } else { Answer::Told(event) }
                }
            }
        }
        State::Listening => {
            let listener = stage.listen();
            tell();
            match listener.next_request(NOW) {
                Ok(Some(_)) => Answer::Next,
                Ok(None) => Answer::Waits,
                Err(error) => Answer::Fails(error.errno()),
            }
        }
        State::Asking => {
            let id = stage.channel.create_id(PortSpace::UDP, QpType::UD).unwrap();
            let id = id.resolve_addr(None, to, LONG).unwrap();
            stage.script.tell(1, Type::RDMA_CM_EVENT_ADDR_RESOLVED, 0);
            let id = id.wait(NOW).unwrap().done().unwrap().resolve_route(LONG).unwrap();
            stage.script.tell(1, Type::RDMA_CM_EVENT_ROUTE_RESOLVED, 0);
            let (route, qp) = (id.wait(NOW).unwrap().done().unwrap(), ud().unwrap());
            let id = route.connect_datagrams(&qp, &ConnectParam::new()).unwrap();
            tell();
            of(id.wait(NOW))
        }
        State::Joining | State::Member => {
            let (bound, qp) =
                (stage.channel.create_id(PortSpace::UDP, QpType::UD).unwrap(), ud().unwrap());
            let bound = bound.bind(LOCAL.parse().unwrap()).unwrap();
            let group = "239.1.2.3".parse().unwrap();
            let id = bound.join_multicast(&qp, group, MulticastRole::SendOnly).unwrap();
            if state == State::Joining {
                tell();
                return of(id.wait(NOW).map_err(Into::into));
            }
            let joined = Type::RDMA_CM_EVENT_MULTICAST_JOIN;
            stage.script.tell_datagram(2, joined, 0, super::joined());
            let member = id.wait(NOW).unwrap().done().unwrap();
            tell();
            match member.wait_lost(NOW).is_ok() {
                true => Answer::Lost,
                false => Answer::Waits,
            }
        }
    }
}

/// Pairs that this kernel cannot reach are tried, too: another kernel may.
#[test]
#[cfg_attr(miri, ignore = "it takes long")]
fn every_event_in_every_state() {
    let mut reached = 0;
    for state in STATES {
        for (kind, status) in EVENTS {
            let why = unreachable(state, kind);
            reached += usize::from(why.is_none());
            assert_eq!(
                answer(state, kind, status),
                expected(state, kind),
                "{state:?}, {kind:?}, {why:?}"
            );
        }
    }
    // Each kind of event but two has a state in which the kernel reports it.
    let nowhere = EVENTS.map(|(kind, _)| kind).into_iter();
    let nowhere: Vec<_> = nowhere
        .filter(|kind| STATES.iter().all(|state| unreachable(*state, *kind).is_some()))
        .collect();
    assert_eq!(nowhere, [Type::RDMA_CM_EVENT_CONNECT_ERROR, Type::RDMA_CM_EVENT_INTERNAL]);
    assert_eq!(reached, 44);
}

#[test]
fn first_end_of_a_connection_is_its_reason() {
    let stage = Stage::new();
    let connection = stage.connect().unwrap();
    assert_eq!((connection.is_closed(), connection.closed_by()), (false, None));
    stage.script.tell(1, Type::RDMA_CM_EVENT_UNREACHABLE, -110);
    stage.script.tell(1, Type::RDMA_CM_EVENT_DISCONNECTED, 0);
    stage.script.tell(1, Type::RDMA_CM_EVENT_TIMEWAIT_EXIT, 0);
    connection.wait_disconnected(NOW).unwrap();
    assert_eq!(connection.closed_by(), Some(ConnectionEvent::Unreachable));
    assert_eq!(connection.next_event(NOW).unwrap(), Some(ConnectionEvent::Disconnected));
    assert_eq!(connection.next_event(NOW).unwrap(), Some(ConnectionEvent::TimewaitExit));
    assert_eq!(connection.closed_by(), Some(ConnectionEvent::Unreachable));
}

/// The listener's backlog limits the waiting requests; the library rejects others at once, by destroying their ids.
#[test]
fn requests_beyond_the_backlog_are_rejected_and_counted() {
    for datagrams in [false, true] {
        let stage = Stage::new();
        let space = if datagrams { PortSpace::UDP } else { PortSpace::TCP };
        let listen = |backlog| {
            let id = stage.channel.create_id(space, usual(space)).unwrap();
            id.bind(LOCAL.parse().unwrap()).unwrap().listen(backlog).unwrap()
        };
        let (listener, other) = (listen(4), listen(1));
        let ask = |at| match datagrams {
            true => stage.script.request_datagrams(at, rdma_ucm_ud_param::default()),
            false => _ = stage.script.request(at, rdma_ucm_conn_param::default()),
        };
        (0..200).for_each(|_| ask(1));
        assert_eq!(stage.channel.dispatch().unwrap(), 200);
        // Two listeners, and the requests with the lowest numbers.
        assert_eq!(stage.script.live(), [1, 2, 3, 4, 5, 6]);
        assert_eq!((listener.overflows(), other.overflows()), (196, 0));
        // Each request that is taken makes room for another one.
        let taken = listener.next_request(NOW).unwrap().unwrap();
        (0..2).for_each(|_| ask(1));
        ask(2);
        stage.channel.dispatch().unwrap();
        assert_eq!((listener.overflows(), other.overflows()), (197, 0));
        drop(taken);
        for _ in 0..4 {
            drop(listener.next_request(NOW).unwrap().unwrap());
        }
        assert!(listener.next_request(NOW).unwrap().is_none());
        assert!(other.next_request(NOW).unwrap().is_some());
        assert_eq!((stage.script.live(), stage.channel.leaked()), (vec![1, 2], 0));
    }
}

/// The network decides how often such events come, and the program how often it reads them.
#[test]
fn events_that_the_network_repeats_wait_once() {
    let stage = Stage::new();
    let connection = stage.connect().unwrap();
    for _ in 0..1000 {
        stage.script.tell(1, Type::RDMA_CM_EVENT_UNREACHABLE, -110);
        stage.script.tell(1, Type::RDMA_CM_EVENT_ADDR_CHANGE, 0);
        stage.channel.dispatch().unwrap();
    }
    connection.write_event(7).unwrap();
    connection.write_event(7).unwrap();
    let mut told = Vec::new();
    while let Some(event) = connection.next_event(NOW).unwrap() {
        told.push(event);
    }
    let written = ConnectionEvent::Written(7);
    let (unreachable, changed) = (ConnectionEvent::Unreachable, ConnectionEvent::AddressChange);
    assert_eq!(told, [unreachable, changed, written, written]);
    // After the program took one, the next is queued again.
    stage.script.tell(1, Type::RDMA_CM_EVENT_UNREACHABLE, -110);
    assert_eq!(connection.next_event(NOW).unwrap(), Some(unreachable));
}

/// The kernel reports one event, and each thread that waits for a request has to learn of it.
#[test]
#[cfg_attr(miri, ignore = "it waits")]
fn threads_that_share_a_listener_all_learn_that_its_device_goes() {
    let stage = Stage::new();
    let listener = stage.listen();
    stage.script.request(1, rdma_ucm_conn_param::default());
    stage.script.tell(1, Type::RDMA_CM_EVENT_DEVICE_REMOVAL, 0);
    assert!(listener.next_request(None).unwrap().is_some());
    std::thread::scope(|scope| {
        let wait = || listener.next_request(None).unwrap_err().errno();
        let waiting: Vec<_> = (0..3).map(|_| scope.spawn(wait)).collect();
        for thread in waiting {
            assert_eq!(thread.join().unwrap(), Errno::NODEV);
        }
    });
    // The file has no second event.
    let mut fds = [rustix::event::PollFd::new(&stage.channel, rustix::event::PollFlags::IN)];
    let now = rustix::event::Timespec::default();
    assert_eq!(rustix::event::poll(&mut fds, Some(&now)), Ok(0));
}
