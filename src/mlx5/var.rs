//! VARs: doorbell pages that a virtio device in hardware answers to. Pairs with
//! `MLX5_IB_OBJECT_VAR` of the kernel's driver.

use super::page::DoorbellPage;
use crate::context::Context;
use crate::error::{Error, Result};
use crate::file::File;
use crate::memory::mmio_page::MmioPage;
use crate::object::{Class, Object};
use crate::uverbs::command::Command;
use rustix::io::Errno;
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

/// What answers to the doorbells of a VAR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VarKind {
    /// A virtio device that hardware emulates.
    Virtio,
    /// A device of any kind, emulated by PCI transactions (Linux 7.1).
    #[doc(alias = "MLX5DV_VAR_ALLOC_FLAG_TLP")]
    Tlp,
}

/// Where a VAR is, as the kernel tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) page_id: u32,
    pub(crate) length: u32,
    pub(crate) offset: u64,
}

impl Place {
    pub(crate) fn map(&self, file: &Arc<File>) -> Result<DoorbellPage> {
        const VERB: &str = "map_var";
        file.check_fork(VERB)?;
        let mapping = file.kernel.mapper().map(self.offset, self.length as usize);
        let mapping = mapping.map_err(|errno| match errno {
            Errno::INVAL => Error::from_kernel(VERB, errno)
                .detail(format!("there is no VAR at {:#x} any more", self.offset)),
            _ => Error::from_kernel(VERB, errno),
        })?;
        file.share();
        Ok(DoorbellPage::new(MmioPage::new(mapping)))
    }
}

/// A VAR: a doorbell page of an emulated device.
///
/// Dropping it destroys it, for everybody who has [imported](Var::import) it. A page that is
/// [mapped](Self::map) stays with whoever mapped it: the kernel gives it to nobody else before the
/// last mapping is gone.
#[doc(alias = "mlx5dv_var")]
#[derive(Debug)]
pub struct Var {
    pub(crate) object: Object,
    pub(crate) place: Place,
    /// Of an import: a mapping, so that the kernel gives the place in the file to no other page while
    /// the import lives.
    pub(crate) _kept: Option<DoorbellPage>,
}

impl Var {
    /// Allocates a VAR.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` on a device of another driver, on a device that emulates nothing or not this
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
        let mut place = Place { page_id: 0, length: 0, offset: 0 };
        let mut command = Command::new(MLX5_IB_OBJECT_VAR, uapi::MLX5_IB_METHOD_VAR_OBJ_ALLOC)
            .new_handle(uapi::MLX5_IB_ATTR_VAR_OBJ_ALLOC_HANDLE)
            .output(uapi::MLX5_IB_ATTR_VAR_OBJ_ALLOC_MMAP_OFFSET, &mut place.offset)
            .output(uapi::MLX5_IB_ATTR_VAR_OBJ_ALLOC_MMAP_LENGTH, &mut place.length)
            .output(uapi::MLX5_IB_ATTR_VAR_OBJ_ALLOC_PAGE_ID, &mut place.page_id)
            .flags(uapi::MLX5_IB_ATTR_VAR_OBJ_ALLOC_FLAGS, flags);
        let made = file.execute(VERB, &mut command);
        let handle = command.made(uapi::MLX5_IB_ATTR_VAR_OBJ_ALLOC_HANDLE);
        drop(command);
        made.map_err(|error| match error.errno() {
            Errno::OPNOTSUPP => error.detail(format!(
                "{} has no pages of kind {kind:?}, or the kernel does not know them",
                file.device.name()
            )),
            Errno::NOSPC => {
                error.detail(format!("{} has no page of kind {kind:?} left", file.device.name()))
            }
            _ => error,
        })?;
        let handle = handle.map_err(|errno| Error::new(VERB, errno))?;
        let object = Object::new(file.clone(), Class::VAR, handle, ());
        Ok(Var { object, place, _kept: None })
    }

    /// The page's index among those of its kind.
    pub fn page_id(&self) -> u32 {
        self.place.page_id
    }

    /// Bytes, once mapped.
    #[allow(clippy::len_without_is_empty, reason = "a page is never empty")]
    pub fn len(&self) -> usize {
        self.place.length as usize
    }

    /// Where in the context's file the page is.
    #[doc(alias = "mmap_off")]
    pub fn mmap_offset(&self) -> u64 {
        self.place.offset
    }

    /// The number by which the kernel knows the VAR within its file.
    pub fn handle(&self) -> u32 {
        self.object.handle()
    }

    /// A context on the same file.
    pub fn context(&self) -> Context {
        Context { file: self.object.file().clone() }
    }

    /// Maps the page. It may be mapped several times.
    ///
    /// # Errors
    ///
    /// `EINVAL` if another holder of the file destroyed the VAR; `ENOMEM` without address space left;
    /// `EIO` after the device was removed.
    pub fn map(&self) -> Result<DoorbellPage> {
        self.place.map(self.object.file())
    }

    /// Destroys the VAR for all who share it, and says whether that went well; dropping it does the
    /// same silently. Mappings stay.
    ///
    /// # Errors
    ///
    /// What the kernel answers; the VAR comes back with the error. That somebody else destroyed it
    /// is no error.
    #[doc(alias = "mlx5dv_free_var")]
    pub fn destroy(mut self) -> std::result::Result<(), (Self, Error)> {
        match self.object.destroy() {
            Ok(()) => Ok(()),
            Err(error) => Err((self, error)),
        }
    }
}
