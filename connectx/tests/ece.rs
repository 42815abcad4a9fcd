//! Options of connections (ECE) that the device offers and accepts, in plain memory.

mod driver;

use driver::{Driver, Queue};
use uverbs_uapi::mlx5::prm::opcode;
use uverbs_uapi::mlx5::prm::qpc::{qpc, query_qp_in, query_qp_out};
use uverbs_uapi::mlx5::prm::{Bits, Layout};

const VERSION: u32 = 0x1000_0000;
const ALL: u32 = VERSION | 7;
const RC: u64 = 0;

fn qp(driver: &mut Driver, asked: u32) -> Queue {
    let eqn = driver.eq();
    let (cqn, _) = driver.cq_with(eqn, &[]);
    driver.ece = asked;
    driver.qp_with(RC, cqn, &[])
}

fn queried(driver: &mut Driver, qp: &Queue) -> u32 {
    let mut input = Bits::<query_qp_in, _>::new(vec![0; query_qp_in::SIZE]);
    input.set(query_qp_in::qpn, qp.number.into());
    let out = driver.run_command(opcode::QUERY_QP, &input.into_inner()).unwrap();
    Bits::<query_qp_out, _>::new(out).get32(query_qp_out::ece)
}

#[test]
fn a_qp_created_with_the_version_alone_is_offered_all_options() {
    for (asked, told) in [(VERSION, ALL), (VERSION | 0xa, VERSION | 2), (0x2000_0003, 0), (0, 0)] {
        let mut driver = Driver::new();
        let qp = qp(&mut driver, asked);
        assert_eq!((driver.told_ece, queried(&mut driver, &qp)), (told, 0), "{asked:#x}");
    }
}

#[test]
fn each_transition_takes_the_options_that_it_names_and_keeps_those_that_were_taken() {
    let mut driver = Driver::new();
    driver.set_gid();
    let qp = qp(&mut driver, VERSION);
    let step = |driver: &mut Driver, op, asked, fields: &[_]| {
        driver.ece = asked;
        driver.modify(op, &qp, qp.number, fields).unwrap();
        assert_eq!(queried(driver, &qp), driver.told_ece, "{op:#x}");
        driver.told_ece
    };
    assert_eq!(step(&mut driver, opcode::RST2INIT_QP, VERSION | 9, &[]), VERSION | 1);
    assert_eq!(step(&mut driver, opcode::INIT2INIT_QP, 0, &[]), VERSION | 1);
    assert_eq!(step(&mut driver, opcode::INIT2RTR_QP, VERSION | 6, &[(qpc::mtu, 3)]), VERSION | 6);
    assert_eq!(step(&mut driver, opcode::RTR2RTS_QP, 0, &[]), VERSION | 6);
    // The device accepts no options of another version.
    assert_eq!(step(&mut driver, opcode::RTS2RTS_QP, 0x3000_0001, &[]), 0);
    assert_eq!(step(&mut driver, opcode::RTS2RTS_QP, VERSION | 1, &[]), VERSION | 1);
    assert_eq!(step(&mut driver, opcode::TO_RST_QP, VERSION | 1, &[]), 0);
}
