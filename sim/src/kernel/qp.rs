//! Queue pairs. Pairs with `core/uverbs_std_types_qp.c`, `ib_uverbs_modify_qp` and `hw/mlx5/qp.c`.

use super::cq::RECORD;
use super::states::{self, ERR, INIT, RESET, RTR, RTS, SQD, SQE};
use super::{FileId, Kernel, Method, Object, Place, Write, destroying, end_reports, raw};
use crate::call::{Call, Result, is_capable};
use crate::driver::{Driver, OpenerId, Qp, append_pages, input, quantized_offset};
use crate::faults::Verb;
use rustix::io::Errno;
use std::collections::BTreeMap;
use uverbs_connectx::format::event::Subject;
use uverbs_uapi::mlx5::abi::{
    mlx5_ib_create_qp, mlx5_ib_create_qp_resp, mlx5_ib_modify_qp, mlx5_ib_modify_qp_mask,
    mlx5_ib_modify_qp_resp, mlx5_qp_flags,
};
use uverbs_uapi::mlx5::prm::Bits;
use uverbs_uapi::mlx5::prm::opcode;
use uverbs_uapi::mlx5::prm::qpc::{
    ads, create_qp_in, create_qp_out, qpc, query_qp_in, query_qp_out, rst2init_qp_in,
    rst2init_qp_out,
};
use uverbs_uapi::mr::ib_uverbs_access_flags as Access;
use uverbs_uapi::object::{UVERBS_ATTR_UHW_IN, UVERBS_ATTR_UHW_OUT, UVERBS_OBJECT_QP};
use uverbs_uapi::qp::ib_qp_attr_mask as Mask;
use uverbs_uapi::qp::*;
use uverbs_uapi::write::{
    IB_USER_VERBS_CMD_FLAG_EXTENDED, IB_USER_VERBS_CMD_MODIFY_QP, IB_USER_VERBS_CMD_OPEN_QP,
    IB_USER_VERBS_CMD_QUERY_QP, IB_USER_VERBS_EX_CMD_MODIFY_QP,
};

pub(super) const METHODS: &[Method] = &[
    destroying(UVERBS_OBJECT_QP, UVERBS_METHOD_QP_DESTROY),
    Method {
        object: UVERBS_OBJECT_QP,
        method: UVERBS_METHOD_QP_CREATE,
        attrs: &[
            UVERBS_ATTR_CREATE_QP_HANDLE,
            UVERBS_ATTR_CREATE_QP_XRCD_HANDLE,
            UVERBS_ATTR_CREATE_QP_PD_HANDLE,
            UVERBS_ATTR_CREATE_QP_SRQ_HANDLE,
            UVERBS_ATTR_CREATE_QP_SEND_CQ_HANDLE,
            UVERBS_ATTR_CREATE_QP_RECV_CQ_HANDLE,
            UVERBS_ATTR_CREATE_QP_USER_HANDLE,
            UVERBS_ATTR_CREATE_QP_CAP,
            UVERBS_ATTR_CREATE_QP_TYPE,
            UVERBS_ATTR_CREATE_QP_FLAGS,
            UVERBS_ATTR_CREATE_QP_SOURCE_QPN,
            UVERBS_ATTR_CREATE_QP_EVENT_FD,
            UVERBS_ATTR_CREATE_QP_RESP_CAP,
            UVERBS_ATTR_CREATE_QP_RESP_QP_NUM,
            UVERBS_ATTR_UHW_IN,
            UVERBS_ATTR_UHW_OUT,
        ],
        run: create,
    },
];

pub(super) const WRITES: &[Write] = &[
    Write { command: IB_USER_VERBS_CMD_MODIFY_QP, run: modify },
    Write {
        command: IB_USER_VERBS_EX_CMD_MODIFY_QP | IB_USER_VERBS_CMD_FLAG_EXTENDED,
        run: modify_ex,
    },
    Write { command: IB_USER_VERBS_CMD_QUERY_QP, run: query },
    Write { command: IB_USER_VERBS_CMD_OPEN_QP, run: open },
];

/// Bytes of a WQEBB.
pub(super) const WQEBB: u64 = 64;
/// log2 of the most bytes of a receive.
pub(super) const MAX_RECEIVE_SHIFT: u32 = 9;
/// The driver's number of partition keys, also for a RoCE port with one: `pkey_table_size`.
const PKEYS: u16 = 128;
/// Bits of attributes that the kernel knows: the standard ones, and with the extended command the rate limit.
const STANDARD: Mask = Mask::from_bits_retain(0x1f_ffff);

/// The transport of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Rc,
    Uc,
    Ud,
    XrcInitiator,
    XrcTarget,
    RawPacket,
}

impl Kind {
    fn new(kind: u32) -> Result<Kind> {
        Ok(match ib_uverbs_qp_type(kind) {
            ib_uverbs_qp_type::IB_UVERBS_QPT_RC => Kind::Rc,
            ib_uverbs_qp_type::IB_UVERBS_QPT_UC => Kind::Uc,
            ib_uverbs_qp_type::IB_UVERBS_QPT_UD => Kind::Ud,
            ib_uverbs_qp_type::IB_UVERBS_QPT_XRC_INI => Kind::XrcInitiator,
            ib_uverbs_qp_type::IB_UVERBS_QPT_XRC_TGT => Kind::XrcTarget,
            ib_uverbs_qp_type::IB_UVERBS_QPT_RAW_PACKET => Kind::RawPacket,
            // DC, which the device does not have.
            ib_uverbs_qp_type::IB_UVERBS_QPT_DRIVER => return Err(Errno::OPNOTSUPP),
            _ => return Err(Errno::INVAL),
        })
    }

    /// Whether it can be a member of multicast groups.
    pub(crate) fn is_datagram(self) -> bool {
        self == Kind::Ud
    }

    /// The transport as firmware numbers it.
    fn service_type(self) -> u64 {
        match self {
            Kind::Rc => 0,
            Kind::Uc => 1,
            Kind::Ud | Kind::RawPacket => 2,
            Kind::XrcInitiator | Kind::XrcTarget => 3,
        }
    }
}

/// The request for a queue pair, read and checked.
pub(super) struct Asked {
    pub(super) kind: Kind,
    pub(super) driver_part: mlx5_ib_create_qp,
    pub(super) cap: ib_uverbs_qp_cap,
    pub(super) flags: ib_uverbs_qp_create_flags,
    pub(super) pd: u32,
    pub(super) send_cq: u32,
    pub(super) recv_cq: u32,
    srq: Option<u32>,
    xrcd: Option<u32>,
    /// `ts_format` of sends, and of receives.
    pub(super) timestamps: [u64; 2],
    /// The handles that it uses.
    uses: Vec<u32>,
}

fn create(kernel: &mut Kernel, call: &mut Call<'_>) -> Result<()> {
    check_handles(kernel, call)?;
    let kind = call.u64_if(UVERBS_ATTR_CREATE_QP_TYPE).ok_or(Errno::INVAL)? as u32;
    let kind = Kind::new(kind)?;
    if kind == Kind::RawPacket && !has_raw_capability() {
        return Err(Errno::PERM);
    }
    let mut asked = ask(kernel, call, kind)?;
    let formats = timestamp_formats(kernel, call.file, &asked)?;
    asked.timestamps = formats;
    let user_handle = call.u64_if(UVERBS_ATTR_CREATE_QP_USER_HANDLE).unwrap_or(0);
    let events = kernel.reports_events(call, UVERBS_ATTR_CREATE_QP_EVENT_FD, user_handle)?;
    let mut response = mlx5_ib_create_qp_resp::default();
    let (number, lent, raw) = if kind == Kind::RawPacket {
        let (number, lent, raw) = raw::create(kernel, call, &asked, &mut response)?;
        (number, lent, Some(raw))
    } else {
        let (command, ranges) = command(kernel, call.file, &asked)?;
        let lent = kernel.lend(call, &ranges)?;
        // The target of an XRC connection is the kernel's: other files open it, too.
        let command = match kind {
            Kind::XrcTarget => command,
            _ => kernel.of_context(call.file, &command)?,
        };
        let (answer, lent) = kernel.execute_with(call, &command, lent)?;
        let answer = Bits::<create_qp_out, _>::new(answer);
        response.ece_options = answer.get32(create_qp_out::ece);
        (answer.get32(create_qp_out::qpn), lent, None)
    };
    let events = events.map(Place::attach);
    let (driver, _) = kernel.driver(call.file)?;
    let opener = driver.new_opener();
    let signal_all =
        asked.flags.contains(ib_uverbs_qp_create_flags::IB_UVERBS_QP_CREATE_SQ_SIG_ALL);
    let qp = Qp {
        openers: BTreeMap::from([(opener, events)]),
        attr: Default::default(),
        state: RESET,
        cap: asked.cap,
        kind,
        signal_all,
        out_of_order: false,
        xrcd: asked.xrcd.filter(|_| kind == Kind::XrcTarget),
        groups: Vec::new(),
        raw,
    };
    driver.qps.insert(number, qp);
    let object = Object::Qp { number, opener };
    let handle = kernel.add_lending(call.file, object, &asked.uses, lent)?;
    call.made(UVERBS_ATTR_CREATE_QP_HANDLE, handle);
    call.put(UVERBS_ATTR_CREATE_QP_RESP_CAP, &asked.cap);
    call.put(UVERBS_ATTR_CREATE_QP_RESP_QP_NUM, &number);
    call.respond_driver(&response);
    Ok(())
}

/// Whether the calling thread may use raw packets and privileged keys.
pub(super) fn has_raw_capability() -> bool {
    is_capable(rustix::thread::CapabilitySet::NET_RAW)
}

/// Refuses handles of no object, or of an object of another kind: Linux checks handles before values.
fn check_handles(kernel: &Kernel, call: &Call<'_>) -> Result<()> {
    let file = call.file;
    if let Some(handle) = call.handle_if(UVERBS_ATTR_CREATE_QP_PD_HANDLE) {
        kernel.pd(file, handle)?;
    }
    for id in [UVERBS_ATTR_CREATE_QP_SEND_CQ_HANDLE, UVERBS_ATTR_CREATE_QP_RECV_CQ_HANDLE] {
        if let Some(handle) = call.handle_if(id) {
            kernel.cq(file, handle)?;
        }
    }
    if let Some(handle) = call.handle_if(UVERBS_ATTR_CREATE_QP_SRQ_HANDLE) {
        kernel.srq(file, handle)?;
    }
    Ok(())
}

/// The formats of the timestamps of sends and of receives: `get_qp_ts_format`, and for raw packets `get_sq_ts_format`
/// and `get_rq_ts_format`.
fn timestamp_formats(kernel: &mut Kernel, file: FileId, asked: &Asked) -> Result<[u64; 2]> {
    const FREE_RUNNING: u64 = 0;
    const REAL_TIME: u64 = 2;
    let (driver, _) = kernel.driver(file)?;
    let format = |cq: u32| match driver.cqs.get(&cq).is_some_and(|cq| cq.real_time) {
        true if driver.limits.has_real_time => Ok(REAL_TIME),
        true => Err(Errno::OPNOTSUPP),
        false => Ok(FREE_RUNNING),
    };
    match asked.kind {
        // The driver's own queue, which nobody sees.
        Kind::XrcTarget => Ok([FREE_RUNNING; 2]),
        Kind::XrcInitiator => Ok([format(asked.send_cq)?; 2]),
        kind => {
            let formats = [format(asked.send_cq)?, format(asked.recv_cq)?];
            let mixes = formats[0] != formats[1] && kind != Kind::RawPacket;
            if mixes { Err(Errno::OPNOTSUPP) } else { Ok(formats) }
        }
    }
}

/// Reads and checks the request.
fn ask(kernel: &mut Kernel, call: &Call<'_>, kind: Kind) -> Result<Asked> {
    let driver_part: mlx5_ib_create_qp = call.driver()?;
    let cap = call.input_if(UVERBS_ATTR_CREATE_QP_CAP)?.unwrap_or_default();
    let flags = call.u64_if(UVERBS_ATTR_CREATE_QP_FLAGS).unwrap_or(0);
    let flags = u32::try_from(flags).ok().and_then(ib_uverbs_qp_create_flags::from_bits);
    let flags = flags.ok_or(Errno::INVAL)?;
    let of_packets = ib_uverbs_qp_create_flags::IB_UVERBS_QP_CREATE_SCATTER_FCS
        | ib_uverbs_qp_create_flags::IB_UVERBS_QP_CREATE_CVLAN_STRIPPING;
    if kind != Kind::RawPacket && flags.intersects(of_packets) {
        return Err(Errno::INVAL);
    }
    let mut asked = Asked {
        kind,
        driver_part,
        cap,
        flags,
        pd: 0,
        send_cq: 0,
        recv_cq: 0,
        srq: None,
        xrcd: None,
        timestamps: [0; 2],
        uses: Vec::new(),
    };
    let file = call.file;
    let mut used = |id: u16| {
        let handle = call.handle_if(id)?;
        asked.uses.push(handle);
        Some(handle)
    };
    if kind == Kind::XrcTarget {
        let xrcd = used(UVERBS_ATTR_CREATE_QP_XRCD_HANDLE).ok_or(Errno::INVAL)?;
        asked.xrcd = Some(kernel.xrcd(file, xrcd)?);
        return Ok(asked);
    }
    let pd = used(UVERBS_ATTR_CREATE_QP_PD_HANDLE).ok_or(Errno::INVAL)?;
    let send = used(UVERBS_ATTR_CREATE_QP_SEND_CQ_HANDLE).ok_or(Errno::INVAL)?;
    let recv = used(UVERBS_ATTR_CREATE_QP_RECV_CQ_HANDLE);
    let srq = used(UVERBS_ATTR_CREATE_QP_SRQ_HANDLE);
    asked.pd = kernel.pd(file, pd)?;
    asked.send_cq = kernel.cq(file, send)?;
    asked.recv_cq = recv.map_or(Ok(asked.send_cq), |recv| kernel.cq(file, recv))?;
    if kind == Kind::XrcInitiator {
        if cap.max_recv_wr != 0 || srq.is_some() {
            return Err(Errno::INVAL);
        }
    } else if let Some(handle) = srq {
        let number = kernel.srq(file, handle)?;
        let (driver, _) = kernel.driver(file)?;
        if driver.srqs.get(&number).is_some_and(|srq| srq.is_xrc) {
            return Err(Errno::INVAL);
        }
        asked.srq = Some(number);
    }
    let (sends, receives) = (driver_part.sq_wqe_count, driver_part.rq_wqe_count);
    // As `set_user_buf_size` and `set_rq_size`.
    let is_power = |count: u32| count == 0 || count.is_power_of_two();
    let limits = kernel.limits(file)?;
    if sends > limits.wqes || receives > limits.wqes || !is_power(sends) || !is_power(receives) {
        return Err(Errno::INVAL);
    }
    if cap.max_recv_wr > limits.wqes || driver_part.rq_wqe_shift > MAX_RECEIVE_SHIFT {
        return Err(Errno::INVAL);
    }
    Ok(asked)
}

/// Ranges that are lent: where they begin, their bytes, and whether the device writes.
type Ranges = Vec<(u64, u64, bool)>;

/// The command that creates a queue pair, and the ranges that it lends to the device.
fn command(kernel: &mut Kernel, file: FileId, asked: &Asked) -> Result<(Vec<u8>, Ranges)> {
    let Asked { kind, driver_part, .. } = asked;
    let (driver, switch) = kernel.driver(file)?;
    let mut command = input::<create_qp_in>(opcode::CREATE_QP);
    command.set(create_qp_in::ece, driver_part.ece_options.into());
    let mut context = command.sub_mut(create_qp_in::qpc);
    context.set(qpc::st, kind.service_type());
    context.set(qpc::user_index, driver_part.uidx.into());
    context.set(qpc::pm_state, 3);
    if asked.flags.contains(ib_uverbs_qp_create_flags::IB_UVERBS_QP_CREATE_BLOCK_MULTICAST_LOOPBACK)
    {
        context.set(qpc::block_lb_mc, 1);
    }
    if *kind == Kind::XrcTarget {
        let reserved = driver.reserved(switch)?;
        for (field, value) in [
            (qpc::pd, reserved.pd),
            (qpc::rq_type, 1),
            (qpc::no_sq, 1),
            (qpc::cqn_snd, reserved.cq),
            (qpc::cqn_rcv, reserved.cq),
            (qpc::srqn_rmpn_xrqn, reserved.srq),
            (qpc::xrcd, asked.xrcd.unwrap_or(reserved.xrcd)),
        ] {
            context.set(field, value.into());
        }
        return Ok((command.into_inner(), Vec::new()));
    }
    let receives = u64::from(driver_part.rq_wqe_count) << driver_part.rq_wqe_shift;
    let bytes = receives + u64::from(driver_part.sq_wqe_count) * WQEBB;
    let log = |count: u32| u64::from(count.checked_ilog2().unwrap_or(0));
    // Of an own receive queue, a shared one, none.
    let rq_type = match asked.srq {
        Some(_) => 1,
        None if driver_part.rq_wqe_count == 0 => 3,
        None => 0,
    };
    for (field, value) in [
        (qpc::pd, asked.pd.into()),
        (qpc::rq_type, rq_type),
        (qpc::srqn_rmpn_xrqn, asked.srq.unwrap_or(0).into()),
        (qpc::log_rq_size, log(driver_part.rq_wqe_count)),
        (qpc::log_rq_stride, driver_part.rq_wqe_shift.saturating_sub(4).into()),
        (qpc::log_sq_size, log(driver_part.sq_wqe_count)),
        (qpc::no_sq, (driver_part.sq_wqe_count == 0).into()),
        (qpc::uar_page, driver_part.bfreg_index.into()),
        (qpc::cqn_snd, asked.send_cq.into()),
        (qpc::cqn_rcv, asked.recv_cq.into()),
        (qpc::dbr_addr, driver_part.db_addr),
        (qpc::ts_format, asked.timestamps[0]),
    ] {
        context.set(field, value);
    }
    if *kind == Kind::XrcInitiator {
        let reserved = driver.reserved(switch)?;
        context.set(qpc::cqn_rcv, reserved.cq.into());
        context.set(qpc::xrcd, reserved.xrcd.into());
        context.set(qpc::srqn_rmpn_xrqn, reserved.srq.into());
    }
    let (page_offset, log_page_size) = quantized_offset(driver_part.buf_addr, 6)?;
    context.set(qpc::page_offset, page_offset);
    context.set(qpc::log_page_size, log_page_size);
    scatter_to_cqes(driver, asked, &mut context);
    let mut command = command.into_inner();
    append_pages(&mut command, driver_part.buf_addr, bytes, log_page_size);
    let ranges = vec![(driver_part.buf_addr, bytes, true), (driver_part.db_addr, RECORD, true)];
    Ok((command, ranges))
}

/// Makes the device scatter short data to the CQE, as `configure_responder_scat_cqe` and
/// `configure_requester_scat_cqe`.
fn scatter_to_cqes(driver: &Driver, asked: &Asked, context: &mut Bits<qpc, &mut [u8]>) {
    let flags = mlx5_qp_flags::from_bits_retain(asked.driver_part.flags);
    if !flags.contains(mlx5_qp_flags::MLX5_QP_FLAG_SCATTER_CQE) {
        return;
    }
    let is_long = |cq: u32| driver.cqs.get(&cq).is_some_and(|cq| cq.cqe_size == 128);
    if matches!(asked.kind, Kind::Rc | Kind::Uc) {
        context.set(qpc::cs_res, if is_long(asked.recv_cq) { 2 } else { 1 });
    }
    let all = asked.flags.contains(ib_uverbs_qp_create_flags::IB_UVERBS_QP_CREATE_SQ_SIG_ALL);
    let allowed = flags.contains(mlx5_qp_flags::MLX5_QP_FLAG_ALLOW_SCATTER_CQE);
    if asked.kind == Kind::Rc && (all || allowed) {
        context.set(qpc::cs_req, if is_long(asked.send_cq) { 0x22 } else { 0x11 });
    }
}

/// Opens the XRC target of another context.
fn open(kernel: &mut Kernel, call: &mut Call<'_>) -> Result<()> {
    let request: ib_uverbs_open_qp = call.core()?;
    let xrcd = kernel.xrcd(call.file, request.pd_handle).map_err(|_| Errno::INVAL)?;
    let number = request.qpn;
    let (driver, _) = kernel.driver(call.file)?;
    let is_it = |qp: &Qp| qp.kind == Kind::XrcTarget && qp.xrcd == Some(xrcd);
    if Kind::new(request.qp_type.into()) != Ok(Kind::XrcTarget)
        || !driver.qps.get(&number).is_some_and(is_it)
    {
        return Err(Errno::INVAL);
    }
    let (driver, _) = kernel.driver(call.file)?;
    let opener = driver.new_opener();
    if let Some(qp) = driver.qps.get_mut(&number) {
        // Events go to the creator alone.
        qp.openers.insert(opener, None);
    }
    let object = Object::Qp { number, opener };
    let qp_handle = kernel.add(call.file, object, &[request.pd_handle])?;
    call.respond(&ib_uverbs_create_qp_resp { qp_handle, qpn: number, ..Default::default() });
    Ok(())
}

/// The state of a queue pair, from firmware's number.
fn state_of(firmware: u64) -> u8 {
    match firmware {
        0 => RESET,
        1 => INIT,
        2 => RTR,
        3 => RTS,
        4 => SQE,
        5 => SQD,
        _ => ERR,
    }
}

/// The context of a queue pair, as firmware returns it.
type Context = Bits<qpc, Vec<u8>>;

impl Driver {
    /// Queries the context of a queue pair, and keeps its state. A raw packet queue pair has no context.
    fn see(&mut self, switch: &mut super::Switch, number: u32) -> Result<(u8, Option<Context>)> {
        let qp = self.qps.get(&number).ok_or(Errno::INVAL)?;
        let (state, context) = match &qp.raw {
            Some(raw) => (raw.state(self, switch, qp.state)?, None),
            None => {
                let mut command = input::<query_qp_in>(opcode::QUERY_QP);
                command.set(query_qp_in::qpn, number.into());
                let answer = self.execute(switch, &command.into_inner())?;
                let answer = Bits::<query_qp_out, _>::new(answer);
                let context = Bits::new(answer.sub(query_qp_out::qpc).bytes().to_vec());
                (state_of(context.get(qpc::state)), Some(context))
            }
        };
        self.qps.entry(number).and_modify(|qp| qp.state = state);
        Ok((state, context))
    }
}

fn modify(kernel: &mut Kernel, call: &mut Call<'_>) -> Result<()> {
    let request: ib_uverbs_modify_qp = call.core()?;
    if !STANDARD.contains(Mask::from_bits_retain(request.attr_mask)) {
        return Err(Errno::OPNOTSUPP);
    }
    change(kernel, call, request)
}

fn modify_ex(kernel: &mut Kernel, call: &mut Call<'_>) -> Result<()> {
    let request: ib_uverbs_ex_modify_qp = call.core()?;
    let known = STANDARD | Mask::IB_QP_RATE_LIMIT;
    if !known.contains(Mask::from_bits_retain(request.base.attr_mask)) {
        return Err(Errno::OPNOTSUPP);
    }
    change(kernel, call, request.base)?;
    let response_length = size_of::<ib_uverbs_ex_modify_qp_resp>() as u32;
    call.respond(&ib_uverbs_ex_modify_qp_resp { comp_mask: 0, response_length });
    Ok(())
}

/// Describes the queue pair that a call changes, and the state that it asks for.
pub(super) fn changed(kernel: &Kernel, call: &Call<'_>, verb: Verb) -> Option<String> {
    if verb != Verb::ModifyQp {
        return None;
    }
    let request: ib_uverbs_modify_qp = call.core().ok()?;
    let object = kernel.object(call.file, request.qp_handle).ok()?;
    const NAMES: [&str; 7] = ["RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR"];
    let given = Mask::from_bits_retain(request.attr_mask).contains(Mask::IB_QP_STATE);
    Some(match NAMES.get(usize::from(request.qp_state)).filter(|_| given) {
        Some(state) => format!("{object} to {state}"),
        None => object.to_string(),
    })
}

/// The attributes of a type, as `modify_qp_mask`: an end of XRC ignores those of the other end.
fn mask_of(kind: Kind, given: u32) -> Mask {
    let given = Mask::from_bits_retain(given);
    match kind {
        Kind::XrcInitiator => given - Mask::IB_QP_MAX_DEST_RD_ATOMIC - Mask::IB_QP_MIN_RNR_TIMER,
        Kind::XrcTarget => {
            given - Mask::IB_QP_MAX_QP_RD_ATOMIC - Mask::IB_QP_RETRY_CNT - Mask::IB_QP_RNR_RETRY
        }
        _ => given,
    }
}

/// The refusals of `modify_qp` of `core/uverbs_cmd.c` and of `_ib_modify_qp`.
fn check_in_core(
    kernel: &Kernel,
    qp_device: usize,
    qp: &Qp,
    new: &ib_uverbs_modify_qp,
) -> Result<()> {
    let driver = &kernel.drivers[qp_device];
    let (gids, is_infiniband) = (driver.interface.gids.len(), driver.infiniband.is_some());
    /// The bit of a key that only the privileged may use.
    const PRIVILEGED: u32 = 1 << 31;
    let given = Mask::from_bits_retain(new.attr_mask);
    if given.contains(Mask::IB_QP_PORT) && new.port_num != 1 {
        return Err(Errno::INVAL);
    }
    if given.contains(Mask::IB_QP_AV) {
        if new.dest.port_num != 1 || new.dest.is_global == 0 && !is_infiniband {
            // RoCE has no addresses but global ones.
            return Err(Errno::INVAL);
        }
        if new.dest.is_global != 0 && usize::from(new.dest.sgid_index) >= gids {
            return Err(Errno::INVAL);
        }
        if qp.kind != Kind::Ud && !is_infiniband {
            kernel.resolve_from(qp_device, new.dest.sgid_index, new.dest.dgid)?;
        }
    }
    if given.contains(Mask::IB_QP_ALT_PATH) && new.alt_port_num != 1 {
        return Err(Errno::INVAL);
    }
    let states = [
        given.contains(Mask::IB_QP_STATE).then_some(new.qp_state),
        given.contains(Mask::IB_QP_CUR_STATE).then_some(new.cur_qp_state),
    ];
    if states.into_iter().flatten().any(|state| state > ERR) {
        return Err(Errno::INVAL);
    }
    let asks = given.contains(Mask::IB_QP_QKEY) && new.qkey & PRIVILEGED != 0;
    if asks && !has_raw_capability() { Err(Errno::PERM) } else { Ok(()) }
}

/// The refusals of `mlx5_ib_modify_qp`.
fn check_in_driver(
    qp: &Qp,
    new: &ib_uverbs_modify_qp,
    given: Mask,
    from: u8,
    to: u8,
    driver: &Driver,
) -> Result<()> {
    let limits = driver.limits;
    let above = |flag: Mask, value: u8, most: u8| given.contains(flag) && value > most;
    let is_bad = !states::is_ok(qp.kind, from, to, given)
        || given.contains(Mask::IB_QP_PKEY_INDEX) && new.pkey_index >= PKEYS
        || above(Mask::IB_QP_MAX_QP_RD_ATOMIC, new.max_rd_atomic, limits.rd_atomic)
        || above(Mask::IB_QP_MAX_DEST_RD_ATOMIC, new.max_dest_rd_atomic, limits.rd_atomic)
        || given.contains(Mask::IB_QP_PATH_MTU) && !(1..=5).contains(&new.path_mtu);
    if is_bad {
        return Err(Errno::INVAL);
    }
    // As `get_atomic_mode`.
    let atomics = Access::IB_UVERBS_ACCESS_REMOTE_ATOMIC.bits();
    let asks = given.contains(Mask::IB_QP_ACCESS_FLAGS) && new.qp_access_flags & atomics != 0;
    if asks && !limits.has_atomics { Err(Errno::OPNOTSUPP) } else { Ok(()) }
}

fn change(kernel: &mut Kernel, call: &mut Call<'_>, new: ib_uverbs_modify_qp) -> Result<()> {
    let number = kernel.qp(call.file, new.qp_handle)?;
    let driver_part: mlx5_ib_modify_qp = call.input_if(UVERBS_ATTR_UHW_IN)?.unwrap_or_default();
    let device = kernel.file(call.file)?.device;
    let driver = &kernel.drivers[device];
    let qp = driver.qps.get(&number).ok_or(Errno::INVAL)?;
    check_in_core(kernel, device, qp, &new)?;
    let given = mask_of(qp.kind, new.attr_mask);
    let from = match given.contains(Mask::IB_QP_CUR_STATE) {
        true => new.cur_qp_state,
        false => qp.state,
    };
    let to = if given.contains(Mask::IB_QP_STATE) { new.qp_state } else { from };
    check_in_driver(qp, &new, given, from, to, driver)?;
    if (from, to) == (RESET, RESET) {
        return Ok(());
    }
    // The driver knows no way to SQD, and so none from there.
    let op = match (from, to) {
        (_, RESET) => opcode::TO_RST_QP,
        (_, ERR) => opcode::TO_ERR_QP,
        (RESET, INIT) => opcode::RST2INIT_QP,
        (INIT, INIT) => opcode::INIT2INIT_QP,
        (INIT, RTR) => opcode::INIT2RTR_QP,
        (RTR, RTS) => opcode::RTR2RTS_QP,
        (RTS, RTS) => opcode::RTS2RTS_QP,
        (SQE, RTS) => opcode::SQERR2RTS_QP,
        _ => return Err(Errno::INVAL),
    };
    let attr = if op == opcode::TO_RST_QP { Default::default() } else { qp.attr };
    let (attr, optional) = merge(attr, &new, given);
    let kind = qp.kind;
    let (driver, switch) = kernel.driver(call.file)?;
    let known = mlx5_ib_modify_qp_mask::MLX5_IB_MODIFY_QP_OOO_DP;
    let given_parts = mlx5_ib_modify_qp_mask::from_bits(driver_part.comp_mask);
    let asks = given_parts.ok_or(Errno::OPNOTSUPP)?.contains(known);
    if asks && (!driver.limits.out_of_order || kind == Kind::RawPacket) {
        return Err(Errno::OPNOTSUPP);
    }
    let out_of_order = match driver.qps.get_mut(&number) {
        Some(qp) => {
            qp.out_of_order |= asks;
            qp.out_of_order && op == opcode::INIT2RTR_QP
        }
        None => false,
    };
    let mut response = mlx5_ib_modify_qp_resp {
        response_length: size_of::<mlx5_ib_modify_qp_resp>() as u32,
        ..Default::default()
    };
    if let Some(raw) = driver.qps.get(&number).and_then(|qp| qp.raw.clone()) {
        raw.modify(driver, switch, op)?;
    } else {
        let ece = driver_part.ece_options;
        let lag_port = if op == opcode::RST2INIT_QP { driver.next_lag_port() } else { 0 };
        let how = How { ece, lag_port, out_of_order };
        let command = transition(number, op, kind, &attr, optional, how);
        let answer = driver.execute(switch, &command)?;
        response.ece_options = Bits::<rst2init_qp_out, _>::new(answer).get32(rst2init_qp_out::ece);
    }
    if let Some(qp) = driver.qps.get_mut(&number) {
        qp.attr = attr;
        qp.state = to;
    }
    call.respond_driver(&response);
    Ok(())
}

/// The attributes after a change, and `opt_param_mask` of the PRM.
fn merge(
    mut attr: ib_uverbs_modify_qp,
    new: &ib_uverbs_modify_qp,
    given: Mask,
) -> (ib_uverbs_modify_qp, u64) {
    let mut optional = 0u64;
    macro_rules! take {
        ($($flag:ident, $bits:expr => $field:ident;)*) => {$(
            if given.contains(Mask::$flag) {
                attr.$field = new.$field;
                optional |= $bits;
            }
        )*};
    }
    take! {
        IB_QP_ACCESS_FLAGS, 1 << 1 | 1 << 2 | 1 << 3 => qp_access_flags;
        IB_QP_PKEY_INDEX, 1 << 4 => pkey_index;
        IB_QP_PORT, 1 << 16 => port_num;
        IB_QP_QKEY, 1 << 5 => qkey;
        IB_QP_AV, 1 << 7 => dest;
        IB_QP_PATH_MTU, 0 => path_mtu;
        IB_QP_TIMEOUT, 1 << 14 => timeout;
        IB_QP_RETRY_CNT, 1 << 12 => retry_cnt;
        IB_QP_RNR_RETRY, 1 << 13 => rnr_retry;
        IB_QP_RQ_PSN, 0 => rq_psn;
        IB_QP_MAX_QP_RD_ATOMIC, 1 << 8 => max_rd_atomic;
        IB_QP_MIN_RNR_TIMER, 1 << 6 => min_rnr_timer;
        IB_QP_SQ_PSN, 0 => sq_psn;
        IB_QP_MAX_DEST_RD_ATOMIC, 1 << 1 | 1 << 2 | 1 << 3 | 1 << 9 => max_dest_rd_atomic;
        IB_QP_DEST_QPN, 0 => dest_qp_num;
    }
    // 24 bits each.
    attr.rq_psn &= 0xff_ffff;
    attr.sq_psn &= 0xff_ffff;
    attr.dest_qp_num &= 0xff_ffff;
    (attr, optional)
}

/// The UDP source port of a queue pair, as `rdma_get_udp_sport`: of its flow label, or of both its numbers.
fn udp_source_port(flow_label: u32, local: u32, remote: u32) -> u16 {
    const FIRST: u32 = 0xc000;
    let label = match flow_label {
        0 => {
            let product = u64::from(local) * u64::from(remote);
            let product = product ^ product >> 20;
            (product ^ product >> 40) as u32
        }
        label => label,
    };
    (label & 0x3fff ^ label >> 14 & 0x3f | FIRST) as u16
}

/// Parts of a transition that are no attributes of the verbs.
#[derive(Clone, Copy, Debug)]
struct How {
    ece: u32,
    lag_port: u64,
    out_of_order: bool,
}

/// The command of a transition.
fn transition(
    number: u32,
    op: u16,
    kind: Kind,
    attr: &ib_uverbs_modify_qp,
    optional: u64,
    how: How,
) -> Vec<u8> {
    let log = |count: u8| u64::from(count.checked_ilog2().unwrap_or(0));
    // As `set_qp_access_flags`: a responder without reads and atomics takes writes alone.
    let access = match attr.max_dest_rd_atomic {
        0 => attr.qp_access_flags & Access::IB_UVERBS_ACCESS_REMOTE_WRITE.bits(),
        _ => attr.qp_access_flags,
    };
    let granted = |bit: u32| u64::from(access >> bit & 1);
    // Datagrams have the size of the largest MTU on any path.
    let mtu = if kind == Kind::Ud { 5 } else { attr.path_mtu };
    let mut command = input::<rst2init_qp_in>(op);
    command.set(rst2init_qp_in::qpn, number.into());
    command.set(rst2init_qp_in::opt_param_mask, optional);
    command.set(rst2init_qp_in::ece, how.ece.into());
    let mut context = command.sub_mut(rst2init_qp_in::qpc);
    for (field, value) in [
        (qpc::lag_tx_port_affinity, how.lag_port),
        (qpc::dp_ordering_1, how.out_of_order.into()),
        (qpc::dp_ordering_force, how.out_of_order.into()),
        (qpc::pm_state, 3),
        (qpc::rwe, granted(1)),
        (qpc::rre, granted(2)),
        (qpc::rae, granted(3)),
        (qpc::atomic_mode, 3),
        (qpc::q_key, attr.qkey.into()),
        (qpc::mtu, mtu.into()),
        (qpc::log_msg_max, 30),
        (qpc::remote_qpn, attr.dest_qp_num.into()),
        (qpc::next_rcv_psn, attr.rq_psn.into()),
        (qpc::log_rra_max, log(attr.max_dest_rd_atomic)),
        (qpc::min_rnr_nak, attr.min_rnr_timer.into()),
        (qpc::next_send_psn, attr.sq_psn.into()),
        (qpc::retry_count, attr.retry_cnt.into()),
        (qpc::rnr_retry, attr.rnr_retry.into()),
        (qpc::log_sra_max, log(attr.max_rd_atomic)),
    ] {
        context.set(field, value);
    }
    let mut path = context.sub_mut(qpc::primary_address_path);
    path.set_span(ads::rgid_rip, &attr.dest.dgid);
    for (field, value) in [
        (ads::rlid, attr.dest.dlid.into()),
        (ads::src_addr_index, attr.dest.sgid_index.into()),
        (ads::ack_timeout, attr.timeout.into()),
        (ads::vhca_port_num, 1),
        (ads::pkey_index, attr.pkey_index.into()),
        (ads::sl, attr.dest.sl.into()),
        (ads::udp_sport, udp_source_port(attr.dest.flow_label, number, attr.dest_qp_num).into()),
    ] {
        path.set(field, value);
    }
    command.into_inner()
}

fn query(kernel: &mut Kernel, call: &mut Call<'_>) -> Result<()> {
    let request: ib_uverbs_query_qp = call.core()?;
    let number = kernel.qp(call.file, request.qp_handle)?;
    let (driver, switch) = kernel.driver(call.file)?;
    let (state, context) = driver.see(switch, number)?;
    let qp = driver.qps.get(&number).ok_or(Errno::INVAL)?;
    let cap = &qp.cap;
    let response = ib_uverbs_query_qp_resp {
        max_send_wr: cap.max_send_wr,
        max_recv_wr: cap.max_recv_wr,
        max_send_sge: cap.max_send_sge,
        max_recv_sge: cap.max_recv_sge,
        max_inline_data: cap.max_inline_data,
        qp_state: state,
        cur_qp_state: state,
        port_num: 1,
        sq_sig_all: qp.signal_all.into(),
        ..Default::default()
    };
    call.respond(&match context {
        Some(context) => attributes(qp, &context, response),
        None => response,
    });
    Ok(())
}

/// The attributes as the device has them, which a request changes: `query_qp_attr`.
fn attributes(
    qp: &Qp,
    context: &Context,
    response: ib_uverbs_query_qp_resp,
) -> ib_uverbs_query_qp_resp {
    const REARM: u64 = 1;
    const MIGRATED: u64 = 3;
    let path = context.sub(qpc::primary_address_path);
    let right = |field, right: Access| {
        if context.get(field) == 1 { right } else { Access::empty() }
    };
    // The device has no bit for local writes.
    let access = right(qpc::rwe, Access::IB_UVERBS_ACCESS_REMOTE_WRITE)
        | right(qpc::rre, Access::IB_UVERBS_ACCESS_REMOTE_READ)
        | right(qpc::rae, Access::IB_UVERBS_ACCESS_REMOTE_ATOMIC);
    let port = path.get(ads::vhca_port_num) as u8;
    let has_path = qp.kind != Kind::Ud && port != 0;
    ib_uverbs_query_qp_resp {
        // The device does not keep all of a path.
        dest: if has_path { qp.attr.dest } else { Default::default() },
        qkey: context.get32(qpc::q_key),
        rq_psn: context.get32(qpc::next_rcv_psn),
        sq_psn: context.get32(qpc::next_send_psn),
        dest_qp_num: context.get32(qpc::remote_qpn),
        qp_access_flags: access.bits(),
        pkey_index: path.get(ads::pkey_index) as u16,
        path_mtu: context.get(qpc::mtu) as u8,
        path_mig_state: match context.get(qpc::pm_state) {
            MIGRATED => 0,
            REARM => 1,
            _ => 2,
        },
        max_rd_atomic: 1 << context.get(qpc::log_sra_max),
        max_dest_rd_atomic: 1 << context.get(qpc::log_rra_max),
        min_rnr_timer: context.get(qpc::min_rnr_nak) as u8,
        port_num: port,
        timeout: path.get(ads::ack_timeout) as u8,
        retry_cnt: context.get(qpc::retry_count) as u8,
        rnr_retry: context.get(qpc::rnr_retry) as u8,
        ..response
    }
}

pub(super) fn destroy(
    kernel: &mut Kernel,
    file: FileId,
    number: u32,
    opener: OpenerId,
) -> Result<()> {
    let (driver, switch) = kernel.driver(file)?;
    let Some(qp) = driver.qps.get(&number) else { return Ok(()) };
    if !qp.groups.is_empty() {
        return Err(Errno::BUSY);
    }
    let is_last = qp.openers.keys().eq([&opener]);
    if is_last {
        let mut raw = qp.raw.clone();
        let gone = match &mut raw {
            Some(raw) => raw.destroy(driver, switch),
            None => driver.execute_on(switch, opcode::DESTROY_QP, number).map(drop),
        };
        driver.qps.entry(number).and_modify(|qp| qp.raw = raw);
        gone?;
    }
    kernel.take_events_of(file)?;
    let (driver, _) = kernel.driver(file)?;
    let events = driver.qps.get_mut(&number).and_then(|qp| qp.openers.remove(&opener));
    end_reports(events.flatten());
    if is_last {
        driver.forget_events_of(Subject::Qp(number));
        driver.qps.remove(&number);
    }
    Ok(())
}

impl Kernel {
    /// The number of a queue pair.
    pub(crate) fn qp(&self, file: FileId, handle: u32) -> Result<u32> {
        match self.object(file, handle)? {
            Object::Qp { number, .. } => Ok(*number),
            _ => Err(Errno::INVAL),
        }
    }
}
