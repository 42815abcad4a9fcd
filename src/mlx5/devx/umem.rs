//! Memory that commands name by a number, for queues and their doorbell records.

use super::command::file_of;
use super::object::{DevxRef, kept, undestroyed};
use crate::access::Access;
use crate::context::Context;
use crate::error::{Error, ErrorWith, Result};
use crate::file::File;
use crate::memory::region::{Backing, DmaBuf, Foreign, StableBytes, Unowned};
use crate::mr::{check_alignment, keep_from_children};
use crate::number::ByteCount;
use crate::object::{Class, Object};
use crate::uverbs::command::Command;
use memmap2::MmapMut;
use rustix::io::Errno;
use std::any::Any;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use uverbs_uapi::mlx5::devx as uapi;
use uverbs_uapi::mlx5::object::MLX5_IB_OBJECT_DEVX_UMEM;

const VERB: &str = "devx_umem_reg";

impl Class {
    pub(crate) const DEVX_UMEM: Class = Class {
        verb: "devx_umem_dereg",
        object: MLX5_IB_OBJECT_DEVX_UMEM,
        destroy: uapi::MLX5_IB_METHOD_DEVX_UMEM_DEREG,
        handle: uapi::MLX5_IB_ATTR_DEVX_UMEM_DEREG_HANDLE,
        report: None,
    };
}

/// The part of a umem that objects in it hold.
struct UmemInner<M> {
    object: Object<Backing<M>>,
    id: u32,
}

/// Memory that firmware knows by a number: commands name it, and an offset in it, for the memory of a queue or a doorbell
/// record. It has no key.
///
/// `M` is the owner of the memory, as of a [`MemoryRegion`](crate::MemoryRegion), which [`destroy`](Self::destroy)
/// gives back. Dropping the umem deregisters it, and then frees the memory; while a [`DevxObject`](super::DevxObject) was
/// created in it, both happen after that object is gone.
///
/// When the device was removed, the kernel may no longer confirm that a umem is gone: then `destroy` is `EIO`, and a umem
/// that is dropped is leaked with its memory, and counted by [`Context::leaked`].
///
/// ```no_run
/// # fn f(context: &uverbs::Context, gpu: std::fs::File, memory: *mut u8) -> Result<(), Box<dyn std::error::Error>> {
/// use uverbs::mlx5::devx::{Umem, UmemBuilder};
///
/// let builder: UmemBuilder = Umem::builder(context);
/// let ring = builder.allocate(16 * 4096)?;
/// println!("umem {} at {:?}, of {} bytes", ring.id(), ring.as_ptr(), ring.len());
/// // Offsets of queues are multiples of a page: the device sees pages of 4 KiB.
/// let boxed = Umem::builder(context).page_sizes(4096).register(vec![0u64; 4096])?;
/// // SAFETY: `memory` stays mapped until the umem is deregistered.
/// let own = unsafe { Umem::builder(context).register_unowned(memory, 4096)? };
/// let of_gpu = Umem::builder(context).register_dmabuf(&gpu, 0, 1 << 20)?;
/// let vector: Vec<u64> = boxed.destroy()?;
/// # drop((own, of_gpu, vector)); Ok(()) }
/// ```
#[doc(alias = "mlx5dv_devx_umem")]
pub struct Umem<M = MmapMut> {
    inner: Arc<UmemInner<M>>,
}

/// Builds a [`Umem`]; started by [`Umem::builder`].
#[doc(alias = "mlx5dv_devx_umem_in")]
#[derive(Debug)]
#[must_use]
pub struct UmemBuilder {
    context: Context,
    access: Access,
    page_sizes: Option<u64>,
}

impl Umem {
    /// Starts to register memory with firmware, which may write it unless [`access`](UmemBuilder::access) says otherwise.
    #[doc(alias = "mlx5dv_devx_umem_reg")]
    #[doc(alias = "mlx5dv_devx_umem_reg_ex")]
    pub fn builder(context: &Context) -> UmemBuilder {
        UmemBuilder { context: context.clone(), access: Access::LOCAL_WRITE, page_sizes: None }
    }
}

impl UmemBuilder {
    /// Sets the rights, in place of [`Access::LOCAL_WRITE`]: of these, [`Access::REMOTE_WRITE`] and
    /// [`Access::REMOTE_READ`].
    pub fn access(mut self, access: Access) -> Self {
        self.access = access;
        self
    }

    /// The sizes of pages in which the device may see the memory, a bit each, in place of all from 4 KiB on: 4096 for pages of
    /// 4 KiB. The largest that fits is taken. An object at an offset in the umem is aligned within pages of that size, so
    /// that a program which uses offsets sets this. Linux 5.11.
    #[doc(alias = "pgsz_bitmap")]
    pub fn page_sizes(mut self, bitmap: u64) -> Self {
        self.page_sizes = Some(bitmap);
        self
    }

    /// Allocates page-aligned, zeroed memory and registers it.
    ///
    /// # Errors
    ///
    /// `ENOMEM` without memory, and those of [`register`](Self::register).
    pub fn allocate(self, length: usize) -> Result<Umem> {
        if length == 0 {
            return Err(Error::invalid(VERB, "a umem of 0 bytes"));
        }
        let backing: Backing<MmapMut> = Backing::pages(length).map_err(|error| {
            let errno = Errno::from_io_error(&error).unwrap_or(Errno::NOMEM);
            Error::new(VERB, errno).detail(format!("no {} of memory", ByteCount::of(length)))
        })?;
        Ok(self.enter(backing)?)
    }

    /// Registers memory that the umem takes ownership of.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` on a device of another driver and without DEVX; `EINVAL` for zero bytes, for
    /// [page sizes](Self::page_sizes) none of which fits, and for rights that contradict each other; `ENOMEM` beyond the limit of
    /// locked memory; `EFAULT` for memory that is not mapped, or is read-only where the device may write. The memory comes
    /// back with the error.
    pub fn register<M: StableBytes>(self, memory: M) -> std::result::Result<Umem<M>, ErrorWith<M>> {
        let backing = Backing::own(memory);
        if let Err(error) = check_alignment::<M>(VERB, &backing) {
            return Err(error.with(backing.into_owner()));
        }
        self.enter(backing).map_err(|failed| failed.map(Backing::into_owner))
    }

    /// Registers `length` bytes at `addr` that stay the program's.
    ///
    /// # Safety
    ///
    /// The range stays mapped until [`destroy`](Umem::destroy) returned `Ok`, or the umem and all objects that were created in
    /// it were dropped. If one of these is leaked, by the program or because the kernel refuses to destroy it
    /// ([`Context::leaked`]), the range stays mapped until the process ends. Where the device may write, the program holds
    /// no reference to the bytes.
    ///
    /// # Errors
    ///
    /// Those of [`register`](Self::register).
    #[allow(unsafe_code, reason = "the obligation is the caller's")]
    pub unsafe fn register_unowned(self, addr: *mut u8, length: usize) -> Result<Umem<Unowned>> {
        // SAFETY: the caller's obligation is the same.
        let backing = unsafe { Backing::unowned(addr, length) };
        Ok(self.enter(backing)?)
    }

    /// Registers `length` bytes at `offset` of a dma-buf, which the kernel keeps. Its memory must stay where it is: the
    /// kernel pins it. Linux 6.1.
    ///
    /// # Errors
    ///
    /// Those of [`register`](Self::register); `EOPNOTSUPP` on an older kernel, and if the exporter of the dma-buf cannot
    /// pin it; `EBADF` or `EINVAL` for a file that is no dma-buf.
    #[doc(alias = "MLX5DV_UMEM_MASK_DMABUF")]
    pub fn register_dmabuf(
        self,
        dmabuf: impl AsFd,
        offset: u64,
        length: u64,
    ) -> Result<Umem<DmaBuf>> {
        self.enter_with(Backing::dmabuf(length), offset, Some(dmabuf.as_fd()))
            .map_err(|failed| failed.into_parts().1)
    }

    fn enter<M: Send + 'static>(
        self,
        backing: Backing<M>,
    ) -> std::result::Result<Umem<M>, ErrorWith<Backing<M>>> {
        if let Err(error) = keep_from_children(VERB, &backing, self.access) {
            return Err(error.with(backing));
        }
        let address = backing.address();
        self.enter_with(backing, address, None)
    }

    fn enter_with<M: Send + 'static>(
        self,
        backing: Backing<M>,
        address: u64,
        dmabuf: Option<BorrowedFd<'_>>,
    ) -> std::result::Result<Umem<M>, ErrorWith<Backing<M>>> {
        const HANDLE: u16 = uapi::MLX5_IB_ATTR_DEVX_UMEM_REG_HANDLE;
        let file = match file_of(VERB, &self.context) {
            Ok(file) => file,
            Err(error) => return Err(error.with(backing)),
        };
        let length = backing.reach();
        let mut id = 0u32;
        let mut command =
            Command::new(MLX5_IB_OBJECT_DEVX_UMEM, uapi::MLX5_IB_METHOD_DEVX_UMEM_REG);
        command
            .new_handle(HANDLE)
            .u64(uapi::MLX5_IB_ATTR_DEVX_UMEM_REG_ADDR, address)
            .u64(uapi::MLX5_IB_ATTR_DEVX_UMEM_REG_LEN, length)
            .flags(uapi::MLX5_IB_ATTR_DEVX_UMEM_REG_ACCESS, self.access.bits())
            .fd_if(uapi::MLX5_IB_ATTR_DEVX_UMEM_REG_DMABUF_FD, dmabuf)
            .output(uapi::MLX5_IB_ATTR_DEVX_UMEM_REG_OUT_ID, &mut id);
        if let Some(bitmap) = self.page_sizes {
            command.u64(uapi::MLX5_IB_ATTR_DEVX_UMEM_REG_PGSZ_BITMAP, bitmap);
        }
        let made = file.execute(VERB, &mut command);
        let handle = command.made(HANDLE);
        let made = made.map_err(|error| match error.errno() {
            Errno::NOMEM => error.pinning(length as usize),
            _ => error.context(|| {
                let (size, access) = (ByteCount(length), self.access);
                let pages = self.page_sizes.map_or_else(String::new, |pages| {
                    let sizes = (0..64).map(|bit| 1u64 << bit).filter(|size| pages & size != 0);
                    let sizes = sizes.map(|size| ByteCount(size).to_string()).collect::<Vec<_>>();
                    format!(
                        " in pages of {}, no larger than what address and length are aligned to",
                        sizes.join(" or ")
                    )
                });
                format!("{size} at {address:#x}{pages}, with access {access}")
            }),
        });
        match made.and_then(|()| handle.map_err(|errno| Error::new(VERB, errno))) {
            Ok(handle) => {
                let object = Object::new(file.clone(), Class::DEVX_UMEM, handle, backing);
                Ok(Umem { inner: Arc::new(UmemInner { object, id }) })
            }
            Err(error) => Err(error.with(backing)),
        }
    }
}

impl Umem<Foreign> {
    /// A umem that another process registered.
    pub(crate) fn imported(file: Arc<File>, handle: u32, id: u32, length: u64) -> Umem<Foreign> {
        let object = Object::imported(file, Class::DEVX_UMEM, handle, Backing::foreign(length));
        Umem { inner: Arc::new(UmemInner { object, id }) }
    }

    /// Whether an object of this process keeps it.
    pub(crate) fn is_kept(&self) -> bool {
        Arc::strong_count(&self.inner) > 1
    }

    pub(crate) fn set_owned(&self, owned: bool) {
        self.inner.object.set_owned(owned);
    }
}

impl<M> Umem<M> {
    pub(crate) fn file(&self) -> &Arc<File> {
        self.inner.object.file()
    }

    /// The number by which commands name the umem.
    #[doc(alias = "umem_id")]
    pub fn id(&self) -> u32 {
        self.inner.id
    }

    /// The kernel's handle of the umem, a number within its file.
    pub fn handle(&self) -> u32 {
        self.inner.object.handle()
    }

    /// The first byte; null for a dma-buf, and for memory that another process registered.
    pub fn as_ptr(&self) -> *mut u8 {
        self.inner.object.memory().map_or(std::ptr::null_mut(), Backing::as_ptr)
    }

    /// The length in bytes; 0 if [`import_rdma_core`](Umem::import_rdma_core) made it.
    #[expect(clippy::len_without_is_empty, reason = "a length of 0 means that it is unknown")]
    pub fn len(&self) -> u64 {
        self.inner.object.memory().map_or(0, Backing::reach)
    }

    /// Deregisters the memory and gives it back; dropping the umem does the same and frees it.
    ///
    /// # Errors
    ///
    /// `EBUSY` while an object that was created in it is alive, and others of the kernel; the umem comes back with the
    /// error.
    #[doc(alias = "mlx5dv_devx_umem_dereg")]
    pub fn destroy(self) -> std::result::Result<M, ErrorWith<Self>> {
        const VERB: &str = "devx_umem_dereg";
        let mut inner = match Arc::try_unwrap(self.inner) {
            Ok(inner) => inner,
            Err(inner) => {
                let error = Error::new(VERB, Errno::BUSY)
                    .detail("an object that was created in the umem is alive");
                return Err(error.with(Umem { inner }));
            }
        };
        if let Err(error) = inner.object.destroy() {
            let error = undestroyed(error, "umem", inner.id);
            return Err(error.with(Umem { inner: Arc::new(inner) }));
        }
        match inner.object.reclaim() {
            Some(backing) => Ok(backing.into_owner()),
            None => {
                let error = Error::new(VERB, Errno::INVAL).detail("the umem has no memory");
                Err(error.with(Umem { inner: Arc::new(inner) }))
            }
        }
    }
}

impl<M> fmt::Debug for Umem<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Umem").field("id", &self.id()).field("bytes", &self.len()).finish()
    }
}

impl<M: Send + 'static> DevxRef for Umem<M> {}

impl<M: Send + 'static> kept::Sealed for Umem<M> {
    fn context(&self) -> Context {
        Context { file: self.inner.object.file().clone() }
    }

    fn keep(&self) -> Arc<dyn Any + Send + Sync> {
        self.inner.clone()
    }
}
