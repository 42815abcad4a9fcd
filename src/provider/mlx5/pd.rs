//! The driver's number of a protection domain. Pairs with `MLX5_IB_METHOD_PD_QUERY` in
//! `hw/mlx5/std_types.c`.

use crate::uverbs::command::Command;
use crate::uverbs::kernel::Kernel;
use rustix::io::Errno;
use uverbs_uapi::mlx5::object::{
    MLX5_IB_ATTR_QUERY_PD_HANDLE, MLX5_IB_ATTR_QUERY_PD_RESP_PDN, MLX5_IB_METHOD_PD_QUERY,
};
use uverbs_uapi::object::UVERBS_OBJECT_PD;

/// The number of a domain on the device.
pub(crate) fn number(kernel: &dyn Kernel, handle: u32) -> Result<u32, Errno> {
    let mut number = 0u32;
    let mut command = Command::new(UVERBS_OBJECT_PD, MLX5_IB_METHOD_PD_QUERY);
    command
        .handle(MLX5_IB_ATTR_QUERY_PD_HANDLE, handle)
        .output(MLX5_IB_ATTR_QUERY_PD_RESP_PDN, &mut number);
    kernel.execute(&mut command)?;
    Ok(number)
}
