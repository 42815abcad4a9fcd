//! Injected faults, in plain memory.

mod driver;

use driver::pair::Pair;
use driver::pair::code::*;
use uverbs_connectx::fault::{CommandFailure, Delay, InjectedFaults, Side};
use uverbs_connectx::format::syndrome::CqeError;
use uverbs_connectx::function::{Function, Region};
use uverbs_uapi::mlx5::prm::opcode;

/// Two connected queue pairs.
struct Fixture(Pair);

impl Fixture {
    fn new() -> Self {
        Self(Pair::new())
    }

    fn function(&mut self) -> &mut Function {
        self.0.driver.fabric.function(0)
    }

    fn faults(&mut self) -> &mut InjectedFaults {
        self.function().device_mut().faults_mut()
    }

    /// The number of objects of all kinds.
    fn objects(&mut self) -> usize {
        self.function().device().objects().counts().iter().map(|(_, count)| count).sum()
    }

    /// Sends from the first queue pair to the second, and runs the device until it is idle.
    fn send(&mut self) {
        self.0.receive(8);
        self.0.send(8);
    }
}

#[test]
fn the_nth_send_fails_with_the_given_syndromes() {
    let mut fixture = Fixture::new();
    let qpn = Some(fixture.0.a.number);
    let error = CqeError { syndrome: 0x22, vendor: 0x99 };
    fixture.faults().fail_wqe(qpn, Side::Send, 1, error);
    for _ in 0..3 {
        fixture.send();
    }
    assert_eq!(fixture.0.driver.cqe(fixture.0.sent, 0).0, REQUEST);
    let (code, cqe) = fixture.0.driver.cqe(fixture.0.sent, 1);
    assert_eq!((code, cqe[54], cqe[55]), (REQUEST_ERROR, 0x99, 0x22));
    // The queue pair is in error, and the message was never sent.
    let (code, cqe) = fixture.0.driver.cqe(fixture.0.sent, 2);
    assert_eq!((code, cqe[55]), (REQUEST_ERROR, 0x05));
    assert_eq!(fixture.0.driver.cqe(fixture.0.received, 0).0, RECEIVED);
    assert_eq!(fixture.0.driver.cqe(fixture.0.received, 1).0, NONE);
}

#[test]
fn a_receive_fails_with_the_given_syndromes() {
    let mut fixture = Fixture::new();
    let qpn = Some(fixture.0.b.number);
    let error = CqeError { syndrome: 0x04, vendor: 0x51 };
    fixture.faults().fail_wqe(qpn, Side::Receive, 0, error);
    fixture.send();
    let (code, cqe) = fixture.0.driver.cqe(fixture.0.received, 0);
    assert_eq!((code, cqe[54], cqe[55]), (RECEIVE_ERROR, 0x51, 0x04));
    let (code, cqe) = fixture.0.driver.cqe(fixture.0.sent, 0);
    assert_eq!((code, cqe[55]), (REQUEST_ERROR, 0x14));
}

#[test]
fn a_delayed_message_arrives_after_its_delay() {
    let mut fixture = Fixture::new();
    // 67 ms, so that it is not sent again meanwhile.
    fixture.0.driver.ack_timeout = 14;
    let (a, peer) = (&mut fixture.0.a, fixture.0.b.number);
    fixture.0.driver.reconnect(a, peer).unwrap();
    fixture.faults().delay_messages(1, Delay::Time(5_000_000));
    let before = fixture.0.driver.now();
    fixture.send();
    assert_eq!(fixture.0.driver.cqe(fixture.0.received, 0).0, RECEIVED);
    assert_eq!(fixture.0.driver.now() - before, 5_000_000);
    let before = fixture.0.driver.now();
    fixture.send();
    assert_eq!(fixture.0.driver.cqe(fixture.0.received, 1).0, RECEIVED);
    assert_eq!(fixture.0.driver.now(), before);
}

/// An ACK timeout of 67 ms, and seven retries.
const ALL_RETRIES: u64 = 8 * (4_096 << 14);

#[test]
fn a_late_message_is_sent_again_and_both_arrive() {
    let mut fixture = Fixture::new();
    fixture.0.driver.ack_timeout = 14;
    let (a, peer) = (&mut fixture.0.a, fixture.0.b.number);
    fixture.0.driver.reconnect(a, peer).unwrap();
    fixture.faults().delay_messages(1, Delay::Time(2 * ALL_RETRIES));
    let before = fixture.0.driver.now();
    fixture.send();
    fixture.send();
    assert_eq!(fixture.0.driver.cqe(fixture.0.sent, 1).0, REQUEST);
    assert_eq!(fixture.0.driver.cqe(fixture.0.received, 1).0, RECEIVED);
    // The one that was late is a duplicate, for which there is no receive.
    assert_eq!(fixture.0.driver.now() - before, 2 * ALL_RETRIES);
    fixture.send();
    assert_eq!(fixture.0.driver.cqe(fixture.0.received, 2).0, RECEIVED);
    assert_eq!(fixture.0.driver.cqe(fixture.0.received, 3).0, NONE);
}

#[test]
fn the_retries_run_out_if_each_of_them_is_late() {
    let mut fixture = Fixture::new();
    fixture.0.driver.ack_timeout = 14;
    let (a, peer) = (&mut fixture.0.a, fixture.0.b.number);
    fixture.0.driver.reconnect(a, peer).unwrap();
    fixture.faults().delay_messages(8, Delay::Time(2 * ALL_RETRIES));
    fixture.send();
    let (code, cqe) = fixture.0.driver.cqe(fixture.0.sent, 0);
    assert_eq!((code, cqe[55]), (REQUEST_ERROR, 0x15));
}

#[test]
fn flap_link_changes_the_link_each_time() {
    let mut fixture = Fixture::new();
    let start = fixture.0.driver.now();
    fixture.faults().flap_link(start, 2, 1_000, 1_000);
    assert!(fixture.0.driver.fabric.deadline() == Some(start));
    let mut states = Vec::new();
    while let Some(due) = fixture.0.driver.fabric.deadline() {
        fixture.0.driver.fabric.poll(due);
        let device = fixture.0.driver.fabric.function(0).device();
        states.push((due - start, device.link_up()));
    }
    assert_eq!(states, [(0, false), (1_000, true), (2_000, false), (3_000, true)]);
}

#[test]
fn a_silenced_command_keeps_its_slot_and_the_next_one_completes() {
    let mut fixture = Fixture::new();
    let opcode = opcode::ALLOC_PD;
    fixture.faults().fail_command(opcode, 1, CommandFailure::Silence);
    fixture.0.driver.run_command(opcode, &[0; 16]).unwrap();
    let mut slot = [0; 64];
    slot[0] = 7;
    slot[7] = 16;
    slot[16..18].copy_from_slice(&opcode.to_be_bytes());
    slot[59] = 16;
    slot[63] = 1;
    fixture.0.driver.ring_slot(&slot);
    assert_eq!(fixture.0.driver.slot_bytes(), slot);
    fixture.0.driver.run_command(opcode, &[0; 16]).unwrap();
}

#[test]
fn a_removed_function_reads_ones_until_it_is_inserted() {
    let mut fixture = Fixture::new();
    fixture.function().remove();
    let read = |fixture: &mut Fixture, region, offset| {
        let mut bytes = [0; 4];
        fixture.0.driver.fabric.function(0).read(region, offset, &mut bytes);
        bytes
    };
    assert_eq!(read(&mut fixture, Region::Config, 0), [0xff; 4]);
    assert_eq!(read(&mut fixture, Region::Bar0, 0), [0xff; 4]);
    fixture.0.driver.fabric.function(0).write(Region::Bar0, 0x14, &0x1000u32.to_be_bytes());
    fixture.0.driver.fabric.function(0).reset();
    assert_eq!(read(&mut fixture, Region::Bar0, 0x14), [0xff; 4]);
    assert_eq!(fixture.objects(), 0);
    fixture.function().insert();
    assert_eq!(read(&mut fixture, Region::Config, 0), [0xb3, 0x15, 0x17, 0x10]);
    assert_eq!(read(&mut fixture, Region::Bar0, 0x14)[2] & 7, 0);
    fixture.function().remove();
    assert_eq!(read(&mut fixture, Region::Config, 0), [0xff; 4]);
    fixture.0.driver.fabric.function(0).restart();
    assert_eq!(read(&mut fixture, Region::Config, 0), [0xb3, 0x15, 0x17, 0x10]);
}

#[test]
fn a_fatal_health_syndrome_is_cleared_by_the_reset() {
    let mut fixture = Fixture::new();
    let word = |fixture: &mut Fixture, offset| {
        let mut bytes = [0; 4];
        fixture.0.driver.fabric.function(0).read(Region::Bar0, offset, &mut bytes);
        u32::from_be_bytes(bytes)
    };
    fixture.function().device_mut().init_segment_mut().set_health(0x7, true);
    assert_eq!((word(&mut fixture, 0x238) >> 31, word(&mut fixture, 0x23c)), (1, 0x7_0000));
    assert_eq!(word(&mut fixture, 0x1fc) >> 30, 1);
    // The NIC interface state beside the address of the command queue: software reset.
    fixture.0.driver.fabric.function(0).write(Region::Bar0, 0x14, &0x1700u32.to_be_bytes());
    assert_eq!((word(&mut fixture, 0x238), word(&mut fixture, 0x23c)), (0, 0));
    assert_eq!(word(&mut fixture, 0x14) >> 8 & 7, 1);
    assert_eq!(fixture.objects(), 0);
}
