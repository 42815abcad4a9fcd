//! The segments of WQEs, by the kernel's names of their structs.
//!
//! Pairs with `format::wqe`, which reads their fields.

use uverbs_uapi::mlx5::wqe::mlx5_wqe_opcode;

use crate::format::wqe::{CtrlSegment, op};
use crate::recording::SERVICE_RAW_SQ;

/// The name of a service type.
pub fn service_name(service: u8) -> &'static str {
    match service {
        0x0 => "rc",
        0x1 => "uc",
        0x2 => "ud",
        0x3 => "xrc",
        0x7 => "smi",
        0x8 => "gsi",
        0xc => "umr",
        SERVICE_RAW_SQ => "raw",
        _ => "unknown",
    }
}

/// The name of a WQE opcode, without the common prefix.
pub fn opcode_name(opcode: u8) -> String {
    match mlx5_wqe_opcode(opcode).name() {
        Some(name) => name.trim_start_matches("MLX5_OPCODE_").into(),
        None if opcode == op::LOCAL_INVAL => "LOCAL_INVAL".into(),
        None => format!("{opcode:#x}"),
    }
}

/// A segment of a WQE: the kernel's name of its struct, and its bytes.
pub type NamedSegment<'a> = (&'static str, &'a [u8]);

/// The segments split off so far, and the rest of the WQE.
struct Splitter<'a> {
    list: Vec<NamedSegment<'a>>,
    rest: &'a [u8],
}

impl Splitter<'_> {
    fn take(&mut self, name: &'static str, len: usize) {
        let (head, rest) = self.rest.split_at(len.min(self.rest.len()));
        self.rest = rest;
        if !head.is_empty() {
            self.list.push((name, head));
        }
    }
}

/// Splits a WQE into its segments, and stops at a truncated one.
pub fn segments(service: u8, bytes: &[u8]) -> Vec<NamedSegment<'_>> {
    let Some(control) = bytes.first_chunk::<16>().map(CtrlSegment::parse) else { return vec![] };
    let end = (usize::from(control.ds) * 16).min(bytes.len());
    let mut splitter = Splitter { list: Vec::new(), rest: bytes.get(..end).unwrap_or_default() };
    splitter.take("mlx5_wqe_ctrl_seg", 16);
    match service {
        0x3 => splitter.take("mlx5_wqe_xrc_seg", 16),
        0x2 | 0x7 | 0x8 => splitter.take("mlx5_av", 48),
        SERVICE_RAW_SQ if control.opcode != op::NOP => {
            let inline = splitter.rest.get(12..14).map_or(0, |b| u16::from_be_bytes([b[0], b[1]]));
            // The upper bit means that the segment holds a VLAN tag instead of headers.
            let len = if inline >> 15 != 0 { 0 } else { usize::from(inline) };
            splitter.take("mlx5_wqe_eth_seg", (14 + len).next_multiple_of(16).max(16));
        }
        _ => {}
    }
    match control.opcode {
        op::RDMA_WRITE | op::RDMA_WRITE_IMM | op::RDMA_READ => {
            splitter.take("mlx5_wqe_raddr_seg", 16)
        }
        op::ATOMIC_CS | op::ATOMIC_FA | op::ATOMIC_MASKED_FA => {
            splitter.take("mlx5_wqe_raddr_seg", 16);
            splitter.take("mlx5_wqe_atomic_seg", 16);
        }
        op::ATOMIC_MASKED_CS => {
            splitter.take("mlx5_wqe_raddr_seg", 16);
            // All four operands of 4-byte atomics fit one segment.
            match control.atomic_len() {
                Some(4) => splitter.take("mlx5_wqe_atomic_seg", 16),
                _ => splitter.take("mlx5_wqe_masked_atomic_seg", 32),
            }
        }
        op::UMR => {
            const INLINE: u8 = 1 << 7;
            let inline = splitter.rest.first().is_some_and(|flags| flags & INLINE != 0);
            splitter.take("mlx5_wqe_umr_ctrl_seg", 48);
            splitter.take("mlx5_mkey_seg", 64);
            while inline && !splitter.rest.is_empty() {
                splitter.take("mlx5_klm", 16);
            }
        }
        _ => {}
    }
    while let Some(first) = splitter.rest.first() {
        if first & 0x80 == 0 {
            splitter.take("mlx5_wqe_data_seg", 16);
        } else {
            let head = splitter.rest.first_chunk::<4>();
            let len = head.map_or(0, |b| u32::from_be_bytes(*b) & 0x7fff_ffff) as usize;
            splitter.take(
                "mlx5_wqe_inline_seg",
                len.saturating_add(4).min(1 << 16).next_multiple_of(16),
            );
        }
    }
    splitter.list
}

/// Splits a receive WQE into its segments, up to the one that ends the list.
pub fn receive_segments(linked: bool, bytes: &[u8]) -> Vec<NamedSegment<'_>> {
    const END: u32 = 0x100;
    let (mut list, mut rest) = (Vec::new(), bytes);
    if let Some((head, left)) = rest.split_at_checked(16).filter(|_| linked) {
        list.push(("mlx5_wqe_srq_next_seg", head));
        rest = left;
    }
    for piece in rest.chunks_exact(16) {
        list.push(("mlx5_wqe_data_seg", piece));
        if piece[..4] == [0; 4] && piece[4..8] == END.to_be_bytes() {
            break;
        }
    }
    list
}
