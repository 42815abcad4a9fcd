//! Finds and opens the device of a command.

use crate::failure::{Failure, Result};
use uverbs::{Context, Device, devices};

/// The device of this name, or behind the node at this path.
pub(crate) fn find(name: &str) -> Result<Device> {
    let found = if name.contains('/') { Device::by_path(name) } else { Device::by_name(name) };
    Ok(found?)
}

/// Opens the named device, or the first one that opens and has an active port.
pub(crate) fn open(name: Option<&str>) -> Result<Context> {
    let Some(name) = name else {
        let listed = devices()?;
        if listed.is_empty() {
            return Err(Failure::no_device());
        }
        return Context::open_first_of(listed, |_, _| {}).map_err(|error| {
            Failure::device(error.to_string()).advice("`uverbs doctor` says more about each device")
        });
    };
    Ok(Context::open(&find(name)?)?)
}
