//! Numbers that the kernel uses as addresses.
//!
//! Kernel structs carry addresses as plain `u64`. A wrong number in such a field makes the kernel read or
//! write anywhere in the process. So the library gets these numbers only from this module, whose types borrow
//! the memory for as long as the kernel may use it.

use std::marker::PhantomData;
use zerocopy::{FromBytes, IntoBytes};

/// The address of memory that the kernel writes during a call.
#[derive(Debug)]
pub(crate) struct OutPointer<'a, T> {
    target: *mut T,
    memory: PhantomData<&'a mut T>,
}

impl<'a, T: FromBytes + IntoBytes> OutPointer<'a, T> {
    pub(crate) fn new(target: &'a mut T) -> Self {
        OutPointer { target, memory: PhantomData }
    }

    /// The number for the kernel struct's field.
    pub(crate) fn address(&self) -> u64 {
        self.target.expose_provenance() as u64
    }

    /// The value, after the call has written it.
    pub(crate) fn read(self) -> T {
        // SAFETY: borrowed exclusively since `new`, and any bytes that the kernel wrote are a `T`.
        unsafe { self.target.read_volatile() }
    }
}

/// The address of bytes that the kernel reads during a call. The caller borrows them until the call returns.
#[inline]
pub(crate) fn input(bytes: &[u8]) -> u64 {
    bytes.as_ptr().expose_provenance() as u64
}

/// The address of bytes that the kernel writes during a call. The caller borrows them until the call returns.
#[inline]
pub(crate) fn output(bytes: &mut [u8]) -> u64 {
    bytes.as_mut_ptr().expose_provenance() as u64
}

/// Reads at an address of a command as the kernel would; for tests that play the kernel.
///
/// Only while the command borrows the memory, and only at an address that came from [`input`], with its length.
#[cfg(test)]
pub(crate) fn play_reader<'c>(address: u64, length: usize) -> &'c [u8] {
    let bytes = std::ptr::with_exposed_provenance::<u8>(address as usize);
    // SAFETY: the command that carries the address borrows so many bytes.
    unsafe { std::slice::from_raw_parts(bytes, length) }
}

/// Room at an address of a command that the kernel writes; for tests that play the kernel.
///
/// Only while the command borrows the memory, and only at an address that came from [`output`], with its length.
#[cfg(test)]
pub(crate) fn play_writer<'c>(address: u64, length: usize) -> &'c mut [u8] {
    let bytes = std::ptr::with_exposed_provenance_mut::<u8>(address as usize);
    // SAFETY: the command that carries the address borrows so many bytes exclusively.
    unsafe { std::slice::from_raw_parts_mut(bytes, length) }
}

/// Writes to an address of a command as the kernel would; for tests that play the kernel.
///
/// Only while the command runs, and only to an address that came from [`OutPointer::address`].
#[cfg(test)]
pub(crate) fn play_kernel<T: IntoBytes + FromBytes>(address: u64, value: T) {
    let target = std::ptr::with_exposed_provenance_mut::<T>(address as usize);
    // SAFETY: the command that carries the address borrows the memory exclusively and is running.
    unsafe { target.write_volatile(value) };
}
