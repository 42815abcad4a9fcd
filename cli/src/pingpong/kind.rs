//! The four kinds of ping-pong and their differences.

use super::exchange::SRQ_ADDRESSES;
use super::pattern::PLAIN;
use crate::args::PingpongArgs;
use std::fmt;
use uverbs::QpType;

/// Bytes before a datagram for the global route header (GRH).
const GRH: u32 = 40;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Rc,
    Uc,
    Ud,
    Srq,
}

impl Kind {
    pub(crate) fn of(args: &PingpongArgs) -> Kind {
        match args {
            PingpongArgs::Rc { .. } => Kind::Rc,
            PingpongArgs::Uc { .. } => Kind::Uc,
            PingpongArgs::Ud { .. } => Kind::Ud,
            PingpongArgs::Srq { .. } => Kind::Srq,
        }
    }

    pub(crate) fn qp_type(self) -> QpType {
        match self {
            Kind::Rc | Kind::Srq => QpType::RC,
            Kind::Uc => QpType::UC,
            Kind::Ud => QpType::UD,
        }
    }

    /// Whether the device retransmits lost packets.
    pub(crate) fn is_reliable(self) -> bool {
        self.qp_type() == QpType::RC
    }

    /// Bytes before the message in a receive buffer.
    pub(crate) fn header(self) -> u32 {
        match self {
            Kind::Ud => GRH,
            _ => 0,
        }
    }

    /// The number of addresses that each side sends.
    pub(crate) fn addresses(self) -> usize {
        match self {
            Kind::Srq => SRQ_ADDRESSES,
            _ => 1,
        }
    }

    /// The byte that fills messages of a run without checks.
    pub(crate) fn plain(self) -> u8 {
        match self {
            Kind::Srq => 0,
            _ => PLAIN,
        }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Kind::Rc => "rc",
            Kind::Uc => "uc",
            Kind::Ud => "ud",
            Kind::Srq => "srq",
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
