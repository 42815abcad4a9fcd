//! Commands of user contexts: mlx5_ib creates one for each device file that is open.

use uverbs_uapi::mlx5::prm::object::{create_uctx_in, create_uctx_out, destroy_uctx_in};
use uverbs_uapi::mlx5::prm::{Bits, Layout};

use crate::command_error::{CommandError, refuse};
use crate::device::Device;
use crate::object::uctx::Uctx;

pub(crate) fn create_uctx(device: &mut Device, input: &[u8]) -> Result<Vec<u8>, CommandError> {
    let input = Bits::<create_uctx_in, _>::new(input);
    let caps = input.sub(create_uctx_in::uctx);
    let wanted = caps.get(uverbs_uapi::mlx5::prm::object::uctx::cap);
    if wanted != 0 {
        return refuse!(BadParam, "user context capabilities {wanted:#x} are not modelled");
    }
    let number = device.objects.uctxs.insert(Uctx)?;
    let mut out = Bits::<create_uctx_out, _>::new(vec![0; create_uctx_out::SIZE]);
    out.set(create_uctx_out::uid, number.into());
    Ok(out.into_inner())
}

pub(crate) fn destroy_uctx(device: &mut Device, input: &[u8]) -> Result<Vec<u8>, CommandError> {
    let input = Bits::<destroy_uctx_in, _>::new(input);
    let uid = input.get32(destroy_uctx_in::uid);
    device.objects.uctxs.get(uid)?;
    // A later context would get this number, and own these objects.
    if let Some(kind) = device.objects.left_by(uid) {
        return refuse!(ResourceBusy, "user context {uid} has a {kind}");
    }
    device.objects.uctxs.remove(uid)?;
    // A process may close its device before it frees its UAR pages.
    let left = device.objects.uars.remove_owned_by(uid);
    if left > 0 {
        log::debug!("user context {uid} left {left} UARs behind");
    }
    Ok(vec![])
}
