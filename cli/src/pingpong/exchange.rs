//! The exchange of addresses over TCP, in the protocol of rdma-core's ping-pong programs: the client sends the
//! addresses of its queue pairs, the server connects to them and answers with its own, and the client sends "done".
//!
//! Those programs then close the TCP connection. This one keeps its end until the run is over, so that a peer of the
//! same kind can wait for it before it destroys its queue pairs.

use super::address::{Address, LENGTH};
use crate::failure::{Failure, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::thread;
use std::time::{Duration, Instant};

/// The number of addresses that the srq programs send, regardless of how many they use.
pub(crate) const SRQ_ADDRESSES: usize = 256;

const DONE: &[u8; 5] = b"done\0";

/// The longest wait at the end for a peer that keeps its connection.
const FAREWELL: Duration = Duration::from_secs(2);

/// The connection to the peer.
#[derive(Debug)]
pub(crate) struct Exchange {
    stream: TcpStream,
    peer: SocketAddr,
    timeout: Duration,
}

/// Listens on all local addresses.
pub(crate) fn listen(port: u16) -> Result<TcpListener> {
    // A host without IPv6 has no unspecified address of that family.
    let listener =
        TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)).or_else(|error| match error.kind() {
            io::ErrorKind::AddrInUse | io::ErrorKind::PermissionDenied => Err(error),
            _ => TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)),
        });
    listener.map_err(|error| {
        let failure = Failure::peer(format!("cannot listen on TCP port {port}: {error}"));
        match error.kind() {
            io::ErrorKind::AddrInUse => {
                failure.advice("another server runs already; choose another --port on both sides")
            }
            io::ErrorKind::PermissionDenied => {
                failure.advice("ports below 1024 are for root; choose another --port")
            }
            _ => failure,
        }
    })
}

/// Waits for a client.
pub(crate) fn accept(
    listener: &TcpListener,
    wait: Duration,
    timeout: Duration,
) -> Result<Exchange> {
    let failed = |error: io::Error| Failure::peer(format!("cannot accept a client: {error}"));
    listener.set_nonblocking(true).map_err(failed)?;
    let deadline = Instant::now() + wait;
    loop {
        match listener.accept() {
            Ok((stream, peer)) => {
                stream.set_nonblocking(false).map_err(failed)?;
                // A listener for both families shows IPv4 addresses as IPv4-mapped IPv6.
                let peer = SocketAddr::new(peer.ip().to_canonical(), peer.port());
                return Ok(Exchange { stream, peer, timeout });
            }
            Err(error) => match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::ConnectionAborted => {}
                io::ErrorKind::Interrupted => continue,
                _ => return Err(failed(error)),
            },
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Failure::peer(format!("no client came within {} s", wait.as_secs()))
                .advice("start the client with the name of this host, or --wait longer"));
        }
        let mut fds = [PollFd::new(listener, PollFlags::IN)];
        match poll(&mut fds, Timespec::try_from(left).ok().as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(failed(errno.into())),
        }
    }
}

/// Connects to a server. While no server listens, tries again for at most `wait`.
pub(crate) fn connect(
    host: &str,
    port: u16,
    wait: Duration,
    timeout: Duration,
) -> Result<Exchange> {
    let deadline = Instant::now() + wait;
    let addresses: Vec<SocketAddr> = (host, port)
        .to_socket_addrs()
        .map_err(|error| {
            Failure::peer(format!("host name {host:?} is not known: {error}"))
                .advice("give an address in place of a name")
        })?
        .collect();
    loop {
        let mut failures = Vec::new();
        let mut refused = false;
        for &peer in &addresses {
            match TcpStream::connect_timeout(&peer, timeout) {
                Ok(stream) => return Ok(Exchange { stream, peer, timeout }),
                Err(error) => {
                    refused |= error.kind() == io::ErrorKind::ConnectionRefused;
                    failures.push(format!("{peer}: {error}"));
                }
            }
        }
        if !refused || Instant::now() >= deadline {
            let message = format!("cannot connect to {host} ({})", failures.join("; "));
            return Err(Failure::peer(message).advice(if refused {
                "nobody listens there: start the server first, with the same --port, or give \
                 this side some seconds to --wait"
            } else {
                "check the address, the route and the firewall; the exchange uses TCP"
            }));
        }
        thread::sleep(Duration::from_millis(50));
    }
}

impl Exchange {
    pub(crate) fn peer(&self) -> SocketAddr {
        self.peer
    }

    /// The client's part; `connect` makes its queue pairs ready, once it knows the server's.
    pub(crate) fn as_client<T>(
        &mut self,
        local: &[Address],
        connect: impl FnOnce(&[Address]) -> Result<T>,
    ) -> Result<T> {
        let deadline = Instant::now() + self.timeout;
        self.send(local)?;
        let remote = self.receive(local.len(), deadline)?;
        let connected = connect(&remote)?;
        self.write(DONE)?;
        Ok(connected)
    }

    /// The server's part; `connect` makes its queue pairs ready for the client's messages.
    pub(crate) fn as_server<T>(
        &mut self,
        local: &[Address],
        connect: impl FnOnce(&[Address]) -> Result<T>,
    ) -> Result<T> {
        let deadline = Instant::now() + self.timeout;
        let remote = self.receive(local.len(), deadline)?;
        let connected = connect(&remote)?;
        self.send(local)?;
        let mut done = [0; DONE.len()];
        self.read(&mut done, Instant::now() + self.timeout, "\"done\"")?;
        if done != *DONE {
            let message =
                format!("{} said \"{}\" where \"done\" was due", self.peer, done.escape_ascii());
            return Err(Failure::peer(message).advice(SAME_KIND));
        }
        Ok(connected)
    }

    /// Waits until the peer is done, too, or two seconds for a peer that does not report it.
    ///
    /// A destroyed queue pair acknowledges nothing, and the peer's last message may still be on its way to it.
    pub(crate) fn finish(mut self) {
        let deadline = Instant::now() + FAREWELL.min(self.timeout);
        // A peer that has closed its end is done.
        let _ = self.stream.shutdown(Shutdown::Write);
        let mut rest = [0; 64];
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || self.stream.set_read_timeout(Some(left)).is_err() {
                return;
            }
            match self.stream.read(&mut rest) {
                Ok(0) | Err(_) => return,
                Ok(_) => {}
            }
        }
    }

    fn send(&mut self, addresses: &[Address]) -> Result<()> {
        let bytes: Vec<u8> = addresses.iter().flat_map(|address| address.to_wire()).collect();
        self.write(&bytes)
    }

    /// Takes all addresses that are there at each read. A read for each of 256 took over a thousand system calls on
    /// both sides together, and a traced program stops twice at each.
    fn receive(&mut self, count: usize, deadline: Instant) -> Result<Vec<Address>> {
        let mut wire = vec![0; count * LENGTH];
        let mut filled = 0;
        let mut addresses = Vec::with_capacity(count);
        while addresses.len() < count {
            let whole = addresses.len() * LENGTH;
            let what = format!("address {} of {count}", addresses.len() + 1);
            filled += self.take(&mut wire[filled..], deadline, [filled - whole, LENGTH], &what)?;
            for bytes in wire[whole..filled].chunks_exact(LENGTH) {
                let number = addresses.len() + 1;
                let mut one = [0; LENGTH];
                one.copy_from_slice(bytes);
                let address = Address::from_wire(&one).map_err(|malformed| {
                    let peer = self.peer;
                    let message =
                        format!("{peer} sent as address {number} of {count}: {malformed}");
                    Failure::peer(message).advice(SAME_KIND)
                })?;
                addresses.push(address);
            }
        }
        Ok(addresses)
    }

    /// Sends bytes as they are.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.stream
            .set_write_timeout(Some(self.timeout))
            .and_then(|()| self.stream.write_all(bytes))
            .map_err(|error| match error.kind() {
                io::ErrorKind::WouldBlock => self.silent("did not take the local address"),
                _ => self.broken(&error),
            })
    }

    /// Receives exactly so many bytes; `what` names the expected message.
    pub(crate) fn read(&mut self, bytes: &mut [u8], deadline: Instant, what: &str) -> Result<()> {
        let length = bytes.len();
        let mut filled = 0;
        while filled < length {
            filled += self.take(&mut bytes[filled..], deadline, [filled, length], what)?;
        }
        Ok(())
    }

    /// Receives at least one byte. Of the expected message, `what`, `got` of `length` bytes came before.
    fn take(
        &mut self,
        bytes: &mut [u8],
        deadline: Instant,
        [got, length]: [usize; 2],
        what: &str,
    ) -> Result<usize> {
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(self.silent(&format!("did not send {what}")));
            }
            self.stream.set_read_timeout(Some(left)).map_err(|error| self.broken(&error))?;
            match self.stream.read(bytes) {
                Ok(0) => {
                    let message = format!(
                        "{} closed the connection after {got} of {length} bytes of {what}",
                        self.peer
                    );
                    return Err(Failure::peer(message).advice(
                        "read the other side's output; both must run the same kind, and over \
                         Ethernet rdma-core's programs need -g with the index of a GID",
                    ));
                }
                Ok(count) => return Ok(count),
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => {}
                    _ => return Err(self.broken(&error)),
                },
            }
        }
    }

    fn silent(&self, what: &str) -> Failure {
        let message = format!("{} {what} within {} s", self.peer, self.timeout.as_secs());
        Failure::peer(message).advice(SAME_KIND)
    }

    fn broken(&self, error: &io::Error) -> Failure {
        Failure::peer(format!("the connection to {} broke: {error}", self.peer))
            .advice("read the other side's output")
    }
}

const SAME_KIND: &str = "make sure that the same kind of ping-pong listens there";

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread::JoinHandle;
    use uverbs::{Gid, Psn, Qpn};

    const SECOND: Duration = Duration::from_secs(1);

    fn address(seed: u32) -> Address {
        Address { lid: 1, qpn: Qpn(seed), psn: Psn(seed + 1), gid: Gid([seed as u8; 16]) }
    }

    /// A listener on a free port, and the port.
    fn listener() -> (TcpListener, u16) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        (listener, port)
    }

    /// A server that exchanges `count` addresses with any client.
    fn server(count: u32, timeout: Duration) -> (JoinHandle<Result<Vec<Address>>>, u16) {
        let (listener, port) = listener();
        let local: Vec<_> = (0..count).map(|seed| address(1000 + seed)).collect();
        let handle = thread::spawn(move || {
            accept(&listener, 5 * SECOND, timeout)?.as_server(&local, |remote| {
                assert_eq!(remote.len(), local.len());
                Ok(remote.to_vec())
            })
        });
        (handle, port)
    }

    fn status_and_text<T: std::fmt::Debug>(outcome: Result<T>) -> (u8, String) {
        let failure = outcome.unwrap_err();
        (failure.status(), failure.to_string())
    }

    #[test]
    fn both_sides_learn_all_addresses() {
        for count in [1, SRQ_ADDRESSES as u32] {
            let (server, port) = server(count, SECOND);
            let local: Vec<_> = (0..count).map(address).collect();
            let mut exchange = connect("127.0.0.1", port, SECOND, SECOND).unwrap();
            let remote = exchange.as_client(&local, |remote| Ok(remote.to_vec())).unwrap();
            assert_eq!(remote, (0..count).map(|n| address(1000 + n)).collect::<Vec<_>>());
            assert_eq!(server.join().unwrap().unwrap(), local);
        }
    }

    #[test]
    fn a_client_that_sends_pieces_is_understood() {
        let (server, port) = server(1, SECOND);
        let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
        stream.set_nodelay(true).unwrap();
        for piece in address(7).to_wire().chunks(9) {
            stream.write_all(piece).unwrap();
            thread::sleep(Duration::from_millis(5));
        }
        let mut answer = [0; LENGTH];
        stream.read_exact(&mut answer).unwrap();
        assert_eq!(Address::from_wire(&answer), Ok(address(1000)));
        stream.write_all(DONE).unwrap();
        assert_eq!(server.join().unwrap().unwrap(), [address(7)]);
    }

    #[test]
    fn a_client_that_stops_among_many_addresses_is_told_at_which() {
        for (bytes, wanted) in [
            (184 * LENGTH + 20, "after 20 of 52 bytes of address 185 of 256"),
            (184 * LENGTH, "after 0 of 52 bytes of address 185 of 256"),
        ] {
            let (server, port) = server(256, 5 * SECOND);
            let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
            let wire: Vec<u8> = (0..256).flat_map(|seed| address(seed).to_wire()).collect();
            stream.write_all(&wire[..bytes]).unwrap();
            drop(stream);
            let (_, text) = status_and_text(server.join().unwrap());
            assert!(text.contains(wanted), "{text}");
        }
        let (server, port) = server(256, Duration::from_millis(200));
        let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
        let wire: Vec<u8> = (0..184).flat_map(|seed| address(seed).to_wire()).collect();
        stream.write_all(&wire).unwrap();
        let (_, text) = status_and_text(server.join().unwrap());
        assert!(text.contains("did not send address 185 of 256"), "{text}");
    }

    #[test]
    fn a_malformed_address_is_an_error_that_shows_it() {
        let (server, port) = server(1, SECOND);
        let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
        stream
            .write_all(b"GET / HTTP/1.1\r\nHost: example.org\r\nAccept: */*\r\n\r\n....")
            .unwrap();
        let (status, text) = status_and_text(server.join().unwrap());
        assert_eq!(status, 4);
        assert!(text.contains("GET / HTTP/1.1\\r\\n"), "{text}");
    }

    #[test]
    fn a_client_that_hangs_up_is_an_error_with_the_count() {
        let (server, port) = server(1, SECOND);
        let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
        stream.write_all(b"0000:0000").unwrap();
        drop(stream);
        let (status, text) = status_and_text(server.join().unwrap());
        assert_eq!(status, 4);
        assert!(text.contains("after 9 of 52 bytes of address 1 of 1"), "{text}");
    }

    #[test]
    fn a_silent_client_is_an_error_in_time() {
        let (server, port) = server(1, Duration::from_millis(100));
        let _stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
        let (status, text) = status_and_text(server.join().unwrap());
        assert_eq!(status, 4);
        assert!(text.contains("did not send address 1 of 1"), "{text}");
    }

    #[test]
    fn a_client_that_is_not_done_is_an_error() {
        let (server, port) = server(1, SECOND);
        let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
        stream.write_all(&address(7).to_wire()).unwrap();
        stream.write_all(b"dune\0").unwrap();
        let (status, text) = status_and_text(server.join().unwrap());
        assert_eq!(status, 4);
        assert!(text.contains("dune"), "{text}");
    }

    #[test]
    fn a_server_whose_queue_pairs_do_not_connect_answers_nothing() {
        let (listener, port) = listener();
        let server = thread::spawn(move || {
            accept(&listener, SECOND, SECOND)?
                .as_server(&[address(1)], |_| Err::<(), _>(Failure::device("no route")))
        });
        let mut exchange = connect("localhost", port, SECOND, SECOND).unwrap();
        let (status, text) = status_and_text(exchange.as_client(&[address(2)], |_| Ok(())));
        assert_eq!(status, 4);
        assert!(text.contains("closed the connection after 0 of 52 bytes"), "{text}");
        assert_eq!(server.join().unwrap().unwrap_err().status(), 3);
    }

    #[test]
    fn error_without_a_server_has_a_remedy() {
        let (listener, port) = listener();
        drop(listener);
        let (status, text) = status_and_text(connect("127.0.0.1", port, Duration::ZERO, SECOND));
        assert_eq!(status, 4);
        assert!(text.contains("start the server first"), "{text}");
    }

    #[test]
    fn a_client_waits_for_its_server() {
        let (listener, port) = listener();
        drop(listener);
        let late = thread::spawn(move || {
            thread::sleep(Duration::from_millis(150));
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).unwrap();
            accept(&listener, SECOND, SECOND).map(drop)
        });
        assert!(connect("127.0.0.1", port, 5 * SECOND, SECOND).is_ok());
        late.join().unwrap().unwrap();
    }

    #[test]
    fn no_client_is_an_error_in_time() {
        let (listener, _) = listener();
        let (status, text) = status_and_text(accept(&listener, Duration::from_millis(50), SECOND));
        assert_eq!(status, 4);
        assert!(text.contains("no client came"), "{text}");
    }

    #[test]
    fn a_port_in_use_is_an_error_with_advice() {
        let taken = TcpListener::bind((Ipv6Addr::UNSPECIFIED, 0))
            .or_else(|_| TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)))
            .unwrap();
        let (status, text) = status_and_text(listen(taken.local_addr().unwrap().port()));
        assert_eq!(status, 4);
        assert!(text.contains("--port"), "{text}");
    }

    #[test]
    fn the_end_waits_for_the_peer() {
        let (listener, port) = listener();
        let peer = thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            thread::sleep(Duration::from_millis(200));
            drop(stream);
        });
        let exchange = connect("127.0.0.1", port, SECOND, SECOND).unwrap();
        let start = Instant::now();
        exchange.finish();
        assert!(start.elapsed() >= Duration::from_millis(150));
        peer.join().unwrap();
    }
}
