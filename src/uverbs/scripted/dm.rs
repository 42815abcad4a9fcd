//! Device memory of a scripted mlx5 device, and its regions.

use super::attrs::{self, Responses};
use super::state::{Result, ScriptedObject, State};
use rustix::io::Errno;
use rustix::param::page_size;
use uverbs_uapi::dm as uapi;
use uverbs_uapi::mlx5::context::MLX5_IB_MMAP_DEVICE_MEM;
use uverbs_uapi::mlx5::dm as driver;
use uverbs_uapi::mr;
use uverbs_uapi::object::{UVERBS_OBJECT_DM, UVERBS_OBJECT_MR, UVERBS_OBJECT_PD};

/// The address of the device's memory, which QUERY_MR answers as the iova of a region.
const BASE: u64 = 0x8000;

impl State {
    pub(super) fn run_dm(
        &mut self,
        object: u16,
        method: u16,
        mut to: Responses<'_, '_>,
    ) -> Result<()> {
        match (object, method) {
            (UVERBS_OBJECT_DM, uapi::UVERBS_METHOD_DM_ALLOC) => {
                let length = attrs::int(to.command, uapi::UVERBS_ATTR_ALLOC_DM_LENGTH);
                let length = length.ok_or(Errno::INVAL)?;
                let handle = self.add(ScriptedObject {
                    object: UVERBS_OBJECT_DM,
                    length,
                    ..Default::default()
                });
                let index = handle as u16 & 0xff;
                let offset = u64::from(MLX5_IB_MMAP_DEVICE_MEM) << 8 | u64::from(index);
                self.add_page_at(handle, "dm", offset * page_size() as u64);
                to.made(uapi::UVERBS_ATTR_ALLOC_DM_HANDLE, handle)?;
                to.put(driver::MLX5_IB_ATTR_ALLOC_DM_RESP_START_OFFSET, &0u64);
                to.put(driver::MLX5_IB_ATTR_ALLOC_DM_RESP_PAGE_INDEX, &index);
                Ok(())
            }
            (UVERBS_OBJECT_DM, driver::MLX5_IB_METHOD_DM_QUERY) => {
                let handle = attrs::handle(to.command, driver::MLX5_IB_ATTR_QUERY_DM_REQ_HANDLE);
                // An importer may ask for anything.
                let memory = handle.and_then(|handle| self.objects.get(&handle));
                let memory = memory.filter(|memory| memory.object == UVERBS_OBJECT_DM);
                let length = memory.ok_or(Errno::NOENT)?.length;
                let index = handle.unwrap_or(0) as u16 & 0xff;
                to.put(driver::MLX5_IB_ATTR_QUERY_DM_RESP_START_OFFSET, &0u64);
                to.put(driver::MLX5_IB_ATTR_QUERY_DM_RESP_PAGE_INDEX, &index);
                to.put(driver::MLX5_IB_ATTR_QUERY_DM_RESP_LENGTH, &length);
                Ok(())
            }
            (UVERBS_OBJECT_MR, mr::UVERBS_METHOD_DM_MR_REG) => {
                let named = |id| attrs::handle(to.command, id).ok_or(Errno::NOENT);
                let pd = named(mr::UVERBS_ATTR_REG_DM_MR_PD_HANDLE)?;
                let memory = named(mr::UVERBS_ATTR_REG_DM_MR_DM_HANDLE)?;
                let number = |id| attrs::int(to.command, id).ok_or(Errno::INVAL);
                let offset = number(mr::UVERBS_ATTR_REG_DM_MR_OFFSET)?;
                let length = number(mr::UVERBS_ATTR_REG_DM_MR_LENGTH)?;
                self.expect("reg_dm_mr", pd, UVERBS_OBJECT_PD)?;
                self.expect("reg_dm_mr", memory, UVERBS_OBJECT_DM)?;
                let handle = self.add(ScriptedObject {
                    object: UVERBS_OBJECT_MR,
                    stands_on: vec![pd, memory],
                    length,
                    // Not where requests address it from, which is 0.
                    iova: BASE + offset,
                    ..Default::default()
                });
                let key = (handle + 1) << 8;
                self.object(handle).number = key;
                to.made(mr::UVERBS_ATTR_REG_DM_MR_HANDLE, handle)?;
                to.put(mr::UVERBS_ATTR_REG_DM_MR_RESP_LKEY, &key);
                to.put(mr::UVERBS_ATTR_REG_DM_MR_RESP_RKEY, &key);
                Ok(())
            }
            _ => Err(Errno::PROTONOSUPPORT),
        }
    }
}
