//! Ports: state, identifiers, keys.

use crate::env;
use crate::pair::PORT;
use crate::verdict::{Verdict, trials};
use uverbs::{Errno, GidType, LinkLayer, PortState};

trials![
    port_is_active,
    port_that_is_not_there,
    identifiers_agree_with_their_table,
    empty_identifier,
    identifier_beyond_the_table,
    partition_keys,
    default_identifier_is_routable,
];

fn port_is_active() -> Verdict {
    let port = env::open()?.query_port(PORT)?;
    assert_eq!(port.state, PortState::ACTIVE, "{port:?}");
    let (active, max) = (port.active_mtu.bytes(), port.max_mtu.bytes());
    assert!(active >= Some(256) && active <= max && max <= Some(4096), "{port:?}");
    assert!(port.gid_table_len > 0 && port.pkey_table_len > 0 && port.max_msg_size > 0, "{port:?}");
    if port.link_layer == LinkLayer::ETHERNET {
        assert_eq!((port.lid, port.sm_lid), (0, 0), "{port:?}");
    }
    Ok(())
}

fn port_that_is_not_there() -> Verdict {
    let context = env::open()?;
    for port in [0, context.device().port_count() as u8 + 1, u8::MAX] {
        let error = context.query_port(port).unwrap_err();
        assert_eq!(error.errno(), Errno::INVAL, "{error:?}");
        assert!(error.message().contains(&format!("port {port}")), "{error}");
        assert!(context.query_gid(port, 0).is_err());
        assert!(context.query_pkey(port, 0).is_err());
    }
    Ok(())
}

fn identifiers_agree_with_their_table() -> Verdict {
    let context = env::open()?;
    let table = context.gid_table()?;
    assert!(!table.is_empty());
    for entry in table {
        assert!(!entry.gid.is_zero(), "an empty entry is listed");
        assert!((1..=context.device().port_count()).contains(&entry.port), "{entry:?}");
        let known = [GidType::IB, GidType::ROCE_V1, GidType::ROCE_V2];
        assert!(known.contains(&entry.gid_type), "{entry:?}");
        assert_eq!(context.query_gid(entry.port as u8, entry.index)?, entry);
    }
    Ok(())
}

fn empty_identifier() -> Verdict {
    let context = env::open()?;
    let length = context.query_port(PORT)?.gid_table_len;
    let used: Vec<u32> = context.gid_table()?.iter().map(|entry| entry.index).collect();
    if let Some(empty) = (0..length).find(|index| !used.contains(index)) {
        assert!(context.query_gid(PORT, empty)?.gid.is_zero());
    }
    Ok(())
}

fn identifier_beyond_the_table() -> Verdict {
    let context = env::open()?;
    let length = context.query_port(PORT)?.gid_table_len;
    for index in [length, u32::MAX] {
        let error = context.query_gid(PORT, index).unwrap_err();
        assert_eq!(error.errno(), Errno::INVAL, "{error:?}");
    }
    Ok(())
}

fn partition_keys() -> Verdict {
    let context = env::open()?;
    let length = context.query_port(PORT)?.pkey_table_len;
    // The default partition, as a full member.
    assert_eq!(context.query_pkey(PORT, 0)?, 0xffff);
    let error = context.query_pkey(PORT, length).unwrap_err();
    assert_eq!(error.errno(), Errno::INVAL, "{error:?}");
    Ok(())
}

fn default_identifier_is_routable() -> Verdict {
    let context = env::open()?;
    let chosen = context.default_gid(PORT)?;
    let table = context.gid_table()?;
    assert!(table.contains(&chosen), "{chosen:?}");
    if table.iter().any(|entry| entry.port == PORT.into() && !entry.gid.is_link_local()) {
        assert!(!chosen.gid.is_link_local(), "{chosen:?} was preferred to a routable one");
    }
    Ok(())
}
