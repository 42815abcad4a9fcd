//! A system call of x86-64 in words: its name, the arguments that tell it from others of that name, its result.

use nix::libc::{self, user_regs_struct};
use nix::unistd::Pid;
use std::fs::File;
use std::os::unix::fs::FileExt;
use uverbs_uapi::device::{UVERBS_ATTR_WRITE_CMD, UVERBS_METHOD_INVOKE_WRITE};
use uverbs_uapi::enumeration::Enumeration;
use uverbs_uapi::ioctl::{RDMA_VERBS_IOCTL, ib_uverbs_attr, ib_uverbs_ioctl_hdr};
use uverbs_uapi::object::UVERBS_OBJECT_DEVICE;
use uverbs_uapi::reflection::enumerations;
use uverbs_uapi::write::IB_USER_VERBS_CMD_FLAG_EXTENDED;

/// Longest path that is shown.
const PATH: usize = 128;

macro_rules! names {
    ($($constant:ident = $name:literal,)*) => {
        fn name(number: i64) -> Option<&'static str> {
            match number {
                $(libc::$constant => Some($name),)*
                _ => None,
            }
        }
    };
}

// The calls of a program that lists devices, opens one and uses it; other calls are shown by
// number.
names! {
    SYS_read = "read",
    SYS_write = "write",
    SYS_open = "open",
    SYS_close = "close",
    SYS_stat = "stat",
    SYS_fstat = "fstat",
    SYS_lstat = "lstat",
    SYS_poll = "poll",
    SYS_lseek = "lseek",
    SYS_mmap = "mmap",
    SYS_mprotect = "mprotect",
    SYS_munmap = "munmap",
    SYS_brk = "brk",
    SYS_rt_sigaction = "rt_sigaction",
    SYS_rt_sigprocmask = "rt_sigprocmask",
    SYS_ioctl = "ioctl",
    SYS_pread64 = "pread64",
    SYS_access = "access",
    SYS_mremap = "mremap",
    SYS_madvise = "madvise",
    SYS_nanosleep = "nanosleep",
    SYS_getpid = "getpid",
    SYS_socket = "socket",
    SYS_sendto = "sendto",
    SYS_recvfrom = "recvfrom",
    SYS_sendmsg = "sendmsg",
    SYS_recvmsg = "recvmsg",
    SYS_bind = "bind",
    SYS_getsockname = "getsockname",
    SYS_setsockopt = "setsockopt",
    SYS_execve = "execve",
    SYS_uname = "uname",
    SYS_fcntl = "fcntl",
    SYS_prctl = "prctl",
    SYS_gettid = "gettid",
    SYS_readlink = "readlink",
    SYS_sigaltstack = "sigaltstack",
    SYS_arch_prctl = "arch_prctl",
    SYS_futex = "futex",
    SYS_sched_getaffinity = "sched_getaffinity",
    SYS_sched_yield = "sched_yield",
    SYS_epoll_wait = "epoll_wait",
    SYS_epoll_ctl = "epoll_ctl",
    SYS_getdents64 = "getdents64",
    SYS_set_tid_address = "set_tid_address",
    SYS_clock_gettime = "clock_gettime",
    SYS_clock_nanosleep = "clock_nanosleep",
    SYS_exit_group = "exit_group",
    SYS_openat = "openat",
    SYS_newfstatat = "newfstatat",
    SYS_readlinkat = "readlinkat",
    SYS_set_robust_list = "set_robust_list",
    SYS_prlimit64 = "prlimit64",
    SYS_getrandom = "getrandom",
    SYS_statx = "statx",
    SYS_rseq = "rseq",
}

/// A call that has returned, from its registers.
pub(crate) fn words(thread: Pid, registers: &user_regs_struct) -> String {
    let number = registers.orig_rax as i64;
    let answer = registers.rax as i64;
    let name = name(number).map_or_else(|| format!("call {number}"), str::to_owned);
    let about = match number {
        libc::SYS_open | libc::SYS_stat | libc::SYS_lstat | libc::SYS_access => {
            path(thread, registers.rdi)
        }
        libc::SYS_readlink | libc::SYS_execve => path(thread, registers.rdi),
        libc::SYS_openat | libc::SYS_newfstatat | libc::SYS_readlinkat | libc::SYS_statx => {
            path(thread, registers.rsi)
        }
        libc::SYS_ioctl => ioctl(thread, registers),
        libc::SYS_mmap => match registers.r8 as i32 {
            file @ 0.. => format!("{} bytes of file {file}", registers.rsi),
            _ => format!("{} bytes", registers.rsi),
        },
        libc::SYS_munmap | libc::SYS_mprotect => format!("{} bytes", registers.rsi),
        libc::SYS_madvise => format!("{} bytes, advice {}", registers.rsi, registers.rdx),
        libc::SYS_read | libc::SYS_write | libc::SYS_close | libc::SYS_fstat | libc::SYS_fcntl => {
            format!("file {}", registers.rdi as i32)
        }
        libc::SYS_sendto | libc::SYS_sendmsg | libc::SYS_recvfrom | libc::SYS_recvmsg => {
            format!("file {}", registers.rdi as i32)
        }
        _ => String::new(),
    };
    let answer = match answer {
        // Addresses and numbers of threads differ from run to run.
        _ if matches!(number, libc::SYS_set_tid_address | libc::SYS_gettid) => {
            "a number".to_owned()
        }
        -4095..=-1 => nix::errno::Errno::from_raw(-answer as i32).to_string(),
        answer if (0..1 << 32).contains(&answer) => answer.to_string(),
        _ => "an address".to_owned(),
    };
    format!("{name}({about}) = {answer}")
}

/// The memory of a thread, as far as it can be read.
fn memory(thread: Pid, address: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    let read = File::open(format!("/proc/{thread}/mem"))
        .and_then(|memory| memory.read_at(&mut bytes, address));
    bytes.truncate(read.unwrap_or(0));
    bytes
}

fn path(thread: Pid, address: u64) -> String {
    let bytes = memory(thread, address, PATH);
    let path = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
    format!("{:?}", String::from_utf8_lossy(path))
}

/// The ioctl request, and for uverbs the method and object.
fn ioctl(thread: Pid, registers: &user_regs_struct) -> String {
    let request = registers.rsi as u32;
    if request != RDMA_VERBS_IOCTL {
        return format!("file {}, request {request:#x}", registers.rdi as i32);
    }
    let header = memory(thread, registers.rdx, size_of::<ib_uverbs_ioctl_hdr>());
    let [object, method, attributes] = [2, 4, 6].map(|at| half(&header, at));
    if (object, method) == (UVERBS_OBJECT_DEVICE, UVERBS_METHOD_INVOKE_WRITE) {
        let length = usize::from(attributes) * size_of::<ib_uverbs_attr>();
        let bytes = memory(thread, registers.rdx + header.len() as u64, length);
        let mut attributes = bytes.chunks_exact(size_of::<ib_uverbs_attr>());
        let command = attributes.find(|bytes| half(bytes, 0) == UVERBS_ATTR_WRITE_CMD);
        let halves = command.map_or([0; 2], |bytes| [half(bytes, 8), half(bytes, 10)]);
        return write_command(u32::from(halves[0]) | u32::from(halves[1]) << 16);
    }
    uverbs(object, method)
}

fn half(bytes: &[u8], at: usize) -> u16 {
    bytes.get(at..at + 2).map_or(0, |bytes| u16::from_ne_bytes([bytes[0], bytes[1]]))
}

/// The name of a number in the enums that `wanted` picks.
fn named(value: u64, wanted: impl Fn(&Enumeration) -> bool) -> Option<&'static str> {
    let enumerators = enumerations().filter(|one| wanted(one)).flat_map(|one| one.enumerators);
    enumerators.filter(|one| one.value == value).map(|one| one.name).next()
}

fn uverbs(object: u16, method: u16) -> String {
    let of = |name: &'static str| move |one: &Enumeration| one.name == name;
    let known = named(object.into(), of("uverbs_default_objects"))
        .or_else(|| named(object.into(), of("mlx5_ib_objects")));
    let Some(noun) = known.and_then(|name| name.split_once("_OBJECT_")) else {
        return format!("uverbs: object {object:#x}, method {method:#x}");
    };
    let noun = noun.1.to_lowercase();
    let methods = |one: &Enumeration| {
        let core = ["uverbs_methods_", "uverbs_method_"]
            .iter()
            .any(|prefix| one.name.strip_prefix(prefix) == Some(&noun));
        let driver = one.name.strip_prefix("mlx5_ib_").and_then(|rest| rest.strip_prefix(&noun));
        core && method < 0x1000
            || matches!(driver, Some("_methods" | "_obj_methods")) && method >= 0x1000
    };
    match named(method.into(), methods) {
        Some(name) => format!("uverbs: {name}"),
        None => format!("uverbs: method {method:#x} of {noun}"),
    }
}

fn write_command(command: u32) -> String {
    let (prefix, number) = match command & IB_USER_VERBS_CMD_FLAG_EXTENDED {
        0 => ("IB_USER_VERBS_CMD_", command),
        flag => ("IB_USER_VERBS_EX_CMD_", command & !flag),
    };
    let commands =
        |one: &Enumeration| one.enumerators.iter().all(|one| one.name.starts_with(prefix));
    match named(number.into(), commands) {
        Some(name) => format!("uverbs: {name}"),
        None => format!("uverbs: write command {command:#x}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn methods_have_the_kernels_names() {
        assert_eq!(uverbs(4, 0), "uverbs: UVERBS_METHOD_QP_CREATE");
        assert_eq!(uverbs(16, 0), "uverbs: UVERBS_METHOD_ASYNC_EVENT_ALLOC");
        assert_eq!(uverbs(0x1008, 0x1000), "uverbs: MLX5_IB_METHOD_UAR_OBJ_ALLOC");
        assert_eq!(uverbs(0x77, 1), "uverbs: object 0x77, method 0x1");
        assert_eq!(uverbs(4, 0x77), "uverbs: method 0x77 of qp");
        assert_eq!(write_command(5), "uverbs: IB_USER_VERBS_CMD_CREATE_AH");
        let extended = 1 | IB_USER_VERBS_CMD_FLAG_EXTENDED;
        assert_eq!(write_command(extended), "uverbs: IB_USER_VERBS_EX_CMD_QUERY_DEVICE");
        assert_eq!(write_command(77), "uverbs: write command 0x4d");
    }
}
