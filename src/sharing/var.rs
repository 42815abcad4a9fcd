//! VARs that several processes use. Pairs with `mlx5dv_var_export` and `mlx5dv_var_import` of rdma-core.
//! The kernel knows of neither.

use crate::context::Context;
use crate::error::{Error, ErrorWith, Result};
use crate::handles::ObjectKind;
use crate::mlx5::devx::kept;
use crate::mlx5::var::{Var, VarLocation};
use crate::object::{Class, Object};
use crate::sharing::devx::{RdmaCoreObject, RdmaCoreUmem, read_rdma_core};
use crate::sharing::envelope::{Envelope, Fingerprint};
use crate::sharing::imported::{Imported, sealed::Sealed, stale};
use rustix::io::Errno;
use std::sync::Arc;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

const VERB: &str = "import_var";

/// A VAR that another process, or another context of this one, allocated.
///
/// Dropping it, or [`unimport`](Imported::unimport), forgets it here and leaves the kernel's object
/// alone; mappings stay. [`into_owner`](Imported::into_owner) makes it a [`Var`], which destroys the
/// object when it is dropped.
#[doc(alias = "mlx5dv_var_unimport")]
pub type ImportedVar = Imported<Var>;

/// The bytes that libmlx5 exchanges, in the machine's byte order. They have neither a magic number nor a
/// checksum.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RdmaCore {
    handle: u32,
    page_id: u32,
    length: u32,
    padding: u32,
    offset: u64,
}

/// The lengths of exported VARs, umems and objects of DEVX in bytes.
#[doc(alias = "mlx5dv_export_sizes")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ExportSizes {
    /// The length of [`Envelope::to_bytes`].
    pub envelope: usize,
    /// The length of [`Var::export_rdma_core`].
    #[doc(alias = "var_attrs_size")]
    pub rdma_core: usize,
    /// The length of [`Umem::export_rdma_core`](crate::mlx5::devx::Umem::export_rdma_core).
    #[doc(alias = "devx_umem_attrs_size")]
    pub rdma_core_umem: usize,
    /// The length of [`DevxObject::export_rdma_core`](crate::mlx5::devx::DevxObject::export_rdma_core).
    #[doc(alias = "devx_obj_attrs_size")]
    pub rdma_core_object: usize,
}

/// The lengths of exported VARs, umems and objects of DEVX in bytes.
#[doc(alias = "mlx5dv_get_export_sizes")]
pub fn export_sizes() -> ExportSizes {
    ExportSizes {
        envelope: Envelope::SIZE,
        rdma_core: size_of::<RdmaCore>(),
        rdma_core_umem: size_of::<RdmaCoreUmem>(),
        rdma_core_object: size_of::<RdmaCoreObject>(),
    }
}

/// Sharing, by [`export`](Self::export) in one process and [`import`](Self::import) in another that
/// has the same kernel file; see [`Context::import_exported`].
///
/// Exporting changes nothing, and any number of processes may import. The kernel knows of neither, so all
/// users must agree which of them destroys the VAR, and when. Afterwards no process may use it; mappings
/// stay, and the kernel gives the page to no other object until the last of them is gone.
///
/// An import keeps the page mapped. [`map`](Self::map) of an imported VAR therefore maps that page or
/// fails, even if the VAR was destroyed meanwhile. Importing a VAR that was destroyed fails while its
/// handle is unused. The kernel soon gives handle and mmap offset to the next VAR; an import cannot tell
/// that VAR from the destroyed one.
impl Var {
    /// Describes the VAR to another process.
    ///
    /// # Errors
    ///
    /// [`Error::is_forked`] in a child of the process that allocated the VAR.
    #[doc(alias = "mlx5dv_var_export")]
    pub fn export(&self) -> Result<Envelope> {
        let file = self.object.file();
        file.check_fork("export_var")?;
        let fingerprint = fingerprint(&self.location);
        Ok(Envelope::seal(file, ObjectKind::MLX5_VAR, self.handle(), fingerprint))
    }

    /// Describes the VAR as libmlx5 does, for a program that calls `mlx5dv_var_import`. Tested with libmlx5
    /// of rdma-core 65.
    #[doc(alias = "mlx5dv_var_export")]
    pub fn export_rdma_core(&self) -> [u8; 24] {
        let location = self.location;
        let blob = RdmaCore {
            handle: self.handle(),
            page_id: location.page_id,
            length: location.length,
            padding: 0,
            offset: location.mmap_offset,
        };
        zerocopy::transmute!(blob)
    }

    /// Gives the VAR to another process, which then has to destroy it: the one that imports the
    /// envelope and calls [`into_owner`](Imported::into_owner).
    ///
    /// # Errors
    ///
    /// `EBUSY` while an object of DEVX keeps it, which needs this process to own it as long. As
    /// [`export`](Self::export) else. The VAR comes back with the error.
    pub fn release(self) -> std::result::Result<Envelope, ErrorWith<Self>> {
        if self.is_kept() {
            let error = Error::new("release_var", Errno::BUSY).detail(kept::HELD);
            return Err(error.with(self));
        }
        match self.export() {
            Ok(envelope) => {
                self.object.set_owned(false);
                Ok(envelope)
            }
            Err(error) => Err(error.with(self)),
        }
    }

    /// Imports a VAR that was exported from a context on the same kernel file.
    ///
    /// The import checks that a VAR of this handle exists and that a page can be mapped at the exported
    /// offset. The kernel does not tell whose page that is.
    ///
    /// # Safety
    ///
    /// The envelope was made by [`export`](Self::export) or [`release`](Self::release), came here from a trusted
    /// process, and the VAR is not destroyed before this returns. The mmap offset in a forged or stale envelope may be
    /// that of any page of the file. If it is that of doorbell registers of queues, the safe functions of the mapped
    /// page would ring them, and the device would carry out WQEs that no program wrote.
    ///
    /// # Errors
    ///
    /// `EINVAL` for an envelope of something else, `EXDEV` for one of another device or context,
    /// `ENOENT` if there is no VAR of this handle, `ESTALE` if nothing can be mapped at its offset,
    /// `EOPNOTSUPP` on a device of another driver.
    #[doc(alias = "mlx5dv_var_import")]
    #[allow(unsafe_code, reason = "the obligation is the caller's")]
    pub unsafe fn import(context: &Context, envelope: &Envelope) -> Result<ImportedVar> {
        context.file.provider.mlx5(VERB)?;
        let (handle, [page_id, length, mmap_offset, _]) =
            envelope.open(VERB, &context.file, ObjectKind::MLX5_VAR)?;
        let narrow = |number: u64| u32::try_from(number).map_err(|_| impossible(length, page_id));
        let location =
            VarLocation { page_id: narrow(page_id)?, length: narrow(length)?, mmap_offset };
        import(context, handle, location)
    }

    /// Imports a VAR that libmlx5 exported, by `mlx5dv_var_export`. Tested with libmlx5 of rdma-core 65.
    ///
    /// # Safety
    ///
    /// The bytes were exported from a context on the same kernel file, and the VAR is not destroyed before
    /// this returns. They contain nothing to check: forged bytes name any page that can be mapped through
    /// the file, the doorbell registers of this process's queues among them.
    ///
    /// # Errors
    ///
    /// As [`import`](Self::import); `EINVAL` for other than 24 bytes.
    #[doc(alias = "mlx5dv_var_import")]
    #[allow(unsafe_code, reason = "the obligation is the caller's")]
    pub unsafe fn import_rdma_core(context: &Context, bytes: &[u8]) -> Result<ImportedVar> {
        context.file.provider.mlx5(VERB)?;
        let blob: RdmaCore = read_rdma_core(VERB, bytes)?;
        let location =
            VarLocation { page_id: blob.page_id, length: blob.length, mmap_offset: blob.offset };
        import(context, blob.handle, location)
    }
}

fn fingerprint(location: &VarLocation) -> Fingerprint {
    [location.page_id.into(), location.length.into(), location.mmap_offset, 0]
}

fn impossible(length: u64, page_id: u64) -> Error {
    Error::invalid(VERB, format!("no VAR has {length} bytes and page id {page_id}"))
}

fn import(context: &Context, handle: u32, location: VarLocation) -> Result<ImportedVar> {
    let file = &context.file;
    let VarLocation { page_id, length, mmap_offset } = location;
    if length == 0 || length as usize % rustix::param::page_size() != 0 {
        return Err(impossible(length.into(), page_id.into()));
    }
    file.require(VERB, ObjectKind::MLX5_VAR, handle)?;
    // Later mappings use the mmap offset alone. Once the VAR is gone and nothing maps it, the kernel gives
    // the offset to the doorbell registers of the next queue. This mapping keeps the offset.
    let mapped = location.map(file).map_err(|error| match error.errno() {
        Errno::INVAL => stale(VERB, format!("VAR {handle} is not at {mmap_offset:#x}")),
        _ => error.in_verb(VERB),
    })?;
    let object = Object::imported(file.clone(), Class::VAR, handle, ());
    Ok(Imported::new(Var { object: Arc::new(object), location, _mapped: Some(mapped) }))
}

impl Sealed for Var {
    const UNIMPORT: &'static str = "unimport_var";

    fn check(&self, verb: &'static str) -> Result<()> {
        self.object.file().require(verb, ObjectKind::MLX5_VAR, self.handle())
    }

    fn check_fork(&self, verb: &'static str) -> Result<()> {
        self.object.file().check_fork(verb)
    }

    fn is_held(&self) -> bool {
        self.is_kept()
    }

    fn set_owned(&self, owned: bool) {
        self.object.set_owned(owned);
    }
}
