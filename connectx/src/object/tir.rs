//! Transport interface receive (TIR): the receive queues of the frames of a flow.

use uverbs_uapi::mlx5::prm::Bits;
use uverbs_uapi::mlx5::prm::rqc::tirc;

/// `disp_type` values.
pub(crate) const DIRECT: u64 = 0;
pub(crate) const INDIRECT: u64 = 1;

/// Hash functions, `MLX5_RX_HASH_FN_*`. mlx5e names the first one for tables of one queue.
pub(crate) mod hash {
    pub(crate) const INVERTED_XOR8: u64 = 1;
    pub(crate) const TOEPLITZ: u64 = 2;
}

/// A TIR.
pub struct Tir {
    pub(crate) context: Bits<tirc, Vec<u8>>,
}
