//! Completions in plain memory: data in them, entries of 128 bytes, and when events report them.

mod driver;

use driver::{Driver, Queue};
use uverbs_uapi::mlx5::prm::cqc::cqc;
use uverbs_uapi::mlx5::prm::mkc::mkc;
use uverbs_uapi::mlx5::prm::qpc::qpc;

const NOP: u8 = 0x00;
const SEND: u8 = 0x0a;
const READ: u8 = 0x10;

const REQUEST: u8 = 0;
const RECEIVED: u8 = 2;
const RECEIVE_ERROR: u8 = 14;

/// Marks in the last byte of a completion.
const INLINE_32: u8 = 4;
const INLINE_64: u8 = 8;

/// Values of `cqe_sz`.
const LONG: u64 = 1;
const PADDED: u64 = 2;

struct Pair {
    driver: Driver,
    a: Queue,
    b: Queue,
    sent: u64,
    received: u64,
    from: u64,
    to: u64,
    key: u32,
}

/// Two queue pairs with data in completions: up to 64 bytes if entries are long, 32 if not.
fn pair(entries: u64) -> Pair {
    let mut driver = Driver::new();
    driver.address();
    let eqn = driver.eq();
    let size = [(cqc::cqe_sz, entries), (cqc::log_cq_size, 5)];
    let (send_cq, sent) = driver.cq_with(eqn, &size);
    let (receive_cq, received) = driver.cq_with(eqn, &size);
    let scatter = if entries == 0 {
        [(qpc::cs_req, 0x11), (qpc::cs_res, 1)]
    } else {
        [(qpc::cs_req, 0x22), (qpc::cs_res, 2)]
    };
    let a = driver.qp_with(0, send_cq, &scatter);
    let b = driver.qp_with(0, receive_cq, &scatter);
    driver.connect(&a, &b);
    driver.connect(&b, &a);
    let (from, to) = (driver.page(), driver.page());
    let key = driver.mkey(from, 8192, &[mkc::lr, mkc::lw, mkc::rr, mkc::rw]);
    Pair { driver, a, b, sent, received, from, to, key }
}

impl Pair {
    /// Sends `len` bytes, with room for as many.
    fn send(&mut self, len: u32) {
        self.driver.post_receive(&mut self.b, &Driver::segment(len, self.key, self.to));
        self.driver.post_send(&mut self.a, SEND, 0, &Driver::segment(len, self.key, self.from));
    }

    fn bytes<const N: usize>(&mut self, at: u64) -> [u8; N] {
        let mut bytes = [0; N];
        self.driver.memory().read(at, &mut bytes).unwrap();
        bytes
    }
}

#[test]
fn a_short_message_lies_in_the_completion_of_its_receive() {
    let mut p = pair(0);
    let data: [u8; 33] = std::array::from_fn(|at| at as u8 + 1);
    p.driver.memory().write(p.from, &data).unwrap();
    p.send(32);
    let (code, cqe) = p.driver.cqe(p.received, 0);
    assert_eq!((code, cqe[63] & 0xc, &cqe[..32]), (RECEIVED, INLINE_32, &data[..32]));
    assert_eq!(p.bytes::<32>(p.to), [0; 32], "the driver copies it");
    p.send(33);
    let (code, cqe) = p.driver.cqe(p.received, 1);
    assert_eq!((code, cqe[63] & 0xc), (RECEIVED, 0));
    assert_eq!(p.bytes::<33>(p.to), data);
}

#[test]
fn a_long_entry_holds_sixty_four_bytes_before_the_completion() {
    let mut p = pair(LONG);
    let data: [u8; 65] = std::array::from_fn(|at| at as u8 + 1);
    p.driver.memory().write(p.from, &data).unwrap();
    p.send(64);
    assert_eq!(p.bytes::<64>(p.received), data[..64]);
    let cqe = p.bytes::<64>(p.received + 64);
    assert_eq!((cqe[63] >> 4, cqe[63] & 0xc), (RECEIVED, INLINE_64));
    assert_eq!(cqe[44..48], 64u32.to_be_bytes());
    assert_eq!(p.bytes::<64>(p.to), [0; 64]);
    p.send(65);
    let cqe = p.bytes::<64>(p.received + 128 + 64);
    assert_eq!((cqe[63] >> 4, cqe[63] & 0xc), (RECEIVED, 0));
    assert_eq!(p.bytes::<65>(p.to), data);
}

#[test]
fn a_short_answer_lies_in_the_completion_of_its_read() {
    for (entries, mark) in [(0, INLINE_32), (LONG, INLINE_64)] {
        let mut p = pair(entries);
        p.driver.memory().write(p.to, b"an answer").unwrap();
        let mut remote = p.to.to_be_bytes().to_vec();
        remote.extend(p.key.to_be_bytes());
        remote.extend([0; 4]);
        let local = Driver::segment(9, p.key, p.from);
        p.driver.post_send(&mut p.a, READ, 0, &[remote, local].concat());
        let (data, at) = if entries == 0 { (p.sent, p.sent) } else { (p.sent, p.sent + 64) };
        let cqe = p.bytes::<64>(at);
        assert_eq!((cqe[63] >> 4, cqe[63] & 0xc), (REQUEST, mark));
        assert_eq!(p.bytes::<9>(data), *b"an answer");
        assert_eq!(p.bytes::<9>(p.from), [0; 9]);
    }
}

/// The driver copies what lies in a completion; it must not be told to copy where it may not write.
#[test]
fn data_in_a_completion_needs_the_right_to_write() {
    let mut p = pair(0);
    let readable = p.driver.mkey(p.to, 4096, &[mkc::lr]);
    p.driver.post_receive(&mut p.b, &Driver::segment(8, readable, p.to));
    p.driver.post_send(&mut p.a, SEND, 0, &Driver::segment(8, p.key, p.from));
    assert_eq!(p.driver.cqe(p.received, 0).0, RECEIVE_ERROR);
}

#[test]
fn padded_entries_are_written_whole() {
    for (entries, first) in [(LONG, 0xf1), (PADDED, 0)] {
        let mut p = pair(entries);
        p.driver.post_send(&mut p.a, NOP, 0, &[]);
        assert_eq!(p.bytes::<64>(p.sent), [first; 64], "{entries}");
        assert_eq!(p.bytes::<64>(p.sent + 64)[63] >> 4, REQUEST);
    }
}

#[test]
fn an_event_waits_for_so_many_completions() {
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
    // What came before arming counts: one of four was not seen, and two more make three.
    driver.arm(cqn, 3);
    driver.post_send(&mut qp, NOP, 0, &[]);
    assert_eq!(driver.completion_events(events, cqn), 1);
    driver.post_send(&mut qp, NOP, 0, &[]);
    assert_eq!(driver.completion_events(events, cqn), 2);
}

#[test]
fn an_event_waits_for_its_time() {
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
