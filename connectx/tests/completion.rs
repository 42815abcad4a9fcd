//! CQEs in plain memory: scatter to CQE, CQEs of 128 bytes, and the events that report them.

mod driver;

use driver::Driver;
use driver::pair::Pair;
use driver::pair::code::*;
use uverbs_uapi::mlx5::prm::cqc::{cqc, query_cq_out};
use uverbs_uapi::mlx5::prm::mkc::mkc;
use uverbs_uapi::mlx5::prm::qpc::{qpc, query_qp_out};
use uverbs_uapi::mlx5::prm::{Bits, opcode};

/// Flags of scatter to CQE in the last byte.
const INLINE_32: u8 = 4;
const INLINE_64: u8 = 8;

/// Flag of the CQ doorbell: arm for solicited CQEs only.
const SOLICITED: u32 = 1 << 24;

/// Values of `cqe_sz`.
const LONG: u64 = 1;
const PADDED: u64 = 2;

/// Two queue pairs with scatter to CQE: up to 64 bytes if CQEs have 128 bytes, 32 if not.
fn pair(entries: u64) -> Pair {
    let scatter = if entries == 0 {
        [(qpc::cs_req, 0x11), (qpc::cs_res, 1)]
    } else {
        [(qpc::cs_req, 0x22), (qpc::cs_res, 2)]
    };
    Pair::with(&[(cqc::cqe_sz, entries), (cqc::log_cq_size, 5)], &scatter)
}

/// Sends `len` bytes into a receive of the same length.
fn send(p: &mut Pair, len: u32) {
    p.receive(len);
    p.send(len);
}

#[test]
fn a_short_message_is_scattered_to_its_cqe() {
    let mut p = pair(0);
    let data: [u8; 33] = std::array::from_fn(|at| at as u8 + 1);
    p.driver.memory().write(p.from, &data).unwrap();
    send(&mut p, 32);
    let (code, cqe) = p.driver.cqe(p.received, 0);
    assert_eq!((code, cqe[63] & 0xc, &cqe[..32]), (RECEIVED, INLINE_32, &data[..32]));
    assert_eq!(p.bytes::<32>(p.to), [0; 32], "the driver copies it");
    send(&mut p, 33);
    let (code, cqe) = p.driver.cqe(p.received, 1);
    assert_eq!((code, cqe[63] & 0xc), (RECEIVED, 0));
    assert_eq!(p.bytes::<33>(p.to), data);
}

#[test]
fn a_128_byte_cqe_holds_64_bytes_of_data_in_its_first_half() {
    let mut p = pair(LONG);
    let data: [u8; 65] = std::array::from_fn(|at| at as u8 + 1);
    p.driver.memory().write(p.from, &data).unwrap();
    send(&mut p, 64);
    assert_eq!(p.bytes::<64>(p.received), data[..64]);
    let cqe = p.bytes::<64>(p.received + 64);
    assert_eq!((cqe[63] >> 4, cqe[63] & 0xc), (RECEIVED, INLINE_64));
    assert_eq!(cqe[44..48], 64u32.to_be_bytes());
    assert_eq!(p.bytes::<64>(p.to), [0; 64]);
    send(&mut p, 65);
    let cqe = p.bytes::<64>(p.received + 128 + 64);
    assert_eq!((cqe[63] >> 4, cqe[63] & 0xc), (RECEIVED, 0));
    assert_eq!(p.bytes::<65>(p.to), data);
}

#[test]
fn a_short_read_is_scattered_to_its_cqe() {
    for (entries, mark) in [(0, INLINE_32), (LONG, INLINE_64)] {
        let mut p = pair(entries);
        p.driver.memory().write(p.to, b"an answer").unwrap();
        let segments = [Pair::remote(p.to, p.key), p.local(9)].concat();
        p.driver.post_send(&mut p.a, READ, 0, &segments);
        let (data, at) = if entries == 0 { (p.sent, p.sent) } else { (p.sent, p.sent + 64) };
        let cqe = p.bytes::<64>(at);
        assert_eq!((cqe[63] >> 4, cqe[63] & 0xc), (REQUEST, mark));
        assert_eq!(p.bytes::<9>(data), *b"an answer");
        assert_eq!(p.bytes::<9>(p.from), [0; 9]);
    }
}

/// The driver copies the data from the CQE, so the device has to check that the mkey allows it.
#[test]
fn scatter_to_cqe_needs_local_write_access() {
    let mut p = pair(0);
    let readable = p.driver.mkey(p.to, 4096, &[mkc::lr]);
    p.driver.post_receive(&mut p.b, &Driver::segment(8, readable, p.to));
    p.send(8);
    assert_eq!(p.driver.cqe(p.received, 0).0, RECEIVE_ERROR);
}

#[test]
fn padded_cqes_are_written_whole() {
    for (entries, first) in [(LONG, 0xf1), (PADDED, 0)] {
        let mut p = pair(entries);
        p.driver.post_send(&mut p.a, NOP, 0, &[]);
        assert_eq!(p.bytes::<64>(p.sent), [first; 64], "{entries}");
        assert_eq!(p.bytes::<64>(p.sent + 64)[63] >> 4, REQUEST);
    }
}

#[test]
fn moderation_by_count_delays_the_event() {
    let mut driver = Driver::new();
    let eqn = driver.eq();
    let events = driver.last_page();
    let (cqn, _) = driver.cq_with(eqn, &[(cqc::cq_max_count, 3)]);
    let mut qp = driver.qp(0, cqn);
    let other = driver.qp(0, cqn);
    driver.connect(&qp, &other);
    driver.arm(cqn, 0);
    for (posted, seen) in [(1, 0), (2, 0), (3, 1), (4, 1)] {
        driver.post_send(&mut qp, NOP, 0, &[]);
        assert_eq!(driver.completion_events(events, cqn), seen, "after {posted}");
    }
    // CQEs from before arming count: the driver has seen three of four, so two more make three.
    driver.arm(cqn, 3);
    driver.post_send(&mut qp, NOP, 0, &[]);
    assert_eq!(driver.completion_events(events, cqn), 1);
    driver.post_send(&mut qp, NOP, 0, &[]);
    assert_eq!(driver.completion_events(events, cqn), 2);
}

#[test]
fn moderation_by_period_delays_the_event() {
    const FROM_COMPLETION: u64 = 1;
    let mut driver = Driver::new();
    let eqn = driver.eq();
    let events = driver.last_page();
    let moderation =
        [(cqc::cq_period, 7), (cqc::cq_max_count, 9), (cqc::cq_period_mode, FROM_COMPLETION)];
    let (cqn, _) = driver.cq_with(eqn, &moderation);
    let mut qp = driver.qp(0, cqn);
    let other = driver.qp(0, cqn);
    driver.connect(&qp, &other);
    driver.arm(cqn, 0);
    let before = driver.now();
    driver.post_send(&mut qp, NOP, 0, &[]);
    assert_eq!(driver.completion_events(events, cqn), 1);
    assert_eq!(driver.now() - before, 7_000, "nanoseconds");
}

/// Errors count as solicited, on either side.
#[test]
fn an_error_cqe_counts_as_solicited() {
    let mut p = Pair::new();
    p.driver.arm(p.send_cq, SOLICITED);
    p.driver.post_send(&mut p.a, NOP, 0, &[]);
    assert_eq!(p.driver.completion_events(p.events, p.send_cq), 0);
    // No receive is posted.
    p.send(8);
    assert_eq!(p.driver.cqe(p.sent, 1).0, REQUEST_ERROR);
    assert_eq!(p.driver.completion_events(p.events, p.send_cq), 1);
}

/// A CQE that does not fit is lost, so its queue pair must not continue.
#[test]
fn a_cq_overrun_moves_the_qp_to_error() {
    const ERROR: u64 = 6;
    const OVERRUN: [u8; 2] = [0x04, 0x05];
    let mut p = Pair::with(&[(cqc::log_cq_size, 1)], &[]);
    for posted in 1..=4 {
        p.driver.post_send(&mut p.a, NOP, 0, &[]);
        let out = p.driver.run_command_on(opcode::QUERY_QP, p.a.number).unwrap();
        let state = Bits::<query_qp_out, _>::new(out).sub(query_qp_out::qpc).get(qpc::state);
        assert_eq!(state == ERROR, posted > 2, "after {posted}");
        let events = p.bytes::<256>(p.events);
        let kinds = events.chunks(64).map(|event| event[1]).take(2);
        assert_eq!(kinds.eq(OVERRUN), posted > 2, "after {posted}");
    }
    assert_eq!(p.driver.cqe(p.sent, 1).0, REQUEST);
    assert_eq!(p.driver.cqe(p.sent, 2).0, NONE);
}

/// rdma-core's perftest gets the event, arms, and only then polls one CQE. The CQE that was
/// reported must not raise another event, after which the program would find nothing to poll.
#[test]
fn an_event_reports_each_cqe_once() {
    let mut p = Pair::new();
    let mut events = 0;
    p.driver.arm(p.send_cq, 0);
    for turn in 0..3 {
        p.driver.post_send(&mut p.a, NOP, 0, &[]);
        events += 1;
        assert_eq!(p.driver.completion_events(p.events, p.send_cq), events, "after {turn}");
        p.driver.arm(p.send_cq, turn);
        assert_eq!(p.driver.completion_events(p.events, p.send_cq), events, "armed at {turn}");
    }
    // CQEs from while the CQ was not armed are reported when it is armed again, unless the driver
    // has seen them.
    p.driver.post_send(&mut p.a, NOP, 0, &[]);
    p.driver.post_send(&mut p.a, NOP, 0, &[]);
    events += 1;
    assert_eq!(p.driver.completion_events(p.events, p.send_cq), events, "two at once");
    p.driver.arm(p.send_cq, 5);
    assert_eq!(p.driver.completion_events(p.events, p.send_cq), events, "both were seen");
    p.driver.post_send(&mut p.a, NOP, 0, &[]);
    p.driver.post_send(&mut p.a, NOP, 0, &[]);
    p.driver.arm(p.send_cq, 5);
    events += 2;
    assert_eq!(p.driver.completion_events(p.events, p.send_cq), events, "one more since");
    let out = p.driver.run_command_on(opcode::QUERY_CQ, p.send_cq).unwrap();
    let context = Bits::<query_cq_out, _>::new(out).sub(query_cq_out::cq_context).bytes().to_vec();
    let context = Bits::<cqc, _>::new(context);
    let counters = [cqc::producer_counter, cqc::last_notified_index, cqc::last_solicit_index];
    assert_eq!(counters.map(|counter| context.get(counter)), [7, 7, 0]);
}
