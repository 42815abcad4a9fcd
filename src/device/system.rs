//! Settings of the whole RDMA subsystem. Pairs with `RDMA_NLDEV_CMD_SYS_GET`.

use super::netlink::Client;
use crate::error::Result;

/// Settings of the running kernel's RDMA subsystem.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct System {
    /// Whether all network namespaces share the devices; otherwise each device is in one of them
    /// and opening it from elsewhere is `EPERM`. `None` if the kernel does not say.
    pub netns_shared: Option<bool>,
    /// Whether `fork` copies pinned pages for the child, so that registered memory needs no
    /// protection from it.
    #[doc(alias = "ibv_is_fork_initialized")]
    #[doc(alias = "ibv_fork_init")]
    pub copy_on_fork: bool,
    /// Whether processes without `CAP_NET_RAW` may set queue keys with the top bit set. `None` if the kernel
    /// does not say.
    pub privileged_qkey: Option<bool>,
    /// Whether the kernel announces devices that come, go or are renamed.
    pub monitor: bool,
}

/// Asks the kernel for the settings of its RDMA subsystem.
///
/// # Errors
///
/// `EOPNOTSUPP` if the kernel has no RDMA subsystem or does not have it loaded.
pub fn system() -> Result<System> {
    Client::open("query_system")?.system()
}
