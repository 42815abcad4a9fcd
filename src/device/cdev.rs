//! The character device behind which a device's uverbs ABI lives, and how to open it safely: the
//! file must be a character device and have the very number that the kernel named, so that a stale
//! or planted node is not mistaken for the device.

use crate::error::{Error, Result};
use rustix::fd::{BorrowedFd, OwnedFd};
use rustix::fs::{FileType, Mode, OFlags, fstat, major, makedev, minor, open, stat};
use rustix::io::{Errno, retry_on_intr};
use std::fmt;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// The longest wait for udev to make a node.
const UDEV_PATIENCE: Duration = Duration::from_secs(3);

/// The number of a character device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceNumber {
    /// The driver's half.
    pub major: u32,
    /// The device's half.
    pub minor: u32,
}

impl DeviceNumber {
    /// From the form in which netlink carries it (`huge_encode_dev`): the minor number wraps
    /// around the twelve bits of the major one.
    pub(super) const fn from_kernel(value: u64) -> Self {
        let value = value as u32;
        DeviceNumber { major: value >> 8 & 0xfff, minor: value & 0xff | value >> 12 & 0xfff00 }
    }

    /// From sysfs's spelling, `231:192`.
    pub(super) fn from_sysfs(text: &str) -> Option<Self> {
        let (major, minor) = text.split_once(':')?;
        Some(DeviceNumber { major: major.parse().ok()?, minor: minor.parse().ok()? })
    }
}

impl fmt::Display for DeviceNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.major, self.minor)
    }
}

/// A device's uverbs node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Node {
    /// "uverbs0", without directory.
    pub(super) name: String,
    pub(super) number: DeviceNumber,
    /// Version of the driver's ABI.
    pub(super) abi: u32,
}

/// The directories in which nodes are searched, and the longest wait for one.
pub(super) struct Nodes<'a> {
    pub(super) dev: &'a Path,
    /// `None` for the default of a system with or without udev, decided when a node is not there.
    pub(super) patience: Option<Duration>,
}

impl Nodes<'static> {
    /// The directories of the running system.
    pub(super) fn system() -> Self {
        Nodes { dev: Path::new("/dev"), patience: None }
    }
}

/// The reason why a path did not lead to the device.
#[derive(Debug)]
enum Miss {
    /// There is nothing.
    Absent,
    /// There is something else.
    Other(String),
    /// It is the device, or may be, but cannot be opened.
    Refused(Errno),
}

impl Nodes<'_> {
    /// Opens the node of `device` for reading and writing, closed on exec.
    pub(super) fn open(&self, verb: &'static str, device: &str, node: &Node) -> Result<OwnedFd> {
        if node.name.is_empty() || node.name.starts_with('.') || node.name.contains('/') {
            return Err(Error::new(verb, Errno::BADMSG)
                .detail(format!("the kernel named {:?} as the node of {device}", node.name)));
        }
        let named = self.dev.join("infiniband").join(&node.name);
        let numbered = self.dev.join("char").join(node.number.to_string());

        let start = Instant::now();
        let mut patience = self.patience;
        let mut pause = Duration::from_millis(5);
        let miss = loop {
            let mut found = None;
            for path in [&named, &numbered] {
                match attempt(path, node.number) {
                    Ok(fd) => return Ok(fd),
                    Err(Miss::Refused(errno)) => {
                        return Err(refused(verb, errno, device, path, node));
                    }
                    Err(Miss::Other(what)) => found = Some((path, what)),
                    Err(Miss::Absent) => {}
                }
            }
            if start.elapsed() >= *patience.get_or_insert_with(udev_patience) {
                break found;
            }
            sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(100));
        };
        Err(missing(verb, device, node, &named, miss))
    }
}

/// Opens the node of `device` at a path that the caller chose.
pub(super) fn open_at(
    verb: &'static str,
    device: &str,
    node: &Node,
    path: &PathBuf,
) -> Result<OwnedFd> {
    attempt(path, node.number).map_err(|miss| match miss {
        Miss::Refused(errno) => refused(verb, errno, device, path, node),
        Miss::Other(what) => missing(verb, device, node, path, Some((path, what))),
        Miss::Absent => absent(verb, path),
    })
}

/// Whether the number may be a uverbs device's: `/proc/devices` says which are, if it can be read.
pub(super) fn may_be_uverbs(number: DeviceNumber) -> bool {
    std::fs::read_to_string("/proc/devices").map_or(true, |text| has_major(&text, number.major))
}

/// Whether `/proc/devices` lists the major number among those of uverbs.
fn has_major(text: &str, major: u32) -> bool {
    let of_uverbs = |line: &str| {
        let mut words = line.split_whitespace();
        words.next() == Some(major.to_string().as_str()) && words.next() == Some("infiniband_verbs")
    };
    text.lines().any(of_uverbs)
}

/// The number of the character device at a path.
pub(super) fn number_at(verb: &'static str, path: &Path) -> Result<DeviceNumber> {
    let stat = stat(path).map_err(|errno| match errno {
        Errno::NOENT | Errno::NOTDIR => absent(verb, path),
        errno => {
            Error::from_kernel(verb, errno).detail(format!("cannot look at {}", path.display()))
        }
    })?;
    number_of(verb, &stat, &path.display())
}

/// The number of an open character device.
pub(super) fn number_of_file(verb: &'static str, fd: BorrowedFd<'_>) -> Result<DeviceNumber> {
    let stat = fstat(fd).map_err(|errno| Error::from_kernel(verb, errno))?;
    number_of(verb, &stat, &"the file")
}

fn number_of(
    verb: &'static str,
    stat: &rustix::fs::Stat,
    what: &dyn fmt::Display,
) -> Result<DeviceNumber> {
    let kind = FileType::from_raw_mode(stat.st_mode);
    if kind != FileType::CharacterDevice {
        return Err(Error::invalid(verb, format!("{what} is {}", describe(kind))));
    }
    Ok(DeviceNumber { major: major(stat.st_rdev), minor: minor(stat.st_rdev) })
}

/// The name of a kind of file that is no device.
fn describe(kind: FileType) -> &'static str {
    match kind {
        FileType::RegularFile => "a regular file, not a device",
        FileType::Directory => "a directory, not a device",
        FileType::Symlink => "a symbolic link, not a device",
        FileType::Fifo => "a pipe, not a device",
        FileType::Socket => "a socket, not a device",
        FileType::BlockDevice => "a block device, not a character device",
        _ => "no character device",
    }
}

fn absent(verb: &'static str, path: &Path) -> Error {
    Error::new(verb, Errno::NOENT)
        .detail(format!("there is no {}; in a container pass the device through", path.display()))
}

/// Without udev no nodes appear after those that the kernel made, so there is nothing to wait for.
fn udev_patience() -> Duration {
    let udev = Path::new("/run/udev/control").exists();
    if udev { UDEV_PATIENCE } else { Duration::ZERO }
}

fn attempt(path: &PathBuf, number: DeviceNumber) -> std::result::Result<OwnedFd, Miss> {
    let absent = |errno| match errno {
        Errno::NOENT | Errno::NOTDIR => Miss::Absent,
        errno => Miss::Refused(errno),
    };
    // Opening another kind of device can have effects (a tape rewinds), so the path is checked first.
    is_device(&stat(path).map_err(absent)?, number).map_err(Miss::Other)?;
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOCTTY;
    let fd = retry_on_intr(|| open(path, flags, Mode::empty())).map_err(absent)?;
    // The path may lead elsewhere by now, so the open file is checked, too.
    is_device(&fstat(&fd).map_err(Miss::Refused)?, number).map_err(Miss::Other)?;
    Ok(fd)
}

/// Checks that a file is the character device with this number; the error describes the file.
fn is_device(stat: &rustix::fs::Stat, number: DeviceNumber) -> std::result::Result<(), String> {
    if FileType::from_raw_mode(stat.st_mode) != FileType::CharacterDevice {
        return Err("is no character device".into());
    }
    if stat.st_rdev != makedev(number.major, number.minor) {
        let other = DeviceNumber { major: major(stat.st_rdev), minor: minor(stat.st_rdev) };
        return Err(format!("is character device {other}"));
    }
    Ok(())
}

fn refused(verb: &'static str, errno: Errno, device: &str, path: &Path, node: &Node) -> Error {
    let (path, error) = (path.display(), Error::from_kernel(verb, errno));
    let detail = match errno {
        Errno::ACCESS => format!(
            "no permission to read and write {path}; udev normally gives it mode 0666, so see \
             its rules, the permissions of its directory, and with SELinux `ausearch -m avc`"
        ),
        Errno::PERM => format!(
            "{device} belongs to another network namespace (`rdma system show`, \
             `rdma dev set {device} netns …`), or a device policy keeps this process from {path}"
        ),
        Errno::NXIO => {
            format!("{path} leads to no device any more; list the devices afresh")
        }
        Errno::NODEV => {
            format!("the driver of {device} is being unloaded; list the devices afresh")
        }
        Errno::IO => {
            format!("{device} was removed or is being reset; list the devices afresh")
        }
        _ => {
            return error
                .context(|| format!("cannot open {path} (character device {})", node.number));
        }
    };
    error.detail(detail)
}

fn missing(
    verb: &'static str,
    device: &str,
    node: &Node,
    named: &Path,
    found: Option<(&PathBuf, String)>,
) -> Error {
    let number = node.number;
    match found {
        Some((path, what)) => Error::new(verb, Errno::NODEV).detail(format!(
            "{} {what}, but {device} is character device {number}; remove the stale node or let \
             udev make it anew",
            path.display()
        )),
        None => Error::new(verb, Errno::NOENT).detail(format!(
            "{device} has no node: neither {} nor its counterpart in char/ leads to character \
             device {number}; run udev, or in a container pass the device through",
            named.display()
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::sysfs::scratch::Scratch;
    use rustix::io::{FdFlags, fcntl_getfd};

    #[test]
    fn major_numbers_of_uverbs_are_told_from_others() {
        let text = "Character devices:\n  1 mem\n231 infiniband_verbs\n235 infiniband_verbs\n";
        for (major, expected) in [(231, true), (235, true), (1, false), (23, false)] {
            assert_eq!(has_major(text, major), expected, "{major}");
        }
    }

    const NULL: DeviceNumber = DeviceNumber { major: 1, minor: 3 };
    const ZERO: DeviceNumber = DeviceNumber { major: 1, minor: 5 };

    fn node(name: &str, number: DeviceNumber) -> Node {
        Node { name: name.into(), number, abi: 1 }
    }

    fn open_in(dev: &Scratch, patience: Duration, node: &Node) -> Result<OwnedFd> {
        Nodes { dev: dev.path(), patience: Some(patience) }.open("open_device", "rxe0", node)
    }

    #[test]
    fn numbers_decode_as_the_kernel_packs_them() {
        let first = DeviceNumber::from_kernel(0xe7c0);
        assert_eq!(first, DeviceNumber { major: 231, minor: 192 });
        assert_eq!(first.to_string(), "231:192");
        assert_eq!(DeviceNumber::from_sysfs("231:192"), Some(first));
        let large = DeviceNumber::from_kernel(0xabc1_fecd);
        assert_eq!(large, DeviceNumber { major: 0x1fe, minor: 0xabccd });
        for text in ["", "231", "231:", ":192", "231:-1", "231:192:1"] {
            assert_eq!(DeviceNumber::from_sysfs(text), None, "{text:?}");
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "it makes files and directories")]
    fn the_right_device_opens_closed_on_exec() {
        let dev = Scratch::new("cdev-right");
        dev.link("infiniband/uverbs0", "/dev/null");
        let fd = open_in(&dev, Duration::ZERO, &node("uverbs0", NULL)).unwrap();
        assert!(fcntl_getfd(&fd).unwrap().contains(FdFlags::CLOEXEC));
        let flags = rustix::fs::fcntl_getfl(&fd).unwrap();
        assert!(flags.contains(OFlags::RDWR), "{flags:?}");
    }

    #[test]
    #[cfg_attr(miri, ignore = "it makes files and directories")]
    fn a_stale_node_is_passed_over_for_the_numbered_one() {
        let dev = Scratch::new("cdev-stale");
        dev.link("infiniband/uverbs0", "/dev/null");
        dev.link("char/1:5", "/dev/zero");
        let fd = open_in(&dev, Duration::ZERO, &node("uverbs0", ZERO)).unwrap();
        assert_eq!(fstat(&fd).unwrap().st_rdev, makedev(1, 5));
    }

    #[test]
    #[cfg_attr(miri, ignore = "it makes files and directories")]
    fn a_stale_node_alone_is_an_error_that_says_so() {
        let dev = Scratch::new("cdev-only-stale");
        dev.link("infiniband/uverbs0", "/dev/null");
        let error = open_in(&dev, Duration::ZERO, &node("uverbs0", ZERO)).unwrap_err();
        assert_eq!(error.errno(), Errno::NODEV);
        assert!(error.message().contains("is character device 1:3"), "{error}");
        assert!(error.message().contains("rxe0 is character device 1:5"), "{error}");
    }

    #[test]
    #[cfg_attr(miri, ignore = "it makes files and directories")]
    fn files_and_pipes_are_not_devices() {
        let dev = Scratch::new("cdev-file");
        dev.file("infiniband/uverbs0", "");
        let error = open_in(&dev, Duration::ZERO, &node("uverbs0", NULL)).unwrap_err();
        assert_eq!(error.errno(), Errno::NODEV);
        assert!(error.message().contains("no character device"), "{error}");
    }

    #[test]
    #[cfg_attr(miri, ignore = "it makes files and directories")]
    fn an_absent_node_is_enoent_without_udev_at_once() {
        let dev = Scratch::new("cdev-absent");
        let start = Instant::now();
        let error = open_in(&dev, Duration::ZERO, &node("uverbs7", NULL)).unwrap_err();
        assert_eq!(error.errno(), Errno::NOENT);
        assert!(error.message().contains("infiniband/uverbs7"), "{error}");
        assert!(start.elapsed() < Duration::from_secs(1));
    }

    #[test]
    #[cfg_attr(miri, ignore = "it makes files and directories")]
    fn a_node_that_udev_makes_late_is_waited_for() {
        let dev = Scratch::new("cdev-late");
        let node = node("uverbs0", NULL);
        std::thread::scope(|scope| {
            let opening = scope.spawn(|| open_in(&dev, Duration::from_secs(20), &node));
            sleep(Duration::from_millis(50));
            assert!(!opening.is_finished());
            dev.link("char/1:3", "/dev/null");
            opening.join().unwrap().unwrap();
        });
    }

    #[test]
    #[cfg_attr(miri, ignore = "it makes files and directories")]
    fn waiting_ends() {
        let dev = Scratch::new("cdev-never");
        let patience = Duration::from_millis(60);
        let start = Instant::now();
        open_in(&dev, patience, &node("uverbs0", NULL)).unwrap_err();
        assert!(start.elapsed() >= patience);
    }

    #[test]
    #[cfg_attr(miri, ignore = "it makes files and directories")]
    fn a_node_name_does_not_leave_its_directory() {
        let dev = Scratch::new("cdev-traversal");
        dev.link("null", "/dev/null");
        for name in ["../null", "..", "", "."] {
            let error = open_in(&dev, Duration::ZERO, &node(name, NULL)).unwrap_err();
            assert_eq!(error.errno(), Errno::BADMSG, "{name:?}");
        }
    }

    #[test]
    fn each_refusal_names_a_remedy() {
        let node = node("uverbs0", NULL);
        let path = Path::new("/dev/infiniband/uverbs0");
        for (errno, advice) in [
            (Errno::ACCESS, "udev"),
            (Errno::PERM, "rdma dev set rxe0 netns"),
            (Errno::NXIO, "list the devices afresh"),
            (Errno::NODEV, "being unloaded"),
            (Errno::IO, "removed"),
            (Errno::MFILE, "RLIMIT_NOFILE"),
            (Errno::NFILE, "fs.file-max"),
            (Errno::NOMEM, "1:3): the system or the device is out of memory"),
            (Errno::LOOP, "1:3"),
        ] {
            let error = refused("open_device", errno, "rxe0", path, &node);
            assert_eq!(error.errno(), errno);
            assert!(error.message().contains(advice), "{error}");
        }
    }
}
