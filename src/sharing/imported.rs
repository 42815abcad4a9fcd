//! Objects that another process made on the same kernel file.
//!
//! Pairs with rdma-core's `ibv_import_*` and `ibv_unimport_*`, of which the kernel knows nothing:
//! there, an object has handles and no owner.

use crate::error::Error;
use rustix::io::Errno;
use std::ops::Deref;

pub(crate) mod sealed {
    use crate::error::Result;

    pub trait Sealed {
        /// What importing it is called.
        const UNIMPORT: &'static str;

        /// Checks that it exists, on behalf of `verb`.
        fn check(&self, verb: &'static str) -> Result<()>;

        /// Refuses in a forked child.
        fn check_fork(&self, verb: &'static str) -> Result<()>;

        /// Whether something in this process stands on it.
        fn is_held(&self) -> bool;

        /// Makes it this process's to destroy, or somebody else's.
        fn set_owned(&self, owned: bool);
    }
}

/// What can be imported: protection domains, memory regions, device memory, and VARs of mlx5.
pub trait Importable: sealed::Sealed {}

impl<T: sealed::Sealed> Importable for T {}

/// An object that another process made, and will destroy.
///
/// It is used like one's own, but dropping it, or [`unimport`](Self::unimport), only forgets it
/// here. The kernel knows no owners, so both sides must agree who destroys it, and when: nobody may
/// use it afterwards, except to unimport it. A handle is soon given to the next object of its kind;
/// whoever goes on using an object that was destroyed gets `ENOENT` at best and that other object at
/// worst.
///
/// To move the duty to destroy it, the owner calls `release` ([`ProtectionDomain::release`],
/// [`MemoryRegion::release`]) and sends what that answers, and the importer calls
/// [`into_owner`](Self::into_owner), which is `unsafe`: an envelope of `release` looks like one of
/// `export`, and an object must not have two owners.
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

    /// Forgets the object here; the kernel's stays as it is. Dropping does the same as soon as
    /// nothing uses it any more.
    ///
    /// # Errors
    ///
    /// `EBUSY` while something that this process made from it lives; it comes back with the error.
    #[doc(alias = "ibv_unimport_pd")]
    #[doc(alias = "ibv_unimport_mr")]
    #[doc(alias = "ibv_unimport_dm")]
    pub fn unimport(self) -> std::result::Result<(), (Self, Error)> {
        if let Err(error) = self.object.check_fork(T::UNIMPORT) {
            return Err((self, error));
        }
        if self.object.is_held() {
            let error = Error::new(T::UNIMPORT, Errno::BUSY)
                .detail("something made from it in this process is still alive");
            return Err((self, error));
        }
        Ok(())
    }

    /// Makes the object this process's: dropping it destroys it from now on.
    ///
    /// # Safety
    ///
    /// The object has no owner: the former one released it, or ended without destroying it, and
    /// nobody has taken it over since or will, be it in another process or in another context of
    /// this one. If it is a memory region, no memory window of a process that ended was bound to it, or
    /// that window was [destroyed](crate::ForeignObject::destroy) since: mlx5's driver deregisters a
    /// region with a bound window, which then opens the next region of the same key to the peer.
    ///
    /// Nothing that an import looks at tells. When one of two owners has destroyed the object, the
    /// kernel gives its handle to the next one of the file, and the other owner takes that for its
    /// own: it destroys it, or changes what peers may do with memory that is somebody's slice.
    ///
    /// # Errors
    ///
    /// `ENOENT` if the object is gone, `ESTALE` if it is another one; the import comes back with the
    /// error.
    #[allow(unsafe_code, reason = "the obligation is the caller's")]
    pub unsafe fn into_owner(self) -> std::result::Result<T, (Self, Error)> {
        if let Err(error) = self.object.check("into_owner") {
            return Err((self, error));
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

/// An object of which the kernel says something else than its exporter did.
pub(crate) fn stale(verb: &'static str, detail: String) -> Error {
    Error::new(verb, Errno::STALE)
        .detail(format!("the handle is another object's by now: {detail}"))
}
