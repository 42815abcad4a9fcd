//! The part of BAR0 that is memory: VAR pages and device memory.
//!
//! Pairs with the region description of `connectx-vfio`, which passes the file to QEMU.
//! With `--map` QEMU maps it, and the guest's accesses need no message. Without, they arrive as
//! reads and writes of BAR0.

use std::fs::File;
use std::io;
use std::ptr::NonNull;

use crate::bar0::{MEMIC_BYTES, MEMIC_OFFSET, PAGE, TLP_OFFSET, TLP_PAGES, VAR_BYTES, VAR_OFFSET};
use crate::guest::SharedMemory;

/// The end of the memory in BAR0. It begins with the VAR pages.
pub const END: u64 = MEMIC_OFFSET + MEMIC_BYTES;

/// The areas of the memory: offset in BAR0 and length.
pub const AREAS: [(u64, u64); 2] =
    [(VAR_OFFSET, VAR_BYTES + TLP_PAGES * PAGE), (MEMIC_OFFSET, MEMIC_BYTES)];

/// The areas that a guest may map: not the VAR pages of virtio emulation, whose doorbells the device has to see.
pub const MAPPABLE: [(u64, u64); 2] = [(TLP_OFFSET, TLP_PAGES * PAGE), AREAS[1]];

/// The memory in a function's BAR0.
pub struct BarMemory {
    /// `None` if there is none, or the host has none left: reads then return zero.
    memory: Option<Backing>,
}

enum Backing {
    /// For another process to map; offsets in it are offsets in BAR0.
    File(File, SharedMemory),
    /// One for each area.
    Own([SharedMemory; 2]),
}

impl BarMemory {
    /// Creates the memory, filled with zeros; in a file if another process may map it.
    pub fn new(mapped: bool) -> Self {
        let create = || -> io::Result<Backing> {
            if mapped {
                let (file, memory) = SharedMemory::create("connectx-bar0", END as usize)?;
                return Ok(Backing::File(file, memory));
            }
            let [one, other] = AREAS.map(|(_, len)| SharedMemory::allocate(len as usize));
            Ok(Backing::Own([one?, other?]))
        };
        let memory = create();
        if let Err(error) = &memory {
            log::error!("no memory for VAR pages and device memory: {error}");
        }
        Self { memory: memory.ok() }
    }

    /// No memory.
    pub(crate) fn none() -> Self {
        Self { memory: None }
    }

    /// The file to map, if there is one; offsets in it are offsets in BAR0.
    pub fn file(&self) -> Option<&File> {
        match &self.memory {
            Some(Backing::File(file, _)) => Some(file),
            _ => None,
        }
    }

    /// Fills all areas with zeros, also for processes that have them mapped.
    pub fn clear(&self) {
        for (offset, len) in AREAS {
            self.fill(offset, len);
        }
    }

    /// Fills a range with zeros.
    pub fn fill(&self, offset: u64, len: u64) {
        let zeros = [0; 4096];
        for at in (offset..offset + len).step_by(zeros.len()) {
            let len = (offset + len - at).min(zeros.len() as u64);
            self.write(at, &zeros[..len as usize]);
        }
    }

    /// The memory of a range and its offset there, if the whole range is inside one area.
    fn shared(&self, offset: u64, len: usize) -> Option<(&SharedMemory, usize)> {
        let end = offset.checked_add(len as u64)?;
        let inside = |(start, len): &(u64, u64)| *start <= offset && end <= start + len;
        let area = AREAS.iter().position(inside)?;
        match self.memory.as_ref()? {
            Backing::File(_, memory) => Some((memory, offset as usize)),
            Backing::Own(memories) => Some((&memories[area], (offset - AREAS[area].0) as usize)),
        }
    }

    /// The address in this process of a range of BAR0; `None` if the range is not memory. It is valid
    /// until the function is restarted or dropped.
    pub fn address(&self, offset: u64, len: usize) -> Option<NonNull<u8>> {
        self.shared(offset, len).and_then(|(memory, offset)| memory.address(offset, len))
    }

    /// Reads from `offset` of BAR0; a range that is not memory reads zero.
    pub fn read(&self, offset: u64, to: &mut [u8]) {
        let read =
            self.shared(offset, to.len()).and_then(|(memory, offset)| memory.read(offset, to));
        if read.is_none() {
            to.fill(0);
        }
    }

    /// Writes to `offset` of BAR0; returns false if the range is not memory.
    pub fn write(&self, offset: u64, from: &[u8]) -> bool {
        self.shared(offset, from.len())
            .and_then(|(memory, offset)| memory.write(offset, from))
            .is_some()
    }

    /// Replaces a word of 4 or 8 bytes atomically, and returns the old value; `None` if it is not
    /// memory, or not aligned to its size.
    pub(crate) fn update(
        &self,
        offset: u64,
        len: usize,
        change: impl FnMut(u64) -> u64,
    ) -> Option<u64> {
        self.shared(offset, len).and_then(|(memory, offset)| memory.update(offset, len, change))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bar0::SIZE;

    #[test]
    fn a_mapping_of_the_file_shares_the_memory() {
        let bar = BarMemory::new(true);
        let guest = SharedMemory::map(bar.file().unwrap(), VAR_OFFSET, 4096).unwrap();
        assert!(bar.write(VAR_OFFSET + 8, &[1, 2, 3]));
        let mut bytes = [0; 3];
        guest.read(8, &mut bytes).unwrap();
        assert_eq!(bytes, [1, 2, 3]);
        guest.write(100, &[9]).unwrap();
        bar.read(VAR_OFFSET + 100, &mut bytes[..1]);
        assert_eq!(bytes[0], 9);
        bar.clear();
        guest.read(8, &mut bytes).unwrap();
        assert_eq!(bytes, [0; 3]);
    }

    #[test]
    fn offsets_between_the_areas_are_not_memory() {
        let bar = BarMemory::new(true);
        let between = TLP_OFFSET + TLP_PAGES * 4096;
        assert!(!bar.write(between, &[1]) && !bar.write(between - 1, &[1, 1]));
        assert!(!bar.write(END, &[1]) && !bar.write(u64::MAX, &[1, 1]));
        let mut byte = [7];
        bar.read(between, &mut byte);
        assert_eq!(byte, [0]);
    }

    #[test]
    fn a_holder_of_the_file_cannot_resize_it() {
        let bar = BarMemory::new(true);
        assert!(bar.file().unwrap().set_len(4096).is_err());
        assert!(bar.file().unwrap().set_len(END * 2).is_err());
    }

    #[test]
    fn areas_are_page_aligned_inside_bar0_and_do_not_overlap() {
        for (offset, len) in AREAS {
            assert_eq!((offset % 4096, len % 4096), (0, 0));
            assert!(offset >= VAR_OFFSET && offset + len <= END && END <= SIZE);
        }
        assert!(AREAS[0].0 + AREAS[0].1 <= AREAS[1].0);
    }

    #[test]
    fn memory_of_the_process_has_an_address_and_no_file() {
        let bar = BarMemory::new(false);
        assert!(bar.file().is_none());
        assert!(bar.write(MEMIC_OFFSET + 64, &[1, 2, 3]));
        let place = |offset| bar.address(offset, 8).unwrap().addr().get() as u64;
        assert_eq!(place(MEMIC_OFFSET + 64) - place(MEMIC_OFFSET), 64);
        assert_eq!(place(VAR_OFFSET) % 4096, 0);
        assert!(bar.address(END - 4, 8).is_none() && bar.address(0, 8).is_none());
    }
}
