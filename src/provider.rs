//! The drivers whose queues this library drives: their parts of commands, and their rings.
//!
//! Each provider is a folder whose files are its queues: creation, WQEs and doorbells of one queue are in one file. On
//! the control path, where a system call follows anyway, a provider is a [`Provider`]: a trait that its folder
//! implements. On the data path [`rings`] has an enum for each kind of queue, in place of generics that would leak into
//! every public type. It is matched once for each request or completion, and where a batch begins and is rung.
//! Providers open no files, hold no context and know no objects; [`create`] describes how objects and providers share a
//! creation.

mod create;
pub(crate) mod driver_response;
pub(crate) mod mlx5;
pub(crate) mod poll_gate;
mod rings;
pub(crate) mod rxe;

pub(crate) use create::{
    CqInitAttr, CreateRequest, CreatedCq, CreatedQp, CreatedSrq, CreatedTarget, Execute,
    ExecuteModify, QpChange, QpInitAttr, QueueResources, ResizeRequest, Scatter, SrqInitAttr,
    create,
};
pub(crate) use mlx5::dm::DmLocation;
pub(crate) use mlx5::uar::RegisterLease;
pub(crate) use rings::{
    CqMembers, CqRing, Member, ProviderWc, RecvCursor, RecvRing, RecvRingMut, SendCursor, SendRing,
    SendRingMut, SharedReceives, SrqRing, WcPacket, WcPath,
};
pub(crate) use rxe::ah::NamedAddresses;

use crate::device::{Device, ProviderKind};
use crate::error::{Error, Result};
use crate::memory::allocator::Source;
use crate::uverbs::command::Command;
use crate::uverbs::kernel::Kernel;
use crate::wr::Address;
use driver_response::DriverResponse;
use rustix::io::Errno;
use std::fmt::Debug;
use std::panic::RefUnwindSafe;
use std::sync::Arc;
use uverbs_uapi::ah::ib_uverbs_ah_attr;

/// The provider of a device that is to be opened.
pub(crate) fn open(device: &Device) -> Result<Box<dyn Opening>> {
    Ok(match device.provider()? {
        ProviderKind::Rxe => Box::new(rxe::Opening),
        ProviderKind::Mlx5 => Box::new(mlx5::context::Mlx5Opening::new()),
    })
}

/// A provider while its context is established.
pub(crate) trait Opening: Debug {
    /// The id that every ioctl carries, so that two drivers' ABIs are never confused.
    fn driver(&self) -> u32;

    /// Adds the driver's part to the command that establishes the context.
    fn request<'a>(&'a mut self, _command: &mut Command<'a>) {}

    /// Adds the driver's part to QUERY_CONTEXT, which describes the context of a file that already has one;
    /// `false` if the driver does not implement it.
    fn inquire<'a>(&'a mut self, _command: &mut Command<'a>) -> bool {
        false
    }

    /// Whether to repeat a command that failed; from now on `request` asks for less.
    fn retreat(&mut self) -> bool {
        false
    }

    /// The provider, after the kernel established the context or described an established one.
    fn finish(self: Box<Self>, kernel: &dyn Kernel) -> Result<Arc<dyn Provider>>;
}

/// The particulars of a driver that are plain values; each provider has one, `TRAITS`.
#[derive(Debug)]
pub(crate) struct DriverTraits {
    /// Whether the driver handles on-demand memory correctly only if it begins at a page and its iova is its
    /// own address; it writes all other memory at wrong places.
    pub(crate) on_demand_in_place_only: bool,
    /// Whether queue memory is the program's, so that allocators are asked for it.
    pub(crate) asks_allocators: bool,
    /// The number of MODIFY_QP commands to RESET until a queue pair is reset.
    pub(crate) resets_needed: u32,
    /// Whether [`Provider::address`] needs the link protocol of the packets.
    pub(crate) addresses_by_link: bool,
    /// Whether the driver ever has queue pairs of raw packets.
    pub(crate) raw_packets: bool,
    /// Whether the driver ever has device memory.
    pub(crate) device_memory: bool,
    /// Whether the kernel may give [`Member::number`] to another queue pair as soon as one is destroyed.
    pub(crate) kernel_numbers_members: bool,
    /// The driver's part of the request that sets the limit of a shared receive queue.
    pub(crate) srq_limit_request: &'static [u8],
    /// Room for the driver's part of the response to QUERY_DEVICE.
    pub(crate) device_response: DriverResponse,
    /// Room for the driver's part of the response to ALLOC_PD.
    pub(crate) pd_response: DriverResponse,
    /// Room for the driver's part of the response to CREATE_AH.
    pub(crate) ah_response: DriverResponse,
}

/// The provider of an open device, on the control path. A method with a default is for a feature that not every
/// driver has.
pub(crate) trait Provider: Debug + Send + Sync + RefUnwindSafe {
    fn traits(&self) -> &'static DriverTraits;

    /// The provider for the same context in a forked child, without anything that the parent goes on using.
    fn reimport(&self, kernel: &dyn Kernel) -> Result<Arc<dyn Provider>>;

    /// Frees the kernel's resources that the context has beside its objects, which are gone by now.
    fn close(&self, _kernel: &dyn Kernel) {}

    /// The most bytes of inline data that a queue pair can be asked for, on a device whose requests have at
    /// most `max_sge` SGEs; `None` if this library checks them before it asks.
    fn max_inline_data(&self, _max_sge: u32) -> Option<u32> {
        None
    }

    /// The reason why the driver refuses all dma-bufs; `None` if it takes some. `has_method` is whether the
    /// kernel has the method, `on_demand` whether the device pages on demand.
    fn refuses_dmabufs(&self, has_method: bool, on_demand: bool) -> Option<&'static str>;

    /// The number of reads and atomics that a queue pair may have under way, if the provider knows it.
    fn rd_atomic(&self) -> Option<RdAtomic> {
        None
    }

    /// The number of a protection domain on the device; `None` where the driver tells none.
    fn pd_number(
        &self,
        _kernel: &dyn Kernel,
        _handle: u32,
    ) -> std::result::Result<Option<u32>, Errno> {
        Ok(None)
    }

    /// The fields of an address handle that work requests carry.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` where the kernel does not tell.
    fn address(
        &self,
        verb: &'static str,
        attr: &ib_uverbs_ah_attr,
        link: LinkProtocol,
        response: &DriverResponse,
    ) -> Result<Address>;

    /// Creates a completion queue; `execute` runs the command.
    fn create_cq(
        &self,
        attr: CqInitAttr,
        source: Source<'_>,
        kernel: &dyn Kernel,
        execute: Execute<'_>,
    ) -> Result<CreatedCq>;

    /// Creates a queue pair; `execute` runs the command.
    fn create_qp(
        &self,
        attr: QpInitAttr<'_>,
        source: Source<'_>,
        kernel: &dyn Kernel,
        execute: Execute<'_>,
    ) -> Result<CreatedQp>;

    /// Creates a shared receive queue; `execute` runs the command.
    fn create_srq(
        &self,
        attr: SrqInitAttr,
        source: Source<'_>,
        kernel: &dyn Kernel,
        execute: Execute<'_>,
    ) -> Result<CreatedSrq>;

    /// Creates an XRC target; `execute` runs the command.
    fn create_target(&self, verb: &'static str, _execute: Execute<'_>) -> Result<CreatedTarget> {
        Err(Error::new(verb, Errno::OPNOTSUPP))
    }

    /// Changes a queue pair together with the ECE options of its connection and other parts of the driver's input and
    /// output; `execute` runs the command. Returns the options that the device took.
    fn modify_qp_with(
        &self,
        verb: &'static str,
        _change: QpChange,
        _execute: ExecuteModify<'_>,
    ) -> Result<u32> {
        Err(Error::new(verb, Errno::OPNOTSUPP).detail("the driver has no ECE options"))
    }

    /// A doorbell register for the queues of one thread domain; `None` where the doorbell is in the kernel.
    fn thread_register(
        &self,
        _kernel: &dyn Kernel,
        _verb: &'static str,
    ) -> Result<Option<RegisterLease>> {
        Ok(None)
    }

    /// mlx5's part of the context, for the features of mlx5 alone.
    fn mlx5(&self, verb: &'static str) -> Result<&mlx5::Mlx5> {
        Err(Error::new(verb, Errno::OPNOTSUPP).detail("the device is not driven by mlx5"))
    }
}

/// The link protocol of a port's packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LinkProtocol {
    InfiniBand,
    /// Ethernet, with the headers of RoCE v1.
    RoceV1,
    /// Ethernet, over UDP.
    RoceV2,
}

/// Reads and atomics that a queue pair of a device may have under way, in each direction.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RdAtomic {
    /// Reads and atomics of the peer that the queue pair answers.
    pub(crate) answered: u32,
    /// Reads and atomics that the queue pair sends.
    pub(crate) sent: u32,
    /// Whether the device has atomics at all.
    pub(crate) atomics: bool,
}

/// The limits of a send queue, as the kernel returned them at creation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SendLimits {
    pub(crate) max_sge: u32,
    pub(crate) max_inline: u32,
}
