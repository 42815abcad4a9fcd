//! Memory of a device that is mapped into this process: read and written in words, never borrowed.
//!
//! Pairs with the `mmap` of device memory through a uverbs file: write-combining pages of the device's own
//! address range. [`MmioPage`](super::mmio_page::MmioPage) is the counterpart for doorbells.

use super::barrier::{mmio_flush, mmio_wc_start, udma_from_device};
use super::mapping::Mapping;
#[cfg(test)]
use super::recorded_order::{RecordedStep, record_step};
use zerocopy::FromBytes;

/// The width of every access, in bytes. Devices promise nothing about narrower ones.
pub(crate) const WORD: usize = size_of::<u32>();

/// The part of a mapping that belongs to one allocation of device memory.
#[derive(Debug)]
pub(crate) struct MmioWindow {
    base: *mut u32,
    length: usize,
    mapping: Mapping,
}

// SAFETY: the mapping may be reached from any thread, and all access is by single loads and stores.
unsafe impl Send for MmioWindow {}
// SAFETY: as above. Two threads may store to the same word; one of the stores is then the last.
unsafe impl Sync for MmioWindow {}
impl std::panic::UnwindSafe for MmioWindow {}
impl std::panic::RefUnwindSafe for MmioWindow {}

impl MmioWindow {
    /// `length` bytes at `start` of the mapping; `None` unless they are inside and begin at a word.
    pub(crate) fn new(mapping: Mapping, start: usize, length: usize) -> Option<MmioWindow> {
        let inside = start.checked_add(length).is_some_and(|end| end <= mapping.len());
        let base = mapping.as_ptr().wrapping_add(start);
        (inside && base.addr() % WORD == 0).then(|| MmioWindow {
            base: base.cast(),
            length,
            mapping,
        })
    }

    /// The first byte.
    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.base.cast()
    }

    /// Whether the caller runs in a child of the process that mapped the memory, where it is not
    /// mapped.
    pub(crate) fn is_inherited(&self) -> bool {
        self.mapping.is_inherited()
    }

    /// The words from `offset` on that `bytes` are to go to or come from; `None` unless both are
    /// whole words and inside.
    fn words(&self, offset: usize, bytes: usize) -> Option<*mut u32> {
        let inside = offset.checked_add(bytes).is_some_and(|end| end <= self.length);
        let whole = offset % WORD == 0 && bytes % WORD == 0;
        (inside && whole).then(|| self.base.wrapping_byte_add(offset))
    }

    /// Copies `bytes` to `offset`; `None`, and nothing stored, unless they are whole words and
    /// inside. They have left the processor when this returns.
    pub(crate) fn store(&self, offset: usize, bytes: &[u8]) -> Option<()> {
        let to = self.words(offset, bytes.len())?;
        let words = <[[u8; WORD]]>::ref_from_bytes(bytes).ok()?;
        mmio_wc_start();
        for (at, word) in words.iter().enumerate() {
            #[cfg(test)]
            record_step(RecordedStep::DeviceMemory);
            // SAFETY: `words` checked that all of them are inside, and they are aligned since the
            // base is; the memory is plain bytes.
            unsafe { to.wrapping_add(at).write_volatile(u32::from_ne_bytes(*word)) };
        }
        // Pairs with the device's read of the memory for a request that is rung later.
        mmio_flush();
        Some(())
    }

    /// Copies from `offset` on to `bytes`; `None`, and nothing copied, unless they are whole words
    /// and inside.
    pub(crate) fn load(&self, offset: usize, bytes: &mut [u8]) -> Option<()> {
        let from = self.words(offset, bytes.len())?;
        let words = <[[u8; WORD]]>::mut_from_bytes(bytes).ok()?;
        // Pairs with the device's write of the memory before the completion that the caller saw.
        udma_from_device();
        for (at, word) in words.iter_mut().enumerate() {
            #[cfg(test)]
            record_step(RecordedStep::DeviceMemory);
            // SAFETY: as in `store`; any bytes are a word.
            *word = unsafe { from.wrapping_add(at).read_volatile() }.to_ne_bytes();
        }
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::fake_mapping::FakeMapping;
    use crate::sync::fork::Epoch;

    fn window(start: usize, length: usize) -> (FakeMapping, Option<MmioWindow>) {
        let file = FakeMapping::new("window", 4096);
        let mapping = file.map(4096, Epoch::current().unwrap()).unwrap();
        let window = MmioWindow::new(mapping, start, length);
        (file, window)
    }

    #[test]
    fn words_are_stored_and_loaded_at_their_offsets() {
        let (file, window) = window(64, 20);
        let window = window.unwrap();
        assert_eq!(window.store(4, &[1, 2, 3, 4, 5, 6, 7, 8]), Some(()));
        assert_eq!(window.store(16, &[9; 4]), Some(()));
        let found = file.read(60, 28);
        let mut expected = [0u8; 28];
        expected[8..16].copy_from_slice(&[1, 2, 3, 4, 5, 6, 7, 8]);
        expected[20..24].fill(9);
        assert_eq!(found, expected);
        let mut back = [0; 12];
        assert_eq!(window.load(8, &mut back), Some(()));
        assert_eq!(back, [5, 6, 7, 8, 0, 0, 0, 0, 9, 9, 9, 9]);
    }

    #[test]
    fn parts_of_words_and_places_outside_are_refused() {
        let (_, small) = window(64, 20);
        let small = small.unwrap();
        let refused = [(0, 24), (20, 4), (2, 4), (0, 3), (usize::MAX - 3, 8), (24, 0)];
        for (offset, length) in refused {
            assert_eq!(small.store(offset, &vec![1; length]), None, "{offset} {length}");
            assert_eq!(small.load(offset, &mut vec![1; length]), None, "{offset} {length}");
        }
        assert_eq!((small.store(20, &[]), small.load(20, &mut [])), (Some(()), Some(())));
        let mut all = [1; 20];
        assert_eq!(small.load(0, &mut all), Some(()));
        assert_eq!(all, [0; 20]);
        for (start, length) in [(4092, 8), (2, 8), (usize::MAX, 8), (5000, 0)] {
            assert!(window(start, length).1.is_none(), "{start} {length}");
        }
    }

    #[cfg(not(loom))]
    #[test]
    fn copies_are_ordered_with_requests_and_completions() {
        use crate::memory::recorded_order::steps_of;
        let (_, window) = window(0, 64);
        let window = window.unwrap();
        let steps = steps_of(|| assert_eq!(window.store(0, &[1; 16]), Some(())));
        let expected = [RecordedStep::WcStart, RecordedStep::DeviceMemory, RecordedStep::Flush];
        assert_eq!(steps, expected);
        let steps = steps_of(|| assert_eq!(window.load(0, &mut [0; 16]), Some(())));
        assert_eq!(steps, [RecordedStep::FromDevice, RecordedStep::DeviceMemory]);
    }
}
