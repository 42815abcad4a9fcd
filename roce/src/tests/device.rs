//! A device in plain memory. Its path is the number of a side.

use crate::headers::Packet;
use crate::{Atomic, Counter, Event, Host, Received, Refusal, Right, Source, Target};
use std::collections::{BTreeMap, VecDeque};
use std::string::{String, ToString};
use std::vec::Vec;
use std::{fmt, format, vec};
use uverbs_uapi::wc::ib_wc_status;

/// The key of the device's memory.
pub(super) const KEY: u32 = 0x0077_0000;
/// A receive holds so many bytes.
pub(super) const RECEIVE: usize = 8192;

/// A message that consumed a receive.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Message {
    pub(super) data: Vec<u8>,
    pub(super) length: u32,
    pub(super) write: bool,
    pub(super) immediate: Option<u32>,
    pub(super) invalidated: Option<u32>,
    pub(super) solicited: bool,
    pub(super) source: u32,
}

impl fmt::Debug for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Message { length, write, immediate, .. } = self;
        let data = &self.data[..self.data.len().min(4)];
        write!(f, "{length} bytes {data:x?}…, write: {write}, immediate: {immediate:x?}")
    }
}

#[derive(Debug, Default)]
pub(super) struct Device {
    /// Packets to send: the side, the bytes, and how many packets that are.
    pub(super) sent: Vec<(u8, Vec<u8>, u32)>,
    /// Whether it leaves payloads in place.
    pub(super) has_units: bool,
    /// A payload that was left, and of how many packets.
    pub(super) left: Option<(Vec<u8>, u32)>,
    /// Memory of the peer's requests. Address 0 is its begin.
    pub(super) memory: Vec<u8>,
    /// Local data of each request.
    pub(super) local: BTreeMap<u64, Vec<u8>>,
    pub(super) olds: BTreeMap<u64, u64>,
    pub(super) ran: Vec<u64>,
    pub(super) receives: VecDeque<u64>,
    /// Bytes of a receive beyond [`RECEIVE`].
    pub(super) longer_receives: usize,
    /// The next receive that is posted.
    pub(super) posted: u64,
    pub(super) buffers: BTreeMap<u64, Vec<u8>>,
    pub(super) received: Vec<Message>,
    pub(super) failed_receives: Vec<ib_wc_status>,
    /// Their memory.
    pub(super) failed_buffers: Vec<Vec<u8>>,
    pub(super) completions: VecDeque<(u64, ib_wc_status)>,
    pub(super) events: Vec<Event>,
    pub(super) counts: BTreeMap<Counter, u32>,
    /// Requests that began to be sent, again or for the first time.
    pub(super) begun: Vec<u64>,
    /// Whether it takes one packet in each turn.
    pub(super) takes_one: bool,
    pub(super) flushes: Vec<(u64, u32, u8, u8)>,
    /// Whether completions of receives cannot be reported.
    pub(super) cq_is_full: bool,
    /// The SRQ that requests name.
    pub(super) srq: Option<u32>,
    /// The first call that breaks a promise of [`Host`].
    pub(super) problem: Option<String>,
}

impl Device {
    pub(super) fn post_receive(&mut self) {
        self.receives.push_back(self.posted);
        self.posted += 1;
    }

    pub(super) fn counted(&self, counter: Counter) -> u32 {
        self.counts.get(&counter).copied().unwrap_or_default()
    }

    fn complain(&mut self, why: impl ToString) {
        self.problem.get_or_insert(why.to_string());
    }

    fn place(&mut self, target: Target) -> Result<&mut [u8], Refusal> {
        if target.srq != self.srq || target.key != KEY {
            return Err(Refusal::Access);
        }
        let begin = usize::try_from(target.address).map_err(|_| Refusal::Access)?;
        let end = begin.checked_add(target.length as usize).ok_or(Refusal::Access)?;
        self.memory.get_mut(begin..end).ok_or(Refusal::Access)
    }

    fn word(&mut self, target: Target) -> Result<&mut [u8; 8], Refusal> {
        self.place(target)?.try_into().map_err(|_| Refusal::InvalidRequest)
    }
}

impl Host for Device {
    type Path = u8;

    fn admit(&mut self, _: u32, _: &u8, _: &Packet<'_>) -> bool {
        true
    }

    fn begin(&mut self, _: u32, request: u64) {
        self.begun.push(request);
    }

    fn send(&mut self, _: u32, to: &u8, packet: &[u8]) -> bool {
        let (payload, packets) = self.left.take().unwrap_or_else(|| (Vec::new(), 1));
        self.sent.push((*to, [packet, &payload].concat(), packets));
        !self.takes_one
    }

    fn leave_in_place(&mut self, _: u32, source: Source, length: u32, packets: u32) -> u32 {
        assert_eq!(length % 4, 0, "a packet with padding is put together at once");
        if !self.has_units {
            return 0;
        }
        let payload = match source {
            Source::Request { id, offset } => {
                let range = offset as usize..(offset + length * packets) as usize;
                self.local.get(&id).and_then(|data| data.get(range)).map(<[u8]>::to_vec)
            }
            Source::Read(target) => self.place(target).ok().map(|data| data.to_vec()),
        };
        self.left = payload.map(|payload| (payload, packets));
        if self.left.is_some() { packets } else { 0 }
    }

    fn read_local(
        &mut self,
        _: u32,
        id: u64,
        offset: u32,
        to: &mut [u8],
    ) -> Result<(), ib_wc_status> {
        let offset = offset as usize;
        let data = self.local.get(&id).and_then(|data| data.get(offset..offset + to.len()));
        to.copy_from_slice(data.ok_or(ib_wc_status::IB_WC_LOC_PROT_ERR)?);
        Ok(())
    }

    fn write_local(
        &mut self,
        _: u32,
        id: u64,
        offset: u32,
        data: &[u8],
    ) -> Result<(), ib_wc_status> {
        let offset = offset as usize;
        let place = self.local.get_mut(&id).and_then(|to| to.get_mut(offset..offset + data.len()));
        place.ok_or(ib_wc_status::IB_WC_LOC_PROT_ERR)?.copy_from_slice(data);
        Ok(())
    }

    fn write_old(&mut self, _: u32, id: u64, old: u64) -> Result<(), ib_wc_status> {
        if self.olds.insert(id, old).is_some() {
            self.complain(format!("request {id} got two old values"));
        }
        Ok(())
    }

    fn run_local(&mut self, _: u32, id: u64) -> Result<(), ib_wc_status> {
        self.ran.push(id);
        Ok(())
    }

    fn complete(&mut self, _: u32, id: u64, status: ib_wc_status) {
        self.completions.push_back((id, status));
    }

    fn check_remote(&mut self, _: u32, _: Right, target: Target) -> Result<(), Refusal> {
        if target.length == 0 { Ok(()) } else { self.place(target).map(|_| ()) }
    }

    fn read_remote(&mut self, _: u32, target: Target, to: &mut [u8]) -> Result<(), Refusal> {
        to.copy_from_slice(self.place(target)?);
        Ok(())
    }

    fn write_remote(&mut self, _: u32, target: Target, data: &[u8]) -> Result<(), Refusal> {
        self.place(target)?.copy_from_slice(data);
        Ok(())
    }

    fn atomic(&mut self, _: u32, target: Target, change: Atomic) -> Result<u64, Refusal> {
        let place = self.place(target)?;
        let old = place.iter().fold(0, |old, byte| old << 8 | u64::from(*byte));
        place.copy_from_slice(&change.apply(old).to_be_bytes()[8 - target.length as usize..]);
        Ok(old)
    }

    fn atomic_write(&mut self, _: u32, target: Target, data: [u8; 8]) -> Result<(), Refusal> {
        *self.word(target)? = data;
        Ok(())
    }

    fn flush(&mut self, _: u32, target: Target, kind: u8, level: u8) -> Result<(), Refusal> {
        self.flushes.push((target.address, target.length, kind, level));
        Ok(())
    }

    fn invalidate(&mut self, _: u32, _: Option<u32>, key: u32) -> Result<(), Refusal> {
        if key == 0 { Err(Refusal::Access) } else { Ok(()) }
    }

    fn take_receive(&mut self, _: u32, srq: Option<u32>) -> Result<Option<u64>, Refusal> {
        if srq != self.srq {
            return Err(Refusal::InvalidRequest);
        }
        let taken = self.receives.pop_front();
        if let Some(receive) = taken {
            self.buffers.insert(receive, vec![0; RECEIVE + self.longer_receives]);
        }
        Ok(taken)
    }

    fn write_receive(
        &mut self,
        _: u32,
        receive: u64,
        offset: u32,
        data: &[u8],
    ) -> Result<(), ib_wc_status> {
        let offset = offset as usize;
        let Some(buffer) = self.buffers.get_mut(&receive) else {
            self.complain("data for a receive that is not taken");
            return Err(ib_wc_status::IB_WC_GENERAL_ERR);
        };
        let place = buffer.get_mut(offset..offset + data.len());
        place.ok_or(ib_wc_status::IB_WC_LOC_LEN_ERR)?.copy_from_slice(data);
        Ok(())
    }

    fn complete_receive(
        &mut self,
        _: u32,
        receive: u64,
        received: Result<Received<'_, u8>, ib_wc_status>,
    ) -> Result<(), Refusal> {
        let Some(mut data) = self.buffers.remove(&receive) else {
            self.complain(format!("receive {receive} completes twice, or was not taken"));
            return Ok(());
        };
        if self.cq_is_full {
            return Err(Refusal::Operational);
        }
        match received {
            Ok(received) => {
                data.truncate(if received.write { 0 } else { received.length as usize });
                self.received.push(Message {
                    data,
                    length: received.length,
                    write: received.write,
                    immediate: received.immediate,
                    invalidated: received.invalidated,
                    solicited: received.solicited,
                    source: received.source,
                });
            }
            Err(status) => {
                self.failed_receives.push(status);
                self.failed_buffers.push(data);
            }
        }
        Ok(())
    }

    fn event(&mut self, _: u32, event: Event) {
        self.events.push(event);
    }

    fn count(&mut self, _: u32, counter: Counter) {
        *self.counts.entry(counter).or_default() += 1;
    }
}
