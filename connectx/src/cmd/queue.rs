//! Command queue entries (slots): reads a command from guest memory and writes its output there.
//!
//! Pairs with `struct mlx5_cmd_layout` and `cmd_work_handler` of mlx5_core.

use super::mailbox::{self, DeliveryStatus, xor};
use super::pages;
use crate::device::Device;
use crate::format::event;
use crate::recording::Entry;

const SLOT: usize = 64;
const TRANSPORT_PCI: u8 = 7;
/// Bytes of input and output that are in the slot itself.
const INLINE: usize = 16;
const OWNER_HARDWARE: u8 = 1;
const OUTPUT: usize = 32;
const SIGNATURE: usize = 61;
const STATUS: usize = 63;

/// The longest input and output: the page list of an mkey of 4 GiB.
const MAX_LEN: usize = 16 << 20;

/// A slot as read from guest memory.
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

/// Executes the commands whose bits are set, in the order of their slots.
pub(crate) fn run(device: &mut Device, mut slots: u32) {
    while slots != 0 {
        let index = slots.trailing_zeros();
        slots &= slots - 1;
        run_slot(device, index);
    }
}

/// The slot of commands without one in a recording.
const NO_SLOT: u8 = u8::MAX;

/// Executes a command that came without a slot. Returns its output, or nothing if it is to get no
/// completion.
pub(crate) fn run_direct(device: &mut Device, input: &[u8], out_len: usize) -> Option<Vec<u8>> {
    device.flush_single_writes();
    device.recorder.add(device.now, &Entry::Command { slot: NO_SLOT, input });
    let mut output = super::dispatch::execute(device, input, out_len)?;
    output.resize(out_len, 0);
    let answer = Entry::CommandOutput { slot: NO_SLOT, delivery: 0, output: &output[..] };
    device.recorder.add(device.now, &answer);
    Some(output)
}

fn run_slot(device: &mut Device, index: u32) {
    let Some(queue) = device.init_segment.queue() else {
        log::warn!("doorbell of command slot {index} without a command queue");
        return;
    };
    let address = queue + u64::from(index) * SLOT as u64;
    let mut slot = Slot { bytes: [0; SLOT] };
    if device.memory.read(address, &mut slot.bytes).is_err() {
        log::warn!("command queue at {queue:#x} is not in guest memory");
        return;
    }
    if slot.bytes[STATUS] & OWNER_HARDWARE == 0 {
        log::warn!("command slot {index} was rung, but the driver still owns it");
        return;
    }
    // CREATE_EQ of the command EQ is not reported in that EQ: the driver has freed the slot by the
    // time it handles the event.
    let events = command_eq(device);
    let delivery = match carry_out(device, index as u8, &mut slot) {
        Ok(true) => 0,
        // The device keeps the slot for ever.
        Ok(false) => return,
        Err(delivery) => {
            log::warn!("command slot {index}: {delivery:?}");
            let (slot, delivery) = (index as u8, delivery as u8);
            device.recorder.add(device.now, &Entry::CommandOutput { slot, delivery, output: &[] });
            delivery
        }
    };
    slot.bytes[STATUS] = delivery << 1;
    if slot.signed() {
        slot.bytes[SIGNATURE] = 0;
        slot.bytes[SIGNATURE] = !xor(&slot.bytes);
    }
    // The last word holds the ownership bit, so it is written last.
    if device.memory.write(address, &slot.bytes).is_err() {
        return;
    }
    if let Some(eqn) = events.filter(|eqn| command_eq(device) == Some(*eqn)) {
        command_done(device, eqn, index);
        // The driver handles page requests as soon as it handles command events.
        pages::balance_pages(device);
    }
}

/// Returns false if the command is to get no completion.
fn carry_out(device: &mut Device, index: u8, slot: &mut Slot) -> Result<bool, DeliveryStatus> {
    let signed = slot.signed();
    if slot.bytes[0] != TRANSPORT_PCI {
        return Err(DeliveryStatus::Descriptor);
    }
    if signed && xor(&slot.bytes) != 0xff {
        return Err(DeliveryStatus::Signature);
    }
    let in_len = slot.u32(4) as usize;
    let out_len = slot.u32(56) as usize;
    if !(8..=MAX_LEN).contains(&in_len) {
        return Err(DeliveryStatus::InputLength);
    }
    if !(8..=MAX_LEN).contains(&out_len) {
        return Err(DeliveryStatus::OutputLength);
    }
    let mut input = slot.bytes[16..16 + in_len.min(INLINE)].to_vec();
    if in_len > INLINE {
        let rest = in_len - INLINE;
        mailbox::read(&device.memory, slot.u64(8), rest, slot.token(), &mut input)?;
    }
    device.recorder.add(device.now, &Entry::Command { slot: index, input: &input });
    // Check the output mailboxes first: if the output cannot be delivered, the driver never learns
    // the number of a new object.
    if out_len > INLINE {
        mailbox::check(&device.memory, slot.u64(48), out_len - INLINE, slot.token())?;
    }
    let Some(mut output) = super::dispatch::execute(device, &input, out_len) else {
        return Ok(false);
    };
    output.resize(out_len, 0);
    let answer = Entry::CommandOutput { slot: index, delivery: 0, output: &output[..] };
    device.recorder.add(device.now, &answer);
    let inline = out_len.min(INLINE);
    slot.bytes[OUTPUT..OUTPUT + inline].copy_from_slice(&output[..inline]);
    if out_len > INLINE {
        let rest = &output[INLINE..];
        mailbox::write(&device.memory, slot.u64(48), rest, slot.token())?;
    }
    Ok(true)
}

/// The EQ that reports finished commands, if there is one.
fn command_eq(device: &Device) -> Option<u32> {
    device.objects.eqs.iter().find(|(_, eq)| eq.wants(event::COMMAND)).map(|(number, _)| number)
}

/// Reports a finished command slot.
fn command_done(device: &mut Device, eqn: u32, slot: u32) {
    let mut data = [0; 28];
    data[..4].copy_from_slice(&(1u32 << slot).to_be_bytes());
    device.write_eqe(eqn, event::COMMAND, 0, &data);
}
