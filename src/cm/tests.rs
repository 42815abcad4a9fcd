//! Promises of the connection manager's ids, on the scripted connection manager.

mod events;
mod hostile;

use super::param::from_raw_ece;
use super::scripted::{CmScript, LOCAL, PEER};
use super::*;
use crate::tests::Bench;
use crate::uverbs::scripted::{Op, Script, ScriptedPort};
use crate::{Error, QpControl, QpState, QpType, QueuePair};
use rustix::io::Errno;
use std::os::fd::AsFd;
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};
use uverbs_uapi::rdma_user_cm::rdma_cm_event_type as Type;
use uverbs_uapi::rdma_user_cm::*;

const NOW: Option<Duration> = Some(Duration::ZERO);
const LONG: Duration = Duration::from_secs(5);

/// A channel, a device, and a queue pair in `RESET`.
struct Stage {
    script: CmScript,
    channel: EventChannel,
    bench: Bench,
    qp: QueuePair,
}

impl Stage {
    fn new() -> Stage {
        Stage::on(Bench::new())
    }

    fn on(bench: Bench) -> Stage {
        let script = CmScript::new();
        let channel = script.open();
        channel.use_context(&bench.context).unwrap();
        let qp = bench.pd.qp_builder(&bench.cq, &bench.cq, QpType::RC).build().unwrap();
        Stage { script, channel, bench, qp }
    }

    /// An id whose route is resolved: the `id`-th of the script.
    fn route(&self, id: u32) -> crate::Result<RouteResolved> {
        let resolving = self.channel.create_id(PortSpace::TCP, QpType::RC)?.resolve_addr(
            None,
            PEER.parse().unwrap(),
            LONG,
        )?;
        self.script.tell(id, Type::RDMA_CM_EVENT_ADDR_RESOLVED, 0);
        let resolving = resolving.wait(NOW)?.done()?.resolve_route(LONG)?;
        self.script.tell(id, Type::RDMA_CM_EVENT_ROUTE_RESOLVED, 0);
        resolving.wait(NOW)?.done()
    }

    fn listen(&self) -> ListeningId {
        let bound = self
            .channel
            .create_id(PortSpace::TCP, QpType::RC)
            .unwrap()
            .bind(LOCAL.parse().unwrap())
            .unwrap();
        bound.listen(4).unwrap()
    }

    fn connect(&self) -> Result<Connection, ConnectError> {
        let connecting = self.route(1)?.connect(&self.qp, &ConnectParam::new())?;
        self.script.tell(1, Type::RDMA_CM_EVENT_CONNECT_RESPONSE, 0);
        Ok(connecting.wait(NOW)?.done()?)
    }
}

/// The type of queue pairs in a port space; in `IB` one of the possible types.
fn usual(space: PortSpace) -> QpType {
    match space {
        PortSpace::UDP | PortSpace::IPOIB => QpType::UD,
        _ => QpType::RC,
    }
}

#[test]
#[cfg_attr(miri, ignore = "it polls a file")]
fn active_side_brings_the_queue_pair_to_rts_step_by_step() {
    let stage = Stage::new();
    let route = stage.route(1).unwrap();
    assert_eq!(route.peer_addr(), Some(PEER.parse().unwrap()));
    assert_eq!(route.context().unwrap().device(), stage.bench.context.device());
    stage.script.log();
    let param = ConnectParam::new().private_data(b"hello").rnr_retry(3);
    let connecting = route.connect(&stage.qp, &param).unwrap();
    assert_eq!(stage.qp.state(), QpState::INIT);
    let Progress::Pending(connecting) = connecting.wait(NOW).unwrap() else {
        panic!("the peer did not answer");
    };
    let conn = rdma_ucm_conn_param { qp_num: 0x77, ..Default::default() };
    stage.script.tell_with(1, Type::RDMA_CM_EVENT_CONNECT_RESPONSE, 0, conn);
    let Progress::Done(connection) = connecting.wait(Some(LONG)).unwrap() else {
        panic!("the peer accepted");
    };
    assert_eq!((stage.qp.state(), connection.peer_qpn().0), (QpState::RTS, 0x77));
    let init = RDMA_USER_CM_CMD_INIT_QP_ATTR;
    assert_eq!(
        stage.script.log(),
        [init, RDMA_USER_CM_CMD_CONNECT, init, init, init, RDMA_USER_CM_CMD_ACCEPT]
    );
    let asked = stage.script.connects()[0];
    assert_eq!(asked.conn_param.qp_num, stage.qp.qpn().0);
    assert_eq!((asked.conn_param.private_data_len, asked.conn_param.rnr_retry_count), (5, 3));
    assert_eq!(stage.script.accepts()[0].conn_param.valid, 0, "a mere confirmation");
    connection.disconnect().unwrap();
    assert_eq!(stage.qp.state(), QpState::ERR);
    stage.script.tell(1, Type::RDMA_CM_EVENT_DISCONNECTED, 0);
    stage.script.tell(1, Type::RDMA_CM_EVENT_TIMEWAIT_EXIT, 0);
    assert_eq!(connection.next_event(NOW).unwrap(), Some(ConnectionEvent::Disconnected));
    assert_eq!(connection.next_event(NOW).unwrap(), Some(ConnectionEvent::TimewaitExit));
    assert_eq!(connection.next_event(NOW).unwrap(), None);
    drop(connection);
    assert_eq!(stage.script.live(), [0; 0]);
}

#[test]
fn queue_pair_goes_to_the_port_of_the_id() {
    let kernel = Script::new();
    kernel.set_ports(&[ScriptedPort::ETHERNET; 2]);
    let stage = Stage::on(Bench::on(kernel));
    stage.script.set_port(2);
    assert_eq!(stage.route(1).unwrap().port(), 2);
    let connecting = stage.route(2).unwrap().connect(&stage.qp, &ConnectParam::new()).unwrap();
    stage.script.tell(2, Type::RDMA_CM_EVENT_CONNECT_RESPONSE, 0);
    let _connection = connecting.wait(NOW).unwrap().done().unwrap();
    let port = stage.bench.script.object(stage.qp.handle()).port;
    assert_eq!((port, stage.qp.query().unwrap().port), (2, 2));
}

#[test]
fn failure_of_any_step_leaves_no_id_and_no_live_queue_pair() {
    for step in 1.. {
        let stage = Stage::new();
        stage.script.fail_step(step, Errno::NOMEM);
        let connected = stage.connect();
        let over = stage.script.cancel_failure();
        assert_eq!(connected.is_ok(), over, "step {step}: {connected:?}");
        if let Err(error) = &connected {
            assert_eq!(error.errno(), Errno::NOMEM, "step {step}: {error}");
            let half_way = [QpState::RTR, QpState::RTS].contains(&stage.qp.state());
            assert!(!half_way, "step {step} left the queue pair in {}", stage.qp.state());
        }
        drop(connected);
        assert!(stage.script.live().is_empty(), "step {step}");
        if over {
            assert!(step > 8, "only {step} steps");
            return;
        }
    }
}

#[test]
fn failure_of_any_step_of_accept_rejects_the_request() {
    for step in 1.. {
        let stage = Stage::new();
        let listener = stage.listen();
        stage.script.request(1, rdma_ucm_conn_param::default());
        let request = listener.next_request(NOW).unwrap().unwrap();
        stage.script.fail_step(step, Errno::NOMEM);
        let accepting = request.accept(&stage.qp, &ConnectParam::new());
        let over = stage.script.cancel_failure();
        assert_eq!(accepting.is_ok(), over, "step {step}");
        drop(accepting);
        assert_eq!(stage.script.live(), [1], "step {step}");
        if over {
            return;
        }
    }
}

/// The peer gave up early; the kernel reports that only after the accept.
#[test]
fn error_of_a_request_whose_peer_gave_up_says_so() {
    let stage = Stage::new();
    let listener = stage.listen();
    let request = || {
        stage.script.request(1, rdma_ucm_conn_param::default());
        listener.next_request(NOW).unwrap().unwrap()
    };
    let gave_up = |error: Error| {
        assert_eq!(error.errno(), Errno::CONNABORTED, "{error}");
        assert_eq!(error.kernel_errno(), Some(Errno::INVAL));
        assert!(error.message().contains("the peer gave up"), "{error}");
    };
    let param = ConnectParam::new();
    stage.script.refuse(RDMA_USER_CM_CMD_INIT_QP_ATTR, Errno::INVAL);
    gave_up(request().init_qp(&stage.qp).unwrap_err());
    gave_up(request().accept(&stage.qp, &param).unwrap_err());
    stage.script.refuse(RDMA_USER_CM_CMD_REJECT, Errno::INVAL);
    gave_up(request().reject(b"late").unwrap_err());
    stage.script.allow(RDMA_USER_CM_CMD_INIT_QP_ATTR);
    // The peer gives up between the last query and the accept.
    let script = stage.script.clone();
    stage.script.before(RDMA_USER_CM_CMD_ACCEPT, 1, move || {
        script.refuse(RDMA_USER_CM_CMD_ACCEPT, Errno::INVAL);
        script.refuse(RDMA_USER_CM_CMD_INIT_QP_ATTR, Errno::INVAL);
    });
    gave_up(request().accept(&stage.qp, &param).unwrap_err());
    assert_eq!(stage.qp.state(), QpState::ERR);
    // With a peer that is still there, the same error number means refused parameters.
    stage.script.allow(RDMA_USER_CM_CMD_INIT_QP_ATTR);
    let qp = stage.bench.pd.qp_builder(&stage.bench.cq, &stage.bench.cq, QpType::RC).build();
    let error = request().accept(&qp.unwrap(), &param).unwrap_err();
    assert_eq!(error.errno(), Errno::INVAL, "{error}");
    assert!(error.message().contains("parameters of the accept"), "{error}");
    assert_eq!((stage.script.live(), stage.channel.leaked()), (vec![1], 0));
}

/// The commands, with errors that only the caller can explain.
#[test]
fn every_step_that_the_kernel_refuses_names_its_subject() {
    let stage = Stage::new();
    let refused = |command, errno, told: &str, step: &dyn Fn() -> Error| {
        stage.script.refuse(command, errno);
        let error = step();
        stage.script.allow(command);
        assert!(error.message().contains(told), "{error}");
        assert_eq!(error.kernel_errno(), Some(errno));
    };
    let (local, peer): (std::net::SocketAddr, std::net::SocketAddr) =
        (LOCAL.parse().unwrap(), PEER.parse().unwrap());
    let id = || stage.channel.create_id(PortSpace::TCP, QpType::RC).unwrap();
    let resolved = || {
        let resolving = id().resolve_addr(None, peer, LONG).unwrap();
        let number = *stage.script.live().last().unwrap();
        stage.script.tell(number, Type::RDMA_CM_EVENT_ADDR_RESOLVED, 0);
        resolving.wait(NOW).unwrap().done().unwrap()
    };
    let asking = || {
        let resolving = resolved().resolve_route(LONG).unwrap();
        let number = *stage.script.live().last().unwrap();
        stage.script.tell(number, Type::RDMA_CM_EVENT_ROUTE_RESOLVED, 0);
        resolving.wait(NOW).unwrap().done().unwrap()
    };
    refused(RDMA_USER_CM_CMD_BIND, Errno::NOMEM, LOCAL, &|| id().bind(local).unwrap_err());
    refused(RDMA_USER_CM_CMD_RESOLVE_ADDR, Errno::NOMEM, PEER, &|| {
        id().resolve_addr(None, peer, LONG).unwrap_err()
    });
    let far: std::net::SocketAddr = "10.0.0.9:0".parse().unwrap();
    refused(RDMA_USER_CM_CMD_RESOLVE_ADDR, Errno::NOMEM, "from 10.0.0.9:0", &|| {
        id().resolve_addr(Some(far), peer, LONG).unwrap_err()
    });
    for errno in [Errno::NODEV, Errno::NOMEM] {
        refused(RDMA_USER_CM_CMD_RESOLVE_ROUTE, errno, PEER, &|| {
            resolved().resolve_route(LONG).unwrap_err()
        });
    }
    refused(RDMA_USER_CM_CMD_RESOLVE_ROUTE, Errno::AGAIN, "no subnet administrator", &|| {
        resolved().resolve_route(LONG).unwrap_err()
    });
    for (errno, told) in [(Errno::ADDRINUSE, "has port 5000 of 10.0.0.1"), (Errno::NOMEM, LOCAL)] {
        refused(RDMA_USER_CM_CMD_LISTEN, errno, told, &|| {
            id().bind(local).unwrap().listen(4).unwrap_err()
        });
    }
    refused(RDMA_USER_CM_CMD_CONNECT, Errno::NOMEM, PEER, &|| {
        asking().connect(&stage.qp, &ConnectParam::new()).unwrap_err()
    });
    // Errors of events other than the expected one name the peer, too.
    let failed = |step: &dyn Fn(u32) -> Error, told: &str| {
        let error = step(*stage.script.live().last().unwrap());
        assert!(error.message().starts_with(&format!("{PEER}: {told}")), "{error}");
    };
    let (addr, route) = (Type::RDMA_CM_EVENT_ADDR_ERROR, Type::RDMA_CM_EVENT_ROUTE_ERROR);
    let resolving = id().resolve_addr(None, peer, LONG).unwrap();
    let resolving = std::cell::Cell::new(Some(resolving));
    failed(
        &|number| {
            stage.script.tell(number, addr, -110);
            resolving.take().unwrap().wait(NOW).unwrap_err()
        },
        "the address could not be resolved",
    );
    let resolving = std::cell::Cell::new(Some(resolved().resolve_route(LONG).unwrap()));
    failed(
        &|number| {
            stage.script.tell(number, route, -113);
            resolving.take().unwrap().wait(NOW).unwrap_err()
        },
        "there is no route to the address",
    );
    let connecting = asking().connect(&stage.qp, &ConnectParam::new()).unwrap();
    let connecting = std::cell::Cell::new(Some(connecting));
    failed(
        &|number| {
            stage.script.tell(number, Type::RDMA_CM_EVENT_REJECTED, 8);
            connecting.take().unwrap().wait(NOW).unwrap_err().into()
        },
        "the connection was rejected: nobody listens",
    );
    assert!(stage.script.live().is_empty());
}

#[test]
fn events_of_destroyed_ids_are_discarded() {
    let stage = Stage::new();
    drop(stage.route(1).unwrap());
    stage.script.tell(1, Type::RDMA_CM_EVENT_DEVICE_REMOVAL, 0);
    let conn = rdma_ucm_conn_param::default();
    stage.script.tell_raw(0, 2, Type::RDMA_CM_EVENT_ESTABLISHED, 0, conn);
    stage.script.tell_raw(77, 77, Type::RDMA_CM_EVENT_DISCONNECTED, 0, conn);
    assert_eq!(stage.channel.dispatch().unwrap(), 3);
    assert!(stage.route(2).is_ok());
}

#[test]
fn unexpected_event_destroys_the_id_with_an_error() {
    for (kind, status, errno) in [
        (Type::RDMA_CM_EVENT_REJECTED, 28, Errno::CONNREFUSED),
        (Type::RDMA_CM_EVENT_UNREACHABLE, -110, Errno::TIMEDOUT),
        (Type::RDMA_CM_EVENT_CONNECT_ERROR, -12, Errno::NOMEM),
        (Type::RDMA_CM_EVENT_DEVICE_REMOVAL, 0, Errno::NODEV),
        (Type::RDMA_CM_EVENT_DISCONNECTED, 0, Errno::CONNRESET),
        (Type::RDMA_CM_EVENT_MULTICAST_JOIN, 0, Errno::PROTO),
    ] {
        let stage = Stage::new();
        let connecting = stage.route(1).unwrap().connect(&stage.qp, &ConnectParam::new()).unwrap();
        stage.script.tell(1, kind, status);
        let error = connecting.wait(NOW).unwrap_err();
        assert_eq!(error.errno(), errno, "{kind:?}: {error}");
        assert!(stage.script.live().is_empty());
    }
}

#[test]
fn options_have_the_width_that_the_kernel_expects() {
    let stage = Stage::new();
    let id = stage.channel.create_id(PortSpace::TCP, QpType::RC).unwrap();
    id.set_type_of_service(8).unwrap();
    id.set_reuse_address(true).unwrap();
    id.set_af_only(false).unwrap();
    id.set_ack_timeout(18).unwrap();
    assert!(id.set_ack_timeout(32).unwrap_err().message().contains("31 is the maximum"));
    let datagrams = stage.channel.create_id(PortSpace::UDP, QpType::UD).unwrap();
    assert!(datagrams.set_ack_timeout(18).unwrap_err().message().contains("type UD"));
    let one = 1i32.to_ne_bytes().to_vec();
    let told = [(0, vec![8]), (1, one), (2, vec![0; 4]), (3, vec![18])];
    assert_eq!(stage.script.options(), told);
}

#[test]
fn error_after_a_change_of_credentials_has_a_remedy() {
    let stage = Stage::new();
    stage.script.refuse(RDMA_USER_CM_CMD_CREATE_ID, Errno::ACCESS);
    let error = stage.channel.create_id(PortSpace::TCP, QpType::RC).unwrap_err();
    assert!(error.message().contains("open another channel"), "{error}");
    stage.script.allow(RDMA_USER_CM_CMD_CREATE_ID);
    stage.script.refuse(RDMA_USER_CM_CMD_GET_EVENT, Errno::ACCESS);
    let error = stage.channel.dispatch().unwrap_err();
    assert!(error.message().contains("credentials"), "{error}");
}

#[test]
fn id_that_the_kernel_does_not_destroy_is_counted() {
    let stage = Stage::new();
    let id = stage.channel.create_id(PortSpace::TCP, QpType::RC).unwrap();
    stage.script.refuse(RDMA_USER_CM_CMD_DESTROY_ID, Errno::ACCESS);
    drop(id);
    assert_eq!((stage.channel.leaked(), stage.script.live()), (1, vec![1]));
}

/// Another route may have brought the queue pair to `INIT`, with another port or partition key.
#[test]
fn queue_pair_in_init_gets_the_attributes_of_its_route() {
    let stage = Stage::new();
    let of_another = crate::QpAttr::new().state(QpState::INIT).port(1).pkey_index(0);
    stage.qp.modify(&of_another.access(crate::Access::empty())).unwrap();
    let changes = || {
        let log = stage.bench.script.log();
        log.into_iter().filter(|op| *op == Op::MODIFY_QP).count()
    };
    let before = changes();
    let _connecting = stage.route(1).unwrap().connect(&stage.qp, &ConnectParam::new()).unwrap();
    assert_eq!((changes(), stage.qp.state()), (before + 1, QpState::INIT));
}

/// An assignment to a variable drops the old connection after the new one is made.
#[test]
fn connection_that_is_dropped_late_leaves_the_next_one_alone() {
    let mut stage = Stage::new();
    let old = stage.connect().unwrap();
    old.disconnect().unwrap();
    stage.qp.reset(&mut [&mut stage.bench.cq]).unwrap();
    let connecting = stage.route(2).unwrap().connect(&stage.qp, &ConnectParam::new()).unwrap();
    stage.script.tell(2, Type::RDMA_CM_EVENT_CONNECT_RESPONSE, 0);
    let new = connecting.wait(NOW).unwrap().done().unwrap();
    old.disconnect().unwrap();
    drop(old);
    assert_eq!(stage.qp.state(), QpState::RTS);
    drop(new);
    assert_eq!(stage.qp.state(), QpState::ERR);
}

#[test]
fn handshake_that_lost_its_queue_pair_leaves_it_to_the_other() {
    let mut stage = Stage::new();
    let begin = |id| stage.route(id).unwrap().connect(&stage.qp, &ConnectParam::new()).unwrap();
    let (won, lost) = (begin(1), begin(2));
    for id in [1, 2] {
        stage.script.tell(id, Type::RDMA_CM_EVENT_CONNECT_RESPONSE, 0);
    }
    let won = won.wait(NOW).unwrap().done().unwrap();
    assert_eq!(lost.wait(NOW).unwrap_err().errno(), Errno::INVAL);
    assert_eq!((stage.qp.state(), stage.script.live()), (QpState::RTS, vec![1]));
    drop(won);
    // A handshake that began before a reset.
    stage.qp.reset(&mut [&mut stage.bench.cq]).unwrap();
    let late = stage.route(3).unwrap().connect(&stage.qp, &ConnectParam::new()).unwrap();
    stage.qp.reset(&mut [&mut stage.bench.cq]).unwrap();
    stage.script.tell(3, Type::RDMA_CM_EVENT_CONNECT_RESPONSE, 0);
    let error = late.wait(NOW).unwrap_err();
    assert!(error.error().message().contains("was reset during the handshake"), "{error}");
    assert_eq!(stage.qp.state(), QpState::RESET);
}

/// Bonding reports the change to all ids of an interface.
#[test]
fn change_of_an_address_ends_no_step() {
    let stage = Stage::new();
    let listener = stage.listen();
    stage.script.tell(1, Type::RDMA_CM_EVENT_ADDR_CHANGE, 0);
    assert!(listener.next_request(NOW).unwrap().is_none());
    stage.script.request(1, rdma_ucm_conn_param::default());
    drop(listener.next_request(NOW).unwrap().unwrap());
    let connecting = stage.route(3).unwrap().connect(&stage.qp, &ConnectParam::new()).unwrap();
    stage.script.tell(3, Type::RDMA_CM_EVENT_ADDR_CHANGE, 0);
    stage.script.tell(3, Type::RDMA_CM_EVENT_CONNECT_RESPONSE, 0);
    let connection = connecting.wait(NOW).unwrap().done().unwrap();
    stage.script.tell(3, Type::RDMA_CM_EVENT_ADDR_CHANGE, 0);
    assert_eq!(connection.next_event(NOW).unwrap(), Some(ConnectionEvent::AddressChange));
}

#[test]
#[cfg_attr(miri, ignore = "it waits")]
fn wait_ends_in_time_and_the_file_is_readable_while_an_event_is_pending() {
    let stage = Stage::new();
    let listener = stage.listen();
    let start = std::time::Instant::now();
    assert!(listener.next_request(Some(Duration::from_millis(30))).unwrap().is_none());
    assert!(start.elapsed() >= Duration::from_millis(30));
    let ready = || {
        let fd = stage.channel.as_fd();
        let mut fds = [rustix::event::PollFd::from_borrowed_fd(fd, rustix::event::PollFlags::IN)];
        rustix::event::poll(&mut fds, Some(&rustix::event::Timespec::default())).unwrap() > 0
    };
    assert!(!ready());
    stage.script.request(1, rdma_ucm_conn_param::default());
    assert!(ready());
    assert_eq!(stage.channel.dispatch().unwrap(), 1);
    assert!(!ready());
    assert!(listener.next_request(NOW).unwrap().is_some());
}

#[test]
fn errors_of_unanswered_datagram_requests_name_the_reason() {
    let stage = Stage::new();
    let qp = stage.bench.pd.qp_builder(&stage.bench.cq, &stage.bench.cq, QpType::UD).build();
    let qp = qp.unwrap();
    let route = || {
        let id = stage.channel.create_id(PortSpace::UDP, QpType::UD).unwrap();
        let resolving = id.resolve_addr(None, PEER.parse().unwrap(), LONG).unwrap();
        let number = *stage.script.live().last().unwrap();
        stage.script.tell(number, Type::RDMA_CM_EVENT_ADDR_RESOLVED, 0);
        let resolving = resolving.wait(NOW).unwrap().done().unwrap().resolve_route(LONG).unwrap();
        stage.script.tell(number, Type::RDMA_CM_EVENT_ROUTE_RESOLVED, 0);
        (number, resolving.wait(NOW).unwrap().done().unwrap())
    };
    for (kind, status, errno, told) in [
        (Type::RDMA_CM_EVENT_UNREACHABLE, 1, Errno::CONNREFUSED, "nobody listens"),
        (Type::RDMA_CM_EVENT_UNREACHABLE, 2, Errno::CONNREFUSED, "program refused"),
        (Type::RDMA_CM_EVENT_UNREACHABLE, 9, Errno::CONNREFUSED, "status 9"),
        (Type::RDMA_CM_EVENT_UNREACHABLE, -110, Errno::TIMEDOUT, "4791"),
        (Type::RDMA_CM_EVENT_DEVICE_REMOVAL, 0, Errno::NODEV, "removed"),
    ] {
        let (id, resolved) = route();
        let connecting = resolved.connect_datagrams(&qp, &ConnectParam::new()).unwrap();
        stage.script.tell(id, kind, status);
        let error = connecting.wait(NOW).unwrap_err();
        assert_eq!(error.errno(), errno, "{error}");
        assert!(error.to_string().contains(told), "{error}");
        assert!(stage.script.live().is_empty());
    }
}

/// The kernel's report of a join of 239.1.2.3.
fn joined() -> rdma_ucm_ud_param {
    let mut group =
        rdma_ucm_ud_param { qp_num: 0xff_ffff, qkey: 0x0123_4567, ..Default::default() };
    group.ah_attr.is_global = 1;
    group.ah_attr.grh.dgid = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 239, 1, 2, 3];
    group.ah_attr.grh.sgid_index = 2;
    group
}

#[test]
fn dropped_member_leaves_its_group_before_its_id_ends() {
    let stage = Stage::new();
    let qp = stage.bench.pd.qp_builder(&stage.bench.cq, &stage.bench.cq, QpType::UD).build();
    let qp = qp.unwrap();
    let group = "239.1.2.3".parse().unwrap();
    let bound = stage.channel.create_id(PortSpace::UDP, QpType::UD).unwrap();
    let bound = bound.bind(LOCAL.parse().unwrap()).unwrap();
    let join = |role| bound.join_multicast(&qp, group, role).unwrap();
    for (role, flags) in [(MulticastRole::Full, 0), (MulticastRole::SendOnly, 1)] {
        let joining = join(role);
        assert_eq!(qp.state(), QpState::RTS);
        let asked = *stage.script.joins().last().unwrap();
        assert_eq!((asked.id, asked.join_flags, asked.addr_size), (1, flags, 16));
        assert_eq!(asked.addr[4..8], [239, 1, 2, 3]);
        let number = *stage.script.live().last().unwrap();
        stage.script.tell_datagram(number, Type::RDMA_CM_EVENT_MULTICAST_JOIN, 0, joined());
        let member = joining.wait(NOW).unwrap().done().unwrap();
        assert_eq!((member.qpn().0, member.qkey()), (0xff_ffff, DATAGRAM_QKEY));
        assert_eq!(member.gid().ip(), group);
        assert_eq!(member.address().global.map(|global| global.sgid_index), Some(2));
        assert_eq!(member.receives(), role == MulticastRole::Full);
        assert_eq!(member.wait_lost(NOW).unwrap_err().errno(), Errno::TIMEDOUT);
        stage.script.tell(number, Type::RDMA_CM_EVENT_MULTICAST_ERROR, -101);
        assert!(!member.is_lost());
        // A second wait returns, too.
        member.wait_lost(NOW).unwrap();
        member.wait_lost(NOW).unwrap();
        assert!(member.is_lost());
        stage.script.log();
        drop(member);
        assert_eq!(stage.script.log(), [RDMA_USER_CM_CMD_LEAVE_MCAST]);
    }
    // The joining id is dropped before the kernel answers, and after the id that joined.
    let joining = join(MulticastRole::Full);
    drop(bound);
    stage.script.log();
    assert_eq!(stage.script.live().len(), 2);
    drop(joining);
    let ended = [RDMA_USER_CM_CMD_LEAVE_MCAST, RDMA_USER_CM_CMD_DESTROY_ID];
    assert_eq!((stage.script.log(), stage.script.live()), (ended.into(), vec![]));
}

#[test]
fn memberships_are_lost_when_the_device_of_their_id_goes() {
    let stage = Stage::new();
    let qp = stage.bench.pd.qp_builder(&stage.bench.cq, &stage.bench.cq, QpType::UD).build();
    let qp = qp.unwrap();
    let bound = || {
        let id = stage.channel.create_id(PortSpace::UDP, QpType::UD).unwrap();
        id.bind(LOCAL.parse().unwrap()).unwrap()
    };
    let (one, other) = (bound(), bound());
    let (group, role) = ("239.1.2.3".parse().unwrap(), MulticastRole::SendOnly);
    let join = |id: &BoundId| {
        let joining = id.join_multicast(&qp, group, role).unwrap();
        (joining, *stage.script.live().last().unwrap())
    };
    let member = |id| {
        let (joining, number) = join(id);
        stage.script.tell_datagram(number, Type::RDMA_CM_EVENT_MULTICAST_JOIN, 0, joined());
        joining.wait(NOW).unwrap().done().unwrap()
    };
    let (lost, kept, (joining, _)) = (member(&one), member(&other), join(&one));
    // The kernel reports the removal to the id alone.
    stage.script.tell(1, Type::RDMA_CM_EVENT_DEVICE_REMOVAL, 0);
    lost.wait_lost(NOW).unwrap();
    stage.script.refuse(RDMA_USER_CM_CMD_LEAVE_MCAST, Errno::NXIO);
    drop(lost);
    assert_eq!(stage.channel.leaked(), 0);
    stage.script.allow(RDMA_USER_CM_CMD_LEAVE_MCAST);
    assert_eq!(joining.wait(NOW).unwrap_err().errno(), Errno::NODEV);
    assert_eq!(kept.wait_lost(NOW).unwrap_err().errno(), Errno::TIMEDOUT);
}

/// While the channel passes the removal on to the id's memberships, other threads drop ids.
#[test]
#[cfg_attr(miri, ignore = "it takes long")]
fn ids_go_while_their_channel_reads_a_removal() {
    let stage = Stage::new();
    let listener = stage.listen();
    let Stage { script, channel, .. } = stage;
    let (done, ended) = std::sync::mpsc::channel();
    // Not a scoped thread, which would keep the test from failing if it hangs.
    std::thread::spawn(move || {
        let (last, is_over) = std::sync::mpsc::channel::<()>();
        let coming = std::thread::spawn(move || {
            while let Err(std::sync::mpsc::TryRecvError::Empty) = is_over.try_recv() {
                let ids: Vec<_> = (0..20)
                    .map(|_| channel.create_id(PortSpace::TCP, QpType::RC).unwrap())
                    .collect();
                drop(ids);
            }
        });
        let end = Instant::now() + Duration::from_millis(300);
        while Instant::now() < end {
            script.tell(1, Type::RDMA_CM_EVENT_DEVICE_REMOVAL, 0);
            listener.next_request(NOW).unwrap_err();
        }
        drop(last);
        coming.join().unwrap();
        done.send(()).unwrap();
    });
    match ended.recv_timeout(Duration::from_secs(60)) {
        Ok(()) => {}
        Err(RecvTimeoutError::Timeout) => panic!("the threads wait for each other"),
        Err(RecvTimeoutError::Disconnected) => panic!("one of the threads panicked"),
    }
}

#[test]
fn error_of_a_group_names_the_reason() {
    let stage = Stage::new();
    let qp = stage.bench.pd.qp_builder(&stage.bench.cq, &stage.bench.cq, QpType::UD).build();
    let qp = qp.unwrap();
    let bound = |space| {
        let id = stage.channel.create_id(space, usual(space)).unwrap();
        id.bind(LOCAL.parse().unwrap()).unwrap()
    };
    let (group, role) = ("239.1.2.3".parse().unwrap(), MulticastRole::Full);
    let refused = |error: Error, told: &str| assert!(error.message().contains(told), "{error}");
    let id = bound(PortSpace::UDP);
    refused(
        id.join_multicast(&qp, "10.0.0.2".parse().unwrap(), role).unwrap_err(),
        "224.0.0.0 to 239.255.255.255",
    );
    refused(id.join_multicast(&stage.qp, group, role).unwrap_err(), "one of type UD");
    let tcp = bound(PortSpace::TCP).join_multicast(&qp, group, role);
    refused(tcp.unwrap_err(), "port space UDP");
    for (errno, told) in [
        (Errno::from_raw_os_error(524), "IPv4 groups only"),
        (Errno::OPNOTSUPP, "MulticastRole::Full"),
    ] {
        stage.script.refuse(RDMA_USER_CM_CMD_JOIN_MCAST, errno);
        let error = id.join_multicast(&qp, group, role).unwrap_err();
        stage.script.allow(RDMA_USER_CM_CMD_JOIN_MCAST);
        assert_eq!(error.errno(), errno);
        refused(error, told);
    }
    let joining = id.join_multicast(&qp, group, role).unwrap();
    let number = *stage.script.live().last().unwrap();
    stage.script.tell(number, Type::RDMA_CM_EVENT_MULTICAST_ERROR, -110);
    let error = joining.wait(NOW).unwrap_err();
    assert_eq!(error.errno(), Errno::TIMEDOUT);
    refused(error, "subnet administrator did not answer");
    assert!(!stage.script.live().contains(&number));
    // The queue pair was dropped meanwhile.
    let joining = id.join_multicast(&qp, group, role).unwrap();
    let number = *stage.script.live().last().unwrap();
    drop(qp);
    stage.script.tell_datagram(number, Type::RDMA_CM_EVENT_MULTICAST_JOIN, 0, joined());
    refused(joining.wait(NOW).unwrap_err(), "the queue pair was dropped");
    drop(id);
    assert!(stage.script.live().is_empty());
}

/// The ECE options of the device of [`mlx5_stage`].
const OFFERED: Ece = Ece { vendor_id: 0x15b3, options: 0x1000_0007 };

/// As [`Stage::new`], on an mlx5 device with ECE options.
fn mlx5_stage() -> Stage {
    let stage = Stage::on(Bench::on(Script::mlx5()));
    let context = &stage.bench.context;
    stage.script.set_device(context.device().node_guid(), context.query_gid(1, 0).unwrap().gid);
    stage
}

fn raw_ece(vendor_id: u32, options: u32) -> rdma_ucm_ece {
    rdma_ucm_ece { vendor_id, attr_mod: options }
}

/// The ECE options that the accept carried.
fn answer(stage: &Stage) -> Option<Ece> {
    from_raw_ece(stage.script.accepts()[0].ece)
}

#[test]
fn request_offers_the_options_of_the_device_and_the_answer_goes_to_it() {
    // The peer's answer, the options in the change to RTR, and those that the device took.
    let answers = [
        (raw_ece(0x15b3, 0x1000_0003), 0x1000_0003, 0x1000_0003),
        (raw_ece(0x15b3, 0x1000_000a), 0x1000_000a, 0x1000_0002),
        (raw_ece(0, 0), 0, 0),
    ];
    for (answer, told, taken) in answers {
        let stage = mlx5_stage();
        let connecting = stage.route(1).unwrap().connect(&stage.qp, &ConnectParam::new()).unwrap();
        assert_eq!(from_raw_ece(stage.script.connects()[0].ece), Some(OFFERED));
        stage.script.tell_ece(1, Type::RDMA_CM_EVENT_CONNECT_RESPONSE, answer);
        let connection = connecting.wait(NOW).unwrap().done().unwrap();
        assert_eq!(connection.ece(), from_raw_ece(answer));
        assert_eq!(stage.bench.script.ece_told(), told);
        assert_eq!(stage.qp.query_ece().unwrap(), Ece { options: taken, ..OFFERED });
    }
    let stage = mlx5_stage();
    let connecting = stage.route(1).unwrap().connect(&stage.qp, &ConnectParam::new()).unwrap();
    stage.script.tell_ece(1, Type::RDMA_CM_EVENT_CONNECT_RESPONSE, raw_ece(0xbad, 1));
    let error = connecting.wait(NOW).unwrap_err();
    assert_eq!((error.errno(), stage.qp.state()), (Errno::PROTO, QpState::INIT));
    assert!(
        error.to_string().contains("vendor 0xbad (ECE) to a request with those of vendor 0x15b3"),
        "{error}"
    );
}

#[test]
fn accept_takes_the_requested_options_that_the_device_has() {
    // The peer's request, the options in the change to RTR, and the answer to the peer.
    let requests = [
        (raw_ece(0x15b3, 0x1000_000a), 0x1000_000a, raw_ece(0x15b3, 0x1000_0002)),
        (raw_ece(0xbad, 0x1000_0003), 0, raw_ece(0xbad, 0)),
        (raw_ece(0, 0), 0, raw_ece(0, 0)),
    ];
    for (asked, told, answered) in requests {
        let stage = mlx5_stage();
        let listener = stage.listen();
        stage.script.request_ece(1, asked);
        let request = listener.next_request(NOW).unwrap().unwrap();
        let _accepting = request.accept(&stage.qp, &ConnectParam::new()).unwrap();
        assert_eq!(answer(&stage), from_raw_ece(answered));
        assert_eq!(stage.bench.script.ece_told(), told);
        let taken = if told == 0 { 0 } else { answered.attr_mod };
        assert_eq!(stage.qp.query_ece().unwrap(), Ece { options: taken, ..OFFERED });
    }
    // A program that sets the answer's options has set the device's by itself.
    let stage = mlx5_stage();
    let listener = stage.listen();
    stage.script.request_ece(1, raw_ece(0x15b3, 0x1000_0003));
    let request = listener.next_request(NOW).unwrap().unwrap();
    stage.qp.set_ece(Ece { options: 0x1000_0001, ..OFFERED }).unwrap();
    let param = ConnectParam::new().ece(Ece { options: 0x1000_0001, ..OFFERED });
    let _accepting = request.accept(&stage.qp, &param).unwrap();
    assert_eq!(answer(&stage), from_raw_ece(raw_ece(0x15b3, 0x1000_0001)));
    assert_eq!(stage.bench.script.ece_told(), 0x1000_0001);
}

/// Two handshakes of one queue pair, or a handshake and the program: one asks for other options while the other is
/// under way.
#[test]
fn options_of_a_handshake_go_with_its_own_change_to_rtr() {
    let stage = mlx5_stage();
    let connecting = stage.route(1).unwrap().connect(&stage.qp, &ConnectParam::new()).unwrap();
    let answer = raw_ece(0x15b3, 0x1000_0003);
    stage.script.tell_ece(1, Type::RDMA_CM_EVENT_CONNECT_RESPONSE, answer);
    let other = QpControl { qp: stage.qp.qp.downgrade().upgrade().unwrap() };
    // The first INIT_QP_ATTR is for the peer's rights, the second for RTR.
    stage.script.before(RDMA_USER_CM_CMD_INIT_QP_ATTR, 2, move || {
        other.set_ece(Ece { options: 4, ..OFFERED }).unwrap();
    });
    let _connection = connecting.wait(NOW).unwrap().done().unwrap();
    assert_eq!(stage.bench.script.ece_told(), 0x1000_0003);
    assert_eq!(stage.qp.query_ece().unwrap(), Ece { options: 0x1000_0003, ..OFFERED });
}

#[test]
fn failed_handshake_leaves_no_options_to_the_next_one() {
    use uverbs_uapi::write::{IB_USER_VERBS_CMD_FLAG_EXTENDED, IB_USER_VERBS_EX_CMD_MODIFY_QP};
    let with_options = Op::Write(IB_USER_VERBS_EX_CMD_MODIFY_QP | IB_USER_VERBS_CMD_FLAG_EXTENDED);
    let stage = mlx5_stage();
    let listener = stage.listen();
    stage.script.request_ece(1, raw_ece(0x15b3, 0x1000_0003));
    let request = listener.next_request(NOW).unwrap().unwrap();
    stage.bench.script.refuse(with_options, Errno::NOMEM);
    assert_eq!(request.accept(&stage.qp, &ConnectParam::new()).unwrap_err().errno(), Errno::NOMEM);
    stage.bench.script.allow(with_options);
    assert_eq!(stage.qp.query_ece().unwrap(), OFFERED);
}

#[test]
fn a_device_without_options_answers_none_of_the_vendor_that_asked() {
    let stage = Stage::new();
    let connecting = stage.route(1).unwrap().connect(&stage.qp, &ConnectParam::new()).unwrap();
    assert_eq!(from_raw_ece(stage.script.connects()[0].ece), None);
    drop(connecting);
    let stage = Stage::new();
    let listener = stage.listen();
    stage.script.request_ece(1, raw_ece(0x15b3, 0x1000_0003));
    let request = listener.next_request(NOW).unwrap().unwrap();
    let _accepting = request.accept(&stage.qp, &ConnectParam::new()).unwrap();
    assert_eq!(answer(&stage), from_raw_ece(raw_ece(0x15b3, 0)));
}

#[test]
fn written_event_arrives_and_older_kernels_are_told_apart() {
    let stage = Stage::new();
    let connection = stage.connect().unwrap();
    connection.write_event(0x0123_4567_89ab_cdef).unwrap();
    let written = Some(ConnectionEvent::Written(0x0123_4567_89ab_cdef));
    assert_eq!(connection.next_event(NOW).unwrap(), written);
    // A kernel without the command refuses the probe, too.
    stage.script.refuse(RDMA_USER_CM_CMD_WRITE_CM_EVENT, Errno::INVAL);
    let error = connection.write_event(1).unwrap_err();
    assert_eq!(error.errno(), Errno::OPNOTSUPP);
    assert!(error.message().contains("6.18 and later"), "{error}");
    stage.script.allow(RDMA_USER_CM_CMD_WRITE_CM_EVENT);
    // A kernel with it does not find the id of the probe.
    stage.script.fail_step(1, Errno::INVAL);
    assert_eq!(connection.write_event(1).unwrap_err().errno(), Errno::INVAL);
}

#[test]
fn types_of_queue_pairs_have_their_port_space() {
    let stage = Stage::new();
    let uc = stage.bench.pd.qp_builder(&stage.bench.cq, &stage.bench.cq, QpType::UC).build();
    let (uc, param) = (uc.unwrap(), ConnectParam::new().min_rnr_timer(9));
    let create = |space, qp_type| stage.channel.create_id(space, qp_type);
    let refused = |made: crate::Result<Id>, told: &str| {
        let error = made.unwrap_err();
        assert!(error.message().contains(told), "{error}");
    };
    refused(create(PortSpace::TCP, QpType::UC), "are connected in the port space IB");
    refused(create(PortSpace::IPOIB, QpType::RC), "are connected in the port space TCP");
    refused(create(PortSpace::IB, QpType::RAW_PACKET), "no queue pairs of type raw packet");
    for (space, qp_type) in [
        (PortSpace::TCP, QpType::RC),
        (PortSpace::UDP, QpType::UD),
        (PortSpace::IPOIB, QpType::UD),
        (PortSpace::IB, QpType::RC),
    ] {
        create(space, qp_type).unwrap();
        let asked = stage.script.creates().last().map(|it| (it.ps, QpType(it.qp_type.into())));
        assert_eq!(asked, Some((space.0, qp_type)));
    }
    let listen = |qp_type| {
        let id = create(PortSpace::IB, qp_type).unwrap().bind(LOCAL.parse().unwrap()).unwrap();
        (*stage.script.live().last().unwrap(), id.listen(4))
    };
    let error = listen(QpType::XRC_INI).1.unwrap_err();
    assert!(error.message().contains("XRC targets"), "{error}");
    let (number, listener) = listen(QpType::UC);
    let listener = listener.unwrap();
    for reliable in [true, false] {
        stage.script.request(number, rdma_ucm_conn_param::default());
        let request = listener.next_request(NOW).unwrap().unwrap();
        assert_eq!((request.qp_type(), request.port_space()), (QpType::UC, PortSpace::IB));
        match reliable {
            true => {
                let error = request.accept(&stage.qp, &param).unwrap_err();
                assert!(error.message().contains("an id for type UC"), "{error}");
            }
            // Attributes that UC queue pairs do not have are left out.
            false => drop(request.accept(&uc, &param).unwrap()),
        }
    }
    assert_eq!(uc.state(), QpState::ERR);
}

/// Addresses of two ports of one subnet.
fn ports() -> (IbAddress, IbAddress) {
    let port = |last| {
        let gid = crate::Gid([0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, last]);
        IbAddress::new(gid, PortSpace::IB, 7)
    };
    (port(1), port(2))
}

#[test]
fn ports_of_infiniband_are_addressed_by_gid() {
    let stage = Stage::new();
    let (here, there) = ports();
    let create = || stage.channel.create_id(PortSpace::IB, QpType::RC).unwrap();
    let bound = create().bind_ib(here).unwrap();
    assert_eq!(bound.local_ib_addr().unwrap(), here);
    let (asked, raw) = (stage.script.binds()[0], here.encode());
    assert_eq!((asked.addr, asked.addr_size), (raw.0, 48));
    let resolving = create().resolve_ib_addr(Some(here), there, LONG).unwrap();
    stage.script.tell(2, Type::RDMA_CM_EVENT_ADDR_RESOLVED, 0);
    let route = resolving.wait(NOW).unwrap().done().unwrap().resolve_route(LONG).unwrap();
    stage.script.tell(2, Type::RDMA_CM_EVENT_ROUTE_RESOLVED, 0);
    let route = route.wait(NOW).unwrap().done().unwrap();
    assert_eq!(route.ib_addrs().unwrap(), (here, there));
    let param = ConnectParam::new().private_data(b"hello");
    let error = route.connect(&stage.qp, &param).unwrap_err();
    assert!(error.message().contains("begins with 68 65"), "{error}");
    let listening = create().bind_ib(here).unwrap().listen(4).unwrap();
    assert_eq!(listening.local_ib_addr().unwrap(), here);
    drop(bound.resolve_ib_addr(there, LONG).unwrap());
    let asked = stage.script.resolves();
    assert_eq!((asked[0].src_addr, asked[0].src_size), (here.encode().0, 48));
    assert_eq!((asked[1].src_size, asked[1].dst_addr), (0, there.encode().0));
    for (command, errno, told) in [
        (RDMA_USER_CM_CMD_BIND, Errno::NODEV, "no InfiniBand port has the GID fe80::1"),
        (RDMA_USER_CM_CMD_BIND, Errno::ADDRINUSE, "port number 7 of the port space IB is in use"),
        (
            RDMA_USER_CM_CMD_BIND,
            Errno::ADDRNOTAVAIL,
            "port number 7 of the port space IB is in use",
        ),
        (RDMA_USER_CM_CMD_BIND, Errno::ACCESS, "port number 7 is below 1024"),
        (RDMA_USER_CM_CMD_RESOLVE_ADDR, Errno::NODEV, "the P_Key 0xffff"),
    ] {
        stage.script.refuse(command, errno);
        let error = match command {
            RDMA_USER_CM_CMD_BIND => create().bind_ib(here).unwrap_err(),
            _ => create().resolve_ib_addr(None, there, LONG).unwrap_err(),
        };
        stage.script.allow(command);
        assert!(error.message().contains(told), "{error}");
    }
    for (errno, told) in [
        (Errno::NODEV, "has the GID fe80::1 and is in the subnet of fe80::2"),
        (Errno::ADDRINUSE, "port number 7 of"),
        (Errno::ACCESS, "port number 7 is below 1024"),
    ] {
        stage.script.refuse(RDMA_USER_CM_CMD_RESOLVE_ADDR, errno);
        let error = create().resolve_ib_addr(Some(here), there, LONG).unwrap_err();
        stage.script.allow(RDMA_USER_CM_CMD_RESOLVE_ADDR);
        assert!(error.message().contains(told), "{error}");
    }
    stage.script.refuse(RDMA_USER_CM_CMD_RESOLVE_ADDR, Errno::INVAL);
    let bound = create().bind(LOCAL.parse().unwrap()).unwrap();
    let error = bound.resolve_ib_addr(there, LONG).unwrap_err();
    assert!(error.message().contains("bound to an IP address"), "{error}");
    let error = create().bind_ib(here).unwrap().resolve_addr(PEER.parse().unwrap(), LONG);
    assert!(error.unwrap_err().message().contains("another family"));
}

#[test]
fn requests_by_gid_use_the_whole_field() {
    let stage = Stage::new();
    let (here, there) = ports();
    let route = |id, qp_type| {
        let asked = stage.channel.create_id(PortSpace::IB, qp_type).unwrap();
        let resolving = asked.resolve_ib_addr(Some(here), there, LONG).unwrap();
        stage.script.tell(id, Type::RDMA_CM_EVENT_ADDR_RESOLVED, 0);
        let route = resolving.wait(NOW).unwrap().done().unwrap().resolve_route(LONG).unwrap();
        stage.script.tell(id, Type::RDMA_CM_EVENT_ROUTE_RESOLVED, 0);
        route.wait(NOW).unwrap().done().unwrap()
    };
    let bytes = |length| ConnectParam::new().private_data(&vec![0; length]);
    let whole = route(1, QpType::RC).connect(&stage.qp, &bytes(IB_REQUEST_PRIVATE_DATA)).unwrap();
    assert_eq!(stage.script.connects()[0].conn_param.private_data_len, 92);
    drop(whole);
    let error = route(2, QpType::RC).connect(&stage.qp, &bytes(93)).unwrap_err();
    assert!(error.message().contains("93 bytes of private data"), "{error}");
    let qp = stage.bench.pd.qp_builder(&stage.bench.cq, &stage.bench.cq, QpType::UD).build();
    let qp = qp.unwrap();
    let whole = bytes(IB_DATAGRAM_REQUEST_PRIVATE_DATA);
    drop(route(3, QpType::UD).connect_datagrams(&qp, &whole).unwrap());
    assert_eq!(stage.script.connects()[1].conn_param.private_data_len, 216);
    let error = route(4, QpType::UD).connect_datagrams(&qp, &bytes(217)).unwrap_err();
    assert!(error.message().contains("217 bytes of private data"), "{error}");
}

#[test]
fn service_ids_are_those_of_the_port_space() {
    let stage = Stage::new();
    let gid = ports().0.gid;
    let bind = |space, address| {
        let result = stage.channel.create_id(space, usual(space)).unwrap().bind_ib(address);
        result.map(drop).map_err(|error| error.message().to_owned())
    };
    let of = |space| IbAddress::new(gid, space, 0x1cff);
    // The port space IB also has the service ids of TCP and UDP.
    for space in [PortSpace::IB, PortSpace::TCP, PortSpace::UDP] {
        bind(PortSpace::IB, of(space)).unwrap();
        bind(space, of(space)).unwrap();
    }
    let error = bind(PortSpace::TCP, of(PortSpace::UDP)).unwrap_err();
    assert!(error.contains("0x1111cff is none of the port space TCP"), "{error}");
    assert!(bind(PortSpace::IB, IbAddress::of_service(gid, 0x1234)).is_err());
    let error = bind(PortSpace::IPOIB, of(PortSpace::IPOIB)).unwrap_err();
    assert!(error.contains("no service ids"), "{error}");
    // Bits that the mask leaves out are not compared.
    let any = IbAddress { service_mask: 0xffff, ..of(PortSpace::UDP) };
    bind(PortSpace::TCP, any).unwrap();
}

#[test]
fn path_that_the_program_sets_resolves_the_route() {
    let stage = Stage::new();
    let (here, there) = ports();
    let resolve = || {
        let resolving = stage.channel.create_id(PortSpace::IB, QpType::RC).unwrap();
        let resolving = resolving.resolve_ib_addr(Some(here), there, LONG).unwrap();
        let number = *stage.script.live().last().unwrap();
        stage.script.tell(number, Type::RDMA_CM_EVENT_ADDR_RESOLVED, 0);
        resolving.wait(NOW).unwrap().done().unwrap()
    };
    let path =
        IbPath { sgid: here.gid, dgid: there.gid, dlid: 9, reversible: true, ..IbPath::default() };
    let route = resolve().set_ib_path(&path).unwrap().wait(NOW).unwrap().done().unwrap();
    let options = stage.script.options();
    // Flags that the kernel asks for, and the record.
    assert_eq!((options[0].0, options[0].1.len()), (RDMA_OPTION_IB_PATH, 72));
    assert_eq!(options[0].1[..4], 0x2bu32.to_ne_bytes());
    assert_eq!(route.ib_paths().unwrap(), [path]);
    for (path, told) in [
        (IbPath { flow_label: 1 << 20, ..path }, "1048576; it has 20 bits, so that 1048575"),
        (IbPath { qos_class: 1 << 12, ..path }, "QoS class of 4096"),
        (IbPath { service_level: 16, ..path }, "service level of 16"),
        (IbPath { rate: 0x82, ..path }, "static rate of 130"),
    ] {
        let error = resolve().set_ib_path(&path).unwrap_err();
        assert!(error.message().contains(told), "{error}");
    }
    stage.script.refuse(RDMA_USER_CM_CMD_RESOLVE_ROUTE, Errno::AGAIN);
    let error = resolve().resolve_route(LONG).unwrap_err();
    assert!(error.message().contains("no subnet administrator"), "{error}");
}

#[test]
fn services_are_found_by_id_and_by_name() {
    let stage = Stage::new();
    let ((_, there), long) = (ports(), "n".repeat(64));
    let record = |number: u64| {
        let mut raw = ib_user_service_rec {
            id: uverbs_uapi::endian::Be64::new(number),
            gid: there.gid.0,
            pkey: uverbs_uapi::endian::Be16::new(0x8001),
            lease: uverbs_uapi::endian::Be32::new(60),
            ..Default::default()
        };
        raw.name[..4].copy_from_slice(b"disk");
        raw.data_16[1] = uverbs_uapi::endian::Be16::new(0x0102);
        raw
    };
    let ask = |service| {
        let bound = stage.channel.create_id(PortSpace::IB, QpType::RC).unwrap();
        bound.bind_ib(there).unwrap().resolve_ib_service(service)
    };
    // Counts below and above the room of the first query.
    for count in [1, 6, 7, 20, 371, 400] {
        stage.script.set_services((0..count).map(record).collect());
        let resolving = ask(IbService::Name("disk")).unwrap();
        let number = *stage.script.live().last().unwrap();
        stage.script.tell(number, Type::RDMA_CM_EVENT_ADDRINFO_RESOLVED, 0);
        let resolved = resolving.wait(NOW).unwrap().done().unwrap();
        let last = resolved.records().last().unwrap();
        // An answer has room for 371.
        let count = count.min(371);
        assert_eq!(resolved.records().len() as u64, count);
        assert_eq!((last.address.service_id, last.address.pkey), (count - 1, 0x8001));
        assert_eq!((&*last.name, last.lease, last.data_16[1]), ("disk", 60, 0x0102));
        drop(resolved.resolve_route(LONG).unwrap());
    }
    drop(ask(IbService::Id(0x0123_4567_89ab_cdef)).unwrap());
    let wanted = stage.script.wanted();
    let (named, numbered) = (wanted.first().unwrap().ibs, wanted.last().unwrap().ibs);
    assert_eq!((named.flags, &named.service_name[..5]), (2, &b"disk\0"[..]));
    assert_eq!((numbered.flags, numbered.service_id), (1, 0x0123_4567_89ab_cdef));
    for name in ["", &long, "a\0b"] {
        let error = ask(IbService::Name(name)).unwrap_err();
        assert!(error.message().contains("1 to 63"), "{error}");
    }
    ask(IbService::Name(&long[1..])).unwrap();
    let resolving = ask(IbService::Id(1)).unwrap();
    let number = *stage.script.live().last().unwrap();
    stage.script.tell(number, Type::RDMA_CM_EVENT_ADDRINFO_ERROR, -110);
    let error = resolving.wait(NOW).unwrap_err();
    assert!(error.message().contains("subnet administrator did not answer"), "{error}");
    for (errno, told) in [
        (Errno::OPNOTSUPP, "only an InfiniBand port"),
        (Errno::AGAIN, "no subnet administrator"),
        // The kernel refuses the probe, too.
        (Errno::INVAL, "6.18 and later"),
    ] {
        stage.script.refuse(RDMA_USER_CM_CMD_RESOLVE_IB_SERVICE, errno);
        let error = ask(IbService::Id(1)).unwrap_err();
        stage.script.allow(RDMA_USER_CM_CMD_RESOLVE_IB_SERVICE);
        assert!(error.message().contains(told), "{error}");
    }
    assert!(stage.script.live().is_empty());
}
