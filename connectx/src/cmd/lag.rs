//! The command that queries a LAG: several ports behind one function.
//!
//! Pairs with `mlx5dv_query_qp_lag_port` of libmlx5. The function is one behind a LAG that somebody else made, as a virtual
//! function is: it has no commands to make one.

use uverbs_uapi::mlx5::prm::cmd::{lagc, query_lag_out};
use uverbs_uapi::mlx5::prm::hca_cap::cmd_hca_cap;
use uverbs_uapi::mlx5::prm::{Bits, Layout};

use crate::command_error::{CommandError, refuse};
use crate::device::Device;
use crate::hca_caps::HcaCaps;

/// Checks that a LAG has this port; 0 is any.
pub(crate) fn check_port(caps: &HcaCaps, port: u64) -> Result<(), CommandError> {
    let ports = caps.general(cmd_hca_cap::num_lag_ports);
    if port > ports {
        return refuse!(BadParam, "port {port} of a LAG of {ports}");
    }
    Ok(())
}

pub(crate) fn query_lag(device: &Device) -> Result<Vec<u8>, CommandError> {
    if device.caps.general(cmd_hca_cap::num_lag_ports) < 2 {
        return refuse!(BadOp, "there is one port");
    }
    let mut out = Bits::<query_lag_out, _>::new(vec![0; query_lag_out::SIZE]);
    let mut context = out.sub_mut(query_lag_out::ctx);
    context.set(lagc::lag_state, 1);
    // Both ports are up, so that each sends what was meant for it.
    context.set(lagc::tx_remap_affinity_1, 1);
    context.set(lagc::tx_remap_affinity_2, 2);
    Ok(out.into_inner())
}
