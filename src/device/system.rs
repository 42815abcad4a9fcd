//! Settings of the whole RDMA subsystem. Pairs with `RDMA_NLDEV_CMD_SYS_GET`.

use super::netlink::Client;
use crate::error::Result;
use crate::platform::Platform;
use std::sync::atomic::{AtomicU8, Ordering};

/// The kernel that copies pinned huge pages on fork, and says so by netlink.
const COPY_ON_FORK: (u32, u32) = (5, 12);

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

/// The settings of a hosted kernel. It pins nothing: a child of `fork` gets copies, and the devices stay with the
/// parent.
const HOSTED: System =
    System { netns_shared: Some(true), copy_on_fork: true, privileged_qkey: None, monitor: false };

/// Asks the kernel for the settings of its RDMA subsystem.
///
/// # Errors
///
/// `EOPNOTSUPP` if the kernel has no RDMA subsystem or does not have it loaded.
pub fn system() -> Result<System> {
    match Platform::current().hosted() {
        Some(_) => Ok(HOSTED),
        None => Client::open("query_system")?.system(),
    }
}

/// Whether `fork` leaves the parent all pages that a device reaches, huge ones among them.
pub(crate) fn copies_on_fork() -> bool {
    const UNKNOWN: u8 = 0;
    const NO: u8 = 1;
    const YES: u8 = 2;
    // No `OnceLock`: a child that is forked while another thread asks would wait for it for ever. Two threads
    // may ask; the kernel tells both the same.
    static ANSWER: AtomicU8 = AtomicU8::new(UNKNOWN);
    // Older kernels to which the change was carried back say so by netlink.
    let ask = || {
        let kernel = rustix::system::uname();
        is_at_least(&kernel.release().to_string_lossy(), COPY_ON_FORK)
            || system().is_ok_and(|system| system.copy_on_fork)
    };
    match ANSWER.load(Ordering::Relaxed) {
        UNKNOWN => {
            // Miri forks nothing.
            let copies = cfg!(miri) || ask();
            ANSWER.store(if copies { YES } else { NO }, Ordering::Relaxed);
            copies
        }
        answer => answer == YES,
    }
}

/// Whether a release such as `5.10.0-32-amd64` is of this series or a later one.
fn is_at_least(release: &str, series: (u32, u32)) -> bool {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    match (numbers.next(), numbers.next()) {
        (Some(Ok(major)), Some(Ok(minor))) => (major, minor) >= series,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_compare_as_numbers() {
        for (release, copies) in [
            ("5.10.0-32-amd64\n", false),
            ("5.9", false),
            ("5.12", true),
            ("6.1.0-50", true),
            ("x", false),
        ] {
            assert_eq!(is_at_least(release, COPY_ON_FORK), copies, "{release}");
        }
    }
}
