//! States of the whole function: before INIT_HCA, after TEARDOWN_HCA, and without bus mastering.

mod driver;

use driver::Driver;
use driver::pair::{Pair, code};
use std::collections::BTreeMap;
use uverbs_connectx::function::Region;
use uverbs_uapi::mlx5::prm::opcode;
use uverbs_uapi::mlx5::prm::vport::{
    hca_vport_context as hca, modify_hca_vport_context_in, query_hca_vport_context_out,
};
use uverbs_uapi::mlx5::prm::{Bits, Layout};

const BAD_PARAM: u8 = 0x3;
const BAD_SYSTEM_STATE: u8 = 0x4;
/// The command register, with memory space enabled, and with bus mastering too.
const COMMAND: u64 = 4;
/// Offset of the EQ arm register in a UAR page.
const EQ_ARM: u64 = 0x40;
const MEMORY_ONLY: [u8; 2] = [2, 0];
const MASTER: [u8; 2] = [6, 0];

fn living(driver: &mut Driver) -> usize {
    let counts = driver.fabric.function(0).device().objects().counts();
    counts.into_iter().map(|(_, count)| count).sum()
}

#[test]
fn teardown_destroys_all_objects_until_init_hca() {
    for op in [opcode::TEARDOWN_HCA, opcode::DISABLE_HCA] {
        let mut p = Pair::new();
        p.receive(8);
        let local = p.local(8);
        p.driver.queue_send(&mut p.a, code::SEND, 0, &local);
        p.driver.run_command(op, &[0; 16]).unwrap();
        p.driver.run();
        assert_eq!(living(&mut p.driver), 0);
        // The device must not touch queues in memory that the driver has back.
        assert_eq!(p.driver.cqe(p.sent, 0).0, code::NONE);
        let refused = p.driver.run_command(opcode::ALLOC_PD, &[0; 16]).unwrap_err();
        assert_eq!(refused.0, BAD_SYSTEM_STATE);
        p.driver.run_command(opcode::QUERY_ISSI, &[0; 112]).unwrap();
        p.driver.run_command(opcode::INIT_HCA, &[0; 16]).unwrap();
        p.driver.run_command(opcode::ALLOC_PD, &[0; 16]).unwrap();
    }
}

/// The objects that the last TEARDOWN_HCA found, by kind.
fn left(driver: &mut Driver) -> BTreeMap<&'static str, usize> {
    driver.fabric.function(0).device().left().iter().copied().collect()
}

#[test]
fn objects_left_at_teardown_are_reported_until_the_next_driver_ends() {
    let mut p = Pair::new();
    assert!(left(&mut p.driver).is_empty(), "the driver lives");
    p.driver.run_command(opcode::TEARDOWN_HCA, &[0; 16]).unwrap();
    let found = left(&mut p.driver);
    assert_eq!(found.get("QP"), Some(&2), "{found:?}");
    p.driver.run_command(opcode::DISABLE_HCA, &[0; 16]).unwrap();
    p.driver.run_command(opcode::INIT_HCA, &[0; 16]).unwrap();
    assert_eq!(left(&mut p.driver), found, "the next driver lives");
    p.driver.run_command(opcode::TEARDOWN_HCA, &[0; 16]).unwrap();
    assert!(left(&mut p.driver).is_empty());
}

#[test]
fn objects_left_at_teardown_are_reported_after_a_reset() {
    let mut p = Pair::new();
    p.driver.run_command(opcode::TEARDOWN_HCA, &[0; 16]).unwrap();
    let found = left(&mut p.driver);
    assert!(!found.is_empty());
    p.driver.fabric.function(0).device_mut().reset();
    assert_eq!(left(&mut p.driver), found);
}

/// The number of a new object would be lost, so no driver could destroy it.
#[test]
fn a_command_without_an_output_mailbox_has_no_effect() {
    const ABSENT: u64 = 1 << 40;
    let mut driver = Driver::new();
    let before = living(&mut driver);
    let mut slot = [0; 64];
    (slot[0], slot[7], slot[59], slot[63]) = (7, 16, 64, 1);
    slot[16..18].copy_from_slice(&opcode::ALLOC_PD.to_be_bytes());
    slot[48..56].copy_from_slice(&ABSENT.to_be_bytes());
    driver.ring_slot(&slot);
    assert_ne!(driver.slot_bytes()[63] >> 1, 0, "delivered");
    assert_eq!(living(&mut driver), before);
}

#[test]
fn without_bus_mastering_the_device_writes_no_memory() {
    let mut p = Pair::new();
    p.receive(8);
    p.driver.arm(p.send_cq, 0);
    let (place, eq) = (u64::from(p.driver.uar) * 4096 + EQ_ARM, p.eqn << 24);
    p.driver.fabric.function(0).write(Region::Bar0, place, &eq.to_be_bytes());
    let local = p.local(8);
    p.driver.queue_send(&mut p.a, code::SEND, 0, &local);
    p.driver.fabric.function(0).write(Region::Config, COMMAND, &MEMORY_ONLY);
    p.driver.run();
    let mut slot = [0; 64];
    (slot[0], slot[7], slot[59], slot[63]) = (7, 16, 16, 1);
    p.driver.ring_slot(&slot);
    assert_eq!(p.driver.slot_bytes(), slot, "a command was answered");
    assert_eq!(p.driver.cqe(p.sent, 0).0, code::NONE);
    assert_eq!(p.driver.fabric.function(0).interrupts_mut().raised(0), 0);
    p.driver.fabric.function(0).write(Region::Config, COMMAND, &MASTER);
    p.driver.run();
    assert_eq!(p.driver.cqe(p.sent, 0).0, code::REQUEST);
    assert_eq!(p.driver.fabric.function(0).interrupts_mut().raised(0), 1);
}

/// The driver's connection manager serves no port on which it cannot announce itself.
#[test]
fn software_announces_its_management_capabilities_on_a_port() {
    const CONNECTIONS: u64 = 1 << 16;
    const SUBNET: u64 = 1 << 1;
    let mut driver = Driver::new();
    let context = |driver: &mut Driver| {
        let input = [0; 16];
        let out = driver.run_command(opcode::QUERY_HCA_VPORT_CONTEXT, &input).unwrap();
        let out = Bits::<query_hca_vport_context_out, _>::new(out);
        let context = out.sub(query_hca_vport_context_out::hca_vport_context);
        let field = |field| context.get(field);
        (field(hca::cap_mask1), field(hca::cap_mask1_field_select))
    };
    let change = |driver: &mut Driver, chosen: u64, value: u64| {
        let mut input =
            Bits::<modify_hca_vport_context_in, _>::new(vec![0; modify_hca_vport_context_in::SIZE]);
        let mut new = input.sub_mut(modify_hca_vport_context_in::hca_vport_context);
        new.set(hca::cap_mask1_field_select, chosen);
        new.set(hca::cap_mask1, value);
        driver.run_command(opcode::MODIFY_HCA_VPORT_CONTEXT, &input.into_inner()).map(|_| ())
    };
    let (before, changeable) = context(&mut driver);
    assert_eq!((before, changeable & CONNECTIONS, changeable & SUBNET), (0, CONNECTIONS, 0));
    change(&mut driver, CONNECTIONS, u64::from(u32::MAX)).unwrap();
    assert_eq!(context(&mut driver).0, CONNECTIONS, "bits that are not selected stay");
    let refused = change(&mut driver, CONNECTIONS | SUBNET, 0).unwrap_err();
    assert_eq!((refused.0, context(&mut driver).0), (BAD_PARAM, CONNECTIONS));
    change(&mut driver, CONNECTIONS, 0).unwrap();
    assert_eq!(context(&mut driver).0, 0);
}
