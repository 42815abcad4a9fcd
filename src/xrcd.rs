//! XRC domains: XRC targets deliver to the shared receive queues of their domain, which several processes
//! can share by a file.
//!
//! Pairs with `ib_uverbs_open_xrcd` in `core/uverbs_cmd.c`.

use crate::context::Context;
use crate::error::{Error, ErrorWith, Result};
use crate::file::File;
use crate::object::{Class, Object, destroy_sole};
use crate::uverbs::invoke_write::write;
use rustix::fs::OFlags;
use rustix::io::Errno;
use std::fmt;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;
use uverbs_uapi::write::IB_USER_VERBS_CMD_OPEN_XRCD;
use uverbs_uapi::xrcd::{ib_uverbs_open_xrcd, ib_uverbs_open_xrcd_resp};
use zerocopy::FromZeros;

const VERB: &str = "open_xrcd";

/// The part of a domain that its targets and shared receive queues hold.
#[derive(Debug)]
pub(crate) struct XrcdInner {
    pub(crate) object: Object,
}

impl XrcdInner {
    pub(crate) fn file(&self) -> &Arc<File> {
        self.object.file()
    }

    pub(crate) fn handle(&self) -> u32 {
        self.object.handle()
    }
}

/// An XRC domain.
///
/// A message to an XRC target names a shared receive queue of the target's domain. Processes share a
/// domain, with its targets and queues, by opening it with the same file; the content of the file does not
/// matter. `examples/xrc_service.rs` is a service of three processes.
///
/// Objects made in it keep it alive. It is destroyed when the last process that has it open closes it. All
/// methods may be called from any thread.
///
/// ```no_run
/// # fn f(context: &uverbs::Context, file: &std::fs::File, peers: uverbs::Qpn) -> uverbs::Result<()> {
/// use uverbs::{XrcDomain, XrcTarget};
///
/// // Opens the file's domain, or makes it if it has none.
/// let domain: XrcDomain = context.xrcd_builder().file(file).create().build()?;
/// println!("domain {} of {}", domain.handle(), domain.context().device().name());
/// // A target that another process made in the domain.
/// let target: XrcTarget = domain.open_target(peers)?;
/// println!("target {}", target.qpn());
/// target.destroy()?;
/// // A target of this process, which is connected to one peer after the other.
/// let mut own: XrcTarget = domain.create_target()?;
/// // … `own.handshake`, and when that peer is done:
/// own.reset()?;
/// own.destroy()?;
/// domain.destroy()?;
/// # Ok(()) }
/// ```
#[doc(alias = "ibv_xrcd")]
pub struct XrcDomain {
    pub(crate) inner: Arc<XrcdInner>,
}

/// Builds an [`XrcDomain`]; started by [`Context::xrcd_builder`].
///
/// With the flags of `open(2)` that a C program passes, and for the first process of a file:
///
/// ```no_run
/// # fn f(context: &uverbs::Context, file: &std::fs::File, fresh: &std::fs::File) -> uverbs::Result<()> {
/// let builder: uverbs::XrcdBuilder<'_> = context.xrcd_builder().file(file).raw_flags(0o100); // O_CREAT
/// let domain = builder.build()?;
/// // Fails if another process has made the domain of this file.
/// let first = context.xrcd_builder().file(fresh).create_new().build()?;
/// # drop((domain, first)); Ok(()) }
/// ```
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct XrcdBuilder<'a> {
    context: &'a Context,
    file: Option<BorrowedFd<'a>>,
    flags: OFlags,
}

impl Context {
    /// Starts to build an XRC domain. Without a [file](XrcdBuilder::file) it is private to this process.
    ///
    /// ```no_run
    /// # fn f(context: &uverbs::Context, file: &std::fs::File) -> uverbs::Result<()> {
    /// let private = context.xrcd_builder().build()?;
    /// let shared = context.xrcd_builder().file(file).create().build()?;
    /// # drop((private, shared)); Ok(()) }
    /// ```
    #[doc(alias = "ibv_open_xrcd")]
    pub fn xrcd_builder(&self) -> XrcdBuilder<'_> {
        XrcdBuilder { context: self, file: None, flags: OFlags::empty() }
    }
}

impl<'a> XrcdBuilder<'a> {
    /// Shares the domain by the inode of `file`: all processes that open a domain on the same device with a
    /// file of the same inode have the same domain.
    ///
    /// It may be any file, opened with any flags but `O_PATH`. A process that may open the file may use the domain:
    /// only the permissions of the file guard it. The file may be closed or unlinked afterwards. After it was unlinked,
    /// no process finds the domain by the path any more, and a new file there is a new domain.
    pub fn file(mut self, file: &'a impl AsFd) -> Self {
        self.file = Some(file.as_fd());
        self
    }

    /// Creates the domain if the file has none.
    #[doc(alias = "O_CREAT")]
    pub fn create(mut self) -> Self {
        self.flags |= OFlags::CREATE;
        self
    }

    /// Creates the domain, and fails if the file has one.
    #[doc(alias = "O_EXCL")]
    pub fn create_new(mut self) -> Self {
        self.flags |= OFlags::CREATE | OFlags::EXCL;
        self
    }

    /// Passes these flags of `open(2)` to the kernel, in place of those of [`create`](Self::create) and
    /// [`create_new`](Self::create_new). The kernel uses `O_CREAT` and `O_EXCL`, the latter also without the
    /// former.
    pub fn raw_flags(mut self, oflags: u32) -> Self {
        self.flags = OFlags::from_bits_retain(oflags);
        self
    }

    /// Opens the domain.
    ///
    /// | file | has a domain on this device | flags | |
    /// |---|---|---|---|
    /// | none | | any | a new, private domain |
    /// | any | no | without `create` | `EAGAIN` |
    /// | any | no | `create`, `create_new` | a new domain |
    /// | any | yes | `create_new` | `EINVAL` |
    /// | any | yes | otherwise | that domain |
    ///
    /// # Errors
    ///
    /// Those of the table, which are the kernel's; `EAGAIN` also at a cgroup's limit; `EBADF` for a
    /// file that was opened with `O_PATH`; `EOPNOTSUPP` where the device has no XRC domains, as rxe;
    /// `ENOMEM`.
    pub fn build(self) -> Result<XrcDomain> {
        let file = &self.context.file;
        let request = ib_uverbs_open_xrcd {
            // All ones: no file.
            fd: self.file.map_or(-1, |file| file.as_raw_fd()) as u32,
            oflags: self.flags.bits(),
            ..Default::default()
        };
        let mut resp = ib_uverbs_open_xrcd_resp::new_zeroed();
        let opened =
            file.execute(VERB, write(IB_USER_VERBS_CMD_OPEN_XRCD, &request).response(&mut resp));
        opened.map_err(|error| self.explain(error))?;
        let object = Object::new(file.clone(), Class::XRCD, resp.xrcd_handle, ());
        Ok(XrcDomain { inner: Arc::new(XrcdInner { object }) })
    }

    /// Explains the kernel's errnos, which differ from those of `open(2)`.
    fn explain(&self, error: Error) -> Error {
        let device = self.context.device().name();
        match (error.errno(), self.file) {
            (Errno::AGAIN, Some(_)) if !self.flags.contains(OFlags::CREATE) => {
                error.detail(format!(
                    "the file has no XRC domain on {device}, and creating one was not asked for; or \
                     it has, and a cgroup's limit of RDMA objects is reached (rdma.max)"
                ))
            }
            (Errno::AGAIN, _) => {
                error.detail("a cgroup's limit of RDMA objects is reached (rdma.max)")
            }
            (Errno::INVAL, Some(_)) if self.flags.contains(OFlags::EXCL) => error.detail(format!(
                "the file has an XRC domain on {device} already, and a new one was asked for"
            )),
            (Errno::BADF, Some(file)) => error
                .detail(format!("descriptor {} is open as a path only (O_PATH)", file.as_raw_fd())),
            (Errno::OPNOTSUPP, _) => error.detail(format!("{device} has no XRC domains")),
            (_, Some(file)) => error.context(|| {
                format!("the XRC domain of descriptor {} on {device}", file.as_raw_fd())
            }),
            (_, None) => error.context(|| format!("an XRC domain of no file on {device}")),
        }
    }
}

impl XrcDomain {
    /// A context on the same file.
    pub fn context(&self) -> Context {
        Context { file: self.inner.file().clone() }
    }

    /// The kernel's handle of this opening of the domain, a number within its file.
    pub fn handle(&self) -> u32 {
        self.inner.handle()
    }

    /// Closes the domain; dropping it does the same and ignores errors, as soon as no object made in it lives.
    /// The last process that closes it destroys it.
    ///
    /// # Errors
    ///
    /// `EBUSY` while an object that this process made in it lives, and in the last process that has it open
    /// while any does. The domain comes back with the error.
    #[doc(alias = "ibv_close_xrcd")]
    pub fn destroy(self) -> std::result::Result<(), ErrorWith<Self>> {
        const VERB: &str = "close_xrcd";
        const HELD: &str =
            "a shared receive queue or a target of the XRC domain is still alive in this process";
        destroy_sole(self.inner, VERB, HELD, |inner| {
            inner.object.destroy().map_err(|error| match error.errno() {
                Errno::BUSY => error.detail(
                    "a shared receive queue or a target of the XRC domain is still alive, and no other \
                     process has the domain open",
                ),
                _ => error,
            })
        })
        .map_err(|failed| failed.map(|inner| XrcDomain { inner }))
    }
}

impl fmt::Debug for XrcDomain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("XrcDomain")
            .field("device", &self.inner.file().device.name())
            .field("handle", &self.handle())
            .finish()
    }
}
