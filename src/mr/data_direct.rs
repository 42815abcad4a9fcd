//! The data-direct function of a device, through which dma-bufs are registered. Pairs with
//! `MLX5_IB_METHOD_GET_DATA_DIRECT_SYSFS_PATH` of `hw/mlx5/std_types.c`.

use crate::error::{Error, Result};
use crate::file::File;
use crate::uverbs::command::Command;
use rustix::io::Errno;
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use uverbs_uapi::mlx5::object::{
    MLX5_IB_ATTR_GET_DATA_DIRECT_SYSFS_PATH, MLX5_IB_METHOD_GET_DATA_DIRECT_SYSFS_PATH,
};
use uverbs_uapi::object::UVERBS_OBJECT_DEVICE;

/// Bytes of the longest path: `PATH_MAX`.
const LONGEST: usize = 4096;

/// The folder of the function in sysfs. Without one the error has a reason, where a registration has `EINVAL` alone.
pub(crate) fn path_of(verb: &'static str, file: &File) -> Result<PathBuf> {
    file.provider.mlx5(verb)?;
    let mut path = vec![0; LONGEST];
    let mut command = Command::new(UVERBS_OBJECT_DEVICE, MLX5_IB_METHOD_GET_DATA_DIRECT_SYSFS_PATH);
    command.output_if_any(MLX5_IB_ATTR_GET_DATA_DIRECT_SYSFS_PATH, &mut path);
    let asked = file.execute(verb, &mut command);
    asked.map_err(|error| {
        let name = file.device.name();
        match error.errno() {
            Errno::NODEV => error.meaning(Errno::OPNOTSUPP).detail(format!(
                "{name} has no data-direct function, or its driver is not bound to it"
            )),
            Errno::OPNOTSUPP => {
                error.detail("the kernel knows no data-direct functions; Linux 6.12 does")
            }
            _ => error,
        }
    })?;
    let end = path.iter().position(|byte| *byte == 0);
    let Some(end) = end.filter(|end| *end > 0 && path[0] == b'/') else {
        return Err(Error::new(verb, Errno::IO).detail("the kernel told no path"));
    };
    path.truncate(end);
    let mut whole = OsString::from("/sys");
    whole.push(OsString::from_vec(path));
    Ok(whole.into())
}
