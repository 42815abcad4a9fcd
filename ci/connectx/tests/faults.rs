//! Faults that a test asks for over the control socket, in plain memory.

mod driver;

use connectx::control::{Reply, Request, answer};
use connectx::fault::{Delay, Side};
use connectx::function::Region;
use driver::{Driver, Queue};
use uverbs_uapi::mlx5::prm::mkc::mkc;
use uverbs_uapi::mlx5::prm::opcode;

const SEND: u8 = 0x0a;
const REQUEST: u8 = 0;
const RECEIVED: u8 = 2;
const REQUEST_ERROR: u8 = 13;
const RECEIVE_ERROR: u8 = 14;
const NONE: u8 = 15;

struct Bench {
    driver: Driver,
    a: Queue,
    b: Queue,
    sent: u64,
    received: u64,
    data: u64,
    key: u32,
}

impl Bench {
    fn new() -> Self {
        let mut driver = Driver::new();
        driver.address();
        let eqn = driver.eq();
        let (send_cq, sent) = driver.cq(eqn);
        let (receive_cq, received) = driver.cq(eqn);
        let (a, b) = (driver.qp(0, send_cq), driver.qp(0, receive_cq));
        driver.connect(&a, &b);
        driver.connect(&b, &a);
        let data = driver.page();
        let key = driver.mkey(data, 4096, &[mkc::lr, mkc::lw]);
        Self { driver, a, b, sent, received, data, key }
    }

    fn ask(&mut self, request: Request) {
        assert_eq!(answer(&mut self.driver.fabric, &request), Reply::Done);
    }

    /// Sends from the first queue pair to the second, and lets time pass until all is done.
    fn send(&mut self) {
        let segment = Driver::segment(8, self.key, self.data);
        self.driver.post_receive(&mut self.b, &segment);
        self.driver.post_send(&mut self.a, SEND, 0, &segment);
    }
}

#[test]
fn the_nth_request_ends_with_the_syndromes_asked_for() {
    let mut bench = Bench::new();
    let qpn = Some(bench.a.number);
    bench.ask(Request::FailRequest {
        function: 0,
        qpn,
        side: Side::Send,
        after: 1,
        syndrome: 0x22,
        vendor: 0x99,
    });
    for _ in 0..3 {
        bench.send();
    }
    assert_eq!(bench.driver.cqe(bench.sent, 0).0, REQUEST);
    let (code, cqe) = bench.driver.cqe(bench.sent, 1);
    assert_eq!((code, cqe[54], cqe[55]), (REQUEST_ERROR, 0x99, 0x22));
    // The queue pair is broken, and the message was never sent.
    let (code, cqe) = bench.driver.cqe(bench.sent, 2);
    assert_eq!((code, cqe[55]), (REQUEST_ERROR, 0x05));
    assert_eq!(bench.driver.cqe(bench.received, 0).0, RECEIVED);
    assert_eq!(bench.driver.cqe(bench.received, 1).0, NONE);
}

#[test]
fn a_receive_ends_with_the_syndromes_asked_for() {
    let mut bench = Bench::new();
    let qpn = Some(bench.b.number);
    bench.ask(Request::FailRequest {
        function: 0,
        qpn,
        side: Side::Receive,
        after: 0,
        syndrome: 0x04,
        vendor: 0x51,
    });
    bench.send();
    let (code, cqe) = bench.driver.cqe(bench.received, 0);
    assert_eq!((code, cqe[54], cqe[55]), (RECEIVE_ERROR, 0x51, 0x04));
    let (code, cqe) = bench.driver.cqe(bench.sent, 0);
    assert_eq!((code, cqe[55]), (REQUEST_ERROR, 0x14));
}

#[test]
fn a_delayed_message_arrives_when_its_time_has_come() {
    let mut bench = Bench::new();
    bench.ask(Request::DelayMessages { function: 0, count: 1, by: Delay::Time(5_000_000) });
    let before = bench.driver.now();
    bench.send();
    assert_eq!(bench.driver.cqe(bench.received, 0).0, RECEIVED);
    assert_eq!(bench.driver.now() - before, 5_000_000);
    let before = bench.driver.now();
    bench.send();
    assert_eq!(bench.driver.cqe(bench.received, 1).0, RECEIVED);
    assert_eq!(bench.driver.now(), before);
}

#[test]
fn a_link_that_flaps_tells_the_driver_each_time() {
    let mut bench = Bench::new();
    let start = bench.driver.now();
    bench.ask(Request::FlapLink { function: 0, times: 2, down: 1_000, up: 1_000 });
    assert!(bench.driver.fabric.deadline() == Some(start));
    let mut states = Vec::new();
    while let Some(due) = bench.driver.fabric.deadline() {
        bench.driver.fabric.turn(due);
        let device = bench.driver.fabric.function(0).device();
        states.push((due - start, device.link_up()));
    }
    assert_eq!(states, [(0, false), (1_000, true), (2_000, false), (3_000, true)]);
}

#[test]
fn a_silent_command_keeps_its_slot_and_the_next_works() {
    let mut bench = Bench::new();
    let opcode = opcode::ALLOC_PD;
    bench.ask(Request::SilenceCommand { function: 0, opcode, after: 1 });
    bench.driver.simple(opcode, &[0; 16]).unwrap();
    let mut slot = [0; 64];
    slot[0] = 7;
    slot[7] = 16;
    slot[16..18].copy_from_slice(&opcode.to_be_bytes());
    slot[59] = 16;
    slot[63] = 1;
    bench.driver.slot(&slot);
    assert_eq!(bench.driver.slot_bytes(), slot);
    bench.driver.simple(opcode, &[0; 16]).unwrap();
}

#[test]
fn a_function_that_is_pulled_out_answers_ones_until_it_is_put_back() {
    let mut bench = Bench::new();
    bench.ask(Request::Remove { function: 0 });
    let read = |bench: &mut Bench, region, offset| {
        let mut bytes = [0; 4];
        bench.driver.fabric.function(0).read(region, offset, &mut bytes);
        bytes
    };
    assert_eq!(read(&mut bench, Region::Config, 0), [0xff; 4]);
    assert_eq!(read(&mut bench, Region::Bar0, 0), [0xff; 4]);
    bench.driver.fabric.function(0).write(Region::Bar0, 0x14, &0x1000u32.to_be_bytes());
    bench.driver.fabric.function(0).reset();
    assert_eq!(read(&mut bench, Region::Bar0, 0x14), [0xff; 4]);
    let objects = answer(&mut bench.driver.fabric, &Request::Objects { function: 0 });
    let Reply::Objects { counts } = objects else { panic!("{objects:?}") };
    assert!(counts.values().all(|count| *count == 0), "{counts:?}");
    bench.ask(Request::Insert { function: 0 });
    assert_eq!(read(&mut bench, Region::Config, 0), [0xb3, 0x15, 0x17, 0x10]);
    assert_eq!(read(&mut bench, Region::Bar0, 0x14)[2] & 7, 0);
    bench.ask(Request::Remove { function: 0 });
    assert_eq!(read(&mut bench, Region::Config, 0), [0xff; 4]);
    bench.driver.fabric.function(0).restart();
    assert_eq!(read(&mut bench, Region::Config, 0), [0xb3, 0x15, 0x17, 0x10]);
}

#[test]
fn a_sick_function_is_cured_by_the_reset_it_asks_for() {
    let mut bench = Bench::new();
    let word = |bench: &mut Bench, offset| {
        let mut bytes = [0; 4];
        bench.driver.fabric.function(0).read(Region::Bar0, offset, &mut bytes);
        u32::from_be_bytes(bytes)
    };
    bench.ask(Request::Health { function: 0, syndrome: 0x7, fatal: true });
    assert_eq!((word(&mut bench, 0x238) >> 31, word(&mut bench, 0x23c)), (1, 0x7_0000));
    assert_eq!(word(&mut bench, 0x1fc) >> 30, 1);
    // The state of the interface beside the queue's address: reset.
    bench.driver.fabric.function(0).write(Region::Bar0, 0x14, &0x1700u32.to_be_bytes());
    assert_eq!((word(&mut bench, 0x238), word(&mut bench, 0x23c)), (0, 0));
    assert_eq!(word(&mut bench, 0x14) >> 8 & 7, 1);
    let objects = answer(&mut bench.driver.fabric, &Request::Objects { function: 0 });
    let Reply::Objects { counts } = objects else { panic!("{objects:?}") };
    assert!(counts.values().all(|count| *count == 0), "{counts:?}");
}
