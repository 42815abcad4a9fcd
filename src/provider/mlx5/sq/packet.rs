//! Raw packets: the Ethernet segment before their data, with the offloads of the device and the
//! headers that the device requires inline.
//!
//! Out of line, so that messages cost no instruction more. Pairs with `mlx5_wqe_eth_seg` in the
//! kernel's `linux/mlx5/qp.h`; the device decides how many header bytes must be in the segment, see
//! [`RawPacketLimits`](crate::provider::mlx5::context::RawPacketLimits).

use super::{Mlx5Sq, Wqe, completion_flags};
use crate::provider::SendCursor;
use crate::provider::mlx5::wqe::{Segment, control, pair};
use crate::wr::{Packet, Payload, PostError, SendOp, SendWr};
use uverbs_uapi::mlx5::wqe::{mlx5_wqe_eth_flags as eth, mlx5_wqe_opcode as opcode};

/// Header bytes in an Ethernet segment of a single 16-byte segment.
const SHORT: usize = 2;

impl Mlx5Sq {
    /// Writes the WQE of a raw packet at the cursor.
    pub(super) fn push_packet(
        &self,
        cursor: &mut SendCursor,
        wr: &SendWr<'_>,
    ) -> Result<(), PostError> {
        let packet = match &wr.op {
            SendOp::Send => &Packet::new(),
            SendOp::Packet(packet) => packet,
            _ => return Err(PostError::Unsupported),
        };
        if packet.checksums && !self.raw_packet.checksums {
            return Err(PostError::NoChecksums);
        }
        let (header, moved) = self.header(packet, &wr.payload)?;
        let wqe = Wqe::new(self, cursor.at, false);
        let mut size = 1;
        let [first, rest] = segment(&header, packet.checksums);
        wqe.append(&mut size, first);
        if header.length > SHORT {
            wqe.append(&mut size, rest);
        }
        match &wr.payload {
            Payload::Sges(sges) => wqe.gather(&mut size, sges)?,
            inline => size = wqe.inline_list_checked(size, inline.inline_parts(), moved)?,
        }
        let head = control(cursor.at, opcode::MLX5_OPCODE_SEND.0, size) | self.qpn;
        let tail = pair(completion_flags(wr.flags).into(), 0) | self.always;
        self.finish(cursor, &wqe, [head, tail], size, wr.wr_id, crate::WcOpcode::SEND);
        Ok(())
    }

    /// The header for the segment, and how many bytes of inline data it begins with: as many as the device
    /// requires there.
    fn header(&self, packet: &Packet, payload: &Payload<'_>) -> Result<(Header, usize), PostError> {
        let max = Packet::MAX_HEADER as u32;
        let given = packet.head().ok_or(PostError::HeaderTooLong { max })?;
        let mut header = Header::default();
        header.append(given);
        let min = usize::from(self.raw_packet.min_header);
        let short = PostError::HeaderTooShort { min: min as u32 };
        let missing = min.saturating_sub(header.length);
        let mut left = missing;
        for part in payload.inline_parts() {
            let (more, _) = part.split_at(left.min(part.len()));
            header.append(more);
            left -= more.len();
        }
        if left > 0 { Err(short) } else { Ok((header, missing)) }
    }
}

/// The beginning of a packet.
#[derive(Default)]
struct Header {
    bytes: [u8; Packet::MAX_HEADER],
    length: usize,
}

impl Header {
    fn append(&mut self, bytes: &[u8]) {
        for (place, byte) in self.bytes.iter_mut().skip(self.length).zip(bytes) {
            *place = *byte;
            self.length += 1;
        }
    }
}

/// The Ethernet segment of a packet; it takes two 16-byte segments if the header is longer than one holds.
fn segment(header: &Header, checksums: bool) -> [Segment; 2] {
    let sums = eth::MLX5_ETH_WQE_L3_CSUM | eth::MLX5_ETH_WQE_L4_CSUM;
    let sums = if checksums { sums.bits() } else { 0 };
    let [first, second, rest @ ..] = header.bytes;
    let head = u32::from_be_bytes([0, header.length as u8, first, second]);
    [[pair(0, u32::from(sums) << 24), pair(0, head)], zerocopy::transmute!(rest)]
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use uverbs_uapi::endian::Be16;
    use uverbs_uapi::mlx5::wqe::{mlx5_wqe_eth_seg, mlx5_wqe_eth_seg_inline_hdr};
    use zerocopy::IntoBytes;

    #[test]
    fn segments_are_those_of_the_headers() {
        let mut header = Header::default();
        header.append(&[0x11; 7]);
        header.append(&[0x22; 30]);
        assert_eq!(header.length, Packet::MAX_HEADER);
        let inline = mlx5_wqe_eth_seg_inline_hdr { sz: Be16::new(18), start: [0x11, 0x11] };
        let expected = mlx5_wqe_eth_seg {
            cs_flags: 0xc0,
            inline_hdr: zerocopy::transmute!(inline),
            ..Default::default()
        };
        let [first, rest] = segment(&header, true);
        assert_eq!(first.as_bytes(), expected.as_bytes());
        assert_eq!(rest.as_bytes(), [[0x11u8; 5].as_slice(), &[0x22; 11]].concat());
    }
}
