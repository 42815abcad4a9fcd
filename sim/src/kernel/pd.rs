//! Protection domains. Pairs with `ib_uverbs_alloc_pd` and `mlx5_ib_alloc_pd`.

use super::{FileId, Kernel, Method, Object, Write, destroying};
use crate::call::{Call, Result};
use rustix::io::Errno;
use uverbs_uapi::mlx5::abi::mlx5_ib_alloc_pd_resp;
use uverbs_uapi::mlx5::object::{
    MLX5_IB_ATTR_QUERY_PD_HANDLE, MLX5_IB_ATTR_QUERY_PD_RESP_PDN, MLX5_IB_METHOD_PD_QUERY,
};
use uverbs_uapi::mlx5::prm::opcode;
use uverbs_uapi::object::UVERBS_OBJECT_PD;
use uverbs_uapi::pd::{UVERBS_METHOD_PD_DESTROY, ib_uverbs_alloc_pd_resp};
use uverbs_uapi::write::IB_USER_VERBS_CMD_ALLOC_PD;

pub(super) const METHODS: &[Method] = &[
    destroying(UVERBS_OBJECT_PD, UVERBS_METHOD_PD_DESTROY),
    Method {
        object: UVERBS_OBJECT_PD,
        method: MLX5_IB_METHOD_PD_QUERY,
        attrs: &[MLX5_IB_ATTR_QUERY_PD_HANDLE, MLX5_IB_ATTR_QUERY_PD_RESP_PDN],
        run: query,
    },
];

pub(super) const WRITES: &[Write] = &[Write { command: IB_USER_VERBS_CMD_ALLOC_PD, run: alloc }];

fn alloc(kernel: &mut Kernel, call: &mut Call<'_>) -> Result<()> {
    let uid = kernel.file(call.file)?.uid;
    let (driver, switch) = kernel.driver(call.file)?;
    let number = driver.alloc_pd(switch, uid)?;
    let pd_handle = kernel.add(call.file, Object::Pd { number }, &[])?;
    call.respond(&ib_uverbs_alloc_pd_resp { pd_handle });
    call.respond_driver(&mlx5_ib_alloc_pd_resp { pdn: number });
    Ok(())
}

fn query(kernel: &mut Kernel, call: &mut Call<'_>) -> Result<()> {
    let number = kernel.pd(call.file, call.handle(MLX5_IB_ATTR_QUERY_PD_HANDLE)?)?;
    call.put(MLX5_IB_ATTR_QUERY_PD_RESP_PDN, &number);
    Ok(())
}

pub(super) fn dealloc(kernel: &mut Kernel, file: FileId, number: u32) -> Result<()> {
    let (driver, switch) = kernel.driver(file)?;
    driver.execute_on(switch, opcode::DEALLOC_PD, number).map(drop)
}

impl Kernel {
    /// The number of a protection domain.
    pub(crate) fn pd(&self, file: FileId, handle: u32) -> Result<u32> {
        match self.object(file, handle)? {
            Object::Pd { number } => Ok(*number),
            _ => Err(Errno::INVAL),
        }
    }
}
