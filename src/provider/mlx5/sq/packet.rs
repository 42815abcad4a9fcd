//! Raw packets: the segment that precedes their data, with what the device adds to them and the
//! headers that it wants in the WQE.
//!
//! Out of line, so that messages pay nothing for it. Pairs with `mlx5_wqe_eth_seg` in the kernel's
//! `linux/mlx5/qp.h`; where in a packet a segment ends is up to the device, see
//! [`RawPacketLimits`](crate::provider::mlx5::context::RawPacketLimits).

use super::{Mlx5Sq, Wqe, completion_flags};
use crate::provider::SendCursor;
use crate::provider::mlx5::wqe::{Segment, control, pair};
use crate::wr::{Packet, Payload, PostError, SendOp, SendWr};
use uverbs_uapi::mlx5::wqe::{mlx5_wqe_eth_flags as eth, mlx5_wqe_opcode as opcode};

/// Bytes of a header that a segment of one segment holds.
const SHORT: usize = 2;

impl Mlx5Sq {
    /// Writes the WQE of a raw packet where the cursor stands.
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
        let (header, payload) = self.split(packet, &wr.payload)?;
        let wqe = Wqe::new(self, cursor.at, false);
        let mut size = 1;
        let [first, rest] = segment(&header, packet.checksums);
        wqe.append(&mut size, first);
        if header.length > SHORT {
            wqe.append(&mut size, rest);
        }
        wqe.payload(&mut size, &payload)?;
        let head = control(cursor.at, opcode::MLX5_OPCODE_SEND.0, size) | self.qpn;
        let tail = pair(completion_flags(wr.flags).into(), 0) | self.always;
        self.finish(cursor, &wqe, [head, tail], size, wr.wr_id, crate::WcOpcode::SEND);
        Ok(())
    }

    /// What goes into the segment, and what behind it: as much inline data moves there as the
    /// device wants.
    fn split<'a>(
        &self,
        packet: &Packet,
        payload: &Payload<'a>,
    ) -> Result<(Header, Payload<'a>), PostError> {
        let max = Packet::MAX_HEADER as u32;
        let given = packet.head().ok_or(PostError::HeaderTooLong { max })?;
        let mut header = Header::default();
        header.append(given);
        let min = usize::from(self.raw_packet.min_header);
        let short = PostError::HeaderTooShort { min: min as u32 };
        let missing = min.saturating_sub(header.length);
        if missing == 0 {
            return Ok((header, *payload));
        }
        let Payload::Inline(bytes) = payload else { return Err(short) };
        let (more, rest) = bytes.split_at_checked(missing).ok_or(short)?;
        header.append(more);
        Ok((header, Payload::Inline(rest)))
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

/// The segment of a packet; the second segment belongs to it if the header goes on there.
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
