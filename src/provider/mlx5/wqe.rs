//! The words of work queue elements (WQEs), in the byte order of memory.
//!
//! A segment is 16 bytes, written as two words. The structs of `uverbs_uapi::mlx5::wqe` say where the fields of
//! a segment are; the tests compare the two.

use crate::wr::Sge;
use uverbs_uapi::endian::Be32;
use uverbs_uapi::mlx5::wqe as uapi;

/// A segment of a request.
pub(crate) type Segment = [u64; 2];

/// Segments of the longest WQE. DS, the count in the control segment, has six bits, and 0 does not stand for 64.
/// Devices report room for 64 segments (16 WQEBBs); `mlx5e_get_max_sq_aligned_wqebbs` of the kernel avoids that
/// count, too.
pub(crate) const LONGEST: u32 = (1 << 6) - 1;

/// Two big-endian numbers of 32 bits, the first at the lower address.
#[inline]
pub(crate) const fn pair(first: u32, second: u32) -> u64 {
    ((first as u64) << 32 | second as u64).to_be()
}

/// The XRC segment: the shared receive queue at the far end of the connection.
#[inline]
pub(crate) const fn target(srqn: u32) -> Segment {
    [pair(srqn, 0), 0]
}

/// The first word of a request at the WQEBB `at`. The second has the queue pair's number.
#[inline]
pub(crate) const fn control(at: u32, opcode: u8, segments: u32) -> u64 {
    // Each half is swapped by itself: opcode and count are mostly constants, which the compiler then swaps.
    pair((at & 0xffff) << 8, 0) | (pair(opcode as u32, 0) | pair(0, segments as u8 as u32))
}

/// The number of segments of a request, from its first word.
#[inline]
pub(crate) const fn segments(control: u64) -> u32 {
    // The two bits above them are never set, since no request is longer than `LONGEST`.
    u64::from_be(control) as u8 as u32
}

/// The remote address segment of an RDMA operation or an atomic.
#[inline]
pub(crate) const fn remote(addr: u64, rkey: u32) -> Segment {
    [addr.to_be(), pair(rkey, 0)]
}

/// Operands of an atomic.
#[inline]
pub(crate) const fn atomic(swap_add: u64, compare: u64) -> Segment {
    [swap_add.to_be(), compare.to_be()]
}

/// The bits of a masked atomic of eight bytes in the first word: an extended atomic, and the log₂
/// of its operand length in units of four bytes.
pub(crate) const MASKED_EIGHT: u64 = pair((8 | 1) << 24, 0);

/// A data segment: an SGE.
#[inline]
pub(crate) const fn data(sge: &Sge) -> Segment {
    [pair(sge.length, sge.lkey.0), sge.addr.to_be()]
}

/// Ends the list of SGEs of a receive.
pub(crate) const TERMINATOR: Segment = [pair(0, uapi::MLX5_TERMINATE_SCATTER_LIST_LKEY), 0];

/// The length of inline data, as its first four bytes.
#[inline]
pub(crate) const fn inline_length(length: u32) -> Be32 {
    Be32::new(length | uapi::MLX5_INLINE_SEG)
}

/// The next free entry of a shared receive queue: the first half of a segment, whose other is zero.
#[inline]
pub(crate) const fn link(next: u32) -> u64 {
    pair(next & 0xffff, 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::number::Lkey;
    use uverbs_uapi::endian::{Be16, Be64};
    use zerocopy::{Immutable, IntoBytes};

    fn assert_same(written: Segment, segment: &(impl IntoBytes + Immutable)) {
        assert_eq!(written.as_bytes(), segment.as_bytes());
    }

    #[test]
    fn segments_match_the_structs_of_uapi() {
        let head = control(0x1_2345, 0x0a, 5) | pair(0, 0x0102_0300);
        assert_eq!((segments(head), segments(control(0xffff, 0xff, 63))), (5, 63));
        assert_same(
            [head, pair(0x88, 0x0607_0809)],
            &uapi::mlx5_wqe_ctrl_seg {
                opmod_idx_opcode: Be32::new(0x0023_450a),
                qpn_ds: Be32::new(0x0102_0305),
                fm_ce_se: 0x88,
                imm: Be32::new(0x0607_0809),
                ..Default::default()
            },
        );
        assert_same(
            remote(0x1122_3344_5566_7788, 0x0102_0304),
            &uapi::mlx5_wqe_raddr_seg {
                raddr: Be64::new(0x1122_3344_5566_7788),
                rkey: Be32::new(0x0102_0304),
                reserved: 0,
            },
        );
        assert_same(
            atomic(1 << 60, 0x0203),
            &uapi::mlx5_wqe_atomic_seg { swap_add: Be64::new(1 << 60), compare: Be64::new(0x0203) },
        );
        let sge = Sge { addr: 0x1122_3344_5566_7788, length: 0x0a0b, lkey: Lkey(0x0c0d_0e0f) };
        assert_same(
            data(&sge),
            &uapi::mlx5_wqe_data_seg {
                byte_count: Be32::new(0x0a0b),
                lkey: Be32::new(0x0c0d_0e0f),
                addr: Be64::new(0x1122_3344_5566_7788),
            },
        );
        assert_same(
            TERMINATOR,
            &uapi::mlx5_wqe_data_seg { lkey: Be32::new(0x100), ..Default::default() },
        );
        let next =
            uapi::mlx5_wqe_srq_next_seg { next_wqe_index: Be16::new(0xabcd), ..Default::default() };
        assert_same([link(0x1_abcd), 0], &next);
        let inline = uapi::mlx5_wqe_inline_seg { byte_count: Be32::new(0x8000_0021) };
        assert_eq!(inline_length(0x21).as_bytes(), inline.as_bytes());
    }
}
