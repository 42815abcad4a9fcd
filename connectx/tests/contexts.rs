//! User contexts: which objects they may use, and queues in their umems.

mod driver;

use driver::{CommandError, Driver};
use uverbs_uapi::mlx5::prm::cmd::set_hca_cap_in;
use uverbs_uapi::mlx5::prm::cqc::{cqc, create_cq_in, create_cq_out};
use uverbs_uapi::mlx5::prm::flow::{
    create_flow_table_in, create_flow_table_out, destroy_flow_table_in, flow_table_context,
};
use uverbs_uapi::mlx5::prm::hca_cap::cmd_hca_cap;
use uverbs_uapi::mlx5::prm::mkc::{create_mkey_in, create_mkey_out, mkc};
use uverbs_uapi::mlx5::prm::object::{
    alloc_pd_out, alloc_uar_out, create_umem_in, create_umem_out, umem,
};
use uverbs_uapi::mlx5::prm::{Bits, Field, Layout, opcode};

const BAD_PARAMETER: u8 = 0x3;
const BAD_INPUT_LENGTH: u8 = 0x50;
const BAD_RESOURCE: u8 = 0x5;
const RESOURCE_BUSY: u8 = 0x6;

/// An input with a number where most commands have it.
fn number(number: u32) -> Vec<u8> {
    let mut input = vec![0; 16];
    input[8..12].copy_from_slice(&number.to_be_bytes());
    input
}

/// Rights in the MTT entries of a umem.
const READ: u64 = 1;
const READ_AND_WRITE: u64 = 3;

fn umem_of(driver: &mut Driver, uid: u32, pages: &[u64], offset: u64) -> u32 {
    let pages: Vec<u64> = pages.iter().map(|page| page | READ_AND_WRITE).collect();
    umem_of_pages(driver, uid, &pages, offset, 0)
}

/// A umem of MTT entries of pages of 2^(12 + `log`) bytes.
fn umem_of_pages(driver: &mut Driver, uid: u32, pages: &[u64], offset: u64, log: u64) -> u32 {
    let mut input = Bits::<create_umem_in, _>::new(vec![0; create_umem_in::SIZE]);
    let mut context = input.sub_mut(create_umem_in::umem);
    context.set(umem::num_of_mtt, pages.len() as u64);
    context.set(umem::page_offset, offset);
    context.set(umem::log_page_size, log);
    let mut input = input.into_inner();
    input.extend(pages.iter().flat_map(|page| page.to_be_bytes()));
    let out = driver.run_command_as(uid, opcode::CREATE_UMEM, &input).unwrap();
    Bits::<create_umem_out, _>::new(out).get32(create_umem_out::umem_id)
}

/// Sets log2 of the UARs in a page of the driver, as a driver with larger pages does.
fn set_uars_per_page(driver: &mut Driver, log: u64) {
    const CURRENT: u8 = 1;
    let mut input = vec![0; 16];
    input[7] = CURRENT;
    let out = driver.run_command(opcode::QUERY_HCA_CAP, &input).unwrap();
    let mut input = vec![0; 16];
    input.extend(&out[16..]);
    let mut input = Bits::<set_hca_cap_in, _>::new(input);
    let mut capability = input.span(set_hca_cap_in::capability).to_vec();
    Bits::<cmd_hca_cap, _>::new(&mut capability[..]).set(cmd_hca_cap::log_uar_page_sz, log);
    input.set_span(set_hca_cap_in::capability, &capability);
    driver.run_command(opcode::SET_HCA_CAP, &input.into_inner()).unwrap();
}

#[test]
fn a_driver_with_larger_pages_gets_all_uars_of_a_page() {
    let mut driver = Driver::new();
    set_uars_per_page(&mut driver, 2);
    let mut alloc = || {
        let out = driver.run_command(opcode::ALLOC_UAR, &[0; 16]).unwrap();
        Bits::<alloc_uar_out, _>::new(out).get32(alloc_uar_out::uar)
    };
    let (one, other) = (alloc(), alloc());
    assert_eq!((one % 4, other), (0, one + 4));
    // A queue may ring any of them.
    let first = driver.uar;
    driver.uar = other + 3;
    let eqn = driver.eq();
    let refused = driver.run_command(opcode::DEALLOC_UAR, &number(other));
    assert_eq!(refused.unwrap_err().0, RESOURCE_BUSY);
    let inside = driver.run_command(opcode::DEALLOC_UAR, &number(other + 3));
    assert_eq!(inside.unwrap_err().0, BAD_RESOURCE);
    driver.run_command(opcode::DESTROY_EQ, &number(eqn)).unwrap();
    driver.run_command(opcode::DEALLOC_UAR, &number(other)).unwrap();
    driver.uar = first;
}

#[test]
fn a_context_cannot_use_objects_of_another() {
    let mut driver = Driver::new();
    let (one, other) = (driver.create_uctx(), driver.create_uctx());
    let out = driver.run_command_as(one, opcode::ALLOC_PD, &[0; 16]).unwrap();
    let pd = Bits::<alloc_pd_out, _>::new(out).get32(alloc_pd_out::pd);
    let key = |driver: &mut Driver, uid, mode| {
        let mut input = Bits::<create_mkey_in, _>::new(vec![0; create_mkey_in::SIZE]);
        let mut context = input.sub_mut(create_mkey_in::memory_key_mkey_entry);
        context.set(mkc::pd, pd.into());
        context.set(mkc::access_mode_1_0, mode);
        let out = driver.run_command_as(uid, opcode::CREATE_MKEY, &input.into_inner())?;
        Ok(Bits::<create_mkey_out, _>::new(out).get32(create_mkey_out::mkey_index))
    };
    const PHYSICAL: u64 = 0;
    const KLMS: u64 = 2;
    let status = |result: Result<u32, CommandError>| result.unwrap_err().0;
    assert_eq!(status(key(&mut driver, other, KLMS)), BAD_RESOURCE);
    assert_eq!(status(key(&mut driver, one, PHYSICAL)), BAD_PARAMETER);
    let keys = [key(&mut driver, one, KLMS).unwrap(), key(&mut driver, 0, PHYSICAL).unwrap()];
    let foreign = driver.run_command_as(other, opcode::DEALLOC_PD, &number(pd));
    assert_eq!(foreign.unwrap_err().0, BAD_RESOURCE);
    let absent = driver.run_command_as(other + 1, opcode::ALLOC_PD, &[0; 16]);
    assert_eq!(absent.unwrap_err().0, BAD_RESOURCE);
    for key in keys {
        let busy = driver.run_command_as(one, opcode::DEALLOC_PD, &number(pd));
        assert_eq!(busy.unwrap_err().0, RESOURCE_BUSY);
        driver.run_command(opcode::DESTROY_MKEY, &number(key)).unwrap();
    }
    driver.run_command_as(one, opcode::DEALLOC_PD, &number(pd)).unwrap();
}

#[test]
fn a_context_cannot_use_flow_tables_of_another() {
    let mut driver = Driver::new();
    let (one, other) = (driver.create_uctx(), driver.create_uctx());
    let make = |driver: &mut Driver, uid, miss: Option<u32>| {
        let mut input = Bits::<create_flow_table_in, _>::new(vec![0; create_flow_table_in::SIZE]);
        let mut context = input.sub_mut(create_flow_table_in::flow_table_context);
        context.set(flow_table_context::table_miss_action, miss.is_some().into());
        context.set(flow_table_context::table_miss_id, miss.unwrap_or(0).into());
        let out = driver.run_command_as(uid, opcode::CREATE_FLOW_TABLE, &input.into_inner())?;
        Ok::<u32, CommandError>(
            Bits::<create_flow_table_out, _>::new(out).get32(create_flow_table_out::table_id),
        )
    };
    let destroy = |driver: &mut Driver, uid, table: u32| {
        let mut input = Bits::<destroy_flow_table_in, _>::new(vec![0; destroy_flow_table_in::SIZE]);
        input.set(destroy_flow_table_in::table_id, table.into());
        let result = driver.run_command_as(uid, opcode::DESTROY_FLOW_TABLE, &input.into_inner());
        result.map_or_else(|refused| refused.0, |_| 0)
    };
    let last = make(&mut driver, one, None).unwrap();
    assert_eq!(make(&mut driver, other, Some(last)).unwrap_err().0, BAD_RESOURCE);
    let first = make(&mut driver, one, Some(last)).unwrap();
    assert_eq!(destroy(&mut driver, other, first), BAD_RESOURCE);
    assert_eq!(
        destroy(&mut driver, one, last),
        RESOURCE_BUSY,
        "misses in the other table go there"
    );
    assert_eq!(destroy(&mut driver, one, first), 0);
    assert_eq!(destroy(&mut driver, one, last), 0);
}

#[test]
fn destroy_uctx_frees_the_uars_of_the_context() {
    let mut driver = Driver::new();
    let uid = driver.create_uctx();
    let count = |driver: &mut Driver| {
        let counts = driver.fabric.function(0).device().objects().counts();
        counts.into_iter().find(|(kind, _)| *kind == "UAR").unwrap().1
    };
    let before = count(&mut driver);
    driver.run_command_as(uid, opcode::ALLOC_UAR, &[0; 16]).unwrap();
    assert_eq!(count(&mut driver), before + 1);
    driver
        .run_command(opcode::DESTROY_UCTX, &{
            let mut input = vec![0; 16];
            input[10..12].copy_from_slice(&(uid as u16).to_be_bytes());
            input
        })
        .unwrap();
    assert_eq!(count(&mut driver), before);
}

/// The context that gets this uid next would own the remaining objects.
#[test]
fn destroy_uctx_is_refused_while_the_context_has_objects() {
    let mut driver = Driver::new();
    let uid = driver.create_uctx();
    let out = driver.run_command_as(uid, opcode::ALLOC_PD, &[0; 16]).unwrap();
    let pd = Bits::<alloc_pd_out, _>::new(out).get32(alloc_pd_out::pd);
    let mut end = vec![0; 16];
    end[10..12].copy_from_slice(&(uid as u16).to_be_bytes());
    assert_eq!(driver.run_command(opcode::DESTROY_UCTX, &end).unwrap_err().0, RESOURCE_BUSY);
    driver.run_command_as(uid, opcode::DEALLOC_PD, &number(pd)).unwrap();
    driver.run_command(opcode::DESTROY_UCTX, &end).unwrap();
    let gone = driver.run_command_as(uid, opcode::ALLOC_PD, &[0; 16]).unwrap_err();
    assert_eq!(gone.0, BAD_RESOURCE);
}

#[test]
fn a_cq_lies_in_its_umem() {
    // From the manual; the kernel never uses these fields and does not describe them.
    const QUEUE_OFFSET: Field<create_cq_in> = Field::new(0x280, 0x40);
    const QUEUE: Field<create_cq_in> = Field::new(0x2c0, 0x20);
    const RECORD: Field<cqc> = Field::new(0x20, 0x20);
    let mut driver = Driver::new();
    driver.set_gid();
    let uid = driver.create_uctx();
    let eqn = driver.eq();
    let (buffer, record) = (driver.alloc_page(), driver.alloc_page());
    driver.memory().write(buffer, &[0xf1; 4096]).unwrap();
    let queue_memory = umem_of(&mut driver, uid, &[buffer], 0x100);
    let record_memory = umem_of(&mut driver, uid, &[record], 0x40);
    let out = driver.run_command_as(uid, opcode::ALLOC_UAR, &[0; 16]).unwrap();
    let uar = Bits::<alloc_uar_out, _>::new(out).get32(alloc_uar_out::uar);
    let create_in =
        |driver: &mut Driver, uid, umems: [u32; 2], [offset, record_offset]: [u64; 2]| {
            let mut input = Bits::<create_cq_in, _>::new(vec![0; create_cq_in::SIZE]);
            let mut context = input.sub_mut(create_cq_in::cq_context);
            context.set(cqc::log_cq_size, 2);
            context.set(cqc::uar_page, uar.into());
            context.set(cqc::c_eqn_or_apu_element, eqn.into());
            context.set(cqc::dbr_umem_valid, 1);
            context.set(cqc::dbr_addr, record_offset);
            context.set(RECORD, umems[1].into());
            input.set(create_cq_in::cq_umem_valid, 1);
            input.set(QUEUE, umems[0].into());
            input.set(QUEUE_OFFSET, offset);
            let out = driver.run_command_as(uid, opcode::CREATE_CQ, &input.into_inner())?;
            Ok::<u32, CommandError>(Bits::<create_cq_out, _>::new(out).get32(create_cq_out::cqn))
        };
    let create = |driver: &mut Driver, uid, offset, record_offset| {
        create_in(driver, uid, [queue_memory, record_memory], [offset, record_offset])
    };
    // One page of two that may not be written is enough.
    let pages = [buffer | READ_AND_WRITE, buffer | READ];
    let read_only = umem_of_pages(&mut driver, uid, &pages, 0, 0);
    let refused = create_in(&mut driver, uid, [read_only, record_memory], [0, 0]).unwrap_err();
    assert_eq!(refused.0, BAD_PARAMETER);
    // The device only reads doorbell records.
    let cqn = create_in(&mut driver, uid, [queue_memory, read_only], [0, 0]).unwrap();
    driver.run_command_as(uid, opcode::DESTROY_CQ, &number(cqn)).unwrap();
    driver.run_command_as(uid, opcode::DESTROY_UMEM, &number(read_only)).unwrap();
    for (uid, offset, record_offset, status) in [
        (driver.create_uctx(), 0, 0, BAD_RESOURCE),
        (uid, 0xe01, 0, BAD_PARAMETER),
        (uid, u64::MAX, 0, BAD_PARAMETER),
        (uid, 0, 0xfc0, BAD_PARAMETER),
        (uid, 0, 4, BAD_PARAMETER),
    ] {
        let refused = create(&mut driver, uid, offset, record_offset).unwrap_err();
        assert_eq!(refused.0, status, "{offset:#x} {record_offset:#x}");
    }
    let cqn = create(&mut driver, uid, 0x80, 0x18).unwrap();
    for memory in [queue_memory, record_memory] {
        let busy = driver.run_command_as(uid, opcode::DESTROY_UMEM, &number(memory));
        assert_eq!(busy.unwrap_err().0, RESOURCE_BUSY);
    }
    // The CQ holds four CQEs, so the doorbell record has to advance.
    let mut qp = driver.qp(0, cqn);
    let other = driver.qp(0, cqn);
    driver.connect(&qp, &other);
    for turn in 0..6u32 {
        driver.memory().write(record + 0x40 + 0x18, &turn.to_be_bytes()).unwrap();
        driver.post_send(&mut qp, 0, 0, &[]);
        let at = u64::from(turn % 4) * 64;
        let (_, cqe) = driver.cqe(buffer + 0x100 + 0x80 + at, 0);
        assert_eq!((cqe[63] >> 4, u32::from(cqe[61])), (0, turn));
    }
    for queue in [qp.number, other.number] {
        driver.run_command(opcode::DESTROY_QP, &number(queue)).unwrap();
    }
    driver.run_command_as(uid, opcode::DESTROY_CQ, &number(cqn)).unwrap();
    for memory in [queue_memory, record_memory] {
        driver.run_command_as(uid, opcode::DESTROY_UMEM, &number(memory)).unwrap();
    }
}

/// The most bytes of memory that this process had at once. Linux adds what each processor counted only now and then, so
/// a later answer may be a little smaller.
fn most_memory() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}

fn alloc_pd(driver: &mut Driver, uid: u32) -> u32 {
    let out = driver.run_command_as(uid, opcode::ALLOC_PD, &[0; 16]).unwrap();
    Bits::<alloc_pd_out, _>::new(out).get32(alloc_pd_out::pd)
}

/// Creates an mkey over pages of a umem, with these fields of its context.
fn create_mkey(
    driver: &mut Driver,
    uid: u32,
    pd: u32,
    umem: u32,
    fields: &[(Field<mkc>, u64)],
) -> Result<Vec<u8>, CommandError> {
    const PAGES: u64 = 1;
    let mut input = Bits::<create_mkey_in, _>::new(vec![0; create_mkey_in::SIZE]);
    input.set(create_mkey_in::mkey_umem_valid, 1);
    input.set(create_mkey_in::mkey_umem_id, umem.into());
    let mut context = input.sub_mut(create_mkey_in::memory_key_mkey_entry);
    context.set(mkc::pd, pd.into());
    context.set(mkc::access_mode_1_0, PAGES);
    fields.iter().for_each(|(field, value)| context.set(*field, *value));
    driver.run_command_as(uid, opcode::CREATE_MKEY, &input.into_inner())
}

/// The list of 64 pages names 2^26 pages of 4 KiB, whose addresses would take 512 MiB.
#[test]
fn an_mkey_over_a_umem_of_large_pages_costs_what_it_holds() {
    const LOG: u64 = 20;
    let mut driver = Driver::new();
    let uid = driver.create_uctx();
    let umem = umem_of_pages(&mut driver, uid, &[0; 64], 0, LOG);
    let pd = alloc_pd(&mut driver, uid);
    let mut key = |len, octowords| {
        let fields = [(mkc::len, len), (mkc::translations_octword_size, octowords)];
        create_mkey(&mut driver, uid, pd, umem, &fields)
    };
    let before = most_memory();
    for (len, octowords) in [(64 << 32, 4), ((8 << 12) + 1, 4), (1, 0)] {
        assert_eq!(key(len, octowords).unwrap_err().0, BAD_INPUT_LENGTH, "{len} in {octowords}");
    }
    let more = most_memory().saturating_sub(before);
    assert!(more < 256 << 20, "{more} bytes of memory for a command that is refused");
    key(8 << 12, 4).unwrap();
}

#[test]
fn an_mkey_writes_no_umem_that_the_device_may_only_read() {
    let mut driver = Driver::new();
    let uid = driver.create_uctx();
    let page = driver.alloc_page();
    let [read, write] = [READ, READ_AND_WRITE]
        .map(|rights| umem_of_pages(&mut driver, uid, &[page | rights], 0, 0));
    let pd = alloc_pd(&mut driver, uid);
    let mut key = |umem: u32, rights: &[Field<mkc>]| {
        let mut fields = vec![(mkc::len, 4096), (mkc::translations_octword_size, 1)];
        fields.extend(rights.iter().map(|right| (*right, 1)));
        create_mkey(&mut driver, uid, pd, umem, &fields).map(drop)
    };
    for right in [mkc::lw, mkc::rw, mkc::a] {
        assert_eq!(key(read, &[mkc::lr, right]).unwrap_err().0, BAD_PARAMETER);
        key(write, &[mkc::lr, right]).unwrap();
    }
    key(read, &[mkc::lr, mkc::rr]).unwrap();
}
