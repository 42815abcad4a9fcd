//! UMR WQEs and local invalidation: work requests that change mkeys.
//!
//! Pairs with mlx5_ib's `umr.c`, and with fast registration, memory windows and local invalidation.
//! The kernel's UMR QP may change every mkey except physical ones. Another queue pair may change
//! mkeys of its PD with `umr_en`. The device checks a KLM list when it is used, so every queue pair
//! may change such lists. It cannot check the addresses of MTTs, so only kernel queue pairs with
//! `fre` may change those.

use uverbs_roce::MAX_MESSAGE;
use uverbs_uapi::mlx5::prm::mkc::mkc;
use uverbs_uapi::mlx5::prm::qpc::qpc;
use uverbs_uapi::mlx5::prm::{Bits, Field};

use super::dma::Accessor;
use crate::device::Device;
use crate::format::syndrome::Syndrome;
use crate::format::wqe::{DataSegment, WqeSegments};
use crate::object::qp::{Qp, Service};
use crate::object::table::KERNEL;

/// Flags of the UMR control segment, `MLX5_UMR_*`.
const INLINE: u8 = 1 << 7;
const FAIL_IF_FREE: u8 = 1 << 6;
const FAIL_IF_NOT_FREE: u8 = 1 << 5;
const OFFSET: u8 = 1 << 4;

const OCTOWORD: usize = 16;

/// `MLX5_MKEY_MASK_*`, and the fields that each bit allows a WQE to change.
const FIELDS: &[(u32, &[Field<mkc>])] = &[
    (0, &[mkc::len, mkc::length64]),
    (1, &[mkc::log_page_size]),
    (6, &[mkc::start_addr]),
    (7, &[mkc::pd]),
    (8, &[mkc::en_rinval]),
    (13, &[mkc::mkey_7_0]),
    (14, &[mkc::qpn]),
    (17, &[mkc::lr]),
    (18, &[mkc::lw]),
    (19, &[mkc::rr]),
    (20, &[mkc::rw]),
    (21, &[mkc::a]),
    (23, &[mkc::small_fence_on_rdma_read_response]),
    (25, &[mkc::relaxed_ordering_write]),
    (29, &[mkc::free]),
    (42, &[mkc::log_page_size]),
    (47, &[mkc::relaxed_ordering_read]),
];

/// The queue pair that issued a UMR WQE.
#[derive(Clone, Copy)]
pub(crate) struct UmrIssuer {
    qpn: u32,
    pd: u32,
    /// It is the kernel's UMR QP, which serves all PDs.
    kernel: bool,
    /// It may name physical addresses.
    trusted: bool,
}

/// The syndrome in the CQE of a refused UMR WQE, and the reason for the log.
struct UmrError(Syndrome, String);

impl From<String> for UmrError {
    fn from(why: String) -> Self {
        UmrError(Syndrome::LocalQpOperation, why)
    }
}

impl From<&str> for UmrError {
    fn from(why: &str) -> Self {
        why.to_owned().into()
    }
}

impl Device {
    /// The rights of a queue pair to change mkeys.
    pub(crate) fn umr_issuer(&self, qpn: u32, qp: &Qp) -> UmrIssuer {
        let kernel = qp.service == Service::Umr;
        let fast = qp.context.is_set(qpc::fre) && self.objects.qps.owner(qpn) == KERNEL;
        UmrIssuer { qpn, pd: qp.pd, kernel, trusted: kernel || fast }
    }

    /// Executes a UMR WQE for the mkey in its control segment.
    pub(crate) fn umr(
        &mut self,
        issuer: UmrIssuer,
        key: u32,
        segments: WqeSegments<'_>,
    ) -> Result<(), Syndrome> {
        self.apply_umr(issuer, key, segments).map_err(|UmrError(syndrome, why)| {
            log::warn!("UMR of mkey {key:#x} by QP {:#x}: {why}", issuer.qpn);
            syndrome
        })
    }

    fn apply_umr(
        &mut self,
        issuer: UmrIssuer,
        key: u32,
        mut segments: WqeSegments<'_>,
    ) -> Result<(), UmrError> {
        let (control, context) = segments.umr().map_err(|_| "the WQE is too short")?;
        let flags = control[0];
        let octowords = usize::from(u16::from_be_bytes([control[4], control[5]]));
        let number = |at: usize, len: usize| {
            control[at..at + len].iter().fold(0u64, |sum, byte| sum << 8 | u64::from(*byte))
        };
        let mask = number(8, 8);
        let offset = if flags & OFFSET != 0 { number(6, 2) | number(16, 4) << 16 } else { 0 };
        let known = FIELDS.iter().fold(0, |sum, (bit, _)| sum | 1u64 << bit);
        if mask & !known != 0 {
            return Err(format!("changes of {:#x} are not modelled", mask & !known).into());
        }
        let new = Bits::<mkc, _>::new(&context[..]);
        let UmrIssuer { qpn, pd, kernel, trusted } = issuer;
        let mkey = self.objects.mkeys.get(key >> 8).map_err(|refused| refused.why)?;
        if mkey.is_device_memory() && mask & 0b100_0001 != 0 {
            return Err("UMR cannot move device memory".into());
        }
        if flags & FAIL_IF_FREE != 0 && mkey.is_free() {
            return Err(UmrError(Syndrome::WindowBinding, "the mkey is free".into()));
        }
        if flags & FAIL_IF_NOT_FREE != 0 && !mkey.is_free() {
            return Err(UmrError(Syndrome::WindowBinding, "the mkey is not free".into()));
        }
        if mkey.is_physical() {
            return Err("UMR cannot change a physical mkey".into());
        }
        if !kernel && (mkey.context.get32(mkc::pd) != pd || !mkey.context.is_set(mkc::umr_en)) {
            return Err("the mkey is of another PD or lacks umr_en".into());
        }
        if !trusted && !mkey.is_list() {
            return Err("only a kernel QP may change an mkey of pages".into());
        }
        if !trusted && !mkey.is_free() && !mkey.allows_qp(qpn) {
            let bound = mkey.context.get(mkc::qpn);
            return Err(UmrError(
                Syndrome::WindowBinding,
                format!("the mkey is bound to QP {bound:#x}"),
            ));
        }
        if mask >> 7 & 1 != 0 {
            let wanted = new.get32(mkc::pd);
            if !kernel && wanted != pd {
                return Err(format!("PD {wanted} is not the queue's").into());
            }
            self.objects.pds.get(wanted).map_err(|refused| refused.why)?;
        }
        let len = octowords * OCTOWORD;
        let start = usize::try_from(offset)
            .map_err(|_| "the offset is too large")?
            .saturating_mul(OCTOWORD);
        let end = start.saturating_add(len);
        let room = mkey.translation.len();
        if octowords > 0 && end > room {
            return Err(format!(
                "octowords up to {}, the mkey has {}",
                end / OCTOWORD,
                room / OCTOWORD
            )
            .into());
        }
        let list = if octowords == 0 {
            vec![]
        } else if flags & INLINE != 0 {
            segments.rest().get(..len).ok_or("the inline list is too short")?.to_vec()
        } else {
            let data = segments.data_segments().map_err(|_| "the WQE is too short")?;
            let listed = data.bytes();
            if listed < len as u64 || listed > MAX_MESSAGE.into() {
                return Err(format!("the WQE lists {listed} bytes, {len} are needed").into());
            }
            let mut list = vec![0; len];
            let mut rest = &mut list[..];
            for segment in data {
                let pd = if kernel { self.pd_of_list(segment).unwrap_or(pd) } else { pd };
                let listed = usize::try_from(segment.len()).unwrap_or(usize::MAX);
                let (part, behind) = rest.split_at_mut(listed.min(rest.len()));
                let read = self.gather(Accessor { qpn, pd }, [segment], 0, part);
                read.map_err(|_| "the list cannot be read")?;
                rest = behind;
            }
            list
        };
        let mkey = self.objects.mkeys.get_mut(key >> 8).map_err(|refused| refused.why)?;
        let before = mkey.context.get32(mkc::pd);
        if octowords > 0 {
            mkey.translation[start..end].copy_from_slice(&list);
        }
        for (bit, fields) in FIELDS {
            if mask >> bit & 1 != 0 {
                for field in *fields {
                    mkey.context.set(*field, new.get(*field));
                }
            }
        }
        let after = mkey.context.get32(mkc::pd);
        if before != after {
            self.objects.pds.release(before);
            self.objects.pds.hold(after).map_err(|refused| refused.why)?;
        }
        Ok(())
    }

    /// The PD of the memory that a list is read from. The kernel's UMR QP reads every PD's memory:
    /// mlx5_ib of Linux 5.10 creates it in another PD than the mkey that names its lists.
    fn pd_of_list(&self, segment: DataSegment<'_>) -> Option<u32> {
        let DataSegment::Memory(sge) = segment else { return None };
        self.objects.mkeys.get(sge.key >> 8).ok().map(|mkey| mkey.context.get32(mkc::pd))
    }

    /// Invalidates an mkey of the queue pair's own PD.
    pub(crate) fn local_invalidate(&mut self, issuer: UmrIssuer, key: u32) -> Result<(), Syndrome> {
        let Ok(mkey) = self.objects.mkeys.get_mut(key >> 8) else {
            return Err(Syndrome::LocalProtection);
        };
        let (list, own) = (mkey.is_list(), mkey.allows_qp(issuer.qpn));
        let context = &mut mkey.context;
        let allowed = context.get(mkc::mkey_7_0) == u64::from(key & 0xff)
            && context.get32(mkc::pd) == issuer.pd
            && context.is_set(mkc::umr_en)
            && !context.is_set(mkc::free)
            && (list || issuer.trusted)
            && own;
        if !allowed {
            return Err(Syndrome::LocalProtection);
        }
        context.set(mkc::free, 1);
        Ok(())
    }

    /// Makes an mkey invalid, for tests; returns whether there is a valid one.
    pub fn invalidate_key(&mut self, key: u32) -> bool {
        self.settle_payloads();
        let Ok(mkey) = self.objects.mkeys.get_mut(key >> 8) else { return false };
        let context = &mut mkey.context;
        let valid =
            context.get(mkc::mkey_7_0) == u64::from(key & 0xff) && !context.is_set(mkc::free);
        if valid {
            context.set(mkc::free, 1);
        }
        valid
    }

    /// Invalidates an mkey at the request of the peer of queue pair `qpn`; returns false if that is
    /// not allowed.
    pub(crate) fn invalidate(&mut self, qpn: u32, key: u32, pd: u32) -> bool {
        let Ok(mkey) = self.objects.mkeys.get_mut(key >> 8) else { return false };
        let own = mkey.allows_qp(qpn);
        let context = &mut mkey.context;
        let allowed = context.get(mkc::mkey_7_0) == u64::from(key & 0xff)
            && context.get32(mkc::pd) == pd
            && context.is_set(mkc::en_rinval)
            && !context.is_set(mkc::free)
            && own;
        if allowed {
            context.set(mkc::free, 1);
        }
        allowed
    }
}
