//! EQEs: how they are written, and when they raise an interrupt.
//!
//! Pairs with `eq.c` of mlx5_core. One doorbell register arms all EQs of a function. It lies in a
//! UAR page that the driver does not share.

use crate::device::Device;
use crate::format::event::{Event, QueueType};
use crate::object::eq::EQE;
use crate::recording::Entry;

impl Device {
    /// Reports an asynchronous event to every EQ that subscribed to its type.
    pub(crate) fn raise_async_event(&mut self, kind: u8, sub_type: u8, data: &[u8; 28]) {
        let wanting: Vec<u32> = self
            .objects
            .eqs
            .iter()
            .filter(|(_, eq)| eq.wants(kind))
            .map(|(number, _)| number)
            .collect();
        for number in wanting {
            self.write_eqe(number, kind, sub_type, data);
        }
    }

    /// Writes one EQE.
    pub(crate) fn write_eqe(&mut self, number: u32, kind: u8, sub_type: u8, data: &[u8; 28]) {
        if !self.bus_master {
            log::debug!("event {kind:#x} is lost without bus mastering");
            return;
        }
        let Ok(eq) = self.objects.eqs.get_mut(number) else { return };
        let Some(eq) = &mut eq.ring else {
            return self.events.push_back(Event { eqn: number, kind, sub_type, data: *data });
        };
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
        // The driver takes an EQE whose owner bit equals the parity of its own passes.
        eqe[63] = (eq.producer >> eq.log_size) as u8 & 1;
        let at = u64::from(eq.producer & ((1 << eq.log_size) - 1)) * EQE;
        if let Err(fault) = eq.buffer.write(&self.memory, at, &eqe) {
            log::error!("EQ {number}: {fault:?}");
            return;
        }
        let index = eq.producer;
        self.recorder.add(self.now, &Entry::Eqe { number, index, bytes: &eqe });
        eq.producer = eq.producer.wrapping_add(1) & 0xff_ffff;
        if std::mem::take(&mut eq.armed) {
            self.interrupts.raise(eq.vector);
        }
    }

    /// The EQ doorbell: the number of the EQ in the upper byte, the consumer index below.
    pub(crate) fn eq_doorbell(&mut self, uar: u32, value: u32, arm: bool) {
        let eq = self.objects.eqs.get_mut(value >> 24).ok().and_then(|eq| eq.ring.as_mut());
        let Some(eq) = eq else {
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

    /// Reports an event of a queue.
    pub(crate) fn queue_event(&mut self, queue: QueueType, number: u32, kind: u8) {
        let mut data = [0; 28];
        data[20] = queue as u8;
        data[24..].copy_from_slice(&number.to_be_bytes());
        self.raise_async_event(kind, 0, &data);
    }
}
