//! Many clients, and clients with short timeouts: more requests than a listener keeps, and clients that go before the
//! listener answers.

use super::datagrams;
use super::{PATIENCE, Service, Side, ask, channel, connect, done, route};
use crate::env;
use crate::verdict::{Stop, Verdict, trials};
use std::time::{Duration, Instant};
use uverbs::cm::{ConnectParam, Progress, RejectReason};
use uverbs::{Errno, QpType};

trials![
    requests_beyond_the_backlog_are_rejected,
    datagram_requests_beyond_the_backlog_are_rejected,
    request_of_a_client_that_gave_up_says_so,
];

const BACKLOG: u32 = 4;
const CLIENTS: u64 = 64;

/// The handshake of a client that still waits; `None` for a refused client.
fn still_waits<P, D>(
    waited: Result<Progress<P, D>, uverbs::cm::ConnectError>,
) -> Verdict<Option<P>> {
    match waited {
        Ok(Progress::Pending(pending)) => Ok(Some(pending)),
        Ok(Progress::Done(_)) => Err(Stop::fail("connected without an accept")),
        Err(error) => {
            assert_eq!(error.errno(), Errno::CONNREFUSED, "{error}");
            let reason = error.rejection().and_then(|rejection| rejection.reason());
            assert!(reason.is_none_or(|it| it == RejectReason::CONSUMER_DEFINED), "{error}");
            Ok(None)
        }
    }
}

/// Reads the listener's channel without taking requests, until all clients are refused except those whose requests the
/// listener keeps. The kernel itself refuses those that arrive while as many wait to be read: most are the library's.
fn remaining<T>(
    service: &Service,
    mut waiting: Vec<T>,
    look: impl Fn(T) -> Verdict<Option<T>>,
) -> Verdict<Vec<T>> {
    let deadline = Instant::now() + PATIENCE;
    while waiting.len() > BACKLOG as usize {
        if Instant::now() > deadline {
            let rejected = service.id.overflows();
            let still = waiting.len();
            return Err(Stop::fail(format!(
                "{still} clients still wait, {rejected} were rejected"
            )));
        }
        service.channel.dispatch()?;
        let looked: Verdict<Vec<_>> = waiting.into_iter().map(&look).collect();
        waiting = looked?.into_iter().flatten().collect();
        std::thread::sleep(Duration::from_millis(5));
    }
    let (rejected, refused) = (service.id.overflows(), CLIENTS - u64::from(BACKLOG));
    assert!((refused / 2..=refused).contains(&rejected), "{rejected} of {refused}");
    Ok(waiting)
}

/// Each client has a queue pair of its own: the kernel takes a queue pair's second request for a stale connection.
fn requests_beyond_the_backlog_are_rejected() -> Verdict {
    let before = env::resources()?;
    {
        let (channel, service) = (channel()?, Service::start(BACKLOG)?);
        let (context, param) = (env::open()?, ConnectParam::new());
        channel.use_context(&context)?;
        let (pd, cq) = (context.alloc_pd()?, context.cq_builder(16).build()?);
        let (mut qps, mut waiting) = (Vec::new(), Vec::new());
        for _ in 0..CLIENTS {
            let qp = pd.qp_builder(&cq, &cq, QpType::RC).build()?;
            waiting.push(route(&channel, service.at)?.connect(&qp, &param)?);
            qps.push(qp);
            service.channel.dispatch()?;
        }
        let waiting =
            remaining(&service, waiting, |it| still_waits(it.wait(Some(Duration::ZERO))))?;
        // The kept requests are there, and taking them makes room again.
        for _ in 0..BACKLOG {
            drop(service.request()?);
        }
        assert_eq!((service.channel.leaked(), channel.leaked()), (0, 0));
        drop(waiting);
        connect(&channel, &service)?;
    }
    env::settles(&before)
}

fn datagram_requests_beyond_the_backlog_are_rejected() -> Verdict {
    let before = env::resources()?;
    {
        let (channel, service) = (channel()?, datagrams::listen()?);
        let first = datagrams::route(&channel, service.at)?;
        let side = Side::with(&first.context()?, QpType::UD)?;
        let param = ConnectParam::new();
        let mut waiting = vec![first.connect_datagrams(&side.qp, &param)?];
        for _ in 1..CLIENTS {
            let route = datagrams::route(&channel, service.at)?;
            waiting.push(route.connect_datagrams(&side.qp, &param)?);
            service.channel.dispatch()?;
        }
        let mut waiting =
            remaining(&service, waiting, |it| still_waits(it.wait(Some(Duration::ZERO))))?;
        let answering = Side::with(&service.context, QpType::UD)?;
        for _ in 0..BACKLOG {
            service.request()?.accept_datagrams(&answering.qp, &param)?;
        }
        for asking in waiting.drain(..) {
            assert_eq!(done(asking.wait(Some(PATIENCE))?)?.qpn(), answering.qp.qpn());
        }
        assert_eq!((service.channel.leaked(), channel.leaked()), (0, 0));
    }
    env::settles(&before)
}

/// A server meets such a request at any step, if clients have short timeouts.
fn request_of_a_client_that_gave_up_says_so() -> Verdict {
    let (channel, service) = (channel()?, Service::start(BACKLOG)?);
    let param = ConnectParam::new();
    for step in ["accept", "init_qp", "reject"] {
        let (_side, connecting) = ask(&channel, service.at, &param)?;
        let request = service.request()?;
        drop(connecting);
        let deadline = Instant::now() + PATIENCE;
        // The client's cancellation has to arrive: until then the calls succeed.
        let side = Side::of(&request.context()?)?;
        let noticed = loop {
            match request.init_qp(&side.qp) {
                Err(error) => break error,
                Ok(()) if Instant::now() > deadline => {
                    return Err(Stop::fail("the client's end did not arrive"));
                }
                Ok(()) => std::thread::sleep(Duration::from_millis(5)),
            }
        };
        let error = match step {
            "accept" => request.accept(&side.qp, &param).map(drop).unwrap_err(),
            "reject" => request.reject(b"too late").unwrap_err(),
            _ => noticed,
        };
        assert_eq!(error.errno(), Errno::CONNABORTED, "{step}: {error}");
        assert!(error.message().contains("the peer gave up"), "{step}: {error}");
    }
    Ok(())
}
