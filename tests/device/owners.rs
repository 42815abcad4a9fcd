//! The objects of a device that this process, or a process that it started, made. RDMA netlink lists all objects with
//! the thread that made each; objects of other processes come and go on a machine that others use.

use crate::env;
use crate::pair::PATIENCE;
use crate::verdict::{Stop, Verdict};
use rustix::io::Errno;
use rustix::net::netlink::{self, SocketAddrNetlink};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recvfrom, sendto, socket_with,
};
use rustix::process::{Pid, test_kill_process};
use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::time::Instant;
use uverbs_uapi::nldev::*;

/// Each kind of object with the command that lists it, the nest of the list and that of an object.
const KINDS: [(&str, u16, u16, u16); 7] = [
    ("ctx", RDMA_NLDEV_CMD_RES_CTX_GET, RDMA_NLDEV_ATTR_RES_CTX, RDMA_NLDEV_ATTR_RES_CTX_ENTRY),
    ("pd", RDMA_NLDEV_CMD_RES_PD_GET, RDMA_NLDEV_ATTR_RES_PD, RDMA_NLDEV_ATTR_RES_PD_ENTRY),
    ("cq", RDMA_NLDEV_CMD_RES_CQ_GET, RDMA_NLDEV_ATTR_RES_CQ, RDMA_NLDEV_ATTR_RES_CQ_ENTRY),
    ("qp", RDMA_NLDEV_CMD_RES_QP_GET, RDMA_NLDEV_ATTR_RES_QP, RDMA_NLDEV_ATTR_RES_QP_ENTRY),
    ("mr", RDMA_NLDEV_CMD_RES_MR_GET, RDMA_NLDEV_ATTR_RES_MR, RDMA_NLDEV_ATTR_RES_MR_ENTRY),
    ("srq", RDMA_NLDEV_CMD_RES_SRQ_GET, RDMA_NLDEV_ATTR_RES_SRQ, RDMA_NLDEV_ATTR_RES_SRQ_ENTRY),
    (
        "cm_id",
        RDMA_NLDEV_CMD_RES_CM_ID_GET,
        RDMA_NLDEV_ATTR_RES_CM_ID,
        RDMA_NLDEV_ATTR_RES_CM_ID_ENTRY,
    ),
];

type Counts = BTreeMap<&'static str, u64>;

/// The numbers of objects of each kind.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Resources {
    /// Made by living threads of this process and of those that it started.
    own: Counts,
    /// Made by threads that have ended: of this process, of a child that was killed, or of a neighbour.
    orphaned: Counts,
}

impl Resources {
    /// The objects of the device under test.
    pub(crate) fn look() -> Verdict<Resources> {
        if env::in_process() {
            return Resources::of_fabric();
        }
        let index = index(env::device().name())?;
        // A list that changes while it is read may miss an object.
        let deadline = Instant::now() + PATIENCE;
        let mut last = None;
        loop {
            let next = match Resources::once(index) {
                Ok(next) => next,
                // The kernel queries the device for each queue pair. One that another process is destroying has no
                // answer: the list ends there.
                Err(Stop::Fail(_)) if Instant::now() < deadline => continue,
                Err(stop) => return Err(stop),
            };
            if last.as_ref() == Some(&next) {
                return Ok(next);
            }
            last = Some(next);
        }
    }

    /// All objects of a device that only this process has.
    fn of_fabric() -> Verdict<Resources> {
        let counts = env::device().resources()?;
        let named = |(kind, ..): &(&'static str, u16, u16, u16)| Some((*kind, counts.get(kind)?));
        let own = KINDS.iter().filter_map(named).filter(|(_, count)| *count > 0).collect();
        Ok(Resources { own, orphaned: Counts::default() })
    }

    fn once(index: u32) -> Verdict<Resources> {
        let mut found = Resources::default();
        let mut known = BTreeMap::new();
        for (kind, command, list, entry) in KINDS {
            let messages = match dump(command, Some(index)) {
                // Before Linux 5.14 there is no list of these.
                Err(Errno::INVAL)
                    if ["ctx", "srq"].contains(&kind) && !env::kernel_is_since(5, 14) =>
                {
                    continue;
                }
                messages => {
                    messages.map_err(|errno| Stop::fail(format!("the list of {kind}: {errno}")))?
                }
            };
            for message in messages {
                for (_, objects) in attributes(&message).filter(|(name, _)| *name == list) {
                    for (_, object) in attributes(objects).filter(|(name, _)| *name == entry) {
                        let counts = match owner(object, &mut known) {
                            Owner::Us => &mut found.own,
                            Owner::Nobody => &mut found.orphaned,
                            Owner::Others => continue,
                        };
                        *counts.entry(kind).or_default() += 1;
                    }
                }
            }
        }
        Ok(found)
    }

    /// Contexts of living threads.
    pub(crate) fn ctx(&self) -> u64 {
        self.of("ctx")
    }

    /// Protection domains of living threads.
    pub(crate) fn pd(&self) -> u64 {
        self.of("pd")
    }

    /// Queue pairs of living threads.
    pub(crate) fn qp(&self) -> u64 {
        self.of("qp")
    }

    fn of(&self, kind: &str) -> u64 {
        self.own.get(kind).copied().unwrap_or(0)
    }

    /// Whether the objects of living threads are those of `before`.
    pub(crate) fn has_the_own_of(&self, before: &Resources) -> bool {
        self.own == before.own
    }

    /// Whether there is no object that did not exist `before`. Objects that a neighbour left then, and that the kernel
    /// was cleaning up, may be gone.
    pub(crate) fn adds_nothing_to(&self, before: &Resources) -> bool {
        let had = |kind| before.orphaned.get(kind).copied().unwrap_or(0);
        self.own == before.own && self.orphaned.iter().all(|(kind, count)| *count <= had(kind))
    }
}

impl fmt::Display for Resources {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "own {:?}, of threads that ended {:?}", self.own, self.orphaned)
    }
}

/// The owner of an object.
#[derive(Clone, Copy)]
enum Owner {
    Us,
    /// The kernel's, or those of other processes.
    Others,
    /// None: the thread that made it has ended.
    Nobody,
}

/// The owner of an object, by the attributes of its entry; `known` caches the owners by thread.
fn owner(object: &[u8], known: &mut BTreeMap<u32, Owner>) -> Owner {
    let value =
        |wanted| attributes(object).find_map(|(name, value)| (name == wanted).then_some(value));
    if value(RDMA_NLDEV_ATTR_RES_KERN_NAME).is_some() {
        return Owner::Others;
    }
    match value(RDMA_NLDEV_ATTR_RES_PID).and_then(|bytes| bytes.try_into().ok()) {
        None => Owner::Nobody,
        Some(bytes) => {
            let thread = u32::from_ne_bytes(bytes);
            *known.entry(thread).or_insert_with(|| owner_of(thread))
        }
    }
}

fn owner_of(thread: u32) -> Owner {
    let own = std::process::id();
    let mut at = thread;
    loop {
        let Ok(status) = fs::read_to_string(format!("/proc/{at}/status")) else {
            // A /proc with `hidepid` does not show other users' processes.
            let hidden = Pid::from_raw(at as i32)
                .is_some_and(|pid| test_kill_process(pid) == Err(Errno::PERM));
            return if at == thread && !hidden { Owner::Nobody } else { Owner::Others };
        };
        let number = |name| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            line.and_then(|value| value.trim().parse::<u32>().ok()).unwrap_or(0)
        };
        if number("Tgid:") == own {
            return Owner::Us;
        }
        at = number("PPid:");
        if at <= 1 {
            return Owner::Others;
        }
    }
}

/// The number of a device in RDMA netlink.
fn index(device: &str) -> Verdict<u32> {
    for message in dump(RDMA_NLDEV_CMD_GET, None)? {
        let value = |wanted| {
            attributes(&message).find_map(|(name, value)| (name == wanted).then_some(value))
        };
        let name = value(RDMA_NLDEV_ATTR_DEV_NAME).unwrap_or_default();
        if name.strip_suffix(b"\0").unwrap_or(name) == device.as_bytes() {
            let index = value(RDMA_NLDEV_ATTR_DEV_INDEX).and_then(|bytes| bytes.try_into().ok());
            return index
                .map(u32::from_ne_bytes)
                .ok_or_else(|| Stop::fail("a device without index"));
        }
    }
    Err(Stop::fail(format!("RDMA netlink does not list {device}")))
}

/// The attributes of a message or of a nest: names without flags, and values.
fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    const FLAGS: u16 = 0xc000;
    std::iter::from_fn(move || {
        let length = usize::from(u16::from_ne_bytes([*bytes.first()?, *bytes.get(1)?]));
        let name = u16::from_ne_bytes([*bytes.get(2)?, *bytes.get(3)?]) & !FLAGS;
        let value = bytes.get(4..length)?;
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((name, value))
    })
}

/// The attributes of each message that answers a request for a list.
fn dump(command: u16, index: Option<u32>) -> Result<Vec<Vec<u8>>, Errno> {
    const HEADER: usize = 16;
    /// `NLM_F_REQUEST`, `NLM_F_DUMP`.
    const FLAGS: u16 = 0x1 | 0x300;
    const NLMSG_ERROR: u16 = 2;
    const NLMSG_DONE: u16 = 3;
    let mut request = Vec::new();
    request.extend([0; 4]);
    request.extend(RDMA_NL_GET_TYPE(RDMA_NL_NLDEV, command).to_ne_bytes());
    request.extend(FLAGS.to_ne_bytes());
    request.extend([0; 8]);
    if let Some(index) = index {
        request.extend(8_u16.to_ne_bytes());
        request.extend(RDMA_NLDEV_ATTR_DEV_INDEX.to_ne_bytes());
        request.extend(index.to_ne_bytes());
    }
    let length = request.len() as u32;
    request[..4].copy_from_slice(&length.to_ne_bytes());
    let socket = socket_with(
        AddressFamily::NETLINK,
        SocketType::RAW,
        SocketFlags::CLOEXEC,
        Some(netlink::RDMA),
    )?;
    sendto(&socket, &request, SendFlags::empty(), &SocketAddrNetlink::new(0, 0))?;
    let (mut answers, mut buffer) = (Vec::new(), vec![0; 64 << 10]);
    loop {
        let (_, received, _) = recvfrom(&socket, &mut buffer[..], RecvFlags::empty())?;
        let mut rest = &buffer[..received.min(buffer.len())];
        while let Some(header) = rest.first_chunk::<HEADER>() {
            let length = u32::from_ne_bytes([header[0], header[1], header[2], header[3]]) as usize;
            let body = rest.get(HEADER..length).ok_or(Errno::BADMSG)?;
            match u16::from_ne_bytes([header[4], header[5]]) {
                // Both have a status: a negative errno if the list is cut short.
                last @ (NLMSG_DONE | NLMSG_ERROR) => {
                    let code = body.first_chunk().map_or(0, |code| i32::from_ne_bytes(*code));
                    if last == NLMSG_DONE && code >= 0 {
                        return Ok(answers);
                    }
                    return Err(Errno::from_raw_os_error(-code));
                }
                _ => answers.push(body.to_vec()),
            }
            rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
        }
    }
}
