//! Drivers without a lock or a barrier: the doorbell errors show each of these bugs.

mod driver;

use driver::{Driver, Queue};
use uverbs_connectx::doorbell::DoorbellErrors;
use uverbs_connectx::function::Region;
use uverbs_uapi::mlx5::prm::opcode;

const SEND: u64 = 0x800;
const BUFFER: u64 = 0x100;

struct Fixture {
    driver: Driver,
    queue: Queue,
    cqn: u32,
    cqes: u64,
    consumer: u64,
}

/// The steps of posting one WQE, in the order of each driver.
#[derive(Clone, Copy, PartialEq)]
enum Step {
    Request,
    Record,
    Doorbell,
    BlueFlame,
}
use Step::{BlueFlame, Doorbell, Record, Request};

impl Fixture {
    fn new() -> Self {
        let mut driver = Driver::new();
        driver.set_gid();
        let eqn = driver.eq();
        let (cqn, cqes) = driver.cq(eqn);
        // `cq` allocates the doorbell record last.
        let consumer = driver.last_page();
        let queue = driver.qp(0, cqn);
        let peer = driver.qp(0, cqn);
        driver.connect(&queue, &peer);
        Self { driver, queue, cqn, cqes, consumer }
    }

    /// A NOP at a WQE index.
    fn request(&self, index: u16) -> [u8; 64] {
        let mut bytes = [0; 64];
        bytes[..4].copy_from_slice(&(u32::from(index) << 8).to_be_bytes());
        bytes[4..8].copy_from_slice(&(self.queue.number << 8 | 1).to_be_bytes());
        bytes
    }

    fn write(&mut self, offset: u64, bytes: &[u8]) {
        let page = u64::from(self.driver.uar) * 4096;
        self.driver.fabric.function(0).write(Region::Bar0, page + offset, bytes);
    }

    /// Posts the NOP of an index step by step; the device handles each doorbell at once.
    fn post(&mut self, index: u16, steps: &[Step]) {
        let request = self.request(index);
        for step in steps {
            match step {
                Request => self.store(index, &request),
                Record => self.record(index.wrapping_add(1)),
                Doorbell => self.write(SEND, &request[..8]),
                BlueFlame => self.copy(SEND, &request),
            }
            if matches!(step, Doorbell | BlueFlame) {
                self.driver.fabric.function(0).device_mut().flush_gathered_writes();
            }
        }
    }

    /// Writes a WQE to its place in the queue of 16 WQEBBs.
    fn store(&mut self, index: u16, request: &[u8]) {
        for (ahead, wqebb) in (0..).zip(request.chunks(64)) {
            let at = self.queue.sends + (u64::from(index) + ahead) % 16 * 64;
            self.driver.memory().write(at, wqebb).unwrap();
        }
    }

    fn record(&mut self, producer_index: u16) {
        let at = self.queue.record + 4;
        let bytes = u32::from(producer_index).to_be_bytes();
        self.driver.memory().write(at, &bytes).unwrap();
    }

    fn ring(&mut self, request: &[u8]) {
        self.write(SEND, &request[..8]);
        self.driver.fabric.function(0).device_mut().flush_gathered_writes();
    }

    /// Posts a WQE of one WQEBB with a doorbell, and lets the device run.
    fn execute(&mut self, index: u16, request: &[u8; 64]) {
        self.store(index, request);
        self.record(index + 1);
        self.ring(request);
        self.driver.run();
    }

    /// Copies the signaled NOP of an index to the two buffers in turn, as drivers do.
    fn copy_signaled(&mut self, index: u16) {
        let request = self.signaled(index);
        self.copy(SEND + BUFFER * u64::from(index % 2), &request);
    }

    fn copy(&mut self, offset: u64, request: &[u8]) {
        for (at, word) in (offset..).step_by(8).zip(request.chunks(8)) {
            self.write(at, word);
        }
    }

    /// The NOP of an index with a signaled completion, as a driver's write-combining test copies it: the WQE in
    /// memory is not signaled, so that a CQE shows that the device has executed the copy.
    fn signaled(&self, index: u16) -> [u8; 64] {
        let mut bytes = self.request(index);
        bytes[11] = 0x08;
        bytes
    }

    /// The indexes of the WQEs that have a CQE, in order.
    fn completed(&mut self) -> Vec<u16> {
        let cqes: Vec<_> = (0..64).map(|at| self.driver.cqe(self.cqes, at)).collect();
        let requests = cqes.iter().take_while(|(opcode, _)| *opcode == 0);
        requests.map(|(_, cqe)| u16::from_be_bytes([cqe[60], cqe[61]])).collect()
    }

    fn errors(&mut self) -> DoorbellErrors {
        self.driver.fabric.function(0).device().doorbell_errors()
    }

    fn arm(&mut self, word: u32, record: u32) {
        let at = self.consumer + 4;
        self.driver.memory().write(at, &record.to_be_bytes()).unwrap();
        let doorbell = [word.to_be_bytes(), self.cqn.to_be_bytes()].concat();
        self.write(0x20, &doorbell);
    }
}

#[test]
fn a_correct_driver_causes_no_doorbell_errors() {
    let mut fixture = Fixture::new();
    fixture.post(0, &[Request, Record, Doorbell]);
    fixture.driver.run();
    fixture.post(1, &[Request, Record, BlueFlame]);
    fixture.post(2, &[Request, Record, BlueFlame]);
    fixture.driver.run();
    fixture.arm(0x1000_0001, 0x1000_0001);
    assert_eq!(fixture.errors(), DoorbellErrors::default());
}

/// A busy host: the device gets no processor while the driver posts.
#[test]
fn blueflame_copies_that_arrive_together_are_all_executed() {
    let mut fixture = Fixture::new();
    for index in 0..8 {
        fixture.post(index, &[Request, Record]);
        fixture.copy_signaled(index);
    }
    fixture.driver.run();
    assert_eq!(fixture.completed(), (0..8).collect::<Vec<_>>());
}

/// A busy host: the rest of the first copy comes after the device has given it up, and the driver has posted
/// more WQEs before that, whose copies are still on their way.
#[test]
fn a_late_blueflame_copy_leaves_those_after_it_to_be_executed() {
    let mut fixture = Fixture::new();
    for index in 0..3 {
        fixture.post(index, &[Request, Record]);
    }
    let first = fixture.signaled(0);
    fixture.ring(&first);
    fixture.driver.run();
    for (at, word) in (SEND + 8..).step_by(8).zip(first[8..].chunks(8)) {
        fixture.write(at, word);
    }
    (1..3).for_each(|index| fixture.copy_signaled(index));
    fixture.driver.run();
    assert_eq!(fixture.completed(), [1, 2]);
    assert_eq!(fixture.errors().late, 7);
}

#[test]
fn a_wqe_is_executed_when_its_doorbell_has_come() {
    let mut fixture = Fixture::new();
    let requests: Vec<_> = (0..4).map(|index| fixture.signaled(index)).collect();
    for (index, request) in (0..).zip(&requests) {
        fixture.store(index, request);
    }
    fixture.record(4);
    fixture.ring(&requests[0]);
    fixture.driver.run();
    assert_eq!(fixture.completed(), [0]);
    fixture.ring(&requests[3]);
    fixture.driver.run();
    assert_eq!(fixture.completed(), [0, 1, 2, 3]);
}

/// rdma-core and the kernel's driver ring such a doorbell after a list whose last request they refused: the slot of
/// that request still holds a WQE of the lap before.
#[test]
fn a_doorbell_of_an_executed_wqe_rings_all_posted_ones() {
    let mut fixture = Fixture::new();
    for index in 0..16 {
        fixture.post(index, &[Request, Record, Doorbell]);
        fixture.driver.run();
    }
    let (good, refused) = (fixture.signaled(16), fixture.request(1));
    fixture.store(16, &good);
    fixture.record(17);
    fixture.ring(&refused);
    fixture.driver.run();
    assert_eq!(fixture.completed(), [16]);
}

#[test]
fn indexes_of_doorbells_and_copies_wrap() {
    let mut fixture = Fixture::new();
    for index in 0..0xfff8 {
        fixture.post(index, &[Request, Record, Doorbell]);
        fixture.driver.run_now();
    }
    let last: Vec<u16> = (0..16).map(|ahead: u16| 0xfff8_u16.wrapping_add(ahead)).collect();
    for index in &last {
        fixture.post(*index, &[Request, Record]);
        fixture.copy_signaled(*index);
    }
    fixture.driver.run();
    assert_eq!(fixture.completed(), last);
}

/// A WQE of two WQEBBs; the second is the first of the queue.
#[test]
fn a_copy_that_wraps_around_the_queue_is_executed() {
    let mut fixture = Fixture::new();
    for index in 0..15 {
        fixture.post(index, &[Request, Record, Doorbell]);
        fixture.driver.run();
    }
    let long = |first: [u8; 64]| {
        let mut bytes = [first, [0; 64]].concat();
        bytes[7] = 8;
        bytes
    };
    let (stored, copied) = (long(fixture.request(15)), long(fixture.signaled(15)));
    fixture.store(15, &stored);
    fixture.record(17);
    fixture.copy(SEND, &copied);
    fixture.driver.run();
    assert_eq!(fixture.completed(), [15]);
    let after = fixture.signaled(17);
    fixture.execute(17, &after);
    assert_eq!(fixture.completed(), [15, 17]);
}

#[test]
fn a_reset_forgets_doorbells_and_copies() {
    let mut fixture = Fixture::new();
    fixture.post(0, &[Request, Record]);
    let request = fixture.signaled(0);
    fixture.copy(SEND, &request);
    let peer = fixture.queue.number + 1;
    fixture.driver.reconnect(&mut fixture.queue, peer).unwrap();
    fixture.store(0, &request);
    fixture.record(1);
    fixture.driver.run();
    assert!(fixture.completed().is_empty(), "executed before its doorbell");
    fixture.post(0, &[Request]);
    let next = fixture.signaled(1);
    fixture.execute(1, &next);
    assert_eq!(fixture.completed(), [1]);
}

#[test]
fn a_wqe_whose_doorbell_comes_in_error_state_is_flushed() {
    let mut fixture = Fixture::new();
    fixture.post(0, &[Request, Record]);
    fixture.driver.modify(opcode::TO_ERR_QP, &fixture.queue, 0, &[]).unwrap();
    fixture.driver.run();
    assert_eq!(fixture.driver.cqe(fixture.cqes, 0).0, 0xf, "flushed before its doorbell");
    let request = fixture.request(0);
    fixture.ring(&request);
    fixture.driver.run();
    assert_eq!(fixture.driver.cqe(fixture.cqes, 0).0, 0xd);
}

/// The driver resets the queue while the device still waits for the rest of a BlueFlame copy, and then
/// clears the doorbell record.
#[test]
fn a_doorbell_before_a_command_is_rung_before_it() {
    let mut fixture = Fixture::new();
    fixture.post(0, &[Request, Record]);
    let request = fixture.request(0);
    fixture.write(SEND, &request[..8]);
    fixture.driver.modify(opcode::TO_RST_QP, &fixture.queue, 0, &[]).unwrap();
    fixture.driver.memory().write(fixture.queue.record + 4, &[0; 4]).unwrap();
    fixture.driver.fabric.function(0).device_mut().flush_gathered_writes();
    assert_eq!(fixture.errors(), DoorbellErrors::default());
}

#[test]
fn a_doorbell_before_its_doorbell_record_counts_as_record_behind() {
    for ring in [Doorbell, BlueFlame] {
        let mut fixture = Fixture::new();
        fixture.post(0, &[Request, ring, Record]);
        assert_eq!(
            fixture.errors(),
            DoorbellErrors { record_behind: 1, ..DoorbellErrors::default() }
        );
    }
}

#[test]
fn a_doorbell_before_its_wqe_counts_as_differs() {
    for ring in [Doorbell, BlueFlame] {
        let mut fixture = Fixture::new();
        // An empty queue looks like a NOP with index zero, so test with the second WQE.
        fixture.post(0, &[Request, Record, Doorbell]);
        fixture.driver.run();
        fixture.post(1, &[Record, ring, Request]);
        assert_eq!(fixture.errors(), DoorbellErrors { differs: 1, ..DoorbellErrors::default() });
    }
}

#[test]
fn a_blueflame_copy_that_differs_from_the_wqe_counts_as_differs() {
    let mut fixture = Fixture::new();
    fixture.post(0, &[Request, Record]);
    let mut request = fixture.request(0);
    request[40] = 1;
    fixture.copy(SEND, &request);
    assert_eq!(fixture.errors(), DoorbellErrors { differs: 1, ..DoorbellErrors::default() });
}

#[test]
fn interleaved_blueflame_copies_count_as_torn() {
    let mut fixture = Fixture::new();
    fixture.post(0, &[Request, Record]);
    fixture.post(1, &[Request, Record]);
    let (a, b) = (fixture.request(0), fixture.request(1));
    for word in 0..8 {
        let (at, part) = (word * 8, word as usize * 8..word as usize * 8 + 8);
        fixture.write(SEND + at, &a[part.clone()]);
        fixture.write(SEND + BUFFER + at, &b[part]);
    }
    fixture.driver.fabric.function(0).device_mut().flush_gathered_writes();
    assert!(fixture.errors().torn > 0, "{:?}", fixture.errors());
}

#[test]
fn an_arm_word_missing_in_its_doorbell_record_counts_as_record_behind() {
    let mut fixture = Fixture::new();
    fixture.arm(0x1000_0001, 0);
    assert_eq!(fixture.errors(), DoorbellErrors { record_behind: 1, ..DoorbellErrors::default() });
}

#[test]
fn doorbells_of_unknown_queues_count_as_stray() {
    let mut fixture = Fixture::new();
    fixture.write(SEND, &[0, 0, 0, 0, 0x7f, 0xff, 0xff, 1]);
    fixture.driver.fabric.function(0).device_mut().flush_gathered_writes();
    fixture.write(0x20, &[0, 0, 0, 0, 0, 0x7f, 0xff, 0xff]);
    fixture.write(0x60, &[0; 8]);
    assert_eq!(fixture.errors(), DoorbellErrors { stray: 3, ..DoorbellErrors::default() });
}
