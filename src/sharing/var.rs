//! VARs that several processes use. Pairs with rdma-core's `mlx5dv_var_export`, of which the kernel
//! knows nothing.

use crate::context::Context;
use crate::error::{Error, Result};
use crate::handles::ObjectKind;
use crate::mlx5::var::{Place, Var};
use crate::object::{Class, Object};
use crate::sharing::envelope::Envelope;
use crate::sharing::imported::{Imported, sealed::Sealed, stale};
use rustix::io::Errno;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

const VERB: &str = "import_var";

/// A VAR that another process, or another context of this one, allocated.
///
/// Dropping it, or [`unimport`](Imported::unimport), forgets it here and leaves the kernel's object
/// alone; mappings stay. [`into_owner`](Imported::into_owner) makes a [`Var`] of it, which destroys
/// the object. As these are two types, one cannot be taken for the other.
#[doc(alias = "mlx5dv_var_unimport")]
pub type ImportedVar = Imported<Var>;

/// What rdma-core's functions exchange: bytes in the order of the machine, with nothing to
/// recognise them by.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RdmaCore {
    handle: u32,
    page_id: u32,
    length: u32,
    padding: u32,
    offset: u64,
}

/// How many bytes exported VARs have.
#[doc(alias = "mlx5dv_export_sizes")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ExportSizes {
    /// [`Envelope::to_bytes`].
    pub envelope: usize,
    /// [`Var::export_rdma_core`].
    pub rdma_core: usize,
}

/// How many bytes exported VARs have.
#[doc(alias = "mlx5dv_get_export_sizes")]
pub fn export_sizes() -> ExportSizes {
    ExportSizes { envelope: Envelope::SIZE, rdma_core: size_of::<RdmaCore>() }
}

/// Sharing, by [`export`](Self::export) in one process and [`import`](Self::import) in another that
/// has the same kernel file; see [`Context::import_exported`].
///
/// Exporting changes nothing, and any number may import. The kernel knows neither, so all users must
/// agree who destroys the VAR, and when: nobody may use it afterwards, except that what is mapped
/// stays mapped, and belongs to nobody else until the last mapping is gone. An import keeps the page
/// mapped, so that [`map`](Self::map) answers that page or an error, whatever became of the VAR. An
/// import of a VAR that was destroyed is refused while its handle is unused. When the next VAR has
/// taken the handle and the place, as the kernel gives both away soon, the two cannot be told apart.
impl Var {
    /// Describes the VAR to another process.
    ///
    /// # Errors
    ///
    /// [`Error::is_forked`] in a child of the process that has it.
    #[doc(alias = "mlx5dv_var_export")]
    pub fn export(&self) -> Result<Envelope> {
        let file = self.object.file();
        file.check_fork("export_var")?;
        let proof = proof(&self.place);
        Ok(Envelope::seal(file, ObjectKind::MLX5_VAR, self.handle(), proof))
    }

    /// Describes the VAR the way rdma-core does, for a program that calls `mlx5dv_var_import`.
    #[doc(alias = "mlx5dv_var_export")]
    pub fn export_rdma_core(&self) -> [u8; 24] {
        let place = self.place;
        let blob = RdmaCore {
            handle: self.handle(),
            page_id: place.page_id,
            length: place.length,
            padding: 0,
            offset: place.offset,
        };
        zerocopy::transmute!(blob)
    }

    /// Gives the duty to destroy the VAR to whoever opens the envelope and calls
    /// [`into_owner`](Imported::into_owner).
    ///
    /// # Errors
    ///
    /// [`Error::is_forked`], with the VAR.
    pub fn release(self) -> std::result::Result<Envelope, (Self, Error)> {
        match self.export() {
            Ok(envelope) => {
                self.object.set_owned(false);
                Ok(envelope)
            }
            Err(error) => Err((self, error)),
        }
    }

    /// Imports a VAR that was exported from a context on the same kernel file.
    ///
    /// That it exists, and that something can be mapped where its page is said to be, is checked; the
    /// kernel does not tell what that something is.
    ///
    /// # Safety
    ///
    /// The envelope was answered by [`export`](Self::export) or [`release`](Self::release), and came
    /// here from somebody who is trusted, and the VAR is not destroyed before this returns. An envelope
    /// that was made up or is too old may name, by its place in the file, any page of it: the doorbell
    /// registers of queues, where safe functions of the mapped page would then write requests of
    /// nobody's.
    ///
    /// # Errors
    ///
    /// `EINVAL` for an envelope of something else, `EXDEV` for one of another device or context,
    /// `ENOENT` if there is no VAR of this handle, `ESTALE` if there is one elsewhere, `EOPNOTSUPP` on
    /// a device of another driver.
    #[doc(alias = "mlx5dv_var_import")]
    #[allow(unsafe_code, reason = "the obligation is the caller's")]
    pub unsafe fn import(context: &Context, envelope: &Envelope) -> Result<ImportedVar> {
        context.file.provider.mlx5(VERB)?;
        let (handle, [page_id, length, offset, _]) =
            envelope.open(VERB, &context.file, ObjectKind::MLX5_VAR)?;
        let narrow = |number: u64| u32::try_from(number).map_err(|_| unknown(length, page_id));
        let place = Place { page_id: narrow(page_id)?, length: narrow(length)?, offset };
        import(context, handle, place)
    }

    /// Imports a VAR that rdma-core exported, by `mlx5dv_var_export`.
    ///
    /// # Safety
    ///
    /// The bytes were exported from a context on the same kernel file. They hold nothing that could
    /// be checked: made up, they name any page that is mapped through the file, such as the registers
    /// of one's own queues. The VAR is not destroyed before this returns.
    ///
    /// That rdma-core's functions take and give such bytes is read from their source; it has not been
    /// tried with a program that calls them.
    ///
    /// # Errors
    ///
    /// As [`import`](Self::import); `EINVAL` for other than 24 bytes.
    #[doc(alias = "mlx5dv_var_import")]
    #[allow(unsafe_code, reason = "the obligation is the caller's")]
    pub unsafe fn import_rdma_core(context: &Context, bytes: &[u8]) -> Result<ImportedVar> {
        context.file.provider.mlx5(VERB)?;
        let blob = RdmaCore::read_from_bytes(bytes).map_err(|_| {
            let detail = format!("{} bytes; rdma-core exports 24", bytes.len());
            Error::invalid(VERB, detail)
        })?;
        let place = Place { page_id: blob.page_id, length: blob.length, offset: blob.offset };
        import(context, blob.handle, place)
    }
}

fn proof(place: &Place) -> [u64; 4] {
    [place.page_id.into(), place.length.into(), place.offset, 0]
}

fn unknown(length: u64, page_id: u64) -> Error {
    Error::invalid(VERB, format!("a VAR of {length} bytes with number {page_id}"))
}

fn import(context: &Context, handle: u32, place: Place) -> Result<ImportedVar> {
    let file = &context.file;
    if place.length == 0 || place.length as usize % rustix::param::page_size() != 0 {
        return Err(unknown(place.length.into(), place.page_id.into()));
    }
    file.require(VERB, ObjectKind::MLX5_VAR, handle)?;
    // Where nothing is, nothing can be mapped. Later mappings go by the place alone, which the kernel
    // gives to the registers of the next queue once the VAR is gone and nothing maps it.
    let kept = place.map(file).map_err(|error| match error.errno() {
        Errno::INVAL => stale(VERB, format!("VAR {handle} is not at {:#x}", place.offset)),
        _ => error.in_verb(VERB),
    })?;
    let object = Object::imported(file.clone(), Class::VAR, handle, ());
    Ok(Imported::new(Var { object, place, _kept: Some(kept) }))
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
        false
    }

    fn set_owned(&self, owned: bool) {
        self.object.set_owned(owned);
    }
}
