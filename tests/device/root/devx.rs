//! Queues of DEVX whose packets are raw. Run as root: the lab's stations need `CAP_NET_RAW`.

use crate::mlx5::devx::objects::{
    objects_of_a_raw_packet_queue_pair_are_queried,
    raw_packet_queue_pair_may_be_dropped_before_its_tir, raw_packet_queue_pair_tells_its_objects,
};
use crate::mlx5::devx::virtio::virtqueue_sends_the_frames_that_its_var_announces;
use crate::verdict::trials;

trials![
    raw_packet_queue_pair_tells_its_objects,
    objects_of_a_raw_packet_queue_pair_are_queried,
    raw_packet_queue_pair_may_be_dropped_before_its_tir,
    virtqueue_sends_the_frames_that_its_var_announces,
];
