//! File systems and the few files that programs expect of a root directory.
//!
//! The initramfs brings directories, programs and `/etc`; this adds what only a running kernel has.

use crate::Failure;
use nix::mount::{MsFlags, mount};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::{env, fs};

/// Mounts everything and gives this process its environment.
pub(crate) fn mount_all() -> Result<(), Failure> {
    let none = MsFlags::empty();
    for (kind, target, options) in [
        ("proc", "/proc", None),
        ("sysfs", "/sys", None),
        ("devtmpfs", "/dev", Some("mode=0755")),
        ("devpts", "/dev/pts", Some("mode=0620,ptmxmode=0666")),
        ("tmpfs", "/dev/shm", Some("mode=1777")),
        ("tmpfs", "/tmp", Some("mode=1777")),
        ("tmpfs", "/run", Some("mode=0755")),
    ] {
        fs::create_dir_all(target).map_err(|error| format!("create {target}: {error}"))?;
        mount(Some(kind), target, Some(kind), none, options)
            .map_err(|error| format!("mount {kind} on {target}: {error}"))?;
    }
    // Some kernels lack these; a test that needs one reports that itself.
    for (kind, target) in [
        ("debugfs", "/sys/kernel/debug"),
        ("tracefs", "/sys/kernel/tracing"),
        ("configfs", "/sys/kernel/config"),
        ("cgroup2", "/sys/fs/cgroup"),
    ] {
        let _absent = mount(Some(kind), target, Some(kind), none, None::<&str>);
    }
    for (target, name) in [
        ("/proc/self/fd", "/dev/fd"),
        ("/proc/self/fd/0", "/dev/stdin"),
        ("/proc/self/fd/1", "/dev/stdout"),
        ("/proc/self/fd/2", "/dev/stderr"),
    ] {
        symlink(target, name).map_err(|error| format!("link {name}: {error}"))?;
    }
    fs::create_dir_all("/run/netns")?;
    fs::set_permissions("/dev/pts/ptmx", fs::Permissions::from_mode(0o666))?;
    fs::remove_file("/dev/ptmx")?;
    symlink("pts/ptmx", "/dev/ptmx")?;
    nix::unistd::sethostname("lab").map_err(|error| format!("set the host name: {error}"))?;
    env::set_current_dir("/")?;
    Ok(())
}
