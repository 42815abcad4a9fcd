//! `cargo ci`: boots real kernels in a VM and runs this workspace in them.

fn main() {}
