//! Ethernet frames: their headers, and the offloads that change them.
//!
//! Pairs with the flags of the Ethernet segment for sends, and with flow tables and CQEs for
//! receives. A guest wrote the frame, so the device trusts no length in it.

use uverbs_uapi::mlx5::prm::Bits;
use uverbs_uapi::mlx5::prm::flow::{
    fte_match_param, fte_match_set_lyr_2_4 as layer, fte_match_set_misc,
};

use crate::chunks::chunks;

const VLAN: u16 = 0x8100;
const SERVICE_VLAN: u16 = 0x88a8;
const IPV4: u16 = 0x0800;
const IPV6: u16 = 0x86dd;
pub(crate) const TCP: u8 = 6;
pub(crate) const UDP: u8 = 17;

/// The headers of a frame.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FrameHeaders {
    /// Offset of the network header, and its version; 0 if it is neither IPv4 nor IPv6.
    pub(crate) network: usize,
    pub(crate) version: u8,
    /// Offset and protocol of a TCP or UDP header, if the frame is no fragment.
    pub(crate) transport: Option<(usize, u8)>,
    fragment: bool,
    protocol: u8,
    vlan: Option<u16>,
    /// Whether the VLAN tag is a service tag (802.1ad).
    service: bool,
    ethertype: u16,
}

fn half(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// The Internet checksum of `bytes`, continued from `sum`.
pub(crate) fn checksum(bytes: &[u8], sum: u32) -> u16 {
    let words = chunks::<2>(bytes).iter().map(|word| u64::from(u16::from_be_bytes(*word)));
    let mut sum = u64::from(sum) + words.sum::<u64>();
    if bytes.len() % 2 != 0 {
        sum += bytes.last().map_or(0, |odd| u64::from(*odd) << 8);
    }
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

impl FrameHeaders {
    /// Finds the headers of a frame.
    pub(crate) fn find(frame: &[u8]) -> Self {
        let mut headers = Self::default();
        let Some(mut ethertype) = half(frame, 12) else { return headers };
        headers.network = 14;
        if matches!(ethertype, VLAN | SERVICE_VLAN) {
            headers.service = ethertype == SERVICE_VLAN;
            headers.vlan = half(frame, 14);
            ethertype = half(frame, 16).unwrap_or(0);
            headers.network = 18;
        }
        headers.ethertype = ethertype;
        let network = frame.get(headers.network..).unwrap_or(&[]);
        let next = match ethertype {
            IPV4 if network.len() >= 20 => {
                headers.version = 4;
                headers.fragment = half(network, 6).unwrap_or(0) & 0x3fff != 0;
                headers.protocol = network[9];
                usize::from(network[0] & 0xf) * 4
            }
            IPV6 if network.len() >= 40 => {
                headers.version = 6;
                headers.protocol = network[6];
                40
            }
            _ => return headers,
        };
        let header = match headers.protocol {
            TCP => 20,
            UDP => 8,
            _ => return headers,
        };
        if !headers.fragment && network.len() >= next + header {
            headers.transport = Some((headers.network + next, headers.protocol));
        }
        headers
    }

    /// The frame as match parameters of flow tables.
    pub(crate) fn as_match(&self, frame: &[u8]) -> [u8; 512] {
        let mut bits = Bits::<fte_match_param, _>::new([0; 512]);
        let mut outer = bits.sub_mut(fte_match_param::outer_headers);
        let word = |at: usize| {
            u64::from(half(frame, at).unwrap_or(0)) << 16
                | u64::from(half(frame, at + 2).unwrap_or(0))
        };
        outer.set(layer::dmac_47_16, word(0));
        outer.set(layer::dmac_15_0, half(frame, 4).unwrap_or(0).into());
        outer.set(layer::smac_47_16, word(6));
        outer.set(layer::smac_15_0, half(frame, 10).unwrap_or(0).into());
        outer.set(layer::ethertype, self.ethertype.into());
        if let Some(tag) = self.vlan {
            outer.set(if self.service { layer::svlan_tag } else { layer::cvlan_tag }, 1);
            outer.set(layer::first_vid, u64::from(tag & 0xfff));
            outer.set(layer::first_cfi, u64::from(tag >> 12 & 1));
            outer.set(layer::first_prio, u64::from(tag >> 13));
        }
        outer.set(layer::ip_version, self.version.into());
        outer.set(layer::ip_protocol, self.protocol.into());
        outer.set(layer::frag, self.fragment.into());
        let network = frame.get(self.network..).unwrap_or(&[]);
        let mut addresses = |from: usize, len: usize| {
            let mut source = [0; 16];
            let mut destination = [0; 16];
            if let Some(bytes) = network.get(from..from + 2 * len) {
                source[16 - len..].copy_from_slice(&bytes[..len]);
                destination[16 - len..].copy_from_slice(&bytes[len..]);
            }
            outer.set_span(layer::src_ipv4_src_ipv6, &source);
            outer.set_span(layer::dst_ipv4_dst_ipv6, &destination);
        };
        let label = if self.version == 6 { word(self.network) & 0xf_ffff } else { 0 };
        match self.version {
            4 => addresses(12, 4),
            6 => addresses(8, 16),
            _ => {}
        }
        let (class, ttl) = match (self.version, network) {
            (4, [_, class, _, _, _, _, _, _, ttl, ..]) => (*class, *ttl),
            (6, [first, second, _, _, _, _, _, ttl, ..]) => (first << 4 | second >> 4, *ttl),
            _ => (0, 0),
        };
        outer.set(layer::ip_dscp, u64::from(class >> 2));
        outer.set(layer::ip_ecn, u64::from(class & 3));
        outer.set(layer::ttl_hoplimit, ttl.into());
        if let Some((at, protocol)) = self.transport {
            let source = half(frame, at).unwrap_or(0).into();
            let destination = half(frame, at + 2).unwrap_or(0).into();
            let (from, to) = if protocol == TCP {
                (layer::tcp_sport, layer::tcp_dport)
            } else {
                (layer::udp_sport, layer::udp_dport)
            };
            outer.set(from, source);
            outer.set(to, destination);
            if protocol == TCP {
                let flags = half(frame, at + 12).unwrap_or(0) & 0x1ff;
                outer.set(layer::tcp_flags, flags.into());
            }
        }
        let mut rest = bits.sub_mut(fte_match_param::misc_parameters);
        rest.set(fte_match_set_misc::outer_ipv6_flow_label, label);
        bits.into_inner()
    }

    /// Whether a mask selects only fields that [`FrameHeaders::as_match`] fills in.
    pub(crate) fn covers_mask(mask: &[u8]) -> bool {
        let mut known = Bits::<fte_match_param, _>::new([0; 512]);
        let mut outer = known.sub_mut(fte_match_param::outer_headers);
        for field in [
            layer::smac_47_16,
            layer::smac_15_0,
            layer::ethertype,
            layer::dmac_47_16,
            layer::dmac_15_0,
            layer::first_prio,
            layer::first_cfi,
            layer::first_vid,
            layer::ip_protocol,
            layer::ip_dscp,
            layer::ip_ecn,
            layer::cvlan_tag,
            layer::svlan_tag,
            layer::frag,
            layer::ip_version,
            layer::tcp_flags,
            layer::tcp_sport,
            layer::tcp_dport,
            layer::ttl_hoplimit,
            layer::udp_sport,
            layer::udp_dport,
        ] {
            outer.set(field, field.max());
        }
        outer.set_span(layer::src_ipv4_src_ipv6, &[0xff; 16]);
        outer.set_span(layer::dst_ipv4_dst_ipv6, &[0xff; 16]);
        let label = fte_match_set_misc::outer_ipv6_flow_label;
        known.sub_mut(fte_match_param::misc_parameters).set(label, label.max());
        mask.iter().zip(known.into_inner()).all(|(mask, known)| mask & !known == 0)
    }

    /// The checksum of the pseudo header for a transport protocol header and data of `len` bytes.
    fn pseudo(&self, frame: &[u8], protocol: u8, len: usize) -> u32 {
        let range = if self.version == 4 { 12..20 } else { 8..40 };
        let addresses = frame.get(self.network..).and_then(|n| n.get(range)).unwrap_or(&[]);
        u32::from(!checksum(addresses, 0)) + u32::from(protocol) + len as u32
    }

    /// Fills in the checksum of an IPv4 header.
    pub(crate) fn fill_network_checksum(&self, frame: &mut [u8]) {
        if self.version != 4 {
            return;
        }
        let end = self.transport.map_or(self.network + 20, |(at, _)| at);
        let Some(header) = frame.get_mut(self.network..end) else { return };
        if header.len() >= 20 {
            header[10..12].fill(0);
            let sum = checksum(header, 0);
            header[10..12].copy_from_slice(&sum.to_be_bytes());
        }
    }

    /// Fills in the checksum of a TCP or UDP header.
    pub(crate) fn fill_transport_checksum(&self, frame: &mut [u8]) {
        let Some((at, protocol)) = self.transport else { return };
        let place = at + if protocol == TCP { 16 } else { 6 };
        let Some(field) = frame.get_mut(place..place + 2) else { return };
        field.fill(0);
        let sum = checksum(&frame[at..], self.pseudo(frame, protocol, frame.len() - at));
        let sum = if sum == 0 && protocol == UDP { 0xffff } else { sum };
        frame[place..place + 2].copy_from_slice(&sum.to_be_bytes());
    }

    /// Whether the checksums of network and transport header are right.
    pub(crate) fn checksums_hold(&self, frame: &[u8]) -> (bool, bool) {
        let network = match self.version {
            4 => {
                let len = usize::from(frame[self.network] & 0xf) * 4;
                let header = frame.get(self.network..self.network + len);
                header.is_some_and(|header| checksum(header, 0) == 0)
            }
            6 => true,
            _ => false,
        };
        let transport = self.transport.is_some_and(|(at, protocol)| {
            // Short frames are padded; the network header has the real length.
            let total = half(frame, self.network + if self.version == 4 { 2 } else { 4 });
            let total = usize::from(total.unwrap_or(0));
            let end = self.network + if self.version == 4 { total } else { total + 40 };
            let Some(segment) = frame.get(at..end) else { return false };
            let none = protocol == UDP && half(segment, 6) == Some(0);
            none || checksum(segment, self.pseudo(frame, protocol, segment.len())) == 0
        });
        (network, transport)
    }

    /// The checksum of everything from the network header on, as the CQE reports it. Padding after
    /// the packet does not count.
    pub(crate) fn sum(&self, frame: &[u8]) -> u16 {
        let all = frame.get(self.network..).unwrap_or(&[]);
        let len = match self.version {
            4 => half(all, 2).map(usize::from),
            6 => half(all, 4).map(|payload| usize::from(payload) + 40),
            _ => None,
        };
        !checksum(len.and_then(|len| all.get(..len)).unwrap_or(all), 0)
    }

    /// Cuts a frame into LSO segments of at most `mss` bytes of data each, behind headers of
    /// `header` bytes.
    pub(crate) fn segment(&self, frame: &[u8], header: usize, mss: usize) -> Vec<Vec<u8>> {
        let Some((at, protocol)) = self.transport else { return vec![] };
        let Some((head, data)) = frame.split_at_checked(header) else { return vec![] };
        if mss == 0 || header < at + if protocol == TCP { 20 } else { 8 } {
            return vec![];
        }
        let word = |bytes: &[u8], at: usize| {
            u32::from(half(bytes, at).unwrap_or(0)) << 16
                | u32::from(half(bytes, at + 2).unwrap_or(0))
        };
        let count = data.len().div_ceil(mss).max(1);
        let mut segments = Vec::new();
        for (number, part) in data.chunks(mss).enumerate() {
            let mut segment = head.to_vec();
            segment.extend(part);
            let mut put = |at: usize, bytes: &[u8]| {
                segment[at..at + bytes.len()].copy_from_slice(bytes);
            };
            if self.version == 4 {
                let total = (header - self.network + part.len()) as u16;
                let id = half(head, self.network + 4).unwrap_or(0).wrapping_add(number as u16);
                put(self.network + 2, &total.to_be_bytes());
                put(self.network + 4, &id.to_be_bytes());
            } else {
                let total = (header - self.network - 40 + part.len()) as u16;
                put(self.network + 4, &total.to_be_bytes());
            }
            if protocol == TCP {
                let sequence = word(head, at + 4).wrapping_add((number * mss) as u32);
                put(at + 4, &sequence.to_be_bytes());
                if number + 1 < count {
                    // Only the last segment keeps FIN and PSH.
                    let flags = head[at + 13] & !0x09;
                    put(at + 13, &[flags]);
                }
            } else {
                put(at + 4, &((header - at + part.len()) as u16).to_be_bytes());
            }
            segments.push(segment);
        }
        segments
    }

    /// Types of the network and transport header, as in a CQE.
    pub(crate) fn header_types(&self) -> u8 {
        let network = match self.version {
            4 => 2,
            6 => 1,
            _ => 0,
        };
        let transport = match self.transport {
            Some((_, TCP)) => 1,
            Some((_, UDP)) => 2,
            _ => 0,
        };
        transport << 4 | network << 2
    }

    /// The selected header fields: source and destination address, then ports.
    fn hashed(&self, frame: &[u8], fields: u64, symmetric: bool) -> Vec<u8> {
        let mut input: Vec<u8> = Vec::new();
        // Sorting the two ends makes the hash equal for both directions of a flow.
        let order = |input: &mut Vec<u8>, from: usize, len: usize| {
            if let Some(ends) =
                input.get_mut(from..).filter(|ends| symmetric && ends.len() == 2 * len)
            {
                let (source, destination) = ends.split_at_mut(len);
                if source > destination {
                    source.swap_with_slice(destination);
                }
            }
        };
        let network = frame.get(self.network..).unwrap_or(&[]);
        let (from, len) = if self.version == 4 { (12, 4) } else { (8, 16) };
        if self.version != 0 {
            for (bit, at) in [(0, from), (1, from + len)] {
                if fields >> bit & 1 != 0 {
                    input.extend(network.get(at..at + len).unwrap_or(&[]));
                }
            }
            order(&mut input, 0, len);
        }
        let ports = input.len();
        if let Some((at, _)) = self.transport {
            for (bit, at) in [(2, at), (3, at + 2)] {
                if fields >> bit & 1 != 0 {
                    input.extend(frame.get(at..at + 2).unwrap_or(&[]));
                }
            }
            order(&mut input, ports, 2);
        }
        input
    }

    /// The inverted XOR of the bytes of the selected header fields.
    pub(crate) fn xor_hash(&self, frame: &[u8], fields: u64, symmetric: bool) -> u32 {
        let bytes = self.hashed(frame, fields, symmetric);
        (!bytes.into_iter().fold(0, |sum, byte| sum ^ byte)).into()
    }

    /// The Toeplitz hash of the selected header fields.
    pub(crate) fn toeplitz_hash(
        &self,
        frame: &[u8],
        fields: u64,
        key: &[u8],
        symmetric: bool,
    ) -> u32 {
        let input = self.hashed(frame, fields, symmetric);
        let bit_of_key =
            |at: usize| key.get(at / 8).is_some_and(|byte| byte << (at % 8) & 0x80 != 0);
        let mut window = (0..32).fold(0u32, |sum, at| sum << 1 | u32::from(bit_of_key(at)));
        let mut hash = 0;
        for (at, byte) in input.iter().enumerate() {
            for bit in 0..8 {
                if byte << bit & 0x80 != 0 {
                    hash ^= window;
                }
                window = window << 1 | u32::from(bit_of_key(at * 8 + bit + 32));
            }
        }
        hash
    }

    /// Removes the VLAN tag of a frame.
    pub(crate) fn strip_vlan(&self, frame: &mut Vec<u8>) -> Option<u16> {
        let tag = self.vlan.filter(|_| frame.len() >= 18 && !self.service)?;
        frame.drain(12..16);
        Some(tag)
    }
}

/// Inserts a VLAN tag into a frame.
pub(crate) fn insert_vlan(frame: &mut Vec<u8>, tag: u16) {
    if frame.len() >= 12 {
        let bytes = [VLAN.to_be_bytes(), tag.to_be_bytes()].concat();
        frame.splice(12..12, bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tcp(data: &[u8]) -> Vec<u8> {
        let mut frame = vec![0; 54];
        frame[12..14].copy_from_slice(&IPV4.to_be_bytes());
        frame[14] = 0x45;
        frame[16..18].copy_from_slice(&(40 + data.len() as u16).to_be_bytes());
        frame[23] = TCP;
        frame[26..34].copy_from_slice(&[10, 0, 0, 1, 10, 0, 0, 2]);
        frame[34..38].copy_from_slice(&[0, 80, 1, 0]);
        frame[46] = 0x50;
        frame[47] = 0x19;
        frame.extend(data);
        frame
    }

    #[test]
    fn checksum_matches_rfc_1071() {
        assert_eq!(checksum(&[0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7], 0), !0xddf2);
    }

    #[test]
    fn lso_segments_carry_all_data_with_valid_checksums() {
        let data: Vec<u8> = (0..2500u32).map(|n| n as u8).collect();
        let frame = tcp(&data);
        let headers = FrameHeaders::find(&frame);
        assert_eq!(headers.transport, Some((34, TCP)));
        let segments = headers.segment(&frame, 54, 1000);
        assert_eq!(segments.iter().map(Vec::len).collect::<Vec<_>>(), [1054, 1054, 554]);
        let mut back = vec![];
        for (number, mut segment) in segments.into_iter().enumerate() {
            let headers = FrameHeaders::find(&segment);
            headers.fill_network_checksum(&mut segment);
            headers.fill_transport_checksum(&mut segment);
            assert_eq!(headers.checksums_hold(&segment), (true, true));
            assert_eq!(segment[38..42], (number as u32 * 1000).to_be_bytes());
            assert_eq!(segment[47], if number == 2 { 0x19 } else { 0x10 });
            back.extend_from_slice(&segment[54..]);
            segment[60] ^= 1;
            assert_eq!(headers.checksums_hold(&segment), (true, false));
        }
        assert_eq!(back, data);
    }

    #[test]
    fn the_cqe_checksum_covers_the_packet_but_not_its_padding() {
        let mut frame = tcp(b"odd");
        let headers = FrameHeaders::find(&frame);
        let sum = headers.sum(&frame);
        assert_eq!(sum, !checksum(&frame[14..], 0));
        frame.extend([0x55; 9]);
        assert_eq!(headers.sum(&frame), sum);
        frame[56] ^= 1;
        assert_ne!(headers.sum(&frame), sum);
    }

    /// The first row of Microsoft's table of Toeplitz hashes.
    #[test]
    fn toeplitz_and_xor_hash_of_a_known_frame() {
        const KEY: [u8; 40] = [
            0x6d, 0x5a, 0x56, 0xda, 0x25, 0x5b, 0x0e, 0xc2, 0x41, 0x67, 0x25, 0x3d, 0x43, 0xa3,
            0x8f, 0xb0, 0xd0, 0xca, 0x2b, 0xcb, 0xae, 0x7b, 0x30, 0xb4, 0x77, 0xcb, 0x2d, 0xa3,
            0x80, 0x30, 0xf2, 0x0c, 0x6a, 0x42, 0xb7, 0x3b, 0xbe, 0xac, 0x01, 0xfa,
        ];
        let mut frame = tcp(b"");
        frame[26..34].copy_from_slice(&[66, 9, 149, 187, 161, 142, 100, 80]);
        frame[34..36].copy_from_slice(&2794u16.to_be_bytes());
        frame[36..38].copy_from_slice(&1766u16.to_be_bytes());
        let headers = FrameHeaders::find(&frame);
        assert_eq!(headers.toeplitz_hash(&frame, 0b1111, &KEY, false), 0x51cc_c178);
        assert_eq!(headers.toeplitz_hash(&frame, 0b0011, &KEY, false), 0x323e_8fc2);
        // 66 ^ 9 ^ 149 ^ 187 ^ 161 ^ 142 ^ 100 ^ 80.
        assert_eq!(headers.xor_hash(&frame, 0b0011, false), 0xff ^ 0x7e);
        assert_eq!(headers.xor_hash(&frame, 0, true), 0xff);
    }

    #[test]
    fn the_symmetric_hash_is_equal_in_both_directions() {
        const KEY: [u8; 40] = [0x6d; 40];
        let key: Vec<u8> = KEY.iter().zip(0..).map(|(byte, at)| byte ^ at).collect();
        let one = tcp(b"");
        let mut other = one.clone();
        other[26..30].copy_from_slice(&one[30..34]);
        other[30..34].copy_from_slice(&one[26..30]);
        other[34..36].copy_from_slice(&one[36..38]);
        other[36..38].copy_from_slice(&one[34..36]);
        let hash = |frame: &[u8], symmetric| {
            FrameHeaders::find(frame).toeplitz_hash(frame, 0b1111, &key, symmetric)
        };
        assert_ne!(hash(&one, false), hash(&other, false));
        assert_eq!(hash(&one, true), hash(&other, true));
    }

    #[test]
    fn every_header_field_that_flow_tables_compare_is_filled_in() {
        let mut frame = tcp(b"");
        frame[15] = 46 << 2 | 1;
        frame[22] = 33;
        insert_vlan(&mut frame, 0x2005);
        let outer = |frame: &[u8], field| {
            let bits = Bits::<fte_match_param, _>::new(FrameHeaders::find(frame).as_match(frame));
            bits.sub(fte_match_param::outer_headers).get(field)
        };
        assert_eq!(outer(&frame, layer::ip_dscp), 46);
        assert_eq!(outer(&frame, layer::ip_ecn), 1);
        assert_eq!(outer(&frame, layer::ttl_hoplimit), 33);
        assert_eq!((outer(&frame, layer::cvlan_tag), outer(&frame, layer::svlan_tag)), (1, 0));
        frame[12..14].copy_from_slice(&SERVICE_VLAN.to_be_bytes());
        assert_eq!((outer(&frame, layer::cvlan_tag), outer(&frame, layer::svlan_tag)), (0, 1));
        assert_eq!((outer(&frame, layer::first_vid), outer(&frame, layer::ip_dscp)), (5, 46));
        let mut mask = vec![0; 512];
        assert!(FrameHeaders::covers_mask(&mask));
        for (at, bits, filled) in
            [(0, 0xff, true), (0x18, 0xff, false), (0x40, 1, false), (0x1ff, 1, false)]
        {
            mask[at] = bits;
            assert_eq!(FrameHeaders::covers_mask(&mask), filled, "{at:#x}");
            mask[at] = 0;
        }
    }

    #[test]
    fn a_truncated_frame_has_no_transport_header() {
        for len in 0..60 {
            let frame = &tcp(b"x")[..len.min(55)];
            let headers = FrameHeaders::find(frame);
            assert_eq!(headers.transport.is_some(), len >= 54);
            headers.as_match(frame);
            assert!(headers.segment(frame, 2000, 0).is_empty());
        }
        let mut frame = tcp(b"x");
        frame[14] = 0x4f;
        assert_eq!(FrameHeaders::find(&frame).transport, None);
    }

    #[test]
    fn a_vlan_tag_is_inserted_and_stripped() {
        let mut frame = tcp(b"hello");
        insert_vlan(&mut frame, 0x2005);
        let headers = FrameHeaders::find(&frame);
        assert_eq!((headers.network, headers.vlan), (18, Some(0x2005)));
        assert_eq!(headers.strip_vlan(&mut frame), Some(0x2005));
        assert_eq!(frame, tcp(b"hello"));
    }
}
