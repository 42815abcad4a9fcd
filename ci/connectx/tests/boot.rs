//! States of the whole function: before INIT_HCA, after TEARDOWN_HCA, and without bus mastering.

mod driver;

use connectx::function::Region;
use driver::Driver;
use driver::pair::{Pair, code};
use uverbs_uapi::mlx5::prm::opcode;

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

/// The number of a new object would be lost, so nobody could destroy it.
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
