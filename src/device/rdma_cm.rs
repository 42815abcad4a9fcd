//! The node of the connection manager, `/dev/infiniband/rdma_cm`: one for all devices.
//!
//! Pairs with `ucma_get_global_nl_info` and the misc device of `core/ucma.c`. Netlink is asked first,
//! because the kernel then loads the module by itself if it can.

use super::cdev::{DeviceNumber, Node, Nodes};
use super::netlink::Client;
use crate::error::{Error, Result};
use crate::platform::Platform;
use crate::sync::fork::Epoch;
use crate::uverbs::open_file::OpenFile;
use rustix::io::Errno;
use std::fs;
use std::path::Path;
use uverbs_uapi::rdma_user_cm::RDMA_USER_CM_ABI_VERSION;

/// The owner of the node, as errors name it.
const MANAGER: &str = "the connection manager";

/// Opens the connection manager for reading and writing, closed on exec.
pub(crate) fn open_rdma_cm(verb: &'static str, platform: &Platform) -> Result<OpenFile> {
    if let Some(system) = platform.hosted() {
        let epoch = Epoch::of_verb(verb)?;
        let file = system.open_rdma_cm().map_err(|errno| Error::from_kernel(verb, errno))?;
        return Ok(OpenFile::hosted(file, epoch));
    }
    let by_netlink = || Client::open(verb)?.rdma_cm_node();
    let node = match by_netlink() {
        Ok(node) => node,
        Err(error) => node_by_sysfs(Path::new("/sys")).ok_or_else(|| absent(verb, &error))?,
    };
    check_abi(verb, &node)?;
    Ok(Nodes::system().open(verb, MANAGER, &node)?.into())
}

/// The node according to sysfs; `None` if there is none.
fn node_by_sysfs(sys: &Path) -> Option<Node> {
    let folder = sys.join("class/misc/rdma_cm");
    let number = DeviceNumber::from_sysfs(fs::read_to_string(folder.join("dev")).ok()?.trim())?;
    // Without a version in sysfs the present one is assumed: errors of commands say more than a refusal
    // here.
    let abi = fs::read_to_string(folder.join("abi_version")).ok();
    let abi = abi.and_then(|text| text.trim().parse().ok()).unwrap_or(RDMA_USER_CM_ABI_VERSION);
    Some(Node { name: "rdma_cm".into(), number, abi })
}

fn check_abi(verb: &'static str, node: &Node) -> Result<()> {
    if node.abi == RDMA_USER_CM_ABI_VERSION {
        return Ok(());
    }
    Err(Error::new(verb, Errno::OPNOTSUPP).detail(format!(
        "{MANAGER} has ABI version {}; this library knows version {RDMA_USER_CM_ABI_VERSION}",
        node.abi
    )))
}

fn absent(verb: &'static str, netlink: &Error) -> Error {
    Error::new(verb, Errno::NODEV).detail(format!(
        "the kernel has no connection manager: `modprobe rdma_ucm` loads it (netlink: {}; there is no \
         /sys/class/misc/rdma_cm)",
        netlink.errno()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::sysfs::scratch::Scratch;

    #[test]
    #[cfg_attr(miri, ignore = "it makes files and directories")]
    fn sysfs_has_number_and_version() {
        let sys = Scratch::new("rdma-cm");
        assert_eq!(node_by_sysfs(sys.path()), None);
        sys.file("class/misc/rdma_cm/dev", "10:122\n");
        let node = node_by_sysfs(sys.path()).unwrap();
        assert_eq!(node.number, DeviceNumber { major: 10, minor: 122 });
        assert_eq!((node.name.as_str(), node.abi), ("rdma_cm", 4));
        sys.file("class/misc/rdma_cm/abi_version", "5\n");
        let newer = node_by_sysfs(sys.path()).unwrap();
        let error = check_abi("open_cm", &newer).unwrap_err();
        assert!(error.is_unsupported() && error.message().contains("version 5"), "{error}");
    }

    #[test]
    fn error_of_a_missing_module_names_it() {
        let error = absent("open_cm", &Error::from_kernel("open_cm", Errno::NOENT));
        assert_eq!(error.errno(), Errno::NODEV);
        let told = "the kernel has no connection manager: `modprobe rdma_ucm` loads it";
        assert!(error.message().contains(told), "{error}");
    }
}
