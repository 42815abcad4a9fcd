//! Completion queue entries (CQEs).
//!
//! Pairs with `struct mlx5_cqe64` and `struct mlx5_err_cqe`.

pub(crate) const REQUEST: u8 = 0x0;
pub(crate) const RESPONSE_WRITE_IMM: u8 = 0x1;
pub(crate) const RESPONSE_SEND: u8 = 0x2;
pub(crate) const RESPONSE_SEND_IMM: u8 = 0x3;
pub(crate) const RESPONSE_SEND_INV: u8 = 0x4;
pub(crate) const REQUEST_ERROR: u8 = 0xd;
pub(crate) const RESPONSE_ERROR: u8 = 0xe;
/// The last CQE in the old buffer of a resized CQ.
pub(crate) const RESIZED: u8 = 0x5;

pub(crate) const SOLICITED: u8 = 2;
/// Data is scattered to the CQE: to its first bytes, or to the 64 bytes before it.
pub(crate) const INLINE_32: u8 = 4;
pub(crate) const INLINE_64: u8 = 8;

/// Among the types of headers: a VLAN tag, which is in the CQE.
pub(crate) const VLAN_PRESENT: u8 = 1;

/// A CQE under construction.
pub(crate) struct Cqe([u8; 64]);

impl Cqe {
    pub(crate) fn new(opcode: u8) -> Self {
        let mut bytes = [0; 64];
        bytes[63] = opcode << 4;
        Self(bytes)
    }

    pub(crate) fn put(&mut self, at: usize, value: u32) -> &mut Self {
        self.0[at..at + 4].copy_from_slice(&value.to_be_bytes());
        self
    }

    pub(crate) fn put16(&mut self, at: usize, value: u16) -> &mut Self {
        self.0[at..at + 2].copy_from_slice(&value.to_be_bytes());
        self
    }

    pub(crate) fn put8(&mut self, at: usize, value: u8) -> &mut Self {
        self.0[at] = value;
        self
    }

    /// Scatters data to the CQE, which has `room` bytes for it. Returns the part that goes to the
    /// 64 bytes before the CQE.
    pub(crate) fn put_inline<'a>(&mut self, data: &'a [u8], room: usize) -> &'a [u8] {
        match data.len() {
            0 => &[],
            len if room == 64 => {
                self.0[63] |= INLINE_64;
                &data[..len.min(room)]
            }
            len => {
                let len = len.min(32);
                self.0[..len].copy_from_slice(&data[..len]);
                self.0[63] |= INLINE_32;
                &[]
            }
        }
    }

    pub(crate) fn bytes(&self) -> [u8; 64] {
        self.0
    }
}
