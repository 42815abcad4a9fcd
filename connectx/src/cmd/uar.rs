//! Commands of UARs. The number of a UAR is the number of its 4 KiB in BAR0.
//!
//! A driver with larger pages sets their size as a capability. ALLOC_UAR then gives it all UARs of a page of its own,
//! and returns the number of the first.

use uverbs_uapi::mlx5::prm::hca_cap::cmd_hca_cap;
use uverbs_uapi::mlx5::prm::object::{alloc_uar_out, dealloc_uar_in};
use uverbs_uapi::mlx5::prm::{Bits, Layout};

use crate::command_error::{CommandError, refuse};
use crate::device::Device;
use crate::hca_caps::GENERAL;
use crate::object::uar::Uar;

/// The largest page of a driver: 64 KiB.
const MOST_PER_PAGE: u32 = 16;

/// UARs in a page of the driver.
fn per_page(device: &Device) -> Result<u32, CommandError> {
    let Some(general) = device.caps.groups.get(&GENERAL) else { return Ok(1) };
    let general = Bits::<cmd_hca_cap, _>::new(general.current.as_slice());
    let log = general.get32(cmd_hca_cap::log_uar_page_sz);
    match 1u32.checked_shl(log) {
        Some(count @ 1..=MOST_PER_PAGE) => Ok(count),
        _ => refuse!(BadParam, "a page of 2^{log} UARs, the limit is {MOST_PER_PAGE}"),
    }
}

pub(crate) fn alloc_uar(device: &mut Device, uid: u32) -> Result<Vec<u8>, CommandError> {
    let count = per_page(device)?;
    let number = device.objects.uars.insert_run(uid, count, || Uar)?;
    let mut out = Bits::<alloc_uar_out, _>::new(vec![0; alloc_uar_out::SIZE]);
    out.set(alloc_uar_out::uar, number.into());
    Ok(out.into_inner())
}

pub(crate) fn dealloc_uar(
    device: &mut Device,
    uid: u32,
    input: &[u8],
) -> Result<Vec<u8>, CommandError> {
    let input = Bits::<dealloc_uar_in, _>::new(input);
    let number = input.get32(dealloc_uar_in::uar);
    let count = per_page(device)?;
    if number % count != 0 {
        return refuse!(BadResource, "UAR {number:#x} is not the first of its page");
    }
    device.objects.uars.owned_mut(uid, number)?;
    device.objects.uars.remove_run(number, count)?;
    Ok(vec![])
}
