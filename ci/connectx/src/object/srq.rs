//! Shared receive queues: receive memory pools and XRC shared receive queues.
//!
//! Pairs with mlx5_ib's `srq_cmd.c`, which makes a pool (RMP) for a basic SRQ.

use uverbs_uapi::mlx5::prm::srqc::{
    arm_xrc_srq_in, create_rmp_in, create_rmp_out, create_xrc_srq_in, create_xrc_srq_out,
    destroy_rmp_in, destroy_xrc_srq_in, modify_rmp_in, query_rmp_in, query_rmp_out,
    query_xrc_srq_in, query_xrc_srq_out, rmp_bitmask, rmpc, wq, xrc_srqc,
};
use uverbs_uapi::mlx5::prm::{Bits, Layout};

use super::eq::event;
use super::umem::{QueueMemory, Request};
use crate::buffer::Buffer;
use crate::cmd::refusal::{Refused, refuse};
use crate::data::receive::{Order, ReceiveQueue};
use crate::device::Device;

/// `wq_type` values.
const WQ_LINKED: u64 = 0;
const WQ_CYCLIC: u64 = 1;

/// RMP state "ready".
const READY: u64 = 1;

/// A shared receive queue.
pub struct Srq {
    pub(crate) kind: Kind,
    pub(crate) queue: ReceiveQueue,
    umems: Vec<u32>,
    pub(crate) pd: u32,
    /// Below how many posted receives an event is due; 0 is never.
    pub(crate) limit: u16,
}

/// What it was made as.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// By CREATE_RMP.
    Pool,
    /// By CREATE_XRC_SRQ.
    Xrc {
        /// The XRC domain whose queue pairs may use it.
        xrcd: u32,
        /// Where its completions go.
        cqn: u32,
        /// What they are marked with.
        user_index: u32,
    },
}

impl Device {
    /// Reads a work queue's buffer, order and place of its doorbell record; holds what it answers
    /// besides.
    pub(crate) fn receive_queue_of(
        &mut self,
        uid: u32,
        context: &Bits<wq, &[u8]>,
        pages: &[u8],
    ) -> Result<(ReceiveQueue, Vec<u32>), Refused> {
        let log_size = context.get32(wq::log_wq_sz);
        let log_stride = context.get32(wq::log_wq_stride);
        if log_size > 15 || !(4..=10).contains(&log_stride) {
            return refuse!(BadParam, "log_wq_sz {log_size}, log_wq_stride {log_stride}");
        }
        let order = match context.get(wq::wq_type) {
            WQ_LINKED => Order::Linked,
            WQ_CYCLIC => Order::Cyclic,
            other => return refuse!(BadParam, "wq_type {other} is not modelled"),
        };
        let request = Request::of_work_queue(context, 1 << (log_size + log_stride), pages);
        let QueueMemory { buffer, record, umems } = self.queue_memory(uid, &request)?;
        Ok((ReceiveQueue::new(buffer, log_size, log_stride, order, record), umems))
    }

    pub(crate) fn create_rmp(&mut self, uid: u32, input: &[u8]) -> Result<Vec<u8>, Refused> {
        let input = Bits::<create_rmp_in, _>::new(input);
        let context = input.sub(create_rmp_in::ctx);
        let pas = input.bytes().get(create_rmp_in::SIZE..).unwrap_or_default();
        let wq_context = context.sub(rmpc::wq);
        let pd = wq_context.get32(wq::pd);
        let limit = wq_context.get(wq::lwm) as u16;
        self.objects.pds.allow(uid, pd)?;
        self.objects.srqs.room()?;
        let (queue, umems) = self.receive_queue_of(uid, &wq_context, pas)?;
        self.objects.pds.hold(pd)?;
        let srq = Srq { kind: Kind::Pool, queue, umems, pd, limit };
        let number = self.objects.srqs.insert_owned(uid, srq)?;
        let mut out = Bits::<create_rmp_out, _>::new(vec![0; create_rmp_out::SIZE]);
        out.set(create_rmp_out::rmpn, number.into());
        Ok(out.into_inner())
    }

    fn pool(&mut self, uid: u32, number: u32) -> Result<&mut Srq, Refused> {
        let srq = self.objects.srqs.own(uid, number)?;
        if srq.kind != Kind::Pool {
            return refuse!(BadResource, "SRQ {number:#x} is not a memory pool");
        }
        Ok(srq)
    }

    fn xrc_srq(&mut self, uid: u32, number: u32) -> Result<&mut Srq, Refused> {
        let srq = self.objects.srqs.own(uid, number)?;
        if srq.kind == Kind::Pool {
            return refuse!(BadResource, "SRQ {number:#x} is not an XRC SRQ");
        }
        Ok(srq)
    }

    pub(crate) fn modify_rmp(&mut self, uid: u32, input: &[u8]) -> Result<Vec<u8>, Refused> {
        let input = Bits::<modify_rmp_in, _>::new(input);
        let number = input.get32(modify_rmp_in::rmpn);
        let wanted = input.sub(modify_rmp_in::ctx);
        let limit_chosen = input.sub(modify_rmp_in::bitmask).is_set(rmp_bitmask::lwm);
        let srq = self.pool(uid, number)?;
        if wanted.get(rmpc::state) != READY {
            return refuse!(BadResourceState, "RMP state {}", wanted.get(rmpc::state));
        }
        if limit_chosen {
            srq.limit = wanted.sub(rmpc::wq).get(wq::lwm) as u16;
        }
        self.check_limit(number);
        Ok(vec![])
    }

    pub(crate) fn query_rmp(&mut self, uid: u32, input: &[u8]) -> Result<Vec<u8>, Refused> {
        let number = Bits::<query_rmp_in, _>::new(input).get32(query_rmp_in::rmpn);
        let srq = self.pool(uid, number)?;
        let (pd, limit) = (srq.pd, srq.limit);
        let mut out = Bits::<query_rmp_out, _>::new(vec![0; query_rmp_out::SIZE]);
        let mut context = out.sub_mut(query_rmp_out::rmp_context);
        context.set(rmpc::state, READY);
        let mut queue = context.sub_mut(rmpc::wq);
        queue.set(wq::pd, pd.into());
        queue.set(wq::lwm, limit.into());
        Ok(out.into_inner())
    }

    pub(crate) fn destroy_rmp(&mut self, uid: u32, input: &[u8]) -> Result<Vec<u8>, Refused> {
        let number = Bits::<destroy_rmp_in, _>::new(input).get32(destroy_rmp_in::rmpn);
        self.pool(uid, number)?;
        let srq = self.objects.srqs.remove(number)?;
        self.objects.pds.release(srq.pd);
        self.release_umems(&srq.umems);
        Ok(vec![])
    }

    pub(crate) fn create_xrc_srq(&mut self, uid: u32, input: &[u8]) -> Result<Vec<u8>, Refused> {
        let input = Bits::<create_xrc_srq_in, _>::new(input);
        let context = input.sub(create_xrc_srq_in::xrc_srq_context_entry);
        if input.is_set(create_xrc_srq_in::xrc_srq_umem_valid) {
            return refuse!(BadParam, "an SRQ in a umem is not modelled");
        }
        let log_size = context.get32(xrc_srqc::log_xrc_srq_size);
        let log_stride = context.get32(xrc_srqc::log_rq_stride) + 4;
        let buffer = Buffer::new(
            &self.objects.listed,
            context.get(xrc_srqc::log_page_size),
            context.get(xrc_srqc::page_offset),
            1 << (log_size + log_stride),
            input.tail(create_xrc_srq_in::pas),
        )?;
        let record = context.get(xrc_srqc::db_record_addr_h) << 32
            | context.get(xrc_srqc::db_record_addr_l) << 2;
        let queue = ReceiveQueue::new(buffer, log_size, log_stride, Order::Linked, record);
        let pd = context.get32(xrc_srqc::pd);
        let xrcd = context.get32(xrc_srqc::xrcd);
        let cqn = context.get32(xrc_srqc::cqn);
        let user_index = context.get32(xrc_srqc::user_index);
        self.objects.pds.allow(uid, pd)?;
        self.objects.xrcds.allow_lent(uid, xrcd)?;
        self.objects.cqs.allow_lent(uid, cqn)?;
        self.objects.srqs.room()?;
        self.objects.cqs.hold(cqn)?;
        self.objects.pds.hold(pd)?;
        self.objects.xrcds.hold(xrcd)?;
        let kind = Kind::Xrc { xrcd, cqn, user_index };
        let limit = context.get(xrc_srqc::lwm) as u16;
        let number =
            self.objects.srqs.insert_owned(uid, Srq { kind, queue, umems: vec![], pd, limit })?;
        let mut out = Bits::<create_xrc_srq_out, _>::new(vec![0; create_xrc_srq_out::SIZE]);
        out.set(create_xrc_srq_out::xrc_srqn, number.into());
        Ok(out.into_inner())
    }

    pub(crate) fn query_xrc_srq(&mut self, uid: u32, input: &[u8]) -> Result<Vec<u8>, Refused> {
        let number = Bits::<query_xrc_srq_in, _>::new(input).get32(query_xrc_srq_in::xrc_srqn);
        let srq = self.xrc_srq(uid, number)?;
        let (pd, limit) = (srq.pd, srq.limit);
        let mut out = Bits::<query_xrc_srq_out, _>::new(vec![0; query_xrc_srq_out::SIZE]);
        let mut context = out.sub_mut(query_xrc_srq_out::xrc_srq_context_entry);
        context.set(xrc_srqc::pd, pd.into());
        context.set(xrc_srqc::lwm, limit.into());
        Ok(out.into_inner())
    }

    pub(crate) fn arm_xrc_srq(&mut self, uid: u32, input: &[u8]) -> Result<Vec<u8>, Refused> {
        let input = Bits::<arm_xrc_srq_in, _>::new(input);
        let number = input.get32(arm_xrc_srq_in::xrc_srqn);
        self.xrc_srq(uid, number)?.limit = input.get(arm_xrc_srq_in::lwm) as u16;
        self.check_limit(number);
        Ok(vec![])
    }

    pub(crate) fn destroy_xrc_srq(&mut self, uid: u32, input: &[u8]) -> Result<Vec<u8>, Refused> {
        let number = Bits::<destroy_xrc_srq_in, _>::new(input).get32(destroy_xrc_srq_in::xrc_srqn);
        self.xrc_srq(uid, number)?;
        let srq = self.objects.srqs.remove(number)?;
        self.objects.pds.release(srq.pd);
        if let Kind::Xrc { xrcd, cqn, .. } = srq.kind {
            self.objects.xrcds.release(xrcd);
            self.objects.cqs.release(cqn);
        }
        Ok(vec![])
    }

    /// Reports an SRQ that has fallen below its limit, once.
    pub(crate) fn check_limit(&mut self, number: u32) {
        let Ok(srq) = self.objects.srqs.get_mut(number) else { return };
        if srq.limit == 0 || srq.queue.posted(&self.memory).is_none_or(|posted| posted >= srq.limit)
        {
            return;
        }
        srq.limit = 0;
        let mut data = [0; 28];
        data[24..].copy_from_slice(&number.to_be_bytes());
        self.raise_event(event::SRQ_LIMIT, 0, &data);
    }
}
