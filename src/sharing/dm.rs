//! Device memory that several processes use. Pairs with the provider's query of device memory, on
//! mlx5 `MLX5_IB_METHOD_DM_QUERY`.

use super::envelope::{Envelope, Fingerprint};
use super::imported::{Imported, sealed::Sealed, stale};
use crate::context::Context;
use crate::dm::{DeviceMemory, DmInner, check_driver, map};
use crate::error::{Error, ErrorWith, Result};
use crate::file::File;
use crate::handles::ObjectKind;
use crate::number::ByteCount;
use crate::object::{Class, Object};
use crate::provider::DmLocation;
use rustix::io::Errno;
use std::sync::Arc;

impl DeviceMemory {
    /// The exported form, for [`Context::import_dm`].
    ///
    /// # Errors
    ///
    /// [`Error::is_forked`] in a child of the process that has it.
    pub fn export(&self) -> Result<Envelope> {
        let file = self.inner.object.file();
        file.check_fork("export_dm")?;
        let fingerprint = fingerprint(self.inner.location, self.len() as u64);
        Ok(Envelope::seal(file, ObjectKind::DM, self.handle(), fingerprint))
    }

    /// Gives the memory to another process, which then has to free it. Regions that were registered here stay.
    ///
    /// # Errors
    ///
    /// As [`export`](Self::export); the memory comes back with the error.
    pub fn release(self) -> std::result::Result<Envelope, ErrorWith<Self>> {
        match self.export() {
            Ok(envelope) => {
                self.inner.object.set_owned(false);
                Ok(envelope)
            }
            Err(error) => Err(error.with(self)),
        }
    }
}

impl Context {
    /// Imports device memory of another process that has this context's file.
    ///
    /// The envelope is compared with the kernel's response about the memory. The comparison does not notice
    /// other memory of the same length that got the location and the handle of the exported one.
    ///
    /// # Errors
    ///
    /// `EINVAL` for an envelope of something else, `EXDEV` for one of another device or context,
    /// `ENOENT` if there is no such memory, `ESTALE` if it is another one; `ENOMEM` without address
    /// space left; `EOPNOTSUPP` before Linux 5.13, and for memory for flow steering (ICM).
    #[doc(alias = "ibv_import_dm")]
    pub fn import_dm(&self, envelope: &Envelope) -> Result<Imported<DeviceMemory>> {
        const VERB: &str = "import_dm";
        let (handle, exported) = envelope.open(VERB, &self.file, ObjectKind::DM)?;
        let (location, length) = query(&self.file, VERB, handle)?;
        if fingerprint(location, length) != exported {
            let detail = format!("device memory {handle} has {} elsewhere", ByteCount(length));
            return Err(stale(VERB, detail));
        }
        imported(&self.file, VERB, handle, location, length)
    }

    /// Imports device memory by its bare handle, as rdma-core's programs exchange them.
    ///
    /// # Safety
    ///
    /// The owner of device memory of this context's file exported the handle. Any other handle names a
    /// stranger's memory, which [`Imported::into_owner`] would claim.
    ///
    /// # Errors
    ///
    /// `ENOENT` if there is no such memory; `ENOMEM` without address space left; `EOPNOTSUPP` before Linux 5.13, and
    /// for memory for flow steering (ICM), which `mlx5dv_alloc_dm` also allocates.
    #[doc(alias = "ibv_import_dm")]
    #[allow(unsafe_code, reason = "the obligation is the caller's")]
    pub unsafe fn import_dm_raw(&self, handle: u32) -> Result<Imported<DeviceMemory>> {
        const VERB: &str = "import_dm";
        let (location, length) = query(&self.file, VERB, handle)?;
        imported(&self.file, VERB, handle, location, length)
    }
}

fn query(file: &File, verb: &'static str, handle: u32) -> Result<(DmLocation, u64)> {
    file.check_fork(verb)?;
    check_driver(file, verb)?;
    DmLocation::query(&*file.kernel, handle).map_err(|errno| {
        let error = Error::from_kernel(verb, errno);
        match error.errno() {
            Errno::NOENT => error.detail(format!(
                "{} has no device memory with handle {handle} in this context",
                file.device.name()
            )),
            Errno::OPNOTSUPP if error.kernel_errno() == Some(Errno::OPNOTSUPP) => error.detail(format!(
                "{} has device memory {handle} for flow steering (ICM), which programs do not map",
                file.device.name()
            )),
            Errno::OPNOTSUPP if error.kernel_errno().is_some() => error.detail(
                "this kernel does not tell where device memory lies that another context allocated: imports \
                 need Linux 5.13 or later",
            ),
            _ => error
                .context(|| format!("device memory {handle} of {}", file.device.name())),
        }
    })
}

fn fingerprint(location: DmLocation, length: u64) -> Fingerprint {
    let [start_offset, page_index] = location.numbers();
    [start_offset, page_index, length, 0]
}

fn imported(
    file: &Arc<File>,
    verb: &'static str,
    handle: u32,
    location: DmLocation,
    length: u64,
) -> Result<Imported<DeviceMemory>> {
    let length = usize::try_from(length)
        .map_err(|_| Error::invalid(verb, format!("{} of device memory", ByteCount(length))))?;
    let window = map(file, verb, location, length)?;
    let object = Object::imported(file.clone(), Class::DM, handle, window);
    Ok(Imported::new(DeviceMemory { inner: Arc::new(DmInner { object, location, length }) }))
}

impl Sealed for DeviceMemory {
    const UNIMPORT: &'static str = "unimport_dm";

    fn check(&self, verb: &'static str) -> Result<()> {
        let (location, length) = query(self.inner.object.file(), verb, self.handle())?;
        if (location, length) == (self.inner.location, self.len() as u64) {
            return Ok(());
        }
        let detail = format!("device memory {} has {} elsewhere", self.handle(), ByteCount(length));
        Err(stale(verb, detail))
    }

    fn check_fork(&self, verb: &'static str) -> Result<()> {
        self.inner.object.file().check_fork(verb)
    }

    fn is_held(&self) -> bool {
        Arc::strong_count(&self.inner) > 1
    }

    fn set_owned(&self, owned: bool) {
        self.inner.object.set_owned(owned);
    }
}
