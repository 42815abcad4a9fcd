//! Port spaces, each with port numbers of its own and types of queue pairs that its ids connect. Pairs with
//! `rdma_ucm_port_space` in `include/uapi/rdma/rdma_user_cm.h`.

use crate::number::open_enum;
use crate::qp::QpType;
use uverbs_uapi::rdma_user_cm::rdma_ucm_port_space;

open_enum! {
    /// The port space of an id. The same port may be in use in each space, and both sides are in the same one. The
    /// space decides the type of the queue pair: RC in `TCP`, UD in `UDP` and `IPOIB`; in `IB` the id has a type of
    /// its own.
    #[doc(alias = "rdma_port_space")]
    pub struct PortSpace(u16) {
        /// Reliable connections.
        #[doc(alias = "RDMA_PS_TCP")]
        TCP = rdma_ucm_port_space::RDMA_PS_TCP.0, "TCP";
        /// Datagrams.
        #[doc(alias = "RDMA_PS_UDP")]
        UDP = rdma_ucm_port_space::RDMA_PS_UDP.0, "UDP";
        /// Queue pairs of any type, UC and XRC among them:
        /// [`create_id`](super::EventChannel::create_id).
        #[doc(alias = "RDMA_PS_IB")]
        IB = rdma_ucm_port_space::RDMA_PS_IB.0, "IB";
        /// Datagrams to the multicast groups of IPoIB, with its Q_Key; on InfiniBand only.
        #[doc(alias = "RDMA_PS_IPOIB")]
        IPOIB = rdma_ucm_port_space::RDMA_PS_IPOIB.0, "IPOIB";
    }
}

impl PortSpace {
    /// The usual space of queue pairs of this type.
    pub(crate) fn of(qp_type: QpType) -> PortSpace {
        match qp_type {
            QpType::RC => PortSpace::TCP,
            QpType::UD => PortSpace::UDP,
            _ => PortSpace::IB,
        }
    }

    /// The type of queue pair in the space, if it has only one.
    pub(super) fn qp_type(self) -> Option<QpType> {
        match self {
            PortSpace::TCP => Some(QpType::RC),
            PortSpace::UDP | PortSpace::IPOIB => Some(QpType::UD),
            _ => None,
        }
    }
}
