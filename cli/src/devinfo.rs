//! `uverbs devinfo`: the devices of this machine, their capabilities and the state of their ports.
//!
//! [`description`] collects the facts, as an object for programs; [`text`] writes it for people.
//! [`sysfs`] stands in for a context where a device cannot be opened.

mod description;
pub(crate) mod limits;
mod sysfs;
mod text;

use crate::args::DevinfoArgs;
use crate::failure::{self, Failure, Result};
use crate::open;
use description::{Description, Listing};
use uverbs::{Device, devices};

pub(crate) fn run(args: &DevinfoArgs) -> Result<()> {
    let devices = choose(&args.devices)?;
    let mut failures = Vec::new();
    let mut listing = Listing::default();
    for device in &devices {
        let (description, failure) = Description::of(device);
        listing.devices.push(description);
        failures.extend(failure);
    }
    if args.json {
        failure::print(&listing);
    } else {
        for description in &listing.devices {
            text::print(description, args.verbose);
        }
    }
    if devices.is_empty() {
        failures.push(Failure::no_device());
    }
    match failures.into_iter().next() {
        // The JSON object has the failure at the device that it concerns.
        Some(failure) => Err(failure.shown()),
        None => Ok(()),
    }
}

fn choose(names: &[String]) -> Result<Vec<Device>> {
    if names.is_empty() {
        return Ok(devices()?);
    }
    names.iter().map(|name| open::find(name)).collect()
}
