//! The UDP source port of a queue pair, the ports of a LAG, and placement out of order, in plain memory.

mod driver;

use driver::{Driver, Queue};
use uverbs_connectx::options::Options;
use uverbs_uapi::mlx5::prm::cmd::{lagc, query_lag_out};
use uverbs_uapi::mlx5::prm::opcode;
use uverbs_uapi::mlx5::prm::qpc::{ads, qpc, query_qp_out, rst2init_qp_in};
use uverbs_uapi::mlx5::prm::{Bits, Layout};

const RC: u64 = 0;
const UC: u64 = 1;
const UD: u64 = 2;
const BAD_OP: u8 = 2;
const BAD_PARAM: u8 = 3;

fn sending(driver: &mut Driver, service: u64) -> Queue {
    driver.set_gid();
    let eqn = driver.eq();
    let (cqn, _) = driver.cq_with(eqn, &[]);
    let qp = driver.qp_with(service, cqn, &[]);
    for (op, fields) in [
        (opcode::RST2INIT_QP, &[][..]),
        (opcode::INIT2RTR_QP, &[(qpc::mtu, 3)]),
        (opcode::RTR2RTS_QP, &[]),
    ] {
        driver.modify(op, &qp, qp.number, fields).unwrap();
    }
    qp
}

/// RTS2RTS of the optional parameters of both masks.
fn change(driver: &mut Driver, qp: &Queue, masks: (u64, u64), port: u64) -> Result<(), u8> {
    let mut input = Bits::<rst2init_qp_in, _>::new(vec![0; rst2init_qp_in::SIZE]);
    input.set(rst2init_qp_in::qpn, qp.number.into());
    input.set(rst2init_qp_in::opt_param_mask, masks.0);
    input.set(rst2init_qp_in::opt_param_mask_95_32, masks.1);
    let mut context = input.sub_mut(rst2init_qp_in::qpc);
    context.set(qpc::lag_tx_port_affinity, port & 0xf);
    context.sub_mut(qpc::primary_address_path).set(ads::udp_sport, port);
    driver
        .run_command(opcode::RTS2RTS_QP, &input.into_inner())
        .map(drop)
        .map_err(|refused| refused.0)
}

/// The UDP source port, and the port of the LAG.
fn ports(driver: &mut Driver, qp: &Queue) -> (u64, u64) {
    let out = driver.run_command_on(opcode::QUERY_QP, qp.number).unwrap();
    let out = Bits::<query_qp_out, _>::new(out);
    let context = out.sub(query_qp_out::qpc);
    let udp = context.sub(qpc::primary_address_path).get(ads::udp_sport);
    (udp, context.get(qpc::lag_tx_port_affinity))
}

#[test]
fn ports_change_by_their_bits_of_the_masks_alone() {
    let mut driver = Driver::new();
    let qp = sending(&mut driver, RC);
    change(&mut driver, &qp, (0, 1 << 2), 0xd121).unwrap();
    assert_eq!(ports(&mut driver, &qp), (0xd121, 0));
    change(&mut driver, &qp, (1 << 15, 0), 0xc002).unwrap();
    assert_eq!(ports(&mut driver, &qp), (0xd121, 2));
}

#[test]
fn ports_that_do_not_exist_are_refused() {
    let mut driver = Driver::new();
    let (connected, datagrams) = (sending(&mut driver, RC), sending(&mut driver, UD));
    for (qp, masks, port) in [
        // A port of the LAG that is not there.
        (&connected, (1 << 15, 0), 3),
        // Datagrams have ports of their own.
        (&datagrams, (0, 1 << 2), 0xd123),
        // An optional parameter that the device does not know.
        (&connected, (0, 1 << 3), 0),
    ] {
        assert_eq!(change(&mut driver, qp, masks, port), Err(BAD_PARAM), "{masks:?}");
        assert_eq!(ports(&mut driver, qp), (0, 0));
    }
}

/// A device without the capabilities refuses what they announce, as firmware does.
#[test]
fn ports_and_orderings_without_their_capabilities_are_refused() {
    for minimal in [false, true] {
        let mut driver = Driver::with(Options { minimal, ..Options::default() });
        let qp = sending(&mut driver, RC);
        let wanted = if minimal { Err(BAD_PARAM) } else { Ok(()) };
        // The port 0 is any.
        assert_eq!(change(&mut driver, &qp, (1 << 15, 0), 0), wanted, "minimal: {minimal}");
        for service in [RC, UC, UD] {
            let (eqn, fields) = (driver.eq(), [(qpc::mtu, 3), (qpc::dp_ordering_1, 1)]);
            let (cqn, _) = driver.cq_with(eqn, &[]);
            let qp = driver.qp_with(service, cqn, &[]);
            driver.modify(opcode::RST2INIT_QP, &qp, qp.number, &[]).unwrap();
            let answer = driver.modify(opcode::INIT2RTR_QP, &qp, qp.number, &fields);
            let answer = answer.map(drop).map_err(|refused| refused.0);
            assert_eq!(answer, wanted, "minimal: {minimal}, service {service}");
        }
    }
}

#[test]
fn lag_is_queried_where_there_is_one() {
    let mut driver = Driver::new();
    let out = driver.run_command(opcode::QUERY_LAG, &[0; 16]).unwrap();
    let out = Bits::<query_lag_out, _>::new(out);
    let lag = out.sub(query_lag_out::ctx);
    let active = [lagc::tx_remap_affinity_1, lagc::tx_remap_affinity_2].map(|port| lag.get(port));
    assert_eq!((lag.get(lagc::lag_state), active), (1, [1, 2]));
    // A function cannot make one.
    assert_eq!(driver.run_command(opcode::CREATE_LAG, &[0; 32]).unwrap_err().0, BAD_OP);
}
