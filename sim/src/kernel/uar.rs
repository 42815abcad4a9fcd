//! UARs: pages of doorbell registers. Pairs with `MLX5_IB_OBJECT_UAR` in `hw/mlx5/main.c`.

use super::mmap::{Leaving, Mapped};
use super::{FileId, Kernel, Method, Object};
use crate::call::{Call, Result};
use crate::memory::Pages;
use rustix::io::Errno;
use uverbs_uapi::mlx5::object::MLX5_IB_OBJECT_UAR;
use uverbs_uapi::mlx5::prm::opcode;
use uverbs_uapi::mlx5::uar::*;

pub(super) const METHODS: &[Method] = &[
    Method {
        object: MLX5_IB_OBJECT_UAR,
        method: MLX5_IB_METHOD_UAR_OBJ_ALLOC,
        attrs: &[
            MLX5_IB_ATTR_UAR_OBJ_ALLOC_HANDLE,
            MLX5_IB_ATTR_UAR_OBJ_ALLOC_TYPE,
            MLX5_IB_ATTR_UAR_OBJ_ALLOC_MMAP_OFFSET,
            MLX5_IB_ATTR_UAR_OBJ_ALLOC_MMAP_LENGTH,
            MLX5_IB_ATTR_UAR_OBJ_ALLOC_PAGE_ID,
        ],
        run: alloc,
    },
    Method {
        object: MLX5_IB_OBJECT_UAR,
        method: MLX5_IB_METHOD_UAR_OBJ_DESTROY,
        attrs: &[MLX5_IB_ATTR_UAR_OBJ_DESTROY_HANDLE],
        run: |kernel, call| {
            kernel.destroy(call.file, call.handle(MLX5_IB_ATTR_UAR_OBJ_DESTROY_HANDLE)?)
        },
    },
];

fn alloc(kernel: &mut Kernel, call: &mut Call<'_>) -> Result<()> {
    let kind = call.u64_if(MLX5_IB_ATTR_UAR_OBJ_ALLOC_TYPE).ok_or(Errno::INVAL)? as u32;
    let kinds = [
        mlx5_ib_uapi_uar_alloc_type::MLX5_IB_UAPI_UAR_ALLOC_TYPE_BF,
        mlx5_ib_uapi_uar_alloc_type::MLX5_IB_UAPI_UAR_ALLOC_TYPE_NC,
    ];
    if !kinds.iter().any(|known| known.0 == kind) {
        return Err(Errno::INVAL);
    }
    let uid = kernel.file(call.file)?.uid;
    let (driver, switch) = kernel.driver(call.file)?;
    let number = driver.alloc_uar(switch, uid)?;
    let length = rustix::param::page_size();
    let mapped = Mapped::Uars { pages: Pages::new(length), first: number };
    let page = match kernel.add_mapped(call.file, mapped) {
        Ok(page) => page,
        Err(errno) => {
            let (driver, switch) = kernel.driver(call.file)?;
            driver.execute_on(switch, opcode::DEALLOC_UAR, number)?;
            return Err(errno);
        }
    };
    let handle = kernel.add(call.file, Object::Uar { number, page }, &[])?;
    call.made(MLX5_IB_ATTR_UAR_OBJ_ALLOC_HANDLE, handle);
    call.put(MLX5_IB_ATTR_UAR_OBJ_ALLOC_MMAP_OFFSET, &(page * length as u64));
    call.put(MLX5_IB_ATTR_UAR_OBJ_ALLOC_MMAP_LENGTH, &(length as u32));
    call.put(MLX5_IB_ATTR_UAR_OBJ_ALLOC_PAGE_ID, &number);
    Ok(())
}

pub(super) fn free(kernel: &mut Kernel, file: FileId, number: u32, page: u64) -> Result<()> {
    let uid = kernel.file(file)?.uid;
    kernel.end_mapped(file, page, Leaving::Uar { number, uid })
}
