//! DMA by mkey: reads and writes guest memory and device memory.
//!
//! Pairs with [`crate::object::mkey`], which checks an access and finds its addresses.

use crate::device::Device;
use crate::format::syndrome::Syndrome;
use crate::format::wqe::{DataSegment, Sge};
use crate::object::mkey::{Access, AccessRight, DmaAddress, DmaRange};

/// A queue pair that accesses memory of its PD, or of the PD of an SRQ.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Accessor {
    pub(crate) qpn: u32,
    pub(crate) pd: u32,
}

impl Accessor {
    /// The access to a range.
    pub(crate) fn access(self, right: AccessRight, key: u32, address: u64, len: u64) -> Access {
        Access { key, pd: self.pd, qpn: self.qpn, right, address, len }
    }

    /// The access to `len` bytes of an SGE from `offset` on.
    pub(crate) fn part(self, right: AccessRight, sge: &Sge, offset: u64, len: usize) -> Access {
        self.access(right, sge.key, sge.address.wrapping_add(offset), len as u64)
    }
}

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

    /// Reads the memory of an access to `to`, which is as long.
    pub(crate) fn dma_read(&self, access: Access, to: &mut [u8]) -> Result<(), String> {
        self.objects.resolve(access, |ranges| {
            self.objects.cost.add_bytes(access.len);
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

    /// Reads the data of segments of a WQE from `offset` on, as much as `to` holds.
    pub(crate) fn gather<'w>(
        &self,
        by: Accessor,
        list: impl IntoIterator<Item = DataSegment<'w>>,
        offset: u64,
        to: &mut [u8],
    ) -> Result<(), Syndrome> {
        let (mut skip, mut rest) = (offset, to);
        for segment in list {
            let len = segment.len();
            if skip >= len {
                skip -= len;
                continue;
            }
            let (part, behind) = rest.split_at_mut(rest.len().min((len - skip) as usize));
            rest = behind;
            match segment {
                DataSegment::Inline(bytes) => {
                    let from = bytes.get(skip as usize..).and_then(|from| from.get(..part.len()));
                    part.copy_from_slice(from.ok_or(Syndrome::LocalQpOperation)?);
                }
                DataSegment::Memory(sge) => {
                    let access = by.part(AccessRight::LocalRead, &sge, skip, part.len());
                    self.dma_read(access, part).map_err(|why| {
                        log::debug!("send of QP {:#x}: {why}", by.qpn);
                        Syndrome::LocalProtection
                    })?;
                }
            }
            skip = 0;
            if rest.is_empty() {
                break;
            }
        }
        if rest.is_empty() { Ok(()) } else { Err(Syndrome::LocalLength) }
    }

    /// Writes data to SGEs from `offset` on, or only checks that their mkeys allow it.
    pub(crate) fn scatter(
        &self,
        by: Accessor,
        list: impl IntoIterator<Item = Sge>,
        offset: u64,
        data: &[u8],
        write: bool,
    ) -> Result<(), Syndrome> {
        let (mut skip, mut rest) = (offset, data);
        for sge in list {
            if rest.is_empty() {
                break;
            }
            let len = DataSegment::Memory(sge).len();
            if skip >= len {
                skip -= len;
                continue;
            }
            let (part, behind) = rest.split_at(rest.len().min((len - skip) as usize));
            rest = behind;
            let access = by.part(AccessRight::LocalWrite, &sge, skip, part.len());
            let done =
                if write { self.dma_write(access, part) } else { self.objects.check(access) };
            done.map_err(|why| {
                log::debug!("data for QP {:#x}: {why}", by.qpn);
                Syndrome::LocalProtection
            })?;
            skip = 0;
        }
        if rest.is_empty() { Ok(()) } else { Err(Syndrome::LocalLength) }
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
