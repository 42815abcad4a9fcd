//! Compares the layouts of mlx5 commands and contexts with mlx5_core's own description of them.
//!
//! Each byte of C describes a bit of the device: its offsets and sizes in bytes are offsets and sizes in
//! bits here.

use std::sync::Arc;

use libtest_mimic::{Completion, Failed, Trial};
use uverbs_uapi::mlx5::prm::{Info, LAYOUTS};

use crate::kernel::Kernel;

/// Layouts that the compiler leaves out: the driver names them only to compute a size or an offset.
const LEFT_OUT: &[&str] = &[
    "alloc_memic_out",
    "pcap_reg",
    "query_cq_out",
    "query_eq_out",
    "query_flow_counter_out",
    "query_hca_vport_context_out",
    "query_hca_vport_gid_out",
    "query_lag_out",
    "query_mkey_out",
    "query_qp_out",
    "query_rmp_out",
    "query_rq_out",
    "query_rqt_out",
    "query_sq_out",
    "query_tir_out",
    "query_tis_out",
    "query_vport_counter_out",
    "query_vuid_out",
    "query_xrc_srq_out",
    "traffic_counter",
];

/// The driver of virtio devices that hardware emulates.
const VDPA: &str = "mlx5_vdpa";

/// Layouts that it describes, and mlx5_core does not.
const OF_VDPA: &[&str] = &[
    "virtio_q",
    "virtio_net_q_object",
    "create_virtio_net_q_in",
    "modify_virtio_net_q_in",
    "query_virtio_net_q_out",
];

/// Items that older kernels do not have, with the last series without them.
const LATER: &[(&str, (u32, u32))] = &[
    ("tlp_dev_emu_capabilities", (7, 0)),
    ("cmd_hca_cap.tlp_device_emulation_manager", (7, 0)),
    ("cmd_hca_cap.dp_ordering_ooo_all_ud", (6, 12)),
    ("cmd_hca_cap.dp_ordering_ooo_all_uc", (6, 12)),
    ("cmd_hca_cap.dp_ordering_ooo_all_xrc", (6, 12)),
    ("cmd_hca_cap.dp_ordering_ooo_all_rc", (6, 12)),
    ("cmd_hca_cap_2.dp_ordering_force", (6, 12)),
    ("qpc.dp_ordering_force", (6, 12)),
    ("qpc.dp_ordering_1", (6, 12)),
    ("query_vport_state_out.max_tx_speed", (6, 19)),
    ("cmd_hca_cap.data_direct", (6, 1)),
    ("cmd_hca_cap.crossing_vhca_mkey", (6, 1)),
    ("cmd_hca_cap_2.query_vuid", (6, 1)),
    ("mkc.crossing_target_vhca_id", (6, 1)),
    ("create_mkey_in.data_direct", (6, 1)),
    ("query_vuid_in", (6, 1)),
    ("ib_ext_port_cntrs_grp_data_layout", (6, 1)),
    ("create_qp_in.wq_umem_offset", (6, 1)),
    ("create_qp_in.wq_umem_id", (6, 1)),
    ("wq.dbr_umem_id", (6, 1)),
    ("wq.wq_umem_id", (6, 1)),
    ("wq.wq_umem_offset", (6, 1)),
    ("query_q_counter_out.req_rnr_retries_exceeded", (6, 1)),
];

/// Items that older kernels have under another name, with the last series that does.
const RENAMED: &[(&str, &str, (u32, u32))] = &[("dest_format", "dest_format_struct", (6, 1))];

/// A field that grew into reserved bits.
struct Grown {
    field: &'static str,
    /// The last series with the old one.
    last: (u32, u32),
    /// Its place and width there.
    old: (usize, usize),
}

const GROWN: &[Grown] = &[
    Grown { field: "mkc.log_page_size", last: (6, 1), old: (0x1db, 5) },
    Grown { field: "nic_vport_context.allowed_list_size", last: (7, 1), old: (0x794, 12) },
];

/// Two trials per kernel: layouts that mlx5_core describes, and those of mlx5_vdpa.
pub(crate) fn trials(kernel: &Arc<Kernel>) -> Vec<Trial> {
    let of_module = |suffix: &str, module: &'static str, absent: String| {
        let name = format!("{} mlx5_ifc{suffix}", kernel.release);
        let kernel = Arc::clone(kernel);
        Trial::ignorable_test(name, move || {
            if !kernel.has_module(module) {
                return Ok(Completion::ignored_with(absent));
            }
            let faults = differences(&kernel, module).map_err(Failed::from)?;
            match faults.is_empty() {
                true => Ok(Completion::Completed),
                false => Err(faults.join("\n").into()),
            }
        })
    };
    let core = of_module("", "mlx5_core", "mlx5_core is not loaded".into());
    let vdpa = of_module(" of virtqueues", VDPA, format!("[vdpa] {VDPA} is not loaded"));
    vec![core, vdpa]
}

fn differences(kernel: &Kernel, module: &str) -> Result<Vec<String>, String> {
    let mut faults = Vec::new();
    for info in LAYOUTS.iter().copied().flatten() {
        if OF_VDPA.contains(&info.name) == (module == VDPA) {
            compare(kernel, info, &mut faults)?;
        }
    }
    Ok(faults)
}

fn compare(kernel: &Kernel, info: &Info, faults: &mut Vec<String>) -> Result<(), String> {
    let old =
        RENAMED.iter().find(|(name, _, last)| *name == info.name && kernel.version() <= *last);
    let name = old.map_or(info.name, |(_, name, _)| name);
    let shapes = kernel.shapes(&format!("mlx5_ifc_{name}_bits"))?;
    let later =
        |item: &str| LATER.iter().any(|(name, last)| *name == item && kernel.version() <= *last);
    if shapes.is_empty() != (LEFT_OUT.contains(&info.name) || later(name)) {
        faults.push(format!("{name}: {} descriptions in the kernel", shapes.len()));
    }
    for shape in shapes {
        if shape.size != info.bits {
            faults.push(format!("{name} has {:#x} bits, not {:#x}", shape.size, info.bits));
        }
        for field in info.fields {
            let path = format!("{name}.{}", field.name);
            let grew = GROWN.iter().find(|g| g.field == path && kernel.version() <= g.last);
            let wanted = grew.map_or((field.bit, field.width), |grown| grown.old);
            let same = |member: &&crate::kernel::Member| member.name == field.name;
            match shape.members.iter().find(same) {
                None if later(&path) => {}
                None => faults.push(format!("{path} is not in the kernel")),
                Some(member) => {
                    let (bit, width) = (member.offset_bits / 8, member.size_bits / 8);
                    if (bit, width) != wanted {
                        faults.push(format!(
                            "{path} is {width} bits at {bit:#x}, not {} at {:#x}",
                            wanted.1, wanted.0
                        ));
                    }
                }
            }
        }
    }
    Ok(())
}
