//! Objects that commands make, and commands about one object.

use super::command::{file_of, half, run, word};
use super::umem::UmemRef;
use crate::context::Context;
use crate::cq::CqControl;
use crate::error::{ErrorWith, Result};
use crate::object::{Class, Object};
use crate::qp::QpControl;
use crate::srq::SharedReceiveQueue;
use std::any::Any;
use std::sync::Arc;
use uverbs_uapi::mlx5::devx as uapi;
use uverbs_uapi::mlx5::object::MLX5_IB_OBJECT_DEVX_OBJ;
use uverbs_uapi::mlx5::prm::opcode;

impl Class {
    pub(crate) const DEVX_OBJECT: Class = Class {
        verb: "devx_obj_destroy",
        object: MLX5_IB_OBJECT_DEVX_OBJ,
        destroy: uapi::MLX5_IB_METHOD_DEVX_OBJ_DESTROY,
        handle: uapi::MLX5_IB_ATTR_DEVX_OBJ_DESTROY_HANDLE,
        report: None,
    };
}

/// An object that a command made: a queue, a memory key, a counter set, a TIR, a general object.
///
/// It keeps the umems that its creation names. Dropping it destroys it. If firmware refuses, because another object
/// uses it, it is leaked with its umems; see [`Context::leaked`].
///
/// ```no_run
/// # fn f(context: &uverbs::Context, command: &[u8]) -> Result<(), Box<dyn std::error::Error>> {
/// use uverbs::mlx5::devx::{self, DevxObject};
/// use uverbs_uapi::mlx5::prm::opcode;
///
/// // SAFETY: a counter set has no memory and no keys.
/// let counters = unsafe {
///     let mut command = [0; 16];
///     command[..2].copy_from_slice(&opcode::ALLOC_Q_COUNTER.to_be_bytes());
///     DevxObject::create(context, &command, &mut [0; 16], &[])?
/// };
/// let mut query = [0; 32];
/// query[..2].copy_from_slice(&opcode::QUERY_Q_COUNTER.to_be_bytes());
/// query[31] = counters.number() as u8;
/// let mut output = [0; 512];
/// devx::query(&counters, &query, &mut output)?;
/// // SAFETY: `command` names neither memory nor keys.
/// unsafe { devx::modify(&counters, command, &mut output)? };
/// counters.destroy()?;
/// # Ok(()) }
/// ```
#[doc(alias = "mlx5dv_devx_obj")]
#[derive(Debug)]
pub struct DevxObject {
    object: Object<Vec<Arc<dyn Any + Send + Sync>>>,
    number: u32,
}

impl DevxObject {
    /// Sends a command that creates an object, and writes its output to `output`. The kernel takes the opcodes of
    /// queues, memory keys, domains, TIRs and TISs, tables, counters, scheduling elements and general objects.
    ///
    /// # Safety
    ///
    /// The command names memory, keys and objects by number. All umems that it names are among `umems`. As far as it lets
    /// the device access memory by key, the memory stays registered as long as the object, and is not borrowed while the
    /// device may write it.
    ///
    /// # Errors
    ///
    /// As [`general_command`](super::general_command); `EINVAL` for the opcode of no creation; `ENOENT` for a
    /// completion queue of an event queue that there is not; `ENOMEM`.
    #[doc(alias = "mlx5dv_devx_obj_create")]
    #[allow(unsafe_code, reason = "the obligation is the caller's")]
    pub unsafe fn create(
        context: &Context,
        input: &[u8],
        output: &mut [u8],
        umems: &[&dyn UmemRef],
    ) -> Result<DevxObject> {
        const VERB: &str = "devx_obj_create";
        const HANDLE: u16 = uapi::MLX5_IB_ATTR_DEVX_OBJ_CREATE_HANDLE;
        let file = file_of(VERB, context)?;
        for umem in umems {
            file.check_same(VERB, "umem", &umem.context().file)?;
        }
        let handle = run(
            file,
            VERB,
            (MLX5_IB_OBJECT_DEVX_OBJ, uapi::MLX5_IB_METHOD_DEVX_OBJ_CREATE),
            [uapi::MLX5_IB_ATTR_DEVX_OBJ_CREATE_CMD_IN, uapi::MLX5_IB_ATTR_DEVX_OBJ_CREATE_CMD_OUT],
            input,
            output,
            (
                |command| {
                    command.new_handle(HANDLE);
                },
                |command| command.made(HANDLE),
            ),
        )?;
        let held = umems.iter().map(|umem| umem.hold()).collect();
        let object = Object::new(file.clone(), Class::DEVX_OBJECT, handle, held);
        let number = match half(input, 0) {
            opcode::CREATE_GENERAL_OBJECT => word(output, 8),
            // All others have 24 bits, behind 8 that are reserved.
            _ => word(output, 8) & 0xff_ffff,
        };
        Ok(DevxObject { object, number })
    }

    /// The device's number of the object: that in the third word of the output, where all creations have it but those of
    /// flow table entries.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// The kernel's handle of the object, a number within its file.
    pub fn handle(&self) -> u32 {
        self.object.handle()
    }

    /// Destroys the object; dropping it does the same and ignores errors.
    ///
    /// # Errors
    ///
    /// `EBUSY` while another object uses it, and others of the kernel; the object comes back with the error.
    #[doc(alias = "mlx5dv_devx_obj_destroy")]
    pub fn destroy(mut self) -> std::result::Result<(), ErrorWith<Self>> {
        match self.object.destroy() {
            Ok(()) => Ok(()),
            Err(error) => Err(error.with(self)),
        }
    }
}

pub(super) mod sealed {
    use crate::context::Context;

    pub trait Sealed {
        /// The context, and the handle there.
        fn target(&self) -> (Context, u32);
    }
}

/// An object that commands query and modify: a [`DevxObject`], or a queue of the verbs on an mlx5 device, by its
/// control handle.
pub trait DevxTarget: sealed::Sealed {}

impl DevxTarget for DevxObject {}
impl DevxTarget for QpControl {}
impl DevxTarget for CqControl {}
impl DevxTarget for SharedReceiveQueue {}

impl sealed::Sealed for DevxObject {
    fn target(&self) -> (Context, u32) {
        (Context { file: self.object.file().clone() }, self.object.handle())
    }
}

impl sealed::Sealed for QpControl {
    fn target(&self) -> (Context, u32) {
        (Context { file: self.qp.file().clone() }, self.qp.object.handle())
    }
}

impl sealed::Sealed for CqControl {
    fn target(&self) -> (Context, u32) {
        (Context { file: self.inner.file().clone() }, self.inner.object.handle())
    }
}

impl sealed::Sealed for SharedReceiveQueue {
    fn target(&self) -> (Context, u32) {
        (Context { file: self.inner.file().clone() }, self.inner.object.handle())
    }
}

/// Sends a command that queries an object, which the input names by its number, and writes its output to `output`.
/// [`DevxObject`] has an example.
///
/// # Errors
///
/// As [`general_command`](super::general_command); `EINVAL` for the opcode of no query, or the number of another object.
#[doc(alias = "mlx5dv_devx_obj_query")]
#[doc(alias = "mlx5dv_devx_qp_query")]
#[doc(alias = "mlx5dv_devx_cq_query")]
#[doc(alias = "mlx5dv_devx_srq_query")]
pub fn query(target: &(impl DevxTarget + ?Sized), input: &[u8], output: &mut [u8]) -> Result<()> {
    const VERB: &str = "devx_obj_query";
    let (context, handle) = target.target();
    run(
        file_of(VERB, &context)?,
        VERB,
        (MLX5_IB_OBJECT_DEVX_OBJ, uapi::MLX5_IB_METHOD_DEVX_OBJ_QUERY),
        [uapi::MLX5_IB_ATTR_DEVX_OBJ_QUERY_CMD_IN, uapi::MLX5_IB_ATTR_DEVX_OBJ_QUERY_CMD_OUT],
        input,
        output,
        (
            |command| {
                command.handle(uapi::MLX5_IB_ATTR_DEVX_OBJ_QUERY_HANDLE, handle);
            },
            |_| Ok(()),
        ),
    )
}

/// Sends a command that changes an object, which the input names by its number, and writes its output to `output`.
///
/// The library does not learn of the change: a queue pair whose state is changed by a command has the old one here, until
/// it is [queried](QpControl::query).
///
/// # Safety
///
/// The command names memory, keys and objects by number. The umems that it names outlive the object. As far as it lets the
/// device access memory by key, or begin with requests that were posted, the memory stays registered as long as the object,
/// and is not borrowed while the device may write it. A queue of the verbs whose rings this library drives is not reset.
///
/// # Errors
///
/// As [`general_command`](super::general_command); `EINVAL` for the opcode of no change, or the number of another object.
#[doc(alias = "mlx5dv_devx_obj_modify")]
#[doc(alias = "mlx5dv_devx_qp_modify")]
#[doc(alias = "mlx5dv_devx_cq_modify")]
#[doc(alias = "mlx5dv_devx_srq_modify")]
#[allow(unsafe_code, reason = "the obligation is the caller's")]
pub unsafe fn modify(
    target: &(impl DevxTarget + ?Sized),
    input: &[u8],
    output: &mut [u8],
) -> Result<()> {
    const VERB: &str = "devx_obj_modify";
    let (context, handle) = target.target();
    run(
        file_of(VERB, &context)?,
        VERB,
        (MLX5_IB_OBJECT_DEVX_OBJ, uapi::MLX5_IB_METHOD_DEVX_OBJ_MODIFY),
        [uapi::MLX5_IB_ATTR_DEVX_OBJ_MODIFY_CMD_IN, uapi::MLX5_IB_ATTR_DEVX_OBJ_MODIFY_CMD_OUT],
        input,
        output,
        (
            |command| {
                command.handle(uapi::MLX5_IB_ATTR_DEVX_OBJ_MODIFY_HANDLE, handle);
            },
            |_| Ok(()),
        ),
    )
}
