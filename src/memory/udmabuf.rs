//! Dma-bufs of files in memory, so that ordinary memory can be passed as a dma-buf.
//!
//! Pairs with `UDMABUF_CREATE` of `linux/udmabuf.h`.

use rustix::io::Errno;
use rustix::ioctl::{Ioctl, IoctlOutput, Opcode, ioctl, opcode};
use std::ffi::c_void;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// `struct udmabuf_create`.
#[repr(C)]
struct udmabuf_create {
    memfd: i32,
    flags: u32,
    offset: u64,
    size: u64,
}

const CLOEXEC: u32 = 1;

/// The ioctl, which returns a file descriptor.
struct UdmabufCreate(udmabuf_create);

// SAFETY: the opcode is that of an ioctl which reads such a struct, and returns a new descriptor.
unsafe impl Ioctl for UdmabufCreate {
    type Output = OwnedFd;
    const IS_MUTATING: bool = false;

    fn opcode(&self) -> Opcode {
        opcode::write::<udmabuf_create>(b'u', 0x42)
    }

    fn as_ptr(&mut self) -> *mut c_void {
        std::ptr::from_mut(&mut self.0).cast()
    }

    unsafe fn output_from_ptr(fd: IoctlOutput, _: *mut c_void) -> rustix::io::Result<OwnedFd> {
        // SAFETY: the ioctl succeeded and returned a new descriptor, which nobody else owns.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }
}

/// A dma-buf of the first `length` bytes, whole pages, of a file in memory that is sealed against
/// shrinking. `maker` is `/dev/udmabuf`.
pub(crate) fn of_memfd(
    maker: impl AsFd,
    memfd: BorrowedFd<'_>,
    length: usize,
) -> Result<OwnedFd, Errno> {
    let create =
        udmabuf_create { memfd: memfd.as_raw_fd(), flags: CLOEXEC, offset: 0, size: length as u64 };
    // SAFETY: the kernel reads the struct, and changes no memory of this process.
    unsafe { ioctl(maker, UdmabufCreate(create)) }
}

#[cfg(test)]
mod tests {
    /// `linux/udmabuf.h`: `_IOW('u', 0x42, struct udmabuf_create)`, whose fields lie at 0, 4, 8 and 16.
    #[test]
    fn the_kernel_gets_the_request_in_its_own_layout() {
        // The device suite has this file, too, and compiles no unit tests.
        use super::*;
        let (memfd, size) = (0x0102_0304, 0x1112_1314_1516_1718);
        let mut ioctl = UdmabufCreate(udmabuf_create { memfd, flags: CLOEXEC, offset: 4096, size });
        #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
        assert_eq!(ioctl.opcode(), 0x4018_7542);
        let mut expected = Vec::from(memfd.to_ne_bytes());
        expected.extend(1u32.to_ne_bytes());
        expected.extend([4096, size].map(u64::to_ne_bytes).as_flattened());
        assert_eq!(size_of::<udmabuf_create>(), expected.len());
        let seen = ioctl.as_ptr().cast::<[u8; 24]>();
        // SAFETY: the ioctl's own struct, which has 24 bytes without padding.
        assert_eq!(unsafe { seen.read() }.as_slice(), expected);
    }
}
