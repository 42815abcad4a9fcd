//! Finding and describing the device under test.

use crate::capability::Capability;
use crate::env;
use crate::testbed::has_capability;
use crate::verdict::{Verdict, require, trials};
use uverbs::device::link;
use uverbs::{Device, Errno};

trials![
    device_under_test_is_listed,
    device_is_found_by_its_name,
    unknown_name_is_refused_with_the_known_ones,
    node_and_driver_are_known,
    ordinary_users_cannot_add_links,
];

fn device_under_test_is_listed() -> Verdict {
    let device = env::device();
    assert!(uverbs::devices()?.contains(&device), "{device} is not among the devices listed");
    assert!(device.is_supported(), "{device} was chosen and has no provider");
    Ok(())
}

fn device_is_found_by_its_name() -> Verdict {
    let device = env::device();
    assert_eq!(Device::by_name(device.name())?, device);
    Ok(())
}

fn unknown_name_is_refused_with_the_known_ones() -> Verdict {
    let device = env::device();
    let error = Device::by_name("no_such_device").unwrap_err();
    assert_eq!(error.errno(), Errno::NODEV);
    assert!(error.message().contains(device.name()), "{error}");
    Ok(())
}

fn node_and_driver_are_known() -> Verdict {
    let device = env::device();
    let name = device.uverbs_name().expect("a supported device has a node");
    assert!(name.starts_with("uverbs"), "{name}");
    assert!(device.device_number().is_some());
    assert!(device.driver().is_some(), "{device} has no driver id");
    assert!(device.port_count() >= 1);
    assert!(device.netdev(0).is_err(), "ports count from 1");
    assert!(device.netdev(device.port_count() + 1).is_err());
    Ok(())
}

/// The test is not for root, which would change the machine.
fn ordinary_users_cannot_add_links() -> Verdict {
    let why = "the fabric's kernel makes no links";
    require(!env::on_fabric(), Capability::Links, why)?;
    /// The bit of the capability.
    const CAP_NET_ADMIN: u32 = 12;
    let root = rustix::process::geteuid().is_root() || has_capability(CAP_NET_ADMIN);
    require(!root, Capability::Lab, "this is root, or has CAP_NET_ADMIN")?;
    let before = uverbs::devices()?;
    let error = link::add_link("uvt_rxe", "rxe", "lo").unwrap_err();
    assert_eq!(error.errno(), Errno::PERM);
    assert!(error.message().contains("CAP_NET_ADMIN"), "{error}");
    let error = link::remove_link(env::device().name()).unwrap_err();
    assert_eq!(error.errno(), Errno::PERM);
    assert_eq!(uverbs::devices()?, before);
    Ok(())
}
