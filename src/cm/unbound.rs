//! Ids that have no address yet. Pairs with `ucma_create_id` and `ucma_set_option` in `core/ucma.c`.

use super::bound::BoundId;
use super::channel::EventChannel;
use super::id::IdInner;
use super::resolve_addr::ResolvingAddr;
use crate::error::{Error, Result};
use crate::qp::QpType;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use uverbs_uapi::rdma_user_cm as uapi;
use zerocopy::IntoBytes;

/// An id that is not bound to any address.
///
/// The steps of a connect, one by one. Each wait returns when its step has ended:
///
/// ```no_run
/// # fn f(qp: &uverbs::QueuePair) -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::Duration;
/// use uverbs::QpType;
/// use uverbs::cm::{
///     AddrResolved, ConnectParam, Connecting, EventChannel, Id, PortSpace, ResolvingAddr,
///     ResolvingRoute, RouteResolved,
/// };
///
/// let (channel, limit) = (EventChannel::open()?, Duration::from_secs(2));
/// let id: Id = channel.create_id(PortSpace::TCP, QpType::RC)?;
/// id.set_type_of_service(106)?;
/// id.set_ack_timeout(18)?;
/// let resolving: ResolvingAddr = id.resolve_addr(None, "10.0.0.2:7471".parse()?, limit)?;
/// let resolved: AddrResolved = resolving.wait(None)?.done()?;
/// println!("from {:?} by port {}", resolved.local_addr(), resolved.port());
/// let resolving: ResolvingRoute = resolved.resolve_route(limit)?;
/// let route: RouteResolved = resolving.wait(None)?.done()?;
/// println!("{:?} to {:?} by port {}", route.local_addr(), route.peer_addr(), route.port());
/// route.init_qp(qp)?;
/// let connecting: Connecting = route.connect(qp, &ConnectParam::new())?;
/// let connection = connecting.wait(None)?.done()?;
/// # drop(connection); Ok(()) }
/// ```
#[doc(alias("rdma_cm_id", "rdma_destroy_id"))]
#[derive(Debug)]
pub struct Id {
    pub(super) id: Arc<IdInner>,
}

impl Id {
    pub(super) fn new(id: Arc<IdInner>) -> Id {
        Id { id }
    }

    /// Sets the type of service; on RoCE v2 it goes into the IP header's field of that name.
    ///
    /// # Errors
    ///
    /// None is known.
    #[doc(alias("rdma_set_option", "RDMA_OPTION_ID_TOS"))]
    pub fn set_type_of_service(&self, tos: u8) -> Result<()> {
        self.set("set_type_of_service", uapi::RDMA_OPTION_ID_TOS, &[tos])
    }

    /// Whether other ids that set this, too, may bind the same port. Only one of them can listen.
    ///
    /// # Errors
    ///
    /// None is known.
    #[doc(alias("rdma_set_option", "RDMA_OPTION_ID_REUSEADDR"))]
    pub fn set_reuse_address(&self, reuse: bool) -> Result<()> {
        let value = i32::from(reuse);
        self.set("set_reuse_address", uapi::RDMA_OPTION_ID_REUSEADDR, value.as_bytes())
    }

    /// Whether a listener on `[::]` takes requests by IPv6 only. Otherwise it takes those by IPv4, too.
    ///
    /// # Errors
    ///
    /// None is known.
    #[doc(alias("rdma_set_option", "RDMA_OPTION_ID_AFONLY"))]
    pub fn set_af_only(&self, only: bool) -> Result<()> {
        self.set("set_af_only", uapi::RDMA_OPTION_ID_AFONLY, i32::from(only).as_bytes())
    }

    /// Sets the acknowledgement timeout of the queue pair: 4.096 µs · 2ⁿ. Unless set, the kernel derives it from the
    /// path.
    ///
    /// # Errors
    ///
    /// `EINVAL` if n is above 31, or the id is for queue pairs without acknowledgements: UC and UD.
    #[doc(alias("rdma_set_option", "RDMA_OPTION_ID_ACK_TIMEOUT"))]
    pub fn set_ack_timeout(&self, n: u8) -> Result<()> {
        const VERB: &str = "set_ack_timeout";
        if n > 31 {
            let detail = format!("an ack timeout of {n}; it has 5 bits, so that 31 is the maximum");
            return Err(Error::invalid(VERB, detail));
        }
        let waits = [QpType::RC, QpType::XRC_INI];
        if !waits.contains(&self.id.qp_type) {
            let detail =
                format!("queue pairs of type {} wait for no acknowledgement", self.id.qp_type);
            return Err(Error::invalid(VERB, detail));
        }
        self.set(VERB, uapi::RDMA_OPTION_ID_ACK_TIMEOUT, &[n])
    }

    fn set(&self, verb: &'static str, name: u32, value: &[u8]) -> Result<()> {
        self.id.set_option(verb, uapi::RDMA_OPTION_ID, name, value)
    }

    /// Binds the id to an address of this host; with port 0 the kernel chooses one. An unspecified
    /// address (`0.0.0.0`, `[::]`) stands for those of all devices.
    ///
    /// # Errors
    ///
    /// Any error destroys the id. `EADDRINUSE` if another id has the port, on this address or on all, `EADDRNOTAVAIL`
    /// if this host does not have the address, `ENODEV` if no RDMA device has it, `EACCES` for a port below 1024
    /// without `CAP_NET_BIND_SERVICE`.
    #[doc(alias = "rdma_bind_addr")]
    pub fn bind(self, address: SocketAddr) -> Result<BoundId> {
        self.id.bind(&address)?;
        Ok(BoundId { id: self.id })
    }

    /// Starts to resolve an address to a device and a neighbour; `from` is the local address of the connection.
    /// `timeout` limits the kernel's attempts.
    ///
    /// # Errors
    ///
    /// Any error destroys the id. `EINVAL` for addresses of two families, `ENETUNREACH` without an IP route, `ENODEV`
    /// if the route leads through no RDMA device. That is so of 127.0.0.1, `::1`, `0.0.0.0` and host names that stand
    /// for them; the kernel may report it only when the [route](super::AddrResolved::resolve_route) is resolved.
    #[doc(alias = "rdma_resolve_addr")]
    pub fn resolve_addr(
        self,
        from: Option<SocketAddr>,
        to: SocketAddr,
        timeout: Duration,
    ) -> Result<ResolvingAddr> {
        self.id.resolve_addr(from.as_ref(), &to, timeout)?;
        Ok(ResolvingAddr { id: self.id })
    }

    /// Moves the id to another channel, for example that of another thread. Moving it to its own channel does nothing.
    ///
    /// # Errors
    ///
    /// Any error destroys the id. `EACCES` after a change of credentials.
    #[doc(alias = "rdma_migrate_id")]
    pub fn migrate(self, to: &EventChannel) -> Result<Id> {
        if Arc::ptr_eq(&self.id.channel, &to.inner) {
            return Ok(self);
        }
        let id = self.id.migrate(&to.inner)?;
        to.inner.register("migrate_id", &id)?;
        Ok(Id { id })
    }
}
