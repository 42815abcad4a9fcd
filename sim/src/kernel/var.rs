//! VARs: doorbell pages of emulated devices. Pairs with `MLX5_IB_OBJECT_VAR` in `hw/mlx5/main.c`.

use super::mmap::Mapped;
use super::{FileId, Kernel, Method, Object};
use crate::call::{Call, Result};
use rustix::io::Errno;
use uverbs_connectx::bar0;
use uverbs_uapi::mlx5::object::MLX5_IB_OBJECT_VAR;
use uverbs_uapi::mlx5::var::*;

pub(super) const METHODS: &[Method] = &[
    Method {
        object: MLX5_IB_OBJECT_VAR,
        method: MLX5_IB_METHOD_VAR_OBJ_ALLOC,
        attrs: &[
            MLX5_IB_ATTR_VAR_OBJ_ALLOC_HANDLE,
            MLX5_IB_ATTR_VAR_OBJ_ALLOC_MMAP_OFFSET,
            MLX5_IB_ATTR_VAR_OBJ_ALLOC_MMAP_LENGTH,
            MLX5_IB_ATTR_VAR_OBJ_ALLOC_PAGE_ID,
            MLX5_IB_ATTR_VAR_OBJ_ALLOC_FLAGS,
        ],
        run: alloc,
    },
    Method {
        object: MLX5_IB_OBJECT_VAR,
        method: MLX5_IB_METHOD_VAR_OBJ_DESTROY,
        attrs: &[MLX5_IB_ATTR_VAR_OBJ_DESTROY_HANDLE],
        run: |kernel, call| {
            kernel.destroy(call.file, call.handle(MLX5_IB_ATTR_VAR_OBJ_DESTROY_HANDLE)?)
        },
    },
];

/// The pages of virtio emulation, and those of TLP emulation: where they begin in BAR0, and how many.
const VIRTIO: (u64, u64) = (bar0::VAR_OFFSET, bar0::VAR_BYTES / bar0::PAGE);
const TLP: (u64, u64) = (bar0::TLP_OFFSET, bar0::TLP_PAGES);

fn alloc(kernel: &mut Kernel, call: &mut Call<'_>) -> Result<()> {
    let tlp = mlx5_ib_uapi_var_alloc_flags::MLX5_IB_UAPI_VAR_ALLOC_FLAG_TLP.bits();
    let flags = call.u64_if(MLX5_IB_ATTR_VAR_OBJ_ALLOC_FLAGS).unwrap_or(0);
    let (first, pages) = match flags {
        0 => VIRTIO,
        flags if flags == u64::from(tlp) => TLP,
        _ => return Err(Errno::INVAL),
    };
    let (driver, _) = kernel.driver(call.file)?;
    let mut places = (0..pages).map(|nth| first + nth * bar0::PAGE);
    // A place is free when no mapping of it is left.
    driver.vars.retain(|_, lease| lease.strong_count() > 0);
    let offset = places.find(|offset| !driver.vars.contains_key(offset)).ok_or(Errno::NOSPC)?;
    let length = rustix::param::page_size();
    let page = kernel.add_mapped(call.file, Mapped::Bar { offset, length })?;
    let lease = kernel.lease(call.file, page)?;
    kernel.driver(call.file)?.0.vars.insert(offset, lease);
    let handle = kernel.add(call.file, Object::Var { page }, &[])?;
    call.made(MLX5_IB_ATTR_VAR_OBJ_ALLOC_HANDLE, handle);
    call.put(MLX5_IB_ATTR_VAR_OBJ_ALLOC_MMAP_OFFSET, &(page * length as u64));
    call.put(MLX5_IB_ATTR_VAR_OBJ_ALLOC_MMAP_LENGTH, &(length as u32));
    call.put(MLX5_IB_ATTR_VAR_OBJ_ALLOC_PAGE_ID, &(((offset - first) / bar0::PAGE) as u32));
    Ok(())
}

pub(super) fn free(kernel: &mut Kernel, file: FileId, page: u64) -> Result<()> {
    kernel.remove_mapped(file, page)
}
