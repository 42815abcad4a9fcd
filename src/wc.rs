//! Completions as plain data, with their status, opcode and inline data. The completion that polling
//! lends is in [`completion`](crate::completion).

use crate::error::{Error, debug_is_sentence};
use crate::number::{Qpn, Rkey, open_enum};
use rustix::io::Errno;
use std::fmt;

open_enum! {
    /// The outcome of a request. After any error the queue pair is in state
    /// [`ERR`](crate::QpState::ERR), or [`SQE`](crate::QpState::SQE) after a send of UC or UD, and
    /// its other posted requests complete as `WR_FLUSH_ERR`.
    ///
    /// The first completion of a queue pair that is neither a success nor `WR_FLUSH_ERR` names the cause:
    /// `LOC` is a fault of the request or the memory on this side, `REM` one that the peer's device found.
    /// [`Wc::vendor_err`] may say more.
    #[doc(alias = "ibv_wc_status")]
    #[doc(alias = "ibv_wc_status_str")]
    pub struct WcStatus(u32) {
        SUCCESS = 0, "success";
        /// A message was longer than the receive that it took, or a request longer than its port allows. Post
        /// receives as long as the longest message, datagrams of at most the MTU, and other requests of at most
        /// [`max_msg_size`](crate::PortAttr::max_msg_size) bytes.
        LOC_LEN_ERR = 1, "local length error";
        /// The device found that the request does not fit the queue pair: an operation that its transport lacks, an
        /// address handle that is gone or of another protection domain, or, on some devices, a read or atomic while
        /// [`max_rd_atomic`](crate::QpAttr::max_rd_atomic) is 0. Compare the request with the attributes of the queue
        /// pair. rxe also reports it for a packet that its network interface does not take, for example when the link
        /// is down.
        LOC_QP_OP_ERR = 2, "local QP operation error";
        LOC_EEC_OP_ERR = 3, "local EE context operation error";
        /// A scatter/gather entry of the request does not lie within a region of the queue pair's protection
        /// domain, or the region does not permit the access. Keep the region until the request is over, name its
        /// own `lkey`, and register it with [`LOCAL_WRITE`](crate::Access::LOCAL_WRITE) if the device writes it.
        LOC_PROT_ERR = 4, "local protection error";
        /// The queue pair was in an error state, or came to it, before the request was done; a send may still have
        /// reached the peer. Look for the first other error of the queue pair, or for the change that moved it to
        /// [`ERR`](crate::QpState::ERR), such as a disconnect.
        WR_FLUSH_ERR = 5, "request flushed";
        /// A memory window could not be bound. Its region needs [`MW_BIND`](crate::Access::MW_BIND), and the
        /// window may not have more rights than the region, nor lie outside of it.
        MW_BIND_ERR = 6, "memory window bind error";
        /// The peer answered with a packet that the request does not expect.
        BAD_RESP_ERR = 7, "bad response";
        /// A peer's write with immediate data met a protection error on this side.
        LOC_ACCESS_ERR = 8, "local access error";
        /// The peer's device refused the request as invalid. Its queue pair may not permit the operation
        /// ([`QpAttr::access`](crate::QpAttr::access)), or its receive is shorter than the message.
        REM_INV_REQ_ERR = 9, "remote invalid request";
        /// A write, read or atomic named memory that the peer does not open to it. Check that the peer's region or
        /// window is still there, that address and `rkey` are those of [`remote`](crate::MemoryRegion::remote), that
        /// all bytes lie within it, and that it was registered with the right, such as
        /// [`REMOTE_WRITE`](crate::Access::REMOTE_WRITE).
        REM_ACCESS_ERR = 10, "remote access error";
        /// The peer's device could not finish the request, and completed its own receive with an error: look there.
        REM_OP_ERR = 11, "remote operation error";
        /// The peer's device did not acknowledge any of the retries. The peer is gone, its queue pair is not yet in
        /// `RTR` (see [`handshake`](crate::QpControl::handshake)) or is in `ERR`, or packets do not arrive: a wrong
        /// GID or queue pair number, or a firewall that drops UDP port 4791. In a slow network, raise
        /// [`timeout`](crate::QpAttr::timeout) and [`retry_count`](crate::QpAttr::retry_count).
        RETRY_EXC_ERR = 12, "transport retries exceeded";
        /// The peer had no receive posted at any of the retries. Post receives ahead of the messages, or set
        /// [`rnr_retry`](crate::QpAttr::rnr_retry) to 7, which repeats without end.
        RNR_RETRY_EXC_ERR = 13, "receiver-not-ready retries exceeded";
        LOC_RDD_VIOL_ERR = 14, "local RDD violation";
        REM_INV_RD_REQ_ERR = 15, "remote invalid RD request";
        REM_ABORT_ERR = 16, "remote aborted";
        INV_EECN_ERR = 17, "invalid EE context number";
        INV_EEC_STATE_ERR = 18, "invalid EE context state";
        FATAL_ERR = 19, "fatal error";
        RESP_TIMEOUT_ERR = 20, "response timeout";
        GENERAL_ERR = 21, "general error";
        TM_ERR = 22, "tag matching error";
        TM_RNDV_INCOMPLETE = 23, "tag matching rendezvous incomplete";
    }
}

open_enum! {
    /// The kind of request that a completion is of. Valid only with [`WcStatus::SUCCESS`].
    #[doc(alias = "ibv_wc_opcode")]
    pub struct WcOpcode(u32) {
        SEND = 0, "send";
        WRITE = 1, "write";
        READ = 2, "read";
        COMPARE_SWAP = 3, "compare and swap";
        FETCH_ADD = 4, "fetch and add";
        BIND_MW = 5, "bind memory window";
        LOCAL_INV = 6, "local invalidate";
        TSO = 7, "TSO";
        FLUSH = 8, "flush";
        ATOMIC_WRITE = 9, "atomic write";
        RECV = 128, "receive";
        RECV_WRITE_IMM = 129, "receive of a write with immediate";
    }
}

impl WcOpcode {
    /// Whether it belongs to a receive.
    #[inline]
    pub fn is_recv(self) -> bool {
        self.0 & Self::RECV.0 != 0
    }
}

/// A completion as plain data, to keep or to hand on after polling:
/// [`poll_into`](crate::CompletionQueue::poll_into) fills an array of them, and every
/// [`Completion`](crate::Completion) converts into one.
///
/// Unless [`status`](Self::status) is [`WcStatus::SUCCESS`], only `wr_id`, `qpn` and `vendor_err` are valid besides,
/// and all other fields are as in [`Wc::default`]; [`ok`](Self::ok) checks the status first.
///
/// ```
/// # use uverbs::{Wc, WcError};
/// fn handle(wc: &Wc) -> Result<(), WcError> {
///     let wc = wc.ok()?;
///     println!("request {} has moved {} bytes", wc.wr_id, wc.byte_len);
///     Ok(())
/// }
/// ```
#[doc(alias = "ibv_wc")]
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct Wc {
    /// The number that the request was posted with.
    pub wr_id: u64,
    /// The outcome of the request.
    pub status: WcStatus,
    /// The kind of the request.
    pub opcode: WcOpcode,
    /// The queue pair that the request was posted to; see [`Completion::qpn`](crate::Completion::qpn).
    pub qpn: Qpn,
    /// The device's own code for an error; 0 where it has none.
    pub vendor_err: u32,
    /// Bytes received, or returned by a read or atomic; see
    /// [`Completion::byte_len`](crate::Completion::byte_len).
    pub byte_len: u32,
    /// The immediate data of a received message, in host byte order.
    pub imm: Option<u32>,
    /// The key of this side that the message invalidated.
    pub invalidated_rkey: Option<Rkey>,
    /// Whether the first 40 bytes of a received datagram hold a global route header.
    pub has_grh: bool,
    /// The sending queue pair of a datagram.
    pub src_qpn: Qpn,
    /// Local identifier of a datagram's sender; 0 on Ethernet.
    pub src_lid: u16,
    /// Service level of a datagram, 0 to 15.
    pub service_level: u8,
    /// The low bits of the local identifier that a datagram was sent to; 0 on Ethernet.
    pub path_bits: u8,
    /// Index of the partition key that a datagram came with.
    pub pkey_index: u16,
    /// The tag of the flow rule that a raw packet matched; 0 without one.
    pub flow_tag: u32,
    /// Whether the device found the checksums of a raw packet right; see
    /// [`Completion::ip_checksum_ok`](crate::Completion::ip_checksum_ok).
    pub ip_checksum_ok: bool,
    /// The VLAN tag that the device took out of a raw packet.
    pub vlan: Option<u16>,
    /// When the device completed the request, in ticks of its own clock.
    pub timestamp: Option<u64>,
    /// Inline data of the CQE, which is *not* in the memory of the request; see
    /// [`Completion::scattered`](crate::Completion::scattered).
    pub scattered: Option<Scattered>,
}

impl Wc {
    /// Whether the request succeeded.
    #[inline]
    pub fn is_success(&self) -> bool {
        self.status == WcStatus::SUCCESS
    }

    /// The completion, if its request succeeded.
    ///
    /// # Errors
    ///
    /// The status of the failed request.
    #[inline]
    pub fn ok(&self) -> Result<&Self, WcError> {
        if self.is_success() { Ok(self) } else { Err(WcError::of(self)) }
    }
}

/// A request that failed after it was posted, with all valid fields of its completion.
///
/// The queue pair is in an error state; see [`WcStatus`].
#[derive(Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct WcError {
    /// The outcome of the request; never [`WcStatus::SUCCESS`].
    pub status: WcStatus,
    /// The number that the request was posted with.
    pub wr_id: u64,
    /// The queue pair that the request was posted to.
    pub qpn: Qpn,
    /// The device's own code for the error; 0 where it has none.
    pub vendor_err: u32,
}

impl WcError {
    fn of(wc: &Wc) -> Self {
        WcError { status: wc.status, wr_id: wc.wr_id, qpn: wc.qpn, vendor_err: wc.vendor_err }
    }

    /// Whether the request was flushed because of another one's failure, or because the queue pair was
    /// moved to [`ERR`](crate::QpState::ERR).
    pub fn is_flush(&self) -> bool {
        self.status == WcStatus::WR_FLUSH_ERR
    }
}

impl fmt::Display for WcError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let WcError { status, wr_id, qpn, vendor_err } = self;
        write!(f, "request {wr_id} of queue pair {qpn} failed: {status}")?;
        if *vendor_err != 0 {
            write!(f, " (vendor error {vendor_err:#x})")?;
        }
        Ok(())
    }
}

impl std::error::Error for WcError {}

debug_is_sentence!(WcError);

/// For functions that return [`Error`]: `EIO`, with the request, its queue pair and its status in the
/// message.
impl From<WcError> for Error {
    fn from(error: WcError) -> Error {
        Error::new("poll_cq", Errno::IO).detail(error.to_string())
    }
}

/// Bytes that came with a [completion](crate::Completion::scattered); a slice.
#[derive(Clone, Copy)]
pub struct Scattered {
    bytes: [u8; Scattered::MAX],
    length: u8,
}

impl Scattered {
    /// Most bytes that a completion holds.
    pub const MAX: usize = 64;

    /// The first `length` of `bytes`, or all if there are fewer.
    pub(crate) fn new(bytes: &[u8], length: u32) -> Scattered {
        let length = bytes.len().min(Self::MAX).min(length as usize);
        let mut copy = [0; Self::MAX];
        copy.iter_mut().zip(bytes).take(length).for_each(|(to, from)| *to = *from);
        Scattered { bytes: copy, length: length as u8 }
    }
}

impl std::ops::Deref for Scattered {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.bytes.get(..self.length.into()).unwrap_or_default()
    }
}

impl fmt::Debug for Scattered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `{:?}` prints the constant's name, which the documentation's search finds; `{}` prints prose.
    #[test]
    fn statuses_and_opcodes_print_the_name_of_their_constant() {
        assert_eq!(format!("{:?}", WcStatus::WR_FLUSH_ERR), "WR_FLUSH_ERR");
        assert_eq!(format!("{:?}", WcOpcode::RECV_WRITE_IMM), "RECV_WRITE_IMM");
        assert_eq!(format!("{:?}", (WcStatus(250), WcOpcode(77))), "(WcStatus(250), WcOpcode(77))");
        let wc = Wc { status: WcStatus::REM_ACCESS_ERR, opcode: WcOpcode::SEND, ..Wc::default() };
        let text = format!("{wc:?}");
        assert!(text.contains("status: REM_ACCESS_ERR, opcode: SEND"), "{text}");
        assert_eq!(WcStatus::REM_ACCESS_ERR.to_string(), "remote access error");
    }

    #[test]
    fn a_success_is_ok_and_a_failure_names_its_request() {
        let good = Wc { wr_id: 7, byte_len: 64, ..Wc::default() };
        assert_eq!(good.ok().unwrap().byte_len, 64);
        let failed = Wc {
            wr_id: 8,
            status: WcStatus::REM_ACCESS_ERR,
            qpn: Qpn(0x11),
            vendor_err: 0x88,
            ..Wc::default()
        };
        let error = failed.ok().unwrap_err();
        assert_eq!((error.wr_id, error.qpn, error.vendor_err), (8, Qpn(0x11), 0x88));
        assert!(!error.is_flush());
        let text =
            "request 8 of queue pair 0x000011 failed: remote access error (vendor error 0x88)";
        let general = Error::from(error);
        assert_eq!((general.errno(), general.message()), (Errno::IO, text));
        assert_eq!(error.to_string(), text);
    }
}
