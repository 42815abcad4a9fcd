//! A peer whose process is killed at a step of the handshake, or afterwards.

use super::{PATIENCE, Service, Side, ask, channel, connect, done, refused};
use crate::env;
use crate::fork::spawn;
use crate::verdict::{Stop, Verdict, trials};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::Pid;
use std::fs::File;
use std::io::{Read, Write};
use std::net::SocketAddr;
use std::time::Duration;
use uverbs::QpState;
use uverbs::cm::ConnectParam;

trials![
    client_is_killed_before_the_answer,
    client_is_killed_after_the_answer,
    client_is_killed_when_connected,
    server_is_killed_with_a_request_in_its_queue,
    server_is_killed_with_a_request_in_its_hands,
    server_is_killed_when_connected,
];

/// A process that goes through some steps, reports each by two bytes, and then waits to be killed.
struct Doomed {
    pid: Pid,
    reports: File,
}

/// Keeps the objects of a process until it is killed.
fn wait_to_be_killed<T>(_objects: &T) -> ! {
    loop {
        std::thread::sleep(Duration::from_secs(1));
    }
}

fn report(to: &mut File, number: u16) -> Verdict {
    Ok(to.write_all(&number.to_le_bytes())?)
}

impl Doomed {
    fn start(steps: impl FnOnce(&mut File) -> Verdict) -> Verdict<Doomed> {
        let (reports, to) = rustix::pipe::pipe()?;
        let (reports, mut to) = (File::from(reports), File::from(to));
        let pid = spawn(move || steps(&mut to))?;
        Ok(Doomed { pid, reports })
    }

    /// Waits for the next report.
    fn reported(&mut self) -> Verdict<u16> {
        let mut bytes = [0; 2];
        self.reports.read_exact(&mut bytes)?;
        Ok(u16::from_le_bytes(bytes))
    }

    fn kill(self) -> Verdict {
        kill(self.pid, Signal::SIGKILL)?;
        match waitpid(self.pid, None)? {
            WaitStatus::Signaled(_, Signal::SIGKILL, _) => Ok(()),
            other => Err(Stop::fail(format!("the process ended as {other:?}"))),
        }
    }
}

/// A client that completes the handshake if it `confirms`, and otherwise never reads the answer.
fn client(at: SocketAddr, confirms: bool) -> Verdict<Doomed> {
    let mut client = Doomed::start(move |to| {
        let channel = channel()?;
        let (side, connecting) = ask(&channel, at, &ConnectParam::new())?;
        report(to, 0)?;
        if !confirms {
            wait_to_be_killed(&(side, connecting));
        }
        let connection = done(connecting.wait(Some(PATIENCE))?)?;
        report(to, 0)?;
        wait_to_be_killed(&(side, connection))
    })?;
    client.reported()?;
    Ok(client)
}

fn client_is_killed_before_the_answer() -> Verdict {
    env::processes()?;
    let before = env::resources()?;
    let service = Service::start(4)?;
    let client = client(service.at, false)?;
    let request = service.request()?;
    client.kill()?;
    let side = Side::of(&request.context()?)?;
    if let Ok(accepting) = request.accept(&side.qp, &ConnectParam::new()) {
        accepting.wait(Some(PATIENCE)).unwrap_err();
    }
    assert_ne!(side.qp.state(), QpState::RTS);
    drop(side);
    connect(&channel()?, &service)?;
    drop(service);
    env::settles(&before)
}

fn client_is_killed_after_the_answer() -> Verdict {
    env::processes()?;
    let service = Service::start(4)?;
    let client = client(service.at, false)?;
    let request = service.request()?;
    let side = Side::of(&request.context()?)?;
    let accepting = request.accept(&side.qp, &ConnectParam::new())?;
    client.kill()?;
    accepting.wait(Some(PATIENCE)).unwrap_err();
    assert_eq!(side.qp.state(), QpState::ERR);
    connect(&channel()?, &service)?;
    Ok(())
}

fn client_is_killed_when_connected() -> Verdict {
    env::processes()?;
    let service = Service::start(4)?;
    let mut client = client(service.at, true)?;
    let request = service.request()?;
    let side = Side::of(&request.context()?)?;
    let connection = done(request.accept(&side.qp, &ConnectParam::new())?.wait(Some(PATIENCE))?)?;
    client.reported()?;
    client.kill()?;
    connection.wait_disconnected(Some(PATIENCE)).map_err(Into::into)
}

/// A server's reaction to a request.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Answer {
    /// The request stays in the kernel's queue.
    Unread,
    /// The program has the request, and neither accepts nor rejects it.
    None,
    Accept,
}

/// A server and its address.
fn server(answer: Answer) -> Verdict<(Doomed, SocketAddr)> {
    let ip = super::address(&super::passive()?)?;
    let mut server = Doomed::start(move |to| {
        let service = Service::start(4)?;
        report(to, service.at.port())?;
        if answer == Answer::Unread {
            wait_to_be_killed(&service);
        }
        let request = service.request()?;
        report(to, 0)?;
        if answer == Answer::None {
            wait_to_be_killed(&(service, request));
        }
        let side = Side::of(&request.context()?)?;
        let connection =
            done(request.accept(&side.qp, &ConnectParam::new())?.wait(Some(PATIENCE))?)?;
        report(to, 0)?;
        wait_to_be_killed(&(service, side, connection))
    })?;
    let port = server.reported()?;
    Ok((server, SocketAddr::new(ip, port)))
}

fn server_is_killed_with_a_request_in_its_queue() -> Verdict {
    env::processes()?;
    let (server, at) = server(Answer::Unread)?;
    let (side, connecting) = ask(&channel()?, at, &ConnectParam::new())?;
    server.kill()?;
    let error = refused(connecting)?;
    assert!(error.rejection().is_some(), "{error}");
    assert_eq!(side.qp.state(), QpState::INIT);
    Ok(())
}

fn server_is_killed_with_a_request_in_its_hands() -> Verdict {
    env::processes()?;
    let (mut server, at) = server(Answer::None)?;
    let (side, connecting) = ask(&channel()?, at, &ConnectParam::new())?;
    server.reported()?;
    server.kill()?;
    let error = refused(connecting)?;
    assert!(error.rejection().is_some(), "{error}");
    assert_eq!(side.qp.state(), QpState::INIT);
    Ok(())
}

fn server_is_killed_when_connected() -> Verdict {
    env::processes()?;
    let (mut server, at) = server(Answer::Accept)?;
    let (side, connecting) = ask(&channel()?, at, &ConnectParam::new())?;
    let connection = done(connecting.wait(Some(PATIENCE))?)?;
    server.reported()?;
    server.reported()?;
    server.kill()?;
    connection.wait_disconnected(Some(PATIENCE))?;
    drop(connection);
    assert_eq!(side.qp.query()?.state, QpState::ERR);
    Ok(())
}
