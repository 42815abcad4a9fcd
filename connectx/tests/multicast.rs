//! Multicast in plain memory: which queue pairs receive a message to a group.

mod driver;

use driver::pair::code::{RECEIVED, SEND};
use driver::{Driver, Queue};
use uverbs_uapi::mlx5::prm::Bits;
use uverbs_uapi::mlx5::prm::Layout;
use uverbs_uapi::mlx5::prm::mkc::mkc;
use uverbs_uapi::mlx5::prm::opcode;
use uverbs_uapi::mlx5::prm::qpc::{attach_to_mcg_in, qpc};
use uverbs_uapi::mlx5::prm::vport::{nic_vport_context, query_nic_vport_context_out};

const UD: u64 = 2;
const QKEY: u32 = 0x1111_2222;
const GROUP: [u8; 16] = [0xff, 0x0e, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 239, 1, 2, 3];
const GRH: u32 = 40;

/// A function with an mkey for two pages.
struct Fixture {
    driver: Driver,
    eqn: u32,
    from: u64,
    to: u64,
    key: u32,
}

/// A member of the group, and the buffer of its CQ.
struct Member {
    queue: Queue,
    completions: u64,
}

impl Fixture {
    fn new() -> Self {
        let mut driver = Driver::new();
        driver.set_gid();
        let eqn = driver.eq();
        let (from, to) = (driver.alloc_page(), driver.alloc_page());
        let key = driver.mkey(from, 8192, &[mkc::lr, mkc::lw]);
        Self { driver, eqn, from, to, key }
    }

    fn member(&mut self, block_loopback: bool) -> Member {
        let (cqn, completions) = self.driver.cq(self.eqn);
        let fields = [(qpc::block_lb_mc, block_loopback.into())];
        let queue = self.driver.qp_with(UD, cqn, &fields);
        let qkey = [(qpc::q_key, QKEY.into())];
        self.driver.modify(opcode::RST2INIT_QP, &queue, 0, &qkey).unwrap();
        self.driver.modify(opcode::INIT2RTR_QP, &queue, 0, &[]).unwrap();
        self.driver.modify(opcode::RTR2RTS_QP, &queue, 0, &[]).unwrap();
        Member { queue, completions }
    }

    fn attach(&mut self, op: u16, member: &Member) -> Result<(), driver::CommandError> {
        let mut input = Bits::<attach_to_mcg_in, _>::new(vec![0; attach_to_mcg_in::SIZE]);
        input.set(attach_to_mcg_in::qpn, member.queue.number.into());
        input.set_span(attach_to_mcg_in::multicast_gid, &GROUP);
        self.driver.run_command(op, &input.into_inner()).map(|_| ())
    }

    /// Sends eight bytes to the group; both members post a receive before.
    fn send(&mut self, members: [&mut Member; 2], qkey: u32) {
        let mut vector = qkey.to_be_bytes().to_vec();
        vector.resize(8, 0);
        vector.extend(0x80ff_ffffu32.to_be_bytes());
        vector.resize(32, 0);
        vector.extend(GROUP);
        let data = Driver::segment(8, self.key, self.from);
        let room = Driver::segment(GRH + 8, self.key, self.to);
        let [sender, other] = members;
        self.driver.post_receive(&mut sender.queue, &room);
        self.driver.post_receive(&mut other.queue, &room);
        self.driver.post_send(&mut sender.queue, SEND, 0, &[vector, data].concat());
    }

    /// The number of messages that a member has received.
    fn received(&mut self, member: &Member) -> usize {
        let entries = (0..64).map(|index| self.driver.cqe(member.completions, index).0);
        entries.filter(|code| *code == RECEIVED).count()
    }
}

#[test]
fn a_multicast_reaches_the_members_of_its_group() {
    for block_loopback in [false, true] {
        let mut fixture = Fixture::new();
        let (mut sender, mut other) =
            (fixture.member(block_loopback), fixture.member(block_loopback));
        fixture.attach(opcode::ATTACH_TO_MCG, &sender).unwrap();
        fixture.attach(opcode::ATTACH_TO_MCG, &other).unwrap();
        fixture.send([&mut sender, &mut other], QKEY);
        // The sender is a member, too, and receives its own message unless `block_lb_mc` is set.
        assert_eq!(
            (fixture.received(&sender), fixture.received(&other)),
            (usize::from(!block_loopback), 1)
        );
        fixture.attach(opcode::DETACH_FROM_MCG, &other).unwrap();
        assert!(fixture.attach(opcode::DETACH_FROM_MCG, &other).is_err());
        fixture.send([&mut sender, &mut other], QKEY);
        assert_eq!(
            (fixture.received(&sender), fixture.received(&other)),
            (2 * usize::from(!block_loopback), 1)
        );
    }
}

#[test]
fn a_wrong_qkey_is_dropped_and_counted() {
    let mut fixture = Fixture::new();
    let (mut sender, mut other) = (fixture.member(true), fixture.member(true));
    fixture.attach(opcode::ATTACH_TO_MCG, &other).unwrap();
    for _ in 0..3 {
        fixture.send([&mut sender, &mut other], QKEY + 1);
    }
    assert_eq!(fixture.received(&other), 0);
    let out = fixture.driver.run_command(opcode::QUERY_NIC_VPORT_CONTEXT, &[0; 16]).unwrap();
    let out = Bits::<query_nic_vport_context_out, _>::new(out);
    let context = out.sub(query_nic_vport_context_out::nic_vport_context);
    assert_eq!(context.get(nic_vport_context::qkey_violation_counter), 3);
}

#[test]
fn a_member_that_is_not_destroyed_goes_on() {
    const RESOURCE_BUSY: u8 = 0x06;
    let mut f = Fixture::new();
    let (mut a, mut b) = (f.member(false), f.member(false));
    for member in [&a, &b] {
        f.attach(opcode::ATTACH_TO_MCG, member).unwrap();
        let number = member.queue.number;
        let refused = f.driver.run_command_on(opcode::DESTROY_QP, number).unwrap_err();
        assert_eq!(refused.0, RESOURCE_BUSY);
    }
    f.send([&mut a, &mut b], QKEY);
    assert_eq!([f.received(&a), f.received(&b)], [1, 1]);
}
