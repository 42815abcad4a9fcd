//! `uverbs cm rping`: the client announces memory, which the server reads by RDMA and writes back by RDMA.
//!
//! The messages are those of rdma-core's rping. An announcement is an address, a key and a length, in network byte
//! order. The client announces its text; the server reads it and answers. The client announces where the text is to
//! come back; the server writes it there and answers. The client closes the connection after the last text.

use super::link::{Heard, Link};
use super::{cannot_connect, cannot_listen, resolve};
use crate::args::RpingArgs;
use crate::failure::{self, Failure, Result};
use crate::output::outln;
use serde::Serialize;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};
use uverbs::cm::{ConnectParam, Connection, Connector, Listener, Progress};
use uverbs::{Access, Remote, Rkey, SendWr};

/// Bytes of the longest text, with its final zero.
pub(crate) const LONGEST: u32 = 64 * 1024 - 1;

pub(super) fn run(args: &RpingArgs) -> Result<()> {
    let report = if args.client { client(args)? } else { server(args)? };
    if args.json {
        failure::print(&report);
    } else {
        outln!("{report}");
    }
    Ok(())
}

/// An announcement of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Announcement {
    remote: Remote,
    length: u32,
}

impl Announcement {
    const LENGTH: usize = 16;

    fn to_bytes(self) -> [u8; Self::LENGTH] {
        let mut bytes = [0; Self::LENGTH];
        bytes[..8].copy_from_slice(&self.remote.addr.to_be_bytes());
        bytes[8..12].copy_from_slice(&self.remote.rkey.0.to_be_bytes());
        bytes[12..].copy_from_slice(&self.length.to_be_bytes());
        bytes
    }

    fn from_bytes(bytes: &[u8]) -> Result<Announcement> {
        let Ok(bytes) = <&[u8; Self::LENGTH]>::try_from(bytes) else {
            let length = bytes.len();
            return Err(Failure::peer(format!(
                "the peer sent {length} bytes in place of an announcement of {} bytes: is it an rping?",
                Self::LENGTH
            )));
        };
        let number = |range: std::ops::Range<usize>| {
            bytes[range].iter().fold(0, |number, byte| number << 8 | u64::from(*byte))
        };
        let remote = Remote { addr: number(0..8), rkey: Rkey(number(8..12) as u32) };
        Ok(Announcement { remote, length: number(12..16) as u32 })
    }
}

/// The `ping`-th text of a client, with a final zero.
fn text(ping: u64, size: usize) -> Vec<u8> {
    const LETTERS: std::ops::RangeInclusive<u8> = b'A'..=b'z';
    let letters = LETTERS.cycle().skip((ping % LETTERS.count() as u64) as usize);
    let mut text = format!("rdma-ping-{ping}: ").into_bytes();
    text.extend(letters.take(size.saturating_sub(text.len())));
    text.truncate(size.saturating_sub(1));
    text.push(0);
    text
}

/// A text up to its final zero, without control characters, which could move a terminal's cursor.
fn printable(bytes: &[u8]) -> String {
    let text = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
    let harmless = |c: char| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c };
    String::from_utf8_lossy(text).chars().map(harmless).collect()
}

fn client(args: &RpingArgs) -> Result<RpingReport> {
    let Some(host) = &args.address else {
        return Err(Failure::usage("a client needs the server's address: --address ADDRESS"));
    };
    let at = resolve(host, args.port)?;
    let (size, timeout) = (args.size as usize, Duration::from_secs(args.timeout));
    let mut connector = Connector::new(at)?.timeout(timeout);
    if let Some(source) = &args.source {
        connector = connector.source(resolve(source, 0)?);
    }
    let (mut link, connection) = connector
        .connect(|route| Link::new(&route.context()?, size.max(Announcement::LENGTH), timeout))
        .map_err(|error| cannot_connect(&error, at))?;
    let writable = link.pd.mr_builder().access(Access::LOCAL_WRITE | Access::REMOTE_WRITE);
    let back = writable.allocate::<u8>(size)?;
    let out_of_range = |error: uverbs::MemoryError| Failure::run(error.to_string());
    let returned =
        Announcement { remote: back.remote(0).map_err(out_of_range)?, length: args.size };
    let mut found = vec![0; size];
    let start = Instant::now();
    for ping in 0..args.count {
        let text = text(ping, size);
        let mut source = link.buffer()?;
        source.set_len(size);
        source.copy_from_slice(&text);
        let announced = Announcement { remote: source.remote(), length: args.size };
        for announcement in [announced, returned] {
            link.receive()?;
            let bytes = announcement.to_bytes();
            link.request(SendWr::send(&[]).inline(&bytes), (), &connection)?;
            if let Heard::End = link.hear(&connection)? {
                return Err(Failure::peer(format!("the server left after {ping} texts")));
            }
        }
        drop(source);
        back.copy_to(0, &mut found).map_err(out_of_range)?;
        if let Some(at) = (0..size).find(|at| found[*at] != text[*at]) {
            return Err(Failure::run(format!(
                "text {ping} came back wrong: byte {at} is {:#04x}, not {:#04x}",
                found[at], text[at]
            )));
        }
        args.say("ping data", &found);
    }
    let took = start.elapsed();
    let report = RpingReport::new("client", &connection, &link, args.count, args.size, took)?;
    connection.disconnect()?;
    connection.wait_disconnected(Some(timeout))?;
    Ok(report)
}

fn server(args: &RpingArgs) -> Result<RpingReport> {
    let at = match &args.address {
        Some(host) => resolve(host, args.port)?,
        None => SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), args.port),
    };
    let timeout = Duration::from_secs(args.timeout);
    let listener = Listener::bind(at).map_err(|error| cannot_listen(error, at.ip()))?;
    let wait = Duration::from_secs(args.wait);
    let Some(request) = listener.next_request(Some(wait))? else {
        return Err(Failure::peer(format!("no client came within {} s", args.wait))
            .advice("allow more time with --wait"));
    };
    let peer = request.peer_addr()?;
    let size = (args.size as usize).max(Announcement::LENGTH);
    let mut link = Link::new(&request.context()?, size, timeout)?;
    request.init_qp(&link)?;
    link.receive()?;
    let accepting = request.accept(&link, &ConnectParam::new())?;
    let connection = match accepting.wait(Some(timeout)) {
        Ok(Progress::Done(connection)) => connection,
        Ok(Progress::Pending(_)) => {
            return Err(Failure::peer(format!("{peer} did not complete the handshake in time")));
        }
        Err(error) => return Err(cannot_connect(&error, peer)),
    };
    let (start, mut pings) = (Instant::now(), 0);
    while let Some(source) = next_announcement(&mut link, &connection)? {
        let length = source.length as usize;
        if length > size {
            return Err(Failure::peer(format!(
                "the client announced a text of {length} bytes, and this server takes {size}"
            ))
            .advice("give both sides the same --size"));
        }
        let mut buffer = link.buffer()?;
        buffer.set_len(length);
        let lost = || Failure::run("a request lost its buffer");
        let text = link.request(SendWr::read(source.remote, &[]), buffer, &connection)?;
        let mut text = text.ok_or_else(lost)?;
        args.say("server ping data", &text);
        answer(&mut link, &connection)?;
        let Some(target) = next_announcement(&mut link, &connection)? else {
            return Err(Failure::peer("the client left before its text came back"));
        };
        text.set_len(length.min(target.length as usize));
        link.request(SendWr::write(target.remote, &[]), text, &connection)?;
        answer(&mut link, &connection)?;
        pings += 1;
    }
    let report = RpingReport::new("server", &connection, &link, pings, args.size, start.elapsed())?;
    connection.disconnect()?;
    Ok(report)
}

/// The client's next announcement; `None` if it closed the connection.
fn next_announcement(link: &mut Link, connection: &Connection) -> Result<Option<Announcement>> {
    match link.hear(connection)? {
        Heard::Message(message) => {
            let announcement = Announcement::from_bytes(&message)?;
            drop(message);
            link.receive()?;
            Ok(Some(announcement))
        }
        Heard::End => Ok(None),
    }
}

/// Tells the client to go on, or that its text is back: then it may leave. The content of the message does not matter.
fn answer(link: &mut Link, connection: &Connection) -> Result<()> {
    let bytes = Announcement { remote: Remote { addr: 0, rkey: Rkey(0) }, length: 0 }.to_bytes();
    link.send_last(&bytes, connection)
}

impl RpingArgs {
    fn say(&self, what: &str, text: &[u8]) {
        if self.verbose && !self.json {
            outln!("{what}: {}", printable(text));
        }
    }
}

/// A run that went well. The fields keep their names, types and units; new ones may be added.
#[derive(Clone, Debug, Serialize)]
struct RpingReport {
    program: &'static str,
    role: &'static str,
    local: String,
    peer: String,
    device: String,
    qpn: u32,
    peer_qpn: u32,
    size: u32,
    pings: u64,
    seconds: f64,
    usec_per_ping: f64,
}

impl RpingReport {
    fn new(
        role: &'static str,
        connection: &Connection,
        link: &Link,
        pings: u64,
        size: u32,
        took: Duration,
    ) -> Result<RpingReport> {
        let seconds = took.as_secs_f64();
        Ok(RpingReport {
            program: "rping",
            role,
            local: connection.local_addr()?.to_string(),
            peer: connection.peer_addr()?.to_string(),
            device: link.pd.context().device().name().to_owned(),
            qpn: link.qpn().0,
            peer_qpn: connection.peer_qpn().0,
            size,
            pings,
            seconds,
            usec_per_ping: seconds * 1e6 / pings.max(1) as f64,
        })
    }
}

impl fmt::Display for RpingReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RpingReport { local, peer, device, pings, seconds, usec_per_ping, .. } = self;
        writeln!(f, "{local} on {device}, connected with {peer}")?;
        write!(f, "{pings} pings in {seconds:.3} s: {usec_per_ping:.2} µs per ping")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn announcements_are_in_network_order() {
        let remote = Remote { addr: 0x0102_0304_0506_0708, rkey: Rkey(0x090a_0b0c) };
        let announcement = Announcement { remote, length: 0x0d0e_0f10 };
        let bytes = announcement.to_bytes();
        assert_eq!(bytes, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]);
        assert_eq!(Announcement::from_bytes(&bytes).unwrap(), announcement);
        let failure = Announcement::from_bytes(&bytes[1..]).unwrap_err();
        assert!(failure.to_string().contains("15 bytes"), "{failure}");
    }

    #[test]
    fn texts_are_those_of_rping() {
        assert_eq!(text(0, 20), b"rdma-ping-0: ABCDEF\0");
        assert_eq!(text(1, 20), b"rdma-ping-1: BCDEFG\0");
        assert_eq!(text(57, 20), b"rdma-ping-57: zABCD\0");
        assert_eq!(text(58, 20), b"rdma-ping-58: ABCDE\0");
        assert_eq!(text(1_000_000, 16), b"rdma-ping-10000\0");
        assert_eq!(text(3, 65_535).len(), 65_535);
    }

    #[test]
    fn control_characters_do_not_reach_a_terminal() {
        assert_eq!(printable(b"a\x1b[2Jb\xff\0c"), "a\u{fffd}[2Jb\u{fffd}");
    }
}
