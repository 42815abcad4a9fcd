//! Brings the queue pair of a connection from `RESET` to `RTS` with the attributes that the kernel returns.
//! Pairs with `ucma_init_qp_attr` in `core/ucma.c` and `ib_cm_init_qp_attr` in `core/cm.c`.

use super::id::IdInner;
use super::param::Depths;
use crate::access::Access;
use crate::address_vector::{AddressVector, GlobalRoute};
use crate::error::{Error, Result};
use crate::number::{Gid, Psn, Qkey, Qpn};
use crate::port::Mtu;
use crate::qp::McastMembership;
use crate::qp::ece::EceState;
use crate::qp::{Ece, PathMigState, QpAttr, QpControl, QpState, QpType, WeakQpHandle};
use uverbs_uapi::ah::ib_uverbs_ah_attr;
use uverbs_uapi::qp::{ib_qp_attr_mask as Mask, ib_uverbs_qp_attr};

/// The queue pair of a connection, which the program may drop or reset at any time.
#[derive(Debug)]
pub(super) struct ConnectedQp {
    qp: WeakQpHandle,
    /// The queue pair's count of resets. After another reset it belongs to another connection, or to none.
    resets: u32,
}

/// The attributes of a connection's queue pair that the kernel does not return.
#[derive(Clone, Copy, Debug)]
pub(super) struct Negotiated {
    /// The peer's access rights, unless the queue pair has them already.
    pub(super) peer_rights: Option<Access>,
    /// The numbers of reads and atomics; without them those of the peer's answer apply.
    pub(super) depths: Option<Depths>,
    pub(super) min_rnr_timer: u8,
    /// See [`ConnectedQp::ece_in_common`].
    pub(super) ece_options: Option<u32>,
}

impl ConnectedQp {
    pub(super) fn of(qp: &QpControl) -> ConnectedQp {
        ConnectedQp { qp: qp.qp.downgrade(), resets: qp.qp.resets() }
    }

    fn control(&self, verb: &'static str) -> Result<QpControl> {
        let qp = self.qp.upgrade().ok_or_else(|| {
            Error::invalid(verb, "the queue pair was dropped; keep it until the handshake is over")
        })?;
        if qp.resets() != self.resets {
            let detail = "the queue pair was reset during the handshake: connect it again";
            return Err(Error::invalid(verb, detail));
        }
        Ok(QpControl { qp })
    }

    /// Brings the queue pair to `INIT`, or in `INIT` updates its attributes.
    pub(super) fn init(&self, verb: &'static str, id: &IdInner) -> Result<()> {
        let attr = translate(&id.qp_attr(verb, QpState::INIT)?);
        self.control(verb)?.modify(&attr).map_err(|error| error.in_verb(verb))
    }

    /// Brings a queue pair in `RESET` to `INIT`, and gives one in `INIT` the port and the partition key of the id, in
    /// place of another route's. Refuses one past `INIT`: it may belong to another connection.
    pub(super) fn init_if_reset(&self, verb: &'static str, id: &IdInner) -> Result<()> {
        match self.control(verb)?.state() {
            QpState::RESET | QpState::INIT => self.init(verb, id),
            state => {
                let detail = format!(
                    "the queue pair is in state {state}, and can be connected from RESET or INIT: reset it \
                     first"
                );
                Err(Error::invalid(verb, detail))
            }
        }
    }

    /// The access rights of the peer, which depend on its answer. Refuses a queue pair that has left `INIT`: another
    /// handshake took it further.
    pub(super) fn rights_of_peer(
        &self,
        verb: &'static str,
        id: &IdInner,
    ) -> Result<Option<Access>> {
        let state = self.control(verb)?.state();
        if state != QpState::INIT {
            let detail = format!(
                "the queue pair is in state {state}, and is connected from INIT: the program or another \
                 handshake changed it"
            );
            return Err(Error::invalid(verb, detail));
        }
        let raw = id.qp_attr(verb, QpState::INIT)?;
        let rights = Access::from_bits_retain(raw.qp_access_flags);
        Ok(has(&raw, Mask::IB_QP_ACCESS_FLAGS).then_some(rights))
    }

    /// Brings the queue pair from `INIT` to `RTS`. Of the negotiated attributes it gets only those that the kernel
    /// returns for its type.
    ///
    /// The change to `RTR` carries the ECE options to the device. So a handshake that fails leaves no options in the
    /// queue pair, and two handshakes of one queue pair do not mix their options.
    pub(super) fn ready(
        &self,
        verb: &'static str,
        id: &IdInner,
        agreed: &Negotiated,
    ) -> Result<()> {
        let Negotiated { peer_rights, depths, min_rnr_timer, ece_options } = *agreed;
        let raw = id.qp_attr(verb, QpState::RTR)?;
        let mut rtr = translate(&raw);
        if let Some(rights) = peer_rights {
            rtr = rtr.access(rights);
        }
        if let Some(depths) = depths.filter(|_| has(&raw, Mask::IB_QP_MAX_DEST_RD_ATOMIC)) {
            rtr = rtr.max_dest_rd_atomic(depths.responder_resources);
        }
        if has(&raw, Mask::IB_QP_MIN_RNR_TIMER) {
            rtr = rtr.min_rnr_timer(min_rnr_timer);
        }
        let qp = self.control(verb)?;
        qp.modify_with_ece(&rtr, ece_options).map_err(|error| error.in_verb(verb))?;
        let raw = id.qp_attr(verb, QpState::RTS)?;
        let mut rts = translate(&raw);
        if let Some(depths) = depths.filter(|_| has(&raw, Mask::IB_QP_MAX_QP_RD_ATOMIC)) {
            rts = rts.max_rd_atomic(depths.initiator_depth);
        }
        qp.modify(&rts).map_err(|error| error.in_verb(verb))
    }

    /// Brings a UD queue pair from `RESET` or `INIT` to `RTS`, from `RESET` with the connection manager's Q_Key. One
    /// past `INIT` may have other peers, and stays as it is.
    pub(super) fn ready_datagrams(&self, verb: &'static str, id: &IdInner) -> Result<()> {
        let qp = self.control(verb)?;
        match qp.state() {
            QpState::RESET => self.init(verb, id)?,
            QpState::INIT => {}
            QpState::ERR => {
                let detail = "the queue pair is in state ERR, and receives nothing: reset it first";
                return Err(Error::invalid(verb, detail));
            }
            _ => return Ok(()),
        }
        let rts = QpAttr::new().state(QpState::RTS).sq_psn(Psn(0));
        for attr in [QpAttr::new().state(QpState::RTR), rts] {
            qp.modify(&attr).map_err(|error| error.in_verb(verb))?;
        }
        Ok(())
    }

    /// The ECE options of the queue pair: those of its device, or those that it took; `None` if there are none.
    pub(super) fn ece(&self, verb: &'static str) -> Result<Option<Ece>> {
        Ok(self.control(verb)?.qp.ece().map(EceState::get))
    }

    /// The ECE options to carry to the device, which takes those that it supports: the peer's, or 0 if the peer's
    /// device has another vendor. `None` if this device has no options.
    pub(super) fn ece_in_common(
        &self,
        verb: &'static str,
        peers: Option<Ece>,
    ) -> Result<Option<u32>> {
        let of_vendor = |own: Ece| peers.filter(|peers| peers.vendor_id == own.vendor_id);
        Ok(self.ece(verb)?.map(|own| of_vendor(own).map_or(0, |peers| peers.options)))
    }

    /// Attaches the queue pair to a multicast group.
    pub(super) fn attach(&self, verb: &'static str, gid: Gid, lid: u16) -> Result<McastMembership> {
        self.control(verb)?.attach_mcast(gid, lid).map_err(|error| error.in_verb(verb))
    }

    /// Brings the queue pair to `ERR`, which flushes its requests. A queue pair that the program has dropped or reset
    /// since needs nothing: it may belong to another connection.
    pub(super) fn stop(&self) -> Result<()> {
        let Some(qp) = self.qp.upgrade().map(|qp| QpControl { qp }) else { return Ok(()) };
        if qp.qp.resets() != self.resets {
            return Ok(());
        }
        match qp.state() {
            QpState::RESET | QpState::ERR => Ok(()),
            _ => qp.modify(&QpAttr::new().state(QpState::ERR)),
        }
    }
}

/// Refuses a queue pair of another type than the id's.
pub(super) fn check_type(verb: &'static str, id: &IdInner, qp: &QpControl) -> Result<()> {
    let detail = match (qp.qp_type(), id.qp_type) {
        (has, wanted) if has == wanted => return Ok(()),
        (has, QpType::UD) => format!("a queue pair of type {has}; datagrams need one of type UD"),
        (QpType::UD, _) => {
            "a queue pair of type UD; datagrams need an id for that type, as those of the port space UDP are".to_owned()
        }
        (has, wanted) => format!(
            "a queue pair of type {has}, and an id for type {wanted}: name the type \
             where the id is made (`EventChannel::create_id`, or `qp_type` of a connector or listener)"
        ),
    };
    Err(Error::invalid(verb, detail))
}

/// Whether the kernel returned an attribute.
fn has(raw: &ib_uverbs_qp_attr, bit: Mask) -> bool {
    raw.qp_attr_mask & bit.bits() != 0
}

/// Whether the queue pair has a shared receive queue; the handshake tells the peer.
pub(super) fn has_srq(qp: &QpControl) -> bool {
    qp.qp.srq().is_some()
}

/// The kernel's attributes as a change of a queue pair.
fn translate(raw: &ib_uverbs_qp_attr) -> QpAttr {
    let mut attr = QpAttr::new();
    for bit in Mask::from_bits_truncate(raw.qp_attr_mask).iter() {
        attr = match bit {
            Mask::IB_QP_STATE => attr.state(QpState(raw.qp_state as u8)),
            Mask::IB_QP_ACCESS_FLAGS => attr.access(Access::from_bits_retain(raw.qp_access_flags)),
            Mask::IB_QP_PKEY_INDEX => attr.pkey_index(raw.pkey_index),
            Mask::IB_QP_PORT => attr.port(raw.port_num.into()),
            Mask::IB_QP_QKEY => attr.qkey(Qkey(raw.qkey)),
            Mask::IB_QP_AV => attr.path(path(&raw.ah_attr)),
            Mask::IB_QP_PATH_MTU => attr.path_mtu(Mtu(raw.path_mtu as u8)),
            Mask::IB_QP_TIMEOUT => attr.timeout(raw.timeout),
            Mask::IB_QP_RETRY_CNT => attr.retry_count(raw.retry_cnt),
            Mask::IB_QP_RNR_RETRY => attr.rnr_retry(raw.rnr_retry),
            Mask::IB_QP_RQ_PSN => attr.rq_psn(Psn(raw.rq_psn)),
            Mask::IB_QP_MAX_QP_RD_ATOMIC => attr.max_rd_atomic(raw.max_rd_atomic),
            Mask::IB_QP_ALT_PATH => {
                attr.alternate_path(path(&raw.alt_ah_attr), raw.alt_pkey_index, raw.alt_timeout)
            }
            Mask::IB_QP_MIN_RNR_TIMER => attr.min_rnr_timer(raw.min_rnr_timer),
            Mask::IB_QP_SQ_PSN => attr.sq_psn(Psn(raw.sq_psn)),
            Mask::IB_QP_MAX_DEST_RD_ATOMIC => attr.max_dest_rd_atomic(raw.max_dest_rd_atomic),
            Mask::IB_QP_PATH_MIG_STATE => {
                attr.path_mig_state(PathMigState(raw.path_mig_state as u8))
            }
            Mask::IB_QP_DEST_QPN => attr.dest_qpn(Qpn(raw.dest_qp_num)),
            // The kernel sets no other attribute for a connection.
            _ => attr,
        };
    }
    attr
}

pub(super) fn path(raw: &ib_uverbs_ah_attr) -> AddressVector {
    AddressVector {
        port: raw.port_num.into(),
        dlid: raw.dlid,
        global: (raw.is_global != 0).then_some(GlobalRoute {
            dgid: Gid(raw.grh.dgid),
            sgid_index: raw.grh.sgid_index.into(),
            flow_label: raw.grh.flow_label,
            hop_limit: raw.grh.hop_limit,
            traffic_class: raw.grh.traffic_class,
        }),
        service_level: raw.sl,
        src_path_bits: raw.src_path_bits,
        static_rate: raw.static_rate,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use uverbs_uapi::ah::ib_uverbs_global_route;

    #[test]
    fn every_attribute_that_the_kernel_sets_is_taken_over() {
        let all = Mask::IB_QP_STATE
            | Mask::IB_QP_AV
            | Mask::IB_QP_PATH_MTU
            | Mask::IB_QP_DEST_QPN
            | Mask::IB_QP_RQ_PSN
            | Mask::IB_QP_MAX_DEST_RD_ATOMIC
            | Mask::IB_QP_MIN_RNR_TIMER;
        let grh = ib_uverbs_global_route {
            dgid: [7; 16],
            sgid_index: 3,
            hop_limit: 64,
            traffic_class: 9,
            flow_label: 5,
            ..Default::default()
        };
        let raw = ib_uverbs_qp_attr {
            qp_attr_mask: all.bits(),
            qp_state: 2,
            path_mtu: 3,
            rq_psn: 11,
            dest_qp_num: 12,
            ah_attr: ib_uverbs_ah_attr { grh, is_global: 1, port_num: 1, ..Default::default() },
            max_dest_rd_atomic: 4,
            min_rnr_timer: 1,
            // Not in the mask.
            sq_psn: 99,
            ..Default::default()
        };
        let attr = translate(&raw);
        assert_eq!(attr.mask(), all.bits());
        let text = format!("{attr:?}");
        for part in ["RTR", "sgid_index: 3", "rq_psn: Psn(0xb)", "dest_qpn: Qpn(0xc)"] {
            assert!(text.contains(part), "{part} in {text}");
        }
        assert!(!text.contains("sq_psn: Psn(0x63)"), "{text}");
    }

    /// Older kernels set mask bits for Ethernet addresses, which no command takes any more.
    #[test]
    fn bits_without_a_name_are_left_out() {
        let raw =
            ib_uverbs_qp_attr { qp_attr_mask: 0x01e0_0001, qp_state: 2, ..Default::default() };
        assert_eq!(translate(&raw).mask() & 0x01e0_0000, 0);
    }
}
