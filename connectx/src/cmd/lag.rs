//! A LAG: several ports behind one function. The command that queries it, and changes of its ports.
//!
//! Pairs with `mlx5dv_query_qp_lag_port` of libmlx5. The function is one behind a LAG that somebody else made, as a virtual
//! function is: it has no commands to make one.

use uverbs_uapi::mlx5::prm::cmd::{lagc, query_lag_out};
use uverbs_uapi::mlx5::prm::hca_cap::cmd_hca_cap;
use uverbs_uapi::mlx5::prm::{Bits, Layout};

use crate::command_error::{CommandError, refuse};
use crate::device::Device;
use crate::hca_caps::HcaCaps;

/// The number of ports of the LAG; fewer than two form none.
pub(crate) fn ports(caps: &HcaCaps) -> u64 {
    match caps.general(cmd_hca_cap::num_lag_ports) {
        1 => 0,
        ports => ports,
    }
}

/// Checks that a LAG has this port; 0 is any.
pub(crate) fn check_port(caps: &HcaCaps, port: u64) -> Result<(), CommandError> {
    let ports = caps.general(cmd_hca_cap::num_lag_ports);
    if port > ports {
        return refuse!(BadParam, "port {port} of a LAG of {ports}");
    }
    Ok(())
}

impl Device {
    /// Takes a port of the LAG behind the function up or down, counted from 1; returns whether there is such a port. Queues
    /// that are to send from a port that is down send from another one.
    pub fn set_lag_port_up(&mut self, port: u32, up: bool) -> bool {
        let has = u64::from(port) <= ports(&self.caps);
        let state = port.checked_sub(1).and_then(|at| self.port.lag_up.get_mut(at as usize));
        match state.filter(|_| has) {
            Some(state) => {
                *state = up;
                true
            }
            None => false,
        }
    }
}

pub(crate) fn query_lag(device: &Device) -> Result<Vec<u8>, CommandError> {
    if ports(&device.caps) == 0 {
        return refuse!(BadOp, "there is one port");
    }
    let mut out = Bits::<query_lag_out, _>::new(vec![0; query_lag_out::SIZE]);
    let mut context = out.sub_mut(query_lag_out::ctx);
    context.set(lagc::lag_state, 1);
    // A port that is down leaves its queues to the other one.
    let (one, two) = match device.port.lag_up {
        [true, false] => (1, 1),
        [false, true] => (2, 2),
        [true, true] | [false, false] => (1, 2),
    };
    context.set(lagc::tx_remap_affinity_1, one);
    context.set(lagc::tx_remap_affinity_2, two);
    Ok(out.into_inner())
}
