//! The kernel's view of a memory region. Pairs with `UVERBS_METHOD_QUERY_MR` in
//! `core/uverbs_std_types_mr.c`.

use crate::error::Result;
use crate::file::File;
use crate::uverbs::command::Command;
use rustix::io::Errno;
use uverbs_uapi::mr::{
    UVERBS_ATTR_QUERY_MR_HANDLE, UVERBS_ATTR_QUERY_MR_RESP_IOVA, UVERBS_ATTR_QUERY_MR_RESP_LENGTH,
    UVERBS_ATTR_QUERY_MR_RESP_LKEY, UVERBS_ATTR_QUERY_MR_RESP_RKEY, UVERBS_METHOD_QUERY_MR,
};
use uverbs_uapi::object::UVERBS_OBJECT_MR;

/// The kernel's response to QUERY_MR. It does not have the region's access flags.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RegionInfo {
    pub(crate) lkey: u32,
    pub(crate) rkey: u32,
    /// In bytes.
    pub(crate) length: u64,
    /// For a region of device memory this is its address on the device, not the one that requests name.
    pub(crate) iova: u64,
}

impl RegionInfo {
    /// # Errors
    ///
    /// `ENOENT` if no memory region has this handle.
    pub(crate) fn query(file: &File, verb: &'static str, handle: u32) -> Result<RegionInfo> {
        let mut info = RegionInfo { lkey: 0, rkey: 0, length: 0, iova: 0 };
        let mut command = Command::new(UVERBS_OBJECT_MR, UVERBS_METHOD_QUERY_MR);
        command
            .handle(UVERBS_ATTR_QUERY_MR_HANDLE, handle)
            .output(UVERBS_ATTR_QUERY_MR_RESP_LKEY, &mut info.lkey)
            .output(UVERBS_ATTR_QUERY_MR_RESP_RKEY, &mut info.rkey)
            .output(UVERBS_ATTR_QUERY_MR_RESP_LENGTH, &mut info.length)
            .output(UVERBS_ATTR_QUERY_MR_RESP_IOVA, &mut info.iova);
        file.execute(verb, &mut command).map_err(|error| match error.errno() {
            Errno::NOENT => error.detail(format!(
                "{} has no memory region with handle {handle} in this context",
                file.device.name()
            )),
            _ => error.context(|| format!("memory region {handle} of {}", file.device.name())),
        })?;
        Ok(info)
    }
}
