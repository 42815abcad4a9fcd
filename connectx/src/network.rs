//! The network between two functions: its properties in one direction.
//!
//! Pairs with `ways.rs`, which does what they say.

use std::fmt;
use std::time::Duration;

use uverbs_roce::opcodes::{Kind, Opcode, Operation};

use crate::decisions::Decisions;

/// Bytes of a packet of RoCE v2 beside those from BTH to padding: Ethernet, IPv4, UDP, ICRC.
pub(crate) const FRAMING: u64 = 14 + 20 + 8 + 4;

/// The network from one device to another: how long packets take, and which do not arrive.
///
/// [`Network::ideal`] loses nothing and takes no time. Other methods make it worse. Shares are of packets, from 0 for
/// never to 1 for always, and a seed decides about each packet; packets are those of queue pairs, with ACKs and
/// responses.
///
/// ```text
///          queue and bandwidth             queue and bandwidth     latency + jitter
/// sender ──▶ [││││ ] ═════▶ lost, ─────────▶ [││││ ] ═════▶ ─────▶ ··············· ──▶ receiver
///             full: dropped doubled           full: dropped        overtaken           damaged: dropped,
///             long: marked                    long: marked                             by its ICRC
/// ```
///
/// Both queues are those of ports. All that a device sends shares the first one and its bandwidth, and all that a device
/// gets shares the second one, where several senders meet (incast); one sender alone never waits there.
#[derive(Clone, Debug, PartialEq)]
#[must_use]
pub struct Network {
    /// Bits per second; none if packets take no time to send.
    pub(crate) bandwidth: Option<u64>,
    pub(crate) latency: u64,
    pub(crate) jitter: u64,
    /// The most bytes and packets that wait.
    pub(crate) queue: (u64, usize),
    /// The bytes that wait, above which a packet is marked.
    pub(crate) marks_above: Option<u64>,
    pub(crate) loss: f64,
    pub(crate) duplication: f64,
    pub(crate) corruption: f64,
    pub(crate) reordering: f64,
    /// The most nanoseconds by which packets are late that others overtake.
    pub(crate) latest: u64,
}

impl Network {
    /// The most packets that are under way from one device to another.
    pub const MOST_PACKETS: usize = 1 << 14;

    /// Packets arrive at once and in order, and none is lost.
    pub fn ideal() -> Network {
        Network {
            bandwidth: None,
            latency: 0,
            jitter: 0,
            queue: (u64::MAX, Network::MOST_PACKETS),
            marks_above: None,
            loss: 0.0,
            duplication: 0.0,
            corruption: 0.0,
            reordering: 0.0,
            latest: 0,
        }
    }

    /// A network that a seed draws: for one seed in four an ideal one, for one a hostile one that loses, doubles,
    /// damages and reorders up to a tenth of all packets, and else one with latency, jitter and a queue that may be too
    /// short.
    pub fn of_seed(seed: u64) -> Network {
        let mut decisions = Decisions::new(seed ^ 0x6e65_7477_6f72_6b73);
        let mut micros = |most: u64| Duration::from_nanos(decisions.below(most * 1000));
        let (latency, jitter, late) = (micros(20), micros(10), micros(50));
        let mut share = |thousandths| decisions.below(thousandths) as f64 / 1000.0;
        let shares = [share(100), share(50), share(10), share(100)];
        let network = Network::ideal().latency(latency).jitter(jitter);
        match seed % 4 {
            0 => Network::ideal(),
            1 => network
                .loss(shares[0])
                .duplication(shares[1])
                .corruption(shares[2])
                .reordering(shares[3], late),
            _ => network
                .bandwidth(1_000_000_000 << decisions.below(8))
                .queue_bytes(8_000 << decisions.below(6))
                .marks_above(4_000),
        }
    }

    /// Bits per second of both ports. Packets pass one after the other, each for as long as its frame of RoCE v2 takes, and
    /// wait in a queue meanwhile. Without it they pass ports without a queue. 0 is refused.
    pub fn bandwidth(mut self, bits_per_second: u64) -> Network {
        self.bandwidth = Some(bits_per_second);
        self
    }

    /// The time from the end of a packet's sending to its arrival, without jitter and the receiver's port. At most a year.
    pub fn latency(mut self, latency: Duration) -> Network {
        self.latency = nanoseconds(latency);
        self
    }

    /// The most by which a packet takes longer: each one by any time up to this one, at most a year. Packets stay in order.
    pub fn jitter(mut self, most: Duration) -> Network {
        self.jitter = nanoseconds(most);
        self
    }

    /// The bytes that wait at a port at most, with the packet that passes. One that does not fit is dropped, unless the port
    /// is idle.
    pub fn queue_bytes(mut self, most: u64) -> Network {
        self.queue.0 = most;
        self
    }

    /// The packets that wait at a port at most, with the one that passes: [`Network::MOST_PACKETS`] unless fewer are set.
    pub fn queue_packets(mut self, most: usize) -> Network {
        self.queue.1 = most.min(Network::MOST_PACKETS);
        self
    }

    /// Marks a packet as having met congestion if more bytes wait before it: FECN in its BTH, and in IP *congestion
    /// experienced* (CE) in place of ECT(0), both bits of ECN.
    pub fn marks_above(mut self, bytes: u64) -> Network {
        self.marks_above = Some(bytes);
        self
    }

    /// The share of packets that are lost.
    pub fn loss(mut self, share: f64) -> Network {
        self.loss = share;
        self
    }

    /// The share of packets that arrive twice.
    pub fn duplication(mut self, share: f64) -> Network {
        self.duplication = share;
        self
    }

    /// The share of packets in which one bit is another one. The receiver drops such a packet by its ICRC, unless the
    /// bit is one that routers may change.
    pub fn corruption(mut self, share: f64) -> Network {
        self.corruption = share;
        self
    }

    /// The share of packets that are late by any time up to `latest`, at most a year, while others overtake them.
    pub fn reordering(mut self, share: f64, latest: Duration) -> Network {
        (self.reordering, self.latest) = (share, nanoseconds(latest));
        self
    }

    /// Whether nothing ever leaves a port.
    pub fn has_zero_bandwidth(&self) -> bool {
        self.bandwidth == Some(0)
    }

    /// A share that is not between 0 and 1, with its name.
    pub fn out_of_range(&self) -> Option<(&'static str, f64)> {
        let shares = [
            ("loss", self.loss),
            ("duplication", self.duplication),
            ("corruption", self.corruption),
            ("reordering", self.reordering),
        ];
        shares.into_iter().find(|(_, share)| !(0.0..=1.0).contains(share))
    }

    /// The time to send a packet of so many bytes, in nanoseconds.
    pub(crate) fn sending(&self, bytes: u64) -> u64 {
        let Some(bandwidth) = self.bandwidth else { return 0 };
        let bits = u128::from(bytes) * 8 * 1_000_000_000;
        u64::try_from(bits.div_ceil(bandwidth.max(1).into())).unwrap_or(u64::MAX)
    }
}

/// At most a year, so that sums stay times.
fn nanoseconds(time: Duration) -> u64 {
    const YEAR: u64 = 365 * 24 * 60 * 60 * 1_000_000_000;
    u64::try_from(time.as_nanos()).unwrap_or(YEAR).min(YEAR)
}

/// A fault of the next packets from one device to another, of which [`PacketFault::after`] passes some over.
///
/// It comes before those by share, and meets packets that are sent again, too. A packet has one fault at a time: that of the
/// script which was set first.
#[derive(Clone, Debug)]
#[must_use]
pub struct PacketFault {
    pub(crate) change: Change,
    of: Option<PacketKind>,
    after: u64,
    count: u64,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Change {
    Lost,
    Doubled,
    Damaged,
    Marked,
    /// By so many nanoseconds, and overtaken by others.
    Late(u64),
}

/// Kinds of packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PacketKind {
    /// Requests: sends, writes, read requests, atomics.
    Request,
    /// ACKs and NAKs.
    Acknowledge,
    /// Responses to reads and atomics.
    Response,
}

impl PacketFault {
    fn new(change: Change) -> PacketFault {
        PacketFault { change, of: None, after: 0, count: 1 }
    }

    /// The next packet is lost.
    pub fn lose() -> PacketFault {
        PacketFault::new(Change::Lost)
    }

    /// The next packet arrives twice.
    pub fn double() -> PacketFault {
        PacketFault::new(Change::Doubled)
    }

    /// A bit of the next packet is another one. The receiver drops it by its ICRC.
    pub fn damage() -> PacketFault {
        PacketFault::new(Change::Damaged)
    }

    /// The next packet is marked as having met congestion: see [`Network::marks_above`].
    pub fn mark() -> PacketFault {
        PacketFault::new(Change::Marked)
    }

    /// The next packet takes longer, by at most a year, and others overtake it.
    pub fn delay(time: Duration) -> PacketFault {
        PacketFault::new(Change::Late(nanoseconds(time)))
    }

    /// Of packets of this kind only; others are not counted.
    pub fn of(mut self, kind: PacketKind) -> PacketFault {
        self.of = Some(kind);
        self
    }

    /// So many packets pass before.
    pub fn after(mut self, packets: u64) -> PacketFault {
        self.after = packets;
        self
    }

    /// So many packets in place of one.
    pub fn count(mut self, packets: u64) -> PacketFault {
        self.count = packets;
        self
    }

    /// Whether it is to happen to a packet. One that passes before counts, whatever happens to it.
    pub(crate) fn is_due(&mut self, packet: &[u8]) -> bool {
        let opcode = packet.first().and_then(|byte| Opcode::from_byte(*byte));
        let kind = opcode.map(|opcode| match opcode.operation {
            Operation::Acknowledge => PacketKind::Acknowledge,
            operation if operation.kind() == Kind::Response => PacketKind::Response,
            _ => PacketKind::Request,
        });
        if self.count == 0 || self.of.is_some() && self.of != kind {
            return false;
        }
        let due = self.after == 0;
        self.after = self.after.saturating_sub(1);
        due
    }

    /// It happens to a packet.
    pub(crate) fn happen(&mut self) -> Change {
        self.count = self.count.saturating_sub(1);
        self.change
    }

    pub(crate) fn is_over(&self) -> bool {
        self.count == 0
    }
}

impl fmt::Display for PacketFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.of {
            None => "packets",
            Some(PacketKind::Request) => "requests",
            Some(PacketKind::Acknowledge) => "ACKs and NAKs",
            Some(PacketKind::Response) => "responses",
        };
        match self.change {
            Change::Lost => write!(f, "loses")?,
            Change::Doubled => write!(f, "doubles")?,
            Change::Damaged => write!(f, "damages")?,
            Change::Marked => write!(f, "marks")?,
            Change::Late(time) => write!(f, "delays by {:?}", Duration::from_nanos(time))?,
        }
        write!(f, " {} of the {kind}, after {}", self.count, self.after)
    }
}

/// The packets that went from one device to another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Traffic {
    /// Packets of the sender.
    pub sent: u64,
    /// Of these and their doubles, dropped because a queue was full: at the sender's port, or at the receiver's.
    pub dropped: u64,
    /// Of these and their doubles, lost by chance or by script, or because the receiver is cut off.
    pub lost: u64,
    /// Of these and their doubles, marked by ECN.
    pub marked: u64,
    /// Of these, arriving twice.
    pub doubled: u64,
    /// Of these and their doubles, damaged. The receiver drops them, unless the bit is one that routers may change.
    pub damaged: u64,
    /// Of these and their doubles, late so that others may overtake them.
    pub late: u64,
    /// Packets that the receiver got, doubles included.
    pub arrived: u64,
}
