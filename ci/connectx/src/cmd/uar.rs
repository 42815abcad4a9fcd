//! Commands of UAR pages. The number of a UAR is the number of its page in BAR0.

use uverbs_uapi::mlx5::prm::object::{alloc_uar_out, dealloc_uar_in};
use uverbs_uapi::mlx5::prm::{Bits, Layout};

use crate::command_error::CommandError;
use crate::device::Device;
use crate::object::uar::Uar;

pub(crate) fn alloc_uar(device: &mut Device, uid: u32) -> Result<Vec<u8>, CommandError> {
    let number = device.objects.uars.insert_owned(uid, Uar)?;
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
    device.objects.uars.owned_mut(uid, number)?;
    device.objects.uars.remove(number)?;
    Ok(vec![])
}
