//! Protection domains that several processes use. On mlx5 pairs with `MLX5_IB_METHOD_PD_QUERY`, which
//! returns the domain's number on the device (PDN); other drivers only say that the domain exists.

use crate::ah::named_handles::NamedHandles;
use crate::context::Context;
use crate::error::{Error, ErrorWith, Result};
use crate::file::File;
use crate::handles::ObjectKind;
use crate::object::{Class, Object};
use crate::pd::{KernelPd, PdInner, ProtectionDomain, Sharing};
use crate::sharing::envelope::{Envelope, Fingerprint};
use crate::sharing::imported::{Imported, sealed::Sealed, stale};
use std::sync::Arc;

const VERB: &str = "import_pd";

impl<S: Sharing> ProtectionDomain<S> {
    /// The exported form, for [`Context::import_pd`]. A parent domain exports the protection domain that it
    /// was made of.
    ///
    /// # Errors
    ///
    /// `EIO` if the device is gone.
    pub fn export(&self) -> Result<Envelope> {
        const VERB: &str = "export_pd";
        let file = self.inner.file();
        let number = number(file, VERB, self.handle())?;
        Ok(Envelope::seal(file, ObjectKind::PD, self.handle(), fingerprint(number)))
    }
}

impl ProtectionDomain {
    /// Gives the domain to another process, which then has to deallocate it. Objects that were made from it
    /// here stay.
    ///
    /// # Errors
    ///
    /// As [`export`](Self::export); the domain comes back with the error.
    pub fn release(self) -> std::result::Result<Envelope, ErrorWith<Self>> {
        match self.export() {
            Ok(envelope) => {
                self.inner.kernel.object.set_owned(false);
                Ok(envelope)
            }
            Err(error) => Err(error.with(self)),
        }
    }
}

/// The domain's PDN; `None` where the driver does not report it.
fn number(file: &File, verb: &'static str, handle: u32) -> Result<Option<u32>> {
    file.check_fork(verb)?;
    let number = file.provider.pd_number(&*file.kernel, handle);
    number.map_err(|errno| Error::from_kernel(verb, errno))
}

fn fingerprint(number: Option<u32>) -> Fingerprint {
    [number.is_some().into(), number.unwrap_or(0).into(), 0, 0]
}

/// Refuses a domain that is not the exported one; returns its PDN.
fn compare(
    file: &File,
    verb: &'static str,
    handle: u32,
    exported: Fingerprint,
) -> Result<Option<u32>> {
    let number = number(file, verb, handle)?;
    if fingerprint(number) == exported {
        return Ok(number);
    }
    let (found, [numbered, expected, ..]) = (number.unwrap_or(0), exported);
    Err(stale(
        verb,
        match (number, numbered) {
            (Some(_), 1) => {
                format!("protection domain {handle} has number {found}, not {expected}")
            }
            (Some(_), _) => format!(
                "protection domain {handle} has number {found}, and had none when it was exported"
            ),
            (None, _) => format!(
                "protection domain {handle} has no number, and had one when it was exported"
            ),
        },
    ))
}

impl ProtectionDomain {
    /// Refuses a domain that is not the exported one.
    pub(crate) fn compare_with_kernel(
        file: &File,
        verb: &'static str,
        handle: u32,
        exported: Fingerprint,
    ) -> Result<()> {
        compare(file, verb, handle, exported).map(drop)
    }
}

impl Context {
    /// Imports a protection domain of another process that has this context's file.
    ///
    /// The import checks that the domain exists, and on mlx5 that it has the exported number (PDN). It does
    /// not always notice a new domain with the handle of the exported one: mlx5 may use the PDN again, and rxe
    /// reports none.
    ///
    /// # Errors
    ///
    /// `EINVAL` for an envelope of something else, `EXDEV` for one of another device or context,
    /// `ENOENT` if there is no such domain, `ESTALE` if it is another one.
    #[doc(alias = "ibv_import_pd")]
    pub fn import_pd(&self, envelope: &Envelope) -> Result<Imported<ProtectionDomain>> {
        let (handle, exported) = envelope.open(VERB, &self.file, ObjectKind::PD)?;
        self.file.require(VERB, ObjectKind::PD, handle)?;
        let number = compare(&self.file, VERB, handle, exported)?;
        Ok(self.imported_pd(handle, number))
    }

    /// Imports a protection domain by its bare handle, as rdma-core's programs exchange them.
    ///
    /// # Safety
    ///
    /// The owner of a protection domain on this context's file exported the handle. Any other handle may name
    /// a domain whose owner did not export it, and [`Imported::into_owner`] would take it.
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
        let kernel = Arc::new(KernelPd { retired: NamedHandles::default(), object, number });
        let inner = Arc::new(PdInner { kernel, td: None, allocator: None });
        Imported::new(ProtectionDomain::of(inner))
    }
}

impl Sealed for ProtectionDomain {
    const UNIMPORT: &'static str = "unimport_pd";

    fn check(&self, verb: &'static str) -> Result<()> {
        let (file, handle) = (self.inner.file(), self.handle());
        file.require(verb, ObjectKind::PD, handle)?;
        compare(file, verb, handle, fingerprint(self.inner.kernel.number)).map(drop)
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
