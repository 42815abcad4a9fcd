//! Ports, their tables, and the device's limits.

use crate::env;
use crate::verdict::{Verdict, trials};
use uverbs::{
    AtomicCap, DeviceCaps, Errno, GidFilter, GidType, LinkLayer, Mtu, OdpOps, PortState, QpType,
    WindowType,
};

trials![
    port_is_active_and_plausible,
    rate_of_a_port_is_that_of_its_links,
    ports_that_do_not_exist_are_refused,
    gid_table_and_single_gids_agree,
    default_gid_is_routable_where_one_is,
    gid_is_chosen_by_interface_and_by_peer,
    port_is_in_a_partition,
    advertised_limits_hold,
    device_and_discovery_agree,
];

fn port_is_active_and_plausible() -> Verdict {
    let attr = env::open()?.query_port(env::port())?;
    assert!(attr.state == PortState::ACTIVE, "{attr:?}");
    assert!(attr.active_mtu >= Mtu::MTU_256 && attr.active_mtu <= attr.max_mtu, "{attr:?}");
    assert!(attr.gid_table_len > 0 && attr.pkey_table_len > 0 && attr.max_msg_size > 0, "{attr:?}");
    assert!(
        attr.active_speed.description().is_some() && attr.active_width.lanes().is_some(),
        "{attr:?}"
    );
    if attr.link_layer == LinkLayer::ETHERNET {
        assert!(attr.grh_required && attr.lid == 0, "{attr:?}");
    }
    Ok(())
}

/// The driver tells that of all ports that are aggregated, from Linux 7.0 on; before, it is that of the link.
fn rate_of_a_port_is_that_of_its_links() -> Verdict {
    let context = env::open()?;
    let attr = context.query_port(env::port())?;
    let speed = context.query_port_speed(env::port())?;
    let is_mlx5 = context.device().driver() == Some(uverbs::device::DriverId::MLX5);
    let tells = is_mlx5 && (env::on_fabric() || env::kernel_is_since(7, 0));
    assert_eq!(speed.of_link, !tells, "{speed:?}");
    let links = match tells && attr.link_layer == LinkLayer::ETHERNET {
        true => crate::mlx5::qp_path::aggregated_ports()?,
        false => 1,
    };
    let rate = attr.link_rate_mbps().map(|rate| u64::from(rate) * links);
    assert_eq!(Some(speed.mbps), rate, "{speed:?} of {attr:?}");
    Ok(())
}

fn ports_that_do_not_exist_are_refused() -> Verdict {
    let context = env::open()?;
    let count = context.device().port_count();
    for port in [0, 255] {
        for error in [
            context.query_port(port).map(drop).unwrap_err(),
            context.query_port_speed(port).map(drop).unwrap_err(),
            context.query_gid(port, 0).map(drop).unwrap_err(),
            context.query_pkey(port, 0).map(drop).unwrap_err(),
            context.default_gid(port).map(drop).unwrap_err(),
        ] {
            assert_eq!(error.errno(), Errno::INVAL, "{error}");
            let expected =
                format!("port {port}; {} has ports 1 to {count}", context.device().name());
            assert_eq!(error.message(), expected);
        }
    }
    Ok(())
}

fn gid_table_and_single_gids_agree() -> Verdict {
    let context = env::open()?;
    let table = context.gid_table()?;
    assert!(!table.is_empty());
    for entry in &table {
        assert_eq!(context.query_gid(entry.port, entry.index)?, *entry);
        assert!(!entry.gid.is_zero() && entry.gid_type.description().is_some(), "{entry:?}");
    }
    // Every entry of the port that the table leaves out is empty.
    let length = context.query_port(env::port())?.gid_table_len;
    for index in 0..length.min(64) {
        let listed = table.iter().any(|entry| entry.port == env::port() && entry.index == index);
        assert_eq!(context.query_gid(env::port(), index)?.gid.is_zero(), !listed, "index {index}");
    }
    let error = context.query_gid(env::port(), length).unwrap_err();
    assert_eq!(error.errno(), Errno::INVAL);
    assert!(error.message().contains(&format!("{length} entries")), "{error}");
    Ok(())
}

fn default_gid_is_routable_where_one_is() -> Verdict {
    let context = env::open()?;
    let chosen = context.default_gid(env::port())?;
    if context.query_port(env::port())?.link_layer != LinkLayer::ETHERNET {
        assert_eq!(chosen.index, 0);
        return Ok(());
    }
    let table = context.gid_table()?;
    let v2 = || table.iter().filter(|entry| entry.gid_type == GidType::ROCE_V2);
    if v2().any(|entry| entry.gid.ip().is_ipv4()) {
        assert!(chosen.gid.ip().is_ipv4(), "{chosen:?} of {table:?}");
    }
    if v2().next().is_some() {
        assert_eq!(chosen.gid_type, GidType::ROCE_V2, "{chosen:?} of {table:?}");
    }
    Ok(())
}

fn gid_is_chosen_by_interface_and_by_peer() -> Verdict {
    let context = env::open()?;
    let default = context.default_gid(env::port())?;
    let chosen = context.choose_gid(env::port(), &GidFilter::new())?;
    assert_eq!(chosen.entry, default);
    if context.query_port(env::port())?.link_layer != LinkLayer::ETHERNET {
        return Ok(());
    }
    assert!(chosen.reason.contains("RoCE"), "{chosen:?}");
    let by_interface = GidFilter::new().interface(default.ifindex);
    assert_eq!(context.choose_gid(env::port(), &by_interface)?.entry, default);
    let none = GidFilter::new().interface(u32::MAX);
    let error = context.choose_gid(env::port(), &none).unwrap_err();
    assert_eq!(error.errno(), Errno::NODATA, "{error}");
    if default.gid.ip().is_ipv4() {
        // This machine reaches its own address from that address.
        let by_peer = GidFilter::new().peer(default.gid.ip());
        let chosen = context.choose_gid(env::port(), &by_peer)?;
        assert_eq!(chosen.entry, default);
        assert!(chosen.reason.contains("is reached from"), "{chosen:?}");
    }
    Ok(())
}

fn port_is_in_a_partition() -> Verdict {
    let context = env::open()?;
    let attr = context.query_port(env::port())?;
    let key = context.query_pkey(env::port(), env::pkey_index())?;
    if attr.link_layer == LinkLayer::ETHERNET {
        // The key of the default partition, with full membership.
        assert_eq!((env::pkey_index(), key), (0, 0xffff));
    }
    assert_ne!(key & 0x7fff, 0, "{key:#x}");
    let error = context.query_pkey(env::port(), attr.pkey_table_len).unwrap_err();
    assert_eq!(error.errno(), Errno::INVAL);
    Ok(())
}

fn advertised_limits_hold() -> Verdict {
    let context = env::open()?;
    let limits = context.query_device()?;
    let pd = context.alloc_pd()?;
    assert!(context.cq_builder(limits.max_cqe + 1).build().is_err());
    let cq = context.cq_builder(1).build()?;
    let qp =
        |wr, sge| pd.qp_builder(&cq, &cq, QpType::RC).max_send_wr(wr).max_send_sge(sge).build();
    // Some devices grant more than they advertise: in some queues, or for small requests.
    assert!(qp(1, limits.max_sge.saturating_mul(16)).is_err());
    qp(1, limits.max_sge)?;
    assert!(qp(limits.max_qp_wr.saturating_mul(64), 1).is_err());
    assert!(limits.max_mr_size >= 1 << 30 && limits.page_size_cap & 4096 != 0, "{limits:?}");
    assert!(limits.max_qp_rd_atom > 0 && limits.max_qp_init_rd_atom > 0, "{limits:?}");
    assert!(limits.max_pkeys > 0 && limits.max_ah > 0 && limits.max_pd > 0, "{limits:?}");
    Ok(())
}

fn device_and_discovery_agree() -> Verdict {
    let context = env::open()?;
    let (attr, device) = (context.query_device()?, context.device());
    assert_eq!(attr.node_guid, device.node_guid());
    assert_eq!(attr.sys_image_guid, device.sys_image_guid());
    assert_eq!(attr.phys_port_cnt, device.port_count());
    if device.driver() == Some(uverbs::device::DriverId::RXE) {
        assert!(attr.caps.contains(DeviceCaps::MEM_MGT_EXTENSIONS));
        let has_windows = env::kernel_is_since(5, 14);
        let windows = context.alloc_pd()?.alloc_mw(WindowType::One);
        assert_eq!(attr.caps.contains(DeviceCaps::MEM_WINDOW), has_windows);
        assert_eq!(windows.is_ok(), has_windows, "{windows:?}");
        assert_eq!(attr.atomic_cap, AtomicCap::DEVICE);
        assert_eq!((attr.timestamp_mask, attr.core_clock_khz), (None, None));
        assert_eq!((attr.rss_caps, attr.max_dm_size), (None, 0));
        // Since Linux 6.15 soft-RoCE has it, but not for the whole address space.
        if let Some(odp) = attr.odp_caps {
            assert!(odp.rc.contains(OdpOps::SEND | OdpOps::READ) && !odp.implicit, "{odp:?}");
            assert!(odp.xrc.is_empty(), "{odp:?}");
        }
    }
    Ok(())
}
