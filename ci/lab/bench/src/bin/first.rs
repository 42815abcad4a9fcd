//! A minimal program: it opens the first device and allocates a protection domain. `cargo ci bench
//! size` weighs it.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let device = uverbs::devices()?.into_iter().find(|device| device.is_supported());
    let context = uverbs::Context::open(&device.ok_or("no RDMA device")?)?;
    context.alloc_pd()?;
    Ok(())
}
