//! Commands that a program sends to firmware by itself, and queues that it makes by them alone.
#![allow(unsafe_code, reason = "commands name memory by number, and queues are written by address")]

pub(crate) mod objects;
pub(crate) mod sharing;
pub(crate) mod virtio;

use super::raw::{Poller, Poster};
use crate::capability::Capability;
use crate::env;
use crate::fork::in_child;
use crate::leaks::rounds;
use crate::pair::{Config, PATIENCE, Pair, gid};
use crate::testbed::link_of;
use crate::verdict::{Verdict, require, supported, trials};
use std::any::Any;
use uverbs::mlx5::devx::{self, DevxEventData, DevxEvents, DevxObject, DevxRef, Umem};
use uverbs::mlx5::{
    DoorbellPage, RawCompletionQueue, RawQueuePair, RawSharedReceiveQueue, Uar, UarKind, pd_number,
};
use uverbs::{Access, Context, Errno, ErrorWith, LinkLayer, ObjectKind, QpType, Remote};
use uverbs_uapi::mlx5::cqe::mlx5_cqe_opcode;
use uverbs_uapi::mlx5::prm::cmd::query_hca_cap_out;
use uverbs_uapi::mlx5::prm::cqc::{cqc, create_cq_in, query_cq_out};
use uverbs_uapi::mlx5::prm::hca_cap::cmd_hca_cap;
use uverbs_uapi::mlx5::prm::qpc::{ads, create_qp_in, qpc, query_qp_out, rst2init_qp_in};
use uverbs_uapi::mlx5::prm::{Bits, Layout, command, opcode};

trials![
    capabilities_are_queried,
    refusals_name_status_and_syndrome,
    commands_of_another_kind_are_refused,
    counter_set_is_created_queried_and_destroyed,
    umem_gives_its_memory_back_when_no_object_is_in_it,
    umems_that_make_no_sense_are_refused,
    device_writes_no_umem_without_the_right,
    event_queues_are_known_by_vector,
    queues_of_the_verbs_are_queried,
    queues_of_devx_alone_carry_a_write,
    queue_of_devx_is_queried,
    queue_outlives_the_uar_that_it_rings,
    objects_may_be_dropped_in_any_order,
    queue_of_the_verbs_may_be_dropped_before_what_names_it,
    query_that_writes_to_memory_is_refused,
    events_arrive_with_their_cookies,
    channel_without_data_has_one_record_of_a_subscription,
    objects_and_umems_leave_nothing,
    subscriptions_leave_nothing,
    objects_umems_and_events_stay_the_parents,
];

/// A context that has DEVX.
pub(crate) fn open() -> Verdict<Context> {
    let context = super::open()?;
    let devx = uverbs::mlx5::query_device(&context)?.devx();
    require(devx == Some(true), Capability::Mlx5, "the context has no DEVX")?;
    Ok(context)
}

/// A command of a layout, as bytes that may grow.
fn input<L: Layout>(op: u16) -> Bits<L, Vec<u8>> {
    let mut bytes = command::<2>(op).to_vec();
    bytes.resize(L::SIZE, 0);
    Bits::new(bytes)
}

/// A command of 16 bytes about the object `number`.
pub(super) fn about(op: u16, number: u32) -> [u8; 16] {
    let mut bytes = command(op);
    bytes[8..12].copy_from_slice(&number.to_be_bytes());
    bytes
}

fn create(context: &Context, input: &[u8], keeps: &[&dyn DevxRef]) -> uverbs::Result<DevxObject> {
    // SAFETY: the umems that the commands of this file name are passed along, and no WQE names freed memory.
    unsafe { DevxObject::create(context, input, &mut [0; 16], keeps) }
}

/// A group of the capabilities that the device has now.
pub(super) fn capabilities<L: Layout>(context: &Context, group: u16) -> Verdict<Bits<L, Vec<u8>>> {
    let mut input: [u8; 16] = command(opcode::QUERY_HCA_CAP);
    input[6..8].copy_from_slice(&(group << 1 | 1).to_be_bytes());
    let mut output = vec![0; query_hca_cap_out::SIZE];
    devx::general_command(context, &input, &mut output)?;
    let output = Bits::<query_hca_cap_out, _>::new(output);
    Ok(Bits::new(output.span(query_hca_cap_out::capability).to_vec()))
}

fn capabilities_are_queried() -> Verdict {
    let context = open()?;
    let mut input: [u8; 16] = command(opcode::QUERY_HCA_CAP);
    input[7] = 1;
    let mut output = vec![0xff; query_hca_cap_out::SIZE];
    devx::general_command(&context, &input, &mut output)?;
    assert_eq!(output[..8], [0; 8]);
    let output = Bits::<query_hca_cap_out, _>::new(output);
    let caps = Bits::<cmd_hca_cap, _>::new(output.span(query_hca_cap_out::capability));
    assert!(caps.get(cmd_hca_cap::log_max_uctx) > 0);
    assert_eq!(1 << caps.get(cmd_hca_cap::log_max_qp), context.query_device()?.max_qp);
    Ok(())
}

fn refusals_name_status_and_syndrome() -> Verdict {
    let context = open()?;
    // A group of capabilities that there is not.
    let mut input: [u8; 16] = command(opcode::QUERY_HCA_CAP);
    input[6..8].copy_from_slice(&(0x7e << 1 | 1u16).to_be_bytes());
    let mut output = [0; 16];
    let error = devx::general_command(&context, &input, &mut output).unwrap_err();
    assert_eq!(error.kernel_errno(), Some(Errno::REMOTEIO), "{error}");
    let (status, syndrome) = (output[0], &output[4..8]);
    assert_ne!(status, 0);
    let syndrome = syndrome.iter().fold(0, |number, byte| number << 8 | u32::from(*byte));
    let text = error.to_string();
    assert!(text.contains("QUERY_HCA_CAP"), "{text}");
    assert!(text.contains(&format!("syndrome {syndrome:#x}")), "{text}");
    Ok(())
}

fn commands_of_another_kind_are_refused() -> Verdict {
    let context = open()?;
    let general = |input: &[u8]| devx::general_command(&context, input, &mut [0; 16]);
    for op in [opcode::ALLOC_PD, opcode::QUERY_CQ, opcode::INIT_HCA, opcode::DESTROY_QP] {
        let error = general(&command::<16>(op)).unwrap_err();
        assert_eq!(error.errno(), Errno::INVAL, "{error}");
    }
    let mut tunnelled: [u8; 16] = command(opcode::QUERY_HCA_CAP);
    tunnelled[5] = 1;
    for input in [&tunnelled[..], &tunnelled[..8]] {
        let error = general(input).unwrap_err();
        assert_eq!((error.errno(), error.kernel_errno()), (Errno::INVAL, None), "{error}");
    }
    // The kernel itself passes on what no object is made by, and refuses all else.
    for (op, passed) in [(opcode::ALLOC_PD, false), (opcode::QUERY_VHCA_STATE, true)] {
        let input = command::<16>(op);
        // SAFETY: neither names memory or keys.
        let answer = unsafe { devx::general_command_unchecked(&context, &input, &mut [0; 64]) };
        let kernel = answer.err().map(|error| error.kernel_errno());
        assert_eq!(kernel != Some(Some(Errno::INVAL)), passed, "{op:#x}: {kernel:?}");
    }
    for op in [opcode::QUERY_HCA_CAP, opcode::DESTROY_CQ, opcode::QUERY_QP] {
        let error = create(&context, &command::<16>(op), &[]).unwrap_err();
        assert_eq!(error.errno(), Errno::INVAL, "{error}");
    }
    Ok(())
}

/// The command that creates a set of counters.
pub(crate) fn counters_command() -> [u8; 16] {
    command(opcode::ALLOC_Q_COUNTER)
}

pub(crate) fn counters(context: &Context) -> uverbs::Result<DevxObject> {
    create(context, &counters_command(), &[])
}

pub(crate) fn counter_query(number: u32) -> [u8; 32] {
    let mut input = command(opcode::QUERY_Q_COUNTER);
    input[28..].copy_from_slice(&number.to_be_bytes());
    input
}

fn query_counters(counters: &DevxObject) -> uverbs::Result<()> {
    devx::query(counters, &counter_query(counters.number()), &mut [0; 256])
}

fn counter_set_is_created_queried_and_destroyed() -> Verdict {
    let context = open()?;
    let counters = counters(&context)?;
    let query = |number| devx::query(&counters, &counter_query(number), &mut [0; 256]);
    query(counters.number())?;
    let error = query(counters.number() + 1).unwrap_err();
    assert_eq!(error.errno(), Errno::INVAL, "{error}");
    // An object of this kind has no such command.
    let error = devx::query(&counters, &about(opcode::QUERY_CQ, counters.number()), &mut [0; 272]);
    assert_eq!(error.unwrap_err().errno(), Errno::INVAL);
    Ok(counters.destroy()?)
}

fn umem_gives_its_memory_back_when_no_object_is_in_it() -> Verdict {
    let context = open()?;
    let mut numbers: Vec<u64> = (0..4096).collect();
    numbers.shrink_to_fit();
    let umem = Umem::builder(&context).register(numbers)?;
    assert_eq!(umem.len(), 8 * 4096);
    assert!(umem.destroy()?.into_iter().eq(0..4096));
    let queues = Queues::new(context)?;
    let Queues { umem, qp, cq, .. } = queues;
    let umem = umem.destroy().expect_err("queues are in it").into_object();
    drop(qp);
    let umem = umem.destroy().expect_err("a queue is in it").into_object();
    drop(cq);
    umem.destroy()?;
    Ok(())
}

fn umems_that_make_no_sense_are_refused() -> Verdict {
    let context = open()?;
    let builder = || Umem::builder(&context);
    let refused = [
        (builder().allocate(0).err(), Errno::INVAL),
        (builder().page_sizes(1 << 11).allocate(4096).err(), Errno::INVAL),
        (builder().access(Access::REMOTE_WRITE).allocate(4096).err(), Errno::INVAL),
        (builder().access(Access::REMOTE_ATOMIC).allocate(4096).err(), Errno::INVAL),
    ];
    for (error, errno) in refused {
        assert_eq!(error.map(|error| error.errno()), Some(errno));
    }
    // SAFETY: the kernel refuses an address at which nothing is mapped.
    let unmapped =
        unsafe { builder().register_unowned(std::ptr::without_provenance_mut(4096), 4096) };
    assert_eq!(unmapped.err().map(|error| error.errno()), Some(Errno::FAULT));
    for sizes in [4096, 1 << 12 | 1 << 16, !0xfff] {
        builder().page_sizes(sizes).allocate(1 << 16)?.destroy()?;
    }
    Ok(())
}

/// The kernel passes the right on with each page.
fn device_writes_no_umem_without_the_right() -> Verdict {
    let context = open()?;
    let uar = Uar::alloc(&context, UarKind::NonCached)?;
    let umem = |access| Umem::builder(&context).access(access).page_sizes(4096).allocate(0x2000);
    let queue = |umem: &Umem| -> Verdict<_> {
        let command = sharing::queue_command(&context, umem.id(), &uar)?;
        Ok(create(&context, &command, &[umem, &uar]))
    };
    let error = queue(&umem(Access::empty())?)?.err().map(|error| error.kernel_errno());
    assert_eq!(error, Some(Some(Errno::REMOTEIO)));
    queue(&umem(Access::LOCAL_WRITE)?)??;
    Ok(())
}

fn event_queues_are_known_by_vector() -> Verdict {
    let context = open()?;
    for vector in 0..context.completion_vectors() {
        assert_ne!(devx::query_eqn(&context, vector)?, 0, "vector {vector}");
    }
    // The kernel takes the low 16 bits of a vector.
    for vector in [context.completion_vectors(), 1 << 20] {
        let error = devx::query_eqn(&context, vector).unwrap_err();
        assert_eq!(error.errno(), Errno::INVAL, "{error}");
    }
    Ok(())
}

fn queues_of_the_verbs_are_queried() -> Verdict {
    open()?;
    let pair = Pair::new(Config::rc())?;
    let mut output = vec![0; query_qp_out::SIZE];
    let number = pair.a.qp.qpn().0;
    let control: &uverbs::QpControl = &pair.a.qp;
    devx::query(control, &about(opcode::QUERY_QP, number), &mut output)?;
    let output = Bits::<query_qp_out, _>::new(output);
    let context = output.sub(query_qp_out::qpc);
    assert_eq!(context.get32(qpc::remote_qpn), pair.b.qp.qpn().0);
    assert_eq!(context.get(qpc::state), 3, "ready to send");
    // The number of another one.
    let other = about(opcode::QUERY_QP, pair.b.qp.qpn().0 + 100);
    assert_eq!(devx::query(control, &other, &mut [0; 1024]).unwrap_err().errno(), Errno::INVAL);
    Ok(())
}

/// A completion queue and a connected queue pair, to itself, of DEVX alone.
struct Queues {
    // Dropped first: the queue pair keeps it.
    cq: DevxObject,
    qp: DevxObject,
    poster: Poster,
    poller: Poller,
    page: DoorbellPage,
    uar: Uar,
    umem: Umem,
    pd: uverbs::ProtectionDomain,
    context: Context,
}

/// Offsets in the umem: send queue, receive queue behind it in the memory of the pair, completion queue, records.
const SENDS: u64 = 0x1000;
const PAIR: u64 = 0;
const CQES: u64 = 0x2000;
const RECORDS: u64 = 0x3000;
const LOG_WQES: u32 = 4;

/// The command that creates a queue pair in the umem of [`Queues`].
fn pair_command(
    umem: &Umem,
    uar: &Uar,
    pd: &uverbs::ProtectionDomain,
    cqn: u32,
) -> Verdict<Vec<u8>> {
    let mut input = input::<create_qp_in>(opcode::CREATE_QP);
    input.set(create_qp_in::wq_umem_id, umem.id().into());
    input.set(create_qp_in::wq_umem_offset, PAIR);
    let mut queue = input.sub_mut(create_qp_in::qpc);
    for (field, value) in [
        (qpc::pm_state, 3),
        (qpc::pd, pd_number(pd)?.into()),
        (qpc::cqn_snd, cqn.into()),
        (qpc::cqn_rcv, cqn.into()),
        // 256 receives of 16 bytes, so that the sends begin at a page.
        (qpc::log_rq_size, 8),
        (qpc::log_sq_size, LOG_WQES.into()),
        (qpc::uar_page, uar.page_id().into()),
        (qpc::user_index, 0xff_ffff),
        (qpc::dbr_umem_id, umem.id().into()),
        (qpc::dbr_addr, RECORDS + 64),
    ] {
        queue.set(field, value);
    }
    Ok(input.into_inner())
}

impl Queues {
    fn new(context: Context) -> Verdict<Queues> {
        let uar = Uar::alloc(&context, UarKind::NonCached)?;
        let page = uar.map()?;
        let pd = context.alloc_pd()?;
        let umem = Umem::builder(&context).page_sizes(4096).allocate(0x4000)?;
        let at = |offset: u64| umem.as_ptr().wrapping_add(offset as usize);
        for cqe in 0..1 << LOG_WQES {
            // SAFETY: the last byte of a CQE, of which the device knows nothing yet.
            unsafe { at(CQES).wrapping_add(64 * cqe + 63).write(0xf1) };
        }
        let mut input =
            Bits::<create_cq_in, _>::new(command::<{ create_cq_in::SIZE }>(opcode::CREATE_CQ));
        input.set(create_cq_in::cq_umem_id, umem.id().into());
        input.set(create_cq_in::cq_umem_offset, CQES);
        let mut queue = input.sub_mut(create_cq_in::cq_context);
        for (field, value) in [
            (cqc::log_cq_size, LOG_WQES.into()),
            (cqc::uar_page, uar.page_id().into()),
            (cqc::c_eqn_or_apu_element, devx::query_eqn(&context, 0)?.into()),
            (cqc::dbr_umem_id, umem.id().into()),
            (cqc::dbr_addr, RECORDS),
        ] {
            queue.set(field, value);
        }
        let cq = create(&context, input.bytes(), &[&umem, &uar])?;
        let input = pair_command(&umem, &uar, &pd, cq.number())?;
        let qp = create(&context, &input, &[&umem, &uar, &pd, &cq])?;
        let dbrec = |offset: u64| at(RECORDS + offset).cast();
        let poster = Poster::new(qp.number(), at(SENDS), 1 << LOG_WQES, dbrec(64));
        let poller = Poller::new(at(CQES), 1 << LOG_WQES, 64, dbrec(0), 0);
        let queues = Queues { qp, cq, poster, poller, page, uar, umem, pd, context };
        queues.connect()?;
        Ok(queues)
    }

    fn connect(&self) -> Verdict {
        let (own, link) = (gid(&self.context)?, link_of(&self.context)?);
        let port = self.context.query_port(link.port)?;
        for op in [opcode::RST2INIT_QP, opcode::INIT2RTR_QP, opcode::RTR2RTS_QP] {
            let mut input = Bits::<rst2init_qp_in, _>::new(command::<{ rst2init_qp_in::SIZE }>(op));
            input.set(rst2init_qp_in::qpn, self.qp.number().into());
            let mut context = input.sub_mut(rst2init_qp_in::qpc);
            for (field, value) in [
                (qpc::pm_state, 3),
                (qpc::rwe, 1),
                (qpc::rre, 1),
                (qpc::mtu, 3),
                (qpc::log_msg_max, 30),
                (qpc::remote_qpn, self.qp.number().into()),
                (qpc::retry_count, 7),
                (qpc::rnr_retry, 7),
            ] {
                context.set(field, value);
            }
            let mut path = context.sub_mut(qpc::primary_address_path);
            path.set(ads::vhca_port_num, link.port.into());
            path.set(ads::pkey_index, link.pkey_index.into());
            path.set(ads::ack_timeout, 16);
            if link.layer == LinkLayer::ETHERNET {
                path.set(ads::src_addr_index, own.index.into());
                path.set_span(ads::rgid_rip, &own.gid.0);
            } else {
                path.set(ads::rlid, port.lid.into());
            }
            // SAFETY: the queues are empty, and no peer has a key.
            unsafe { devx::modify(&self.qp, input.bytes(), &mut [0; 16])? };
        }
        Ok(())
    }

    /// Hands a WQE to the device.
    fn ring(&mut self, head: [u8; 8]) -> Verdict {
        self.poster.publish();
        Ok(self.page.ring_be64(0x800, u64::from_be_bytes(head))?)
    }

    /// Arms the completion queue.
    fn arm(&mut self, events: u32) -> Verdict {
        let word = self.poller.arm(events);
        let word = u64::from(word) << 32 | u64::from(self.cq.number());
        Ok(self.page.ring_be64(0x20, word)?)
    }
}

fn queues_of_devx_alone_carry_a_write() -> Verdict {
    let mut queues = Queues::new(open()?)?;
    let mut memory = queues.pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u64>(512)?;
    for round in 0..100 {
        memory.write_at(0, round)?;
        let to: Remote = memory.remote(8)?;
        let first = queues.poster.at();
        let head = queues.poster.rdma_write(&memory.sge(..1)?, &to);
        queues.ring(head)?;
        let (index, _) = queues.poller.expect(mlx5_cqe_opcode::MLX5_CQE_REQ)?;
        assert_eq!((index, memory.read_at(1)), (first, Some(round)));
    }
    let Queues { cq, qp, .. } = queues;
    let (cq, error) = cq.destroy().expect_err("the queue pair keeps it").into_parts();
    assert_eq!((error.errno(), error.kernel_errno()), (Errno::BUSY, None), "{error}");
    qp.destroy()?;
    cq.destroy()?;
    Ok(())
}

fn queue_of_devx_is_queried() -> Verdict {
    let mut queues = Queues::new(open()?)?;
    let memory = queues.pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u64>(512)?;
    for _ in 0..100 {
        let head = queues.poster.rdma_write(&memory.sge(..1)?, &memory.remote(8)?);
        queues.ring(head)?;
        queues.poller.expect(mlx5_cqe_opcode::MLX5_CQE_REQ)?;
    }
    let mut output = vec![0; query_cq_out::SIZE];
    devx::query(&queues.cq, &about(opcode::QUERY_CQ, queues.cq.number()), &mut output)?;
    let output = Bits::<query_cq_out, _>::new(output);
    assert_eq!(output.sub(query_cq_out::cq_context).get(cqc::producer_counter), 100);
    assert_ne!(queues.uar.page_id(), 0);
    Ok(())
}

/// Firmware keeps the register of a queue, and its owner, who has freed it, is not told.
fn queue_outlives_the_uar_that_it_rings() -> Verdict {
    let context = open()?;
    let kinds = [ObjectKind::MLX5_DEVX_OBJ, ObjectKind::MLX5_DEVX_UMEM, ObjectKind::MLX5_UAR];
    let census = || -> Verdict<Vec<_>> {
        let handles = kinds.iter().map(|kind| context.handles(*kind));
        let handles = handles.map(|handles| supported(handles, Capability::InfoHandles));
        handles.collect()
    };
    let (before, firmware) = (census()?, env::firmware_objects());
    for is_mapped in [true, false] {
        let umem = Umem::builder(&context).page_sizes(4096).allocate(0x2000)?;
        let uar = Uar::alloc(&context, UarKind::NonCached)?;
        let page = is_mapped.then(|| uar.map()).transpose()?;
        let queue = sharing::queue_in(&context, umem.id(), &uar, &[&umem])?;
        uar.destroy()?;
        drop(page);
        context.query_device()?;
        let mut output = vec![0; query_cq_out::SIZE];
        devx::query(&queue, &about(opcode::QUERY_CQ, queue.number()), &mut output)?;
        drop((umem, queue));
        assert_eq!((context.leaked(), census()?), (0, before.clone()), "mapped: {is_mapped}");
    }
    // A kernel in this process frees it at its next call.
    context.query_device()?;
    assert_eq!(env::firmware_objects(), firmware, "after and before");
    Ok(())
}

/// An object that is not destroyed, because one of DEVX keeps it.
fn held<T, O: std::fmt::Debug>(destroyed: Result<T, ErrorWith<O>>) -> O {
    let (object, error) = destroyed.err().expect("an object of DEVX keeps it").into_parts();
    assert_eq!((error.errno(), error.kernel_errno()), (Errno::BUSY, None), "{error}");
    assert!(error.to_string().contains("DEVX"), "{error}");
    object
}

/// Firmware does not destroy a shared receive queue that a queue pair names; see [`DevxRef`].
fn queue_of_the_verbs_may_be_dropped_before_what_names_it() -> Verdict {
    /// `rq_type`: receives of a shared receive queue.
    const SHARED: u64 = 1;
    const KINDS: [ObjectKind; 3] = [ObjectKind::SRQ, ObjectKind::QP, ObjectKind::MLX5_DEVX_OBJ];
    let context = open()?;
    let count = |kind| Ok(supported(context.handles(kind), Capability::InfoHandles)?.len());
    let census = || KINDS.into_iter().map(count).collect::<Verdict<Vec<usize>>>();
    let (pd, queues) = (context.alloc_pd()?, Queues::new(context.clone())?);
    let before = census()?;
    for is_raw in [true, false] {
        let srq = RawSharedReceiveQueue::take(pd.srq_builder(4).build()?)?;
        let input = pair_command(&queues.umem, &queues.uar, &pd, queues.cq.number())?;
        let mut input = Bits::<create_qp_in, _>::new(input);
        let mut fields = input.sub_mut(create_qp_in::qpc);
        fields.set(qpc::log_rq_size, 0);
        fields.set(qpc::rq_type, SHARED);
        fields.set(qpc::srqn_rmpn_xrqn, srq.layout().srqn.into());
        let (umem, uar, cq) = (&queues.umem, &queues.uar, &queues.cq);
        let create =
            |srq: &dyn DevxRef| create(&context, input.bytes(), &[umem, uar, &pd, cq, srq]);
        let qp = if is_raw {
            let qp = create(&srq)?;
            drop(held(srq.destroy()));
            qp
        } else {
            let layout = srq.layout();
            // SAFETY: nothing was posted.
            let srq = unsafe { srq.give_back(layout.head, layout.posted) }?;
            let qp = create(&srq)?;
            drop(held(srq.destroy()));
            qp
        };
        assert_eq!(census()?, [before[0] + 1, before[1], before[2] + 1], "raw: {is_raw}");
        drop(qp);
        assert_eq!((context.leaked(), census()?), (0, before.clone()), "raw: {is_raw}");
    }
    // A queue pair that the program has dropped carries out nothing any more.
    let cq = context.cq_builder(16).build()?;
    for is_raw in [true, false] {
        let qp = pd.qp_builder(&cq, &cq, QpType::RC).max_recv_wr(4).build()?;
        let keeper = |qp: &dyn DevxRef| create(&context, &counters_command(), &[qp]);
        let keeper = if is_raw {
            let qp = RawQueuePair::take(qp)?;
            let keeper = keeper(&qp)?;
            drop(held(qp.destroy()));
            keeper
        } else {
            let control: &uverbs::QpControl = &qp;
            let keeper = keeper(control)?;
            drop(held(qp.destroy()));
            keeper
        };
        assert_eq!(census()?, [before[0], before[1] + 1, before[2] + 1], "raw: {is_raw}");
        keeper.destroy()?;
        assert_eq!((context.leaked(), census()?), (0, before.clone()), "raw: {is_raw}");
    }
    Ok(())
}

/// A queue pair keeps all that its command names. A number below 720 is an order of six drops.
fn objects_may_be_dropped_in_any_order() -> Verdict {
    const KINDS: [ObjectKind; 6] = [
        ObjectKind::PD,
        ObjectKind::CQ,
        ObjectKind::MR,
        ObjectKind::MLX5_UAR,
        ObjectKind::MLX5_DEVX_UMEM,
        ObjectKind::MLX5_DEVX_OBJ,
    ];
    let context = open()?;
    let census = || -> Verdict<[usize; 6]> {
        let mut counts = [0; 6];
        for (kind, count) in KINDS.into_iter().zip(&mut counts) {
            *count = supported(context.handles(kind), Capability::InfoHandles)?.len();
        }
        Ok(counts)
    };
    // The library's own registers stay with the context.
    drop(context.cq_builder(1).build()?);
    let before = census()?;
    let parts = || -> Verdict<Vec<Option<Box<dyn Any>>>> {
        let pd = context.alloc_pd()?;
        let uar = Uar::alloc(&context, UarKind::NonCached)?;
        let cq = RawCompletionQueue::take(context.cq_builder(16).build()?)?;
        // Regions keep their domain, which would hide a queue pair that does not.
        let other = context.alloc_pd()?;
        let region = other.mr_builder().allocate::<u64>(1)?;
        let erased = other.mr_builder().allocate::<u64>(1)?.erase();
        let umem = Umem::builder(&context).page_sizes(4096).allocate(0x4000)?;
        let input = pair_command(&umem, &uar, &pd, cq.layout().cqn)?;
        let control = cq.control();
        let keeps: [&dyn DevxRef; 6] = [&umem, &uar, &pd, &control, &region, &erased];
        let qp = create(&context, &input, &keeps)?;
        drop(control);
        let (uar, region) = (held(uar.destroy()), (held(region.destroy()), erased));
        let (pd, cq) = (held(pd.destroy()), held(cq.destroy()));
        let parts: [Box<dyn Any>; 6] = [
            Box::new(pd),
            Box::new(cq),
            Box::new(region),
            Box::new(uar),
            Box::new(umem),
            Box::new(qp),
        ];
        Ok(parts.into_iter().map(Some).collect())
    };
    let full: Vec<usize> = before.iter().zip([2, 1, 2, 1, 1, 1]).map(|(a, b)| a + b).collect();
    for order in (0..720usize).step_by(7) {
        let (mut parts, mut left, mut number) = (parts()?, (0..6).collect::<Vec<_>>(), order);
        while !left.is_empty() {
            assert_eq!(census()?, *full, "before {left:?} in order {order}");
            let next = left.remove(number % left.len());
            number /= left.len() + 1;
            parts[next] = None;
            if next == 5 {
                break;
            }
        }
        drop(parts);
        assert_eq!((context.leaked(), census()?), (0, before), "order {order}");
    }
    Ok(())
}

/// Firmware would write counters where an mkey of the command allows it, and the query is safe.
fn query_that_writes_to_memory_is_refused() -> Verdict {
    let context = open()?;
    let counters = counters(&context)?;
    let mut input: [u8; 32] = command(opcode::QUERY_FLOW_COUNTER);
    input[24] = 0x40;
    let error = devx::query(&counters, &input, &mut [0; 64]).unwrap_err();
    assert_eq!((error.errno(), error.kernel_errno()), (Errno::INVAL, None), "{error}");
    Ok(())
}

fn events_arrive_with_their_cookies() -> Verdict {
    const COOKIE: u64 = 0xdead_0000_beef;
    let context = open()?;
    for data in [DevxEventData::Entry, DevxEventData::Omitted] {
        let events = DevxEvents::create(&context, data)?;
        let mut queues = Queues::new(context.clone())?;
        let memory = queues.pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u64>(512)?;
        events.subscribe(Some(&queues.cq), &[0, 4], COOKIE)?;
        for round in 0..3 {
            queues.arm(round)?;
            assert_eq!(events.try_next()?, None, "round {round}");
            let head = queues.poster.rdma_write(&memory.sge(..1)?, &memory.remote(8)?);
            queues.ring(head)?;
            let event = events.wait(Some(PATIENCE))?.expect("an event");
            assert_eq!(event.cookie, COOKIE);
            assert_eq!(event.entry.is_some(), data == DevxEventData::Entry);
            if let Some(entry) = event.entry {
                assert_eq!(entry[1], 0, "a completion");
                let number = entry[57..60].iter().fold(0, |n, byte| n << 8 | u32::from(*byte));
                assert_eq!(number, queues.cq.number());
            }
            queues.poller.expect(mlx5_cqe_opcode::MLX5_CQE_REQ)?;
        }
        // Types that objects, or their absence, do not have.
        for (object, types) in [(Some(&queues.cq), &[9u16][..]), (None, &[0]), (None, &[])] {
            let error = events.subscribe(object, types, 0).unwrap_err();
            assert_eq!(error.errno(), Errno::INVAL, "{error}");
        }
        events.subscribe(None, &[9], 0)?;
        let eventfd = rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK)?;
        events.subscribe_eventfd(Some(&queues.cq), &[0], &eventfd)?;
        let file = rustix::fs::memfd_create("no eventfd", rustix::fs::MemfdFlags::empty())?;
        let error = events.subscribe_eventfd(Some(&queues.cq), &[0], &file).unwrap_err();
        assert_eq!(error.errno(), Errno::INVAL, "{error}");
        queues.arm(3)?;
        let head = queues.poster.rdma_write(&memory.sge(..1)?, &memory.remote(8)?);
        queues.ring(head)?;
        queues.poller.expect(mlx5_cqe_opcode::MLX5_CQE_REQ)?;
        // Both subscriptions get it.
        assert!(events.wait(Some(PATIENCE))?.is_some());
        let mut count = [0; 8];
        rustix::io::read(&eventfd, &mut count)?;
        assert_eq!(u64::from_ne_bytes(count), 1);
    }
    Ok(())
}

/// A subscription of such a channel is reported again when its record was read.
fn channel_without_data_has_one_record_of_a_subscription() -> Verdict {
    let context = open()?;
    let events = DevxEvents::create(&context, DevxEventData::Omitted)?;
    let mut queues = Queues::new(context.clone())?;
    let memory = queues.pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u64>(512)?;
    for cookie in [1, 2] {
        events.subscribe(Some(&queues.cq), &[0], cookie)?;
    }
    // The last subscription is served last: its records tell that all have theirs.
    let all = DevxEvents::create(&context, DevxEventData::Entry)?;
    all.subscribe(Some(&queues.cq), &[0], 3)?;
    let mut armed = 0;
    let mut complete = |queues: &mut Queues| -> Verdict {
        queues.arm(armed)?;
        armed += 1;
        let head = queues.poster.rdma_write(&memory.sge(..1)?, &memory.remote(8)?);
        queues.ring(head)?;
        queues.poller.expect(mlx5_cqe_opcode::MLX5_CQE_REQ)?;
        assert_eq!(all.wait(Some(PATIENCE))?.map(|event| event.cookie), Some(3));
        Ok(())
    };
    let next = || Ok::<_, uverbs::Error>(events.try_next()?.map(|event| event.cookie));
    for _ in 0..2 {
        complete(&mut queues)?;
        complete(&mut queues)?;
        assert_eq!([next()?, next()?, next()?], [Some(1), Some(2), None]);
    }
    complete(&mut queues)?;
    assert_eq!(next()?, Some(1));
    complete(&mut queues)?;
    assert_eq!([next()?, next()?, next()?], [Some(2), Some(1), None]);
    Ok(())
}

fn objects_and_umems_leave_nothing() -> Verdict {
    open()?;
    let kinds = [ObjectKind::MLX5_DEVX_OBJ, ObjectKind::MLX5_DEVX_UMEM, ObjectKind::MLX5_UAR];
    rounds(&kinds, |context| {
        let context = context.clone();
        Ok(Box::new(move || {
            drop(Queues::new(context.clone())?);
            drop(counters(&context)?);
            drop(DevxEvents::create(&context, DevxEventData::Entry)?);
            Ok(())
        }))
    })
}

/// A subscription ends with its object, with its channel or with the context, whichever is first.
fn subscriptions_leave_nothing() -> Verdict {
    open()?;
    let kinds = [ObjectKind::MLX5_DEVX_OBJ, ObjectKind::MLX5_DEVX_UMEM, ObjectKind::MLX5_UAR];
    rounds(&kinds, |context| {
        let context = context.clone();
        let lasting = Queues::new(context.clone())?;
        let eventfd = || {
            let flags = rustix::event::EventfdFlags::NONBLOCK;
            rustix::event::eventfd(0, flags)
        };
        Ok(Box::new(move || {
            // The closure keeps all of it, and not only the queues that it names.
            let lasting = &lasting;
            let events = DevxEvents::create(&context, DevxEventData::Entry)?;
            let mut queues = Queues::new(context.clone())?;
            // Each holds a file of its own, which the program closes at once.
            events.subscribe_eventfd(Some(&queues.cq), &[0], &eventfd()?)?;
            events.subscribe_eventfd(Some(&lasting.cq), &[0, 4], &eventfd()?)?;
            events.subscribe(Some(&queues.cq), &[0, 4], 1)?;
            events.subscribe(Some(&lasting.qp), &[0x10, 0x13], 2)?;
            events.subscribe(None, &[9], 3)?;
            queues.arm(0)?;
            let memory = queues.pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u64>(16)?;
            let head = queues.poster.rdma_write(&memory.sge(..1)?, &memory.remote(8)?);
            queues.ring(head)?;
            assert_eq!(events.wait(Some(PATIENCE))?.map(|event| event.cookie), Some(1));
            let other = DevxEvents::create(&context, DevxEventData::Omitted)?;
            other.subscribe(Some(&queues.cq), &[0], 4)?;
            other.subscribe_eventfd(Some(&queues.cq), &[4], &eventfd()?)?;
            // One channel goes before the object, and one after it.
            drop(other);
            drop((queues, memory));
            drop(events);
            Ok(())
        }))
    })
}

fn objects_umems_and_events_stay_the_parents() -> Verdict {
    let context = open()?;
    let alloc = command::<16>(opcode::ALLOC_Q_COUNTER);
    let events = DevxEvents::create(&context, DevxEventData::Entry)?;
    let umem = Umem::builder(&context).allocate(4096)?;
    let counters = create(&context, &alloc, &[])?;
    let mine = (context, events, umem, counters);
    let (context, events, umem, counters) = in_child(mine, |(context, events, umem, counters)| {
        let refused = |error: uverbs::Error| assert!(error.is_forked(), "{error}");
        let input = about(opcode::QUERY_Q_COUNTER, 0);
        // SAFETY: the commands are refused.
        let modified = unsafe { devx::modify(&counters, &input, &mut [0; 16]) };
        // SAFETY: as above.
        let sent = unsafe { devx::general_command_unchecked(&context, &input, &mut [0; 16]) };
        let query: [u8; 16] = command(opcode::QUERY_HCA_CAP);
        for result in [
            create(&context, &alloc, &[]).map(drop),
            devx::query(&counters, &input, &mut [0; 16]),
            modified,
            sent,
            devx::general_command(&context, &query, &mut [0; 16]),
            devx::query_eqn(&context, 0).map(drop),
            Umem::builder(&context).allocate(4096).map(drop),
            DevxEvents::create(&context, DevxEventData::Entry).map(drop),
            events.subscribe(Some(&counters), &[0], 1),
            events.try_next().map(drop),
            events.wait(None).map(drop),
        ] {
            refused(result.expect_err("it is the parent's"));
        }
        refused(counters.destroy().expect_err("it is the parent's").into_parts().1);
        refused(umem.destroy().expect_err("it is the parent's").into_parts().1);
        Ok(())
    })?;
    counters.destroy()?;
    umem.destroy()?;
    drop(events);
    assert_eq!(context.leaked(), 0);
    Ok(())
}
