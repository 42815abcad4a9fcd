//! Commands of memory keys.

use uverbs_uapi::mlx5::prm::cmd::query_special_contexts_out;
use uverbs_uapi::mlx5::prm::mkc::{
    create_mkey_in, create_mkey_out, destroy_mkey_in, mkc, query_mkey_in, query_mkey_out,
};
use uverbs_uapi::mlx5::prm::{Bits, Layout};

use crate::command_error::{CommandError, refuse};
use crate::device::Device;
use crate::object::mkey::{DEVICE_MEMORY, DUMP_FILL, KLMS, KSM, Mkey, PAGES, PHYSICAL};
use crate::object::table::{KERNEL, SHARED};

/// The most bytes of all translation lists together.
const MAX_LISTS: usize = 2 << 30;

/// The mkeys that exist without a command.
pub(crate) fn query_special_contexts() -> Vec<u8> {
    let mut out =
        Bits::<query_special_contexts_out, _>::new(vec![0; query_special_contexts_out::SIZE]);
    out.set(query_special_contexts_out::dump_fill_mkey, DUMP_FILL.into());
    out.into_inner()
}

pub(crate) fn create_mkey(
    device: &mut Device,
    uid: u32,
    input: &[u8],
) -> Result<Vec<u8>, CommandError> {
    let input = Bits::<create_mkey_in, _>::new(input);
    let entry = input.sub(create_mkey_in::memory_key_mkey_entry);
    let context = Bits::<mkc, _>::new(entry.bytes().to_vec());
    if input.is_set(create_mkey_in::mkey_umem_valid) {
        return refuse!(BadParam, "an mkey over a umem is not modelled");
    }
    if input.is_set(create_mkey_in::pg_access) {
        return refuse!(BadParam, "page faults (ODP) are not modelled");
    }
    if context.is_set(mkc::bsf_en) {
        return refuse!(BadParam, "signature mkeys are not modelled");
    }
    let mode = context.get(mkc::access_mode_4_2) << 2 | context.get(mkc::access_mode_1_0);
    if !matches!(mode, PHYSICAL | PAGES | KLMS | KSM | DEVICE_MEMORY) {
        return refuse!(BadParam, "mkey access mode {mode} is not modelled");
    }
    if matches!(mode, PHYSICAL | PAGES) && !matches!(uid, KERNEL | SHARED) {
        return refuse!(BadParam, "context {uid} may not name physical addresses");
    }
    let room = Mkey::octowords(&context);
    let actual = input.get(create_mkey_in::translations_octword_actual_size);
    if room > 1 << 22 || actual > room {
        return refuse!(
            LimitExceeded,
            "{actual} of {room} translation octowords, the limit is 2^22"
        );
    }
    let list = input.tail(create_mkey_in::klm_pas_mtt);
    let Some(list) = list.get(..actual as usize * 16) else {
        return refuse!(BadInputLength, "{actual} octowords named, {} bytes listed", list.len());
    };
    if !context.is_set(mkc::free) || context.get(mkc::pd) != 0 {
        device.objects.pds.check_use(uid, context.get32(mkc::pd))?;
    }
    // UMR WQEs replace entries in units of 64 bytes, padded if needed.
    let bytes = (room as usize * 16).next_multiple_of(64);
    let all = device.objects.mkey_lists + bytes;
    if all > MAX_LISTS {
        return refuse!(
            NoResources,
            "the translation lists of all mkeys would have {all:#x} bytes, the limit is {MAX_LISTS:#x}"
        );
    }
    let mut translation = list.to_vec();
    translation.resize(bytes, 0);
    device.objects.mkeys.check_room()?;
    if mode == DEVICE_MEMORY {
        device.objects.memic.hold(context.get(mkc::start_addr), context.get(mkc::len))?;
    }
    // A free mkey may have no PD yet.
    let pd = context.get32(mkc::pd);
    if pd != 0 {
        device.objects.pds.hold(pd)?;
    }
    device.objects.mkey_lists = all;
    let number = device.objects.mkeys.insert_owned(uid, Mkey { context, translation })?;
    let mut out = Bits::<create_mkey_out, _>::new(vec![0; create_mkey_out::SIZE]);
    out.set(create_mkey_out::mkey_index, number.into());
    Ok(out.into_inner())
}

pub(crate) fn destroy_mkey(
    device: &mut Device,
    uid: u32,
    input: &[u8],
) -> Result<Vec<u8>, CommandError> {
    let number = Bits::<destroy_mkey_in, _>::new(input).get32(destroy_mkey_in::mkey_index);
    device.objects.mkeys.owned_mut(uid, number)?;
    let mkey = device.objects.mkeys.remove(number)?;
    device.objects.mkey_lists -= mkey.translation.len();
    device.objects.pds.release(mkey.context.get32(mkc::pd));
    if mkey.is_device_memory() {
        let (start, len) = (mkey.context.get(mkc::start_addr), mkey.context.get(mkc::len));
        device.objects.memic.release(start, len);
    }
    Ok(vec![])
}

pub(crate) fn query_mkey(
    device: &mut Device,
    uid: u32,
    input: &[u8],
) -> Result<Vec<u8>, CommandError> {
    let number = Bits::<query_mkey_in, _>::new(input).get32(query_mkey_in::mkey_index);
    let mkey = device.objects.mkeys.owned_mut(uid, number)?;
    let mut out = Bits::<query_mkey_out, _>::new(vec![0; query_mkey_out::SIZE]);
    out.set_sub(query_mkey_out::memory_key_mkey_entry, mkey.context.bytes());
    Ok(out.into_inner())
}
