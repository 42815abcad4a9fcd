//! Protection domains that processes share. On mlx5 pairs with `MLX5_IB_METHOD_PD_QUERY`; other
//! drivers tell of a protection domain only that it exists.

use crate::ah::Retired;
use crate::context::Context;
use crate::error::{Error, Result};
use crate::file::File;
use crate::handles::ObjectKind;
use crate::object::{Class, Object};
use crate::pd::{KernelPd, PdInner, ProtectionDomain, Sharing};
use crate::sharing::envelope::Envelope;
use crate::sharing::imported::{Imported, sealed::Sealed, stale};
use std::sync::Arc;

const VERB: &str = "import_pd";

impl<S: Sharing> ProtectionDomain<S> {
    /// The exported form, for [`Context::import_pd`]. Of a parent domain it is that of the domain
    /// underneath: the rest is this process's own.
    ///
    /// # Errors
    ///
    /// `EIO` if the device is gone.
    pub fn export(&self) -> Result<Envelope> {
        const VERB: &str = "export_pd";
        let file = self.inner.file();
        let number = number(file, VERB, self.handle())?;
        Ok(Envelope::seal(file, ObjectKind::PD, self.handle(), proof(number)))
    }
}

impl ProtectionDomain {
    /// Leaves it to another process to deallocate the domain. What was made from it here stays.
    ///
    /// # Errors
    ///
    /// As [`export`](Self::export); the domain comes back with the error.
    pub fn release(self) -> std::result::Result<Envelope, (Self, Error)> {
        match self.export() {
            Ok(envelope) => {
                self.inner.kernel.object.set_owned(false);
                Ok(envelope)
            }
            Err(error) => Err((self, error)),
        }
    }
}

/// The number of a domain on the device, where the driver tells.
fn number(file: &File, verb: &'static str, handle: u32) -> Result<Option<u32>> {
    file.check_fork(verb)?;
    let number = file.provider.pd_number(&*file.kernel, handle);
    number.map_err(|errno| Error::from_kernel(verb, errno))
}

/// What the envelope of a domain says of it: its number on the device, where the driver tells.
fn proof(number: Option<u32>) -> [u64; 4] {
    [number.is_some().into(), number.unwrap_or(0).into(), 0, 0]
}

/// Refuses another domain than the one that an envelope tells of; answers its number.
fn compare(file: &File, verb: &'static str, handle: u32, told: [u64; 4]) -> Result<Option<u32>> {
    let number = number(file, verb, handle)?;
    if proof(number) == told {
        return Ok(number);
    }
    let (found, [numbered, said, ..]) = (number.unwrap_or(0), told);
    Err(stale(
        verb,
        match (number, numbered) {
            (Some(_), 1) => format!("protection domain {handle} has number {found} and not {said}"),
            (Some(_), _) => format!("protection domain {handle} has number {found}, and none then"),
            (None, _) => format!("protection domain {handle} has no number, but had one then"),
        },
    ))
}

impl ProtectionDomain {
    /// Refuses another domain than the one that an envelope tells of.
    pub(crate) fn compare(
        file: &File,
        verb: &'static str,
        handle: u32,
        told: [u64; 4],
    ) -> Result<()> {
        compare(file, verb, handle, told).map(drop)
    }
}

impl Context {
    /// Imports a protection domain of another process that has this context's file.
    ///
    /// That it exists is checked, and on mlx5 that it has the number on the device that was exported.
    /// One that took the place of a deallocated domain is not always told from it: a device may deal
    /// the number again, and on rxe the kernel tells none.
    ///
    /// # Errors
    ///
    /// `EINVAL` for an envelope of something else, `EXDEV` for one of another device or context,
    /// `ENOENT` if there is no such domain, `ESTALE` if it is another one.
    #[doc(alias = "ibv_import_pd")]
    pub fn import_pd(&self, envelope: &Envelope) -> Result<Imported<ProtectionDomain>> {
        let (handle, told) = envelope.open(VERB, &self.file, ObjectKind::PD)?;
        self.file.require(VERB, ObjectKind::PD, handle)?;
        let number = compare(&self.file, VERB, handle, told)?;
        Ok(self.imported_pd(handle, number))
    }

    /// Imports a protection domain by its bare handle, as rdma-core's programs exchange them.
    ///
    /// # Safety
    ///
    /// The handle was exported as that of a protection domain of this context's file by whoever
    /// destroys it. Another one names a stranger's domain, which [`Imported::into_owner`] would
    /// claim.
    ///
    /// # Errors
    ///
    /// `ENOENT` if there is no such domain.
    #[doc(alias = "ibv_import_pd")]
    #[allow(unsafe_code, reason = "the obligation is the caller's")]
    pub unsafe fn import_pd_raw(&self, handle: u32) -> Result<Imported<ProtectionDomain>> {
        self.file.require(VERB, ObjectKind::PD, handle)?;
        let number = number(&self.file, VERB, handle)?;
        Ok(self.imported_pd(handle, number))
    }

    fn imported_pd(&self, handle: u32, number: Option<u32>) -> Imported<ProtectionDomain> {
        let object = Object::imported(self.file.clone(), Class::PD, handle, ());
        let kernel = Arc::new(KernelPd { retired: Retired::default(), object, number });
        let inner = Arc::new(PdInner { kernel, td: None, allocator: None });
        Imported::new(ProtectionDomain::of(inner))
    }
}

impl Sealed for ProtectionDomain {
    const UNIMPORT: &'static str = "unimport_pd";

    fn check(&self, verb: &'static str) -> Result<()> {
        let (file, handle) = (self.inner.file(), self.handle());
        file.require(verb, ObjectKind::PD, handle)?;
        compare(file, verb, handle, proof(self.inner.kernel.number)).map(drop)
    }

    fn check_fork(&self, verb: &'static str) -> Result<()> {
        self.inner.file().check_fork(verb)
    }

    fn is_held(&self) -> bool {
        Arc::strong_count(&self.inner) > 1 || Arc::strong_count(&self.inner.kernel) > 1
    }

    fn set_owned(&self, owned: bool) {
        self.inner.kernel.object.set_owned(owned);
    }
}
