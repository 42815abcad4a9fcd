//! Regions of memory on the device. Pairs with `UVERBS_METHOD_DM_MR_REG` in `core/uverbs_std_types_mr.c`.

use super::{MemoryRegion, MrBuilder, MrInner, resolve};
use crate::access::Access;
use crate::dm::{DeviceMemory, DmInner};
use crate::error::{Error, Result};
use crate::memory::region::Backing;
use crate::number::{ByteCount, Lkey, Offset, Rkey};
use crate::object::{Class, Object};
use crate::uverbs::command::Command;
use rustix::io::Errno;
use std::ops::RangeBounds;
use std::sync::Arc;
use uverbs_uapi::mr::{
    UVERBS_ATTR_REG_DM_MR_ACCESS_FLAGS, UVERBS_ATTR_REG_DM_MR_DM_HANDLE,
    UVERBS_ATTR_REG_DM_MR_HANDLE, UVERBS_ATTR_REG_DM_MR_LENGTH, UVERBS_ATTR_REG_DM_MR_OFFSET,
    UVERBS_ATTR_REG_DM_MR_PD_HANDLE, UVERBS_ATTR_REG_DM_MR_RESP_LKEY,
    UVERBS_ATTR_REG_DM_MR_RESP_RKEY, UVERBS_METHOD_DM_MR_REG,
};
use uverbs_uapi::object::UVERBS_OBJECT_MR;

const VERB: &str = "reg_dm_mr";

/// [Memory on the device](DeviceMemory), which is not freed while a region of it lives. It is read and
/// written by the methods of [`DeviceMemory`].
#[derive(Debug)]
pub struct OnDevice {
    _memory: Arc<DmInner>,
}

impl MrBuilder {
    /// Registers a part of device memory, which the region keeps alive. It is always
    /// [zero based](Self::zero_based); [relaxed ordering](Self::relaxed_ordering) means nothing here.
    ///
    /// # Errors
    ///
    /// `EINVAL` for a range that is empty or not within the memory, for memory of another context,
    /// for another [`iova`](Self::iova) than 0, and for rights that device memory cannot give: all
    /// but local and remote writes, remote reads and atomics; `ENOENT` if another holder of the
    /// file freed it.
    #[doc(alias = "ibv_reg_dm_mr")]
    pub fn register_dm(
        self,
        memory: &DeviceMemory,
        range: impl RangeBounds<usize>,
    ) -> Result<MemoryRegion<u8, OnDevice>> {
        self.refuse_data_direct(VERB)?;
        let file = self.pd.file();
        file.check_same(VERB, "device memory", memory.inner.object.file())?;
        let (offset, length) =
            resolve(range, memory.len()).map_err(|error| Error::from(error).in_verb(VERB))?;
        if length == 0 {
            return Err(Error::invalid(VERB, "a region of 0 bytes"));
        }
        if let Some(iova @ 1..) = self.iova {
            let detail = format!("device memory is addressed from 0, not from {iova:#x}");
            return Err(Error::invalid(VERB, detail));
        }
        let access = self.access | Access::ZERO_BASED;
        access.check(VERB)?;
        let (mut lkey, mut rkey) = (0u32, 0u32);
        let mut command = Command::new(UVERBS_OBJECT_MR, UVERBS_METHOD_DM_MR_REG);
        command
            .new_handle(UVERBS_ATTR_REG_DM_MR_HANDLE)
            .handle(UVERBS_ATTR_REG_DM_MR_PD_HANDLE, self.pd.handle())
            .handle(UVERBS_ATTR_REG_DM_MR_DM_HANDLE, memory.handle())
            .u64(UVERBS_ATTR_REG_DM_MR_OFFSET, offset as u64)
            .u64(UVERBS_ATTR_REG_DM_MR_LENGTH, length as u64)
            // The driver refuses optional access flags.
            .flags(UVERBS_ATTR_REG_DM_MR_ACCESS_FLAGS, access.for_kernel(false))
            .output(UVERBS_ATTR_REG_DM_MR_RESP_LKEY, &mut lkey)
            .output(UVERBS_ATTR_REG_DM_MR_RESP_RKEY, &mut rkey);
        file.execute(VERB, &mut command).map_err(|error| match error.errno() {
            Errno::INVAL | Errno::OPNOTSUPP => {
                error.detail(format!("device memory with access {access}"))
            }
            _ => error.context(|| {
                let (length, offset) = (ByteCount::of(length), Offset(offset as u64));
                format!("{length} at offset {offset} of device memory {}", memory.handle())
            }),
        })?;
        let handle = command.made(UVERBS_ATTR_REG_DM_MR_HANDLE);
        let handle = handle.map_err(|errno| Error::new(VERB, errno))?;
        let owner = OnDevice { _memory: memory.inner.clone() };
        let backing = Backing::on_device(owner, length as u64);
        Ok(MemoryRegion::of(Arc::new(MrInner {
            object: Object::new(file.clone(), Class::MR, handle, backing),
            pd: self.pd,
            lkey: Lkey(lkey),
            rkey: Rkey(rkey),
            access,
            iova: 0,
            dead: false,
            imported: None,
        })))
    }
}
