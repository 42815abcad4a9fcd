//! WQEs as they lie in a send queue.
//!
//! Pairs with the segments of libmlx5 and mlx5_ib: a control segment, then the segments of the
//! service and the opcode, then data segments. A guest wrote all of it, so the device trusts nothing in it.

use uverbs_roce::Atomic;

/// Opcodes, `MLX5_OPCODE_*`.
#[allow(missing_docs, reason = "the driver's names")]
pub mod op {
    pub const NOP: u8 = 0x00;
    pub const SEND_INVAL: u8 = 0x01;
    pub const RDMA_WRITE: u8 = 0x08;
    pub const RDMA_WRITE_IMM: u8 = 0x09;
    pub const SEND: u8 = 0x0a;
    pub const SEND_IMM: u8 = 0x0b;
    pub const LSO: u8 = 0x0e;
    pub const RDMA_READ: u8 = 0x10;
    pub const ATOMIC_CS: u8 = 0x11;
    pub const ATOMIC_FA: u8 = 0x12;
    pub const ATOMIC_MASKED_CS: u8 = 0x14;
    pub const ATOMIC_MASKED_FA: u8 = 0x15;
    pub const LOCAL_INVAL: u8 = 0x1b;
    pub const UMR: u8 = 0x25;
}

/// The control segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CtrlSegment {
    /// One of [`op`].
    pub opcode: u8,
    /// `opmod`, which refines the opcode.
    pub opmod: u8,
    /// Index of the first WQEBB of the WQE.
    pub wqe_index: u16,
    /// The queue for which the driver wrote the WQE.
    pub qpn: u32,
    /// Length in units of 16 bytes, including this segment.
    pub ds: u8,
    /// Fence, completion and solicited flags.
    pub flags: u8,
    /// Immediate data, or the mkey to invalidate.
    pub immediate: u32,
}

impl CtrlSegment {
    /// Parses the first 16 bytes of a WQE.
    pub fn parse(bytes: &[u8; 16]) -> Self {
        let value = u128::from_be_bytes(*bytes);
        Self {
            opmod: (value >> 120) as u8,
            wqe_index: (value >> 104) as u16,
            opcode: (value >> 96) as u8,
            qpn: (value >> 72) as u32 & 0xff_ffff,
            ds: (value >> 64) as u8 & 0x3f,
            flags: bytes[11],
            immediate: value as u32,
        }
    }

    /// Bytes of an atomic's operand: 8, or the length in the opmod of a masked atomic. `None` for an unsupported
    /// length.
    pub fn atomic_len(&self) -> Option<u64> {
        const EXTENDED: u8 = 8;
        match (self.opcode, self.opmod) {
            (_, 0) => Some(8),
            (op::ATOMIC_MASKED_CS | op::ATOMIC_MASKED_FA, EXTENDED) => Some(4),
            (op::ATOMIC_MASKED_CS | op::ATOMIC_MASKED_FA, 9) => Some(8),
            _ => None,
        }
    }

    /// Whether the WQE waits until all reads and atomics before it are complete.
    pub(crate) fn fence(&self) -> bool {
        /// `MLX5_FENCE_MODE_FENCE`, the lowest of the modes that wait. A small fence waits for UMRs, which the device
        /// executes in order.
        const FENCE: u8 = 2 << 5;
        self.flags & 0xe0 >= FENCE
    }

    /// Whether success is reported.
    pub fn signaled(&self) -> bool {
        self.flags & 0x0c == 0x08
    }

    /// Whether the receiver's CQE is solicited.
    pub fn solicited(&self) -> bool {
        self.flags & 0x02 != 0
    }

    /// Length in WQEBBs, at least one.
    pub fn wqebbs(&self) -> u16 {
        u16::from(self.ds).div_ceil(4).max(1)
    }
}

/// Address vector of a datagram.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AddressVector {
    /// The Q_Key; if the upper bit is set, the Q_Key of the sending queue pair is used instead.
    pub qkey: u32,
    /// Destination QPN.
    pub qpn: u32,
    /// Destination LID.
    pub lid: u16,
    /// Service level.
    pub sl: u8,
    /// Traffic class.
    pub tclass: u8,
    /// Hop limit.
    pub hop_limit: u8,
    /// Flow label.
    pub flow_label: u32,
    /// Index of the source GID in the port's table.
    pub source: u8,
    /// Whether there is a global route.
    pub global: bool,
    /// Destination GID.
    pub gid: [u8; 16],
}

/// Memory of the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RemoteAddress {
    /// Address.
    pub address: u64,
    /// Remote key.
    pub key: u32,
}

/// Flag in the length of a receive's data segment: the device may pad the start. It does not.
pub(crate) const START_PADDING: u32 = 1 << 31;

/// The key of the data segment that ends a list early.
pub(crate) const INVALID_KEY: u32 = 0x100;

/// A scatter/gather entry (SGE).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sge {
    /// Bytes.
    pub len: u32,
    /// Local key.
    pub key: u32,
    /// Address in the mkey.
    pub address: u64,
}

impl Sge {
    /// Parses a data segment.
    pub fn parse(bytes: &[u8; 16]) -> Self {
        let value = u128::from_be_bytes(*bytes);
        let len = (value >> 96) as u32 & !START_PADDING;
        Self { len, key: (value >> 64) as u32, address: value as u64 }
    }
}

/// A data segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DataSegment<'w> {
    /// An SGE.
    Memory(Sge),
    /// Inline data.
    Inline(&'w [u8]),
}

impl DataSegment<'_> {
    /// Length in bytes.
    pub fn len(&self) -> u64 {
        match self {
            // A length of 2^31 does not fit the field; zero stands for it.
            Self::Memory(scatter) if scatter.len == 0 => 1 << 31,
            Self::Memory(scatter) => scatter.len.into(),
            Self::Inline(bytes) => bytes.len() as u64,
        }
    }

    /// Whether the segment is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The data segments of a WQE; none is truncated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DataSegments<'w> {
    rest: &'w [u8],
}

impl<'w> DataSegments<'w> {
    /// Those behind `head` bytes of a WQE that has been checked.
    pub(crate) fn behind(control: &CtrlSegment, wqe: &'w [u8], head: usize) -> Self {
        let end = (usize::from(control.ds) * 16).min(wqe.len());
        Self { rest: wqe.get(head..end).unwrap_or(&[]) }
    }

    /// The bytes that are not parsed yet.
    pub(crate) fn rest(&self) -> &'w [u8] {
        self.rest
    }

    /// Their bytes.
    pub fn bytes(self) -> u64 {
        self.map(|segment| segment.len()).sum()
    }

    fn parse(&mut self) -> Result<Option<DataSegment<'w>>, Truncated> {
        const INLINE: u8 = 0x80;
        let Some(first) = self.rest.first() else { return Ok(None) };
        if first & INLINE == 0 {
            let (head, rest) = self.rest.split_first_chunk::<16>().ok_or(Truncated)?;
            self.rest = rest;
            return Ok(Some(DataSegment::Memory(Sge::parse(head))));
        }
        let head = self.rest.first_chunk::<4>().ok_or(Truncated)?;
        let len = (u32::from_be_bytes(*head) & 0x7fff_ffff) as usize;
        let end = len.checked_add(4).ok_or(Truncated)?;
        let inline = self.rest.get(4..end).ok_or(Truncated)?;
        self.rest = self.rest.get(end.next_multiple_of(16)..).unwrap_or(&[]);
        Ok(Some(DataSegment::Inline(inline)))
    }
}

impl<'w> Iterator for DataSegments<'w> {
    type Item = DataSegment<'w>;

    fn next(&mut self) -> Option<DataSegment<'w>> {
        self.parse().ok().flatten()
    }
}

/// A cursor over the segments of a WQE.
pub struct WqeSegments<'a> {
    rest: &'a [u8],
}

/// The WQE ends in the middle of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Truncated;

impl<'a> WqeSegments<'a> {
    /// The segments behind the control segment of a WQE, whose bytes are `bytes`.
    pub fn new(control: &CtrlSegment, bytes: &'a [u8]) -> Self {
        let end = (usize::from(control.ds) * 16).min(bytes.len());
        Self { rest: bytes.get(16..end).unwrap_or(&[]) }
    }

    fn take<const N: usize>(&mut self) -> Result<&'a [u8; N], Truncated> {
        let (head, rest) = self.rest.split_first_chunk::<N>().ok_or(Truncated)?;
        self.rest = rest;
        Ok(head)
    }

    /// The bytes that are not parsed yet.
    pub fn rest(&self) -> &'a [u8] {
        self.rest
    }

    /// The SRQN of an XRC WQE.
    ///
    /// # Errors
    /// [`Truncated`]
    pub fn xrc(&mut self) -> Result<u32, Truncated> {
        let bytes = self.take::<16>()?;
        Ok(u32::from_be_bytes([0, bytes[1], bytes[2], bytes[3]]))
    }

    /// The address vector of a datagram.
    ///
    /// # Errors
    /// [`Truncated`]
    pub fn address_vector(&mut self) -> Result<AddressVector, Truncated> {
        let b = self.take::<48>()?;
        let word = |at: usize| u32::from_be_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]]);
        let route = word(28);
        let mut gid = [0; 16];
        gid.copy_from_slice(&b[32..48]);
        Ok(AddressVector {
            qkey: word(0),
            qpn: word(8) & 0xff_ffff,
            sl: b[12] & 0xf,
            lid: u16::from_be_bytes([b[14], b[15]]),
            tclass: b[26],
            hop_limit: b[27],
            flow_label: route & 0xf_ffff,
            source: (route >> 20) as u8,
            global: route >> 30 & 1 != 0,
            gid,
        })
    }

    /// The remote address.
    ///
    /// # Errors
    /// [`Truncated`]
    pub fn remote(&mut self) -> Result<RemoteAddress, Truncated> {
        let value = u128::from_be_bytes(*self.take::<16>()?);
        Ok(RemoteAddress { address: (value >> 64) as u64, key: (value >> 32) as u32 })
    }

    fn pair(&mut self) -> Result<(u64, u64), Truncated> {
        let value = u128::from_be_bytes(*self.take::<16>()?);
        Ok(((value >> 64) as u64, value as u64))
    }

    fn quarters(&mut self) -> Result<[u64; 4], Truncated> {
        let value = u128::from_be_bytes(*self.take::<16>()?);
        Ok([96, 64, 32, 0].map(|shift| (value >> shift) as u64 & 0xffff_ffff))
    }

    /// The operands of an atomic with this opcode, on a word of `len` bytes, 4 or 8.
    ///
    /// # Errors
    /// [`Truncated`]
    pub fn atomic(&mut self, opcode: u8, len: u64) -> Result<Atomic, Truncated> {
        if len == 4 {
            let [first, second, third, fourth] = self.quarters()?;
            return Ok(match opcode {
                op::ATOMIC_MASKED_CS => Atomic::MaskedCompareSwap {
                    swap: first,
                    compare: second,
                    swap_mask: third,
                    compare_mask: fourth,
                },
                // Bit 31 is a boundary, too: a word of four bytes has no carry out.
                _ => Atomic::MaskedFetchAdd { add: first, boundary: second | 1 << 31 },
            });
        }
        let (first, second) = self.pair()?;
        Ok(match opcode {
            op::ATOMIC_CS => Atomic::CompareSwap { swap: first, compare: second },
            op::ATOMIC_FA => Atomic::FetchAdd { add: first },
            op::ATOMIC_MASKED_CS => {
                let (swap_mask, compare_mask) = self.pair()?;
                Atomic::MaskedCompareSwap { swap: first, compare: second, swap_mask, compare_mask }
            }
            _ => Atomic::MaskedFetchAdd { add: first, boundary: second },
        })
    }

    /// The control segment and the mkey context of a UMR WQE.
    ///
    /// # Errors
    /// [`Truncated`]
    pub fn umr(&mut self) -> Result<(&'a [u8; 48], &'a [u8; 64]), Truncated> {
        Ok((self.take::<48>()?, self.take::<64>()?))
    }

    /// The Ethernet segment, and the headers inline in it.
    ///
    /// # Errors
    /// [`Truncated`]
    pub fn ethernet(&mut self) -> Result<(&'a [u8; 16], &'a [u8]), Truncated> {
        const START: usize = 14;
        const INSERT_VLAN: u16 = 1 << 15;
        let all = self.rest;
        let head = self.take::<16>()?;
        let len = u16::from_be_bytes([head[12], head[13]]);
        if len & INSERT_VLAN != 0 || len == 0 {
            return Ok((head, &[]));
        }
        let end = START + usize::from(len);
        let inline = all.get(START..end).ok_or(Truncated)?;
        self.rest = all.get(end.next_multiple_of(16)..).unwrap_or(&[]);
        Ok((head, inline))
    }

    /// The data segments, up to the end of the WQE.
    ///
    /// # Errors
    /// [`Truncated`]
    pub fn data_segments(self) -> Result<DataSegments<'a>, Truncated> {
        let segments = DataSegments { rest: self.rest };
        let mut all = segments;
        while all.parse()?.is_some() {}
        Ok(segments)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_segment_fields_are_parsed() {
        let mut bytes = [0u8; 16];
        bytes[0..4].copy_from_slice(&0x0112_340au32.to_be_bytes());
        bytes[4..8].copy_from_slice(&0x00ab_cd05u32.to_be_bytes());
        bytes[11] = 0x0a;
        bytes[12..].copy_from_slice(&7u32.to_be_bytes());
        let control = CtrlSegment::parse(&bytes);
        assert_eq!((control.opmod, control.wqe_index, control.opcode), (1, 0x1234, op::SEND));
        assert_eq!((control.qpn, control.ds, control.wqebbs()), (0xabcd, 5, 2));
        assert!(control.signaled() && control.solicited());
        assert_eq!(control.immediate, 7);
    }

    #[test]
    fn inline_data_is_padded_and_does_not_pass_the_end_of_the_wqe() {
        let mut bytes = vec![0u8; 64];
        bytes[16..20].copy_from_slice(&0x8000_0005u32.to_be_bytes());
        bytes[20..25].copy_from_slice(b"hello");
        bytes[32..36].copy_from_slice(&9u32.to_be_bytes());
        let mut control = CtrlSegment::parse(&[0; 16]);
        control.ds = 3;
        let segments = WqeSegments::new(&control, &bytes).data_segments().unwrap();
        let list: Vec<_> = segments.collect();
        assert_eq!(list[0], DataSegment::Inline(b"hello"));
        assert_eq!((list[1].len(), segments.bytes()), (9, 14));
        bytes[16..20].copy_from_slice(&0x8000_0020u32.to_be_bytes());
        assert_eq!(WqeSegments::new(&control, &bytes).data_segments(), Err(Truncated));
        bytes[16..20].copy_from_slice(&0xffff_ffffu32.to_be_bytes());
        assert_eq!(WqeSegments::new(&control, &bytes).data_segments(), Err(Truncated));
    }

    #[test]
    fn masked_atomics_of_eight_bytes_apply_their_masks() {
        let add = Atomic::MaskedFetchAdd { add: 0x0101, boundary: 0x8080 };
        assert_eq!(add.apply(0x00ff), 0x0100);
        let swap = Atomic::MaskedCompareSwap {
            swap: 0xff,
            compare: 0x12,
            swap_mask: 0x0f,
            compare_mask: 0xf0,
        };
        assert_eq!(swap.apply(0x1a), 0x1f);
        assert_eq!(swap.apply(0x2a), 0x2a);
    }

    #[test]
    fn masked_atomics_of_four_bytes_apply_their_masks() {
        let words = [0xffu32, 0x12, 0x0f, 0xf0];
        let mut bytes = vec![0; 16];
        bytes.extend(words.iter().flat_map(|word| word.to_be_bytes()));
        let mut control = CtrlSegment::parse(&[0; 16]);
        (control.ds, control.opcode, control.opmod) = (2, op::ATOMIC_MASKED_CS, 8);
        assert_eq!(control.atomic_len(), Some(4));
        let swap = WqeSegments::new(&control, &bytes).atomic(control.opcode, 4).unwrap();
        assert_eq!((swap.apply(0x1a), swap.apply(0x2a)), (0x1f, 0x2a));
        let add = WqeSegments::new(&control, &bytes).atomic(op::ATOMIC_MASKED_FA, 4).unwrap();
        assert_eq!(add.apply(0xffff_ffff) >> 32, 0);
        control.opmod = 9;
        assert_eq!(control.atomic_len(), Some(8));
        control.opmod = 10;
        assert_eq!(control.atomic_len(), None);
        (control.opcode, control.opmod) = (op::ATOMIC_CS, 8);
        assert_eq!(control.atomic_len(), None);
    }
}
