//! ICRC, the CRC of what a packet must not lose on its way: for RoCE v2 over IPv4 and IPv6.
//!
//! From `rxe_icrc_hdr` and `rxe_icrc_generate` of the kernel's `rxe_icrc.c`: the CRC-32 of Ethernet over eight bytes of
//! ones in place of the LRH, IP header, UDP header, and the packet from BTH to padding. Fields that routers change
//! count as ones: TTL or hop limit, type of service or traffic class, flow label, both checksums, and in the BTH the
//! byte with FECN and BECN. The ICRC is sent with its lowest byte first.

use crc32fast::Hasher;

const POLYNOMIAL: u32 = 0xedb8_8320;

/// The polynomials over GF(2) modulo that of the CRC: bit 31 is the coefficient of 1, bit 30 that of x.
const ONE: u32 = 1 << 31;

const fn times_x(a: u32) -> u32 {
    a >> 1 ^ if a & 1 != 0 { POLYNOMIAL } else { 0 }
}

const fn divided_by_x(a: u32) -> u32 {
    // The coefficient of 1 is set in what `times_x` adds, and nowhere else.
    if a & ONE != 0 { (a ^ POLYNOMIAL) << 1 | 1 } else { a << 1 }
}

const fn product(a: u32, mut b: u32) -> u32 {
    let (mut sum, mut bit) = (0, ONE);
    while bit != 0 {
        if a & bit != 0 {
            sum ^= b;
        }
        b = times_x(b);
        bit >>= 1;
    }
    sum
}

/// Factors that take 1, 2, 4 and so on bytes of zeros off the end of a CRC: powers of 1/x.
const UNDO: [u32; 17] = {
    let (mut undo, mut bit) = ([ONE; 17], 0);
    while bit < 8 {
        undo[0] = divided_by_x(undo[0]);
        bit += 1;
    }
    let mut at = 1;
    while at < undo.len() {
        undo[at] = product(undo[at - 1], undo[at - 1]);
        at += 1;
    }
    undo
};

/// The bits of the IPv4 identification that differ if a packet of `packet` bytes has the ICRC `found` in place of
/// `computed`; `None` if there are none: then another bit is wrong, too.
///
/// A CRC is linear: the difference of the two is that of the two bytes alone, with the zeros of everything behind them.
pub(crate) fn identification_between(
    computed: [u8; 4],
    found: [u8; 4],
    packet: usize,
) -> Option<u16> {
    /// From the identification on: that, the rest of the IP header, the UDP header.
    const FRONT: usize = 16 + 8;
    let mut difference = u32::from_le_bytes(computed) ^ u32::from_le_bytes(found);
    let behind = FRONT + packet;
    if behind >> UNDO.len() != 0 {
        return None;
    }
    for (at, undo) in UNDO.iter().enumerate() {
        if behind >> at & 1 != 0 {
            difference = product(difference, *undo);
        }
    }
    u16::try_from(difference).ok().map(u16::swap_bytes)
}

/// The IP header of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IpHeader<'a> {
    /// IPv4 without options: the only one that RoCE allows.
    V4(&'a [u8; 20]),
    /// IPv6 without extension headers.
    V6(&'a [u8; 40]),
}

/// Bytes of the BTH.
const BTH: usize = 12;
/// The byte of the BTH with FECN and BECN.
const FECN: usize = 4;

/// The ICRC of a packet: IP header, UDP header, and the bytes from BTH to padding. These are the bytes that follow the
/// padding.
pub(crate) fn icrc(ip: IpHeader<'_>, udp: &[u8; 8], packet: &[u8]) -> [u8; 4] {
    let (bth, rest) = packet.split_at(packet.len().min(BTH));
    // The LRH, the longest IP header, UDP header and BTH in one piece.
    let mut front = [0xff; 8 + 40 + 8 + BTH];
    let mut at = 8;
    let mut put = |bytes: &[u8], masked: &[usize]| {
        front[at..at + bytes.len()].copy_from_slice(bytes);
        masked.iter().for_each(|byte| front[at + byte] = 0xff);
        at += bytes.len();
    };
    match ip {
        // Type of service, TTL, checksum.
        IpHeader::V4(header) => put(header, &[1, 8, 10, 11]),
        IpHeader::V6(header) => {
            let mut header = *header;
            header[0] |= 0x0f;
            // Traffic class and flow label, behind the version; hop limit.
            put(&header, &[1, 2, 3, 7]);
        }
    }
    put(udp, &[6, 7]);
    put(bth, if bth.len() > FECN { &[FECN] } else { &[] });
    let mut crc = Hasher::new();
    crc.update(&front[..at]);
    crc.update(rest);
    crc.finalize().to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_identification_is_found_again_and_no_other_change_passes_for_one() {
        let udp = [0xc0, 0x01, 0x12, 0xb7, 0, 0, 0, 0];
        for len in [12, 16, 23, 24, 300, 4160] {
            let packet: alloc::vec::Vec<u8> = (0..len).map(|at| (at * 31) as u8).collect();
            let with = |id: u16| {
                let mut ip = [0x5a; 20];
                ip[4..6].copy_from_slice(&id.to_be_bytes());
                icrc(IpHeader::V4(&ip), &udp, &packet)
            };
            let none = with(0);
            for id in [0, 1, 0x100, 0x478, 0x8000, 0xfffe, 0xffff] {
                assert_eq!(identification_between(none, with(id), len), Some(id), "{len} bytes");
            }
            // Of random differences one in 65,536 is that of an identification.
            let mut word = 1u64;
            let passed = (0..10_000).filter(|_| {
                word = word.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                identification_between(none, ((word >> 32) as u32).to_le_bytes(), len).is_some()
            });
            assert!(passed.count() < 4);
        }
    }

    /// The CRC bit by bit, over the whole of what counts.
    fn second(bytes: &[u8]) -> [u8; 4] {
        let mut crc = u32::MAX;
        for byte in bytes {
            for bit in 0..8 {
                let carry = crc & 1 != u32::from(byte >> bit & 1);
                crc >>= 1;
                if carry {
                    crc ^= POLYNOMIAL;
                }
            }
        }
        (!crc).to_le_bytes()
    }

    #[test]
    fn the_icrc_of_a_congestion_notification_is_the_one_that_a_connectx4_sent() {
        // Captured on a ConnectX-4 Lx; scapy's tests of its layer for RoCE have the packet.
        let ip = [
            0x45, 0xc2, 0x00, 0x3c, 0x71, 0x8c, 0x40, 0x00, 0x40, 0x11, 0x91, 0x61, 10, 0, 17, 1,
            10, 0, 18, 1,
        ];
        let udp = [0x00, 0x00, 0x12, 0xb7, 0x00, 0x28, 0x00, 0x00];
        let mut packet = [0; 28];
        packet[..8].copy_from_slice(&[0x81, 0, 0xff, 0xff, 0x40, 0, 0x01, 0x18]);
        assert_eq!(icrc(IpHeader::V4(&ip), &udp, &packet), [0x82, 0xfd, 0x00, 0x2a]);
    }

    #[test]
    fn the_icrc_of_a_send_over_uc_is_the_one_on_record() {
        // Of a ConnectX as well, from the same tests. The ICRC is there a number whose first byte is sent first.
        let ip = [
            0x45, 0x01, 0x00, 0x40, 0x04, 0x78, 0x40, 0x00, 0x40, 0x11, 0xb4, 0xd5, 192, 168, 0, 7,
            192, 168, 0, 7,
        ];
        let udp = [0xc0, 0x00, 0x12, 0xb7, 0x00, 0x2c, 0xac, 0xa2];
        let mut packet = [0; 32];
        packet[..12].copy_from_slice(&[0x24, 0x60, 0xff, 0xff, 0, 0, 0, 211, 0, 0xcf, 0x17, 0x10]);
        packet[12..30].copy_from_slice(&[
            0x46, 0x30, 0x81, 0x8b, 0xe2, 0x89, 0x35, 0xd9, 0x0e, 0x9a, 0x95, 0x50, 0x54, 0x01,
            0xbe, 0x88, 0x5e, 0x50,
        ]);
        assert_eq!(icrc(IpHeader::V4(&ip), &udp, &packet), [0x78, 0xf3, 0x53, 0xf3]);
    }

    #[test]
    fn fields_that_routers_change_do_not_count_and_all_others_do() {
        let sum = |bytes: &[u8], v6: bool| {
            let udp = if v6 { 40 } else { 20 };
            let (ip, rest) = bytes.split_at(udp);
            let (udp, packet) = rest.split_first_chunk::<8>().unwrap();
            match v6 {
                true => icrc(IpHeader::V6(ip.try_into().unwrap()), udp, packet),
                false => icrc(IpHeader::V4(ip.try_into().unwrap()), udp, packet),
            }
        };
        for (v6, masked) in
            [(false, &[1, 8, 10, 11, 26, 27, 32][..]), (true, &[1, 2, 3, 7, 46, 47, 52])]
        {
            let length = if v6 { 40 } else { 20 } + 8 + 16;
            let mut bytes: alloc::vec::Vec<u8> = (0..length).map(|at| (at * 7) as u8).collect();
            bytes[0] = if v6 { 0x6f } else { 0x45 };
            let before = sum(&bytes, v6);
            let mut whole = alloc::vec![0xff; 8];
            whole.extend(&bytes);
            masked.iter().for_each(|at| whole[8 + at] = 0xff);
            assert_eq!(before, second(&whole), "IPv6: {v6}");
            for at in 0..bytes.len() {
                bytes[at] ^= 0x10;
                // The upper half of the first byte is the version, the lower one of IPv6 the traffic class.
                assert_eq!(
                    sum(&bytes, v6) == before,
                    masked.contains(&at),
                    "byte {at}, IPv6: {v6}"
                );
                bytes[at] ^= 0x10;
            }
            bytes[0] ^= 1;
            assert_eq!(sum(&bytes, v6) == before, v6);
        }
    }
}
