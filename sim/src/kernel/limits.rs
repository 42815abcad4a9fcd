//! Limits of a device, as its driver computes them from the firmware's capabilities.
//!
//! Pairs with `mlx5_ib_query_device` and `mlx5_ib_alloc_ucontext`.

use crate::call::Result;
use crate::driver::Driver;
use uverbs_connectx::fabric::Fabric as Switch;
use uverbs_uapi::mlx5::prm::cmd::{query_hca_cap_out, query_special_contexts_out};
use uverbs_uapi::mlx5::prm::hca_cap::cmd_hca_cap as general;
use uverbs_uapi::mlx5::prm::{Bits, opcode};

/// Limits of a device.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Limits {
    pub(super) qps: u32,
    pub(super) cqs: u32,
    pub(super) srqs: u32,
    pub(super) pds: u32,
    pub(super) mkeys: u32,
    /// WQEs of a send or receive queue.
    pub(super) wqes: u32,
    /// Receives of an SRQ; one entry more stays free.
    pub(super) srq_wr: u32,
    /// Completions of a CQ; one entry more stays free.
    pub(super) cqes: u32,
    /// Reads and atomics in flight.
    pub(super) rd_atomic: u8,
    /// The key of no memory: `mlx5_cmd_query_special_mkeys`.
    pub(super) dump_fill: Option<u32>,
    pub(crate) has_xrc: bool,
    pub(crate) has_atomics: bool,
    /// Ports of a LAG, if the driver gives each queue pair one: `mlx5_ib_lag_should_assign_affinity`.
    pub(crate) lag_ports: u64,
    /// Placement out of order: `get_dp_ooo_cap`.
    pub(crate) out_of_order: bool,
    /// Extended connection establishment.
    pub(crate) has_ece: bool,
    /// Timestamps of real time: `rt_supported` of each kind of queue.
    pub(crate) has_real_time: bool,
    /// A data-direct function: `mlx5_ib_data_direct_init`.
    pub(crate) has_data_direct: bool,
}

impl Limits {
    /// Queries the capabilities of firmware, and computes the limits.
    pub(crate) fn query(driver: &Driver, switch: &mut Switch) -> Result<Limits> {
        // `op_mod` 1: the current values of the general capabilities.
        let [high, low] = opcode::QUERY_HCA_CAP.to_be_bytes();
        let command = [high, low, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0];
        let answer = Bits::<query_hca_cap_out, _>::new(driver.execute(switch, &command)?);
        let caps = Bits::<general, _>::new(answer.span(query_hca_cap_out::capability));
        let count = |log: u64| 1u32 << log.min(31);
        Ok(Limits {
            qps: count(caps.get(general::log_max_qp)),
            cqs: count(caps.get(general::log_max_cq)),
            srqs: count(caps.get(general::log_max_srq)),
            pds: count(caps.get(general::log_max_pd)),
            mkeys: count(caps.get(general::log_max_mkey)),
            wqes: count(caps.get(general::log_max_qp_sz)),
            srq_wr: count(caps.get(general::log_max_srq_sz)) - 1,
            cqes: count(caps.get(general::log_max_cq_sz)) - 1,
            rd_atomic: count(caps.get(general::log_max_ra_res_qp).min(7)) as u8,
            dump_fill: match caps.is_set(general::dump_fill_mkey) {
                true => Some(dump_fill(driver, switch)?),
                false => None,
            },
            has_xrc: caps.is_set(general::xrc),
            has_atomics: caps.is_set(general::atomic),
            lag_ports: match caps.is_set(general::lag_tx_port_affinity) {
                true => caps.get(general::num_lag_ports),
                false => 0,
            },
            out_of_order: caps.is_set(general::dp_ordering_ooo_all_rc),
            has_ece: caps.is_set(general::ece_support),
            // Real time, or both.
            has_real_time: [general::sq_ts_format, general::rq_ts_format]
                .into_iter()
                .all(|field| matches!(caps.get(field), 1 | 2)),
            has_data_direct: caps.is_set(general::data_direct)
                && caps.is_set(general::crossing_vhca_mkey),
        })
    }
}

fn dump_fill(driver: &Driver, switch: &mut Switch) -> Result<u32> {
    let answer = driver.execute_on(switch, opcode::QUERY_SPECIAL_CONTEXTS, 0)?;
    let answer = Bits::<query_special_contexts_out, _>::new(answer);
    Ok(answer.get32(query_special_contexts_out::dump_fill_mkey))
}
