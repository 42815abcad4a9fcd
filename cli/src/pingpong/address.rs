//! The address of a queue pair, in the form of rdma-core's ping-pong programs:
//! `LLLL:QQQQQQ:PPPPPP:` and the 32 digits of a GID, all hexadecimal, with a NUL at the end.

use std::fmt;
use uverbs::{Gid, Psn, Qpn};

/// Length of the form, the NUL included.
pub(crate) const LENGTH: usize = 52;

/// The places of the four fields.
const FIELDS: [std::ops::Range<usize>; 4] = [0..4, 5..11, 12..18, 19..51];

/// The address of a queue pair.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Address {
    pub(crate) lid: u16,
    pub(crate) qpn: Qpn,
    /// The PSN of the first packet that it sends.
    pub(crate) psn: Psn,
    /// All zero for a peer that is reached by LID.
    pub(crate) gid: Gid,
}

/// The error of a message that is no address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Malformed(String);

impl Address {
    pub(crate) fn to_wire(self) -> [u8; LENGTH] {
        let gid = u128::from_be_bytes(self.gid.0);
        let text = format!("{:04x}:{:06x}:{:06x}:{gid:032x}\0", self.lid, self.qpn.0, self.psn.0);
        let mut wire = [0; LENGTH];
        // The text fits, as QPN and PSN have 24 bits.
        for (to, from) in wire.iter_mut().zip(text.bytes()) {
            *to = from;
        }
        wire
    }

    pub(crate) fn from_wire(wire: &[u8; LENGTH]) -> Result<Address, Malformed> {
        let malformed = || Malformed(format!("\"{}\"", wire.escape_ascii()));
        let separated = [4, 11, 18].iter().all(|&at| wire[at] == b':') && wire[LENGTH - 1] == 0;
        if !separated {
            return Err(malformed());
        }
        let [lid, qpn, psn, gid] = FIELDS.map(|field| hexadecimal(&wire[field]));
        match (lid, qpn, psn, gid) {
            (Some(lid), Some(qpn), Some(psn), Some(gid)) => Ok(Address {
                lid: lid as u16,
                qpn: Qpn(qpn as u32),
                psn: Psn(psn as u32),
                gid: Gid(gid.to_be_bytes()),
            }),
            _ => Err(malformed()),
        }
    }
}

fn hexadecimal(digits: &[u8]) -> Option<u128> {
    digits.iter().try_fold(0u128, |value, &digit| {
        Some(value << 4 | u128::from(char::from(digit).to_digit(16)?))
    })
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "LID {:#06x}, QPN {:#08x}, PSN {:#08x}, GID {}",
            self.lid, self.qpn.0, self.psn.0, self.gid
        )
    }
}

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} is not of the form LID:QPN:PSN:GID", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WIRE: &[u8; LENGTH] = b"00a1:000011:fed123:00000000000000000000ffff0a000001\0";

    fn address() -> Address {
        let mut gid = [0; 16];
        gid[10..].copy_from_slice(&[0xff, 0xff, 10, 0, 0, 1]);
        Address { lid: 0xa1, qpn: Qpn(0x11), psn: Psn(0xfe_d123), gid: Gid(gid) }
    }

    #[test]
    fn the_form_is_that_of_the_peers() {
        assert_eq!(&address().to_wire(), WIRE);
        assert_eq!(Address::from_wire(WIRE), Ok(address()));
    }

    #[test]
    fn the_largest_numbers_fit() {
        let address = Address {
            lid: u16::MAX,
            qpn: Qpn(0xff_ffff),
            psn: Psn(0xff_ffff),
            gid: Gid([0xff; 16]),
        };
        assert_eq!(Address::from_wire(&address.to_wire()), Ok(address));
    }

    #[test]
    fn one_wrong_byte_anywhere_is_noticed() {
        for at in 0..LENGTH {
            let mut wire = *WIRE;
            wire[at] = b'+';
            let error = Address::from_wire(&wire).unwrap_err();
            assert!(error.to_string().contains('+'), "{at}: {error}");
        }
    }

    #[test]
    fn shown_addresses_have_no_control_characters() {
        let error = Address::from_wire(&[0x1b; LENGTH]).unwrap_err().to_string();
        assert!(error.contains(r"\x1b\x1b") && !error.contains('\x1b'), "{error}");
    }
}
