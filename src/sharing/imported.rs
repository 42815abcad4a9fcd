//! An object that another process made on the same kernel file.
//!
//! Pairs with `ibv_import_*` and `ibv_unimport_*` of rdma-core. The kernel knows of neither: its objects
//! belong to a file and to no process.

use crate::error::{Error, ErrorWith};
use rustix::io::Errno;
use std::ops::Deref;

pub(crate) mod sealed {
    use crate::error::Result;

    pub trait Sealed {
        /// The verb of [`unimport`](super::Imported::unimport).
        const UNIMPORT: &'static str;

        /// Checks, on behalf of `verb`, that the object is still the imported one.
        fn check(&self, verb: &'static str) -> Result<()>;

        /// Returns an error in a forked child.
        fn check_fork(&self, verb: &'static str) -> Result<()>;

        /// Whether other objects of this process depend on it.
        fn is_held(&self) -> bool;

        /// Sets whether dropping it destroys the kernel's object.
        fn set_owned(&self, owned: bool);
    }
}

/// Implemented by the types that can be imported: protection domains, memory regions, device memory, and
/// of mlx5 VARs, DEVX objects and umems.
pub trait Importable: sealed::Sealed {}

impl<T: sealed::Sealed> Importable for T {}

/// An object that another process made, and will destroy.
///
/// It is used like an object of this process, but dropping it, or [`unimport`](Self::unimport), only
/// forgets it here. The kernel knows no owners, so the processes must agree which of them destroys the
/// object, and when. Afterwards an import of it can only be unimported: the kernel soon gives the handle to
/// the next object of its kind, and a process that goes on using the handle gets `ENOENT` at best, and that
/// other object at worst.
///
/// To hand over the ownership, the owner calls `release` ([`ProtectionDomain::release`],
/// [`MemoryRegion::release`]) and sends the envelope, and the importer calls
/// [`into_owner`](Self::into_owner). That is `unsafe`: an envelope of `release` looks like one of
/// `export`, and an object must not have two owners.
///
/// A process hands its objects to another one, which becomes the owner:
///
/// ```no_run
/// # use uverbs::*;
/// # fn f(context: Context, pd: ProtectionDomain, region: MemoryRegion, counters: DeviceMemory,
/// #     qp: &QueuePair, srq: &SharedReceiveQueue, cq: &CompletionQueue, xrcd: &XrcDomain) -> Result<()> {
/// let envelopes: [Envelope; 3] = [counters.release()?, region.release()?, pd.release()?];
/// // Objects that stay here, and that the other process may query.
/// for envelope in [qp.export()?, srq.export()?, cq.export()?, xrcd.export()?] {
///     println!("{} {}", envelope.kind(), envelope.handle());
/// }
///
/// // ... and in the other process, with a context on the same file:
/// let [counters, region, pd] = &envelopes;
/// let pd: Imported<ProtectionDomain> = context.import_pd(pd)?;
/// let region = pd.import_mr(region)?;
/// let counters = context.import_dm(counters)?;
/// // SAFETY: the envelopes are those of `release`: the first process owns these objects no more.
/// let (region, counters) = unsafe { (region.into_owner()?, counters.into_owner()?) };
/// # drop((region, counters)); Ok(()) }
/// ```
///
/// A program of rdma-core sends bare handles, and the file of its context:
///
/// ```no_run
/// # fn f(cmd_fd: std::os::fd::OwnedFd, pd: u32, mr: u32, dm: u32) -> Result<(), Box<dyn std::error::Error>> {
/// use uverbs::Context;
///
/// let context = Context::import(cmd_fd)?;
/// // SAFETY: the program made the three objects, sent their handles, and keeps them meanwhile.
/// let pd = unsafe { context.import_pd_raw(pd)? };
/// // SAFETY: as above, and the region is of this domain.
/// let region = unsafe { pd.import_mr_raw(mr)? };
/// // SAFETY: as above.
/// let counters = unsafe { context.import_dm_raw(dm)? };
/// let mut first = 0u64;
/// counters.copy_to(0, &mut first)?;
/// println!("requests may name {:?}; the first counter is {first}", region.sge(..64)?);
/// // Only this process drops them: the program destroys the objects.
/// region.unimport()?;
/// counters.unimport()?;
/// pd.unimport()?;
/// # Ok(()) }
/// ```
///
/// [`ProtectionDomain::release`]: crate::ProtectionDomain::release
/// [`MemoryRegion::release`]: crate::MemoryRegion::release
#[derive(Debug)]
pub struct Imported<T: Importable> {
    object: T,
}

impl<T: Importable> Imported<T> {
    pub(crate) fn new(object: T) -> Self {
        Imported { object }
    }

    /// Forgets the object here; the kernel's object stays. Dropping the import does the same as soon as
    /// nothing uses it any more.
    ///
    /// # Errors
    ///
    /// `EBUSY` while an object that this process made from it lives; the import comes back with the
    /// error.
    #[doc(alias = "ibv_unimport_pd")]
    #[doc(alias = "ibv_unimport_mr")]
    #[doc(alias = "ibv_unimport_dm")]
    pub fn unimport(self) -> std::result::Result<(), ErrorWith<Self>> {
        if let Err(error) = self.object.check_fork(T::UNIMPORT) {
            return Err(error.with(self));
        }
        if self.object.is_held() {
            let error = Error::new(T::UNIMPORT, Errno::BUSY)
                .detail("an object that this process made from it is still alive");
            return Err(error.with(self));
        }
        Ok(())
    }

    /// Makes this process the owner: dropping the object destroys it from now on.
    ///
    /// # Safety
    ///
    /// The object has no owner: the former one released it, or ended without destroying it, and no
    /// other process or context of this process has taken it over or will. If it is a memory region, no
    /// memory window of a process that ended was bound to it, or that window was
    /// [destroyed](crate::ForeignObject::destroy) since: mlx5's driver deregisters a region with a bound
    /// window, and the window then opens the next region of the same key to the peer.
    ///
    /// An import cannot check any of this. When one of two owners has destroyed the object, the kernel gives its handle
    /// to the next object of the file, and the other owner treats that object as its own: it destroys the object, or
    /// changes the rights of peers to memory that is borrowed as a slice.
    ///
    /// # Errors
    ///
    /// `ENOENT` if the object is gone, `ESTALE` if the handle is another object's; the import comes back
    /// with the error.
    #[allow(unsafe_code, reason = "the obligation is the caller's")]
    pub unsafe fn into_owner(self) -> std::result::Result<T, ErrorWith<Self>> {
        if let Err(error) = self.object.check("into_owner") {
            return Err(error.with(self));
        }
        self.object.set_owned(true);
        Ok(self.object)
    }
}

impl<T: Importable> Deref for Imported<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.object
    }
}

/// The error for a handle that names another object than the exported one.
pub(crate) fn stale(verb: &'static str, detail: String) -> Error {
    Error::new(verb, Errno::STALE)
        .detail(format!("the handle names another object by now: {detail}"))
}
