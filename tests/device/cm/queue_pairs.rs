//! The queue pair of a handshake: its state, and the end of either of the two.

use super::{
    PATIENCE, Pair, SILENCE, Service, Side, address, ask, channel, connect, refused, route,
    route_of, send,
};
use crate::env;
use crate::verdict::{Stop, Verdict, trials};
use std::net::SocketAddr;
use uverbs::cm::{ConnectParam, PortSpace};
use uverbs::{QpState, QpType};

trials![
    dropping_an_accepting_id_stops_the_queue_pair,
    queue_pair_past_init_is_refused,
    handshake_fails_if_the_queue_pair_was_dropped,
    threads_that_wait_for_the_end_all_learn_of_it,
    id_that_is_moved_to_its_own_channel_keeps_its_events,
];

fn dropping_an_accepting_id_stops_the_queue_pair() -> Verdict {
    let (channel, service) = (channel()?, Service::start(4)?);
    let (_side, _connecting) = ask(&channel, service.at, &ConnectParam::new())?;
    let request = service.request()?;
    let side = Side::of(&request.context()?)?;
    drop(request.accept(&side.qp, &ConnectParam::new())?);
    assert_eq!(side.qp.state(), QpState::ERR);
    Ok(())
}

/// It may be of another connection, which goes on.
fn queue_pair_past_init_is_refused() -> Verdict {
    let (channel, service) = (channel()?, Service::start(4)?);
    let Pair { mut active, mut passive } = connect(&channel, &service)?;
    let route = route(&channel, service.at)?;
    let init = route.init_qp(&active.0.qp).unwrap_err();
    assert!(init.to_string().contains("RTS"), "{init}");
    let connect = route.connect(&active.0.qp, &ConnectParam::new()).unwrap_err();
    assert!(connect.to_string().contains("in state RTS"), "{connect}");
    assert!(service.id.next_request(Some(SILENCE))?.is_none(), "the peer got a request");
    let (_side, _connecting) = ask(&channel, service.at, &ConnectParam::new())?;
    let accept = service.request()?.accept(&passive.0.qp, &ConnectParam::new()).unwrap_err();
    assert!(accept.to_string().contains("in state RTS"), "{accept}");
    send(&mut active.0, &mut passive.0)
}

fn handshake_fails_if_the_queue_pair_was_dropped() -> Verdict {
    let (channel, service) = (channel()?, Service::start(4)?);
    let (side, connecting) = ask(&channel, service.at, &ConnectParam::new())?;
    drop(side);
    let request = service.request()?;
    let passive = Side::of(&request.context()?)?;
    let _accepting = request.accept(&passive.qp, &ConnectParam::new())?;
    let error = refused(connecting)?;
    assert!(error.to_string().contains("the queue pair was dropped"), "{error}");
    Ok(())
}

fn threads_that_wait_for_the_end_all_learn_of_it() -> Verdict {
    let (channel, service) = (channel()?, Service::start(4)?);
    let Pair { active, passive } = connect(&channel, &service)?;
    std::thread::scope(|scope| {
        let wait = || active.1.wait_disconnected(Some(PATIENCE));
        let waiting: Vec<_> = (0..3).map(|_| scope.spawn(wait)).collect();
        passive.1.disconnect()?;
        for thread in waiting {
            thread.join().map_err(|_| Stop::fail("a thread panicked"))??;
        }
        Ok(())
    })
}

fn id_that_is_moved_to_its_own_channel_keeps_its_events() -> Verdict {
    let (channel, service) = (channel()?, Service::start(4)?);
    let id = channel.create_id(PortSpace::TCP, QpType::RC)?.migrate(&channel)?;
    let from = SocketAddr::new(address(&env::device())?, 0);
    route_of(id, from, service.at).map(drop)
}
