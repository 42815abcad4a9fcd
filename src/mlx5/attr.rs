//! Attributes that mlx5's driver reports beside those of the verbs. Pairs with
//! `mlx5_ib_query_device_resp` and `mlx5_ib_alloc_ucontext_resp`.

use crate::context::Context;
use crate::error::Result;
use crate::provider::mlx5::context::Limits;
use uverbs_uapi::mlx5::context::{mlx5_ib_query_dev_resp_flags, mlx5_ib_query_device_resp};

/// Attributes of a device that only mlx5 has.
#[doc(alias = "mlx5dv_context")]
#[derive(Clone, Copy)]
pub struct ContextAttr {
    limits: Limits,
    raw: mlx5_ib_query_device_resp,
}

/// Queries the attributes that only mlx5 has.
///
/// # Errors
///
/// `EOPNOTSUPP` on a device of another driver.
#[doc(alias = "mlx5dv_query_device")]
pub fn query_device(context: &Context) -> Result<ContextAttr> {
    const VERB: &str = "query_device";
    let limits = *context.file.provider.mlx5(VERB)?.limits();
    let (_, driver_response) = context.file.query_device(VERB)?;
    Ok(ContextAttr { limits, raw: driver_response.read() })
}

impl ContextAttr {
    /// Bytes of the largest WQE that is copied into a BlueFlame register; 0 where the machine does not
    /// combine writes, and WQEs are only announced by doorbells.
    pub fn blueflame_bytes(&self) -> u32 {
        self.limits.bf_reg_size / 2
    }

    /// Bytes of the largest WQE of a send queue.
    pub fn max_send_request(&self) -> u32 {
        self.limits.max_send_request()
    }

    /// Bytes of the largest WQE of a receive queue.
    pub fn max_recv_request(&self) -> u32 {
        self.limits.max_rq_desc_sz
    }

    /// WQEBBs, of 64 bytes each, of the largest send queue.
    pub fn max_send_blocks(&self) -> u32 {
        self.limits.max_send_wqebb
    }

    /// WQEs of the largest shared receive queue, one of which stays free.
    pub fn max_shared_receives(&self) -> u32 {
        self.limits.max_srq_recv_wr
    }

    /// Whether the kernel lets this context send commands to the firmware (DEVX); `None` for an imported
    /// context, for which the kernel does not tell it.
    #[doc(alias = "MLX5DV_CONTEXT_FLAGS_DEVX")]
    pub fn devx(&self) -> Option<bool> {
        self.limits.devx
    }

    /// Whether queue pairs report their enhanced connection establishment (ECE) options.
    pub fn ece(&self) -> bool {
        self.limits.ece
    }

    /// Whether completions can have timestamps in nanoseconds of real time.
    pub fn real_time_timestamps(&self) -> bool {
        self.limits.real_time
    }

    /// Whether CQEs of 128 bytes can be padded, so that the device writes whole cache lines.
    #[doc(alias = "MLX5DV_CONTEXT_FLAGS_CQE_128B_PAD")]
    pub fn pads_completions(&self) -> bool {
        self.flags()
            .contains(mlx5_ib_query_dev_resp_flags::MLX5_IB_QUERY_DEV_RESP_FLAGS_CQE_128B_PAD)
    }

    /// Whether driver and device have [placement out of order](crate::QpBuilder::out_of_order_placement).
    pub fn out_of_order_placement(&self) -> bool {
        self.flags().contains(mlx5_ib_query_dev_resp_flags::MLX5_IB_QUERY_DEV_RESP_FLAGS_OOO_DP)
    }

    /// The most CQEs that the device compresses into one; 0 if it compresses none.
    #[doc(alias = "mlx5dv_cqe_comp_caps")]
    pub fn max_compressed_completions(&self) -> u32 {
        self.raw.cqe_comp_caps.max_num
    }

    /// The lowest and highest rate limit of a queue pair, in kbit/s; `(0, 0)` without packet pacing.
    #[doc(alias = "packet_pacing_caps")]
    pub fn pacing_kbits(&self) -> (u32, u32) {
        let caps = self.raw.packet_pacing_caps;
        (caps.qp_rate_limit_min, caps.qp_rate_limit_max)
    }

    fn flags(&self) -> mlx5_ib_query_dev_resp_flags {
        mlx5_ib_query_dev_resp_flags::from_bits_retain(self.raw.flags)
    }
}

impl std::fmt::Debug for ContextAttr {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ContextAttr")
            .field("blueflame_bytes", &self.blueflame_bytes())
            .field("max_send_request", &self.max_send_request())
            .field("max_recv_request", &self.max_recv_request())
            .field("max_send_blocks", &self.max_send_blocks())
            .field("max_shared_receives", &self.max_shared_receives())
            .field("devx", &self.devx())
            .field("ece", &self.ece())
            .finish_non_exhaustive()
    }
}
