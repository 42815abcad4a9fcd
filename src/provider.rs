//! The drivers whose queues this library drives: what they add to commands, and their rings.
//!
//! Each provider is a folder whose files are its queues: creation, WQEs and doorbells of one queue are
//! in one file. [`rings`] has an enum for each kind of queue, in place of generics that would leak into
//! every public type. It is matched once for each request or completion, and where a batch begins and is
//! rung. Providers open no files, hold no context and know no objects; [`create`] says how a creation passes
//! between the two.

mod create;
pub(crate) mod driver_response;
pub(crate) mod mlx5;
pub(crate) mod poll_gate;
mod rings;
pub(crate) mod rxe;

pub(crate) use create::{
    CqInitAttr, CreateRequest, CreatedQp, CreatedSrq, CreatedTarget, QpInitAttr, ResizeRequest,
    SrqInitAttr,
};
pub(crate) use mlx5::dm::DmLocation;
pub(crate) use rings::{
    CqMembers, CqRing, Member, ProviderWc, QueueResources, RecvCursor, RecvRing, RecvRingMut,
    SendCursor, SendRing, SendRingMut, SharedReceives, SrqRing,
};
pub(crate) use rxe::ah::NamedAddresses;

use crate::device::{Device, ProviderKind};
use crate::error::{Error, Result};
use crate::memory::allocator::Source;
use crate::memory::mapping::Mapper;
use crate::uverbs::command::Command;
use crate::uverbs::kernel::Kernel;
use crate::wr::Address;
use driver_response::DriverResponse;
use rustix::io::Errno;
use std::sync::Arc;
use uverbs_uapi::ah::ib_uverbs_ah_attr;
use uverbs_uapi::device::rdma_driver_id;
use uverbs_uapi::rxe::rxe_sge;

/// The provider of an open device.
#[derive(Clone, Debug)]
pub(crate) enum Provider {
    Rxe(Arc<rxe::Rxe>),
    Mlx5(Arc<mlx5::Mlx5>),
}

/// A provider while its context is established.
#[derive(Debug)]
pub(crate) enum Opening {
    Rxe,
    Mlx5(mlx5::context::Mlx5Opening),
}

impl Opening {
    pub(crate) fn new(device: &Device) -> Result<Opening> {
        Ok(match device.provider()? {
            ProviderKind::Rxe => Opening::Rxe,
            ProviderKind::Mlx5 => Opening::Mlx5(mlx5::context::Mlx5Opening::new()),
        })
    }

    /// The id that every ioctl carries, so that two drivers' ABIs are never confused.
    pub(crate) fn driver(&self) -> u32 {
        match self {
            Opening::Rxe => rdma_driver_id::RDMA_DRIVER_RXE.0,
            Opening::Mlx5(_) => rdma_driver_id::RDMA_DRIVER_MLX5.0,
        }
    }

    /// Adds the driver's part to the command that establishes the context.
    pub(crate) fn request<'a>(&'a mut self, command: &mut Command<'a>) {
        match self {
            Opening::Rxe => {}
            Opening::Mlx5(opening) => opening.request(command),
        }
    }

    /// Adds the driver's part to QUERY_CONTEXT, which describes the context of a file that already has one;
    /// `false` if the driver does not implement it.
    pub(crate) fn inquire<'a>(&'a mut self, command: &mut Command<'a>) -> bool {
        match self {
            Opening::Rxe => false,
            Opening::Mlx5(opening) => {
                opening.inquire(command);
                true
            }
        }
    }

    /// Whether to repeat a command that failed; from now on `request` asks for less.
    pub(crate) fn retreat(&mut self) -> bool {
        match self {
            Opening::Rxe => false,
            Opening::Mlx5(opening) => opening.retreat(),
        }
    }

    /// The provider, after the kernel established the context or described an established one.
    pub(crate) fn finish(self, kernel: &dyn Kernel) -> Result<Provider> {
        Ok(match self {
            Opening::Rxe => Provider::Rxe(Arc::new(rxe::Rxe::new()?)),
            Opening::Mlx5(opening) => Provider::Mlx5(Arc::new(opening.finish(kernel)?)),
        })
    }
}

/// The particulars of a driver that are plain values; each provider has one, `TRAITS`.
#[derive(Debug)]
pub(crate) struct DriverTraits {
    /// Whether the driver is only right about on-demand memory that begins at a page and has its own address as
    /// iova; otherwise it writes elsewhere.
    pub(crate) on_demand_in_place_only: bool,
    /// Whether queue memory is the program's, so that allocators are asked for it.
    pub(crate) asks_allocators: bool,
    /// How often a queue pair has to be brought to RESET until it is reset.
    pub(crate) resets_needed: u32,
    /// Whether [`Provider::address`] has to know what the packets look like.
    pub(crate) addresses_by_link: bool,
    /// Room for the driver's part of the response to QUERY_DEVICE.
    pub(crate) device_response: DriverResponse,
    /// Room for the driver's part of the response to ALLOC_PD.
    pub(crate) pd_response: DriverResponse,
    /// Room for the driver's part of the response to CREATE_AH.
    pub(crate) ah_response: DriverResponse,
}

impl Provider {
    pub(crate) fn traits(&self) -> &'static DriverTraits {
        match self {
            Provider::Rxe(_) => &rxe::TRAITS,
            Provider::Mlx5(_) => &mlx5::TRAITS,
        }
    }

    /// The provider for the same context in a forked child, without anything that the parent goes on using.
    pub(crate) fn reimport(&self, kernel: &dyn Kernel, verb: &'static str) -> Result<Provider> {
        Ok(match self {
            Provider::Rxe(_) => {
                let fresh = rxe::Rxe::new();
                Provider::Rxe(Arc::new(fresh.map_err(|error| error.in_verb(verb))?))
            }
            Provider::Mlx5(context) => {
                let fresh = mlx5::Mlx5::new(*context.limits(), kernel);
                Provider::Mlx5(Arc::new(fresh.map_err(|error| error.in_verb(verb))?))
            }
        })
    }

    /// Gives back what the context has from the kernel beside its objects, which are gone by now.
    pub(crate) fn close(&self, kernel: &dyn Kernel) {
        match self {
            Provider::Rxe(_) => {}
            Provider::Mlx5(context) => context.registers().close(kernel),
        }
    }

    /// The most bytes of inline data that a queue pair can be asked for, on a device whose requests have at
    /// most `max_sge` SGEs; `None` if this library checks them before it asks.
    pub(crate) fn max_inline_data(&self, max_sge: u32) -> Option<u32> {
        match self {
            // `RXE_MAX_INLINE_DATA`: a WQE has room for as many SGEs.
            Provider::Rxe(_) => Some(max_sge.saturating_mul(size_of::<rxe_sge>() as u32)),
            Provider::Mlx5(_) => None,
        }
    }

    /// Whether the driver ever has queue pairs of raw packets.
    pub(crate) fn has_raw_packets(&self) -> bool {
        match self {
            // rxe of Linux 5.10 creates them, and neither sends nor receives by them.
            Provider::Rxe(_) => false,
            Provider::Mlx5(_) => true,
        }
    }

    /// Why the driver refuses all dma-bufs, on a kernel that has the method or not, of a device that does or
    /// does not page on demand; `None` if it takes some.
    pub(crate) fn refuses_dmabufs(
        &self,
        has_method: bool,
        on_demand: bool,
    ) -> Option<&'static str> {
        match self {
            Provider::Rxe(_) => Some("its driver has no regions of dma-bufs"),
            Provider::Mlx5(_) if !has_method => {
                Some("this kernel does not know them; Linux 5.12 or later does")
            }
            Provider::Mlx5(_) if !on_demand => Some(
                "it does not page on demand, and its driver takes dma-bufs only for a device that does, \
                 since Linux 7.2 and in later releases of 6.12",
            ),
            Provider::Mlx5(_) => None,
        }
    }

    /// How many reads and atomics a queue pair may have under way, if the provider knows.
    pub(crate) fn rd_atomic(&self) -> Option<RdAtomic> {
        match self {
            Provider::Rxe(_) => None,
            Provider::Mlx5(context) => Some(context.limits().rd_atomic),
        }
    }

    /// The number of a protection domain on the device; `None` where the driver tells none.
    pub(crate) fn pd_number(
        &self,
        kernel: &dyn Kernel,
        handle: u32,
    ) -> std::result::Result<Option<u32>, Errno> {
        match self {
            Provider::Rxe(_) => Ok(None),
            Provider::Mlx5(_) => mlx5::pd::number(kernel, handle).map(Some),
        }
    }

    /// Where device memory will be, once the kernel has allocated it.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` where the driver has none.
    pub(crate) fn device_memory(&self, verb: &'static str) -> Result<DmLocation> {
        match self {
            Provider::Rxe(_) => {
                Err(Error::new(verb, Errno::OPNOTSUPP).detail("rxe has no device memory"))
            }
            Provider::Mlx5(_) => Ok(DmLocation::default()),
        }
    }

    /// Where the device memory of a handle is, and how many bytes it has.
    ///
    /// # Errors
    ///
    /// As [`device_memory`](Self::device_memory), and those of the kernel.
    pub(crate) fn find_device_memory(
        &self,
        verb: &'static str,
        kernel: &dyn Kernel,
        handle: u32,
    ) -> Result<(DmLocation, u64)> {
        self.device_memory(verb)?;
        DmLocation::query(kernel, handle).map_err(|errno| Error::from_kernel(verb, errno))
    }

    /// What work requests need to know of an address handle.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` where the kernel does not tell.
    pub(crate) fn address(
        &self,
        verb: &'static str,
        attr: &ib_uverbs_ah_attr,
        link: LinkProtocol,
        response: &DriverResponse,
    ) -> Result<Address> {
        Ok(match self {
            Provider::Rxe(_) => rxe::ah::address(verb, response)?,
            Provider::Mlx5(_) => Address::Mlx5(mlx5::ah::vector(attr, link, response)),
        })
    }

    /// Creates a completion queue, which `execute` has the kernel do.
    pub(crate) fn create_cq<K>(
        &self,
        attr: CqInitAttr,
        source: Source<'_>,
        mapper: &dyn Mapper,
        execute: impl FnOnce(CreateRequest<'_>) -> Result<K>,
    ) -> Result<(K, CqRing)> {
        Ok(match self {
            Provider::Rxe(rxe) => {
                let (object, ring) = rxe::cq::create(rxe, attr, source.verb, mapper, execute)?;
                (object, CqRing::Rxe(ring))
            }
            Provider::Mlx5(mlx5) => {
                let (object, ring) = mlx5::cq::create(mlx5, attr, source, execute)?;
                (object, CqRing::Mlx5(ring))
            }
        })
    }

    /// Creates a queue pair, which `execute` has the kernel do.
    pub(crate) fn create_qp<K>(
        &self,
        attr: QpInitAttr<'_>,
        source: Source<'_>,
        kernel: &dyn Kernel,
        execute: impl FnOnce(CreateRequest<'_>) -> Result<K>,
    ) -> Result<(K, CreatedQp)> {
        match self {
            Provider::Rxe(rxe) => rxe::qp::create(rxe, attr, source.verb, kernel.mapper(), execute),
            Provider::Mlx5(mlx5) => mlx5::qp::create(mlx5, attr, source, kernel, execute),
        }
    }

    /// Creates an XRC target, which `execute` has the kernel do.
    pub(crate) fn create_target<K>(
        &self,
        verb: &'static str,
        execute: impl FnOnce(CreateRequest<'_>) -> Result<K>,
    ) -> Result<(K, CreatedTarget)> {
        match self {
            Provider::Rxe(_) => {
                Err(Error::new(verb, Errno::OPNOTSUPP).detail("soft-RoCE has no XRC targets"))
            }
            Provider::Mlx5(mlx5) => mlx5::qp::create_target(mlx5, verb, execute),
        }
    }

    /// Has `execute` change a queue pair together with the options of its connection, of which the driver gets the
    /// input and fills the output, and returns those that the device took.
    pub(crate) fn modify_qp_with_ece(
        &self,
        verb: &'static str,
        options: u32,
        execute: impl FnOnce(&[u8], &mut [u8]) -> Result<()>,
    ) -> Result<u32> {
        self.mlx5(verb)?;
        mlx5::qp::modify_with_ece(options, execute)
    }

    /// Creates a shared receive queue, which `execute` has the kernel do.
    pub(crate) fn create_srq<K>(
        &self,
        attr: SrqInitAttr,
        source: Source<'_>,
        mapper: &dyn Mapper,
        execute: impl FnOnce(CreateRequest<'_>) -> Result<K>,
    ) -> Result<(K, CreatedSrq)> {
        match self {
            Provider::Rxe(rxe) => rxe::rq::create_srq(rxe, attr, source.verb, mapper, execute),
            Provider::Mlx5(mlx5) => mlx5::srq::create(mlx5, attr, source, execute),
        }
    }

    /// A doorbell register for the queues of one thread domain.
    pub(crate) fn thread_register(
        &self,
        kernel: &dyn Kernel,
        verb: &'static str,
    ) -> Result<ThreadRegister> {
        match self {
            Provider::Rxe(_) => Ok(ThreadRegister::None),
            Provider::Mlx5(context) => {
                let lease = context.registers().for_thread(kernel);
                let lease = lease.map_err(|(errno, have)| no_register(verb, errno, have))?;
                Ok(ThreadRegister::Mlx5(lease))
            }
        }
    }

    /// Mlx5's part of the context, for what only it has.
    pub(crate) fn mlx5(&self, verb: &'static str) -> Result<&Arc<mlx5::Mlx5>> {
        match self {
            Provider::Mlx5(context) => Ok(context),
            Provider::Rxe(_) => {
                Err(Error::new(verb, Errno::OPNOTSUPP).detail("the device is not driven by mlx5"))
            }
        }
    }
}

fn no_register(verb: &'static str, errno: Errno, have: usize) -> Error {
    let why = match errno {
        Errno::NOSPC | Errno::NOMEM => "the device has no doorbell register left",
        _ => "no page of doorbell registers could be had",
    };
    Error::from_kernel(verb, errno)
        .detail(format!("{why}; thread domains of this context have {have}"))
}

/// The doorbell register of a thread domain.
#[derive(Debug)]
pub(crate) enum ThreadRegister {
    /// The doorbell is in the kernel.
    None,
    Mlx5(mlx5::uar::RegisterLease),
}

/// What packets of a port look like.
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
    /// Those of the peer, which the queue pair answers.
    pub(crate) answered: u32,
    /// Those that the queue pair sends.
    pub(crate) sent: u32,
    /// Whether the device has atomics at all.
    pub(crate) atomics: bool,
}

/// What a send queue takes, as the kernel returned it at creation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SendLimits {
    pub(crate) max_sge: u32,
    pub(crate) max_inline: u32,
}
