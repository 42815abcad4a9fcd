//! A device's limits and capabilities, as names with values.

use serde::ser::{Serialize, SerializeMap, Serializer};
use serde_json::Value;
use uverbs::DeviceAttr;

/// Limits and capabilities by the names of the library's fields, in an order that groups related
/// fields.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Limits(Vec<(&'static str, Value)>);

impl Limits {
    pub(crate) fn of(attr: &DeviceAttr) -> Self {
        let mut limits = Vec::new();
        macro_rules! numbers {
            ($($name:ident)*) => { $( limits.push((stringify!($name), attr.$name.into())); )* };
        }
        numbers! {
            fw_ver vendor_id vendor_part_id hw_ver phys_port_cnt
            max_qp max_qp_wr max_sge max_sge_rd
            max_qp_rd_atom max_qp_init_rd_atom max_res_rd_atom
            max_cq max_cqe
            max_srq max_srq_wr max_srq_sge
            max_pd max_mr max_mr_size page_size_cap max_mw max_ah max_pkeys
            max_mcast_grp max_mcast_qp_attach max_total_mcast_qp_attach max_raw_ethy_qp
            max_wq_type_rq max_dm_size local_ca_ack_delay
        }
        limits.push(("atomic_cap", attr.atomic_cap.to_string().into()));
        limits.push(("caps", names(attr.caps.iter_names().map(|(name, _)| name))));
        limits.push(("caps_bits", attr.caps.bits().into()));
        let raw_packet = attr.raw_packet_caps;
        limits.push(("raw_packet_caps", names(raw_packet.iter_names().map(|(name, _)| name))));
        limits.push(("timestamp_mask", attr.timestamp_mask.into()));
        limits.push(("core_clock_khz", attr.core_clock_khz.into()));
        let odp = attr.odp_caps;
        limits.push(("odp_implicit", odp.map(|odp| odp.implicit).into()));
        for (name, ops) in [
            ("odp_rc", odp.map(|odp| odp.rc)),
            ("odp_uc", odp.map(|odp| odp.uc)),
            ("odp_ud", odp.map(|odp| odp.ud)),
            ("odp_xrc", odp.map(|odp| odp.xrc)),
        ] {
            let ops = ops.map(|ops| names(ops.iter_names().map(|(name, _)| name)));
            limits.push((name, ops.into()));
        }
        let rss = attr.rss_caps;
        limits.push(("rss_qp_types", rss.map(|rss| rss.supported_qpts).into()));
        limits.push(("rss_max_tables", rss.map(|rss| rss.max_indirection_tables).into()));
        limits.push(("rss_max_table_size", rss.map(|rss| rss.max_indirection_table_size).into()));
        let tags = attr.tag_matching_caps;
        limits.push(("tm_rc", tags.map(|tags| tags.rc).into()));
        limits.push(("tm_max_num_tags", tags.map(|tags| tags.max_num_tags).into()));
        limits.push(("tm_max_ops", tags.map(|tags| tags.max_ops).into()));
        limits.push(("tm_max_sge", tags.map(|tags| tags.max_sge).into()));
        limits.push(("tm_max_rndv_hdr_size", tags.map(|tags| tags.max_rndv_hdr_size).into()));
        let moderation = attr.moderation_caps;
        limits.push(("cq_moderation_max_count", moderation.map(|caps| caps.max_count).into()));
        limits.push(("cq_moderation_max_us", moderation.map(|caps| caps.max_period_us).into()));
        Limits(limits)
    }

    /// Names and values, without those that the device does not have.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&'static str, String)> {
        self.0.iter().filter_map(|(name, value)| Some((*name, text(value)?)))
    }
}

/// As one object, with `null` for a value that the device does not have.
impl Serialize for Limits {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (name, value) in &self.0 {
            map.serialize_entry(name, value)?;
        }
        map.end()
    }
}

fn names<'a>(names: impl Iterator<Item = &'a str>) -> Value {
    names.map(str::to_ascii_lowercase).collect()
}

fn text(value: &Value) -> Option<String> {
    Some(match value {
        Value::Null => return None,
        Value::String(text) => text.clone(),
        Value::Array(values) if values.is_empty() => "none".to_owned(),
        Value::Array(values) => values.iter().filter_map(text).collect::<Vec<_>>().join(" "),
        other => other.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits() -> Limits {
        Limits(vec![
            ("max_qp", 16.into()),
            ("caps", names(["XRC", "SRQ_RESIZE"].into_iter())),
            ("tm_rc", Value::Null),
            ("odp_ud", names(std::iter::empty())),
        ])
    }

    #[test]
    fn programs_see_all_names() {
        let json = serde_json::to_string(&limits()).unwrap();
        let expected = r#"{"max_qp":16,"caps":["xrc","srq_resize"],"tm_rc":null,"odp_ud":[]}"#;
        assert_eq!(json, expected);
    }

    #[test]
    fn text_has_only_the_values_that_the_device_has() {
        let shown: Vec<_> = limits().iter().collect();
        let expected = [("max_qp", "16"), ("caps", "xrc srq_resize"), ("odp_ud", "none")];
        assert_eq!(shown, expected.map(|(name, text)| (name, text.to_owned())));
    }
}
