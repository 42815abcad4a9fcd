//! The device under test and what the run offers beside it.

use crate::capability::Capability;
use crate::pair::PATIENCE;
use crate::verdict::{Stop, Verdict, require};
use std::env::var;
use std::time::Instant;
use uverbs::device::{DriverId, ResourceCounts};
use uverbs::{Context, Device};

/// The device under test. It must be named, so that the suite never runs by accident on a machine
/// that works with its devices.
pub(crate) fn find() -> Result<Device, String> {
    let name = var("UVERBS_TEST_DEVICE").map_err(|_| "UVERBS_TEST_DEVICE names no device")?;
    Device::by_name(&name).map_err(|error| error.to_string())
}

/// The device under test, which was there when the run began.
pub(crate) fn device() -> Device {
    find().expect("the device under test was there and is gone")
}

/// A fresh context on the device under test.
pub(crate) fn open() -> Verdict<Context> {
    Ok(Context::open(&device())?)
}

/// Waits until the device has these objects: the kernel cleans up after a process on its own time.
#[track_caller]
pub(crate) fn settles(expected: &ResourceCounts) -> Verdict {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let found = device().resources()?;
        if found == *expected {
            return Ok(());
        }
        if Instant::now() > deadline {
            return Err(Stop::fail(format!("{found} remain, {expected} were before")));
        }
        std::thread::yield_now();
    }
}

/// Skips tests that change the machine unless this is the lab's, and root.
pub(crate) fn lab() -> Verdict {
    require(var("UVERBS_LAB").is_ok(), Capability::Lab, "UVERBS_LAB is not set")?;
    require(rustix::process::geteuid().is_root(), Capability::Lab, "not root")
}

/// The device at the other end of the cable.
pub(crate) fn second() -> Verdict<Device> {
    match var("UVERBS_TEST_SECOND_DEVICE") {
        Ok(name) => Ok(Device::by_name(&name)?),
        Err(_) => {
            let why = "UVERBS_TEST_SECOND_DEVICE names none".into();
            Err(Stop::Skip(Capability::TwoDevices, why))
        }
    }
}

/// Skips tests that drain a send queue without ending it, which the driver of mlx5 does not offer.
pub(crate) fn drainable() -> Verdict {
    let mlx5 = device().driver() == Some(DriverId::MLX5);
    require(!mlx5, Capability::Sqd, "the driver knows no way from RTS to SQD")
}

/// How often a test does what it does: `few` times, or as many times more as `UVERBS_ROUNDS` says, and
/// `many` times in a long run.
pub(crate) fn rounds(few: u64, many: u64) -> u64 {
    let more = var("UVERBS_ROUNDS").ok().and_then(|text| text.parse().ok()).unwrap_or(1);
    if var("UVERBS_SOAK").is_ok() { many } else { many.min(few * more) }
}

/// The tests that `UVERBS_TEST_NAMES` chooses by their whole names, with commas between them; none
/// where it is not set.
pub(crate) fn chosen() -> Option<Vec<String>> {
    let names = var("UVERBS_TEST_NAMES").ok()?;
    Some(names.split(',').map(str::to_owned).collect())
}

/// Skips tests that take their time.
pub(crate) fn soak() -> Verdict {
    require(var("UVERBS_SOAK").is_ok(), Capability::Soak, "UVERBS_SOAK is not set")
}

/// Bytes of a page of the running kernel.
pub(crate) fn page_size() -> usize {
    rustix::param::page_size()
}

/// Free huge pages of 2 MiB, which the default size is where ordinary pages have 4 KiB.
pub(crate) fn free_pages_of_2_mib() -> usize {
    let path = "/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages";
    // A kernel without such pages has no such file.
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.trim().parse().unwrap_or(0)
}

/// Free huge pages of the default size.
pub(crate) fn free_huge_pages() -> Verdict<usize> {
    let text = std::fs::read_to_string("/proc/meminfo")?;
    let line = text.lines().find_map(|line| line.strip_prefix("HugePages_Free:"));
    Ok(line.ok_or_else(|| Stop::fail("/proc/meminfo has no HugePages_Free"))?.trim().parse()?)
}
