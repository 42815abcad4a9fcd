//! The address of one side of an XRC connection, in the form of rdma-core's program:
//! `LLLL:TTTTTT:IIIIII:PPPPPP:SSSSSS:` and the 32 digits of a GID, all hexadecimal, with a NUL at the end.

use std::fmt;
use uverbs::{Gid, Psn, Qpn, SrqNumber};

/// Length of the form, the NUL included.
pub(crate) const LENGTH: usize = 66;

/// The places of the six fields.
const FIELDS: [std::ops::Range<usize>; 6] = [0..4, 5..11, 12..18, 19..25, 26..32, 33..65];

/// The address of one side of a connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Address {
    pub(crate) lid: u16,
    /// The queue pair that receives.
    pub(crate) target: Qpn,
    /// The queue pair that sends.
    pub(crate) initiator: Qpn,
    /// The PSN of the first packet of either one.
    pub(crate) psn: Psn,
    pub(crate) srq: SrqNumber,
    /// All zero for a peer that is reached by LID.
    pub(crate) gid: Gid,
}

impl Address {
    pub(crate) fn to_wire(self) -> [u8; LENGTH] {
        let text = format!(
            "{:04x}:{:06x}:{:06x}:{:06x}:{:06x}:{:032x}\0",
            self.lid,
            self.target.0,
            self.initiator.0,
            self.psn.0,
            self.srq.0,
            u128::from_be_bytes(self.gid.0)
        );
        let mut wire = [0; LENGTH];
        for (to, from) in wire.iter_mut().zip(text.bytes()) {
            *to = from;
        }
        wire
    }

    /// The address in the peer's message; `None` if it is malformed.
    pub(crate) fn from_wire(wire: &[u8; LENGTH]) -> Option<Address> {
        let separated = [4, 11, 18, 25, 32].iter().all(|&at| wire[at] == b':');
        if !separated || wire[LENGTH - 1] != 0 {
            return None;
        }
        let field = |range: std::ops::Range<usize>| {
            wire[range].iter().try_fold(0u128, |value, &digit| {
                Some(value << 4 | u128::from(char::from(digit).to_digit(16)?))
            })
        };
        let [lid, target, initiator, psn, srq, gid] = FIELDS.map(field);
        Some(Address {
            lid: lid? as u16,
            target: Qpn(target? as u32),
            initiator: Qpn(initiator? as u32),
            psn: Psn(psn? as u32),
            srq: SrqNumber(srq? as u32),
            gid: Gid(gid?.to_be_bytes()),
        })
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "LID {:#06x}, QPN {:#08x} to receive and {:#08x} to send, PSN {:#08x}, SRQN {:#08x}, \
             GID {}",
            self.lid, self.target.0, self.initiator.0, self.psn.0, self.srq.0, self.gid
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WIRE: &[u8; LENGTH] =
        b"00a1:000011:000012:fed123:00abcd:00000000000000000000ffff0a000001\0";

    #[test]
    fn the_form_is_that_of_the_peers() {
        let mut gid = [0; 16];
        gid[10..].copy_from_slice(&[0xff, 0xff, 10, 0, 0, 1]);
        let address = Address {
            lid: 0xa1,
            target: Qpn(0x11),
            initiator: Qpn(0x12),
            psn: Psn(0xfe_d123),
            srq: SrqNumber(0xabcd),
            gid: Gid(gid),
        };
        assert_eq!(&address.to_wire(), WIRE);
        assert_eq!(Address::from_wire(WIRE), Some(address));
    }

    #[test]
    fn one_wrong_byte_anywhere_is_noticed() {
        for at in 0..LENGTH {
            let mut wire = *WIRE;
            wire[at] = b'+';
            assert_eq!(Address::from_wire(&wire), None, "{at}");
        }
    }
}
