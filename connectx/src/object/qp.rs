//! Queue pairs: their context and their state.

use uverbs_uapi::mlx5::prm::Bits;
use uverbs_uapi::mlx5::prm::qpc::qpc;

use uverbs_roce::opcodes::Transport;

use super::Objects;
use super::in_flight::InFlight;
use super::receive_queue::ReceiveQueue;
use super::receiving::Receiving;
use super::send_queue::SendQueue;
use crate::command_error::{CommandError, refuse};
use crate::fault::MessageFate;
use crate::object::timestamp::TimestampFormat;

/// Service types, `MLX5_QP_ST_*`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Service {
    /// Reliable connection.
    Rc,
    /// Unreliable connection.
    Uc,
    /// Unreliable datagram.
    Ud,
    /// XRC: the sender names the SRQ.
    Xrc,
    /// General services: QPN 1 on the wire.
    Gsi,
    /// Subnet management: QPN 0 on the wire.
    Smi,
    /// Only executes UMR WQEs.
    Umr,
}

impl Service {
    pub(crate) fn new(st: u64) -> Result<Self, CommandError> {
        match st {
            0x0 => Ok(Self::Rc),
            0x1 => Ok(Self::Uc),
            0x2 => Ok(Self::Ud),
            0x3 => Ok(Self::Xrc),
            0x7 => Ok(Self::Smi),
            0x8 => Ok(Self::Gsi),
            0xc => Ok(Self::Umr),
            other => refuse!(BadParam, "QP service type {other:#x} is not modelled"),
        }
    }

    /// Whether the service has acknowledgements.
    pub fn reliable(self) -> bool {
        matches!(self, Self::Rc | Self::Xrc)
    }

    /// The transport whose packets it sends. A UMR queue pair sends none, and an error ends it as one of RC.
    pub(crate) fn transport(self) -> Transport {
        match self {
            Self::Rc | Self::Umr => Transport::Rc,
            Self::Uc => Transport::Uc,
            Self::Xrc => Transport::Xrc,
            Self::Ud | Self::Gsi | Self::Smi => Transport::Ud,
        }
    }

    /// Whether each WQE names its destination.
    pub fn datagram(self) -> bool {
        matches!(self, Self::Ud | Self::Gsi | Self::Smi)
    }
}

/// States, `MLX5_QP_STATE_*`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum QpState {
    /// After creation.
    Reset = 0,
    /// Receives may be posted.
    Init = 1,
    /// Messages are received.
    ReadyToReceive = 2,
    /// Messages are sent.
    ReadyToSend = 3,
    /// Sending has stopped on an error; receiving continues.
    SendError = 4,
    /// The device flushes all WQEs.
    Error = 6,
}

/// Version 1 of the options of connections (ECE), in the upper four bits.
const ECE_VERSION: u32 = 0x1000_0000;

/// The options that the device offers. None of them has an effect on messages.
const ECE_OPTIONS: u32 = ECE_VERSION | 7;

/// The options that the device accepts of those asked for: none of another version.
pub(crate) fn take_ece(asked: u32) -> u32 {
    if asked >> 28 == ECE_VERSION >> 28 { asked & ECE_OPTIONS } else { 0 }
}

/// The options that the device offers to a driver that creates a queue pair with `asked`: all of them if the driver
/// names the version alone.
pub(crate) fn tell_ece(asked: u32) -> u32 {
    if asked == ECE_VERSION { ECE_OPTIONS } else { take_ece(asked) }
}

/// A queue pair.
pub struct Qp {
    pub(crate) service: Service,
    pub(crate) state: QpState,
    pub(crate) context: Bits<qpc, Vec<u8>>,
    pub(crate) sq: Option<SendQueue>,
    pub(crate) rq: Option<ReceiveQueue>,
    pub(crate) srqn: Option<u32>,
    pub(crate) pd: u32,
    pub(crate) uar: u32,
    pub(crate) umems: Vec<u32>,
    /// Requests that the transport has and that are not complete.
    pub(crate) in_flight: InFlight,
    /// The fate of the packets of the request that is being sent; a delay is that of the next one, and the others wait
    /// behind it.
    pub(crate) fate: MessageFate,
    /// The message that is being received.
    pub(crate) receiving: Receiving,
    /// In error state: when the device checks for late receives.
    pub(crate) late_receive_check: Option<u64>,
    /// The number of checks for late receives so far.
    pub(crate) late_receive_checks: u8,
    /// Whether LAST_WQE_REACHED was raised.
    pub(crate) last_wqe_reported: bool,
    /// The options of the connection (ECE) that the device took; 0 for none.
    pub(crate) ece: u32,
}

impl Qp {
    /// The format of the timestamps in its CQEs.
    pub(crate) fn timestamps(&self) -> TimestampFormat {
        TimestampFormat::of(self.context.get(qpc::ts_format))
    }

    /// The CQN of sends.
    pub(crate) fn send_cq(&self) -> u32 {
        self.context.get32(qpc::cqn_snd)
    }

    /// The most bytes of response data that are scattered to the CQE.
    pub(crate) fn send_scatter_to_cqe(&self) -> usize {
        match self.context.get(qpc::cs_req) {
            0x11 => 32,
            0x22 => 64,
            _ => 0,
        }
    }

    /// The most bytes of a message that are scattered to the CQE.
    pub(crate) fn receive_scatter_to_cqe(&self) -> usize {
        match self.context.get(qpc::cs_res) {
            1 => 32,
            2 => 64,
            _ => 0,
        }
    }

    /// The CQN of receives.
    pub(crate) fn receive_cq(&self) -> u32 {
        self.context.get32(qpc::cqn_rcv)
    }

    pub(crate) fn set_state(&mut self, state: QpState) {
        self.state = state;
        if state == QpState::Reset {
            if let Some(sq) = &mut self.sq {
                sq.reset();
            }
            if let Some(rq) = &mut self.rq {
                rq.reset();
            }
            self.in_flight.clear();
            self.fate = MessageFate::Delivered;
            self.late_receive_checks = 0;
            self.last_wqe_reported = false;
        }
    }
}

impl Objects {
    /// The queue that a queue pair takes its receives from, if any.
    pub(crate) fn receive_queue(
        &mut self,
        number: u32,
        xrc: Option<u32>,
    ) -> Option<&mut ReceiveQueue> {
        let qp = self.qps.get_mut(number).ok()?;
        match xrc.or(qp.srqn) {
            Some(srqn) => self.srqs.get_mut(srqn).ok().map(|srq| &mut srq.queue),
            None => qp.rq.as_mut(),
        }
    }
}
