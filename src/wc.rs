//! What a completion says: status, opcode, and data that came within it. The completion itself is in
//! [`completion`](crate::completion).

use crate::number::open_enum;

open_enum! {
    /// How a request ended. After any error the queue pair is in state
    /// [`ERR`](crate::QpState::ERR), or [`SQE`](crate::QpState::SQE) after a send of UC or UD, and
    /// what else was posted to it completes as `WR_FLUSH_ERR`.
    #[doc(alias = "ibv_wc_status")]
    pub struct WcStatus(u32) {
        SUCCESS = 0, "success";
        LOC_LEN_ERR = 1, "local length error";
        LOC_QP_OP_ERR = 2, "local QP operation error";
        LOC_EEC_OP_ERR = 3, "local EE context operation error";
        LOC_PROT_ERR = 4, "local protection error";
        WR_FLUSH_ERR = 5, "request flushed";
        MW_BIND_ERR = 6, "memory window bind error";
        BAD_RESP_ERR = 7, "bad response";
        LOC_ACCESS_ERR = 8, "local access error";
        REM_INV_REQ_ERR = 9, "remote invalid request";
        REM_ACCESS_ERR = 10, "remote access error";
        REM_OP_ERR = 11, "remote operation error";
        RETRY_EXC_ERR = 12, "transport retries exceeded";
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
    /// What a completion belongs to. Valid only with [`WcStatus::SUCCESS`].
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
    pub fn is_recv(self) -> bool {
        self.0 & Self::RECV.0 != 0
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

impl std::fmt::Debug for Scattered {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        (**self).fmt(f)
    }
}
