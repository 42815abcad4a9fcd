//! Socket addresses in the kernel's form. Pairs with `rdma_addr_size` in `core/addr.c`.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};
use uverbs_uapi::endian::{Be16, Be32};
use uverbs_uapi::rdma_user_cm::{sockaddr_in, sockaddr_in6};
use zerocopy::{FromBytes, IntoBytes};

const AF_INET: u16 = rustix::net::AddressFamily::INET.as_raw();
const AF_INET6: u16 = rustix::net::AddressFamily::INET6.as_raw();

/// The size of `struct sockaddr_storage`.
pub(super) const STORAGE: usize = 128;

/// An address in the kernel's form, and its length.
pub(super) type Encoded = ([u8; STORAGE], u16);

pub(super) fn encode(address: &SocketAddr) -> Encoded {
    let mut storage = [0; STORAGE];
    let mut write = |bytes: &[u8]| {
        for (place, byte) in storage.iter_mut().zip(bytes) {
            *place = *byte;
        }
        bytes.len() as u16
    };
    let length = match address {
        SocketAddr::V4(v4) => write(
            sockaddr_in {
                sin_family: AF_INET,
                sin_port: Be16::new(v4.port()),
                sin_addr: v4.ip().octets(),
                __pad: [0; 8],
            }
            .as_bytes(),
        ),
        SocketAddr::V6(v6) => write(
            sockaddr_in6 {
                sin6_family: AF_INET6,
                sin6_port: Be16::new(v6.port()),
                sin6_flowinfo: Be32::new(v6.flowinfo()),
                sin6_addr: v6.ip().octets(),
                sin6_scope_id: v6.scope_id(),
            }
            .as_bytes(),
        ),
    };
    (storage, length)
}

/// An address from the kernel's form; `None` for another address family, and for an unset address.
pub(super) fn decode(storage: &[u8]) -> Option<SocketAddr> {
    let family = u16::from_ne_bytes(*storage.first_chunk()?);
    match family {
        AF_INET => {
            let (raw, _) = sockaddr_in::read_from_prefix(storage).ok()?;
            let ip = Ipv4Addr::from(raw.sin_addr);
            Some(SocketAddrV4::new(ip, raw.sin_port.get()).into())
        }
        AF_INET6 => {
            let (raw, _) = sockaddr_in6::read_from_prefix(storage).ok()?;
            let ip = Ipv6Addr::from(raw.sin6_addr);
            let (port, flow) = (raw.sin6_port.get(), raw.sin6_flowinfo.get());
            Some(SocketAddrV6::new(ip, port, flow, raw.sin6_scope_id).into())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decoding_reverses_encoding() {
        for text in ["10.0.0.1:7471", "[fe80::1%3]:18515", "[::]:0", "0.0.0.0:1"] {
            let address: SocketAddr = text.parse().unwrap();
            let (storage, length) = encode(&address);
            assert_eq!(usize::from(length), if address.is_ipv4() { 16 } else { 28 });
            assert_eq!(decode(&storage), Some(address), "{text}");
        }
    }

    #[test]
    fn ports_and_addresses_are_in_network_order() {
        let (storage, _) = encode(&"1.2.3.4:258".parse().unwrap());
        assert_eq!(storage[2..8], [1, 2, 1, 2, 3, 4]);
    }

    #[test]
    fn any_bytes_are_an_address_or_none() {
        let known = ["10.0.0.1:7471", "[fe80::1%3]:18515"];
        let known = known.map(|text| encode(&text.parse().unwrap()).0.to_vec());
        let tally = crate::tests::hostile::explore("socket addresses", 1, &known, |bytes| {
            let Some(address) = decode(bytes) else { return false };
            let (storage, _) = encode(&address);
            assert_eq!(decode(&storage), Some(address));
            true
        });
        assert!(tally.taken > 0 && tally.refused > 0, "{tally:?}");
    }

    #[test]
    fn other_families_decode_to_none() {
        assert_eq!(decode(&[0; STORAGE]), None);
        assert_eq!(decode(&[27; STORAGE]), None);
        assert_eq!(decode(&[]), None);
    }
}
