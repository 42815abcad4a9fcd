//! Reads from and writes to BAR0.

use crate::bar0;
use crate::cmd::queue;
use crate::device::Device;
use crate::record::Entry;
use crate::segment::Effect;

/// Reads from BAR0.
pub(crate) fn read(device: &mut Device, offset: u64, to: &mut [u8]) {
    let page = offset / bar0::PAGE;
    if offset >= bar0::VAR_OFFSET {
        return device.bar.read(offset, to);
    }
    for (at, byte) in (offset..).zip(to) {
        // Doorbells are write-only.
        *byte = if page < u64::from(*bar0::UARS.start()) {
            device.segment.read(at & !3, device.now).to_be_bytes()[(at & 3) as usize]
        } else {
            0
        };
    }
}

/// Writes to BAR0.
pub(crate) fn write(device: &mut Device, offset: u64, from: &[u8]) {
    device.recorder.add(device.now, &Entry::Write { offset, bytes: from });
    if offset >= bar0::VAR_OFFSET {
        if !device.bar.write(offset, from) {
            log::debug!("{} bytes to {offset:#x} of BAR0, where nothing is", from.len());
        }
        return;
    }
    if offset / bar0::PAGE >= u64::from(*bar0::UARS.start()) {
        if !device.bus_master {
            log::debug!("doorbell while the function may not reach memory");
            return;
        }
        return device.uar_write((offset / bar0::PAGE) as u32, offset % bar0::PAGE, from);
    }
    let (words, _) = from.as_chunks::<4>();
    for (at, word) in (offset..).step_by(4).zip(words) {
        match device.segment.write(at, u32::from_be_bytes(*word)) {
            Effect::None => {}
            Effect::Commands(_) if !device.bus_master => {
                log::warn!("command while the function may not reach memory");
            }
            Effect::Commands(slots) => queue::run(device, slots),
            Effect::Reset => device.reset(),
        }
    }
}
