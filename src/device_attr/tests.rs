use super::*;
use std::mem::offset_of;
use zerocopy::FromBytes;

/// A response whose bytes all differ from 0, cut off after `length`.
fn response_of(length: usize) -> DeviceAttr {
    let mut bytes = [0u8; size_of::<Raw>()];
    for (n, byte) in bytes[..length].iter_mut().enumerate() {
        *byte = n as u8 | 1;
    }
    let mut raw = Raw::read_from_bytes(&bytes).unwrap();
    raw.response_length = length as u32;
    raw.base.device_cap_flags = 1 << 20;
    DeviceAttr::new(&raw)
}

#[test]
fn fields_that_an_old_kernel_leaves_out_read_as_none() {
    let full = response_of(size_of::<Raw>());
    assert!(full.odp_caps.is_some_and(|caps| caps.xrc.bits() != 0));
    assert!(full.timestamp_mask.is_some());
    assert!(full.core_clock_khz.is_some());
    assert!(full.rss_caps.is_some());
    assert!(full.max_wq_type_rq != 0);
    assert!(!full.raw_packet_caps.is_empty());
    assert!(full.tag_matching_caps.is_some());
    assert!(full.moderation_caps.is_some());
    assert!(full.max_dm_size != 0);
    assert_ne!(full.caps, DeviceCaps::XRC);

    let least = response_of(offset_of!(Raw, odp_caps));
    assert_eq!(least.odp_caps, None);
    assert_eq!(least.timestamp_mask, None);
    assert_eq!(least.core_clock_khz, None);
    assert_eq!(least.rss_caps, None);
    assert_eq!(least.max_wq_type_rq, 0);
    assert!(least.raw_packet_caps.is_empty());
    assert_eq!(least.tag_matching_caps, None);
    assert_eq!(least.moderation_caps, None);
    assert_eq!(least.max_dm_size, 0);
    // The first part has the lower half of the capabilities.
    assert_eq!(least.caps, DeviceCaps::XRC);
}

#[test]
fn a_field_that_was_cut_in_two_is_not_believed() {
    let end = offset_of!(Raw, timestamp_mask) + 8;
    assert_eq!(response_of(end - 1).timestamp_mask, None);
    assert!(response_of(end).timestamp_mask.is_some());
    assert_eq!(response_of(end).core_clock_khz, None);
}

#[test]
fn limits_come_from_their_fields() {
    let mut raw = Raw::default();
    let base = &mut raw.base;
    base.max_qp = 1;
    base.max_qp_wr = 2;
    base.max_sge = 3;
    base.max_sge_rd = 4;
    base.max_cq = 5;
    base.max_cqe = 6;
    base.max_mr = 7;
    base.max_pd = 8;
    base.max_qp_rd_atom = 9;
    base.max_res_rd_atom = 10;
    base.max_qp_init_rd_atom = 11;
    base.max_mw = 12;
    base.max_raw_ethy_qp = 13;
    base.max_mcast_grp = 14;
    base.max_mcast_qp_attach = 15;
    base.max_total_mcast_qp_attach = 16;
    base.max_ah = 17;
    base.max_srq = 18;
    base.max_srq_wr = 19;
    base.max_srq_sge = 20;
    base.max_pkeys = 21;
    base.local_ca_ack_delay = 22;
    base.phys_port_cnt = 23;
    base.atomic_cap = 2;
    let attr = DeviceAttr::new(&raw);
    let limits = [
        attr.max_qp,
        attr.max_qp_wr,
        attr.max_sge,
        attr.max_sge_rd,
        attr.max_cq,
        attr.max_cqe,
        attr.max_mr,
        attr.max_pd,
        attr.max_qp_rd_atom,
        attr.max_res_rd_atom,
        attr.max_qp_init_rd_atom,
        attr.max_mw,
        attr.max_raw_ethy_qp,
        attr.max_mcast_grp,
        attr.max_mcast_qp_attach,
        attr.max_total_mcast_qp_attach,
        attr.max_ah,
        attr.max_srq,
        attr.max_srq_wr,
        attr.max_srq_sge,
        attr.max_pkeys.into(),
        attr.local_ca_ack_delay.into(),
        attr.phys_port_cnt,
    ];
    assert!(limits.into_iter().eq(1..=23), "{limits:?}");
    assert_eq!(attr.atomic_cap, AtomicCap::GLOBAL);
    let text = format!("{attr:?}");
    assert!(text.contains("max_srq_sge: 20") && text.contains("odp_caps: None"), "{text}");
}
