//! One kernel file in several processes: a process hands its file over, and the other makes a context on
//! it.
//!
//! Pairs with `UVERBS_METHOD_QUERY_CONTEXT` in `core/uverbs_std_types_device.c`, which few drivers
//! implement, and with `ibv_import_device` of rdma-core.

use crate::context::{Context, alloc_async_fd};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::events::keys::Keys;
use crate::file::{File, FileFacts, random};
use crate::handles::ObjectKind;
use crate::provider::{self, Opening, Provider};
use crate::sharing::envelope::Envelope;
use crate::sync::fork::Epoch;
use crate::uverbs::command::Command;
use crate::uverbs::fd::UverbsFd;
use crate::uverbs::kernel::Kernel;
use crate::uverbs::open_file::OpenFile;
use rustix::io::Errno;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use uverbs_uapi::context::{
    UVERBS_ATTR_QUERY_CONTEXT_CORE_SUPPORT, UVERBS_ATTR_QUERY_CONTEXT_NUM_COMP_VECTORS,
};
use uverbs_uapi::device::UVERBS_METHOD_QUERY_CONTEXT;
use uverbs_uapi::object::UVERBS_OBJECT_DEVICE;

const VERB: &str = "import_device";

/// Sharing. A context's objects belong to its kernel file, not to a process: every process that has the
/// file can use and destroy all of them, by their handles.
///
/// ```no_run
/// use std::os::unix::net::UnixStream;
/// use std::os::fd::AsFd;
/// use uverbs::{Context, Envelope, Imported, ProtectionDomain, passing};
///
/// fn exporter(context: &Context, pd: &ProtectionDomain, peer: &UnixStream) -> uverbs::Result<()> {
///     let envelopes = [context.export().to_bytes(), pd.export()?.to_bytes()].concat();
///     passing::send_files(peer, &envelopes, &[context.share()?.as_fd()])?;
///     Ok(())
/// }
///
/// fn importer(
///     fd: std::os::fd::OwnedFd,
///     context: &[u8],
///     pd: &[u8],
/// ) -> uverbs::Result<Imported<ProtectionDomain>> {
///     let context = Context::import_exported(fd, &Envelope::from_bytes(context)?)?;
///     context.import_pd(&Envelope::from_bytes(pd)?)
/// }
/// ```
impl Context {
    /// Duplicates the context's kernel file, for another process to get: over a Unix socket
    /// (`SCM_RIGHTS`), by inheritance, or with `pidfd_getfd`.
    ///
    /// A process that has the file has all rights to the context's objects. The kernel lets it change
    /// the rights of memory regions and make queue pairs that name them, so that peers write memory which
    /// this process borrows as a slice. Give the file only to a process that is trusted as much as this
    /// one: the library cannot guard against another process that has the file, nor against a program that
    /// writes commands to it without the library. The file is closed on exec. When the last process that
    /// has it closes it, the kernel destroys the objects that are left on it.
    ///
    /// # Errors
    ///
    /// `EMFILE` when the process may open no more files (`RLIMIT_NOFILE`).
    pub fn share(&self) -> Result<OwnedFd> {
        const VERB: &str = "share";
        self.file.check_fork(VERB)?;
        rustix::io::fcntl_dupfd_cloexec(self.as_fd(), 0).map_err(|errno| {
            Error::from_kernel(VERB, errno).context(|| "no duplicate of the command file".into())
        })
    }

    /// The exported form of the context, to be sent with the file of [`share`](Self::share), for
    /// [`import_exported`](Self::import_exported).
    pub fn export(&self) -> Envelope {
        let facts = self.file.facts();
        let fingerprint = [facts.completion_vectors.into(), facts.optional_access.into(), 0, 0];
        Envelope::seal(&self.file, ObjectKind::CONTEXT, 0, fingerprint)
    }

    /// Makes a context on a kernel file that another process shared, with this library or another one:
    /// rdma-core's `context->cmd_fd` is such a file.
    ///
    /// The context begins without objects. Objects of the other process can be
    /// [imported](Self::import_pd). New objects are made on the same file, and each process must destroy
    /// those that it made; their events arrive in the process that made them. The exporter has the file,
    /// too, and with it the memory that is registered here: take a file only from a process that is
    /// [trusted](Self::share) as much as this one.
    ///
    /// The context owns the file from now on, and closes it. rxe's driver does not tell the number of
    /// [completion vectors](Self::completion_vectors), which reads as 1 there;
    /// [`import_exported`](Self::import_exported) takes it from the envelope.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the file is no device, or if no context has been established on it; `ENODEV` if
    /// it is no uverbs device; `EOPNOTSUPP` if no provider of this
    /// library drives the device, and on mlx5 if the exporter opened its context without dynamic UARs,
    /// as an old rdma-core does; `EMFILE` when the process may open no more files (the context needs one
    /// for its events); `EIO` if the device is gone. The file is closed after each of these, too.
    #[doc(alias = "ibv_import_device")]
    pub fn import(fd: OwnedFd) -> Result<Context> {
        let device = Device::of_file(VERB, fd.as_fd())?;
        Context::import_on(on_file(fd), device, None)
    }

    /// Makes a context as [`import`](Self::import) does, with the envelope that the exporter sent along. It has the
    /// number of completion vectors, which rxe's driver does not tell, and the identity of the exporter's context: the
    /// new context refuses envelopes of other contexts. The envelope must be of the file's device. The library cannot
    /// check that it is of the file's context, because the kernel has no name for a file.
    ///
    /// # Errors
    ///
    /// Those of [`import`](Self::import); `EINVAL` for an envelope of something else, `EXDEV` for
    /// one of another device. The library detects both without asking the kernel.
    pub fn import_exported(fd: OwnedFd, envelope: &Envelope) -> Result<Context> {
        let device = Device::of_file(VERB, fd.as_fd())?;
        Context::import_on(on_file(fd), device, Some(envelope))
    }

    /// Makes a context on a file that already has one.
    pub(crate) fn import_on(
        kernel: impl FnOnce(u32, Epoch) -> Box<dyn Kernel>,
        device: Device,
        envelope: Option<&Envelope>,
    ) -> Result<Context> {
        let exported = envelope.map(|envelope| exported_facts(&device, envelope)).transpose()?;
        let mut opening = provider::open(&device).map_err(|error| error.in_verb(VERB))?;
        let epoch = Epoch::of_verb(VERB)?;
        let kernel = kernel(opening.driver(), epoch);
        Context::join(VERB, kernel, device, epoch, |kernel| {
            let queried = query_facts(kernel, &mut *opening)?;
            let provider = opening.finish(kernel).map_err(|error| error.in_verb(VERB))?;
            let exported = exported.unwrap_or(FileFacts::assumed());
            // The kernel's facts take precedence over the exporter's.
            let facts = queried
                .map_or(exported, |queried| FileFacts { origin: exported.origin, ..queried });
            Ok((provider, facts))
        })
    }

    /// Makes a fresh context in a forked child, on the kernel file that it inherited.
    ///
    /// Objects of the parent stay the parent's: in the child, calls on them fail with an error for
    /// which [`Error::is_forked`] is true, and dropping them does nothing. The two processes share
    /// one kernel file, so it is closed when both are done with it. The child may
    /// [import](Self::import_pd) objects that the parent exports.
    ///
    /// # Errors
    ///
    /// `EINVAL` in the process that opened the context.
    pub fn reimport(&self) -> Result<Context> {
        const VERB: &str = "reimport";
        let file = &self.file;
        if !file.epoch.is_over() {
            return Err(Error::invalid(VERB, "this process opened the context itself"));
        }
        let epoch = Epoch::of_verb(VERB)?;
        let kernel = file.kernel.reopen().map_err(|errno| Error::new(VERB, errno))?;
        Context::join(VERB, kernel, file.device.clone(), epoch, |kernel| {
            let provider = file.provider.reimport(kernel);
            Ok((provider.map_err(|error| error.in_verb(VERB))?, file.facts()))
        })
    }

    /// Makes one more context on a kernel file: with an event file of its own, and keys that tell its
    /// objects from those of the other contexts.
    fn join(
        verb: &'static str,
        kernel: Box<dyn Kernel>,
        device: Device,
        epoch: Epoch,
        provide: impl FnOnce(&dyn Kernel) -> Result<(Arc<dyn Provider>, FileFacts)>,
    ) -> Result<Context> {
        let events = alloc_async_fd(&*kernel, verb).map_err(|error| match error.errno() {
            Errno::INVAL => error.detail(format!(
                "no process has established a context on this file of {} yet",
                device.name()
            )),
            _ => error.context(|| format!("the kernel makes no events for {}", device.name())),
        })?;
        let (provider, facts) = provide(&*kernel)?;
        let [secret] = random();
        let keys = Keys::new(secret);
        let mut file = File::new(kernel, device, provider, epoch, keys, events, facts);
        *file.shared.get_mut() = true;
        file.describe_device(verb)?;
        Ok(Context { file: Arc::new(file) })
    }
}

impl FileFacts {
    /// The assumed facts about a file if neither the kernel nor the exporter tells any: there is at least one
    /// completion vector, and a kernel with the methods that sharing needs has optional access flags, too.
    fn assumed() -> FileFacts {
        FileFacts { origin: 0, completion_vectors: 1, optional_access: true }
    }
}

/// The kernel behind a file that another process, or this one, shared.
fn on_file(fd: OwnedFd) -> impl FnOnce(u32, Epoch) -> Box<dyn Kernel> {
    |driver, epoch| Box::new(UverbsFd::new(OpenFile::of_fd(fd, epoch), driver, epoch))
}

/// The exporter's facts about a file of this device.
fn exported_facts(device: &Device, envelope: &Envelope) -> Result<FileFacts> {
    envelope.check(VERB, device, ObjectKind::CONTEXT)?;
    let [vectors, optional_access, ..] = envelope.fingerprint();
    Ok(FileFacts {
        origin: envelope.origin(),
        completion_vectors: u32::try_from(vectors).unwrap_or(1).max(1),
        optional_access: optional_access != 0,
    })
}

/// The kernel's facts about a file; `None` where the driver does not implement QUERY_CONTEXT.
fn query_facts(kernel: &dyn Kernel, opening: &mut dyn Opening) -> Result<Option<FileFacts>> {
    let (mut vectors, mut support) = (0u32, 0u64);
    let mut command = Command::new(UVERBS_OBJECT_DEVICE, UVERBS_METHOD_QUERY_CONTEXT);
    command
        .optional_output(UVERBS_ATTR_QUERY_CONTEXT_NUM_COMP_VECTORS, &mut vectors)
        .optional_output(UVERBS_ATTR_QUERY_CONTEXT_CORE_SUPPORT, &mut support);
    if !opening.inquire(&mut command) {
        return Ok(None);
    }
    kernel.execute(&mut command).map_err(|errno| Error::from_kernel(VERB, errno))?;
    Ok(Some(FileFacts::new(0, vectors, support)))
}
