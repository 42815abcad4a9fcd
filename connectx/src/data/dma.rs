//! DMA by mkey: reads and writes guest memory and device memory.
//!
//! Pairs with [`crate::object::mkey`], which checks an access and finds its addresses.

use crate::device::Device;
use crate::object::mkey::{Access, DmaAddress, DmaRange};
use crate::scratch::Scratch;

impl Device {
    fn read_range(&self, range: DmaRange, to: &mut [u8]) -> Result<(), String> {
        match range.address {
            DmaAddress::Guest(address) => {
                self.memory.read(address, to).map_err(|fault| format!("{fault:?}"))
            }
            DmaAddress::Bar(offset) => {
                self.bar.read(offset, to);
                Ok(())
            }
        }
    }

    fn write_range(&self, range: DmaRange, from: &[u8]) -> Result<(), String> {
        match range.address {
            DmaAddress::Guest(address) => {
                self.note_write(address, from.len());
                self.memory.write(address, from).map_err(|fault| format!("{fault:?}"))
            }
            DmaAddress::Bar(offset) if self.bar.write(offset, from) => Ok(()),
            DmaAddress::Bar(offset) => Err(format!("no device memory at {offset:#x}")),
        }
    }

    /// Appends the memory of an access to `to`.
    pub(crate) fn dma_read(&self, access: Access, to: &mut Scratch) -> Result<(), String> {
        self.objects.resolve(access, |ranges| {
            self.objects.cost.add_bytes(access.len);
            let to = to.grow(access.len as usize);
            let mut at = 0;
            for range in ranges {
                self.read_range(*range, &mut to[at..at + range.len])?;
                at += range.len;
            }
            Ok(())
        })
    }

    /// Writes the memory of an access.
    pub(crate) fn dma_write(&self, access: Access, data: &[u8]) -> Result<(), String> {
        self.objects.resolve(access, |ranges| {
            self.objects.cost.add_bytes(access.len);
            let mut at = 0;
            for range in ranges {
                self.write_range(*range, &data[at..at + range.len])?;
                at += range.len;
            }
            Ok(())
        })
    }

    /// Replaces the word of an access, 4 or 8 bytes, atomically, and returns the old value. Memory
    /// holds numbers in the guest's byte order, little endian.
    pub(crate) fn dma_atomic(
        &self,
        access: Access,
        mut change: impl FnMut(u64) -> u64,
    ) -> Result<u64, String> {
        let len = access.len as usize;
        let range = self.objects.resolve(access, |ranges| match *ranges {
            [range] => Ok(range),
            _ => Err(format!("an atomic's word lies in {} ranges", ranges.len())),
        })?;
        let native =
            |value: u64| if len == 8 { value.to_le() } else { u64::from((value as u32).to_le()) };
        let swapped = |old: u64| native(change(native(old)));
        let old = match range.address {
            DmaAddress::Guest(address) => {
                self.note_write(address, len);
                self.memory.update(address, len, swapped).map_err(|fault| format!("{fault:?}"))
            }
            DmaAddress::Bar(offset) => self
                .bar
                .update(offset, len, swapped)
                .ok_or_else(|| format!("no word of device memory at {offset:#x}")),
        };
        old.map(native)
    }
}
