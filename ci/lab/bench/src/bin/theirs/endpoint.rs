//! Queue pairs of theirs: how they are made and brought to the state in which they send.

use crate::abi::{AhAttr, Context, Cq, Opaque, Pd, Qp, QpAttr, QpCap, QpInitAttrEx, Srq, number};
use crate::verbs::{Made, Verbs};
use lab_bench::Failure;
use std::ptr::null_mut;

/// The key of datagrams.
pub(crate) const QKEY: u32 = 0x1111_1111;

/// How a queue pair is made.
pub(crate) struct Shape {
    pub(crate) cap: QpCap,
    pub(crate) srq: *mut Srq,
    pub(crate) qp_type: u32,
}

/// A small RC queue pair.
pub(crate) fn small(sends: u32) -> Shape {
    let cap = QpCap {
        max_send_wr: sends,
        max_recv_wr: 16,
        max_send_sge: 1,
        max_recv_sge: 1,
        max_inline_data: 0,
    };
    Shape { cap, srq: null_mut(), qp_type: number::QPT_RC }
}

/// Makes a queue pair that has both interfaces.
pub(crate) fn create(
    verbs: &Verbs,
    context: &Made<Context>,
    pd: &Made<Pd>,
    cqs: [*mut Cq; 2],
    shape: &Shape,
) -> Result<Made<Qp>, Failure> {
    let mut attr = attr(cqs, shape);
    attr.comp_mask = number::QP_INIT_ATTR_PD | number::QP_INIT_ATTR_SEND_OPS_FLAGS;
    attr.pd = pd.as_ptr();
    attr.send_ops_flags = match shape.qp_type {
        number::QPT_UD => number::SEND_OPS_DATAGRAM,
        _ => number::SEND_OPS_RELIABLE,
    };
    verbs.create_qp_ex(context, &mut attr)
}

/// Makes the target of an XRC connection, which has no queues.
pub(crate) fn create_target(
    verbs: &Verbs,
    context: &Made<Context>,
    xrcd: &Made<Opaque>,
) -> Result<Made<Qp>, Failure> {
    let shape = Shape { cap: QpCap::default(), srq: null_mut(), qp_type: number::QPT_XRC_RECV };
    let mut attr = attr([null_mut(); 2], &shape);
    attr.comp_mask = number::QP_INIT_ATTR_XRCD;
    attr.xrcd = xrcd.as_ptr();
    verbs.create_qp_ex(context, &mut attr)
}

/// The attributes of a queue pair without extensions.
pub(crate) fn attr(cqs: [*mut Cq; 2], shape: &Shape) -> QpInitAttrEx {
    QpInitAttrEx {
        qp_context: null_mut(),
        send_cq: cqs[0],
        recv_cq: cqs[1],
        srq: shape.srq,
        cap: shape.cap,
        qp_type: shape.qp_type,
        sq_sig_all: 0,
        comp_mask: 0,
        pd: null_mut(),
        xrcd: null_mut(),
        create_flags: 0,
        max_tso_header: 0,
        rwq_ind_tbl: null_mut::<Opaque>(),
        rx_hash_conf: [0; 3],
        source_qpn: 0,
        send_ops_flags: 0,
    }
}

/// The way to this port itself.
pub(crate) fn path(gid: (u8, [u8; 16])) -> AhAttr {
    let (sgid_index, dgid) = gid;
    AhAttr { dgid, sgid_index, hop_limit: 64, is_global: 1, port_num: 1, ..AhAttr::default() }
}

/// The number of a queue pair.
pub(crate) fn qpn(qp: &Made<Qp>) -> u32 {
    // SAFETY: it is not destroyed, and the number does not change.
    unsafe { (*qp.as_ptr()).qp_num }
}

/// Connects a reliable queue pair to another of this port.
pub(crate) fn connect(
    verbs: &Verbs,
    qp: &Made<Qp>,
    peer: u32,
    gid: (u8, [u8; 16]),
) -> Result<(), Failure> {
    use number::*;
    let attr = QpAttr {
        qp_state: QPS_INIT,
        port_num: 1,
        qp_access_flags: ACCESS_ALL,
        ..QpAttr::default()
    };
    verbs.modify_qp(qp, attr, ATTR_STATE | ATTR_PKEY_INDEX | ATTR_PORT | ATTR_ACCESS)?;
    let attr = QpAttr {
        qp_state: QPS_RTR,
        path_mtu: MTU_1024,
        dest_qp_num: peer,
        rq_psn: 7,
        max_dest_rd_atomic: 16,
        min_rnr_timer: 12,
        ah_attr: path(gid),
        ..QpAttr::default()
    };
    let mask = ATTR_STATE
        | ATTR_AV
        | ATTR_PATH_MTU
        | ATTR_DEST_QPN
        | ATTR_RQ_PSN
        | ATTR_MAX_DEST_RD_ATOMIC
        | ATTR_MIN_RNR_TIMER;
    verbs.modify_qp(qp, attr, mask)?;
    let attr = QpAttr {
        qp_state: QPS_RTS,
        sq_psn: 7,
        timeout: 14,
        retry_cnt: 7,
        rnr_retry: 7,
        max_rd_atomic: 16,
        ..QpAttr::default()
    };
    let mask = ATTR_STATE
        | ATTR_SQ_PSN
        | ATTR_TIMEOUT
        | ATTR_RETRY_CNT
        | ATTR_RNR_RETRY
        | ATTR_MAX_RD_ATOMIC;
    verbs.modify_qp(qp, attr, mask)
}

/// Makes a datagram queue pair ready to send.
pub(crate) fn activate(verbs: &Verbs, qp: &Made<Qp>) -> Result<(), Failure> {
    use number::*;
    let attr = QpAttr { qp_state: QPS_INIT, port_num: 1, qkey: QKEY, ..QpAttr::default() };
    verbs.modify_qp(qp, attr, ATTR_STATE | ATTR_PKEY_INDEX | ATTR_PORT | ATTR_QKEY)?;
    let attr = QpAttr { qp_state: QPS_RTR, ..QpAttr::default() };
    verbs.modify_qp(qp, attr, ATTR_STATE)?;
    let attr = QpAttr { qp_state: QPS_RTS, sq_psn: 7, ..QpAttr::default() };
    verbs.modify_qp(qp, attr, ATTR_STATE | ATTR_SQ_PSN)
}
