//! Commands of memory keys.

use uverbs_uapi::mlx5::prm::cmd::{query_special_contexts_out, query_vuid_in, query_vuid_out};
use uverbs_uapi::mlx5::prm::mkc::{
    create_mkey_in, create_mkey_out, destroy_mkey_in, mkc, query_mkey_in, query_mkey_out,
};
use uverbs_uapi::mlx5::prm::{Bits, Layout};

use crate::command_error::{CommandError, refuse};
use crate::device::Device;
use crate::object::mkey::{CROSSING, DEVICE_MEMORY, DUMP_FILL, KLMS, KSM, Mkey, PAGES, PHYSICAL};
use crate::object::table::{KERNEL, SHARED};

/// The most bytes of all translation lists together.
const MAX_LISTS: usize = 2 << 30;

/// `vhca_id` of the function among those of the adapter.
const VHCA_ID: u64 = 0;

/// The identifier of the function, or of its data-direct function.
pub(crate) fn query_vuid(device: &Device, input: &[u8]) -> Result<Vec<u8>, CommandError> {
    /// Bytes of each identifier.
    const ENTRY: usize = 128;
    let input = Bits::<query_vuid_in, _>::new(input);
    if !device.options.data_direct {
        return refuse!(BadOp, "the device has no identifiers of functions");
    }
    let vhca = input.get(query_vuid_in::vhca_id);
    if input.is_set(query_vuid_in::query_vfs_vuid) || vhca != VHCA_ID {
        return refuse!(BadParam, "identifiers of other functions than {VHCA_ID}");
    }
    let mut out = Bits::<query_vuid_out, _>::new(vec![0; query_vuid_out::SIZE]);
    out.set(query_vuid_out::num_of_entries, 1);
    let mut out = out.into_inner();
    let vuid = match input.is_set(query_vuid_in::data_direct) {
        true => device.options.data_direct_vuid(),
        false => device.options.vuid(),
    };
    out.extend(vuid.as_bytes());
    out.resize(query_vuid_out::SIZE + ENTRY, 0);
    Ok(out)
}

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
    let mut context = Bits::<mkc, _>::new(entry.bytes().to_vec());
    let umem = input.is_set(create_mkey_in::mkey_umem_valid).then(|| {
        (input.get32(create_mkey_in::mkey_umem_id), input.get(create_mkey_in::mkey_umem_offset))
    });
    if input.is_set(create_mkey_in::pg_access) {
        return refuse!(BadParam, "page faults (ODP) are not modelled");
    }
    if context.is_set(mkc::bsf_en) {
        return refuse!(BadParam, "signature mkeys are not modelled");
    }
    let mode = context.get(mkc::access_mode_4_2) << 2 | context.get(mkc::access_mode_1_0);
    let data_direct = input.is_set(create_mkey_in::data_direct);
    if data_direct && (mode != PHYSICAL || !device.options.data_direct) {
        return refuse!(
            BadParam,
            "an mkey of access mode {mode} of a data-direct function: it takes physical ones, if there is one"
        );
    }
    let crossed = match mode {
        CROSSING => Some(check_crossing(device, uid, &context)?),
        _ => None,
    };
    if !matches!(mode, PHYSICAL | PAGES | KLMS | KSM | DEVICE_MEMORY | CROSSING) {
        return refuse!(BadParam, "mkey access mode {mode} is not modelled");
    }
    if umem.is_some() && mode != PAGES {
        return refuse!(BadParam, "an mkey of access mode {mode} over a umem is not modelled");
    }
    if matches!(mode, PHYSICAL | PAGES) && umem.is_none() && !matches!(uid, KERNEL | SHARED) {
        return refuse!(BadParam, "context {uid} may not name physical addresses");
    }
    // There a crossing mkey has the other mkey.
    let room = if crossed.is_some() { 0 } else { Mkey::octowords(&context) };
    let actual = input.get(create_mkey_in::translations_octword_actual_size);
    if room > 1 << 22 || actual > room {
        return refuse!(
            LimitExceeded,
            "{actual} of {room} translation octowords, the limit is 2^22"
        );
    }
    let of_umem;
    let list = match umem {
        Some((number, offset)) => {
            of_umem = umem_pages(device, uid, &mut context, room, (number, offset))?;
            &of_umem[..]
        }
        None => input.tail(create_mkey_in::klm_pas_mtt),
    };
    let used = if umem.is_some() { list.len() } else { actual as usize * 16 };
    let Some(list) = list.get(..used).filter(|list| list.len() as u64 <= room * 16) else {
        return refuse!(
            BadInputLength,
            "{actual} of {room} octowords named, {} bytes listed",
            list.len()
        );
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
    let umem = umem.map(|(number, _)| number);
    if let Some(umem) = umem {
        device.objects.umems.hold(umem)?;
    }
    // While it has another name, its number may be no other mkey's.
    if let Some(crossed) = crossed {
        device.objects.mkeys.hold(crossed)?;
    }
    device.objects.mkey_lists = all;
    let mkey = Mkey { context, translation, umem, data_direct };
    let number = device.objects.mkeys.insert_owned(uid, mkey)?;
    let mut out = Bits::<create_mkey_out, _>::new(vec![0; create_mkey_out::SIZE]);
    out.set(create_mkey_out::mkey_index, number.into());
    Ok(out.into_inner())
}

/// Checks that the driver may create another name for an mkey: it has to be of this function. Firmware names those of
/// other functions, too, of which there are none here that it may. Returns the number of the mkey.
fn check_crossing(
    device: &Device,
    uid: u32,
    context: &Bits<mkc, Vec<u8>>,
) -> Result<u32, CommandError> {
    if !device.options.data_direct {
        return refuse!(BadParam, "mkey access mode {CROSSING} on a device without it");
    }
    if !matches!(uid, KERNEL | SHARED) {
        return refuse!(BadParam, "context {uid} may not cross to another function");
    }
    let vhca = context.get(mkc::crossing_target_vhca_id);
    if vhca != VHCA_ID {
        return refuse!(BadParam, "an mkey of function {vhca}, this is {VHCA_ID}");
    }
    let crossed = Mkey::named(context);
    let other = device.objects.mkeys.get(crossed >> 8)?;
    if other.context.get(mkc::mkey_7_0) != u64::from(crossed & 0xff) {
        return refuse!(BadParam, "mkey {crossed:#x} is not valid");
    }
    Ok(crossed >> 8)
}

/// The addresses of the pages of an mkey over a umem from byte `offset` on, each of 4 KiB. The mkey has `room` octowords
/// for them; the pages of the umem may be larger, so that its own list says little about their number.
fn umem_pages(
    device: &mut Device,
    uid: u32,
    context: &mut Bits<mkc, Vec<u8>>,
    room: u64,
    (number, offset): (u32, u64),
) -> Result<Vec<u8>, CommandError> {
    const LOG_PAGE: u64 = 12;
    const PAGE: u64 = 1 << LOG_PAGE;
    /// Translations of an octoword.
    const ENTRIES: u64 = 2;
    device.objects.umems.check_use(uid, number)?;
    let (start, len) = (context.get(mkc::start_addr), context.get(mkc::len));
    if context.is_set(mkc::length64) || len == 0 {
        return refuse!(BadParam, "an mkey over a umem has {len} bytes");
    }
    let umem = device.objects.umems.get(number)?;
    if [mkc::lw, mkc::rw, mkc::a].into_iter().any(|right| context.is_set(right)) {
        umem.check_writable(number, "an mkey with the right to write")?;
    }
    let buffer = umem.buffer.part(offset, len)?;
    if buffer.address(0, 1)? % PAGE != start % PAGE {
        return refuse!(
            BadParam,
            "address {start:#x} is not where byte {offset:#x} is in its page"
        );
    }
    context.set(mkc::log_page_size, LOG_PAGE);
    let first = start % PAGE;
    // Both are inside of the umem, which has fewer than 2^57 bytes.
    let count = (first + len).div_ceil(PAGE);
    if count > ENTRIES * room {
        return refuse!(
            BadInputLength,
            "{count} pages of 4 KiB of a umem, {room} translation octowords have {ENTRIES} each"
        );
    }
    let mut pages = Vec::new();
    for page in 0..count {
        let address = buffer.address((page * PAGE).saturating_sub(first), 1)?;
        pages.extend((address & !(PAGE - 1)).to_be_bytes());
    }
    Ok(pages)
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
    device.objects.release_umems(mkey.umem.as_slice());
    if let Some(crossed) = mkey.crossed() {
        device.objects.mkeys.release(crossed >> 8);
    }
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
