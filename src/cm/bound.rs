//! Ids that are bound to an address of this host. Pairs with `ucma_bind` in `core/ucma.c`.

use super::address::{Encoded, encode};
use super::address_error::explain_bind;
use super::id::{IdInner, local_addr};
use super::listen::ListeningId;
use super::multicast::{JoiningMulticast, MulticastRole};
use super::port_space::PortSpace;
use super::resolve_addr::ResolvingAddr;
use super::step::Step;
use super::ucma::UcmaCommand;
use crate::context::Context;
use crate::error::Result;
use crate::qp::QpControl;
use rustix::io::Errno;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;
use uverbs_uapi::rdma_user_cm as uapi;

/// An id that has an address of this host.
///
/// Bind an address of this host, and then listen there or connect from there:
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::Duration;
/// use uverbs::QpType;
/// use uverbs::cm::{BoundId, EventChannel, Id, PortSpace};
///
/// let channel = EventChannel::open()?;
/// let id = channel.create_id(PortSpace::TCP, QpType::RC)?;
/// // Options that have to be set before the bind: reuse of the port, and no IPv4 on an IPv6 wildcard.
/// id.set_reuse_address(true)?;
/// id.set_af_only(true)?;
/// // The id moves to another channel, which then has its events.
/// let id: Id = id.migrate(&EventChannel::open()?)?;
/// let bound: BoundId = id.bind("[::]:7471".parse()?)?;
/// println!("bound to {}", bound.local_addr()?);
/// let listening = bound.listen(64)?;
/// while let Some(request) = listening.next_request(Some(Duration::from_secs(1)))? {
///     request.reject(&[])?;
/// }
///
/// let from: BoundId = channel.create_id(PortSpace::TCP, QpType::RC)?.bind("10.0.0.1:0".parse()?)?;
/// let resolving = from.resolve_addr("10.0.0.2:7471".parse()?, Duration::from_secs(2))?;
/// # drop(resolving); Ok(()) }
/// ```
#[derive(Debug)]
pub struct BoundId {
    pub(super) id: Arc<IdInner>,
}

impl BoundId {
    /// The address, with the port that the kernel chose if 0 was asked for.
    ///
    /// # Errors
    ///
    /// `ENXIO` if the device is gone.
    #[doc(alias = "rdma_get_local_addr")]
    pub fn local_addr(&self) -> Result<SocketAddr> {
        local_addr(&self.id)
    }

    /// Starts to listen. 0, and numbers above the sysctl `net.rdma_ucm.max_backlog`, mean that maximum, usually 1024.
    ///
    /// At most `backlog` connect requests wait to be read from the channel; the kernel drops others, and the peer's
    /// kernel sends them again for a while. A thread that reads the channel, for any id, moves the requests to the
    /// listener, where again at most `backlog` of them wait to be taken. Further ones are rejected, as if the program
    /// had dropped a [`ConnectRequest`], and [counted](ListeningId::overflows). A request whose peer gave up waits,
    /// too, until the program takes it.
    ///
    /// A program can listen on an address of the loopback interface, for example 127.0.0.1, but no peer can connect to
    /// it: no RDMA device is there. Listen on the address of an RDMA device, or on `0.0.0.0` or `[::]` for those of
    /// all.
    ///
    /// # Errors
    ///
    /// Any error destroys the id. `EADDRINUSE` if another id listens on the port; both set
    /// [`set_reuse_address`](super::Id::set_reuse_address).
    ///
    /// [`ConnectRequest`]: super::ConnectRequest
    #[doc(alias = "rdma_listen")]
    pub fn listen(self, backlog: u32) -> Result<ListeningId> {
        self.id.listen(backlog)?;
        Ok(ListeningId::new(self.id))
    }

    /// The context of the device that has the address; see
    /// [`EventChannel::use_context`](super::EventChannel::use_context).
    ///
    /// # Errors
    ///
    /// `ENODEV` for an unspecified address, which belongs to no device; as [`Context::open`](crate::Context::open).
    pub fn context(&self) -> Result<Context> {
        const VERB: &str = "bind_addr";
        self.id.channel.context(VERB, self.id.query(VERB)?.device(VERB)?)
    }

    /// Starts to join a multicast group by the device that has the id's address, for a queue pair of type UD. A queue
    /// pair in `RESET` or `INIT` is brought to `RTS`, from `RESET` with [`DATAGRAM_QKEY`](super::DATAGRAM_QKEY); past
    /// `INIT` it stays as it is. The id may join any number of groups.
    ///
    /// # Errors
    ///
    /// `EINVAL` for an address that is no multicast address, an id for queue pairs of another type than UD, or a queue
    /// pair of another type than UD, on another device or in `ERR`; `ENODEV` if the
    /// id is bound to an unspecified address; error number 524 for an IPv6 group on RoCE v2, which the kernel does
    /// not join.
    #[doc(alias("rdma_join_multicast", "rdma_join_multicast_ex"))]
    pub fn join_multicast(
        &self,
        qp: &QpControl,
        group: IpAddr,
        role: MulticastRole,
    ) -> Result<JoiningMulticast> {
        const VERB: &str = JoiningMulticast::VERB;
        self.id.check_datagram(VERB, true)?;
        self.id.query(VERB)?.device(VERB)?.check(VERB, qp.context().device())?;
        JoiningMulticast::begin(&self.id, qp, group, role)
    }

    /// As [`Id::resolve_addr`](super::Id::resolve_addr), from the address that the id is bound to.
    ///
    /// # Errors
    ///
    /// As [`Id::resolve_addr`](super::Id::resolve_addr); `EINVAL` for an id that is bound to an address of another
    /// family.
    pub fn resolve_addr(self, to: SocketAddr, timeout: Duration) -> Result<ResolvingAddr> {
        self.id.resolve_addr(None, &to, timeout).map_err(|error| match error.errno() {
            Errno::INVAL => error.detail(format!(
                "the id is bound to an address of another family than that of {to}"
            )),
            // `resolve_addr` has explained it.
            _ => error,
        })?;
        Ok(ResolvingAddr { id: self.id })
    }
}

impl IdInner {
    pub(super) fn bind(&self, address: &SocketAddr) -> Result<()> {
        const VERB: &str = "bind_addr";
        self.bind_raw(VERB, encode(address)).map_err(|error| match error.errno() {
            Errno::INVAL if self.space == PortSpace::IPOIB => error.detail(format!(
                "the port space IPOIB is on InfiniBand only, and {address} is not"
            )),
            _ => explain_bind(error, address, &self.channel.platform),
        })
    }

    pub(super) fn bind_raw(&self, verb: &'static str, address: Encoded) -> Result<()> {
        let (addr, addr_size) = address;
        let request =
            uapi::rdma_ucm_bind { id: self.number(), addr_size, addr, ..Default::default() };
        self.execute(verb, UcmaCommand::new(uapi::RDMA_USER_CM_CMD_BIND, &request))
    }
}
