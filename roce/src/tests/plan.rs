//! Requests drawn from a seed, and what they must have done when they complete.

use super::device::{KEY, Message, RECEIVE};
use super::network::{Faults, Network, QPNS, Random, attributes};
use crate::opcodes::Transport;
use crate::{Atomic, Attributes, Counter, Datagram, Event, Mtu, Psn, Request, State, Work};
use std::string::String;
use std::sync::OnceLock;
use std::vec::Vec;
use std::{format, vec};
use uverbs_uapi::wc::ib_wc_status;

/// Requests of each side.
const REQUESTS: usize = 16;
/// How long messages are: those of most seeds, and those of one in eight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Size {
    Short,
    Long,
}

impl Size {
    /// The most packets of a message.
    fn packets(self) -> usize {
        match self {
            Size::Short => 4,
            Size::Long => 200,
        }
    }

    /// Bytes of the peer's memory that a request has for itself.
    fn stride(self) -> usize {
        match self {
            Size::Short => 4096,
            Size::Long => 200 * 256,
        }
    }

    /// The word of the peer's memory that all fetch and adds of a side change. Behind it is the one of all compare and
    /// swaps.
    fn counter(self) -> u64 {
        (REQUESTS * self.stride()) as u64
    }

    /// The memory of a device before any request: made once for all seeds.
    fn memory(self) -> Vec<u8> {
        static MEMORY: [OnceLock<Vec<u8>>; 2] = [const { OnceLock::new() }; 2];
        let memory = || {
            let mut memory = initial(0, self.counter() as usize);
            memory.extend([0; 16]);
            memory
        };
        MEMORY[self as usize].get_or_init(memory).clone()
    }
}

/// The summand of each fetch and add.
const SUMMAND: u64 = 0x0101_0000_0000_0003;

/// A request, and how to judge it.
#[derive(Clone, Debug)]
pub(super) struct Planned {
    request: Request<u8>,
    data: Vec<u8>,
    judge: Judge,
}

/// The condition on a request that completes.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Judge {
    /// Nothing more than for all.
    Nothing,
    /// The peer's memory has the data.
    Written(u64),
    /// The local memory has this data.
    Read(Vec<u8>),
    /// The old value was this one.
    Old(u64),
    /// The peer has flushed the range with this number.
    Flushed(usize),
    /// The device executed it.
    Ran,
}

/// The data of a request.
fn pattern(side: usize, id: usize, length: usize) -> Vec<u8> {
    (0..length).map(|at| (at * 7 + (at >> 8) * 13 + id * 31 + side * 101 + 1) as u8).collect()
}

/// A part of the memory of a device before any request.
fn initial(address: usize, length: usize) -> Vec<u8> {
    (address..address + length).map(|at| (at * 11 + (at >> 8) * 3) as u8).collect()
}

/// A run with one seed.
pub(super) struct Run {
    network: Network,
    transport: Transport,
    attributes: [Attributes<u8>; 2],
    plans: [Vec<Planned>; 2],
    posted: [usize; 2],
    completed: [usize; 2],
    /// Requests that were complete before one failed.
    succeeded: [usize; 2],
    failed: [bool; 2],
    /// The request of a side that its peer refuses, and its status.
    refused: [Option<(usize, ib_wc_status)>; 2],
    /// How many messages that each side has received were judged.
    judged: [usize; 2],
}

/// Runs a seed; an error tells what was not as promised.
pub(super) fn run(transport: Transport, seed: u64) -> Result<Run, String> {
    let mut run = Run::new(transport, seed);
    run.play().map_err(|why| format!("{transport:?}, seed {seed}: {why}"))?;
    Ok(run)
}

impl Run {
    fn new(transport: Transport, seed: u64) -> Run {
        let mut random = Random(seed ^ 0x5eed << 32);
        let long = transport != Transport::Ud && random.happens(125);
        let size = if long { Size::Long } else { Size::Short };
        let mtu = match size {
            Size::Short => [Mtu::Mtu256, Mtu::Mtu256, Mtu::Mtu512, Mtu::Mtu1024],
            Size::Long => [Mtu::Mtu256; 4],
        }[random.below(4) as usize];
        let timeless = transport.is_reliable() && random.happens(125);
        let psns: [Psn; 2] = [0; 2].map(|_| {
            let near_wrap = random.happens(500);
            Psn::new(if near_wrap {
                Psn::MASK - random.below(60) as u32
            } else {
                random.next() as u32
            })
        });
        let depth = 2 + random.below(14) as usize;
        let depths: [u8; 2] = [0; 2].map(|_| 1 + random.below(4) as u8);
        // Most seeds have enough retries, some few.
        let few = random.happens(100) && !timeless;
        let retry_count = if few { random.below(4) as u8 } else { 7 };
        let rnr_retry = if random.happens(100) && !timeless { random.below(7) as u8 } else { 7 };
        let attributes = [0, 1].map(|side: usize| Attributes {
            mtu,
            send_psn: psns[side],
            receive_psn: psns[1 - side],
            max_rd_atomic: depths[side],
            max_dest_rd_atomic: depths[1 - side],
            timeout: if timeless { 0 } else { attributes(side).timeout },
            retry_count,
            rnr_retry,
            min_rnr_timer: 1 + random.below(3) as u8,
            ..attributes(side)
        });
        let mut network = Network::with(seed, transport, attributes.clone(), depth, seed % 3 == 0);
        network.faults = match size {
            _ if timeless => Faults::HARMLESS,
            Size::Short => Faults::MANY,
            Size::Long => Faults::FEW,
        };
        network.repeats_in_order = timeless;
        network.together = if random.happens(500) { 600 } else { 0 };
        network.budget =
            if random.happens(500) { 1 + random.below(8) as usize } else { usize::MAX };
        let mut plans = [0, 1].map(|side| plan(&mut random, transport, side, mtu, size));
        let mut refused = [None; 2];
        if transport.is_reliable() && random.happens(100) {
            let side = random.below(2) as usize;
            refused[side] = Some(refuse(&mut random, side, &mut plans[side], size));
        }
        for side in 0..2 {
            network.devices[side].memory = size.memory();
            network.devices[side].longer_receives = size.stride() - Size::Short.stride();
            let mut at = 0;
            let mut missing = REQUESTS as u64;
            // Without retries, a message that comes before its receive is lost.
            let at_once = !transport.is_reliable() && random.happens(800);
            while missing > 0 {
                let count = if at_once { missing } else { (1 + random.below(6)).min(missing) };
                missing -= count;
                network.post_receives(side, at, count);
                at += random.below(60_000);
            }
        }
        if random.happens(500) {
            network.devices.iter_mut().for_each(|device| device.has_units = true);
            network.apart = 300;
        }
        Run {
            network,
            transport,
            attributes,
            plans,
            posted: [0; 2],
            completed: [0; 2],
            succeeded: [0; 2],
            failed: [false; 2],
            refused,
            judged: [0; 2],
        }
    }

    /// Whether all requests of both sides have succeeded.
    pub(super) fn is_whole(&self) -> bool {
        self.succeeded == [REQUESTS; 2]
    }

    /// Whether a request was to be refused, and whether one was with its status.
    pub(super) fn refusal(&self) -> (bool, bool) {
        let planned = self.refused.iter().any(Option::is_some);
        let met = |side: usize| {
            self.failed[side]
                && self.refused[side].is_some_and(|(at, _)| at == self.succeeded[side])
        };
        (planned, met(0) || met(1))
    }

    /// How many messages were received, and how many were to be.
    pub(super) fn received(&self) -> usize {
        self.network.devices.iter().map(|device| device.received.len()).sum()
    }

    pub(super) fn sent(&self) -> usize {
        self.plans.iter().flatten().filter(|planned| takes_receive(planned)).count()
    }

    fn play(&mut self) -> Result<(), String> {
        for _ in 0..200_000 {
            for side in 0..2 {
                self.post(side);
                self.network.run(side)?;
                self.judge_completions(side)?;
                self.judge_arrivals(side)?;
            }
            let posted = self.posted;
            (0..2).for_each(|side| self.post(side));
            // A request that needs no packet may have made room for another one.
            if self.posted == posted && !self.network.step()? {
                return self.judge_end();
            }
            for side in 0..2 {
                self.judge_completions(side)?;
                self.judge_arrivals(side)?;
            }
        }
        Err("it does not end".into())
    }

    fn post(&mut self, side: usize) {
        let (endpoint, device) =
            (&mut self.network.endpoints[side], &mut self.network.devices[side]);
        while let Some(planned) = self.plans[side].get(self.posted[side]) {
            let ready = endpoint.state(QPNS[side]) == Some(State::Rts);
            if self.failed[side] || !ready {
                return;
            }
            device.local.insert(planned.request.id, planned.data.clone());
            if endpoint.post(QPNS[side], planned.request.clone()).is_err() {
                return;
            }
            self.posted[side] += 1;
        }
    }

    fn judge_completions(&mut self, side: usize) -> Result<(), String> {
        while let Some((id, status)) = self.network.devices[side].completions.pop_front() {
            let expected = self.completed[side];
            if id != expected as u64 {
                return Err(format!("side {side}: request {id} completes in place of {expected}"));
            }
            self.completed[side] += 1;
            let refused = self.refused[side];
            if self.failed[side] {
                if status != ib_wc_status::IB_WC_WR_FLUSH_ERR {
                    return Err(format!(
                        "side {side}: request {id} has {status:?} behind one that failed"
                    ));
                }
                continue;
            }
            match status {
                ib_wc_status::IB_WC_SUCCESS if refused.is_some_and(|(at, _)| at <= expected) => {
                    return Err(format!("side {side}: {id} succeeds, and {refused:?} is refused"));
                }
                ib_wc_status::IB_WC_SUCCESS => {
                    self.succeeded[side] += 1;
                    self.judge(side, expected)
                        .map_err(|why| format!("side {side}: request {id}: {why}"))?;
                }
                // A side that has refused a request of the other one is in error.
                ib_wc_status::IB_WC_WR_FLUSH_ERR => {
                    if !self.has_refused(side) {
                        return Err(format!("side {side}: {id} is flushed"));
                    }
                    self.failed[side] = true;
                }
                _ => {
                    self.failed[side] = true;
                    self.judge_failure(side, expected, status)
                        .map_err(|why| format!("side {side}: request {id}: {why}"))?;
                }
            }
        }
        Ok(())
    }

    /// Whether a side is in error because it has refused the request that was to be.
    fn has_refused(&self, side: usize) -> bool {
        let refuses = |event: &Event| matches!(event, Event::Refused(_) | Event::ReceiveFailed);
        self.refused[1 - side].is_some() && self.network.devices[side].events.iter().any(refuses)
    }

    /// A failure is one that the attributes allow, or the one that was planned.
    fn judge_failure(&self, side: usize, id: usize, status: ib_wc_status) -> Result<(), String> {
        let attributes = &self.attributes[side];
        match status {
            ib_wc_status::IB_WC_RETRY_EXC_ERR if self.transport.is_reliable() => {
                let oldest = self.network.oldest(side).ok_or("fails, and nothing is under way")?;
                let (psn, times, before) = oldest;
                let faults = self.network.faulted - before;
                let retries = u32::from(attributes.retry_count);
                // With many retries each sending has had a fault, unless the peer is in error.
                let gone =
                    self.network.endpoints[1 - side].state(QPNS[1 - side]) != Some(State::Rts);
                let faultless = retries == 7 && !gone && faults <= retries;
                if times <= retries || faultless {
                    return Err(format!(
                        "fails after {times} sendings of {psn:?} and {faults} faults, {retries} retries"
                    ));
                }
                Ok(())
            }
            _ if self.refused[side] == Some((id, status)) => Ok(()),
            ib_wc_status::IB_WC_RNR_RETRY_EXC_ERR if attributes.rnr_retry != 7 => {
                let naks = self.network.devices[side].counted(Counter::RnrNaks);
                if naks <= attributes.rnr_retry.into() {
                    return Err(format!("fails after {naks} RNR NAKs"));
                }
                Ok(())
            }
            _ => Err(format!("fails with {status:?}")),
        }
    }

    fn judge(&self, side: usize, id: usize) -> Result<(), String> {
        let planned = &self.plans[side][id];
        let (own, peer) = (&self.network.devices[side], &self.network.devices[1 - side]);
        let number = id as u64;
        if !self.transport.is_reliable() {
            return Ok(());
        }
        if let Some(message) = message(side, planned) {
            let before =
                self.plans[side][..id].iter().filter(|planned| takes_receive(planned)).count();
            match peer.received.get(before) {
                Some(received) if *received == message => {}
                other => {
                    return Err(format!("completes when the peer has {other:?}, not {message:?}"));
                }
            }
        }
        match &planned.judge {
            Judge::Written(address) => {
                let begin = *address as usize;
                if peer.memory[begin..begin + planned.data.len()] != planned.data {
                    return Err("completes before its data is there".into());
                }
            }
            Judge::Read(data) => {
                if own.local.get(&number) != Some(data) {
                    return Err("has read something else".into());
                }
            }
            Judge::Old(old) => {
                if own.olds.get(&number) != Some(old) {
                    return Err(format!(
                        "has {:x?}, not the old value {old:#x}",
                        own.olds.get(&number)
                    ));
                }
            }
            Judge::Flushed(count) => {
                if peer.flushes.len() <= *count {
                    return Err("completes before the peer has flushed".into());
                }
            }
            Judge::Ran => {
                if !own.ran.contains(&number) {
                    return Err("was not executed".into());
                }
            }
            Judge::Nothing => {}
        }
        Ok(())
    }

    /// The data of a write with immediate data are in memory when its receive completes.
    fn judge_arrivals(&mut self, side: usize) -> Result<(), String> {
        let device = &self.network.devices[side];
        for message in &device.received[self.judged[side]..] {
            let Some(immediate) = message.immediate.filter(|_| message.write) else { continue };
            let planned = self.plans[1 - side].get(immediate as usize & 0xfff);
            let Some(Planned { data, judge: Judge::Written(address), .. }) = planned else {
                return Err(format!("side {side}: no write has the immediate {immediate:#x}"));
            };
            let begin = *address as usize;
            if device.memory[begin..begin + data.len()] != *data {
                return Err(format!("side {side}: {message:?} comes before its data"));
            }
        }
        self.judged[side] = device.received.len();
        Ok(())
    }

    /// Everything has ended.
    fn judge_end(&self) -> Result<(), String> {
        for side in 0..2 {
            let own = self.completed[side];
            // A queue pair that failed as a responder flushes what was posted.
            let ended = self.failed[side] || self.has_refused(side);
            if own != self.posted[side] || !ended && own != REQUESTS {
                let device = &self.network.devices[side];
                let events = &device.events;
                return Err(format!(
                    "side {side} hangs: {own} of {REQUESTS} are complete, {events:?}"
                ));
            }
            self.judge_received(side)?;
        }
        Ok(())
    }

    /// The receives of one side's messages at the other.
    fn judge_received(&self, side: usize) -> Result<(), String> {
        let peer = &self.network.devices[1 - side];
        let planned = self.plans[side].iter().filter_map(|planned| message(side, planned));
        let planned: Vec<Message> = planned.collect();
        let received = &peer.received;
        match self.transport {
            Transport::Rc | Transport::Xrc => {
                if *received != planned[..received.len().min(planned.len())] {
                    return Err(format!(
                        "side {side}: messages are not received in order, each once"
                    ));
                }
                let done = self.plans[side][..self.succeeded[side]].iter();
                if received.len() < done.filter(|planned| takes_receive(planned)).count() {
                    return Err(format!("side {side}: a message is complete and was not received"));
                }
            }
            // Whole or not at all, never twice, and in order.
            Transport::Uc => {
                let mut rest = planned.iter();
                for message in received {
                    if !rest.any(|planned| planned == message) {
                        return Err(format!(
                            "side {side}: {message:?} was not sent, or comes twice or late"
                        ));
                    }
                }
            }
            Transport::Ud => {
                if let Some(message) = received.iter().find(|message| !planned.contains(message)) {
                    return Err(format!("side {side}: {message:?} was not sent"));
                }
            }
        }
        Ok(())
    }
}

fn takes_receive(planned: &Planned) -> bool {
    match planned.request.work {
        Work::Send { .. } | Work::SendInvalidate { .. } => true,
        Work::Write { immediate, .. } => immediate.is_some(),
        _ => false,
    }
}

/// The message that a request is at the peer.
fn message(side: usize, planned: &Planned) -> Option<Message> {
    let (write, immediate, invalidated) = match planned.request.work {
        Work::Send { immediate } => (false, immediate, None),
        Work::SendInvalidate { key } => (false, None, Some(key)),
        Work::Write { immediate: Some(data), .. } => (true, Some(data), None),
        _ => return None,
    };
    Some(Message {
        data: if write { Vec::new() } else { planned.data.clone() },
        length: planned.request.length,
        write,
        immediate,
        invalidated,
        solicited: planned.request.solicited,
        source: QPNS[side],
    })
}

/// Makes one of the requests one that the peer refuses. Returns which one, and its status.
fn refuse(
    random: &mut Random,
    side: usize,
    plan: &mut [Planned],
    size: Size,
) -> (usize, ib_wc_status) {
    let at = random.below(plan.len() as u64) as usize;
    let planned = &mut plan[at];
    let (address, key) = ((at * size.stride()) as u64, KEY + 1);
    let mut length = 1 + random.below(2000) as usize;
    let mut status = ib_wc_status::IB_WC_REM_ACCESS_ERR;
    planned.request.work = match random.below(4) {
        0 => Work::Write { address, key, immediate: None },
        1 => Work::Read { address, key },
        2 => {
            length = 8;
            Work::Atomic { address, key, change: Atomic::FetchAdd { add: 1 } }
        }
        _ => {
            length += RECEIVE + size.stride() - Size::Short.stride();
            status = ib_wc_status::IB_WC_REM_INV_REQ_ERR;
            Work::Send { immediate: None }
        }
    };
    planned.request.length = length as u32;
    planned.data = pattern(side, at, length);
    planned.judge = Judge::Nothing;
    (at, status)
}

fn plan(
    random: &mut Random,
    transport: Transport,
    side: usize,
    mtu: Mtu,
    size: Size,
) -> Vec<Planned> {
    let mtu = mtu.bytes() as usize;
    let mut plan: Vec<Planned> = Vec::new();
    let (mut sum, mut swapped, mut flushes) = (0u64, 0u64, 0);
    let mut fenced_write = None;
    for id in 0..REQUESTS {
        let packets = if size == Size::Long && random.happens(800) { 4 } else { size.packets() };
        let most = if transport == Transport::Ud { mtu } else { packets * mtu };
        let length = match random.below(5) {
            0 => 0,
            1 => mtu,
            2 => random.below(mtu as u64 + 1) as usize,
            3 => most,
            _ => random.below(most as u64 + 1) as usize,
        };
        let address = (id * size.stride()) as u64;
        let immediate = random.happens(500).then_some(id as u32 | 0x1000);
        let data = pattern(side, id, length);
        let mut request = Request {
            id: id as u64,
            work: Work::Local,
            length: length as u32,
            fence: random.happens(50),
            solicited: random.happens(300),
            srq: 9,
            datagram: None,
        };
        let (work, data, judge) = if let Some((address, length)) = fenced_write.take() {
            // The read before this one reads the same memory.
            request.fence = true;
            request.length = length as u32;
            let data = pattern(side, id, length);
            (Work::Write { address, key: KEY, immediate: None }, data, Judge::Written(address))
        } else {
            match (transport, random.below(12)) {
                (Transport::Ud, _) => {
                    let path = 1 - side as u8;
                    let destination = QPNS[1 - side];
                    request.datagram = Some(Datagram { path, destination, qkey: 5 });
                    (Work::Send { immediate }, data, Judge::Nothing)
                }
                (Transport::Uc, 0..6) | (_, 0..2) => {
                    (Work::Send { immediate }, data, Judge::Nothing)
                }
                (Transport::Uc, 6) | (_, 2) => (Work::Local, data, Judge::Ran),
                (Transport::Uc, _) | (_, 3..6) => {
                    (Work::Write { address, key: KEY, immediate }, data, Judge::Written(address))
                }
                (_, 6) => (Work::SendInvalidate { key: 1 + id as u32 }, data, Judge::Nothing),
                (_, 7..9) => {
                    if random.happens(500) && length > 0 && id + 1 < REQUESTS {
                        fenced_write = Some((address, length));
                    }
                    let old = initial(address as usize, length);
                    (Work::Read { address, key: KEY }, vec![0; length], Judge::Read(old))
                }
                (_, 9) => {
                    request.length = 8;
                    let old = sum;
                    sum = sum.wrapping_add(SUMMAND);
                    let work = Work::Atomic {
                        address: size.counter(),
                        key: KEY,
                        change: Atomic::FetchAdd { add: SUMMAND },
                    };
                    (work, vec![0; 8], Judge::Old(old))
                }
                (_, 10) => {
                    request.length = 8;
                    let (compare, swap) = (swapped, id as u64 + 1);
                    swapped = swap;
                    let work = Work::Atomic {
                        address: size.counter() + 8,
                        key: KEY,
                        change: Atomic::CompareSwap { compare, swap },
                    };
                    (work, vec![0; 8], Judge::Old(compare))
                }
                _ if random.happens(500) => {
                    request.length = 8;
                    let data = pattern(side, id, 8);
                    (Work::AtomicWrite { address, key: KEY }, data, Judge::Written(address))
                }
                _ => {
                    flushes += 1;
                    let work = Work::Flush { address, key: KEY, kind: 1, level: 0 };
                    (work, Vec::new(), Judge::Flushed(flushes - 1))
                }
            }
        };
        request.work = work;
        plan.push(Planned { request, data, judge });
    }
    plan
}
