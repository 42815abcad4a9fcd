//! Event queues.
//!
//! Pairs with CREATE_EQ and mlx5_core's `eq.c`. All EQs of a function are armed through one
//! doorbell, in a UAR page that the driver keeps for itself.

use uverbs_uapi::mlx5::prm::eqc::{
    create_eq_in, create_eq_out, destroy_eq_in, eqc, query_eq_in, query_eq_out,
};
use uverbs_uapi::mlx5::prm::{Bits, Layout};

use crate::buffer::Buffer;
use crate::cmd::refusal::{Refused, refuse};
use crate::device::Device;
use crate::function::VECTORS;
use crate::record::Entry;

const EQE: u64 = 64;

/// Types of events, `MLX5_EVENT_TYPE_*`.
#[allow(missing_docs, reason = "the driver's names")]
pub mod event {
    pub const COMPLETION: u8 = 0x00;
    pub const CQ_ERROR: u8 = 0x04;
    pub const WQ_CATASTROPHIC: u8 = 0x05;
    pub const PORT_CHANGE: u8 = 0x09;
    pub const COMMAND: u8 = 0x0a;
    pub const PAGE_REQUEST: u8 = 0x0b;
    pub const WQ_INVALID_REQUEST: u8 = 0x10;
    pub const WQ_ACCESS_ERROR: u8 = 0x11;
    pub const LAST_WQE_REACHED: u8 = 0x13;
    pub const SRQ_LIMIT: u8 = 0x14;
}

/// An event queue.
pub struct Eq {
    buffer: Buffer,
    log_size: u32,
    producer: u32,
    consumer: u32,
    armed: bool,
    vector: usize,
    uar: u32,
    mask: [u64; 4],
    lost: u64,
}

impl Eq {
    fn wants(&self, kind: u8) -> bool {
        self.mask[usize::from(kind / 64)] >> (kind % 64) & 1 != 0
    }
}

impl Device {
    pub(crate) fn create_eq(&mut self, input: &[u8]) -> Result<Vec<u8>, Refused> {
        let input = Bits::<create_eq_in, _>::new(input);
        let context = input.sub(create_eq_in::eq_context_entry);
        let log_size = context.get32(eqc::log_eq_size);
        let vector = context.get(eqc::intr) as usize;
        if log_size > 22 {
            return refuse!(BadParam, "log_eq_size {log_size} is above 22");
        }
        if vector >= VECTORS {
            return refuse!(BadIndex, "vector {vector}, {VECTORS} exist");
        }
        let uar = context.get32(eqc::uar_page);
        let buffer = Buffer::new(
            &self.objects.listed,
            context.get(eqc::log_page_size),
            context.get(eqc::page_offset),
            EQE << log_size,
            input.tail(create_eq_in::pas),
        )?;
        let mut mask = [0; 4];
        let (words, _) = input.span(create_eq_in::event_bitmask).as_chunks::<8>();
        for (to, from) in mask.iter_mut().zip(words) {
            *to = u64::from_be_bytes(*from);
        }
        self.objects.eqs.room()?;
        self.objects.uars.hold(uar)?;
        let eq = Eq {
            buffer,
            log_size,
            producer: 0,
            consumer: 0,
            armed: false,
            vector,
            uar,
            mask,
            lost: 0,
        };
        let number = self.objects.eqs.insert(eq)?;
        let mut out = Bits::<create_eq_out, _>::new(vec![0; create_eq_out::SIZE]);
        out.set(create_eq_out::eq_number, number.into());
        Ok(out.into_inner())
    }

    pub(crate) fn destroy_eq(&mut self, input: &[u8]) -> Result<Vec<u8>, Refused> {
        let number = Bits::<destroy_eq_in, _>::new(input).get32(destroy_eq_in::eq_number);
        let eq = self.objects.eqs.remove(number)?;
        self.objects.uars.release(eq.uar);
        Ok(vec![])
    }

    pub(crate) fn query_eq(&mut self, input: &[u8]) -> Result<Vec<u8>, Refused> {
        let number = Bits::<query_eq_in, _>::new(input).get32(query_eq_in::eq_number);
        let eq = self.objects.eqs.get(number)?;
        let mut out = Bits::<query_eq_out, _>::new(vec![0; query_eq_out::SIZE]);
        let mut context = out.sub_mut(query_eq_out::eq_context_entry);
        context.set(eqc::log_eq_size, eq.log_size.into());
        context.set(eqc::uar_page, eq.uar.into());
        context.set(eqc::intr, eq.vector as u64);
        context.set(eqc::consumer_counter, eq.consumer.into());
        context.set(eqc::producer_counter, eq.producer.into());
        Ok(out.into_inner())
    }

    /// The EQ that hears of finished commands, if there is one.
    pub(crate) fn command_eq(&self) -> Option<u32> {
        self.objects.eqs.iter().find(|(_, eq)| eq.wants(event::COMMAND)).map(|(number, _)| number)
    }

    /// Reports a finished command slot.
    pub(crate) fn command_done(&mut self, eqn: u32, slot: u32) {
        let mut data = [0; 28];
        data[..4].copy_from_slice(&(1u32 << slot).to_be_bytes());
        self.post_event(eqn, event::COMMAND, 0, &data);
    }

    /// Asks for host pages, or offers some back, as the number of objects calls for.
    pub(crate) fn balance_pages(&mut self) {
        if !self.objects.eqs.iter().any(|(_, eq)| eq.wants(event::PAGE_REQUEST)) {
            return;
        }
        let objects = self.objects.counts().iter().map(|(_, count)| count).sum();
        if let Some(change) = self.pages.change(objects) {
            log::debug!("{change} host pages, for {objects} objects");
            let mut data = [0; 28];
            data[4..8].copy_from_slice(&change.to_be_bytes());
            self.raise_event(event::PAGE_REQUEST, 0, &data);
        }
    }

    /// Reports an asynchronous event to every EQ that asked for its type.
    pub(crate) fn raise_event(&mut self, kind: u8, sub_type: u8, data: &[u8; 28]) {
        let wanting: Vec<u32> = self
            .objects
            .eqs
            .iter()
            .filter(|(_, eq)| eq.wants(kind))
            .map(|(number, _)| number)
            .collect();
        for number in wanting {
            self.post_event(number, kind, sub_type, data);
        }
    }

    /// Writes one event to one EQ.
    pub(crate) fn post_event(&mut self, number: u32, kind: u8, sub_type: u8, data: &[u8; 28]) {
        if !self.bus_master {
            log::debug!("event {kind:#x} while the function may not reach memory");
            return;
        }
        let Ok(eq) = self.objects.eqs.get_mut(number) else { return };
        let waiting = eq.producer.wrapping_sub(eq.consumer) & 0xff_ffff;
        if waiting >= 1 << eq.log_size {
            eq.lost += 1;
            log::error!("EQ {number} is full, {} events lost", eq.lost);
            return;
        }
        let mut eqe = [0; EQE as usize];
        eqe[1] = kind;
        eqe[3] = sub_type;
        eqe[32..60].copy_from_slice(data);
        // The driver takes an entry whose owner bit equals the parity of its own passes.
        eqe[63] = (eq.producer >> eq.log_size) as u8 & 1;
        let at = u64::from(eq.producer & ((1 << eq.log_size) - 1)) * EQE;
        if let Err(fault) = eq.buffer.write(&self.memory, at, &eqe) {
            log::error!("EQ {number}: {fault:?}");
            return;
        }
        let index = eq.producer;
        self.recorder.add(self.now, &Entry::Event { number, index, bytes: &eqe });
        eq.producer = eq.producer.wrapping_add(1) & 0xff_ffff;
        if std::mem::take(&mut eq.armed) {
            self.interrupts.raise(eq.vector);
        }
    }

    /// The EQ doorbell: number in the upper byte, consumer index below.
    pub(crate) fn eq_doorbell(&mut self, uar: u32, value: u32, arm: bool) {
        let Ok(eq) = self.objects.eqs.get_mut(value >> 24) else {
            log::debug!("doorbell of EQ {} which does not exist", value >> 24);
            return;
        };
        if eq.uar != uar {
            log::warn!("doorbell of EQ {} on UAR {uar}, not {}", value >> 24, eq.uar);
            return;
        }
        eq.consumer = value & 0xff_ffff;
        eq.armed = arm;
        if arm && eq.producer != eq.consumer {
            eq.armed = false;
            self.interrupts.raise(eq.vector);
        }
    }
}
