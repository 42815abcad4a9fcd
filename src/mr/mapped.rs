//! The reason of an `EFAULT` from a registration, as far as this process's mappings tell. Pairs with
//! `check_vma_flags` of the kernel's `mm/gup.c`.

use crate::access::Access;
use crate::memory::huge_pages::range_of;

/// A line of `/proc/self/maps`.
struct Mapping<'a> {
    first: u64,
    end: u64,
    /// `rw-p`, with `s` in place of `p` for a shared one.
    rights: &'a str,
    /// Empty for memory of no file.
    path: &'a str,
}

impl<'a> Mapping<'a> {
    /// Out of `7f0000000000-7f0000200000 rw-s 00000000 fd:01 1234  /path`.
    fn parse(line: &'a str) -> Option<Self> {
        let range = range_of(line)?;
        let mut words = line.splitn(6, ' ').skip(1);
        let rights = words.next()?;
        let path = words.nth(3).unwrap_or("").trim();
        Some(Mapping { first: range.start, end: range.end, rights, path })
    }

    /// Whether it shares the pages of a file that is written back to a disk or a server.
    fn is_written_back(&self) -> bool {
        // Shared memory without a file of the program has a name, too.
        const IN_MEMORY: [&str; 6] =
            ["/dev/shm/", "/memfd:", "/dev/zero", "/SYSV", "/anon_hugepage", "/dev/hugepages/"];
        let is_file = self.path.starts_with('/');
        self.rights.ends_with('s')
            && is_file
            && !IN_MEMORY.iter().any(|at| self.path.starts_with(at))
    }
}

/// The reason why memory of this process cannot be registered with these rights.
pub(super) fn why_not(start: u64, length: u64, access: Access) -> Option<String> {
    // Names of mapped files are any bytes.
    let maps = std::fs::read("/proc/self/maps").ok()?;
    explain(&String::from_utf8_lossy(&maps), start, length, access)
}

fn unmapped(at: u64, start: u64, length: u64) -> String {
    format!("nothing is mapped at {at:#x}, of {length} bytes from {start:#x} on")
}

fn explain(maps: &str, start: u64, length: u64, access: Access) -> Option<String> {
    let end = start.checked_add(length)?;
    let writes = access.contains(Access::LOCAL_WRITE);
    let mut next = start;
    let within = |mapping: &Mapping<'_>| mapping.first < end && mapping.end > start;
    for mapping in maps.lines().filter_map(Mapping::parse).filter(within) {
        let at = mapping.first.max(start);
        if at > next {
            return Some(unmapped(next, start, length));
        }
        let of = match mapping.path {
            "" => String::new(),
            path => format!(" ({path})"),
        };
        if !mapping.rights.starts_with('r') {
            return Some(format!("the memory at {at:#x}{of} is mapped without access"));
        }
        if writes && !mapping.rights.starts_with("rw") {
            return Some(format!(
                "the memory at {at:#x}{of} is mapped for reading alone, and access {access} lets the device \
                 write"
            ));
        }
        if writes && mapping.is_written_back() {
            return Some(format!(
                "the memory at {at:#x} is a shared mapping of the file {}, to which Linux 6.5 and later let no \
                 device write, unless the file is on tmpfs or hugetlbfs: map it privately, use a memfd, or \
                 register it without LOCAL_WRITE",
                mapping.path
            ));
        }
        next = mapping.end;
    }
    (next < end).then(|| unmapped(next, start, length))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str = "\
10000-12000 rw-p 00000000 00:00 0
12000-14000 r--p 00000000 fd:01 77                         /usr/lib/some library.so
14000-16000 rw-s 00000000 fd:01 78                         /var/data base (deleted)
16000-18000 rw-s 00000000 00:01 79                         /memfd:ring (deleted)
18000-19000 ---p 00000000 00:00 0
20000-21000 rw-p 00000000 00:00 0                          [heap]
";

    #[test]
    fn the_mapping_that_stands_in_the_way_is_named() {
        let write = Access::LOCAL_WRITE;
        let why = |start, length, access| explain(MAPS, start, length, access);
        assert_eq!(why(0x10000, 0x2000, write), None);
        assert_eq!(why(0x16000, 0x2000, write), None);
        let read_only = why(0x11000, 0x2000, write).unwrap();
        assert!(read_only.contains("0x12000 (/usr/lib/some library.so) is mapped for reading"));
        let shared = why(0x15000, 0x2000, write).unwrap();
        assert!(
            shared.contains("0x15000 is a shared mapping of the file /var/data base (deleted)")
        );
        assert!(shared.contains("Linux 6.5"), "{shared}");
        // The device may read all of these.
        assert_eq!(why(0x10000, 0x8000, Access::REMOTE_READ), None);
        assert!(why(0x17000, 0x2000, write).unwrap().contains("0x18000 is mapped without access"));
        for (start, gap) in [(0x1f000, "0x1f000"), (0x20000, "0x21000"), (0x90000, "0x90000")] {
            let why = why(start, 0x3000, write).unwrap();
            assert!(why.starts_with(&format!("nothing is mapped at {gap}, ")), "{why}");
        }
        assert_eq!(why(u64::MAX, 2, write), None);
    }

    #[test]
    #[cfg_attr(miri, ignore = "it reads a file of the kernel's")]
    fn memory_of_this_process_is_mapped() {
        let memory = [0u8; 64];
        let start = memory.as_ptr() as u64;
        assert_eq!(why_not(start, 64, Access::LOCAL_WRITE), None);
        assert!(why_not(8, 64, Access::LOCAL_WRITE).unwrap().contains("mapped at 0x8"));
    }
}
