//! Barriers between this processor and a device, each named after the accesses that it orders.
//!
//! Language fences order threads, and a device is not a thread: on aarch64 a release fence becomes
//! a barrier of the inner shareable domain, and a device may be outside that domain. So each
//! function here is the instruction that the architecture's manual gives for memory shared with a
//! device, and a compiler barrier. On an architecture that is not listed they are full fences, and
//! [`KNOWN`] is false so that no device is driven on that guess.

#[cfg(test)]
use super::recorded_order::{RecordedStep, record_step};

/// Whether this architecture's device barriers are known here.
pub(crate) const KNOWN: bool = cfg!(any(target_arch = "x86_64", target_arch = "aarch64"));

#[cfg(all(target_arch = "x86_64", not(miri)))]
macro_rules! instruction {
    (store) => {
        // x86 keeps stores to ordinary memory in order; only the compiler must be kept from reordering them.
        core::sync::atomic::compiler_fence(core::sync::atomic::Ordering::SeqCst)
    };
    (load) => {
        // SAFETY: an instruction without operands that waits for loads and changes nothing.
        unsafe { core::arch::asm!("lfence", options(nostack, preserves_flags)) }
    };
    (done) => {
        // x86 does not move stores before earlier loads; only the compiler must be kept from it.
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

// Miri interprets no instructions. There a device is another thread, and each barrier is the
// weakest fence that its name promises.
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

/// Orders stores to memory before it ahead of stores after it, as the device sees them: a WQE
/// before its doorbell record.
///
/// On aarch64 it orders no loads: a load before the barrier may happen after the doorbell, when the
/// device writes there. Loans order such loads, by the Release that enters each in its table; a program
/// that rings by itself must order them.
#[inline]
pub(crate) fn udma_to_device() {
    #[cfg(test)]
    record_step(RecordedStep::ToDevice);
    instruction!(store);
}

/// Orders the load of a word before it, an `op_own` for example, ahead of loads of the memory that
/// the device wrote before that word.
#[inline]
pub(crate) fn udma_from_device() {
    #[cfg(test)]
    record_step(RecordedStep::FromDevice);
    instruction!(load);
}

/// Orders loads before it ahead of stores after it: a CQE is read before the device sees the
/// consumer index and overwrites the CQE.
#[inline]
pub(crate) fn udma_done_reading() {
    #[cfg(test)]
    record_step(RecordedStep::DoneReading);
    instruction!(done);
}

/// Orders stores to memory ahead of the following store to a write-combining register.
#[inline]
pub(crate) fn mmio_wc_start() {
    #[cfg(test)]
    record_step(RecordedStep::WcStart);
    instruction!(combining);
}

/// Flushes stores to a register out of the write-combining buffer, ahead of all following stores.
#[inline]
pub(crate) fn mmio_flush() {
    #[cfg(test)]
    record_step(RecordedStep::Flush);
    instruction!(combining);
}
