//! Virtio network queues, whose doorbells are VARs.

use super::{capabilities, command, create, input, open};
use crate::capability::Capability;
use crate::env;
use crate::frame::Frame;
use crate::leaks::rounds;
use crate::pair::PATIENCE;
use crate::station::Station;
use crate::verdict::{Stop, Verdict, require, supported, trials};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Instant;
use uverbs::mlx5::devx::{self, DevxObject, DevxRef, Umem};
use uverbs::mlx5::{DoorbellPage, Var, VarKind, pd_number};
use uverbs::{Access, Context, Errno, FlowEth, MemoryRegion, ObjectKind, ProtectionDomain};
use uverbs_uapi::mlx5::prm::hca_cap::{cmd_hca_cap, virtio_emulation_cap as caps};
use uverbs_uapi::mlx5::prm::object::general_obj_in_cmd_hdr as header;
use uverbs_uapi::mlx5::prm::rqc::{create_tis_in, tisc};
use uverbs_uapi::mlx5::prm::virtio::{
    CAP_VDPA_EMULATION, MODIFY_STATE, OBJ_TYPE_VIRTIO_NET_Q, create_virtio_net_q_in,
    modify_virtio_net_q_in, query_virtio_net_q_out, state, virtio_net_q_object as object,
    virtio_q as queue,
};
use uverbs_uapi::mlx5::prm::{Bits, Field, Layout, opcode};

trials![
    virtqueue_goes_through_its_states_and_no_others,
    virtqueues_that_make_no_sense_are_refused,
    chain_that_the_device_cannot_read_ends_the_virtqueue,
    virtqueues_leave_nothing,
];

const ENTRIES: u16 = 8;
/// The parts of the memory: descriptors, available ring, used ring, a frame behind its header.
const AVAILABLE: usize = 0x400;
const USED: usize = 0x800;
const FRAME: usize = 0x1000;
/// Bytes of `struct virtio_net_hdr_v1`.
const HEADER: usize = 12;

/// The parts of a virtqueue, and the command that creates it.
struct Parts {
    input: Bits<create_virtio_net_q_in, Vec<u8>>,
    tis: DevxObject,
    umems: [Umem; 3],
    memory: MemoryRegion<u8>,
    context: Context,
    pd: ProtectionDomain,
}

impl Parts {
    fn new(context: Context) -> Verdict<Parts> {
        let general = capabilities::<cmd_hca_cap>(&context, 0)?;
        let types = general.get(cmd_hca_cap::general_obj_types);
        let has = types >> OBJ_TYPE_VIRTIO_NET_Q & 1 != 0;
        require(has, Capability::Var, "the device has no virtio network queues")?;
        let virtio = capabilities::<caps>(&context, CAP_VDPA_EMULATION)?;
        let polled = virtio.get(caps::event_mode) & 1 != 0;
        require(polled, Capability::Var, "virtqueues need an event queue pair")?;
        let pd = context.alloc_pd()?;
        let memory = pd.mr_builder().access(Access::LOCAL_WRITE).allocate::<u8>(0x2000)?;
        let sizes = [
            (caps::umem_1_buffer_param_a, caps::umem_1_buffer_param_b),
            (caps::umem_2_buffer_param_a, caps::umem_2_buffer_param_b),
            (caps::umem_3_buffer_param_a, caps::umem_3_buffer_param_b),
        ]
        .map(|(each, more)| virtio.get(each) * u64::from(ENTRIES) + virtio.get(more));
        let umem = |at: usize| Umem::builder(&context).allocate(sizes[at] as usize);
        let umems = [umem(0)?, umem(1)?, umem(2)?];
        let domain = create(&context, &command::<16>(opcode::ALLOC_TRANSPORT_DOMAIN), &[])?;
        let mut asked = input::<create_tis_in>(opcode::CREATE_TIS);
        asked.sub_mut(create_tis_in::ctx).set(tisc::transport_domain, domain.number().into());
        let tis = create(&context, asked.bytes(), &[&domain])?;
        let input = input::<create_virtio_net_q_in>(opcode::CREATE_GENERAL_OBJECT);
        let mut parts = Parts { input, tis, umems, memory, context, pd };
        let base = parts.memory.as_ptr() as u64;
        let (key, pd) = (parts.memory.lkey().0, pd_number(&parts.pd)?);
        let ids = [0, 1, 2].map(|at| u64::from(parts.umems[at].id()));
        let mut about = parts.input.sub_mut(create_virtio_net_q_in::general_obj_in_cmd_hdr);
        about.set(header::obj_type, OBJ_TYPE_VIRTIO_NET_Q.into());
        let tis = parts.tis.number();
        let mut net = parts.input.sub_mut(create_virtio_net_q_in::obj_context);
        net.set(object::tisn_or_qpn, tis.into());
        for (field, value) in [
            (queue::virtio_version_1_0, 1),
            (queue::queue_index, 1),
            (queue::queue_size, ENTRIES.into()),
            (queue::desc_addr, base),
            (queue::available_addr, base + AVAILABLE as u64),
            (queue::used_addr, base + USED as u64),
            (queue::virtio_q_mkey, key.into()),
            (queue::pd, pd.into()),
            (queue::umem_1_id, ids[0]),
            (queue::umem_1_size, sizes[0]),
            (queue::umem_2_id, ids[1]),
            (queue::umem_2_size, sizes[1]),
            (queue::umem_3_id, ids[2]),
            (queue::umem_3_size, sizes[2]),
        ] {
            parts.set(field, value);
        }
        Ok(parts)
    }

    fn set(&mut self, field: Field<queue>, value: u64) {
        let mut net = self.input.sub_mut(create_virtio_net_q_in::obj_context);
        net.sub_mut(object::virtio_q_context).set(field, value);
    }

    fn create(&self) -> uverbs::Result<DevxObject> {
        let [one, two, three] = &self.umems;
        let keeps: [&dyn DevxRef; 6] = [one, two, three, &self.tis, &self.pd, &self.memory];
        create(&self.context, self.input.bytes(), &keeps)
    }

    /// Makes a chain of one descriptor available: `len` bytes of a frame with its header.
    fn offer(&mut self, chains: u16, address: u64, len: usize) {
        let mut descriptor = [0; 16];
        descriptor[..8].copy_from_slice(&address.to_le_bytes());
        descriptor[8..12].copy_from_slice(&(len as u32).to_le_bytes());
        self.memory.copy_from(0, &descriptor).expect("it has room");
        // All entries of the ring are descriptor 0.
        self.index(AVAILABLE).store(chains.to_le(), Ordering::Release);
    }

    /// The index of a ring.
    fn index(&self, ring: usize) -> &AtomicU16 {
        let place = self.memory.as_ptr().wrapping_add(ring + 2);
        // SAFETY: inside the memory, aligned, and of no reference of the test's.
        unsafe { AtomicU16::from_ptr(place.cast()) }
    }

    fn expect_used(&self, chains: u16) -> Verdict {
        let deadline = Instant::now() + PATIENCE;
        while u16::from_le(self.index(USED).load(Ordering::Acquire)) != chains {
            if Instant::now() > deadline {
                return Err(Stop::fail(format!("chain {chains} is not used")));
            }
            std::thread::yield_now();
        }
        Ok(())
    }
}

fn change(virtq: &DevxObject, to: u64) -> uverbs::Result<()> {
    let mut input = input::<modify_virtio_net_q_in>(opcode::MODIFY_GENERAL_OBJECT);
    let mut about = input.sub_mut(modify_virtio_net_q_in::general_obj_in_cmd_hdr);
    about.set(header::obj_type, OBJ_TYPE_VIRTIO_NET_Q.into());
    about.set(header::obj_id, virtq.number().into());
    let mut net = input.sub_mut(modify_virtio_net_q_in::obj_context);
    net.set(object::modify_field_select, MODIFY_STATE);
    net.set(object::state, to);
    // SAFETY: the memory of the queue stays registered longer than the queue.
    unsafe { devx::modify(virtq, input.bytes(), &mut [0; 16]) }
}

/// State, and the indices of the available and of the used ring.
fn query(virtq: &DevxObject) -> Verdict<(u64, u64, u64)> {
    let mut input = Bits::<header, _>::new(command::<16>(opcode::QUERY_GENERAL_OBJECT));
    input.set(header::obj_type, OBJ_TYPE_VIRTIO_NET_Q.into());
    input.set(header::obj_id, virtq.number().into());
    let mut output = vec![0; query_virtio_net_q_out::SIZE];
    devx::query(virtq, input.bytes(), &mut output)?;
    let output = Bits::<query_virtio_net_q_out, _>::new(output);
    let net = output.sub(query_virtio_net_q_out::obj_context);
    let indices = (net.get(object::hw_available_index), net.get(object::hw_used_index));
    Ok((net.get(object::state), indices.0, indices.1))
}

/// The page of a VAR.
fn doorbells(context: &Context) -> Verdict<(Var, DoorbellPage)> {
    let var = supported(Var::alloc(context, VarKind::Virtio), Capability::Var)?;
    let page = var.map()?;
    Ok((var, page))
}

pub(crate) fn virtqueue_sends_the_frames_that_its_var_announces() -> Verdict {
    env::packets()?;
    let context = open()?;
    let mut station = Station::on(&env::second()?)?;
    let rule = station.rule().spec(FlowEth::new().dst_mac(station.mac));
    let _flow = station.qp.create_flow(&rule)?;
    let mut parts = Parts::new(context.clone())?;
    let virtq = parts.create()?;
    let (_var, page) = doorbells(&context)?;
    change(&virtq, state::RDY)?;
    let address = parts.memory.as_ptr() as u64 + FRAME as u64;
    // More than the ring has entries, so that it wraps around.
    for round in 1..=2 * ENTRIES + 3 {
        let bytes = Frame::new(station.mac, [2, 0, 0, 0, 0, 9], &[round as u8; 100]).bytes();
        parts.memory.copy_from(FRAME + HEADER, &bytes).expect("a frame has room");
        station.listen()?;
        parts.offer(round, address, HEADER + bytes.len());
        assert_eq!(query(&virtq)?, (state::RDY, u64::from(round) - 1, u64::from(round) - 1));
        // Doorbells of another queue say nothing of this one.
        page.ring_u16(0, 3)?;
        assert_eq!(query(&virtq)?.1, u64::from(round) - 1);
        page.ring_u16(0, 1)?;
        station.expect(&bytes)?;
        parts.expect_used(round)?;
        assert_eq!(query(&virtq)?, (state::RDY, round.into(), round.into()));
    }
    change(&virtq, state::SUSPEND)?;
    parts.offer(2 * ENTRIES + 4, address, 100);
    page.ring_u16(0, 1)?;
    station.expect_silence()?;
    assert_eq!(query(&virtq)?.0, state::SUSPEND);
    virtq.destroy()?;
    Ok(())
}

fn virtqueue_goes_through_its_states_and_no_others() -> Verdict {
    let parts = Parts::new(open()?)?;
    let virtq = parts.create()?;
    let refused = |to| {
        let error = change(&virtq, to).unwrap_err();
        assert_eq!((error.errno(), error.kernel_errno()), (Errno::INVAL, Some(Errno::REMOTEIO)));
    };
    for (allowed, others) in [
        (state::RDY, [state::INIT, state::SUSPEND, state::ERR]),
        (state::SUSPEND, [state::INIT, state::RDY, state::ERR]),
    ] {
        others.into_iter().for_each(refused);
        change(&virtq, allowed)?;
        assert_eq!(query(&virtq)?.0, allowed);
    }
    [state::INIT, state::RDY, state::SUSPEND].into_iter().for_each(refused);
    Ok(())
}

fn virtqueues_that_make_no_sense_are_refused() -> Verdict {
    let mut parts = Parts::new(open()?)?;
    let good = parts.input.bytes().to_vec();
    for (nth, (field, value)) in [
        (queue::queue_size, 0),
        (queue::queue_size, 12),
        (queue::queue_index, 0xffff),
        (queue::virtio_q_type, 7),
        (queue::event_mode, 7),
        (queue::doorbell_stride_index, 0xffff),
        (queue::virtio_q_mkey, 0xffff_ff00),
        (queue::pd, 0xff_ffff),
        (queue::umem_1_id, 0xffff),
        (queue::umem_2_size, 64),
        (queue::umem_3_offset, 1 << 40),
    ]
    .into_iter()
    .enumerate()
    {
        parts.set(field, value);
        let error = parts.create().err();
        let kernel = error.and_then(|error| error.kernel_errno());
        assert_eq!(kernel, Some(Errno::REMOTEIO), "{nth}: {value:#x}");
        parts.input = Bits::new(good.clone());
    }
    // A type that there is not, and the number of another object.
    let mut about = parts.input.sub_mut(create_virtio_net_q_in::general_obj_in_cmd_hdr);
    about.set(header::obj_type, 0x3f);
    assert!(parts.create().is_err());
    parts.input = Bits::new(good);
    let virtq = parts.create()?;
    // A umem in use stays.
    let Parts { umems: [umem, ..], .. } = parts;
    assert_eq!(umem.destroy().expect_err("the queue is in it").into_parts().1.errno(), Errno::BUSY);
    virtq.destroy()?;
    Ok(())
}

fn chain_that_the_device_cannot_read_ends_the_virtqueue() -> Verdict {
    let context = open()?;
    let mut parts = Parts::new(context.clone())?;
    let virtq = parts.create()?;
    let (_var, page) = doorbells(&context)?;
    change(&virtq, state::RDY)?;
    // Outside the mkey.
    parts.offer(1, 4096, 100);
    page.ring_u32(0, 1)?;
    let deadline = Instant::now() + PATIENCE;
    while query(&virtq)?.0 != state::ERR {
        assert!(Instant::now() < deadline, "the queue goes on");
    }
    assert_eq!(query(&virtq)?, (state::ERR, 0, 0));
    Ok(())
}

fn virtqueues_leave_nothing() -> Verdict {
    let kinds = [ObjectKind::MLX5_DEVX_OBJ, ObjectKind::MLX5_DEVX_UMEM, ObjectKind::MLX5_VAR];
    rounds(&kinds, |context| {
        drop(Parts::new(open()?)?);
        let context = context.clone();
        Ok(Box::new(move || {
            let parts = Parts::new(context.clone())?;
            let virtq = parts.create()?;
            let (_var, page) = doorbells(&context)?;
            change(&virtq, state::RDY)?;
            page.ring_u16(0, 1)?;
            Ok(())
        }))
    })
}
