//! Pinned huge pages and `fork` before Linux 5.12.
//!
//! Before Linux 5.12 a fork lets parent and child share pinned huge pages. The first write of the parent then
//! gets a new page (`hugetlb_cow`), and the device goes on with the old one. Pages that the child does not
//! get (`MADV_DONTFORK`) stay the parent's.

use rustix::io::Errno;
use rustix::mm::{Advice, madvise};
use std::ops::Range;
use std::ptr::with_exposed_provenance_mut;

/// Keeps the pages of more than `page_size` bytes that a range touches from forked children, from now on. Other
/// pages stay as they are.
///
/// # Errors
///
/// That of the kernel; none where this process cannot read its own mappings.
pub(crate) fn keep_from_children(start: u64, length: u64, page_size: usize) -> Result<(), Errno> {
    // Names of mapped files are any bytes.
    let mappings = std::fs::read("/proc/self/smaps").unwrap_or_default();
    for range in huge_parts(&String::from_utf8_lossy(&mappings), start, length, page_size as u64) {
        let first = with_exposed_provenance_mut(range.start as usize);
        let length = (range.end - range.start) as usize;
        // SAFETY: the advice changes nothing in this process; it decides what a child gets.
        unsafe { madvise(first, length, Advice::LinuxDontFork) }?;
    }
    Ok(())
}

/// The parts of a range that lie in pages larger than `page_size`, in whole pages, out of `/proc/self/smaps`.
fn huge_parts(smaps: &str, start: u64, length: u64, page_size: u64) -> Vec<Range<u64>> {
    let mut parts = Vec::new();
    let mut mapping = 0..0;
    for line in smaps.lines() {
        if let Some(size) = line.strip_prefix("KernelPageSize:") {
            let kilobytes =
                size.split_whitespace().next().and_then(|word| word.parse::<u64>().ok());
            let page = kilobytes.unwrap_or(0) << 10;
            let first = mapping.start.max(start);
            let end = mapping.end.min(start.saturating_add(length));
            if page > page_size && first < end {
                let end = end.checked_next_multiple_of(page).unwrap_or(end);
                parts.push(first - first % page..end);
            }
        } else if let Some(range) = range_of(line) {
            mapping = range;
        }
    }
    parts
}

/// The addresses of a mapping, from a line `7f0000000000-7f0000200000 rw-p …`.
pub(crate) fn range_of(line: &str) -> Option<Range<u64>> {
    let (first, end) = line.split(' ').next()?.split_once('-')?;
    let number = |text| u64::from_str_radix(text, 16).ok();
    Some(number(first)?..number(end)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_list_of_mappings_has_parts_that_touch_the_range() {
        let known =
            "7f0000000000-7f0000400000 rw-p 0 0:0 0\nSize: 4096 kB\nKernelPageSize: 2048 kB\n";
        let last = "fffffffffff00000-ffffffffffffffff rw-p\nKernelPageSize: 2048 kB\n";
        let known = [known, last].map(|text| text.as_bytes().to_vec());
        let tally = crate::tests::hostile::explore("mappings", 1, &known, |text| {
            let text = String::from_utf8_lossy(text);
            let mut found = 0;
            for (start, length) in [(0x7f00_0020_1000, 0x1000), (0, u64::MAX), (u64::MAX - 64, 1)] {
                for part in huge_parts(&text, start, length, 4096) {
                    assert!(part.start < part.end && part.start <= start.saturating_add(length));
                    found += 1;
                }
            }
            found > 0
        });
        assert!(tally.taken > 0 && tally.refused > 0, "{tally:?}");
    }

    #[test]
    fn pages_at_the_end_of_the_address_space_end_with_it() {
        let smaps = "fffffffffffff000-fffffffffffffff0 rw-p\nKernelPageSize: 2048 kB\n";
        let parts = huge_parts(smaps, u64::MAX - 64, 32, 4096);
        let whole = u64::MAX - (2 << 20) + 1..u64::MAX - 32;
        assert_eq!((parts.first(), parts.len()), (Some(&whole), 1));
        let absurd = "0-ffffffffffffffff rw-p\nKernelPageSize: 18446744073709551615 kB\n";
        assert_eq!(huge_parts(absurd, 5, u64::MAX, 4096).len(), 1);
    }
    use rustix::param::page_size;

    const SMAPS: &str = "\
7f0000000000-7f0000400000 rw-p 00000000 00:0f 1 /anon_hugepage (deleted)
Size:               4096 kB
KernelPageSize:     2048 kB
MMUPageSize:        2048 kB
VmFlags: rd wr mr mw me de ht
7f0000400000-7f0000500000 rw-p 00000000 00:00 0
Size:               1024 kB
KernelPageSize:        4 kB
MMUPageSize:           4 kB
VmFlags: rd wr mr mw me
";

    #[test]
    fn huge_pages_are_kept_whole_and_others_left_alone() {
        let parts = |start, length| huge_parts(SMAPS, start, length, 4096);
        let (first, all) = (0x7f00_0000_0000..0x7f00_0020_0000, 0x7f00_0000_0000..0x7f00_0040_0000);
        assert_eq!(parts(0x7f00_0000_1000, 10), [first]);
        assert_eq!(parts(0x7f00_001f_ffff, 2), std::slice::from_ref(&all));
        assert_eq!(parts(0x7f00_0000_0000, 0x50_0000), std::slice::from_ref(&all));
        assert_eq!(parts(0x7f00_0040_0000, 4096), []);
        assert_eq!(parts(0x7f00_0000_0000, 0), []);
        assert_eq!(parts(0, u64::MAX), [all]);
        assert_eq!(huge_parts("", 0, 100, 4096), []);
    }

    #[test]
    #[cfg_attr(miri, ignore = "it reads a file of the kernel's")]
    fn only_pages_that_are_larger_than_usual_are_kept() {
        // In a mapping of its own, which no child of another test needs.
        let memory = memmap2::MmapMut::map_anon(10_000).unwrap();
        let start = memory.as_ptr().expose_provenance() as u64;
        let is_kept = |address: u64| {
            let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
            let of = |line: &str| range_of(line).is_some_and(|range| range.contains(&address));
            let flags = smaps.lines().skip_while(|line| !of(line));
            let flags = flags.filter_map(|line| line.strip_prefix("VmFlags:")).next();
            // "Do not copy on fork", in the kernel's letters.
            flags.unwrap().split_whitespace().any(|flag| flag == "dc")
        };
        keep_from_children(start, 10_000, page_size()).unwrap();
        assert!(!is_kept(start));
        keep_from_children(start, 10_000, 0).unwrap();
        let all = (start..start + 10_000).step_by(page_size());
        assert!(all.chain([start + 9_999]).all(is_kept));
    }
}
