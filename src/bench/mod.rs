//! Queues in plain memory, for `benches/`: what it costs to write requests and to read completions
//! when no kernel and no device is involved. No part of the API.

pub mod mlx5;
pub mod rxe;
