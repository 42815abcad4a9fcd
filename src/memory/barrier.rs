//! Order between this processor and a device, under the names of what is ordered.
//!
//! Language fences order threads. A device is none: on aarch64 a release fence becomes a barrier
//! of the inner shareable domain, and a device may be outside of that. So each function here is
//! the instruction that the architecture's manual gives for memory shared with a device, and a
//! barrier for the compiler at the same time. On an architecture that is not listed they are full
//! fences, and [`KNOWN`] is false so that no device is driven on that guess.

#[cfg(test)]
use super::recorded_order::{RecordedStep, record_step};

/// Whether this architecture's device barriers are known here.
pub(crate) const KNOWN: bool = cfg!(any(target_arch = "x86_64", target_arch = "aarch64"));

#[cfg(all(target_arch = "x86_64", not(miri)))]
macro_rules! instruction {
    (store) => {
        // Stores to ordinary memory leave an x86 processor in order; only the compiler is held.
        core::sync::atomic::compiler_fence(core::sync::atomic::Ordering::SeqCst)
    };
    (load) => {
        // SAFETY: an instruction without operands that waits for loads and changes nothing.
        unsafe { core::arch::asm!("lfence", options(nostack, preserves_flags)) }
    };
    (done) => {
        // An x86 processor stores after it has loaded; only the compiler is held.
        core::sync::atomic::compiler_fence(core::sync::atomic::Ordering::SeqCst)
    };
    (combining) => {
        // SAFETY: an instruction without operands that waits for stores and changes nothing.
        unsafe { core::arch::asm!("sfence", options(nostack, preserves_flags)) }
    };
}

#[cfg(all(target_arch = "aarch64", not(miri)))]
macro_rules! instruction {
    (store) => {
        // SAFETY: an instruction without operands that orders stores and changes nothing.
        unsafe { core::arch::asm!("dmb oshst", options(nostack, preserves_flags)) }
    };
    (load) => {
        // SAFETY: an instruction without operands that orders loads and changes nothing.
        unsafe { core::arch::asm!("dmb oshld", options(nostack, preserves_flags)) }
    };
    (done) => {
        // Orders loads with the stores that follow as well.
        // SAFETY: an instruction without operands that orders accesses and changes nothing.
        unsafe { core::arch::asm!("dmb oshld", options(nostack, preserves_flags)) }
    };
    (combining) => {
        // SAFETY: an instruction without operands that waits for stores and changes nothing.
        unsafe { core::arch::asm!("dsb st", options(nostack, preserves_flags)) }
    };
}

// Miri interprets no instructions. There a device is another thread, and a barrier orders no more
// than it says.
#[cfg(miri)]
macro_rules! instruction {
    (load) => {
        core::sync::atomic::fence(core::sync::atomic::Ordering::Acquire)
    };
    (done) => {
        core::sync::atomic::fence(core::sync::atomic::Ordering::AcqRel)
    };
    ($store:ident) => {
        core::sync::atomic::fence(core::sync::atomic::Ordering::Release)
    };
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64", miri)))]
macro_rules! instruction {
    ($any:ident) => {
        core::sync::atomic::fence(core::sync::atomic::Ordering::SeqCst)
    };
}

/// What was stored to memory before is there for the device when it sees what is stored after.
///
/// On aarch64 it orders no loads: what the program read before may be read after the device was told to
/// write there. Loans order them, by the Release with which each is entered in its table; a program that
/// rings by itself has to.
#[inline(always)]
pub(crate) fn udma_to_device() {
    #[cfg(test)]
    record_step(RecordedStep::ToDevice);
    instruction!(store);
}

/// What the device stored to memory before a word that was loaded is loaded after that word.
#[inline(always)]
pub(crate) fn udma_from_device() {
    #[cfg(test)]
    record_step(RecordedStep::FromDevice);
    instruction!(load);
}

/// What was loaded before is loaded before the device sees what is stored after, and writes over
/// it.
#[inline(always)]
pub(crate) fn udma_done_reading() {
    #[cfg(test)]
    record_step(RecordedStep::DoneReading);
    instruction!(done);
}

/// Stores to memory are there before the store to a write-combining register that follows.
#[inline(always)]
pub(crate) fn mmio_wc_start() {
    #[cfg(test)]
    record_step(RecordedStep::WcStart);
    instruction!(combining);
}

/// Stores to a register leave the write-combining buffer now, before any that follow.
#[inline(always)]
pub(crate) fn mmio_flush() {
    #[cfg(test)]
    record_step(RecordedStep::Flush);
    instruction!(combining);
}
