//! The words of a transcript for arguments and answers: without addresses, keys, handles and numbers of objects.

use uverbs::{Access, Errno, Error, PostError};

/// The name of an error number.
pub(super) fn name(errno: Errno) -> String {
    const NAMES: [(Errno, &str); 20] = [
        (Errno::PERM, "EPERM"),
        (Errno::NOENT, "ENOENT"),
        (Errno::IO, "EIO"),
        (Errno::BADF, "EBADF"),
        (Errno::AGAIN, "EAGAIN"),
        (Errno::NOMEM, "ENOMEM"),
        (Errno::ACCESS, "EACCES"),
        (Errno::FAULT, "EFAULT"),
        (Errno::BUSY, "EBUSY"),
        (Errno::EXIST, "EEXIST"),
        (Errno::NODEV, "ENODEV"),
        (Errno::INVAL, "EINVAL"),
        (Errno::NOTTY, "ENOTTY"),
        (Errno::NOSPC, "ENOSPC"),
        (Errno::RANGE, "ERANGE"),
        (Errno::NOSYS, "ENOSYS"),
        (Errno::TOOBIG, "E2BIG"),
        (Errno::OPNOTSUPP, "EOPNOTSUPP"),
        (Errno::PROTONOSUPPORT, "EPROTONOSUPPORT"),
        (Errno::TIMEDOUT, "ETIMEDOUT"),
    ];
    let known = NAMES.iter().find(|(known, _)| *known == errno);
    known.map_or_else(|| errno.raw_os_error().to_string(), |(_, name)| (*name).into())
}

/// The errno of the kernel, or the library's own, which `lib` follows.
pub(super) fn refusal(error: &Error) -> String {
    match error.kernel_errno() {
        Some(errno) => name(errno),
        None => format!("{} lib", name(error.errno())),
    }
}

/// "ok", or the refusal.
pub(super) fn outcome<T>(answer: uverbs::Result<T>) -> String {
    answer.map_or_else(|error| refusal(&error), |_| "ok".into())
}

/// The reason that a request was not posted.
pub(super) fn not_posted(error: PostError) -> String {
    let name = match error {
        PostError::Full => "full",
        PostError::NoQueue => "no queue",
        PostError::TooManySge { .. } => "too many SGEs",
        PostError::InlineTooLong { .. } => "inline too long",
        PostError::TooLong => "too long",
        PostError::Unaligned => "unaligned",
        PostError::AtomicTooShort => "atomic too short",
        PostError::Unsupported => "unsupported",
        PostError::ForeignBinding => "foreign binding",
        PostError::SharedReceives => "shared receives",
        PostError::NoInline => "no inline",
        PostError::Destination => "destination",
        PostError::State(_) => "state",
        PostError::Ring(_) => "not rung",
        _ => "refused",
    };
    name.into()
}

/// Rights, a letter or two each.
pub(super) fn rights(access: Access) -> String {
    const LETTERS: [(Access, &str); 9] = [
        (Access::LOCAL_WRITE, "l"),
        (Access::REMOTE_WRITE, "w"),
        (Access::REMOTE_READ, "r"),
        (Access::REMOTE_ATOMIC, "a"),
        (Access::MW_BIND, "b"),
        (Access::ZERO_BASED, "z"),
        (Access::ON_DEMAND, "o"),
        (Access::HUGETLB, "h"),
        (Access::RELAXED_ORDERING, "x"),
    ];
    let mut text: String =
        LETTERS.iter().filter(|(right, _)| access.contains(*right)).map(|(_, c)| *c).collect();
    let known = LETTERS.iter().fold(Access::empty(), |all, (right, _)| all | *right);
    let rest = access.difference(known).bits();
    if rest != 0 {
        text += &format!("+{rest:#x}");
    }
    if text.is_empty() { "-".into() } else { text }
}
