//! UARs that the program allocates. Pairs with `MLX5_IB_OBJECT_UAR` of `drivers/infiniband/hw/mlx5/main.c`.

use super::devx::kept;
use super::page::DoorbellPage;
use crate::context::Context;
use crate::error::{Error, ErrorWith, Result};
use crate::memory::mmio_page::MmioPage;
use crate::object::{Class, Object, destroy_sole};
use crate::provider::mlx5::uar;
use std::any::Any;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use uverbs_uapi::mlx5::object::MLX5_IB_OBJECT_UAR;
use uverbs_uapi::mlx5::uar as uapi;
use uverbs_uapi::mlx5::uar::mlx5_ib_uapi_uar_alloc_type as raw;

const VERB: &str = "alloc_uar";

impl Class {
    pub(crate) const UAR: Class = Class {
        verb: "free_uar",
        object: MLX5_IB_OBJECT_UAR,
        destroy: uapi::MLX5_IB_METHOD_UAR_OBJ_DESTROY,
        handle: uapi::MLX5_IB_ATTR_UAR_OBJ_DESTROY_HANDLE,
        report: None,
    };
}

/// The mapping of a UAR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UarKind {
    /// Stores are combined, so that whole WQEs can be copied into its BlueFlame registers.
    #[doc(alias = "MLX5DV_UAR_ALLOC_TYPE_BF")]
    BlueFlame,
    /// Every store reaches the device by itself.
    #[doc(alias = "MLX5DV_UAR_ALLOC_TYPE_NC")]
    #[doc(alias = "MLX5DV_UAR_ALLOC_TYPE_NC_DEDICATED")]
    NonCached,
}

/// A UAR: a page of doorbell registers.
///
/// The library allocates registers for its queues by itself, see [`ThreadDomain`](crate::ThreadDomain).
/// This UAR is for queues that the program makes by other means, and that name the page by its
/// [number](Self::page_id). A [`DevxObject`](super::devx::DevxObject) keeps those that its creation is given.
///
/// ```no_run
/// # fn f(context: &uverbs::Context, kind: uverbs::mlx5::UarKind) -> Result<(), Box<dyn std::error::Error>> {
/// use uverbs::mlx5::{DoorbellPage, Uar};
///
/// let uar = Uar::alloc(context, kind)?;
/// println!("page {}, {} bytes, handle {}", uar.page_id(), uar.len(), uar.handle());
/// let page: DoorbellPage = uar.map()?;
/// assert_eq!(page.len(), uar.len());
/// // The device reads registers in big-endian order, as the kernel's drivers write them.
/// page.ring_be64(0x800, 7)?;
/// drop(page);
/// uar.destroy()?;
/// # Ok(()) }
/// ```
#[doc(alias = "mlx5dv_devx_uar")]
#[derive(Debug)]
pub struct Uar {
    object: Arc<Object>,
    page: uar::UarPage,
}

impl Uar {
    /// Allocates a UAR.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` on a device of another driver, and for [`UarKind::BlueFlame`] where the machine
    /// does not combine writes; `ENOMEM` or another error of the kernel when the device has none left.
    #[doc(alias = "mlx5dv_devx_alloc_uar")]
    pub fn alloc(context: &Context, kind: UarKind) -> Result<Uar> {
        let file = &context.file;
        file.provider.mlx5(VERB)?;
        file.check_fork(VERB)?;
        let wanted = match kind {
            UarKind::BlueFlame => raw::MLX5_IB_UAPI_UAR_ALLOC_TYPE_BF,
            UarKind::NonCached => raw::MLX5_IB_UAPI_UAR_ALLOC_TYPE_NC,
        };
        let page = uar::UarPage::alloc(&*file.kernel, wanted).map_err(|errno| {
            Error::from_kernel(VERB, errno).context(|| format!("a UAR of kind {kind:?}"))
        })?;
        let object = Object::new(file.clone(), Class::UAR, page.handle, ());
        Ok(Uar { object: Arc::new(object), page })
    }

    /// The device's number of the page.
    pub fn page_id(&self) -> u32 {
        self.page.id
    }

    /// The length of the page in bytes.
    #[allow(clippy::len_without_is_empty, reason = "a page is never empty")]
    pub fn len(&self) -> usize {
        self.page.length as usize
    }

    /// The offset at which the context's file maps the page.
    #[doc(alias = "mmap_off")]
    pub fn mmap_offset(&self) -> u64 {
        self.page.offset
    }

    /// The kernel's handle of the UAR, a number within its file.
    pub fn handle(&self) -> u32 {
        self.object.handle()
    }

    /// Exports the page as a dma-buf, by which another device reaches it without the processor. The importer has to
    /// do peer-to-peer DMA, and may not pin the page: when it is freed here, importers lose it, and the file
    /// maps nothing any more (`ENODEV`).
    ///
    /// ```no_run
    /// # fn f(uar: &uverbs::mlx5::Uar) -> uverbs::Result<()> {
    /// let doorbells: std::os::fd::OwnedFd = uar.export_dma_buf()?;
    /// # drop(doorbells); Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` before Linux 7.0, and of a kernel without peer-to-peer DMA; `EINVAL` if another process freed it;
    /// `EMFILE` or `ENFILE` without a file left.
    #[doc(alias = "mlx5dv_devx_uar_export_dmabuf_fd")]
    pub fn export_dma_buf(&self) -> Result<OwnedFd> {
        self.object.file().export_dma_buf(self.page.offset)
    }

    /// Maps the page. Each call makes another mapping.
    ///
    /// A store posts requests of any queue that names the page by its number, as BlueFlame carries the WQE itself. The
    /// maker of such a queue decides who may have a mapping; see the Safety section of
    /// [`DevxObject::create`](super::devx::DevxObject::create).
    ///
    /// # Errors
    ///
    /// `ENOMEM` without address space left, `EIO` after the device was removed.
    pub fn map(&self) -> Result<DoorbellPage> {
        const VERB: &str = "map_uar";
        let file = self.object.file();
        file.check_fork(VERB)?;
        let mapping =
            self.page.map(&*file.kernel).map_err(|errno| Error::from_kernel(VERB, errno))?;
        file.mark_shared();
        Ok(DoorbellPage::new(MmioPage::new(mapping)))
    }

    /// Frees the UAR; dropping it does the same and ignores errors. A page that is still mapped stays until
    /// its last mapping is gone.
    ///
    /// # Errors
    ///
    /// `EBUSY` while an object of DEVX keeps it, and others of the kernel; the UAR comes back with the error.
    #[doc(alias = "mlx5dv_devx_free_uar")]
    pub fn destroy(self) -> std::result::Result<(), ErrorWith<Self>> {
        let Uar { object, page } = self;
        destroy_sole(object, Class::UAR.verb, kept::HELD, Object::destroy)
            .map_err(|failed| failed.map(|object| Uar { object, page }))
    }
}

impl kept::Sealed for Uar {
    fn context(&self) -> Context {
        Context { file: self.object.file().clone() }
    }

    fn keep(&self) -> Arc<dyn Any + Send + Sync> {
        self.object.clone()
    }
}
