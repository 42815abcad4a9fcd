//! Creations in the making.
//!
//! A plan knows what the kernel is to be told and holds the memory that it is told of. Whoever asks
//! the kernel adds the driver's part with `request`, gives `hold` to the kernel's object, which
//! keeps it until that is gone, and gets the rings from `finish`. A plan that is dropped gives back
//! everything it took.

use super::driver_response::DriverResponse;
use super::{
    CqRing, Member, NamedAddresses, Provider, RecvRing, SendLimits, SendRing, ThreadRegister, mlx5,
    rxe,
};
use crate::error::{Error, Result};
use crate::memory::allocator::Source;
use crate::memory::doorbell_record::Gate;
use crate::memory::mapping::Mapper;
use crate::memory::queue_memory::QueueMemory;
use crate::qp::state::QpType;
use crate::uverbs::command::Command;
use crate::uverbs::kernel::Kernel;
use rustix::io::Errno;
use std::sync::Arc;
use uverbs_uapi::object::UVERBS_ATTR_UHW_OUT;
use uverbs_uapi::qp::ib_uverbs_qp_cap;
use uverbs_uapi::rxe::{
    mminfo, rxe_create_cq_resp, rxe_create_qp_resp, rxe_create_srq_resp, rxe_resize_cq_resp,
};

/// What a kernel object stands on: memory that a device may reach, and what the device knows it by.
#[derive(Debug, Default)]
pub(crate) enum QueueResources {
    /// The queues are the kernel's.
    #[default]
    None,
    Mlx5(mlx5::resources::QueueResources),
}

/// What a completion queue is asked to be.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CqAsk {
    pub(crate) cqe: u32,
    /// Bytes of an entry, where that is not the driver's business.
    pub(crate) cqe_size: u32,
    /// Whether the device shall write all of it.
    pub(crate) pad: bool,
    /// Whether it has a channel, where somebody hears of completions.
    pub(crate) heard: bool,
}

/// A completion queue in the making.
#[derive(Debug)]
pub(crate) enum CqPlan {
    Rxe { cqe: u32, answer: DriverResponse },
    Mlx5(mlx5::create::CqPlan),
}

impl CqPlan {
    pub(crate) fn new(provider: &Provider, ask: CqAsk, source: Source<'_>) -> Result<CqPlan> {
        Ok(match provider {
            Provider::Rxe if ask.pad => {
                return Err(Error::new(source.verb, Errno::OPNOTSUPP)
                    .detail("only mlx5 has completions that can be padded"));
            }
            Provider::Rxe => CqPlan::Rxe {
                cqe: ask.cqe,
                answer: DriverResponse::room_for::<rxe_create_cq_resp>(),
            },
            Provider::Mlx5(context) => {
                CqPlan::Mlx5(mlx5::create::CqPlan::new(context, ask, source)?)
            }
        })
    }

    /// Entries, as the kernel is told.
    pub(crate) fn cqe(&self) -> u32 {
        match self {
            CqPlan::Rxe { cqe, .. } => *cqe,
            CqPlan::Mlx5(plan) => plan.cqe(),
        }
    }

    /// Bytes of queues that the driver pins; none where they are the kernel's.
    pub(crate) fn bytes(&self) -> usize {
        match self {
            CqPlan::Rxe { .. } => 0,
            CqPlan::Mlx5(plan) => plan.bytes(),
        }
    }

    pub(crate) fn request<'a>(&'a mut self, command: Command<'a>) -> Command<'a> {
        match self {
            CqPlan::Rxe { answer, .. } => command.output(UVERBS_ATTR_UHW_OUT, answer.as_mut()),
            CqPlan::Mlx5(plan) => plan.request(command),
        }
    }

    /// Says what a refusal by the kernel is likely to mean.
    pub(crate) fn explain(&self, error: Error) -> Error {
        match self {
            CqPlan::Rxe { .. } => error,
            CqPlan::Mlx5(plan) => plan.explain(error),
        }
    }

    pub(crate) fn hold(&self) -> QueueResources {
        match self {
            CqPlan::Rxe { .. } => QueueResources::None,
            CqPlan::Mlx5(plan) => QueueResources::Mlx5(plan.hold()),
        }
    }

    pub(crate) fn finish(self, mapper: &dyn Mapper) -> std::result::Result<CqRing, Errno> {
        match self {
            CqPlan::Rxe { answer, .. } => {
                let mi = answer.read::<rxe_create_cq_resp>().mi;
                let ring = rxe::cq::CqRing::map(mi, mapper)?;
                Ok(CqRing::rxe(rxe::poller::Poller::new(ring)))
            }
            CqPlan::Mlx5(plan) => Ok(CqRing::mlx5(plan.finish())),
        }
    }
}

/// A queue pair's register, and what it is asked to be.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QpAsk<'a> {
    pub(crate) qp_type: QpType,
    pub(crate) cap: ib_uverbs_qp_cap,
    pub(crate) signal_all: bool,
    /// Whether short data shall come in completions.
    pub(crate) scatter: bool,
    /// Where receives come from, if they come from elsewhere.
    pub(crate) shared: Option<&'a SharedSlots>,
    pub(crate) register: Option<&'a ThreadRegister>,
}

/// A queue pair in the making.
#[derive(Debug)]
pub(crate) enum QpPlan {
    Rxe { cap: ib_uverbs_qp_cap, recv: bool, datagrams: bool, answer: DriverResponse },
    Mlx5(Box<mlx5::create::QpPlan>),
}

impl QpPlan {
    pub(crate) fn new(
        provider: &Provider,
        ask: QpAsk<'_>,
        source: Source<'_>,
        kernel: &dyn Kernel,
    ) -> Result<QpPlan> {
        Ok(match provider {
            Provider::Rxe if ask.scatter => {
                return Err(Error::new(source.verb, Errno::OPNOTSUPP)
                    .detail("only mlx5 has completions that bring data"));
            }
            Provider::Rxe => QpPlan::Rxe {
                cap: ask.cap,
                recv: ask.shared.is_none(),
                datagrams: ask.qp_type == QpType::UD,
                answer: DriverResponse::room_for::<rxe_create_qp_resp>(),
            },
            Provider::Mlx5(context) => {
                let plan = mlx5::create::QpPlan::new(context, ask, source, kernel)?;
                QpPlan::Mlx5(Box::new(plan))
            }
        })
    }

    pub(crate) fn request<'a>(&'a mut self, command: Command<'a>) -> Command<'a> {
        match self {
            QpPlan::Rxe { answer, .. } => command.output(UVERBS_ATTR_UHW_OUT, answer.as_mut()),
            QpPlan::Mlx5(plan) => plan.request(command),
        }
    }

    /// Bytes of queues that the driver pins; none where they are the kernel's.
    pub(crate) fn bytes(&self) -> usize {
        match self {
            QpPlan::Rxe { .. } => 0,
            QpPlan::Mlx5(plan) => plan.bytes(),
        }
    }

    /// What the kernel is told.
    pub(crate) fn told(&self) -> ib_uverbs_qp_cap {
        match self {
            QpPlan::Rxe { cap, .. } => *cap,
            QpPlan::Mlx5(plan) => plan.told(),
        }
    }

    /// What the queue pair can do, from what the kernel says of it.
    pub(crate) fn caps(&self, granted: ib_uverbs_qp_cap) -> ib_uverbs_qp_cap {
        match self {
            QpPlan::Rxe { .. } => granted,
            QpPlan::Mlx5(plan) => plan.caps(),
        }
    }

    /// Says what a refusal by the kernel is likely to mean.
    pub(crate) fn explain(&self, error: Error) -> Error {
        match self {
            QpPlan::Rxe { .. } => error,
            QpPlan::Mlx5(plan) => plan.explain(error),
        }
    }

    /// Called once, when the kernel's object is made.
    pub(crate) fn hold(&mut self) -> QueueResources {
        match self {
            QpPlan::Rxe { .. } => QueueResources::None,
            QpPlan::Mlx5(plan) => QueueResources::Mlx5(plan.hold()),
        }
    }

    pub(crate) fn finish(
        self,
        qpn: u32,
        granted: ib_uverbs_qp_cap,
        mapper: &dyn Mapper,
    ) -> std::result::Result<Queues, Errno> {
        match self {
            QpPlan::Rxe { recv, datagrams, answer, .. } => {
                let answer = answer.read::<rxe_create_qp_resp>();
                let limits = SendLimits {
                    max_sge: granted.max_send_sge,
                    max_inline: granted.max_inline_data,
                };
                let send = rxe::sq::SendRing::map(answer.sq_mi, limits, datagrams, mapper)?;
                let recv = match recv {
                    true => {
                        Some(rxe::rq::RecvRing::map(answer.rq_mi, granted.max_recv_sge, mapper)?)
                    }
                    false => None,
                };
                Ok(Queues {
                    named: send.named().cloned(),
                    send: SendRing::rxe(send),
                    recv: recv.map(RecvRing::rxe),
                    member: Member::Rxe { qpn },
                    gate: None,
                })
            }
            QpPlan::Mlx5(plan) => plan.finish(qpn).ok_or(Errno::BADMSG),
        }
    }
}

/// An XRC target in the making: a queue pair without queues.
#[derive(Debug)]
pub(crate) enum TargetPlan {
    Rxe,
    Mlx5(mlx5::create::TargetPlan),
}

impl TargetPlan {
    pub(crate) fn new(provider: &Provider, verb: &'static str) -> Result<TargetPlan> {
        Ok(match provider {
            Provider::Rxe => TargetPlan::Rxe,
            Provider::Mlx5(context) => {
                TargetPlan::Mlx5(mlx5::create::TargetPlan::new(context, verb)?)
            }
        })
    }

    pub(crate) fn request<'a>(&'a mut self, command: Command<'a>) -> Command<'a> {
        match self {
            TargetPlan::Rxe => command,
            TargetPlan::Mlx5(plan) => plan.request(command),
        }
    }

    /// What keeps its number on the device from being dealt again.
    pub(crate) fn finish(self, qpn: u32) -> Member {
        match self {
            TargetPlan::Rxe => Member::None,
            TargetPlan::Mlx5(plan) => Member::Mlx5(plan.finish(qpn)),
        }
    }
}

/// The rings of a queue pair.
#[derive(Debug)]
pub(crate) struct Queues {
    pub(crate) send: SendRing,
    pub(crate) recv: Option<RecvRing>,
    /// What its completion queues know it by.
    pub(crate) member: Member,
    /// Which address handles its requests name, if they do.
    pub(crate) named: Option<Arc<NamedAddresses>>,
    /// Where the rings look whether they may be used, if they do.
    pub(crate) gate: Option<Gate>,
}

/// What a queue pair has to know of a shared receive queue.
#[derive(Clone, Debug)]
pub(crate) enum SharedSlots {
    Rxe,
    Mlx5(Arc<mlx5::srq::Slots>),
}

/// What a shared receive queue is asked to be.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SrqAsk {
    pub(crate) max_wr: u32,
    pub(crate) max_sge: u32,
}

/// A shared receive queue in the making.
#[derive(Debug)]
pub(crate) enum SrqPlan {
    Rxe { ask: SrqAsk, answer: DriverResponse },
    Mlx5(mlx5::create::SrqPlan),
}

impl SrqPlan {
    /// With `xrc` for a queue of an XRC domain, whose completions name it.
    pub(crate) fn new(
        provider: &Provider,
        ask: SrqAsk,
        xrc: bool,
        source: Source<'_>,
    ) -> Result<SrqPlan> {
        Ok(match provider {
            Provider::Rxe => {
                SrqPlan::Rxe { ask, answer: DriverResponse::room_for::<rxe_create_srq_resp>() }
            }
            Provider::Mlx5(context) => {
                SrqPlan::Mlx5(mlx5::create::SrqPlan::new(context, ask, xrc, source)?)
            }
        })
    }

    /// Bytes of queues that the driver pins; none where they are the kernel's.
    pub(crate) fn bytes(&self) -> usize {
        match self {
            SrqPlan::Rxe { .. } => 0,
            SrqPlan::Mlx5(plan) => plan.bytes(),
        }
    }

    /// What the kernel is told.
    pub(crate) fn told(&self) -> SrqAsk {
        match self {
            SrqPlan::Rxe { ask, .. } => *ask,
            SrqPlan::Mlx5(plan) => plan.told(),
        }
    }

    pub(crate) fn request<'a>(&'a mut self, command: Command<'a>) -> Command<'a> {
        match self {
            SrqPlan::Rxe { answer, .. } => command.output(UVERBS_ATTR_UHW_OUT, answer.as_mut()),
            SrqPlan::Mlx5(plan) => plan.request(command),
        }
    }

    /// What the queue takes, from what the kernel says of it.
    pub(crate) fn granted(&self, kernel: SrqAsk) -> SrqAsk {
        match self {
            SrqPlan::Rxe { .. } => kernel,
            SrqPlan::Mlx5(plan) => plan.told(),
        }
    }

    pub(crate) fn hold(&self) -> QueueResources {
        match self {
            SrqPlan::Rxe { .. } => QueueResources::None,
            SrqPlan::Mlx5(plan) => QueueResources::Mlx5(plan.hold()),
        }
    }

    /// The ring, what queue pairs have to know of it, and, of a queue of an XRC domain with this
    /// `number`, what its completion queue knows it by.
    pub(crate) fn finish(
        self,
        number: u32,
        granted: SrqAsk,
        mapper: &dyn Mapper,
    ) -> std::result::Result<(RecvRing, SharedSlots, Member), Errno> {
        match self {
            SrqPlan::Rxe { answer, .. } => {
                let mi = answer.read::<rxe_create_srq_resp>().mi;
                let ring = rxe::rq::RecvRing::map(mi, granted.max_sge, mapper)?;
                Ok((RecvRing::rxe(ring), SharedSlots::Rxe, Member::None))
            }
            SrqPlan::Mlx5(plan) => {
                let (ring, record) = plan.finish(number);
                let slots = SharedSlots::Mlx5(ring.slots().clone());
                let member = record.map_or(Member::None, Member::Mlx5);
                Ok((RecvRing::mlx5_shared(ring), slots, member))
            }
        }
    }
}

/// A completion queue about to become larger or smaller.
#[derive(Debug)]
pub(crate) enum ResizePlan {
    Rxe { cqe: u32, answer: DriverResponse },
    Mlx5(mlx5::create::ResizePlan),
}

impl ResizePlan {
    /// `None` if there is nothing to do.
    pub(crate) fn new(
        provider: &Provider,
        ring: &CqRing,
        cqe: u32,
        source: Source<'_>,
    ) -> Result<Option<ResizePlan>> {
        Ok(match (provider, ring.as_mlx5()) {
            (Provider::Mlx5(context), Some(ring)) => {
                mlx5::create::ResizePlan::new(context, ring, cqe, source)?.map(ResizePlan::Mlx5)
            }
            _ => Some(ResizePlan::Rxe {
                cqe,
                answer: DriverResponse::room_for::<rxe_resize_cq_resp>(),
            }),
        })
    }

    /// Entries, as the kernel is told.
    pub(crate) fn cqe(&self) -> u32 {
        match self {
            ResizePlan::Rxe { cqe, .. } => *cqe,
            ResizePlan::Mlx5(plan) => plan.cqe(),
        }
    }

    /// Bytes of queues that the driver pins; none where they are the kernel's.
    pub(crate) fn bytes(&self) -> usize {
        match self {
            ResizePlan::Rxe { .. } => 0,
            ResizePlan::Mlx5(plan) => plan.bytes(),
        }
    }

    pub(crate) fn request<'a>(&'a mut self, command: Command<'a>) -> Command<'a> {
        match self {
            ResizePlan::Rxe { answer, .. } => command.driver(&[], answer.as_mut()),
            ResizePlan::Mlx5(plan) => plan.request(command),
        }
    }

    /// Puts the new queue in the old one's place, in the ring and in what the kernel's object holds,
    /// and answers what is left of the old one: to be dropped where no lock is held, because an
    /// allocator may be called.
    pub(crate) fn finish(
        &mut self,
        ring: &mut CqRing,
        hold: Option<&QueueResources>,
        mapper: &dyn Mapper,
    ) -> std::result::Result<Option<Arc<QueueMemory>>, Errno> {
        match self {
            ResizePlan::Rxe { answer, .. } => {
                let poller = ring.as_rxe().ok_or(Errno::BADMSG)?;
                let mi = answer.read::<rxe_resize_cq_resp>().mi;
                poller.replace(rxe::cq::CqRing::map(mi, mapper)?);
                Ok(None)
            }
            ResizePlan::Mlx5(plan) => {
                let ring = ring.as_direct().ok_or(Errno::BADMSG)?;
                let before = match hold {
                    Some(QueueResources::Mlx5(hold)) => hold.exchange(plan.memory().clone()),
                    _ => None,
                };
                plan.finish(ring);
                Ok(before)
            }
        }
    }

    /// What follows a failure: memory that the device may have moved to stays with the kernel's object
    /// until that is gone, like the memory that it may not have left.
    pub(crate) fn abandon(&self, error: &Error, hold: Option<&QueueResources>) {
        if let (ResizePlan::Mlx5(plan), Some(QueueResources::Mlx5(hold))) = (self, hold) {
            plan.abandon(error, hold);
        }
    }
}

/// The ring of a shared receive queue after rxe moved it to `mi`.
pub(crate) fn resized_srq_ring(
    mi: mminfo,
    max_sge: u32,
    fresh: bool,
    mapper: &dyn Mapper,
) -> std::result::Result<RecvRing, Errno> {
    let ring = rxe::rq::RecvRing::map(mi, max_sge, mapper)?;
    Ok(RecvRing::rxe(ring.after(fresh)))
}
