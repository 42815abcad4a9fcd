//! A writer for `newc` cpio archives, the format of an initramfs.
//!
//! The kernel unpacks several archives laid one after another, so each part of a root file system
//! is an archive of its own; `initramfs.rs` joins them.

use std::io::{self, Write};

/// What kind of file an entry is, in the bits of `st_mode`.
const DIRECTORY: u32 = 0o040_000;
const REGULAR: u32 = 0o100_000;
const LINK: u32 = 0o120_000;

/// Writes entries in order; a directory must come before what lies in it.
pub(crate) struct Writer<W> {
    to: W,
    written: usize,
    inode: u32,
}

impl<W: Write> Writer<W> {
    /// An archive without entries.
    pub(crate) fn new(to: W) -> Self {
        Self { to, written: 0, inode: 0 }
    }

    /// A directory, owned by this user and group.
    pub(crate) fn directory(&mut self, path: &str, mode: u32, owner: u32) -> io::Result<()> {
        self.entry(path, DIRECTORY | mode, owner, &[])
    }

    /// A regular file of root's.
    pub(crate) fn file(&mut self, path: &str, mode: u32, contents: &[u8]) -> io::Result<()> {
        self.entry(path, REGULAR | mode, 0, contents)
    }

    /// A symbolic link.
    pub(crate) fn link(&mut self, path: &str, to: &str) -> io::Result<()> {
        self.entry(path, LINK | 0o777, 0, to.as_bytes())
    }

    /// Ends the archive and returns what it was written to.
    pub(crate) fn finish(mut self) -> io::Result<W> {
        self.entry("TRAILER!!!", 0, 0, &[])?;
        self.to.flush()?;
        Ok(self.to)
    }

    fn entry(&mut self, path: &str, mode: u32, owner: u32, contents: &[u8]) -> io::Result<()> {
        let too_big =
            |_| io::Error::new(io::ErrorKind::InvalidInput, format!("{path}: over 4 GiB"));
        let size = u32::try_from(contents.len()).map_err(too_big)?;
        let name_size = u32::try_from(path.len() + 1).map_err(too_big)?;
        self.inode += 1;
        let links = if mode & DIRECTORY == DIRECTORY { 2 } else { 1 };
        let mut header = String::from("070701");
        // Inode, mode, user, group, links, time, size, device twice two, name size, checksum.
        for field in [self.inode, mode, owner, owner, links, 0, size, 0, 0, 0, 0, name_size, 0] {
            header.push_str(&format!("{field:08x}"));
        }
        self.bytes(header.as_bytes())?;
        self.bytes(path.as_bytes())?;
        self.bytes(&[0])?;
        self.pad()?;
        self.bytes(contents)?;
        self.pad()
    }

    fn bytes(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.written += bytes.len();
        self.to.write_all(bytes)
    }

    fn pad(&mut self) -> io::Result<()> {
        let missing = self.written.next_multiple_of(4) - self.written;
        self.bytes(&[0; 4][..missing])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn field(archive: &[u8], entry: usize, index: usize) -> u32 {
        let start = entry + 6 + index * 8;
        let text = std::str::from_utf8(&archive[start..start + 8]).unwrap();
        u32::from_str_radix(text, 16).unwrap()
    }

    #[test]
    fn entries_are_aligned_and_sized() {
        let mut writer = Writer::new(Vec::new());
        writer.directory("etc", 0o755, 0).unwrap();
        writer.file("etc/hosts", 0o644, b"hello").unwrap();
        writer.link("sh", "busybox").unwrap();
        let archive = writer.finish().unwrap();
        assert_eq!(archive.len() % 4, 0);
        assert_eq!(&archive[..6], b"070701");
        assert_eq!(field(&archive, 0, 1), 0o040_755);
        // 110 bytes of header and "etc" with its zero are 114; the next entry is at 116.
        assert_eq!(field(&archive, 116, 1), 0o100_644);
        assert_eq!(field(&archive, 116, 6), 5);
        assert_eq!(&archive[116 + 120..116 + 125], b"hello");
        assert_eq!(field(&archive, 244, 1), 0o120_777);
        assert!(archive.windows(10).any(|window| window == b"TRAILER!!!"));
    }
}
