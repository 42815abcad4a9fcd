//! The 40 bytes in front of a received datagram, in plain memory.

mod driver;

use driver::pair::code::SEND;
use driver::{Driver, GID};
use uverbs_uapi::mlx5::prm::mkc::mkc;
use uverbs_uapi::mlx5::prm::qpc::qpc;
use uverbs_uapi::mlx5::prm::vport::{roce_addr_layout, set_roce_address_in};
use uverbs_uapi::mlx5::prm::{Bits, Layout, opcode};

const UD: u64 = 2;
const QKEY: u32 = 0x1111_2222;
const GRH: u32 = 40;
const SEND_IMM: u8 = 0x0b;

/// Values of `roce_version` and `roce_l3_type`.
const V1: (u64, u64) = (0, 0);
const V2_IPV4: (u64, u64) = (2, 0);
const V2_IPV6: (u64, u64) = (2, 1);

/// Sends `len` bytes from an address of this kind to itself, and returns the 40 bytes in front of them.
fn grh((version, l3_type): (u64, u64), op: u8, len: u32) -> [u8; GRH as usize] {
    let mut driver = Driver::new();
    let mut input = Bits::<set_roce_address_in, _>::new(vec![0; set_roce_address_in::SIZE]);
    let mut entry = input.sub_mut(set_roce_address_in::roce_address);
    entry.set_span(roce_addr_layout::source_l3_address, &GID);
    entry.set(roce_addr_layout::roce_version, version);
    entry.set(roce_addr_layout::roce_l3_type, l3_type);
    driver.run_command(opcode::SET_ROCE_ADDRESS, &input.into_inner()).unwrap();
    let eqn = driver.eq();
    let (from, to) = (driver.alloc_page(), driver.alloc_page());
    let key = driver.mkey(from, 8192, &[mkc::lr, mkc::lw]);
    let (cqn, _) = driver.cq(eqn);
    let mut queue = driver.qp_with(UD, cqn, &[]);
    driver.modify(opcode::RST2INIT_QP, &queue, 0, &[(qpc::q_key, QKEY.into())]).unwrap();
    driver.modify(opcode::INIT2RTR_QP, &queue, 0, &[]).unwrap();
    driver.modify(opcode::RTR2RTS_QP, &queue, 0, &[]).unwrap();
    driver.post_receive(&mut queue, &Driver::segment(GRH + len, key, to));
    let mut vector = QKEY.to_be_bytes().to_vec();
    vector.resize(8, 0);
    vector.extend((1 << 31 | queue.number).to_be_bytes());
    vector.resize(32, 0);
    vector.extend(GID);
    let data = Driver::segment(len, key, from);
    driver.post_send(&mut queue, op, 0, &[vector, data].concat());
    let mut grh = [0; GRH as usize];
    driver.memory().read(to, &mut grh).unwrap();
    grh
}

/// BTH, DETH, an immediate of 4 bytes, the data with its padding, and ICRC; UDP's 8 bytes with version 2; IPv4
/// counts its own 20 bytes, too.
#[test]
fn each_header_tells_the_length_of_the_packet() {
    const DATAGRAM: u16 = 12 + 8 + 4;
    for (op, len, body) in [(SEND, 8, 8), (SEND, 5, 8), (SEND_IMM, 8, 12)] {
        let word = |grh: [u8; GRH as usize], at| u16::from_be_bytes([grh[at], grh[at + 1]]);
        let v1 = grh(V1, op, len);
        assert_eq!((v1[0] >> 4, v1[6], word(v1, 4)), (6, 0x1b, DATAGRAM + body));
        let v6 = grh(V2_IPV6, op, len);
        assert_eq!((v6[0] >> 4, v6[6], word(v6, 4)), (6, 17, 8 + DATAGRAM + body));
        let v4 = grh(V2_IPV4, op, len);
        assert_eq!((v4[20], v4[29], word(v4, 22)), (0x45, 17, 20 + 8 + DATAGRAM + body));
        assert_eq!(v4[..20], [0; 20]);
    }
}
