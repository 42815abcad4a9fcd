//! Data of packets that reaches memory late, in any order: it is there when the specification promises it, and never after
//! its key.

mod driver;

use driver::pair::Pair;
use driver::pair::code::*;
use uverbs_uapi::mlx5::prm::mkc::mkc;
use uverbs_uapi::mlx5::prm::opcode;

/// Bytes of a message: two packets.
const LONG: usize = 2048;
const LATER: u8 = 0xee;

fn data() -> Vec<u8> {
    (0..LONG).map(|at| (at % 200) as u8 + 1).collect()
}

/// A pair on a bus that takes its time, with data to send.
fn pair() -> Pair {
    let mut p = Pair::new();
    p.driver.fabric.function(0).device_mut().write_in_any_order();
    let from = p.from;
    p.driver.memory().write(from, &data()).unwrap();
    p
}

fn read(p: &mut Pair, at: u64) -> Vec<u8> {
    let mut bytes = vec![0; LONG];
    p.driver.memory().read(at, &mut bytes).unwrap();
    bytes
}

/// Steps until a CQ has its first CQE. What is written is the last of all things that can be done.
fn step_to_cqe(p: &mut Pair, cq: u64) -> u8 {
    while p.driver.cqe(cq, 0).0 == NONE {
        assert!(p.driver.fabric.ready() > 0, "nothing to do");
        p.driver.fabric.run_ready(0);
    }
    p.driver.cqe(cq, 0).0
}

#[test]
fn a_message_is_in_memory_before_its_receive_completes() {
    let mut p = pair();
    p.receive(LONG as u32);
    let segment = p.local(LONG as u32);
    p.driver.queue_send(&mut p.a, SEND, 0, &segment);
    let received = p.received;
    assert_eq!(step_to_cqe(&mut p, received), RECEIVED);
    let to = p.to;
    assert!(read(&mut p, to) == data());
}

#[test]
fn a_write_is_in_memory_before_the_peer_knows() {
    let mut p = pair();
    let to = p.to;
    let segments = [Pair::remote(to, p.key), p.local(LONG as u32)].concat();
    p.driver.queue_send(&mut p.a, WRITE, 0, &segments);
    let sent = p.sent;
    assert_eq!(step_to_cqe(&mut p, sent), REQUEST);
    assert!(read(&mut p, to) == data());
}

#[test]
fn the_data_of_a_read_is_in_memory_before_its_completion() {
    let mut p = pair();
    let (from, to) = (p.from, p.to);
    let segments =
        [Pair::remote(from, p.key), driver::Driver::segment(LONG as u32, p.key, to)].concat();
    p.driver.queue_send(&mut p.a, READ, 0, &segments);
    let sent = p.sent;
    assert_eq!(step_to_cqe(&mut p, sent), REQUEST);
    assert!(read(&mut p, to) == data());
}

/// Neither the read nor the atomic waits for an ACK of the write.
#[test]
fn reads_and_atomics_see_the_writes_before_them() {
    for code in [READ, FETCH_ADD] {
        let mut p = pair();
        let (to, back) = (p.to, p.from + 3000);
        let segments = [Pair::remote(to, p.key), p.local(LONG as u32)].concat();
        p.driver.queue_send(&mut p.a, WRITE, 0, &segments);
        let local = driver::Driver::segment(8, p.key, back);
        let change = if code == READ { vec![] } else { vec![0; 16] };
        let segments = [Pair::remote(to, p.key), change, local].concat();
        p.driver.queue_send(&mut p.a, code, 0, &segments);
        p.driver.run();
        let mut got: [u8; 8] = p.bytes(back);
        if code == FETCH_ADD {
            // Memory has the word in host order.
            let word: [u8; 8] = data()[..8].try_into().unwrap();
            assert!(
                got == word || {
                    got.reverse();
                    got == word
                },
                "{got:x?}"
            );
        } else {
            assert_eq!(got, data()[..8]);
        }
    }
}

/// At each moment of a write: once the key is destroyed, memory changes no more.
#[test]
fn nothing_is_written_after_a_key_is_destroyed() {
    for steps in 0.. {
        let mut p = pair();
        let to = p.to;
        let key = p.driver.mkey(to, 4096, &[mkc::rw]);
        let segments = [Pair::remote(to, key), p.local(LONG as u32)].concat();
        p.driver.queue_send(&mut p.a, WRITE, 0, &segments);
        for _ in 0..steps {
            p.driver.fabric.run_ready(0);
        }
        if p.driver.cqe(p.sent, 0).0 != NONE {
            assert!(steps > 3, "{steps}");
            return;
        }
        p.driver.run_command_on(opcode::DESTROY_MKEY, key >> 8).unwrap();
        p.driver.memory().write(to, &[LATER; LONG]).unwrap();
        p.driver.run();
        assert!(read(&mut p, to) == [LATER; LONG], "{steps}");
    }
}

/// Writes wait where the caller of the fabric chooses what is next, and not after [`Fabric::run`].
///
/// [`Fabric::run`]: uverbs_connectx::fabric::Fabric::run
#[test]
fn pieces_of_a_message_are_things_to_choose() {
    let mut p = pair();
    let to = p.to;
    let segments = [Pair::remote(to, p.key), p.local(64)].concat();
    p.driver.queue_send(&mut p.a, WRITE, 0, &segments);
    // The WQE is fetched, the packet leaves and arrives.
    while p.driver.fabric.ready() < 9 {
        p.driver.fabric.run_ready(0);
    }
    assert_eq!(p.bytes(to), [0; 64]);
    // An ACK may be sent, and any of eight words may be written: here the last one.
    assert!(p.driver.fabric.run_ready(8));
    assert_eq!(p.bytes(to), [0; 56]);
    assert_eq!(p.bytes::<8>(to + 56), data()[56..64]);
    p.driver.run();
    assert_eq!(p.bytes::<64>(to), data()[..64]);
}
