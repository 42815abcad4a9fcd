//! Objects of DEVX and umems that several processes use. Pairs with `mlx5dv_devx_obj_export` and
//! `mlx5dv_devx_umem_export` of rdma-core 63 and later. The kernel knows of neither.

use crate::context::Context;
use crate::error::{Error, ErrorWith, Result};
use crate::handles::ObjectKind;
use crate::memory::region::Foreign;
use crate::mlx5::devx::{DevxObject, Facts, Umem};
use crate::sharing::envelope::Envelope;
use crate::sharing::imported::{Imported, sealed::Sealed};
use rustix::io::Errno;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

const IMPORT_OBJECT: &str = "import_devx_obj";
const IMPORT_UMEM: &str = "import_devx_umem";

/// An object of DEVX that another process, or another context of this one, created. Commands query and change it as one
/// of this process. Dropping it forgets it here.
#[doc(alias = "mlx5dv_devx_obj_unimport")]
pub type ImportedDevxObject = Imported<DevxObject>;

/// A umem that another process, or another context of this one, registered. Commands name it by its number. Dropping it
/// forgets it here.
#[doc(alias = "mlx5dv_devx_umem_unimport")]
pub type ImportedUmem = Imported<Umem<Foreign>>;

/// `struct mlx5dv_devx_obj_attrs` of libmlx5, in the machine's byte order.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct RdmaCoreObject {
    handle: u32,
    kind: u32,
    object_id: u32,
    padding: u32,
    rx_icm_addr: u64,
    log_obj_range: u8,
    rest: [u8; 7],
}

/// `struct mlx5dv_devx_umem_attrs` of libmlx5.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct RdmaCoreUmem {
    handle: u32,
    umem_id: u32,
}

/// Reads the bytes that libmlx5 exported.
pub(super) fn read_rdma_core<T: FromBytes>(verb: &'static str, bytes: &[u8]) -> Result<T> {
    T::read_from_bytes(bytes).map_err(|_| {
        let length = size_of::<T>();
        Error::invalid(verb, format!("{} bytes; rdma-core exports {length}", bytes.len()))
    })
}

/// Sharing, by [`export`](Self::export) in one process and [`import`](Self::import) in another that has the same kernel
/// file; see [`Context::import_exported`]. The kernel knows of neither: one process destroys the object, after the
/// others have dropped their imports. The umems of its queues are kept by the process that created it.
impl DevxObject {
    /// Describes the object to another process.
    ///
    /// ```no_run
    /// # fn f(context: &uverbs::Context, counters: uverbs::mlx5::devx::DevxObject, output: &mut [u8])
    /// # -> Result<(), Box<dyn std::error::Error>> {
    /// use uverbs::mlx5::devx::{self, DevxObject, ImportedDevxObject};
    /// use uverbs_uapi::mlx5::prm::{command, opcode};
    ///
    /// let (envelope, bytes) = (counters.export()?, counters.export_rdma_core());
    /// // ... and in the other process, with a context on the same file:
    /// let imported: ImportedDevxObject = DevxObject::import(context, &envelope)?;
    /// let mut query = command::<32>(opcode::QUERY_Q_COUNTER);
    /// query[31] = imported.number() as u8;
    /// devx::query(&*imported, &query, output)?;
    /// imported.unimport()?;
    /// // The bytes that a program of libmlx5 exported:
    /// let imported = DevxObject::import_rdma_core(context, &bytes)?;
    /// // One that has another owner from then on:
    /// let envelope = counters.release()?;
    /// # drop((imported, envelope)); Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::is_forked`] in a child of the process that created it.
    #[doc(alias = "mlx5dv_devx_obj_export")]
    pub fn export(&self) -> Result<Envelope> {
        let file = self.file();
        file.check_fork("export_devx_obj")?;
        let Facts { number, kind, rx_icm_addr, log_obj_range } = self.facts();
        let kinds = u64::from(kind) | u64::from(log_obj_range) << 32;
        let fingerprint = [number.into(), kinds, rx_icm_addr, 0];
        Ok(Envelope::seal(file, ObjectKind::MLX5_DEVX_OBJ, self.handle(), fingerprint))
    }

    /// Describes the object as libmlx5 does, for a program that calls `mlx5dv_devx_obj_import`.
    #[doc(alias = "mlx5dv_devx_obj_export")]
    pub fn export_rdma_core(&self) -> [u8; 32] {
        let Facts { number, kind, rx_icm_addr, log_obj_range } = self.facts();
        let blob = RdmaCoreObject {
            handle: self.handle(),
            kind,
            object_id: number,
            padding: 0,
            rx_icm_addr,
            log_obj_range,
            rest: [0; 7],
        };
        zerocopy::transmute!(blob)
    }

    /// Gives the object to another process, which then has to destroy it: the one that imports the envelope and calls
    /// [`into_owner`](Imported::into_owner).
    ///
    /// # Errors
    ///
    /// `EBUSY` for an object that keeps umems or objects, or that others keep: they need this process to live as long.
    /// As
    /// [`export`](Self::export) else. The object comes back with the error.
    pub fn release(self) -> std::result::Result<Envelope, ErrorWith<Self>> {
        if self.keeps_others() || self.is_kept() {
            let detail = "it keeps umems or objects of this process, or is kept by some";
            return Err(Error::new("release_devx_obj", Errno::BUSY).detail(detail).with(self));
        }
        match self.export() {
            Ok(envelope) => {
                self.set_owned(false);
                Ok(envelope)
            }
            Err(error) => Err(error.with(self)),
        }
    }

    /// Imports an object that was exported from a context on the same kernel file. The kernel tells of an object only
    /// that there is one of this handle.
    ///
    /// # Errors
    ///
    /// `EINVAL` for an envelope of something else, `EXDEV` for one of another device or context, `ENOENT` if there is
    /// no object of this handle, `EOPNOTSUPP` on a device of another driver.
    #[doc(alias = "mlx5dv_devx_obj_import")]
    pub fn import(context: &Context, envelope: &Envelope) -> Result<ImportedDevxObject> {
        context.file.provider.mlx5(IMPORT_OBJECT)?;
        let (handle, [number, kinds, rx_icm_addr, _]) =
            envelope.open(IMPORT_OBJECT, &context.file, ObjectKind::MLX5_DEVX_OBJ)?;
        let facts = Facts {
            number: number as u32,
            kind: kinds as u32,
            rx_icm_addr,
            log_obj_range: (kinds >> 32) as u8,
        };
        import_object(context, handle, facts)
    }

    /// Imports an object that libmlx5 exported, by `mlx5dv_devx_obj_export`. The bytes name neither a device nor a
    /// file: that they are of this one, and that the number is of this handle, is the sender's word. libmlx5 knows the
    /// numbers of queue pairs, TIRs, general objects, and those of its flow steering;
    /// [`number`](DevxObject::number) is 0 of all others, for which the sender has to tell the number otherwise.
    ///
    /// # Errors
    ///
    /// `EINVAL` for other than 32 bytes, `ENOENT` if there is no object of this handle, `EOPNOTSUPP` on a device of
    /// another driver.
    #[doc(alias = "mlx5dv_devx_obj_import")]
    pub fn import_rdma_core(context: &Context, bytes: &[u8]) -> Result<ImportedDevxObject> {
        context.file.provider.mlx5(IMPORT_OBJECT)?;
        let RdmaCoreObject { handle, kind, object_id, rx_icm_addr, log_obj_range, .. } =
            read_rdma_core(IMPORT_OBJECT, bytes)?;
        let facts = Facts { number: object_id, kind, rx_icm_addr, log_obj_range };
        import_object(context, handle, facts)
    }
}

fn import_object(context: &Context, handle: u32, facts: Facts) -> Result<ImportedDevxObject> {
    context.file.require(IMPORT_OBJECT, ObjectKind::MLX5_DEVX_OBJ, handle)?;
    Ok(Imported::new(DevxObject::imported(context.file.clone(), handle, facts)))
}

/// Sharing: as of a [`DevxObject`]. The process that registered the memory deregisters it, since it has the memory.
impl<M> Umem<M> {
    /// Describes the umem to another process.
    ///
    /// ```no_run
    /// # fn f(context: &uverbs::Context, umem: &uverbs::mlx5::devx::Umem) -> uverbs::Result<()> {
    /// use uverbs::Foreign;
    /// use uverbs::mlx5::devx::{ImportedUmem, Umem};
    ///
    /// let (envelope, bytes) = (umem.export()?, umem.export_rdma_core());
    /// // ... and in the other process, whose commands name the memory then:
    /// let imported: ImportedUmem = Umem::<Foreign>::import(context, &envelope)?;
    /// println!("umem {} of {} bytes", imported.id(), imported.len());
    /// let of_libmlx5 = Umem::<Foreign>::import_rdma_core(context, &bytes)?;
    /// # drop(of_libmlx5); Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::is_forked`] in a child of the process that registered it.
    #[doc(alias = "mlx5dv_devx_umem_export")]
    pub fn export(&self) -> Result<Envelope> {
        let file = self.file();
        file.check_fork("export_devx_umem")?;
        let fingerprint = [self.id().into(), self.len(), 0, 0];
        Ok(Envelope::seal(file, ObjectKind::MLX5_DEVX_UMEM, self.handle(), fingerprint))
    }

    /// Describes the umem as libmlx5 does, for a program that calls `mlx5dv_devx_umem_import`.
    #[doc(alias = "mlx5dv_devx_umem_export")]
    pub fn export_rdma_core(&self) -> [u8; 8] {
        zerocopy::transmute!(RdmaCoreUmem { handle: self.handle(), umem_id: self.id() })
    }
}

impl Umem<Foreign> {
    /// Imports a umem that was exported from a context on the same kernel file. Its memory is not mapped here. Its
    /// number and its length are the sender's word, as of [`DevxObject::create`].
    ///
    /// # Errors
    ///
    /// As [`DevxObject::import`].
    #[doc(alias = "mlx5dv_devx_umem_import")]
    pub fn import(context: &Context, envelope: &Envelope) -> Result<ImportedUmem> {
        context.file.provider.mlx5(IMPORT_UMEM)?;
        let (handle, [id, length, ..]) =
            envelope.open(IMPORT_UMEM, &context.file, ObjectKind::MLX5_DEVX_UMEM)?;
        import_umem(context, handle, id as u32, length)
    }

    /// Imports a umem that libmlx5 exported, by `mlx5dv_devx_umem_export`. Its [length](Umem::len) is 0 here, which the
    /// bytes do not tell.
    ///
    /// # Errors
    ///
    /// As [`DevxObject::import_rdma_core`]; `EINVAL` for other than 8 bytes.
    #[doc(alias = "mlx5dv_devx_umem_import")]
    pub fn import_rdma_core(context: &Context, bytes: &[u8]) -> Result<ImportedUmem> {
        context.file.provider.mlx5(IMPORT_UMEM)?;
        let blob: RdmaCoreUmem = read_rdma_core(IMPORT_UMEM, bytes)?;
        import_umem(context, blob.handle, blob.umem_id, 0)
    }
}

fn import_umem(context: &Context, handle: u32, id: u32, length: u64) -> Result<ImportedUmem> {
    context.file.require(IMPORT_UMEM, ObjectKind::MLX5_DEVX_UMEM, handle)?;
    Ok(Imported::new(Umem::imported(context.file.clone(), handle, id, length)))
}

impl Sealed for DevxObject {
    const UNIMPORT: &'static str = "unimport_devx_obj";

    fn check(&self, verb: &'static str) -> Result<()> {
        self.file().require(verb, ObjectKind::MLX5_DEVX_OBJ, self.handle())
    }

    fn check_fork(&self, verb: &'static str) -> Result<()> {
        self.file().check_fork(verb)
    }

    fn is_held(&self) -> bool {
        self.is_kept()
    }

    fn set_owned(&self, owned: bool) {
        self.set_owned(owned);
    }
}

impl Sealed for Umem<Foreign> {
    const UNIMPORT: &'static str = "unimport_devx_umem";

    fn check(&self, verb: &'static str) -> Result<()> {
        self.file().require(verb, ObjectKind::MLX5_DEVX_UMEM, self.handle())
    }

    fn check_fork(&self, verb: &'static str) -> Result<()> {
        self.file().check_fork(verb)
    }

    fn is_held(&self) -> bool {
        self.is_kept()
    }

    fn set_owned(&self, owned: bool) {
        self.set_owned(owned);
    }
}
