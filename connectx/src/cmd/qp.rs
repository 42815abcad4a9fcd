//! Commands of queue pairs, and their state transitions.

use uverbs_uapi::mlx5::prm::hca_cap::cmd_hca_cap;
use uverbs_uapi::mlx5::prm::opcode;
use uverbs_uapi::mlx5::prm::qpc::{
    ads, create_qp_in, create_qp_out, destroy_qp_in, qpc, query_qp_in, query_qp_out,
    rst2init_qp_in, rst2init_qp_out,
};
use uverbs_uapi::mlx5::prm::{Bits, Field, Layout};

use super::lag;
use crate::command_error::{CommandError, refuse};
use crate::device::Device;
use crate::fault::MessageFate;
use crate::hca_caps::HcaCaps;
use crate::object::in_flight::InFlight;
use crate::object::qp::{Qp, QpState, Service, take_ece, tell_ece};
use crate::object::receive_queue::{ReceiveQueue, WqType};
use crate::object::receiving::Receiving;
use crate::object::send_queue::SendQueue;
use crate::object::srq::SrqType;
use crate::object::table::{KERNEL, SHARED};
use crate::object::timestamp::TimestampFormat;
use crate::object::umem::{QueueLocation, QueueMemory};

/// The field that names the umem of the doorbell record. The kernel's description leaves it out.
const RECORD_UMEM: Field<qpc> = Field::new(0x720, 0x20);

/// `opt_param_mask` bits, `MLX5_QP_OPTPAR_*`, and the fields that each allows a transition to
/// change.
const OPTIONAL: &[(u64, &[Field<qpc>])] = &[
    (1 << 1, &[qpc::rre]),
    (1 << 2, &[qpc::rae, qpc::atomic_mode]),
    (1 << 3, &[qpc::rwe]),
    (1 << 5, &[qpc::q_key]),
    (1 << 6, &[qpc::min_rnr_nak]),
    (1 << 8, &[qpc::log_sra_max]),
    (1 << 9, &[qpc::log_rra_max]),
    (1 << 10, &[qpc::pm_state]),
    (1 << 12, &[qpc::retry_count]),
    (1 << 13, &[qpc::rnr_retry]),
    (OPTIONAL_LAG_PORT, &[qpc::lag_tx_port_affinity]),
];

const OPTIONAL_COUNTER_SET: u64 = 1 << 25;
const OPTIONAL_PKEY: u64 = 1 << 4;
const OPTIONAL_PATH: u64 = 1 << 7;
const OPTIONAL_ACK_TIMEOUT: u64 = 1 << 14;
const OPTIONAL_PORT: u64 = 1 << 16;
/// `MLX5_QPC_OPT_MASK_RTS2RTS_LAG_TX_PORT_AFFINITY`.
const OPTIONAL_LAG_PORT: u64 = 1 << 15;
/// Bit of `opt_param_mask_95_32`, `MLX5_QPC_OPT_MASK_32_UDP_SPORT`.
const FURTHER_UDP_PORT: u64 = 1 << 2;

/// Value of `deth_sqpn`: datagrams carry queue pair 1 as their source.
const GENERAL_SERVICES: u64 = 1;

/// `rq_type` values.
const RQ_OWN: u64 = 0;
const RQ_SHARED: u64 = 1;
const RQ_NONE: u64 = 3;

pub(crate) fn create_qp(
    device: &mut Device,
    uid: u32,
    input: &[u8],
) -> Result<Vec<u8>, CommandError> {
    let input = Bits::<create_qp_in, _>::new(input);
    let mut context = Bits::<qpc, _>::new(input.sub(create_qp_in::qpc).bytes().to_vec());
    // RST2INIT sets the Q counter.
    context.set(qpc::counter_set_id, 0);
    let service = Service::new(context.get(qpc::st))?;
    let kernel = matches!(uid, KERNEL | SHARED);
    if !kernel && matches!(service, Service::Umr | Service::Smi | Service::Gsi) {
        return refuse!(BadParam, "context {uid} may not have a QP of service {service:?}");
    }
    if !kernel && context.is_set(qpc::fre) {
        return refuse!(BadParam, "context {uid} may not create a QP with fre");
    }
    if !kernel && context.get(qpc::deth_sqpn) == GENERAL_SERVICES {
        return refuse!(BadParam, "context {uid} may not send as QP 1");
    }
    if context.is_set(qpc::wq_signature) {
        return refuse!(BadParam, "WQE signatures are not modelled");
    }
    TimestampFormat::new(context.get(qpc::ts_format), &device.options)?;
    let (log_rq, log_stride) =
        (context.get32(qpc::log_rq_size), context.get32(qpc::log_rq_stride) + 4);
    let rq_type = context.get(qpc::rq_type);
    let rq_bytes = if rq_type == RQ_OWN { 1u64 << (log_rq + log_stride) } else { 0 };
    let sq_bytes =
        if context.is_set(qpc::no_sq) { 0 } else { 64u64 << context.get(qpc::log_sq_size) };
    let srqn = match rq_type {
        RQ_OWN | RQ_NONE => None,
        RQ_SHARED => Some(context.get32(qpc::srqn_rmpn_xrqn)),
        other => return refuse!(BadParam, "rq_type {other} is not modelled"),
    };
    let pd = context.get32(qpc::pd);
    let uar = context.get32(qpc::uar_page);
    // A UMR QP gets its PD at RST2INIT.
    if service != Service::Umr || pd != 0 {
        device.objects.pds.check_use(uid, pd)?;
    }
    // The driver lends its own CQ and SRQ to queue pairs that have none.
    for cqn in [context.get32(qpc::cqn_snd), context.get32(qpc::cqn_rcv)] {
        device.objects.cqs.check_use_or_kernels(uid, cqn)?;
    }
    if sq_bytes > 0 {
        device.objects.uars.check_use_or_kernels(uid, uar)?;
    }
    if service == Service::Xrc {
        device.objects.xrcds.check_use_or_kernels(uid, context.get32(qpc::xrcd))?;
    }
    if let Some(srqn) = srqn {
        device.objects.srqs.check_use_or_kernels(uid, srqn)?;
        // The CQEs of an XRC SRQ go to the CQ of the SRQ, which is not a CQ of this queue pair.
        let is_xrc = matches!(device.objects.srqs.get(srqn)?.srq_type, SrqType::Xrc { .. });
        if is_xrc && service != Service::Xrc {
            return refuse!(BadResource, "SRQ {srqn:#x} is only for XRC queue pairs");
        }
    }
    device.objects.qps.check_room()?;
    let QueueMemory { buffer, doorbell_record, umems } = device.objects.queue_memory(
        uid,
        &QueueLocation {
            queue: input.is_set(create_qp_in::wq_umem_valid).then(|| {
                (input.get32(create_qp_in::wq_umem_id), input.get(create_qp_in::wq_umem_offset))
            }),
            doorbell_record_umem: context
                .is_set(qpc::dbr_umem_valid)
                .then(|| context.get32(RECORD_UMEM)),
            doorbell_record_address: context.get(qpc::dbr_addr),
            is_written: false,
            log_page_size: context.get(qpc::log_page_size),
            page_offset: context.get(qpc::page_offset),
            len: rq_bytes + sq_bytes,
            pages: input.tail(create_qp_in::pas),
        },
    )?;
    let rq = (rq_type == RQ_OWN).then(|| {
        ReceiveQueue::new(buffer.clone(), log_rq, log_stride, WqType::Cyclic, doorbell_record)
    });
    let sq = (sq_bytes > 0).then(|| {
        SendQueue::new(buffer, rq_bytes, context.get32(qpc::log_sq_size), doorbell_record + 4)
    });
    let qp = Qp {
        umems,
        service,
        state: QpState::Reset,
        context,
        sq,
        rq,
        srqn,
        pd,
        uar,
        in_flight: InFlight::default(),
        fate: MessageFate::Delivered,
        receiving: Receiving::default(),
        late_receive_check: None,
        late_receive_checks: 0,
        last_wqe_reported: false,
        ece: 0,
    };
    hold_for_qp(device, &qp, true);
    let number = device.objects.qps.insert_owned(uid, qp)?;
    let mut out = Bits::<create_qp_out, _>::new(vec![0; create_qp_out::SIZE]);
    out.set(create_qp_out::qpn, number.into());
    out.set(create_qp_out::ece, tell_ece(input.get32(create_qp_in::ece)).into());
    Ok(out.into_inner())
}

/// Holds or releases every object that a queue pair uses. The caller has checked that all of them
/// exist.
fn hold_for_qp(device: &mut Device, qp: &Qp, hold: bool) {
    macro_rules! count {
        ($table:ident, $number:expr) => {
            if !hold {
                device.objects.$table.release($number);
            } else if let Err(refused) = device.objects.$table.hold($number) {
                log::error!("{refused}");
            }
        };
    }
    if qp.pd != 0 {
        count!(pds, qp.pd);
    }
    count!(cqs, qp.send_cq());
    count!(cqs, qp.receive_cq());
    if qp.sq.is_some() {
        count!(uars, qp.uar);
    }
    if qp.service == Service::Xrc {
        count!(xrcds, qp.context.get32(qpc::xrcd));
    }
    if let Some(srqn) = qp.srqn {
        count!(srqs, srqn);
    }
    let counter_set = qp.context.get32(qpc::counter_set_id);
    if counter_set != 0 {
        count!(q_counters, counter_set);
    }
}

/// Ends the requests of a queue pair that is reset or destroyed.
fn end_requests(device: &mut Device, number: u32) {
    device.cancel_late_receive_check(number);
    device.transport(|endpoint, _| endpoint.destroy(number));
    device.link.lose_held(number);
    device.forget_requests(number);
}

pub(crate) fn destroy_qp(
    device: &mut Device,
    uid: u32,
    input: &[u8],
) -> Result<Vec<u8>, CommandError> {
    let number = Bits::<destroy_qp_in, _>::new(input).get32(destroy_qp_in::qpn);
    device.objects.qps.owned_mut(uid, number)?;
    // A member of a multicast group stays, and goes on.
    let qp = device.objects.qps.remove(number)?;
    if let Some(due) = qp.late_receive_check {
        device.late_receive_timers.remove(&(due, number));
    }
    end_requests(device, number);
    hold_for_qp(device, &qp, false);
    device.objects.release_umems(&qp.umems);
    Ok(vec![])
}

pub(crate) fn modify_qp(
    device: &mut Device,
    op: u16,
    uid: u32,
    input: &[u8],
) -> Result<Vec<u8>, CommandError> {
    use QpState::{Error, Init, ReadyToReceive, ReadyToSend, Reset, SendError};
    let input = Bits::<rst2init_qp_in, _>::new(input);
    let number = input.get32(rst2init_qp_in::qpn);
    let (from, to): (&[QpState], QpState) = match op {
        opcode::RST2INIT_QP => (&[Reset], Init),
        opcode::INIT2INIT_QP => (&[Init], Init),
        opcode::INIT2RTR_QP => (&[Init], ReadyToReceive),
        opcode::RTR2RTS_QP => (&[ReadyToReceive], ReadyToSend),
        opcode::RTS2RTS_QP => (&[ReadyToSend], ReadyToSend),
        opcode::SQERR2RTS_QP => (&[SendError], ReadyToSend),
        opcode::TO_ERR_QP => (&[Reset, Init, ReadyToReceive, ReadyToSend, SendError, Error], Error),
        _ => (&[Reset, Init, ReadyToReceive, ReadyToSend, SendError, Error], Reset),
    };
    let qp = device.objects.qps.owned_mut(uid, number)?;
    if !from.contains(&qp.state) {
        return refuse!(BadQpState, "QP {number:#x} is in {:?}, not one of {from:?}", qp.state);
    }
    let as_general = input.sub(rst2init_qp_in::qpc).get(qpc::deth_sqpn) == GENERAL_SERVICES;
    if op == opcode::RST2INIT_QP && as_general && !matches!(uid, KERNEL | SHARED) {
        return refuse!(BadParam, "context {uid} may not send as QP 1");
    }
    let mtu = input.sub(rst2init_qp_in::qpc).get(qpc::mtu);
    let connected = matches!(qp.service, Service::Rc | Service::Uc | Service::Xrc);
    if op == opcode::INIT2RTR_QP && connected && !(1..=5).contains(&mtu) {
        return refuse!(BadParam, "path MTU code {mtu}, valid codes are 1 to 5");
    }
    let further = check_ports(&device.caps, qp, op, &input)?;
    check_ordering(&device.caps, qp.service, op, &input)?;
    let late_pd = input.sub(rst2init_qp_in::qpc).get32(qpc::pd);
    let has_late_pd = op == opcode::RST2INIT_QP && qp.pd == 0 && late_pd != 0;
    if has_late_pd {
        device.objects.pds.check_use(uid, late_pd)?;
    }
    let new = input.sub(rst2init_qp_in::qpc);
    let optional = input.get(rst2init_qp_in::opt_param_mask);
    let before = device.objects.qps.owned_mut(uid, number)?.context.get32(qpc::counter_set_id);
    let counter_set = match to {
        Reset => 0,
        Init if op == opcode::RST2INIT_QP => new.get32(qpc::counter_set_id),
        _ if optional & OPTIONAL_COUNTER_SET != 0 => new.get32(qpc::counter_set_id),
        _ => before,
    };
    device.objects.switch_q_counter(uid, before, counter_set)?;
    if has_late_pd {
        device.objects.pds.hold(late_pd)?;
        device.objects.qps.owned_mut(uid, number)?.pd = late_pd;
    }
    let qp = device.objects.qps.owned_mut(uid, number)?;
    merge(qp, op, &new, optional);
    if further & FURTHER_UDP_PORT != 0 {
        copy_path(qp, &new, |path, new| path.set(ads::udp_sport, new.get(ads::udp_sport)));
    }
    qp.context.set(qpc::counter_set_id, counter_set.into());
    qp.set_state(to);
    match (op, input.get32(rst2init_qp_in::ece)) {
        (opcode::TO_RST_QP, _) => qp.ece = 0,
        // The other commands have no such field.
        (opcode::TO_ERR_QP | opcode::SQERR2RTS_QP, _) | (_, 0) => {}
        (_, asked) => qp.ece = take_ece(asked),
    }
    let mut out = Bits::<rst2init_qp_out, _>::new(vec![0; rst2init_qp_out::SIZE]);
    if !matches!(op, opcode::TO_RST_QP | opcode::TO_ERR_QP | opcode::SQERR2RTS_QP) {
        out.set(rst2init_qp_out::ece, qp.ece.into());
    }
    match to {
        Reset => end_requests(device, number),
        _ => device.modify_transport(number),
    }
    match to {
        // The device now sends or flushes WQEs that were posted before.
        ReadyToSend | Error => device.schedule(number),
        _ => {}
    }
    Ok(out.into_inner())
}

/// Checks the UDP source port and the port of a LAG that a transition sets; returns `opt_param_mask_95_32`.
fn check_ports(
    caps: &HcaCaps,
    qp: &Qp,
    op: u16,
    input: &Bits<rst2init_qp_in, &[u8]>,
) -> Result<u64, CommandError> {
    let further = match op {
        opcode::RTS2RTS_QP => input.get(rst2init_qp_in::opt_param_mask_95_32),
        _ => 0,
    };
    if further & !FURTHER_UDP_PORT != 0 {
        return refuse!(
            BadParam,
            "optional parameters {further:#x} of the second mask are not modelled"
        );
    }
    let connected = matches!(qp.service, Service::Rc | Service::Uc);
    let has_ports = caps.general(cmd_hca_cap::rts2rts_qp_udp_sport) != 0;
    if further & FURTHER_UDP_PORT != 0 && !(connected && has_ports) {
        return refuse!(BadParam, "a QP of service {:?} has no UDP source port", qp.service);
    }
    let changes_lag_port = op == opcode::RTS2RTS_QP
        && input.get(rst2init_qp_in::opt_param_mask) & OPTIONAL_LAG_PORT != 0;
    if changes_lag_port && caps.general(cmd_hca_cap::rts2rts_lag_tx_port_affinity) == 0 {
        return refuse!(BadParam, "the port of a LAG does not change in RTS2RTS_QP");
    }
    let sets_lag_port = op == opcode::RST2INIT_QP
        || input.get(rst2init_qp_in::opt_param_mask) & OPTIONAL_LAG_PORT != 0;
    let port = input.sub(rst2init_qp_in::qpc).get(qpc::lag_tx_port_affinity);
    if sets_lag_port {
        lag::check_port(caps, port)?;
    }
    Ok(further)
}

/// Checks placement out of order, which devices have by service.
fn check_ordering(
    caps: &HcaCaps,
    service: Service,
    op: u16,
    input: &Bits<rst2init_qp_in, &[u8]>,
) -> Result<(), CommandError> {
    let asks = input.sub(rst2init_qp_in::qpc).is_set(qpc::dp_ordering_1);
    if op != opcode::INIT2RTR_QP || !asks {
        return Ok(());
    }
    let has = match service {
        Service::Rc => caps.general(cmd_hca_cap::dp_ordering_ooo_all_rc),
        Service::Uc => caps.general(cmd_hca_cap::dp_ordering_ooo_all_uc),
        Service::Ud => caps.general(cmd_hca_cap::dp_ordering_ooo_all_ud),
        Service::Xrc => caps.general(cmd_hca_cap::dp_ordering_ooo_all_xrc),
        Service::Gsi | Service::Smi | Service::Umr => 0,
    };
    match has {
        0 => refuse!(BadParam, "a QP of service {service:?} has no placement out of order"),
        _ => Ok(()),
    }
}

pub(crate) fn query_qp(
    device: &mut Device,
    uid: u32,
    input: &[u8],
) -> Result<Vec<u8>, CommandError> {
    let number = Bits::<query_qp_in, _>::new(input).get32(query_qp_in::qpn);
    let psns = device.transport(|endpoint, _| endpoint.psns(number)).flatten();
    let qp = device.objects.qps.owned_mut(uid, number)?;
    let mut out = Bits::<query_qp_out, _>::new(vec![0; query_qp_out::SIZE]);
    out.set(query_qp_out::ece, qp.ece.into());
    out.set_sub(query_qp_out::qpc, qp.context.bytes());
    let mut context = out.sub_mut(query_qp_out::qpc);
    context.set(qpc::state, qp.state as u64);
    if let Some((send, receive)) = psns {
        context.set(qpc::next_send_psn, send.get().into());
        context.set(qpc::next_rcv_psn, receive.get().into());
    }
    if let Some(sq) = &qp.sq {
        context.set(qpc::hw_sq_wqebb_counter, sq.consumer_index().into());
    }
    Ok(out.into_inner())
}

fn copy(qp: &mut Qp, from: &Bits<qpc, &[u8]>, fields: &[Field<qpc>]) {
    for field in fields {
        qp.context.set(*field, from.get(*field));
    }
}

fn copy_path(
    qp: &mut Qp,
    from: &Bits<qpc, &[u8]>,
    change: impl Fn(&mut Bits<ads, &mut [u8]>, &Bits<ads, &[u8]>),
) {
    let new = from.sub(qpc::primary_address_path);
    change(&mut qp.context.sub_mut(qpc::primary_address_path), &new);
}

/// Copies the parameters that a transition requires, then the optional ones in its mask.
fn merge(qp: &mut Qp, op: u16, new: &Bits<qpc, &[u8]>, optional: u64) {
    match op {
        opcode::RST2INIT_QP => {
            copy(qp, new, &[qpc::pm_state, qpc::q_key, qpc::lag_tx_port_affinity]);
            copy(qp, new, &[qpc::rre, qpc::rwe, qpc::rae, qpc::atomic_mode, qpc::deth_sqpn]);
            copy_path(qp, new, |path, new| {
                path.set(ads::vhca_port_num, new.get(ads::vhca_port_num));
                path.set(ads::pkey_index, new.get(ads::pkey_index));
            });
        }
        opcode::INIT2RTR_QP => {
            let required = &[
                qpc::mtu,
                qpc::log_msg_max,
                qpc::remote_qpn,
                qpc::next_rcv_psn,
                qpc::log_rra_max,
                qpc::min_rnr_nak,
                // Data may be placed out of order, and is placed in order.
                qpc::dp_ordering_1,
                qpc::dp_ordering_force,
            ];
            copy(qp, new, required);
            copy_whole_path(qp, new);
        }
        opcode::RTR2RTS_QP => {
            let required = &[
                qpc::next_send_psn,
                qpc::retry_count,
                qpc::rnr_retry,
                qpc::log_sra_max,
                qpc::log_ack_req_freq,
            ];
            copy(qp, new, required);
            copy_path(qp, new, |path, new| {
                path.set(ads::ack_timeout, new.get(ads::ack_timeout));
            });
        }
        _ => {}
    }
    for (bit, fields) in OPTIONAL {
        if optional & bit != 0 {
            copy(qp, new, fields);
        }
    }
    if optional & OPTIONAL_PATH != 0 {
        copy_whole_path(qp, new);
    }
    for (bit, field) in [
        (OPTIONAL_PKEY, ads::pkey_index),
        (OPTIONAL_ACK_TIMEOUT, ads::ack_timeout),
        (OPTIONAL_PORT, ads::vhca_port_num),
    ] {
        if optional & bit != 0 {
            copy_path(qp, new, |path, new| path.set(field, new.get(field)));
        }
    }
}

/// Copies the address path except port, partition and timeout, which have mask bits of their own.
fn copy_whole_path(qp: &mut Qp, new: &Bits<qpc, &[u8]>) {
    let keep = [ads::vhca_port_num, ads::pkey_index, ads::ack_timeout];
    let old = qp.context.sub(qpc::primary_address_path).bytes().to_vec();
    let old = Bits::<ads, _>::new(old);
    let path = new.sub(qpc::primary_address_path);
    qp.context.set_sub(qpc::primary_address_path, path.bytes());
    let mut path = qp.context.sub_mut(qpc::primary_address_path);
    for field in keep {
        path.set(field, old.get(field));
    }
}
