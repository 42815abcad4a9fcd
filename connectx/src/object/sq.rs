//! Send queues of Ethernet frames, of mlx5e and of raw packet queue pairs.

use uverbs_uapi::mlx5::prm::Bits;
use uverbs_uapi::mlx5::prm::rqc::sqc;

use super::rq::WqState;
use super::send_queue::SendQueue;

/// A raw send queue.
pub struct Sq {
    pub(crate) state: WqState,
    pub(crate) queue: SendQueue,
    pub(crate) umems: Vec<u32>,
    pub(crate) context: Bits<sqc, Vec<u8>>,
    pub(crate) uar: u32,
    pub(crate) pd: u32,
}
