//! DMA by mkey: reads and writes guest memory and device memory.
//!
//! Pairs with [`crate::object::mkey`], which checks an access and finds its addresses.

use uverbs_uapi::mlx5::prm::mkc::mkc;

use crate::bus::BusWrite;
use crate::device::Device;
use crate::format::syndrome::Syndrome;
use crate::format::wqe::{DataSegment, Sge};
use crate::guest::GuestMemory;
use crate::link::InPlace;
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

/// Data of a packet that has arrived.
#[derive(Clone, Copy)]
pub(crate) enum Payload<'a> {
    /// In the packet.
    Bytes(&'a [u8]),
    /// In memory of the sender; `None` if that is the device itself.
    InPlace(InPlace, Option<&'a GuestMemory>),
}

impl Payload<'_> {
    pub(crate) fn len(&self) -> usize {
        match self {
            Payload::Bytes(bytes) => bytes.len(),
            Payload::InPlace(in_place, _) => in_place.len(),
        }
    }

    /// The first `at` bytes, at most all, and the others.
    pub(super) fn split_at(self, at: usize) -> (Self, Self) {
        match self {
            Payload::Bytes(bytes) => {
                let (head, rest) = bytes.split_at(at.min(bytes.len()));
                (Payload::Bytes(head), Payload::Bytes(rest))
            }
            Payload::InPlace(in_place, memory) => {
                let (head, rest) = in_place.split_at(at);
                (Payload::InPlace(head, memory), Payload::InPlace(rest, memory))
            }
        }
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
            DmaAddress::Nowhere => {
                to.fill(0);
                Ok(())
            }
        }
    }

    fn write_range(&self, range: DmaRange, from: Payload<'_>) -> Result<(), String> {
        let address = match (range.address, from) {
            (DmaAddress::Guest(address), _) => address,
            (DmaAddress::Nowhere, _) => return Ok(()),
            (DmaAddress::Bar(offset), Payload::Bytes(from)) if self.bar.write(offset, from) => {
                return Ok(());
            }
            (DmaAddress::Bar(offset), Payload::InPlace(in_place, memory)) => {
                let mut bytes = vec![0; in_place.len()];
                let (one, two) = bytes.split_at_mut(in_place.ranges[0].1);
                for ((address, _), to) in in_place.ranges.into_iter().zip([one, two]) {
                    let memory = memory.unwrap_or(&self.memory);
                    memory.read(address, to).map_err(|fault| format!("{fault:?}"))?;
                }
                return self.write_range(
                    DmaRange { address: DmaAddress::Bar(offset), ..range },
                    Payload::Bytes(&bytes),
                );
            }
            (DmaAddress::Bar(offset), _) => return Err(format!("no device memory at {offset:#x}")),
        };
        self.note_write(address, from.len());
        let written = match from {
            Payload::Bytes(from) => self.memory.write(address, from),
            Payload::InPlace(in_place, memory) => {
                let memory = memory.unwrap_or(&self.memory);
                let [(one, first), (two, second)] = in_place.ranges;
                self.memory.copy(address, (memory, one), first).and_then(|()| match second {
                    0 => Ok(()),
                    _ => self.memory.copy(address + first as u64, (memory, two), second),
                })
            }
        };
        written.map_err(|fault| format!("{fault:?}"))
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
    pub(crate) fn dma_write(&self, access: Access, data: Payload<'_>) -> Result<(), String> {
        self.objects.resolve(access, |ranges| {
            self.objects.cost.add_bytes(access.len);
            let mut rest = data;
            for range in ranges {
                let (part, behind) = rest.split_at(range.len);
                self.write_range(*range, part)?;
                rest = behind;
            }
            Ok(())
        })
    }

    /// Writes the memory of an access with data of a packet: at once, or over a bus that takes its time.
    pub(crate) fn dma_post(&self, access: Access, data: Payload<'_>) -> Result<(), String> {
        if !self.bus.is_slow() {
            return self.dma_write(access, data);
        }
        if self.bus.is_full(access.qpn) {
            self.settle(Some(access.qpn));
        }
        let mkey = self.objects.mkeys.find(access.key >> 8);
        let relaxed = mkey.is_some_and(|mkey| mkey.context.is_set(mkc::relaxed_ordering_write));
        self.objects.resolve(access, |ranges| {
            self.objects.cost.add_bytes(access.len);
            let mut rest = data;
            for range in ranges {
                let (part, behind) = rest.split_at(range.len);
                rest = behind;
                let DmaAddress::Guest(address) = range.address else {
                    self.settle(Some(access.qpn));
                    self.write_range(*range, part)?;
                    continue;
                };
                let writable = self.memory.writable(address, part.len());
                writable.map_err(|fault| format!("{fault:?}"))?;
                match part {
                    Payload::Bytes(bytes) => self.bus.post(access.qpn, relaxed, address, bytes),
                    Payload::InPlace(in_place, memory) => {
                        let mut bytes = Vec::new();
                        in_place.append(memory.unwrap_or(&self.memory), &mut bytes);
                        self.bus.post(access.qpn, relaxed, address, &bytes);
                    }
                }
            }
            Ok(())
        })
    }

    /// Ends a write of the bus.
    pub(crate) fn end_bus_write(&self, write: &BusWrite) {
        let address = DmaAddress::Guest(write.address);
        let range = DmaRange { address, len: write.bytes.len() };
        // It was writable when it was posted. If it is not any more, the write is lost.
        let _ = self.write_range(range, Payload::Bytes(&write.bytes));
    }

    /// Has the data that a queue pair has received in memory, or that of all: see [`crate::bus`].
    pub(crate) fn settle(&self, qpn: Option<u32>) {
        if self.bus.is_slow() {
            self.end_bus_writes(qpn);
        }
    }

    #[inline(never)]
    fn end_bus_writes(&self, qpn: Option<u32>) {
        self.bus.take_all(qpn).iter().for_each(|write| self.end_bus_write(write));
    }

    /// Copies all payloads that stay in place into their packets (see [`crate::link`]), and has all data that has
    /// arrived in memory (see [`crate::bus`]).
    pub(crate) fn settle_payloads(&mut self) {
        self.settle(None);
        self.link.copy_payloads(&self.memory, None);
    }

    /// The memory of an access that stays in place until packets with it arrive, or its first part: payloads of `len`
    /// bytes each. `None` if the first one is read at once instead: it is in more than two ranges, or the access fails.
    pub(crate) fn locate(&self, access: Access, len: usize) -> Option<InPlace> {
        let guest = |range: &DmaRange| match range.address {
            DmaAddress::Guest(address) => Some((address, range.len)),
            DmaAddress::Bar(_) | DmaAddress::Nowhere => None,
        };
        let in_place = self.objects.resolve(access, |ranges| {
            let ranges = match ranges {
                [one] => guest(one).map(|one| [one, (0, 0)]),
                [one, two, ..] => guest(one).zip(guest(two)).map(<[_; 2]>::from),
                [] => None,
            };
            ranges.ok_or_else(String::new)
        });
        let found = InPlace { ranges: in_place.ok()? };
        let (in_place, _) = found.split_at(found.len() - found.len() % len);
        self.objects.cost.add_bytes(in_place.len() as u64);
        (in_place.len() > 0 && self.is_readable(&in_place)).then_some(in_place)
    }

    /// Whether a payload in place can be read.
    fn is_readable(&self, in_place: &InPlace) -> bool {
        let readable = |(address, len): (u64, usize)| self.memory.readable(address, len).is_ok();
        in_place.ranges.into_iter().all(readable)
    }

    /// As [`Device::locate`], for at most `packets` payloads of the segments of a WQE from `offset` on, if they are in
    /// one.
    pub(crate) fn locate_segment<'w>(
        &self,
        by: Accessor,
        list: impl IntoIterator<Item = DataSegment<'w>>,
        offset: u64,
        len: usize,
        packets: u32,
    ) -> Option<InPlace> {
        let mut skip = offset;
        for segment in list {
            if skip >= segment.len() {
                skip -= segment.len();
                continue;
            }
            let DataSegment::Memory(sge) = segment else { return None };
            let inside = ((segment.len() - skip) / len as u64).min(packets.into()) as usize;
            let access = by.part(AccessRight::LocalRead, &sge, skip, inside * len);
            return if inside > 0 { self.locate(access, len) } else { None };
        }
        None
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
        data: Payload<'_>,
        write: bool,
    ) -> Result<(), Syndrome> {
        let (mut skip, mut rest) = (offset, data);
        for sge in list {
            if rest.len() == 0 {
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
            let done = if write { self.dma_post(access, part) } else { self.objects.check(access) };
            done.map_err(|why| {
                log::debug!("data for QP {:#x}: {why}", by.qpn);
                Syndrome::LocalProtection
            })?;
            skip = 0;
        }
        if rest.len() == 0 { Ok(()) } else { Err(Syndrome::LocalLength) }
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
            DmaAddress::Nowhere => Ok(0),
        };
        old.map(native)
    }
}
