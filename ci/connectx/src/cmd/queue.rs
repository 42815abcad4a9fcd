//! Command slots: takes a command from guest memory, and puts its answer there.
//!
//! Pairs with `struct mlx5_cmd_layout` and `cmd_work_handler` of mlx5_core.

use super::mailbox::{self, Delivery, xor};
use super::pages;
use crate::device::Device;
use crate::format::event;
use crate::record::Entry;

const SLOT: usize = 64;
const TRANSPORT_PCI: u8 = 7;
/// Bytes of input and output that lie in the slot itself.
const INLINE: usize = 16;
const OWNER_HARDWARE: u8 = 1;
const OUTPUT: usize = 32;
const SIGNATURE: usize = 61;
const STATUS: usize = 63;

/// The longest input and output taken: the page list of a memory key of 4 GiB.
const MAX_LEN: usize = 16 << 20;

/// A slot as read.
struct Slot {
    bytes: [u8; SLOT],
}

impl Slot {
    fn u32(&self, at: usize) -> u32 {
        let b = &self.bytes;
        u32::from_be_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]])
    }

    fn u64(&self, at: usize) -> u64 {
        u64::from(self.u32(at)) << 32 | u64::from(self.u32(at + 4))
    }

    fn signed(&self) -> bool {
        self.bytes[SIGNATURE] != 0
    }

    fn token(&self) -> u8 {
        self.bytes[60]
    }
}

/// Runs the commands whose bits are set, in the order of their slots.
pub(crate) fn run(device: &mut Device, mut slots: u32) {
    while slots != 0 {
        let index = slots.trailing_zeros();
        slots &= slots - 1;
        run_slot(device, index);
    }
}

fn run_slot(device: &mut Device, index: u32) {
    let Some(queue) = device.segment.queue() else {
        log::warn!("command doorbell {index} without a command queue");
        return;
    };
    let address = queue + u64::from(index) * SLOT as u64;
    let mut slot = Slot { bytes: [0; SLOT] };
    if device.memory.read(address, &mut slot.bytes).is_err() {
        log::warn!("command queue at {queue:#x} is not in guest memory");
        return;
    }
    if slot.bytes[STATUS] & OWNER_HARDWARE == 0 {
        log::warn!("command slot {index} rung but not handed over");
        return;
    }
    // The command that makes the command event queue is not reported there: the driver has freed
    // its slot by the time it looks.
    let events = command_eq(device);
    let delivery = match carry_out(device, index as u8, &mut slot) {
        Ok(true) => 0,
        // The slot stays the device's for ever.
        Ok(false) => return,
        Err(delivery) => {
            log::warn!("command slot {index}: {delivery:?}");
            let (slot, delivery) = (index as u8, delivery as u8);
            device.recorder.add(device.now, &Entry::Answer { slot, delivery, output: &[] });
            delivery
        }
    };
    slot.bytes[STATUS] = delivery << 1;
    if slot.signed() {
        slot.bytes[SIGNATURE] = 0;
        slot.bytes[SIGNATURE] = !xor(&slot.bytes);
    }
    // The last word holds the ownership bit, and is written last.
    if device.memory.write(address, &slot.bytes).is_err() {
        return;
    }
    if let Some(eqn) = events
        && command_eq(device) == Some(eqn)
    {
        command_done(device, eqn, index);
        // Whoever hears of commands hears of pages too.
        pages::balance_pages(device);
    }
}

/// False if there is to be no answer.
fn carry_out(device: &mut Device, index: u8, slot: &mut Slot) -> Result<bool, Delivery> {
    let signed = slot.signed();
    if slot.bytes[0] != TRANSPORT_PCI {
        return Err(Delivery::Descriptor);
    }
    if signed && xor(&slot.bytes) != 0xff {
        return Err(Delivery::Signature);
    }
    let in_len = slot.u32(4) as usize;
    let out_len = slot.u32(56) as usize;
    if !(8..=MAX_LEN).contains(&in_len) {
        return Err(Delivery::InputLength);
    }
    if !(8..=MAX_LEN).contains(&out_len) {
        return Err(Delivery::OutputLength);
    }
    let mut input = slot.bytes[16..16 + in_len.min(INLINE)].to_vec();
    if in_len > INLINE {
        let rest = in_len - INLINE;
        mailbox::read(&device.memory, slot.u64(8), rest, slot.token(), &mut input)?;
    }
    device.recorder.add(device.now, &Entry::Command { slot: index, input: &input });
    // What a command has made, and nobody hears of, could not be ended.
    if out_len > INLINE {
        mailbox::check(&device.memory, slot.u64(48), out_len - INLINE, slot.token())?;
    }
    let Some(mut output) = super::dispatch::execute(device, &input, out_len) else {
        return Ok(false);
    };
    output.resize(out_len, 0);
    let answer = Entry::Answer { slot: index, delivery: 0, output: &output[..] };
    device.recorder.add(device.now, &answer);
    let inline = out_len.min(INLINE);
    slot.bytes[OUTPUT..OUTPUT + inline].copy_from_slice(&output[..inline]);
    if out_len > INLINE {
        let rest = &output[INLINE..];
        mailbox::write(&device.memory, slot.u64(48), rest, slot.token())?;
    }
    Ok(true)
}

/// The EQ that hears of finished commands, if there is one.
fn command_eq(device: &Device) -> Option<u32> {
    device.objects.eqs.iter().find(|(_, eq)| eq.wants(event::COMMAND)).map(|(number, _)| number)
}

/// Reports a finished command slot.
fn command_done(device: &mut Device, eqn: u32, slot: u32) {
    let mut data = [0; 28];
    data[..4].copy_from_slice(&(1u32 << slot).to_be_bytes());
    device.post_event(eqn, event::COMMAND, 0, &data);
}
