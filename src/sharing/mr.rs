//! Memory regions that processes share. Pairs with `UVERBS_METHOD_QUERY_MR` in
//! `core/uverbs_std_types_mr.c`.

use crate::access::Access;
use crate::error::{Error, Result};
use crate::file::File;
use crate::handles::ObjectKind;
use crate::memory::region::{Backing, Foreign, Place};
use crate::mr::{HELD, MemoryRegion, MrInner};
use crate::number::{Lkey, Rkey};
use crate::object::{Class, Object};
use crate::pd::{ProtectionDomain, Sharing};
use crate::sharing::envelope::{Envelope, Proof};
use crate::sharing::imported::{Imported, sealed::Sealed, stale};
use crate::uverbs::command::Command;
use rustix::io::Errno;
use std::sync::Arc;
use uverbs_uapi::mr::{
    UVERBS_ATTR_QUERY_MR_HANDLE, UVERBS_ATTR_QUERY_MR_RESP_IOVA, UVERBS_ATTR_QUERY_MR_RESP_LENGTH,
    UVERBS_ATTR_QUERY_MR_RESP_LKEY, UVERBS_ATTR_QUERY_MR_RESP_RKEY, UVERBS_METHOD_QUERY_MR,
};
use uverbs_uapi::object::UVERBS_OBJECT_MR;

const VERB: &str = "import_mr";

/// What the kernel knows of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Known {
    lkey: u32,
    rkey: u32,
    length: u64,
    iova: u64,
}

impl Known {
    fn query(file: &File, verb: &'static str, handle: u32) -> Result<Known> {
        let mut known = Known { lkey: 0, rkey: 0, length: 0, iova: 0 };
        let mut command = Command::new(UVERBS_OBJECT_MR, UVERBS_METHOD_QUERY_MR)
            .handle(UVERBS_ATTR_QUERY_MR_HANDLE, handle)
            .output(UVERBS_ATTR_QUERY_MR_RESP_LKEY, &mut known.lkey)
            .output(UVERBS_ATTR_QUERY_MR_RESP_RKEY, &mut known.rkey)
            .output(UVERBS_ATTR_QUERY_MR_RESP_LENGTH, &mut known.length)
            .output(UVERBS_ATTR_QUERY_MR_RESP_IOVA, &mut known.iova);
        file.execute(verb, &mut command).map_err(|error| match error.errno() {
            Errno::NOENT => error.detail(format!(
                "{} has no memory region with handle {handle} in this context",
                file.device.name()
            )),
            _ => error,
        })?;
        drop(command);
        Ok(known)
    }

    /// Refuses a region of which something else is said. Of its rights the kernel tells nothing.
    fn compare(self, verb: &'static str, handle: u32, told: Proof) -> Result<()> {
        if self.proof(Access::from_bits_retain(told[3] as u32)) == told {
            return Ok(());
        }
        let Known { lkey, rkey, length, iova } = self;
        Err(stale(
            verb,
            format!(
                "memory region {handle} has {length} bytes from {iova:#x} on, lkey {lkey:#x} and \
                 rkey {rkey:#x}"
            ),
        ))
    }

    fn proof(self, access: Access) -> Proof {
        let keys = u64::from(self.lkey) | u64::from(self.rkey) << 32;
        [keys, self.length, self.iova, access.bits().into()]
    }
}

impl MemoryRegion<u8, Foreign> {
    /// Refuses another region than the one that an envelope tells of.
    pub(crate) fn compare(file: &File, verb: &'static str, handle: u32, told: Proof) -> Result<()> {
        Known::query(file, verb, handle)?.compare(verb, handle, told)
    }
}

impl<T, M> MemoryRegion<T, M> {
    /// The exported form, for [`ProtectionDomain::import_mr`].
    ///
    /// # Errors
    ///
    /// `EIO` if the device is gone.
    pub fn export(&self) -> Result<Envelope> {
        let known = Known::query(self.inner.file(), "export_mr", self.handle())?;
        let proof = known.proof(self.access());
        Ok(Envelope::seal(self.inner.file(), ObjectKind::MR, self.handle(), proof))
    }

    /// Leaves it to another process to deregister the region. Its memory stays as it is until this
    /// process ends, because nobody says here when the device is done with it.
    ///
    /// [Device memory](crate::DeviceMemory) does not stay because of the region: it is for whoever has
    /// it to keep, or to release as well. Until the region's new owner has deregistered it, the kernel
    /// answers `EBUSY` to freeing the memory; memory that is dropped meanwhile stays until the file is
    /// closed, and is counted as [leaked](crate::Context::leaked).
    ///
    /// # Errors
    ///
    /// `EBUSY` while a [memory window](crate::MemoryWindow#what-a-window-holds) holds the region, and as
    /// [`export`](Self::export); the region comes back with the error.
    pub fn release(self) -> std::result::Result<Envelope, (Self, Error)> {
        let envelope = match self.export() {
            Ok(envelope) => envelope,
            Err(error) => return Err((self, error)),
        };
        match Arc::try_unwrap(self.inner) {
            Ok(inner) => {
                let memory = inner.object.give_away();
                // What is elsewhere goes neither sooner nor later because of this process.
                if memory.as_ref().is_some_and(|memory| memory.place() == Place::Here) {
                    std::mem::forget(memory);
                }
                Ok(envelope)
            }
            Err(inner) => {
                let error = Error::new("release_mr", Errno::BUSY).detail(HELD);
                Err((Self::of(inner), error))
            }
        }
    }
}

impl<S: Sharing> ProtectionDomain<S> {
    /// Imports a memory region of another process that has this domain's file: its keys, for
    /// requests and for peers. The memory itself is the other process's; what the importer can do
    /// with it, it does by RDMA.
    ///
    /// What the exporter said of the region is compared with what the kernel says. That the region
    /// belongs to this domain it does not say: if not, requests that name it fail. Its
    /// [rights](MemoryRegion::access) it does not say either: they are what the exporter claims, and
    /// decide nothing here. A memory window is bound to the region where it was registered.
    ///
    /// # Errors
    ///
    /// `EINVAL` for an envelope of something else, `EXDEV` for one of another device or context,
    /// `ENOENT` if there is no such region, `ESTALE` if it is another one or was changed since.
    #[doc(alias = "ibv_import_mr")]
    pub fn import_mr(&self, envelope: &Envelope) -> Result<Imported<MemoryRegion<u8, Foreign>>> {
        let (handle, told) = envelope.open(VERB, self.inner.file(), ObjectKind::MR)?;
        let known = Known::query(self.inner.file(), VERB, handle)?;
        let access = Access::from_bits_retain(told[3] as u32);
        known.compare(VERB, handle, told)?;
        Ok(self.imported_mr(handle, known, access))
    }

    /// Imports a memory region by its bare handle, as rdma-core's programs exchange them. Its
    /// [rights](MemoryRegion::access) are not known here and read as none. Nor is it known whether it
    /// is one of device memory, of which the kernel tells another [beginning](MemoryRegion::addr) than
    /// requests have to name, which is 0.
    ///
    /// # Safety
    ///
    /// The handle was exported as that of a memory region of this domain by whoever destroys it.
    /// Another one names a stranger's memory, and [`Imported::into_owner`] would claim it.
    ///
    /// # Errors
    ///
    /// `ENOENT` if there is no such region.
    #[doc(alias = "ibv_import_mr")]
    #[allow(unsafe_code, reason = "the obligation is the caller's")]
    pub unsafe fn import_mr_raw(&self, handle: u32) -> Result<Imported<MemoryRegion<u8, Foreign>>> {
        let known = Known::query(self.inner.file(), VERB, handle)?;
        Ok(self.imported_mr(handle, known, Access::empty()))
    }

    fn imported_mr(
        &self,
        handle: u32,
        known: Known,
        access: Access,
    ) -> Imported<MemoryRegion<u8, Foreign>> {
        let file = self.inner.file().clone();
        let object = Object::imported(file, Class::MR, handle, Backing::foreign(known.length));
        Imported::new(MemoryRegion::of(Arc::new(MrInner {
            object,
            pd: self.inner.clone(),
            lkey: Lkey(known.lkey),
            rkey: Rkey(known.rkey),
            access,
            // Of device memory the kernel says where on the device it is.
            iova: if access.contains(Access::ZERO_BASED) { 0 } else { known.iova },
            dead: false,
            imported: Some(known),
        })))
    }
}

impl Sealed for MemoryRegion<u8, Foreign> {
    const UNIMPORT: &'static str = "unimport_mr";

    fn check(&self, verb: &'static str) -> Result<()> {
        let known = Known::query(self.inner.file(), verb, self.handle())?;
        let imported = self.inner.imported.unwrap_or(known);
        known.compare(verb, self.handle(), imported.proof(self.access()))
    }

    fn check_fork(&self, verb: &'static str) -> Result<()> {
        self.inner.file().check_fork(verb)
    }

    fn is_held(&self) -> bool {
        Arc::strong_count(&self.inner) > 1
    }

    fn set_owned(&self, owned: bool) {
        self.inner.object.set_owned(owned);
    }
}
