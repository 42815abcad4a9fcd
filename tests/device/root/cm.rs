//! Connections by address where root changes the machine: an interface without an RDMA device, and other
//! credentials.

use super::Interface;
use crate::env;
use crate::fork::in_child;
use crate::pair::PATIENCE;
use crate::verdict::{Verdict, trials};
use nix::unistd::{Uid, setuid};
use uverbs::Errno;
use uverbs::cm::EventChannel;

trials![interface_without_rdma_device_is_named, other_credentials_are_refused_on_an_open_channel,];

fn interface_without_rdma_device_is_named() -> Verdict {
    env::lab()?;
    let _interface = Interface::dummy("uvt9", "10.77.9.1/24")?;
    let channel = EventChannel::open()?;
    let error = channel.create_id()?.bind("10.77.9.1:0".parse()?).unwrap_err();
    assert_eq!(error.errno(), Errno::NODEV, "{error}");
    assert!(error.message().contains("belongs to no RDMA device"), "{error}");
    let id = channel.create_id()?;
    let error = match id.resolve_addr(None, "10.77.9.2:7000".parse()?, PATIENCE) {
        Ok(resolving) => resolving.wait(Some(PATIENCE)).unwrap_err(),
        Err(error) => error,
    };
    assert_eq!(error.errno(), Errno::NODEV, "{error}");
    assert!(error.message().contains("belongs to no RDMA device"), "{error}");
    Ok(())
}

fn other_credentials_are_refused_on_an_open_channel() -> Verdict {
    env::lab()?;
    in_child((), |()| {
        let channel = EventChannel::open()?;
        let id = channel.create_id()?;
        setuid(Uid::from_raw(65534))?;
        let error = channel.create_id().unwrap_err();
        assert_eq!(error.errno(), Errno::ACCESS, "{error}");
        assert!(error.message().contains("open another channel"), "{error}");
        drop(id);
        assert_eq!(channel.leaked(), 1);
        // The node is open to everybody.
        EventChannel::open()?.create_id()?;
        Ok(())
    })
}
