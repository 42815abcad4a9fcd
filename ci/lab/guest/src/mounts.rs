//! File systems and the few files that programs expect of a root directory.
//!
//! The initramfs brings directories, programs and `/etc`; this adds the file systems of a running kernel.

use crate::Failure;
use lab_guest::order::{GUEST_DIRECTORIES, HOST_PATH, HOST_TAG, HostFiles};
use nix::mount::{MsFlags, mount};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
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

/// Options of the host's file system: writes of the guest are there at once, those of mapped memory when the guest
/// powers off.
const HOST_OPTIONS: &str = "trans=virtio,version=9p2000.L,msize=512000,cache=mmap";

/// Mounts the host's file system, and in it the guest's own directories.
pub(crate) fn mount_host(files: &HostFiles) -> Result<(), Failure> {
    let host = Path::new(HOST_PATH);
    fs::create_dir_all(host)?;
    mount(Some(HOST_TAG), host, Some("9p"), MsFlags::MS_NODEV, Some(HOST_OPTIONS))
        .map_err(|error| format!("mount the host's file system on {HOST_PATH}: {error}"))?;
    let below = |root: &Path, path: &str| root.join(path.trim_start_matches('/'));
    // A directory that another one covers is reached by a mount of its own.
    let aside = Path::new("/lab/kept");
    for kept in &files.kept {
        bind(&below(host, kept), &below(aside, kept))?;
    }
    for own in GUEST_DIRECTORIES {
        let target = below(host, own);
        if !target.is_dir() {
            return Err(format!("the host has no directory {own} to put the guest's over").into());
        }
        bind(Path::new(own), &target)?;
    }
    for kept in &files.kept {
        bind(&below(aside, kept), &below(host, kept))?;
    }
    Ok(())
}

/// Makes a tree of files appear at a second place, whose directory is made if it is absent.
fn bind(from: &Path, to: &Path) -> Result<(), Failure> {
    fs::create_dir_all(to).map_err(|error| format!("create {}: {error}", to.display()))?;
    mount(Some(from), to, None::<&str>, MsFlags::MS_BIND | MsFlags::MS_REC, None::<&str>)
        .map_err(|error| format!("mount {} on {}: {error}", from.display(), to.display()).into())
}
