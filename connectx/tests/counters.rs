//! Counters of a port and its queue pairs, in plain memory.

mod driver;

use driver::{Driver, Queue};
use uverbs_uapi::mlx5::prm::mkc::mkc;
use uverbs_uapi::mlx5::prm::qpc::qpc;
use uverbs_uapi::mlx5::prm::vport::{
    alloc_q_counter_out, query_q_counter_in, query_q_counter_out as set, query_vport_counter_out,
    traffic_counter,
};
use uverbs_uapi::mlx5::prm::{Bits, Field, Layout, opcode};

const SEND: u8 = 0x0a;
const WRITE: u8 = 0x08;
const READ: u8 = 0x10;

struct Fixture {
    driver: Driver,
    a: Queue,
    b: Queue,
    page: u64,
    key: u32,
    /// Q counters of `a` and `b`.
    sets: [u32; 2],
}

fn fixture() -> Fixture {
    let mut driver = Driver::new();
    driver.set_gid();
    let eqn = driver.eq();
    let (cqn, _) = driver.cq(eqn);
    let sets = [(); 2].map(|()| {
        let out = driver.run_command(opcode::ALLOC_Q_COUNTER, &[0; 16]).unwrap();
        Bits::<alloc_q_counter_out, _>::new(out).get32(alloc_q_counter_out::counter_set_id)
    });
    let [a, b] = sets.map(|set| (driver.qp(0, cqn), set)).map(|(qp, set)| {
        let rights =
            [(qpc::rre, 1), (qpc::rwe, 1), (qpc::rae, 1), (qpc::counter_set_id, set.into())];
        driver.modify(opcode::RST2INIT_QP, &qp, 0, &rights).unwrap();
        qp
    });
    for (qp, peer) in [(&a, &b), (&b, &a)] {
        let receive = [(qpc::mtu, 2), (qpc::min_rnr_nak, 1)];
        driver.modify(opcode::INIT2RTR_QP, qp, peer.number, &receive).unwrap();
        let send = [(qpc::retry_count, 3), (qpc::rnr_retry, 2)];
        driver.modify(opcode::RTR2RTS_QP, qp, peer.number, &send).unwrap();
    }
    let page = driver.alloc_page();
    let key = driver.mkey(page, 4096, &[mkc::lr, mkc::lw, mkc::rr, mkc::rw]);
    Fixture { driver, a, b, page, key, sets }
}

/// Octets of a frame of RoCE v2 beside its packet: Ethernet, IPv4, UDP, ICRC. And those of headers.
const FRAME: u64 = 14 + 20 + 8 + 4;
const BTH: u64 = 12;
const RETH: u64 = 16;
const AETH: u64 = 4;

impl Fixture {
    /// Packets and octets that the function has sent, all of which it has received.
    fn traffic(&mut self) -> (u64, u64) {
        let out = self.driver.run_command(opcode::QUERY_VPORT_COUNTER, &[0; 32]).unwrap();
        let out = Bits::<query_vport_counter_out, _>::new(out);
        let [sent, received] = [
            query_vport_counter_out::transmitted_ib_unicast,
            query_vport_counter_out::received_ib_unicast,
        ]
        .map(|counter| {
            let counter = out.sub(counter);
            (counter.get(traffic_counter::packets), counter.get(traffic_counter::octets))
        });
        assert_eq!(sent, received);
        sent
    }

    fn count(&mut self, side: usize, field: Field<set>) -> u64 {
        let mut input = Bits::<query_q_counter_in, _>::new(vec![0; query_q_counter_in::SIZE]);
        input.set(query_q_counter_in::counter_set_id, self.sets[side].into());
        let out = self.driver.run_command(opcode::QUERY_Q_COUNTER, &input.into_inner()).unwrap();
        Bits::<set, _>::new(out).get(field)
    }

    fn remote(&self, address: u64, key: u32) -> Vec<u8> {
        let mut bytes = address.to_be_bytes().to_vec();
        bytes.extend(key.to_be_bytes());
        bytes.extend([0; 4]);
        bytes.extend(Driver::segment(8, self.key, self.page));
        bytes
    }
}

#[test]
fn requests_are_counted_by_the_responder() {
    let mut c = fixture();
    let segments = c.remote(c.page, c.key);
    c.driver.post_send(&mut c.a, WRITE, 0, &segments);
    c.driver.post_send(&mut c.a, WRITE, 0, &segments);
    c.driver.post_send(&mut c.a, READ, 0, &segments);
    // Without data, which needs no key.
    let empty = &c.remote(0, 0)[..16];
    c.driver.post_send(&mut c.a, WRITE, 0, empty);
    c.driver.post_send(&mut c.a, READ, 0, empty);
    assert_eq!(c.count(1, set::rx_write_requests), 3);
    assert_eq!(c.count(1, set::rx_read_requests), 2);
    assert_eq!(c.count(0, set::rx_write_requests), 0);
}

#[test]
fn errors_are_counted_by_requester_and_responder() {
    let mut c = fixture();
    // Two retries, and the attempt that exceeds them.
    c.driver.post_send(&mut c.a, SEND, 0, &Driver::segment(8, c.key, c.page));
    assert_eq!(c.count(1, set::out_of_buffer), 3);
    assert_eq!(c.count(0, set::rnr_nak_retry_err), 3);
    assert_eq!(c.count(0, set::req_rnr_retries_exceeded), 1);
    assert_eq!(c.count(0, set::req_cqe_error), 1);
    c.driver.post_send(&mut c.a, SEND, 0, &Driver::segment(8, c.key, c.page));
    assert_eq!((c.count(0, set::req_cqe_error), c.count(0, set::req_cqe_flush_error)), (2, 1));

    let mut c = fixture();
    c.driver.post_receive(&mut c.b, &Driver::segment(8, c.key, c.page));
    let segments = c.remote(c.page, c.key + 1);
    c.driver.post_send(&mut c.a, WRITE, 0, &segments);
    assert_eq!(c.count(0, set::req_remote_access_errors), 1);
    assert_eq!(c.count(1, set::resp_remote_access_errors), 1);
    assert_eq!((c.count(1, set::resp_cqe_error), c.count(1, set::resp_cqe_flush_error)), (1, 1));
}

#[test]
fn the_vport_counts_packets_and_octets() {
    let mut c = fixture();
    let to = c.driver.alloc_page();
    let key = c.driver.mkey(to, 4096, &[mkc::lw]);
    c.driver.post_receive(&mut c.b, &Driver::segment(2000, key, to));
    // A path MTU of 512 bytes makes four packets.
    c.driver.post_send(&mut c.a, SEND, 0, &Driver::segment(2000, c.key, c.page));
    assert_eq!(c.traffic(), (5, 4 * (FRAME + BTH) + 2000 + (FRAME + BTH + AETH)));
}

/// The responder finds no memory behind a key when it has begun the response.
#[test]
fn a_nak_in_place_of_data_is_counted_without_the_data() {
    const NOWHERE: u64 = 1 << 40;
    let mut c = fixture();
    let key = c.driver.mkey(NOWHERE, 4096, &[mkc::rr]);
    let segments = c.remote(NOWHERE, key);
    c.driver.post_send(&mut c.a, READ, 0, &segments);
    assert_eq!(c.count(0, set::req_remote_access_errors), 1);
    assert_eq!(c.traffic(), (2, (FRAME + BTH + RETH) + (FRAME + BTH + AETH)));
}
