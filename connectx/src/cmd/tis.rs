//! Commands of TISes.
//!
//! Pairs with `transobj.c` of mlx5_core.

use uverbs_uapi::mlx5::prm::rqc::{
    create_tis_in, create_tis_out, destroy_tis_in, modify_tis_in, query_tis_in, query_tis_out, tisc,
};
use uverbs_uapi::mlx5::prm::{Bits, Layout};

use super::lag;
use crate::command_error::{CommandError, refuse};
use crate::device::Device;
use crate::object::tis::Tis;

/// Bits of `bitmask`: the priority, and the port of a LAG.
const PRIORITY: u64 = 1;
const LAG_PORT: u64 = 4;

/// The port of a LAG in a context.
fn lag_port(device: &Device, context: &Bits<tisc, &[u8]>) -> Result<u64, CommandError> {
    let port = context.get(tisc::lag_tx_port_affinity);
    lag::check_port(&device.caps, port)?;
    Ok(port)
}

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
    let lag_port = lag_port(device, &context)?;
    device.objects.tises.check_room()?;
    device.objects.transport_domains.hold(transport_domain)?;
    let number = device.objects.tises.insert_owned(uid, Tis { transport_domain, lag_port })?;
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
    let number = input.get32(modify_tis_in::tisn);
    device.objects.tises.owned_mut(uid, number)?;
    let bitmask = input.get(modify_tis_in::bitmask);
    if bitmask & !(PRIORITY | LAG_PORT) != 0 {
        return refuse!(BadParam, "MODIFY_TIS of fields {bitmask:#x} is not modelled");
    }
    if bitmask & LAG_PORT != 0 {
        let port = lag_port(device, &input.sub(modify_tis_in::ctx))?;
        device.objects.tises.owned_mut(uid, number)?.lag_port = port;
    }
    // All priorities share one link that is never full, so the device need not store them.
    Ok(vec![])
}

pub(crate) fn query_tis(
    device: &mut Device,
    uid: u32,
    input: &[u8],
) -> Result<Vec<u8>, CommandError> {
    let number = Bits::<query_tis_in, _>::new(input).get32(query_tis_in::tisn);
    let tis = device.objects.tises.owned_mut(uid, number)?;
    let mut out = Bits::<query_tis_out, _>::new(vec![0; query_tis_out::SIZE]);
    let mut context = out.sub_mut(query_tis_out::tis_context);
    context.set(tisc::transport_domain, tis.transport_domain.into());
    context.set(tisc::lag_tx_port_affinity, tis.lag_port);
    Ok(out.into_inner())
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
