//! Errors of the control path: the verb that failed, the reason, and the remedy.
//!
//! A call of a verb that takes an object by value gives it back with the error: [`ErrorWith`]. Data-path errors
//! are small `Copy` types and live with the queues that return them ([`PostError`](crate::PostError)). Each
//! error type of the library converts into an [`Error`], so that `?` works in a function that returns [`Result`].

use crate::number::{ByteCount, Offset};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use std::borrow::Cow;
use std::fmt;

/// The result of a control-path call.
pub type Result<T> = std::result::Result<T, Error>;

/// A verb that failed.
///
/// Displays as `create_cq: a queue of 0 entries; the minimum is 1 (Invalid argument …)`.
///
/// ```no_run
/// # fn f(pd: &uverbs::ProtectionDomain) -> uverbs::Result<()> {
/// use uverbs::Errno;
///
/// if let Err(error) = pd.alloc_mw(uverbs::WindowType::Two) {
///     match error.errno() {
///         _ if error.is_unsupported() => println!("{} has none", error.verb()),
///         // A forked child cannot use its parent's objects.
///         _ if error.is_forked() => println!("open the device again in this process"),
///         Errno::NOMEM => println!("no more of them: {}", error.message()),
///         _ => println!("{error}, of the kernel's {:?}", error.kernel_errno()),
///     }
/// }
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Error(Box<Inner>);

#[derive(Clone)]
struct Inner {
    verb: &'static str,
    errno: Errno,
    kernel: Option<Errno>,
    detail: Cow<'static, str>,
    /// Whether the detail explains the errno alone, whatever the verb.
    general: bool,
}

impl Error {
    /// An error that this library found before asking the kernel.
    pub(crate) fn new(verb: &'static str, errno: Errno) -> Self {
        Error(Box::new(Inner {
            verb,
            errno,
            kernel: None,
            detail: Cow::Borrowed(""),
            general: false,
        }))
    }

    /// An error of the kernel. All errnos by which a kernel reports a missing feature reach the caller as `EOPNOTSUPP`.
    pub(crate) fn from_kernel(verb: &'static str, errno: Errno) -> Self {
        let normalised = match errno {
            Errno::PROTONOSUPPORT | Errno::NOTTY | Errno::NOSYS => Errno::OPNOTSUPP,
            other => other,
        };
        // Every command fails so once the device is gone, and a command that the device itself failed.
        let detail = match errno {
            Errno::IO => "the device is gone, or failed the command",
            // `rdmacg_try_charge`, when an object is made; mlx5's device says so, too.
            Errno::AGAIN => {
                "a cgroup's limit of RDMA objects is reached (rdma.max, rdma.current), or the device \
                 has no more"
            }
            Errno::NOMEM => "the system or the device is out of memory",
            Errno::MFILE => {
                "this process has as many open files as RLIMIT_NOFILE permits (`ulimit -n`)"
            }
            Errno::NFILE => "the system has as many open files as it may (fs.file-max)",
            _ => "",
        };
        Error(Box::new(Inner {
            verb,
            errno: normalised,
            kernel: Some(errno),
            detail: Cow::Borrowed(detail),
            general: true,
        }))
    }

    /// A call in a forked child on an object of its parent.
    pub(crate) fn forked(verb: &'static str) -> Self {
        Error::new(verb, Errno::OWNERDEAD).detail(
            "this process is a fork of the one that made the object; use Context::reimport in the child",
        )
    }

    /// Shorthand for `EINVAL` with a detail.
    pub(crate) fn invalid(verb: &'static str, detail: impl Into<Cow<'static, str>>) -> Self {
        Error::new(verb, Errno::INVAL).detail(detail)
    }

    /// Adds the wrong value and its limit.
    pub(crate) fn detail(mut self, detail: impl Into<Cow<'static, str>>) -> Self {
        (self.0.detail, self.0.general) = (detail.into(), false);
        self
    }

    /// Replaces the kernel's errno, where it would mean something else to the caller.
    pub(crate) fn meaning(mut self, errno: Errno) -> Self {
        self.0.errno = errno;
        self
    }

    /// Adds the caller's arguments, unless the error names them already.
    pub(crate) fn context(self, asked: impl FnOnce() -> String) -> Self {
        if self.0.detail.is_empty() {
            return self.detail(asked());
        }
        if !self.0.general {
            return self;
        }
        let detail = format!("{}: {}", asked(), self.0.detail);
        self.detail(detail)
    }

    /// Attributes the error to the call that the user made rather than to a step of it.
    pub(crate) fn in_verb(mut self, verb: &'static str) -> Self {
        self.0.verb = verb;
        self
    }

    /// Explains `ENOMEM` where the driver was to pin memory; no bytes are no explanation.
    pub(crate) fn pinning(self, bytes: usize) -> Self {
        match bytes {
            0 => self,
            // Miri knows no limits.
            _ if cfg!(miri) => self.detail(out_of_memory(bytes, &Locking::default())),
            _ => self.detail(out_of_memory(bytes, &Locking::here())),
        }
    }

    /// Whether the kernel refused a change before it began to carry it out. After another error the change may be
    /// made in part, or still be under way: the device may know the old memory as well as the new.
    pub(crate) fn is_refusal(&self) -> bool {
        self.0.kernel.is_none_or(|errno| {
            matches!(
                errno,
                Errno::INVAL
                    | Errno::OPNOTSUPP
                    | Errno::PROTONOSUPPORT
                    | Errno::NOSYS
                    | Errno::ACCESS
                    | Errno::PERM
                    | Errno::BUSY
                    | Errno::NOENT
                    | Errno::NOSPC
            )
        })
    }

    /// This error together with the object that the call was given.
    pub(crate) fn with<T>(self, object: T) -> ErrorWith<T> {
        ErrorWith { error: self, object }
    }

    /// The call that failed, in the vocabulary of this library.
    pub fn verb(&self) -> &'static str {
        self.0.verb
    }

    /// The error number. Every errno by which a kernel reports a missing feature
    /// (`EPROTONOSUPPORT`, `ENOTTY`, `ENOSYS`) reads `EOPNOTSUPP` here.
    pub fn errno(&self) -> Errno {
        self.0.errno
    }

    /// The error number exactly as the kernel returned it; `None` if this library refused the
    /// call before the kernel saw it.
    pub fn kernel_errno(&self) -> Option<Errno> {
        self.0.kernel
    }

    /// The offending value and its limit, or an empty string where the error number says it all.
    pub fn message(&self) -> &str {
        &self.0.detail
    }

    /// Whether the kernel, the driver or the device lacks the requested feature.
    pub fn is_unsupported(&self) -> bool {
        self.0.errno == Errno::OPNOTSUPP
    }

    /// Whether the call was refused because this process inherited the object over `fork`; see
    /// [`Context::reimport`](crate::Context::reimport).
    pub fn is_forked(&self) -> bool {
        self.0.kernel.is_none() && self.0.errno == Errno::OWNERDEAD
    }
}

/// A number as the kernel's struct takes it, in 8 bits.
pub(crate) fn narrow(verb: &'static str, name: &str, value: u32) -> Result<u8> {
    let above =
        |_| Error::invalid(verb, format!("{name} {value} is above the maximum of {}", u8::MAX));
    u8::try_from(value).map_err(above)
}

/// The rules by which the kernel lets this process pin memory.
#[derive(Default)]
struct Locking {
    /// `RLIMIT_MEMLOCK`; `None` without a limit.
    limit: Option<u64>,
    /// Bytes that are pinned already; `None` where `/proc` does not tell.
    pinned: Option<u64>,
    /// The process has `CAP_IPC_LOCK` of the first user namespace, so that no limit counts.
    exempt: bool,
}

impl Locking {
    /// This process's.
    fn here() -> Locking {
        let read = |name: &str| std::fs::read_to_string(format!("/proc/self/{name}"));
        let limit = getrlimit(Resource::Memlock).current;
        let status = read("status").unwrap_or_default();
        Locking::parse(limit, &status, &read("uid_map").unwrap_or_default())
    }

    /// Out of `/proc/self/status` and `/proc/self/uid_map`.
    fn parse(limit: Option<u64>, status: &str, uid_map: &str) -> Locking {
        const CAP_IPC_LOCK: u64 = 1 << 14;
        let field = |name| {
            status.lines().find_map(|line| line.strip_prefix(name)?.split_whitespace().next())
        };
        let capabilities =
            field("CapEff:").and_then(|digits| u64::from_str_radix(digits, 16).ok()).unwrap_or(0);
        let pinned = field("VmPin:").and_then(|kilobytes| kilobytes.parse::<u64>().ok());
        // The first user namespace maps all users to themselves.
        let is_first = uid_map.split_whitespace().eq(["0", "0", "4294967295"]);
        Locking {
            limit,
            pinned: pinned.and_then(|kilobytes| kilobytes.checked_mul(1 << 10)),
            exempt: capabilities & CAP_IPC_LOCK != 0 && is_first,
        }
    }

    /// The limit, if so many bytes more exceed it. The kernel counts whole pages, and a queue has a page for its
    /// doorbell record.
    fn exceeded(&self, bytes: usize) -> Option<u64> {
        const AROUND: u64 = 4 << 16;
        let pinned = self.pinned.unwrap_or(u64::MAX);
        let wanted = pinned.saturating_add(bytes as u64).saturating_add(AROUND);
        self.limit.filter(|&limit| !self.exempt && wanted > limit)
    }
}

fn out_of_memory(bytes: usize, locking: &Locking) -> String {
    let size = ByteCount::of(bytes);
    match locking.exceeded(bytes) {
        Some(limit) => {
            let pinned = locking.pinned.map(|pinned| format!(", and pins {}", ByteCount(pinned)));
            format!(
                "cannot pin {size}: this process may lock {} (RLIMIT_MEMLOCK), all of its regions and queues \
                 together{}; raise it with `ulimit -l` or LimitMEMLOCK=, or grant CAP_IPC_LOCK (one of a \
                 user namespace does not count)",
                ByteCount(limit),
                pinned.unwrap_or_default()
            )
        }
        None => format!(
            "cannot pin {size}: the system or the device is out of memory; the limit of locked memory is \
             not the reason"
        ),
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.0.verb)?;
        if self.0.detail.is_empty() {
            return write!(f, "{}", self.0.errno);
        }
        write!(f, "{} ({})", self.0.detail, self.0.errno)
    }
}

/// Lets `Debug` of errors be the sentence of `Display`, since `main` prints that of the error that it returns.
macro_rules! debug_is_sentence {
    ($($name:ident $(<$($parameter:ident),*>)?),+) => {$(
        /// The sentence of `Display`, so that a `main` that returns the error prints it.
        impl $(<$($parameter),*>)? std::fmt::Debug for $name $(<$($parameter),*>)? {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                std::fmt::Display::fmt(self, f)
            }
        }
    )+};
}
pub(crate) use debug_is_sentence;

debug_is_sentence!(Error, ErrorWith<T>, MemoryError);

impl std::error::Error for Error {}

impl From<Error> for std::io::Error {
    /// Keeps the error number's [`ErrorKind`](std::io::ErrorKind), so that code written against
    /// `std::io` can go on matching it.
    fn from(error: Error) -> Self {
        let kind = std::io::Error::from(error.errno()).kind();
        std::io::Error::new(kind, error)
    }
}

/// An [`Error`] of a call that took an object by value, with the object: `destroy`, `release`, `detach`
/// and `unimport` of all handles, [`register`](crate::MrBuilder::register),
/// [`join`](crate::QueuePair::join), [`adopt`](crate::owned::OwnedCompletionQueue::adopt).
///
/// The object is unchanged by the call, and can be used or destroyed again. `?` turns this into an
/// [`Error`] and drops the object: dropping a handle tries once more to destroy it, and if the kernel
/// refuses again, memory that the device may reach is leaked and [counted](crate::Context::leaked).
///
/// ```no_run
/// # fn f(pd: uverbs::ProtectionDomain, cq: uverbs::CompletionQueue) -> uverbs::Result<()> {
/// cq.destroy()?;
/// let pd = match pd.destroy() {
///     Ok(()) => return Ok(()),
///     // EBUSY: something that was made from the domain is still there.
///     Err(failed) => failed.into_object(),
/// };
/// # drop(pd); Ok(()) }
/// ```
///
/// Both at once:
///
/// ```no_run
/// # fn f(qp: uverbs::QueuePair) {
/// if let Err(failed) = qp.destroy() {
///     let failed: uverbs::ErrorWith<_> = failed;
///     let (qp, error) = failed.into_parts();
///     println!("{} is still there: {error}", qp.qpn());
/// }
/// # }
/// ```
#[derive(Clone)]
pub struct ErrorWith<T> {
    /// The reason of the failure.
    pub error: Error,
    /// The object that the call was given.
    pub object: T,
}

impl<T> ErrorWith<T> {
    /// The object that the call was given.
    pub fn into_object(self) -> T {
        self.object
    }

    /// The object that the call was given, and why it failed.
    pub fn into_parts(self) -> (T, Error) {
        (self.object, self.error)
    }

    /// The same error with the object as the caller knows it.
    pub(crate) fn map<U>(self, object: impl FnOnce(T) -> U) -> ErrorWith<U> {
        ErrorWith { error: self.error, object: object(self.object) }
    }
}

impl<T> From<ErrorWith<T>> for Error {
    fn from(failed: ErrorWith<T>) -> Error {
        failed.error
    }
}

impl<T> From<ErrorWith<T>> for std::io::Error {
    fn from(failed: ErrorWith<T>) -> Self {
        failed.error.into()
    }
}

impl<T> fmt::Display for ErrorWith<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl<T> std::error::Error for ErrorWith<T> {}

/// The reason why bytes of a memory region, of [device memory](crate::DeviceMemory) or of a
/// [doorbell page](crate::mlx5::DoorbellPage) were not named, copied or written. Nothing was done.
#[derive(Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum MemoryError {
    /// They do not lie within the memory.
    OutOfRange {
        /// Their offset, in bytes.
        offset: usize,
        /// Their number.
        length: usize,
        /// The bytes that there are.
        size: usize,
    },
    /// Only whole words can be accessed here, at multiples of their size.
    Unaligned {
        /// The offset of the bytes.
        offset: usize,
        /// Their number.
        length: usize,
        /// Bytes of a word.
        word: usize,
    },
    /// The region lost its memory to a failed change, and can only be destroyed; see
    /// [`MemoryRegion::is_dead`](crate::MemoryRegion::is_dead).
    Dead,
    /// This process is a fork of the one that has the memory.
    Forked,
}

impl fmt::Display for MemoryError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MemoryError::OutOfRange { offset, length, size } => {
                let [length, size] = [length, size].map(|&bytes| ByteCount::of(bytes));
                write!(f, "{length} at {} exceed the memory of {size}", Offset(*offset as u64))
            }
            MemoryError::Unaligned { offset, length, word } => {
                let (length, offset) = (ByteCount::of(*length), Offset(*offset as u64));
                write!(f, "{length} at {offset} are not whole words of {word} bytes")
            }
            MemoryError::Dead => f.write_str("a failed change left the region without memory"),
            MemoryError::Forked => {
                f.write_str("this process is a fork of the one that has the memory")
            }
        }
    }
}

impl std::error::Error for MemoryError {}

impl From<MemoryError> for Error {
    fn from(error: MemoryError) -> Error {
        const VERB: &str = "access_memory";
        match error {
            MemoryError::Forked => Error::forked(VERB),
            other => Error::invalid(VERB, other.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unsupported_has_one_spelling() {
        for errno in [Errno::PROTONOSUPPORT, Errno::NOTTY, Errno::NOSYS, Errno::OPNOTSUPP] {
            let error = Error::from_kernel("open_xrcd", errno);
            assert!(error.is_unsupported());
            assert_eq!(error.kernel_errno(), Some(errno));
        }
        assert!(!Error::from_kernel("open_xrcd", Errno::INVAL).is_unsupported());
    }

    #[test]
    fn eagain_names_the_cgroup_limit() {
        let error = Error::from_kernel("create_cq", Errno::AGAIN);
        assert!(error.message().contains("rdma.max"), "{error}");
    }

    #[test]
    fn display_names_verb_value_and_errno() {
        let error = Error::invalid("create_cq", "cqe 0 is below the minimum of 1");
        let text = error.to_string();
        assert!(text.starts_with("create_cq: cqe 0 is below the minimum of 1 ("), "{text}");
        assert_eq!(format!("{error:?}"), text);
        assert_eq!(format!("{:?}", error.with(7)), text);
        let beyond = MemoryError::OutOfRange { offset: 8, length: 8, size: 8 };
        assert_eq!(format!("{beyond:?}"), beyond.to_string());
    }

    #[test]
    fn an_error_with_an_object_converts_and_gives_the_object_back() {
        let failed = || Error::invalid("destroy_cq", "still in use").with([7; 4]);
        fn convert(failed: ErrorWith<[i32; 4]>) -> Result<()> {
            Err(failed)?
        }
        assert_eq!(convert(failed()).unwrap_err().verb(), "destroy_cq");
        assert_eq!(failed().into_object(), [7; 4]);
        let (object, error) = failed().into_parts();
        assert_eq!((object, error.errno()), ([7; 4], Errno::INVAL));
        assert_eq!(failed().to_string(), error.to_string());
        let boxed: Box<dyn std::error::Error + Send + Sync> = failed().into();
        assert_eq!(boxed.to_string(), error.to_string());
        assert_eq!(std::io::Error::from(failed()).kind(), std::io::ErrorKind::InvalidInput);
    }

    #[test]
    fn running_out_of_locked_memory_names_the_bytes_and_the_remedy() {
        let limit = Some(8 << 20);
        let text = out_of_memory(16 << 20, &Locking { limit, ..Locking::default() });
        assert!(text.contains("pin 16 MiB") && text.contains("lock 8 MiB"), "{text}");
        assert!(text.contains("ulimit -l"), "{text}");
        let pinned = Some(7 << 20);
        let text = out_of_memory(2 << 20, &Locking { limit, pinned, exempt: false });
        assert!(text.contains("and pins 7 MiB") && text.contains("ulimit -l"), "{text}");
    }

    #[test]
    fn the_limit_of_locked_memory_is_not_blamed_where_it_does_not_count() {
        let limit = Some(8 << 20);
        for locking in [
            Locking { limit: None, ..Locking::default() },
            Locking { limit, exempt: true, ..Locking::default() },
            Locking { limit, pinned: Some(1 << 20), exempt: false },
        ] {
            let text = out_of_memory(2 << 20, &locking);
            assert!(!text.contains("ulimit") && text.contains("is out of memory"), "{text}");
        }
    }

    #[test]
    fn a_capability_counts_in_the_first_user_namespace_alone() {
        let status =
            |capabilities| format!("Name:\tx\nVmPin:\t    2048 kB\nCapEff:\t{capabilities}\n");
        let first = "         0          0 4294967295\n";
        let parse = |status: &str, users| Locking::parse(Some(1), status, users);
        let exempt = parse(&status("0000000000004000"), first);
        assert_eq!((exempt.exempt, exempt.pinned), (true, Some(2 << 20)));
        assert!(!parse(&status("0000000000003fff"), first).exempt);
        assert!(!parse(&status("0000000000004000"), "0 1000 1\n").exempt);
        assert!(!parse("", "").exempt && parse("", "").pinned.is_none());
    }

    #[test]
    fn the_sentence_of_a_kernel_error_is_kept_by_the_context_of_its_verb() {
        let asked = |errno| Error::from_kernel("alloc_pd", errno).context(|| "asked for".into());
        assert_eq!(asked(Errno::INVAL).message(), "asked for");
        assert!(asked(Errno::IO).message().contains("the device is gone"));
        assert!(asked(Errno::MFILE).message().contains("RLIMIT_NOFILE"));
    }
}
