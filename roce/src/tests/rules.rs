//! One rule at a time, on a network that does what the test says.

use super::device::{Device, KEY};
use super::network::{Faults, Network, QPNS, attributes};
use crate::headers::{Aeth, Packet, Syndrome};
use crate::opcodes::{Operation, Transport};
use crate::timers::{ack_timeout, rnr_timer};
use crate::{
    Atomic, Attributes, Counter, Datagram, Dropped, Endpoint, Event, MAX_MESSAGE, Mtu, NotPosted,
    Psn, Refusal, Request, State, Work,
};
use std::vec;
use std::vec::Vec;
use uverbs_uapi::mr::ib_uverbs_access_flags;
use uverbs_uapi::wc::ib_wc_status as Status;

const SEND: Work = Work::Send { immediate: None };
const WRITE: Work = Work::Write { address: 0, key: KEY, immediate: None };
const READ: Work = Work::Read { address: 0, key: KEY };
const LOST: Faults = Faults { lost: 1000, ..Faults::NONE };

/// A network without faults between two sides with 4 KiB of memory each.
fn network(transport: Transport, change: impl Fn(usize, &mut Attributes<u8>)) -> Network {
    let attributes = [0, 1].map(|side| {
        let mut attributes = attributes(side);
        change(side, &mut attributes);
        attributes
    });
    let mut network = Network::new(1, transport, attributes, 300);
    network.keeps_trace = true;
    network.devices.iter_mut().for_each(|device| device.memory = vec![0; 4096]);
    network
}

fn rc() -> Network {
    network(Transport::Rc, |_, _| {})
}

fn request(id: u64, work: Work, length: u32) -> Request<u8> {
    Request { id, work, length, fence: false, solicited: false, srq: 9, datagram: None }
}

fn post(network: &mut Network, id: u64, work: Work, length: u32) {
    network.devices[0].local.insert(id, vec![id as u8 + 1; length.min(4096) as usize]);
    network.endpoints[0].post(QPNS[0], request(id, work, length)).unwrap();
}

fn statuses(network: &mut Network) -> Vec<Status> {
    let done = network.devices[0].completions.drain(..).enumerate();
    done.map(|(at, (id, status))| {
        assert_eq!(id, at as u64);
        status
    })
    .collect()
}

fn counted(network: &Network, side: usize, counter: Counter) -> u32 {
    network.devices[side].counted(counter)
}

fn state(network: &Network, side: usize) -> State {
    network.endpoints[side].state(QPNS[side]).unwrap()
}

/// The operations that a side has sent.
fn operations(network: &Network, side: usize) -> Vec<Operation> {
    let sent = network.trace.iter().filter(|(from, _)| *from == side);
    sent.map(|(_, packet)| Packet::parse(packet).unwrap().opcode.operation).collect()
}

/// The syndromes that a side has sent.
fn syndromes(network: &Network, side: usize) -> Vec<Syndrome> {
    let sent = network.trace.iter().filter(|(from, _)| *from == side);
    sent.filter_map(|(_, packet)| Packet::parse(packet).unwrap().aeth?.syndrome()).collect()
}

/// Takes the packets that a side has to send, and gives them to nobody.
fn packets(network: &mut Network, side: usize) -> Vec<Vec<u8>> {
    let (endpoint, device) = (&mut network.endpoints[side], &mut network.devices[side]);
    assert!(!endpoint.run(network.now, device, usize::MAX).more);
    std::mem::take(&mut device.sent).into_iter().map(|(_, packet, _)| packet).collect()
}

fn give(network: &mut Network, side: usize, packet: &[u8]) {
    let (endpoint, device) = (&mut network.endpoints[side], &mut network.devices[side]);
    endpoint.packet(network.now, device, &(1 - side as u8), packet).unwrap();
}

#[test]
fn a_request_without_a_response_fails_after_the_negotiated_retries_and_timeouts() {
    for retry_count in [0, 1, 7] {
        let mut network =
            network(Transport::Rc, |_, attributes| attributes.retry_count = retry_count);
        network.faults = LOST;
        post(&mut network, 0, WRITE, 8);
        post(&mut network, 1, SEND, 300);
        network.run(0).unwrap();
        network.finish();
        assert_eq!(
            statuses(&mut network),
            [Status::IB_WC_RETRY_EXC_ERR, Status::IB_WC_WR_FLUSH_ERR]
        );
        let sendings = u64::from(retry_count) + 1;
        assert_eq!(network.now, ack_timeout(5).unwrap() * sendings);
        assert_eq!(u64::from(network.sendings[0][&100].0), sendings);
        assert_eq!(counted(&network, 0, Counter::Timeouts), u32::from(retry_count) + 1);
        assert_eq!(state(&network, 0), State::Error);
        assert_eq!(network.devices[0].events, [Event::SendFailed]);
    }
}

#[test]
fn a_request_that_could_not_be_sent_again_has_used_no_retry() {
    let mut network = network(Transport::Rc, |_, attributes| attributes.retry_count = 1);
    post(&mut network, 0, WRITE, 8);
    assert_eq!(packets(&mut network, 0).len(), 1);
    // Others use up the turns of the device.
    for _ in 0..4 {
        network.now = network.endpoints[0].deadline().unwrap();
        network.endpoints[0].expire(network.now, &mut network.devices[0]);
    }
    assert_eq!(counted(&network, 0, Counter::Timeouts), 1);
    network.run(0).unwrap();
    network.finish();
    assert_eq!(statuses(&mut network), [Status::IB_WC_SUCCESS]);
}

#[test]
fn requests_are_sent_between_the_responses_to_a_long_read() {
    let mut network = network(Transport::Rc, |_, attributes| attributes.retry_count = 1);
    network.devices.iter_mut().for_each(|device| device.memory = vec![1; 1 << 16]);
    network.devices[1].local.insert(0, vec![0; 1 << 16]);
    network.endpoints[1].post(QPNS[1], request(0, READ, 1 << 16)).unwrap();
    let read = packets(&mut network, 1);
    post(&mut network, 0, WRITE, 8);
    let write = packets(&mut network, 0);
    give(&mut network, 1, &write[0]);
    // The ACK is lost, and the device sends one packet at a time.
    assert_eq!(packets(&mut network, 1).len(), 1);
    give(&mut network, 0, &read[0]);
    let mut turn = |now: u64, sent: &[u8]| {
        network.now += now;
        let run = network.endpoints[0].run(network.now, &mut network.devices[0], 1);
        assert_eq!((run.done, run.more), (1, true));
        std::mem::take(&mut network.devices[0].sent)[0].1 == sent
    };
    assert!(!turn(0, &write[0]));
    let timeout = ack_timeout(5).unwrap();
    let again = [timeout, 0, 0, 0].map(|time| turn(time, &write[0]));
    assert_eq!(again, [true, false, false, false]);
    // A local request might invalidate the key of the read: it waits for the end.
    post(&mut network, 1, Work::Local, 0);
    for _ in 0..8 {
        network.endpoints[0].run(network.now, &mut network.devices[0], 1);
    }
    assert!(network.devices[0].ran.is_empty() && network.devices[0].completions.is_empty());
    packets(&mut network, 0);
    assert_eq!(network.devices[0].ran, [1]);
}

#[test]
fn a_timeout_of_zero_waits_for_ever() {
    let mut network = network(Transport::Rc, |_, attributes| attributes.timeout = 0);
    network.faults = LOST;
    post(&mut network, 0, WRITE, 8);
    network.run(0).unwrap();
    network.finish();
    assert_eq!(network.endpoints[0].deadline(), None);
    assert_eq!(network.endpoints[0].pending(QPNS[0]), 1);
}

#[test]
fn a_receiver_that_is_not_ready_is_asked_again_as_often_as_negotiated() {
    for rnr_retry in [0, 3] {
        let mut network = network(Transport::Rc, |_, attributes| {
            attributes.rnr_retry = rnr_retry;
            attributes.min_rnr_timer = 12;
        });
        post(&mut network, 0, SEND, 8);
        network.run(0).unwrap();
        network.finish();
        assert_eq!(statuses(&mut network), [Status::IB_WC_RNR_RETRY_EXC_ERR]);
        let naks = usize::from(rnr_retry) + 1;
        assert_eq!(syndromes(&network, 1), vec![Syndrome::RnrNak(12); naks]);
        assert!(network.now > rnr_timer(12) * u64::from(rnr_retry));
        assert_eq!(counted(&network, 1, Counter::OutOfBuffer), naks as u32);
    }
}

#[test]
fn seven_rnr_retries_are_for_ever_and_seven_others_are_not() {
    let mut network = rc();
    post(&mut network, 0, SEND, 8);
    network.post_receives(1, 5_000_000, 1);
    network.run(0).unwrap();
    network.finish();
    assert_eq!(statuses(&mut network), [Status::IB_WC_SUCCESS]);
    assert!(counted(&network, 0, Counter::RnrNaks) > 100);
    assert_eq!(counted(&network, 0, Counter::Timeouts), 0);
}

#[test]
fn a_nak_completes_what_is_before_it_fails_its_request_and_flushes_the_rest() {
    let wrong = Work::Write { address: 0, key: KEY + 1, immediate: None };
    let odd = Work::Atomic { address: 4, key: KEY, change: Atomic::FetchAdd { add: 1 } };
    let invalid = Work::SendInvalidate { key: 0 };
    for (work, length, status, event) in [
        (wrong, 8, Status::IB_WC_REM_ACCESS_ERR, Event::Refused(Refusal::Access)),
        (
            Work::Read { address: 4090, key: KEY },
            8,
            Status::IB_WC_REM_ACCESS_ERR,
            Event::Refused(Refusal::Access),
        ),
        (odd, 8, Status::IB_WC_REM_INV_REQ_ERR, Event::Refused(Refusal::InvalidRequest)),
        (SEND, 9000, Status::IB_WC_REM_INV_REQ_ERR, Event::ReceiveFailed),
        (invalid, 8, Status::IB_WC_REM_ACCESS_ERR, Event::ReceiveFailed),
    ] {
        let mut network = rc();
        network.devices[1].post_receive();
        network.devices[0].local.insert(2, vec![1; 9000]);
        post(&mut network, 0, READ, 600);
        post(&mut network, 1, WRITE, 8);
        network.endpoints[0].post(QPNS[0], request(2, work, length)).unwrap();
        post(&mut network, 3, WRITE, 8);
        network.devices[0].local.insert(2, vec![1; 9000]);
        network.run(0).unwrap();
        network.finish();
        assert_eq!(
            statuses(&mut network),
            [Status::IB_WC_SUCCESS, Status::IB_WC_SUCCESS, status, Status::IB_WC_WR_FLUSH_ERR]
        );
        assert_eq!(network.devices[1].events, [event]);
        assert_eq!([state(&network, 0), state(&network, 1)], [State::Error; 2]);
    }
}

#[test]
fn the_queue_pair_allows_what_its_access_flags_say() {
    use ib_uverbs_access_flags as Access;
    let flush = |kind| Work::Flush { address: 0, key: KEY, kind, level: 1 };
    for (work, need) in [
        (WRITE, Access::IB_UVERBS_ACCESS_REMOTE_WRITE),
        (Work::AtomicWrite { address: 0, key: KEY }, Access::IB_UVERBS_ACCESS_REMOTE_WRITE),
        (READ, Access::IB_UVERBS_ACCESS_REMOTE_READ),
        (
            Work::Atomic { address: 0, key: KEY, change: Atomic::FetchAdd { add: 1 } },
            Access::IB_UVERBS_ACCESS_REMOTE_ATOMIC,
        ),
        (flush(1), Access::IB_UVERBS_ACCESS_FLUSH_GLOBAL),
        (flush(2), Access::IB_UVERBS_ACCESS_FLUSH_PERSISTENT),
    ] {
        for (access, status) in
            [(need, Status::IB_WC_SUCCESS), (Access::all() - need, Status::IB_WC_REM_INV_REQ_ERR)]
        {
            let mut network = network(Transport::Rc, |_, attributes| attributes.access = access);
            post(&mut network, 0, work, 8);
            network.run(0).unwrap();
            network.finish();
            assert_eq!(statuses(&mut network), [status], "{work:?} with {access:?}");
        }
    }
}

#[test]
fn a_missing_packet_is_named_by_one_nak_and_what_follows_is_sent_again() {
    let mut network = rc();
    post(&mut network, 0, WRITE, 5 * 256);
    let sent = packets(&mut network, 0);
    assert_eq!(sent.len(), 5);
    // The second one is lost.
    for at in [0, 2, 3, 4] {
        give(&mut network, 1, &sent[at]);
    }
    let naks = packets(&mut network, 1);
    assert_eq!(naks.len(), 1);
    let nak = Packet::parse(&naks[0]).unwrap();
    assert_eq!(nak.aeth.unwrap().syndrome(), Some(Syndrome::SequenceError));
    assert_eq!(nak.bth.psn(), Packet::parse(&sent[1]).unwrap().bth.psn());
    // A second NAK tells nothing new.
    give(&mut network, 0, &naks[0]);
    give(&mut network, 0, &naks[0]);
    assert_eq!(packets(&mut network, 0), sent[1..]);
    assert_eq!(counted(&network, 0, Counter::SequenceNaks), 2);
}

/// The next answers of a side: the PSN and the syndrome of each packet.
fn answers(network: &mut Network, side: usize) -> Vec<(u32, Syndrome)> {
    let sent = packets(network, side);
    let packet = |bytes: &Vec<u8>| {
        let packet = Packet::parse(bytes).unwrap();
        (packet.bth.psn().get(), packet.aeth.unwrap().syndrome().unwrap())
    };
    sent.iter().map(packet).collect()
}

/// A write of one packet, which asks for an ACK, and one of three, of which only the last does.
fn two_writes() -> (Network, Vec<Vec<u8>>) {
    let mut network = rc();
    post(&mut network, 0, WRITE, 8);
    post(&mut network, 1, WRITE, 600);
    let sent = packets(&mut network, 0);
    assert_eq!(sent.len(), 4);
    (network, sent)
}

#[test]
fn packets_that_come_together_in_another_order_are_acknowledged_or_asked_for() {
    let (mut network, sent) = two_writes();
    [0, 2, 1].iter().for_each(|at| give(&mut network, 1, &sent[*at]));
    let nak = packets(&mut network, 1).remove(0);
    give(&mut network, 0, &nak);
    assert_eq!(statuses(&mut network), [Status::IB_WC_SUCCESS]);
    assert_eq!(packets(&mut network, 0), sent[2..], "what was dropped is sent again");
    let (mut network, sent) = two_writes();
    [0, 2, 1].iter().for_each(|at| give(&mut network, 1, &sent[*at]));
    assert_eq!(answers(&mut network, 1), [(102, Syndrome::SequenceError)]);
    // The NAK was sent: it is no other one that comes of the same packets.
    give(&mut network, 1, &sent[2]);
    assert_eq!(answers(&mut network, 1), []);
    let (mut network, sent) = two_writes();
    [0, 2, 1, 2].iter().for_each(|at| give(&mut network, 1, &sent[*at]));
    assert_eq!(answers(&mut network, 1), [(102, Syndrome::Ack)], "nothing is missing");
}

#[test]
fn a_receive_that_comes_before_its_rnr_nak_is_sent_leaves_no_packet_unanswered() {
    for dropped in [true, false] {
        let mut network = rc();
        post(&mut network, 0, SEND, 8);
        post(&mut network, 1, WRITE, 8);
        let sent = packets(&mut network, 0);
        give(&mut network, 1, &sent[0]);
        if dropped {
            give(&mut network, 1, &sent[1]);
        }
        network.devices[1].post_receive();
        give(&mut network, 1, &sent[0]);
        let expected = if dropped { (101, Syndrome::SequenceError) } else { (100, Syndrome::Ack) };
        assert_eq!(answers(&mut network, 1), [expected]);
    }
}

#[test]
fn no_ack_names_a_request_that_has_a_response() {
    let mut network = rc();
    post(&mut network, 0, WRITE, 8);
    post(&mut network, 1, READ, 8);
    let sent = packets(&mut network, 0);
    sent.iter().for_each(|packet| give(&mut network, 1, packet));
    // Both answers are lost, and both requests come again.
    assert_eq!(packets(&mut network, 1).len(), 1);
    sent.iter().for_each(|packet| give(&mut network, 1, packet));
    assert_eq!(operations_of(&packets(&mut network, 1)), [(101, Operation::ReadResponseOnly)]);
    give(&mut network, 1, &sent[0]);
    assert_eq!(operations_of(&packets(&mut network, 1)), [(100, Operation::Acknowledge)]);
    // The read comes first, then what it follows, and then the read again.
    let mut network = rc();
    post(&mut network, 0, WRITE, 8);
    post(&mut network, 1, READ, 8);
    let sent = packets(&mut network, 0);
    [1, 0, 1].iter().for_each(|at| give(&mut network, 1, &sent[*at]));
    assert_eq!(operations_of(&packets(&mut network, 1)), [(101, Operation::ReadResponseOnly)]);
}

/// The PSN and the operation of each packet.
fn operations_of(packets: &[Vec<u8>]) -> Vec<(u32, Operation)> {
    let packet = |bytes: &Vec<u8>| {
        let packet = Packet::parse(bytes).unwrap();
        (packet.bth.psn().get(), packet.opcode.operation)
    };
    packets.iter().map(packet).collect()
}

/// A device gives the packets of each sending a fate of their own.
#[test]
fn a_device_is_told_when_a_request_begins_to_be_sent_and_sent_again() {
    let mut network = rc();
    post(&mut network, 0, SEND, 600);
    post(&mut network, 1, WRITE, 8);
    assert_eq!(packets(&mut network, 0).len(), 4);
    assert_eq!(network.devices[0].begun, [0, 1]);
    network.now = network.endpoints[0].deadline().unwrap();
    assert_eq!(packets(&mut network, 0).len(), 4);
    assert_eq!(network.devices[0].begun, [0, 1, 0, 1]);
}

#[test]
fn a_turn_ends_when_the_device_takes_no_more() {
    let mut network = rc();
    post(&mut network, 0, SEND, 600);
    network.devices[0].takes_one = true;
    for left in (0..3).rev() {
        let (endpoint, device) = (&mut network.endpoints[0], &mut network.devices[0]);
        assert_eq!((endpoint.ready(), endpoint.run_ready(0, device, 0)), (1, 1), "{left} left");
    }
    assert_eq!(packets(&mut network, 0).len(), 3);
    assert_eq!(network.endpoints[0].ready(), 0);
}

#[test]
fn the_first_psn_may_change_until_the_queue_pair_sends() {
    let mut network = rc();
    let mut set = |psn, state| {
        let (endpoint, device) = (&mut network.endpoints[0], &mut network.devices[0]);
        endpoint.modify(QPNS[0], |attributes| attributes.send_psn = Psn::new(psn));
        let before = endpoint.psns(QPNS[0]).unwrap().0.get();
        endpoint.move_to(device, QPNS[0], state);
        before
    };
    assert_eq!((set(7, State::Rtr), set(8, State::Rts), set(9, State::Rts)), (100, 8, 8));
}

#[test]
fn packets_that_come_together_get_one_ack() {
    let mut network = rc();
    (0..4).for_each(|id| post(&mut network, id, WRITE, 8));
    for packet in packets(&mut network, 0) {
        assert!(Packet::parse(&packet).unwrap().bth.requests_ack());
        give(&mut network, 1, &packet);
    }
    let acks = packets(&mut network, 1);
    let [ack] = &acks[..] else { panic!("{} ACKs", acks.len()) };
    let ack = *Packet::parse(ack).unwrap().aeth.unwrap();
    assert_eq!(ack, Aeth::new(Syndrome::Ack, 4));
    give(&mut network, 0, &acks[0]);
    assert_eq!(statuses(&mut network), [Status::IB_WC_SUCCESS; 4]);
    assert_eq!(network.endpoints[0].deadline(), None);
}

#[test]
fn a_message_that_is_longer_than_the_window_asks_for_acks_in_its_middle() {
    let mut network = rc();
    network.devices[0].memory = vec![0; 1 << 16];
    network.devices[1].memory = vec![0; 1 << 16];
    network.devices[0].local.insert(0, vec![3; 1 << 16]);
    network.endpoints[0].post(QPNS[0], request(0, WRITE, 1 << 16)).unwrap();
    let sent = packets(&mut network, 0);
    assert_eq!(sent.len(), 128);
    let asks: Vec<usize> =
        (0..128).filter(|at| Packet::parse(&sent[*at]).unwrap().bth.requests_ack()).collect();
    assert_eq!(asks, [63, 127]);
    sent.iter().for_each(|packet| give(&mut network, 1, packet));
    let acks = packets(&mut network, 1);
    give(&mut network, 0, &acks[0]);
    assert_eq!(packets(&mut network, 0).len(), 128);
}

#[test]
fn no_more_reads_wait_for_responses_than_negotiated() {
    let mut network = network(Transport::Rc, |_, attributes| attributes.max_rd_atomic = 2);
    (0..3).for_each(|id| post(&mut network, id, READ, 1000));
    post(&mut network, 3, WRITE, 8);
    network.run(0).unwrap();
    assert_eq!(operations(&network, 0), [Operation::ReadRequest; 2]);
    network.finish();
    assert_eq!(statuses(&mut network), [Status::IB_WC_SUCCESS; 4]);
    // A read of 1000 bytes takes four PSNs.
    assert!(network.sendings[0].keys().copied().eq(100..=112));
}

#[test]
fn a_response_that_is_missing_is_asked_for_again_and_no_other() {
    let mut network = rc();
    post(&mut network, 0, READ, 1000);
    let read = packets(&mut network, 0);
    give(&mut network, 1, &read[0]);
    let responses = packets(&mut network, 1);
    assert_eq!(responses.len(), 4);
    give(&mut network, 0, &responses[0]);
    give(&mut network, 0, &responses[2]);
    let again = packets(&mut network, 0);
    let reth = Packet::parse(&again[0]).unwrap().reth.unwrap();
    assert_eq!((reth.address.get(), reth.length.get()), (256, 744));
    give(&mut network, 1, &again[0]);
    let rest = packets(&mut network, 1);
    assert_eq!(rest.len(), 3);
    rest.iter().for_each(|packet| give(&mut network, 0, packet));
    assert_eq!(statuses(&mut network), [Status::IB_WC_SUCCESS]);
    assert_eq!(counted(&network, 0, Counter::ImpliedNaks), 1);
}

#[test]
fn a_local_request_completes_when_a_late_response_ends_the_repeated_read_before_it() {
    let mut network = rc();
    post(&mut network, 0, READ, 8);
    post(&mut network, 1, Work::Local, 0);
    let read = packets(&mut network, 0);
    give(&mut network, 1, &read[0]);
    let late = packets(&mut network, 1);
    network.now = network.endpoints[0].deadline().unwrap();
    // The read goes again, and the run ends before it comes to the local request, which was executed.
    let run = network.endpoints[0].run(network.now, &mut network.devices[0], 1);
    assert_eq!((run.done, run.more), (1, true));
    assert_eq!(network.devices[0].ran, [1]);
    give(&mut network, 0, &late[0]);
    assert_eq!(packets(&mut network, 0), read);
    assert_eq!(statuses(&mut network), [Status::IB_WC_SUCCESS; 2]);
    assert_eq!(network.devices[0].ran, [1]);
}

#[test]
fn a_duplicate_that_is_not_the_request_that_was_kept_is_dropped() {
    let mut network = rc();
    post(&mut network, 0, READ, 1000);
    let mut read = packets(&mut network, 0).remove(0);
    give(&mut network, 1, &read);
    assert_eq!(packets(&mut network, 1).len(), 4);
    // The lowest byte of the address.
    read[19] += 1;
    give(&mut network, 1, &read);
    assert!(packets(&mut network, 1).is_empty());
    assert_eq!(counted(&network, 1, Counter::Duplicates), 1);
}

#[test]
fn a_duplicate_read_may_be_of_less_than_the_first_one() {
    let mut network = rc();
    network.devices[1].memory = (0..4096).map(|at| (at >> 8) as u8 + 1).collect();
    post(&mut network, 0, READ, 1000);
    let whole = packets(&mut network, 0).remove(0);
    // The read of `length` bytes from packet `at` on.
    let part = |at: u8, length: u16| {
        let mut part = whole.clone();
        part[11] += at;
        part[18] += at;
        part[26..28].copy_from_slice(&length.to_be_bytes());
        part
    };
    give(&mut network, 1, &whole);
    assert_eq!(packets(&mut network, 1).len(), 4);
    let rest = (100..104).map(|psn| (psn, if psn == 103 { 232 } else { 256 }));
    for (at, length, expected) in [
        (1, 256, vec![(101, 256)]),
        (0, 300, vec![(100, 256), (101, 44)]),
        (2, 488, vec![(102, 256), (103, 232)]),
        (0, 1000, rest.collect()),
        // One byte more than was read, and none.
        (2, 489, vec![]),
        (2, 0, vec![]),
    ] {
        give(&mut network, 1, &part(at, length));
        let sent = packets(&mut network, 1);
        let responses = sent.iter().map(|bytes| Packet::parse(bytes).unwrap());
        let mut found = Vec::new();
        for response in responses {
            let psn = response.bth.psn().get();
            assert!(response.payload.iter().all(|byte| u32::from(*byte) == psn - 99), "{psn}");
            let ends = response.opcode.operation.position().ends();
            assert_eq!(ends, expected.last().map(|last| last.0) == Some(psn), "{psn}");
            found.push((psn, response.payload.len()));
        }
        assert_eq!(found, expected, "{length} bytes from packet {at} on");
    }
    // A response under way ends where it was to.
    give(&mut network, 1, &whole);
    give(&mut network, 1, &part(0, 256));
    assert_eq!(packets(&mut network, 1).len(), 4);
}

#[test]
fn a_duplicate_is_that_of_the_newest_request_with_its_psn() {
    let mut network = rc();
    let add = Work::Atomic { address: 0, key: KEY, change: Atomic::FetchAdd { add: 1 } };
    post(&mut network, 0, add, 8);
    let atomic = packets(&mut network, 0).remove(0);
    let mut old = |after_all_psns| {
        if after_all_psns {
            network.endpoints[1].expect(QPNS[1], Psn::new(100));
        }
        give(&mut network, 1, &atomic);
        let response = packets(&mut network, 1).remove(0);
        Packet::parse(&response).unwrap().atomicacketh.unwrap().old.get()
    };
    assert_eq!([old(false), old(true), old(false)], [0, 1, 1]);
}

#[test]
fn a_queue_pair_that_drains_ends_what_has_begun_and_begins_nothing() {
    let mut network = rc();
    post(&mut network, 0, READ, 8);
    network.run(0).unwrap();
    network.endpoints[0].move_to(&mut network.devices[0], QPNS[0], State::Sqd);
    post(&mut network, 1, WRITE, 8);
    network.run(0).unwrap();
    assert_eq!(network.devices[0].events, []);
    network.finish();
    assert_eq!(statuses(&mut network), [Status::IB_WC_SUCCESS]);
    assert_eq!(network.devices[0].events, [Event::SendQueueDrained]);
    network.endpoints[0].move_to(&mut network.devices[0], QPNS[0], State::Rts);
    network.run(0).unwrap();
    network.finish();
    assert_eq!(network.devices[0].completions, [(1, Status::IB_WC_SUCCESS)]);
}

#[test]
fn an_unreliable_queue_pair_that_cannot_send_goes_on_to_receive() {
    let mut network = network(Transport::Uc, |_, _| {});
    network.devices.iter_mut().for_each(Device::post_receive);
    network.endpoints[0].post(QPNS[0], request(0, SEND, 8)).unwrap();
    post(&mut network, 1, SEND, 8);
    network.run(0).unwrap();
    assert_eq!(statuses(&mut network), [Status::IB_WC_LOC_PROT_ERR, Status::IB_WC_WR_FLUSH_ERR]);
    assert_eq!(state(&network, 0), State::Sqe);
    let refused = network.endpoints[0].post(QPNS[0], request(2, SEND, 8));
    assert_eq!(refused, Err(NotPosted::State(State::Sqe)));
    network.devices[1].local.insert(0, vec![1; 8]);
    network.endpoints[1].post(QPNS[1], request(0, SEND, 8)).unwrap();
    network.run(1).unwrap();
    network.finish();
    assert_eq!(network.devices[0].received.len(), 1);
    network.endpoints[0].move_to(&mut network.devices[0], QPNS[0], State::Rts);
    post(&mut network, 0, SEND, 8);
    network.run(0).unwrap();
    network.finish();
    assert_eq!(network.devices[1].received.len(), 1);
}

#[test]
fn a_request_that_cannot_be_sent_fails_when_those_before_it_are_complete() {
    let local = |work, length| {
        let mut network = rc();
        post(&mut network, 0, READ, 8);
        network.endpoints[0].post(QPNS[0], request(1, work, length)).unwrap();
        network.run(0).unwrap();
        assert!(network.devices[0].completions.is_empty());
        network.finish();
        statuses(&mut network)
    };
    // Its memory cannot be read; it is too long; an atomic has four bytes or eight.
    assert_eq!(local(WRITE, 8), [Status::IB_WC_SUCCESS, Status::IB_WC_LOC_PROT_ERR]);
    assert_eq!(local(WRITE, MAX_MESSAGE + 1), [Status::IB_WC_SUCCESS, Status::IB_WC_LOC_LEN_ERR]);
    let add = Work::Atomic { address: 0, key: KEY, change: Atomic::FetchAdd { add: 1 } };
    assert_eq!(local(add, 5), [Status::IB_WC_SUCCESS, Status::IB_WC_LOC_LEN_ERR]);
}

#[test]
fn transports_refuse_what_they_do_not_have() {
    for (transport, work, datagram) in [
        (Transport::Uc, READ, false),
        (Transport::Uc, Work::SendInvalidate { key: 1 }, false),
        (Transport::Ud, WRITE, true),
        (Transport::Ud, SEND, false),
        (Transport::Rc, SEND, true),
    ] {
        let mut network = network(transport, |_, _| {});
        let datagram = datagram.then_some(Datagram { path: 1, destination: QPNS[1], qkey: 5 });
        let request = Request { datagram, ..request(0, work, 8) };
        network.endpoints[0].post(QPNS[0], request).unwrap();
        network.run(0).unwrap();
        assert_eq!(
            statuses(&mut network),
            [Status::IB_WC_LOC_QP_OP_ERR],
            "{work:?} over {transport:?}"
        );
    }
}

#[test]
fn atomics_with_masks_or_of_four_bytes_have_opcodes_of_their_own() {
    let masked = Atomic::MaskedCompareSwap {
        compare: 0xa0,
        compare_mask: 0xf0,
        swap: 0x0b,
        swap_mask: 0x0f,
    };
    let fields = Atomic::MaskedFetchAdd { add: 0x0101, boundary: 0x80 };
    let swap = Atomic::CompareSwap { compare: 0x1aa, swap: 7 };
    let (private, common) = (Operation::MaskedCompareSwap, Operation::CompareSwap);
    for (change, length, before, after, operation) in [
        (masked, 8, 0x1aa, 0x1ab, private),
        (masked, 4, 0x2bb, 0x2bb, private),
        (fields, 4, 0x01ff, 0x0200, Operation::MaskedFetchAdd),
        (swap, 4, 0x1aa, 7, private),
        (swap, 8, 0x1aa, 7, common),
    ] {
        let mut network = rc();
        let bytes = u64::to_be_bytes(before);
        network.devices[1].memory[..length as usize].copy_from_slice(&bytes[8 - length as usize..]);
        post(&mut network, 0, Work::Atomic { address: 0, key: KEY, change }, length);
        network.run(0).unwrap();
        network.finish();
        assert_eq!(statuses(&mut network), [Status::IB_WC_SUCCESS]);
        assert_eq!(operations(&network, 0), [operation]);
        assert_eq!(network.devices[0].olds[&0], before);
        let memory = &network.devices[1].memory[..length as usize];
        assert_eq!(memory, &u64::to_be_bytes(after)[8 - length as usize..], "{change:x?}");
    }
}

#[test]
fn only_the_last_packet_of_a_message_is_solicited() {
    let mut network = rc();
    network.devices[1].post_receive();
    network.devices[0].local.insert(0, vec![1; 600]);
    let request = Request { solicited: true, ..request(0, SEND, 600) };
    network.endpoints[0].post(QPNS[0], request).unwrap();
    let sent = packets(&mut network, 0);
    let solicited: Vec<bool> =
        sent.iter().map(|packet| Packet::parse(packet).unwrap().bth.is_solicited()).collect();
    assert_eq!(solicited, [false, false, true]);
    sent.iter().for_each(|packet| give(&mut network, 1, packet));
    assert!(network.devices[1].received[0].solicited);
}

#[test]
fn a_queue_pair_that_may_only_receive_tells_that_the_peer_is_there() {
    let mut network = rc();
    let mut attributes = attributes(1);
    attributes.destination = QPNS[0];
    network.endpoints[1].create(QPNS[1], Transport::Rc, 4, attributes);
    network.devices[1].memory = vec![0; 4096];
    let bytes = {
        post(&mut network, 0, WRITE, 8);
        packets(&mut network, 0).remove(0)
    };
    let (endpoint, device) = (&mut network.endpoints[1], &mut network.devices[1]);
    assert_eq!(endpoint.packet(0, device, &0, &bytes), Err(Dropped::State(State::Init)));
    endpoint.move_to(device, QPNS[1], State::Rtr);
    assert_eq!(endpoint.post(QPNS[1], request(0, WRITE, 8)), Err(NotPosted::State(State::Rtr)));
    for _ in 0..2 {
        endpoint.packet(0, device, &0, &bytes).unwrap();
    }
    assert_eq!(device.events, [Event::CommunicationEstablished]);
}

#[test]
fn a_response_that_nobody_may_send_fails_the_request() {
    for byte in [0x40, 0x65, 0x7f] {
        let mut network = rc();
        post(&mut network, 0, WRITE, 8);
        let write = packets(&mut network, 0);
        give(&mut network, 1, &write[0]);
        let mut ack = packets(&mut network, 1).remove(0);
        ack[12] = byte;
        give(&mut network, 0, &ack);
        assert_eq!(statuses(&mut network), [Status::IB_WC_BAD_RESP_ERR]);
    }
}

#[test]
fn error_flushes_requests_and_a_receive_that_is_half_written() {
    let mut network = rc();
    network.devices[1].post_receive();
    post(&mut network, 0, SEND, 600);
    let sent = packets(&mut network, 0);
    give(&mut network, 1, &sent[0]);
    network.endpoints[1].move_to(&mut network.devices[1], QPNS[1], State::Error);
    assert_eq!(network.devices[1].failed_receives, [Status::IB_WC_WR_FLUSH_ERR]);
    network.endpoints[0].move_to(&mut network.devices[0], QPNS[0], State::Error);
    assert_eq!(statuses(&mut network), [Status::IB_WC_WR_FLUSH_ERR]);
    assert_eq!(network.endpoints[0].deadline(), None);
}

#[test]
fn what_is_changed_later_holds_for_the_next_packet_and_the_mtu_stays() {
    let mut network = rc();
    post(&mut network, 0, WRITE, 600);
    let sent = packets(&mut network, 0);
    network.endpoints[0].modify(QPNS[0], |attributes| {
        (attributes.mtu, attributes.pkey, attributes.timeout) = (Mtu::Mtu4096, 0x8001, 1);
    });
    assert!(network.endpoints[0].psns(QPNS[0]) == Some((Psn::new(103), Psn::new(100))));
    give(&mut network, 1, &sent[1]);
    let nak = packets(&mut network, 1).remove(0);
    give(&mut network, 0, &nak);
    let again = packets(&mut network, 0);
    assert_eq!(again.len(), 3);
    assert!(again.iter().all(|packet| Packet::parse(packet).unwrap().bth.pkey.get() == 0x8001));
    assert_eq!(network.endpoints[0].deadline(), ack_timeout(1));
}

#[test]
fn queue_pairs_take_turns_within_a_budget() {
    let mut endpoint = Endpoint::new();
    let mut device = Device::default();
    for number in [1, 2] {
        endpoint.create(number, Transport::Uc, 100, attributes(0));
        for state in [State::Rtr, State::Rts] {
            endpoint.move_to(&mut device, number, state);
        }
        (0..100).for_each(|id| endpoint.post(number, request(id, SEND, 0)).unwrap());
    }
    assert_eq!(endpoint.post(1, request(0, SEND, 0)), Err(NotPosted::Full));
    let progress = endpoint.run(0, &mut device, 70);
    assert_eq!((progress.done, progress.more), (70, true));
    assert_eq!([endpoint.pending(1), endpoint.pending(2)], [62, 68]);
    while endpoint.run(0, &mut device, 7).more {}
    assert_eq!([endpoint.room(1), endpoint.room(2)], [100, 100]);
    endpoint.destroy(1);
    assert_eq!(endpoint.post(1, request(0, SEND, 0)), Err(NotPosted::NoQueuePair));
}

/// Gives all packets that a side has to send to the other one.
fn deliver(network: &mut Network, from: usize) {
    packets(network, from).iter().for_each(|packet| give(network, 1 - from, packet));
}

fn move_to_error(network: &mut Network, side: usize) {
    network.endpoints[side].move_to(&mut network.devices[side], QPNS[side], State::Error);
}

/// rxe takes an ACK of an atomic or a read of one packet for its response, without data.
#[test]
fn an_ack_in_error_names_no_request_that_has_a_response() {
    let mut network = rc();
    network.devices[1].post_receive();
    post(&mut network, 0, READ, 8);
    deliver(&mut network, 0);
    // Its response is lost.
    assert_eq!(packets(&mut network, 1).len(), 1);
    post(&mut network, 1, READ, 8);
    post(&mut network, 2, SEND, 8);
    deliver(&mut network, 0);
    assert_eq!(network.devices[1].received.len(), 1);
    move_to_error(&mut network, 1);
    assert!(packets(&mut network, 1).is_empty());
}

#[test]
fn an_ack_that_is_owed_is_sent_in_error() {
    let mut network = rc();
    network.devices[1].post_receive();
    network.devices[1].post_receive();
    post(&mut network, 0, SEND, 8);
    post(&mut network, 1, READ, 8);
    post(&mut network, 2, SEND, 8);
    deliver(&mut network, 0);
    move_to_error(&mut network, 1);
    deliver(&mut network, 1);
    // The read is not answered, and so the send behind it is not acknowledged.
    assert_eq!(statuses(&mut network), [Status::IB_WC_SUCCESS]);
    assert_eq!((state(&network, 0), network.endpoints[0].pending(QPNS[0])), (State::Rts, 2));
    assert!(packets(&mut network, 1).is_empty());
}

#[test]
fn a_nak_that_is_owed_is_sent_in_error() {
    let mut network = rc();
    post(&mut network, 0, Work::Write { address: 0, key: KEY + 1, immediate: None }, 8);
    deliver(&mut network, 0);
    move_to_error(&mut network, 1);
    assert!(network.devices[1].events.is_empty());
    deliver(&mut network, 1);
    assert_eq!(statuses(&mut network), [Status::IB_WC_REM_ACCESS_ERR]);
    assert_eq!(network.devices[1].events, [Event::Refused(Refusal::Access)]);
}

#[test]
fn a_receive_that_cannot_be_reported_is_answered_with_a_nak() {
    let mut network = rc();
    for id in 0..2 {
        network.devices[1].post_receive();
        post(&mut network, id, SEND, 8);
    }
    let sent = packets(&mut network, 0);
    give(&mut network, 1, &sent[0]);
    network.devices[1].cq_is_full = true;
    give(&mut network, 1, &sent[1]);
    deliver(&mut network, 1);
    let ends = [Status::IB_WC_SUCCESS, Status::IB_WC_REM_OP_ERR];
    assert_eq!(statuses(&mut network), ends);
    assert_eq!(network.devices[1].events, [Event::Refused(Refusal::Operational)]);
}

#[test]
fn a_request_above_max_dest_rd_atomic_is_refused() {
    let mut network = network(Transport::Rc, |side, attributes| {
        attributes.max_rd_atomic = 4;
        attributes.max_dest_rd_atomic = if side == 0 { 4 } else { 2 };
    });
    (0..3).for_each(|id| post(&mut network, id, READ, 8));
    deliver(&mut network, 0);
    deliver(&mut network, 1);
    let ok = Status::IB_WC_SUCCESS;
    assert_eq!(statuses(&mut network), [ok, ok, Status::IB_WC_REM_INV_REQ_ERR]);
}

#[test]
fn a_refused_request_of_uc_moves_the_receiver_to_error() {
    let mut network = network(Transport::Uc, |_, _| {});
    let work = Work::Write { address: 0, key: KEY + 1, immediate: None };
    post(&mut network, 0, work, 600);
    let sent = packets(&mut network, 0);
    // The rest of a message that has lost its begin is none.
    sent[1..].iter().for_each(|packet| give(&mut network, 1, packet));
    assert_eq!(state(&network, 1), State::Rts);
    assert!(sent.len() > 1 && network.devices[1].events.is_empty());
    post(&mut network, 1, work, 8);
    deliver(&mut network, 0);
    assert_eq!(state(&network, 1), State::Error);
    assert_eq!(network.devices[1].events, [Event::Refused(Refusal::Access)]);
}

#[test]
fn timers_end_with_the_last_nanosecond() {
    let mut network = rc();
    network.now = u64::MAX - 1;
    post(&mut network, 0, SEND, 8);
    deliver(&mut network, 0);
    assert_eq!(network.endpoints[0].deadline(), Some(u64::MAX));
    deliver(&mut network, 1);
    assert_eq!(network.endpoints[0].deadline(), Some(u64::MAX));
}
