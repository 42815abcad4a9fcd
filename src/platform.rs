//! The system that a program runs on: Linux, or a hosted kernel that stands for it in this process. It has the
//! clock, and the wait for descriptors.

use rustix::event::PollFd;
use rustix::io::Errno;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::Arc;
use std::time::{Duration, Instant};
use uverbs_host::{HostSystem, poll_until};

/// Linux, or a hosted system.
#[derive(Clone, Debug)]
pub(crate) struct Platform(Option<Arc<dyn HostSystem>>);

impl From<Arc<dyn HostSystem>> for Platform {
    fn from(system: Arc<dyn HostSystem>) -> Platform {
        Platform(Some(system))
    }
}

impl PartialEq for Platform {
    fn eq(&self, other: &Platform) -> bool {
        match (&self.0, &other.0) {
            (None, None) => true,
            (Some(a), Some(b)) => Arc::ptr_eq(a, b),
            _ => false,
        }
    }
}
impl Eq for Platform {}

impl Platform {
    pub(crate) const LINUX: Platform = Platform(None);

    /// The system of the process: the one that was installed, or else Linux.
    pub(crate) fn current() -> Platform {
        #[cfg(feature = "sim")]
        crate::sim::install_from_environment();
        Platform(uverbs_host::installed().cloned())
    }

    /// The hosted system, if it is one.
    pub(crate) fn hosted(&self) -> Option<&Arc<dyn HostSystem>> {
        self.0.as_ref()
    }

    /// The time.
    pub(crate) fn now(&self) -> Instant {
        self.0.as_ref().map_or_else(Instant::now, |system| system.now())
    }

    /// A random number, which is no secret: that of a system whose runs repeat is of its seed.
    pub(crate) fn random(&self) -> u64 {
        let hosted = self.0.as_ref().and_then(|system| system.random());
        // The standard library's hasher is seeded from the machine's randomness.
        hosted.unwrap_or_else(|| RandomState::new().build_hasher().finish())
    }

    /// The time after `timeout`; `None` for one that the clock cannot represent, and without a timeout.
    pub(crate) fn deadline(&self, timeout: Option<Duration>) -> Option<Instant> {
        timeout.and_then(|timeout| self.now().checked_add(timeout))
    }

    /// The time until a deadline.
    pub(crate) fn left(&self, deadline: Option<Instant>) -> Option<Duration> {
        deadline.map(|at| at.saturating_duration_since(self.now()))
    }

    /// Waits until a descriptor is ready or the deadline has come; answers how many are ready. A signal ends
    /// the wait early.
    pub(crate) fn wait(
        &self,
        fds: &mut [PollFd<'_>],
        deadline: Option<Instant>,
    ) -> Result<usize, Errno> {
        match &self.0 {
            Some(system) => system.wait(fds, deadline),
            None => poll_until(fds, deadline),
        }
    }
}
