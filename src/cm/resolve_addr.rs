//! Ids whose address is being resolved to a device and a neighbour, or was. Pairs with `ucma_resolve_addr` in
//! `core/ucma.c`.

use super::address::{Encoded, STORAGE, encode};
use super::address_error::{explain_bind, no_device};
use super::event::Event;
use super::id::{IdInner, Path};
use super::multicast::{JoiningMulticast, MulticastRole};
use super::resolve_route::ResolvingRoute;
use super::step::{Progress, Step, wait};
use super::ucma::UcmaCommand;
use crate::context::Context;
use crate::error::{Error, Result};
use crate::qp::QpControl;
use rustix::io::Errno;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;
use uverbs_uapi::rdma_user_cm as uapi;
use uverbs_uapi::rdma_user_cm::rdma_cm_event_type as Type;

/// An id whose address is being resolved.
#[derive(Debug)]
pub struct ResolvingAddr {
    pub(super) id: Arc<IdInner>,
}

impl ResolvingAddr {
    /// Waits until the address is resolved, for at most `timeout`, or without a limit for `None`; a timeout of zero
    /// polls once.
    ///
    /// # Errors
    ///
    /// Any error destroys the id. `ETIMEDOUT` if no neighbour answered, `ENODEV` if the
    /// address leads through no RDMA device, `EHOSTUNREACH`.
    pub fn wait(self, timeout: Option<Duration>) -> Result<Progress<Self, AddrResolved>> {
        wait(self, timeout)
    }
}

impl Step for ResolvingAddr {
    type Next = AddrResolved;
    type Error = Error;
    const VERB: &'static str = "resolve_addr";

    fn id(&self) -> &IdInner {
        &self.id
    }

    fn advance(self, event: Event) -> Result<AddrResolved> {
        if event.kind != Type::RDMA_CM_EVENT_ADDR_RESOLVED {
            return Err(self.id.failure(Self::VERB, &event).into());
        }
        let path = self.id.query(Self::VERB)?;
        Ok(AddrResolved { id: self.id, path })
    }
}

/// An id whose address is resolved: its device is known.
#[derive(Debug)]
pub struct AddrResolved {
    pub(super) id: Arc<IdInner>,
    pub(super) path: Path,
}

impl AddrResolved {
    /// The context of the id's device; see
    /// [`EventChannel::use_context`](super::EventChannel::use_context).
    ///
    /// # Errors
    ///
    /// As [`Context::open`](crate::Context::open).
    pub fn context(&self) -> Result<Context> {
        self.id.channel.context("resolve_addr", self.path.device("resolve_addr")?)
    }

    /// The port of the device, counted from 1.
    pub fn port(&self) -> u32 {
        self.path.port
    }

    /// The address of this end.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.path.local
    }

    /// Starts to join a multicast group, as [`BoundId::join_multicast`](super::BoundId::join_multicast). If the
    /// resolved address is the group's own, the IP route to the group chooses the device.
    ///
    /// ```no_run
    /// # fn f(channel: &uverbs::cm::EventChannel) -> Result<(), Box<dyn std::error::Error>> {
    /// use std::net::{IpAddr, SocketAddr};
    /// use std::time::Duration;
    /// use uverbs::cm::{AddrResolved, MulticastRole, PortSpace};
    /// use uverbs::{Destination, QpType, SendWr};
    ///
    /// let group: IpAddr = "239.1.2.3".parse()?;
    /// let id = channel.create_id(PortSpace::UDP, QpType::UD)?;
    /// let resolving = id.resolve_addr(None, SocketAddr::new(group, 0), Duration::from_secs(2))?;
    /// let resolved: AddrResolved = resolving.wait(None)?.done()?;
    /// let context = resolved.context()?;
    /// let (pd, cq) = (context.alloc_pd()?, context.cq_builder(16).build()?);
    /// let mut qp = pd.qp_builder(&cq, &cq, QpType::UD).max_inline_data(16).build()?;
    /// let joining = resolved.join_multicast(&qp, group, MulticastRole::SendOnly)?;
    /// let member = joining.wait(None)?.done()?;
    ///
    /// let ah = pd.create_ah(member.address())?;
    /// let to = Destination::new(&ah, member.qpn(), member.qkey());
    /// let mut batch = qp.send_batch()?;
    /// batch.push(SendWr::send(&[]).inline(b"hello, all").to(to))?;
    /// // SAFETY: an inline request names no memory.
    /// unsafe { batch.ring()? };
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`BoundId::join_multicast`](super::BoundId::join_multicast).
    #[doc(alias("rdma_join_multicast", "rdma_join_multicast_ex"))]
    pub fn join_multicast(
        &self,
        qp: &QpControl,
        group: IpAddr,
        role: MulticastRole,
    ) -> Result<JoiningMulticast> {
        const VERB: &str = JoiningMulticast::VERB;
        self.id.check_datagram(VERB, true)?;
        self.path.device(VERB)?.check(VERB, qp.context().device())?;
        JoiningMulticast::begin(&self.id, qp, group, role)
    }

    /// Starts to resolve the route. On InfiniBand the kernel asks the subnet administrator.
    ///
    /// # Errors
    ///
    /// Any error destroys the id. `ENXIO` if the device is gone; `ENODEV` for an address of the loopback interface,
    /// which belongs to no RDMA device; `EAGAIN` on InfiniBand without a subnet manager.
    #[doc(alias = "rdma_resolve_route")]
    pub fn resolve_route(self, timeout: Duration) -> Result<ResolvingRoute> {
        self.id.resolve_route(timeout)?;
        Ok(ResolvingRoute { id: self.id, path: self.path })
    }
}

impl IdInner {
    pub(super) fn resolve_raw(
        &self,
        verb: &'static str,
        (src_addr, src_size): Encoded,
        (dst_addr, dst_size): Encoded,
        timeout: Duration,
    ) -> Result<()> {
        let request = uapi::rdma_ucm_resolve_addr {
            id: self.number(),
            timeout_ms: milliseconds(timeout),
            src_size,
            dst_size,
            reserved: 0,
            src_addr,
            dst_addr,
        };
        self.execute(verb, UcmaCommand::new(uapi::RDMA_USER_CM_CMD_RESOLVE_ADDR, &request))
    }

    pub(super) fn resolve_addr(
        &self,
        from: Option<&SocketAddr>,
        to: &SocketAddr,
        timeout: Duration,
    ) -> Result<()> {
        const VERB: &str = "resolve_addr";
        if let Some(from) = from.filter(|from| from.is_ipv4() != to.is_ipv4()) {
            let detail = format!("{from} and {to} are addresses of different families");
            return Err(Error::invalid(VERB, detail));
        }
        let source = from.map_or(([0; STORAGE], 0), encode);
        self.resolve_raw(VERB, source, encode(to), timeout).map_err(|error| {
            match (error.errno(), from) {
                (
                    Errno::ADDRINUSE | Errno::ADDRNOTAVAIL | Errno::NODEV | Errno::ACCESS,
                    Some(from),
                ) => explain_bind(error, from, &self.channel.platform),
                (Errno::NODEV, None) => error.detail(no_device(to)),
                (Errno::NETUNREACH | Errno::HOSTUNREACH, _) => {
                    error.detail(format!("the IP routing table has no route to {to}"))
                }
                (_, Some(from)) => {
                    error.context(|| format!("the kernel does not resolve {to} from {from}"))
                }
                (_, None) => error.context(|| format!("the kernel does not resolve {to}")),
            }
        })
    }
}

/// A timeout in the kernel's unit, milliseconds. At least 1, as 0 would mean no wait at all.
pub(super) fn milliseconds(timeout: Duration) -> u32 {
    // The kernel keeps the number in an int.
    let longest = i32::MAX as u32;
    u32::try_from(timeout.as_millis()).unwrap_or(longest).clamp(1, longest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_fit_into_the_kernels_int() {
        assert_eq!(milliseconds(Duration::ZERO), 1);
        assert_eq!(milliseconds(Duration::from_millis(2000)), 2000);
        assert_eq!(milliseconds(Duration::MAX), i32::MAX as u32);
    }
}
