//! The drivers whose queues this library drives: what they add to commands, and their rings.
//!
//! A private enum, matched once per batch, in place of generics that would leak into every public
//! type. Providers open no files, hold no context and know no objects: they are given what the
//! kernel answered and a [`Mapper`], and give back rings.

pub(crate) mod answer;
pub(crate) mod rxe;

use crate::completion::Wc;
use crate::device::{Device, ProviderKind};
use crate::error::{Error, Result};
use crate::mem::mapping::Mapper;
use crate::mem::ring::ProducerWatch;
use crate::retired::Watch;
use crate::uverbs::kernel::Kernel;
use crate::wr::{PostError, Recv, SendWr};
use answer::Answer;
use rustix::io::Errno;
use uverbs_uapi::ah::ib_uverbs_ah_attr;
use uverbs_uapi::device::rdma_driver_id;
use uverbs_uapi::rxe::{mminfo, rxe_create_srq_resp, rxe_resize_cq_resp};
use uverbs_uapi::rxe::{rxe_create_ah_resp, rxe_create_cq_resp, rxe_create_qp_resp};

/// The provider of a device.
#[derive(Clone, Debug)]
pub(crate) enum Provider {
    Rxe,
}

impl Provider {
    pub(crate) fn new(device: &Device) -> Result<Provider> {
        match device.provider()? {
            ProviderKind::Rxe => Ok(Provider::Rxe),
            ProviderKind::Mlx5 => Err(Error::new("open_device", Errno::OPNOTSUPP).detail(format!(
                "{} is driven by mlx5, whose queues this version does not drive yet",
                device.name()
            ))),
        }
    }

    /// The id that every ioctl carries, so that two drivers' ABIs are never confused.
    pub(crate) fn driver(&self) -> u32 {
        match self {
            Provider::Rxe => rdma_driver_id::RDMA_DRIVER_RXE.0,
        }
    }

    /// How often a queue pair has to be brought to RESET until it is reset. The rings' indices stay
    /// what they were: the kernel drains its queues up to our producer index.
    pub(crate) fn resets(&self) -> u32 {
        match self {
            // The driver first notes where the next send will stand, and then skips the sends that
            // were never done: what it noted is behind, and it would send wiped requests. The
            // second time there is nothing left to skip.
            Provider::Rxe => 2,
        }
    }

    pub(crate) fn pd_answer(&self) -> Answer {
        match self {
            Provider::Rxe => Answer::none(),
        }
    }

    /// The number of a protection domain on the device; `None` where the driver tells none.
    pub(crate) fn pd_number(
        &self,
        _kernel: &dyn Kernel,
        _handle: u32,
    ) -> std::result::Result<Option<u32>, Errno> {
        match self {
            Provider::Rxe => Ok(None),
        }
    }

    pub(crate) fn ah_answer(&self) -> Answer {
        match self {
            Provider::Rxe => Answer::room_for::<rxe_create_ah_resp>(),
        }
    }

    pub(crate) fn cq_answer(&self) -> Answer {
        match self {
            Provider::Rxe => Answer::room_for::<rxe_create_cq_resp>(),
        }
    }

    pub(crate) fn resize_cq_answer(&self) -> Answer {
        match self {
            Provider::Rxe => Answer::room_for::<rxe_resize_cq_resp>(),
        }
    }

    pub(crate) fn qp_answer(&self) -> Answer {
        match self {
            Provider::Rxe => Answer::room_for::<rxe_create_qp_resp>(),
        }
    }

    pub(crate) fn srq_answer(&self) -> Answer {
        match self {
            Provider::Rxe => Answer::room_for::<rxe_create_srq_resp>(),
        }
    }

    /// What work requests need to know of an address handle.
    pub(crate) fn address(&self, _attr: &ib_uverbs_ah_attr, answer: &Answer) -> Address {
        match self {
            Provider::Rxe => Address::Rxe { ah_num: answer.read::<rxe_create_ah_resp>().ah_num },
        }
    }

    pub(crate) fn cq_ring(
        &self,
        answer: &Answer,
        mapper: &dyn Mapper,
    ) -> std::result::Result<CqRing, Errno> {
        match self {
            Provider::Rxe => {
                let mi = answer.read::<rxe_create_cq_resp>().mi;
                rxe::cq::CqRing::map(mi, mapper).map(CqRing::Rxe)
            }
        }
    }

    pub(crate) fn send_ring(
        &self,
        answer: &Answer,
        limits: SendLimits,
        mapper: &dyn Mapper,
    ) -> std::result::Result<SendRing, Errno> {
        match self {
            Provider::Rxe => {
                let mi = answer.read::<rxe_create_qp_resp>().sq_mi;
                rxe::sq::SendRing::map(mi, limits, mapper).map(SendRing::Rxe)
            }
        }
    }

    pub(crate) fn recv_ring(
        &self,
        answer: &Answer,
        max_sge: u32,
        mapper: &dyn Mapper,
    ) -> std::result::Result<RecvRing, Errno> {
        match self {
            Provider::Rxe => {
                let mi = answer.read::<rxe_create_qp_resp>().rq_mi;
                rxe::rq::RecvRing::map(mi, max_sge, mapper).map(RecvRing::Rxe)
            }
        }
    }

    pub(crate) fn srq_ring(
        &self,
        answer: &Answer,
        max_sge: u32,
        mapper: &dyn Mapper,
    ) -> std::result::Result<RecvRing, Errno> {
        match self {
            Provider::Rxe => {
                let mi = answer.read::<rxe_create_srq_resp>().mi;
                rxe::rq::RecvRing::map(mi, max_sge, mapper).map(RecvRing::Rxe)
            }
        }
    }

    /// The ring of a shared receive queue after rxe moved it to `mi`.
    pub(crate) fn resized_srq_ring(
        &self,
        mi: mminfo,
        max_sge: u32,
        mapper: &dyn Mapper,
    ) -> std::result::Result<RecvRing, Errno> {
        match self {
            Provider::Rxe => rxe::rq::RecvRing::map(mi, max_sge, mapper).map(RecvRing::Rxe),
        }
    }
}

/// What a send queue takes, as the kernel answered at creation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SendLimits {
    pub(crate) max_sge: u32,
    pub(crate) max_inline: u32,
}

/// An address handle as work requests carry it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Address {
    Rxe { ah_num: u32 },
}

/// The consumer's side of a completion queue.
#[derive(Debug)]
pub(crate) enum CqRing {
    Rxe(rxe::cq::CqRing),
}

impl CqRing {
    /// The next completion, consumed.
    #[inline]
    pub(crate) fn next(&mut self) -> Option<Wc> {
        match self {
            CqRing::Rxe(ring) => ring.next().map(Wc::Rxe),
        }
    }

    /// Gives consumed entries back to the device.
    #[inline]
    pub(crate) fn release(&mut self) {
        match self {
            CqRing::Rxe(ring) => ring.release(),
        }
    }

    /// How others see what the device completed, and the slot of the next entry to consume.
    pub(crate) fn watch(&self) -> (CqWatch, u32) {
        match self {
            CqRing::Rxe(ring) => {
                let (watch, consumer) = ring.watch();
                (CqWatch::Rxe(watch), consumer)
            }
        }
    }

    /// Completions that are there to be consumed.
    pub(crate) fn pending(&self) -> u32 {
        match self {
            CqRing::Rxe(ring) => ring.pending(),
        }
    }

    pub(crate) fn capacity(&self) -> u32 {
        match self {
            CqRing::Rxe(ring) => ring.capacity(),
        }
    }
}

/// The device's end of a completion queue, seen from beside its poller.
#[derive(Debug)]
pub(crate) enum CqWatch {
    Rxe(ProducerWatch),
}

impl Watch for CqWatch {
    fn producer(&self) -> u32 {
        match self {
            CqWatch::Rxe(watch) => watch.producer(),
        }
    }

    fn mask(&self) -> u32 {
        match self {
            CqWatch::Rxe(watch) => watch.mask(),
        }
    }
}

/// Where a batch in the making stands: the ring's own position moves only when it is published.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cursor {
    /// The slot that the next request goes to.
    pub(crate) at: u32,
    /// Requests that still fit.
    pub(crate) room: u32,
}

/// The producer's side of a send queue.
#[derive(Debug)]
pub(crate) enum SendRing {
    Rxe(rxe::sq::SendRing),
}

impl SendRing {
    #[inline]
    pub(crate) fn cursor(&self) -> Cursor {
        match self {
            SendRing::Rxe(ring) => ring.cursor(),
        }
    }

    /// Writes a request where the cursor stands; after an error the cursor has not moved.
    #[inline]
    pub(crate) fn push(
        &self,
        cursor: &mut Cursor,
        wr: &SendWr<'_>,
    ) -> std::result::Result<(), PostError> {
        match self {
            SendRing::Rxe(ring) => ring.push(cursor, wr),
        }
    }

    /// Takes over where a cursor ended, and shows its requests to the device.
    #[inline]
    pub(crate) fn publish(&mut self, cursor: Cursor) {
        match self {
            SendRing::Rxe(ring) => ring.publish(cursor.at),
        }
    }
}

/// The producer's side of a receive queue or shared receive queue.
#[derive(Debug)]
pub(crate) enum RecvRing {
    Rxe(rxe::rq::RecvRing),
}

impl RecvRing {
    /// How many requests the ring holds.
    pub(crate) fn capacity(&self) -> u32 {
        match self {
            RecvRing::Rxe(ring) => ring.capacity(),
        }
    }

    /// Takes no more requests: the device has left this ring for another.
    pub(crate) fn close(&mut self) {
        match self {
            RecvRing::Rxe(ring) => ring.close(),
        }
    }

    #[inline]
    pub(crate) fn cursor(&self) -> Cursor {
        match self {
            RecvRing::Rxe(ring) => ring.cursor(),
        }
    }

    #[inline]
    pub(crate) fn push(
        &self,
        cursor: &mut Cursor,
        recv: &Recv<'_>,
    ) -> std::result::Result<(), PostError> {
        match self {
            RecvRing::Rxe(ring) => ring.push(cursor, recv),
        }
    }

    #[inline]
    pub(crate) fn publish(&mut self, cursor: Cursor) {
        match self {
            RecvRing::Rxe(ring) => ring.publish(cursor.at),
        }
    }
}
