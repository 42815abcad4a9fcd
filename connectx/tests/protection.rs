//! Mkeys, connections and privileges: the accesses that an unprivileged process is refused.

mod driver;

use driver::pair::{Pair, code};
use driver::{CommandError, Driver, Queue};
use uverbs_uapi::mlx5::prm::mkc::mkc;
use uverbs_uapi::mlx5::prm::object::{alloc_pd_out, alloc_uar_out, alloc_xrcd_out};
use uverbs_uapi::mlx5::prm::qpc::{qpc, rst2init_qp_in};
use uverbs_uapi::mlx5::prm::srqc::{create_xrc_srq_in, create_xrc_srq_out, xrc_srqc};
use uverbs_uapi::mlx5::prm::{Bits, Field, Layout, opcode};

const BAD_PARAMETER: u8 = 0x3;
const BAD_RESOURCE: u8 = 0x5;
const RESOURCE_BUSY: u8 = 0x6;

/// Access modes of mkeys.
const MTTS: u64 = 1;
const KLMS: u64 = 2;

/// Services of queue pairs that only the kernel may create.
const SMI: u64 = 0x7;
const GSI: u64 = 0x8;
const UMR_QP: u64 = 0xc;

const UMR: u8 = 0x25;
const LOCAL_INVALIDATE: u8 = 0x1b;
const SEND_INVALIDATE: u8 = 0x01;

const LOCAL_OPERATION: u8 = 0x02;
const PROTECTION: u8 = 0x04;
const BINDING: u8 = 0x06;

/// All access rights, and UMR.
const ALL: [Field<mkc>; 5] = [mkc::lr, mkc::lw, mkc::rr, mkc::rw, mkc::umr_en];

/// Segments of a UMR WQE with an inline list and a mask of context fields.
fn umr(mask: u64, fields: &[(Field<mkc>, u64)], list: &[u8]) -> Vec<u8> {
    let mut segments = vec![0x80, 0, 0, 0];
    segments.extend(((list.len() / 16) as u16).to_be_bytes());
    segments.extend([0; 2]);
    segments.extend(mask.to_be_bytes());
    segments.resize(48, 0);
    let mut context = Bits::<mkc, _>::new(vec![0; 64]);
    for (field, value) in fields {
        context.set(*field, *value);
    }
    segments.extend(context.into_inner());
    segments.extend(list);
    segments
}

/// MTTs of eight pages.
fn pages(first: u64) -> Vec<u8> {
    (0..8).flat_map(|page| (first + page * 4096).to_be_bytes()).collect()
}

/// Opcode and syndrome in the CQE of a WQE of the first queue pair.
fn outcome(p: &mut Pair, index: u64, op: u8, immediate: u32, segments: &[u8]) -> (u8, u8) {
    p.driver.post_send(&mut p.a, op, immediate, segments);
    let (code, cqe) = p.driver.cqe(p.sent, index);
    (code, if code == code::REQUEST_ERROR { cqe[55] } else { 0 })
}

#[test]
fn only_kernel_queues_may_change_mkeys_of_pages() {
    const RIGHTS: u64 = 1 << 18 | 1 << 20;
    let start = [(mkc::start_addr, 0), (mkc::len, 1 << 30), (mkc::log_page_size, 30)];
    for fast in [false, true] {
        for (mask, list) in [(0, true), (0b11, false), (1 << 6, false), (RIGHTS, false)] {
            let mut p = Pair::with(&[], &[(qpc::fre, fast.into())]);
            let (to, elsewhere) = (p.to, p.driver.alloc_page());
            let key = p.driver.mkey(to, 4096, &ALL);
            let list = if list { pages(elsewhere) } else { vec![] };
            let end = outcome(&mut p, 0, UMR, key, &umr(mask, &start, &list));
            if fast {
                assert_eq!(end, (code::REQUEST, 0), "{mask:#x}");
                continue;
            }
            assert_eq!(end, (code::REQUEST_ERROR, LOCAL_OPERATION), "{mask:#x}");
        }
    }
    // The new address is used.
    let mut p = Pair::with(&[], &[(qpc::fre, 1)]);
    let (to, elsewhere) = (p.to, p.driver.alloc_page());
    let key = p.driver.mkey(to, 4096, &ALL);
    outcome(&mut p, 0, UMR, key, &umr(0, &[], &pages(elsewhere)));
    p.driver.memory().write(p.from, &[7; 8]).unwrap();
    let write = [Pair::remote(to, key), p.local(8)].concat();
    assert_eq!(outcome(&mut p, 1, code::WRITE, 0, &write), (code::REQUEST, 0));
    assert_eq!((p.bytes(elsewhere), p.bytes(to)), ([7; 8], [0; 8]));
}

/// mlx5_ib of Linux 5.10 creates its UMR QP in another PD than the mkey that names the lists.
#[test]
fn only_the_umr_qp_reads_lists_from_memory_of_another_pd() {
    for umr_qp in [true, false] {
        let mut p = Pair::with(&[], &[(qpc::fre, 1)]);
        let (to, elsewhere) = (p.to, p.driver.alloc_page());
        let key = p.driver.mkey(to, 4096, &ALL);
        let own = p.driver.pd;
        let out = p.driver.run_command(opcode::ALLOC_PD, &[0; 16]).unwrap();
        p.driver.pd = Bits::<alloc_pd_out, _>::new(out).get32(alloc_pd_out::pd);
        assert_ne!(p.driver.pd, own);
        let lists = p.driver.mkey(p.from, 4096, &[mkc::lr]);
        p.driver.pd = own;
        if umr_qp {
            let queue = p.driver.qp_with(UMR_QP, p.send_cq, &[(qpc::pd, 0)]);
            let pd = [(qpc::pd, own.into())];
            p.driver.modify(opcode::RST2INIT_QP, &queue, 0, &pd).unwrap();
            p.driver.modify(opcode::INIT2RTR_QP, &queue, 0, &[(qpc::mtu, 5)]).unwrap();
            p.driver.modify(opcode::RTR2RTS_QP, &queue, 0, &[]).unwrap();
            p.a = queue;
        }
        p.driver.memory().write(p.from, &pages(elsewhere)).unwrap();
        let mut segments = umr(0, &[], &[]);
        segments[..6].copy_from_slice(&[0, 0, 0, 0, 0, 4]);
        segments.extend(Driver::segment(64, lists, p.from));
        let end = outcome(&mut p, 0, UMR, key, &segments);
        let refused = (code::REQUEST_ERROR, LOCAL_OPERATION);
        assert_eq!(end, if umr_qp { (code::REQUEST, 0) } else { refused });
    }
}

#[test]
fn umr_of_a_physical_mkey_is_refused() {
    let mut p = Pair::with(&[], &[(qpc::fre, 1)]);
    let rights = ALL.map(|right| (right, 1));
    let key = p.driver.mkey_with(&[&rights[..], &[(mkc::len, 4096)]].concat(), &[]);
    let wider = umr(1, &[(mkc::len, 1 << 40)], &[]);
    assert_eq!(outcome(&mut p, 0, UMR, key, &wider), (code::REQUEST_ERROR, LOCAL_OPERATION));
}

#[test]
fn every_queue_may_change_klm_lists() {
    let mut p = Pair::new();
    let rights = ALL.map(|right| (right, 1));
    let fields = [(mkc::access_mode_1_0, KLMS), (mkc::len, 8)];
    let key = p.driver.mkey_with(&[&rights[..], &fields].concat(), &[0; 64]);
    let mut list = Driver::segment(8, p.key, p.to);
    list.resize(64, 0);
    assert_eq!(outcome(&mut p, 0, UMR, key, &umr(0, &[], &list)), (code::REQUEST, 0));
    p.driver.memory().write(p.from, &[7; 8]).unwrap();
    let write = [Pair::remote(0, key), p.local(8)].concat();
    assert_eq!(outcome(&mut p, 1, code::WRITE, 0, &write), (code::REQUEST, 0));
    assert_eq!(p.bytes(p.to), [7; 8]);
}

/// An mkey bound to a queue pair, or to none, like a memory window of type 2.
fn memory_window(p: &mut Pair, qpn: Option<u32>) -> u32 {
    let fields = [
        (mkc::access_mode_1_0, KLMS),
        (mkc::umr_en, 1),
        (mkc::en_rinval, 1),
        (mkc::qpn, qpn.unwrap_or(0xff_ffff).into()),
    ];
    p.driver.mkey_with(&fields, &[])
}

#[test]
fn a_memory_window_is_invalidated_only_by_its_queue_pair() {
    const FREE: u64 = 1 << 29;
    let free = umr(FREE, &[(mkc::free, 1)], &[]);
    for (op, segments, syndrome) in [(LOCAL_INVALIDATE, vec![], PROTECTION), (UMR, free, BINDING)] {
        let mut p = Pair::new();
        let other = p.b.number;
        let key = memory_window(&mut p, Some(other));
        let end = outcome(&mut p, 0, op, key, &segments);
        assert_eq!(end, (code::REQUEST_ERROR, syndrome), "{op:#x}");
        let mut p = Pair::new();
        let own = p.a.number;
        let key = memory_window(&mut p, Some(own));
        assert_eq!(outcome(&mut p, 0, op, key, &segments), (code::REQUEST, 0), "{op:#x}");
    }
}

#[test]
fn local_invalidate_needs_umr_en_and_a_list_and_works_once() {
    let mut p = Pair::new();
    let key = memory_window(&mut p, None);
    assert_eq!(outcome(&mut p, 0, LOCAL_INVALIDATE, key, &[]), (code::REQUEST, 0));
    let again = outcome(&mut p, 1, LOCAL_INVALIDATE, key, &[]);
    assert_eq!(again, (code::REQUEST_ERROR, PROTECTION));
    for (mode, enabled) in [(KLMS, 0), (MTTS, 1)] {
        let mut p = Pair::new();
        let fields = [(mkc::access_mode_1_0, mode), (mkc::umr_en, enabled)];
        let key = p.driver.mkey_with(&fields, &[]);
        let end = outcome(&mut p, 0, LOCAL_INVALIDATE, key, &[]);
        assert_eq!(end, (code::REQUEST_ERROR, PROTECTION), "mode {mode}");
    }
}

#[test]
fn send_with_invalidate_reaches_only_windows_of_the_connection() {
    for own in [true, false] {
        let mut p = Pair::new();
        let qpn = if own { p.b.number } else { p.a.number };
        let key = memory_window(&mut p, Some(qpn));
        p.receive(100);
        let local = p.local(8);
        let (code, _) = outcome(&mut p, 0, SEND_INVALIDATE, key, &local);
        assert_eq!(code == code::REQUEST, own);
    }
}

/// A PD and a UAR of a user context, as fields of a QP context.
fn pd_and_uar(driver: &mut Driver, uid: u32) -> [(Field<qpc>, u64); 2] {
    let out = driver.run_command_as(uid, opcode::ALLOC_PD, &[0; 16]).unwrap();
    let pd = Bits::<alloc_pd_out, _>::new(out).get(alloc_pd_out::pd);
    let out = driver.run_command_as(uid, opcode::ALLOC_UAR, &[0; 16]).unwrap();
    let uar = Bits::<alloc_uar_out, _>::new(out).get(alloc_uar_out::uar);
    [(qpc::pd, pd), (qpc::uar_page, uar)]
}

fn status(result: Result<Queue, CommandError>) -> u8 {
    result.map_or_else(|refused| refused.0, |_| 0)
}

#[test]
fn user_contexts_cannot_create_kernel_queue_pairs() {
    let mut driver = Driver::new();
    let eqn = driver.eq();
    let (cqn, _) = driver.cq(eqn);
    let uid = driver.create_uctx();
    let own = pd_and_uar(&mut driver, uid);
    let page = driver.alloc_page();
    let create = |driver: &mut Driver, service, field: Option<(Field<qpc>, u64)>| {
        let fields: Vec<_> = own.into_iter().chain(field).collect();
        driver.try_qp(uid, page, service, cqn, &fields)
    };
    for (service, field) in [
        (SMI, None),
        (GSI, None),
        (UMR_QP, None),
        (0, Some((qpc::fre, 1))),
        (2, Some((qpc::deth_sqpn, 1))),
    ] {
        assert_eq!(status(create(&mut driver, service, field)), BAD_PARAMETER, "{service:#x}");
    }
    let qp = create(&mut driver, 2, None).unwrap();
    let mut input = Bits::<rst2init_qp_in, _>::new(vec![0; rst2init_qp_in::SIZE]);
    input.set(rst2init_qp_in::qpn, qp.number.into());
    input.sub_mut(rst2init_qp_in::qpc).set(qpc::deth_sqpn, 1);
    let mut input = input.into_inner();
    let refused = driver.run_command_as(uid, opcode::RST2INIT_QP, &input).unwrap_err();
    assert_eq!(refused.0, BAD_PARAMETER);
    let at = input.len();
    input.clear();
    input.resize(at, 0);
    let mut input = Bits::<rst2init_qp_in, _>::new(input);
    input.set(rst2init_qp_in::qpn, qp.number.into());
    driver.run_command_as(uid, opcode::RST2INIT_QP, &input.into_inner()).unwrap();
}

/// mlx5_ib of Linux 5.10 allocates the UARs of user contexts as the kernel's.
#[test]
fn a_context_rings_in_its_own_uars_and_in_the_kernels() {
    let mut driver = Driver::new();
    let eqn = driver.eq();
    let (cqn, _) = driver.cq(eqn);
    let (one, other) = (driver.create_uctx(), driver.create_uctx());
    let [pd, own] = pd_and_uar(&mut driver, one);
    let [_, foreign] = pd_and_uar(&mut driver, other);
    let kernels = (qpc::uar_page, u64::from(driver.uar));
    let page = driver.alloc_page();
    for (uar, expected) in [(own, 0), (kernels, 0), (foreign, BAD_RESOURCE)] {
        let made = driver.try_qp(one, page, 0, cqn, &[pd, uar]);
        assert_eq!(status(made), expected, "{}", uar.1);
    }
}

#[test]
fn a_umr_qp_needs_an_existing_pd_and_does_not_leak_it() {
    let mut driver = Driver::new();
    let eqn = driver.eq();
    let (cqn, _) = driver.cq(eqn);
    let page = driver.alloc_page();
    let absent = u64::from(driver.pd) + 1;
    let missing = driver.try_qp(0, page, UMR_QP, cqn, &[(qpc::pd, absent)]);
    assert_eq!(status(missing), BAD_RESOURCE);
    let qp = driver.qp_with(UMR_QP, cqn, &[(qpc::pd, driver.pd.into())]);
    let key = driver.mkey(page, 4096, &ALL);
    let number = |number: u32| [&[0; 8][..], &number.to_be_bytes(), &[0; 4]].concat();
    driver.run_command(opcode::DESTROY_QP, &number(qp.number)).unwrap();
    let pd = driver.pd;
    assert_eq!(driver.run_command(opcode::DEALLOC_PD, &number(pd)).unwrap_err().0, RESOURCE_BUSY);
    driver.run_command(opcode::DESTROY_MKEY, &number(key >> 8)).unwrap();
    driver.run_command(opcode::DEALLOC_PD, &number(pd)).unwrap();
}

/// The same QPN exists on every port.
#[test]
fn a_message_from_another_gid_is_dropped() {
    const RETRIES_EXCEEDED: u8 = 0x15;
    let mut p = Pair::new();
    p.driver.peer_gid[15] ^= 1;
    let peer = p.a.number;
    p.driver.reconnect(&mut p.b, peer).unwrap();
    p.receive(100);
    let local = p.local(8);
    let end = outcome(&mut p, 0, code::SEND, 0, &local);
    assert_eq!(end, (code::REQUEST_ERROR, RETRIES_EXCEEDED));
    assert_eq!(p.driver.cqe(p.received, 0).0, code::NONE);
}

#[test]
fn an_xrc_srq_is_only_for_xrc_queue_pairs() {
    const XRC: u64 = 3;
    let mut driver = Driver::new();
    let eqn = driver.eq();
    let (cqn, _) = driver.cq(eqn);
    let out = driver.run_command(opcode::ALLOC_XRCD, &[0; 16]).unwrap();
    let xrcd = Bits::<alloc_xrcd_out, _>::new(out).get(alloc_xrcd_out::xrcd);
    let (page, record) = (driver.alloc_page(), driver.alloc_page());
    let mut input = Bits::<create_xrc_srq_in, _>::new(vec![0; create_xrc_srq_in::SIZE]);
    let mut context = input.sub_mut(create_xrc_srq_in::xrc_srq_context_entry);
    context.set(xrc_srqc::log_xrc_srq_size, 4);
    context.set(xrc_srqc::log_rq_stride, 1);
    context.set(xrc_srqc::pd, driver.pd.into());
    context.set(xrc_srqc::xrcd, xrcd);
    context.set(xrc_srqc::cqn, cqn.into());
    context.set(xrc_srqc::db_record_addr_l, record >> 2);
    let mut input = input.into_inner();
    input.extend(page.to_be_bytes());
    let out = driver.run_command(opcode::CREATE_XRC_SRQ, &input).unwrap();
    let srqn = Bits::<create_xrc_srq_out, _>::new(out).get(create_xrc_srq_out::xrc_srqn);
    let shared = [(qpc::rq_type, 1), (qpc::srqn_rmpn_xrqn, srqn), (qpc::xrcd, xrcd)];
    for (service, end) in [(0, BAD_RESOURCE), (2, BAD_RESOURCE), (XRC, 0)] {
        let page = driver.alloc_page();
        assert_eq!(status(driver.try_qp(0, page, service, cqn, &shared)), end, "{service}");
    }
}
