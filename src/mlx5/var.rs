//! VARs: doorbell pages of virtio devices that the hardware emulates. Pairs with `MLX5_IB_OBJECT_VAR`
//! of `drivers/infiniband/hw/mlx5/main.c`.

use super::devx::kept;
use super::page::DoorbellPage;
use crate::context::Context;
use crate::error::{Error, ErrorWith, Result};
use crate::file::File;
use crate::memory::mmio_page::MmioPage;
use crate::object::{Class, Object, destroy_sole};
use crate::uverbs::command::Command;
use rustix::io::Errno;
use std::any::Any;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use uverbs_uapi::mlx5::object::MLX5_IB_OBJECT_VAR;
use uverbs_uapi::mlx5::var as uapi;
use uverbs_uapi::mlx5::var::mlx5_ib_uapi_var_alloc_flags;

const VERB: &str = "alloc_var";

impl Class {
    pub(crate) const VAR: Class = Class {
        verb: "free_var",
        object: MLX5_IB_OBJECT_VAR,
        destroy: uapi::MLX5_IB_METHOD_VAR_OBJ_DESTROY,
        handle: uapi::MLX5_IB_ATTR_VAR_OBJ_DESTROY_HANDLE,
        report: None,
    };
}

/// The kind of device that a VAR's doorbells ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VarKind {
    /// A virtio device that hardware emulates.
    Virtio,
    /// A device of any kind, emulated by PCI transactions (Linux 7.1).
    #[doc(alias = "MLX5DV_VAR_ALLOC_FLAG_TLP")]
    Tlp,
}

/// The page of a VAR, as the kernel described it when it allocated the VAR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct VarLocation {
    pub(crate) page_id: u32,
    pub(crate) length: u32,
    pub(crate) mmap_offset: u64,
}

impl VarLocation {
    pub(crate) fn map(&self, file: &Arc<File>) -> Result<DoorbellPage> {
        const VERB: &str = "map_var";
        file.check_fork(VERB)?;
        let mapping = file.kernel.mapper().map(self.mmap_offset, self.length as usize);
        let mapping = mapping.map_err(|errno| match errno {
            Errno::INVAL => Error::from_kernel(VERB, errno)
                .detail(format!("there is no VAR at {:#x} any more", self.mmap_offset)),
            _ => Error::from_kernel(VERB, errno),
        })?;
        file.mark_shared();
        Ok(DoorbellPage::new(MmioPage::new(mapping)))
    }
}

/// A VAR: a doorbell page of an emulated device. `examples/shared_var.rs` shares one with a second process.
///
/// Dropping it destroys it, for all processes that have [imported](Var::import) it. A page that is
/// [mapped](Self::map) stays mapped, and the kernel gives it to no other object before the last mapping is
/// gone.
///
/// ```no_run
/// # fn f(context: &uverbs::Context) -> Result<(), Box<dyn std::error::Error>> {
/// use uverbs::mlx5::{Var, VarKind};
///
/// let page = Var::alloc(context, VarKind::Virtio)?.map()?;
/// page.ring_u16(0, 1)?;
/// // The doorbell of another kind of device has the width that this device gives it.
/// let page = Var::alloc(context, VarKind::Tlp)?.map()?;
/// page.ring_u64(0x1000, 1)?;
/// # Ok(()) }
/// ```
///
/// Two ways to hand the page on:
///
/// ```no_run
/// # fn f(context: &uverbs::Context) -> Result<(), Box<dyn std::error::Error>> {
/// use uverbs::mlx5::{Var, VarKind};
///
/// let var = Var::alloc(context, VarKind::Virtio)?;
/// // For a program that uses libmlx5: the VAR as bytes, and the import of such bytes.
/// let bytes = var.export_rdma_core();
/// assert_eq!(bytes.len(), uverbs::mlx5::export_sizes().rdma_core);
/// // SAFETY: a process that shares the context's file exported the bytes, and its VAR is still there.
/// let imported = unsafe { Var::import_rdma_core(context, &bytes)? };
/// # drop(imported);
/// // This process releases the VAR, and the receiver of the envelope owns it.
/// let envelope = var.release()?;
/// # let _ = envelope; Ok(()) }
/// ```
#[doc(alias = "mlx5dv_var")]
#[derive(Debug)]
pub struct Var {
    pub(crate) object: Arc<Object>,
    pub(crate) location: VarLocation,
    /// A mapping of an imported VAR, so that the kernel gives the mmap offset to no other page while the
    /// import lives.
    pub(crate) _mapped: Option<DoorbellPage>,
}

impl Var {
    /// Allocates a VAR.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` on a device of another driver, on a device that does not emulate devices of this
    /// kind, and for [`VarKind::Tlp`] before Linux 7.1; `ENOSPC` when the device has no page left;
    /// `ENOMEM`.
    #[doc(alias = "mlx5dv_alloc_var")]
    pub fn alloc(context: &Context, kind: VarKind) -> Result<Var> {
        let file = &context.file;
        file.provider.mlx5(VERB)?;
        let flags = match kind {
            VarKind::Virtio => 0,
            VarKind::Tlp => mlx5_ib_uapi_var_alloc_flags::MLX5_IB_UAPI_VAR_ALLOC_FLAG_TLP.bits(),
        };
        let mut location = VarLocation { page_id: 0, length: 0, mmap_offset: 0 };
        let mut command = Command::new(MLX5_IB_OBJECT_VAR, uapi::MLX5_IB_METHOD_VAR_OBJ_ALLOC);
        command
            .new_handle(uapi::MLX5_IB_ATTR_VAR_OBJ_ALLOC_HANDLE)
            .output(uapi::MLX5_IB_ATTR_VAR_OBJ_ALLOC_MMAP_OFFSET, &mut location.mmap_offset)
            .output(uapi::MLX5_IB_ATTR_VAR_OBJ_ALLOC_MMAP_LENGTH, &mut location.length)
            .output(uapi::MLX5_IB_ATTR_VAR_OBJ_ALLOC_PAGE_ID, &mut location.page_id)
            .flags(uapi::MLX5_IB_ATTR_VAR_OBJ_ALLOC_FLAGS, flags);
        let made = file.execute(VERB, &mut command);
        let handle = command.made(uapi::MLX5_IB_ATTR_VAR_OBJ_ALLOC_HANDLE);
        made.map_err(|error| match error.errno() {
            Errno::OPNOTSUPP => error.detail(format!(
                "{} has no pages of kind {kind:?}, or the kernel does not know them",
                file.device.name()
            )),
            Errno::NOSPC => {
                error.detail(format!("{} has no page of kind {kind:?} left", file.device.name()))
            }
            _ => error.context(|| format!("a page of kind {kind:?} of {}", file.device.name())),
        })?;
        let handle = handle.map_err(|errno| Error::new(VERB, errno))?;
        let object = Object::new(file.clone(), Class::VAR, handle, ());
        Ok(Var { object: Arc::new(object), location, _mapped: None })
    }

    /// The page's number among those of its kind.
    pub fn page_id(&self) -> u32 {
        self.location.page_id
    }

    /// The length of the page in bytes.
    #[allow(clippy::len_without_is_empty, reason = "a page is never empty")]
    pub fn len(&self) -> usize {
        self.location.length as usize
    }

    /// The offset at which the context's file maps the page.
    #[doc(alias = "mmap_off")]
    pub fn mmap_offset(&self) -> u64 {
        self.location.mmap_offset
    }

    /// The number by which the kernel knows the VAR within its file.
    pub fn handle(&self) -> u32 {
        self.object.handle()
    }

    /// A context on the same file.
    pub fn context(&self) -> Context {
        Context { file: self.object.file().clone() }
    }

    /// Exports the page as a dma-buf, by which another device reaches it without the processor. The importer has to
    /// do peer-to-peer DMA, and may not pin the page: when it is freed here, importers lose it, and the file
    /// maps nothing any more (`ENODEV`). As with [`map`](Self::map), larger pages of the system hold several VARs.
    ///
    /// ```no_run
    /// # fn f(var: &uverbs::mlx5::Var) -> uverbs::Result<()> {
    /// let doorbell: std::os::fd::OwnedFd = var.export_dma_buf()?;
    /// # drop(doorbell); Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` before Linux 7.0, and of a kernel without peer-to-peer DMA; `EINVAL` if another process freed it;
    /// `EMFILE` or `ENFILE` without a file left.
    pub fn export_dma_buf(&self) -> Result<OwnedFd> {
        self.object.file().export_dma_buf(self.location.mmap_offset)
    }

    /// Maps the page. Each call makes another mapping.
    ///
    /// The kernel maps whole pages of the system. If these are larger than the device's VARs (4 KiB on the emulated
    /// device), several VARs share a page, and the kernel does not say where in it a VAR begins.
    ///
    /// # Errors
    ///
    /// `EINVAL` if another process destroyed the VAR; `ENOMEM` without address space left;
    /// `EIO` after the device was removed.
    pub fn map(&self) -> Result<DoorbellPage> {
        self.location.map(self.object.file())
    }

    /// Destroys the VAR for all processes that share it; dropping it does the same and ignores errors.
    /// Mappings stay. Succeeds, too, if another process destroyed the VAR before.
    ///
    /// # Errors
    ///
    /// `EBUSY` while an object of DEVX keeps it, and others of the kernel; the VAR comes back with the error.
    #[doc(alias = "mlx5dv_free_var")]
    pub fn destroy(self) -> std::result::Result<(), ErrorWith<Self>> {
        let Var { object, location, _mapped } = self;
        destroy_sole(object, Class::VAR.verb, kept::HELD, Object::destroy)
            .map_err(|failed| failed.map(|object| Var { object, location, _mapped }))
    }

    /// Whether an object of this process keeps it.
    pub(crate) fn is_kept(&self) -> bool {
        Arc::strong_count(&self.object) > 1
    }
}

impl kept::Sealed for Var {
    fn context(&self) -> Context {
        self.context()
    }

    fn keep(&self) -> Arc<dyn Any + Send + Sync> {
        self.object.clone()
    }
}
