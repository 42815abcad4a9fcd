//! Syndromes of CQEs with an error.
//!
//! Pairs with `struct mlx5_err_cqe`.

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

impl From<Syndrome> for CqeError {
    fn from(syndrome: Syndrome) -> Self {
        Self { syndrome: syndrome as u8, vendor: 0x80 | syndrome as u8 }
    }
}
