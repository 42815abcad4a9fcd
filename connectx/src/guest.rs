//! Guest memory, which the device accesses by DMA, and memory that it shares with the guest.
//!
//! Pairs with the DMA_MAP messages of vfio-user. The guest's processors access this memory at
//! the same time. So every access goes through atomics, word by word in ascending order, and every
//! store is a release: a driver that reads the last word of a CQE sees all of it.
//!
//! This is the only module with `unsafe`. A guest chooses the addresses that the device accesses;
//! an address without memory returns [`DmaFault`].

use std::cell::Cell;
use std::fs::File;
use std::io;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

/// An address range that guest memory does not cover, or that is not writable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DmaFault {
    /// First byte of the access.
    pub address: u64,
    /// Length of the access in bytes.
    pub len: usize,
}

/// Shared memory. It stays on one thread: concurrent accesses of different sizes to one address are
/// undefined between threads of a program, but not between the program and the guest.
///
/// ```compile_fail
/// fn shared_by_threads<T: Sync>() {}
/// shared_by_threads::<uverbs_connectx::guest::Shared>();
/// ```
pub struct SharedMemory {
    map: MmapRaw,
    not_sync: PhantomData<Cell<u8>>,
}

impl SharedMemory {
    /// Maps `len` bytes of `file` from `offset`.
    ///
    /// # Errors
    /// If the file is shorter than that, or cannot be mapped for reading and writing.
    pub fn map(file: &File, offset: u64, len: usize) -> io::Result<Self> {
        let end = offset.checked_add(len as u64).ok_or(io::ErrorKind::InvalidInput)?;
        if len == 0 || file.metadata()?.len() < end {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let map = MmapOptions::new().offset(offset).len(len).map_raw(file)?;
        Ok(Self { map, not_sync: PhantomData })
    }

    /// Creates `len` zero bytes in a file that another process may map but not resize.
    ///
    /// # Errors
    /// If there is no memory left.
    pub fn create(name: &str, len: usize) -> io::Result<(File, Self)> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = File::from(memfd_create(name, flags)?);
        file.set_len(len as u64)?;
        // Seal the size: shrinking the file would take the memory away from under the mapping.
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let memory = Self::map(&file, 0, len)?;
        Ok((file, memory))
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.map.len()
    }

    /// Whether the mapping is empty; never true.
    pub fn is_empty(&self) -> bool {
        self.map.len() == 0
    }

    /// The host address of `range`, if it is inside.
    fn address(&self, range: &Range<usize>) -> Option<*mut u8> {
        (range.start <= range.end && range.end <= self.map.len())
            .then(|| self.map.as_mut_ptr().wrapping_add(range.start))
    }

    fn byte(&self, address: *mut u8) -> &AtomicU8 {
        // SAFETY: callers pass addresses inside the mapping, which lives as long as `self`; all
        // accesses of this process to it are atomic.
        unsafe { AtomicU8::from_ptr(address) }
    }

    fn half(&self, address: *mut u8) -> &AtomicU32 {
        // SAFETY: as for `byte`, and callers pass multiples of 4.
        unsafe { AtomicU32::from_ptr(address.cast()) }
    }

    fn word(&self, address: *mut u8) -> &AtomicU64 {
        // SAFETY: as for `byte`, and callers pass multiples of 8.
        unsafe { AtomicU64::from_ptr(address.cast()) }
    }

    /// Reads `to.len()` bytes from `offset`; `None` if the range is not inside.
    #[must_use]
    pub fn read(&self, offset: usize, to: &mut [u8]) -> Option<()> {
        let mut address = self.address(&(offset..offset.checked_add(to.len())?))?;
        let head = address.addr().wrapping_neg() % 8;
        let (head, rest) = to.split_at_mut(head.min(to.len()));
        for byte in head {
            *byte = self.byte(address).load(Ordering::Acquire);
            address = address.wrapping_add(1);
        }
        let mut words = rest.chunks_exact_mut(8);
        for word in &mut words {
            word.copy_from_slice(&self.word(address).load(Ordering::Acquire).to_ne_bytes());
            address = address.wrapping_add(8);
        }
        for byte in words.into_remainder() {
            *byte = self.byte(address).load(Ordering::Acquire);
            address = address.wrapping_add(1);
        }
        Some(())
    }

    /// Writes `from` to `offset`; `None`, and nothing written, if the range is not inside.
    #[must_use]
    pub fn write(&self, offset: usize, from: &[u8]) -> Option<()> {
        let mut address = self.address(&(offset..offset.checked_add(from.len())?))?;
        let head = address.addr().wrapping_neg() % 8;
        let (head, rest) = from.split_at(head.min(from.len()));
        for byte in head {
            self.byte(address).store(*byte, Ordering::Release);
            address = address.wrapping_add(1);
        }
        let mut words = rest.chunks_exact(8);
        for word in &mut words {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(word);
            self.word(address).store(u64::from_ne_bytes(bytes), Ordering::Release);
            address = address.wrapping_add(8);
        }
        for byte in words.remainder() {
            self.byte(address).store(*byte, Ordering::Release);
            address = address.wrapping_add(1);
        }
        Some(())
    }
}

impl SharedMemory {
    /// Replaces a word of 4 or 8 bytes atomically, and returns the old value; `None` if the word is
    /// not inside or not aligned to its size.
    pub fn update(
        &self,
        offset: usize,
        len: usize,
        mut change: impl FnMut(u64) -> u64,
    ) -> Option<u64> {
        let host = self.address(&(offset..offset.checked_add(len)?))?;
        if !matches!(len, 4 | 8) || host.addr() % len != 0 {
            return None;
        }
        let order = Ordering::AcqRel;
        if len == 8 {
            let word = self.word(host);
            let mut old = word.load(Ordering::Acquire);
            loop {
                match word.compare_exchange(old, change(old), order, Ordering::Acquire) {
                    Ok(old) => return Some(old),
                    Err(now) => old = now,
                }
            }
        }
        let word = self.half(host);
        let mut old = word.load(Ordering::Acquire);
        loop {
            let new = change(u64::from(old)) as u32;
            match word.compare_exchange(old, new, order, Ordering::Acquire) {
                Ok(old) => return Some(u64::from(old)),
                Err(now) => old = now,
            }
        }
    }
}

/// A mapped range of guest physical addresses.
struct DmaMapping {
    base: u64,
    len: u64,
    writable: bool,
    /// `None` if the client sent no file: the device cannot access such memory.
    memory: Option<(SharedMemory, usize)>,
}

/// The guest physical memory that the device may access.
#[derive(Default)]
pub struct GuestMemory {
    /// Sorted by base, not overlapping.
    mappings: Vec<DmaMapping>,
}

impl GuestMemory {
    /// Memory of `len` zero bytes at `base`, without a guest.
    ///
    /// # Errors
    /// If there is no memory left.
    pub fn plain(base: u64, len: usize) -> io::Result<Self> {
        let map = MmapRaw::from(memmap2::MmapMut::map_anon(len)?);
        let memory = Some((SharedMemory { map, not_sync: PhantomData }, 0));
        Ok(Self { mappings: vec![DmaMapping { base, len: len as u64, writable: true, memory }] })
    }

    /// Adds a mapping.
    ///
    /// # Errors
    /// `InvalidInput` for a range that is empty, wraps or overlaps another mapping, or an error of
    /// mapping the file.
    pub fn map(
        &mut self,
        base: u64,
        len: u64,
        file: Option<(&File, u64)>,
        writable: bool,
    ) -> io::Result<()> {
        let end = base.checked_add(len).ok_or(io::ErrorKind::InvalidInput)?;
        let at = self.mappings.partition_point(|mapping| mapping.base < base);
        let after_previous = at == 0 || {
            let previous = &self.mappings[at - 1];
            previous.base + previous.len <= base
        };
        let before_next = self.mappings.get(at).is_none_or(|next| end <= next.base);
        if len == 0 || !after_previous || !before_next {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let memory = match file {
            Some((file, offset)) => {
                let len = usize::try_from(len).map_err(|_| io::ErrorKind::InvalidInput)?;
                Some((SharedMemory::map(file, offset, len)?, 0))
            }
            None => None,
        };
        self.mappings.insert(at, DmaMapping { base, len, writable, memory });
        Ok(())
    }

    /// Removes every mapping inside the range.
    ///
    /// # Errors
    /// `InvalidInput` if there is none, or a mapping extends outside.
    pub fn unmap(&mut self, base: u64, len: u64) -> io::Result<()> {
        let end = base.checked_add(len).ok_or(io::ErrorKind::InvalidInput)?;
        let inside =
            |mapping: &DmaMapping| mapping.base >= base && mapping.base + mapping.len <= end;
        let touches =
            |mapping: &DmaMapping| mapping.base < end && mapping.base + mapping.len > base;
        let mut hit = self.mappings.iter().filter(|mapping| touches(mapping)).peekable();
        if hit.peek().is_none() || !hit.all(inside) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        self.mappings.retain(|mapping| !inside(mapping));
        Ok(())
    }

    /// Removes every mapping.
    pub fn clear(&mut self) {
        self.mappings.clear();
    }

    fn find(&self, address: u64) -> Option<(&DmaMapping, &SharedMemory, usize)> {
        let at = self.mappings.partition_point(|mapping| mapping.base <= address).checked_sub(1)?;
        let mapping = &self.mappings[at];
        let offset = address - mapping.base;
        let (memory, start) = mapping.memory.as_ref()?;
        (offset < mapping.len).then_some((mapping, memory, start + offset as usize))
    }

    /// Reads guest memory; after an error the content of `to` is unspecified.
    ///
    /// # Errors
    /// [`DmaFault`] if any byte has no memory.
    pub fn read(&self, address: u64, to: &mut [u8]) -> Result<(), DmaFault> {
        let fault = DmaFault { address, len: to.len() };
        let mut done = 0;
        while done < to.len() {
            let at = address.checked_add(done as u64).ok_or(fault)?;
            let (_, memory, offset) = self.find(at).ok_or(fault)?;
            let len = (to.len() - done).min(memory.len() - offset);
            memory.read(offset, &mut to[done..done + len]).ok_or(fault)?;
            done += len;
        }
        Ok(())
    }

    /// Checks that a range can be written.
    ///
    /// # Errors
    /// [`DmaFault`] if any byte has no memory or is not writable.
    pub fn writable(&self, address: u64, len: usize) -> Result<(), DmaFault> {
        let fault = DmaFault { address, len };
        let mut done = 0;
        while done < len {
            let at = address.checked_add(done as u64).ok_or(fault)?;
            let (mapping, memory, offset) = self.find(at).ok_or(fault)?;
            if !mapping.writable {
                return Err(fault);
            }
            done += (len - done).min(memory.len() - offset);
        }
        Ok(())
    }

    /// Writes guest memory, or nothing if the range is not writable as a whole.
    ///
    /// # Errors
    /// [`DmaFault`] if any byte has no memory or is not writable.
    pub fn write(&self, address: u64, from: &[u8]) -> Result<(), DmaFault> {
        let fault = DmaFault { address, len: from.len() };
        self.writable(address, from.len())?;
        let mut done = 0;
        while done < from.len() {
            let at = address.checked_add(done as u64).ok_or(fault)?;
            let (_, memory, offset) = self.find(at).ok_or(fault)?;
            let len = (from.len() - done).min(memory.len() - offset);
            memory.write(offset, &from[done..done + len]).ok_or(fault)?;
            done += len;
        }
        Ok(())
    }

    /// Reads a big-endian 32-bit word.
    ///
    /// # Errors
    /// [`DmaFault`] if the word has no memory.
    pub fn read_be32(&self, address: u64) -> Result<u32, DmaFault> {
        let mut bytes = [0; 4];
        self.read(address, &mut bytes)?;
        Ok(u32::from_be_bytes(bytes))
    }

    /// Replaces a word of 4 or 8 bytes atomically, and returns the old value.
    ///
    /// # Errors
    /// [`DmaFault`] if the word is not aligned to its size, has no memory or is not writable.
    pub fn update(
        &self,
        address: u64,
        len: usize,
        change: impl FnMut(u64) -> u64,
    ) -> Result<u64, DmaFault> {
        let fault = DmaFault { address, len };
        let (mapping, memory, offset) = self.find(address).ok_or(fault)?;
        if !mapping.writable {
            return Err(fault);
        }
        memory.update(offset, len, change).ok_or(fault)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unaligned_accesses_round_trip() {
        let memory = GuestMemory::plain(0x1000, 4096).unwrap();
        let data: Vec<u8> = (0..61).collect();
        for offset in 0..9 {
            memory.write(0x1000 + offset, &data).unwrap();
            let mut back = vec![0; data.len()];
            memory.read(0x1000 + offset, &mut back).unwrap();
            assert_eq!(back, data);
        }
    }

    #[test]
    fn an_access_outside_of_guest_memory_faults() {
        let memory = GuestMemory::plain(0x1000, 4096).unwrap();
        let mut bytes = [0; 8];
        assert!(memory.read(0xffc, &mut bytes).is_err());
        assert!(memory.read(0x1ffc, &mut bytes).is_err());
        assert!(memory.read(u64::MAX - 3, &mut bytes).is_err());
        assert!(memory.read(0x1ff8, &mut bytes).is_ok());
        assert!(memory.write(0x1ff9, &bytes).is_err());
        assert!(memory.update(0x1004, 8, |old| old).is_err());
        assert!(memory.update(0x1004, 4, |old| old + 1).is_ok());
        assert!(GuestMemory::default().read(0, &mut bytes).is_err());
    }

    #[test]
    fn a_partly_backed_write_changes_nothing() {
        let memory = GuestMemory::plain(0, 4096).unwrap();
        assert_eq!(memory.write(4092, &[1; 8]), Err(DmaFault { address: 4092, len: 8 }));
        let mut bytes = [7; 4];
        memory.read(4092, &mut bytes).unwrap();
        assert_eq!(bytes, [0; 4]);
    }

    #[test]
    fn mappings_do_not_overlap_and_are_removed_whole() {
        let mut memory = GuestMemory::plain(0x2000, 4096).unwrap();
        assert!(memory.map(0x1800, 0x1000, None, true).is_err());
        assert!(memory.map(0x2fff, 1, None, true).is_err());
        assert!(memory.map(0x3000, 0x1000, None, true).is_ok());
        assert!(memory.map(u64::MAX, 2, None, true).is_err());
        let mut byte = [0];
        assert!(memory.read(0x3000, &mut byte).is_err());
        assert!(memory.unmap(0x2000, 0x800).is_err());
        assert!(memory.unmap(0x2000, 0x2000).is_ok());
        assert!(memory.unmap(0x2000, 0x2000).is_err());
    }
}
