//! A virtio network queue that hardware serves, whose doorbell is a VAR: made by commands to firmware, rung, and stopped. A
//! frame leaves the port by it. So a monitor gives a virtual machine a network device: the queue in the machine's memory, and the
//! VAR in its address space. The device must be a ConnectX or BlueField that emulates virtio.

use std::process::ExitCode;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};
use uverbs::mlx5::devx::{self, DevxObject, DevxRef, Umem};
use uverbs::mlx5::{Var, VarKind, pd_number};
use uverbs::{Access, Context};
use uverbs_uapi::mlx5::prm::cmd::query_hca_cap_out;
use uverbs_uapi::mlx5::prm::hca_cap::{cmd_hca_cap, virtio_emulation_cap as caps};
use uverbs_uapi::mlx5::prm::object::general_obj_in_cmd_hdr as header;
use uverbs_uapi::mlx5::prm::rqc::{create_tis_in, tisc};
use uverbs_uapi::mlx5::prm::virtio::{
    CAP_VDPA_EMULATION, EVENT_MODE_NO_MSIX, MODIFY_STATE, OBJ_TYPE_VIRTIO_NET_Q,
    create_virtio_net_q_in, modify_virtio_net_q_in, query_virtio_net_q_out, state,
    virtio_net_q_object as object, virtio_q as queue,
};
use uverbs_uapi::mlx5::prm::{Bits, Layout, command, opcode};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// The number of the queue in its virtio device: 1 is the first one that sends.
const QUEUE: u16 = 1;
const ENTRIES: u16 = 64;
/// The parts of the queue's memory: descriptors, available ring, used ring, and a frame behind its header.
const DESCRIPTORS: usize = 0;
const AVAILABLE: usize = 0x800;
const USED: usize = 0x1000;
const FRAME: usize = 0x2000;
const LENGTH: usize = 0x3000;
/// Bytes of `struct virtio_net_hdr_v1`.
const HEADER: usize = 12;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    let context = Context::open_first()?;
    let general = capabilities::<cmd_hca_cap>(&context, 0)?;
    if general.get(cmd_hca_cap::general_obj_types) >> OBJ_TYPE_VIRTIO_NET_Q & 1 == 0 {
        return Err(format!("{} has no virtio network queues", context.device().name()).into());
    }
    let virtio = capabilities::<caps>(&context, CAP_VDPA_EMULATION)?;
    if virtio.get(caps::event_mode) >> EVENT_MODE_NO_MSIX & 1 == 0 {
        return Err("virtio network queues of the device need an event queue pair".into());
    }

    // The queue's memory, which is a virtual machine's in a monitor; its mkey outlives the queue.
    let pd = context.alloc_pd()?;
    let memory = pd.mr_builder().access(Access::LOCAL_WRITE).allocate::<u8>(LENGTH)?;
    let key = memory.sge(..)?.lkey.0;
    let base = memory.as_ptr() as u64;

    // Memory of firmware's own for each queue.
    let sizes = [
        (caps::umem_1_buffer_param_a, caps::umem_1_buffer_param_b),
        (caps::umem_2_buffer_param_a, caps::umem_2_buffer_param_b),
        (caps::umem_3_buffer_param_a, caps::umem_3_buffer_param_b),
    ]
    .map(|(each, more)| virtio.get(each) * u64::from(ENTRIES) + virtio.get(more));
    let umem = |bytes| Umem::builder(&context).page_sizes(4096).allocate(bytes as usize);
    let umems = [umem(sizes[0])?, umem(sizes[1])?, umem(sizes[2])?];

    // Frames leave by a TIS.
    let domain = create(&context, &command::<16>(opcode::ALLOC_TRANSPORT_DOMAIN), &[])?;
    let mut input =
        Bits::<create_tis_in, _>::new(command::<{ create_tis_in::SIZE }>(opcode::CREATE_TIS));
    input.sub_mut(create_tis_in::ctx).set(tisc::transport_domain, domain.number().into());
    let tis = create(&context, input.bytes(), &[&domain])?;

    let mut input = Bits::<create_virtio_net_q_in, _>::new(command::<
        { create_virtio_net_q_in::SIZE },
    >(opcode::CREATE_GENERAL_OBJECT));
    input
        .sub_mut(create_virtio_net_q_in::general_obj_in_cmd_hdr)
        .set(header::obj_type, OBJ_TYPE_VIRTIO_NET_Q.into());
    let mut net = input.sub_mut(create_virtio_net_q_in::obj_context);
    net.set(object::tisn_or_qpn, tis.number().into());
    let mut ring = net.sub_mut(object::virtio_q_context);
    for (field, value) in [
        (queue::virtio_version_1_0, 1),
        (queue::event_mode, EVENT_MODE_NO_MSIX),
        (queue::queue_index, QUEUE.into()),
        (queue::queue_size, ENTRIES.into()),
        (queue::desc_addr, base + DESCRIPTORS as u64),
        (queue::available_addr, base + AVAILABLE as u64),
        (queue::used_addr, base + USED as u64),
        (queue::virtio_q_mkey, key.into()),
        (queue::pd, pd_number(&pd)?.into()),
        (queue::umem_1_id, umems[0].id().into()),
        (queue::umem_1_size, sizes[0]),
        (queue::umem_2_id, umems[1].id().into()),
        (queue::umem_2_size, sizes[1]),
        (queue::umem_3_id, umems[2].id().into()),
        (queue::umem_3_size, sizes[2]),
    ] {
        ring.set(field, value);
    }
    let keeps: [&dyn DevxRef; 6] = [&umems[0], &umems[1], &umems[2], &tis, &pd, &memory];
    let virtq = create(&context, input.bytes(), &keeps)?;
    change(&virtq, state::RDY)?;

    // The part of the driver in the virtual machine: a frame, its descriptor, the available ring, the doorbell.
    let var = Var::alloc(&context, VarKind::Virtio)?;
    let doorbells = var.map()?;
    let frame = [&[0xff; 6][..], &[2, 0, 0, 0, 0, 1, 0x88, 0xb5], &[7; 46]].concat();
    let at = |offset: usize| memory.as_ptr().wrapping_add(offset);
    let mut descriptor = [0; 16];
    descriptor[..8].copy_from_slice(&(base + FRAME as u64).to_le_bytes());
    descriptor[8..12].copy_from_slice(&((HEADER + frame.len()) as u32).to_le_bytes());
    // SAFETY: inside the memory, which nothing else borrows; the device reads it after the index is there.
    unsafe { at(FRAME + HEADER).copy_from_nonoverlapping(frame.as_ptr(), frame.len()) };
    // SAFETY: as above.
    unsafe { at(DESCRIPTORS).copy_from_nonoverlapping(descriptor.as_ptr(), descriptor.len()) };
    // SAFETY: inside the memory and aligned; it is accessed as an atomic alone.
    let available = unsafe { AtomicU16::from_ptr(at(AVAILABLE + 2).cast()) };
    // SAFETY: as above.
    let used = unsafe { AtomicU16::from_ptr(at(USED + 2).cast()) };
    // Entry 0 of the available ring is descriptor 0 already.
    available.store(1u16.to_le(), Ordering::Release);
    doorbells.ring_u16(0, QUEUE)?;
    let deadline = Instant::now() + Duration::from_secs(10);
    while u16::from_le(used.load(Ordering::Acquire)) != 1 {
        if Instant::now() > deadline {
            return Err("the device did not take the frame".into());
        }
        std::thread::sleep(Duration::from_millis(1));
    }

    change(&virtq, state::SUSPEND)?;
    let (available, used) = indices(&virtq)?;
    println!("the doorbell of VAR {} sent {available} frame, {used} used", var.page_id());
    virtq.destroy()?;
    Ok(())
}

/// The current capabilities of a group.
fn capabilities<L: Layout>(context: &Context, group: u16) -> Result<Bits<L, Vec<u8>>> {
    const CURRENT: u16 = 1;
    let mut input = command::<16>(opcode::QUERY_HCA_CAP);
    input[6..8].copy_from_slice(&(group << 1 | CURRENT).to_be_bytes());
    let mut output = vec![0; query_hca_cap_out::SIZE];
    devx::general_command(context, &input, &mut output)?;
    let output = Bits::<query_hca_cap_out, _>::new(output);
    Ok(Bits::new(output.span(query_hca_cap_out::capability).to_vec()))
}

fn create(context: &Context, input: &[u8], keeps: &[&dyn DevxRef]) -> Result<DevxObject> {
    // SAFETY: the umems are among `keeps`; the mkey of the queue's memory outlives the queue.
    Ok(unsafe { DevxObject::create(context, input, &mut [0; 16], keeps)? })
}

/// Changes the state of a virtio network queue.
fn change(virtq: &DevxObject, to: u64) -> Result<()> {
    let mut input = Bits::<modify_virtio_net_q_in, _>::new(command::<
        { modify_virtio_net_q_in::SIZE },
    >(opcode::MODIFY_GENERAL_OBJECT));
    let mut about = input.sub_mut(modify_virtio_net_q_in::general_obj_in_cmd_hdr);
    about.set(header::obj_type, OBJ_TYPE_VIRTIO_NET_Q.into());
    about.set(header::obj_id, virtq.number().into());
    let mut net = input.sub_mut(modify_virtio_net_q_in::obj_context);
    net.set(object::modify_field_select, MODIFY_STATE);
    net.set(object::state, to);
    // SAFETY: the queue's memory stays registered longer than the queue.
    unsafe { devx::modify(virtq, input.bytes(), &mut [0; 16])? };
    Ok(())
}

/// How many chains of descriptors the device has taken, and how many it has given back.
fn indices(virtq: &DevxObject) -> Result<(u64, u64)> {
    let mut input = Bits::<header, _>::new(command::<16>(opcode::QUERY_GENERAL_OBJECT));
    input.set(header::obj_type, OBJ_TYPE_VIRTIO_NET_Q.into());
    input.set(header::obj_id, virtq.number().into());
    let mut output = vec![0; query_virtio_net_q_out::SIZE];
    devx::query(virtq, input.bytes(), &mut output)?;
    let output = Bits::<query_virtio_net_q_out, _>::new(output);
    let net = output.sub(query_virtio_net_q_out::obj_context);
    Ok((net.get(object::hw_available_index), net.get(object::hw_used_index)))
}
