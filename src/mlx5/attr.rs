//! What the driver says of a device beside the verbs' attributes. Pairs with
//! `mlx5_ib_query_device_resp` and with the driver's answer to opening a context.

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

/// Asks for them.
///
/// # Errors
///
/// `EOPNOTSUPP` on a device of another driver.
#[doc(alias = "mlx5dv_query_device")]
pub fn query_device(context: &Context) -> Result<ContextAttr> {
    const VERB: &str = "query_device";
    let limits = *context.file.provider.mlx5(VERB)?.limits();
    let (_, answer) = context.file.query_device(VERB)?;
    Ok(ContextAttr { limits, raw: answer.read() })
}

impl ContextAttr {
    /// Bytes that one copy into a BlueFlame register moves at most; 0 where the machine does not
    /// combine writes, and requests are announced by doorbells only.
    pub fn blueflame_bytes(&self) -> u32 {
        self.limits.bf_reg_size / 2
    }

    /// Bytes of the largest request of a send queue.
    pub fn max_send_request(&self) -> u32 {
        self.limits.max_send_request()
    }

    /// Bytes of the largest request of a receive queue.
    pub fn max_recv_request(&self) -> u32 {
        self.limits.max_rq_desc_sz
    }

    /// Wqebbs of 64 bytes in the largest send queue.
    pub fn max_send_blocks(&self) -> u32 {
        self.limits.max_send_wqebb
    }

    /// Receives in the largest shared receive queue, one of which stays free.
    pub fn max_shared_receives(&self) -> u32 {
        self.limits.max_srq_recv_wr
    }

    /// Whether the kernel lets this context make commands to the firmware; `None` for a context that
    /// was imported, of which the kernel does not tell.
    #[doc(alias = "MLX5DV_CONTEXT_FLAGS_DEVX")]
    pub fn devx(&self) -> Option<bool> {
        self.limits.devx
    }

    /// Whether queue pairs tell which options of connections they take.
    pub fn ece(&self) -> bool {
        self.limits.ece
    }

    /// Whether completions can be stamped with a clock that counts nanoseconds.
    pub fn real_time_timestamps(&self) -> bool {
        self.limits.real_time
    }

    /// Whether completions of 128 bytes can be padded, so that the device writes them whole.
    #[doc(alias = "MLX5DV_CONTEXT_FLAGS_CQE_128B_PAD")]
    pub fn pads_completions(&self) -> bool {
        self.flags()
            .contains(mlx5_ib_query_dev_resp_flags::MLX5_IB_QUERY_DEV_RESP_FLAGS_CQE_128B_PAD)
    }

    /// How many completions the device compresses into one at most; 0 if it does not.
    #[doc(alias = "mlx5dv_cqe_comp_caps")]
    pub fn max_compressed_completions(&self) -> u32 {
        self.raw.cqe_comp_caps.max_num
    }

    /// Slowest and fastest rate that packets can be paced to, in kbit/s; `(0, 0)` if they cannot.
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
