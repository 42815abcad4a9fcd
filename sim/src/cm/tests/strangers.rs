//! Messages from outside of the process: requests that do not fit their sender, floods, and noise.

use super::super::connections::MAX_CONNECTIONS;
use super::super::message::{Body, Gid, Message, Service, Terms, Transport};
use super::super::wire::Refused;
use super::super::{Address, CmFileId, Manager, Ports, SPACE_UDP, id};
use super::{A, B, SERVICE, bytes, message, side};
use crate::driver::Driver;
use crate::faults::Rates;
use crate::interface::Interface;
use crate::kernel::Kernel;
use rustix::io::Errno;
use std::net::IpAddr;
use uverbs_connectx::options::Options;
use uverbs_roce::cm::MAD;
use uverbs_uapi::port::ib_mtu;

/// A kernel whose one device has address B, and a way out.
struct Host {
    kernel: Kernel,
    file: CmFileId,
    _fd: rustix::fd::OwnedFd,
}

impl Host {
    fn new() -> Host {
        let mut kernel = Kernel::new(1, Rates::none());
        let options = Options { exposed: Some(crate::udp::random), ..Options::default() };
        let address = IpAddr::from(B).to_canonical();
        let interface = Interface::outside(address, ib_mtu::IB_MTU_1024.0);
        let driver = Driver::probe(&mut kernel.switch, options, "mlx5_0".into(), interface);
        kernel.drivers.push(driver.unwrap());
        let (file, fd) = kernel.cm.open().unwrap();
        Host { kernel, file, _fd: fd }
    }

    fn listen(&mut self, space: u16, kind: u8, backlog: u32) -> u32 {
        let Host { kernel, file, .. } = self;
        let number = kernel.cm.create(*file, 1, space, kind);
        let at = Address::new(IpAddr::from(B).to_canonical(), SERVICE.port + 1024);
        kernel.cm.bind(number, at, Ports(&kernel.drivers)).unwrap();
        kernel.cm.listen(number, backlog).unwrap();
        number
    }

    fn manager(&mut self) -> &mut Manager {
        &mut self.kernel.cm
    }

    fn receive(&mut self, (from, to): (Gid, Gid), mad: &[u8]) -> Result<(), Refused> {
        let Host { kernel, .. } = self;
        let from = Address::of_gid(&from, 0).ip;
        kernel.cm.receive(0, (from, to), mad, Ports(&kernel.drivers))
    }

    /// The messages that leave for address A.
    fn answers(&mut self) -> Vec<Message> {
        let Host { kernel, .. } = self;
        kernel.cm.run(0, Ports(&kernel.drivers), |_, _| false);
        let outgoing = kernel.cm.take_outgoing().into_iter();
        outgoing
            .filter(|mad| mad.to == Address::of_gid(&A, 0).ip)
            .map(|mad| message(&mad.mad, (B, A)))
            .collect()
    }

    /// The reason with which a request from A to B is refused.
    fn refused(&mut self, mad: &[u8; MAD]) -> u32 {
        let _ = self.receive((A, B), mad);
        let answers = self.answers();
        match &answers[..] {
            [Message { body: Body::Rej { reason, .. }, .. }] => *reason,
            [Message { body: Body::SidrRep { status, .. }, .. }] => *status,
            other => panic!("{other:?}"),
        }
    }
}

fn service(space: u16) -> Service {
    Service { space, port: SERVICE.port + 1024, source_port: SERVICE.source_port }
}

fn request(number: u32, mtu: u8) -> Message {
    let terms = Terms { mtu, traffic_class: 0, response_timeout: 20, retries: 15 };
    let (service, kind, side) = (service(SERVICE.space), Transport::Rc, side(number, b""));
    let body = Body::Req { service, kind, side, terms };
    Message { from: A, to: B, local: number, remote: 0, transaction: 1, body }
}

fn query(number: u32) -> Message {
    let body = Body::SidrReq { service: service(SPACE_UDP), private_data: Vec::new() };
    Message { body, ..request(number, 3) }
}

#[test]
fn a_request_that_does_not_fit_its_sender_is_refused() {
    let mut host = Host::new();
    host.listen(SERVICE.space, id::RC, 4);
    let sound = bytes(&request(5, 3));
    // Offsets of the GIDs of the path, and of the addresses in the private data.
    for at in [24 + 56 + 15, 24 + 72 + 15, 24 + 140 + 19, 24 + 140 + 35] {
        let mut mad = sound;
        mad[at] ^= 0x40;
        assert_eq!(host.refused(&mad), 12, "byte {at}");
    }
    // The version of IP, and of the addresses.
    for at in [24 + 140, 24 + 141] {
        let mut mad = sound;
        mad[at] ^= 0x10;
        assert_eq!(host.refused(&mad), 12, "byte {at}");
    }
    // 2048 bytes, where the port has 1024.
    assert_eq!(host.refused(&bytes(&request(5, 4))), 26);
    let mut mad = bytes(&query(6));
    mad[24 + 16 + 19] ^= 0x40;
    assert_eq!(host.refused(&mad), 2);
    // Our own address, and an address that is not ours.
    for (ends, sender) in [((B, B), "ours"), (([9; 16], A), "none of ours")] {
        assert_eq!(host.receive(ends, &sound), Err(Refused::Address), "{sender}");
    }
    assert_eq!(host.answers(), []);
    assert_eq!(host.manager().connections.len(), (0, 0));
    assert_eq!(host.receive((A, B), &sound), Ok(()));
    assert_eq!(host.manager().connections.len().0, 1);
}

#[test]
fn a_service_that_nobody_offers_is_refused() {
    let mut host = Host::new();
    host.listen(SERVICE.space, id::RC, 4);
    let mut other = bytes(&request(5, 3));
    other[24 + 8 + 7] ^= 1;
    assert_eq!(host.refused(&other), 8);
    // Not of rdma_cm: there are no addresses to look at.
    let mut foreign = bytes(&request(5, 3));
    foreign[24 + 8] = 0x10;
    foreign[24 + 140..].fill(0xff);
    assert_eq!(host.refused(&foreign), 8);
    let mut unreliable = request(5, 3);
    if let Body::Req { kind, .. } = &mut unreliable.body {
        *kind = Transport::Uc;
    }
    assert_eq!(host.refused(&bytes(&unreliable)), 28);
    assert_eq!(host.refused(&bytes(&query(6))), 1);
    assert_eq!(host.manager().connections.len(), (0, 0));
}

#[test]
fn a_flood_of_requests_takes_no_more_than_the_backlog() {
    const BACKLOG: u32 = 16;
    let mut host = Host::new();
    let listeners =
        [host.listen(SERVICE.space, id::RC, BACKLOG), host.listen(SPACE_UDP, id::UD, BACKLOG)];
    let (mut refused, flood) = (0, 2 * MAX_CONNECTIONS as u32 / 16);
    for number in 1..=flood {
        for message in [request(number, 3), query(number)] {
            host.receive((A, B), &bytes(&message)).unwrap();
            refused += host.answers().len() as u32;
        }
    }
    assert_eq!(refused, 2 * (flood - BACKLOG));
    let manager = host.manager();
    assert_eq!(manager.ids.len() as u32, 2 + 2 * BACKLOG);
    assert_eq!(manager.connections.len().0 as u32, 2 * BACKLOG);
    for listener in listeners {
        manager.destroy(0, listener);
    }
    assert_eq!((manager.ids.len(), manager.connections.len()), (0, (0, 0)));
    // Each that waited is told.
    assert_eq!(host.answers().len() as u32, 2 * BACKLOG);
}

/// Of the library one learns that before; another program asks the kernel.
#[test]
fn private_data_beyond_its_message_is_refused() {
    let mut host = Host::new();
    host.listen(SERVICE.space, id::RC, 4);
    host.listen(SPACE_UDP, id::UD, 4);
    let mut requests = 0..;
    let mut asked = |host: &mut Host, message: fn(u32) -> Message| {
        host.receive((A, B), &bytes(&message(requests.next().unwrap()))).unwrap();
        *host.manager().ids.keys().max().unwrap()
    };
    let connects: fn(u32) -> Message = |number| request(5 + number, 3);
    let queries: fn(u32) -> Message = |number| query(5 + number);
    for (message, most) in [(connects, 196), (queries, 136)] {
        let number = asked(&mut host, message);
        let much = Some((side(9, &vec![1; most + 1]), 0));
        assert_eq!(host.manager().accept(0, number, 1, much), Err(Errno::INVAL), "{most}");
        let answers = host.answers();
        let [Message { body, .. }] = &answers[..] else { panic!("{answers:?}") };
        let refused =
            matches!(body, Body::Rej { reason: 28, .. } | Body::SidrRep { status: 2, .. });
        assert!(refused, "{body:?}");
    }
    for (message, most) in [(connects, 148), (queries, 136)] {
        let number = asked(&mut host, message);
        let mut reject = |len| host.manager().reject(number, 28, vec![1; len]);
        assert_eq!((reject(most + 1), reject(most)), (Err(Errno::INVAL), Ok(())), "{most}");
        let answers = host.answers();
        let [Message { body, .. }] = &answers[..] else { panic!("{answers:?}") };
        let (Body::Rej { private_data, .. } | Body::SidrRep { private_data, .. }) = body else {
            panic!("{body:?}")
        };
        assert_eq!(*private_data, vec![1; most]);
    }
}

#[test]
fn noise_is_refused_or_answered_and_leaves_nothing() {
    let mut host = Host::new();
    host.listen(SERVICE.space, id::RC, 4);
    let mut state = 7u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 40) as u32
    };
    let mut taken = [0; 2];
    for round in 0..30_000u32 {
        let mut mad = [0; MAD];
        mad.fill_with(|| next() as u8);
        if round % 8 != 0 {
            mad[..8].copy_from_slice(&[1, 7, 2, 3, 0, 0, 0, 0]);
            mad[16..18].copy_from_slice(&[0, 0x10 + (next() % 12) as u8]);
            // Small numbers, of which some are in use.
            mad[24..28].copy_from_slice(&(next() % 16).to_be_bytes());
            mad[28..32].copy_from_slice(&(next() % 16).to_be_bytes());
        }
        if round % 5 == 0 {
            // A sound request, with some bytes changed.
            mad = bytes(&request(1 + next() % 16, 3));
            for _ in 0..next() % 3 {
                mad[next() as usize % MAD] = next() as u8;
            }
        }
        let length = if next() % 50 == 0 { next() as usize % MAD } else { MAD };
        taken[usize::from(host.receive((A, B), &mad[..length]).is_ok())] += 1;
        let answers = host.answers().len();
        assert!(answers <= 2, "{answers} answers to one datagram");
    }
    assert!(taken.iter().all(|count| *count > 1000), "{taken:?}");
    let manager = host.manager();
    assert!(manager.connections.len().0 <= 4 && manager.ids.len() <= 5);
}
