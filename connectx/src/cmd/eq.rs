//! Commands of event queues.

use uverbs_uapi::mlx5::prm::eqc::{
    create_eq_in, create_eq_out, destroy_eq_in, eqc, query_eq_in, query_eq_out,
};
use uverbs_uapi::mlx5::prm::{Bits, Layout};

use crate::chunks::chunks;
use crate::command_error::{CommandError, refuse};
use crate::device::Device;
use crate::interrupt::VECTORS;
use crate::object::buffer::Buffer;
use crate::object::eq::{EQE, Eq, EqRing};

pub(crate) fn create_eq(device: &mut Device, input: &[u8]) -> Result<Vec<u8>, CommandError> {
    let input = Bits::<create_eq_in, _>::new(input);
    let context = input.sub(create_eq_in::eq_context_entry);
    let log_size = context.get32(eqc::log_eq_size);
    let vector = context.get(eqc::intr) as usize;
    if log_size > 22 {
        return refuse!(BadParam, "log_eq_size {log_size} is above 22");
    }
    if vector >= VECTORS {
        return refuse!(BadIndex, "interrupt vector {vector}, the function has {VECTORS}");
    }
    let uar = context.get32(eqc::uar_page);
    let buffer = Buffer::new(
        &device.objects.listed_pages,
        context.get(eqc::log_page_size),
        context.get(eqc::page_offset),
        EQE << log_size,
        input.tail(create_eq_in::pas),
    )?;
    let mut mask = [0; 4];
    let words = chunks::<8>(input.span(create_eq_in::event_bitmask));
    for (to, from) in mask.iter_mut().zip(words) {
        *to = u64::from_be_bytes(*from);
    }
    device.objects.eqs.check_room()?;
    device.objects.uars.hold(uar)?;
    let ring =
        EqRing { buffer, log_size, producer: 0, consumer: 0, armed: false, vector, uar, lost: 0 };
    let eq = Eq { ring: Some(ring), mask };
    let number = device.objects.eqs.insert(eq)?;
    let mut out = Bits::<create_eq_out, _>::new(vec![0; create_eq_out::SIZE]);
    out.set(create_eq_out::eq_number, number.into());
    Ok(out.into_inner())
}

/// Creates an EQ without memory, whose owner takes its events as values.
pub(crate) fn create_value_eq(device: &mut Device, kinds: &[u8]) -> Result<u32, CommandError> {
    let mut mask = [0; 4];
    for kind in kinds {
        mask[usize::from(kind / 64)] |= 1 << (kind % 64);
    }
    device.objects.eqs.insert(Eq { ring: None, mask })
}

pub(crate) fn destroy_eq(device: &mut Device, input: &[u8]) -> Result<Vec<u8>, CommandError> {
    let number = Bits::<destroy_eq_in, _>::new(input).get32(destroy_eq_in::eq_number);
    let eq = device.objects.eqs.remove(number)?;
    if let Some(ring) = eq.ring {
        device.objects.uars.release(ring.uar);
    }
    Ok(vec![])
}

pub(crate) fn query_eq(device: &mut Device, input: &[u8]) -> Result<Vec<u8>, CommandError> {
    let number = Bits::<query_eq_in, _>::new(input).get32(query_eq_in::eq_number);
    let eq = device.objects.eqs.get(number)?;
    let mut out = Bits::<query_eq_out, _>::new(vec![0; query_eq_out::SIZE]);
    let mut context = out.sub_mut(query_eq_out::eq_context_entry);
    if let Some(ring) = &eq.ring {
        context.set(eqc::log_eq_size, ring.log_size.into());
        context.set(eqc::uar_page, ring.uar.into());
        context.set(eqc::intr, ring.vector as u64);
        context.set(eqc::consumer_counter, ring.consumer.into());
        context.set(eqc::producer_counter, ring.producer.into());
    }
    Ok(out.into_inner())
}
