//! Queue pairs: their context and their state.

use uverbs_uapi::mlx5::prm::Bits;
use uverbs_uapi::mlx5::prm::qpc::qpc;

use super::Objects;
use super::receive_queue::ReceiveQueue;
use super::send_queue::SendRing;
use crate::refusal::{Refused, refuse};

/// Service types, `MLX5_QP_ST_*`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Service {
    /// Reliable connection.
    Rc,
    /// Unreliable connection.
    Uc,
    /// Unreliable datagram.
    Ud,
    /// Reliable connection whose receives come from an XRC SRQ that the sender names.
    Xrc,
    /// Datagrams of the general services interface, queue pair 1 on the wire.
    Gsi,
    /// Datagrams of subnet management, queue pair 0 on the wire.
    Smi,
    /// Changes memory keys only.
    Umr,
}

impl Service {
    pub(crate) fn new(st: u64) -> Result<Self, Refused> {
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

    /// Whether requests are acknowledged.
    pub fn reliable(self) -> bool {
        matches!(self, Self::Rc | Self::Xrc)
    }

    /// Whether each request names its destination.
    pub fn datagram(self) -> bool {
        matches!(self, Self::Ud | Self::Gsi | Self::Smi)
    }
}

/// States, `MLX5_QP_STATE_*`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum State {
    /// After creation.
    Reset = 0,
    /// Receives may be posted.
    Init = 1,
    /// Messages are received.
    ReadyToReceive = 2,
    /// Messages are sent.
    ReadyToSend = 3,
    /// Sending stopped on an error, receiving goes on.
    SendError = 4,
    /// Everything that is posted is flushed.
    Error = 6,
}

/// Why a queue pair that may send does not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wait {
    /// It tries again at this time.
    Until(u64),
    /// Nothing came back, and it was told to wait however long that takes.
    Forever,
}

/// A queue pair.
pub struct Qp {
    pub(crate) service: Service,
    pub(crate) state: State,
    pub(crate) context: Bits<qpc, Vec<u8>>,
    pub(crate) send: Option<SendRing>,
    pub(crate) receive: Option<ReceiveQueue>,
    pub(crate) srqn: Option<u32>,
    pub(crate) pd: u32,
    pub(crate) uar: u32,
    pub(crate) umems: Vec<u32>,
    /// How often the message under way was tried again because nothing came back.
    pub(crate) retries: u8,
    /// How often it was because no receive was posted.
    pub(crate) rnr_retries: u8,
    /// Until when nothing is sent, or looked at once more in error.
    pub(crate) waits: Option<Wait>,
    /// How often it was, since it failed.
    pub(crate) looks: u8,
    /// Whether its owner was told that it takes no more of the shared receives.
    pub(crate) told_last: bool,
    /// The answer to the last atomic, for a request that is repeated.
    pub(crate) last_atomic: Option<(u32, u64)>,
}

impl Qp {
    /// Number of the queue of completions for sends.
    pub(crate) fn send_cq(&self) -> u32 {
        self.context.get32(qpc::cqn_snd)
    }

    /// Up to how many bytes that a send brings back may lie in its completion.
    pub(crate) fn inline_sends(&self) -> usize {
        match self.context.get(qpc::cs_req) {
            0x11 => 32,
            0x22 => 64,
            _ => 0,
        }
    }

    /// Up to how many bytes of a message may lie in the completion of its receive.
    pub(crate) fn inline_receives(&self) -> usize {
        match self.context.get(qpc::cs_res) {
            1 => 32,
            2 => 64,
            _ => 0,
        }
    }

    /// Number of the queue of completions for receives.
    pub(crate) fn receive_cq(&self) -> u32 {
        self.context.get32(qpc::cqn_rcv)
    }

    pub(crate) fn enter(&mut self, state: State) {
        self.state = state;
        if state == State::Reset {
            if let Some(send) = &mut self.send {
                send.reset();
            }
            if let Some(receive) = &mut self.receive {
                receive.reset();
            }
            self.retries = 0;
            self.rnr_retries = 0;
            self.looks = 0;
            self.told_last = false;
            self.last_atomic = None;
        }
    }
}

impl Objects {
    /// Where a queue pair's receives come from, if it has any.
    pub(crate) fn receive_queue(
        &mut self,
        number: u32,
        xrc: Option<u32>,
    ) -> Option<&mut ReceiveQueue> {
        let qp = self.qps.get_mut(number).ok()?;
        match xrc.or(qp.srqn) {
            Some(srqn) => self.srqs.get_mut(srqn).ok().map(|srq| &mut srq.queue),
            None => qp.receive.as_mut(),
        }
    }
}
