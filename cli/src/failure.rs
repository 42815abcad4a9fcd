//! The message of the program when it gives up: the cause, the remedy, and the exit status. The
//! help text of [`args`](crate::args) lists the meanings of exit statuses.

use crate::output::{self, errln, outln};
use rustix::process::{Resource, getrlimit};
use serde::Serialize;
use std::fmt;
use uverbs::Errno;
use uverbs::device::absence;

/// The exit status: its number tells whether the command line, the machine or the peer is at fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Status {
    /// The run failed: wrong data, a request that failed, a peer that went silent.
    Run = 1,
    /// The command line is wrong or contradicts itself. clap has the same number.
    Usage = 2,
    /// The local device cannot be used as asked.
    Device = 3,
    /// The peer cannot be reached over TCP, or sends a malformed message.
    Peer = 4,
}

/// The reason that the program gives up.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    status: Status,
    message: String,
    advice: Option<String>,
    /// Whether standard output has it already.
    shown: bool,
}

/// The same for machines.
#[derive(Debug, Serialize)]
pub(crate) struct JsonFailure<'a> {
    error: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    advice: Option<&'a str>,
    exit_status: u8,
}

pub(crate) type Result<T> = std::result::Result<T, Failure>;

impl Failure {
    pub(crate) fn new(status: Status, message: impl Into<String>) -> Self {
        Failure { status, message: message.into(), advice: None, shown: false }
    }

    pub(crate) fn run(message: impl Into<String>) -> Self {
        Failure::new(Status::Run, message)
    }

    pub(crate) fn usage(message: impl Into<String>) -> Self {
        Failure::new(Status::Usage, message)
    }

    pub(crate) fn device(message: impl Into<String>) -> Self {
        Failure::new(Status::Device, message)
    }

    pub(crate) fn peer(message: impl Into<String>) -> Self {
        Failure::new(Status::Peer, message)
    }

    /// The failure of a machine without an RDMA device.
    pub(crate) fn no_device() -> Self {
        Failure::device("this machine has no RDMA device").advice(absence().to_string())
    }

    /// Marks the failure as part of the output already, so that it is not printed again as JSON.
    pub(crate) fn shown(mut self) -> Self {
        self.shown = true;
        self
    }

    /// Prints the failure, and returns the exit status.
    pub(crate) fn tell(&self, json: bool) -> u8 {
        errln!("uverbs: {self}");
        if json && !self.shown {
            print(&self.to_json());
        }
        self.status()
    }

    /// Adds to the message.
    pub(crate) fn and(mut self, more: &str) -> Self {
        self.message += more;
        self
    }

    /// Adds a remedy, if there is none yet: the first one is the most precise.
    pub(crate) fn advice(mut self, advice: impl Into<String>) -> Self {
        self.advice.get_or_insert(advice.into());
        self
    }

    pub(crate) fn message(&self) -> &str {
        &self.message
    }

    /// The remedy.
    pub(crate) fn remedy(&self) -> Option<&str> {
        self.advice.as_deref()
    }

    pub(crate) fn status(&self) -> u8 {
        self.status as u8
    }

    pub(crate) fn to_json(&self) -> JsonFailure<'_> {
        JsonFailure {
            error: &self.message,
            advice: self.advice.as_deref(),
            exit_status: self.status(),
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        match &self.advice {
            Some(advice) => write!(f, "\n  what to do: {advice}"),
            None => Ok(()),
        }
    }
}

/// The verb that opens the kernel's connection manager. Its errors name the module to load.
pub(crate) const CHANNEL: &str = "create_event_channel";

impl<T> From<uverbs::ErrorWith<T>> for Failure {
    fn from(failed: uverbs::ErrorWith<T>) -> Self {
        failed.error.into()
    }
}

impl From<uverbs::Error> for Failure {
    /// A verb failed at the local device.
    fn from(error: uverbs::Error) -> Self {
        let failure = Failure::device(error.to_string());
        match advise(error.verb(), error.errno(), error.message()) {
            Some(advice) => failure.advice(advice),
            None => failure,
        }
    }
}

impl From<uverbs::owned::BufferError> for Failure {
    fn from(error: uverbs::owned::BufferError) -> Self {
        Failure::run(error.to_string())
    }
}

/// The usual remedy when `verb` fails with `errno`; `message` is the library's message.
fn advise(verb: &str, errno: Errno, message: &str) -> Option<String> {
    let advice = match (verb, errno) {
        ("open_device", Errno::ACCESS) => {
            "as root: `chmod 666 /dev/infiniband/uverbs*` (safe, as the kernel checks each \
             request), or run as root"
        }
        ("open_device", Errno::PERM) => {
            "run in the network namespace that the device belongs to: `rdma system` tells whether \
             namespaces share devices"
        }
        ("open_device", Errno::NOENT) => {
            "no node in /dev/infiniband: load the module ib_uverbs, and in a container pass the \
             node through"
        }
        (_, Errno::NOMEM | Errno::AGAIN) if message.contains("MEMLOCK") => {
            "raise that limit, or ask for less (--size, and with srq --rx-depth)"
        }
        (_, Errno::AGAIN) if message.contains("rdma.max") => {
            "raise rdma.max of the cgroup, or end what uses the objects: `uverbs doctor -v` shows the \
             limits, `rdma resource` the objects"
        }
        (_, Errno::NOMEM | Errno::AGAIN) => return Some(memory_advice()),
        ("create_cq" | "create_srq" | "create_qp", Errno::INVAL) => {
            "ask for less: --rx-depth is bounded by max_qp_wr, with srq by max_srq_wr, and by \
             max_cqe; `uverbs devinfo -v` shows them"
        }
        ("modify_qp" | "create_ah", Errno::INVAL) => {
            "the GIDs of the two sides may not go together, a link-local one and an IPv4 one for \
             example; compare `uverbs devinfo -v` on both sides and choose with --gid-index"
        }
        (_, Errno::HOSTUNREACH | Errno::NETUNREACH | Errno::TIMEDOUT) => {
            "the peer's GID cannot be reached from the local one: both must be of the same \
             network and the same RoCE version; compare `uverbs devinfo -v` on both sides and \
             choose with --gid-index"
        }
        (_, Errno::IO | Errno::NODEV) if !matches!(verb, "find_device" | CHANNEL) => {
            "the device went away; `uverbs devinfo` shows what is there now"
        }
        _ => return None,
    };
    Some(advice.to_owned())
}

fn memory_advice() -> String {
    match getrlimit(Resource::Memlock).current {
        Some(limit) => format!(
            "this process may lock {} KiB of memory: raise the limit (`ulimit -l`, limits.conf, \
             LimitMEMLOCK=), or ask for less (--size, --rx-depth)",
            limit / 1024
        ),
        None => "ask for less (--size, --rx-depth), or see the limits of the cgroup".to_owned(),
    }
}

/// Prints an object as one line of JSON.
pub(crate) fn print(value: &impl Serialize) {
    match serde_json::to_string(value) {
        Ok(text) => outln!("{text}"),
        Err(error) => output::fail(&error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_advice_stays() {
        let failure = Failure::peer("gone").advice("precise").advice("general");
        assert_eq!(failure.to_string(), "gone\n  what to do: precise");
        assert_eq!(failure.status(), 4);
    }

    #[test]
    fn common_failures_of_devices_come_with_advice() {
        for (verb, errno, needle) in [
            ("open_device", Errno::ACCESS, "/dev/infiniband"),
            ("open_device", Errno::PERM, "namespace"),
            ("reg_mr", Errno::NOMEM, "--rx-depth"),
            ("create_cq", Errno::INVAL, "max_cqe"),
            ("modify_qp", Errno::INVAL, "--gid-index"),
            ("modify_qp", Errno::HOSTUNREACH, "--gid-index"),
            ("query_port", Errno::IO, "went away"),
        ] {
            let advice = advise(verb, errno, "").unwrap_or_default();
            assert!(advice.contains(needle), "{verb} {errno}: {advice:?}");
        }
        assert_eq!(advise("find_device", Errno::NODEV, ""), None);
        assert_eq!(advise(CHANNEL, Errno::NODEV, ""), None);
        assert_eq!(advise("query_port", Errno::INVAL, ""), None);
        let memory = advise("reg_mr", Errno::NOMEM, "over RLIMIT_MEMLOCK").unwrap();
        assert!(memory.starts_with("raise that limit"), "{memory}");
    }

    #[test]
    fn json_has_the_exit_status() {
        let failure = Failure::run("wrong byte");
        let text = serde_json::to_string(&failure.to_json()).unwrap();
        assert_eq!(text, r#"{"error":"wrong byte","exit_status":1}"#);
    }
}
