//! RoCE addresses in VLANs, in plain memory: the receivers of a message, and the tag in a datagram's CQE.

mod driver;

use driver::pair::{Pair, code};
use driver::{Driver, GID};
use uverbs_uapi::mlx5::prm::mkc::mkc;
use uverbs_uapi::mlx5::prm::opcode;
use uverbs_uapi::mlx5::prm::qpc::qpc;

const UD: u64 = 2;
const QKEY: u32 = 0x1111_2222;
const GRH: u32 = 40;

/// Connects `a`, which sends from a second address in this VLAN, with `b`, and sends a message to the first
/// address, in VLAN 5. Returns the opcodes of both CQEs.
fn message_from(vlan: Option<u64>) -> (u8, u8) {
    let mut p = Pair::new();
    let mut other = GID;
    other[15] += 1;
    p.driver.set_roce_address(0, GID, Some(5));
    p.driver.set_roce_address(1, other, vlan);
    let (a, b) = (p.a.number, p.b.number);
    p.driver.peer_gid = other;
    p.driver.reconnect(&mut p.b, a).unwrap();
    (p.driver.peer_gid, p.driver.source) = (GID, 1);
    p.driver.reconnect(&mut p.a, b).unwrap();
    p.receive(100);
    p.send(8);
    (p.driver.cqe(p.sent, 0).0, p.driver.cqe(p.received, 0).0)
}

#[test]
fn a_message_reaches_addresses_of_its_vlan_only() {
    assert_eq!(message_from(Some(5)), (code::REQUEST, code::RECEIVED));
    for other in [Some(6), None] {
        assert_eq!(message_from(other), (code::REQUEST_ERROR, code::NONE), "{other:?}");
    }
}

/// The type of headers and the tag in the CQE of a datagram from an address in a VLAN.
fn datagram_from(vlan: Option<u64>) -> (u8, [u8; 2]) {
    /// In the upper bits of the service level.
    const PRIORITY: u8 = 3;
    let mut driver = Driver::new();
    driver.set_roce_address(0, GID, vlan);
    let eqn = driver.eq();
    let (from, to) = (driver.alloc_page(), driver.alloc_page());
    let key = driver.mkey(from, 8192, &[mkc::lr, mkc::lw]);
    let (cqn, completions) = driver.cq(eqn);
    let mut queue = driver.qp_with(UD, cqn, &[]);
    driver.modify(opcode::RST2INIT_QP, &queue, 0, &[(qpc::q_key, QKEY.into())]).unwrap();
    driver.modify(opcode::INIT2RTR_QP, &queue, 0, &[]).unwrap();
    driver.modify(opcode::RTR2RTS_QP, &queue, 0, &[]).unwrap();
    driver.post_receive(&mut queue, &Driver::segment(GRH + 8, key, to));
    let mut vector = QKEY.to_be_bytes().to_vec();
    vector.resize(8, 0);
    vector.extend((1 << 31 | queue.number).to_be_bytes());
    vector.push(PRIORITY << 1);
    vector.resize(32, 0);
    vector.extend(GID);
    let data = Driver::segment(8, key, from);
    driver.post_send(&mut queue, code::SEND, 0, &[vector, data].concat());
    let mut completed = (0..2).map(|index| driver.cqe(completions, index));
    let (_, cqe) = completed.find(|(code, _)| *code == code::RECEIVED).unwrap();
    (cqe[29] & 1, [cqe[30], cqe[31]])
}

#[test]
fn a_datagram_tells_its_tag() {
    assert_eq!(datagram_from(Some(0x105)), (1, [0x61, 0x05]));
    assert_eq!(datagram_from(None), (0, [0, 0]));
}
