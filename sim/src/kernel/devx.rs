//! DEVX: firmware commands of a program, objects and memory that it makes by them, and their events.
//!
//! Pairs with `hw/mlx5/devx.c` of Linux 5.18 and later, which returns the output of a command that firmware refused.

use super::cq::VECTORS;
use super::mmap::Leaving;
use super::{FileId, Kernel, Method, Object};
use crate::call::{Call, Result};
use crate::driver::{Driver, about, input, set_uid};
use crate::events::EventFile;
use crate::memory::DmaBuf;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use std::os::fd::AsRawFd;
use uverbs_connectx::format::event::{self, Event, Subject};
use uverbs_uapi::mlx5::devx::*;
use uverbs_uapi::mlx5::object::{
    MLX5_IB_OBJECT_DEVX, MLX5_IB_OBJECT_DEVX_ASYNC_CMD_FD, MLX5_IB_OBJECT_DEVX_ASYNC_EVENT_FD,
    MLX5_IB_OBJECT_DEVX_OBJ, MLX5_IB_OBJECT_DEVX_UMEM,
};
use uverbs_uapi::mlx5::prm::cqc::{cqc, create_cq_in};
use uverbs_uapi::mlx5::prm::mkc::{create_mkey_in, mkc};
use uverbs_uapi::mlx5::prm::object::{
    create_uctx_in, create_uctx_out, create_umem_in, destroy_uctx_in, umem,
};
use uverbs_uapi::mlx5::prm::qpc::{create_qp_in, qpc};
use uverbs_uapi::mlx5::prm::rqc::{create_rq_in, create_sq_in, rqc, sqc};
use uverbs_uapi::mlx5::prm::srqc::{create_rmp_in, rmpc, wq};
use uverbs_uapi::mlx5::prm::{Bits, opcode};

pub(super) const METHODS: &[Method] = &[
    Method {
        object: MLX5_IB_OBJECT_DEVX,
        method: MLX5_IB_METHOD_DEVX_OTHER,
        attrs: &[MLX5_IB_ATTR_DEVX_OTHER_CMD_IN, MLX5_IB_ATTR_DEVX_OTHER_CMD_OUT],
        run: other,
    },
    Method {
        object: MLX5_IB_OBJECT_DEVX,
        method: MLX5_IB_METHOD_DEVX_QUERY_EQN,
        attrs: &[MLX5_IB_ATTR_DEVX_QUERY_EQN_USER_VEC, MLX5_IB_ATTR_DEVX_QUERY_EQN_DEV_EQN],
        run: query_eqn,
    },
    Method {
        object: MLX5_IB_OBJECT_DEVX,
        method: MLX5_IB_METHOD_DEVX_SUBSCRIBE_EVENT,
        attrs: &[
            MLX5_IB_ATTR_DEVX_SUBSCRIBE_EVENT_FD_HANDLE,
            MLX5_IB_ATTR_DEVX_SUBSCRIBE_EVENT_OBJ_HANDLE,
            MLX5_IB_ATTR_DEVX_SUBSCRIBE_EVENT_TYPE_NUM_LIST,
            MLX5_IB_ATTR_DEVX_SUBSCRIBE_EVENT_FD_NUM,
            MLX5_IB_ATTR_DEVX_SUBSCRIBE_EVENT_COOKIE,
        ],
        run: subscribe,
    },
    Method {
        object: MLX5_IB_OBJECT_DEVX_OBJ,
        method: MLX5_IB_METHOD_DEVX_OBJ_CREATE,
        attrs: &[
            MLX5_IB_ATTR_DEVX_OBJ_CREATE_HANDLE,
            MLX5_IB_ATTR_DEVX_OBJ_CREATE_CMD_IN,
            MLX5_IB_ATTR_DEVX_OBJ_CREATE_CMD_OUT,
        ],
        run: create,
    },
    Method {
        object: MLX5_IB_OBJECT_DEVX_OBJ,
        method: MLX5_IB_METHOD_DEVX_OBJ_DESTROY,
        attrs: &[MLX5_IB_ATTR_DEVX_OBJ_DESTROY_HANDLE],
        run: |kernel, call| {
            kernel.destroy(call.file, call.handle(MLX5_IB_ATTR_DEVX_OBJ_DESTROY_HANDLE)?)
        },
    },
    Method {
        object: MLX5_IB_OBJECT_DEVX_OBJ,
        method: MLX5_IB_METHOD_DEVX_OBJ_MODIFY,
        attrs: &[
            MLX5_IB_ATTR_DEVX_OBJ_MODIFY_HANDLE,
            MLX5_IB_ATTR_DEVX_OBJ_MODIFY_CMD_IN,
            MLX5_IB_ATTR_DEVX_OBJ_MODIFY_CMD_OUT,
        ],
        run: |kernel, call| {
            on_object(
                kernel,
                call,
                MODIFIES,
                [
                    MLX5_IB_ATTR_DEVX_OBJ_MODIFY_HANDLE,
                    MLX5_IB_ATTR_DEVX_OBJ_MODIFY_CMD_IN,
                    MLX5_IB_ATTR_DEVX_OBJ_MODIFY_CMD_OUT,
                ],
            )
        },
    },
    Method {
        object: MLX5_IB_OBJECT_DEVX_OBJ,
        method: MLX5_IB_METHOD_DEVX_OBJ_QUERY,
        attrs: &[
            MLX5_IB_ATTR_DEVX_OBJ_QUERY_HANDLE,
            MLX5_IB_ATTR_DEVX_OBJ_QUERY_CMD_IN,
            MLX5_IB_ATTR_DEVX_OBJ_QUERY_CMD_OUT,
        ],
        run: |kernel, call| {
            on_object(
                kernel,
                call,
                QUERIES,
                [
                    MLX5_IB_ATTR_DEVX_OBJ_QUERY_HANDLE,
                    MLX5_IB_ATTR_DEVX_OBJ_QUERY_CMD_IN,
                    MLX5_IB_ATTR_DEVX_OBJ_QUERY_CMD_OUT,
                ],
            )
        },
    },
    Method {
        object: MLX5_IB_OBJECT_DEVX_OBJ,
        method: MLX5_IB_METHOD_DEVX_OBJ_ASYNC_QUERY,
        attrs: &[
            MLX5_IB_ATTR_DEVX_OBJ_QUERY_ASYNC_HANDLE,
            MLX5_IB_ATTR_DEVX_OBJ_QUERY_ASYNC_CMD_IN,
            MLX5_IB_ATTR_DEVX_OBJ_QUERY_ASYNC_FD,
            MLX5_IB_ATTR_DEVX_OBJ_QUERY_ASYNC_WR_ID,
            MLX5_IB_ATTR_DEVX_OBJ_QUERY_ASYNC_OUT_LEN,
        ],
        run: query_async,
    },
    Method {
        object: MLX5_IB_OBJECT_DEVX_ASYNC_CMD_FD,
        method: MLX5_IB_METHOD_DEVX_ASYNC_CMD_FD_ALLOC,
        attrs: &[MLX5_IB_ATTR_DEVX_ASYNC_CMD_FD_ALLOC_HANDLE],
        run: |kernel, call| {
            let fd = kernel.add_events(call.file, 0)?;
            call.made_fd(MLX5_IB_ATTR_DEVX_ASYNC_CMD_FD_ALLOC_HANDLE, fd);
            Ok(())
        },
    },
    Method {
        object: MLX5_IB_OBJECT_DEVX_UMEM,
        method: MLX5_IB_METHOD_DEVX_UMEM_REG,
        attrs: &[
            MLX5_IB_ATTR_DEVX_UMEM_REG_HANDLE,
            MLX5_IB_ATTR_DEVX_UMEM_REG_ADDR,
            MLX5_IB_ATTR_DEVX_UMEM_REG_LEN,
            MLX5_IB_ATTR_DEVX_UMEM_REG_ACCESS,
            MLX5_IB_ATTR_DEVX_UMEM_REG_OUT_ID,
            MLX5_IB_ATTR_DEVX_UMEM_REG_PGSZ_BITMAP,
            MLX5_IB_ATTR_DEVX_UMEM_REG_DMABUF_FD,
        ],
        run: reg_umem,
    },
    Method {
        object: MLX5_IB_OBJECT_DEVX_UMEM,
        method: MLX5_IB_METHOD_DEVX_UMEM_DEREG,
        attrs: &[MLX5_IB_ATTR_DEVX_UMEM_DEREG_HANDLE],
        run: |kernel, call| {
            kernel.destroy(call.file, call.handle(MLX5_IB_ATTR_DEVX_UMEM_DEREG_HANDLE)?)
        },
    },
    Method {
        object: MLX5_IB_OBJECT_DEVX_ASYNC_EVENT_FD,
        method: MLX5_IB_METHOD_DEVX_ASYNC_EVENT_FD_ALLOC,
        attrs: &[
            MLX5_IB_ATTR_DEVX_ASYNC_EVENT_FD_ALLOC_HANDLE,
            MLX5_IB_ATTR_DEVX_ASYNC_EVENT_FD_ALLOC_FLAGS,
        ],
        run: alloc_events,
    },
];

/// Bytes of the header of an input, and of an output: `general_obj_in_cmd_hdr`, `general_obj_out_cmd_hdr`.
const HEADER: usize = 16;

/// The most bytes of answers that a file has for the program.
const MAX_ASYNC_BYTES_IN_USE: usize = 1 << 20;

/// The identity of an object on the device: the opcode of its creation, the type of a general object, and its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Identity {
    create: u16,
    obj_type: u16,
    pub(crate) number: u32,
}

/// A subscription of an event channel.
#[derive(Debug)]
pub(crate) struct Subscription {
    file: FileId,
    /// The handle of the object, and what events say of it; `None` for events of no object.
    object: Option<(u32, Identity)>,
    kind: u8,
    channel: EventFile,
    to: Target,
}

#[derive(Debug)]
enum Target {
    /// A channel, and the number of the subscription there if it omits data: then it is reported again when its record
    /// was read, as by `deliver_event`.
    Channel {
        cookie: u64,
        reporter: Option<u64>,
    },
    EventFd(OwnedFd),
}

/// Commands that any context may send, also one without DEVX.
const WHITELIST: [u16; 3] =
    [opcode::QUERY_HCA_CAP, opcode::QUERY_HCA_VPORT_CONTEXT, opcode::QUERY_ESW_VPORT_CONTEXT];

/// Commands that create an object whose number is the third word of the output, with those that destroy it.
const CREATES: [(u16, u16); 16] = [
    (opcode::CREATE_GENERAL_OBJECT, opcode::DESTROY_GENERAL_OBJECT),
    (opcode::CREATE_MKEY, opcode::DESTROY_MKEY),
    (opcode::CREATE_CQ, opcode::DESTROY_CQ),
    (opcode::ALLOC_PD, opcode::DEALLOC_PD),
    (opcode::ALLOC_TRANSPORT_DOMAIN, opcode::DEALLOC_TRANSPORT_DOMAIN),
    (opcode::CREATE_RMP, opcode::DESTROY_RMP),
    (opcode::CREATE_SQ, opcode::DESTROY_SQ),
    (opcode::CREATE_RQ, opcode::DESTROY_RQ),
    (opcode::CREATE_RQT, opcode::DESTROY_RQT),
    (opcode::CREATE_TIR, opcode::DESTROY_TIR),
    (opcode::CREATE_TIS, opcode::DESTROY_TIS),
    (opcode::ALLOC_Q_COUNTER, opcode::DEALLOC_Q_COUNTER),
    (opcode::ALLOC_FLOW_COUNTER, opcode::DEALLOC_FLOW_COUNTER),
    (opcode::CREATE_QP, opcode::DESTROY_QP),
    (opcode::CREATE_XRC_SRQ, opcode::DESTROY_XRC_SRQ),
    (opcode::ALLOC_XRCD, opcode::DEALLOC_XRCD),
];

/// Commands about an object: the opcode, that of the object's creation, and where the number is in the input.
type OnObject = (u16, u16, usize);

const MODIFIES: &[OnObject] = &[
    (opcode::MODIFY_GENERAL_OBJECT, opcode::CREATE_GENERAL_OBJECT, 8),
    (opcode::MODIFY_CQ, opcode::CREATE_CQ, 8),
    (opcode::MODIFY_RMP, opcode::CREATE_RMP, 8),
    (opcode::MODIFY_SQ, opcode::CREATE_SQ, 8),
    (opcode::MODIFY_RQ, opcode::CREATE_RQ, 8),
    (opcode::MODIFY_RQT, opcode::CREATE_RQT, 8),
    (opcode::MODIFY_TIR, opcode::CREATE_TIR, 8),
    (opcode::MODIFY_TIS, opcode::CREATE_TIS, 8),
    (opcode::RST2INIT_QP, opcode::CREATE_QP, 8),
    (opcode::INIT2INIT_QP, opcode::CREATE_QP, 8),
    (opcode::INIT2RTR_QP, opcode::CREATE_QP, 8),
    (opcode::RTR2RTS_QP, opcode::CREATE_QP, 8),
    (opcode::RTS2RTS_QP, opcode::CREATE_QP, 8),
    (opcode::SQERR2RTS_QP, opcode::CREATE_QP, 8),
    (opcode::TO_ERR_QP, opcode::CREATE_QP, 8),
    (opcode::TO_RST_QP, opcode::CREATE_QP, 8),
    (opcode::ARM_XRC_SRQ, opcode::CREATE_XRC_SRQ, 8),
];

const QUERIES: &[OnObject] = &[
    (opcode::QUERY_GENERAL_OBJECT, opcode::CREATE_GENERAL_OBJECT, 8),
    (opcode::QUERY_MKEY, opcode::CREATE_MKEY, 8),
    (opcode::QUERY_CQ, opcode::CREATE_CQ, 8),
    (opcode::QUERY_RMP, opcode::CREATE_RMP, 8),
    (opcode::QUERY_SQ, opcode::CREATE_SQ, 8),
    (opcode::QUERY_RQ, opcode::CREATE_RQ, 8),
    (opcode::QUERY_RQT, opcode::CREATE_RQT, 8),
    (opcode::QUERY_TIR, opcode::CREATE_TIR, 8),
    (opcode::QUERY_TIS, opcode::CREATE_TIS, 8),
    (opcode::QUERY_Q_COUNTER, opcode::ALLOC_Q_COUNTER, 28),
    (opcode::QUERY_FLOW_COUNTER, opcode::ALLOC_FLOW_COUNTER, 28),
    (opcode::QUERY_QP, opcode::CREATE_QP, 8),
    (opcode::QUERY_XRC_SRQ, opcode::CREATE_XRC_SRQ, 8),
];

/// Types of events that a program may subscribe to for an object, and for none, on a device without `event_cap`.
const OF_OBJECTS: [u16; 8] = [
    event::COMPLETION as u16,
    event::CQ_ERROR as u16,
    event::WQ_CATASTROPHIC as u16,
    event::WQ_INVALID_REQUEST as u16,
    event::WQ_ACCESS_ERROR as u16,
    event::LAST_WQE_REACHED as u16,
    event::SRQ_LIMIT as u16,
    0x12,
];
const OF_NONE: [u16; 1] = [event::PORT_CHANGE as u16];

fn word(bytes: &[u8], at: usize) -> u32 {
    let word = bytes.get(at..at + 4).and_then(|word| word.try_into().ok());
    u32::from_be_bytes(word.unwrap_or_default())
}

fn half(bytes: &[u8], at: usize) -> u16 {
    (word(bytes, at) >> 16) as u16
}

/// The number of an object in a word of a command.
fn number_in(create: u16, word: u32) -> u32 {
    if create == opcode::CREATE_GENERAL_OBJECT { word } else { word & 0xff_ffff }
}

/// The input of a command whose output has `room` bytes, with the context that sends it.
fn command(kernel: &Kernel, call: &Call<'_>, cmd_in: u16, room: usize) -> Result<Vec<u8>> {
    let mut input = call.bytes(cmd_in);
    if input.len() < HEADER || room < HEADER {
        return Err(Errno::INVAL);
    }
    let uid = kernel.file(call.file)?.uid;
    if uid == 0 && !WHITELIST.contains(&half(&input, 0)) {
        return Err(Errno::INVAL);
    }
    set_uid(&mut input, uid);
    Ok(input)
}

/// Sends a command, and returns its output; that of a refused one is written for the program.
fn send(kernel: &mut Kernel, call: &mut Call<'_>, input: &[u8], out: u16) -> Result<Vec<u8>> {
    let (driver, switch) = kernel.driver(call.file)?;
    let output = driver.send(switch, input)?;
    match output.first() {
        Some(0) => Ok(output),
        _ => {
            call.put_bytes(out, &output);
            Err(Errno::REMOTEIO)
        }
    }
}

fn other(kernel: &mut Kernel, call: &mut Call<'_>) -> Result<()> {
    let out = MLX5_IB_ATTR_DEVX_OTHER_CMD_OUT;
    let input = command(kernel, call, MLX5_IB_ATTR_DEVX_OTHER_CMD_IN, call.room(out))?;
    let op = half(&input, 0);
    let is_late = (opcode::GENERAL_START..opcode::GENERAL_END).contains(&op);
    if !opcode::GENERAL_QUERIES.contains(&op) && !is_late {
        return Err(Errno::INVAL);
    }
    let output = send(kernel, call, &input, out)?;
    call.put_bytes(out, &output);
    Ok(())
}

fn query_eqn(kernel: &mut Kernel, call: &mut Call<'_>) -> Result<()> {
    if call.u32(MLX5_IB_ATTR_DEVX_QUERY_EQN_USER_VEC)? >= VECTORS {
        return Err(Errno::INVAL);
    }
    let (driver, _) = kernel.driver(call.file)?;
    let eqn = driver.eqn();
    call.put(MLX5_IB_ATTR_DEVX_QUERY_EQN_DEV_EQN, &eqn);
    Ok(())
}

/// Modes of an mkey that names other mkeys.
const ACCESS_MODE_KLMS: u64 = 2;
const ACCESS_MODE_KSM: u64 = 3;

/// Says that queues of the command are in umems, as `devx_set_umem_valid`.
fn set_umem_valid(op: u16, bytes: &mut [u8]) {
    fn of_wq(mut queue: Bits<wq, &mut [u8]>) {
        queue.set(wq::dbr_umem_valid, 1);
        queue.set(wq::wq_umem_valid, 1);
    }
    match op {
        opcode::CREATE_MKEY => {
            let mut input = Bits::<create_mkey_in, _>::new(bytes);
            let entry = input.sub(create_mkey_in::memory_key_mkey_entry);
            let mode = entry.get(mkc::access_mode_4_2) << 2 | entry.get(mkc::access_mode_1_0);
            // An mkey over other mkeys has no memory of its own: `devx_handle_mkey_create`.
            if !matches!(mode, ACCESS_MODE_KLMS | ACCESS_MODE_KSM) {
                input.set(create_mkey_in::mkey_umem_valid, 1);
            }
        }
        opcode::CREATE_CQ => {
            let mut input = Bits::<create_cq_in, _>::new(bytes);
            input.set(create_cq_in::cq_umem_valid, 1);
            input.sub_mut(create_cq_in::cq_context).set(cqc::dbr_umem_valid, 1);
        }
        opcode::CREATE_QP => {
            let mut input = Bits::<create_qp_in, _>::new(bytes);
            input.set(create_qp_in::wq_umem_valid, 1);
            input.sub_mut(create_qp_in::qpc).set(qpc::dbr_umem_valid, 1);
        }
        opcode::CREATE_RQ => {
            let mut input = Bits::<create_rq_in, _>::new(bytes);
            of_wq(input.sub_mut(create_rq_in::ctx).sub_mut(rqc::wq));
        }
        opcode::CREATE_SQ => {
            let mut input = Bits::<create_sq_in, _>::new(bytes);
            of_wq(input.sub_mut(create_sq_in::ctx).sub_mut(sqc::wq));
        }
        opcode::CREATE_RMP => {
            let mut input = Bits::<create_rmp_in, _>::new(bytes);
            of_wq(input.sub_mut(create_rmp_in::ctx).sub_mut(rmpc::wq));
        }
        _ => {}
    }
}

fn create(kernel: &mut Kernel, call: &mut Call<'_>) -> Result<()> {
    let out = MLX5_IB_ATTR_DEVX_OBJ_CREATE_CMD_OUT;
    let mut input = command(kernel, call, MLX5_IB_ATTR_DEVX_OBJ_CREATE_CMD_IN, call.room(out))?;
    let op = half(&input, 0);
    let known = CREATES.iter().find(|(create, _)| *create == op).ok_or(Errno::INVAL)?;
    let is_general = op == opcode::CREATE_GENERAL_OBJECT;
    if !is_general && half(&input, 4) != 0 {
        return Err(Errno::INVAL);
    }
    set_umem_valid(op, &mut input);
    if op == opcode::CREATE_CQ {
        let context = Bits::<create_cq_in, _>::new(&input[..]);
        let eqn = context.sub(create_cq_in::cq_context).get32(cqc::c_eqn_or_apu_element);
        if eqn != kernel.driver(call.file)?.0.eqn() {
            return Err(Errno::NOENT);
        }
    }
    let output = send(kernel, call, &input, out)?;
    let obj_type = if is_general { half(&input, 6) } else { 0 };
    let number = number_in(op, word(&output, 8));
    let identity = Identity { create: op, obj_type, number };
    let object = Object::Devx { identity, destroy: known.1 };
    let handle = kernel.add(call.file, object, &[])?;
    call.made(MLX5_IB_ATTR_DEVX_OBJ_CREATE_HANDLE, handle);
    call.put_bytes(out, &output);
    Ok(())
}

/// Destroys an object.
pub(super) fn destroy(
    kernel: &mut Kernel,
    file: FileId,
    Identity { obj_type, number, .. }: Identity,
    op: u16,
) -> Result<()> {
    let mut input = about(op, number);
    input[6..8].copy_from_slice(&obj_type.to_be_bytes());
    let (driver, switch) = kernel.driver(file)?;
    driver.execute(switch, &input)?;
    kernel.take_events_of(file)
}

/// The identities of an object by its handle: one of DEVX, or a queue of the verbs. Commands may name each, as
/// `devx_is_valid_obj_id` has it.
fn identities(kernel: &mut Kernel, file: FileId, handle: u32) -> Result<Vec<Identity>> {
    let of = |(create, number)| Identity { create, obj_type: 0, number };
    Ok(match kernel.object(file, handle)?.clone() {
        Object::Devx { identity, .. } => vec![identity],
        Object::Cq { number } => vec![of((opcode::CREATE_CQ, number))],
        Object::Qp { number, .. } => {
            let (driver, _) = kernel.driver(file)?;
            match driver.qps.get(&number).and_then(|qp| qp.raw.as_ref()) {
                Some(raw) => raw.made().map(of).collect(),
                None => vec![of((opcode::CREATE_QP, number))],
            }
        }
        Object::Srq { number } => {
            let (driver, _) = kernel.driver(file)?;
            let is_xrc = driver.srqs.get(&number).is_some_and(|srq| srq.is_xrc);
            vec![of((if is_xrc { opcode::CREATE_XRC_SRQ } else { opcode::CREATE_RMP }, number))]
        }
        _ => return Err(Errno::INVAL),
    })
}

fn on_object(
    kernel: &mut Kernel,
    call: &mut Call<'_>,
    known: &[OnObject],
    [handle, cmd_in, cmd_out]: [u16; 3],
) -> Result<()> {
    let mut input = about_object(kernel, call, known, [handle, cmd_in], call.room(cmd_out))?;
    set_umem_valid(half(&input, 0), &mut input);
    let output = send(kernel, call, &input, cmd_out)?;
    call.put_bytes(cmd_out, &output);
    Ok(())
}

/// The input of a command about an object, which is one of those `known`.
fn about_object(
    kernel: &mut Kernel,
    call: &Call<'_>,
    known: &[OnObject],
    [handle, cmd_in]: [u16; 2],
    room: usize,
) -> Result<Vec<u8>> {
    let identities = identities(kernel, call.file, call.handle(handle)?)?;
    let input = command(kernel, call, cmd_in, room)?;
    let op = half(&input, 0);
    let (_, create, at) = known.iter().find(|(known, ..)| *known == op).ok_or(Errno::INVAL)?;
    let is_general = *create == opcode::CREATE_GENERAL_OBJECT;
    let obj_type = if is_general { half(&input, 6) } else { 0 };
    let number = number_in(*create, word(&input, *at));
    let named = Identity { create: *create, obj_type, number };
    if !identities.contains(&named) || half(&input, 4) != 0 {
        return Err(Errno::INVAL);
    }
    Ok(input)
}

/// Queries an object, and reports the output to a file of answers; also firmware's refusal.
fn query_async(kernel: &mut Kernel, call: &mut Call<'_>) -> Result<()> {
    // A constant, which takes 8 bytes whatever its type.
    let length = call.bytes(MLX5_IB_ATTR_DEVX_OBJ_QUERY_ASYNC_OUT_LEN);
    let length: [u8; 8] = length.try_into().map_err(|_| Errno::INVAL)?;
    let length = u16::try_from(u64::from_ne_bytes(length)).map_err(|_| Errno::INVAL)?;
    let length = usize::from(length);
    let wr_id = call.u64_if(MLX5_IB_ATTR_DEVX_OBJ_QUERY_ASYNC_WR_ID).ok_or(Errno::INVAL)?;
    let fd = call.fd_if(MLX5_IB_ATTR_DEVX_OBJ_QUERY_ASYNC_FD).ok_or(Errno::INVAL)?;
    let inode = call.user.inode(fd).ok_or(Errno::BADF)?;
    let files = &kernel.file(call.file)?.events;
    let answers = files.iter().find(|file| file.is_behind(inode) && file.width() == 0);
    let answers = answers.ok_or(Errno::BADF)?.clone();
    let ids = [MLX5_IB_ATTR_DEVX_OBJ_QUERY_ASYNC_HANDLE, MLX5_IB_ATTR_DEVX_OBJ_QUERY_ASYNC_CMD_IN];
    let input = about_object(kernel, call, QUERIES, ids, length)?;
    let theirs = call.user.duplicate(fd).ok_or(Errno::BADF)?;
    let header = size_of::<mlx5_ib_uapi_devx_async_cmd_hdr>();
    // Miri does not tell what is unread.
    let unread = if cfg!(miri) { 0 } else { answers.unread(&theirs, header)? };
    if unread + length > MAX_ASYNC_BYTES_IN_USE {
        return Err(Errno::AGAIN);
    }
    let (driver, switch) = kernel.driver(call.file)?;
    let mut record = driver.send(switch, &input)?;
    record.resize(length, 0);
    record.splice(..0, wr_id.to_ne_bytes());
    answers.send(&record);
    Ok(())
}

/// The size of the pages of a umem, as `devx_umem_find_best_pgsize`: memory of the process is contiguous for the
/// device, whatever the pages. Those of the device are of 4 KiB to 4 GiB.
fn page_size(address: u64, length: u64, bitmap: u64) -> Result<u64> {
    const SMALLEST: u64 = 4096;
    const LARGEST: u64 = 1 << 32;
    let system = rustix::param::page_size() as u64;
    let most = length.next_power_of_two().max(system);
    let among = bitmap & (most | (most - 1)) & (LARGEST | (LARGEST - 1)) & !(SMALLEST - 1);
    if among == 0 {
        return Err(Errno::INVAL);
    }
    let mut size = 1 << among.ilog2();
    while (address & (size - 1) != 0 || length % size != 0) && size > system {
        size /= 2;
    }
    Ok(size)
}

/// The pages of a umem: their size, the address of the first one, and their number. Memory may be a file with holes, so
/// that a list that is longer than the device takes is not built.
fn pages_of(address: u64, length: u64, bitmap: u64) -> Result<(u64, u64, u64)> {
    const MOST: u64 = 1 << 24;
    let size = page_size(address, length, bitmap)?;
    let first = address & !(size - 1);
    let pages = (address - first + length).div_ceil(size);
    if pages == 0 || pages > MOST {
        return Err(Errno::INVAL);
    }
    Ok((size, first, pages))
}

fn reg_umem(kernel: &mut Kernel, call: &mut Call<'_>) -> Result<()> {
    const KNOWN: u64 = 7;
    const WRITES: u64 = 3;
    let uid = kernel.file(call.file)?.uid;
    if uid == 0 {
        return Err(Errno::INVAL);
    }
    let address = call.u64_if(MLX5_IB_ATTR_DEVX_UMEM_REG_ADDR).ok_or(Errno::INVAL)?;
    let length = call.u64_if(MLX5_IB_ATTR_DEVX_UMEM_REG_LEN).ok_or(Errno::INVAL)?;
    let access = call.u64_if(MLX5_IB_ATTR_DEVX_UMEM_REG_ACCESS).unwrap_or(0);
    if access & !KNOWN != 0 || access & 2 != 0 && access & 1 == 0 {
        return Err(Errno::INVAL);
    }
    let writable = access & WRITES != 0;
    let (address, lent) = match call.fd_if(MLX5_IB_ATTR_DEVX_UMEM_REG_DMABUF_FD) {
        // The address counts from the begin of the buffer.
        Some(fd) => {
            let buffer = DmaBuf::map(&call.user.duplicate(fd).ok_or(Errno::BADF)?)?;
            kernel.lend_dmabuf(call, buffer, address, length)?
        }
        None => (address, kernel.lend(call, &[(address, length, writable)])?),
    };
    let bitmap = call.u64_if(MLX5_IB_ATTR_DEVX_UMEM_REG_PGSZ_BITMAP).unwrap_or(!0xfff);
    let (size, first, pages) = match pages_of(address, length, bitmap) {
        Ok(pages) => pages,
        Err(errno) => {
            kernel.give_back(call.file, lent)?;
            return Err(errno);
        }
    };
    let mut command = input::<create_umem_in>(opcode::CREATE_UMEM);
    let mut context = command.sub_mut(create_umem_in::umem);
    context.set(umem::log_page_size, u64::from(size.ilog2() - 12));
    context.set(umem::page_offset, address - first);
    context.set(umem::num_of_mtt, pages);
    let mut command = command.into_inner();
    set_uid(&mut command, uid);
    for page in 0..pages {
        // Readable, and writable.
        let rights = 1 | u64::from(writable) << 1;
        command.extend(((first + page * size) | rights).to_be_bytes());
    }
    let (answer, lent) = kernel.execute_with(call, &command, lent)?;
    let number = Driver::created(&answer);
    let handle = kernel.add_lending(call.file, Object::Umem { number }, &[], lent)?;
    call.made(MLX5_IB_ATTR_DEVX_UMEM_REG_HANDLE, handle);
    call.put(MLX5_IB_ATTR_DEVX_UMEM_REG_OUT_ID, &number);
    Ok(())
}

pub(super) fn dereg_umem(kernel: &mut Kernel, file: FileId, number: u32) -> Result<()> {
    let (driver, switch) = kernel.driver(file)?;
    driver.execute_on(switch, opcode::DESTROY_UMEM, number).map(drop)
}

fn alloc_events(kernel: &mut Kernel, call: &mut Call<'_>) -> Result<()> {
    let flags = call.u64_if(MLX5_IB_ATTR_DEVX_ASYNC_EVENT_FD_ALLOC_FLAGS).ok_or(Errno::INVAL)?;
    let omits = u64::from(
        mlx5_ib_uapi_devx_create_event_channel_flags::MLX5_IB_UAPI_DEVX_CR_EV_CH_FLAGS_OMIT_DATA
            .bits(),
    );
    if flags & !omits != 0 {
        return Err(Errno::INVAL);
    }
    let header = size_of::<mlx5_ib_uapi_devx_async_event_hdr>();
    let width = if flags == omits { header } else { header + EQE };
    let fd = kernel.add_events(call.file, width)?;
    if let Some(channel) = kernel.file(call.file)?.events.last().filter(|_| flags == omits) {
        channel.measure(&fd)?;
    }
    call.made_fd(MLX5_IB_ATTR_DEVX_ASYNC_EVENT_FD_ALLOC_HANDLE, fd);
    Ok(())
}

/// Bytes of an entry of an event queue.
const EQE: usize = 64;

/// The entry of an event queue.
fn eqe(event: &Event) -> [u8; EQE] {
    let mut bytes = [0; EQE];
    (bytes[1], bytes[3]) = (event.kind, event.sub_type);
    bytes[32..60].copy_from_slice(&event.data);
    bytes
}

fn subscribe(kernel: &mut Kernel, call: &mut Call<'_>) -> Result<()> {
    const MOST: usize = 16;
    if kernel.file(call.file)?.uid == 0 {
        return Err(Errno::INVAL);
    }
    let handle = call.handle_if(MLX5_IB_ATTR_DEVX_SUBSCRIBE_EVENT_OBJ_HANDLE);
    let object = match handle {
        Some(handle) => match kernel.object(call.file, handle)? {
            Object::Devx { identity, .. } => Some((handle, *identity)),
            _ => return Err(Errno::INVAL),
        },
        None => None,
    };
    let fd = call.fd_if(MLX5_IB_ATTR_DEVX_SUBSCRIBE_EVENT_FD_HANDLE).ok_or(Errno::INVAL)?;
    let inode = call.user.inode(fd).ok_or(Errno::BADF)?;
    let files = &kernel.file(call.file)?.events;
    let channel = files.iter().find(|file| file.is_behind(inode)).ok_or(Errno::BADF)?.clone();
    let redirect = call.u32_if(MLX5_IB_ATTR_DEVX_SUBSCRIBE_EVENT_FD_NUM);
    let cookie = call.u64_if(MLX5_IB_ATTR_DEVX_SUBSCRIBE_EVENT_COOKIE);
    if redirect.is_some() && cookie.is_some() {
        return Err(Errno::INVAL);
    }
    let list = call.bytes(MLX5_IB_ATTR_DEVX_SUBSCRIBE_EVENT_TYPE_NUM_LIST);
    let types = list.chunks_exact(2).map(|kind| u16::from_ne_bytes([kind[0], kind[1]]));
    if list.len() % 2 != 0 || !(1..=MOST).contains(&types.len()) {
        return Err(Errno::INVAL);
    }
    let known: &[u16] = if object.is_some() { &OF_OBJECTS } else { &OF_NONE };
    let mut added = Vec::new();
    for kind in types {
        if !known.contains(&kind) {
            return Err(Errno::INVAL);
        }
        let to = match redirect {
            Some(fd) => {
                let fd = call.user.duplicate(fd as i32).ok_or(Errno::BADF)?;
                if !is_eventfd(&fd) {
                    return Err(Errno::INVAL);
                }
                Target::EventFd(fd)
            }
            None => {
                let reporter = (channel.width() < EQE).then(|| channel.new_reporter());
                Target::Channel { cookie: cookie.unwrap_or(0), reporter }
            }
        };
        let channel = channel.clone();
        added.push(Subscription { file: call.file, object, kind: kind as u8, channel, to });
    }
    kernel.driver(call.file)?.0.subscriptions.extend(added);
    Ok(())
}

/// Whether a write of eight bytes adds to a counter, and does nothing else.
fn is_eventfd(fd: &OwnedFd) -> bool {
    let link = format!("/proc/self/fd/{}", fd.as_raw_fd());
    std::fs::read_link(link).is_ok_and(|target| target.as_os_str() == "anon_inode:[eventfd]")
}

impl Subscription {
    /// Whether it is of this file, and, if it is given, of this object.
    pub(crate) fn is_of(&self, file: FileId, handle: Option<u32>) -> bool {
        self.file == file && (handle.is_none() || handle == self.object.map(|(handle, _)| handle))
    }

    /// Whether the program has closed the channel.
    pub(crate) fn is_over(&self) -> bool {
        self.channel.is_closed()
    }

    /// Passes an event on if it is one of those subscribed to.
    pub(crate) fn take(&self, event: &Event) {
        if self.kind != event.kind || !self.is_about(event.subject()) {
            return;
        }
        match &self.to {
            Target::Channel { cookie, reporter } => {
                let mut record = cookie.to_ne_bytes().to_vec();
                match reporter {
                    Some(reporter) => self.channel.send_once(&record, *reporter),
                    None => {
                        record.extend(eqe(event));
                        self.channel.send(&record);
                    }
                }
            }
            Target::EventFd(fd) => {
                // A counter that is full blocks a writer; the kernel leaves it full.
                let mut fds = [PollFd::new(fd, PollFlags::OUT)];
                if poll(&mut fds, Some(&Timespec::default())) == Ok(1) {
                    let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
                }
            }
        }
    }

    fn is_about(&self, subject: Subject) -> bool {
        let Some((_, Identity { create, number, .. })) = self.object else {
            return matches!(subject, Subject::Port(_) | Subject::Function);
        };
        let creates = match subject {
            Subject::Cq(_) => [opcode::CREATE_CQ; 2],
            Subject::Srq(_) => [opcode::CREATE_RMP, opcode::CREATE_XRC_SRQ],
            Subject::Qp(_) => [opcode::CREATE_QP; 2],
            Subject::Sq(_) => [opcode::CREATE_SQ; 2],
            Subject::Rq(_) => [opcode::CREATE_RQ; 2],
            Subject::Port(_) | Subject::Function => return false,
        };
        let (Subject::Cq(of)
        | Subject::Srq(of)
        | Subject::Qp(of)
        | Subject::Sq(of)
        | Subject::Rq(of)) = subject
        else {
            return false;
        };
        creates.contains(&create) && of == number
    }
}

impl Driver {
    /// Creates a user context, which owns the objects of a file; returns its uid.
    pub(super) fn create_uctx(&self, switch: &mut super::Switch) -> Result<u16> {
        let command = input::<create_uctx_in>(opcode::CREATE_UCTX).into_inner();
        let answer = Bits::<create_uctx_out, _>::new(self.execute(switch, &command)?);
        Ok(answer.get32(create_uctx_out::uid) as u16)
    }

    /// Destroys a user context. Its doorbell pages go with it.
    pub(super) fn destroy_uctx(&mut self, switch: &mut super::Switch, uid: u16) {
        let mut command = input::<destroy_uctx_in>(opcode::DESTROY_UCTX);
        command.set(destroy_uctx_in::uid, uid.into());
        let _ = self.execute(switch, &command.into_inner());
        self.leaving.retain(
            |(_, leaving)| !matches!(leaving, Leaving::Uar { uid: owner, .. } if *owner == uid),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_of_a_umem_are_those_that_the_device_has() {
        const ANY: u64 = !0xfff;
        const TERA: u64 = 1 << 40;
        assert_eq!(page_size(0, TERA, ANY), Ok(1 << 32));
        // Its logarithm would be cut to that of 8 KiB.
        assert_eq!(page_size(0, 1 << 45, 1 << 45 | 1 << 21), Ok(1 << 21));
        for bitmap in [1 << 45, 1 << 33, 0xfff] {
            assert_eq!(page_size(0, 1 << 45, bitmap), Err(Errno::INVAL), "{bitmap:#x}");
        }
        assert_eq!(pages_of(4096, TERA, 4096), Err(Errno::INVAL), "2^28 pages");
        assert_eq!(pages_of(4096, 0, ANY), Err(Errno::INVAL));
        assert_eq!(pages_of(0x5800, 0x1000, 4096), Ok((4096, 0x5000, 2)));
    }
}
