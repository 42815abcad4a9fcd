//! What each transport takes as a send request, whatever the device.

use super::{Payload, PostError, Remote, SendOp, SendWr};
use crate::identity::Identity;
use crate::number::{Qpn, Rkey};
use crate::qp::state::QpType;

/// The transport of a queue pair, and what requests are compared with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QpTransport {
    pub(crate) qp_type: QpType,
    pub(crate) qpn: Qpn,
    /// The protection domain, whose address handles requests may name.
    pub(crate) domain: Identity,
}

/// Sets of operations, a [bit](SendOp::bit) each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SendOps {
    /// With the data in memory.
    pub(crate) gather: u32,
    /// With inline data.
    pub(crate) inline: u32,
    /// With a destination in the queue pair's domain, whatever the data.
    pub(crate) datagram: u32,
}

impl SendOps {
    /// The operations of a transport that need no [check](QpTransport::check). A shared receive queue's
    /// number always needs one.
    pub(crate) fn unchecked(qp_type: QpType) -> SendOps {
        let remote = Remote { addr: 0, rkey: Rkey(0) };
        let reliable = [
            SendOp::Read(remote),
            SendOp::CompareSwap { remote, compare: 0, swap: 0 },
            SendOp::FetchAdd { remote, add: 0 },
        ];
        let connected = [
            SendOp::Send,
            SendOp::SendImm(0),
            SendOp::SendInv(remote.rkey),
            SendOp::Write(remote),
            SendOp::WriteImm(remote, 0),
        ];
        let set = |ops: &[SendOp<'_>]| ops.iter().fold(0, |set, op| set | op.bit());
        match qp_type {
            QpType::RC => SendOps {
                gather: set(&reliable) | set(&connected),
                inline: set(&connected),
                datagram: 0,
            },
            QpType::UC => SendOps { gather: set(&connected), inline: set(&connected), datagram: 0 },
            QpType::UD => {
                let datagram = set(&[SendOp::Send, SendOp::SendImm(0)]);
                SendOps { gather: 0, inline: 0, datagram }
            }
            _ => SendOps::default(),
        }
    }
}

impl QpTransport {
    /// Refuses a request that no device could carry out, before it reaches one.
    #[inline]
    pub(crate) fn check(&self, wr: &SendWr<'_>) -> Result<(), PostError> {
        let qp_type = self.qp_type;
        let datagram = qp_type == QpType::UD;
        match &wr.destination {
            Some(_) if !datagram => return Err(PostError::Destination),
            None if datagram => return Err(PostError::Destination),
            Some(to) if to.domain != self.domain => return Err(PostError::ForeignAddress),
            _ => {}
        }
        let local = matches!(wr.op, SendOp::LocalInv(_) | SendOp::BindMw(_));
        if wr.srq.is_some() != (qp_type == QpType::XRC_INI && !local) {
            return Err(PostError::SrqNumber);
        }
        // The kernel notes the queue pair that a binding came through, and the window holds the one that
        // the binding was prepared for.
        if let SendOp::BindMw(binding) = &wr.op {
            if binding.qpn.is_some_and(|qpn| qpn != self.qpn) {
                return Err(PostError::ForeignBinding);
            }
        }
        if qp_type == QpType::RAW_PACKET {
            return match wr.op {
                SendOp::Send | SendOp::Packet(_) => Ok(()),
                _ => Err(PostError::Unsupported),
            };
        }
        let reliable = matches!(qp_type, QpType::RC | QpType::XRC_INI);
        let (supported, inline) = match wr.op {
            SendOp::Packet(_) => (false, false),
            SendOp::Send | SendOp::SendImm(_) => (true, true),
            SendOp::SendInv(_) => (!datagram, true),
            SendOp::Write(_) | SendOp::WriteImm(..) => (!datagram, true),
            SendOp::LocalInv(_) | SendOp::BindMw(_) => (!datagram, false),
            SendOp::Read(_)
            | SendOp::CompareSwap { .. }
            | SendOp::FetchAdd { .. }
            | SendOp::MaskedCompareSwap { .. }
            | SendOp::MaskedFetchAdd { .. }
            | SendOp::Flush { .. }
            | SendOp::AtomicWrite { .. } => (reliable, false),
        };
        if !supported {
            return Err(PostError::Unsupported);
        }
        if !inline && matches!(wr.payload, Payload::Inline(_)) {
            return Err(PostError::NoInline);
        }
        Ok(())
    }
}
