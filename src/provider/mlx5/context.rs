//! The driver's request and response when a context is established, and the limits of the device that
//! the driver reports afterwards.
//!
//! Pairs with `mlx5_ib_alloc_ucontext`, `mlx5_ib_query_ucontext` and `mlx5_ib_query_device` in
//! `hw/mlx5/main.c`.

use super::Mlx5;
use super::wqe::LONGEST;
use super::wr_ids::WQE_INDICES;
use crate::error::{Error, Result};
use crate::memory::wqe_segment::SEGMENT;
use crate::number::Lkey;
use crate::provider::{self, Provider, RdAtomic};
use crate::uverbs::command::Command;
use crate::uverbs::invoke_write::write_ex;
use crate::uverbs::kernel::Kernel;
use crate::wr::Packet;
use rustix::io::Errno;
use std::sync::Arc;
use uverbs_uapi::device::{
    ib_atomic_cap, ib_uverbs_ex_query_device, ib_uverbs_ex_query_device_resp,
    ib_uverbs_raw_packet_caps, rdma_driver_id,
};
use uverbs_uapi::mlx5::context::{
    mlx5_ib_alloc_ucontext_req_v2, mlx5_ib_alloc_ucontext_resp, mlx5_ib_alloc_ucontext_resp_mask,
    mlx5_ib_alloc_uctx_v2_flags, mlx5_lib_caps, mlx5_user_cmds_supp_uhw, mlx5_user_inline_mode,
};
use uverbs_uapi::mlx5::object::MLX5_IB_ATTR_QUERY_CONTEXT_RESP_UCTX;
use uverbs_uapi::object::{UVERBS_ATTR_UHW_IN, UVERBS_ATTR_UHW_OUT};
use uverbs_uapi::write::IB_USER_VERBS_EX_CMD_QUERY_DEVICE;
use zerocopy::FromZeros;

const VERB: &str = "open_device";

/// The number of registers that the kernel would allocate for a context that allocates none by
/// itself. In dynamic mode the kernel only checks that the two numbers agree.
const TOTAL_REGISTERS: u32 = 16;
const LOW_LATENCY_REGISTERS: u32 = 4;

/// A context in the making.
#[derive(Debug)]
pub(crate) struct Mlx5Opening {
    request: mlx5_ib_alloc_ucontext_req_v2,
    response: mlx5_ib_alloc_ucontext_resp,
    /// Whether the context was imported: another process established it.
    inquired: bool,
}

impl Mlx5Opening {
    pub(crate) fn new() -> Mlx5Opening {
        let caps = mlx5_lib_caps::MLX5_LIB_CAP_4K_UAR | mlx5_lib_caps::MLX5_LIB_CAP_DYN_UAR;
        let request = mlx5_ib_alloc_ucontext_req_v2 {
            total_num_bfregs: TOTAL_REGISTERS,
            num_low_latency_bfregs: LOW_LATENCY_REGISTERS,
            flags: mlx5_ib_alloc_uctx_v2_flags::MLX5_IB_ALLOC_UCTX_DEVX.bits(),
            max_cqe_version: 1,
            lib_caps: caps.bits(),
            ..Default::default()
        };
        Mlx5Opening { request, response: Default::default(), inquired: false }
    }
}

impl provider::Opening for Mlx5Opening {
    fn driver(&self) -> u32 {
        rdma_driver_id::RDMA_DRIVER_MLX5.0
    }

    fn request<'a>(&'a mut self, command: &mut Command<'a>) {
        command
            .input(UVERBS_ATTR_UHW_IN, &self.request)
            .output(UVERBS_ATTR_UHW_OUT, &mut self.response);
    }

    /// As [`request`](Self::request), for a context that is established already. The response does not say
    /// whether the context has DEVX.
    fn inquire<'a>(&'a mut self, command: &mut Command<'a>) -> bool {
        self.inquired = true;
        command.output(MLX5_IB_ATTR_QUERY_CONTEXT_RESP_UCTX, &mut self.response);
        true
    }

    /// Asks for less after a refusal; `false` if there is nothing left to do without. If the firmware or the kernel has
    /// no DEVX, or does not permit it to this user, the context works without it.
    fn retreat(&mut self) -> bool {
        let devx = mlx5_ib_alloc_uctx_v2_flags::MLX5_IB_ALLOC_UCTX_DEVX.bits();
        let had = self.request.flags & devx != 0;
        self.request.flags &= !devx;
        had
    }

    fn finish(self: Box<Self>, kernel: &dyn Kernel) -> Result<Arc<dyn Provider>> {
        let devx = (!self.inquired).then_some(self.request.flags != 0);
        let mut limits = Limits::new(&self.response, devx)?;
        // These limits are not in the response of the context.
        let mut device = ib_uverbs_ex_query_device_resp::new_zeroed();
        let request = ib_uverbs_ex_query_device::default();
        kernel
            .execute(write_ex(IB_USER_VERBS_EX_CMD_QUERY_DEVICE, &request).response(&mut device))
            .map_err(|errno| Error::from_kernel(VERB, errno))?;
        limits.max_cqe = device.base.max_cqe;
        limits.rd_atomic = RdAtomic {
            answered: device.base.max_qp_rd_atom,
            sent: device.base.max_qp_init_rd_atom,
            atomics: device.base.atomic_cap != ib_atomic_cap::IB_ATOMIC_NONE.0,
        };
        limits.raw_packet.checksums =
            ib_uverbs_raw_packet_caps::from_bits_retain(device.raw_packet_caps)
                .contains(ib_uverbs_raw_packet_caps::IB_UVERBS_RAW_PACKET_CAP_IP_CSUM);
        Ok(Arc::new(Mlx5::new(limits, kernel)?))
    }
}

/// Requirements of a device on raw packets, and its offloads for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RawPacketLimits {
    /// The first bytes of a packet that have to be in the request.
    pub(crate) min_header: u8,
    /// Whether the device fills in checksums.
    pub(crate) checksums: bool,
}

/// The limits of a context, as the driver reported them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Bytes of a BlueFlame register, both of its halves; 0 without write combining.
    pub(crate) bf_reg_size: u32,
    /// Bytes of the WQEBBs of a send WQE, which may be more than its size field can
    /// hold; see [`max_send_request`](Limits::max_send_request).
    pub(crate) max_sq_desc_sz: u32,
    /// Bytes of a receive WQE.
    pub(crate) max_rq_desc_sz: u32,
    /// WQEBBs (64 bytes each) in a send queue.
    pub(crate) max_send_wqebb: u32,
    /// Receives in a receive queue.
    pub(crate) max_recv_wr: u32,
    /// Receives in a shared receive queue.
    pub(crate) max_srq_recv_wr: u32,
    /// Entries of a completion queue, as they may be asked for.
    pub(crate) max_cqe: u32,
    pub(crate) rd_atomic: RdAtomic,
    /// UARs of 4 KiB in a page of the system.
    pub(crate) uars_per_page: u32,
    pub(crate) raw_packet: RawPacketLimits,
    /// Whether queue pairs report their enhanced connection establishment (ECE) options.
    pub(crate) ece: bool,
    /// The offset of the core clock in its page; `None` if there is no such page.
    pub(crate) clock_offset: Option<u64>,
    /// The versions of the clock info page that the kernel has, a bit each.
    pub(crate) clock_info_versions: u8,
    /// The key of the null region, if the device has one.
    pub(crate) null_lkey: Option<Lkey>,
    /// Whether timestamps can be of a clock that counts nanoseconds.
    pub(crate) real_time: bool,
    /// Whether the context may send commands to the firmware (DEVX); `None` for an imported context.
    pub(crate) devx: Option<bool>,
}

impl Limits {
    /// Bytes of the longest send request.
    pub(crate) fn max_send_request(&self) -> u32 {
        self.max_sq_desc_sz.min(LONGEST * SEGMENT as u32)
    }

    fn new(resp: &mlx5_ib_alloc_ucontext_resp, devx: Option<bool>) -> Result<Limits> {
        let refuse = |detail: String| Err(Error::new(VERB, Errno::OPNOTSUPP).detail(detail));
        // The response of an older kernel ends earlier and is zero from there on.
        if resp.tot_bfregs != 0 {
            return refuse(format!(
                "the driver gave {} registers with the context instead of letting it allocate UARs \
                 as objects (Linux 5.7)",
                resp.tot_bfregs
            ));
        }
        if resp.cqe_version != 1 {
            return refuse(format!(
                "the device writes CQEs of version {}; version 1, with user indices, is needed",
                resp.cqe_version
            ));
        }
        if resp.num_uars_per_page == 0 || resp.log_uar_size < 12 {
            return refuse(format!(
                "the driver reports {} UARs of 2^{} bytes in a page",
                resp.num_uars_per_page, resp.log_uar_size
            ));
        }
        let mask = mlx5_ib_alloc_ucontext_resp_mask::from_bits_retain(resp.comp_mask);
        let has = |bit| mask.contains(bit);
        let uhw = mlx5_user_cmds_supp_uhw::from_bits_retain(resp.cmds_supp_uhw);
        if !uhw.contains(mlx5_user_cmds_supp_uhw::MLX5_USER_CMDS_SUPP_UHW_CREATE_AH) {
            return refuse("the driver does not resolve addresses (Linux 4.11)".into());
        }
        Ok(Limits {
            bf_reg_size: resp.bf_reg_size,
            max_sq_desc_sz: resp.max_sq_desc_sz.into(),
            max_rq_desc_sz: resp.max_rq_desc_sz.into(),
            // The driver may report more, but a larger queue has WQEs that no CQE can name.
            max_send_wqebb: resp.max_send_wqebb.min(WQE_INDICES),
            max_recv_wr: resp.max_recv_wr.min(WQE_INDICES),
            max_srq_recv_wr: resp.max_srq_recv_wr.min(WQE_INDICES),
            max_cqe: 0,
            rd_atomic: RdAtomic::default(),
            uars_per_page: resp.num_uars_per_page,
            raw_packet: RawPacketLimits {
                min_header: match mlx5_user_inline_mode(resp.eth_min_inline) {
                    mlx5_user_inline_mode::MLX5_USER_INLINE_MODE_NONE => 0,
                    // Kernels older than this field report 0. The library then puts the header inline, too.
                    _ => Packet::MAX_HEADER as u8,
                },
                checksums: false,
            },
            ece: has(mlx5_ib_alloc_ucontext_resp_mask::MLX5_IB_ALLOC_UCONTEXT_RESP_MASK_ECE),
            clock_offset: has(
                mlx5_ib_alloc_ucontext_resp_mask::MLX5_IB_ALLOC_UCONTEXT_RESP_MASK_CORE_CLOCK_OFFSET,
            )
            .then_some(resp.hca_core_clock_offset),
            clock_info_versions: resp.clock_info_versions,
            null_lkey: has(
                mlx5_ib_alloc_ucontext_resp_mask::MLX5_IB_ALLOC_UCONTEXT_RESP_MASK_DUMP_FILL_MKEY,
            )
            .then_some(Lkey(resp.dump_fill_mkey)),
            real_time: has(
                mlx5_ib_alloc_ucontext_resp_mask::MLX5_IB_ALLOC_UCONTEXT_RESP_MASK_REAL_TIME_TS,
            ),
            devx,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::provider::mlx5::rq::RqSize;
    use crate::provider::mlx5::sq::SqSize;
    use crate::provider::mlx5::srq::SrqSize;
    use crate::qp::state::QpType;
    use uverbs_uapi::qp::ib_uverbs_qp_cap;
    use zerocopy::{FromBytes, IntoBytes};

    #[test]
    fn any_limits_make_a_queue_that_fits_its_memory_or_an_error() {
        let healthy = mlx5_ib_alloc_ucontext_resp {
            cqe_version: 1,
            num_uars_per_page: 1,
            log_uar_size: 12,
            cmds_supp_uhw: mlx5_user_cmds_supp_uhw::MLX5_USER_CMDS_SUPP_UHW_CREATE_AH.bits(),
            max_sq_desc_sz: 1024,
            max_rq_desc_sz: 512,
            max_send_wqebb: 1 << 15,
            max_recv_wr: 1 << 15,
            max_srq_recv_wr: 1 << 15,
            ..Default::default()
        };
        let known = [healthy.as_bytes().to_vec(), [healthy.as_bytes(), &[9; 20]].concat()];
        let tally = crate::tests::hostile::explore("limits of mlx5", 1, &known, |bytes| {
            let Ok((resp, rest)) = mlx5_ib_alloc_ucontext_resp::read_from_prefix(bytes) else {
                return false;
            };
            let Ok(mut limits) = Limits::new(&resp, None) else { return false };
            // Random limits and capacities of any size.
            let word = |at: usize| {
                let word = rest.get(at..at + 4).and_then(|word| word.try_into().ok());
                word.map_or(1, u32::from_le_bytes)
            };
            limits.max_cqe = word(0);
            let cap = ib_uverbs_qp_cap {
                max_send_wr: word(0),
                max_recv_wr: word(4),
                max_send_sge: word(8),
                max_recv_sge: word(12),
                max_inline_data: word(16),
            };
            for qp_type in [QpType::RC, QpType::UD, QpType::RAW_PACKET, QpType::XRC_INI] {
                if let Ok(size) = SqSize::new(&limits, qp_type, &cap) {
                    assert!(size.wqebbs <= WQE_INDICES && size.max_post >= cap.max_send_wr);
                    let has_queue = cap.max_send_wr > 0;
                    assert!(!has_queue || size.bytes() == size.wqebbs as usize * 64);
                }
            }
            if let Ok(size) = RqSize::new(&limits, &cap) {
                assert!(size.entries >= cap.max_recv_wr);
                assert!(size.entries == 0 || size.max_sge >= cap.max_recv_sge);
                assert!(size.bytes() <= WQE_INDICES as usize * (1 << 16));
            }
            if let Ok(size) = SrqSize::new(&limits, cap.max_recv_wr, cap.max_recv_sge) {
                assert!(size.entries > cap.max_recv_wr && size.max_sge >= cap.max_recv_sge);
            }
            true
        });
        assert!(tally.taken > 0 && tally.refused > 0, "{tally:?}");
    }

    #[test]
    fn no_queue_is_larger_than_cqes_can_name() {
        let resp = mlx5_ib_alloc_ucontext_resp {
            cqe_version: 1,
            num_uars_per_page: 1,
            log_uar_size: 12,
            cmds_supp_uhw: mlx5_user_cmds_supp_uhw::MLX5_USER_CMDS_SUPP_UHW_CREATE_AH.bits(),
            max_sq_desc_sz: u16::MAX,
            max_rq_desc_sz: u16::MAX,
            max_send_wqebb: u32::MAX,
            max_recv_wr: u32::MAX,
            max_srq_recv_wr: u32::MAX,
            ..Default::default()
        };
        let limits = Limits::new(&resp, None).unwrap();
        for many in [WQE_INDICES + 1, 1 << 31, (1 << 31) + 1, u32::MAX] {
            let cap =
                ib_uverbs_qp_cap { max_send_wr: many, max_recv_wr: many, ..Default::default() };
            assert!(SqSize::new(&limits, QpType::RC, &cap).is_err(), "{many}");
            assert!(RqSize::new(&limits, &cap).is_err(), "{many}");
            assert!(SrqSize::new(&limits, many, 1).is_err(), "{many}");
            let sges = ib_uverbs_qp_cap { max_recv_wr: WQE_INDICES, max_recv_sge: many, ..cap };
            assert!(RqSize::new(&limits, &sges).is_err(), "{many}");
            assert!(SrqSize::new(&limits, 1, many).is_err(), "{many}");
        }
        let cap = ib_uverbs_qp_cap { max_recv_wr: WQE_INDICES, ..Default::default() };
        assert_eq!(RqSize::new(&limits, &cap).map(|size| size.entries), Ok(WQE_INDICES));
        assert_eq!(
            SrqSize::new(&limits, WQE_INDICES - 1, 1).map(|size| size.entries),
            Ok(WQE_INDICES)
        );
    }
}
