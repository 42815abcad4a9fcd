//! Whether this process is a `fork` of the one that made an object.
//!
//! Queue and doorbell mappings are inherited by a child, and its ioctls would reach the parent's
//! objects. One page that the kernel wipes in the child (`MADV_WIPEONFORK`, Linux 4.14) tells the
//! two apart with a single load: process ids collide across pid namespaces, and asking for one is
//! a system call.

use memmap2::{MmapOptions, MmapRaw};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

static PAGE: OnceLock<MmapRaw> = OnceLock::new();
/// Ordinary memory: the child inherits the value, so epochs never repeat along a line of descent.
static NEXT: AtomicU32 = AtomicU32::new(1);

/// The process in which an object was made.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Epoch {
    word: &'static AtomicU32,
    value: u32,
}

impl Epoch {
    /// The current process. Fails where the kernel cannot wipe a page on fork: without that
    /// nothing protects the parent from a child.
    pub(crate) fn current() -> rustix::io::Result<Epoch> {
        let word = word()?;
        let mut value = word.load(Ordering::Relaxed);
        if value == 0 {
            // First use in this process, or first since it was forked off.
            let fresh = NEXT.fetch_add(1, Ordering::Relaxed);
            value = match word.compare_exchange(0, fresh, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => fresh,
                Err(raced) => raced,
            };
        }
        Ok(Epoch { word, value })
    }

    /// Whether the caller runs in a child of the process that this epoch names.
    #[inline]
    pub(crate) fn is_over(&self) -> bool {
        self.word.load(Ordering::Relaxed) != self.value
    }
}

fn word() -> rustix::io::Result<&'static AtomicU32> {
    let page = match PAGE.get() {
        Some(page) => page,
        None => {
            let page = wiped_page()?;
            PAGE.get_or_init(|| page)
        }
    };
    // SAFETY: the page is never unmapped, is page aligned, and is only ever accessed through this
    // atomic (the kernel zeroes it in a child before the child runs).
    Ok(unsafe { AtomicU32::from_ptr(page.as_mut_ptr().cast()) })
}

fn wiped_page() -> rustix::io::Result<MmapRaw> {
    let length = rustix::param::page_size();
    let page = MmapOptions::new().len(length).map_anon().map_err(|error| {
        rustix::io::Errno::from_io_error(&error).unwrap_or(rustix::io::Errno::NOMEM)
    })?;
    let page = MmapRaw::from(page);
    // SAFETY: the range is the mapping made above, which nobody else uses yet.
    unsafe {
        rustix::mm::madvise(page.as_mut_ptr().cast(), length, rustix::mm::Advice::LinuxWipeOnFork)
    }?;
    Ok(page)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_process_has_one_epoch() {
        let first = Epoch::current().unwrap();
        let second = Epoch::current().unwrap();
        assert_eq!(first.value, second.value);
        assert!(!first.is_over());
    }

    #[test]
    fn an_epoch_of_another_process_is_over() {
        let here = Epoch::current().unwrap();
        let elsewhere = Epoch { word: here.word, value: here.value.wrapping_add(1) };
        assert!(elsewhere.is_over());
    }
}
