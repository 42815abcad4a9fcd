//! Raw send and receive queues: Ethernet frames.
//!
//! Pairs with CREATE_SQ and CREATE_RQ, of mlx5e and of raw packet queue pairs.

use uverbs_uapi::mlx5::prm::rqc::{
    create_rq_in, create_rq_out, create_sq_in, create_sq_out, destroy_rq_in, destroy_sq_in,
    modify_rq_in, modify_sq_in, query_rq_in, query_rq_out, query_sq_in, query_sq_out, rqc, sqc,
};
use uverbs_uapi::mlx5::prm::srqc::wq;
use uverbs_uapi::mlx5::prm::{Bits, Layout};

use super::umem::{QueueMemory, Request};
use crate::cmd::refusal::{Refused, refuse};
use crate::data::receive::ReceiveQueue;
use crate::data::ring::SendRing;
use crate::device::Device;

/// States of raw queues.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum State {
    /// After creation.
    Reset = 0,
    /// Carries traffic.
    Ready = 1,
    /// Stopped.
    Error = 3,
}

impl State {
    fn new(value: u64) -> Result<Self, Refused> {
        match value {
            0 => Ok(Self::Reset),
            1 => Ok(Self::Ready),
            3 => Ok(Self::Error),
            other => refuse!(BadParam, "raw queue state {other}"),
        }
    }

    /// Whether a command may take a queue from here to there. One that failed begins anew. One that
    /// has not begun may fail: a raw packet queue pair that is not ready to send yet has such a one.
    fn becomes(self, to: Self) -> Result<(), Refused> {
        match (self, to) {
            (Self::Error, Self::Ready) => {
                refuse!(BadResourceState, "a raw queue in {self:?} does not become {to:?}")
            }
            _ => Ok(()),
        }
    }
}

/// A raw send queue.
pub struct Sq {
    pub(crate) state: State,
    pub(crate) ring: SendRing,
    umems: Vec<u32>,
    pub(crate) context: Bits<sqc, Vec<u8>>,
    pub(crate) uar: u32,
    pub(crate) pd: u32,
}

/// A raw receive queue.
pub struct Rq {
    pub(crate) state: State,
    pub(crate) queue: ReceiveQueue,
    umems: Vec<u32>,
    pub(crate) context: Bits<rqc, Vec<u8>>,
    pub(crate) pd: u32,
}

impl Device {
    pub(crate) fn create_sq(&mut self, uid: u32, input: &[u8]) -> Result<Vec<u8>, Refused> {
        let input = Bits::<create_sq_in, _>::new(input);
        let context = Bits::<sqc, _>::new(input.sub(create_sq_in::ctx).bytes().to_vec());
        let pas = input.bytes().get(create_sq_in::SIZE..).unwrap_or_default();
        let queue = context.sub(sqc::wq);
        let log_size = queue.get32(wq::log_wq_sz);
        let log_stride = queue.get32(wq::log_wq_stride);
        if log_size > 15 || log_stride != 6 || context.is_set(sqc::hairpin) {
            return refuse!(BadParam, "SQ of 2^{log_size} strides of 2^{log_stride} bytes");
        }
        let uar = queue.get32(wq::uar_page);
        let pd = queue.get32(wq::pd);
        let cqn = context.get32(sqc::cqn);
        let tisn = context.get32(sqc::tis_num_0);
        self.objects.uars.allow(uid, uar)?;
        // A queue that never touches memory is made without.
        if pd != 0 {
            self.objects.pds.allow(uid, pd)?;
        }
        if context.is_set(sqc::tis_lst_sz) {
            self.objects.tises.allow_lent(uid, tisn)?;
        }
        self.objects.cqs.allow_lent(uid, cqn)?;
        self.objects.sqs.room()?;
        let request = Request::of_work_queue(&queue, 64 << log_size, pas);
        let QueueMemory { buffer, record, umems } = self.queue_memory(uid, &request)?;
        let ring = SendRing::new(buffer, 0, log_size, record + 4);
        self.objects.cqs.hold(cqn)?;
        self.objects.uars.hold(uar)?;
        if pd != 0 {
            self.objects.pds.hold(pd)?;
        }
        if context.is_set(sqc::tis_lst_sz) {
            self.objects.tises.hold(tisn)?;
        }
        let number = self
            .objects
            .sqs
            .insert_owned(uid, Sq { state: State::Reset, ring, umems, context, uar, pd })?;
        let mut out = Bits::<create_sq_out, _>::new(vec![0; create_sq_out::SIZE]);
        out.set(create_sq_out::sqn, number.into());
        Ok(out.into_inner())
    }

    pub(crate) fn modify_sq(&mut self, uid: u32, input: &[u8]) -> Result<Vec<u8>, Refused> {
        let input = Bits::<modify_sq_in, _>::new(input);
        let number = input.get32(modify_sq_in::sqn);
        let from = State::new(input.get(modify_sq_in::sq_state))?;
        let to = State::new(input.sub(modify_sq_in::ctx).get(sqc::state))?;
        let select = input.get(modify_sq_in::modify_bitmask);
        if select != 0 {
            return refuse!(BadParam, "MODIFY_SQ of fields {select:#x} is not modelled");
        }
        let sq = self.objects.sqs.own(uid, number)?;
        if sq.state != from {
            return refuse!(BadResourceState, "SQ {number:#x} is in {:?}, not {from:?}", sq.state);
        }
        from.becomes(to)?;
        sq.state = to;
        if to == State::Reset {
            sq.ring.reset();
        }
        self.wake(number);
        Ok(vec![])
    }

    pub(crate) fn query_sq(&mut self, uid: u32, input: &[u8]) -> Result<Vec<u8>, Refused> {
        let number = Bits::<query_sq_in, _>::new(input).get32(query_sq_in::sqn);
        let sq = self.objects.sqs.own(uid, number)?;
        let mut out = Bits::<query_sq_out, _>::new(vec![0; query_sq_out::SIZE]);
        out.set_sub(query_sq_out::sq_context, sq.context.bytes());
        out.sub_mut(query_sq_out::sq_context).set(sqc::state, sq.state as u64);
        Ok(out.into_inner())
    }

    pub(crate) fn destroy_sq(&mut self, uid: u32, input: &[u8]) -> Result<Vec<u8>, Refused> {
        let number = Bits::<destroy_sq_in, _>::new(input).get32(destroy_sq_in::sqn);
        self.objects.sqs.own(uid, number)?;
        let sq = self.objects.sqs.remove(number)?;
        self.release_umems(&sq.umems);
        self.objects.pds.release(sq.pd);
        self.objects.cqs.release(sq.context.get32(sqc::cqn));
        self.objects.uars.release(sq.uar);
        if sq.context.is_set(sqc::tis_lst_sz) {
            self.objects.tises.release(sq.context.get32(sqc::tis_num_0));
        }
        Ok(vec![])
    }

    pub(crate) fn create_rq(&mut self, uid: u32, input: &[u8]) -> Result<Vec<u8>, Refused> {
        const INLINE: u64 = 0;
        let input = Bits::<create_rq_in, _>::new(input);
        let context = Bits::<rqc, _>::new(input.sub(create_rq_in::ctx).bytes().to_vec());
        let pas = input.bytes().get(create_rq_in::SIZE..).unwrap_or_default();
        if context.get(rqc::mem_rq_type) != INLINE || context.is_set(rqc::hairpin) {
            return refuse!(BadParam, "RQ memory type {}", context.get(rqc::mem_rq_type));
        }
        let queue_context = context.sub(rqc::wq);
        let pd = queue_context.get32(wq::pd);
        // A queue that never touches memory is made without.
        if pd != 0 {
            self.objects.pds.allow(uid, pd)?;
        }
        self.objects.cqs.allow_lent(uid, context.get32(rqc::cqn))?;
        let counter_set = context.get32(rqc::counter_set_id);
        if counter_set != 0 {
            self.objects.counters.allow_lent(uid, counter_set)?;
        }
        self.objects.rqs.room()?;
        let (queue, umems) = self.receive_queue_of(uid, &queue_context, pas)?;
        self.objects.cqs.hold(context.get32(rqc::cqn))?;
        if pd != 0 {
            self.objects.pds.hold(pd)?;
        }
        self.count_in(uid, 0, counter_set)?;
        let number = self
            .objects
            .rqs
            .insert_owned(uid, Rq { state: State::Reset, queue, umems, context, pd })?;
        let mut out = Bits::<create_rq_out, _>::new(vec![0; create_rq_out::SIZE]);
        out.set(create_rq_out::rqn, number.into());
        Ok(out.into_inner())
    }

    pub(crate) fn modify_rq(&mut self, uid: u32, input: &[u8]) -> Result<Vec<u8>, Refused> {
        const SCATTER_FCS: u64 = 1 << 2;
        const VLAN_STRIPPING: u64 = 1 << 1;
        const COUNTER_SET: u64 = 1 << 3;
        let input = Bits::<modify_rq_in, _>::new(input);
        let number = input.get32(modify_rq_in::rqn);
        let new = input.sub(modify_rq_in::ctx);
        let from = State::new(input.get(modify_rq_in::rq_state))?;
        let to = State::new(new.get(rqc::state))?;
        let select = input.get(modify_rq_in::modify_bitmask);
        let known = SCATTER_FCS | VLAN_STRIPPING | COUNTER_SET;
        if select & !known != 0 {
            return refuse!(BadParam, "MODIFY_RQ of fields {select:#x} is not modelled");
        }
        if select & SCATTER_FCS != 0 && new.is_set(rqc::scatter_fcs) {
            return refuse!(BadParam, "scatter FCS is not modelled");
        }
        let rq = self.objects.rqs.own(uid, number)?;
        if rq.state != from {
            return refuse!(BadResourceState, "RQ {number:#x} is in {:?}, not {from:?}", rq.state);
        }
        from.becomes(to)?;
        let before = rq.context.get32(rqc::counter_set_id);
        let counter_set =
            if select & COUNTER_SET != 0 { new.get32(rqc::counter_set_id) } else { before };
        self.count_in(uid, before, counter_set)?;
        let rq = self.objects.rqs.own(uid, number)?;
        rq.context.set(rqc::counter_set_id, counter_set.into());
        if select & VLAN_STRIPPING != 0 {
            rq.context.set(rqc::vsd, new.get(rqc::vsd));
        }
        rq.state = to;
        if to == State::Reset {
            rq.queue.reset();
        }
        if to == State::Error {
            self.flush_raw_receives(number);
        }
        Ok(vec![])
    }

    pub(crate) fn query_rq(&mut self, uid: u32, input: &[u8]) -> Result<Vec<u8>, Refused> {
        let number = Bits::<query_rq_in, _>::new(input).get32(query_rq_in::rqn);
        let rq = self.objects.rqs.own(uid, number)?;
        let mut out = Bits::<query_rq_out, _>::new(vec![0; query_rq_out::SIZE]);
        out.set_sub(query_rq_out::rq_context, rq.context.bytes());
        out.sub_mut(query_rq_out::rq_context).set(rqc::state, rq.state as u64);
        Ok(out.into_inner())
    }

    pub(crate) fn destroy_rq(&mut self, uid: u32, input: &[u8]) -> Result<Vec<u8>, Refused> {
        let number = Bits::<destroy_rq_in, _>::new(input).get32(destroy_rq_in::rqn);
        self.objects.rqs.own(uid, number)?;
        let rq = self.objects.rqs.remove(number)?;
        self.release_umems(&rq.umems);
        self.objects.pds.release(rq.pd);
        self.objects.cqs.release(rq.context.get32(rqc::cqn));
        self.objects.counters.release(rq.context.get32(rqc::counter_set_id));
        Ok(vec![])
    }
}
