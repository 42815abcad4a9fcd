//! Each kind of object that programs create by commands, and queries that do not wait.

use super::{
    Queues, about, command, counter_query, counters, create, held, input, open, query_counters,
};
use crate::capability::Capability;
use crate::env;
use crate::fork::in_child;
use crate::leaks::rounds;
use crate::pair::{Config, PATIENCE, Pair};
use crate::verdict::{Verdict, supported, trials};
use std::collections::BTreeSet;
use uverbs::mlx5::devx::{self, DevxObject, DevxQueries, DevxRef, Umem};
use uverbs::mlx5::{QpLayout, RawPacketNumbers, RawQueuePair, Uar, UarKind, pd_number};
use uverbs::{Access, Context, Errno, Lkey, ObjectKind, QpType, Remote, SendWr, Sge, WcOpcode};
use uverbs_uapi::mlx5::cqe::mlx5_cqe_opcode;
use uverbs_uapi::mlx5::prm::cqc::{cqc, create_cq_in};
use uverbs_uapi::mlx5::prm::mkc::{create_mkey_in, mkc, query_mkey_out};
use uverbs_uapi::mlx5::prm::qpc::{qpc, rst2init_qp_in};
use uverbs_uapi::mlx5::prm::rqc::{
    create_rq_in, create_rqt_in, create_sq_in, create_tir_in, create_tis_in, modify_rq_in,
    modify_sq_in, query_rq_out, query_rqt_out, query_sq_out, query_tir_out, query_tis_out, rqc,
    rqtc, sqc, tirc, tisc,
};
use uverbs_uapi::mlx5::prm::srqc::wq;
use uverbs_uapi::mlx5::prm::vport::query_q_counter_out;
use uverbs_uapi::mlx5::prm::{Bits, Field, Layout, opcode};

trials![
    mkey_over_a_umem_names_its_memory,
    mkey_over_two_regions_carries_a_write,
    mkeys_that_make_no_sense_are_refused,
    raw_queues_and_what_steers_to_them_are_created,
    counter_set_counts_for_one_queue_pair,
    answers_arrive_with_their_numbers_and_lengths,
    unread_answers_have_a_limit,
    queries_that_the_kernel_does_not_take_are_refused,
    answers_leave_nothing,
    raw_queues_and_what_steers_to_them_leave_nothing,
    answers_stay_the_parents,
];

/// The output of a query of an object.
fn query<L: Layout>(op: u16, object: &DevxObject) -> Verdict<Bits<L, Vec<u8>>> {
    // RQ tables have their queues behind the context.
    let mut output = vec![0; L::SIZE + 64];
    devx::query(object, &about(op, object.number()), &mut output)?;
    Ok(Bits::new(output))
}

/// The variant part of the mkeys, the last byte of a key.
const VARIANT: u32 = 0x42;

/// An mkey over `length` bytes of a umem.
fn mkey(pd: u32, umem: &Umem, start: u64, length: u64) -> Bits<create_mkey_in, Vec<u8>> {
    let mut command = input::<create_mkey_in>(opcode::CREATE_MKEY);
    command.set(create_mkey_in::mkey_umem_id, umem.id().into());
    // Two pages in each octoword, and those at both ends may be in part.
    let octowords = (length / 4096 + 2).div_ceil(2);
    command.set(create_mkey_in::translations_octword_actual_size, octowords);
    let fields = [
        (mkc::access_mode_1_0, 1),
        (mkc::start_addr, start),
        (mkc::len, length),
        (mkc::log_page_size, 12),
        (mkc::translations_octword_size, octowords),
    ];
    set_context(&mut command, pd, &fields);
    command
}

/// Sets the context of an mkey with all rights for any queue pair of a domain, and these fields.
fn set_context(command: &mut Bits<create_mkey_in, Vec<u8>>, pd: u32, fields: &[(Field<mkc>, u64)]) {
    let mut context = command.sub_mut(create_mkey_in::memory_key_mkey_entry);
    for right in [mkc::lr, mkc::lw, mkc::rr, mkc::rw] {
        context.set(right, 1);
    }
    let common = [(mkc::qpn, 0xff_ffff), (mkc::mkey_7_0, VARIANT.into()), (mkc::pd, pd.into())];
    common.iter().chain(fields).for_each(|(field, value)| context.set(*field, *value));
}

/// An mkey over the first page of a umem, which it keeps with its domain.
pub(crate) fn mkey_in(
    context: &Context,
    pd: &uverbs::ProtectionDomain,
    umem: &Umem,
) -> Verdict<DevxObject> {
    let command = mkey(pd_number(pd)?, umem, umem.as_ptr() as u64, 4096);
    Ok(create(context, command.bytes(), &[umem, pd])?)
}

fn mkey_over_a_umem_names_its_memory() -> Verdict {
    const LENGTH: usize = 5 * 4096;
    let context = open()?;
    let mut queues = Queues::new(context.clone())?;
    let umem = Umem::builder(&context).page_sizes(4096).allocate(LENGTH)?;
    let start = umem.as_ptr() as u64;
    let command = mkey(pd_number(&queues.pd)?, &umem, start, LENGTH as u64);
    let mkey = create(&context, command.bytes(), &[&umem])?;
    let key = mkey.number() << 8 | VARIANT;
    let found = query::<query_mkey_out>(opcode::QUERY_MKEY, &mkey)?;
    let found = found.sub(query_mkey_out::memory_key_mkey_entry);
    assert_eq!((found.get(mkc::start_addr), found.get(mkc::len)), (start, LENGTH as u64));
    let mut region = queues.pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u64>(1024)?;
    for word in 0..1024 {
        region.write_at(word, word as u64 + 1)?;
    }
    // To the memory of the umem as a peer, across a page, and back from it as local memory.
    let offset = 4096 - 64;
    let to = Remote { addr: start + offset as u64, rkey: uverbs::Rkey(key) };
    let head = queues.poster.rdma_write(&region.sge(..4096)?, &to);
    queues.ring(head)?;
    queues.poller.expect(mlx5_cqe_opcode::MLX5_CQE_REQ)?;
    for word in 0..512 {
        let place = umem.as_ptr().wrapping_add(offset).cast::<u64>().wrapping_add(word);
        // SAFETY: inside the umem, which the device does not write now.
        let found = unsafe { place.read() };
        assert_eq!(found, word as u64 + 1);
    }
    let from = Sge { addr: start + offset as u64 + 8, length: 8, lkey: Lkey(key) };
    let head = queues.poster.rdma_write(&from, &region.remote(8000)?);
    queues.ring(head)?;
    queues.poller.expect(mlx5_cqe_opcode::MLX5_CQE_REQ)?;
    assert_eq!(region.read_at(1000), Some(2));
    // It keeps the umem.
    assert_eq!(umem.destroy().expect_err("it is kept").into_parts().1.errno(), Errno::BUSY);
    mkey.destroy()?;
    Ok(())
}

/// An mkey of KLMs, which names other mkeys and no umem.
fn mkey_over_two_regions_carries_a_write() -> Verdict {
    const KLMS: u64 = 2;
    /// Where the mkey begins, which is no address of memory.
    const START: u64 = 0x7000_0000;
    const HALF: u32 = 64;
    let mut queues = Queues::new(open()?)?;
    let region = || queues.pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u64>(512);
    let (mut from, first, second) = (region()?, region()?, region()?);
    let mut command = input::<create_mkey_in>(opcode::CREATE_MKEY);
    // A KLM is an octoword.
    command.set(create_mkey_in::translations_octword_actual_size, 2);
    let fields = [
        (mkc::access_mode_1_0, KLMS),
        (mkc::start_addr, START),
        (mkc::len, 2 * u64::from(HALF)),
        (mkc::translations_octword_size, 4),
    ];
    set_context(&mut command, pd_number(&queues.pd)?, &fields);
    let mut command = command.into_inner();
    for part in [&first, &second] {
        command.extend(HALF.to_be_bytes());
        command.extend(part.lkey().0.to_be_bytes());
        command.extend((part.as_ptr() as u64).to_be_bytes());
    }
    // Four octowords, the unit of lists.
    command.resize(command.len() + 32, 0);
    let mkey = create(&queues.context, &command, &[&queues.pd, &first, &second])?;
    for word in 0..16 {
        from.write_at(word, word as u64 + 1)?;
    }
    let to = Remote { addr: START, rkey: uverbs::Rkey(mkey.number() << 8 | VARIANT) };
    let head = queues.poster.rdma_write(&from.sge(..2 * HALF as usize)?, &to);
    queues.ring(head)?;
    queues.poller.expect(mlx5_cqe_opcode::MLX5_CQE_REQ)?;
    for word in 0..8 {
        assert_eq!(first.read_at(word), Some(word as u64 + 1));
        assert_eq!(second.read_at(word), Some(word as u64 + 9));
    }
    assert_eq!((first.read_at(8), second.read_at(8)), (Some(0), Some(0)));
    Ok(())
}

fn mkeys_that_make_no_sense_are_refused() -> Verdict {
    let context = open()?;
    let pd = context.alloc_pd()?;
    let (pd, umem) = (pd_number(&pd)?, Umem::builder(&context).page_sizes(4096).allocate(8192)?);
    let start = umem.as_ptr() as u64;
    let refused = |command: Bits<create_mkey_in, Vec<u8>>| {
        let error = create(&context, command.bytes(), &[&umem]).err();
        assert_eq!(error.and_then(|error| error.kernel_errno()), Some(Errno::REMOTEIO));
    };
    refused(mkey(pd, &umem, start, 8193));
    refused(mkey(0xff_ffff, &umem, start, 8192));
    let mut other = mkey(pd, &umem, start, 8192);
    other.set(create_mkey_in::mkey_umem_id, 0xffff);
    refused(other);
    let mut outside = mkey(pd, &umem, start, 8192);
    outside.set(create_mkey_in::mkey_umem_offset, 1 << 40);
    refused(outside);
    // The whole of the physical memory.
    let mut physical = mkey(pd, &umem, 0, 0);
    let mut entry = physical.sub_mut(create_mkey_in::memory_key_mkey_entry);
    entry.set(mkc::access_mode_1_0, 0);
    entry.set(mkc::length64, 1);
    refused(physical);
    Ok(())
}

/// Completion queue, send queue, receive queue, RQ table, TIS and TIR, all in one umem.
struct Raw {
    tir: DevxObject,
    rqt: DevxObject,
    tis: DevxObject,
    sq: DevxObject,
    rq: DevxObject,
    domain: DevxObject,
}

/// Offsets in the umem.
const SENDS: u64 = 0;
const RECEIVES: u64 = 0x1000;
const CQES: u64 = 0x2000;
const RECORDS: u64 = 0x3000;

impl Raw {
    fn new(context: &Context) -> Verdict<Raw> {
        let pd = context.alloc_pd()?;
        let uar = Uar::alloc(context, UarKind::NonCached)?;
        let umem = Umem::builder(context).page_sizes(4096).allocate(0x4000)?;
        let (id, pd_number) = (u64::from(umem.id()), u64::from(pd_number(&pd)?));
        let mut asked = input::<create_cq_in>(opcode::CREATE_CQ);
        asked.set(create_cq_in::cq_umem_id, id);
        asked.set(create_cq_in::cq_umem_offset, CQES);
        let mut queue = asked.sub_mut(create_cq_in::cq_context);
        for (field, value) in [
            (cqc::log_cq_size, 5),
            (cqc::uar_page, uar.page_id().into()),
            (cqc::c_eqn_or_apu_element, devx::query_eqn(context, 0)?.into()),
            (cqc::dbr_umem_id, id),
            (cqc::dbr_addr, RECORDS),
        ] {
            queue.set(field, value);
        }
        let cq = create(context, asked.bytes(), &[&umem, &uar])?;
        let domain = create(context, &command::<16>(opcode::ALLOC_TRANSPORT_DOMAIN), &[])?;
        let mut asked = input::<create_tis_in>(opcode::CREATE_TIS);
        asked.sub_mut(create_tis_in::ctx).set(tisc::transport_domain, domain.number().into());
        let tis = create(context, asked.bytes(), &[&domain])?;
        let work_queue = |mut queue: Bits<wq, &mut [u8]>, offset: u64, stride: u64, record: u64| {
            for (field, value) in [
                (wq::wq_type, 1),
                (wq::pd, pd_number),
                (wq::uar_page, uar.page_id().into()),
                (wq::log_wq_stride, stride),
                (wq::log_wq_sz, 4),
                (wq::wq_umem_id, id),
                (wq::wq_umem_offset, offset),
                (wq::dbr_umem_id, id),
                (wq::dbr_addr, RECORDS + record),
            ] {
                queue.set(field, value);
            }
        };
        let mut asked = input::<create_sq_in>(opcode::CREATE_SQ);
        let mut queue = asked.sub_mut(create_sq_in::ctx);
        queue.set(sqc::cqn, cq.number().into());
        queue.set(sqc::tis_lst_sz, 1);
        queue.set(sqc::tis_num_0, tis.number().into());
        work_queue(queue.sub_mut(sqc::wq), SENDS, 6, 64);
        let sq = create(context, asked.bytes(), &[&umem, &uar, &pd, &cq, &tis])?;
        let mut asked = input::<create_rq_in>(opcode::CREATE_RQ);
        let mut queue = asked.sub_mut(create_rq_in::ctx);
        queue.set(rqc::cqn, cq.number().into());
        work_queue(queue.sub_mut(rqc::wq), RECEIVES, 4, 128);
        let rq = create(context, asked.bytes(), &[&umem, &uar, &pd, &cq])?;
        let mut asked = input::<create_rqt_in>(opcode::CREATE_RQT);
        asked.sub_mut(create_rqt_in::rqt_context).set(rqtc::rqt_actual_size, 1);
        let mut bytes = asked.into_inner();
        bytes.extend(rq.number().to_be_bytes());
        let rqt = create(context, &bytes, &[&rq])?;
        let mut asked = input::<create_tir_in>(opcode::CREATE_TIR);
        let mut fields = asked.sub_mut(create_tir_in::ctx);
        for (field, value) in [
            (tirc::disp_type, 1),
            (tirc::indirect_table, rqt.number().into()),
            (tirc::rx_hash_fn, 2),
            (tirc::transport_domain, domain.number().into()),
        ] {
            fields.set(field, value);
        }
        let tir = create(context, asked.bytes(), &[&rqt, &domain])?;
        Ok(Raw { tir, rqt, tis, sq, rq, domain })
    }
}

fn raw_queues_and_what_steers_to_them_are_created() -> Verdict {
    const READY: u64 = 1;
    let context = open()?;
    let Raw { tir, rqt, tis, sq, rq, domain } = Raw::new(&context)?;
    let numbers: BTreeSet<u32> = [&tir, &rqt, &tis, &sq, &rq].map(|it| it.number()).into();
    assert!(!numbers.contains(&0));
    let mut command = input::<modify_sq_in>(opcode::MODIFY_SQ);
    command.set(modify_sq_in::sqn, sq.number().into());
    command.sub_mut(modify_sq_in::ctx).set(sqc::state, READY);
    // SAFETY: nothing is posted.
    unsafe { devx::modify(&sq, command.bytes(), &mut [0; 16])? };
    let mut command = input::<modify_rq_in>(opcode::MODIFY_RQ);
    command.set(modify_rq_in::rqn, rq.number().into());
    command.sub_mut(modify_rq_in::ctx).set(rqc::state, READY);
    // SAFETY: as above.
    unsafe { devx::modify(&rq, command.bytes(), &mut [0; 16])? };
    let found = query::<query_sq_out>(opcode::QUERY_SQ, &sq)?;
    let found = found.sub(query_sq_out::sq_context);
    assert_eq!((found.get(sqc::state), found.get32(sqc::tis_num_0)), (READY, tis.number()));
    let found = query::<query_rq_out>(opcode::QUERY_RQ, &rq)?;
    assert_eq!(found.sub(query_rq_out::rq_context).get(rqc::state), READY);
    let found = query::<query_tis_out>(opcode::QUERY_TIS, &tis)?;
    let of_tis = found.sub(query_tis_out::tis_context).get32(tisc::transport_domain);
    let found = query::<query_tir_out>(opcode::QUERY_TIR, &tir)?;
    let found = found.sub(query_tir_out::tir_context);
    let of_tir = (found.get32(tirc::transport_domain), found.get32(tirc::indirect_table));
    assert_eq!((of_tis, of_tir), (domain.number(), (domain.number(), rqt.number())));
    let found = query::<query_rqt_out>(opcode::QUERY_RQT, &rqt)?;
    assert_eq!(found.sub(query_rqt_out::rqt_context).get(rqtc::rqt_actual_size), 1);
    let queue = found.bytes()[query_rqt_out::SIZE..][..4].try_into().map(u32::from_be_bytes);
    assert_eq!(queue.ok(), Some(rq.number()));
    // Whatever the order in which they are dropped, each goes before what it names.
    drop((domain, rq, sq, tis, rqt, tir));
    assert_eq!(context.leaked(), 0);
    Ok(())
}

pub(crate) fn raw_packet_queue_pair_tells_its_objects() -> Verdict {
    env::packets()?;
    let context = open()?;
    let pd = context.alloc_pd()?;
    let cq = context.cq_builder(16).build()?;
    let raw = |kind: QpType| -> Verdict<QpLayout> {
        let built = pd.qp_builder(&cq, &cq, kind).max_send_wr(4).max_recv_wr(4).build();
        let qp = supported(built, Capability::RawPacket)?;
        Ok(RawQueuePair::take(qp)?.layout())
    };
    let QpLayout { qpn, register, raw_packet, .. } = raw(QpType::RAW_PACKET)?;
    assert_ne!(register.mmap_offset, 0);
    let RawPacketNumbers { tirn, tisn, rqn, sqn, .. } = raw_packet;
    assert!([tirn, tisn, rqn, sqn].iter().all(|number| number.is_some_and(|it| it != 0)));
    assert_ne!(sqn, rqn, "{qpn:#x}");
    assert_eq!(raw(QpType::RC)?.raw_packet, RawPacketNumbers::default());
    Ok(())
}

pub(crate) fn objects_of_a_raw_packet_queue_pair_are_queried() -> Verdict {
    env::packets()?;
    let context = open()?;
    let pd = context.alloc_pd()?;
    let cq = context.cq_builder(16).build()?;
    let built = pd.qp_builder(&cq, &cq, QpType::RAW_PACKET).max_send_wr(4).max_recv_wr(4).build();
    let qp = RawQueuePair::take(supported(built, Capability::RawPacket)?)?;
    let RawPacketNumbers { tirn, tisn, rqn, sqn, .. } = qp.layout().raw_packet;
    let known = |op, number: Option<u32>| {
        let command = about(op, number.expect("the kernel tells all four"));
        devx::query(qp.control(), &command, &mut [0; 1024])
    };
    let parts = [
        (opcode::QUERY_TIR, tirn),
        (opcode::QUERY_TIS, tisn),
        (opcode::QUERY_RQ, rqn),
        (opcode::QUERY_SQ, sqn),
    ];
    for (op, number) in parts {
        known(op, number)?;
        let other = known(op, number.map(|number| number ^ 1)).unwrap_err();
        assert_eq!((other.errno(), other.kernel_errno()), (Errno::INVAL, Some(Errno::INVAL)));
    }
    // It is no queue pair of firmware.
    let error = known(opcode::QUERY_QP, Some(qp.layout().qpn)).unwrap_err();
    assert_eq!(error.errno(), Errno::INVAL, "{error}");
    Ok(())
}

/// Firmware does not destroy a receive queue that a TIR names.
pub(crate) fn raw_packet_queue_pair_may_be_dropped_before_its_tir() -> Verdict {
    env::packets()?;
    const KINDS: [ObjectKind; 2] = [ObjectKind::QP, ObjectKind::MLX5_DEVX_OBJ];
    let context = open()?;
    let (pd, cq) = (context.alloc_pd()?, context.cq_builder(16).build()?);
    let count = |kind| Ok(supported(context.handles(kind), Capability::InfoHandles)?.len());
    let census = || KINDS.into_iter().map(count).collect::<Verdict<Vec<usize>>>();
    let built =
        || pd.qp_builder(&cq, &cq, QpType::RAW_PACKET).max_send_wr(4).max_recv_wr(4).build();
    // The register, and the kernel's transport domain, stay with the context.
    drop(supported(built(), Capability::RawPacket)?);
    let (before, firmware) = (census()?, env::firmware_objects());
    let qp = RawQueuePair::take(built()?)?;
    let rqn = qp.layout().raw_packet.rqn.expect("the kernel tells it");
    let mut asked = input::<create_tir_in>(opcode::CREATE_TIR);
    asked.sub_mut(create_tir_in::ctx).set(tirc::inline_rqn, rqn.into());
    let domain = create(&context, &command::<16>(opcode::ALLOC_TRANSPORT_DOMAIN), &[])?;
    asked.sub_mut(create_tir_in::ctx).set(tirc::transport_domain, domain.number().into());
    let tir = create(&context, asked.bytes(), &[&qp, &domain])?;
    drop((held(qp.destroy()), domain));
    assert_eq!(census()?, [before[0] + 1, before[1] + 2]);
    tir.destroy()?;
    assert_eq!((context.leaked(), census()?), (0, before));
    context.query_device()?;
    assert_eq!(env::firmware_objects(), firmware, "after and before");
    Ok(())
}

fn counter_set_counts_for_one_queue_pair() -> Verdict {
    /// `MLX5_QP_OPTPAR_COUNTER_SET_ID`
    const COUNTER_SET: u64 = 1 << 25;
    open()?;
    let mut pair = Pair::new(Config::rc())?;
    let context = pair.b.context.clone();
    let counters = counters(&context)?;
    let count = || -> Verdict<u64> {
        let mut output = vec![0; query_q_counter_out::SIZE];
        devx::query(&counters, &counter_query(counters.number()), &mut output)?;
        let output = Bits::<query_q_counter_out, _>::new(output);
        Ok(output.get(query_q_counter_out::rx_write_requests))
    };
    let write = |pair: &mut Pair| -> Verdict {
        let (from, to) = (pair.a.sge(0..8), pair.b.remote(64));
        pair.a.send(SendWr::write(to, &[from]).id(1).signaled())?;
        pair.a.expect(1, WcOpcode::WRITE).map(drop)
    };
    write(&mut pair)?;
    assert_eq!(count()?, 0);
    let mut input = input::<rst2init_qp_in>(opcode::RTS2RTS_QP);
    input.set(rst2init_qp_in::qpn, pair.b.qp.qpn().0.into());
    input.set(rst2init_qp_in::opt_param_mask, COUNTER_SET);
    input.sub_mut(rst2init_qp_in::qpc).set(qpc::counter_set_id, counters.number().into());
    let control: &uverbs::QpControl = &pair.b.qp;
    // SAFETY: the command changes the counter set alone.
    unsafe { devx::modify(control, input.bytes(), &mut [0; 16])? };
    for round in 1..=3 {
        write(&mut pair)?;
        assert_eq!(count()?, round);
    }
    drop(pair);
    Ok(counters.destroy()?)
}

fn answers_arrive_with_their_numbers_and_lengths() -> Verdict {
    let context = open()?;
    let (queries, counters) = (DevxQueries::create(&context)?, counters(&context)?);
    assert_eq!(queries.try_next()?, None);
    let lengths = [256, 16, 100, 64];
    for (nth, length) in lengths.into_iter().enumerate() {
        queries.query(
            &counters,
            &counter_query(counters.number()),
            length,
            u64::MAX - nth as u64,
        )?;
    }
    let mut left: BTreeSet<(u64, usize)> = lengths
        .into_iter()
        .enumerate()
        .map(|(nth, length)| (u64::MAX - nth as u64, usize::from(length)))
        .collect();
    while !left.is_empty() {
        let answer = queries.wait(Some(PATIENCE))?.expect("an answer");
        assert!(left.remove(&(answer.wr_id, answer.output.len())), "{answer:?}");
        // Firmware writes whole outputs, of which short ones have no room.
        if answer.output.len() == 256 {
            answer.check()?;
        }
    }
    assert_eq!(queries.try_next()?, None);
    // A queue of the verbs.
    let pair = Pair::on(context.clone(), context, Config::rc())?;
    let control: &uverbs::QpControl = &pair.a.qp;
    queries.query(control, &about(opcode::QUERY_QP, pair.a.qp.qpn().0), 1024, 5)?;
    let answer = queries.wait(Some(PATIENCE))?.expect("an answer");
    answer.check()?;
    assert_eq!((answer.wr_id, answer.output.len()), (5, 1024));
    Ok(())
}

/// `MAX_ASYNC_BYTES_IN_USE` of the kernel, which counts the outputs that were asked for.
fn unread_answers_have_a_limit() -> Verdict {
    const LIMIT: usize = 1 << 20;
    const LONG: u16 = u16::MAX;
    let context = open()?;
    let (queries, counters) = (DevxQueries::create(&context)?, counters(&context)?);
    let query = counter_query(counters.number());
    let send = |length: usize, wr_id| queries.query(&counters, &query, length as u16, wr_id);
    let is_full = |length| {
        let error = send(length, 0).unwrap_err();
        assert_eq!(error.errno(), Errno::AGAIN, "{error}");
        assert!(error.to_string().contains("1 MiB"), "{error}");
    };
    let whole = LIMIT / usize::from(LONG);
    let mut sent: Vec<usize> = vec![LONG.into(); whole];
    sent.push(LIMIT - whole * usize::from(LONG));
    for (wr_id, length) in sent.iter().enumerate() {
        send(*length, wr_id as u64)?;
    }
    is_full(16);
    // Another file has its own.
    let other = DevxQueries::create(&context)?;
    other.query(&counters, &query, LONG, 7)?;
    // An answer that is read makes room for as much, and no more.
    let read = queries.wait(Some(PATIENCE))?.expect("an answer");
    assert_eq!(read.output.len(), sent[read.wr_id as usize]);
    send(read.output.len(), read.wr_id)?;
    is_full(16);
    let mut left: BTreeSet<u64> = (0..sent.len() as u64).collect();
    while !left.is_empty() {
        let answer = queries.wait(Some(PATIENCE))?.expect("an answer");
        assert_eq!(answer.output.len(), sent[answer.wr_id as usize]);
        assert!(left.remove(&answer.wr_id), "{answer:?}");
    }
    assert_eq!(queries.try_next()?, None);
    send(LONG.into(), 1)?;
    assert_eq!(other.wait(Some(PATIENCE))?.expect("an answer").wr_id, 7);
    Ok(())
}

fn queries_that_the_kernel_does_not_take_are_refused() -> Verdict {
    let context = open()?;
    let (queries, own) = (DevxQueries::create(&context)?, counters(&context)?);
    let errno = |answer: uverbs::Result<()>| answer.err().map(|error| error.errno());
    let number = own.number();
    for input in [&about(opcode::QUERY_CQ, number)[..], &command::<32>(opcode::DEALLOC_Q_COUNTER)] {
        assert_eq!(errno(queries.query(&own, input, 256, 1)), Some(Errno::INVAL));
    }
    let good = counter_query(own.number());
    for (input, length) in [(&good[..], 15), (&good[..8], 256)] {
        let error = queries.query(&own, input, length, 1).unwrap_err();
        assert_eq!((error.errno(), error.kernel_errno()), (Errno::INVAL, None), "{error}");
    }
    let mut dump: [u8; 32] = command(opcode::QUERY_FLOW_COUNTER);
    dump[24] = 0x40;
    assert_eq!(errno(queries.query(&own, &dump, 256, 1)), Some(Errno::INVAL));
    let other = open()?;
    let theirs = counters(&other)?;
    assert_eq!(
        errno(queries.query(&theirs, &counter_query(theirs.number()), 256, 1)),
        Some(Errno::INVAL)
    );
    assert_eq!(queries.try_next()?, None);
    Ok(())
}

fn answers_leave_nothing() -> Verdict {
    let kinds = [ObjectKind::MLX5_DEVX_OBJ, ObjectKind::MLX5_DEVX_UMEM];
    rounds(&kinds, |context| {
        open()?;
        let context = context.clone();
        Ok(Box::new(move || {
            let (queries, counters) = (DevxQueries::create(&context)?, counters(&context)?);
            queries.query(&counters, &counter_query(counters.number()), 256, 1)?;
            queries.query(&counters, &counter_query(counters.number()), 256, 2)?;
            queries.wait(Some(PATIENCE))?.expect("an answer").check()?;
            let pd = context.alloc_pd()?;
            let umem = Umem::builder(&context).page_sizes(4096).allocate(8192)?;
            let command = mkey(pd_number(&pd)?, &umem, umem.as_ptr() as u64, 8192);
            let kept: [&dyn DevxRef; 1] = [&umem];
            drop(create(&context, command.bytes(), &kept)?);
            Ok(())
        }))
    })
}

fn raw_queues_and_what_steers_to_them_leave_nothing() -> Verdict {
    let kinds = [ObjectKind::MLX5_DEVX_OBJ, ObjectKind::MLX5_DEVX_UMEM, ObjectKind::MLX5_UAR];
    rounds(&kinds, |context| {
        open()?;
        let context = context.clone();
        Ok(Box::new(move || {
            drop(Raw::new(&context)?);
            Ok(())
        }))
    })
}

fn answers_stay_the_parents() -> Verdict {
    let context = open()?;
    let mine = (DevxQueries::create(&context)?, counters(&context)?);
    let (queries, counters) = in_child(mine, |(queries, counters)| {
        for result in [
            queries.query(&counters, &counter_query(counters.number()), 256, 1),
            queries.try_next().map(drop),
            queries.wait(None).map(drop),
            counters.export().map(drop),
        ] {
            let error = result.expect_err("it is the parent's");
            assert!(error.is_forked(), "{error}");
        }
        Ok(())
    })?;
    query_counters(&counters)?;
    drop(queries);
    Ok(())
}
