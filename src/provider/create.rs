//! The interface between objects and providers for the creation of queues.
//!
//! A provider sizes the queue, takes its memory and begins the command. The object adds the handles of
//! other objects, executes the command and owns the kernel's object from then on. From the kernel's
//! response the provider makes the rings, which it returns.

use super::{
    CqMembers, CqRing, Member, NamedAddresses, RecvRing, RegisterLease, SendRing, SharedReceives,
    SrqRing,
};
use crate::error::{Error, Result};
use crate::identity::Identity;
use crate::memory::gate::Gate;
use crate::number::Qpn;
use crate::qp::ece::Ece;
use crate::qp::state::QpType;
use crate::uverbs::command::Command;
use crate::wr::QpTransport;
use rustix::io::Errno;
use std::fmt::Debug;
use std::panic::RefUnwindSafe;
use std::sync::Arc;
use uverbs_uapi::qp::ib_uverbs_qp_cap;

/// A creation that the kernel is to carry out.
#[derive(Debug)]
pub(crate) struct CreateRequest<'a> {
    /// The command, with the attributes whose values the provider decides.
    pub(crate) command: Command<'a>,
    /// Bytes of memory that the driver pins.
    pub(crate) pinned: usize,
    /// The resources that the kernel's object holds until it is destroyed.
    pub(crate) resources: QueueResources,
}

/// The resources of a queue that the device may use until the queue is destroyed: memory, doorbell records,
/// doorbell registers. `None` where they are the kernel's.
pub(crate) type QueueResources = Option<Arc<dyn Debug + Send + Sync + RefUnwindSafe>>;

/// Makes the kernel carry out a creation, once.
pub(crate) type Execute<'e> = &'e mut (dyn FnMut(CreateRequest<'_>) -> Result<()> + 'e);

/// Makes the kernel change a queue pair, with the driver's input and room for its output.
pub(crate) type ExecuteModify<'e> = &'e mut (dyn FnMut(&[u8], &mut [u8]) -> Result<()> + 'e);

/// Creates an object: `provide` lets a provider begin the command and make the rings, and `execute` makes the
/// kernel's object in between. If the rings fail, the object is dropped, which destroys an `Object`.
pub(crate) fn create<K, T>(
    verb: &'static str,
    execute: impl Fn(CreateRequest<'_>) -> Result<K>,
    provide: impl FnOnce(Execute<'_>) -> Result<T>,
) -> Result<(K, T)> {
    let mut object = None;
    let created = provide(&mut |request| {
        object = Some(execute(request)?);
        Ok(())
    })?;
    match object {
        Some(object) => Ok((object, created)),
        None => Err(Error::new(verb, Errno::PROTO).detail("the provider issued no command")),
    }
}

/// Attributes of a completion queue to create.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CqInitAttr {
    pub(crate) cqe: u32,
    /// Bytes of a completion, where the driver leaves the choice.
    pub(crate) cqe_size: u32,
    /// Whether the device pads each completion to whole cache lines.
    pub(crate) pad: bool,
    /// Whether timestamps are of real time.
    pub(crate) real_time: bool,
}

/// A completion queue that was created.
#[derive(Debug)]
pub(crate) struct CreatedCq {
    pub(crate) ring: CqRing,
    /// The control path's side of the queue.
    pub(crate) members: Arc<dyn CqMembers>,
}

/// A completion queue's move to a ring of another size.
#[derive(Debug)]
pub(crate) struct ResizeRequest<'a> {
    pub(crate) cqe: u32,
    /// Completions that are in the queue.
    pub(crate) pending: u32,
    /// Bytes of memory that the driver pins.
    pub(crate) pinned: usize,
    /// The driver's input and output.
    pub(crate) input: &'a [u8],
    pub(crate) output: &'a mut [u8],
}

/// The data that a device may put into completions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Scatter {
    #[default]
    None,
    /// That of received messages.
    Received,
    /// The results of reads and atomics as well.
    All,
}

/// The driver's part of a change of a queue pair.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QpChange {
    /// Options of the connection (ECE); 0 for none.
    pub(crate) ece: u32,
    /// Whether the device may place data out of order from now on.
    pub(crate) out_of_order: bool,
}

/// Attributes of a queue pair to create.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QpInitAttr<'a> {
    pub(crate) qp_type: QpType,
    /// The protection domain.
    pub(crate) domain: Identity,
    pub(crate) cap: ib_uverbs_qp_cap,
    pub(crate) signal_all: bool,
    /// Short data that the device may put into CQEs (scatter to CQE).
    pub(crate) scatter: Scatter,
    /// Whether the device may place data out of order.
    pub(crate) out_of_order: bool,
    /// The shared receive queue that receives come from.
    pub(crate) srq: Option<&'a SharedReceives>,
    pub(crate) register: Option<&'a RegisterLease>,
}

impl QpInitAttr<'_> {
    /// The transport of the queue pair that got this number.
    pub(crate) fn transport(&self, qpn: u32) -> QpTransport {
        QpTransport { qp_type: self.qp_type, qpn: Qpn(qpn), domain: self.domain }
    }
}

/// A queue pair that was created.
#[derive(Debug)]
pub(crate) struct CreatedQp {
    pub(crate) send: SendRing,
    /// `None` where receives come from elsewhere.
    pub(crate) recv: Option<RecvRing>,
    pub(crate) qpn: u32,
    /// The capacities that were granted.
    pub(crate) cap: ib_uverbs_qp_cap,
    /// The number by which its completion queues identify it.
    pub(crate) member: Member,
    /// The gate of both rings.
    pub(crate) gate: Gate,
    /// The address handles that its WQEs name, where WQEs do.
    pub(crate) named: Option<Arc<NamedAddresses>>,
    /// The ECE options of the device, if it has any.
    pub(crate) ece: Option<Ece>,
}

/// An XRC target that was created: a queue pair without queues.
#[derive(Debug)]
pub(crate) struct CreatedTarget {
    pub(crate) qpn: u32,
    /// Keeps its user index, so that no other queue pair gets it.
    pub(crate) member: Member,
    /// The ECE options of the device, if it has any.
    pub(crate) ece: Option<Ece>,
}

/// Attributes of a shared receive queue to create.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SrqInitAttr {
    pub(crate) max_wr: u32,
    pub(crate) max_sge: u32,
    /// Whether it is of an XRC domain, so that completions name it.
    pub(crate) xrc: bool,
}

/// A shared receive queue that was created.
#[derive(Debug)]
pub(crate) struct CreatedSrq {
    pub(crate) ring: SrqRing,
    /// Open in the process that created the queue; shut in a forked child.
    pub(crate) gate: Gate,
    /// The part of it that its queue pairs use.
    pub(crate) shared_receives: SharedReceives,
    /// The number by which its completion queue identifies it, if it is of an XRC domain.
    pub(crate) member: Member,
    /// Its number, if it is of an XRC domain.
    pub(crate) number: u32,
    pub(crate) max_wr: u32,
    pub(crate) max_sge: u32,
}
