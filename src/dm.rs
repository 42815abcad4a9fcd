//! Device memory: a few pages on the device itself, which it reaches without crossing the bus.
//!
//! Pairs with `core/uverbs_std_types_dm.c`; the provider says where the memory is mapped.
//! [`mr`](crate::mr) registers it, and [`sharing`](crate::sharing) imports it.

use crate::context::Context;
use crate::error::{Error, ErrorWith, MemoryError, Result};
use crate::file::File;
use crate::memory::mmio_window::{MmioWindow, WORD};
use crate::memory::queue_memory::DmaBufPart;
use crate::number::ByteCount;
use crate::object::{Class, Object, destroy_sole};
use crate::provider::DmLocation;
use crate::uverbs::command::Command;
use rustix::io::Errno;
use std::sync::Arc;
use uverbs_uapi::dm as uapi;
use uverbs_uapi::object::UVERBS_OBJECT_DM;
use zerocopy::{FromBytes, Immutable, IntoBytes};

const VERB: &str = "alloc_dm";

impl Class {
    pub(crate) const DM: Class = Class {
        verb: "free_dm",
        object: UVERBS_OBJECT_DM,
        destroy: uapi::UVERBS_METHOD_DM_FREE,
        handle: uapi::UVERBS_ATTR_FREE_DM_HANDLE,
        report: None,
    };
}

/// The part of device memory that its regions hold.
#[derive(Debug)]
pub(crate) struct DmInner {
    pub(crate) object: Object<MmioWindow>,
    pub(crate) location: DmLocation,
    pub(crate) length: usize,
}

/// Memory on the device. The device reads and writes it without crossing the bus, and carries out atomics
/// there by itself; there is little of it ([`max_dm_size`](crate::DeviceAttr::max_dm_size)).
///
/// This process copies whole words of 4 bytes, each of which crosses the bus. Requests name the memory by a
/// region ([`register_dm`]), whose addresses count from 0. Its initial content is undefined.
///
/// Dropping it frees it, as soon as no region of it is left. All methods may be called from any thread;
/// when two threads copy to the same words, each word is that of one of them.
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let context = uverbs::Context::open(&uverbs::devices()?[0])?;
/// # let pd = context.alloc_pd()?;
/// use uverbs::Access;
///
/// let counters = context.alloc_dm(64, 8)?;
/// counters.copy_from(0, &[0u64; 8])?;
/// let region = pd.mr_builder().access(Access::ALL_REMOTE).register_dm(&counters, ..)?;
/// println!("a peer may add to {:?}", region.remote(8)?);
/// # Ok(()) }
/// ```
///
/// [`register_dm`]: crate::MrBuilder::register_dm
#[doc(alias = "ibv_dm")]
#[derive(Debug)]
pub struct DeviceMemory {
    pub(crate) inner: Arc<DmInner>,
}

impl Context {
    /// Allocates `length` bytes on the device that begin at a multiple of `align` bytes: 8 for
    /// atomics, 1 for no alignment.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` on a device without such memory, which only mlx5 has here; `EINVAL` for 0 bytes,
    /// for more bytes than the device has, and for an alignment that is no power of two or above the
    /// device's; `ENOMEM` when too little is left.
    #[doc(alias = "ibv_alloc_dm")]
    pub fn alloc_dm(&self, length: usize, align: usize) -> Result<DeviceMemory> {
        let file = &self.file;
        check_driver(file, VERB)?;
        let mut location = DmLocation::default();
        file.check_fork(VERB)?;
        if !align.is_power_of_two() {
            let detail = format!("an alignment of {align}, which is no power of two");
            return Err(Error::invalid(VERB, detail));
        }
        let most = file.limits().map_or(u64::MAX, |limits| limits.max_dm_size);
        if most == 0 {
            return Err(no_memory(file, VERB));
        }
        if length == 0 || length as u64 > most {
            let (length, most) = (ByteCount::of(length), ByteCount(most));
            let detail = format!("{length}; {} has {most} in all", file.device.name());
            return Err(Error::invalid(VERB, detail));
        }
        let mut command = Command::new(UVERBS_OBJECT_DM, uapi::UVERBS_METHOD_DM_ALLOC);
        command
            .new_handle(uapi::UVERBS_ATTR_ALLOC_DM_HANDLE)
            .u64(uapi::UVERBS_ATTR_ALLOC_DM_LENGTH, length as u64)
            .u32(uapi::UVERBS_ATTR_ALLOC_DM_ALIGNMENT, align.trailing_zeros());
        location.request(&mut command);
        let made = file.execute(VERB, &mut command);
        let handle = command.made(uapi::UVERBS_ATTR_ALLOC_DM_HANDLE);
        made.map_err(|error| {
            let (name, size, most) = (file.device.name(), ByteCount::of(length), ByteCount(most));
            match error.errno() {
                Errno::NOMEM => error.detail(format!(
                    "{size} are not left, or not in one piece, of the {most} of {name}"
                )),
                Errno::INVAL => error.detail(format!("{size} at a multiple of {align}")),
                _ => error.context(|| format!("{size} at a multiple of {align} on {name}")),
            }
        })?;
        let handle = handle.map_err(|errno| Error::new(VERB, errno))?;
        // Frees the memory if it cannot be mapped.
        let owner = Object::new(file.clone(), Class::DM, handle, ());
        let window = map(file, VERB, location, length)?;
        let object = owner.exchange(window).0;
        Ok(DeviceMemory { inner: Arc::new(DmInner { object, location, length }) })
    }
}

/// Refuses a device whose driver has no device memory.
pub(crate) fn check_driver(file: &File, verb: &'static str) -> Result<()> {
    if file.provider.traits().device_memory { Ok(()) } else { Err(no_memory(file, verb)) }
}

fn no_memory(file: &File, verb: &'static str) -> Error {
    let detail = format!("{} has no memory of its own", file.device.name());
    Error::new(verb, Errno::OPNOTSUPP).detail(detail)
}

pub(crate) fn map(
    file: &File,
    verb: &'static str,
    location: DmLocation,
    length: usize,
) -> Result<MmioWindow> {
    let window = location.map(length, file.kernel.mapper());
    window.map_err(|errno| {
        let detail = format!("{length} bytes of device memory could not be mapped");
        Error::from_kernel(verb, errno).detail(detail)
    })
}

impl DeviceMemory {
    /// The length in bytes.
    #[expect(clippy::len_without_is_empty, reason = "there is no memory of 0 bytes")]
    pub fn len(&self) -> usize {
        self.inner.length
    }

    /// The kernel's handle of the memory, a number within its file.
    pub fn handle(&self) -> u32 {
        self.inner.object.handle()
    }

    /// A context on the same file.
    pub fn context(&self) -> Context {
        Context { file: self.inner.object.file().clone() }
    }

    /// Exports the memory as a dma-buf, by which another device reaches it without the processor. The importer has to
    /// do peer-to-peer DMA, and may not pin the memory: when it is freed here, importers lose it, and the file
    /// maps nothing any more (`ENODEV`).
    ///
    /// The file has whole pages, and the memory begins at an offset in the first one. Other memory of the device may
    /// lie in the rest.
    ///
    /// ```no_run
    /// # fn f(memory: &uverbs::DeviceMemory) -> uverbs::Result<()> {
    /// let part = memory.export_dma_buf()?;
    /// println!("{} bytes from byte {} of {:?} on", memory.len(), part.offset, part.file);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` before Linux 7.0, and of a kernel without peer-to-peer DMA; `EINVAL` if another process freed it;
    /// `EMFILE` or `ENFILE` without a file left.
    #[doc(alias = "ibv_dm_export_dmabuf_fd")]
    pub fn export_dma_buf(&self) -> Result<DmaBufPart> {
        let location = self.inner.location;
        let file = self.inner.object.file().export_dma_buf(location.mmap_offset())?;
        Ok(DmaBufPart { file, offset: location.within_page() })
    }

    /// Copies a value, or a slice of values, to `offset`. A peer may read or write there meanwhile;
    /// words of 4 bytes are not torn. Requests that are posted afterwards find the values.
    ///
    /// # Errors
    ///
    /// [`MemoryError::Unaligned`] unless `offset` and the bytes to copy are multiples of 4,
    /// [`MemoryError::OutOfRange`], [`MemoryError::Forked`] in a child of the process
    /// that has the memory. Nothing is copied then.
    #[doc(alias = "ibv_memcpy_to_dm")]
    pub fn copy_from<T>(&self, offset: usize, values: &T) -> std::result::Result<(), MemoryError>
    where
        T: IntoBytes + Immutable + ?Sized,
    {
        let bytes = values.as_bytes();
        let stored = self.window(offset, bytes.len())?.store(offset, bytes);
        stored.ok_or_else(|| self.refusal(offset, bytes.len()))
    }

    /// Copies a value, or a slice of values, from `offset` on. A peer may write there meanwhile;
    /// words of 4 bytes are not torn.
    ///
    /// # Errors
    ///
    /// As [`copy_from`](Self::copy_from).
    #[doc(alias = "ibv_memcpy_from_dm")]
    pub fn copy_to<T>(&self, offset: usize, values: &mut T) -> std::result::Result<(), MemoryError>
    where
        T: FromBytes + IntoBytes + ?Sized,
    {
        let bytes = values.as_mut_bytes();
        let length = bytes.len();
        let loaded = self.window(offset, length)?.load(offset, bytes);
        loaded.ok_or_else(|| self.refusal(offset, length))
    }

    fn window(
        &self,
        offset: usize,
        length: usize,
    ) -> std::result::Result<&MmioWindow, MemoryError> {
        match self.inner.object.memory() {
            Some(window) if window.is_inherited() => Err(MemoryError::Forked),
            Some(window) => Ok(window),
            None => Err(MemoryError::OutOfRange { offset, length, size: 0 }),
        }
    }

    fn refusal(&self, offset: usize, length: usize) -> MemoryError {
        if offset % WORD != 0 || length % WORD != 0 {
            return MemoryError::Unaligned { offset, length, word: WORD };
        }
        MemoryError::OutOfRange { offset, length, size: self.len() }
    }

    /// Frees the memory; dropping it does the same and ignores errors, as soon as no region of it is left.
    ///
    /// # Errors
    ///
    /// `EBUSY` while it is registered, here or by another process that has the file, for example the one
    /// that a region of it was [released](crate::MemoryRegion::release) to; the memory comes back with
    /// the error.
    #[doc(alias = "ibv_free_dm")]
    pub fn destroy(self) -> std::result::Result<(), ErrorWith<Self>> {
        const HELD: &str = "a memory region of the device memory is still alive";
        destroy_sole(self.inner, "free_dm", HELD, |inner| inner.object.destroy())
            .map_err(|failed| failed.map(|inner| DeviceMemory { inner }))
    }
}
