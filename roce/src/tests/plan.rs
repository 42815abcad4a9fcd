//! Requests drawn from a seed, and what they must have done when they complete.

use super::device::{KEY, Message};
use super::network::{Faults, Network, QPNS, Random, attributes};
use crate::opcodes::Transport;
use crate::{Atomic, Attributes, Counter, Datagram, Mtu, Psn, Request, State, Work};
use std::string::String;
use std::sync::OnceLock;
use std::vec::Vec;
use std::{format, vec};
use uverbs_uapi::wc::ib_wc_status;

/// Requests of each side.
const REQUESTS: usize = 16;
/// Bytes of the peer's memory that a request has for itself.
const STRIDE: usize = 4096;
/// The word of the peer's memory that all fetch and adds of a side change, and the one of all compare and swaps.
const COUNTER: u64 = (REQUESTS * STRIDE) as u64;
const SWAPPED: u64 = COUNTER + 8;
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

/// The memory of a device before any request: made once for all seeds.
static MEMORY: OnceLock<Vec<u8>> = OnceLock::new();

fn memory() -> Vec<u8> {
    let mut memory = initial(0, REQUESTS * STRIDE);
    memory.extend([0; 16]);
    memory
}

/// A part of it.
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
        let mtu = [Mtu::Mtu256, Mtu::Mtu256, Mtu::Mtu512, Mtu::Mtu1024][random.below(4) as usize];
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
        let few = random.happens(100);
        let retry_count = if few { random.below(4) as u8 } else { 7 };
        let rnr_retry = if random.happens(100) { random.below(7) as u8 } else { 7 };
        let attributes = [0, 1].map(|side: usize| Attributes {
            mtu,
            send_psn: psns[side],
            receive_psn: psns[1 - side],
            max_rd_atomic: depths[side],
            max_dest_rd_atomic: depths[1 - side],
            retry_count,
            rnr_retry,
            min_rnr_timer: 1 + random.below(3) as u8,
            ..attributes(side)
        });
        let mut network = Network::with(seed, transport, attributes.clone(), depth, seed % 3 == 0);
        network.faults = Faults::MANY;
        network.budget =
            if random.happens(500) { 1 + random.below(8) as usize } else { usize::MAX };
        let plans = [0, 1].map(|side| plan(&mut random, transport, side, mtu));
        for side in 0..2 {
            network.devices[side].memory = MEMORY.get_or_init(memory).clone();
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
        }
    }

    /// Whether all requests of both sides have succeeded.
    pub(super) fn is_whole(&self) -> bool {
        self.succeeded == [REQUESTS; 2]
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
            }
            let posted = self.posted;
            (0..2).for_each(|side| self.post(side));
            // A request that needs no packet may have made room for another one.
            if self.posted == posted && !self.network.step()? {
                return self.judge_end();
            }
            for side in 0..2 {
                self.judge_completions(side)?;
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
            if self.failed[side] {
                if status != ib_wc_status::IB_WC_WR_FLUSH_ERR {
                    return Err(format!(
                        "side {side}: request {id} has {status:?} behind one that failed"
                    ));
                }
                continue;
            }
            match status {
                ib_wc_status::IB_WC_SUCCESS => {
                    self.succeeded[side] += 1;
                    self.judge(side, expected)
                        .map_err(|why| format!("side {side}: request {id}: {why}"))?;
                }
                // The other side has refused or failed: then its own requests are flushed.
                ib_wc_status::IB_WC_WR_FLUSH_ERR => {
                    return Err(format!("side {side}: {id} is flushed"));
                }
                _ => {
                    self.failed[side] = true;
                    self.judge_failure(side, status)
                        .map_err(|why| format!("side {side}: request {id}: {why}"))?;
                }
            }
        }
        Ok(())
    }

    /// A failure is one that the attributes allow.
    fn judge_failure(&self, side: usize, status: ib_wc_status) -> Result<(), String> {
        let attributes = &self.attributes[side];
        match status {
            ib_wc_status::IB_WC_RETRY_EXC_ERR if self.transport.is_reliable() => {
                let sendings = self.network.sendings[side].values().copied();
                let (most, before) =
                    sendings.max_by_key(|(times, before)| (*times, !*before)).unwrap_or_default();
                // With many retries each sending has had a fault, unless the peer is in error.
                let faults = self.network.faulted - before;
                let retries = u32::from(attributes.retry_count);
                let faultless = retries == 7 && !self.failed[1 - side] && faults <= retries;
                if most <= retries || faultless {
                    return Err(format!(
                        "fails after {most} sendings and {faults} faults, {retries} retries"
                    ));
                }
                Ok(())
            }
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

    /// Everything has ended.
    fn judge_end(&self) -> Result<(), String> {
        for side in 0..2 {
            let own = self.completed[side];
            // A queue pair that failed as a responder flushes what was posted.
            if own != self.posted[side] || !self.failed[side] && own != REQUESTS {
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

fn plan(random: &mut Random, transport: Transport, side: usize, mtu: Mtu) -> Vec<Planned> {
    let mtu = mtu.bytes() as usize;
    let mut plan: Vec<Planned> = Vec::new();
    let (mut sum, mut swapped, mut flushes) = (0u64, 0u64, 0);
    let mut fenced_write = None;
    for id in 0..REQUESTS {
        let most = if transport == Transport::Ud { mtu } else { (4 * mtu).min(STRIDE) };
        let length = match random.below(5) {
            0 => 0,
            1 => mtu,
            2 => random.below(mtu as u64 + 1) as usize,
            3 => most,
            _ => random.below(most as u64 + 1) as usize,
        };
        let address = (id * STRIDE) as u64;
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
                        address: COUNTER,
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
                        address: SWAPPED,
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
