//! The objects of an open file. Pairs with `UVERBS_METHOD_INFO_HANDLES` in
//! `core/uverbs_std_types_device.c`.

use crate::context::Context;
use crate::error::{Error, Result};
use crate::file::File;
use crate::number::open_enum;
use crate::uverbs::command::Command;
use rustix::io::Errno;
use std::sync::Arc;
use uverbs_uapi::device::{
    UVERBS_ATTR_INFO_HANDLES_LIST, UVERBS_ATTR_INFO_OBJECT_ID, UVERBS_ATTR_INFO_TOTAL_HANDLES,
    UVERBS_METHOD_INFO_HANDLES,
};
use uverbs_uapi::mlx5::object as mlx5;
use uverbs_uapi::object as uapi;

open_enum! {
    /// A kind of kernel object.
    pub struct ObjectKind(u16) {
        /// The context: the file that owns all other objects. Only envelopes name it.
        CONTEXT = uapi::UVERBS_OBJECT_DEVICE, "context";
        PD = uapi::UVERBS_OBJECT_PD, "protection domain";
        COMP_CHANNEL = uapi::UVERBS_OBJECT_COMP_CHANNEL, "completion channel";
        CQ = uapi::UVERBS_OBJECT_CQ, "completion queue";
        QP = uapi::UVERBS_OBJECT_QP, "queue pair";
        SRQ = uapi::UVERBS_OBJECT_SRQ, "shared receive queue";
        AH = uapi::UVERBS_OBJECT_AH, "address handle";
        MR = uapi::UVERBS_OBJECT_MR, "memory region";
        MW = uapi::UVERBS_OBJECT_MW, "memory window";
        FLOW = uapi::UVERBS_OBJECT_FLOW, "flow";
        XRCD = uapi::UVERBS_OBJECT_XRCD, "XRC domain";
        RWQ_IND_TBL = uapi::UVERBS_OBJECT_RWQ_IND_TBL, "indirection table";
        WQ = uapi::UVERBS_OBJECT_WQ, "work queue";
        FLOW_ACTION = uapi::UVERBS_OBJECT_FLOW_ACTION, "flow action";
        DM = uapi::UVERBS_OBJECT_DM, "device memory";
        COUNTERS = uapi::UVERBS_OBJECT_COUNTERS, "counters";
        ASYNC_EVENT = uapi::UVERBS_OBJECT_ASYNC_EVENT, "event file";
        DMAH = uapi::UVERBS_OBJECT_DMAH, "DMA handle";
        DMABUF = uapi::UVERBS_OBJECT_DMABUF, "DMA buffer";
        /// A doorbell page for virtio, on mlx5 only: drivers number objects of their own from 0x1000
        /// on.
        MLX5_VAR = mlx5::MLX5_IB_OBJECT_VAR, "VAR";
        /// A page of doorbell registers, on mlx5.
        MLX5_UAR = mlx5::MLX5_IB_OBJECT_UAR, "UAR";
        /// An object that a command made, on mlx5.
        MLX5_DEVX_OBJ = mlx5::MLX5_IB_OBJECT_DEVX_OBJ, "DEVX object";
        /// Memory that commands name, on mlx5.
        MLX5_DEVX_UMEM = mlx5::MLX5_IB_OBJECT_DEVX_UMEM, "umem";
    }
}

impl File {
    /// Checks that an object exists, on behalf of `verb`. It may be gone a moment later, and its
    /// handle another object's.
    ///
    /// # Errors
    ///
    /// `ENOENT` if it does not. If there are more objects of a kind than the kernel can list, the check passes.
    pub(crate) fn require(
        self: &Arc<Self>,
        verb: &'static str,
        kind: ObjectKind,
        handle: u32,
    ) -> Result<()> {
        let context = Context { file: self.clone() };
        match context.handles(kind) {
            Ok(handles) if handles.contains(&handle) => Ok(()),
            Ok(_) => Err(Error::new(verb, Errno::NOENT).detail(format!(
                "{} has no {kind} with handle {handle} in this context: it was destroyed, or \
                 belongs to another one",
                self.device.name()
            ))),
            Err(error) if error.errno() == Errno::OVERFLOW => Ok(()),
            Err(error) => Err(error.in_verb(verb)),
        }
    }
}

/// The most handles that fit into an attribute, whose length has 16 bits.
const MOST: usize = u16::MAX as usize / size_of::<u32>();

impl Context {
    /// The handles of all objects of one kind on the context's kernel file, including those of other
    /// processes: duplicates of the file and forked children share it.
    ///
    /// A handle is used again soon after its object is gone, so a listed handle may name another
    /// object a moment later.
    ///
    /// # Errors
    ///
    /// `ENOENT` for a kind that the kernel or the driver does not have; `EOVERFLOW` for more than
    /// 16 382 objects.
    pub fn handles(&self, kind: ObjectKind) -> Result<Vec<u32>> {
        const VERB: &str = "list_handles";
        let mut room = 64usize;
        loop {
            let mut list = vec![0u32; room];
            let mut total = 0u32;
            let mut command = Command::new(uapi::UVERBS_OBJECT_DEVICE, UVERBS_METHOD_INFO_HANDLES);
            command
                .u64(UVERBS_ATTR_INFO_OBJECT_ID, kind.0.into())
                .output(UVERBS_ATTR_INFO_TOTAL_HANDLES, &mut total)
                .output(UVERBS_ATTR_INFO_HANDLES_LIST, list.as_mut_slice());
            let listed = self.file.execute(VERB, &mut command);
            listed.map_err(|error| match error.errno() {
                Errno::NOENT => error.detail(format!("there are no objects of kind {kind}")),
                _ => error.context(|| format!("the objects of kind {kind}")),
            })?;
            // The kernel says how many it copied, not how many there are: a full list may be short.
            let total = total as usize;
            if total < room {
                list.truncate(total);
                return Ok(list);
            }
            if room == MOST {
                return Err(Error::new(VERB, Errno::OVERFLOW)
                    .detail(format!("{MOST} objects of kind {kind}, or more")));
            }
            room = (room * 4).min(MOST);
        }
    }
}
