//! A context in more processes than one: its kernel file is handed over, and a context is made on
//! it there.
//!
//! Pairs with `UVERBS_METHOD_QUERY_CONTEXT` in `core/uverbs_std_types_device.c`, which few drivers
//! answer.

use crate::context::{Context, alloc_async_fd, no_epoch};
use crate::device::{Device, devices};
use crate::error::{Error, Result};
use crate::events::keys::Keys;
use crate::file::{Facts, File, random};
use crate::handles::ObjectKind;
use crate::memory::fork::Epoch;
use crate::provider::{Opening, Provider};
use crate::sharing::envelope::Envelope;
use crate::uverbs::command::Command;
use crate::uverbs::fd::UverbsFd;
use crate::uverbs::kernel::Kernel;
use rustix::fs::{FileType, fstat, major, minor};
use rustix::io::Errno;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use uverbs_uapi::context::{
    UVERBS_ATTR_QUERY_CONTEXT_CORE_SUPPORT, UVERBS_ATTR_QUERY_CONTEXT_NUM_COMP_VECTORS,
};
use uverbs_uapi::device::UVERBS_METHOD_QUERY_CONTEXT;
use uverbs_uapi::object::UVERBS_OBJECT_DEVICE;

const VERB: &str = "import_device";

/// Sharing. A context's objects belong to its kernel file, not to a process: whoever has the file
/// can use and destroy all of them, by their handles.
///
/// ```no_run
/// use std::os::unix::net::UnixStream;
/// use uverbs::{Context, Envelope, Imported, ProtectionDomain};
/// # fn send_fd(_: &UnixStream, _: std::os::fd::OwnedFd) {}
/// # fn send(_: &UnixStream, _: &[u8]) {}
///
/// fn exporter(context: &Context, pd: &ProtectionDomain, peer: &UnixStream) -> uverbs::Result<()> {
///     send_fd(peer, context.share()?);
///     send(peer, &context.export().to_bytes());
///     send(peer, &pd.export()?.to_bytes());
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
    /// A duplicate of the context's kernel file, to be given to another process: over a Unix socket
    /// (`SCM_RIGHTS`), by inheritance, or taken out of this one with `pidfd_getfd`.
    ///
    /// Whoever gets it has all of the context's objects: there is no right that it lacks. The kernel
    /// lets it change the rights of regions, and make queue pairs that name them, so that peers write
    /// memory which this process borrows as a slice. So give it to a process that is trusted as this
    /// one is; nothing here guards against the holder of a file, nor against a program that writes
    /// commands to it past this library. The file is closed on exec like any other of this library, and
    /// the kernel destroys what is left on it when the last process that has it closes it.
    ///
    /// # Errors
    ///
    /// `EMFILE` when the process may open no more files (`RLIMIT_NOFILE`).
    pub fn share(&self) -> Result<OwnedFd> {
        const VERB: &str = "share";
        self.file.check_fork(VERB)?;
        rustix::io::fcntl_dupfd_cloexec(self.as_fd(), 0).map_err(|errno| {
            Error::from_kernel(VERB, errno).detail(match errno {
                Errno::MFILE => "no duplicate of the command file: too many open (RLIMIT_NOFILE)",
                _ => "no duplicate of the command file",
            })
        })
    }

    /// What to send beside the file that [`share`](Self::share) gives, for
    /// [`import_exported`](Self::import_exported).
    pub fn export(&self) -> Envelope {
        let facts = self.file.facts();
        let proof = [facts.completion_vectors.into(), facts.optional_access.into(), 0, 0];
        Envelope::seal(&self.file, ObjectKind::CONTEXT, 0, proof)
    }

    /// Makes a context on a kernel file that another process shared, from this library or another:
    /// rdma-core's `context->cmd_fd` for one.
    ///
    /// It begins without objects of its own, but the other process's can be
    /// [imported](Self::import_pd), and what is made here is made on the same file: each process
    /// must destroy what it makes. Events of what is made here arrive here. The exporter has the file,
    /// too, and with it what is registered here: take one from a process that is
    /// [trusted](Self::share) as this one is.
    ///
    /// The file is this context's from now on, and closed with it. On rxe, whose driver does not
    /// tell, the context has one [completion vector](Self::completion_vectors) as far as this
    /// process knows; [`import_exported`](Self::import_exported) knows more.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the file is no device, or if no context has been established on it; `ENODEV` if
    /// it is no uverbs device that this process may see; `EOPNOTSUPP` if no provider of this
    /// library drives it, and on mlx5 if the exporter opened its context without dynamic registers,
    /// as an old rdma-core does; `EMFILE` when the process may open no more files, of which the
    /// context needs one for its events; `EIO` if the device is gone. The file is closed in any case.
    #[doc(alias = "ibv_import_device")]
    pub fn import(fd: OwnedFd) -> Result<Context> {
        let device = locate(&fd)?;
        Context::import_on(|driver, epoch| Box::new(UverbsFd::new(fd, driver, epoch)), device, None)
    }

    /// As [`import`](Self::import), with the envelope that the exporter sent along. It must be of the
    /// file's device, and tells what the kernel does not: the number of completion vectors where the
    /// driver keeps it to itself, and which context it is. From then on envelopes of other contexts
    /// are refused. That the context is the file's is taken on trust, as the kernel has no name for it.
    ///
    /// # Errors
    ///
    /// Those of [`import`](Self::import); `EINVAL` for an envelope of something else, `EXDEV` for
    /// one of another device. Neither asks the kernel anything.
    pub fn import_exported(fd: OwnedFd, envelope: &Envelope) -> Result<Context> {
        let device = locate(&fd)?;
        let make =
            |driver, epoch| -> Box<dyn Kernel> { Box::new(UverbsFd::new(fd, driver, epoch)) };
        Context::import_on(make, device, Some(envelope))
    }

    /// Makes a context on a file that already has one.
    pub(crate) fn import_on(
        kernel: impl FnOnce(u32, Epoch) -> Box<dyn Kernel>,
        device: Device,
        envelope: Option<&Envelope>,
    ) -> Result<Context> {
        let told = envelope.map(|envelope| told(&device, envelope)).transpose()?;
        let mut opening = Opening::new(&device).map_err(|error| error.in_verb(VERB))?;
        let epoch = Epoch::current().map_err(|errno| no_epoch(VERB, errno))?;
        let kernel = kernel(opening.driver(), epoch);
        Context::join(VERB, kernel, device, epoch, |kernel| {
            let known = inquire(kernel, &mut opening)?;
            let provider = opening.finish(kernel).map_err(|error| error.in_verb(VERB))?;
            let told = told.unwrap_or(Facts::assumed());
            // What the kernel answers needs no witness.
            let facts = known.map_or(told, |known| Facts { origin: told.origin, ..known });
            Ok((provider, facts))
        })
    }

    /// Makes a fresh context in a forked child, on the kernel file that it inherited.
    ///
    /// Objects of the parent stay the parent's: in the child, calls on them answer an error for
    /// which [`Error::is_forked`] is true, and dropping them does nothing. The two processes share
    /// one kernel file, so it is closed when both are done with it. The child may
    /// [import](Self::import_pd) what the parent exports.
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
        let epoch = Epoch::current().map_err(|errno| no_epoch(VERB, errno))?;
        let kernel = file.kernel.reopen().map_err(|errno| Error::new(VERB, errno))?;
        Context::join(VERB, kernel, file.device.clone(), epoch, |kernel| {
            Ok((file.provider.reimport(kernel, VERB)?, file.facts()))
        })
    }

    /// A context beside others on one kernel file: with an event file of its own, and keys that
    /// tell its objects from theirs.
    fn join(
        verb: &'static str,
        kernel: Box<dyn Kernel>,
        device: Device,
        epoch: Epoch,
        provide: impl FnOnce(&dyn Kernel) -> Result<(Provider, Facts)>,
    ) -> Result<Context> {
        let events = alloc_async_fd(&*kernel, verb).map_err(|error| match error.errno() {
            Errno::INVAL => error.detail(format!(
                "nobody has established a context on this file of {} yet",
                device.name()
            )),
            Errno::MFILE => {
                error.detail("no file for the context's events: too many open (RLIMIT_NOFILE)")
            }
            _ => error,
        })?;
        let (provider, facts) = provide(&*kernel)?;
        let [secret] = random();
        let keys = Keys::new(secret);
        let mut file = File::new(kernel, device, provider, epoch, keys, events, facts);
        *file.shared.get_mut() = true;
        Ok(Context { file: Arc::new(file) })
    }
}

impl Facts {
    /// What holds of a file of which neither the kernel nor the exporter tells anything: at least
    /// one completion vector, and a kernel that has the methods that sharing needs, which are
    /// younger than optional access flags.
    fn assumed() -> Facts {
        Facts { origin: 0, completion_vectors: 1, optional_access: true }
    }
}

/// What an exporter says of a file of this device.
fn told(device: &Device, envelope: &Envelope) -> Result<Facts> {
    envelope.check(VERB, device, ObjectKind::CONTEXT)?;
    let [vectors, optional_access, ..] = envelope.proof();
    Ok(Facts {
        origin: envelope.origin(),
        completion_vectors: u32::try_from(vectors).unwrap_or(1).max(1),
        optional_access: optional_access != 0,
    })
}

/// Asks what is true of a file; `None` where the driver does not answer that.
fn inquire(kernel: &dyn Kernel, opening: &mut Opening) -> Result<Option<Facts>> {
    let (mut vectors, mut support) = (0u32, 0u64);
    let command = Command::new(UVERBS_OBJECT_DEVICE, UVERBS_METHOD_QUERY_CONTEXT)
        .optional_output(UVERBS_ATTR_QUERY_CONTEXT_NUM_COMP_VECTORS, &mut vectors)
        .optional_output(UVERBS_ATTR_QUERY_CONTEXT_CORE_SUPPORT, &mut support);
    let Some(mut command) = opening.inquire(command) else { return Ok(None) };
    kernel.execute(&mut command).map_err(|errno| Error::from_kernel(VERB, errno))?;
    drop(command);
    Ok(Some(Facts::new(0, vectors, support)))
}

/// The device whose node a file is.
fn locate(fd: &OwnedFd) -> Result<Device> {
    let stat = fstat(fd).map_err(|errno| Error::from_kernel(VERB, errno))?;
    let kind = FileType::from_raw_mode(stat.st_mode);
    if kind != FileType::CharacterDevice {
        return Err(Error::invalid(VERB, format!("the file is {}", describe(kind))));
    }
    let (major, minor) = (major(stat.st_rdev), minor(stat.st_rdev));
    let devices = devices().map_err(|error| error.in_verb(VERB))?;
    let is_it = |device: &Device| {
        device.device_number().is_some_and(|own| (own.major, own.minor) == (major, minor))
    };
    devices.into_iter().find(is_it).ok_or_else(|| {
        Error::new(VERB, Errno::NODEV)
            .detail(format!("device {major}:{minor} is no RDMA device that this process may see"))
    })
}

/// A kind of file that is no device to be imported.
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
