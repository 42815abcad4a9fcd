//! The data-direct function of a device, where it is.

use crate::context::Context;
use crate::error::Result;
use crate::mr::data_direct;
use std::path::PathBuf;

/// The folder in sysfs of the device's data-direct function, by which
/// [`MrBuilder::data_direct`](crate::MrBuilder::data_direct) lets it reach memory. A program compares it with that of a GPU,
/// to see which device is near.
///
/// ```no_run
/// # fn f(context: &uverbs::Context) -> uverbs::Result<()> {
/// match uverbs::mlx5::data_direct_path(context) {
///     Ok(path) => println!("direct access from {}", path.display()),
///     Err(error) if error.is_unsupported() => println!("no direct access: {error}"),
///     Err(error) => return Err(error),
/// }
/// # Ok(()) }
/// ```
///
/// # Errors
///
/// `EOPNOTSUPP` on a device of another driver, without such a function, and before Linux 6.12.
#[doc(alias = "mlx5dv_get_data_direct_sysfs_path")]
pub fn data_direct_path(context: &Context) -> Result<PathBuf> {
    data_direct::path_of("data_direct_path", &context.file)
}
