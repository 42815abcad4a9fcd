//! Raw packet queues in plain memory: how they fail and flush.

mod driver;

use driver::pair::code::{NONE, RECEIVE_ERROR, RECEIVED, REQUEST, REQUEST_ERROR};
use driver::{Driver, Queue};
use uverbs_uapi::mlx5::prm::cqc::cqc;
use uverbs_uapi::mlx5::prm::flow::{
    create_flow_group_in, create_flow_table_in, dest_format, flow_context, set_fte_in,
};
use uverbs_uapi::mlx5::prm::mkc::mkc;
use uverbs_uapi::mlx5::prm::rqc::{
    create_rq_in, create_rq_out, create_sq_in, create_sq_out, create_tir_in, create_tir_out,
    modify_rq_in, modify_sq_in, rqc, sqc, tirc,
};
use uverbs_uapi::mlx5::prm::srqc::wq;
use uverbs_uapi::mlx5::prm::{Bits, Layout, opcode};

const SEND: u8 = 0x0a;
const RESET: u64 = 0;
const READY: u64 = 1;
const ERROR: u64 = 3;

const OPERATION: u8 = 0x02;
const PROTECTION: u8 = 0x04;
const FLUSHED: u8 = 0x05;
const BAD_PARAMETER: u8 = 0x03;
const BAD_STATE: u8 = 0x09;

/// The event of a failed queue, and the queue types in it.
const WQ_CATASTROPHIC: u8 = 0x05;
const RECEIVE_QUEUE: u8 = 1;
const SEND_QUEUE: u8 = 2;

const CYCLIC: u64 = 1;
const FRAME: u32 = 64;

/// A raw send queue, and a raw receive queue for every frame.
struct Raw {
    driver: Driver,
    sq: Queue,
    rq: Queue,
    /// Buffers of the CQs.
    sent: u64,
    received: u64,
    events: u64,
    frame: u64,
    key: u32,
}

impl Raw {
    /// The buffer of the send queue is at this address, or in an own page.
    fn with(ring: Option<u64>, log_cq: u64) -> Self {
        let mut driver = Driver::new();
        let eqn = driver.eq();
        let events = driver.last_page();
        let (send_cq, sent) = driver.cq_with(eqn, &[(cqc::log_cq_size, log_cq)]);
        let (receive_cq, received) = driver.cq(eqn);
        let sq = send_queue(&mut driver, send_cq, ring);
        let rq = receive_queue(&mut driver, receive_cq);
        steer_all_to(&mut driver, rq.number);
        let frame = driver.alloc_page();
        driver.memory().write(frame, &[0xff; 12]).unwrap();
        let key = driver.mkey(frame, 8192, &[mkc::lr, mkc::lw]);
        let mut raw = Self { driver, sq, rq, sent, received, events, frame, key };
        raw.modify_sq(RESET, READY).unwrap();
        raw.modify_rq(RESET, READY).unwrap();
        raw
    }

    fn new() -> Self {
        Self::with(None, 6)
    }

    fn modify_sq(&mut self, from: u64, to: u64) -> Result<Vec<u8>, driver::CommandError> {
        let mut input = Bits::<modify_sq_in, _>::new(vec![0; modify_sq_in::SIZE]);
        input.set(modify_sq_in::sqn, self.sq.number.into());
        input.set(modify_sq_in::sq_state, from);
        input.sub_mut(modify_sq_in::ctx).set(sqc::state, to);
        self.driver.run_command(opcode::MODIFY_SQ, &input.into_inner())
    }

    fn modify_rq(&mut self, from: u64, to: u64) -> Result<Vec<u8>, driver::CommandError> {
        let mut input = Bits::<modify_rq_in, _>::new(vec![0; modify_rq_in::SIZE]);
        input.set(modify_rq_in::rqn, self.rq.number.into());
        input.set(modify_rq_in::rq_state, from);
        input.sub_mut(modify_rq_in::ctx).set(rqc::state, to);
        self.driver.run_command(opcode::MODIFY_RQ, &input.into_inner())
    }

    /// Sends a broadcast frame from memory with this mkey.
    fn send(&mut self, key: u32) {
        let head = [0; 16];
        let segment = Driver::segment(FRAME, key, self.frame);
        let segments = [&head[..], &segment].concat();
        self.driver.post_send(&mut self.sq, SEND, 0, &segments);
    }

    fn receive(&mut self, key: u32) {
        let segment = Driver::segment(FRAME, key, self.frame + 4096);
        self.driver.post_receive(&mut self.rq, &segment);
    }

    /// Opcode and syndrome of a CQE.
    fn cqe(&mut self, of: u64, index: u64) -> (u8, u8) {
        let (code, cqe) = self.driver.cqe(of, index);
        (code, if matches!(code, REQUEST_ERROR | RECEIVE_ERROR) { cqe[55] } else { 0 })
    }

    /// Queue type and number in the events of failed queues.
    fn failed_queues(&mut self) -> Vec<(u8, u32)> {
        let mut bytes = [0; 4096];
        let at = self.events;
        self.driver.memory().read(at, &mut bytes).unwrap();
        let failed_queues = bytes.chunks(64).filter(|eqe| eqe[1] == WQ_CATASTROPHIC);
        failed_queues.map(|e| (e[52], u32::from_be_bytes([e[56], e[57], e[58], e[59]]))).collect()
    }
}

/// A raw send queue of 16 WQEBBs.
fn send_queue(driver: &mut Driver, cqn: u32, ring: Option<u64>) -> Queue {
    let tisn = driver.tis();
    let (page, record) = (driver.alloc_page(), driver.alloc_page());
    let mut input = Bits::<create_sq_in, _>::new(vec![0; create_sq_in::SIZE]);
    let mut context = input.sub_mut(create_sq_in::ctx);
    context.set(sqc::cqn, cqn.into());
    context.set(sqc::tis_lst_sz, 1);
    context.set(sqc::tis_num_0, tisn.into());
    let mut queue = context.sub_mut(sqc::wq);
    queue.set(wq::wq_type, CYCLIC);
    queue.set(wq::log_wq_sz, 4);
    queue.set(wq::log_wq_stride, 6);
    queue.set(wq::pd, driver.pd.into());
    queue.set(wq::uar_page, driver.uar.into());
    queue.set(wq::dbr_addr, record);
    let mut input = input.into_inner();
    input.extend(ring.unwrap_or(page).to_be_bytes());
    let out = driver.run_command(opcode::CREATE_SQ, &input).unwrap();
    let number = Bits::<create_sq_out, _>::new(out).get32(create_sq_out::sqn);
    Queue::new(number, 0, page, record)
}

/// A raw receive queue of 16 receives with one SGE.
fn receive_queue(driver: &mut Driver, cqn: u32) -> Queue {
    let (page, record) = (driver.alloc_page(), driver.alloc_page());
    let mut input = Bits::<create_rq_in, _>::new(vec![0; create_rq_in::SIZE]);
    let mut context = input.sub_mut(create_rq_in::ctx);
    context.set(rqc::cqn, cqn.into());
    let mut queue = context.sub_mut(rqc::wq);
    queue.set(wq::wq_type, CYCLIC);
    queue.set(wq::log_wq_sz, 4);
    queue.set(wq::log_wq_stride, 4);
    queue.set(wq::pd, driver.pd.into());
    queue.set(wq::dbr_addr, record);
    let mut input = input.into_inner();
    input.extend(page.to_be_bytes());
    let out = driver.run_command(opcode::CREATE_RQ, &input).unwrap();
    let number = Bits::<create_rq_out, _>::new(out).get32(create_rq_out::rqn);
    Queue::new(number, page, 0, record)
}

/// Makes every frame go to a receive queue, with the same destination twice.
fn steer_all_to(driver: &mut Driver, rqn: u32) {
    const TO_TIR: u64 = 2;
    const DROP: u64 = 2;
    const FORWARD: u64 = 4;
    let mut input = Bits::<create_tir_in, _>::new(vec![0; create_tir_in::SIZE]);
    input.sub_mut(create_tir_in::ctx).set(tirc::inline_rqn, rqn.into());
    let out = driver.run_command(opcode::CREATE_TIR, &input.into_inner()).unwrap();
    let tirn = Bits::<create_tir_out, _>::new(out).get(create_tir_out::tirn);
    let table = driver.flow_table();
    let mut input = Bits::<set_fte_in, _>::new(vec![0; set_fte_in::SIZE]);
    input.set(set_fte_in::table_id, table);
    let mut context = input.sub_mut(set_fte_in::flow_context);
    context.set(flow_context::action, DROP);
    context.set(flow_context::destination_list_size, 2);
    let mut to = Bits::<dest_format, _>::new(vec![0; 8]);
    to.set(dest_format::destination_type, TO_TIR);
    to.set(dest_format::destination_id, tirn);
    let to = to.into_inner();
    let mut input = input.into_inner();
    input.extend([&to[..], &to[..]].concat());
    // An entry with destinations needs the action that forwards to them.
    let refused = driver.run_command(opcode::SET_FLOW_TABLE_ENTRY, &input).unwrap_err();
    assert_eq!(refused.0, BAD_PARAMETER);
    let mut input = Bits::<set_fte_in, _>::new(input);
    input.sub_mut(set_fte_in::flow_context).set(flow_context::action, FORWARD);
    driver.run_command(opcode::SET_FLOW_TABLE_ENTRY, &input.into_inner()).unwrap();
    driver.set_flow_root(table);
}

#[test]
fn a_frame_is_received_once() {
    let mut raw = Raw::new();
    raw.receive(raw.key);
    raw.receive(raw.key);
    raw.send(raw.key);
    assert_eq!(raw.cqe(raw.sent, 0), (REQUEST, 0));
    assert_eq!(raw.cqe(raw.received, 0), (RECEIVED, 0));
    // Two destinations lead there, but the frame arrives once.
    assert_eq!(raw.cqe(raw.received, 1).0, NONE);
    assert_eq!(raw.failed_queues(), []);
}

#[test]
fn flow_tables_that_are_not_modelled_are_refused() {
    let mut driver = Driver::new();
    for kind in 0..16 {
        let mut input = Bits::<create_flow_table_in, _>::new(vec![0; create_flow_table_in::SIZE]);
        input.set(create_flow_table_in::table_type, kind);
        let result = driver.run_command(opcode::CREATE_FLOW_TABLE, &input.into_inner());
        assert_eq!(result.err().map_or(0, |refused| refused.0) == 0, kind < 2, "type {kind}");
    }
    for kind in 0..2 {
        // Match fields: the destination MAC, then fields of tunnels and queues.
        for (at, accepted) in [(0x08, true), (0x40, false), (0x80, false), (0x1ff, false)] {
            let mut input =
                Bits::<create_flow_group_in, _>::new(vec![0; create_flow_group_in::SIZE]);
            input.set(create_flow_group_in::table_type, kind);
            input.set(create_flow_group_in::table_id, kind + 1);
            let mut input = input.into_inner();
            // Offset of the mask.
            input[0x40 + at] = 0xff;
            let end = driver.run_command(opcode::CREATE_FLOW_GROUP, &input);
            let status = end.err().map_or(0, |refused| refused.0);
            assert_eq!(status, if accepted { 0 } else { BAD_PARAMETER }, "type {kind}, {at:#x}");
        }
    }
    let mut input = Bits::<create_tir_in, _>::new(vec![0; create_tir_in::SIZE]);
    let mut context = input.sub_mut(create_tir_in::ctx);
    context.set(tirc::disp_type, 1);
    context.set(tirc::rx_hash_fn, 3);
    let refused = driver.run_command(opcode::CREATE_TIR, &input.into_inner()).unwrap_err();
    assert_eq!(refused.0, BAD_PARAMETER);
}

#[test]
fn a_failed_raw_send_reports_its_syndrome_and_flushes_the_rest() {
    for (wrong_key, cause) in [(true, PROTECTION), (false, OPERATION)] {
        let mut raw = Raw::new();
        if wrong_key {
            raw.send(raw.key ^ 1);
        } else {
            raw.driver.post_send(&mut raw.sq, 0x3f, 0, &[0; 16]);
        }
        raw.send(raw.key);
        raw.send(raw.key);
        assert_eq!(raw.cqe(raw.sent, 0), (REQUEST_ERROR, cause));
        assert_eq!(raw.cqe(raw.sent, 1), (REQUEST_ERROR, FLUSHED));
        assert_eq!(raw.cqe(raw.sent, 2), (REQUEST_ERROR, FLUSHED));
        assert_eq!(raw.cqe(raw.sent, 3).0, NONE);
    }
}

#[test]
fn a_failed_raw_receive_reports_its_syndrome_and_flushes_the_rest() {
    let mut raw = Raw::new();
    raw.receive(raw.key ^ 1);
    raw.receive(raw.key);
    raw.send(raw.key);
    assert_eq!(raw.cqe(raw.received, 0), (RECEIVE_ERROR, PROTECTION));
    assert_eq!(raw.cqe(raw.received, 1), (RECEIVE_ERROR, FLUSHED));
    assert_eq!(raw.cqe(raw.received, 2).0, NONE);
    // A failed queue has to be reset first.
    assert_eq!(raw.modify_rq(ERROR, READY).unwrap_err().0, BAD_STATE);
    raw.modify_rq(ERROR, RESET).unwrap();
    raw.modify_rq(RESET, READY).unwrap();
}

#[test]
fn raw_queues_in_error_state_flush() {
    let mut raw = Raw::new();
    raw.receive(raw.key);
    raw.modify_rq(READY, ERROR).unwrap();
    assert_eq!(raw.cqe(raw.received, 0), (RECEIVE_ERROR, FLUSHED));
    raw.modify_sq(READY, ERROR).unwrap();
    raw.send(raw.key);
    assert_eq!(raw.cqe(raw.sent, 0), (REQUEST_ERROR, FLUSHED));
    assert_eq!(raw.modify_sq(ERROR, READY).unwrap_err().0, BAD_STATE);
}

#[test]
fn a_doorbell_record_out_of_range_raises_an_event() {
    let mut raw = Raw::new();
    let record = raw.rq.record;
    raw.driver.memory().write(record, &1000u32.to_be_bytes()).unwrap();
    raw.send(raw.key);
    assert_eq!(raw.failed_queues(), [(RECEIVE_QUEUE, raw.rq.number)]);
    raw.sq.overstate_producer_index(999);
    raw.send(raw.key);
    let both = [(RECEIVE_QUEUE, raw.rq.number), (SEND_QUEUE, raw.sq.number)];
    assert_eq!(raw.failed_queues(), both);
}

#[test]
fn a_raw_send_queue_outside_of_guest_memory_raises_an_event() {
    let mut raw = Raw::with(Some(1 << 40), 6);
    raw.send(raw.key);
    assert_eq!(raw.failed_queues(), [(SEND_QUEUE, raw.sq.number)]);
    assert_eq!(raw.cqe(raw.sent, 0), (REQUEST_ERROR, FLUSHED));
}

#[test]
fn a_full_cq_stops_the_raw_queue() {
    let mut raw = Raw::with(None, 1);
    (0..3).for_each(|_| raw.send(raw.key));
    assert_eq!(raw.failed_queues(), [(SEND_QUEUE, raw.sq.number)]);
}
