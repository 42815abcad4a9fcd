//! An mlx5 device of a fabric, and the kernel of the fabric behind a [`Script`](super::Script).
//!
//! The fabric's kernel executes the commands that the script lets through. The script keeps the attributes of
//! each, and the driver's part of those that make queues, for the tests.

use super::attrs;
use super::state::{Result, State};
use super::{Op, Script};
use crate::device::{Device, devices_on};
use crate::sync::fork::Epoch;
use crate::uverbs::command::Command;
use crate::uverbs::fd::UverbsFd;
use crate::uverbs::kernel::Kernel;
use crate::uverbs::open_file::OpenFile;
use rustix::io::Errno;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use uverbs_host::HostFile;
use uverbs_sim::{Fabric, Profile};
use uverbs_uapi::device::{
    UVERBS_ATTR_CORE_IN, UVERBS_ATTR_INFO_HANDLES_LIST, UVERBS_ATTR_INFO_OBJECT_ID,
    UVERBS_ATTR_INFO_TOTAL_HANDLES, UVERBS_METHOD_INFO_HANDLES,
};
use uverbs_uapi::mlx5::context::mlx5_ib_alloc_ucontext_req_v2;
use uverbs_uapi::mlx5::object::{MLX5_IB_OBJECT_UAR, MLX5_IB_OBJECT_VAR};
use uverbs_uapi::object::*;
use uverbs_uapi::{cq, qp, srq};

/// The name of the device.
pub(super) const NAME: &str = "mlx5_0";

/// The kinds of objects that the fabric's kernel lists.
const KINDS: [u16; 12] = [
    UVERBS_OBJECT_PD,
    UVERBS_OBJECT_MR,
    UVERBS_OBJECT_MW,
    UVERBS_OBJECT_CQ,
    UVERBS_OBJECT_QP,
    UVERBS_OBJECT_SRQ,
    UVERBS_OBJECT_AH,
    UVERBS_OBJECT_XRCD,
    UVERBS_OBJECT_DM,
    UVERBS_OBJECT_FLOW,
    MLX5_IB_OBJECT_UAR,
    MLX5_IB_OBJECT_VAR,
];

/// A fabric of one device, and the file of the contexts on it.
#[derive(Debug)]
pub(super) struct Hosted {
    pub(super) fabric: Fabric,
    file: Mutex<Option<Weak<dyn HostFile>>>,
}

impl Hosted {
    pub(super) fn new(profile: Profile) -> Hosted {
        let fabric = Fabric::builder().device(profile.name(NAME)).stepped(0).build();
        Hosted { fabric: fabric.expect("a fabric"), file: Mutex::new(None) }
    }

    pub(super) fn device(&self) -> Device {
        devices_on(&self.fabric.system()).remove(0)
    }

    fn weak(&self) -> MutexGuard<'_, Option<Weak<dyn HostFile>>> {
        self.file.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn file(&self) -> Option<Arc<dyn HostFile>> {
        self.weak().as_ref()?.upgrade()
    }

    /// The kernel of a new file, or of the file of the contexts that there are.
    pub(super) fn kernel(&self, device: &Device, driver: u32, epoch: Epoch) -> UverbsFd {
        let file = match self.file() {
            Some(file) => OpenFile::hosted(file, epoch),
            None => device.open_node(epoch).expect("a file"),
        };
        if let OpenFile::Hosted(file) = &file {
            *self.weak() = Some(Arc::downgrade(file));
        }
        UverbsFd::new(file, driver, epoch)
    }

    /// The number of the file's holders: kernels and mappings.
    pub(super) fn holders(&self) -> usize {
        self.weak().as_ref().map_or(0, Weak::strong_count)
    }

    /// Runs a command beside those of the library.
    pub(super) fn execute(&self, command: &mut Command<'_>) -> Result<()> {
        let file = self.file().ok_or(Errno::BADF)?;
        let epoch = Epoch::current()?;
        let driver = uverbs_uapi::device::rdma_driver_id::RDMA_DRIVER_MLX5.0;
        UverbsFd::new(OpenFile::hosted(file, epoch), driver, epoch).execute(command)
    }

    /// Destroys an object, by its kind and handle.
    pub(super) fn destroy(&self, (kind, handle): (u16, u32)) {
        let Op::Method { object, method } = Op::destroy(kind) else { unreachable!("a method") };
        let mut counts = [0u32; 2];
        let mut command = Command::new(object, method);
        command.handle(0, handle);
        // DESTROY of these kinds returns counts of events.
        if [UVERBS_OBJECT_CQ, UVERBS_OBJECT_QP, UVERBS_OBJECT_SRQ].contains(&kind) {
            command.output(1, &mut counts);
        }
        self.execute(&mut command).expect("an object that nothing uses");
    }

    /// The objects of the file, a kind after the other.
    pub(super) fn live(&self) -> Vec<(u16, u32)> {
        KINDS
            .into_iter()
            .flat_map(|kind| self.handles(kind).into_iter().map(move |handle| (kind, handle)))
            .collect()
    }

    fn handles(&self, kind: u16) -> Vec<u32> {
        let (mut total, mut handles) = (0u32, vec![0u32; 4096]);
        let mut command = Command::new(UVERBS_OBJECT_DEVICE, UVERBS_METHOD_INFO_HANDLES);
        command
            .u64(UVERBS_ATTR_INFO_OBJECT_ID, kind.into())
            .output(UVERBS_ATTR_INFO_TOTAL_HANDLES, &mut total)
            .output(UVERBS_ATTR_INFO_HANDLES_LIST, &mut handles[..]);
        match self.execute(&mut command) {
            Ok(()) => handles[..total as usize].to_vec(),
            Err(_) => Vec::new(),
        }
    }
}

impl Script {
    /// Passes a command that the script lets through to the fabric's kernel.
    pub(super) fn forward(
        &self,
        kernel: &UverbsFd,
        op: Op,
        command: &mut Command<'_>,
    ) -> Result<()> {
        let limit = self.state().admit(op, command)?;
        if op == Op::GET_CONTEXT && !self.state().deviations.grants_devx {
            refuse_devx(command)?;
        }
        let kept = command.outputs();
        kernel.execute(command)?;
        // An older kernel with a shorter answer leaves the rest unchanged.
        let mut kept = kept.into_iter();
        command.each_output(&mut |output| {
            let before = kept.next().unwrap_or_default();
            let from = limit.min(output.len());
            output[from..].copy_from_slice(&before[from..]);
        });
        self.state().keep_told(op, command);
        Ok(())
    }
}

/// Refuses a context with DEVX, as for a user who may have none.
fn refuse_devx(command: &Command<'_>) -> Result<()> {
    let request: mlx5_ib_alloc_ucontext_req_v2 = attrs::input(command, UVERBS_ATTR_UHW_IN)?;
    if request.flags == 0 { Ok(()) } else { Err(Errno::INVAL) }
}

impl State {
    /// Keeps the driver's part of a command that made a queue, or resized it, under the queue's handle.
    fn keep_told(&mut self, op: Op, command: &Command<'_>) {
        if let Some(handle) = command.destroyed() {
            self.told.remove(&handle);
            return;
        }
        let made = match op {
            Op::CREATE_CQ => command.made(cq::UVERBS_ATTR_CREATE_CQ_HANDLE),
            Op::CREATE_QP => command.made(qp::UVERBS_ATTR_CREATE_QP_HANDLE),
            Op::CREATE_SRQ => command.made(srq::UVERBS_ATTR_CREATE_SRQ_HANDLE),
            Op::RESIZE_CQ => attrs::input(command, UVERBS_ATTR_CORE_IN)
                .map(|request: cq::ib_uverbs_resize_cq| request.cq_handle),
            _ => return,
        };
        if let (Ok(handle), Some(bytes)) = (made, command.bytes(UVERBS_ATTR_UHW_IN)) {
            self.told.insert(handle, bytes.to_vec());
        }
    }
}
