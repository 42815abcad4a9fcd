//! Reliable connections in plain memory: messages that succeed, and errors.

mod driver;

use driver::Driver;
use driver::pair::Pair;
use driver::pair::code::*;
use uverbs_connectx::fault::CommandFailure;
use uverbs_uapi::mlx5::prm::cqc::cqc;
use uverbs_uapi::mlx5::prm::mkc::mkc;
use uverbs_uapi::mlx5::prm::opcode;
use uverbs_uapi::mlx5::prm::qpc::qpc;

#[test]
fn a_send_is_received_and_completes_on_both_sides() {
    let mut p = Pair::new();
    p.driver.memory().write(p.from, b"hello, device").unwrap();
    p.receive(100);
    p.send(13);
    let mut data = [0; 13];
    p.driver.memory().read(p.to, &mut data).unwrap();
    assert_eq!(&data, b"hello, device");
    assert_eq!(p.driver.cqe(p.sent, 0).0, REQUEST);
    let (code, cqe) = p.driver.cqe(p.received, 0);
    assert_eq!((code, &cqe[44..48]), (RECEIVED, &13u32.to_be_bytes()[..]));
    assert_eq!(p.driver.cqe(p.received, 1).0, NONE);
}

#[test]
fn write_atomic_and_read_change_and_return_memory() {
    let mut p = Pair::new();
    p.driver.memory().write(p.from, &5u64.to_le_bytes()).unwrap();
    let local = p.local(8);
    p.driver.post_send(&mut p.a, WRITE, 0, &[Pair::remote(p.to, p.key), local.clone()].concat());
    let add = [7u64.to_be_bytes(), [0; 8]].concat();
    let segments = [Pair::remote(p.to, p.key), add, local.clone()].concat();
    p.driver.post_send(&mut p.a, FETCH_ADD, 0, &segments);
    let mut old = [0; 8];
    p.driver.memory().read(p.from, &mut old).unwrap();
    assert_eq!(u64::from_le_bytes(old), 5);
    p.driver.post_send(&mut p.a, READ, 0, &[Pair::remote(p.to, p.key), local].concat());
    p.driver.memory().read(p.from, &mut old).unwrap();
    assert_eq!(u64::from_le_bytes(old), 12);
    for index in 0..3 {
        assert_eq!(p.driver.cqe(p.sent, index).0, REQUEST);
    }
}

/// Payloads that are long enough stay in memory until their packets arrive.
#[test]
fn long_messages_arrive_whole_whatever_their_alignment() {
    for (start, len) in [(0, 4096), (1, 3000), (7, 1023), (12, 2049), (3, 512)] {
        let mut p = Pair::new();
        let data: Vec<u8> = (0..len).map(|at| (at * 7 + at / 251) as u8).collect();
        // The pages are neighbours.
        let room = p.driver.alloc_page();
        let key = p.driver.mkey(p.from, 3 * 4096, &[mkc::lr, mkc::lw, mkc::rr, mkc::rw]);
        assert_eq!(room, p.from + 2 * 4096);
        let (from, to) = (p.from + start, p.from + 8192 - start);
        p.driver.memory().write(from, &data).unwrap();
        let local = Driver::segment(len, key, from);
        p.driver.post_send(&mut p.a, WRITE, 0, &[Pair::remote(to, key), local.clone()].concat());
        let mut back = vec![0; data.len()];
        p.driver.memory().read(to, &mut back).unwrap();
        assert_eq!(back, data);
        p.driver.memory().write(from, &vec![0; data.len()]).unwrap();
        p.driver.post_send(&mut p.a, READ, 0, &[Pair::remote(to, key), local.clone()].concat());
        p.driver.memory().read(from, &mut back).unwrap();
        assert_eq!(back, data);
        let receive = Driver::segment(len, key, to);
        p.driver.memory().write(to, &vec![0; data.len()]).unwrap();
        p.driver.post_receive(&mut p.b, &receive);
        p.driver.post_send(&mut p.a, SEND, 0, &local);
        p.driver.memory().read(to, &mut back).unwrap();
        assert_eq!(back, data);
    }
}

#[test]
fn the_old_value_of_an_atomic_has_the_endianness_of_the_capability() {
    for host_order in [true, false] {
        let mut p = Pair::new();
        p.driver.host_order_atomics(host_order);
        p.driver.memory().write(p.to, &5u64.to_le_bytes()).unwrap();
        let add = [7u64.to_be_bytes(), [0; 8]].concat();
        let segments = [Pair::remote(p.to, p.key), add, p.local(8)].concat();
        p.driver.post_send(&mut p.a, FETCH_ADD, 0, &segments);
        let old = if host_order { 5u64.to_le_bytes() } else { 5u64.to_be_bytes() };
        assert_eq!(p.bytes(p.from), old);
        assert_eq!(p.bytes(p.to), 12u64.to_le_bytes());
    }
}

#[test]
fn without_data_the_rkey_is_not_checked() {
    for op in [WRITE, READ] {
        let mut p = Pair::new();
        let remote = Pair::remote(0, p.key ^ 1);
        p.driver.post_send(&mut p.a, op, 0, &remote);
        assert_eq!(p.driver.cqe(p.sent, 0).0, REQUEST, "{op:#x}");
    }
}

#[test]
fn init2rtr_needs_a_valid_path_mtu() {
    const BAD_PARAMETER: u8 = 0x03;
    let mut p = Pair::new();
    for mtu in [0, 6, 7, 5] {
        p.driver.modify(opcode::TO_RST_QP, &p.a, 0, &[]).unwrap();
        p.driver.modify(opcode::RST2INIT_QP, &p.a, 0, &[]).unwrap();
        let end = p.driver.modify(opcode::INIT2RTR_QP, &p.a, p.b.number, &[(qpc::mtu, mtu)]);
        let status = end.err().map_or(0, |refused| refused.0);
        assert_eq!(status, if mtu == 5 { 0 } else { BAD_PARAMETER }, "{mtu}");
    }
}

/// Syndrome of the CQE of an RDMA write with this remote address and key.
fn syndrome(key_of: impl Fn(&mut Pair) -> (u64, u32)) -> u8 {
    let mut p = Pair::new();
    let (address, key) = key_of(&mut p);
    p.driver.memory().write(p.to, &[0xaa; 8]).unwrap();
    let segments = [Pair::remote(address, key), p.local(8)].concat();
    p.driver.post_send(&mut p.a, WRITE, 0, &segments);
    let mut untouched = [0; 8];
    p.driver.memory().read(p.to, &mut untouched).unwrap();
    assert_eq!(untouched, [0xaa; 8]);
    let (code, cqe) = p.driver.cqe(p.sent, 0);
    assert_eq!(code, REQUEST_ERROR);
    // The queue pair is in error, so the next WQE is flushed.
    p.send(8);
    let (code, next) = p.driver.cqe(p.sent, 1);
    assert_eq!((code, next[55]), (REQUEST_ERROR, 0x05));
    cqe[55]
}

#[test]
fn a_write_with_a_wrong_rkey_range_right_or_pd_fails() {
    const REMOTE_ACCESS: u8 = 0x13;
    assert_eq!(syndrome(|p| (p.to, p.key ^ 1)), REMOTE_ACCESS);
    assert_eq!(syndrome(|p| (p.to, p.key + 0x100)), REMOTE_ACCESS);
    assert_eq!(syndrome(|p| (p.to + 4089, p.key)), REMOTE_ACCESS);
    assert_eq!(syndrome(|p| (p.from - 1, p.key)), REMOTE_ACCESS);
    assert_eq!(syndrome(|p| (p.to, p.driver.mkey(p.to, 64, &[mkc::lw, mkc::rr]))), REMOTE_ACCESS);
    let other_domain = |p: &mut Pair| {
        let own = p.driver.pd;
        p.driver.run_command(opcode::ALLOC_PD, &[0; 16]).unwrap();
        p.driver.pd = own + 1;
        (p.to, p.driver.mkey(p.to, 64, &[mkc::lw, mkc::rw]))
    };
    assert_eq!(syndrome(other_domain), REMOTE_ACCESS);
}

#[test]
fn rnr_retries_run_out_with_the_rnr_syndrome() {
    let mut p = Pair::new();
    p.send(8);
    let (code, cqe) = p.driver.cqe(p.sent, 0);
    assert_eq!((code, cqe[55]), (REQUEST_ERROR, 0x16));
}

/// Doorbells meanwhile must neither cause a retry nor use one up.
#[test]
fn doorbells_do_not_shorten_the_rnr_timer() {
    let mut p = Pair::new();
    p.driver.modify(opcode::TO_RST_QP, &p.b, 0, &[]).unwrap();
    p.driver.modify(opcode::RST2INIT_QP, &p.b, 0, &[]).unwrap();
    // The longest timer, code 0: 655 ms.
    let fields = [(qpc::mtu, 3), (qpc::min_rnr_nak, 0)];
    p.driver.modify(opcode::INIT2RTR_QP, &p.b, p.a.number, &fields).unwrap();
    let local = p.local(8);
    for _ in 0..8 {
        p.driver.ring_send(&mut p.a, SEND, 0, &local);
    }
    p.driver.modify(opcode::RTS2RTS_QP, &p.a, 0, &[]).unwrap();
    p.driver.run_now();
    assert_eq!(p.driver.fabric.deadline(), Some(655_360_000));
    assert_eq!(p.driver.cqe(p.sent, 0).0, NONE);
    (0..8).for_each(|_| p.receive(100));
    p.driver.run();
    // One retry was enough.
    assert_eq!(p.driver.now(), 655_360_000);
    assert!((0..8).all(|index| p.driver.cqe(p.sent, index).0 == REQUEST));
}

/// An unreliable queue pair gets no response, so it continues with the next WQE.
#[test]
fn uc_does_not_retry() {
    const UC: u64 = 1;
    let mut p = Pair::new();
    let mut one = p.driver.qp(UC, p.send_cq);
    let other = p.driver.qp(UC, p.receive_cq);
    p.driver.connect(&one, &other);
    let local = p.local(8);
    (0..3).for_each(|_| p.driver.queue_send(&mut one, SEND, 0, &local));
    p.driver.run_now();
    assert!((0..3).all(|index| p.driver.cqe(p.sent, index).0 == REQUEST));
}

/// No NAK tells the sender of it.
#[test]
fn a_refused_write_of_uc_moves_the_receiver_to_error() {
    const UC: u64 = 1;
    const WQ_ACCESS_ERROR: u8 = 0x11;
    let mut p = Pair::new();
    let mut one = p.driver.qp(UC, p.send_cq);
    let mut other = p.driver.qp(UC, p.receive_cq);
    p.driver.connect(&one, &other);
    p.driver.connect(&other, &one);
    let local = p.local(8);
    p.driver.post_receive(&mut other, &local);
    let segments = [Pair::remote(p.to, p.key ^ 1), local].concat();
    p.driver.post_send(&mut one, WRITE, 0, &segments);
    assert_eq!(p.driver.cqe(p.sent, 0).0, REQUEST);
    let (code, cqe) = p.driver.cqe(p.received, 0);
    assert_eq!((code, cqe[55]), (RECEIVE_ERROR, 0x05));
    let event: [u8; 64] = p.bytes(p.events);
    let number = u32::from_be_bytes(event[56..60].try_into().unwrap());
    assert_eq!((event[1], number), (WQ_ACCESS_ERROR, other.number));
}

/// A program that drains a queue posts such a receive, without ringing a doorbell.
#[test]
fn a_receive_posted_in_error_state_is_flushed() {
    let mut p = Pair::new();
    p.driver.modify(opcode::TO_ERR_QP, &p.b, 0, &[]).unwrap();
    p.driver.run_now();
    let local = p.local(8);
    p.driver.post_receive(&mut p.b, &local);
    assert_eq!(p.driver.cqe(p.received, 0).0, NONE);
    p.driver.run();
    let (_, cqe) = p.driver.cqe(p.received, 0);
    assert_eq!(cqe[55], 0x05);
    assert_eq!(p.driver.fabric.deadline(), None, "it does not look for ever");
}

/// Each kind of retry happens three times here, which is within its own limit.
#[test]
fn rnr_and_timeout_retries_are_counted_apart() {
    let mut p = Pair::new();
    for fate in ["lost", "not ready", "lost", "not ready", "lost"] {
        let count = u32::from(fate == "lost");
        p.driver.fabric.function(0).device_mut().faults_mut().lose_messages(count);
        match p.driver.fabric.deadline() {
            None => {
                let local = p.local(8);
                p.driver.ring_send(&mut p.a, SEND, 0, &local);
            }
            Some(due) => p.driver.run_at(due),
        }
        assert_eq!(p.driver.cqe(p.sent, 0).0, NONE, "{fate}");
    }
    p.receive(100);
    p.driver.run();
    assert_eq!(p.driver.cqe(p.sent, 0).0, REQUEST);
}

#[test]
fn an_ack_timeout_of_zero_never_expires() {
    let mut p = Pair::new();
    p.driver.ack_timeout = 0;
    let peer = p.b.number;
    p.driver.reconnect(&mut p.a, peer).unwrap();
    p.driver.fabric.function(0).device_mut().faults_mut().lose_messages(1);
    p.receive(100);
    p.send(13);
    assert_eq!(p.driver.fabric.deadline(), None);
    assert_eq!(p.driver.cqe(p.sent, 0).0, NONE);
    // Only its owner can end it.
    p.driver.modify(opcode::TO_ERR_QP, &p.a, 0, &[]).unwrap();
    p.driver.run();
    let (code, cqe) = p.driver.cqe(p.sent, 0);
    assert_eq!((code, cqe[55]), (REQUEST_ERROR, 0x05));
}

/// The packet behind a lost one tells the responder that one is missing, and its NAK the requester.
#[test]
fn the_next_message_repairs_a_loss_without_a_timeout() {
    let mut p = Pair::new();
    p.driver.ack_timeout = 0;
    let peer = p.b.number;
    p.driver.reconnect(&mut p.a, peer).unwrap();
    p.driver.fabric.function(0).device_mut().faults_mut().lose_messages(1);
    (0..2).for_each(|_| p.receive(100));
    p.send(13);
    assert_eq!(p.driver.cqe(p.received, 0).0, NONE);
    p.send(14);
    for (index, len) in [(0, 13u32), (1, 14)] {
        assert_eq!(p.driver.cqe(p.sent, index).0, REQUEST);
        let (code, cqe) = p.driver.cqe(p.received, index);
        assert_eq!((code, &cqe[44..48]), (RECEIVED, &len.to_be_bytes()[..]));
    }
}

#[test]
fn a_send_queue_outside_of_guest_memory_raises_an_event() {
    const WQ_CATASTROPHIC: u8 = 0x05;
    let mut p = Pair::new();
    let mut lost = p.driver.try_qp(0, 1 << 40, 0, p.send_cq, &[]).unwrap();
    p.driver.connect(&lost, &p.b);
    lost.sends = p.driver.alloc_page();
    p.driver.post_send(&mut lost, SEND, 0, &[0; 16]);
    let (code, cqe) = p.driver.cqe(p.sent, 0);
    assert_eq!((code, cqe[55]), (REQUEST_ERROR, 0x05));
    let event: [u8; 64] = p.bytes(p.events);
    let number = u32::from_be_bytes(event[56..60].try_into().unwrap());
    assert_eq!((event[1], number), (WQ_CATASTROPHIC, lost.number));
}

/// The peer learns which of its messages have a completion, and of the one that has none.
#[test]
fn messages_before_a_cq_overrun_are_acknowledged() {
    const REMOTE_OPERATION: u8 = 0x14;
    let mut p = Pair::new();
    p.driver.ack_timeout = 0;
    let (two, _) = p.driver.cq_with(p.eqn, &[(cqc::log_cq_size, 1)]);
    let mut b = p.driver.qp(0, two);
    p.driver.connect(&b, &p.a);
    p.driver.reconnect(&mut p.a, b.number).unwrap();
    let (room, local) = (Driver::segment(8, p.key, p.to), p.local(8));
    for _ in 0..3 {
        p.driver.post_receive(&mut b, &room);
        p.driver.queue_send(&mut p.a, SEND, 0, &local);
    }
    p.driver.run();
    let ends = [0, 1, 2].map(|index| p.driver.cqe(p.sent, index));
    assert_eq!(ends.map(|(code, _)| code), [REQUEST, REQUEST, REQUEST_ERROR]);
    assert_eq!(ends[2].1[55], REMOTE_OPERATION);
}

#[test]
fn a_message_longer_than_the_receive_fails_on_both_sides() {
    let mut p = Pair::new();
    p.receive(7);
    p.send(8);
    let (code, cqe) = p.driver.cqe(p.received, 0);
    assert_eq!((code, cqe[55]), (RECEIVE_ERROR, 0x01));
    let (code, cqe) = p.driver.cqe(p.sent, 0);
    assert_eq!((code, cqe[55]), (REQUEST_ERROR, 0x12));
}

/// The old buffer ends with a RESIZED CQE, and the next CQE has the next index in the new one.
#[test]
fn cq_resize_continues_in_the_new_buffer() {
    let mut p = Pair::new();
    p.receive(100);
    p.send(13);
    let new = p.driver.alloc_page();
    p.driver.memory().write(new, &[0xf1; 4096]).unwrap();
    p.driver.resize_cq(p.send_cq, 4, new).unwrap();
    assert_eq!(p.driver.cqe(p.sent, 1).0, RESIZED);
    p.receive(100);
    p.send(13);
    assert_eq!(p.driver.cqe(p.sent, 2).0, NONE);
    assert_eq!(p.driver.cqe(new, 1).0, NONE);
    assert_eq!(p.driver.cqe(new, 2).0, REQUEST);
}

#[test]
fn a_lost_message_is_retried_until_retry_count() {
    const RETRIES_EXCEEDED: u8 = 0x15;
    let mut p = Pair::new();
    for (lost, expected) in [(2, REQUEST), (4, REQUEST_ERROR)] {
        p.receive(100);
        p.driver.fabric.function(0).device_mut().faults_mut().lose_messages(lost);
        p.send(13);
        let (code, cqe) = p.driver.cqe(p.sent, u64::from(lost) / 4);
        assert_eq!(code, expected);
        assert_eq!(cqe[55] == RETRIES_EXCEEDED, expected == REQUEST_ERROR);
    }
    assert_eq!(p.driver.cqe(p.received, 0).0, RECEIVED);
    assert_eq!(p.driver.cqe(p.received, 1).0, NONE);
}

#[test]
fn fail_command_fails_the_nth_command() {
    let mut driver = Driver::new();
    let opcode = opcode::ALLOC_PD;
    let failure = CommandFailure::Status(0x08);
    driver.fabric.function(0).device_mut().faults_mut().fail_command(opcode, 1, failure);
    assert!(driver.run_command(opcode, &[0; 16]).is_ok());
    assert_eq!(driver.run_command(opcode, &[0; 16]).unwrap_err().0, 0x08);
    assert!(driver.run_command(opcode, &[0; 16]).is_ok());
}

/// An object that another one uses cannot be destroyed before that.
#[test]
fn objects_in_use_are_not_destroyed() {
    const RESOURCE_BUSY: u8 = 0x06;
    let mut p = Pair::new();
    // In an order in which they can be destroyed, each with the number of objects to destroy before
    // it.
    let objects = [
        (opcode::DESTROY_MKEY, p.key >> 8, 0),
        (opcode::DESTROY_QP, p.b.number, 0),
        (opcode::DESTROY_QP, p.a.number, 0),
        (opcode::DESTROY_CQ, p.receive_cq, 2),
        (opcode::DESTROY_CQ, p.send_cq, 3),
        (opcode::DEALLOC_PD, p.driver.pd, 3),
        (opcode::DESTROY_EQ, p.eqn, 5),
        (opcode::DEALLOC_UAR, p.driver.uar, 7),
    ];
    let destroy = |p: &mut Pair, destroy, number: u32| {
        p.driver.run_command_on(destroy, number).map_or_else(|refused| refused.0, |_| 0)
    };
    for gone in 0..objects.len() {
        for (op, number, _) in objects.iter().filter(|(.., before)| *before > gone) {
            assert_eq!(destroy(&mut p, *op, *number), RESOURCE_BUSY, "{op:#x} after {gone}");
        }
        let (op, number, _) = objects[gone];
        assert_eq!(destroy(&mut p, op, number), 0, "{op:#x}");
    }
}

#[test]
fn qp_transitions_out_of_order_are_refused() {
    const BAD_STATE: u8 = 0x10;
    let mut driver = Driver::new();
    let eqn = driver.eq();
    let (cqn, _) = driver.cq(eqn);
    let qp = driver.qp(0, cqn);
    assert_eq!(driver.modify(opcode::INIT2RTR_QP, &qp, 1, &[]).unwrap_err().0, BAD_STATE);
    driver.modify(opcode::RST2INIT_QP, &qp, 0, &[]).unwrap();
    assert_eq!(driver.modify(opcode::RTR2RTS_QP, &qp, 1, &[]).unwrap_err().0, BAD_STATE);
    driver.modify(opcode::TO_RST_QP, &qp, 0, &[]).unwrap();
    driver.modify(opcode::RST2INIT_QP, &qp, 0, &[]).unwrap();
}
