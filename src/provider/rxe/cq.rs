//! Completion queues: the kernel produces, and this process consumes.

use super::retired::{RetiredQps, Retirements};
use super::{Rxe, map_ring, unmapped};
use crate::error::{Error, Result};
use crate::memory::mapping::Mapper;
use crate::memory::rxe_queue::{ProducerWatch, RxeQueue};
use crate::provider::poll_gate::PollGate;
use crate::provider::{self, CqInitAttr, CreateRequest, CreatedCq, Execute, ResizeRequest};
use crate::uverbs::command::Command;
use rustix::io::Errno;
use std::sync::Arc;
use uverbs_uapi::cq::{UVERBS_ATTR_CREATE_CQ_CQE, UVERBS_METHOD_CQ_CREATE};
use uverbs_uapi::object::{UVERBS_ATTR_UHW_OUT, UVERBS_OBJECT_CQ};
use uverbs_uapi::rxe::{mminfo, rxe_create_cq_resp, rxe_resize_cq_resp};
use uverbs_uapi::wc::ib_uverbs_wc;
use zerocopy::IntoBytes;

/// Creates a completion queue. Pairs with `rxe_cq_from_init` in `rxe_cq.c`, which makes its memory.
pub(super) fn create(
    rxe: &Rxe,
    attr: CqInitAttr,
    verb: &'static str,
    mapper: &dyn Mapper,
    execute: Execute<'_>,
) -> Result<CreatedCq> {
    if attr.pad {
        return Err(Error::new(verb, Errno::OPNOTSUPP)
            .detail("only mlx5 has completions that can be padded"));
    }
    if attr.real_time {
        return Err(Error::new(verb, Errno::OPNOTSUPP).detail("only mlx5 has timestamps"));
    }
    let gate = rxe.gate(verb)?;
    let mut response = rxe_create_cq_resp::default();
    let mut command = Command::new(UVERBS_OBJECT_CQ, UVERBS_METHOD_CQ_CREATE);
    command.u32(UVERBS_ATTR_CREATE_CQ_CQE, attr.cqe).output(UVERBS_ATTR_UHW_OUT, &mut response);
    execute(CreateRequest { command, pinned: 0, resources: None })?;
    let ring = RxeCq::map(response.mi, PollGate::new(gate), mapper);
    let ring = ring.map_err(|errno| unmapped(verb, errno))?;
    let members = ring.retirements.clone();
    Ok(CreatedCq { ring: provider::CqRing::Rxe(ring), members })
}

/// The poller's side of a completion queue.
#[derive(Debug)]
pub(crate) struct RxeCq {
    queue: RxeQueue,
    /// Consumer index.
    consumer: u32,
    /// The producer index as last loaded; loaded again when everything before it is consumed.
    producer: u32,
    /// Completions consumed in all, from this ring and earlier ones.
    consumed: u64,
    /// Queue pairs that are gone.
    retired: RetiredQps,
    retirements: Arc<Retirements<ProducerWatch>>,
    /// A copy of the completion that was consumed last, which the poller lends.
    current: ib_uverbs_wc,
}

impl RxeCq {
    pub(crate) fn map(
        mi: mminfo,
        poll_gate: PollGate,
        mapper: &dyn Mapper,
    ) -> std::result::Result<RxeCq, Errno> {
        let queue = map_ring(mi, size_of::<ib_uverbs_wc>(), mapper)?;
        let consumer = queue.consumer();
        let retirements = Arc::new(Retirements::new(queue.watch(), consumer, poll_gate));
        Ok(RxeCq {
            queue,
            consumer,
            producer: consumer,
            consumed: 0,
            retired: RetiredQps::default(),
            retirements,
            current: ib_uverbs_wc::default(),
        })
    }

    pub(crate) fn poll_gate(&self) -> &PollGate {
        self.retirements.poll_gate()
    }

    /// Reads the list of destroyed queue pairs.
    pub(crate) fn catch_up(&mut self) {
        self.poll_gate().clear();
        self.retired.apply_updates(&self.retirements, self.consumed);
    }

    /// The next completion of a queue pair that is alive, consumed.
    pub(crate) fn next(&mut self) -> Option<&ib_uverbs_wc> {
        loop {
            if self.consumer == self.producer {
                self.producer = self.queue.producer();
                if self.consumer == self.producer {
                    return None;
                }
            }
            self.current = self.queue.read(self.consumer)?;
            self.consumer = self.queue.next(self.consumer);
            let position = self.consumed;
            self.consumed += 1;
            if !self.retired.covers(self.current.qp_num, position) {
                return Some(&self.current);
            }
            // If no other completion follows, no poll would return these entries to the kernel.
            self.release();
        }
    }

    /// Gives consumed entries back to the kernel; nothing in a forked child.
    pub(crate) fn release(&mut self) {
        self.retirements.release(self.consumed);
        self.queue.publish_consumer(self.consumer);
    }

    /// Discards the completions in the queue of a queue pair that completes nothing more.
    pub(crate) fn purge(&mut self, qpn: u32) {
        let pending = u64::from(self.pending());
        if pending > 0 {
            self.retired.add(qpn, self.consumed + pending);
        }
    }

    /// Completions that are there to be consumed.
    pub(crate) fn pending(&self) -> u32 {
        self.queue.distance(self.consumer, self.queue.producer())
    }

    pub(crate) fn capacity(&self) -> u32 {
        self.queue.capacity()
    }

    /// Moves the queue to a ring for at least `cqe` completions, into which the kernel copies those that
    /// are not consumed. Pairs with `rxe_cq_resize_queue`.
    pub(crate) fn resize(
        &mut self,
        cqe: u32,
        verb: &'static str,
        mapper: &dyn Mapper,
        execute: impl FnOnce(ResizeRequest<'_>) -> Result<()>,
    ) -> Result<()> {
        let (retirements, consumed) = (self.retirements.clone(), self.consumed);
        // A thread that destroys a queue pair must not read the ring meanwhile.
        retirements.exchange(consumed, || {
            let mut response = rxe_resize_cq_resp::default();
            let (pending, output) = (self.pending(), response.as_mut_bytes());
            execute(ResizeRequest { cqe, pending, pinned: 0, input: &[], output })?;
            // The kernel adds nothing more to the old ring, even if the new one cannot be mapped.
            self.queue =
                map_ring(response.mi, size_of::<ib_uverbs_wc>(), mapper).map_err(|errno| {
                    Error::new(verb, errno).detail("the new queue could not be mapped")
                })?;
            self.consumer = self.queue.consumer();
            self.producer = self.consumer;
            Ok((self.queue.watch(), self.consumer))
        })
    }
}
