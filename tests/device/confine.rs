//! seccomp filters of system calls, as containers and services have them.
//!
//! With `--confined COMMAND…` this program installs the profile that `docs/DEPLOYMENT.md` offers and becomes the
//! command. A system call that the profile lacks kills the command. A container's runtime would let the call fail, and
//! a program that gets by without it would hide the gap.

use crate::verdict::{Stop, Verdict};
use libc::sock_filter;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

/// The profile, in the format of container runtimes.
const PROFILE: &str = include_str!("../../docs/seccomp.json");

/// The first argument of a program that is to become another one under the profile.
const CONFINED: &str = "--confined";

const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
const EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;

/// The offset of the call's number in `seccomp_data`.
const NUMBER: u32 = 0;

/// The offset of the low half of an argument in `seccomp_data`.
const fn argument(index: u32) -> u32 {
    let low = if cfg!(target_endian = "little") { 0 } else { 4 };
    16 + 8 * index + low
}

fn op(code: u16, jt: u8, jf: u8, k: u32) -> sock_filter {
    sock_filter { code, jt, jf, k }
}

/// Becomes the confined program, if this process was started for that.
pub(crate) fn run() -> Option<ExitCode> {
    let mut arguments = std::env::args().skip(1);
    if arguments.next().as_deref() != Some(CONFINED) {
        return None;
    }
    let program = arguments.next().unwrap_or_default();
    let stop = match profile(PROFILE).and_then(|mut filter| install(&mut filter)) {
        Ok(()) => Stop::fail(Command::new(&program).args(arguments).exec()),
        Err(stop) => stop,
    };
    eprintln!("{program} under the profile: {stop:?}");
    Some(ExitCode::FAILURE)
}

/// From now on this process has no netlink: `socket` answers `EAFNOSUPPORT`, as under systemd's
/// `RestrictAddressFamilies=`.
#[cfg(not(target_arch = "x86"))]
pub(crate) fn forbid_netlink() -> Verdict {
    forbid(libc::SYS_socket, 0, libc::AF_NETLINK, libc::EAFNOSUPPORT)
}

/// From now on this process makes no sockets: on this architecture the address family is in memory, which a filter
/// cannot read.
#[cfg(target_arch = "x86")]
pub(crate) fn forbid_netlink() -> Verdict {
    /// `SYS_SOCKET` of `linux/net.h`.
    const SOCKET: i32 = 1;
    forbid(libc::SYS_socketcall, 0, SOCKET, libc::EAFNOSUPPORT)?;
    forbid(libc::SYS_socket, 0, libc::AF_NETLINK, libc::EAFNOSUPPORT)
}

/// From now on `madvise(MADV_WIPEONFORK)` answers `EINVAL`, as before Linux 4.14.
pub(crate) fn forbid_wiping_in_children() -> Verdict {
    forbid(libc::SYS_madvise, 2, libc::MADV_WIPEONFORK, libc::EINVAL)
}

/// From now on `madvise(MADV_DONTFORK)` answers `EINVAL`.
pub(crate) fn forbid_keeping_from_children() -> Verdict {
    forbid(libc::SYS_madvise, 2, libc::MADV_DONTFORK, libc::EINVAL)
}

/// Lets a call fail if one of its arguments has this value.
fn forbid(call: libc::c_long, index: u32, value: i32, errno: i32) -> Verdict {
    install(&mut [
        op(LOAD, 0, 0, NUMBER),
        op(EQUAL, 0, 3, call as u32),
        op(LOAD, 0, 0, argument(index)),
        op(EQUAL, 0, 1, value as u32),
        op(RETURN, 0, 0, libc::SECCOMP_RET_ERRNO | errno as u32),
        op(RETURN, 0, 0, libc::SECCOMP_RET_ALLOW),
    ])
}

/// Installs a filter for this process and the programs that it executes.
#[allow(unsafe_code, reason = "there is no other way to install a filter")]
fn install(filter: &mut [sock_filter]) -> Verdict {
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    rustix::thread::set_no_new_privs(true)?;
    // SAFETY: the kernel copies the program, and the filter that it points to, within the call.
    let set = unsafe {
        libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, std::ptr::from_ref(&program))
    };
    if set == 0 { Ok(()) } else { Err(std::io::Error::last_os_error().into()) }
}

macro_rules! numbers {
    ($function:ident: $($name:literal = $constant:ident,)*) => {
        fn $function(name: &str) -> Option<u32> {
            match name {
                $($name => Some(libc::$constant as u32),)*
                _ => None,
            }
        }
    };
}

numbers! {
    number_everywhere:
    "accept4" = SYS_accept4,
    "bind" = SYS_bind,
    "brk" = SYS_brk,
    "clock_gettime" = SYS_clock_gettime,
    "clock_nanosleep" = SYS_clock_nanosleep,
    "clone" = SYS_clone,
    "clone3" = SYS_clone3,
    "close" = SYS_close,
    "connect" = SYS_connect,
    "epoll_create1" = SYS_epoll_create1,
    "epoll_ctl" = SYS_epoll_ctl,
    "epoll_pwait" = SYS_epoll_pwait,
    "eventfd2" = SYS_eventfd2,
    "execve" = SYS_execve,
    "exit" = SYS_exit,
    "exit_group" = SYS_exit_group,
    "fcntl" = SYS_fcntl,
    "fstat" = SYS_fstat,
    "ftruncate" = SYS_ftruncate,
    "futex" = SYS_futex,
    "getdents64" = SYS_getdents64,
    "getegid" = SYS_getegid,
    "geteuid" = SYS_geteuid,
    "getgid" = SYS_getgid,
    "getpeername" = SYS_getpeername,
    "getpid" = SYS_getpid,
    "getrandom" = SYS_getrandom,
    "getsockname" = SYS_getsockname,
    "getsockopt" = SYS_getsockopt,
    "gettid" = SYS_gettid,
    "getuid" = SYS_getuid,
    "ioctl" = SYS_ioctl,
    "listen" = SYS_listen,
    "lseek" = SYS_lseek,
    "madvise" = SYS_madvise,
    "mbind" = SYS_mbind,
    "memfd_create" = SYS_memfd_create,
    "mmap" = SYS_mmap,
    "mprotect" = SYS_mprotect,
    "mremap" = SYS_mremap,
    "munmap" = SYS_munmap,
    "nanosleep" = SYS_nanosleep,
    "openat" = SYS_openat,
    "ppoll" = SYS_ppoll,
    "prlimit64" = SYS_prlimit64,
    "prctl" = SYS_prctl,
    "read" = SYS_read,
    "readlinkat" = SYS_readlinkat,
    "readv" = SYS_readv,
    "recvfrom" = SYS_recvfrom,
    "recvmsg" = SYS_recvmsg,
    "restart_syscall" = SYS_restart_syscall,
    "rt_sigaction" = SYS_rt_sigaction,
    "rt_sigprocmask" = SYS_rt_sigprocmask,
    "rt_sigreturn" = SYS_rt_sigreturn,
    "sched_getaffinity" = SYS_sched_getaffinity,
    "sched_setaffinity" = SYS_sched_setaffinity,
    "sched_yield" = SYS_sched_yield,
    "sendmmsg" = SYS_sendmmsg,
    "sendmsg" = SYS_sendmsg,
    "sendto" = SYS_sendto,
    "set_robust_list" = SYS_set_robust_list,
    "set_tid_address" = SYS_set_tid_address,
    "setsockopt" = SYS_setsockopt,
    "shutdown" = SYS_shutdown,
    "sigaltstack" = SYS_sigaltstack,
    "socket" = SYS_socket,
    "socketpair" = SYS_socketpair,
    "statx" = SYS_statx,
    "tgkill" = SYS_tgkill,
    "uname" = SYS_uname,
    "write" = SYS_write,
    "writev" = SYS_writev,
}

/// System calls that later architectures have in newer forms only, or not at all.
const OLDER: [&str; 8] =
    ["access", "arch_prctl", "epoll_wait", "lstat", "open", "poll", "readlink", "stat"];

#[cfg(target_arch = "x86_64")]
numbers! {
    older_number:
    "access" = SYS_access,
    "arch_prctl" = SYS_arch_prctl,
    "epoll_wait" = SYS_epoll_wait,
    "lstat" = SYS_lstat,
    "open" = SYS_open,
    "poll" = SYS_poll,
    "readlink" = SYS_readlink,
    "stat" = SYS_stat,
}

#[cfg(not(target_arch = "x86_64"))]
fn older_number(_: &str) -> Option<u32> {
    None
}

// Architectures of 32 bits have another call in place of the first, and `libc` lacks their second.
#[cfg(target_pointer_width = "64")]
numbers! {
    wide_number:
    "newfstatat" = SYS_newfstatat,
    "rseq" = SYS_rseq,
}

#[cfg(not(target_pointer_width = "64"))]
fn wide_number(_: &str) -> Option<u32> {
    None
}

fn number(name: &str) -> Option<u32> {
    number_everywhere(name).or_else(|| wide_number(name)).or_else(|| older_number(name))
}

/// The filter of a profile: calls that it names, with the value of an argument where it names one.
fn profile(text: &str) -> Verdict<Vec<sock_filter>> {
    let mut filter = vec![op(LOAD, 0, 0, NUMBER)];
    let allow = op(RETURN, 0, 0, libc::SECCOMP_RET_ALLOW);
    for rule in text.split("\"names\"").skip(1) {
        let names = rule.split(['[', ']']).nth(1).unwrap_or_default();
        let value = |key: &str| -> Option<u32> {
            let rest = rule.split_once(key)?.1;
            rest.split(|c: char| !c.is_ascii_digit()).find(|word| !word.is_empty())?.parse().ok()
        };
        let condition = value("\"index\"").zip(value("\"value\""));
        let names = names.split('"').skip(1).step_by(2);
        for name in names.filter(|name| cfg!(target_arch = "x86_64") || !OLDER.contains(name)) {
            let number = number(name).ok_or_else(|| Stop::fail(format!("no number of {name}")))?;
            match condition {
                None => filter.extend([op(EQUAL, 0, 1, number), allow]),
                Some((index, value)) => filter.extend([
                    op(EQUAL, 0, 4, number),
                    op(LOAD, 0, 0, argument(index)),
                    op(EQUAL, 0, 1, value),
                    allow,
                    // Another rule may be for the same call.
                    op(LOAD, 0, 0, NUMBER),
                ]),
            }
        }
    }
    filter.push(op(RETURN, 0, 0, libc::SECCOMP_RET_KILL_PROCESS));
    Ok(filter)
}
