//! The device that a program works with.

use crate::failure::{Failure, Result};
use uverbs::{Context, Device, Errno};

/// The device of this name, or behind the node at this path.
pub(crate) fn find(name: &str) -> Result<Device> {
    let found = if name.contains('/') { Device::by_path(name) } else { Device::by_name(name) };
    Ok(found?)
}

/// Opens the device that is named, or the first one that opens and has an active port.
pub(crate) fn open(name: Option<&str>) -> Result<Context> {
    let Some(name) = name else {
        return Context::open_first().map_err(|error| match error.errno() {
            Errno::NODEV => Failure::no_device(),
            _ => Failure::device(error.to_string())
                .advice("`uverbs doctor` says more about each device"),
        });
    };
    Ok(Context::open(&find(name)?)?)
}
