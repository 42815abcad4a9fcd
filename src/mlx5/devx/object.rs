//! Objects that commands make, and commands about one object.

use super::command::{Subject, file_of, half, run, word};
use crate::context::Context;
use crate::cq::CqControl;
use crate::error::{Error, ErrorWith, Result};
use crate::file::File;
use crate::mlx5::{Uar, Var};
use crate::mr::{AnyMemoryRegion, MemoryRegion};
use crate::object::{Class, Object, destroy_sole};
use crate::pd::{ProtectionDomain, Sharing};
use crate::qp::QpControl;
use crate::srq::SharedReceiveQueue;
use rustix::io::Errno;
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
/// It keeps what its creation names, as far as it is given: umems, domains, UARs. Dropping it destroys it, once no object
/// that was created with it is left, and then lets go of what it keeps. If firmware refuses, it is leaked; see
/// [`Context::leaked`]. After the device was removed it is gone. Its methods may be called from any thread.
///
/// ```no_run
/// # fn f(context: &uverbs::Context, change: &[u8]) -> Result<(), Box<dyn std::error::Error>> {
/// use uverbs::mlx5::devx::{self, DevxObject};
/// use uverbs_uapi::mlx5::prm::{command, opcode};
///
/// let create = command::<16>(opcode::ALLOC_Q_COUNTER);
/// // SAFETY: a counter set has no memory and no keys.
/// let counters = unsafe { DevxObject::create(context, &create, &mut [0; 16], &[])? };
/// let mut query = command::<32>(opcode::QUERY_Q_COUNTER);
/// query[31] = counters.number() as u8;
/// let mut output = [0; 512];
/// devx::query(&counters, &query, &mut output)?;
/// // SAFETY: `change` names neither memory nor keys.
/// unsafe { devx::modify(&counters, change, &mut output)? };
/// counters.destroy()?;
/// # Ok(()) }
/// ```
#[doc(alias = "mlx5dv_devx_obj")]
#[derive(Debug)]
pub struct DevxObject {
    inner: Arc<DevxInner>,
}

#[derive(Debug)]
struct DevxInner {
    object: Object<()>,
    /// Dropped after the object. Each has memory of its own, and knows whether the device may still reach it.
    keeps: Vec<Arc<dyn Any + Send + Sync>>,
    facts: Facts,
}

/// The facts of an object that libmlx5 exports with its handle.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Facts {
    pub(crate) number: u32,
    /// `enum mlx5_devx_obj_type` of libmlx5; 0 for kinds that its own steering does not use.
    pub(crate) kind: u32,
    pub(crate) rx_icm_addr: u64,
    pub(crate) log_obj_range: u8,
}

/// An object that a command names, and that the object which it creates keeps: a [`Umem`](super::Umem), a
/// [`DevxObject`], a UAR or VAR, or an object of the verbs: a domain, region or queue, also one that foreign code drives. A
/// queue pair that is dropped before the object goes to state [`RESET`](crate::QpState::RESET) until then; a shared receive
/// queue goes on to take messages.
pub trait DevxRef: kept::Sealed {}

impl DevxRef for DevxObject {}
impl DevxRef for Uar {}
impl DevxRef for Var {}
impl DevxRef for CqControl {}
impl DevxRef for QpControl {}
impl DevxRef for SharedReceiveQueue {}
impl DevxRef for AnyMemoryRegion {}
impl<S: Sharing> DevxRef for ProtectionDomain<S> {}
impl<T, M: Send + 'static> DevxRef for MemoryRegion<T, M> {}

pub(crate) mod kept {
    use crate::context::Context;
    use std::any::Any;
    use std::sync::Arc;

    /// The reason of an `EBUSY`.
    pub(crate) const HELD: &str = "an object of DEVX keeps it: destroy that one first";

    pub trait Sealed {
        fn context(&self) -> Context;

        fn keep(&self) -> Arc<dyn Any + Send + Sync>;
    }
}

impl kept::Sealed for DevxObject {
    fn context(&self) -> Context {
        Context { file: self.inner.object.file().clone() }
    }

    fn keep(&self) -> Arc<dyn Any + Send + Sync> {
        self.inner.clone()
    }
}

impl kept::Sealed for CqControl {
    fn context(&self) -> Context {
        Context { file: self.inner.file().clone() }
    }

    fn keep(&self) -> Arc<dyn Any + Send + Sync> {
        self.inner.clone()
    }
}

/// Keeps the kernel's queue pair alone: when the program has dropped its own handles, it goes to state `RESET`.
impl kept::Sealed for QpControl {
    fn context(&self) -> Context {
        self.context()
    }

    fn keep(&self) -> Arc<dyn Any + Send + Sync> {
        self.qp.inner().clone()
    }
}

impl kept::Sealed for SharedReceiveQueue {
    fn context(&self) -> Context {
        Context { file: self.inner.file().clone() }
    }

    fn keep(&self) -> Arc<dyn Any + Send + Sync> {
        self.inner.clone()
    }
}

impl<S: Sharing> kept::Sealed for ProtectionDomain<S> {
    fn context(&self) -> Context {
        self.context()
    }

    fn keep(&self) -> Arc<dyn Any + Send + Sync> {
        self.inner.clone()
    }
}

impl<T, M: Send + 'static> kept::Sealed for MemoryRegion<T, M> {
    fn context(&self) -> Context {
        Context { file: self.inner.file().clone() }
    }

    fn keep(&self) -> Arc<dyn Any + Send + Sync> {
        self.inner.clone()
    }
}

impl kept::Sealed for AnyMemoryRegion {
    fn context(&self) -> Context {
        self.context()
    }

    fn keep(&self) -> Arc<dyn Any + Send + Sync> {
        self.keep()
    }
}

impl DevxObject {
    /// Sends a command that creates an object, and writes its output to `output`. The kernel takes the opcodes of
    /// queues, memory keys, domains, TIRs and TISs, tables, counters, scheduling elements and general objects. The
    /// object keeps `keeps`: a queue pair its protection domain, completion queues, shared receive queue and UAR, a TIR the
    /// queue pair of raw packets whose RQ it names, so that it is destroyed before them, in whatever order they are dropped.
    /// Firmware refuses to free a protection domain that a queue uses but does not keep, which is
    /// [leaked](Context::leaked) then.
    ///
    /// # Safety
    ///
    /// The command names memory, keys and objects by number. All umems that it names are in `keeps`. As far as it lets
    /// the device access memory by key, the memory stays registered as long as the object, and is not borrowed while
    /// the device may write it.
    ///
    /// The [number](super::Umem::id) of an imported umem is the word of the process that exported it: the kernel tells
    /// that there is a umem of its handle, not which number firmware knows it by, and firmware takes the number of any
    /// umem of the file. The caller promises that it came from that umem's owner, who keeps the memory, and does
    /// not borrow it while the device may write it. `keeps` holds the import alone; firmware refuses to deregister a
    /// umem while an object is in it, so that the kernel keeps the pages that long.
    ///
    /// A queue whose completions go to a completion queue of this library has the `user_index` 0 or 0xffffff, in the
    /// context of a QP, RQ, SQ or XRC SRQ alike: the library gives these two to none of its queues. A completion
    /// with another index reads as one of the library's queue that has it, and gives back memory which the device may
    /// still write.
    ///
    /// A store to a register page posts requests of any queue that names the page, as BlueFlame carries the WQE itself.
    /// For as long as a [page](crate::mlx5::DoorbellPage) of the UAR or VAR which the command names is mapped, nobody rings
    /// it, here or in a process that shares the file, but for requests whose memory is registered. Its methods are safe:
    /// the caller gives it to no code that does not know this.
    ///
    /// # Errors
    ///
    /// As [`general_command`](super::general_command); `EINVAL` for an opcode that creates nothing, and for an entry of
    /// `keeps` of another context; `ENOENT` for a completion queue of an event queue that there is not; `ENOMEM`.
    #[doc(alias = "mlx5dv_devx_obj_create")]
    #[allow(unsafe_code, reason = "the obligation is the caller's")]
    pub unsafe fn create(
        context: &Context,
        input: &[u8],
        output: &mut [u8],
        keeps: &[&dyn DevxRef],
    ) -> Result<DevxObject> {
        const VERB: &str = "devx_obj_create";
        const HANDLE: u16 = uapi::MLX5_IB_ATTR_DEVX_OBJ_CREATE_HANDLE;
        let file = file_of(VERB, context)?;
        for kept in keeps {
            file.check_same(VERB, "object to keep", &kept.context().file)?;
        }
        let handle = run(
            file,
            VERB,
            (MLX5_IB_OBJECT_DEVX_OBJ, uapi::MLX5_IB_METHOD_DEVX_OBJ_CREATE),
            [uapi::MLX5_IB_ATTR_DEVX_OBJ_CREATE_CMD_IN, uapi::MLX5_IB_ATTR_DEVX_OBJ_CREATE_CMD_OUT],
            input,
            output,
            Subject::New { attribute: HANDLE },
        )?;
        let (file, class) = (file.clone(), Class::DEVX_OBJECT);
        let object = Object::without_memory(file, class, handle);
        let keeps = keeps.iter().map(|kept| kept.keep()).collect();
        let facts = Facts::of(input, output);
        Ok(DevxObject { inner: Arc::new(DevxInner { object, keeps, facts }) })
    }

    /// The device's number of the object, from the output of its creation; 0 of those whose number the command chose:
    /// flow table entries, VXLAN ports, entries of the MAC table, and attachments to multicast groups.
    pub fn number(&self) -> u32 {
        self.inner.facts.number
    }

    /// The kernel's handle of the object, a number within its file.
    #[doc(alias = "MLX5DV_OBJ_DEVX")]
    pub fn handle(&self) -> u32 {
        self.inner.object.handle()
    }

    /// Destroys the object; dropping it does the same and ignores errors.
    ///
    /// # Errors
    ///
    /// `EBUSY` while an object that was created with it is alive, firmware's refusal if something else uses it, and
    /// others of the kernel; the object comes back with the error.
    #[doc(alias = "mlx5dv_devx_obj_destroy")]
    pub fn destroy(self) -> std::result::Result<(), ErrorWith<Self>> {
        const HELD: &str = "an object that was created with it is alive";
        destroy_sole(self.inner, Class::DEVX_OBJECT.verb, HELD, |inner| {
            let number = inner.facts.number;
            inner.object.destroy().map_err(|error| undestroyed(error, "object", number))
        })
        .map_err(|failed| failed.map(|inner| DevxObject { inner }))
    }

    /// An object that another process created.
    pub(crate) fn imported(file: Arc<File>, handle: u32, facts: Facts) -> DevxObject {
        let object = Object::without_memory(file, Class::DEVX_OBJECT, handle);
        object.set_owned(false);
        DevxObject { inner: Arc::new(DevxInner { object, keeps: Vec::new(), facts }) }
    }

    pub(crate) fn file(&self) -> &Arc<File> {
        self.inner.object.file()
    }

    pub(crate) fn facts(&self) -> Facts {
        self.inner.facts
    }

    pub(crate) fn keeps_others(&self) -> bool {
        !self.inner.keeps.is_empty()
    }

    /// Whether an object of this process keeps it.
    pub(crate) fn is_kept(&self) -> bool {
        Arc::strong_count(&self.inner) > 1
    }

    pub(crate) fn set_owned(&self, owned: bool) {
        self.inner.object.set_owned(owned);
    }
}

/// Explains a refusal to destroy an object of firmware.
pub(super) fn undestroyed(error: Error, which: &str, number: u32) -> Error {
    match error.errno() {
        // `cmd_status_to_err` of the kernel, for a busy resource and for one in a bad state.
        Errno::BUSY | Errno::INVAL | Errno::REMOTEIO => error.detail(format!(
            "firmware keeps {which} {number:#x} while another object uses it: destroy that one first; it may be another \
             process's"
        )),
        _ => error.context(|| format!("{which} {number:#x}")),
    }
}

impl Facts {
    /// Those of a new object: `set_devx_obj_info` of libmlx5.
    fn of(input: &[u8], output: &[u8]) -> Facts {
        let opcode = half(input, 0);
        let byte = |at: usize| input.get(at).copied().unwrap_or(0);
        let is_general = opcode == opcode::CREATE_GENERAL_OBJECT;
        let kind = match (opcode, half(input, 6)) {
            (opcode::CREATE_FLOW_TABLE, _) => 1,
            (opcode::ALLOC_FLOW_COUNTER, _) => 2,
            (opcode::CREATE_GENERAL_OBJECT, 0xa) => 3,
            (opcode::CREATE_QP, _) => 4,
            (opcode::ALLOC_PACKET_REFORMAT_CONTEXT, _) => 5,
            (opcode::CREATE_TIR, _) => 6,
            (opcode::CREATE_FLOW_GROUP, _) => 7,
            (opcode::SET_FLOW_TABLE_ENTRY, _) => 8,
            (opcode::CREATE_GENERAL_OBJECT, 0x20) => 9,
            (opcode::CREATE_GENERAL_OBJECT, 0x25) => 10,
            (opcode::CREATE_GENERAL_OBJECT, 0x24) => 11,
            (opcode::CREATE_GENERAL_OBJECT, 0x31) => 12,
            _ => 0,
        };
        let rx_icm_addr = match opcode {
            // Bits 63 to 40 behind the status, 39 to 32 in front of the number, the others behind it.
            opcode::CREATE_TIR => {
                let (high, middle, low) = (word(output, 0), word(output, 8), word(output, 12));
                u64::from(high & 0xff_ffff) << 40 | u64::from(middle >> 24) << 32 | u64::from(low)
            }
            _ => 0,
        };
        let log_obj_range = if is_general { byte(12) & 0x1f } else { 0 };
        Facts { number: number_of(input, output), kind, rx_icm_addr, log_obj_range }
    }
}

/// The number of a new object: where it stands in the output is `devx_get_created_obj_id` of `hw/mlx5/devx.c`.
fn number_of(input: &[u8], output: &[u8]) -> u32 {
    /// Numbers of 24 bits are behind 8 that are reserved.
    const BITS_24: u32 = 0xff_ffff;
    match half(input, 0) {
        opcode::CREATE_GENERAL_OBJECT
        | opcode::ALLOC_FLOW_COUNTER
        | opcode::ALLOC_PACKET_REFORMAT_CONTEXT
        | opcode::ALLOC_MODIFY_HEADER_CONTEXT => word(output, 8),
        opcode::CREATE_SCHEDULING_ELEMENT => word(output, 16),
        opcode::CREATE_PSV => word(output, 16) & BITS_24,
        opcode::SET_FLOW_TABLE_ENTRY
        | opcode::ADD_VXLAN_UDP_DPORT
        | opcode::SET_L2_TABLE_ENTRY
        | opcode::ATTACH_TO_MCG => 0,
        _ => word(output, 8) & BITS_24,
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
/// control handle. Commands name what the driver made for it: for a shared receive queue an RMP, of an XRC domain an
/// XRC SRQ, for a queue pair of raw packets its SQ, RQ, TIR and TIS.
pub trait DevxTarget: sealed::Sealed {}

impl DevxTarget for DevxObject {}
impl DevxTarget for QpControl {}
impl DevxTarget for CqControl {}
impl DevxTarget for SharedReceiveQueue {}

impl sealed::Sealed for DevxObject {
    fn target(&self) -> (Context, u32) {
        (Context { file: self.inner.object.file().clone() }, self.inner.object.handle())
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
/// [`DevxObject`] has an example. It waits for firmware; the kernel refuses it while a command changes the object.
///
/// # Errors
///
/// As [`general_command`](super::general_command); `EINVAL` for an opcode that is no query, for the number of another
/// object, and for a query of flow counters that writes them to memory instead of to `output`.
#[doc(alias = "mlx5dv_devx_obj_query")]
#[doc(alias = "mlx5dv_devx_qp_query")]
#[doc(alias = "mlx5dv_devx_cq_query")]
#[doc(alias = "mlx5dv_devx_srq_query")]
pub fn query(target: &(impl DevxTarget + ?Sized), input: &[u8], output: &mut [u8]) -> Result<()> {
    const VERB: &str = "devx_obj_query";
    check_query(VERB, input)?;
    let (context, handle) = target.target();
    run(
        file_of(VERB, &context)?,
        VERB,
        (MLX5_IB_OBJECT_DEVX_OBJ, uapi::MLX5_IB_METHOD_DEVX_OBJ_QUERY),
        [uapi::MLX5_IB_ATTR_DEVX_OBJ_QUERY_CMD_IN, uapi::MLX5_IB_ATTR_DEVX_OBJ_QUERY_CMD_OUT],
        input,
        output,
        Subject::Of { attribute: uapi::MLX5_IB_ATTR_DEVX_OBJ_QUERY_HANDLE, handle },
    )
    .map(drop)
}

/// Refuses a query by which the device would write memory.
pub(super) fn check_query(verb: &'static str, input: &[u8]) -> Result<()> {
    /// The byte of QUERY_FLOW_COUNTER with `dump_to_memory`, and that bit.
    const DUMP: (usize, u8) = (24, 0x40);
    let dumps = input.get(DUMP.0).is_some_and(|byte| byte & DUMP.1 != 0);
    if half(input, 0) == opcode::QUERY_FLOW_COUNTER && dumps {
        let detail = "QUERY_FLOW_COUNTER with dump_to_memory, which would write where a key allows it: query the \
                      counters into the output";
        return Err(Error::invalid(verb, detail));
    }
    Ok(())
}

/// Sends a command that changes an object, which the input names by its number, and writes its output to `output`.
///
/// The library does not learn of the change: a queue pair whose state is changed by a command has the old one here,
/// until it is [queried](QpControl::query).
///
/// # Safety
///
/// The command names memory, keys and objects by number. The umems that it names outlive the object. As far as it lets
/// the device access memory by key, or begin with requests that were posted, the memory stays registered as long as the
/// object, and is not borrowed while the device may write it. A queue of the verbs whose rings this library drives is
/// not reset, keeps its `user_index`, and completes to the queues that it was created with. Another queue that completes
/// to a completion queue of this library has the `user_index` 0 or 0xffffff, and its register page is rung as
/// [`DevxObject::create`] says.
///
/// # Errors
///
/// As [`general_command`](super::general_command); `EINVAL` for an opcode that changes nothing, or the number of
/// another object.
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
    send_modify("devx_obj_modify", target, input, output)
}

/// As [`modify`], for a command of this library.
pub(in crate::mlx5) fn send_modify(
    verb: &'static str,
    target: &(impl DevxTarget + ?Sized),
    input: &[u8],
    output: &mut [u8],
) -> Result<()> {
    let (context, handle) = target.target();
    run(
        file_of(verb, &context)?,
        verb,
        (MLX5_IB_OBJECT_DEVX_OBJ, uapi::MLX5_IB_METHOD_DEVX_OBJ_MODIFY),
        [uapi::MLX5_IB_ATTR_DEVX_OBJ_MODIFY_CMD_IN, uapi::MLX5_IB_ATTR_DEVX_OBJ_MODIFY_CMD_OUT],
        input,
        output,
        Subject::Of { attribute: uapi::MLX5_IB_ATTR_DEVX_OBJ_MODIFY_HANDLE, handle },
    )
    .map(drop)
}
