//! Attributes of a queue pair, as modify takes them. Pairs with `ib_uverbs_modify_qp`.

use crate::access::Access;
use crate::address_vector::AddressVector;
use crate::device_attr::DeviceAttr;
use crate::error::{Error, Result, narrow};
use crate::number::{Psn, Qkey, Qpn, open_enum};
use crate::port::{Mtu, PortAttr};
use crate::qp::state::QpState;
use std::fmt;
use uverbs_uapi::qp::{ib_mig_state, ib_qp_attr_mask as Mask, ib_uverbs_modify_qp};

open_enum! {
    /// The state of automatic path migration.
    #[doc(alias = "ibv_mig_state")]
    pub struct PathMigState(u8) {
        /// The queue pair uses the alternate path, or has none.
        MIGRATED = ib_mig_state::IB_MIG_MIGRATED.0, "migrated";
        /// The alternate path is being loaded.
        REARM = ib_mig_state::IB_MIG_REARM.0, "rearm";
        /// The alternate path will be taken when the primary one fails.
        ARMED = ib_mig_state::IB_MIG_ARMED.0, "armed";
    }
}

/// A change of a queue pair's attributes: an attribute that is not set stays as it is.
///
/// [`modify`](crate::QpControl::modify) checks that the transition's attributes are set, that no
/// others are, and that all are in the ranges given here.
///
/// ```
/// use uverbs::{Access, QpAttr, QpState};
/// let init =
///     QpAttr::new().state(QpState::INIT).port(1).pkey_index(0).access(Access::ALL_REMOTE);
/// ```
///
/// Other changes, mostly in state RTS:
///
/// ```
/// use uverbs::{AddressVector, QpAttr, PathMigState, QpState};
///
/// # let path = AddressVector::local(1, 7);
/// // A second path, and the request to load it for migration.
/// let migration = QpAttr::new().alternate_path(path, 0, 14).path_mig_state(PathMigState::REARM);
/// let slower = QpAttr::new().rate_limit(10_000_000);
/// // Drains the send queue; an event tells when it is drained.
/// let drain = QpAttr::new().current_state(QpState::RTS).state(QpState::SQD).sqd_async_notify(true);
/// // The bits are those of `enum ibv_qp_attr_mask`.
/// assert_eq!(slower.mask(), 1 << 25);
/// # let _ = (migration, drain);
/// ```
#[doc(alias = "ibv_qp_attr")]
#[derive(Clone, Copy, Default)]
#[must_use]
pub struct QpAttr {
    mask: u32,
    /// Without handle, mask, port and paths; unset fields are zero.
    raw: ib_uverbs_modify_qp,
    port: u32,
    path: Option<AddressVector>,
    alternate_path: Option<AddressVector>,
    access: Access,
    rate_limit: u32,
}

impl QpAttr {
    /// Changes nothing yet.
    pub fn new() -> Self {
        QpAttr::default()
    }

    fn set(mut self, bit: Mask, set: impl FnOnce(&mut ib_uverbs_modify_qp)) -> Self {
        self.mask |= bit.bits();
        set(&mut self.raw);
        self
    }

    /// The state to move to.
    #[doc(alias = "IBV_QP_STATE")]
    pub fn state(self, state: QpState) -> Self {
        self.set(Mask::IB_QP_STATE, |raw| raw.qp_state = state.0)
    }

    /// The state that the caller assumes the queue pair to be in: `RTR`, `RTS`, `SQD` or `SQE`.
    /// The transition is checked from there, instead of from the state last known, and refused if the
    /// kernel tells another state.
    #[doc(alias = "IBV_QP_CUR_STATE")]
    pub fn current_state(self, state: QpState) -> Self {
        self.set(Mask::IB_QP_CUR_STATE, |raw| raw.cur_qp_state = state.0)
    }

    /// Whether an event tells that the send queue is drained, when moving to `SQD`.
    #[doc(alias = "IBV_QP_EN_SQD_ASYNC_NOTIFY")]
    pub fn sqd_async_notify(self, notify: bool) -> Self {
        self.set(Mask::IB_QP_EN_SQD_ASYNC_NOTIFY, |raw| raw.en_sqd_async_notify = notify.into())
    }

    /// The rights of the peer through the queue pair, beside sending. Devices ignore rights that apply only to memory.
    #[doc(alias = "IBV_QP_ACCESS_FLAGS")]
    pub fn access(mut self, access: Access) -> Self {
        self.access = access;
        // Optional rights are those of memory regions: devices refuse them here.
        self.set(Mask::IB_QP_ACCESS_FLAGS, |raw| raw.qp_access_flags = access.for_kernel(false))
    }

    /// Index of the partition key in the port's table; below the port's `pkey_table_len`.
    #[doc(alias = "IBV_QP_PKEY_INDEX")]
    pub fn pkey_index(self, index: u16) -> Self {
        self.set(Mask::IB_QP_PKEY_INDEX, |raw| raw.pkey_index = index)
    }

    /// The local port, from 1.
    #[doc(alias = "IBV_QP_PORT")]
    pub fn port(mut self, port: u32) -> Self {
        self.port = port;
        self.set(Mask::IB_QP_PORT, |_| ())
    }

    /// The key that datagrams must carry to be received. With bit 31 set it needs `CAP_NET_RAW`.
    #[doc(alias = "IBV_QP_QKEY")]
    pub fn qkey(self, qkey: Qkey) -> Self {
        self.set(Mask::IB_QP_QKEY, |raw| raw.qkey = qkey.0)
    }

    /// The path to the peer. Its port must be the queue pair's.
    #[doc(alias = "IBV_QP_AV")]
    #[doc(alias = "ah_attr")]
    pub fn path(mut self, path: AddressVector) -> Self {
        self.path = Some(path);
        self.set(Mask::IB_QP_AV, |_| ())
    }

    /// The largest payload of a packet on the path, not above the port's active one.
    #[doc(alias = "IBV_QP_PATH_MTU")]
    pub fn path_mtu(self, mtu: Mtu) -> Self {
        self.set(Mask::IB_QP_PATH_MTU, |raw| raw.path_mtu = mtu.0)
    }

    /// The wait for an acknowledgement before a retry: 4.096 µs · 2ⁿ, n from 1 to 31; 0 waits for
    /// ever. 14 is 67 ms, 18 is about a second.
    #[doc(alias = "IBV_QP_TIMEOUT")]
    pub fn timeout(self, n: u8) -> Self {
        self.set(Mask::IB_QP_TIMEOUT, |raw| raw.timeout = n)
    }

    /// The number of retries, 0 to 7, before the queue pair fails with
    /// [`RETRY_EXC_ERR`](crate::WcStatus::RETRY_EXC_ERR). Soft-RoCE retries without end if it is 7.
    #[doc(alias = "IBV_QP_RETRY_CNT")]
    #[doc(alias = "retry_cnt")]
    pub fn retry_count(self, count: u8) -> Self {
        self.set(Mask::IB_QP_RETRY_CNT, |raw| raw.retry_cnt = count)
    }

    /// The number of retries to a peer that had no receive posted, 0 to 6, before the queue pair
    /// fails with [`RNR_RETRY_EXC_ERR`](crate::WcStatus::RNR_RETRY_EXC_ERR); 7 is without end.
    #[doc(alias = "IBV_QP_RNR_RETRY")]
    pub fn rnr_retry(self, count: u8) -> Self {
        self.set(Mask::IB_QP_RNR_RETRY, |raw| raw.rnr_retry = count)
    }

    /// The number of the first packet to be received: the peer's `sq_psn`.
    #[doc(alias = "IBV_QP_RQ_PSN")]
    pub fn rq_psn(self, psn: Psn) -> Self {
        self.set(Mask::IB_QP_RQ_PSN, |raw| raw.rq_psn = psn.0)
    }

    /// The number of reads and atomics that may be under way from here, not above the device's
    /// `max_qp_init_rd_atom` nor the peer's [`max_dest_rd_atomic`](Self::max_dest_rd_atomic).
    #[doc(alias = "IBV_QP_MAX_QP_RD_ATOMIC")]
    pub fn max_rd_atomic(self, count: u8) -> Self {
        self.set(Mask::IB_QP_MAX_QP_RD_ATOMIC, |raw| raw.max_rd_atomic = count)
    }

    /// An alternate path, with its own partition key index and [`timeout`](Self::timeout).
    #[doc(alias = "IBV_QP_ALT_PATH")]
    #[doc(alias = "alt_ah_attr")]
    pub fn alternate_path(mut self, path: AddressVector, pkey_index: u16, timeout: u8) -> Self {
        self.alternate_path = Some(path);
        self.set(Mask::IB_QP_ALT_PATH, |raw| {
            raw.alt_pkey_index = pkey_index;
            raw.alt_timeout = timeout;
        })
    }

    /// The RNR timer: the time that a peer waits when it finds no receive posted here, as a code
    /// from 0 to 31: 0 is 655.36 ms, 1 is 10 µs, and from there the times grow by half and by a
    /// third in turn (12 is 640 µs, 20 is 10.24 ms) up to 31, 491.52 ms.
    #[doc(alias = "IBV_QP_MIN_RNR_TIMER")]
    pub fn min_rnr_timer(self, code: u8) -> Self {
        self.set(Mask::IB_QP_MIN_RNR_TIMER, |raw| raw.min_rnr_timer = code)
    }

    /// The number of the first packet to be sent: the peer's `rq_psn`.
    #[doc(alias = "IBV_QP_SQ_PSN")]
    pub fn sq_psn(self, psn: Psn) -> Self {
        self.set(Mask::IB_QP_SQ_PSN, |raw| raw.sq_psn = psn.0)
    }

    /// The number of the peer's reads and atomics that are answered at once, not above the device's `max_qp_rd_atom`.
    #[doc(alias = "IBV_QP_MAX_DEST_RD_ATOMIC")]
    pub fn max_dest_rd_atomic(self, count: u8) -> Self {
        self.set(Mask::IB_QP_MAX_DEST_RD_ATOMIC, |raw| raw.max_dest_rd_atomic = count)
    }

    /// Sets the state of path migration.
    #[doc(alias = "IBV_QP_PATH_MIG_STATE")]
    pub fn path_mig_state(self, state: PathMigState) -> Self {
        self.set(Mask::IB_QP_PATH_MIG_STATE, |raw| raw.path_mig_state = state.0)
    }

    /// The peer's queue pair.
    #[doc(alias = "IBV_QP_DEST_QPN")]
    #[doc(alias = "dest_qp_num")]
    pub fn dest_qpn(self, qpn: Qpn) -> Self {
        self.set(Mask::IB_QP_DEST_QPN, |raw| raw.dest_qp_num = qpn.0)
    }

    /// Limits sending, in kbit/s; 0 takes the limit away.
    #[doc(alias = "IBV_QP_RATE_LIMIT")]
    pub fn rate_limit(mut self, kbps: u32) -> Self {
        self.mask |= Mask::IB_QP_RATE_LIMIT.bits();
        self.rate_limit = kbps;
        self
    }

    /// The attributes that are set, as bits of the kernel's `ib_qp_attr_mask`.
    #[doc(alias = "ibv_qp_attr_mask")]
    pub fn mask(&self) -> u32 {
        self.mask
    }

    pub(super) fn bits(&self) -> Mask {
        Mask::from_bits_retain(self.mask)
    }

    /// The state to move to, if that is among the changes.
    pub(super) fn next_state(&self) -> Option<QpState> {
        self.bits().contains(Mask::IB_QP_STATE).then_some(QpState(self.raw.qp_state))
    }

    /// Whether the change may carry ECE options to the device: one that ends the connection does not.
    pub(super) fn may_carry_options(&self) -> bool {
        !matches!(self.next_state(), Some(QpState::RESET | QpState::ERR | QpState::SQD))
    }

    /// The state that the caller claims.
    pub(super) fn claimed_state(&self) -> Option<QpState> {
        self.bits().contains(Mask::IB_QP_CUR_STATE).then_some(QpState(self.raw.cur_qp_state))
    }

    /// The same change without the caller's claim.
    pub(super) fn unclaimed(&self) -> QpAttr {
        QpAttr { mask: (self.bits() - Mask::IB_QP_CUR_STATE).bits(), ..*self }
    }

    /// The change as the kernel's struct, which has no field for the rate limit.
    ///
    /// # Errors
    ///
    /// `EINVAL`, on behalf of `verb`, for a port or an index that the kernel's struct has no room for.
    pub(super) fn to_raw(self, verb: &'static str, handle: u32) -> Result<ib_uverbs_modify_qp> {
        let mut raw = ib_uverbs_modify_qp {
            qp_handle: handle,
            attr_mask: self.mask,
            port_num: narrow(verb, "port", self.port)?,
            ..self.raw
        };
        if let Some(path) = self.path {
            raw.dest = path.to_qp_dest(verb)?;
        }
        if let Some(path) = self.alternate_path {
            raw.alt_dest = path.to_qp_dest(verb)?;
            raw.alt_port_num = raw.alt_dest.port_num;
        }
        Ok(raw)
    }

    /// The ports that the change names: the queue pair's, and those of the paths.
    pub(super) fn ports(&self) -> impl Iterator<Item = u32> + use<> {
        let own = self.bits().contains(Mask::IB_QP_PORT).then_some(self.port);
        let paths = [self.path, self.alternate_path].into_iter().flatten();
        own.into_iter().chain(paths.map(|path| path.port))
    }

    /// The paths that the change names.
    pub(super) fn paths(&self) -> impl Iterator<Item = AddressVector> + use<> {
        [self.path, self.alternate_path].into_iter().flatten()
    }

    /// The first value that is above a limit of the device or of the port, and that limit. A port is queried only if
    /// the change names it.
    pub(super) fn beyond(
        &self,
        port: impl FnOnce(u32) -> Option<PortAttr>,
        device: impl FnOnce() -> Option<DeviceAttr>,
    ) -> Option<String> {
        let raw = &self.raw;
        let names_port = Mask::IB_QP_PKEY_INDEX | Mask::IB_QP_PATH_MTU;
        if self.bits().intersects(names_port) {
            if let Some(attr) = self.ports().next().and_then(port) {
                let keys = attr.pkey_table_len;
                if self.bits().contains(Mask::IB_QP_PKEY_INDEX) && raw.pkey_index >= keys {
                    let index = raw.pkey_index;
                    return Some(format!(
                        "pkey_index {index}; the port's table has {keys} entries"
                    ));
                }
                let mtu = Mtu(raw.path_mtu);
                if self.bits().contains(Mask::IB_QP_PATH_MTU) && mtu > attr.active_mtu {
                    let active = attr.active_mtu;
                    return Some(format!("path_mtu {mtu} is above the port's, which is {active}"));
                }
            }
        }
        let rd_atomic = Mask::IB_QP_MAX_QP_RD_ATOMIC | Mask::IB_QP_MAX_DEST_RD_ATOMIC;
        let device = if self.bits().intersects(rd_atomic) { device()? } else { return None };
        let limits = [
            (
                Mask::IB_QP_MAX_QP_RD_ATOMIC,
                "max_rd_atomic",
                raw.max_rd_atomic,
                device.max_qp_init_rd_atom,
            ),
            (
                Mask::IB_QP_MAX_DEST_RD_ATOMIC,
                "max_dest_rd_atomic",
                raw.max_dest_rd_atomic,
                device.max_qp_rd_atom,
            ),
        ];
        limits.into_iter().find_map(|(bit, name, value, max)| {
            let above = self.bits().contains(bit) && u32::from(value) > max;
            above.then(|| format!("{name} {value} is above the device's {max}"))
        })
    }

    /// The rate limit, if that is among the changes.
    pub(super) fn limit(&self) -> Option<u32> {
        self.bits().contains(Mask::IB_QP_RATE_LIMIT).then_some(self.rate_limit)
    }

    /// Whether the rate limit is all that changes.
    pub(super) fn limits_rate_alone(&self) -> bool {
        self.bits() == Mask::IB_QP_RATE_LIMIT
    }

    /// Refuses a value that no device could take.
    pub(super) fn check_ranges(&self, verb: &'static str) -> Result<()> {
        let raw = &self.raw;
        let level = |path: Option<AddressVector>| path.map_or(0, |path| path.service_level.into());
        let label = |path: Option<AddressVector>| {
            path.and_then(|path| path.global).map_or(0, |global| global.flow_label)
        };
        let (path, alternate) = (self.path, self.alternate_path);
        let ranges = [
            (Mask::IB_QP_STATE, "state", u32::from(raw.qp_state), 6),
            (Mask::IB_QP_CUR_STATE, "current_state", raw.cur_qp_state.into(), 6),
            (Mask::IB_QP_TIMEOUT, "timeout", raw.timeout.into(), 31),
            (Mask::IB_QP_ALT_PATH, "alternate_path timeout", raw.alt_timeout.into(), 31),
            (Mask::IB_QP_RETRY_CNT, "retry_count", raw.retry_cnt.into(), 7),
            (Mask::IB_QP_RNR_RETRY, "rnr_retry", raw.rnr_retry.into(), 7),
            (Mask::IB_QP_MIN_RNR_TIMER, "min_rnr_timer", raw.min_rnr_timer.into(), 31),
            (Mask::IB_QP_RQ_PSN, "rq_psn", raw.rq_psn, 0xff_ffff),
            (Mask::IB_QP_SQ_PSN, "sq_psn", raw.sq_psn, 0xff_ffff),
            (Mask::IB_QP_DEST_QPN, "dest_qpn", raw.dest_qp_num, 0xff_ffff),
            (Mask::IB_QP_AV, "path service_level", level(path), 15),
            (Mask::IB_QP_ALT_PATH, "alternate_path service_level", level(alternate), 15),
            (Mask::IB_QP_AV, "path flow_label", label(path), 0xf_ffff),
            (Mask::IB_QP_ALT_PATH, "alternate_path flow_label", label(alternate), 0xf_ffff),
        ];
        for (bit, name, value, max) in ranges {
            if self.bits().contains(bit) && value > max {
                let detail = format!("{name} {value} is above the maximum of {max}");
                return Err(Error::invalid(verb, detail));
            }
        }
        let mtu = Mtu(raw.path_mtu);
        if self.bits().contains(Mask::IB_QP_PATH_MTU) && mtu.bytes().is_none() {
            let detail = format!("path_mtu has code {}; 1 (256 bytes) to 5 (4096) exist", mtu.0);
            return Err(Error::invalid(verb, detail));
        }
        Ok(())
    }
}

impl fmt::Debug for QpAttr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let raw = &self.raw;
        let mut out = f.debug_struct("QpAttr");
        for bit in self.bits().iter() {
            match bit {
                Mask::IB_QP_STATE => out.field("state", &QpState(raw.qp_state)),
                Mask::IB_QP_CUR_STATE => out.field("current_state", &QpState(raw.cur_qp_state)),
                Mask::IB_QP_EN_SQD_ASYNC_NOTIFY => {
                    out.field("sqd_async_notify", &(raw.en_sqd_async_notify != 0))
                }
                Mask::IB_QP_ACCESS_FLAGS => out.field("access", &self.access),
                Mask::IB_QP_PKEY_INDEX => out.field("pkey_index", &raw.pkey_index),
                Mask::IB_QP_PORT => out.field("port", &self.port),
                Mask::IB_QP_QKEY => out.field("qkey", &Qkey(raw.qkey)),
                Mask::IB_QP_AV => out.field("path", &self.path),
                Mask::IB_QP_PATH_MTU => out.field("path_mtu", &Mtu(raw.path_mtu)),
                Mask::IB_QP_TIMEOUT => out.field("timeout", &raw.timeout),
                Mask::IB_QP_RETRY_CNT => out.field("retry_count", &raw.retry_cnt),
                Mask::IB_QP_RNR_RETRY => out.field("rnr_retry", &raw.rnr_retry),
                Mask::IB_QP_RQ_PSN => out.field("rq_psn", &Psn(raw.rq_psn)),
                Mask::IB_QP_MAX_QP_RD_ATOMIC => out.field("max_rd_atomic", &raw.max_rd_atomic),
                Mask::IB_QP_ALT_PATH => out
                    .field("alternate_path", &self.alternate_path)
                    .field("alternate_pkey_index", &raw.alt_pkey_index)
                    .field("alternate_timeout", &raw.alt_timeout),
                Mask::IB_QP_MIN_RNR_TIMER => out.field("min_rnr_timer", &raw.min_rnr_timer),
                Mask::IB_QP_SQ_PSN => out.field("sq_psn", &Psn(raw.sq_psn)),
                Mask::IB_QP_MAX_DEST_RD_ATOMIC => {
                    out.field("max_dest_rd_atomic", &raw.max_dest_rd_atomic)
                }
                Mask::IB_QP_PATH_MIG_STATE => {
                    out.field("path_mig_state", &PathMigState(raw.path_mig_state))
                }
                Mask::IB_QP_DEST_QPN => out.field("dest_qpn", &Qpn(raw.dest_qp_num)),
                Mask::IB_QP_RATE_LIMIT => out.field("rate_limit", &self.rate_limit),
                _ => &mut out,
            };
        }
        out.finish()
    }
}

#[cfg(test)]
mod tests;
