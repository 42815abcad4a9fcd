//! The device around the transport: memory, keys, receives, completions, and the network.

use crate::headers::Packet;
use uverbs_uapi::wc::ib_wc_status;

/// A device whose queue pairs an [`Endpoint`](crate::Endpoint) drives. All checks of keys, ranges and partitions are
/// its own.
///
/// The endpoint calls it while it handles a packet or runs, and holds nothing of it in between. Offsets and lengths of
/// local data count from the begin of the message; the device knows the scatter/gather list of each request and each
/// receive.
pub trait Host {
    /// Where a packet goes to or comes from: addresses, service level, VLAN, or whatever the network needs.
    type Path: Clone;

    /// Whether a packet is for this queue pair: it comes from the peer's address, the P_Keys match, and the Q_Key of a
    /// datagram is the right one (`check_addr` and `check_keys` of the kernel's `rxe_recv.c`).
    fn admit(&mut self, qpn: u32, from: &Self::Path, packet: &Packet<'_>) -> bool;

    /// A request is about to be sent, or to be sent again from its oldest packet without acknowledgement on. The
    /// requests that the queue pair sends until the next call are packets of it.
    fn begin(&mut self, qpn: u32, request: u64);

    /// Leaves the payload of the next packet in memory until it arrives. The next call of [`send`](Host::send) gets its
    /// headers only; the caller of [`Endpoint::packet_for`](crate::Endpoint::packet_for) gives it a payload as long.
    /// `packets` middle packets of `length` bytes each can leave as one [unit](Packet::packets). Returns how many do,
    /// at most as many, or 0 to have the payload of one packet copied. It is asked for payloads that need no padding,
    /// and of all transports: a request of UC or UD completes when its last packet was sent, and its memory is the
    /// program's again.
    fn leave_in_place(&mut self, qpn: u32, source: Source, length: u32, packets: u32) -> u32 {
        let _ = (qpn, source, length, packets);
        0
    }

    /// Sends a packet: the bytes from BTH to padding. Returns whether the queue pair may send more in this turn.
    fn send(&mut self, qpn: u32, to: &Self::Path, packet: &[u8]) -> bool;

    /// Reads data of a request that is sent.
    ///
    /// # Errors
    ///
    /// The status with which the request fails.
    fn read_local(
        &mut self,
        qpn: u32,
        request: u64,
        offset: u32,
        to: &mut [u8],
    ) -> Result<(), ib_wc_status>;

    /// Writes data of a read that was received.
    ///
    /// # Errors
    ///
    /// The status with which the request fails.
    fn write_local(
        &mut self,
        qpn: u32,
        request: u64,
        offset: u32,
        data: &[u8],
    ) -> Result<(), ib_wc_status>;

    /// Writes the old value that an atomic returns.
    ///
    /// # Errors
    ///
    /// The status with which the request fails.
    fn write_old(&mut self, qpn: u32, request: u64, old: u64) -> Result<(), ib_wc_status>;

    /// Executes a request that needs no packet, [`Work::Local`](crate::Work::Local), in its turn, which ends with it.
    ///
    /// # Errors
    ///
    /// The status with which the request fails.
    fn run_local(&mut self, qpn: u32, request: u64) -> Result<(), ib_wc_status>;

    /// Completes a request. Requests complete in the order in which they were posted, each once.
    fn complete(&mut self, qpn: u32, request: u64, status: ib_wc_status);

    /// Whether the peer may do this. The whole of a message is checked before its first byte is touched. Reads and
    /// writes of no bytes need no key.
    ///
    /// # Errors
    ///
    /// The NAK that the peer gets.
    fn check_remote(&mut self, qpn: u32, right: Right, target: Target) -> Result<(), Refusal>;

    /// Reads memory for the peer.
    ///
    /// # Errors
    ///
    /// The NAK that the peer gets.
    fn read_remote(&mut self, qpn: u32, target: Target, to: &mut [u8]) -> Result<(), Refusal>;

    /// Writes memory for the peer.
    ///
    /// # Errors
    ///
    /// The NAK that the peer gets.
    fn write_remote(&mut self, qpn: u32, target: Target, data: &[u8]) -> Result<(), Refusal>;

    /// Changes the bytes of an atomic for the peer, and returns what they were.
    ///
    /// # Errors
    ///
    /// The NAK that the peer gets.
    fn atomic(&mut self, qpn: u32, target: Target, change: Atomic) -> Result<u64, Refusal>;

    /// Writes the eight bytes of an atomic write at once.
    ///
    /// # Errors
    ///
    /// The NAK that the peer gets.
    fn atomic_write(&mut self, qpn: u32, target: Target, data: [u8; 8]) -> Result<(), Refusal>;

    /// Makes earlier writes visible or persistent: see [`Feth`](crate::headers::Feth) for type and level.
    ///
    /// # Errors
    ///
    /// The NAK that the peer gets.
    fn flush(&mut self, qpn: u32, target: Target, kind: u8, level: u8) -> Result<(), Refusal>;

    /// Invalidates a key for the peer.
    ///
    /// # Errors
    ///
    /// The NAK that the peer gets.
    fn invalidate(&mut self, qpn: u32, srq: Option<u32>, key: u32) -> Result<(), Refusal>;

    /// Takes the next receive of the queue pair or the SRQ, for a message of which the first byte has come; `None` if
    /// there is none.
    ///
    /// # Errors
    ///
    /// The NAK that the peer gets.
    fn take_receive(&mut self, qpn: u32, srq: Option<u32>) -> Result<Option<u64>, Refusal>;

    /// Writes data of a message to a receive.
    ///
    /// # Errors
    ///
    /// The status with which the receive fails. The peer gets a NAK: invalid request if it is
    /// [`IB_WC_LOC_LEN_ERR`](ib_wc_status::IB_WC_LOC_LEN_ERR), else remote operational error.
    fn write_receive(
        &mut self,
        qpn: u32,
        receive: u64,
        offset: u32,
        data: &[u8],
    ) -> Result<(), ib_wc_status>;

    /// Completes a receive; `received` is an error if it failed, with its status.
    ///
    /// # Errors
    ///
    /// The NAK that the peer gets because the completion cannot be reported. A receive that failed has its own.
    fn complete_receive(
        &mut self,
        qpn: u32,
        receive: u64,
        received: Result<Received<'_, Self::Path>, ib_wc_status>,
    ) -> Result<(), Refusal>;

    /// Tells an event of a queue pair.
    fn event(&mut self, qpn: u32, event: Event);

    /// Counts a loss that the queue pair repairs, or a message that it cannot take.
    fn count(&mut self, qpn: u32, counter: Counter);
}

/// Memory with data of a packet that is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// That of a request, from `offset` on.
    Request {
        /// The device's name of the request.
        id: u64,
        /// Bytes in front.
        offset: u32,
    },
    /// That of a read by the peer; its length is that of the packets.
    Read(Target),
}

/// Memory that a peer names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target {
    /// The SRQ that the request names, on XRC: its protection domain counts.
    pub srq: Option<u32>,
    /// Address.
    pub address: u64,
    /// Remote key.
    pub key: u32,
    /// Bytes.
    pub length: u32,
}

impl Target {
    /// The part of it from `offset` on, of so many bytes.
    pub(crate) fn part(self, offset: u32, length: u32) -> Target {
        let address = self.address.wrapping_add(offset.into());
        Target { address, length, ..self }
    }
}

/// The right that a request needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Right {
    /// To read.
    Read,
    /// To write.
    Write,
    /// To execute atomics.
    Atomic,
    /// To flush, with this placement type at this selectivity level.
    Flush(u8, u8),
}

/// An atomic. Masked ones, and those of four bytes, reach devices of the same fabric only:
/// [`MaskedEth`](crate::headers::MaskedEth).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Atomic {
    /// Stores `swap` if the value is `compare`.
    CompareSwap {
        /// The value that is expected.
        compare: u64,
        /// The value that is stored.
        swap: u64,
    },
    /// Adds.
    FetchAdd {
        /// The summand.
        add: u64,
    },
    /// Stores `swap` under its mask if the bits under the other mask are those of `compare`.
    MaskedCompareSwap {
        /// The value that is expected.
        compare: u64,
        /// The bits that are compared.
        compare_mask: u64,
        /// The value that is stored.
        swap: u64,
        /// The bits that are stored.
        swap_mask: u64,
    },
    /// Adds fields by themselves: no carry leaves a bit of `boundary`.
    MaskedFetchAdd {
        /// The summands.
        add: u64,
        /// The highest bit of each field.
        boundary: u64,
    },
}

impl Atomic {
    /// The new value.
    pub fn apply(self, old: u64) -> u64 {
        match self {
            Atomic::CompareSwap { compare, swap } if old == compare => swap,
            Atomic::CompareSwap { .. } => old,
            Atomic::FetchAdd { add } => old.wrapping_add(add),
            Atomic::MaskedCompareSwap { compare, compare_mask, swap, swap_mask } => {
                let equal = (old ^ compare) & compare_mask == 0;
                if equal { old & !swap_mask | swap & swap_mask } else { old }
            }
            // The highest bit of a field is added without its carry, by itself.
            Atomic::MaskedFetchAdd { add, boundary } => {
                (old & !boundary).wrapping_add(add & !boundary) ^ (old ^ add) & boundary
            }
        }
    }
}

/// Why a device does not do what a peer asks for. The peer gets a NAK, and the queue pair moves to error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The request makes no sense.
    InvalidRequest,
    /// The key does not allow it.
    Access,
    /// The device failed.
    Operational,
}

/// A message that consumed a receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Received<'a, P> {
    /// Bytes of the message.
    pub length: u32,
    /// Whether it was an RDMA write with immediate data, and no send.
    pub write: bool,
    /// Immediate data.
    pub immediate: Option<u32>,
    /// The key that the message invalidated.
    pub invalidated: Option<u32>,
    /// Whether the completion is solicited.
    pub solicited: bool,
    /// Source QPN.
    pub source: u32,
    /// P_Key of the packet.
    pub pkey: u16,
    /// Where the last packet came from.
    pub from: &'a P,
}

/// A change of a queue pair that the device did not ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// The first packet came while the queue pair could only receive.
    CommunicationEstablished,
    /// All requests that had begun when it moved to SQD are complete.
    SendQueueDrained,
    /// A request failed. The queue pair is in SQE if it is UC or UD, else in error; its other requests were flushed.
    /// The device flushes what it has not posted.
    SendFailed,
    /// The peer asked for what it must not, and the queue pair is in error. It may have been in error before: then this
    /// is the reason of the NAK that it owed.
    Refused(Refusal),
    /// A receive failed, and the queue pair is in error.
    ReceiveFailed,
}

/// Counters of a queue pair, which [`Host::count`] counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Counter {
    /// Requester: local ACK timeouts.
    Timeouts,
    /// Requester: NAKs for a packet out of sequence.
    SequenceNaks,
    /// Requester: responses that show that an earlier one was lost.
    ImpliedNaks,
    /// Requester: RNR NAKs.
    RnrNaks,
    /// Responder: requests that came again.
    Duplicates,
    /// Responder: packets that came early.
    OutOfSequence,
    /// Responder: messages for which there was no receive.
    OutOfBuffer,
}

#[cfg(test)]
mod tests {
    use super::Atomic;

    #[test]
    fn fields_are_added_by_themselves() {
        let mut word = 1u64;
        for _ in 0..1_000 {
            let [old, add, boundary] = [(); 3].map(|()| {
                word = word.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                word.rotate_left(23)
            });
            let (mut sum, mut carry) = (0, 0);
            for bit in 0..64 {
                let here = (old >> bit & 1) + (add >> bit & 1) + carry;
                sum |= (here & 1) << bit;
                carry = if boundary >> bit & 1 != 0 { 0 } else { here >> 1 };
            }
            assert_eq!(Atomic::MaskedFetchAdd { add, boundary }.apply(old), sum);
        }
    }
}
