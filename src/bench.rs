//! Cost of the data path without a kernel or a device: writing requests into queues in plain memory,
//! and reading completions out of them.

mod mlx5;
mod rings;
mod rxe;
