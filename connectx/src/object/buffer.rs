//! The buffer of a queue in guest memory: a list of pages that reads as one buffer.
//!
//! Pairs with the `pas` lists of the commands that create queues. The buffer is linear; the queues
//! wrap.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::chunks::chunks;
use crate::command_error::{CommandError, refuse};
use crate::guest::{DmaFault, GuestMemory};

/// The most pages that all buffers of a function may list together. Without this limit, a guest
/// that lists the same page again and again could use up the host's memory.
pub const MAX_PAGES: usize = 4 << 20;

/// The number of pages that the buffers of a function list.
#[derive(Debug, Clone, Default)]
pub struct ListedPages(Arc<AtomicUsize>);

/// A list of pages, counted as long as it exists.
#[derive(Debug, Default)]
struct PageList {
    pages: Vec<u64>,
    listed: ListedPages,
}

impl ListedPages {
    /// The number of pages.
    pub fn pages(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }

    fn list(&self, pages: Vec<u64>) -> Result<PageList, CommandError> {
        let all = self.pages() + pages.len();
        if all > MAX_PAGES {
            return refuse!(
                NoResources,
                "all queues together would list {all} pages, the limit is {MAX_PAGES}"
            );
        }
        self.0.store(all, Ordering::Relaxed);
        Ok(PageList { pages, listed: self.clone() })
    }
}

impl Drop for PageList {
    fn drop(&mut self) {
        self.listed.0.fetch_sub(self.pages.len(), Ordering::Relaxed);
    }
}

/// A scattered buffer. Clones and slices share its page list.
#[derive(Debug, Clone, Default)]
pub struct Buffer {
    shift: u32,
    offset: u64,
    len: u64,
    list: Arc<PageList>,
}

impl Buffer {
    /// A buffer of `len` bytes in pages of 2^(12 + `log_page_size`) bytes, which begins
    /// `page_offset` 64ths of a page into the first page. `list` is the command's list of
    /// big-endian page addresses.
    ///
    /// # Errors
    /// If the list does not cover the buffer, an address is not page-aligned, or all buffers list
    /// too many pages.
    pub fn new(
        listed: &ListedPages,
        log_page_size: u64,
        page_offset: u64,
        len: u64,
        list: &[u8],
    ) -> Result<Self, CommandError> {
        if log_page_size > 31 {
            return refuse!(BadParam, "log_page_size {log_page_size} is above 31");
        }
        let shift = 12 + log_page_size as u32;
        let offset = page_offset << (shift - 6);
        let Some(needed) = offset.checked_add(len).map(|end| end.div_ceil(1 << shift)) else {
            return refuse!(BadParam, "{len:#x} bytes from {offset:#x} end above 2^64");
        };
        let entries = chunks::<8>(list);
        if (entries.len() as u64) < needed {
            return refuse!(
                BadParam,
                "{} pages of {:#x} bytes are listed, {needed} needed",
                entries.len(),
                1u64 << shift
            );
        }
        let pages: Vec<u64> =
            entries.iter().take(needed as usize).map(|entry| u64::from_be_bytes(*entry)).collect();
        if let Some(page) = pages.iter().find(|page| *page & 0xff8 != 0) {
            return refuse!(BadParam, "page address {page:#x} is not aligned");
        }
        let pages = pages.into_iter().map(|page| page & !0xfff).collect();
        Ok(Self { shift, offset, len, list: Arc::new(listed.list(pages)?) })
    }

    /// `len` bytes of this buffer from byte `at`.
    ///
    /// # Errors
    /// If they are not all in the buffer.
    pub fn part(&self, at: u64, len: u64) -> Result<Self, CommandError> {
        if at.checked_add(len).is_none_or(|end| end > self.len) {
            return refuse!(
                BadParam,
                "{len:#x} bytes at {at:#x} are outside {:#x} bytes",
                self.len
            );
        }
        Ok(Self { offset: self.offset + at, len, ..self.clone() })
    }

    /// Guest address of a word of `len` bytes, aligned to its size, at byte `at`.
    ///
    /// # Errors
    /// If it is not aligned, or not in the buffer.
    pub fn address(&self, at: u64, len: u64) -> Result<u64, CommandError> {
        let place = self.part(at, len)?.offset;
        let inside = place & ((1 << self.shift) - 1);
        if inside % len != 0 {
            return refuse!(BadParam, "a word of {len} bytes at {at:#x} is not aligned");
        }
        match self.list.pages.get((place >> self.shift) as usize) {
            Some(page) => Ok(page.saturating_add(inside)),
            None => refuse!(BadParam, "no page at {at:#x}"),
        }
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether the buffer is empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    fn for_each_page(
        &self,
        at: u64,
        len: usize,
        mut each: impl FnMut(u64, std::ops::Range<usize>) -> Result<(), DmaFault>,
    ) -> Result<(), DmaFault> {
        let fault = DmaFault { address: at, len };
        if at.checked_add(len as u64).is_none_or(|end| end > self.len) {
            return Err(fault);
        }
        let mut done = 0;
        while done < len {
            let place = self.offset + at + done as u64;
            let page = *self.list.pages.get((place >> self.shift) as usize).ok_or(fault)?;
            let inside = place & ((1 << self.shift) - 1);
            let piece = ((1u64 << self.shift) - inside).min((len - done) as u64) as usize;
            each(page.checked_add(inside).ok_or(fault)?, done..done + piece)?;
            done += piece;
        }
        Ok(())
    }

    /// Reads from byte `at` of the buffer.
    ///
    /// # Errors
    /// [`DmaFault`] past the end, or where a page is not in guest memory.
    pub fn read(&self, memory: &GuestMemory, at: u64, to: &mut [u8]) -> Result<(), DmaFault> {
        self.for_each_page(at, to.len(), |address, range| memory.read(address, &mut to[range]))
    }

    /// Writes to byte `at` of the buffer.
    ///
    /// # Errors
    /// [`DmaFault`] past the end, or where a page is not in guest memory.
    pub fn write(&self, memory: &GuestMemory, at: u64, from: &[u8]) -> Result<(), DmaFault> {
        self.for_each_page(at, from.len(), |address, range| memory.write(address, &from[range]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scattered_pages_read_as_one_buffer() {
        let memory = GuestMemory::plain(0, 1 << 16).unwrap();
        let list: Vec<u8> =
            [0x3000u64, 0x1000, 0x5000].iter().flat_map(|page| page.to_be_bytes()).collect();
        let buffer = Buffer::new(&ListedPages::default(), 0, 63, 8192, &list).unwrap();
        let data: Vec<u8> = (0..8192u32).map(|n| (n / 7) as u8).collect();
        buffer.write(&memory, 0, &data).unwrap();
        let mut back = vec![0; 8192];
        buffer.read(&memory, 0, &mut back).unwrap();
        assert_eq!(back, data);
        let mut byte = [0];
        memory.read(0x1000, &mut byte).unwrap();
        assert_eq!(byte[0], data[64]);
        assert!(buffer.read(&memory, 8185, &mut [0; 8]).is_err());
    }

    #[test]
    fn a_slice_is_the_same_memory() {
        let memory = GuestMemory::plain(0, 1 << 16).unwrap();
        let list: Vec<u8> =
            [0x3000u64, 0x1000, 0x5000].iter().flat_map(|page| page.to_be_bytes()).collect();
        let whole = Buffer::new(&ListedPages::default(), 0, 0, 3 << 12, &list).unwrap();
        let data: Vec<u8> = (0..3 << 12).map(|n: u32| (n / 5) as u8).collect();
        whole.write(&memory, 0, &data).unwrap();
        let part = whole.part(0xff8, 0x1010).unwrap();
        let mut back = vec![0; 0x1010];
        part.read(&memory, 0, &mut back).unwrap();
        assert_eq!(back, data[0xff8..0x2008]);
        assert!(part.read(&memory, 0x1009, &mut [0; 8]).is_err());
        assert_eq!(part.address(8, 8).unwrap(), 0x1000);
        assert_eq!(part.address(0, 8).unwrap(), 0x3ff8);
        assert!(part.address(4, 8).is_err() && part.address(0x1010, 8).is_err());
        assert!(whole.part(1, 3 << 12).is_err() && whole.part(u64::MAX, 2).is_err());
    }

    #[test]
    fn a_page_list_that_is_too_short_is_refused() {
        let list = [0; 16];
        let new = |size, offset, len, list: &[u8]| {
            Buffer::new(&ListedPages::default(), size, offset, len, list)
        };
        assert!(new(0, 0, 8193, &list).is_err());
        assert!(new(0, 1, 8192, &list).is_err());
        assert!(new(32, 0, 1, &list).is_err());
        assert!(new(0, 63, u64::MAX, &list).is_err());
        assert!(new(0, 0, 1, &0x10u64.to_be_bytes()).is_err());
    }

    #[test]
    fn page_lists_share_a_limit_and_are_freed_with_their_last_slice() {
        let listed = ListedPages::default();
        let list = vec![0; MAX_PAGES / 2 * 8];
        let len = (MAX_PAGES as u64 / 2) << 12;
        let one = Buffer::new(&listed, 0, 0, len, &list).unwrap();
        let other = Buffer::new(&listed, 0, 0, len, &list).unwrap();
        assert_eq!(listed.pages(), MAX_PAGES);
        assert!(Buffer::new(&listed, 0, 0, 1, &list).is_err());
        let part = one.part(8192, 8).unwrap();
        drop(one);
        assert!(Buffer::new(&listed, 0, 0, 1, &list).is_err(), "a part is still there");
        drop(part);
        assert!(Buffer::new(&listed, 0, 0, 1, &list).is_ok());
        drop(other);
        assert_eq!(listed.pages(), 0);
    }
}
