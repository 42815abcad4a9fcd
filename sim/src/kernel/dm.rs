//! Device memory. Pairs with `core/uverbs_std_types_dm.c` and `hw/mlx5/dm.c`.

use super::mmap::{Leaving, device_memory_key};
use super::{FileId, Kernel, Method, Object, Switch, destroying};
use crate::call::{Call, Result};
use crate::driver::{Driver, input};
use rustix::io::Errno;
use uverbs_connectx::bar0::{MEMIC_BYTES, MEMIC_OFFSET};
use uverbs_uapi::dm::*;
use uverbs_uapi::mlx5::dm::*;
use uverbs_uapi::mlx5::prm::object::{alloc_memic_in, dealloc_memic_in};
use uverbs_uapi::mlx5::prm::opcode;
use uverbs_uapi::object::UVERBS_OBJECT_DM;

pub(super) const METHODS: &[Method] = &[
    destroying(UVERBS_OBJECT_DM, UVERBS_METHOD_DM_FREE),
    Method {
        object: UVERBS_OBJECT_DM,
        method: UVERBS_METHOD_DM_ALLOC,
        attrs: &[
            UVERBS_ATTR_ALLOC_DM_HANDLE,
            UVERBS_ATTR_ALLOC_DM_LENGTH,
            UVERBS_ATTR_ALLOC_DM_ALIGNMENT,
            MLX5_IB_ATTR_ALLOC_DM_RESP_START_OFFSET,
            MLX5_IB_ATTR_ALLOC_DM_RESP_PAGE_INDEX,
            MLX5_IB_ATTR_ALLOC_DM_REQ_TYPE,
        ],
        run: alloc,
    },
    Method {
        object: UVERBS_OBJECT_DM,
        method: MLX5_IB_METHOD_DM_QUERY,
        attrs: &[
            MLX5_IB_ATTR_QUERY_DM_REQ_HANDLE,
            MLX5_IB_ATTR_QUERY_DM_RESP_START_OFFSET,
            MLX5_IB_ATTR_QUERY_DM_RESP_PAGE_INDEX,
            MLX5_IB_ATTR_QUERY_DM_RESP_LENGTH,
        ],
        run: query,
    },
];

/// The unit of allocations.
const UNIT: u64 = 64;
/// The most bytes of one allocation, and of all.
pub(super) const MAX: u64 = uverbs_connectx::object::memic::MEMORY;

/// Device memory that is allocated.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeviceMemory {
    /// Its offset in BAR0.
    pub(crate) start: u64,
    pub(crate) length: u64,
    /// The length in the command to the device.
    allocated: u64,
    /// Its index for `mmap`.
    page: u16,
}

fn alloc(kernel: &mut Kernel, call: &mut Call<'_>) -> Result<()> {
    let length = call.u64_if(UVERBS_ATTR_ALLOC_DM_LENGTH).ok_or(Errno::INVAL)?;
    let alignment = call.u32(UVERBS_ATTR_ALLOC_DM_ALIGNMENT)?;
    let kind = call.u64_if(MLX5_IB_ATTR_ALLOC_DM_REQ_TYPE).unwrap_or(0);
    if kind != u64::from(mlx5_ib_uapi_dm_type::MLX5_IB_UAPI_DM_TYPE_MEMIC.0) {
        return Err(Errno::OPNOTSUPP);
    }
    let allocated = length.checked_next_multiple_of(UNIT).ok_or(Errno::INVAL)?;
    let unit = UNIT.ilog2();
    let alignment = alignment.saturating_sub(unit);
    if length == 0 || alignment > uverbs_connectx::object::memic::LOG_MAX_ALIGNMENT as u32 {
        return Err(Errno::INVAL);
    }
    let page = rustix::param::page_size() as u64;
    let range = allocated.next_multiple_of(page);
    let (driver, switch) = kernel.driver(call.file)?;
    // The first place with room for all of it.
    let end = MEMIC_OFFSET + MEMIC_BYTES;
    let is_free = |start: &u64| {
        start + range <= end
            && driver.memic.iter().all(|(at, taken)| at + taken <= *start || start + range <= *at)
    };
    let start = (MEMIC_OFFSET..end).step_by(page as usize).find(is_free).ok_or(Errno::NOMEM)?;
    let mut command = input::<alloc_memic_in>(opcode::ALLOC_MEMIC);
    command.set(alloc_memic_in::log_memic_addr_alignment, alignment.into());
    command.set(alloc_memic_in::range_start_addr, start);
    command.set(alloc_memic_in::range_size, range);
    command.set(alloc_memic_in::memic_size, allocated);
    driver.execute(switch, &command.into_inner())?;
    driver.memic.insert(start, range);
    let mut memory = DeviceMemory { start, length, allocated, page: 0 };
    match kernel.add_device_memory(call.file, start, range as usize) {
        Ok(page) => memory.page = page,
        Err(errno) => {
            let (driver, switch) = kernel.driver(call.file)?;
            memory.dealloc(driver, switch)?;
            return Err(errno);
        }
    }
    let handle = kernel.add(call.file, Object::Dm(memory), &[])?;
    call.made(UVERBS_ATTR_ALLOC_DM_HANDLE, handle);
    call.put(MLX5_IB_ATTR_ALLOC_DM_RESP_START_OFFSET, &memory.start_offset());
    call.put(MLX5_IB_ATTR_ALLOC_DM_RESP_PAGE_INDEX, &memory.page);
    Ok(())
}

fn query(kernel: &mut Kernel, call: &mut Call<'_>) -> Result<()> {
    let memory = kernel.dm(call.file, call.handle(MLX5_IB_ATTR_QUERY_DM_REQ_HANDLE)?)?;
    call.put(MLX5_IB_ATTR_QUERY_DM_RESP_START_OFFSET, &memory.start_offset());
    call.put(MLX5_IB_ATTR_QUERY_DM_RESP_PAGE_INDEX, &memory.page);
    call.put(MLX5_IB_ATTR_QUERY_DM_RESP_LENGTH, &memory.length);
    Ok(())
}

pub(super) fn free(kernel: &mut Kernel, file: FileId, memory: DeviceMemory) -> Result<()> {
    let key = device_memory_key(memory.page.into());
    kernel.end_mapped(file, key, Leaving::DeviceMemory(memory))
}

impl DeviceMemory {
    /// Gives it back to the device.
    pub(super) fn dealloc(&self, driver: &mut Driver, switch: &mut Switch) -> Result<()> {
        let mut command = input::<dealloc_memic_in>(opcode::DEALLOC_MEMIC);
        command.set(dealloc_memic_in::memic_start_addr, self.start);
        command.set(dealloc_memic_in::memic_size, self.allocated);
        driver.execute(switch, &command.into_inner())?;
        driver.memic.remove(&self.start);
        Ok(())
    }

    /// Its offset in its first page.
    fn start_offset(&self) -> u64 {
        self.start % rustix::param::page_size() as u64
    }
}

impl Kernel {
    /// Device memory with a handle.
    pub(crate) fn dm(&self, file: FileId, handle: u32) -> Result<DeviceMemory> {
        match self.object(file, handle)? {
            Object::Dm(memory) => Ok(*memory),
            _ => Err(Errno::INVAL),
        }
    }
}
