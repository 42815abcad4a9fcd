//! Commands of TIRs.
//!
//! Pairs with `transobj.c` of mlx5_core.

use uverbs_uapi::mlx5::prm::rqc::{
    create_tir_in, create_tir_out, destroy_tir_in, modify_tir_in, query_tir_in, query_tir_out, tirc,
};
use uverbs_uapi::mlx5::prm::{Bits, Layout};

use crate::command_error::{CommandError, refuse};
use crate::device::Device;
use crate::object::tir::{DIRECT, INDIRECT, Tir, hash};

fn hash_function(number: u64) -> Result<(), CommandError> {
    match number {
        hash::INVERTED_XOR8 | hash::TOEPLITZ => Ok(()),
        other => refuse!(BadParam, "receive hash function {other} is not modelled"),
    }
}

pub(crate) fn create_tir(
    device: &mut Device,
    uid: u32,
    input: &[u8],
) -> Result<Vec<u8>, CommandError> {
    let input = Bits::<create_tir_in, _>::new(input);
    let context = Bits::<tirc, _>::new(input.sub(create_tir_in::ctx).bytes().to_vec());
    if context.is_set(tirc::packet_merge_mask) || context.is_set(tirc::tls_en) {
        return refuse!(BadParam, "LRO and TLS are not modelled");
    }
    if context.get(tirc::disp_type) == INDIRECT {
        hash_function(context.get(tirc::rx_hash_fn))?;
    }
    // Without a transport domain a TIR receives frames of every sender.
    let domain = context.get32(tirc::transport_domain);
    if domain != 0 {
        device.objects.transport_domains.check_use_or_kernels(uid, domain)?;
    }
    device.objects.tirs.check_room()?;
    match context.get(tirc::disp_type) {
        DIRECT => {
            device.objects.rqs.check_use(uid, context.get32(tirc::inline_rqn))?;
            device.objects.rqs.hold(context.get32(tirc::inline_rqn))?;
        }
        INDIRECT => {
            device.objects.rqts.check_use(uid, context.get32(tirc::indirect_table))?;
            device.objects.rqts.hold(context.get32(tirc::indirect_table))?;
        }
        other => return refuse!(BadParam, "TIR disp_type {other} is not modelled"),
    }
    if domain != 0 {
        device.objects.transport_domains.hold(domain)?;
    }
    let number = device.objects.tirs.insert_owned(uid, Tir { context })?;
    let mut out = Bits::<create_tir_out, _>::new(vec![0; create_tir_out::SIZE]);
    out.set(create_tir_out::tirn, number.into());
    Ok(out.into_inner())
}

pub(crate) fn modify_tir(
    device: &mut Device,
    uid: u32,
    input: &[u8],
) -> Result<Vec<u8>, CommandError> {
    const SELF_LOOPBACK: u64 = 1 << 4;
    const HASH: u64 = 1 << 3;
    let input = Bits::<modify_tir_in, _>::new(input);
    let number = input.get32(modify_tir_in::tirn);
    let select = input.get(modify_tir_in::bitmask);
    let new = input.sub(modify_tir_in::ctx);
    if select & HASH != 0 {
        hash_function(new.get(tirc::rx_hash_fn))?;
    }
    let tir = device.objects.tirs.owned_mut(uid, number)?;
    if select & !(SELF_LOOPBACK | HASH) != 0 {
        return refuse!(BadParam, "MODIFY_TIR of fields {select:#x} is not modelled");
    }
    if select & SELF_LOOPBACK != 0 {
        tir.context.set(tirc::self_lb_block, new.get(tirc::self_lb_block));
    }
    if select & HASH != 0 {
        tir.context.set(tirc::rx_hash_fn, new.get(tirc::rx_hash_fn));
        tir.context.set(tirc::rx_hash_symmetric, new.get(tirc::rx_hash_symmetric));
        let key = new.span(tirc::rx_hash_toeplitz_key).to_vec();
        tir.context.set_span(tirc::rx_hash_toeplitz_key, &key);
        let fields = new.sub(tirc::rx_hash_field_selector_outer).bytes().to_vec();
        tir.context.set_sub(tirc::rx_hash_field_selector_outer, &fields);
    }
    Ok(vec![])
}

pub(crate) fn query_tir(
    device: &mut Device,
    uid: u32,
    input: &[u8],
) -> Result<Vec<u8>, CommandError> {
    let number = Bits::<query_tir_in, _>::new(input).get32(query_tir_in::tirn);
    let tir = device.objects.tirs.owned_mut(uid, number)?;
    let mut out = Bits::<query_tir_out, _>::new(vec![0; query_tir_out::SIZE]);
    out.set_sub(query_tir_out::tir_context, tir.context.bytes());
    Ok(out.into_inner())
}

pub(crate) fn destroy_tir(
    device: &mut Device,
    uid: u32,
    input: &[u8],
) -> Result<Vec<u8>, CommandError> {
    let number = Bits::<destroy_tir_in, _>::new(input).get32(destroy_tir_in::tirn);
    device.objects.tirs.owned_mut(uid, number)?;
    let tir = device.objects.tirs.remove(number)?;
    if tir.context.get(tirc::disp_type) == DIRECT {
        device.objects.rqs.release(tir.context.get32(tirc::inline_rqn));
    } else {
        device.objects.rqts.release(tir.context.get32(tirc::indirect_table));
    }
    device.objects.transport_domains.release(tir.context.get32(tirc::transport_domain));
    Ok(vec![])
}
