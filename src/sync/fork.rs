//! The check whether this process is a `fork` of the one that made an object.
//!
//! Queue and doorbell mappings are inherited by a child, and its ioctls would reach the parent's
//! objects. One page that the kernel wipes in the child (`MADV_WIPEONFORK`, Linux 4.14) tells the
//! two apart with a single load: process ids collide across pid namespaces, and asking for one is
//! a system call.

use crate::error::{Error, Result};
use memmap2::{MmapOptions, MmapRaw};
use std::mem::ManuallyDrop;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

/// The wiped page, null before first use. No lock guards it: one that another thread held at the
/// moment of a fork would never be released in the child.
static PAGE: AtomicPtr<AtomicU32> = AtomicPtr::new(ptr::null_mut());
/// The next number. In memory that a child inherits, so that neither it nor its own children get one of an ancestor's.
static NEXT: AtomicU32 = AtomicU32::new(1);

/// The process in which an object was made, as the number that the wiped page has there. The page of a child reads 0
/// until the child asks for its own number. An object keeps the epoch in which it was made, and its calls compare.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Epoch {
    /// The number in the wiped page.
    current: &'static AtomicU32,
    made_in: u32,
}

impl Epoch {
    /// The current process. Fails where the kernel cannot wipe a page on fork: without that
    /// nothing protects the parent from a child.
    pub(crate) fn current() -> rustix::io::Result<Epoch> {
        let word = word()?;
        let mut value = word.load(Ordering::Relaxed);
        if value == 0 {
            // First use in this process, or in this child since the fork.
            let fresh = NEXT.fetch_add(1, Ordering::Relaxed);
            value = match word.compare_exchange(0, fresh, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => fresh,
                Err(raced) => raced,
            };
        }
        Ok(Epoch { current: word, made_in: value })
    }

    /// The current process; where the kernel cannot wipe a page, an epoch that is [over](Self::is_over).
    pub(crate) fn current_or_none() -> Epoch {
        static NONE: AtomicU32 = AtomicU32::new(0);
        Epoch::current().unwrap_or(Epoch { current: &NONE, made_in: u32::MAX })
    }

    /// As [`current`](Self::current), with the error of a verb.
    pub(crate) fn of_verb(verb: &'static str) -> Result<Epoch> {
        Epoch::current().map_err(|errno| {
            let detail = "the kernel cannot mark a page MADV_WIPEONFORK (Linux 4.14)";
            Error::new(verb, errno).detail(detail)
        })
    }

    /// Whether the caller runs in a child of the process that this epoch names.
    #[inline]
    pub(crate) fn is_over(&self) -> bool {
        self.current.load(Ordering::Relaxed) != self.made_in
    }
}

/// A value that only the process that made it drops; a forked child forgets it.
#[derive(Debug)]
pub(crate) struct OwnedHere<T> {
    value: ManuallyDrop<T>,
    epoch: Epoch,
}

impl<T> OwnedHere<T> {
    #[cfg(feature = "tokio")]
    pub(crate) fn new(value: T) -> rustix::io::Result<OwnedHere<T>> {
        Ok(OwnedHere::of(value, Epoch::current()?))
    }

    /// A value of the process that `epoch` names.
    pub(crate) fn of(value: T, epoch: Epoch) -> OwnedHere<T> {
        OwnedHere { epoch, value: ManuallyDrop::new(value) }
    }

    /// Whether the caller runs in a child of the process that made the value.
    #[inline]
    pub(crate) fn is_inherited(&self) -> bool {
        self.epoch.is_over()
    }
}

impl<T> std::ops::Deref for OwnedHere<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> std::ops::DerefMut for OwnedHere<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}

impl<T> Drop for OwnedHere<T> {
    fn drop(&mut self) {
        if !self.epoch.is_over() {
            // SAFETY: nobody looks at the value after this.
            unsafe { ManuallyDrop::drop(&mut self.value) };
        }
    }
}

fn word() -> rustix::io::Result<&'static AtomicU32> {
    let mut word = PAGE.load(Ordering::Acquire);
    if word.is_null() {
        let page = wiped_page()?;
        let ours = page.as_mut_ptr().cast::<AtomicU32>();
        // If another thread was faster, this page is unmapped with its owner.
        word = match PAGE.compare_exchange(word, ours, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => {
                std::mem::forget(page);
                ours
            }
            Err(theirs) => theirs,
        };
    }
    // SAFETY: the page is never unmapped, is page aligned, and is only ever accessed through this
    // atomic (the kernel zeroes it in a child before the child runs).
    Ok(unsafe { &*word })
}

fn wiped_page() -> rustix::io::Result<MmapRaw> {
    let length = rustix::param::page_size();
    let page = MmapOptions::new().len(length).map_anon().map_err(|error| {
        rustix::io::Errno::from_io_error(&error).unwrap_or(rustix::io::Errno::NOMEM)
    })?;
    let page = MmapRaw::from(page);
    wipe_in_children(&page)?;
    Ok(page)
}

/// Asks the kernel to wipe a mapping in every child that is forked from now on.
pub(crate) fn wipe_in_children(pages: &MmapRaw) -> rustix::io::Result<()> {
    if cfg!(miri) {
        // Miri has no such advice, and no fork.
        return Ok(());
    }
    // SAFETY: the whole of a mapping whose owner the caller is; its content stays as it is here.
    unsafe {
        rustix::mm::madvise(
            pages.as_mut_ptr().cast(),
            pages.len(),
            rustix::mm::Advice::LinuxWipeOnFork,
        )
    }
}

/// Runs `check` in a forked child, and panics with its message if it panics there.
#[cfg(test)]
pub(crate) fn in_child(check: impl FnOnce()) {
    use nix::sys::wait::{WaitStatus, waitpid};
    use nix::unistd::ForkResult;
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;
    let (mut reader, mut writer) = UnixStream::pair().expect("a pair of sockets");
    // SAFETY: the child runs `check`, which takes no lock that another thread of the tests takes,
    // and leaves without returning.
    let child = match unsafe { nix::unistd::fork() }.expect("a child") {
        ForkResult::Parent { child } => child,
        ForkResult::Child => {
            // Kills the child if it waits for a lock that none of its threads holds.
            nix::unistd::alarm::set(10);
            let check = std::panic::AssertUnwindSafe(check);
            let code = match std::panic::catch_unwind(check) {
                Ok(()) => 0,
                Err(payload) => {
                    let text = payload.downcast_ref::<String>().map(String::as_str);
                    let text = text.or(payload.downcast_ref::<&str>().copied());
                    let _ = writer.write_all(text.unwrap_or("a panic").as_bytes());
                    1
                }
            };
            // SAFETY: ends the process without running the parent's destructors and exit handlers.
            unsafe { nix::libc::_exit(code) }
        }
    };
    drop(writer);
    let mut message = String::new();
    reader.read_to_string(&mut message).expect("the child's last words");
    let status = waitpid(child, None).expect("the child's end");
    assert_eq!(status, WaitStatus::Exited(child, 0), "in the child: {message}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_process_has_one_epoch() {
        let first = Epoch::current().unwrap();
        let second = Epoch::current().unwrap();
        assert_eq!(first.made_in, second.made_in);
        assert!(!first.is_over());
    }

    #[test]
    fn an_epoch_of_another_process_is_over() {
        let here = Epoch::current().unwrap();
        let elsewhere = Epoch { made_in: here.made_in.wrapping_add(1), ..here };
        assert!(elsewhere.is_over());
    }

    #[test]
    #[cfg_attr(miri, ignore = "it forks")]
    fn a_value_is_dropped_by_the_process_that_made_it_and_no_other() {
        let value = std::rc::Rc::new(());
        let mut owned = Some(OwnedHere::of(value.clone(), Epoch::current().unwrap()));
        in_child(|| {
            drop(owned.take());
            assert_eq!(std::rc::Rc::strong_count(&value), 2);
        });
        assert_eq!(std::rc::Rc::strong_count(owned.as_ref().unwrap()), 2);
        drop(owned);
        assert_eq!(std::rc::Rc::strong_count(&value), 1);
    }

    #[test]
    #[cfg_attr(miri, ignore = "it forks")]
    fn no_epoch_repeats_along_a_line_of_descent() {
        let grandparent = Epoch::current().unwrap();
        in_child(|| {
            assert!(grandparent.is_over());
            in_child(|| assert!(grandparent.is_over(), "before this process has an epoch"));
            let parent = Epoch::current().unwrap();
            assert!(grandparent.is_over() && !parent.is_over());
            in_child(|| {
                assert!(grandparent.is_over() && parent.is_over());
                let own = Epoch::current().unwrap();
                assert!(grandparent.is_over() && parent.is_over() && !own.is_over());
            });
            assert!(!parent.is_over());
        });
        assert!(!grandparent.is_over());
    }
}
