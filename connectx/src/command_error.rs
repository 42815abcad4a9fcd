//! Refused commands: a status, which the driver turns into an errno, and a syndrome.
//!
//! Pairs with `cmd_status_to_err` of mlx5_core. Firmware's syndromes are not documented. Here the
//! upper half is the status, and the lower half a hash of the reason.

use std::fmt;

/// Status of a command.
#[allow(missing_docs, reason = "the driver's names, MLX5_CMD_STAT_*")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum CommandStatus {
    InternalError = 0x01,
    BadOp = 0x02,
    BadParam = 0x03,
    BadSystemState = 0x04,
    BadResource = 0x05,
    ResourceBusy = 0x06,
    LimitExceeded = 0x08,
    BadResourceState = 0x09,
    BadIndex = 0x0a,
    NoResources = 0x0f,
    BadQpState = 0x10,
    BadInputLength = 0x50,
}

/// A refused command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommandError {
    /// The status.
    pub status: CommandStatus,
    /// The reason, for the log.
    pub why: String,
}

impl CommandError {
    /// A number that tells one reason from another in the driver's log.
    pub fn syndrome(&self) -> u32 {
        // FNV-1a over the message without its numbers, so that each reason has one syndrome.
        let words = self.why.bytes().filter(|byte| !byte.is_ascii_hexdigit());
        let hash = words
            .fold(0x811c_9dc5u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
        u32::from(self.status as u8) << 16 | hash & 0xffff
    }
}

impl fmt::Display for CommandError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} (syndrome {:#x}): {}", self.status, self.syndrome(), self.why)
    }
}

/// `Err` of a [`CommandError`] with a formatted reason.
macro_rules! refuse {
    ($status:ident, $($why:tt)*) => {
        Err($crate::command_error::CommandError {
            status: $crate::command_error::CommandStatus::$status,
            why: format!($($why)*),
        })
    };
}
pub(crate) use refuse;
