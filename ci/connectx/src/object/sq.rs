//! Send queues of Ethernet frames, of mlx5e and of raw packet queue pairs.

use uverbs_uapi::mlx5::prm::Bits;
use uverbs_uapi::mlx5::prm::rqc::sqc;

use super::rq::State;
use super::send_queue::SendRing;

/// A raw send queue.
pub struct Sq {
    pub(crate) state: State,
    pub(crate) ring: SendRing,
    pub(crate) umems: Vec<u32>,
    pub(crate) context: Bits<sqc, Vec<u8>>,
    pub(crate) uar: u32,
    pub(crate) pd: u32,
}
