//! Commands of general objects: virtio network queues.
//!
//! Pairs with `mlx5_vdpa` of the kernel and of DPDK, as far as a queue does without events: those would need queue pairs or
//! interrupts of the virtio device.

use uverbs_uapi::mlx5::prm::object::{general_obj_in_cmd_hdr as header, general_obj_out_cmd_hdr};
use uverbs_uapi::mlx5::prm::virtio::{
    EVENT_MODE_NO_MSIX, MODIFY_STATE, OBJ_TYPE_VIRTIO_NET_Q, create_virtio_net_q_in,
    modify_virtio_net_q_in, query_virtio_net_q_out, virtio_net_q_object, virtio_q,
};
use uverbs_uapi::mlx5::prm::{Bits, Layout};

use crate::bar0::{PAGE, VAR_BYTES};
use crate::command_error::{CommandError, refuse};
use crate::device::Device;
use crate::object::virtq::{MOST, Rings, UMEM_BYTES, Virtq, VirtqState};

/// Bytes of `struct virtio_net_hdr`, and of `struct virtio_net_hdr_v1`.
const HEADER: usize = 10;
const HEADER_V1: usize = 12;
/// log2 of the most entries of a queue, and of the fewest.
const LOG_SIZES: std::ops::RangeInclusive<u32> = 0..=15;

/// The number of the object in a command about one of the modelled type.
fn number(input: &[u8]) -> Result<u32, CommandError> {
    let header = Bits::<header, _>::new(input);
    match header.get(header::obj_type) as u16 {
        OBJ_TYPE_VIRTIO_NET_Q => Ok(header.get32(header::obj_id)),
        other => refuse!(BadParam, "general objects of type {other:#x} are not modelled"),
    }
}

fn answer(number: u32) -> Vec<u8> {
    let mut out = Bits::<general_obj_out_cmd_hdr, _>::new(vec![0; general_obj_out_cmd_hdr::SIZE]);
    out.set(general_obj_out_cmd_hdr::obj_id, number.into());
    out.into_inner()
}

pub(crate) fn create(device: &mut Device, uid: u32, input: &[u8]) -> Result<Vec<u8>, CommandError> {
    number(input)?;
    let input = Bits::<create_virtio_net_q_in, _>::new(input);
    let object = input.sub(create_virtio_net_q_in::obj_context);
    let queue = object.sub(virtio_net_q_object::virtio_q_context);
    check_features(&object)?;
    let size = queue.get32(virtio_q::queue_size);
    let log_size = size.checked_ilog2().unwrap_or(u32::MAX);
    if !size.is_power_of_two() || !LOG_SIZES.contains(&log_size) {
        return refuse!(BadParam, "a virtqueue of {size} entries, a power of two up to 2^15");
    }
    let index = queue.get32(virtio_q::queue_index);
    if index >= MOST {
        return refuse!(LimitExceeded, "virtqueue index {index}, the limit is {MOST}");
    }
    let stride = queue.get(virtio_q::doorbell_stride_index);
    if stride >= VAR_BYTES / PAGE {
        return refuse!(BadIndex, "there is no VAR page {stride}");
    }
    // Descriptors, available ring and used ring, each aligned as the virtio specification demands.
    let [descriptors, available, used] =
        [virtio_q::desc_addr, virtio_q::available_addr, virtio_q::used_addr]
            .map(|field| queue.get(field));
    for (address, alignment) in [(descriptors, 16), (available, 2), (used, 4)] {
        if address % alignment != 0 {
            return refuse!(BadParam, "a ring at {address:#x} is not aligned to {alignment} bytes");
        }
    }
    let (pd, key) = (queue.get32(virtio_q::pd), queue.get32(virtio_q::virtio_q_mkey));
    device.objects.pds.check_use(uid, pd)?;
    // As work requests, the device checks the mkey at each access; it may be gone by then.
    device.objects.mkeys.check_use_or_kernels(uid, key >> 8)?;
    let tis = object.get32(virtio_net_q_object::tisn_or_qpn);
    device.objects.tises.check_use_or_kernels(uid, tis)?;
    let umems = check_umems(device, uid, &queue, size)?;
    device.objects.virtqs.check_room()?;
    device.objects.pds.hold(pd)?;
    device.objects.tises.hold(tis)?;
    for umem in umems {
        device.objects.umems.hold(umem)?;
    }
    let header = match queue.is_set(virtio_q::virtio_version_1_0) {
        true => HEADER_V1,
        false => HEADER,
    };
    let virtq = Virtq {
        state: VirtqState::Init,
        index: index as u16,
        rings: Rings { log_size, descriptors, available, used, key, pd },
        header,
        tis,
        next_available: object.get(virtio_net_q_object::hw_available_index) as u16,
        next_used: object.get(virtio_net_q_object::hw_used_index) as u16,
        umems,
        context: Bits::new(object.bytes().to_vec()),
    };
    device.objects.virtqs.insert_owned(uid, virtq).map(answer)
}

/// Refuses what is not modelled.
fn check_features(object: &Bits<virtio_net_q_object, &[u8]>) -> Result<(), CommandError> {
    let queue = object.sub(virtio_net_q_object::virtio_q_context);
    let features = object.get(virtio_net_q_object::queue_feature_bit_mask_12_3) << 3
        | object.get(virtio_net_q_object::queue_feature_bit_mask_2_0);
    for (what, value) in [
        ("features", features),
        ("a dirty bitmap", object.get(virtio_net_q_object::dirty_bitmap_dump_enable)),
        ("packed rings", queue.get(virtio_q::virtio_q_type)),
        ("full emulation", queue.get(virtio_q::full_emulation)),
        ("descriptors in a tunnel", queue.get(virtio_q::offload_type)),
        ("counters", queue.get(virtio_q::counter_set_id)),
    ] {
        if value != 0 {
            return refuse!(BadParam, "virtqueues with {what} ({value:#x}) are not modelled");
        }
    }
    if queue.get(virtio_q::event_mode) != EVENT_MODE_NO_MSIX {
        return refuse!(BadParam, "virtqueues that raise events are not modelled");
    }
    Ok(())
}

/// The umems that firmware uses for a queue of `size` entries.
fn check_umems(
    device: &mut Device,
    uid: u32,
    queue: &Bits<virtio_q, &[u8]>,
    size: u32,
) -> Result<[u32; 3], CommandError> {
    let fields = [
        (virtio_q::umem_1_id, virtio_q::umem_1_size, virtio_q::umem_1_offset),
        (virtio_q::umem_2_id, virtio_q::umem_2_size, virtio_q::umem_2_offset),
        (virtio_q::umem_3_id, virtio_q::umem_3_size, virtio_q::umem_3_offset),
    ];
    let mut umems = [0; 3];
    for (((id, bytes, offset), (each, more)), umem) in
        fields.into_iter().zip(UMEM_BYTES).zip(&mut umems)
    {
        *umem = queue.get32(id);
        let (bytes, needed) = (queue.get(bytes), each * u64::from(size) + more);
        if bytes < needed {
            return refuse!(
                BadParam,
                "a umem of {bytes} bytes, a virtqueue of {size} needs {needed}"
            );
        }
        device.objects.umems.check_use(uid, *umem)?;
        device.objects.umems.get(*umem)?.buffer.part(queue.get(offset), bytes)?;
    }
    Ok(umems)
}

pub(crate) fn modify(device: &mut Device, uid: u32, input: &[u8]) -> Result<Vec<u8>, CommandError> {
    let number = number(input)?;
    let input = Bits::<modify_virtio_net_q_in, _>::new(input);
    let object = input.sub(modify_virtio_net_q_in::obj_context);
    let virtq = device.objects.virtqs.owned_mut(uid, number)?;
    let select = object.get(virtio_net_q_object::modify_field_select);
    if select != MODIFY_STATE {
        return refuse!(
            BadParam,
            "a change of the fields {select:#x} of a virtqueue is not modelled"
        );
    }
    virtq.state = virtq.state.change(object.get(virtio_net_q_object::state))?;
    // Descriptors that were available before wait for no doorbell.
    device.schedule(number);
    Ok(answer(number))
}

pub(crate) fn query(device: &mut Device, uid: u32, input: &[u8]) -> Result<Vec<u8>, CommandError> {
    let number = number(input)?;
    let virtq = device.objects.virtqs.owned_mut(uid, number)?;
    let mut out = Bits::<query_virtio_net_q_out, _>::new(vec![0; query_virtio_net_q_out::SIZE]);
    out.set_sub(query_virtio_net_q_out::obj_context, virtq.context.bytes());
    let mut object = out.sub_mut(query_virtio_net_q_out::obj_context);
    object.set(virtio_net_q_object::modify_field_select, 0);
    object.set(virtio_net_q_object::state, virtq.state as u64);
    object.set(virtio_net_q_object::hw_available_index, virtq.next_available.into());
    object.set(virtio_net_q_object::hw_used_index, virtq.next_used.into());
    // Values of `error_type` are not published.
    let error = u64::from(virtq.state == VirtqState::Error);
    object.sub_mut(virtio_net_q_object::virtio_q_context).set(virtio_q::error_type, error);
    out.sub_mut(query_virtio_net_q_out::general_obj_out_cmd_hdr)
        .set(general_obj_out_cmd_hdr::obj_id, number.into());
    Ok(out.into_inner())
}

pub(crate) fn destroy(
    device: &mut Device,
    uid: u32,
    input: &[u8],
) -> Result<Vec<u8>, CommandError> {
    let number = number(input)?;
    device.objects.virtqs.owned_mut(uid, number)?;
    let virtq = device.objects.virtqs.remove(number)?;
    device.objects.release_umems(&virtq.umems);
    device.objects.pds.release(virtq.rings.pd);
    device.objects.tises.release(virtq.tis);
    Ok(answer(number))
}
