//! States and transports of queue pairs, and what may be posted when.

use crate::number::open_enum;
use uverbs_uapi::qp::ib_uverbs_qp_type as raw;

open_enum! {
    /// Transport service of a queue pair.
    #[doc(alias = "ibv_qp_type")]
    pub struct QpType(u32) {
        /// Reliable connection.
        #[doc(alias = "IBV_QPT_RC")]
        RC = raw::IB_UVERBS_QPT_RC.0, "RC";
        /// Unreliable connection.
        #[doc(alias = "IBV_QPT_UC")]
        UC = raw::IB_UVERBS_QPT_UC.0, "UC";
        /// Unreliable datagram.
        #[doc(alias = "IBV_QPT_UD")]
        UD = raw::IB_UVERBS_QPT_UD.0, "UD";
        /// Raw Ethernet frames, for which a process needs `CAP_NET_RAW`. Whole frames are sent, and
        /// [rules](crate::QpControl::create_flow) say which are received.
        #[doc(alias = "IBV_QPT_RAW_PACKET")]
        RAW_PACKET = raw::IB_UVERBS_QPT_RAW_PACKET.0, "raw packet";
        /// Sending half of an extended reliable connection.
        #[doc(alias = "IBV_QPT_XRC_SEND")]
        XRC_INI = raw::IB_UVERBS_QPT_XRC_INI.0, "XRC initiator";
        /// Receiving half of an extended reliable connection.
        #[doc(alias = "IBV_QPT_XRC_RECV")]
        XRC_TGT = raw::IB_UVERBS_QPT_XRC_TGT.0, "XRC target";
    }
}

open_enum! {
    /// State of a queue pair.
    #[doc(alias = "ibv_qp_state")]
    pub struct QpState(u8) {
        /// Just made; takes no requests.
        RESET = 0, "RESET";
        /// Takes receives.
        INIT = 1, "INIT";
        /// Ready to receive.
        RTR = 2, "RTR";
        /// Ready to send, too.
        RTS = 3, "RTS";
        /// The send queue is being drained.
        SQD = 4, "SQD";
        /// The send queue failed, the receive queue works on. Not with RC.
        SQE = 5, "SQE";
        /// Everything posted completes with an error.
        ERR = 6, "ERR";
    }
}

impl QpState {
    /// Whether a send may be posted. In an error state it completes at once, flushed.
    #[inline]
    pub(crate) fn takes_sends(self) -> bool {
        self >= QpState::RTS
    }
}
