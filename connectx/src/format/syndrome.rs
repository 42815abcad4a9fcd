//! Syndromes of CQEs with an error.
//!
//! Pairs with `struct mlx5_err_cqe`. The transport has the statuses of verbs, which say the same.

use uverbs_uapi::wc::ib_wc_status;

/// The syndromes of an error CQE.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CqeError {
    /// `MLX5_CQE_SYNDROME_*`, or any other number.
    pub syndrome: u8,
    /// The vendor syndrome (`vendor_err_synd`).
    pub vendor: u8,
}

/// `MLX5_CQE_SYNDROME_*`.
#[allow(missing_docs, reason = "the driver's names")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Syndrome {
    LocalLength = 0x01,
    LocalQpOperation = 0x02,
    LocalProtection = 0x04,
    Flushed = 0x05,
    WindowBinding = 0x06,
    BadResponse = 0x10,
    LocalAccess = 0x11,
    RemoteInvalidRequest = 0x12,
    RemoteAccess = 0x13,
    RemoteOperation = 0x14,
    RetriesExceeded = 0x15,
    ReceiverNotReady = 0x16,
}

/// The two names of each error.
const STATUSES: [(Syndrome, ib_wc_status); 12] = [
    (Syndrome::LocalLength, ib_wc_status::IB_WC_LOC_LEN_ERR),
    (Syndrome::LocalQpOperation, ib_wc_status::IB_WC_LOC_QP_OP_ERR),
    (Syndrome::LocalProtection, ib_wc_status::IB_WC_LOC_PROT_ERR),
    (Syndrome::Flushed, ib_wc_status::IB_WC_WR_FLUSH_ERR),
    (Syndrome::WindowBinding, ib_wc_status::IB_WC_MW_BIND_ERR),
    (Syndrome::BadResponse, ib_wc_status::IB_WC_BAD_RESP_ERR),
    (Syndrome::LocalAccess, ib_wc_status::IB_WC_LOC_ACCESS_ERR),
    (Syndrome::RemoteInvalidRequest, ib_wc_status::IB_WC_REM_INV_REQ_ERR),
    (Syndrome::RemoteAccess, ib_wc_status::IB_WC_REM_ACCESS_ERR),
    (Syndrome::RemoteOperation, ib_wc_status::IB_WC_REM_OP_ERR),
    (Syndrome::RetriesExceeded, ib_wc_status::IB_WC_RETRY_EXC_ERR),
    (Syndrome::ReceiverNotReady, ib_wc_status::IB_WC_RNR_RETRY_EXC_ERR),
];

impl Syndrome {
    /// The status that says the same.
    pub(crate) fn status(self) -> ib_wc_status {
        let found = STATUSES.iter().find(|(syndrome, _)| *syndrome == self);
        found.map_or(ib_wc_status::IB_WC_GENERAL_ERR, |(_, status)| *status)
    }

    /// The syndrome of a status of the transport.
    pub(crate) fn of_status(status: ib_wc_status) -> Self {
        let found = STATUSES.iter().find(|(_, one)| *one == status);
        found.map_or(Self::LocalQpOperation, |(syndrome, _)| *syndrome)
    }
}

impl From<Syndrome> for CqeError {
    fn from(syndrome: Syndrome) -> Self {
        Self { syndrome: syndrome as u8, vendor: 0x80 | syndrome as u8 }
    }
}
