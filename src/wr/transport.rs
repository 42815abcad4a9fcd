//! The send requests that each transport takes on every device.

use super::{Payload, PostError, Remote, SendOp, SendWr};
use crate::identity::Identity;
use crate::number::{Qpn, Rkey};
use crate::qp::state::QpType;

/// The transport of a queue pair, and the values that requests are checked against.
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
    /// Operations with their data in memory.
    pub(crate) gather: u32,
    /// Operations with inline data.
    pub(crate) inline: u32,
    /// Datagrams with a destination in the queue pair's domain, from memory or inline.
    pub(crate) datagram: u32,
    /// Operations with the number of a shared receive queue, and their data in memory.
    pub(crate) srq_gather: u32,
    /// Operations with the number of a shared receive queue, and inline data.
    pub(crate) srq_inline: u32,
}

impl SendOps {
    /// The operations of a transport that need no [check](QpTransport::check).
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
                ..SendOps::default()
            },
            QpType::XRC_INI => SendOps {
                srq_gather: set(&reliable) | set(&connected),
                srq_inline: set(&connected),
                ..SendOps::default()
            },
            QpType::UC => {
                SendOps { gather: set(&connected), inline: set(&connected), ..SendOps::default() }
            }
            QpType::UD => {
                SendOps { datagram: set(&[SendOp::Send, SendOp::SendImm(0)]), ..SendOps::default() }
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
        // The kernel stores the queue pair that a binding was posted to, and the window holds the queue
        // pair that it was prepared for.
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
        if !inline && !matches!(wr.payload, Payload::Sges(_)) {
            return Err(PostError::NoInline);
        }
        Ok(())
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::number::{Lkey, SrqNumber};
    use crate::wr::Sge;

    const SGES: [Sge; 1] = [Sge { addr: 0, length: 8, lkey: Lkey(1) }];
    const REMOTE: Remote = Remote { addr: 0, rkey: Rkey(1) };

    fn requests() -> Vec<SendWr<'static>> {
        let plain = vec![
            SendWr::send(&SGES),
            SendWr::send_imm(&SGES, 1),
            SendWr::send_inv(&SGES, Rkey(2)),
            SendWr::write(REMOTE, &SGES),
            SendWr::write_imm(REMOTE, &SGES, 1),
            SendWr::read(REMOTE, &SGES),
            SendWr::compare_swap(REMOTE, 1, 2, &SGES),
            SendWr::fetch_add(REMOTE, 1, &SGES),
            SendWr::local_inv(Rkey(2)),
        ];
        let inline = plain.iter().map(|wr| wr.inline(&[1]));
        let plain: Vec<_> = plain.iter().copied().chain(inline).collect();
        let to_srq = plain.iter().map(|wr| wr.to_srq(SrqNumber(3)));
        plain.iter().copied().chain(to_srq).collect()
    }

    #[test]
    fn every_request_that_needs_no_check_would_pass_it() {
        let mut counts = Vec::new();
        for qp_type in [QpType::RC, QpType::UC, QpType::UD, QpType::XRC_INI, QpType::RAW_PACKET] {
            let transport = QpTransport { qp_type, qpn: Qpn(7), domain: Identity::NONE };
            let ops = SendOps::unchecked(qp_type);
            let unchecked = |wr: &SendWr<'_>| {
                let set = match (wr.srq, &wr.payload) {
                    (None, Payload::Sges(_)) => ops.gather,
                    (None, _) => ops.inline,
                    (Some(_), Payload::Sges(_)) => ops.srq_gather,
                    (Some(_), _) => ops.srq_inline,
                };
                wr.op.bit() & set != 0
            };
            let skipped: Vec<_> = requests().into_iter().filter(unchecked).collect();
            for wr in &skipped {
                assert_eq!(transport.check(wr), Ok(()), "{qp_type}: {wr:?}");
            }
            counts.push(skipped.len());
        }
        // Eight operations from memory and five with inline data; unreliable ones do not read.
        assert_eq!(counts, [8 + 5, 5 + 5, 0, 8 + 5, 0]);
    }
}
