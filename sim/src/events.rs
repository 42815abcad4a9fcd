//! Event files: completion channels and the files of asynchronous events.
//!
//! Pairs with `ib_uverbs_event_file_ops` in `core/uverbs_main.c`. A file is a pair of sockets: the kernel has
//! one end, the program the other. A record that the socket has no room for waits here. So does one that is reported by
//! a thread which holds events until the kernel's lock is free: the program that it wakes needs that lock next.

use crate::memory::unread_memory;
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, Shutdown, SocketFlags, SocketType, shutdown, socketpair,
};
use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use uverbs_uapi::async_event::ib_uverbs_async_event_desc;

/// An event file, shared by the objects that report there.
#[derive(Clone, Debug)]
pub(crate) struct EventFile(Arc<Mutex<Ends>>);

/// The identity of the program's end, the same for all its descriptors: the file system, and the inode there.
pub(crate) type Inode = (u64, u64);

pub(crate) fn inode(fd: &impl AsFd) -> Result<Inode, Errno> {
    // Miri does not report the inode of a socket: there the number of the descriptor stands for it.
    #[cfg(miri)]
    return Ok((0, std::os::fd::AsRawFd::as_raw_fd(&fd.as_fd()) as u64));
    #[cfg(not(miri))]
    rustix::fs::fstat(fd).map(|stat| (stat.st_dev, stat.st_ino))
}

#[derive(Debug)]
struct Ends {
    ours: OwnedFd,
    inode: Inode,
    /// A duplicate of the program's end, while an object reports there: the kernel uses it to take back the records of
    /// an object that is destroyed.
    theirs: Option<OwnedFd>,
    reporters: usize,
    /// Records that the socket had no room for.
    waiting: VecDeque<Vec<u8>>,
    /// Bytes of a record; 0 if they differ.
    width: usize,
    /// Bytes of each record that the socket took, if they differ; the program has read some of the first ones.
    taken: VecDeque<usize>,
    /// The reporters of records, the oldest first, if each has at most one; the program has read some of the first ones.
    reported: VecDeque<u64>,
    next_reporter: u64,
    /// The memory of a record in the socket, which tells how many are there; 0 if that is not known.
    memory: usize,
    delivery: Arc<Delivery>,
}

/// The records of all event files of a kernel that wait.
#[derive(Debug, Default)]
pub(crate) struct Delivery {
    /// Whether a record waits for room.
    crowded: AtomicBool,
    /// Whether records are held. Changed under the kernel's lock.
    holds: AtomicBool,
    /// The files with held records.
    held: Mutex<Vec<EventFile>>,
}

impl Delivery {
    /// Whether a record of any file waits for room.
    pub(crate) fn is_crowded(&self) -> bool {
        self.crowded.load(Ordering::Relaxed)
    }

    /// All files are about to be flushed.
    pub(crate) fn clear_crowded(&self) {
        self.crowded.store(false, Ordering::Relaxed);
    }

    /// Holds records from now on, or no more: those that are held need a [`release`](Self::release).
    pub(crate) fn hold(&self, holds: bool) {
        self.holds.store(holds, Ordering::Relaxed);
    }

    /// Whether records are held.
    pub(crate) fn has_held(&self) -> bool {
        !self.held().is_empty()
    }

    /// Gives records that were held to the program. The caller does not have the kernel's lock.
    pub(crate) fn release(&self) {
        let held = std::mem::take(&mut *self.held());
        held.iter().for_each(EventFile::flush);
    }

    fn held(&self) -> MutexGuard<'_, Vec<EventFile>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl EventFile {
    /// A file with records of `width` bytes, and the program's end.
    pub(crate) fn new(
        width: usize,
        delivery: Arc<Delivery>,
    ) -> Result<(EventFile, OwnedFd), Errno> {
        let (ours, theirs) = UnixStream::pair().map_err(|_| Errno::MFILE)?;
        EventFile::of(width, delivery, ours.into(), theirs.into())
    }

    /// A file with records of any length: each read takes one, and loses what it has no room for.
    pub(crate) fn of_any_width(delivery: Arc<Delivery>) -> Result<(EventFile, OwnedFd), Errno> {
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        EventFile::of(0, delivery, ours, theirs)
    }

    fn of(
        width: usize,
        delivery: Arc<Delivery>,
        ours: OwnedFd,
        theirs: OwnedFd,
    ) -> Result<(EventFile, OwnedFd), Errno> {
        let inode = inode(&theirs)?;
        let ends = Ends {
            ours,
            inode,
            theirs: None,
            reporters: 0,
            waiting: VecDeque::new(),
            width,
            taken: VecDeque::new(),
            reported: VecDeque::new(),
            next_reporter: 0,
            memory: 0,
            delivery,
        };
        Ok((EventFile(Arc::new(Mutex::new(ends))), theirs))
    }

    fn ends(&self) -> MutexGuard<'_, Ends> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether this is the inode of the program's end.
    pub(crate) fn is_behind(&self, inode: Inode) -> bool {
        self.ends().inode == inode
    }

    /// Bytes of a record; 0 if they differ.
    pub(crate) fn width(&self) -> usize {
        self.ends().width
    }

    /// An object reports here from now on; `theirs` is a duplicate of the program's end.
    pub(crate) fn attach(&self, theirs: Option<OwnedFd>) {
        let mut ends = self.ends();
        ends.reporters += 1;
        if ends.theirs.is_none() {
            ends.theirs = theirs;
        }
    }

    /// An object reports here no more; records for which `of` is true are taken back.
    pub(crate) fn detach(&self, of: impl Fn(&[u8]) -> bool) {
        let mut ends = self.ends();
        ends.waiting.retain(|record| !of(record));
        let mut kept = Vec::new();
        if let Some(theirs) = &ends.theirs {
            let mut record = vec![0; ends.width];
            while rustix::net::recv(theirs, &mut record[..], RecvFlags::DONTWAIT)
                .is_ok_and(|(read, _)| read == ends.width)
            {
                if !of(&record) {
                    kept.push(record.clone());
                }
            }
        }
        for record in kept.into_iter().rev() {
            ends.waiting.push_front(record);
        }
        ends.flush();
        ends.reporters = ends.reporters.saturating_sub(1);
        if ends.reporters == 0 {
            ends.theirs = None;
        }
    }

    /// Queues a record.
    pub(crate) fn send(&self, record: &[u8]) {
        let mut ends = self.ends();
        if ends.delivery.holds.load(Ordering::Relaxed) {
            if ends.waiting.is_empty() {
                ends.delivery.held().push(self.clone());
            }
            ends.waiting.push_back(record.to_vec());
            return;
        }
        if ends.waiting.is_empty() && ends.put(record) != Err(Errno::AGAIN) {
            return;
        }
        ends.waiting.push_back(record.to_vec());
        ends.flush();
    }

    /// A new file, whose program has this end, learns to tell how many of its records are unread.
    pub(crate) fn measure(&self, theirs: &OwnedFd) -> Result<(), Errno> {
        let mut ends = self.ends();
        let mut record = vec![0; ends.width];
        rustix::net::send(&ends.ours, &record, SendFlags::DONTWAIT)?;
        ends.memory = unread_memory(&ends.ours);
        rustix::net::recv(theirs, &mut record[..], RecvFlags::DONTWAIT)?;
        Ok(())
    }

    /// A number for a reporter of [`send_once`](Self::send_once).
    pub(crate) fn new_reporter(&self) -> u64 {
        let mut ends = self.ends();
        ends.next_reporter += 1;
        ends.next_reporter
    }

    /// Queues a record, unless the program has not read the last one of this reporter.
    pub(crate) fn send_once(&self, record: &[u8], reporter: u64) {
        let mut ends = self.ends();
        let inside = unread_memory(&ends.ours).checked_div(ends.memory).unwrap_or(0);
        while ends.reported.len() > inside + ends.waiting.len() {
            ends.reported.pop_front();
        }
        if ends.reported.contains(&reporter) {
            return;
        }
        ends.reported.push_back(reporter);
        drop(ends);
        self.send(record);
    }

    /// The bytes of all records that the program has not read from its end, beside the `header` of each: of a file with
    /// records of any length.
    pub(crate) fn unread(&self, theirs: &OwnedFd, header: usize) -> Result<usize, Errno> {
        let mut ends = self.ends();
        let inside = usize::try_from(rustix::io::ioctl_fionread(theirs)?).unwrap_or(usize::MAX);
        while ends.taken.iter().sum::<usize>() > inside {
            ends.taken.pop_front();
        }
        let all = ends.taken.iter().copied().chain(ends.waiting.iter().map(Vec::len));
        Ok(all.map(|length| length.saturating_sub(header)).sum())
    }

    /// Moves records that wait to the socket.
    pub(crate) fn flush(&self) {
        self.ends().flush();
    }

    /// Whether it is of asynchronous events.
    pub(crate) fn is_async(&self) -> bool {
        self.ends().width == size_of::<ib_uverbs_async_event_desc>()
    }

    /// Ends a completion channel: the program can read the queued records, and then finds the end of the file. Linux
    /// reports `POLLERR` and returns `EIO` there.
    pub(crate) fn end(&self) {
        let mut ends = self.ends();
        ends.flush();
        ends.waiting.clear();
        let _ = shutdown(&ends.ours, Shutdown::Both);
    }

    /// Whether nothing reports here and the program has closed its end.
    pub(crate) fn is_closed(&self) -> bool {
        let ends = self.ends();
        ends.reporters == 0 && is_hung_up(&ends.ours)
    }
}

impl Ends {
    /// Gives a record to the socket.
    fn put(&mut self, record: &[u8]) -> Result<(), Errno> {
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        rustix::net::send(&self.ours, record, flags)?;
        if self.width == 0 {
            self.taken.push_back(record.len());
        }
        Ok(())
    }

    fn flush(&mut self) {
        while let Some(record) = self.waiting.pop_front() {
            match self.put(&record) {
                Ok(()) => {}
                Err(Errno::AGAIN) => {
                    self.waiting.push_front(record);
                    return self.delivery.crowded.store(true, Ordering::Relaxed);
                }
                Err(_) => self.waiting.clear(),
            }
        }
    }
}

/// Whether all descriptors of the other end, which sends nothing, are closed.
pub(crate) fn is_hung_up(end: &impl AsFd) -> bool {
    let mut byte = [0; 1];
    let flags = RecvFlags::DONTWAIT | RecvFlags::PEEK;
    rustix::net::recv(end, &mut byte[..], flags).is_ok_and(|(read, _)| read == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn received(theirs: &OwnedFd) -> Option<u64> {
        let mut record = [0; 8];
        let read = rustix::net::recv(theirs, &mut record[..], RecvFlags::DONTWAIT);
        read.is_ok().then(|| u64::from_ne_bytes(record))
    }

    #[test]
    #[cfg_attr(miri, ignore = "its sockets take any number of records")]
    fn records_beyond_the_room_of_the_socket_wait_and_none_is_lost() {
        const RECORDS: u64 = 5000;
        let delivery = Arc::new(Delivery::default());
        let (file, theirs) = EventFile::new(8, delivery.clone()).unwrap();
        (0..RECORDS).for_each(|record| file.send(&record.to_ne_bytes()));
        assert!(delivery.is_crowded(), "the socket took them all");
        for record in 0..RECORDS {
            let found = received(&theirs).or_else(|| {
                file.flush();
                received(&theirs)
            });
            assert_eq!(found, Some(record));
        }
        assert_eq!(received(&theirs), None);
    }

    #[test]
    #[cfg_attr(miri, ignore = "its sockets do not tell how much is unread")]
    fn unread_records_are_counted_in_the_socket_and_where_they_wait() {
        const RECORDS: usize = 300;
        let (file, theirs) = EventFile::of_any_width(Arc::default()).unwrap();
        let mut left: usize = (1..=RECORDS).sum();
        for length in 1..=RECORDS {
            file.send(&vec![0; 8 + length]);
        }
        assert!(!file.ends().waiting.is_empty(), "the socket took them all");
        assert_eq!(file.unread(&theirs, 8), Ok(left));
        for length in 1..=RECORDS {
            let (read, _) =
                rustix::net::recv(&theirs, &mut [0; 8 + RECORDS][..], RecvFlags::DONTWAIT).unwrap();
            assert_eq!(read, 8 + length);
            left -= length;
            if length % 7 == 0 {
                file.flush();
            }
            assert_eq!(file.unread(&theirs, 8), Ok(left));
        }
    }

    #[test]
    fn held_records_wait_in_order_until_they_are_released() {
        let delivery = Arc::new(Delivery::default());
        let (file, theirs) = EventFile::new(8, delivery.clone()).unwrap();
        let send = |record: u64| file.send(&record.to_ne_bytes());
        delivery.hold(true);
        [1, 2, 3].into_iter().for_each(send);
        assert_eq!(received(&theirs), None);
        // An object that is destroyed takes its records with it.
        file.attach(theirs.try_clone().ok());
        file.detach(|record| record == 2u64.to_ne_bytes());
        delivery.hold(false);
        // Another thread reports before the first one has released its records.
        send(4);
        delivery.release();
        assert_eq!([(); 3].map(|()| received(&theirs)), [Some(1), Some(3), Some(4)]);
        assert_eq!(received(&theirs), None);
        assert!(!delivery.is_crowded() && delivery.held().is_empty());
    }

    #[test]
    fn queued_records_of_a_destroyed_object_are_taken_back() {
        let (file, theirs) = EventFile::new(8, Arc::default()).unwrap();
        file.attach(theirs.try_clone().ok());
        file.attach(None);
        [1u64, 2, 1, 3].iter().for_each(|record| file.send(&record.to_ne_bytes()));
        file.detach(|record| record == 1u64.to_ne_bytes());
        assert_eq!([received(&theirs), received(&theirs)], [Some(2), Some(3)]);
        assert_eq!(received(&theirs), None);
        assert!(!file.is_closed());
        file.detach(|_| false);
        drop(theirs);
        assert!(file.is_closed());
    }
}
