//! A thread that writes to memory of a peer by itself: it knows addresses and numbers of queues, and nothing of the
//! library that made them. A GPU or an engine would do the same.

use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

/// A send queue of WQEBBs of 64 bytes.
pub(crate) struct Sends {
    /// The queue pair's number.
    pub(crate) qpn: u32,
    pub(crate) buf: *mut u8,
    /// A power of two.
    pub(crate) wqebbs: u16,
    /// The doorbell record, whose second word counts WQEBBs.
    pub(crate) dbrec: *mut u32,
    /// The register.
    pub(crate) reg: *mut u64,
    /// WQEBBs posted.
    pub(crate) posted: u16,
}

/// A queue of completions of 64 bytes.
pub(crate) struct Completions {
    pub(crate) buf: *mut u8,
    /// A power of two.
    pub(crate) count: u32,
    /// The doorbell record, whose first word counts CQEs.
    pub(crate) dbrec: *mut u32,
    /// CQEs consumed.
    pub(crate) consumed: u32,
}

/// Bytes as a WQE names them: their number, the memory's key, and the address.
#[derive(Clone, Copy)]
pub(crate) struct Bytes {
    pub(crate) addr: u64,
    pub(crate) key: u32,
    pub(crate) len: u32,
}

// SAFETY: the queues have no other driver, and their memory stays while the engine runs.
unsafe impl Send for Sends {}
// SAFETY: as above.
unsafe impl Send for Completions {}

const WQEBB: usize = 64;

impl Sends {
    /// Posts an RDMA write, and rings.
    pub(crate) fn write(&mut self, from: Bytes, to: Bytes) {
        const RDMA_WRITE: u32 = 8;
        /// A completion is wanted.
        const CQ_UPDATE: u32 = 8;
        /// Segments of 16 bytes: control, remote address, data.
        const SEGMENTS: u32 = 3;
        let mut wqe = [0u8; WQEBB];
        let words = [
            (0, u32::from(self.posted) << 8 | RDMA_WRITE),
            (4, self.qpn << 8 | SEGMENTS),
            (8, CQ_UPDATE),
            (24, to.key),
            (32, from.len),
            (36, from.key),
        ];
        for (at, word) in words {
            wqe[at..at + 4].copy_from_slice(&word.to_be_bytes());
        }
        wqe[16..24].copy_from_slice(&to.addr.to_be_bytes());
        wqe[40..48].copy_from_slice(&from.addr.to_be_bytes());
        let at = usize::from(self.posted & (self.wqebbs - 1));
        // SAFETY: the WQEBB is in the queue, and free: each write waits for its completion.
        unsafe { self.buf.wrapping_add(at * WQEBB).cast::<[u8; WQEBB]>().write(wqe) };
        self.posted = self.posted.wrapping_add(1);
        // The device reads the WQE after the record, and the record after the register.
        to_device();
        // SAFETY: a doorbell record has two words.
        unsafe { self.dbrec.wrapping_add(1).write_volatile(u32::from(self.posted).to_be()) };
        to_device();
        let head = u64::from_ne_bytes(*wqe.first_chunk().expect("64 bytes"));
        // SAFETY: the register takes the beginning of the newest WQE.
        unsafe { self.reg.write_volatile(head) };
        to_device();
    }
}

impl Completions {
    /// Waits for the next completion; an error names the syndrome of a failed request, or that none came.
    pub(crate) fn wait(&mut self) -> Result<(), String> {
        /// Nibbles of a CQE's last byte: one that is unwritten, and a request that failed.
        const INVALID: u8 = 0xf;
        const REQUEST_ERROR: u8 = 0xd;
        let at = (self.consumed & (self.count - 1)) as usize * WQEBB;
        let pass = (self.consumed / self.count) as u8 & 1;
        let deadline = Instant::now() + Duration::from_secs(10);
        let opcode = loop {
            // SAFETY: the last byte of a CQE, which the device writes last.
            let last = unsafe { self.buf.wrapping_add(at + 63).read_volatile() };
            if last & 1 == pass && last >> 4 != INVALID {
                break last >> 4;
            }
            if Instant::now() > deadline {
                return Err("no completion".into());
            }
            std::hint::spin_loop();
        };
        fence(Ordering::Acquire);
        // SAFETY: byte 55 of a CQE; the device has finished with it.
        let syndrome = unsafe { self.buf.wrapping_add(at + 55).read_volatile() };
        self.consumed = (self.consumed + 1) & 0xff_ffff;
        // SAFETY: a doorbell record has two words.
        unsafe { self.dbrec.write_volatile(self.consumed.to_be()) };
        match opcode {
            REQUEST_ERROR => Err(format!("a request failed with syndrome {syndrome:#x}")),
            _ => Ok(()),
        }
    }
}

/// Orders stores before this one before those behind it, as the device sees them.
fn to_device() {
    #[cfg(target_arch = "x86_64")]
    fence(Ordering::SeqCst);
    #[cfg(target_arch = "aarch64")]
    // SAFETY: a barrier.
    unsafe {
        std::arch::asm!("dsb oshst", options(nostack, preserves_flags))
    };
}
