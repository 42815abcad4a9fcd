//! A file in memory by which a test plays a kernel or a device: the library maps it, and the test
//! reads and writes the file.
//!
//! Miri maps no files. There it is memory that both sides share, so that Miri sees whether accesses
//! of one are ordered with those of the other: a word is then loaded with Acquire and stored with
//! Release, as the kernel does with the indices of its queues.

use super::mapping::Mapping;
use crate::sync::fork::Epoch;
use rustix::io::Errno;

#[cfg(not(miri))]
mod imp {
    use super::*;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    use rustix::io::{pread, pwrite};
    use std::os::fd::{AsFd, OwnedFd};

    #[derive(Debug)]
    pub(crate) struct FakeMapping(OwnedFd);

    impl FakeMapping {
        /// A file of zeros. `name` is in `/proc/self/maps` for as long as it is mapped.
        pub(crate) fn new(name: &str, length: usize) -> FakeMapping {
            let file = memfd_create(name, MemfdFlags::CLOEXEC).expect("a file in memory");
            ftruncate(&file, length as u64).expect("room in a file");
            FakeMapping(file)
        }

        /// The first `length` bytes.
        pub(crate) fn map(&self, length: usize, epoch: Epoch) -> Result<Mapping, Errno> {
            Mapping::of_fd(self.0.as_fd(), 0, length, epoch)
        }

        /// The same, read-only.
        pub(crate) fn map_read_only(&self, length: usize, epoch: Epoch) -> Result<Mapping, Errno> {
            Mapping::read_only(self.0.as_fd(), 0, length, epoch)
        }

        pub(crate) fn read(&self, at: u64, length: usize) -> Vec<u8> {
            let mut bytes = vec![0; length];
            assert_eq!(pread(&self.0, bytes.as_mut_slice(), at), Ok(length));
            bytes
        }

        pub(crate) fn write(&self, at: u64, bytes: &[u8]) {
            assert_eq!(pwrite(&self.0, bytes, at), Ok(bytes.len()));
        }
    }
}

#[cfg(miri)]
mod imp {
    use super::*;
    use memmap2::{MmapOptions, MmapRaw};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    #[derive(Debug)]
    pub(crate) struct FakeMapping(Arc<MmapRaw>);

    impl FakeMapping {
        pub(crate) fn new(_name: &str, length: usize) -> FakeMapping {
            let pages = MmapOptions::new().len(length).map_anon().expect("memory");
            FakeMapping(Arc::new(MmapRaw::from(pages)))
        }

        pub(crate) fn map(&self, length: usize, epoch: Epoch) -> Result<Mapping, Errno> {
            assert!(length.next_multiple_of(4096) <= self.0.len().next_multiple_of(4096));
            if length == 0 {
                return Err(Errno::INVAL);
            }
            let start = std::ptr::NonNull::new(self.0.as_mut_ptr()).ok_or(Errno::INVAL)?;
            // SAFETY: the mapping keeps the owner, and is as long.
            let pages = unsafe { uverbs_host::HostPages::new(start, length, self.0.clone()) };
            Ok(Mapping::of_pages(pages, epoch))
        }

        pub(crate) fn map_read_only(&self, length: usize, epoch: Epoch) -> Result<Mapping, Errno> {
            self.map(length, epoch)
        }

        pub(crate) fn read(&self, at: u64, length: usize) -> Vec<u8> {
            let from = self.place(at, length);
            if let Some(word) = self.word(at, length) {
                return word.load(Ordering::Acquire).to_ne_bytes().to_vec();
            }
            let mut bytes = vec![0; length];
            // SAFETY: `place` checked that the range is inside, and the vector is as long.
            unsafe { from.copy_to_nonoverlapping(bytes.as_mut_ptr(), length) };
            bytes
        }

        pub(crate) fn write(&self, at: u64, bytes: &[u8]) {
            let to = self.place(at, bytes.len());
            match (self.word(at, bytes.len()), bytes.try_into()) {
                (Some(word), Ok(bytes)) => word.store(u32::from_ne_bytes(bytes), Ordering::Release),
                // SAFETY: `place` checked that the range is inside; the bytes are the caller's.
                _ => unsafe { to.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) },
            }
        }

        fn place(&self, at: u64, length: usize) -> *mut u8 {
            let at = at as usize;
            assert!(at.checked_add(length).is_some_and(|end| end <= self.0.len()));
            self.0.as_mut_ptr().wrapping_add(at)
        }

        fn word(&self, at: u64, length: usize) -> Option<&AtomicU32> {
            let place = self.place(at, length);
            // SAFETY: inside and aligned, and there for as long as the file is.
            (length == 4 && place.addr() % 4 == 0)
                .then(|| unsafe { AtomicU32::from_ptr(place.cast()) })
        }
    }
}

pub(crate) use imp::FakeMapping;
