//! Memory regions that several processes use. Pairs with `ibv_import_mr` of rdma-core.

use crate::access::Access;
use crate::error::{Error, ErrorWith, Result};
use crate::file::File;
use crate::handles::ObjectKind;
use crate::memory::region::{Backing, Foreign, Location};
use crate::mr::{HELD, MemoryRegion, MrInner, RegionInfo};
use crate::number::{Lkey, Rkey};
use crate::object::{Class, Object};
use crate::pd::{ProtectionDomain, Sharing};
use crate::sharing::envelope::{Envelope, Fingerprint};
use crate::sharing::imported::{Imported, sealed::Sealed, stale};
use rustix::io::Errno;
use std::sync::Arc;

const VERB: &str = "import_mr";

/// Refuses a region that is not the exported one. The kernel does not tell access flags, so the
/// exporter's are not checked.
fn compare(info: RegionInfo, verb: &'static str, handle: u32, exported: Fingerprint) -> Result<()> {
    if fingerprint(info, claimed_access(exported)) == exported {
        return Ok(());
    }
    let RegionInfo { lkey, rkey, length, iova } = info;
    Err(stale(
        verb,
        format!(
            "memory region {handle} has {length} bytes from {iova:#x} on, lkey {lkey:#x} and rkey \
             {rkey:#x}"
        ),
    ))
}

fn fingerprint(info: RegionInfo, access: Access) -> Fingerprint {
    let keys = u64::from(info.lkey) | u64::from(info.rkey) << 32;
    [keys, info.length, info.iova, access.bits().into()]
}

/// The access flags that the exporter claims.
fn claimed_access(exported: Fingerprint) -> Access {
    Access::from_bits_retain(exported[3] as u32)
}

impl MemoryRegion<u8, Foreign> {
    /// Refuses a region that is not the exported one.
    pub(crate) fn compare_with_kernel(
        file: &File,
        verb: &'static str,
        handle: u32,
        exported: Fingerprint,
    ) -> Result<()> {
        compare(RegionInfo::query(file, verb, handle)?, verb, handle, exported)
    }
}

impl<T, M> MemoryRegion<T, M> {
    /// The exported form, for [`ProtectionDomain::import_mr`].
    ///
    /// # Errors
    ///
    /// `EIO` if the device is gone.
    pub fn export(&self) -> Result<Envelope> {
        let info = RegionInfo::query(self.inner.file(), "export_mr", self.handle())?;
        let fingerprint = fingerprint(info, self.access());
        Ok(Envelope::seal(self.inner.file(), ObjectKind::MR, self.handle(), fingerprint))
    }

    /// Gives the region to another process, which then has to deregister it. Memory that the region owned is
    /// leaked until this process ends, because this process does not learn when the region is gone. Memory
    /// that it did not own stays within the device's reach, as if the region were leaked.
    ///
    /// [Device memory](crate::DeviceMemory) is not kept by a released region: its owner keeps it, or
    /// releases it as well. The kernel answers `EBUSY` to freeing it until the new owner has deregistered
    /// the region; device memory that is dropped before stays until the file is closed, and counts as
    /// [leaked](crate::Context::leaked).
    ///
    /// # Errors
    ///
    /// `EBUSY` while a [memory window](crate::MemoryWindow#what-a-window-holds) holds the region, or an
    /// [object of DEVX](crate::mlx5::devx::DevxObject) keeps it, and as
    /// [`export`](Self::export); the region comes back with the error.
    pub fn release(self) -> std::result::Result<Envelope, ErrorWith<Self>> {
        let envelope = match self.export() {
            Ok(envelope) => envelope,
            Err(error) => return Err(error.with(self)),
        };
        match Arc::try_unwrap(self.inner) {
            Ok(inner) => {
                let memory = inner.object.give_away();
                // Only memory of this process could be freed while the device still reaches it.
                if memory.as_ref().is_some_and(|memory| memory.location() == Location::Mapped) {
                    std::mem::forget(memory);
                }
                Ok(envelope)
            }
            Err(inner) => {
                let error = Error::new("release_mr", Errno::BUSY).detail(HELD);
                Err(error.with(Self::of(inner)))
            }
        }
    }
}

impl<S: Sharing> ProtectionDomain<S> {
    /// Imports a memory region of another process that has this domain's file: its keys, for
    /// requests and for peers. The memory stays the other process's; the importer reaches it by RDMA.
    ///
    /// The envelope is compared with the kernel's response to QUERY_MR, which has neither the region's
    /// protection domain nor its [rights](MemoryRegion::access). Requests that name a region of another
    /// domain fail. The rights are those that the exporter claims, and decide nothing here. Only the
    /// process that registered the region binds memory windows to it.
    ///
    /// # Errors
    ///
    /// `EINVAL` for an envelope of something else, `EXDEV` for one of another device or context,
    /// `ENOENT` if there is no such region, `ESTALE` if it is another one or was changed since.
    #[doc(alias = "ibv_import_mr")]
    pub fn import_mr(&self, envelope: &Envelope) -> Result<Imported<MemoryRegion<u8, Foreign>>> {
        let (handle, exported) = envelope.open(VERB, self.inner.file(), ObjectKind::MR)?;
        let info = RegionInfo::query(self.inner.file(), VERB, handle)?;
        compare(info, VERB, handle, exported)?;
        Ok(self.imported_mr(handle, info, claimed_access(exported)))
    }

    /// Imports a memory region by its bare handle, as rdma-core's programs exchange them. Its
    /// [rights](MemoryRegion::access) are not known here and read as none. Its [address](MemoryRegion::addr) is the one
    /// in the kernel's response, which is wrong for a region of device memory: requests count its bytes from 0.
    ///
    /// # Safety
    ///
    /// The owner of a memory region of this domain exported the handle. Any other handle names memory of
    /// a stranger, and [`Imported::into_owner`] would claim it.
    ///
    /// # Errors
    ///
    /// `ENOENT` if there is no such region.
    #[doc(alias = "ibv_import_mr")]
    #[allow(unsafe_code, reason = "the obligation is the caller's")]
    pub unsafe fn import_mr_raw(&self, handle: u32) -> Result<Imported<MemoryRegion<u8, Foreign>>> {
        let info = RegionInfo::query(self.inner.file(), VERB, handle)?;
        Ok(self.imported_mr(handle, info, Access::empty()))
    }

    fn imported_mr(
        &self,
        handle: u32,
        info: RegionInfo,
        access: Access,
    ) -> Imported<MemoryRegion<u8, Foreign>> {
        let file = self.inner.file().clone();
        let object = Object::imported(file, Class::MR, handle, Backing::foreign(info.length));
        Imported::new(MemoryRegion::of(Arc::new(MrInner {
            object,
            pd: self.inner.clone(),
            lkey: Lkey(info.lkey),
            rkey: Rkey(info.rkey),
            access,
            // For a region of device memory the kernel answers its address on the device.
            iova: if access.contains(Access::ZERO_BASED) { 0 } else { info.iova },
            dead: false,
            imported: Some(info),
        })))
    }
}

impl Sealed for MemoryRegion<u8, Foreign> {
    const UNIMPORT: &'static str = "unimport_mr";

    fn check(&self, verb: &'static str) -> Result<()> {
        let info = RegionInfo::query(self.inner.file(), verb, self.handle())?;
        let imported = self.inner.imported.unwrap_or(info);
        compare(info, verb, self.handle(), fingerprint(imported, self.access()))
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
