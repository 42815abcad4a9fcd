//! Requests that change a memory key: binding and unbinding a window, invalidating a key.
//!
//! Pairs with user-mode memory registration (UMR): a control segment selects the fields of the key
//! that change, a key segment has their values, and for a binding one entry of a translation list
//! names the window's region.

use super::wqe::{Segment, pair};
use crate::access::Access;
use crate::wr::{PostError, WindowBinding};
use uverbs_uapi::mlx5::wqe::MLX5_UMR_TRANSLATION_OFFSET_EN;
use uverbs_uapi::mlx5::wqe::{MLX5_UMR_CHECK_NOT_FREE, MLX5_UMR_INLINE};

/// A key may only be changed through the queue pair that it is bound to.
const CHECK_QPN: u8 = 1 << 3;

// Fields of a key that a request changes.
const LENGTH: u64 = 1 << 0;
const START: u64 = 1 << 6;
const VARIANT: u64 = 1 << 13;
const QPN: u64 = 1 << 14;
const LOCAL_WRITE: u64 = 1 << 18;
const REMOTE_READ: u64 = 1 << 19;
const REMOTE_WRITE: u64 = 1 << 20;
const ATOMIC: u64 = 1 << 21;
const FREE: u64 = 1 << 29;

/// The key is free: it names nothing.
const KEY_FREE: u8 = 1 << 6;
/// Any queue pair may use the key.
const ANY_QP: u32 = 0xffff_ff00;
/// Segments of a translation list with one entry: entries come in fours.
const ONE_ENTRY: u16 = 4;
/// The longest range that a translation entry takes.
const LONGEST: u64 = 1 << 31;

/// Segments after the control segment of a request that makes a key free.
pub(crate) const FREEING: usize = 3 + 4;
/// The same for a request that binds.
pub(crate) const BINDING: usize = FREEING + 4;

/// A request's segments after its first.
pub(crate) enum Change {
    Frees([Segment; FREEING]),
    Binds([Segment; BINDING]),
}

impl Change {
    pub(crate) fn segments(&self) -> &[Segment] {
        match self {
            Change::Frees(segments) => segments,
            Change::Binds(segments) => segments,
        }
    }
}

/// Makes a key of a region or window of type 2 free.
pub(crate) fn invalidate() -> Change {
    Change::Frees(free(true, 0))
}

/// Binds a window for the queue pair `qpn`, or makes it free where the binding is of no bytes.
pub(crate) fn bind(binding: &WindowBinding, qpn: u32) -> Result<Change, PostError> {
    // Only windows of type 2 belong to a queue pair.
    let exclusive = binding.qpn.is_some();
    let variant = binding.new_rkey.0 & 0xff;
    if binding.length == 0 {
        return Ok(Change::Frees(free(exclusive, variant)));
    }
    if binding.length > LONGEST {
        return Err(PostError::TooLong);
    }
    let mut flags = MLX5_UMR_TRANSLATION_OFFSET_EN | MLX5_UMR_INLINE;
    let mut changes = FREE | VARIANT | LENGTH | START;
    changes |= LOCAL_WRITE | REMOTE_READ | REMOTE_WRITE | ATOMIC;
    let mut owner = ANY_QP;
    if exclusive {
        flags |= MLX5_UMR_CHECK_NOT_FREE;
        changes |= QPN;
        owner = qpn << 8;
    }
    let access = binding.access;
    let rights = u32::from(access.contains(Access::LOCAL_WRITE)) << 3
        | u32::from(access.contains(Access::REMOTE_READ)) << 4
        | u32::from(access.contains(Access::REMOTE_WRITE)) << 5
        | u32::from(access.contains(Access::REMOTE_ATOMIC)) << 6;
    let start = if access.contains(Access::ZERO_BASED) { 0 } else { binding.addr };
    let [a, b, c] = control(flags, ONE_ENTRY, changes);
    Ok(Change::Binds([
        a,
        b,
        c,
        [pair(rights << 8, owner | variant), 0],
        [start.to_be(), binding.length.to_be()],
        [0, 0],
        [0, 0],
        [pair(binding.length as u32, binding.mr_lkey.0), binding.addr.to_be()],
        [0, 0],
        [0, 0],
        [0, 0],
    ]))
}

fn free(exclusive: bool, variant: u32) -> [Segment; FREEING] {
    let mut flags = MLX5_UMR_TRANSLATION_OFFSET_EN | MLX5_UMR_INLINE;
    let mut changes = FREE | VARIANT;
    if exclusive {
        flags |= CHECK_QPN;
        changes |= QPN;
    }
    let [a, b, c] = control(flags, 0, changes);
    let key = [pair(u32::from(KEY_FREE) << 24, ANY_QP | variant), 0];
    [a, b, c, key, [0, 0], [0, 0], [0, 0]]
}

fn control(flags: u8, list: u16, changes: u64) -> [Segment; 3] {
    let first = pair(u32::from(flags) << 24, u32::from(list) << 16);
    [[first, changes.to_be()], [0, 0], [0, 0]]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::number::{Lkey, Rkey};

    fn binding(length: u64) -> WindowBinding {
        WindowBinding {
            qpn: None,
            addr: 1 << 40,
            length,
            mr_lkey: Lkey(0x100),
            old_rkey: Rkey(0x200),
            new_rkey: Rkey(0x201),
            access: Access::REMOTE_READ,
        }
    }

    /// `MLX5_PERM_LOCAL_WRITE` and the three after it, in the second byte of a memory key.
    #[test]
    fn a_window_grants_each_right_by_itself() {
        for (access, bits) in [
            (Access::LOCAL_WRITE, 0x08),
            (Access::REMOTE_READ, 0x10),
            (Access::REMOTE_WRITE, 0x20),
            (Access::REMOTE_ATOMIC, 0x40),
            (Access::LOCAL_WRITE | Access::REMOTE_ATOMIC, 0x48),
        ] {
            let binding = WindowBinding { access, ..binding(4096) };
            let Ok(Change::Binds(segments)) = bind(&binding, 7) else { panic!("{access:?}") };
            assert_eq!(segments[3][0].to_ne_bytes()[..4], [0, 0, bits, 0], "{access:?}");
        }
    }

    #[test]
    fn a_window_of_two_gibibytes_is_bound_and_a_longer_one_refused() {
        for length in [1, 4096, LONGEST - 1, LONGEST] {
            assert!(matches!(bind(&binding(length), 7), Ok(Change::Binds(_))), "{length}");
        }
        for length in [LONGEST + 1, 1 << 32, u64::MAX] {
            assert_eq!(bind(&binding(length), 7).err(), Some(PostError::TooLong), "{length}");
        }
        assert!(matches!(bind(&binding(0), 7), Ok(Change::Frees(_))));
    }
}
