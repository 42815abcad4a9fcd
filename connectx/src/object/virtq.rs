//! Virtio network queues (VIRTIO_NET_Q general objects).

use uverbs_uapi::mlx5::prm::Bits;
use uverbs_uapi::mlx5::prm::virtio::{state, virtio_net_q_object};

use crate::command_error::{CommandError, refuse};

/// `general_obj_types` bit of the object; mlx5_ib offers no VAR pages without it.
pub(crate) const GENERAL_OBJECT: u64 = 1 << uverbs_uapi::mlx5::prm::virtio::OBJ_TYPE_VIRTIO_NET_Q;
/// The most queues of a function. Their indices are below it.
pub(crate) const MOST: u32 = 256;
/// Bytes that each of the three umems of a queue needs: for each entry of the queue, and beyond. The device keeps nothing
/// there.
pub(crate) const UMEM_BYTES: [(u64, u64); 3] = [(128, 4096), (128, 4096), (64, 4096)];

/// `VIRTIO_NET_Q_OBJECT_STATE`
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VirtqState {
    /// After creation.
    Init = state::INIT as isize,
    /// The device serves the queue.
    Ready = state::RDY as isize,
    /// The device has stopped.
    Suspended = state::SUSPEND as isize,
    /// The device found a fault in the queue.
    Error = state::ERR as isize,
}

impl VirtqState {
    /// Checks a change of state by command.
    pub(crate) fn change(self, to: u64) -> Result<Self, CommandError> {
        match (self, to) {
            (Self::Init, state::RDY) => Ok(Self::Ready),
            (Self::Ready, state::SUSPEND) => Ok(Self::Suspended),
            _ => refuse!(BadResourceState, "a virtqueue cannot go from {self:?} to state {to}"),
        }
    }
}

/// The rings of a split virtqueue, by addresses in its mkey.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rings {
    /// log2 of the entries.
    pub(crate) log_size: u32,
    pub(crate) descriptors: u64,
    pub(crate) available: u64,
    pub(crate) used: u64,
    pub(crate) key: u32,
    pub(crate) pd: u32,
}

/// A virtio network queue.
pub struct Virtq {
    pub(crate) state: VirtqState,
    pub(crate) context: Bits<virtio_net_q_object, Vec<u8>>,
    /// Its number in its virtio device, which a doorbell holds. Even ones receive, odd ones send.
    pub(crate) index: u16,
    pub(crate) rings: Rings,
    /// Bytes of the header in front of each frame, `struct virtio_net_hdr` or `virtio_net_hdr_v1`.
    pub(crate) header: usize,
    pub(crate) tis: u32,
    /// The next entry of the available ring to take, and of the used ring to write.
    pub(crate) next_available: u16,
    pub(crate) next_used: u16,
    pub(crate) umems: [u32; 3],
}

impl Virtq {
    /// Whether the driver sends frames by it.
    pub(crate) fn sends(&self) -> bool {
        self.index % 2 == 1
    }
}
