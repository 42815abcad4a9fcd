//! The kernel's attributes of a queue pair. Pairs with `ib_uverbs_query_qp_resp`.

use super::attr::PathMigState;
use super::{QpCaps, QpState};
use crate::access::Access;
use crate::address_vector::AddressVector;
use crate::error::Result;
use crate::file::File;
use crate::number::{Psn, Qkey, Qpn};
use crate::port::Mtu;
use crate::uverbs::invoke_write::write;
use uverbs_uapi::qp::{ib_qp_attr_mask, ib_uverbs_query_qp, ib_uverbs_query_qp_resp};
use uverbs_uapi::write::IB_USER_VERBS_CMD_QUERY_QP;

/// The attributes of a queue pair, returned by [`query`](crate::QpControl::query).
///
/// An attribute that no transition has set yet reads as the driver left it, mostly 0.
#[doc(alias = "ibv_qp_attr")]
#[doc(alias = "ibv_qp_init_attr")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct QpInfo {
    /// The state that the device has it in.
    pub state: QpState,
    /// The state that the driver believes current; the same on all known drivers.
    pub current_state: QpState,
    /// The largest payload of a packet.
    pub path_mtu: Mtu,
    /// The state of path migration.
    pub path_mig_state: PathMigState,
    /// The key that datagrams must carry.
    pub qkey: Qkey,
    /// The number of the next packet to be received.
    pub rq_psn: Psn,
    /// The number of the next packet to be sent.
    pub sq_psn: Psn,
    /// The peer's queue pair.
    pub dest_qpn: Qpn,
    /// The rights of the peer.
    pub access: Access,
    /// Index of the partition key.
    pub pkey_index: u16,
    /// Index of the alternate path's partition key.
    pub alternate_pkey_index: u16,
    /// Whether the send queue is still being drained, in state `SQD`.
    pub sq_draining: bool,
    /// Reads and atomics that may be under way from here.
    pub max_rd_atomic: u8,
    /// Reads and atomics of the peer that are answered at once.
    pub max_dest_rd_atomic: u8,
    /// Code of the wait asked of a peer that finds no receive posted; see
    /// [`QpAttr::min_rnr_timer`](crate::QpAttr::min_rnr_timer).
    pub min_rnr_timer: u8,
    /// The local port.
    pub port: u32,
    /// Wait for an acknowledgement, 4.096 µs · 2ⁿ; 0 is for ever.
    pub timeout: u8,
    /// Retries before giving up.
    pub retry_count: u8,
    /// Retries to a peer without receives; 7 is without end.
    pub rnr_retry: u8,
    /// The alternate path's port.
    pub alternate_port: u32,
    /// The alternate path's wait for an acknowledgement.
    pub alternate_timeout: u8,
    /// The path to the peer.
    pub path: AddressVector,
    /// The alternate path.
    pub alternate_path: AddressVector,
    /// The capacities that the queue pair was granted.
    pub caps: QpCaps,
    /// Whether every send completes, signaled or not.
    pub signal_all: bool,
}

/// Every attribute that the response has room for: those up to the last that the older commands know.
const ALL: u32 = 2 * ib_qp_attr_mask::IB_QP_DEST_QPN.bits() - 1;

impl QpInfo {
    /// Asks the kernel. `caps` are the capacities of the creation, if this process created the queue pair:
    /// the kernel reports them in the driver's own units.
    pub(crate) fn query(
        file: &File,
        verb: &'static str,
        handle: u32,
        caps: Option<QpCaps>,
    ) -> Result<QpInfo> {
        let mut resp = ib_uverbs_query_qp_resp::default();
        let request =
            ib_uverbs_query_qp { qp_handle: handle, attr_mask: ALL, ..Default::default() };
        file.execute(verb, write(IB_USER_VERBS_CMD_QUERY_QP, &request).response(&mut resp))?;
        let told = QpCaps {
            max_send_wr: resp.max_send_wr,
            max_recv_wr: resp.max_recv_wr,
            max_send_sge: resp.max_send_sge,
            max_recv_sge: resp.max_recv_sge,
            max_inline_data: resp.max_inline_data,
        };
        Ok(QpInfo::new(&resp, caps.unwrap_or(told)))
    }

    fn new(raw: &ib_uverbs_query_qp_resp, caps: QpCaps) -> Self {
        QpInfo {
            state: QpState(raw.qp_state),
            current_state: QpState(raw.cur_qp_state),
            path_mtu: Mtu(raw.path_mtu),
            path_mig_state: PathMigState(raw.path_mig_state),
            qkey: Qkey(raw.qkey),
            rq_psn: Psn(raw.rq_psn),
            sq_psn: Psn(raw.sq_psn),
            dest_qpn: Qpn(raw.dest_qp_num),
            access: Access::from_bits_retain(raw.qp_access_flags),
            pkey_index: raw.pkey_index,
            alternate_pkey_index: raw.alt_pkey_index,
            sq_draining: raw.sq_draining != 0,
            max_rd_atomic: raw.max_rd_atomic,
            max_dest_rd_atomic: raw.max_dest_rd_atomic,
            min_rnr_timer: raw.min_rnr_timer,
            port: raw.port_num.into(),
            timeout: raw.timeout,
            retry_count: raw.retry_cnt,
            rnr_retry: raw.rnr_retry,
            alternate_port: raw.alt_port_num.into(),
            alternate_timeout: raw.alt_timeout,
            path: AddressVector::of_qp_dest(&raw.dest),
            alternate_path: AddressVector::of_qp_dest(&raw.alt_dest),
            caps,
            signal_all: raw.sq_sig_all != 0,
        }
    }
}
