//! The objects of rdma-core at both ends of a lane.

use crate::abi::{Context, CqAttrEx, CqEx, Pd, Qp, QpCap, QpEx, Srq, SrqInitAttrEx, number};
use crate::endpoint::{self, Shape};
use crate::verbs::{Made, Verbs};
use lab_bench::Failure;
use lab_bench::path::{INLINE, RUN, SEGMENTS, SENDS};
use std::ptr::null_mut;

/// The sending and the receiving queue pair.
pub(crate) struct Ends {
    pub(crate) qp: Made<Qp>,
    pub(crate) extended: Made<QpEx>,
    /// The receiver, or nothing where none receives.
    pub(crate) peer: Option<Made<Qp>>,
    pub(crate) send_cq: Made<CqEx>,
    pub(crate) recv_cq: Made<CqEx>,
}

/// Makes the objects of lanes.
pub(crate) struct Maker<'a> {
    pub(crate) verbs: &'a Verbs,
    pub(crate) context: &'a Made<Context>,
    pub(crate) pd: &'a Made<Pd>,
    pub(crate) gid: (u8, [u8; 16]),
    pub(crate) alone: bool,
}

impl Maker<'_> {
    fn cq(&self) -> Result<Made<CqEx>, Failure> {
        let channel = self.verbs.create_channel(self.context)?;
        let mut attr = CqAttrEx {
            cqe: 2 * SENDS,
            cq_context: null_mut(),
            channel: channel.as_ptr(),
            comp_vector: 0,
            wc_flags: 0,
            comp_mask: if self.alone { number::CQ_INIT_ATTR_FLAGS } else { 0 },
            flags: if self.alone { number::CQ_SINGLE_THREADED } else { 0 },
            parent_domain: null_mut(),
        };
        self.verbs.create_cq_ex(self.context, &mut attr)
    }

    fn ends(&self, srq: *mut Srq, qp_type: u32) -> Result<Ends, Failure> {
        let (send_cq, recv_cq) = (self.cq()?, self.cq()?);
        let cqs = [send_cq.as_ptr().cast(), recv_cq.as_ptr().cast()];
        let cap = QpCap {
            max_send_wr: SENDS,
            // An XRC initiator has no receive queue.
            max_recv_wr: u32::from(qp_type != number::QPT_XRC_SEND),
            max_send_sge: SEGMENTS as u32,
            max_recv_sge: 1,
            max_inline_data: INLINE,
        };
        let shape = Shape { cap, srq: null_mut(), qp_type };
        let qp = endpoint::create(self.verbs, self.context, self.pd, cqs, &shape)?;
        let extended = self.verbs.qp_ex(&qp)?;
        let mut peer = None;
        if qp_type == number::QPT_RC {
            let cap = QpCap { max_send_wr: 1, max_recv_wr: 2 * RUN, ..cap };
            let shape = Shape { cap, srq, qp_type };
            peer = Some(endpoint::create(self.verbs, self.context, self.pd, cqs, &shape)?);
        }
        Ok(Ends { qp, extended, peer, send_cq, recv_cq })
    }

    pub(crate) fn pair(&self, srq: *mut Srq) -> Result<Ends, Failure> {
        let ends = self.ends(srq, number::QPT_RC)?;
        if let Some(peer) = &ends.peer {
            endpoint::connect(self.verbs, &ends.qp, endpoint::qpn(peer), self.gid)?;
            endpoint::connect(self.verbs, peer, endpoint::qpn(&ends.qp), self.gid)?;
        }
        Ok(ends)
    }

    /// An XRC initiator, whose peer is the target in a domain of its own, and the number of a shared receive
    /// queue there.
    pub(crate) fn xrc(&self) -> Result<(Ends, u32), Failure> {
        let mut ends = self.ends(null_mut(), number::QPT_XRC_SEND)?;
        let xrcd = self.verbs.open_xrcd(self.context)?;
        let target = endpoint::create_target(self.verbs, self.context, &xrcd)?;
        endpoint::connect(self.verbs, &ends.qp, endpoint::qpn(&target), self.gid)?;
        endpoint::connect(self.verbs, &target, endpoint::qpn(&ends.qp), self.gid)?;
        ends.peer = Some(target);
        let mut attr = SrqInitAttrEx {
            srq_context: null_mut(),
            max_wr: 1,
            max_sge: 1,
            srq_limit: 0,
            comp_mask: number::SRQ_INIT_ATTR_XRC,
            srq_type: number::SRQT_XRC,
            pd: self.pd.as_ptr(),
            xrcd: xrcd.as_ptr(),
            cq: ends.recv_cq.as_ptr().cast(),
            tag_matching: [0; 2],
        };
        let srqn = self.verbs.create_xrc_srq(self.context, &mut attr)?;
        Ok((ends, srqn))
    }

    pub(crate) fn datagrams(&self) -> Result<Ends, Failure> {
        let ends = self.ends(null_mut(), number::QPT_UD)?;
        endpoint::activate(self.verbs, &ends.qp)?;
        Ok(ends)
    }
}
