//! The congestion window, seen from the network: what is under way, and what a loss changes.

use super::device::KEY;
use super::network::{Network, QPNS, attributes};
use crate::headers::{Aeth, Packet, Syndrome};
use crate::opcodes::{Kind, Operation, Transport};
use crate::{Counter, Dropped, Psn, Request, Work};
use std::vec;
use std::vec::Vec;
use uverbs_uapi::wc::ib_wc_status as Status;

const PACKETS: u32 = 400;
const BYTES: u32 = PACKETS * 256;
const FIRST: u32 = 100;

/// Plays one request of many packets, and loses one packet of a side. Returns the PSNs under way after each packet of
/// the requester, with whether a NAK has come.
fn play(work: Work, loses: Option<(usize, u32)>) -> Vec<(u32, bool)> {
    let mut network = Network::with(1, Transport::Rc, [0, 1].map(attributes), 4, true);
    network.keeps_trace = true;
    network.loses.extend(loses);
    network.devices.iter_mut().for_each(|device| device.memory = vec![5; BYTES as usize]);
    network.devices[0].local.insert(0, vec![5; BYTES as usize]);
    let (fence, solicited, datagram) = (false, false, None);
    let request = Request { id: 0, work, length: BYTES, fence, solicited, srq: 9, datagram };
    network.endpoints[0].post(QPNS[0], request).unwrap();
    network.run(0).unwrap();
    network.finish();
    assert_eq!(network.devices[0].completions.pop_front(), Some((0, Status::IB_WC_SUCCESS)));
    // Each window asked for its acknowledgement.
    let timeouts = network.devices[0].counted(Counter::Timeouts);
    assert_eq!(timeouts, 0);
    let (mut answered, mut nak, mut flights) = (Psn::new(FIRST), false, Vec::new());
    for (side, bytes) in &network.trace {
        let packet = Packet::parse(bytes).unwrap();
        let psn = packet.bth.psn();
        let refused = packet.aeth.and_then(Aeth::syndrome) == Some(Syndrome::SequenceError);
        match (side, packet.opcode.operation) {
            (0, Operation::ReadRequest) => {
                let psns = packet.reth.unwrap().length.get() / 256;
                flights.push((psn.plus(psns).since(answered), nak));
            }
            (0, _) => flights.push((psn.plus(1).since(answered), nak)),
            _ if refused => nak = true,
            (_, operation) => {
                assert_eq!(operation.kind(), Kind::Response);
                if !psn.is_before(answered) {
                    answered = psn.plus(1);
                }
            }
        }
    }
    flights
}

fn most(flights: &[(u32, bool)], nak: bool) -> u32 {
    flights.iter().filter(|flight| flight.1 == nak).map(|flight| flight.0).max().unwrap_or(0)
}

const WRITE: Work = Work::Write { address: 0, key: KEY, immediate: None };
const READ: Work = Work::Read { address: 0, key: KEY };

#[test]
fn a_write_begins_with_few_packets_and_has_more_under_way_with_each_acknowledgement() {
    let flights = play(WRITE, None);
    // The first packets leave before anything comes back.
    let first: Vec<u32> = flights.iter().take(16).map(|flight| flight.0).collect();
    assert_eq!(first, (1..=16).collect::<Vec<_>>());
    assert!(flights[16].0 <= 16, "the window was full: {:?}", flights[16]);
    assert!((64..=128).contains(&most(&flights, false)), "{}", most(&flights, false));
    assert_eq!(flights.len() as u32, PACKETS, "nothing is sent twice");
}

#[test]
fn a_loss_halves_what_is_sent_before_the_next_acknowledgement() {
    let flights = play(WRITE, Some((0, FIRST + 14)));
    let repeated = flights.iter().skip_while(|flight| !flight.1);
    // From the lost packet on, and one more under way with each.
    let again = repeated.skip_while(|flight| flight.0 != 1).zip(1..);
    let burst = again.take_while(|(flight, count)| flight.0 == *count).count() as u32;
    // The window was 16 and grew by the 14 packets in front of the loss, and by those of the first acknowledgement of
    // what came again.
    assert!((14..=18).contains(&burst), "{burst}");
}

#[test]
fn a_long_read_is_asked_for_in_parts_also_when_a_response_is_lost() {
    let flights = play(READ, None);
    assert_eq!(flights[0].0, 16);
    assert!(flights.len() > 4 && most(&flights, false) <= 128, "{flights:?}");
    let flights = play(READ, Some((1, FIRST + 30)));
    assert!(most(&flights, false) <= 128);
}

#[test]
fn a_unit_of_more_responses_than_were_asked_for_is_not_taken() {
    let mut network = Network::with(1, Transport::Rc, [0, 1].map(attributes), 4, true);
    network.devices.iter_mut().for_each(|device| {
        device.memory = vec![5; BYTES as usize];
        device.has_units = true;
    });
    network.devices[0].local.insert(0, vec![0; BYTES as usize]);
    let (fence, solicited, datagram) = (false, false, None);
    let request = Request { id: 0, work: READ, length: BYTES, fence, solicited, srq: 9, datagram };
    network.endpoints[0].post(QPNS[0], request).unwrap();
    let take = |network: &mut Network, side: usize, bytes: &[u8], packets| {
        let packet = Packet { packets, ..Packet::parse(bytes).unwrap() };
        let (endpoint, device) = (&mut network.endpoints[side], &mut network.devices[side]);
        endpoint.packet_for(0, device, QPNS[side], &(1 - side as u8), &packet)
    };
    let send = |network: &mut Network, side: usize| {
        let (endpoint, device) = (&mut network.endpoints[side], &mut network.devices[side]);
        endpoint.run(0, device, usize::MAX);
        std::mem::take(&mut device.sent)
    };
    let read = send(&mut network, 0).remove(0).1;
    take(&mut network, 1, &read, 1).unwrap();
    // The first one, 14 in the middle, and the last one of the part.
    let sent = send(&mut network, 1);
    assert_eq!(sent.iter().map(|sent| sent.2).collect::<Vec<_>>(), [1, 14, 1]);
    take(&mut network, 0, &sent[0].1, 1).unwrap();
    let middle = &sent[1].1;
    let headers = &middle[..middle.len() - 14 * 256];
    let more = [headers, &[6; 16 * 256]].concat();
    assert_eq!(take(&mut network, 0, &more, 16), Err(Dropped::Unit));
    assert!(!network.devices[0].local[&0].contains(&6));
    assert_eq!(take(&mut network, 0, middle, 14), Ok(()));
}
