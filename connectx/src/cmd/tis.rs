//! Commands of TISes.
//!
//! Pairs with `transobj.c` of mlx5_core.

use uverbs_uapi::mlx5::prm::rqc::{
    create_tis_in, create_tis_out, destroy_tis_in, modify_tis_in, tisc,
};
use uverbs_uapi::mlx5::prm::{Bits, Layout};

use crate::command_error::{CommandError, refuse};
use crate::device::Device;
use crate::object::tis::Tis;

pub(crate) fn create_tis(
    device: &mut Device,
    uid: u32,
    input: &[u8],
) -> Result<Vec<u8>, CommandError> {
    let context = Bits::<create_tis_in, _>::new(input);
    let context = context.sub(create_tis_in::ctx);
    if context.is_set(tisc::tls_en) {
        return refuse!(BadParam, "TLS is not modelled");
    }
    let transport_domain = context.get32(tisc::transport_domain);
    device.objects.transport_domains.check_use_or_kernels(uid, transport_domain)?;
    device.objects.tises.check_room()?;
    device.objects.transport_domains.hold(transport_domain)?;
    let number = device.objects.tises.insert_owned(uid, Tis { transport_domain })?;
    let mut out = Bits::<create_tis_out, _>::new(vec![0; create_tis_out::SIZE]);
    out.set(create_tis_out::tisn, number.into());
    Ok(out.into_inner())
}

pub(crate) fn modify_tis(
    device: &mut Device,
    uid: u32,
    input: &[u8],
) -> Result<Vec<u8>, CommandError> {
    let input = Bits::<modify_tis_in, _>::new(input);
    device.objects.tises.owned_mut(uid, input.get32(modify_tis_in::tisn))?;
    if input.get(modify_tis_in::bitmask) & !1 != 0 {
        return refuse!(
            BadParam,
            "MODIFY_TIS of fields {:#x} is not modelled",
            input.get(modify_tis_in::bitmask)
        );
    }
    // All priorities share one link that is never full, so the device need not store them.
    Ok(vec![])
}

pub(crate) fn destroy_tis(
    device: &mut Device,
    uid: u32,
    input: &[u8],
) -> Result<Vec<u8>, CommandError> {
    let number = Bits::<destroy_tis_in, _>::new(input).get32(destroy_tis_in::tisn);
    device.objects.tises.owned_mut(uid, number)?;
    let tis = device.objects.tises.remove(number)?;
    device.objects.transport_domains.release(tis.transport_domain);
    Ok(vec![])
}
