//! Fairness: a poll ends after a certain cost, so that other guests need not wait.

mod driver;

use driver::Driver;
use driver::pair::{Pair, code};
use uverbs_uapi::mlx5::prm::mkc::mkc;
use uverbs_uapi::mlx5::prm::qpc::qpc;
use uverbs_uapi::mlx5::prm::{Field, opcode};

const KLMS: u64 = 2;
/// Entries of a list.
const ENTRIES: usize = 448;
/// WQEs to post.
const REQUESTS: u64 = 12;

/// A KLM list whose last `bytes` entries name one byte each; the other entries are empty.
fn list(driver: &mut Driver, bytes: usize, key: u32, address: u64) -> u32 {
    let rights: [(Field<mkc>, u64); 3] =
        [(mkc::access_mode_1_0, KLMS), (mkc::lr, 1), (mkc::len, bytes as u64)];
    let mut entries = vec![0; (ENTRIES - bytes) * 16];
    (0..bytes).for_each(|_| entries.extend(Driver::segment(1, key, address)));
    driver.mkey_with(&rights, &entries)
}

/// The segments of a write that looks at 448 times 448 entries of lists: five of them use up a poll.
fn costly_write(p: &mut Pair) -> Vec<u8> {
    let inner = list(&mut p.driver, 1, p.key, p.from);
    let outer = list(&mut p.driver, ENTRIES, inner, 0);
    [Pair::remote(p.to, p.key), Driver::segment(ENTRIES as u32, outer, 0)].concat()
}

#[test]
fn costly_wqes_end_a_poll_early() {
    let mut p = Pair::new();
    let write = costly_write(&mut p);
    for _ in 0..REQUESTS {
        p.driver.queue_send(&mut p.a, code::WRITE, 0, &write);
    }
    let now = p.driver.now();
    let mut turns = 1;
    let mut done = vec![];
    while p.driver.fabric.poll(now) {
        done.push((0..64).filter(|index| p.driver.cqe(p.sent, *index).0 == code::REQUEST).count());
        turns += 1;
    }
    assert!(turns > 1, "all in one turn");
    assert!(done[0] > 0 && done[0] < 8, "{} in the first turn", done[0]);
    for index in 0..REQUESTS {
        assert_eq!(p.driver.cqe(p.sent, index).0, code::REQUEST);
    }
}

/// Polls that end early leave no more packets on the link than one turn has sent.
#[test]
fn packets_do_not_pile_up_while_queues_wait() {
    const QUEUES: usize = 8;
    let mut p = Pair::new();
    let write = costly_write(&mut p);
    let mut queues: Vec<_> = (0..QUEUES).map(|_| p.driver.qp(0, p.send_cq)).collect();
    queues.iter().for_each(|queue| p.driver.connect(queue, queue));
    for _ in 0..6 {
        queues.iter_mut().for_each(|queue| p.driver.queue_send(queue, code::WRITE, 0, &write));
    }
    let mut most = 0;
    while p.driver.fabric.poll(0) {
        most = most.max(p.driver.fabric.ready());
    }
    // Each queue may be one that is served, and one that may send.
    assert!((QUEUES..=2 * QUEUES + 2).contains(&most), "{most} things");
    assert!((0..48).all(|index| p.driver.cqe(p.sent, index).0 == code::REQUEST));
}

/// An ACK is on its way when a poll ends, and the next poll is late.
#[test]
fn an_ack_that_has_come_counts_before_a_timeout() {
    let mut p = Pair::new();
    p.driver.modify(opcode::TO_RST_QP, &p.a, 0, &[]).unwrap();
    p.driver.modify(opcode::RST2INIT_QP, &p.a, 0, &[]).unwrap();
    p.driver.modify(opcode::INIT2RTR_QP, &p.a, p.b.number, &[(qpc::mtu, 3)]).unwrap();
    p.driver.modify(opcode::RTR2RTS_QP, &p.a, p.b.number, &[(qpc::retry_count, 0)]).unwrap();
    let write = costly_write(&mut p);
    (0..REQUESTS).for_each(|_| p.driver.queue_send(&mut p.a, code::WRITE, 0, &write));
    let mut now = 0;
    while p.driver.fabric.poll(now) {
        now += 1_000_000;
    }
    assert!(now > 0, "one poll");
    for index in 0..REQUESTS {
        assert_eq!(p.driver.cqe(p.sent, index).0, code::REQUEST, "{index}");
    }
}

/// The limit of a WQE's list entries is not that of many packets.
#[test]
fn costs_do_not_add_up_from_step_to_step() {
    let mut p = Pair::new();
    let write = costly_write(&mut p);
    for _ in 0..REQUESTS {
        p.driver.queue_send(&mut p.a, code::WRITE, 0, &write);
        p.driver.queue_send(&mut p.b, code::WRITE, 0, &write);
    }
    while p.driver.fabric.ready() > 0 {
        p.driver.fabric.run_ready(0);
    }
    for index in 0..REQUESTS {
        let codes = [p.sent, p.received].map(|cq| p.driver.cqe(cq, index).0);
        assert_eq!(codes, [code::REQUEST; 2], "{index}");
    }
}
