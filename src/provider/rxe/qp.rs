//! Creates queue pairs. Pairs with `rxe_qp_from_init` in `rxe_qp.c`.

use super::rq::RxeRq;
use super::sq::RxeSq;
use super::{Rxe, unmapped};
use crate::error::{Error, Result};
use crate::memory::mapping::Mapper;
use crate::provider::{
    self, CreateRequest, CreatedQp, Execute, Member, QpInitAttr, Scatter, SendLimits,
};
use crate::uverbs::command::Command;
use rustix::io::Errno;
use uverbs_uapi::object::{UVERBS_ATTR_UHW_OUT, UVERBS_OBJECT_QP};
use uverbs_uapi::qp as uapi;
use uverbs_uapi::qp::ib_uverbs_qp_cap;
use uverbs_uapi::rxe::rxe_create_qp_resp;

/// The smallest limit of requests in a queue that a kernel has had, `RXE_MAX_QP_WR`.
const SMALLEST_LIMIT: u32 = 0x4000;

/// The depth to ask the kernel for: one place more than the program wants; see [`reported_depth`].
fn requested_depth(wanted: u32) -> u32 {
    // The kernel rounds a depth up to a power of two minus one, and refuses one above its limit. So only a
    // queue of exactly 2^n - 1 requests, from 0x7fff on, does not get the additional place.
    if wanted == 0 || wanted >= SMALLEST_LIMIT { wanted } else { wanted + 1 }
}

/// The depth that the library reports: one less than the ring has, because when the kernel flushes a queue it
/// publishes a completion before it frees the place of the request.
fn reported_depth(wanted: u32, granted: u32) -> u32 {
    // If the additional place doubled the ring, the requested depth is reported: programs size completion queues by it.
    if granted / 2 >= wanted { wanted } else { granted.saturating_sub(1).max(wanted) }
}

/// Creates a queue pair. The kernel sizes its queues.
pub(super) fn create(
    rxe: &Rxe,
    attr: QpInitAttr<'_>,
    verb: &'static str,
    mapper: &dyn Mapper,
    execute: Execute<'_>,
) -> Result<CreatedQp> {
    if attr.scatter != Scatter::None {
        return Err(
            Error::new(verb, Errno::OPNOTSUPP).detail("only mlx5 puts received data into CQEs")
        );
    }
    let gate = rxe.gate(verb)?;
    let mut response = rxe_create_qp_resp::default();
    let mut cap = ib_uverbs_qp_cap::default();
    let mut qpn = 0u32;
    let wanted = ib_uverbs_qp_cap {
        max_send_wr: requested_depth(attr.cap.max_send_wr),
        max_recv_wr: requested_depth(attr.cap.max_recv_wr),
        ..attr.cap
    };
    let mut command = Command::new(UVERBS_OBJECT_QP, uapi::UVERBS_METHOD_QP_CREATE);
    command
        .input(uapi::UVERBS_ATTR_CREATE_QP_CAP, &wanted)
        .output(uapi::UVERBS_ATTR_CREATE_QP_RESP_CAP, &mut cap)
        .output(uapi::UVERBS_ATTR_CREATE_QP_RESP_QP_NUM, &mut qpn)
        .output(UVERBS_ATTR_UHW_OUT, &mut response);
    execute(CreateRequest { command, pinned: 0, resources: None })?;
    cap.max_send_wr = reported_depth(attr.cap.max_send_wr, cap.max_send_wr);
    cap.max_recv_wr = reported_depth(attr.cap.max_recv_wr, cap.max_recv_wr);

    let unmapped = |errno| unmapped(verb, errno);
    let limits = SendLimits { max_sge: cap.max_send_sge, max_inline: cap.max_inline_data };
    let transport = attr.transport(qpn);
    let send = RxeSq::map(response.sq_mi, limits, transport, gate.clone(), mapper);
    let send = send.map_err(unmapped)?;
    // These size the tables of requests, so they must not exceed the mapped ring.
    cap.max_send_wr = cap.max_send_wr.min(send.capacity());
    let recv = match (attr.srq, attr.cap.max_recv_wr) {
        (Some(_), _) | (None, 0) => None,
        (None, _) => {
            let ring = RxeRq::map(response.rq_mi, cap.max_recv_sge, gate.clone(), mapper);
            let ring = ring.map_err(unmapped)?;
            cap.max_recv_wr = cap.max_recv_wr.min(ring.capacity());
            Some(provider::RecvRing::Rxe(ring))
        }
    };
    let named = send.named().cloned();
    let send = provider::SendRing::Rxe(send);
    let member = Member { number: Some(qpn), shared: None };
    Ok(CreatedQp { send, recv, qpn, cap, member, gate, named, ece: None })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queue_has_a_place_more_than_is_reported() {
        for (wanted, requested, granted, reported) in [
            (0, 0, 0, 0),
            (3, 4, 7, 3),
            (4, 5, 7, 6),
            (0x3fff, 0x4000, 0x7fff, 0x3fff),
            (0x4000, 0x4000, 0x7fff, 0x7ffe),
            // The only depths without an additional place.
            (0x7fff, 0x7fff, 0x7fff, 0x7fff),
            // Numbers that no kernel grants.
            (u32::MAX, u32::MAX, 0x7fff, u32::MAX),
            (u32::MAX, u32::MAX, 0, u32::MAX),
            (3, 4, u32::MAX, 3),
            (u32::MAX - 1, u32::MAX - 1, u32::MAX, u32::MAX - 1),
        ] {
            assert_eq!(requested_depth(wanted), requested, "{wanted:#x}");
            assert_eq!(reported_depth(wanted, granted), reported, "{wanted:#x} of {granted:#x}");
        }
    }
}
