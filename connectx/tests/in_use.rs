//! Objects in use cannot be destroyed: each kind of user, and the objects that it uses.

mod driver;

use driver::Driver;
use uverbs_uapi::mlx5::prm::flow::{
    create_flow_group_in, create_flow_group_out, create_flow_table_in, create_flow_table_out,
    delete_fte_in, dest_format, destroy_flow_group_in, destroy_flow_table_in, flow_context,
    flow_table_context, set_flow_table_root_in, set_fte_in,
};
use uverbs_uapi::mlx5::prm::qpc::qpc;
use uverbs_uapi::mlx5::prm::rqc::{
    create_rq_in, create_rqt_in, create_sq_in, create_tir_in, create_tis_in, modify_rq_in, rqc,
    rqtc, sqc, tirc, tisc,
};
use uverbs_uapi::mlx5::prm::srqc::{create_rmp_in, create_xrc_srq_in, rmpc, wq, xrc_srqc};
use uverbs_uapi::mlx5::prm::{Bits, Field, Layout, opcode};

const RESOURCE_BUSY: u8 = 0x6;
const BAD_RESOURCE: u8 = 0x5;

/// An object, with the command that destroys it.
#[derive(Clone, Copy)]
struct Object {
    destroy: u16,
    number: u32,
}

/// A driver with a CQ.
struct Fixture {
    driver: Driver,
    cqn: u32,
}

impl Fixture {
    fn new() -> Self {
        let mut driver = Driver::new();
        driver.set_gid();
        let eqn = driver.eq();
        let (cqn, _) = driver.cq(eqn);
        Self { driver, cqn }
    }

    /// Destroys an object and returns the status.
    fn destroy(&mut self, object: Object) -> u8 {
        let answer = self.driver.run_command_on(object.destroy, object.number);
        answer.map_or_else(|refused| refused.0, |_| 0)
    }

    /// Asserts that an object can only be destroyed after its user.
    #[track_caller]
    fn assert_used_by(&mut self, object: Object, user: Object) {
        assert_eq!(self.destroy(object), RESOURCE_BUSY, "{:#x} before its user", object.destroy);
        assert_eq!(self.destroy(user), 0, "{:#x}", user.destroy);
        assert_eq!(self.destroy(object), 0, "{:#x} after its user", object.destroy);
    }

    /// Creates an object whose number is where most commands have it.
    fn create(&mut self, create: u16, destroy: u16, input: &[u8]) -> Object {
        let out = self.driver.run_command(create, input).unwrap_or_else(|refused| {
            panic!("command {create:#x} is refused: {refused:x?}");
        });
        let number = u32::from_be_bytes(out[8..12].try_into().unwrap());
        Object { destroy, number }
    }

    fn alloc(&mut self, alloc: u16, dealloc: u16) -> Object {
        self.create(alloc, dealloc, &[0; 16])
    }

    fn pd(&mut self) -> Object {
        self.alloc(opcode::ALLOC_PD, opcode::DEALLOC_PD)
    }

    fn transport_domain(&mut self) -> Object {
        self.alloc(opcode::ALLOC_TRANSPORT_DOMAIN, opcode::DEALLOC_TRANSPORT_DOMAIN)
    }

    fn xrcd(&mut self) -> Object {
        self.alloc(opcode::ALLOC_XRCD, opcode::DEALLOC_XRCD)
    }

    fn cq(&mut self) -> Object {
        let eqn = self.driver.eq();
        Object { destroy: opcode::DESTROY_CQ, number: self.driver.cq(eqn).0 }
    }

    fn alloc_q_counter(&mut self) -> u32 {
        let out = self.driver.run_command(opcode::ALLOC_Q_COUNTER, &[0; 16]).unwrap();
        u32::from(out[11])
    }

    fn dealloc_q_counter(&mut self, number: u32) -> u8 {
        let mut input = [0; 16];
        input[11] = number as u8;
        let destroyed = self.driver.run_command(opcode::DEALLOC_Q_COUNTER, &input);
        destroyed.map_or_else(|refused| refused.0, |_| 0)
    }

    fn tis(&mut self, transport_domain: Object) -> Object {
        let mut input = Bits::<create_tis_in, _>::new(vec![0; create_tis_in::SIZE]);
        let mut context = input.sub_mut(create_tis_in::ctx);
        context.set(tisc::transport_domain, transport_domain.number.into());
        self.create(opcode::CREATE_TIS, opcode::DESTROY_TIS, &input.into_inner())
    }

    fn sq(&mut self, pd: Object, cq: Object, tis: Object) -> Object {
        let (page, record) = (self.driver.alloc_page(), self.driver.alloc_page());
        let mut input = Bits::<create_sq_in, _>::new(vec![0; create_sq_in::SIZE]);
        let mut context = input.sub_mut(create_sq_in::ctx);
        context.set(sqc::cqn, cq.number.into());
        context.set(sqc::tis_lst_sz, 1);
        context.set(sqc::tis_num_0, tis.number.into());
        let mut queue = context.sub_mut(sqc::wq);
        queue.set(wq::log_wq_stride, 6);
        queue.set(wq::log_wq_sz, 4);
        queue.set(wq::pd, pd.number.into());
        queue.set(wq::uar_page, self.driver.uar.into());
        queue.set(wq::dbr_addr, record);
        let mut input = input.into_inner();
        input.extend(page.to_be_bytes());
        self.create(opcode::CREATE_SQ, opcode::DESTROY_SQ, &input)
    }

    fn rq(&mut self, pd: Object, cq: Object, counter_set: u32) -> Object {
        let (page, record) = (self.driver.alloc_page(), self.driver.alloc_page());
        let mut input = Bits::<create_rq_in, _>::new(vec![0; create_rq_in::SIZE]);
        let mut context = input.sub_mut(create_rq_in::ctx);
        context.set(rqc::cqn, cq.number.into());
        context.set(rqc::counter_set_id, counter_set.into());
        Self::fill_wq(&mut context.sub_mut(rqc::wq), pd, record);
        let mut input = input.into_inner();
        input.extend(page.to_be_bytes());
        self.create(opcode::CREATE_RQ, opcode::DESTROY_RQ, &input)
    }

    fn fill_wq(queue: &mut Bits<wq, &mut [u8]>, pd: Object, record: u64) {
        queue.set(wq::wq_type, 1);
        queue.set(wq::log_wq_stride, 4);
        queue.set(wq::log_wq_sz, 4);
        queue.set(wq::pd, pd.number.into());
        queue.set(wq::dbr_addr, record);
    }

    fn any_rq(&mut self) -> Object {
        let (pd, cq) = (self.pd(), self.cq());
        self.rq(pd, cq, 0)
    }

    fn rqt(&mut self, rq: Object) -> Object {
        let mut input = Bits::<create_rqt_in, _>::new(vec![0; create_rqt_in::SIZE]);
        input.sub_mut(create_rqt_in::rqt_context).set(rqtc::rqt_actual_size, 1);
        let mut input = input.into_inner();
        input.extend(rq.number.to_be_bytes());
        self.create(opcode::CREATE_RQT, opcode::DESTROY_RQT, &input)
    }

    fn tir(&mut self, fields: &[(Field<tirc>, u64)]) -> Object {
        let mut input = Bits::<create_tir_in, _>::new(vec![0; create_tir_in::SIZE]);
        let mut context = input.sub_mut(create_tir_in::ctx);
        for (field, value) in fields {
            context.set(*field, *value);
        }
        self.create(opcode::CREATE_TIR, opcode::DESTROY_TIR, &input.into_inner())
    }

    fn direct_tir(&mut self, rq: Object) -> Object {
        self.tir(&[(tirc::inline_rqn, rq.number.into())])
    }

    fn rmp(&mut self, pd: Object) -> Object {
        let (page, record) = (self.driver.alloc_page(), self.driver.alloc_page());
        let mut input = Bits::<create_rmp_in, _>::new(vec![0; create_rmp_in::SIZE]);
        let mut context = input.sub_mut(create_rmp_in::ctx);
        Self::fill_wq(&mut context.sub_mut(rmpc::wq), pd, record);
        let mut input = input.into_inner();
        input.extend(page.to_be_bytes());
        self.create(opcode::CREATE_RMP, opcode::DESTROY_RMP, &input)
    }

    fn xrc_srq(&mut self, pd: Object, xrcd: Object, cq: Object) -> Object {
        let (page, record) = (self.driver.alloc_page(), self.driver.alloc_page());
        let mut input = Bits::<create_xrc_srq_in, _>::new(vec![0; create_xrc_srq_in::SIZE]);
        let mut context = input.sub_mut(create_xrc_srq_in::xrc_srq_context_entry);
        for (field, value) in [
            (xrc_srqc::log_xrc_srq_size, 4),
            (xrc_srqc::log_rq_stride, 1),
            (xrc_srqc::pd, pd.number.into()),
            (xrc_srqc::xrcd, xrcd.number.into()),
            (xrc_srqc::cqn, cq.number.into()),
            (xrc_srqc::db_record_addr_l, record >> 2),
        ] {
            context.set(field, value);
        }
        let mut input = input.into_inner();
        input.extend(page.to_be_bytes());
        self.create(opcode::CREATE_XRC_SRQ, opcode::DESTROY_XRC_SRQ, &input)
    }

    fn qp(&mut self, service: u64, fields: &[(Field<qpc>, u64)]) -> Object {
        let qp = self.driver.qp_with(service, self.cqn, fields);
        Object { destroy: opcode::DESTROY_QP, number: qp.number }
    }

    fn flow_table(&mut self) -> u32 {
        let input = vec![0; create_flow_table_in::SIZE];
        let out = self.driver.run_command(opcode::CREATE_FLOW_TABLE, &input).unwrap();
        Bits::<create_flow_table_out, _>::new(out).get32(create_flow_table_out::table_id)
    }

    fn destroy_flow_table(&mut self, table: u32) -> u8 {
        let mut input = Bits::<destroy_flow_table_in, _>::new(vec![0; destroy_flow_table_in::SIZE]);
        input.set(destroy_flow_table_in::table_id, table.into());
        let destroyed = self.driver.run_command(opcode::DESTROY_FLOW_TABLE, &input.into_inner());
        destroyed.map_or_else(|refused| refused.0, |_| 0)
    }

    fn flow_group(&mut self, table: u32) -> u32 {
        let input = vec![0; create_flow_group_in::SIZE];
        let mut input = Bits::<create_flow_group_in, _>::new(input);
        input.set(create_flow_group_in::table_id, table.into());
        let out = self.driver.run_command(opcode::CREATE_FLOW_GROUP, &input.into_inner()).unwrap();
        Bits::<create_flow_group_out, _>::new(out).get32(create_flow_group_out::group_id)
    }

    fn destroy_flow_group(&mut self, table: u32, group: u32) -> u8 {
        let mut input = Bits::<destroy_flow_group_in, _>::new(vec![0; destroy_flow_group_in::SIZE]);
        input.set(destroy_flow_group_in::table_id, table.into());
        input.set(destroy_flow_group_in::group_id, group.into());
        let destroyed = self.driver.run_command(opcode::DESTROY_FLOW_GROUP, &input.into_inner());
        destroyed.map_or_else(|refused| refused.0, |_| 0)
    }

    /// Sets the first entry of a table, with a destination by type and number, and a flow counter.
    fn set_flow(&mut self, table: u32, to: (u64, u32), counter: Option<u32>) {
        const FORWARD: u64 = 4;
        const COUNT: u64 = 8;
        let mut input = Bits::<set_fte_in, _>::new(vec![0; set_fte_in::SIZE]);
        input.set(set_fte_in::table_id, table.into());
        let mut context = input.sub_mut(set_fte_in::flow_context);
        let count = if counter.is_some() { COUNT } else { 0 };
        context.set(flow_context::action, FORWARD | count);
        context.set(flow_context::destination_list_size, 1);
        context.set(flow_context::flow_counter_list_size, counter.is_some().into());
        let mut entry = Bits::<dest_format, _>::new(vec![0; dest_format::SIZE]);
        entry.set(dest_format::destination_type, to.0);
        entry.set(dest_format::destination_id, to.1.into());
        let mut input = input.into_inner();
        input.extend(entry.into_inner());
        if let Some(counter) = counter {
            input.extend(counter.to_be_bytes());
            input.extend([0; 4]);
        }
        self.driver.run_command(opcode::SET_FLOW_TABLE_ENTRY, &input).unwrap();
    }

    fn delete_flow(&mut self, table: u32) {
        let mut input = Bits::<delete_fte_in, _>::new(vec![0; delete_fte_in::SIZE]);
        input.set(delete_fte_in::table_id, table.into());
        self.driver.run_command(opcode::DELETE_FLOW_TABLE_ENTRY, &input.into_inner()).unwrap();
    }
}

const TO_TABLE: u64 = 1;
const TO_TIR: u64 = 2;

#[test]
fn a_tis_and_a_tir_use_their_transport_domain() {
    let mut fixture = Fixture::new();
    let domain = fixture.transport_domain();
    let tis = fixture.tis(domain);
    fixture.assert_used_by(domain, tis);
    let (domain, rq) = (fixture.transport_domain(), fixture.any_rq());
    let fields =
        [(tirc::inline_rqn, rq.number.into()), (tirc::transport_domain, domain.number.into())];
    let tir = fixture.tir(&fields);
    fixture.assert_used_by(domain, tir);
}

#[test]
fn an_sq_uses_its_pd_cq_and_tis() {
    for which in 0..3 {
        let mut fixture = Fixture::new();
        let (pd, cq, domain) = (fixture.pd(), fixture.cq(), fixture.transport_domain());
        let tis = fixture.tis(domain);
        let sq = fixture.sq(pd, cq, tis);
        fixture.assert_used_by([pd, cq, tis][which], sq);
    }
}

#[test]
fn an_rq_uses_its_pd_and_cq() {
    for which in 0..2 {
        let mut fixture = Fixture::new();
        let (pd, cq) = (fixture.pd(), fixture.cq());
        let rq = fixture.rq(pd, cq, 0);
        fixture.assert_used_by([pd, cq][which], rq);
    }
}

#[test]
fn rqts_and_tirs_use_their_rqs() {
    let mut fixture = Fixture::new();
    let rq = fixture.any_rq();
    let rqt = fixture.rqt(rq);
    fixture.assert_used_by(rq, rqt);
    let rq = fixture.any_rq();
    let tir = fixture.direct_tir(rq);
    fixture.assert_used_by(rq, tir);
    let rq = fixture.any_rq();
    let rqt = fixture.rqt(rq);
    const TOEPLITZ: u64 = 2;
    let indirect = [
        (tirc::disp_type, 1),
        (tirc::indirect_table, rqt.number.into()),
        (tirc::rx_hash_fn, TOEPLITZ),
    ];
    let tir = fixture.tir(&indirect);
    fixture.assert_used_by(rqt, tir);
}

#[test]
fn srqs_use_and_are_used() {
    let mut fixture = Fixture::new();
    let pd = fixture.pd();
    let rmp = fixture.rmp(pd);
    fixture.assert_used_by(pd, rmp);
    let pd = fixture.pd();
    let rmp = fixture.rmp(pd);
    let shared = [(qpc::rq_type, 1), (qpc::srqn_rmpn_xrqn, rmp.number.into())];
    let qp = fixture.qp(0, &shared);
    fixture.assert_used_by(rmp, qp);
    for which in 0..3 {
        let (pd, xrcd, cq) = (fixture.pd(), fixture.xrcd(), fixture.cq());
        let srq = fixture.xrc_srq(pd, xrcd, cq);
        fixture.assert_used_by([pd, xrcd, cq][which], srq);
    }
    let xrcd = fixture.xrcd();
    const XRC: u64 = 3;
    let qp = fixture.qp(XRC, &[(qpc::rq_type, 3), (qpc::xrcd, xrcd.number.into())]);
    fixture.assert_used_by(xrcd, qp);
}

#[test]
fn queues_use_their_q_counter() {
    let mut fixture = Fixture::new();
    let (one, other) = (fixture.alloc_q_counter(), fixture.alloc_q_counter());
    let qp = fixture.driver.qp(0, fixture.cqn);
    let counts = |fixture: &mut Fixture, op, mask: u64, set: u32| {
        use uverbs_uapi::mlx5::prm::qpc::rst2init_qp_in;
        let mut input = Bits::<rst2init_qp_in, _>::new(vec![0; rst2init_qp_in::SIZE]);
        input.set(rst2init_qp_in::qpn, qp.number.into());
        input.set(rst2init_qp_in::opt_param_mask, mask);
        input.sub_mut(rst2init_qp_in::qpc).set(qpc::counter_set_id, set.into());
        let modified = fixture.driver.run_command(op, &input.into_inner());
        modified.map_or_else(|refused| refused.0, |_| 0)
    };
    assert_eq!(counts(&mut fixture, opcode::RST2INIT_QP, 0, other + 1), BAD_RESOURCE);
    assert_eq!(counts(&mut fixture, opcode::RST2INIT_QP, 0, one), 0);
    assert_eq!(
        (fixture.dealloc_q_counter(one), fixture.dealloc_q_counter(other)),
        (RESOURCE_BUSY, 0)
    );
    let other = fixture.alloc_q_counter();
    assert_eq!(counts(&mut fixture, opcode::INIT2INIT_QP, 1 << 25, other), 0);
    assert_eq!(
        (fixture.dealloc_q_counter(one), fixture.dealloc_q_counter(other)),
        (0, RESOURCE_BUSY)
    );
    assert_eq!(counts(&mut fixture, opcode::TO_RST_QP, 0, 0), 0);
    assert_eq!(fixture.dealloc_q_counter(other), 0);

    let (one, other, pd, cq) =
        (fixture.alloc_q_counter(), fixture.alloc_q_counter(), fixture.pd(), fixture.cq());
    let rq = fixture.rq(pd, cq, one);
    assert_eq!(fixture.dealloc_q_counter(one), RESOURCE_BUSY);
    let mut input = Bits::<modify_rq_in, _>::new(vec![0; modify_rq_in::SIZE]);
    input.set(modify_rq_in::rqn, rq.number.into());
    input.set(modify_rq_in::modify_bitmask, 1 << 3);
    input.sub_mut(modify_rq_in::ctx).set(rqc::counter_set_id, other.into());
    fixture.driver.run_command(opcode::MODIFY_RQ, &input.into_inner()).unwrap();
    assert_eq!(
        (fixture.dealloc_q_counter(one), fixture.dealloc_q_counter(other)),
        (0, RESOURCE_BUSY)
    );
    assert_eq!(fixture.destroy(rq), 0);
    assert_eq!(fixture.dealloc_q_counter(other), 0);
}

#[test]
fn multicast_groups_use_their_members() {
    let mut fixture = Fixture::new();
    const UD: u64 = 2;
    let qp = fixture.qp(UD, &[]);
    let mut input = [0; 32];
    input[8..12].copy_from_slice(&qp.number.to_be_bytes());
    input[16] = 0xff;
    fixture.driver.run_command(opcode::ATTACH_TO_MCG, &input).unwrap();
    assert_eq!(fixture.destroy(qp), RESOURCE_BUSY);
    fixture.driver.run_command(opcode::DETACH_FROM_MCG, &input).unwrap();
    assert_eq!(fixture.destroy(qp), 0);
}

#[test]
fn flow_table_entries_use_their_destinations_and_counters() {
    let mut fixture = Fixture::new();
    let rq = fixture.any_rq();
    let tir = fixture.direct_tir(rq);
    let out = fixture.driver.run_command(opcode::ALLOC_FLOW_COUNTER, &[0; 16]).unwrap();
    let number = u32::from_be_bytes(out[8..12].try_into().unwrap());
    let counter = Object { destroy: opcode::DEALLOC_FLOW_COUNTER, number };
    let (table, next) = (fixture.flow_table(), fixture.flow_table());
    let group = fixture.flow_group(table);
    fixture.set_flow(table, (TO_TIR, tir.number), Some(counter.number));
    assert_eq!((fixture.destroy(tir), fixture.destroy(counter)), (RESOURCE_BUSY, RESOURCE_BUSY));
    assert_eq!(
        (fixture.destroy_flow_group(table, group), fixture.destroy_flow_table(table)),
        (RESOURCE_BUSY, RESOURCE_BUSY)
    );
    // Another entry in its place releases these objects.
    fixture.set_flow(table, (TO_TABLE, next), None);
    assert_eq!((fixture.destroy(tir), fixture.destroy(counter)), (0, 0));
    assert_eq!(fixture.destroy_flow_table(next), RESOURCE_BUSY);
    fixture.delete_flow(table);
    assert_eq!(fixture.destroy_flow_table(next), 0);
    assert_eq!(fixture.destroy_flow_table(table), RESOURCE_BUSY, "it has a group");
    assert_eq!(fixture.destroy_flow_group(table, group), 0);
    assert_eq!(fixture.destroy_flow_table(table), 0);
}

/// The driver destroys the last table while it is still the root.
#[test]
fn a_root_flow_table_can_be_destroyed() {
    let mut fixture = Fixture::new();
    let table = fixture.flow_table();
    let root = |fixture: &mut Fixture, table: u32| {
        let input = vec![0; set_flow_table_root_in::SIZE];
        let mut input = Bits::<set_flow_table_root_in, _>::new(input);
        input.set(set_flow_table_root_in::table_id, table.into());
        let set = fixture.driver.run_command(opcode::SET_FLOW_TABLE_ROOT, &input.into_inner());
        set.map_or_else(|refused| refused.0, |_| 0)
    };
    assert_eq!(root(&mut fixture, table), 0);
    assert_eq!(fixture.destroy_flow_table(table), 0);
    assert_eq!(root(&mut fixture, table), BAD_RESOURCE);
}

/// Types of the events after a queue pair was moved to error and two doorbells were rung.
fn events_after_error(
    service: u64,
    fields: impl Fn(&mut Fixture) -> Vec<(Field<qpc>, u64)>,
) -> Vec<u8> {
    let mut fixture = Fixture::new();
    // The first EQ gets the same events.
    fixture.driver.eq();
    let page = fixture.driver.last_page();
    fixture.driver.memory().write(page, &[0xff; 4096]).unwrap();
    let fields = fields(&mut fixture);
    let mut qp = fixture.driver.qp_with(service, fixture.cqn, &fields);
    fixture.driver.modify(opcode::RST2INIT_QP, &qp, 0, &[]).unwrap();
    fixture.driver.modify(opcode::TO_ERR_QP, &qp, 0, &[]).unwrap();
    fixture.driver.run();
    for _ in 0..2 {
        fixture.driver.post_send(&mut qp, 0, 0, &[]);
    }
    let mut bytes = [0; 4096];
    fixture.driver.memory().read(page, &mut bytes).unwrap();
    let there = |entry: &&[u8]| entry[1] != 0xff;
    bytes.chunks(64).filter(there).map(|entry| entry[1]).collect()
}

#[test]
fn last_wqe_reached_is_raised_once_for_receivers() {
    const LAST: u8 = 0x13;
    const NOTHING: [u8; 0] = [];
    const RC: u64 = 0;
    const XRC: u64 = 3;
    let shared = |fixture: &mut Fixture| {
        let pd = fixture.pd();
        let rmp = fixture.rmp(pd);
        vec![(qpc::rq_type, 1), (qpc::srqn_rmpn_xrqn, rmp.number.into())]
    };
    let xrc = |fixture: &mut Fixture| {
        let xrcd = fixture.xrcd();
        [shared(fixture), vec![(qpc::xrcd, xrcd.number.into())]].concat()
    };
    assert_eq!(events_after_error(RC, |_| vec![]), NOTHING);
    assert_eq!(events_after_error(RC, shared), [LAST]);
    let target = |fixture: &mut Fixture| [xrc(fixture), vec![(qpc::no_sq, 1)]].concat();
    assert_eq!(events_after_error(XRC, target), [LAST]);
    assert_eq!(events_after_error(XRC, xrc), NOTHING, "an XRC initiator only sends");
}

/// Lists use the memory of the host.
#[test]
fn the_lists_of_a_guest_are_limited() {
    const LIMIT: u8 = 0x8;
    const NO_RESOURCES: u8 = 0xf;
    let mut fixture = Fixture::new();
    let rq = fixture.any_rq();
    let rqt = |fixture: &mut Fixture, count: usize| {
        let mut input = Bits::<create_rqt_in, _>::new(vec![0; create_rqt_in::SIZE]);
        input.sub_mut(create_rqt_in::rqt_context).set(rqtc::rqt_actual_size, count as u64);
        let mut input = input.into_inner();
        (0..count).for_each(|_| input.extend(rq.number.to_be_bytes()));
        let created = fixture.driver.run_command(opcode::CREATE_RQT, &input);
        created.map_or_else(|refused| refused.0, |_| 0)
    };
    assert_eq!((rqt(&mut fixture, 512), rqt(&mut fixture, 513)), (0, LIMIT));

    let mut input = Bits::<create_flow_table_in, _>::new(vec![0; create_flow_table_in::SIZE]);
    let mut context = input.sub_mut(create_flow_table_in::flow_table_context);
    context.set(flow_table_context::log_size, 16);
    let out = fixture.driver.run_command(opcode::CREATE_FLOW_TABLE, &input.into_inner()).unwrap();
    let table = Bits::<create_flow_table_out, _>::new(out).get32(create_flow_table_out::table_id);
    let group = |fixture: &mut Fixture, at: u64| {
        let input = vec![0; create_flow_group_in::SIZE];
        let mut input = Bits::<create_flow_group_in, _>::new(input);
        input.set(create_flow_group_in::table_id, table.into());
        input.set(create_flow_group_in::start_flow_index, at);
        input.set(create_flow_group_in::end_flow_index, at);
        let created = fixture.driver.run_command(opcode::CREATE_FLOW_GROUP, &input.into_inner());
        created.map_or_else(|refused| refused.0, |_| 0)
    };
    assert!((0..4096).all(|at| group(&mut fixture, at) == 0));
    assert_eq!(group(&mut fixture, 4096), NO_RESOURCES);

    let tir = fixture.direct_tir(rq);
    let flow = |fixture: &mut Fixture, count: u64| {
        let mut input = Bits::<set_fte_in, _>::new(vec![0; set_fte_in::SIZE]);
        input.set(set_fte_in::table_id, table.into());
        let mut context = input.sub_mut(set_fte_in::flow_context);
        context.set(flow_context::action, 4);
        context.set(flow_context::destination_list_size, count);
        let mut entry = Bits::<dest_format, _>::new(vec![0; dest_format::SIZE]);
        entry.set(dest_format::destination_type, TO_TIR);
        entry.set(dest_format::destination_id, tir.number.into());
        let (mut input, entry) = (input.into_inner(), entry.into_inner());
        (0..count).for_each(|_| input.extend(&entry));
        let set = fixture.driver.run_command(opcode::SET_FLOW_TABLE_ENTRY, &input);
        set.map_or_else(|refused| refused.0, |_| 0)
    };
    assert_eq!((flow(&mut fixture, 64), flow(&mut fixture, 65)), (0, LIMIT));
}
