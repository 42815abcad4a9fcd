//! Reads from and writes to BAR0.

use crate::bar0;
use crate::chunks::chunks;
use crate::cmd::queue;
use crate::device::Device;
use crate::init_segment::InitSegmentAction;
use crate::object::timestamp;
use crate::recording::Entry;

/// Reads from BAR0.
pub(crate) fn read(device: &mut Device, offset: u64, to: &mut [u8]) {
    let page = offset / bar0::PAGE;
    if offset >= bar0::VAR_OFFSET {
        return device.bar.read(offset, to);
    }
    let real_time = timestamp::real_time(device.now, &device.options);
    for (at, byte) in (offset..).zip(to) {
        // Doorbells are write-only.
        *byte = if page < u64::from(*bar0::UARS.start()) {
            let word = device.init_segment.read(at & !3, device.now, real_time);
            word.to_be_bytes()[(at & 3) as usize]
        } else {
            0
        };
    }
}

/// Writes to a UAR page, as a whole.
pub(crate) fn ring(device: &mut Device, uar: u32, offset: u64, from: &[u8]) {
    let place = u64::from(uar) * bar0::PAGE + offset;
    device.recorder.add(device.now, &Entry::Write { offset: place, bytes: from });
    if device.bus_master {
        device.ring_register(uar, offset, from);
    }
}

/// Takes a store to a page of BAR0 that is memory: a doorbell, if it is a VAR page of virtio emulation.
pub(crate) fn ring_page(device: &mut Device, offset: u64, from: &[u8]) {
    let vars = bar0::VAR_OFFSET..bar0::VAR_OFFSET + bar0::VAR_BYTES;
    if device.bus_master && vars.contains(&offset) {
        device.ring_virtqs(from);
    }
}

/// Writes to BAR0.
pub(crate) fn write(device: &mut Device, offset: u64, from: &[u8]) {
    device.recorder.add(device.now, &Entry::Write { offset, bytes: from });
    if offset >= bar0::VAR_OFFSET {
        if !device.bar.write(offset, from) {
            log::debug!("{} bytes to {offset:#x} of BAR0, which has nothing there", from.len());
        }
        return ring_page(device, offset, from);
    }
    if offset / bar0::PAGE >= u64::from(*bar0::UARS.start()) {
        if !device.bus_master {
            log::debug!("a doorbell is ignored without bus mastering");
            return;
        }
        return device.uar_write((offset / bar0::PAGE) as u32, offset % bar0::PAGE, from);
    }
    for (at, word) in (offset..).step_by(4).zip(chunks::<4>(from)) {
        match device.init_segment.write(at, u32::from_be_bytes(*word)) {
            InitSegmentAction::None => {}
            InitSegmentAction::Commands(_) if !device.bus_master => {
                log::warn!("a command is ignored without bus mastering");
            }
            InitSegmentAction::Commands(slots) => {
                device.flush_single_writes();
                queue::run(device, slots);
            }
            InitSegmentAction::Reset => device.reset(),
        }
    }
}
